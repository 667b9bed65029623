"""The benchmark of codecs records the right arrays and measures known errors."""

import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxact

pytestmark = pytest.mark.unoptimized

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def quantizers(monkeypatch):
    for package in ("flax", "optax", "rich", "sklearn"):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(EXAMPLES / "benchmarks")
    return importlib.import_module("quantizers")


@pytest.mark.thorough
def test_it_records_the_residuals_that_are_rounded(quantizers):
    w = jax.random.normal(jax.random.key(0), (256, 64))
    x = jax.random.normal(jax.random.key(1), (300, 256))

    def value(policy):
        f = jaxact.compress(lambda w, x: jnp.sin(x) @ w, policy=policy, activations="x")
        return lambda w: f(w, x).sum()

    rows = jaxact.residuals(value(jaxact.Policy()), w, argnums=0).rows
    run = lambda policy: jax.jit(jax.grad(value(policy)))(w)
    found = quantizers.recorded(rows, run, "net")
    ((kind, [groups]),) = found.items()
    assert kind.startswith("net: ") and "sin" in kind
    chosen = np.linspace(0, 299, quantizers.GROUPS).astype(int)
    np.testing.assert_allclose(groups, np.sin(x)[chosen], atol=1e-6)


def test_it_measures_the_error_of_normal_values(quantizers):
    # Lloyd-Max with the unbiased scale: 0.1331 within 2 %; and no bias.
    x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    found = quantizers.measured(jaxact.Rotated(2), [x])
    assert abs(found["error"] / 0.1331 - 1) < 0.02
    assert abs(found["bias"]) < 5e-4 + 6 * found["bias_deviation"]


def test_groups_are_those_of_the_codecs_without_padding(quantizers):
    x = np.arange(4 * 300, dtype=np.float32).reshape(4, 300)
    groups = quantizers.groups_of(x)  # twice 160 a row, of which the second is padded
    assert groups.shape == (quantizers.GROUPS, 160)
    np.testing.assert_array_equal(np.unique(groups[:, 0]), [0, 300, 600, 900])
