"""Compile every Triton kernel ahead of time, without a GPU, and read the machine code.

`python -m scripts.kernel_report [--json FILE] [--arch 86 89 90 120] [--quick]` prints, per kernel variant and
GPU architecture: registers, spills, shared memory, instructions per weight in the main loop, and the kind of
matrix instruction. The exit status is 1 if a kernel spills, if the loop of fp16 symmetric g128 int4 needs
more than 3.5 instructions per weight (gate-up layers only up to 32 rows, because at 64 the matrix
instructions alone double), or if a quantized loop stores decoded weights to shared memory.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from kernels.attention import attend_chunks_kernel, attend_tail_kernel, attention_tiles
from kernels.experts import expert_kernel
from kernels.linear import launch_tile, linear_kernel
from kernels.norm_rope import rms_norm_kernel, rope_kernel
from kernels.packing import dequantize_kernel
from kernels.tuned import linear_config
from support.errors import command_parser, run_command
from support.files import check_folder, write_text

ARCHITECTURES = (86, 89, 90, 120)
LIMIT = 3.5  # thread instructions per int4 weight
INDIVISIBLE = ("scale", "eps", "M", "T", "R", "ROWS", "SPLITS", "DIV")  # arguments that need not be multiples of 16
MATRIX = ("HMMA", "HGMMA", "IMMA", "WGMMA", "UTCHMMA")

LINE = "{:48} {:7} {:>4} {:>6} {:>7} {:>7}  {}"
# The linear layers of the report: (bits, dtype, numbers of tokens, forms). A form is as `linear` takes it.
LINEARS = (
    (4, "fp16", (16, 32, 64), ("", "gate-up", "zeros")),
    (4, "bf16", (16, 32, 64), ("",)),
    (4, "bf16", (64,), ("gate-up", "zeros")),
    (4, "fp16", (16, 64), ("ragged", "fp16-acc")),
    (4, "fp16", (16,), ("narrow",)),
    (4, "fp16", (64,), ("zeros narrow", "gate-up fp16-acc")),
    # Small groups have many scales, so that registers are short.
    (4, "fp16", (16, 64), ("g64", "g32")),
    (4, "bf16", (16, 64), ("g64 zeros", "g32 zeros")),
    (4, "bf16", (64,), ("g64 gate-up", "g32 gate-up")),
    (8, "fp16", (16, 32, 64), ("",)),
    (8, "fp16", (16, 64), ("gate-up",)),
    (8, "bf16", (16, 64), ("",)),
    (8, "bf16", (64,), ("gate-up",)),
    (16, "fp16", (16,), ("",)),
    (16, "bf16", (16, 32), ("",)),
    (16, "bf16", (64,), ("gate-up",)),
    (4, "fp16", (16,), ("experts", "experts gate-up", "experts zeros", "experts g32 zeros")),
    (4, "bf16", (16,), ("experts gate-up", "experts g32 gate-up", "experts zeros", "experts g32 zeros")),
    (8, "fp16", (16,), ("experts", "experts gate-up")),
    (16, "fp16", (16,), ("experts", "experts gate-up")),
    *((bits, dtype, (32,), ("top-10",)) for bits in (4, 8) for dtype in ("fp16", "bf16")),
)
QUICK = (  # the main int4 loop, and those that have been too large
    (4, "fp16", (16,), ("",)),
    (4, "fp16", (32,), ("gate-up",)),
    (4, "fp16", (64,), ("zeros",)),
    (4, "bf16", (32,), ("g32 zeros",)),
    (4, "bf16", (16,), ("experts g32 gate-up",)),
)


class Variant(NamedTuple):
    """One kernel with the constants it is compiled for."""

    name: str
    kernel: object
    pointers: dict[str, str]
    constants: dict[str, object]
    options: dict[str, object]
    weights: float = 0.0  # how many are decoded per thread and turn of the loop; 0 if it is no matrix product
    gate: bool = False  # whether LIMIT applies
    quantized: bool = False


def linear(bits: int, dtype: str, tokens: int, form: str) -> Variant:
    """The kernel as `packed_linear` launches it for a 4096 x 4096 layer.

    `form` holds words. experts: as `packed_experts` launches it; g64, g32: groups of so many weights instead of 128;
    zeros: with zero points; gate-up: two matrices at once; fp16-acc: sums in fp16; ragged: sizes that do not divide the
    tiles; narrow: a layer of 2048 rows, whose default tile is 64 rows; top-10: an LM head that keeps 10 values.
    """
    words = form.split()
    expert, zeros, gated, ragged, top = (w in words for w in ("experts", "zeros", "gate-up", "ragged", "top-10"))
    group = next((int(word[1:]) for word in words if word in ("g64", "g32")), 128)
    config = linear_config(2048 if "narrow" in words else 4096, 4096, bits)
    block, tile, options = launch_tile(config, tokens, gated, group, zeros)
    act = f"*{dtype}"
    pointers = {"x": act, "w": act if bits == 16 else "*i32", "s": "*fp32" if bits == 8 else "*fp16", "z": "*u8"}
    pointers["out"] = "*fp32" if top else act
    constants = dict(BITS=bits, GROUP=group, ZEROS=zeros, GATED=gated, EVEN_K=not ragged, EVEN_N=not ragged)
    constants |= dict(BN=block, BT=tile, ACC=tl.float16 if "fp16-acc" in words else tl.float32, NATIVE=True)
    if expert:
        pointers |= dict(pairs="*i32", offsets="*i32")
    else:
        pointers |= dict(bias=act, residual=act, ids="*i32", part="*fp32", count="*i32")
        constants |= dict(BIAS=False, RESIDUAL=not gated and not top, SPLIT=4, TOPK=10 if top else 0)
    name = f"{'experts' if expert else 'linear'} w{bits} {dtype} M<={tokens}" + f" g{group}" * (bits == 4)
    name = " ".join([name, *(word for word in words if word not in ("experts", f"g{group}"))])
    weights = block * 128 / (options["num_warps"] * 32) * (1 + gated)
    gate = bits == 4 and dtype == "fp16" and tokens <= 32 and form in ("", "gate-up", "ragged", "top-10")
    kernel = expert_kernel if expert else linear_kernel
    return Variant(name, kernel, pointers, constants, options, weights, gate, bits < 16)


def dequantization(bits: int, dtype: str, group: int = 128, zeros: bool = False) -> Variant:
    """The kernel as `dequantize` launches it."""
    pointers = dict(w="*i32", s="*fp32" if bits == 8 else "*fp16", z="*u8", out=f"*{dtype}")
    constants = dict(BITS=bits, GROUP=group, ZEROS=zeros, BN=32, NATIVE=True)
    name = f"dequantize w{bits} {dtype}" + f" g{group}" * (bits == 4) + " zeros" * zeros
    return Variant(name, dequantize_kernel, pointers, constants, dict(num_warps=4))


def attention(
    dtype: str, region: bool = False, window: int = 0, int8: bool = False, dim: int = 128, nodes: int = 32
) -> list[Variant]:
    """The chunk kernel and the tail kernel as `tree_attention` launches them. In prefill (region) the tail
    does little and is left out."""
    act = f"*{dtype}"
    pointers = dict(q=act, kv="*i8" if int8 else act, kv_scales="*fp32" if int8 else act, start="*i64")
    pointers |= dict(visible="*u8", positions="*i64", acc_out="*fp32", ml_out="*fp32")
    pointers |= dict(acc_in="*fp32", ml_in="*fp32", out=act)
    shape = dict(HKV=8, HD=dim, HDP=dim, WINDOW=window, REGION=region, INT8=int8)
    label = f"{dtype}{' prefill' if region else ''}{f' window {window}' if window else ''}"
    label += " int8 cache" * int8 + f" hd {dim}" * (dim != 128)

    chunks, tail = attention_tiles(dim, region, int8, window)
    found = []
    for name, kernel, tiles, more in (
        (f"attention chunks {label}", attend_chunks_kernel, chunks, {"NATIVE": True}),
        (f"attention tail {label} {nodes} nodes", attend_tail_kernel, tail, {"RP": nodes}),
    ):
        constants = {key: value for key, value in tiles.items() if key.isupper()}
        options = {key: value for key, value in tiles.items() if key.islower()}
        found.append(Variant(name, kernel, pointers, shape | constants | more, options))
    return found[:1] if region else found


def norm_and_rope() -> list[Variant]:
    """The kernels as `rms_norm` and `rope_write_kv` launch them."""
    half = "*fp16"
    pointers = dict(x=half, w=half, out=half)
    found = [Variant("rms_norm", rms_norm_kernel, pointers, dict(BLOCK=4096), dict(num_warps=4))]
    pointers = dict(qkv=half, cos="*fp32", sin="*fp32", slots="*i64", q_weight=half, k_weight=half, out=half)
    for norms, int8 in ((False, False), (True, False), (False, True)):
        name = "rope + kv write" + " + q/k norm" * norms + " int8 cache" * int8
        cache = dict(kv="*i8" if int8 else half, kv_scales="*fp32" if int8 else half)
        constants = dict(HQ=32, HKV=8, HD=128, BLOCK=128, NORM=norms, INT8=int8)
        found.append(Variant(name, rope_kernel, pointers | cache, constants, dict(num_warps=1)))
    return found


def variants(quick: bool = False) -> list[Variant]:
    """All kernel variants of the report. quick: the main int4 loop and one of each kind that has been too large."""
    rows = QUICK if quick else LINEARS
    found = [linear(bits, dtype, m, form) for bits, dtype, tokens, forms in rows for form in forms for m in tokens]
    if quick:
        return [*found, attention("fp16", dim=256)[0]]
    found += [dequantization(4, "fp16"), dequantization(4, "bf16", 32, True), dequantization(8, "fp16")]
    for int8, dim in itertools.product((False, True), (64, 128, 256)):
        found += attention("bf16", int8=int8, dim=dim)
        found += attention("fp16", window=4096, int8=int8, dim=dim)
        if dim > 64:
            found += attention("fp16", region=True, int8=int8, dim=dim)
            found += attention("bf16", region=True, window=4096, int8=int8, dim=dim)
    found += attention("fp16")
    found += [attention("fp16", nodes=nodes)[1] for nodes in (1, 64, 128)]
    return found + norm_and_rope()


def compile_variant(variant: Variant, arch: int) -> CompiledKernel:
    """The variant compiled for the GPU architecture sm_`arch`, as a launch on a GPU would compile it."""
    names = variant.kernel.arg_names
    kinds = {name: "fp32" if name in ("scale", "eps") else "i32" for name in names} | variant.pointers
    kinds |= dict.fromkeys(variant.constants, "constexpr")
    signature = {name: kinds[name] for name in names}
    places = [(i,) for i, name in enumerate(names) if name not in (*variant.constants, *INDIVISIBLE)]
    attributes = dict.fromkeys(places, [["tt.divisibility", 16]])
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=variant.constants, attrs=attributes)
    options = {key: value for key, value in variant.options.items() if value is not None}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def disassemble(cubin: bytes) -> tuple[str, str]:
    """(SASS text, resource usage text) of one cubin, by the tools that come with Triton."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        commands = ([tools / "nvdisasm", "-c", file.name], [tools / "cuobjdump", "-res-usage", file.name])
        sass, usage = (subprocess.check_output(c, text=True, stderr=subprocess.DEVNULL) for c in commands)
    return sass, usage


