"""Plans: within the budget, cheaper with more of it, and honest where none is found."""

import dataclasses
import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxact
from jaxact import Plan, Policy, Quantize, Rule
from jaxact._budget.candidates import (
    EVERY,
    ON_HOST,
    relative_error,
    stored_bytes,
)
from jaxact._budget.frontier import Frontier, FrontierPoint
from jaxact._budget.plan import planned_rows
from jaxact._budget.read import Step, read_problem
from jaxact._budget.search import policy_of
from jaxact._budget.solve import solve
from jaxact._memory.size import parsed
from jaxact._memory.targets import gpu_of
from jaxact._residual import Residual
from support.gpu_target import needs_target
from support.variants import thorough

WIDTHS = [Quantize(bits) for bits in (1, 2, 4, 8)]


def layer(p, x):
    h = jax.nn.gelu(x @ p["up"])
    scale = jax.lax.rsqrt((h**2).mean(-1, keepdims=True) + 1e-5)
    return x + (h * scale) @ p["down"]


def compressed(layer):
    return jaxact.compress(layer, activations="x")


def network(layers=12, batch=512, width=64, compress=compressed):
    """A step of a scanned network, and its arguments, none of which exists."""
    small = compress(layer)

    def loss(p, x):
        x, _ = jax.lax.scan(lambda x, p: (small(p, x), None), x, p)
        return (x**2).mean()

    @jax.jit
    def step(p, x):
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, jax.grad(loss)(p, x))

    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    p = {"up": of((layers, width, 2 * width)), "down": of((layers, 2 * width, width))}
    return step, p, of((batch, width))


@pytest.fixture(scope="module")
def plans():
    """Plans of one step for four budgets, each knowing the ones before."""
    made: dict[float, Plan] = {}
    earlier = None
    for ratio in (0.15, 0.25, 0.4, 0.6):
        earlier = made[ratio] = jaxact.plan(
            *network(), budget=ratio, actions=WIDTHS, earlier=earlier
        )
    return made


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="its XLA:CPU drops barriers outside of loops"
)
def test_a_step_whose_codecs_would_need_more_than_they_save():
    """Two unrolled layers: a rotation's own arrays are larger than the residuals."""
    small = jaxact.compress(layer, activations="x")
    gradient = jax.grad(lambda p, x: (small(p, small(p, x)) ** 2).mean())
    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    p = {"up": of((256, 1024)), "down": of((1024, 256))}
    plan = jaxact.plan(gradient, p, of((2048, 256)), budget=0.65)
    assert plan.memory.temp_bytes <= plan.budget
    assert all(not isinstance(row.action, jaxact.Rotated) for row in plan.rows)


def test_the_compiled_step_is_never_above_the_budget(plans):
    whole = plans[0.15].trail[0].memory.temp_bytes  # the uncompressed step
    for ratio, plan in plans.items():
        assert plan.budget == int(ratio * whole)
        assert plan.memory.temp_bytes <= plan.budget
    with jaxact.using(plans[0.15].policy):
        assert jaxact.memory(*network()) == plans[0.15].memory


def test_the_budget_is_used_or_nothing_cheaper_was_left(plans):
    for plan in plans.values():
        is_free = plan.time + plan.noise == 0
        # Three residuals: the next cheaper choice is up to 3 MiB larger.
        room = plan.budget - plan.memory.temp_bytes
        assert plan.bytes >= 0.9 * plan.budget or is_free or room < 3 * 2**20


def test_a_larger_budget_costs_no_more(plans):
    costs = [plan.time + plan.noise for plan in plans.values()]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > 0 == costs[-1]


@thorough
def test_few_steps_are_compiled(plans):
    first, *_, last = plans.values()
    assert len(first.trail) <= 1 + 4
    assert len(last.trail) <= 1 + 4 * 4
    policies = [trial.policy for trial in last.trail]
    assert len(set(policies)) == len(policies)


def test_a_plan_trains(plans):
    """Its rules match, without a warning; its gradient is near the exact one."""
    step, p, x = network()
    keys = iter(jax.random.split(jax.random.key(0), 3))
    p, x = jax.tree.map(lambda s: jax.random.normal(next(keys), s.shape) / 8, (p, x))
    plan = plans[0.15]
    with jaxact.using(plan.policy):
        rounded = step(p, x)
    with jaxact.using(Policy(default=jaxact.Exact())):
        exact = step(p, x)
    norm = lambda a, b: math.sqrt(sum(float(((a[k] - b[k]) ** 2).sum()) for k in a))
    assert 0 < norm(rounded, exact) < 0.5 * norm(exact, p)


