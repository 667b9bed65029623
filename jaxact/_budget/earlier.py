"""Whether an earlier plan is one for the same step and target."""

import jax

from jaxact._budget.plan import Plan
from jaxact._budget.problem import Problem
from jaxact._budget.read import Step
from jaxact._memory.memory import first_device
from jaxact._memory.targets import gpu_of
from jaxact._tabular import bytes_text


def check_earlier(
    earlier: Plan, step: Step, problem: Problem, target: str | None
) -> None:
    """Refuse a plan whose compiled steps say nothing about this one.

    Other actions, bounds and rules are fine: steps were compiled with whole policies.
    So a residual counts where both plans choose for it. Where nothing was chosen, as
    where all is kept exactly, the arguments' sizes tell steps apart.

    Raises:
      ValueError: the step or the target is another.
    """
    device = _device(step, target)
    if earlier.memory.device != device:
        raise _refusal(f"it is for {earlier.memory.device}, the step for {device}")
    before, now = earlier.argument_bytes, problem.argument_bytes
    if before != now:
        raise _refusal(
            f"the arguments take {bytes_text(before)} there, {bytes_text(now)} here"
        )
    here = {
        (variant.name, row.key): (row.elements, row.exact_bytes)
        for call in problem.calls
        for variant in call.variants
        for row in variant.rows
    }
    rows = [row for trial in earlier.trail for row in trial.rows]
    common = [row for row in rows if (row.way, row.key) in here]
    if rows and not common:
        raise _refusal(f"the step has no residual {rows[0].key!r}")
    for row in common:
        elements, size = here[row.way, row.key]
        if (row.elements, row.exact_bytes) != (elements, size):
            raise _refusal(
                f"the residual {row.key!r} has {row.elements} elements "
                f"({bytes_text(row.exact_bytes)}) there, {elements} "
                f"({bytes_text(size)}) here"
            )


def _refusal(difference: str) -> ValueError:
    return ValueError(
        "jaxact.plan(earlier=Plan): a plan for the same step, arguments and target is "
        f"required, such as one for another budget; {difference}. Leave `earlier` out."
    )


def _device(step: Step, target: str | None) -> str:
    """The kind that a compiled step's `Memory` names."""
    if target is not None:
        return gpu_of(target).name
    leaves = jax.tree.leaves((step.args, step.kwargs))
    shardings = [x.sharding for x in leaves if isinstance(x, jax.Array)]
    return first_device(shardings).device_kind
