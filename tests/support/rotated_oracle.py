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
HALF = 0.5  # bits: a code of four bits for eight elements
ONE = 512  # the level of an eight's largest
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


def eleven_bits(x):
    """Integers with 11 significant bits: what float16 holds."""
    return x.astype(np.float16).astype(np.int64)


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
    return np.array([-1 if bit else 1 for bit in bits])


def factors(group, window):
    norms = np.ones(group, np.float32)
    norms[window] = np.float32((window.stop - window.start) ** -0.5)
    return norms


def transform(x, window):
    x = x.copy()
    x[window] = hadamard(x[window])
    return x


def times(x, factor):
    """Integers times float32, rounded as a float32, then to an integer."""
    return np.rint(x.astype(np.float32) * factor).astype(np.int64)


def rotate(x, key, power):
    stages = windows(len(x))
    for number, window in enumerate(stages):
        x = transform(eleven_bits(x) * signs(key, number, len(x)), window)
        shift = power * (number == 0) + 4 * (number == len(stages) - 1)
        x = times(x, factors(len(x), window) * np.float32(2.0**shift))
    return x


def rotate_back(x, key, scale, fraction):
    stages = windows(len(x))
    for number, window in reversed(list(enumerate(stages))):
        x, factor = transform(x, window), factors(len(x), window)
        if number == len(stages) - 1:
            factor = factor * np.float32(2.0**fraction)
        if number:
            x = eleven_bits(times(x, factor)) * signs(key, number, len(x))
    coefficient = np.float32(scale) * (factor * np.float32(2.0**-fraction))
    return x.astype(np.float32) * coefficient * signs(key, 0, len(x)).astype(np.float32)


def key_of(seed, index, mean):
    first = int(oracle.hash32(seed + GOLDEN * index))
    return int(oracle.hash32(first ^ mean << 16))


def step_bits(group):
    return min(14, 23 - math.ceil(math.log2(group)))


def center(values, group):
    """(distances from the mean in steps, padded; the mean's bits; the exponent)."""
    finite = values[np.isfinite(values)]
    lo, hi = np.float32(finite.min()), np.float32(finite.max())
    half = np.float32(0.5)
    middle = lo * half + hi * half
    with np.errstate(over="ignore"):
        beyond = max(abs(lo), abs(hi)) * np.float32(2.0**-8)
        reach = max(hi - middle, middle - lo) + beyond
    top = max(exponent(reach), -100) if np.isfinite(reach) else 128
    power = step_bits(group) - 1 - top
    unit = np.float32(2.0**power)
    steps = np.rint((np.clip(values, lo, hi) - middle) * unit).astype(np.int64)
    above = np.float32(int(steps.sum())) * np.float32(1 / len(steps))
    mean = middle + above * np.float32(2.0**-power)
    pattern = (int(mean.view(np.uint32)) + 0x8000) >> 16
    top = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    mean = np.float32(np.clip(float(oracle._from_pattern(pattern)), -top, top))
    mean = np.float32(0) if abs(mean) < 2.0**-126 else mean
    distances = np.zeros(group, np.int64)
    distances[: len(steps)] = steps - int(np.rint((mean - middle) * unit))
    return distances, oracle._bf16_pattern(float(mean)), power


def sum_of_squares(distances):
    """Of distances with `size_bits` bits."""
    dropped = step_bits(len(distances)) + 1 - bits_of_size(len(distances))
    return sum(int(np.rint(abs(d) / 2**dropped)) ** 2 for d in distances), dropped


def level_number(y, deviation, power, bits):
    y, one = np.float32(abs(y)), np.float32(1)
    if bits in LEVELS:
        scaled = np.float32(deviation) * np.float32(2.0**power)
        pairs = zip(LEVELS[bits], LEVELS[bits][1:], strict=False)
        return sum(y > scaled * (one * (a + b) / 1024) for a, b in pairs)
    inverse = 2**31 // max(deviation * STEPS[bits], 2**15)
    return min(int(y * np.float32(inverse * 2.0 ** (-19 - power))), 2 ** (bits - 1) - 1)


