"""Time by the roofline of a program whose bytes and operations are known by hand."""

import json

import jax
import jax.numpy as jnp
import pytest

import jaxact
from jaxact import PredictedTime, predicted_time
from jaxact._memory.compiling import compile_step
from jaxact._memory.targets import TARGETS
from jaxact._time.hlo import parse
from jaxact._time.roofline import timed_kernels
from support.gpu_target import needs_target
from support.predictions import LAUNCH, of

pytestmark = pytest.mark.unoptimized

# Two layers' outputs are stacked in a loop of 24; around it one kernel of each kind.
HLO = """\
HloModule jit_step, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%a, %b)
}

%fused_rows (x: bf16[4096,8192]) -> f32[4096] {
  %x = bf16[4096,8192]{1,0} parameter(0)
  %wide = f32[4096,8192]{1,0} convert(%x)
  %zero = f32[] constant(0)
  ROOT %rows = f32[4096]{0} reduce(%wide, %zero), dimensions={1}, to_apply=%sum
}

%fused_layer (w: f32[24,1024,1024], i: s32[]) -> bf16[1,1024,1024] {
  %w = f32[24,1024,1024]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %nought = s32[] constant(0)
  %is_low = pred[] compare(%i, %nought), direction=LT
  %index = s32[] select(%is_low, %nought, %i)
  %narrow = bf16[24,1024,1024]{2,1,0} convert(%w)
  ROOT %layer = bf16[1,1024,1024]{2,1,0} dynamic-slice(%narrow, %index, %nought, \
%nought), dynamic_slice_sizes={1,1024,1024}
}

%fused_stack (stack: bf16[24,4096,1024], y: bf16[4096,1024], i: s32[]) -> \
bf16[24,4096,1024] {
  %stack = bf16[24,4096,1024]{2,1,0} parameter(0)
  %y = bf16[4096,1024]{1,0} parameter(1)
  %one = bf16[1,4096,1024]{2,1,0} bitcast(%y)
  %i = s32[] parameter(2)
  %nought = s32[] constant(0)
  ROOT %stacked = bf16[24,4096,1024]{2,1,0} dynamic-update-slice(%stack, %one, %i, \
%nought, %nought)
}

%fused_noise (x: u32[4096,8192]) -> u32[4096,1024] {
  %x = u32[4096,8192]{1,0} parameter(0)
  %a = u32[4096,8192]{1,0} shift-right-logical(%x, %x)
  %b = u32[4096,8192]{1,0} xor(%a, %x)
  %c = u32[4096,8192]{1,0} multiply(%b, %x)
CHAIN  %d = u32[4096,8192]{1,0} and(%c96, %a), \
metadata={op_name="jit(step)/jvp()/jit(run)/jaxact.affine.encode/and"}
  ROOT %words = u32[4096,1024]{1,0} slice(%d), slice={[0:4096], [0:1024]}, \
metadata={op_name="jit(step)/jvp()/slice"}
}

%body (carry: (s32[], f32[24,1024,1024], bf16[4096,1024], bf16[24,4096,1024])) -> \
(s32[], f32[24,1024,1024], bf16[4096,1024], bf16[24,4096,1024]) {
  %carry = (s32[], f32[24,1024,1024]{2,1,0}, bf16[4096,1024]{1,0}, \
/*index=3*/bf16[24,4096,1024]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%carry), index=0
  %w.1 = f32[24,1024,1024]{2,1,0} get-tuple-element(%carry), index=1
  %h = bf16[4096,1024]{1,0} get-tuple-element(%carry), index=2
  %s = bf16[24,4096,1024]{2,1,0} get-tuple-element(%carry), index=3
  %sliced = bf16[1,1024,1024]{2,1,0} fusion(%w.1, %i.1), kind=kLoop, calls=%fused_layer
  %matrix = bf16[1024,1024]{1,0} bitcast(%sliced)
  %next = bf16[4096,1024]{1,0} dot(%h, %matrix), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}, metadata={op_name="jit(step)/while/body/dot_general"}
  %stacked.1 = bf16[24,4096,1024]{2,1,0} fusion(%s, %next, %i.1), kind=kLoop, \
calls=%fused_stack
  ROOT %out = (s32[], f32[24,1024,1024]{2,1,0}, bf16[4096,1024]{1,0}, \
bf16[24,4096,1024]{2,1,0}) tuple(%i.1, %w.1, %next, %stacked.1)
}

%condition (c: (s32[], f32[24,1024,1024], bf16[4096,1024], bf16[24,4096,1024])) -> \
pred[] {
  %c.1 = (s32[], f32[24,1024,1024]{2,1,0}, bf16[4096,1024]{1,0}, \
bf16[24,4096,1024]{2,1,0}) parameter(0)
  ROOT %done = pred[] constant(false)
}

ENTRY %main (p: bf16[4096,8192], q: u32[4096,8192], w: f32[24,1024,1024]) -> f32[4096] {
  %p = bf16[4096,8192]{1,0} parameter(0), metadata={op_name="state[\\'(odd\\']"}
  %q = u32[4096,8192]{1,0} parameter(1)
  %w.2 = f32[24,1024,1024]{2,1,0} parameter(2)
  %rows.1 = f32[4096]{0} fusion(%p), kind=kInput, calls=%fused_rows
  %packed = u32[4096,1024]{1,0} fusion(%q), kind=kLoop, calls=%fused_noise
  %mask = u32[4096,256]{1,0} custom-call(%p), custom_call_target="__gpu$triton", \
metadata={op_name="jit(step)/jvp()/jit(run)/jaxact.mask.encode/pallas_call"}
  %start = (u32[4096,1024]{1,0:S(5)}, u32[4096,1024]{1,0}, u32[]) copy-start(%packed)
  %moved = u32[4096,1024]{1,0:S(5)} copy-done(%start)
  %loop.0 = (s32[], f32[24,1024,1024]{2,1,0}, bf16[4096,1024]{1,0}, \
bf16[24,4096,1024]{2,1,0}) tuple(%p, %w.2, %p, %p)
  %loop = (s32[], f32[24,1024,1024]{2,1,0}, bf16[4096,1024]{1,0}, \
bf16[24,4096,1024]{2,1,0}) while(%loop.0), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"24"},"known_init_step":{"init":"0"}}
  ROOT %copied = f32[4096]{0} copy(%rows.1)
}
"""
CHAIN = "  %c0 = u32[4096,8192]{1,0} or(%c, %x)\n" + "".join(
    f"  %c{i + 1} = u32[4096,8192]{{1,0}} or(%c{i}, %x)\n" for i in range(96)
)
HLO = HLO.replace("CHAIN", CHAIN)


