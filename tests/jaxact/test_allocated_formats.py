"""The format in which an allocation stores a residual at other bits."""

import jax.numpy as jnp
import pytest

from jaxact import (
    Adaptive,
    Cast,
    Cost,
    Dithered,
    PerSample,
    Quantize,
    Sensitivity,
    allocate,
)


@pytest.mark.parametrize(
    "action, allocated",
    [
        (Dithered(4), Dithered(2)),
        (Quantize(4, group_size=64), Quantize(2, group_size=64)),
        (Adaptive(4), Adaptive(2)),
        (PerSample(4.0), Quantize(2)),  # has no bits for each element
        (None, Quantize(2)),  # a formula's
    ],
    ids=str,
)
def test_an_allocation_keeps_the_format_that_was_measured(action, allocated):
    row = Cost("r", 256, 4, 1.0, 1.0, 4, action)
    policy = allocate(Sensitivity((row,), 1.0), bits=2).policy()
    assert [rule.action for rule in policy.rules] == [allocated]
    wide = allocate(Sensitivity((row,), 1.0), bits=16).policy()
    assert [rule.action for rule in wide.rules] == [Cast(jnp.bfloat16)]
