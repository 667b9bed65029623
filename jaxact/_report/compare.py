"""Several versions of a training step, side by side."""

import collections
import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.stages import Traced

from jaxact._engine.warnings import CompressionWarning
from jaxact._memory import LiveArray, Memory
from jaxact._memory.buffers import updated_types
from jaxact._memory.live import describe
from jaxact._report.step import count_products, step_program, step_residuals
from jaxact._saved import Saved
from jaxact._tabular import SMALL_SHARE, Column, Tabular, bytes_text
from jaxact._time.predicted import gpu_for, predict
from jaxact._written_as import written_as

# Stored residuals that shrink by more than a tenth should show in the compiled step.
_SMALLER = 0.9


@dataclasses.dataclass(frozen=True)
class ComparedStep(Saved):
    """One version of a step.

    Attributes:
      name: in the mapping given to `compare`.
      residual_bytes: arrays that its gradient keeps from forward to backward, before
        they are stored.
      stored_bytes: after. Both are as JAX lists them; XLA may keep less.
      products: matrix products and convolutions that it computes, recomputed ones too.
      compile_seconds: tracing and compiling; less for a function that JAX has traced
        before.
      donatable_bytes: arguments that are not donated, though a result has the same
        type and could be written over them.
      memory: as `jaxact.memory` gives it.
      at_peak: arrays that live at the compiled peak, see `jaxact.live`.
      predicted_seconds: the least that it takes on a GPU, see `jaxact.predicted_time`;
        None where the step is compiled for a device whose rates are not known.
    """

    name: str
    residual_bytes: int
    stored_bytes: int
    products: int
    compile_seconds: float
    donatable_bytes: int
    memory: Memory
    at_peak: tuple[LiveArray, ...]
    predicted_seconds: float | None = None

    @property
    def gradient_bytes(self) -> int:
        """Bytes of backward's temporaries at the peak with the type that an argument
        and a result have.
        """
        types = updated_types((row.kind, row.type) for row in self.at_peak)
        return sum(
            row.bytes
            for row in self.at_peak
            if row.kind == "temporary" and row.phase == "backward" and row.type in types
        )


@dataclasses.dataclass(frozen=True)
class Comparison(Tabular):
    """Versions of a step side by side: `print` it, or show it in a notebook.

    Attributes:
      rows: in the order of the mapping.
    """

    rows: tuple[ComparedStep, ...]

    def __getitem__(self, name: str) -> ComparedStep:
        """The step of a name.

        Raises:
          KeyError: there is none.
        """
        return {row.name: row for row in self.rows}[name]

    def summary(self) -> str:
        """What else takes memory in the last step; steps whose bytes did not fall."""
        return "\n".join([*_besides(self.rows[-1]), *self.warnings()])

    def warnings(self) -> tuple[str, ...]:
        """Steps that store less than the first, and do not take less compiled."""
        first = self.rows[0]
        return tuple(
            _NOT_SMALLER.format(
                name=row.name,
                first=first.name,
                stored=bytes_text(row.stored_bytes),
                before=bytes_text(first.stored_bytes),
                temp=bytes_text(row.memory.temp_bytes),
                advice=_advice(row.memory),
            )
            for row in self.rows[1:]
            if row.stored_bytes < _SMALLER * first.stored_bytes
            and row.memory.temp_bytes >= first.memory.temp_bytes
        )

    def _table(self) -> tuple[list[Column[ComparedStep]], tuple[ComparedStep, ...]]:
        return _COLUMNS, self.rows

    def _brief(self) -> tuple[list[Column[ComparedStep]], tuple[ComparedStep, ...]]:
        """Without the time to compile, where that to run is predicted: 80 columns."""
        is_predicted = any(row.predicted_seconds is not None for row in self.rows)
        return [c for c in _COLUMNS if c is not _COMPILE or not is_predicted], self.rows


_NOT_SMALLER = (
    "{name!r} stores {stored} of residuals where {first!r} stores {before}, but its "
    "compiled step takes no less: temp {temp}. {advice}"
)


def _advice(memory: Memory) -> str:
    if memory.device == "cpu" and jax.__version_info__ < (0, 11):
        return (
            "JAX 0.10 drops optimization barriers on the CPU outside of loops: compile "
            "for a GPU, target='h100', or scan over layers."
        )
    return "jaxact.live lists the arrays at its peak."


def _besides(step: ComparedStep) -> list[str]:
    """What takes memory besides residuals at a step's peak, where it is 1 % or more."""
    least = SMALL_SHARE * step.memory.peak_bytes
    parts = []
    if step.donatable_bytes >= least:
        parts.append(
            f"{bytes_text(step.donatable_bytes)} of arguments are not donated and have "
            "results of their type (if those replace them: donate_argnums)"
        )
    if step.gradient_bytes >= least:
        parts.append(f"{bytes_text(step.gradient_bytes)} of gradients")
    temporaries = [row for row in step.at_peak if row.kind == "temporary"]
    if temporaries:
        largest = max(temporaries, key=lambda row: row.bytes)
        name = largest.place
        parts.append(
            f"the largest array is {largest.type}, {bytes_text(largest.bytes)}"
            + (f": {name}" if name else "")
            + (f" at {largest.source}" if largest.source else "")
        )
    return [f"at the peak of {step.name!r}: {'; '.join(parts)}"] if parts else []


