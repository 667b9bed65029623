"""Rewrite traced programs without tracing them again."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex, source_info_util
from jax.interpreters import partial_eval

from jaxact._jaxpr.compat import (
    custom_vjp_body,
    is_plain_jit,
    open_jaxpr,
    with_constants,
    with_jaxpr,
)
from jaxact._jaxpr.primitives import HELD_PROGRAMS
from jaxact._jaxpr.read import held_programs, is_literal, literal_key, variables_in
from jaxact._jaxpr.types import (
    Array,
    Atom,
    Aval,
    Eqn,
    Jaxpr,
    Literal,
    NameStack,
    Params,
    Primitive,
    Renaming,
    SourceInfo,
    Var,
)


@dataclass(frozen=True)
class Body:
    """A call's program, and its function's name."""

    inputs: Sequence[Var]
    eqns: Sequence[Eqn]
    outputs: Sequence[Atom]
    constants: Sequence[tuple[Var, Array]] = ()  # (variable, value)
    name: str = ""


def jit_body(eqn: Eqn) -> Body | None:
    """The body, if this is a `jit` that asks for nothing but to be called."""
    if not is_plain_jit(eqn):
        return None
    return body_of(*open_jaxpr(eqn.params["jaxpr"]), eqn.params["name"])


def inlinable_body(eqn: Eqn) -> Body | None:
    """The body, if this is a plain `jit` or a custom rule that was not used."""
    is_rule = eqn.primitive.name == "custom_jvp_call" and not eqn.effects
    if is_rule and custom_vjp_body(eqn) is None:
        return body_of(*open_jaxpr(eqn.params["call_jaxpr"]))
    return jit_body(eqn)


def body_of(jaxpr: Jaxpr, consts: Sequence[Array], name: str = "") -> Body:
    """A program as a body, given values for its constants."""
    constants = tuple(zip(jaxpr.constvars, consts, strict=True))
    return Body(jaxpr.invars, jaxpr.eqns, jaxpr.outvars, constants, name)


@dataclass
class _Flattening:
    """The program that grows while calls are inlined.

    Attributes:
      constants: (variable, value) for each constant in an inlined call.
      results: outputs, for each distinct equation so far.
    """

    body_of: Callable[[Eqn], Body | None]
    eqns: list[Eqn] = field(default_factory=list)
    constants: list[tuple[Var, Array]] = field(default_factory=list)
    results: dict[Hashable, Sequence[Atom]] = field(default_factory=dict)

    def walk(
        self, eqns: Sequence[Eqn], names: Renaming, scope: NameStack | None
    ) -> None:
        """Append `eqns`, whose variables are called by other `names` here."""
        for eqn in eqns:
            inputs = [rename(v, names) for v in eqn.invars]
            source = eqn.source_info
            if scope is not None:
                source = source.replace(name_stack=scope + source.name_stack)
            body = self.body_of(eqn)
            if body is not None:
                out = self._inline(body, inputs, source.name_stack)
            else:
                out = self._append(eqn, inputs, source, fresh=scope is not None)
            names.update(zip(eqn.outvars, out, strict=True))

    def _inline(
        self, body: Body, inputs: Sequence[Atom], scope: NameStack
    ) -> list[Atom]:
        names: Renaming = dict(zip(body.inputs, inputs, strict=True))
        for v, value in body.constants:
            names[v] = new_variable(v.aval)
            self.constants.append((names[v], value))
        # jax.numpy's own helpers start with an underscore and say nothing to a user.
        named = body.name and not body.name.startswith(("_", "<"))
        self.walk(body.eqns, names, scope.extend(body.name) if named else scope)
        return [rename(v, names) for v in body.outputs]

    def _append(
        self, eqn: Eqn, inputs: Sequence[Atom], source: SourceInfo, *, fresh: bool
    ) -> Sequence[Atom]:
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


def flatten(
    jaxpr: Jaxpr, body_of: Callable[[Eqn], Body | None]
) -> tuple[Jaxpr, list[Array]]:
    """`jaxpr` with calls inlined and each distinct equation evaluated once.

    Args:
      body_of: gives an equation's body if it is to be inlined, else None.

    Returns:
      The program, and values for its additional constants, which are its last ones.
    """
    work = _Flattening(body_of)
    names: Renaming = {}
    work.walk(jaxpr.eqns, names, None)
    outputs = [rename(v, names) for v in jaxpr.outvars]
    flat = with_outputs(jaxpr, work.eqns, outputs)
    variables, values = [v for v, _ in work.constants], [x for _, x in work.constants]
    return with_constants(flat, variables, values), values


def with_held_programs(jaxpr: Jaxpr, change: Callable[[Eqn, Jaxpr], Jaxpr]) -> Jaxpr:
    """`jaxpr` with the programs inside its equations changed: branches, bodies.

    Args:
      change: an equation and a program in it -> the program in its place, which has
        the same inputs and outputs.
    """

    def changed(eqn: Eqn) -> Eqn:
        held = tuple(
            with_jaxpr(closed, change(eqn, open_jaxpr(closed)[0]))
            for closed in held_programs(eqn)
        )
        if not held:
            return eqn
        name = HELD_PROGRAMS[eqn.primitive.name]
        value = held if isinstance(eqn.params[name], tuple) else held[0]
        return eqn.replace(params=eqn.params | {name: value})

    return with_outputs(jaxpr, list(map(changed, jaxpr.eqns)), jaxpr.outvars)


def rename(v: Atom, names: Renaming) -> Atom:
    """The variable's name, if it has one there."""
    return v if is_literal(v) else names.get(v, v)