@pytest.fixture(scope="module")
def found():
    return of(HLO)


@pytest.fixture(scope="module")
def rows(found):
    return {row.name: row for row in found.rows}


def test_kernels_and_how_often_they_run(rows):
    assert {name: row.runs for name, row in rows.items()} == {
        **dict.fromkeys(["rows.1", "packed", "mask", "start", "copied"], 1),
        **dict.fromkeys(["sliced", "next", "stacked.1"], 24),
    }


def test_bytes(rows):
    """Of a slice the slice, of an update in place the update, all else whole."""
    sizes = {name: (row.read_bytes, row.written_bytes) for name, row in rows.items()}
    mi = 2**20
    assert sizes == {
        "rows.1": (64 * mi, 4 * 4096),
        # Of each row the first 1024 words are needed.
        "packed": (16 * mi, 16 * mi),
        "mask": (64 * mi, 4 * mi),
        "start": (16 * mi, 16 * mi),
        "copied": (4 * 4096, 4 * 4096),
        "sliced": (4 * mi + 4, 2 * mi),  # float32 in, bfloat16 out, an index
        "next": (8 * mi + 2 * mi, 8 * mi),
        "stacked.1": (8 * mi + 4, 8 * mi),
    }


SPLIT = """HloModule jit_split

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%fused_slice (partial: f32[2,2304,768]) -> bf16[768,768] {
  %partial = f32[2,2304,768]{2,1,0} parameter(0)
  %zero = f32[] constant(0)
  %whole = f32[2304,768]{1,0} reduce(%partial, %zero), dimensions={0}, to_apply=%sum
  %narrow = bf16[2304,768]{1,0} convert(%whole)
  ROOT %part = bf16[768,768]{1,0} slice(%narrow), slice={[0:768], [0:768]}
}

ENTRY %main (p: f32[2,2304,768]) -> bf16[768,768] {
  %p = f32[2,2304,768]{2,1,0} parameter(0)
  ROOT %part.1 = bf16[768,768]{1,0} fusion(%p), kind=kLoop, calls=%fused_slice
}
"""


