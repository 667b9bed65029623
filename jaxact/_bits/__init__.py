"""Bits for each residual, from what its rounding costs."""

from jaxact._bits.allocate import (
    Allocation as Allocation,
    allocate as allocate,
    reallocate as reallocate,
)
from jaxact._bits.cost import Cost as Cost, Sensitivity as Sensitivity
