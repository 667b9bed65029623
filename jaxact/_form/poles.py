"""Arguments that may come near the pole of a function, and its derivative's.

The slope of log(q + 1e-9) spans nine orders of magnitude, and is multiplied with
softmax's own rounded factor: at 8 bits the gradient of the naive cross-entropy had 1.4
times its own size in noise, and `rel_entr(p, softmax(z))` 837 times. With the argument
exact both factors cancel as they do without rounding.
"""

from collections.abc import Mapping, Sequence, Set

from jaxact._form.chooser import Chooser
from jaxact._form.pole_arguments import MIXING, arguments_near_poles
from jaxact._form.returned import values_returned
from jaxact._jaxpr.primitives import CHEAP, EXPONENTIALS, MOVES, SELECTIONS
from jaxact._jaxpr.read import (
    call_body,
    is_literal,
    is_square,
    names_inside,
    variables_in,
)
from jaxact._jaxpr.types import Atom, Eqn, Jaxpr, Producers, Var

# Functions whose slope vanishes where they come near zero, as a function of the result,
# and those whose slope a rounded result does not give: softplus(x), elu(x) + 1.
_SLOPE_BY_RESULT = EXPONENTIALS | {"logistic"}
_SLOPES = _SLOPE_BY_RESULT | frozenset("log log1p expm1 erfc".split())
# Parts of one network's output, a gate beside values, are sources apart.
UNSELECTED = CHEAP - SELECTIONS
# Elements of sources for each of an argument's: log(x^2 + y^2).
_MORE = 2


def bases_near_poles(chooser: Chooser, carried: Mapping[Var, Atom]) -> set[Var]:
    """Bases in which an argument is affine that may come near a pole.

    And of the values that one has elements of, with slopes that vanish with these; and
    of divisors that are selected.

    Args:
      carried: in a scan's body, the output of the step before that an input is.
    """
    classes, arguments = chooser.classes, arguments_near_poles(chooser.program)
    behind = arguments.behind(carried, with_sums=True)
    masked = behind.intersection(classes.softmaxes)
    mixed = behind & arguments.mixtures & _factors(chooser.jaxpr.eqns)
    # With an exponential exact in place of its softmax, parts of that are rounded.
    flat = arguments.flat(carried).difference(classes.softmaxes.values())
    # Whose slope in the next step would be rounded: log(b)'s is 1 / b.
    states = [v for v, before in carried.items() if before in masked]
    found = (*arguments.bounded, *arguments.selected(), *flat, *masked, *mixed, *states)
    return {classes.whole_base(v) for v in found if not classes.is_exact(v)}


def bases_returned(chooser: Chooser, results: Sequence[Var]) -> set[Var]:
    """Bases of values above zero that are returned, or that give their slopes.

    A function outside may have a pole in them. XLA holds outputs once for all readers.
    Of squares, those that a number is added to: a deviation z^2 + 1e-4.

    Args:
      results: the call's.
    """
    jaxpr, classes = chooser.jaxpr, chooser.classes
    returned = values_returned(chooser.program, results)
    raised, factors = _raised(jaxpr), _factors(jaxpr.eqns)
    found = returned.intersection(classes.softmaxes)
    for eqn in jaxpr.eqns:
        outputs = returned.intersection(eqn.outvars)
        # Values behind a product are found where it is a mixture alone.
        is_mixing = eqn.primitive.name in MIXING and outputs <= factors
        if is_mixing and returned.issuperset(variables_in(eqn.invars)):
            found |= outputs
        names = names_inside(eqn) if outputs else frozenset()
        has_rule = call_body(eqn) is not None
        if has_rule:  # whose slopes are of its results or operands
            outputs = outputs.union(variables_in(eqn.invars))
        elif not _SLOPE_BY_RESULT.isdisjoint(names):
            found |= outputs.difference(classes.softmaxes.values())
            continue
        is_even = _is_even(eqn, chooser.producers)
        is_raised = is_even and not outputs.isdisjoint(raised)
        if is_raised or not _SLOPES.isdisjoint(names):
            found = found.union(*(sources_of(v, chooser) for v in outputs))
    return {classes.whole_base(v) for v in found if not classes.is_exact(v)}


