"""Bits for each residual, from the variance that its rounding adds."""

from jaxact._bits.allocation import Allocation as Allocation
from jaxact._bits.cost import Cost as Cost, Sensitivity as Sensitivity
from jaxact._bits.greedy import allocate as allocate
from jaxact._bits.reallocate import reallocate as reallocate
