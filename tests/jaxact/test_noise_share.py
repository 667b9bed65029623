"""Rounding's noise beside that between batches."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxact

pytestmark = pytest.mark.unoptimized

BATCHES = jax.random.normal(jax.random.key(1), (16, 32, 64))


def noisy(deviation):
    """Gradients with known variances: 1 and deviation^2 in each of 2048 elements."""
    return lambda batch, key: {
        "w": batch + deviation * jax.random.normal(key, (32, 64))
    }


@pytest.mark.parametrize("deviation, draws", [(0.1, 2), (0.5, 2), (0.5, 5)])
def test_variances_that_are_known(deviation, draws):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = jaxact.noise_share(noisy(deviation), BATCHES, draws=draws)
    # 16 x 2048 x (draws - 1) and 15 x 2048 squares of normals: deviations below 0.8 %.
    np.testing.assert_allclose(found.rounding, 2048 * deviation**2, rtol=0.05)
    np.testing.assert_allclose(found.batches, 2048, rtol=0.05)
    np.testing.assert_allclose(found.share, deviation**2, rtol=0.1)
    assert [w.category for w in caught] == [jaxact.CompressionWarning] * (
        deviation**2 > 0.1
    )


def test_a_gradient_without_a_key_is_told_of_it():
    with pytest.raises(TypeError, match=r"with \(batch, rounding key\): write lambda"):
        jaxact.noise_share(lambda batch: batch, BATCHES)


def test_a_compressed_loss():
    """Against NumPy, also for leaves that are complex and that have no tangents."""
    layer = jaxact.compress(lambda w, x: jnp.tanh(x @ w), policy=jaxact.Policy(2))
    w = jax.random.normal(jax.random.key(0), (64, 64)) / 8

    @jax.jit
    def gradient(x, key):
        loss = lambda w: (layer(w, x, rounding_key=key) ** 2).mean()
        found = jax.grad(loss)(w)
        turned = jax.lax.complex(jnp.zeros_like(found), found)
        return {"w": found, "turned": turned, "none": np.zeros(3, jax.dtypes.float0)}

    keys = jax.random.split(jax.random.key(7), 3)
    found = jaxact.noise_share(gradient, BATCHES, draws=8, limit=np.inf)
    each = np.array([[gradient(x, key)["w"] for key in keys] for x in BATCHES])
    rounding = 2 * each.var(1, ddof=1).sum((1, 2)).mean()
    batches = 2 * each.mean(1).var(0, ddof=1).sum() - rounding / 3
    np.testing.assert_allclose(found.rounding, rounding, rtol=0.05)
    np.testing.assert_allclose(found.batches, batches, rtol=0.05)


def test_noise_that_hides_the_batches():
    """The estimate of the variance between these is as often negative as positive."""
    alike = jnp.zeros((2, 32, 64))
    with pytest.warns(jaxact.CompressionWarning, match="the limit is 0.1"):
        shares = [
            jaxact.noise_share(noisy(1.0), alike, key=jax.random.key(i)).share
            for i in range(30)
        ]
    assert np.inf in shares and min(shares) > 1


@pytest.mark.filterwarnings("ignore:jaxact")
def test_batches_that_do_not_differ_are_asked_about():
    alike = jnp.ones((3, 32, 64))
    for i in range(20):  # each estimate is 0 with a probability of about a half
        with pytest.warns(jaxact.CompressionWarning) as caught:
            found = jaxact.noise_share(noisy(1.0), alike, key=jax.random.key(i))
        assert ("Are the batches the same?" in str(caught[0].message)) == (
            found.batches == 0
        )
        assert "inf" not in str(found)
        if not found.batches:
            return
    raise AssertionError("20 estimates above 0")


def test_a_key_that_reaches_nothing():
    with pytest.raises(ValueError, match="the same at all keys.*rounding_key=key"):
        jaxact.noise_share(lambda batch, key: batch, BATCHES)


def test_too_few():
    with pytest.raises(ValueError, match="1 batches; two are required"):
        jaxact.noise_share(noisy(0.1), BATCHES[:1])
    with pytest.raises(ValueError, match="draws=1"):
        jaxact.noise_share(noisy(0.1), BATCHES, draws=1)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_gradients_are_summed_wide(dtype):
    narrow = lambda batch, key: noisy(0.5)(batch, key)["w"].astype(dtype)
    found = jaxact.noise_share(narrow, BATCHES, limit=1.0)
    np.testing.assert_allclose(found.share, 0.25, rtol=0.1)
