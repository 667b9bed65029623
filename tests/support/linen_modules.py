"""Flax Linen modules under test, and the ways to compress them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.variants import mostly_thorough, thorough
from support.wrapping import AS_WRITTEN, WIDTH, data

STREAMS = {"params": True, "dropout": True, "jaxact": True}
AXES = {"params": 0, "batch_stats": 0, "intermediates": 0}
MUTABLE = ["batch_stats", "intermediates"]


class Block(nn.Module):
    """Parameters, statistics, dropout, a sown value; linear in each residual."""

    width: int = WIDTH
    dtype: Any = None

    @nn.compact
    def __call__(self, x, train=True):
        h = nn.Dense(2 * self.width, dtype=self.dtype)(x)
        h = nn.BatchNorm(use_running_average=not train, dtype=self.dtype)(h)
        h = nn.Dropout(0.25, deterministic=not train)(nn.relu(h))
        self.sow("intermediates", "hidden", h)
        return x + nn.Dense(self.width, dtype=self.dtype)(h)


class Conv(nn.Module):
    """A convolution, BatchNorm and ReLU."""

    @nn.compact
    def __call__(self, x):
        image = x.reshape(4, 4, 4, -1)
        h = nn.Conv(WIDTH, (3, 3), use_bias=False)(image)
        h = nn.relu(nn.BatchNorm(use_running_average=False)(h))
        return nn.Conv(2, (1, 1))(h)


class Layer(nn.Module):
    """A block as the body of a scan."""

    @nn.compact
    def __call__(self, x, _=None):
        return Block()(x), None  # with more, x would get three cotangents


class Stack(nn.Module):
    """Two blocks with automatic names."""

    block: Any

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = self.block()(x)
        return x


class Scan(nn.Module):
    """Three layers with stacked parameters."""

    layer: Any

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(self.layer, variable_axes=AXES, split_rngs=STREAMS, length=3)
        return scan(name="layers")(x)


class Ensemble(nn.Module):
    """Two blocks side by side, each with half of the batch."""

    block: Any

    @nn.compact
    def __call__(self, x):
        vmap = nn.vmap(self.block, variable_axes=AXES, split_rngs=STREAMS)
        return vmap()(x.reshape(2, -1, WIDTH))


class Twice(nn.Module):
    """One block, called twice."""

    block: Any

    def setup(self):
        self.shared = self.block()

    def __call__(self, x):
        return self.shared(self.shared(x))


class Holder(nn.Module):
    """A block passed in as an attribute."""

    inner: nn.Module

    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(self.inner(x))


class Arguments(nn.Module):
    """Strings, flags, None, keywords, tuples, integers."""

    @nn.compact
    def __call__(self, x, mode, pair, *, bias=None, flag=True):
        h = nn.Dense(WIDTH)(x)
        h = nn.relu(h) if mode == "relu" and flag else h
        h = h * pair[0] if pair[1] is None else h
        h = h if bias is None else h + bias
        return {"h": nn.Dense(WIDTH)(h), "none": None, "count": jnp.int32(3)}


class Caller(nn.Module):
    """Calls `Arguments` every way."""

    block: Any

    @nn.compact
    def __call__(self, x):
        # No array gets more than two cotangents: a sum of three depends on the order.
        scale = jnp.linspace(1.0, 2.0, x.size).reshape(x.shape)
        first = self.block()(x, "relu", (scale, None), bias=x, flag=True)
        second = self.block()(first["h"], mode="none", pair=[scale, 1.0])
        return first, second


def compact_method(wrap):
    class Decorated(nn.Module):
        @wrap
        @nn.compact
        def __call__(self, x):
            return Block()(x)

    return Decorated()


def setup_methods(wrap):
    class Decorated(nn.Module):
        def setup(self):
            self.first, self.last = Block(), nn.Dense(WIDTH)

        @wrap
        def encode(self, x, *, train):
            return nn.relu(self.first(x, train))

        @wrap
        def decode(self, h):
            return self.last(h)

        def __call__(self, x):
            return self.decode(self.encode(x, train=True))

    return Decorated()


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to compress: `make(wrap)` is a module that `wrap` has compressed.

    `is_linear`: its backward pass is linear in each residual, so codecs leave its
    gradient unbiased.
    """

    name: str
    make: Callable[[Any], nn.Module]
    is_linear: bool = True

    def __str__(self):
        return self.name


