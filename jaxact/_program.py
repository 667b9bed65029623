"""The forward program of a call: its outputs, its residuals, and what becomes of each.

`trace_forward` traces `jax.vjp` of the call into one jaxpr whose outputs are the call's
outputs followed by the residuals, so where each residual comes from can be read.
`make_plan` lets a policy decide for each of them.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxact import _compat
from jaxact._call import Flat, Kind
from jaxact._codec import Exact, Recompute
from jaxact._flow import flow, read, union
from jaxact._mark import mark_p
from jaxact._policy import Decision, Policy
from jaxact._residual import Provenance

# Equations that move or convert values: recomputing them costs next to nothing.
MOVES = frozenset(
    "reshape transpose broadcast_in_dim squeeze expand_dims convert_element_type "
    "copy copy_p stop_gradient slice rev".split()
)

REFERENCED = "a parameter, referenced in place"
STORED_INSIDE = "stored by a compressed call inside"

UNKNOWN, ACTIVATION, STORED = 1, 2, 4  # facts about a value
_FACTS = {Kind.PARAMETER: 0, Kind.UNKNOWN: UNKNOWN, Kind.ACTIVATION: ACTIVATION}


def input_facts(flat: Flat) -> list[int]:
    """Integers and keys are never parameters: an embedding is an activation."""
    return [
        _FACTS[kind] if is_float(v) or kind is not Kind.PARAMETER else UNKNOWN
        for kind, v in zip(flat.kinds, flat.invars, strict=True)
    ]


def kind_of(facts: int) -> Kind:
    if facts & ACTIVATION:
        return Kind.ACTIVATION
    return Kind.UNKNOWN if facts & UNKNOWN else Kind.PARAMETER


def learn(eqn: Any, facts: Sequence[int], around: tuple[Any, ...]) -> int:
    """What is computed, not just moved, from an unknown argument is an activation."""
    out = union(eqn, facts, around)
    if out & UNKNOWN and eqn.primitive.name not in MOVES:
        out |= ACTIVATION
    return out | (STORED if eqn.primitive is mark_p else 0)


@dataclasses.dataclass(frozen=True, eq=False)
class Forward:
    """The traced forward program.

    Attributes:
      jaxpr, consts: inputs are the rounding seed and the call's values; outputs are the
        call's outputs, then the residuals.
      num_outputs: of the call.
      vjp_tree: rebuilds the backward function from the residuals.
    """

    jaxpr: Any
    consts: Sequence[Any]
    num_outputs: int
    vjp_tree: Any

    @property
    def residuals(self) -> list[Any]:
        """One variable (or literal) for each residual, in the order of `vjp_tree`."""
        return list(self.jaxpr.outvars[self.num_outputs :])


def trace_forward(
    run: Callable[..., list[Any]],
    seed: Any,
    values: Sequence[Any],
    is_active: Sequence[bool],
) -> Forward:
    """Trace the vjp of `run(seed, *values)` for the active values."""
    found: dict[str, Any] = {}

    def forward(seed: Any, *values: Any) -> list[Any]:
        def of_active(*xs: Any) -> list[Any]:
            rest = iter(xs)
            full = [
                next(rest) if a else v for a, v in zip(is_active, values, strict=True)
            ]
            return run(seed, *full)

        out, vjp = jax.vjp(
            of_active, *[v for a, v in zip(is_active, values, strict=True) if a]
        )
        leaves, found["tree"] = jax.tree.flatten(vjp)
        found["num_outputs"] = len(out)
        return [*out, *leaves]

    closed = jax.make_jaxpr(forward)(seed, *values)
    jaxpr, consts = _compat.open_jaxpr(closed)
    return Forward(jaxpr, tuple(consts), found["num_outputs"], found["tree"])


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What becomes of every residual of a forward program.

    Attributes:
      decisions: for each variable that an action keeps.
      kept: variables that are kept as they are, parameters among them.
      recompute: the equations that backward evaluates again, in order.
      all_decisions: of every residual, for reports.
      policy: that decided.
    """

    forward: Forward
    decisions: dict[Any, Decision]
    kept: tuple[Any, ...]
    recompute: tuple[Any, ...]
    all_decisions: tuple[Decision, ...]
    policy: Policy

    @property
    def exact(self) -> list[Any]:
        """Variables that are marked and kept exactly."""
        return [v for v, d in self.decisions.items() if isinstance(d.action, Exact)]

    @property
    def packed(self) -> list[Any]:
        """Variables that a codec packs."""
        return [v for v, d in self.decisions.items() if not isinstance(d.action, Exact)]

    @property
    def used_rules(self) -> tuple[int, ...]:
        """Indices of the policy's rules that matched a residual."""
        return tuple(sorted({d.rule for d in self.all_decisions if d.rule is not None}))


