"""Training EAGLE heads of generations 1 and 3: the head, its recipes and losses, what is measured and what is written."""

import argparse
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from eagle_draft import EagleHead
from families.config import ModelConfig
from model import Transformer
from support.errors import UsageError, bad_files
from training.data import Batch, TokenData, padded
from training.drafters import HeadTraining, check_shares, check_taps
from training.loop import Recipe, recipe_with
from training.losses import Rows, TargetRows, gumbel_draws, loss_eagle, loss_eagle1, soft_loss, with_noise
from weights.head_reader import read_eagle
from weights.heads import EagleConfig, EagleFile, default_taps, layers_like, read_card, save_eagle
from weights.quantized import QuantLinear, lm_head_rows
from weights.quantizer import digest

FEATURE_NOISE = 0.2  # width of the uniform noise on training features at 512 tokens (EAGLE paper)
INPUTS = ("feature+shifted-token", "feature+unshifted-token", "feature", "token")
# The optimizers of --recipe: for small targets, and by generation those of the EAGLE papers.
SMALL = Recipe("muon", lr=0.02, side_lr=2e-3, warmup=20, cooldown=0.6)
PAPER = {
    1: Recipe("adamw", lr=3e-5, side_lr=0.0, warmup=2000, cooldown=1.0, weight_decay=0.01),
    3: Recipe("adamw", lr=5e-5, side_lr=0.0, warmup=12000, cooldown=1.0, weight_decay=0.0),
}


class TrainHead(EagleHead):
    """An EAGLE head in training: the paper's input ablation, and an LM head that passes gradients when quantized."""

    def __init__(self, config: EagleConfig, target: Transformer, draft_ids: Tensor | None, inputs: str):
        super().__init__(config, target, draft_ids)
        self.inputs = inputs
        # Rows of the target's LM head: for a trimmed draft vocabulary, and where gradients need a copy.
        ids = None if draft_ids is None else draft_ids.to(target.device)
        copied = ids is not None or config.version == 1 and isinstance(target.lm_head, QuantLinear)
        rows = lm_head_rows(target, ids).to(target.dtype) if copied else None
        self.register_buffer("target_head", rows, persistent=False)

    def shown(self, tokens: Tensor) -> Tensor:
        """Tokens [B, T] such that row i, which takes `shown[i + 1]`, sees token i + 1, or token i if unshifted."""
        return tokens.roll(1, 1) if self.inputs == "feature+unshifted-token" else tokens

    def embed(self, tokens: Tensor) -> Tensor:
        embedding = super().embed(tokens)
        return embedding * 0 if self.inputs == "feature" else embedding

    def forward_train(self, tokens: Tensor, feature: Tensor, shift: int = 0, memory: list | None = None) -> Tensor:
        feature = feature * 0 if self.inputs == "token" else feature
        return super().forward_train(tokens, feature, shift, memory)

    def narrow_logits(self, output: Tensor) -> Tensor:
        if self.config.version == 3:
            return super().narrow_logits(output)
        output = output.to(self.target.dtype)
        if self.target_head is None:
            return super().narrow_logits(output)
        return self.target.scaled(F.linear(output, self.target_head))


def head_config(target: ModelConfig, args: argparse.Namespace) -> EagleConfig:
    """One decoder layer of the target's geometry, with the options' overrides.

    Raises ValueError in one line for options that do not fit the target.
    """
    vocab, first = args.draft_vocab or target.vocab_size, args.version == 1
    if not 8 <= vocab <= target.vocab_size:
        raise ValueError(f"--draft-vocab {vocab}: allowed are 8 to {target.vocab_size}.")
    L = target.num_hidden_layers
    taps = () if first else args.taps or default_taps(L)
    check_taps(taps, L)
    size = target.vocab_size if first else vocab  # EAGLE-1 has the target's LM head, or rows of it
    qkv_bias = target.model_type == "qwen2" and first
    shape = {"qkv_bias": qkv_bias, "windows": (args.window or 0,)}
    layer = layers_like(target, "llama", 1, size, args.max_positions or args.length, **shape)
    how = {"fc_bias": first, "has_lm_head": not first, "unshifted": args.inputs == "feature+unshifted-token"}
    how |= {"norm_before_residual": not first and args.norm_before_residual == "on"}
    how |= dict.fromkeys(("fc_norm", "norm_output"), args.version == 3.1)
    return EagleConfig(int(args.version), layer, target.hidden_size, taps, target_vocab_size=target.vocab_size, **how)


