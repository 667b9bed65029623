"""The last elementwise operations of a call, such as the sum with its input.

A barrier at a call's end lets nothing after it start before residuals are packed, and
XLA fuses nothing across it. These operations are evaluated behind it, so that XLA can
fuse them with their readers in the next call: in a transformer the sum at a block's
end with the next norm's statistics, in a DenseNet the division after a pool.
"""

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence

from jaxact._jaxpr.primitives import RESHAPES, WINDOWS
from jaxact._jaxpr.read import is_elementwise, producers_of, variables_in
from jaxact._jaxpr.rewrite import prune, with_inputs, with_outputs
from jaxact._jaxpr.types import Atom, Eqn, Jaxpr, Var

# Not convolutions: a GPU's library adds the bias that follows one, in the same kernel.
_STARTS = WINDOWS | {"dot_general"}


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """A program in two parts.

    Attributes:
      head: from the program's inputs to `held`, then the saved values.
      tail: from the program's inputs and `held` to its outputs.
      held: values between the two.
    """

    head: Jaxpr
    tail: Jaxpr
    held: tuple[Var, ...]


def parted(jaxpr: Jaxpr, num_outputs: int) -> Parts:
    """A program with its last operations apart.

    Args:
      num_outputs: its first outputs are the call's; the others are saved.
    """
    outputs, saved = jaxpr.outvars[:num_outputs], jaxpr.outvars[num_outputs:]
    eqns = _last(jaxpr, outputs, saved)
    made = {v for eqn in eqns for v in eqn.outvars}
    known = {*jaxpr.constvars, *jaxpr.invars, *made}
    read = variables_in([v for eqn in eqns for v in eqn.invars] + list(outputs))
    held = tuple(v for v in dict.fromkeys(read) if v not in known)
    head = prune(jaxpr, [*held, *saved])
    tail = with_inputs(with_outputs(jaxpr, eqns, outputs), held)
    return Parts(head, tail, held)


def _last(jaxpr: Jaxpr, outputs: Sequence[Atom], saved: Sequence[Atom]) -> list[Eqn]:
    """The equations between products or pools and outputs made from them alone.

    Beside these they read small arrays, the call's inputs and saved values; and nothing
    else reads them. So nothing large is computed twice, and all that is held is in
    memory anyway.
    """
    program = _Program(
        producers_of(jaxpr.eqns),
        collections.Counter(v for e in jaxpr.eqns for v in variables_in(e.invars)),
        {*variables_in(saved), *jaxpr.constvars, *jaxpr.invars},
    )
    found: list[Eqn] = []
    for v in dict.fromkeys(variables_in(outputs)):
        if program.readers[v] == 0:
            found += program.after_product(v)
    for eqn in list(found):
        for v in variables_in(eqn.invars):
            found += program.from_inputs(v)
    chosen = set(map(id, found))
    return [eqn for eqn in jaxpr.eqns if id(eqn) in chosen]


@dataclasses.dataclass(frozen=True)
class _Program:
    """A program's equations.

    Attributes:
      makers: for each result, its equation.
      readers: how many equations read a variable.
      known: inputs and saved values.
    """

    makers: Mapping[Var, Eqn]
    readers: Mapping[Var, int]
    known: Collection[Var]

    def after_product(self, v: Var) -> list[Eqn]:
        """The equations from a product or pool to `v`; none if others are between."""
        found: list[Eqn] = []
        while v in self.makers and v not in self.known:
            eqn = self.makers[v]
            if eqn.primitive.name in _STARTS:
                return found
            large = [x for x in variables_in(eqn.invars) if x.aval.size >= v.aval.size]
            made = [x for x in large if x not in self.known]
            if not _can_fuse(eqn) or len(made) != 1 or self.readers[made[0]] > 1:
                break
            found.append(eqn)
            (v,) = made
        return []

    def from_inputs(self, v: Var) -> list[Eqn]:
        """The equations that make `v`, such as a cast bias, from inputs alone."""
        found: list[Eqn] = []
        todo = [v]
        while todo:
            v = todo.pop()
            if v in self.known:
                continue
            eqn = self.makers[v]
            if not _can_fuse(eqn):
                return []
            found.append(eqn)
            todo += variables_in(eqn.invars)
        return found


def _can_fuse(eqn: Eqn) -> bool:
    """Whether XLA computes its result where that is read."""
    return is_elementwise(eqn) or eqn.primitive.name in RESHAPES
