"""Errors on their way through each equation that is followed, against drawn ones."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from support.backward_programs import Program, agree, draw, normal, quick_jit, uneven

pytestmark = pytest.mark.unoptimized

SIZE = 256
VARIANCE = 1e-4 * (0.5 + uneven(2, SIZE))
START = jnp.int32(120)
TAKEN = jnp.arange(0, SIZE, 2)[::-1]


def square(x):
    return x.reshape(16, 16)


def window(x, start):
    return lax.dynamic_slice(x, [start], [99])


# What a residual is recomputed by before it meets its cotangent.
EQUATIONS = {
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "log": lambda x: jnp.log(5 + x),
    "log1p": lambda x: jnp.log1p(5 + x),
    "sqrt": lambda x: jnp.sqrt(5 + x),
    "rsqrt": lambda x: lax.rsqrt(5 + x),
    "tanh": jnp.tanh,
    "one_minus_square": lambda x: jax.grad(lambda x: jnp.tanh(x).sum())(x),
    "logistic": jax.nn.sigmoid,
    "erf": lax.erf,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "abs": jnp.abs,
    "square": jnp.square,
    "integer_pow": lambda x: (5 + x) ** -2 - (5 + x) ** 3 / 500,
    "pow": lambda x: (5 + x) ** 1.5,
    "div": lambda x: 1.5 / (5 + x) - x / 3,
    "max": lambda x: jnp.maximum(x, 0.3) + jnp.maximum(0.1, x),
    "min": lambda x: jnp.minimum(x, 0.3) - 2 * jnp.minimum(0.1, x),
    "clamp": lambda x: lax.clamp(-0.5, x, 0.5) + x,
    "convert_element_type": lambda x: x.astype(jnp.float16).astype(jnp.float32),
    "same operand twice": lambda x: x * x - x,
    "paths that cancel": lambda x: 2.0 * x - (x + x) + x,
    "paths moved alike": lambda x: square(x).T * 3.0 - square(2 * x).T,
    "paths moved apart": lambda x: x + 2.0 * x[::-1],
    "windows apart": lambda x: window(x, START) + 2.0 * window(x, START + 50),
    "concatenate": lambda x: jnp.concatenate([x[:160], 2.0 * x[120:], jnp.ones(3)]),
    "pad": lambda x: jnp.pad(square(x), ((1, 0), (0, 2)))[::-1],
    "select_n": lambda x: jnp.where(jnp.arange(SIZE) % 3 == 0, x, 2.0 * x - 1),
    "expand_dims": lambda x: lax.squeeze(jnp.expand_dims(x, 0), (0,)),
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x[:, None], (SIZE, 3)),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, [jnp.int32(5)], [100]),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(
        x, jnp.ones(9), [jnp.int32(4)]
    ),
    "gather": lambda x: x[TAKEN],
    "split": lambda x: jnp.split(x, 2)[0] * 3.0,
    "reduce_sum": lambda x: x.reshape(64, 4).sum(1),
    "cumsum": lambda x: jnp.cumsum(x.reshape(64, 4), 1),
    "reduce_window_sum": lambda x: lax.reduce_window(
        x, 0.0, lax.add, (3,), (3,), "SAME"
    ),
    "jit": jax.jit(lambda x: jax.nn.relu(2.0 * x)),
    "optimization_barrier": lambda x: lax.optimization_barrier((x, 2.0 * x))[1],
    "is_finite": lambda x: jnp.where(jnp.isfinite(x), 2.0 * x, x),
    "eq": lambda x: jnp.where((x == jnp.inf) | (x != x), 0.0, 2.0 * x),
}


@pytest.fixture(scope="module")
def cases():
    """For each name the noise, the target and the drawn errors: compiled once."""
    x, programs = jnp.clip(normal(0, SIZE), -1.5, 1.5), {}
    for name, f in EQUATIONS.items():
        out = jax.eval_shape(f, x)
        run = lambda r, g, f=f: [f(r[0]) * g]
        programs[name] = Program(run, [x], normal(3, *out.shape))

    @quick_jit
    def run(variance, errors, values):
        return {
            name: (
                program.measured({0: variance}, values[name])[1][0],
                *program.drawn(0, errors, values[name]),
            )
            for name, program in programs.items()
        }

    values = {name: program.values for name, program in programs.items()}
    return run(VARIANCE, draw(VARIANCE, x.shape), values)


@pytest.mark.parametrize("name", EQUATIONS)
def test_equation(cases, name):
    """By 0.01: errors of deviation 0.01 have a second order of its square, and a kink.

    Half precision, which rounds a drawn error in steps of up to 2^-10, is 0.01 too.
    """
    noise, true, squares = cases[name]
    assert noise is not None
    agree(noise, true, squares, rtol=0.01)
