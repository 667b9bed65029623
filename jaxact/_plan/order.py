"""The order in which a GPU has an array's axes in memory.

It is the program's own order, with three exceptions:

- What a transposed product makes, such as `einsum("BTNH,BSNH->BTNS")`, stays where the
  product put it, and so do elementwise functions after it. A mixture's experts lie
  before the batch so.
- A convolution along one or two axes has channels last, and one along three or more has
  them first, whatever the program says. Elementwise functions of its result are so too,
  and an argument that a convolution reads.
- A value that the next product reads transposed is in memory in that order too, as
  those that a vision transformer's attention mixes.
"""

from collections.abc import Iterator, Mapping, Set
from typing import TypeAlias

from jaxact._jaxpr.primitives import MATMULS, WINDOWS
from jaxact._jaxpr.read import is_elementwise, variables_in
from jaxact._jaxpr.types import Eqn, Jaxpr, Var

Order: TypeAlias = tuple[int, ...]
# Results that have no order of their own: they are computed where they are read.
_ANYWHERE = frozenset("broadcast_in_dim iota random_bits".split())
_LOOPS = frozenset(["scan", "while"])
# Of arrays with as many axes, in the same order.
_IN_ORDER = WINDOWS | frozenset("concatenate pad slice rev".split())
_RESHAPES = frozenset("reshape squeeze expand_dims".split())


def own_order(v: Var) -> Order:
    """The order in which the program has a variable's axes."""
    return tuple(range(len(getattr(v.aval, "shape", ()))))


def orders(jaxpr: Jaxpr) -> dict[Var, Order]:
    """The order in which each variable's axes follow one another in memory.

    Variables that XLA computes where they are read have none. A loop reads its steps
    row by row: a recurrent network's, time first.
    """
    found = _orders(jaxpr, least=1)
    # A group norm's sums are faster where channels are not last: four residual blocks
    # that have them first in the program take 7.1 instead of 7.9 ms on an H100.
    is_grouped = any(_splits_channels(eqn, found) for eqn in jaxpr.eqns)
    return _orders(jaxpr, least=3) if is_grouped else found


def _orders(jaxpr: Jaxpr, least: int) -> dict[Var, Order]:
    """`least`: a convolution along fewer axes is in the program's order."""
    found = {v: own_order(v) for v in (*jaxpr.constvars, *jaxpr.invars)}
    found |= _convolved(jaxpr, least)
    products: set[Var] = set()
    for eqn in jaxpr.eqns:
        name, inputs = eqn.primitive.name, variables_in(eqn.invars)
        if name in _ANYWHERE and not _reshapes(eqn):
            continue
        if name in MATMULS:
            products.update(eqn.outvars)
        elif name in _LOOPS:
            found.update({v: own_order(v) for v in inputs})
        for v in eqn.outvars:
            found[v] = own_order(v)
        if name == "conv_general_dilated":
            found[eqn.outvars[0]] = _by_channels(eqn, "out_spec", least)
        elif len(eqn.outvars) == 1:
            found[eqn.outvars[0]] = _order(eqn, found, products)
    return found


def _order(eqn: Eqn, found: Mapping[Var, Order], products: Set[Var]) -> Order:
    """For an equation's one result, given its operands'."""
    (v,), name = eqn.outvars, eqn.primitive.name
    inputs = [x for x in variables_in(eqn.invars) if x in found]
    if name == "transpose" and not products.isdisjoint(inputs):
        permutation = eqn.params["permutation"]
        return tuple(map(permutation.index, found[inputs[0]]))
    if _reshapes(eqn) and inputs:
        return _reshaped(inputs[0], v, found[inputs[0]])
    if is_elementwise(eqn) or name in _IN_ORDER:
        same = {found[x] for x in inputs if _is_alike(eqn, x)}
        return same.pop() if len(same) == 1 else own_order(v)
    return own_order(v)


def _reshapes(eqn: Eqn) -> bool:
    """Whether the result has the operand's elements in the same order, row by row."""
    if eqn.primitive.name == "broadcast_in_dim":  # `x[None]`
        return eqn.invars[0].aval.size == eqn.outvars[0].aval.size
    return eqn.primitive.name in _RESHAPES


