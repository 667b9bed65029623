"""Residuals are packed as they lie in memory: their dtype, and the order of axes."""

import functools
import math
import warnings

import jax
import jax.numpy as jnp
import pytest

import jaxact
from jaxact import Exact, Policy, Quantize, Rule
from support.gpu_target import needs_target
from support.programs import relative_error
from support.seen import Seen, assert_near, seen
from support.variants import mostly_thorough

pytestmark = pytest.mark.unoptimized

KEYS = jax.random.split(jax.random.key(0), 3)
Q = jax.random.normal(KEYS[0], (2, 48, 4, 8))
K = jax.random.normal(KEYS[1], (2, 40, 4, 8))
W = jax.random.normal(KEYS[2], (2, 48, 40, 4))


def scores(q, k):
    """[2, 48, 40, 4]; the product has them as [2, 4, 40, 48] or [2, 4, 48, 40]."""
    return jnp.einsum("btnh,bsnh->btsn", q, k)


def experts(q, k):
    """With one batch of keys; the product has them as [4, 2, 48, 40]."""
    return jnp.einsum("snh,btnh->btsn", k[0], q)


def steps(q, k):
    x = jnp.exp(experts(q, k))
    return x * jax.lax.map(jnp.sin, x)


ORDERS = {(2, 4, 40, 48), (2, 4, 48, 40), (4, 2, 48, 40)}

MOVED = {
    "a function of a transposed product": lambda q, k: jnp.tanh(scores(q, k)),
    "with masks and constants": lambda q, k: jnp.tanh(
        jnp.where(jnp.arange(40)[:, None] > 3, 0.1 * scores(q, k), -1e9)
    ),
    "a softmax": lambda q, k: -jax.nn.softmax(scores(q, k), axis=2),
    "a batch that is not first": lambda q, k: jnp.tanh(experts(q, k)),
    "two products": lambda q, k: jnp.tanh(scores(q, k) + scores(k=k, q=jnp.sin(q))),
}
LEFT = {
    "beside an argument": lambda q, k: jnp.tanh(scores(q, k) + W),
    "a product as it comes": lambda q, k: jnp.tanh(jnp.einsum("btnh,bsnh->bnts", q, k)),
    "a transposed argument": lambda q, k: jnp.tanh(q.transpose(0, 2, 1, 3)),
    "a batch in a row": lambda q, k: jnp.tanh(jnp.einsum("btnh,bsnh->tbsn", q, k)),
    "steps of a loop": steps,
}


@pytest.mark.parametrize("f", MOVED.values(), ids=MOVED)
def test_after_a_transposed_product_axes_are_in_its_order(f):
    shapes = {a.shape for a in seen(f, Q, K)}
    assert shapes & ORDERS
    assert (2, 48, 40, 4) not in shapes


@pytest.mark.parametrize("f", LEFT.values(), ids=LEFT)
def test_elsewhere_they_stay_in_their_own(f):
    own, shapes = jax.eval_shape(f, Q, K).shape, {a.shape for a in seen(f, Q, K)}
    assert own in shapes
    assert not (shapes - {own}) & ORDERS


@pytest.mark.parametrize("name", MOVED)
def test_a_codec_that_reads_axes_gets_them_in_their_own_order(name):
    shapes = {a.shape for a in seen(MOVED[name], Q, K, is_free_of_axes=False)}
    assert (2, 48, 40, 4) in shapes


CODECS = [Quantize(8), jaxact.Dithered(8), jaxact.Rotated(8), jaxact.Adaptive(8)]


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("name", mostly_thorough(MOVED, ["a softmax"]))
def test_gradients_are_right_in_another_order(name, codec):
    f = MOVED[name]
    gradient = lambda f: jax.jit(jax.grad(lambda q, k: jnp.sum(f(q, k) * W), (0, 1)))
    small = jaxact.compress(f, policy=Policy(default=codec))
    rows = jaxact.residuals(small, Q, K).rows
    assert any(row.action == codec for row in rows)
    # Each factor to 8 bits of a range of at most 8 deviations: 1.3 % of these, and a
    # softmax has two; an element in the wrong place errs by 1.4.
    assert_near(gradient(small)(Q, K), gradient(f)(Q, K), 0.05)


LIFTS = {
    "vmap": jax.vmap,
    "scan": lambda f: lambda q, k: jax.lax.map(lambda args: f(*args), (q, k)),
}


@pytest.mark.parametrize("lift", LIFTS.values(), ids=LIFTS)
def test_the_order_holds_under_transforms(lift):
    small = jaxact.compress(MOVED["a softmax"], policy=Policy(8))
    q, k = jnp.stack([Q, 2 * Q]), jnp.stack([K, K])
    total = lambda f: lambda q, k: jnp.sum(lift(f)(q, k) * W[None])
    got, want = (jax.jit(jax.grad(total(f)))(q, k) for f in (small, MOVED["a softmax"]))
    assert relative_error(got, want) < 0.05  # as above


