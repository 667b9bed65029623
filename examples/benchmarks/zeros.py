"""Zero-value compression behind ReLU, as a codec beside the product's own.

  python examples/benchmarks/zeros.py --save    two minutes of CPU
  python examples/benchmarks/zeros.py --small

Zero-value compression (Rhu et al., HPCA 2018; in AC-GC's largest ratios) keeps one bit
for each element and codes for those that are not zero. It pays where a ReLU's output is
stored. That is so without norms, as in VDSR (Kim et al., CVPR 2016): eight convolutions
here, which learn super-resolution of drawn shapes. After a norm jaxact stores the
normalized value, for the norm, the ReLU and the next layer; that has no zeros.

Arrays have static shapes in XLA: the codes have room for a fixed share of a row. A row
with more elements keeps some of them, at random and without bias, and scales them up.
`--save` writes results/zeros.json beside this file.
"""

import argparse
import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from drawn_tasks import coarse, draw
from environment import environment
from jax.flatten_util import ravel_pytree
from rich.console import Console
from rich.table import Table
from runs import variance

import jaxact
from jaxact import Policy, Quantize, Rule

RESULTS = Path(__file__).parent / "results" / "zeros.json"
ROW = 4096  # elements that share the room for codes
SPARE = 1.1  # room, over the share of elements that were not zero
BITS = 1, 2, 4
DRAWS = 8
Params = list[jax.Array]


