"""Evaluate a traced program, equation by equation."""

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.extend import source_info_util
from jax.stages import Wrapped

from jaxact._jaxpr.compat import bind_params, open_jaxpr
from jaxact._jaxpr.read import is_literal, is_split_explicitly
from jaxact._jaxpr.types import Array, Atom, Aval, ClosedJaxpr, Env, Eqn, Jaxpr, PyTree


def value_of(v: Atom, env: Env) -> Any:
    """A variable's or literal's value."""
    return v.val if is_literal(v) else env[v]


def evaluate(
    jaxpr: Jaxpr, consts: Sequence[Array], inputs: Sequence[Array]
) -> list[Any]:
    """The program's outputs; under `jax.debug_nans` see `bind`."""
    if not _finds_nans():
        program: Any = jaxpr
        return core.eval_jaxpr(program, consts, *inputs)
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env |= dict(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        results = bind(eqn, [value_of(v, env) for v in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))
    return [value_of(v, env) for v in jaxpr.outvars]


def trace_jitted(f: Wrapped, *args: PyTree) -> tuple[ClosedJaxpr, Any]:
    """The program of a function from `jax.jit`, and its result's tree.

    As from `jax.make_jaxpr`, which jits a function anew. By one jitted function JAX
    finds an earlier trace in a third of the time.
    """
    traced = f.trace(*args)
    jaxpr, _ = open_jaxpr(traced.jaxpr)
    if len(jaxpr.invars) == len(jax.tree.leaves(args)):
        return traced.jaxpr, traced.out_tree
    # Tracers that the function closes over became inputs: here they are constants.
    return jax.make_jaxpr(inspect.unwrap(f))(*args), traced.out_tree


def bind(eqn: Eqn, values: Sequence[Array]) -> list[Any]:
    """Apply one equation, keeping the source line and scope it was traced under.

    `jax.debug_nans` looks at each operation's result, and at a jitted function's only
    as a whole. Such a function may hold a NaN for a case that does not occur, as
    `jnp.var` does; after its body was inlined, copies of that NaN are no finding.
    """
    functions, params = bind_params(eqn)
    copies_nan = _finds_nans() and all(map(_is_nan, values))
    look = jax.debug_nans(False) if copies_nan else contextlib.nullcontext()
    with traced_at(eqn), eqn.ctx.manager, look:
        out = eqn.primitive.bind(*functions, *values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def is_traced(values: PyTree) -> bool:
    """Whether any of the values belongs to a trace."""
    return any(isinstance(x, core.Tracer) for x in jax.tree.leaves(values))


def _finds_nans() -> bool:
    config: Any = jax.config
    return config.jax_debug_nans


def _is_nan(x: Array) -> bool:
    """Whether a concrete value is NaN in every element."""
    is_float = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    return is_float and not isinstance(x, core.Tracer) and bool(np.isnan(x).all())


def traced_at(eqn: Eqn) -> contextlib.AbstractContextManager[None]:
    """A context in which operations get the source line and scope of `eqn`."""
    info = eqn.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    return source_info_util.user_context(info.traceback, name_stack=stack)


def in_mesh_of(x: Array) -> contextlib.AbstractContextManager[object]:
    """A context in which operations on `x` are typed as they were where it was made.

    Under Explicit axes, inside `jax.sharding.auto_axes`, that is another mesh.
    """
    if not is_in_other_mesh(x):
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(jax.typeof(x).sharding.mesh)


def is_in_other_mesh(x: Array) -> bool:
    """Whether `x` was made where another mesh was set, see `in_mesh_of`."""
    mesh, around = jax.typeof(x).sharding.mesh, jax.sharding.get_abstract_mesh()
    return not (mesh.empty or around.empty or mesh == around)


def moved(x: Array, number: Array) -> Array:
    """A number as an operand in `in_mesh_of(x)`; one without a mesh is one anywhere."""
    mesh, own = (jax.typeof(v).sharding.mesh for v in (x, number))
    if own.empty or mesh.empty or own == mesh:
        return number
    everywhere = jax.sharding.PartitionSpec()
    return jax.sharding.reshard(number, jax.NamedSharding(mesh, everywhere))


def placed(x: jax.Array, aval: Aval) -> jax.Array:
    """`x` as an array with this type is split over a mesh with Explicit axes.

    An axis that a codec cuts through its groups is split no longer when decoded.
    """
    if not is_split_explicitly(aval) or jax.typeof(x).sharding == aval.sharding:
        return x
    return jax.sharding.reshard(x, aval.sharding)


def varying_alike(values: Sequence[Array]) -> list[Any]:
    """The values as operands for one primitive inside a `shard_map` that checks them.

    Primitives, unlike `lax` functions, do not cast a constant themselves.
    """
    axes = [set(jax.typeof(v).manual_axis_type.varying) for v in values]
    every = set().union(*axes)
    return [
        lax.pcast(v, tuple(every - own), to="varying") if own != every else v
        for v, own in zip(values, axes, strict=True)
    ]
