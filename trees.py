"""Draft trees and acceptance: topology, fixed-shape dynamic building, and the two verification rules.

A tree has N nodes. Node 0 is the root (the last committed token), `parent[i] < i`, `parent[0] = 0`. D is the
greatest depth below the root, so a step emits 1 to D+1 tokens. Plain decoding is the tree with one node.

Shape letters: B batch, N nodes, D depth, K candidates per row, W rows of a draft level, R draft rows so far,
P size of the dynamic pool, V vocabulary. Ids are int64. Functions of tensors have fixed shapes, never read a
value back to the host (`tree_tables`, run once, aside) and take their randomness as arguments. The code is in this
file and not in tree.py because TorchDynamo never traces a file of that name (it takes it for the dm-tree package).
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

MAX_NODES, MAX_DEPTH, MAX_TOPK, MAX_FILE_BYTES = 256, 16, 64, 1 << 20


@dataclass(frozen=True)
class StaticTree:
    """A fixed tree given by paths of 0-based child ranks, without the root: `(2, 0)` is the first child of
    the root's third child. Paths must be prefix-closed, ranks contiguous, else a ValueError names the path.
    Sorted by length, then lexicographically, path number i is node i+1."""

    paths: tuple[tuple[int, ...], ...]
    N: int = field(init=False)  # nodes, root included = rows of the verification forward
    D: int = field(init=False)  # greatest depth below the root
    parent: tuple[int, ...] = field(init=False)  # per node; the root is its own parent
    depth: tuple[int, ...] = field(init=False)
    rank: tuple[int, ...] = field(init=False)  # which of its parent's candidates a node takes; root 0
    branching: tuple[int, ...] = field(init=False)  # per depth 0..D-1: the most children of any node there
    max_children: int = field(init=False)
    # levels[l]: the nodes at depth l+1 that have children. Only they go through the drafter, one forward per
    # level; the root's own prediction comes from the forward that extends the draft cache.
    levels: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        nodes = ((), *_checked_paths(self.paths))
        index = {path: i for i, path in enumerate(nodes)}
        parent, depth = tuple(index[path[:-1]] for path in nodes), tuple(map(len, nodes))
        inner, D = sorted(set(parent[1:])), depth[-1]
        branching = tuple(1 + max(path[-1] for path in nodes if len(path) == d) for d in range(1, D + 1))
        levels = tuple(tuple(i for i in inner if depth[i] == d) for d in range(1, D))
        derived = dict(paths=nodes[1:], N=len(nodes), D=D, parent=parent, depth=depth, levels=levels)
        derived |= dict(rank=(0, *(path[-1] for path in nodes[1:])), branching=branching)
        for name, value in (derived | dict(max_children=max(branching, default=0))).items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class DynamicTree:
    """An EAGLE-2 tree, numbers as in SafeAILab/EAGLE: N counts the root, `depth` is the number of expansion
    forwards (so D = depth + 1), `topk` is both the candidates per row and the frontier's width. `pool`
    candidates are drafted, of which N-1 are kept. Raises ValueError for numbers out of range."""

    N: int
    depth: int
    topk: int
    D = property(lambda self: self.depth + 1)
    pool = property(lambda self: self.topk + self.depth * self.topk**2)

    def __post_init__(self) -> None:
        limits = {"N": (2, MAX_NODES), "depth": (0, MAX_DEPTH - 1), "topk": (1, MAX_TOPK)}
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ValueError(f"dynamic tree: {name} is {value!r:.40}, allowed {low} to {high}")
        if self.N - 1 > self.pool:
            why = f"topk + depth * topk^2 = {self.pool} are drafted; use N <= {self.pool + 1}"
            raise ValueError(f"dynamic tree: N is {self.N}, but only {why}")


def _checked_paths(paths: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
    paths = list(paths)
    if len(paths) >= MAX_NODES:
        raise ValueError(f"tree: {len(paths)} paths, allowed are {MAX_NODES - 1} (and the root)")
    for path in paths:
        if not isinstance(path, list | tuple) or not 1 <= len(path) <= MAX_DEPTH:
            raise ValueError(f"tree: path {path!r:.60} must be a list of 1 to {MAX_DEPTH} child ranks")
        if any(type(rank) is not int or rank < 0 for rank in path):
            raise ValueError(f"tree: path {path!r:.60} must hold integers >= 0 (0 = first child)")
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
    """K drafted tokens in a row: N = K+1, D = K."""
    if type(K) is not int or not 1 <= K <= MAX_DEPTH:
        raise ValueError(f"tree: chain length {K!r:.40}, allowed 1 to {MAX_DEPTH}")
    return StaticTree(tuple((0,) * n for n in range(1, K + 1)))


def root_only() -> StaticTree:
    """The tree of plain decoding: N = 1, D = 0."""
    return StaticTree(())


# EAGLE-1's published tree of 25 drafted nodes (its name there is mc_sim_7b_63), one word per path.
_PAPER25 = "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
PAPER25 = StaticTree(tuple(tuple(map(int, word)) for word in _PAPER25.split()))


def parse_tree(spec: str) -> StaticTree | DynamicTree:
    """The tree that `spec` names: `paper25`, `chain:K`, `dynamic:N,DEPTH,TOPK` (N counts the root, DEPTH
    expansions) or FILE.json: a list of paths, or an object with either "paths" or "dynamic": [N, DEPTH, TOPK]
    (its other keys are ignored). Raises a one-line ValueError."""
    if spec == "paper25":
        return PAPER25
    if spec.endswith(".json"):
        return _read_tree(spec)
    kind, _, rest = spec.partition(":")
    numbers = rest.split(",")
    if len(numbers) == {"chain": 1, "dynamic": 3}.get(kind) and all(map(str.isdecimal, numbers)):
        return (chain if kind == "chain" else DynamicTree)(*(int(n[:9]) for n in numbers))
    raise ValueError(f"tree: {spec!r:.60} is not one of paper25, chain:K, dynamic:N,DEPTH,TOPK, FILE.json")


def _read_tree(file: str) -> StaticTree | DynamicTree:
    try:
        with open(file, "rb") as f:
            text = f.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ValueError(f"larger than {MAX_FILE_BYTES} bytes, not a tree")
        data = json.loads(text)
        data = data if isinstance(data, dict) else {"paths": data}
        kinds = data.keys() & {"paths", "dynamic"}
        value = data[kinds.pop()] if len(kinds) == 1 else None
        if not isinstance(value, list) or not value or "dynamic" in data and len(value) != 3:
            raise ValueError('must hold a list of paths, {"paths": [...]} or {"dynamic": [N, DEPTH, TOPK]}')
        return DynamicTree(*value) if "dynamic" in data else StaticTree(tuple(value))
    except OSError as error:
        raise ValueError(f"tree file {file}: {error.strerror or 'unreadable'}; check the path") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"tree file {file}: {error}") from None


class Level(NamedTuple):
    """One draft forward of a batch of static trees. Padding rows have valid False and see only themselves."""

    depth: int  # of every node in it; draft position = stable rows + depth - 1
    node: Tensor  # [B, W] tree node of each row (0 in padding)
    valid: Tensor  # [B, W] bool
    source: Tensor  # [B, W] run row of the node's parent: whose candidates and whose feature it takes
    rank: Tensor  # [B, W] which of those candidates
    visible: Tensor  # [B, W, R] bool over this and all earlier levels' rows (the root's run row is history)


@dataclass(frozen=True)
class TreeTables:
    """Static trees of a batch as device tensors, padded to common sizes; built by `tree_tables`. Run rows number the
    drafter's rows: 0 is the root's prediction, then the rows of each level in order. Padding nodes have valid False,
    parent 0, depth 0 and see only themselves."""

    N: int
    D: int
    branching: tuple[int, ...]  # per depth 0..D-1: the most children of any node there
    max_children: int
    run_rows: int
    parent: Tensor  # [B, N]
    depth: Tensor  # [B, N]
    rank: Tensor  # [B, N]
    valid: Tensor  # [B, N] bool
    ancestors: Tensor  # [B, N, N] bool, row i = the nodes that i sees, itself included
    children: Tensor  # [B, N, max_children], 0 = none
    source_row: Tensor  # [B, N] run row of each node's parent
    levels: tuple[Level, ...]

    def tokens(self, root: Tensor, candidates: Tensor) -> Tensor:
        """Tokens [B, N] from the root's [B] and the candidates [B, run_rows, max_children] of every run row:
        node i takes `candidates[b, source_row[b, i], rank[b, i]]`."""
        index = (self.source_row * self.max_children + self.rank)[:, 1:]
        return torch.cat([root[:, None], candidates.flatten(1).gather(1, index)], 1)


def tree_tables(trees: Sequence[StaticTree], device: torch.device | str = "cpu") -> TreeTables:
    """Tables for one static tree per sequence (repeat a tree to share it). Runs once, on the host."""
    if not trees:
        raise ValueError("tree: a batch needs at least one tree")
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
        for d, rows in enumerate(by_level, 1):
            W = max(map(len, rows))
            node, live = padded(rows, W), torch.arange(W) < torch.tensor([[len(row)] for row in rows])
            seen_node = torch.cat([level.node for level in levels] + [node], 1)
            seen_live = torch.cat([level.valid for level in levels] + [live], 1)
            visible = ancestors.gather(1, node[..., None].expand(-1, W, N))
            visible = visible.gather(2, seen_node[:, None].expand(-1, W, -1))
            visible &= seen_live[:, None] & live[..., None]
            visible[:, :, -W:] |= torch.eye(W, dtype=torch.bool)
            levels.append(Level(d, node, live, source_row.gather(1, node), rank.gather(1, node), visible))
    tensors = (parent, depth, rank, valid, ancestors, children, source_row)
    return TreeTables(N, D, branching, K, run_rows, *tensors, tuple(levels))


def ancestors_from_parents(parent: Tensor, D: int, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Ancestors [B, N, N] bool (each node sees itself) and depth [B, N] of trees given by parent [B, N], none
    deeper than D. Pointer doubling in ceil(log2(D+1)) steps. Nodes that are not valid [B, N] (optional) get
    depth 0 and see themselves alone (a softmax needs one key)."""
    B, N = parent.shape
    itself = torch.eye(N, dtype=torch.bool, device=parent.device)
    seen = itself.expand(B, N, N)
    for _ in range(D.bit_length()):  # step k: seen holds the nearest 2^k ancestors, parent is the 2^k-th
        seen = seen | seen.gather(1, parent[..., None].expand(B, N, N))
        parent = parent.gather(1, parent)
    if valid is not None:
        seen = (seen & valid[..., None]) | itself
    return seen, seen.sum(-1) - 1


