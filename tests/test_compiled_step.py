"""What a training step compiled for a GPU does around the kernels: nothing.

Read from the program that XLA has optimized for an H100.
"""

import functools
import re

import jax
import pytest

import jaxact
from examples.models import transformer
from jaxact._memory.compiling import compile_step
from support.gpu_target import needs_target
from support.variants import thorough

SIZE = transformer.Size(layers=3, batch=2, length=128, width=256, hidden=512)
NAMED = jax.checkpoint_policies.save_only_these_names(*transformer.NAMES)
KERNEL = "xla.gpu.triton"
# What XLA adds when a kernel's operand is not where, or as, the kernel wants it.
MOVES = {"copy", "copy-start", "copy-done", "pad", "transpose", "concatenate"}
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = .*? ([\w\-]+)\((.*)")


def instructions(text):
    """Opcode, operands and line of every instruction, by name."""
    found = {}
    for line in text.splitlines():
        if match := INSTRUCTION.match(line):
            name, opcode, rest = match.groups()
            operands = rest.split("), ")[0]
            found[name] = opcode, re.findall(r"%([\w.\-]+)", operands), line
    return found


def source(name, program):
    """The instruction that computes a value, seen through what costs nothing."""
    while program[name][0] in ("bitcast", "get-tuple-element", "opt-barrier"):
        name = program[name][1][0]
    return program[name]


@thorough
@needs_target
@pytest.mark.parametrize("recompute", [None, NAMED], ids=["default", "named"])
def test_one_kernel_stores_each_residual(recompute):
    policy = jaxact.Policy(bits=2, recompute=recompute)
    block = jaxact.compress(transformer.block, policy=policy, activations=(1,))
    rows = jaxact.residuals(block, SIZE.layer, SIZE.input).rows
    stored = [row for row in rows if isinstance(row.action, jaxact.Quantize)]
    assert len(stored) >= 7
    assert {"dot_general", "add"} <= {row.primitive for row in stored}
    step = jax.grad(functools.partial(transformer.scanned_loss, block))
    text = compile_step(step, (SIZE.scanned, SIZE.input), {}, "h100").as_text()
    program = instructions(text)
    kernels = [i for i in program.values() if i[0] == "custom-call" and KERNEL in i[2]]
    assert len(kernels) == len(stored)
    assert all("affine_encode" in line for _, _, line in kernels)
    for _, operands, line in kernels:
        assert operands, line
        for operand in operands:
            opcode, _, made = source(operand, program)
            assert opcode not in MOVES, (made, line)


def offloaded(policy):
    """The compiled gradient of a scan over layers with what they keep offloaded."""
    mlp = lambda w, x: x + jax.nn.gelu(x @ w[0]) @ w[1]
    layer = jaxact.compress(mlp, activations="x", policy=policy)

    def loss(ws, x):
        return (jax.lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0] ** 2).sum()

    shapes = (8, 2, 256, 256), (2048, 256)
    args = (jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    return compile_step(jax.grad(loss), tuple(args), {}, "h100")


@thorough
@needs_target
def test_offloaded_residuals_of_a_scan_come_and_go_while_others_are_computed():
    """ActNN's levels 4 and 5 (`policies.actnn`), without its stops at each layer."""
    kept, away = map(offloaded, (jaxact.Policy(bits=2), jaxact.policies.actnn(4)))
    stacked = 8 * 3 * 2048 * 256 * 2 / 8  # three arrays for each layer, of two bits
    saved = kept.memory_analysis().temp_size_in_bytes
    saved -= away.memory_analysis().temp_size_in_bytes
    # All of it, but for the residuals of a layer or two on their way.
    assert saved > 0.5 * stacked
    in_body = computed = False
    fetched = 0
    for line in away.as_text().splitlines():
        if line.startswith("%"):
            in_body, computed = line.startswith("%region"), False
        computed |= "gemm" in line or "dot(" in line
        # XLA starts a copy, computes, and waits for it where it is used.
        if in_body and "dynamic-slice-start" in line.split("=")[0] and "S(5)" in line:
            fetched += 1
            assert not computed, line
    assert fetched >= 6  # words and metadata of the three
