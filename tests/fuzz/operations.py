"""The table of operations that random programs are made of."""

from fuzz import arrays, control, elementwise
from fuzz.operation import Operation

OPERATIONS: dict[str, tuple[Operation, ...]] = {
    "smooth": elementwise.SMOOTH,
    "piecewise": elementwise.PIECEWISE,
    "reductions": arrays.REDUCTIONS,
    "norms": (*arrays.NORMS, *arrays.AFFINE_NORMS),
    "products": arrays.PRODUCTS,
    "images": arrays.IMAGES,
    "moves": arrays.MOVES,
    "loops": control.LOOPS,
    "casts": elementwise.CASTS,
    "spectra": arrays.SPECTRA,
    "complex": elementwise.COMPLEX,
    "linear algebra": control.LINEAR_ALGEBRA,
    "mixed": elementwise.MIXED,
}
