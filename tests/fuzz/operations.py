"""The table of operations that random programs are made of.

An operation is a Python expression with holes. Its operand `{x}` is a value of the
program; it is constrained only so that JAX's own gradient is finite and
well-conditioned: `jnp.log` gets a positive number, a solver a matrix far from singular.
Nothing here knows how compression works.
"""

import dataclasses
from collections.abc import Callable

Shape = tuple[int, ...]


def _any_shape(shape: Shape) -> bool:
    return True


@dataclasses.dataclass(frozen=True)
class Operation:
    """An expression of one program value, or of several.

    Attributes:
      code: the expression. Holes: `{x}` the operand; `{y}` another value of its shape,
        perhaps itself; `{u}` any other real value; `{w}`, `{v}` new parameters; `{n}`,
        `{m}` the last and last but one axis of `{x}`; `{lead}` its first axis;
        `{shape}` its shape; `{s}` a number between -2 and 2, not near 0.
      takes: whether the shape of `{x}` will do.
      w, v: the shapes of the new parameters, from that of `{x}`.
      is_complex: the operand is complex; else it is real.
    """

    code: str
    takes: Callable[[Shape], bool] = _any_shape
    w: Callable[[Shape], Shape] | None = None
    v: Callable[[Shape], Shape] | None = None
    is_complex: bool = False


def _all(codes: str, **needs) -> tuple[Operation, ...]:
    return tuple(Operation(c.strip(), **needs) for c in codes.splitlines() if c.strip())


def rank(low: int, high: int = 9) -> Callable[[Shape], bool]:
    """Shapes with so many axes."""
    return lambda shape: low <= len(shape) <= high


def _image(shape: Shape) -> bool:
    return len(shape) == 4 and min(shape[1:3]) >= 4


def _wide(shape: Shape) -> bool:
    return len(shape) >= 2 and shape[-1] >= 8


def _even(shape: Shape) -> bool:
    return len(shape) >= 2 and shape[-1] % 4 == 0


def _matrix(shape: Shape) -> bool:
    return len(shape) in (2, 3) and 4 <= shape[-2] <= 16 and shape[-1] >= 4


def _long(shape: Shape) -> bool:
    return len(shape) >= 2 and shape[0] >= 4


def _last_to_last(shape: Shape) -> Shape:
    return (shape[-1], shape[-1])


def _per_channel(shape: Shape) -> Shape:
    return (shape[-1],)


