"""The local derivative of a cluster of elementwise equations, in the fewest arrays.

The linearized cluster is a graph: variables are vertices, an edge u -> v carries the
slope dv/du. Eliminating a vertex multiplies its incoming with its outgoing edges and
adds up parallel ones; it never changes the derivative (the chain rule read as a graph:
Griewank and Walther, Evaluating Derivatives, 2008, chapter 9). A slope that is exact in
the backward pass costs nothing there, any other is an array to store, so vertices are
eliminated while the number of arrays does not grow.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad

from jaxact._form.slopes import Slope, apply, plus, slopes_of, times
from jaxact._jaxpr.evaluate import bind, traced_at, value_of
from jaxact._jaxpr.labels import DERIVATIVE
from jaxact._jaxpr.primitives import STEPS
from jaxact._jaxpr.read import is_float, is_literal, is_piecewise_linear
from jaxact._jaxpr.types import Array, Atom, Env, Eqn, Predicate, Tangent, Var

DERIVATIVE_OF = "derivative of "

Edges = dict[Any, dict[Any, Any]]  # v -> u -> slope dv/du
Operation = Callable[[Any, Any], Any]  # a product or sum of two slopes


@dataclass(frozen=True, eq=False)
class Cluster:
    """Elementwise equations that are differentiated together.

    Attributes:
      ins: variables from outside; outs: those that are used outside.
      eliminated: vertices to eliminate, in order.
      still: variables that no derivative is for: masks, random numbers, a metric.
      names: `checkpoint_name`s, by variable.
      place: the equation that the derivative is named after; None: the last.
    """

    eqns: Sequence[Eqn]
    ins: Sequence[Var]
    outs: Sequence[Var]
    eliminated: Sequence[Var] = ()
    still: Collection[Atom] = ()
    names: dict[Atom, str] = field(default_factory=dict)
    place: Eqn | None = None


def eliminate(edges: Edges, v: Var, times: Operation, plus: Operation) -> None:
    """Remove an inner vertex from the graph."""
    above = edges.pop(v)
    for slopes in edges.values():
        if v not in slopes:
            continue
        outer = slopes.pop(v)
        for u, inner in above.items():
            product = times(outer, inner)
            slopes[u] = plus(slopes[u], product) if u in slopes else product


# The graph while it is planned. A slope is an exact factor times an array, and only the
# array counts: a value in the program, a number for any other array, None without one.


@dataclass(frozen=True)
class _Value:
    """A slope that is a multiple of a variable in the program."""

    variable: Atom


_Array = _Value | int | None


def elimination_order(
    cluster: Cluster, is_exact: Predicate
) -> tuple[Sequence[Var], float, float]:
    """(vertices to eliminate, cost without and with eliminating them)."""
    fresh = itertools.count()
    edges = _planned_edges(cluster, is_exact, fresh)
    outs = set(cluster.outs)
    # From the outputs back: it leaves few paths side by side to add up.
    order, after = _eliminated(edges, [v for v in edges if v not in outs][::-1], fresh)
    # Leaving a vertex with several operands can be cheaper, where a slope stays a value
    # in the program: a SiLU behind a norm's gain, a GRU's gates.
    for v in [v for v in order if len(edges[v]) > 1]:
        fewer, cost = _eliminated(edges, [u for u in order if u is not v], fresh)
        if cost < after:
            order, after = fewer, cost
    return order, _cost(_arrays(edges)), after


def _eliminated(
    edges: Edges, vertices: Sequence[Var], fresh: Iterator[int]
) -> tuple[Sequence[Var], float]:
    """Eliminate where no array is added; with the cost at the end."""
    edges, counts = dict(edges), collections.Counter(_all_arrays(edges))
    users: dict[Var, dict[Var, None]] = {}
    for w, slopes in edges.items():
        for u in slopes:
            users.setdefault(u, {})[w] = None
    products: dict[tuple[_Array, _Array], int] = {}

    def times(a: _Array, b: _Array) -> _Array:
        if a is None or b is None:
            return b if a is None else a
        return products.setdefault((a, b), next(fresh))

    def plus(a: _Array, b: _Array) -> _Array:
        return a if a == b else next(fresh)

    order: list[Var] = []
    for v in vertices:
        # Of a long chain only the neighbours change.
        own = {w: dict(edges[w]) for w in (v, *users.get(v, ()))}
        before = collections.Counter(_all_arrays(own))
        eliminate(own, v, times, plus)
        change = collections.Counter(_all_arrays(own))
        change.subtract(before)
        added = sum(
            bool(counts[a] + count) - bool(counts[a]) for a, count in change.items()
        )
        if added > 0:
            continue
        counts.update(change)
        for u in edges.pop(v):
            users[u].pop(v)
            users[u].update(users.get(v, {}))
        edges |= own
        order.append(v)
    return order, _cost(_arrays(edges))


def _arrays(edges: Edges) -> set[_Array]:
    return set(_all_arrays(edges))


def _all_arrays(edges: Edges) -> list[_Array]:
    """The arrays of all edges, each as often as it is there."""
    return [s for slopes in edges.values() for s in slopes.values() if s is not None]


def _cost(arrays: set[_Array]) -> float:
    """A value in the program may be stored anyway, or be derived from one that is."""
    return sum(1 if isinstance(a, _Value) else 1.5 for a in arrays)


def _planned_edges(
    cluster: Cluster, is_exact: Predicate, fresh: Iterator[int]
) -> Edges:
    edges: Edges = {}
    for eqn in cluster.eqns:
        out = eqn.outvars[0]
        if out in cluster.still:
            continue
        slopes = edges.setdefault(out, {})
        for i, u in enumerate(eqn.invars):
            if is_literal(u) or u in cluster.still:
                continue
            slope = _planned_slope(eqn, i, is_exact, fresh)
            slopes[u] = slope if u not in slopes else next(fresh)
    return edges


def _planned_slope(
    eqn: Eqn, i: int, is_exact: Predicate, fresh: Iterator[int]
) -> _Array:
    """The array that the slope in the i-th operand takes."""
    if is_product(eqn, is_exact):
        factor = eqn.invars[1 - i]
        # A norm's inverse deviation or gain, a dropout's rate.
        if is_exact(factor) or (i == 0 and eqn.primitive.name == "div"):
            return None
        return _Value(factor)  # of a GLU, or an LSTM's gate
    # A ReLU's slope is told by a bit; the rest has exact operands.
    if is_piecewise_linear(eqn) or all(map(is_exact, eqn.invars)):
        return None
    return next(fresh)  # a tanh's, each step's of a GELU


def place_of_derivative(cluster: Cluster, is_exact: Predicate) -> Eqn:
    """The last equation with a slope to store on a path to an output, or the last.

    The dropout or residual join behind a GELU has none: the array is the GELU's.
    """
    edges = _planned_edges(cluster, is_exact, itertools.count())
    reached = set(cluster.outs)
    for eqn in cluster.eqns[::-1]:
        out = eqn.outvars[0]
        if out not in reached or out not in edges:
            continue  # a dropout's random number
        if _arrays({out: edges[out]}):
            return eqn
        reached.update(edges[out])
    return cluster.eqns[-1]


def is_product(eqn: Eqn, is_exact: Predicate) -> bool:
    """Whether each slope is the other operand times an exact factor."""
    name = eqn.primitive.name
    return name == "mul" or (name == "div" and is_exact(eqn.invars[1]))


# The graph as it is evaluated, with slopes from `slopes.py`.


def differentiate(
    cluster: Cluster, values: Sequence[Array], tangents: Sequence[Tangent]
) -> tuple[list[Array], list[Tangent]]:
    """A cluster's outputs, and their tangents, linear in the given ones."""
    env: Env = dict(zip(cluster.ins, values, strict=True))
    tangent: dict[Atom, Tangent] = {
        v: t
        for v, t in zip(cluster.ins, tangents, strict=True)
        if not isinstance(t, ad.Zero)
    }
    edges: Edges = {}
    for eqn in cluster.eqns:
        inputs = [value_of(v, env) for v in eqn.invars]
        moving = [i for i, u in enumerate(eqn.invars) if _is_vertex(u, tangent, edges)]
        out = eqn.outvars[0]
        if not moving or not is_float(out) or eqn.primitive.name in STEPS:
            env[out] = bind(eqn, inputs)[0]
            continue
        env[out], slopes = slopes_of(eqn, inputs, moving)
        edges[out] = {}
        for i, slope in zip(moving, slopes, strict=True):
            u = eqn.invars[i]
            edges[out][u] = plus(edges[out][u], slope) if u in edges[out] else slope
    with traced_at(cluster.place or cluster.eqns[-1]), jax.named_scope(DERIVATIVE):
        for v in cluster.eliminated:
            if v in edges:
                eliminate(edges, v, times, plus)
        for v, slopes in edges.items():
            terms = [
                apply(_named(slope, cluster.names.get(u)), tangent[u], env[v])
                for u, slope in slopes.items()
            ]
            tangent[v] = functools.reduce(lax.add, terms)
    outs = [env[v] for v in cluster.outs]
    return outs, [tangent[v] if v in tangent else _zero(v) for v in cluster.outs]


def _is_vertex(u: Atom, tangent: dict[Atom, Tangent], edges: Edges) -> bool:
    return not is_literal(u) and is_float(u) and (u in tangent or u in edges)


def _zero(v: Var) -> Tangent:
    return ad.Zero(v.aval.to_tangent_aval())


def _named(slope: Slope, name: str | None) -> Slope:
    """Named after the variable, so that rules for that one find its derivative."""
    if name is None or not isinstance(slope, jax.Array):
        return slope
    return checkpoint_name(slope, DERIVATIVE_OF + name)
