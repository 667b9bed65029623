"""NumPy twins of the stored formats, written from kernels/README.md.

They import nothing of ours and share no trick with it: bfloat16 neighbours are looked
up in a table of all of them, words are filled code by code.
"""

import math
from typing import NamedTuple

import ml_dtypes
import numpy as np

PATTERNS = np.arange(0x7F80, dtype=np.uint32) << 16  # of the finite positive bfloat16
POSITIVE = PATTERNS.view(np.float32).astype(np.float64)
BF16 = np.unique(np.concatenate([-POSITIVE, POSITIVE]))
NORMAL = 2.0**-126


class Stored(NamedTuple):
    words: np.ndarray
    zero_point: np.ndarray
    scale: np.ndarray


def layout(shape, group_size):
    """(leading axes, row length, groups in a row, elements in a group)."""
    lead, row = list(shape[:-1]), math.prod(shape[-1:])
    while len(lead) > 1 and row < group_size / 2:
        row *= lead.pop()
    while len(lead) > 1 and lead[-1] % 2 == 1:
        num_groups, group = balanced(row, group_size)
        if num_groups * group / max(row, 1) - 1 <= 0.05:
            break
        row *= lead.pop()
    return tuple(lead), row, *balanced(row, group_size)


def balanced(row, group_size):
    """(groups in a row, elements in a group)."""
    num_groups = math.ceil(row / group_size)
    return num_groups, 32 * math.ceil(row / (32 * num_groups)) if num_groups else 32


def fields(bits):
    return [width for width in (8, 4, 2, 1) if bits & width]


def pack(codes, bits):
    """Codes of one group -> words, one code at a time."""
    group, packed, offset = len(codes), [], 0
    for width in fields(bits):
        size = group * width // 32
        words = [0] * size
        for element, code in enumerate(codes):
            part = int(code) >> offset & (1 << width) - 1
            words[element % size] |= part << element // size * width
        packed += words
        offset += width
    return np.array(packed, np.uint32)


def unpack(words, bits):
    group = len(words) * 32 // bits
    codes, offset, start = [0] * group, 0, 0
    for width in fields(bits):
        size = group * width // 32
        for element in range(group):
            word = int(words[start + element % size])
            part = word >> element // size * width & (1 << width) - 1
            codes[element] |= part << offset
        offset, start = offset + width, start + size
    return np.array(codes, np.uint32)


