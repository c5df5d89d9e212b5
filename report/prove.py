"""`--prove`: replay a request without the drafter and judge the first difference."""

from __future__ import annotations

from typing import NamedTuple

from drafters.base import PlainDrafter
from engine import Engine
from runtime.results import GenerationResult
from sampling import SamplingParams

TIE_MARGIN = 1e-4
TIE_ULPS = 2


class Fork(NamedTuple):
    """The first difference between a request and its replay."""

    row: int
    index: int  # of the token
    margin: float  # distance of the two tokens' sampling keys
    ulps: float  # the same in units of the last place


class Proof(NamedTuple):
    """How many tokens of a request its replay without the drafter repeats."""

    identical: int
    total: int
    fork: Fork | None


def is_rounding_tie(margin: float, ulps: float) -> bool:
    """Whether two tokens are so close that the rounding of forwards of other widths may swap them.

    This is the one rule for forks: the keys differ by less than 1e-4, or by at most 2 units of the last place of the
    larger logit in the model's dtype.
    """
    return margin < TIE_MARGIN or ulps <= TIE_ULPS


def first_fork(ours: list[int], theirs: list[int]) -> int | None:
    """The index of the first difference, None if equal. A proper prefix forks at its end."""
    agree = next((i for i, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y), min(len(ours), len(theirs)))
    return None if agree == max(len(ours), len(theirs)) else agree


def prove(engine: Engine, prompts: list[list[int]], params: SamplingParams, results: list[GenerationResult]) -> Proof:
    """Replay `results` without the drafter.

    On a GPU the replay keeps the width of the forward (one live node, the rest padding) and its kernels, so equality is
    bitwise. Elsewhere forwards of other widths round differently, so tokens that are nearly tied can swap.
    """
    width = engine.drafter.N if engine.model.device.type == "cuda" else 1
    plain = Engine(
        engine.model,
        engine.tokenizer,
        PlainDrafter(engine.model, width),
        engine.batch_size,
        engine.ctx,
        engine.compiled,
        engine.backend,
        compile_mode=engine.compile_mode,
        kv_dtype=engine.kv_dtype,
    )
    replayed = plain.generate_batch(prompts, params).run()
    identical = 0
    fork = None
    for b, (ours, theirs) in enumerate(zip(results, replayed, strict=True)):
        index = first_fork(ours.token_ids, theirs.token_ids)
        identical += len(ours.token_ids) if index is None else index
        if index is not None and fork is None:
            fork = _judge(plain, b, index, prompts[b], params, ours.token_ids, theirs.token_ids)
    return Proof(identical, sum(len(ours.token_ids) for ours in results), fork)


def _judge(
    plain: Engine, row: int, index: int, prompt: list[int], params: SamplingParams, ours: list[int], theirs: list[int]
) -> Fork:
    if index == min(len(ours), len(theirs)):  # one of them has no token here
        return Fork(row, index, float("inf"), float("inf"))
    text = prompt + ours[:index]
    return Fork(row, index, *plain.margin(row, text, len(prompt), params, ours[index], theirs[index]))


def verdict(proof: Proof, dtype: str) -> str:
    """The proof in one line."""
    if proof.fork is None:
        return f"identical {proof.identical}/{proof.total}"
    row, index, margin, ulps = proof.fork
    tie = is_rounding_tie(margin, ulps)
    meaning = "near-tie: rounding" if tie else "NOT a rounding tie: this is a bug"
    where = f"fork at token {index} of row {row}, {proof.identical}/{proof.total} identical"
    return f"{where}: logit margin {margin:.3g}, {ulps:.1f} ulp in {dtype} ({meaning})"


def holds(proof: Proof) -> bool:
    """Whether the promise holds: no fork, or a rounding tie."""
    return proof.fork is None or is_rounding_tie(proof.fork.margin, proof.fork.ulps)
