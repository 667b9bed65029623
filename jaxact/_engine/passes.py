"""The forward and the backward pass through a planned call.

Two optimization barriers make the saving real: without the first XLA postpones the
encoding and keeps the original array for it, without the second it decodes early (249
instead of 1089 MiB on a 12-layer transformer compiled for an H100). The first one must
hold the outputs too, and must not hold an argument: scan would then stack copies of the
parameters.
"""

import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jaxact._checkpoint_policies import PACKED_NAME
from jaxact._decision import Decision
from jaxact._engine.unused import UsedPart, used_part
from jaxact._jaxpr.evaluate import evaluate, value_of
from jaxact._jaxpr.opaque import hide
from jaxact._jaxpr.primitives import FUSED
from jaxact._jaxpr.read import is_float
from jaxact._jaxpr.types import Array, Env, PyTree, Var
from jaxact._plan.mark import mark
from jaxact._plan.storage import StoragePlan

# A measurement's settings, or the cotangents that come back, by `Residual.key`.
Probe: TypeAlias = dict[str, jax.Array]
# (decoded residuals, cotangents) -> gradients
BackwardProgram: TypeAlias = Callable[
    [Sequence[jax.Array], list[jax.Array]], list[jax.Array]
]


class Draw(NamedTuple):
    """The inputs that a call has beside its values.

    Attributes:
      seed: uint32 scalar, for the rounding noise.
      probe: a measurement's settings, float32 arrays; empty without one.
    """

    seed: Array
    probe: Probe


@dataclass(frozen=True)
class Packed:
    """A residual as it was stored.

    Attributes:
      arrays: encoded by `Storage.encode`.
      like: the decoded residual's shape and dtype.
      is_measured: whether the probe has a setting for it.
    """

    decision: Decision
    arrays: PyTree
    like: jax.ShapeDtypeStruct
    is_measured: bool


class Storage:
    """How residuals are stored: each through its action."""

    def encode(
        self,
        decision: Decision,
        x: jax.Array,
        seed: jax.Array,
        setting: jax.Array | None,
        *,
        is_fused: bool,
    ) -> PyTree:
        """The arrays that are stored for a residual.

        Args:
          seed: uint32 scalar, different for each residual.
          setting: the probe's entry for the residual, if there is one.
          is_fused: elementwise operations compute x, and only for this.
        """
        codec = decision.codec
        return (codec.encode_fused if is_fused else codec.encode)(x, seed)

    def decode(self, packed: Packed) -> jax.Array:
        """The residual."""
        codec, like = packed.decision.codec, packed.like
        return codec.decode(packed.arrays, like.shape, like.dtype)

    def backward(
        self,
        program: BackwardProgram,
        packed: Sequence[Packed],
        decoded: list[jax.Array],
        cotangents: list[jax.Array],
    ) -> tuple[list[jax.Array], Probe]:
        """The gradients, and the settings' cotangents."""
        return program(decoded, cotangents), {}


def forward_pass(
    plan: StoragePlan,
    storage: Storage,
    prefix: str,
    draw: Draw,
    values: Sequence[Array],
) -> tuple[list[jax.Array], list[PyTree], list[jax.Array]]:
    """Outputs, packed residuals, and arrays that are kept as they are."""
    outputs, env = _evaluate(plan, [draw.seed, *values, *draw.probe.values()])
    stored = {
        v: _store(v, env, plan, storage, draw, salt=f"{prefix}/{number}")
        for number, v in enumerate(plan.decisions)
    }
    exact = [stored[v] for v in plan.exact]
    packed = [stored[v] for v in plan.packed]
    if packed:
        outputs, packed = lax.optimization_barrier((outputs, packed))
    # Behind the barrier: XLA's host offloading does not look through one.
    codecs = [plan.decisions[v].codec for v in plan.packed]
    packed = [c.keep(x) for c, x in zip(codecs, packed, strict=True)]
    # Named behind the barrier: a checkpoint that saves them need not redo the call.
    exact, packed = jax.tree.map(
        lambda a: checkpoint_name(a, PACKED_NAME), (exact, packed)
    )
    return outputs, packed, exact + [env[v] for v in plan.kept]


def _evaluate(
    plan: StoragePlan, inputs: Sequence[Array]
) -> tuple[list[jax.Array], Env]:
    """The outputs, and the values that the saved variables have."""
    forward = plan.forward
    results = evaluate(plan.program, forward.consts, inputs)
    env = dict(zip(plan.saved, results[forward.num_outputs :], strict=True))
    # An argument is kept as the array that it is: the program would give a copy.
    env |= dict(zip(forward.jaxpr.constvars, forward.consts, strict=True))
    env |= dict(zip(forward.jaxpr.invars, inputs, strict=True))
    return results[: forward.num_outputs], env


def _store(
    v: Var, env: Env, plan: StoragePlan, storage: Storage, draw: Draw, *, salt: str
) -> PyTree:
    """One residual, marked and encoded.

    Equal data in two places must not meet equal noise: hence a `salt` for each.
    """
    decision = plan.decisions[v]
    x = mark(env[v], decision, plan.policy, plan.used_rules)
    if v in plan.normalized:
        x = plan.normalized[v].apply(x, env)
    seed = jnp.asarray(draw.seed, jnp.uint32) ^ np.uint32(zlib.crc32(salt.encode()))
    setting = draw.probe.get(decision.residual.key)
    is_fused = v in plan.normalized or decision.residual.primitive in FUSED

    def encode(x: jax.Array, seed: jax.Array) -> PyTree:
        return storage.encode(decision, x, seed, setting, is_fused=is_fused)

    if decision.codec.is_differentiable and is_float(v):
        return encode(x, seed)
    # Traced here, so that the way from a call to its codec is straight.
    closed, out = jax.make_jaxpr(encode, return_shape=True)(x, seed)
    return hide(closed, jax.tree.structure(out), x, seed)


