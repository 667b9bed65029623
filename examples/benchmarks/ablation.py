"""ActNN's and DIVISION's ablations: the effect of each idea on the gradient.

After Chen et al. 2021 (arXiv:2104.14129), section 5.1: the error that rounding adds to
the gradient of a trained residual network, with one range per tensor, with groups of
256, then with bits shared out over samples by their ranges, then over layers too; and
with bits shared out over samples by a table of every sample's gradient, of which ActNN
keeps the last epoch's, and which here is that at the same parameters. After Wang et al.
2023 ("Division", ICML), section 4: with means over blocks, with these alone, and with
what remains beside them alone.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from ablation_codecs import LARGEST_GROUP, ByTable, OnePart, PerTensor, shared_out
from runs import (
    Effort,
    exact_gradients,
    gradient_at,
    sensitivity,
    train,
    variance,
)
from tasks import ImageTask, State
from variants import Variant

import jaxact

BATCH = 32
BY_TABLE = "2 bits, a table of gradients"


def policies(measured: Any) -> dict[str, jaxact.Policy]:
    """The rows of the table; `measured` is a jaxact.Sensitivity."""
    default = lambda action: jaxact.Policy(default=action)
    groups = default(jaxact.Quantize(2))
    layers = jaxact.allocate(measured, bits=2, ladder=range(1, 9))
    return {
        "4 bits, a range per tensor": default(PerTensor(4)),
        "2 bits, a range per tensor": default(PerTensor(2)),
        "2 bits, a range per sample": default(jaxact.Quantize(2, LARGEST_GROUP)),
        "2 bits, groups of 256": groups,
        "and bits per sample": jaxact.policies.actnn(3),
        "and bits per layer": jaxact.policies.actnn(3, measured=measured),
        "groups, bits per layer only": layers.policy(groups),
        "2 bits and means of 8 x 8": default(jaxact.DualPrecision(2)),
        "those means only": default(OnePart("low")),
        "2 bits of the rest only": default(OnePart("high")),
    }


def by_table(
    task: ImageTask, state: State, batches: Sequence[Any]
) -> list[jaxact.Policy]:
    """For each batch: 2 bits, for each sample by the squared gradient of its logits."""
    variables = {"params": state.params, "batch_stats": state.statistics}
    apply = jax.jit(task.network("all").apply, static_argnames=("train", "mutable"))
    found = []
    for images, labels in batches:
        logits: Any = apply(variables, images, train=True, mutable=("batch_stats",))[0]
        errors = jax.nn.softmax(logits) - jax.nn.one_hot(labels, logits.shape[-1])
        weights = np.square(np.asarray(errors, np.float64)).sum(-1)
        found.append(jaxact.Policy(default=ByTable(shared_out(weights, 2))))
    return found


def ablation(task: ImageTask, effort: Effort) -> list[dict[str, Any]]:
    """One row for each policy: the rounding error, and its reference.

    The network is trained uncompressed. `error` is the mean squared distance from the
    exact gradient over batches of 32 images, `spread` its standard error; `ratio` is
    relative to the variance between such batches.
    """
    state, _, _ = train(task, Variant("", "all"), seed=0)
    task.batch_size = BATCH
    batches = list(itertools.islice(task.batches(1000), effort.draws))
    exact = exact_gradients(task, state, batches)
    between = variance(exact)
    measured = sensitivity(task, jaxact.Policy(bits=2), state, batches[0])
    rows = []
    count = effort.draws // 2
    ways = {name: [policy] * count for name, policy in policies(measured).items()}
    ways[BY_TABLE] = by_table(task, state, batches[:count])
    for name, each in ways.items():
        found = [
            _squared_error(gradient_at(task, policy, state), batch, g, effort.draws)
            for policy, batch, g in zip(each, batches, exact, strict=False)
        ]
        mean = statistics.mean(found)
        error = statistics.stdev(found) / math.sqrt(len(found)) if found[1:] else 0.0
        rows.append(
            {
                "policy": name,
                "error": mean,
                "spread": error,
                "ratio": mean / between,
            }
        )
    return rows


def _squared_error(
    gradient: Callable[..., np.ndarray], batch: Any, exact: np.ndarray, draws: int
) -> float:
    """The mean squared distance from `exact`: variance, and squared bias."""
    found = (gradient(batch, seed) - exact for seed in range(draws))
    return statistics.mean(float(np.sum(distance**2)) for distance in found)
