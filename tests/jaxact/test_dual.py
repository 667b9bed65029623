"""`DualPrecision`: exact block means, zeros that survive, less noise on smooth data."""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from scipy import stats

import jaxact
from jaxact import DualPrecision, Policy, Quantize
from jaxact._codec.blocks import Blocks
from support import oracle
from support.eight_devices import collectives, run_on_eight_devices
from support.subjects import jit_interpreted

pytestmark = pytest.mark.unoptimized

FAILURE = 1e-9
SEED = np.uint32(7)


def normal(shape, seed=0):
    x = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(x, jnp.float32)


def offset(shape, seed=0):
    """Noise around an own level for each sample and channel: means always pay."""
    levels = np.random.default_rng(seed + 1).uniform(-50, 50, (shape[0], shape[-1]))
    levels = levels.reshape(shape[0], *(1,) * (len(shape) - 2), shape[-1])
    return normal(shape, seed) + jnp.asarray(levels, jnp.float32)


def smooth(shape, seed=0):
    """Images whose spectrum falls like 1 / frequency**1.5, as natural ones' nearly."""
    z = np.random.default_rng(seed).standard_normal(shape)
    along = [np.fft.fftfreq(n, 1 / n) for n in shape[1:3]]
    radius = np.maximum(np.hypot(along[0][:, None], along[1]), 1)[None, :, :, None]
    x = np.fft.ifft2(np.fft.fft2(z, axes=(1, 2)) / radius**1.5, axes=(1, 2)).real
    return jnp.asarray(x / x.std(), jnp.float32)


@functools.cache
def jitted(action, shape, dtype):
    """Encoding followed by decoding, quickly compiled."""

    def run(x):
        stored = action.encode(x, SEED)
        return stored, action.decode(stored, shape, dtype)

    return jit_interpreted(run)


def round_trip(action, x):
    """What is stored, and what it decodes to."""
    return jitted(action, x.shape, x.dtype)(x)


def block_means(x, axes, block):
    """Mean of each block in float64, block by block."""
    sizes = [min(block, x.shape[axis]) for axis in axes]
    starts = [range(0, x.shape[axis], n) for axis, n in zip(axes, sizes, strict=True)]
    counts = list(x.shape)
    for axis, start in zip(axes, starts, strict=True):
        counts[axis] = len(start)
    means = np.zeros(counts)
    for place in np.ndindex(*map(len, starts)):
        part, whole = [slice(None)] * x.ndim, [slice(None)] * x.ndim
        for axis, size, i in zip(axes, sizes, place, strict=True):
            part[axis], whole[axis] = slice(i * size, (i + 1) * size), slice(i, i + 1)
        inside = np.asarray(x, np.float64)[tuple(part)]
        means[tuple(whole)] = inside.mean(axes, keepdims=True)
    return means


IMAGES = [(32, 32), (28, 28), (14, 14), (7, 7), (5, 9)]


@pytest.mark.parametrize("size", IMAGES, ids=str)
def test_means_are_those_of_the_elements_really_there(size):
    x = offset((2, *size, 20))
    stored, _ = round_trip(DualPrecision(2), x)
    wanted = block_means(x, (1, 2), 8)
    assert stored.mean.dtype == jnp.bfloat16 and stored.mean.shape == wanted.shape
    # Half a unit in the last place of bfloat16, and float32 sums of 64 below 64.
    bound = abs(wanted) * 2.0**-8 + 64 * 2.0**-23 * 64
    assert (abs(np.asarray(stored.mean, np.float64) - wanted) <= bound).all()
    assert (stored.mean != 0).all()


