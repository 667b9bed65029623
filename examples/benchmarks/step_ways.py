"""Ways to take one training step in less memory.

Policies about dots mean matrix products. `dots_saveable` means convolutions too; the
others save nothing of a network of convolutions.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax

import jaxact

SAVE = jax.checkpoint_policies


@dataclass(frozen=True)
class Way:
    """A way to take a step: how its network's blocks are wrapped, and how it is cut.

    Attributes:
      block: maps a block, a Linen class or a function of parameters and activations, to
        the one that takes its place.
      network: the same for the whole network.
      pieces: that a batch is cut into, whose gradients are taken one after another.
    """

    name: str
    block: Callable[[Any], Any] = lambda block: block
    network: Callable[[Any], Any] = lambda network: network
    pieces: int = 1


def checkpoint(block: Any, policy: Callable[..., Any] | None = None) -> Any:
    """The block, recomputing all that `policy` does not save; without one, all."""
    if not isinstance(block, type):
        return jax.checkpoint(block, policy=policy)
    arguments = inspect.signature(block.__call__).parameters
    static = tuple(i for i, name in enumerate(arguments) if name == "train")
    wrapped = nn.remat(block, policy=policy, static_argnums=static)
    wrapped.__name__ = block.__name__  # Flax names parameters after it
    return wrapped


def compress(block: Any, bits: int, recompute: Any = None) -> Any:
    # As many bits for values that a checkpoint computes others from, 8 by default:
    # GPT-2's queries and keys, the inputs of checkpointed blocks.
    rule = jaxact.Rule(jaxact.Quantize(bits), recomputed_from=True)
    policy = jaxact.Policy(bits, rules=(rule,), recompute=recompute)
    return compress_by(block, policy)


def compress_by(block: Any, policy: jaxact.Policy) -> Any:
    activations = None if isinstance(block, type) else "x"
    return jaxact.compress(block, policy=policy, activations=activations)


def quantize(network: Any) -> Any:
    """The network with int8 matrix products and convolutions, backward too, by qwix."""
    if not isinstance(network, nn.Module):
        raise TypeError("qwix takes Flax modules; this network is jax.numpy")
    import qwix  # pyright: ignore[reportMissingImports]

    kinds = dict.fromkeys(("weight_qtype", "act_qtype", "bwd_qtype"), "int8")
    rule = qwix.QtRule(module_path=".*", **kinds)
    return qwix.quantize_model(network, qwix.QtProvider([rule]))


def checkpointed(name: str, policy: Callable[..., Any] | None) -> Way:
    return Way(name, lambda block: checkpoint(block, policy))


def compressed(name: str, bits: int, recompute: Any = None) -> Way:
    return Way(name, lambda block: compress(block, bits, recompute))


def stored_by(name: str, codec: jaxact.Codec[Any]) -> Way:
    policy = jaxact.Policy(default=codec)
    return Way(name, lambda block: compress_by(block, policy))


def compressed_checkpoint(name: str, bits: int) -> Way:
    """Keep blocks' inputs, in so many bits; and the residuals of one block at a time.

    Each block is computed again from its rounded input: a biased gradient.
    """
    inside = lambda block: checkpoint(compress(block, bits))
    return Way(name, lambda block: compress(inside(block), bits))


BASE = Way("uncompressed")
WAYS = {
    way.name: way
    for way in (
        BASE,
        checkpointed("checkpoint", None),
        checkpointed("dots_saveable", SAVE.dots_saveable),
        checkpointed(
            "dots_with_no_batch_dims_saveable", SAVE.dots_with_no_batch_dims_saveable
        ),
        checkpointed(
            "offload dots", SAVE.offload_dot_with_no_batch_dims("device", "pinned_host")
        ),
        Way("accumulate 2", pieces=2),
        Way("accumulate 4", pieces=4),
        Way("accumulate 8", pieces=8),
        Way("qwix int8", network=quantize),
        compressed("jaxact 4 bits", bits=4),
        compressed("jaxact 2 bits", bits=2),
        stored_by("jaxact 2 bits, Dithered", jaxact.Dithered(2)),
        stored_by("jaxact 2 bits, Adaptive", jaxact.Adaptive(2)),
        compressed(
            "jaxact 4 bits, dots_saveable", bits=4, recompute=SAVE.dots_saveable
        ),
        compressed_checkpoint("jaxact 4 bits + checkpoint", bits=4),
    )
}