SMOOTH = _all("""
    jnp.tanh({x})
    jnp.exp({x} * 0.5)
    jnp.exp({s} * {x})
    jnp.exp(-{x} * {x})
    jnp.exp2({x} * 0.5)
    jnp.expm1({x} * 0.5)
    jnp.log(0.5 + {x} * {x})
    jnp.log(jnp.abs({x}) + 1e-1)
    jnp.log1p({x} * {x})
    jnp.log2(1 + {x} ** 2)
    jnp.sqrt({x} * {x} + 0.5)
    lax.rsqrt({x} * {x} + 0.5)
    jnp.cbrt({x} * {x} + 0.5)
    jnp.sin({x})
    jnp.cos({s} * {x})
    jnp.tan(jnp.tanh({x}))
    jnp.arcsin(0.9 * jnp.tanh({x}))
    jnp.arccos(0.9 * jnp.sin({x}))
    jnp.arctan({x})
    jnp.arctan2({x}, {y} * {y} + 1)
    jnp.sinh(0.5 * {x})
    jnp.cosh(0.5 * {x})
    jnp.arcsinh({x})
    jnp.arccosh(1.5 + {x} * {x})
    jnp.arctanh(0.9 * jnp.tanh({x}))
    jnp.square({x})
    {x} ** 3 * 0.2
    (1 + {x} ** 2) ** -1.5
    jnp.power(jnp.abs({x}) + 0.1, 1.5)
    jnp.power(jnp.abs({x}) + 0.3, 0.5 + 0.1 * {y})
    jnp.reciprocal(1 + {x} * {x})
    {x} / (1 + jnp.abs({y}))
    1 / (1 + jnp.exp(-{x}))
    jnp.logaddexp({x}, {y})
    jnp.logaddexp({x}, 0.0)
    jnp.logaddexp2({x}, {y})
    jnp.hypot({x}, {y} * {y} + 0.5)
    jnp.sinc({x} * 0.3)
    lax.erf({x})
    jax.scipy.special.erfc({x})
    jax.scipy.special.erfinv(0.9 * jnp.tanh({x}))
    jax.scipy.special.ndtr({x})
    jax.scipy.special.log_ndtr({x})
    jax.scipy.special.gammaln(1.5 + {x} * {x})
    jax.scipy.special.digamma(2.0 + {x} * {x})
    jax.scipy.special.logit(0.5 + 0.4 * jnp.tanh({x}))
    jax.scipy.special.i0e({x})
    jax.scipy.special.i1e({x})
    jax.scipy.special.entr(jnp.exp(-jnp.abs({x})))
    jax.scipy.special.xlogy(jnp.abs({x}), 0.1 + {y} * {y})
    jax.scipy.special.xlogy(jax.nn.relu({x}), jax.nn.relu({x}) + ({x} <= 0))
    jax.scipy.special.xlog1py({x}, {y} * {y})
    jax.scipy.special.xlog1py(jax.nn.relu({x}), jax.nn.relu({x}))
    jax.scipy.special.rel_entr(jax.nn.softmax({x}, -1), jax.nn.softmax({y}, -1))
    jax.scipy.special.kl_div(jax.nn.sigmoid({x}), 0.1 + jax.nn.sigmoid({y}))
    jax.nn.gelu({x})
    jax.nn.gelu({x}, approximate=False)
    jax.nn.silu({x})
    jax.nn.sigmoid({x})
    jax.nn.softplus({x})
    jax.nn.elu({x})
    jax.nn.selu({x})
    jax.nn.celu({x})
    jax.nn.mish({x})
    jax.nn.log_sigmoid({x})
    jax.nn.soft_sign({x})
    jax.nn.squareplus({x})
    {x} * {y}
    {x} * {x}
    {x} * jax.nn.sigmoid({s} * {x})
    {x} * jax.nn.sigmoid({y})
    {x} + {y}
    {x} - {s} * {y}
    {s} * {x} + 0.5
    {x} * jnp.exp(-{y} * {y})
    jnp.where({x} > 0, jnp.log1p(jnp.abs({x})), jnp.expm1(0.5 * jnp.minimum({x}, 0)))
    jnp.where({x} > 0.1, jnp.sqrt(jnp.where({x} > 0.1, {x}, 1.0)), {y})
    {x} / jnp.sqrt(1e-2 + {x} * {x})
    ({x} + 1e3) - 1e3
    softcap({x}, 3.0)
    tanh_of({x})
    safe_log({x})
    ratio({x}, 0.2 + {y} * {y})
    ratio(jax.nn.relu({x}), jax.nn.relu({x}) + ({x} <= 0))
    clipped_gradient({x})
    swish_from_output({x})
    scaled_gradient({x}, {y})
    straight_through_round({x})
    jnp.tanh({x} * 1e-3) * 1e3
    lax.integer_pow({x}, 4) * 0.1
""")

PIECEWISE = _all("""
    jax.nn.relu({x})
    jax.nn.relu6({x} * 3)
    jax.nn.leaky_relu({x})
    jax.nn.hard_tanh({x})
    jax.nn.hard_sigmoid({x})
    jax.nn.hard_silu({x})
    jnp.abs({x})
    jnp.maximum({x}, {y})
    jnp.maximum({x}, 0.0)
    jnp.minimum({x}, {y})
    jnp.minimum({x}, jnp.round({x}))
    jnp.maximum(jnp.round({x}), jnp.round({y}))
    jnp.clip({x}, -0.5, 1.0)
    jnp.clip({x}, -1.0, jnp.abs({y}))
    lax.clamp(-1.0, {x}, 1.0) if {x}.dtype == jnp.float32 else {x}
    jnp.clip(jnp.round({x}), -1, 1) + {x}
    jnp.where({x} > {y}, {x}, {y} * 0.5)
    jnp.where({x} > 0, {x} * {x}, -{x})
    jnp.where(jnp.arange({n}) % 3 == 0, {x}, 0.0)
    lax.select({x} > 0, {x}, {y})
    jnp.sign({x}) * {x}
    jnp.sign({x}) + {y}
    jnp.floor({x}) + {x}
    jnp.round({x} * 4) / 4 * {x}
    {x} - jnp.trunc({x})
    jnp.mod({x}, 1.5)
    jnp.fmod({x}, 1.5)
    {x} * ({x} > 0)
    {x} * ({x} > 0).astype({x}.dtype) * {y}
    lax.stop_gradient({x}) * {y}
    {x} + lax.stop_gradient(jnp.round({x}) - {x})
    jnp.heaviside({x}, 0.5) * {y}
    jnp.nan_to_num({x})
    jnp.copysign({x}, {y}) if {x}.dtype == jnp.float32 else {x}
    jnp.select([{x} < -0.5, {x} < 0.5], [-{x}, {y}], {x} * 2)
    jnp.piecewise({x}, [{x} < 0, {x} >= 0], [lambda t: t * 0.1, lambda t: t])
    {x} * (jnp.arange({n}) % 2 == 0)
    jnp.where(jnp.isfinite({x}), {x}, 0)
""")

