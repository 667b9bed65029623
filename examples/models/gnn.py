"""Graph networks in jax.numpy over a list of edges: GCN and GAT.

GCN is Kipf and Welling 2017, https://arxiv.org/abs/1609.02907, eq. 2; GAT is Velickovic
et al. 2018, https://arxiv.org/abs/1710.10903, eq. 1 to 5. A layer sums messages over
the edges that enter each node; a dense map reads the classes from the last one.

Wrapped layers go in where the plain ones stood. The first one's input is data that
exists anyway, so it is not declared an activation:

  first = jaxact.compress(net.layer)
  other = jaxact.compress(net.layer, activations="x")
  head = jaxact.compress(net.head, activations="x")
  logits = net.apply(params, features, edges, [first, other, other], head)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]
Edges = tuple[jax.Array, jax.Array, jax.Array]  # senders, receivers, weights; all [E]
Layer = Callable[[Params, jax.Array, Edges], jax.Array]


@dataclass(frozen=True)
class GCN:
    """A graph convolutional network.

    Attributes:
      features, classes: of a node: given, and to tell apart.
      width: of a layer's output for a node.
      layers: that pass messages.
    """

    features: int
    classes: int
    width: int = 64
    layers: int = 3

    def init(self, key: jax.Array) -> Params:
        """Parameters: matrices scaled by their input, biases zero."""
        keys = jax.random.split(key, self.layers + 1)
        inputs = [self.features] + [self.width] * (self.layers - 1)
        return {
            "layers": [
                self.init_layer(k, n) for k, n in zip(keys[1:], inputs, strict=True)
            ],
            "head": normal(keys[0], (self.width, self.classes)),
        }

    def init_layer(self, key: jax.Array, inputs: int) -> Params:
        weight = normal(key, (inputs, self.width))
        return {"weight": weight, "bias": jnp.zeros(self.width)}

    def layer(self, p: Params, x: jax.Array, edges: Edges) -> jax.Array:
        """Nodes [N, width] from nodes [N, inputs]."""
        senders, receivers, weights = edges
        messages = (x @ p["weight"])[senders] * weights[:, None]
        summed = jax.ops.segment_sum(messages, receivers, len(x))
        return jax.nn.relu(summed + p["bias"][None])

    def apply(
        self,
        params: Params,
        x: jax.Array,
        edges: Edges,
        layers: Sequence[Layer] | None = None,
        head: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    ) -> jax.Array:
        """Logits [N, classes] of nodes [N, features]."""
        layers = layers or [self.layer] * self.layers
        for layer, p in zip(layers, params["layers"], strict=True):
            x = layer(p, x, edges)
        return (head or self.head)(params["head"], x)

    def head(self, weight: jax.Array, x: jax.Array) -> jax.Array:
        """The logits of each node: [N, classes]."""
        return x @ weight


@dataclass(frozen=True)
class GAT(GCN):
    """A graph attention network; its heads share the width."""

    heads: int = 8

    def init_layer(self, key: jax.Array, inputs: int) -> Params:
        keys = jax.random.split(key, 3)
        shape = (self.heads, self.width // self.heads)
        return super().init_layer(keys[0], inputs) | {
            "sender": normal(keys[1], shape),
            "receiver": normal(keys[2], shape),
        }

    def layer(self, p: Params, x: jax.Array, edges: Edges) -> jax.Array:
        """Nodes [N, width] from nodes [N, inputs]; the edges' weights are not used."""
        senders, receivers, _ = edges

        def attend(h: jax.Array, sender: jax.Array, receiver: jax.Array) -> jax.Array:
            """One head: nodes [N, width of a head]."""
            scores = (h @ sender)[senders] + (h @ receiver)[receivers]
            scores = jax.nn.leaky_relu(scores, 0.2)
            # The largest score of a node only keeps its exponentials in range.
            top = jax.ops.segment_max(jax.lax.stop_gradient(scores), receivers, len(x))
            weights = jnp.exp(scores - top[receivers])
            messages = h[senders] * weights[:, None]
            total = jax.ops.segment_sum(weights, receivers, len(x))
            return jax.ops.segment_sum(messages, receivers, len(x)) / total[:, None]

        # Heads lead: their edges then lie along the last axis, as groups do.
        h = (x @ p["weight"]).reshape(len(x), self.heads, -1).swapaxes(0, 1)
        mixed = jax.vmap(attend)(h, p["sender"], p["receiver"])
        mixed = mixed.swapaxes(0, 1).reshape(len(x), -1)
        return jax.nn.elu(mixed + p["bias"][None])


def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape) * shape[0] ** -0.5
