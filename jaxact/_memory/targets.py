"""The GPUs that can be compiled for with none attached.

XLA's GPU compiler needs a description of the device, not the device. The numbers are
those that XLA reads from an attached board, in the fields that every supported JAX
version knows; where openxla/xla describes no such board (T4, L4, RTX 4090, A10G) those
of NVIDIA's data sheets. Peak rates are no part of that description and always from
the data sheets: of tensor cores without sparsity, of the link to the host in one
direction, half of the sum that is printed there.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

# Lanes of a multiprocessor that add, compare, shift or convert integers each clock: the
# same from 7.5 to 10.0 (CUDA C++ Programming Guide, throughput of instructions).
_INTEGER_LANES = 64
# The capability with which tensor cores take bfloat16 and float32, the latter rounded
# to TF32 at half the rate; before, such products run where all other arithmetic does.
_TENSOR_FLOATS = (8, 0)
_TENSOR_FLOAT8 = (8, 9)


@dataclass(frozen=True)
class Gpu:
    """One GPU model: what the compiler needs to know, and its peak rates.

    Attributes:
      bytes_per_second: of its memory.
      host_bytes_per_second: between its memory and the host's, in one direction.
      half_flops: operations a second in float16 matrix products summed in float32.
      double_flops: in float64 matrix products.
    """

    name: str
    cores: int  # streaming multiprocessors
    fpus_per_core: int
    capability: str  # in the description's own syntax
    clock_ghz: float
    memory_bytes: int
    bytes_per_second: int
    l2_bytes: int
    shared_bytes_per_core: int
    shared_bytes_per_block: int  # with opt-in
    host_bytes_per_second: int
    half_flops: float
    double_flops: float
    threads_per_core: int = 2048

    @property
    def compute_capability(self) -> str:
        """As NVIDIA writes it: '8.6'."""
        numbers = re.findall(r"m(?:aj|in)or: (\d+)", self.capability)
        return ".".join([*numbers, "0"][:2])

    @property
    def clocks(self) -> float:
        """Those of all multiprocessors in a second."""
        return 1e9 * self.clock_ghz * self.cores

    @property
    def alu_flops(self) -> float:
        """Float32 operations a second outside tensor cores; a multiply-add is two."""
        return 2 * self.clocks * self.fpus_per_core

    @property
    def integer_operations(self) -> float:
        """Additions, shifts, comparisons or conversions of integers a second."""
        return self.clocks * _INTEGER_LANES

    @property
    def peak_flops(self) -> Mapping[str, float]:
        """Operations a second in matrix products and convolutions, by dtype.

        A multiply-add is two. float32 is JAX's default precision: TF32 where there is
        any. Another dtype runs at `alu_flops`.
        """
        half, alu = self.half_flops, self.alu_flops
        capability = tuple(map(int, self.compute_capability.split(".")))
        has_floats = capability >= _TENSOR_FLOATS
        return {
            "float16": half,
            "bfloat16": half if has_floats else alu,
            "float32": half / 2 if has_floats else alu,
            "float64": self.double_flops,
            "int8": 2 * half,
            "float8": 2 * half if capability >= _TENSOR_FLOAT8 else half,
        }

    @property
    def description(self) -> str:
        """XLA's `GpuTargetConfigProto`, as text."""
        return f"""
gpu_device_info {{
  cuda_compute_capability {{ {self.capability} }}
  core_count: {self.cores}
  fpus_per_core: {self.fpus_per_core}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  memory_bandwidth: {self.bytes_per_second}
  l2_cache_size: {self.l2_bytes}
  shared_memory_per_core: {self.shared_bytes_per_core}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {self.shared_bytes_per_block}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_core_limit: {self.threads_per_core}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 minor: 0 }}
device_description_str: "{self.name}"
"""