def test_of_sums_that_are_sliced_only_those_are_computed():
    (row,) = of(SPLIT).rows
    assert (row.read_bytes, row.written_bytes) == (2 * 768 * 768 * 4, 768 * 768 * 2)


def test_operations_and_totals(found, rows):
    assert rows["next"].flops == 2 * 4096 * 1024 * 1024
    assert found.flops == 24 * rows["next"].flops
    assert found.kernels == 5 + 3 * 24
    each = sum(row.bytes * row.runs for row in rows.values())
    assert found.bytes == each > 24 * 30 * 2**20


def test_seconds_by_hand(found, rows):
    """The longest of bytes, products, operations and the link, and a launch."""
    stream = 0.9 * 3.35232e12
    assert rows["rows.1"].bound == rows["mask"].bound == "memory"
    assert rows["rows.1"].seconds == pytest.approx(LAUNCH + (2**26 + 2**14) / stream)
    assert rows["next"].bound == "products"
    product = 2 * 4096 * 2**20 / (0.66 * 989.4e12)
    assert rows["next"].seconds == pytest.approx(LAUNCH + product)
    # A hundred operations on integers, and a product, for each of 4 Mi elements.
    assert rows["packed"].bound == "arithmetic"
    arithmetic = 100 * 2**22 / (0.89 * 1.98e9 * 132 * 64)
    assert rows["packed"].seconds == pytest.approx(LAUNCH + arithmetic)
    assert rows["copied"].bound == "launch"
    assert rows["start"].bound == "host link"
    link = 2**24 / (0.8 * 64e9)
    assert rows["start"].seconds == pytest.approx(LAUNCH + link)
    in_turn = sum(
        row.seconds * row.runs for row in rows.values() if row.name != "start"
    )
    assert found.seconds == pytest.approx(in_turn)
    assert found.bound == "products"


def test_a_copy_to_the_host_that_takes_longest(rows):
    small = "\n".join(line for line in HLO.splitlines() if "%loop" not in line)
    alone = of(small)
    assert alone.seconds == pytest.approx(rows["start"].seconds)
    assert alone.bound == "host link"


def test_causes(found):
    causes = {row.name: row.cause for row in found.rows}
    assert causes == {
        "packed": "encode",
        "mask": "masks",
        "next": "products",
        "rows.1": "other",
        "sliced": "other",  # it converts
        **dict.fromkeys(["start", "copied", "stacked.1"], "copies"),
    }
    by_cause = found.by_cause
    assert by_cause["copies"].kernels == 26 and by_cause["decode"].kernels == 0
    for total in ("kernels", "bytes", "flops"):
        parts = sum(getattr(row, total) for row in by_cause.values())
        assert parts == getattr(found, total)


