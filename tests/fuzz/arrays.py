"""Reductions, norms, products, images, moves, Fourier transforms."""

# ruff: noqa: E501 (one expression a line)

from fuzz.operation import (
    Operation,
    even,
    expressions,
    image,
    last_to_last,
    long,
    per_channel,
    rank,
    wide,
)

REDUCTIONS = expressions(
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
    lax.cummax(jnp.where({x} > 0, 3, 1) ** 4, axis=0).astype({x}.dtype) * 0.01 * {x}
    jnp.take_along_axis({x}, lax.cummin(jnp.where({x} > 0, 7, 2), axis=0), -1)
    jnp.take_along_axis({x}, jnp.uint8(250) + lax.cummax(jnp.where({x} > 0, jnp.uint8(9), jnp.uint8(6)), axis=0), -1)
    centered_tangent({x}) * jnp.tanh({x})
    ranked_gradient(jnp.tanh({x}))
    """,
    takes=long,
)


NORMS = expressions(
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
    ({x} - 0.5 * jnp.broadcast_to({x}.mean(-1, keepdims=True), {x}.shape)) * lax.rsqrt({x}.var(-1, keepdims=True) + 1e-2)
    ({x} - {x}.mean(-1, keepdims=True) ** 2) / jnp.sqrt({x}.var(-1, keepdims=True) + 1e-2)
    (lambda e: e / e.sum(-1, keepdims=True))(jnp.exp({x})[..., 1:])
    (lambda e: {x} * (e / e.sum(-1, keepdims=True)))(lax.stop_gradient(jnp.exp({x})))
    (lambda e: e / (1 + e.sum(-1, keepdims=True)))(jnp.exp({x}))
    """,
    takes=long,
)


AFFINE_NORMS = (
    Operation(
        "{w} * ({x} - {x}.mean(-1, keepdims=True))"
        " * lax.rsqrt({x}.var(-1, keepdims=True) + 1e-5) + {v}",
        wide,
        per_channel,
        per_channel,
    ),
    Operation(
        "{w} * ({x} - {x}.mean(tuple(range({x}.ndim - 1))))"
        " * lax.rsqrt({x}.var(tuple(range({x}.ndim - 1))) + 1e-5) + {v}",
        wide,
        per_channel,
        per_channel,
    ),
    Operation(
        "{w} * {x} * lax.rsqrt(({x} * {x}).mean(-1, keepdims=True) + 1e-5)",
        wide,
        per_channel,
    ),
    Operation(
        "({x} - {x}.mean((1, 2), keepdims=True))"
        " * lax.rsqrt({x}.var((1, 2), keepdims=True) + 1e-3) * {w}",
        image,
        per_channel,
    ),
    Operation(
        "(lambda t: ((t - t.mean((1, 2, 4), keepdims=True))"
        " * lax.rsqrt(t.var((1, 2, 4), keepdims=True) + 1e-3)).reshape({shape}))"
        "({x}.reshape(*{shape}[:3], 2, -1))",
        lambda s: image(s) and s[-1] % 2 == 0,
    ),
    Operation(
        "(lambda t: ((t - t.mean(-1, keepdims=True))"
        " * lax.rsqrt(t.var(-1, keepdims=True) + 1e-3)).reshape({shape}))"
        "({x}.reshape(*{shape}[:-1], -1, 4))",
        even,
    ),
)


PRODUCTS = (
    *expressions(
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
        takes=wide,
        w=last_to_last,
    ),
    *expressions(
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
        takes=long,
    ),
    *expressions(
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
        takes=wide,
        w=per_channel,
        v=per_channel,
    ),
)


IMAGES = (
    *expressions(
        """
        conv({x}, {w}) * 0.2
        conv({x}, {w}, window_strides=(2, 2)) * 0.2
        conv({x}, {w}, padding='VALID') * 0.2
        conv({x}, {w}, rhs_dilation=(2, 2)) * 0.2
        jax.nn.relu(conv({x}, {w})) * 0.2
        jnp.tanh(conv(jax.nn.relu({x}), {w}) * 0.2)
        lax.conv_transpose({x}, {w}, (2, 2), 'SAME') * 0.2
        """,
        takes=image,
        w=lambda s: (3, 3, s[-1], s[-1]),
    ),
    Operation(
        "conv({x}, {w}, feature_group_count={n}) * 0.3",
        image,
        lambda s: (3, 3, 1, s[-1]),
    ),
    Operation("conv({x}, {w}) * 0.3", image, lambda s: (1, 1, s[-1], 8)),
    Operation(
        "lax.conv_general_dilated({x}, {w}, (1,), 'SAME',"
        " dimension_numbers=('NWC', 'WIO', 'NWC')) * 0.3",
        rank(3, 3),
        lambda s: (3, s[-1], s[-1]),
    ),
    *expressions(
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
        takes=lambda s: image(s) and s[1] % 2 == 0 and s[2] % 2 == 0,
    ),
)


MOVES = expressions(
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
    takes=long,
)


SPECTRA = expressions(
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
    takes=even,
)
