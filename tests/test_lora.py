"""Fine-tuning of adapters: what is trained, what is stored, what is written."""

import dataclasses
import functools
import importlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxact
from support.checkpoints import LLAMA, QWEN2, oracle, tensors_of, write
from support.programs import assert_same_bits
from support.variants import thorough
from test_examples import mib, rows, run

for package in ("flax", "optax", "orbax.checkpoint", "rich"):
    pytest.importorskip(package)
load_file = pytest.importorskip("safetensors.numpy").load_file
pytestmark = pytest.mark.unoptimized
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def lora(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    with jax.numpy_dtype_promotion("standard"):  # as optax asks
        yield importlib.import_module("lora")


def test_adapters_are_those_of_peft(lora, tmp_path):
    """Merged into the base as W + B A alpha / r, they compute the same."""
    tensors = tensors_of(QWEN2, np.float32)
    load, save = lora.huggingface.load, lora.huggingface.save_adapters
    net, frozen = load(write(tmp_path, QWEN2, tensors), jnp.float32)
    names = ["q", "v", "o", "gate", "down"]
    adapters = lora.new_adapters(net, names, 3, jax.random.key(0))
    assert not any(adapters[f"{name}_b"].any() for name in names)
    normal = np.random.default_rng(0).normal
    adapters = {k: np.float32(normal(size=v.shape) / 8) for k, v in adapters.items()}

    save(tmp_path / "adapters", adapters, 12.0, "a base")
    config = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 12.0)
    assert config["base_model_name_or_path"] == "a base"
    targets = ["down_proj", "gate_proj", "o_proj", "q_proj", "v_proj"]
    assert config["target_modules"] == targets

    found = load_file(tmp_path / "adapters/adapter_model.safetensors")
    merged = dict(tensors)
    for name in tensors:
        place = "base_model.model." + name.removesuffix(".weight")
        if f"{place}.lora_A.weight" in found:
            a, b = (found.pop(f"{place}.lora_{letter}.weight") for letter in "AB")
            merged[name] = tensors[name] + b @ a * (12.0 / 3)
    assert not found
    tokens = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int32)
    params = lora.adapted(frozen, adapters, alpha=12.0)
    net = dataclasses.replace(net, dtype=jnp.float32)
    logits = jax.jit(lambda p, t: net.logits(p, net.features(p, t)))
    wanted = oracle(QWEN2, merged, tokens)
    # As without adapters in test_huggingface.py, with two more sums for each map.
    close = functools.partial(np.testing.assert_allclose, rtol=0)
    close(logits(params, tokens[None])[0], wanted, atol=4e-5 * abs(wanted).max())


@pytest.fixture
def training(lora, tmp_path):
    """Makes the example's training of the options, on a text of 21 characters."""
    config = LLAMA | {"vocab_size": 256, "max_position_embeddings": 64}
    write(tmp_path / "model", config, tensors_of(config, np.float32))
    (tmp_path / "text.txt").write_text("To be, or not to be. " * 100)
    paths = "--model", tmp_path / "model", "--data", tmp_path / "text.txt"

    def make(*words):
        words = map(str, [*paths, "--batch", 4, "--rank", 2, *words])
        options = lora.parser().parse_args(list(words))
        return lora.training(options.model, lora.data.read_text(options.data), options)

    return make


MAPS = ("q", "k", "v", "o", "gate", "up", "down")


@thorough
def test_adapters_learn_and_nothing_else_changes(lora, training):
    chosen = training("--steps", 30)
    state = lora.loop.fresh(chosen)
    assert set(state.params) == {f"{name}_{letter}" for name in MAPS for letter in "ab"}
    frozen, _ = next(chosen.batches(0))
    before = jax.tree.map(np.array, frozen)
    loss = chosen.loss(jaxact.Policy(4))
    step = lora.loop.training_step(loss, chosen.optimizer)
    losses = []
    for batch in chosen.batches(0):
        state, loss = step(state, batch)
        losses.append(float(loss))
    # The text is one sentence again and again.
    assert losses[-1] < 0.6 * losses[0]
    jax.tree.map(np.testing.assert_array_equal, frozen, before)
    later = [tokens for _, tokens in chosen.batches(28)]
    assert len(later) == 2 and (later[1] == batch[1]).all()


