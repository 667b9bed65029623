"""Which implementation runs is one visible rule, and every refusal has its reason."""

import sys

import jax
import jax.numpy as jnp
import pytest

from jaxact_kernels import affine, choose, index, mask, rotated
from jaxact_kernels.device import Device

SHAPE = (8, 1024)


def encode(shape=SHAPE, dtype="bfloat16", **options):
    return affine.Encode(shape, jnp.dtype(dtype), **({"bits": 2} | options))


@pytest.mark.parametrize("device", ["a100", "h100", "h200", "b200", "L4"])
def test_a_gpu_runs_a_kernel(device):
    choice = choose(encode(), device)
    assert choice.implementation != "reference" and not choice.declined


@pytest.mark.parametrize(
    "operation, device, reason",
    [
        (encode(), "Tesla T4", "compute capability 8.0; Tesla T4 has 7.5"),
        (encode(dtype="float64"), "h100", "float32, bfloat16 and float16"),
        (encode(dtype="float8_e5m2"), "h100", "float32, bfloat16 and float16"),
        (encode((0, 8)), "h100", "has no elements"),
        (encode(is_fused=True), "h100", "XLA fuses the definition"),
        (encode((4, 16384), group_size=16384), "h100", "this one has 16384"),
        (encode(), None, "no NVIDIA GPU is attached or described"),
    ],
    ids=["old", "float64", "float8", "empty", "fused", "group", "cpu"],
)
def test_the_rest_runs_the_reference_and_says_why(operation, device, reason):
    if device is None and any(d.platform == "gpu" for d in jax.devices()):
        pytest.skip("a GPU is attached")
    choice = choose(operation, device)
    assert choice.implementation == "reference"
    assert [name for name, _ in choice.declined] == list(operation.kernels())
    assert reason in dict(choice.declined)["triton"]
    assert reason in str(choice)


def test_one_asked_for_runs_or_says_why_not():
    assert choose(encode(), "h100", "triton").implementation == "triton"
    assert choose(encode(is_fused=True), "h100", "triton").implementation == "triton"
    assert choose(encode(), "h100", "reference").implementation == "reference"
    with pytest.raises(NotImplementedError, match="triton was asked for .* 7.5"):
        choose(encode(), "Tesla T4", "triton")
    with pytest.raises(ValueError, match="got implementation='cuda'.*triton"):
        choose(encode(), "h100", "cuda")
    with pytest.raises(ValueError, match="got implementation='tritn'.*triton"):
        affine.encode(jnp.ones(SHAPE), jnp.uint32(0), bits=2, implementation="tritn")


def test_none_replaces_one_asked_for():
    x = jnp.ones(SHAPE, jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="triton was asked for"):
        affine.encode(x, jnp.uint32(0), bits=2, implementation="triton")
    stored = affine.encode(x, jnp.uint32(0), bits=2, implementation="reference")
    with pytest.raises(NotImplementedError, match="pass implementation=None"):
        affine.decode(
            stored, shape=SHAPE, dtype=x.dtype, bits=2, implementation="triton"
        )


FORMATS = [
    encode(),
    rotated.Encode(SHAPE, "float32", 2),
    index.Encode(SHAPE, "int8", 2),
    mask.Encode(SHAPE, "bool"),
]


@pytest.mark.parametrize("operation", FORMATS, ids=lambda each: each.scope)
def test_a_version_without_pallas_triton(monkeypatch, operation):
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    choice = choose(operation, "h100")
    assert dict(choice.declined)["triton"] == "this version of JAX has no Pallas Triton"


def test_devices_are_known_by_name():
    known = {
        "NVIDIA A100-SXM4-80GB": (8, 0),
        "NVIDIA H100 80GB HBM3": (9, 0),
        "NVIDIA GH200 480GB": (9, 0),
        "NVIDIA L40S": (8, 9),
        "NVIDIA L4": (8, 9),
        "NVIDIA GeForce RTX 4090": (8, 9),
        "NVIDIA GeForce RTX 5090": (12, 0),
        "NVIDIA GeForce RTX 2080 Ti": (7, 5),
        "NVIDIA GeForce RTX 3060 Laptop GPU": (8, 6),
        "rtx 4070": (8, 9),
        "Quadro RTX 4000": (7, 5),
        "Quadro RTX 5000": (7, 5),
        "NVIDIA RTX A4000": (8, 6),
        "NVIDIA RTX A5500": (8, 6),
        "NVIDIA RTX A6000": (8, 6),
        "NVIDIA RTX 2000 Ada Generation": (8, 9),
        "NVIDIA RTX 4000 SFF Ada Generation": (8, 9),
        "NVIDIA RTX 5000 Ada Generation": (8, 9),
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": (12, 0),
        "Tesla V100-SXM2-16GB": (7, 0),
        "NVIDIA B200": (10, 0),
        "NVIDIA A10G": (8, 6),
        "Mystery": None,
    }
    assert {kind: Device(kind).capability for kind in known} == known