@thorough
def test_is_shown_and_saved(plans):
    plan = plans[0.15]
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    budget = f"{plan.budget / 2**20:.4g} MiB"
    assert f"of the budget of {budget}, on cpu" in str(plan).replace("\n", " ")
    assert "(assumed)" in plan.summary()
    modules = plan.by_path()
    assert modules.total.exact_bytes == sum(row.exact_bytes for row in plan.rows)
    assert modules.total.elements * 4 == modules.total.exact_bytes
    compiled = [point.bytes for point in plan.frontier if point.is_compiled]
    assert plan.bytes in compiled
    pytest.importorskip("matplotlib").use("agg")
    assert plan.plot().get_xlabel() == "temp, MiB"


@thorough
def test_the_usual_ways_stand_on_the_frontier(plans):
    """Plain, and each layer in a checkpoint: as `jax.checkpoint` around it takes."""
    known = plans[0.6]
    options = {"actions": WIDTHS, "earlier": known, "baselines": True}
    found = jaxact.plan(*network(), budget=known.budget, **options).frontier
    points = {point.name: point for point in found if point.is_compiled}
    assert points["uncompressed"].bytes == known.trail[0].memory.temp_bytes
    again = jax.checkpoint(layer, prevent_cse=False)
    expected = jaxact.memory(*network(compress=lambda _: again)).temp_bytes
    assert 0.9 < points["checkpoint"].bytes / expected < 1.1
    # The forward pass once more: of 3 times its operations that the step has, a third.
    assert 0 < points["checkpoint"].time <= 1 / 3
    assert points["dots_saveable"].time < 0.01
    assert "dots_saveable" in str(found)


def test_a_frontier_says_how_usual_ways_are_timed():
    plain, usual = (
        FrontierPoint(2**20, 0.1, 0.0, True, name) for name in ("plan", "checkpoint")
    )
    text = "the usual ways that of products computed again, alone"
    assert text in Frontier((plain, usual)).summary()
    assert text not in Frontier((plain,)).summary()


@pytest.mark.thorough
def test_a_budget_that_is_too_small():
    with pytest.raises(ValueError) as error:
        jaxact.plan(*network(layers=2), budget=10_000, actions=[Quantize(1)])
    text = str(error.value)
    for part in ("9.766 KiB", "The smallest takes", "residuals", "gradients", "on cpu"):
        assert part in text
    sizes = {"B": 1, "KiB": 2**10, "MiB": 2**20}
    taken, *parts = (
        float(number) * sizes[unit]
        for number, unit in re.findall(r"([\d.]+) ([KM]iB|B)(?=[ ,)])", text)
    )
    assert len(parts) == 3  # residuals, gradients, workspace
    assert sum(parts) == pytest.approx(taken, rel=1e-3)  # of four digits each


def test_bounds_on_time_and_noise(plans):
    free = plans[0.15]
    options = {"actions": WIDTHS, "noise": free.noise / 4, "earlier": plans[0.6]}
    quiet = jaxact.plan(*network(), budget=free.budget, **options)
    assert quiet.noise <= free.noise / 4
    assert quiet.bytes <= quiet.budget


def test_an_interruption_returns_the_best_so_far(plans, monkeypatch):
    """The first compiled step fits; during the second somebody presses Ctrl-C."""
    known = plans[0.15]

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxact._budget.planning.memory", interrupt)
    options = {"actions": [Quantize(3)], "budget": known.budget}
    found = jaxact.plan(*network(), **options, earlier=known)
    assert found.policy == known.policy
    with pytest.raises(KeyboardInterrupt):
        jaxact.plan(*network(), **options)


