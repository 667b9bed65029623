"""Warn where a policy does not do what its author expects."""

import contextlib
import dataclasses
import difflib
import fnmatch
import re
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence

import jax.numpy as jnp

from jaxact._codec import Exact
from jaxact._decision import Decision, Reason
from jaxact._engine.lines import Line, user_line
from jaxact._jaxpr.labels import visible
from jaxact._policy import RECOMPUTED_FROM_BITS, Policy, Rule
from jaxact._recompute import Checkpoint, call_key, checkpoints_of
from jaxact._residual import Residual, call_suffix

# What a regular expression has and no path or name: a glob means these as they are.
_REGEX = re.compile(r"[\\^$|()+]|\.\*")
# Any number in a class of characters, and one in it.
_ANY = re.compile(r"(\\[dws]|\[[^]]*\]|\.)[+*]")
_ONE = re.compile(r"\\[dws]")
# How many names a warning offers.
_OFFERED = 3


class CompressionWarning(UserWarning):
    """A policy does not do what its author expects.

    A rule, or all of it, changed nothing; or a general choice of bits is too coarse for
    a value that a checkpoint or a custom rule computes others from.
    """


@dataclasses.dataclass
class _Watch:
    """A policy's rules in the first program that is differentiated with it.

    Attributes:
      line: the first call.
      calls: names of the compressed functions.
      prefixes: paths of calls, with labels; none where a `Checkpoint` is no choice.
      used: indices of rules that matched.
      residuals: that there are to match.
      inside: stored by compressed calls inside, about which their own policy decides.
      is_over: the program's backward pass has begun.
    """

    line: Line
    calls: set[str] = dataclasses.field(default_factory=set)
    prefixes: set[str] = dataclasses.field(default_factory=set)
    used: set[int | None] = dataclasses.field(default_factory=set)
    residuals: list[Residual] = dataclasses.field(default_factory=list)
    inside: list[Residual] = dataclasses.field(default_factory=list)
    is_over: bool = False


# By the policy's id, and as long as the policy exists.
_watches: dict[int, _Watch] = {}


class _Planning(threading.local):
    """How many calls the thread is planning; it differentiates calls inside them."""

    depth = 0


_planning = _Planning()


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """A context in which the backward pass of a call inside ends no program."""
    _planning.depth += 1
    try:
        yield
    finally:
        _planning.depth -= 1


def notice(
    policy: Policy, name: str, decisions: Sequence[Decision], *, is_for_all: bool
) -> None:
    """Note which rules a call's residuals matched; warn if nothing was compressed.

    Args:
      name: the compressed function's.
      is_for_all: whether compressed calls inside have the same policy.
    """
    line = user_line()
    if policy.rules or checkpoints_of(policy.recompute):
        watch = _watch_of(policy)
        if not watch.is_over:
            watch.calls.add(name)
            watch.used.update(d.rule for d in decisions)
            for d in decisions:
                if d.reason is not Reason.STORED_INSIDE:
                    watch.residuals.append(d.residual)
                elif not is_for_all:
                    watch.inside.append(d.residual)
    wanted = policy.rules or not isinstance(policy.default, Exact)
    # Where rules keep the large residuals, only small ones are left.
    is_asked = any(d.rule is not None and not d.declined for d in decisions)
    expected = (Reason.SMALL, Reason.STATISTIC) if is_asked else ()
    reasons = sorted(
        {d.why for d in decisions if _is_unexpected(d) and d.reason not in expected}
    )
    if wanted and reasons and not any(map(_is_smaller, decisions)):
        warn(
            line,
            f"jaxact: nothing was compressed in {name}; its residuals: "
            f"{'; '.join(reasons)}. See jaxact.residuals for each.",
        )
    coarse = [d.residual for d in decisions if _is_coarse(d, policy)]
    if coarse:
        warn(
            line,
            f"jaxact: in {name} a checkpoint or a custom rule computes values from "
            f"{coarse[0].key}{_others(len(coarse) - 1)}, and the policy rounds that to "
            f"fewer than {RECOMPUTED_FROM_BITS} bits: the gradient is biased, and may "
            f"be far off. Put Rule(Quantize({RECOMPUTED_FROM_BITS}), "
            "recomputed_from=True) first; with the bits of the policy in it, it says "
            "that these are meant.",
        )


