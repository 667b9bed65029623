"""The elements that a kernel encodes: those of an array, or normalized from them."""

import dataclasses
from collections.abc import Sequence

import jax

from jaxact_kernels.affine.triton_codes import Tile, to_float32
from jaxact_kernels.along import Along
from jaxact_kernels.block import Block, TileNumber
from jaxact_kernels.normalization import Normalization


@dataclasses.dataclass(frozen=True)
class Elements:
    """Elements in memory, and how they are encoded.

    Attributes:
        shape: of the array.
        normalization: its result is encoded; None: the array itself.
        coefficients: for it, flat.
    """

    block: Block
    x: jax.Ref
    shape: tuple[int, ...]
    normalization: Normalization | None
    coefficients: Sequence[jax.Ref]

    def load(self, k: TileNumber, *, again: bool = False) -> Tile:
        """Those in tile `k`; 0 for each that is padding.

        Loaded `again`, they are not held in registers in between.
        """
        x = self.block.load(self.x, k, again=again)
        if self.normalization is None:
            return x
        layout = self.block.tiles.layout
        along = Along.of(self.shape, self.normalization.axes, layout)
        coefficients = self.block.load_along(self.coefficients, k, along)
        return self.normalization.scaled(to_float32(x), *coefficients)


def operand_refs(
    refs: Sequence[jax.Ref], normalization: Normalization | None
) -> tuple[Sequence[jax.Ref], Sequence[jax.Ref]]:
    """Scalars, and the coefficients behind them."""
    end = len(refs) - (normalization.count if normalization else 0)
    return refs[:end], refs[end:]
