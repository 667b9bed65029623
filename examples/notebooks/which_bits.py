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
# # Which bits?
#
# Rounding the residuals adds noise to the gradients, and some residuals
# add far more of it than others. Measure that, and spend the bits where they count.
#
# ## GPU
#
# In Colab: *Runtime > Change runtime type > GPU*. Everything below also runs without
# one, on a smaller network.

# %%
import importlib.util

if importlib.util.find_spec("jaxact") is None:
    print("installing jaxact")
    # %pip install -q "jaxact[gpu,flax,plots]" optax

import jax

on_gpu = jax.default_backend() == "gpu"
print(f"JAX {jax.__version__} on {jax.devices()[0].device_kind}:", end=" ")
print("real sizes" if on_gpu else "no GPU, so toy sizes")

# %%
from pydoc_data.topics import topics

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib import pyplot as plt

import jaxact

plt.rcParams["figure.dpi"] = 72

# %% [markdown]
# ## A small language model
#
# Two transformer blocks that read Python's own help, character by character.

# %%
width, heads, length, batch = (512, 8, 256, 64) if on_gpu else (64, 4, 64, 8)
text = "\n".join(topics[name] for name in sorted(topics))
alphabet, characters = np.unique(list(text), return_inverse=True)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(x[..., 0])
        attention = nn.MultiHeadDotProductAttention(heads, name="attention")
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        h = nn.gelu(nn.Dense(4 * width, name="up")(nn.LayerNorm()(x)))
        return x + nn.Dense(width, name="down")(h)


class Net(nn.Module):
    """Logits [batch, length, characters] of the next character."""

    block: type[nn.Module] = Block

    @nn.compact
    def __call__(self, text):
        positions = nn.Embed(length, width)(jnp.arange(length))
        x = nn.Embed(len(alphabet), width)(text) + positions
        for i in range(2):
            x = self.block(name=f"block{i}")(x)
        return nn.Dense(len(alphabet))(nn.LayerNorm()(x))


def loss_of(block):
    """The loss of a network of such blocks; `key` is for the rounding."""
    net = Net(block)

    def loss(params, text, key):
        logits = net.apply(params, text[:, :-1], rngs={"jaxact": key})
        targets = text[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    return loss


def gradient_with(policy):
    """The compiled loss and gradient with such a policy."""
    return jax.jit(jax.value_and_grad(loss_of(jaxact.compress(Block, policy=policy))))


def batches(num_steps, seed):
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        starts = rng.integers(len(characters) - length, size=(batch, 1))
        yield characters[starts + np.arange(length + 1)].astype(np.int32)


optimizer = optax.adam(3e-3)


@jax.jit
def update(params, moments, gradient):
    updates, moments = optimizer.update(gradient, moments)
    return optax.apply_updates(params, updates), moments


def train(gradient_of, params, num_steps, seed):
    """The parameters after so many steps, and the losses."""
    moments, losses = optimizer.init(params), []
    for step, sample in enumerate(batches(num_steps, seed)):
        loss, gradient = gradient_of(params, sample, jax.random.key(step))
        params, moments = update(params, moments, gradient)
        losses.append(float(loss))
    return params, losses


# %% [markdown]
# The cost of a residual changes with training, so first train for 50 steps.

# %%
exact = jax.jit(jax.value_and_grad(loss_of(Block)))
sample = next(batches(1, seed=99))
key = jax.random.key(0)
params = Net().init(key, sample[:, :-1])
params, losses = train(exact, params, 50, seed=0)
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} nats a character")

# %% [markdown]
# ## Measure
#
# `jaxact.sensitivity` rounds one residual at a time and compares the whole gradient
# with the exact one. The error is a variance: the expected squared norm of the
# added noise. `relative` is that over the squared norm of the gradient. A residual's
# key is its module path and its primitive: `exp` are the numerators of the softmax,
# a `derivative` is a slope, here the GELU's.

# %%
packed_loss = loss_of(jaxact.compress(Block))  # 4 bits
measured = jaxact.sensitivity(packed_loss, params, sample, key)
print(measured)

# %%
labels = [row.key.removeprefix("Net/") for row in measured.rows]
figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
axis.barh(labels, [row.error(4) / measured.signal for row in measured.rows])
axis.set_xscale("log")
axis.invert_yaxis()
axis.set_xlabel("variance that 4 bits add, relative to the squared gradient")
plt.show()

# %% [markdown]
# ## Allocate
#
# One bit more divides a residual's error by four or more, and costs as many bits as the
# residual has elements. `allocate` takes the steps that pay most: until an average is
# used up, or the fewest bits that keep the added variance below a bound `e2`.

# %%
two = jaxact.allocate(measured, bits=2)
bound = jaxact.allocate(measured, e2=0.02)
for name, chosen in {"bits=2": two, "e2=0.02": bound}.items():
    error = f"adds {chosen.relative_error:.3f} of the squared gradient"
    print(f"{name:8} {chosen.average_bits:.2f} bits on average, {error}")

# %%
figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
places = np.arange(len(labels))
two_bits, bound_bits = ([b for _, b in a.bits] for a in (two, bound))
axis.barh(places - 0.2, two_bits, 0.4, label="bits=2")
axis.barh(places + 0.2, bound_bits, 0.4, label="e2=0.02")
axis.set_yticks(places, labels)
axis.invert_yaxis()
axis.set_xlabel("bits")
axis.legend()
plt.show()

