"""The example of a GPT on a mesh, tiny, on eight devices: its test runs this file."""

import sys
import tempfile
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec as P

root = Path(__file__).parents[2]
sys.path[:0] = [str(root), str(root / "kernels"), str(root / "examples")]
warnings.simplefilter("error")  # such as of a donated array that nothing can reuse

import gpt  # noqa: E402
import loop  # noqa: E402
import sharded  # noqa: E402
from models.gpt_nnx import Shape  # noqa: E402

import jaxact  # noqa: E402


def on(data, fsdp):
    """A mesh of the first devices."""
    devices, types = jax.devices()[: data * fsdp], (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((data, fsdp), ("data", "fsdp"), types, devices=devices)


def specs(state):
    return jax.tree.map(lambda x: x.sharding.spec, state)


def flat(params):
    leaves = jax.tree.leaves(jax.device_get(params))
    return np.concatenate([np.ravel(x) for x in leaves])


def trained(training, program, folder=None):
    """The parameters' changes after each of two steps; what is saved comes back."""
    state = loop.fresh(training)
    start, before = flat(state.params), specs(state)
    changes = []

    def step(state, batch):
        state, loss = program(state, batch)
        changes.append(flat(state.params) - start)
        return state, loss

    with loop.checkpoints(folder, every=1) as manager:
        state, _ = loop.train(training, step, state, 0, manager)
        assert specs(state) == before
    if folder is not None:
        with loop.checkpoints(folder, every=1) as manager:
            again, number = loop.restored(manager, loop.fresh(training))
        assert number == 2 and specs(again) == before
        jax.tree.map(np.testing.assert_array_equal, again, state)
    return changes


def held_bytes(state):
    """What one device has of a state."""
    one = lambda x: np.prod(x.sharding.shard_shape(x.shape), dtype=int)
    return sum(one(x) * x.dtype.itemsize for x in jax.tree.leaves(state))


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    (folder / "text.txt").write_text(
        "the quick brown fox jumps over the lazy dog. " * 40
    )
    options = loop.parser("").parse_args(["--data", str(folder / "text.txt")])
    # In float32 the order of sums changes little, and rounding noise stands out.
    shape = Shape(layers=2, width=32, heads=2, length=16, chunks=2, dtype=jnp.float32)
    gpt.SMALL = gpt.Size(shape, batch=16, steps=2, rate=1e-2)

    with jax.set_mesh(on(2, 4)):
        training = sharded.training(options, on(2, 4))
        state = loop.shapes(training)
        for tree in state.params, state.optimizer[1][0].mu:
            matrix, gain = tree["layers"]["up"]["kernel"], tree["norm"]["scale"]
            assert matrix.get_value().sharding.spec == P(None, None, "fsdp")
            assert gain.get_value().sharding.spec == P()
        policies = (None, jaxact.Policy())
        plain, packed = (sharded.compiled(training, policy) for policy in policies)
        found = [sharded.collectives(program) for program in (plain, packed)]
        assert found[0] == found[1] and found[0]["all-gather"] > 0, found
        assert packed.memory_analysis().alias_size_in_bytes == held_bytes(state)
        uncompressed = trained(training, plain)
        eight = trained(training, packed, folder / "saved")

    with jax.set_mesh(on(1, 1)):
        training = sharded.training(options, on(1, 1))
        one = trained(training, sharded.compiled(training, jaxact.Policy()))

distance = lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b)
errors = distance(eight[0], one[0]), distance(eight[1], uncompressed[1])
print(errors)
# One step, as parameters then differ in their last bits, which noise depends on: of
# float32, after Adam has divided by gradients near zero. And of 4 bits, after two.
assert errors[0] < 3e-3 and errors[1] > 0.1, errors
