"""Store what a normalization over channels makes of a value, not the raw value.

A group of codes shares one range. Where channels lie inside a group, a channel of small
deviation gets the step of the largest, and the channels' means widen the range further.
The program's own mean and inverse deviation, which are exact, take both out before
encoding and put them back after decoding; the map is affine, so nothing else changes.
On a ResNet at 2 bits it halves the variance of the rounding, in units of xhat.

Statistics of rows need no such care: they are constant inside a group, and so an affine
map that the code's own zero point and scale absorb.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jaxact._jaxpr.primitives import MOVES
from jaxact._jaxpr.read import is_literal, variables_in

_DEVIATIONS = {"rsqrt": False, "sqrt": True}  # is it the deviation, or its inverse


class Normalizations:
    """The normalizations over channels of one program."""

    def __init__(self, jaxpr: Any, makers: dict[Any, Any]) -> None:
        self.makers = makers
        self.users: dict[Any, list[Any]] = {}
        for eqn in jaxpr.eqns:
            for v in variables_in(eqn.invars):
                self.users.setdefault(v, []).append(eqn)

    def of(self, x: Any) -> tuple[Any, Any, bool] | None:
        """(mean, deviation, whether that is inverse) of `x`, one for each channel."""
        shape = x.aval.shape
        if len(shape) < 2 or shape[-1] < 2:
            return None
        for centered, mean in self._products(x, "sub"):
            for name in ("mul", "div"):
                for _, factor in self._products(centered, name):
                    found = self._deviation(factor, shape[-1])
                    if found is not None:
                        return mean, *found
        return None

    def _products(self, x: Any, name: str) -> Iterator[tuple[Any, Any]]:
        """Results of `name` on x and one value for each channel, and that value."""
        todo = [x]
        while todo:
            v = todo.pop()
            for eqn in self.users.get(v, ()):
                if eqn.primitive.name in ("convert_element_type", "name", "copy"):
                    todo.append(eqn.outvars[0])
                elif eqn.primitive.name == name:
                    others = [u for u in eqn.invars if u is not v]
                    if name != "mul" and eqn.invars[0] is not v:
                        continue
                    channel = self._per_channel(others, x.aval.shape)
                    if channel is not None:
                        yield eqn.outvars[0], channel

    def _per_channel(self, others: Sequence[Any], shape: Sequence[int]) -> Any | None:
        """What is broadcast along all axes but the last, if an operand is that."""
        for v in variables_in(others):
            axes: Sequence[int] = range(len(v.aval.shape))
            eqn = self.makers.get(v)
            if eqn is not None and eqn.primitive.name == "broadcast_in_dim":
                v, axes = eqn.invars[0], eqn.params["broadcast_dimensions"]
            if is_literal(v) or v.aval.size != shape[-1]:
                continue
            sizes = zip(axes, v.aval.shape, strict=True)
            if [axis for axis, n in sizes if n > 1] == [len(shape) - 1]:
                return v
        return None

    def _deviation(self, factor: Any, channels: int) -> tuple[Any, bool] | None:
        """The deviation, or its inverse, that a factor of the output is made of."""
        todo, seen = [factor], set()
        while todo:
            v = todo.pop()
            eqn = None if is_literal(v) else self.makers.get(v)
            if eqn is None or v in seen or v.aval.size != channels:
                continue
            seen.add(v)
            name = eqn.primitive.name
            if name in _DEVIATIONS:
                return v, not _DEVIATIONS[name]
            if name == "mul" or name in MOVES:
                todo.extend(eqn.invars)
        return None
