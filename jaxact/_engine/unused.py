"""The part of a backward pass that the outputs in use need.

An output that nobody uses has a cotangent of zeros, and a backward program is linear in
its cotangents: a value that depends on such cotangents alone is zero. Without those
values fewer residuals are read, and the compiler leaves out their encoding (9.7 instead
of 14.5 MiB on an H100 for four MLPs that also return a sine of their hidden layer).
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxact._jaxpr.evaluate import bind, value_of
from jaxact._jaxpr.flow import fact_of, flow, union
from jaxact._jaxpr.read import is_float, is_literal, variables_in
from jaxact._jaxpr.rewrite import (
    flatten,
    inlinable_body,
    prune,
    rename,
    with_outputs,
)
from jaxact._jaxpr.types import Array, Atom, Env, Jaxpr, Renaming, Var
from jaxact._plan.storage import StoragePlan

_LIVE, _ZERO = 1, 2  # facts about a value: it depends on such cotangents


@dataclasses.dataclass(frozen=True, eq=False)
class UsedPart:
    """A backward program without the values that are zero, and its residuals.

    Attributes:
      plan: with the residuals that it reads, and the replay for those.
      consts: values for the program's constants.
    """

    plan: StoragePlan
    jaxpr: Jaxpr
    consts: Sequence[Array]

    def evaluate(
        self, restored: Env, cotangents: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """The gradients, given values for the plan's variables."""
        forward = self.plan.forward
        env: Env = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        pairs = zip(forward.backward.residuals, forward.residuals, strict=True)
        for v, source in pairs:
            if not is_literal(v) and (is_literal(source) or source in restored):
                env[v] = value_of(source, restored)
        floats = [c for c in cotangents if c.dtype != jax.dtypes.float0]
        env |= dict(zip(forward.backward.cotangents, floats, strict=True))
        for eqn in self.jaxpr.eqns:
            values = [_value(v, env) for v in eqn.invars]
            env.update(zip(eqn.outvars, bind(eqn, values), strict=True))
        return [jnp.asarray(_value(v, env)) for v in self.jaxpr.outvars]


def _value(v: Atom, env: Env) -> jax.Array:
    """A value; zeros for a variable that nothing computes."""
    if is_literal(v) or v in env:
        return value_of(v, env)
    return ad.instantiate_zeros(ad.Zero(v.aval))


def used_part(plan: StoragePlan, is_used: Sequence[bool]) -> UsedPart | None:
    """The part of a plan's backward pass that the used outputs need.

    Args:
      is_used: for each output.

    Returns:
      None where that spares no packed residual.
    """
    forward = plan.forward
    outputs = forward.jaxpr.outvars[: forward.num_outputs]
    flags = [u for v, u in zip(outputs, is_used, strict=True) if is_float(v)]
    is_live = dict(zip(forward.backward.cotangents, flags, strict=True))
    jaxpr, constants = flatten(forward.backward_program, inlinable_body)
    jaxpr = _without_zeros(jaxpr, is_live)
    read = set(variables_in(jaxpr.outvars))
    read.update(v for eqn in jaxpr.eqns for v in variables_in(eqn.invars))
    pairs = zip(forward.backward.residuals, forward.residuals, strict=True)
    sources = [x for v, x in pairs if not is_literal(v) and v in read]
    narrow = _narrowed(plan, sources)
    if len(narrow.packed) == len(plan.packed):
        return None
    return UsedPart(narrow, jaxpr, (*forward.consts, *constants))


def _without_zeros(jaxpr: Jaxpr, is_live: Mapping[Var, bool]) -> Jaxpr:
    """The program without equations that give zeros, and those that only they read."""
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    bits = [(_LIVE if is_live[v] else _ZERO) if v in is_live else 0 for v in inputs]
    facts = flow(jaxpr, bits, union)
    is_zero = lambda v: fact_of(facts, v) == _ZERO
    names: Renaming = {}
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.outvars and all(map(is_zero, eqn.outvars)):
            continue
        terms = [rename(v, names) for v in eqn.invars if not is_zero(v)]
        if eqn.primitive.name == "add_any" and len(terms) == 1:
            names[eqn.outvars[0]] = terms[0]
        else:
            eqns.append(eqn.replace(invars=[rename(v, names) for v in eqn.invars]))
    outputs = [rename(v, names) for v in jaxpr.outvars]
    return prune(with_outputs(jaxpr, eqns, outputs), outputs)


def _narrowed(plan: StoragePlan, residuals: Sequence[Atom]) -> StoragePlan:
    """The plan with the stored values and the replay that these residuals need."""
    needed = set(variables_in(residuals))
    replay = []
    for step in reversed(plan.replay):
        if not needed.isdisjoint(step.eqn.outvars):
            needed.update(step.inputs)
            replay.append(step)
    for v, norm in plan.normalized.items():
        if not needed.isdisjoint((v, norm.centered)):
            needed.update((v, *norm.statistics))
    for v, one in plan.apart.items():
        if v in needed:
            needed.update(one.statistics)
    packed = set(plan.packed)
    decisions = {
        v: d for v, d in plan.decisions.items() if v in needed or v not in packed
    }
    return dataclasses.replace(plan, decisions=decisions, replay=tuple(replay[::-1]))
