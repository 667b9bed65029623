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
# # Fit a model that did not fit
#
# A language model, a memory budget, and the largest batch that fits into it: as it is,
# with `jax.checkpoint`, with jaxact, and with both. Every number comes from the
# compiler, before anything runs.
#
# ## GPU
#
# In Colab: *Runtime > Change runtime type > GPU*. Everything below also runs without
# one, on a smaller model.

# %%
import importlib.util

if importlib.util.find_spec("jaxact") is None:
    print("installing jaxact")
    # %pip install -q "jaxact[gpu,flax,plots]" optax

import jax

on_gpu = jax.default_backend() == "gpu"
print(f"JAX {jax.__version__} on {jax.devices()[0].device_kind}:", end=" ")
print("real sizes" if on_gpu else "no GPU, so toy sizes, and the CPU's memory")

# %%
import functools
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
# ## The model
#
# GPT-2, in short. In all steps below attention goes sample by sample and is
# recomputed in the backward pass, because nobody keeps its [length, length] scores. A
# scan over the layers compiles them once.


# %%
def init(key, layers, width, heads, length, vocabulary):
    """Parameters, those of the layers stacked."""
    keys = iter(jax.random.split(key, 6))
    normal = lambda *shape: 0.02 * jax.random.normal(next(keys), shape)
    return {
        "tokens": normal(vocabulary, width),
        "positions": normal(length, width),
        "layers": {
            "qkv": normal(layers, width, 3, heads, width // heads),
            "out": normal(layers, heads, width // heads, width),
            "up": normal(layers, width, 4 * width),
            "down": normal(layers, 4 * width, width),
            "gains": jnp.ones((layers, 2, width)),
        },
    }


def norm(x, gain=1.0):
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)
    return (y * gain).astype(x.dtype)


@jax.checkpoint
def attend(qkv):
    """Causal attention of one sample [length, heads, width of a head]."""
    q, k, v = qkv
    scores = jnp.einsum("qhw,khw->hqk", q, k) * q.shape[-1] ** -0.5
    hidden = jnp.triu(jnp.full(scores.shape[-2:], -jnp.inf, scores.dtype), 1)
    return jnp.einsum("hqk,khw->qhw", jax.nn.softmax(scores + hidden), v)


def block(p, x):
    """One layer [batch, length, width]."""
    p = jax.tree.map(lambda w: w.astype(x.dtype), p)
    q, k, v = jnp.einsum("btd,dchw->cbthw", norm(x, p["gains"][0]), p["qkv"])
    mixed = lax.map(attend, (q, k, v))
    x = x + jnp.einsum("bthw,hwd->btd", mixed, p["out"])
    return x + jax.nn.gelu(norm(x, p["gains"][1]) @ p["up"]) @ p["down"]


def loss(block, dtype, params, text):
    """Mean cross-entropy of characters [batch, length + 1] but the first."""
    x = (params["tokens"][text[:, :-1]] + params["positions"]).astype(dtype)
    x, _ = lax.scan(lambda x, p: (block(p, x), None), x, params["layers"])
    logits = norm(x.astype(jnp.float32)) @ params["tokens"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
    return losses.mean()


optimizer = optax.adam(1e-3)


def step_of(block, dtype):
    def step(state, text):
        params, moments = state
        gradient_of = jax.value_and_grad(functools.partial(loss, block, dtype))
        value, gradient = gradient_of(params, text)
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(params, updates), moments), value

    return jax.jit(step, donate_argnums=0)


# %% [markdown]
# ## The residuals, and how to keep fewer bytes
#
# - `jax.checkpoint` keeps the input of a block and computes the block twice.
# - With the policy `dots_with_no_batch_dims_saveable` it keeps the products with
#   parameters and computes the rest twice.
# - jaxact keeps all residuals, in few bits.
# - Both together: the input of a block in 4 bits, and while a block is computed again,
#   its residuals in 4 bits too.

# %%
saveable = jax.checkpoint_policies
pack = functools.partial(jaxact.compress, activations="x")
# Values that others are computed from again get 8 bits, unless a rule says otherwise.
inputs_in_4_bits = jaxact.Rule(jaxact.Quantize(4), recomputed_from=True)
ways = {
    "uncompressed": block,
    "checkpoint, dots saveable": jax.checkpoint(
        block, policy=saveable.dots_with_no_batch_dims_saveable
    ),
    "checkpoint": jax.checkpoint(block),
    "jaxact, 4 bits": pack(block),
    "jaxact, 2 bits": pack(block, policy=jaxact.Policy(bits=2)),
    "jaxact, 4 bits + checkpoint": pack(
        jax.checkpoint(pack(block)), policy=jaxact.Policy(rules=(inputs_in_4_bits,))
    ),
}

text = "\n".join(topics[name] for name in sorted(topics))  # Python's own help
alphabet, characters = np.unique(list(text), return_inverse=True)
layers, width, heads, length = (12, 768, 12, 1024) if on_gpu else (16, 64, 4, 32)
dtype = jnp.bfloat16 if on_gpu else jnp.float32


def start(layers, width, heads, length):
    """Parameters and optimizer state."""
    params = init(jax.random.key(0), layers, width, heads, length, len(alphabet))
    return params, optimizer.init(params)


def batch_of(batch, length):
    return jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)