def make_plan(forward: Forward, flat: Flat, policy: Policy, prefix: str) -> Plan:
    """Decide for every residual of `forward`."""
    jaxpr = forward.jaxpr
    facts = flow(jaxpr, [0, *input_facts(flat)], learn)
    leaves = dict.fromkeys(_compat.variables(forward.residuals))
    sizes = [v.aval.size for v in leaves if read(facts, v) & ACTIVATION]
    largest = max(sizes, default=0)
    provenance = Provenance(jaxpr, ["seed", *flat.paths], prefix)
    producers = provenance.producers(jaxpr)
    inputs = set(jaxpr.invars) | set(jaxpr.constvars)
    decisions: dict[Any, Decision] = {}

    def decide(v: Any) -> None:
        if v in decisions:
            return
        what = provenance.of(v)
        decisions[v] = decision = _decide(v, what, facts, inputs, policy, largest)
        if isinstance(decision.action, Recompute):
            needs = _sources(v, producers, leaves)
            if isinstance(needs, str):
                decisions[v] = dataclasses.replace(decision, action=Exact(), why=needs)
                return
            for source in needs:
                decide(source)

    for v in leaves:
        decide(v)
    again = {v: d for v, d in decisions.items() if isinstance(d.action, Recompute)}
    coded = {
        v: d for v, d in decisions.items() if _is_coded(v, d, read(facts, v), inputs)
    }
    return Plan(
        forward,
        coded,
        tuple(v for v in decisions if v not in coded and v not in again),
        tuple(_slice(jaxpr, list(again), producers, decisions.keys() - again.keys())),
        tuple(decisions.values()),
        policy,
    )


def _decide(
    v: Any, what: Any, facts: Any, inputs: set[Any], policy: Policy, largest: int
) -> Decision:
    known = read(facts, v)
    if known & STORED:
        return Decision(what, Exact(), STORED_INSIDE)
    if getattr(v.aval, "memory_space", None) == jax.memory.Space.Host:
        return Decision(what, Exact(), "offloaded by the recompute policy")
    if not known & ACTIVATION:
        if v in inputs:
            why = "an argument not named in activations" if known else REFERENCED
            return Decision(what, Exact(), why)
        if what.dtype == jnp.bool_:
            return policy.decide(what, largest=largest)
        action = Recompute() if what.primitive in MOVES else Exact()
        return Decision(what, action, "made of parameters alone")
    return policy.decide(what, largest=largest)


def _is_coded(v: Any, decision: Decision, facts: int, inputs: set[Any]) -> bool:
    """Whether a variable is stored through its action, and marked as such."""
    if isinstance(decision.action, Recompute) or facts & STORED:
        return False
    if isinstance(decision.action, Exact):
        # Marking an argument would keep scan from referencing it in place.
        is_key = jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)
        return v not in inputs and not is_key
    return True


def _sources(v: Any, producers: Any, leaves: Collection[Any]) -> list[Any] | str:
    """Nearest inputs and residuals to recompute `v` from, or why there are none."""
    todo, seen, found = [v], {v}, []
    while todo:
        eqn = producers.get(todo.pop())
        if eqn is None:
            return "an argument: there is nothing to recompute it from"
        if eqn.effects:
            return "not recomputed: that would repeat a side effect"
        for x in _compat.variables(eqn.invars):
            if x not in seen:
                seen.add(x)
                (found if x in leaves or x not in producers else todo).append(x)
    return found


def _slice(
    jaxpr: Any, wanted: Sequence[Any], producers: Any, given: set[Any]
) -> list[Any]:
    """The equations that compute `wanted` from `given`, in program order."""
    todo, seen, needed = list(wanted), set(wanted), set()
    while todo:
        eqn = producers[todo.pop()]
        needed.add(id(eqn))
        for x in _compat.variables(eqn.invars):
            if x not in seen and x not in given:
                seen.add(x)
                todo.append(x)
    return [eqn for eqn in jaxpr.eqns if id(eqn) in needed]


def is_float(v: Any) -> bool:
    """Whether a variable can have a gradient."""
    return jnp.issubdtype(v.aval.dtype, jnp.inexact)
