"""Softmaxes are found by their equations, and differentiated as JAX does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxact
from jaxact._form.softmax import softmax_p, softmaxes, with_softmaxes
from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.flow import flow
from jaxact._jaxpr.links import Links
from jaxact._plan.facts import ACTIVATION
from jaxact._plan.program import Program
from support.gpu_target import needs_target
from support.programs import gradient_error, relative_error
from support.variants import mostly_thorough

pytestmark = pytest.mark.unoptimized

X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 64)), jnp.float32)


def by_hand(axis, keepdims=True):
    def softmax(x):
        e = jnp.exp(x - lax.stop_gradient(x.max(axis, keepdims=True)))
        sums = e.sum(axis, keepdims=keepdims)
        return e / (sums if keepdims else jnp.expand_dims(sums, axis))

    return softmax


def quotient(e):
    return e / e.sum(-1, keepdims=True)


SOFTMAXES = {
    "rows": jax.nn.softmax,
    "columns": lambda x: jax.nn.softmax(x, 0),
    "both": lambda x: jax.nn.softmax(x, (0, 1)),
    "by hand": by_hand(-1),
    "columns, expanded": by_hand(0, keepdims=False),
    "bfloat16": lambda x: jax.nn.softmax(x.astype(jnp.bfloat16)).astype(x.dtype),
    "heads and queries change places": lambda x: quotient(
        jnp.exp(x).reshape(4, 4, 64).transpose(1, 0, 2)
    ),
    "a part": lambda x: quotient(jnp.exp(x)[:, :24]),
}
OTHERS = {
    "sums of others": lambda x: jnp.exp(x) / jnp.exp(2 * x).sum(-1, keepdims=True),
    "sums read too": lambda x: (
        (e := jnp.exp(x)) / (s := e.sum(-1, keepdims=True)) + jnp.log(s)
    ),
    "moved and read too": lambda x: quotient((e := jnp.exp(x)).T) + e.T,
    "exponential read too": lambda x: (e := jnp.exp(x)) / e.sum(-1, keepdims=True) + e,
    "sums along the other axis": lambda x: (
        (e := jnp.exp(x[:, :16])) / e.sum(0, keepdims=True).T
    ),
    "a mean": lambda x: (e := jnp.exp(x)) / e.mean(-1, keepdims=True),
    "no exponential": lambda x: (e := x * x) / e.sum(-1, keepdims=True),
}


def count(f):
    jaxpr, _ = open_jaxpr(jax.make_jaxpr(f)(X))
    return len(softmaxes(Program(jaxpr)))


@pytest.mark.parametrize("f", SOFTMAXES.values(), ids=SOFTMAXES)
def test_they_are_found(f):
    assert count(f) == 1


@pytest.mark.parametrize("f", OTHERS.values(), ids=OTHERS)
def test_others_are_not(f):
    assert count(f) == 0


@pytest.mark.parametrize(
    "name", mostly_thorough([*SOFTMAXES, *OTHERS], ["rows", "bfloat16"])
)
def test_the_gradient_is_that_of_jax(name):
    f = (SOFTMAXES | OTHERS)[name]
    exact = jaxact.Policy(rules=(jaxact.Rule(jaxact.Exact()),))
    small = jaxact.compress(f, activations=0, policy=exact)
    out = f(X)
    c = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
    gradient = lambda f: jax.jit(jax.grad(lambda x: (f(x) * c).sum()))(X)
    got, want = gradient(small), gradient(f)
    assert jnp.array_equal(jax.jit(small)(X), jax.jit(f)(X))
    # A product is rounded by half a unit; the sums have up to 1024 terms, whose
    # roundings add up in pairs: ten more. 64 units bound both orders of evaluation.
    dtype = jnp.bfloat16 if name == "bfloat16" else jnp.float32
    epsilon = float(jnp.finfo(dtype).eps)
    assert jnp.abs(got - want).max() <= 64 * epsilon * jnp.abs(want).max()


ALIKE = {
    "rows": lambda x: jax.nn.softmax(x.reshape(-1, 16)),
    "columns": lambda x: jax.nn.softmax(x, 0),
    "vmapped": jax.vmap(lambda x: jax.nn.softmax(x.reshape(-1, 16))),
}


@pytest.mark.parametrize("softmax", ALIKE.values(), ids=ALIKE)
def test_cotangents_that_are_alike_leave_little_noise(softmax):
    """Their mean counts for nothing; times what rounded rows lack of 1 it was noise."""
    # Near 1 / 16 the cosine differs from 1 by 2e-3.
    f = lambda x: jnp.sin(softmax(jax.nn.sigmoid(x))).sum()
    gradient = lambda f: jax.jit(jax.grad(f))(X)
    small = jaxact.compress(f, activations=0, policy=jaxact.Policy(8))
    # Two factors, each rounded to 8 bits of a range of 6 to 8 deviations, 1.6 %; the
    # cotangents vary with the factor itself, 3 deviations more. Before, 0.3.
    assert relative_error(gradient(small), gradient(f)) < 0.1


READERS = {
    "a function": (lambda y: jnp.sin(y), False),
    "a product with weights": (lambda y: y @ X.T, True),
    "a product past dropout": (lambda y: lax.select(X > 0, y, 0 * y) @ X.T, True),
    "a logarithm": (lambda y: jnp.log(y + 1e-9), True),
}


@pytest.mark.parametrize("name", READERS)
def test_whether_a_product_or_a_pole_reads_it(name):
    """Attention takes one sum along its scores, where two more change nothing."""
    f, is_plain = READERS[name]
    jaxpr, _ = open_jaxpr(jax.make_jaxpr(lambda x: f(by_hand(-1)(x)))(X))
    program = Program(jaxpr, flow(jaxpr, [ACTIVATION]))
    (eqn,) = [
        eqn
        for eqn in with_softmaxes(program, Links()).eqns
        if eqn.primitive is softmax_p
    ]
    assert eqn.params["is_plain"] == is_plain


def attention(w, x):
    """As in most networks: scores and softmax in float32, all else in bfloat16."""
    q, k, v = jnp.split((x @ w).reshape(2, -1, 12, 64), 3, axis=2)
    return x + jax.nn.dot_product_attention(q, k, v).reshape(x.shape)


def gradient(attend):
    return jax.grad(lambda w, x: jnp.sum(attend(w, x).astype(jnp.float32) ** 2))


@pytest.mark.slow
@needs_target
def test_attention_in_two_precisions_on_a_gpu():
    """A sum over rows and what it scales are two kernels. Where both read one decoded
    array, in float32, this took 1.6 times as long and a fifth more than uncompressed;
    where a float32 array was written to pack, 1.3 times as long.
    """
    shaped = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    small = jaxact.compress(attention, policy=jaxact.Policy(4), activations="x")
    steps = {"plain": gradient(attention), "4 bits": gradient(small)}
    sizes = shaped((256, 768)), shaped((2, 4096, 256))
    with jax.numpy_dtype_promotion("standard"):  # as jax.nn asks
        plain, packed = jaxact.compare(steps, *sizes, target="h100").rows
    assert packed.predicted_seconds < 1.15 * plain.predicted_seconds
    assert packed.memory.temp_bytes < 0.9 * plain.memory.temp_bytes


def test_both_decoded_copies_of_narrowed_weights_are_equal():
    """So a draw of the gradient is y (t - sum(y t)) with the same rounded y twice.

    That y is read off the gradients of one column's weight, -y y_0 and y_0 - y_0^2.
    """
    x = X.at[:, 0].add(3)
    values = jnp.eye(64, dtype=jnp.bfloat16)  # a product, as in attention
    narrowed = lambda x: (jax.nn.softmax(x).astype(values.dtype) @ values).astype(
        x.dtype
    )
    small = jaxact.compress(narrowed, policy=jaxact.Policy(4))
    pull = jax.jit(lambda ct: jax.vjp(small, x)[1](ct)[0])
    assert len(jaxact.residuals(small, x).rows) == 1
    column = pull(jnp.zeros_like(x).at[:, 0].set(1))
    first = (1 - jnp.sqrt(1 - 4 * column[:, :1])) / 2
    y = (-column / first).at[:, :1].set(first)
    t = jnp.asarray(np.random.default_rng(1).normal(size=x.shape), jnp.bfloat16)
    t = t.astype(jnp.float32)
    expected = y * (t - jnp.sum(y * t, -1, keepdims=True))
    # The root loses a few of float32's 2^-24, first is at least 0.01.
    np.testing.assert_allclose(pull(t), expected, rtol=1e-4, atol=1e-6)
    assert 0.01 < relative_error(y, jax.nn.softmax(x)) < 0.3


INDEX = jnp.arange(4)[3]
PARTS = {
    "split": lambda x: jnp.split(jnp.exp(x), [1], -1)[1],
    "unstacked": lambda x: jnp.unstack(jnp.exp(x.reshape(2, 8, 64)))[1],
    "sliced": lambda x: lax.dynamic_slice_in_dim(jnp.exp(x), 3, 32, -1),
    "sliced anywhere": lambda x: lax.dynamic_slice_in_dim(jnp.exp(x), INDEX, 32, -1),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_a_part_of_exponentials_over_its_sums(part):
    """All of these raised an error."""

    def f(x):
        a = part(x)
        return jnp.sin(a / a.sum(-1, keepdims=True))

    assert gradient_error(f, X, policy=jaxact.Policy(8)) < 0.02


def test_stopped_exponentials_over_their_sums():
    def f(x):
        a = lax.stop_gradient(jnp.exp(x))
        return x * (a / a.sum(-1, keepdims=True))

    assert gradient_error(f, X, policy=jaxact.Policy(8)) < 0.02


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float8_e4m3fn])
@pytest.mark.parametrize("is_inside", [False, True], ids=["sums", "elements"])
def test_sums_that_are_rounded_are_no_softmax(dtype, is_inside):
    """JAX has no derivative of an integer, and rounds that of a float8."""

    def f(x):
        e = jnp.exp(x)
        rounded = lambda x: x.astype(dtype).astype(jnp.float32)
        sums = (rounded(e) if is_inside else e).sum(-1, keepdims=True)
        return jnp.sin(e / (sums if is_inside else rounded(sums)))

    assert gradient_error(f, X, policy=jaxact.Policy(8)) < 0.02