@pytest.mark.parametrize("scopes, cause", [
    ("jvp()/jit(run)/jaxact.affine.encode/extremes/and", "extremes"),
    ("jvp()/jit(run)/jaxact.affine.encode/metadata/and", "metadata"),
    ("transpose(jvp(jit(run)))/jaxact.rotated.decode/and", "decode"),
    ("transpose(jvp(jit(run)))/jaxact.index.decode/and", "masks"),
    ("jvp(decode)/encode/and", "other"),
])  # fmt: skip
def test_causes_by_the_names_of_operations(scopes, cause):
    inner = ', metadata={op_name="jit(step)/jvp()/jit(run)/jaxact.affine.encode/and"}'
    named = inner.replace("jvp()/jit(run)/jaxact.affine.encode/and", scopes)
    on_fusion = "calls=%fused_noise" + named
    for text in (
        HLO.replace(inner, named),
        HLO.replace(inner, "").replace("calls=%fused_noise", on_fusion),
    ):
        (kernel,) = [row for row in of(text).rows if row.name == "packed"]
        assert kernel.cause == cause


CONVOLUTIONS = """\
ENTRY %main (x: bf16[8,32,32,64], k: bf16[128,3,3,64], y: bf16[8,16,16,128]) -> f32[] {
  %x = bf16[8,32,32,64]{3,2,1,0} parameter(0)
  %k = bf16[128,3,3,64]{3,2,1,0} parameter(1)
  %y = bf16[8,16,16,128]{3,2,1,0} parameter(2)
  %forward = (bf16[8,16,16,128]{3,2,1,0}, u8[0]{0}) custom-call(%x, %k), \
window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, \
custom_call_target="__cudnn$convForward"
  %input = (bf16[8,32,32,64]{3,2,1,0}, u8[0]{0}) custom-call(%y, %k), \
window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, \
custom_call_target="__cudnn$convBackwardInput"
  %filter = (bf16[128,3,3,64]{3,2,1,0}, u8[0]{0}) custom-call(%x, %y), \
window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, \
custom_call_target="__cudnn$convBackwardFilter"
  %dilated = bf16[8,32,32,64]{3,2,1,0} convolution(%y, %k), \
window={size=3x3 pad=1_2x1_2 lhs_dilate=2x2 rhs_reversal=1x1}, \
dim_labels=b01f_i01o->b01f
  %exact.x = f32[256,128]{1,0} parameter(3)
  ROOT %exact = f32[256,256]{1,0} dot(%exact.x, %exact.x), lhs_contracting_dims={1}, \
rhs_contracting_dims={1}, operand_precision={highest,highest}
}
"""


def test_convolutions_and_products_in_full_precision():
    rows = {row.name: row for row in of(CONVOLUTIONS).rows}
    # Each is the convolution with stride 2, or a gradient of it.
    one = 2 * (8 * 16 * 16 * 128) * (3 * 3 * 64)
    names = ("forward", "input", "filter", "dilated")
    assert [rows[name].flops for name in names] == 4 * [one]
    assert all(row.cause == "products" for row in rows.values())
    assert rows["exact"].flops == 2 * 256 * 256 * 128
    # No tensor core has float32 products of 24 bits.
    at_lanes = rows["exact"].flops / (0.89 * 66.9e12)
    assert rows["exact"].seconds >= LAUNCH + 0.99 * at_lanes


BRANCHES = """\
%small (x: f32[1024]) -> f32[1024] {
  %x = f32[1024]{0} parameter(0)
  ROOT %minus = f32[1024]{0} negate(%x)
}

%large (y: f32[1024]) -> f32[1024] {
  %y = f32[1024]{0} parameter(0)
  %wide = f32[1024,65536]{1,0} broadcast(%y), dimensions={0}
  ROOT %first = f32[1024]{0} slice(%wide), slice={[0:1024], [0:1]}
}

%called (z: f32[1024]) -> f32[1024] {
  %z = f32[1024]{0} parameter(0)
  ROOT %sine = f32[1024]{0} sine(%z)
}

ENTRY %main (p: s32[], q: f32[1024]) -> f32[1024] {
  %p = s32[] parameter(0)
  %q = f32[1024]{0} parameter(1)
  %either = f32[1024]{0} conditional(%p, %q, %q), branch_computations={%small, %large}
  %buffer = f32[1024]{0} custom-call(), custom_call_target="AllocateBuffer"
  %ready = f32[1024]{0} all-reduce-start(%either), to_apply=%called
  %reduced = f32[1024]{0} all-reduce-done(%ready)
  ROOT %result = f32[1024]{0} call(%reduced), to_apply=%called
}
"""


