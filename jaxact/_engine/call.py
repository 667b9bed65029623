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

import functools
import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from jaxact._checkpoint_policies import PACKED_NAME
from jaxact._decision import Decision
from jaxact._engine.backward import backward_pass
from jaxact._engine.lines import user_line
from jaxact._engine.number import Site, number_in_trace, salted
from jaxact._engine.outputs import independent_outputs, select_outputs, when_all
from jaxact._engine.planning import CallKey, plan_call
from jaxact._engine.scan import CompressBody, contains_scan
from jaxact._engine.storage import Draw, Packed, Storage
from jaxact._engine.warnings import notice, planning, warn_about_rules
from jaxact._jaxpr.compat import VJP_OPTIONS, barrier, reduced_like
from jaxact._jaxpr.evaluate import evaluate, in_mesh_of
from jaxact._jaxpr.labels import Label, current_path, with_labels
from jaxact._jaxpr.opaque import hide
from jaxact._jaxpr.read import is_float
from jaxact._jaxpr.types import Array, Env, PyTree, Var
from jaxact._plan.mark import CompressedCall, mark, mark_call
from jaxact._plan.storage import StoragePlan
from jaxact._policy import Policy
from jaxact._residual import join_paths
from jaxact._trace import Argument, Flat, Static, TraceCache, is_inexact, trace


def call_compressed(
    f: Callable[..., PyTree],
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
    describe: Sequence[Argument],
    policy: Policy,
    seed: Array,
    *,
    name: object = None,
    cache: TraceCache | None = None,
    above: str | None = None,
    path: str = "",
) -> PyTree:
    """Evaluate `f(*args, **kwargs)` with compressed residuals.

    Args:
      describe: each argument's label and kind.
      seed: uint32 scalar, for the rounding noise.
      name: the class or function that the user compressed, for messages.
      cache: of `f`'s earlier traces.
      above: the path that the call's own operations continue; None: JAX's current
        scopes, which start again where JAX traces a function apart.
      path: of the call, below that; its operations have it already.
    """
    title = getattr(name or f, "__qualname__", str(name or f))
    flat, values, rebuild = trace(f, args, kwargs, describe, cache)
    flat = replace(flat, jaxpr=with_labels(flat.jaxpr))
    above = current_path() if above is None else above
    line = user_line()
    site = Site(title, line.filename, line.number)
    number = number_in_trace(join_paths(above, path), site)
    prefix = join_paths(above, Label("call", number.at_path).component)
    report = functools.partial(notice, policy, title)
    values = [jnp.asarray(v) if isinstance(v, np.ndarray) else v for v in values]
    engine = Engine(policy, prefix, title, report)
    seed = salted(seed, "call", number.total)
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


class ActionStorage(Storage):
    """Each residual through its action."""

    def encode(
        self,
        decision: Decision,
        x: jax.Array,
        seed: jax.Array,
        setting: jax.Array | None,
        *,
        is_fused: bool,
    ) -> PyTree:
        """The arrays that the action's codec stores."""
        codec = decision.codec
        return (codec.encode_fused if is_fused else codec.encode)(x, seed)

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
      report: hears a call's plans when it is first differentiated.
      storage: encodes and decodes the residuals.
    """

    policy: Policy
    prefix: str
    name: str
    report: Callable[[Sequence[StoragePlan]], None] = _ignore
    storage: Storage = ActionStorage()

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

    def scan_bodies(self, plans: list[StoragePlan]) -> CompressBody:
        """Evaluates the bodies of scans, compressed; adds their plans to `plans`."""
        scans = itertools.count()

        def compress_body(
            body: Flat, draw: Draw, values: Sequence[Array], scope: str
        ) -> list[jax.Array]:
            prefix = join_paths(self.prefix, scope)
            inner = replace(self, prefix=prefix, report=plans.extend)
            own = draw._replace(seed=salted(draw.seed, "scan", next(scans)))
            return inner(body, own, values)

        return compress_body


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
        warn_about_rules(self.engine.policy)
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
        """The plan for these active values, reported with those of scans inside."""
        engine, flat = self.engine, self.flat.first_alike()
        key = CallKey(
            flat,
            engine.policy,
            engine.storage,
            engine.prefix if contains_scan(flat.jaxpr) else None,
            active,
            tuple(draw.probe),
        )
        with planning():
            plans = plan_call(key, engine.prefix, engine.scan_bodies, draw, values)
        engine.report(plans)
        return plans[0]


def forward_pass(
    plan: StoragePlan,
    storage: Storage,
    prefix: str,
    draw: Draw,
    values: Sequence[Array],
) -> tuple[list[jax.Array], list[PyTree], list[jax.Array]]:
    """Outputs, packed residuals, and arrays that are kept as they are."""
    outputs, env = _evaluate(plan, [draw.seed, *values, *draw.probe.values()])
    stored = {}
    for number, v in enumerate(plan.decisions):
        with in_mesh_of(env[v]):
            salt = f"{prefix}/{number}"
            stored[v] = _store(v, env, plan, storage, draw, salt=salt)
    exact = [stored[v] for v in plan.exact]
    packed = [stored[v] for v in plan.packed]
    if packed:
        outputs, packed, exact = barrier((outputs, packed, exact))
    # Behind the barrier: XLA's host offloading does not look through one.
    codecs = [plan.decisions[v].codec for v in plan.packed]
    packed = [c.keep(x) for c, x in zip(codecs, packed, strict=True)]
    # Named behind the barrier: a checkpoint that saves them need not redo the call.
    exact, packed = jax.tree.map(
        lambda a: checkpoint_name(a, PACKED_NAME), (exact, packed)
    )
    return outputs, packed, exact + [env[v] for v in plan.kept]


def _evaluate(
    plan: StoragePlan, inputs: Sequence[Array]
) -> tuple[list[jax.Array], Env]:
    """The outputs, and the values that the saved variables have."""
    forward = plan.forward
    results = evaluate(plan.program, forward.consts, inputs)
    env = dict(zip(plan.saved, results[forward.num_outputs :], strict=True))
    # An argument is kept as the array that it is: the program would give a copy.
    env |= dict(zip(forward.jaxpr.constvars, forward.consts, strict=True))
    env |= dict(zip(forward.jaxpr.invars, inputs, strict=True))
    return results[: forward.num_outputs], env


def _store(
    v: Var, env: Env, plan: StoragePlan, storage: Storage, draw: Draw, *, salt: str
) -> PyTree:
    """One residual, marked and encoded.

    Equal data in two places must not meet equal noise: hence a `salt` for each.
    """
    decision = plan.decisions[v]
    x = mark(env[v], decision, plan.policy, plan.used_rules)
    if v in plan.normalized:
        x = plan.normalized[v].apply(x, env)
    seed = jnp.asarray(draw.seed, jnp.uint32) ^ np.uint32(zlib.crc32(salt.encode()))
    setting = draw.probe.get(decision.residual.key)
    is_fused = v in plan.fused

    def encode(x: jax.Array, seed: jax.Array) -> PyTree:
        return storage.encode(decision, x, seed, setting, is_fused=is_fused)

    if decision.codec.is_differentiable and is_float(v):
        return encode(x, seed)
    # Traced here, so that the way from a call to its codec is straight.
    closed, out = jax.make_jaxpr(encode, return_shape=True)(x, seed)
    return hide(closed, jax.tree.structure(out), x, seed)
