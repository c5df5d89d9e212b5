"""Compile every Triton kernel ahead of time, without a GPU, and read the machine code.

`python -m scripts.kernel_report [--json FILE] [--arch 86 89 90 120] [--quick]` prints, per kernel variant and GPU
architecture: registers, spills, shared memory, instructions per weight in the main loop, and the kind of matrix
instruction. Exit status 1 when a kernel spills, when the fp16 symmetric g128 int4 loop needs more than 3.5 instructions
per weight (gated up to 32 rows: at 64 the matrix instructions alone double), or when a quantized loop stores decoded
weights to shared memory.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import kernels

ARCHITECTURES = (86, 89, 90, 120)
LIMIT = 3.5  # thread instructions per int4 weight, performance.md section 2.2
MATRIX = ("HMMA", "HGMMA", "IMMA", "WGMMA", "UTCHMMA")


class Variant(NamedTuple):
    """One kernel with the constants it is compiled for. `weights`: decoded per thread and loop turn (0: no GEMM)."""

    name: str
    kernel: object
    pointers: dict[str, str]
    constants: dict[str, object]
    options: dict[str, object]
    weights: float = 0.0
    gate: bool = False  # the LIMIT applies
    quantized: bool = False


def _linear(
    bits: int,
    dtype: str,
    tokens: int = 16,
    group: int = 128,
    zeros: bool = False,
    gated: bool = False,
    **more,
) -> Variant:
    """The kernel as `packed_linear` launches it for a 4096 x 4096 layer. more: half, ragged, expert, topk, narrow (one
    whose default tile is 64 rows)."""
    half, ragged, expert, topk, narrow = (
        more.get(key, 0) for key in ("half", "ragged", "expert", "topk", "narrow")
    )
    config = kernels.linear_config(2048 if narrow else 4096, 4096, bits)
    block, tile, _, options = kernels._launch(config[:4], tokens, gated, group, zeros)
    act = f"*{dtype}"
    pointers = dict(
        x=act, w=act if bits == 16 else "*i32", s="*fp32" if bits == 8 else "*fp16", z="*u8", out=act
    )
    constants = dict(
        BITS=bits, GROUP=group, ZEROS=zeros, GATED=gated, EVEN_K=not ragged, EVEN_N=not ragged, BN=block, BT=tile,
        ACC=tl.float16 if half else tl.float32, DEVICE=True,
    )  # fmt: skip
    if expert:
        pointers |= dict(pairs="*i32", offsets="*i32")
    else:
        pointers |= dict(bias=act, residual=act, ids="*i32", part="*fp32", count="*i32")
        constants |= dict(BIAS=False, RESIDUAL=not gated and not topk, SPLIT=4, TOPK=topk)
        pointers |= dict(out="*fp32") if topk else {}
    tags = [f"{'experts' if expert else 'linear'} w{bits} {dtype} M<={tokens}"] + [f"g{group}"] * (bits == 4)
    flags = (
        ("zeros", zeros),
        ("gate-up", gated),
        ("fp16-acc", half),
        ("ragged", ragged),
        ("narrow", narrow),
        (f"top-{topk}", topk),
    )
    plain = (
        bits == 4
        and dtype == "fp16"
        and group == 128
        and tokens <= 32
        and not (zeros or half or expert or narrow)
    )
    return Variant(
        " ".join(tags + [text for text, on in flags if on]),
        kernels._expert_kernel if expert else kernels._linear_kernel,
        pointers, constants, options, block * 128 / (options["num_warps"] * 32) * (1 + gated), plain, bits < 16,
    )  # fmt: skip


def _dequantize(bits: int, dtype: str, group: int = 128, zeros: bool = False) -> Variant:
    pointers = dict(w="*i32", s="*fp32" if bits == 8 else "*fp16", z="*u8", out=f"*{dtype}")
    constants = dict(BITS=bits, GROUP=group, ZEROS=zeros, BN=32, DEVICE=True)
    name = f"dequantize w{bits} {dtype}" + f" g{group}" * (bits == 4) + " zeros" * zeros
    return Variant(name, kernels._dequantize_kernel, pointers, constants, dict(num_warps=4))


def _attention(
    dtype: str, region: bool = False, window: int = 0, int8: bool = False, dim: int = 128, nodes: int = 32
) -> list[Variant]:
    """The two kernels as `tree_attention` launches them; the prefill variant (region) has no tail worth a look."""
    act = "*fp16" if dtype == "fp16" else "*bf16"
    shared = dict(q=act, kv="*i8" if int8 else act, kv_scales="*fp32" if int8 else act)
    shared |= dict(start="*i64", visible="*u8", positions="*i64")
    fixed = dict(HKV=8, HD=dim, HDP=dim, WINDOW=window, REGION=region, INT8=int8)
    label = f"{dtype}{' prefill' if region else ''}{f' window {window}' if window else ''}"
    label += " int8 cache" * int8 + f" hd {dim}" * (dim != 128)
    found = []
    for name, kernel, tiles, pointers, constants in zip(
        ("chunks", "tail"),
        (kernels._attend_chunks_kernel, kernels._attend_tail_kernel),
        kernels._attention_tiles(dim, region, int8, window),
        (dict(acc_out="*fp32", ml_out="*fp32"), dict(acc_in="*fp32", ml_in="*fp32", out=act)),
        (dict(DEVICE=True), dict(RP=nodes)),
        strict=True,
    ):
        options = {k: v for k, v in tiles.items() if k.islower()}  # compiler options are lower case
        constants = fixed | constants | {k: v for k, v in tiles.items() if k.isupper()}
        which = f"attention {name} {label}" + f" {nodes} nodes" * (name == "tail")
        found.append(Variant(which, kernel, shared | pointers, constants, options))
    return found[: 1 if region else 2]


def variants(quick: bool = False) -> list[Variant]:
    """All kernel variants of the report; quick: the main int4 loop and one of each kind that has been too large."""
    if quick:
        return [
            _linear(4, "fp16"),
            _linear(4, "fp16", 32, gated=True),
            _linear(4, "fp16", 64, zeros=True),
            _linear(4, "bf16", 32, group=32, zeros=True),
            _linear(4, "bf16", group=32, gated=True, expert=True),
            _attention("fp16", dim=256)[0],
        ]
    main = [_linear(4, "fp16", tokens) for tokens in (16, 32, 64)]
    main += [_linear(4, "fp16", tokens, gated=True) for tokens in (16, 32, 64)]
    main += [_linear(4, "fp16", tokens, ragged=True) for tokens in (16, 64)]
    main += [
        _linear(4, "fp16", tokens, narrow=True, zeros=zeros) for tokens, zeros in ((16, False), (64, True))
    ]
    main += [_linear(4, "fp16", tokens, group) for group in (64, 32) for tokens in (16, 64)]
    main += [_linear(4, "fp16", tokens, zeros=True) for tokens in (16, 32, 64)]
    main += [_linear(4, "fp16", tokens, half=True) for tokens in (16, 64)]
    main += [_linear(4, "fp16", 64, gated=True, half=True)]
    main += [_linear(4, "bf16", tokens) for tokens in (16, 32, 64)]
    main += [_linear(4, "bf16", 64, gated=True)]
    # Many scales, zero points: what registers are short of.
    for group in (64, 32):
        main += [
            _linear(4, "bf16", 64, group, zeros, gated) for zeros, gated in ((False, True), (True, False))
        ]
        main += [_linear(4, "bf16", 16, group, True)]
    main += [_linear(4, "bf16", 64, zeros=True)]
    main += [_linear(8, "fp16", tokens) for tokens in (16, 32, 64)]
    main += [_linear(8, "bf16", tokens) for tokens in (16, 64)]
    main += [_linear(8, dtype, 64, gated=True) for dtype in ("fp16", "bf16")] + [
        _linear(8, "fp16", gated=True)
    ]
    main += [
        _linear(16, "fp16"),
        _linear(16, "bf16"),
        _linear(16, "bf16", 32),
        _linear(16, "bf16", 64, gated=True),
    ]
    main += [
        _linear(bits, "fp16", gated=gated, expert=True) for bits in (4, 8, 16) for gated in (True, False)
    ]
    for dtype in ("fp16", "bf16"):
        main += [_linear(4, dtype, group=group, zeros=True, expert=True) for group in (128, 32)]
    main += [_linear(4, "bf16", group=group, gated=True, expert=True) for group in (128, 32)]
    main += [_linear(bits, dtype, 32, topk=10) for bits in (4, 8) for dtype in ("fp16", "bf16")]
    main += [_dequantize(4, "fp16"), _dequantize(4, "bf16", 32, True), _dequantize(8, "fp16")]
    for int8 in (False, True):
        for dim in (64, 128, 256):
            main += _attention("bf16", int8=int8, dim=dim) + _attention(
                "fp16", window=4096, int8=int8, dim=dim
            )
        for dim in (128, 256):
            main += _attention("fp16", region=True, int8=int8, dim=dim)
            main += _attention("bf16", region=True, window=4096, int8=int8, dim=dim)
    main += _attention("fp16") + [_attention("fp16", nodes=nodes)[1] for nodes in (1, 64, 128)]
    norm = dict(x="*fp16", w="*fp16", out="*fp16")
    main.append(Variant("rms_norm", kernels._rms_norm_kernel, norm, dict(BLOCK=4096), dict(num_warps=4)))
    rope = dict(
        qkv="*fp16", cos="*fp32", sin="*fp32", kv="*fp16", slots="*i64", q_weight="*fp16", k_weight="*fp16"
    )
    for norms, int8 in ((False, False), (True, False), (False, True)):
        name = "rope + kv write" + " + q/k norm" * norms + " int8 cache" * int8
        sizes = dict(HQ=32, HKV=8, HD=128, BLOCK=128, NORM=norms, INT8=int8)
        kv = dict(out="*fp16", kv="*i8", kv_scales="*fp32") if int8 else dict(out="*fp16", kv_scales="*fp16")
        main.append(Variant(name, kernels._rope_kernel, rope | kv, sizes, dict(num_warps=1)))
    return main


def _compile(variant: Variant, arch: int):
    signature, attributes = {}, {}
    for i, name in enumerate(variant.kernel.arg_names):
        if name in variant.constants:
            signature[name] = "constexpr"
        else:
            signature[name] = variant.pointers.get(name, "fp32" if name in ("scale", "eps") else "i32")
            if name not in ("scale", "eps", "M", "T", "R", "ROWS", "SPLITS", "DIV"):
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=variant.constants, attrs=attributes)
    options = {k: v for k, v in variant.options.items() if v is not None}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


@functools.cache
def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends/nvidia/bin" / name)


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """(SASS text, resource usage text) of one cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass = subprocess.run(
            [_tool("nvdisasm"), "-c", file.name], capture_output=True, text=True, check=True
        ).stdout
        usage = subprocess.run(
            [_tool("cuobjdump"), "-res-usage", file.name], capture_output=True, text=True
        ).stdout
    return sass, usage