REDUCTIONS = _all(
    """
    {x}.sum(-1)
    {x}.mean(0)
    {x}.mean(-1, keepdims=True)
    {x}.sum(0, keepdims=True) + {x}
    {x}.var(-1)
    {x}.std(-1, keepdims=True) * {x}
    {x}.max(-1)
    {x}.min(0)
    {x} - {x}.max(-1, keepdims=True)
    jnp.prod(1 + 0.05 * jnp.tanh({x}), -1)
    jnp.linalg.norm({x}, axis=-1)
    {x} / (jnp.linalg.norm({x}, axis=-1, keepdims=True) + 1e-2)
    jnp.sqrt(({x} ** 2).mean(-1) + 1e-3)
    jax.nn.logsumexp({x}, -1)
    jax.nn.logsumexp({x}, 0, keepdims=True) - {x}
    jnp.median({x}, -1)
    jnp.quantile({x}, 0.3, axis=-1)
    jnp.ptp({x}, -1)
    jnp.average({x}, -1, jnp.arange(1, {n} + 1) / {n})
    jnp.average({x}, -1, jax.nn.sigmoid({x}))
    jnp.take_along_axis({x}, jnp.argmax({x}, -1, keepdims=True), -1)
    jnp.nanmean({x}, -1)
    jnp.cumsum({x}, 0) * 0.3
    jnp.cumsum({x}, -1) * 0.2
    jnp.cumprod(1 + 0.1 * jnp.tanh({x}), -1)
    lax.cummax({x}, axis=0)
    lax.cummin({x}, axis={x}.ndim - 1)
    lax.cumlogsumexp({x}, axis=0)
    lax.cumsum({x}, axis=0, reverse=True) * 0.3
    lax.associative_scan(jnp.add, {x}) * 0.3
    lax.associative_scan(jnp.maximum, {x})
    lax.associative_scan(affine_pair, (0.9 * jnp.tanh({x}), {y}))[1]
    jnp.diff({x}, axis=-1)
    jnp.trapezoid({x}, dx=0.1, axis=-1)
    lax.reduce({x}, jnp.zeros((), {x}.dtype), lax.add, (0,))
    jnp.corrcoef({x}.reshape({lead}, -1)[:4] + 0.1 * jnp.eye(4, {x}.size // {lead}))
    jnp.argmax({x}, -1).astype(jnp.float32)[..., None] * 0.1 + {x}
    """,
    takes=_long,
)

NORMS = _all(
    """
    jax.nn.softmax({x}, -1)
    jax.nn.softmax({x}, 0)
    jax.nn.softmax({x} * 3, -1)
    jax.nn.log_softmax({x}, -1)
    jax.nn.log_softmax({x} * {s}, 0)
    jnp.exp({x}) / jnp.exp({x}).sum(-1, keepdims=True)
    jnp.exp({x} - {x}.max(-1, keepdims=True))
    jax.nn.softmax({x}, -1) * {y}
    jax.nn.softmax(jnp.where({x} > -1, {x}, -1e9), -1)
    jax.nn.softmax({x}, -1, where={x} > -1)
    jax.nn.standardize({x})
    -jnp.log(jax.nn.softmax({x}, -1) + 1e-9)
    -(jax.nn.softmax({x}, -1) * jax.nn.log_softmax({x}, -1)).sum(-1)
    -(jax.nn.one_hot(jnp.arange({lead}) % {n}, {n})[..., 0:1] * jnp.log(1e-3 + {x} ** 2))
    ({x} - {x}.mean(-1, keepdims=True)) * lax.rsqrt({x}.var(-1, keepdims=True) + 1e-3)
    ({x} - {x}.mean(-1, keepdims=True)) / jnp.sqrt({x}.var(-1, keepdims=True) + 1e-3)
    ({x} - {x}.mean(-1, keepdims=True)) / ({x}.std(-1, keepdims=True) + 1e-2)
    {x} * lax.rsqrt(({x} ** 2).mean(-1, keepdims=True) + 1e-3)
    {x} / jnp.maximum(jnp.linalg.norm({x}, axis=-1, keepdims=True), 1e-2)
    ({x} - {x}.mean(0)) * lax.rsqrt({x}.var(0) + 1e-3)
    jax.nn.relu(({x} - {x}.mean(0)) * lax.rsqrt({x}.var(0) + 1e-3))
    {x} / ({x}.sum(-1, keepdims=True) ** 2 + 1)
    {x} / (jnp.abs({x}).sum(-1, keepdims=True) + 0.1)
    {x} / jnp.max(jnp.abs({x}) + 0.1, axis=-1, keepdims=True)
    """,
    takes=_long,
)