def _milliseconds(step: ComparedStep) -> str:
    seconds = step.predicted_seconds
    return "" if seconds is None else f"{seconds * 1e3:.3g} ms"


_COMPILE: Column[ComparedStep] = Column(
    "compile", lambda row: f"{row.compile_seconds:.1f} s", is_number=True
)
_COLUMNS: list[Column[ComparedStep]] = [
    Column("step", lambda row: row.name),
    Column("residuals", lambda row: bytes_text(row.residual_bytes), is_number=True),
    Column("stored", lambda row: bytes_text(row.stored_bytes), is_number=True),
    Column("temp", lambda row: bytes_text(row.memory.temp_bytes), is_number=True),
    Column("peak", lambda row: bytes_text(row.memory.peak_bytes), is_number=True),
    Column("products", lambda row: str(row.products), is_number=True),
    Column("predicted", _milliseconds, is_number=True),
    _COMPILE,
]


@written_as("compare({'uncompressed': step, 'jaxact': small_step}, params, batch)")
def compare(
    steps: Mapping[str, Callable[..., Any]],
    *args: Any,
    target: str | None = None,
    **kwargs: Any,
) -> Comparison:
    """Compile several versions of a step for the same arguments, side by side.

    Nothing runs. The first is the one to compare with, such as the uncompressed one.

    Args:
      steps: each a function, such as a training step or the gradient of a loss, by the
        name that its row has.
      *args: arguments of each, as for `memory`.
      target: the GPU to compile for; `None` is the local backend.
      **kwargs: keyword arguments of each.

    Returns:
      A `Comparison`: residual and stored bytes, compiled temporaries and peak, matrix
      products and convolutions, the time predicted for a GPU, seconds to compile.

    Raises:
      TypeError: `steps` is not a mapping from names to functions.
      ValueError: as `memory`.
      ImportError: as `memory`.
      NotImplementedError: as `memory`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxact
      >>> layer = lambda w, x: jnp.tanh(x @ w)
      >>> small = jaxact.compress(layer, activations="x")
      >>> def gradient(layer):
      ...     network = lambda ws, x: jax.lax.scan(
      ...         lambda x, w: (layer(w, x), None), x, ws)[0].sum()
      ...     return jax.grad(network)
      >>> found = jaxact.compare(
      ...     {"plain": gradient(layer), "4 bits": gradient(small)},
      ...     jnp.ones((24, 64, 64)), jnp.ones((256, 64)))
      >>> found["4 bits"].stored_bytes >> 10, found["4 bits"].products
      (432, 72)
    """
    is_mapping = isinstance(steps, Mapping) and all(isinstance(n, str) for n in steps)
    if not is_mapping or not all(map(callable, steps.values())):
        raise TypeError(
            f"jaxact.compare({_types_of(steps)}): a mapping from names to steps is "
            "required: {'uncompressed': step, 'jaxact': small_step}."
        )
    if not steps:
        raise TypeError("jaxact.compare({}): at least one step is required.")
    rows = [_row(name, step, args, kwargs, target) for name, step in steps.items()]
    found = Comparison(tuple(rows))
    for message in found.warnings():
        warnings.warn(f"jaxact: {message}", CompressionWarning, stacklevel=3)
    return found


def _types_of(steps: object) -> str:
    """Steps as messages name them: by type, as arrays would fill pages."""
    if not isinstance(steps, Mapping):
        return type(steps).__name__
    named = (f"{name!r}: {type(step).__name__}" for name, step in steps.items())
    return f"{{{', '.join(named)}}}"


def _row(
    name: str,
    step: Callable[..., Any],
    args: Sequence[object],
    kwargs: dict[str, Any],
    target: str | None,
) -> ComparedStep:
    start = time.perf_counter()
    traced, compiled, live = describe(step, args, kwargs, target)
    seconds = time.perf_counter() - start
    gpu = gpu_for(target)
    program = step_program(traced.jaxpr)
    table = step_residuals(program)
    return ComparedStep(
        name=name,
        residual_bytes=table.exact_bytes,
        stored_bytes=table.stored_bytes,
        products=count_products(program),
        compile_seconds=seconds,
        donatable_bytes=_donatable_bytes(traced),
        memory=live.memory,
        at_peak=live.rows,
        predicted_seconds=predict(compiled, gpu).seconds if gpu else None,
    )


def _donatable_bytes(traced: Traced) -> int:
    """Bytes of arguments that results could be written over, and are not."""
    type_of = lambda leaf: (tuple(leaf.shape), leaf.dtype)
    is_argument = lambda leaf: hasattr(leaf, "donated")
    arguments = jax.tree.leaves(traced.args_info, is_leaf=is_argument)
    results = collections.Counter(map(type_of, jax.tree.leaves(traced.out_info)))
    results -= collections.Counter(type_of(leaf) for leaf in arguments if leaf.donated)
    size = 0
    for leaf in arguments:
        if not leaf.donated and results[type_of(leaf)] > 0:
            results[type_of(leaf)] -= 1
            size += math.prod(leaf.shape) * leaf.dtype.itemsize
    return size