def _main_loop(sass: str) -> list[str]:
    """The lines of the loop with most matrix instructions, or all lines if there is no loop."""
    lines = sass.splitlines()
    labels = {match[1]: i for i, line in enumerate(lines) if (match := re.match(r"\s*(\.L_x_\d+):", line))}
    best = (0, (0, len(lines)))
    for i, line in enumerate(lines):
        match = re.search(r"BRA[^`]*`\((\.L_x_\d+)\)", line)
        first = labels.get(match[1], i) if match else i
        if first < i:
            best = max(best, (sum(op in x for x in lines[first:i] for op in MATRIX), (first, i + 1)))
    return lines[slice(*best[1])]


def _opcodes(lines: list[str]) -> collections.Counter:
    """How often each opcode occurs. Matrix and memory instructions keep their suffixes (HMMA.16816.F32)."""
    count: collections.Counter = collections.Counter()
    for line in lines:
        match = re.match(r"\s*(?:/\*[0-9a-f]+\*/)?\s*(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.[A-Z0-9_]+)*)", line)
        if match and not line.strip().startswith("."):
            op = match.group(1)
            wide = op in MATRIX or op in ("LDG", "LDS", "LDSM", "STS", "LDGSTS", "LDL", "STL")
            count[op + ".".join(match.group(2).split(".")[:3]) if wide else op] += 1
    return count


