"""Instruments: storages that measure the residuals that they store.

A measurement has a *probe*, small float32 arrays by `Residual.key`, an argument to
every instrumented call. Going in, they set how the call's residuals are rounded; the
cotangent that comes back for them is the measurement. So measurements add up over calls
with the same key, leave scan and vmap, and are reduced over devices, as the gradient of
any shared parameter would be, and need no side effect.

`replace_calls.py` evaluates a function with its compressed calls instrumented.
"""

import abc
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxact._decision import Decision
from jaxact._engine.call import ActionStorage, Engine
from jaxact._engine.storage import BackwardProgram, Draw, Packed, Probe, Source
from jaxact._flat import Flat
from jaxact._jaxpr.evaluate import placed
from jaxact._jaxpr.types import Array, PyTree
from jaxact._measure.replace_calls import evaluate
from jaxact._plan.mark import CompressedCall


def restored(decision: Decision, x: jax.Array, stored: PyTree) -> jax.Array:
    """The residual `x`, decoded from its stored form."""
    return placed(decision.codec.decode(stored, x.shape, x.dtype), jax.typeof(x))


class Instrument(ActionStorage, abc.ABC):
    """Measures the residuals that have a setting, and says how they are stored.

    The others are stored through their actions.
    """

    @abc.abstractmethod
    def store(
        self, decision: Decision, x: jax.Array, seed: jax.Array, setting: jax.Array
    ) -> PyTree:
        """The arrays that are stored for a measured residual."""

    @abc.abstractmethod
    def restore(self, packed: Packed) -> jax.Array:
        """A measured residual, from the arrays that `store` returned."""

    @abc.abstractmethod
    def measure(
        self,
        program: BackwardProgram,
        packed: Sequence[Packed],
        decoded: list[jax.Array],
        cotangents: list[jax.Array],
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """`program(decoded, cotangents)`, and the cotangent of each setting.

        `packed` and `decoded` are the measured residuals.
        """

    def encode(
        self,
        decision: Decision,
        source: Source,
        seed: jax.Array,
        setting: jax.Array | None,
    ) -> PyTree:
        if setting is None:
            return super().encode(decision, source, seed, setting)
        return self.store(decision, source.array, seed, setting)

    def decode(self, packed: Packed) -> jax.Array:
        return self.restore(packed) if packed.is_measured else super().decode(packed)

    def backward(
        self,
        program: BackwardProgram,
        packed: Sequence[Packed],
        decoded: list[jax.Array],
        cotangents: list[jax.Array],
    ) -> tuple[list[jax.Array], Probe]:
        numbers = [i for i, residual in enumerate(packed) if residual.is_measured]

        def of_measured(
            arrays: Sequence[jax.Array], cotangents: list[jax.Array]
        ) -> list[jax.Array]:
            residuals = list(decoded)
            for i, x in zip(numbers, arrays, strict=True):
                residuals[i] = x
            return program(residuals, cotangents)

        gradients, settings = self.measure(
            of_measured,
            [packed[i] for i in numbers],
            [decoded[i] for i in numbers],
            cotangents,
        )
        measured: Probe = {}
        for i, setting in zip(numbers, settings, strict=True):
            key = packed[i].decision.residual.key
            measured[key] = measured[key] + setting if key in measured else setting
        return gradients, measured


def evaluate_instrumented(
    instrument: Instrument,
    flat: Flat,
    values: Sequence[Array],
    probe: Probe,
    seed: Array | int = 0,
) -> list[jax.Array]:
    """`flat(*values)` with its compressed calls instrumented.

    Args:
      probe: the settings; residuals without one are stored as their policy says.
      seed: uint32 scalar, joined to every call's own.
    """

    def measure(
        call: CompressedCall,
        call_seed: jax.Array,
        values: Sequence[Array],
        common: Draw,
    ) -> list[jax.Array]:
        # Under vmap a call has one seed for each example: one of them will do.
        call_seed = jnp.ravel(call_seed)[0] if jnp.ndim(call_seed) else call_seed
        seed = jnp.asarray(call_seed, jnp.uint32) ^ jnp.asarray(common.seed, jnp.uint32)
        name = call.prefix or "function"
        engine = Engine(call.policy, call.prefix, name, storage=instrument)
        return engine(call.flat, Draw(seed, common.probe), values)

    num_consts = len(flat.jaxpr.constvars)
    consts, inputs = values[:num_consts], values[num_consts:]
    common = Draw(jnp.asarray(seed, jnp.uint32), probe)
    return evaluate(flat.jaxpr, consts, inputs, measure, common)
