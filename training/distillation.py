"""Training drafters that learn the target's distribution: small draft LLMs (DistillSpec) and Medusa heads (Medusa-1)."""

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.medusa import MedusaHeads, save_medusa
from families.config import ModelConfig
from layers.build import build_transformer
from model import Transformer
from training.data import Batch, TokenData
from training.drafters import DrafterTraining, drafter_parser
from training.loop import Recipe, init_weights
from weights.checkpoint import Checkpoint
from weights.hf import save_hf
from weights.quantized import lm_head_rows

MEDUSA_DECAY = 0.8  # of the loss, from one head to the next


def distillation_parser(name: str, doc: str) -> argparse.ArgumentParser:
    """The options of the commands that distil a draft LLM or Medusa heads."""
    p = drafter_parser(name, doc, steps=600, length=256, eval_every=0)
    p.add_argument("--lr", type=float, default=1.0, help="factor on the learning rates")
    p.add_argument("--loss", choices=("kl", "ce"), default="kl", help="the target's distribution, or text")
    return p


class DistillationTraining(DrafterTraining):
    """What draft LLMs and Medusa heads have in common: they learn the target's distribution, or the text."""

    def __init__(self, args: argparse.Namespace, target: Transformer):
        super().__init__(args, target)
        self.recipe = Recipe(lr=0.02 * args.lr, side_lr=2e-3 * args.lr, clip=1.0)

    def distance(self, logits: Tensor, target_logits: Tensor, tokens: Tensor) -> Tensor:
        """The loss of logits [n, V], summed over rows: KL(target || drafter), or cross-entropy of tokens [n]."""
        if self.args.loss == "ce":
            return F.cross_entropy(logits, tokens, reduction="sum")
        wanted = target_logits.log_softmax(-1)
        return F.kl_div(logits.log_softmax(-1), wanted, reduction="sum", log_target=True)

    def card(self) -> dict[str, Any]:
        return {"loss": self.args.loss, "lr": self.args.lr}


def draft_config(target: ModelConfig, args: argparse.Namespace) -> ModelConfig:
    """A LLaMA of the target's vocabulary with tied embeddings; ValueError for sizes that do not divide."""
    heads = args.heads or max(1, args.hidden // 64)
    if args.hidden % heads or (args.hidden // heads) % 2:
        raise ValueError(f"--hidden {args.hidden} over {heads} heads gives no even head size; change --heads.")
    same = ("vocab_size", "max_position_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_ids")
    return ModelConfig(
        model_type="llama",
        hidden_size=args.hidden,
        intermediate_size=args.intermediate or 3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        head_dim=args.hidden // heads,
        tie_word_embeddings=True,
        dtype="bfloat16",
        **{name: vars(target)[name] for name in same},
    )


class DraftModelTraining(DistillationTraining):
    """A draft LLM in training."""

    option = "draft_checkpoint"
    title = "draft model"
    format = "draft LLM (Hugging Face layout)"

    def __init__(self, args: argparse.Namespace, target: Transformer):
        super().__init__(args, target)
        self.config = draft_config(target.config, args)

    def build(self, data: TokenData) -> Transformer:
        """The embedding starts as the target's LM head in its leading directions.

        The neighbourhoods of the tokens need not be learned again then.
        """
        torch.manual_seed(self.args.seed)
        draft = build_transformer(self.config)
        init_weights(draft, torch.Generator().manual_seed(self.args.seed))
        if self.config.hidden_size <= self.target.config.hidden_size:
            lm_head = lm_head_rows(self.target).float().cpu()
            left, sizes, _ = torch.svd_lowrank(lm_head, self.config.hidden_size, niter=4)
            rows = left * sizes
            # Divided so that the first logits spread by about 1.
            draft.embed_tokens.weight.data.copy_(rows / rows.norm(dim=1).mean())
        draft.rotary.build(self.target.device)
        return draft.to(self.target.device)

    def loss(self, module: Transformer, batch: Batch, count: float) -> tuple[Tensor, Tensor]:
        """kl: KL(target || draft) of the whole distribution, DistillSpec's forward KL; ce: cross-entropy of the text."""
        keep = batch.mask[:, 1:]
        inputs = batch.tokens[:, :-1]
        with torch.no_grad():
            truth = self.target.logits(self.target.forward_train(inputs)[0][keep]).float()
        logits = module.logits(module.forward_train(inputs)[0][keep])
        loss = self.distance(logits, truth, batch.tokens[:, 1:][keep])
        return loss / count, (logits.argmax(-1) == truth.argmax(-1)).sum()[None] / count

    def write(self, module: Transformer, directory: Path) -> None:
        """A model directory with the target's tokenizer files and licence."""
        save_hf(copy.deepcopy(module).requires_grad_(False).to(torch.bfloat16), directory)
        Checkpoint.open(self.args.checkpoint).copy_texts(directory)


class MedusaTraining(DistillationTraining):
    """Medusa heads in training."""

    option = "medusa"
    format = "Medusa heads (medusa_lm_head layout)"

    def __init__(self, args: argparse.Namespace, target: Transformer):
        super().__init__(args, target)
        self.title = f"set of {args.medusa_heads} Medusa heads"
        if args.length < args.medusa_heads + 3:
            raise ValueError(f"--length {args.length} is too short for {args.medusa_heads} heads.")
        self.weight = lm_head_rows(target).float()  # [V, H]; a quantized LM head passes no gradient

    def build(self, data: TokenData) -> MedusaHeads:
        """Blocks that pass the hidden state on, and LM heads equal to the target's."""
        heads = MedusaHeads(self.target, self.args.medusa_heads, self.args.own_lm_head)
        for head in heads.to(self.target.device, torch.float32):
            torch.nn.init.zeros_(head[0].linear.weight)
            torch.nn.init.zeros_(head[0].linear.bias)
            if heads.own_lm_head:
                head[1].weight.data.copy_(self.weight)
        return heads

    def loss(self, module: MedusaHeads, batch: Batch, count: float) -> tuple[Tensor, Tensor]:
        """Head k counts at rows whose token k + 2 further on counts. The agreement is by head."""
        tokens = batch.tokens
        with torch.no_grad():
            hidden = self.target.forward_train(tokens)[0].float()
            truth = self.target.logits(hidden.to(self.target.dtype)).float()
        total = torch.zeros((), device=tokens.device)
        hits = []
        for k, head in enumerate(module):
            ahead = k + 2
            keep = batch.mask[:, ahead:]
            x = head(hidden[:, :-ahead][keep])
            logits = x if module.own_lm_head else F.linear(x, self.weight)
            wanted = truth[:, ahead - 1 : -1][keep]
            loss = self.distance(logits, wanted, tokens[:, ahead:][keep])
            total = total + MEDUSA_DECAY**k * loss / count
            hits.append((logits.argmax(-1) == wanted.argmax(-1)).sum() / count)
        return total, torch.stack(hits)

    def write(self, module: MedusaHeads, directory: Path) -> None:
        save_medusa(module.state_dict(), directory)

    def card(self) -> dict[str, Any]:
        return super().card() | {"heads": self.args.medusa_heads, "own_lm_head": self.args.own_lm_head}