def inspect(variant: Variant, arch: int) -> dict:
    """Compile one variant for one architecture. Returns its numbers and, as `failures`, the gates it fails."""
    compiled = compile_variant(variant, arch)
    sass, usage = disassemble(compiled.asm["cubin"])
    loop, everything = _opcodes(_main_loop(sass)), _opcodes(sass.splitlines())
    spills = sum(n for op, n in everything.items() if op.startswith(("LDL", "STL")))
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    per_weight = round(loop.total() / variant.weights, 2) if variant.weights else None
    stores = sum(n for op, n in loop.items() if op.startswith("STS"))
    failures = []
    if spills or stack:
        failures.append(f"spills ({spills} local memory instructions)")
    if variant.gate and loop.total() > LIMIT * variant.weights:
        failures.append(f"{per_weight:.2f} instructions per weight, limit {LIMIT}")
    # To store every decoded weight in 16 bits takes a store for at most eight of them.
    if variant.quantized and stores >= variant.weights / 8:
        failures.append(f"decoded weights go through shared memory ({stores} STS in the loop)")
    return dict(
        kernel=variant.name, arch=f"sm_{arch}", registers=registers, spills=spills,
        shared_bytes=compiled.metadata.shared, instructions_per_weight=per_weight, loop_instructions=loop.total(),
        shared_stores=stores, matrix=sorted(op for op in everything if op.startswith(MATRIX)), failures=failures,
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Print the table; 0 when every gate holds."""
    parser = command_parser("scripts.kernel_report", __doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES), choices=ARCHITECTURES)
    parser.add_argument("--quick", action="store_true", help="one variant of each kind that is at risk")
    args = parser.parse_args(argv)
    return run_command(lambda: run(args), args.debug)


def run(args: argparse.Namespace) -> int:
    """Compile the variants, and print what became of each."""
    check_folder("--json", args.json)
    rows = []
    print(LINE.format("kernel", "arch", "regs", "spills", "smem", "instr/w", "matrix instruction"))
    for variant, arch in itertools.product(variants(args.quick), args.arch):
        row = inspect(variant, arch)
        rows.append(row)
        cells = [row[name] for name in ("kernel", "arch", "registers", "spills", "shared_bytes")]
        cells += [row["instructions_per_weight"] or "", " ".join(row["matrix"]) or "-"]
        print(LINE.format(*cells) + "".join(f"  FAIL: {text}" for text in row["failures"]), flush=True)
    if args.json:
        write_text(args.json, json.dumps(dict(triton=triton.__version__, rows=rows), indent=1) + "\n")
    failed = sum(bool(row["failures"]) for row in rows)
    print(f"{len(rows)} kernels compiled, {failed} failed a gate")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
