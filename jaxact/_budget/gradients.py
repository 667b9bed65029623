"""The gradients that a step keeps until its backward pass has ended.

An optimizer that updates each weight from its own gradient alone leaves none: XLA does
so as soon as the gradient is there. They are kept where a loop stacks them, and where
an update waits for all, such as one that is clipped by their norm.
"""

import collections
from collections.abc import Sequence

from jaxact._jaxpr.flow import fact_of, flow
from jaxact._jaxpr.labels import module_path, visible
from jaxact._jaxpr.read import is_backward, num_bytes, variables_in
from jaxact._jaxpr.types import Eqn, Jaxpr, Var
from jaxact._residual import is_within

_LOOPS = frozenset(["scan", "while"])


def gradient_bytes(program: Jaxpr, calls: Sequence[str]) -> dict[str, int]:
    """Kept gradients, in bytes, by the key of the call that makes them.

    The key '' is for those made in no call, and for calls that share a path.
    """
    made = _gradients(program)
    waiting = _waiting(program, list(made))
    shared = {key.partition("@")[0] for key in calls if "@" in key}
    paths = sorted(set(calls) - shared - {""}, key=len, reverse=True)
    found: dict[str, int] = collections.defaultdict(int)
    for v, eqn in made.items():
        if v not in waiting and eqn.primitive.name not in _LOOPS:
            continue
        path = visible(module_path(str(eqn.source_info.name_stack)))
        owner = next((key for key in paths if is_within(path, key)), "")
        found[owner] += num_bytes(v)
    return found


def _gradients(program: Jaxpr) -> dict[Var, Eqn]:
    """Results of backward that have an argument's type and are read after it."""
    kind = lambda v: (tuple(v.aval.shape), v.aval.dtype)
    arguments = {kind(v) for v in program.invars}
    read: set[Var] = set()
    for eqn in program.eqns:
        if not is_backward(eqn):
            read.update(variables_in(eqn.invars))
    return {
        v: eqn
        for eqn in program.eqns
        if is_backward(eqn)
        for v in eqn.outvars
        if v in read and kind(v) in arguments
    }


def _waiting(program: Jaxpr, gradients: Sequence[Var]) -> set[Var]:
    """Gradients that are in one result with another one."""
    after = [eqn for eqn in program.eqns if not is_backward(eqn)]
    info = program.debug_info._replace(arg_names=None)
    update = program.replace(
        constvars=[], invars=list(gradients), eqns=after, debug_info=info
    )
    facts = flow(update, [1 << i for i in range(len(gradients))])
    together = 0
    for v in program.outvars:
        bits = fact_of(facts, v)
        if bits.bit_count() > 1:
            together |= bits
    return {v for i, v in enumerate(gradients) if together >> i & 1}
