"""A memory budget in, a policy out; and the largest batch that fits."""

from jaxact._budget.plan import (
    FrontierPoint as FrontierPoint,
    Plan as Plan,
    PlannedRow as PlannedRow,
    Trial as Trial,
)
from jaxact._budget.planning import plan as plan
