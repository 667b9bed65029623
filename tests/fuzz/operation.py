"""An operation of a random program.

An operation is a Python expression with holes. Its operand `{x}` is a value of the
program; it is constrained only so that JAX's own gradient is finite and
well-conditioned: `jnp.log` gets a positive number, a solver a matrix far from singular.
Nothing here knows how compression works.
"""

import dataclasses
from collections.abc import Callable

Shape = tuple[int, ...]


def any_shape(shape: Shape) -> bool:
    return True


@dataclasses.dataclass(frozen=True)
class Operation:
    """An expression of one program value, or of several.

    Attributes:
      code: the expression. Holes: `{x}` the operand; `{y}` another value of its shape,
        perhaps itself; `{u}` any other real value; `{w}`, `{v}` new parameters; `{n}`,
        `{m}` the last and last but one axis of `{x}`; `{lead}` its first axis;
        `{shape}` its shape; `{s}` a number between -2 and 2, not near 0.
      takes: whether the shape of `{x}` will do.
      w, v: the shapes of the new parameters, from that of `{x}`.
      is_complex: the operand is complex; else it is real.
    """

    code: str
    takes: Callable[[Shape], bool] = any_shape
    w: Callable[[Shape], Shape] | None = None
    v: Callable[[Shape], Shape] | None = None
    is_complex: bool = False


def expressions(codes: str, **needs) -> tuple[Operation, ...]:
    return tuple(Operation(c.strip(), **needs) for c in codes.splitlines() if c.strip())


def rank(low: int, high: int = 9) -> Callable[[Shape], bool]:
    """Shapes with so many axes."""
    return lambda shape: low <= len(shape) <= high


def image(shape: Shape) -> bool:
    return len(shape) == 4 and min(shape[1:3]) >= 4


def wide(shape: Shape) -> bool:
    return len(shape) >= 2 and shape[-1] >= 8


def even(shape: Shape) -> bool:
    return len(shape) >= 2 and shape[-1] % 4 == 0


def matrix(shape: Shape) -> bool:
    return len(shape) in (2, 3) and 4 <= shape[-2] <= 16 and shape[-1] >= 4


def long(shape: Shape) -> bool:
    return len(shape) >= 2 and shape[0] >= 4


def last_to_last(shape: Shape) -> Shape:
    return (shape[-1], shape[-1])


def per_channel(shape: Shape) -> Shape:
    return (shape[-1],)
