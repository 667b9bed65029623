"""Compressed functions on eight devices: the same bits, and no other exchange."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType

import jaxact
from jaxact._memory.targets import TARGETS
from support.eight_devices import run_on_eight_devices
from support.gpu_target import needs_target
from support.layouts import KINDS, LAYOUTS, arguments, variants
from support.sharded_layouts import exchanges

SCRIPT = Path(__file__).parent / "support" / "sharded_layouts.py"
# One of each kind in the quick tests.
QUICK = {("Auto", "fsdp"), ("Explicit", "sequence")}


def eight_gpus():
    """H100s that are not attached."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=TARGETS["h100"].description, topology="1x1x8"
    )
    return topology.devices


@pytest.mark.unoptimized
@pytest.mark.parametrize(
    "kind, name",
    [
        pytest.param(
            kind.name,
            layout.name,
            marks=() if (kind.name, layout.name) in QUICK else pytest.mark.slow,
        )
        for kind in KINDS
        for layout in LAYOUTS
    ],
)
def test_a_layout_exchanges_what_it_does_uncompressed(kind, name):
    run_on_eight_devices(SCRIPT, "network", kind, name)


@pytest.mark.parametrize(
    "check",
    [
        *("bits Auto", "bits Explicit", "explicit", "cuts", "uneven"),
        pytest.param("auto_axes", marks=pytest.mark.slow),
        *("shard_map checked", "shard_map unchecked"),
    ],
)
def test_eight_devices_give_the_bits_of_one(check):
    run_on_eight_devices(SCRIPT, *check.split())


@needs_target
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, layout",
    [
        pytest.param(kind, layout, id=f"{kind.name}-{layout.name}")
        for kind in KINDS
        for layout in LAYOUTS
        # The layouts with one axis alone are compared on CPUs, above. One partitioner
        # serves both kinds: of the first, the layout with two axes.
        if layout.name == "data and tensor"
        or (kind is KINDS[-1] and layout.name in ("fsdp", "sequence"))
    ],
)
def test_eight_gpus_exchange_what_they_do_uncompressed(kind, layout):
    mesh = layout.mesh(kind, eight_gpus())
    args = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        arguments(),
        layout.shardings(mesh),
    )
    with jax.set_mesh(mesh):
        plain, packed = (
            jax.jit(variants(layout, kind)[name])
            .trace(*args)
            .lower(lowering_platforms=("cuda",))
            .compile()
            for name in ("plain", "packed")
        )
    assert exchanges(plain).total() > 0
    assert exchanges(packed) == exchanges(plain)


@pytest.mark.thorough
@needs_target
def test_rows_cut_through_their_groups_take_less_memory():
    """A hidden layer of 768 on four devices; more than 0.8 where XLA gathered it."""
    mesh = jax.sharding.Mesh(
        np.array(eight_gpus()).reshape(2, 4),
        ("data", "model"),
        axis_types=(AxisType.Auto,) * 2,
    )
    array = lambda spec, *shape: jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=jax.NamedSharding(mesh, jax.P(*spec))
    )
    up, down = array((None, "model"), 512, 768), array(("model",), 768, 512)
    x = array(("data",), 8, 128, 512)

    def loss(layers, x):
        for up, down in layers:
            x = x + jax.nn.gelu(x @ up) @ down
        return (x**2).mean()

    def temp(loss):
        traced = jax.jit(jax.grad(loss)).trace([(up, down)] * 4, x)
        compiled = traced.lower(lowering_platforms=("cuda",)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    with jax.set_mesh(mesh):
        packed = temp(jaxact.compress(loss, activations="x"))
        assert packed < 0.45 * temp(loss)
