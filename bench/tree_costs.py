"""What the parts of a decoding step take on this machine, by their size: verification, draft levels, extending the draft
cache, dynamic drafting. `Costs` adds them up for any tree, so that trees can be compared without running each of them.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

import sampling
from bench.measure import timed_in_turn
from bench.timing import captured
from drafters.base import PlainDrafter
from eagle_draft import EagleDrafter, EagleHead, eagle_drafter
from engine import Engine
from sampling import SamplingParams
from step import decode_step, draft_input
from tree import DynamicTree, StaticTree, tree_tables
from tree import chain as tree_chain

TOPKS = (2, 4, 8)
WIDTHS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128)
LEVEL_WIDTHS = (1, 2, 4, 8, 16)
LEVEL_DEPTH = 4  # levels are timed on trees of this depth, which have 3 levels after the extension
Call = Callable[[], Any]


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a step by size, with straight lines between the measured sizes.

    A step with a static tree takes extend(D) + its levels + verify(N). With a dynamic tree it takes extend(D) + the first
    level + (depth - 1) further levels + verify(N).
    """

    verify: Mapping[int, float]  # by nodes
    extend: Mapping[int, float]  # by depth D: D + 1 rows into the draft cache, and the root's children
    level: Mapping[int, float]  # by rows of the level
    dynamic: Mapping[int, tuple[float, float]] = field(default_factory=dict)  # by topk: first, further level

    def step(self, tree: StaticTree | DynamicTree) -> float:
        """Seconds of one step with the tree."""
        fixed = interpolate(self.extend, tree.D) + interpolate(self.verify, tree.N)
        if isinstance(tree, DynamicTree):
            first, further = self.dynamic[tree.topk]
            return fixed + first + (tree.depth - 1) * further
        return fixed + sum(interpolate(self.level, len(rows)) for rows in tree.levels)


def interpolate(points: Mapping[int, float], x: float) -> float:
    """The curve through the points at x: constant before the first point, no falling slope after the last."""
    known = sorted(points)
    values = [points[k] for k in known]
    if x <= known[-1] or len(known) == 1:
        return float(np.interp(x, known, values))
    slope = (values[-1] - values[-2]) / (known[-1] - known[-2])
    return values[-1] + max(slope, 0.0) * (x - known[-1])


def chains(width: int, depth: int) -> StaticTree:
    """`width` chains side by side: every level has that many rows."""
    return StaticTree(tuple((r, *[0] * d) for r in range(width) for d in range(depth)))


def tree_drafter(head: EagleHead, tree: StaticTree | DynamicTree, ctx: int) -> EagleDrafter:
    built = tree if isinstance(tree, DynamicTree) else tree_tables([tree], head.target.device)
    return eagle_drafter(head, built, 1, ctx + tree.N + 1)


def tree_engine(base: Engine, head: EagleHead, tree: StaticTree | DynamicTree | None) -> Engine:
    """An Engine with the tree on the weights of `base`; None is plain decoding."""
    drafter = tree_drafter(head, tree, base.ctx) if tree is not None else None
    return base.sibling(drafter, replace(base.config, batch_size=1, eagle_always=True))


@torch.inference_mode()
def measure_costs(
    base: Engine, head: EagleHead, prompt: list[int], params: SamplingParams, max_nodes: int, max_depth: int,
    rounds: int = 9, topks: Sequence[int] = TOPKS,
) -> Costs:  # fmt: skip
    """Costs at the context of `prompt` and with the code of its sampling mode, as medians of `rounds` timings.

    A part that is a difference of two timings is the median of paired differences. All parts run on the state of a
    request that has finished, so they change nothing.
    """
    device, mode = base.model.device, params.mode
    probe = tree_engine(base, head, tree_chain(max_depth))
    with base.backend.active():
        probe.generate(prompt, replace(params, max_new_tokens=2)).run()
    state = probe.state
    state.done.fill_(True)
    state.count.fill_(1)
    noise = None
    if mode.sample:
        positions = state.n[:, None] + 1 + torch.arange(max_depth + 1, device=device)
        noise = sampling.gumbel_noise(state.sampling.seed, positions, state.hashes, hashed=True)

    def drafting(tree: StaticTree | DynamicTree, depth: int) -> Call:
        """One draft of the tree that extends the draft cache by `depth` + 1 rows."""
        rows = depth + 1
        inputs = draft_input(state, mode, None if noise is None else noise[:, :rows], base.parts)
        return partial(tree_drafter(head, tree, base.ctx).draft, inputs._replace(features=state.features[:, :rows]))

    def verifying(width: int) -> Call:
        """A step whose tree has `width` nodes and costs nothing to draft."""
        drafter = PlainDrafter(base.model, width, features_of=probe.drafter)
        drafter.D = max_depth
        return partial(decode_step, base.model, drafter, state, mode, parts=base.parts)

    widths = sorted({w for w in (*WIDTHS, 26) if w < max_nodes} | {max_nodes})
    depths = sorted({1, 2, LEVEL_DEPTH, max_depth})
    fan = StaticTree(tuple((r,) for r in range(4)))
    calls: dict[Any, Call] = {("verify", w): verifying(w) for w in widths}
    calls |= {("extend", d): drafting(fan, d) for d in depths}
    calls |= {("level", w): drafting(chains(w, LEVEL_DEPTH), LEVEL_DEPTH) for w in LEVEL_WIDTHS}
    for K, depth in itertools.product(topks, (1, 3)):
        tree = DynamicTree(min(16, DynamicTree(2, depth, K).pool + 1), depth, K)
        calls["dynamic", K, depth] = drafting(tree, tree.D)
    with base.backend.active():
        times = timed_in_turn({name: captured(call, device) for name, call in calls.items()}, rounds, device)

    def less(a: Any, b: Any, parts: int = 1) -> float:  # no part takes less than nothing
        return max(statistics.median((x - y) / parts for x, y in zip(times[a], times[b], strict=True)), 1e-9)

    return Costs(
        {w: statistics.median(times["verify", w]) for w in widths},
        {d: statistics.median(times["extend", d]) for d in depths},
        {w: less(("level", w), ("extend", LEVEL_DEPTH), LEVEL_DEPTH - 1) for w in LEVEL_WIDTHS},
        {K: (less(("dynamic", K, 1), ("extend", 2)), less(("dynamic", K, 3), ("dynamic", K, 1), 2)) for K in topks},
    )
