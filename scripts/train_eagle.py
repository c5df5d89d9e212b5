"""Train an EAGLE head for any supported target, on conversations or plain text.

    python -m scripts.train_eagle --checkpoint demo --data stdlib --version 1 --out demo/eagle1
    python -m scripts.train_eagle --checkpoint MODEL --data sharegpt.jsonl --version 3 --draft-vocab 32000 --out HEAD
    torchrun --nproc-per-node 4 -m scripts.train_eagle ...           # one process per GPU

Data: JSON or JSONL of conversations (ShareGPT `conversations`, OpenAI `messages`; only the assistant's tokens count),
JSONL of {"text"}, a text file, a directory of .txt/.py/.md files, `stdlib` (the demo's corpus), or a tokenised .npz.
Features come from the target as training runs. Deterministic by --seed; interrupted runs resume from --work. The head is
written under SafeAILab's tensor names with CARD.json beside it, and never over a head with a better held-out tau (--force
does). SafeAILab's own code runs its EAGLE-1 heads, and EAGLE-3 heads with --norm-before-residual off (as --recipe paper
has it) and the default --taps; other EAGLE-3 heads need an engine that reads these from config.json, such as vLLM.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from checkpoint import EagleConfig, load_model, read_eagle, save_eagle, write_json
from drafters import eagle_drafter
from eagle_draft import FEATURE_NOISE, EagleHead, loss_eagle1, loss_eagle3
from engine import Engine
from model import ModelConfig, RopeConfig, Transformer
from sampling import SamplingParams
from scripts.train_demo import Muon, read_text, save_state, stdlib_files, update
from tokenizer import Tokenizer, load_tokenizer
from tree import DynamicTree, parse_tree, tree_tables

INPUTS = ("feature+shifted-token", "feature+unshifted-token", "feature", "token")
ROLES = {"human": "user", "user": "user", "system": "system"} | dict.fromkeys(
    ("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"
)


# ------------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class TokenData:
    """Tokenised rows: row k is ids[starts[k]:starts[k + 1]]; `mask` marks the tokens that count (the assistant's).

    A `stream` (plain text) is sampled in windows at any offset; otherwise a row is one conversation, cut to the window.
    """

    ids: np.ndarray  # int32
    mask: np.ndarray  # bool
    starts: np.ndarray  # int64 [rows + 1]
    stream: bool

    @classmethod
    def from_rows(cls, rows: list[tuple[list[int], list[bool]]], stream: bool) -> TokenData:
        ids = np.array([t for row, _ in rows for t in row], dtype=np.int32)
        mask = np.array([m for _, row in rows for m in row], dtype=bool)
        starts = np.cumsum([0, *(len(row) for row, _ in rows)], dtype=np.int64)
        return cls(ids, mask, starts, stream)

    @classmethod
    def load(cls, path: Path) -> TokenData:
        with np.load(path) as file:
            if missing := {"ids", "mask", "starts", "stream"} - set(file.files):
                raise ValueError(
                    f"{path}: no array {sorted(missing)[0]!r}; expected ids, mask, starts, stream."
                )
            return cls(file["ids"], file["mask"], file["starts"], bool(file["stream"]))

    def save(self, path: Path) -> None:
        temporary = path.with_suffix(".tmp")
        with open(temporary, "wb") as file:
            np.savez(file, ids=self.ids, mask=self.mask, starts=self.starts, stream=self.stream)
        os.replace(temporary, path)

    @property
    def rows(self) -> int:
        return len(self.starts) - 1

    def row(self, k: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """The first `length` tokens of row k; of a stream, the k-th window of `length`."""
        low, high = (k * length, len(self.ids)) if self.stream else (self.starts[k], self.starts[k + 1])
        return self.ids[low : min(high, low + length)], self.mask[low : min(high, low + length)]

    def sample(self, seed: int, index: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Sample number `index` of an endless series fixed by `seed`: a random window, or every row once per epoch."""
        if self.stream:
            start = np.random.default_rng((seed, index)).integers(0, max(1, len(self.ids) - length + 1))
            return self.ids[start : start + length], self.mask[start : start + length]
        epoch, place = divmod(index, self.rows)
        return self.row(int(_permutation(seed, epoch, self.rows)[place]), length)

    def split(self, share: float) -> tuple[TokenData, TokenData]:
        """The first rows (of a stream: tokens) for training and the last `share` of them held out."""
        if self.stream:
            cut = int(len(self.ids) * (1 - share))
            ends = [(0, cut), (cut, len(self.ids))]
            whole = [np.array([0, high - low]) for low, high in ends]
            parts = [(self.ids[a:b], self.mask[a:b], w) for (a, b), w in zip(ends, whole, strict=True)]
        else:
            row = min(self.rows - 1, max(1, round(self.rows * (1 - share))))
            cut = self.starts[row]
            parts = [
                (self.ids[:cut], self.mask[:cut], self.starts[: row + 1]),
                (self.ids[cut:], self.mask[cut:], self.starts[row:] - cut),
            ]
        train, held = (TokenData(*part, self.stream) for part in parts)
        if not train.mask.any() or not held.mask.any():
            raise ValueError(
                f"{self.rows} rows are too few to hold some out; give more --data, or --held-out FILE."
            )
        return train, held


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, rows: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(rows)


def read_records(source: str) -> tuple[list[list[dict]], list[str], list[str]]:
    """(conversations as role/content messages, texts, reasons for rows left out) of a data file or directory."""
    path, conversations, texts, left_out = Path(source), [], [], []
    if source == "stdlib":
        return [], [read_text(p) for p in stdlib_files()[0]], []
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".py", ".md") and p.is_file())
        if not files:
            raise ValueError(f"{path} holds no .txt, .py or .md file; give another --data.")
        return [], [read_text(p) for p in files], []
    if not path.is_file():
        raise ValueError(f"--data {source}: no such file or directory (or `stdlib`).")
    if path.suffix not in (".json", ".jsonl"):
        return [], [read_text(path)], []
    text = path.read_text(encoding="utf-8")
    try:
        lines = [line for line in text.splitlines() if line.strip()]
        records = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in lines]
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); expected an array, or one object per line.") from None
    for number, record in enumerate(records, 1):
        try:
            if isinstance(record, dict) and isinstance(record.get("text"), str):
                texts.append(record["text"])
            else:
                conversations.append(read_messages(record))
        except ValueError as error:
            left_out.append(f"row {number}: {error}")
    return conversations, texts, left_out


