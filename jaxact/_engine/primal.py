"""A compressed call where nothing is differentiated."""

import weakref
from collections.abc import Hashable
from dataclasses import dataclass

import jax

from jaxact._engine.storage import Draw
from jaxact._plan.mark import CompressedCall, mark_call


# Without a repr: JAX takes the text of a function that is traced, for messages.
@dataclass(frozen=True, eq=False, repr=False)
class Primal:
    """A call's outputs, as a function of its draw and its values.

    JAX finds an earlier trace by this object.
    """

    call: CompressedCall
    __name__ = "call"

    @classmethod
    def of(cls, call: CompressedCall) -> "Primal":
        """The one for equal calls, as long as a plan keeps it."""
        key = call.flat, call.policy, call.prefix
        return _primals.setdefault(key, cls(call))

    def __call__(self, draw: Draw, *values: jax.Array) -> list[jax.Array]:
        # A call that measures is not measured again.
        mark_call(draw.seed, None if draw.probe else self.call)
        return self.call.flat(*values)


_primals: "weakref.WeakValueDictionary[Hashable, Primal]" = (
    weakref.WeakValueDictionary()
)
