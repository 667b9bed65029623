"""The variance that rounding each residual adds to a backward pass's results.

Rounded residuals add E||error||^2 to a gradient, and that number decides their bits
(ActNN, Chen et al. 2021, arXiv:2104.14129; AC-GC, Evans and Aamodt, NeurIPS 2021).
There each layer has its own formula. Here one walk over the backward program finds it:
the program is linear in the cotangents, so an error can be followed from the residual,
through cheap equations, to the product that it enters.

The *targets*, where noise is measured:
- the product between a residual and a cotangent, by a matmul or a convolution (a
  weight's gradient; both gradients in an attention);
- a cotangent after cheap equations, where a matmul, a convolution or something not
  understood reads it next (the gradient at the input to a norm or an activation);
- an output.
Noise is not followed past its first target.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.evaluate import bind, value_of
from jaxact._jaxpr.flow import flow
from jaxact._jaxpr.primitives import JITS, MATMULS
from jaxact._jaxpr.read import call_body, is_float, is_literal, variables_in
from jaxact._jaxpr.rewrite import (
    Body,
    barrier_equation,
    flatten,
    inlinable_body,
    new_variable,
    prune,
)
from jaxact._jaxpr.types import Array, Eqn, Jaxpr, Params, Var
from jaxact._measure.deviations import (
    FOLLOWED,
    Deviations,
    pass_on,
    variances as variances_of,
)


class Noise(NamedTuple):
    """The noise from one input, summed over its targets; float32 scalars.

    Attributes:
      added: expected squared norm of the error. Exact where the input enters a matmul
        or a convolution and where its elements move; first order through nonlinear
        equations; `deviations` names the other approximations.
      signal: squared norm of the targets without the error.
    """

    added: jax.Array
    signal: jax.Array


def evaluate_with_noise(
    jaxpr: Jaxpr,
    consts: Sequence[Array],
    values: Sequence[Array],
    variances: Mapping[int, Array],
    *,
    cotangents: Collection[int],
) -> tuple[list[jax.Array], dict[int, Noise | None]]:
    """Evaluate a backward program and measure the noise from its inputs.

    Args:
      jaxpr: the program, linear in its cotangents.
      consts, values: one for each constant and each input.
      variances: by the number of a noisy input, the variance of its elements' errors,
        in a shape that broadcasts to the input's. The errors have mean 0 and are
        independent.
      cotangents: the numbers of the inputs that are cotangents.

    Returns:
      The outputs, by the same operations as from `eval_jaxpr` (under jit; outside,
      calls are evaluated equation by equation), and the noise by noisy input: None
      where it is not known, because the input reaches no target, or something not
      understood reads it (a loop, a comparison, a matmul that recomputes an
      activation).
    """
    flat, new_consts = flatten(jaxpr, _body)
    flat = prune(flat, flat.outvars)
    dependent = _find_dependent(flat, cotangents)
    walk = _Walk(dependent, _find_targets(flat, dependent))
    env = dict(zip(flat.constvars, [*consts, *new_consts], strict=True))
    env |= dict(zip(flat.invars, values, strict=True))
    for i, variance in variances.items():
        v = flat.invars[i]
        walk.arrive(v, env[v], {(i, None): _deviation(i, v, variance)})
    for eqn in flat.eqns:
        inputs = [value_of(v, env) for v in eqn.invars]
        outputs = bind(eqn, inputs)
        env.update(zip(eqn.outvars, outputs, strict=True))
        walk.step(eqn, inputs, outputs)
    return [value_of(v, env) for v in flat.outvars], walk.totals(variances)


@dataclass
class _Walk:
    """Errors on their way through a program.

    Attributes:
      dependent: variables that depend on a cotangent.
      targets: variables at which noise is measured.
      errors: the errors in the variables so far.
      measured: by noisy input, the noise at the targets so far.
      lost: noisy inputs that something not understood reads.
    """

    dependent: set[Var]
    targets: set[Var]
    errors: dict[Var, Deviations] = field(default_factory=dict)
    measured: dict[int, Noise] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)

    def arrive(self, v: Var, value: Array, errors: Deviations) -> None:
        """Measure the errors of a variable if it is a target, or keep them."""
        if v in self.targets:
            energies = {i: jnp.sum(x) for i, x in variances_of(errors).items()}
            self._measure(energies, value)
        if v not in self.targets or v not in self.dependent:
            self.errors[v] = errors

    def step(self, eqn: Eqn, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Follow errors through one equation."""
        operands = [{} if is_literal(v) else self.errors.get(v, {}) for v in eqn.invars]
        if not any(operands):
            return
        if eqn.primitive.name in MATMULS:
            for side, errors in enumerate(operands):
                self._meet(eqn, side, inputs, outputs[0], errors)
            return
        results = pass_on(eqn, inputs, outputs, operands)
        if results is None:
            self._lose(*operands)
            return
        for v, value, errors in zip(eqn.outvars, outputs, results, strict=True):
            if errors:
                self.arrive(v, value, errors)

    def totals(self, noisy: Collection[int]) -> dict[int, Noise | None]:
        """The noise by noisy input."""
        return {i: None if i in self.lost else self.measured.get(i) for i in noisy}

    def _meet(
        self,
        eqn: Eqn,
        side: int,
        inputs: Sequence[Array],
        product: Array,
        errors: Deviations,
    ) -> None:
        """Measure the noise that an operand adds to its product with a cotangent."""
        if eqn.invars[1 - side] not in self.dependent:
            self._lose(errors)  # a matmul that recomputes an activation
            return
        energy = {"dot_general": _dot_energy, "conv_general_dilated": _conv_energy}
        other = _squares(inputs[1 - side])
        energies: dict[int, jax.Array] = {}
        for i, variance in variances_of(errors).items():
            pair = (variance, other) if side == 0 else (other, variance)
            energies[i] = energy[eqn.primitive.name](eqn.params, *pair)
        self._measure(energies, product)

    def _measure(self, energies: Mapping[int, jax.Array], value: Array) -> None:
        if not energies:
            return
        signal = jnp.sum(_squares(value))
        for i, added in energies.items():
            before = self.measured.get(i, Noise(jnp.float32(0), jnp.float32(0)))
            self.measured[i] = Noise(before.added + added, before.signal + signal)

    def _lose(self, *operands: Deviations) -> None:
        self.lost.update(i for errors in operands for i, _ in errors)


