"""Predictions for programs that are written by hand, as optimized HLO."""

from jaxact import Memory, PredictedTime
from jaxact._memory.targets import TARGETS
from jaxact._time.hlo import parse
from jaxact._time.roofline import timed_kernels

LAUNCH = 2e-6  # seconds


def of(text, target="h100"):
    gpu = TARGETS[target]
    memory = Memory(0, 0, 0, 0, gpu.name)
    return PredictedTime(timed_kernels(parse(text), gpu), memory)
