"""Let a policy decide about the bases in a forward program."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from jaxact._codec import Bias, Exact, Recompute
from jaxact._decision import Decision, Reason, Remark
from jaxact._flat import Flat
from jaxact._form.chooser import Chooser
from jaxact._form.classify import classify
from jaxact._form.conditioning import ill_conditioned, kept_inside
from jaxact._form.cuts import is_cut_at_groups
from jaxact._form.derivative import DERIVATIVE_OF
from jaxact._form.norms import Norms, norms_in
from jaxact._form.repeated import sources_of_larger
from jaxact._form.sources import sources_near_poles
from jaxact._jaxpr.flow import fact_of
from jaxact._jaxpr.primitives import ELEMENTWISE
from jaxact._jaxpr.read import is_float, variables_in
from jaxact._jaxpr.types import Atom, Eqn, Var
from jaxact._plan.forward import Forward
from jaxact._plan.reading import (
    Reading,
    decide_unrounded,
    finish,
    keep_instead,
    obstacle,
    read_forward,
    referenced,
)
from jaxact._plan.storage import Normalized, Replay, StoragePlan
from jaxact._plan.uses import Uses, find_uses
from jaxact._policy import Policy
from jaxact._residual import Name, Residual

Decisions = dict[Var, Decision]


@dataclasses.dataclass(frozen=True, eq=False)
class _Bases:
    """The bases in a forward program, and those that need care.

    Attributes:
      stored: bases to store, in order.
      uses: how the backward program uses the roundings of `stored`; the bit of a base
        is 1 << its position there.
      spared: variables that stay exact though the policy would round them.
    """

    reading: Reading
    chooser: Chooser
    norms: Norms
    stored: tuple[Var, ...]
    uses: Uses
    spared: dict[Var, Reason]


def plan_bases(
    forward: Forward, flat: Flat, policy: Policy, prefix: str
) -> StoragePlan:
    """Decide which values are stored so that backward has the residuals.

    Args:
      forward: from `flattened`.
    """
    reading = read_forward(forward, flat, policy, prefix)
    bases = _bases(reading)
    decisions = _decide_bases(bases)
    recomputed = [v for v, d in decisions.items() if isinstance(d.action, Recompute)]
    stored = [v for v in decisions if v not in recomputed]
    normalized = _normalized(bases, decisions, stored)
    decisions |= {v: decisions[v].with_remark(Remark.NORMALIZED) for v in normalized}
    # Encoding needs the statistics too: they are kept, not evaluated again.
    statistics = [v for n in normalized.values() for v in n.statistics]
    apart = {
        v: one
        for v, one in reading.forward.apart.items()
        if v in stored and decisions[v].bias is not Bias.EXACT
    }
    classes = bases.chooser.classes.with_kept(set(statistics))
    chooser = dataclasses.replace(bases.chooser, classes=classes)
    known = stored + [n.centered for n in normalized.values() if n.centered]
    residuals = [*reading.leaves, *statistics]
    kept, replayed = chooser.with_latest(residuals, known).derive(residuals, known)
    elements = [v for one in apart.values() for v in one.statistics]
    kept, statistics = [*kept, *elements], [*statistics, *elements]
    for v in _sources(chooser, recomputed, stored):
        decisions[v] = decisions[v].biased(Remark.RECOMPUTED_FROM)
    replay = _replay(chooser, replayed)
    sources = {v for step in replay for v in step.inputs}.union(statistics)
    decisions |= {v: _decide_exact(bases, v, v in sources) for v in kept}
    return finish(reading, decisions, replay, normalized, apart)


def _replay(chooser: Chooser, replayed: Collection[int]) -> list[Replay]:
    """The steps for equations that are given by id, in order."""
    return [
        Replay(eqn, chooser.classes.sides.get(eqn.outvars[0]))
        for eqn in chooser.jaxpr.eqns
        if id(eqn) in replayed
    ]


def _bases(reading: Reading) -> _Bases:
    """Classify the values in a forward program."""
    program, in_place = reading.program, referenced(reading)
    inexact = {
        v
        for v in program.jaxpr.invars
        if is_float(v)
        and fact_of(program.facts, v)
        and (reading.is_activation(v) or v not in in_place)
    }
    stays = {
        v
        for v in reading.leaves
        if reading.is_stored_inside(v) or reading.is_on_host(v)
    }

    norms = norms_in(program)

    def chooser_with(kept: Collection[Var], factors: Collection[Var] = ()) -> Chooser:
        classes = classify(
            program,
            reading.small_size,
            inexact,
            kept,
            lambda v: norms.normalizing(v) is not None,
            lambda v: norms.sums.normalizing(v) is not None,
            factors,
        )
        return Chooser(program, classes.with_exact(stays))

    chooser = chooser_with(())
    inside = kept_inside(chooser)
    reasons = ill_conditioned(chooser, reading.leaves, reading.links)
    spared = {
        v: reason
        for v, reason in (reasons | inside).items()
        if _is_rounded_by_default(reading, chooser, v)
    }
    if spared:
        chooser = chooser_with(spared)
    near = [v for v, reason in spared.items() if reason is Reason.NEAR_POLE]
    found, multiplied = sources_near_poles(reading, chooser, near, inside)
    found = {v for v in found if _is_rounded_without_rule(reading, chooser, v)}
    if found:
        spared |= dict.fromkeys(found - spared.keys(), Reason.BEFORE_POLE)
        chooser = chooser_with(spared, multiplied)
    if repeated := _repeated(reading, chooser):
        spared |= dict.fromkeys(repeated - spared.keys(), Reason.REPEATED)
        chooser = chooser_with(spared, multiplied)

    def bases_with(wholes: Collection[Var]) -> _Bases:
        stored = tuple(chooser.choose(reading.leaves, wholes))
        uses = _uses(reading, _roundings(chooser, stored))
        return _Bases(reading, chooser, norms, stored, uses, spared)

    bases = bases_with(())
    wholes = _alike_in_parts(bases)
    return bases_with(wholes) if wholes else bases


def _repeated(reading: Reading, chooser: Chooser) -> set[Var]:
    """Small sources that stay exact in place of larger values that would be rounded."""
    stored = chooser.choose(reading.leaves)
    rounded = [v for v in stored if _is_rounded_without_rule(reading, chooser, v)]
    found = sources_of_larger(chooser, rounded)
    decisions = {v: reading.decide(_residual(reading, chooser, v)) for v in found}
    return {v for v, decision in decisions.items() if not _has_rule(decision)}


def _uses(reading: Reading, roundings: Mapping[Atom, int]) -> Uses:
    """How the backward program uses roundings, as bits by `_roundings`."""
    pairs = reading.forward.residual_pairs
    own = {own: roundings[v] for v, own in pairs if roundings.get(v)}
    return find_uses(reading.forward, own)


def _alike_in_parts(bases: _Bases) -> list[Var]:
    """Values whose parts would all be packed alike, in the same groups."""
    chooser = bases.chooser
    classes = chooser.classes
    parts: dict[Var, list[Var]] = {}
    for v in bases.stored:
        if v in classes.parts and v not in classes.names:
            parts.setdefault(classes.parts[v], []).append(v)
    return [
        whole
        for whole, own in parts.items()
        if sum(v.aval.size for v in own) == whole.aval.size
        and all(is_cut_at_groups(v, whole, chooser) for v in own)
        and _is_decided_alike(bases, whole, own)
    ]


def _is_decided_alike(bases: _Bases, whole: Var, parts: Sequence[Var]) -> bool:
    """Whether the policy rounds all parts by one action, and by no rule about parts.

    A rule may be about the whole: by a key that was measured.
    """
    decisions = [_decide_base(bases, v) for v in parts]
    is_again = any(d.residual.is_recomputed_from for d in decisions)
    residual = _residual(bases.reading, bases.chooser, whole)
    residual = dataclasses.replace(residual, is_recomputed_from=is_again)
    decision = bases.reading.decide(residual)
    rules = {d.rule for d in decisions} - {None}
    if any(d.bias is Bias.EXACT or isinstance(d.action, Recompute) for d in decisions):
        return False
    actions = {d.action for d in decisions}
    if rules:
        return rules == {decision.rule} and actions == {decision.action}
    return len(actions) == 1


def _roundings(chooser: Chooser, stored: Sequence[Var]) -> dict[Atom, int]:
    """For each inexact variable the stored bases it is derived from, as bits."""
    bits = {v: 1 << number for number, v in enumerate(stored)}
    roundings: dict[Atom, int] = dict(bits)
    for eqn in chooser.jaxpr.eqns:
        union = 0
        for x in variables_in(eqn.invars):
            union |= roundings.get(x, 0)
        for v in eqn.outvars:
            if v not in bits and not chooser.classes.is_exact(v):
                roundings[v] = union
    return roundings


def _decide_bases(bases: _Bases) -> Decisions:
    """A decision for each base to store, or to compute again from others."""
    producers = bases.reading.program.producers
    todo = list(bases.stored)
    decisions: Decisions = {}
    while todo:
        v = todo.pop(0)
        if v in decisions:
            continue
        decisions[v] = decision = _decide_base(bases, v)
        if not isinstance(decision.action, Recompute):
            continue
        reason = obstacle(bases.reading, v)
        if reason is None:
            known = {*todo, *decisions}
            todo += _nearest_sources(bases.chooser, producers[v], known)
        else:
            decisions[v] = keep_instead(decision, reason)
    return decisions


def _decide_base(bases: _Bases, v: Var) -> Decision:
    residual = _residual(bases.reading, bases.chooser, v)
    norm = _normalizing(bases, v)
    if norm is not None and not norm.is_gathered:
        is_by_channel = norm.axes == (len(v.aval.shape) - 1,)
        residual = dataclasses.replace(residual, is_normalized=is_by_channel)
    reading, uses = bases.reading, bases.uses
    bit = 1 << bases.stored.index(v) if v in bases.stored else 0
    if uses.nonlinear & bit:
        residual = dataclasses.replace(residual, is_recomputed_from=True)
    decision = reading.decide(residual)
    if decision.bias is Bias.EXACT:
        return decision
    unbounded = {Reason.DIVIDED_BY: uses.divided, **uses.unbounded}
    for reason, bits in unbounded.items():
        if bits & bit and decision.rule is None:
            return Decision(residual, Exact(), reason)
    if uses.nonlinear & bit:
        return decision.biased(Remark.CUSTOM_RULE)
    return decision.repeated() if uses.repeated & bit else decision


def _decide_exact(bases: _Bases, v: Var, is_source: bool) -> Decision:
    """About an exact value, which no rule rounds if others are computed from it."""
    reading, residual = bases.reading, _residual(bases.reading, bases.chooser, v)
    if v in bases.spared:
        return Decision(residual, Exact(), bases.spared[v])
    if unrounded := decide_unrounded(reading, v, residual):
        return unrounded
    decision = reading.decide(residual, statistic=True)
    is_again = isinstance(decision.action, Recompute)
    if is_again or (is_source and decision.bias is not Bias.EXACT):
        why = "others are computed from it"
        return dataclasses.replace(
            decision, action=Exact(), bias=Bias.EXACT, declined=why
        )
    return decision


def _is_rounded_by_default(reading: Reading, chooser: Chooser, v: Var) -> bool:
    """Whether the policy decides about `v`, and rounds it without a rule for it."""
    residual = _residual(reading, chooser, v)
    is_undecided = decide_unrounded(reading, v, residual) is None
    return is_undecided and _is_rounded_without_rule(reading, chooser, v)


def _is_rounded_without_rule(reading: Reading, chooser: Chooser, v: Var) -> bool:
    """Whether a base is rounded, if stored, and no rule asked for it.

    Or it would be in longer rows: a number each, from which slopes are computed.
    """
    decision = reading.decide(_residual(reading, chooser, v))
    is_rounded = decision.bias is not Bias.EXACT or decision.declined != ""
    return is_rounded and not _has_rule(decision)


def _has_rule(decision: Decision) -> bool:
    """Whether a rule decided, or the policy recomputes."""
    return decision.rule is not None or isinstance(decision.action, Recompute)


def _residual(reading: Reading, chooser: Chooser, v: Var) -> Residual:
    """`v`, with the names of values that are derived from it."""
    residual = reading.provenance.of(chooser.classes.softmaxes.get(v, v))
    # A softmax's exponential may have been moved.
    residual = dataclasses.replace(
        residual, shape=tuple(v.aval.shape), width=chooser.classes.widths.get(v)
    )
    names = [Name(residual.name, residual.label)] if residual.name else []
    for eqn in chooser.classes.names.get(v, []):
        name, label = reading.provenance.name_of(eqn)
        names.append(Name(name.removeprefix(DERIVATIVE_OF), label))
    if not names:
        return residual
    (name, label), *aliases = names
    return dataclasses.replace(
        residual, name=name, label=label, aliases=tuple(n.name for n in aliases)
    )


def _normalizing(bases: _Bases, v: Var) -> Normalized | None:
    """The normalization that the program applies to `v`, if exact."""
    norm = bases.norms.normalizing(v)
    is_exact = bases.chooser.classes.is_exact
    if norm is None or not all(map(is_exact, norm.coefficients)):
        return None
    return norm


def _normalized(
    bases: _Bases, decisions: Decisions, stored: Sequence[Var]
) -> dict[Var, Normalized]:
    """The map that each rounded variable is stored through, where there is one."""
    rounded = [v for v in stored if decisions[v].bias is not Bias.EXACT]
    norms = {v: _normalizing(bases, v) for v in rounded}
    return {v: _with_steps(bases, norm) for v, norm in norms.items() if norm}


def _with_steps(bases: _Bases, norm: Normalized) -> Normalized:
    """The same map, which gathers its coefficients where it is applied.

    They have as many elements as the array, and their sources have few.
    """
    if not norm.is_gathered:
        return norm
    sources, replayed = bases.chooser.derive(norm.coefficients, ())
    steps = tuple(_replay(bases.chooser, replayed))
    return dataclasses.replace(norm, sources=tuple(sources), steps=steps)


def _nearest_sources(chooser: Chooser, eqn: Eqn, stored: Collection[Var]) -> list[Var]:
    """Bases that an equation is computed from, past elementwise equations."""
    todo, seen, sources = chooser.bases(eqn.invars), set(), []
    while todo:
        v = todo.pop()
        if v in seen:
            continue
        seen.add(v)
        maker = chooser.producers.get(v)
        if v in stored or maker is None or maker.primitive.name not in ELEMENTWISE:
            sources.append(v)
        else:
            todo += chooser.bases(maker.invars)
    return sources


def _sources(
    chooser: Chooser, recomputed: Sequence[Var], stored: Sequence[Var]
) -> list[Var]:
    """The stored bases that the recomputed ones are computed from."""
    if not recomputed:
        return []
    _, replayed = chooser.derive(recomputed, stored)
    read = {v for step in _replay(chooser, replayed) for v in step.inputs}
    return [v for v in stored if v in read]