class Pool(NamedTuple):
    """A dynamic tree's candidates so far (flat ids, parents first) and the frontier that is drafted from next."""

    tokens: Tensor  # [B, P]
    scores: Tensor  # [B, P] cumulative, fp32 or wider
    parent: Tensor  # [B, P] flat id, -1 = the root
    frontier: Tensor  # [B, K] flat ids
    frontier_tokens: Tensor  # [B, K]
    source: Tensor  # [B, K] which row of the forward before drafted each: whose feature it takes
    visible: Tensor  # [B, K, R] bool over the rows of all expansion forwards, the next one included


class DraftTree(NamedTuple):
    """A dynamic tree. Nodes with valid False are padding: parent 0, depth 0, they see only themselves."""

    tokens: Tensor  # [B, N]
    parent: Tensor  # [B, N]
    depth: Tensor  # [B, N]
    ancestors: Tensor  # [B, N, N] bool
    valid: Tensor  # [B, N] bool
    scores: Tensor  # [B, N] cumulative draft score, root 0


def _usable(scores: Tensor) -> Tensor:
    # At least fp32: in half precision confident children tie with their parents. NaN is the worst score.
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores.where(~scores.isnan(), -torch.inf)


def _best(scores: Tensor, count: int) -> Tensor:
    # Ties go to the lower id; torch.topk promises no order among them.
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def first_level(tokens: Tensor, scores: Tensor) -> Pool:
    """The pool after the root's prediction. tokens, scores [B, K]: the root's candidates and their
    log-probabilities, chosen by the caller; all of them are the first frontier."""
    B, K = tokens.shape
    ids = torch.arange(K, device=tokens.device).expand(B, K)
    visible = torch.eye(K, dtype=torch.bool, device=tokens.device).expand(B, K, K)
    root = torch.zeros_like(ids)
    return Pool(tokens, _usable(scores), root - 1, ids, tokens, root, visible)


