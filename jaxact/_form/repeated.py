"""Arrays from which far larger ones are computed at next to no cost.

XLA sums the distances of all pairs, |a_i - b_j|, and writes none to memory; nor the
comparisons of all pairs in a ranking loss. Packed, they are an array for each pair. The
points themselves, exact, take less, and the backward pass computes the pairs again: the
gradient of an energy distance between 256 points takes 4.5 MiB, and took 10.
"""

from collections.abc import Iterable

from jaxact._form.chooser import Chooser
from jaxact._form.poles import sources_behind
from jaxact._jaxpr.types import Var

# Elements that are computed from each one: as float32 it takes no more than two bits
# for each of them would.
_MANY = 16


def sources_of_larger(chooser: Chooser, stored: Iterable[Var]) -> set[Var]:
    """Bases that are small beside a stored one that is computed from them alone."""
    found: set[Var] = set()
    for v in stored:
        sources = sources_behind(v, chooser)
        if _MANY * sum(x.aval.size for x in sources) <= v.aval.size:
            found |= sources
    return found
