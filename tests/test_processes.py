"""The GPT example in several processes that find each other on this machine."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

for package in ("flax", "optax", "orbax.checkpoint", "rich"):
    pytest.importorskip(package)
pytestmark = [pytest.mark.slow, pytest.mark.unoptimized]

SCRIPT = Path(__file__).parent / "support" / "tiny_gpt.py"
LIMIT = 400  # seconds: most of it compiles, on as many cores as there are


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    return path


def start(*words):
    """A process of the example."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=env, text=True, **pipes)


def start_all(count, *words):
    """So many processes, with one device each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    shared = "--devices", 1, "--coordinator", address, "--processes", count
    return [start(*words, *shared, "--process", i) for i in range(count)]


def finished(processes):
    """What the first one printed, if all have ended well."""
    outputs = [process.communicate(timeout=LIMIT) for process in processes]
    for process, (out, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, out + err
    assert all("validation loss" not in out for out, _ in outputs[1:])
    return outputs[0][0]


def validation_loss(printed):
    return float(re.search(r"validation loss ([\d.]+) nats", printed)[1])


def test_processes_train_to_the_loss_of_one(text):
    count = 4
    words = "--data", text, "--mesh", 2, 2
    several = validation_loss(finished(start_all(count, *words)))
    one = validation_loss(finished([start(*words, "--devices", count)]))
    # Of 28 letters, log(28) = 3.3 before the first step.
    assert several < 2.5
    # The order of sums differs, and with it the noise of a few roundings.
    assert abs(several - one) < 0.02


def test_a_killed_process_ends_the_run_which_goes_on_from_its_checkpoint(
    text, tmp_path
):
    words = "--data", text, "--mesh", 2, 1, "--steps", 100, "--save-every", 5
    folder = tmp_path / "saved"
    first, second = start_all(2, *words, "--checkpoint", folder)
    began = time.monotonic()
    while not [path for path in folder.glob("[0-9]*") if path.name.isdigit()]:
        assert first.poll() is None and time.monotonic() < began + LIMIT
        time.sleep(0.05)
    second.send_signal(signal.SIGKILL)
    second.communicate()
    _, printed = first.communicate(timeout=LIMIT)
    # JAX's own watch of the other processes may abort this one: while it ends, or
    # before it says anything, where it waits for a checkpoint of both.
    assert first.returncode in (1, -signal.SIGABRT), printed
    if errors := [line for line in printed.splitlines() if ": error: " in line]:
        (error,) = errors
        assert "process 0 of 2 cannot go on. If another one has ended" in error
        assert "they go on from the last step saved" in error
    else:
        assert first.returncode == -signal.SIGABRT, printed
        assert "another task died" in printed

    resumed = finished(start_all(2, *words, "--checkpoint", folder))
    assert re.search(r"goes on from step \d+", resumed)
    # To the letter: the same steps on the same mesh.
    score = resumed.index("validation loss")
    assert resumed[score:].splitlines()[:4] == uninterrupted(words)


def uninterrupted(words):
    printed = finished(start_all(2, *words))
    return printed[printed.index("validation loss") :].splitlines()[:4]
