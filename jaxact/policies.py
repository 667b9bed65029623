"""The policies of four papers, and what to save under an outer `jax.checkpoint`.

A preset is a plain `Policy`: print it, compare it, extend it by `dataclasses.replace`.
With `measured`, a `jaxact.Sensitivity`, each measured residual has bits of its own.
"""

import dataclasses
import math

from jaxact._bits.allocate import LADDER, action_of, allocate
from jaxact._bits.cost import Sensitivity, levels_variance
from jaxact._bits.worst_case import (
    Consumer as Consumer,
    acgc_worst_case as acgc_worst_case,
    stochastic_bits as stochastic_bits,
)
from jaxact._checkpoint_policies import (
    PACKED_NAME as PACKED_NAME,
    SaveEither as SaveEither,
    SavePacked as SavePacked,
    save_packed as save_packed,
)
from jaxact._codec import Action, DualPrecision, Exact, Offload, PerSample
from jaxact._policy import Policy, Rule
from jaxact._residual import Residual

_ACTNN_LEVELS = {
    0: "exact",
    1: "4 bits, what BatchNorm normalizes exact",
    2: "4 bits",
    3: "2 bits on average",
    4: "as level 3, in host memory",
    5: "as level 4",
}
# Rounding normal values to b bits adds a variance of this much times S(b): the mean of
# R^2 / 6 over groups of 256 with range R.
_NORMAL_GROUP = 5.38


@dataclasses.dataclass(frozen=True)
class IsNormalized:
    """Whether a residual is stored through a normalization, such as BatchNorm's."""

    def __call__(self, residual: Residual) -> bool:
        """For `Rule(where=...)`."""
        return residual.is_normalized


def actnn(level: int = 3, *, measured: Sensitivity | None = None) -> Policy:
    """ActNN's levels (Chen et al. 2021, arXiv:2104.14129).

    0: exact. 1: 4 bits, and what BatchNorm normalizes exact. 2: 4 bits. 3: 2 bits on
    average, shared out over the samples of each residual, and over residuals where
    `measured` says what each costs. 4: as 3, in host memory. 5: as 4; it adds
    defragmentation, which XLA has no need of: it plans memory when it compiles.

    What differs. A level is a value, no global setting; none is changed by another.
    Masks take one bit and small statistics, integers and keys stay exact at every
    level. All differentiable operations are compressed, not listed layers. One array
    serves BatchNorm, ReLU and the next convolution, so level 1 keeps exactly what all
    three read. BatchNorm has bits of its own, not those of the convolution before it.
    Before anything is measured every residual has the same bits, where ActNN gave some
    samples 8 bits and most 1.

    Args:
      level: 0 to 5.
      measured: levels 3 to 5: costs that 1 to 8 bits, 2 on average, are allocated by.

    Raises:
      ValueError: another level, or one that `measured` does not apply to; what
        `allocate` raises.

    Example:
      >>> actnn(2)
      Policy(bits=4, rules=(), recompute=None, default=None)
      >>> actnn(0).default
      Exact()
    """
    if isinstance(level, bool) or level not in list(_ACTNN_LEVELS):
        levels = "; ".join(f"{n}: {what}" for n, what in _ACTNN_LEVELS.items())
        raise ValueError(f"actnn({level!r}): a level is required. {levels}.")
    if level < 3:
        if measured is not None:
            raise ValueError(
                f"actnn({level}, measured=...): levels 0 to 2 have fixed bits. Use "
                "level 3, 4 or 5, or gact(bits, measured=...)."
            )
        # A network without BatchNorm is no mistake: rules with a path do not warn.
        exact_norms = Rule(Exact(), path="*", where=IsNormalized())
        return (
            Policy(default=Exact()),
            Policy(bits=4, rules=(exact_norms,)),
            Policy(bits=4),
        )[int(level)]
    action = _per_sample if level == 3 else _per_sample_in_host_memory
    base = Policy(default=action(2))
    if measured is None:
        return base
    return allocate(measured, bits=2, ladder=range(1, 9)).policy(base, action)


