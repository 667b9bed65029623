"""A codec that shows the arrays that it is given."""

import dataclasses

import jax
import jax.numpy as jnp

import jaxact
from jaxact import Policy
from support.programs import relative_error


@dataclasses.dataclass(frozen=True)
class Seen(jaxact.Codec[jax.Array]):
    """Keeps an array as it is, and its shape and dtype in a list that it is given."""

    arrays: tuple[list[jax.ShapeDtypeStruct]]
    is_free_of_axes: bool = True  # pyright: ignore

    bias = jaxact.Bias.UNBIASED
    bits = 4

    def __hash__(self):
        return hash(self.is_free_of_axes)

    def encode(self, x, seed):
        self.arrays[0].append(jax.ShapeDtypeStruct(x.shape, x.dtype))
        return x

    def decode(self, stored, shape, dtype):
        assert (stored.shape, stored.dtype) == (shape, dtype)
        return stored


def assert_near(gots, wants, bound):
    for got, want in zip(gots, wants, strict=True):
        if jnp.any(want):
            assert relative_error(got, want) < bound
        else:
            assert not jnp.any(got)


def seen(f, *args, **options):
    """The arrays that a codec gets for `f`, whose gradient stays as it is."""
    codec = Seen(([],), **options)
    small = jaxact.compress(f, policy=Policy(default=codec))
    ct = jax.random.normal(jax.random.key(0), jax.eval_shape(f, *args).shape)
    pull = lambda f: jax.vjp(f, *args)[1](ct)
    assert_near(pull(small), pull(f), 1e-5)
    return codec.arrays[0]
