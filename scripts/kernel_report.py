"""Compile every Triton kernel ahead of time, without a GPU, and read the machine code.

    python -m scripts.kernel_report [--json FILE] [--arch 86 89 90 120] [--only WORD ...] [--quick]
    python -m scripts.kernel_report --page docs/kernel_report.md docs/kernel_report_triton*.json

The first prints, per kernel variant and GPU architecture: registers, spills, shared memory, instructions per weight in
the main loop, and the kind of matrix instruction. The exit status is 1 if a kernel spills, if the loop of fp16 symmetric
g128 int4 needs more than 2.7 instructions per weight up to 16 rows or more than 3.5 up to 32, if a quantized loop stores
decoded weights to shared memory or copies nothing asynchronously, if wgmma reads shared memory without a proxy fence, or
if a kernel that is launched early accesses memory before its wait.
The second writes a page from such files, one of each Triton version.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import math
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

from kernels.attention import attend_kernel, attention_tiles
from kernels.experts import expert_kernel
from kernels.linear import NO_HEADS, launch_tile, linear_kernel
from kernels.norm_rope import rms_norm_kernel, rope_kernel
from kernels.packing import dequantize_kernel
from kernels.tuned import linear_config
from support.errors import command_parser, run_command
from support.files import check_folder, write_text

ARCHITECTURES = (86, 89, 90, 120)
LIMITS = {16: 2.7, 32: 3.5}  # rows -> thread instructions per int4 weight, in these forms of fp16 layers:
MAIN = ("", "narrow", "gate-up", "top-10", "experts", "experts gate-up", "fp16-acc", "norm", "qkv")
INDIVISIBLE = (
    "scale",
    "eps",
    "M",
    "T",
    "R",
    "ROWS",
    "PARTS",
    "DIV",
    "arrivals",
)  # arguments that need not be multiples of 16
MATRIX = ("HMMA", "HGMMA", "IMMA", "WGMMA", "UTCHMMA")

LINE = "{:48} {:7} {:>4} {:>6} {:>7} {:>7}  {}"
# The linear layers of the report: (bits, dtype, numbers of tokens, forms). A form is as `linear` takes it.
LINEARS = (
    (4, "fp16", (16, 32, 64), ("", "gate-up", "zeros")),
    (4, "bf16", (16, 32, 64), ("",)),
    (4, "bf16", (64,), ("gate-up", "zeros")),
    (4, "fp16", (16, 64), ("ragged", "norm")),
    (4, "fp16", (16, 32, 64), ("fp16-acc",)),
    (4, "fp16", (16,), ("narrow",)),
    (4, "fp16", (16, 32, 64), ("qkv",)),
    (4, "fp16", (64,), ("qkv qk-norm", "qkv int8-cache", "qkv fp16-acc")),
    (4, "bf16", (16, 64), ("qkv g32 zeros", "qkv qk-norm int8-cache")),
    (8, "fp16", (16, 64), ("qkv",)),
    (16, "bf16", (16, 64), ("qkv",)),
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


EARLY = (  # launched before the kernel before has ended, which GPUs can since sm_90
    (4, "fp16", (16, 32, 64), ("qkv overlap",)),
    (4, "fp16", (16, 64), ("gate-up overlap", "overlap")),
    (4, "fp16", (16,), ("norm overlap", "experts overlap")),
    (16, "bf16", (16, 64), ("overlap",)),
)


class Variant(NamedTuple):
    """One kernel with the constants it is compiled for."""

    name: str
    kernel: object
    pointers: dict[str, str]
    constants: dict[str, object]
    options: dict[str, object]
    weights: float = 0.0  # how many are decoded per thread and turn of the loop; 0 if it is no matrix product
    limit: float = math.inf  # of instructions per weight
    quantized: bool = False


def linear(bits: int, dtype: str, tokens: int, form: str, arch: int = 86) -> Variant:
    """The kernel as `packed_linear` launches it for a 4096 x 4096 layer on sm_`arch`.

    `form` holds words. experts: as `packed_experts` launches it; g64, g32: groups of so many weights instead of 128;
    zeros: with zero points; gate-up: two matrices at once; fp16-acc: sums in fp16; ragged: sizes that do not divide the
    tiles; narrow: a tile of 64 rows; top-10: an LM head that keeps 10 values; norm: the norm of its rows behind it;
    qkv: 16 heads of queries and 8 of keys turned behind it; qk-norm: normed before; int8-cache: into such a cache;
    overlap: launched before the kernel before it has ended.
    """
    words = form.split()
    expert, zeros, gated, ragged, top = (w in words for w in ("experts", "zeros", "gate-up", "ragged", "top-10"))
    group = next((int(word[1:]) for word in words if word in ("g64", "g32")), 128)
    config = linear_config(4096, 4096, bits, capability=divmod(arch, 10))
    if "narrow" in words:
        config = config._replace(block_n=64, warps=2)
    block, tile, options = launch_tile(config, tokens, gated, group if bits == 4 else 0, zeros, bits)
    act = f"*{dtype}"
    pointers = {"x": act, "w": act if bits == 16 else "*i32", "s": "*fp32" if bits == 8 else "*fp16", "z": "*u8"}
    pointers["out"] = "*fp32" if top else act
    constants = dict(BITS=bits, GROUP=group, ZEROS=zeros, GATED=gated, EVEN_K=not ragged)
    constants |= dict(
        OVERLAP="overlap" in words,
        BN=block,
        BT=tile,
        ACC=tl.float16 if "fp16-acc" in words else tl.float32,
        NATIVE=True,
    )
    if expert:
        pointers |= dict(pairs="*i32", offsets="*i32")
    else:
        pointers |= dict(bias=act, residual=act, norm_weight=act, normed=act, ids="*i32", part="*fp32", count="*i32")
        constants |= dict(BIAS=False, RESIDUAL=not gated and not top, SPLIT=4, TOPK=10 if top else 0)
        constants["NORM"] = 12 if "norm" in words else 0
        pointers |= dict.fromkeys(("cos", "sin", "kv", "kv_scales", "slots", "q_weight", "k_weight", "arrived"), act)
        constants |= NO_HEADS
    if "qkv" in words:
        int8 = "int8-cache" in words
        pointers |= dict(cos="*fp32", sin="*fp32", slots="*i64", arrived="*i32")
        pointers |= dict(kv="*i8", kv_scales="*fp32") if int8 else {}
        constants |= dict(HQ=16, HKV=8, HD=128, LEVELS=7, QK_NORM="qk-norm" in words, INT8=int8, RESIDUAL=False)
    name = f"{'experts' if expert else 'linear'} w{bits} {dtype} M<={tokens}" + f" g{group}" * (bits == 4)
    name = " ".join([name, *(word for word in words if word not in ("experts", f"g{group}"))])
    weights = block * 128 / (options["num_warps"] * 32) * (1 + gated)
    main = bits == 4 and dtype == "fp16" and form.removesuffix("overlap").strip() in MAIN
    limit = LIMITS.get(tokens, math.inf) if main else math.inf
    kernel = expert_kernel if expert else linear_kernel
    return Variant(name, kernel, pointers, constants, options, weights, limit, bits < 16)


def dequantization(bits: int, dtype: str, group: int = 128, zeros: bool = False) -> Variant:
    """The kernel as `dequantize` launches it."""
    pointers = dict(w="*i32", s="*fp32" if bits == 8 else "*fp16", z="*u8", out=f"*{dtype}")
    constants = dict(BITS=bits, GROUP=group, ZEROS=zeros, NATIVE=True)
    name = f"dequantize w{bits} {dtype}" + f" g{group}" * (bits == 4) + " zeros" * zeros
    return Variant(name, dequantize_kernel, pointers, constants, dict(num_warps=4))


def attention(
    dtype: str, region: bool = False, window: int = 0, int8: bool = False, dim: int = 128, nodes: int = 32
) -> Variant:
    """The kernel as `tree_attention` launches it."""
    act = f"*{dtype}"
    pointers = dict(q=act, kv="*i8" if int8 else act, kv_scales="*fp32" if int8 else act, start="*i64", out=act)
    pointers |= dict(visible="*u8", positions="*i64", acc_part="*fp32", ml_part="*fp32", arrived="*i32")
    label = f"{dtype}{' prefill' if region else ''}{f' window {window}' if window else ''}"
    label += " int8 cache" * int8 + f" hd {dim}" * (dim != 128) + f" {nodes} nodes" * (not region)
    tiles = attention_tiles(dim, region, int8, window)
    constants = dict(HKV=8, HD=dim, HDP=dim, RP=1 if region else nodes, WINDOW=window, REGION=region, INT8=int8)
    constants |= {key: value for key, value in tiles.items() if key.isupper()} | dict(NATIVE=True, OVERLAP=False)
    options = {key: value for key, value in tiles.items() if key.islower()}
    return Variant(f"attention {label}", attend_kernel, pointers, constants, options)


def norm_and_rope() -> list[Variant]:
    """The kernels as `rms_norm` and `rope_write_kv` launch them."""
    half = "*fp16"
    pointers = dict(x=half, w=half, out=half)
    found = [Variant("rms_norm", rms_norm_kernel, pointers, dict(LEVELS=12, OVERLAP=False), dict(num_warps=4))]
    pointers = dict(qkv=half, cos="*fp32", sin="*fp32", slots="*i64", q_weight=half, k_weight=half, out=half)
    pointers["arrived"] = "*i32"
    for norms, int8 in ((False, False), (True, False), (False, True)):
        name = "rope + kv write" + " + q/k norm" * norms + " int8 cache" * int8
        cache = dict(kv="*i8" if int8 else half, kv_scales="*fp32" if int8 else half)
        constants = dict(HQ=32, HKV=8, HD=128, LEVELS=7, QK_NORM=norms, INT8=int8, OVERLAP=False)
        found.append(Variant(name, rope_kernel, pointers | cache, constants, dict(num_warps=1)))
    return found


def variants(quick: bool = False, arch: int = 86) -> list[Variant]:
    """All kernel variants of the report. quick: the main int4 loop and one of each kind that has been too large."""
    rows = QUICK if quick else LINEARS + (EARLY if arch >= 90 else ())
    found = [
        linear(bits, dtype, m, form, arch) for bits, dtype, tokens, forms in rows for form in forms for m in tokens
    ]
    if quick:
        return [*found, attention("fp16", dim=256)]
    found += [dequantization(4, "fp16"), dequantization(4, "bf16", 32, True), dequantization(8, "fp16")]
    for int8, dim in itertools.product((False, True), (64, 128, 256)):
        found += [attention("bf16", int8=int8, dim=dim), attention("fp16", window=4096, int8=int8, dim=dim)]
        if dim > 64:
            found.append(attention("fp16", region=True, int8=int8, dim=dim))
            found.append(attention("bf16", region=True, window=4096, int8=int8, dim=dim))
    found += [attention("fp16", nodes=nodes) for nodes in (1, 32, 64, 128)]
    found += norm_and_rope()
    early = [attention("fp16"), attention("bf16", int8=True), *norm_and_rope()] if arch >= 90 else []
    return found + [v._replace(name=f"{v.name} overlap", constants=v.constants | {"OVERLAP": True}) for v in early]


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
    if per_weight is not None and per_weight > variant.limit:
        failures.append(f"{per_weight:.2f} instructions per weight, limit {variant.limit}")
    # To store every decoded weight in 16 bits takes a store for at most eight of them.
    if variant.quantized and stores >= variant.weights / 8:
        failures.append(f"decoded weights go through shared memory ({stores} STS in the loop)")
    if variant.weights and not any(op.startswith("LDGSTS") for op in loop):
        failures.append("the loop makes no asynchronous copies")
    if variant.constants.get("OVERLAP") and (early := before_the_wait(sass)):
        failures.append(f"memory is accessed before the kernel before has ended ({early})")
    if any(op.startswith("HGMMA") for op in everything) and "fence.proxy.async" not in compiled.asm["ptx"]:
        failures.append("wgmma reads shared memory without a proxy fence")
    return dict(
        kernel=variant.name, arch=f"sm_{arch}", registers=registers, spills=spills,
        shared_bytes=compiled.metadata.shared, instructions_per_weight=per_weight, loop_instructions=loop.total(),
        limit=None if variant.limit == math.inf else variant.limit, shared_stores=stores,
        matrix=sorted(op for op in everything if op.startswith(MATRIX)), failures=failures,
    )  # fmt: skip


def before_the_wait(sass: str) -> str:
    """The first instruction of global memory in front of the wait for the kernel before, or "". The wait is ACQBULK."""
    for line in sass.splitlines():
        found = re.match(r"\s*/\*[0-9a-f]+\*/\s*(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", line)
        if found and found[1].startswith("ACQBULK"):
            return ""
        if found and found[1].startswith(("LDG", "STG", "LD.", "ST.", "ATOM", "RED.", "UTMA", "UBLKCP", "CCTL", "BRA")):
            return found[1]
    return "no wait at all"


def compiler() -> str:
    """The versions that made the machine code."""
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    version = re.search(r"release ([\d.]+)", subprocess.check_output([ptxas, "--version"], text=True))[1]
    return f"Triton {triton.__version__}, ptxas {version}"


def write_rows(path: Path, rows: list[dict]) -> None:
    """Put the rows into a report of this compiler, in the place of those of the same kernel and architecture."""
    known = json.loads(path.read_text()) if path.exists() else {}
    kept = known.get("rows", []) if known.get("compiler") == compiler() else []
    found = {(row["kernel"], row["arch"]): row for row in [*kept, *rows]}
    lines = ",\n".join(json.dumps(found[key]) for key in sorted(found))
    head = json.dumps({"triton": triton.__version__, "compiler": compiler()})
    write_text(path, f'{head[:-1]}, "rows": [\n{lines}\n]}}\n')


INTRODUCTION = """# The matrix kernels in machine code

