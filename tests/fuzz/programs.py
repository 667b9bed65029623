"""Random programs, as data: steps that print as Python and can be taken away.

A program has inputs, steps in order, and outputs. A step is one line of Python; a
block is a step with a body, which JAX's transformations wrap. The generator evaluates
each step as it adds it, so that values stay finite and of order one.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fuzz import functions
from fuzz.evaluate import evaluate
from fuzz.operation import Operation
from fuzz.operations import OPERATIONS

LARGEST = 4096  # elements of a value
SHAPES = ((16, 64), (8, 16, 32), (4, 8, 8, 16), (16, 16), (12, 33), (8, 128), (128,))
UNLIKE = ("channels", "rows")
DATA = ("normal",) * 3 + (*UNLIKE, "halves", "zeros", "positive")
# Chances, relative to each other.
KINDS = {"smooth": 4, "norms": 2, "products": 3, "moves": 3, "casts": 1.5, "loops": 2}
WRAPPERS = (
    "jax.jit({f})({x})",
    "jax.checkpoint({f})({x})",
    "jax.checkpoint({f}, policy=jax.checkpoint_policies.dots_saveable)({x})",
    "jax.checkpoint({f}, policy=jax.checkpoint_policies.everything_saveable)({x})",
    "lax.cond({x}.ravel()[0] > 0, {f}, {f}, {x})",
    "lax.cond(True, {f}, {f}, {x})",
    "lax.switch(1, [{f}, {f}, {f}], {x})",
    "jax.vmap({f})({x})",
    "lax.map({f}, {x})",
    "lax.scan(lambda c, r: (c, {f}(r)), 0, {x})[1]",
    "lax.scan(lambda c, r: ({f}(r), c), {f}({x}[0]), {x})[1]",
    "lax.scan(lambda c, _: ({f}(c), None), {x}, length=2)[0]",
    "lax.fori_loop(0, 2, lambda i, c: {f}(c), {x})",
    "jax.lax.cond({x}.ravel()[1] < 0, jax.checkpoint({f}), {f}, {x})",
    "jax.jit(lambda t: lax.cond(t.ravel()[0] < 9, {f}, {f}, t))({x})",
)
_OVER_ROWS = ("vmap", "lax.map", "(r)")

SCOPE = {
    "jax": jax,
    "jnp": jnp,
    "lax": lax,
    "np": np,
    "checkpoint_name": checkpoint_name,
    **{name: f for name, f in vars(functions).items() if not name.startswith("_")},
}
_NAME = re.compile(r"\b[xwvr]\d+\b")


@dataclasses.dataclass(frozen=True)
class Input:
    """An argument of a program: its data are random, of the given kind.

    Networks have channels and rows whose values are several times those of others.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    data: str = "normal"

    def value(self, seed: int) -> np.ndarray:
        """The data: normal, also rounded to halves (ties) or with rows of zeros."""
        number = int("".join(filter(str.isdigit, self.name)))
        rng = np.random.default_rng([seed, ord(self.name[0]), number])
        x = rng.standard_normal(self.shape)
        if self.data == "halves":
            x = np.round(2 * x) / 2
        if self.data == "zeros":
            x[..., 0] = 0
            x[0] = 0
        if self.data == "positive":
            x = np.abs(x)
        if self.data == "channels":
            x[..., :: max(x.shape[-1] // 4, 2)] *= 12
        if self.data == "rows":
            x *= np.exp(1.5 * rng.standard_normal((*self.shape[:-1], 1)))
        return x.astype(jnp.dtype(self.dtype))


@dataclasses.dataclass(frozen=True)
class Step:
    """`target = code`; a block's code names the function `f<target>` of its body."""

    target: str
    code: str
    body: tuple["Step", ...] = ()
    argument: str = ""

    def lines(self) -> list[str]:
        """Python source."""
        lines = []
        if self.body:
            inner = [line for step in self.body for line in step.lines()]
            lines = [f"def f{self.target}({self.argument}):"]
            lines += ["    " + s for s in (*inner, f"return {self.body[-1].target}")]
        return [*lines, f"{self.target} = {self.code}"]

    def reads(self) -> set[str]:
        """Variables of outside that it uses."""
        used = {*_NAME.findall(self.code)}
        for step in self.body:
            used |= step.reads()
        return used - {s.target for s in self.body} - {self.argument}


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of `inputs`.

    Attributes:
      seed: of the inputs' data and of the cotangents.
      activations: positions for jaxact.compress, or None.
    """

    seed: int
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    activations: tuple[int, ...] | None = None

    def source(self) -> str:
        """Python source of the function."""
        lines = [line for step in self.steps for line in step.lines()]
        lines.append(f"return {', '.join(self.outputs)},")
        head = f"def program({', '.join(i.name for i in self.inputs)}):"
        return "\n".join([head, *("    " + line for line in lines)])

    def function(self) -> Callable[..., tuple[jax.Array, ...]]:
        """The function."""
        return _defined(self.source(), "program")

    def values(self) -> list[np.ndarray]:
        """The inputs' data."""
        return [i.value(self.seed) for i in self.inputs]

    def __str__(self) -> str:
        names = [i.name for i in self.inputs]
        steps = [s for s in self.steps]
        text = self.source()
        helpers = [
            inspect.getsource(f) if inspect.isfunction(f) else f"# fuzz.functions.{n}\n"
            for n, f in vars(functions).items()
            if callable(f) and re.search(rf"\b{n}\(", text) and n not in names and steps
        ]
        data = [f"# {i.name}: {i.dtype}{list(i.shape)} {i.data}" for i in self.inputs]
        return "\n".join(
            [
                *helpers,
                *data,
                text,
                f"# activations={self.activations}, seed {self.seed}",
            ]
        )


def _defined(source: str, name: str) -> Any:
    scope = dict(SCOPE)
    exec(compile(source, f"<{name}>", "exec"), scope)
    return scope[name]


def generate(seed: int, attempt: int = 0) -> Program:
    """The program of a seed."""
    return _Generator(seed, np.random.default_rng([seed, attempt])).program()


class _Generator:
    def __init__(self, seed: int, rng: np.random.Generator) -> None:
        self.seed, self.rng = seed, rng
        self.inputs: list[Input] = []
        self.values: dict[str, np.ndarray] = {}
        self.count = 0

    def program(self) -> Program:
        shape = self._pick(SHAPES)
        for _ in range(self.rng.integers(1, 4)):
            other = shape if self.rng.random() < 0.7 else self._pick(SHAPES)
            dtype = self._pick(("float32",) * 8 + ("bfloat16", "float16"))
            data = self._pick(DATA)
            if dtype == "float16" and data in UNLIKE:  # their squares would overflow
                data = "normal"
            self._add_input("x", other, dtype, data)
        pool = [i.name for i in self.inputs]
        steps: list[Step] = []
        wanted = int(self.rng.integers(3, 13))
        for _ in range(3 * wanted):
            if len(steps) == wanted:
                break
            step = self._block(pool) if self.rng.random() < 0.2 else self._step(pool)
            if step is not None:
                steps.append(step)
                pool.append(step.target)
        targets = [s.target for s in steps] or pool
        outputs = dict.fromkeys([targets[-1]])
        for name in self.rng.permutation(targets)[: self.rng.integers(0, 3)]:
            outputs[str(name)] = None
        is_float = lambda n: jnp.issubdtype(self.values[n].dtype, jnp.inexact)
        used = set().union(*(s.reads() for s in steps), outputs)
        inputs = tuple(i for i in self.inputs if i.name in used)
        data = tuple(n for n, i in enumerate(inputs) if i.name[0] == "x")
        activations = data if data and self.rng.random() < 0.5 else None
        kept = tuple(n for n in outputs if is_float(n))
        return Program(self.seed, inputs, tuple(steps), kept, activations)

    def _pick(self, items: Any) -> Any:
        return items[int(self.rng.integers(len(items)))]

    def _name(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def _add_input(
        self, letter: str, shape: Any, dtype: str = "float32", data: str = "normal"
    ) -> str:
        new = Input(self._name(letter), tuple(shape), dtype, data)
        self.inputs.append(new)
        self.values[new.name] = new.value(self.seed)
        return new.name

    def _operand(self, names: list[str]) -> str:
        """One of the values, later ones more often."""
        weights = np.arange(1, len(names) + 1) ** 1.0
        return str(self.rng.choice(names, p=weights / weights.sum()))

    def _step(self, pool: list[str]) -> Step | None:
        """A step on values of the pool, or None where an attempt failed."""
        x = self._operand(pool)
        value = self.values[x]
        operation = self._operation(value)
        if operation is None:
            return None
        same = [
            n
            for n in pool
            if (self.values[n].shape, self.values[n].dtype)
            == (value.shape, value.dtype)
        ]
        real = [n for n in pool if not jnp.iscomplexobj(self.values[n])]
        before = len(self.inputs)
        holes = _holes(value.shape) | {"x": x, "y": self._operand(same)}
        holes["u"] = self._operand(real) if real else x
        magnitude = self.rng.uniform(0.4, 2) * self._pick((-1, 1))
        holes["s"] = f"{magnitude:.2f}" if magnitude > 0 else f"({magnitude:.2f})"
        for letter in "wv":
            shape = getattr(operation, letter)
            if shape is not None:
                holes[letter] = self._add_input(
                    "w", shape(value.shape), "float32", "normal"
                )
        step = Step(self._name("v"), operation.code.format(**holes))
        step = self._settled(step)
        if step is None:
            del self.inputs[before:]
        return step

    def _operation(self, value: Any) -> Operation | None:
        if jnp.iscomplexobj(value):
            kinds = ["complex"]
        else:
            kinds = [k for k in OPERATIONS if k != "complex"]
        weights = np.array([KINDS.get(k, 1.0) for k in kinds])
        for _ in range(4):
            kind = str(self.rng.choice(kinds, p=weights / weights.sum()))
            operation = self._pick(OPERATIONS[kind])
            if operation.takes(value.shape):
                return operation
        return None

    def _block(self, pool: list[str]) -> Step | None:
        """Up to three steps under one of JAX's transformations."""
        wrapper = self._pick(WRAPPERS)
        x = self._operand(pool)
        by_rows = any(mark in wrapper for mark in _OVER_ROWS)
        if by_rows and self.values[x].ndim < 2:
            return None
        argument, before = self._name("r"), len(self.inputs)
        self.values[argument] = self.values[x][0] if by_rows else self.values[x]
        inner, body = [argument], []
        for _ in range(self.rng.integers(1, 4)):
            step = self._step([*pool[-1:], *inner] if not by_rows else inner)
            if step is not None:
                body.append(step)
                inner.append(step.target)
        reads = set().union(*(s.reads() for s in body)) if body else set()
        if argument in reads:
            target = self._name("v")
            code = wrapper.format(f=f"f{target}", x=x)
            step = self._settled(Step(target, code, tuple(body), argument))
            if step is not None:
                return step
        del self.inputs[before:]
        return None

    def _settled(self, step: Step) -> Step | None:
        """The step, scaled so that its values are of order one; None if it fails."""
        try:
            value = self._value(step)
        except (TypeError, ValueError, IndexError, NotImplementedError):
            return None
        if value.size > LARGEST:
            return None
        if not jnp.issubdtype(value.dtype, jnp.inexact) or not value.size:
            return None
        wide = np.asarray(value).astype(np.complex64)
        if not np.isfinite(wide).all():
            return None
        size = float(np.abs(wide).max())
        if size > 30:
            factor = 2.0 ** -int(np.log2(size / 4))
            step = dataclasses.replace(step, code=f"({step.code}) * {factor}")
            value = (value * factor).astype(value.dtype)
        self.values[step.target] = np.asarray(value)
        return step

    def _value(self, step: Step) -> Any:
        names = sorted(step.reads())
        lines = ["    " + line for line in step.lines()]
        head = f"def step({', '.join(names)}):"
        f = _defined("\n".join([head, *lines, f"    return {step.target}"]), "step")
        values = [self.values[n] for n in names]
        traced = jax.make_jaxpr(f)(*values)
        if len(traced.out_avals) != 1:
            raise TypeError("one value is required")
        return evaluate(traced, values)[0]


def _holes(shape: tuple[int, ...]) -> dict[str, Any]:
    padded = (1, 1, *shape)
    lead = shape[0] if shape else 1
    return {"n": padded[-1], "m": padded[-2], "lead": lead, "shape": shape}
