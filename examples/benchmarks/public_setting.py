"""How public models are built, and the list of them."""

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from public_ways import Net, Way

PACKAGES = "diffusers", "transformers"  # all others are checkouts


@dataclass(frozen=True)
class Setting:
    """How a model is built.

    Attributes:
      code: folder of checkouts.
      is_small: for this machine, with data; else for a GPU's compiler, shapes alone.
    """

    code: Path
    way: Way
    is_small: bool

    def load(self, folder: str, name: str, *absent: str) -> Any:
        """A module of a checkout, read anew: its classes may be replaced.

        Those in `absent` it imports without need; they are left out.
        """
        root = str(self.code / folder)
        sys.modules.pop(name, None)
        for key, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(str(self.code)):
                del sys.modules[key]
        missing = {name: mock.MagicMock() for name in absent}
        with mock.patch.object(sys, "path", [root, *sys.path]):
            for key, module in missing.items():
                sys.modules.setdefault(key, module)
            return importlib.import_module(name)

    def load_package(self, name: str) -> Any:
        """A module of an installed package, read anew."""
        sys.modules.pop(name, None)
        return importlib.import_module(name)

    def wrap(self, owner: Any, name: str, static: Sequence[str] = ()) -> None:
        """Replace the class of a block."""
        setattr(owner, name, self.way.wrap(getattr(owner, name), static))

    def floats(self, *shape: int, dtype: Any = jnp.float32) -> Any:
        if not self.is_small:
            return jax.ShapeDtypeStruct(shape, dtype)
        found = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        return jnp.asarray(found, dtype)

    def in_bfloat16(self, net: Net) -> Net:
        """The network with parameters in bfloat16, where it is not small."""
        cast = lambda x: x.astype(jnp.float32 if self.is_small else jnp.bfloat16)

        def init() -> tuple[Any, Any]:
            params, state = net.init()
            return jax.tree.map(cast, params), state

        return dataclasses.replace(net, init=init)

    def counts(self, size: int, each: int) -> Any:
        full = jnp.full(size, each, jnp.int32)
        return full if self.is_small else jax.eval_shape(lambda: full)

    def tokens(self, *shape: int, vocabulary: int) -> Any:
        if not self.is_small:
            return jax.ShapeDtypeStruct(shape, jnp.int32)
        return jnp.asarray(np.random.default_rng(1).integers(1, vocabulary, shape))


@dataclass(frozen=True)
class Model:
    """A public model.

    Attributes:
      source: its checkout, or package.
      unit: the class that is replaced.
      size: that is compiled for a GPU.
    """

    name: str
    source: str
    unit: str
    size: str
    make: Callable[[Setting], Net]

    def is_there(self, code: Path) -> bool:
        if self.source in PACKAGES:
            return importlib.util.find_spec(self.source) is not None
        return (code / self.source).exists()

    def build(self, code: Path, way: Way, is_small: bool) -> Net:
        return self.make(Setting(code, way, is_small))


MODELS: dict[str, Model] = {}


def model(name: str, source: str, unit: str, size: str) -> Callable[..., Any]:
    def register(make: Callable[[Setting], Net]) -> Callable[[Setting], Net]:
        MODELS[make.__name__] = Model(name, source, unit, size, make)
        return make

    return register


def classify(logits: jax.Array, x: Any, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.astype(jnp.float32).mean()


def next_token(logits: jax.Array, tokens: jax.Array, *others: Any) -> jax.Array:
    return classify(logits[:, :-1], None, tokens[:, 1:])


def squared(outputs: jax.Array, x: Any, target: jax.Array) -> jax.Array:
    return jnp.square(outputs.astype(jnp.float32) - target).mean()