def expand(pool: Pool, tokens: Tensor, scores: Tensor) -> Pool:
    """The pool after one expansion. tokens, scores [B, K, K]: the K candidates of each frontier row and their
    log-probabilities, chosen by the caller (shared noise selects by other keys than it scores by). The next
    frontier is the best K of these K*K by cumulative score (EAGLE-2, expansion phase)."""
    B, K = pool.frontier.shape
    base = pool.scores.gather(1, pool.frontier)[..., None]
    # A child scores no higher than its parent and has a higher flat id, so it never outlives it in `select`.
    total = torch.minimum(_usable(_usable(scores) + base), base).flatten(1)
    best, flat = _best(total, K), tokens.flatten(1)
    inherited = pool.visible.gather(1, (best // K)[..., None].expand(-1, -1, pool.visible.shape[2]))
    own = torch.eye(K, dtype=torch.bool, device=tokens.device).expand(B, K, K)
    parent = torch.cat([pool.parent, pool.frontier.repeat_interleave(K, 1)], 1)
    scores, visible = torch.cat([pool.scores, total], 1), torch.cat([inherited, own], 2)
    pool_tokens, frontier = torch.cat([pool.tokens, flat], 1), pool.tokens.shape[1] + best
    return Pool(pool_tokens, scores, parent, frontier, flat.gather(1, best), best // K, visible)


def select(pool: Pool, root: Tensor, N: int, D: int, live: Tensor | None = None) -> DraftTree:
    """EAGLE-2's re-ranking: keep the best N-1 of the pool, numbered in flat order, parents first. root [B]: the root's
    token. D: one more than the expansions. live [B] int64: keep only that many nodes, root included, and pad up to N
    (a smaller tree in a larger captured size). ValueError if the pool is smaller than N-1."""
    P = pool.tokens.shape[1]
    if not 1 <= N <= P + 1:
        raise ValueError(f"dynamic tree: N is {N}, allowed 1 to {P + 1} for a pool of {P} candidates")
    flat = _best(pool.scores, N - 1)
    if live is not None:
        flat = flat.where(torch.arange(1, N, device=root.device) < live[:, None], P)
    flat = flat.sort(dim=-1).values
    valid, flat = pad(flat < P, (1, 0), value=True), flat.clamp(max=P - 1)
    above = pool.parent.gather(1, flat)
    parent = pad(torch.where((above < 0) | ~valid[:, 1:], 0, torch.searchsorted(flat, above) + 1), (1, 0))
    ancestors, depth = ancestors_from_parents(parent, D, valid)
    tokens = torch.cat([root[:, None], pool.tokens.gather(1, flat)], 1)
    return DraftTree(tokens, parent, depth, ancestors, valid, pad(pool.scores.gather(1, flat), (1, 0)))


class Accepted(NamedTuple):
    """What a step emits: count = accepted drafted tokens + the bonus token."""

    path: Tensor  # [B, D+1] node ids from the root, padded with the last accepted node
    count: Tensor  # [B] in 1..D+1
    bonus: Tensor  # [B] the next root
    emitted: Tensor  # [B, D+1] accepted tokens, then the bonus, which also pads


def accept(
    tokens: Tensor, parent: Tensor, depth: Tensor, ancestors: Tensor, valid: Tensor, choice: Tensor, D: int
) -> Accepted:
    """Choice-and-walk: follow the target's own choices for as long as the tree holds them.

    ok[i] = valid[i] and tokens[i] == choice[parent[i]] and ok[parent[i]]; the deepest ok node wins, of equals
    the lowest. tokens, parent, depth, choice [B, N], valid [B, N] bool, ancestors [B, N, N] bool, D >= depth.
    If siblings may repeat a token, choice must depend on a node's token path alone (position-keyed noise
    does), or the search for the deepest copy would bias the output."""
    N = tokens.shape[1]
    node = torch.arange(N, device=tokens.device)
    match = (valid & (tokens == choice.gather(1, parent))) | (node == 0)
    ok = (match[:, None] | ~ancestors).all(-1)
    last = depth.where(ok, -1).argmax(1, keepdim=True)  # argmax gives the first of equals
    length = depth.gather(1, last)
    on_path = ancestors.gather(1, last[..., None].expand(-1, 1, N))
    level = torch.arange(D + 1, device=tokens.device)
    path = ((depth[:, None] == level[:, None]) & on_path).mul(node).sum(-1).where(level <= length, last)
    emitted = choice.gather(1, path)
    return Accepted(path, length.squeeze(1) + 1, choice.gather(1, last).squeeze(1), emitted)


def multi_round(
    tokens: Tensor, tables: TreeTables, p: Tensor, q: Tensor, u: Tensor, noise: Tensor, replacement: bool
) -> Accepted:
    """Algorithm 1 of the EAGLE paper on static trees; on a chain the rule of Leviathan et al. and Chen et al.

    A node's children, drawn from the draft distribution q, are tried in drawn order: accepted with
    probability min(1, p/q'); on rejection p becomes norm(max(0, p - q')). q' is q itself with replacement;
    without, q with the earlier siblings zeroed, renormalised (as EAGLE-1 drafts). The bonus comes from the p left.

    tokens [B, N]; p [B, N, V] processed target probabilities after each node; q [B, run_rows, V] the draft's,
    by run row, processed the same way; u [B, N] uniforms in [0, 1), one per node; noise [B, V] Gumbel, for
    the bonus. Draws of children, u and noise must be independent. Children with q' = 0 (drawn after the last
    possible token) or valid False are skipped."""
    path, count, law = _multi_round_walk(tokens, tables, p, q, u, replacement)
    bonus = (law.log() + noise).argmax(-1)
    drafted = tokens.gather(1, path).roll(-1, 1)
    level = torch.arange(tables.D + 1, device=tokens.device)
    return Accepted(path, count, bonus, drafted.where(level < count[:, None] - 1, bonus[:, None]))


def _multi_round_walk(
    tokens: Tensor, tables: TreeTables, p: Tensor, q: Tensor, u: Tensor, replacement: bool
) -> tuple[Tensor, Tensor, Tensor]:
    # The accepted path [B, D+1], count [B] and the distribution [B, V] that the bonus is drawn from.
    B, N, V = p.shape
    if tokens.shape != (B, N) or tables.N != N or q.shape != (B, tables.run_rows, V):
        want = f"p [B, {tables.N}, V] and q [B, {tables.run_rows}, V]"
        raise ValueError(f"multi-round: the tree needs {want}, got {tuple(p.shape)} and {tuple(q.shape)}")
    b, node = torch.arange(B, device=p.device), torch.zeros_like(tokens[:, 0])
    law, walking, path = p[:, 0], torch.ones_like(node, dtype=torch.bool), [node]
    for width in tables.branching:
        children = tables.children[b, node]
        left = q[b, tables.source_row[b, children[:, 0]]]
        here, moved = node, torch.zeros_like(walking)
        for child in children[:, :width].unbind(1):
            x = tokens[b, child]
            px, qx = law[b, x], left[b, x]
            tried = walking & ~moved & (child > 0) & tables.valid[b, child] & (qx > 0)
            taken = tried & ((px >= qx) | (u[b, child] * qx < px))
            # No residual at all can only be rounding (then p = q', which is never rejected): keep p.
            residual = (law - left).clamp(min=0)
            replace = (tried & ~taken & (residual > 0).any(-1))[:, None]
            law = torch.where(replace, normalize(residual, p=1, dim=-1, eps=1e-30), law)
            if not replacement:
                left = normalize(left.scatter(1, x[:, None], 0), p=1, dim=-1, eps=1e-30)
            here, moved = torch.where(taken, child, here), moved | taken
        node, walking = here, moved
        law = torch.where(moved[:, None], p[b, node], law)
        path.append(node)
    return torch.stack(path, 1), tables.depth[b, node] + 1, law
