"""Exact-affine classes: which values are known once another one is.

A value is *exact* if the backward pass can have it to the last bit: parameters, row and
channel statistics, masks, integers, and cheap functions from those. Any other value
belongs to its *base*'s class: it is A * base + C with exact A and C, so a base
that is rounded without bias gives every member without bias. A value that is not
affine in a single one is a base itself.

`max(x, c)` is affine in x given one exact bit per element: which side won.
"""

import dataclasses
from collections.abc import Collection, Hashable, Mapping

from jaxact._form.masks import Masks
from jaxact._form.pole_arguments import pole_in
from jaxact._form.small_integers import integer_widths
from jaxact._form.softmax import softmaxes
from jaxact._form.statistics import find_statistics
from jaxact._jaxpr.flow import Facts, fact_of
from jaxact._jaxpr.primitives import (
    CHEAP,
    COMPARISONS,
    EXPONENTIALS,
    SELECTIONS,
    SUMS,
)
from jaxact._jaxpr.read import (
    call_body,
    is_float,
    is_literal,
    literal_key,
    loses_precision,
    variables_in,
)
from jaxact._jaxpr.types import Atom, Eqn, Predicate, Var
from jaxact._plan.facts import is_activation
from jaxact._plan.program import Program, found_once

# Where max or min takes its first operand: the comparison, and the side it is true on.
_SIDES = {
    "max": {"gt": True, "ge": True, "lt": False, "le": False},
    "min": {"gt": False, "ge": False, "lt": True, "le": True},
}
_Comparisons = dict[Hashable, Var]

# Most bits for an element that backward keeps to have a value exactly, or from another
# one: what costs more is worth a codec.
_MOST_BITS = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Classes:
    """The bases in a program.

    Attributes:
      statistics: which stay exact whatever their size.
      base: for each inexact variable; exact ones have none.
      needed: for each exact variable, those that backward has to keep to have it.
      cost: for each exact variable, their bytes.
      cheap: exact variables that cost less evaluated again than kept.
      parts: bases that are affine in another one, but smaller or only with a mask for
        each element: better stored themselves, unless that one is stored anyway.
      sides: for each max or min that is affine by an exact bit: the mask and whether
        it is true where the first operand wins.
      softmaxes: for each softmax's output its exponential, after which it is called.
      names: for each base, the `checkpoint_name` equations of values affine in it.
      spared: bases that are kept exactly, and cheap functions from them.
      masks: the masks that are known without any of these.
      exponentials: in the program.
      inverses: whose divisor, or another argument with a pole, is spared.
      random: values that no floating input is behind.
      widths: the bits for an element, of integers that a bit field holds.
      multiplied: bases that are stored in place of products with spared ones, and sums
        that are made from these.
    """

    statistics: Collection[Var] = ()
    base: dict[Atom, Var] = dataclasses.field(default_factory=dict)
    needed: dict[Var, frozenset[Var]] = dataclasses.field(default_factory=dict)
    cost: dict[Var, float] = dataclasses.field(default_factory=dict)
    cheap: set[Var] = dataclasses.field(default_factory=set)
    parts: dict[Var, Var] = dataclasses.field(default_factory=dict)
    sides: dict[Var, tuple[Var, bool]] = dataclasses.field(default_factory=dict)
    softmaxes: dict[Var, Var] = dataclasses.field(default_factory=dict)
    names: dict[Var, list[Eqn]] = dataclasses.field(default_factory=dict)
    spared: set[Var] = dataclasses.field(default_factory=set)
    masks: Masks = dataclasses.field(default_factory=Masks)
    exponentials: set[Var] = dataclasses.field(default_factory=set)
    inverses: set[Var] = dataclasses.field(default_factory=set)
    random: set[Var] = dataclasses.field(default_factory=set)
    widths: Mapping[Var, int] = dataclasses.field(default_factory=dict)
    multiplied: set[Var] = dataclasses.field(default_factory=set)

    def is_exact(self, v: Atom) -> bool:
        return is_literal(v) or v not in self.base

    def whole_base(self, v: Var) -> Var:
        """The base that others are parts of: exponentials, for `where(q > 0, q, 1)`."""
        base = self.base[v]
        while base in self.parts:
            base = self.parts[base]
        return base

    def with_exact(self, variables: set[Var]) -> "Classes":
        """The same, but the backward pass has `variables` exactly."""
        base = {v: b for v, b in self.base.items() if v not in variables}
        return dataclasses.replace(self, base=base)

    def with_kept(self, variables: set[Var]) -> "Classes":
        """The same, but `variables` are not evaluated again."""
        return dataclasses.replace(self, cheap=self.cheap - variables)


