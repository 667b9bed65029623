"""Generate, judge and shrink: one verdict for each seed."""

import dataclasses
import time
from collections.abc import Sequence

import jax

from fuzz.checks import Failure
from fuzz.judge import judge
from fuzz.programs import Program, generate
from fuzz.reference import Discarded
from fuzz.shrink import shrink
from support.garbage import look_rarely

THOROUGH = 10  # one program in so many gets the checks that compile
ATTEMPTS = 4  # programs tried for a seed until JAX's gradient is a yardstick


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of one seed.

    Attributes:
      discarded: why no program of this seed could be judged.
      report: the failures, and the smallest program that fails.
    """

    seed: int
    program: Program
    failures: tuple[Failure, ...]
    discarded: str | None
    report: str
    seconds: float


def verdicts(
    seeds: Sequence[int], shrink_attempts: int, *, forget: bool = False
) -> list[Verdict]:
    """A verdict for each seed; `forget` what was compiled before."""
    jax.config.update("jax_disable_most_optimizations", True)
    look_rarely()
    if forget:
        jax.clear_caches()
    return [verdict(seed, shrink_attempts) for seed in seeds]


def verdict(seed: int, shrink_attempts: int = 0) -> Verdict:
    """Judge the program of a seed."""
    start, thorough = time.process_time(), seed % THOROUGH == 0
    discarded = None
    for attempt in range(ATTEMPTS):
        program = generate(seed, attempt)
        try:
            failures = tuple(judge(program, thorough=thorough))
        except Discarded as reason:
            discarded = str(reason)
            continue
        seconds = time.process_time() - start
        report = ""
        if failures:
            report = _report(program, failures, thorough, shrink_attempts)
        return Verdict(seed, program, failures, None, report, seconds)
    return Verdict(seed, program, (), discarded, "", time.process_time() - start)


def _report(
    program: Program, failures: Sequence[Failure], thorough: bool, attempts: int
) -> str:
    # One failure is followed down; that of a label is the least of several.
    kind = min(failures, key=lambda f: f.check == "label").check

    def still_fails(candidate: Program) -> bool:
        try:
            return kind in {f.check for f in judge(candidate, thorough=thorough)}
        except Exception:  # no program any more
            return False

    smallest = shrink(program, still_fails, attempts) if attempts else program
    first = [str(f) for f in failures]
    if smallest != program:
        first += ["smallest:", *map(str, judge(smallest, thorough=thorough))]
    return "\n".join([*first, str(smallest)])
