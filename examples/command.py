"""The command line of the examples: their options, errors and interrupts in one line.

  --data PATH          the data; without it, data that comes with a dependency
  --policy NAME        for residuals: default, none, or one of the others
  --checkpoint FOLDER  save there, and go on from the newest one there
  --dry-run            the table of memory alone, from shapes; nothing runs

and others: `--help` lists them.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn


def parser(doc: str | None, policies: Iterable[str]) -> argparse.ArgumentParser:
    """The options that all examples have; an example adds its own.

    Args:
      doc: the example's description.
      policies: names for `--policy`.
    """
    options = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    add("--data", type=Path, help="the data; else data that comes with a dependency")
    add(
        "--policy",
        choices=tuple(policies),
        default="default",
        help="for the residuals. default: --bits for each; none: nothing is "
        "compressed; adaptive: in the format Adaptive; allocated: that, with the bits "
        "spread by measured sensitivity; dots_saveable, inputs: only results of "
        "products, or inputs of the compressed calls, are stored, and the others "
        "computed again; actnn, gact, division, acgc: as in these papers",
    )
    add("--bits", type=int, default=4, choices=range(1, 9), help="of a stored value")
    add(
        "--size",
        choices=("small", "full"),
        default="small",
        help="small: for a CPU; full: for a GPU",
    )
    add("--steps", type=at_least_one, help="of the whole training")
    add("--batch", type=at_least_one, help="examples in a step")
    seeds = "of parameters and of the data's order"
    add("--seed", type=at_least_zero, default=0, help=seeds)
    add("--checkpoint", type=Path, help="save in this folder, and go on from there")
    add(
        "--save-every",
        type=at_least_one,
        default=100,
        help="steps from one saving to the next",
    )
    add(
        "--target",
        help="compiled memory of this GPU too, as h100; none attached (Linux only)",
    )
    add("--dry-run", action="store_true", help="the table of memory alone; no training")
    return options


def at_least_one(text: str) -> int:
    """A count on the command line.

    Raises:
      argparse.ArgumentTypeError: it is no integer, or less than 1.
    """
    return _at_least(1, text)


def at_least_zero(text: str) -> int:
    """A seed or an index on the command line.

    Raises:
      argparse.ArgumentTypeError: it is no integer, or less than 0.
    """
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(
            f"{text}: an integer from {least} on is required"
        )
    return int(text)


def exit_alone(message: str) -> NoReturn:
    """Print an error and end this process, without waiting for any other.

    A usual exit closes checkpoints and connections, which waits for all processes.
    """
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    os._exit(1)


@contextlib.contextmanager
def short_errors() -> Iterator[None]:
    """Print what is wrong with the command or its files as one line, and exit.

    Other exceptions are defects and keep their traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except (ValueError, OSError, FloatingPointError) as error:
        script = Path(sys.argv[0]).name
        raise SystemExit(f"{script}: error: {error}") from error