Nothing on this page was timed. It was counted in the machine code that two versions of Triton make for four
architectures, without a GPU. `python -m scripts.kernel_report` makes the counts and fails where a promise breaks.

- **Instructions per weight** in the main loop decide whether int4 runs at the memory's rate. The limit is 2.7 up to 16
  rows, for fp16 with symmetric groups of 128 whose tiles divide the matrix. Zero points, small groups, bf16 and int8 may
  need more.
- **Spills** of registers to memory are failures, and there are none. Layers with many sums, scales or addresses run in
  smaller tiles for that.
- **No wgmma in linears.** On Hopper (sm_90) Triton 3.6 puts no fence between the copies of the activations and the
  wgmma that reads
  them, and ptxas 12.9 may overwrite registers that a wgmma still reads. Two warps per program make Triton use mma,
  whatever the number of rows is, so that verification and plain decoding have the same bits.
- **Launched early** (`--overlap`, sm_90 and later). Such a kernel is placed while the one before it still runs. Its
  first access to memory comes after the instruction (ACQBULK) that waits for the end of that one.
- **Split sums.** A linear is split only where it has too few tiles for the GPU. Of the programs that share a sum, the one
  that ends last keeps its part in registers. Partial sums take at most 5 % of the weight bytes of LLaMA-2-7B,
  LLaMA-3-8B and Mixtral at 16 rows, and 10 % at 32. A test counts them.
