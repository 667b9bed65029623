"""How much rounding each residual adds to the whole gradient, by trying."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxact._bits.cost import Sensitivity
from jaxact._codec.checks import checked_int, checked_key
from jaxact._compress import compress
from jaxact._decision import Decision
from jaxact._engine.storage import BackwardProgram, Packed
from jaxact._flat import Flat
from jaxact._jaxpr.evaluate import is_traced
from jaxact._jaxpr.types import PyTree
from jaxact._measure.census import census
from jaxact._measure.instrument import Instrument, evaluate_instrumented, restored
from jaxact._measure.progress import progress
from jaxact._modules.pure import first_of, pure_call
from jaxact._plan.forward import active_of, with_active
from jaxact._policy import Policy, checked_policy
from jaxact._trace import is_array
from jaxact._written_as import written_as


@dataclasses.dataclass(frozen=True)
class Switch(Instrument):
    """Rounds the residuals whose setting is not 0; the others stay exact.

    A setting is a float32 scalar. Its cotangent is 0.
    """

    def store(
        self, decision: Decision, x: jax.Array, seed: jax.Array, setting: jax.Array
    ) -> jax.Array:
        decoded = restored(decision, x, decision.codec.encode(x, seed))
        return jnp.where(setting != 0, decoded, x)

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


@written_as("sensitivity(loss, params, batch)")
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
    for each residual and draw, of one compiled program; two gradients are held. It
    works for any architecture and includes bias, and the noise that earlier layers
    pass on. Another call with an equal loss and equal shapes compiles nothing.

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
      TypeError: the loss is not a real scalar; has_aux and it returns no (loss,
        anything); key is none; an argument is a `jax.ShapeDtypeStruct`, or traced.
      ValueError: nothing in `loss_fn` is stored rounded; argnums out of range; draws
        not a positive integer.
    """
    draws = checked_int(
        draws,
        range(1, 1 << 20),
        f"sensitivity(draws={draws!r}): a positive integer is required, such as 2.",
    )
    key = jax.random.key(0) if key is None else checked_key("sensitivity: key=", key)
    if policy is not None:
        checked = checked_policy("jaxact.sensitivity(policy=", policy)
        loss_fn = compress(loss_fn, policy=checked)
    call = pure_call(loss_fn, args, kwargs)
    flat, values, rebuild = call.trace()
    _require_arrays(values)
    active = call.differentiated(values, argnums)
    rounded = census(flat, values, active)
    if not rounded:
        raise ValueError(
            "jaxact.sensitivity: nothing in the loss is stored rounded. Compress its "
            "layers with jaxact.compress, or give a policy to compress all of it; "
            "see jaxact.residuals."
        )
    outputs: list[Any] = _outputs(flat)
    program = _Gradient(
        flat.first_alike,
        tuple(active),
        tuple(r.key for r in rounded),
        _position(call.result(rebuild(outputs)), outputs, has_aux),
    )
    seeds = jax.random.bits(key, (draws,), jnp.uint32)
    settings = jnp.eye(len(rounded), dtype=jnp.float32)
    none = jnp.zeros(len(rounded), jnp.float32)
    exact = _gradient(program, values, none, seeds[0])
    signal = float(_size(exact))
    rows = []
    for i, residual in enumerate(progress(rounded, "rounding each residual")):
        gradients = (_gradient(program, values, settings[i], seed) for seed in seeds)
        errors = [float(_distance(gradient, exact)) for gradient in gradients]
        rows.append(residual.cost(sum(errors) / draws, signal))
    return Sensitivity(tuple(rows), signal)


def _require_arrays(values: Sequence[object]) -> None:
    """Refuse shapes and tracers in place of arrays: the loss is to be evaluated."""
    if is_traced(values):
        raise TypeError(
            "sensitivity: it was called inside jax.jit, or another transformation, and "
            "arrays are required, as the loss is evaluated. Call it outside; "
            "jaxact.telemetry measures inside a step."
        )
    for x in values:
        if isinstance(x, jax.ShapeDtypeStruct):
            raise TypeError(
                f"sensitivity: a jax.ShapeDtypeStruct of {x.dtype}{list(x.shape)} was "
                "given, and arrays are required, as the loss is evaluated. A table "
                "without it is jaxact.residuals(loss, ...)."
            )


@dataclasses.dataclass(frozen=True)
class _Gradient:
    """A gradient to compile; equal for equal losses, so that JAX finds it again.

    Attributes:
      active: whether each value is differentiated.
      keys: of the residuals that a setting rounds.
      position: the loss's among the outputs.
    """

    flat: Flat
    active: tuple[bool, ...]
    keys: tuple[str, ...]
    position: int


@functools.partial(jax.jit, static_argnums=0)
def _gradient(
    program: _Gradient, values: list[jax.Array], settings: jax.Array, seed: jax.Array
) -> list[jax.Array]:
    """The gradient with the residuals rounded whose setting is not 0."""
    probe = dict(zip(program.keys, settings, strict=True))

    def loss(weights: Sequence[jax.Array]) -> jax.Array:
        inputs = with_active(values, program.active, weights)
        flat = program.flat
        outputs = evaluate_instrumented(Switch(), flat, inputs, probe, seed)
        return outputs[program.position]

    return jax.grad(loss)(active_of(values, program.active))


@jax.jit
def _distance(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> jax.Array:
    """Squared norm of the difference, over all arrays."""
    total = jnp.zeros((), jnp.float32)
    for x, y in zip(a, b, strict=True):
        wide = np.promote_types(x.dtype, np.float32)
        size = jnp.sum(jnp.square(jnp.abs(x.astype(wide) - y.astype(wide))))
        total += size.astype(jnp.float32)
    return total


@jax.jit
def _size(gradient: Sequence[jax.Array]) -> jax.Array:
    return _distance(gradient, jax.tree.map(jnp.zeros_like, gradient))


def _outputs(flat: Flat) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in flat.jaxpr.outvars
    ]


def _position(
    loss: PyTree, outputs: Sequence[jax.ShapeDtypeStruct], has_aux: bool
) -> int:
    """Which of the outputs the loss is, given the user's result with them in it."""
    loss = first_of(loss, "sensitivity") if has_aux else loss
    is_real = is_array(loss) and jnp.issubdtype(loss.dtype, jnp.floating)
    if not is_real or loss.shape != ():
        kind = f"{loss.dtype}{list(loss.shape)}" if is_array(loss) else type(loss)
        raise TypeError(
            f"jaxact.sensitivity: a loss that is a real scalar is required, not {kind}."
            " For a function that returns (loss, anything) say has_aux=True."
        )
    return next(i for i, x in enumerate(outputs) if x is loss)
