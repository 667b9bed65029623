"""What must hold of a compressed program, judged against JAX's own.

Everything goes through jaxact's public names. Three yardsticks are JAX's alone: the
value and gradient of the plain program, evaluated equation by equation; the spread of
that gradient when each operation makes a random rounding error; and Student's t over
independent rounding keys.
"""

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxact
from fuzz.evaluate import evaluate
from fuzz.programs import Program
from fuzz.reference import Plain, differing, distance, norm, wide, with_gradient

# A mean that is further off than 3.5 standard errors with 32 keys (one projection in
# 700 by chance) is looked at again with 512 other keys: means of skewed noise are close
# to normal there. P(|t| > 6.5) = 2e-10 with 511 degrees of freedom, and no program has
# more than 50 projections: by chance one in 1e8 programs fails.
KEYS, SUSPECT = 32, 3.5
MORE_KEYS, T_LIMIT = 512, 6.5
# Random rounding errors of three runs; what another order of the operations changes
# stays below 20 times their largest deviation (a bound of 1e-4 for one deviation that
# is uniform, and the deviations of many operations are sums).
SAFETY = 20.0
# Steps are 17 times finer at 8 bits than at 4, so a bias of second order in them is
# 289 times smaller; a factor of 4 is for its higher orders.
SECOND_ORDER = 4 / 289
# Float32 rounds by 2**-24, 8 bits by 2**-9 of a group's range.
STEPS = 2.0**15
# A gradient this small beside the cotangents comes from a softmax whose other weights
# are 1e-10, say: no draw of a thousand rounds one up, and the mean of the others is 0.
SATURATED = 1e-8
EXACT = jaxact.Policy(default=jaxact.Exact())
# Before JAX 0.12 outputs that depend on different arguments have derivative rules of
# their own: what they share is differentiated once for each, and the results are added.
RULE_PER_OUTPUT = jax.version.__version_info__ < (0, 12)


@dataclasses.dataclass(frozen=True)
class Failure:
    check: str
    message: str

    def __str__(self) -> str:
        return f"[{self.check}] {self.message}"


@dataclasses.dataclass(frozen=True)
class Rounded:
    """Outputs, and gradients for each of many keys, of a compressed program."""

    outputs: list[jax.Array]
    gradients: list[jax.Array]
    warned: bool
    more: Callable[[], list[jax.Array]]


def _compressed(
    program: Program, p: Plain, policy: jaxact.Policy
) -> Callable[..., Any]:
    return jaxact.compress(p.f, policy=policy, activations=program.activations)


