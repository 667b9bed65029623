"""Ways to spread a network over eight devices: a new one is one entry in LAYOUTS."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxact

SEQUENCES, LENGTH, HEADS, HEAD_WIDTH, HIDDEN = 8, 64, 8, 32, 512
WIDTH = HEADS * HEAD_WIDTH
SHAPES = {
    "gain": (WIDTH,),
    "query": (WIDTH, HEADS, HEAD_WIDTH),
    "key": (WIDTH, HEADS, HEAD_WIDTH),
    "value": (WIDTH, HEADS, HEAD_WIDTH),
    "out": (HEADS, HEAD_WIDTH, WIDTH),
    "up": (WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH),
}
# By its heads and hidden units: a product of two such weights needs one exchange.
MODEL = {
    **dict.fromkeys(("query", "key", "value", "up"), P(None, "model")),
    **dict.fromkeys(("out", "down"), P("model")),
}
FSDP = {
    name: P(*[None] * (len(shape) - 1), "data")
    for name, shape in SHAPES.items()
    if len(shape) > 1
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the arrays of a network are.

    Attributes:
      sizes: of the mesh, by axis.
      x: the spec of activations `[SEQUENCES, LENGTH, WIDTH]`.
      weights: specs by name; others are whole on each device.
      keys: the spec that keys and values are gathered to, if they are.
      gathers_weights: whether a layer's weights are gathered where they are used. With
        Auto axes XLA finds that out.
    """

    name: str
    sizes: dict[str, int]
    x: P
    weights: dict[str, P] = dataclasses.field(default_factory=dict)
    keys: P | None = None
    gathers_weights: bool = False

    def mesh(self, kind: AxisType, devices=None) -> jax.sharding.Mesh:
        kinds = (kind,) * len(self.sizes)
        if devices is None:
            return jax.make_mesh(tuple(self.sizes.values()), tuple(self.sizes), kinds)
        grid = np.reshape(np.array(devices), tuple(self.sizes.values()))
        return jax.sharding.Mesh(grid, tuple(self.sizes), axis_types=kinds)

    def shardings(self, mesh):
        """Of (parameters, x)."""
        specs = {name: self.weights.get(name, P()) for name in SHAPES}
        return jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            (specs, self.x),
            is_leaf=lambda s: isinstance(s, P),
        )


LAYOUTS = [
    Layout("data", {"data": 8}, P("data")),
    Layout("fsdp", {"data": 8}, P("data"), FSDP, gathers_weights=True),
    Layout("tensor", {"model": 8}, P(), MODEL),
    Layout("data and tensor", {"data": 4, "model": 2}, P("data"), MODEL),
    Layout("sequence", {"data": 4, "seq": 2}, P("data", "seq"), keys=P("data")),
]
KINDS = AxisType.Auto, AxisType.Explicit


def network(layout, kind, params, x):
    """A transformer block, placed as users do who know their mesh."""
    is_explicit = kind is AxisType.Explicit
    place = jax.sharding.reshard if is_explicit else lax.with_sharding_constraint
    if layout.gathers_weights and is_explicit:
        params = {name: place(w, P()) for name, w in params.items()}

    def reduced(indices, a, b):
        options = {"out_sharding": layout.x} if is_explicit else {}
        return place(jnp.einsum(indices, a, b, **options), layout.x)

    y = norm(x) * params["gain"][None, None]
    q, k, v = (
        jnp.einsum("btd,dhk->bthk", y, params[name])
        for name in ("query", "key", "value")
    )
    if layout.keys is not None:
        k, v = (place(place(a, layout.x), layout.keys) for a in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / HEAD_WIDTH**0.5
    mixed = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)
    x = x + reduced("bthk,hkd->btd", mixed, params["out"])
    hidden = jax.nn.gelu(norm(x) @ params["up"])
    return x + reduced("bth,hd->btd", hidden, params["down"])


def norm(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def gradients(block):
    """(parameters, x) -> (loss, gradients of both)."""
    loss = lambda params, x: jnp.square(block(params, x)).mean()
    return jax.value_and_grad(loss, (0, 1))


def variants(layout, kind):
    """The gradients uncompressed, with all residuals exact, and with 4 bits.

    In groups of 32: an eighth of each width is a whole number of groups.
    """
    block = functools.partial(network, layout, kind)
    policies = {
        "exact": jaxact.Policy(default=jaxact.Exact()),
        "packed": jaxact.Policy(default=jaxact.Quantize(4, group_size=32)),
    }
    blocks = {
        name: jaxact.compress(block, policy=policy, activations=1)
        for name, policy in policies.items()
    }
    return {name: gradients(b) for name, b in {"plain": block, **blocks}.items()}


def arguments():
    """Parameters and activations."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    params = {name: normal(*shape) / WIDTH**0.5 for name, shape in SHAPES.items()}
    return params, normal(SEQUENCES, LENGTH, WIDTH)
