"""The example of a GPT on a mesh, tiny: tests/test_processes.py runs this file.

Its arguments are those of examples/sharded.py.
"""

import sys
from pathlib import Path

import jax.numpy as jnp

root = Path(__file__).parents[2]
sys.path[:0] = [str(root), str(root / "kernels"), str(root / "examples")]

import gpt  # noqa: E402
import loop  # noqa: E402
import sharded  # noqa: E402
from models.gpt_nnx import Shape  # noqa: E402

# In float32 the order of sums changes little.
shape = Shape(layers=2, width=32, heads=2, length=16, chunks=2, dtype=jnp.float32)
gpt.SMALL = gpt.Size(shape, batch=8, steps=20, rate=1e-2)

# They compile the step four times more, and have tests of their own.
loop.memory_table = sharded.exchanged = lambda *_: "no table"

if __name__ == "__main__":
    sharded.main()
