"""The backward pass through a planned call.

Nothing in it starts before the cotangents are there, behind an optimization barrier:
without it XLA decodes early (249 instead of 1089 MiB on a 12-layer transformer compiled
for an H100).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from jaxact._engine.evaluation import Evaluator, Order, equation_by_equation
from jaxact._engine.late import decoded_late, has_checkpoints
from jaxact._engine.ordered import ordered_evaluator, product_by_product
from jaxact._engine.pieces import Pieces
from jaxact._engine.shared import TABLE, with_shared_operand
from jaxact._engine.storage import BackwardProgram, Packed, Probe, Storage
from jaxact._engine.together import Stored, Together, apart
from jaxact._engine.unused import UsedPart, used_part
from jaxact._jaxpr.compat import barrier, open_jaxpr
from jaxact._jaxpr.evaluate import in_mesh_of, is_traced, placed, value_of
from jaxact._jaxpr.rewrite import prune
from jaxact._jaxpr.types import Dtype, Env, Jaxpr, PyTree, Var
from jaxact._plan.decoded_again import decoded_again_p
from jaxact._plan.storage import StoragePlan


def backward_pass(
    plan: StoragePlan,
    storage: Storage,
    keys: Collection[str],
    packed: Stored,
    kept: Sequence[jax.Array],
    cotangents: Sequence[jax.Array | SymbolicZero],
) -> tuple[list[jax.Array], Probe]:
    """Gradients for the active inputs, and cotangents for the settings `keys`."""
    part, is_step = None, isinstance(packed, Together)
    is_used = [not isinstance(c, SymbolicZero) for c in cotangents]
    if not all(is_used) and (part := used_part(plan, is_used)) is not None:
        pairs = zip(plan.packed, apart(packed), strict=True)
        packed = [arrays for v, arrays in pairs if v in part.plan.decisions]
        plan = part.plan
    inputs = backward_inputs(plan, packed, kept, cotangents)
    residuals = [
        _packed(v, arrays, plan, keys)
        for v, arrays in zip(plan.packed, inputs.packed, strict=True)
    ]
    dtypes = plan.forward.backward.gradient_dtypes
    if any(r.is_measured for r in residuals):
        program = backward_program(plan, inputs, part)
        decoded = [_decoded(storage, r) for r in residuals]
        with in_mesh_of(inputs.cotangents[0]):
            results = storage.backward(program, residuals, decoded, inputs.cotangents)
        return _held(*results, dtypes)
    gradients, pieces = _evaluated(plan, part, storage, residuals, inputs, is_step)
    if pieces is not None:
        return pieces.cut(gradients), {}
    return _held(gradients, {}, dtypes) if plan.packed else (gradients, {})


@dataclass(frozen=True)
class BackwardInputs:
    """Arrays that backward starts from, behind a barrier where they have to wait.

    Attributes:
      packed: the stored form of `StoragePlan.packed`, behind the barrier.
      kept: values for the other saved variables.
      sources: those that replayed equations read, behind the barrier.
      coefficients: those that maps of packed values are made of; behind the barrier
        where equations read them.
      cotangents: one for each output, behind the barrier; zeros are arrays.
    """

    packed: Sequence[PyTree]
    kept: Env
    sources: Env
    coefficients: Env
    cotangents: list[jax.Array]


def backward_inputs(
    plan: StoragePlan,
    packed: Stored,
    kept: Sequence[jax.Array],
    cotangents: Sequence[jax.Array | SymbolicZero],
) -> BackwardInputs:
    """Fetch the residuals, and let nothing start before the cotangents are there."""
    env = dict(zip([*plan.exact, *plan.kept], kept, strict=True))
    if not isinstance(packed, Together):
        codecs = [plan.decisions[v].codec for v in plan.packed]
        packed = [c.fetch(x) for c, x in zip(codecs, packed, strict=True)]
    # Replayed equations start behind the barrier, or XLA would keep their results
    # from the forward pass on.
    replayed = {v for step in plan.replay for v in step.inputs}
    gathered = {v for n in plan.normalized.values() if n.steps for v in n.sources}
    sources = {v: x for v, x in env.items() if v in replayed | gathered}
    outputs = plan.forward.jaxpr.outvars[: plan.forward.num_outputs]
    pairs = zip(cotangents, outputs, strict=True)
    arrays = [_instantiate(c, v.aval.dtype) for c, v in pairs]
    if not plan.packed and not plan.replay:
        return BackwardInputs((), env, sources, env, arrays)
    floating = [i for i, c in enumerate(arrays) if c.dtype != jax.dtypes.float0]
    packed, values, waiting, table = barrier(
        (packed, list(sources.values()), [arrays[i] for i in floating], TABLE)
    )
    packed = with_shared_operand(apart(packed), table)
    for i, c in zip(floating, waiting, strict=True):
        arrays[i] = c
    sources = dict(zip(sources, values, strict=True))
    coefficients = env | {v: x for v, x in sources.items() if v in gathered}
    return BackwardInputs(packed, env, sources, coefficients, arrays)


def backward_program(
    plan: StoragePlan, inputs: BackwardInputs, part: UsedPart | None = None
) -> BackwardProgram:
    """(decoded residuals, ordered as `plan.packed`; cotangents) -> gradients.

    `part`: evaluate only that.
    """

    def program(
        decoded: Sequence[jax.Array], cotangents: list[jax.Array]
    ) -> list[jax.Array]:
        known = inputs.kept | _restored(plan, decoded, inputs.coefficients)
        replayed = {**known, **inputs.sources}
        for step in plan.replay:
            replayed.update(zip(step.eqn.outvars, step(replayed), strict=True))
        env = {**replayed, **known}
        if part is not None:
            return part.evaluate(env, cotangents)
        forward = plan.forward
        if forward.vjp_tree is None:
            whole = UsedPart(plan, forward.backward_program, forward.consts)
            return whole.evaluate(env, cotangents)
        residuals = [value_of(v, env) for v in forward.residuals]
        vjp = jax.tree.unflatten(forward.vjp_tree, residuals)
        return list(vjp(cotangents))

    return program


def _held(
    gradients: Sequence[jax.Array], measured: Probe, dtypes: Sequence[Dtype]
) -> tuple[list[jax.Array], Probe]:
    """Let no gradient go on before all are there, each in its own of `dtypes`.

    Else XLA puts a weight's gradient off, and the residual that it reads is decoded and
    kept (726 instead of 553 MiB for ResNet-50 on an H100). They wait as narrow as they
    were computed: XLA then widens them in the kernel that reads them, not in one before
    the barrier.
    """
    own = zip(gradients, dtypes, strict=True)
    narrow = [lax.convert_element_type(g, dtype) for g, dtype in own]
    narrow, measured = barrier((narrow, measured))
    wide = zip(narrow, map(jnp.result_type, gradients), strict=True)
    return [lax.convert_element_type(g, dtype) for g, dtype in wide], measured


def _evaluator(plan: StoragePlan, inputs: BackwardInputs) -> Evaluator | None:
    """How to evaluate the backward pass; None where it is computed as it is written."""
    if plan.is_checkpointed:
        return product_by_product
    if not is_traced(inputs.packed):
        return None
    backward = plan.forward.backward
    count = len(backward.cotangents)
    if in_parts := ordered_evaluator(plan.forward.backward_program, count):
        return in_parts
    # Not for a policy that computes all of a call again: the 12-layer transformer of
    # the tests takes 476 MiB on a CPU, else 496 (on an H100 as much as before).
    if plan.policy.recompute is None and has_checkpoints(backward.eqns):
        return decoded_late
    return equation_by_equation


def _evaluated(
    plan: StoragePlan,
    part: UsedPart | None,
    storage: Storage,
    residuals: Sequence[Packed],
    inputs: BackwardInputs,
    is_step: bool,
) -> tuple[list[jax.Array], Pieces | None]:
    """The gradients; in a loop's step the others, and arrays in place of pieces."""
    cotangents = inputs.cotangents
    floating = [
        i for i, c in enumerate(cotangents) if jnp.issubdtype(c.dtype, jnp.inexact)
    ]

    def run(packed: Sequence[PyTree], arrays: list[jax.Array]) -> list[jax.Array]:
        every = list(cotangents)
        for i, c in zip(floating, arrays, strict=True):
            every[i] = c
        pairs = zip(residuals, packed, strict=True)
        own = [dataclasses.replace(r, arrays=arrays) for r, arrays in pairs]
        kept = inputs.kept | _decoded_again(plan, storage, own)
        known = dataclasses.replace(inputs, kept=kept)
        program = backward_program(plan, known, part)
        return program([_decoded(storage, r) for r in own], every)

    packed = [r.arrays for r in residuals]
    arrays = [cotangents[i] for i in floating]
    evaluate = _evaluator(plan, inputs)
    if evaluate is None:
        return run(packed, arrays), None
    jaxpr, count, env = _equations(run, packed, arrays)
    pieces = Pieces.of(jaxpr) if is_step else None
    results = [*pieces.others, *pieces.wholes] if pieces else jaxpr.outvars
    return evaluate(Order.of(prune(jaxpr, results), count), env, packed), pieces