@pytest.mark.parametrize(
    "shape, axes, block",
    [((2, 5, 9, 3), (1, 2), 8), ((3, 20, 4), (1,), 8), ((2, 3, 7, 6), (2, 3), 4)],
)
def test_a_mean_and_what_it_leaves_are_the_whole(shape, axes, block):
    x, blocks = normal(shape), Blocks(shape, axes, block)
    mean = blocks.mean(x).astype(jnp.bfloat16)
    up = np.asarray(blocks.spread(mean.astype(jnp.float32)))
    # The mean of a block is at each of its elements.
    for place in np.ndindex(*shape):
        at = tuple(
            i // min(block, n) if axis in axes else i
            for axis, (i, n) in enumerate(zip(place, shape, strict=True))
        )
        assert up[place] == np.float32(mean[at])
    rest = np.asarray(x) - up
    np.testing.assert_allclose(up + rest, x, rtol=0, atol=2.0**-22)


@pytest.mark.parametrize(
    "shape",
    [(2, 16, 16, 256), (2, 14, 14, 24), (3, 40, 32), (2, 8, 8, 8, 16)],
    ids=str,
)
def test_zeros_of_a_relu_come_back_exact(shape):
    x = jnp.maximum(normal(shape), 0)
    stored, back = round_trip(DualPrecision(2), x)
    assert (back[x == 0] == 0).all()
    # And all of it is what Quantize would return.
    np.testing.assert_array_equal(back, round_trip(Quantize(2), x)[1])
    assert (stored.mean == 0).all()


def costs(x, group_size):
    """Squared range times elements that get noise, for each group of float64 rows."""
    lead, row, num_groups, group = oracle.layout(x.shape, group_size)
    rows = np.asarray(x, np.float64).reshape(-1, row)
    found = []
    for values in rows:
        for part in (values[i * group : (i + 1) * group] for i in range(num_groups)):
            noisy = np.count_nonzero(part) if part.min() == 0 else len(part)
            found.append(np.ptp(part) ** 2 * noisy)
    return np.array(found).reshape(*lead, num_groups)


@pytest.mark.parametrize(
    "shape, axes",
    [
        ((2, 16, 16, 300), None),  # groups of channels
        ((2, 14, 14, 24), None),  # rows of 14 * 24, blocks of 8 * 24 and 6 * 24
        ((2, 9, 32, 64), None),  # a block is two groups of a row
        ((2, 32, 32, 32), (2, 3)),  # 8 rows of 32 to a group
        ((2, 12, 9, 20), (2, 3)),  # rows that hold the blocks of several channels
    ],
    ids=str,
)
def test_means_are_stored_where_they_pay(shape, axes):
    # A smooth part, and one of a ReLU's output, in each image.
    relu = jnp.maximum(normal(shape, 1), 0)
    half = (jnp.arange(shape[1]) < 8)[None, :, None, None]
    x = jnp.where(half, relu, offset(shape, 2))
    action = DualPrecision(2, axes=axes)
    stored, _ = round_trip(action, x)
    blocks = Blocks(shape, axes or (1, 2), 8)
    chosen = np.asarray(blocks.spread(stored.mean.astype(jnp.float32)))
    always = np.asarray(blocks.mean(x).astype(jnp.bfloat16), np.float32)
    always = np.asarray(blocks.spread(jnp.asarray(always)))
    # No group has both, so each group is one of the two it could be.
    cost = [costs(np.asarray(x) - up, 256) for up in (chosen, always, 0 * chosen)]
    assert ((cost[0] == cost[1]) | (cost[0] == cost[2])).all()
    # The choice is of no more noise than either.
    assert cost[0].sum() <= min(cost[1].sum(), cost[2].sum()) * (1 + 1e-6)
    if axes is None:
        kept = np.asarray(stored.mean != 0)
        assert kept[:, 1:].all() and not kept[:, 0].any()


