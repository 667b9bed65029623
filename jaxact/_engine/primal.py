"""A compressed call where nothing is differentiated."""

import weakref
from collections.abc import Hashable
from dataclasses import dataclass

import jax

from jaxact._engine.own_gradient import returns_own_gradient, warns_when_evaluated
from jaxact._engine.storage import Draw
from jaxact._flat import Flat
from jaxact._plan.mark import CompressedCall, mark_call
from jaxact._policy import Policy


# Without a repr: JAX takes the text of a function that is traced, for messages.
@dataclass(frozen=True, eq=False, repr=False)
class Primal:
    """A call's outputs, as a function of its draw and its values.

    JAX finds an earlier trace by this object.

    Attributes:
      name: the compressed function's.
    """

    call: CompressedCall
    name: str
    __name__ = "call"

    @classmethod
    def of(cls, flat: Flat, policy: Policy, prefix: str, name: str) -> "Primal":
        """The one for equal calls, as long as a plan keeps it."""
        new = cls(CompressedCall(flat, policy, prefix), name)
        return _primals.setdefault((flat, policy, prefix), new)

    def __call__(self, draw: Draw, *values: jax.Array) -> list[jax.Array]:
        # A call that measures is not measured again.
        mark_call(draw.seed, None if draw.probe else self.call)
        outputs = self.call.flat(*values)
        if not returns_own_gradient(self.call.flat):
            return outputs
        return [warns_when_evaluated(x, self.name) for x in outputs]


_primals: "weakref.WeakValueDictionary[Hashable, Primal]" = (
    weakref.WeakValueDictionary()
)
