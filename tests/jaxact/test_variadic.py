"""Functions that take any number of arguments, `def f(x, *others)`.

Contract: the further arguments are called others[0], others[1] and so on, and the name
`others` stands for all of them in `activations` and `static_argnums`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxact
from support.linen_modules import same
from support.wrapping import WIDTH, data

pytestmark = pytest.mark.unoptimized


def product(scale, *xs):
    return (jnp.matmul(xs[0], xs[1].T) * scale).sum()


ARGS = jnp.float32(2.0), data(), data(1)


def keys(activations):
    f = jaxact.compress(product, activations=activations)
    return {r.key for r in jaxact.residuals(lambda *args: f(*args), *ARGS).rows}


def test_names_in_reports_count_the_further_arguments():
    assert "xs[1]" in keys(activations=("xs[0]", "xs[1]"))
    assert keys("xs") == keys(("xs[0]", "xs[1]")) == keys((1, 2)) != keys("xs[1]")


def test_the_name_is_known_in_a_call_without_any():
    f = jaxact.compress(lambda x, *others: jnp.tanh(x), activations=("x", "others"))
    assert same(f(data()), jnp.tanh(data()))


def test_the_name_stands_for_further_arguments_by_keyword():
    named = lambda scale, **xs: product(scale, xs["a"], xs["b"])
    scale, a, b = ARGS

    def rows(activations):
        f = jaxact.compress(named, activations=activations)
        return jaxact.residuals(lambda *args: f(scale, a=args[0], b=args[1]), a, b).rows

    assert rows("xs") == rows(("a", "b")) != rows("a")


@pytest.mark.parametrize("names", ["args", "xs[2]", 3])
def test_other_names_are_refused(names):
    with pytest.raises(ValueError, match=r"'scale', 'xs\[0\]', 'xs\[1\]', 'xs'\]"):
        keys(names)


def test_static_ones_stay_concrete():
    def repeated(x, *counts):
        return sum(jnp.tanh(x) * int(n) for n in counts)

    f = jaxact.compress(repeated, static_argnums="counts")
    counts = np.array(2), np.array(3)
    assert same(f(data(), *counts), repeated(data(), *counts))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, *xs):
        return nn.Dense(WIDTH)(xs[0]) + nn.Dense(WIDTH)(xs[1])


def test_modules():
    small = jaxact.compress(
        nnx.Sequential(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), nnx.tanh)
    )
    report = jaxact.residuals(lambda m, x: m(x).sum(), small, data())
    assert "Sequential/args[0]" in [r.key for r in report.rows]
    net = jaxact.compress(Linen)()
    variables = net.init(jax.random.key(0), data(), data())
    loss = lambda v, *xs: net.apply(v, *xs).sum()
    report = jaxact.residuals(loss, variables, data(), data(1))
    assert {"Linen/xs[0]", "Linen/xs[1]"} == {r.key for r in report.rows}
