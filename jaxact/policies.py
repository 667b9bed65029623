"""The policies in four papers, and policies for an outer `jax.checkpoint`.

A preset is a plain `Policy`: print it, compare it, extend it by `dataclasses.replace`.
With `measured`, a `jaxact.Sensitivity`, each measured residual has its own bits.
"""

import dataclasses
import math
import reprlib
from collections.abc import Mapping

import jax

from jaxact._bits.cost import NORMAL_GROUP, Sensitivity, levels_variance
from jaxact._bits.greedy import LADDER, allocate
from jaxact._bits.widths import ACTIONS, EXACT
from jaxact._bits.worst_case import (
    Consumer,
    acgc_worst_case,
    checked_e2,
    stochastic_bits,
)
from jaxact._checkpoint_policies import (
    PACKED_NAME,
    SaveEither,
    SavePacked,
    save_packed,
)
from jaxact._codec import (
    Action,
    Codec,
    DualPrecision,
    Exact,
    Offload,
    PerSample,
    Quantize,
    Recompute,
)
from jaxact._codec.checks import checked_bits, checked_int, checked_number
from jaxact._policy import Policy, Rule
from jaxact._residual import Residual
from jaxact._saved import Saved
from jaxact._written_as import written_as

__all__ = [
    "PACKED_NAME",
    "Consumer",
    "IsNormalized",
    "SaveEither",
    "SavePacked",
    "acgc",
    "acgc_worst_case",
    "actnn",
    "by_name",
    "division",
    "gact",
    "save_packed",
    "stochastic_bits",
]


@dataclasses.dataclass(frozen=True)
class IsNormalized(Saved):
    """Whether a residual is stored through a normalization, such as BatchNorm's."""

    def __call__(self, residual: Residual) -> bool:
        """For `Rule(where=...)`."""
        return residual.is_normalized


# A network without BatchNorm is no mistake: with this path there is no warning.
_EXACT_NORMS = Rule(Exact(), path="*", where=IsNormalized())
# ActNN's levels with fixed bits, and their text for messages.
_FIXED_LEVELS = {
    0: ("exact", Policy(default=Exact())),
    1: ("4 bits, BatchNorm's normalized input exact", Policy(4, rules=(_EXACT_NORMS,))),
    2: ("4 bits", Policy(4)),
}


def _per_sample(bits: float) -> Codec:
    return PerSample(float(bits)) if bits <= 8 else Exact()


def _per_sample_in_host_memory(bits: float) -> Codec:
    return Offload(_per_sample(bits))


# ActNN's levels with bits to share out: text, and the action for an average.
_SHARED_LEVELS = {
    3: ("2 bits on average", _per_sample),
    4: ("as level 3, in host memory", _per_sample_in_host_memory),
    5: ("as level 4", _per_sample_in_host_memory),
}


@written_as("policies.actnn(3, measured=measured)")
def actnn(level: int = 3, *, measured: Sensitivity | None = None) -> Policy:
    """ActNN's levels (Chen et al. 2021, arXiv:2104.14129).

    0: exact. 1: 4 bits, and BatchNorm's normalized input exact. 2: 4 bits. 3: 2 bits on
    average, shared out over each residual's samples, and with `measured` over
    residuals by their cost. 4: as 3, in host memory. 5: as 4; ActNN adds
    defragmentation, which XLA does not need: it plans memory when it compiles.

    Differences. A level is a value, no global setting; none is changed by another.
    Masks take one bit and small statistics, integers and keys stay exact at every
    level. All differentiable operations are compressed, not listed layers. One array
    serves BatchNorm, ReLU and the next convolution, so level 1 keeps it exactly for
    all three. BatchNorm has its own bits, not those for the convolution before it.
    Before anything is measured every residual has the same bits, where ActNN gave some
    samples 8 bits and most 1.

    Args:
      level: 0 to 5.
      measured: levels 3 to 5: costs by which 1 to 8 bits, 2 on average, are allocated.

    Raises:
      ValueError: another level, or one that `measured` does not apply to; as
        `allocate`.

    Example:
      >>> actnn(2)
      Policy(bits=4, rules=(), recompute=None, default=None)
      >>> actnn(0).default
      Exact()
    """
    texts = {n: text for n, (text, _) in (_FIXED_LEVELS | _SHARED_LEVELS).items()}
    levels = "; ".join(f"{n}: {text}" for n, text in texts.items())
    level = checked_int(
        level, texts, f"actnn({reprlib.repr(level)}): a level is required. {levels}."
    )
    if level in _FIXED_LEVELS:
        if measured is not None:
            raise ValueError(
                f"actnn({level}, measured=...): levels 0 to 2 have fixed bits. Use "
                "level 3, 4 or 5, or gact(bits, measured=...)."
            )
        _, policy = _FIXED_LEVELS[level]
        return policy
    _, action = _SHARED_LEVELS[level]
    base = Policy(default=action(2))
    if measured is None:
        return base
    return allocate(measured, bits=2, ladder=range(1, 9)).policy(base, action)


