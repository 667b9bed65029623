"""Activation-compressed training for JAX and Flax.

A *policy* chooses a *codec* for each *residual*; `compress` applies it.
"""

from jaxact import policies as policies
from jaxact._bits import (
    Allocation as Allocation,
    Cost as Cost,
    Sensitivity as Sensitivity,
    allocate as allocate,
    reallocate as reallocate,
)
from jaxact._budget import (
    CompiledBatch as CompiledBatch,
    Frontier as Frontier,
    FrontierPoint as FrontierPoint,
    LargestBatch as LargestBatch,
    LargestBatches as LargestBatches,
    Plan as Plan,
    PlannedRow as PlannedRow,
    Trial as Trial,
    max_batch as max_batch,
    plan as plan,
)
from jaxact._codec import (
    Action as Action,
    Adaptive as Adaptive,
    Bias as Bias,
    Bitmask as Bitmask,
    Cast as Cast,
    Codec as Codec,
    Dithered as Dithered,
    DualPrecision as DualPrecision,
    Exact as Exact,
    Offload as Offload,
    PerSample as PerSample,
    Quantize as Quantize,
    Recompute as Recompute,
    Rotated as Rotated,
    Rounded as Rounded,
)
from jaxact._compress import compress as compress
from jaxact._engine.warnings import CompressionWarning as CompressionWarning
from jaxact._measure import (
    NoiseReport as NoiseReport,
    NoiseShare as NoiseShare,
    Telemetry as Telemetry,
    noise_share as noise_share,
    sensitivity as sensitivity,
    telemetry as telemetry,
)
from jaxact._memory import (
    Live as Live,
    LiveArray as LiveArray,
    Memory as Memory,
    live as live,
    memory as memory,
)
from jaxact._policy import Policy as Policy, Rule as Rule
from jaxact._recompute import Checkpoint as Checkpoint
from jaxact._report import (
    ComparedStep as ComparedStep,
    Comparison as Comparison,
    ModuleRow as ModuleRow,
    ModuleTable as ModuleTable,
    ResidualRow as ResidualRow,
    ResidualTable as ResidualTable,
    compare as compare,
    residuals as residuals,
)
from jaxact._residual import Residual as Residual
from jaxact._time import (
    CauseTime as CauseTime,
    Kernel as Kernel,
    PredictedTime as PredictedTime,
    count_flops as count_flops,
    predicted_time as predicted_time,
)
from jaxact._using import using as using

__version__ = "0.1.0"
