"""`compress` on Flax NNX classes, instances, methods and functions of modules.

Contract: outputs, statistics and RNG counts are those of the plain module, to the last
bit, op by op and jitted, in each of NNX's modes; so are gradients with
Policy(default=Exact()). With codecs they are unbiased over the keys of an RNG stream
'jaxact' in the module. Every law runs over `VARIANTS`. What "jitted" and "op by op"
mean, and why, is said in test_linen.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from scipy import stats

import jaxact
from jaxact import Policy
from support.nnx_modules import (
    MODES,
    SEEDED,
    VARIANTS,
    Block,
    Stack,
    apply,
    every_variant,
    same,
    some_variants,
    split,
    stepper,
    two_steps,
)
from support.variants import thorough
from support.wrapping import (
    AS_WRITTEN,
    BITS,
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


@pytest.fixture(params=MODES)
def mode(request):
    with MODES[request.param]():
        yield request.param


@functools.cache
def reference(variant, mode):
    """What two steps of the plain module give, in the mode that is set."""
    return two_steps(variant.make(plain, nnx.Rngs(0)))


def check_every_bit(variant, mode):
    wanted = reference(variant, mode)
    assert same(two_steps(variant.make(exact, nnx.Rngs(0))), wanted)
    got = two_steps(variant.make(packed, nnx.Rngs(0)))
    assert same([values for values, _ in got], [values for values, _ in wanted])
    assert not same(got, wanted)


@every_variant
def test_loss_outputs_state_and_exact_gradients_keep_every_bit(variant):
    check_every_bit(variant, "graph")


@thorough
@some_variants
@pytest.mark.parametrize("mode", ["no-graph-updates", "tree"])
def test_every_bit_is_kept_in_other_modes(variant, mode):
    with MODES[mode]():
        check_every_bit(variant, mode)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS[:1], ids=str)
def test_op_by_op_every_bit_is_kept(variant):
    with jax.disable_jit():
        plainly, exactly, small = (
            two_steps(variant.make(wrap, nnx.Rngs(0)), lambda f: f)
            for wrap in (plain, exact, packed)
        )
    assert same(exactly, plainly)
    assert same([values for values, _ in small], [values for values, _ in plainly])


@every_variant
def test_an_eager_call_keeps_every_bit_and_updates_the_module(variant):
    wanted, got = (variant.make(wrap, nnx.Rngs(0)) for wrap in (plain, packed))
    for seed in range(2):
        assert same(got(data(seed)), wanted(data(seed)))
    assert same(split(got)[1:], split(wanted)[1:])


@thorough
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.name in SEEDED], ids=str)
def test_gradients_are_unbiased_over_keys(variant):
    # Student's t of the mean over keys, on random directions of the whole gradient.
    # Rounding noise is a sum of many bounded terms, so projections are near normal.
    flat = lambda g: np.concatenate([np.ravel(x) for x in jax.tree.leaves(g)])
    model = variant.make(packed, nnx.Rngs(0, jaxact=1))
    step, params, rest = stepper(model)
    step = jax.jit(step, compiler_options=AS_WRITTEN)

    def gradient(seed):
        def replace(path, x):
            if "noise" not in jax.tree_util.keystr(path) or x.dtype == jnp.uint32:
                return x
            return jax.random.split(jax.random.key(seed), x.shape)

        keyed = jax.tree_util.tree_map_with_path(replace, rest)
        return flat(step(params, keyed, data())[1])

    first, again, other = (gradient(seed) for seed in (0, 0, 1))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    wanted = flat(reference(variant, "graph")[0][1]).astype(np.float64)
    error = np.stack([gradient(seed) for seed in range(KEYS)]) - wanted
    directions = np.random.default_rng(0).standard_normal((PROJECTIONS, wanted.size))
    projected = error @ directions.T
    spread = projected.std(0, ddof=1) / np.sqrt(KEYS)
    # The mean is known to a few percent of the gradient, so the test can fail.
    scale = np.linalg.norm(wanted)
    assert (spread > 0).all() and (spread < 0.1 * scale).all()
    bound = stats.t.isf(FAILURE / PROJECTIONS / 2, KEYS - 1)
    assert (abs(projected.mean(0)) < bound * spread).all()


@pytest.mark.parametrize("options", [None, {}, {"policy": Policy(2)}], ids=str)
def test_a_decorated_class_is_the_class_in_all_but_storage(options):
    small = jaxact.compress(Block, **(options or {}))
    if options is not None:
        small = jaxact.compress(**options)(Block)
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(small, attribute) == getattr(Block, attribute)
    model = small(nnx.Rngs(0))
    assert isinstance(model, Block)
    assert same(split(model)[1:], split(Block(nnx.Rngs(0)))[1:])


def test_an_instance_shares_its_state(mode):
    block = Block(nnx.Rngs(0))
    small, before = packed(block), block.norm.mean.get_value()
    assert small.up is block.up and type(small).__name__ == "Block"
    small(data())
    assert not np.array_equal(block.norm.mean.get_value(), before)
    assert int(block.dropout.rngs.count.get_value()) == 1
    block.down.kernel.set_value(jnp.zeros_like(block.down.kernel.get_value()))
    assert same(small(data()), data() + block.down.bias.get_value()[None])


def test_the_jaxact_stream_moves_on_with_each_call(mode):
    block = jaxact.compress(Block, policy=Policy(BITS))(nnx.Rngs(0, jaxact=1))
    for count in range(3):
        assert int(block.noise.count.get_value()) == count
        assert int(block.dropout.rngs.count.get_value()) == count
        block(data())


def test_a_rounding_key_decides_the_noise(mode):
    class Smooth(nnx.Module):
        def __call__(self, x):
            return jnp.tanh(x)

    small = packed(Smooth())
    function = functools.partial(packed(apply), Smooth())

    def gradient(call, seed):
        key = jax.random.key(seed)
        return jax.grad(lambda x: call(x, rounding_key=key).sum())(data())

    for call in (small, function):
        assert same(gradient(call, 0), gradient(call, 0))
        assert not same(gradient(call, 0), gradient(call, 1))


def test_a_module_that_does_not_change_may_belong_to_an_outer_trace(mode):
    block = Block(nnx.Rngs(0))
    block.eval()

    def gradient(f):
        return jax.grad(lambda x: jnp.square(f(x)).sum())(data())

    with jax.disable_jit():
        assert same(gradient(exact(block)), gradient(block))


def test_sown_values_come_out(mode):
    class Sower(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            h = self.linear(x)
            self.sow(nnx.Intermediate, "hidden", h)
            return nnx.tanh(h)

    wanted, got = (
        nnx.capture(wrap(Sower)(nnx.Rngs(0)), nnx.Intermediate)(data())
        for wrap in (plain, packed)
    )
    assert same(wanted, got)


def test_state_of_one_loads_into_the_other(mode):
    trained = packed(Block)(nnx.Rngs(0))
    trained(data())
    state = nnx.to_pure_dict(nnx.state(trained))
    fresh = Block(nnx.Rngs(1))
    restored = nnx.state(fresh)
    nnx.replace_by_pure_dict(restored, state)
    nnx.update(fresh, restored)
    assert same(fresh(data(1)), trained(data(1)))
    assert same(split(fresh)[1:], split(trained)[1:])


def test_training_with_an_optimizer():
    def train(wrap):
        model = Stack(wrap(Block), nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)

        @nnx.jit
        def update(model, optimizer, x):
            loss = lambda model: jnp.square(model(x) - 1.0).mean()
            value, gradients = nnx.value_and_grad(loss)(model)
            optimizer.update(model, gradients)
            return value

        losses = [float(update(model, optimizer, data())) for _ in range(4)]
        return losses, split(model)[1:]

    losses, trained = train(plain)
    exact_losses, exactly_trained = train(exact)
    # Compiled with fusion, so to a few units in the last place of each sum.
    np.testing.assert_allclose(exact_losses, losses, rtol=1e-5)
    assert jax.tree.structure(exactly_trained) == jax.tree.structure(trained)
    packed_losses, _ = train(packed)
    np.testing.assert_allclose(packed_losses[0], losses[0], rtol=1e-5)
    assert packed_losses[-1] < packed_losses[0]


@pytest.mark.parametrize("request_, error, match", [
    (lambda: jaxact.compress(Block, activations="x"), ValueError, "plain functions"),
    (lambda: jaxact.compress(Block, policy=2), TypeError, r"Policy\(bits=2\)"),
    (
        lambda: jaxact.compress(type("Bare", (nnx.Module,), {"__call__": None})),
        TypeError,
        "has no __call__",
    ),
    (
        lambda: jaxact.compress(nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0))])),
        TypeError,
        "the modules that it holds",
    ),
    (
        lambda: jaxact.compress(type("Holder", (nnx.Module,), {})),
        TypeError,
        "has no __call__",
    ),
    (
        lambda: jaxact.compress(lambda model, n: model(jnp.ones((int(n), 2))))(
            nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.int32(3)
        ),
        jax.errors.ConcretizationTypeError,
        None,
    ),
], ids=["activations", "policy", "no-call", "list", "holder", "concrete"])  # fmt: skip
def test_wrong_requests_say_what_to_write(request_, error, match):
    with pytest.raises(error, match=match) as caught:
        request_()
    if match is None:
        notes = " ".join(caught.value.__notes__)  # JAX may add its own
        assert "n. Name an argument" in notes and "static_argnums" in notes


@pytest.mark.parametrize("jitted", [False, True])
def test_a_batch_that_is_closed_over_is_data(jitted):
    """All state is parameters; nothing was packed, and no word was said."""
    model = nnx.Linear(64, 256, rngs=nnx.Rngs(0))
    x = jnp.ones((32, 64))

    def table(x):
        loss = jaxact.compress(lambda model: jnp.square(nnx.gelu(model(x))).mean())
        return jaxact.residuals(loss, model, argnums=0)

    if jitted:
        tables = []
        jax.eval_shape(lambda x: tables.append(table(x)), x)
        (found,) = tables
    else:
        found = table(x)
    assert found.rows and found.stored_bytes < found.exact_bytes / 3


def test_instances_of_one_class_stay_so():
    first, second = (
        jaxact.compress(Block(nnx.Rngs(i)), policy=Policy(2)) for i in (0, 1)
    )
    assert type(first) is type(second) is not Block
    assert type(first) is not type(jaxact.compress(Block(nnx.Rngs(0))))