VARIANTS = [
    Variant("class", lambda wrap: wrap(Block)()),
    Variant("conv", lambda wrap: wrap(Conv)()),
    Variant("stack", lambda wrap: Stack(wrap(Block))),
    Variant("inside-scan", lambda wrap: Scan(wrap(Layer))),
    Variant("around-scan", lambda wrap: wrap(Scan)(Layer)),
    Variant("inside-vmap", lambda wrap: Ensemble(wrap(Block))),
    Variant("around-vmap", lambda wrap: wrap(Ensemble)(Block)),
    Variant("inside-remat", lambda wrap: Stack(nn.remat(wrap(Block)))),
    # What remat recomputes from its rounded input is not linear in it.
    Variant("around-remat", lambda wrap: Stack(wrap(nn.remat(Block))), False),
    Variant("inside-jit", lambda wrap: Stack(nn.jit(wrap(Block)))),
    Variant("around-jit", lambda wrap: Stack(wrap(nn.jit(Block)))),
    Variant("compact-method", compact_method),
    Variant("setup-methods", setup_methods),
    Variant("shared", lambda wrap: Twice(wrap(Block))),
    Variant("around-attribute", lambda wrap: wrap(Holder)(Block())),
    Variant("attribute", lambda wrap: Holder(wrap(Block)())),
    Variant("nested", lambda wrap: wrap(Holder)(wrap(Block)())),
    Variant("arguments", lambda wrap: Caller(wrap(Arguments))),
]
# One of each kind: a class, methods, a module in another, each transform once.
KINDS = ("class", "conv", "setup-methods", "shared", "nested", "arguments")
KINDS += ("inside-scan", "around-vmap", "around-remat", "inside-jit")
every_variant = pytest.mark.parametrize("variant", mostly_thorough(VARIANTS, KINDS))
# How parameters are named and initialized: a lifted class, methods, a class in another.
LIFTS = ("around-scan", "setup-methods", "nested")


def _slow_unless(variant, names):
    return () if variant.name in names else (pytest.mark.slow,)


every_lift = pytest.mark.parametrize(
    "variant",
    [pytest.param(v, id=str(v), marks=_slow_unless(v, LIFTS)) for v in VARIANTS],
)
# Op by op is slow; how a class is lifted does not change it.
OP_BY_OP = ("class", "around-scan", "nested")
every_mode = pytest.mark.parametrize(
    "variant, mode",
    [
        *(
            pytest.param(
                v, "jitted", id=f"{v}-jitted", marks=() if v.name in KINDS else thorough
            )
            for v in VARIANTS
        ),
        *(
            pytest.param(v, "op", id=f"{v}-op", marks=pytest.mark.slow)
            for v in VARIANTS
            if v.name in OP_BY_OP
        ),
    ],
)


def init(net):
    keys = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
    variables = net.init(keys, data())
    return {k: v for k, v in variables.items() if k != "intermediates"}


def same(a, b):
    """Whether two trees have one structure, one dtype each, and the same bits."""
    x, y = jax.tree.leaves(a), jax.tree.leaves(b)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        jnp.result_type(i) == jnp.result_type(j) and np.array_equal(i, j)
        for i, j in zip(x, y, strict=True)
    )


def step(net, variables, x, **streams):
    """(loss, (outputs, mutated)), gradients of the parameters and of the input."""

    def loss(params, x):
        keys = {"dropout": jax.random.key(3), **streams}
        held = {**variables, "params": params}
        out, mutated = net.apply(held, x, rngs=keys, mutable=MUTABLE)
        floats = [y for y in jax.tree.leaves(out) if y.dtype == jnp.float32]
        return sum(jnp.square(y).sum() for y in floats), (out, mutated)

    grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    return grad(variables["params"], x)


def in_mode(mode, net):
    f = functools.partial(step, net)
    if mode == "jitted":
        return jax.jit(f, compiler_options=AS_WRITTEN)

    def op_by_op(*args, **streams):
        with jax.disable_jit():
            return f(*args, **streams)

    return op_by_op
