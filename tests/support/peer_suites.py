"""Run other projects' tests with `jaxact.compress` in place of their remat.

    python tests/support/peer_suites.py --jax ../jax --suite RematTest --mode exact

The tests are not part of this project. Each option names a checkout of one of theirs,
at the version that is installed: `git clone --branch jax-v0.10.2
https://github.com/jax-ml/jax`. Of JAX and Equinox the files in tests/ are enough. Haiku
and Equinox must be installed.

Modes: `base` replaces nothing, and shows whether a suite passes here at all. `exact` is
Policy(default=Exact()), and judges the transform: the values must be JAX's. `bits8` is
Policy(bits=8), and judges the stored form: residuals of fewer than 64 elements stay
exact, so that most tests still pass at their own tolerances. `checkpoint` is a control
for the suites that differentiate: `jax.checkpoint` in place of compress. A test that
fails there as well fails because its function is traced.

A failure is accepted if peer_suites.json lists it, with the error that is expected and
the reason. Any other failure is printed, and makes the exit status 1; so does a run in
which every suite is skipped.
"""

import argparse
import dataclasses
import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parent.parent
TABLE = SUPPORT / "peer_suites.json"
CONTROL = "checkpoint"
MODES = "base", CONTROL, "exact", "bits8"


@dataclasses.dataclass(frozen=True)
class Suite:
    """Tests of one file of a project.

    Attributes:
      kind: the replacement, as peer_adapter.py names it.
      project: the option that says where the checkout is.
      path: of the file, in the checkout.
      test: a class or function in it; all of it when empty.
      keyword: pytest's -k.
    """

    name: str
    kind: str
    project: str
    path: str
    test: str = ""
    keyword: str = ""


HAIKU_TESTS = "haiku/_src/integration/hk_transforms_test.py"
SUITES = (
    Suite("RematTest", "remat", "jax", "tests/api_test.py", "RematTest"),
    Suite("CustomVJPTest", "grad", "jax", "tests/custom_api_test.py", "CustomVJPTest"),
    Suite("lax_autodiff", "grad", "jax", "tests/lax_autodiff_test.py"),
    Suite("lax_control_flow", "grad", "jax", "tests/lax_control_flow_test.py"),
    Suite("nn", "grad", "jax", "tests/nn_test.py"),
    Suite(
        *("linen_remat", "linen", "flax", "tests/linen/linen_transforms_test.py"),
        keyword="remat",
    ),
    Suite("nnx_remat", "nnx", "flax", "tests/nnx/transforms_test.py", "TestRemat"),
    Suite("haiku_remat", "remat", "haiku", HAIKU_TESTS, keyword="test_hk_remat"),
    Suite("equinox_checkpoint", "remat", "equinox", "tests/test_checkpoint.py"),
)


@dataclasses.dataclass(frozen=True)
class Accepted:
    """Failures that the contract of `compress` implies.

    Attributes:
      suite: a name in SUITES.
      modes: in which they fail.
      tests: patterns of test names, as of a shell.
      error: regular expression, found in "failing statement -> error".
      reason: why this is no defect.
    """

    suite: str
    modes: Sequence[str]
    tests: Sequence[str]
    error: str
    reason: str

    def covers(self, test: str, error: str) -> bool:
        name = test.rpartition("::")[2]
        named = any(fnmatch.fnmatchcase(name, pattern) for pattern in self.tests)
        return named and re.search(self.error, error, re.DOTALL) is not None


def read_table() -> list[Accepted]:
    """The entries of peer_suites.json."""
    return [Accepted(**entry) for entry in json.loads(TABLE.read_text())]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of one suite in one mode: counts, and the failures that are not accepted."""

    suite: str
    mode: str
    counts: Counter
    unexpected: dict[str, str]


def run(suite: Suite, mode: str, source: Path, sample: int | None) -> Outcome:
    """Run a suite in a process of its own."""
    target = str(source / suite.path) + (f"::{suite.test}" if suite.test else "")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        # One worker: if a test ends the process, the others still run.
        command = [
            *(sys.executable, "-m", "pytest", target, "-n1", "-q", "--tb=short"),
            *("-c", os.devnull, "--rootdir", str(source), "--import-mode=importlib"),
            *("-p", "no:cacheprovider", "-p", "support.peer_adapter"),
            *(f"--peer-kind={suite.kind}", f"--peer-mode={mode}"),
            f"--peer-report={report}",
            *([f"--peer-sample={sample}"] if sample else []),
            *(["-k", suite.keyword] if suite.keyword else []),
        ]
        ran = subprocess.run(command, capture_output=True, text=True, env=environment())
        if not report.exists():
            raise RuntimeError(f"{' '.join(command)}\n{ran.stdout}{ran.stderr}")
        result = json.loads(report.read_text())
    if not result["outcomes"]:
        raise RuntimeError(f"No test ran in {target}.\n{ran.stdout}{ran.stderr}")
    table = read_table()
    entries = [e for e in table if e.suite == suite.name and mode in e.modes]
    unexpected = {
        test: error
        for test, error in result["failures"].items()
        if not any(entry.covers(test, error) for entry in entries)
    }
    counts = Counter(result["outcomes"].values())
    return Outcome(suite.name, mode, counts, unexpected)


def environment() -> dict[str, str]:
    """This project's own files before any that are installed."""
    folders = [ROOT, ROOT / "kernels", ROOT / "tests", os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(str(folder) for folder in folders if folder)
    return {"JAX_PLATFORMS": "cpu", **os.environ, "PYTHONPATH": path}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for project in dict.fromkeys(suite.project for suite in SUITES):
        parser.add_argument(f"--{project}", type=Path, help="a checkout of it")
    names = [suite.name for suite in SUITES]
    parser.add_argument("--suite", action="append", choices=names, help="all, unless")
    parser.add_argument("--mode", action="append", choices=MODES, help="all, unless")
    parser.add_argument("--sample", type=int, help="so many tests of each suite")
    options = parser.parse_args(arguments)

    failed, num_runs = False, 0
    print(f"{'suite':20}{'mode':8}{'passed':>8}{'failed':>8}{'skipped':>9}{'new':>6}")
    for suite in SUITES:
        if suite.name not in (options.suite or names):
            continue
        source = getattr(options, suite.project)
        if source is None or not (source / suite.path).exists():
            wanted = f"give --{suite.project} PATH, a checkout with {suite.path}"
            print(f"{suite.name:20}skipped: {wanted}")
            continue
        for mode in options.mode or MODES:
            if mode == CONTROL and suite.kind != "grad":
                continue  # base is that
            outcome = run(suite, mode, source.resolve(), options.sample)
            show(outcome)
            num_runs += 1
            failed = failed or (mode != CONTROL and bool(outcome.unexpected))
    if not num_runs:
        print("no suite ran")
    return int(failed or not num_runs)


def show(outcome: Outcome) -> None:
    """One row of the table; below it the failures that the table does not accept."""
    counts = [outcome.counts[name] for name in ("passed", "failed", "skipped")]
    print(
        f"{outcome.suite:20}{outcome.mode:8}{counts[0]:8}{counts[1]:8}{counts[2]:9}"
        f"{len(outcome.unexpected):6}",
        flush=True,
    )
    for test, error in outcome.unexpected.items():
        print(f"  {test}\n    " + error.strip().replace("\n", "\n    "))


if __name__ == "__main__":
    sys.exit(main())
