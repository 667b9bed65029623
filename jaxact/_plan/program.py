"""A traced program, each fact about which is found once.

Many rules read the same: the equation that makes a value, the interval that holds it,
the programs inside.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import TypeVar, cast

from jaxact._jaxpr.flow import Facts
from jaxact._jaxpr.read import producers_of, readers_of
from jaxact._jaxpr.types import Eqn, Jaxpr, Producers, Var

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A traced program.

    Attributes:
      facts: about each variable, see `facts.py`; without any all are parameters.
      found: results, by the functions with `found_once` that returned them.
    """

    jaxpr: Jaxpr
    facts: Facts = dataclasses.field(default_factory=dict)
    found: dict[Hashable, object] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def producers(self) -> Producers:
        """The equation that computes each variable which is no input."""
        return producers_of(self.jaxpr.eqns)

    @functools.cached_property
    def readers(self) -> dict[Var, list[Eqn]]:
        """The equations that read each variable."""
        return readers_of(self.jaxpr.eqns)


def found_once(find: Callable[[Program], T]) -> Callable[[Program], T]:
    """`find`, but the first result for a program is the one that all get."""

    @functools.wraps(find)
    def found(program: Program) -> T:
        if find not in program.found:
            program.found[find] = find(program)
        return cast(T, program.found[find])

    return found
