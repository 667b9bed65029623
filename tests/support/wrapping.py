"""What the tests of Linen and of NNX modules share: sizes, data, ways to compress."""

import jax

import jaxact
from jaxact import Exact, Policy

WIDTH, BATCH = 12, 32
BITS = 3
# Compiled without LLVM's optimizations; test_linen.py says why.
AS_WRITTEN = {"xla_backend_optimization_level": 0}
# The unbiasedness tests fail with at most this probability for each variant.
FAILURE = 1e-6
KEYS = 64
PROJECTIONS = 8


def plain(target):
    return target


def exact(target):
    return jaxact.compress(target, policy=Policy(default=Exact()))


def packed(target):
    return jaxact.compress(target, policy=Policy(BITS))


def data(seed=0):
    return jax.random.normal(jax.random.key(seed), (BATCH, WIDTH))
