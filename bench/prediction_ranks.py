"""A prediction of LLaMA-2-70B in int4 on two RTX 3090 (`--tp 2`). It is no measurement, and the page says so.

Linears, keys and values are computed as in `bench.prediction`, each for one rank's part. Added to them are the exchanges
between the GPUs, with published times of an exchange.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from bench.prediction import Gpu, Setup, draft_forwards, linear_seconds, target, with_assumptions
from bench.random_models import SHAPES, empty_model
from bench.step_cells import draft_rows
from model import Transformer
from runtime.links import NCCL, ONE_SHOT, Link
from tree import parse_tree
from weights.shards import Shard, exchanged

RANKS, SHAPE, CONTEXT = 2, "llama-2-70b", 512
LAUNCHES = 5  # per layer, as on one GPU; and for each of its two sums the exchange's own, the sum and the norm after it
LINKS = {NCCL: "stock driver", ONE_SHOT: "NVLink or a patched driver"}
SETUPS = (
    Setup(SHAPE, 0, "", 0, 1.0, "plain decoding"),
    Setup(SHAPE, 1, "chain:3", 0, 2.8, "assumed: the paper's chain of 5 has 3.12"),
    Setup(SHAPE, 1, "paper25", 0, 3.81, "EAGLE paper, MT-bench, T = 0"),
)


def one_part() -> Transformer:
    """The linears of one rank, without memory: half of every matrix. The embedding is cut here, and whole in a rank."""
    whole = SHAPES[SHAPE]
    part = replace(Shard(0, RANKS).local(whole), vocab_size=whole.vocab_size // RANKS)
    return empty_model(part, "int4").to(torch.float16)


def predict(setup: Setup, link: Link, report: dict[str, Any], gpu: Gpu) -> dict[str, float]:
    """Milliseconds of the parts of a step of one rank; the ranks run at the same time."""
    whole, model = SHAPES[SHAPE], one_part()
    rows = parse_tree(setup.tree).N if setup.tree else 1
    verify = linear_seconds([(model, rows)], report, gpu)
    draft, levels = {"seconds": 0.0, "bytes": 0.0}, []
    if setup.head:  # every rank runs the whole head; only the LM head, which is the target's, is split
        bodies = draft_forwards(setup, target(SHAPE))[::2]
        levels = draft_rows(setup.tree)
        heads = [(model.lm_head, n if level else 1) for level, n in enumerate(levels)]
        draft = linear_seconds(bodies + heads, report, gpu)
    logits = whole.vocab_size // RANKS * 2
    sent = exchanged(whole, Shard(0, RANKS), rows, 2) + [n * logits for n in levels]
    launches = LAUNCHES + 2 * (link.launches + 2)
    kv = model.kv_bytes(CONTEXT, 2)
    ms = {
        "target": verify["seconds"] * 1e3,
        "draft": draft["seconds"] * 1e3,
        "attention": kv / (gpu.bytes_per_second * gpu.memory_share) * 1e3,
        "gaps": launches * (whole.num_hidden_layers + len(levels)) * gpu.gap * 1e3,
        "exchanges": link.cost(sent) * 1e3,
    }
    return ms | {
        "step": sum(ms.values()), "bytes": verify["bytes"] + draft["bytes"] + kv, "count": len(sent),
        "tokens_per_second": setup.tau / sum(ms.values()) * 1e3,
    }  # fmt: skip


def page(report: dict[str, Any], gpu: Gpu) -> str:
    """The Markdown page."""
    lines = [
        "# PREDICTION: LLaMA-2-70B in int4 on two RTX 3090",
        "",
        "**Nothing on this page was measured on a GPU.** `python -m scripts.predict --two-gpus` computes it as",
        "[rtx3090_prediction.md](rtx3090_prediction.md), for one rank's half of the model, and adds the exchanges of",
        "`--tp 2`.",
        "",
        "| drafter, int4 | tau (given) | source of tau | exchanges by | bytes / step and GPU | target ms | draft ms | "
        "attention ms | gaps ms | exchanges ms | **step ms** | **tok/s at that tau** |",
        "|---|---:|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for link in LINKS:
        for setup in SETUPS:
            row = predict(setup, link, report, gpu)
            name = f"EAGLE-{setup.head}, {setup.tree}" if setup.head else "none"
            parts = " | ".join(f"{row[k]:.2f}" for k in ("target", "draft", "attention", "gaps", "exchanges"))
            lines.append(
                f"| {name} | {setup.tau:g} | {setup.source} | {link.name}, {LINKS[link]} ({row['count']}) | "
                f"{row['bytes'] / 1e9:.1f} GB | {parts} | **{row['step']:.1f}** | **{row['tokens_per_second']:.0f}** |"
            )
    held, config = one_part(), SHAPES[SHAPE]
    memory = sum(t.nbytes for t in held.state_dict().values()) + config.vocab_size // RANKS * config.hidden_size * 2
    texts = (
        f"Each card holds {memory / 1e9:.1f} GB of weights: half of every matrix, and the whole embedding. The rest of "
        "its 24 GB is for the draft head, keys and values, and buffers.",
        "An exchange of 10 KB was published at 39 us for NCCL through host memory, and at 5.76 us on the device for a "
        "Triton kernel over peer-to-peer memory. Longer ones are assumed to add their bytes at 10 and 20 GB/s. None of "
        "this was measured with eaglet. Its one-shot exchange is not one kernel: it writes, waits, adds and waits again. "
        "The gaps between these are counted.",
        "A step has two sums per layer, one exchange of logits, and one of each draft level. Exchanges and work on the "
        "GPU do not overlap.",
        f"{', '.join(f'{LAUNCHES + 2 * (link.launches + 2)} kernels per layer ({link.name})' for link in LINKS)} are "
        f"assumed where one GPU has {LAUNCHES}, because a sum of ranks cannot end with the norm.",
        "Everything else is assumed as on the page of one card.",
        "For scale: 26.4 tokens/s were published for LLaMA-3-70B on four RTX 3090 with ik_llama.cpp.",
    )
    return with_assumptions(lines, texts)
