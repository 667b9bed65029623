"""Rewrite traced programs without tracing them again."""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex, source_info_util
from jax.interpreters import partial_eval

from jaxact._jaxpr.compat import is_plain_jit, open_jaxpr, with_constants
from jaxact._jaxpr.read import is_literal, literal_key, variables_in


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
    if not is_plain_jit(eqn):
        return None
    return _body(eqn.params["jaxpr"], eqn.params["name"])


def inlinable_body(eqn: Any) -> Body | None:
    """The body of a plain `jit`, or of a custom rule that was not used."""
    if eqn.primitive.name == "custom_jvp_call" and not eqn.effects:
        return _body(eqn.params["call_jaxpr"], "")
    return jit_body(eqn)


def _body(closed: Any, name: str) -> Body:
    jaxpr, consts = open_jaxpr(closed)
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
            env[v] = new_variable(v.aval)
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
            outputs = [new_variable(v.aval) for v in outputs]
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
    flat = with_outputs(jaxpr, work.eqns, outputs)
    variables, values = [v for v, _ in work.constants], [x for _, x in work.constants]
    return with_constants(flat, variables, values), values


def rename(v: Any, env: dict[Any, Any]) -> Any:
    return v if is_literal(v) else env.get(v, v)


def prune(jaxpr: Any, outputs: Sequence[Any], *, effects: bool = True) -> Any:
    """`jaxpr` with other outputs and only the equations that they need.

    `effects`: keep equations that have side effects.
    """
    needed = set(variables_in(outputs))
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if (eqn.effects and effects) or not needed.isdisjoint(eqn.outvars):
            needed.update(variables_in(eqn.invars))
            eqns.append(eqn)
    return with_outputs(jaxpr, eqns[::-1], outputs)


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


def without_unused(jaxpr: Any) -> Any:
    """`jaxpr` without what none of its outputs needs, also inside calls and loops."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def with_outputs(jaxpr: Any, eqns: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """`jaxpr` with other equations and outputs."""
    info = jaxpr.debug_info
    paths = ("",) * len(outvars) if info.result_paths is not None else None
    return jaxpr.replace(
        eqns=list(eqns),
        outvars=list(outvars),
        debug_info=info._replace(result_paths=paths),
    )


def with_inputs(jaxpr: Any, variables: Sequence[Any]) -> Any:
    """`jaxpr` with more inputs, after its own."""
    inputs = [*jaxpr.invars, *variables]
    info = jaxpr.debug_info._replace(arg_names=None)
    return jaxpr.replace(invars=inputs, debug_info=info)


def without_constants(jaxpr: Any) -> Any:
    """`jaxpr` with its constants as the first inputs."""
    if not jaxpr.constvars:
        return jaxpr
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    info = jaxpr.debug_info._replace(arg_names=("",) * len(inputs))
    return jaxpr.replace(constvars=[], invars=inputs, debug_info=info)


def new_variable(aval: Any) -> Any:
    return jex.Var(aval)


@functools.cache
def _name_primitive() -> Any:
    jaxpr, _ = open_jaxpr(jax.make_jaxpr(lambda x: checkpoint_name(x, ""))(0.0))
    return jaxpr.eqns[0].primitive


def name_equation(like: Any, v: Any, name: str) -> Any:
    """An equation that calls `v` by a `checkpoint_name`; its output is new."""
    out, params = new_variable(v.aval), {"name": name}
    return new_equation(like, _name_primitive(), [v], [out], params)


def new_equation(like: Any, primitive: Any, ins: Any, outs: Any, params: Any) -> Any:
    """An equation without side effects or a scope, at the source line of `like`."""
    source = like.source_info.replace(name_stack=source_info_util.new_name_stack())
    return jex.new_jaxpr_eqn(
        list(ins), list(outs), primitive, params, jex.no_effects, source
    )
