"""Operations that compute each element from its own, casts among them."""

# ruff: noqa: E501 (one expression a line)

from fuzz.operation import expressions

SMOOTH = expressions("""
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


PIECEWISE = expressions("""
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


CASTS = expressions("""
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


COMPLEX = expressions(
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


MIXED = expressions(
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
