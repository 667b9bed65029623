"""Call a compressed function: `custom_vjp` over flat arrays.

The forward value is the traced program's own; only the arrays that wait for the
backward pass differ. This is the one derivative rule: a measurement (`_measure`) is the
same rule with another `Storage` and with settings in its `Draw`.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.extend import source_info_util

from jaxact._checkpoint_policies import SaveEither, save_packed
from jaxact._engine.number import number_in_trace, salted
from jaxact._engine.outputs import independent_outputs, select_outputs, when_all
from jaxact._engine.passes import Draw, Storage, backward_pass, forward_pass
from jaxact._engine.scan import CompressBody, contains_scan, push_into_scans
from jaxact._engine.warnings import warn_if_unused
from jaxact._form import plan_bases, rewrite
from jaxact._jaxpr.compat import VJP_OPTIONS, reduced_like
from jaxact._jaxpr.rewrite import new_variable, with_inputs
from jaxact._jaxpr.types import Array, PyTree
from jaxact._plan.each import plan_each_residual
from jaxact._plan.forward import trace_forward
from jaxact._plan.mark import CompressedCall, mark_call
from jaxact._plan.storage import StoragePlan
from jaxact._policy import Policy
from jaxact._residual import join_paths, module_path
from jaxact._trace import Argument, Flat, Kind, Static, is_inexact, trace


def call_compressed(
    f: Callable[..., PyTree],
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
    describe: Sequence[Argument],
    policy: Policy,
    seed: Array,
    *,
    name: object = None,
) -> PyTree:
    """Evaluate `f(*args, **kwargs)` with compressed residuals.

    Args:
      describe: each argument's label and kind.
      seed: uint32 scalar, for the rounding noise.
      name: the class or function that the user compressed, for messages.
    """
    title = getattr(name or f, "__qualname__", str(name or f))
    flat, values, rebuild = trace(f, args, kwargs, describe)
    prefix = module_path(source_info_util.current_name_stack())
    report = functools.partial(warn_if_unused, policy, title)
    values = [jnp.asarray(v) if isinstance(v, np.ndarray) else v for v in values]
    engine = Engine(policy, prefix, title, report)
    seed = salted(seed, "call", number_in_trace())
    return rebuild(engine(flat, Draw(seed, {}), values))


def seed_from(key: jax.Array | None) -> Array:
    """A uint32 seed from a JAX PRNG key; 0 without a key."""
    if key is None:
        return np.uint32(0)
    if not isinstance(key, jax.Array):
        raise TypeError(
            f"rounding_key={key!r}: a JAX PRNG key is required, such as "
            "jax.random.key(0)."
        )
    return jax.random.bits(key, (), jnp.uint32)


_NO_GRADIENT: Any = None  # an integer, such as a seed, has none


def _ignore(plans: Sequence[StoragePlan]) -> None:
    pass


@dataclass(frozen=True)
class Engine:
    """How a flat function is compressed.

    Attributes:
      policy: decides about each residual.
      prefix: the call's module path, for tables.
      name: the compressed function, for messages.
      report: hears a call's plans when it is first differentiated.
      storage: encodes and decodes the residuals.
    """

    policy: Policy
    prefix: str
    name: str
    report: Callable[[Sequence[StoragePlan]], None] = _ignore
    storage: Storage = Storage()

    def __call__(
        self, flat: Flat, draw: Draw, values: Sequence[Array]
    ) -> list[jax.Array]:
        """Evaluate `flat(*values)`, keeping compressed residuals for its derivative."""
        groups = independent_outputs(flat)
        engine = replace(self, report=when_all(len(groups), self.report))
        outputs: dict[int, jax.Array] = {}
        for i, numbers in enumerate(groups):
            rule = _Rule(engine, select_outputs(flat, numbers))
            own = draw._replace(seed=salted(draw.seed, "outputs", i))
            outputs.update(zip(numbers, rule(own, values), strict=True))
        return [outputs[i] for i in range(len(outputs))]


class _Saved(NamedTuple):
    """The Python values that the backward pass needs.

    Attributes:
      active: whether each value is differentiated.
      keys: the probe's keys.
    """

    plan: StoragePlan
    active: tuple[bool, ...]
    keys: tuple[str, ...]


@dataclass(eq=False)
class _Rule:
    """One call with its derivative rule.

    Attributes:
      plans: by the values that are differentiated.
      ran_forward: whether JAX has evaluated `forward`.
    """

    engine: Engine
    flat: Flat
    plans: dict[tuple[bool, ...], StoragePlan] = field(default_factory=dict)
    ran_forward: bool = False

    def __call__(self, draw: Draw, values: Sequence[Array]) -> list[jax.Array]:
        call = jax.custom_vjp(self.call)
        call.defvjp(self.forward, self.backward, **VJP_OPTIONS)
        try:
            return call(draw, *values)
        except TypeError as error:
            # Forward mode evaluates `forward`; then JAX refuses the tangents. After a
            # jit around the call it does so elsewhere, in words of its own.
            if not self.ran_forward:
                raise
            raise TypeError(
                "jaxact: forward-mode differentiation (jax.jvp, jax.jacfwd, "
                f"jax.hessian) of the compressed {self.engine.name}. Compression only "
                "changes the arrays that reverse mode keeps: use jax.vjp, jax.grad or "
                "jax.jacrev, or call the uncompressed function."
            ) from error

    def call(self, draw: Draw, *values: jax.Array) -> list[jax.Array]:
        """The outputs, where nothing is differentiated."""
        if not draw.probe:  # a call that measures is not measured again
            engine = self.engine
            mark_call(
                draw.seed, CompressedCall(self.flat, engine.policy, engine.prefix)
            )
        return self.flat(*values)

    def forward(
        self, draw: Draw, *primals: CustomVJPPrimal
    ) -> tuple[list[jax.Array], tuple[Static, list[PyTree], list[jax.Array]]]:
        """The outputs, and the residuals: packed and kept ones."""
        draw = jax.tree.map(lambda p: p.value, draw)
        values = [p.value for p in primals]
        active = tuple(p.perturbed and is_inexact(p.value) for p in primals)
        if active not in self.plans:
            self.plans[active] = self.make_plan(active, draw, values)
        plan, engine = self.plans[active], self.engine
        outputs, packed, kept = forward_pass(
            plan, engine.storage, engine.prefix, draw, values
        )
        self.ran_forward = True
        saved = Static(_Saved(plan, active, tuple(draw.probe)))
        return outputs, (saved, packed, kept)

    def backward(
        self,
        residuals: tuple[Static, list[PyTree], list[jax.Array]],
        cotangents: list[jax.Array | SymbolicZero],
    ) -> tuple[PyTree, ...]:
        """Gradients for the draw and the values; None where there is none."""
        static, packed, kept = residuals
        saved = cast(_Saved, static.value)
        results, measured = backward_pass(
            saved.plan, self.engine.storage, saved.keys, packed, kept, cotangents
        )
        gradients = iter(results)
        _, *inputs = saved.plan.forward.jaxpr.invars
        is_active = (*saved.active, *(True for _ in saved.keys))
        reduced: list[Any] = [
            reduced_like(next(gradients), v.aval) if differentiated else None
            for v, differentiated in zip(inputs, is_active, strict=True)
        ]
        count = len(saved.active)
        for key, setting in zip(saved.keys, reduced[count:], strict=True):
            # Residuals in a scan's body are measured by the body's own calls.
            measured[key] = measured[key] + setting if key in measured else setting
        return Draw(_NO_GRADIENT, measured), *reduced[:count]

    def make_plan(
        self, active: tuple[bool, ...], draw: Draw, values: Sequence[Array]
    ) -> StoragePlan:
        """Trace the forward program and decide about its residuals."""
        flat, engine, nested = self.flat, self.engine, list[StoragePlan]()
        keys, settings = list(draw.probe), list(draw.probe.values())
        scans = itertools.count()

        def compress_body(
            body: Flat, draw: Draw, values: Sequence[Array], scope: str
        ) -> list[jax.Array]:
            prefix = join_paths(engine.prefix, scope)
            inner = replace(engine, prefix=prefix, report=nested.extend)
            own = draw._replace(seed=salted(draw.seed, "scan", next(scans)))
            return inner(body, own, values)

        run = differentiable(flat, engine.policy, compress_body)

        def run_flat(seed: jax.Array, *inputs: jax.Array) -> list[jax.Array]:
            count = len(inputs) - len(keys)
            probe = dict(zip(keys, inputs[count:], strict=True))
            return run(Draw(seed, probe), *inputs[:count])

        forward = trace_forward(
            run_flat,
            draw.seed,
            [*values, *settings],
            (*active, *(True for _ in keys)),
        )
        decide = plan_bases if engine.policy.chooses_form else plan_each_residual
        wider = _with_settings(flat, settings)
        plan = decide(forward, wider, engine.policy, engine.prefix)
        engine.report([plan, *nested])
        return plan


def differentiable(
    flat: Flat, policy: Policy, compress_body: CompressBody
) -> Callable[..., list[jax.Array]]:
    """(draw, *values) -> outputs: scans compressed inside, the rest checkpointed."""
    if policy.chooses_form:
        flat, widen = rewrite(flat)
    else:
        widen = list

    def plain(draw: Draw, *values: jax.Array) -> list[jax.Array]:
        return flat(*values)

    run = plain
    if contains_scan(flat.jaxpr):
        run = push_into_scans(flat, compress_body)
    if policy.recompute is not None:
        keep = SaveEither(policy.recompute, save_packed)
        run = jax.checkpoint(run, policy=keep)
    return lambda draw, *values: run(draw, *widen(values))


def _with_settings(flat: Flat, settings: Sequence[jax.Array]) -> Flat:
    """`flat` with inputs for settings, which it does not read and never stores."""
    if not settings:
        return flat
    variables = [new_variable(jax.typeof(a)) for a in settings]
    return Flat(
        with_inputs(flat.jaxpr, variables),
        (*flat.kinds, *(Kind.PARAMETER for _ in variables)),
        (*flat.paths, *("probe" for _ in variables)),
        (*flat.owners, *(-1 for _ in variables)),
    )
