"""Checkpoints of a training, and a record of the options that it was begun with."""

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

RECORD = "run.json"


@contextlib.contextmanager
def checkpoints(
    folder: Path | None, every: int
) -> Iterator[ocp.CheckpointManager | None]:
    """Saves the state every so many steps and keeps the last two; `None`: never."""
    if folder is None:
        yield None
        return
    options = ocp.CheckpointManagerOptions(save_interval_steps=every, max_to_keep=2)
    with ocp.CheckpointManager(folder.absolute(), options=options) as manager:
        yield manager


def restored(manager: ocp.CheckpointManager | None, state: Any) -> tuple[Any, int]:
    """The state that was saved last and the number of steps it has had, or `state`."""
    last = None if manager is None else manager.latest_step()
    if manager is None or last is None:
        return state, 0
    like = ocp.args.StandardRestore(
        jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    )
    return manager.restore(last, args=like), last


def record(folder: Path | None, name: str, options: argparse.Namespace) -> None:
    """Note in the folder which training it is of, or check that it is of this one.

    Raises:
      ValueError: it holds another: the score and the memory that are printed at the
        end would be taken for this one's.
    """
    if folder is None:
        return
    training = {"training": name, "policy": options.policy, "seed": options.seed}
    if options.policy != "none":
        training["bits"] = options.bits
    path = folder / RECORD
    if path.exists():
        earlier = json.loads(path.read_text())
        if earlier != training:
            raise ValueError(
                f"--checkpoint {folder} holds {_described(earlier)}; this is "
                f"{_described(training)}. Give another folder, or the same options."
            )
    elif jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(training))


def _described(training: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in training.items())
