"""Low-rank adapters beside the maps of a frozen decoder, after Hu et al. 2021.

https://arxiv.org/abs/2106.09685, eq. 3; `models/llama.py` reads them.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from models.llama import Llama

Params = dict[str, Any]


def new_adapters(net: Llama, names: Sequence[str], rank: int, key: jax.Array) -> Params:
    """Random `_a` and zero `_b`, so no change yet, for the named maps of all layers."""
    found: Params = {}
    keys = jax.random.split(key, len(names))
    for key, name in zip(keys, names, strict=True):
        inputs, outputs = net.maps[name]
        a = jax.random.normal(key, (net.layers, inputs, rank)) * inputs**-0.5
        found |= {f"{name}_a": a, f"{name}_b": jnp.zeros((net.layers, rank, outputs))}
    return found


def adapted(frozen: Params, adapters: Params, alpha: float) -> Params:
    """All parameters, with the adapters beside the maps of their layers."""
    rank = next(v.shape[-1] for name, v in adapters.items() if name.endswith("_a"))
    scaled = {
        name: v * (alpha / rank) if name.endswith("_b") else v
        for name, v in adapters.items()
    }
    return frozen | {"layers": frozen["layers"] | scaled}