AFFINE_NORMS = (
    Operation(
        "{w} * ({x} - {x}.mean(-1, keepdims=True))"
        " * lax.rsqrt({x}.var(-1, keepdims=True) + 1e-5) + {v}",
        _wide,
        _per_channel,
        _per_channel,
    ),
    Operation(
        "{w} * ({x} - {x}.mean(tuple(range({x}.ndim - 1))))"
        " * lax.rsqrt({x}.var(tuple(range({x}.ndim - 1))) + 1e-5) + {v}",
        _wide,
        _per_channel,
        _per_channel,
    ),
    Operation(
        "{w} * {x} * lax.rsqrt(({x} * {x}).mean(-1, keepdims=True) + 1e-5)",
        _wide,
        _per_channel,
    ),
    Operation(
        "({x} - {x}.mean((1, 2), keepdims=True))"
        " * lax.rsqrt({x}.var((1, 2), keepdims=True) + 1e-3) * {w}",
        _image,
        _per_channel,
    ),
    Operation(
        "(lambda t: ((t - t.mean((1, 2, 4), keepdims=True))"
        " * lax.rsqrt(t.var((1, 2, 4), keepdims=True) + 1e-3)).reshape({shape}))"
        "({x}.reshape(*{shape}[:3], 2, -1))",
        lambda s: _image(s) and s[-1] % 2 == 0,
    ),
    Operation(
        "(lambda t: ((t - t.mean(-1, keepdims=True))"
        " * lax.rsqrt(t.var(-1, keepdims=True) + 1e-3)).reshape({shape}))"
        "({x}.reshape(*{shape}[:-1], -1, 4))",
        _even,
    ),
)

PRODUCTS = (
    *_all(
        """
        {x} @ {w} * 0.2
        jnp.einsum('...i,ij->...j', {x}, {w}) * 0.2
        lax.dot_general({x}, {w}, ((({x}.ndim - 1,), (1,)), ((), ()))) * 0.2
        {x} @ {w}.T * 0.2
        {x} @ {w}[:, ::2] * 0.2
        {x} @ {w}.astype(jnp.bfloat16).astype({x}.dtype) * 0.2
        ({x}.astype(jnp.bfloat16) @ {w}.astype(jnp.bfloat16)).astype(jnp.float32) * 0.2
        jax.nn.relu({x} @ {w} * 0.2) @ {w}.T * 0.2
        {x} @ jnp.tanh({w}) * 0.2
        {x} @ ({w} * {w}.T) * 0.2
        {x} @ ({w} - {w}.mean(0)) * 0.2
        {x} @ ({w} / (jnp.linalg.norm({w}, axis=0) + 0.1))
        ({x} @ {w}) @ {w} * 0.02
        {x} @ {w} * 0.2 + {x}
        {x} @ {w} * 0.2 + {w}[0]
        {x}.astype(jnp.float16) @ {w}.astype(jnp.float16)
        jnp.vectorize(lambda a: jnp.tanh(a) @ {w}, signature='(i)->(i)')({x}) * 0.2
        jax.vmap(lambda row: row @ {w})({x}) * 0.2
        jax.checkpoint(lambda a, b: jnp.tanh(a @ b))({x}, {w})
        jax.jit(lambda a, b: jax.nn.gelu(a @ b * 0.2))({x}, {w})
        jnp.dot({x}, {w}, preferred_element_type=jnp.float32) * 0.2
        dense({x}, {w})
        frozen_dense({x}, {w})
        """,
        takes=_wide,
        w=_last_to_last,
    ),
    *_all(
        """
        {x} @ {x}.swapaxes(-1, -2) / {n}
        {x} @ {y}.swapaxes(-1, -2) / {n} ** 0.5
        jnp.einsum('...ij,...kj->...ik', {x}, {y}) / {n} ** 0.5
        jnp.einsum('...ij,...ij->...i', {x}, {y}) / {n} ** 0.5
        jnp.einsum('...ij,...ij,...ij->...j', {x}, {y}, {x}) / {m} ** 0.5
        jax.nn.softmax({x} @ {y}.swapaxes(-1, -2) / {n} ** 0.5, -1) @ {x}
        jax.nn.softmax({x} @ {x}.swapaxes(-1, -2) / {n} ** 0.5, -1) @ {x}
        jnp.inner({x}, {y}) / {n} ** 0.5 if {x}.ndim == 2 else {x}
        jnp.outer({x}[..., 0].ravel()[:16], {y}[..., 1].ravel()[:16])
        jnp.tensordot({x}, {y}, {x}.ndim) / {x}.size ** 0.5 + {x}
        jnp.vdot({x}, {y}) / {x}.size ** 0.5 * {x}
        jnp.kron({x}.reshape({lead}, -1)[:4, :4], {y}.reshape({lead}, -1)[:4, :4])
        jnp.convolve({x}.ravel()[:64], {y}.ravel()[:5])
        lax.batch_matmul({x}, {y}.swapaxes(-1, -2)) / {n} if {x}.ndim == 3 else {x}
        contrastive({x}.reshape({lead}, -1))
        causal_attention({x}, {y})
        """,
        takes=_long,
    ),
    *_all(
        """
        {w} * {x}
        {x} + {w}
        {x} * jax.nn.softplus({w}) - {w}
        jnp.exp({w} * 0.3) * {x}
        {x} * {w}[::-1]
        jnp.tanh({x} + {w})
        jnp.tanh({w} * {x} + {v})
        jnp.maximum({x}, {w} * {x})
        jnp.where({x} > 0, {x}, {w} * {x})
        {x} * (1 + {w}) + {v}
        {x} * {w}.astype(jnp.bfloat16)
        jnp.concatenate([{x}, jnp.broadcast_to({w}, {shape})], -1)
        jnp.sin({x} * {w}) + jnp.cos({x} * {v})
        """,
        takes=_wide,
        w=_per_channel,
        v=_per_channel,
    ),
)

