"""A compressed function is traced again when, and only when, its trace may differ."""

import concurrent.futures
import dataclasses
import enum
import functools
import sys
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxact
from jaxact._trace import TraceCache

pytestmark = pytest.mark.unoptimized

W = jax.random.normal(jax.random.key(0), (16, 16)) / 8
X = jax.random.normal(jax.random.key(1), (32, 16))

scale = 1.0
table = W


def helper(x):
    return jnp.tanh(x * scale)


def gradient(f, *args, **kwargs):
    return jax.grad(lambda w, *args: f(w, *args, **kwargs).sum())(*args)


def counted(f):
    """`f`, compressed, and the list that grows by one with each trace."""
    traces = 0

    def traced(*args, **kwargs):
        nonlocal traces
        traces += 1
        return f(*args, **kwargs)

    return jaxact.compress(traced), lambda: traces


@dataclasses.dataclass(frozen=True)
class Config:
    bits: int


CALLS = {
    "arrays": (lambda w, x: jax.nn.gelu(x @ w), {}),
    "calls another function": (lambda w, x: helper(x @ w), {}),
    "an option": (lambda w, x, mode: helper(x @ w) if mode else x, {"mode": "a"}),
    "a frozen dataclass": (lambda w, x, c: helper(x @ w) * c.bits, {"c": Config(3)}),
    "partial": (functools.partial(lambda p, w, x: p * jnp.sin(x @ w), 2.0), {}),
    "jitted": (jax.jit(lambda w, x: jnp.exp(helper(x @ w))), {}),
    "closed over array": (lambda w, x: jax.nn.relu(x @ w @ table), {}),
}


@pytest.mark.parametrize("case", CALLS)
def test_equal_eager_calls_are_traced_once(case):
    f, kwargs = CALLS[case]
    small, traces = counted(f)
    first = gradient(small, W, X, **kwargs)
    for _ in range(3):
        np.testing.assert_array_equal(gradient(small, W, X, **kwargs), first)
    assert traces() == 1
    with jax.default_matmul_precision("float32"):
        gradient(small, W, X, **kwargs)
    assert traces() == 2


def exact(f):
    return jaxact.compress(f, policy=jaxact.Policy(default=jaxact.Exact()))


@pytest.fixture
def follow():
    """Compare a function with its compressed one, before and after a change."""
    made = {}

    def compare(f):
        small = made.setdefault(f, exact(f))
        np.testing.assert_allclose(gradient(small, W, X), gradient(f, W, X), rtol=1e-6)

    return compare


def test_rebound_global(follow, monkeypatch):
    f = lambda w, x: helper(x @ w)
    follow(f)
    monkeypatch.setitem(globals(), "scale", 2.0)
    follow(f)
    monkeypatch.setitem(globals(), "helper", jnp.sin)
    follow(f)


def test_rebound_array(follow, monkeypatch):
    f = lambda w, x: jnp.sin(x @ w @ table)
    follow(f)
    monkeypatch.setitem(globals(), "table", 2 * W)
    follow(f)


def test_change_in_place(follow):
    weights = [W]
    f = lambda w, x: jnp.sin(x @ w @ weights[0])
    follow(f)
    weights[0] = 2 * W
    follow(f)


def test_variable_of_a_closure(follow):
    factor = 1.0

    def f(w, x):
        return jnp.sin(x @ w * factor)

    follow(f)
    factor = 3.0
    follow(f)
    factor = np.float32(3.5)
    follow(f)


def test_attribute(follow):
    class Net:
        factor = 1.0

        def __call__(self, w, x):
            return jnp.sin(x @ w * self.factor)

    net = Net()
    method, closure = net.__call__, lambda w, x: net(w, x)
    for f in (method, closure):
        follow(f)
    net.factor = 2.0
    for f in (method, closure):
        follow(f)


class Settings:
    factor = 1.0


@dataclasses.dataclass(frozen=True)
class Derived:
    power: int

    @property
    def factor(self):
        return scale**self.power


class Pair2(NamedTuple):
    power: int

    def factor(self):
        return scale**self.power


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    table: dict[str, float]


class Named(tuple):
    table: dict[str, float]


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Weight:
    """An array, beside it a function, and a method that reads a table."""

    array: jax.Array
    act: object

    def tree_flatten(self):
        return (self.array,), self.act

    @classmethod
    def tree_unflatten(cls, act, arrays):
        return cls(*arrays, act)

    def factor(self):
        return TABLE["factor"]


TABLE = {"factor": 1.0}


class Mode(enum.Enum):
    FULL = Settings()


def schedule():
    return schedule.factor


def imported(w, x):
    import schedules_of_a_test as schedules

    return jnp.sin(x @ w * schedules.factor)


derived, pair, mode = Derived(1), Pair2(1), Mode.FULL
READERS = {
    "import": imported,
    "function's attribute": lambda w, x: jnp.sin(x @ w * schedule()),
    "property": lambda w, x: jnp.sin(x @ w * derived.factor),
    "method of a tuple": lambda w, x: jnp.sin(x @ w * pair.factor()),
    "object of an enumeration": lambda w, x: jnp.sin(x @ w * mode.value.factor),
    "globals()": lambda w, x: jnp.sin(x @ w * globals()["scale"]),
    "eval": lambda w, x: jnp.sin(x @ w * eval("scale")),  # noqa: S307
}


