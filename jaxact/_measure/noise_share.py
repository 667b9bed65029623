"""Rounding's noise beside that between batches."""

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jaxact._codec.checks import checked_int, checked_key, checked_number
from jaxact._engine.warnings import CompressionWarning
from jaxact._jaxpr.types import PyTree
from jaxact._saved import Saved
from jaxact._trace import is_inexact
from jaxact._written_as import written_as


@dataclasses.dataclass(frozen=True)
class NoiseShare(Saved):
    """Two variances, each summed over a gradient's elements: `print` it.

    Attributes:
      rounding: one batch's, from rounding residuals.
      batches: between batches, for exact gradients; 0 where it is too small to be seen
        beside `rounding`.
    """

    rounding: float
    batches: float

    @property
    def share(self) -> float:
        """Rounding's variance over that between batches."""
        return self.rounding / self.batches if self.batches else float("inf")

    def __str__(self) -> str:
        if not self.batches:
            return (
                f"rounding adds a variance of {self.rounding:.3g} to the gradient, and "
                "none between batches is seen beside it"
            )
        return (
            f"rounding adds {self.share:.2g} times the variance between batches to the "
            f"gradient ({self.rounding:.3g} and {self.batches:.3g})"
        )


@written_as("noise_share(gradient, [first, second])")
def noise_share(
    gradient: Callable[[PyTree, jax.Array], PyTree],
    batches: Iterable[PyTree],
    *,
    draws: int = 2,
    limit: float = 0.1,
    key: jax.Array | None = None,
) -> NoiseShare:
    """Compare rounding's noise with that between batches, and warn above 10 %.

    Stochastic gradients are noisy as they are, and the two variances add (ActNN, Chen
    et al. 2021, arXiv:2104.14129, theorem 2): the second hides one that is far smaller.
    With gradients g[i, j] for batches i and keys j, n keys each::

        rounding = mean_i var_j g[i, j]
        batches  = var_i mean_j g[i, j] - rounding / n

    Three gradients are held. With 8 batches the share is known to about a half of it,
    at worst.

    Args:
      gradient: (batch, rounding key) -> gradients; a jitted one is compiled once.
      batches: two or more, as large as in training.
      draws: gradients for each batch.
      limit: a larger share is warned about.
      key: JAX PRNG key for the rounding.

    Returns:
      A `NoiseShare`.

    Raises:
      TypeError: `gradient` is no function, `batches` are none, or `key` is none.
      ValueError: fewer than two batches or draws; a batch's gradients are the same at
        all keys.

    Example:
      >>> import jax, jax.numpy as jnp, jaxact
      >>> layer = jaxact.compress(lambda w, x: jnp.tanh(x @ w), activations="x")
      >>> loss = lambda w, x, key: (layer(w, x, rounding_key=key) ** 2).mean()
      >>> w = jax.random.normal(jax.random.key(0), (64, 64)) / 8
      >>> batches = jax.random.normal(jax.random.key(1), (8, 32, 64))
      >>> gradient = jax.jit(lambda x, key: jax.grad(loss)(w, x, key))
      >>> jaxact.noise_share(gradient, batches).share < 0.05
      True
    """
    call = "jaxact.noise_share"
    draws = checked_int(
        draws,
        range(2, 1 << 20),
        f"{call}(draws={draws!r}): an integer of two or more is required, such as 2.",
    )
    limit = checked_number(
        limit,
        lambda x: x >= 0,
        f"{call}(limit={limit!r}): a share of at least 0 is required, such as 0.1.",
    )
    if not callable(gradient) or not isinstance(batches, Iterable):
        raise TypeError(
            f"{call}({type(gradient).__name__}, {type(batches).__name__}): a function "
            "of (batch, rounding key) that gives gradients, and several batches are "
            "required: noise_share(gradient, [first, second])."
        )
    _require_two_arguments(gradient)
    key = jax.random.key(0) if key is None else checked_key(f"{call}: key=", key)
    within, between = 0.0, _Spread()
    for number, batch in enumerate(batches):
        keys = jax.random.split(jax.random.fold_in(key, number), draws)
        one = _Spread()
        for each in keys:
            one.add(gradient(batch, each))
        within += one.variance
        between.add(one.mean)
    if between.count < 2:
        raise ValueError(
            f"jaxact.noise_share: {between.count} batches; two are required."
        )
    if not within:
        raise ValueError(
            "jaxact.noise_share: a batch's gradients are the same at all keys. "
            "Nothing is rounded with them: pass the key on to the compressed calls, "
            "as layer(..., rounding_key=key) or as a Flax stream named jaxact."
        )
    rounding = within / between.count
    found = NoiseShare(rounding, max(0.0, between.variance - rounding / draws))
    if found.share > limit:
        equal = "" if found.batches else " Are the batches the same? If not:"
        warnings.warn(
            f"jaxact: {found}; the limit is {limit:g}.{equal} Use more bits, or give "
            "them to the residuals that need them: jaxact.allocate.",
            CompressionWarning,
            stacklevel=3,
        )
    return found


def _require_two_arguments(gradient: Callable[..., PyTree]) -> None:
    try:
        signature = inspect.signature(gradient)
    except (TypeError, ValueError):  # builtins have no signature
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise TypeError(
            "jaxact.noise_share: gradient is called with (batch, rounding key): write "
            "lambda batch, key: jax.grad(loss)(params, batch, rounding_key=key)."
        ) from None


class _Spread:
    """The mean and the variance of gradients, one after the other (Welford 1962)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: list[jax.Array] = []
        self.squares = 0.0

    def add(self, gradient: PyTree) -> None:
        leaves = [_wide(x) for x in jax.tree.leaves(gradient) if is_inexact(x)]
        self.count += 1
        before = self.mean or [jnp.zeros_like(x) for x in leaves]
        self.mean, squares = _advance(before, leaves, self.count)
        self.squares += float(squares)

    @property
    def variance(self) -> float:
        return self.squares / (self.count - 1)


def _wide(x: jax.Array) -> jax.Array:
    return jnp.asarray(x, np.promote_types(jnp.result_type(x), np.float32))


@jax.jit
def _advance(
    mean: list[jax.Array], leaves: list[jax.Array], count: int
) -> tuple[list[jax.Array], jax.Array]:
    after = [m + (x - m) / count for m, x in zip(mean, leaves, strict=True)]
    parts = (
        jnp.sum(jnp.real((x - m) * jnp.conj(x - a)))
        for m, x, a in zip(mean, leaves, after, strict=True)
    )
    return after, sum(parts, jnp.zeros(()))
