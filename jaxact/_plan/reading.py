"""A forward program as planners read it, and the steps that all planners share.

A planner reads the program (`read_forward`), decides about the values it wants to store
(first `decide_unrounded`, then the policy), and finishes the plan (`finish`).
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxact._codec import Exact, Recompute
from jaxact._decision import Decision, Reason
from jaxact._flat import Flat
from jaxact._jaxpr.flow import fact_of, flow
from jaxact._jaxpr.links import Links
from jaxact._jaxpr.primitives import PLACEMENTS, VIEWS
from jaxact._jaxpr.read import is_literal, variables_in
from jaxact._jaxpr.types import Atom, Var
from jaxact._plan.apart import Apart
from jaxact._plan.facts import ACTIVATION, STORED, input_facts, is_activation, learn
from jaxact._plan.forward import Forward
from jaxact._plan.program import Program
from jaxact._plan.storage import Normalized, Replay, StoragePlan
from jaxact._policy import Policy, small_size
from jaxact._residual import Provenance, Residual


@dataclasses.dataclass(frozen=True, eq=False)
class Reading:
    """A forward program with the facts that decisions rest on.

    Attributes:
      program: with facts about each variable.
      inputs: the variables that are given to the program.
      links: the program's.
      leaves: the distinct variables among the residuals.
      small_size: the most elements that a small activation among `leaves` has.
      provenance: tells where a variable comes from, inside the call.
      prefix: the call's module path, with its label.
      is_inside: whether an equation in another call holds it.
    """

    forward: Forward
    policy: Policy
    program: Program
    inputs: frozenset[Var]
    links: Links
    leaves: tuple[Var, ...]
    small_size: int
    provenance: Provenance
    prefix: str
    is_inside: bool

    def is_activation(self, v: Var) -> bool:
        """Whether `v` is made from more than parameters."""
        return is_activation(self.program.facts, v)

    def decide(self, residual: Residual, *, statistic: bool = False) -> Decision:
        """The policy's decision about a residual."""
        decision = self.policy.decide(
            residual.at(self.prefix), small_size=self.small_size, statistic=statistic
        )
        return dataclasses.replace(decision, residual=residual)

    def is_stored_inside(self, v: Var) -> bool:
        """Whether a compressed call inside this one already stored `v`."""
        return bool(fact_of(self.program.facts, v) & STORED)

    def is_on_host(self, v: Var) -> bool:
        """Whether `v` is in host memory, where it stays: codecs compute on devices."""
        return getattr(v.aval, "memory_space", None) == jax.memory.Space.Host


def read_forward(forward: Forward, flat: Flat, policy: Policy, prefix: str) -> Reading:
    """Learn the facts about `forward`, which was traced from `flat`."""
    jaxpr = forward.jaxpr
    facts = flow(jaxpr, [0, *input_facts(flat)], learn)
    leaves = tuple(dict.fromkeys(variables_in(forward.residuals)))
    sizes = [v.aval.size for v in leaves if fact_of(facts, v) & ACTIVATION]
    return Reading(
        forward,
        policy,
        Program(jaxpr, facts),
        frozenset([*jaxpr.invars, *jaxpr.constvars]),
        flat.links(jaxpr.invars[1:], jaxpr.outvars[: forward.num_outputs]),
        leaves,
        small_size(sizes),
        Provenance(jaxpr, ["seed", *flat.paths]),
        prefix,
        flat.is_inside,
    )


def referenced(reading: Reading) -> set[Var]:
    """Inputs that JAX keeps as they are, or moved: they are at hand anyway."""
    makers, found = reading.program.producers, set[Var]()
    moves = VIEWS | PLACEMENTS
    for leaf in reading.leaves:
        v: Atom = leaf
        while v in makers and makers[v].primitive.name in moves:
            v = makers[v].invars[0]
            if is_literal(v):
                break
        if not is_literal(v) and v not in makers:
            found.add(v)
    return found


def decide_unrounded(reading: Reading, v: Var, residual: Residual) -> Decision | None:
    """The decision about a value that stays as it is; None where the policy decides.

    The policy decides about activations, and about masks made from parameters, which
    take one bit and stay exact.
    """
    if reading.is_stored_inside(v):
        return Decision(residual, Exact(), Reason.STORED_INSIDE)
    if reading.is_on_host(v):
        return Decision(residual, Exact(), Reason.ON_HOST)
    if reading.is_activation(v):
        return None
    if v in reading.inputs:
        is_unnamed = fact_of(reading.program.facts, v) != 0
        reason = Reason.NOT_AN_ACTIVATION if is_unnamed else Reason.REFERENCED
        return Decision(residual, Exact(), reason)
    if residual.dtype == jnp.bool_:
        return None
    return Decision(residual, Exact(), Reason.OF_PARAMETERS)


def obstacle(reading: Reading, v: Var) -> Reason | None:
    """Why a value cannot be recomputed; None where it can."""
    producers = reading.program.producers
    if v not in producers:
        return Reason.ARGUMENT
    return Reason.SIDE_EFFECT if producers[v].effects else None


def keep_instead(decision: Decision, reason: Reason) -> Decision:
    """The decision about a value that cannot be recomputed."""
    return Decision(decision.residual, Exact(), reason, decision.rule)


def finish(
    reading: Reading,
    decisions: dict[Var, Decision],
    replay: Sequence[Replay],
    normalized: dict[Var, Normalized] | None = None,
    apart: dict[Var, Apart] | None = None,
) -> StoragePlan:
    """The plan for `decisions`, with the `replay` that they need."""
    stored = {v: d for v, d in decisions.items() if not isinstance(d.action, Recompute)}
    coded = {v: d for v, d in stored.items() if _is_coded(reading, v, d)}
    return StoragePlan(
        reading.forward,
        coded,
        tuple(v for v in stored if v not in coded),
        tuple(replay),
        tuple(decisions.values()),
        reading.policy,
        normalized or {},
        apart or {},
    )


def _is_coded(reading: Reading, v: Var, decision: Decision) -> bool:
    """Whether a variable is stored through its action, and marked as such."""
    if reading.is_stored_inside(v):
        return False
    if isinstance(decision.action, Exact):
        # Marking an argument would keep scan from referencing it in place. Unmarked, an
        # argument in a program inside is packed by the call around, which knows less of
        # its use. (That a default keeps everything holds there, too.)
        is_key = jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)
        is_own = reading.is_inside and reading.is_activation(v)
        is_marked = is_own and decision.reason is not Reason.DEFAULT
        return (v not in reading.inputs or is_marked) and not is_key
    return True
