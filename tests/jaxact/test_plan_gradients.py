"""The gradients that a plan counts: those that exist together."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import pytest

import jaxact
from jaxact import Policy, Quantize
from jaxact._budget.read import Step, read_problem
from jaxact._budget.solve import solve
from jaxact._memory.targets import gpu_of

WIDTHS = [Quantize(bits) for bits in (1, 2, 4, 8)]


def compressed(layer):
    return jaxact.compress(layer, activations="x")


def test_memory_over_the_calls_of_a_step():
    """An early call has all gradients and few residuals, a late one the opposite."""
    small = compressed(lambda w, x: jnp.tanh(x @ w))

    def loss(ws, x):
        for number, w in enumerate(ws):
            with jax.named_scope(f"layer{number}"):
                x = small(w, x)
        return x.sum()

    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    sizes = (256, 128, 64, 32)
    ws = [of(pair) for pair in itertools.pairwise(sizes)]
    update = lambda ws, x: clipped(jax.grad(loss)(ws, x))
    step = Step(update, (ws, of((512, 256))), {})
    problem = read_problem(step, Policy(), WIDTHS, gpu_of("h100"), None)
    assert [call.key for call in problem.calls] == ["layer0", "layer1", "layer2"]
    owned = [call.gradient_bytes for call in problem.calls]
    assert owned == [4 * a * b for a, b in itertools.pairwise(sizes)]
    exact = solve(problem, math.inf)
    stored, left, moments = problem.outside_bytes, problem.gradient_bytes, []
    for choice, gradient in zip(exact.choices, owned, strict=True):
        stored += choice.stored_bytes
        moments.append(stored + choice.workspace + left)
        left -= gradient
    assert exact.live_bytes == max(moments)
    assert left == 0


@pytest.mark.parametrize("clip", [False, True])
def test_gradients_are_counted_where_an_update_waits_for_all(clip):
    """Once: neither the optimizer's state nor both terms of a weight used twice."""
    small = compressed(lambda w, x: jnp.tanh(x @ w))

    def loss(ws, x):
        return (small(ws["twice"], small(ws["twice"], x)) @ ws["once"]).sum()

    def step(ws, mean, square, x):
        gradient = jax.grad(loss)(ws, x)
        if clip:
            gradient = clipped(gradient)
        mean = jax.tree.map(lambda m, g: m + g, mean, gradient)
        square = jax.tree.map(lambda s, g: s + g**2, square, gradient)
        update = lambda w, m, s: w - m * jax.lax.rsqrt(s)
        return jax.tree.map(update, ws, mean, square), mean, square

    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    ws = {"twice": of((64, 64)), "once": of((64, 32))}
    read = Step(step, (ws, ws, ws, of((512, 64))), {})
    problem = read_problem(read, Policy(), WIDTHS, gpu_of("h100"), None)
    assert problem.gradient_bytes == clip * 4 * (64 * 64 + 64 * 32)


@pytest.mark.parametrize("variance, signal, fewest", [(1, 0, 32), (0, 0, 1), (1, 1, 1)])
def test_residuals_stay_exact_where_the_measured_gradient_was_zero(
    variance, signal, fewest
):
    small = compressed(lambda w, x: jnp.tanh(x @ w))
    array = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    loss = lambda w, x: small(w, x).sum()
    step = Step(jax.grad(loss), (array, array), {})
    keys = [row.key for row in jaxact.residuals(loss, array, array).rows]
    costs = [jaxact.Cost(k, 2**16, 4, variance, signal, bits=4) for k in keys]
    measured = jaxact.Sensitivity(tuple(costs), signal)
    problem = read_problem(step, Policy(), WIDTHS, gpu_of("h100"), measured)
    stored, *_ = problem.calls[0].variants
    assert stored.rows
    for row in stored.rows:
        assert min(o.action.bits or 32 for o in row.options) == fewest


def clipped(gradient):
    """Divided by its norm, which needs all of it."""
    norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradient)))
    return jax.tree.map(lambda g: g / norm, gradient)
