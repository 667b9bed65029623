"""The GPT in Flax NNX, and how examples train: checkpoints, policies, the table."""

import dataclasses
import functools
import importlib
import itertools
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxact
from support.programs import assert_same_bits
from support.variants import thorough

for package in ("flax", "optax", "orbax.checkpoint", "rich"):
    pytest.importorskip(package)
pytestmark = pytest.mark.unoptimized
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    with jax.numpy_dtype_promotion("standard"):  # as Flax asks
        yield


def dense(p, name):
    return {"kernel": p[name], "bias": p[f"{name}_bias"]}


def norm(p, prefix):
    return {"scale": p[f"{prefix}gain"], "bias": p[f"{prefix}bias"]}


def as_nnx(p):
    """The parameters of models/gpt.py under the names of models/gpt_nnx.py."""
    layer = p["layers"]
    names = ("qkv", "out", "up", "down")
    layers = {name: dense(layer, name) for name in names}
    layers["attention_norm"] = norm(layer, "attention_")
    layers["feed_norm"] = norm(layer, "feed_")
    embeddings = {n: {"embedding": p[n]} for n in ("tokens", "positions")}
    return embeddings | {"layers": layers, "norm": norm(p, "")}


def test_the_nnx_gpt_is_the_plain_one():
    from flax import nnx
    from models import gpt, gpt_nnx

    size = {"width": 32, "heads": 4, "length": 16, "vocabulary": 11}
    plain = gpt.GPT(2, **size, dtype=jnp.float32)
    shape = gpt_nnx.Shape(2, **size, chunks=2, dtype=jnp.float32)
    net = nnx.eval_shape(lambda: gpt_nnx.GPT(shape, rngs=nnx.Rngs(0)))
    structure, own = nnx.split(net)
    rng = np.random.default_rng(0)
    params = jax.tree.map(  # also gains and biases, which init sets to 1 and 0
        lambda x: rng.normal(scale=0.3, size=x.shape).astype("f"), plain.shapes
    )
    shapes = jax.tree.map(lambda x: x.shape, nnx.to_pure_dict(own))
    assert shapes == jax.tree.map(np.shape, as_nnx(params))
    nnx.replace_by_pure_dict(own, as_nnx(params))
    tokens = rng.integers(0, 11, (3, 17))
    wanted = jax.jit(plain.loss)(params, tokens)
    found = jax.jit(lambda params: nnx.merge(structure, params).loss(tokens))(own)
    # Sums of at most 128 float32 terms, in another order.
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """gpt.py's training of a network that compiles in seconds."""
    import gpt
    import loop
    from models.gpt_nnx import Shape

    shape = Shape(layers=2, width=32, heads=2, length=16, chunks=2)
    size = gpt.Size(shape, batch=4, steps=4, rate=1e-2)
    monkeypatch.setattr(gpt, "SMALL", size)
    (tmp_path / "fox.txt").write_text("[the] quick brown fox jumps " * 20)
    options = loop.parser("").parse_args(["--data", str(tmp_path / "fox.txt")])
    return gpt.training(options)


@thorough
def test_a_gpt_resumes_bit_for_bit(tiny, tmp_path):
    import loop

    step = loop.training_step(tiny.loss(jaxact.Policy()), tiny.optimizer)
    step = step.lower(loop.shapes(tiny), next(tiny.batches(0))).compile()
    folder = tmp_path / "saved"

    def run():
        with loop.checkpoints(folder, every=2) as manager:
            state, start = loop.restored(manager, loop.fresh(tiny))
            state, _ = loop.train(tiny, step, state, start, manager)
        return start, state

    began, straight = run()
    shutil.rmtree(folder / "4")
    resumed, again = run()
    assert (began, resumed) == (0, 2)
    assert_same_bits(straight, again)
    score, text = tiny.score(again.params, ()).split("; it writes:\n")
    assert float(score.split()[2]) < np.log(len(set("[the] quick brown fox jumps ")))
    assert len(text) == 200


def toy(num_steps=5):
    """Two maps whose product is learned, of batches that are drawn anew."""
    import loop
    import optax

    def two_maps(params, x):
        return jnp.tanh(x @ params["first"]) @ params["second"]

    def loss(policy):
        net = two_maps
        if policy is not None:
            net = jaxact.compress(two_maps, policy=policy, activations="x")
        return lambda params, seen, x: (((net(params, x) - x) ** 2).mean(), seen + 1)

    def init():
        rng = np.random.default_rng(0)
        maps = jnp.asarray(rng.normal(scale=0.1, size=(2, 32, 32)), "f")
        return {"first": maps[0], "second": maps[1]}, jnp.zeros((), jnp.int32)

    def batches(start):
        for number in range(start, num_steps):
            yield np.random.default_rng(number).normal(size=(64, 32)).astype("f")

    return loop.Training(
        *("a toy", num_steps, init, loss, optax.adam(1e-2), batches),
        score=lambda params, seen: f"[seen {int(seen)}]",
        part=lambda x: x[:8],
    )


def options(*words):
    import loop

    return loop.parser("").parse_args(list(map(str, words)))


