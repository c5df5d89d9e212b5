"""TODO."""

from __future__ import annotations

import argparse
import copy
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.draft_model import DraftModelDrafter
from model import ModelConfig, Transformer
from support.files import write_json
from training.data import Batch
from training.drafters import (
    SETTINGS,
    TOKENIZER_FILES,
    describe,
    fit,
    open_target,
    output_weight,
    refuse_if_worse,
)
from training.optim import init_weights
from weights.checkpoint import load_model
from weights.hf import save_hf

# ------------------------------------------------------------------ the draft LLM


def draft_config(target: ModelConfig, args: argparse.Namespace) -> ModelConfig:
    """A LLaMA of the target's vocabulary with tied embeddings; ValueError for sizes that do not divide."""
    heads = args.heads or max(1, args.hidden // 64)
    if args.hidden % heads or (args.hidden // heads) % 2:
        raise ValueError(
            f"--hidden {args.hidden} over {heads} heads must give an even head size; change --heads."
        )
    return ModelConfig(
        model_type="llama",
        hidden_size=args.hidden,
        intermediate_size=args.intermediate or 3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        head_dim=args.hidden // heads,
        vocab_size=target.vocab_size,
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=target.rms_norm_eps,
        tie_word_embeddings=True,
        dtype="bfloat16",
        bos_token_id=target.bos_token_id,
        eos_token_ids=target.eos_token_ids,
    )


def new_draft(target: Transformer, args: argparse.Namespace) -> Transformer:
    """An untrained draft on the target's device. Its embedding is the target's LM head in its leading directions: the
    tokens' neighbourhoods need not be learned again."""
    torch.manual_seed(args.seed)
    draft = Transformer(draft_config(target.config, args))
    init_weights(draft, torch.Generator().manual_seed(args.seed))
    if args.hidden <= target.config.hidden_size:
        left, sizes, _ = torch.svd_lowrank(output_weight(target).cpu(), args.hidden, niter=4)
        rows = left * sizes
        draft.embed_tokens.weight.data.copy_(rows / rows.norm(dim=1).mean())  # first logits spread by about 1
    draft.rotary.build(target.device)
    return draft.to(target.device)


def distillation_loss(
    draft: Transformer, target: Transformer, batch: Batch, count: float, kind: str
) -> tuple[Tensor, Tensor]:
    """(loss, agreement of the argmaxes [1]) over the rows whose next token counts, divided by `count`.

    kl: KL(target || draft) of the whole law, DistillSpec's forward KL; ce: cross-entropy of the text. In float32."""
    tokens, keep = batch.tokens, batch.mask[:, 1:]
    with torch.no_grad():
        truth = target.logits(target.forward_train(tokens[:, :-1])[0][keep]).float()
    logits = draft.logits(draft.forward_train(tokens[:, :-1])[0][keep])
    if kind == "kl":
        laws = logits.log_softmax(-1), truth.log_softmax(-1)
        loss = F.kl_div(*laws, reduction="sum", log_target=True)
    else:
        loss = F.cross_entropy(logits, tokens[:, 1:][keep], reduction="sum")
    return loss / count, (logits.argmax(-1) == truth.argmax(-1)).sum()[None] / count


def write_draft(draft: Transformer, directory: Path, source: str | Path) -> None:
    """A model directory in bfloat16 with the target's tokenizer files."""
    save_hf(copy.deepcopy(draft).to(torch.bfloat16), directory)
    for name in TOKENIZER_FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, directory / name)


def train(args: argparse.Namespace) -> dict:
    """Train, measure what is written, publish. Returns what CARD.json holds and the loss curve."""
    target, data, held, evaluation, say = open_target(args)
    draft, B = new_draft(target, args), len(evaluation.prompts)

    def drafter(directory: Path) -> DraftModelDrafter:
        model = load_model(directory, target.device, target.dtype)
        return DraftModelDrafter(
            target, model, evaluation.tables(), B, evaluation.ctx + evaluation.tree.N + 1
        )

    out = Path(args.out)
    old = None
    if (out / "config.json").exists() and not args.force:
        old = evaluation.tau(drafter(out))
    size = sum(p.numel() for p in draft.parameters())
    say(f"draft model of {size / 1e6:.2f} M parameters; {int(data.mask.sum()):,} training tokens")
    settings = {
        name: getattr(args, name) for name in (*SETTINGS, "layers", "hidden", "intermediate", "heads")
    }
    trained = fit(args, draft, lambda batch, count: distillation_loss(draft, target, batch, count, args.loss), data,
                  settings, say)  # fmt: skip
    if trained is None:
        return {"step": args.pause_at}
    curve, seconds = trained
    draft.eval().requires_grad_(False)
    write_draft(draft, Path(args.work) / "export", args.checkpoint)
    card = describe(args, target, draft, data, held) | {"format": "draft LLM (Hugging Face layout)"}
    card |= {"minutes": round(seconds / 60, 1), "last_loss": float(np.mean(curve[-50:]))}
    card |= evaluation.measure(lambda: drafter(Path(args.work) / "export"))
    say(f"held-out tau {card['tau_greedy']:.2f}, at T = 1 {card['tau_t1']:.2f} (tree {args.tree})")
    refuse_if_worse(old, card, args)
    write_draft(draft, out, args.checkpoint)
    write_json(out / "CARD.json", card)
    say(f"wrote {out}")
    return card | {"loss_curve": curve}
