"""Group elementwise equations into cells, each differentiated as one function.

A cell is an equation of a primitive of our own, which evaluates a cluster of the
program and whose derivative is that of `derivative.py`: one array for a whole GELU
where JAX keeps one or two for each step of it.

Every variable has a level, the number of other equations on its longest path. Connected
elementwise equations of one level make a cluster; because levels never fall along a
path, no path leaves a cluster and comes back.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend import core as jex
from jax.interpreters import ad

from jaxact._form.derivative import (
    Cluster,
    differentiate,
    is_product,
    plan_elimination,
)
from jaxact._jaxpr.primitives import STEPS
from jaxact._jaxpr.read import (
    is_elementwise,
    is_float,
    is_piecewise_linear,
    variables_in,
)
from jaxact._jaxpr.rewrite import Body, new_equation, with_outputs

cell_p = jex.Primitive("jaxact_cell")
cell_p.multiple_results = True


def cell_body(eqn: Any) -> Body | None:
    """What a cell evaluates."""
    if eqn.primitive is not cell_p:
        return None
    cluster = eqn.params["cluster"]
    return Body(cluster.ins, cluster.eqns, cluster.outs)


def _differentiate(
    primals: Any, tangents: Any, *, cluster: Cluster
) -> tuple[list[Any], list[Any]]:
    return differentiate(cluster, primals, tangents)


cell_p.def_abstract_eval(lambda *_, cluster: [v.aval for v in cluster.outs])
ad.primitive_jvps[cell_p] = _differentiate


def with_cells(
    jaxpr: Any, is_exact: Callable[[Any], bool], depends: Callable[[Any], bool]
) -> Any:
    """`jaxpr` with a cell for every cluster that JAX would keep more for.

    Args:
      is_exact: whether the backward pass has a variable exactly.
      depends: whether a variable depends on something differentiated.
    """
    users = defaultdict(set)
    for k, eqn in enumerate(jaxpr.eqns):
        for v in variables_in(eqn.invars):
            users[v].add(k)
    for v in variables_in(jaxpr.outvars):
        users[v].add(-1)
    steps: list[_Step] = []
    inside: set[int] = set()
    for members in _clusters(jaxpr, depends):
        cluster = _cluster([jaxpr.eqns[k] for k in members], members, users)
        if all(map(is_exact, cluster.outs)):
            continue
        order, before, after = plan_elimination(cluster, is_exact)
        bent = any(_is_bent(eqn, is_exact) for eqn in cluster.eqns)
        if not bent and after == before:
            continue
        cluster = replace(cluster, eliminated=order)
        eqn = new_equation(
            cluster.eqns[-1],
            cell_p,
            cluster.ins,
            cluster.outs,
            {"cluster": cluster},
        )
        steps.append(_Step(members[-1], eqn))
        inside.update(members)
    rest = [_Step(k, e) for k, e in enumerate(jaxpr.eqns) if k not in inside]
    return with_outputs(jaxpr, _in_order([*steps, *rest]), jaxpr.outvars)


def _is_bent(eqn: Any, is_exact: Callable[[Any], bool]) -> bool:
    """Whether JAX's own derivative uses a residual other than as a factor, or two."""
    if not is_float(eqn.outvars[0]) or all(map(is_exact, eqn.invars)):
        return False
    name = eqn.primitive.name
    if name in STEPS or name in ("exp", "square") or is_piecewise_linear(eqn):
        return False
    if name == "integer_pow" and eqn.params["y"] == 2:
        return False
    return not is_product(eqn, is_exact)


def _clusters(jaxpr: Any, depends: Callable[[Any], bool]) -> list[list[int]]:
    """Connected elementwise equations of one level and shape, as places in the list."""
    level = _levels(jaxpr, depends)
    made_by: dict[Any, int] = {}
    parent: dict[int, int] = {}

    def root(k: int) -> int:
        while parent[k] != k:
            parent[k] = k = parent[parent[k]]
        return k

    for k, eqn in enumerate(jaxpr.eqns):
        if not _joins(eqn, depends):
            continue
        parent[k] = k
        out = eqn.outvars[0]
        made_by[out] = k
        for v in variables_in(eqn.invars):
            made = made_by.get(v)
            alike = level.get(v) == level[out] and v.aval.shape == out.aval.shape
            if made is not None and alike:
                parent[root(k)] = root(made)
    found = defaultdict(list)
    for k in parent:
        found[root(k)].append(k)
    return list(found.values())


def _joins(eqn: Any, depends: Callable[[Any], bool]) -> bool:
    """Whether an equation can be part of a cluster."""
    return (
        is_elementwise(eqn)
        and eqn.outvars[0].aval.shape != ()
        and any(map(depends, variables_in(eqn.invars)))
    )


def _levels(jaxpr: Any, depends: Callable[[Any], bool]) -> dict[Any, int]:
    """The level of each variable; elementwise results as late as their users allow."""
    level: dict[Any, int] = {}
    joins = [_joins(eqn, depends) for eqn in jaxpr.eqns]
    for eqn, inside in zip(jaxpr.eqns, joins, strict=True):
        inputs = [v for v in variables_in(eqn.invars) if depends(v)]
        here = max([level.get(v, 0) for v in inputs], default=0)
        level.update((v, here + (not inside)) for v in eqn.outvars)
    latest = {v: level.get(v, 0) for v in variables_in(jaxpr.outvars)}
    for eqn, inside in zip(jaxpr.eqns[::-1], joins[::-1], strict=True):
        if inside:
            out = eqn.outvars[0]
            level[out] = latest.get(out, level[out])
        here = min((level[v] for v in eqn.outvars), default=0) - (not inside)
        for v in variables_in(eqn.invars):
            latest[v] = min(latest.get(v, here), here)
    return level


def _cluster(
    eqns: Sequence[Any], members: Sequence[int], users: dict[Any, set[int]]
) -> Cluster:
    made = {v for e in eqns for v in e.outvars}
    ins = dict.fromkeys(
        v for e in eqns for v in variables_in(e.invars) if v not in made
    )
    outs = [v for e in eqns for v in e.outvars if users[v] - set(members)]
    names = {
        v: e.params["name"]
        for e in eqns
        if e.primitive.name == "name"
        for v in (*variables_in(e.invars), *e.outvars)
    }
    return Cluster(tuple(eqns), tuple(ins), tuple(outs), names=names)


@dataclass(frozen=True)
class _Step:
    place: int
    eqn: Any


def _in_order(steps: Sequence[_Step]) -> list[Any]:
    """Equations after those that make their inputs, else by place."""
    makers = {v: i for i, s in enumerate(steps) for v in s.eqn.outvars}
    waiting, after = [0] * len(steps), defaultdict(list)
    for i, step in enumerate(steps):
        needs = {makers[v] for v in variables_in(step.eqn.invars) if v in makers}
        waiting[i] = len(needs)
        for j in needs:
            after[j].append(i)
    tie = itertools.count()
    ready = [(s.place, next(tie), i) for i, s in enumerate(steps) if not waiting[i]]
    heapq.heapify(ready)
    done = []
    while ready:
        _, _, i = heapq.heappop(ready)
        done.append(steps[i].eqn)
        for j in after[i]:
            waiting[j] -= 1
            if not waiting[j]:
                heapq.heappush(ready, (steps[j].place, next(tie), j))
    return done