def notice_call(policy: Policy, prefix: str) -> None:
    """Note the path of a call, labels included, for the policy's checkpoints."""
    if checkpoints_of(policy.recompute):
        watch = _watch_of(policy)
        if not watch.is_over:
            watch.prefixes.add(prefix)


def _watch_of(policy: Policy) -> _Watch:
    watch = _watches.get(id(policy))
    if watch is None:
        watch = _watches[id(policy)] = _Watch(user_line())
        weakref.finalize(policy, _watches.pop, id(policy), None)
    return watch


def warn_about_rules(policy: Policy) -> None:
    """Warn, once for a policy, about rules and checkpoints that matched nothing.

    Called when a backward pass begins: the forward pass then met every call. A call
    that is computed again may decide about its residuals later, or not at all where
    another program did: their keys are no mistake.
    """
    watch = _watches.get(id(policy))
    if watch is None or watch.is_over or not watch.calls or _planning.depth:
        return
    watch.is_over = True
    calls = ", ".join(sorted(watch.calls))
    again = [
        prefix
        for prefix in watch.prefixes
        if any(one.matches(prefix) for one in checkpoints_of(policy.recompute))
    ]
    for index, rule in enumerate(policy.rules):
        if index in watch.used or rule.path == "*":
            continue
        if not any(_is_in_call(rule.key, prefix) for prefix in again):
            found = _why_unused(rule, policy.rules[:index], watch, calls)
            warn(watch.line, f"jaxact: {rule} {found}")
    for checkpoint in checkpoints_of(policy.recompute):
        if not any(checkpoint.matches(prefix) for prefix in watch.prefixes):
            warn(
                watch.line,
                f"jaxact: {checkpoint} matched no call of {calls}."
                f"{_as_glob('path', checkpoint.path)}"
                f"{_nearest_call(checkpoint, watch.prefixes)}"
                f"{_of_calls_inside(watch.inside)}",
            )
    watch.residuals.clear()
    watch.inside.clear()
    watch.prefixes.clear()


def _is_in_call(key: str | None, prefix: str) -> bool:
    """Whether a key can be that of a residual in the call with this path."""
    path = visible(prefix)
    start, end = f"{path}/" if path else "", call_suffix(prefix)
    return key is not None and key.startswith(start) and key.endswith(end)


def _suggestion(rule: Rule, residuals: Iterable[Residual]) -> str:
    """The nearest that a rule without a match could have meant; '' without any."""
    known: dict[str, set[str]] = {
        "key": {r.key for r in residuals},
        "name": {name for r in residuals for name in (r.name, *r.aliases)},
        "path": {part for r in residuals for part in _modules(r.path)},
        "primitive": {r.primitive for r in residuals},
    }
    if rule.name is not None and not any(known["name"]):
        return " No value here has a checkpoint_name."
    for condition, names in known.items():
        offer = _offer(condition, getattr(rule, condition), names)
        if offer:
            return offer
    known["dtype"] = {str(r.dtype) for r in residuals}
    for condition, names in known.items():
        wanted, there = getattr(rule, condition), names - {""}
        is_glob = condition in ("name", "path")
        found = fnmatch.filter(there, str(wanted)) if is_glob else str(wanted) in there
        if wanted is not None and there and not found:
            short = sorted(there, key=lambda name: (len(name), name))[:_OFFERED]
            return f" Here are {', '.join(f'{condition}={n!r}' for n in short)}."
    return ""


def _why_unused(rule: Rule, earlier: Sequence[Rule], watch: _Watch, calls: str) -> str:
    """How a rule without effect reads on: it comes too late, or matches nothing."""
    residuals = watch.residuals
    keys = [
        r.key
        for r in residuals
        if rule.matches(r) and any(one.matches(r) for one in earlier)
    ]
    if keys:
        return (
            f"decides about no residual of {calls}: an earlier rule matches {keys[0]}"
            f"{_others(len(keys) - 1)}, and the first that matches decides. Put it "
            "before that rule."
        )
    found = _misread(rule, residuals)
    if not any(map(rule.matches, watch.inside)):
        found += _suggestion(rule, residuals)
    return (
        f"matched no residual of {calls}.{found}{_of_calls_inside(watch.inside)} See "
        "jaxact.residuals for the residuals that there are."
    )


