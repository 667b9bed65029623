"""The noise that rounding adds to gradients, measured on the user's own program.

`sensitivity` tries: it rounds one residual at a time and compares whole gradients.
`telemetry` reads it off a training step while that runs. Both trace the user's
function, find the compressed calls in it (`replace_calls.py`) and evaluate those with
an instrument that stores the residuals (`instrument.py`).
"""

from jaxact._measure.noise_share import (
    NoiseShare as NoiseShare,
    noise_share as noise_share,
)
from jaxact._measure.sensitivity import sensitivity as sensitivity
from jaxact._measure.telemetry import (
    NoiseReport as NoiseReport,
    Telemetry as Telemetry,
    telemetry as telemetry,
)
