"""Let a policy decide about the bases of a forward program."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp

from jaxact._codec import Bias, Exact, Recompute
from jaxact._decision import Decision, Reason, Remark
from jaxact._form.affine_classes import classify
from jaxact._form.cells import cell_body
from jaxact._form.channel_norms import Normalizations
from jaxact._form.chooser import Chooser
from jaxact._form.pooling import pool_body
from jaxact._form.rewriting import CUSTOM_RULE, GIVEN, RETURNED
from jaxact._jaxpr.flow import fact_of, flow
from jaxact._jaxpr.primitives import ELEMENTWISE, FACTORIZATIONS, SOLVERS, VIEWS
from jaxact._jaxpr.read import is_float, is_literal, variables_in
from jaxact._jaxpr.rewrite import Body, flatten, inlinable_body
from jaxact._plan.facts import ACTIVATION, STORED, input_facts, learn
from jaxact._plan.forward import Forward
from jaxact._plan.plan import (
    Normalized,
    Plan,
    Replay,
    is_coded,
)
from jaxact._policy import Policy
from jaxact._residual import Provenance, Residual
from jaxact._trace import Flat


def plan_form(forward: Forward, flat: Flat, policy: Policy, prefix: str) -> Plan:
    """Decide what is stored for the residuals of `forward`."""
    forward = _flattened(forward)
    return _Planner(forward, flat, policy, prefix).plan()


def _flattened(forward: Forward) -> Forward:
    def body(eqn: Any) -> Body | None:
        return cell_body(eqn) or pool_body(eqn) or inlinable_body(eqn)

    jaxpr, more = flatten(forward.jaxpr, body)
    return dataclasses.replace(forward, jaxpr=jaxpr, consts=(*forward.consts, *more))


class _Planner:
    def __init__(self, forward: Forward, flat: Flat, policy: Policy, prefix: str):
        jaxpr = forward.jaxpr
        self.forward, self.policy = forward, policy
        self.facts = flow(jaxpr, [0, *input_facts(flat)], learn)
        self.leaves = list(dict.fromkeys(variables_in(forward.residuals)))
        sizes = [v.aval.size for v in self.leaves if self.is_activation(v)]
        self.largest = max(sizes, default=0)
        self.provenance = Provenance(jaxpr, ["seed", *flat.paths], prefix)
        self.inputs = {*jaxpr.invars, *jaxpr.constvars}
        makers = self.provenance.producers(jaxpr)
        referenced = _referenced(self.leaves, makers)
        inexact = {
            v
            for v in jaxpr.invars
            if is_float(v)
            and fact_of(self.facts, v)
            and (self.is_activation(v) or v not in referenced)
        }
        self.classes = classify(jaxpr, self.largest, self.is_activation, inexact)
        for v in self.leaves:
            if fact_of(self.facts, v) & STORED:
                self.classes.set_exact(v)
        self.chooser = Chooser(jaxpr, self.classes, makers)
        self.normalizations = Normalizations(jaxpr, makers)
        self.normalized: dict[Any, Normalized] = {}
        used = [v for e in jaxpr.eqns for v in _solved_with(e)]
        self.solved_with = set(self.chooser.bases(used))
        # A rule of its own may do anything with what it keeps.
        kept = [v for v in self.leaves if self._is_kept_by_a_rule(v)]
        self.free = set(self.chooser.bases(kept))

    def _is_kept_by_a_rule(self, v: Any) -> bool:
        eqn = self.chooser.makers.get(v)
        if eqn is None:
            return False
        if eqn.primitive.name == "name":
            return eqn.params["name"] == GIVEN
        return CUSTOM_RULE in str(eqn.source_info.name_stack).split("/")

    def is_activation(self, v: Any) -> bool:
        return bool(fact_of(self.facts, v) & ACTIVATION)

    def plan(self) -> Plan:
        decisions = self._decide_bases()
        again = {v for v, d in decisions.items() if isinstance(d.action, Recompute)}
        stored = [v for v in decisions if v not in again]
        normalized = self._normalizations(decisions, stored)
        statistics = [v for n in normalized.values() for v in (n.mean, n.deviation)]
        self.classes.again.difference_update(statistics)  # had before anything else
        wanted = [*self.leaves, *statistics]
        kept, replayed = self.chooser.derive(wanted, stored)
        for v in self._sources(again, stored):
            decisions[v] = decisions[v].biased(Remark.RECOMPUTED_FROM)
        for v in kept:
            decisions[v] = self._decide_exact(v)
        coded = {
            v: d
            for v, d in decisions.items()
            if v not in again
            and is_coded(v, d.action, fact_of(self.facts, v), self.inputs)
        }
        replay = [
            Replay(e, self.classes.sides.get(e.outvars[0]))
            for e in self.forward.jaxpr.eqns
            if id(e) in replayed
        ]
        return Plan(
            self.forward,
            coded,
            tuple(v for v in decisions if v not in coded and v not in again),
            tuple(replay),
            tuple(decisions.values()),
            self.policy,
            normalized,
        )

    def _normalizations(
        self, decisions: dict[Any, Decision], stored: Sequence[Any]
    ) -> dict[Any, Normalized]:
        """What each rounded variable is stored through, where that is better."""
        found = {}
        for v in stored:
            if decisions[v].bias is not Bias.EXACT and v in self.normalized:
                found[v] = self.normalized[v]
                decisions[v] = decisions[v].with_remark(Remark.NORMALIZED)
        return found

    def _decide_bases(self) -> dict[Any, Decision]:
        """A decision for each base to store, or to compute again from others."""
        todo = self.chooser.choose(self.leaves)
        decisions: dict[Any, Decision] = {}
        while todo:
            v = todo.pop(0)
            if v in decisions:
                continue
            decisions[v] = decision = self._decide_base(v)
            if isinstance(decision.action, Recompute):
                eqn = self.chooser.makers.get(v)
                if eqn is None or eqn.effects:
                    reason = Reason.ARGUMENT if eqn is None else Reason.SIDE_EFFECT
                    exact = Decision(decision.residual, Exact(), reason, decision.rule)
                    decisions[v] = exact
                else:
                    todo += self._nearest_sources(eqn, {*todo, *decisions})
        return decisions

    def _nearest_sources(self, eqn: Any, stored: Collection[Any]) -> list[Any]:
        """Bases that an equation is computed from, past elementwise equations."""
        todo, seen, found = self.chooser.bases(eqn.invars), set(), []
        while todo:
            v = todo.pop()
            if v in seen:
                continue
            seen.add(v)
            maker = self.chooser.makers.get(v)
            if v in stored or maker is None or maker.primitive.name not in ELEMENTWISE:
                found.append(v)
            else:
                todo += self.chooser.bases(maker.invars)
        return found

    def _decide_base(self, v: Any) -> Decision:
        what, how = self._residual(v), self.normalizations.of(v)
        if how is not None and all(map(self.classes.is_exact, how[:2])):
            self.normalized[v] = Normalized(*how)
            what = dataclasses.replace(what, is_normalized=True)
        decision = self.policy.decide(what, largest=self.largest)
        if decision.rule is None and v in self.solved_with:
            return Decision(decision.residual, Exact(), Reason.SOLVED_WITH)
        if v in self.free:
            return decision.biased(Remark.CUSTOM_RULE)
        return decision

    def _decide_exact(self, v: Any) -> Decision:
        what, known = self._residual(v), fact_of(self.facts, v)
        if known & STORED:
            return Decision(what, Exact(), Reason.STORED_INSIDE)
        if v in self.inputs and not known & ACTIVATION:
            reason = Reason.NOT_AN_ACTIVATION if known else Reason.REFERENCED
            return Decision(what, Exact(), reason)
        if not known & ACTIVATION and what.dtype != jnp.bool_:
            return Decision(what, Exact(), Reason.OF_PARAMETERS)
        return self.policy.decide(what, largest=self.largest, statistic=True)

    def _residual(self, v: Any) -> Residual:
        found = self.provenance.of(v)
        known = [found.name, *self.classes.names.get(v, [])]
        names = [n for n in known if n not in ("", GIVEN, RETURNED)]
        name, aliases = (names[0], tuple(names[1:])) if names else ("", ())
        return dataclasses.replace(found, name=name, aliases=aliases)

    def _sources(self, again: set[Any], stored: Sequence[Any]) -> list[Any]:
        """What is stored of what the `again` variables are computed from."""
        if not again:
            return []
        _, replayed = self.chooser.derive(list(again), stored)
        read_again = {
            v
            for e in self.forward.jaxpr.eqns
            if id(e) in replayed
            for v in variables_in(e.invars)
        }
        return [v for v in stored if v in read_again]


def _referenced(leaves: Sequence[Any], makers: dict[Any, Any]) -> set[Any]:
    """Inputs that JAX keeps as they are, or moved: they are at hand anyway."""
    found = set()
    for v in leaves:
        while v in makers and makers[v].primitive.name in VIEWS:
            v = makers[v].invars[0]
            if is_literal(v):
                break
        if not is_literal(v) and v not in makers:
            found.add(v)
    return found


def _solved_with(eqn: Any) -> Sequence[Any]:
    """What the backward pass of a linear solve or a factorization solves with."""
    if eqn.primitive.name in SOLVERS:
        return eqn.invars
    return eqn.outvars if eqn.primitive.name in FACTORIZATIONS else ()
