"""Where groups lie in an array.

Groups run along the last axis, so an array sharded over any leading axis, or over the
last one at group boundaries, is encoded where it lies. The leading axes are never
flattened, for the same reason.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxact_kernels.explicit import with_whole_groups
from jaxact_kernels.words import WORD_BITS, whole_words


@dataclasses.dataclass(frozen=True)
class Layout:
    """Rows with `num_groups` groups, each with `group` elements, under the axes `lead`.

    Invariants: `group` is a multiple of 32, so that codes with any number of bits fill
    whole words; every group holds at least one of the row's `length` elements; only a
    row's last group is padded, by fewer than `min(group, 32 * num_groups)` elements; a
    row without elements has no groups.
    """

    lead: tuple[int, ...]
    length: int
    num_groups: int
    group: int

    @property
    def padding(self) -> int:
        """Elements added to a row to fill its last group."""
        return self.num_groups * self.group - self.length

    @property
    def total_groups(self) -> int:
        """Groups in the whole array."""
        return math.prod(self.lead) * self.num_groups

    def with_whole_groups(self, x: jax.Array) -> jax.Array:
        """`x`, cut over Explicit axes between groups alone."""
        return with_whole_groups(
            x, len(self.lead), self.num_groups, is_padded=self.padding > 0
        )

    def split(self, x: jax.Array, fill: float) -> jax.Array:
        """View `x` as `[*lead, num_groups, group]`; padding elements are `fill`."""
        x = self.with_whole_groups(x)
        if x.shape != (*self.lead, self.length):
            x = x.reshape(*self.lead, self.length)
        if self.padding:
            edges = [(0, 0, 0)] * len(self.lead) + [(0, self.padding, 0)]
            x = lax.pad(x, np.asarray(fill, x.dtype), edges)
        return x.reshape(*self.lead, self.num_groups, self.group)

    def join(self, groups: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Undo `split`: drop the padding and return an array with `shape`."""
        rows = groups.reshape(*self.lead, self.num_groups * self.group)
        if self.padding:
            rows = lax.slice_in_dim(rows, 0, self.length, axis=len(self.lead))
        return rows if rows.shape == shape else rows.reshape(shape)

    def is_real(self) -> jax.Array:
        """`bool[*(1, ...), num_groups, group]`, False where an element is padding."""
        shape = (*(1 for _ in self.lead), self.num_groups, self.group)
        group = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 2)
        element = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
        in_last = self.length - (self.num_groups - 1) * self.group
        return (group < np.int32(self.num_groups - 1)) | (element < np.int32(in_last))


def layout_of(shape: tuple[int, ...], group_size: int) -> Layout:
    """Lay groups with at most `group_size` elements over an array with `shape`.

    A row is the last axis. While it is shorter than half a group the axis before it
    joins, except axis 0: that is where batches are sharded. An axis with an odd number
    of elements, which no even number of devices can share, joins also while padding is
    more than 5 % of a row: the 197 tokens of a vision transformer. A scalar is a row
    with one element. Groups in a row are balanced, `32 * ceil(length / (32 *
    num_groups))` elements each: 300 elements become twice 160, not 256 and 44.

    Raises:
        ValueError: `group_size` is not a positive multiple of 32.
    """
    check_group_size(group_size)
    split = max(len(shape) - 1, 0)
    while split > 1 and 2 * math.prod(shape[split:]) < group_size:
        split -= 1
    while split > 1 and shape[split - 1] % 2 and _wastes(shape[split:], group_size):
        split -= 1
    length = math.prod(shape[split:])
    return Layout(tuple(shape[:split]), length, *_balanced(length, group_size))


def _balanced(length: int, group_size: int) -> tuple[int, int]:
    """How many groups a row has, and how many elements each."""
    num_groups = -(-length // group_size)
    longest = -(-length // num_groups) if num_groups else 1
    return num_groups, whole_words(longest)


def _wastes(row: tuple[int, ...], group_size: int) -> bool:
    """Whether padding is more than a twentieth of a row."""
    length = math.prod(row)
    num_groups, group = _balanced(length, group_size)
    return 20 * (num_groups * group - length) > length


def check_group_size(group_size: int) -> None:
    """Raise `ValueError` unless `group_size` is a positive multiple of 32."""
    is_int = isinstance(group_size, int) and not isinstance(group_size, bool)
    if not is_int or group_size <= 0 or group_size % WORD_BITS:
        raise ValueError(
            f"got group_size={group_size!r}; a group must hold a positive multiple of "
            f"{WORD_BITS} elements so that codes of any width fill whole words; pass "
            "for example group_size=256"
        )
