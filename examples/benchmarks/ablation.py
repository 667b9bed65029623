"""ActNN's ablation: the effect of each idea on the gradient, at 2 bits.

After Chen et al. 2021 (arXiv:2104.14129), section 5.1: the variance that rounding adds
to the gradient of a trained residual network, with one range per tensor, with groups of
256, then with bits shared out over samples, then over layers too.
"""

import dataclasses
import itertools
import math
import statistics
from typing import Any

import jax
from runs import Effort, batch_variance, rounding_variance, sensitivity, train
from tasks import ImageTask
from variants import Variant

import jaxact

BATCH = 32
# The largest that Quantize takes; a first-stage array of 32 images of 32x32 has half.
LARGEST_GROUP = 2**20 - 32


@dataclasses.dataclass(frozen=True)
class PerTensor(jaxact.Codec):
    """One range for a whole array, for this comparison only.

    Quantize never joins samples, so its largest group is one sample. Here the array is
    one row; one of more than `LARGEST_GROUP` elements has several ranges all the same.
    """

    bits: int
    bias = jaxact.Bias.UNBIASED

    @property
    def _quantize(self) -> jaxact.Quantize:
        return jaxact.Quantize(self.bits, LARGEST_GROUP)

    def encode(self, x: jax.Array, seed: jax.Array) -> Any:
        return self._quantize.encode(x.reshape(1, -1), seed)

    def encode_fused(self, x: jax.Array, seed: jax.Array) -> Any:
        return self._quantize.encode_fused(x.reshape(1, -1), seed)

    def decode(self, stored: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        row = 1, math.prod(shape)
        return self._quantize.decode(stored, row, dtype).reshape(shape)


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
    }


def ablation(task: ImageTask, effort: Effort) -> list[dict[str, Any]]:
    """One row for each policy: the rounding variance, and its reference.

    The network is trained uncompressed. `variance` is the mean over batches of 32
    images, `spread` its standard error; `variance_ratio` is relative to the variance
    between such batches.
    """
    state, _, _ = train(task, Variant("", "all"), seed=0)
    task.batch_size = BATCH
    batches = list(itertools.islice(task.batches(1000), effort.draws))
    between = batch_variance(task, state, batches)
    measured = sensitivity(task, jaxact.Policy(bits=2), state, batches[0])
    rows = []
    for name, policy in policies(measured).items():
        found = [
            rounding_variance(task, policy, state, batch, effort.draws)
            for batch in batches[: effort.draws // 2]
        ]
        mean = statistics.mean(found)
        error = statistics.stdev(found) / math.sqrt(len(found)) if found[1:] else 0.0
        rows.append(
            {
                "policy": name,
                "variance": mean,
                "spread": error,
                "variance_ratio": mean / between,
            }
        )
    return rows
