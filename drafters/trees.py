"""Drafting trees level by level with any model that has a cache of its own: EAGLE heads and draft LLMs."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import kernels
from decoding import sampling
from decoding.drafter import Draft, Drafter, DraftInput, StepParts, take_rows
from decoding.params import SamplingMode
from kernels.growing import expand, first_level, select
from kernels.records import Rotary
from model import Nodes, chain_ancestors, nodes_at
from tree import DynamicTree, Trees, TreeTables

BACK = 56  # positions before the window that a ring keeps, so that a text can be taken back by so much
AHEAD = 72  # rows behind a text, besides those of a tree, that steps under way may write
FORWARD = 2.5  # a forward of a head is worth its time below what is so many times as likely as a node worth checking
SLIVER = 1e-9  # share of the draft's probability for tokens that the filters removed (multi-round)


class DraftRule(NamedTuple):
    """How a tree is drafted and verified."""

    shared_noise: bool = True  # whether drafts know the target's noise
    multi_round: str = ""  # "" for `verify.accept`, "without" or "with" replacement (static trees only)
    # Nodes of a static tree that are probably accepted more rarely than that are left out, by the C++ kernels of CPUs.
    p_min: float = 0.0
    by_price: bool = False  # p_min holds until the price of a node is known (`TreeDrafter.price`)
    # Where the text repeats itself, up to so many tokens of its earlier continuation take the place of a pruned tree.
    ngram_nodes: int = 0
    window: int = 0  # positions that a head attends to, besides the nodes of its tree; 0: the whole text


DEFAULT_RULE = DraftRule()


class FedRows(NamedTuple):
    """What a forward of a draft model reads."""

    tokens: Tensor  # [B, T]
    features: Tensor  # [B, R, H] what the tokens are paired with: the target's features, or outputs of the level above
    nodes: Nodes | None  # None for a level of a drafter without `places_levels`
    source: Tensor | None = None  # [B, T] the row of features for each token, None if each has its own


class TreeDrafter(Drafter):
    """Drafts static or dynamic trees. A subclass gives `_forward` and `predict`.

    The first n + lead rows of its cache are true: row i stands for token i + 1 - lead, and the last of them for the root.
    A step feeds the tokens accepted last again, always in D + 1 rows that overwrite what the last tree left behind. The
    rows of the tree follow and never survive.

    A subclass that drafts only some tokens sets `draft_ids`, the absolute target ids [Vd] of its draft vocabulary.
    """

    draft_ids: Tensor | None = None
    # 1 for a model that reads token i in row i, 0 for one that reads the feature of token i beside token i + 1.
    lead = 0
    model_window = 0  # of the attention of a whole model over known tokens, 0 if it is full
    prunes_dynamic = False  # whether it leaves nodes out of dynamic trees, too
    places_levels = True  # whether the rows of a level go into its cache

    def __init__(
        self, model: nn.Module, feature_size: int, taps: tuple[int, ...], tree: Trees, batch_size: int, slots: int,
        rule: DraftRule = DEFAULT_RULE, extra: int = 0,
    ):  # fmt: skip
        """A drafter for B sequences.

        Args:
            model: has `rotary` and `new_cache`.
            slots: of the target's cache.
            extra: rows behind the text that a draft writes besides those of a tree.
        """
        super().__init__(tree.N + rule.ngram_nodes, max(tree.D, rule.ngram_nodes), feature_size, taps)
        self.tree = tree
        self.rotary = Rotary(model.rotary.cos, model.rotary.sin)
        self.shared_noise, self.multi_round, self.p_min, self.by_price, self.ngram_nodes, self.window = rule
        self.p_forward = FORWARD * self.p_min
        self.p_more = self.p_min
        self.dynamic = isinstance(tree, DynamicTree)
        self.scoring = "noisy" if (self.dynamic or rule.p_min) and rule.shared_noise else "probability"
        if rule.multi_round and self.dynamic:
            why = "re-ranking sampled children breaks its proof. Use --tree paper25 or chain:K."
            raise ValueError(f"--verify multi-round needs a static tree or a chain: {why}")
        if rule.p_min and self.dynamic and not self.prunes_dynamic:
            raise ValueError("--prune needs a static tree, like paper25; a dynamic one chooses its nodes itself.")
        scratch = extra + (tree.depth * tree.topk if self.dynamic else tree.run_rows)  # cache rows of a tree
        self.target_slots, self.slots = slots, slots + self.lead + scratch
        if self.window and ring_slots(self.window, scratch) < self.slots:
            self.slots = ring_slots(self.window, scratch)
            self.ring, self.kept = self.slots - 1, self.window + BACK
        self.caches = model.new_cache(batch_size, self.slots)
        self.cache = self.caches[0]
        self.cached_models = (model,)
        device = self.cache.device
        depths = [depth for depth, width in enumerate(self.level_widths()) for _ in range(width)]
        self.row_depth = torch.tensor([depths], dtype=torch.int64, device=device)  # of all rows, below the first level
        if self.dynamic:  # of every level's rows in the batch, from the first row of the level on
            self.level_first = torch.arange(0, scratch - extra, tree.topk, device=device)[:, None]
            self.level_depth = self._level_depth(batch_size)
        self.chain = chain_ancestors(1, self.D + 1, device).contiguous()

    def _level_depth(self, batch: int) -> Tensor:
        depth = self.row_depth.view(-1, 1, self.tree.topk) - self.level_first[..., None]
        return depth.expand(-1, batch, -1).flatten(0, 1)

    def first(self, rows: int) -> TreeDrafter:
        view = super().first(rows)
        view.cache = view.caches[0]
        if self.dynamic:
            view.level_depth = view._level_depth(rows)
        return view

    def prunes(self, mode: SamplingMode) -> bool:
        # a grammar writes forced tokens into the tree; the rest is what the C++ kernels lack
        return self.p_min > 0 and not (mode.grammar or mode.penalties or mode.filters)

    def price(self, share: float, first: float, more: float) -> None:
        # Decoding emits about 1.3 tokens in the time of a plain step. A node must emit as many in its own time.
        self.p_min = min(max(1.3 * share, 0.05), 0.6)
        self.p_more = min(max(1.3 * more, self.p_min), 0.9)
        # Behind a long text a node takes longer, and a forward of the head does not. The likeliest child of a node has
        # about 0.7 of its probability, so behind a short text this is FORWARD times p_min.
        base = min(max(1.3 * first, 0.0), self.p_min)
        self.p_forward = min((self.p_min + (0.7 * FORWARD - 1) * base) / 0.7, 1.0)

    def level_widths(self) -> list[int]:
        """Rows of every draft forward after the first one."""
        if self.dynamic:
            return [self.tree.topk] * self.tree.depth
        return [level.node.shape[1] for level in self.tree.levels]

    def draft(self, inputs: DraftInput) -> Draft:
        drafted = inputs.parts.draft_tree and inputs.parts.draft_tree(self, inputs)
        if drafted:
            return drafted
        if inputs.mode.sample and inputs.noise is None:  # it was left to the C++ kernels
            ahead = sampling.noise_ahead(inputs.sampling.seed, inputs.n, self.D + 1, inputs.hashes)
            inputs = inputs._replace(noise=ahead)
        output = self._extend(inputs)
        return self._dynamic(inputs, output) if self.dynamic else self._static(inputs, output)

    def _place_levels(self, inputs: DraftInput) -> list[tuple[Tensor, ...] | None]:
        """Where the rows of each level go, [B, W, ...]. Of a batch's dynamic tree the rows of a level are contiguous."""
        batch, widths = inputs.n.shape[0], self.level_widths()
        if not self.places_levels:
            return [None] * len(widths)
        if batch == 1 or not self.dynamic or not widths:
            columns = [column.split(widths, 1) for column in self._place(inputs, self.row_depth)[:4]]
        else:
            starts = (inputs.n + self.level_first).flatten()  # levels are placed as if they were sequences
            rows = self._place(inputs._replace(n=starts), self.level_depth)
            columns = [column.unflatten(0, (-1, batch)).unbind(0) for column in rows[:4]]
        return list(zip(*columns, strict=True))

    def _place(self, inputs: DraftInput, depth: Tensor, fed: int = 0) -> tuple[Tensor, ...]:
        """Where rows of the draft cache go (`kernels.place_rows`)."""
        known = inputs.count, inputs.tokens, self.lead, None, self.ring > 0
        return kernels.place_rows(inputs.n, depth, self.rotary, self.slots, fed, *known)

    def _nodes(self, where: tuple[Tensor, ...] | None, start: Tensor, visible: Tensor, window: int = 0) -> Nodes | None:
        if where is None:
            return None
        nodes = nodes_at(where, start + self.lead if self.lead else start, visible, window)
        return nodes._replace(window=self.window, ring=self.ring > 0)

    def _forward(self, fed: FedRows, cache: Tensor, parts: StepParts) -> Tensor:
        """Run the model; the output [B, T, H]."""
        raise NotImplementedError

    def predict(self, output: Tensor) -> Tensor:
        """output [..., H] -> draft logits [..., Vd] in any dtype."""
        raise NotImplementedError

    def top(self, output: Tensor, count: int) -> kernels.TopK | None:
        """The `count` best of `predict(output)` where a kernel finds them without storing the logits, else None."""
        return None

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features -> what the model reads."""
        return features

    def _extend(self, inputs: DraftInput) -> Tensor:
        """Feed the accepted tokens again with their true features; the output [B, 1, H] of the root's row."""
        fed = inputs.features.shape[1]
        where = self._place(inputs, self.row_depth[:, :0], fed)
        start = inputs.n - inputs.count
        seen = self.chain if fed == self.D + 1 else chain_ancestors(1, fed, start.device)  # a graft may be deeper
        seen = seen.expand(inputs.n.shape[0], -1, -1)
        nodes = self._nodes(where, start, seen, self.model_window)
        output = self._forward(FedRows(where[-1], self.fuse(inputs.features), nodes), self.cache, inputs.parts)
        return take_rows(output, (inputs.count - 1)[:, None])

    def _level(self, inputs: DraftInput, depth: int, fed: FedRows) -> Tensor:
        """Run one level's rows, nodes at `depth`, which are paired with the output of the level above; the output
        [B, W, H]."""
        return self._forward(fed, self.cache, inputs.parts)

    def _logits(self, inputs: DraftInput, output: Tensor, paths: Tensor) -> Tensor:
        """The logits [B, W, Vd] of the children of rows [B, W], with biases and penalties.

        paths [B, W, depth] are the draft-vocabulary ids from below the root to each row; only penalties read them.
        """
        logits = self.predict(output)
        if inputs.bias is not None:
            logits = logits + (inputs.bias if self.draft_ids is None else inputs.bias[..., self.draft_ids])
        if not inputs.mode.penalties:
            return logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        ids = slice(None) if self.draft_ids is None else self.draft_ids
        known = torch.ones_like(paths, dtype=torch.bool)
        seen, counts = inputs.seen[:, ids], inputs.counts[:, ids]
        return sampling.apply_penalties(logits, seen, counts, paths, known, inputs.sampling)

    def _target_ids(self, local: Tensor) -> Tensor:
        """Target ids of draft-vocabulary ids."""
        return local if self.draft_ids is None else self.draft_ids[local]

    def _children(self, inputs: DraftInput, output: Tensor, depth: int, paths: Tensor, width: int, first_row: int = 0):
        """The `width` best children of each row: (draft-vocabulary ids, scores, q), each [B, W, ...].

        A dynamic tree is ranked by its scores, and a pruned one is pruned by them. Those of another tree are for viewers
        and are always the draft's own log-probabilities.
        """
        noise = inputs.noise if self.shared_noise and not self.multi_round else None
        if noise is None and not (inputs.mode.penalties or inputs.mode.bias or self.multi_round):
            best = self.top(output, width)
            if best is not None:
                return best.ids, best.scores, None
        logits = self._logits(inputs, output, paths)
        if self.multi_round:
            keys, scores = sampling.draft_keys(logits, None, inputs.sampling, inputs.mode)
            local, q = self._draw(inputs, keys, width, first_row)
            return local, scores.gather(-1, local), q
        row = None if noise is None else noise.narrow(1, depth, 1)
        noisy = self.scoring == "noisy"
        return *sampling.draft_topk(logits, row, self.draft_ids, inputs.sampling, inputs.mode, width, noisy), None

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
        width = max(tables.max_children, 1)
        paths = inputs.root.new_zeros(inputs.n.shape[0], 1, 0)
        local, scores, q = self._children(inputs, output, 0, paths, width)
        found = [(local, scores, q)]  # of all run rows; the scores are cumulative
        begin = 1  # the run row where this level begins
        for level, where in zip(tables.levels, self._place_levels(inputs), strict=True):
            chosen = local.flatten(1).gather(1, level.place)
            total = scores.flatten(1).gather(1, level.place)
            nodes = self._nodes(where, inputs.n, level.visible)
            output = self._level(inputs, level.depth, FedRows(self._target_ids(chosen), output, nodes, level.source))
            if inputs.mode.penalties:  # nothing else reads the paths
                paths = torch.cat((take_rows(paths, level.source), chosen[..., None]), -1)
            local, scores, q = self._children(inputs, output, level.depth, paths, width, begin)
            scores = scores + total[..., None]
            found.append((local, scores, q))
            begin += chosen.shape[1]
        candidates, values, distributions = zip(*found, strict=True)
        ids, values = self._target_ids(torch.cat(candidates, 1)), torch.cat(values, 1)
        tokens, scored = of_nodes(tables, tables.source_row, inputs.root, ids, values)
        q = torch.cat(distributions, 1) if self.multi_round else None
        return Draft(tokens, tables.parent, tables.depth, tables.ancestors, tables.valid, scored, q)

    def _dynamic(self, inputs: DraftInput, output: Tensor) -> Draft:
        K = self.tree.topk
        paths = inputs.root.new_zeros(inputs.n.shape[0], 1, 0)
        local, scores, _ = self._children(inputs, output, 0, paths, K)
        ids, later = (None, self.draft_ids) if inputs.mode.penalties else (self.draft_ids, None)  # when they are mapped
        pool = first_level(local[:, 0], scores[:, 0], ids)
        for depth, where in enumerate(self._place_levels(inputs), 1):
            chosen = pool.frontier_tokens
            tokens = chosen if later is None else later[chosen]
            nodes = self._nodes(where, inputs.n, pool.visible)
            output = self._level(inputs, depth, FedRows(tokens, output, nodes, pool.source))
            if inputs.mode.penalties:
                paths = torch.cat((take_rows(paths, pool.source), chosen[..., None]), -1)
            local, scores, _ = self._children(inputs, output, depth, paths, K)
            pool = expand(pool, local, scores, ids)
        return select(pool, inputs.root, self.N, self.D, ids=later)


