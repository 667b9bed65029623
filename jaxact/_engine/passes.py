"""The forward and the backward pass of a planned call.

Calls that are stored alike, such as a network's equal layers, share the work that
compression adds: inside another trace, packing is one jitted function and the backward
pass is another, traced and lowered once however many calls there are. So neither knows
its call's path: seeds are arguments, and the marks on residuals are made outside.

The values that the uncompressed function has too are computed as it computes them,
operation by operation: a function jitted apart rounds in another order where it is not
part of a larger one, as in a `jax.checkpoint` outside of a jit.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jaxact._engine.backward import backward_pass
from jaxact._engine.seeds import known_seeds, seeds_for
from jaxact._engine.storage import Probe, Source, Storage
from jaxact._engine.together import Stored
from jaxact._jaxpr.compat import barrier
from jaxact._jaxpr.evaluate import (
    evaluate,
    in_mesh_of,
    is_in_other_mesh,
    is_traced,
    moved,
)
from jaxact._jaxpr.opaque import hide
from jaxact._jaxpr.read import is_float
from jaxact._jaxpr.types import Array, ClosedJaxpr, Env, PyTree, Var
from jaxact._plan.mark import will_be_rounded
from jaxact._plan.storage import StoragePlan
from jaxact._plan.tail import Parts, parted

# Outputs; the stored form for each of `StoragePlan.decisions`; other kept values.
_Forward: TypeAlias = tuple[list[jax.Array], list[PyTree], list[jax.Array]]
# Gradients for the active inputs; cotangents for settings.
_Backward: TypeAlias = tuple[list[jax.Array], Probe]

# A program, and its result's tree.
_Traced: TypeAlias = tuple[ClosedJaxpr, Any]

# A network with more layers than this traces each one's outputs again in another jit.
_LATEST = 128


@dataclasses.dataclass(frozen=True, eq=False)
class Passes:
    """The passes of the calls that are stored as a plan says."""

    plan: StoragePlan
    storage: Storage

    def forward(
        self, seed: Array, settings: Probe, inputs: Sequence[Array]
    ) -> _Forward:
        """Evaluate a call, and store its residuals.

        Args:
          seed: uint32 scalar, of the call, for the rounding noise.
          settings: a measurement's, by the residual's key inside the call.
          inputs: for the forward program.
        """
        plan = self.plan
        held, env = self._evaluate(inputs)
        values = [env[v] for v in self._packed_from]
        pack = self._jitted_pack if _can_jit(values) else self._pack
        packed = pack(seed, settings, values) if plan.packed else []
        shared = plan.of_parameters
        behind = [v for v in plan.exact if v not in shared]
        exact = [env[v] for v in behind]
        if packed:
            held, packed, exact = barrier((held, packed, exact))
        stored: dict[Var, PyTree] = dict.fromkeys(plan.decisions)
        # Not behind the barrier: a scan keeps once a value that all steps share.
        stored.update((v, env[v]) for v in shared)
        stored.update(zip(behind, exact, strict=True))
        # Behind the barrier: XLA's host offloading does not look through one.
        for v, arrays in zip(plan.packed, packed, strict=True):
            stored[v] = plan.decisions[v].codec.keep(arrays)
        outputs = evaluate(self._parts.tail, plan.forward.consts, [*inputs, *held])
        return outputs, list(stored.values()), [env[v] for v in plan.kept]

    def backward(
        self,
        keys: tuple[str, ...],
        packed: Stored,
        kept: Sequence[jax.Array],
        cotangents: Sequence[jax.Array | SymbolicZero],
    ) -> _Backward:
        """Gradients; `keys` as in `settings`."""
        if not self.plan.packed or not _can_jit((packed, kept, cotangents)):
            return self._backward(keys, (), packed, kept, cotangents)
        outputs = self.plan.forward.jaxpr.outvars
        zeros = tuple(
            c.aval if isinstance(c, SymbolicZero) else None for c in cotangents
        )
        arrays = [
            np.asarray(c, v.aval.dtype) if isinstance(c, int | float | complex) else c
            for c, v in zip(cotangents, outputs, strict=False)
            if not isinstance(c, SymbolicZero)
        ]
        return self._jitted_backward(keys, zeros, packed, kept, arrays)

    @functools.cached_property
    def keep(self) -> Callable[[Hashable], Hashable]:
        """Keeps alive the latest calls' functions, by which JAX finds their traces."""
        return functools.lru_cache(_LATEST)(lambda function: function)

    @functools.cached_property
    def _jitted_pack(self) -> Callable[..., list[PyTree]]:
        return jax.jit(self._pack)

    @functools.cached_property
    def _jitted_backward(self) -> Callable[..., _Backward]:
        return jax.jit(self._backward, static_argnums=(0, 1))

    @functools.cached_property
    def _parts(self) -> Parts:
        """The program before and after the barrier at the call's end."""
        return parted(self.plan.program, self.plan.forward.num_outputs)

    @functools.cached_property
    def _packed_from(self) -> list[Var]:
        """The variables that are packed, and those that they are normalized with."""
        plan = self.plan
        statistics = [v for n in plan.normalized.values() for v in n.statistics]
        statistics += [v for one in plan.apart.values() for v in one.statistics]
        return list(dict.fromkeys([*map(plan.source, plan.packed), *statistics]))

    def _evaluate(self, inputs: Sequence[Array]) -> tuple[list[jax.Array], Env]:
        """The values for `Parts.tail`, and those that the saved variables have."""
        plan, forward = self.plan, self.plan.forward
        arguments = _together(inputs) if plan.is_checkpointed else inputs
        results = evaluate(self._parts.head, forward.consts, arguments)
        count = len(self._parts.held)
        env = dict(zip(plan.read, results[count:], strict=True))
        # An argument is kept as the array that it is: the program would give a copy.
        env |= dict(zip(forward.jaxpr.constvars, forward.consts, strict=True))
        env |= dict(zip(forward.jaxpr.invars, inputs, strict=True))
        return results[:count], env

    def _pack(
        self, seed: Array, settings: Probe, values: Sequence[jax.Array]
    ) -> list[PyTree]:
        """The stored form for each of `StoragePlan.packed`."""
        plan, env = self.plan, dict(zip(self._packed_from, values, strict=True))
        is_elsewhere = any(map(is_in_other_mesh, values))
        make = known_seeds if is_elsewhere else seeds_for
        seeds = make(seed, len(plan.packed))
        packed, traced = [], {}
        for v, own in zip(plan.packed, seeds, strict=True):
            x = env[plan.source(v)]
            numbers = own, settings.get(plan.decisions[v].residual.key)
            with in_mesh_of(x):
                own, setting = jax.tree.map(functools.partial(moved, x), numbers)
                packed.append(self._store(v, env, own, setting, traced))
        return packed

    def _store(
        self,
        v: Var,
        env: Env,
        seed: jax.Array,
        setting: jax.Array | None,
        traced: dict[Hashable, _Traced],
    ) -> PyTree:
        """One residual, encoded; `traced`: the codecs' programs so far."""
        plan, decision = self.plan, self.plan.decisions[v]
        comparison = plan.compared.get(v)
        source = self._source(v, env)

        def encode(x: jax.Array, seed: jax.Array, *coefficients: jax.Array) -> PyTree:
            if comparison is not None:
                return comparison.encode(x)
            own = dataclasses.replace(source, x=x, coefficients=coefficients)
            return self.storage.encode(decision, own, seed, setting)

        operands = source.x, seed, *source.coefficients
        if decision.codec.is_differentiable and is_float(v):
            return encode(*operands)
        # Traced here, so that the way from a call to its codec is straight. Residuals
        # that are alike share the program: JAX then lowers it once.
        above = comparison and comparison.above
        how = source.is_fused, source.normalization
        key = decision.codec, above, how, *map(jax.typeof, operands)
        found = traced.get(key) if setting is None else None
        if found is None:
            closed, out = jax.make_jaxpr(encode, return_shape=True)(*operands)
            found = closed, jax.tree.structure(out)
            if setting is None:
                traced[key] = found
        return hide(*found, *operands)

    def _source(self, v: Var, env: Env) -> Source:
        """The array that a residual is encoded from."""
        plan = self.plan
        x = will_be_rounded(env[plan.source(v)], plan.decisions[v])
        is_fused, norm = v in plan.fused, plan.norms.get(v)
        if v in plan.compared:
            x = lax.stop_gradient(x)  # a mask has no derivative
            x = plan.copies[v].ordered(x) if v in plan.copies else x
            return Source(x, is_fused)
        if norm is not None and not is_fused:
            x = norm.ordered(x)
            how = norm.normalization(x.ndim), norm.operands(x, env)
            return Source(x, is_fused, *how)
        return Source(plan.maps[v].apply(x, env) if v in plan.maps else x, is_fused)

    def _backward(
        self,
        keys: tuple[str, ...],
        zeros: Sequence[Any],
        packed: Stored,
        kept: Sequence[jax.Array],
        cotangents: Sequence[Any],
    ) -> _Backward:
        """`zeros`: types of the cotangents that are zero, None for the other ones."""
        arrays = iter(cotangents)
        if zeros:
            cotangents = [
                next(arrays) if aval is None else SymbolicZero(aval) for aval in zeros
            ]
        return backward_pass(self.plan, self.storage, keys, packed, kept, cotangents)


def _together(inputs: Sequence[Array]) -> list[Any]:
    """The inputs; floating ones are not there before all are.

    Else XLA casts all layers' weights first, and keeps them until they are read:
    162 MiB for ViT-B in bfloat16, most of what a checkpointed step takes in forward.
    """
    floating = [i for i, x in enumerate(inputs) if jnp.issubdtype(x.dtype, jnp.inexact)]
    values = list(inputs)
    held = barrier([values[i] for i in floating])
    for i, x in zip(floating, held, strict=True):
        values[i] = x
    return values


def _can_jit(values: PyTree) -> bool:
    """Whether values are traced, all in the current mesh, which a jit asks for."""
    return is_traced(values) and not any(
        isinstance(x, jax.Array) and is_in_other_mesh(x)
        for x in jax.tree.leaves(values)
    )
