"""The largest batch: the last that fits, and a compiled one beyond it."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxact
from jaxact import Exact, LargestBatches, Policy
from jaxact._budget.max_batch import MOST_COMPILES, _Search
from support.variants import thorough

of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)


def searched(size, limit, unit=1, degree=1, known=()):
    """The row that a search ends with, when a batch of n takes size(n) bytes."""
    search = _Search(limit, unit, degree, {n: size(n) for n in known})
    while (n := search.next()) is not None:
        assert n not in search.sizes
        assert n > 0 == n % unit
        search.sizes[n] = size(n)
    return search.row("")


CURVES = {
    "affine": lambda n: 5_000_000 + 70_001 * n,
    "small ones take more": lambda n: 5_000_000 + 70_001 * n + 900_000 // n,
    "in blocks": lambda n: 5_000_000 + 70_001 * n + 4096 * (n % 3),
    "another algorithm": lambda n: 5_000_000 + (70_001 if n < 100 else 69_000) * n,
}


@pytest.mark.parametrize("unit", [1, 8])
@pytest.mark.parametrize("curve", list(CURVES))
def test_the_row_is_certified(curve, unit):
    """Against every batch in turn."""
    size = CURVES[curve]
    for limit in (5_000_000, 5_700_000, 6_000_000, 20_000_000, 90_000_000):
        row = searched(size, limit, unit)
        assert len(row.compiled) <= MOST_COMPILES
        assert row.is_certified, (curve, limit, row)
        assert row.batch == 0 or size(row.batch) == row.bytes <= limit
        assert size(row.batch + unit) == row.next_bytes > limit


@pytest.mark.parametrize("unit", [16, 32])
@pytest.mark.parametrize("per_channel", [0, 10_000_000, 80_000_000])
def test_a_square_is_certified(unit, per_channel):
    """As of an image's side, or a width; memory wobbles by 20 MB."""
    size = lambda n: 10**9 + per_channel * n + 50_000 * n**2 + 20_000_000 * (n % 3)
    for limit in (2 * 10**9, 24 * 10**9, 80 * 10**9):
        row = searched(size, limit, unit, degree=2)
        assert len(row.compiled) <= MOST_COMPILES
        assert row.is_certified, (limit, row)
        assert row.batch == 0 or size(row.batch) == row.bytes <= limit
        assert size(row.batch + unit) == row.next_bytes > limit


def test_batches_that_are_known_are_not_compiled():
    size = CURVES["small ones take more"]
    first = searched(size, 20_000_000)
    known = [c.batch for c in first.compiled]
    row = searched(size, 70_000_000, known=known)
    assert row.is_certified and row.bytes <= 70_000_000 < row.next_bytes
    # Of a line of which two points are known, the batch and the next one are left.
    assert [c.batch for c in row.compiled] == [*known, row.batch, row.batch + 1]
    assert searched(size, 20_000_000, known=known) == first


def test_neighbours_that_shrink_tell_nothing_of_larger_batches():
    size = lambda n: 5_000_000 + 70_001 * n - 900_000 * (n % 2)
    row = searched(size, 80_000_000, known=[1, 16, 200, 201])
    assert row.is_certified
    assert max(c.batch for c in row.compiled) < 1.1 * row.batch


@pytest.mark.parametrize("limit", [4_000_000, 5_050_000, 5_700_000, 80_000_000])
def test_the_memory_of_every_batch_may_be_known(limit):
    size = lambda n: 5_000_000 + 70_001 * n + 300_000 * (n > 0)
    row = searched(size, limit, 4, known=[0])
    assert row.is_certified and all(c.batch for c in row.compiled)
    assert len(row.compiled) <= 4
    assert (row.batch, row.bytes) == (0, 0) or size(row.batch) == row.bytes <= limit
    assert size(row.batch + 4) == row.next_bytes > limit


def test_a_search_ends_where_nothing_grows():
    row = searched(lambda n: 100, 1000)
    assert not row.is_certified
    assert row.batch > 1000
    assert len(row.compiled) <= MOST_COMPILES


@pytest.mark.parametrize("unit", [1, 2, 8])
@pytest.mark.parametrize("rows", [434, 2000, 65_000])
def test_small_batches_say_little_of_large_ones(unit, rows):
    """Of four small layers, weights hide what rows take until there are many."""
    size = lambda n: 1_060_000 + max(9000 * n, 17_000 * (n - 32))
    limit = size(rows) + 5000
    row = searched(size, limit, unit)
    assert size(row.batch) <= limit
    assert row.batch == rows // unit * unit and row.is_certified
    assert len(row.compiled) <= 8


def test_a_curve_that_bends_gives_a_batch_that_fits():
    row = searched(lambda n: n**2, 10**8)
    assert row.batch**2 <= 10**8
    assert len(row.compiled) <= MOST_COMPILES


