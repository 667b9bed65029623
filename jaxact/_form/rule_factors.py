"""A custom rule's factors of cotangents, computed before anything is rounded.

A `jax.custom_vjp` may keep a value and bend it in its backward pass: a ReLU or a
spiking neuron's surrogate compares its input, another activation takes its slope there.
From the rounded input that is biased, and an element near a threshold changes sides: a
ReLU's gradient was 9 % off at 8 bits, that of a spiking network 25 %. Computed in the
forward pass, a comparison takes one bit and is exact, and a slope is rounded without
bias. This is done where it stores no more: flash attention keeps queries and keys.

Where a cotangent meets several factors, element by element, their product is stored if
it is smaller: one slope for a GELU whose rule differentiates it anew.
"""

import dataclasses
import functools
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set

import jax.numpy as jnp

from jaxact._flat import Flat
from jaxact._form.derivative import DERIVATIVE_OF
from jaxact._form.scalings import Scaling, scalings
from jaxact._jaxpr.compat import custom_vjp_body, with_constants
from jaxact._jaxpr.flow import fact_of, flow, repeated, union
from jaxact._jaxpr.primitives import BARRIERS, BILINEAR, CHECKPOINTS, LINEAR_IN_ALL
from jaxact._jaxpr.read import (
    is_cheap,
    is_float,
    loses_precision,
    programs_in,
    variables_in,
)
from jaxact._jaxpr.rewrite import (
    Body,
    flatten,
    inlinable_body,
    new_equation,
    new_variable,
    prune,
    rename,
    with_outputs,
    without_unused,
)
from jaxact._jaxpr.structure import is_compressed_call
from jaxact._jaxpr.types import Array, Eqn, Jaxpr, Renaming, Var
from jaxact._plan.facts import ACTIVATION, STORED, input_facts, learn
from jaxact._plan.forward import Backward, Forward
from jaxact._plan.storage import StoragePlan
from jaxact._policy import RECOMPUTED_FROM_BITS, Policy

# Stored in place of so many bits; a mask beside a slope, both from one value of 8 bits
# (learned step sizes), is an eighth more.
_MOST = 1.25
# Evaluated where they are: they hold values back.
_HELD = CHECKPOINTS | BARRIERS


def with_rule_factors(
    forward: Forward, flat: Flat, policy: Policy
) -> tuple[Forward, ...]:
    """A forward program with the factors that its custom rules bend residuals to.

    And, second, as it is, which may store less: a factor near a pole stays exact.
    Without such factors, only as it is.

    Args:
      flat: the function that it was traced from.
    """
    if not _has_rule(flat.jaxpr):
        return (forward,)
    facts = flow(forward.jaxpr, [0, *input_facts(flat)], learn)
    pairs = forward.residual_pairs
    stored = {own for v, own in pairs if fact_of(facts, v) & STORED}
    rounded = [
        own
        for v, own in dict.fromkeys(pairs)
        if is_float(v) and fact_of(facts, v) & ACTIVATION and own not in stored
    ]

    def body(eqn: Eqn) -> Body | None:
        is_inner = not stored.isdisjoint(variables_in(eqn.invars))
        return None if is_inner else inlinable_body(eqn)

    program, constants = flatten(forward.backward_program, body)
    # Policies with a default have it for values that a rule bends, too.
    bits = RECOMPUTED_FROM_BITS if policy.default is not None else policy.bits
    late_values = {*forward.backward.cotangents, *stored}
    backward = _Program.of(program, late_values, rounded, bits)
    factors, scalings = backward.choose()
    if not factors and not scalings:
        return (forward,)
    return _changed(
        forward, program, constants, backward.early, factors, scalings
    ), forward


def least(plans: Sequence[StoragePlan]) -> StoragePlan:
    """The first plan, with factors, unless a later one stores less by far."""
    first, *others = plans
    smaller = (p for p in others if _MOST * p.stored_bits < first.stored_bits)
    return next(smaller, first)


def _has_rule(jaxpr: Jaxpr) -> bool:
    """Whether a call in it has a custom backward rule, beside compressed calls."""
    for eqn in jaxpr.eqns:
        body = custom_vjp_body(eqn)
        if body is not None:
            if not is_compressed_call(body):
                return True
        elif any(map(_has_rule, programs_in(eqn))):
            return True
    return False


