"""Tables of residuals."""

from jaxact._report.residuals import (
    ResidualTable as ResidualTable,
    residuals as residuals,
)
