"""Which values a GPU has in memory, and which only where their encoding reads them.

XLA computes a value that elementwise operations make inside the kernels that read it.
To encode it takes two passes, for a group's extremes and for its codes. That is cheap
for a value that nothing else needs whole. A kernel, which reads the value once, is
faster where it is in memory anyway: for a matrix product, or for an operation after a
later one, such as the next residual join. It is faster too where the value is costly to
compute twice, such as an activation function's derivative: XLA then writes it to memory
itself.

A product that is stored through a norm with statistics by channel is in memory too: a
kernel normalizes the elements that it reads. With kernels for its 53 batch norms a step
of ResNet-50 at 4 bits takes 1.24 times as long as uncompressed on an H200; with XLA's
encoding it took 1.31.

Predicted for an H100, ViT-B's first two layers at batch 64 and 4 bits: 1.30 times as
long as uncompressed if all elementwise values are fused, 1.22 by this rule.
"""

from collections.abc import Sequence

from jaxact._jaxpr.primitives import CASTS, COSTLY, MATMULS, MOVES
from jaxact._jaxpr.read import is_elementwise, names_inside, variables_in
from jaxact._jaxpr.types import Atom, Dtype, Jaxpr, Var

# A cast would be another array.
_UNCAST_MOVES = MOVES - CASTS


def in_memory(jaxpr: Jaxpr, outputs: Sequence[Atom]) -> frozenset[Var]:
    """The values in a program that are better read from memory than computed again.

    Args:
      outputs: those that the program is evaluated for, beside the stored values.
    """
    narrow = narrowed(jaxpr, outputs)
    found = _read_whole(jaxpr, outputs) | _costly(jaxpr) | _biased(jaxpr)
    return found.difference(narrow)


def _read_whole(jaxpr: Jaxpr, outputs: Sequence[Atom]) -> frozenset[Var]:
    """Results, and values that a matrix product reads, or something after a later one.

    `outputs`: as in `in_memory`.
    """
    found = {*variables_in(outputs), *_read_later(jaxpr)}
    for eqn in reversed(jaxpr.eqns):
        name = eqn.primitive.name
        if name in MATMULS or (
            name in _UNCAST_MOVES and not found.isdisjoint(eqn.outvars)
        ):
            found.update(variables_in(eqn.invars))
    return frozenset(found)


def _biased(jaxpr: Jaxpr) -> set[Var]:
    """Convolutions with a bias, which XLA adds in the convolution's own kernel."""
    convolved: set[Var] = set()
    found: set[Var] = set()
    for eqn in jaxpr.eqns:
        outputs = eqn.outvars
        if eqn.primitive.name == "conv_general_dilated":
            convolved.update(outputs)
        elif eqn.primitive.name == "add":
            size = outputs[0].aval.size
            whole = [v for v in variables_in(eqn.invars) if v.aval.size == size]
            if len(whole) == 1 and whole[0] in convolved:
                found.update(outputs)
    return found


def _read_later(jaxpr: Jaxpr) -> set[Var]:
    """Values that an equation reads together with a later matrix product's result."""
    level: dict[Var, int] = {}  # products on the longest path to each variable
    found: set[Var] = set()
    for eqn in jaxpr.eqns:
        inputs = variables_in(eqn.invars)
        highest = max((level.get(v, 0) for v in inputs), default=0)
        found.update(v for v in inputs if level.get(v, 0) < highest)
        after = highest + (eqn.primitive.name in MATMULS)
        level.update(dict.fromkeys(eqn.outvars, after))
    return found


def narrowed(jaxpr: Jaxpr, outputs: Sequence[Atom]) -> dict[Var, Dtype]:
    """Values that only casts to narrower types read: float32 in a bfloat16 network.

    With the widest of those types. XLA has the narrow value in memory alone. The wide
    one, twice as large, would be written for its encoding. A softmax is none of these,
    see `decoded_again.py`.
    """
    found: dict[Var, Dtype] = {}
    others = set(variables_in(outputs))
    for eqn in jaxpr.eqns:
        inputs = variables_in(eqn.invars)
        is_cast = eqn.primitive.name == "convert_element_type"
        if is_cast and inputs and _size_of(inputs[0]) > _size_of(eqn.outvars[0]):
            (v,), dtype = inputs, eqn.outvars[0].aval.dtype
            found[v] = max(found.get(v, dtype), dtype, key=lambda d: d.itemsize)
        else:
            others.update(inputs)
    return {v: dtype for v, dtype in found.items() if v not in others}


def _size_of(v: Var) -> int:
    """Bytes of an element."""
    return getattr(v.aval.dtype, "itemsize", 0)


def _costly(jaxpr: Jaxpr) -> frozenset[Var]:
    """Values that elementwise operations make, a costly one among them."""
    found: set[Var] = set()
    for eqn in jaxpr.eqns:
        if not is_elementwise(eqn):
            continue
        (v,) = eqn.outvars
        is_costly = not COSTLY.isdisjoint(names_inside(eqn))
        same = [x for x in variables_in(eqn.invars) if x.aval.shape == v.aval.shape]
        if is_costly or not found.isdisjoint(same):
            found.add(v)
    return frozenset(found)
