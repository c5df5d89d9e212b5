"""TODO."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

import sampling
from bench.measure import timed_in_turn
from drafters.base import Draft, DraftInput
from eagle_draft import EagleDrafter, EagleHead
from engine import Engine
from runtime.compiled import CompiledStep
from sampling import SamplingParams
from step import accept_and_commit, decode_step
from tree import DynamicTree, StaticTree, tree_tables
from tree import chain as tree_chain

SHRINK = 8.0  # a rank's chance at a depth counts this many trials of the same rank one level above


TOPKS = (2, 4, 8)


WIDTHS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128)


LEVEL_WIDTHS = (1, 2, 4, 8, 16)


LEVEL_DEPTH = 4  # levels are timed on trees of this depth: 3 levels less the extension


@dataclass(frozen=True)
class Costs:
    """Seconds of a step's parts, by size; between measured sizes on straight lines. Static tree: extend(D) + the levels
    + verify(N); dynamic: extend(D) + first + (depth - 1) further levels + verify(N)."""

    verify: Mapping[int, float]  # by nodes
    extend: Mapping[int, float]  # by depth D: D + 1 rows into the draft cache, and the root's children
    level: Mapping[int, float]  # by rows of the level
    dynamic: Mapping[int, tuple[float, float]] = field(
        default_factory=dict
    )  # by topk: (first, further level)

    def step(self, tree: StaticTree | DynamicTree) -> float:
        """Seconds of one step with the tree."""
        fixed = interpolate(self.extend, tree.D) + interpolate(self.verify, tree.N)
        if isinstance(tree, DynamicTree):
            first, further = self.dynamic[tree.topk]
            return fixed + first + (tree.depth - 1) * further
        return fixed + sum(interpolate(self.level, len(rows)) for rows in tree.levels)

    def to_dict(self) -> dict[str, Any]:
        return {name: {str(k): v for k, v in getattr(self, name).items()} for name in self.__annotations__}


def interpolate(points: Mapping[int, float], x: float) -> float:
    """The curve through the points at x; constant before the first, the last (rising) slope after the last."""
    if x in points:
        return points[x]
    known = sorted(points)
    if x < known[0] or len(known) == 1:
        return points[known[0]]
    right = next((k for k in known if k > x), known[-1])
    left = known[known.index(right) - 1]
    slope = (points[right] - points[left]) / (right - left)
    return points[left] + slope * (x - left) if x < right else points[right] + max(slope, 0) * (x - right)


class StillDrafter:
    """`width` nodes that always look the same, for timing verification alone. D and features are the real drafter's."""

    multi_round = ""

    def __init__(self, like: EagleDrafter, width: int, device: torch.device):
        self.N, self.D, self.taps, self.feature_size = width, like.D, like.taps, like.feature_size
        star = StaticTree(tuple((r,) for r in range(width - 1)))
        self.tables = tree_tables([star], device)

    def draft(self, request: DraftInput) -> Draft:
        t = self.tables
        tokens = request.root[:, None].expand(-1, self.N)
        return Draft(tokens, t.parent, t.depth, t.ancestors, t.valid, torch.zeros_like(tokens).float())


def chains(width: int, depth: int) -> StaticTree:
    """`width` chains side by side: every level has that many rows."""
    return StaticTree(tuple((r, *[0] * d) for r in range(width) for d in range(depth)))


def tree_engine(base: Engine, head: EagleHead, tree: StaticTree | DynamicTree | None, ctx: int) -> Engine:
    """An Engine with the tree on the weights of `base`; None is plain decoding."""
    drafter = eagle_drafter(head, tree, ctx) if tree is not None else None
    kind = {"compile_mode": base.compile_mode, "kv_dtype": base.kv_dtype}
    return Engine(base.model, base.tokenizer, drafter, 1, ctx, base.compiled, base.backend, **kind)


def eagle_drafter(head: EagleHead, tree: StaticTree | DynamicTree, ctx: int) -> EagleDrafter:
    built = tree if isinstance(tree, DynamicTree) else tree_tables([tree], head.target.device)
    return EagleDrafter(head, built, 1, ctx + tree.N + 1)