def start_config(file: EagleFile, args: argparse.Namespace, held: int) -> EagleConfig:
    """The config of the head that --start names, with the draft vocabulary that the options ask for.

    held: the size of its own. Raises UsageError for options that would give it another shape, or a smaller one.
    """
    config, layer = file.config, file.config.layer
    if config.kind != f"EAGLE-{args.version:g}":
        raise UsageError(f"--start {args.start} is an {config.kind} head, and --version is {args.version:g}.")
    if config.unshifted != (args.inputs == "feature+unshifted-token"):
        raise UsageError(f"--start {args.start} was not trained with --inputs {args.inputs}.")
    if args.taps is not None:
        raise UsageError("--taps does not go with --start, which keeps the shape of its head.")
    wanted = args.draft_vocab or held
    if not held <= wanted <= config.target_vocab_size:
        raise UsageError(f"--draft-vocab {wanted}: --start {args.start} has {held} tokens and can only get more.")
    if config.version == 3:
        layer = replace(layer, vocab_size=wanted)
    longest = args.max_positions or layer.max_position_embeddings
    windows = layer.windows if args.window is None else (args.window,)
    layer = replace(layer, max_position_embeddings=longest, windows=windows, dtype="bfloat16")
    return replace(config, layer=layer)


def earlier_card(head: Path) -> dict[str, Any]:
    """What CARD.json keeps of the training that --start goes on from."""
    card = read_card(head)
    names = ("data", "training_tokens", "steps", "rows_per_step", "minutes", "average", "tau_greedy", "started_from")
    return {"head": head.name} | {name: card[name] for name in names if name in card}


def frequent_tokens(data: TokenData, size: int, vocab: int, first: Tensor | None = None) -> Tensor | None:
    """Sorted ids [size] of the tokens `first` and the most frequent others that count (ties to the lower id), or None for
    all of them."""
    if size == vocab:
        return None
    frequency = np.bincount(data.ids[data.mask], minlength=vocab)
    if first is not None:
        frequency[first.numpy()] = len(data.ids) + 1
    return torch.from_numpy(np.sort(np.argsort(-frequency, kind="stable")[:size]).astype(np.int64))


@torch.no_grad()
def widened(tensors: dict[str, Tensor], head: TrainHead) -> dict[str, Tensor]:
    """The tensors of a head, with the draft vocabulary of `head`.

    Training has moved the rows of the LM head together, away from the target's. So the new rows are the target's rows
    moved in the same way: by an affine map that is fitted to the known tokens. Rows that stayed where they were would get
    far too large logits. The fit is held back (ridge) by the weight of one row, so that few tokens move the rows little.
    """
    known = tensors.pop("draft_ids", None)
    if head.draft_ids is not None:
        tensors["draft_ids"] = head.draft_ids
    if "lm_head.weight" in tensors and known is not None:
        ids = torch.arange(head.config.target_vocab_size) if head.draft_ids is None else head.draft_ids
        places, rows = torch.isin(ids, known), tensors["lm_head.weight"]
        if places.all():
            return tensors
        plain = lm_head_rows(head.target, ids.to(head.target.device)).double().cpu()
        x = F.pad(plain, (0, 1), value=1.0)
        moments = x[places].T @ x[places]
        moments.diagonal().add_(x[places].square().sum(1).mean())
        moved = plain + x @ torch.linalg.solve(moments, x[places].T @ (rows.double() - plain[places]))
        tensors["lm_head.weight"] = moved.to(rows.dtype)
        tensors["lm_head.weight"][places] = rows
    return tensors


