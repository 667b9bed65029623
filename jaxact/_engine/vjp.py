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

from jaxact._checkpoint_policies import PACKED_NAME, SaveEither, save_packed
from jaxact._decision import Decision
from jaxact._engine.outputs import independent_outputs, select_outputs, when_all
from jaxact._engine.scan import CompressBody, contains_scan, push_into_scans
from jaxact._form import plan_bases, rewrite
from jaxact._jaxpr.compat import VJP_OPTIONS, reduced_like
from jaxact._jaxpr.evaluate import value_of
from jaxact._jaxpr.opaque import opaque
from jaxact._jaxpr.primitives import FUSED
from jaxact._jaxpr.read import is_float
from jaxact._plan.each import plan_each_residual
from jaxact._plan.forward import Forward, trace_forward
from jaxact._plan.mark import CompressedCall, mark, mark_call
from jaxact._plan.storage import StoragePlan
from jaxact._policy import Policy
from jaxact._residual import join_paths
from jaxact._trace import Flat, Static, is_inexact


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
    report: Callable[[Sequence[StoragePlan]], None]

    def __call__(self, flat: Flat, seed: Any, values: Sequence[Any]) -> list[Any]:
        """Evaluate `flat(*values)`, keeping compressed residuals for its derivative."""
        groups = independent_outputs(flat)
        engine = dataclasses.replace(self, report=when_all(len(groups), self.report))
        out: dict[int, Any] = {}
        for places in groups:
            results = _compressed(engine, select_outputs(flat, places))(seed, *values)
            out.update(zip(places, results, strict=True))
        return [out[i] for i in range(len(out))]


def _compressed(engine: Engine, flat: Flat) -> Callable[..., list[Any]]:
    """`flat` with a custom derivative rule: (seed, *values) -> outputs."""
    plans: dict[tuple[bool, ...], StoragePlan] = {}

    def planned(
        active: tuple[bool, ...], seed: Any, values: Sequence[Any]
    ) -> StoragePlan:
        if active not in plans:
            inside: list[StoragePlan] = []

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
        mark_call(seed, CompressedCall(flat, engine.policy, engine.prefix))
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
                reduced_like(next(gradients), v.aval) if is_active else None
                for v, is_active in zip(inputs, active, strict=True)
            ],
        )

    call.defvjp(fwd, bwd, **VJP_OPTIONS)
    return call


def differentiable(
    flat: Flat, policy: Policy, compress_body: CompressBody
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


def plan_for(forward: Forward, flat: Flat, policy: Policy, prefix: str) -> StoragePlan:
    """What becomes of the residuals of a call."""
    make_plan = plan_bases if policy.chooses_form else plan_each_residual
    return make_plan(forward, flat, policy, prefix)


def _encode(decision: Decision, x: jax.Array, seed: Any, is_fused: bool) -> Any:
    codec = decision.codec
    return (codec.encode_fused if is_fused else codec.encode)(x, seed)


def _decode(decision: Decision, stored: Any, shape: Any, dtype: Any) -> jax.Array:
    return decision.codec.decode(stored, shape, dtype)


def forward_pass(
    plan: StoragePlan,
    prefix: str,
    seed: Any,
    values: Sequence[Any],
    encode: Any = _encode,
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
        if decision.codec.is_differentiable and is_float(v):
            stored[v] = store(x, salted)
        else:
            stored[v] = opaque(store, x, salted)
    exact = [stored[v] for v in plan.exact]
    packed = [stored[v] for v in plan.packed]
    if packed:
        out, packed = lax.optimization_barrier((out, packed))
    # Behind the barrier: XLA's host offloading does not look through one.
    codecs = [plan.decisions[v].codec for v in plan.packed]
    packed = [c.keep(x) for c, x in zip(codecs, packed, strict=True)]
    # Named behind the barrier: a checkpoint that saves them need not redo the call.
    exact, packed = jax.tree.map(
        lambda a: checkpoint_name(a, PACKED_NAME), (exact, packed)
    )
    return out, packed, exact + [env[v] for v in plan.kept]


def backward_pass(
    plan: StoragePlan,
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
    plan: StoragePlan,
    packed: Sequence[Any],
    kept: Sequence[Any],
    cotangents: Sequence[Any],
) -> tuple[Sequence[Any], list[Any], Callable[..., list[Any]]]:
    """Packed residuals and cotangents behind a barrier, and the backward program.

    That is (what was decoded for each of `plan.packed`, cotangents) -> gradients.
    """
    env = dict(zip([*plan.exact, *plan.kept], kept, strict=True))
    codecs = [plan.decisions[v].codec for v in plan.packed]
    packed = [c.fetch(x) for c, x in zip(codecs, packed, strict=True)]
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
        residuals = [value_of(v, full) for v in plan.forward.residuals]
        vjp = jax.tree.unflatten(plan.forward.vjp_tree, residuals)
        return list(vjp(cotangents))

    return packed, cotangents, run


def decoded(
    plan: StoragePlan, packed: Sequence[Any], decode: Any = _decode
) -> list[Any]:
    """What the actions decode."""
    found = []
    for v, stored in zip(plan.packed, packed, strict=True):
        through, dtype = plan.normalized.get(v), v.aval.dtype
        dtype = dtype if through is None else through.stored_dtype(dtype)
        found.append(decode(plan.decisions[v], stored, tuple(v.aval.shape), dtype))
    return found


def _undone(
    plan: StoragePlan, decoded: Sequence[Any], env: dict[Any, Any]
) -> dict[Any, Any]:
    """The residuals that were stored, some through a normalization."""
    found = {}
    for v, x in zip(plan.packed, decoded, strict=True):
        through = plan.normalized.get(v)
        found[v] = x if through is None else through.undo(x, env, v.aval.dtype)
    return found


def _instantiate(cotangent: Any) -> Any:
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    shape, dtype = aval.shape, aval.dtype
    if dtype == jax.dtypes.float0:
        return np.zeros(shape, dtype)
    return jnp.zeros(shape, dtype)
