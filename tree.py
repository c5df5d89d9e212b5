"""Draft trees: their shapes, names, files, and the tables for a batch. All of this runs on the host.

A tree has N nodes. Node 0 is the root (the last committed token), and every other node has a parent with a lower number.
D is the greatest depth below the root, so a step emits 1 to D + 1 tokens. Plain decoding is the tree with one node.

Shape letters: B batch, N nodes, K children per node, W rows of a draft level, R draft rows so far. Ids are int64.
Code that a compiled step traces does not belong here (see kernels/growing.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from kernels.growing import ancestors_from_parents
from kernels.records import Level
from support.files import read_bytes
from support.reader import parse_json, refusal

MAX_NODES = 256
MAX_DEPTH = 16
MAX_TOPK = 64
MAX_FILE_BYTES = 1 << 20


@dataclass(unsafe_hash=True)
class StaticTree:
    """A fixed tree, given by the paths of its nodes below the root.

    A path lists child ranks from 0, so `(2, 0)` is the first child of the root's third child. Every prefix of a path
    must be a path too, and ranks must be contiguous; otherwise a ValueError names the path. Sorted by length and then
    lexicographically, path number i is node i + 1.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        nodes = ((), *_checked_paths(self.paths))
        index = {path: i for i, path in enumerate(nodes)}
        self.paths = nodes[1:]
        self.N = len(nodes)  # with the root, which is the number of rows of the verifying forward
        self.parent = tuple(index[path[:-1]] for path in nodes)  # per node; the root is its own parent
        self.depth = tuple(len(path) for path in nodes)
        self.D = D = self.depth[-1]  # greatest depth below the root
        self.rank = (0, *(path[-1] for path in self.paths))  # which of its parent's candidates a node takes; root 0
        # per depth 0..D-1: the most children of any node there
        self.branching = tuple(1 + max(path[-1] for path in nodes if len(path) == d) for d in range(1, D + 1))
        self.max_children = max(self.branching, default=0)
        # levels[l] lists the nodes at depth l + 1 that have children. Only these go through the drafter, one forward per
        # level. The root's own prediction comes from the forward that extends the draft cache.
        inner = sorted(set(self.parent[1:]))
        self.levels = tuple(tuple(i for i in inner if self.depth[i] == d) for d in range(1, D))


@dataclass(unsafe_hash=True)
class DynamicTree:
    """An EAGLE-2 tree, which is rebuilt in every step. The parameters are those of SafeAILab/EAGLE.

    N counts the root, `depth` is the number of expansion forwards, and `topk` is both the number of candidates per row
    and the width of the frontier. `pool` candidates are drafted and N - 1 of them are kept. Raises ValueError for numbers
    out of range.
    """

    N: int
    depth: int
    topk: int

    def __post_init__(self) -> None:
        limits = {"N": (2, MAX_NODES), "depth": (0, MAX_DEPTH - 1), "topk": (1, MAX_TOPK)}
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ValueError(f"dynamic tree: {name} is {value!r:.40}, allowed {low} to {high}")
        self.D = self.depth + 1
        self.pool = self.topk + self.depth * self.topk**2
        if self.N - 1 > self.pool:
            why = f"topk + depth * topk^2 = {self.pool} are drafted; use N <= {self.pool + 1}"
            raise ValueError(f"dynamic tree: N is {self.N}, but only {why}")


