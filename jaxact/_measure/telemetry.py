"""The noise that rounding adds to the gradients, measured while a step runs."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxact._bits.cost import Sensitivity
from jaxact._decision import Decision
from jaxact._engine.storage import BackwardProgram, Packed
from jaxact._flat import Flat
from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.types import Array, PyTree, Shape
from jaxact._measure.census import Rounded, census
from jaxact._measure.instrument import Instrument, evaluate_instrumented, restored
from jaxact._measure.noise import Noise, evaluate_with_noise
from jaxact._modules.pure import pure_call
from jaxact._trace import is_inexact
from jaxact._written_as import written_as

# Upper limit for a ratio between noise and signal, where one draw leaves no signal.
LARGEST = 100.0
# The rounding's variance is averaged over at least as many elements.
POOL = 256


@dataclasses.dataclass(frozen=True)
class NoiseGauge(Instrument):
    """Rounds as the policy says and measures the noise in the gradients.

    A setting is (added, signal), float32[2]; going in it is not read.
    """

    def store(
        self, decision: Decision, x: jax.Array, seed: jax.Array, setting: jax.Array
    ) -> tuple[PyTree, jax.Array]:
        stored = decision.codec.encode(x, seed)
        error = restored(decision, x, stored) - x
        squares = jnp.square(jnp.abs(error).astype(jnp.float32))
        return stored, jnp.mean(squares, axis=_pooled(x.shape), keepdims=True)

    def restore(self, packed: Packed) -> jax.Array:
        stored, _ = packed.arrays
        like = packed.like
        return packed.decision.codec.decode(stored, like.shape, like.dtype)

    def measure(
        self,
        program: BackwardProgram,
        packed: Sequence[Packed],
        decoded: list[jax.Array],
        cotangents: list[jax.Array],
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        jaxpr, consts = open_jaxpr(jax.make_jaxpr(program)(decoded, cotangents))
        inputs = jax.tree.leaves((decoded, cotangents))
        variances = {i: residual.arrays[1] for i, residual in enumerate(packed)}
        outputs, noise = evaluate_with_noise(
            jaxpr,
            consts,
            inputs,
            variances,
            cotangents=range(len(decoded), len(inputs)),
        )
        return outputs, [_pair(noise[i]) for i in variances]


def _pair(noise: Noise | None) -> jax.Array:
    if noise is None:
        return jnp.zeros(2, jnp.float32)
    # The gradient has the error in it already: E ||g + error||^2 = ||g||^2 + added.
    return jnp.stack([noise.added, noise.signal - noise.added])


def _pooled(shape: Shape) -> tuple[int, ...]:
    """Trailing axes to average over, never the first: samples differ."""
    axes: list[int] = []
    for axis in reversed(range(1, len(shape))):
        if math.prod(shape[a] for a in axes) >= POOL:
            break
        axes.append(axis)
    return tuple(axes)


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class NoiseReport:
    """The noise that rounding adds to the gradients, by residual.

    A pytree whose arrays are the probe that `telemetry` functions take (zeros) and the
    measurement that comes back as its cotangent, for one step or summed over several.

    Attributes:
      values: (added, signal), float32[2], by `Residual.key`: the expected squared norm
        of the error that rounding the residual adds to the arrays that the backward
        pass computes from it next, and their squared norm without the error. Zeros
        where it is not known.
      residuals: the measured residuals.
    """

    values: dict[str, jax.Array]
    residuals: tuple[Rounded, ...]

    def tree_flatten_with_keys(self) -> tuple[PyTree, tuple[Rounded, ...]]:
        return [(jax.tree_util.GetAttrKey("values"), self.values)], self.residuals

    @classmethod
    def tree_unflatten(
        cls, residuals: tuple[Rounded, ...], children: Sequence[PyTree]
    ) -> "NoiseReport":
        return cls(children[0], residuals)

    @property
    def relative(self) -> dict[str, float]:
        """Added over signal, for the residuals where it is known; synchronizes."""
        ratios = {}
        for key, pair in self.values.items():
            added, signal = (float(x) for x in np.asarray(pair))
            if added or signal:
                # One draw of a gradient that is mostly noise may leave no signal.
                ratios[key] = added / max(signal, added / LARGEST)
        return ratios

    def sensitivity(self) -> Sensitivity:
        """The measurement, for reading and for `jaxact.allocate`.

        A residual's variance is relative to the signal at its own targets, and the
        table's signal is the number of residuals: `allocate(..., e2=e2)` bounds the
        mean noise that a residual adds to its own layer's gradients.
        """
        relative = self.relative
        known = [r for r in self.residuals if r.key in relative]
        unknown = tuple(r.key for r in self.residuals if r.key not in relative)
        rows = tuple(r.cost(relative[r.key], 1.0) for r in known)
        return Sensitivity(rows, float(len(rows)), unknown)

    def follow(self, then: "NoiseReport", measured: Sensitivity) -> Sensitivity:
        """The sensitivity that `jaxact.sensitivity` would measure now, estimated.

        The noise that a layer passes on to earlier ones is taken to have grown as its
        own, which is measured anew.

        Args:
          then: the telemetry at the time when `measured` was, at any bits.
          measured: the sensitivity then.
        """
        now, before = (
            {row.key: row.variance for row in noise.sensitivity().rows}
            for noise in (self, then)
        )
        rows = []
        for row in measured.rows:
            known = row.key in now and before.get(row.key, 0) > 0
            growth = now[row.key] / before[row.key] if known else 1.0
            rows.append(dataclasses.replace(row, variance=row.variance * growth))
        return dataclasses.replace(measured, rows=tuple(rows))

    def __str__(self) -> str:
        if not self.residuals:
            return (
                "nothing is stored rounded: compress the layers, see jaxact.residuals"
            )
        table = self.sensitivity()
        return str(_NoiseTable(table.rows, table.signal, table.unmeasured))


class _NoiseTable(Sensitivity):
    """A report's table, which says how to measure the residuals that it lacks."""

    def summary(self) -> str:
        how = "not measured (differentiate the parameters too: argnums=(0, 1)):"
        return super().summary().replace("not measured:", how, 1)


