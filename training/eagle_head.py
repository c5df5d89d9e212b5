"""TODO."""

from __future__ import annotations

import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from eagle_draft import FEATURE_NOISE, EagleHead, eagle_drafter, loss_eagle1, loss_eagle3
from engine import Engine
from model import ModelConfig, RopeConfig, Transformer
from sampling import SamplingParams
from training.data import Batch, TokenData
from tree import DynamicTree, parse_tree, tree_tables
from weights.heads import EagleConfig

INPUTS = ("feature+shifted-token", "feature+unshifted-token", "feature", "token")


# ------------------------------------------------------------------------------------------------------- head


class TrainHead(EagleHead):
    """An EAGLE head in training: the paper's input ablation, and an LM head that passes gradients when quantized."""

    def __init__(self, config: EagleConfig, target: Transformer, draft_ids: Tensor | None, inputs: str):
        super().__init__(config, target, draft_ids)
        self.inputs = inputs
        shared = target.lm_head
        if config.version == 1 and hasattr(shared, "dequantize"):
            self.register_buffer("shared_head", shared.dequantize(target.dtype), persistent=False)

    def shown(self, tokens: Tensor) -> Tensor:
        """Tokens [B, T] such that row i, which takes `shown[i + 1]`, sees token i + 1, or token i if unshifted."""
        return tokens.roll(1, 1) if self.inputs == "feature+unshifted-token" else tokens

    def embed(self, tokens: Tensor) -> Tensor:
        embedding = super().embed(tokens)
        return embedding * 0 if self.inputs == "feature" else embedding

    def forward_train(
        self, tokens: Tensor, feature: Tensor, shift: int = 0, memory: list | None = None
    ) -> Tensor:
        feature = feature * 0 if self.inputs == "token" else feature
        return super().forward_train(tokens, feature, shift, memory)

    def predict(self, output: Tensor) -> Tensor:
        if hasattr(self, "shared_head"):
            return F.linear(output.to(self.shared_head.dtype), self.shared_head).float()
        return super().predict(output)


def head_config(target: ModelConfig, args: argparse.Namespace) -> EagleConfig:
    """One decoder layer of the target's geometry (eagle.md 1, 4), with the options' overrides; ValueError if unusable."""
    heads = args.heads or target.num_attention_heads
    kv_heads = target.num_key_value_heads if not args.heads else min(heads, target.num_key_value_heads)
    if heads % kv_heads:
        raise ValueError(f"--heads {heads} is not a multiple of the {kv_heads} key-value heads.")
    V = target.vocab_size
    vocab = args.draft_vocab or V
    if args.version == 1 and vocab != V:
        raise ValueError("--draft-vocab is for --version 3; an EAGLE-1 head is trimmed when it is used.")
    if not 8 <= vocab <= V:
        raise ValueError(f"--draft-vocab {vocab}: allowed are 8 to {V}.")
    taps: tuple[int, ...] = ()
    if args.version == 3:
        L = target.num_hidden_layers
        taps = args.taps or (2, L // 2, L - 3)
        if list(taps) != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] <= L:
            raise ValueError(
                f"taps {taps} of a target with {L} layers must be distinct, ascending, 0 to {L}; pass --taps a,b,c."
            )
    layer = ModelConfig(
        model_type="llama",
        hidden_size=target.hidden_size,
        intermediate_size=args.intermediate_size or target.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=target.head_dim,
        vocab_size=vocab,
        max_position_embeddings=args.max_positions or args.length,
        rms_norm_eps=target.rms_norm_eps,
        rope=RopeConfig(theta=args.rope_theta or 10000.0),
        qkv_bias=target.model_type == "qwen2" and args.version == 1,
        dtype="bfloat16",
    )
    return EagleConfig(
        version=args.version,
        layer=layer,
        target_hidden_size=target.hidden_size,
        taps=taps,
        fc_bias=args.version == 1,
        has_lm_head=args.version == 3,
        norm_before_residual=args.version == 3 and args.norm_before_residual == "on",
        target_vocab_size=V,
        unshifted=args.version == 1 and args.inputs == "feature+unshifted-token",
    )


def draft_vocabulary(data: TokenData, size: int, vocab: int) -> Tensor | None:
    """Sorted ids [size] of the most frequent tokens that count (ties to the lower id), or None for all of them."""
    if size == vocab:
        return None
    frequency = np.bincount(data.ids[data.mask], minlength=vocab)
    return torch.from_numpy(np.sort(np.argsort(-frequency, kind="stable")[:size]).astype(np.int64))