def backward_pass(
    plan: StoragePlan,
    storage: Storage,
    keys: Collection[str],
    packed: Sequence[PyTree],
    kept: Sequence[jax.Array],
    cotangents: Sequence[jax.Array | SymbolicZero],
) -> tuple[list[jax.Array], Probe]:
    """Gradients for the active inputs, and cotangents for the settings `keys`."""
    part = None
    is_used = [not isinstance(c, SymbolicZero) for c in cotangents]
    if not all(is_used) and (part := used_part(plan, is_used)) is not None:
        pairs = zip(plan.packed, packed, strict=True)
        packed = [arrays for v, arrays in pairs if v in part.plan.decisions]
        plan = part.plan
    inputs = backward_inputs(plan, packed, kept, cotangents)
    residuals = [
        _packed(v, arrays, plan, keys)
        for v, arrays in zip(plan.packed, inputs.packed, strict=True)
    ]
    decoded = [storage.decode(r) for r in residuals]
    program = backward_program(plan, inputs, part)
    results = storage.backward(program, residuals, decoded, inputs.cotangents)
    if not plan.packed:
        return results
    # Together: else XLA puts a weight's gradient off, and the residual that it reads
    # is decoded and kept (726 instead of 553 MiB for ResNet-50 on an H100).
    return lax.optimization_barrier(results)


@dataclass(frozen=True)
class BackwardInputs:
    """Arrays that backward starts from, behind a barrier where they have to wait.

    Attributes:
      packed: the stored form of `StoragePlan.packed`, behind the barrier.
      kept: values for the other saved variables.
      sources: those that replayed equations read, behind the barrier.
      cotangents: one for each output, behind the barrier; zeros are arrays.
    """

    packed: Sequence[PyTree]
    kept: Env
    sources: Env
    cotangents: list[jax.Array]


def backward_inputs(
    plan: StoragePlan,
    packed: Sequence[PyTree],
    kept: Sequence[jax.Array],
    cotangents: Sequence[jax.Array | SymbolicZero],
) -> BackwardInputs:
    """Fetch the residuals, and let nothing start before the cotangents are there."""
    env = dict(zip([*plan.exact, *plan.kept], kept, strict=True))
    codecs = [plan.decisions[v].codec for v in plan.packed]
    packed = [c.fetch(x) for c, x in zip(codecs, packed, strict=True)]
    # Replayed equations start behind the barrier, or XLA would keep their results
    # from the forward pass on.
    replayed = {v for step in plan.replay for v in step.inputs}
    sources = {v: x for v, x in env.items() if v in replayed}
    outputs = plan.forward.jaxpr.outvars[: plan.forward.num_outputs]
    pairs = zip(cotangents, outputs, strict=True)
    arrays = [_instantiate(c, v.aval.dtype) for c, v in pairs]
    if not packed and not plan.replay:
        return BackwardInputs(packed, env, sources, arrays)
    floating = [i for i, c in enumerate(arrays) if c.dtype != jax.dtypes.float0]
    packed, values, waiting = lax.optimization_barrier(
        (packed, list(sources.values()), [arrays[i] for i in floating])
    )
    for i, c in zip(floating, waiting, strict=True):
        arrays[i] = c
    sources = dict(zip(sources, values, strict=True))
    return BackwardInputs(packed, env, sources, arrays)


def backward_program(
    plan: StoragePlan, inputs: BackwardInputs, part: UsedPart | None = None
) -> BackwardProgram:
    """(decoded residuals, ordered as `plan.packed`; cotangents) -> gradients.

    `part`: evaluate only that.
    """

    def program(
        decoded: Sequence[jax.Array], cotangents: list[jax.Array]
    ) -> list[jax.Array]:
        known = inputs.kept | _restored(plan, decoded, inputs.kept)
        replayed = {**known, **inputs.sources}
        for step in plan.replay:
            replayed.update(zip(step.eqn.outvars, step(replayed), strict=True))
        env = {**replayed, **known}
        if part is not None:
            return part.evaluate(env, cotangents)
        residuals = [value_of(v, env) for v in plan.forward.residuals]
        vjp = jax.tree.unflatten(plan.forward.vjp_tree, residuals)
        return list(vjp(cotangents))

    return program


def _packed(v: Var, arrays: PyTree, plan: StoragePlan, keys: Collection[str]) -> Packed:
    decision, dtype = plan.decisions[v], v.aval.dtype
    if v in plan.normalized:
        dtype = plan.normalized[v].stored_dtype(dtype)
    like = jax.ShapeDtypeStruct(tuple(v.aval.shape), dtype)
    return Packed(decision, arrays, like, decision.residual.key in keys)


def _restored(plan: StoragePlan, decoded: Sequence[jax.Array], env: Env) -> Env:
    """The residuals, given their decoded values: some are stored normalized."""
    return {
        v: plan.normalized[v].undo(x, env, v.aval.dtype) if v in plan.normalized else x
        for v, x in zip(plan.packed, decoded, strict=True)
    }


def _instantiate(
    cotangent: jax.Array | SymbolicZero | float, dtype: np.dtype[Any]
) -> Any:
    """The cotangent of an output with this dtype, as an array."""
    if isinstance(cotangent, int | float | complex):  # of an eager `vjp(1.0)`
        return jnp.asarray(cotangent, dtype)
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    shape, dtype = aval.shape, aval.dtype
    if dtype == jax.dtypes.float0:
        return np.zeros(shape, dtype)
    return jnp.zeros(shape, dtype)
