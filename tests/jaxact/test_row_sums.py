"""Sums along short rows, which share a group of codes, that a pole is near to.

The oracle is JAX's own gradient: at 8 bits one draw must lie near it, whatever the
rows' sizes are.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxact
from support.programs import gradient_error

pytestmark = [
    pytest.mark.unoptimized,
    # What is by segment alone stays exact, and nothing else is there.
    pytest.mark.filterwarnings("ignore::jaxact.CompressionWarning"),
]


def rows_of(columns, spread):
    """16 rows share a group; their means, or logarithms, have this deviation."""
    noise, offsets = jax.random.split(jax.random.key(columns))
    means = spread * jax.random.normal(offsets, (8, 64, 1))
    return jax.random.normal(noise, (8, 64, columns)), means


NOISE, OFFSETS = rows_of(16, 10)
SCORES = NOISE + OFFSETS
VALUES = jax.random.normal(jax.random.key(1), (16, 32))


# Three of sixteen, the smallest in some rows; all but itself.
POSITIVE = (jnp.arange(16) < 3).astype(jnp.float32)[None, None]
OTHER = (jnp.arange(16) != 8).astype(jnp.float32)[None, None]


def without_maximum(f):
    return lambda s: f(jnp.exp(s))


def total(e):
    return e.sum(-1, keepdims=True)


# Without a maximum; errors were 2 to 20 gradients for logarithms, 1e12 for quotients.
EXPONENTIALS = {
    "logarithm": without_maximum(lambda e: jnp.log(e.sum(-1))),
    "of a mean": without_maximum(lambda e: jnp.log(e.mean(-1))),
    "of a product": without_maximum(lambda e: jnp.log(e @ jnp.ones(16))),
    "of base 2": lambda s: jnp.log2(jnp.exp2(s).sum(-1)),
    "along columns": lambda s: jnp.log(jnp.exp(s.mT).sum(-2)),
    "along columns, moved later": lambda s: jnp.log(jnp.exp(s).mT.sum(-2)),
    "of parts of rows": without_maximum(
        lambda e: jnp.log(e.reshape(8, 64, 4, 4).sum(-1))
    ),
    "of a slice": without_maximum(lambda e: jnp.log(e[..., 3:].sum(-1))),
    "with a number": without_maximum(lambda e: jnp.log(1 + e.sum(-1))),
    "less another maximum": lambda s: jnp.log(
        jnp.exp(s - OFFSETS - s.max(-1, keepdims=True)).sum(-1)
    ),
    "above a bound": lambda s: jnp.log(jnp.exp(jax.nn.relu(s)).sum(-1)),
    "of positives": without_maximum(
        lambda e: jnp.log((e * POSITIVE).sum(-1) / e.sum(-1))
    ),
    "of positives among others": lambda s: jnp.log(
        ((e := jnp.exp(s) * OTHER) * POSITIVE).sum(-1) / e.sum(-1)
    ),
    "moved quotient": without_maximum(lambda e: e.mT / e.mT.sum(1, keepdims=True)),
    "cross-entropy": lambda s: jnp.log(jnp.exp(s).sum(-1)) - s[..., 3],
    "masked": without_maximum(
        lambda e: jnp.log(jnp.where(jnp.arange(16) > 3, e, 0).sum(-1))
    ),
    "quotient": without_maximum(lambda e: e / total(e)),
    "sine of a quotient": without_maximum(lambda e: jnp.sin(3 * (e / total(e)))),
    "weighted mean": without_maximum(lambda e: (e @ VALUES) / total(e)),
    "by an inverse": without_maximum(lambda e: (e @ VALUES) * (1 / total(e))),
    "by an inverse power": without_maximum(lambda e: (e @ VALUES) * total(e) ** -1),
    "softmax by a logarithm": lambda s: jnp.exp(s - jnp.log(total(jnp.exp(s)))),
}


def rms_by(power):
    return lambda x: x * power((x * x).mean(-1, keepdims=True))


# Their rows' sizes span e^12; errors were 2e3 to 2e7 gradients.
SIZES = {
    "root mean square": rms_by(lambda m: jnp.exp(-0.5 * jnp.log(m))),
    "with epsilon": rms_by(lambda m: jnp.exp(-0.5 * jnp.log(m + 1e-6))),
    "as a divisor": rms_by(lambda m: 1 / jnp.exp(0.5 * jnp.log(m))),
    "of base 2": rms_by(lambda m: jnp.exp2(jnp.log2(m) / -2)),
    "sum of sizes": lambda x: x * jnp.exp(-jnp.log(jnp.abs(x).sum(-1, keepdims=True))),
    "its logarithm": lambda x: jnp.log((x * x).sum(-1)),
    "length": lambda x: jnp.log(jnp.sqrt((x * x).sum(-1))) * 3,
    "cubes": lambda x: x / jnp.cbrt((jnp.abs(x) ** 3).mean(-1, keepdims=True)),
}


def cosines(divide):
    def f(x):
        a, b = x[:, :32], x[:, 32:]
        return divide(a @ b.mT, length(a)[:, :, None], length(b)[:, None, :])

    return f


def length(x):
    return jnp.linalg.norm(x, axis=-1)


def gram(x):
    products = x @ x.mT
    sizes = (x * x).sum(-1)
    return products / jnp.sqrt(sizes[:, :, None] * sizes[:, None, :])


def one_by_one(x):
    a, b = x[:, :32], x[:, 32:]
    return (a * b).sum(-1) / (length(a) * length(b))


# Divided after the product: by rows' and columns' lengths, 3e7 to 2e12 gradients.
COSINES = {
    "by a product": cosines(lambda d, a, b: d / (a * b)),
    "one after another": cosines(lambda d, a, b: d / a / b),
    "by inverses": cosines(lambda d, a, b: d * (1 / a) * (1 / b)),
    "epsilon": cosines(lambda d, a, b: d / (a * b + 1e-8)),
    "a least divisor": cosines(lambda d, a, b: d / jnp.maximum(a * b, 1e-8)),
    "nonlinear": cosines(lambda d, a, b: jnp.tanh(d / (a * b))),
    "with itself": gram,
    "one by one": one_by_one,
}


def alternated(k):
    for _ in range(4):
        k = k / k.sum(-1, keepdims=True)
        k = k / k.sum(-2, keepdims=True)
    return k


def by_vectors(k):
    columns = jnp.ones((8, 16))
    for _ in range(4):
        rows = 1 / jnp.einsum("bij,bj->bi", k, columns)
        columns = 1 / jnp.einsum("bij,bi->bj", k, rows)
    return rows[:, :, None] * k * columns[:, None]


def scanned(k):
    def step(k, _):
        k = k / k.sum(-1, keepdims=True)
        return k / k.sum(-2, keepdims=True), None

    return lax.scan(step, k, None, length=4)[0]


# Sinkhorn's iterations: 6e14 and 15 gradients.
SINKHORN = {
    "alternated": without_maximum(alternated),
    "by vectors": without_maximum(by_vectors),
    "scanned": without_maximum(scanned),
}

CASES = [
    *(pytest.param(f, SCORES, id=f"exp {name}") for name, f in EXPONENTIALS.items()),
    *(
        pytest.param(f, NOISE * jnp.exp(0.3 * OFFSETS), id=f"size {name}")
        for name, f in SIZES.items()
    ),
    *(
        pytest.param(f, NOISE[..., :8] * jnp.exp(0.3 * OFFSETS), id=f"cosine {name}")
        for name, f in COSINES.items()
    ),
    *(pytest.param(f, SCORES, id=f"sinkhorn {name}") for name, f in SINKHORN.items()),
]


def draw_error(f, x):
    """Of one draw's gradient at 8 bits, relative to the gradient."""
    return gradient_error(f, x, policy=jaxact.Policy(8), seed=2)


