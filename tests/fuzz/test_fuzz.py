"""Random programs hold; and each check finds what it is there to find."""

import dataclasses

import jax
import numpy as np
import pytest

from fuzz.checks import check_each, check_mean, check_size, check_value, rounded
from fuzz.evaluate import evaluate
from fuzz.operations import OPERATIONS
from fuzz.programs import Input, Program, Step, generate
from fuzz.reference import plain
from fuzz.verdict import verdict

pytestmark = pytest.mark.unoptimized


def test_number_of_operations():
    assert sum(map(len, OPERATIONS.values())) >= 200


@pytest.mark.parametrize("seed", range(2))
def test_a_seed_is_a_program(seed):
    assert str(generate(seed)) == str(generate(seed))


# XLA:CPU cannot compile the Fourier transform of 102.
@pytest.mark.parametrize("seed", [100, 101, 103])
def test_evaluated_by_numpy_as_compiled(seed):
    program = generate(seed)
    f, args = program.function(), program.values()
    for mine, compiled in zip(
        evaluate(jax.make_jaxpr(f)(*args), args), jax.jit(f)(*args), strict=True
    ):
        # Twelve operations, the last of which may be in bfloat16 or after a rounding.
        scale = np.abs(np.asarray(compiled, np.complex64)).max() + 1e-3
        wide = lambda x: np.asarray(x).astype(np.complex64)
        assert np.median(np.abs(wide(mine) - wide(compiled))) <= 2**-7 * scale


def _layer():
    step = Step("v1", "jnp.tanh(x0 @ w0 * 0.2)")
    inputs = (Input("x0", (16, 64)), Input("w0", (64, 64)))
    return Program(0, inputs, (step,), ("v1",))


def test_a_bias_is_found():
    program = _layer()
    p = plain(program)
    r8, r4 = rounded(program, p, 8), rounded(program, p, 4)
    assert not check_mean(program, p, r8, r4)

    def by(factor, r):
        more = lambda: [factor * g for g in r.more()]
        scaled = [factor * g for g in r.gradients]
        return dataclasses.replace(r, gradients=scaled, more=more)

    assert check_mean(program, p, by(1.02, r8), by(1.02, r4))
    assert check_size(p, by(3.0, r8)) and not check_size(p, r8)
    assert check_each(p, by(1.6, r8)) and not check_each(p, r8)
    moved = dataclasses.replace(r8, outputs=[np.nextafter(r8.outputs[0], 2)])
    assert check_value(p, moved, 8) and not check_value(p, r8, 8)


@pytest.mark.parametrize("seed", range(12))
def test_program_holds(seed):
    _holds(verdict(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 60))
def test_another_program_holds(seed):
    _holds(verdict(seed))


def _holds(found):
    assert found.discarded is None, "not judged"
    assert found.report == ""
