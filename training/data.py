"""TODO."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from engine import Engine
from model import Transformer
from sampling import SamplingParams
from support.texts import stdlib_files
from tokenizer import Tokenizer

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
        return [], [read_source(p) for p in stdlib_files()[0]], []
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".py", ".md") and p.is_file())
        if not files:
            raise ValueError(f"{path} holds no .txt, .py or .md file; give another --data.")
        return [], [read_source(p) for p in files], []
    if not path.is_file():
        raise ValueError(f"--data {source}: no such file or directory (or `stdlib`).")
    if path.suffix not in (".json", ".jsonl"):
        return [], [read_source(path)], []
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
            conversations, texts = [], [read_source(p) for p in stdlib_files()[1]]
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
