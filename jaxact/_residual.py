"""A residual: an array kept from forward to backward, and where it comes from.

Provenance is read from the traced program, walking back from the residual to the
equation that made it, through calls, checkpoints and scans.
"""

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.labels import (
    BODIES,
    CALLS,
    DERIVATIVE,
    Label,
    kind_of,
    labels_in,
    module_path,
    scan_inputs,
    visible,
)
from jaxact._jaxpr.primitives import TRANSPARENT
from jaxact._jaxpr.read import call_body, is_literal, producers_of
from jaxact._jaxpr.source import source_line
from jaxact._jaxpr.types import Atom, Dtype, Eqn, Jaxpr, Producers, Var


@dataclasses.dataclass(frozen=True)
class Residual:
    """One array that the backward pass needs.

    Attributes:
      shape, dtype: as the program computes the array.
      origin: 'computed', 'argument', 'constant' or 'literal'.
      primitive: the JAX primitive that computed it; '' unless computed.
      name: its `jax.ad_checkpoint.checkpoint_name`, or ''.
      path: module path and named scopes, as 'Net/block0/up'; for an argument, the
        call's path and the argument's place in it.
      source: the user's 'file.py:line (function)' that computes it.
      stacked: how many copies enclosing scans keep.
      aliases: names of values that the backward pass derives from it.
      label: tells it from others with its path: its name or its primitive, and from
        the second one on its number, as 'mul#4'; 'tanh.derivative' is a value that
        JAX computes to differentiate `tanh`. Under a path that ends with 'derivative',
        the function that a derivative is of.
      call: tells it from the same residual of other lines' calls with its path, as
        '@call#1', and of other scans, branches, shard_maps and jits with shardings, as
        '@scan#2', '@cond@branch#1', '@shard_map' and '@sharded'; '' outside of these in
        the first call.
      is_normalized: whether it is stored through a normalization over channels, such
        as BatchNorm's.
      is_carry: whether it is the carry that enters each step of a scan, stacked. Its
        path ends with 'carry', as in the scan's body.
      width: the bits that hold each element, for integers that the program bounds.
      is_recomputed_from: whether the backward pass computes something nonlinear from
        it, inside a `jax.checkpoint` or a custom rule. Its rounding biases the
        gradient; unless a rule or a policy's default decides, it takes 8 bits.
    """

    shape: tuple[int, ...]
    dtype: Dtype
    origin: str = "computed"
    primitive: str = ""
    name: str = ""
    path: str = ""
    source: str = ""
    stacked: int = 1
    aliases: tuple[str, ...] = ()
    label: str = ""
    call: str = ""
    is_normalized: bool = False
    width: int | None = None
    is_recomputed_from: bool = False
    is_carry: bool = False

    @property
    def key(self) -> str:
        """Identity, whatever the policy; 'Net/block0/mlp_up' or 'Net/dot_general#1'.

        Path, label and call. It is the same in every trace of a program, whatever is
        differentiated and at any batch size. Numbers count the user's own operations,
        and the places that make calls with one path; what JAX traces apart (a jitted
        function, a checkpoint) counts from 0, and so do a scan's body, whose keys end
        with '@scan', a branch and a shard_map's. Calls of one place with one path share
        keys, as a scan's steps do: a model that a loop calls for each part of a batch.
        Calls without any path do not.
        """
        label = self.label or self.name or self.primitive
        return join_paths(self.path, label) + self.call

    @property
    def is_complex(self) -> bool:
        """Whether its elements have two parts."""
        return jnp.issubdtype(self.dtype, jnp.complexfloating)  # keys have no kind

    @property
    def size(self) -> int:
        """Elements, over all copies."""
        return math.prod(self.shape) * self.stacked

    @property
    def exact_bytes(self) -> int:
        """Bytes as it is, over all copies."""
        return self.size * self.dtype.itemsize

    def at(self, prefix: str) -> "Residual":
        """The same in a call with this module path, which has labels."""
        if self.origin not in ("computed", "argument"):
            return self
        path = join_paths(visible(prefix), self.path)
        return dataclasses.replace(
            self, path=path, call=call_suffix(prefix) + self.call
        )

    def __str__(self) -> str:
        label = self.name or self.primitive or self.origin
        origin = ", ".join(p for p in (self.path, self.source) if p)
        shape = ",".join(map(str, self.shape))
        return f"{label} {self.dtype}[{shape}]" + (f" ({origin})" if origin else "")


