"""Arguments that may come near the pole of a function, and its derivative's.

The slope of log(q + 1e-9) spans nine orders of magnitude, and is multiplied with
softmax's own rounded factor: at 8 bits the gradient of the naive cross-entropy had 1.4
times its own size in noise, and `rel_entr(p, softmax(z))` 837 times. With the argument
exact both factors cancel as they do without rounding.
"""

from collections.abc import Mapping, Set

from jaxact._form.affine_classes import Classes
from jaxact._form.pole_arguments import arguments_near_poles
from jaxact._jaxpr.primitives import CHEAP
from jaxact._jaxpr.read import variables_in
from jaxact._jaxpr.types import Atom, Jaxpr, Producers, Var

# Elements of sources for each of an argument's: log(x^2 + y^2).
_MORE = 2


def bases_near_poles(
    jaxpr: Jaxpr, classes: Classes, carried: Mapping[Var, Atom]
) -> set[Var]:
    """Bases in which an argument is affine that may come near a pole.

    And of the values that one has elements of, with slopes that vanish with these; and
    of divisors that are selected.

    Args:
      carried: in a scan's body, the output of the step before that an input is.
    """
    arguments = arguments_near_poles(jaxpr, carried)
    masked = arguments.behind(with_sums=True).intersection(classes.softmaxes)
    # With an exponential exact in place of its softmax, parts of that are rounded.
    flat = arguments.flat().difference(classes.softmaxes.values())
    # Whose slope in the next step would be rounded: log(b)'s is 1 / b.
    states = [v for v, before in carried.items() if before in masked]
    found = (*arguments.bounded, *arguments.selected(), *flat, *masked, *states)
    return {classes.whole_base(v) for v in found if not classes.is_exact(v)}


def sources_of(
    v: Var, classes: Classes, producers: Producers, cheap: Set[str] = CHEAP
) -> set[Var]:
    """Values that an argument is a cheap function of, unless they are larger.

    Rounded, they have noise that the pole magnifies: the slope of log(x^2 + 1e-3) is x
    times 2 / (x^2 + 1e-3), at 8 bits with an error of two gradients; that of
    x rsqrt(x^2 + 1e-4) is a small difference.

    Args:
      cheap: names that are looked past.
    """
    sources = sources_behind(v, classes, producers, cheap)
    if sum(x.aval.size for x in sources) <= _MORE * v.aval.size:
        return sources
    sample = _only_source(v, classes, producers, cheap)
    return set() if sample is v else {sample}


def _only_source(
    v: Var, classes: Classes, producers: Producers, cheap: Set[str]
) -> Var:
    """The farthest value that alone an argument is computed from, no larger than it.

    The sample u of a policy in log(1 - tanh(u)^2 + 1e-6), which is made from a mean, a
    deviation and noise (soft actor-critic: 1 - tanh(u)^2 on its own had noise of 7
    gradients at 4 bits).
    """
    while True:
        eqn = producers.get(v)
        if eqn is None or eqn.primitive.name not in cheap or eqn.effects:
            return v
        operands = {u for u in variables_in(eqn.invars) if not classes.is_exact(u)}
        if len(operands) != 1 or next(iter(operands)).aval.size > v.aval.size:
            return v
        (v,) = operands


def sources_behind(
    v: Var,
    classes: Classes,
    producers: Producers,
    cheap: Set[str] = CHEAP,
    ends: Set[Var] = frozenset(),
) -> set[Var]:
    """The inexact values that `v` is computed from, past cheap functions.

    Args:
      ends: sources already.
    """
    sources: set[Var] = set()
    todo, seen = [v], set()
    while todo:
        x = todo.pop()
        eqn = None if x in ends else producers.get(x)
        if eqn is None or eqn.primitive.name not in cheap or eqn.effects:
            sources.add(x)
            continue
        new = [u for u in variables_in(eqn.invars) if u not in seen]
        seen.update(new)
        todo += [u for u in new if not classes.is_exact(u)]
    return sources
