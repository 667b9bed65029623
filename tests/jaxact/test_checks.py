"""A check of `jax.experimental.checkify` in or beside a compressed function."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

import jaxact
from support.wrapping import data


def gradient_with(layer):
    gradient = jax.grad(lambda x: layer(x).sum())
    return jax.jit(checkify.checkify(gradient))


def test_a_check_inside_is_made_or_refused_with_what_to_write():
    """JAX 0.10 makes it, 0.12 has no place for its error."""

    @jaxact.compress
    def layer(x):
        checkify.check(x.sum() > 1e6, "too small")
        return jnp.sin(x)

    try:
        error, _ = gradient_with(layer)(data())
    except Exception as refusal:
        notes = [n for n in refusal.__notes__ if n.startswith("jaxact")]
        assert len(notes) == 1 and "check it outside of the compressed call" in notes[0]
    else:
        with pytest.raises(checkify.JaxRuntimeError, match="too small"):
            error.throw()


def test_a_check_outside_finds_the_error():
    @jaxact.compress
    def layer(x):
        return jnp.sin(x), x.sum()

    def checked(x):
        y, total = layer(x)
        checkify.check(total > 1e6, "too small")
        return y

    error, _ = gradient_with(checked)(data())
    with pytest.raises(checkify.JaxRuntimeError, match="too small"):
        error.throw()


def test_no_note_where_there_is_no_check():
    with pytest.raises(TypeError, match="forward-mode") as error:
        jax.jvp(jaxact.compress(jnp.sin), (data(),), (data(),))
    assert "checkify" not in "".join(getattr(error.value, "__notes__", ()))
