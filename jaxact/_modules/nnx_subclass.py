"""Make a class below an NNX module's without the user's `__init_subclass__`.

The compressed class stands for the module's: hooks that register classes by name, or
that require keywords, ran where the user wrote the class.
"""

from typing import Any

from flax import nnx


def subclass(target: type, body: dict[str, Any]) -> type:
    """A class with the same name below `target`.

    Raises:
      TypeError: a metaclass, or a hook that NNX calls in its turn, refuses it.
    """
    name, options = target.__name__, _options(target)
    above = target.__mro__[: target.__mro__.index(nnx.Pytree)]
    hooked = any("__init_subclass__" in vars(cls) for cls in above)
    try:
        if hooked:
            made = type(target)(name, (_no_hooks(), target), body)
        else:
            made = type(target)(name, (target,), body, **options)
    except TypeError as error:
        raise TypeError(
            f"compress({name}): a subclass is required, and {name} refuses it: {error} "
            "Decorate its `__call__` with @jaxact.compress instead."
        ) from error
    parameters = vars(target).get("__parameters__")
    if parameters is not None:  # a generic class, whose alias makes compressed modules
        made.__parameters__ = parameters  # pyright: ignore
    return made


def _no_hooks() -> type:
    """A base that Python asks for `__init_subclass__` first; it asks NNX alone.

    A new one for each class: one that is below another compressed class has both.
    """

    class NoHooks:
        def __init_subclass__(cls, **options: Any) -> None:
            if cls.__bases__[0] is not NoHooks:  # the user's, below a compressed class
                super().__init_subclass__(**options)
                return
            hook = vars(nnx.Pytree)["__init_subclass__"].__func__
            hook(cls, **_options(cls.__bases__[1]))

    return NoHooks


def _options(target: type) -> dict[str, bool]:
    """The keywords for NNX's own hook, which does not inherit them."""
    is_pytree = getattr(target, "_pytree__is_pytree", True)
    return {} if is_pytree else {"pytree": False}
