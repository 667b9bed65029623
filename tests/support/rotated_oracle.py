"""NumPy twin of the rotated format, written from kernels/README.md, group by group.

It shares no code with the library: transforms are recursive, integers are Python's.
"""

import math

import ml_dtypes
import numpy as np

from support import oracle

GOLDEN = 0x9E3779B9
LEVELS = {
    1: [409],
    2: [232, 773],
    3: [125, 387, 688, 1102],
    4: [66, 199, 336, 482, 643, 828, 1059, 1399],
}
EVEN = oracle.BF16[len(oracle.BF16) // 2 % 2 :: 2]  # 0 and bfloat16 whose last bit is 0
STEPS = {5: 771, 6: 426, 7: 233, 8: 126}
ERROR = {1: 0.5708, 2: 0.1331, 3: 0.03578, 4: 0.009592}
ERROR |= {5: 0.003507, 6: 0.001041, 7: 0.0003044, 8: 0.0000877}


def exponent(x):
    """2^e <= x < 2^(e + 1) for a normal x."""
    return math.frexp(float(x))[1] - 1


def hadamard(x):
    if len(x) == 1:
        return x
    a, b = np.split(x, 2)
    return np.concatenate([hadamard(a + b), hadamard(a - b)])


def windows(group):
    size = 2 ** int(math.log2(group))
    if size == group:
        return [slice(0, group)] * 2
    return [slice(0, size), slice(group - size, group)] * 2


def signs(key, number, group):
    width = group // 32
    hashes = [
        int(oracle.hash32(key + GOLDEN * (number * width + w))) for w in range(width)
    ]
    bits = [hashes[e % width] >> e // width & 1 for e in range(group)]
    return np.array([-1 if bit else 1 for bit in bits], np.float32)


def transform(x, window):
    x = x.copy()
    size = window.stop - window.start
    x[window] = hadamard(x[window]) * np.float32(size**-0.5)
    return x


def rotate(x, key):
    for number, window in enumerate(windows(len(x))):
        x = transform(x * signs(key, number, len(x)), window)
    return x


def rotate_back(x, key, scale):
    for number, window in reversed(list(enumerate(windows(len(x))))):
        x = transform(x, window)
        x = x * scale if number == 0 else x
        x = x * signs(key, number, len(x))
    return x


def key_of(seed, index, mean):
    first = int(oracle.hash32(seed + GOLDEN * index))
    return int(oracle.hash32(first ^ mean << 16))


def centre(values, group):
    """(d padded to the group, the mean's bits, p)."""
    finite = values[np.isfinite(values)]
    x = np.clip(values, finite.min(), finite.max())
    p = exponent(abs(x).max())
    v = np.float32(np.float64(x) * 2.0 ** (1 - p))
    total = sum(int(np.rint(np.float64(e) * 65536)) for e in v)
    mean = np.float32(total) * np.float32(2.0**-16 / len(v))
    pattern = (int(mean.view(np.uint32)) + 0x8000) >> 16
    mean = float(oracle._from_pattern(pattern)) * 2.0 ** (p - 1)
    top = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    mean = float(np.clip(mean, -top, top))
    mean = 0.0 if abs(mean) < 2.0**-126 else mean
    d = np.zeros(group, np.float32)
    d[: len(v)] = v - np.float32(mean * 2.0 ** (1 - p))
    return d, oracle._bf16_pattern(mean), p


def sizes(x, e, f):
    return [int(np.rint(np.float64(abs(v)) * 2.0 ** (f - 1 - e))) for v in x]


def level_number(size, deviation, bits, f):
    if bits in LEVELS:
        pairs = zip(LEVELS[bits], LEVELS[bits][1:], strict=False)
        return sum(size > deviation * (a + b) >> 25 - f for a, b in pairs)
    inverse = 2**31 // max(deviation * STEPS[bits], 2**16)
    return min(size * 2 ** (15 - f) * inverse >> 19, 2 ** (bits - 1) - 1)


def level(number, bits):
    return LEVELS[bits][number] if bits in LEVELS else 2 * number + 1


def bits_of_size(group):
    return (31 - math.ceil(math.log2(group))) // 2


def encode_group(d, mean, p, seed, index, bits, dropped):
    """Codes, and the scale's bits."""
    group, f = len(d), bits_of_size(len(d))
    key = key_of(seed, index, mean)
    y = rotate(d, key)
    top = abs(y).max()
    t = max(exponent(top), -60) if top else -60
    each = sizes(y, t, f)
    squares = sum(v * v for v in each)
    deviation = math.isqrt(squares // group * 4 ** (15 - f))
    numbers = [level_number(v, deviation, bits, f) for v in each]
    products = sum(v * level(n, bits) for v, n in zip(each, numbers, strict=True))
    negative = y.view(np.uint32) >> 31
    codes = np.array(numbers, np.uint32) | negative << (bits - 1)
    if products == 0:
        return codes, 0
    up, down = 32 - squares.bit_length(), 32 - products.bit_length()
    shifted = products << down
    quotient = (squares << up) // ((shifted >> 16) + (shifted >> 15 & 1))
    power = t + p - f + down - up - 16
    number = len(windows(group)) * (group // 32)
    draw = int(oracle.hash32(key + GOLDEN * number)) % 2**dropped
    pattern = int(np.float32(quotient).view(np.uint32)) + draw + (power << 23)
    exact = math.log2(quotient) + power
    return codes, pattern >> dropped << dropped - 16 if exact >= -108 else 0


def affine_metadata(values, bits, dtype):
    """Zero point and scale bits, the last 0: rounded down and up."""
    top, even = oracle.largest(dtype), EVEN
    zero = even[np.searchsorted(even, float(values.min()), "right") - 1]
    half = np.float32(values.max() / 2) - np.float32(zero / 2)
    exact = max(half * np.float32(2 / (2**bits - 1)), np.float32(2.0**-108))
    scale = even[np.searchsorted(even, exact, "left")]
    assert zero / 2 + scale / 2 * (2**bits - 1) < top / 2, "outside this twin's range"
    return oracle._bf16_pattern(zero), oracle._bf16_pattern(scale)


def choose(values, d, p, bits, dtype):
    """(is it rotated, zero point with the flag for dither, scale)."""
    finite = values[np.isfinite(values)]
    values = np.clip(values, finite.min(), finite.max())
    zero, scale = affine_metadata(values, bits, dtype)
    z, s = oracle._from_pattern(zero), oracle._from_pattern(scale)
    t = (values * np.float32(0.5) - z * np.float32(0.5)) * (np.float32(2**17) / s)
    fixed = np.rint(np.clip(t, 0, (2**bits - 1) * 65536)).astype(int)
    plain = sum(int(e % 65536) * (65536 - int(e % 65536)) >> 16 for e in fixed)
    dithered = 65536 * len(values) // 12
    e, f = exponent(abs(d).max()), bits_of_size(len(d))
    squares = sum(v * v for v in sizes(d, e, f)) >> 1
    step = np.float32(float(s) * 2.0 ** (1 - p - e))
    least = np.float32(min(dithered, plain)) * np.float32(2.0**-16)
    affine = step * step * least
    factor = np.float32(2 * ERROR[bits] * 4.0 ** (1 - f))
    is_rotated = np.float32(squares) * factor < affine and p >= -87
    return is_rotated, zero | (dithered < plain), scale


def encode(x, seed, *, bits, group_size, is_adaptive):
    lead, row, num_groups, group = oracle.layout(x.shape, group_size)
    rows = x.astype(np.float32).reshape(-1, row)
    words, metadata = [], []
    for index in range(math.prod(lead) * num_groups):
        start = index % num_groups * group
        values = rows[index // num_groups][start : start + group]
        zero, scale = oracle.metadata(values, bits, x.dtype)
        if zero == 0x7FC0 or scale & 0x8000:
            codes = np.zeros(group, np.uint32)
            plain = oracle.codes(values, zero, scale, 0x8000, bits)
            codes[: len(values)] = plain
        else:
            d, mean, p = centre(values, group)
            is_rotated = True
            if is_adaptive:
                is_rotated, zero, scale = choose(values, d, p, bits, x.dtype)
            if is_rotated:
                dropped = 16 + is_adaptive
                codes, scale = encode_group(d, mean, p, seed, index, bits, dropped)
                zero, scale = mean, scale | is_adaptive
            else:
                noise = oracle.noise(seed, index, zero, scale, group)[: len(values)]
                codes = np.zeros(group, np.uint32)
                clean = zero & ~1
                codes[: len(values)] = oracle.codes(values, clean, scale, noise, bits)
        words.append(oracle.pack(codes, bits))
        metadata.append(zero << 16 | scale)
    shape = (*lead, num_groups)
    words = np.array(words, np.uint32).reshape(*shape, group * bits // 32)
    return words, np.array(metadata, np.uint32).reshape(shape)


def decode_group(code, zero, scale, seed, index, bits, is_adaptive):
    if scale & 0x8000:
        return oracle.decode_group(code, zero, scale)
    if is_adaptive and not scale & 1:
        clean = zero & ~1
        if not zero & 1:
            return oracle.decode_group(code, clean, scale)
        draw = oracle.noise(seed, index, zero, scale, len(code)).astype(np.float64)
        interval = 2 ** (bits + 1)
        draw = (draw // interval + 0.5) * interval / 65536
        z, s = oracle._from_pattern(clean), oracle._from_pattern(scale)
        return (np.float64(z) + np.float64(s) * (code - draw + 0.5)).astype(np.float32)
    scale = scale & ~1 if is_adaptive else scale
    magnitude = [level(int(c) & 2 ** (bits - 1) - 1, bits) for c in code]
    sign = np.where(code >> (bits - 1) & 1, -1, 1)
    q = (sign * magnitude).astype(np.float32)
    half = np.float32(oracle._from_pattern(scale) / 2)
    z = rotate_back(q, key_of(seed, index, zero), half)
    return (np.float32(oracle._from_pattern(zero) / 2) + z) * np.float32(2)


def decode(words, metadata, seed, *, shape, dtype, bits, group_size, is_adaptive):
    lead, row, num_groups, group = oracle.layout(shape, group_size)
    out = np.zeros((math.prod(lead), num_groups * group), np.float32)
    top = oracle.largest(dtype)
    each = words.reshape(math.prod(lead) * num_groups, group * bits // 32)
    for index, (packed, pair) in enumerate(zip(each, metadata.flat, strict=True)):
        zero, scale = int(pair) >> 16, int(pair) & 0xFFFF
        code = oracle.unpack(packed, bits)
        value = decode_group(code, zero, scale, seed, index, bits, is_adaptive)
        start = index % num_groups * group
        out[index // num_groups, start : start + group] = np.clip(value, -top, top)
    return out[:, :row].reshape(shape).astype(dtype)
