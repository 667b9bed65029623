"""List a function's residuals and their bytes, without running anything."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxact._compress import compress
from jaxact._engine.lines import user_line
from jaxact._engine.own_gradient import returns_own_gradient
from jaxact._engine.warnings import warn
from jaxact._jaxpr.rewrite import without_unused
from jaxact._modules.pure import first_of, pure_call
from jaxact._plan.forward import trace_forward
from jaxact._policy import Policy, checked_policy
from jaxact._report.step import step_residuals
from jaxact._report.table import ResidualTable
from jaxact._report.tabulate import checkpointed_rows, tabulate
from jaxact._written_as import written_as


@written_as("residuals(loss, params, batch)")
def residuals(
    fn: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    policy: Policy | None = None,
    **kwargs: Any,
) -> ResidualTable:
    """List the arrays that `fn` keeps for its backward pass, without running it.

    Args:
      fn: any function, with compressed calls inside or not.
      *args: its arguments: arrays or `jax.ShapeDtypeStruct`, NNX modules, and anything
        else that it takes.
      **kwargs: the same by keyword.
      argnums: arguments to differentiate, as for `jax.grad`; an NNX module stands for
        its parameters. None: all float arrays, also those closed over if no
        `custom_vjp` inside closes over one. (): none; then the residuals are those of
        the gradients that `fn`, a whole training step, takes itself.
      has_aux: whether `fn` returns (result, anything), and only the result is
        differentiated.
      policy: compress `fn` with it first. Calls inside keep theirs: see `using`.

    Returns:
      A `ResidualTable`. Residuals inside compressed calls appear with the action that
      their policy chose; all others are kept exactly by JAX and say so. Sizes are sums
      over arrays; `jaxact.memory` has the compiled memory.

    Raises:
      TypeError: `fn` is no function of arrays, such as a module or a gradient of a
        compressed function; has_aux and it returns no pair.
      ValueError: argnums out of range.

    Warns:
      CompressionWarning: `fn` takes a gradient itself, as a training step does, and
        argnums is None.

    Example:
      >>> import jax.numpy as jnp, jaxact
      >>> f = jaxact.compress(lambda x: jnp.sin(x) * 2, policy=jaxact.Policy(bits=2))
      >>> table = jaxact.residuals(f, jnp.ones((64, 256)))
      >>> table.exact_bytes, table.stored_bytes
      (65536, 4352)
    """
    if policy is not None:
        fn = compress(fn, policy=checked_policy("jaxact.residuals(policy=", policy))
    call = pure_call(fn, args, kwargs, _without_aux if has_aux else None)
    flat, values, _ = call.trace()
    if argnums == ():
        return step_residuals(without_unused(flat.jaxpr))
    active = call.differentiated(values, argnums)
    run = lambda _, *values: flat(*values)
    try:
        forward = trace_forward(run, np.uint32(0), values, active)
    except Exception as error:
        # A rule is for its arguments. Nothing public names this class.
        if argnums is not None or type(error).__name__ != "CustomVJPException":
            raise
        count = len(values) - len(call.owners)
        active = [False] * count + active[count:]
        forward = trace_forward(run, np.uint32(0), values, active)
    if argnums is None and returns_own_gradient(flat):
        name = getattr(fn, "__qualname__", str(fn))
        warn(
            user_line(),
            f"jaxact: {name} takes a gradient itself, and these are the residuals of "
            "that gradient's own derivative. Give the function whose gradient it "
            "takes, or residuals(step, ..., argnums=()) lists those of the gradient.",
        )
    table = tabulate(forward.jaxpr, forward.residuals, ["seed", *flat.paths])
    recomputed = checkpointed_rows(forward.used_backward)
    return dataclasses.replace(table, checkpointed=recomputed)


def _without_aux(result: Any) -> Any:
    return first_of(result, "residuals")