def _main_loop(sass: str) -> list[str]:
    """Lines of the backward-branch region with most matrix instructions; everything if there is no such loop."""
    lines = sass.splitlines()
    labels, best = {}, (0, (0, len(lines)))
    for i, line in enumerate(lines):
        if match := re.match(r"\s*(\.L_x_\d+):", line):
            labels[match.group(1)] = i
    for i, line in enumerate(lines):
        match = re.search(r"BRA[^`]*`\((\.L_x_\d+)\)", line)
        if match and labels.get(match.group(1), i) < i:
            first = labels[match.group(1)]
            best = max(best, (sum(op in x for x in lines[first:i] for op in MATRIX), (first, i + 1)))
    return lines[slice(*best[1])]


def _opcodes(lines: list[str]) -> collections.Counter:
    """Opcode counts: 'HMMA.16816.F32' style for matrix and memory instructions, the bare name otherwise."""
    count: collections.Counter = collections.Counter()
    for line in lines:
        match = re.match(
            r"\s*(?:/\*[0-9a-f]+\*/)?\s*(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.[A-Z0-9_]+)*)", line
        )
        if match and not line.strip().startswith("."):
            op = match.group(1)
            wide = op in MATRIX or op in ("LDG", "LDS", "LDSM", "STS", "LDGSTS", "LDL", "STL")
            count[op + ".".join(match.group(2).split(".")[:3]) if wide else op] += 1
    return count


