"""Sums over windows that a function with a pole is taken of.

Local contrast normalization, a weighted or normalized average, pools by a power or an
exponential. A window's sum divides or scales the window alone, and a group of codes
has windows whose sums have any size: the noise that the largest gives the smallest is
magnified by their ratio, for which no map along axes stands in. With 3 x 3 windows
after a ReLU and an epsilon of 1e-4 it was 0.4 gradients at 8 bits. The values in
such sums stay exact. AlexNet's response norm adds 2, and keeps its memory.
"""

from jaxact._form.chooser import Chooser
from jaxact._form.pole_arguments import arguments_near_poles, is_scaling, pole_in
from jaxact._form.short_norms import bases_behind
from jaxact._jaxpr.read import equations_behind
from jaxact._jaxpr.types import Eqn, Var


def bases_in_windows(chooser: Chooser) -> set[Var]:
    """Bases that sums over windows near a pole are computed from."""
    eqns, exponentials = chooser.jaxpr.eqns, chooser.classes.exponentials
    if not any(map(_is_sum, eqns)):
        return set()
    found = arguments_near_poles(chooser.program)
    near = {*found.bounded, *found.others}
    bases: set[Var] = set()
    for argument in filter(None, (pole_in(eqn)[0] for eqn in eqns)):
        for eqn in equations_behind(argument, chooser.producers, _is_scaling_or_sum):
            x = eqn.invars[0]
            # Exponentials have any size above a bound, too.
            if _is_sum(eqn) and (argument in near or x in exponentials):
                bases |= bases_behind(x, chooser)
    return bases


def _is_sum(eqn: Eqn) -> bool:
    """Whether it adds each channel's windows, also with weights: SSIM's are normal."""
    if eqn.primitive.name == "conv_general_dilated":
        return (
            eqn.params["feature_group_count"]
            == eqn.outvars[0].aval.shape[eqn.params["dimension_numbers"].out_spec[1]]
        )
    return eqn.primitive.name == "reduce_window_sum"


def _is_scaling_or_sum(eqn: Eqn) -> bool:
    return is_scaling(eqn) or _is_sum(eqn)