# %% [markdown]
# The result is a policy: one rule for each residual, to print, compare or extend.

# %%
for rule in two.policy().rules[:4]:
    print(rule.key, rule.action)

# %% [markdown]
# ## Does it keep its word?
#
# The lines are predicted from the measurement above, made at 4 bits. The dots are
# measured anew: the gradient with all residuals rounded at once, 16 times with other
# noise, against the exact gradient.

# %%
keys = [row.key for row in measured.rows]
_, reference = exact(params, sample, key)
squared = lambda tree: sum(float((x * x).sum()) for x in jax.tree.leaves(tree))


def variance_of(gradient_of):
    """Added variance over the squared gradient: mean and standard error."""
    found = []
    for draw in range(16):
        _, rounded = gradient_of(params, sample, jax.random.key(draw))
        error = jax.tree.map(jnp.subtract, rounded, reference)
        found.append(squared(error) / squared(reference))
    return np.mean(found), np.std(found) / 4


def uniform(bits):
    return jaxact.Policy(default=jaxact.Quantize(bits))


def allocated(bits):
    return jaxact.allocate(measured, bits=bits).policy()


gradients = {
    ("uniform", 2): gradient_with(uniform(2)),
    ("allocated", 1.5): gradient_with(allocated(1.5)),
    ("allocated", 2): gradient_with(allocated(2)),
    ("allocated", 3): gradient_with(allocated(3)),
}
variances = {name: variance_of(f) for name, f in gradients.items()}
predicted = {
    "uniform": {
        b: measured.error(dict.fromkeys(keys, b)) / measured.signal for b in range(1, 7)
    },
    "allocated": {
        b: jaxact.allocate(measured, bits=b).relative_error
        for b in np.arange(1, 6.01, 0.25)
    },
}

# %%
figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
for color, (kind, line) in zip(("C0", "C1"), predicted.items(), strict=True):
    axis.semilogy(line.keys(), line.values(), color, label=f"{kind}, predicted")
    dots = {b: found for (k, b), found in variances.items() if k == kind}
    means, errors = zip(*dots.values(), strict=True)
    axis.errorbar(
        list(dots), means, errors, fmt="o", color=color, label=f"{kind}, measured"
    )
axis.set(xlabel="bits on average", ylabel="added variance / squared gradient")
axis.legend()
plt.show()
for (kind, bits), (mean, error) in variances.items():
    line = predicted[kind][bits]
    print(f"{kind:10}{bits:4} bits: predicted {line:.4f}, {mean:.4f} ± {error:.4f}")

# %% [markdown]
# The prediction adds up each residual's error alone. With few bits that is too low:
# the noise of one is multiplied by that of the next, and at 1.5 bits on average many
# have only one. So measure again at the bits you choose.

# %% [markdown]
# ## Train with it

# %%
runs = {
    "uncompressed": exact,
    "2 bits, uniform": gradients["uniform", 2],
    "2 bits, allocated": gradients["allocated", 2],
}
figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
window = 10
for name, gradient_of in runs.items():
    trained, losses = train(gradient_of, params, 100, seed=1)
    axis.plot(np.convolve(losses, np.ones(window) / window, "valid"), label=name)
    print(f"{name:18} {np.mean(losses[-50:]):.3f} nats in the last 50 steps")
axis.set(xlabel="step", ylabel=f"loss, mean of {window} steps")
axis.legend()
plt.show()

# %% [markdown]
# That is one seed of a short run: it shows that all three train, not which is best.

# %% [markdown]
# ## While training
#
# The cost of a residual changes. `jaxact.telemetry` measures inside the step itself,
# without a further pass: the noise that each residual adds to the gradients of its own
# layer comes back as the derivative of one more argument.

# %%
gauge = jaxact.telemetry(packed_loss)
probe = gauge.probe(params, sample, key)
gradient_and_noise = jax.jit(jax.grad(gauge, argnums=(0, 1)))
before, _ = gradient_and_noise(probe, params, sample, key)
after, _ = gradient_and_noise(probe, trained, sample, key)

figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
for name, noise in {"after 50 steps": before, "after 150 steps": after}.items():
    axis.semilogx([noise.relative[k] for k in keys], labels, "o", label=name)
axis.invert_yaxis()
axis.set_xlabel("variance that 4 bits add / squared gradient of the layer")
axis.legend()
plt.show()

# %% [markdown]
# `follow` brings the first measurement up to date with it. A change of bits compiles
# the step anew, so `reallocate` makes it only where it pays: by default for a quarter
# less error.

# %%
now = after.follow(before, measured)
fresh = jaxact.allocate(now, bits=2)
changes = two.changes(fresh) or ["the same bits"]
print("an allocation of today:", *changes, sep="\n  ")
for name, chosen in {"as it is": two, "of today": fresh}.items():
    error = now.error(dict(chosen.bits)) / now.signal
    print(f"{name}: adds {error:.3f} of the squared gradient")
changed = jaxact.reallocate(two, now, bits=2) is not two
print("worth a compilation" if changed else "not worth a compilation")
