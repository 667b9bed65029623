"""The transform: `compress` stores residuals as a policy says."""

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, get_origin, overload

import jax

from jaxact._arguments import Names, arguments, as_tuple
from jaxact._codec import Action
from jaxact._engine.call import call_compressed, seed_from
from jaxact._engine.number import scope_in_trace
from jaxact._modules import find
from jaxact._modules.original import original_of, refuse_key, remember
from jaxact._policy import Policy, checked_policy
from jaxact._trace import TraceCache
from jaxact._typing import C, Compress, Compressed, M, P, R
from jaxact._using import runs_later
from jaxact._written_as import fits, written_as

_AS_DECORATOR = object()  # no target: the result takes it


@overload
def compress(
    *,
    policy: Policy | None = ...,
    activations: Names | None = ...,
    static_argnums: Names = ...,
) -> Compress: ...
@overload
def compress(
    target: type[C],
    *,
    policy: Policy | None = ...,
    static_argnums: Names = ...,
) -> type[C]: ...
@overload
def compress(
    target: M,
    *,
    policy: Policy | None = ...,
    static_argnums: Names = ...,
) -> M: ...
@overload
def compress(
    target: Callable[P, R],
    *,
    policy: Policy | None = ...,
    activations: Names | None = ...,
    static_argnums: Names = ...,
) -> Compressed[P, R]: ...
@written_as("compress(target, policy=Policy(bits=2))")
def compress(
    target: object = _AS_DECORATOR,
    *,
    policy: Policy | None = None,
    activations: Names | None = None,
    static_argnums: Names = (),
) -> Any:
    """Store the residuals of `target` compressed between forward and backward.

    Outputs are computed by `target`'s own operations on its own values; so are mutable
    state and RNG counters, and the parameter tree is the same. Only the arrays that
    reverse-mode differentiation keeps are stored as `policy` says. With
    Policy(default=Exact()) gradients are JAX's own too, operation by operation; where
    three or more are summed into one argument, a compressed call in between may change
    the order of that sum. Reverse mode once only: forward-mode and second-order
    derivatives raise a TypeError.

    A function that is called outside of `jax.jit` is traced once for calls of equal
    structure, while the numbers, text, arrays and functions that it reads besides its
    arguments are the same objects; at each call if it reads others, which may change
    in place (a dict of parameters, `self`). Modules are traced at each such call.

    Use as `@compress`, `@compress(policy=...)` or `compress(target, ...)`, on the unit
    that a network repeats: a transformer layer, a residual block. For modules of
    Equinox decorate `__call__`, as a function: `@compress(activations='x')`; Haiku:
    compress the transformed `apply`.

    Args:
      target: a Flax Linen module class (gives a class with the same name and
        parameters) or method, a Flax NNX module class or instance, or a function. A
        class's `__call__` is compressed; decorate other methods that are called.
      policy: chooses an action for each residual; `Policy()` when None.
      activations: for a function, names or positions of the arguments whose arrays may
        be stored compressed. All others are taken for parameters: referenced, never
        copied, and so are casts and other values made of parameters alone. None: an
        argument that JAX keeps is referenced; one from which JAX only computes
        residuals may be stored compressed in their place. Modules: call arguments are
        activations, variables are not.
      static_argnums: names or positions of arguments that hold arrays but must stay
        concrete. Arguments without arrays stay Python values anyway.

    Returns:
      A class for a class, an instance for an instance, a function for a function; a
      decorator without a target. Compressed functions take a keyword `rounding_key`, a
      JAX PRNG key for the rounding noise; Flax modules use the RNG stream 'jaxact' if
      there is one (`nn.scan` hands on those that its `split_rngs` names). Without a key
      the noise is derived from the data and the call's number in its trace: where one
      traced program makes several calls (a jitted function called twice, the body of a
      scan around it), equal data are rounded alike, which biases a product of them;
      give each a key. A compressed function inside another needs a key of its own, too.
      (`Dithered` and `Rotated` draw noise from stored numbers alone: there this holds
      for groups with equal extremes, or equal means.) If the target is compressed
      already, the original is compressed: this call's options decide.

    Raises:
      TypeError: an argument has the wrong type; `target` is a generator or
        coroutine function, or when called makes a module, or has an output that is no
        pytree of arrays and constants.
      ValueError: `target` has a parameter `rounding_key` of its own; when called, if
        `activations` or `static_argnums` name no argument.

    Example:
      >>> import jax, jax.numpy as jnp, jaxact
      >>> def layer(w, x):
      ...     return jnp.tanh(x @ w)
      >>> small = jaxact.compress(layer, activations='x')
      >>> w, x = jnp.ones((64, 64)), jnp.ones((8, 64))
      >>> bool((small(w, x) == layer(w, x)).all())
      True
    """
    given = Policy() if policy is None else policy
    checked = checked_policy("compress(policy=", given)
    options = _Options(
        checked,
        None if activations is None else as_tuple("activations", activations),
        as_tuple("static_argnums", static_argnums),
    )
    if target is _AS_DECORATOR:
        return options.compress
    return options.compress(target)


