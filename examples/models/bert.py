"""BERT's encoder in plain jax.numpy, as sentence encoders keep it (Devlin et al. 2018).

A block is post-LN: attention, add, norm, a GELU network, add, norm. Parameters have the
names of Hugging Face's checkpoints (type `bert`), without their prefix.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Layer = dict[str, jax.Array]
Block = Callable[[Layer, jax.Array, jax.Array], jax.Array]

QKV = tuple(f"attention.self.{name}" for name in ("query", "key", "value"))
OUT, UP, DOWN = "attention.output.dense", "intermediate.dense", "output.dense"
NORMS = "attention.output.LayerNorm", "output.LayerNorm"
EMBEDDINGS = "word_embeddings", "position_embeddings", "token_type_embeddings"


@dataclass(frozen=True)
class Bert:
    """The shape of the network; `length`: the most tokens of a sentence."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    length: int

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Parameters of normal noise with deviation 0.02, as BERT's were."""
        keys = iter(jax.random.split(key, 6 * self.layers + 3))
        noise = lambda *shape: 0.02 * jax.random.normal(next(keys), shape)
        sizes = {name: (self.width, self.width) for name in (*QKV, OUT)}
        sizes |= {UP: (self.width, self.hidden), DOWN: (self.hidden, self.width)}

        def plain(name: str) -> Layer:
            ones, zeros = jnp.ones(self.width), jnp.zeros(self.width)
            return {f"{name}.weight": ones, f"{name}.bias": zeros}

        def layer() -> Layer:
            found = plain(NORMS[0]) | plain(NORMS[1])
            for name, (inputs, outputs) in sizes.items():
                found[f"{name}.weight"] = noise(inputs, outputs)
                found[f"{name}.bias"] = jnp.zeros(outputs)
            return found

        counts = self.vocabulary, self.length, 2
        tables = {
            n: noise(k, self.width) for n, k in zip(EMBEDDINGS, counts, strict=True)
        }
        return {
            "embeddings": tables | plain("LayerNorm"),
            "layers": [layer() for _ in range(self.layers)],
        }

    def block(self, p: Layer, x: jax.Array, is_token: jax.Array) -> jax.Array:
        """One layer; x: [batch, length, width], is_token: bool [batch, length]."""
        heads = lambda name: dense(p, name, x).reshape(
            *x.shape[:2], self.heads, self.width // self.heads
        )
        q, k, v = map(heads, QKV)
        scores = (
            jnp.einsum("bqhd,bkhd->bhqk", q, k) * (self.width // self.heads) ** -0.5
        )
        scores = jnp.where(is_token[:, None, None], scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        x = norm(p, NORMS[0], x + dense(p, OUT, mixed.reshape(x.shape)))
        hidden = jax.nn.gelu(dense(p, UP, x), approximate=False)
        return norm(p, NORMS[1], x + dense(p, DOWN, hidden))

    def embed(
        self,
        params: dict[str, Any],
        tokens: jax.Array,
        is_token: jax.Array,
        block: Block | None = None,
    ) -> jax.Array:
        """A sentence's vector, the mean over its tokens: float32 [batch, width]."""
        tables = params["embeddings"]
        words, places, kinds = (tables[name] for name in EMBEDDINGS)
        x = words[tokens] + places[: tokens.shape[1]] + kinds[0]
        x = norm(tables, "LayerNorm", x)
        for layer in params["layers"]:
            x = (block or self.block)(layer, x, is_token)
        weights = is_token / is_token.sum(1, keepdims=True)
        return jnp.einsum("bt,btd->bd", weights.astype(x.dtype), x)


def dense(p: Mapping[str, jax.Array], name: str, x: jax.Array) -> jax.Array:
    return x @ p[f"{name}.weight"] + p[f"{name}.bias"]


def norm(p: Mapping[str, jax.Array], name: str, x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    x = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-12)
    return x * p[f"{name}.weight"] + p[f"{name}.bias"]


def from_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> tuple[Bert, dict[str, Any]]:
    """The network that a checkpoint's config describes, and its parameters.

    Raises:
      ValueError: another kind of network.
    """
    if config["model_type"] != "bert" or config["hidden_act"] != "gelu":
        raise ValueError(
            f"got a {config['model_type']} with {config['hidden_act']}; a bert with "
            "gelu is required."
        )
    net = Bert(
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        heads=config["num_attention_heads"],
        hidden=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        length=config["max_position_embeddings"],
    )

    def under(prefix: str, names: Mapping[str, Any]) -> dict[str, jax.Array]:
        # Hugging Face stores a map as [outputs, inputs].
        is_map = lambda name: name.endswith(".weight") and "LayerNorm" not in name
        read = lambda name: tensors[prefix + name]
        return {
            name: jnp.asarray(read(name).T if is_map(name) else read(name))
            for name in names
        }

    shapes = jax.eval_shape(net.init, jax.random.key(0))
    tables = {n: jnp.asarray(tensors[f"embeddings.{n}.weight"]) for n in EMBEDDINGS}
    norms = [n for n in shapes["embeddings"] if n not in EMBEDDINGS]
    return net, {
        "embeddings": tables | under("embeddings.", dict.fromkeys(norms)),
        "layers": [
            under(f"encoder.layer.{i}.", layer)
            for i, layer in enumerate(shapes["layers"])
        ],
    }
