"""Evaluate a backward pass so that each residual is decoded where it is first read.

A product of a residual and a cotangent, such as a weight's gradient, reads both from
memory. XLA would decode the residual when the backward pass of its call starts, and
keep it until the cotangent is there. So it is packed until then: 493 instead of 542 MiB
for ResNet-50 at 2 bits on an H100, 736 instead of 762 for ViT-B, in no more time. Not
on a CPU: a transformer's step takes as much there either way.

Sums over few rows take two steps, see `sums.py`.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import jax

from jaxact._engine.depths import Sources, decoded_anew, sources
from jaxact._engine.lone import lone_barrier
from jaxact._engine.sums import is_in_steps, sum_in_steps
from jaxact._jaxpr.evaluate import bind, value_of
from jaxact._jaxpr.primitives import MATMULS
from jaxact._jaxpr.read import is_float, num_bytes, programs_in, variables_in
from jaxact._jaxpr.types import Env, Eqn, Jaxpr, PyTree, Var


@dataclasses.dataclass(frozen=True)
class Order:
    """The equations of a backward pass.

    Attributes:
      packed: inputs that are no cotangents.
      cotangents: the other inputs.
      dependent: indices: those that depend on the cotangents.
      producers: for each value of the other ones, its equation's index.
      continuing: values that a later product depends on.
    """

    jaxpr: Jaxpr
    packed: list[Var]
    cotangents: list[Var]
    dependent: list[int]
    producers: dict[Var, int]
    continuing: set[Var]

    @classmethod
    def of(cls, jaxpr: Jaxpr, count: int) -> "Order":
        """For a program whose first `count` inputs are no cotangents."""
        packed, cotangents = jaxpr.invars[:count], jaxpr.invars[count:]
        depends, dependent = set(cotangents), []
        producers: dict[Var, int] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            if depends.isdisjoint(variables_in(eqn.invars)) and not eqn.effects:
                producers.update(dict.fromkeys(eqn.outvars, i))
            else:
                dependent.append(i)
                depends.update(eqn.outvars)
        continuing: set[Var] = set()
        for i in reversed(dependent):
            eqn = jaxpr.eqns[i]
            if has_product(eqn) or not continuing.isdisjoint(eqn.outvars):
                continuing.update(depends.intersection(variables_in(eqn.invars)))
        return cls(
            jaxpr, list(packed), list(cotangents), dependent, producers, continuing
        )

    def continues(self, eqn: Eqn) -> bool:
        """Whether it is a product on whose result a later one depends."""
        return has_product(eqn) and not self.continuing.isdisjoint(eqn.outvars)

    def before(self, eqn: Eqn, known: Collection[Var]) -> list[Eqn]:
        """Equations that do not depend on the cotangents, but `eqn` on them.

        `known`: values that are there.
        """
        found: set[int] = set()
        left = variables_in(eqn.invars)
        while left:
            v = left.pop()
            i = self.producers.get(v)
            if i is not None and i not in found and v not in known:
                found.add(i)
                left += variables_in(self.jaxpr.eqns[i].invars)
        return [self.jaxpr.eqns[i] for i in sorted(found)]


# (equations, values of inputs, the packed residuals among these) -> gradients
Evaluator: TypeAlias = Callable[[Order, Env, Sequence[PyTree]], list[jax.Array]]


def equation_by_equation(
    order: Order, env: Env, packed: Sequence[PyTree]
) -> list[jax.Array]:
    """The results, by `Evaluation`."""
    return Evaluation(order, env).outputs()


@dataclasses.dataclass
class Evaluation:
    """One evaluation, equation by equation.

    Attributes:
      env: the values so far.
      unread: packed arrays that no equation so far has read.
      sources: the packed arrays from which values are decoded.
      anew: for equations' indices, those to decode anew.
    """

    order: Order
    env: Env
    unread: set[Var] = dataclasses.field(init=False)
    sources: Sources = dataclasses.field(init=False)
    anew: dict[int, list[Var]] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.unread = set(self.order.packed)
        eqns, dependent = self.order.jaxpr.eqns, self.order.dependent
        others = dict.fromkeys(self.order.producers.values())
        self.sources = sources(self.order.packed, [eqns[i] for i in others])
        found = decoded_anew([eqns[i] for i in dependent], self.sources)
        self.anew = {dependent[i]: packed for i, packed in found.items()}

    def outputs(self) -> list[jax.Array]:
        """The program's results."""
        jaxpr = self.order.jaxpr
        for i in self.order.dependent:
            self.step(i)
        for v in dict.fromkeys(variables_in(jaxpr.outvars)):
            if v not in self.env:
                self.evaluate(jaxpr.eqns[self.order.producers[v]])
        return [value_of(v, self.env) for v in jaxpr.outvars]

    def step(self, i: int) -> None:
        """The equation with this index, which depends on the cotangents."""
        if packed := self.anew.get(i, []):
            values = lone_barrier([self.env[v] for v in packed], on_cpu=False)
            self.env.update(zip(packed, values, strict=True))
            for v, own in self.sources.items():
                if v not in packed and not set(own).isdisjoint(packed):
                    self.env.pop(v, None)
        self.evaluate(self.order.jaxpr.eqns[i])

    def evaluate(self, eqn: Eqn) -> None:
        """An equation, after those that it needs."""
        eqns = [*self.order.before(eqn, self.env), eqn]
        words = self._first_read(eqns)
        if not words or not has_product(eqn):
            self.run(eqns, self.env)
            return
        # The cotangent's other readers do not wait: XLA fuses them with its producer.
        others = [v for v in variables_in(eqn.invars) if v in self.env]
        waiting = list(dict.fromkeys([*words, *filter(is_float, others)]))
        values = lone_barrier([self.env[v] for v in waiting], on_cpu=False)
        env = self.env | dict(zip(waiting, values, strict=True))
        self.run(eqns, env)
        self.env.update((v, env[v]) for made in eqns for v in made.outvars)

    def _first_read(self, eqns: Sequence[Eqn]) -> list[Var]:
        """The words of a residual that no equation before has read.

        They are its largest array. One kernel computes with the other ones, metadata,
        of all residuals.
        """
        read = dict.fromkeys(v for eqn in eqns for v in variables_in(eqn.invars))
        fresh = [v for v in read if v in self.unread]
        self.unread.difference_update(fresh)
        most = max(map(num_bytes, fresh), default=0)
        return [v for v in fresh if num_bytes(v) == most]

    def run(self, eqns: list[Eqn], env: Env) -> None:
        """Equations whose other inputs are in `env`, to which results are added."""
        for eqn in eqns:
            values = [value_of(v, env) for v in eqn.invars]
            if is_in_steps(eqn):
                results = [sum_in_steps(eqn, *values)]
            else:
                results = bind(eqn, values)
            env.update(zip(eqn.outvars, results, strict=True))


def has_product(eqn: Eqn) -> bool:
    """Whether it is a matrix product or a convolution, or has one inside."""
    return eqn.primitive.name in MATMULS or any(
        has_product(inner) for program in programs_in(eqn) for inner in program.eqns
    )
