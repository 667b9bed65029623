"""Call a compressed function: `custom_vjp` over flat arrays.

The forward value is the traced program's own; only the arrays that wait for the
backward pass differ. This is the one derivative rule: a measurement (`_measure`) is the
same rule with another `Storage` and with settings in its `Draw`.

The saving is made real by two optimization barriers, one here and one in `backward.py`:
without this one XLA postpones the encoding and keeps the original array for it. It must
hold the outputs too, and the exact statistics, which XLA would else compute again from
whole arrays that it keeps for that. It must not hold an argument: scan would then stack
copies of the parameters.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from jaxact._arguments import Argument
from jaxact._checkpoint_policies import PACKED_NAME
from jaxact._codec import Exact
from jaxact._codec.checks import checked_key
from jaxact._decision import Decision
from jaxact._engine.batch_rule import with_batch_rule
from jaxact._engine.checkify import noting_checks
from jaxact._engine.checkpointed import checkpointed
from jaxact._engine.custom_rule import with_rule
from jaxact._engine.inside import holds_programs
from jaxact._engine.lines import user_line
from jaxact._engine.mapped import on_batch, whole_batch
from jaxact._engine.number import Site, number_in_trace
from jaxact._engine.outputs import (
    has_rule,
    independent_outputs,
    select_outputs,
    when_all,
)
from jaxact._engine.passes import Passes
from jaxact._engine.planning import CallKey, plan_call
from jaxact._engine.primal import Primal
from jaxact._engine.refusals import require_common_key, require_sizes
from jaxact._engine.scan import CompressBody
from jaxact._engine.seeds import salted, seed_at
from jaxact._engine.storage import Draw, Packed, Source, Storage
from jaxact._engine.together import Stored, together
from jaxact._engine.warnings import notice, notice_call, planning, warn_about_rules
from jaxact._flat import Flat
from jaxact._jaxpr.compat import reduced_like
from jaxact._jaxpr.evaluate import is_traced, moved
from jaxact._jaxpr.labels import Label, current_path
from jaxact._jaxpr.types import Array, Jaxpr, PyTree
from jaxact._plan.forward import with_active
from jaxact._plan.mark import mark
from jaxact._plan.storage import StoragePlan
from jaxact._policy import Policy
from jaxact._recompute import Checkpoint
from jaxact._residual import join_paths
from jaxact._trace import Static, TraceCache, is_inexact, trace
from jaxact._using import Override, current_override


def call_compressed(
    f: Callable[..., PyTree],
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
    describe: Sequence[Argument],
    policy: Policy,
    seed: Array,
    *,
    name: Callable[..., Any] | None = None,
    cache: TraceCache | None = None,
    above: str | None = None,
    path: str = "",
) -> PyTree:
    """Evaluate `f(*args, **kwargs)` with compressed residuals.

    Args:
      describe: each argument's label and kind.
      policy: of the call; a context may replace it (`using`).
      seed: uint32 scalar, for the rounding noise.
      name: the class or function that the user compressed, for messages.
      cache: of `f`'s earlier traces.
      above: the path that the call's own operations continue; None: JAX's current
        scopes, which start again where JAX traces a function apart.
      path: of the call, below that; its operations have it already.
    """
    title = getattr(name or f, "__qualname__", str(name or f))
    override = current_override()
    policy = policy if override is None else override.policy
    flat, values, rebuild = trace(f, args, kwargs, describe, cache, name)
    above = current_path() if above is None else above
    site = Site(title, *user_line()[:3])
    number = number_in_trace(join_paths(above, path), site)
    inside = flat.inside(path) if path else None
    flat, scope = (flat, "") if inside is None else (inside, path)
    flat = flat.first_alike.labelled
    prefix = join_paths(above, Label("call", number.at_path).component, scope)
    path = "" if scope else path
    whole = join_paths(prefix, path)
    report = functools.partial(_report, policy, title, override, whole, flat.jaxpr)
    values = [jnp.asarray(v) if isinstance(v, np.ndarray) else v for v in values]
    engine = Engine(policy, prefix, title, report, path=path)
    seed = salted(seed, "call", number.total)
    with jax.named_scope(scope) if scope else contextlib.nullcontext():
        outputs = engine(flat, Draw(seed, {}), values)
    return rebuild(outputs)


def _report(
    policy: Policy,
    title: str,
    override: Override | None,
    path: str,
    program: Jaxpr,
    decisions: Sequence[Decision],
) -> None:
    notice(policy, title, decisions, is_for_all=override is not None)
    if override is not None and override.observer is not None:
        override.observer(path, program, decisions)


def seed_from(key: jax.Array | None) -> Array:
    """A uint32 seed from a JAX PRNG key; 0 without a key."""
    if key is None:
        return np.uint32(0)
    return jax.random.bits(checked_key("rounding_key=", key), (), jnp.uint32)


_NO_GRADIENT: Any = None  # an integer, such as a seed, has none


def _ignore(decisions: Sequence[Decision]) -> None:
    pass


class ActionStorage(Storage):
    """Each residual through its action."""

    def encode(
        self,
        decision: Decision,
        source: Source,
        seed: jax.Array,
        setting: jax.Array | None,
    ) -> PyTree:
        """The arrays that the action's codec stores."""
        codec, x = decision.codec, source.x
        if source.normalization is not None:
            how = source.normalization, source.coefficients
            return codec.encode_normalized(x, seed, *how)
        return (codec.encode_fused if source.is_fused else codec.encode)(x, seed)

    def decode(self, packed: Packed) -> jax.Array:
        """The array that the action's codec decodes."""
        codec, like = packed.decision.codec, packed.like
        return codec.decode(packed.arrays, like.shape, like.dtype)


