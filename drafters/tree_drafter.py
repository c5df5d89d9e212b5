"""Drafting trees level by level with any model that continues a path: EAGLE heads and draft LLMs."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
import sampling
from drafters.base import Draft, Drafter, DraftInput
from tree import DynamicTree, TreeTables
from tree_building import expand, first_level, select

SLIVER = 1e-9  # share of the draft's probability for tokens that the filters removed (multi-round)


class TreeDrafter(Drafter):
    """Drafts static or dynamic trees. A subclass gives `_extend`, `_level` and `predict`.

    A subclass that drafts only some tokens sets `draft_ids`, the absolute target ids [Vd] of its draft vocabulary.
    """

    draft_ids: Tensor | None = None

    def __init__(
        self,
        tree: DynamicTree | TreeTables,
        feature_size: int,
        taps: tuple[int, ...] = (),
        shared_noise: bool = True,
        multi_round: str = "",
    ):
        """multi_round: "" for choice-and-walk, "without" or "with" replacement (static trees only)."""
        super().__init__(tree.N, tree.D, feature_size, taps)
        self.tree = tree
        self.shared_noise = shared_noise
        self.multi_round = multi_round
        self.dynamic = isinstance(tree, DynamicTree)
        self.scoring = "noisy" if self.dynamic and shared_noise else "probability"
        if multi_round and self.dynamic:
            raise ValueError(
                "--verify multi-round needs a static tree or a chain: re-ranking sampled children breaks its proof. "
                "Use --tree paper25 or chain:K."
            )
        self.scratch = tree.depth * tree.topk if self.dynamic else tree.run_rows  # cache rows of a tree

    def level_widths(self) -> list[int]:
        """Rows of every draft forward after the first one."""
        if self.dynamic:
            return [self.tree.topk] * self.tree.depth
        return [level.node.shape[1] for level in self.tree.levels]

    def draft(self, inputs: DraftInput) -> Draft:
        output = self._extend(inputs)
        return self._dynamic(inputs, output) if self.dynamic else self._static(inputs, output)

    def _extend(self, inputs: DraftInput) -> Tensor:
        """Append the tokens accepted last to the cache; the output [B, 1, H] that predicts the root's successors."""
        raise NotImplementedError

    def _level(self, inputs: DraftInput, depth: int, first: int, tokens, feature, visible) -> Tensor:
        """Run one level's rows, nodes at `depth` [B, W] cached from slot n + first; the output [B, W, H]."""
        raise NotImplementedError

    def predict(self, output: Tensor) -> Tensor:
        """output [..., H] -> draft logits [..., Vd]."""
        raise NotImplementedError

    def top(self, output: Tensor, count: int) -> kernels.TopK | None:
        """The `count` best of `predict(output)` where a kernel finds them without storing the logits, else None."""
        return None

    def _keys(self, inputs: DraftInput, output: Tensor, depth: int, paths: Tensor) -> tuple[Tensor, Tensor]:
        """Ranking keys and scores [B, W, Vd] for the children of rows at `depth`.

        paths [B, W, depth] are the draft-vocabulary ids from below the root to each row; only penalties read them. For
        multi-round verification the keys are the penalised logits. A dynamic tree is ranked by its scores; the scores of
        a static tree are for viewers and are always the draft's own log-probabilities.
        """
        logits = self.predict(output)
        ids = self.draft_ids
        if inputs.mode.penalties:
            seen = inputs.seen if ids is None else inputs.seen[:, ids]
            counts = inputs.counts if ids is None else inputs.counts[:, ids]
            known = torch.ones_like(paths, dtype=torch.bool)
            logits = sampling.apply_penalties(logits, seen, counts, paths, known, inputs.sampling)
        noise = None
        if inputs.noise is not None and self.shared_noise and not self.multi_round:
            noise = inputs.noise[:, depth : depth + 1]
            noise = noise if ids is None else noise[..., ids]
        mode = inputs.mode if self.shared_noise else sampling.SamplingMode()
        return sampling.draft_keys(logits, noise, inputs.sampling, mode, noisy_scores=self.dynamic)

    def _target_ids(self, local: Tensor) -> Tensor:
        """Target ids of draft-vocabulary ids."""
        return local if self.draft_ids is None else self.draft_ids[local]

    def _children(self, inputs: DraftInput, output: Tensor, depth: int, paths: Tensor, width: int, first_row: int = 0):
        """The `width` best children of each row: (draft-vocabulary ids, scores, q), each [B, W, ...]."""
        by_logits = inputs.noise is None or not self.shared_noise
        if by_logits and not (inputs.mode.penalties or self.multi_round):
            best = self.top(output, width)
            if best is not None:
                scores = best.values - best.log_total[..., None]
                return best.ids, scores.masked_fill(scores.isnan(), -math.inf), None
        keys, scores = self._keys(inputs, output, depth, paths)
        if self.multi_round:
            local, q = self._draw(inputs, keys, width, first_row)
            return local, scores.gather(-1, local), q
        local = keys.topk(width, -1).indices
        return local, scores.gather(-1, local), None

    def _draw(self, inputs: DraftInput, logits: Tensor, width: int, first_row: int) -> tuple[Tensor, Tensor]:
        """Children sampled from the draft's processed distribution, and that distribution q [B, W, V].

        The output stays exact with any q that the children are really drawn from. Children that the filters removed would
        have q = 0 and be wasted, so the best few tokens share a sliver of q and follow the survivors. Greedy decoding
        takes the best tokens with equal q.
        """
        B, W, _ = logits.shape
        best = logits.topk(width, -1)
        if not inputs.mode.sample:  # p is one-hot, so any q > 0 accepts the one right child
            local = best.indices
            q = torch.zeros_like(logits).scatter_(-1, best.indices, 1 / width)
        else:
            q = sampling.probabilities(logits, inputs.sampling, inputs.mode) * (1 - SLIVER)
            q = q.scatter_add(-1, best.indices, SLIVER * best.values.softmax(-1).clamp_min(SLIVER))
            draws = width if self.multi_round == "with" else 1
            keys = torch.arange(first_row * draws, (first_row + W) * draws, device=q.device)
            # One fresh noise stream per (step, row, draw). The root's position numbers the step, and 14 bits hold
            # MAX_NODES * MAX_TOPK draws.
            where = (inputs.n[:, None] << 14) + keys
            ids = torch.arange(q.shape[-1], device=q.device)
            noise = sampling.gumbel_noise(sampling.stream(inputs.sampling.seed, 1), where, ids)
            perturbed = q.log()[:, :, None] + noise.unflatten(1, (W, draws))
            alone = draws > 1 or width == 1
            local = perturbed.argmax(-1) if alone else perturbed[:, :, 0].topk(width, -1).indices
        if self.draft_ids is not None:
            q = q.new_zeros(B, W, inputs.seen.shape[1]).index_copy_(-1, self.draft_ids, q)
        return local, q

    def _static(self, inputs: DraftInput, output: Tensor) -> Draft:
        tables = self.tree
        B = inputs.n.shape[0]
        width = max(tables.max_children, 1)
        paths = inputs.root.new_zeros(B, 1, 0)
        local, scores, q = self._children(inputs, output, 0, paths, width)
        candidates, values, outputs, distributions = [local], [scores], [output], [q]
        run_paths = {0: paths}
        totals = scores.new_zeros(B, 1)  # cumulative score of every run row
        first = 0
        for level in tables.levels:
            so_far = torch.cat(candidates, 1)
            feature = torch.cat(outputs, 1)
            flat = level.source * width + level.rank
            chosen = so_far.flatten(1).gather(1, flat)
            gained = torch.cat(values, 1).flatten(1).gather(1, flat)
            totals = torch.cat((totals, totals.gather(1, level.source) + gained), 1)
            feature = feature.gather(1, level.source[..., None].expand(-1, -1, feature.shape[-1]))
            output = self._level(inputs, level.depth, first, self._target_ids(chosen), feature, level.visible)
            if inputs.mode.penalties:  # nothing else reads the paths
                parents = torch.cat([_padded(p, level.depth - 1) for p in run_paths.values()], 1)
                inherited = parents.gather(1, level.source[..., None].expand(-1, -1, level.depth - 1))
                paths = torch.cat((inherited, chosen[..., None]), -1)
                run_paths[level.depth] = paths
            local, scores, q = self._children(inputs, output, level.depth, paths, width, 1 + first)
            first += chosen.shape[1]
            candidates.append(local)
            values.append(scores)
            outputs.append(output)
            distributions.append(q)
        tokens = tree_tokens(tables, inputs.root, self._target_ids(torch.cat(candidates, 1)))
        pick = (tables.source_row * width + tables.rank)[:, 1:]
        scored = torch.cat(values, 1).flatten(1).gather(1, pick) + totals.gather(1, tables.source_row[:, 1:])
        q = torch.cat(distributions, 1) if self.multi_round else None
        return Draft(tokens, tables.parent, tables.depth, tables.ancestors, tables.valid, F.pad(scored, (1, 0)), q)

    def _dynamic(self, inputs: DraftInput, output: Tensor) -> Draft:
        K = self.tree.topk
        paths = inputs.root.new_zeros(inputs.n.shape[0], 1, 0)
        local, scores, _ = self._children(inputs, output, 0, paths, K)
        pool = first_level(local[:, 0], scores[:, 0])
        feature = output.expand(-1, K, -1)
        parent_paths = paths.expand(-1, K, -1)
        for level in range(self.tree.depth):
            chosen = pool.frontier_tokens
            output = self._level(inputs, level + 1, level * K, self._target_ids(chosen), feature, pool.visible)
            if inputs.mode.penalties:
                paths = torch.cat((parent_paths, chosen[..., None]), -1)
            local, scores, _ = self._children(inputs, output, level + 1, paths, K)
            pool = expand(pool, local, scores)
            feature = output.gather(1, pool.source[..., None].expand(-1, -1, output.shape[-1]))
            if inputs.mode.penalties:
                parent_paths = paths.gather(1, pool.source[..., None].expand(-1, -1, paths.shape[-1]))
        drafted = select(pool._replace(tokens=self._target_ids(pool.tokens)), inputs.root, self.N, self.D)
        return Draft(*drafted)


def tree_tokens(tables: TreeTables, root: Tensor, candidates: Tensor) -> Tensor:
    """Tokens [B, N] of static trees: root [B], then node i takes candidates[b, source_row[b, i], rank[b, i]].

    candidates [B, run_rows, max_children] are the ids that every run row proposed.
    """
    index = (tables.source_row * tables.max_children + tables.rank)[:, 1:]
    return torch.cat([root[:, None], candidates.flatten(1).gather(1, index)], 1)


def _padded(paths: Tensor, length: int) -> Tensor:
    return F.pad(paths, (0, length - paths.shape[-1]))