@dataclasses.dataclass(frozen=True, eq=False)
class _Program:
    """A backward program, and the part that depends on residuals alone.

    Sets of residuals are bits in an integer, by their position in `rounded`.

    Attributes:
      rounded: residuals that a policy would round.
      bits: that a stored element takes.
      early: equations without a cotangent.
      made_from: the residuals behind each value of `early`, and itself.
      bent: those from which something nonlinear was computed on the way.
      masks: for each value of `early` that is computed from masks alone, these.
      readers: for each value the late equations that read it, in order: a scaling for
        those in it, else an equation's id; None where the value is a gradient.
    """

    rounded: Sequence[Var]
    bits: int
    early: list[Eqn]
    made_from: Mapping[Var, int]
    bent: Mapping[Var, int]
    masks: Mapping[Var, frozenset[Var]]
    readers: Mapping[Var, dict[object, None]]

    @classmethod
    def of(
        cls, program: Jaxpr, late_values: set[Var], rounded: Sequence[Var], bits: int
    ) -> "_Program":
        """`late_values`: inputs that are not there in the forward pass."""
        early, late, dependent = list[Eqn](), list[Eqn](), set(late_values)
        for eqn in program.eqns:
            is_late = not dependent.isdisjoint(variables_in(eqn.invars))
            if is_late or eqn.effects or eqn.primitive.name in _HELD:
                late.append(eqn)
                dependent.update(eqn.outvars)
            else:
                early.append(eqn)
        made_from, bent = _facts(with_outputs(program, early, []), rounded)
        found = scalings(
            program, dependent, {v for v, bits in made_from.items() if bits}
        )
        owners: dict[int, object] = {id(e): s for s in found for e in s.eqns}
        readers = defaultdict[Var, dict[object, None]](dict)
        for eqn in late:
            for v in variables_in(eqn.invars):
                readers[v][owners.get(id(eqn), id(eqn))] = None
        for v in variables_in(program.outvars):
            readers[v][None] = None
        masks = _masks(early, made_from)
        return cls(rounded, bits, early, made_from, bent, masks, readers)

    def choose(self) -> tuple[list[Var], list[Scaling]]:
        """Values of `early` to store, and the scalings to replace by products."""
        factors = [v for v, bits in self.bent.items() if bits and v in self.readers]
        read = dict[Scaling, int]()
        for v in factors:
            for one in self._scalings_of(v):
                read[one] = read.get(one, 0) | self.made_from[v]
        sets = [*(self.made_from[v] for v in factors), *read.values()]
        chosen = list[Var](), list[Scaling]()
        for group in _joined(sets):
            own = [v for v in factors if self.made_from[v] & group]
            found = dict.fromkeys(one for v in own for one in self._scalings_of(v))
            by_slopes = [one for one in found if self._is_smaller(one, own)]
            stored = [v for v in own if not self.readers[v].keys() <= set(by_slopes)]
            if self._stores_no_more(own, stored, by_slopes):
                chosen[0].extend(stored)
                chosen[1].extend(by_slopes)
        return chosen

    def _scalings_of(self, v: Var) -> list[Scaling]:
        """Those that read a value."""
        return [one for one in self.readers[v] if isinstance(one, Scaling)]

    def _is_smaller(self, scaling: Scaling, bent: Sequence[Var]) -> bool:
        """Whether slopes take less than the factors that only this scaling reads.

        Or a cotangent is divided by a bent one, which may be zero once rounded.
        """
        if not set(bent).isdisjoint(scaling.divisors):
            return True
        own = [v for v in scaling.factors if self.readers[v].keys() == {scaling}]
        rounded = [v for v in own if self.made_from.get(v)]
        return self._size(scaling.results) < self._size(rounded)

    def _stores_no_more(
        self, bent: Sequence[Var], stored: Sequence[Var], by_slopes: Sequence[Scaling]
    ) -> bool:
        """Whether `stored` and slopes take no more than the residuals do otherwise."""
        gone, replaced = set(bent), set[object](by_slopes)
        factors = [v for one in by_slopes for v in one.factors]
        behind = _union(self.made_from.get(v, 0) for v in [*bent, *factors])
        still = _union(
            residuals
            for v, residuals in self.made_from.items()
            if v not in gone
            and v in self.readers
            and not self.readers[v].keys() <= replaced
        )
        results = [v for one in by_slopes for v in one.results]
        later = self._size([*stored, *results, *self._in(behind & still)])
        is_bent = _union(self.bent[v] for v in bent)
        bent_size = sum(v.aval.size for v in self._in(is_bent))
        now = self._size(self._in(behind & ~is_bent))
        now += bent_size * max(self.bits, RECOMPUTED_FROM_BITS)
        return later <= _MOST * now

    def _in(self, residuals: int) -> list[Var]:
        return [v for i, v in enumerate(self.rounded) if residuals >> i & 1]

    def _size(self, variables: Iterable[Var]) -> int:
        """Bits that they take, stored; masks for values that are made of these."""
        own = {x for v in variables for x in self.masks.get(v, [v])}
        return sum(v.aval.size * self._bits_of(v) for v in own)

    def _bits_of(self, v: Var) -> int:
        if v.aval.dtype == jnp.bool_:
            return 1
        return self.bits if is_float(v) else 8 * v.aval.dtype.itemsize


