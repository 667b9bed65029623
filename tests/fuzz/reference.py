"""The plain program: JAX's own values, gradients, and how well rounding errors let
them be known.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fuzz.evaluate import evaluate, randomly_rounded
from fuzz.programs import Program

RUNS = 3  # with random rounding errors


class Discarded(Exception):
    """JAX's own gradient is no yardstick for this program."""


@dataclasses.dataclass(frozen=True)
class Plain:
    """The plain program's outputs and gradients.

    Attributes:
      rounded: the gradients of runs with random rounding errors.
      num_sums: how often two gradients are added.
    """

    f: Callable[..., Any]
    args: list[jax.Array]
    cotangents: list[jax.Array]
    outputs: list[jax.Array]
    gradients: list[jax.Array]
    rounded: list[list[jax.Array]]
    num_sums: int


def with_gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    def run(args: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        outputs, pullback = jax.vjp(f, *args)
        return list(outputs), list(pullback(tuple(cotangents)))

    return run


def _cotangent(rng: np.random.Generator, like: Any) -> jax.Array:
    ct = rng.standard_normal(like.shape)
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        ct = ct + 1j * rng.standard_normal(like.shape)
    return jnp.asarray(ct, like.dtype)


def plain(program: Program) -> Plain:
    """Evaluate the plain program.

    Raises:
      Discarded: JAX's gradient is not finite, zero, or dominated by rounding errors.
    """
    f, args = program.function(), program.values()
    rng = np.random.default_rng([program.seed, 1])
    cotangents = [_cotangent(rng, o) for o in jax.eval_shape(f, *args)]
    try:
        closed = jax.make_jaxpr(with_gradient(f))(args, cotangents)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise Discarded(f"no gradient: {error}") from error
    inputs = [*args, *cotangents]
    n = len(cotangents)
    results = evaluate(closed, inputs)
    if not all(np.isfinite(wide(r)).all() for r in results):
        raise Discarded("not finite")
    runs = [randomly_rounded(closed, inputs, i)[n:] for i in range(RUNS)]
    size = norm(results[n:])
    if size == 0:
        raise Discarded("no gradient")
    spread = max(distance(run, results[n:]) for run in runs)
    if not spread < 0.1 * size:
        raise Discarded(f"rounding errors of {spread / size:.2g} of the gradient")
    num_sums = str(closed).count(" add_any ")
    return Plain(f, args, cotangents, results[:n], results[n:], runs, num_sums)


def wide(x: Any) -> np.ndarray:
    """As float64 numbers, the parts of complex ones side by side."""
    x = np.asarray(x)
    if np.iscomplexobj(x):
        return np.stack([x.real, x.imag], -1).astype(np.float64)
    return x.astype(np.float64)


def norm(xs: Sequence[Any]) -> float:
    return float(np.sqrt(sum((wide(x) ** 2).sum() for x in xs)))


def distance(xs: Sequence[Any], ys: Sequence[Any]) -> float:
    pairs = zip(xs, ys, strict=True)
    return float(np.sqrt(sum(((wide(x) - wide(y)) ** 2).sum() for x, y in pairs)))


def differing(xs: Sequence[Any], ys: Sequence[Any], signs: bool = True) -> list[str]:
    """Where arrays do not have the same bits; NaNs are equal, zeros unless `signs`."""
    found = []
    for n, (x, y) in enumerate(zip(xs, ys, strict=True)):
        if x.shape != y.shape or x.dtype != y.dtype:
            found.append(f"{n}: {x.dtype}{x.shape} for {y.dtype}{y.shape}")
            continue
        a, b = wide(x), wide(y)
        same_sign = (np.signbit(a) == np.signbit(b)) | (not signs)
        equal = (a == b) & same_sign | np.isnan(a) & np.isnan(b)
        if not equal.all():
            off = np.abs(a - b).max() / max(np.abs(b).max(), 1e-300)
            found.append(
                f"{n}: {(~equal).sum()} of {a.size} differ, by {off:.2g} of max"
            )
    return found
