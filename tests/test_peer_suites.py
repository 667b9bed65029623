"""The table of accepted failures says of each what, where, and why."""

import re
from collections import Counter

import pytest

from support import peer_suites
from support.variants import thorough

ENTRIES = peer_suites.read_table()


def of(entry):
    return f"{entry.suite}-{entry.tests[0]}"


@pytest.mark.parametrize("entry", ENTRIES, ids=of)
def test_an_entry_names_its_tests_and_gives_a_reason(entry):
    assert entry.suite in {suite.name for suite in peer_suites.SUITES}
    assert entry.modes and set(entry.modes) <= {"exact", "bits8"}
    assert entry.tests and all(p.startswith("test") for p in entry.tests)
    assert len(entry.reason.split()) >= 5 and entry.reason.endswith(".")


@pytest.mark.parametrize("entry", ENTRIES, ids=of)
def test_an_entry_accepts_one_error_and_no_other(entry):
    """So that an accepted test that starts to fail in another way is reported."""
    assert re.compile(entry.error)
    for error in "", "f(x) -> ValueError: shapes", "worker 'gw0' crashed":
        assert not entry.covers(f"SomeTest::{entry.tests[0]}", error)


def test_no_test_is_listed_twice_in_a_mode():
    listed = Counter(
        (entry.suite, mode, pattern)
        for entry in ENTRIES
        for mode in entry.modes
        for pattern in entry.tests
    )
    assert not [key for key, count in listed.items() if count > 1]


def test_a_missing_checkout_is_skipped_with_what_to_give(capsys):
    assert peer_suites.main(["--suite=RematTest", "--jax=/nowhere"]) == 1
    printed = capsys.readouterr().out
    assert "give --jax PATH" in printed and "no suite ran" in printed


def run(folder, suite, source, capsys):
    """Exit status and output of tests under the adapter, in a checkout of their own."""
    file = folder / suite.path
    file.parent.mkdir()
    file.write_text(source)
    given = f"--suite={suite.name}", f"--{suite.project}={folder}", "--mode=exact"
    return peer_suites.main(given), capsys.readouterr().out


SUITES = {suite.name: suite for suite in peer_suites.SUITES}


@thorough
@pytest.mark.slow
def test_a_failure_that_the_table_does_not_list_is_new(tmp_path, capsys):
    source = """
def test_right():
    pass

def test_wrong():
    assert 1 == 2
"""
    status, printed = run(tmp_path, SUITES["equinox_checkpoint"], source, capsys)
    assert status == 1
    assert re.search(r"exact +1 +1 +0 +1\n", printed)
    assert "test_wrong\n    assert 1 == 2 -> AssertionError" in printed


@thorough
@pytest.mark.slow
def test_remat_is_replaced_for_tests_and_not_for_libraries(tmp_path, capsys):
    """Only compress leaves a Python scalar as it is."""
    source = """
import jax

def test_of_a_test():
    seen = []
    jax.checkpoint(seen.append)(1.0)
    jax.remat(policy=None)(seen.append)(1.0)
    assert seen == [1.0, 1.0]

def test_of_a_library():
    seen = []
    exec("import jax; jax.checkpoint(seen.append)(1.0)", {
        "seen": seen, "__name__": "flax.core.lift"
    })
    assert isinstance(seen[0], jax.core.Tracer)
"""
    status, printed = run(tmp_path, SUITES["equinox_checkpoint"], source, capsys)
    assert status == 0, printed
    assert re.search(r"exact +2 +0 +0 +0\n", printed)


@thorough
@pytest.mark.slow
def test_the_outermost_derivative_is_of_the_compressed_function(tmp_path, capsys):
    source = """
import jax, jax.numpy as jnp, pytest
from jax.test_util import check_grads

def program(f):
    return str(jax.make_jaxpr(f)(1.0))

@pytest.mark.parametrize("derivative", [jax.grad, jax.value_and_grad, jax.jacrev])
def test_reverse(derivative):
    assert "jaxact_packed" in program(derivative(jnp.sin))

def test_vjp():
    assert "jaxact_packed" in program(lambda x: jax.vjp(jnp.sin, x)[1](x))

def test_forward_over_reverse():
    assert "jaxact_packed" not in program(jax.jacfwd(jax.grad(jnp.sin)))

def test_every_order():
    check_grads(jnp.sin, (1.0,), 3)

def test_equal_and_not_close():
    calls = []

    def f(x):  # gives another gradient each time
        calls.append(x)
        return x * (1 + len(calls) * 1e-6)

    with pytest.raises(AssertionError, match="Arrays are not equal"):
        check_grads(f, (1.0,), 1)
"""
    status, printed = run(tmp_path, SUITES["nn"], source, capsys)
    assert status == 0, printed
    assert re.search(r"exact +7 +0 +0 +0\n", printed)
