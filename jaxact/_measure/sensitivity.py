"""How much rounding each residual adds to the whole gradient, by trying."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxact._bits.cost import Sensitivity
from jaxact._compress import compress
from jaxact._decision import Decision
from jaxact._engine.storage import BackwardProgram, Packed, Probe
from jaxact._jaxpr.types import Array, PyTree
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

    def store(
        self, decision: Decision, x: jax.Array, seed: jax.Array, setting: jax.Array
    ) -> jax.Array:
        codec = decision.codec
        rounded = codec.decode(codec.encode(x, seed), x.shape, x.dtype)
        return jnp.where(setting != 0, rounded, x)

    def restore(self, packed: Packed) -> jax.Array:
        return packed.arrays

    def measure(
        self,
        program: BackwardProgram,
        packed: Sequence[Packed],
        decoded: list[jax.Array],
        cotangents: list[jax.Array],
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        zero = jnp.zeros((), jnp.float32)
        return program(decoded, cotangents), [zero for _ in packed]


def sensitivity(
    loss_fn: Callable[..., PyTree],
    *args: PyTree,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    policy: Policy | None = None,
    draws: int = 2,
    key: jax.Array | None = None,
    **kwargs: PyTree,
) -> Sensitivity:
    """Measure the error that rounding each residual adds to a loss's gradient.

    For each residual of the compressed calls in `loss_fn`, all others are kept exact
    and the gradient g^ is computed `draws` times, each with other rounding noise::

        variance(b) = mean ||g^ - g||^2    at the bits b that its policy gives it

    (GACT, Liu et al. 2022, arXiv:2206.11357, section 4, which takes 3 gradients at 1
    and 8 bits with the others rounded too). This is one forward and one backward pass
    for each residual and draw, in one compiled program that holds two gradients. It
    works for any architecture and includes bias, and the noise that earlier layers
    pass on.

    Nothing is changed: other results from `loss_fn` are dropped, and NNX modules among
    the arguments stay as they are. A small batch will do (GACT: 8).

    Args:
      loss_fn: the loss.
      *args: its arguments.
      **kwargs: its keyword arguments.
      argnums: arguments to differentiate, as for `jax.grad`; an NNX module stands for
        its parameters.
      has_aux: whether `loss_fn` returns (loss, anything).
      policy: compress `loss_fn` itself with this.
      draws: with 2, a residual's variance is known to about 1 / sqrt(2 n), n being the
        number of independent errors in its gradient: usually far below 10 %.
      key: JAX PRNG key for the rounding; draws with the same key are the same.

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
    rounded = census(flat, values, active)
    if not rounded:
        raise ValueError(
            "jaxact.sensitivity: nothing in the loss is stored rounded. Compress its "
            "layers with jaxact.compress, or give a policy to compress all of it; "
            "see jaxact.residuals."
        )
    keys = [r.key for r in rounded]

    def loss(
        weights: Sequence[jax.Array],
        values: Sequence[jax.Array],
        probe: Probe,
        seed: Array,
    ) -> jax.Array:
        inputs = with_active(values, active, weights)
        out = rebuild(evaluate_instrumented(Switch(), flat, inputs, probe, seed))
        return _scalar(call.result(out), has_aux)

    @jax.jit
    def measure(
        values: list[jax.Array], seeds: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        def gradient(switches: jax.Array, seed: Array) -> list[jax.Array]:
            probe = dict(zip(keys, switches, strict=True))
            return jax.grad(loss)(active_of(values, active), values, probe, seed)

        exact = gradient(jnp.zeros(len(keys)), np.uint32(0))

        def error(number: jax.Array) -> jax.Array:
            rounded_key, draw = number // draws, number % draws
            switches = (jnp.arange(len(keys)) == rounded_key).astype(jnp.float32)
            return _distance(gradient(switches, seeds[draw]), exact)

        errors = lax.map(error, jnp.arange(len(keys) * draws))
        zeros = jax.tree.map(jnp.zeros_like, exact)
        return _distance(exact, zeros), errors.reshape(len(keys), draws).mean(1)

    key = jax.random.key(0) if key is None else key
    seeds = jax.random.bits(key, (draws,), jnp.uint32)
    signal, errors = measure(values, seeds)
    rows = [
        r.cost(float(e), float(signal)) for r, e in zip(rounded, errors, strict=True)
    ]
    return Sensitivity(tuple(rows), float(signal))


def _distance(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> jax.Array:
    """Squared norm of the difference, over all arrays."""
    total = jnp.zeros((), jnp.float32)
    for x, y in zip(a, b, strict=True):
        total += jnp.sum(jnp.square(jnp.abs(x.astype(jnp.float32) - y)))
    return total


def _scalar(loss: PyTree, has_aux: bool) -> PyTree:
    loss = loss[0] if has_aux else loss
    is_real = is_array(loss) and jnp.issubdtype(loss.dtype, jnp.floating)
    if not is_real or loss.shape != ():
        kind = jax.typeof(loss) if is_array(loss) else type(loss).__name__
        raise TypeError(
            f"jaxact.sensitivity: a loss that is a real scalar is required, not {kind}."
            " For a function that returns (loss, anything) say has_aux=True."
        )
    return loss
