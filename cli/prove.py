"""`--prove`: replay a request without the drafter and judge the first difference."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import nn

from decoding.params import SamplingParams, per_row
from engine.engine import Engine
from engine.results import GenerationResult
from model import Experts
from weights.quantized import QuantLinear

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
    bitwise: bool = False  # whether no fork may be excused
    same_width: int | None = None  # after a fork: what a replay repeats whose forwards are as wide as the tree


def is_bitwise(engine: Engine) -> bool:
    """Whether a row has the same bits in a forward of any width: all operations that ran are the kernels'.

    On a GPU every matrix must be packed for them.
    """
    model, backend = engine.model, engine.backend
    if backend.declined:
        return False
    if backend.mode == "cpu":
        return True
    if model.device.type != "cuda" or engine.compiled or any(kind != "triton" for kind, _ in backend.table.values()):
        return False
    kinds = QuantLinear | nn.Linear
    linears = [m for m in model.modules() if isinstance(m, kinds) or (isinstance(m, Experts) and not m.is_packed)]
    packed = all(isinstance(m, QuantLinear) and m.packed and m.packed.layout == "planes" for m in linears)
    return packed and model.lm_head is not None


def is_rounding_tie(margin: float, ulps: float) -> bool:
    """Whether two tokens are so close that the rounding of forwards of other widths may swap them.

    This is the one rule for forks where forwards of other widths round differently (`is_bitwise`): the keys differ by
    less than 1e-4, or by at most 2 units of the last place of the larger logit in the model's dtype.
    """
    return margin < TIE_MARGIN or ulps <= TIE_ULPS


def find_fork(
    plain: Engine, row: int, prompt: list[int], params: SamplingParams, ours: list[int], theirs: list[int]
) -> Fork | None:
    """The first difference between two continuations of a prompt, judged by plain decoding. None if they are equal.

    Where one of them has ended, the margin is infinite.
    """
    if ours == theirs:
        return None
    pairs = enumerate(zip(ours, theirs, strict=False))
    index = next((i for i, (a, b) in pairs if a != b), None)
    if index is None:
        return Fork(row, min(len(ours), len(theirs)), math.inf, math.inf)
    text = [*prompt, *ours[:index]]
    return Fork(row, index, *plain.margin(text, len(prompt), per_row(params, row + 1)[row], ours[index], theirs[index]))


def prove(engine: Engine, prompts: list[list[int]], params: SamplingParams, results: list[GenerationResult]) -> Proof:
    """Replay `results` by plain decoding as a user gets it: in forwards of one row, with a graph of their own.

    Equality is bitwise with the kernels (`is_bitwise`). With the reference, forwards of other widths round differently,
    so tokens that are nearly tied can swap. After a fork a second replay has forwards as wide as the tree, one live node
    and the rest padding. If that one is identical, the fork comes from the width.
    """
    found = _replay(engine, 1, prompts, params, results)
    if found.fork is None or engine.drafter.N == 1:
        return found
    return found._replace(same_width=_replay(engine, engine.drafter.N, prompts, params, results).identical)


def _replay(
    engine: Engine, width: int, prompts: list[list[int]], params: SamplingParams, results: list[GenerationResult]
) -> Proof:
    """`prove` by plain decoding in forwards of so many rows."""
    plain = engine.twin(width)
    replayed = plain.generate_batch(prompts, params).run()
    pairs = enumerate(zip(results, replayed, strict=True))
    forks = [find_fork(plain, b, prompts[b], params, ours.token_ids, theirs.token_ids) for b, (ours, theirs) in pairs]
    lengths = [len(ours.token_ids) for ours in results]
    identical = sum(fork.index if fork else length for fork, length in zip(forks, lengths, strict=True))
    return Proof(identical, sum(lengths), next(filter(None, forks), None), is_bitwise(engine))


def verdict(proof: Proof, dtype: str) -> str:
    """The proof in one line, and after a fork what a replay of the tree's width says in a second one."""
    if proof.fork is None:
        return f"identical {proof.identical}/{proof.total}" + (" (bitwise)" if proof.bitwise else "")
    row, index, margin, ulps = proof.fork
    meaning = "near-tie: rounding" if holds(proof) else "NOT a rounding tie: this is a bug"
    where = f"fork at token {index} of row {row}, {proof.identical}/{proof.total} identical"
    line = f"{where}: logit margin {margin:.3g}, {ulps:.1f} ulp in {dtype} ({meaning})"
    if proof.same_width is None:
        return line
    return f"{line}\nin forwards as wide as the tree: {proof.same_width}/{proof.total} identical"


def holds(proof: Proof) -> bool:
    """Whether the tokens are the same, or differ only where rounding may swap two nearly tied tokens."""
    return proof.fork is None or (not proof.bitwise and is_rounding_tie(proof.fork.margin, proof.fork.ulps))