def classify(
    program: Program,
    small_size: int,
    inexact: set[Var],
    kept: Collection[Var] = (),
    is_normalized: Predicate = lambda v: False,
    is_summed: Predicate = lambda v: False,
    multiplied: Collection[Var] = (),
) -> Classes:
    """Find every variable's class.

    Args:
      small_size: values with at most this many elements are exact.
      inexact: inputs that the backward pass can have only as they are stored.
      kept: variables that are stored exactly, whatever they cost.
      is_normalized: whether a variable is the operand of a norm, and stored through it.
      is_summed: whether it is stored over its rows' sums, which may vanish.
      multiplied: bases that are stored in place of products with `kept` values.
    """
    jaxpr, facts = program.jaxpr, program.facts
    classes = Classes(
        find_statistics(program),
        softmaxes={s.output: s.exponential for s in softmaxes(program)},
        widths=integer_widths(program, small_size),
        multiplied=set(multiplied),
    )
    comparisons = _comparisons(program)
    for v in (*jaxpr.constvars, *jaxpr.invars):
        classes.cost[v], classes.needed[v] = 0.0, frozenset()
        if not is_float(v):
            classes.random.add(v)
        if v in inexact and v.aval.size > small_size:
            if v in kept:
                classes.spared.add(v)
            else:
                classes.base[v] = v
    for eqn in jaxpr.eqns:
        classes.masks.note(eqn)
        if eqn.primitive.name in EXPONENTIALS:
            classes.exponentials.update(eqn.outvars)
        if classes.random.issuperset(variables_in(eqn.invars)):
            classes.random.update(eqn.outvars)
        if pole_in(eqn)[0] in classes.spared:
            classes.inverses.update(eqn.outvars)
        for v in eqn.outvars:
            base = None
            if not _is_parameter(eqn, v, facts):
                base = _base(eqn, v, classes, comparisons, small_size)
            if base not in (None, v) and is_normalized(v) and not is_normalized(base):
                # 0.5 x before a norm, which tells the scales of its channels alone.
                classes.parts[v], base = base, v
            whole = classes.parts.get(v)
            if whole is not None and whole not in classes.exponentials:
                if is_summed(v) and not is_summed(whole):
                    del classes.parts[v]  # the noise of the whole is magnified
            if base is None and not _settle(eqn, v, classes, facts, small_size):
                base = v
            if base is not None and v in kept:
                classes.cost[v], classes.needed[v] = 0.0, frozenset()
                classes.spared.add(v)
            elif base is not None:
                classes.base[v] = base
        source = eqn.invars[0] if eqn.primitive.name == "name" else None
        if source is not None and not is_literal(source):
            names = classes.names.setdefault(classes.base.get(source, source), [])
            names.append(eqn)
    return classes


def _is_parameter(eqn: Eqn, v: Var, facts: Facts) -> bool:
    """Whether a call has it from parameters alone, whatever else the call computes.

    A weight that a shard_map copies to each device, or that a branch returns for its
    backward pass, as before JAX 0.12; one that a custom rule's forward rule returns
    beside its result, as those of `nnx.custom_vjp` do.
    """
    if eqn.primitive.name in ("shard_map", "cond"):
        return not is_activation(facts, v)
    return call_body(eqn) is not None and not fact_of(facts, v)


