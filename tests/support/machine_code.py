"""What PTX, the code that NVIDIA's assembler reads, does to numbers."""

import re


def takes_a_number_for_nan(ptx):
    """Whether there is a minimum or maximum of floats that drops NaN.

    `min.f32` of NaN and a number is the number, and `min.NaN.f32` is NaN (PTX ISA).
    Interpreted kernels do not show it.
    """
    return bool(re.search(r"\b(?:min|max)\.(?!NaN)(?:\w+\.)*b?f\d", ptx))
