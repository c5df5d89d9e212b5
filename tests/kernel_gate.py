"""Compile a Triton kernel ahead of time, without a GPU, and read its machine code.

`inspect` counts registers, spills, shared memory and instructions, and names the gates that a kernel fails:

- it spills;
- the loop of fp16 symmetric g128 int4 needs more than 2.7 instructions per weight up to 16 rows, or 3.5 up to 32;
- a quantized loop stores decoded weights to shared memory, or copies nothing asynchronously;
- a wgmma reads shared memory without a proxy fence since the one before.
"""

from __future__ import annotations

import collections
import math
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from kernel_variants import Variant
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend

MATRIX = ("HMMA", "HGMMA", "IMMA", "WGMMA", "UTCHMMA")


def as_launched(variant: Variant) -> ASTSource:
    """The source of the variant with its types, constants and divisible arguments, as a launch on a GPU would have it."""
    names = variant.kernel.arg_names
    kinds = variant.pointers | dict.fromkeys(variant.constants, "constexpr")
    signature = {name: kinds[name] for name in names}
    places = [(i,) for i, name in enumerate(names) if name not in {*variant.constants, *variant.uneven}]
    attributes = dict.fromkeys(places, [["tt.divisibility", 16]])
    return ASTSource(fn=variant.kernel, signature=signature, constexprs=variant.constants, attrs=attributes)


def compile_variant(variant: Variant, arch: int) -> CompiledKernel:
    """The variant compiled for the GPU architecture sm_`arch`, as a launch on a GPU would compile it."""
    options = {key: value for key, value in variant.options.items() if value is not None}
    return triton.compile(as_launched(variant), target=GPUTarget("cuda", arch, 32), options=options)


def lower(variant: Variant, arch: int) -> str:
    """The variant in Triton's GPU dialect for sm_`arch`: the layouts are decided, and nothing is assembled."""
    source, target = as_launched(variant), GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    options = backend.parse_options({key: value for key, value in variant.options.items() if value is not None})
    context, stages, metadata = ir.context(), {}, {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, options, source.language)
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, functions, backend.get_module_map(), context)
    for stage in ("ttir", "ttgir"):
        module = stages[stage](module, metadata)
    return str(module)


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
    # Triton 3.6 puts no fences. There the first look at a device has to find the products right.
    if (bare := unfenced(compiled.asm["ptx"])) and not triton.__version__.startswith("3.6"):
        failures.append(f"{bare} groups of wgmma read shared memory without a proxy fence")
    return dict(
        kernel=variant.name, arch=f"sm_{arch}", registers=registers, spills=spills,
        shared_bytes=compiled.metadata.shared, instructions_per_weight=per_weight, loop_instructions=loop.total(),
        limit=None if variant.limit == math.inf else variant.limit, shared_stores=stores,
        matrix=sorted(op for op in everything if op.startswith(MATRIX)), failures=failures,
    )  # fmt: skip


def unfenced(ptx: str) -> int:
    """How many groups of wgmma have no proxy fence between the group before and themselves, in the order of the lines."""
    missing, fenced = 0, False
    for line in ptx.splitlines():
        fenced = fenced or "fence.proxy.async" in line
        if "wgmma.commit_group" in line:
            missing, fenced = missing + (not fenced), False
    return missing