IMAGES = (
    *_all(
        """
        conv({x}, {w}) * 0.2
        conv({x}, {w}, window_strides=(2, 2)) * 0.2
        conv({x}, {w}, padding='VALID') * 0.2
        conv({x}, {w}, rhs_dilation=(2, 2)) * 0.2
        jax.nn.relu(conv({x}, {w})) * 0.2
        jnp.tanh(conv(jax.nn.relu({x}), {w}) * 0.2)
        lax.conv_transpose({x}, {w}, (2, 2), 'SAME') * 0.2
        """,
        takes=_image,
        w=lambda s: (3, 3, s[-1], s[-1]),
    ),
    Operation(
        "conv({x}, {w}, feature_group_count={n}) * 0.3",
        _image,
        lambda s: (3, 3, 1, s[-1]),
    ),
    Operation("conv({x}, {w}) * 0.3", _image, lambda s: (1, 1, s[-1], 8)),
    Operation(
        "lax.conv_general_dilated({x}, {w}, (1,), 'SAME',"
        " dimension_numbers=('NWC', 'WIO', 'NWC')) * 0.3",
        rank(3, 3),
        lambda s: (3, s[-1], s[-1]),
    ),
    *_all(
        """
        pool({x}, lax.max, -jnp.inf, 2, 2)
        pool({x}, lax.max, -jnp.inf, 3, 2)
        pool({x}, lax.max, -jnp.inf, 3, 1)
        pool(jax.nn.relu({x}), lax.max, -jnp.inf, 2, 2)
        pool(jnp.round({x}), lax.max, -jnp.inf, 2, 2) + pool({x}, lax.min, jnp.inf, 2, 2)
        pool({x}, lax.add, 0.0, 2, 2) / 4
        pool({x}, lax.add, 0.0, 3, 1) / 9
        pool({x}, lax.min, jnp.inf, 2, 2)
        {x}.mean((1, 2))
        {x}.max((1, 2))
        jax.image.resize({x}, (*{x}.shape[:1], 6, 6, {n}), 'bilinear')
        jax.image.resize({x}, (*{x}.shape[:1], 6, 6, {n}), 'nearest')
        space_to_depth({x})
        {x}.transpose(0, 3, 1, 2)
        {x}[:, ::2, ::2]
        jnp.pad({x}, ((0, 0), (1, 1), (1, 1), (0, 0)), mode='reflect')
        """,
        takes=lambda s: _image(s) and s[1] % 2 == 0 and s[2] % 2 == 0,
    ),
)

