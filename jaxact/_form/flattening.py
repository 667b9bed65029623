"""Give a forward program to the choice of bases as single equations."""

import dataclasses

from jaxact._form.cells import cell_body
from jaxact._form.centered import mix_body
from jaxact._form.largest import with_largest_apart
from jaxact._form.masked import with_masked
from jaxact._form.pooling import pool_body
from jaxact._form.softmax import softmax_body
from jaxact._jaxpr.read import variables_in
from jaxact._jaxpr.rewrite import Body, flatten, inlinable_body, with_held_programs
from jaxact._jaxpr.types import Eqn, Jaxpr
from jaxact._plan.forward import Forward


def flattened(forward: Forward) -> Forward:
    """A forward program with its calls, cells and pools inlined."""

    def body(eqn: Eqn) -> Body | None:
        return _own_body(eqn) or inlinable_body(eqn)

    jaxpr, constants = flatten(forward.jaxpr, body)
    jaxpr = with_held_programs(jaxpr, _without_forms)
    consts = (*forward.consts, *constants)
    own = frozenset(variables_in(jaxpr.outvars[forward.num_outputs :]))
    flat = dataclasses.replace(forward, jaxpr=jaxpr, consts=consts, own=own)
    return with_largest_apart(with_masked(flat))


def _without_forms(_: Eqn, inside: Jaxpr) -> Jaxpr:
    """A program in an equation, with its cells, pools and softmaxes inlined."""
    return with_held_programs(flatten(inside, _own_body)[0], _without_forms)


def _own_body(eqn: Eqn) -> Body | None:
    return cell_body(eqn) or pool_body(eqn) or softmax_body(eqn) or mix_body(eqn)