def _facts(
    early: Jaxpr, rounded: Sequence[Var]
) -> tuple[dict[Var, int], dict[Var, int]]:
    """For each value the residuals behind it, and those that were bent on the way."""
    count = len(rounded)
    every = (1 << count) - 1

    def transfer(eqn: Eqn, facts: Sequence[int], around: tuple[Eqn, ...]) -> int:
        out, name = union(eqn, facts, around), eqn.primitive.name
        if name in LINEAR_IN_ALL and not loses_precision(eqn):
            return out
        is_product = name in BILINEAR
        bent = repeated(facts) if is_product else out
        return out | (bent & every) << count

    bits = {v: 1 << i for i, v in enumerate(rounded)}
    inputs = [*early.constvars, *early.invars]
    facts = flow(early, [bits.get(v, 0) for v in inputs], transfer)
    return (
        {v: fact & every for v, fact in facts.items()},
        {v: fact >> count for v, fact in facts.items()},
    )


def _masks(
    early: Sequence[Eqn], made_from: Mapping[Var, int]
) -> dict[Var, frozenset[Var]]:
    """The masks of which values are made without residuals."""
    found: dict[Var, frozenset[Var]] = {}
    for eqn in early:
        operands = [v for v in variables_in(eqn.invars) if made_from[v]]
        for v in eqn.outvars:
            if v.aval.dtype == jnp.bool_:
                found[v] = frozenset([v])
            elif is_cheap(eqn) and all(x in found for x in operands):
                found[v] = frozenset().union(*(found[x] for x in operands))
    return found


def _changed(
    forward: Forward,
    program: Jaxpr,
    constants: Sequence[Array],
    early: Sequence[Eqn],
    factors: Sequence[Var],
    scalings: Sequence[Scaling],
) -> Forward:
    """The forward program with these factors and slopes as residuals.

    Args:
      program: the backward program, flattened, with more constants.
      early: its equations without a cotangent.
    """
    equations, found = list(early), list(factors)
    products: dict[Var, Eqn] = {}
    for one in scalings:
        eqns, slopes = one.slopes()
        equations += eqns
        found += slopes
        products |= one.by_slopes(slopes)
    names: Renaming = {own: v for v, own in forward.residual_pairs}
    added = [
        eqn.replace(invars=[rename(v, names) for v in eqn.invars])
        for eqn in prune(with_outputs(program, equations, found), found).eqns
    ]
    labelled = _named(forward.jaxpr, added, found)
    added += labelled.values()
    late = [_without(eqn, set(found), products) for eqn in program.eqns]
    late_program = without_unused(with_outputs(program, late, program.outvars))
    read = {*variables_in(program.outvars)}
    read.update(v for eqn in late_program.eqns for v in variables_in(eqn.invars))
    pairs = [
        (v, own) for v, own in dict.fromkeys(forward.residual_pairs) if own in read
    ]
    pairs += [(labelled[v].outvars[0] if v in labelled else v, v) for v in found]
    outputs = [*forward.jaxpr.outvars[: forward.num_outputs], *(v for v, _ in pairs)]
    jaxpr = with_outputs(forward.jaxpr, [*forward.jaxpr.eqns, *added], outputs)
    new = program.constvars[len(forward.jaxpr.constvars) :]
    return dataclasses.replace(
        forward,
        jaxpr=with_constants(jaxpr, new, constants),
        consts=(*forward.consts, *constants),
        vjp_tree=None,
        backward=Backward(
            tuple(own for _, own in pairs),
            forward.backward.cotangents,
            tuple(late_program.eqns),
            tuple(late_program.outvars),
        ),
    )


def _without(eqn: Eqn, known: Set[Var], products: Mapping[Var, Eqn]) -> Eqn:
    """The equation for the values that are not known: a loop may make others too."""
    if eqn.outvars and eqn.outvars[0] in products:
        return products[eqn.outvars[0]]
    outputs = [new_variable(v.aval) if v in known else v for v in eqn.outvars]
    return eqn.replace(outvars=outputs)


def _named(
    jaxpr: Jaxpr, added: Sequence[Eqn], factors: Sequence[Var]
) -> dict[Var, Eqn]:
    """Equations that name factors after the values which they are made from.

    Rules for those by a `checkpoint_name` find them.
    """
    behind: dict[Var, Eqn] = {}
    for eqn in (*jaxpr.eqns, *added):
        if eqn.primitive.name == "name":
            behind[eqn.outvars[0]] = eqn
    for eqn in added:
        found = [behind[v] for v in variables_in(eqn.invars) if v in behind]
        if found:
            behind.update(dict.fromkeys(eqn.outvars, found[0]))
    return {
        v: new_equation(
            behind[v],
            behind[v].primitive,
            [v],
            [new_variable(v.aval)],
            behind[v].params | {"name": DERIVATIVE_OF + behind[v].params["name"]},
        )
        for v in factors
        if v in behind and is_float(v)
    }


def _joined(sets: Iterable[int]) -> list[int]:
    """Unions of the sets that overlap, without empty ones."""
    joined: list[int] = []
    for one in filter(None, sets):
        apart = [other for other in joined if not other & one]
        joined = [*apart, one | _union(other for other in joined if other & one)]
    return joined


def _union(sets: Iterable[int]) -> int:
    return functools.reduce(operator.or_, sets, 0)
