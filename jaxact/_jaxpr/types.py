"""The parts of a traced program, as far as they are read here.

They are `jax.extend.core`'s own classes. JAX types a variable's `aval` as an abstract
value without a shape, which arrays always have; hence protocols.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from jax import core
from jax.extend import core as jex

Primitive: TypeAlias = jex.Primitive
# A value while a program is evaluated: an array or a tracer of one.
Array: TypeAlias = jax.Array | np.ndarray | np.generic
Shape: TypeAlias = tuple[int, ...]
# Parameters of a primitive.
Params: TypeAlias = dict[str, Any]


class Var(Protocol):
    """A variable; hashable, equal only to itself."""

    @property
    def aval(self) -> core.ShapedArray: ...
    def __hash__(self) -> int: ...


class Literal(Var, Protocol):
    """A scalar constant in place of a variable."""

    val: Any


Atom: TypeAlias = Var | Literal


class Eqn(Protocol):
    """One equation: outvars = primitive(invars, **params)."""

    primitive: Primitive
    invars: Sequence[Any]
    outvars: Sequence[Any]
    params: dict[str, Any]
    effects: Any
    source_info: Any
    ctx: Any

    def replace(self, **changes: Any) -> "Eqn": ...


class Jaxpr(Protocol):
    """A program; its constants' values are kept beside it."""

    constvars: Sequence[Any]
    invars: Sequence[Any]
    outvars: Sequence[Any]
    eqns: Sequence[Eqn]
    debug_info: Any
    effects: Any

    def replace(self, **changes: Any) -> "Jaxpr": ...


# A jaxpr with the values of its constants; from 0.12 on the same class as `Jaxpr`.
ClosedJaxpr: TypeAlias = Any
# Values of variables.
Env: TypeAlias = dict[Var, Any]
# Nested containers of arrays, such as the stored form of a residual.
PyTree: TypeAlias = Any
