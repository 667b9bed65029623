"""Statistics: sums, means and extremes that scale or shift other values.

A norm's mean and deviation, a softmax's maximum and sum: all elements that are scaled
by one get its noise alike, so they are told by their use and not by their size. A
reduction that a product contracts with is none, and neither is one that scales nothing:
a pooled feature is an activation like another.
"""

from collections.abc import Collection, Mapping, Sequence, Set

from jaxact._form.inside import insides, scan_bodies
from jaxact._form.magnified import is_inverse, magnified_in
from jaxact._jaxpr.flow import Facts
from jaxact._jaxpr.primitives import (
    COLLECTIVES,
    JOINS,
    MATMULS,
    MOVES,
    REDUCTIONS,
    RESHAPES,
    SCATTERS,
    VIEWS,
)
from jaxact._jaxpr.read import (
    contracts,
    is_float,
    is_literal,
    keeps_elements,
    programs_in,
    sums_rows,
    variables_in,
)
from jaxact._jaxpr.types import Jaxpr, Var
from jaxact._plan.facts import is_activation
from jaxact._plan.program import Program, found_once

# Elements that one divisor has: exact, it takes half a byte for each of them.
_ROW = 8


@found_once
def find_statistics(program: Program) -> Set[Var]:
    """Results of reductions, and elementwise functions of them and of parameters."""
    jaxpr, facts, spread = program.jaxpr, program.facts, spread_sums(program)
    divisors = _divisors(jaxpr, spread, _reduced(jaxpr, facts))
    # A sum's inverse that the elements of a segment gather is no feature.
    gathered = _gathered_inverses(jaxpr, spread)
    contracted = contracted_in(jaxpr, _contracted_inside(program))
    contracted -= gathered | (divisors & spread.keys())
    statistics = _inside(program) - contracted
    magnified = magnified_in(jaxpr)
    numbers = {v for v in jaxpr.invars if not v.aval.shape}
    for eqn in jaxpr.eqns:
        inputs = variables_in(eqn.invars)
        if not inputs or not eqn.outvars:  # a random draw; a print
            continue
        own = divisors.intersection(eqn.outvars) - contracted
        statistics.update(filter(is_float, own))
        v = eqn.outvars[0]
        if v in contracted or not is_float(v):
            continue
        if numbers.issuperset(inputs):
            numbers.add(v)
        if v in divisors:
            continue
        is_sum = eqn.primitive.name in REDUCTIONS | SCATTERS | {"reduce_window_sum"}
        if is_sum or sums_rows(eqn):
            is_smaller = v.aval.size < max(x.aval.size for x in inputs)
            if is_smaller and v in magnified:
                statistics.add(v)
        elif eqn.primitive.name in RESHAPES or v in gathered:
            # GroupNorm's, for each of its channels; a segment's, for each element.
            if v in spread or not statistics.isdisjoint(inputs):
                statistics.add(v)
        elif eqn.primitive.name in COLLECTIVES:
            # Of a norm whose batch is split.
            for x, out in zip(eqn.invars, eqn.outvars, strict=True):
                if not is_literal(x) and x in statistics:
                    statistics.add(out)
        elif eqn.primitive.name in JOINS | VIEWS - MOVES:
            # Means that are sent together.
            if statistics.issuperset(filter(is_float, inputs)):
                statistics.update(eqn.outvars)
        elif keeps_elements(eqn):
            known = [x for x in inputs if x in statistics]
            # A learned exponent is no other: mean(x^p)^(1/p).
            unknown = [x for x in inputs if x not in statistics and x not in numbers]
            others = [x for x in unknown if is_float(x)]
            is_alike = any(x.aval.size == v.aval.size for x in known)
            if is_alike and not any(is_activation(facts, x) for x in others):
                statistics.add(v)
    return statistics


def _inside(program: Program) -> set[Var]:
    """Outputs of equations that are statistics in the programs inside."""
    return {
        output
        for inside in insides(program)
        for v, output in inside.outputs
        if v in find_statistics(inside.program)
    }


@found_once
def spread_sums(program: Program) -> Mapping[Var, set[Var]]:
    """Products that give many elements the sums of few others, and these sums.

    A softmax by segment divides by onehot @ (onehot.T @ e).
    """
    sums: set[Var] = set()
    spread: dict[Var, set[Var]] = {}
    for eqn in program.jaxpr.eqns:
        inputs = variables_in(eqn.invars)
        if not inputs or len(eqn.outvars) != 1:
            continue
        (v,) = eqn.outvars
        if keeps_elements(eqn):
            if any(u in sums and u.aval.size == v.aval.size for u in inputs):
                sums.add(v)
        elif eqn.primitive.name in MATMULS | REDUCTIONS | SCATTERS:
            if _ROW * v.aval.size <= max(u.aval.size for u in inputs):
                sums.add(v)
            few = {u for u in inputs if u in sums and _ROW * u.aval.size <= v.aval.size}
            if few and eqn.primitive.name in MATMULS:
                spread[v] = few
    return spread


def _reduced(jaxpr: Jaxpr, facts: Facts) -> set[Var]:
    """Reductions, inputs of one number an index, and functions of these alone."""
    reduced = {v for v in jaxpr.invars if len(v.aval.shape) == 1}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in REDUCTIONS | SCATTERS:
            reduced.update(eqn.outvars)
        elif keeps_elements(eqn):
            active = {v for v in variables_in(eqn.invars) if is_activation(facts, v)}
            reduced.update(eqn.outvars if active and active <= reduced else ())
    return reduced


