"""The GPU that a program is compiled for, attached or not."""

import contextlib
import dataclasses
import importlib
import re
from typing import Any

import jax

# NVIDIA's table of compute capabilities, for devices described by their name alone, as
# patterns. RTX numbers that end in 50 to 90 are GeForce boards, others workstations'.
_CAPABILITIES = {
    "V100": (7, 0), "T4": (7, 5), "RTX 20[5-9]0": (7, 5), r"Quadro RTX \d000": (7, 5),
    "A100": (8, 0), "A30": (8, 0), "A10": (8, 6), "A40": (8, 6), r"A\d\d00": (8, 6),
    "RTX 30[5-9]0": (8, 6), "L4": (8, 9), "L40": (8, 9), "RTX 40[5-9]0": (8, 9),
    r"RTX \d+ (SFF )?Ada": (8, 9),
    "H100": (9, 0), "H200": (9, 0), "GH200": (9, 0), "H800": (9, 0), "H20": (9, 0),
    "B100": (10, 0), "B200": (10, 0), "GB200": (10, 0),
    "B300": (10, 3), "GB300": (10, 3), "RTX 50[5-9]0": (12, 0), r"RTX PRO \d+": (12, 0),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU, as far as choosing a kernel for it needs to know.

    Attributes:
        kind: its name in JAX, such as `NVIDIA H100 80GB HBM3`; a model's name such as
            `h100` serves too.
        capability: CUDA compute capability; from `kind` where it is not given, and None
            if that names no known model.
    """

    kind: str
    capability: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.capability is None:
            object.__setattr__(self, "capability", _capability(self.kind))


def here() -> Device | None:
    """The GPU that the abstract mesh describes, else the first attached, else None."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None and abstract.device_kind:
        return Device(abstract.device_kind)
    try:
        return device_of(jax.devices("cuda")[0])
    except RuntimeError:  # no such platform
        return None


def device_of(device: Any) -> Device:
    """Describe a JAX device, attached or not."""
    major, minor = str(device.compute_capability).split(".")
    return Device(device.device_kind, (int(major), int(minor)))


def without_triton(device: Device) -> str | None:
    """Why Pallas cannot compile for a device by Triton; None where it can."""
    try:
        importlib.import_module("jax.experimental.pallas.triton")
    except ImportError:
        return "this version of JAX has no Pallas Triton"
    if device.capability is None or device.capability >= (8, 0):
        return None
    major, minor = device.capability
    return f"Triton needs compute capability 8.0; {device.kind} has {major}.{minor}"


def lowering_for(
    device: Device, num_cores: int | None = None
) -> contextlib.AbstractContextManager[object]:
    """The context in which Pallas lowers for a device, and for no mesh."""
    kind = device.kind.replace("A10G", "A10")  # Pallas has no other name for it
    abstract = jax.sharding.AbstractDevice(kind, num_cores, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=abstract)
    return jax.sharding.use_abstract_mesh(mesh)


def _capability(kind: str) -> tuple[int, int] | None:
    for model, capability in _CAPABILITIES.items():
        # L40S and A10G are L40 and A10 by another name.
        if re.search(rf"\b{model}(?![0-9])", kind, re.IGNORECASE):
            return capability
    return None
