"""Warn where a policy did less than it says."""

import sys
import warnings
from collections.abc import Sequence

import jax.numpy as jnp

from jaxact._codec import Exact
from jaxact._decision import Decision, Reason
from jaxact._plan.storage import StoragePlan
from jaxact._policy import Policy

# Packages whose lines say nothing to the user about a policy. `contextlib` runs the
# wrappers around Flax's methods.
_LIBRARIES = frozenset(
    "jaxact jax jaxlib flax equinox haiku optax contextlib functools".split()
)


class CompressionWarning(UserWarning):
    """A policy did less than it says: a rule, or all of it, changed nothing."""


def warn_if_unused(policy: Policy, name: str, plans: Sequence[StoragePlan]) -> None:
    """Warn about rules that matched nothing, and about compressing nothing."""
    decisions = [d for plan in plans for d in plan.all_decisions]
    used = {d.rule for d in decisions}
    for index, rule in enumerate(policy.rules):
        # A path or a key may belong to another module with the same policy.
        aims = (rule.path, rule.key, rule.recomputed_from)
        if index not in used and aims == (None, None, None):
            _warn(
                f"jaxact: {rule} matched no residual of {name}. See "
                "jaxact.residuals for the residuals that there are."
            )
    wanted = policy.rules or not isinstance(policy.default, Exact)
    reasons = sorted({d.why for d in decisions if _is_unexpected(d)})
    if wanted and reasons and not any(map(_is_smaller, decisions)):
        _warn(
            f"jaxact: nothing was compressed in {name}; its residuals: "
            f"{'; '.join(reasons)}. See jaxact.residuals for each."
        )


def _is_smaller(decision: Decision) -> bool:
    """Whether a residual takes less memory than without compression."""
    return decision.action.is_packed or decision.reason is Reason.STORED_INSIDE


def _is_unexpected(decision: Decision) -> bool:
    """Whether a user who asked for compression would not expect it to stay exact."""
    is_float = jnp.issubdtype(decision.residual.dtype, jnp.inexact)
    expected = (Reason.REFERENCED, Reason.OF_PARAMETERS)
    return decision.rule is None and is_float and decision.reason not in expected


def _warn(message: str) -> None:
    """Warn at the user's line: the innermost one outside the libraries."""
    # `skip_file_prefixes` of `warnings.warn` exists from Python 3.12 on.
    innermost = frame = sys._getframe(1)
    while frame is not None and _package(frame.f_globals) in _LIBRARIES:
        frame = frame.f_back
    frame = frame or innermost
    warnings.warn_explicit(
        message,
        CompressionWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
