"""A compressed NNX call changes its modules' structure as the plain call does.

Contract: submodules and variables that a call makes, replaces, ties or deletes are
there after it, eagerly and under NNX's transforms. Those that were there before stay
the objects they are. No array that the call left alone becomes an output for that.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors, nnx

import jaxact
from jaxact import Exact, Policy
from support.nnx_modules import MODES
from support.wrapping import WIDTH, data

EXACT = Policy(default=Exact())


def linear(seed, outputs=WIDTH):
    return nnx.Linear(WIDTH, outputs, rngs=nnx.Rngs(seed))


class Net(nnx.Module):
    """Its subclasses change their structure before the last operation."""

    def __init__(self):
        self.a, self.b = linear(0), linear(1)
        self.layers = nnx.List([linear(2)])
        self.last = nnx.data(None)

    def __call__(self, x):
        self.change(x)
        x = jnp.tanh(self.b(jnp.tanh(self.a(x))))
        return x if x.shape[-1] != WIDTH else self.layers[-1](x)


class Lazy(Net):
    def change(self, x):
        if not hasattr(self, "e"):
            self.e = linear(3)


class LazyList(Net):
    def change(self, x):
        self.blocks = nnx.List([linear(3), self.a])


class Append(Net):
    def change(self, x):
        self.layers.append(linear(3))


class AppendVariable(Net):
    def change(self, x):
        self.kept = nnx.List([nnx.Variable(x.mean())])


class Tie(Net):
    def change(self, x):
        self.b = self.a


class Untie(Net):
    def __init__(self):
        super().__init__()
        self.b.kernel = self.a.kernel

    def change(self, x):
        self.b.kernel = nnx.Param(self.a.kernel[...])


class Swap(Net):
    def change(self, x):
        self.a, self.b = self.b, self.a


class OtherClass(Net):
    def change(self, x):
        self.a = nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(3))


class OtherSize(Net):
    def change(self, x):
        self.b = linear(3, WIDTH // 2)


class NewArray(Net):
    def change(self, x):
        self.new = nnx.data(x.mean())


class ArrayForNone(Net):
    def change(self, x):
        self.last = x.mean()


class Delete(Net):
    def change(self, x):
        if hasattr(self, "last"):
            del self.last


class OtherType(Net):
    def __init__(self):
        super().__init__()
        self.flag = 1

    def change(self, x):
        self.flag = True


class Inside(Net):
    """The change is in a compressed call in the compressed call."""

    def __init__(self):
        super().__init__()
        self.lazy = jaxact.compress(Lazy, policy=EXACT)()

    def change(self, x):
        self.lazy(x)


CHANGES = (Lazy, LazyList, Append, AppendVariable, Tie, Untie, Swap, OtherClass)
CHANGES += (OtherSize, NewArray, ArrayForNone, Delete, OtherType, Inside)


def loss(module, x):
    return (module(x) ** 2).sum()


RUNS = {"eager": loss, "grad": nnx.grad(loss), "jit": nnx.jit(nnx.grad(loss))}


def attributes(node):
    """A module's own that hold no arrays, with their types."""
    static = (bool, int, str, tuple, type(None))
    own = vars(node).items() if isinstance(node, nnx.Module) else ()
    return {k: (type(v), v) for k, v in own if isinstance(v, static)}


def described(module):
    """Every path's class and attributes, and each object's paths."""
    paths = {}
    for path, node in nnx.iter_graph(module):
        name = type(node).__name__
        paths[path] = name, attributes(node)
    return paths, sorted(nnx.find_duplicates(module), key=str)


def equal_arrays(a, b):
    x, y = (jax.tree.leaves(nnx.to_pure_dict(nnx.state(m))) for m in (a, b))
    return len(x) == len(y) and all(map(np.array_equal, x, y))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("change", CHANGES)
def test_the_structure_is_that_after_the_plain_call(change, run):
    plain, compressed = change(), jaxact.compress(change, policy=EXACT)()
    for _ in range(2):
        wanted, got = RUNS[run](plain, data()), RUNS[run](compressed, data())
        for x, y in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
            assert np.allclose(x, y, rtol=1e-5, atol=1e-5)
        paths, duplicates = described(plain)
        assert described(compressed) == (paths, duplicates)
        assert equal_arrays(plain, compressed)
    assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(compressed))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("change", [Lazy, Swap, Tie, OtherClass])
def test_what_was_there_before_stays_the_same_object(change, run):
    modules = change(), jaxact.compress(change(), policy=EXACT)
    outcomes = []
    for module in modules:
        known = [module.a, module.b, module.a.kernel, module.b.kernel, module.layers]
        RUNS[run](module, data())
        now = [module.a, module.b, module.layers]
        now += [getattr(m, "kernel", None) for m in (module.a, module.b)]
        outcomes.append([[x is y for y in known] for x in now])
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_nnx(mode):
    with MODES[mode]():
        plain, compressed = Lazy(), jaxact.compress(Lazy, policy=EXACT)()
        assert np.array_equal(plain(data()), compressed(data()))
        assert np.array_equal(plain.e.kernel, compressed.e.kernel)


class Counting(Net):
    calls = 0

    def change(self, x):
        self.calls += 1


def test_parameters_that_stay_are_no_outputs():
    module = jaxact.compress(Counting, policy=EXACT)()
    kernel = module.a.kernel[...]
    module(data())
    assert module.calls == 1
    assert module.a.kernel[...] is kernel


def test_modules_of_an_outer_trace_are_as_before():
    module = jaxact.compress(Lazy, policy=EXACT)()
    before = described(module)
    with pytest.raises(errors.TraceContextError) as caught:
        jax.grad(lambda x: module(x).sum())(data())
    assert any("belong to the trace" in note for note in caught.value.__notes__)
    assert described(module) == before
    module.name = "can be changed"


def test_a_module_of_an_outer_trace_may_stay_as_it_is():
    """A teacher that the loss closes over, beside a student that counts its calls."""
    student, teacher = Counting(), linear(0)
    distance = lambda student, teacher, x: jnp.abs(student(x) - teacher(x)).sum()
    small = jaxact.compress(distance, policy=EXACT)
    wanted = nnx.grad(lambda student: distance(student, teacher, data()))(student)
    found = nnx.grad(lambda student: small(student, teacher, data()))(student)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert student.calls == 2


def test_references_made_in_a_call_are_refused():
    class Reference(Net):
        def change(self, x):
            self.r = nnx.Variable(jnp.zeros(2), ref=True)

    with pytest.raises(TypeError, match="reference .ref=True"):
        jaxact.compress(Reference, policy=EXACT)()(data())


def test_measurements_of_calls_that_make_submodules():
    compressed = jaxact.compress(Lazy, policy=Policy(bits=8))()
    table = jaxact.residuals(loss, compressed, data())
    assert table.rows
    assert not hasattr(compressed, "e")  # nothing is evaluated
    watched = jaxact.telemetry(loss)
    watched(watched.probe(compressed, data()), compressed, data())
    assert compressed.e.kernel.shape == (WIDTH, WIDTH)