- **Sums in fp16.** GeForce cards add fp16 products twice as fast in fp16 as in fp32. There int4 adds the products of a
  group in fp16, for every number of rows, and the groups in fp32. The codes are divided by 16, so that one activation of
  any size cannot overflow. `python -m scripts.fp16_sums --checkpoint demo` emulates it on a CPU and rounds to fp16 after
  every 8 products. On 768 positions of the demo perplexity went from 34.192 to 34.185, the mean divergence (KL) was
  4.8e-6, and the largest sum was 180 of 65504. Larger models were not tried here.

The cells are instructions per weight, and registers.
"""


def page(paths: list[Path]) -> str:
    """The Markdown page of docs/ from reports of several compilers."""
    reports = [json.loads(path.read_text()) for path in paths]
    archs = sorted({row["arch"] for report in reports for row in report["rows"]}, key=lambda arch: int(arch[3:]))
    text = [INTRODUCTION]
    for report in reports:
        cells = {(row["kernel"], row["arch"]): row for row in report["rows"] if row["instructions_per_weight"]}
        failed = sum(bool(row["failures"]) for row in report["rows"])
        text += [
            f"## {report['compiler']}",
            "",
            f"{len(report['rows'])} kernels, {failed} failed. {_gated(report)}",
            "",
        ]
        bad = [row for row in report["rows"] if row["failures"]]
        text += [f"- {row['kernel']}, {row['arch']}: {'; '.join(row['failures'])}" for row in bad]
        text += [""] * (failed > 0)
        text += ["| kernel | " + " | ".join(archs) + " |", "|---|" + "---:|" * len(archs)]
        for kernel in sorted({kernel for kernel, _ in cells}, key=_by_number):
            found = [cells.get((kernel, arch)) for arch in archs]
            shown = [f"{r['instructions_per_weight']:.2f}, {r['registers']}" if r else "" for r in found]
            text.append(f"| {kernel.replace('<=', '&le;')} | " + " | ".join(shown) + " |")
        text.append("")
    return "\n".join(text)


def _gated(report: dict) -> str:
    """A sentence about the kernels that have a limit of instructions per weight."""
    words = []
    for limit in sorted(set(LIMITS.values())):
        rows = [row["instructions_per_weight"] for row in report["rows"] if row["limit"] == limit]
        words.append(f"{len(rows)} of them have the limit {limit} and need at most {max(rows):.2f}")
    return "; ".join(words) + " instructions per weight."


def _by_number(kernel: str) -> list:
    """A key that sorts w4 before w16 and M<=16 before M<=32."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", kernel)]


