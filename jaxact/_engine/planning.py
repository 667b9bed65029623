"""Plan a call: trace its forward program and decide about the residuals."""

from collections.abc import Callable, Sequence

import jax

from jaxact._checkpoint_policies import SaveEither, save_packed
from jaxact._engine.scan import CompressBody, contains_scan, push_into_scans
from jaxact._engine.storage import Draw
from jaxact._form import plan_bases, rewrite
from jaxact._jaxpr.rewrite import new_variable, with_inputs
from jaxact._jaxpr.types import Array
from jaxact._plan.each import plan_each_residual
from jaxact._plan.forward import trace_forward
from jaxact._plan.storage import StoragePlan
from jaxact._policy import Policy
from jaxact._trace import Flat, Kind


def plan_call(
    flat: Flat,
    policy: Policy,
    prefix: str,
    compress_body: CompressBody,
    active: tuple[bool, ...],
    draw: Draw,
    values: Sequence[Array],
) -> StoragePlan:
    """Trace the forward program and decide about its residuals.

    Args:
      prefix: the call's module path.
      compress_body: evaluates the body of a scan, compressed.
      active: whether each value is differentiated.
    """
    keys, settings = list(draw.probe), list(draw.probe.values())
    run = _differentiable(flat, policy, compress_body)

    def run_flat(seed: jax.Array, *inputs: jax.Array) -> list[jax.Array]:
        count = len(inputs) - len(keys)
        probe = dict(zip(keys, inputs[count:], strict=True))
        return run(Draw(seed, probe), *inputs[:count])

    forward = trace_forward(
        run_flat,
        draw.seed,
        [*values, *settings],
        (*active, *(True for _ in keys)),
    )
    decide = plan_bases if policy.chooses_form else plan_each_residual
    return decide(forward, _with_settings(flat, settings), policy, prefix)


def _differentiable(
    flat: Flat, policy: Policy, compress_body: CompressBody
) -> Callable[..., list[jax.Array]]:
    """(draw, *values) -> outputs: scans compressed inside, the rest checkpointed."""
    if policy.chooses_form:
        flat, widen = rewrite(flat)
    else:
        widen = list

    def plain(draw: Draw, *values: jax.Array) -> list[jax.Array]:
        return flat(*values)

    run = plain
    if contains_scan(flat.jaxpr):
        run = push_into_scans(flat, compress_body)
    if policy.recompute is not None:
        keep = SaveEither(policy.recompute, save_packed)
        run = jax.checkpoint(run, policy=keep)
    return lambda draw, *values: run(draw, *widen(values))


def _with_settings(flat: Flat, settings: Sequence[jax.Array]) -> Flat:
    """`flat` with inputs for settings, which it does not read and never stores."""
    if not settings:
        return flat
    variables = [new_variable(jax.typeof(a)) for a in settings]
    return Flat(
        with_inputs(flat.jaxpr, variables),
        (*flat.kinds, *(Kind.PARAMETER for _ in variables)),
        (*flat.paths, *("probe" for _ in variables)),
        (*flat.owners, *(-1 for _ in variables)),
    )
