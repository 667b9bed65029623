"""`plan`: the front of the search for a policy."""

import functools
import math
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxact._bits.cost import Sensitivity
from jaxact._budget import candidates
from jaxact._budget.earlier import check_earlier
from jaxact._budget.frontier import (
    OFFLOADED,
    UNCOMPRESSED,
    USUAL,
    Frontier,
    FrontierPoint,
    cheapest,
)
from jaxact._budget.infeasible import message
from jaxact._budget.plan import Plan, Trial, budgeted
from jaxact._budget.read import Step, read_problem
from jaxact._budget.search import Search
from jaxact._budget.solve import COARSE, solve
from jaxact._codec import Action, Offload
from jaxact._codec.checks import checked_kind, checked_number
from jaxact._memory import live, memory
from jaxact._memory.size import Limited, checked_of, parsed
from jaxact._memory.targets import gpu_of
from jaxact._policy import Policy, checked_policy
from jaxact._time.flops import flops_of
from jaxact._written_as import written_as

# The rates by which times are estimated where the step is for the local backend.
_NOMINAL = "h100"
# Predicted points on a frontier.
_POINTS = 8


@written_as("plan(step, params, batch, budget='12GB')")
def plan(
    step: Callable[..., Any],
    *args: Any,
    budget: str | int | float,
    target: str | None = None,
    of: Limited = "temp",
    policy: Policy | None = None,
    actions: Sequence[Action] | None = None,
    slowdown: float = math.inf,
    noise: float = math.inf,
    measured: Sensitivity | None = None,
    earlier: Plan | None = None,
    baselines: bool = False,
    **kwargs: Any,
) -> Plan:
    """Find the policy that costs least among those that fit a memory budget.

    Each residual of the step's compressed calls is kept exactly or in one of the
    formats, or computed again: elementwise results of others, or a whole
    call from its packed inputs. An integer program chooses; the step is compiled with
    its choice, which tells what the compiler adds to the stored bytes, and it chooses
    again, at most 4 times. The compiled step is never above the budget.

    The cost is the added time, as a part of the step's, plus the variance added to the
    gradient, as a part of its square. Nothing runs.

    Args:
      step: a training step, or the gradient of a loss, with compressed calls inside;
        jitted or not.
      *args: its arguments, as for `memory`.
      budget: '12GB', '12GiB' or bytes; or a float below 1, a part of what the step
        takes uncompressed, for which it is compiled once more.
      target: the GPU to compile for; None: the local backend.
      of: 'temp', the memory for temporaries; 'device', for arguments and results too.
      policy: its rules stand before the plan's. None: `Policy()`. The policies that the
        calls have do not count.
      actions: to choose from, besides `Exact()`. A float64 array, say, only takes those
        that can store it. None: every format of 1 to 8 bits, and host memory; without
        a GPU those that need no kernel.
      slowdown: bound on the added time, such as 0.1 for 10 % more.
      noise: bound on the added variance.
      measured: of the same loss; without it, noise is assumed.
      earlier: a plan for the same step, arguments and target, whose compiled steps
        count here too. With it a larger budget never costs more.
      baselines: compile the step in the usual ways too, for `Plan.frontier`: as it is,
        each call in a checkpoint, all but matrix products computed again, these on the
        host. Three or four more compiled steps.
      **kwargs: keyword arguments of the step.

    Returns:
      A `Plan`. If it is interrupted (Ctrl-C) after a compiled step was in the budget,
      the cheapest such.

    Raises:
      TypeError, ValueError: a wrong argument; no compressed call in the step; a budget
        that no policy was found for, with the smallest compiled step and its memory
        at the fullest moment, for which it is compiled once more.

    Example:
      >>> import jax, jax.numpy as jnp, jaxact
      >>> layer = jaxact.compress(lambda w, x: jnp.tanh(x @ w), activations=1)
      >>> def loss(ws, x):
      ...     return jax.lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0].sum()
      >>> ws, x = jnp.ones((24, 64, 64)), jnp.ones((1024, 64))
      >>> plan = jaxact.plan(jax.grad(loss), ws, x, budget=0.5)
      >>> plan.bytes <= plan.budget
      True
      >>> with jaxact.using(plan.policy):
      ...     gradient = jax.grad(loss)(ws, x)
    """
    size = parsed(budget, "jaxact.plan(budget", "what the uncompressed step takes")
    has_kernels = target is not None or jax.default_backend() == "gpu"
    if actions is None:
        on_gpu = (*candidates.EVERY, *candidates.ON_HOST)
        actions = on_gpu if has_kernels else candidates.WITHOUT_KERNELS
    _check(of, slowdown, noise, policy, actions)
    _check_results(measured, earlier)
    if not has_kernels and any(isinstance(a, Offload) for a in actions):
        raise ValueError(
            f"jaxact.plan(actions={actions!r}): Offload needs a device with memory of "
            "its own beside the host's. Leave it out, or plan for target='h100'."
        )
    gpu = gpu_of(_NOMINAL if target is None else target)
    base = Policy() if policy is None else policy
    read = Step(step, args, kwargs)
    problem = read_problem(read, base, actions, gpu, measured)
    if earlier is not None:
        check_earlier(earlier, read, problem, target)
    compiled = functools.partial(memory, step, *args, target=target, **kwargs)
    known = () if earlier is None else earlier.trail
    search = Search(problem, base, compiled, of, slowdown, noise, known)
    limit = size.number
    try:
        if limit is None:
            limit = size.of(budgeted(search.uncompressed().memory, of))
        search.run(limit)
    except KeyboardInterrupt:
        if limit is None or search.best(limit) is None:
            raise
    best = search.best(limit)
    if best is None:
        found = search.under(
            search.smallest().policy,
            functools.partial(live, step, *args, target=target, **kwargs),
        )
        raise ValueError(message(search, limit, budget, found))
    usual: list[FrontierPoint] = []
    if baselines:
        search.uncompressed()
        usual = _usual(search, read, has_host=has_kernels)
    return _plan_of(search, best, limit, usual)


