"""TODO."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
import sampling
from drafters.base import Draft, DraftInput
from tree import DynamicTree, TreeTables
from tree_building import expand, first_level, select

# isort: on

SLIVER = 1e-9  # of the draft's probability, for tokens that the filters removed (multi-round)


class TreeDrafter:
    """Drafts static or dynamic trees level by level with any model that continues a path: `draft` is device-only and of
    fixed shape. A subclass gives `_extend`, `_level` and `predict` (and `draft_ids`, if it drafts some tokens only)."""

    draft_ids: Tensor | None = None  # int64 [Vd]: absolute target ids of the draft vocabulary, None = all
    show_law = False  # a viewer sets it: scores of a static tree, which nothing else reads, are then log-probabilities

    def __init__(self, tree: DynamicTree | TreeTables, shared_noise: bool = True, multi_round: str = ""):
        """multi_round: '' (choice-and-walk), 'without' or 'with' replacement (static trees only)."""
        self.tree, self.shared_noise, self.multi_round = tree, shared_noise, multi_round
        self.dynamic = isinstance(tree, DynamicTree)
        if multi_round and self.dynamic:
            raise ValueError(
                "--verify multi-round needs a static tree or a chain: re-ranking sampled children breaks its proof. "
                "Use --tree paper25 or chain:K."
            )
        self.scratch = tree.depth * tree.topk if self.dynamic else tree.run_rows  # cache rows of a tree

    @property
    def N(self) -> int:
        return self.tree.N

    @property
    def D(self) -> int:
        return self.tree.D

    def draft(self, request: DraftInput) -> Draft:
        """One tree per sequence. No host sync."""
        output = self._extend(request)
        if self.dynamic:
            return self._dynamic(request, output)
        return self._static(request, output)

    def _extend(self, request: DraftInput) -> Tensor:
        """Append the tokens accepted last to the cache; the output [B, 1, H] that predicts the root's successors."""
        raise NotImplementedError

    def _level(self, request: DraftInput, depth: int, first: int, tokens, feature, visible) -> Tensor:
        """Run the rows of one level: nodes at `depth`, the tree's rows first, first + 1, ...; visible [B, W, first + W].
        feature [B, W, H]: the outputs of the rows that drafted them."""
        raise NotImplementedError

    def predict(self, output: Tensor) -> Tensor:
        """output [B, W, H] -> draft logits [B, W, Vd]."""
        raise NotImplementedError

    def top(self, output: Tensor, count: int) -> kernels.TopK | None:
        """The `count` best of `predict(output)`, if they can be had without the logits."""

    def _keys(self, request: DraftInput, output: Tensor, depth: int, paths: Tensor) -> tuple[Tensor, Tensor]:
        """Ranking keys and scores [B, W, Vd] for the children of rows at `depth`. Multi-round: keys are penalised logits.

        paths [B, W, depth] are the draft-vocabulary ids from below the root to each row; read with penalties only.
        """
        logits, ids = self.predict(output), self.draft_ids
        if request.mode.penalties:
            seen, counts = request.seen, request.counts
            if ids is not None:
                seen, counts = seen[:, ids], counts[:, ids]
            known = torch.ones_like(paths, dtype=torch.bool)
            logits = sampling.apply_penalties(logits, seen, counts, paths, known, request.state)
        noise = None
        if request.noise is not None and self.shared_noise and not self.multi_round:
            noise = request.noise[:, depth : depth + 1]
            noise = noise if ids is None else noise[..., ids]
        mode = request.mode if self.shared_noise else sampling.SamplingMode()
        keys, scores = sampling.draft_keys(logits, noise, request.state, mode)
        return keys, logits.log_softmax(-1) if self.show_law and not self.dynamic else scores

    def _ids(self, local: Tensor) -> Tensor:
        return local if self.draft_ids is None else self.draft_ids[local]

    def _children(self, request, output, depth: int, paths, width: int, first_row: int = 0):
        """The `width` best children of each row: (local ids, scores, q), each [B, W, ...]."""
        greedy = request.noise is None or not self.shared_noise  # keys are logits, scores their log_softmax
        if greedy and not (request.mode.penalties or self.multi_round):
            if (best := self.top(output, width)) is not None:
                scores = best.values - best.log_total[..., None]
                return best.ids, scores.masked_fill(scores.isnan(), -math.inf), None
        keys, scores = self._keys(request, output, depth, paths)
        q = None
        if self.multi_round:
            local, q = self._draw(request, keys, width, first_row)
        else:
            local = keys.topk(width, -1).indices
        return local, scores.gather(-1, local), q

    def _draw(self, request: DraftInput, logits: Tensor, width: int, first_row: int) -> tuple[Tensor, Tensor]:
        """Children sampled from the draft's processed distribution, with noise of their own stream, and q [B, W, V].

        Any q that the children are really drawn from keeps the output exact. Those beyond the filters' survivors would be
        wasted at q = 0, so the best few tokens share a sliver of q: they follow. Greedy: the best, equally likely.
        """
        B, W, _ = logits.shape
        best = logits.topk(width, -1)
        if not request.mode.sample:  # p is one-hot: any q > 0 accepts the one right child
            local, q = best.indices, torch.zeros_like(logits).scatter_(-1, best.indices, 1 / width)
        else:
            q = sampling.probabilities(logits, request.state, request.mode) * (1 - SLIVER)
            q = q.scatter_add(-1, best.indices, SLIVER * best.values.softmax(-1).clamp_min(SLIVER))
            draws = width if self.multi_round == "with" else 1
            keys = torch.arange(first_row * draws, (first_row + W) * draws, device=q.device)
            # one fresh stream per (step, row, draw): the root's position numbers the step
            where = (request.n[:, None] << 14) + keys  # MAX_NODES x MAX_TOPK draws
            ids = torch.arange(q.shape[-1], device=q.device)
            noise = sampling.gumbel_noise(sampling.stream(request.state.seed, 1), where, ids)
            perturbed = q.log()[:, :, None] + noise.unflatten(1, (W, draws))
            alone = draws > 1 or width == 1
            local = perturbed.argmax(-1) if alone else perturbed[:, :, 0].topk(width, -1).indices
        if self.draft_ids is not None:
            q = q.new_zeros(B, W, request.seen.shape[1]).index_copy_(-1, self.draft_ids, q)
        return local, q

    def _static(self, request: DraftInput, output: Tensor) -> Draft:
        tables, B = self.tree, request.n.shape[0]
        width = max(tables.max_children, 1)
        paths = request.root.new_zeros(B, 1, 0)
        local, scores, q = self._children(request, output, 0, paths, width)
        candidates, values, outputs, laws = [local], [scores], [output], [q]
        run_paths = {0: paths}
        totals = scores.new_zeros(B, 1)  # cumulative score of every run row
        first = 0
        for level in tables.levels:
            so_far, feature = torch.cat(candidates, 1), torch.cat(outputs, 1)
            flat = level.source * width + level.rank
            chosen = so_far.flatten(1).gather(1, flat)
            gained = torch.cat(values, 1).flatten(1).gather(1, flat)
            totals = torch.cat((totals, totals.gather(1, level.source) + gained), 1)
            feature = feature.gather(1, level.source[..., None].expand(-1, -1, feature.shape[-1]))
            output = self._level(request, level.depth, first, self._ids(chosen), feature, level.visible)
            if request.mode.penalties:  # nothing else asks for paths
                parents = torch.cat([_padded(p, level.depth - 1) for p in run_paths.values()], 1)
                inherited = parents.gather(1, level.source[..., None].expand(-1, -1, level.depth - 1))
                paths = torch.cat((inherited, chosen[..., None]), -1)
                run_paths[level.depth] = paths
            local, scores, q = self._children(request, output, level.depth, paths, width, 1 + first)
            first += chosen.shape[1]
            for kept, new in ((candidates, local), (values, scores), (outputs, output), (laws, q)):
                kept.append(new)
        candidates, values = torch.cat(candidates, 1), torch.cat(values, 1)
        tokens = tables.tokens(request.root, self._ids(candidates))
        pick = (tables.source_row * width + tables.rank)[:, 1:]
        scored = values.flatten(1).gather(1, pick) + totals.gather(1, tables.source_row[:, 1:])
        scores = F.pad(scored, (1, 0))
        q = torch.cat(laws, 1) if self.multi_round else None
        return Draft(tokens, tables.parent, tables.depth, tables.ancestors, tables.valid, scores, q)

    def _dynamic(self, request: DraftInput, output: Tensor) -> Draft:
        K, depth = self.tree.topk, self.tree.depth
        paths = request.root.new_zeros(request.n.shape[0], 1, 0)
        local, scores, _ = self._children(request, output, 0, paths, K)
        pool = first_level(local[:, 0], scores[:, 0])
        feature, parent_paths = output.expand(-1, K, -1), paths.expand(-1, K, -1)
        for level in range(depth):
            chosen = pool.frontier_tokens
            output = self._level(request, level + 1, level * K, self._ids(chosen), feature, pool.visible)
            if request.mode.penalties:
                paths = torch.cat((parent_paths, chosen[..., None]), -1)
            local, scores, _ = self._children(request, output, level + 1, paths, K)
            pool = expand(pool, local, scores)
            feature = output.gather(1, pool.source[..., None].expand(-1, -1, output.shape[-1]))
            if request.mode.penalties:
                parent_paths = paths.gather(1, pool.source[..., None].expand(-1, -1, paths.shape[-1]))
        drafted = select(pool._replace(tokens=self._ids(pool.tokens)), request.root, self.N, self.D)
        return Draft(*drafted)


def _padded(paths: Tensor, length: int) -> Tensor:
    return F.pad(paths, (0, length - paths.shape[-1]))