def test_branches_and_calls():
    """The slower branch; nothing for a call, reserved memory or the end of a pair."""
    rows = [row.name for row in of(BRANCHES).rows]
    assert rows == ["wide", "first", "ready", "sine"]


def test_a_slower_gpu_takes_longer(found):
    assert of(HLO, "a100").seconds > 1.5 * found.seconds
    assert of(HLO, "b200").seconds < found.seconds


def test_it_prints_and_is_saved(found):
    text = str(found)
    assert "products       24" in text and "77 kernels" in text
    assert "no measurement" in text and "stacked.1" in found.text(full=True)
    data = json.loads(json.dumps(found.to_dict()))
    assert PredictedTime.from_dict(data) == found
    assert data["seconds"] == found.seconds


def test_no_gpu():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    with pytest.raises(ValueError, match="backend is cpu.*target='h100'"):
        predicted_time(jnp.sin, x)
    with pytest.raises(ValueError, match="'h300'.*a100"):
        predicted_time(jnp.sin, x, target="h300")
    with pytest.raises(ValueError, match="no HLO"):
        parse("module {}")


def layer(w, x):
    q, k, v = (x @ w[name] for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k) / 16)
    x = x + jnp.einsum("bts,bsd->btd", weights, v)
    return x + jax.nn.gelu(x @ w["up"]) @ w["up"].T


def step(layer, is_scanned):
    def loss(ws, x):
        if is_scanned:
            x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), x, ws)
        else:
            for i in range(3):
                x = layer(jax.tree.map(lambda w, i=i: w[i], ws), x)
        return (x * x).astype(jnp.float32).sum()

    return jax.grad(loss)


def thunks(folder):
    """The kernels and copies that XLA's own list of its program has."""
    (path,) = folder.glob("*thunk_sequence.txt")
    count, in_condition = 0, False
    for line in path.read_text().splitlines():
        is_mark = line.strip() in ("condition:", "body:")
        in_condition = line.strip() == "condition:" if is_mark else in_condition
        kinds = "kCustomKernel", "kCopy", "kCublasLtMatmul"
        is_kernel = any(f": {kind} " in line for kind in kinds)
        is_kernel |= ": kMemset" in line or ": kKernel" in line or ": kMemzero" in line
        count += is_kernel and not in_condition
    return count


@pytest.mark.slow
@needs_target
@pytest.mark.parametrize("is_scanned", [True, False], ids=["scanned", "unrolled"])
def test_flops_and_kernels_of_a_compiled_step(is_scanned, tmp_path):
    """FLOPs are the jaxpr's; kernels those that XLA lists as thunks."""
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    ws = {name: bf16(3, 256, 256) for name in "qkv"} | {"up": bf16(3, 256, 1024)}
    x = bf16(4, 512, 256)
    small = step(jaxact.compress(layer, activations="x"), is_scanned)
    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    compiled = compile_step(small, (ws, x), {}, "h100", options)
    found = timed_kernels(parse(compiled.as_text()), TARGETS["h100"])
    flops = sum(row.flops * row.runs for row in found)
    assert flops == jaxact.count_flops(small, ws, x) > 0
    assert len(found) == thunks(tmp_path)
    causes = {row.cause for row in found}
    assert causes >= {"products", "encode", "decode", "copies", "other"}