def _equations(
    program: Callable[[PyTree, list[jax.Array]], list[jax.Array]],
    packed: PyTree,
    cotangents: list[jax.Array],
) -> tuple[Jaxpr, int, Env]:
    """`program(packed, cotangents)`, how many arrays are packed, and inputs' values."""
    leaves, tree = jax.tree.flatten(packed)
    count = len(leaves)

    def flat(*arrays: jax.Array) -> list[jax.Array]:
        own = jax.tree.unflatten(tree, arrays[:count])
        return program(own, list(arrays[count:]))

    closed = jax.make_jaxpr(flat)(*leaves, *cotangents)
    jaxpr, consts = open_jaxpr(closed)
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env |= dict(zip(jaxpr.invars, [*leaves, *cotangents], strict=True))
    return jaxpr, count, env


def _packed(v: Var, arrays: PyTree, plan: StoragePlan, keys: Collection[str]) -> Packed:
    decision = plan.decisions[v]
    like = jax.ShapeDtypeStruct(tuple(v.aval.shape), v.aval.dtype)
    if v in plan.maps:
        own, like = like.dtype, plan.maps[v].like(v)
        # Through a norm it is float32. Where it lies in memory it is as narrow as the
        # residual: a step of ResNet-50 with `Dithered(2)` takes 513 in place of 663 MiB
        # on an H100, and is predicted to take 15.3 in place of 16.7 ms.
        if decision.codec.decodes_to_memory and own.itemsize < like.dtype.itemsize:
            like = like.update(dtype=own)
    return Packed(decision, arrays, like, decision.residual.key in keys)


