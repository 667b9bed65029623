"""Random programs hold; and a check that could not fail would be none."""

import dataclasses

import jax
import numpy as np
import pytest
from fuzz.checks import Discarded, check_mean, check_size, check_value, plain, rounded
from fuzz.evaluate import evaluate
from fuzz.operations import OPERATIONS
from fuzz.programs import Input, Program, Step, generate
from fuzz.verdict import verdict

pytestmark = pytest.mark.unoptimized


def test_number_of_operations():
    assert sum(map(len, OPERATIONS.values())) >= 200


@pytest.mark.parametrize("seed", range(4))
def test_a_seed_is_a_program(seed):
    assert str(generate(seed)) == str(generate(seed))


@pytest.mark.parametrize("seed", range(6))
def test_evaluated_by_numpy_as_compiled(seed):
    """Within float32's rounding; the plain program alone."""
    program = generate(100 + seed)
    f, args = program.function(), program.values()
    for mine, compiled in zip(
        evaluate(jax.make_jaxpr(f)(*args), args), jax.jit(f)(*args), strict=True
    ):
        # Twelve operations, the last of which may be in bfloat16 or after a rounding.
        scale = np.abs(np.asarray(compiled, np.complex64)).max() + 1e-3
        wide = lambda x: np.asarray(x).astype(np.complex64)
        assert np.median(np.abs(wide(mine) - wide(compiled))) <= 2**-7 * scale


def _scaled_wrongly():
    """x @ w, and the gradients of 1.02 times that."""
    step = Step("v1", "jnp.tanh(x0 @ w0 * 0.2)")
    inputs = (Input("x0", (16, 64)), Input("w0", (64, 64)))
    return Program(0, inputs, (step,), ("v1",))


def test_a_bias_is_found():
    program = _scaled_wrongly()
    p = plain(program)
    r8, r4 = rounded(program, p, 8), rounded(program, p, 4)
    assert not check_mean(program, p, r8, r4)

    def by(factor, r):
        more = lambda: [factor * g for g in r.more()]
        scaled = [factor * g for g in r.gradients]
        return dataclasses.replace(r, gradients=scaled, more=more)

    assert check_mean(program, p, by(1.02, r8), by(1.02, r4))
    assert check_size(p, by(3.0, r8)) and not check_size(p, r8)
    moved = dataclasses.replace(r8, outputs=[np.nextafter(r8.outputs[0], 2)])
    assert check_value(p, moved, 8) and not check_value(p, r8, 8)


@pytest.mark.slow
def test_programs_hold():
    verdicts = [verdict(seed) for seed in range(300)]
    assert [v.report for v in verdicts if v.failures] == []
