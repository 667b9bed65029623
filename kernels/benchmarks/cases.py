"""What is timed: an implementation of an operation, and arrays that it is called on."""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import naive
import numpy as np
import shapes
from formats import Format
from jax import lax

from jaxact_kernels import choose, index, mask

SEED = 7


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One thing to time; `function` maps an element of `inputs` to an output."""

    op: str
    implementation: str
    function: Callable[[Any], Any]
    inputs: list[Any]
    is_chosen: bool = False

    @functools.cached_property
    def chain(self) -> Any:
        """Compiled calls, one on each of the inputs."""
        return jax.jit(chained(self.function)).lower(self.inputs).compile()

    @property
    def output_bytes(self) -> int:
        """Bytes in all the chain's outputs."""
        one = jax.eval_shape(self.function, self.inputs[0])
        return num_bytes(one) * len(self.inputs)


def chained(function: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
    """Call on one input after the other; XLA may neither join nor reorder the calls."""

    def run(inputs):
        outputs = []
        for x in inputs:
            if outputs:
                x, outputs[-1] = lax.optimization_barrier((x, outputs[-1]))
            outputs.append(function(x))
        return outputs

    return run


def samples_of(activation: shapes.Activation, count: int) -> list[jax.Array]:
    """Arrays of ordinary numbers, each with its own."""
    shape, dtype = activation.shape, jnp.dtype(activation.dtype)
    draw = jax.jit(lambda key: jax.random.normal(key, shape, dtype))
    return [draw(key) for key in jax.random.split(jax.random.key(SEED), count)]


def with_special_values(x: jax.Array) -> jax.Array:
    """Put a NaN, infinities, a constant and the largest numbers in some groups."""
    flat = x.reshape(-1)
    largest = float(jnp.finfo(x.dtype).max)
    for start, value in enumerate((np.nan, np.inf, -np.inf, largest, -largest)):
        flat = flat.at[700 * start].set(value)
    return flat.at[-2000:].set(3.25).reshape(x.shape)


def implementations(operation: Any) -> dict[str, bool]:
    """Implementations that run here, by name, and whether each is the one chosen."""
    chosen = choose(operation).implementation
    names = {}
    for name in (*operation.kernels(), "reference"):
        try:
            choose(operation, implementation=name)
        except NotImplementedError as reason:
            _say_once(str(reason))
            continue
        names[name] = name == chosen
    return names


@functools.cache
def _say_once(message: str) -> None:
    print(f"  {message}", file=sys.stderr, flush=True)


def implemented(
    op: str, operation: Any, function: Callable[..., Any], inputs: list[Any]
) -> list[Case]:
    """A case for each implementation of an operation that runs here."""
    return [
        Case(op, name, functools.partial(function, implementation=name), inputs, chosen)
        for name, chosen in implementations(operation).items()
    ]


def encoders(
    form: Format, activation: shapes.Activation, bits: float, inputs: list[tuple]
) -> list[Case]:
    """Cases whose inputs are (array, seed)."""
    operation, _ = form.operations(activation, bits)
    cases = implemented("encode", operation, form.encode(bits), inputs)
    if form.name != "affine":
        return cases
    fused = functools.partial(naive.fused_encode, bits=bits)
    cases.append(Case("encode", "fused XLA", _applied(fused), inputs))
    if 32 % bits == 0:
        first = functools.partial(naive.encode, bits=bits)
        cases.append(Case("encode", "naive", _applied(first), inputs))
    return cases


def decoders(
    form: Format, activation: shapes.Activation, bits: float, stored: dict
) -> list[Case]:
    _, operation = form.operations(activation, bits)
    decode = form.decode(activation, bits)
    cases = implemented("decode", operation, decode, stored["reference"])
    if "naive" in stored:
        array = {"shape": activation.shape, "dtype": jnp.dtype(activation.dtype)}
        first = functools.partial(naive.decode, **array, bits=bits)
        cases.append(Case("decode", "naive", first, stored["naive"]))
    return cases


def lossless(activation: shapes.Activation, xs: list[Any]) -> list[list[Case]]:
    """Masks, also from comparisons, and two-bit indices, shaped like `xs`."""
    shape, boolean, int8 = activation.shape, np.dtype("bool"), np.dtype("int8")
    positive = [jax.jit(lambda x: x > 0)(x) for x in xs]
    indices = [jax.jit(lambda x: (x * 4).astype(np.int8) & 3)(x) for x in xs]
    packed_mask = [jax.jit(mask.encode)(x) for x in positive]
    encode = functools.partial(index.encode, bits=2)
    packed = [jax.jit(encode)(x) for x in indices]
    decode = functools.partial(index.decode, shape=shape, dtype=int8, bits=2)
    above = functools.partial(mask.encode, above=0)
    compare = mask.Encode(shape, jnp.dtype(activation.dtype), is_comparison=True)
    of_mask = functools.partial(mask.decode, shape=shape)
    return [
        implemented("mask encode", mask.Encode(shape, boolean), mask.encode, positive),
        implemented("mask encode above 0", compare, above, xs),
        implemented("mask decode", mask.Decode(shape, boolean), of_mask, packed_mask),
        implemented("index encode", index.Encode(shape, int8, 2), encode, indices),
        implemented("index decode", index.Decode(shape, int8, 2), decode, packed),
    ]


def num_bytes(tree: Any) -> int:
    """Bytes in all arrays of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _applied(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda arguments, **options: function(*arguments, **options)