MOVES = _all(
    """
    {x}.T
    {x}.reshape(-1, {n})
    {x}.reshape({lead}, -1)
    {x}.swapaxes(0, 1)
    {x}[::-1]
    {x}[1:]
    {x}[:, 1:-1]
    {x}[..., ::2]
    {x}[..., : {n} // 2] * {x}[..., {n} - {n} // 2 :]
    jnp.split({x}, 2, -1)[0] + jnp.split({x}, 2, -1)[1] if {n} % 2 == 0 else {x}
    jax.nn.glu({x}) if {n} % 2 == 0 else {x}
    jnp.flip({x}, -1)
    jnp.roll({x}, 3, 0)
    jnp.roll({x}, 1, -1) * {x}
    jnp.pad({x}, [(1, 2)] + [(0, 0)] * ({x}.ndim - 1))
    jnp.pad({x}, 1, mode='edge')
    jnp.pad({x}, 1, constant_values=0.5)
    jnp.concatenate([{x}, {y}], -1)
    jnp.concatenate([{x}, {x} * {y}], 0)
    jnp.stack([{x}, {y}])
    jnp.stack([{x}, {y}], -1).max(-1)
    jnp.tile({x}, 2)
    jnp.repeat({x}, 2, axis=0)
    jnp.broadcast_to({x}[None], (2, *{shape}))
    jnp.expand_dims({x}, 0)
    {x}[jnp.arange(8) * 3 % {lead}]
    {x}[jnp.array([0, 0, 1, 3])]
    jnp.take({x}, jnp.array([1, 1, 2, 0, 3]), axis=-1)
    jnp.take({x}, jnp.argsort({x}[:, 0].reshape({lead}, -1)[:, 0]), axis=0)
    jnp.take_along_axis({x}, jnp.argsort({y}, -1), -1)
    {x}.at[0].set(1.0)
    {x}.at[0].add({y}[1])
    {x}.at[:, 0].multiply(2.0)
    {x}.at[jnp.array([0, 2])].max({y}[:2])
    {x}.at[jnp.array([1, 1, 3])].add({y}[:3])
    {x}.at[..., 1].set({y}[..., 0])
    jax.ops.segment_sum({x}, jnp.arange({lead}) % 3, 3)
    jax.ops.segment_max({x}, jnp.arange({lead}) % 3, 3)
    lax.dynamic_slice_in_dim({x}, jnp.argmax({y}.ravel()) % 2, 3, 0)
    lax.dynamic_update_slice_in_dim({x}, {y}[:2] * 2, 1, 0)
    lax.dynamic_index_in_dim({x}, 1, 0) * {x}
    jnp.sort({x}, -1)
    jnp.sort({x}, 0)
    jnp.sort(jnp.round({x}), -1) * {x}
    lax.sort([{x}, {y}], dimension=0)[1]
    lax.top_k({x}, 4)[0]
    lax.top_k({x}, 3)[0].sum(-1, keepdims=True) * {x}
    jnp.where({x} >= lax.top_k({x}, 4)[0][..., -1:], {x}, 0)
    jnp.triu({x}.reshape({lead}, -1))
    jnp.tril({x}.reshape({lead}, -1)) @ {x}.reshape({lead}, -1).T / {n}
    jnp.diagonal({x}.reshape({lead}, -1)) * 2
    lax.rev({x}, (0,)) + {x}
    lax.reshape({x}, ({x}.size,))
    lax.optimization_barrier({x}) * 2
    checkpoint_name({x} * 2, 'named')
    checkpoint_name(jnp.tanh({x}), 'named') * {y}
    {x} + 0 * {y}
    {x} * 0 + 1
    jnp.zeros_like({x}) + {y}
    jnp.moveaxis({x}, 0, -1)
    jnp.atleast_2d({x}).sum(0) + {x}
    jnp.interp({x}, jnp.linspace(-3, 3, 9), jnp.linspace(-1, 1, 9) ** 3)
    """,
    takes=_long,
)