def rounded(program: Program, p: Plain, bits: int) -> Rounded:
    """Evaluate the compressed program with KEYS keys."""
    f = _compressed(program, p, jaxact.Policy(bits=bits))

    def one(key: Any, args: Any, cotangents: Any) -> Any:
        return with_gradient(functools.partial(f, rounding_key=key))(args, cotangents)

    # Values may not depend on the key: vmap raises an error if they do.
    many = jax.vmap(one, (0, None, None), (None, 0))
    keys = jax.random.split(jax.random.key(program.seed), KEYS + MORE_KEYS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        closed = jax.make_jaxpr(many)(keys[:KEYS], p.args, p.cotangents)
    warned = any(issubclass(w.category, jaxact.CompressionWarning) for w in caught)
    n = len(p.outputs)

    def run(start: int) -> list[Any]:
        part = keys[start : start + KEYS]
        return evaluate(closed, [part, *p.args, *p.cotangents])

    def more() -> list[Any]:
        parts = [run(s)[n:] for s in range(KEYS, KEYS + MORE_KEYS, KEYS)]
        return [np.concatenate(g) for g in zip(*parts, strict=True)]

    results = run(0)
    return Rounded(results[:n], results[n:], warned, more)


def check_exact(program: Program, p: Plain) -> list[Failure]:
    """(b) With every residual exact, values and gradients are JAX's to the last bit.

    But for the order in which three or more gradients are summed, which `compress`
    leaves open: by that they differ no more than by rounding errors.
    """
    f = _compressed(program, p, EXACT)
    closed = jax.make_jaxpr(with_gradient(f))(p.args, p.cotangents)
    results = evaluate(closed, [*p.args, *p.cotangents])
    n = len(p.outputs)
    is_open = p.num_sums > 1 or (RULE_PER_OUTPUT and n > 1)
    failures = [Failure("exact value", d) for d in differing(results[:n], p.outputs)]
    for number, (got, expected) in enumerate(
        zip(results[n:], p.gradients, strict=True)
    ):
        found = differing([got], [expected], signs=False)
        if not found or (is_open and _is_reordered(program, p, number, got, expected)):
            continue
        failures.append(Failure("exact gradient", f"input {number}: {found[0]}"))
    return failures


def _is_reordered(
    program: Program, p: Plain, number: int, got: Any, expected: Any
) -> bool:
    """Whether a gradient is as expected but for what another order of sums changes."""
    exact, epsilon = wide(p.gradients[number]), float(jnp.finfo(expected.dtype).eps)
    # `reduce_precision` rounds the cotangent too: a sum after it, not before it,
    # differs by a unit of that precision.
    epsilon = max([epsilon, *_reduced_epsilons(program)])
    runs = np.stack([wide(run[number]) for run in p.rounded])
    # An element's own three runs may happen to agree: the largest spread of all. They
    # are of the first of a batch, whose gradient may be zero where others' is not.
    largest = max(np.abs(exact).max(), np.abs(wide(expected)).max())
    spread = np.abs(runs - exact).max() + epsilon * largest
    return bool((np.abs(wide(got) - wide(expected)) <= SAFETY * spread).all())


def check_value(p: Plain, r: Rounded, bits: int) -> list[Failure]:
    """(a) The value is the plain program's to the last bit."""
    found = differing(r.outputs, p.outputs)
    return [Failure("value", f"{bits} bits, output {d}") for d in found]


def check_finite(p: Plain, r: Rounded, bits: int) -> list[Failure]:
    """(e) No gradient is infinite or NaN where JAX's is finite."""
    failures = []
    for n, g in enumerate(r.gradients):
        bad = ~np.isfinite(wide(g))
        if bad.any():
            keys = bad.reshape(len(bad), -1).any(1).sum()
            text = f"{bits} bits, input {n}: not finite with {keys} of {KEYS} keys"
            failures.append(Failure("finite", text))
    return failures


def check_size(p: Plain, r: Rounded) -> list[Failure]:
    """(c) At 8 bits the error of one draw is less than the gradient.

    Or than the error of JAX's own rounding, times the ratio of the two steps: terms
    that cancel (a norm of a norm is constant) leave less than either.
    """
    if r.warned:
        return []
    errors, own = _errors(p, r, range(len(p.gradients)))
    median, largest = np.median(errors), np.max(errors)
    if median <= max(1, own * STEPS):
        return []
    text = f"8 bits: error of {median:.3g} gradients (median), {largest:.3g} (largest)"
    return [Failure("size", text)]


def check_each(p: Plain, r: Rounded) -> list[Failure]:
    """(c) Where nothing is biased, each input's gradient errs by less than its half.

    Eight bits err by about a 100th of a value, which a dozen operations magnify.
    """
    failures = []
    for n, gradient in enumerate(p.gradients):
        if r.warned or norm([gradient]) < SATURATED * norm(p.cotangents):
            continue
        errors, own = _errors(p, r, [n])
        median = np.median(errors)
        if median > max(1 / 2, own * STEPS):
            text = f"8 bits, input {n}: error of {median:.3g} gradients (median)"
            failures.append(Failure("each", text))
    return failures


def _errors(p: Plain, r: Rounded, inputs: Sequence[int]) -> tuple[list[float], float]:
    """Each key's error of some inputs' gradients over their size, and JAX's own."""
    exact = [p.gradients[n] for n in inputs]
    off = lambda gradients: distance(gradients, exact) / norm(exact)
    errors = [off([r.gradients[n][k] for n in inputs]) for k in range(KEYS)]
    return errors, max(off([run[n] for n in inputs]) for run in p.rounded)


def _directions(gradient: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Unit vectors: two random, the gradient's signs, the gradient."""
    n = gradient.size
    signs = rng.choice([-1.0, 1.0], (2, n))
    along = np.sign(gradient.ravel())
    rows = np.stack([*signs, along, gradient.ravel()])
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norms == 0, 1, norms)


def _projections(gs: Any, directions: np.ndarray) -> np.ndarray:
    gs = wide(gs)
    return gs.reshape(len(gs), -1) @ directions.T


def check_mean(program: Program, p: Plain, r8: Rounded, r4: Rounded) -> list[Failure]:
    """(d) The mean gradient over keys is JAX's.

    A residual used twice on one path of the backward pass leaves a bias of second order
    in its rounding (the README says so), as does anything smooth. At 4 bits that is
    289 times what it is at 8, so the 4-bit mean bounds it. A bias of first order, such
    as a wrong formula has, or a step, is the same at both and stands out.
    """
    failures, rng = [], np.random.default_rng([program.seed, 2])
    more: list[jax.Array] | None = None
    narrowest = _coarsest_epsilon(program)
    for n, gradient in enumerate(p.gradients):
        exact = wide(gradient)
        directions = _directions(exact, rng)
        if np.linalg.norm(exact) < SATURATED * norm(p.cotangents):
            continue
        expected = _projections(exact[None], directions)[0]
        runs = np.stack([wide(run[n]) for run in p.rounded])
        order = np.abs(_projections(runs, directions) - expected).max(0)
        order = order + np.finfo(np.float32).eps * np.linalg.norm(exact)
        coarse = _projections(r4.gradients[n], directions)
        smooth = SECOND_ORDER * (
            np.abs(coarse.mean(0) - expected) + _error(coarse, T_LIMIT)
        )
        # A local derivative rounded once to the type of its value moves no projection
        # by more than half a unit of the gradient's norm: one unit, for two of them.
        allowed = SAFETY * order + narrowest * np.linalg.norm(exact) + smooth
        fine = _projections(r8.gradients[n], directions)
        if (np.abs(fine.mean(0) - expected) <= allowed + _error(fine, SUSPECT)).all():
            continue
        more = r8.more() if more is None else more
        fine = _projections(more[n], directions)
        bias, noise = np.abs(fine.mean(0) - expected), _error(fine, T_LIMIT)
        if (bias <= allowed + noise).all():
            continue
        worst = int(np.argmax(bias - allowed - noise))
        one = fine.std(0)[worst]
        text = (
            f"8 bits, input {n} ({program.inputs[n].name}): bias {bias[worst]:.3g}, "
            f"allowed {allowed[worst]:.3g}; noise of a draw {one:.3g}, "
            f"gradient {np.linalg.norm(exact):.3g}, "
            f"direction {'random random signs gradient'.split()[worst]}"
        )
        failures.append(Failure("mean", text))
    return failures


def _coarsest_epsilon(program: Program) -> float:
    """Of the types that the program mentions, and of reductions to their precision."""
    text = f"{program.source()} {[i.dtype for i in program.inputs]}"
    types = [t for t in ("bfloat16", "float16", "float32") if t in text + "float32"]
    narrow = [float(jnp.finfo(t).eps) for t in types]
    return max([*narrow, *_reduced_epsilons(program)])


def _reduced_epsilons(program: Program) -> list[float]:
    found = re.findall(r"reduce_precision\(.*?, \d+, (\d+)\)", program.source())
    return [2.0 ** -float(bits) for bits in found]


def _error(samples: np.ndarray, limit: float) -> np.ndarray:
    return limit * samples.std(0, ddof=1) / np.sqrt(len(samples))


def check_table(program: Program, p: Plain) -> tuple[list[Failure], Any]:
    """(f) The table counts the bytes that jax.vjp keeps beside the inputs."""
    f = _compressed(program, p, jaxact.Policy(bits=8))
    table = jaxact.residuals(f, *p.args)
    closed = jax.make_jaxpr(lambda *a: jax.tree.leaves(jax.vjp(f, *a)[1]))(*p.args)
    jaxpr = closed.jaxpr
    kept = {v for v in jaxpr.outvars if not hasattr(v, "val")}
    kept -= {*jaxpr.invars, *jaxpr.constvars}
    size = sum(v.aval.size * v.aval.dtype.itemsize for v in kept)
    if size == table.stored_bytes:
        return [], table
    text = f"table says {table.stored_bytes} bytes, jax.vjp keeps {size}"
    return [Failure("table", text)], table


def check_label(program: Program, p: Plain, table: Any) -> list[Failure]:
    """(h) What is biased is so inside of jax.lax.cond, or its mean is right there."""
    if "biased" not in {row.bias for row in table.rows}:
        return []

    plain_f = p.f

    def inside(*args: Any) -> Any:
        return lax.cond(True, plain_f, plain_f, *args)

    f = jaxact.compress(
        inside, policy=jaxact.Policy(bits=8), activations=program.activations
    )
    labels = {row.bias for row in jaxact.residuals(f, *p.args).rows}
    if "unbiased" not in labels or "biased" in labels:
        return []
    # Other residuals may be stored there, so that the label alone tells nothing.
    p = dataclasses.replace(p, f=inside)
    failures = check_mean(program, p, rounded(program, p, 8), rounded(program, p, 4))
    return [
        Failure("label", f"'unbiased' inside of lax.cond: {failure.message}")
        for failure in failures
    ]


def check_batched(program: Program, p: Plain) -> list[Failure]:
    """(g) vmap and scan of the compressed program are those of the plain one.

    The gradient is with every residual exact. JAX may sum in another order when it
    batches what it has transposed instead of transposing what it has batched.
    """
    failures = []
    stack = lambda xs: [
        jnp.stack([x, x[::-1]]) if x.ndim else jnp.stack([x, x]) for x in xs
    ]
    args, cotangents = stack(p.args), stack(p.cotangents)
    n = len(p.outputs)

    def over(f: Callable[..., Any], how: str) -> Callable[..., Any]:
        if how == "vmap":
            return jax.vmap(f)
        return lambda *a: lax.scan(lambda c, row: (c, f(*row)), 0, a)[1]

    for how in ("vmap", "scan"):
        try:
            closed = jax.make_jaxpr(with_gradient(over(p.f, how)))(args, cotangents)
        except Exception:  # JAX itself has no batching rule or gradient for it
            continue
        expected = evaluate(closed, [*args, *cotangents])
        failures += _unlike_alone(p, [e[0] for e in expected], how)
        for policy in (EXACT, jaxact.Policy()):
            f = over(_compressed(program, p, policy), how)
            closed = jax.make_jaxpr(with_gradient(f))(args, cotangents)
            results = evaluate(closed, [*args, *cotangents])
            found = differing(results[:n], expected[:n])
            failures += [Failure(how, f"{policy}, output {d}") for d in found]
            if policy is not EXACT:
                continue
            for number, (got, g) in enumerate(
                zip(results[n:], expected[n:], strict=True)
            ):
                if not _is_reordered(program, p, number, got, g):
                    failures += [Failure(how, f"input {number}: another gradient")]
    return failures


def _unlike_alone(p: Plain, first: Sequence[Any], how: str) -> list[Failure]:
    """The first of a batch, in the plain program, is what it is by itself.

    Were it not, `evaluate` would be wrong. Sums in another order differ by rounding
    errors; a step in the program may turn one into a jump of a few elements.
    """
    alone = [*p.outputs, *p.gradients]
    off = distance(first, alone) / norm(alone)
    return [] if off < 0.05 else [Failure("evaluate", f"{how}: differs by {off:.2g}")]


def check_jit(program: Program, p: Plain) -> list[Failure]:
    """(a) Compiled, the value is the compiled plain program's to the last bit."""
    try:
        expected = jax.jit(p.f)(*p.args)
    except jax.errors.JaxRuntimeError:  # XLA:CPU refuses some layouts of an FFT
        return []
    f = _compressed(program, p, jaxact.Policy())
    found = differing(jax.jit(f)(*p.args), expected)
    return [Failure("jit", f"output {d}") for d in found]


def check_rules(program: Program, p: Plain) -> list[Failure]:
    """Rules for all that a program keeps, statistics and masks too, have a gradient."""
    for action in (jaxact.Quantize(4), jaxact.Recompute()):
        f = _compressed(program, p, jaxact.Policy(rules=(jaxact.Rule(action),)))
        jax.make_jaxpr(with_gradient(f))(p.args, p.cotangents)  # no error
    return []


def check_used_again(program: Program, p: Plain) -> list[Failure]:
    """(h) One trace, used again for each argument alone, has each one's gradient."""
    f = jax.jit(_compressed(program, p, EXACT))
    failures = []
    for number in [*range(len(p.args)), *range(len(p.args))]:
        of_one = lambda x, i=number: f(*p.args[:i], x, *p.args[i + 1 :])
        closed = jax.make_jaxpr(with_gradient(of_one))([p.args[number]], p.cotangents)
        *_, got = evaluate(closed, [p.args[number], *p.cotangents])
        if not _is_reordered(program, p, number, got, p.gradients[number]):
            failures += [Failure("used again", f"input {number}: another gradient")]
    return failures