@pytest.mark.parametrize("name", READERS)
def test_what_is_read_by_way_of_something_else(follow, monkeypatch, name):
    module = types.ModuleType("schedules_of_a_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for factor in (1.0, 3.0):
        monkeypatch.setitem(globals(), "scale", factor)
        for owner in (module, schedule, mode.value):
            monkeypatch.setattr(owner, "factor", factor, raising=False)
        follow(READERS[name])


def test_a_static_field_of_a_users_pytree():
    settings = Settings()
    settings.factor = 1.0
    pair = Pair(W, W, settings)
    f = lambda pair, x: jnp.sin(x @ pair.a * pair.options.factor)
    small = exact(f)
    for factor in (1.0, 3.0):
        settings.factor = factor
        np.testing.assert_array_equal(small(pair, X), f(pair, X))


def test_signs_and_types_of_constants():
    small = exact(lambda w, x, c: jnp.arctan2(x @ w * 0.0, c))
    for c in (1.0, -1.0, 0.0, -0.0, 1):
        f = lambda w, x, c: jnp.arctan2(x @ w * 0.0, c)
        np.testing.assert_array_equal(
            gradient(small, W, X, c=c), gradient(f, W, X, c=c)
        )
        np.testing.assert_array_equal(small(W, X, c=c), f(W, X, c=c))


def test_static_argument_changed_in_place():
    options = {"factor": 1.0}

    def f(w, x, options):
        return jnp.sin(x @ w * options["factor"])

    small = jaxact.compress(f, static_argnums="options")
    one = small(W, X, options)
    options["factor"] = 2.0
    np.testing.assert_array_equal(small(W, X, options), f(W, X, options))
    assert not jnp.array_equal(one, small(W, X, options))


def test_random_numbers_of_numpy():
    small = jaxact.compress(lambda w, x: jnp.sin(x @ w * np.random.rand()))
    assert not jnp.array_equal(small(W, X), small(W, X))


def test_no_tracer_is_kept():
    """A function that closes over a tracer, called in two traces."""
    captured = None
    small = jaxact.compress(lambda w, x: jnp.sin(x @ w * captured))

    @jax.jit
    def loss(scale, w):
        nonlocal captured
        captured = scale
        return small(w, X).sum()

    first = jax.grad(loss)(2.0, W)
    captured = None
    jax.clear_caches()
    np.testing.assert_array_equal(jax.grad(loss)(2.0, W), first)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Pair:
    """A pytree that refuses None in place of arrays, with a value without a hash."""

    a: object
    b: object
    options: object

    def tree_flatten(self):
        return (self.a, self.b), self.options

    @classmethod
    def tree_unflatten(cls, options, children):
        assert all(child is not None for child in children)
        return cls(*children, options)


@pytest.mark.parametrize("options", [(1, 2), [1, 2]], ids=["hash", "no hash"])
def test_a_users_pytree(options):
    f = lambda pair, x: jnp.sin(x @ pair.a) * jnp.cos(x @ pair.b)
    small = exact(f)
    pair = Pair(W, 2 * W, options)
    for _ in range(2):
        np.testing.assert_array_equal(small(pair, X), f(pair, X))


def test_a_callable_without_a_hash():
    @dataclasses.dataclass
    class Net:
        w: object

        def __call__(self, x):
            return jnp.sin(x @ self.w)

    net = Net(W)
    small = jaxact.compress(net)
    np.testing.assert_array_equal(small(X), net(X))
    net.w = 2 * W
    np.testing.assert_array_equal(small(X), net(X))


def test_a_table_in_slots_or_beside_the_elements_of_a_tuple(follow):
    slotted, named = Slotted({"factor": 1.0}), Named((1.0,))
    named.table = {"factor": 1.0}
    slots = lambda w, x: jnp.sin(x @ w * slotted.table["factor"])
    beside = lambda w, x: jnp.sin(x @ w * named.table["factor"])
    for factor in (1.0, 2.0):
        slotted.table["factor"] = named.table["factor"] = factor
        follow(slots)
        follow(beside)


@pytest.mark.parametrize(
    "argument, f",
    [
        (
            jax.tree_util.Partial(lambda z: z * TABLE["factor"]),
            lambda w, x, act: jnp.sin(act(x @ w)),
        ),
        (
            Weight(W, lambda z: z * TABLE["factor"]),
            lambda w, x, weight: jnp.sin(weight.act(x @ w @ weight.array)),
        ),
        (
            Weight(W, None),
            lambda w, x, weight: jnp.sin(x @ w @ weight.array * weight.factor()),
        ),
    ],
    ids=["a function", "a function beside an array", "a method"],
)
def test_a_table_that_an_argument_reads(argument, f, monkeypatch):
    small = exact(f)
    for factor in (1.0, 2.0):
        monkeypatch.setitem(TABLE, "factor", factor)
        got, wanted = (gradient(g, W, X, argument) for g in (small, f))
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_traces_are_kept_by_several_threads():
    """More signatures than are remembered, so that each call forgets one."""

    class Call:
        def __init__(self, key):
            self.key, self.values = lambda: key, tuple

    cache = TraceCache()
    keep = lambda i: [cache.keep(Call((i, j)), abs) for j in range(20000)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert all(map(len, pool.map(keep, range(4))))
    finally:
        sys.setswitchinterval(interval)
