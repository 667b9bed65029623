"""`compress` on plain functions: forms of use, arguments, errors."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxact
from jaxact import Exact, Policy, Quantize, Rule
from jaxact._jaxpr.compat import HAS_GENERIC_BATCHING
from support.programs import assert_same_bits, relative_error, same_bits

pytestmark = pytest.mark.unoptimized

W, X = jnp.ones((64, 64)) / 8, jax.random.normal(jax.random.key(0), (32, 64))


def layer(w, x, scale=1.0, *, act="tanh", mask=None):
    """The docstring."""
    y = getattr(jnp, act)(x @ w * scale)
    return y if mask is None else jnp.where(mask, y, 0.0)


def test_forms_of_use():
    policy = Policy(bits=2)
    forms = [
        jaxact.compress(layer),
        jaxact.compress(layer, policy=policy),
        jaxact.compress()(layer),
        jaxact.compress(policy=policy, activations="x")(layer),
        jaxact.compress(functools.partial(layer, act="sin"), activations=1),
    ]
    for form in forms[:-1]:
        assert (form.__name__, form.__doc__) == ("layer", "The docstring.")
        assert_same_bits(form(W, X), layer(W, X))
    assert_same_bits(forms[-1](W, X), layer(W, X, act="sin"))


@pytest.mark.parametrize("activations", [1, -1, "x", (1,), ("x",), [1, "mask"]])
@pytest.mark.parametrize("by_name", [False, True])
def test_activations_by_name_or_number(activations, by_name):
    if by_name and activations == -1:
        pytest.skip("a negative number counts positional arguments")
    small = jaxact.compress(layer, activations=activations, policy=Policy(bits=8))
    call = (lambda f: f(W, x=X)) if by_name else (lambda f: f(W, X))
    table = jaxact.residuals(
        lambda w, x: small(w, x=x) if by_name else small(w, x), W, X
    )
    assert {row.path for row in table.rows if not row.primitive} == {"x"}
    assert_same_bits(call(small), call(layer))


@pytest.mark.parametrize("activations", ["h", 2, ("x", "h"), -3])
def test_unknown_activations(activations):
    small = jaxact.compress(lambda w, x: x @ w, activations=activations)
    with pytest.raises(ValueError, match=r"no argument.*\['w', 'x'\]"):
        small(W, X)


def test_parameters_are_never_copied():
    def f(w, x):
        half = w.astype(jnp.bfloat16).T
        return jnp.tanh(x.astype(jnp.bfloat16) @ half).astype(jnp.float32)

    small = jaxact.compress(f, activations="x")
    program = jax.make_jaxpr(lambda *a: jax.tree.leaves(jax.vjp(small, *a)[1]))(W, X)
    of_weights = [v for v in program.jaxpr.outvars if v.aval.shape == W.shape]
    assert of_weights == [program.jaxpr.invars[0]]


def test_static_values_and_other_leaves():
    mask = np.arange(64) % 2 == 0
    call = lambda f: f(W, X, 2.0, act="sin", mask=mask[None])
    small = jaxact.compress(layer, activations=("x", "mask"), policy=Policy(bits=8))
    assert_same_bits(call(small), call(layer))
    gradient = lambda f: jax.grad(lambda w: f(w, X, act="sin", mask=mask[None]).sum())(
        W
    )
    assert relative_error(gradient(small), gradient(layer)) < 0.05

    def shaped(x, sizes, tag):
        assert isinstance(sizes, np.ndarray) and tag == "tag"
        return jnp.sin(x).reshape(tuple(sizes)), None, {"tag": tag, "number": 3}

    out = jaxact.compress(shaped, static_argnums=1)(X, np.array([64, 32]), "tag")
    assert out[0].shape == (64, 32) and out[1:] == (None, {"tag": "tag", "number": 3})


@pytest.mark.parametrize("dtype", [str, object, "datetime64[s]"])
def test_arrays_that_jax_has_no_type_for_stay_what_they_are(dtype):
    def f(w, x, names):
        assert isinstance(names, np.ndarray)
        return jnp.sin(x @ w) * (2.0 if names[0] == first else 3.0)

    first = np.array(["2026"], dtype)[0]
    names = np.array(["2026", "2027"], dtype)
    small = jaxact.compress(f)
    assert_same_bits(small(W, X, names), f(W, X, names))
    names[0] = names[1]
    assert_same_bits(small(W, X, names), f(W, X, names))


def test_traced_once():
    calls = []

    def f(x):
        calls.append(1)
        return jnp.tanh(x) * x

    jax.grad(lambda x: jaxact.compress(f)(x).sum())(X)
    assert len(calls) == 1


def test_rounding_key():
    small = jaxact.compress(layer, policy=Policy(bits=2), activations="x")
    gradient = jax.jit(
        lambda key: jax.grad(lambda w: small(w, X, rounding_key=key).sum())(W)
    )
    a, b = gradient(jax.random.key(0)), gradient(jax.random.key(1))
    assert_same_bits(a, gradient(jax.random.key(0)))
    assert not same_bits(a, b)
    assert_same_bits(a, gradient(jax.random.PRNGKey(0)))
    with pytest.raises(TypeError, match="PRNG key is required"):
        small(W, X, rounding_key=3)


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f: jax.jvp(f, (X,), (X,)),
        lambda f: jax.jvp(jax.jit(f), (X,), (X,)),
        lambda f: jax.jacfwd(f)(X),
        lambda f: jax.hessian(lambda x: f(x).sum())(X),
        lambda f: jax.grad(lambda x: jax.grad(lambda x: f(x).sum())(x).sum())(X),
    ],
    ids=["jvp", "jvp of jit", "jacfwd", "hessian", "grad of grad"],
)
def test_other_derivatives_raise(derivative):
    small = jaxact.compress(lambda x: jnp.tanh(x) * x)
    with pytest.raises(TypeError, match="forward-mode|second-order"):
        derivative(small)


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f: jax.jvp(f, (X,), (X,)),
        lambda f: jax.jacfwd(f)(X),
        lambda f: jax.jvp(jax.vmap(f), (X[None],), (X[None],)),
        lambda f: jax.jvp(lambda x: f(x).sum(), (X,), (X,)),
    ],
    ids=["jvp", "jacfwd", "vmap", "sum"],
)
def test_forward_mode_is_refused_by_name(derivative):
    def gate(x):
        return jnp.tanh(x) * x

    with pytest.raises(TypeError, match="jaxact: forward-mode .* compressed .*gate"):
        derivative(jaxact.compress(gate))


def test_other_type_errors_are_not_taken_for_forward_mode():
    class Broken(jaxact.Codec):
        bias, bits = jaxact.Bias.UNBIASED, 4

        def encode(self, x, seed):
            raise TypeError("broken codec")

        def decode(self, stored, shape, dtype):
            return stored

    rule = jaxact.Rule(Broken(), where=lambda r: True)
    broken = jaxact.compress(lambda x: jnp.tanh(x) * x, policy=Policy(rules=(rule,)))
    with pytest.raises(TypeError, match="^broken codec"):
        jax.grad(lambda x: broken(x).sum())(X)


def test_exact_policies_allow_second_order():
    f = lambda x: (jnp.tanh(x) * x).sum()
    small = jaxact.compress(f, policy=Policy(default=Exact()))
    second = lambda f: jax.grad(lambda x: jax.grad(f)(x).sum())(X)
    assert jnp.allclose(second(small), second(f), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::jaxact.CompressionWarning")  # too small
@pytest.mark.parametrize("shape", [(), (0,), (0, 64), (7,), (3, 0, 5)])
def test_odd_shapes(shape):
    f = lambda x: jnp.sin(x) * x
    small = jaxact.compress(f, policy=Policy(default=jaxact.Quantize(8)))
    gradient = lambda f: jax.grad(lambda x: f(x).sum())(jnp.full(shape, 0.5))
    assert jnp.allclose(gradient(small), gradient(f), atol=1e-6)


def test_a_residual_that_is_also_an_output():
    small = jaxact.compress(jnp.exp, policy=Policy(rules=(Rule(Quantize(8)),)))
    y, vjp = jax.vjp(small, X)
    assert_same_bits(y, jnp.exp(X))
    assert relative_error(vjp(jnp.ones_like(y))[0], y) < 0.02


def test_nothing_is_kept_for_integers_and_keys():
    def f(x, n, key):
        noise = jax.random.normal(key, x.shape)
        return jnp.real(jnp.exp(1j * x.astype(jnp.complex64))) * noise + n[:, None]

    n = jnp.ones(32)
    args = (X, n, jax.random.key(0))
    small = jaxact.compress(f, policy=Policy(bits=8))
    gradient = lambda f: jax.grad(lambda x: f(x, *args[1:]).sum())(X)
    assert relative_error(gradient(small), gradient(f)) < 0.05
    rows = jaxact.residuals(small, *args).rows
    assert all(np.issubdtype(row.dtype, np.inexact) for row in rows)


class Layer:
    """A module of no library that jaxact knows: its arrays belong to the instance."""

    def __init__(self, w):
        self.w = w

    @jaxact.compress(activations="x", policy=Policy(bits=2))
    def __call__(self, x):
        return jnp.tanh(x @ self.w)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PytreeLayer:
    """A module as Equinox has them: a dataclass, and a pytree of its arrays."""

    w: jax.Array

    @jaxact.compress(activations="x", policy=Policy(bits=2))
    def __call__(self, x):
        return jnp.tanh(x @ self.w)


@pytest.mark.parametrize("kind", [Layer, PytreeLayer, dict])
@pytest.mark.parametrize("options", [{}, {"activations": "x"}], ids=["bare", "options"])
def test_classes_of_no_module_library_are_refused(kind, options):
    with pytest.raises(TypeError, match=f"{kind.__name__}.*decorate its `__call__`"):
        jaxact.compress(kind, **options)
    with pytest.raises(TypeError, match="no Flax module"):
        jaxact.compress(**options)(kind)


@pytest.mark.parametrize("kind", [Layer, PytreeLayer])
def test_a_decorated_call_of_any_class(kind):
    assert_same_bits(kind(W)(X), jnp.tanh(X @ W))
    table = jaxact.residuals(lambda w, x: kind(w)(x), W, X)
    # The weight is referenced; x and the derivative of tanh are stored.
    assert [row.action for row in table.rows] == [jaxact.Quantize(2)] * 2
    assert table.referenced_bytes == W.nbytes


def test_static_arguments_by_name():
    def shaped(x, sizes):
        assert isinstance(sizes, np.ndarray)
        return jnp.sin(x).reshape(tuple(sizes))

    sizes = np.array([64, 32])
    for names in ("sizes", ("sizes",), 1, -1):
        small = jaxact.compress(shaped, static_argnums=names)
        assert small(X, sizes).shape == (64, 32)
    assert jaxact.compress(shaped, static_argnums="sizes")(X, sizes=sizes).ndim == 2
    with pytest.raises(ValueError, match=r"'act' is no argument.*\['x', 'sizes'\]"):
        jaxact.compress(shaped, static_argnums="act")(X, sizes)


def test_an_array_whose_value_is_asked_for_has_a_name():
    """JAX says that the value depends on arrays[2]."""
    f = lambda params, x: x if x.sum() > 0 else -x
    params = {"b": jnp.ones(3), "w": W}
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        jaxact.compress(f)(params, X)
    assert "arrays[2] is x. " in caught.value.__notes__[-1]


class Branching:
    def __call__(self, x):
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    "f, name",
    [
        (Branching().__call__, "__call__"),
        (Branching(), "Branching"),
        (functools.partial(Branching.__call__, Branching()), "partial"),
    ],
)
def test_errors_name_the_compressed_function(f, name):
    """It was "the function <unknown>"."""
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        jaxact.compress(f)(X)
    assert f"tracing the function {name} at {__file__}:" in str(caught.value)


@pytest.mark.parametrize("target", [None, {"w": jnp.ones(3)}, 3, [layer]], ids=type)
def test_targets_that_are_nothing_to_call(target):
    with pytest.raises(TypeError, match="a function is required") as caught:
        jaxact.compress(target)
    assert type(target).__name__ in str(caught.value)
    assert "Array" not in str(caught.value)  # values may be huge


def test_an_allocation_is_no_policy():
    allocation = jaxact.Allocation((), jaxact.Sensitivity((), 0.0))
    with pytest.raises(TypeError, match=r"policy=allocation\.policy\(\)"):
        jaxact.compress(layer, policy=allocation)


@pytest.mark.parametrize(
    "policy", [Policy(bits=8), Policy(default=Exact())], ids=["8 bits", "exact"]
)
@pytest.mark.parametrize("cotangent", [1.0, np.float32(1)], ids=["Python", "NumPy"])
def test_a_scalar_cotangent(policy, cotangent):
    small = jaxact.compress(lambda x: jnp.sin(x).sum(), policy=policy)
    _, vjp = jax.vjp(small, X)
    assert_same_bits(vjp(cotangent)[0], vjp(jnp.float32(1))[0])


def standardized(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)


@pytest.mark.parametrize("policy", [Policy(bits=4), Policy(default=Exact())])
def test_debug_nans_passes_over_constants_and_finds_results(policy):
    small = jaxact.compress(standardized, policy=policy)
    wrong = jaxact.compress(lambda x: jnp.log(x - 100), policy=policy)
    with jax.debug_nans(True):
        jax.grad(lambda x: jnp.square(small(x)).sum())(X)
        assert_same_bits(small(X), standardized(X))
        with pytest.raises(FloatingPointError):
            wrong(X)
        with pytest.raises(FloatingPointError):
            jax.grad(lambda x: wrong(x).sum())(X)


@dataclasses.dataclass
class Unregistered:
    y: jax.Array


@pytest.mark.parametrize(
    "f",
    [
        lambda w, x: (layer(w, x), set()),
        pytest.param(
            lambda w, x: map(jnp.sin, [x @ w]),
            marks=pytest.mark.filterwarnings("ignore:Python iterable type"),
        ),
        lambda w, x: types.SimpleNamespace(y=layer(w, x)),
        lambda w, x: Unregistered(layer(w, x)),
    ],
    ids=["set", "map", "namespace", "class"],
)
def test_an_output_that_another_call_cannot_have_is_refused(f):
    """Eager calls share a trace: one's set would be the next one's, filled."""
    small = jaxact.compress(f, activations="x")
    for call in (small, jax.jit(small)):
        with pytest.raises(TypeError, match="an output of a compressed function is of"):
            call(W, X)


def test_constants_come_back_as_arrays():
    """Outside of a trace too, as from `jax.jit`: `~` of Python's True is -2."""

    def f(x):
        results = jnp.array(True), jnp.asarray(4), jnp.zeros(()), jnp.int8(3)
        return jnp.tanh(x), *results

    wanted = jax.jit(f)(X)
    results = [jaxact.compress(f)(X)]
    if HAS_GENERIC_BATCHING:  # before, JAX's own custom_jvp makes numbers of arrays
        results.append(jax.vjp(jaxact.compress(f), X)[0])
    for found in results:
        assert all(isinstance(leaf, jax.Array) for leaf in found)
        for leaf, other in zip(found, wanted, strict=True):
            assert_same_bits(leaf, other)
            assert leaf.weak_type == other.weak_type
        assert not bool(~found[1])


@pytest.mark.parametrize("option", ["activations", "static_argnums"])
def test_an_option_that_names_no_argument_says_which_it_is(option):
    with pytest.raises(TypeError, match=rf"compress\({option}=1.5\).*{option}='x'"):
        jaxact.compress(**{option: 1.5})
    with pytest.raises(ValueError, match=rf"compress\({option}=...\): 'y' is no"):
        jaxact.compress(lambda x: jnp.sin(x), **{option: "y"})(X)
