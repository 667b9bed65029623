"""Split a call into outputs that may share one derivative rule.

Needed before JAX 0.12, where vmap maps all outputs of a rule if it maps one.
"""

import dataclasses
from collections.abc import Callable, Sequence

from jaxact._decision import Decision
from jaxact._flat import Flat, Kind
from jaxact._jaxpr.compat import HAS_GENERIC_BATCHING
from jaxact._jaxpr.flow import fact_of, flow, union
from jaxact._jaxpr.read import is_float, variables_in
from jaxact._jaxpr.rewrite import prune


def when_all(
    parts: int, report: Callable[[Sequence[Decision]], None]
) -> Callable[[Sequence[Decision]], None]:
    """Report the decisions for all parts together, once."""
    reported: list[Sequence[Decision]] = []

    def collect(decisions: Sequence[Decision]) -> None:
        reported.append(decisions)
        if len(reported) == parts:
            report([decision for part in reported for decision in part])

    return collect


def independent_outputs(flat: Flat) -> list[list[int]]:
    """Groups whose outputs may share one derivative rule.

    Before 0.12 vmap maps an output that ignores the mapped argument too, and then
    refuses it where `out_axes` is None. Outputs that depend on different arguments get
    separate rules there: for a block that returns its activations and a penalty on its
    weights, for two towers in one call.
    """
    num_outputs = len(flat.jaxpr.outvars)
    if HAS_GENERIC_BATCHING or num_outputs < 2:
        return [list(range(num_outputs))]
    bits = [
        0 if kind is Kind.PARAMETER else 1 << owner
        for kind, owner in zip(flat.kinds, flat.owners, strict=True)
    ]
    facts = flow(flat.jaxpr, bits, union)
    groups: dict[int, list[int]] = {}
    exact = []
    for number, v in enumerate(flat.jaxpr.outvars):
        group = groups.setdefault(fact_of(facts, v), []) if is_float(v) else exact
        group.append(number)
    first = next(iter(groups.values()), None)
    if first is None or not has_rule(flat, exact):
        return [*groups.values(), exact]
    first.extend(exact)
    return [sorted(group) for group in groups.values()]


def has_rule(flat: Flat, numbers: Sequence[int]) -> bool:
    """Whether these outputs have a derivative rule.

    Before 0.12 integers that differ between the devices of a `shard_map` cannot: the
    type of their tangents, float0, does not say that these differ.
    """
    outputs = [flat.jaxpr.outvars[i] for i in numbers]
    if HAS_GENERIC_BATCHING or any(map(is_float, outputs)):
        return True
    return not any(v.aval.manual_axis_type.varying for v in variables_in(outputs))


def select_outputs(flat: Flat, numbers: Sequence[int]) -> Flat:
    """`flat` with only the given outputs; side effects go with the first output."""
    selected = [flat.jaxpr.outvars[i] for i in numbers]
    if len(selected) == len(flat.jaxpr.outvars):
        return flat
    jaxpr = prune(flat.jaxpr, selected, effects=0 in numbers)
    places = {output: i for i, output in enumerate(numbers)}
    carried = tuple((v, places[o]) for v, o in flat.carried if o in places)
    returned = flat.returned and tuple(places[o] for o in flat.returned if o in places)
    return dataclasses.replace(flat, jaxpr=jaxpr, carried=carried, returned=returned)
