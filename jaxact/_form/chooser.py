"""Choose what of a forward program to store, so that backward has every residual.

A residual that is exact costs little: it is kept, or evaluated again from parameters,
masks and statistics. Any other one is derived from its base, and bases are stored, with
three exceptions that need no array of their own: a concatenation of stored values, the
sum of two of them, and parts of a value that is stored whole.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from jaxact._form.affine_classes import Classes
from jaxact._jaxpr.read import is_literal


class Chooser:
    """What the residuals of one program need."""

    def __init__(self, jaxpr: Any, classes: Classes, makers: dict[Any, Any]) -> None:
        self.classes = classes
        self.makers = makers
        self.place = {v: k for k, e in enumerate(jaxpr.eqns) for v in e.outvars}

    def bases(self, variables: Iterable[Any]) -> list[Any]:
        """The bases of what is inexact among `variables`."""
        inexact = [v for v in variables if not self.classes.is_exact(v)]
        return list(dict.fromkeys(self.classes.base[v] for v in inexact))

    def choose(self, residuals: Sequence[Any]) -> list[Any]:
        """The bases to store for `residuals`."""
        roots = self._whole_or_parts(dict.fromkeys(self.bases(residuals)))
        roots = self._split_concatenations(roots)
        joined = self._sums_of_two(roots)
        return [v for v in roots if v not in joined]

    def derive(
        self, residuals: Sequence[Any], stored: Iterable[Any]
    ) -> tuple[list[Any], set[int]]:
        """How to have `residuals` from `stored`.

        Returns:
          The exact variables to keep, and ids of the equations to evaluate again.
        """
        stored, kept, replayed = set(stored), [], set()
        todo, seen = list(residuals), set()
        while todo:
            v = todo.pop()
            if is_literal(v) or v in seen or v in stored:
                continue
            seen.add(v)
            if self.classes.is_exact(v) and v not in self.classes.again:
                kept.append(v)
                continue
            eqn = self.makers[v]
            replayed.add(id(eqn))
            todo.extend(eqn.invars)
            if v in self.classes.sides:
                todo.append(self.classes.sides[v][0])
        return kept, replayed

    def _order(self, v: Any) -> int:
        return self.place.get(v, -1)

    def _whole_or_parts(self, roots: dict[Any, None]) -> dict[Any, None]:
        """Store parts of a value apart only where that takes fewer elements."""
        parts: dict[Any, list[Any]] = {}
        for v, whole in self.classes.parts.items():
            parts.setdefault(whole, []).append(v)
        roots = self._without_parts(roots)
        for whole in sorted(parts, key=self._order, reverse=True):
            needed = [v for v in parts[whole] if v in roots]
            size, limit = sum(v.aval.size for v in needed), whole.aval.size
            if size > limit:
                roots = self._without_parts(roots | {whole: None})
        return roots

    def _without_parts(self, roots: dict[Any, None]) -> dict[Any, None]:
        """Without what is a part of something else that is stored."""
        parents = self.classes.parts
        whole = lambda v: self._nearest(parents[v], roots) if v in parents else v
        return {v: None for v in roots if v not in parents or whole(v) not in roots}

    def _nearest(self, v: Any, roots: Iterable[Any]) -> Any:
        """What is stored that a base is a part of; the base itself if nothing is."""
        base = v
        while v not in roots:
            if v not in self.classes.parts:
                return base
            v = self.classes.parts[v]
        return v

    def _split_concatenations(self, roots: dict[Any, None]) -> dict[Any, None]:
        """Store what was concatenated, unless that is more."""
        for v in sorted(self.makers, key=self._order, reverse=True):
            bases = self._operands(v, roots, "concatenate") if v in roots else []
            new = [b for b in bases if b not in roots]
            if bases and sum(b.aval.size for b in new) <= v.aval.size:
                roots = {u: None for u in roots if u is not v}
                roots |= dict.fromkeys(new)
        return dict.fromkeys(sorted(roots, key=self._order))

    def _sums_of_two(self, roots: dict[Any, None]) -> set[Any]:
        """Roots that are the sum of two stored values (a residual join).

        Not of sums themselves: the noise of a value would grow with depth, and the
        backward pass would hold a chain of decoded values.
        """
        joined: set[Any] = set()
        for v in roots:
            bases = self._operands(v, roots, "add", "sub", "add_any")
            if len(bases) == 2 and all(b in roots and b not in joined for b in bases):
                joined.add(v)
        return joined

    def _operands(self, v: Any, roots: Iterable[Any], *names: str) -> list[Any]:
        """The bases of the operands, if one of `names` makes v."""
        eqn = self.makers.get(v)
        if eqn is None or eqn.primitive.name not in names:
            return []
        return list({self._nearest(b, roots): None for b in self.bases(eqn.invars)})
