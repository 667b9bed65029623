"""Explain that a check by `jax.experimental.checkify` cannot be in such a call."""

import contextlib
from collections.abc import Iterator

from jaxact._jaxpr.types import Jaxpr


@contextlib.contextmanager
def noting_checks(program: Jaxpr) -> Iterator[None]:
    """A context for the call with this program; its errors say whether it has checks.

    A derivative rule has no place for a check's error, and JAX says so in terms that
    are not the user's.
    """
    try:
        yield
    except Exception as error:
        # Nothing public names this class.
        if any(type(e).__name__ == "ErrorEffect" for e in program.effects):
            error.add_note(
                "jaxact: the compressed function has a checkify.check, for which a "
                "derivative rule has no place. Return the value, and check it outside "
                "of the compressed call."
            )
        raise