def test_nothing_is_stored_for_frozen_weights(lora, training, tmp_path):
    """Their gradients are not computed, so only what adapters multiply is stored."""
    (tmp_path / "model" / "model.safetensors").unlink()  # a dry run needs only shapes
    stored, hidden = [], []
    for maps in (("q", "v"), MAPS):
        chosen = training("--dry-run", "--adapt", *maps)
        state = jax.eval_shape(lambda chosen=chosen: lora.loop.fresh(chosen))
        frozen, tokens = next(chosen.batches(0))
        loss = chosen.loss(jaxact.Policy(4))
        table = jaxact.residuals(
            lambda *a, loss=loss: loss(*a)[0],
            *(state.params, (), (frozen, tokens)),
            argnums=0,
        )
        weights = {leaf.shape for leaf in jax.tree.leaves(frozen)}
        assert not [row for row in table.rows if row.shape in weights]
        assert table.referenced_bytes > 0
        stored.append(table.stored_bytes)
        shape = (2, *tokens[:, 1:].shape, 40)  # of both layers
        hidden.append(sum(row.shape == shape for row in table.rows))
    # SwiGLU needs one value for the slope of each factor, and its result for `down_a`.
    assert hidden == [2, 3]
    assert stored[0] < stored[1]


def test_a_short_text_is_refused(training, tmp_path):
    (tmp_path / "text.txt").write_text("To be. " * 88)
    with pytest.raises(ValueError, match="text has 616 tokens, 650 are required"):
        training()


def test_a_base_is_the_same_for_all_policies_and_taken_only_whole(
    lora, tmp_path, monkeypatch
):
    monkeypatch.setattr(lora.loop, "train", lambda a, b, state, *_: (state, []))
    monkeypatch.setattr(lora.jaxact, "compress", None)  # not called
    folder = tmp_path / "output" / "base"
    base = lambda *words: lora.pretrained(folder, lora.parser().parse_args(words))
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(lora.huggingface, "save_file", None)  # config.json is written
        base()
    assert not folder.exists()
    assert base() == base("--policy", "none") == base("--bits", "2") == folder
    with pytest.raises(ValueError, match="seed 0, base_steps 300; a base of seed 1, "):
        base("--seed", "1")
    (folder / "base.json").unlink()
    with pytest.raises(ValueError, match="base holds no base.json; a base of seed 0"):
        base()


@pytest.mark.parametrize(
    "words, message",
    [
        (("--rank", "0"), "argument --rank: 0: an integer from 1 on"),
        (("--base-steps", "0"), "argument --base-steps: 0: an integer from 1 on"),
        (("--data", __file__ + "c"), "No such file"),
    ],
)
def test_options_are_checked_before_a_base_is_trained(
    words, message, lora, monkeypatch, capsys
):
    monkeypatch.setattr(lora, "pretrained", None)
    monkeypatch.setattr("sys.argv", ["lora.py", *words])
    with pytest.raises(SystemExit) as ended:
        lora.main()
    assert message in f"{ended.value}{capsys.readouterr().err}"


def test_a_file_that_is_no_text_is_named(lora, monkeypatch, tmp_path):
    monkeypatch.setattr(lora, "pretrained", None)
    (tmp_path / "text").write_bytes(b"\xff")
    monkeypatch.setattr("sys.argv", ["lora.py", "--data", str(tmp_path / "text")])
    with pytest.raises(SystemExit, match="text: a file of text in UTF-8 is required"):
        lora.main()


@pytest.mark.slow
def test_without_a_model_one_is_trained_first(lora, tmp_path):
    (tmp_path / "text.txt").write_text("To be, or not to be. " * 100)
    small = "--batch", 2, "--steps", 2, "--base-steps", 1
    output = tmp_path / "output"
    text = run("lora.py", "--data", tmp_path / "text.txt", *small, "--output", output)
    assert "a small decoder learns Python's help, 1 steps" in text
    assert "LoRA on text, 2 steps of 2 x 128" in text
    plain, packed = rows(text)
    assert mib(packed[2]) * 4 < mib(plain[2])
    assert mib(packed[3]) * 2 < mib(plain[3])
    assert (output / "adapter_model.safetensors").exists()
    net, _ = lora.huggingface.shapes(output / "base")
    assert net == lora.BASE


def test_a_decoder_that_installs_as_a_package_is_written_for_lora(lora, tmp_path, load):
    pytest.importorskip("tokenizers")
    pretrained = load("pretrained")
    net = dataclasses.replace(lora.BASE, layers=2, vocabulary=5, tied=True)
    params = jax.tree.map(np.asarray, net.init(jax.random.key(0)))
    layers = [{k: v[i] for k, v in params["layers"].items()} for i in range(2)]
    tokenizer = pretrained.tokenizer_of(["a", "b", "c", "ab", "abc"], ["a b", "ab c"])
    folder = tmp_path / "decoder"
    pretrained.save(
        pretrained.Decoder(net, tokenizer, params["tokens"], layers, params["gain"]),
        folder,
    )
    _, found = lora.huggingface.load(folder, jnp.float32)
    assert_same_bits(found, params)
    assert lora.huggingface.encoder(folder, 5)("abcab").tolist() == [4, 3]
