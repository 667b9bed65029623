"""A data-parallel step on 8 host devices: same collectives, same gradient, as plain."""

import collections
import re
import sys
from pathlib import Path

import jax

root = Path(__file__).parents[2]
sys.path[:0] = [str(root), str(root / "kernels"), str(root / "tests")]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # LLVM's: half the time

import jaxact  # noqa: E402
from support.programs import PROGRAMS, relative_error, scalar  # noqa: E402

P = jax.P
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
program = next(p for p in PROGRAMS if p.name == "gelu_mlp")
params, x = program.arguments()
small = jaxact.compress(program.f, policy=jaxact.Policy(bits=8), activations="x")


def compiled(f, params, x):
    return jax.jit(jax.grad(scalar(f))).lower(params, x).compile()


def collectives(program):
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return collections.Counter(
        re.findall(rf" ({kinds})(?:-start)?\(", program.as_text())
    )


one = compiled(small, params, x)(params, x)
sharded = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
replicated = jax.device_put(params, jax.NamedSharding(mesh, P()))
packed, plain = (compiled(f, replicated, sharded) for f in (small, program.f))
assert collectives(packed) == collectives(plain), (
    collectives(packed),
    collectives(plain),
)
# The same noise on 1 and 8 devices: only the order of sums differs.
error = relative_error(jax.device_get(packed(replicated, sharded)), jax.device_get(one))
assert error < 1e-5, error