def _plan_of(
    search: Search, best: Trial, limit: int, usual: list[FrontierPoint]
) -> Plan:
    taken = budgeted(best.memory, search.of)
    return Plan(
        policy=best.policy,
        budget=limit,
        of=search.of,
        memory=best.memory,
        predicted=best.predicted_bytes or taken,
        time=best.time,
        noise=best.noise,
        is_noise_measured=search.problem.is_measured,
        rows=best.rows,
        trail=tuple(dict.fromkeys((*search.known, *search.trials))),
        argument_bytes=search.problem.argument_bytes,
        frontier=Frontier((*frontier_of(search), *usual), search.of),
    )


def frontier_of(search: Search) -> tuple[FrontierPoint, ...]:
    """Compiled steps, and solutions for sizes between the least and all."""
    points = [
        FrontierPoint(
            budgeted(t.memory, search.of),
            t.time,
            t.noise,
            True,
            "uncompressed" if t.policy == UNCOMPRESSED else "plan",
        )
        for t in dict.fromkeys((*search.known, *search.trials))
    ]
    device = search.problem.on_the_device()
    least = solve(device, math.inf, is_smallest=True)
    free = solve(search.problem, math.inf)
    if least is None or free is None or not 0 < least.live_bytes < free.live_bytes:
        return cheapest(points)
    for room in np.geomspace(1.02 * least.live_bytes, free.live_bytes, _POINTS):
        found = solve(search.problem, float(room), gap=COARSE)
        if found is not None:
            size = round(found.live_bytes + search.rest(found.live_bytes))
            points.append(FrontierPoint(size, found.time, found.noise, False))
    return cheapest(points)


def _usual(search: Search, read: Step, *, has_host: bool) -> list[FrontierPoint]:
    """The step in the usual ways, compiled."""
    flops = lambda policy: flops_of(read.traced(policy).program)
    first = flops(UNCOMPRESSED)
    rate = search.problem.flops_per_second * search.problem.seconds
    points = []
    for name, policy in (USUAL | (OFFLOADED if has_host else {})).items():
        size = budgeted(search.memory_of(policy), search.of)
        time = (flops(policy) - first) / rate
        points.append(FrontierPoint(size, time, 0.0, True, name))
    return points


def _check(
    of: Limited,
    slowdown: float,
    noise: float,
    policy: Policy | None,
    actions: Sequence[Action],
) -> None:
    checked_of("jaxact.plan", of)
    for name, bound in (("slowdown", slowdown), ("noise", noise)):
        checked_number(
            bound,
            lambda x: x >= 0,
            f"jaxact.plan({name}={bound!r}): a bound of at least 0 is required, "
            f"such as {name}=0.1 for a tenth.",
        )
    if policy is not None:
        checked_policy("jaxact.plan(policy=", policy)
    if policy is not None and policy.recompute is not None:
        raise ValueError(
            f"jaxact.plan(policy=Policy(recompute={policy.recompute!r})): the plan "
            "chooses what is computed again. Give a policy with recompute=None."
        )
    several = tuple(actions) if isinstance(actions, Iterable) else ()
    if not several or not all(isinstance(a, Action) for a in several):
        raise TypeError(
            f"jaxact.plan(actions={reprlib.repr(actions)}): a sequence of actions "
            "is required, such as [jaxact.Quantize(4), jaxact.Quantize(2)]."
        )


def _check_results(measured: Sensitivity | None, earlier: Plan | None) -> None:
    if measured is not None:
        checked_kind(
            measured,
            Sensitivity,
            f"jaxact.plan(measured={type(measured).__name__}): the Sensitivity that "
            "jaxact.sensitivity measures is required, or None.",
        )
    if earlier is not None:
        checked_kind(
            earlier,
            Plan,
            f"jaxact.plan(earlier={type(earlier).__name__}): the Plan of an earlier "
            "call is required, or None.",
        )