@dataclasses.dataclass(frozen=True)
class Telemetry:
    """A function that measures its residuals' noise when it is differentiated."""

    fn: Callable[..., PyTree]

    def probe(self, *args: PyTree, **kwargs: PyTree) -> NoiseReport:
        """Zeros for a call with these arguments (or `jax.ShapeDtypeStruct`).

        They are for the residuals that such a call rounds, under the policy that counts
        here. Made inside a step, beside its gradient, a probe is for that step.
        """
        flat, values, _ = pure_call(self.fn, args, kwargs).trace()
        rounded = _rounded(flat, values)
        return NoiseReport({r.key: jnp.zeros(2, jnp.float32) for r in rounded}, rounded)

    def __call__(self, probe: NoiseReport, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """`fn(*args, **kwargs)`; its derivative by `probe` is the noise.

        Raises:
          TypeError: the first argument is no probe.
          ValueError: the probe is for other shapes, or was made under another policy.
        """
        if not isinstance(probe, NoiseReport):
            raise TypeError(
                f"jaxact.telemetry: the first argument is {type(probe).__name__}, and "
                "a probe is required: write measured = telemetry(loss), probe = "
                "measured.probe(params, batch), then jax.grad(measured, argnums=(0, 1))"
                "(probe, params, batch)."
            )
        call = pure_call(self.fn, args, kwargs)
        flat, values, rebuild = call.trace()
        _require_same(probe.residuals, _rounded(flat, values))
        out = evaluate_instrumented(NoiseGauge(), flat, values, probe.values)
        return call.write_back(rebuild(out))


def _rounded(flat: Flat, values: Sequence[Array]) -> tuple[Rounded, ...]:
    """The residuals that a call rounds, whatever of it is differentiated."""
    return census(flat, values, [is_inexact(v) for v in values])


def _require_same(probe: Sequence[Rounded], call: Sequence[Rounded]) -> None:
    """Refuse a probe that would report another call's bits."""
    of_probe, of_call = ({r.key: r for r in residuals} for residuals in (probe, call))
    for key in of_probe | of_call:
        mine, yours = of_probe.get(key), of_call.get(key)
        if mine != yours:
            raise ValueError(
                f"jaxact.telemetry: the probe has {_text(mine)} for {key}, and this "
                f"call {_text(yours)}. A probe is required that was made for arguments "
                "of the same shapes, under the same policy: write probe = "
                "measured.probe(params, batch) beside jax.grad(measured, argnums=(0, "
                "1))(probe, params, batch), inside the same jaxact.using and the same "
                "jax.jit."
            )


def _text(residual: Rounded | None) -> str:
    if residual is None:
        return "nothing rounded"
    return f"{residual.size} elements by {residual.action}"


@written_as("telemetry(loss)")
def telemetry(fn: Callable[..., PyTree]) -> Telemetry:
    """Measure, as `fn` is differentiated, the noise that rounding adds to gradients.

    `fn` is any function with compressed calls in it, such as a loss. The result takes a
    probe first, and has the same value and gradients; the derivative with respect to
    the probe, taken together with the parameters' own, is the measurement. It leaves
    jit, scan and vmap and adds up over devices as any gradient does, without a side
    effect.

    Each residual's noise is followed through the backward pass to its product with a
    cotangent, and to the next matmul, convolution or output: a weight's gradient, or
    the gradient at the input to a norm or an activation. There ::

        added = E ||error||^2,    signal = ||gradient||^2,

    for the rounding really done (for a linear layer, added is the exact sum over
    samples, ||g_n||^2 Var(x_n): ActNN, Chen et al. 2021, arXiv:2104.14129, section
    4.2). From there it is not followed into the gradients of earlier layers:
    `jaxact.sensitivity` measures those.

    Use it every so many steps, for a report, and to set bits by `jaxact.allocate`.

    Raises:
      TypeError: `fn` is no function.

    Example:
      >>> import jax, jax.numpy as jnp, jaxact
      >>> layer = jaxact.compress(lambda w, x: jnp.sin(x @ w), activations='x')
      >>> loss = lambda w, x: layer(w, x).sum()
      >>> w, x = jnp.ones((64, 64)), jax.random.normal(jax.random.key(0), (8, 64))
      >>> measured = jaxact.telemetry(loss)
      >>> probe = measured.probe(w, x)
      >>> noise, gradient = jax.jit(jax.grad(measured, argnums=(0, 1)))(probe, w, x)
      >>> [row.key for row in noise.sensitivity().rows]
      ['x', 'sin.derivative']
    """
    if not callable(fn):
        raise TypeError(
            f"jaxact.telemetry: got a value of type {type(fn).__name__}; a function is "
            "required, such as the loss: telemetry(loss)."
        )
    return Telemetry(fn)