@torch.no_grad()
def init_head(head: TrainHead, seed: int) -> None:
    """Fan-in scaled matrices, residual outputs zero, the feature passed on; EAGLE-3's LM head starts as the target's."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in head.named_parameters():
        if name.endswith("bias"):
            p.zero_()
        elif p.dim() == 2:
            nn.init.normal_(p, std=p.shape[1] ** -0.5, generator=generator)
    head.layer.attention.o.weight.zero_()
    head.layer.mlp.down.weight.zero_()
    H = head.config.layer.hidden_size
    head.fc.weight[:, :-H] *= 0.1
    head.fc.weight[:, -H:] = torch.eye(H)
    if head.config.version == 3:
        ids = None if head.draft_ids is None else head.draft_ids.to(head.target.device)
        head.lm_head.weight.copy_(lm_head_rows(head.target, ids))
        head.norm.weight.copy_(head.target.norm.weight)


def feature_noise(batch: Batch, size: int, width: float, seed: int) -> Tensor:
    """Uniform noise [B, T, size] that depends on (seed, row number) alone. Its width at 512 tokens is `width`."""
    noise = []
    for number, length in zip(batch.numbers, batch.lengths, strict=True):
        rng = np.random.default_rng((seed, number, 1))
        own = torch.from_numpy(rng.random((length, size), dtype=np.float32)) * 2 - 1
        noise.append(own * (width / 2) * 512 / length)
    return padded(noise, batch.tokens.shape[1]).to(batch.tokens.device)


def head_loss(
    head: TrainHead, batch: Batch, rows: TargetRows, count: float, args: argparse.Namespace
) -> tuple[Tensor, Tensor]:
    """(loss, accuracy by draft step) of a micro-batch, divided by `count`. `rows` is what the target computed for it."""
    generator = torch.Generator(batch.tokens.device).manual_seed(args.seed + batch.numbers[0])
    first = head.config.version == 1
    noise = feature_noise(batch, head.feature_size, args.noise, args.seed) if first and args.noise > 0 else None

    def loss(judged: Rows) -> Tensor:
        if first:
            return loss_eagle1(judged, (args.feature_weight, args.token_weight))
        return with_noise(soft_loss(judged), judged, args.noise_share)

    batch = batch._replace(tokens=head.shown(batch.tokens))
    draws = partial(gumbel_draws, generator=generator) if args.noise_share else None
    return loss_eagle(head, batch, rows, args.ttt_steps, count, loss, noise, args.row_share, generator, draws)


class EagleTraining(HeadTraining):
    """An EAGLE head in training."""

    def __init__(self, args: argparse.Namespace, target: Transformer):
        super().__init__(args, target)
        check_shares(args, "noise_share", "row_share", "average", positive=("row_share",))
        if args.average and not args.start:
            raise UsageError("--average is the share of --start in the head that is written; add --start HEAD.")
        with bad_files():
            self.start = read_eagle(args.start, target.config) if args.start else None
        # What --start can draft, if not all tokens.
        self.known_ids = self.start.tensors.get("draft_ids") if self.start else None
        held = target.config.vocab_size if self.known_ids is None else len(self.known_ids)
        self.draft_vocab = args.draft_vocab or held  # how many tokens the head can draft
        self.config = head_config(target.config, args) if self.start is None else start_config(self.start, args, held)
        self.title = f"{self.config.kind} head ({args.inputs})"
        self.recipe = recipe_with(args, SMALL if args.recipe == "small" else PAPER[int(args.version)])
        # As the authors of the two generations do it.
        self.clip_by_value = args.version == 1
        self.format = self.config.layout(target.config.num_hidden_layers)
        self.note = self.format if "tensor names" in self.format else ""  # not every engine reads it
        half = target.device.type == "cuda" or target.dtype != torch.float32
        self.autocast = args.autocast == "on" or (args.autocast == "auto" and half)
        self.first: dict[str, Tensor] | None = None  # the tensors that training begins with, if --start gives them

    def build(self, data: TokenData) -> TrainHead:
        ids = frequent_tokens(data, self.draft_vocab, self.target.config.vocab_size, self.known_ids)
        head = TrainHead(self.config, self.target, ids, self.args.inputs)
        if self.autocast and head.target_head is not None:
            head.target_head = head.target_head.bfloat16()  # once, not at every product
        init_head(head, self.args.seed)
        if self.start:
            self.first = widened(self.start.floats(), head)
            head.load_state_dict(self.first)
        return self.ready(head, data)

    def loss(self, module: TrainHead, batch: Batch, count: float) -> tuple[Tensor, Tensor]:
        # The target computes as it does when it decodes. Only the head's own products may be rounded.
        rows = self.rows(module, batch)
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.autocast):
            return head_loss(module, batch, rows, count, self.args)

    def write(self, module: TrainHead, directory: Path) -> None:
        """The head's tensors in bfloat16, averaged with those of --start by --average.

        What the inputs of an EAGLE-1 head leave out gets weights of zero, which any engine runs. The average of a model
        and what it was fine-tuned to is often better than both (WiSE-FT, arXiv 2109.01903).
        """
        tensors = {}
        for name, tensor in module.state_dict().items():
            if name == "draft_ids":
                tensors[name] = tensor.cpu()
            else:
                averaged = tensor.lerp(self.first[name].to(tensor), self.args.average) if self.first else tensor
                tensors[name] = averaged.to("cpu", torch.bfloat16)
        if module.config.version == 1 and module.inputs in ("feature", "token"):
            embedding, feature = tensors["fc.weight"].chunk(2, 1)
            (embedding if module.inputs == "feature" else feature).zero_()
        save_eagle(self.config, tensors, directory)

    def identity(self) -> dict[str, Any]:
        return {"weights of --start": digest(self.start.tensors)} if self.start else {}

    def card(self) -> dict[str, Any]:
        args = self.args
        first = args.version == 1
        return {
            "norm_before_residual": None if first else self.config.norm_before_residual,
            "inputs": args.inputs,
            "ttt_steps": args.ttt_steps,
            "draft_vocab": self.draft_vocab,
            "started_from": earlier_card(Path(args.start)) if args.start else None,
            "recipe": asdict(self.recipe),
            "loss_weights": [args.feature_weight, args.token_weight] if first else None,
            "noise": args.noise if first else None,
            "noise_share": None if first else args.noise_share,
            "row_share": None if first else args.row_share,
            "average": args.average,
        }
