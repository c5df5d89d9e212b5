"""Which draft tree decodes fastest: acceptance counted on an instrumented tree, and the best tree by dynamic programming.

The counts give the chance that the target takes child r of an accepted node, by depth and rank. With the costs of a step
(bench/tree_costs.py) that predicts the tokens per second of any tree. Nothing is timed here.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.tree_costs import TOPKS, WIDTHS, Costs, interpolate, tree_engine
from eagle_draft import EagleHead
from engine import Engine
from sampling import SamplingParams
from step import Observer, StepOutput
from support.errors import BadFileError
from support.files import read_json
from support.reader import check
from tree import MAX_NODES, DynamicTree, StaticTree

SHRINK = 8.0  # a rank's chance at a depth counts this many trials of the same rank one level above
CANDIDATES = 64  # solutions of the dynamic program that are scored again with every level's own width
Tree = StaticTree | DynamicTree


# ---- acceptance


def wide_tree(depth: int, ranks: int, nodes: int) -> StaticTree:
    """The instrumented tree. Every inner node has `ranks` children, and the likeliest paths go on as `nodes` rows allow.

    The likelier a path, the lower its price, which is the product of its ranks counted from 1. Raises ValueError if not
    even one chain fits.
    """
    best: StaticTree | None = None
    for price in range(1, ranks + 1):
        paths, inner = [], [()]
        for _ in range(depth):
            level = [(*path, r) for path in inner for r in range(ranks)]
            paths += level
            inner = [path for path in level if math.prod(r + 1 for r in path) <= price]
        if len(paths) >= min(nodes, MAX_NODES):
            break
        best = StaticTree(tuple(paths))
    if best is None:
        raise ValueError(f"depth {depth} x {ranks} ranks needs more than {nodes} nodes; lower --max-depth.")
    return best


class RankStatistics(Observer):
    """An engine observer that counts what the target takes on a static tree, in batch row 0.

    Both tables are indexed [depth][rank], and depth 0 is the root's children. `trials` counts how often an accepted node
    had a child of the rank, `hits` how often that child was accepted.
    """

    def __init__(self, tree: StaticTree):
        self.tree = tree
        self.steps = 0
        self.children = Counter(tree.parent[1:])
        self.trials, self.hits = ([[0] * tree.max_children for _ in range(tree.D)] for _ in range(2))

    def step(self, output: StepOutput) -> None:
        path = output.path[0, : output.count[0]].tolist()  # empty in a sequence that has finished
        self.steps += bool(path)
        for depth, node in enumerate(path):
            for rank in range(self.children[node]):
                self.trials[depth][rank] += 1
        for depth, node in enumerate(path[1:]):
            self.hits[depth][self.tree.rank[node]] += 1


class DynamicStatistics(Observer):
    """An engine observer on one large dynamic tree that counts tokens per step of every smaller one with its topk.

    A tree of n nodes and depth d is the best n - 1 of the nodes not deeper than d + 1, with ties to the lower node. The
    target's walk through it is the part of the recorded walk that lies inside. The smaller tree's own steps would begin
    at other places in the text, so the result is an estimate of its tau.
    """

    def __init__(self, tree: DynamicTree, sizes: Sequence[int], depths: Sequence[int]):
        self.tree = tree
        self.shapes = [(N, d) for d in depths for N in sizes if d <= tree.depth and N <= tree.N]
        self.steps = 0
        self.tokens = dict.fromkeys(self.shapes, 0)

    def step(self, output: StepOutput) -> None:
        if not output.count[0]:
            return
        self.steps += 1
        accepted = set(output.path[0, 1 : output.count[0]].tolist())
        depth, scores, valid = (t[0].tolist() for t in (output.draft.depth, output.draft.scores, output.draft.valid))
        order = sorted((i for i in range(1, len(depth)) if valid[i]), key=lambda i: (-scores[i], i))
        for N, d in self.shapes:
            kept = [node for node in order if depth[node] <= d + 1][: N - 1]
            self.tokens[N, d] += 1 + len(accepted.intersection(kept))

    def table(self) -> list[dict[str, Any]]:
        """One entry per dynamic tree that topk's pool can fill: {"dynamic": [N, depth, topk], "tau": ...}."""
        K, steps = self.tree.topk, max(self.steps, 1)
        fits = [(N, d) for N, d in self.shapes if N - 1 <= K + d * K**2]
        return [{"dynamic": [N, d, K], "tau": self.tokens[N, d] / steps} for N, d in fits]