state = start(layers, width, heads, length)

# %% [markdown]
# The residual table of jaxact at 4 bits. Residuals outside the compressed block, such
# as the logits, stay exact.

# %%
packed_loss = functools.partial(loss, ways["jaxact, 4 bits"], dtype)
jaxact.residuals(packed_loss, state[0], batch_of(16, length), argnums=0)

# %% [markdown]
# The steps side by side. Is anything computed twice? The column `products` counts the
# matrix products. (In every row the attention is recomputed.)

# %%
steps = {name: step_of(way, dtype) for name, way in ways.items()}
compared = jaxact.compare(steps, state, batch_of(16, length))
display(compared)

# %% [markdown]
# ## The largest batch
#
# The budget is nine tenths of the GPU's memory; without a GPU, 32 MiB. `max_batch`
# compiles up to five steps for each way: the batch fits, and the next one does not.

# %%
mib = 2**20
device = jax.devices()[0]
budget = int(0.9 * device.memory_stats()["bytes_limit"]) if on_gpu else 32 * mib
largest = {}
for name, step in steps.items():
    step_of_batch = lambda n, step=step: (step, (state, batch_of(n, length)))
    found = jaxact.max_batch(step_of_batch, budget=budget, reserve=0)
    (largest[name],) = found.rows

# %%
figure, axis = plt.subplots(figsize=(7, 2.8), layout="constrained")
bars = axis.barh(list(largest), [row.batch for row in largest.values()])
axis.bar_label(bars, padding=3)
axis.invert_yaxis()
axis.margins(x=0.1)
axis.set_xlabel("largest batch in the budget")
plt.show()
for name, row in largest.items():
    print(f"{name:28}{row.batch:4} samples in {row.bytes / mib:,.1f} MiB")

# %% [markdown]
# ## Or name the budget
#
# `plan` finds the policy for the batch that you want. It chooses for every residual:
# exact, in a format and width, or computed again; the compiled step is within the
# budget. Here for the largest batch at 4 bits, in three quarters of the budget.

# %%
batch = largest["jaxact, 4 bits"].batch
arguments = state, batch_of(batch, length)
plan = jaxact.plan(
    steps["jaxact, 4 bits"], *arguments, budget=budget * 3 // 4, of="device"
)
display(plan)

# %% [markdown]
# ## Train at that batch

# %%
way = "jaxact, 4 bits"
rng = np.random.default_rng(0)
losses = []
for _ in range(15):
    starts = rng.integers(len(characters) - length, size=(batch, 1))
    sentences = characters[starts + np.arange(length + 1)].astype(np.int32)
    state, value = steps[way](state, sentences)
    losses.append(float(value))

figure, axis = plt.subplots(figsize=(7, 2.5))
axis.plot(losses)
axis.set(xlabel="step", ylabel="nats a character", title=f"{way}, batch {batch}")
plt.show()
if on_gpu:
    in_use = device.memory_stats()["peak_bytes_in_use"]
    print(f"at most {in_use / mib:,.0f} MiB in use, {budget / mib:,.0f} in the budget")

# %% [markdown]
# ## A GPU that you do not have
#
# With the extra `jaxact[targets]` (Linux) the same numbers come for another GPU. Here
# with the layers of GPT-2 medium and batch 16, in bfloat16; compiling takes a minute.

# %% tags=["parameters"]
target = "h100"  # or "t4", "l4", "RTX 4090", "a100", ...; None: the device at hand

# %%
chosen = "uncompressed", "checkpoint", "jaxact, 2 bits", "jaxact, 4 bits + checkpoint"
if target is not None:
    try:
        jaxact.memory(jnp.sin, jnp.ones(1), target=target)
    except ImportError as error:
        print(error)
        target = None

if target is None:
    print(f"\nthe model above at batch 16, on {device.device_kind}")
    there = jaxact.Comparison(tuple(compared[name] for name in chosen))
else:
    print(f"the layers of GPT-2 medium, batch 16, on {target}")
    medium = jax.eval_shape(lambda: start(24, 1024, 16, 1024))
    steps = {name: step_of(ways[name], jnp.bfloat16) for name in chosen}
    there = jaxact.compare(steps, medium, batch_of(16, 1024), target=target)
display(there)

# %% [markdown]
# ## Which one?
#
# - The step fits anyway: none of them.
# - No matrix product should be computed twice: jaxact. It takes far less memory than
#   the policy that keeps the products with parameters.
# - Memory is all that matters: both together.
#
# Rounding adds noise to the gradients; `which_bits.ipynb` measures how much.
