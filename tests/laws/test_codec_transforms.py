"""Formats under jit, vmap, scan and sharding: the same bits wherever they run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from support.eight_devices import collectives, run_on_eight_devices
from support.subjects import (
    SUBJECTS,
    Affine,
    Dithered,
    Index,
    Mask,
    Rotated,
    jitted,
    sample,
)
from support.variants import thorough

pytestmark = pytest.mark.unoptimized

SHAPE = (3, 300)
ADAPTIVE = Rotated(3, group_size=64, is_adaptive=True)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize(
    "subject", [Affine(3), Dithered(4, "bfloat16"), Rotated(2), Mask()], ids=str
)
def test_jit_equals_eager(subject):
    x = sample(subject, SHAPE)
    encode, decode = jitted(subject, SHAPE)
    stored = encode(x, np.uint32(1))
    assert_same(subject.encode(x, np.uint32(1)), stored)
    assert_same(subject.decode(stored, SHAPE), decode(stored))


# All families; widths are the same code, as the other laws show for each.
@pytest.mark.parametrize("subject", SUBJECTS[::2], ids=str)
def test_vmap_equals_a_loop(subject):
    # A group's index counts inside a lane, so a lane draws what it draws alone.
    x, seeds = sample(subject, SHAPE), jnp.arange(3, dtype=jnp.uint32)
    stored = jax.jit(jax.vmap(subject.encode))(x, seeds)
    encode, decode = jitted(subject, SHAPE[1:])
    loop = [encode(row, seed) for row, seed in zip(x, seeds, strict=True)]
    assert_same(stored, jax.tree.map(lambda *rows: jnp.stack(rows), *loop))
    back = jax.jit(jax.vmap(lambda s: subject.decode(s, SHAPE[1:])))(stored)
    assert_same(back, jnp.stack([decode(one) for one in loop]))


def test_lanes_that_share_a_seed_differ_through_their_metadata():
    x = sample(Affine(4), (1, 256))
    x = jnp.concatenate([x, x * np.float32(1.5)])  # the same fractions
    one_seed = jax.jit(jax.vmap(Affine(4).encode, in_axes=(0, None)))
    words = one_seed(x, np.uint32(0)).words
    assert (words[0] != words[1]).mean() > 0.5


def test_groups_with_equal_values_draw_different_noise():
    x = jnp.tile(sample(Affine(2), (256,)), (4, 2))
    words = jitted(Affine(2), x.shape)[0](x, np.uint32(0)).words.reshape(8, -1)
    assert len(np.unique(np.asarray(words), axis=0)) == 8


@pytest.mark.parametrize(
    "subject", [SUBJECTS[2], Dithered(3), ADAPTIVE, Mask()], ids=str
)
def test_scan_equals_a_loop(subject):
    x, seeds = sample(subject, SHAPE), jnp.arange(3, dtype=jnp.uint32)

    @jax.jit
    def run(x, seeds):
        def body(carry, inputs):
            row, seed = inputs
            stored = subject.encode(row, seed)
            return carry, (stored, subject.decode(stored, SHAPE[1:]))

        return lax.scan(body, None, (x, seeds))[1]

    encode, decode = jitted(subject, SHAPE[1:])
    loop = [encode(row, seed) for row, seed in zip(x, seeds, strict=True)]
    wanted = [(one, decode(one)) for one in loop]
    assert_same(run(x, seeds), jax.tree.map(lambda *rows: jnp.stack(rows), *wanted))


@pytest.mark.parametrize("length", [32, 48])
def test_an_explicit_axis_with_one_device_cuts_nothing(length):
    """`jax.make_mesh` makes such axes, and short rows share a group."""
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = sample(Affine(2), (8, 16, length))
    encode, decode = jitted(Affine(2), x.shape)
    stored = encode(x, np.uint32(7))
    placed = jax.device_put(x, jax.NamedSharding(mesh, jax.P(None, None, "model")))
    found = encode(placed, np.uint32(7))
    assert_same(stored, found)
    assert_same(decode(stored), decode(found))


@thorough
def test_eight_devices_give_the_words_of_one_without_a_collective():
    run_on_eight_devices(__file__)


def check_sharding(subject, x, sharding):
    one = jitted(subject, x.shape)
    stored = one[0](x, np.uint32(7))
    placed = jax.device_put(x, sharding)
    encode = one[0].lower(placed, np.uint32(7)).compile()
    sharded = encode(placed, np.uint32(7))
    assert_same(stored, sharded)
    decode = one[1].lower(sharded).compile()
    assert_same(one[1](stored), decode(sharded))
    for compiled in (encode, decode):
        found = collectives(compiled)
        assert not found, (subject, sharding, found)


def check_shardings():
    auto, explicit = (
        jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
        for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
    )
    batch = jax.P("data")
    specs = [batch, jax.P("data", "model"), jax.P("data", None, "model")]
    for subject in (
        Affine(2),
        Affine(3, "bfloat16", 64),
        Dithered(2),
        Rotated(2),
        ADAPTIVE,
        Index(3),
        Mask(),
    ):
        x = sample(subject, (8, 4, 1024))
        for spec in specs:
            check_sharding(subject, x, jax.NamedSharding(auto, spec))
        # A row that needs padding, and short rows that share a group.
        for shape in ((8, 4, 300), (8, 6, 5, 5)):
            x = sample(subject, shape)
            check_sharding(subject, x, jax.NamedSharding(auto, batch))
    with jax.set_mesh(explicit):
        for subject in (Affine(4), Dithered(2), Rotated(2), ADAPTIVE):
            x = sample(subject, (8, 4, 1024))
            for spec in specs:
                check_sharding(subject, x, jax.NamedSharding(explicit, spec))


if __name__ == "__main__":
    check_shardings()