def is_within(path: str, pattern: str) -> bool:
    """Whether a part of `path`, of whole components, matches a glob."""
    module = pattern.removesuffix("/*") or pattern
    parts = path.split("/")
    ends = range(1, len(parts) + 1)
    runs = ("/".join(parts[i:j]) for j in ends for i in range(j))
    return any(fnmatch.fnmatchcase(run, module) for run in runs)


def join_paths(*paths: str) -> str:
    return "/".join(p for p in paths if p)


class Name(NamedTuple):
    """A `checkpoint_name`, and the label that it gives; see `Residual.label`."""

    name: str
    label: str


@dataclasses.dataclass(frozen=True)
class _Origin:
    """Where a walk back from a value ends.

    Attributes:
      kind: 'computed', 'argument', 'constant', 'literal', or 'carry': an argument of a
        scan's body, stacked.
      position: an argument's, among the program's inputs.
      label, call: see `Residual`.
    """

    kind: str
    position: int = 0
    primitive: str = ""
    name: str = ""
    path: str = ""
    source: str = ""
    label: str = ""
    call: str = ""

    def named(self, names: Sequence[Name]) -> "_Origin":
        """The same, under the first name, which is nearest to the value."""
        if not names:
            return self
        return dataclasses.replace(self, name=names[0].name, label=names[0].label)


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Where the values in a traced program come from.

    Attributes:
      jaxpr: the program.
      argument_paths: paths for its inputs.
    """

    jaxpr: Jaxpr
    argument_paths: Sequence[str]
    _indexed: dict[int, Producers] = dataclasses.field(default_factory=dict)
    _numbers: dict[int, dict[int, int]] = dataclasses.field(default_factory=dict)
    _added: dict[int, dict[str, list[int]]] = dataclasses.field(default_factory=dict)

    def of(self, v: Var) -> Residual:
        """`v` as a residual: its shape and dtype, and the equation that made it."""
        origin = self._origin(self.jaxpr, v, "")
        path = origin.path
        if origin.kind == "argument":
            path = self.argument_paths[origin.position]
        return Residual(
            tuple(v.aval.shape),
            v.aval.dtype,
            origin="argument" if origin.kind == "carry" else origin.kind,
            primitive=origin.primitive,
            name=origin.name,
            path=path,
            source=origin.source,
            label=origin.label,
            call=origin.call,
            is_carry=origin.kind == "carry",
        )

    def producers(self, jaxpr: Jaxpr) -> Producers:
        """The equation that computes each variable; indexed once for each jaxpr."""
        if id(jaxpr) not in self._indexed:  # the program keeps its jaxprs alive
            self._indexed[id(jaxpr)] = producers_of(jaxpr.eqns)
        return self._indexed[id(jaxpr)]

    def name_of(self, eqn: Eqn) -> Name:
        """The name that a `checkpoint_name` equation in the program gives."""
        return Name(eqn.params["name"], self._label(self.jaxpr, eqn))

    def _label(self, jaxpr: Jaxpr, eqn: Eqn) -> str:
        """An equation's label; without one, its number among those alike."""
        path = module_path(eqn.source_info.name_stack)
        own, labels = Label(kind_of(eqn), self._number(jaxpr, eqn)), labels_in(path)
        if not labels:
            return str(own)
        user, is_in_cell = labels[-1], _is_in_cell(path)
        if user.is_of(own.kind) and own.number == 0 and not is_in_cell:
            return str(Label(own.kind, user.number))
        # JAX's versions differ in the equations that they differentiate one into.
        results = self._results(jaxpr, path)
        is_named = eqn.primitive.name == "name"
        if is_named or user.kind in CALLS or id(eqn) not in results:
            return f"{user}.{own}"
        position = results.index(id(eqn))
        number = f".{position}" if position else ""
        return f"{user}{number}" if is_in_cell else f"{user}.{DERIVATIVE}{number}"

    def _number(self, jaxpr: Jaxpr, eqn: Eqn) -> int:
        """How many equations with its kind, path and label come before `eqn`."""
        if id(jaxpr) not in self._numbers:
            seen: dict[tuple[str, str], int] = {}
            numbers = self._numbers[id(jaxpr)] = {}
            for e in jaxpr.eqns:
                kind = (kind_of(e), module_path(e.source_info.name_stack))
                numbers[id(e)] = seen[kind] = seen.get(kind, -1) + 1
        return self._numbers[id(jaxpr)][id(eqn)]

    def _results(self, jaxpr: Jaxpr, path: str) -> list[int]:
        """The ids of equations at `path` that differentiation added for a result.

        Residuals are among the results.
        """
        if id(jaxpr) not in self._added:
            added = self._added[id(jaxpr)] = {}
            makers = {id(self._maker(jaxpr, v)) for v in jaxpr.outvars}
            for e in jaxpr.eqns:
                if id(e) in makers:
                    stack = module_path(e.source_info.name_stack)
                    labels = labels_in(stack)
                    is_own = labels and labels[-1].is_of(kind_of(e))
                    if not is_own or self._number(jaxpr, e) or _is_in_cell(stack):
                        added.setdefault(stack, []).append(id(e))
        return self._added[id(jaxpr)].get(path, [])

    def _maker(self, jaxpr: Jaxpr, v: Atom) -> Eqn | None:
        """The equation that computes a value, past those that only label it."""
        producers, eqn = self.producers(jaxpr), None
        while not is_literal(v) and v in producers:
            eqn = producers[v]
            if eqn.primitive.name not in TRANSPARENT:
                return eqn
            v = eqn.invars[eqn.outvars.index(v)]
        return None

    def _origin(self, jaxpr: Jaxpr, v: Atom, prefix: str) -> _Origin:
        """Walk back from `v` to the equation, argument or constant that it is."""
        producers = self.producers(jaxpr)
        names: list[Name] = []
        while not is_literal(v) and v in producers:
            eqn = producers[v]
            position = eqn.outvars.index(v)
            name = eqn.primitive.name
            if name in TRANSPARENT:
                if name == "name":
                    names.append(Name(eqn.params["name"], self._label(jaxpr, eqn)))
                v = eqn.invars[position]
                continue
            scope = join_paths(prefix, module_path(eqn.source_info.name_stack))
            origin = self._origin_inside(eqn, position, scope)
            if origin is not None and origin.kind == "argument" and name != "scan":
                names += [Name(origin.name, origin.label)] if origin.name else []
                v = eqn.invars[origin.position]
                continue
            if origin is not None and origin.kind in ("computed", "carry"):
                return origin.named(names)
            source = source_line(eqn.source_info)
            if origin is not None and origin.kind == "argument":
                # Named as in the scan's body, so that a rule means it there and here.
                path = join_paths(visible(scope), scan_inputs(eqn)[origin.position])
                return _Origin(
                    "carry", path=path, source=source, call=call_suffix(scope)
                ).named(names)
            output = f"[{position}]" if len(eqn.outvars) > 1 else ""
            return _Origin(
                "computed",
                primitive=name,
                path=visible(scope),
                source=source,
                label=self._label(jaxpr, eqn) + output,
                call=call_suffix(prefix),
            ).named(names)
        if is_literal(v):
            return _Origin("literal").named(names)
        if v in jaxpr.invars:
            return _Origin("argument", jaxpr.invars.index(v)).named(names)
        return _Origin("constant").named(names)

    def _origin_inside(self, eqn: Eqn, position: int, scope: str) -> _Origin | None:
        """An output's origin inside a call or scan."""
        body = call_body(eqn)
        if body is None and eqn.primitive.name == "scan":
            body = eqn.params["jaxpr"]
        if body is None:
            return None
        jaxpr, _ = open_jaxpr(body)
        return self._origin(jaxpr, jaxpr.outvars[position], scope)


def _is_in_cell(path: str) -> bool:
    """Whether equations at a path differentiate several of the user's together."""
    return path.endswith(f"/{DERIVATIVE}")


@functools.lru_cache  # as `visible`
def call_suffix(prefix: str) -> str:
    """The bodies in a path, and the calls that are not the first with theirs."""
    labels = [
        x
        for x in labels_in(prefix)
        if x.kind in BODIES or x.kind == "call" and x.number
    ]
    return "".join(f"@{label}" for label in labels)