@dataclass
class Acceptance:
    """What the runs at one temperature counted. See RankStatistics and DynamicStatistics.table."""

    temperature: float
    trials: list[list[int]]
    hits: list[list[int]]
    dynamic: list[dict[str, Any]]

    def probability(self) -> Tensor:
        """The chance that the target takes child r of an accepted node at depth d, float64 [D, K].

        Where trials are few, the chance leans on that of the same rank one level above.
        """
        trials, hits = (torch.tensor(table, dtype=torch.float64) for table in (self.trials, self.hits))
        rows = [hits[0] / trials[0].clamp(min=1)]
        for tried, hit in zip(trials[1:], hits[1:], strict=True):
            rows.append((hit + SHRINK * rows[-1]) / (tried + SHRINK))
        return torch.stack(rows)

    def tau(self, tree: Tree) -> float:
        """Expected tokens per step; 0 for a dynamic tree that was not looked at."""
        if isinstance(tree, StaticTree):
            return expected_tokens(tree, self.probability())
        shape = [tree.N, tree.depth, tree.topk]
        return next((e["tau"] for e in self.dynamic if e["dynamic"] == shape), 0.0)


def pooled(parts: Sequence[Acceptance]) -> Acceptance:
    """All temperatures as one: the sum of their counts, and the mean tau of each dynamic tree."""
    trials, hits = torch.tensor([(p.trials, p.hits) for p in parts]).sum(0).tolist()
    shapes = [e["dynamic"] for e in parts[0].dynamic]
    taus = [{"dynamic": s, "tau": statistics.mean(p.tau(DynamicTree(*s)) for p in parts)} for s in shapes]
    return Acceptance(-1.0, trials, hits, taus)


def read_statistics(path: str | Path) -> list[Acceptance]:
    """The "statistics" of a file that scripts.tune_tree wrote. Raises BadFileError for anything else."""
    item = {"temperature": float, "trials": list, "hits": list, "dynamic": [{"dynamic": [int], "tau": float}], "*": ()}
    try:
        found = check(read_json(path), {"statistics": [item]}, path)["statistics"]
        found = [Acceptance(**item) for item in found]
        if not found:
            raise ValueError("it must hold at least one temperature")
        counts = np.array([(a.trials, a.hits) for a in found])  # raises ValueError if the tables have several shapes
        if counts.ndim != 4 or counts.dtype.kind != "i" or (counts < 0).any() or (counts[:, 1] > counts[:, 0]).any():
            raise ValueError("trials and hits must be counts, hits <= trials")
        for entry in (entry for a in found for entry in a.dynamic):
            if not 1 <= entry["tau"] <= DynamicTree(*entry["dynamic"]).D + 1:
                raise ValueError(f"tau {entry['tau']!r:.20} of a dynamic tree is impossible")
        return found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"no statistics of this program ({type(error).__name__}: {error})"
        raise BadFileError(f"--stats {path}: {why}; run without --stats to measure them.") from None


