"""A backward pass that decodes residuals where a checkpoint computes with them again.

Computing again for `jax.checkpoint` starts behind an optimization barrier, lest XLA
take the forward pass's values for it. Residuals decoded before the barrier are arrays
in memory, in their own order of axes, and attention then transposes each of them for
every product that reads it. Here the packed words wait at the barrier; XLA decodes them
behind it, in the order that the reader wants. Words are no values of the forward pass,
so the barrier does what it did. Predicted for GPT-2 small on an H100 (8 x 1024 tokens,
4 bits, scores of attention computed again): 39.40 ms before, 39.01 this way.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxact._engine.evaluation import Evaluation, Order
from jaxact._jaxpr.compat import barrier
from jaxact._jaxpr.primitives import CHECKPOINTS
from jaxact._jaxpr.read import variables_in
from jaxact._jaxpr.types import Env, Eqn, PyTree


def has_checkpoints(eqns: Sequence[Eqn]) -> bool:
    """Whether equations compute something again behind a barrier."""
    return any(map(_is_checkpoint, eqns))


def decoded_late(order: Order, env: Env, packed: Sequence[PyTree]) -> list[jax.Array]:
    """The results, decoding for checkpoints behind their barriers."""
    return LateDecoding(order, env).outputs()


class LateDecoding(Evaluation):
    """One evaluation."""

    def evaluate(self, eqn: Eqn) -> None:
        before = self.order.before(eqn, self.env) if _is_checkpoint(eqn) else []
        if not before:
            super().evaluate(eqn)
            return
        env = self.env | self._held([*before, eqn])
        again = eqn.replace(params=eqn.params | {"prevent_cse": False})
        self.run([*before, again], env)
        self.env.update((v, env[v]) for v in eqn.outvars)

    def _held(self, eqns: Sequence[Eqn]) -> Env:
        """The values that equations read, none there before all are."""
        read = dict.fromkeys(v for eqn in eqns for v in variables_in(eqn.invars))
        held = [v for v in read if v in self.env and _can_wait(self.env[v])]
        values = barrier([self.env[v] for v in held])
        return dict(zip(held, values, strict=True))


def _is_checkpoint(eqn: Eqn) -> bool:
    name, params = eqn.primitive.name, eqn.params
    is_again = name in CHECKPOINTS and params.get("differentiated")
    return bool(is_again and params.get("prevent_cse")) and not eqn.effects


def _can_wait(x: jax.Array) -> bool:
    """Whether a barrier takes such values: numbers, not random keys."""
    return not jnp.issubdtype(x.dtype, jax.dtypes.extended)
