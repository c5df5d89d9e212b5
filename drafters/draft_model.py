"""A small LLM of the same vocabulary as the drafter."""

import torch
from torch import Tensor

from decoding.drafter import UNCOMPILED, StepParts
from drafters.trees import DEFAULT_RULE, DraftRule, FedRows, TreeDrafter
from families.config import ModelConfig
from model import Transformer, chain_ancestors
from text.tokenizer import Tokenizer
from tree import Trees
from weights.heads import same_but_padding


class DraftModelDrafter(TreeDrafter):
    """Drafts chains, static and dynamic trees with a small LLM, under both verification rules."""

    lead = 1

    def __init__(
        self, target: Transformer, model: Transformer, tree: Trees, batch_size: int, slots: int,
        rule: DraftRule = DEFAULT_RULE,
    ):  # fmt: skip
        """The other arguments are those of TreeDrafter."""
        super().__init__(model, target.config.hidden_size, (), tree, batch_size, slots, rule)
        self.model = model
        self.target_vocab = target.config.vocab_size
        if model.config.vocab_size < self.target_vocab:  # rows that its own vocabulary has not are another padding
            self.draft_ids = torch.arange(model.config.vocab_size, device=target.device)
        self.model_window = max(model.config.windows)
        if any(0 < window <= self.D for window in model.config.windows):
            raise ValueError(f"the draft model attends {self.model_window} tokens, less than the tree is deep.")

    def bytes_per_step(self) -> float:
        """The whole draft model is read once per forward."""
        return sum(self.model.weight_bytes(width) for width in (self.D + 1, *self.level_widths()))

    def prefill(self, row: int, tokens: Tensor, features: Tensor, start: Tensor, keep: Tensor) -> None:
        T, device = features.shape[1], tokens.device
        depth = torch.arange(T, device=device)[None]
        nodes = self.model.nodes(start, depth, chain_ancestors(1, T, device), self.slots, chain=True)
        self._forward(FedRows(tokens[:, :-1], features, nodes), self.cache.narrow(-4, row, 1), UNCOMPILED)

    def _forward(self, fed: FedRows, cache: Tensor, parts: StepParts) -> Tensor:
        tokens = fed.tokens if self.draft_ids is None else fed.tokens.clamp(max=len(self.draft_ids) - 1)
        return self.model(tokens, fed.nodes, (cache,), layers=parts.layers)[0]

    def predict(self, output: Tensor) -> Tensor:
        return self.model.logits(output)[..., : self.target_vocab]


def check_vocabulary(
    target: ModelConfig, draft: ModelConfig, tokenizers: tuple[Tokenizer | None, Tokenizer | None] = (None, None)
) -> str:
    """Raise ValueError unless both models number the same pieces.

    The tokenizers (the target's, the draft's) are compared where both know a number. Without them the sizes of the
    vocabularies may differ by a padding. Returns a note if that is only assumed.
    """
    pair = f"{draft.vocab_size:,} tokens, the target {target.vocab_size:,}"
    if None in tokenizers:
        if not same_but_padding(draft.vocab_size, target.vocab_size):
            raise ValueError(f"the draft model has {pair}; use a draft model of the same family.")
        note = f"the draft model has {pair}: taken as another padding of the same vocabulary"
        return note if draft.vocab_size != target.vocab_size else ""
    ours, theirs = (tokenizer.pieces for tokenizer in tokenizers)
    different = [i for i in sorted(ours.keys() & theirs.keys()) if ours[i] != theirs[i]]
    if different:
        i = different[0]
        first = f"token {i} is {theirs[i]!r:.40}, the target's {ours[i]!r:.40} ({len(different):,} differ)"
        raise ValueError(f"the draft model's {first}; use a draft model of the same family.")
    return ""
