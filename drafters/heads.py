"""Draft heads: what they have of their target, and drafting trees with one."""

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

import kernels
from drafters.trees import TreeDrafter
from model import RotaryTable, Transformer, weight_bytes
from tree import Trees, check_width
from weights.quantized import QuantLinear, lm_head_rows


class DraftHead(nn.Module):
    """A draft head bound to a target.

    `config` says what it computes, and `draft_ids` [Vd] which of the target's tokens it can draft (None: all). `lm_head`
    is None if it shares the target's.
    """

    def bind(self, target: Transformer, draft_ids: Tensor | None) -> None:
        """Take what follows from the target: the draft vocabulary, and positions."""
        layer = self.config.layer
        self.register_buffer("draft_ids", draft_ids)
        self.rotary = RotaryTable([(layer.rope, layer.head_dim)], target.config.max_positions)
        object.__setattr__(self, "target", target)  # the head does not own it, so it stays out of the state dict

    @property
    def vocab_size(self) -> int:
        """Number of tokens the head can draft (Vd)."""
        return self.config.layer.vocab_size if self.draft_ids is None else self.draft_ids.numel()

    @property
    def feature_size(self) -> int:
        """The size of the target's features per token: H, or taps x H."""
        return self.config.target_hidden_size * max(1, len(self.config.taps))

    def finish(self) -> None:
        """Make what follows from the loaded weights. Call it after loading, and before anything is packed.

        That is the LM head of a trimmed draft vocabulary (FR-Spec): rows of the target's.
        """
        if self.draft_ids is not None and not self.config.has_lm_head:
            rows = lm_head_rows(self.target, self.draft_ids).to(self.target.dtype)
            self.lm_head = nn.Linear(*rows.shape[::-1], bias=False, device="meta")
            self.lm_head.weight = nn.Parameter(rows, requires_grad=False)

    def bytes_read(self) -> float:
        """Bytes of weights that a forward reads: its own, and the target's LM head if this head has none."""
        return weight_bytes(self) + (self.target.lm_head_bytes() if self.lm_head is None else 0)

    def normed(self, output: Tensor) -> Tensor:
        """What the LM head reads of an output."""
        return output

    def narrow_logits(self, output: Tensor) -> Tensor:
        """output [..., H] -> draft logits [..., Vd], in the dtype that the LM head computes in."""
        output = self.normed(output)
        if self.lm_head is None:
            return self.target.narrow_logits(output)
        logits = self.lm_head(output)
        return logits if self.config.has_lm_head else self.target.scaled(logits)  # of rows of the target's LM head

    def top(self, output: Tensor, count: int) -> kernels.TopK | None:
        """The `count` best of `narrow_logits` where the LM head's kernel finds them without storing the logits."""
        target = self.target.config
        if not self.config.has_lm_head and (target.logits_multiplier != 1 or target.logits_cap):
            return None  # the target's logits are not those of its LM head
        linear = self.lm_head or self.target.lm_head
        if not isinstance(linear, QuantLinear) or linear.packed is None or linear.packed.layout != "planes":
            return None
        return kernels.packed_topk(self.normed(output), linear.packed, count)


class HeadDrafter(TreeDrafter):
    """Drafts trees with a draft head. What its cache holds of a token is made of the token and of features alone."""

    def __init__(self, head: DraftHead, tree: Trees, *how: Any, **more: Any):
        """As TreeDrafter. ValueError if the tree is too wide."""
        check_width(tree, head.vocab_size)
        super().__init__(head, head.feature_size, head.config.taps, tree, *how, **more)
        self.head, self.draft_ids = head, head.draft_ids

    def prefill(self, row: int, tokens: Tensor, features: Tensor, start: Tensor, keep: Tensor) -> None:
        count, device = features.shape[1], features.device
        level, first = torch.arange(count, device=device), torch.zeros_like(keep)
        if 0 < self.ring < count:  # a ring has no room for more
            level = level[: self.kept]
            first = (keep - self.kept).clamp(min=0)
            features = features.index_select(1, first + level)
        tokens = tokens.index_select(1, first + 1 + level)
        ring = self.ring > 0
        how = self.rotary, self.slots, 0, None, None, 0, None, ring
        _, slots, cos, sin = kernels.place_rows(start + first, level[None], *how)[:4]
        if ring:  # padding must not take the place of what is needed
            slots = slots.where(first + level < keep, self.ring)
        self.head.absorb(tokens, features, cos, sin, slots, self.cache.narrow(-4, row, 1))

    def predict(self, output: Tensor) -> Tensor:
        return self.head.narrow_logits(output)

    def bytes_per_step(self) -> float:
        """Every forward reads the head, and the target's LM head unless it has its own.

        A pruned tree has a first forward and rarely all of the others. Only the first one is counted.
        """
        forwards = 1 if self.p_min else 1 + len(self.level_widths())
        return forwards * self.head.bytes_read()