def _is_alike(eqn: Eqn, operand: Var) -> bool:
    """Whether the result of an elementwise function, or along windows, lies like it."""
    (v,) = eqn.outvars
    if eqn.primitive.name in _IN_ORDER:
        return len(operand.aval.shape) == len(v.aval.shape)
    return operand.aval.shape == v.aval.shape


def _by_channels(eqn: Eqn, side: str, least: int) -> Order:
    """The order that a convolution has its first operand or its result in."""
    batch, channel, *spatial = getattr(eqn.params["dimension_numbers"], side)
    if len(spatial) < least:
        return tuple(range(2 + len(spatial)))
    first, last = ([channel], []) if len(spatial) > 2 else ([], [channel])
    return (batch, *first, *spatial, *last)


def _splits_channels(eqn: Eqn, found: Mapping[Var, Order]) -> bool:
    """Whether it is a reshape that splits an axis which is last in memory alone."""
    inputs = [x for x in variables_in(eqn.invars) if x in found]
    if eqn.primitive.name != "reshape" or not inputs or not inputs[0].aval.size:
        return False
    (x, *_), (v,) = inputs, eqn.outvars
    segments = _segments(x.aval.shape, v.aval.shape)
    split = [axes for axes, after in segments if len(after) > 1]
    return found[x] != own_order(x) and found[x][-1:] in split


def _convolved(jaxpr: Jaxpr, least: int) -> dict[Var, Order]:
    """The arguments that a convolution reads, or elementwise functions of them."""
    found: dict[Var, Order] = {}
    for eqn in reversed(jaxpr.eqns):
        name, inputs = eqn.primitive.name, variables_in(eqn.invars)
        if name == "conv_general_dilated":
            order = _by_channels(eqn, "lhs_spec", least)
            found.update((x, order) for x in variables_in(eqn.invars[:1]))
            continue
        v = eqn.outvars[0] if len(eqn.outvars) == 1 else None
        if v not in found:
            continue
        if _reshapes(eqn) and inputs:
            found[inputs[0]] = _reshaped(v, inputs[0], found[v])
        elif is_elementwise(eqn):
            found.update((x, found[v]) for x in inputs if _is_alike(eqn, x))
    return {v: found[v] for v in (*jaxpr.constvars, *jaxpr.invars) if v in found}


def _reshaped(x: Var, v: Var, order: Order) -> Order:
    """The order for `v`, a reshaped `x`, if it is `x` as that lies in memory.

    Axes that are split or merged follow one another there too, as the channels that a
    group norm splits.
    """
    if x.aval.size == 0:
        return own_order(v)
    places = list(order)
    for before, after in _segments(x.aval.shape, v.aval.shape):
        start = places.index(before[0])
        if tuple(places[start : start + len(before)]) != before:
            return own_order(v)
        places[start : start + len(before)] = [~axis for axis in after]
    moved = [~place for place in places if place < 0]
    for axis, size in enumerate(v.aval.shape):
        if size == 1:  # behind the axis that the program has it behind
            moved.insert(moved.index(axis - 1) + 1 if axis else 0, axis)
    return tuple(moved)


def _segments(
    sizes: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Which axes a reshape makes from which others, without those that are 1 long."""
    before = [axis for axis, size in enumerate(sizes) if size != 1]
    after = [axis for axis, size in enumerate(shape) if size != 1]
    while before:
        first, second = 1, 1
        product, wanted = sizes[before[0]], shape[after[0]]
        while product != wanted:
            if product < wanted:
                product *= sizes[before[first]]
                first += 1
            else:
                wanted *= shape[after[second]]
                second += 1
        yield tuple(before[:first]), tuple(after[:second])
        del before[:first], after[:second]


def read_as(jaxpr: Jaxpr) -> dict[Var, Order]:
    """The order in which a matrix product reads a variable that it reads transposed."""
    found: dict[Var, Order] = {}
    read: set[Var] = set()
    for eqn in reversed(jaxpr.eqns):
        name, inputs = eqn.primitive.name, variables_in(eqn.invars)
        if name in MATMULS or (name == "reshape" and eqn.outvars[0] in read):
            read.update(inputs)
        elif name == "transpose" and eqn.outvars[0] in read:
            found[inputs[0]] = tuple(eqn.params["permutation"])
    return found
