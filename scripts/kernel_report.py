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
import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from bench.kernel_page import page
from bench.kernel_variants import ARCHITECTURES, Variant, variants
from support.errors import command_parser, run_command
from support.files import check_folder, write_text

# Arguments that need not be multiples of 16.
INDIVISIBLE = set("scale eps M T R ROWS PARTS DIV arrivals".split())
MATRIX = ("HMMA", "HGMMA", "IMMA", "WGMMA", "UTCHMMA")

LINE = "{:48} {:7} {:>4} {:>6} {:>7} {:>7}  {}"


def compile_variant(variant: Variant, arch: int) -> CompiledKernel:
    """The variant compiled for the GPU architecture sm_`arch`, as a launch on a GPU would compile it."""
    names = variant.kernel.arg_names
    kinds = {name: "fp32" if name in ("scale", "eps") else "i32" for name in names} | variant.pointers
    kinds |= dict.fromkeys(variant.constants, "constexpr")
    signature = {name: kinds[name] for name in names}
    places = [(i,) for i, name in enumerate(names) if name not in variant.constants.keys() | INDIVISIBLE]
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


# How instructions of global memory begin, and jumps, behind which the order of the lines says nothing.
MEMORY = tuple("LDG STG LD. ST. ATOM RED. REDG UTMA UBLKCP CCTL BRA".split())


def before_the_wait(sass: str) -> str:
    """The first instruction of global memory in front of the wait for the kernel before, or "". The wait is ACQBULK."""
    for line in sass.splitlines():
        found = re.match(r"\s*/\*[0-9a-f]+\*/\s*(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", line)
        if found and found[1].startswith("ACQBULK"):
            return ""
        if found and found[1].startswith(MEMORY):
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