@dataclass(frozen=True)
class Engine:
    """How a flat function is compressed.

    Attributes:
      policy: decides about each residual.
      prefix: the call's module path, with its label.
      name: the compressed function, for messages.
      report: hears a call's decisions when it is first differentiated.
      storage: encodes and decodes the residuals.
      is_checkpointed: whether the call is in a checkpoint that the policy asked for,
        and nothing else in it is computed again; or is that checkpoint.
      path: of the call, below the prefix; its operations have it already.
    """

    policy: Policy
    prefix: str
    name: str
    report: Callable[[Sequence[Decision]], None] = _ignore
    storage: Storage = ActionStorage()
    is_checkpointed: bool = False
    path: str = ""

    @property
    def own_policy(self) -> Policy:
        """The policy with this call's `recompute`."""
        if self.is_checkpointed:
            return replace(self.policy, recompute=None)
        return self.policy.for_call(join_paths(self.prefix, self.path))

    def __call__(
        self, flat: Flat, draw: Draw, values: Sequence[Array]
    ) -> list[jax.Array]:
        """Evaluate `flat(*values)`, keeping compressed residuals for its derivative."""
        if (of_batch := on_batch(self, flat, draw, values)) is not None:
            return of_batch
        notice_call(self.policy, join_paths(self.prefix, self.path))
        if isinstance(self.own_policy.recompute, Checkpoint):
            engine = replace(self, is_checkpointed=True)
            run = functools.partial(engine, flat)
            outer, inputs = checkpointed(flat, draw, values, run)
            return engine(outer, draw, inputs)
        groups = independent_outputs(flat)
        engine = replace(self, report=when_all(len(groups), self.report))
        outputs: dict[int, jax.Array] = {}
        for i, numbers in enumerate(groups):
            part = select_outputs(flat, numbers)
            own = draw._replace(seed=salted(draw.seed, "outputs", i))
            is_ruled = has_rule(flat, numbers)
            results = _Rule(engine, part)(own, values) if is_ruled else part(*values)
            outputs.update(zip(numbers, results, strict=True))
        return [outputs[i] for i in range(len(outputs))]

    def bodies(self, decisions: list[Decision]) -> CompressBody:
        """Evaluates programs inside, compressed; adds the decisions to a list."""
        numbers = itertools.count()

        def compress_body(
            body: Flat, draw: Draw, values: Sequence[Array], scope: str
        ) -> list[jax.Array]:
            prefix = join_paths(self.prefix, scope)
            inner = replace(self, prefix=prefix, report=decisions.extend, path="")
            own = draw._replace(seed=salted(draw.seed, "scan", next(numbers)))
            return inner(body, own, values)

        return compress_body


class _Saved(NamedTuple):
    """The Python values that the backward pass needs.

    Attributes:
      active: whether each value is differentiated.
      keys: the probe's keys.
    """

    passes: Passes
    active: tuple[bool, ...]
    keys: tuple[str, ...]