def _factors(eqns: Sequence[Eqn]) -> set[Var]:
    """Values that are multiplied element by element."""
    products = (eqn for eqn in eqns if eqn.primitive.name == "mul")
    return {v for eqn in products for v in variables_in(eqn.invars)}


def _raised(jaxpr: Jaxpr) -> set[Var]:
    """Values that a number is added to."""
    sums = (eqn.invars for eqn in jaxpr.eqns if eqn.primitive.name == "add")
    return {v for s in sums if any(map(is_literal, s)) for v in variables_in(s)}


def _is_even(eqn: Eqn, producers: Producers) -> bool:
    """Whether it squares a value that is no ReLU: that is an activation."""
    if not is_square(eqn):
        return False
    makers = [producers[v] for v in variables_in(eqn.invars) if v in producers]
    return all(maker.primitive.name != "max" for maker in makers)


def sources_of(v: Var, chooser: Chooser, cheap: Set[str] = CHEAP) -> set[Var]:
    """Values that an argument is a cheap function of, unless they are larger.

    Rounded, they have noise that the pole magnifies: the slope of log(x^2 + 1e-3) is x
    times 2 / (x^2 + 1e-3), at 8 bits with an error of two gradients; that of
    x rsqrt(x^2 + 1e-4) is a small difference.

    Of a larger output, such as a policy's with a value beside its mean and deviation,
    the parts: with the sample exact, the deviation's slope had tanh's in it, which
    ends beside the pole (340 gradients at 8 bits).

    Args:
      cheap: names that are looked past.
    """
    size = v.aval.size
    for passed in (cheap, cheap - SELECTIONS):
        sources = sources_behind(v, chooser, passed)
        # Targets that a mixture's components share are smaller, and count for nothing:
        # with a mean and a deviation they are three sources of a component's slope.
        sizes = (x.aval.size for x in sources)
        if sum(n for n in sizes if n >= size) <= _MORE * size:
            return sources
    sample = _only_source(v, chooser, cheap)
    return set() if sample is v else {sample}


def _only_source(v: Var, chooser: Chooser, cheap: Set[str]) -> Var:
    """The farthest value that alone an argument is computed from, no larger than it.

    The sample u of a policy in log(1 - tanh(u)^2 + 1e-6), which is made from a mean, a
    deviation and noise (soft actor-critic: 1 - tanh(u)^2 on its own had noise of 7
    gradients at 4 bits).
    """
    is_exact = chooser.classes.is_exact
    while True:
        eqn = chooser.producers.get(v)
        if eqn is None or not _is_passed(eqn, cheap):
            return v
        operands = {u for u in variables_in(eqn.invars) if not is_exact(u)}
        if len(operands) != 1 or next(iter(operands)).aval.size > v.aval.size:
            return v
        (v,) = operands


def sources_behind(
    v: Var, chooser: Chooser, cheap: Set[str] = CHEAP, ends: Set[Var] = frozenset()
) -> set[Var]:
    """The inexact values that `v` is computed from, past cheap functions.

    Args:
      ends: sources already.
    """
    sources: set[Var] = set()
    todo, seen, is_exact = [v], set(), chooser.classes.is_exact
    while todo:
        x = todo.pop()
        eqn = None if x in ends else chooser.producers.get(x)
        if eqn is None or not _is_passed(eqn, cheap):
            sources.add(x)
            continue
        inexact = [u for u in variables_in(eqn.invars) if not is_exact(u)]
        is_moved = eqn.primitive.name in MOVES
        if not (inexact or is_moved or is_exact(x)):
            sources.add(x)  # a bias and a product that is exact only if it is stored
            continue
        new = [u for u in inexact if u not in seen]
        seen.update(new)
        todo += new
    return sources


def _is_passed(eqn: Eqn, cheap: Set[str]) -> bool:
    """Whether sources are looked for behind an equation."""
    return eqn.primitive.name in cheap and not eqn.effects