# A row over its sum, or its root, lies in a range of at most 8 deviations; stochastic
# rounding errs by half of a 255th of it, in each of two rounded factors.
MOST = 8 / 255


@pytest.mark.parametrize("f, x", CASES)
def test_rows_of_any_sum_share_a_group(f, x):
    assert draw_error(f, x) < MOST


def mean_score(s):
    """The local derivative of its numerators has the exponentials' sizes."""
    e = jnp.exp(s)
    return (e * (s - OFFSETS.astype(s.dtype))).sum(-1) / e.sum(-1)


NARROW = {
    "logarithm": EXPONENTIALS["logarithm"],
    "by a cast inverse": lambda s: (
        (jnp.exp(s).astype(jnp.float32) @ VALUES)
        * (1 / total(jnp.exp(s))).astype(jnp.float32)
    ),
    "mean score": mean_score,
}


@pytest.mark.parametrize("f", NARROW.values(), ids=NARROW)
def test_rows_of_bfloat16(f):
    # Its own rounding is 2^-9 beside that, in some operations one after another.
    assert draw_error(f, SCORES.astype(jnp.bfloat16)) < MOST + 4 / 2**9


WRAPPED = [
    (EXPONENTIALS["weighted mean"], SCORES),
    (SIZES["root mean square"], NOISE * jnp.exp(0.3 * OFFSETS)),
    (COSINES["epsilon"], NOISE[..., :8] * jnp.exp(0.3 * OFFSETS)),
    (SINKHORN["scanned"], SCORES),
]