@dataclass(eq=False)
class _Rule:
    """One call with its derivative rule.

    Attributes:
      passes: by the values that are differentiated.
      ran_forward: whether JAX has evaluated `forward`.
    """

    engine: Engine
    flat: Flat
    passes: dict[tuple[bool, ...], Passes] = field(default_factory=dict)
    ran_forward: bool = False

    @functools.cached_property
    def primal(self) -> Primal:
        """The call where nothing is differentiated."""
        engine = self.engine
        return Primal.of(self.flat, engine.own_policy, engine.prefix, engine.name)

    def __call__(self, draw: Draw, values: Sequence[Array]) -> list[jax.Array]:
        batch = functools.partial(whole_batch, self.engine, self.flat)
        call = with_rule(self.primal, self.forward, self.backward)
        try:
            with noting_checks(self.flat.jaxpr):
                return with_batch_rule(call, batch, draw, values)(draw, *values)
        except TypeError as error:
            # JAX refuses tangents after `forward`; behind a jit in words of its own.
            if not self.ran_forward:
                raise
            raise TypeError(
                "jaxact: forward-mode differentiation (jax.jvp, jax.jacfwd, "
                f"jax.hessian) of the compressed {self.engine.name}. Compression only "
                "changes the arrays that reverse mode keeps: use jax.vjp, jax.grad or "
                "jax.jacrev, or call the uncompressed function."
            ) from error

    def forward(
        self, draw: Draw, *primals: CustomVJPPrimal
    ) -> tuple[list[jax.Array], tuple[Static, Stored, list[jax.Array]]]:
        """The outputs, and the residuals: packed and kept ones."""
        draw = jax.tree.map(lambda p: p.value, draw)
        values = [p.value for p in primals]
        active = tuple(p.perturbed and is_inexact(p.value) for p in primals)
        if active not in self.passes:
            self.passes[active] = self.make_passes(active, draw, values)
        passes, prefix = self.passes[active], self.engine.prefix
        probe = draw.probe
        measured = _measured_keys(passes.plan, prefix, probe)
        settings = {inside: probe[key] for inside, key in measured.items()}
        inputs = [draw.seed, *values, *probe.values()]
        seed = seed_at(draw.seed, prefix)
        outputs, stored, kept = passes.forward(seed, settings, inputs)
        require_common_key(self.engine.name, passes.plan, stored)
        if not is_traced(values) and not self.flat.jaxpr.effects:
            # Outside of a trace a jitted function is compiled by itself. The program,
            # which opens those, rounds in another order.
            outputs = self.flat(*values)
        parts, exact = _marked(passes.plan, prefix, stored)
        packed = together(passes.plan, parts) if self.flat.is_step else parts
        self.ran_forward = True
        saved = Static(_Saved(passes, active, tuple(probe)))
        return outputs, (saved, packed, [*exact, *kept])

    def backward(
        self,
        residuals: tuple[Static, Stored, list[jax.Array]],
        cotangents: list[jax.Array | SymbolicZero],
    ) -> tuple[PyTree, ...]:
        """Gradients for the draw and the values; None where there is none."""
        warn_about_rules(self.engine.policy)
        static, packed, kept = residuals
        saved = cast(_Saved, static.value)
        passes = saved.passes
        keys = _measured_keys(passes.plan, self.engine.prefix, saved.keys)
        results, found = passes.backward(tuple(keys), packed, kept, cotangents)
        own = {keys[inside]: setting for inside, setting in found.items()}
        forward = passes.plan.forward
        _, *inputs = forward.jaxpr.invars
        is_active = (*saved.active, *(True for _ in saved.keys))
        is_zero = with_active([True] * len(inputs), is_active, forward.backward.is_zero)
        gradients = with_active([None] * len(inputs), is_active, results)
        reduced: list[Any] = [
            None if g is None else reduced_like(g, v.aval)
            for g, v in zip(gradients, inputs, strict=True)
        ]
        count = len(saved.active)
        # Residuals in a scan's body are measured by the body's own calls.
        measured = dict(zip(saved.keys, reduced[count:], strict=True))
        for key, v in zip(saved.keys, inputs[count:], strict=True):
            if key in own:
                added = reduced_like(own[key], v.aval)
                measured[key] += moved(measured[key], added)
        pairs = zip(reduced[:count], is_zero[:count], strict=True)
        return Draw(_NO_GRADIENT, measured), *(None if zero else g for g, zero in pairs)

    def make_passes(
        self, active: tuple[bool, ...], draw: Draw, values: Sequence[Array]
    ) -> Passes:
        """The passes for these active values; reports the plan's decisions."""
        engine, flat = self.engine, self.flat.first_alike
        if not isinstance(engine.policy.default, Exact):
            require_sizes(engine.name, values)
        key = CallKey(
            flat,
            engine.own_policy,
            engine.storage,
            engine.prefix if holds_programs(flat.jaxpr) else None,
            active,
            tuple(draw.probe),
            engine.is_checkpointed,
        )
        with planning():
            passes, inside = plan_call(key, engine.prefix, engine.bodies, draw, values)
        if is_traced(values):  # outside of a trace each call has a path of its own
            passes.keep(self.primal)
        decided = passes.plan.all_decisions
        engine.report([*(d.at(engine.prefix) for d in decided), *inside])
        return passes


def _measured_keys(
    plan: StoragePlan, prefix: str, keys: Collection[str]
) -> dict[str, str]:
    """The probe's keys for residuals of a call, by the residuals' keys inside it."""
    if not keys:
        return {}
    residuals = [d.residual for d in plan.decisions.values()]
    own = {r.key: r.at(prefix).key for r in residuals}
    return {inside: key for inside, key in own.items() if key in keys}


def _marked(
    plan: StoragePlan, prefix: str, stored: Sequence[PyTree]
) -> tuple[list[PyTree], list[jax.Array]]:
    """The packed residuals and the exact ones, marked and named."""
    exact, packed = [], []
    for (v, decision), arrays in zip(plan.decisions.items(), stored, strict=True):
        shape = tuple(v.aval.shape)
        placed = decision.at(prefix)
        arrays = mark(arrays, placed, shape, plan.policy, plan.used_rules)
        # Named behind the barrier: a checkpoint that saves them need not redo the call.
        arrays = jax.tree.map(lambda a: checkpoint_name(a, PACKED_NAME), arrays)
        (exact if isinstance(decision.action, Exact) else packed).append(arrays)
    return packed, exact
