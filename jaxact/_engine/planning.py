"""Plan a call: trace its forward program and decide about the residuals."""

import collections
import dataclasses
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

import jax

from jaxact._checkpoint_policies import SaveEither, save_packed
from jaxact._decision import Decision
from jaxact._engine.inside import holds_programs, push_inside
from jaxact._engine.passes import Passes
from jaxact._engine.scan import CompressBody
from jaxact._engine.storage import Draw, Storage
from jaxact._flat import Flat, Kind
from jaxact._form import flattened, least, plan_bases, rewrite, with_rule_factors
from jaxact._jaxpr.rewrite import new_variable, with_inputs
from jaxact._jaxpr.types import Array
from jaxact._plan.each import plan_each_residual
from jaxact._plan.forward import Forward, ForwardTrace
from jaxact._policy import Policy
from jaxact._trace import Static

# Makes the evaluation of programs inside, whose decisions it adds to the list.
NewBody: TypeAlias = Callable[[list[Decision]], CompressBody]


@dataclasses.dataclass(frozen=True)
class CallKey:
    """All that the plans for a call depend on, beside what JAX's traces depend on.

    Attributes:
      flat: the first function with this structure.
      prefix: the call's module path, where programs inside have plans of their own.
      active: whether each value is differentiated.
      keys: the probe's.
      is_checkpointed: as the engine's.
    """

    flat: Flat
    policy: Policy
    storage: Storage
    prefix: str | None
    active: tuple[bool, ...]
    keys: tuple[str, ...]
    is_checkpointed: bool = False


@dataclasses.dataclass(eq=False)
class _Plans:
    """The plans for calls that are alike, such as a network's equal layers.

    Attributes:
      nested: decisions for the programs inside, of the last trace.
      latest: the last forward program, and its plan.
    """

    trace: ForwardTrace
    nested: list[Decision]
    latest: "tuple[Forward, _Made] | None" = None


@dataclasses.dataclass(frozen=True, eq=False)
class _Made:
    """The plans for one forward program.

    Attributes:
      forwards: the program as planners read it, in one way or several.
      nested: decisions for the programs inside.
      by_prefix: passes for each module path on which decisions depend.
      distinct: passes for each distinct plan.
    """

    forwards: tuple[Forward, ...]
    nested: tuple[Decision, ...]
    by_prefix: dict[str, Passes] = dataclasses.field(default_factory=dict)
    distinct: dict[Hashable, Passes] = dataclasses.field(default_factory=dict)


_planned: "weakref.WeakValueDictionary[CallKey, _Plans]" = weakref.WeakValueDictionary()

# So many of the latest plans stay: a second jit of a function, or a table of its
# residuals, may come when Python has collected all that the first trace left.
_LATEST = 128


@jax.jit
def _latest() -> Static:
    """The latest plans; JAX keeps what a trace returned until `jax.clear_caches()`."""
    return Static(collections.deque(maxlen=_LATEST))


def _keep(plans: _Plans) -> None:
    latest = jax.eval_shape(_latest).value
    if plans not in latest:
        latest.append(plans)


def plan_call(
    key: CallKey, prefix: str, new_body: NewBody, draw: Draw, values: Sequence[Array]
) -> tuple[Passes, tuple[Decision, ...]]:
    """The passes for a call, and the decisions for the programs inside.

    Args:
      prefix: the call's module path.
      new_body: evaluates the programs inside, compressed.
    """
    plans = _planned.get(key)
    if plans is None:
        plans = _planned[key] = _start(key, new_body)
    _keep(plans)
    settings = list(draw.probe.values())
    forward = plans.trace.trace(draw.seed, [*values, *settings])
    flat = _with_settings(key.flat, settings)
    if plans.latest is None or plans.latest[0] is not forward:
        read = (forward,)
        if key.policy.chooses_form:
            factored = with_rule_factors(forward, flat, key.policy)
            read = tuple(map(flattened, factored))
        plans.latest = forward, _Made(read, tuple(plans.nested))
    _, made = plans.latest
    prefix = prefix if key.policy.reads_paths else ""
    if prefix not in made.by_prefix:
        decide = plan_bases if key.policy.chooses_form else plan_each_residual
        ways = [decide(read, flat, key.policy, prefix) for read in made.forwards]
        plan = least(ways)
        is_checkpointed = key.is_checkpointed
        plan = dataclasses.replace(plan, origin=plans, is_checkpointed=is_checkpointed)
        passes = Passes(plan, key.storage)
        made.by_prefix[prefix] = made.distinct.setdefault(plan.contents, passes)
    return made.by_prefix[prefix], made.nested


def _start(key: CallKey, new_body: NewBody) -> _Plans:
    nested: list[Decision] = []

    def run(seed: jax.Array, *inputs: jax.Array) -> list[jax.Array]:
        nested.clear()
        count = len(inputs) - len(key.keys)
        probe = dict(zip(key.keys, inputs[count:], strict=True))
        differentiable = _differentiable(key, new_body(nested))
        return differentiable(Draw(seed, probe), *inputs[:count])

    active = (*key.active, *(True for _ in key.keys))
    return _Plans(ForwardTrace(run, active), nested)


def _differentiable(
    key: CallKey, compress_body: CompressBody
) -> Callable[..., list[jax.Array]]:
    """(draw, *values) -> outputs: compressed inside, the rest checkpointed."""
    flat, policy = key.flat, key.policy
    if policy.chooses_form:
        flat, widen = rewrite(flat, key.active)
    else:
        widen = list

    def plain(draw: Draw, *values: jax.Array) -> list[jax.Array]:
        return flat(*values)

    run = plain
    if holds_programs(flat.jaxpr):
        run = push_inside(flat, compress_body)
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
    return dataclasses.replace(
        flat,
        jaxpr=with_inputs(flat.jaxpr, variables),
        kinds=(*flat.kinds, *(Kind.PARAMETER for _ in variables)),
        paths=(*flat.paths, *("probe" for _ in variables)),
        owners=(*flat.owners, *(-1 for _ in variables)),
    )
