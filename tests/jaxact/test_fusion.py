"""Which residuals a kernel packs, by the operations in a traced step.

The examples are the reasons: a residual is packed by a kernel where it is in memory
anyway or costly to compute twice, and else where it is computed.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxact
from jaxact._jaxpr.compat import open_jaxpr
from jaxact_kernels import affine

X = jax.ShapeDtypeStruct((8, 32, 256), jnp.float32)
W = jax.ShapeDtypeStruct((256, 256), jnp.float32)


def encodings(jaxpr):
    """Whether each encoding in a program is fused."""
    for eqn in jaxpr.eqns:
        operation = eqn.params.get("operation")
        if isinstance(operation, affine.Encode):
            yield operation.is_fused
            continue  # its definition may encode too
        for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_program):
            if is_program(x):
                yield from encodings(open_jaxpr(x)[0])


def is_program(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def kernels_and_fused(f, *args):
    """The number of residuals that are packed by a kernel, and of fused ones."""
    layer = jaxact.compress(f, activations="x")
    step = jax.grad(lambda w, x: layer(w, x).sum(), argnums=(0, 1))
    closed = jax.make_jaxpr(step)(*args)
    found = list(encodings(open_jaxpr(closed)[0]))
    return found.count(False), found.count(True)


def normalized(y):
    mean = y.mean((0, 1))[None, None]
    variance = ((y - mean) ** 2).mean((0, 1))[None, None]
    return (y - mean) * lax.rsqrt(variance + 1e-5)


@pytest.mark.parametrize(
    "f, expected",
    [
        (lambda w, x: x @ w, (1, 0)),  # x is an argument
        (lambda w, x: jnp.tanh(x @ w), (2, 0)),  # its derivative is costly
        (lambda w, x: jnp.maximum(x @ w, 0) @ w, (2, 0)),  # x, and a product's operand
        (lambda w, x: normalized(x @ w), (2, 0)),  # a product, by channel
        # Nothing else reads these whole.
        (lambda w, x: normalized((y := x @ w) * jnp.abs(y + 1)), (1, 2)),
        (lambda w, x: (x * x) @ w, (2, 0)),
        (lambda w, x: ((x @ w) * (x @ w.T)) ** 2, (1, 2)),  # derivatives, once
        (lambda w, x: (y := x @ w + x, y @ w + y)[1], (2, 0)),  # the next join reads y
        (lambda w, x: (y := checkpoint_name(x @ w + x, "y"), y @ w + y)[1], (2, 0)),
        (lambda w, x: jax.nn.softmax(x @ w) @ w, (2, 0)),
        # In memory as bfloat16 alone; but a softmax as float32 too, for its kernel.
        (lambda w, x: jnp.exp(x @ w).astype(jnp.bfloat16).sum(), (1, 1)),
        (lambda w, x: jax.nn.softmax(x @ w).astype(jnp.bfloat16).sum(), (2, 0)),
    ],
)
def test_who_packs(f, expected):
    assert kernels_and_fused(f, W, X) == expected
