"""Tell parameters, activations and stored residuals apart in a traced program."""

from collections.abc import Sequence

from jaxact._flat import Flat, Kind
from jaxact._jaxpr.flow import Facts, fact_of, union
from jaxact._jaxpr.primitives import PLACEMENTS, VIEWS
from jaxact._jaxpr.read import is_float
from jaxact._jaxpr.types import Atom, Eqn
from jaxact._plan.mark import mark_p

UNKNOWN, ACTIVATION, STORED = 1, 2, 4  # facts about a value
_FACTS = {Kind.PARAMETER: 0, Kind.UNKNOWN: UNKNOWN, Kind.ACTIVATION: ACTIVATION}


def input_facts(flat: Flat) -> list[int]:
    """Integers and keys are never parameters: an embedding is an activation."""
    return [
        _FACTS[kind] if is_float(v) or kind is not Kind.PARAMETER else UNKNOWN
        for kind, v in zip(flat.kinds, flat.invars, strict=True)
    ]


def is_activation(facts: Facts, v: Atom) -> bool:
    """Whether a value is made from more than parameters."""
    return bool(fact_of(facts, v) & ACTIVATION)


def kind_of(facts: int) -> Kind:
    if facts & ACTIVATION:
        return Kind.ACTIVATION
    return Kind.UNKNOWN if facts & UNKNOWN else Kind.PARAMETER


def learn(eqn: Eqn, facts: Sequence[int], around: tuple[Eqn, ...]) -> int:
    """An unknown argument makes activations where it is computed with, not moved.

    Nor where it selects: of weights a branch returns one, or JAX returns them from it.
    """
    if eqn.primitive.name == "cond":
        return union(eqn, facts[1:], around)
    out = union(eqn, facts, around)
    if out & UNKNOWN and eqn.primitive.name not in VIEWS | PLACEMENTS:
        out |= ACTIVATION
    return out | (STORED if eqn.primitive is mark_p else 0)
