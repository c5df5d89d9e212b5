"""A prediction of step times on a GPU that nobody here has: an RTX 3090. It is no measurement, and every page says so.

It is made of four things: bytes per step from the engine's own cost functions on the real shapes, with the partial sums
of linears that are split; instructions per weight counted in the kernels for sm_86; launches counted in a step on
fake tensors; and the card's published limits. Every linear takes the longest of three times: its bytes at the memory's
rate, its instructions at the issue rate, its products at the tensor cores' rate. Keys and values are read at the memory's
rate, and every kernel of the captured step costs a fixed gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.random_models import SHAPES, empty_head, empty_model
from bench.step_cells import draft_rows
from kernels.tuned import linear_config, partial_bytes
from model import Transformer
from support.files import read_json
from support.reader import check
from tree import parse_tree
from weights.quantized import QuantLinear

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "docs" / "kernel_report_triton39.json"


@dataclass(frozen=True)
class Gpu:
    """Published limits of a card, and the shares of them that are assumed to be reached."""

    name: str = "RTX 3090 (350 W, stock clocks)"
    bytes_per_second: float = 936e9  # GDDR6X, data sheet
    lanes_per_second: float = 82 * 4 * 32 * 1.695e9  # SMs x schedulers x lanes x boost clock
    multiplies_per_second: float = 71e12  # dense fp16 products summed in fp32, each counted as 2
    half_multiplies_per_second: float = 142e12  # the same summed in fp16
    multiprocessors: int = 82
    memory_share: float = 0.87  # of the data sheet; copies on this card are published at 0.90
    issue_share: float = 0.75
    matrix_share: float = 0.85
    gap: float = 0.83e-6  # seconds between two kernels of a CUDA graph, published for this card


class Setup(NamedTuple):
    """A decoder to predict. tau and its source are inputs, not predictions."""

    shape: str
    head: int
    tree: str
    launches: int  # of one greedy step, counted as tests/test_launches.py counts them
    tau: float
    source: str


SETUPS = (
    Setup("llama-2-7b", 0, "", 169, 1.0, "plain decoding"),
    Setup("llama-2-7b", 1, "paper25", 305, 3.62, "EAGLE paper, MT-bench, T = 0"),
    Setup("llama-2-7b", 1, "dynamic:24,7,8", 320, 3.6, "assumed: what 25 nodes of a fixed tree give"),
    Setup("llama-2-7b", 1, "dynamic:16,5,8", 299, 3.6, "assumed: what 25 nodes of a fixed tree give"),
    Setup("llama-3-8b", 0, "", 169, 1.0, "plain decoding"),
    Setup("llama-3-8b", 3, "chain:7", 312, 3.91, "SpecBundle, LLaMA-3.1-8B, MT-bench"),
    Setup("llama-3-8b", 3, "dynamic:16,7,8", 322, 4.5, "assumed: between the chain's 3.91 and the 60 nodes' 6.13"),
    Setup("llama-3-8b", 3, "dynamic:60,7,10", 329, 6.13, "EAGLE-3 paper, LLaMA-3.1-8B, MT-bench, T = 0"),
)
CONTEXT = 512
Forwards = list[tuple[torch.nn.Module, int]]  # modules and the rows that run through them


def target(shape: str) -> Transformer:
    """The int4 target (group 128, int8 LM head) without memory, its activations fp16."""
    return empty_model(SHAPES[shape], "int4").to(torch.float16)


def tile_of(rows: int) -> int:
    """The rows that the kernel computes for `rows` rows."""
    return next(tile for tile in (16, 32, 64) if rows <= tile)


def instructions(report: dict[str, Any], bits: int, rows: int) -> float:
    """Instructions per weight of the fp16 kernel that runs `rows` rows. Raises ValueError if the report lacks it."""
    name = f"linear w{bits} fp16 M<={tile_of(rows)}" + " g128 fp16-acc" * (bits == 4)
    for row in report["rows"]:
        if (row["kernel"], row["arch"]) == (name, "sm_86"):
            return row["instructions_per_weight"]
    raise ValueError(f"the kernel report has no '{name}' for sm_86; make it again: scripts.kernel_report --arch 86")


def linear_seconds(forwards: Forwards, report: dict[str, Any], gpu: Gpu) -> dict[str, float]:
    """Bytes, weights and seconds of the quantized linears of all `forwards`.

    `seconds` adds up the longest of the three times of each linear.
    """
    total = dict.fromkeys(("bytes", "partial_bytes", "weights", "memory", "issue", "matrix", "seconds"), 0.0)
    linears = [(m, rows) for module, rows in forwards for m in module.modules() if isinstance(m, QuantLinear)]
    for linear, rows in linears:
        n, k = linear.out_features, linear.in_features
        tiling = linear_config(n, k, linear.bits, gpu.multiprocessors, (8, 6), geforce=True)
        half = tiling.accumulate == "float16"
        rate = gpu.half_multiplies_per_second if half else gpu.multiplies_per_second
        partial = partial_bytes(tiling, n, rows)
        size = linear.weight_bytes_read(rows) + partial
        added = {
            "memory": size / (gpu.bytes_per_second * gpu.memory_share),
            "issue": n * k * instructions(report, linear.bits, rows) / (gpu.lanes_per_second * gpu.issue_share),
            "matrix": 2 * n * k * tile_of(rows) / (rate * gpu.matrix_share),
        }
        added |= {"bytes": size, "partial_bytes": partial, "weights": n * k, "seconds": max(added.values())}
        total = {name: total[name] + added[name] for name in total}
    return total


def draft_forwards(setup: Setup, model: Transformer) -> Forwards:
    """The draft forwards of a step with an int4 head of the target's geometry, each a body and an LM head."""
    head = empty_head(model, setup.head, "int4").to(torch.float16)
    first, layer = (torch.nn.ModuleList(parts) for parts in ([head.fc, head.layer], [head.layer]))
    lm_head = torch.nn.ModuleList([head.lm_head or model.lm_head])
    found = []
    for level, rows in enumerate(draft_rows(setup.tree)):  # the first forward feeds again what was accepted
        body = first if level == 0 or setup.head == 1 else layer
        found += [(body, rows), (lm_head, rows if level else 1)]
    return found


