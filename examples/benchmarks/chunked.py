"""Attention in chunks of queries: recomputed or compressed, compiled for a GPU.

  python examples/benchmarks/chunked.py --save    half a minute; --length 2048: shorter

One layer of attention over 8192 tokens (16 heads of 64, bfloat16), its gradient
compiled for an H100, none attached: pip install "jaxact[targets]". Scores are computed
for 1024 queries at a time, as where no fused kernel is at hand. Nothing runs. `--save`
writes results/chunked.json beside this file.
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
from environment import environment
from jax import lax

import jaxact

RESULTS = Path(__file__).parent / "results" / "chunked.json"
HEADS, WIDTH, CHUNKS = 16, 64, 8
Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Of queries [t, h, d] to keys and values [s, h, d]."""
    scores = jnp.einsum("thd,shd->hts", q, k) / WIDTH**0.5
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(q.dtype)
    return jnp.einsum("hts,shd->thd", weights, v)


def in_chunks(attend: Attention) -> Attention:
    """The same, for some of the queries at a time."""

    def chunked(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        chunks = q.reshape(CHUNKS, -1, *q.shape[1:])
        return lax.map(lambda chunk: attend(chunk, k, v), chunks).reshape(q.shape)

    return chunked


def compressed(bits: int) -> Attention:
    return jaxact.compress(
        attention, policy=jaxact.Policy(bits), activations=("q", "k", "v")
    )


WAYS = {
    "whole": attention,
    "in chunks": in_chunks(attention),
    "jax.checkpoint of each chunk": in_chunks(jax.checkpoint(attention)),
    "4 bits of each chunk": in_chunks(compressed(4)),
    "2 bits of each chunk": in_chunks(compressed(2)),
}


def gradient(attend: Attention) -> Callable[..., jax.Array]:
    """The gradient of a layer by its input."""

    def loss(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        heads = (x @ weights[0]).reshape(len(x), 3, HEADS, WIDTH)
        out = attend(*(heads[:, i] for i in range(3)))
        y = x + out.reshape(x.shape) @ weights[1]
        return jnp.mean(y.astype(jnp.float32) ** 2)

    return jax.grad(loss)


def compare(length: int, target: str | None) -> jaxact.Comparison:
    """The ways side by side."""
    shaped = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    width = HEADS * WIDTH
    weights = shaped((width, 3 * width)), shaped((width, width))
    steps = {name: gradient(attend) for name, attend in WAYS.items()}
    return jaxact.compare(steps, weights, shaped((length, width)), target=target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=8192, help="tokens")
    parser.add_argument("--target", default="h100", help="'' compiles for this device")
    parser.add_argument("--save", action="store_true", help="write the results")
    options = parser.parse_args()
    found = compare(options.length, options.target or None)
    print(found)
    if options.save:
        rows = found.to_dict()["rows"]
        for row in rows:
            del row["at_peak"]
        content = environment() | {"length": options.length, "rows": rows}
        RESULTS.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