def _of_calls_inside(residuals: Sequence[Residual]) -> str:
    """Who decides about the residuals in compressed calls inside; '' without any."""
    if not residuals:
        return ""
    paths = sorted({r.path for r in residuals})
    named = f" ({paths[0]}{_others(len(paths) - 1)})" if paths[0] else ""
    return (
        f" Calls inside that are compressed already{named} keep their own policies: "
        "to set one policy for all write with jaxact.using(policy): step(params)."
    )


def _misread(rule: Rule, residuals: Sequence[Residual]) -> str:
    """Where a condition is not written as rules read it; or ''."""
    found = _as_glob("path", rule.path) or _as_glob("name", rule.name)
    where = rule.where
    if found or where is None or not residuals:
        return found
    has_answers = any(where(r) is not None for r in residuals)
    return "" if has_answers else " Its where gave None: True or False is required."


def _as_glob(condition: str, wanted: str | None) -> str:
    """How to write a pattern that looks like a regular expression; '' for others."""
    if wanted is None or not _REGEX.search(wanted):
        return ""
    glob = _ONE.sub("?", _ANY.sub("*", wanted.strip("^$")))
    is_one = not _REGEX.search(glob)
    write = f"{condition}={glob!r}" if is_one else "one for each alternative"
    return (
        f" Its {condition} is a glob, in which * stands for any text and ? for one "
        f"character, not a regular expression: write {write}."
    )


def _nearest_call(checkpoint: Checkpoint, prefixes: Iterable[str]) -> str:
    """As `_suggestion`, for a checkpoint."""
    modules = {part for prefix in prefixes for part in _modules(visible(prefix))}
    keys = {call_key(prefix) for prefix in prefixes}
    return _offer("path", checkpoint.path, modules) or _offer(
        "key", checkpoint.key, keys
    )


def _offer(condition: str, wanted: str | None, names: set[str]) -> str:
    """The names nearest to one that is not among them; '' without any."""
    if wanted is None or wanted in names:
        return ""
    name = wanted.strip("*/")
    near = difflib.get_close_matches(name, names - {""}, _OFFERED, 0.5)
    offers = " or ".join(f"{condition}={name!r}" for name in near)
    return f" Did you mean {offers}?" if near else ""


def _modules(path: str) -> list[str]:
    """A path and its ends, and those of the modules around it, short ones first."""
    parts = path.split("/")
    ends = range(1, len(parts) + 1)
    return ["/".join(parts[i:j]) for j in ends for i in range(j)]


def _is_smaller(decision: Decision) -> bool:
    """Whether a residual takes less memory than without compression."""
    return decision.action.is_packed or decision.reason is Reason.STORED_INSIDE


def _is_coarse(decision: Decision, policy: Policy) -> bool:
    """Whether a general choice rounds a value that others are computed from.

    Flash attention by a custom rule, at large logits: 266 times the gradient's size at
    4 bits, 0.16 at 8 (see `RECOMPUTED_FROM_BITS`). A `recompute` policy asks for it.
    """
    bits = decision.action.bits
    if bits is None or bits >= RECOMPUTED_FROM_BITS or policy.recompute is not None:
        return False
    rule = None if decision.rule is None else policy.rules[decision.rule]
    is_meant = rule is not None and bool(rule.recomputed_from or rule.key)
    return decision.residual.is_recomputed_from and not is_meant


def _others(count: int) -> str:
    if count == 1:
        return " and another one"
    return f" and {count} others" if count else ""


def _is_unexpected(decision: Decision) -> bool:
    """Whether a user who asked for compression would not expect it to stay exact."""
    is_float = jnp.issubdtype(decision.residual.dtype, jnp.inexact)
    expected = (Reason.REFERENCED, Reason.OF_PARAMETERS)
    return decision.rule is None and is_float and decision.reason not in expected


def warn(line: Line, message: str) -> None:
    """Warn at a line in the user's program."""
    warnings.warn_explicit(
        message,
        CompressionWarning,
        line.filename,
        line.number,
        module=line.names.get("__name__"),
        registry=line.names.setdefault("__warningregistry__", {}),
    )
