"""Images of an array: values that grow like a power of it, and the sums among them."""

from typing import NamedTuple, TypeAlias

from jaxact._jaxpr.axes import MIXED, moved, multiplied
from jaxact._jaxpr.primitives import CASTS, COPIES, MOVES, SCATTERS
from jaxact._jaxpr.read import contracts, is_square
from jaxact._jaxpr.types import Atom, Eqn, Var

# Results that grow and shrink with an operand: a mask or a weight is in them at most.
GROWING = CASTS | COPIES | frozenset("abs neg mul div max add add_any select_n".split())
# With elements of the operand that are not in the result.
LEAVING_OUT = frozenset("max select_n".split())
# In place of an axis: segments, which are no rows.
_SEGMENT = -1

Axes: TypeAlias = tuple[int, ...]


class Image(NamedTuple):
    """A value that grows like a power of an array.

    Attributes:
      axes: for each of its own the array's axis that it is, or None; or `_SEGMENT`, or
        `MIXED`.
      total: the sum that it is a multiple of; None before elements are added.
      is_partial: whether elements were left out before: by a mask, or a ReLU. No sum
        bounds these, and over one that is small they would be a group's range.
      is_masked: whether by a mask: a row may have one element left.
    """

    variable: Var
    axes: tuple[int | None, ...]
    degree: int
    total: Var | None = None
    is_partial: bool = False
    is_masked: bool = False


def image_in(eqn: Eqn, image: Image) -> Image | None:
    """The image that an equation makes; None where sizes do not go on."""
    v, axes, degree, total, *marks = image
    name, out = eqn.primitive.name, eqn.outvars[0]
    is_same = out.aval.shape == v.aval.shape
    if name == "square" or (name == "integer_pow" and eqn.params["y"] > 0):
        return Image(out, axes, degree * eqn.params.get("y", 2), total, *marks)
    if name in ("add", "add_any") and not any(map(_is_number, eqn.invars)):
        return None  # a residual join
    if name == "div" and eqn.invars[0] is not v:
        return None
    if name in GROWING and is_same:
        return Image(out, axes, degree * (1 + is_square(eqn)), total, *marks)
    if name in ("reduce_sum", "reduce_max"):
        left = [i for k, i in enumerate(axes) if k not in eqn.params["axes"]]
        return Image(out, tuple(left), degree, total or out, *marks)
    if name == "dot_general" and contracts(eqn):
        return _product(eqn, image)
    is_convolved = name == "conv_general_dilated" and eqn.invars[0] is v
    if is_convolved or (name in SCATTERS and eqn.invars[-1] is v):
        segments = (_SEGMENT,) * out.aval.ndim
        return Image(out, segments, degree, total or out, *marks)
    if name in MOVES | {"slice", "dynamic_slice"} and eqn.invars[0] is v:
        return Image(out, moved(eqn, axes), degree, total, *marks)
    return None


def is_by_segment(image: Image) -> bool:
    """Whether these are sums over segments, whose axes are not the array's."""
    return _SEGMENT in image.axes


def has_no_rows(image: Image) -> bool:
    """Whether no axes say which of the array's elements a sum adds.

    Or not in their order, as after a transpose.
    """
    sizes = zip(image.axes, image.variable.aval.shape, strict=True)
    own = [i for i, n in sizes if n > 1 and i is not None]
    return is_by_segment(image) or MIXED in own or own != sorted(own)


def has_weights(image: Image) -> bool:
    """Whether each row has several sums, with weights: no one map divides by them."""
    sizes = zip(image.axes, image.variable.aval.shape, strict=True)
    return any(i is None and n > 1 for i, n in sizes)


def _is_number(v: Atom) -> bool:
    return not v.aval.shape


def is_by_numbers(eqn: Eqn) -> bool:
    """Whether an equation has one array, and numbers beside it: a mean, an epsilon."""
    return sum(not _is_number(v) for v in eqn.invars) == 1


def _product(eqn: Eqn, image: Image) -> Image:
    """A product that sums an array, with weights or with itself."""
    v, axes, degree, total, *marks = image
    left, right = eqn.invars
    labels = multiplied(eqn, 0 if left is v else 1, axes)
    out = eqn.outvars[0]
    degree *= 1 + (left is right)
    return Image(out, labels, degree, total or out, *marks)
