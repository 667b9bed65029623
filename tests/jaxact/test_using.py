"""Policies set from outside: `using`, in every order in which JAX traces."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxact
from jaxact import Exact, Policy, Quantize, Rule, using
from support.variants import thorough

pytestmark = pytest.mark.unoptimized

W = jnp.ones((64, 64)) * 0.1
X = jnp.linspace(-1.0, 1.0, 64 * 64).reshape(64, 64)
TWO, EXACT = Policy(bits=2), Policy(default=Exact())


def layer_of(policy=None):
    return jaxact.compress(lambda w, x: jnp.tanh(x @ w), activations=1, policy=policy)


def bits_of(f, *args):
    return {row.action.bits for row in jaxact.residuals(f, *args).rows}


def test_the_innermost_context_decides():
    layer = layer_of(Policy(bits=7))
    assert bits_of(layer, W, X) == {7}
    with using(TWO):
        assert bits_of(layer, W, X) == {2}
        with using(Policy(bits=3)):
            assert bits_of(layer, W, X) == {3}
        assert bits_of(layer, W, X) == {2}
    assert bits_of(layer, W, X) == {7}


def test_rules_choose_by_path_and_key():
    layer = layer_of()

    def network(w, x):
        for name in ("first", "second"):
            with jax.named_scope(name):
                x = layer(w, x)
        return x

    with using(Policy(bits=4, rules=(Rule(Quantize(2), path="second"),))):
        table = jaxact.residuals(network, W, X)
    found = {row.key: row.action.bits for row in table.rows}
    assert {bits for key, bits in found.items() if "second" in key} == {2}
    assert {bits for key, bits in found.items() if "first" in key} == {4}
    key = next(key for key in found if "first" in key)
    with using(Policy(bits=4, rules=(Rule(Quantize(8), key=key),))):
        table = jaxact.residuals(network, W, X)
    assert [r.key for r in table.rows if r.action.bits == 8] == [key]


def gradient_of(layer):
    return jax.jit(jax.grad(lambda w, x: (layer(w, x) ** 2).sum()))


def expected(policy):
    """The gradient of a call with the policy as its own."""
    return np.asarray(gradient_of(layer_of(policy))(W, X))


def test_a_jitted_step_has_a_program_for_each_context():
    traces = []
    layer = layer_of(EXACT)

    @jax.jit
    def step(w, x):
        traces.append(None)
        return jax.grad(lambda w: (layer(w, x) ** 2).sum())(w)

    plain = step(W, X)
    with using(TWO):
        rounded = step(W, X)
    np.testing.assert_array_equal(step(W, X), plain)
    with using(Policy(bits=2)):  # equal by value: nothing is traced again
        np.testing.assert_array_equal(step(W, X), rounded)
    assert len(traces) == 2
    assert (rounded != plain).any()
    np.testing.assert_array_equal(rounded, expected(TWO))
    np.testing.assert_array_equal(plain, expected(EXACT))


def test_a_jitted_layer_inside_a_step_that_is_traced_anew():
    """The cache is that of the inner jit, whose trace outside came first."""
    layer = layer_of(EXACT)
    inner = jax.jit(layer)
    outer = gradient_of(inner)
    plain = outer(W, X)
    with using(TWO):
        rounded = gradient_of(inner)(W, X)
    assert (rounded != plain).any()
    np.testing.assert_array_equal(gradient_of(inner)(W, X), plain)


def test_the_rule_is_differentiated_outside():
    """JAX traces the forward and backward rule when it differentiates."""
    layer = layer_of(EXACT)
    with using(TWO):
        closed = jax.make_jaxpr(lambda w: (layer(w, X) ** 2).sum())(W)
        out, vjp = jax.vjp(lambda w: (layer(w, X) ** 2).sum(), W)
    (late,) = vjp(jnp.ones_like(out))
    np.testing.assert_array_equal(late, expected(TWO))
    f = jax.jit(lambda w: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, w)[0])
    np.testing.assert_array_equal(jax.grad(f)(W), expected(TWO))


@thorough
def test_in_scans_and_checkpoints():
    def gradient(layer):
        def loss(w):
            body = lambda x, _: (jax.checkpoint(layer)(w, x), None)
            return (jax.lax.scan(body, X, None, length=3)[0] ** 2).sum()

        return jax.jit(jax.grad(loss))

    with using(TWO):
        found = gradient(layer_of(EXACT))(W)
    np.testing.assert_array_equal(found, gradient(layer_of(TWO))(W))


def test_threads_have_contexts_of_their_own():
    layer, found = layer_of(Policy(bits=7)), {}
    barrier = threading.Barrier(2)

    def run(bits):
        with using(Policy(bits=bits)):
            barrier.wait()
            found[bits] = bits_of(layer, W, X)
            barrier.wait()

    threads = [threading.Thread(target=run, args=(bits,)) for bits in (2, 3)]
    with using(Policy(bits=5)):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert bits_of(layer, W, X) == {5}
    assert found == {2: {2}, 3: {3}}


def test_an_error_ends_the_context():
    with pytest.raises(KeyError), using(TWO):
        raise KeyError
    assert bits_of(layer_of(Policy(bits=7)), W, X) == {7}


def test_as_a_decorator():
    step = using(TWO)(gradient_of(layer_of(EXACT)))
    for _ in range(2):
        np.testing.assert_array_equal(step(W, X), expected(TWO))


def test_modules():
    nn = pytest.importorskip("flax.linen")
    net = jaxact.compress(nn.Dense)(64)
    params = net.init(jax.random.key(0), X)
    with using(TWO):
        assert bits_of(net.apply, params, X) == {2}


def test_not_a_policy():
    with pytest.raises(TypeError, match=r"using\(2\): a jaxact.Policy is required"):
        using(2).__enter__()


def test_an_allocation_is_no_policy():
    loss = lambda w, x: layer_of()(w, x).sum()
    allocation = jaxact.allocate(jaxact.sensitivity(loss, W, X), bits=2)
    message = r"using\(<Allocation>\).* Write allocation.policy\(\)\."
    with pytest.raises(TypeError, match=message):
        using(allocation)


def test_a_context_is_entered_again():
    layer, context = layer_of(Policy(bits=7)), using(TWO)
    for _ in range(2):
        with context, context:
            assert bits_of(layer, W, X) == {2}
        assert bits_of(layer, W, X) == {7}


def test_functions_that_run_after_their_call_are_refused():
    """Their bodies would run outside of the context, with the calls' own policy."""

    def generator():
        yield 1

    async def coroutine():
        pass

    for f in (generator, coroutine):
        with pytest.raises(TypeError, match="Write `with jaxact.using"):
            using(TWO)(f)
        with pytest.raises(TypeError, match="Return all results"):
            jaxact.compress(f)
