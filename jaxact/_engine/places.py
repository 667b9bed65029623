"""Places in a backward pass at which a part of it may start.

A product is an equation with a matrix product or a convolution whose result leads to
another one's: the chain of the network's layers.
"""

import bisect
import itertools
import statistics
from collections.abc import Callable, Collection, Sequence

from jaxact._engine.evaluation import Order, has_product
from jaxact._jaxpr.read import num_bytes, variables_in
from jaxact._jaxpr.types import Eqn, Var

# A place is compared with those up to so many products ahead: those of a block. A
# transformer's has 7, Llama's 8.
_AHEAD = 8
# Such bytes count as equal: sums for norms and biases are live here and there.
_SIMILAR = 1.1
# A value with so many times fewer bytes than a typical product's result is none.
_NARROW = 8


def after_products(order: Order) -> list[int]:
    """Each first reader of a product's result, as an index of an equation."""
    places: list[int] = []
    fresh: set[Var] = set()
    for i in order.dependent:
        eqn = order.jaxpr.eqns[i]
        if not fresh.isdisjoint(variables_in(eqn.invars)):
            places.append(i)
            fresh.clear()
        if order.continues(eqn):
            fresh.update(eqn.outvars)
    return places


def between_blocks(order: Order) -> list[int]:
    """Where few bytes of cotangents are live, as indices of equations.

    No place up to `_AHEAD` products further has fewer, and a product lies between two
    of them. In a chain of equal layers that is after each; in residual blocks, where
    nothing but the cotangent between two of them is live; inside one attention nowhere,
    as its scores are wider than the end. The last products have too few after them to
    compare with: there a place has no more than the one before it.
    """
    eqns = [order.jaxpr.eqns[i] for i in order.dependent]
    products = list(itertools.accumulate(map(order.continues, eqns), initial=0))
    live, last = _live_bytes(eqns, order), products[-1]
    final = 1 + max((i for i, eqn in enumerate(eqns) if has_product(eqn)), default=0)
    places: list[int] = []
    for i in range(1, len(eqns)):
        if not (products[places[-1]] if places else 0) < products[i] < last:
            continue
        end = bisect.bisect_right(products, products[i] + _AHEAD)
        others = live[i + 1 : min(end, final)]
        if places and products[i] + _AHEAD >= last:
            others.append(live[places[-1]])
        if all(live[i] <= _SIMILAR * other for other in others):
            places.append(i)
    return [order.dependent[i] for i in places]


def joins(order: Order) -> list[int]:
    """The residual joins in a block, as indices of equations."""
    return joins_among(between_blocks(order), order)


def joins_among(places: Sequence[int], order: Order) -> list[int]:
    """Those places where as much is live as where the call's cotangents come.

    Between a transformer's attention and its MLP that is the cotangent of their sum. In
    a ResNet's bottleneck it is a narrow one, with the shortcut's or without.
    """
    if not places:
        return []
    eqns = [order.jaxpr.eqns[i] for i in order.dependent]
    live = dict(zip(order.dependent, _live_bytes(eqns, order), strict=True))

    def is_join(i: int) -> bool:
        ends = sorted([live[order.dependent[0]], live[i]])
        return ends[1] <= _SIMILAR * ends[0]

    return list(filter(is_join, places))


def between_layers(order: Order) -> list[int]:
    """A chain's places where one value alone is live: the last before each product.

    A weight's gradient is there then, and its residual is not unpacked while the
    product for the layer before is computed. Most products must have such a place: a
    variational autoencoder has two layers side by side in its middle, but a residual
    block's shortcut is live as well in all but its ends. Narrow values do not count:
    the loss's own cotangent, which a penalty on each layer's activations reads at last,
    and those that an autoencoder's divergence makes in its latent space.
    """
    eqns = [order.jaxpr.eqns[i] for i in order.dependent]
    products = list(itertools.accumulate(map(order.continues, eqns), initial=0))
    if not products[-1]:
        return []
    results = [v for eqn in filter(order.continues, eqns) for v in eqn.outvars]
    typical = statistics.median(map(num_bytes, results))
    every = {*order.cotangents, *(v for eqn in eqns for v in eqn.outvars)}
    live = _live(eqns, order, every, lambda v: _NARROW * num_bytes(v) > typical)
    final = max((i for i, eqn in enumerate(eqns) if has_product(eqn)), default=0)
    latest = {products[i]: i for i in range(1, final + 1) if live[i] <= 1}
    is_chain = 4 * len(latest) > 3 * (products[-1] + 1)
    return [order.dependent[i] for i in latest.values()] if is_chain else []


def _live_bytes(eqns: Sequence[Eqn], order: Order) -> list[int]:
    """Before each equation, those of values on which a product from there on depends.

    Not those of gradients, of which a weight's may be summed up over all layers.
    """
    return _live(eqns, order, order.continuing, num_bytes)


def _live(
    eqns: Sequence[Eqn],
    order: Order,
    values: Collection[Var],
    size: Callable[[Var], int],
) -> list[int]:
    """The size of those values that are live before each equation."""
    made = {v: 0 for v in order.cotangents if v in values}
    read: dict[Var, int] = {}
    for i, eqn in enumerate(eqns):
        read |= {v: i for v in variables_in(eqn.invars) if v in made}
        made |= {v: i + 1 for v in eqn.outvars if v in values}
    changes = [0] * (len(eqns) + 1)
    for v, i in read.items():
        count = size(v)
        changes[made[v]] += count
        changes[i + 1] -= count
    return list(itertools.accumulate(changes))[:-1]