@dataclasses.dataclass(frozen=True)
class _Options:
    """`compress`'s arguments beside its target."""

    policy: Policy
    activations: tuple[str | int, ...] | None
    static_argnums: tuple[str | int, ...]

    def compress(self, target: object) -> Any:
        original = original_of(target)
        if original is not None:
            options = dataclasses.replace(
                self,
                activations=(
                    original.activations
                    if self.activations is None
                    else self.activations
                ),
                static_argnums=self.static_argnums or original.static_argnums,
            )
            return options.compress(original.target)
        if isinstance(target, types.MethodType) and (
            find.for_arguments([target.__self__]) or original_of(target.__func__)
        ):
            method = self.compress(target.__func__)
            return types.MethodType(method, target.__self__)  # an argument as others
        _refuse_maker(target)
        adapter = find.for_target(target)
        if adapter is not None:
            if self.activations is not None:
                name = getattr(target, "__name__", type(target).__name__)
                raise ValueError(
                    f"compress({name}, activations={self.activations!r}): activations "
                    "is for plain functions. The call arguments of a module are its "
                    "activations, its variables are not."
                )
            return adapter.compress(target, self.policy, self.static_argnums)
        if isinstance(target, type):
            raise TypeError(_wrong_class(target))
        if not callable(target):
            raise TypeError(
                f"compress of a value of type {type(target).__name__}: a Flax module "
                f"class, an NNX module or a function is required.{_as_option(target)}"
            )
        return self._compress_function(target)

    def _compress_function(self, f: Callable[..., Any]) -> Callable[..., Any]:
        refuse_key(f)
        if runs_later(f):
            raise TypeError(
                f"compress({f!r}): a generator or coroutine function computes after "
                "its call. Return all results, in a tuple or list."
            )
        cache = TraceCache()

        @functools.wraps(f)
        def compressed(
            *args: object, rounding_key: jax.Array | None = None, **kwargs: object
        ) -> Any:
            static, given = self.static_argnums, (*args, *kwargs.values())
            adapter = find.for_arguments(given)
            if adapter is not None:
                method = adapter.compress_method(
                    f, self.policy, static, self.activations
                )
                made = method(*args, rounding_key=rounding_key, **kwargs)
            else:
                describe = arguments(f, args, kwargs, self.activations, static)
                seed = seed_from(rounding_key)
                name = _class_name(f, args)
                scope = jax.named_scope(scope_in_trace(name)) if name else nullcontext()
                with scope, find.modules_untouched(), _noting_options(f, args, kwargs):
                    made = call_compressed(
                        f, args, kwargs, describe, self.policy, seed, cache=cache
                    )
            _refuse_made(f, made, given)
            return made

        remember(compressed, f, self.activations, self.static_argnums)
        return compressed


