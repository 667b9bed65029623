"""A backward pass in parts, each waiting for the one before.

Left alone XLA puts a weight's gradient off, and keeps the cotangent that it reads;
and it decodes a residual long before it is read. Here an optimization barrier stands
between one part and the next: the gradients so far are there before it, and residuals
that are read first after it are packed until then.

A call in a checkpoint is the step's fullest moment when it is computed again: its parts
are the products (compiled for an H100, 1 bit: 2356 -> 2255 MiB for GPT-2 medium, 434 ->
350 for ViT-B). A call that contains a network has the network's blocks as parts, which
makes it as small as a call for each block: 401, 207 and 214 MiB for four blocks of the
tests' transformer at 4 bits, in predicted 3.96, 4.05 and 3.90 ms. A chain has its
layers: 467 -> 340 MiB for a perceptron with three layers (2048 ReLUs, 32768 rows, 4
bits; uncompressed 513), 279 -> 213 for blocks like VGG's, in as much time. A block's
own call has two where a residual join is in its middle, between attention and MLP: 2940
-> 2834 MiB for GPT-2 medium at 2 bits, 821 -> 773 for ViT-B, for 0.1 and 0.3 % of the
time. Any other call is one part: XLA does not fuse across a barrier, and ResNet-50
would take 48 MiB more at 2 bits.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax

from jaxact._engine.evaluation import Evaluator, Order, has_product
from jaxact._engine.late import LateDecoding
from jaxact._engine.lone import lone_barrier
from jaxact._engine.places import (
    after_products,
    between_blocks,
    between_layers,
    joins,
    joins_among,
)
from jaxact._engine.shared import TABLE, with_shared_operand
from jaxact._jaxpr.compat import barrier
from jaxact._jaxpr.primitives import REDUCTIONS
from jaxact._jaxpr.read import is_float, variables_in
from jaxact._jaxpr.types import Env, Eqn, Jaxpr, PyTree, Var

# The equations at which a part starts.
_Places: TypeAlias = Callable[[Order], list[int]]
_Barrier: TypeAlias = Callable[[Any], Any]


def product_by_product(
    order: Order, env: Env, packed: Sequence[PyTree]
) -> list[jax.Array]:
    """The results, its products one after another."""
    return _evaluated(order, env, packed, after_products)


def block_by_block(order: Order, env: Env, packed: Sequence[PyTree]) -> list[jax.Array]:
    """The results, a network's blocks one after another."""
    return _evaluated(order, env, packed, between_blocks)


def layer_by_layer(order: Order, env: Env, packed: Sequence[PyTree]) -> list[jax.Array]:
    """The results, a chain's layers one after another."""
    wait = barrier if _is_network(between_blocks(order)) else lone_barrier
    return _evaluated(order, env, packed, between_layers, wait)


def join_by_join(order: Order, env: Env, packed: Sequence[PyTree]) -> list[jax.Array]:
    """The results, a block's branches one after another."""
    return _evaluated(order, env, packed, joins, lone_barrier)


def ordered_evaluator(backward: Jaxpr, num_cotangents: int) -> Evaluator | None:
    """How to evaluate a backward program in parts: its last inputs are cotangents."""
    order = Order.of(backward, len(backward.invars) - num_cotangents)
    if between_layers(order):
        return layer_by_layer
    places = between_blocks(order)
    if _is_network(places):
        return block_by_block
    return join_by_join if joins_among(places, order) else None


def _is_network(places: Sequence[int]) -> bool:
    """A residual block alone may have a place in its middle, and one at its start."""
    return len(places) > 2


def _evaluated(
    order: Order,
    env: Env,
    packed: Sequence[PyTree],
    places: _Places,
    wait: _Barrier = barrier,
) -> list[jax.Array]:
    parts = _parts(order, set(places(order)), _stored(packed, order))
    return _InOrder(order, env, parts, wait).outputs()


class _Stored(NamedTuple):
    """A packed residual: its variables, and the tree of its arrays."""

    variables: list[Var]
    tree: Any


def _stored(packed: Sequence[PyTree], order: Order) -> list[_Stored]:
    variables = iter(order.packed)
    trees = map(jax.tree.structure, packed)
    return [
        _Stored(list(itertools.islice(variables, tree.num_leaves)), tree)
        for tree in trees
    ]


def _parts(
    order: Order, places: Collection[int], stored: Sequence[_Stored]
) -> dict[int, list[_Stored]]:
    """The residuals that the part from each place on is the first to read."""
    owners = {v: i for i, own in enumerate(stored) for v in own.variables}
    known: set[Var] = set()
    found: set[int] = set()
    parts: dict[int, list[_Stored]] = {}
    part: list[_Stored] = []
    for i in order.dependent:
        part = parts.setdefault(i, []) if i in places else part
        eqn = order.jaxpr.eqns[i]
        for each in [*order.before(eqn, known), eqn]:
            read = {owners[v] for v in variables_in(each.invars) if v in owners}
            part += [stored[k] for k in sorted(read - found)]
            found |= read
            known.update(each.outvars)
    return parts


@dataclasses.dataclass
class _InOrder(LateDecoding):
    """One evaluation.

    Attributes:
      parts: for each equation at which one starts, the residuals that it reads first.
      live: values on which a product from here on depends.
      ready: gradients since the last barrier.
      last_readers: for each value, the last equation that reads it.
    """

    parts: dict[int, list[_Stored]]
    barrier: _Barrier
    live: list[Var] = dataclasses.field(default_factory=list)
    ready: list[Var] = dataclasses.field(default_factory=list)
    last_readers: dict[Var, int] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        order = self.order
        self.live += [v for v in order.cotangents if v in order.continuing]
        reads = [(i, order.jaxpr.eqns[i].invars) for i in order.dependent]
        self.last_readers = {v: i for i, own in reads for v in variables_in(own)}

    def step(self, i: int) -> None:
        if i in self.parts:
            self._wait(self.parts[i], i)
        super().step(i)
        self._sort(self.order.jaxpr.eqns[i])

    def _wait(self, stored: Sequence[_Stored], i: int) -> None:
        """Let nothing go on from an equation before the gradients so far are there."""
        packed = [v for own in stored for v in own.variables]
        self.live = [v for v in self.live if self.last_readers[v] >= i]
        held = [*self.live, *self.ready, *packed]
        values, table = self.barrier(([self.env[v] for v in held], TABLE))
        self.env.update(zip(held, values, strict=True))
        for variables, tree in stored:
            arrays = jax.tree.unflatten(tree, [self.env[v] for v in variables])
            arrays = jax.tree.leaves(with_shared_operand([arrays], table))
            self.env.update(zip(variables, arrays, strict=True))
        self.ready.clear()

    def _sort(self, eqn: Eqn) -> None:
        """Remember what an equation made."""
        is_gradient = has_product(eqn) or eqn.primitive.name in REDUCTIONS
        if eqn.primitive.name == "transpose" and eqn.invars[0] in self.ready:
            # The product waits as it is transposed: XLA then computes it so. Across a
            # barrier a CPU copies all weights' gradients, in the end (two towers of 12
            # layers, width 192, a batch of 4: 22 MiB, and 9 this way; uncompressed 7).
            self.ready.remove(eqn.invars[0])
            is_gradient = True
        for v in eqn.outvars:
            if v in self.order.continuing:
                self.live.append(v)
            elif is_float(v) and is_gradient:
                self.ready.append(v)
