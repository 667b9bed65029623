"""Plain JAX functions under test: a new one is one line in PROGRAMS.

Every program is f(params, x) with `x` the activation. Sizes are small but large enough
that residuals are compressed and not kept as small statistics.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxact

WIDTH, BATCH = 64, 16
TOKENS = np.arange(BATCH) % 8


@dataclasses.dataclass(frozen=True)
class Program:
    """A function and how to make its parameters from arrays of the given shapes.

    `is_linear_in_residuals`: every product of residuals on a path of the backward pass
    is of different, independently rounded ones, so gradients are exactly unbiased.
    """

    name: str
    f: Callable[..., Any]
    shapes: dict[str, tuple[int, ...]]
    x_shape: tuple[int, ...] = (BATCH, WIDTH)
    is_linear_in_residuals: bool = False

    def arguments(self, seed: int = 0) -> tuple[Any, jax.Array]:
        rng = np.random.default_rng(seed)  # which, unlike JAX's, compiles nothing
        normal = lambda shape: rng.standard_normal(shape).astype(np.float32)
        params = {
            name: jnp.asarray(normal(shape) / np.float32(shape[0] ** 0.5))
            for name, shape in self.shapes.items()
        }
        return params, jnp.asarray(normal(self.x_shape))


def dense(p, x):
    return jax.nn.relu(x @ p["w"]) @ p["v"]


def gelu_mlp(p, x):
    hidden = checkpoint_name(x @ p["up"], "hidden")
    return x + jax.nn.gelu(hidden) @ p["down"]


def layer_norm(p, x):
    mean = x.mean(-1, keepdims=True)
    rstd = lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return ((x - mean) * rstd * p["gain"][None]) @ p["w"]


def attention(p, x):
    q, k, v = (x @ p[n] for n in ("q", "k", "v"))
    return jax.nn.softmax(q @ k.T / WIDTH**0.5) @ v


def conv_relu(p, x):
    x = lax.conv(x, p["a"], (1, 1), "SAME")
    return lax.conv(jax.nn.relu(x), p["b"], (1, 1), "SAME")


def dropout(p, x):
    keep = jax.random.bernoulli(jax.random.key(7), 0.8, x.shape)
    return jnp.where(keep, jnp.tanh(x @ p["w"]) / 0.8, 0.0)


def embedding(p, x):
    return jnp.tanh(p["table"][TOKENS] @ p["w"] + x)


def recurrent(p, x):
    def cell(h, xt):
        h = jnp.tanh(h @ p["h"] + (xt @ p["x"])[None])
        return h, h.sum(0)

    start = jnp.zeros((BATCH, WIDTH))
    last, sums = lax.scan(cell, start, x)
    return last, sums


def branches(p, x):
    heavy = lambda x: jnp.sin(x @ p["w"])
    return lax.cond(x[0, 0] > 100.0, lambda x: x * 2.0, heavy, x)


def jitted(p, x):
    return jax.jit(lambda x: jax.nn.silu(x @ p["w"]) * x)(x)


def bfloat16(p, x):
    x = x.astype(jnp.bfloat16)
    return (jnp.tanh(x @ p["w"].astype(jnp.bfloat16)) * x).astype(jnp.float32)


def two_outputs(p, x):
    return {"y": jnp.tanh(x @ p["w"]), "none": None, "count": jnp.arange(3)}


W = (WIDTH, WIDTH)


def spectral(p, x):
    """A convolution by transforms, as in Hyena and in FNO: residuals are complex."""
    spectrum = jnp.fft.rfft(x @ p["w"])
    return jnp.fft.irfft(spectrum * jnp.fft.rfft(p["kernel"])[None]) @ p["v"]


PROGRAMS = [
    Program("dense", dense, {"w": W, "v": W}, is_linear_in_residuals=True),
    Program("gelu_mlp", gelu_mlp, {"up": (WIDTH, 256), "down": (256, WIDTH)}),
    Program("layer_norm", layer_norm, {"gain": (WIDTH,), "w": W}),
    Program("attention", attention, {"q": W, "k": W, "v": W}),
    Program(
        "conv_relu",
        conv_relu,
        {"a": (8, 8, 3, 3), "b": (4, 8, 3, 3)},
        (2, 8, 16, 16),
        is_linear_in_residuals=True,
    ),
    Program("dropout", dropout, {"w": W}, is_linear_in_residuals=True),
    Program("embedding", embedding, {"table": (8, WIDTH), "w": W}),
    Program("recurrent", recurrent, {"h": W, "x": W}, (5, WIDTH)),
    Program("branches", branches, {"w": W}, is_linear_in_residuals=True),
    Program("jitted", jitted, {"w": W}),
    Program("bfloat16", bfloat16, {"w": W}, is_linear_in_residuals=True),
    Program(
        "spectral",
        spectral,
        {"w": W, "kernel": (WIDTH,), "v": W},
        is_linear_in_residuals=True,
    ),
    Program("two_outputs", two_outputs, {"w": W}, is_linear_in_residuals=True),
]

each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)


def scalar(f):
    """A smooth scalar of everything floating that `f` returns."""

    def loss(*args, **kwargs):
        leaves = jax.tree.leaves(f(*args, **kwargs))
        floats = [y for y in leaves if jnp.issubdtype(y.dtype, jnp.floating)]
        return sum(jnp.sin(y).mean() + (y**2).mean() for y in floats)

    return loss


def assert_same_bits(a, b, message=None):
    """Pytrees with one structure, equal in dtype, shape and every value."""
    chex.assert_trees_all_equal(a, b, strict=True, custom_message=message)
    assert same_bits(a, b), message  # to chex NaNs are equal


def same_bits(a, b):
    """Whether two pytrees are equal in structure, dtype and every bit."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)


def relative_error(a, b):
    """Norm of the difference over the norm of `b`, all leaves together."""
    flat = lambda t: np.concatenate(
        [np.asarray(x).astype(np.float64).ravel() for x in jax.tree.leaves(t)]
    )
    return np.linalg.norm(flat(a) - flat(b)) / np.linalg.norm(flat(b))


def gradient_error(f, *args, policy, argnums=0, seed=0, jit=False):
    """Relative error of one draw's gradient of sum(f * normal), as float64 norms.

    Args:
      jit: compile it whole. Inside of a shard_map every operation is else compiled
        anew; elsewhere operations were compiled for other tests, and this is slower.
    """

    def loss(f):
        def of(*args):
            out = f(*args)
            ct = jax.random.normal(jax.random.key(seed), out.shape)
            return (out.astype(jnp.float32) * ct).sum()

        return of

    small = jaxact.compress(f, policy=policy, activations=range(len(args)))
    compiled = jax.jit if jit else lambda f: f
    gradient = lambda f: compiled(jax.grad(loss(f), argnums=argnums))(*args)
    return relative_error(gradient(small), gradient(f))


def kept_bytes(f, *args):
    """Bytes of computed (not referenced) residuals of `f`, from jax.vjp itself."""
    program = jax.make_jaxpr(lambda *a: jax.tree.leaves(jax.vjp(f, *a)[1]))(*args)
    variables = {v for v in program.jaxpr.outvars if not hasattr(v, "val")}
    kept = variables - {*program.jaxpr.invars, *program.jaxpr.constvars}
    return sum(v.aval.size * v.aval.dtype.itemsize for v in kept)
