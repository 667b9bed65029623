"""A ReLU's mask is computed from its output where that is in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.evaluate import evaluate
from jaxact._plan.masks import masks_of_outputs

X = np.array([-2.0, -0.0, 0.0, 1e-45, 3.0, np.inf, -np.inf, np.nan], np.float32)
W = np.eye(8, dtype=np.float32)

# (result, mask)
FROM_OUTPUT = {
    "result": lambda x: (jnp.maximum(x, 0.0), x > 0),
    "mask first": lambda x: (lambda mask: (jnp.maximum(x, 0.0), mask))(x > 0),
    "operand of a product": lambda x: (jnp.maximum(x, 0.0) @ W, x > 0),
    "another threshold": lambda x: (jnp.maximum(x, 1.0), x > 1),
    "from above": lambda x: (jnp.minimum(x, 6.0), x < 6),
}
FROM_OPERAND = {
    "read by a sum": lambda x: (jnp.maximum(x, 0.0).sum(), x > 0),
    "not strict": lambda x: (jnp.maximum(x, 0.0), x >= 0),
    "two thresholds": lambda x: (jnp.maximum(x, 1.0), x > 0),
}


def rewritten(f):
    """The program, and the one that computes masks from outputs."""
    jaxpr, consts = open_jaxpr(jax.make_jaxpr(f)(X))
    return jaxpr, masks_of_outputs(jaxpr, jaxpr.outvars[:1]), consts


def reads_argument(jaxpr):
    (mask,) = [e for e in jaxpr.eqns if e.outvars[0].aval.dtype == bool]
    return mask.invars[0] in jaxpr.invars


@pytest.mark.parametrize("f", FROM_OUTPUT.values(), ids=FROM_OUTPUT)
def test_masks_from_an_output_in_memory(f):
    before, after, consts = rewritten(f)
    assert reads_argument(before) and not reads_argument(after)
    got, want = (evaluate(jaxpr, consts, [X]) for jaxpr in (after, before))
    assert all(
        np.array_equal(a, b, equal_nan=a.dtype != bool)
        for a, b in zip(got, want, strict=True)
    )


@pytest.mark.parametrize("f", FROM_OPERAND.values(), ids=FROM_OPERAND)
def test_other_masks_stay(f):
    _, after, _ = rewritten(f)
    assert reads_argument(after)
