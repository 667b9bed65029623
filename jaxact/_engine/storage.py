"""The interface between a call and the way its residuals are stored."""

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import jax

from jaxact._decision import Decision
from jaxact._jaxpr.types import Array, PyTree
from jaxact_kernels.normalization import Normalization

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


@dataclass(frozen=True)
class Source:
    """The array that a residual is encoded from.

    Attributes:
      x: the residual, or an array in memory that it is normalized from.
      is_fused: elementwise operations compute x, and only for this.
      normalization: of x; None: x itself is encoded.
      coefficients: for the normalization.
    """

    x: jax.Array
    is_fused: bool
    normalization: Normalization | None = None
    coefficients: Sequence[jax.Array] = ()

    @property
    def array(self) -> jax.Array:
        """The array to encode."""
        if self.normalization is None:
            return self.x
        return self.normalization(self.x, *self.coefficients)


class Storage(abc.ABC):
    """How residuals are stored, and how the backward program is evaluated on them."""

    @abc.abstractmethod
    def encode(
        self,
        decision: Decision,
        source: Source,
        seed: jax.Array,
        setting: jax.Array | None,
    ) -> PyTree:
        """The arrays that are stored for a residual.

        Args:
          seed: uint32 scalar, different for each residual.
          setting: the probe's entry for the residual, if there is one.
        """

    @abc.abstractmethod
    def decode(self, packed: Packed) -> jax.Array:
        """The residual."""

    def backward(
        self,
        program: BackwardProgram,
        packed: Sequence[Packed],
        decoded: list[jax.Array],
        cotangents: list[jax.Array],
    ) -> tuple[list[jax.Array], Probe]:
        """The gradients, and the settings' cotangents."""
        return program(decoded, cotangents), {}
