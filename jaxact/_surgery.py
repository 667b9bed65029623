"""Rewrite traced programs without tracing them again."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxact import _compat


@dataclass(frozen=True)
class Body:
    """What a call evaluates, and the name of its function."""

    inputs: Sequence[Any]
    eqns: Sequence[Any]
    outputs: Sequence[Any]
    constants: Sequence[tuple[Any, Any]] = ()  # (variable, value)
    name: str = ""


def jit_body(eqn: Any) -> Body | None:
    """The body of a `jit` that asks for nothing but to be called."""
    if not _compat.is_plain_jit(eqn):
        return None
    return _body(eqn.params["jaxpr"], eqn.params["name"])


def call_body(eqn: Any) -> Body | None:
    """The body of a plain `jit`, or of a custom rule that was not used."""
    if eqn.primitive.name == "custom_jvp_call" and not eqn.effects:
        return _body(eqn.params["call_jaxpr"], "")
    return jit_body(eqn)


def _body(closed: Any, name: str) -> Body:
    jaxpr, consts = _compat.open_jaxpr(closed)
    constants = tuple(zip(jaxpr.constvars, consts, strict=True))
    return Body(jaxpr.invars, jaxpr.eqns, jaxpr.outvars, constants, name)


@dataclass
class _Flattening:
    body_of: Callable[[Any], Body | None]
    eqns: list[Any] = field(default_factory=list)
    constants: list[tuple[Any, Any]] = field(default_factory=list)
    results: dict[Hashable, Sequence[Any]] = field(default_factory=dict)

    def walk(self, eqns: Sequence[Any], env: dict[Any, Any], scope: Any) -> None:
        """Append `eqns`; `env` says what their variables are called here."""
        for eqn in eqns:
            inputs = [rename(v, env) for v in eqn.invars]
            source = eqn.source_info
            if scope is not None:
                source = source.replace(name_stack=scope + source.name_stack)
            body = self.body_of(eqn)
            if body is not None:
                out = self._inline(body, inputs, source.name_stack)
            else:
                out = self._append(eqn, inputs, source, fresh=scope is not None)
            env.update(zip(eqn.outvars, out, strict=True))

    def _inline(self, body: Body, inputs: Sequence[Any], scope: Any) -> list[Any]:
        env = dict(zip(body.inputs, inputs, strict=True))
        for v, value in body.constants:
            env[v] = _compat.new_variable(v.aval)
            self.constants.append((env[v], value))
        # jax.numpy's own helpers start with an underscore and say nothing to a user.
        named = body.name and not body.name.startswith(("_", "<"))
        self.walk(body.eqns, env, scope.extend(body.name) if named else scope)
        return [rename(v, env) for v in body.outputs]

    def _append(
        self, eqn: Any, inputs: Sequence[Any], source: Any, *, fresh: bool
    ) -> Sequence[Any]:
        key = _key(eqn, inputs)
        if key is not None and key in self.results:
            return self.results[key]
        outputs = eqn.outvars
        if fresh:
            outputs = [_compat.new_variable(v.aval) for v in outputs]
        self.eqns.append(
            eqn.replace(invars=inputs, outvars=outputs, source_info=source)
        )
        if key is not None:
            self.results[key] = outputs
        return outputs


def flatten(jaxpr: Any, body_of: Callable[[Any], Body | None]) -> tuple[Any, list[Any]]:
    """`jaxpr` with calls inlined and each distinct equation evaluated once.

    Args:
      body_of: the body of an equation that is to be inlined, None for any other.

    Returns:
      The program and the values of the constants that it has more, at the end.
    """
    work = _Flattening(body_of)
    env: dict[Any, Any] = {}
    work.walk(jaxpr.eqns, env, None)
    outputs = [rename(v, env) for v in jaxpr.outvars]
    flat = _compat.with_outputs(jaxpr, work.eqns, outputs)
    variables, values = [v for v, _ in work.constants], [x for _, x in work.constants]
    return _compat.with_constants(flat, variables, values), values


def rename(v: Any, env: dict[Any, Any]) -> Any:
    return v if _compat.is_literal(v) else env.get(v, v)


def prune(jaxpr: Any, outputs: Sequence[Any], *, effects: bool = True) -> Any:
    """`jaxpr` with other outputs and only the equations that they need.

    `effects`: keep equations that have side effects.
    """
    needed = set(_compat.variables(outputs))
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if (eqn.effects and effects) or not needed.isdisjoint(eqn.outvars):
            needed.update(_compat.variables(eqn.invars))
            eqns.append(eqn)
    return _compat.with_outputs(jaxpr, eqns[::-1], outputs)


def literal_key(v: Any) -> Hashable:
    """Equal for equal literals, and for the same variable."""
    if not _compat.is_literal(v):
        return v
    return v.aval.shape, v.aval.dtype, np.asarray(v.val).tobytes()


def _key(eqn: Any, inputs: Sequence[Any]) -> Hashable | None:
    """Equal for equations that compute the same; None if that cannot be told."""
    if eqn.effects:
        return None
    params = tuple(sorted(eqn.params.items(), key=lambda item: item[0]))
    operands: Any = tuple(map(literal_key, inputs))
    if eqn.primitive.name in ("eq", "ne"):
        operands = frozenset(operands)
    key = (eqn.primitive, operands, params, eqn.ctx)
    try:
        hash(key)
    except TypeError:
        return None
    return key
