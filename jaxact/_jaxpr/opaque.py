"""A call that JAX's partial evaluation does not look into.

When `scan` is differentiated, JAX moves computations that do not depend on its loop out
of it, and keeps the results: every constant that an encoder broadcasts would become an
array as large as the residual (250 MiB on a 12-layer transformer compiled for an H100).
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import core
from jax.extend import core as jex
from jax.interpreters import batching, mlir

from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.rewrite import without_constants
from jaxact._jaxpr.types import Array, Axes, ClosedJaxpr, Jaxpr

opaque_p = jex.Primitive("jaxact_opaque")
opaque_p.multiple_results = True


def opaque(f: Callable[..., Any], *args: Array) -> Any:
    """`f(*args)` for arrays, in one equation that is not differentiated."""
    closed, out = jax.make_jaxpr(f, return_shape=True)(*args)
    return hide(closed, jax.tree.structure(out), *args)


def hide(closed: ClosedJaxpr, tree: Any, *args: Array) -> Any:
    """The same for a function that is traced already; `tree` is its result's."""
    jaxpr, consts = open_jaxpr(closed)
    results = opaque_p.bind(*consts, *args, jaxpr=without_constants(jaxpr))
    return jax.tree.unflatten(tree, results)


def _evaluate(*args: Array, jaxpr: Any) -> list[Any]:
    return core.eval_jaxpr(jaxpr, (), *args)


def _batch(args: tuple[Array, ...], dims: Axes, *, jaxpr: Jaxpr) -> Any:
    mapped = jax.vmap(lambda *args: _evaluate(*args, jaxpr=jaxpr), in_axes=tuple(dims))
    return opaque(mapped, *args), [0] * len(jaxpr.outvars)


opaque_p.def_impl(_evaluate)
opaque_p.def_abstract_eval(lambda *_, jaxpr: [v.aval for v in jaxpr.outvars])
mlir.register_lowering(opaque_p, mlir.lower_fun(_evaluate, multiple_results=True))
batching.primitive_batchers[opaque_p] = _batch
# JAX 0.12 lowers some functions late, such as `jnp.searchsorted` in a user's codec. By
# then scans are differentiated, and nothing is moved out any more.
opaque_p.to_lojax = _evaluate
