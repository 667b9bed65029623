"""Choose the values to store in a forward program, so that backward has each residual.

A residual that is exact costs little: it is kept, or evaluated again from parameters,
masks and statistics. Any other one is derived from its base, and bases are stored, with
three exceptions that need no further array: concatenated stored values (DenseNet), the
sum when both terms are stored (a residual join), and parts when the whole is stored (a
fused query-key-value product).
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from jaxact._form.classes import Classes
from jaxact._jaxpr.read import is_float, is_literal, num_bytes, readers_of
from jaxact._jaxpr.types import Atom, Eqn, Jaxpr, Producers, Var
from jaxact._plan.program import Program

# A set in the order in which it grew.
Roots = dict[Var, None]
# Products that may be of a value with itself.
_SQUARES = frozenset("mul square integer_pow dot_general".split())


@dataclasses.dataclass(frozen=True, eq=False)
class Chooser:
    """A program's classes, and the equations that connect them."""

    program: Program
    classes: Classes

    @property
    def jaxpr(self) -> Jaxpr:
        return self.program.jaxpr

    @property
    def producers(self) -> Producers:
        return self.program.producers

    def bases(self, variables: Iterable[Atom]) -> list[Var]:
        """The inexact variables' bases."""
        inexact = [v for v in variables if not self.classes.is_exact(v)]
        return list(dict.fromkeys(self.classes.base[v] for v in inexact))

    def bases_behind(
        self, v: Atom, operands: Callable[[Eqn], Sequence[Atom]]
    ) -> set[Var]:
        """The base of a value, and those behind `operands` of a base's equation."""
        found: set[Var] = set()
        todo: list[Atom] = [v]
        while todo:
            for base in self.bases([todo.pop()]):
                if base not in found:
                    found.add(base)
                    eqn = self.producers.get(base)
                    todo += () if eqn is None else operands(eqn)
        return found

    def choose(
        self, residuals: Sequence[Var], wholes: Collection[Var] = ()
    ) -> list[Var]:
        """The bases to store for `residuals`.

        Args:
          wholes: to be stored in place of their parts.
        """
        roots = self._split_multiples(dict.fromkeys(self.bases(residuals)))
        roots = self._split_concatenations(self._whole_or_parts(roots, wholes))
        joined = self._sums_of_two(roots)
        return [v for v in roots if v not in joined]

    def derive(
        self, residuals: Sequence[Var], stored: Iterable[Var]
    ) -> tuple[list[Var], set[int]]:
        """How to have `residuals` from `stored`.

        Returns:
          The exact variables to keep, and the equations to evaluate again, by id.
        """
        stored, kept, replayed = set(stored), [], set()
        todo: list[Atom] = list(residuals)
        seen: set[Var] = set()
        while todo:
            v = todo.pop()
            if is_literal(v) or v in seen or v in stored:
                continue
            seen.add(v)
            if self.classes.is_exact(v) and v not in self.classes.cheap:
                kept.append(v)
                continue
            eqn = self.producers[v]
            replayed.add(id(eqn))
            todo.extend(eqn.invars)
            if v in self.classes.sides:
                todo.append(self.classes.sides[v][0])
        return kept, replayed

    def with_latest(self, residuals: Sequence[Var], stored: Iterable[Var]) -> "Chooser":
        """The same, but `derive` keeps a mean where only that needs the sum behind it.

        As JAX does, and what a program returns decides what XLA fuses: in an RMSNorm
        before a GroupNorm another product with a sum, which is rounded once then.
        """
        kept, replayed = self.derive(residuals, stored)
        readers = readers_of([e for e in self.jaxpr.eqns if id(e) in replayed])
        ends = frozenset(residuals)
        latest = {self._latest(v, ends, readers) for v in kept}
        return dataclasses.replace(self, classes=self.classes.with_kept(latest))

    def _latest(
        self,
        kept: Var,
        residuals: frozenset[Var],
        readers: Mapping[Var, Sequence[Eqn]],
    ) -> Var:
        """The last value from `kept` alone that all else can be had from."""
        latest, source = kept, frozenset([kept])
        while latest not in residuals and len(readers.get(latest, ())) == 1:
            (eqn,) = readers[latest]
            (v, *others) = eqn.outvars
            is_alone = not others and self.classes.needed.get(v) == source
            are_floats = is_float(v) and is_float(latest)
            if not is_alone or not are_floats or num_bytes(v) > num_bytes(latest):
                break
            latest = v
        return latest

    @functools.cached_property
    def _positions(self) -> dict[Var, int]:
        return {v: k for k, e in enumerate(self.jaxpr.eqns) for v in e.outvars}

    def _position(self, v: Var) -> int:
        """The place where `v` is computed; inputs come first."""
        return self._positions.get(v, -1)

    def _whole_or_parts(self, roots: Roots, wholes: Collection[Var]) -> Roots:
        """Store parts apart only where they have fewer elements than the whole.

        Queries, keys and values get their own groups; overlapping windows, which
        together are larger than the value that they are cut from, do not.
        """
        parts: dict[Var, list[Var]] = {}
        for v, whole in self.classes.parts.items():
            parts.setdefault(whole, []).append(v)
        roots = self._without_parts(roots)
        for whole in sorted(parts, key=self._position, reverse=True):
            needed = [v for v in parts[whole] if v in roots]
            size = sum(v.aval.size for v in needed)
            if size > whole.aval.size or (whole in wholes and needed):
                roots = self._without_parts(roots | {whole: None})
        return roots

    def _without_parts(self, roots: Roots) -> Roots:
        """Without parts whose whole is a root: a ReLU's output where x is stored."""
        wholes = self.classes.parts

        def is_part(v: Var) -> bool:
            return v in wholes and self._nearest(wholes[v], roots) in roots

        return {v: None for v in roots if not is_part(v)}

    def _nearest(self, v: Var, roots: Roots) -> Var:
        """The root that `v` is, or is a part of; `v` itself without one."""
        whole = v
        while whole not in roots:
            if whole not in self.classes.parts:
                return v
            whole = self.classes.parts[whole]
        return whole

    def _split_multiples(self, roots: Roots) -> Roots:
        """Store both terms where sums near a pole have exact multiples: a G + b h.

        They are the output and the slopes in a gate that mixes two values.
        """
        split: Roots = {}
        for v in roots:
            whole = self.classes.whole_base(v)  # or a dropout's operand
            bases = self._operands(whole, roots, "add", "sub", "add_any")
            is_apart = whole in self.classes.multiplied and whole not in self._distances
            is_split = is_apart and len(bases) > 1 and whole.aval.size == v.aval.size
            split |= dict.fromkeys(bases if is_split else [v])
        return split

    def _split_concatenations(self, roots: Roots) -> Roots:
        """Store a concatenation's operands, unless they are larger (DenseNet)."""
        for v in sorted(self.producers, key=self._position, reverse=True):
            bases = self._operands(v, roots, "concatenate") if v in roots else []
            added = [b for b in bases if b not in roots]
            if bases and sum(b.aval.size for b in added) <= v.aval.size:
                roots = {u: None for u in roots if u is not v}
                roots |= dict.fromkeys(added)
        return dict.fromkeys(sorted(roots, key=self._position))

    def _sums_of_two(self, roots: Roots) -> set[Var]:
        """Roots that are a sum with both terms stored: x + f(x), a residual join.

        Not a sum that has a sum as a term: a value's noise would grow with depth, and
        the backward pass would hold a whole chain, decoded. Nor a distance, which is
        small where its terms are alike, as their noise is not: between unit vectors 0.1
        apart it was 0.07 gradients at 8 bits.
        """
        joined: set[Var] = set()
        for v in roots:
            bases = self._operands(v, roots, "add", "sub", "add_any")
            are_stored = all(b in roots and b not in joined for b in bases)
            if len(bases) == 2 and are_stored and v not in self._distances:
                joined.add(v)
        return joined

    @functools.cached_property
    def _distances(self) -> set[Var]:
        """Differences that are squared. Not sums: an RMSNorm's of a residual join."""
        differences = {
            v
            for eqn in self.jaxpr.eqns
            if eqn.primitive.name == "sub"
            for v in eqn.outvars
        }
        squares = (eqn for eqn in self.jaxpr.eqns if eqn.primitive.name in _SQUARES)
        return differences & {v for eqn in squares for v in self._squared(eqn)}

    def _squared(self, eqn: Eqn) -> set[Var]:
        """Bases that are multiplied with themselves, or a matrix product with them.

        The latter in Mahalanobis distances.
        """
        products = lambda e: e.invars if e.primitive.name == "dot_general" else ()
        x, y = eqn.invars[0], eqn.invars[-1]
        return {
            base
            for one, other in ((x, y), (y, x))
            for base in self.bases([one])
            if base in self.bases_behind(other, products)
        }

    def _operands(self, v: Var, roots: Roots, *primitives: str) -> list[Var]:
        """The operands' bases, if one among `primitives` makes v."""
        eqn = self.producers.get(v)
        if eqn is None or eqn.primitive.name not in primitives:
            return []
        return list({self._nearest(b, roots): None for b in self.bases(eqn.invars)})