@contextmanager
def _noting_options(
    f: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
) -> Iterator[None]:
    """A context for a call; where its arguments do not fit, options may be meant."""
    try:
        yield
    except TypeError as error:
        if not fits(f, args, kwargs):
            error.add_note(
                "jaxact: beside its own arguments a compressed function takes a "
                "rounding_key, by keyword; compress itself takes the options: "
                "compress(f, policy=Policy(bits=2), activations='x')."
            )
        raise


def _class_name(f: Callable[..., Any], args: Sequence[object]) -> str:
    """The class of the module that is called, such as Equinox's; '' for a function.

    Either `f` is the module, or a method, whose first argument is the module.
    """
    if isinstance(f, types.MethodType):  # Linen's and Haiku's open scopes themselves
        is_own = find.for_target(f.__self__) is None and f.__name__ == "__call__"
        return type(f.__self__).__name__ if is_own else ""
    if not hasattr(f, "__qualname__"):
        is_library = type(f).__module__.partition(".")[0] in ("jax", "functools")
        return "" if is_library else type(f).__name__
    names = [cls.__name__ for cls in type(args[0]).__mro__] if args else []
    is_method = any(f.__qualname__.endswith(f"{n}.{f.__name__}") for n in names)
    return names[0] if is_method else ""


def _wrong_class(target: type) -> str:
    name = target.__name__
    if any(cls.__module__.partition(".")[0] == "haiku" for cls in target.__mro__):
        return (
            f"compress({name}): a Haiku module. Compress its transformed function: "
            "compress(hk.transform(f).apply, activations=...); see the guide to other "
            "libraries."
        )
    return (
        f"compress({name}): a class that is no Flax module: decorate its `__call__`, "
        "by @jaxact.compress(activations='x'). An instance works too: "
        "compress(module)(x)."
    )


def _as_option(target: object) -> str:
    """How to write a value by keyword that was given as the target; '' for others."""
    if isinstance(target, str):
        return f" Options are given by keyword: @compress(activations={target!r})."
    if isinstance(target, Policy | Action | int) and not isinstance(target, bool):
        return " Options are given by keyword: @compress(policy=Policy(bits=2))."
    if callable(getattr(target, "apply", None)):  # Haiku's pair with init
        return " Compress its apply: compress(net.apply, activations=...)."
    return ""


def _refuse_maker(target: object) -> None:
    """Refuse a function that makes modules: its own calls have no residuals.

    Raises:
      TypeError: a partial, or a generic alias, with a module's class.
    """
    made = target.func if isinstance(target, functools.partial) else target
    made = get_origin(made) or made
    if made is target or not isinstance(made, type) or not find.for_target(made):
        return
    name = made.__name__
    is_partial = isinstance(target, functools.partial)
    given = f"functools.partial({name}, ...)" if is_partial else f"{name}[...]"
    raise TypeError(
        f"compress({given}): it makes modules of the class {name}; its calls are "
        f"not theirs. Compress the class, and use it in its place: compress({name}), "
        f"or functools.partial(compress({name}), ...)."
    )


def _refuse_made(f: Callable[..., Any], made: object, given: Sequence[object]) -> None:
    """Refuse a module that a call has made: it is one as without `compress`.

    A module that the call was given may have been changed, and returned.

    Raises:
      TypeError: it is a module, and none was given, also inside of a pytree.
    """
    if not find.for_target(made):
        return
    leaves = jax.tree.leaves(given, is_leaf=lambda x: bool(find.for_target(x)))
    if any(map(find.for_target, leaves)):
        return
    maker, name = getattr(f, "__name__", type(f).__name__), type(made).__name__
    raise TypeError(
        f"compress({maker}): its call makes a module of the class {name}, whose own "
        f"calls are not compressed so. Compress the class, compress({name}), and make "
        "the module with that."
    )