def _base(
    eqn: Eqn,
    v: Var,
    classes: Classes,
    comparisons: _Comparisons,
    small_size: int,
) -> Var | None:
    """An output's base; None where it is exact."""
    name, size = eqn.primitive.name, v.aval.size
    # A ReLU's or dropout's mask, an embedding's indices.
    if not is_float(v) or v.aval.size <= small_size:
        return None
    # A LayerNorm's mean and deviation, a softmax's maximum and sum.
    if v in classes.statistics:
        return None
    inexact = [i for i, x in enumerate(eqn.invars) if not classes.is_exact(x)]
    bases = {classes.base[eqn.invars[i]] for i in inexact}
    # A cast weight, a norm's deviation broadcast along its rows.
    if not bases:
        return None
    # A GLU's product, a residual join's sum; a softmax, whose derivative needs no more.
    if len(bases) > 1 or v in classes.softmaxes:
        if name in SUMS and bases <= classes.multiplied:
            classes.multiplied.add(v)
        return v
    base = next(iter(bases))
    # A ReLU is affine by the mask that its derivative keeps anyway.
    masked = name in _SIDES and len(inexact) == 1
    if masked:
        side = _side(eqn, comparisons)
        if side is None:
            return v
        classes.sides[v] = side
    affine = not loses_precision(eqn) and (
        masked
        or name in SUMS  # x - mean and a norm's bias
        or (name == "mul" and len(inexact) == 1)  # its inverse deviation, its gain
        or (name == "div" and inexact == [0])  # an exponential by sums of some
        or (name in SELECTIONS and inexact == [0])  # a fused product's keys
    )
    # A matrix product, a convolution, exp(scores), a GELU, a cast to float8.
    if not affine:
        return v
    # Stored themselves, ReLU and dropout need no mask, queries, keys and values get
    # their own groups, and elements that a slice cuts off are not stored. Nor are those
    # that a mask sets to zero, which may be larger than all that it keeps.
    smaller = name in SELECTIONS and size < eqn.invars[0].aval.size
    smaller = smaller or classes.masks.masking(eqn) is not None
    smaller = smaller or _is_scaled_exponential(eqn, inexact[0], classes)
    bits = _bits_needed(eqn, size, classes)
    if bits > _MOST_BITS and _has_random_factor(eqn, classes):
        return v
    is_scaled = base not in classes.multiplied and _is_scaled_by_spared(eqn, classes)
    if masked or smaller or bits >= 1 or is_scaled:
        classes.parts[v] = base
        return v
    return base


def _is_scaled_exponential(eqn: Eqn, position: int, classes: Classes) -> bool:
    """Whether an exponential, the operand there, is multiplied with exact numbers.

    They may be a mask, which nothing else tells if it is given as an array of floats.
    """
    is_product = eqn.primitive.name == "mul" and bool(_exact_operands(eqn, classes))
    return is_product and eqn.invars[position] in classes.exponentials


def _bits_needed(eqn: Eqn, size: int, classes: Classes) -> float:
    """Bits that the exact operands cost for each element: dropout's is one.

    Statistics of short rows do too. A sum with one, such as x - mean, is better stored
    itself. A product is not: its rows, of which one group holds many, may have scales
    that the operand's have not (x / (s^2 + 1) with the rows' sums s, before a norm: at
    8 bits an error of 4 gradients).
    """
    exact = _exact_operands(eqn, classes)
    if eqn.primitive.name not in SUMS:
        exact = [x for x in exact if _has_each(x, size, classes)]
    return 8 * sum(classes.cost[x] for x in exact) / size


def _exact_operands(eqn: Eqn, classes: Classes) -> list[Var]:
    return [x for x in variables_in(eqn.invars) if classes.is_exact(x)]


