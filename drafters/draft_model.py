"""TODO."""

from __future__ import annotations

import torch
from torch import Tensor

from drafters.base import DraftInput
from drafters.tree_drafter import TreeDrafter
from model import ModelConfig, Transformer, chain_ancestors, make_nodes
from tree import DynamicTree, TreeTables


class DraftModelDrafter(TreeDrafter):
    """A small LLM of the same vocabulary drafts: chains, static or dynamic trees, both verification rules.

    Row i of its cache holds token i. Rows up to the root stay; a step re-feeds the tokens accepted last (always D + 1
    rows, what the tree left behind there is overwritten), the tree's rows follow them and never survive."""

    taps = ()

    def __init__(
        self,
        target: Transformer,
        model: Transformer,
        tree: DynamicTree | TreeTables,
        batch_size: int,
        slots: int,
        shared_noise: bool = True,
        multi_round: str = "",
    ):
        super().__init__(tree, shared_noise, multi_round)
        check_vocabulary(target.config, model.config)
        if any(0 < window <= tree.D for window in model.config.windows):
            raise ValueError(
                f"the draft model attends {max(model.config.windows)} tokens, less than the tree is deep."
            )
        self.model, self.feature_size = model, target.config.hidden_size
        self.slots = slots + 1 + self.scratch
        self.cache = model.new_cache(batch_size, self.slots)

    def bytes_per_step(self, model: Transformer) -> float:
        """Weight bytes one draft reads: the whole draft model once per forward."""
        widths = (
            [self.tree.topk] * self.tree.depth
            if self.dynamic
            else [x.node.shape[1] for x in self.tree.levels]
        )
        return sum(self.model.weight_bytes(width) for width in (self.D + 1, *widths))

    def prefill(self, row: int, tokens: Tensor, features: Tensor, start: Tensor) -> None:
        self._chain(tokens[:, :-1], start, self.cache[:, :, row : row + 1])

    def _chain(self, tokens: Tensor, start: Tensor, cache: Tensor) -> Tensor:
        (B, T), device = tokens.shape, tokens.device
        depth = torch.arange(T, device=device).expand(B, T)
        nodes = self.model.nodes(start, depth, chain_ancestors(B, T, device), self.slots)
        return self.model(tokens, nodes, cache)[0]

    def _extend(self, request: DraftInput) -> Tensor:
        start = request.n - request.count + 1
        row = torch.arange(request.features.shape[1], device=start.device)
        where = (start[:, None] + row).clamp(max=request.tokens.shape[1] - 1)
        output = self._chain(request.tokens.gather(1, where), start, self.cache)
        last = (request.count - 1)[:, None, None].expand(-1, 1, output.shape[-1])
        return output.gather(1, last)

    def _level(self, request: DraftInput, depth: int, first: int, tokens, feature, visible) -> Tensor:
        start = request.n + 1
        positions = (request.n + depth)[:, None].expand(tokens.shape)
        nodes = make_nodes(self.model.rotary, start, positions, start + first, visible, self.slots)
        return self.model(tokens, nodes, self.cache)[0]

    def predict(self, output: Tensor) -> Tensor:
        return self.model.logits(output)


def check_vocabulary(target: ModelConfig, model: ModelConfig, tokenizers: tuple = (None, None)) -> None:
    """ValueError unless both models number the same pieces: vocabulary sizes, and tokenizers where both exist."""
    sizes = target.vocab_size, model.vocab_size
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the draft model has {sizes[1]:,} tokens, the target {sizes[0]:,}; use a draft model of the same family."
        )
    if None not in tokenizers:
        ours, theirs = (t._files.pieces for t in tokenizers)
        if differ := [i for i in sorted(ours.keys() | theirs.keys()) if ours.get(i) != theirs.get(i)]:
            i = differ[0]
            raise ValueError(
                f"the draft model's token {i} is {theirs.get(i)!r:.40}, the target's {ours.get(i)!r:.40} "
                f"({len(differ):,} differ); use a draft model of the same family."
            )
