"""A small LLM of the same vocabulary as the drafter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from drafters.base import DraftInput
from drafters.tree_drafter import TreeDrafter
from model import Transformer, chain_ancestors, make_nodes
from model_config import ModelConfig
from tokenizer import Tokenizer
from tree import DynamicTree, TreeTables


class DraftModelDrafter(TreeDrafter):
    """Drafts chains, static and dynamic trees with a small LLM, under both verification rules.

    Row i of its cache holds token i. Rows up to the root stay. A step feeds the tokens accepted last again, always in
    D + 1 rows that overwrite what the last tree left behind. The rows of the tree follow and never survive.
    """

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
        super().__init__(tree, target.config.hidden_size, (), shared_noise, multi_round)
        check_vocabulary(target.config, model.config)
        if any(0 < window <= tree.D for window in model.config.windows):
            raise ValueError(f"the draft model attends {max(model.config.windows)} tokens, less than the tree is deep.")
        self.model = model
        self.slots = slots + 1 + self.scratch
        self.cache = model.new_cache(batch_size, self.slots)

    def buffers(self) -> list[Tensor]:
        return [self.cache]

    def bytes_per_step(self, model: Transformer) -> float:
        """The whole draft model is read once per forward."""
        return sum(self.model.weight_bytes(width) for width in (self.D + 1, *self.level_widths()))

    def prefill(self, row: int, tokens: Tensor, features: Tensor, start: Tensor) -> None:
        self._chain(tokens[:, :-1], start, self.cache[:, :, row : row + 1], None)

    def _chain(self, tokens: Tensor, start: Tensor, cache: Tensor, block: Callable | None) -> Tensor:
        B, T = tokens.shape
        depth = torch.arange(T, device=tokens.device).expand(B, T)
        nodes = self.model.nodes(start, depth, chain_ancestors(B, T, tokens.device), self.slots)
        return self.model(tokens, nodes, cache, block=block)[0]

    def _extend(self, inputs: DraftInput) -> Tensor:
        start = inputs.n - inputs.count + 1
        row = torch.arange(inputs.features.shape[1], device=start.device)
        where = (start[:, None] + row).clamp(max=inputs.tokens.shape[1] - 1)
        output = self._chain(inputs.tokens.gather(1, where), start, self.cache, inputs.parts.block)
        last = (inputs.count - 1)[:, None, None].expand(-1, 1, output.shape[-1])
        return output.gather(1, last)

    def _level(self, inputs: DraftInput, depth: int, first: int, tokens, feature, visible) -> Tensor:
        start = inputs.n + 1
        positions = (inputs.n + depth)[:, None].expand(tokens.shape)
        nodes = make_nodes(self.model.rotary, start, positions, start + first, visible, self.slots)
        return self.model(tokens, nodes, self.cache, block=inputs.parts.block)[0]

    def predict(self, output: Tensor) -> Tensor:
        return self.model.logits(output)


def check_vocabulary(
    target: ModelConfig, draft: ModelConfig, tokenizers: tuple[Tokenizer | None, Tokenizer | None] = (None, None)
) -> None:
    """Raise ValueError unless both models number the same pieces.

    The sizes of the vocabularies are compared, and the tokenizers (the target's, the draft's) where both exist.
    """
    if target.vocab_size != draft.vocab_size:
        raise ValueError(
            f"the draft model has {draft.vocab_size:,} tokens, the target {target.vocab_size:,}; use a draft model of "
            "the same family."
        )
    if None in tokenizers:
        return
    ours, theirs = (tokenizer.pieces for tokenizer in tokenizers)
    different = [i for i in sorted(ours.keys() | theirs.keys()) if ours.get(i) != theirs.get(i)]
    if different:
        i = different[0]
        raise ValueError(
            f"the draft model's token {i} is {theirs.get(i)!r:.40}, the target's {ours.get(i)!r:.40} "
            f"({len(different):,} differ); use a draft model of the same family."
        )
