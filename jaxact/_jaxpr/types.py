"""The parts of a traced program, as far as they are read here.

They are `jax.extend.core`'s own classes. JAX types a variable's `aval` as an abstract
value without a shape, which arrays always have; hence protocols.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from jax import core
from jax.extend import core as jex, source_info_util

Primitive: TypeAlias = jex.Primitive
# A value while a program is evaluated: an array, or its tracer.
Array: TypeAlias = jax.Array | np.ndarray | np.generic
Aval: TypeAlias = core.ShapedArray
Shape: TypeAlias = tuple[int, ...]
Dtype: TypeAlias = np.dtype
# A batched primitive's mapped axis for each operand; None or a private object where it
# has none.
Axes: TypeAlias = Sequence[Any]
# Tangents and cotangents: arrays, or JAX's `ad.Zero`.
Tangent: TypeAlias = Any
Params: TypeAlias = dict[str, Any]
SourceInfo: TypeAlias = source_info_util.SourceInfo
NameStack: TypeAlias = source_info_util.NameStack


class Var(Protocol):
    """A variable; hashable, equal only to itself."""

    @property
    def aval(self) -> Aval: ...
    def __hash__(self) -> int: ...


class Literal(Var, Protocol):
    """A scalar constant in place of a variable."""

    val: Any


Atom: TypeAlias = Var | Literal


class Eqn(Protocol):
    """One equation: outvars = primitive(invars, **params)."""

    primitive: Primitive
    invars: Sequence[Atom]
    outvars: Sequence[Var]
    params: Params
    effects: Any
    source_info: SourceInfo
    ctx: Any

    def replace(self, **changes: Any) -> "Eqn": ...


class Jaxpr(Protocol):
    """A program; its constants' values are kept beside it."""

    constvars: Sequence[Var]
    invars: Sequence[Var]
    outvars: Sequence[Atom]
    eqns: Sequence[Eqn]
    debug_info: Any
    effects: Any

    def replace(self, **changes: Any) -> "Jaxpr": ...


# A jaxpr with its constants' values; from 0.12 on the same class as `Jaxpr`.
ClosedJaxpr: TypeAlias = Any
# A value for each variable.
Env: TypeAlias = dict[Var, Any]
# Nested containers of arrays, such as a residual's stored form.
PyTree: TypeAlias = Any
# Other variables, or literals, to read instead.
Renaming: TypeAlias = dict[Var, Atom]
# The equation that computes each variable.
Producers: TypeAlias = dict[Var, Eqn]
# Whether something is true about a variable.
Predicate: TypeAlias = Callable[[Atom], bool]
