"""The decoder and its checkpoints, against NumPy in float64 and files by hand."""

import dataclasses
import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from support.checkpoints import (
    CONFIGS,
    LLAMA,
    MISTRAL,
    QWEN2,
    oracle,
    tensors_of,
    write,
)
from support.variants import thorough

load_file = pytest.importorskip("safetensors.numpy").load_file
pytestmark = [pytest.mark.unoptimized, thorough]
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def huggingface(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("huggingface")


@pytest.fixture
def network(huggingface):
    return huggingface.network


TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 10]], np.int32)


def logits(net, params):
    net = dataclasses.replace(net, dtype=jnp.float32)
    return jax.jit(lambda p, t: net.logits(p, net.features(p, t)))(params, TOKENS)


def assert_close(found, wanted):
    """Float32 rounds by 2^-24. A logit is the end of a chain of about 20 sums of up to
    40 terms (in two layers: five maps, attention's two, two norms), whose errors mostly
    cancel: 2^-24 * 20 * sqrt(40) = 8e-6 of the largest, and twice that allowed."""
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * abs(wanted).max())


CASES = [*((kind, np.float32, 1) for kind in CONFIGS), ("llama", ml_dtypes.bfloat16, 3)]


@pytest.mark.parametrize("kind, dtype, shards", CASES)
def test_logits_of_a_checkpoint(huggingface, kind, dtype, shards, tmp_path):
    config = CONFIGS[kind]
    tensors = tensors_of(config, dtype)
    net, params = huggingface.load(
        write(tmp_path, config, tensors, shards), jnp.float32
    )
    wanted = np.stack([oracle(config, tensors, tokens) for tokens in TOKENS])
    assert_close(logits(net, params), wanted)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_network_is_saved_as_it_was_loaded(huggingface, kind, tmp_path):
    config = CONFIGS[kind]
    tensors = tensors_of(config, np.float16)
    loaded = huggingface.load(write(tmp_path / "a", config, tensors), jnp.float16)
    huggingface.save(tmp_path / "b", *loaded)
    again = load_file(tmp_path / "b" / "model.safetensors")
    assert set(again) == set(tensors)
    assert all(again[n].dtype == np.float16 for n in tensors)
    assert all((again[n] == tensors[n]).all() for n in tensors)
    assert huggingface.shapes(tmp_path / "b")[0] == loaded[0]


def test_shapes_are_those_that_load_gives(huggingface, tmp_path):
    folder = write(tmp_path, MISTRAL, tensors_of(MISTRAL, np.float32))
    net, params = huggingface.load(folder)
    shape_of = lambda x: (x.shape, x.dtype)
    found = huggingface.shapes(folder)
    assert found[0] == net
    assert jax.tree.map(shape_of, found[1]) == jax.tree.map(shape_of, params)


def spoiled(name):
    """A checkpoint's config and tensors with one thing wrong."""
    config, tensors = dict(LLAMA), tensors_of(LLAMA, np.float32)
    match name:
        case "missing":
            del tensors["model.layers.1.mlp.up_proj.weight"]
        case "unused":
            tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(6, np.float32)
        case "shape":
            config["vocab_size"] = 12
        case "dtype":
            tensors["model.norm.weight"] = np.ones(24, np.int8)
        case "tied":
            config["tie_word_embeddings"] = True
        case "layers":
            config["num_hidden_layers"] = 1
    return config, tensors


@pytest.mark.parametrize(
    "name, message",
    [
        ("missing", "lacks model.layers.1.mlp.up_proj.weight"),
        ("unused", "no use for model.layers.0.self_attn.q_norm.weight"),
        ("shape", r"lm_head.weight is F32 \[11, 24\].* \[12, 24\] is required"),
        ("dtype", r"model.norm.weight is I8 \[24\]"),
        ("tied", "lm_head.weight differs from the embedding"),
        ("layers", r"no use for model.layers.1.input_layernorm.weight.*, \.\.\."),
    ],
)
def test_a_checkpoint_of_another_network_is_refused(
    huggingface, name, message, tmp_path
):
    with pytest.raises(ValueError, match=message):
        huggingface.load(write(tmp_path, *spoiled(name)))


def test_a_second_copy_of_a_tied_head_and_rotary_speeds_are_allowed(
    huggingface, tmp_path
):
    tensors = tensors_of(QWEN2, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    _, params = huggingface.load(write(tmp_path, QWEN2, tensors))
    assert "head" not in params


def test_missing_files_are_named(huggingface, tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        huggingface.load(tmp_path)
    write(tmp_path, LLAMA, tensors_of(LLAMA, np.float32), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks model-00002-of-00003.safetensors"):
        huggingface.load(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"lacks model\.safetensors\. A model"):
        huggingface.load(tmp_path)


@pytest.mark.parametrize(
    "field, value",
    [
        ("model_type", "gemma2"),
        ("model_type", None),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        ("rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ("hidden_act", "gelu"),
        ("attention_dropout", 0.1),
        ("partial_rotary_factor", 0.5),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(network, field, value):
    named = "rotary positions" if field.startswith("rope") else field
    with pytest.raises(ValueError, match=f"config.json .*{named}"):
        network(LLAMA | {field: value})


def test_a_config_without_its_sizes_is_refused(network):
    with pytest.raises(ValueError, match="lacks hidden_size, intermediate_size"):
        network({"model_type": "llama"})


def test_a_sliding_window_limits_the_length(network):
    """Attention over at most a window of tokens is causal attention."""
    window = {"sliding_window": 4}
    unset = {k: v for k, v in MISTRAL.items() if k != "sliding_window"}
    assert network(MISTRAL).length == 9
    assert network(MISTRAL | window).length == 4
    assert network(unset | {"max_position_embeddings": 9000}).length == 4096
    assert network(QWEN2).length == 9
    assert network(QWEN2 | {"use_sliding_window": True}).length == 4
    types = ["full_attention", "sliding_attention"]
    assert network(QWEN2 | {"layer_types": types}).length == 4
    net = network(MISTRAL | window)
    with pytest.raises(ValueError, match="8 tokens.*at most 4"):
        jax.eval_shape(net.features, net.shapes, TOKENS)


def test_tokens(huggingface, tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    with pytest.raises(ValueError, match="has no tokenizer.json"):
        huggingface.encoder(tmp_path, vocabulary=255)
    encode = huggingface.encoder(tmp_path, vocabulary=256)
    assert "bytes of UTF-8" in capsys.readouterr().out
    assert encode("a é").tolist() == [97, 32, 0xC3, 0xA9]
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(ValueError, match="no tokenizer.json, but tokenizer.model"):
        huggingface.encoder(tmp_path, vocabulary=300)
    words = tokenizers.models.WordLevel({"to": 0, "be": 1, "?": 7}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encode = huggingface.encoder(tmp_path, vocabulary=8)
    assert encode("to be or").tolist() == [0, 1, 7]
    assert encode("").shape == (0,)
    with pytest.raises(ValueError, match="gives token 7.*ends at 6"):
        huggingface.encoder(tmp_path, vocabulary=7)("or")