def _dot_energy(params: Params, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """The sum over all elements of a `dot_general`, without computing them."""
    contracting, batch = params["dimension_numbers"]

    def sum_free_axes(x: jax.Array, side: int) -> jax.Array:
        paired = (*batch[side], *contracting[side])
        free = [a for a in range(x.ndim) if a not in paired]
        return x.transpose(*paired, *free).sum(tuple(range(len(paired), x.ndim)))

    return jnp.sum(sum_free_axes(lhs, 0) * sum_free_axes(rhs, 1))


def _conv_energy(params: Params, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """The sum over all elements of a convolution, without computing them.

    It is linear in each operand: operands are summed over the axes that only tell
    outputs apart, and the convolution has one output channel for each group.
    """
    numbers, copied = params["dimension_numbers"], ("feature_group_count",)
    copied += ("batch_group_count", "padding", "lhs_dilation", "rhs_dilation")
    batches, features = params["batch_group_count"], params["feature_group_count"]
    out = lax.conv_general_dilated(
        _sum_in_groups(lhs, numbers.lhs_spec[0], batches),
        _sum_in_groups(rhs, numbers.rhs_spec[0], batches * features),
        params["window_strides"],
        dimension_numbers=numbers,
        **{name: params[name] for name in copied},
    )
    return jnp.sum(out)


def _sum_in_groups(x: jax.Array, axis: int, groups: int) -> jax.Array:
    """Cut an axis into `groups` consecutive parts and sum each to one element."""
    return x.reshape(*x.shape[:axis], groups, -1, *x.shape[axis + 1 :]).sum(axis + 1)


def _squares(x: Array) -> jax.Array:
    return jnp.square(jnp.abs(jnp.asarray(x)).astype(jnp.float32))


def _deviation(i: int, v: Var, variance: Array) -> jax.Array:
    shape = tuple(v.aval.shape)
    if not is_float(v):
        raise ValueError(
            f"variances[{i}] is given for an input of dtype {v.aval.dtype}, which has "
            "no rounding error. Give variances of floating inputs only."
        )
    variance_shape = jnp.shape(variance)
    padded = (1,) * (len(shape) - len(variance_shape)) + variance_shape
    if len(padded) > len(shape) or any(
        m not in (1, n) for m, n in zip(padded, shape, strict=True)
    ):
        raise ValueError(
            f"variances[{i}] has shape {variance_shape}, which does not broadcast "
            f"to the input's shape {shape}. Give one variance for each element, or one "
            "for each of some axes that are 1 elsewhere."
        )
    return jnp.broadcast_to(jnp.sqrt(jnp.asarray(variance, jnp.float32)), shape)


def _find_dependent(jaxpr: Jaxpr, cotangents: Collection[int]) -> set[Var]:
    facts = [int(i in cotangents) for i in range(len(jaxpr.invars))]
    return {v for v, depends in flow(jaxpr, facts).items() if depends}


def _find_targets(jaxpr: Jaxpr, dependent: set[Var]) -> set[Var]:
    """Outputs, and dependent variables that an equation reads which ends the walk."""
    read = {
        v
        for eqn in jaxpr.eqns
        if eqn.primitive.name not in FOLLOWED
        for v in variables_in(eqn.invars)
    }
    return (read & dependent) | set(variables_in(jaxpr.outvars))


def _body(eqn: Eqn) -> Body | None:
    """The body of a call, to be inlined; None for any other equation."""
    body = inlinable_body(eqn)
    closed = None if eqn.effects else call_body(eqn)
    if body is not None or closed is None or eqn.primitive.name in JITS:
        return body
    jaxpr, consts = open_jaxpr(closed)
    constants = tuple(zip(jaxpr.constvars, consts, strict=True))
    inputs, eqns = jaxpr.invars, jaxpr.eqns
    if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
        # A checkpoint recomputes behind a barrier, as in its own lowering.
        outside = [new_variable(v.aval) for v in inputs]
        if inputs:
            eqns = [barrier_equation(eqn, outside, inputs), *eqns]
        inputs = outside
    return Body(inputs, eqns, jaxpr.outvars, constants)
