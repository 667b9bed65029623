"""The contract of an action, and of a codec: an action that stores something."""

import abc
import enum
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxact._saved import Saved
from jaxact_kernels.normalization import Normalization

Stored = TypeVar("Stored")


class Bias(enum.StrEnum):
    """How the mean of a gradient, over the rounding noise, differs from its value.

    "unbiased to first order": a path of the backward pass multiplies with the rounded
    value twice, as the Jacobians of a softmax and of a norm do. The mean then differs
    by terms of second order in the rounding. They fall with the square of its step; how
    large they are beside the noise depends on the network, and nothing bounds it.

    "unbiased over rotations": the residual is rotated at random and then rounded to the
    nearest level. The mean over rotations is its value, but for a squared bias below
    5e-4 of the squared error on groups that the tests draw, and 2e-3 on those with one
    value that is not zero (`Rotated`).
    """

    EXACT = "exact"  # every draw is the exact gradient
    UNBIASED = "unbiased"  # noise of mean zero
    # Noise of mean zero but for a squared bias below 5e-4 of its variance.
    OVER_ROTATIONS = "unbiased over rotations"
    # Noise of mean zero but for terms of second order in the rounding.
    FIRST_ORDER = "unbiased to first order"
    BIASED = "biased"  # something nonlinear is computed from rounded values

    @property
    def is_noise(self) -> bool:
        """Whether the error is noise with mean zero, but for the bias of rotations."""
        return self in (Bias.UNBIASED, Bias.OVER_ROTATIONS)


class Action(Saved, abc.ABC):
    """How one residual is kept from forward to backward.

    An action is a value: frozen, hashable, equal by its fields. It is either a `Codec`
    or `Recompute()`.

    Attributes:
      bias: the bias that it leaves in a gradient in which the residual is a factor.
      bits: average bits per stored element; None if no element is rounded.
    """

    bias: Bias
    bits: float | None
    # Whether anything but the array itself is kept for the backward pass.
    is_packed: ClassVar[bool] = False
    # Whether JAX differentiates it right, so that second derivatives may pass through.
    # Elsewhere they raise an error: lossless is not enough, a bitcast gives 0.
    is_differentiable: bool = False

    @property
    def is_lossless(self) -> bool:
        """Whether backward gets the residual to the last bit."""
        return self.bias is Bias.EXACT

    @property
    def label(self) -> str:
        """A few words for a table, such as '4 bits' or 'bfloat16, host'."""
        name = type(self).__name__
        return name if self.bits is None else f"{name}, {self.bits:g} bits"

    @abc.abstractmethod
    def declines(self, shape: tuple[int, ...], dtype: DTypeLike) -> str | None:
        """Why it cannot store such an array; None if it can."""


class Codec(Action, Generic[Stored]):
    """An action that encodes a residual in forward and decodes it in backward.

    To write one, subclass this as a frozen dataclass with `bias`, `bits`, `encode` and
    `decode`; also `declines` and `label` where their defaults do not fit, `is_float32`
    for a codec that computes in float32 and declines float64, and `is_free_of_axes` for
    one that may get an array with its axes in another order, that in which it lies in
    memory. `bias` and `bits` may be class attributes, fields or properties. Policies,
    tables, measurements and transforms ask for nothing more. A codec that declines
    complex arrays gets both parts as a real one, with an axis more before the last.

    `encode` and `decode` are traced, once for each residual, so shapes are static and
    both must work under `jit`, `vmap` and `scan`. A stored value is any pytree whose
    leaves are arrays; nothing else is kept between the passes. The stored bytes in a
    table are those of the leaves, a byte for a bool.

    Choose the bias by the mean of `decode(encode(x, seed))` over seeds: UNBIASED if
    that is x, BIASED if not, and EXACT only if each draw is x to the last bit. Nothing
    checks it: a codec that is wrong about its bias makes tables wrong, and gradients.

    Example:
      >>> import dataclasses, jax.numpy as jnp, jaxact
      >>> @dataclasses.dataclass(frozen=True)
      ... class Sign(jaxact.Codec):
      ...     bias = jaxact.Bias.BIASED
      ...     bits = 1
      ...
      ...     def encode(self, x, seed):
      ...         return x < 0, jnp.mean(jnp.abs(x))
      ...
      ...     def decode(self, stored, shape, dtype):
      ...         is_negative, size = stored
      ...         return jnp.where(is_negative, -size, size).astype(dtype)
      >>> signs = jaxact.Policy(default=Sign())
      >>> x = jnp.ones((64, 256))
      >>> jaxact.residuals(jnp.sin, x, policy=signs).stored_bytes
      16388
    """

    is_packed: ClassVar[bool] = True
    # Whether it computes in float32, whose range and precision float64 goes beyond.
    is_float32: ClassVar[bool] = False
    # Whether it gives the elements no meaning by their axes: these may come in another
    # order than the residual's, as an array in memory has them (`copies.py`).
    is_free_of_axes: bool = False
    # Whether it decodes to an array in memory: operations that read this one are not
    # fused with the decoding.
    decodes_to_memory: bool = False

    @abc.abstractmethod
    def encode(self, x: jax.Array, seed: jax.Array) -> Stored:
        """The stored value: a pytree of arrays.

        Args:
          x: the residual.
          seed: uint32 scalar, different for each residual and rounding key; the only
            source of randomness.
        """

    @abc.abstractmethod
    def decode(
        self, stored: Stored, shape: tuple[int, ...], dtype: DTypeLike
    ) -> jax.Array:
        """An array with the given shape and dtype, those of the encoded one."""

    def encode_fused(self, x: jax.Array, seed: jax.Array) -> Stored:
        """`encode`, for an x that elementwise operations compute for it alone.

        The value is the same. A codec with a kernel may leave it out here, so that XLA
        fuses the encoding with those operations and x is never written to memory.
        """
        return self.encode(x, seed)

    def encode_normalized(
        self,
        x: jax.Array,
        seed: jax.Array,
        normalization: Normalization,
        coefficients: Sequence[jax.Array],
    ) -> Stored:
        """`encode`, for `normalization(x, *coefficients)` with an x that is in memory.

        The value is the same. A codec with a kernel may let it normalize the elements
        that it reads.
        """
        return self.encode_fused(normalization(x, *coefficients), seed)

    def declines(self, shape: tuple[int, ...], dtype: DTypeLike) -> str | None:
        """Unless overridden, all that is not real floats; float64 if `is_float32`."""
        name = type(self).__name__
        if not jnp.issubdtype(dtype, jnp.floating):
            return f"{name} stores real floats, not {dtype}"
        if self.is_float32 and jnp.dtype(dtype).itemsize > 4:
            return f"{name} computes in float32; Quantize stores {dtype}"
        return None

    def keep(self, stored: Stored) -> Stored:
        """The stored value, moved to where it waits for the backward pass."""
        return stored

    def fetch(self, kept: Stored) -> Stored:
        """The inverse of `keep`."""
        return kept