def step_of_batch(n):
    layer = jaxact.compress(lambda w, x: jnp.tanh(x @ w), activations=1)

    def loss(ws, x):
        return jax.lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0].sum()

    return jax.jit(jax.grad(loss)), (of((12, 64, 64)), of((n, 64)))


@thorough
def test_compiled_steps():
    policies = {"exact": Policy(default=Exact()), "4 bits": None}
    found = jaxact.max_batch(step_of_batch, policies, budget="4MiB", multiple_of=64)
    assert found.limit == 4 * 2**20 - int(0.05 * 4 * 2**20)
    assert found["4 bits"].batch > 1.5 * found["exact"].batch > 0
    for row in found.rows:
        assert row.is_certified
        policy = policies[row.name]
        for batch, size in ((row.batch, row.bytes), (row.batch + 64, row.next_bytes)):
            step, args = step_of_batch(batch)
            with jaxact.using(policy or Policy()):
                compiled = jaxact.memory(step, *args).peak_bytes
            assert compiled == size
            assert (size <= found.limit) == (batch == row.batch)
    text = str(found)
    assert "1.00x" in text
    assert "limit 3.8 MiB on cpu" in text
    assert LargestBatches.from_dict(json.loads(json.dumps(found.to_dict()))) == found


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({}, ValueError, "the memory of the device is required"),
        ({"budget": "much"}, ValueError, "'12GiB'"),
        ({"budget": 0.5}, ValueError, r"\(2\*\*30\)\.$"),
        ({"budget": 100, "reserve": 1.5}, ValueError, "reserve=1.5.*of the budget"),
        ({"budget": 100, "reserve": 100}, ValueError, "a reserve below the budget"),
        ({"budget": 100, "multiple_of": 0}, ValueError, "multiple_of=2"),
        ({"budget": 100, "degree": True}, ValueError, "degree=2"),
        ({"budget": 100, "policies": [Policy()]}, TypeError, "a mapping from names"),
        ({"budget": 100, "policies": {"a": 4}}, TypeError, "a mapping from names"),
        ({"target": "h1000"}, ValueError, "unknown target"),
        ({"budget": 100, "step_of_batch": 4}, TypeError, "a function from a batch"),
        (
            {"budget": 100, "step_of_batch": lambda n: step_of_batch(n)[0]},
            TypeError,
            r"of type .*; \(step, tuple of its arguments\) is required",
        ),
        (
            {"budget": 100, "step_of_batch": lambda n: (jnp.sin, 1, 2.5)},
            TypeError,
            r"\(.*, int, float\); \(step, tuple of its arguments\) is required",
        ),
    ],
)
def test_mistakes(changes, error, text):
    options = {"step_of_batch": step_of_batch} | changes
    with pytest.raises(error, match=text):
        jaxact.max_batch(**options)


@thorough
def test_numbers_of_numpy():
    budget, multiple = np.int64(1 << 22), np.int32(512)
    found = jaxact.max_batch(step_of_batch, budget=budget, multiple_of=multiple)
    assert found == jaxact.max_batch(step_of_batch, budget=1 << 22, multiple_of=512)


@pytest.mark.parametrize("target", [None, "h100"])
def test_nothing_is_compiled_where_all_is_known(target):
    known = {"the step": {np.int64(4): np.int64(100), 5: 10**12}}
    found = jaxact.max_batch(step_of_batch, budget="1GiB", target=target, known=known)
    kind = jax.devices()[0].device_kind if target is None else "NVIDIA H100 80GB HBM3"
    assert (found.rows[0].batch, found.device) == (4, kind)
    assert json.loads(json.dumps(found.to_dict()))


def unused_batch(n):
    small = jaxact.compress(lambda w, x: jnp.tanh(x @ w), activations="x")
    return jax.grad(lambda w, x: small(w, x).sum()), (of((64, 64)), of((8, 64)))


@pytest.mark.parametrize(("budget", "batches"), [("1GiB", (4, 16)), (64, (4, 1))])
def test_a_step_that_does_not_use_the_batch(budget, batches):
    first, second = (rf"step_of_batch\({n}\)" for n in batches)
    with pytest.raises(ValueError, match=f"{first} and {second} take the same bytes"):
        jaxact.max_batch(unused_batch, budget=budget)


def test_a_batch_that_takes_no_memory_yet_is_used():
    """Both of the first are within a product's fixed part."""
    step = lambda n: lambda w: (w @ w).sum() + jnp.arange(n, dtype=w.dtype).sum()
    made = lambda n: (step(n), (of((64, 64)),))
    found = jaxact.max_batch(made, budget="1MiB").rows[0]
    assert found.batch > 16


def test_a_step_in_place_of_its_function_is_told_what_is_required():
    with pytest.raises(TypeError) as caught:
        jaxact.max_batch(jax.grad(lambda x: x.sum()), budget="1MiB")
    note = "\n".join(caught.value.__notes__)
    assert "step_of_batch(4), which has to return (step, arguments)" in note
