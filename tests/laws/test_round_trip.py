"""What every format promises of one encode and decode, over shapes and values."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from support import oracle
from support.subjects import (
    AFFINE,
    SUBJECTS,
    Affine,
    Dithered,
    Planes,
    every_subject,
    jitted,
    sample,
)

SHAPES = [(), (1,), (257,), (3, 300), (2, 5, 31), (4, 1009), (0,), (0, 5), (5, 0)]
floats = {
    "dtype": st.sampled_from(["float32", "bfloat16", "float16", "float8_e5m2"]),
    "group_size": st.sampled_from([32, 64, 96, 256, 1024]),
}
affine_subjects = st.builds(
    Affine, bits=st.integers(1, 8), stochastic=st.booleans(), **floats
)
dithered_subjects = st.builds(Dithered, bits=st.integers(1, 8), **floats)
planes_subjects = st.builds(
    Planes, bits=st.floats(1, 8), shards=st.integers(1, 4), **floats
)
shapes = st.sampled_from([*SHAPES, (2, 3, 5, 7), (17, 64), (1, 1, 1), (2, 1031)])


def steps_per_element(subject, stored, shape):
    """The stored scale of each element's group."""
    lead, row, num_groups, group = oracle.layout(shape, subject.group_size)
    pattern = np.asarray(stored.metadata) & np.uint32(0xFFFF)
    is_constant = pattern >= 0x8000
    scale = np.where(is_constant, 0, pattern << 16).astype(np.uint32).view(np.float32)
    rows = np.repeat(scale.astype(np.float64), group, -1)
    return rows.reshape(*lead, num_groups * group)[..., :row].reshape(shape)


def check_error(subject, x, seed):
    encode, decode = jitted(subject, x.shape)
    stored = encode(x, seed)
    back = decode(stored)
    assert back.shape == x.shape and back.dtype == x.dtype
    assert sum(part.nbytes for part in stored) == subject.stored_bytes(x.shape)
    exact, back = (np.asarray(a).astype(np.float64) for a in (x, back))
    step = steps_per_element(subject, stored, x.shape)
    # One scale, or half to nearest and with dither, with the 2**-17 of rounding t; the
    # float32 of the arithmetic; and the rounding to the dtype.
    info = ml_dtypes.finfo(subject.dtype)
    bound = step * (subject.most_error + 2**-15)
    bound += abs(exact).max(initial=0) * 2.0**-22
    bound += (abs(exact) + step) * float(info.eps) + float(info.smallest_subnormal)
    assert (abs(back - exact) <= bound).all()


@pytest.mark.thorough
@settings(max_examples=30)  # each compiles
@given(
    affine_subjects | dithered_subjects | planes_subjects,
    shapes,
    st.integers(0, 2**32 - 1),
)
def test_error_is_at_most_one_scale(subject, shape, seed):
    check_error(subject, sample(subject, shape, seed % 1000), np.uint32(seed))


# Scales stay inside the range that a scale can have.
values = st.floats(-(2.0**99), 2.0**99, width=32)
values = values.filter(lambda v: v == 0 or abs(v) > 2.0**-99)


@settings(max_examples=60)
@given(
    st.sampled_from(
        [*(a for a in AFFINE if a.dtype == "float32"), Planes(2.5), Dithered(2)]
    ),
    hnp.arrays(np.float32, (2, 40), elements=values),
    st.integers(0, 2**32 - 1),
)
def test_error_holds_for_any_values(subject, x, seed):
    check_error(subject, jnp.asarray(x), np.uint32(seed))


@every_subject
def test_exact_formats_lose_nothing_and_others_repeat_themselves(subject):
    x = sample(subject, (3, 300), seed=4)
    encode, decode = jitted(subject, x.shape)
    stored = encode(x, np.uint32(9))
    if subject.is_exact:
        np.testing.assert_array_equal(decode(stored), x)
    again = encode(x, np.uint32(9))
    jax.tree.map(np.testing.assert_array_equal, stored, again)


@every_subject
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stored_bytes_are_those_of_the_arrays(subject, shape):
    x = jax.ShapeDtypeStruct(shape, subject.dtype)
    stored = jax.eval_shape(subject.encode, x, jnp.uint32(0))
    nbytes = sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(stored))
    assert nbytes == subject.stored_bytes(shape)


@pytest.mark.parametrize("subject", SUBJECTS[:4] + SUBJECTS[-1:], ids=str)
def test_compiled_memory_is_the_stored_bytes(subject):
    shape = (64, 4096)
    x = jax.ShapeDtypeStruct(shape, subject.dtype)
    seed = jax.ShapeDtypeStruct((), jnp.uint32)
    memory = jax.jit(subject.encode).lower(x, seed).compile().memory_analysis()
    assert memory is not None
    num_outputs = len(jax.tree.leaves(jax.eval_shape(subject.encode, x, seed)))
    table = 8 * num_outputs if num_outputs > 1 else 0  # the tuple's pointers
    assert memory.output_size_in_bytes == subject.stored_bytes(shape) + table
    # Beside it at most 4-bit slots, the fields cut from them, and metadata.
    assert memory.temp_size_in_bytes < x.size * (4 + 3 + 1) / 8