def init_head(head: TrainHead, seed: int) -> None:
    """Fan-in scaled matrices, residual outputs zero, the feature passed on; EAGLE-3's LM head starts as the target's."""
    generator, target = torch.Generator().manual_seed(seed), head.target
    with torch.no_grad():
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
            source = target.lm_head if target.lm_head is not None else target.embed_tokens
            rows = (
                source.dequantize(torch.float32) if hasattr(source, "dequantize") else source.weight.float()
            )
            head.lm_head.weight.copy_(
                rows if head.draft_ids is None else rows[head.draft_ids.to(rows.device)]
            )
            head.norm.weight.copy_(target.norm.weight)


def build_head(config: EagleConfig, tensors: dict[str, Tensor], target: Transformer) -> EagleHead:
    """A head to draft with, in the target's dtype and on its device."""
    head = EagleHead(config, target)
    head.load_state_dict({name: t.to("cpu") for name, t in tensors.items()})
    head.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    head.rotary.build(target.device, target.rotary.length)
    return head


def exported(head: TrainHead) -> dict[str, Tensor]:
    """The head's tensors as they are written: bfloat16 on the CPU. What an EAGLE-1 head's inputs leave out has zeros for
    weights, which any engine runs."""
    tensors = {
        n: t.to("cpu", t.dtype if n == "draft_ids" else torch.bfloat16) for n, t in head.state_dict().items()
    }
    if head.config.version == 1 and head.inputs in ("feature", "token"):
        half = head.config.layer.hidden_size
        left_out = slice(None, half) if head.inputs == "feature" else slice(half, None)
        tensors["fc.weight"] = tensors["fc.weight"].clone()
        tensors["fc.weight"][:, left_out] = 0
    return tensors


def can_export(args: argparse.Namespace) -> bool:
    """Whether the engine drafts with such a head: EAGLE-3 heads with the default inputs only."""
    return args.version == 1 or args.inputs == INPUTS[0]


# ------------------------------------------------------------------------------------------------- evaluation


