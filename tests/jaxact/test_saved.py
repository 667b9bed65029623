"""Values come back from JSON as they were."""

import dataclasses
import gc
import inspect
import json
import math
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxact
from jaxact import Cast, Exact, Offload, Policy, Quantize, Rule, _saved, policies

pytestmark = pytest.mark.unoptimized


def through_json(value):
    text = json.dumps(value.to_dict(), allow_nan=False)
    return type(value).from_dict(json.loads(text))


def actions():
    """An instance of every action that jaxact has, however new."""
    given = {"Cast": [jnp.bfloat16], "Quantize": [3], "PerSample": [2.5]}
    given["Rounded"] = [Quantize(2)]
    for name, kind in vars(jaxact).items():
        is_action = inspect.isclass(kind) and issubclass(kind, jaxact.Action)
        if is_action and not inspect.isabstract(kind):
            yield kind(*given.get(name, []))
    yield Offload(Quantize(4, stochastic=False))
    yield Offload(Cast(jnp.float8_e4m3fn))


@pytest.mark.parametrize("action", list(actions()), ids=str)
def test_actions(action):
    again = through_json(action)
    assert again == action and type(again) is type(action)
    assert hash(again) == hash(action)
    assert jaxact.Action.from_dict(action.to_dict()) == action


@pytest.mark.parametrize("policy", [
    Policy(),
    Policy(2, rules=(
        Rule(Quantize(4), name="mlp_*"),
        Rule(Exact(), path="attn/*", dtype=jnp.bfloat16, min_bytes=2**20),
        Rule(Offload(), key="Net/x#1", primitive="dot_general", recomputed_from=True),
    )),
    Policy(recompute=jax.checkpoint_policies.dots_saveable),
    Policy(recompute=policies.save_packed, default=Cast(jnp.bfloat16)),
    Policy(recompute=policies.SaveEither(
        jax.checkpoint_policies.nothing_saveable, policies.save_packed
    )),
    *map(policies.actnn, range(6)),
    policies.gact(4),
    policies.division(2, 8),
])  # fmt: skip
def test_policies(policy):
    assert through_json(policy) == policy


COSTS = tuple(
    jaxact.Cost(f"Net/{i}", 256 * (i + 1), 4, variance, 2.0, bits)
    for i, (variance, bits) in enumerate([(1.5, 2), (1e-9, None), (math.inf, 4)])
)
MEASURED = jaxact.Sensitivity(COSTS, signal=3.0, unmeasured=("a", "b"))


def test_measurements_and_allocations():
    assert through_json(MEASURED) == MEASURED
    allocation = jaxact.allocate(MEASURED, bits=20)
    again = through_json(allocation)
    assert again == allocation and again.policy() == allocation.policy()
    assert again.relative_error == allocation.relative_error


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float64("-inf")])
def test_numbers_that_are_not_finite(value):
    again = through_json(jaxact.Cost("a", 1, 4, variance=value, signal=value, bits=2))
    np.testing.assert_array_equal([again.variance, again.signal], value)


def network(w, x):
    with jax.named_scope("Net"):
        return jnp.where(x @ w > 0, jnp.sin(x @ w), 0) @ w


@pytest.mark.filterwarnings("ignore:jaxact.*matched no residual")
def test_tables():
    w, x = jnp.ones((64, 64)), jnp.ones((32, 64))
    rules = (Rule(Offload(Quantize(4)), name="none"), Rule(Exact(), path="w"))
    block = jaxact.compress(network, policy=Policy(2, rules=rules))
    table = jaxact.residuals(lambda w, x: jnp.cos(block(w, x)).sum(), w, x)
    again = through_json(table)
    assert again == table and str(again) == str(table)
    assert [type(row.dtype) for row in again.rows] == [
        type(row.dtype) for row in table.rows
    ]
    assert again.by_path() == table.by_path() == through_json(table.by_path())
    data = table.to_dict()
    assert data["stored_bytes"] == sum(row["stored_bytes"] for row in data["rows"])


def test_a_table_with_keys():
    """A checkpoint keeps the key that it draws dropout from."""
    draw = jax.checkpoint(lambda key, x: x * jax.random.uniform(key, x.shape))
    for impl in ("threefry2x32", "rbg"):
        key, x = jax.random.key(0, impl=impl), jnp.ones((16, 64))
        small = jaxact.compress(lambda x, key=key: draw(jax.random.fold_in(key, 1), x))
        table = jaxact.residuals(small, x)
        assert key.dtype in [row.dtype for row in table.rows]
        assert through_json(table) == table


def test_memory_and_live_arrays():
    x = jax.ShapeDtypeStruct((64, 64), np.float32)
    step = lambda x: (x @ x) @ x
    for found in (jaxact.memory(step, x), jaxact.live(step, x)):
        assert through_json(found) == found
        assert found.to_dict()["peak_bytes"] == 3 * 64 * 64 * 4


@dataclasses.dataclass(frozen=True)
class Halves(jaxact.Codec):
    """A codec of the user's own, with an argument."""

    scale: float = 0.5
    bias = jaxact.Bias.BIASED
    bits = 16

    def encode(self, x, seed):
        return (x * self.scale).astype(jnp.float16)

    def decode(self, stored, shape, dtype):
        return stored.astype(dtype) / self.scale