TARGETS = {
    "t4": Gpu(
        name="Tesla T4",
        cores=40,
        fpus_per_core=64,
        capability="major: 7 minor: 5 feature_extension: NONE",
        clock_ghz=1.59,
        memory_bytes=15 * 2**30,
        bytes_per_second=320_064_000_000,
        l2_bytes=4 * 2**20,
        shared_bytes_per_core=64 * 2**10,
        shared_bytes_per_block=64 * 2**10,
        host_bytes_per_second=16_000_000_000,
        half_flops=65e12,
        double_flops=0.254e12,
        threads_per_core=1024,
    ),
    "a10g": Gpu(
        name="NVIDIA A10G",
        cores=80,
        fpus_per_core=128,
        capability="major: 8 minor: 6 feature_extension: NONE",
        clock_ghz=1.71,
        memory_bytes=22 * 2**30,
        bytes_per_second=600_096_000_000,
        l2_bytes=6 * 2**20,
        shared_bytes_per_core=100 * 2**10,
        shared_bytes_per_block=99 * 2**10,
        host_bytes_per_second=32_000_000_000,
        half_flops=70e12,
        double_flops=0.547e12,
        threads_per_core=1536,
    ),
    "l4": Gpu(
        name="NVIDIA L4",
        cores=58,
        fpus_per_core=128,
        capability="major: 8 minor: 9 feature_extension: NONE",
        clock_ghz=2.04,
        memory_bytes=22 * 2**30,
        bytes_per_second=300_096_000_000,
        l2_bytes=48 * 2**20,
        shared_bytes_per_core=100 * 2**10,
        shared_bytes_per_block=99 * 2**10,
        host_bytes_per_second=32_000_000_000,
        half_flops=121e12,
        double_flops=0.473e12,
        threads_per_core=1536,
    ),
    "rtx4090": Gpu(
        name="NVIDIA GeForce RTX 4090",
        cores=128,
        fpus_per_core=128,
        capability="major: 8 minor: 9 feature_extension: NONE",
        clock_ghz=2.52,
        memory_bytes=23 * 2**30,
        bytes_per_second=1_008_096_000_000,
        l2_bytes=72 * 2**20,
        shared_bytes_per_core=100 * 2**10,
        shared_bytes_per_block=99 * 2**10,
        host_bytes_per_second=32_000_000_000,
        half_flops=165.2e12,
        double_flops=1.29e12,
        threads_per_core=1536,
    ),
    "a100": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        cores=108,
        fpus_per_core=64,
        capability="major: 8 feature_extension: NONE",
        clock_ghz=1.41,
        memory_bytes=85_100_068_864,
        bytes_per_second=2_039_040_000_000,
        l2_bytes=40 * 2**20,
        shared_bytes_per_core=164 * 2**10,
        shared_bytes_per_block=163 * 2**10,
        host_bytes_per_second=32_000_000_000,
        half_flops=312e12,
        double_flops=19.5e12,
    ),
    "h100": Gpu(
        name="NVIDIA H100 80GB HBM3",
        cores=132,
        fpus_per_core=128,
        capability="major: 9 feature_extension: ACCELERATED_FEATURES",
        clock_ghz=1.98,
        memory_bytes=84_942_979_072,
        bytes_per_second=3_352_320_000_000,
        l2_bytes=50 * 2**20,
        shared_bytes_per_core=228 * 2**10,
        shared_bytes_per_block=227 * 2**10,
        host_bytes_per_second=64_000_000_000,
        half_flops=989.4e12,
        double_flops=66.9e12,
    ),
    "h200": Gpu(
        name="NVIDIA H200",
        cores=132,
        fpus_per_core=128,
        capability="major: 9 feature_extension: ACCELERATED_FEATURES",
        clock_ghz=1.98,
        memory_bytes=151_397_597_184,
        bytes_per_second=4_800_000_000_000,
        l2_bytes=50 * 2**20,
        shared_bytes_per_core=228 * 2**10,
        shared_bytes_per_block=227 * 2**10,
        host_bytes_per_second=64_000_000_000,
        half_flops=989.4e12,
        double_flops=66.9e12,
    ),
    "b200": Gpu(
        name="NVIDIA B200",
        cores=148,
        fpus_per_core=128,
        capability="major: 10 feature_extension: ACCELERATED_FEATURES",
        clock_ghz=1.965,
        memory_bytes=191_514_411_008,
        bytes_per_second=7_672_320_000_000,
        l2_bytes=132_644_864,
        shared_bytes_per_core=228 * 2**10,
        shared_bytes_per_block=227 * 2**10,
        host_bytes_per_second=64_000_000_000,
        half_flops=2250e12,
        double_flops=37e12,
    ),
}


def gpu_of(target: str) -> Gpu:
    """The GPU that a target names, however it is spelled: 'H100', 'RTX 4090'.

    The name that JAX gives a device serves too: 'NVIDIA H100 80GB HBM3'.

    Raises:
      ValueError: no such target.
    """
    given = _model(target) if isinstance(target, str) else ""
    for name, gpu in TARGETS.items():
        if given in (name, _model(gpu.name)):
            return gpu
    raise ValueError(
        f"unknown target {target!r}: one of {', '.join(sorted(TARGETS))} is "
        "required, such as target='h100', or None for the local backend"
    )


def _model(name: str) -> str:
    """A GPU's name in small letters and digits, without its maker and its series."""
    words = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(nvidia|tesla|geforce)+", "", words)
