"""Operations of matrix products, by hand from their shapes."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxact import count_flops

pytestmark = pytest.mark.unoptimized


def count(f, *shapes):
    return count_flops(f, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))


def test_products_and_convolutions():
    assert count(lambda x, y: x @ y, (3, 4), (4, 5)) == 2 * 3 * 4 * 5
    batched = functools.partial(jnp.einsum, "bij,bkj->bik")
    assert count(batched, (7, 3, 4), (7, 5, 4)) == 2 * 7 * 3 * 4 * 5
    dims = "NHWC", "HWIO", "NHWC"
    conv = lambda x, k, s, groups=1: jax.lax.conv_general_dilated(
        x, k, (s, s), "SAME", dimension_numbers=dims, feature_group_count=groups
    )
    one = 2 * 3 * 3 * 6  # operations for each element of the output
    strided = functools.partial(conv, s=2)
    assert count(strided, (2, 8, 8, 6), (3, 3, 6, 5)) == one * 2 * 4 * 4 * 5
    grouped = functools.partial(conv, s=1, groups=2)
    assert count(grouped, (2, 8, 8, 12), (3, 3, 6, 4)) == one * 2 * 8 * 8 * 4
    for f in (strided, functools.partial(conv, s=1)):
        # Both gradients do what the forward does, whatever the stride.
        gradient = jax.value_and_grad(lambda x, k, f=f: f(x, k).sum(), (0, 1))
        forward = count(f, (2, 8, 8, 6), (3, 3, 6, 5))
        assert count(gradient, (2, 8, 8, 6), (3, 3, 6, 5)) == 3 * forward


def test_products_of_rows_in_groups():
    sizes = jnp.array([5, 3, 4], jnp.int32)
    experts = lambda x, w: jax.lax.ragged_dot(x, w, sizes)
    gradient = jax.value_and_grad(lambda x, w: experts(x, w).sum(), (0, 1))
    one = 2 * 12 * 4 * 5  # each of 12 rows meets one matrix
    assert count(experts, (12, 4), (3, 4, 5)) == one
    assert count(gradient, (12, 4), (3, 4, 5)) == 3 * one


def test_loops_branches_and_recomputation():
    w, x = (4, 4), (3, 4)
    one = 2 * 3 * 4 * 4
    layer = lambda x, w: jnp.sin(x @ w)
    scanned = lambda x, w: jax.lax.scan(lambda x, _: (layer(x, w), None), x, length=5)
    assert count(scanned, x, w) == 5 * one
    either = lambda x, w: jax.lax.cond(x[0, 0] > 0, layer, lambda x, w: x, x, w)
    assert count(either, x, w) == one
    loss = lambda layer: lambda x, w: layer(layer(x, w), w).sum()
    gradient = lambda layer: jax.value_and_grad(loss(jax.jit(layer)), (0, 1))
    assert count(gradient(layer), x, w) == 6 * one
    assert count(gradient(jax.checkpoint(layer)), x, w) == 8 * one


def test_products_that_nothing_needs():
    both = jax.jit(lambda x, y: jax.lax.optimization_barrier((x @ y, y @ x)))
    assert count(both, (4, 4), (4, 4)) == 4 * 4**3
    assert count(lambda x, y: both(x, y)[1], (4, 4), (4, 4)) == 2 * 4**3


def test_kernels():
    from jax.experimental import pallas as pl

    def kernel(x_ref, y_ref, out_ref):
        out_ref[...] = x_ref[...] @ y_ref[...]

    def product(x, y, **options):
        rows = pl.BlockSpec((16, 32), lambda i: (i, 0))
        call = pl.pallas_call(
            kernel,
            jax.ShapeDtypeStruct((64, 32), jnp.float32),
            grid=(4,),
            in_specs=[rows, pl.BlockSpec((32, 32), lambda i: (0, 0))],
            out_specs=rows,
            **options,
        )
        return call(x, y)

    assert count(product, (64, 32), (32, 32)) == 2 * 64 * 32 * 32
    known = pl.CostEstimate(flops=7, transcendentals=0, bytes_accessed=0)
    estimated = functools.partial(product, cost_estimate=known)
    assert count(estimated, (64, 32), (32, 32)) == 7


def test_a_value_that_is_no_step():
    with pytest.raises(TypeError, match="a step is required"):
        count_flops(3)
