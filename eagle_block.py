"""The E-block: an EAGLE-3 head that drafts a whole block of tokens without running once per level.

Its first slot is EAGLE-3's own first draft, from the feature before the root and the root's embedding. The other slots
are masks behind it: a learned vector stands in place of the embedding, and a learned map of what EAGLE-3's row reads or
gives in place of the feature. The forms of `weights.heads.FORMS` differ in this: the masks read the feature ("once") or
the output of that row, and go through EAGLE-3's layer ("once", "twice") or through one of their own ("own").

All slots share EAGLE-3's LM head. A mask does not know the tokens before it, so that they correct its logits: the factor
of a token, times what the mask gives, is mapped into what the LM head reads. Both maps are tied to the embedding and to
the LM head, and become the tables of `block_draft.BlockDrafter`.
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from block_draft import BlockDrafter, attend_blocks
from drafters.base import DraftInput, take_rows
from drafters.tree_drafter import TreeDrafter
from eagle_draft import EagleDrafter, EagleHead, EagleLayer
from model import Nodes, Transformer, chain_ancestors, linear
from weights.heads import EagleConfig
from weights.quantized import lm_head_rows


class EagleBlockHead(EagleHead):
    """An EAGLE-3 head with masks."""

    def __init__(self, config: EagleConfig, target: Transformer, draft_vocab: Tensor | None = None):
        super().__init__(config, target, draft_vocab)
        H, masks = config.layer.hidden_size, config.slots - 1
        self.mask_layer = EagleLayer(config) if config.form == "own" else None
        if self.mask_layer is not None:
            self.mask_layer.input_norm = None  # it would norm embeddings
        self.mask_embed = nn.Parameter(torch.empty(masks, H))
        self.mask_feature = nn.Linear(H, masks * H)
        self.markov_in = nn.Parameter(torch.empty(config.rank, H))
        self.markov_out = nn.Parameter(torch.empty(H, config.rank))
        self.mix = nn.Linear(H, config.rank)
        self.predecessor = self.successor = None  # the tables that `finish` makes

    @torch.no_grad()
    def init_masks(self, generator: torch.Generator) -> None:
        """Let masks begin as EAGLE-3's second step for a token like any other, and tokens correct nothing."""
        layer, H = self.layer, self.config.layer.hidden_size
        if self.mask_layer is not None:
            own = layer.state_dict()
            self.mask_layer.load_state_dict({name: own[name] for name in self.mask_layer.state_dict()})
        ids = self.draft_ids if self.draft_ids is not None else torch.arange(self.vocab_size)
        embedded = layer.input_norm(self.embed(ids.to(self.target.device)).to(layer.input_norm.weight))
        self.mask_embed.copy_(embedded.mean(0))
        self.mask_feature.weight.copy_(torch.eye(H).repeat(self.config.slots - 1, 1))
        nn.init.normal_(self.markov_in, std=H**-0.5, generator=generator)
        for tensor in (self.mask_feature.bias, self.markov_out, self.mix.weight):
            tensor.zero_()
        self.mix.bias.fill_(1.0)

    def finish(self) -> None:
        """Make the tables of the factors from the loaded weights."""
        super().finish()
        ids = torch.arange(self.target.config.vocab_size, device=self.target.device)
        before = torch.cat([self.factor_rows(part) for part in ids.split(4096)])
        rows = lm_head_rows(self)
        after = rows @ self.markov_out.to(rows.dtype)
        self.predecessor, self.successor = (
            nn.Embedding.from_pretrained(t.to(self.mask_embed)) for t in (before, after)
        )

    def factor_rows(self, tokens: Tensor) -> Tensor:
        """The factors [..., r] of tokens."""
        return self.layer.input_norm(self.embed(tokens).to(self.mask_embed.dtype)) @ self.markov_in.T

    def corrected(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """What the LM head reads of masks [..., H] behind these tokens [...], with gradients."""
        return hidden + (self.factor_rows(tokens) * self.mix(hidden)) @ self.markov_out.T

    def factors(self, tokens: Tensor, hidden: Tensor, state: None) -> tuple[Tensor, None]:
        """As `BlockHead.factors`."""
        return self.predecessor(tokens) * hidden[:, None], None

    def mixed(self, hidden: Tensor) -> Tensor:
        """What the slots [B, D, H] multiply the factors by. The first slot, which knows the root, is not corrected."""
        return F.pad(linear(self.mix, hidden[:, 1:]), (0, 0, 1, 0))

    def _normed(self, output: Tensor) -> Tensor:
        return output  # `norm` comes before the corrections

    def mask_inputs(self, source: Tensor) -> tuple[EagleLayer, Tensor, Tensor]:
        """The layer of the masks, their residual [B, A, masks, H], and what its attention reads [B, A, masks, 2H].

        source [B, A, H]: what EAGLE-3's rows read or give, as the form says.
        """
        layer = self.mask_layer or self.layer
        rows = linear(self.mask_feature, layer.hidden_norm(source)).unflatten(-1, (-1, source.shape[-1]))
        embed = self.mask_embed.to(rows.dtype).expand(*rows.shape[:2], -1, -1)
        return layer, rows, torch.cat((embed, rows), -1)

    def run_masks(self, source: Tensor, nodes: Nodes, kv: Tensor) -> Tensor:
        """What the LM head reads of masks [B, masks, H], with a cache. source [B, 1, H]."""
        layer, rows, joined = self.mask_inputs(source)
        x = layer.attention(joined[:, 0], nodes, kv, rows[:, 0].contiguous())
        return self.norm(layer.mlp(layer.post_norm(x), x))

    def forward_block(self, tokens: Tensor, feature: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Whole sequences with gradients: what the LM head reads of rows [B, T, H], and of masks [B, A, masks, H].

        tokens [B, T] are paired with feature [B, T, H]. Masks stand behind the rows anchors [B, A], each of which they
        see with all rows before it, and with the masks before them.
        """
        memory: list[tuple[Tensor, Tensor]] = []
        output = self.forward_train(tokens, feature, 0, memory)
        layer, rows, joined = self.mask_inputs(take_rows(feature if self.config.form == "once" else output, anchors))
        M, place = rows.shape[2], torch.arange(tokens.shape[1], device=tokens.device)
        positions = anchors[..., None] + 1 + torch.arange(M, device=tokens.device)
        seen = (place <= anchors[..., None])[:, :, None]
        own = chain_ancestors(1, M, tokens.device)[0]
        x = rows + attend_blocks(layer.attention, joined, self.rotary(positions.flatten(1)), memory[0], seen, own)
        return self.norm(output), self.norm(layer.mlp(layer.post_norm(x), x))

    @torch.no_grad()
    def draft_along(self, tokens: Tensor, features: Tensor, every: int) -> None:
        """As `BlockHead.draft_along`."""
        last = tokens.shape[1] - 1 - self.config.slots
        anchors = torch.arange(every, max(last, every + 1), every, device=tokens.device).expand(len(tokens), -1)
        rows, hidden = self.forward_block(tokens[:, 1:], self.fuse(features[:, :-1]), anchors)
        for part in (take_rows(rows, anchors)[:, :, None], hidden):
            self.narrow_logits(part)
        self.mix(hidden)


class EagleBlockDrafter(BlockDrafter):
    """Drafts with an E-block. Its cache is that of EAGLE, and the masks stand where EAGLE's tree would."""

    prefill, fuse, _forward = TreeDrafter.prefill, EagleDrafter.fuse, EagleDrafter._forward  # its rows are EAGLE's

    def _prepare(self) -> None:
        masks = self.head.config.slots - 1
        self.block_depth = torch.arange(masks, device=self.cache.device)[None]
        self.visible = chain_ancestors(1, masks, self.cache.device)

    def _hidden(self, inputs: DraftInput) -> Tensor:
        features, head = self._committed(inputs), self.head
        output = self._extend(inputs._replace(features=features))
        source = output
        if head.config.form == "once":
            source = self.fuse(take_rows(features, (inputs.count - 1)[:, None]))
        positions, slots, cos, sin, _ = self._place(inputs, self.block_depth)
        seen = self.visible.expand(len(inputs.n), -1, -1)
        hidden = head.run_masks(source, Nodes(cos, sin, positions, slots, inputs.n, seen, seen), self.cache)
        return torch.cat((head.norm(output), hidden), 1)
