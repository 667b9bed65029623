"""Networks on eight devices, spread in every way; tests/test_sharded.py runs it.

python sharded_layouts.py network Auto fsdp
python sharded_layouts.py bits Explicit
"""

import collections
import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxact
from support.eight_devices import COLLECTIVES
from support.layouts import LAYOUTS, arguments, gradients, network, variants
from support.programs import assert_same_bits, relative_error, same_bits


def exchanges(compiled):
    calls = re.findall(rf" ({COLLECTIVES})(?:-start)?\(", compiled.as_text())
    return collections.Counter(calls)


def check_network(kind, name):
    """Exact residuals give the plain bits, packed ones no other exchange."""
    (layout,) = [layout for layout in LAYOUTS if layout.name == name]
    mesh = layout.mesh(kind)
    with jax.set_mesh(mesh):
        placed = jax.device_put(arguments(), layout.shardings(mesh))
        programs = {
            name: jax.jit(f).lower(*placed).compile()
            for name, f in variants(layout, kind).items()
        }
        found = {name: exchanges(program) for name, program in programs.items()}
        results = {
            name: jax.device_get(program(*placed)) for name, program in programs.items()
        }
    assert found["plain"].total() > 0
    assert found["exact"] == found["plain"], found
    assert found["packed"] == found["plain"], found
    assert_same_bits(results["exact"], results["plain"])
    # 4 bits: a noise of one percent, and it is there.
    assert 1e-3 < relative_error(results["packed"], results["plain"]) < 0.05


def layer(params, x, place=lambda x: x):
    """Products of small integers: every sum is exact, in whatever order it is taken."""
    hidden = jax.nn.relu(place(x) @ params["up"])
    return place(hidden @ params["down"])


def integers(rng, *shape):
    return rng.integers(-2, 3, shape).astype(np.float32)


def gradient_bits(f, weights):
    """Gradients whose cotangents are integers, of f's compressed residuals.

    Decoded values are multiples of a power of two, at least 2**-8 of them: the zero
    points and scales of a group have 8 bits each. Sums of 2**9 products with integers
    below 2**7 are then exact in float32.
    """
    small = jaxact.compress(f, policy=jaxact.Policy(default=jaxact.Quantize(2)))
    loss = lambda params, x: (small(params, x) * weights).sum()
    return jax.jit(jax.value_and_grad(loss, (0, 1)))


def check_bits(kind):
    """One device and eight give the same bits where a sum's order does not matter."""
    rng = np.random.default_rng(0)
    mesh = jax.make_mesh((4, 2), ("data", "model"), (kind,) * 2)
    specs = [
        (P("data"), P(), P()),
        (P("data", "model"), P(), P()),
        (P("data"), P(None, "model"), P("model")),
        (P(("data", "model")), P(None, "data"), P(None, "data")),
        (P(None, None, "model"), P("model"), P()),
    ]
    params = {"up": integers(rng, 64, 128), "down": integers(rng, 128, 64)}
    x, weights = integers(rng, 8, 4, 64), integers(rng, 8, 4, 64)
    # With the noise of two bits.
    one = jax.device_get(gradient_bits(layer, weights)(params, x))
    plain = jax.grad(lambda p: (layer(p, x) * weights).sum())(params)
    assert not same_bits(one[1][0], plain)
    for x_spec, up, down in specs:
        put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
        placed = {"up": put(params["up"], up), "down": put(params["down"], down)}
        with jax.set_mesh(mesh):
            f = layer
            if kind is AxisType.Explicit:
                f = jax.sharding.auto_axes(layer, out_sharding=x_spec)
            found = gradient_bits(f, put(weights, x_spec))(placed, put(x, x_spec))
        assert_same_bits(jax.device_get(found), one, str((x_spec, up, down)))


def check_auto_axes():
    """A part that XLA places, in a program whose other types say where arrays are."""
    (layout,) = [layout for layout in LAYOUTS if layout.name == "data and tensor"]
    mesh = layout.mesh(AxisType.Explicit)

    def inner(params, x):
        x = network(layout, AxisType.Auto, params, x)
        hidden = x @ params["up"]
        deviation = lax.rsqrt(hidden.var((0, 1)) + 1e-5)
        hidden = (hidden - hidden.mean((0, 1))) * deviation
        return jnp.maximum(hidden, x.mean()) @ params["down"]

    def block(params, x):
        x = jnp.tanh(x)
        y = jax.sharding.auto_axes(inner, out_sharding=layout.x)(params, x)
        return jnp.tanh(y) * x

    with jax.set_mesh(mesh):
        placed = jax.device_put(arguments(), layout.shardings(mesh))
        plain = jax.jit(gradients(block))(*placed)
        exact, packed = (
            jax.jit(gradients(jaxact.compress(block, policy=policy)))(*placed)
            for policy in (jaxact.Policy(default=jaxact.Exact()), jaxact.Policy(8))
        )
    assert_same_bits(*jax.device_get((exact, plain)))
    assert 1e-4 < relative_error(*jax.device_get((packed, plain))) < 0.02


@jax.custom_vjp
def spikes(x):
    return (x > 0).astype(x.dtype)


def _surrogate(x, ct):
    return (ct / (1 + jnp.square(jnp.pi * x)),)


spikes.defvjp(lambda x: (spikes(x), x), _surrogate)
ACTIVATIONS = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "where": lambda x: jnp.where(x > 0, x, 0.1 * x),
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "spikes": spikes,
}