def narrowed(x, dtype=jnp.bfloat16):
    """A float32 softmax whose narrower copy alone is read, by a product."""
    values = jnp.eye(x.shape[-1], dtype=dtype)
    return (jax.nn.softmax(x).astype(dtype) @ values).astype(x.dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_softmax_is_packed_from_its_narrower_copy(dtype):
    f = functools.partial(narrowed, dtype=dtype)
    codec = Seen(([],))
    small = jaxact.compress(f, policy=Policy(default=codec))
    x = W.reshape(-1, 96)
    pull = lambda f: jax.vjp(f, x)[1](x)[0]
    got, want = pull(small), pull(f)
    assert [a.dtype for a in codec.arrays[0]] == [dtype]
    # The copy is rounded to nearest; the difference of two such products.
    assert relative_error(got, want) < 2 * float(jnp.finfo(dtype).eps)


WIDE = {
    "read as it is too": lambda x: narrowed(x) + jnp.tanh(jax.nn.softmax(x)),
    "float8": functools.partial(narrowed, dtype=jnp.float8_e4m3fn),
    "all float32": functools.partial(narrowed, dtype=jnp.float32),
}


@pytest.mark.parametrize("name", WIDE)
def test_others_are_packed_as_they_are(name):
    codec = Seen(([],))
    small = jaxact.compress(WIDE[name], policy=Policy(default=codec))
    jax.vjp(small, W.reshape(-1, 96))
    assert jnp.float32 in {a.dtype.type for a in codec.arrays[0]}


def test_more_than_8_bits_keep_the_wide_softmax():
    x = W.reshape(-1, 96)
    # Not jitted: XLA may leave out a cast to bfloat16 and back, JAX 0.10's does.
    pull = lambda f: jax.vjp(f, x)[1](x)[0]
    exact = jaxact.compress(narrowed, policy=Policy(rules=(Rule(Exact()),)))
    # In another order of operations: sums of 96 terms, each rounded by 2^-24.
    assert relative_error(pull(exact), pull(narrowed)) < 2**-20
    half = jaxact.compress(narrowed, policy=Policy(default=jaxact.Cast(jnp.float16)))
    # To float16, 2^-11: were it the bfloat16 copy, 2^-9 of each of its elements.
    assert relative_error(pull(half), pull(narrowed)) < 2**-11


def mixed(w, x):
    """Attention with float32 scores in their keys' order, and a cap as Gemma has it."""
    q, k, v = jnp.split((x @ w).reshape(*x.shape[:2], 12, 64), 3, axis=2)
    found = 50 * jnp.tanh(jnp.einsum("btnh,bsnh->btns", q, k) / 400)
    weights = jax.nn.softmax(found.astype(jnp.float32), axis=-1).astype(x.dtype)
    return x + jnp.einsum("btns,bsnh->btnh", weights, v).reshape(x.shape)


def attention(weights, values, w):
    """The product has its result as [2, 8, 32, tokens], the next one reads rows of 256.

    As Flax writes it, for a vision transformer's patches and class token.
    """
    found = jnp.einsum("bkhd,bhqk->bhdq", values, weights)
    return found.transpose(0, 3, 1, 2).reshape(2, -1, 256) @ w


@pytest.mark.thorough
@pytest.mark.parametrize("tokens", [197, 256])
def test_rows_that_waste_are_packed_as_the_next_product_reads_them(tokens):
    shapes = [(2, 8, tokens, tokens), (2, tokens, 8, 32), (256, 16)]
    pairs = zip(KEYS, shapes, strict=True)
    args = [jax.random.normal(key, shape) for key, shape in pairs]
    small = jaxact.compress(attention, policy=Policy(bits=8), activations=(0, 1))
    rows = jaxact.residuals(small, *args).rows
    (row,) = [r for r in rows if r.shape == (2, 8, 32, tokens)]
    # 8 bits an element and 32 a group of 256; padded to 224, a row of 197 takes 9.26.
    assert row.stored_bytes * 8 / math.prod(row.shape) < 8.15
    gradient = lambda f: jax.grad(lambda *args: jnp.sum(f(*args) ** 2), (0, 1, 2))
    assert_near(gradient(small)(*args), gradient(attention)(*args), 0.01)


@pytest.mark.slow
@needs_target
def test_transposed_scores_on_a_gpu():
    """In their own order they were moved in the backward pass, three arrays at a time:
    1.7 times as long as uncompressed, and in a checkpoint 0.89 of its memory.
    """
    shaped = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    small = jaxact.compress(mixed, policy=Policy(4), activations="x")
    gradient = lambda f: jax.grad(
        lambda w, x: jnp.sum(f(w, x).astype(jnp.float32) ** 2)
    )
    again, inside = map(jax.checkpoint, (mixed, small))
    steps = {"plain": mixed, "4 bits": small, "again": again, "inside": inside}
    steps = {name: gradient(f) for name, f in steps.items()}
    sizes = shaped((256, 768)), shaped((2, 4096, 256))
    with warnings.catch_warnings():  # one layer in a checkpoint takes no less
        warnings.simplefilter("ignore", jaxact.CompressionWarning)
        table = jaxact.compare(steps, *sizes, target="h100")
    plain, packed, again, inside = table.rows
    assert packed.predicted_seconds < 1.35 * plain.predicted_seconds
    assert inside.memory.temp_bytes < 0.8 * again.memory.temp_bytes
