"""Loops, branches, transformations inside a program; linear algebra."""

# ruff: noqa: E501 (one expression a line)

from fuzz.operation import expressions, long, matrix

LOOPS = expressions(
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
    takes=long,
)


LINEAR_ALGEBRA = expressions(
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
    takes=matrix,
)