def test_a_run_goes_on_from_its_checkpoint(tmp_path, capsys, monkeypatch):
    """Also with bits that were measured before the first step."""
    import loop

    monkeypatch.setattr(loop, "memory_table", lambda *_: "its table")
    saved = "--checkpoint", tmp_path / "saved", "--save-every", 2
    straight = loop.run(toy(), options("--policy", "acgc", *saved))
    shutil.rmtree(tmp_path / "saved" / "5")
    steps = []
    monkeypatch.setattr(loop.Progress, "update", lambda *_, **told: steps.append(told))
    resumed = loop.run(toy(), options("--policy", "acgc", *saved))
    assert len(steps) == 1, "from step 4 on"
    assert_same_bits(straight, resumed)
    printed = capsys.readouterr().out
    assert printed.count("[seen 5]") == printed.count("its table") == 2
    assert "goes on from step 4" in printed
    loop.run(toy(), options("--policy", "acgc", *saved))
    assert "finished at step 5" in capsys.readouterr().out
    with pytest.raises(ValueError, match="policy acgc, bits 4; this is policy none"):
        loop.run(toy(), options("--policy", "none", *saved))


def test_checkpoints_without_a_record_are_left_alone(tmp_path):
    import loop

    saved = tmp_path / "saved"
    (saved / "4").mkdir(parents=True)
    words = "--policy", "none", "--checkpoint", saved
    with pytest.raises(ValueError, match="saved has checkpoints and no run.json"):
        loop.run(toy(), options(*words))
    assert [path.name for path in saved.rglob("*")] == ["4"]


def test_a_score_does_not_depend_on_the_batch(tiny):
    import gpt
    from flax import nnx

    params, _ = tiny.init()
    shape = dataclasses.replace(gpt.SMALL.shape, vocabulary=27)
    graph = nnx.graphdef(nnx.eval_shape(lambda: gpt.GPT(shape, rngs=nnx.Rngs(0))))
    text = np.arange(5 * 17, dtype=np.int32) % 23 % 7
    score = functools.partial(gpt.validation_loss, graph, params, text, 16)
    # Means of the same float32 losses in another order.
    np.testing.assert_allclose([score(2), score(3)], score(5), rtol=1e-6)


def test_an_unknown_target_stops_before_the_first_step():
    import loop

    never = dataclasses.replace(toy(), init=None)
    with pytest.raises(ValueError, match="unknown target 'h1000': one of a100, "):
        loop.run(never, options("--target", "h1000"))


def test_a_negative_seed_is_refused(capsys):
    with pytest.raises(SystemExit):
        options("--seed", "-1")
    wanted = "argument --seed: -1: an integer from 0 on is required"
    assert wanted in capsys.readouterr().err


def test_an_interrupted_run_says_what_is_saved(tmp_path, monkeypatch):
    import loop

    def interrupted(start):
        yield from itertools.islice(toy().batches(start), 3)
        raise KeyboardInterrupt

    training = dataclasses.replace(toy(), batches=interrupted)
    with pytest.raises(SystemExit, match="nothing is saved: with --checkpoint FOLDER"):
        loop.run(training, options("--policy", "none"))
    saved = "--checkpoint", tmp_path / "saved", "--save-every", 2
    with pytest.raises(SystemExit, match="step 2 is saved, the same command goes on"):
        loop.run(training, options("--policy", "none", *saved))


@pytest.mark.parametrize(
    "words, message",
    [
        (["--data", "missing.txt"], "No such file"),
        (["--data", "cora.npz"], "cora.npz: a file of text in UTF-8 is required"),
        (["--dry-run", "--policy", "gact"], "--policy gact measures a step"),
    ],
    ids=["missing", "no text", "no step"],
)
def test_an_error_of_the_command_is_one_line(tmp_path, monkeypatch, words, message):
    import gpt
    import loop

    (tmp_path / "cora.npz").write_bytes(b"PK\xff\xfe")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["gpt.py", *words])
    with pytest.raises(SystemExit, match=f"gpt.py: error: .*{message}") as error:
        loop.main(gpt.__doc__, gpt.training)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("option", ["--steps", "--batch", "--save-every"])
def test_counts_of_none_are_refused(option, capsys):
    import loop

    with pytest.raises(SystemExit):
        loop.parser("").parse_args([option, "0"])
    assert (
        f"argument {option}: 0: an integer from 1 on is required"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("example", ["loop", "quickstart", "graph", "lora"])
def test_every_option_says_what_it_is_for(example):
    module = importlib.import_module(example)
    parser = module.parser("") if example == "loop" else module.parser()
    assert all(option.help for option in parser._actions)


def test_every_policy_stores_what_backward_needs():
    import loop

    training = toy()
    state, batch = loop.fresh(training), next(training.batches(0))
    measured = loop.sensitivity(training, state, batch, jaxact.Policy())
    arguments = state.params, state.statistics, batch
    stored = {}
    for name in loop.POLICIES:
        chosen = options("--policy", name, "--bits", 2)
        policy = loop.POLICIES[chosen.policy](chosen.bits, lambda _: measured)
        loss = training.loss(policy)
        table = jaxact.residuals(
            lambda *a, loss=loss: loss(*a)[0], *arguments, argnums=0
        )
        stored[name] = table.stored_bytes
    assert all(stored[name] < stored["none"] for name in stored if name != "none")


def test_a_dry_run_needs_no_more_than_shapes(capsys):
    import loop

    state = loop.run(toy(), options("--dry-run"))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state))
    printed = capsys.readouterr().out
    assert "uncompressed" in printed and "jaxact" in printed and "seen" not in printed
    with pytest.raises(ValueError, match="--policy gact measures a step"):
        loop.run(toy(), options("--dry-run", "--policy", "gact"))


def test_a_loss_that_is_not_finite_stops_the_run():
    import loop

    broken = lambda policy: lambda params, seen, x: (jnp.nan * x.sum(), seen)
    with pytest.raises(FloatingPointError, match="loss of step 1 is nan"):
        loop.run(dataclasses.replace(toy(), loss=broken), options("--policy", "none"))
