"""What is stored and how many bytes it takes, without running anything."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxact._codec import Action, Exact
from jaxact._compress import compress
from jaxact._decision import Decision, Reason
from jaxact._jaxpr.flow import fact_of, flow, union
from jaxact._jaxpr.read import variables_in
from jaxact._modules import find
from jaxact._plan.forward import Forward, trace_forward
from jaxact._plan.mark import mark_p
from jaxact._policy import Policy, Rule
from jaxact._report.by_module import ModuleRow, ModuleTable, module_table
from jaxact._residual import Provenance
from jaxact._tabular import Tabular
from jaxact._trace import Flat, arguments, trace

_COLUMNS = "shape dtype primitive name path source action bias exact stored why".split()


@dataclasses.dataclass(frozen=True)
class Row:
    """One stored residual.

    Attributes:
      key: its identity, for `Rule(key=...)`.
      shape, dtype: of the array before it is stored, with the copies that scans stack.
      primitive: that computed it; '' for an argument.
      name: its `checkpoint_name`, or ''.
      path: module path and named scopes.
      source: 'file.py:line (function)'.
      action: how it is stored.
      bias: 'exact', 'unbiased' (its rounding adds noise to gradients, nothing else) or
        'biased' (something nonlinear is computed from the rounded values).
      exact_bytes: of the array as it is.
      stored_bytes: of what is stored.
      why: the reason for the action.
    """

    key: str
    shape: tuple[int, ...]
    dtype: Any
    primitive: str
    name: str
    path: str
    source: str
    action: Action
    bias: str
    exact_bytes: int
    stored_bytes: int
    why: str

    def cells(self) -> tuple[str, ...]:
        """The row as text, one cell for each column."""
        action = str(self.action).replace(", stochastic=True", "")
        return (
            "x".join(map(str, self.shape)) or "scalar",
            str(self.dtype),
            self.primitive or "argument",
            self.name,
            self.path,
            self.source.replace("<locals>.", ""),  # too wide with them
            action,
            self.bias,
            _bytes(self.exact_bytes),
            _bytes(self.stored_bytes),
            self.why,
        )


@dataclasses.dataclass(frozen=True)
class ResidualTable(Tabular):
    """The residuals of a function: `print` it, or show it in a notebook.

    That is a line for each; of a large model `by_path(depth=2)` is easier to read.

    Attributes:
      rows: one for each stored array that the function computes.
      referenced_bytes: of arguments and constants that backward reads in place, such
        as parameters; they exist anyway and are no part of the sums.
      unused_rules: rules of the policies met that matched nothing.
    """

    rows: tuple[Row, ...]
    referenced_bytes: int
    unused_rules: tuple[Rule, ...] = ()

    @property
    def exact_bytes(self) -> int:
        """Bytes of the residuals as they are."""
        return sum(row.exact_bytes for row in self.rows)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the residuals as they are stored."""
        return sum(row.stored_bytes for row in self.rows)

    @property
    def ratio(self) -> float:
        """How many times smaller the stored residuals are."""
        return self.exact_bytes / self.stored_bytes if self.stored_bytes else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, ready for JSON."""
        rows = [
            dataclasses.asdict(row)
            | {"dtype": str(row.dtype), "action": str(row.action)}
            for row in self.rows
        ]
        return {
            "rows": rows,
            "exact_bytes": self.exact_bytes,
            "stored_bytes": self.stored_bytes,
            "ratio": self.ratio,
            "referenced_bytes": self.referenced_bytes,
            "unused_rules": [str(rule) for rule in self.unused_rules],
        }

    def summary(self) -> str:
        """Totals, and what deserves attention."""
        lines = [
            f"{len(self.rows)} residuals: {_bytes(self.exact_bytes)} exact, "
            f"{_bytes(self.stored_bytes)} stored ({self.ratio:.1f}x smaller); "
            f"{_bytes(self.referenced_bytes)} of arguments referenced in place"
        ]
        lines += [f"matched nothing: {rule}" for rule in self.unused_rules]
        if self.rows and all(isinstance(row.action, Exact) for row in self.rows):
            lines.append("nothing is compressed")
        return "\n".join(lines)

    def _cells(self) -> list[tuple[str, ...]]:
        return [tuple(_COLUMNS), *(row.cells() for row in self.rows)]

    def by_path(self, depth: int | None = None) -> ModuleTable:
        """Bytes by module, to be read beside `nn.tabulate` and `nnx.tabulate`.

        Args:
          depth: path components to tell apart; what lies deeper counts for the module
            that contains it. None: all.

        Returns:
          A `ModuleTable` with a row for each path and its share of the stored bytes.

        Raises:
          ValueError: a depth below 1.

        Example:
          >>> import jax, jax.numpy as jnp, jaxact
          >>> @jaxact.compress(policy=jaxact.Policy(bits=2), activations='x')
          ... def network(ws, x):
          ...     for number, w in enumerate(ws):
          ...         with jax.named_scope(f'layer{number}'):
          ...             x = jnp.tanh(x @ w)
          ...     return x
          >>> ws, x = [jnp.ones((256, 256))] * 2, jnp.ones((64, 256))
          >>> print(jaxact.residuals(network, ws, x).by_path())
          path    residuals              exact  stored  ratio   share
          x               1   16,384 (65.5 KB)  4.4 KB  15.1x  25.0 %
          layer0          2  32,768 (131.1 KB)  8.7 KB  15.1x  50.0 %
          layer1          1   16,384 (65.5 KB)  4.4 KB  15.1x  25.0 %
          Total residuals: 4, 65,536 (262.1 KB), stored as 17.4 KB, 15.1x smaller
        """
        rows = (
            ModuleRow(r.path, 1, math.prod(r.shape), r.exact_bytes, r.stored_bytes)
            for r in self.rows
        )
        return module_table(rows, depth)

    def plot(self) -> Any:
        """Bars of exact and stored bytes per residual, as a matplotlib axis."""
        try:
            from matplotlib import pyplot  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError(
                "ResidualTable.plot needs matplotlib: pip install 'jaxact[plots]'."
            ) from error
        _, axis = pyplot.subplots(figsize=(8, 1 + 0.25 * len(self.rows)))
        labels = [f"{i} {r.name or r.primitive}" for i, r in enumerate(self.rows)]
        axis.barh(labels, [r.exact_bytes / 2**20 for r in self.rows], label="exact")
        axis.barh(labels, [r.stored_bytes / 2**20 for r in self.rows], label="stored")
        axis.invert_yaxis()
        axis.set_xlabel("MiB")
        axis.legend()
        return axis


def residuals(
    fn: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] | None = None,
    policy: Policy | None = None,
    **kwargs: Any,
) -> ResidualTable:
    """List what `fn` keeps for its backward pass, without running it.

    Args:
      fn: any function, with compressed calls inside or not.
      *args: of the call: arrays or `jax.ShapeDtypeStruct`, NNX modules, and anything
        else `fn` takes.
      **kwargs: the same by keyword.
      argnums: arguments to differentiate, as for `jax.grad`; of NNX modules these are
        the parameters. None: all float arrays, also those closed over.
      policy: list what compressing `fn` with this policy would store.

    Returns:
      A `ResidualTable`. Residuals inside compressed calls appear with what their policy
      decided; all others are kept exactly by JAX and say so. Sizes are of arrays, not
      of compiled memory: see `jaxact.memory` for that.

    Raises:
      ValueError: argnums out of range.

    Example:
      >>> import jax.numpy as jnp, jaxact
      >>> f = jaxact.compress(lambda x: jnp.sin(x) * 2, policy=jaxact.Policy(bits=2))
      >>> table = jaxact.residuals(f, jnp.ones((64, 256)))
      >>> table.exact_bytes, table.stored_bytes
      (65536, 4352)
    """
    if policy is not None:
        fn = compress(fn, policy=policy)
    call = find.pure_call(fn, args, kwargs)
    flat, values, _ = trace_pure(call)
    active = differentiated(call, values, argnums)
    run = lambda _, *values: flat(*values)
    return _tabulate(trace_forward(run, np.uint32(0), values, active), flat.paths)


def trace_pure(
    call: find.PureCall,
) -> tuple[Flat, list[Any], Callable[[Sequence[Any]], Any]]:
    """The call as `trace` gives it, no argument of which is known to be a parameter."""
    described = arguments(call.fn, call.args, call.kwargs, None, ())
    return trace(call.fn, call.args, call.kwargs, described)


def differentiated(
    call: find.PureCall,
    values: Sequence[Any],
    argnums: int | Sequence[int] | None,
) -> list[bool]:
    """Which of the values that `trace_pure` gives `argnums` asks to differentiate.

    Raises:
      ValueError: argnums out of range.
    """
    is_float = [jnp.issubdtype(v.dtype, jnp.inexact) for v in values]
    if argnums is None:
        return is_float
    chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    num_args = call.num_positional
    if not {*chosen} <= {*range(-num_args, num_args)}:
        raise ValueError(
            f"argnums={argnums!r}: positions of arguments are required, and the call "
            f"has {num_args} positional ones, numbered from 0. What is given by "
            "keyword is not differentiated, as by jax.grad."
        )
    places = {n % num_args for n in chosen}
    closed_over = [-1] * (len(values) - len(call.owners))
    owners = [*closed_over, *call.owners]
    return [f and n in places for f, n in zip(is_float, owners, strict=True)]


@dataclasses.dataclass
class _Marks:
    """The marks met in a program: a bit, an equation and its copies for each."""

    number: dict[tuple[int, ...], int] = dataclasses.field(default_factory=dict)
    found: list[tuple[Any, int]] = dataclasses.field(default_factory=list)

    def transfer(self, eqn: Any, facts: Any, around: tuple[Any, ...]) -> int:
        out = union(eqn, facts, around)
        if eqn.primitive is not mark_p:
            return out
        # A body shared by several calls is a different residual in each.
        key = (*map(id, around), id(eqn))
        if key not in self.number:
            copies = 1
            for outer in around:
                copies *= outer.params.get("length", 1)
            self.number[key] = len(self.found)
            self.found.append((eqn, copies))
        return out | 1 << self.number[key]


def _tabulate(forward: Forward, paths: Sequence[str]) -> ResidualTable:
    jaxpr, marks = forward.jaxpr, _Marks()
    provenance = Provenance(jaxpr, ["seed", *paths])
    facts = flow(jaxpr, [0] * len(jaxpr.invars), marks.transfer)
    inputs = {*jaxpr.invars, *jaxpr.constvars}
    outside: list[Row] = []
    stored: dict[int, int] = {}
    referenced = 0
    for v in dict.fromkeys(variables_in(forward.residuals)):
        size = v.aval.size * v.aval.dtype.itemsize
        bits = fact_of(facts, v)
        if v in inputs:
            referenced += size
        elif bits:
            mark = (bits & -bits).bit_length() - 1
            stored[mark] = stored.get(mark, 0) + size
        else:
            what = provenance.of(v)
            kept = Decision(what, Exact(), Reason.OUTSIDE)
            outside.append(_row(kept, what.shape, size, size))
    inside = [_marked_row(*marks.found[m], size) for m, size in sorted(stored.items())]
    return ResidualTable((*inside, *outside), referenced, _unused(marks))


def _marked_row(eqn: Any, copies: int, stored: int) -> Row:
    decision, aval = eqn.params["decision"], eqn.outvars[0].aval
    shape = (copies, *aval.shape) if copies > 1 else tuple(aval.shape)
    exact = copies * aval.size * aval.dtype.itemsize
    return _row(decision, shape, exact, stored)


def _row(decision: Decision, shape: tuple[int, ...], exact: int, stored: int) -> Row:
    what, how = decision.residual, (decision.action, decision.bias)
    place = (what.primitive, what.name, what.path, what.source)
    return Row(what.key, shape, what.dtype, *place, *how, exact, stored, decision.why)


def _unused(marks: _Marks) -> tuple[Rule, ...]:
    used: dict[Policy, set[int]] = {}
    for eqn, _ in marks.found:
        params = eqn.params
        used.setdefault(params["policy"], set()).update(params["used_rules"])
    return tuple(
        rule
        for policy, indices in used.items()
        for index, rule in enumerate(policy.rules)
        if index not in indices
    )


def _bytes(n: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.4g} {unit}"
        n /= 1024  # type: ignore[assignment]
    return f"{n:.4g} GiB"
