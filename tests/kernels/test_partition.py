"""Kernels keep the sharding of their operands; a shard's noise is that of its place.

Eight CPU devices run the interpreted kernels through the same partitioning; eight GPUs
that are not attached show that XLA adds no communication and no copy to real ones.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType

from jaxact._memory.targets import TARGETS
from jaxact_kernels import affine, mask, noise, rotated
from jaxact_kernels.affine import triton
from jaxact_kernels.config import Config
from jaxact_kernels.device import Device
from jaxact_kernels.dispatch import run
from jaxact_kernels.normalization import Normalization
from jaxact_kernels.numbering import box
from jaxact_kernels.partition import sharded_kernel
from jaxact_kernels.rotated import triton as rotated_triton
from support.eight_devices import COLLECTIVES, collectives, run_on_eight_devices
from support.gpu_target import needs_target
from support.subjects import Affine, jit_interpreted as jit, sample
from support.variants import thorough

SHAPE = (8, 4, 256)
SEED = np.uint32(7)
KERNEL = r'custom_call_target="__gpu\$xla\.gpu\.triton"'
H100 = Device("NVIDIA H100 80GB HBM3", (9, 0))
SPECS = [
    jax.P("data"),
    jax.P("data", "model"),
    jax.P(None, "model"),
    jax.P("data", None, "model"),
    jax.P(("data", "model")),
]


@dataclasses.dataclass(frozen=True)
class Encode(affine.Encode):
    """The Triton kernel, interpreted."""

    def kernel(self, implementation, numbering):
        return functools.partial(
            triton.encode,
            **self.options,
            numbering=numbering,
            config=Config(4, 1),
            interpret=True,
        )


@dataclasses.dataclass(frozen=True)
class Decode(affine.Decode):
    """The Triton kernel with dither, interpreted."""

    def kernel(self, implementation, numbering):
        options = {"shape": self.shape, "dtype": self.dtype, "bits": self.bits}
        options |= {"group_size": self.group_size}

        def decode(words, metadata, seed, *first):
            stored = affine.Stored(words, metadata)
            draw = noise.Draw(seed, numbering, *first)
            interpreted = {"config": Config(4, 1), "interpret": True}
            return (triton.decode(stored, draw=draw, **options, **interpreted),)

        return decode


@dataclasses.dataclass(frozen=True)
class Rotate(rotated.Encode):
    """The rotated format's kernel, interpreted."""

    def kernel(self, implementation, numbering):
        interpreted = {"config": Config(4, 1), "interpret": True}
        return functools.partial(
            rotated_triton.encode, **self.options, numbering=numbering, **interpreted
        )


@dataclasses.dataclass(frozen=True)
class RotateBack(rotated.Decode):
    """The rotated format's decoding kernel, interpreted."""

    def kernel(self, implementation, numbering):
        options = {**self.options, "numbering": numbering}
        options |= {"config": Config(4, 1), "interpret": True}

        def decode(words, metadata, seed, *first):
            stored = rotated.Stored(words, metadata, seed)
            return (rotated_triton.decode(stored, *first, **options),)

        return decode


@pytest.mark.parametrize(
    "sizes, whole",
    [((2, 3), (4, 3)), ((2, 2), (4, 6)), ((3,), (9,)), ((1, 4, 2), (5, 4, 2))],
)
def test_a_box_numbers_its_groups_as_the_whole_does(sizes, whole):
    numbers = np.arange(np.prod(whole)).reshape(whole)
    wanted = numbers[tuple(slice(size) for size in sizes)].ravel()
    local = jnp.arange(len(wanted), dtype=jnp.uint32)
    np.testing.assert_array_equal(box(sizes, whole).of(local), wanted)


def test_a_box_cut_along_its_first_axis_counts_by_ones():
    numbering = box((2, 4, 2), (6, 4, 2))
    assert numbering.sizes == (16,) and numbering.strides == (1,)


@thorough
def test_eight_devices_run_the_kernel_where_the_data_are():
    run_on_eight_devices(__file__)


