"""Compressed calls that measure: an instrument between the residuals and their actions.

An instrument has a *probe*, small float32 arrays by `Residual.key`. They are arguments
of every instrumented call. Going in, they set how the call's residuals are rounded; the
cotangent that comes back for them is what was measured. So measurements add up over
calls of the same key, leave scan and vmap, and are reduced over devices, as the
gradient of any shared parameter would be, and need no side effect.

`revise.py` evaluates a function with the compressed calls in it instrumented.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxact._decision import Decision
from jaxact._engine.vjp import (
    behind_barrier,
    decoded,
    differentiable,
    forward_pass,
    plan_for,
)
from jaxact._jaxpr.compat import VJP_OPTIONS
from jaxact._jaxpr.rewrite import new_variable, with_inputs
from jaxact._measure.replace_calls import evaluate
from jaxact._plan.forward import trace_forward
from jaxact._plan.mark import CompressedCall
from jaxact._plan.storage import StoragePlan
from jaxact._residual import join_paths
from jaxact._trace import Flat, Kind, Static, is_inexact

Probe = dict[str, jax.Array]


class Draw(NamedTuple):
    """What an instrumented call is given beside its values."""

    seed: Any
    probe: Probe


class Instrument(abc.ABC):
    """How the residuals of an instrumented call are stored, and what is measured."""

    @abc.abstractmethod
    def encode(
        self, decision: Decision, x: jax.Array, seed: jax.Array, setting: jax.Array
    ) -> Any:
        """What to store for x; `setting` is the residual's part of the probe."""

    @abc.abstractmethod
    def decode(
        self, decision: Decision, stored: Any, shape: tuple[int, ...], dtype: Any
    ) -> jax.Array:
        """The array for what `encode` gave."""

    @abc.abstractmethod
    def backward(
        self,
        run: Callable[..., list[Any]],
        decoded: list[Any],
        stored: list[Any],
        cotangents: list[Any],
    ) -> tuple[list[Any], list[jax.Array]]:
        """`run(decoded, cotangents)`, and the cotangent of each residual's setting."""


def instrumented_call(
    instrument: Instrument, call: CompressedCall
) -> Callable[..., list[Any]]:
    """(draw, *values) -> outputs: the call, measured when it is differentiated."""
    flat = call.flat
    plans: dict[Any, StoragePlan] = {}

    def planned(active: tuple[bool, ...], draw: Draw, values: Any) -> StoragePlan:
        if active not in plans:
            names = list(draw.probe)

            def measure_body(body: Flat, draw: Any, values: Any, scope: str) -> Any:
                inside = CompressedCall(
                    body, call.policy, join_paths(call.prefix, scope)
                )
                return instrumented_call(instrument, inside)(draw, *values)

            run = differentiable(flat, call.policy, measure_body)

            def wide(seed: Any, *values: Any) -> list[Any]:
                count = len(values) - len(names)
                probe = dict(zip(names, values[count:], strict=True))
                return run(Draw(seed, probe), *values[:count])

            settings = list(draw.probe.values())
            every = (*active, *(True for _ in names))
            forward = trace_forward(wide, draw.seed, [*values, *settings], every)
            wider = _with_parameters(flat, settings)
            plans[active] = plan_for(forward, wider, call.policy, call.prefix)
        return plans[active]

    @jax.custom_vjp
    def measured(draw: Draw, *values: Any) -> list[Any]:
        return flat(*values)

    def fwd(draw: Any, *primals: Any) -> tuple[list[Any], Any]:
        values = [p.value for p in primals]
        active = tuple(p.perturbed and is_inexact(p.value) for p in primals)
        draw = jax.tree.map(lambda p: p.value, draw)
        plan = planned(active, draw, values)

        def encode(decision: Decision, x: Any, seed: Any, is_fused: bool) -> Any:
            setting = draw.probe.get(decision.residual.key)
            if setting is None:
                codec = decision.codec
                return (codec.encode_fused if is_fused else codec.encode)(x, seed)
            return instrument.encode(decision, x, seed, setting)

        inputs = [*values, *draw.probe.values()]
        out, packed, kept = forward_pass(plan, call.prefix, draw.seed, inputs, encode)
        return out, (Static((plan, active)), draw.probe, packed, kept)

    def bwd(residuals: Any, cotangents: Any) -> tuple[Any, ...]:
        static, probe, packed, kept = residuals
        plan, active = static.value
        packed, cotangents, run = behind_barrier(plan, packed, kept, cotangents)
        gradients, found = _measured(instrument, plan, probe, packed, cotangents, run)
        rest = iter(gradients)
        values = [next(rest) if a else None for a in active]
        for key in probe:  # measured in calls inside
            found[key] = found.get(key, 0) + next(rest)
        return (Draw(None, found), *values)

    measured.defvjp(fwd, bwd, **VJP_OPTIONS)
    return measured


def _measured(
    instrument: Instrument,
    plan: StoragePlan,
    probe: Probe,
    packed: Sequence[Any],
    cotangents: list[Any],
    run: Callable[..., list[Any]],
) -> tuple[list[Any], Probe]:
    """The gradients of a call, and what was measured of its residuals."""
    keys = [plan.decisions[v].residual.key for v in plan.packed]

    def decode(decision: Decision, stored: Any, shape: Any, dtype: Any) -> jax.Array:
        if decision.residual.key not in probe:
            return decision.codec.decode(stored, shape, dtype)
        return instrument.decode(decision, stored, shape, dtype)

    full = decoded(plan, packed, decode)
    places = [i for i, key in enumerate(keys) if key in probe]

    def run_some(some: Sequence[Any], cotangents: list[Any]) -> list[Any]:
        given = dict(zip(places, some, strict=True))
        return run([given.get(i, x) for i, x in enumerate(full)], cotangents)

    gradients, settings = instrument.backward(
        run_some, [full[i] for i in places], [packed[i] for i in places], cotangents
    )
    found: Probe = {}
    for i, setting in zip(places, settings, strict=True):
        found[keys[i]] = found[keys[i]] + setting if keys[i] in found else setting
    return gradients, found


def _with_parameters(flat: Flat, arrays: Sequence[jax.Array]) -> Flat:
    """`flat` with inputs that it does not read, taken for parameters."""
    more = [new_variable(jax.typeof(a)) for a in arrays]
    return Flat(
        with_inputs(flat.jaxpr, more),
        (*flat.kinds, *(Kind.PARAMETER for _ in more)),
        (*flat.paths, *("probe" for _ in more)),
        (*flat.owners, *(-1 for _ in more)),
    )


def evaluate_instrumented(
    instrument: Instrument,
    flat: Flat,
    values: Sequence[Any],
    probe: Probe,
    seed: Any = 0,
) -> list[Any]:
    """`flat(*values)` with its compressed calls instrumented.

    Args:
      probe: the settings; residuals without one are stored as their policy says.
      seed: uint32 scalar, joined to every call's own.
    """

    def measure(
        call: CompressedCall, own: Any, values: Sequence[Any], extra: Any
    ) -> list[Any]:
        probe, seed = extra
        own = jnp.ravel(own)[0] if jnp.ndim(own) else own  # under vmap: one of them
        draw = Draw(jnp.asarray(own, jnp.uint32) ^ jnp.asarray(seed, jnp.uint32), probe)
        return instrumented_call(instrument, call)(draw, *values)

    num_consts = len(flat.jaxpr.constvars)
    consts, inputs = values[:num_consts], values[num_consts:]
    return evaluate(flat.jaxpr, consts, inputs, measure, (probe, seed))
