"""Stored bits must not drift: arrays packed once and kept, one file per format.

A stored format may change only on purpose. Then write the files again, from the
repository root, and say so in the changelog:

    PYTHONPATH=.:kernels:tests python tests/test_golden.py
"""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from support.subjects import (
    Affine,
    Dithered,
    Index,
    Mask,
    Planes,
    Rotated,
    jitted,
    sample,
)

FOLDER = pathlib.Path(__file__).parent / "golden"
SUBJECTS = [
    *(Affine(bits, group_size=64) for bits in range(1, 9)),
    Affine(4, "float16", 32, stochastic=False),
    *(Dithered(bits, group_size=64) for bits in (1, 2, 8)),
    *(Rotated(bits, group_size=64) for bits in (0.5, 1, 2, 3, 4, 8)),
    Rotated(2, group_size=96),
    Rotated(2, group_size=64, is_adaptive=True),
    Planes(2.5, group_size=64),
    Mask(),
    Index(3),
    Index(7, "uint8"),
]
SEED = np.uint32(20240607)


def values(subject):
    """Two groups a row and padding; a constant, an infinity and a NaN among them."""
    x = sample(subject, (5, 100), seed=11)
    if not isinstance(subject, Affine | Dithered | Planes | Rotated):
        return x
    dtype = jnp.dtype(subject.dtype).type
    x = x.at[1].set(dtype(1 / 3)).at[2, 7].set(dtype(np.inf))
    return x.at[3, 80].set(dtype(np.nan)).at[4].set(jnp.maximum(x[4], dtype(0)))


def pack(subject, x):
    """The arrays to keep: what is stored, by name, and what it decodes to."""
    encode, decode = jitted(subject, x.shape)
    stored = encode(jnp.asarray(x), SEED)
    parts = {"words": stored} if subject.is_exact else stored._asdict()
    return {"decoded": decode(stored), **parts}


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_the_bits_are_those_kept(subject):
    with np.load(FOLDER / f"{subject}.npz") as kept:
        packed = pack(subject, kept["x"])
        assert packed.keys() | {"x"} == set(kept.files)
        for name, got in packed.items():
            np.testing.assert_array_equal(got, kept[name], err_msg=name)


def write():
    for subject in SUBJECTS:
        x = values(subject)
        arrays = {"x": x, **pack(subject, x)}
        kept = {name: np.asarray(array) for name, array in arrays.items()}
        np.savez_compressed(FOLDER / f"{subject}.npz", allow_pickle=False, **kept)


if __name__ == "__main__":
    write()