def main(argv: list[str] | None = None) -> int:
    """Print the table; 0 when every gate holds."""
    parser = command_parser("scripts.kernel_report", __doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES), choices=ARCHITECTURES)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="kernels whose names begin with one of these")
    parser.add_argument("--page", type=Path, nargs="+", metavar="FILE", help="write the first from the others")
    parser.add_argument("--quick", action="store_true", help="one variant of each kind that is at risk")
    args = parser.parse_args(argv)
    return run_command(lambda: run(args), args.debug)


def run(args: argparse.Namespace) -> int:
    """Compile the variants, and print what became of each."""
    check_folder("--json", args.json)
    if args.page:
        write_text(args.page[0], page(args.page[1:]))
        return 0
    rows = []
    print(LINE.format("kernel", "arch", "regs", "spills", "smem", "instr/w", "matrix instruction"))
    cases = [(arch, variant) for arch in args.arch for variant in variants(args.quick, arch)]
    for arch, variant in cases:
        if args.only and not variant.name.startswith(tuple(args.only)):
            continue
        row = inspect(variant, arch)
        rows.append(row)
        cells = [row[name] for name in ("kernel", "arch", "registers", "spills", "shared_bytes")]
        cells += [row["instructions_per_weight"] or "", " ".join(row["matrix"]) or "-"]
        print(LINE.format(*cells) + "".join(f"  FAIL: {text}" for text in row["failures"]), flush=True)
    if args.json:
        write_rows(args.json, rows)
    failed = sum(bool(row["failures"]) for row in rows)
    print(f"{len(rows)} kernels compiled, {failed} failed a gate")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