LOOPS = _all(
    """
    lax.scan(lambda c, r: (jnp.tanh(0.5 * c + r),) * 2, jnp.zeros_like({x}[0]), {x})[1]
    lax.scan(lambda c, r: (0.5 * c + r, c * r), jnp.zeros_like({x}[0]), {x})[1]
    lax.scan(lambda c, r: (0.9 * c + jnp.sin(r * c), r), {x}[0], {x})[0] + {x}
    lax.scan(lambda c, r: (jnp.maximum(c, r), c), {x}[0], {x}, reverse=True)[1]
    lax.scan(lambda c, r: (c, jnp.tanh(r[0]) * r[1] + c), {x}[0], ({x}, {y}))[1]
    lax.scan(lambda c, _: (jnp.tanh(c + {y}), None), {x}, None, length=3)[0]
    lax.scan(lambda c, _: (c * jnp.cos(c), None), {x}, length=2, unroll=2)[0]
    lax.scan(jax.checkpoint(lambda c, r: (jnp.tanh(c + r), jnp.sin(c * r))), {x}[0], {x})[1]
    lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) + 0.1 * i * {y}, {x})
    lax.fori_loop(0, 2, lambda i, c: c * jax.nn.sigmoid(c), {x})
    lax.fori_loop(0, 3, lambda i, c: c.at[i].set(jnp.tanh(c[i])), {x})
    lax.map(lambda r: jnp.tanh(r) * r, {x})
    lax.map(lambda r: jax.nn.softmax(r), {x})
    jax.vmap(lambda r: jnp.cumsum(jnp.tanh(r)))({x}) * 0.2 if {x}.ndim == 2 else {x}
    lax.cond({x}.ravel()[0] > 0, lambda a, b: jnp.tanh(a) * b, lambda a, b: a * a, {x}, {y})
    lax.cond({x}.mean() > 9, jnp.sin, lambda a: jnp.exp(2 * jnp.tanh(a)) * a, {x})
    lax.switch(jnp.argmax({x}.ravel()[:3]), [jnp.sin, jnp.tanh, lambda a: a * a], {x})
    lax.cond(True, lambda a: jax.nn.gelu(a) * a, lambda a: a, {x})
    lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1]), (0, 1.0))[1] * {x}
    jax.vmap(lambda a, b: lax.cond(a.sum() > 0, jnp.sin, lambda t: t * b.mean(), a))({x}, {y})
    jax.checkpoint(lambda a: jnp.exp(2 * jnp.tanh(a)) * a)({x})
    jax.checkpoint(lambda a: jnp.sin(a) * jnp.cos(a), policy=jax.checkpoint_policies.everything_saveable)({x})
    jax.checkpoint(lambda a: a * jnp.tanh(checkpoint_name(a * a, 'kept')), policy=jax.checkpoint_policies.save_only_these_names('kept'))({x})
    jax.jit(lambda a: jax.jit(jnp.tanh)(a) * a)({x})
    jax.jit(lambda a: jnp.exp(-a * a) * a, inline=True)({x})
    jax.vmap(jax.vmap(jnp.tanh))({x})
    jax.grad(lambda a: jnp.sum(jnp.tanh(a) ** 2))({x})
    jax.jvp(jnp.sin, ({x},), ({y},))[1]
    jax.linearize(jnp.tanh, {x})[1]({y})
    jax.custom_gradient(lambda a: (jnp.tanh(a), lambda g: g * (1 - jnp.tanh(a) ** 2)))({x})
    jax.named_scope('scope')(lambda a: jnp.sin(a) * a)({x})
    """,
    takes=_long,
)

CASTS = _all("""
    {x}.astype(jnp.bfloat16)
    {x}.astype(jnp.float16)
    {x}.astype(jnp.float32)
    {x}.astype(jnp.bfloat16).astype(jnp.float32) * {x}
    jnp.tanh({x}.astype(jnp.float16)).astype(jnp.float32)
    jnp.exp({x}.astype(jnp.bfloat16)).astype(jnp.float32)
    {x}.astype(jnp.float8_e4m3fn).astype(jnp.float32)
    {x}.astype(jnp.float8_e5m2).astype(jnp.float32) * {x}.astype(jnp.float32)
    {x}.astype(jnp.float8_e4m3fn).astype(jnp.float32) * {y}.astype(jnp.float32)
    lax.reduce_precision({x}, 5, 2)
    lax.reduce_precision({x}, 5, 1) * {x}
    lax.reduce_precision({x}, 8, 7) * {y}
    fake_quantized({x}) * {x}
    (jax.nn.softmax({x}.astype(jnp.float32), -1)).astype({x}.dtype) * {x}
    {x} * ({x}.astype(jnp.int32) % 3)
    {x}.astype(jnp.int32) * 0.5 + {x}
    {x} + jnp.arange({n}) * 0.1
    {x} * (({x} > 0) & ({y} < 1))
    {x} * jnp.bfloat16(1.5)
    {x} * jnp.float32(1.5)
    jnp.tanh({x} * 1e-3) * 1000.0 * 0.9
    lax.bitcast_convert_type(lax.bitcast_convert_type({x}, jnp.uint32), jnp.float32) * 0 + {x} if {x}.dtype == jnp.float32 else {x}
    jnp.float32({x}) ** 2 * 0.5
    jnp.ldexp({x}, 1) if {x}.dtype == jnp.float32 else {x}
""")

