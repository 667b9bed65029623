"""Judge random programs: `python -m fuzz --count 300 --seed 0`.

A program is its seed: `--only SEED ...` judges these again.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

BATCH = 25  # programs that a process judges between two reports
RENEWED = 500  # programs, after which compiled operations are forgotten


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--count", type=_positive, default=300, help="programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--only", type=int, nargs="+", help="these seeds")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--shrink", type=int, default=100, help="attempts a failure")
    options = parser.parse_args()
    seeds = options.only or [*range(options.seed, options.seed + options.count)]
    start, tally = time.time(), Counter()
    for verdict in _verdicts(seeds, options.jobs, options.shrink):
        tally["programs"] += 1
        tally["discarded"] += verdict.discarded is not None
        tally["failures"] += bool(verdict.failures)
        tally["cpu"] += verdict.seconds
        if verdict.failures:
            print(f"\n# seed {verdict.seed}\n{verdict.report}\n", flush=True)
        elif options.only:
            print(f"{verdict.program}\n{verdict.discarded or 'holds'}")
        if tally["programs"] % BATCH == 0:
            each = tally["cpu"] / tally["programs"]
            print(
                f"{tally['programs']}/{len(seeds)}, {tally['failures']} failures, "
                f"{each:.2f} s of CPU each",
                file=sys.stderr,
                flush=True,
            )
    each = tally["cpu"] / max(tally["programs"], 1)
    print(
        f"{tally['programs']} programs, {tally['failures']} failures "
        f"({tally['discarded']} discarded; {each:.2f} s of CPU each, "
        f"{time.time() - start:.0f} s)"
    )
    return 1 if tally["failures"] else 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: an integer from 1 on is required")
    return int(text)


def _verdicts(seeds: list[int], jobs: int, attempts: int) -> Iterator:
    from fuzz.verdict import verdicts

    batches = [(seeds[i : i + BATCH], attempts) for i in range(0, len(seeds), BATCH)]
    if jobs == 1:
        for number, batch in enumerate(batches):
            yield from verdicts(*batch, forget=number % (RENEWED // BATCH) == 0)
        return
    # Fresh processes forget what they compiled. Not concurrent.futures: its pool may
    # stop for ever where all its processes are renewed at once.
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, maxtasksperchild=RENEWED // BATCH) as pool:
        for task in [pool.apply_async(verdicts, batch) for batch in batches]:
            yield from task.get()


if __name__ == "__main__":
    sys.exit(main())