@pytest.mark.thorough
@pytest.mark.parametrize("f, x", WRAPPED, ids=["exp", "size", "cosine", "sinkhorn"])
def test_rows_under_vmap_and_in_a_scan(f, x):
    both = jnp.stack([x, x / 2])
    assert draw_error(jax.vmap(f), both) < MOST
    scan = lambda xs: lax.scan(lambda carry, x: (carry, f(x)), 0, xs)[1]
    assert draw_error(scan, both) < MOST


SEGMENTS = jax.random.randint(jax.random.key(3), (2048,), 0, 32)
ONE_HOT = jax.nn.one_hot(SEGMENTS, 32)
EDGES = jax.random.normal(jax.random.key(4), (2048,))
EDGES = EDGES + 6 * jax.random.normal(jax.random.key(5), (32,))[SEGMENTS]
FEATURES = jax.random.normal(jax.random.key(6), (2048, 16))


def segment_sum(x):
    return jax.ops.segment_sum(x, SEGMENTS, 32)


# By products with one-hot rows: 1 to 3e3 gradients; sums over sums: 2.
BY_SEGMENT = {
    "divided": lambda e: e / (ONE_HOT @ (ONE_HOT.T @ e)),
    "epsilon": lambda e: jnp.tanh(e / (ONE_HOT @ (ONE_HOT.T @ e) + 1e-16)),
    "inverse": lambda e: e * (ONE_HOT @ (1 / (ONE_HOT.T @ e))),
    "a product reads it": lambda e: (
        ONE_HOT.T @ (FEATURES * (e / (ONE_HOT @ (ONE_HOT.T @ e)))[:, None])
    ),
    "sums over sums": lambda e: (
        segment_sum(e[:, None] * FEATURES) / segment_sum(e)[:, None]
    ),
    "logarithm": lambda e: jnp.log(segment_sum(e)),
}


@pytest.mark.parametrize("f", BY_SEGMENT.values(), ids=BY_SEGMENT)
def test_segments_of_any_sum_share_a_group(f):
    f = without_maximum(f)
    assert draw_error(f, EDGES) < MOST
    assert draw_error(jax.vmap(f), jnp.stack([EDGES, EDGES / 2])) < MOST


def rows_of_table(f, x):
    return jaxact.residuals(jaxact.compress(f, policy=jaxact.Policy(8)), x).rows


@pytest.mark.parametrize("f", [BY_SEGMENT["sums over sums"], SINKHORN["scanned"]])
def test_the_table_says_why_exponentials_stay_exact(f):
    x = SCORES if f is SINKHORN["scanned"] else EDGES
    f = f if f is SINKHORN["scanned"] else without_maximum(f)
    rows = [row for row in rows_of_table(f, x) if row.shape == x.shape]
    assert any("may have any size" in row.why for row in rows)


def test_slopes_in_the_sizes_have_not_those_of_their_rows():
    """Stored as if they had, -x / size^2 had an error of 0.85 gradients, not 0.03."""

    def f(x):
        rows = jnp.exp(x).reshape(8, -1, 3)
        return jnp.tanh(rows / jnp.sqrt((rows * rows).sum(-1, keepdims=True)))

    x = jax.random.normal(jax.random.key(7), (2064,))
    # Beside the direction of three values little of the cotangent remains: a half.
    assert draw_error(f, x) < 2 * MOST