@thorough
def test_rules_of_the_policy_stand_before_the_plan():
    """Nothing is chosen where one of them decides."""
    step, *args = network(layers=3)
    policy = Policy(rules=(Rule(Quantize(8), key="x"),))
    read = Step(step, args, {})
    problem = read_problem(read, policy, WIDTHS, gpu_of("h100"), None)
    found = solve(problem, math.inf, is_smallest=True)
    assert "x" not in [row.key for row in planned_rows(found)]
    assert policy_of(found, policy).rules[0] == policy.rules[0]
    free = read_problem(read, Policy(), WIDTHS, gpu_of("h100"), None)
    found = solve(free, math.inf, is_smallest=True)
    assert "x" in [row.key for row in planned_rows(found)]


@thorough
def test_a_plan_for_another_step(plans):
    """It says nothing about this one; saved and read again, too."""
    options = {"actions": WIDTHS, "budget": plans[0.6].budget}
    known = Plan.from_dict(json.loads(json.dumps(plans[0.6].to_dict())))
    exact = dataclasses.replace(known, rows=(), trail=known.trail[:1])
    for earlier in (known, exact):
        for other in ({"batch": 256}, {"layers": 6}, {"width": 32}):
            with pytest.raises(ValueError, match=r"the arguments take .* Leave"):
                jaxact.plan(*network(**other), earlier=earlier, **options)
    rows = [dataclasses.replace(row, elements=1) for row in plans[0.6].rows]
    trial = dataclasses.replace(known.trail[-1], rows=tuple(rows))
    smaller = dataclasses.replace(known, trail=(trial,))
    with pytest.raises(ValueError, match="has 1 elements .* Leave"):
        jaxact.plan(*network(), earlier=smaller, **options)
    here = dataclasses.replace(known.memory, device="NVIDIA H100 80GB HBM3")
    with pytest.raises(ValueError, match="it is for NVIDIA H100 80GB HBM3, the step"):
        far = dataclasses.replace(known, memory=here)
        jaxact.plan(*network(), earlier=far, **options)
    rows = [dataclasses.replace(row, key="other") for row in plans[0.6].rows]
    trial = dataclasses.replace(known.trail[-1], rows=tuple(rows))
    renamed = dataclasses.replace(known, trail=(trial,))
    with pytest.raises(ValueError, match="the step has no residual 'other'"):
        jaxact.plan(*network(), earlier=renamed, **options)


@thorough
def test_of_the_whole_device(plans):
    known = plans[0.6]
    budget = plans[0.4].memory.peak_bytes
    options = {"actions": WIDTHS, "earlier": known, "of": "device"}
    plan = jaxact.plan(*network(), budget=budget, **options)
    assert plan.bytes == plan.memory.peak_bytes <= budget
    assert plan.memory == plans[0.4].memory


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("12GB", 12 * 10**9),
        ("12 GiB", 12 * 2**30),
        ("1.5kb", 1500),
        ("80_000 MiB", 80_000 * 2**20),
        ("7B", 7),
        (123, 123),
        (0.25, 250),
    ],
)
def test_sizes(budget, expected):
    assert parsed(budget, "f(x", "y").of(1000) == expected


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"budget": "lots"}, ValueError, r"'12GiB' \(2\*\*30\)"),
        ({"budget": "_GB"}, ValueError, "bytes are required"),
        ({"budget": 1.5}, ValueError, "a float below 1"),
        ({"budget": 0}, ValueError, "bytes are required"),
        ({"budget": None}, TypeError, "bytes are required"),
        ({"of": "host"}, ValueError, "'temp' or 'device'"),
        ({"slowdown": -1.0}, ValueError, "slowdown=0.1"),
        ({"policy": 4}, TypeError, "a jaxact.Policy is required"),
        ({"actions": [4]}, TypeError, "a sequence of actions"),
        ({"actions": [jaxact.Offload()]}, ValueError, "Leave it out"),
        ({"target": "h1000"}, ValueError, "unknown target"),
        (
            {"policy": Policy(recompute=jax.checkpoint_policies.dots_saveable)},
            ValueError,
            "recompute=None",
        ),
    ],
)
def test_mistakes(changes, error, text):
    with pytest.raises(error, match=text):
        jaxact.plan(
            jax.grad(lambda x: x.sum()), jnp.ones(8), **{"budget": 0.5} | changes
        )


def test_a_step_without_compressed_calls():
    with pytest.raises(ValueError, match="Compress the unit"):
        jaxact.plan(jax.grad(lambda x: jnp.sin(x).sum()), jnp.ones(8), budget=0.5)