def predict(setup: Setup, report: dict[str, Any], gpu: Gpu, context: int = CONTEXT) -> dict[str, Any]:
    """One line of the table: milliseconds of the parts of a step and what binds the verification."""
    model = target(setup.shape)
    nodes = parse_tree(setup.tree).N if setup.tree else 1
    verify = linear_seconds([(model, nodes)], report, gpu)
    kv = model.kv_bytes(context, 2)
    forwards = draft_forwards(setup, model) if setup.head else []
    draft = linear_seconds(forwards, report, gpu)
    ms = {
        "target_ms": verify["seconds"] * 1e3,
        "attention_ms": kv / (gpu.bytes_per_second * gpu.memory_share) * 1e3,
        "draft_ms": draft["seconds"] * 1e3,
        "gaps_ms": setup.launches * gpu.gap * 1e3,
    }
    step_ms = sum(ms.values())
    return {
        "setup": setup._asdict(), "nodes": nodes, "context": context, "linear_weights": verify["weights"],
        "target_bytes": verify["bytes"], "partial_bytes": verify["partial_bytes"] + draft["partial_bytes"],
        "kv_bytes": kv, "draft_bytes": draft["bytes"], "draft_forwards": len(forwards) // 2, **ms,
        "step_ms": step_ms, "bound": max(("memory", "issue", "matrix"), key=verify.get),
        "tokens_per_second": setup.tau / step_ms * 1e3,
    }  # fmt: skip


