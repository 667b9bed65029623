"""Label a program's equations, so that they are known in programs made from it.

Differentiation adds equations and leaves others out, depending on what is
differentiated, so a place in the program that it makes identifies nothing. A label is
part of an equation's name stack, which every equation made from it inherits: '#4.mul'
is the fifth `mul` under its path. Path components that start with '#' are labels;
`visible` leaves them out.
"""

import functools
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from jax.extend import source_info_util

from jaxact._jaxpr.compat import open_jaxpr, scan_counts, with_jaxpr
from jaxact._jaxpr.primitives import CHECKPOINTS, CUSTOM_VJPS, JITS
from jaxact._jaxpr.rewrite import with_outputs
from jaxact._jaxpr.types import ClosedJaxpr, Eqn, Jaxpr, NameStack

_MARK = "#"
_EINSUM = re.compile(r"[\w.,]*->[\w.]*")
# Primitives that differ in name between JAX versions.
_KINDS = (
    dict.fromkeys(JITS, "jit")
    | dict.fromkeys(CHECKPOINTS, "checkpoint")
    | dict.fromkeys([*CUSTOM_VJPS, "call_hi_primitive"], "custom_vjp")
)
# Kinds of equations that evaluate the user's own equations.
CALLS = frozenset(
    "jit checkpoint custom_vjp custom_jvp_call cond while scan shard_map".split()
)
# Kinds of labels for programs that count their equations from 0: a scan's body, a
# shard_map's, a conditional's branches, and the body of a jit with shardings.
BODIES = frozenset("scan shard_map cond branch sharded".split())
# The scope for local derivatives, inside that for their function.
DERIVATIVE = "derivative"
# The kind that labels how elements which are stored apart are found.
LARGEST = "largest"


class Label(NamedTuple):
    """An equation among those with its kind and path.

    Attributes:
      kind: its primitive; for a `checkpoint_name` the name, for a call 'call'.
      number: how many of the kind come before it under the path.
    """

    kind: str
    number: int = 0

    @property
    def component(self) -> str:
        """As a component of a name stack, in which '/' separates."""
        return f"{_MARK}{self.number}.{self.kind.replace('/', '|')}"

    def is_of(self, kind: str) -> bool:
        """Whether a label that was read from a path is of this kind."""
        return self.kind == kind.replace("/", "|")

    def __str__(self) -> str:
        return f"{self.kind}#{self.number}" if self.number else self.kind


def branch_component(number: int) -> str:
    """The component below a conditional's own; its first branch needs none."""
    return Label("branch", number).component if number else ""


def with_labels(jaxpr: Jaxpr) -> Jaxpr:
    """`jaxpr` with a label on each equation, also in jitted and checkpointed bodies.

    A scan's body is labelled when it is compressed.
    """
    return _labelled(jaxpr, "", Counter())


def without_scope(jaxpr: Jaxpr, scope: str) -> Jaxpr | None:
    """`jaxpr` without the scope that all its equations are in, None if some are not.

    The programs of a network's equal layers differ in that scope alone.
    """
    eqns = []
    for eqn in jaxpr.eqns:
        stack = eqn.source_info.name_stack
        if str(stack[:1]) != scope:  # not by the text: a scope may have slashes
            return None
        source = eqn.source_info.replace(name_stack=stack[1:])
        eqns.append(eqn.replace(source_info=source))
    return with_outputs(jaxpr, eqns, jaxpr.outvars)


@functools.lru_cache  # all residuals of a call ask for one path
def visible(path: str) -> str:
    """`path` without labels, and without the scopes that `jnp.einsum` opens."""
    parts = path.split("/")
    return "/".join(
        p for p in parts if p and not p.startswith(_MARK) and not _EINSUM.fullmatch(p)
    )


def labels_in(path: str) -> list[Label]:
    """The labels in `path`, outermost first."""
    labels = []
    for part in path.split("/"):
        if part.startswith(_MARK):
            number, _, kind = part[1:].partition(".")
            labels.append(Label(kind, int(number)))
    return labels


def kind_of(eqn: Eqn) -> str:
    """The kind that an equation's label gives."""
    name = eqn.primitive.name
    return eqn.params["name"] if name == "name" else _KINDS.get(name, name)


def module_path(stack: NameStack | str) -> str:
    """A name stack as a path, labels included: 'jvp(Net)/block0' is 'Net/block0'."""
    parts = re.sub(r"\w+\(|\)", "", str(stack)).split("/")
    return "/".join(p for p in parts if p)


def numbered(labels: Sequence[str]) -> tuple[str, ...]:
    """Each label's later copies with a number: ('carry', 'carry[1]')."""
    seen = Counter[str]()
    result = []
    for label in labels:
        result.append(f"{label}[{seen[label]}]" if seen[label] else label)
        seen[label] += 1
    return tuple(result)


def scan_inputs(eqn: Eqn) -> tuple[str, ...]:
    """Names for the inputs of a scan's body."""
    num_consts, num_carry = scan_counts(eqn)
    names = ["constant"] * num_consts + ["carry"] * num_carry
    return numbered(names + ["x"] * (len(eqn.invars) - len(names)))


def current_path() -> str:
    """The scopes that are open now, without labels."""
    return visible(module_path(source_info_util.current_name_stack()))


def _labelled(jaxpr: Jaxpr, scope: str, seen: Counter[tuple[str, str]]) -> Jaxpr:
    eqns = [_with_label(eqn, scope, seen) for eqn in jaxpr.eqns]
    return with_outputs(jaxpr, eqns, jaxpr.outvars)


def _with_label(eqn: Eqn, scope: str, seen: Counter[tuple[str, str]]) -> Eqn:
    stack = eqn.source_info.name_stack
    path = "/".join(p for p in (scope, visible(module_path(stack))) if p)
    label = Label(kind_of(eqn), seen[path, kind_of(eqn)])
    seen[path, label.kind] += 1
    source = eqn.source_info.replace(name_stack=stack.extend(label.component))
    if eqn.primitive.name not in (*JITS, *CHECKPOINTS):
        return eqn.replace(source_info=source)
    body: ClosedJaxpr = eqn.params["jaxpr"]
    labelled = _labelled(open_jaxpr(body)[0], path, seen)
    params = eqn.params | {"jaxpr": with_jaxpr(body, labelled)}
    return eqn.replace(params=params, source_info=source)