def sums(variant: Variant, arch: int) -> list[str]:
    """Where Triton puts the operands of every matrix product and of every reduction of floats, in program order: two
    variants with the same list add the same numbers in the same order."""
    code = _compile(variant, arch).asm["ttgir"]
    layouts = sorted(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE), reverse=True)
    found = re.findall(
        r"(?:\}\) : \(|(?:tt\.dot|warp_group_dot)\b.*? : )(tensor<[^)\n]*xf(?:16|32), .*)", code
    )
    for i, text in enumerate(found):
        for name, layout in layouts:
            text = re.sub(rf"{name}\b", lambda _, layout=layout: layout, text)
        found[i] = text.split(" loc(")[0]
    return found


def inspect(variant: Variant, arch: int) -> dict:
    """Compile one variant for one architecture and return its numbers and the gates it fails (`failures`)."""
    compiled = _compile(variant, arch)
    sass, usage = _disassemble(compiled.asm["cubin"])
    loop = _opcodes(_main_loop(sass))
    everything = _opcodes(sass.splitlines())
    spill_ops = sum(n for op, n in everything.items() if op.startswith(("LDL", "STL")))
    stack = re.search(r"STACK:(\d+)", usage)
    registers = re.search(r"REG:(\d+)", usage)
    per_weight = sum(loop.values()) / variant.weights if variant.weights else None
    # A round trip would store 16-bit values of every decoded weight: two per register, at most eight bytes a store.
    stores = sum(n for op, n in loop.items() if op.startswith("STS"))
    round_trip = variant.quantized and stores >= variant.weights / 8
    failures = []
    if spill_ops or (stack and int(stack.group(1))):
        failures.append(f"spills ({spill_ops} local memory instructions)")
    if variant.gate and per_weight > LIMIT:
        failures.append(f"{per_weight:.2f} instructions per weight, limit {LIMIT}")
    if round_trip:
        failures.append(f"decoded weights go through shared memory ({stores} STS in the loop)")
    return dict(
        kernel=variant.name, arch=f"sm_{arch}", registers=int(registers.group(1)) if registers else None,
        spills=spill_ops, shared_bytes=compiled.metadata.shared,
        instructions_per_weight=None if per_weight is None else round(per_weight, 2),
        loop_instructions=sum(loop.values()), shared_stores=stores,
        matrix=sorted(op for op in everything if op.startswith(MATRIX)), failures=failures,
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Print the table; 0 when every gate holds."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.kernel_report", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES), choices=ARCHITECTURES)
    parser.add_argument("--quick", action="store_true", help="one variant of each kind that is at risk")
    args = parser.parse_args(argv)
    rows, failed = [], 0
    header = (
        f"{'kernel':48} {'arch':7} {'regs':>4} {'spills':>6} {'smem':>7} {'instr/w':>7}  matrix instruction"
    )
    print(header)
    for variant in variants(args.quick):
        for arch in args.arch:
            row = inspect(variant, arch)
            rows.append(row)
            failed += bool(row["failures"])
            ratio = "" if row["instructions_per_weight"] is None else f"{row['instructions_per_weight']:.2f}"
            print(
                f"{row['kernel']:48} {row['arch']:7} {row['registers'] or '?':>4} {row['spills']:>6} "
                f"{row['shared_bytes']:>7} {ratio:>7}  {' '.join(row['matrix']) or '-'}"
                + "".join(f"  FAIL: {text}" for text in row["failures"]),
                flush=True,
            )
    if args.json:
        draft = args.json.with_name(args.json.name + ".tmp")
        draft.write_text(json.dumps(dict(triton=triton.__version__, rows=rows), indent=1) + "\n")
        os.replace(draft, args.json)
    print(f"{len(rows)} kernels compiled, {failed} failed a gate")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