def page(report: dict[str, Any], gpu: Gpu) -> str:
    """The Markdown page: what it is, the table, and what was assumed."""
    rows = [predict(setup, report, gpu) for setup in SETUPS]
    plain = {row["setup"]["shape"]: row["step_ms"] for row in rows if not row["setup"]["head"]}
    lines = [
        "# PREDICTION: int4 decoding on an RTX 3090",
        "",
        "**Nothing on this page was measured on a GPU.** `python -m scripts.predict` computes it from bytes per step",
        "(the engine's cost functions on the real shapes), from instructions counted in the kernels compiled for sm_86",
        "(`docs/kernel_report_triton39.json`) and from published limits of the card. Acceptance (tau) is an input",
        "with its source. The first run of `make gpu` on such a card replaces this page.",
        "",
        "| target, int4 g128 | drafter, int4 | nodes | tau (given) | source of tau | bytes / step | launches | "
        "target ms | draft ms | attention ms | gaps ms | **step ms** | bound by | break-even tau | "
        "**tok/s at that tau** |",
        "|---|---|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---|---:|---:|",
    ]
    for row in rows:
        setup = row["setup"]
        name = f"EAGLE-{setup['head']}, {setup['tree']}" if setup["head"] else "none"
        total = (row["target_bytes"] + row["kv_bytes"] + row["draft_bytes"]) / 1e9
        over = row["step_ms"] / plain[setup["shape"]]
        lines.append(
            f"| {setup['shape']} | {name} | {row['nodes']} | {setup['tau']:g} | {setup['source']} | {total:.2f} GB | "
            f"{setup['launches']} | "
            f"{row['target_ms']:.2f} | {row['draft_ms']:.2f} | {row['attention_ms']:.2f} | {row['gaps_ms']:.2f} | "
            f"**{row['step_ms']:.2f}** | {row['bound']} | {over:.2f} | **{row['tokens_per_second']:.0f}** |"
        )
    scale = "For scale: the EAGLE paper reports 160.4 tok/s for LLaMA-2-7B int4 on this card, 106.9 without EAGLE."
    before = (
        "An earlier count of LLaMA-2-7B with 24 nodes of a dynamic tree, before its kernels were fused and its sums were "
        "fp16, found 1006 launches and estimated 12 to 13 ms, with 8 ms in reach."
    )
    lines += ["", scale, "", before]
    return with_assumptions(lines, assumptions(rows, report, gpu))


def assumptions(rows: list[dict[str, Any]], report: dict[str, Any], gpu: Gpu) -> tuple[str, ...]:
    """What the predictions `rows` rest on, a sentence or two each."""
    most = max(row["partial_bytes"] / (row["target_bytes"] + row["draft_bytes"]) for row in rows)
    issue, limit = instructions(report, 4, 16), gpu.lanes_per_second * gpu.issue_share
    budget = limit / (gpu.bytes_per_second * gpu.memory_share) * (0.5 + 2 / 128)
    tiles = ", ".join(f"{instructions(report, 4, t):.2f} up to {t} rows" for t in (16, 32, 64))
    return (
        f"Card: {gpu.name}; {gpu.bytes_per_second / 1e9:.0f} GB/s, {gpu.lanes_per_second / 1e12:.1f} T thread "
        f"instructions/s, {gpu.multiplies_per_second / 1e12:.0f} TFLOP/s of fp16 products summed in fp32 and "
        f"{gpu.half_multiplies_per_second / 1e12:.0f} summed in fp16.",
        f"Reached of these: {gpu.memory_share:.0%} of bandwidth, {gpu.issue_share:.0%} of issue slots, "
        f"{gpu.matrix_share:.0%} of tensor throughput. None of the three is measured for these kernels.",
        f"Instructions per int4 weight (fp16, g128, main loop as compiled by Triton {report['triton']}): {tiles}. At the "
        f"assumed shares memory would hide {budget:.1f} of them; {issue:.2f} are needed at 16 rows.",
        "A linear takes the longest of its three times, and linears do not overlap. Rows are padded to 16, 32 or 64, as "
        "the kernel computes them: 26 nodes cost as much as 32. int4 adds the products of a group in fp16 on this card.",
        f"Partial sums of linears that are split are written and read in DRAM: {most:.1%} of a step's bytes at most.",
        f"Keys and values of {CONTEXT} tokens in fp16 are read once per step at the memory's rate; attention's "
        "arithmetic and the draft's own cache are free.",
        f"One CUDA graph per step, no host gap; {gpu.gap * 1e6:.2f} us between kernels, whose number is counted. "
        "The time that the small kernels take themselves is not counted.",
        "Group 128, fp16 scales, int8 LM heads; the head is int4 like the target, and its tau is taken to be that of the "
        "half-precision head. EAGLE-3's fusion layer runs once per step.",
        "Power limit, clocks and temperature as delivered; a lower power limit costs tens of per cent on this card.",
    )


def with_assumptions(lines: list[str], texts: Sequence[str]) -> str:
    """A page that ends with its numbered assumptions."""
    numbered = (f"{i}. {text}" for i, text in enumerate(texts, 1))
    return "\n".join([*lines, "", "## Assumptions", "", *numbered]) + "\n"


def read_report(path: Path) -> dict[str, Any]:
    """The JSON that scripts.kernel_report writes. Raises ValueError for a file of anything else."""
    row = {"kernel": str, "arch": str, "instructions_per_weight?": (float, None)}
    return check(read_json(path), {"triton": str, "rows": [row]}, path)