def _divisors(
    jaxpr: Jaxpr, spread: Collection[Var], reduced: Collection[Var]
) -> set[Var]:
    """Values that divide other arrays' elements, even if they are no smaller.

    Products by which rows are divided, a linear attention's normalizers; segments'
    reductions, which may be as many as elements, and their sums that a product spreads.
    Also what a loop or a branch returns for each row, to divide or scale it: the sum
    that attention by blocks carries.
    """
    sizes: dict[Var, int] = {}  # the largest array that a variable divides
    multiplied: dict[Var, int] = {}  # or is multiplied with
    divisors: set[Var] = set()
    for eqn in reversed(jaxpr.eqns):
        name, inputs = eqn.primitive.name, variables_in(eqn.invars)
        size = max((v.aval.size for v in eqn.outvars), default=0)
        # A broadcast along rows, an epsilon; by segment.
        is_same = keeps_elements(eqn) or name == "gather"
        own = _largest(eqn.outvars, sizes, 0)
        # Not the rows that an index selects: an action's logits.
        if name in SCATTERS or (name == "gather" and inputs[0] in reduced):
            divisors.update(v for v in eqn.outvars if v in sizes)
        elif name in MATMULS:
            divisors.update(
                v
                for v in eqn.outvars
                if _ROW * v.aval.size <= sizes.get(v, 0) or (v in spread and v in sizes)
            )
        elif programs_in(eqn):  # a loop's running sums, and inverses made in it
            divisors.update(
                v
                for v in eqn.outvars
                if _ROW * v.aval.size <= max(sizes.get(v, 0), multiplied.get(v, 0))
            )
        if is_inverse(eqn):
            scaled = _largest(eqn.outvars, multiplied, size)
            _enlarge(sizes, inputs, max(own, scaled))
        elif name == "div":
            _enlarge(sizes, variables_in(eqn.invars[:1]), own)
            _enlarge(sizes, variables_in(eqn.invars[1:]), size)
        elif own and is_same:
            _enlarge(sizes, inputs, own)
        if name == "mul" or (name in MATMULS and not contracts(eqn)):
            _enlarge(multiplied, inputs, size)
        elif is_same:
            _enlarge(multiplied, inputs, _largest(eqn.outvars, multiplied, 0))
    return divisors


def _largest(variables: Sequence[Var], sizes: dict[Var, int], default: int) -> int:
    """The largest size that is known for one; `default` where none is."""
    return max((sizes[v] for v in variables if v in sizes), default=default)


def _enlarge(sizes: dict[Var, int], variables: Sequence[Var], size: int) -> None:
    """Let variables that divide or scale an array have at least its size."""
    for v in variables if size else ():
        sizes[v] = max(sizes.get(v, 0), size)


def _gathered_inverses(jaxpr: Jaxpr, spread: Mapping[Var, set[Var]]) -> set[Var]:
    """Gathered inverses, or inverse roots, of other values; also those to be spread."""
    inverses: set[Var] = set()
    gathered: set[Var] = set()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if is_inverse(eqn):
            inverses.update(eqn.outvars)
        elif name in MOVES | {"gather"} and not inverses.isdisjoint(
            variables_in(eqn.invars[:1])
        ):
            inverses.update(eqn.outvars)
            gathered.update(eqn.outvars if name == "gather" else ())
        for v in spread.keys() & set(eqn.outvars):
            if not spread[v].isdisjoint(inverses):
                gathered.update((v, *spread[v]))
    return gathered


def _contracted_inside(program: Program) -> set[Var]:
    """Operands of loops that products in their bodies contract with.

    DreamerV3's encoder ends in a pool, and its features go into a recurrence.
    """
    operands: set[Var] = set()
    for body in scan_bodies(program):
        contracted = contracted_in(body.program.jaxpr)
        operands.update(operand for v, operand in body.inputs if v in contracted)
    return operands


def contracted_in(jaxpr: Jaxpr, inside: Collection[Var] = ()) -> set[Var]:
    """Variables that a product contracts with, also past elementwise functions.

    Or in one array with others, as a graph network's nodes with their neighbours' mean.
    There it may be repeated: a FermiNet's electrons are each joined with the mean over
    all, which has weights to itself.

    Args:
      inside: those that the programs in equations contract with.
    """
    contracted = set(inside)
    joined: set[Var] = set()  # with others, in what a product contracts with
    for eqn in reversed(jaxpr.eqns):
        inputs = variables_in(eqn.invars)
        if eqn.primitive.name in MATMULS:
            if contracts(eqn):
                contracted.update(inputs)
        elif eqn.primitive.name in MOVES and eqn.outvars[0] in joined:
            contracted.update(inputs)
            joined.update(inputs)
        elif keeps_elements(eqn) and eqn.outvars[0] in contracted:
            size = eqn.outvars[0].aval.size
            contracted.update(x for x in inputs if x.aval.size == size)
        elif eqn.primitive.name in JOINS and eqn.outvars[0] in contracted:
            size = eqn.outvars[0].aval.size
            large = [x for x in inputs if _ROW * x.aval.size >= size]
            contracted.update(large)
            joined.update(large)
    return contracted
