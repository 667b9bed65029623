"""Operations that a step computes, and the time predicted for them on a GPU."""

from jaxact._time.flops import count_flops as count_flops
from jaxact._time.predicted import (
    CauseTime as CauseTime,
    PredictedTime as PredictedTime,
    predicted_time as predicted_time,
)
from jaxact._time.roofline import Kernel as Kernel
