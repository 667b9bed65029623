"""Warn where a policy did less than it says."""

import warnings
from collections.abc import Sequence

import jax.numpy as jnp

from jaxact._codec import Exact
from jaxact._decision import Reason
from jaxact._plan.storage import StoragePlan
from jaxact._policy import Policy


class CompressionWarning(UserWarning):
    """A policy did less than it says: a rule, or all of it, changed nothing."""


def warn_if_unused(policy: Policy, name: str, plans: Sequence[StoragePlan]) -> None:
    """Warn about rules that matched nothing, and about compressing nothing."""
    decisions = [d for plan in plans for d in plan.all_decisions]
    used = {d.rule for d in decisions}
    for index, rule in enumerate(policy.rules):
        # A path or a key may be of another module with the same policy.
        if index not in used and rule.path is None and rule.key is None:
            warnings.warn(
                f"jaxact: {rule} matched no residual of {name}. See "
                "jaxact.residuals for what there is.",
                CompressionWarning,
                stacklevel=2,
            )
    wanted = policy.rules or not isinstance(policy.default, Exact)
    smaller = any(
        d.action.is_packed or d.reason is Reason.STORED_INSIDE for d in decisions
    )
    is_float = lambda d: jnp.issubdtype(d.residual.dtype, jnp.inexact)
    expected = (Reason.REFERENCED, Reason.OF_PARAMETERS)
    reasons = sorted(
        {
            d.why
            for d in decisions
            if d.rule is None and is_float(d) and d.reason not in expected
        }
    )
    if wanted and reasons and not smaller:
        warnings.warn(
            f"jaxact: nothing was compressed in {name}; its residuals: "
            f"{'; '.join(reasons)}. See jaxact.residuals for each.",
            CompressionWarning,
            stacklevel=2,
        )