def test_codecs_of_users():
    policy = Policy(default=Halves(0.25))
    assert through_json(policy) == policy


def test_numbers_of_numpy():
    for value in (np.float32(0.25), np.int64(3), np.bool_(True)):
        assert through_json(Halves(value)) == Halves(value)


def codec_named(name, module="", place=None):
    """A codec's class, as the module `module` has it."""
    space = {"__module__": module or __name__, "__qualname__": place or name}
    space |= {"encode": Halves.encode, "decode": Halves.decode}
    space |= {"bias": jaxact.Bias.BIASED, "bits": 16}
    space |= {"__annotations__": {"scale": float}, "scale": 0.5}
    return dataclasses.dataclass(frozen=True)(type(name, (jaxact.Codec,), space))


def test_codecs_of_one_name_are_told_apart():
    """The last that was imported was taken for each of them."""
    kinds = [codec_named("Same", module) for module in ("first.codecs", "second")]
    for kind in kinds:
        policy = Policy(default=kind(0.25))
        again = through_json(policy)
        assert again == policy and type(again.default) is kind
    names = [kind().to_dict()["class"] for kind in kinds]
    assert names == ["first.codecs.Same", "second.Same"]
    with pytest.raises(ValueError, match="'Same' fits 2.*first.codecs.Same.*second"):
        jaxact.Action.from_dict({"format": 1, "class": "Same"})
    with pytest.raises(ValueError, match="'third.Same' is no class.*\"second.Same\""):
        jaxact.Action.from_dict({"format": 1, "class": "third.Same"})


def test_a_codec_with_the_name_of_one_of_jaxact():
    kind = codec_named("Bitmask", "mine")
    assert type(through_json(kind())) is kind
    assert through_json(jaxact.Bitmask()) == jaxact.Bitmask()


def test_names_in_jaxact_are_unique():
    """They stand in files without their modules."""
    kinds = {kind for kind in _saved._subclasses(_saved.Saved) if _saved._is_own(kind)}
    names = [kind.__name__ for kind in kinds]
    assert len(names) > 20 and len(set(names)) == len(names)


@pytest.mark.parametrize("name", ["Alone", "__main__.Alone", "mine.Alone"])
def test_names_that_find_the_only_codec(name):
    """Files had bare names once; the module of a script is called `__main__`."""
    kind = codec_named("Alone", "mine")
    assert type(jaxact.Action.from_dict({"format": 1, "class": name})) is kind
    del kind
    gc.collect()  # the next test's is the only one again


def test_a_class_that_is_defined_again_replaces_the_first(monkeypatch):
    module = types.ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", module)
    kinds = [codec_named("Twice", "notebook") for _ in range(2)]
    module.Twice = kinds[1]
    for name in ("Twice", "notebook.Twice"):
        assert type(jaxact.Action.from_dict({"format": 1, "class": name})) is kinds[1]


def test_classes_that_a_function_made_twice():
    kinds = [codec_named("Made", "mine", "make.<locals>.Made") for _ in range(2)]
    with pytest.raises(ValueError, match="fits 2 classes.*top level of its module"):
        Policy.from_dict(Policy(default=kinds[0]()).to_dict())


NAMES = jax.checkpoint_policies.save_only_these_names("a")


@pytest.mark.parametrize("policy, place", [
    (Policy(rules=(Rule(Exact(), name="a"), Rule(Exact(), where=callable))),
     r"rules\[1\].where=.*dataclasses.replace"),
    (Policy(recompute=NAMES), "recompute=.*is code"),
    (Policy(default=Halves(1j)), "default.scale=.*it is a complex, not JSON"),
])  # fmt: skip
def test_code_is_refused(policy, place):
    with pytest.raises(TypeError, match=f"Policy.to_dict: {place}"):
        policy.to_dict()


GOOD = Policy().to_dict()


@pytest.mark.parametrize("data, message", [
    ({}, "format 1 is required.*given format=None"),
    ([], r"from_dict\(<list>\): the dict that to_dict gave is required"),
    (json.dumps(GOOD), r"from_dict\(<str>\).*from text: json.loads"),
    (GOOD | {"format": 2}, "given format=2"),
    (GOOD | {"class": "Nothing"}, "'Nothing' is no class.*Import the module"),
    (Exact().to_dict(), "is of the class Exact: write Exact.from_dict"),
    (GOOD | {"bit": 4}, r"unknown: \['bit'\]"),
    ({"format": 1, "class": "Cost", "key": "a"}, r"missing: \['size', 'itemsize'"),
    (GOOD | {"recompute": {"class": "checkpoint_policy", "name": "os"}}, "has no 'os'"),
    (GOOD | {"bits": 9}, "from 1 to 8"),
])  # fmt: skip
def test_other_data_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        Policy.from_dict(data)


def test_the_format_of_files():
    """A file written by this version: it must stay readable."""
    data = {
        "format": 1,
        "class": "Policy",
        "bits": 2,
        "rules": [
            {
                "class": "Rule",
                "action": {"class": "Quantize", "bits": 8},
                "name": "mlp_*",
            }
        ],
        "recompute": {"class": "checkpoint_policy", "name": "dots_saveable"},
    }
    assert Policy.from_dict(data) == Policy(
        2,
        rules=(Rule(Quantize(8), name="mlp_*"),),
        recompute=jax.checkpoint_policies.dots_saveable,
    )