@written_as("policies.gact(4, measured=measured)")
def gact(bits: float = 4, *, measured: Sensitivity | None = None) -> Policy:
    """GACT's bits (Liu et al. 2022, arXiv:2206.11357).

    Without `measured`, the same bits everywhere: GACT before its first adaptation.
    With it, bits that average `bits` and add the least gradient variance.

    Differences. Any width, not only 1, 2, 4, 8 and 32 bits: the start is `bits`
    rounded up, and a budget of 3 is used in full. Residuals have their keys by path,
    not by call order, so a branch that runs late changes no other key. Scales are
    bfloat16, half of GACT's cost. Adapt with `jaxact.reallocate`, which changes bits
    only where it pays.

    Args:
      bits: per element, on average, without scales and zero points: above 0, at most 8.
      measured: costs by which the bits are allocated; residuals without a row are
        stored at `bits`, rounded up.

    Raises:
      ValueError: bits out of range; as `allocate`.

    Example:
      >>> gact(3.5)
      Policy(bits=4, rules=(), recompute=None, default=None)
    """
    bits = checked_number(
        bits,
        lambda x: 0 < x <= 8,
        f"gact({reprlib.repr(bits)}): bits above 0 and at most 8 are required, such as "
        "2.5. To keep all use Policy(default=Exact()).",
    )
    base = Policy(bits=math.ceil(bits))
    return base if measured is None else allocate(measured, bits=bits).policy(base)


@written_as("policies.division(2)")
def division(bits: int = 2, block: int = 8) -> Policy:
    """DIVISION (Wang et al. 2023, arXiv:2208.04187): block means, and few bits.

    Each residual's means over blocks are stored in bfloat16, the remainder at `bits`.
    It pays for smooth maps: on 56 x 56 maps with normal values whose amplitude at
    frequency f is 1 / f^a, squared errors relative to the values are, at 2 bits::

        a                             0     1      1.5    2
        Quantize(2), 2.1 bits         0.60  0.56   0.48   0.42
        DualPrecision(2), 2.4 bits    0.59  0.36   0.17   0.08

    and nearly the same for both behind a ReLU.

    Differences. Partial blocks at the borders have their own means (DIVISION
    stretches whole ones: a single mean for a 14 x 14 map). Means are stored only
    where they pay; elsewhere zeros stay exact, which subtracted means would spoil.
    Encoding and decoding use the same scale. Any layer is compressed, and a residual
    is stored once for all its readers.

    Args:
      bits: per element of the remainder.
      block: elements averaged, along each averaged axis.

    Example:
      >>> division().default
      DualPrecision(bits=2, block=8, axes=None, group_size=256)
    """
    return Policy(default=DualPrecision(bits, block))