def collect(
    base: Engine, head: EagleHead, prompts: Sequence[list[int]], params: SamplingParams, max_nodes: int,
    max_depth: int, topks: Sequence[int] = TOPKS,
) -> Acceptance:  # fmt: skip
    """Acceptance at the temperature of `params`: one run over the prompts with the wide static tree, one per topk."""
    static = RankStatistics(wide_tree(max_depth, 8, min(8 * max(max_nodes, max_depth + 1), MAX_NODES)))
    sizes = [N for N in WIDTHS if 4 <= N <= max_nodes]
    dynamic = []
    for K in topks:
        pool = DynamicTree(2, max_depth - 1, K).pool
        tree = DynamicTree(min(pool + 1, 2 * max_nodes, MAX_NODES), max_depth - 1, K)
        dynamic.append(DynamicStatistics(tree, sizes, range(1, max_depth)))
    for observer in (static, *dynamic):
        engine = tree_engine(base, head, observer.tree)
        engine.add_observer(observer)
        for prompt in prompts:
            engine.generate(prompt, params).run()
    entries = [entry for observer in dynamic for entry in observer.table()]
    return Acceptance(params.temperature, static.trials, static.hits, entries)


# ---- the best tree


def expected_tokens(tree: StaticTree, probability: Tensor) -> float:
    """Expected tokens per step: the sum over nodes of the product of probability [D, K] along their paths.

    The root counts 1. The probability beyond the table is 0.
    """
    D, K = probability.shape
    p = probability.tolist()
    known = [path for path in tree.paths if len(path) <= D and max(path) < K]
    return sum((math.prod(p[d][r] for d, r in enumerate(path)) for path in known), start=1.0)