def _has_random_factor(eqn: Eqn, classes: Classes) -> bool:
    """Whether exact operands are made from integers: a sample's noise, from its bits.

    A segment's sums are not, through which a segment softmax is stored.
    """
    needed = {v for x in _exact_operands(eqn, classes) for v in classes.needed[x]}
    return not any(map(is_float, needed))


def _is_scaled_by_spared(eqn: Eqn, classes: Classes) -> bool:
    """Whether an exact operand is a factor for each element, known from spared bases.

    A product with exp(d), which may be large where the product is small, has less noise
    if it is rounded itself, and it needs no d. Not random numbers times 1 / p, the
    slope of log(p), which is large where p is small, and meets p again.
    """
    inputs = variables_in(eqn.invars)
    is_random = any(x in classes.random and x in classes.base for x in inputs)
    if is_random and not classes.inverses.isdisjoint(inputs):
        return False
    return eqn.primitive.name not in SUMS and any(x in classes.spared for x in inputs)


def _has_each(x: Var, size: int, classes: Classes) -> bool:
    """Whether backward keeps a value for each of so many elements to have `x`."""
    return any(v.aval.size >= size for v in classes.needed[x])


def _settle(eqn: Eqn, v: Var, classes: Classes, facts: Facts, small_size: int) -> bool:
    """Note an exact output's cost; False if it is better stored as a base."""
    keep = v.aval.size / 8  # a mask takes a bit for each element
    if v.aval.dtype != bool:
        itemsize = getattr(v.aval.dtype, "itemsize", 4)
        keep *= classes.widths.get(v, 8 * itemsize)
    sources = set(variables_in(eqn.invars))
    exact = all(map(classes.is_exact, sources))
    # Not kept: a cast weight, a broadcast mean, an embedded row.
    is_cheap = exact and eqn.primitive.name in CHEAP and not eqn.effects
    needed = frozenset([v])
    if is_cheap:
        needed = frozenset().union(*(classes.needed[x] for x in sources))
    cost = sum(classes.cost[x] for x in needed) if is_cheap else keep
    is_large = is_float(v) and v.aval.size > small_size
    is_rounded = is_activation(facts, v) and v not in classes.statistics
    # Not near a pole: log(p) times random numbers, or a product of softmaxes that is
    # normalized again, has slopes of any size there.
    is_near_pole = is_cheap and not classes.spared.isdisjoint(sources)
    if is_large and is_rounded and not is_near_pole:
        # A look-up in a table as a product with one-hot rows.
        if 8 * min(cost, keep) > _MOST_BITS * v.aval.size:
            return False
    if is_near_pole and is_large:
        classes.spared.add(v)
    if is_cheap and cost <= keep:
        classes.cheap.add(v)
        classes.cost[v], classes.needed[v] = cost, needed
    else:
        classes.cost[v], classes.needed[v] = keep, frozenset([v])
    return True


@found_once
def _comparisons(program: Program) -> _Comparisons:
    """Masks by comparison: its name and operands."""
    return {
        (eqn.primitive.name, *map(literal_key, eqn.invars)): eqn.outvars[0]
        for eqn in program.jaxpr.eqns
        if eqn.primitive.name in COMPARISONS
    }


def _side(eqn: Eqn, masks: _Comparisons) -> tuple[Var, bool] | None:
    """A mask that tells which operand won in max or min."""
    first, second = map(literal_key, eqn.invars)
    # x > 0, which `jax.nn.relu` keeps for its derivative.
    for name, on_first in _SIDES[eqn.primitive.name].items():
        if (name, first, second) in masks:
            return masks[name, first, second], on_first
        if (name, second, first) in masks:
            return masks[name, second, first], not on_first
    # x == max(x, y), which `jnp.maximum` keeps for its derivative.
    out = eqn.outvars[0]
    for x, on_first in ((first, True), (second, False)):
        for pair in ((x, out), (out, x)):
            if ("eq", *pair) in masks:
                return masks["eq", *pair], on_first
    return None
