"""Parts of a backward program that scale each element of a cotangent by a slope."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
from jax import lax

from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.read import is_literal, readers_of, variables_in
from jaxact._jaxpr.rewrite import new_equation, new_literal, new_variable, rename
from jaxact._jaxpr.types import Atom, Eqn, Jaxpr, Renaming, Var

_LINEAR_SUMS = frozenset("add add_any sub neg copy convert_element_type".split())


@dataclasses.dataclass(frozen=True, eq=False)
class Scaling:
    """Equations by which values are the elements of one cotangent, times slopes.

    Attributes:
      source: the cotangent.
      results: values that other equations read, or that are gradients.
    """

    source: Var
    eqns: tuple[Eqn, ...]
    results: tuple[Var, ...]

    @property
    def factors(self) -> list[Var]:
        """The values that are no cotangents."""
        made = {self.source, *(v for eqn in self.eqns for v in eqn.outvars)}
        read = (v for eqn in self.eqns for v in variables_in(eqn.invars))
        return list(dict.fromkeys(v for v in read if v not in made))

    @property
    def divisors(self) -> list[Var]:
        """The factors that the cotangent is divided by."""
        quotients = (eqn for eqn in self.eqns if eqn.primitive.name == "div")
        return variables_in([eqn.invars[1] for eqn in quotients])

    def slopes(self) -> tuple[list[Eqn], list[Var]]:
        """Equations for the slopes, and the slope of each result.

        The results for a cotangent of ones.
        """
        ones = new_variable(self.source.aval)
        names: Renaming = {self.source: ones}
        eqns = [_ones(self.eqns[0], ones)]
        for eqn in self.eqns:
            inputs = [rename(v, names) for v in eqn.invars]
            outputs = [new_variable(v.aval) for v in eqn.outvars]
            names.update(zip(eqn.outvars, outputs, strict=True))
            eqns.append(eqn.replace(invars=inputs, outvars=outputs))
        # Renamed to variables, as the results are.
        return eqns, variables_in([rename(v, names) for v in self.results])

    def by_slopes(self, slopes: Sequence[Var]) -> dict[Var, Eqn]:
        """The equations for the results, given their slopes."""
        like = self.eqns[-1]
        return {
            v: _equation(lax.mul, like, [self.source, slope], v)
            for v, slope in zip(self.results, slopes, strict=True)
        }


def scalings(
    jaxpr: Jaxpr, dependent: Collection[Var], rounded: set[Var]
) -> list[Scaling]:
    """The largest such parts of a backward program.

    They end with products with `rounded` factors or with sums: for a number times a
    result, or with its sign changed, another slope would be stored.

    Args:
      dependent: the variables that depend on cotangents.
      rounded: values that are made from residuals which will be rounded.
    """
    source, parts = dict[Var, Var](), dict[Var, list[Eqn]]()
    for eqn in jaxpr.eqns:
        found = _scaled(eqn, dependent, source)
        if found is not None:
            source[eqn.outvars[0]] = found
            parts.setdefault(found, []).append(eqn)
    readers, gradients = readers_of(jaxpr.eqns), set(variables_in(jaxpr.outvars))

    def scaling(own: Var, eqns: Sequence[Eqn]) -> Scaling | None:
        kept: dict[int, Eqn] = {}
        for eqn in reversed(eqns):
            (v,), operands = eqn.outvars, variables_in(eqn.invars)
            is_last = not any(id(reader) in kept for reader in readers.get(v, ()))
            is_sum = sum(x in dependent for x in operands) > 1
            if not is_last or is_sum or not rounded.isdisjoint(operands):
                kept[id(eqn)] = eqn

        def is_result(v: Var) -> bool:
            others = (id(reader) not in kept for reader in readers.get(v, ()))
            return v in gradients or any(others)

        inside = tuple(reversed(kept.values()))
        results = tuple(e.outvars[0] for e in inside if is_result(e.outvars[0]))
        return Scaling(own, inside, results) if results else None

    found = [scaling(own, eqns) for own, eqns in parts.items()]
    return [one for one in found if one is not None]


def _scaled(
    eqn: Eqn, dependent: Collection[Var], source: Mapping[Var, Var]
) -> Var | None:
    """The cotangent that an equation's result is scaled from, element by element."""
    name, operands = eqn.primitive.name, eqn.invars
    if name == "select_n":
        # Not from zeros, which may stand in for elements that are no numbers.
        operands = operands[1:]
        if not is_literal(eqn.invars[0]) and eqn.invars[0] in dependent:
            return None
    elif name == "mul":
        operands = [v for v in operands if not is_literal(v) and v in dependent]
        if len(operands) != 1:
            return None
    elif name == "div":
        divisor = operands[1]
        if not is_literal(divisor) and divisor in dependent:
            return None
        operands = operands[:1]
    elif name not in _LINEAR_SUMS:
        return None
    sources: set[Atom] = set()
    for v in operands:
        if is_literal(v) or v not in dependent:
            return None
        sources.add(source.get(v, v))
    if len(sources) != 1:
        return None
    (own,) = variables_in(list(sources))
    out = eqn.outvars[0].aval
    is_alike = (out.shape, out.dtype) == (own.aval.shape, own.aval.dtype)
    # In a `shard_map` an array of ones has another type.
    is_plain = out.size > 1 and not out.manual_axis_type.varying
    return own if is_alike and is_plain else None


def _ones(like: Eqn, v: Var) -> Eqn:
    """An equation that fills an array with ones."""
    one = new_literal(v.aval.dtype.type(1))
    fill = lambda x: lax.broadcast_in_dim(x, v.aval.shape, ())
    return _equation(fill, like, [one], v)


def _equation(
    f: Callable[..., jax.Array], like: Eqn, inputs: Sequence[Atom], output: Var
) -> Eqn:
    """The one equation of `f(*inputs)`; JAX knows its parameters."""
    types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inputs]
    (eqn,) = open_jaxpr(jax.make_jaxpr(f)(*types))[0].eqns
    return new_equation(like, eqn.primitive, inputs, [output], eqn.params)