class Evaluation:
    """Held-out measurements: tau of the real engine, top-1 accuracy, and a chain's tau from teacher-forced drafts."""

    def __init__(
        self, target: Transformer, stop_ids: tuple[int, ...], held: TokenData, args: argparse.Namespace
    ):
        self.target, self.stop_ids, self.held, self.args = target, stop_ids, held, args
        self.prompts = self._prompts()
        self.ctx = min(target.rotary.length, max(map(len, self.prompts)) + args.eval_tokens)
        plain = Engine(target, batch_size=len(self.prompts), ctx=self.ctx)
        results = plain.generate_batch(self.prompts, self._params(0.0)).run()
        self.texts = [p + r.token_ids for p, r in zip(self.prompts, results, strict=True)]

    def _params(self, temperature: float) -> SamplingParams:
        tokens = min(self.args.eval_tokens, self.target.rotary.length - max(map(len, self.prompts)))
        if tokens < 2:
            raise ValueError("held-out prompts leave no room for new tokens; use a smaller --prompt-length.")
        return SamplingParams(temperature, max_new_tokens=tokens, stop_ids=self.stop_ids, seed=self.args.seed)

    def _prompts(self) -> list[list[int]]:
        """Evenly spaced windows of held-out text, or held-out conversations up to their first answer."""
        held, count, length, prompts = self.held, self.args.eval_prompts, self.args.prompt_length, []
        if held.stream:
            for k in range(count):
                start = k * max(0, len(held.ids) - length) // count
                prompts.append(held.ids[start : start + length].tolist())
            return prompts
        for k in range(held.rows):
            ids, mask = held.row(k, self.target.rotary.length - 2)
            first = int(mask.argmax())
            if mask.any() and 0 < first <= self.target.rotary.length // 2 and len(prompts) < count:
                prompts.append(ids[:first].tolist())
        if not prompts:
            raise ValueError("no held-out conversation has a prompt that fits; give --held-out.")
        return prompts

    def tau(self, head: EagleHead, temperature: float = 0.0) -> dict:
        """tau and accepted_by_depth of the engine with --tree over the held-out prompts."""
        B, tree = len(self.prompts), parse_tree(self.args.tree)
        tables = tree if isinstance(tree, DynamicTree) else tree_tables([tree] * B, self.target.device)
        drafter = eagle_drafter(head, tables, B, self.ctx + tree.N + 1)
        engine = Engine(self.target, drafter=drafter, batch_size=B, ctx=self.ctx)
        results = engine.generate_batch(self.prompts, self._params(temperature)).run()
        emitted = [len(ids) for r in results for ids in r.tokens_per_step]
        depths = [sum(e > d for e in emitted) / max(1, len(emitted)) for d in range(1, tree.D + 1)]
        return {"tau": sum(emitted) / max(1, len(emitted)), "accepted_by_depth": depths}

    @torch.no_grad()
    def chain(self, head: TrainHead, K: int = 5) -> dict:
        """tau and n-alpha of a greedy chain of K, from the target's own greedy texts: no engine, any --inputs."""
        emitted, alive, examined = [], [0] * K, [0] * K
        for prompt, text in zip(self.prompts, self.texts, strict=True):
            tokens = torch.tensor([text], device=self.target.device)
            runs = chain_runs(head, tokens, K)
            position, last = len(prompt), len(text) - 1
            for k in range(K):  # rows from which all K drafts can be judged
                judged = runs[len(prompt) - 1 : max(len(prompt) - 1, last - K)]
                examined[k] += sum(run >= k for run in judged)
                alive[k] += sum(run > k for run in judged)
            while position < last:
                emitted.append(min(runs[position - 1] + 1, last - position))
                position += emitted[-1]
        alphas = [a / e if e else 0.0 for a, e in zip(alive, examined, strict=True)]
        return {"tau": sum(emitted) / max(1, len(emitted)), "n_alpha": alphas}

    @torch.no_grad()
    def accuracy(self, head: TrainHead, windows: int = 8) -> list[float]:
        """Top-1 agreement with the target on held-out rows, by draft step (EAGLE-1: the first only)."""
        hits, count = 0.0, 0.0
        stream_rows = max(1, len(self.held.ids) // self.args.length)
        for k in range(min(windows, stream_rows if self.held.stream else self.held.rows)):
            ids, mask = self.held.row(k, self.args.length)
            if mask[1:].any():
                device = self.target.device
                batch = Batch(
                    *(torch.from_numpy(x)[None].to(device) for x in (ids.astype(np.int64), mask)), [], []
                )
                hits = hits + head_loss(head, batch, 1.0, None, self.args)[1]
                count += mask[1:].sum()
        return [] if not count else (hits / count).tolist()


def target_features(head: EagleHead, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
    """(hidden_states [B, T, H], what the head reads [B, T, F]) of the target, without gradients."""
    with torch.no_grad():
        hidden_states, taps = head.target.forward_train(tokens, head.config.taps)
    wide = head.fc.weight.dtype
    return hidden_states, (hidden_states if taps is None else taps).to(wide)


def chain_runs(head: TrainHead, tokens: Tensor, K: int) -> list[int]:
    """For each row i of tokens [1, T]: how many of K greedily drafted tokens equal tokens i + 2, i + 3, ...

    Row i sees true features up to i only, its own drafts after that: the training-time test's attention.
    """
    _, features = target_features(head, tokens)
    feature, memory = head.fuse(features[:, :-1]), []
    unshifted = head.inputs == "feature+unshifted-token"
    newest, shown = tokens[:, 1:], tokens[:, :-1] if unshifted else tokens[:, 1:]
    alive = torch.ones_like(newest, dtype=torch.bool)
    runs = torch.zeros_like(newest)
    for s in range(K):
        feature = head.forward_train(shown, feature, s, memory)
        drafted = head.predict(feature).argmax(-1)
        drafted = drafted if head.draft_ids is None else head.draft_ids[drafted]
        alive &= drafted == F.pad(
            tokens[:, 2 + s :], (0, newest.shape[1] - max(0, tokens.shape[1] - 2 - s)), value=-1
        )
        runs += alive
        shown, newest = (newest if unshifted else drafted), drafted
    return runs[0].tolist()


def feature_noise(batch: Batch, size: int, width: float, seed: int) -> Tensor:
    """Uniform noise [B, T, size] that depends on (seed, row number) alone; `loss_eagle1` scales it for the length T."""
    B, T = batch.tokens.shape
    noise = torch.zeros(B, T, size)
    for b, (number, length) in enumerate(zip(batch.numbers, batch.lengths, strict=True)):
        rng = np.random.default_rng((seed, number, 1))
        own = torch.from_numpy(rng.random((length, size), dtype=np.float32)) * 2 - 1
        noise[b, :length] = own * (width / FEATURE_NOISE) * (T / length)
    return noise.to(batch.tokens.device)


def head_loss(
    head: TrainHead, batch: Batch, count: float, noise: Tensor | None, args: argparse.Namespace
) -> tuple[Tensor, Tensor]:
    """(loss, accuracy by step) of a micro-batch, divided by `count`."""
    hidden_states, features = target_features(head, batch.tokens)
    tokens = head.shown(batch.tokens)
    if head.config.version == 1:
        weights = (args.feature_weight, args.token_weight)
        return loss_eagle1(head, tokens, features, batch.mask, noise, count, weights)
    return loss_eagle3(head, tokens, features, hidden_states, batch.mask, args.ttt_steps, count)
