"""Flax NNX modules under test, and the ways to compress them."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from support.variants import mostly_thorough
from support.wrapping import AS_WRITTEN, WIDTH, data


class Block(nnx.Module):
    """Parameters, statistics, dropout; linear in each residual."""

    def __init__(self, rngs, width=WIDTH):
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.norm = nnx.BatchNorm(2 * width, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)
        self.noise = rngs["jaxact"].fork() if "jaxact" in rngs else None

    def __call__(self, x):
        h = self.dropout(nnx.relu(self.norm(self.up(x))))
        return x + self.down(h)


class Stack(nnx.Module):
    """Two blocks; `call` applies one."""

    def __init__(self, block, rngs, call=lambda layer, x: layer(x)):
        self.layers = nnx.List([block(rngs) for _ in range(2)])
        self.call = call

    def __call__(self, x):
        for layer in self.layers:
            x = self.call(layer, x)
        return x


class Stacked(nnx.Module):
    """Three blocks with stacked state; `call` applies them."""

    def __init__(self, block, rngs, call):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def create(rngs):
            return block(rngs)

        self.layers = create(rngs)
        self.call = call

    def __call__(self, x):
        return self.call(self.layers, x)


class Twice(nnx.Module):
    """One block, called twice."""

    def __init__(self, block, rngs):
        self.shared = block(rngs)

    def __call__(self, x):
        return self.shared(self.shared(x))


def scan(layers, x):
    body = nnx.scan(
        lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry
    )
    return body(layers, x)


def vmap(layers, x):
    each = jnp.stack([x, 2 * x, 3 * x])
    return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, 0))(layers, each)


def remat(layer, x):
    return nnx.remat(lambda layer, x: layer(x))(layer, x)


def methods(wrap, rngs):
    class Decorated(nnx.Module):
        def __init__(self, rngs):
            self.first, self.last = Block(rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        @wrap
        def encode(self, x, *, mode):
            return nnx.relu(self.first(x)) if mode == "relu" else x

        @wrap
        def decode(self, h, extra=None):
            return {"h": self.last(h), "none": extra}

        def __call__(self, x):
            return self.decode(self.encode(x, mode="relu"))

    return Decorated(rngs)


def keyword(wrap):
    """Calls a compressed function of an array and, by keyword, a module."""
    f = wrap(lambda x, *, layer: layer(x))
    return lambda layer, x: f(x, layer=layer)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to compress: `make(wrap, rngs)` is a module compressed by `wrap`."""

    name: str
    make: Callable[[Any, nnx.Rngs], nnx.Module]

    def __str__(self):
        return self.name


VARIANTS = [
    Variant("class", lambda wrap, rngs: wrap(Block)(rngs)),
    Variant("instance", lambda wrap, rngs: wrap(Block(rngs))),
    Variant("stack", lambda wrap, rngs: Stack(wrap(Block), rngs)),
    Variant("nested", lambda wrap, rngs: wrap(Stack)(Block, rngs, wrap(apply))),
    Variant("shared", lambda wrap, rngs: Twice(wrap(Block), rngs)),
    Variant("methods", methods),
    Variant("function", lambda wrap, rngs: Stack(Block, rngs, wrap(apply))),
    Variant("keyword", lambda wrap, rngs: Stack(Block, rngs, keyword(wrap))),
    Variant(
        "bound-method",
        lambda wrap, rngs: Stack(Block, rngs, lambda m, x: wrap(m.__call__)(x)),
    ),
    Variant("inside-scan", lambda wrap, rngs: Stacked(wrap(Block), rngs, scan)),
    Variant("around-scan", lambda wrap, rngs: Stacked(Block, rngs, wrap(scan))),
    Variant("inside-vmap", lambda wrap, rngs: Stacked(wrap(Block), rngs, vmap)),
    Variant("around-vmap", lambda wrap, rngs: Stacked(Block, rngs, wrap(vmap))),
    Variant("inside-remat", lambda wrap, rngs: Stack(wrap(Block), rngs, remat)),
    Variant("around-remat", lambda wrap, rngs: Stack(Block, rngs, wrap(remat))),
]
# One of each kind: a module, a function, a module in another, each transform once.
KINDS = ("class", "instance", "nested", "shared", "function")
KINDS += ("inside-scan", "around-vmap", "around-remat")
every_variant = pytest.mark.parametrize("variant", mostly_thorough(VARIANTS, KINDS))
# Modes change how state is split and merged: those that differ in it.
SOME = ("class", "instance", "function", "keyword", "around-scan", "inside-remat")
# Where the stream is found differs in these.
SEEDED = ("class", "shared", "methods", "inside-scan", "around-scan", "around-vmap")
some_variants = pytest.mark.parametrize(
    "variant", [v for v in VARIANTS if v.name in SOME], ids=str
)
MODES = {
    "graph": contextlib.nullcontext,
    "no-graph-updates": lambda: nnx.set_graph_updates(False),
    "tree": lambda: nnx.set_graph_mode(False),
}


def apply(layer, x):
    return layer(x)


def bits(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def same(a, b):
    """Whether two trees have one structure, one dtype each, and the same bits."""
    x, y = jax.tree.leaves(a), jax.tree.leaves(b)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        i.dtype == j.dtype and np.array_equal(bits(i), bits(j))
        for i, j in zip(x, y, strict=True)
    )


def split(model):
    """The graph definition, parameters and other state, the latter as plain trees."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    return graphdef, nnx.to_pure_dict(params), nnx.to_pure_dict(rest)


def stepper(model):
    """(params, rest, x) -> (loss, (outputs, rest)), gradients of params and x."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def step(params, rest, x):
        def loss(params, x):
            inside = nnx.merge(graphdef, params, rest, copy=True)
            y = inside(x)
            new = nnx.split(inside, nnx.Param, ...)[2]
            floats = jax.tree.leaves(y)
            return sum(jnp.square(f).sum() for f in floats), (y, new)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    return step, params, rest


def two_steps(model, run=lambda f: jax.jit(f, compiler_options=AS_WRITTEN)):
    """What two steps from one set of parameters give; other state moves on."""
    step, params, rest = stepper(model)
    step = run(step)
    first = step(params, rest, data())
    return first, step(params, first[0][1][1], data(1))
