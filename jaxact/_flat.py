"""A program on flat arrays, with facts about its inputs."""

import dataclasses
import enum
import functools
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxact._jaxpr.evaluate import evaluate
from jaxact._jaxpr.labels import with_labels, without_scope
from jaxact._jaxpr.links import Links
from jaxact._jaxpr.read import variables_in
from jaxact._jaxpr.structure import open_structure
from jaxact._jaxpr.types import Array, Atom, Jaxpr, Var


class Kind(enum.Enum):
    """The part that an argument has in the transform."""

    PARAMETER = "parameter"  # referenced; neither it nor values made from it are stored
    ACTIVATION = "activation"  # may be stored through a codec
    UNKNOWN = "unknown"  # referenced, but values computed from it may be stored


@dataclasses.dataclass(frozen=True)
class Flat:
    """A jaxpr whose inputs are all explicit.

    Attributes:
      jaxpr: its constants and inputs together are the inputs.
      kinds: each input's.
      paths: each input's name in tables.
      owners: each input's argument, as its number in the call; -1 if closed over.
      carried: in a scan's body, each input that is an output of the step before, and
        that output, as numbers.
      returned: numbers of the outputs that leave the call; None: all do.
      is_inside: whether an equation in another call holds it: a scan, a conditional.
      is_step: whether it is a loop's step, all of which the loop ends before the next.
      unlabelled: the function whose `labelled` this is.
    """

    jaxpr: Jaxpr
    kinds: tuple[Kind, ...]
    paths: tuple[str, ...]
    owners: tuple[int, ...]
    carried: tuple[tuple[int, int], ...] = ()
    returned: tuple[int, ...] | None = None
    is_inside: bool = False
    is_step: bool = False
    unlabelled: "Flat | None" = dataclasses.field(
        default=None, init=False, compare=False, repr=False
    )

    def __hash__(self) -> int:
        return hash(self.jaxpr)

    def __call__(self, *values: Array) -> list[Any]:
        num_consts = len(self.jaxpr.constvars)
        consts, inputs = values[:num_consts], values[num_consts:]
        return [_as_array(x) for x in evaluate(self.jaxpr, consts, inputs)]

    @property
    def invars(self) -> list[Var]:
        return [*self.jaxpr.constvars, *self.jaxpr.invars]

    @functools.cached_property
    def first_alike(self) -> "Flat":
        """The first function that was traced to the same program, else this one."""
        if self.unlabelled is not None:  # labels follow from the program
            return self.unlabelled.first_alike.labelled
        structure = open_structure(self.jaxpr)
        links = self.carried, self.returned, self.is_inside, self.is_step
        key = structure, self.kinds, self.paths, self.owners, links
        return _traced.setdefault(key, self)

    @functools.cached_property
    def labelled(self) -> "Flat":
        """The same with a label on each equation, see `jaxact._jaxpr.labels`."""
        labelled = dataclasses.replace(self, jaxpr=with_labels(self.jaxpr))
        object.__setattr__(labelled, "unlabelled", self)
        return labelled

    def links(self, inputs: Sequence[Var], outputs: Sequence[Atom]) -> Links:
        """Where outputs go, in a program made from this one.

        Args:
          inputs, outputs: that program's, for this one's.
        """
        carried = {inputs[i]: outputs[o] for i, o in self.carried}
        numbers = range(len(outputs)) if self.returned is None else self.returned
        return Links(carried, variables_in([outputs[o] for o in numbers]))

    def among(
        self, jaxpr: Jaxpr, before: Sequence[str], after: Sequence[str] = ()
    ) -> "Flat":
        """A program with this one's inputs among parameters, and with its outputs.

        Args:
          before, after: the parameters' names.
        """
        return dataclasses.replace(
            self,
            jaxpr=jaxpr,
            kinds=(
                *(Kind.PARAMETER for _ in before),
                *self.kinds,
                *(Kind.PARAMETER for _ in after),
            ),
            paths=(*before, *self.paths, *after),
            owners=(*(-1 for _ in before), *self.owners, *(-1 for _ in after)),
            carried=tuple((len(before) + i, output) for i, output in self.carried),
        )

    def inside(self, scope: str) -> "Flat | None":
        """The function that is evaluated in a scope; None if parts of it are not."""
        jaxpr = without_scope(self.jaxpr, scope)
        if jaxpr is None:
            return None
        paths = tuple(path.removeprefix(f"{scope}/") for path in self.paths)
        return dataclasses.replace(self, jaxpr=jaxpr, paths=paths)


def _as_array(x: Array) -> Array:
    """An array for a constant that a program returns: a bool's `~` is a number."""
    if isinstance(x, jax.Array) or jnp.result_type(x) == jax.dtypes.float0:
        return x
    return jnp.asarray(x)


_traced: "weakref.WeakValueDictionary[Hashable, Flat]" = weakref.WeakValueDictionary()