def prune(jaxpr: Jaxpr, outputs: Sequence[Atom], *, effects: bool = True) -> Jaxpr:
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


def _key(eqn: Eqn, inputs: Sequence[Atom]) -> Hashable | None:
    """Equal for equations that compute the same; None if that cannot be told."""
    if eqn.effects:
        return None
    params = tuple(sorted(eqn.params.items(), key=lambda item: item[0]))
    operands: Hashable = tuple(map(literal_key, inputs))
    if eqn.primitive.name in ("eq", "ne", "mul", "add"):
        operands = frozenset(map(literal_key, inputs))
    key = (eqn.primitive, operands, params, eqn.ctx)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def without_unused(jaxpr: Any) -> Jaxpr:
    """`jaxpr` without equations that no output needs, also inside calls and loops."""
    used: Any = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]
    return used


def with_outputs(jaxpr: Jaxpr, eqns: Sequence[Eqn], outvars: Sequence[Atom]) -> Jaxpr:
    """`jaxpr` with other equations and outputs."""
    info = jaxpr.debug_info
    paths = ("",) * len(outvars) if info.result_paths is not None else None
    return jaxpr.replace(
        eqns=list(eqns),
        outvars=list(outvars),
        debug_info=info._replace(result_paths=paths),
    )


def in_order(numbered: Sequence[tuple[int, Eqn]]) -> list[Eqn]:
    """Equations after those that make their inputs, else by their numbers.

    They must not need each other.
    """
    makers = {v: i for i, (_, eqn) in enumerate(numbered) for v in eqn.outvars}
    waiting, after = [0] * len(numbered), defaultdict[int, list[int]](list)
    for i, (_, eqn) in enumerate(numbered):
        needs = {makers[v] for v in variables_in(eqn.invars) if v in makers}
        waiting[i] = len(needs)
        for j in needs:
            after[j].append(i)
    ready = [(n, i) for i, (n, _) in enumerate(numbered) if not waiting[i]]
    heapq.heapify(ready)
    ordered: list[Eqn] = []
    while ready:
        _, i = heapq.heappop(ready)
        ordered.append(numbered[i][1])
        for j in after[i]:
            waiting[j] -= 1
            if not waiting[j]:
                heapq.heappush(ready, (numbered[j][0], j))
    assert len(ordered) == len(numbered), "equations that need each other"
    return ordered


def with_inputs(jaxpr: Jaxpr, variables: Sequence[Var]) -> Jaxpr:
    """`jaxpr` with more inputs, after its own."""
    inputs = [*jaxpr.invars, *variables]
    info = jaxpr.debug_info._replace(arg_names=None)
    return jaxpr.replace(invars=inputs, debug_info=info)


def without_constants(jaxpr: Jaxpr) -> Jaxpr:
    """`jaxpr` with its constants as the first inputs."""
    if not jaxpr.constvars:
        return jaxpr
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    info = jaxpr.debug_info._replace(arg_names=("",) * len(inputs))
    return jaxpr.replace(constvars=[], invars=inputs, debug_info=info)


def new_variable(aval: Aval) -> Var:
    return cast(Var, jex.Var(aval))


def new_literal(value: np.generic) -> Literal:
    return cast(Literal, jex.Literal(value, jax.typeof(value)))


def new_equation(
    like: Eqn,
    primitive: Primitive,
    inputs: Sequence[Atom],
    outputs: Sequence[Var],
    params: Params,
) -> Eqn:
    """An equation without side effects or a scope, at the source line of `like`.

    In its context too: the mesh, where it is to be computed.
    """
    source = like.source_info.replace(name_stack=source_info_util.new_name_stack())
    eqn: Any = jex.new_jaxpr_eqn(
        list(inputs), list(outputs), primitive, params, jex.no_effects, source, like.ctx
    )
    return eqn


def barrier_equation(like: Eqn, inputs: Sequence[Atom], outputs: Sequence[Var]) -> Eqn:
    """No output is there before all inputs are; placed as by `new_equation`."""
    return new_equation(like, lax.optimization_barrier_p, inputs, outputs, {})
