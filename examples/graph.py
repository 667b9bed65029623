"""Train a graph network on one graph (jax.numpy): GCN, or GAT with `--net gat`.

  python examples/graph.py                                 digits and their neighbours
  python examples/graph.py --data cora.npz                 see examples/graphs.py
  python examples/graph.py --data cora.npz --net gat --size full

Expected at 4 bits, in brackets uncompressed (`--policy none`); one seed, JAX 0.12.0;
about 10 s of CPU time, 80 s for GCN at full size:

                      test accuracy    stored, MiB     temp, CPU      temp, H100
  GCN, digits         88.0 (88.0) %    0.2 (3.2)       6.0 (6.9)      2.3 (3.2)
  GAT, digits         87.4 (87.5) %    0.8 (17.2)     18.9 (26.8)     3.8 (4.9)
  GCN, Cora           78.5 (77.8) %    0.2 (4.6)       6.1 (7.4)     19.1 (20.4)
  GAT, Cora           78.5 (78.6) %    1.0 (18.1)     16.2 (23.8)    19.2 (21.9)
  GCN, Cora, full     78.5 (77.0) %    5.1 (103.6)   118.2 (152.3)   56.4 (95.2)
  GAT, Cora, full     not trained     16.9 (369.6)   256.6 (421.6)   56.9 (108.7)

The remaining temp is mostly one layer at work: a message for each edge. An H100's is
the compiler's number (`--target h100`, for full size with `--dry-run`); none of this
ran on a GPU.
"""

import argparse
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import command
import graphs
import jax
import jax.numpy as jnp
import loop
import numpy as np
import optax
from models.gnn import GAT, GCN

import jaxact

NETS = {"gcn": GCN, "gat": GAT}


@dataclass(frozen=True)
class Size:
    """Of the network and of its training."""

    width: int
    layers: int
    steps: int


SMALL = Size(width=64, layers=2, steps=100)
# As wide and deep as GAT on its largest graphs (Velickovic et al. 2018, section 3.3).
FULL = Size(width=1024, layers=3, steps=200)


def training(options: argparse.Namespace) -> loop.Training:
    """The training that the options describe."""
    graph = graphs.load(options.data)
    size = FULL if options.size == "full" else SMALL
    steps = options.steps or size.steps
    net = NETS[options.net](
        graph.features.shape[1], graph.num_classes, size.width, size.layers
    )
    arrays = jax.tree.map(jnp.asarray, (graph.features, graph.edges))

    def batches(start: int) -> Iterator[Any]:
        """The whole graph, and labelled nodes drawn anew for each step, or all."""
        for number in range(start, steps):
            rng = np.random.default_rng((options.seed, number))
            nodes = rng.permutation(graph.train)[: options.batch]
            yield *arrays, nodes, graph.labels[nodes]

    return loop.Training(
        name=f"{options.net.upper()} on {graph.name}, {steps} steps",
        num_steps=steps,
        init=lambda: (net.init(jax.random.key(options.seed)), ()),
        loss=functools.partial(loss_of, net),
        # Regularized as Kipf and Welling have it.
        optimizer=optax.chain(optax.add_decayed_weights(5e-4), optax.adam(1e-2)),
        batches=batches,
        score=functools.partial(score, net, graph),
    )


def loss_of(net: GCN, policy: jaxact.Policy | None) -> loop.Loss:
    layers, head = [net.layer] * net.layers, net.head
    if policy is not None:
        compress = functools.partial(jaxact.compress, policy=policy)
        # The first layer's input is the data, which exists anyway.
        first, rest = compress(net.layer), compress(net.layer, activations="x")
        layers = [first] + [rest] * (net.layers - 1)
        head = compress(net.head, activations="x")

    def loss(params: Any, _: Any, batch: Any) -> tuple[jax.Array, Any]:
        features, edges, nodes, labels = batch
        logits = net.apply(params, features, edges, layers, head)[nodes]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), ()

    return loss


def score(net: GCN, graph: graphs.Graph, params: Any, _: Any) -> str:
    found = jax.jit(net.apply)(params, graph.features, graph.edges).argmax(-1)
    right = (found == graph.labels)[graph.test]
    return f"test accuracy {right.mean():.1%}"


def parser() -> argparse.ArgumentParser:
    found = loop.parser(__doc__)
    found.add_argument("--net", choices=NETS, default="gcn", help="the network")
    return found


if __name__ == "__main__":
    options = parser().parse_args()
    with command.short_errors():
        loop.run(training(options), options)
