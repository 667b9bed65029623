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
# # jaxact in ten minutes
#
# Most of the memory of a training step is neither parameters nor optimizer state. It is
# the *residuals*: arrays kept from the forward to the backward pass. jaxact keeps them
# in a few bits per value. Outputs, parameters, optimizer and checkpoints stay as they
# are.
#
# ## GPU
#
# In Colab: *Runtime > Change runtime type > GPU*. Everything below also runs without
# one, on a smaller network.

# %%
import importlib.util

if importlib.util.find_spec("jaxact") is None:
    print("installing jaxact")
    # %pip install -q "jaxact[gpu,flax,plots]" optax scikit-learn

import jax

on_gpu = jax.default_backend() == "gpu"
print(f"JAX {jax.__version__} on {jax.devices()[0].device_kind}:", end=" ")
print("real sizes" if on_gpu else "no GPU, so toy sizes, and the CPU's memory")

# %%
import itertools
import statistics
import time
from collections import Counter

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits

import jaxact

plt.rcParams["figure.dpi"] = 72

# %% [markdown]
# ## A function
#
# `jax.grad` of this layer needs its input `x` and the slope of the GELU at every value.
# `jaxact.compress` stores both in 4 bits per value, or in as many as you say. The
# arguments that are activations are named; all others are parameters, which exist
# anyway and are read in place.

# %%
x = jax.random.normal(jax.random.key(0), (256, 512))
w = jax.random.normal(jax.random.key(1), (512, 512)) / 512**0.5


def layer(w, x):
    return nn.gelu(x @ w)


packed = jaxact.compress(layer, activations="x", policy=jaxact.Policy(bits=4))
jaxact.residuals(packed, w, x)

# %% [markdown]
# The output is the same to the last bit. Only gradients know: each stored value is
# rounded up or down at random, so that it is right on average. One gradient is noisy,
# as that of a small batch is; the mean of many is not.

# %%
loss = lambda f, w, **key: (f(w, x, **key) ** 2).sum()
exact = jax.grad(lambda w: loss(layer, w))(w)


@jax.vmap
def draw(key):
    return jax.grad(lambda w: loss(packed, w, rounding_key=key))(w)


def distance(gradient):
    return float(jnp.linalg.norm(gradient - exact) / jnp.linalg.norm(exact))


drawn = draw(jax.random.split(jax.random.key(2), 64))
print("same output:", bool((packed(w, x) == layer(w, x)).all()))
print(f"one gradient is off by {distance(drawn[0]):.1%} of its norm")
print(f"the mean of 64 by {distance(drawn.mean(0)):.1%}")

# %% [markdown]
# ## A Linen module
#
# Decorate the class with `@jaxact.compress`, or make a second class, as here. The
# parameters are the same, and so are their names. Compress the repeated unit: here the
# block of a network.


# %%
class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        h = nn.Dense(4 * width)(nn.LayerNorm()(x))
        return x + nn.Dense(width)(nn.gelu(h))


class Net(nn.Module):
    """Classes of images [batch, pixels]."""

    block: type[nn.Module] = Block
    width: int = 1024 if on_gpu else 128
    depth: int = 12 if on_gpu else 6

    @nn.compact
    def __call__(self, images):
        x = nn.Dense(self.width)(images)
        for i in range(self.depth):
            x = self.block(name=f"block{i}")(x)
        return nn.Dense(10)(x)


digits = load_digits()
batch = 4096 if on_gpu else 512
images, labels = jnp.ones((batch, 64)), jnp.zeros(batch, jnp.int32)


def loss_of(net):
    def loss(params, images, labels):
        logits = net.apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return loss


plain = Net()
packed = Net(jaxact.compress(Block))
params = plain.init(jax.random.key(0), images)

# %% [markdown]
# The residuals of each block:

# %%
mib = 2**20
tables = {
    name: jaxact.residuals(loss_of(net), params, images, labels, argnums=0)
    for name, net in {"uncompressed": plain, "jaxact, 4 bits": packed}.items()
}
figure, axis = plt.subplots(figsize=(7, 3))
for name, table in tables.items():
    stored = Counter()
    for row in table.rows:
        if row.path.startswith("Net/block"):
            stored[row.path.split("/")[1]] += row.stored_bytes / mib
    axis.bar(stored.keys(), stored.values(), label=name)