@pytest.mark.parametrize(
    "shape, factor", [((4, 32, 32, 64), 0.6), ((2, 14, 14, 256), 0.8)], ids=str
)
def test_smooth_images_have_less_error(shape, factor):
    # Measured 0.47 and 0.69 of the squared error of Quantize(2).
    x = smooth(shape)
    error = lambda action: jnp.square(round_trip(action, x)[1] - x).mean()
    assert error(DualPrecision(2)) < factor * error(Quantize(2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_mean_of_draws_is_the_value(dtype):
    # Each element takes two values. Squared z-scores of independent elements sum to
    # about chi-square; those are left out whose fraction is within 0.1 of a value, so
    # that 512 draws are close to normal. What is decoded stays in float32, as rounding
    # it to nearest is no part of the codec's noise.
    x = smooth((2, 16, 16, 32)).astype(dtype)
    action, draws = DualPrecision(2), 512
    run = lambda seed: action.decode(action.encode(x, seed), x.shape, np.float32)
    back = jax.jit(lambda seeds: jax.lax.map(run, seeds))(jnp.arange(draws, dtype="u4"))
    back, exact = np.asarray(back, np.float64), np.asarray(x, np.float64)
    levels = np.sort(back, 0)
    step = levels[-1] - levels[0]
    fraction = (exact - levels[0]) / np.where(step > 0, step, 1)
    far = (fraction > 0.1) & (fraction < 0.9)
    step, fraction = step[far], fraction[far]
    spread = step * np.sqrt(fraction * (1 - fraction) / draws)
    z = (back.mean(0) - exact)[far] / spread
    assert far.mean() > 0.5
    assert FAILURE < stats.chi2.sf((z**2).sum(), far.sum()) < 1 - FAILURE
    assert abs(z.sum()) / np.sqrt(far.sum()) < stats.norm.isf(FAILURE / 2)


ODD = [
    (),
    (7,),
    (2, 1, 1, 8),
    (2, 3, 3, 8),
    (0, 8, 8, 4),
    (2, 8, 0, 4),
    (1, 7, 1, 7, 2),
]


@pytest.mark.parametrize(
    "shape, axes", [*((s, None) for s in ODD), ((2, 17, 11), (-1, 1))], ids=str
)
def test_odd_sizes(shape, axes):
    x = offset(shape) if len(shape) > 2 and math.prod(shape) else normal(shape)
    _, back = round_trip(DualPrecision(8, axes=axes), x)
    assert back.shape == shape and back.dtype == x.dtype
    reach = np.ptp(np.asarray(x)) if x.size else 0
    assert (abs(back - x) <= reach / 200).all()


@pytest.mark.parametrize("shape", [(5, 64), (2, 2, 3, 64)], ids=str)
def test_without_enough_to_average_it_is_quantize(shape):
    x = normal(shape)
    stored, back = round_trip(DualPrecision(3), x)
    assert stored.mean is None
    np.testing.assert_array_equal(back, round_trip(Quantize(3), x)[1])


def test_axes_say_what_is_averaged():
    # Maps of 16 x 24, each block around a level of its own.
    levels = Blocks((2, 32, 16, 24), (2, 3), 8).spread(normal((2, 32, 2, 3), 1))
    x = normal(levels.shape) + 50 * levels
    wanted = block_means(x, (2, 3), 8)
    for axes in ((2, 3), (-2, -1), [3, 2], (2, 3, 7)):
        stored = jax.eval_shape(DualPrecision(2, axes=axes).encode, x, jnp.uint32(0))
        assert stored.mean.shape == wanted.shape == (2, 32, 2, 3)
    stored, _ = round_trip(DualPrecision(2, axes=(2, 3)), x)
    np.testing.assert_allclose(
        stored.mean.astype(jnp.float32), wanted, rtol=2.0**-8, atol=2.0**-12
    )
    assert DualPrecision(axes=[2, 3]) == DualPrecision(axes=(2, 3))


@pytest.mark.parametrize(
    "size, bits", [((56, 56), 2.375), ((14, 14), 2.452), ((7, 7), 2.452)], ids=str
)
def test_bits_an_element(size, bits):
    # 2 + 16 ceil(H/8) ceil(W/8) / HW + 32 / 256: one block of 49, or four of 196.
    x = jax.ShapeDtypeStruct((2, *size, 256), jnp.float32)
    stored = jax.eval_shape(DualPrecision(2).encode, x, jnp.uint32(0))
    stored_bytes = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(stored))
    assert stored_bytes * 8 / math.prod(x.shape) == pytest.approx(bits, abs=0.001)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_ends_of_a_dtype_stay_finite(dtype):
    largest = ml_dtypes.finfo(dtype).max
    signs = np.sign(np.asarray(normal((2, 9, 9, 32))))
    for x in (signs * largest, np.where(signs > 0, largest, largest / 2)):
        x = jnp.asarray(x.astype(dtype))
        _, back = round_trip(DualPrecision(2), x)
        wide = np.asarray(x, np.float64)
        error = abs(np.asarray(back, np.float64) - wide).max()
        assert np.isfinite(error) and error <= np.ptp(wide) / 3 * 1.02


def test_infinities_saturate_and_nan_is_loud_where_they_are():
    x = offset((2, 16, 16, 256))
    x = x.at[0, 3, 5, 7].set(np.inf).at[0, 12, 5, 7].set(-np.inf)
    x = x.at[1, 3, 5, 7].set(np.nan)
    stored, back = round_trip(DualPrecision(4), x)
    assert np.isfinite(np.asarray(stored.mean, np.float32)).all()
    is_nan = np.isnan(back)
    assert is_nan[1, 3, 5].all() and is_nan.sum() == 256
    rest = np.isfinite(x) & ~is_nan
    assert np.isfinite(back[~is_nan]).all()
    assert abs(back - x)[rest].max() < 110 / 15  # of a group of +-55 at most


def test_policies_store_through_it():
    action = DualPrecision(4)

    def layer(p, x):
        return jnp.tanh(x) @ p

    p, x = jnp.eye(64), normal((4, 16, 16, 64))
    small = jaxact.compress(layer, policy=Policy(default=action), activations="x")
    rows = jaxact.residuals(small, p, x).rows
    assert {row.action for row in rows} == {action}
    assert {row.bias for row in rows} == {"unbiased"}
    # 4 bits, 16 for 64 elements, 32 for a group of 256.
    assert {row.stored_bytes for row in rows} == {x.size * (4 + 16 / 64 + 32 / 256) / 8}
    gradient = lambda f: jax.jit(jax.grad(lambda p: f(p, x).sum()))(p)
    norm = jnp.linalg.norm
    assert norm(gradient(small) - gradient(layer)) < 0.1 * norm(gradient(layer))


def test_vmap_is_a_loop():
    x, action = offset((2, 2, 9, 9, 16)), DualPrecision(3)
    encode = functools.partial(action.encode, seed=SEED)
    loop = jax.tree.map(lambda *rows: jnp.stack(rows), *map(jax.jit(encode), x))
    jax.tree.map(np.testing.assert_array_equal, loop, jax.jit(jax.vmap(encode))(x))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"bits": 9}, "1 to 8"),
        ({"block": 1}, "at least 2"),
        ({"block": 2.0}, "at least 2"),
        ({"axes": 2}, "tuple of axes"),
        ({"axes": ("H", "W")}, "tuple of axes"),
        ({"group_size": 100}, "multiple of 32"),
    ],
)
def test_bad_requests(options, message):
    with pytest.raises(ValueError, match=message):
        DualPrecision(**options)


def test_integers_stay_exact():
    assert "not int32" in DualPrecision().declines((4, 4, 4), jnp.dtype("int32"))


@pytest.mark.thorough
def test_eight_devices_exchange_nothing():
    run_on_eight_devices(__file__)


def check_shardings():
    x, action = offset((8, 9, 16, 64)), DualPrecision(2)
    encode = jit_interpreted(action.encode)
    decode = jit_interpreted(lambda stored: action.decode(stored, x.shape, x.dtype))
    wanted = encode(x, SEED)
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            placed = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
            compiled = encode.lower(placed, SEED).compile()
            stored = compiled(placed, SEED)
            jax.tree.map(np.testing.assert_array_equal, stored, wanted)
            found = collectives(compiled)
            found += collectives(decode.lower(stored).compile())
            assert not found, found


if __name__ == "__main__":
    check_shardings()