def level(number, bits):
    return LEVELS[bits][number] if bits in LEVELS else 2 * number + 1


def has_eights(group, bits):
    return bits == HALF and group > 32


def largest_codes(y):
    """The code of every eight, and the sum of their largest sizes."""
    codes, total = [], 0
    for b in range(len(y) // 8):
        eight = [int(v) for v in y[b :: len(y) // 8]]
        place = max(range(8), key=lambda p: (abs(eight[p]), p))
        codes.append(2 * place + (eight[place] < 0))
        total += abs(eight[place])
    return np.array(codes, np.uint32), total


def largest_levels(codes):
    levels = np.zeros((8, len(codes)), np.int64)
    for b, code in enumerate(codes):
        levels[code // 2, b] = -ONE if code % 2 else ONE
    return levels.ravel()


def pack(codes, bits, group):
    """Codes in planar words; those of eights have four bits."""
    if not has_eights(group, bits):
        return oracle.pack(codes, max(1, int(bits)))
    words = np.zeros(-(-len(codes) // 8), np.uint32)
    for c, code in enumerate(codes):
        words[c % len(words)] |= np.uint32(code) << np.uint32(4 * (c // len(words)))
    return words


def unpack(words, bits, group):
    if not has_eights(group, bits):
        return oracle.unpack(words, max(1, int(bits)))
    each = range(group // 8)
    return [int(words[c % len(words)]) >> 4 * (c // len(words)) & 15 for c in each]


def bits_of_size(group):
    return (31 - math.ceil(math.log2(group))) // 2


def encode_group(distances, mean, power, seed, index, bits, dropped):
    """Codes, and the scale's bits."""
    group, of_eights = len(distances), has_eights(len(distances), bits)
    bits = max(1, int(bits))
    key = key_of(seed, index, mean)
    squares, short = sum_of_squares(distances)
    length = max(exponent(np.float32(squares)), 0) if squares else 0
    unit = (13 if group <= 1024 else 12) - (length + 2) // 2 - short
    y = rotate(distances, key, unit)
    if of_eights:
        codes, total = largest_codes(y)
        products = ONE * total
    else:
        deviation = math.isqrt(squares // group * 4**short)
        numbers = [level_number(v, deviation, unit + 4, bits) for v in y]
        pairs = zip(y, numbers, strict=True)
        products = sum(abs(int(v)) * level(number, bits) for v, number in pairs)
        codes = np.array(numbers, np.uint32) | (y < 0).astype(np.uint32) << (bits - 1)
    if products == 0 or squares == 0:
        return codes, 0
    up, down = 32 - squares.bit_length(), 32 - products.bit_length()
    shifted = products << down
    quotient = (squares << up) // ((shifted >> 16) + (shifted >> 15 & 1))
    power = unit + 4 - power + 2 * short + down - up - 16
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


def choose(values, distances, power, bits, dtype):
    """(is it rotated, zero point with the flag for dither, scale)."""
    finite = values[np.isfinite(values)]
    values = np.clip(values, finite.min(), finite.max())
    zero, scale = affine_metadata(values, bits, dtype)
    z, s = oracle._from_pattern(zero), oracle._from_pattern(scale)
    t = (values * np.float32(0.5) - z * np.float32(0.5)) * (np.float32(2**17) / s)
    fixed = np.rint(np.clip(t, 0, (2**bits - 1) * 65536)).astype(int)
    plain = sum(int(e % 65536) * (65536 - int(e % 65536)) >> 16 for e in fixed)
    dithered = 65536 * len(values) // 12
    squares, _ = sum_of_squares(distances)
    step = np.float32(float(s) * 2.0**power)
    step = step * np.float32(2.0 ** -(step_bits(len(distances)) + 1))
    least = np.float32(min(dithered, plain)) * np.float32(2.0**-16)
    affine = step * step * least
    factor = np.float32(ERROR[bits] * 4.0 ** -bits_of_size(len(distances)))
    is_rotated = np.float32(squares) * factor < affine
    is_rotated = is_rotated and step_bits(len(distances)) - 1 - power >= -87
    return is_rotated, zero | (dithered < plain), scale


def encode(x, seed, *, bits, group_size, is_adaptive):
    lead, row, num_groups, group = oracle.layout(x.shape, group_size)
    rows = x.astype(np.float32).reshape(-1, row)
    words, metadata = [], []
    for index in range(math.prod(lead) * num_groups):
        start = index % num_groups * group
        values = rows[index // num_groups][start : start + group]
        width = max(1, int(bits))
        zero, scale = oracle.metadata(values, width, x.dtype)
        if zero == 0x7FC0 or scale & 0x8000:
            codes = np.zeros(group, np.uint32)
            plain = oracle.codes(values, zero, scale, 0x8000, width)
            codes[: len(values)] = plain
            if has_eights(group, bits):  # whole words of one bit
                codes = oracle.pack(codes[: -(-group // 64) * 32], 1)
                codes = [int(w) >> 4 * k & 15 for k in range(8) for w in codes]
        else:
            distances, mean, power = center(values, group)
            is_rotated = True
            if is_adaptive:
                found = choose(values, distances, power, bits, x.dtype)
                is_rotated, zero, scale = found
            if is_rotated:
                dropped = 16 + is_adaptive
                codes, scale = encode_group(
                    distances, mean, power, seed, index, bits, dropped
                )
                zero, scale = mean, scale | is_adaptive
            else:
                noise = oracle.noise(seed, index, zero, scale, group)[: len(values)]
                codes = np.zeros(group, np.uint32)
                clean = zero & ~1
                finite = values[np.isfinite(values)]
                values = np.clip(values, finite.min(), finite.max())
                codes[: len(values)] = oracle.codes(values, clean, scale, noise, bits)
        words.append(pack(codes, bits, group))
        metadata.append(zero << 16 | scale)
    shape = (*lead, num_groups)
    words = np.array(words, np.uint32).reshape(*shape, -1)
    return words, np.array(metadata, np.uint32).reshape(shape)


def decode_group(code, zero, scale, seed, index, bits, is_adaptive, group):
    if scale & 0x8000:  # a constant, whose codes are alike
        first = int(code[0]) & 2 ** max(1, int(bits)) - 1
        return oracle.decode_group(np.full(group, first, np.uint32), zero, scale)
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
    if has_eights(group, bits):
        q, most = largest_levels(code), ONE / math.sqrt(8)
    else:
        bits = max(1, int(bits))
        magnitude = [level(int(c) & 2 ** (bits - 1) - 1, bits) for c in code]
        q = np.where(code >> (bits - 1) & 1, -1, 1) * np.array(magnitude)
        most = LEVELS[bits][-1] if bits in LEVELS else 2**bits - 1
    fraction = math.floor(15 - math.log2(most * math.sqrt(group)))
    half = np.float32(oracle._from_pattern(scale) / 2)
    z = rotate_back(q, key_of(seed, index, zero), half, fraction)
    return (np.float32(oracle._from_pattern(zero) / 2) + z) * np.float32(2)


def decode(words, metadata, seed, *, shape, dtype, bits, group_size, is_adaptive):
    lead, row, num_groups, group = oracle.layout(shape, group_size)
    out = np.zeros((math.prod(lead), num_groups * group), np.float32)
    top = oracle.largest(dtype)
    each = words.reshape(math.prod(lead) * num_groups, -1)
    for index, (packed, pair) in enumerate(zip(each, metadata.flat, strict=True)):
        zero, scale = int(pair) >> 16, int(pair) & 0xFFFF
        code = unpack(packed, bits, group)
        options = seed, index, bits, is_adaptive, group
        value = decode_group(code, zero, scale, *options)
        start = index % num_groups * group
        out[index // num_groups, start : start + group] = np.clip(value, -top, top)
    return out[:, :row].reshape(shape).astype(dtype)
