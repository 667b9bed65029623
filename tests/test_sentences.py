"""The sentence encoder: BERT's arithmetic, Hugging Face's names, a training."""

import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf, softmax

from support.variants import thorough
from test_examples import mib, rows, run

for package in ("flax", "optax", "orbax.checkpoint", "rich", "safetensors"):
    pytest.importorskip(package)
pytestmark = pytest.mark.unoptimized
EXAMPLES = Path(__file__).parent.parent / "examples"
CONFIG = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "num_hidden_layers": 2,
    "hidden_size": 12,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "vocab_size": 30,
    "max_position_embeddings": 16,
}


@pytest.fixture
def bert(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield importlib.import_module("models.bert")


def tensors():
    """A checkpoint of normal noise: a map is [outputs, inputs] there."""
    draw = np.random.default_rng(0).normal
    width, hidden = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    qkv = [f"attention.self.{name}" for name in ("query", "key", "value")]
    shapes = {
        "embeddings.word_embeddings.weight": (CONFIG["vocab_size"], width),
        "embeddings.position_embeddings.weight": (16, width),
        "embeddings.token_type_embeddings.weight": (2, width),
    }
    norms = ["embeddings.LayerNorm"]
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        maps = {
            **dict.fromkeys([*qkv, "attention.output.dense"], (width, width)),
            "intermediate.dense": (hidden, width),
            "output.dense": (width, hidden),
        }
        for name, shape in maps.items():
            shapes |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[:1]}
        norms += [f"{layer}attention.output.LayerNorm", f"{layer}output.LayerNorm"]
    for name in norms:
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    return {name: np.float32(draw(size=shape)) for name, shape in shapes.items()}


def oracle(t, tokens):
    """One sentence's vector, in NumPy and float64 (Devlin et al. 2018)."""
    t = {name: np.float64(x) for name, x in t.items()}

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-12)
        return x * t[f"{name}.weight"] + t[f"{name}.bias"]

    dense = lambda x, name: x @ t[f"{name}.weight"].T + t[f"{name}.bias"]
    gelu = lambda x: x * (1 + erf(x / 2**0.5)) / 2
    x = t["embeddings.word_embeddings.weight"][tokens]
    x = x + t["embeddings.position_embeddings.weight"][: len(tokens)]
    x = norm(
        x + t["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm"
    )
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        q, k, v = (
            dense(x, f"{layer}attention.self.{n}") for n in ("query", "key", "value")
        )
        heads = [slice(4 * h, 4 * h + 4) for h in range(3)]
        mixed = [softmax(q[:, h] @ k[:, h].T / 2, axis=-1) @ v[:, h] for h in heads]
        mixed = dense(np.concatenate(mixed, -1), f"{layer}attention.output.dense")
        x = norm(x + mixed, f"{layer}attention.output.LayerNorm")
        hidden = gelu(dense(x, f"{layer}intermediate.dense"))
        x = norm(x + dense(hidden, f"{layer}output.dense"), f"{layer}output.LayerNorm")
    return x.mean(0)


def test_vectors_are_those_of_bert(bert):
    found = tensors()
    net, params = bert.from_tensors(CONFIG, found)
    tokens = np.array([[3, 7, 29, 0, 5], [4, 4, 11, 0, 0]])
    is_token = np.array([[True] * 5, [True] * 3 + [False] * 2])
    vectors = net.embed(params, jnp.asarray(tokens), jnp.asarray(is_token))
    want = [oracle(found, tokens[0]), oracle(found, tokens[1, :3])]
    # Some 200 sums of at most 20 terms in float32, and norms that keep their size.
    np.testing.assert_allclose(vectors, want, atol=2e-5, rtol=2e-4)
    made = jax.eval_shape(net.init, jax.random.key(0))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, made)


def test_another_network_is_named(bert):
    with pytest.raises(ValueError, match="a roberta with gelu; a bert with gelu is"):
        bert.from_tensors(CONFIG | {"model_type": "roberta"}, {})


@thorough
def test_training():
    text = run("sentences.py", "--steps", "3", "--bits", "2")
    assert "test accuracy" in text
    plain, packed = rows(text)[-2:]
    assert mib(packed[2]) * 6 <= mib(plain[2])


def test_no_paragraph_is_learned_and_asked_for(load):
    sentences = load("sentences")
    found = sentences.paragraphs(lambda text: list(text.encode()), length=16)
    held_out = np.arange(len(found.topics)) % sentences.HELD_OUT == 0
    learned = {row.tobytes() for row in found.tokens[~held_out]}
    assert not [row for row in found.tokens[held_out] if row.tobytes() in learned]


def test_a_batch_with_more_paragraphs_than_there_are(load):
    options = load("loop").parser("").parse_args(["--batch", "9999"])
    with pytest.raises(ValueError, match="9999 paragraphs: [0-9]+ are there to learn"):
        load("sentences").training(options)