def read_messages(record: dict) -> list[dict]:
    """Messages [system,] user, assistant, ..., assistant of a ShareGPT or OpenAI record; ValueError if it has none.

    Answers before the first question and questions after the last answer are dropped.
    """
    turns = record.get("messages", record.get("conversations")) if isinstance(record, dict) else None
    if not isinstance(turns, list):
        raise ValueError("neither `messages`, `conversations` nor `text`")
    messages = []
    for turn in turns:
        name = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
        content = turn.get("content", turn.get("value")) if isinstance(turn, dict) else None
        if isinstance(content, list):
            content = "".join(p.get("text", "") for p in content if isinstance(p, dict))
        if name not in ROLES or not isinstance(content, str):
            raise ValueError(f"a turn of role {name!r} (known: {', '.join(ROLES)}) or without text")
        messages.append({"role": ROLES[name], "content": content})
    system = messages[:1] if messages and messages[0]["role"] == "system" else []
    messages = messages[len(system) :]
    while messages and messages[0]["role"] == "assistant":
        messages = messages[1:]
    while messages and messages[-1]["role"] == "user":
        messages = messages[:-1]
    if not messages or any(m["role"] != ("user", "assistant")[i % 2] for i, m in enumerate(messages)):
        raise ValueError("roles do not alternate between user and assistant")
    return system + messages


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def chat_row(tokenizer: Tokenizer, messages: list[dict]) -> tuple[list[int], list[bool]]:
    """(ids, mask) of a conversation: an answer counts from behind the generation prompt to its end-of-turn token.

    The template decides where that is: the prompt of every answer, and the conversation up to it, are rendered too.
    """
    ids = tokenizer.encode_chat(messages, add_generation_prompt=False)
    mask = [False] * len(ids)
    for k, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = _common(tokenizer.encode_chat(messages[:k], add_generation_prompt=True), ids)
        end = _common(tokenizer.encode_chat(messages[: k + 1], add_generation_prompt=False), ids)
        stops = [i + 1 for i in range(start, end) if ids[i] in tokenizer.eos_ids]
        for i in range(start, min([end, *stops])):
            mask[i] = True
    return ids, mask


def tokenise(tokenizer: Tokenizer, conversations: list, texts: list[str]) -> tuple[TokenData, list[str]]:
    """Conversations as rows, or else texts as one stream of BOS + text + EOS; and reasons for rows left out."""
    if not conversations:
        bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        rows = ([*bos, *tokenizer.encode(text, add_bos=False), *tokenizer.eos_ids[:1]] for text in texts)
        rows = [(row, [True] * len(row)) for row in rows]
        ids = np.concatenate([np.array(row, dtype=np.int32) for row, _ in rows])
        return TokenData(ids, np.ones(len(ids), bool), np.array([0, len(ids)]), True), []

    def attempt(messages: list[dict]) -> tuple[list[int], list[bool]] | str:
        try:
            ids, mask = chat_row(tokenizer, messages)
            return (ids, mask) if any(mask) else "no token of an answer was found"
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:  # a model's own template runs in a child process
        rows = list(pool.map(attempt, conversations))
    rows += [([*tokenizer.encode(text)], None) for text in texts]
    rows = [
        (ids_mask[0], ids_mask[1] or [True] * len(ids_mask[0])) if not isinstance(ids_mask, str) else ids_mask
        for ids_mask in rows
    ]
    good = [row for row in rows if not isinstance(row, str)]
    return TokenData.from_rows(good, False), [row for row in rows if isinstance(row, str)]


