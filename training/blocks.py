"""Training the published heads that draft a block at once: DFlash, DSpark, DFlash2 and JetSpec.

A sequence is run once, and blocks stand behind random tokens of it, the anchors. A block sees the text before its anchor
and itself. Its slots count while the tokens that they predict, and all before them, are the model's answer.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from drafters.block import BlockHead, slot_masks
from families.config import ModelConfig
from loading.drafting import block_tree
from model import Attention, Transformer
from training.data import Batch, TokenData
from training.drafters import HeadTraining, check_shares, check_taps
from training.loop import Recipe, init_weights, recipe_with
from training.losses import Rows, TargetRows, gumbel_draws, in_chunks, overlap, soft_loss, with_noise
from weights.block_heads import MARKOV, BlockConfig, save_block
from weights.heads import layers_like
from weights.quantized import lm_head_rows

KINDS = ("dflash", "jetspec", "dspark", "dflash2")
# Slots of a block at least -> over how many slots the weight falls to 1 / e (DFlash).
GAMMA = {16: 7.0, 10: 5.0, 2: 4.0}


def attend_blocks(
    attention: Attention, turn: tuple[Tensor, Tensor], text: tuple[Tensor, Tensor], seen: Tensor, own: Tensor, x: Tensor
) -> Tensor:
    """The attention of A blocks of S rows in each sequence, x [B A, S, in] -> [B A, S, H], with gradients.

    turn: cos and sin [B, A S, hd / 2] of the rows. text: its keys and values [B, Hkv, T, hd]. seen: bool [B, A, 1 or S,
    T], which of these a row sees; own: bool [S, S], and which rows of its block.
    """
    (B, A), S, T = seen.shape[:2], x.shape[1], seen.shape[-1]
    group = attention.heads // attention.kv_heads
    q, *block = attention.project(x.unflatten(0, (B, A)).flatten(1, 2), *turn)
    k, v, keys, values = (t.repeat_interleave(group, 1) for t in (*block, *text))
    k, v = (t.unflatten(2, (A, S)) for t in (k, v))
    before = (q @ keys.mT).unflatten(2, (A, S)).masked_fill(~seen[:, None], -math.inf)
    within = (q.unflatten(2, (A, S)) @ k.mT).masked_fill(~own, -math.inf)
    weights = (torch.cat((before, within), -1) * attention.scale).softmax(-1)
    out = (weights[..., :T].flatten(2, 3) @ values).unflatten(2, (A, S)) + weights[..., T:] @ v
    return attention.o(out.permute(0, 2, 3, 1, 4).flatten(3)).flatten(0, 1)


class TrainBlockHead(BlockHead):
    """A block head in training, with an estimate of its acceptance if the kind has one."""

    def __init__(self, config: BlockConfig, target: Transformer, confidence: bool):
        super().__init__(config, target)
        r = config.rank if config.markov else 0
        self.confidence = nn.Linear(config.layer.hidden_size + r, 1) if confidence else None
        self.register_buffer("target_head", lm_head_rows(target).to(target.dtype), persistent=False)

    @torch.no_grad()
    def init(self, seed: int) -> None:
        """Random matrices; layers, convolutions and corrections begin as if they were not there."""
        init_weights(self, torch.Generator().manual_seed(seed))
        for name, p in self.named_parameters():
            if name.endswith(("successor.weight", "projection.weight", "bias")):
                p.zero_()
            elif name.endswith(".base"):
                p.zero_()[:, 0] = 1

    def predict(self, rows: Tensor) -> Tensor:
        """The logits [M, V] of rows of `judged`: those that are corrected, unless only a shortlist shall be."""
        hidden, factor, _ = self.parts(rows)
        z = self.scaled(F.linear(hidden.to(self.target_head.dtype), self.target_head).float())
        return z + factor @ self.successor.weight.T if self.config.markov in MARKOV else z

    def parts(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of `judged` as what the LM head reads, the factors, and the logits of the confidence."""
        return rows.split((self.config.layer.hidden_size, self.config.rank, int(self.confidence is not None)), -1)

    def judged(self, hidden: Tensor, before: Tensor) -> Tensor:
        """All that the loss reads of slots [B, A, D, H] behind these tokens [B, A, D]: rows [B, A, D, H + r + 1]."""
        out, state = [hidden], None
        if self.config.markov:
            mixed, factors = self.mixed(hidden), []
            for d in range(hidden.shape[2]):
                given = before[:, :, d].flatten()[:, None], mixed[:, :, d].flatten(0, 1), state
                factor, state = self.factors(*given)
                factors.append(factor.view(*hidden.shape[:2], -1))
            out.append(torch.stack(factors, 2))
        if self.confidence is not None:
            known = (hidden, self.predecessor(before)) if self.config.markov else (hidden,)
            out.append(self.confidence(torch.cat(known, -1)))
        return torch.cat(out, -1)

    def forward_blocks(self, tokens: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """What the LM head reads of the slots that draft [B, A, depth, H], for anchors [B, A] of tokens [B, T] with these
        features [B, T, F]."""
        config, (B, A), T = self.config, anchors.shape, tokens.shape[1]
        S, place = config.slots, torch.arange(T, device=tokens.device)
        context = self.hidden_norm(self.fc(features))
        turn = self.rotary(place[None].expand(B, -1))
        positions = anchors[..., None] + torch.arange(S, device=tokens.device)
        turn_block = self.rotary(positions.flatten(1))
        blocks = torch.full((B, A, S), config.mask_id, device=tokens.device)
        blocks[..., 0] = tokens.gather(1, anchors)
        x = self.target.embed_tokens(blocks.flatten(0, 1)).to(context.dtype) * config.embedding_scale  # [B A, S, H]
        full, near = slot_masks(config, tokens.device)
        for layer in self.layers:
            attention, window = layer.attention, layer.attention.window
            text = attention.project(context, *turn)[1:]
            seen = (place < anchors[..., None])[:, :, None].expand(-1, -1, S, -1)
            if window:
                seen = seen & (positions[..., None] - place < window)
            attend = partial(attend_blocks, attention, turn_block, text, seen, (near if window else full)[0])
            if config.conv_taps:
                x = layer.attention_conv.around(attend, layer.input_norm(x), x)
                x = layer.mlp_conv.around(layer.mlp, layer.post_norm(x), x)
            else:
                x = x + attend(layer.input_norm(x))
                x = layer.mlp(layer.post_norm(x), x)
        x = self.norm(x).unflatten(0, (B, A))
        return x if config.slot0 else x[:, :, 1:]


def slot_loss(kind: str, head: TrainBlockHead, labels: Tensor, noise_share: float) -> Callable[[Rows], Tensor]:
    """The loss of a kind, summed over rows. labels [M]: the token of the text that is to be predicted, of every row.

    DFlash: the cross-entropy with the text. JetSpec: with the target's distribution. DSpark: 0.1 of the first, 0.9 of the
    distance sum |q - p| of the two distributions, and the cross-entropy of the confidence with what is accepted. DFlash2:
    these without the confidence, and the cross-entropy of the selector over its shortlist.
    """

    def loss(rows: Rows) -> Tensor:
        label, (_, factor, confidence) = labels[rows.which], head.parts(rows.output)
        total = soft_loss(rows) if kind == "jetspec" else F.cross_entropy(rows.logits, label, reduction="sum")
        if kind in ("dspark", "dflash2"):
            accepted = overlap(rows)  # the distance is 2 - 2 * accepted
            total = 0.1 * total + 1.8 * (1 - accepted).sum()
            if kind == "dflash2":
                total = total + selector_loss(rows.logits, factor, head, label)
            elif head.confidence is not None:
                total = total + F.binary_cross_entropy_with_logits(confidence[:, 0], accepted.detach(), reduction="sum")
        return with_noise(total, rows, noise_share)

    return loss


def selector_loss(logits: Tensor, factor: Tensor, head: TrainBlockHead, label: Tensor) -> Tensor:
    """The cross-entropy of corrected shortlists for the label, which replaces the worst candidate where it is missing."""
    best = logits.detach().topk(head.config.shortlist, -1).indices
    missing = (best != label[:, None]).all(-1)
    best[:, -1] = label.where(missing, best[:, -1])
    scores = logits.gather(1, best) + (factor[:, None] * head.successor(best)).sum(-1)
    return F.cross_entropy(scores, (best == label[:, None]).int().argmax(-1), reduction="sum")


def draw_anchors(keep: Tensor, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows behind which blocks are drafted, int64 [B, A] ascending, and which of these numbers count, bool [B, A].

    keep [B, T]: the rows that may be drawn. share: of them that are drawn at random.
    """
    order = torch.rand(keep.shape, generator=generator, device=keep.device).masked_fill(~keep, 2.0)
    wanted = (keep.sum(1) * share).ceil().long()
    most = max(1, int(wanted.max()))
    drawn = order.argsort(dim=1, stable=True)[:, :most]
    drawn = drawn.where(torch.arange(most, device=keep.device) < wanted[:, None], keep.shape[1])
    anchors = drawn.sort(1).values
    return anchors.clamp(max=keep.shape[1] - 1), anchors < keep.shape[1]


def loss_blocks(
    head: TrainBlockHead, batch: Batch, target: TargetRows, args: argparse.Namespace, count: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loss of blocks behind random anchors, divided by the weights that `count` anchors would have, and by slot the
    share that agrees with the target's most likely token.

    A slot is corrected by the true token before it. An anchor and the token after it count.
    """
    tokens, mask, T = batch.tokens, batch.mask.bool(), batch.tokens.shape[1]
    keep = F.pad(mask[:, :-1] & mask[:, 1:], (0, 1))
    anchors, counted = draw_anchors(keep, args.anchor_share, generator)
    hidden = head.forward_blocks(tokens, target.features, anchors)
    depth = head.config.depth
    places = (anchors[..., None] + torch.arange(depth + 1, device=tokens.device)).clamp(max=T - 1)
    known = tokens[:, None].expand(-1, anchors.shape[1], -1).gather(2, places)
    rows = head.judged(hidden, known[..., :depth])
    outputs = []
    for d in range(1, depth + 1):  # the token at anchor + d
        counted = counted & (anchors + d < T) & mask.gather(1, places[..., d])
        row = torch.arange(len(tokens), device=tokens.device)[:, None] * T + places[..., d - 1]
        outputs.append((rows[:, :, d - 1][counted], row[counted]))
    labels = tokens.roll(-1, 1).flatten()
    loss = slot_loss(args.kind, head, labels, args.noise_share)
    best = None if target.best is None else target.best.flatten()
    decay = math.exp(-1 / args.gamma)
    draws = partial(gumbel_draws, generator=generator) if args.noise_share else None
    truth = target.hidden_states.flatten(0, 1)
    total, hits = in_chunks(head, head.predict, outputs, truth, best, loss, True, decay, draws)
    weights, count = sum(decay**d for d in range(depth)), count * args.anchor_share
    return total / (count * weights), hits / count


def block_config(target: ModelConfig, args: argparse.Namespace) -> BlockConfig:
    """A head of the target's geometry, with the options' overrides. ValueError for options that do not fit the target."""
    L, V, n = target.num_hidden_layers, target.vocab_size, args.layers
    default = sorted({round(2 + i * (L - 4) / max(1, n - 1)) for i in range(n)})
    taps = args.taps or tuple(min(max(tap, 0), L - 1) for tap in default)
    check_taps(taps, L - 1)
    layer = layers_like(target, "qwen3", n, V, target.max_position_embeddings, qk_norm=True)
    how = {
        "dflash": {},
        "jetspec": {"causal": True, "causal_window": True},
        "dspark": {"slot0": True, "markov": args.markov, "rank": args.rank},
        "dflash2": {"markov": "selector", "rank": args.rank, "conv_taps": 2, "conv_group": 16},
    }[args.kind]
    if how.get("conv_group") and target.hidden_size % 16:
        raise ValueError(f"--kind dflash2 needs a multiple of 16 channels, and this model has {target.hidden_size}.")
    how |= {"mask_id": V - 1, "shortlist": min(16, V), "target_vocab_size": V}
    return BlockConfig(layer, target.hidden_size, taps, args.slots, **how)


class BlockTraining(HeadTraining):
    """A published block head in training."""

    def __init__(self, args: argparse.Namespace, target: Transformer):
        super().__init__(args, target)
        check_shares(args, "noise_share", "anchor_share", positive=("anchor_share",))
        self.config = block_config(target.config, args)
        published = 4.0 if args.kind == "dspark" else next(g for s, g in GAMMA.items() if args.slots >= s)
        args.gamma = args.gamma or published
        args.tree = args.tree or block_tree(self.config)
        self.title = self.format = f"{self.config.kind} head"
        self.recipe = recipe_with(args, Recipe("muon", lr=0.02, side_lr=1e-3, warmup=20, cooldown=0.6))

    def build(self, data: TokenData) -> TrainBlockHead:
        head = TrainBlockHead(self.config, self.target, self.args.kind == "dspark")
        head.init(self.args.seed)
        return self.ready(head, data)

    def loss(self, module: TrainBlockHead, batch: Batch, count: float) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(batch.tokens.device).manual_seed(self.args.seed + batch.numbers[0])
        return loss_blocks(module, batch, self.rows(module, batch), self.args, count, generator)

    def write(self, module: TrainBlockHead, directory: Path) -> None:
        tensors = {name: t.to("cpu", torch.bfloat16) for name, t in module.state_dict().items()}
        names = ("weight", "bias") if module.confidence else ()
        confidence = {name: tensors.pop(f"confidence.{name}") for name in names}
        save_block(self.config, tensors, directory, confidence)

    def card(self) -> dict[str, Any]:
        names = "kind gamma noise_share anchor_share".split()
        shape = {name: vars(self.config)[name] for name in ("slots", "taps", "markov", "rank", "mask_id")}
        return {**{name: vars(self.args)[name] for name in names}, **shape, "recipe": asdict(self.recipe)}