def _replayable(call: Callable[[], Any], cuda: bool) -> Callable[[], Any]:
    """On a GPU the step is one CUDA graph, so its parts are timed as graphs; on a CPU the call itself."""
    if not cuda:
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@torch.inference_mode()
def measure_costs(
    base: Engine,
    head: EagleHead,
    prompt: list[int],
    params: SamplingParams,
    ctx: int,
    max_nodes: int,
    max_depth: int,
    rounds: int = 9,
    topks: Sequence[int] = TOPKS,
) -> Costs:
    """Costs at the context of `prompt`, with the code that the sampling mode runs. Steps are timed on the state of a
    request that has finished, so they change nothing. Parts that are differences are medians of paired differences."""
    model, device = base.model, base.model.device
    probe = tree_engine(base, head, tree_chain(max_depth), ctx)
    with probe.backend.active():
        probe.generate(prompt, replace(params, max_new_tokens=2)).run()
    state, V, D = probe.state, model.config.vocab_size, max_depth
    state.done.fill_(True)
    state.count.fill_(1)
    noise = None
    if params.mode.sample:
        level, ids = torch.arange(D + 1, device=device), torch.arange(V, device=device)
        noise = sampling.gumbel_noise(state.sampling.seed, state.n[:, None] + 1 + level, ids)

    def request(depth: int) -> DraftInput:
        cut = None if noise is None else noise[:, : depth + 1]
        given = (state.tokens, state.n, state.root, state.features[:, : depth + 1], state.count, cut)
        return DraftInput(*given, state.sampling, params.mode, state.seen, state.counts)

    def drafting(tree: StaticTree | DynamicTree, depth: int) -> Callable[[], Any]:
        drafter, given = eagle_drafter(head, tree, ctx), request(depth)
        if base.compiled:
            return partial(
                CompiledStep(model, drafter, decode_step, accept_and_commit).call, drafter.draft, given
            )
        return lambda: drafter.draft(given)

    def verifying(width: int) -> Callable[[], Any]:
        drafter = StillDrafter(probe.drafter, width, device)
        run = (
            CompiledStep(model, drafter, decode_step, accept_and_commit).step
            if base.compiled
            else decode_step
        )
        return lambda: run(model, drafter, state, params.mode)

    widths = sorted({w for w in (*WIDTHS, 26) if w < max_nodes} | {max_nodes})
    depths = sorted({1, 2, LEVEL_DEPTH, max_depth})
    fan = StaticTree(tuple((r,) for r in range(4)))
    calls: dict[Any, Callable[[], Any]] = {("verify", w): verifying(w) for w in widths}
    calls |= {("extend", d): drafting(fan, d) for d in depths if d <= D}
    calls |= {("level", w): drafting(chains(w, LEVEL_DEPTH), LEVEL_DEPTH) for w in LEVEL_WIDTHS}
    for K in topks:
        for depth in (1, 3):
            N = min(16, DynamicTree(2, depth, K).pool + 1)
            calls["dynamic", K, depth] = drafting(DynamicTree(N, depth, K), depth + 1)
    with base.backend.active():
        calls = {name: _replayable(call, device.type == "cuda") for name, call in calls.items()}
        times = timed_in_turn(calls, rounds, device)

    def less(a: Any, b: Any, parts: int = 1) -> float:  # a part cannot take less than nothing
        return max(statistics.median((x - y) / parts for x, y in zip(times[a], times[b], strict=True)), 1e-9)

    middle = {name: statistics.median(values) for name, values in times.items()}
    return Costs(
        {w: middle["verify", w] for w in widths},
        {d: middle["extend", d] for d in depths},
        {w: less(("level", w), ("extend", LEVEL_DEPTH), LEVEL_DEPTH - 1) for w in LEVEL_WIDTHS},
        {
            K: (
                less(("dynamic", K, 1), ("extend", 2)),
                less(("dynamic", K, 3), ("dynamic", K, 1), 2),
            )
            for K in topks
        },
    )
