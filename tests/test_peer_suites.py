"""The table of accepted failures says of each what, where, and why."""

import re
from collections import Counter

import pytest
from support import peer_suites

ENTRIES = peer_suites.read_table()


def of(entry):
    return f"{entry.suite}-{entry.tests[0]}"


@pytest.mark.parametrize("entry", ENTRIES, ids=of)
def test_an_entry_names_its_tests_and_gives_a_reason(entry):
    assert entry.suite in {suite.name for suite in peer_suites.SUITES}
    assert entry.modes and set(entry.modes) <= {"exact", "bits8"}
    assert entry.tests and all(p.startswith("test_") for p in entry.tests)
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
    assert peer_suites.main(["--suite=RematTest", "--jax=/nowhere"]) == 0
    assert "give --jax PATH" in capsys.readouterr().out


def test_a_failure_that_the_table_does_not_list_is_new(tmp_path, capsys):
    """Two tests run under the adapter; one of them fails."""
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_checkpoint.py").write_text(
        "def test_right():\n  pass\n\ndef test_wrong():\n  assert 1 == 2\n"
    )
    given = ["--suite=equinox_checkpoint", "--mode=exact", f"--equinox={tmp_path}"]
    assert peer_suites.main(given) == 1
    printed = capsys.readouterr().out
    assert re.search(r"exact +1 +1 +0 +1\n", printed)
    assert "test_wrong\n    assert 1 == 2 -> AssertionError" in printed
