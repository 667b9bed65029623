"""Whether this environment can compile for a GPU that is not attached."""

import functools

import jax
import pytest

from jaxact import memory


@functools.cache
def _missing() -> str:
    try:
        memory(lambda x: x, jax.ShapeDtypeStruct((), "float32"), target="h100")
    except ImportError as error:
        return str(error).splitlines()[0]
    return ""


needs_target = pytest.mark.skipif(bool(_missing()), reason=_missing())
