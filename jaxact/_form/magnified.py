"""Values whose noise many elements share, or that a pole magnifies.

A mean shifts a whole row, and the sum of a softmax divides one. Any other sum is an
activation, however few elements it adds: a maximum over two features, or a matrix
product that is written as a sum (`optax.ntxent` has one).
"""

from jaxact._jaxpr.primitives import (
    COLLECTIVES,
    JOINS,
    MATMULS,
    MOVES,
    SCATTERS,
    SELECTIONS,
    WITH_POLES,
)
from jaxact._jaxpr.read import (
    contracts,
    is_float,
    is_literal,
    keeps_elements,
    names_inside,
    programs_in,
    variables_in,
)
from jaxact._jaxpr.types import Eqn, Jaxpr, Var

# Besides inverses, see `is_inverse`.
_OTHER_POLES = WITH_POLES - {"div"}
# Results that are near zero where an operand is, or that an epsilon keeps away from it.
_SMALL_TOGETHER = (MOVES | JOINS | SELECTIONS | COLLECTIVES) | frozenset(
    "abs neg mul div max min add sub add_any select_n clamp square integer_pow".split()
)


def magnified_in(jaxpr: Jaxpr) -> set[Var]:
    """Values that more elements read, and operands of functions with a pole.

    Values that an inverse multiplies belong to them, as a + b does in (a + b) / c,
    unless one number divides many: a product of two vectors by their lengths.
    """
    copies, inverses = _copies_and_inverses(jaxpr)
    repeated: set[Var] = set()
    near: set[Var] = set()
    read = set(variables_in(jaxpr.outvars))
    compared: set[Var] = set()
    for eqn in reversed(jaxpr.eqns):
        name, inputs = eqn.primitive.name, variables_in(eqn.invars)
        # A maximum that is only compared with its operand.
        is_compared = not compared.isdisjoint(eqn.outvars)
        if not any(map(is_float, eqn.outvars)) or (
            is_compared and read.isdisjoint(eqn.outvars)
        ):
            compared.update(inputs)
            continue
        read.update(inputs)
        size = max((v.aval.size for v in eqn.outvars), default=0)
        if keeps_elements(eqn) or name in JOINS | SELECTIONS | COLLECTIVES:
            if not repeated.isdisjoint(eqn.outvars):
                repeated.update(inputs)
            if name in _SMALL_TOGETHER and not near.isdisjoint(eqn.outvars):
                near.update(inputs)
        # A scatter's program says how two elements are combined. A call whose results
        # nothing reads is a check, such as DreamerV3's for types.
        is_call = name not in SCATTERS and programs_in(eqn) and not keeps_elements(eqn)
        if name == "gather" or (is_call and not read.isdisjoint(eqn.outvars)):
            repeated.update(inputs)
        if keeps_elements(eqn) or (name in MATMULS and not contracts(eqn)):
            repeated.update(v for v in inputs if v.aval.size < size)
        whole = {v for v in inputs if v.aval.size == size and v not in copies}
        if name == "div":
            divisors = variables_in(eqn.invars[1:])
            near.update(divisors if whole.isdisjoint(divisors) else inputs)
        elif name == "mul":
            near.update(() if whole.isdisjoint(inverses) else inputs)
        elif not _OTHER_POLES.isdisjoint(names_inside(eqn)) or is_inverse(eqn):
            near.update(inputs)
    return repeated | near


def _copies_and_inverses(jaxpr: Jaxpr) -> tuple[set[Var], set[Var]]:
    """Arrays that have each element several times; inverses of arrays that do not."""
    copies: set[Var] = set()
    inverses: set[Var] = set()
    for eqn in jaxpr.eqns:
        name, inputs = eqn.primitive.name, set(variables_in(eqn.invars))
        if not inputs or not keeps_elements(eqn):
            continue
        size = max(v.aval.size for v in inputs)
        if inputs <= copies or (
            name == "broadcast_in_dim" and size < eqn.outvars[0].aval.size
        ):
            copies.update(eqn.outvars)
        elif is_inverse(eqn) or (name in MOVES and inputs <= inverses):
            inverses.update(eqn.outvars)
    return copies, inverses


def is_inverse(eqn: Eqn) -> bool:
    """Whether it is a number over its operand, or over a root or power of it."""
    name, inputs = eqn.primitive.name, eqn.invars
    if name == "div":
        return is_literal(inputs[0]) and not is_literal(inputs[1])
    if name == "pow":
        return is_literal(inputs[1]) and bool(inputs[1].val < 0)
    return name == "rsqrt" or (name == "integer_pow" and eqn.params["y"] < 0)