@dataclass(frozen=True)
class NonZero(jaxact.Codec[Any]):
    """A bit for each element, and codes for a share of them: those that are not zero.

    Attributes:
      codec: of the codes.
      share: of a row's elements, for which there is room.
    """

    codec: Quantize
    share: float

    bias = jaxact.Bias.UNBIASED

    @property
    def bits(self) -> float:
        return 1 + self.share * self.codec.bits

    @property
    def label(self) -> str:
        return f"zeros, {self.codec.label}"

    @property
    def room(self) -> int:
        """Codes of a row."""
        return math.ceil(self.share * ROW)

    def encode(self, x: jax.Array, seed: jax.Array) -> Any:
        flat = x.reshape(-1)
        rows = jnp.pad(flat, (0, -flat.size % ROW)).reshape(-1, ROW)
        start = jax.random.uniform(jax.random.key(seed), (len(rows), 1))
        is_kept, place, rate = thinned(rows != 0, self.room, start)
        place = jnp.where(is_kept, place, self.room)  # out of range: dropped
        codes = jnp.zeros((len(rows), self.room), x.dtype)
        each = jnp.arange(len(rows))[:, None]
        codes = codes.at[each, place].set(rows, mode="drop") / rate
        mask = jaxact.Bitmask().encode(is_kept, seed)
        return mask, self.codec.encode(codes.astype(x.dtype), seed)

    def decode(self, stored: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        mask, codes = stored
        size = math.prod(shape)
        num_rows = math.ceil(size / ROW)
        is_kept = jaxact.Bitmask().decode(mask, (num_rows, ROW), jnp.bool_)
        codes = self.codec.decode(codes, (num_rows, self.room), dtype)
        place = jnp.maximum(jnp.cumsum(is_kept, axis=1) - 1, 0)
        values = jnp.take_along_axis(codes, place, axis=1)
        rows = jnp.where(is_kept, values, jnp.zeros_like(values))
        return rows.reshape(-1)[:size].reshape(shape)


def thinned(
    mask: jax.Array, room: int, start: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """At most `room` true elements of each row, every one with the same chance.

    Systematic sampling: steps of `rate` along the true elements from a random `start`
    in [0, 1); one is kept where a whole number is passed.

    Returns:
      The elements that are kept, their numbers in the row, and the chance.
    """
    after = jnp.cumsum(mask, axis=1).astype(jnp.float32)
    rate = jnp.minimum(1, room / jnp.maximum(after[:, -1:], 1))
    place = jnp.floor((after - 1) * rate + start).astype(jnp.int32)
    passed = jnp.floor(after * rate + start).astype(jnp.int32) > place
    return mask & passed & (place < room), place, rate


def layers(params: Params, x: jax.Array) -> list[jax.Array]:
    """The outputs of all layers; a ReLU behind each but the last."""
    found: list[jax.Array] = []
    for number, w in enumerate(params):
        x = jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x) if number + 1 < len(params) else x
        found.append(x)
    return found


def network(params: Params, x: jax.Array) -> jax.Array:
    return layers(params, x)[-1]


def initial(width: int, depth: int) -> Params:
    sizes = [3, *[width] * (depth - 1), 3]
    keys = jax.random.split(jax.random.key(0), depth)
    make = jax.nn.initializers.he_normal()
    pairs = zip(keys, sizes, sizes[1:], strict=False)
    return [make(key, (3, 3, before, after)) for key, before, after in pairs]


def batch_of(seed: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Images from a quarter of the pixels, and what they lack."""
    images = jnp.asarray(draw(size, seed).images)
    return coarse(images), images - coarse(images)


Network = Callable[[Params, jax.Array], jax.Array]


def gradient_of(net: Network, params: Params, x: jax.Array, y: jax.Array) -> Params:
    return jax.grad(lambda params: jnp.square(net(params, x) - y).mean())(params)


def trained(params: Params, steps: int, size: int) -> Params:
    optimizer = optax.adam(1e-3)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Params, state: Any, x: jax.Array, y: jax.Array) -> Any:
        updates, state = optimizer.update(gradient_of(network, params, x, y), state)
        return optax.apply_updates(params, updates), state

    for number in range(steps):
        params, state = step(params, state, *batch_of(number, size))
    return params


def compare(depth: int, width: int, steps: int, size: int) -> dict[str, Any]:
    """The share of elements that are not zero, by layer, and a row for each codec."""
    params = trained(initial(width, depth), steps, size)
    batches = [batch_of(steps + number, size) for number in range(DRAWS)]
    behind = layers(params, batches[0][0])[:-1]
    shares = [float((x != 0).mean()) for x in behind]
    exact = jax.jit(functools.partial(gradient_of, network))
    between = variance(flat(exact(params, *batch)) for batch in batches)
    plain = jaxact.compress(network, activations="x")
    table = jaxact.residuals(plain, params, batches[0][0], argnums=0)
    keys = [row.key for row in table.rows if row.primitive == "max"]
    rows = []
    for bits in BITS:
        room = [min(1, SPARE * share) for share in shares]
        ways: list[list[jaxact.Codec]] = [
            [Quantize(bits)] * len(room),
            [jaxact.Adaptive(bits)] * len(room),
            [NonZero(Quantize(bits), share) for share in room],
        ]
        for codecs in ways:
            pairs = zip(codecs, keys, strict=True)
            rules = tuple(Rule(codec, key=key) for codec, key in pairs)
            net = jaxact.compress(network, policy=Policy(rules=rules), activations="x")
            noise = rounding(net, params, *batches[0]) / between
            found = stored(net, params, batches[0][0])
            rows.append({"codec": codecs[0].label, "noise": noise, **found})
    return {"shares": shares, "rows": rows}


def rounding(net: Network, params: Params, x: jax.Array, y: jax.Array) -> float:
    """The variance that rounding adds to one batch's gradient."""

    @jax.jit
    def gradient(key: jax.Array, *arguments: Any) -> Params:
        return gradient_of(functools.partial(net, rounding_key=key), *arguments)

    keys = jax.random.split(jax.random.key(1), DRAWS)
    return variance(flat(gradient(key, params, x, y)) for key in keys)


def flat(tree: Params) -> np.ndarray:
    return np.asarray(ravel_pytree(tree)[0], np.float64)


def stored(net: Network, params: Params, x: jax.Array) -> dict[str, float]:
    """Bits for each element behind a ReLU.

    `bits` are with the ReLU's own mask, which the backward pass reads. A `NonZero`
    repeats that: `bits_once` are without.
    """
    rows = jaxact.residuals(net, params, x, argnums=0).rows
    size = sum(8 * row.stored_bytes for row in rows if row.key != "x")
    masks = sum(math.prod(row.shape) for row in rows if row.dtype == np.bool_)
    repeated = masks if any(isinstance(row.action, NonZero) for row in rows) else 0
    return {"bits": size / masks, "bits_once": (size - repeated) / masks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="results/zeros.json")
    parser.add_argument("--small", action="store_true", help="a toy, in seconds")
    options = parser.parse_args()
    sizes = (3, 8, 2, 2) if options.small else (8, 32, 200, 16)
    found = compare(*sizes)
    table = Table(title=f"{sizes[0]} convolutions, {sizes[2]} steps")
    for title in ("", "bits", "mask once", "noise over that of batches"):
        table.add_column(title, justify="right" if table.columns else "left")
    for row in found["rows"]:
        bits = f"{row['bits']:.2f}", f"{row['bits_once']:.2f}"
        table.add_row(row["codec"], *bits, f"{row['noise']:.2g}")
    console = Console()
    console.print(table)
    shares = ", ".join(f"{share:.0%}" for share in found["shares"])
    console.print(f"not zero, by layer: {shares}")
    if options.save:
        content = json.dumps(environment() | found, indent=1)
        RESULTS.write_text(content + "\n")


if __name__ == "__main__":
    main()
