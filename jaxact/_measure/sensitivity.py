"""How much the rounding of each residual adds to the whole gradient, by trying."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxact._bits.cost import Sensitivity
from jaxact._compress import compress
from jaxact._decision import Decision
from jaxact._measure.census import census
from jaxact._measure.instrument import Instrument, evaluate_instrumented
from jaxact._modules.pure import pure_call
from jaxact._plan.forward import active_of, with_active
from jaxact._policy import Policy
from jaxact._trace import is_array


@dataclasses.dataclass(frozen=True)
class Switch(Instrument):
    """Rounds the residuals whose setting is not 0; the others stay exact.

    A setting is a float32 scalar. Its cotangent is 0.
    """

    def encode(
        self, decision: Decision, x: jax.Array, seed: jax.Array, setting: jax.Array
    ) -> Any:
        codec = decision.codec
        rounded = codec.decode(codec.encode(x, seed), x.shape, x.dtype)
        return jnp.where(setting != 0, rounded, x)

    def decode(
        self, decision: Decision, stored: Any, shape: tuple[int, ...], dtype: Any
    ) -> jax.Array:
        return stored

    def backward(
        self,
        run: Callable[..., list[Any]],
        decoded: list[Any],
        stored: list[Any],
        cotangents: list[Any],
    ) -> tuple[list[Any], list[jax.Array]]:
        zero = jnp.zeros((), jnp.float32)
        return run(decoded, cotangents), [zero for _ in decoded]


def sensitivity(
    loss_fn: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    policy: Policy | None = None,
    draws: int = 2,
    key: jax.Array | None = None,
    **kwargs: Any,
) -> Sensitivity:
    """Measure what the rounding of each residual adds to the gradient of a loss.

    For each residual of the compressed calls in `loss_fn`, all others are kept exact
    and the gradient g^ is computed `draws` times, each with other rounding noise::

        variance(b) = mean ||g^ - g||^2    at the bits b that its policy gives it

    (GACT, Liu et al. 2022, arXiv:2206.11357, section 4, which takes 3 gradients at 1
    and 8 bits with the others rounded too). This is one forward and one backward pass
    for each residual and draw, in one compiled program that holds two gradients. Any
    architecture, and how noise goes on through earlier layers is in it, and bias too.

    Nothing is changed: what `loss_fn` returns beside the loss is dropped, and NNX
    modules among the arguments stay as they are. A small batch will do (GACT: 8).

    Args:
      loss_fn: the loss.
      *args: its arguments.
      **kwargs: its keyword arguments.
      argnums: arguments to differentiate, as for `jax.grad`; of NNX modules these are
        the parameters.
      has_aux: whether `loss_fn` returns (loss, anything).
      policy: compress `loss_fn` itself with this.
      draws: with 2, a residual's variance is known to about 1 / sqrt(2 n), n being how
        many independent errors its gradient sums over: usually far below 10 %.
      key: JAX PRNG key of the rounding; draws with the same key are the same.

    Returns:
      A `Sensitivity`; residuals that share a key (calls of the same path) share a row.

    Raises:
      TypeError: the loss is not a real scalar.
      ValueError: nothing in `loss_fn` is stored rounded; argnums out of range.
    """
    if policy is not None:
        loss_fn = compress(loss_fn, policy=policy)
    call = pure_call(loss_fn, args, kwargs)
    flat, values, rebuild = call.trace()
    active = call.differentiated(values, argnums)
    found = census(flat, values, active)
    if not found:
        raise ValueError(
            "jaxact.sensitivity: nothing in the loss is stored rounded. Compress its "
            "layers with jaxact.compress, or give a policy to compress all of it with; "
            "see jaxact.residuals."
        )
    keys = [r.key for r in found]

    def loss(some: Sequence[Any], values: Sequence[Any], probe: Any, seed: Any) -> Any:
        full = with_active(values, active, some)
        out = rebuild(evaluate_instrumented(Switch(), flat, full, probe, seed))
        return _scalar(call.result(out), has_aux)

    @jax.jit
    def measure(values: Any, seeds: jax.Array) -> tuple[jax.Array, jax.Array]:
        def gradient(switches: jax.Array, seed: Any) -> Any:
            probe = dict(zip(keys, switches, strict=True))
            return jax.grad(loss)(active_of(values, active), values, probe, seed)

        exact = gradient(jnp.zeros(len(keys)), np.uint32(0))

        def error(number: jax.Array) -> jax.Array:
            one, draw = number // draws, number % draws
            switches = (jnp.arange(len(keys)) == one).astype(jnp.float32)
            return _distance(gradient(switches, seeds[draw]), exact)

        errors = lax.map(error, jnp.arange(len(keys) * draws))
        zeros = jax.tree.map(jnp.zeros_like, exact)
        return _distance(exact, zeros), errors.reshape(len(keys), draws).mean(1)

    key = jax.random.key(0) if key is None else key
    seeds = jax.random.bits(key, (draws,), jnp.uint32)
    signal, errors = measure(values, seeds)
    rows = [r.cost(float(e), float(signal)) for r, e in zip(found, errors, strict=True)]
    return Sensitivity(tuple(rows), float(signal))


def _distance(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> jax.Array:
    """Squared norm of the difference, over all arrays."""
    total = jnp.zeros((), jnp.float32)
    for x, y in zip(a, b, strict=True):
        total += jnp.sum(jnp.square(jnp.abs(x.astype(jnp.float32) - y)))
    return total


def _scalar(loss: Any, has_aux: bool) -> Any:
    loss = loss[0] if has_aux else loss
    is_real = is_array(loss) and jnp.issubdtype(loss.dtype, jnp.floating)
    if not is_real or loss.shape != ():
        what = jax.typeof(loss) if is_array(loss) else type(loss).__name__
        raise TypeError(
            f"jaxact.sensitivity: a loss that is a real scalar is required, not {what}."
            " For a function that returns (loss, anything) say has_aux=True."
        )
    return loss
