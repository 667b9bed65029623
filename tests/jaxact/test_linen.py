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
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from scipy import stats

import jaxact
from jaxact import Exact, Policy

WIDTH, BATCH = 8, 32
BITS = 3
STREAMS = {"params": True, "dropout": True, "jaxact": True}
AXES = {"params": 0, "batch_stats": 0, "intermediates": 0}
AS_WRITTEN = {"xla_backend_optimization_level": 0}
MUTABLE = ["batch_stats", "intermediates"]
# The unbiasedness test fails with at most this probability for each variant.
FAILURE = 1e-6
KEYS = 64
PROJECTIONS = 8


class Block(nn.Module):
    """Parameters, statistics, dropout, a sown value; linear in each residual."""

    width: int = WIDTH
    dtype: Any = None

    @nn.compact
    def __call__(self, x, train=True):
        h = nn.Dense(2 * self.width, dtype=self.dtype)(x)
        h = nn.BatchNorm(use_running_average=not train, dtype=self.dtype)(h)
        h = nn.Dropout(0.25, deterministic=not train)(nn.relu(h))
        self.sow("intermediates", "hidden", h)
        return x + nn.Dense(self.width, dtype=self.dtype)(h)


class Conv(nn.Module):
    """A convolution, BatchNorm and ReLU."""

    @nn.compact
    def __call__(self, x):
        image = x.reshape(4, 4, 4, -1)
        h = nn.Conv(WIDTH, (3, 3), use_bias=False)(image)
        h = nn.relu(nn.BatchNorm(use_running_average=False)(h))
        return nn.Conv(2, (1, 1))(h)


class Layer(nn.Module):
    """A block as the body of a scan."""

    @nn.compact
    def __call__(self, x, _=None):
        return Block()(x), None  # with more, x would get three cotangents


class Stack(nn.Module):
    """Two blocks with automatic names."""

    block: Any

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = self.block()(x)
        return x


class Scan(nn.Module):
    """Three layers with stacked parameters."""

    layer: Any

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(self.layer, variable_axes=AXES, split_rngs=STREAMS, length=3)
        return scan(name="layers")(x)


class Ensemble(nn.Module):
    """Two blocks side by side, each with half of the batch."""

    block: Any

    @nn.compact
    def __call__(self, x):
        vmap = nn.vmap(self.block, variable_axes=AXES, split_rngs=STREAMS)
        return vmap()(x.reshape(2, -1, WIDTH))


class Twice(nn.Module):
    """One block, called twice."""

    block: Any

    def setup(self):
        self.shared = self.block()

    def __call__(self, x):
        return self.shared(self.shared(x))


class Holder(nn.Module):
    """A block passed in as an attribute."""

    inner: nn.Module

    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(self.inner(x))


class Arguments(nn.Module):
    """Strings, flags, None, keywords, tuples, integers."""

    @nn.compact
    def __call__(self, x, mode, pair, *, bias=None, flag=True):
        h = nn.Dense(WIDTH)(x)
        h = nn.relu(h) if mode == "relu" and flag else h
        h = h * pair[0] if pair[1] is None else h
        h = h if bias is None else h + bias
        return {"h": nn.Dense(WIDTH)(h), "none": None, "count": jnp.int32(3)}


class Caller(nn.Module):
    """Calls `Arguments` every way."""

    block: Any

    @nn.compact
    def __call__(self, x):
        # No array gets more than two cotangents: a sum of three depends on the order.
        scale = jnp.linspace(1.0, 2.0, x.size).reshape(x.shape)
        first = self.block()(x, "relu", (scale, None), bias=x, flag=True)
        second = self.block()(first["h"], mode="none", pair=[scale, 1.0])
        return first, second


def compact_method(wrap):
    class Decorated(nn.Module):
        @wrap
        @nn.compact
        def __call__(self, x):
            return Block()(x)

    return Decorated()


