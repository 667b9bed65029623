"""Sizes of a network that can grow until its training step no longer fits a GPU."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from step_networks import NETWORKS, Network, resnet


@dataclass(frozen=True)
class Quantity:
    """One size of a network; the others stay.

    Attributes:
      unit: that it counts.
      resized: a network and a size to the network of that size.
      multiple_of: sizes that are tried.
      degree: of the polynomial in the size that memory is close to.
      has_parameters: the network has more of them when it grows.
      phrase: in the description of the network, that names its present size.
    """

    unit: str
    resized: Callable[[Any, int], Network]
    multiple_of: int = 1
    degree: int = 1
    has_parameters: bool = True
    phrase: Callable[[Any], str] = lambda network: ""


def batch(network: Network) -> Quantity:
    return Quantity(
        network.unit if network.unit != "tokens" else "texts",
        lambda network, size: dataclasses.replace(network, batch=size),
        {"images": 8, "nodes": 16_384}.get(network.unit, 1),
        has_parameters=False,
        phrase=lambda network: f", batch {network.batch}",
    )


def resnet_depth(network: Any, blocks: int) -> Network:
    """More blocks in the second and third stage, shared as in ActNN's benchmark."""
    second = round((blocks - 6) * 8 / 44)
    counts = 3, second, blocks - 6 - second, 3
    return with_module(network, blocks_per_stage=counts)


def resnet_width(network: Any, channels: int) -> Network:
    """Of 3x3 convolutions alone, the first stage's; a ResNet's outer widths stay."""

    class WideBottleneck(resnet.Bottleneck):
        widening: float = channels / 64

    blocks = dict(network.blocks) | {"block": WideBottleneck}
    return dataclasses.replace(network, blocks=blocks)


def with_module(network: Any, **sizes: Any) -> Network:
    module = functools.partial(network.module, **sizes)
    return dataclasses.replace(network, module=module)


def with_net(network: Any, **sizes: Any) -> Network:
    net = dataclasses.replace(network.net, **sizes)
    return dataclasses.replace(network, net=net)


RESNET = {
    "depth": Quantity("blocks", resnet_depth, 4),
    "width": Quantity("channels of 3x3 convolutions", resnet_width, 16, degree=2),
    "resolution": Quantity(
        "pixels a side",
        lambda network, size: dataclasses.replace(network, size=size),
        32,
        degree=2,
        has_parameters=False,
        phrase=lambda network: f", {network.size}x{network.size}",
    ),
}


def transformer(resized: Callable[..., Network]) -> dict[str, Quantity]:
    """Of layers whose heads keep their width of 64."""
    return {
        "depth": Quantity("layers", lambda network, n: resized(network, layers=n)),
        "width": Quantity(
            "channels",
            lambda network, n: resized(network, width=n, heads=n // 64),
            64,
            degree=2,
        ),
    }


ENCODER, DECODER = transformer(with_module), transformer(with_net)
GRAPH = {
    "width": Quantity(
        "channels", lambda network, n: with_net(network, width=n), 64, degree=2
    ),
}
SIZES: dict[str, dict[str, Quantity]] = {
    "resnet50": RESNET,
    "resnet152": RESNET,
    "vit-b": ENCODER,
    "vit-l": ENCODER,
    "bert-large": ENCODER,
    "gpt2-medium": DECODER,
    "tiny": DECODER,
    "gcn": GRAPH,
}
# Of the command.
NAMES = "batch", "depth", "width", "resolution"


def sizes_of(name: str) -> dict[str, Quantity]:
    """The quantities that the network `name` has, by their names on the command."""
    return {"batch": batch(NETWORKS[name])} | SIZES.get(name, {})
