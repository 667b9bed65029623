"""Tables of residuals."""

from jaxact._report.by_module import ModuleRow as ModuleRow, ModuleTable as ModuleTable
from jaxact._report.compare import (
    ComparedStep as ComparedStep,
    Comparison as Comparison,
    compare as compare,
)
from jaxact._report.residuals import residuals as residuals
from jaxact._report.table import (
    ResidualRow as ResidualRow,
    ResidualTable as ResidualTable,
)