def setup_methods(wrap):
    class Decorated(nn.Module):
        def setup(self):
            self.first, self.last = Block(), nn.Dense(WIDTH)

        @wrap
        def encode(self, x, *, train):
            return nn.relu(self.first(x, train))

        @wrap
        def decode(self, h):
            return self.last(h)

        def __call__(self, x):
            return self.decode(self.encode(x, train=True))

    return Decorated()


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to compress: `make(wrap)` is a module that `wrap` has compressed.

    `is_linear`: its backward pass is linear in each residual, so codecs leave its
    gradient unbiased.
    """

    name: str
    make: Callable[[Any], nn.Module]
    is_linear: bool = True

    def __str__(self):
        return self.name


VARIANTS = [
    Variant("class", lambda wrap: wrap(Block)()),
    Variant("conv", lambda wrap: wrap(Conv)()),
    Variant("stack", lambda wrap: Stack(wrap(Block))),
    Variant("inside-scan", lambda wrap: Scan(wrap(Layer))),
    Variant("around-scan", lambda wrap: wrap(Scan)(Layer)),
    Variant("inside-vmap", lambda wrap: Ensemble(wrap(Block))),
    Variant("around-vmap", lambda wrap: wrap(Ensemble)(Block)),
    Variant("inside-remat", lambda wrap: Stack(nn.remat(wrap(Block)))),
    # What remat recomputes from its rounded input is not linear in it.
    Variant("around-remat", lambda wrap: Stack(wrap(nn.remat(Block))), False),
    Variant("inside-jit", lambda wrap: Stack(nn.jit(wrap(Block)))),
    Variant("around-jit", lambda wrap: Stack(wrap(nn.jit(Block)))),
    Variant("compact-method", compact_method),
    Variant("setup-methods", setup_methods),
    Variant("shared", lambda wrap: Twice(wrap(Block))),
    Variant("around-attribute", lambda wrap: wrap(Holder)(Block())),
    Variant("attribute", lambda wrap: Holder(wrap(Block)())),
    Variant("nested", lambda wrap: wrap(Holder)(wrap(Block)())),
    Variant("arguments", lambda wrap: Caller(wrap(Arguments))),
]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)
# Op by op is slow; how a class is lifted does not change it.
OP_BY_OP = ("class", "around-scan", "nested")
every_mode = pytest.mark.parametrize(
    "variant, mode",
    [
        *(pytest.param(v, "jitted", id=f"{v}-jitted") for v in VARIANTS),
        *(pytest.param(v, "op", id=f"{v}-op") for v in VARIANTS if v.name in OP_BY_OP),
    ],
)


def plain(target):
    return target


def exact(target):
    return jaxact.compress(target, policy=Policy(default=Exact()))


def packed(target):
    return jaxact.compress(target, policy=Policy(BITS))


def data(seed=0):
    return jax.random.normal(jax.random.key(seed), (BATCH, WIDTH))


def init(net):
    keys = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
    variables = net.init(keys, data())
    return {k: v for k, v in variables.items() if k != "intermediates"}


def same(a, b):
    """Whether two trees have one structure, one dtype each, and the same bits."""
    x, y = jax.tree.leaves(a), jax.tree.leaves(b)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        jnp.result_type(i) == jnp.result_type(j) and np.array_equal(i, j)
        for i, j in zip(x, y, strict=True)
    )


def step(net, variables, x, **streams):
    """(loss, (outputs, mutated)), gradients of the parameters and of the input."""

    def loss(params, x):
        keys = {"dropout": jax.random.key(3), **streams}
        held = {**variables, "params": params}
        out, mutated = net.apply(held, x, rngs=keys, mutable=MUTABLE)
        floats = [y for y in jax.tree.leaves(out) if y.dtype == jnp.float32]
        return sum(jnp.square(y).sum() for y in floats), (out, mutated)

    grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    return grad(variables["params"], x)


def in_mode(mode, net):
    f = functools.partial(step, net)
    if mode == "jitted":
        return jax.jit(f, compiler_options=AS_WRITTEN)

    def op_by_op(*args, **streams):
        with jax.disable_jit():
            return f(*args, **streams)

    return op_by_op


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


@every_variant
def test_init_gives_the_same_parameters_under_the_same_names(variant):
    assert same(init(variant.make(packed)), reference(variant, "jitted")[0])


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
    assert {leaf.dtype for leaf in activations} == {
        jnp.dtype("uint32"),  # words
        jnp.dtype("uint16"),  # zero points and scales
    }
    shapes = {p.shape for p in jax.tree.leaves(variables["params"])}
    statistics = [
        s for s in stacked if s.dtype == jnp.float32 and s.shape not in shapes
    ]
    assert all(s.size <= 3 * 2 * WIDTH for s in statistics)


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


@pytest.mark.parametrize("optimizer", [
    optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
    optax.MultiSteps(optax.sgd(1e-2, momentum=0.9), 2),
], ids=["chain", "multi-steps"])  # fmt: skip
@pytest.mark.parametrize("accumulate", [whole_batch, accumulate_by_scan])
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
