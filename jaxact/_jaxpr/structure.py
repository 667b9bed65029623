"""Whether two traced programs are the same program.

The layers of a network are traced one by one, into equal programs with other variables.
`structure` is a key that is equal for these, so that the work on one serves all. It
covers everything that an evaluation, a derivative or a table of residuals depends on,
name scopes among it, but not source lines.
"""

import dataclasses
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxact._jaxpr.compat import CALL_MARK, PROGRAMS, custom_vjp_body, open_jaxpr
from jaxact._jaxpr.jvp_rules import has_rule, rules_of
from jaxact._jaxpr.read import (
    is_literal,
    literal_key,
)
from jaxact._jaxpr.types import Atom, ClosedJaxpr, Eqn, Jaxpr, Var

# Constants up to so many bytes are compared by value, larger ones by identity.
_SMALL = 4096


@dataclasses.dataclass(frozen=True)
class Structure:
    """A program's structure; equal for equal programs.

    Its hash is computed once: a structure holds those of the programs inside it.
    """

    parts: tuple[Hashable, ...]
    number: int

    def __hash__(self) -> int:
        return self.number


@dataclasses.dataclass(frozen=True, eq=False)
class _Same:
    """An object that equals only itself, kept alive so that no other has its id."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


# JAX shares the programs of jitted functions: their structures are found once. By
# whether derivative rules count.
_Known: TypeAlias = "weakref.WeakKeyDictionary[Any, Structure]"
_known: dict[bool, _Known] = {
    rules: weakref.WeakKeyDictionary() for rules in (False, True)
}
_known_open: _Known = weakref.WeakKeyDictionary()


def structure(program: ClosedJaxpr, rules: bool = True) -> Structure:
    """The structure of a jaxpr, with its constants where it has any.

    Args:
      rules: whether programs with other derivatives differ.
    """
    found = _known[rules].get(program)
    if found is None:
        jaxpr, consts = open_jaxpr(program)
        constants = tuple(_key(value, rules) for value in consts)
        parts = (*_parts(jaxpr, rules), constants)
        found = _known[rules][program] = Structure(parts, hash(parts))
    return found


def open_structure(jaxpr: Jaxpr) -> Structure:
    """The structure of a jaxpr whose constants are inputs like the others."""
    found = _known_open.get(jaxpr)
    if found is None:
        parts = tuple(_parts(jaxpr, rules=True))
        found = _known_open[jaxpr] = Structure(parts, hash(parts))
    return found


def _parts(jaxpr: Jaxpr, rules: bool) -> Iterator[Hashable]:
    numbers: dict[Var, int] = {}

    def defined(variables: Sequence[Var]) -> tuple[Hashable, ...]:
        for v in variables:
            numbers[v] = len(numbers)
        return tuple(v.aval for v in variables)

    def read(atoms: Sequence[Atom]) -> tuple[Hashable, ...]:
        return tuple(literal_key(v) if is_literal(v) else numbers[v] for v in atoms)

    yield defined(jaxpr.constvars)
    yield defined(jaxpr.invars)
    with_rules: list[Eqn] = []
    for eqn in jaxpr.eqns:
        if rules and has_rule(eqn):
            with_rules.append(eqn)
        scope = str(eqn.source_info.name_stack)
        # The context has settings that count when an equation is lowered: meshes, how
        # random bits are drawn.
        settings = _key(eqn.effects, rules), _key(eqn.ctx, rules)
        yield eqn.primitive, read(eqn.invars), scope, settings, _params(eqn, rules)
        yield defined(eqn.outvars)
    yield read(jaxpr.outvars)
    if with_rules:
        yield from _rule_parts(with_rules)


def _params(eqn: Eqn, rules: bool) -> Hashable:
    body = custom_vjp_body(eqn)
    if body is not None:
        if not rules or is_compressed_call(body):
            return structure(body, rules)  # the call's rule follows from its mark
    elif has_rule(eqn):
        return structure(eqn.params["call_jaxpr"], rules)
    return tuple((name, _key(x, rules)) for name, x in sorted(eqn.params.items()))


def _rule_parts(eqns: Sequence[Eqn]) -> Iterator[Hashable]:
    """Keys of custom_jvps' rules: their traces, or where one has none, itself."""
    try:
        traced = rules_of(eqns)
    # JAX asks for a rule where it differentiates alone, and some raise an error of any
    # type: xlogy's for an integer x.
    except Exception:
        if len(eqns) > 1:
            for eqn in eqns:
                yield from _rule_parts([eqn])
        else:
            yield tuple(_key(x, rules=False) for x in eqns[0].params.values())
    else:
        yield structure(traced, rules=False)


def is_compressed_call(body: ClosedJaxpr) -> bool:
    """Whether a custom rule's body is a compressed call's."""
    marks = [e for e in open_jaxpr(body)[0].eqns if e.primitive.name == CALL_MARK]
    return any(mark.params["call"] is not None for mark in marks)


def _key(value: Any, rules: bool) -> Hashable:
    """A key for a parameter, equal only where nothing distinguishes two of them."""
    if isinstance(value, PROGRAMS):
        return structure(value, rules)
    if isinstance(value, tuple | list):
        return type(value), tuple(_key(x, rules) for x in value)
    if isinstance(value, set | frozenset):
        return frozenset, frozenset(_key(x, rules) for x in value)
    if isinstance(value, dict):
        return dict, tuple((name, _key(x, rules)) for name, x in value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        parts = (_key(getattr(value, field.name), rules) for field in fields)
        return type(value), tuple(parts)
    if isinstance(value, np.ndarray | np.generic) and value.nbytes <= _SMALL:
        return np.ndarray, value.shape, value.dtype, value.tobytes()
    if isinstance(value, jax.Array | Callable):
        return _Same(value)
    if isinstance(value, float):
        return float, value.hex()  # 0.0 == -0.0, and NaN is not equal to itself
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    return type(value), value
