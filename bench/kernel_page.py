"""The page of the kernel report in docs/, from the rows of several compilers."""

from __future__ import annotations

import json
import re
from pathlib import Path

from bench.kernel_variants import LIMITS

INTRODUCTION = """# The matrix kernels in machine code

Nothing on this page was timed. It was counted in the machine code that two versions of Triton make for four
architectures, without a GPU. `python -m scripts.kernel_report` makes the counts and fails where a promise breaks.

- **Instructions per weight** in the main loop decide whether int4 runs at the memory's rate. The limit is 2.7 up to 16
  rows, for fp16 with symmetric groups of 128 whose tiles divide the matrix. Zero points, small groups, bf16 and int8 may
  need more.
- **Spills** of registers to memory are failures, and there are none. Layers with many sums, scales or addresses run in
  smaller tiles for that.
- **No wgmma in linears.** On Hopper (sm_90) Triton 3.6 puts no fence between the copies of the activations and the
  wgmma that reads them, and ptxas 12.9 may overwrite registers that a wgmma still reads. Two warps per program make
  Triton use mma, whatever the number of rows is, so that verification and plain decoding have the same bits.
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