def check_eight_devices():
    x = sample(Affine(2), SHAPE)
    wanted = affine.encode(x, SEED, bits=2, group_size=64)
    operation = Encode(SHAPE, x.dtype, 2, 64)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    call = jit(sharded_kernel(operation, "triton", (), H100))
    for spec in SPECS:
        placed = jax.device_put(x, jax.NamedSharding(mesh, spec))
        compiled = call.lower(placed, SEED).compile()
        for got, want in zip(compiled(placed, SEED), wanted, strict=True):
            np.testing.assert_array_equal(got, want)
            kept = jax.NamedSharding(mesh, spec)
            assert got.sharding.is_equivalent_to(kept, got.ndim), spec
        assert not collectives(compiled), spec
    stored, decoding = wanted, Decode(SHAPE, x.dtype, 2, 64, is_dithered=True)
    options = {"shape": SHAPE, "dtype": x.dtype, "bits": 2, "group_size": 64}
    wanted = affine.decode(stored, seed=SEED, **options)
    decode = jit(sharded_kernel(decoding, "triton", (), H100))
    for spec in SPECS:
        put = functools.partial(jax.device_put, device=jax.NamedSharding(mesh, spec))
        operands = *map(put, stored), SEED
        compiled = decode.lower(*operands).compile()
        np.testing.assert_array_equal(compiled(*operands)[0], wanted)
        assert not collectives(compiled), spec
    stored = rotated.encode(x, SEED, bits=2, group_size=64)
    wanted = rotated.decode(stored, **options)
    rotate = jit(sharded_kernel(Rotate(SHAPE, x.dtype, 2, 64), "triton", (), H100))
    back = RotateBack(SHAPE, x.dtype, 2, 64)
    rotate_back = jit(sharded_kernel(back, "triton", (), H100))
    for spec in SPECS[1:3]:
        put = functools.partial(jax.device_put, device=jax.NamedSharding(mesh, spec))
        encode = rotate.lower(put(x), SEED).compile()
        for got, want in zip(encode(put(x), SEED), stored, strict=False):
            np.testing.assert_array_equal(got, want)
        operands = put(stored.words), put(stored.metadata), SEED
        decode = rotate_back.lower(*operands).compile()
        np.testing.assert_array_equal(decode(*operands)[0], wanted)
        assert not collectives(encode) and not collectives(decode), spec
    # Finer than groups: still the same words, which are gathered.
    placed = jax.device_put(x, jax.NamedSharding(mesh, jax.P(None, "model", "data")))
    wider = jit(sharded_kernel(Encode(SHAPE, x.dtype, 2, 128), "triton", (), H100))
    compiled = wider.lower(placed, SEED).compile()
    words, _ = compiled(placed, SEED)
    wanted = affine.encode(x, SEED, bits=2, group_size=128)
    np.testing.assert_array_equal(words, wanted.words)
    assert "all-to-all" in collectives(compiled)
    vmaps = ((True, False),)
    call = jit(sharded_kernel(Encode(SHAPE[1:], x.dtype, 2, 64), "triton", vmaps, H100))
    placed = jax.device_put(x, jax.NamedSharding(mesh, SPECS[1]))
    wanted = jax.vmap(lambda x: affine.encode(x, SEED, bits=2, group_size=64))(x)
    compiled = call.lower(placed, SEED).compile()
    np.testing.assert_array_equal(compiled(placed, SEED)[0], wanted.words)
    assert not collectives(compiled)