def ring_slots(window: int, scratch: int) -> int:
    """Slots of a ring for a window and `scratch` rows of a draft, and the one that takes what nobody reads."""
    return -(-(window + BACK + AHEAD + scratch) // 64) * 64 + 1


def of_nodes(tables: TreeTables, row: Tensor, root: Tensor, ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens and scores [B, N] of the nodes of static trees.

    Node i takes the candidate rank[b, i] of the row row[b, i]. ids and scores [B, R, K] are the candidates of all rows.
    The root [B] is given, and scores 0.
    """
    place = (row * ids.shape[2] + tables.rank)[:, 1:]
    tokens = torch.cat((root[:, None], ids.flatten(1).gather(1, place)), 1)
    return tokens, F.pad(scores.flatten(1).gather(1, place), (1, 0))


def independent_tree(tables: TreeTables, root: Tensor, ids: Tensor, scores: Tensor) -> Draft:
    """Static trees whose candidates at a depth, ids and scores [B, D, K], are the same after every parent."""
    tokens, gained = of_nodes(tables, (tables.depth - 1).clamp(min=0), root, ids, scores)
    totals = torch.where(tables.ancestors, gained[:, None], 0.0).sum(-1)
    return Draft(tokens, tables.parent, tables.depth, tables.ancestors, tables.valid, totals)
