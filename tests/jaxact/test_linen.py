"""`compress` on Flax Linen modules and methods.

Contract: the compressed module has the parameters, names, outputs, mutable collections
and RNG use of the plain one, to the last bit, op by op and jitted. With
Policy(default=Exact()) so are its gradients. With codecs, gradients of modules whose
backward pass is linear in each residual are unbiased over the keys of the RNG stream
'jaxact'. Every law runs over `VARIANTS`, the ways a module can be built and compressed.

"Jitted" is compiled without LLVM's optimizations: they contract a multiply and an add
that XLA fused, and what is fused differs between any two programs. "Op by op" is
`jax.disable_jit`: otherwise jnp functions are small programs of their own, which fuse.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.errors import CallCompactUnboundModuleError
from jax import lax
from scipy import stats

import jaxact
from jaxact import Policy
from support.linen_modules import (
    MUTABLE,
    Block,
    Layer,
    Scan,
    Stack,
    every_lift,
    every_mode,
    every_variant,
    in_mode,
    init,
    same,
    step,
)
from support.programs import relative_error
from support.variants import thorough
from support.wrapping import (
    AS_WRITTEN,
    BATCH,
    FAILURE,
    KEYS,
    PROJECTIONS,
    WIDTH,
    data,
    exact,
    packed,
    plain,
)

pytestmark = pytest.mark.unoptimized


@functools.cache
def reference(variant, mode):
    """Variables of the plain module and what a step of it gives."""
    net = variant.make(plain)
    variables = init(net)
    return variables, in_mode(mode, net)(variables, data())


@functools.cache
def jitted(variant):
    """A compiled step of the packed module, given a key of stream 'jaxact'."""
    net, (variables, _) = variant.make(packed), reference(variant, "jitted")
    run = in_mode("jitted", net)
    return lambda seed: run(variables, data(), jaxact=jax.random.key(seed))


# Flax compiles the initializers of a scan, in two programs that fuse differently.
@pytest.mark.unoptimized(False)
@every_lift
def test_init_gives_the_same_parameters_under_the_same_names(variant):
    assert same(init(variant.make(packed)), init(variant.make(plain)))


@every_mode
def test_loss_outputs_and_state_keep_every_bit(variant, mode):
    variables, (wanted, _) = reference(variant, mode)
    if mode == "jitted":
        got, _ = jitted(variant)(0)
    else:
        got, _ = in_mode(mode, variant.make(packed))(variables, data())
    assert same(got, wanted)


@every_variant
def test_an_eager_call_keeps_every_bit(variant):
    variables, _ = reference(variant, "jitted")

    def call(wrap):
        keys = {"dropout": jax.random.key(3)}
        return variant.make(wrap).apply(variables, data(), rngs=keys, mutable=MUTABLE)

    assert same(call(packed), call(plain))


@every_mode
def test_exact_storage_keeps_every_bit_of_the_gradient(variant, mode):
    variables, wanted = reference(variant, mode)
    assert same(in_mode(mode, variant.make(exact))(variables, data()), wanted)


@thorough
@every_variant
def test_gradients_are_unbiased_over_keys(variant):
    # Student's t of the mean over keys, on random directions of the whole gradient.
    # Rounding noise is a sum of many bounded terms, so projections are near normal.
    if not variant.is_linear:
        pytest.skip("recomputes nonlinear functions of a rounded value")
    flat = lambda g: np.concatenate([np.ravel(x) for x in jax.tree.leaves(g)])
    wanted = flat(reference(variant, "jitted")[1][1]).astype(np.float64)
    draws = np.stack([flat(jitted(variant)(seed)[1]) for seed in range(KEYS)])
    error = draws - wanted
    directions = np.random.default_rng(0).standard_normal((PROJECTIONS, wanted.size))
    projected = error @ directions.T
    spread = projected.std(0, ddof=1) / np.sqrt(KEYS)
    # The mean is known to a few percent of the gradient, so the test can fail.
    scale = np.linalg.norm(wanted)
    assert (spread > 0).all() and (spread < 0.1 * scale).all()
    bound = stats.t.isf(FAILURE / PROJECTIONS / 2, KEYS - 1)
    assert (abs(projected.mean(0)) < bound * spread).all()


@every_variant
def test_the_jaxact_stream_decides_the_noise(variant):
    first, again, other = (jitted(variant)(seed)[1] for seed in (0, 0, 1))
    assert same(first, again)
    assert not same(first, other)


def test_without_the_stream_noise_is_deterministic():
    net = packed(Block)()
    variables = init(net)
    assert same(step(net, variables, data()), step(net, variables, data()))


def test_calls_of_a_shared_module_get_noise_of_their_own():
    class Both(nn.Module):
        def setup(self):
            self.dense = packed(nn.Dense)(WIDTH, use_bias=False)

        def __call__(self, x):
            return self.dense(x).sum(), self.dense(x).sum()

    net, x = Both(), data()
    variables = net.init(jax.random.key(0), x)
    keys = {"jaxact": jax.random.key(1)}

    def gradient(place):
        return jax.grad(lambda v: net.apply(v, x, rngs=keys)[place])(variables)

    assert not same(gradient(0), gradient(1))


@pytest.mark.parametrize("arguments", [None, {}, {"policy": Policy(2)}], ids=str)
def test_a_decorated_class_is_the_class_in_all_but_storage(arguments):
    class Local(nn.Module):
        """Its docstring."""

        size: int = 3

        @nn.compact
        def __call__(self, x):
            return nn.Dense(self.size)(x)

    decorate = jaxact.compress if arguments is None else jaxact.compress(**arguments)
    small = decorate(Local)
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(small, attribute) == getattr(Local, attribute)
    names = lambda cls: [(f.name, f.type, f.default) for f in dataclasses.fields(cls)]
    assert names(small) == names(Local)
    assert issubclass(small, Local) and isinstance(small(size=4), Local)
    assert small(size=4).size == 4 and small() == small()
    assert small().clone(size=5).size == 5


@pytest.mark.parametrize("call", [
    lambda net, v, x: net.apply(v, x, False),
    lambda net, v, x: net.apply(v, x, train=False),
    lambda net, v, x: net.apply(v, x=x, train=False),
], ids=["positional", "keyword", "all-keywords"])  # fmt: skip
def test_a_train_flag_stays_a_python_value(call):
    variables, x = init(Block()), data()
    wanted = Block().apply(variables, x, False)
    assert same(call(packed(Block)(), variables, x), wanted)


def test_static_argnums_count_self_and_keep_arrays_concrete():
    class Repeat(nn.Module):
        @nn.compact
        def __call__(self, x, counts):
            for width in counts:
                x = nn.Dense(int(width))(x)
            return x

    net, small = Repeat(), jaxact.compress(Repeat, static_argnums=2)()
    x, counts = data(), np.array([4, 8])
    variables = net.init(jax.random.key(0), x, counts)
    assert same(small.init(jax.random.key(0), x, counts), variables)
    wanted = jax.jit(lambda v: net.apply(v, x, counts))(variables)
    assert same(jax.jit(lambda v: small.apply(v, x, counts))(variables), wanted)


def test_residuals_of_a_scan_inside_are_stacked_packed():
    net = packed(Scan)(Layer)
    variables, x = init(net), data()

    def forward(params):
        held = {**variables, "params": params}
        keys = {"dropout": jax.random.key(0)}
        return net.apply(held, x, rngs=keys, mutable=MUTABLE)[0]

    leaves = jax.tree.leaves(
        jax.eval_shape(lambda p: jax.vjp(forward, p)[1], variables["params"])
    )
    stacked = [leaf for leaf in leaves if leaf.shape[:1] == (3,)]
    activations = [leaf for leaf in stacked if BATCH in leaf.shape]
    assert {leaf.dtype for leaf in activations} == {jnp.dtype("uint32")}
    shapes = {p.shape for p in jax.tree.leaves(variables["params"])}
    statistics = [
        s for s in stacked if s.dtype == jnp.float32 and s.shape not in shapes
    ]
    assert all(s.size <= 3 * 2 * WIDTH for s in statistics)


@thorough
def test_half_precision_casts_of_parameters_are_not_stored():
    net = packed(Block)(dtype=jnp.bfloat16)
    x = data().astype(jnp.bfloat16)
    plain_net = Block(dtype=jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        variables = plain_net.init(jax.random.key(0), x, False)

    def backward(net, params):
        forward = lambda p: net.apply({**variables, "params": p}, x, False)
        return jax.vjp(forward, params)[1]

    def half_kernels(net):
        leaves = jax.tree.leaves(
            jax.eval_shape(functools.partial(backward, net), variables["params"])
        )
        kernels = [(WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)]
        return sum(
            leaf.dtype == jnp.bfloat16 and leaf.shape in kernels for leaf in leaves
        )

    with jax.numpy_dtype_promotion("standard"):  # BatchNorm mixes half and single
        assert half_kernels(plain_net) > 0
        assert half_kernels(net) == 0
        assert same(*(n.apply(variables, x, False) for n in (net, plain_net)))


def accumulate_by_scan(grad, params, stats, batches):
    def add(carry, x):
        total, stats = carry
        (loss, stats), g = grad(params, stats, x)
        return (jax.tree.map(jnp.add, total, g), stats), loss

    zeros = jax.tree.map(jnp.zeros_like, params)
    (total, stats), losses = lax.scan(add, (zeros, stats), batches)
    return (losses.sum(), stats), total


def whole_batch(grad, params, stats, batches):
    return grad(params, stats, batches.reshape(-1, WIDTH))


CHAIN = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
MULTI_STEPS = optax.MultiSteps(optax.sgd(1e-2, momentum=0.9), 2)


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer, accumulate", [
    pytest.param(MULTI_STEPS, accumulate_by_scan, id="multi-steps-scan"),
    pytest.param(CHAIN, whole_batch, id="chain-whole"),
    pytest.param(CHAIN, accumulate_by_scan, id="chain-scan", marks=pytest.mark.slow),
    pytest.param(MULTI_STEPS, whole_batch, id="multi-whole", marks=pytest.mark.slow),
])  # fmt: skip
def test_training_with_donated_state(optimizer, accumulate):
    batches = data().reshape(2, -1, WIDTH)

    def train(wrap):
        net = Stack(wrap(Block))

        def loss(params, stats, x):
            held = {"params": params, "batch_stats": stats}
            keys = {"dropout": jax.random.key(0)}
            y, new = net.apply(held, x, rngs=keys, mutable=["batch_stats"])
            return jnp.square(y - 1.0).mean(), new["batch_stats"]

        grad = jax.value_and_grad(loss, has_aux=True)

        @functools.partial(
            jax.jit, donate_argnums=(0, 1, 2), compiler_options=AS_WRITTEN
        )
        def update(params, stats, state):
            (value, stats), g = accumulate(grad, params, stats, batches)
            with jax.numpy_dtype_promotion("standard"):  # optax counts in integers
                change, state = optimizer.update(g, state, params)
            return optax.apply_updates(params, change), stats, state, value

        variables = jax.tree.map(jnp.copy, init(net))
        params, stats = variables["params"], variables["batch_stats"]
        state, losses = optimizer.init(params), []
        for _ in range(4):
            params, stats, state, value = update(params, stats, state)
            losses.append(float(value))
        return losses, (params, stats, state)

    losses, trained = train(plain)
    exact_losses, exactly_trained = train(exact)
    assert exact_losses == losses and same(exactly_trained, trained)
    packed_losses, _ = train(packed)
    assert packed_losses[0] == losses[0]  # the first forward saw the same parameters
    assert packed_losses[-1] < packed_losses[0]


@pytest.mark.parametrize("request_, error, match", [
    (lambda: jaxact.compress(nn.Dense(3)), TypeError, r"compress\(Dense\)\(\.\.\.\)"),
    (lambda: jaxact.compress(Block, activations="x"), ValueError, "plain functions"),
    (lambda: jaxact.compress(Block, policy=2), TypeError, r"Policy\(bits=2\)"),
    (lambda: jaxact.compress(policy="dots"), TypeError, "jaxact.Policy is required"),
    (lambda: jaxact.compress(3), TypeError, "a function is required"),
    (
        lambda: jaxact.compress(type("Bare", (nn.Module,), {"__call__": None})),
        TypeError,
        "has no __call__",
    ),
], ids=["instance", "activations", "int", "string", "number", "no-call"])  # fmt: skip
def test_wrong_requests_say_what_to_write(request_, error, match):
    with pytest.raises(error, match=match):
        request_()


def test_a_network_whose_blocks_store_everything_warns_of_nothing():
    net = packed(Stack)(packed(Block))
    variables = init(net)
    step(net, variables, data())  # warnings are errors


def test_forward_mode_is_refused_by_name():
    net, x = packed(Block)(), data()
    variables = init(net)
    with pytest.raises(TypeError, match="forward-mode .* of the compressed Block"):
        jax.jvp(lambda x: net.apply(variables, x, False), (x,), (x,))


def test_a_module_without_variables_is_a_plain_argument():
    def loss(net, params, x):
        return net.apply(params, x)

    net = nn.Dense(WIDTH)
    params = net.init(jax.random.key(0), data())
    small = jaxact.compress(loss, activations="x")
    assert same(small(net, params, data()), loss(net, params, data()))


@thorough
def test_a_compressed_cell_in_a_scan_that_shares_its_parameters():
    """`nn.RNN` makes them in its scan, where they may not depend on the sequence."""
    x = jax.random.normal(jax.random.key(0), (2, 5, 8))
    small = nn.RNN(exact(nn.LSTMCell)(8))
    whole = nn.RNN(nn.LSTMCell(8))
    params = small.init(jax.random.key(1), x)
    assert same(params, whole.init(jax.random.key(1), x))
    gradient = lambda net: jax.grad(lambda p: net.apply(p, x).sum())(params)
    assert relative_error(gradient(small), gradient(whole)) < 1e-6


def test_an_unbound_module_is_linens_error():
    with pytest.raises(CallCompactUnboundModuleError):
        jaxact.compress(nn.Dense)(8)(jnp.ones((2, 4)))