def shifted(s):
    return jnp.exp(s - s.max(-1, keepdims=True))


BOUNDED = {
    "logsumexp": lambda s: jax.nn.logsumexp(s, -1),
    "log_softmax": jax.nn.log_softmax,
    "by hand": lambda s: jnp.log(shifted(s).sum(-1)),
    "attention in chunks": lambda s: (shifted(s) @ VALUES) / total(shifted(s)),
    "long rows": lambda s: jnp.log(jnp.exp(s.reshape(8, 4, 256)).sum(-1)),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_bounded_sums_need_no_map(name):
    """Networks subtract a maximum: they keep their formats."""
    rows = rows_of_table(BOUNDED[name], SCORES)
    packed = [row for row in rows if not isinstance(row.action, jaxact.Exact)]
    assert packed and all("normalized" not in row.why for row in rows)


def by_blocks(update, finish):
    """Causal attention that keeps a running maximum, and divides at the end."""
    positions = jnp.arange(128)

    def f(q, k, v):
        def step(state, i):
            scores = q @ lax.dynamic_slice_in_dim(k, 32 * i, 32).T / 8
            seen = positions[:, None] >= 32 * i + jnp.arange(32)[None]
            scores = jnp.where(seen, scores, -1e30)
            return update(state, scores, lax.dynamic_slice_in_dim(v, 32 * i, 32)), None

        start = jnp.full(128, -1e30), jnp.zeros(128), jnp.zeros((128, 64))
        (_, size, out), _ = lax.scan(step, start, jnp.arange(4))
        return finish(out, size)

    return f


def with_running_maximum(state, scores, values):
    m, size, out = state
    new = jnp.maximum(m, scores.max(-1))
    old, p = jnp.exp(m - new), jnp.exp(scores - new[:, None])
    return new, size * old + p.sum(-1), out * old[:, None] + p @ values


def without_running_maximum(state, scores, values):
    m, size, out = state
    p = jnp.exp(scores)
    return m, size + p.sum(-1), out + p @ values


@pytest.mark.thorough
@pytest.mark.parametrize("update", [with_running_maximum, without_running_maximum])
@pytest.mark.parametrize(
    "finish",
    [
        lambda out, size: out / size[:, None],
        lambda out, size: out * (1 / size)[:, None],
        lambda out, size: out / jnp.where(size == 0, 1, size)[:, None],
    ],
)
def test_sums_that_a_loop_carries_divide_exactly(update, finish):
    """Their squared inverses were rounded in groups of 256 rows: 0.2 to 0.8."""
    keys = jax.random.split(jax.random.key(3), 3)
    q, k, v = (jax.random.normal(key, (128, 64)) for key in keys)
    f = by_blocks(update, finish)
    cotangent = jax.random.normal(jax.random.key(4), (128, 64))

    def loss(q, k, v):
        return (f(q, k, v) * cotangent).sum()

    small = jaxact.compress(loss, policy=jaxact.Policy(bits=8))
    ours = jax.jit(jax.grad(small, argnums=(0, 1, 2)))(q, k, v)
    for one, true in zip(ours, jax.grad(loss, argnums=(0, 1, 2))(q, k, v), strict=True):
        assert jnp.linalg.norm(one - true) < MOST * jnp.linalg.norm(true)


@pytest.mark.parametrize("scale", [lambda s: lax.rsqrt(s + 1e-6), lambda s: 1 / s])
def test_scales_that_a_loop_returns_are_exact(scale):
    """Rounded in one group for 256 rows they had errors of 1 to 3 gradients."""
    sizes = jnp.exp(2 * jax.random.normal(jax.random.key(5), (128, 1)))
    x = sizes * jax.random.normal(jax.random.key(6), (128, 64))
    f = lambda x: jnp.tanh(x * lax.map(lambda r: scale((r * r).mean()), x)[:, None])
    assert draw_error(lambda x: f(jnp.sin(x) + x), x) < MOST
