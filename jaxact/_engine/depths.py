"""At how many depths of a backward pass a residual is read.

XLA fuses a decoding with each kernel that reads it, as those of a norm's backward pass:
one for its sums, and one that reads the sums. Where a third comes before these, as in
a block that gates its channels by their means (squeeze and excitation), XLA writes the
decoded array to memory instead, in float32. So the third decodes it anew. Predicted for
an H100 at 4 bits, four blocks of an SE-ResNeXt with 512 channels, 64 images: 4.25 ms
and 331 MiB instead of 4.56 and 356 (uncompressed 3.49 and 833).

Not where many read it, as the norms of a DenseNet's block read all layers before them:
four such blocks take 7.7 ms with one array for all, and 8.1 with one for every two.
"""

from collections.abc import Iterable
from typing import TypeAlias

import jax.numpy as jnp
from jax import dtypes

from jaxact._jaxpr.primitives import PRODUCTS, REDUCTIONS
from jaxact._jaxpr.read import names_inside, programs_in, variables_in
from jaxact._jaxpr.types import Eqn, Var

Sources: TypeAlias = dict[Var, tuple[Var, ...]]

_MOST = 2  # depths at which one decoded array is read


def sources(packed: Iterable[Var], eqns: Iterable[Eqn]) -> Sources:
    """The packed arrays from which each value is computed, where that costs little.

    Args:
      eqns: those that depend on no cotangent, in their order.
    """
    # No barrier takes random keys, which a codec of a user's may store.
    arrays = [v for v in packed if not jnp.issubdtype(v.aval.dtype, dtypes.extended)]
    found: Sources = {v: (v,) for v in arrays}
    for eqn in eqns:
        if _is_cheap(eqn):
            own = dict.fromkeys(_read_by(eqn, found))
            found.update(dict.fromkeys(eqn.outvars, tuple(own)))
    return found


def decoded_anew(eqns: Iterable[Eqn], known: Sources) -> dict[int, list[Var]]:
    """For each equation's index, the packed arrays that it has to decode anew.

    Args:
      eqns: those that depend on the cotangents, in their order.
      known: the `sources` of the other ones' results.
    """
    depths: dict[Var, int] = {}
    first: dict[Var, dict[int, int]] = {}  # the first equation at each depth, in order
    for i, eqn in enumerate(eqns):
        inputs = variables_in(eqn.invars)
        depth = max((depths.get(v, 0) for v in inputs), default=0)
        names = names_inside(eqn)
        after = depth + (not REDUCTIONS.isdisjoint(names))
        depths.update(dict.fromkeys(eqn.outvars, after))
        # A product reads an array in memory, whoever else does.
        for v in _read_by(eqn, known) if PRODUCTS.isdisjoint(names) else []:
            first.setdefault(v, {}).setdefault(depth, i)
    found: dict[int, list[Var]] = {}
    for v, places in first.items():
        if _MOST < len(places) <= 2 * _MOST:
            found.setdefault(list(places.values())[_MOST], []).append(v)
    return found


def _read_by(eqn: Eqn, known: Sources) -> list[Var]:
    return [x for v in variables_in(eqn.invars) for x in known.get(v, ())]


def _is_cheap(eqn: Eqn) -> bool:
    """Whether XLA computes it where it is read: no product, sum or kernel."""
    names = names_inside(eqn)
    return names.isdisjoint(PRODUCTS | REDUCTIONS) and not _runs_kernel(eqn)


def _runs_kernel(eqn: Eqn) -> bool:
    """Whether a GPU's kernel decodes in it."""
    operation = eqn.params.get("operation")
    return getattr(operation, "is_fused", True) is False or any(
        _runs_kernel(inner) for program in programs_in(eqn) for inner in program.eqns
    )
