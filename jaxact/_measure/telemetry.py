"""What the rounding of each residual adds to the gradients, measured as a step runs."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxact._bits.cost import Sensitivity
from jaxact._decision import Decision
from jaxact._jaxpr.compat import open_jaxpr
from jaxact._measure.census import Rounded, census
from jaxact._measure.instrument import Instrument, evaluate_instrumented
from jaxact._measure.noise import evaluate_with_noise
from jaxact._modules.pure import pure_call
from jaxact._trace import is_inexact

# The most that noise is said to be of a signal.
LARGEST = 100.0
# Elements over which the variance of the rounding is averaged, at least.
POOL = 256


@dataclasses.dataclass(frozen=True)
class NoiseGauge(Instrument):
    """Rounds as the policy says and measures what that adds to the gradients.

    A setting is (added, signal), float32[2]; going in it is not read.
    """

    def encode(
        self, decision: Decision, x: jax.Array, seed: jax.Array, setting: jax.Array
    ) -> Any:
        stored = decision.codec.encode(x, seed)
        error = decision.codec.decode(stored, x.shape, x.dtype) - x
        squares = jnp.square(error.astype(jnp.float32))
        return stored, jnp.mean(squares, axis=_pooled(x.shape), keepdims=True)

    def decode(
        self, decision: Decision, stored: Any, shape: tuple[int, ...], dtype: Any
    ) -> jax.Array:
        return decision.codec.decode(stored[0], shape, dtype)

    def backward(
        self,
        run: Callable[..., list[Any]],
        decoded: list[Any],
        stored: list[Any],
        cotangents: list[Any],
    ) -> tuple[list[Any], list[jax.Array]]:
        closed = jax.make_jaxpr(run)(decoded, cotangents)
        jaxpr, consts = open_jaxpr(closed)
        inputs = jax.tree.leaves((decoded, cotangents))
        outputs, noise = evaluate_with_noise(
            jaxpr,
            consts,
            inputs,
            {i: variance for i, (_, variance) in enumerate(stored)},
            cotangents=range(len(decoded), len(inputs)),
        )
        found = [noise[i] for i in range(len(decoded))]
        return outputs, [_pair(n) for n in found]


def _pair(noise: Any) -> jax.Array:
    if noise is None:
        return jnp.zeros(2, jnp.float32)
    # The gradient has the error in it already: E ||g + error||^2 = ||g||^2 + added.
    return jnp.stack([noise.added, noise.signal - noise.added])


def _pooled(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Trailing axes to average over, never the first: samples differ."""
    axes: list[int] = []
    for axis in reversed(range(1, len(shape))):
        if math.prod(shape[a] for a in axes) >= POOL:
            break
        axes.append(axis)
    return tuple(axes)


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class NoiseReport:
    """What rounding adds to the gradients, for each residual: a step's, or its sum.

    A pytree whose arrays are the probe that `telemetry` functions take (zeros) and the
    measurement that comes back as its cotangent.

    Attributes:
      values: (added, signal), float32[2], by `Residual.key`: the expected squared norm
        of the error that rounding the residual adds to what the backward pass computes
        from it next, and the squared norm of that without the error. Zeros where it is
        not known.
      residuals: what is measured.
    """

    values: dict[str, jax.Array]
    residuals: tuple[Rounded, ...]

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.GetAttrKey("values"), self.values)], self.residuals

    @classmethod
    def tree_unflatten(cls, residuals: Any, children: Any) -> "NoiseReport":
        return cls(children[0], residuals)

    @property
    def relative(self) -> dict[str, float]:
        """Added over signal, of each residual for which it is known; synchronizes."""
        found = {}
        for key, pair in self.values.items():
            added, signal = (float(x) for x in np.asarray(pair))
            if added or signal:
                # One draw of a gradient that is mostly noise may leave no signal.
                found[key] = added / max(signal, added / LARGEST)
        return found

    def sensitivity(self) -> Sensitivity:
        """The measurement, for reading and for `jaxact.allocate`.

        A residual's variance is relative to the signal of its own targets, and the
        signal of the table is the number of residuals: `allocate(..., e2=e2)` bounds
        the mean of what each adds to its own layer's gradients.
        """
        relative = self.relative
        known = [r for r in self.residuals if r.key in relative]
        unknown = tuple(r.key for r in self.residuals if r.key not in relative)
        rows = tuple(r.cost(relative[r.key], 1.0) for r in known)
        return Sensitivity(rows, float(len(rows)), unknown)

    def follow(self, then: "NoiseReport", measured: Sensitivity) -> Sensitivity:
        """What `jaxact.sensitivity` would measure now, from what it did measure then.

        How noise goes on from a layer to earlier ones is taken to have stayed as it
        was; each layer's own is measured anew.

        Args:
          then: measured at the time of `measured`, at the same or at other bits.
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
        return str(self.sensitivity())


@dataclasses.dataclass(frozen=True)
class Telemetry:
    """A function that measures its residuals' noise when it is differentiated."""

    fn: Callable[..., Any]

    def probe(self, *args: Any, **kwargs: Any) -> NoiseReport:
        """Zeros for a call with these arguments (or `jax.ShapeDtypeStruct`)."""
        flat, values, _ = pure_call(self.fn, args, kwargs).trace()
        found = census(flat, values, [is_inexact(v) for v in values])
        return NoiseReport({r.key: jnp.zeros(2, jnp.float32) for r in found}, found)

    def __call__(self, probe: NoiseReport, *args: Any, **kwargs: Any) -> Any:
        """`fn(*args, **kwargs)`; its derivative by `probe` is the noise."""
        call = pure_call(self.fn, args, kwargs)
        flat, values, rebuild = call.trace()
        out = evaluate_instrumented(NoiseGauge(), flat, values, probe.values)
        return call.write_back(rebuild(out))


def telemetry(fn: Callable[..., Any]) -> Telemetry:
    """Measure, as `fn` is differentiated, what rounding adds to the gradients.

    `fn` is any function with compressed calls in it, such as a loss. The result takes a
    probe first, and has the same value and gradients; the derivative with respect to
    the probe, taken together with that of the parameters, is the measurement. It leaves
    jit, scan and vmap and adds up over devices as any gradient does, without a side
    effect.

    The noise of each residual is followed through the backward pass to the product with
    a cotangent, and to the next matmul, convolution or output: a weight's gradient, or
    the gradient at the input of a norm or an activation. There ::

        added = E ||error||^2,    signal = ||gradient||^2,

    the added variance being that of the rounding really done (for a linear layer the
    exact sum over samples of ||g_n||^2 Var(x_n), ActNN, Chen et al. 2021,
    arXiv:2104.14129, section 4.2). How it goes on from there to the gradients of
    earlier layers is not followed: `jaxact.sensitivity` measures that.

    Use it every so many steps, for a report, and to set bits by `jaxact.allocate`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxact
      >>> layer = jaxact.compress(lambda w, x: jnp.sin(x @ w), activations='x')
      >>> loss = lambda w, x: layer(w, x).sum()
      >>> w, x = jnp.ones((64, 64)), jax.random.normal(jax.random.key(0), (8, 64))
      >>> measured = jaxact.telemetry(loss)
      >>> probe = measured.probe(w, x)
      >>> noise, gradient = jax.jit(jax.grad(measured, argnums=(0, 1)))(probe, w, x)
      >>> [row.key for row in noise.sensitivity().rows]
      ['x', 'cos']
    """
    return Telemetry(fn)
