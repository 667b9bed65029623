"""Choose the implementation that runs, with reasons against the others."""

import dataclasses

from jaxact_kernels.device import Device, here
from jaxact_kernels.operation import Operation

REFERENCE = "reference"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation that runs, and why those before it do not.

    Attributes:
        implementation: `triton`, `mosaic_gpu` or `reference`.
        declined: (implementation, reason) for each that was preferred and declined.
    """

    implementation: str
    declined: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        reasons = (f"\n  not {name}: {reason}" for name, reason in self.declined)
        return self.implementation + "".join(reasons)


def choose(
    operation: Operation,
    device: Device | str | None = None,
    implementation: str | None = None,
) -> Choice:
    """Say by which implementation an operation runs on a GPU.

    The rule: the first in `operation.kernels()` that does not decline, else the
    reference. On anything but an NVIDIA GPU it is the reference.

    Args:
        operation: for example `affine.Encode(shape, dtype, bits=2)`.
        device: a GPU, or its name (`h100`); None is the one that programs are compiled
            for here.
        implementation: the only one to consider.

    Raises:
        ValueError: no implementation has that name.
        NotImplementedError: the one asked for declines; it says why.

    Example:
        >>> from jaxact_kernels import affine
        >>> print(choose(affine.Encode((8, 1024), "bfloat16", bits=2), "h100"))
        triton
    """
    device = Device(device) if isinstance(device, str) else device or here()
    names = implementations(operation, implementation)
    declined = []
    if implementation is not None:
        operation = dataclasses.replace(operation, is_fused=False)
    for name in names:
        reason = _why_not(operation, name, device)
        if reason is None:
            return Choice(name, tuple(declined))
        declined.append((name, reason))
    raise NotImplementedError(f"{implementation} was asked for and declines: {reason}")


def implementations(operation: Operation, asked_for: str | None) -> list[str]:
    """The implementations to consider, in order: all, or the one that is asked for.

    Raises:
        ValueError: no implementation has that name.
    """
    names = [*operation.kernels(), REFERENCE]
    if asked_for is None:
        return names
    if asked_for not in names:
        raise ValueError(
            f"got implementation={asked_for!r}; {type(operation).__name__} has "
            f"{', '.join(names)}; pass one of them, or None to choose"
        )
    return [asked_for]


def _why_not(operation: Operation, name: str, device: Device | None) -> str | None:
    if name == REFERENCE:
        return None
    if device is None:
        return (
            "no NVIDIA GPU is attached or described; name one, or enter "
            "jax.sharding.use_abstract_mesh with an AbstractDevice"
        )
    if operation.is_fused:
        return (
            "XLA fuses the definition with the elementwise operations around it, and a "
            "kernel would need the array between them in memory"
        )
    if 0 in operation.shape:
        return f"an array of shape {operation.shape} has no elements"
    return operation.kernels()[name](device)