def _decoded(storage: Storage, packed: Packed) -> jax.Array:
    arrays = jax.tree.leaves(packed.arrays)
    with in_mesh_of(arrays[0]) if arrays else contextlib.nullcontext():
        return storage.decode(packed)


def _decoded_again(
    plan: StoragePlan, storage: Storage, residuals: Sequence[Packed]
) -> Env:
    """Other decoded copies of packed values, see `decoded_again.py`."""
    packed = dict(zip(plan.packed, residuals, strict=True))
    found: Env = {}
    for step in plan.replay:
        v = step.eqn.invars[0] if step.eqn.primitive is decoded_again_p else None
        if v in packed and v not in plan.normalized and v not in plan.apart:
            arrays = barrier(packed[v].arrays)
            residual = dataclasses.replace(packed[v], arrays=arrays)
            decoded = _decoded(storage, residual)
            found[step.eqn.outvars[0]] = _residuals(v, decoded, plan, {})[v]
    return found


def _restored(plan: StoragePlan, decoded: Sequence[jax.Array], env: Env) -> Env:
    """The residuals, given their decoded values."""
    found: Env = {}
    values = dict(zip(plan.packed, decoded, strict=True))
    # Indices of elements that are apart may be packed too: they are known before.
    for v in sorted(values, key=lambda v: v in plan.apart):
        found |= _residuals(v, values[v], plan, env | found)
    return found


def _residuals(v: Var, decoded: jax.Array, plan: StoragePlan, env: Env) -> Env:
    """The residual, given its decoded value: some are stored through a map.

    And others that are known with it.
    """
    if v not in plan.maps:
        return {v: placed(decoded, v.aval)}
    with in_mesh_of(decoded):
        if decoded.shape == v.aval.shape:  # as the statistics that the map reads
            decoded = placed(decoded, v.aval)
        mapped = plan.maps[v]
        decoded = lax.convert_element_type(decoded, mapped.like(v).dtype)
        known = mapped.restore(v, decoded, env)
        return {u: placed(x, u.aval) for u, x in known.items()}


def _instantiate(
    cotangent: jax.Array | SymbolicZero | float, dtype: np.dtype[Any]
) -> Any:
    """The cotangent of an output with this dtype, as an array."""
    if isinstance(cotangent, int | float | complex):  # of an eager `vjp(1.0)`
        return jnp.asarray(cotangent, dtype)
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    if aval.dtype == jax.dtypes.float0:
        return np.zeros(aval.shape, aval.dtype)
    # Placed as the output is: an auxiliary array of a loss may lie on many devices.
    return ad.instantiate_zeros(ad.Zero(aval))