axis.set_ylabel("MiB kept for backward")
axis.legend(loc="center")
plt.show()

plain_bytes, packed_bytes = (table.stored_bytes for table in tables.values())
print(f"in all {plain_bytes / mib:.1f} and {packed_bytes / mib:.1f} MiB:", end=" ")
print(f"{plain_bytes / packed_bytes:.1f} times less")

# %% [markdown]
# And how: `exact` is bytes before, `stored` bytes after compressing. `text(full=True)`
# has every row, with its source line and its bias: *unbiased* means that rounding
# adds noise to the gradients and nothing else.

# %%
one = Net(jaxact.compress(Block), depth=1)
jaxact.residuals(loss_of(one), params, images, labels, argnums=0)

# %% [markdown]
# ## An NNX module
#
# A class, or an instance, whose state is then shared.


# %%
class NnxBlock(nnx.Module):
    def __init__(self, width, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


block = NnxBlock(512, nnx.Rngs(0))
small = jaxact.compress(block, policy=jaxact.Policy(bits=2))
loss = lambda block, x: block(x).sum()
print(jaxact.residuals(loss, small, x, argnums=0).summary())

# %% [markdown]
# ## The memory of the compiled step
#
# The sums above are of arrays. The memory of the compiled step decides, so ask the
# compiler; nothing runs. `temp` is the temporary memory of the step, `products` are the
# matrix products that it computes. `jax.checkpoint` (in Linen `nn.remat`) keeps only
# the input of each block and computes the block again in the backward pass. jaxact
# computes no matrix product twice. (On a CPU take JAX 0.11 or later: 0.10 drops the
# barriers that make the saving real.)

# %%
optimizer = optax.adam(1e-3)


def step_of(net):
    loss_fn = loss_of(net)

    def step(state, images, labels):
        params, moments = state
        loss, gradient = jax.value_and_grad(loss_fn)(params, images, labels)
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(params, updates), moments), loss

    return jax.jit(step, donate_argnums=0)


two_bits = jaxact.Policy(bits=2)
steps = {
    "uncompressed": step_of(plain),
    "jax.checkpoint": step_of(Net(nn.remat(Block))),
    "jaxact, 4 bits": step_of(packed),
    "jaxact, 2 bits": step_of(Net(jaxact.compress(Block, policy=two_bits))),
}
state = params, optimizer.init(params)
jaxact.compare(steps, state, images, labels)

# %% [markdown]
# ## Training, with and without, side by side
#
# The same start and the same batches, of scikit-learn's handwritten digits.


# %%
def batches(num_steps):
    rng = np.random.default_rng(0)
    for _ in range(num_steps):
        chosen = rng.integers(len(digits.images), size=batch)
        yield digits.data[chosen].astype(np.float32) / 16, digits.target[chosen]


names = "uncompressed", "jaxact, 4 bits"
copy = lambda state: jax.tree.map(jnp.copy, state)  # a step overwrites its state
states = {name: copy(state) for name in names}
losses = {name: [] for name in names}
seconds = {name: [] for name in names}
for data, name in itertools.product(batches(60), names):
    start = time.perf_counter()
    states[name], loss = steps[name](states[name], *data)
    losses[name].append(float(loss))
    seconds[name].append(time.perf_counter() - start)

figure, axis = plt.subplots(figsize=(7, 3))
for name, style in zip(names, ("-", "--"), strict=True):
    axis.semilogy(losses[name], style, label=name)
axis.set(xlabel="step", ylabel="loss")
axis.legend()
plt.show()

for name in names:
    print(f"{name:15} loss {losses[name][0]:.3f} -> {losses[name][-1]:.3f}")
first, second = (statistics.median(seconds[name]) for name in names)
print(f"a step takes {second / first:.2f} times as long (median of 60, in turns)")

# %% [markdown]
# ## Where to go from here
#
# - `fit_a_model_that_did_not_fit.ipynb`: the largest batch, against `jax.checkpoint`,
#   and the memory of a GPU that you do not have.
# - `which_bits.ipynb`: measure which residuals need more bits, and give them more.
# - When a step fits with room to spare, do not compress: it only adds work.
