"""Group elementwise equations into cells, each differentiated as one function.

A cell is one equation, with a primitive of our own, that evaluates a cluster of the
program. Its derivative is that of `derivative.py`: one array for a whole GELU where JAX
keeps one or two for each step.

Every variable has a level, how many other equations its longest path has. Connected
elementwise equations on one level make a cluster; because levels never fall along a
path, no path leaves a cluster and comes back.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from jax.extend import core as jex
from jax.interpreters import ad

from jaxact._form.classes import Classes
from jaxact._form.derivative import (
    Cluster,
    differentiate,
    elimination_order,
    is_product,
    place_of_derivative,
)
from jaxact._jaxpr.jvp_rules import scales_each_element
from jaxact._jaxpr.primitives import STEPS
from jaxact._jaxpr.read import (
    is_complex,
    is_elementwise,
    is_float,
    is_piecewise_linear,
    loses_precision,
    variables_in,
)
from jaxact._jaxpr.rewrite import Body, in_order, new_equation, with_outputs
from jaxact._jaxpr.types import Array, Atom, Eqn, Jaxpr, Predicate, Tangent, Var

Users = dict[Var, set[int]]  # numbers: the equations that read each variable

cell_p = jex.Primitive("jaxact_cell")
cell_p.multiple_results = True


def cell_body(eqn: Eqn) -> Body | None:
    """The cluster that a cell evaluates."""
    if eqn.primitive is not cell_p:
        return None
    cluster = eqn.params["cluster"]
    return Body(cluster.ins, cluster.eqns, cluster.outs)


def _differentiate(
    primals: Sequence[Array], tangents: Sequence[Tangent], *, cluster: Cluster
) -> tuple[list[Array], list[Tangent]]:
    return differentiate(cluster, primals, tangents)


cell_p.def_abstract_eval(lambda *_, cluster: [v.aval for v in cluster.outs])
ad.primitive_jvps[cell_p] = _differentiate


def with_cells(
    jaxpr: Jaxpr, classes: Classes, depends: Predicate, active: Collection[Var]
) -> Jaxpr:
    """`jaxpr` with a cell for every cluster that JAX would keep more for.

    Args:
      classes: of the program's variables.
      depends: whether a variable is made from activations.
      active: inputs that are differentiated.
    """
    users = _users(jaxpr)
    floats = filter(is_float, (*jaxpr.constvars, *jaxpr.invars))
    moving, changed = changed_in(jaxpr, floats), changed_in(jaxpr, active)
    is_exact = classes.is_exact
    cells: list[tuple[int, Eqn]] = []
    grouped: set[int] = set()
    joins = [_joins(eqn, depends) for eqn in jaxpr.eqns]
    for members in _clusters(jaxpr, depends, joins):
        cluster = _cluster([jaxpr.eqns[k] for k in members], members, users, moving)
        # A norm's statistics, a cast weight: their derivatives are exact too.
        if all(map(is_exact, cluster.outs)):
            continue
        order, before, after = elimination_order(cluster, is_exact)
        has_new_slopes = any(
            _has_new_slope(eqn, is_exact)
            for eqn in cluster.eqns
            if eqn.outvars[0] not in cluster.still
        )
        # x - mean, gain * x, a residual join: JAX keeps no more.
        if not (
            has_new_slopes or after != before or _has_mask(cluster, classes, changed)
        ):
            continue
        place = place_of_derivative(cluster, is_exact)
        cluster = replace(cluster, eliminated=order, place=place)
        eqn = new_equation(
            cluster.eqns[-1],
            cell_p,
            cluster.ins,
            cluster.outs,
            {"cluster": cluster},
        )
        cells.append((members[-1], eqn))
        grouped.update(members)
    others = [pair for pair in enumerate(jaxpr.eqns) if pair[0] not in grouped]
    return with_outputs(jaxpr, in_order([*cells, *others]), jaxpr.outvars)


def changed_in(jaxpr: Jaxpr, inputs: Iterable[Var]) -> set[Var]:
    """The variables on a path of derivatives from these inputs to an output.

    Random numbers are on none, nor is a metric that nothing reads. A call is on one
    whatever it does inside: a custom rule may give a step a derivative.
    """
    moving = set(inputs)
    eqns = [eqn for eqn in jaxpr.eqns if eqn.primitive.name not in STEPS]
    for eqn in eqns:
        if not moving.isdisjoint(variables_in(eqn.invars)):
            moving.update(filter(is_float, eqn.outvars))
    read = set(variables_in(jaxpr.outvars))
    for eqn in reversed(eqns):
        if not read.isdisjoint(eqn.outvars):
            read.update(variables_in(eqn.invars))
    return moving & read


def _users(jaxpr: Jaxpr) -> Users:
    users: Users = defaultdict(set)
    for k, eqn in enumerate(jaxpr.eqns):
        for v in variables_in(eqn.invars):
            users[v].add(k)
    for v in variables_in(jaxpr.outvars):
        users[v].add(-1)
    return users


def _has_new_slope(eqn: Eqn, is_exact: Predicate) -> bool:
    """Whether JAX keeps a slope that is no multiple of an operand or of the result.

    A tanh's or a logistic's, so a GELU's and a SiLU's too.
    """
    if all(map(is_exact, eqn.invars)):
        return False
    name = eqn.primitive.name
    # A softmax's exponential is its own slope; a ReLU's is a bit.
    if name in ("exp", "square") or is_piecewise_linear(eqn):
        return False
    if name == "integer_pow" and eqn.params["y"] == 2:  # the square of a variance
        return False
    return not is_product(eqn, is_exact)  # a GLU's


def _has_mask(cluster: Cluster, classes: Classes, changed: set[Var]) -> bool:
    """Whether an exponential is only used times numbers, such as a mask.

    JAX keeps the exponential, e^10 on a contrastive loss's diagonal, which its mask
    leaves out: in one group with it the others were lost (0.5 gradients at 8 bits).
    The derivative is the product. Masks that are known are left to `masked.py`, which
    stores fewer arrays.

    Args:
      changed: variables that need a gradient.
    """
    inner = {v for eqn in cluster.eqns for v in eqn.outvars} - {*cluster.outs}
    exponentials = classes.exponentials & inner
    is_given = lambda v: v not in changed and classes.is_exact(v)
    return any(
        eqn.primitive.name == "mul"
        and not exponentials.isdisjoint(variables_in(eqn.invars))
        and any(map(is_given, variables_in(eqn.invars)))
        for eqn in cluster.eqns
    ) and all(classes.masks.masking(eqn) is None for eqn in cluster.eqns)


def _clusters(
    jaxpr: Jaxpr, depends: Predicate, joins: Sequence[bool]
) -> list[list[int]]:
    """Connected elementwise equations with one level and shape, by number.

    Args:
      joins: for each equation whether it can be in a cluster.
    """
    level = _levels(jaxpr, depends, joins)
    made_by: dict[Var, int] = {}
    parent: dict[int, int] = {}

    def root(k: int) -> int:
        while parent[k] != k:
            parent[k] = k = parent[parent[k]]
        return k

    for k, eqn in enumerate(jaxpr.eqns):
        if not joins[k]:
            continue
        parent[k] = k
        out = eqn.outvars[0]
        made_by[out] = k
        for v in variables_in(eqn.invars):
            maker = made_by.get(v)
            alike = level.get(v) == level[out] and v.aval.shape == out.aval.shape
            if maker is not None and alike:
                parent[root(k)] = root(maker)
    clusters = defaultdict(list)
    for k in parent:
        clusters[root(k)].append(k)
    return list(clusters.values())


def _joins(eqn: Eqn, depends: Predicate) -> bool:
    """Whether an equation can be in a cluster.

    None with a complex operand or result can: most of their derivatives, such as that
    of |z|, are no product of the tangent with one slope. Nor can fake quantization or a
    cast to float8: JAX rounds the tangent there too, which a slope of one would not
    (a gradient 5 % off for `reduce_precision(x, 5, 2)`). Nor can a custom rule that
    mixes a tangent's elements, whatever the function does: one that takes their mean
    off.
    """
    return (
        is_elementwise(eqn)
        and not loses_precision(eqn)
        and eqn.outvars[0].aval.shape != ()
        and not any(map(is_complex, (*eqn.invars, *eqn.outvars)))
        and any(map(depends, variables_in(eqn.invars)))
        and scales_each_element(eqn)
    )


def _levels(jaxpr: Jaxpr, depends: Predicate, joins: Sequence[bool]) -> dict[Var, int]:
    """Each variable's level; elementwise results as late as their users allow.

    Late: in silu(x) * (x @ w), the SiLU joins the product that reads it.
    """
    level: dict[Var, int] = {}
    for eqn, is_member in zip(jaxpr.eqns, joins, strict=True):
        inputs = [v for v in variables_in(eqn.invars) if depends(v)]
        highest = max([level.get(v, 0) for v in inputs], default=0)
        level.update((v, highest + (not is_member)) for v in eqn.outvars)
    latest = {v: level.get(v, 0) for v in variables_in(jaxpr.outvars)}
    for eqn, is_member in zip(jaxpr.eqns[::-1], joins[::-1], strict=True):
        if is_member:
            out = eqn.outvars[0]
            level[out] = latest.get(out, level[out])
        if not eqn.outvars:  # a cond whose branches return what they are given
            continue
        lowest = min(level[v] for v in eqn.outvars) - (not is_member)
        for v in variables_in(eqn.invars):
            latest[v] = min(latest.get(v, lowest), lowest)
    return level


def _cluster(
    eqns: Sequence[Eqn], members: Sequence[int], users: Users, moving: set[Var]
) -> Cluster:
    made = {v for e in eqns for v in e.outvars}
    ins = dict.fromkeys(
        v for e in eqns for v in variables_in(e.invars) if v not in made
    )
    outs = [v for e in eqns for v in e.outvars if users[v] - set(members)]
    names: dict[Atom, str] = {
        v: e.params["name"]
        for e in eqns
        if e.primitive.name == "name"
        for v in (*variables_in(e.invars), *e.outvars)
    }
    still = frozenset(v for v in (*ins, *made) if v not in moving)
    return Cluster(tuple(eqns), tuple(ins), tuple(outs), still=still, names=names)
