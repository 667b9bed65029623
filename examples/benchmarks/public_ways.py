"""Ways to wrap a public model's classes, and networks as functions of arrays."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import jaxact

Loss = Callable[..., jax.Array]  # of (outputs, *inputs)
Wrap = Callable[[Any, Sequence[str]], Any]  # (class, its static arguments) -> class


@dataclass(frozen=True)
class Net:
    """A network as functions of arrays.

    Attributes:
      init: parameters, and other state.
      outputs: of (parameters, other state, a key for rounding, *inputs).
      loss: of (outputs, *inputs), a scalar.
      inputs: one batch.
    """

    init: Callable[[], tuple[Any, Any]]
    outputs: Callable[..., Any]
    loss: Loss
    inputs: tuple[Any, ...]


@dataclass(frozen=True)
class Way:
    """A way to keep residuals, by wrapping the class that a model repeats.

    Attributes:
      wrap: of the class.
      is_compressed: with jaxact, so that the whole network may be wrapped instead.
    """

    name: str
    wrap: Wrap
    is_compressed: bool = False


def checkpoint(cls: type, static: Sequence[str]) -> type:
    """The class, of the same name, computed again in the backward pass.

    `remat` counts arguments by position; here those in `static` are closed over.
    """
    call = cls.__call__
    signature = inspect.signature(call)
    remat: Any = nn.remat if issubclass(cls, nn.Module) else nnx.remat

    @functools.wraps(call)
    def again(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        fixed = {name: given.pop(name) for name in static if name in given}
        run = lambda module, *arrays: call(
            module, **dict(zip(list(given)[1:], arrays, strict=True)), **fixed
        )
        return remat(run)(*given.values())

    body = {"__call__": again, "__module__": cls.__module__}
    return type(cls)(cls.__name__, (cls,), body)


def compress(cls: type, static: Sequence[str]) -> type:
    return jaxact.compress(cls)  # static arguments are found


def exact(cls: type, static: Sequence[str]) -> type:
    return jaxact.compress(cls, policy=jaxact.Policy(default=jaxact.Exact()))


def both(cls: type, static: Sequence[str]) -> type:
    return checkpoint(compress(cls, static), static)


PLAIN = Way("plain", lambda cls, static: cls)
REMAT = Way("remat", checkpoint)
JAXACT = Way("jaxact", compress, is_compressed=True)
EXACT = Way("exact", exact, is_compressed=True)
BOTH = Way("both", both)


def linen(
    module: nn.Module,
    inputs: tuple[Any, ...],
    loss: Loss,
    arguments: Callable[..., tuple[Any, ...]] = lambda x, *labels: (x,),
    **options: Any,
) -> Net:
    """A Linen network, called with `arguments(*inputs)` and the options."""

    def init() -> tuple[Any, Any]:
        rngs = {
            "params": jax.random.key(0),
            "dropout": jax.random.key(1),
            "lstm": jax.random.key(2),
        }
        given = jax.tree.map(jnp.zeros_like, inputs)  # shapes, where nothing runs
        variables = dict(module.init(rngs, *arguments(*given), **options))
        return variables.pop("params"), variables

    def outputs(params: Any, state: Any, key: jax.Array, *inputs: Any) -> Any:
        return module.apply(
            {"params": params, **state},
            *arguments(*inputs),
            **options,
            mutable=list(state),
            rngs={
                "jaxact": key,
                "dropout": jax.random.key(1),
                "lstm": jax.random.key(2),
            },
        )

    return Net(init, outputs, lambda found, *inputs: loss(found[0], *inputs), inputs)


def functional(
    create: Callable[[], nnx.Module],
    call: Callable[..., Any],
    inputs: tuple[Any, ...],
    loss: Loss,
) -> Net:
    """An NNX network, called by `call(model, *inputs)`."""
    graph, *_ = nnx.split(nnx.eval_shape(create), nnx.Param, ...)

    def init() -> tuple[Any, Any]:
        params, state = nnx.split(create(), nnx.Param, ...)[1:]
        return params, state

    def outputs(params: Any, state: Any, key: jax.Array, *inputs: Any) -> Any:
        model = nnx.merge(graph, params, state, copy=True)
        for number, (_, node) in enumerate(nnx.iter_graph(model)):
            is_own = not type(node).__module__.startswith("flax.")
            if isinstance(node, nnx.Module) and is_own:
                node.noise = nnx.Rngs(jaxact=jax.random.fold_in(key, number))
        return call(model, *inputs)

    return Net(init, outputs, loss, inputs)
