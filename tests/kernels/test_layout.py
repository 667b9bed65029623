"""Where groups lie: balanced, along the last axis, leading axes as they are."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jaxact_kernels.layout import Layout, layout_of
from support import oracle

CASES = [
    # shape, group size -> leading axes, row length, groups in a row, group
    ((8, 512, 2048), 256, (8, 512), 2048, 8, 256),
    ((4, 300), 256, (4,), 300, 2, 160),
    ((4, 257), 256, (4,), 257, 2, 160),
    ((4, 5), 256, (4,), 5, 1, 32),
    ((8, 14, 14, 64), 256, (8, 14), 896, 4, 224),
    ((8, 14, 14, 128), 256, (8, 14, 14), 128, 1, 128),
    ((8, 3, 3, 3), 256, (8,), 27, 1, 32),
    ((1000,), 64, (), 1000, 16, 64),
    ((64, 12, 197, 197), 256, (64, 12), 38809, 152, 256),  # padded to 224 otherwise
    ((64, 12, 64, 197), 256, (64, 12, 64), 197, 1, 224),  # 64 can be sharded
    ((64, 197, 197), 256, (64,), 38809, 152, 256),
    ((8, 5, 250), 256, (8, 5), 250, 1, 256),  # 2.4 %
    ((197, 197), 256, (197,), 197, 1, 224),  # never axis 0
    ((), 256, (), 1, 1, 32),
    ((0,), 256, (), 0, 0, 32),
    ((0, 5), 256, (0,), 5, 1, 32),
    ((5, 0), 256, (5,), 0, 0, 32),
]
shapes = st.lists(st.integers(0, 700), max_size=4).map(tuple)
group_sizes = st.integers(1, 32).map(lambda k: 32 * k)


@pytest.mark.parametrize("shape, group_size, lead, length, num_groups, group", CASES)
def test_cases(shape, group_size, lead, length, num_groups, group):
    assert layout_of(shape, group_size) == Layout(lead, length, num_groups, group)


@given(shapes, group_sizes)
def test_invariants(shape, group_size):
    layout = layout_of(shape, group_size)
    fields = (layout.lead, layout.length, layout.num_groups, layout.group)
    assert fields == oracle.layout(shape, group_size)
    assert math.prod(layout.lead) * layout.length == math.prod(shape)
    assert layout.lead == shape[: len(layout.lead)]
    assert layout.lead or len(shape) < 2  # axis 0 stays a leading axis
    assert layout.group % 32 == 0 and layout.group <= group_size
    assert 0 <= layout.padding < max(1, min(layout.group, 32 * layout.num_groups))


@pytest.mark.parametrize("shape", [(3, 70), (2, 3, 5), (), (7,), (2, 64), (0, 3)])
def test_join_undoes_split(shape):
    x = jnp.arange(math.prod(shape), dtype=jnp.float32).reshape(shape)
    layout = layout_of(shape, 32)
    groups = layout.split(x, -1)
    assert groups.shape == (*layout.lead, layout.num_groups, layout.group)
    assert int((groups == -1).sum()) == layout.padding * math.prod(layout.lead)
    np.testing.assert_array_equal(layout.join(groups, shape), x)


def test_is_real_finds_the_padding():
    layout = layout_of((2, 70), 32)  # 96 places in 3 groups
    groups = layout.split(jnp.ones((2, 70)), 0)
    real = jnp.broadcast_to(layout.is_real(), (2, 3, 32))
    np.testing.assert_array_equal(real, groups == 1)


def test_aligned_rows_are_only_cut():
    layout = layout_of((4, 8, 512), 256)
    jaxpr = jax.make_jaxpr(lambda x: layout.split(x, 0))(jnp.ones((4, 8, 512)))
    assert [str(eqn.primitive) for eqn in jaxpr.eqns] == ["reshape"]


@pytest.mark.parametrize("group_size", [0, -32, 31, 100, 64.0, True])
def test_refuses_other_group_sizes(group_size):
    with pytest.raises(ValueError, match="positive multiple of 32"):
        layout_of((8, 8), group_size)
