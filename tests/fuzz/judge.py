"""All checks of one program."""

import traceback
import warnings
from collections.abc import Callable
from typing import Any

from fuzz import checks
from fuzz.checks import Failure
from fuzz.programs import Program
from fuzz.reference import plain


def judge(program: Program, *, thorough: bool) -> list[Failure]:
    """All failures of a program; `thorough` includes what compiles or traces a lot.

    Raises:
      Discarded: JAX's own gradient is no yardstick.
    """
    p = plain(program)
    failures: list[Failure] = []

    def attempt(name: str, check: Callable[[], Any]) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = check()
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{last.filename.rsplit('/', 1)[-1]}:{last.lineno}"
            text = f"{name}: {type(error).__name__}: {error} ({place})"
            failures.append(Failure("crash", text[:600]))
            return None
        if isinstance(result, list):
            failures.extend(result)
        return result

    attempt("exact", lambda: checks.check_exact(program, p))
    r8 = attempt("8 bits", lambda: checks.rounded(program, p, 8))
    r4 = attempt("4 bits", lambda: checks.rounded(program, p, 4))
    for r, bits in ((r8, 8), (r4, 4)):
        if r is not None:
            failures += checks.check_value(p, r, bits) + checks.check_finite(p, r, bits)
    found = attempt("table", lambda: checks.check_table(program, p))
    if found is not None:
        failures += found[0]
        attempt("label", lambda: checks.check_label(program, p, found[1]))
    if r8 is not None and not any(f.check == "finite" for f in failures):
        failures += checks.check_size(p, r8)
        labels = {row.bias for row in found[1].rows} if found else {"biased"}
        if "biased" not in labels:
            failures += checks.check_each(p, r8)
        if r4 is not None and "biased" not in labels:
            attempt("mean", lambda: checks.check_mean(program, p, r8, r4))
    if thorough:
        attempt("batched", lambda: checks.check_batched(program, p))
        attempt("rules", lambda: checks.check_rules(program, p))
        attempt("used again", lambda: checks.check_used_again(program, p))
        attempt("jit", lambda: checks.check_jit(program, p))
    return failures