@written_as("policies.acgc(0.1, measured=measured)")
def acgc(e2: float = 0.1, *, measured: Sensitivity | None = None) -> Policy:
    """Bits for a bound on the error, AC-GC's idea (Evans and Aamodt, NeurIPS 2021).

    The gradient's second moment grows at most by the factor 1 + e2, and with it SGD's
    noise floor. With `measured`, the fewest bits with which the variance that all
    residuals together are predicted to add is at most e2 times the squared gradient.
    Without, the same bits everywhere: those with which the noise variance
    R^2 / (6 (2^b - 1)^2) on normal values, in groups of 256 with range R, is at most e2
    times theirs. A weight gradient gets that much from inputs that average out over
    positions; others get more::

        e2     1   0.3   0.1   0.03   0.01   0.001   0.0001
        bits   2     3     4      4      5       7        8

    and bfloat16 down to 3e-6.

    Differences. AC-GC rounds to nearest and bounds the worst case, which asks 6 to 9
    bits more for convolutions (`acgc_worst_case`, `stochastic_bits` here); the theorem
    needs zero-mean errors, which stochastic rounding has. e2 is shared out over all
    residuals, not granted to each. Widths are one per residual, not per channel.

    Args:
      e2: allowed added variance, relative to the squared gradient.
      measured: costs by which the bits are allocated.

    Raises:
      ValueError: e2 is not positive; as `allocate`.

    Example:
      >>> [acgc(e2).bits for e2 in (1, 0.1, 0.01)]
      [2, 4, 5]
    """
    e2 = checked_e2("acgc(", e2)
    bits = next(b for b in ACTIONS if NORMAL_GROUP * levels_variance(b) <= e2)
    base = Policy(bits) if bits <= 8 else Policy(default=ACTIONS[bits])
    if measured is None:
        return base
    return allocate(measured, e2=e2, ladder=(*LADDER, EXACT)).policy(base)


_VERBS = ("device", "offload", "remat", "compress", "compress:BITS")


@written_as("policies.by_name({'mlpwi': 'compress:2'})")
def by_name(actions: Mapping[str, str | Action], bits: int = 4) -> Policy:
    """The policy for named values, as the configurations of MaxText write it.

    Values that no name covers are recomputed, as with
    `jax.checkpoint_policies.save_only_these_names`.

    Args:
      actions: for each name that `jax.ad_checkpoint.checkpoint_name` gave, an action or
        one of these words: "device" keeps the value exactly, "offload" in host memory,
        "remat" recomputes it, "compress" stores it in `bits` bits, "compress:2" in 2.
      bits: for "compress", 1 to 8.

    Raises:
      TypeError: no mapping.
      ValueError: another word; bits out of range.

    Example:
      >>> import jaxact
      >>> policy = jaxact.policies.by_name(
      ...     {"mlpwi": "compress:2", "query_proj": "offload", "out_proj": "remat"}
      ... )
      >>> [(rule.name, rule.action.bits) for rule in policy.rules]
      [('mlpwi', 2), ('query_proj', None)]
    """
    if not isinstance(actions, Mapping):
        raise TypeError(
            f"policies.by_name({reprlib.repr(actions)}): a mapping from names to "
            "actions is required, such as {'mlpwi': 'compress:2'}."
        )
    chosen = {name: _action(name, word, bits) for name, word in actions.items()}
    kept = {n: a for n, a in chosen.items() if not isinstance(a, Recompute)}
    saved = jax.checkpoint_policies.save_only_these_names(*kept)
    rules = tuple(Rule(action, name=name) for name, action in kept.items())
    return Policy(bits, rules=rules, recompute=saved)


def _action(name: str, word: str | Action, bits: int) -> Action:
    if isinstance(word, Action):
        return word
    verb, colon, width = word.partition(":") if isinstance(word, str) else ("", "", "")
    plain = {"device": Exact(), "offload": Offload(Exact()), "remat": Recompute()}
    if verb in plain and not colon:
        return plain[verb]
    if verb == "compress" and (width.isdecimal() or not colon):
        given = int(width) if width else bits
        return Quantize(checked_bits(f"policies.by_name: {name!r}: Quantize", given))
    raise ValueError(
        f"policies.by_name: {name!r} has {word!r}; one of {', '.join(_VERBS)}, or an "
        "action such as jaxact.Quantize(2), is required."
    )