def hash32(x):
    """lowbias32, on uint64 holding 32 bits so that nothing overflows."""
    x = np.asarray(x, np.uint64) & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def content(values, group):
    """Sums of the patterns' high halves over both halves of a group, 7 bits of each."""
    patterns = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64) >> 16
    low, high = patterns[: group // 2].sum(), patterns[group // 2 :].sum()
    return int(low + (high << np.uint64(16))) & 0x7F007F00


def noise(seed, index, zero_point, scale, group, content=0):
    """16 random bits for each element of the group number `index` of an array."""
    own = (int(zero_point) << 16 | int(scale)) ^ content
    key = hash32(int(hash32(seed + 0x9E3779B9 * index)) ^ own)
    hashes = hash32(
        key + np.uint64(0x9E3779B9) * np.arange(group // 2, dtype=np.uint64)
    )
    return np.concatenate([hashes & 0xFFFF, hashes >> 16])


def largest(dtype):
    return min(float(ml_dtypes.finfo(dtype).max), float(np.finfo(np.float32).max))


def metadata(values, bits, dtype):
    """(zero point pattern, scale pattern) of one group of float32 values."""
    limit, steps = largest(dtype), 2**bits - 1
    big = BF16[np.searchsorted(BF16, limit, "right") - 1]
    if np.isnan(values).any():
        return 0x7FC0, 0
    finite = values[np.isfinite(values)].astype(np.float64)
    if len(finite) < len(values):  # infinities leave a sentinel in their place
        lo, hi = min([big, *finite]), max([-big, *finite])
        lo, hi = min(lo, hi), max(lo, hi)
    else:
        lo, hi = finite.min(), finite.max()
    lo, hi = (0.0 if abs(end) < NORMAL else end for end in (lo, hi))
    if lo == hi:
        pattern = int(np.float32(lo).view(np.uint32))
        return pattern >> 16, 0x8000 | (pattern & 0xFFFF) >> 1
    zero = BF16[np.searchsorted(BF16, max(lo, -big), "right") - 1]
    half_range = np.float32(hi / 2) - np.float32(zero / 2)
    exact = float(half_range) * float(np.float32(2 / steps))
    exact = float(np.clip(np.float32(min(exact, big)), np.float32(2.0**-108), big))
    at = np.searchsorted(BF16, exact, "left")
    top = np.float32(zero / 2) + np.float32(BF16[at] / 2 * steps)
    at -= top > limit / 2
    return _bf16_pattern(zero), _bf16_pattern(BF16[at])


def codes(values, zero_point, scale, noise16, bits):
    if zero_point == 0x7FC0:
        return np.zeros(len(values), np.uint32)
    if scale & 0x8000:
        finite = values[np.isfinite(values)]
        is_zero = abs(finite[0]) < NORMAL
        last = 0 if is_zero else int(finite[0].view(np.uint32)) & 1
        return np.full(len(values), last, np.uint32)
    z, s = _from_pattern(zero_point), _from_pattern(scale)
    slope = np.float32(2**17) / s
    top = np.float32((2**bits - 1) * 65536)
    with np.errstate(over="ignore"):  # an infinity is clipped like any large value
        t = (values * np.float32(0.5) - z * np.float32(0.5)) * slope
    fixed = np.rint(np.clip(t, np.float32(0), top)).astype(np.uint64)
    return (fixed + noise16 >> 16).astype(np.uint32)


def encode(x, seed, *, bits, group_size, stochastic=True, is_dithered=False):
    lead, row, num_groups, group = layout(x.shape, group_size)
    with np.errstate(over="ignore"):  # beyond float32 is infinite
        rows = x.astype(np.float32).reshape(-1, row) if row else np.zeros((0, 0))
    words, zero_points, scales = [], [], []
    for index in range(math.prod(lead) * num_groups):
        start = index % num_groups * group
        values = rows[index // num_groups][start : start + group]
        zero_point, scale = metadata(values, bits, x.dtype)
        draws = np.full(group, 0x8000, np.uint64)
        if stochastic:
            own = 0 if is_dithered else content(values, group)
            draws = noise(seed, index, zero_point, scale, group, own)
        real = codes(values, zero_point, scale, draws[: len(values)], bits)
        words.append(pack(np.pad(real, (0, group - len(real))), bits))
        zero_points.append(zero_point)
        scales.append(scale)
    shape = (*lead, num_groups)
    return Stored(
        np.array(words, np.uint32).reshape(*shape, group * bits // 32),
        np.array(zero_points, np.uint16).reshape(shape),
        np.array(scales, np.uint16).reshape(shape),
    )


def decode(stored, *, shape, dtype, bits, group_size):
    lead, row, num_groups, group = layout(shape, group_size)
    out = np.zeros((math.prod(lead), num_groups * group), np.float32)
    each_words = stored.words.reshape(math.prod(lead) * num_groups, group * bits // 32)
    each = zip(each_words, stored.zero_point.flat, stored.scale.flat, strict=True)
    for index, (words, zero_point, scale) in enumerate(each):
        code = unpack(words, bits).astype(np.float32)
        start = index % num_groups * group
        value = decode_group(code, int(zero_point), int(scale))
        out[index // num_groups, start : start + group] = value
    return out[:, :row].reshape(shape).astype(dtype)


def decode_group(code, zero_point, scale):
    if scale & 0x8000:
        pattern = zero_point << 16 | (scale & 0x7FFF) << 1
        return (pattern | code.astype(np.uint32)).astype(np.uint32).view(np.float32)
    half_z, half_s = _from_pattern(zero_point) / 2, _from_pattern(scale) / 2
    return (half_z + half_s * code) * np.float32(2)


def decode_dithered(stored, seed, *, shape, dtype, bits, group_size):
    """Codes less their noise, of which 15 - bits bits count and the middle between."""
    lead, row, num_groups, group = layout(shape, group_size)
    out = np.zeros((math.prod(lead), num_groups * group), np.float32)
    each_words = stored.words.reshape(math.prod(lead) * num_groups, group * bits // 32)
    each = zip(each_words, stored.zero_point.flat, stored.scale.flat, strict=True)
    top = largest(dtype)
    for index, (words, zero_point, scale) in enumerate(each):
        code, zero_point, scale = unpack(words, bits), int(zero_point), int(scale)
        start = index % num_groups * group
        if scale & 0x8000:
            value = decode_group(code, zero_point, scale)
        else:
            interval = 2 ** (bits + 1)  # noise values that count as their middle
            draw = noise(seed, index, zero_point, scale, group).astype(np.float64)
            draw = (draw // interval + 0.5) * interval / 65536
            z, s = _from_pattern(zero_point), _from_pattern(scale)
            with np.errstate(over="ignore"):
                exact = np.float64(z) + np.float64(s) * (code - draw + 0.5)
                value = np.clip(exact.astype(np.float32), -top, top)
        out[index // num_groups, start : start + group] = value
    return out[:, :row].reshape(shape).astype(dtype)


def rounding_variance(x, bits, group_size=256, *, is_dithered=False):
    """Variance s**2 f (1 - f) of each decoded element, f the fraction of its code.

    Of a dithered one s**2 / 12, whatever its fraction.
    """
    _, row, _, group = layout(x.shape, group_size)
    rows = x.astype(np.float32).reshape(-1, row)
    variance = np.zeros(rows.shape)
    for line, start in np.ndindex(len(rows), math.ceil(row / group)):
        part = slice(start * group, (start + 1) * group)
        zero_point, scale = metadata(rows[line, part], bits, np.float32)
        if scale & 0x8000:  # a constant group comes back exactly
            continue
        z, s = float(_from_pattern(zero_point)), float(_from_pattern(scale))
        if is_dithered:
            variance[line, part] = s**2 / 12
            continue
        code = np.clip((rows[line, part] - z) / s, 0, 2**bits - 1)
        fraction = code - np.floor(code)
        variance[line, part] = s**2 * fraction * (1 - fraction)
    return variance.reshape(x.shape)


def stored_bytes(shape, *, bits, group_size):
    lead, _, num_groups, group = layout(shape, group_size)
    return math.prod(lead) * num_groups * (group * bits // 8 + 2 + 2)


def sensitivities(x, group_size):
    """Sum of squared ranges of each sample's groups, in float64."""
    x = x if x.ndim > 1 else x.reshape(1, -1)
    lead, row, num_groups, group = layout(x.shape, group_size)
    rows = x.astype(np.float64).reshape(lead[0], -1, row)
    starts = range(0, row, group)
    ranges = [np.ptp(rows[:, :, i : i + group], -1) for i in starts]
    return (np.array(ranges) ** 2).sum((0, 2))


def allocate(c, total):
    """Bits, each of the rest of `total` to whom it takes most off c / (2**b - 1)**2."""
    bits = np.ones(len(c), int)
    for _ in range(total - len(c)):
        gain = c / (2.0**bits - 1) ** 2 - c / (2.0 ** (bits + 1) - 1) ** 2
        bits[np.argmax(np.where(bits < 8, gain, -1))] += 1
    return bits


def planes_encode(x, seed, *, bits, group_size):
    """Words of bit planes, sample by sample; metadata; bits of each sample."""
    x = x if x.ndim > 1 else x.reshape(1, -1)
    each = allocate(sensitivities(x, group_size), math.floor(bits * len(x)))
    lead, row, num_groups, group = layout(x.shape, group_size)
    words, patterns, index = [], [], 0
    for b, sample in zip(each, x.astype(np.float32), strict=True):
        planes = [[] for _ in range(b)]
        for values in sample.reshape(-1, row):
            for start in range(0, row, group):
                part = values[start : start + group]
                zero, scale = metadata(part, int(b), x.dtype)
                draws = noise(seed, index, zero, scale, group, content(part, group))
                draws = draws[: len(part)]
                code = codes(part, zero, scale, draws, int(b))
                code = np.pad(code, (0, group - len(code)))
                for i, plane in enumerate(planes):
                    plane.append(pack(code >> i & 1, 1))
                patterns.append(zero << 16 | scale)
                index += 1
        words += planes
    shape = (*lead, num_groups)
    words = np.array(words).reshape(1, each.sum(), *shape[1:], group // 32)
    return words, np.array(patterns, np.uint32).reshape(shape), each


def index_pack(x, bits):
    """Integers -> words: groups of 256 where they divide the row, else the row."""
    lead, row, *_ = layout(x.shape, 256)
    group = 256 if row % 256 == 0 else 32 * math.ceil(row / 32)
    num_groups = math.ceil(row / group)
    padded = np.zeros((math.prod(lead), num_groups * group), np.int64)
    padded[:, :row] = x.reshape(math.prod(lead), row)
    words = [pack(codes % 2**bits, bits) for codes in padded.reshape(-1, group)]
    return np.array(words, np.uint32).reshape(*lead, num_groups * group * bits // 32)


def mask_pack(x):
    """Booleans -> words."""
    return index_pack(x, 1)


def _bf16_pattern(value):
    value = value + 0.0  # the table's zero may be negative
    return int(np.float32(value).view(np.uint32)) >> 16


def _from_pattern(u):
    return np.uint32(int(u) << 16).view(np.float32)
