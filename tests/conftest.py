"""Strict promotion, one platform, one key."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compiling takes longer than any deadline; the same examples on every run.
hypothesis.settings.register_profile(
    "jaxact", deadline=None, derandomize=True, database=None
)
hypothesis.settings.load_profile("jaxact")


@pytest.fixture
def key():
    return jax.random.key(0)
