"""Store residuals through codecs: `custom_vjp` over flat arrays.

The forward value is the traced program's own; only what is kept from forward to
backward changes. Two optimization barriers make the saving real: without the first XLA
postpones the encoding and keeps the original array for it, without the second it
decodes early (249 instead of 1089 MiB on a 12-layer transformer compiled for an H100).
The first one must hold the outputs too, and must not hold an argument: scan would then
stack copies of the parameters.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jaxact import _compat
from jaxact._call import Flat, Kind, Static
from jaxact._flow import flow, read, union
from jaxact._form import plan_form, rewrite
from jaxact._form.primitives import ELEMENTWISE, MOVES
from jaxact._leaves import plan_each
from jaxact._mark import Call, mark, mark_call
from jaxact._opaque import opaque
from jaxact._policy import Decision, Policy
from jaxact._program import Forward, Plan, is_float, trace_forward
from jaxact._residual import join_paths
from jaxact._save import PACKED_NAME, SaveEither, save_packed
from jaxact._scan import Compress, contains_scan, push_into_scans
from jaxact._surgery import prune

# What XLA computes where it is read, and not in memory. A kernel would put it there:
# with kernels for everything a step of ResNet-50 moves 40.9 GB and takes 834 MiB, with
# these fused 29.0 GB and 521 MiB, with no kernel 29.3 and 520 (operands and results of
# every instruction compiled for an H100, batch 64, 2 bits).
FUSED = ELEMENTWISE - MOVES


@dataclasses.dataclass(frozen=True)
class Engine:
    """How a flat function is compressed.

    Attributes:
      policy: decides what becomes of each residual.
      prefix: the module path of the call, for tables.
      report: hears the plans of a call when it is first differentiated.
    """

    policy: Policy
    prefix: str
    report: Callable[[Sequence[Plan]], None]

    def __call__(self, flat: Flat, seed: Any, values: Sequence[Any]) -> list[Any]:
        """Evaluate `flat(*values)`, keeping compressed residuals for its derivative."""
        groups = _independent_outputs(flat)
        engine = dataclasses.replace(self, report=_when_all(len(groups), self.report))
        out: dict[int, Any] = {}
        for places in groups:
            results = _compressed(engine, _select(flat, places))(seed, *values)
            out.update(zip(places, results, strict=True))
        return [out[i] for i in range(len(out))]


def _compressed(engine: Engine, flat: Flat) -> Callable[..., list[Any]]:
    """`flat` with a custom derivative rule: (seed, *values) -> outputs."""
    plans: dict[tuple[bool, ...], Plan] = {}

    def planned(active: tuple[bool, ...], seed: Any, values: Sequence[Any]) -> Plan:
        if active not in plans:
            inside: list[Plan] = []

            def compress_body(body: Flat, seed: Any, values: Any, scope: str) -> Any:
                prefix = join_paths(engine.prefix, scope)
                return Engine(engine.policy, prefix, inside.extend)(body, seed, values)

            run = differentiable(flat, engine.policy, compress_body)
            forward = trace_forward(run, seed, values, active)
            plans[active] = plan_for(forward, flat, engine.policy, engine.prefix)
            engine.report([plans[active], *inside])
        return plans[active]

    @jax.custom_vjp
    def call(seed: Any, *values: Any) -> list[Any]:
        mark_call(seed, Call(flat, engine.policy, engine.prefix))
        return flat(*values)

    def fwd(seed: Any, *primals: Any) -> tuple[list[Any], Any]:
        values = [p.value for p in primals]
        active = tuple(p.perturbed and is_inexact(p.value) for p in primals)
        plan = planned(active, seed.value, values)
        out, packed, kept = forward_pass(plan, engine.prefix, seed.value, values)
        return out, (Static((plan, active)), packed, kept)

    def bwd(residuals: Any, cotangents: Any) -> tuple[Any, ...]:
        static, packed, kept = residuals
        plan, active = static.value
        gradients = iter(backward_pass(plan, packed, kept, cotangents))
        _, *inputs = plan.forward.jaxpr.invars
        return (
            None,
            *[
                _compat.reduced_like(next(gradients), v.aval) if is_active else None
                for v, is_active in zip(inputs, active, strict=True)
            ],
        )

    call.defvjp(fwd, bwd, **_compat.VJP_OPTIONS)
    return call


def differentiable(
    flat: Flat, policy: Policy, compress_body: Compress
) -> Callable[..., list[Any]]:
    """(seed, *values) -> outputs: scans compressed inside, the rest checkpointed."""
    if policy.chooses_form:
        flat, widen = rewrite(flat)
    else:
        widen = list

    def plain(seed: Any, *values: Any) -> list[Any]:
        return flat(*values)

    run = plain
    if contains_scan(flat.jaxpr):
        run = push_into_scans(flat, compress_body)
    if policy.recompute is not None:
        keep = SaveEither(policy.recompute, save_packed)
        run = jax.checkpoint(run, policy=keep)
    return lambda seed, *values: run(seed, *widen(values))


def plan_for(forward: Forward, flat: Flat, policy: Policy, prefix: str) -> Plan:
    """What becomes of the residuals of a call."""
    make_plan = plan_form if policy.chooses_form else plan_each
    return make_plan(forward, flat, policy, prefix)


def _encode(decision: Decision, x: jax.Array, seed: Any, is_fused: bool) -> Any:
    return decision.action.encode(x, seed, is_fused)


def _decode(decision: Decision, stored: Any, shape: Any, dtype: Any) -> jax.Array:
    return decision.action.decode(stored, shape, dtype)


def forward_pass(
    plan: Plan, prefix: str, seed: Any, values: Sequence[Any], encode: Any = _encode
) -> tuple[list[Any], list[Any], list[Any]]:
    """Outputs, packed residuals, and what is kept as it is."""
    forward, inputs = plan.forward, [seed, *values]
    results = core.eval_jaxpr(plan.program, forward.consts, *inputs)
    out = results[: forward.num_outputs]
    env = dict(zip(plan.saved, results[forward.num_outputs :], strict=True))
    # An argument is kept as the array that it is, not as an output of the program.
    env |= dict(zip(forward.jaxpr.constvars, forward.consts, strict=True))
    env |= dict(zip(forward.jaxpr.invars, inputs, strict=True))
    stored: dict[Any, Any] = {}
    for number, (v, decision) in enumerate(plan.decisions.items()):
        # Equal data in two places must not meet equal noise.
        salt = zlib.crc32(f"{prefix}/{number}".encode())
        x = mark(env[v], decision, plan.policy, plan.used_rules)
        if v in plan.normalized:
            x = plan.normalized[v].apply(x, env)
        salted = jnp.asarray(seed, jnp.uint32) ^ np.uint32(salt)
        is_fused = v in plan.normalized or decision.residual.primitive in FUSED
        store = functools.partial(encode, decision, is_fused=is_fused)
        if decision.bias == "exact" and is_float(v):  # may be differentiated again
            stored[v] = store(x, salted)
        else:
            stored[v] = opaque(store, x, salted)
    exact = [stored[v] for v in plan.exact]
    packed = [stored[v] for v in plan.packed]
    if packed:
        out, packed = lax.optimization_barrier((out, packed))
    # Behind the barrier: XLA's host offloading does not look through one.
    actions = [plan.decisions[v].action for v in plan.packed]
    packed = [a.keep(x) for a, x in zip(actions, packed, strict=True)]
    # Named behind the barrier: a checkpoint that saves them need not redo the call.
    exact, packed = jax.tree.map(
        lambda a: checkpoint_name(a, PACKED_NAME), (exact, packed)
    )
    return out, packed, exact + [env[v] for v in plan.kept]


def backward_pass(
    plan: Plan,
    packed: Sequence[Any],
    kept: Sequence[Any],
    cotangents: Sequence[Any],
) -> list[Any]:
    """Gradients of the active values."""
    packed, cotangents, run = behind_barrier(plan, packed, kept, cotangents)
    gradients = run(decoded(plan, packed), cotangents)
    if not plan.packed:
        return gradients
    # Together: else XLA puts a weight's gradient off, and what that reads is decoded
    # and kept (726 instead of 553 MiB for ResNet-50 on an H100).
    return lax.optimization_barrier(gradients)


def behind_barrier(
    plan: Plan, packed: Sequence[Any], kept: Sequence[Any], cotangents: Sequence[Any]
) -> tuple[Sequence[Any], list[Any], Callable[..., list[Any]]]:
    """Packed residuals and cotangents behind a barrier, and the backward program.

    That is (what was decoded for each of `plan.packed`, cotangents) -> gradients.
    """
    env = dict(zip([*plan.exact, *plan.kept], kept, strict=True))
    actions = [plan.decisions[v].action for v in plan.packed]
    packed = [a.fetch(x) for a, x in zip(actions, packed, strict=True)]
    # What is recomputed starts behind the barrier, or XLA would keep it from forward.
    read_again = {v for step in plan.replay for v in step.inputs}
    sources = {v: x for v, x in env.items() if v in read_again}
    cotangents = [_instantiate(c) for c in cotangents]
    if packed or plan.replay:
        floating = [i for i, c in enumerate(cotangents) if c.dtype != jax.dtypes.float0]
        packed, values, tied = lax.optimization_barrier(
            (list(packed), list(sources.values()), [cotangents[i] for i in floating])
        )
        sources = dict(zip(sources, values, strict=True))
        for i, c in zip(floating, tied, strict=True):
            cotangents[i] = c

    def run(decoded: Sequence[Any], cotangents: list[Any]) -> list[Any]:
        full = env | _undone(plan, decoded, env)
        again = {**full, **sources}
        for step in plan.replay:
            again.update(zip(step.eqn.outvars, step(again), strict=True))
        full = {**again, **full}
        residuals = [_compat.value(v, full) for v in plan.forward.residuals]
        vjp = jax.tree.unflatten(plan.forward.vjp_tree, residuals)
        return list(vjp(cotangents))

    return packed, cotangents, run


def decoded(plan: Plan, packed: Sequence[Any], decode: Any = _decode) -> list[Any]:
    """What the actions decode."""
    found = []
    for v, stored in zip(plan.packed, packed, strict=True):
        through, dtype = plan.normalized.get(v), v.aval.dtype
        dtype = dtype if through is None else through.stored_dtype(dtype)
        found.append(decode(plan.decisions[v], stored, tuple(v.aval.shape), dtype))
    return found


def _undone(plan: Plan, decoded: Sequence[Any], env: dict[Any, Any]) -> dict[Any, Any]:
    """The residuals that were stored, some through a normalization."""
    found = {}
    for v, x in zip(plan.packed, decoded, strict=True):
        through = plan.normalized.get(v)
        found[v] = x if through is None else through.undo(x, env, v.aval.dtype)
    return found


def is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _instantiate(cotangent: Any) -> Any:
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    shape, dtype = aval.shape, aval.dtype
    if dtype == jax.dtypes.float0:
        return np.zeros(shape, dtype)
    return jnp.zeros(shape, dtype)


def _when_all(
    parts: int, report: Callable[[Sequence[Plan]], None]
) -> Callable[[Sequence[Plan]], None]:
    """Report the plans of all parts of a call together, once."""
    heard: list[Sequence[Plan]] = []

    def collect(plans: Sequence[Plan]) -> None:
        heard.append(plans)
        if len(heard) == parts:
            report([plan for plans in heard for plan in plans])

    return collect


def _independent_outputs(flat: Flat) -> list[list[int]]:
    """Groups of outputs that may share one derivative rule.

    Before `generic_batching`, vmap counts the cotangent of an output that ignores the
    mapped argument once per example. Outputs that depend on different arguments then
    get rules of their own.
    """
    num_outputs = len(flat.jaxpr.outvars)
    if _compat.HAS_GENERIC_BATCHING or num_outputs < 2:
        return [list(range(num_outputs))]
    bits = [
        0 if kind is Kind.PARAMETER else 1 << owner
        for kind, owner in zip(flat.kinds, flat.owners, strict=True)
    ]
    facts = flow(flat.jaxpr, bits, union)
    groups: dict[int, list[int]] = {}
    exact = []
    for place, v in enumerate(flat.jaxpr.outvars):
        group = groups.setdefault(read(facts, v), []) if is_float(v) else exact
        group.append(place)
    first = next(iter(groups.values()), None)
    if first is None:
        return [exact]
    first.extend(exact)
    return [sorted(group) for group in groups.values()]


def _select(flat: Flat, places: Sequence[int]) -> Flat:
    """`flat` with only the given outputs; side effects go with the first output."""
    chosen = [flat.jaxpr.outvars[i] for i in places]
    if len(chosen) == len(flat.jaxpr.outvars):
        return flat
    jaxpr = prune(flat.jaxpr, chosen, effects=0 in places)
    return dataclasses.replace(flat, jaxpr=jaxpr)