def check_explicit():
    """Hidden layers that are cut through their groups: masks, slopes, rules' slopes."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Explicit,) * 2)
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (64, 64), (64, 128), (128, 64)
    arrays = [jax.random.normal(k, s) / 8 for k, s in zip(keys, shapes, strict=True)]
    specs = P("data"), P(None, "model"), P("model")
    # What is remembered of one mesh is not of another.
    with jax.set_mesh(jax.make_mesh((8,), ("data",), (AxisType.Auto,))):
        jax.grad(lambda x: jaxact.compress(jax.nn.silu)(x).sum())(arrays[0])
    for name, act in ACTIVATIONS.items():

        def f(x, up, down, act=act):
            hidden = act(8 * x @ up)
            return jnp.einsum("bh,ho->bo", hidden, down, out_sharding=P("data"))

        def gradient(f):
            return jax.jit(jax.grad(lambda *args: jnp.sin(f(*args)).sum(), (0, 1, 2)))

        small = jaxact.compress(f, policy=jaxact.Policy(8), activations="x")
        with jax.set_mesh(mesh):
            put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
            placed = list(map(put, arrays, specs))
            plain, packed = gradient(f)(*placed), gradient(small)(*placed)
            for a, b in zip(packed, plain, strict=True):
                assert a.sharding.is_equivalent_to(b.sharding, a.ndim), name
        assert relative_error(*jax.device_get((packed, plain))) < 0.02, name


CUTS = [
    ((64, 768), P("data", "model")),  # of three groups
    ((8, 16, 12, 64), P("data", None, "model")),  # heads, in one row with their width
    ((8, 197, 48), P("data", None, "model")),
    ((8, 32, 32, 48), P("data", "model")),  # between groups of joined axes
    ((3, 768), P(None, ("data", "model"))),  # no other axis to cut
    ((512,), P("model")),
]
FORMATS = jaxact.Quantize(8), jaxact.Dithered(8), jaxact.Adaptive(4)


def check_cuts():
    """Groups that a mesh's Explicit axes cut: JAX does not reshape such arrays."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Explicit,) * 2)
    f = lambda x, w: jnp.tanh(jnp.tanh(x) * w)
    loss = lambda f: lambda x, w: jnp.sin(f(x, w)).sum()
    for shape, spec in CUTS:
        x = jax.random.normal(jax.random.key(0), shape)
        wanted = jax.grad(loss(f))(x, jnp.float32(0.5))
        with jax.set_mesh(mesh):
            placed = jax.device_put(x, NamedSharding(mesh, spec))
            for codec in FORMATS:
                policy = jaxact.Policy(default=codec)
                small = jaxact.compress(f, policy=policy, activations="x")
                found = jax.jit(jax.grad(loss(small)))(placed, jnp.float32(0.5))
                assert found.sharding.is_equivalent_to(placed.sharding, x.ndim)
                error = relative_error(*jax.device_get((found, wanted)))
                assert 0 < error < 0.2, (shape, spec, codec, error)


def check_uneven():
    """Sizes that the mesh does not divide, as constraints within a jit allow."""
    rng = np.random.default_rng(0)
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    params = {"up": integers(rng, 72, 300), "down": integers(rng, 300, 72)}
    x, weights = integers(rng, 13, 5, 72), integers(rng, 13, 5, 72)
    one = jax.device_get(gradient_bits(layer, weights)(params, x))
    for spec in P("data"), P(None, "data"), P(None, None, "data"):
        place = functools.partial(lax.with_sharding_constraint, shardings=spec)
        with jax.set_mesh(mesh):
            f = functools.partial(layer, place=place)
            found = gradient_bits(f, weights)(params, x)
        assert_same_bits(jax.device_get(found), one, str(spec))


def check_shard_map(check_vma):
    """By hand: a batch over "data", hidden units over "model"."""
    rng = np.random.default_rng(0)
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)
    params = {"up": integers(rng, 64, 128) / 8, "down": integers(rng, 128, 64) / 8}
    x, weights = integers(rng, 8, 4, 64), integers(rng, 8, 4, 64)
    own = {"up": P(None, "model"), "down": P("model")}

    def part(params, x):
        y = jnp.tanh(x @ params["up"]) @ params["down"]
        return lax.psum(y, "model")

    def mapped(f):
        return jax.shard_map(
            f,
            mesh=mesh,
            in_specs=(own, P("data")),
            out_specs=P("data"),
            check_vma=check_vma,
        )

    def compiled(f):
        loss = lambda params, x: (f(params, x) * weights).sum()
        return jax.jit(jax.grad(loss, (0, 1))).lower(params, x).compile()

    plain = compiled(mapped(part))
    wanted = plain(params, x)
    exact, packed = jaxact.Policy(default=jaxact.Exact()), jaxact.Policy(8)
    for named in 1, None:
        wrap = functools.partial(jaxact.compress, activations=named)
        for policy, bound in (exact, 0.0), (packed, 0.02):
            inside = compiled(mapped(wrap(part, policy=policy)))
            around = compiled(wrap(mapped(part), policy=policy))
            for program in inside, around:
                assert exchanges(program) == exchanges(plain), (named, policy)
                assert relative_error(program(params, x), wanted) <= bound


def main(check, *words):
    checks = {
        "network": lambda kind, *name: check_network(AxisType[kind], " ".join(name)),
        "bits": lambda kind: check_bits(AxisType[kind]),
        "auto_axes": check_auto_axes,
        "explicit": check_explicit,
        "cuts": check_cuts,
        "uneven": check_uneven,
        "shard_map": lambda flag: check_shard_map(flag == "checked"),
    }
    checks[check](*words)


if __name__ == "__main__":
    main(*sys.argv[1:])