def gact(bits: float = 4, *, measured: Sensitivity | None = None) -> Policy:
    """GACT's bits (Liu et al. 2022, arXiv:2206.11357).

    Without `measured`, the same bits everywhere: GACT before its first adaptation.
    With it, bits that average `bits` and add the least gradient variance.

    What differs. Bits of any width, not of 1, 2, 4, 8 and 32: the start is `bits`
    rounded up, and a budget of 3 is used in full. Residuals have their keys by path,
    not by call order, so a branch that runs late changes none of the others. Scales are
    bfloat16, half of GACT's cost. Adapt with `jaxact.reallocate`, which changes bits
    only where it pays.

    Args:
      bits: per element, on average, without scales and zero points: above 0, at most 8.
      measured: costs that the bits are allocated by; the rest is stored at `bits`.

    Raises:
      ValueError: bits out of range; what `allocate` raises.

    Example:
      >>> gact(3.5)
      Policy(bits=4, rules=(), recompute=None, default=None)
    """
    if not 0 < bits <= 8:
        raise ValueError(
            f"gact({bits!r}): bits above 0 and at most 8 are required. To keep all "
            "use Policy(default=Exact())."
        )
    base = Policy(bits=math.ceil(bits))
    return base if measured is None else allocate(measured, bits=bits).policy(base)


def division(bits: int = 2, block: int = 8) -> Policy:
    """DIVISION (Wang et al. 2023, arXiv:2208.04187): block means, and few bits.

    Of each residual the means over blocks, in bfloat16, and what they leave at `bits`.
    It pays for smooth maps: on 56 x 56 maps of normal values with amplitudes 1 / f^a of
    the frequency f, squared errors relative to the values are, at 2 bits::

        a                             0     1      1.5    2
        Quantize(2), 2.1 bits         0.60  0.56   0.48   0.42
        DualPrecision(2), 2.4 bits    0.59  0.36   0.17   0.08

    and nearly the same for both behind a ReLU.

    What differs. Partial blocks at the borders have means of their own (DIVISION
    stretches whole ones: one mean for all of a 14 x 14 map). Means are stored only
    where they pay; elsewhere zeros stay exact, which subtracted means would spoil.
    What is encoded is decoded with the same scale. Any layer is compressed, and a
    residual is stored once for all its readers.

    Args:
      bits: of what the means leave.
      block: elements averaged, along each averaged axis.

    Example:
      >>> division().default
      DualPrecision(bits=2, block=8, axes=None, group_size=256)
    """
    return Policy(default=DualPrecision(bits, block))


def acgc(e2: float = 0.1, *, measured: Sensitivity | None = None) -> Policy:
    """Bits for a bound on the error, AC-GC's idea (Evans and Aamodt, NeurIPS 2021).

    The gradient's second moment grows by at most a factor of 1 + e2, and with it the
    noise floor of SGD. With `measured`, the fewest bits with which the predicted added
    variance of all residuals together is at most e2 of the squared gradient. Without,
    the same bits everywhere: those with which normal values in groups of 256, range R,
    get a variance R^2 / (6 (2^b - 1)^2) of at most e2 of their own. That is what a
    weight gradient gets from inputs that average out over positions; others get more::

        e2     1   0.3   0.1   0.03   0.01   0.001   0.0001
        bits   2     3     4      4      5       7        8

    and bfloat16 down to 3e-6.

    What differs. AC-GC rounds to nearest and bounds the worst case, which asks 6 to 9
    bits more for convolutions (`acgc_worst_case`, `stochastic_bits` here); the theorem
    needs errors of zero mean, and those stochastic rounding has. e2 is shared out over
    all residuals, not granted to each. Widths are one per residual, not per channel.

    Args:
      e2: allowed added variance, as a part of the squared gradient.
      measured: costs that the bits are allocated by.

    Raises:
      ValueError: e2 is not positive; what `allocate` raises.

    Example:
      >>> [acgc(e2).bits for e2 in (1, 0.1, 0.01)]
      [2, 4, 5]
    """
    if not 0 < e2 < math.inf:
        raise ValueError(
            f"acgc({e2!r}): a positive fraction of the squared gradient is required, "
            "such as 0.1."
        )
    widths = (*range(1, 9), 16, 32)
    bits = next(b for b in widths if _NORMAL_GROUP * levels_variance(b) <= e2)
    base = Policy(bits) if bits <= 8 else Policy(default=action_of(bits))
    if measured is None:
        return base
    return allocate(measured, e2=e2, ladder=(*LADDER, 32)).policy(base)


def _per_sample(bits: int) -> Action:
    return PerSample(float(bits)) if bits <= 8 else Exact()


def _per_sample_in_host_memory(bits: int) -> Action:
    return Offload(_per_sample(bits))
