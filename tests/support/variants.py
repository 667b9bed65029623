"""Which variants of a test `make test` runs."""

import pytest

thorough = pytest.mark.thorough


def mostly_thorough(values, always):
    """`pytest.param`s: without the mark `thorough` only the values with these names."""
    return [
        pytest.param(v, id=str(v), marks=() if str(v) in always else thorough)
        for v in values
    ]
