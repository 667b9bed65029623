"""The source reads as it is meant to; `python tests/support/measures.py` prints it."""

import pytest

from jaxact._jaxpr.compat import HAS_GENERIC_BATCHING
from support.measures import measure, walk
from test_layout import CORE, KERNELS


@pytest.mark.parametrize("folder", [CORE, KERNELS], ids=["jaxact", "jaxact_kernels"])
def test_words_and_types(folder):
    """Bounds: model code bases have 0 to 7 % Any, 'what' 0 to 0.4 and 'of' 9 to 23."""
    found = measure(folder)
    assert found.any_share <= 0.1
    assert found.per_thousand("what") <= 1
    assert found.per_thousand("of") <= 25
    assert max(found.file_lines) <= 400
    assert max(found.function_lines) <= 60


@pytest.mark.parametrize("backward", [False, True], ids=["forth", "back"])
def test_way_of_a_residual(backward):
    """From `compress` to a packed word, through the passes that alike calls share."""
    longest = 7 if HAS_GENERIC_BATCHING else 8  # else past `_engine/custom_rule.py`
    assert 1 < len(walk(backward=backward)) <= longest