def _checked_paths(paths: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    if len(paths) >= MAX_NODES:
        raise ValueError(f"tree: {len(paths)} paths, allowed are {MAX_NODES - 1} (and the root)")
    for path in paths:
        if not isinstance(path, list | tuple) or not 1 <= len(path) <= MAX_DEPTH:
            raise ValueError(f"tree: path {path!r:.60} must be a list of 1 to {MAX_DEPTH} child ranks")
        if any(type(rank) is not int or rank < 0 for rank in path):
            raise ValueError(f"tree: path {path!r:.60} must hold integers >= 0 (0 is the first child)")
    known: set[tuple[int, ...]] = {()}
    ordered = sorted(map(tuple, paths), key=lambda path: (len(path), path))
    for path in ordered:
        above, rank = path[:-1], path[-1]
        before = above if rank == 0 or above not in known else (*above, rank - 1)
        if path in known:
            raise ValueError(f"tree: path {path!r:.60} is listed twice; remove one")
        if before not in known:
            raise ValueError(f"tree: path {path!r:.60} needs path {before!r:.60}; add it or renumber")
        known.add(path)
    return ordered


def chain(K: int) -> StaticTree:
    """The tree of K drafted tokens in a row: N = K + 1 and D = K."""
    if type(K) is not int or not 1 <= K <= MAX_DEPTH:
        raise ValueError(f"tree: chain length {K!r:.40}, allowed 1 to {MAX_DEPTH}")
    return StaticTree(tuple((0,) * n for n in range(1, K + 1)))


def counted_tree(children: str) -> StaticTree:
    """A tree from words `PATH:COUNT`, the number of children of each node. `-` is the root."""
    paths = []
    for word in children.split():
        parent, _, count = word.partition(":")
        above = () if parent == "-" else tuple(map(int, parent))
        paths += [(*above, rank) for rank in range(int(count))]
    return StaticTree(tuple(paths))


# EAGLE-1's published tree of 25 drafted nodes (called mc_sim_7b_63 there).
PAPER25 = counted_tree("-:4 0:3 1:2 2:2 3:1 00:3 01:2 02:2 10:1 000:3 0000:2")
# Two of Medusa's published trees of 63 nodes.
MEDUSA_TREES = {
    "medusa:vicuna_7b_stage2": "-:10 0:10 1:5 2:2 3:2 4:1 5:1 6:1 7:1 00:9 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 "
    "000:4 001:1 002:1 010:1",
    "medusa:mc_sim_7b_63": "-:10 0:10 1:7 2:3 3:2 4:1 5:1 6:1 7:1 8:1 9:1 00:10 01:3 02:2 03:1 04:1 05:1 06:1 07:1 10:2 "
    "20:1 000:2",
}
NAMES = f"paper25, chain:K, dynamic:N,DEPTH,TOPK, FILE.json, {', '.join(MEDUSA_TREES)}"


def parse_tree(spec: str) -> StaticTree | DynamicTree:
    """The tree with this name (see NAMES). Raises a one-line ValueError for an unknown name.

    In `dynamic:N,DEPTH,TOPK` N counts the root and DEPTH the expansions. FILE.json holds a list of paths, or an object
    with either "paths" or "dynamic": [N, DEPTH, TOPK], whose other keys are ignored.
    """
    if spec == "paper25":
        return PAPER25
    if spec in MEDUSA_TREES:
        return counted_tree(MEDUSA_TREES[spec])
    if spec.endswith(".json"):
        return _read_tree(spec)
    kind, _, rest = spec.partition(":")
    numbers = rest.split(",")
    if len(numbers) == {"chain": 1, "dynamic": 3}.get(kind) and all(map(str.isdecimal, numbers)):
        return (chain if kind == "chain" else DynamicTree)(*(int(n[:9]) for n in numbers))
    raise ValueError(f"tree: {spec!r:.60} is not one of {NAMES}")


def _read_tree(file: str) -> StaticTree | DynamicTree:
    where = f"tree file {file}"
    data = parse_json(read_bytes(file, MAX_FILE_BYTES + 1), where, MAX_FILE_BYTES)
    data = data if isinstance(data, dict) else {"paths": data}
    kinds = data.keys() & {"paths", "dynamic"}
    value = data[kinds.pop()] if len(kinds) == 1 else None
    if not isinstance(value, list) or not value or "dynamic" in data and len(value) != 3:
        raise refusal(where, 'must hold a list of paths, {"paths": [...]} or {"dynamic": [N, DEPTH, TOPK]}')
    try:
        return DynamicTree(*value) if "dynamic" in data else StaticTree(tuple(value))
    except ValueError as error:
        raise refusal(where, str(error)) from None


@dataclass(frozen=True)
class TreeTables:
    """The static trees of a batch as device tensors, padded to common sizes. `tree_tables` builds them.

    Run rows number the drafter's rows: row 0 is the root's prediction, then come the rows of each level in order. Padding
    nodes have valid False, parent 0, depth 0, and see only themselves.
    """

    N: int
    D: int
    mixed: bool  # whether the sequences have different trees
    branching: tuple[int, ...]  # per depth 0..D-1: the most children of any node there
    max_children: int
    run_rows: int
    parent: Tensor  # [B, N]
    depth: Tensor  # [B, N]
    rank: Tensor  # [B, N]
    valid: Tensor  # [B, N] bool
    ancestors: Tensor  # [B, N, N] bool, row i holds the nodes that node i sees, itself included
    children: Tensor  # [B, N, max_children], 0 = none
    source_row: Tensor  # [B, N] run row of each node's parent
    levels: tuple[Level, ...]

    def first(self, rows: int) -> TreeTables:
        """The trees of the first sequences, as views."""
        own = {name: value[:rows] for name, value in vars(self).items() if isinstance(value, Tensor)}
        levels = (Level(level.depth, *(table[:rows] for table in level[1:])) for level in self.levels)
        return replace(self, **own, levels=tuple(levels))


Trees: TypeAlias = DynamicTree | TreeTables  # of a batch: one dynamic tree for all sequences, or a static one for each


def check_width(tree: Trees, vocab_size: int) -> None:
    """Raise ValueError if a node of the tree may have more children than the drafter knows tokens."""
    widest = tree.topk if isinstance(tree, DynamicTree) else tree.max_children
    if widest > vocab_size:
        found = f"a node of the tree has up to {widest} children, and the drafter knows {vocab_size} tokens"
        raise ValueError(f"{found}; use a narrower --tree, such as chain:3, or a larger --draft-vocab.")


def tree_tables(trees: Sequence[StaticTree], device: torch.device | str = "cpu") -> TreeTables:
    """Tables for one static tree per sequence (repeat a tree to share it). Runs once, on the host."""
    N, D, K = max(t.N for t in trees), max(t.D for t in trees), max(t.max_children for t in trees)
    branching = tuple(max(t.branching[d] for t in trees if t.D > d) for d in range(D))
    by_level = list(zip(*([*t.levels, *[()] * (D - 1 - len(t.levels))] for t in trees), strict=True))
    run_row, run_rows = [{0: 0} for _ in trees], 1
    for rows in by_level:
        for known, row in zip(run_row, rows, strict=True):
            known.update((i, run_rows + w) for w, i in enumerate(row))
        run_rows += max(map(len, rows))

    def padded(rows: Iterable[Sequence[int]], width: int) -> Tensor:
        return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.int64)

    with torch.device(device):
        parent, depth, rank = (padded([getattr(t, k) for t in trees], N) for k in ("parent", "depth", "rank"))
        source_row = padded(([run_row[b][i] for i in t.parent] for b, t in enumerate(trees)), N)
        valid = torch.arange(N) < torch.tensor([[t.N] for t in trees])
        ancestors = ancestors_from_parents(parent, D, valid)[0]
        children = torch.zeros(len(trees), N, K, dtype=torch.int64)
        for b, t in enumerate(trees):
            children[b, t.parent[1:], t.rank[1:]] = torch.arange(1, t.N)
        levels: list[Level] = []
        above, begin = 0, 1  # the run rows where the level above and this one begin
        for d, rows in enumerate(by_level, 1):
            W = max(map(len, rows))
            node, live = padded(rows, W), torch.arange(W) < torch.tensor([[len(row)] for row in rows])
            seen_node = torch.cat([level.node for level in levels] + [node], 1)
            seen_live = torch.cat([level.valid for level in levels] + [live], 1)
            visible = ancestors.gather(1, node[..., None].expand(-1, W, N))
            visible = visible.gather(2, seen_node[:, None].expand(-1, W, -1))
            visible &= seen_live[:, None] & live[..., None]
            visible[:, :, -W:] |= torch.eye(W, dtype=torch.bool)
            source = (source_row.gather(1, node) - above).clamp(min=0)  # padding has no parent in the level above
            levels.append(Level(d, node, live, source, source * K + rank.gather(1, node), visible))
            above, begin = begin, begin + W
    tensors = (parent, depth, rank, valid, ancestors, children, source_row)
    return TreeTables(N, D, len(set(trees)) > 1, branching, K, run_rows, *tensors, tuple(levels))