def continue_texts(engine: Engine, data: TokenData, rows: int, args: argparse.Namespace) -> TokenData:
    """Plain text by the target itself: random prefixes of --prompt-length tokens, continued to --length."""
    out = []
    for first in range(0, rows, engine.batch_size):
        numbers = range(first, min(rows, first + engine.batch_size))
        prompts = [data.sample(args.seed + 1, i, args.prompt_length)[0].tolist() for i in numbers]
        params = SamplingParams(
            temperature=args.regenerate_temperature,
            max_new_tokens=args.length - args.prompt_length,
            seed=args.seed + first,
        )
        for prompt, result in zip(prompts, engine.generate_batch(prompts, params).run(), strict=True):
            ids = prompt + result.token_ids
            out.append((ids, [False] * len(prompt) + [True] * len(result.token_ids)))
        print(f"\rregenerated {len(out)}/{rows} texts   ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return TokenData.from_rows(out, False)


def answer_again(engine: Engine, tokenizer: Tokenizer, conversations: list, args: argparse.Namespace) -> list:
    """The conversations with every answer replaced by the target's own, turn by turn (the paper's Table 6)."""
    out = []
    for first in range(0, len(conversations), engine.batch_size):
        group = conversations[first : first + engine.batch_size]
        fresh = [[m for m in c[:1] if m["role"] == "system"] for c in group]
        questions = [[m for m in c if m["role"] == "user"] for c in group]
        for turn in range(max(map(len, questions))):
            asked, prompts = [], []
            for history, own in zip(fresh, questions, strict=True):
                if turn < len(own) and len([m for m in history if m["role"] == "user"]) == turn:
                    prompt = tokenizer.encode_chat([*history, own[turn]], add_generation_prompt=True)
                    if len(prompt) + args.regenerate_tokens <= engine.ctx:
                        asked.append((history, own[turn]))
                        prompts.append(prompt)
            if not prompts:
                break
            params = SamplingParams(
                temperature=args.regenerate_temperature,
                max_new_tokens=args.regenerate_tokens,
                seed=args.seed + first,
                stop_ids=tuple(tokenizer.eos_ids),
            )
            results = engine.generate_batch(prompts, params).run()
            for (history, question), result in zip(asked, results, strict=True):
                history += [
                    question,
                    {"role": "assistant", "content": tokenizer.decode(result.token_ids).strip()},
                ]
        out += [c for c in fresh if c and c[-1]["role"] == "assistant"]
        print(
            f"\rregenerated {len(out)}/{len(conversations)} dialogues  ", end="", file=sys.stderr, flush=True
        )
    print(file=sys.stderr)
    return out


def load_data(
    args: argparse.Namespace, target: Transformer, tokenizer: Tokenizer | None
) -> tuple[TokenData, TokenData]:
    """(training, held-out) data, tokenised (and regenerated) once: the result is kept in --work."""
    source = args.data
    key = [source, args.regenerate, args.chat_template, str(Path(args.checkpoint).resolve())]
    if args.regenerate:
        key += [
            args.seed,
            args.length,
            args.prompt_length,
            args.regenerate_tokens,
            args.regenerate_temperature,
        ]
    for path in [
        Path(source),
        Path(args.checkpoint) / "tokenizer.json",
        Path(args.checkpoint) / "tokenizer.model",
    ]:
        for p in sorted(path.rglob("*")) if path.is_dir() else [path] if path.exists() else []:
            key += [str(p), p.stat().st_size, p.stat().st_mtime_ns]
    cache = Path(args.work) / f"data-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.npz"
    if Path(source).suffix == ".npz":
        data = TokenData.load(Path(source))
    elif cache.exists():
        data = TokenData.load(cache)
    else:
        data = _make_data(args, target, tokenizer)
        data.save(cache)
    if len(data.ids) == 0 or not 0 <= data.ids.min() <= data.ids.max() < target.config.vocab_size:
        raise ValueError(f"--data {source}: no tokens, or ids outside the target's vocabulary.")
    if source == "stdlib" or args.held_out:
        if args.held_out and Path(args.held_out).suffix == ".npz":
            return data, TokenData.load(Path(args.held_out))
        _need(tokenizer, "--held-out")
        if args.held_out:
            conversations, texts, _ = read_records(args.held_out)
        else:
            conversations, texts = [], [read_text(p) for p in stdlib_files()[1]]
        return data, tokenise(tokenizer, conversations, texts)[0]
    return data.split(0.05)


def _make_data(args: argparse.Namespace, target: Transformer, tokenizer: Tokenizer | None) -> TokenData:
    _need(tokenizer, "--data")
    conversations, texts, left_out = read_records(args.data)
    engine = None
    if args.regenerate:
        ctx = min(target.rotary.length, args.length + args.regenerate_tokens)
        engine = Engine(target, batch_size=8, ctx=ctx)
        if conversations:
            conversations = answer_again(engine, tokenizer, conversations[: args.regenerate], args)
    data, more = tokenise(tokenizer, conversations, texts)
    if engine is not None and data.stream:
        data = continue_texts(engine, data, args.regenerate, args)
    left_out += more
    if left_out:
        print(f"left out {len(left_out)} rows, e.g. {left_out[0]}", file=sys.stderr)
    if not data.mask.any():
        raise ValueError(
            f"--data {args.data}: nothing to train on ({left_out[0] if left_out else 'it is empty'})."
        )
    return data


def _need(tokenizer: Tokenizer | None, option: str) -> None:
    if tokenizer is None:
        raise ValueError(f"the checkpoint has no tokenizer; give {option} as a tokenised .npz.")


@dataclass(frozen=True)
class Batch:
    """One micro-batch: tokens int64 [B, T] padded at the end, mask bool [B, T], each row's number and own length."""

    tokens: Tensor
    mask: Tensor
    numbers: list[int]
    lengths: list[int]


def step_batches(
    data: TokenData, step: int, world: World, args: argparse.Namespace
) -> tuple[list[Batch], float]:
    """This process's micro-batches of a step, and how many rows of the loss count in the whole step (all processes).

    The step's rows depend on (seed, step) and on their total number alone, however they are dealt out.
    """
    total = args.batch * args.accumulate * world.size
    numbers = [step * total + j for j in range(total)]
    rows = [(number, *data.sample(args.seed, number, args.length)) for number in numbers]
    count = float(sum(mask[1:].sum() for _, _, mask in rows))
    rows.sort(key=lambda row: (-len(row[1]), row[0]))  # rows of like length together: less padding
    batches = []
    for a in range(world.rank, args.accumulate * world.size, world.size):
        part = rows[a * args.batch : (a + 1) * args.batch]
        longest = max(2, len(part[0][1]))
        tokens = torch.zeros(len(part), longest, dtype=torch.int64)
        mask = torch.zeros(len(part), longest, dtype=torch.bool)
        for b, (_, ids, counted) in enumerate(part):
            tokens[b, : len(ids)], mask[b, : len(ids)] = torch.from_numpy(ids), torch.from_numpy(counted)
        lengths = [len(ids) for _, ids, _ in part]
        batches.append(Batch(tokens.to(world.device), mask.to(world.device), [n for n, *_ in part], lengths))
    return batches, count


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


# --------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Recipe:
    """Optimiser settings. `clip`: by value for EAGLE-1, by norm for EAGLE-3, as their authors."""

    optimizer: str
    lr: float  # of AdamW, and of Muon if that trains the matrices
    side_lr: float  # of AdamW for norms, biases and the LM head where Muon trains the rest
    warmup: int
    cooldown: float  # share of the steps over which the rate falls linearly to zero
    weight_decay: float
    clip: float = 0.5


def recipe_for(args: argparse.Namespace) -> Recipe:
    """The named recipe with the options' overrides. `paper`: eagle.md 7.2, 7.3; `small`: tuned for small targets."""
    if args.recipe == "paper":
        first = args.version == 1
        base = Recipe(
            "adamw", 3e-5 if first else 5e-5, 0.0, 2000 if first else 12000, 1.0, 0.01 if first else 0.0
        )
    else:
        base = Recipe("muon", 0.02, 2e-3, 20, 0.6, 0.01)
    names = ("optimizer", "lr", "warmup", "cooldown", "weight_decay", "clip")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if given.get("optimizer") == "adamw" and "lr" not in given and base.optimizer == "muon":
        given["lr"] = 1e-3
    return replace(base, **given)


def make_optimizers(head: TrainHead, recipe: Recipe) -> list[torch.optim.Optimizer]:
    named = list(head.named_parameters())
    betas, decay = (0.9, 0.95), recipe.weight_decay
    if recipe.optimizer == "adamw":
        return [torch.optim.AdamW([p for _, p in named], recipe.lr, betas, weight_decay=decay, foreach=False)]
    hidden = [p for n, p in named if p.dim() == 2 and "lm_head" not in n]
    rest = [p for n, p in named if p.dim() != 2 or "lm_head" in n]
    side = torch.optim.AdamW(rest, recipe.side_lr, betas, weight_decay=0.0, foreach=False)
    return [Muon(hidden, lr=recipe.lr, weight_decay=decay), side]


def rate_factor(step: int, steps: int, recipe: Recipe) -> float:
    """Factor on the peak rate: linear warm-up, flat, then linear to zero over the last `cooldown` of the steps."""
    cool = (steps - step) / (recipe.cooldown * steps) if recipe.cooldown > 0 else 1.0
    return min(1.0, (step + 1) / max(1, recipe.warmup)) * min(1.0, cool)


@dataclass(frozen=True)
class World:
    """This process among those of a torchrun; alone without one."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def start(cls, device: str) -> World:
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if size == 1:
            return cls(0, 1, torch.device(device))
        if device == "cuda":
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", timeout=timedelta(hours=6))
        return cls(dist.get_rank(), size, torch.device(device))

    def sum_(self, tensors: list[Tensor]) -> None:
        """Adds the tensors up over all processes, in place (one flat buffer)."""
        if self.size == 1:
            return
        flat = torch.cat([t.reshape(-1) for t in tensors])
        dist.all_reduce(flat)
        for t, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            t.copy_(part.view_as(t))

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def stop(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


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


def train_step(
    head: TrainHead,
    optims: list,
    data: TokenData,
    step: int,
    recipe: Recipe,
    world: World,
    args: argparse.Namespace,
) -> tuple[float, list[float], int]:
    """One optimiser step over --accumulate micro-batches on every process. Returns (loss, accuracy, tokens)."""
    batches, count = step_batches(data, step, world, args)
    value, hits, tokens = torch.zeros(1, device=world.device), 0.0, 0
    for batch in batches:
        noise = None
        if args.version == 1 and args.noise > 0:
            noise = feature_noise(batch, head.feature_size, args.noise, args.seed)
        with torch.autocast(world.device.type, torch.bfloat16) if args.autocast == "on" else nullcontext():
            loss, accuracy = head_loss(head, batch, count, noise, args)
        loss.backward()
        value, hits, tokens = (
            value + loss.detach().float(),
            hits + accuracy.detach().float(),
            tokens + batch.tokens.numel(),
        )
    parameters = [p for p in head.parameters() if p.requires_grad]
    world.sum_([*(p.grad for p in parameters), value, hits])
    if args.version == 1:
        nn.utils.clip_grad_value_(parameters, recipe.clip, foreach=False)
    else:
        nn.utils.clip_grad_norm_(parameters, recipe.clip, foreach=False)
    update(optims, rate_factor(step, args.steps, recipe))
    return float(value), hits.tolist(), tokens * world.size


SETTINGS = (
    "checkpoint",
    "data",
    "held_out",
    "version",
    "steps",
    "batch",
    "accumulate",
    "length",
    "recipe",
    "optimizer",
)
SETTINGS += (
    "lr",
    "warmup",
    "cooldown",
    "weight_decay",
    "clip",
    "noise",
    "feature_weight",
    "token_weight",
    "ttt_steps",
)
SETTINGS += (
    "draft_vocab",
    "inputs",
    "intermediate_size",
    "heads",
    "taps",
    "norm_before_residual",
    "rope_theta",
    "regenerate",
    "seed",
    "autocast",
)


def train(args: argparse.Namespace) -> dict:
    """Train, measure, export. Returns what CARD.json holds; raises ValueError with one line for unusable input."""
    world = World.start(args.device)
    try:
        return _train(args, world)
    finally:
        world.stop()


def _train(args: argparse.Namespace, world: World) -> dict:
    chief, work, out = world.rank == 0, Path(args.work), Path(args.out)
    say: Callable[..., None] = (
        (lambda *a, **k: print(*a, file=sys.stderr, flush=True, **k)) if chief else _silent
    )
    work.mkdir(parents=True, exist_ok=True)
    dtype = {"auto": None if world.device.type == "cuda" else torch.float32}.get(args.dtype, args.dtype)
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    target = load_model(args.checkpoint, world.device, dtype)
    if args.autocast == "auto":
        args.autocast = "on" if world.device.type == "cuda" or target.dtype != torch.float32 else "off"
    tokenizer = load_tokenizer(args.checkpoint, target.config.vocab_size)
    if tokenizer is not None and args.chat_template:
        tokenizer.use_template(args.chat_template)
    if args.length > target.rotary.length:
        raise ValueError(f"--length {args.length}: the target has {target.rotary.length} positions.")
    config, recipe = head_config(target.config, args), recipe_for(args)
    rival = _existing_head(out, target) if chief and can_export(args) and not args.force else None
    if chief:
        data, held = load_data(args, target, tokenizer)
    world.barrier()
    if not chief:
        data, held = load_data(args, target, tokenizer)
    draft_ids = draft_vocabulary(data, config.layer.vocab_size, target.config.vocab_size)
    head = TrainHead(config, target, draft_ids, args.inputs)
    init_head(head, args.seed)
    head.to(world.device)
    head.rotary.build(world.device, target.rotary.length)
    optims = make_optimizers(head, recipe)
    size = sum(p.numel() for p in head.parameters())
    say(
        f"EAGLE-{args.version} head of {size / 1e6:.2f} M parameters, {args.inputs}; "
        f"{int(data.mask.sum()):,} training tokens, {int(held.mask.sum()):,} held out"
    )
    evaluation = None
    if chief:
        stops = tuple(tokenizer.eos_ids) if tokenizer is not None else target.config.eos_token_ids
        evaluation = Evaluation(target, stops, held, args)
    settings = {name: getattr(args, name) for name in SETTINGS} | {"processes": world.size}
    state_path, first, seconds, curve = work / "train_state.pt", 0, 0.0, []
    if state_path.exists():
        state = torch.load(state_path, weights_only=True, map_location=world.device)
        if wrong := [k for k, v in settings.items() if state["settings"].get(k) != v]:
            raise ValueError(
                f"{state_path} is from a run with another --{wrong[0].replace('_', '-')} "
                f"({state['settings'].get(wrong[0])!r}); delete it, match it, or give another --work."
            )
        head.load_state_dict(state["head"])
        for optim, saved in zip(optims, state["optims"], strict=True):
            optim.load_state_dict(saved)
        first, seconds, curve = state["step"], state["seconds"], state["curve"]
        say(f"resumed at step {first}")
    if args.compile:
        compile_(head)
    run = Progress(args.steps, first, seconds, say)
    for step in range(first, args.steps):
        loss, accuracy, tokens = train_step(head, optims, data, step, recipe, world, args)
        curve.append(loss)
        run.report(step, loss, accuracy, tokens)
        done, last = step + 1, step + 1 == args.steps
        pause = done == args.pause_at
        if chief and (done % args.save_every == 0 or last or pause):
            optim_states = [o.state_dict() for o in optims]
            save_state(state_path, head=head.state_dict(), optims=optim_states, step=done, settings=settings,
                       seconds=run.seconds(), curve=curve)  # fmt: skip
        if pause:
            say(f"\npaused at step {done}; the same command without --pause-at goes on")
            return {"step": done, "loss_curve": curve}
        if chief and args.eval_every and done % args.eval_every == 0 and not last:
            run.pause()
            say(f"\nstep {done}: {_summary(measure(head, evaluation, greedy_only=True))}")
            run.resume()
        world.barrier()
    say("")
    card: dict = {}
    if chief:
        card = _card(args, config, recipe, target, data, held, size, run.seconds(), curve, world)
        card |= measure(head, evaluation)
        say(_summary(card))
        publish(head, card, rival, evaluation, args)
    world.barrier()
    return card | {"loss_curve": curve}


def _silent(*args, **kwargs) -> None:
    pass


def compile_(head: TrainHead) -> None:
    """Compile the two forwards (the target's and the head's) in place."""
    target = head.target
    target.forward_train = torch.compile(target.forward_train)
    head.forward_train = torch.compile(head.forward_train)


class Progress:
    """The progress line: averaged loss and accuracy, tokens per second, minutes left."""

    def __init__(self, steps: int, first: int, seconds: float, say: Callable[..., None]):
        self.steps, self.first, self.before, self.say = steps, first, seconds, say
        self.started, self.tokens, self.loss, self.accuracy = time.perf_counter(), 0, None, None

    def seconds(self) -> float:
        """Training time so far, evaluations and earlier runs' shares handled."""
        return self.before + time.perf_counter() - self.started

    def pause(self) -> None:
        self.paused = time.perf_counter()

    def resume(self) -> None:
        self.started += time.perf_counter() - self.paused

    def report(self, step: int, loss: float, accuracy: list[float], tokens: int) -> None:
        keep = 0.0 if self.loss is None else 0.95
        self.loss = keep * (self.loss or 0.0) + (1 - keep) * loss
        self.accuracy = keep * (self.accuracy or 0.0) + (1 - keep) * accuracy[0]
        self.tokens += tokens
        if step % 10 == 9 or step == self.steps - 1:
            spent = time.perf_counter() - self.started
            left = spent / (step + 1 - self.first) * (self.steps - step - 1)
            deepest = f" (last step {accuracy[-1]:.3f})" if len(accuracy) > 1 else ""
            self.say(
                f"\rstep {step + 1}/{self.steps}  loss {self.loss:.3f}  top-1 {self.accuracy:.3f}{deepest}  "
                f"{self.tokens / spent:.0f} tok/s  {left / 60:.1f} min left   ",
                end="\n" if step % 100 == 99 else "",
            )


def measure(head: TrainHead, evaluation: Evaluation, greedy_only: bool = False) -> dict:
    """Held-out numbers of the head as it would be written (bf16 weights)."""
    tensors, inputs = exported(head), head.inputs
    rounded = TrainHead(head.config, head.target, None, inputs)
    rounded.load_state_dict(tensors)
    rounded.to(head.fc.weight.device).requires_grad_(False)
    rounded.rotary.build(head.fc.weight.device, head.target.rotary.length)
    out: dict = {"held_out_accuracy": evaluation.accuracy(rounded)}
    chain = evaluation.chain(rounded)
    out |= {"chain_tau": chain["tau"], "n_alpha": chain["n_alpha"]}
    if can_export(evaluation.args):
        drafter = build_head(head.config, tensors, head.target)
        for name, temperature in [("greedy", 0.0)] + [("t1", 1.0)] * (not greedy_only):
            out |= {f"{k}_{name}": v for k, v in evaluation.tau(drafter, temperature).items()}
    return out


def _summary(numbers: dict) -> str:
    parts = [f"accuracy {numbers['held_out_accuracy'][0]:.3f}"] if numbers["held_out_accuracy"] else []
    parts += [f"chain tau {numbers['chain_tau']:.2f}"]
    parts += [
        f"{label} {numbers[k]:.2f}"
        for k, label in (("tau_greedy", "tau"), ("tau_t1", "tau at T = 1"))
        if k in numbers
    ]
    return "held-out " + ", ".join(parts)


def _existing_head(out: Path, target: Transformer) -> EagleHead | None:
    """The head at --out, to be compared with the new one; ValueError if there is something else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    try:
        found = read_eagle(out, target.config)
        return build_head(found.config, found.tensors, target)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"--out {out} holds something that cannot be compared with the new head ({error}); "
            "give another --out, or --force to replace it."
        ) from None


class WorseHead(ValueError):
    """The new head drafts worse than the one it would replace."""


def publish(
    head: TrainHead, card: dict, rival: EagleHead | None, evaluation: Evaluation, args: argparse.Namespace
) -> None:
    """Write the head and its CARD.json to --out, unless a better one is there."""
    out = Path(args.out)
    if not can_export(args):
        write_json(Path(args.work) / "CARD.json", card)
        print(
            f"an ablation of EAGLE-3: no head exported; numbers in {Path(args.work) / 'CARD.json'}",
            file=sys.stderr,
        )
        return
    if rival is not None:
        old, new = evaluation.tau(rival)["tau"], card["tau_greedy"]
        if old > new:
            raise WorseHead(
                f"the head at {out} is better (held-out tau {old:.3f}, the new one {new:.3f}); kept it. "
                "The new one stays in --work: run the same command with --force to replace it."
            )
    save_eagle(head.config, exported(head), out)
    write_json(out / "CARD.json", card)
    print(f"wrote {out}", file=sys.stderr)
    if "tensor names" in card["format"]:  # not every engine reads it
        print(f"note: {card['format']}", file=sys.stderr)


def _card(args, config: EagleConfig, recipe: Recipe, target: Transformer, data: TokenData, held: TokenData,
          size: int, seconds: float, curve: list[float], world: World) -> dict:  # fmt: skip
    c = target.config
    rows = args.batch * args.accumulate * world.size
    return {
        "format": config.layout(c.num_hidden_layers),
        "norm_before_residual": args.norm_before_residual == "on" if args.version == 3 else None,
        "inputs": args.inputs,
        "target": {"layers": c.num_hidden_layers, "hidden_size": c.hidden_size, "vocab_size": c.vocab_size},
        "parameters": size,
        "data": args.data if args.data == "stdlib" else Path(args.data).name,
        "regenerated": args.regenerate,
        "training_tokens": int(data.mask.sum()),
        "held_out_tokens": int(held.mask.sum()),
        "steps": args.steps,
        "rows_per_step": rows,
        "length": args.length,
        "ttt_steps": args.ttt_steps if args.version == 3 else None,
        "draft_vocab": args.draft_vocab or c.vocab_size,
        "recipe": asdict(recipe),
        "loss_weights": [args.feature_weight, args.token_weight] if args.version == 1 else None,
        "noise": args.noise if args.version == 1 else None,
        "seed": args.seed,
        "minutes": round(seconds / 60, 1),
        "processes": world.size,
        "device": torch.cuda.get_device_name()
        if world.device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "last_loss": float(np.mean(curve[-50:])) if curve else None,
        "tree": args.tree,
        "eval_prompts": args.eval_prompts,
        "eval_tokens": args.eval_tokens,
    }


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    add(
        "--checkpoint",
        required=True,
        help="the target: any directory generate.py takes, quantized ones included",
    )
    add("--data", required=True, help="JSON/JSONL, text file, directory, `stdlib`, or tokenised .npz")
    add(
        "--held-out",
        help="the same kinds (default: the last 5 %% of --data; for stdlib, the demo's held-out modules)",
    )
    add("--version", type=int, choices=(1, 3), required=True)
    add("--out", required=True, help="folder of the head")
    add("--work", help="tokenised data and training state (default: runs/train_eagle/NAME of --out)")
    add("--steps", type=int, default=1500)
    add("--batch", type=int, default=8, help="sequences of a micro-batch, per process")
    add("--accumulate", type=int, default=1, help="micro-batches per optimiser step")
    add("--length", type=int, default=512, help="tokens of a training window")
    add(
        "--recipe",
        choices=("small", "paper"),
        default="small",
        help="optimiser settings; the next seven override",
    )
    add("--optimizer", choices=("muon", "adamw"))
    add("--lr", type=float)
    add("--warmup", type=int, help="steps")
    add("--cooldown", type=float, help="share of the steps over which the rate falls to zero")
    add("--weight-decay", type=float)
    add("--clip", type=float, help="gradients: by value (version 1) or norm (version 3)")
    add(
        "--noise",
        type=float,
        default=FEATURE_NOISE,
        help="version 1: width of the noise on features at 512 tokens",
    )
    add("--feature-weight", type=float, default=1.0, help="version 1: weight of smooth L1")
    add("--token-weight", type=float, default=0.1, help="version 1: weight of soft cross-entropy")
    add("--ttt-steps", type=int, default=7, help="version 3: steps of the training-time test")
    add("--draft-vocab", type=int, help="version 3: size of the draft vocabulary (default: all tokens)")
    add("--inputs", choices=INPUTS, default=INPUTS[0], help="the paper's input ablation")
    add("--intermediate-size", type=int, help="of the head's MLP (default: the target's)")
    add("--heads", type=int, help="attention heads of the head (default: the target's)")
    add("--taps", type=_taps, help="version 3: layers whose input is read (default: 2, L/2, L-3)")
    add(
        "--norm-before-residual",
        choices=("on", "off"),
        help="version 3: the layer's residual is the normalised feature, as speculators trains heads (default: on; with "
        "--recipe paper off, as SafeAILab's code reads them)",
    )
    add("--rope-theta", type=float, help="RoPE base of the head (default: 10000)")
    add("--max-positions", type=int, help="max_position_embeddings to write (default: --length)")
    add(
        "--regenerate",
        type=int,
        default=0,
        metavar="N",
        help="train on the target's own text: N dialogues or windows",
    )
    add("--regenerate-tokens", type=int, default=256, help="most tokens of an answer")
    add("--regenerate-temperature", type=float, default=1.0)
    add("--chat-template", help="a built-in template, or a named one of the model")
    add(
        "--eval-every",
        type=int,
        default=250,
        help="steps between measurements of held-out tau (0: at the end only)",
    )
    add("--eval-prompts", type=int, default=8)
    add("--eval-tokens", type=int, default=96, help="new tokens per prompt")
    add("--prompt-length", type=int, default=64, help="tokens of a plain-text prompt")
    add("--tree", default="paper25", help="of the measurements")
    add("--save-every", type=int, default=100)
    add("--pause-at", type=int, help="stop after this step; the same command goes on from there")
    add("--seed", type=int, default=0)
    add("--device", default="auto", help="auto, cpu, cuda")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="of the target")
    add("--autocast", default="auto", choices=("auto", "on", "off"), help="bf16 autocast (auto: on CUDA)")
    add("--threads", type=int, default=0, help="CPU threads (0 = torch's default)")
    add("--compile", action="store_true", help="compile the forwards (faster after some minutes)")
    add("--force", action="store_true", help="replace what is at --out, better or not")
    add("--debug", action="store_true", help="tracebacks")
    return p


def _taps(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = parser()
    args = p.parse_args(argv)
    low = {"steps": 1, "batch": 1, "accumulate": 1, "length": 8, "ttt_steps": 1, "eval_prompts": 1, "eval_tokens": 2,
           "prompt_length": 2, "save_every": 1}  # fmt: skip
    for name, least in low.items():
        if getattr(args, name) < least:
            p.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; allowed: at least {least}")
    args.norm_before_residual = args.norm_before_residual or ("off" if args.recipe == "paper" else "on")
    args.work = args.work or f"runs/train_eagle/{Path(args.out).name}"
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        train(args)
    except ValueError as error:
        if args.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, WorseHead) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
