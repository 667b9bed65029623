"""A memory budget in, a policy out; and the largest batch that fits."""

from jaxact._budget.frontier import (
    Frontier as Frontier,
    FrontierPoint as FrontierPoint,
)
from jaxact._budget.max_batch import (
    CompiledBatch as CompiledBatch,
    LargestBatch as LargestBatch,
    LargestBatches as LargestBatches,
    max_batch as max_batch,
)
from jaxact._budget.plan import (
    Plan as Plan,
    PlannedRow as PlannedRow,
    Trial as Trial,
)
from jaxact._budget.planning import plan as plan