@pytest.mark.parametrize(
    ("around", "cause"),
    [
        (jax.checkpoint, "are in a jax.checkpoint"),
        (jaxact.using(Policy(2)), "are inside jaxact.using"),
    ],
)
def test_compressed_calls_that_a_plan_has_no_say_in(around, cause):
    small = compressed(lambda w, x: jnp.tanh(x @ w))
    step = jax.grad(around(lambda w, x: small(w, x).sum()))
    with pytest.raises(ValueError, match=cause):
        jaxact.plan(step, jnp.ones((64, 64)), jnp.ones((64, 64)), budget=0.5)


def test_the_bytes_of_every_action_are_those_that_it_encodes():
    residual = Residual((3, 1000), np.dtype(np.float32))
    x = jax.ShapeDtypeStruct(residual.shape, residual.dtype)
    seed = jax.ShapeDtypeStruct((), jnp.uint32)
    for action in EVERY[:: 5 if jax.__version_info__ < (0, 12) else 1]:
        arrays = jax.tree.leaves(jax.eval_shape(action.encode, x, seed))
        size = sum(a.size * a.dtype.itemsize for a in arrays)
        assert stored_bytes(action, residual, 2) == 2 * size, action


@pytest.mark.parametrize("kind", [{}, {"primitive": "exp"}, {"path": "derivative"}])
def test_more_bits_err_less(kind):
    residual = Residual((64,), np.dtype(np.float32), **kind)
    for codec in {type(action) for action in EVERY} - {jaxact.Exact}:
        errors = [relative_error(codec(bits), residual) for bits in range(1, 9)]
        assert errors == sorted(errors, reverse=True)


def test_a_loop_inside_a_call_is_computed_again_once():
    """A checkpoint adds a forward pass, at most half of a step, and packing."""

    def block(w, x):
        y = jax.lax.map(lambda row: jnp.sin(jnp.tanh(row @ w)), x)
        return x + jnp.tanh(y @ w) @ w

    small = jaxact.compress(block, activations="x")

    def loss(ws, x):
        return jax.lax.scan(lambda x, w: (small(w, x), None), x, ws)[0].sum()

    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    step = Step(jax.grad(loss), (of((8, 64, 64)), of((32, 16, 64))), {})
    problem = read_problem(step, Policy(), WIDTHS, gpu_of("h100"), None)
    variants = [v for call in problem.calls for v in call.variants]
    times = [v.time for v in variants if v.is_checkpoint]
    assert times and max(times) < 0.6


def test_host_memory_where_nothing_may_err():
    """At no noise half of the residuals go to the host; its link takes the time."""
    step, *args = network()
    read = Step(step, args, {})
    gpu = gpu_of("h100")
    problem = read_problem(read, Policy(), (*EVERY, *ON_HOST), gpu, None)
    device = problem.on_the_device().without_recomputation()
    exact = solve(device, math.inf, noise=0.0)
    room = exact.live_bytes / 2
    assert solve(device, room, noise=0.0) is None
    found = solve(problem.without_recomputation(), room, noise=0.0)
    rows = planned_rows(found)
    moved = [row for row in rows if isinstance(row.action, jaxact.Offload)]
    assert moved and all(row.stored_bytes == 0 == row.noise for row in moved)
    whole = sum(row.exact_bytes for row in moved)
    expected = 2 * whole / gpu.host_bytes_per_second / problem.seconds
    assert sum(row.time for row in moved) == pytest.approx(expected)
    # With noise allowed some bits are cheaper than the way to the host.
    free = planned_rows(solve(problem.without_recomputation(), room))
    assert not any(isinstance(row.action, jaxact.Offload) for row in free)


@needs_target
@pytest.mark.slow
def test_the_compiled_step_is_smaller_with_residuals_on_the_host():
    step, *args = network(batch=4096, width=256)
    options = {"target": "h100", "actions": [jaxact.Offload()], "noise": 0.0}
    # In a checkpoint and exact, the inputs alone take 48 MiB; in all 89 are compiled.
    plan = jaxact.plan(step, *args, budget="70MiB", **options)
    assert plan.bytes <= plan.budget and plan.noise == 0
    assert any(isinstance(row.action, jaxact.Offload) for row in plan.rows)