SPECTRA = _all(
    """
    jnp.fft.rfft({x}) * 0.2
    jnp.fft.fft({x}) * 0.2
    jnp.fft.fft2({x}) * 0.05
    jnp.abs(jnp.fft.rfft({x})) * 0.2
    jnp.log(jnp.abs(jnp.fft.rfft({x})) + 1e-1)
    jnp.log1p(jnp.abs(jnp.fft.rfft({x})) ** 2)
    jnp.fft.irfft(jnp.fft.rfft({x}) * jnp.arange({n} // 2 + 1) / {n})
    jnp.fft.irfft(jnp.fft.rfft({x}, axis=-1) * jnp.fft.rfft({y})) * 0.2
    lax.complex({x}.astype(jnp.float32), {y}.astype(jnp.float32))
    {x} * jnp.exp(1j * {y})
    jnp.angle(lax.complex(1.5 + {x}.astype(jnp.float32) ** 2, {y}.astype(jnp.float32)))
    jnp.abs(lax.complex({x}.astype(jnp.float32), {y}.astype(jnp.float32) + 3))
    """,
    takes=_even,
)
COMPLEX = _all(
    """
    jnp.abs({x}) + 0.0
    jnp.log(jnp.abs({x}) + 0.1)
    jnp.abs({x}) ** 2
    jnp.tanh(jnp.abs({x}))
    jnp.real({x})
    jnp.imag({x})
    {x}.real * {x}.imag
    jnp.real({x} * jnp.conj({x}))
    jnp.conj({x}) * (1 + 1j)
    {x} * {y}
    {x} * jax.nn.sigmoid(jnp.abs({x}))
    {x} / (1 + jnp.abs({x}))
    {x} / (2 + {x} * jnp.conj({x}))
    jnp.exp(1j * jnp.abs({x}))
    jnp.exp(0.3 * {x})
    jnp.sqrt({x} * jnp.conj({x}) + 1.0)
    jnp.tanh(0.3 * {x})
    jnp.where(jnp.abs({x}) > 0.5, {x}, 0)
    {x}.real + jnp.sin({x}.imag)
    jnp.fft.ifft({x})
    jnp.square({x})
    jnp.sum({x}, -1)
    {x} * 2 - {y}
    {x} @ jnp.conj({x}).swapaxes(-1, -2) / {n} if {x}.ndim > 1 else {x}
    """,
    is_complex=True,
)

LINEAR_ALGEBRA = _all(
    """
    jnp.linalg.solve(positive({x}), {y})
    jnp.linalg.solve(near_identity({x}), {y})
    jnp.linalg.inv(positive({x}))
    jnp.linalg.inv(near_identity({x})) @ {x}
    jnp.linalg.cholesky(positive({x}))
    jnp.linalg.cholesky(positive({x})) @ {y}
    jnp.linalg.qr(positive({x}))[0] @ {x}
    jnp.linalg.qr(positive({x}))[1]
    jnp.linalg.eigh(spread({x}))[0]
    jnp.linalg.eigh(spread({x}))[1] ** 2
    jnp.linalg.eigvalsh(spread({x}))
    jnp.linalg.svd(spread({x}), compute_uv=False)
    jnp.linalg.det(near_identity({x}))
    jnp.linalg.slogdet(positive({x}))[1]
    jax.scipy.linalg.expm(small_square({x}))
    jax.scipy.linalg.expm(small_square({x})) @ {x}
    jax.scipy.linalg.solve_triangular(jnp.tril(near_identity({x})), {x}, lower=True) if {x}.ndim == 2 else {x}
    lax.linalg.triangular_solve(jnp.tril(near_identity({x})), {x}, left_side=True, lower=True)
    jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(positive({x})), True), {x}) if {x}.ndim == 2 else {x}
    jnp.linalg.matrix_power(near_identity({x}), 3) @ {x}
    jnp.linalg.norm({x}, 'fro', axis=(-2, -1)) * 0.1
    jnp.linalg.pinv(positive({x}))
    jnp.linalg.multi_dot([{x}, {y}.T, {x}]) / {n} if {x}.ndim == 2 else {x}
    lax.cond(True, lambda a, b: jnp.linalg.solve(positive(a), b), lambda a, b: b, {x}, {y})
    lax.linalg.lu(near_identity({x}))[0]
    """,
    takes=_matrix,
)

# With several outputs, values of other shapes, and values used again.
MIXED = _all(
    """
    {x} * {u}.astype(jnp.float32).mean()
    {x} + jnp.tanh({u}).sum() * 0.01
    {x} * jax.nn.sigmoid({u}.ravel()[0])
    {x} * jnp.exp(0.1 * {u}.max())
    {x} + jnp.resize({u}, {shape})
    {x} * jnp.resize({u}, {shape})
    sum(jnp.stack([{x}, jnp.sin({x}), {x} * {y}]))
    (lambda a, b: a * b + a)(jnp.tanh({x}), jnp.exp(0.3 * {x}))
    (lambda a: a * a + jnp.sin(a))(jnp.tanh({x}) + {y})
    """,
)

OPERATIONS: dict[str, tuple[Operation, ...]] = {
    "smooth": SMOOTH,
    "piecewise": PIECEWISE,
    "reductions": REDUCTIONS,
    "norms": (*NORMS, *AFFINE_NORMS),
    "products": PRODUCTS,
    "images": IMAGES,
    "moves": MOVES,
    "loops": LOOPS,
    "casts": CASTS,
    "spectra": SPECTRA,
    "complex": COMPLEX,
    "linear algebra": LINEAR_ALGEBRA,
    "mixed": MIXED,
}
