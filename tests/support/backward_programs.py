"""Backward programs, and the noise that they have.

The oracle draws the errors: it evaluates the plain program with Gaussian errors of the
given variances on a residual and averages the squared error of its targets, which the
programs return. It knows no formula.

The standard error of an average is taken from the draws themselves. `agree` allows five
of them, which one correct case in 1.7 million exceeds, plus what the case states as its
approximation.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax

from jaxact._measure.noise import evaluate_with_noise

DRAWS = 500

# Compiling takes longest. Arrays are arguments: folding constants takes seconds.
quick_jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


class Program:
    """A backward program `run(residuals, cotangents)` at some values."""

    def __init__(self, run, residuals, cotangents):
        self.residuals = residuals
        self.values = [*residuals, *jax.tree.leaves(cotangents)]
        closed = jax.make_jaxpr(run)(residuals, cotangents)
        self.jaxpr = getattr(closed, "jaxpr", closed)
        self.consts = list(getattr(closed, "consts", ()))
        self.cotangents = range(len(residuals), len(self.values))

    @classmethod
    def of(cls, f, *args):
        out, vjp = jax.vjp(f, *args)
        leaves, tree = jax.tree.flatten(vjp)
        cotangents = jax.tree.map(
            lambda x: normal(x.size, *x.shape, dtype=x.dtype), out
        )
        return cls(lambda r, c: jax.tree.unflatten(tree, r)(c), leaves, cotangents)

    def where(self, x):
        """The number of the residual that equals x."""
        same = [r.shape == x.shape and np.array_equal(r, x) for r in self.residuals]
        return same.index(True)

    def plain(self, *values):
        return core.eval_jaxpr(self.jaxpr, self.consts, *values)

    def measured(self, variances, values):
        return evaluate_with_noise(
            self.jaxpr, self.consts, values, variances, cotangents=self.cotangents
        )

    def noise(self, variances):
        return quick_jit(lambda *args: self.measured(*args)[1])(variances, self.values)

    def drawn(self, i, errors, values, targets=None):
        """The targets, and the squared norm of what each error of input i adds."""

        def evaluate(x):
            out = self.plain(*values[:i], x, *values[i + 1 :])
            return out if targets is None else [out[o] for o in targets]

        true = evaluate(values[i])

        def one(error):
            noisy = evaluate(values[i] + error)
            return sum(jnp.sum((a - b) ** 2) for a, b in zip(noisy, true, strict=True))

        return true, lax.map(one, errors)


def agree(noise, true, squares, rtol=0.0):
    squares = np.asarray(squares, np.float64)
    mean, error = squares.mean(), squares.std() / len(squares) ** 0.5
    assert 5 * error < 0.1 * mean  # else it could not tell
    assert abs(noise.added - mean) <= rtol * mean + 5 * error
    np.testing.assert_allclose(noise.signal, sum(map(squared_norm, true)), rtol=1e-5)


def check(program, i, variance, *, targets=None, rtol=0.0):
    """The noise of residual i is that of the draws, at the outputs `targets`."""

    @quick_jit
    def run(variance, errors, values):
        noise = program.measured({i: variance}, values)[1][i]
        return noise, *program.drawn(i, errors, values, targets)

    agree(*run(variance, draw(variance, program.values[i].shape), program.values), rtol)


def draw(variance, shape):
    errors = np.random.default_rng(0).normal(size=(DRAWS, *shape))
    return (errors * np.sqrt(variance)).astype(np.float32)


def squared_norm(x):
    return np.sum(np.square(np.asarray(x, np.float64)))


def normal(seed, *shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(dtype))


def uneven(seed, *shape):
    """Variances between 0 and 0.4, a quarter of them 0."""
    chosen, size = np.random.default_rng(seed).uniform(size=(2, *shape))
    return np.where(chosen < 0.25, 0, 0.4 * size**2).astype(np.float32)
