"""TODO."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.medusa import MedusaDrafter, MedusaHeads, load_medusa
from model import Transformer
from support.files import write_json
from training.data import Batch
from training.drafters import SETTINGS, describe, fit, open_target, output_weight, refuse_if_worse
from weights.medusa import MEDUSA_FILES, save_medusa

DECAY = 0.8


def new_heads(target: Transformer, args: argparse.Namespace) -> MedusaHeads:
    """Untrained heads: blocks that pass the hidden state on, LM heads equal to the target's."""
    heads = MedusaHeads(target, args.medusa_heads, args.own_lm_head).to(target.device, torch.float32)
    for head in heads:
        torch.nn.init.zeros_(head[0].linear.weight)
        torch.nn.init.zeros_(head[0].linear.bias)
        if args.own_lm_head:
            head[1].weight.data.copy_(output_weight(target))
    return heads


def medusa_loss(
    heads: MedusaHeads, weight: Tensor, target: Transformer, batch: Batch, count: float, kind: str
) -> tuple[Tensor, Tensor]:
    """(loss, agreement with the target's argmax by head), over rows whose token k + 2 further on counts, / `count`.

    weight [V, H]: the LM head of heads without their own (a quantized one passes no gradient)."""
    tokens, mask = batch.tokens, batch.mask
    with torch.no_grad():
        hidden = target.forward_train(tokens)[0].float()
        truth = target.logits(hidden.to(target.dtype)).float()
    total, hits = torch.zeros((), device=tokens.device), []
    for k, head in enumerate(heads):
        ahead = k + 2
        keep = mask[:, ahead:]
        x = head(hidden[:, :-ahead][keep])
        logits = x if heads.own_lm_head else F.linear(x, weight)
        law = truth[:, ahead - 1 : -1][keep]  # of the token `ahead` further on
        if kind == "kl":
            loss = F.kl_div(logits.log_softmax(-1), law.log_softmax(-1), reduction="sum", log_target=True)
        else:
            loss = F.cross_entropy(logits, tokens[:, ahead:][keep], reduction="sum")
        total = total + DECAY**k * loss / count
        hits.append((logits.argmax(-1) == law.argmax(-1)).sum() / count)
    return total, torch.stack(hits)


def train(args: argparse.Namespace) -> dict:
    """Train, measure what is written, publish. Returns what CARD.json holds and the loss curve."""
    target, data, held, evaluation, say = open_target(args)
    if args.length < args.medusa_heads + 3:
        raise ValueError(f"--length {args.length} is too short for {args.medusa_heads} heads.")
    heads, weight = new_heads(target, args), output_weight(target)

    def drafter(directory: Path) -> MedusaDrafter:
        return MedusaDrafter(load_medusa(directory, target), evaluation.tables())

    out, old = Path(args.out), None
    MedusaDrafter(heads, evaluation.tables())  # refuses a tree that does not fit before time is spent
    if any((out / name).exists() for name in MEDUSA_FILES) and not args.force:
        old = evaluation.tau(drafter(out))
    size = sum(p.numel() for p in heads.parameters())
    say(f"{args.medusa_heads} heads, {size / 1e6:.2f} M parameters; {int(data.mask.sum()):,} training tokens")
    settings = {name: getattr(args, name) for name in (*SETTINGS, "medusa_heads", "own_lm_head")}
    trained = fit(args, heads, lambda batch, count: medusa_loss(heads, weight, target, batch, count, args.loss), data,
                  settings, say)  # fmt: skip
    if trained is None:
        return {"step": args.pause_at}
    curve, seconds = trained
    save_medusa(heads.state_dict(), Path(args.work) / "export")
    card = describe(args, target, heads, data, held) | {
        "format": "Medusa heads (medusa_lm_head layout)",
        "heads": args.medusa_heads,
        "own_lm_head": args.own_lm_head,
        "minutes": round(seconds / 60, 1),
        "last_loss": float(np.mean(curve[-50:])),
    }
    card |= evaluation.measure(lambda: drafter(Path(args.work) / "export"))
    say(f"held-out tau {card['tau_greedy']:.2f}, at T = 1 {card['tau_t1']:.2f} (tree {args.tree})")
    refuse_if_worse(old, card, args)
    save_medusa(heads.state_dict(), out)
    write_json(out / "CARD.json", card)
    say(f"wrote {out}")
    return card | {"loss_curve": curve}
