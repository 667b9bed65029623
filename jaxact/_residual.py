"""What a residual is: an array kept from forward to backward, and where it comes from.

Provenance is read from the traced program, walking back from the residual to the
equation that made it, through calls, checkpoints and scans.
"""

import dataclasses
import math
import os
import re
from collections.abc import Sequence
from typing import Any

from jax.extend import source_info_util

from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.read import call_body, is_literal

# Equations that rename or fence a value without changing it; checkpoint inserts the
# second and third.
_TRANSPARENT = {"name", "reduce_precision", "optimization_barrier", "jaxact_residual"}
# What a call says of a value that its body computes.
_WHERE = ("name", "primitive", "path", "source", "number")


@dataclasses.dataclass(frozen=True)
class Residual:
    """One array that the backward pass needs.

    Attributes:
      shape, dtype: of the array as the program computes it.
      origin: 'computed', 'argument', 'constant' or 'literal'.
      primitive: the JAX primitive that computed it; '' unless computed.
      name: its `jax.ad_checkpoint.checkpoint_name`, or ''.
      path: module path and named scopes, as 'Net/block0/up'; for an argument, that of
        the call and its place in it.
      source: 'file.py:line (function)' of the line that computed it.
      stacked: number of copies that enclosing scans keep.
      aliases: names of values that are derived from it in the backward pass.
      number: of the equation that computed it, among those of its primitive and path.
      is_normalized: whether it is stored through a normalization over channels, such
        as BatchNorm's.
    """

    shape: tuple[int, ...]
    dtype: Any
    origin: str = "computed"
    primitive: str = ""
    name: str = ""
    path: str = ""
    source: str = ""
    stacked: int = 1
    aliases: tuple[str, ...] = ()
    number: int = 0
    is_normalized: bool = False

    @property
    def key(self) -> str:
        """Identity, whatever the policy; 'Net/block0/mlp_up' or 'Net/dot_general#1'.

        The path and the `checkpoint_name`, or the primitive and which one of the path
        it is. Calls of the same path, such as the steps of a scan, share their keys.
        """
        number = f"#{self.number}" if self.number and not self.name else ""
        return join_paths(self.path, self.name or self.primitive) + number

    @property
    def size(self) -> int:
        """Elements, over all copies."""
        return math.prod(self.shape) * self.stacked

    @property
    def exact_bytes(self) -> int:
        """Bytes of the array as it is, over all copies."""
        return self.size * self.dtype.itemsize

    def __str__(self) -> str:
        label = self.name or self.primitive or self.origin
        place = ", ".join(p for p in (self.path, self.source) if p)
        shape = ",".join(map(str, self.shape))
        return f"{label} {self.dtype}[{shape}]" + (f" ({place})" if place else "")


def module_path(stack: Any) -> str:
    """A name stack as a path: 'jvp(Net)/block0' becomes 'Net/block0'."""
    parts = re.sub(r"\w+\(|\)", "", str(stack)).split("/")
    return "/".join(p for p in parts if p)


def join_paths(*paths: str) -> str:
    return "/".join(p for p in paths if p)


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Where the values of a traced program come from.

    Attributes:
      jaxpr: the program.
      argument_paths: what to call its inputs.
      prefix: starts the paths of what it computes.
    """

    jaxpr: Any
    argument_paths: Sequence[str]
    prefix: str = ""
    _indexed: dict[int, dict[Any, Any]] = dataclasses.field(default_factory=dict)
    _numbers: dict[tuple[int, str], dict[int, int]] = dataclasses.field(
        default_factory=dict
    )

    def of(self, var: Any) -> Residual:
        """The provenance of one value."""
        found = self._walk(self.jaxpr, var, self.prefix)
        if found.origin == "argument":
            path = join_paths(self.prefix, self.argument_paths[int(found.path)])
            found = dataclasses.replace(found, path=path)
        aval = var.aval
        return dataclasses.replace(found, shape=tuple(aval.shape), dtype=aval.dtype)

    def producers(self, jaxpr: Any) -> dict[Any, Any]:
        """The equation that computes each variable; indexed once for each jaxpr."""
        if id(jaxpr) not in self._indexed:  # the program keeps its jaxprs alive
            self._indexed[id(jaxpr)] = {v: e for e in jaxpr.eqns for v in e.outvars}
        return self._indexed[id(jaxpr)]

    def _number(self, jaxpr: Any, eqn: Any, prefix: str) -> int:
        """How many equations of its primitive and path come before `eqn`."""
        key = (id(jaxpr), prefix)
        if key not in self._numbers:
            seen: dict[tuple[str, str], int] = {}
            numbers = self._numbers[key] = {}
            for e in jaxpr.eqns:
                kind = (e.primitive.name, module_path(e.source_info.name_stack))
                numbers[id(e)] = seen[kind] = seen.get(kind, -1) + 1
        return self._numbers[key][id(eqn)]

    def _walk(self, jaxpr: Any, var: Any, prefix: str) -> Residual:
        """Provenance, with an argument's position in `path` still to resolve."""
        producers = self.producers(jaxpr)
        names: list[str] = []

        def result(**fields: Any) -> Residual:
            named = names + [n for n in [fields.pop("name", "")] if n]
            return Residual((), None, name=named[0] if named else "", **fields)

        while True:
            if is_literal(var):
                return result(origin="literal")
            if var not in producers:
                if var in jaxpr.invars:
                    place = str(jaxpr.invars.index(var))
                    return result(origin="argument", path=place)
                return result(origin="constant")
            eqn = producers[var]
            position = eqn.outvars.index(var)
            name = eqn.primitive.name
            here = join_paths(prefix, module_path(eqn.source_info.name_stack))
            if name in _TRANSPARENT:
                names += [eqn.params["name"]] if name == "name" else []
                var = eqn.invars[position]
                continue
            body = call_body(eqn)
            if body is None and name == "scan":
                body = eqn.params["jaxpr"]
            if body is not None:
                inner, _ = open_jaxpr(body)
                found = self._walk(inner, inner.outvars[position], here)
                if found.origin == "argument" and name != "scan":
                    names += [found.name] if found.name else []
                    var = eqn.invars[int(found.path)]
                    continue
                if found.origin == "computed":
                    return result(**{k: getattr(found, k) for k in _WHERE})
            source = os.path.basename(source_info_util.summarize(eqn.source_info))
            number = self._number(jaxpr, eqn, prefix)
            return result(primitive=name, path=here, source=source, number=number)