@functools.cache
def gpus(kind):
    """Eight H100s that are not attached, as a mesh of 4 x 2."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=TARGETS["h100"].description, topology="1x1x8"
    )
    devices = np.array(topology.devices).reshape(4, 2)
    return jax.sharding.Mesh(devices, ("data", "model"), axis_types=(kind,) * 2)


def compile_on(mesh, f, *args_and_specs):
    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))
        for shape, dtype, spec in args_and_specs
    ]
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).compile()


def round_trip(x, seed):
    stored = affine.encode(x, seed, bits=2)
    is_positive = mask.decode(mask.encode(x > np.zeros((), x.dtype)), shape=x.shape)
    return is_positive, affine.decode(stored, shape=x.shape, dtype=x.dtype, bits=2)


LARGE = (16, 512, 1024)
ARGUMENTS = [(LARGE, "bfloat16"), ((), "uint32")]


@needs_target
@pytest.mark.parametrize(
    "spec, kind",
    [
        *((spec, AxisType.Auto) for spec in SPECS[1:]),
        (SPECS[1], AxisType.Explicit),
        pytest.param(SPECS[0], AxisType.Auto, marks=pytest.mark.slow),
        pytest.param(SPECS[2], AxisType.Explicit, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_eight_gpus_exchange_nothing(spec, kind):
    mesh = gpus(kind)
    specs = spec, jax.P()
    arguments = [(*a, s) for a, s in zip(ARGUMENTS, specs, strict=True)]
    with jax.set_mesh(mesh):
        compiled = compile_on(mesh, round_trip, *arguments)
    text = compiled.as_text()
    assert not re.findall(rf" ({COLLECTIVES}|copy|pad|transpose)(-start)?\(", text)
    assert len(re.findall(KERNEL, text)) >= 2
    for sharding in compiled.output_shardings:
        wanted = jax.NamedSharding(mesh, spec)
        assert sharding.is_equivalent_to(wanted, len(LARGE)), sharding


@needs_target
@pytest.mark.parametrize(
    "shape",
    [
        *((16, 256), (16, 4, 96), (16, 1000), (16,)),
        pytest.param((8, 8, 40), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rows_of_any_kind_stay_where_they_are(shape):
    # One group, joined axes, padding, a vector cut finer than its group.
    arguments = [(shape, "float32", jax.P("data")), ((), "uint32", jax.P())]
    compiled = compile_on(gpus(AxisType.Auto), round_trip, *arguments)
    assert len(shape) == 1 or not collectives(compiled)
    assert len(re.findall(KERNEL, compiled.as_text())) >= 2


@needs_target
@pytest.mark.parametrize("spec", [SPECS[1], SPECS[2], SPECS[3]], ids=str)
def test_coefficients_stay_where_their_channels_are(spec):
    by_channel = Normalization((-1,), is_centered=True)
    operation = affine.Encode(LARGE, np.dtype("bfloat16"), 2, normalization=by_channel)
    channels = (LARGE[-1:], "float32", jax.P(*spec[2:]))
    arguments = [(*ARGUMENTS[0], spec), (*ARGUMENTS[1], jax.P()), channels, channels]
    encode = functools.partial(run, operation)
    compiled = compile_on(gpus(AxisType.Auto), encode, *arguments)
    assert not collectives(compiled)
    assert len(re.findall(KERNEL, compiled.as_text())) == 1


@needs_target
def test_of_rows_cut_through_their_groups_only_words_are_gathered():
    """A width of 768 on two devices. Gathered before, the array was in memory whole."""
    arguments = [((16, 512, 768), "bfloat16", SPECS[3]), ((), "uint32", jax.P())]
    encode = lambda x, seed: affine.encode(x, seed, bits=2)
    text = compile_on(gpus(AxisType.Auto), encode, *arguments).as_text()
    gathers = re.findall(r"= (.*?) all-gather(?:-start)?\(", text)
    assert gathers and not any("bf16" in types for types in gathers)


@needs_target
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_exchanges_nothing(check_vma):
    mesh, spec = gpus(AxisType.Auto), jax.P("data", "model")
    f = jax.shard_map(
        round_trip,
        mesh=mesh,
        in_specs=(spec, jax.P()),
        out_specs=spec,
        check_vma=check_vma,
    )
    specs = spec, jax.P()
    compiled = compile_on(
        mesh, f, *((*a, s) for a, s in zip(ARGUMENTS, specs, strict=True))
    )
    assert not collectives(compiled)
    assert len(re.findall(KERNEL, compiled.as_text())) >= 2


@needs_target
def test_vmap_on_eight_gpus_exchanges_nothing():
    mesh, spec = gpus(AxisType.Auto), jax.P("data", "model")
    arguments = [(LARGE, "bfloat16", spec), (LARGE[:1], "uint32", jax.P("data"))]
    compiled = compile_on(mesh, jax.vmap(round_trip), *arguments)
    assert not collectives(compiled)
    assert len(re.findall(KERNEL, compiled.as_text())) >= 2


if __name__ == "__main__":
    check_eight_devices()