def _max_plus(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """out[n, m] = max over (i, j) of a[i, j] + b[n - i, m - j], and the flat index of the best (i, j).

    All tensors have the shape [N + 1, M + 1].
    """
    rows, columns = a.shape
    windows = F.pad(b, (columns - 1, 0), value=-math.inf).unfold(1, columns, 1)  # [n - i, m, columns - 1 - j]
    best = torch.full_like(a, -math.inf)
    at = torch.zeros(a.shape, dtype=torch.int64)
    for i, usable in enumerate(a.isfinite().any(1).tolist()):
        if usable:  # one i at a time stays in the processor's cache
            value, j = (windows[: rows - i] + a[i].flip(0)).max(-1)
            at[i:] = torch.where(value > best[i:], (i + 1) * columns - 1 - j, at[i:])
            best[i:] = torch.maximum(best[i:], value)
    return best, at


class _Program:
    """The best subtrees under one depth limit D, by dynamic programming from the leaves to the root.

    `best[n, m]` is the greatest expected number of accepted nodes of a tree of n nodes of which m, besides the root, have
    children. A node with children is drafted from, so it is a row of a draft level. `rest[d][r]` is the same for the
    children of ranks r, r + 1, ... of a node at depth d below an accepted path, with the argmax of each entry.
    """

    def __init__(self, probability: Tensor, D: int, nodes: int, rows: int):
        self.columns, K = rows + 1, probability.shape[1]
        nothing = torch.full((nodes + 1, rows + 1), -math.inf, dtype=torch.float64)
        nothing[0, 0] = 0.0
        leaf = torch.full_like(nothing, -math.inf)
        leaf[1, 0] = 1.0
        self.rest: list[list[tuple[Tensor, Tensor | None]]] = [[] for _ in range(D)]
        best = leaf
        for d in reversed(range(D)):
            chain: list[tuple[Tensor, Tensor | None]] = [(nothing, None)]
            for r in reversed(range(K)):
                taken = torch.where(best.isinf(), best, probability[d, r] * best)
                value, at = _max_plus(taken, chain[0][0])
                value[0, 0] = 0.0  # no child of rank r: the list of children ends
                chain.insert(0, (value, at))
            self.rest[d] = chain
            best = leaf.clone()
            below = chain[0][0][1:-1, :-1] if d else chain[0][0][1:-1]  # the root's row is the extension's
            best[2:, 1 if d else 0 :] = 1.0 + below
        self.best = best  # of the root

    def tree(self, n: int, m: int) -> StaticTree:
        """The tree behind best[n, m] of the root."""
        paths: list[tuple[int, ...]] = []
        todo = [((), 0, 0, n - 1, m)] if n > 1 else []
        while todo:
            above, d, r, n, m = todo.pop()
            i, j = divmod(int(self.rest[d][r][1][n, m]), self.columns)
            paths.append((*above, r))
            if n - i:
                todo.append((above, d, r + 1, n - i, m - j))
            if i > 1:
                todo.append(((*above, r), d + 1, 0, i - 1, j - 1))
        return StaticTree(tuple(paths))


def best_static(
    probability: Tensor, costs: Costs, max_nodes: int, max_rows: int | None = None
) -> tuple[StaticTree, float]:
    """The static tree with the most expected tokens per second, and that rate.

    probability [D, K]: the chance of child rank r of an accepted node at depth d, independent of the rest of the path.
    For every depth limit, node count and number of drafted rows the program finds the tree with the most expected tokens.
    `verify` and `extend` then give its rate without further assumptions. The time of its levels is estimated from their
    mean width, and the best CANDIDATES are scored again with every level's own width. The result is exact where level
    time is linear in the width, among trees that draft from at most max_rows nodes below the root (default: half of
    max_nodes, 24 at most).
    """
    rows = min(max_nodes // 2, 24) if max_rows is None else max_rows
    found: list[tuple[float, int, int, int]] = []
    programs: dict[int, _Program] = {}
    for D in range(1, min(probability.shape[0], max_nodes - 1) + 1):
        programs[D] = _Program(probability, D, max_nodes, rows)
        extend, tau = interpolate(costs.extend, D), programs[D].best.tolist()
        levels = [(D - 1) * interpolate(costs.level, m / (D - 1)) if D > 1 else 0.0 for m in range(rows + 1)]
        for n in range(2, max_nodes + 1):
            fixed = extend + interpolate(costs.verify, n)
            found += [(tau[n][m] / (fixed + levels[m]), D, n, m) for m in range(rows + 1) if tau[n][m] > 0]
    found.sort(reverse=True)
    solutions = {programs[D].tree(n, m) for _, D, n, m in found[:CANDIDATES]}
    rated = [(expected_tokens(t, probability) / costs.step(t), -t.N, t.paths, t) for t in solutions]
    rate, _, _, tree = max(rated)
    return tree, rate


def best_dynamic(
    parts: Sequence[Acceptance], costs: Sequence[Costs], max_nodes: int
) -> tuple[DynamicTree, float] | None:
    """The dynamic tree with the most tokens per second over all temperatures (harmonic mean), and that rate.

    Considered are the trees that were looked at and have at most `max_nodes` nodes. None if there is none.
    """
    shapes = [DynamicTree(*e["dynamic"]) for e in parts[0].dynamic]
    usable = [t for t in shapes if t.N <= max_nodes and all(t.topk in c.dynamic for c in costs)]
    best = max(usable, key=lambda t: (mean_rate(t, parts, costs), -t.N, -t.depth, t.topk), default=None)
    return best and (best, mean_rate(best, parts, costs))


def mean_rate(tree: Tree, parts: Sequence[Acceptance], costs: Sequence[Costs]) -> float:
    """Tokens per second that the model predicts for equally many tokens at every temperature."""
    taus = [a.tau(tree) for a in parts]
    if not all(taus):
        return 0.0
    return len(parts) / sum(c.step(tree) / tau for c, tau in zip(costs, taus, strict=True))


def finalists(parts: Sequence[Acceptance], costs: Sequence[Costs], max_nodes: int) -> dict[str, Tree]:
    """The best static tree per temperature and for all of them, and the best dynamic tree; without repetitions."""
    everything = [(f"static T={a.temperature:g}", a, c) for a, c in zip(parts, costs, strict=True)]
    if len(parts) > 1:
        tables = zip(*((c.verify, c.extend, c.level) for c in costs), strict=True)
        means = ({k: statistics.mean(t[k] for t in table) for k in table[0]} for table in tables)
        everything.append(("static all T", pooled(parts), Costs(*means)))
    chosen: dict[str, Tree] = {}
    for name, a, c in everything:
        tree, _ = best_static(a.probability(), c, max_nodes)
        if tree not in chosen.values():
            chosen[name] = tree
    if dynamic := best_dynamic(parts, costs, max_nodes):
        chosen["dynamic"] = dynamic[0]
    return chosen
