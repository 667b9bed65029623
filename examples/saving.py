"""Checkpoints of a training, and a record of the options that it was begun with."""

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

RECORD = "run.json"
# Options that change no training, those that its name tells, and where it runs.
_LEFT_OUT = frozenset(
    "checkpoint save_every target dry_run output data steps batch size "
    "mesh devices distributed coordinator processes process".split()
)


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
      ValueError: it holds another, or checkpoints of none it tells: the score and the
        memory that are printed at the end would be taken for this one's.
    """
    if folder is None:
        return
    own = {key: value for key, value in vars(options).items() if key not in _LEFT_OUT}
    if options.policy == "none":
        del own["bits"]
    training = json.loads(json.dumps({"training": name} | own, default=str))
    path = folder / RECORD
    if path.exists():
        earlier = json.loads(path.read_text())
        if earlier != training:
            changed = [
                key
                for key in earlier | training
                if earlier.get(key) != training.get(key)
            ]
            raise ValueError(
                f"--checkpoint {folder} holds {_described(earlier, changed)}; this is "
                f"{_described(training, changed)}. Give another folder, or the same "
                "options."
            )
    elif any(step.name.isdecimal() for step in folder.glob("*")):
        raise ValueError(
            f"--checkpoint {folder} has checkpoints and no {RECORD}, which says of "
            "which training: give another folder."
        )
    elif jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(training))
        part.replace(path)


def _described(training: dict[str, Any], keys: Sequence[str]) -> str:
    known = [f"{key} {training[key]}" for key in keys if key in training]
    return ", ".join(known) or "one without it"
