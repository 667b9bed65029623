"""Plan a call: trace its forward program and decide about the residuals."""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax

from jaxact._checkpoint_policies import SaveEither, save_packed
from jaxact._engine.scan import CompressBody, contains_scan, push_into_scans
from jaxact._engine.storage import Draw, Storage
from jaxact._form import plan_bases, rewrite
from jaxact._jaxpr.rewrite import new_variable, with_inputs
from jaxact._jaxpr.types import Array
from jaxact._plan.each import plan_each_residual
from jaxact._plan.forward import Forward, ForwardTrace
from jaxact._plan.storage import StoragePlan
from jaxact._policy import Policy
from jaxact._trace import Flat, Kind

# Makes the evaluation of scan bodies, whose plans it adds to the list.
NewBody: TypeAlias = Callable[[list[StoragePlan]], CompressBody]


@dataclasses.dataclass(frozen=True)
class CallKey:
    """All that the plans for a call depend on, beside what JAX's traces depend on.

    Attributes:
      flat: the first function with this structure.
      prefix: the call's module path, where scans inside have plans of their own.
      active: whether each value is differentiated.
      keys: the probe's.
    """

    flat: Flat
    policy: Policy
    storage: Storage
    prefix: str | None
    active: tuple[bool, ...]
    keys: tuple[str, ...]


@dataclasses.dataclass(eq=False)
class _Plans:
    """The plans for calls that are alike, such as a network's equal layers.

    Attributes:
      nested: those for the scans inside, of the last trace.
      made: the last forward program, and the plan and the plans inside by prefix.
    """

    trace: ForwardTrace
    nested: list[StoragePlan]
    made: tuple[Forward, dict[str, tuple[StoragePlan, ...]]] | None = None


# Alive as long as a traced program that was planned by them.
_planned: "weakref.WeakValueDictionary[CallKey, _Plans]" = weakref.WeakValueDictionary()


def plan_call(
    key: CallKey, prefix: str, new_body: NewBody, draw: Draw, values: Sequence[Array]
) -> tuple[StoragePlan, ...]:
    """The plan for a call, then those for the scans inside.

    Args:
      prefix: the call's module path.
      new_body: evaluates the bodies of scans, compressed.
    """
    plans = _planned.get(key)
    if plans is None:
        plans = _planned[key] = _start(key, new_body)
    settings = list(draw.probe.values())
    forward = plans.trace.trace(draw.seed, [*values, *settings])
    if plans.made is None or plans.made[0] is not forward:
        plans.made = forward, {}
    _, by_prefix = plans.made
    if prefix not in by_prefix:
        decide = plan_bases if key.policy.chooses_form else plan_each_residual
        flat = _with_settings(key.flat, settings)
        plan = decide(forward, flat, key.policy, prefix)
        plan = dataclasses.replace(plan, origin=plans)
        by_prefix[prefix] = plan, *plans.nested
    return by_prefix[prefix]


def _start(key: CallKey, new_body: NewBody) -> _Plans:
    nested: list[StoragePlan] = []

    def run(seed: jax.Array, *inputs: jax.Array) -> list[jax.Array]:
        nested.clear()
        count = len(inputs) - len(key.keys)
        probe = dict(zip(key.keys, inputs[count:], strict=True))
        differentiable = _differentiable(key.flat, key.policy, new_body(nested))
        return differentiable(Draw(seed, probe), *inputs[:count])

    active = (*key.active, *(True for _ in key.keys))
    return _Plans(ForwardTrace(run, active), nested)


def _differentiable(
    flat: Flat, policy: Policy, compress_body: CompressBody
) -> Callable[..., list[jax.Array]]:
    """(draw, *values) -> outputs: scans compressed inside, the rest checkpointed."""
    if policy.chooses_form:
        flat, widen = rewrite(flat)
    else:
        widen = list

    def plain(draw: Draw, *values: jax.Array) -> list[jax.Array]:
        return flat(*values)

    run = plain
    if contains_scan(flat.jaxpr):
        run = push_into_scans(flat, compress_body)
    if policy.recompute is not None:
        assert callable(policy.recompute), "of one call, see Policy.for_call"
        keep = SaveEither(policy.recompute, save_packed)
        run = jax.checkpoint(run, policy=keep)
    return lambda draw, *values: run(draw, *widen(values))


def _with_settings(flat: Flat, settings: Sequence[jax.Array]) -> Flat:
    """`flat` with inputs for settings, which it does not read and never stores."""
    if not settings:
        return flat
    variables = [new_variable(jax.typeof(a)) for a in settings]
    return Flat(
        with_inputs(flat.jaxpr, variables),
        (*flat.kinds, *(Kind.PARAMETER for _ in variables)),
        (*flat.paths, *("probe" for _ in variables)),
        (*flat.owners, *(-1 for _ in variables)),
    )
