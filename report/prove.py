"""TODO."""

from __future__ import annotations

import sys

from drafters.base import PlainDrafter
from engine import Engine
from report.lines import Report
from runtime.results import GenerationResult
from sampling import SamplingParams

TIE_MARGIN = 1e-4  # distance of two sampling keys
TIE_ULPS = 2  # the same in units in the last place of the model's dtype


def is_rounding_tie(margin: float, ulps: float) -> bool:
    """Whether rounding may have decided between two tokens (DESIGN section 4); the arguments are `Engine.margin`'s."""
    return margin < TIE_MARGIN or ulps <= TIE_ULPS


def prove(engine: Engine, prompts: list[list[int]], params: SamplingParams, results: list[GenerationResult]):
    """Replay without the drafter; returns (identical tokens, total tokens, None or (row, index, margin, margin in ulp)).

    On the GPU the replay keeps the width of the forward (one live node, the rest padding) and its kernels, so equality
    is bitwise; elsewhere forwards of other widths round differently, so a fork at a near-tie is possible and its margin
    says so.
    """
    width = engine.drafter.N if engine.model.device.type == "cuda" else 1
    drafter = PlainDrafter(engine.model, engine.batch_size, width)
    plain = Engine(
        engine.model,
        engine.tokenizer,
        drafter,
        engine.batch_size,
        engine.ctx,
        engine.compiled,
        engine.backend,
        compile_mode=engine.compile_mode,
        kv_dtype=engine.kv_dtype,
    )
    replayed = plain.generate_batch(prompts, params).run()
    same = total = 0
    fork = None
    for b, (ours, theirs) in enumerate(zip(results, replayed, strict=True)):
        pairs = list(zip(ours.token_ids, theirs.token_ids, strict=False))
        agree = next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
        same, total = same + agree, total + len(ours.token_ids)
        if agree < max(len(ours.token_ids), len(theirs.token_ids)) and fork is None:
            margin: tuple[float, float] = (float("inf"), float("inf"))
            if agree < len(pairs):
                text = prompts[b] + ours.token_ids[:agree]
                margin = plain.margin(b, text, len(prompts[b]), params, *pairs[agree])
            fork = (b, agree, *margin)
    return same, total, fork


def _prove(engine, prompts, params, results, report: Report, args) -> int:
    same, total, fork = prove(engine, prompts, params, results)
    if fork is None:
        print(f"identical {same}/{total}", file=sys.stderr)
        return 0
    row, index, margin, ulps = fork
    tie = is_rounding_tie(margin, ulps)
    verdict = "near-tie: rounding" if tie else "NOT a rounding tie: this is a bug"
    where = f"fork at token {index} of row {row}, {same}/{total} identical"
    print(
        f"{where}: logit margin {margin:.3g}, {ulps:.1f} ulp in {engine.options.dtype} ({verdict})",
        file=sys.stderr,
    )
    return 0 if tie else 1
