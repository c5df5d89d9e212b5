"""Training data: from --data to tokenised rows, and to the micro-batches that every step takes.

--data may name conversations, texts, or rows that are tokenised already. The tokenised rows are kept in --work, so that a
resumed run does not tokenise again. What a step takes depends on the seed and on the number of the step alone, so a
resumed run sees the same rows.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from os.path import commonprefix  # it takes lists, too
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model import Transformer
from support.errors import UsageError
from support.files import read_text, written_whole
from support.reader import json_lines, parse_json, refusal
from support.texts import docstring_chats, read_source, stdlib_files
from text.tokenizer import Tokenizer
from training.loop import World
from weights.files import local_path

ROLES = {"human": "user", "user": "user", "system": "system"}
LEAST_FULL = 0.75  # share of a row of a micro-batch that is no padding
ROLES |= dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant")


@dataclass(frozen=True)
class TokenData:
    """Tokenised rows: row k is ids[starts[k]:starts[k + 1]]; `mask` marks the tokens that count (the assistant's).

    A `stream` (plain text) is sampled in windows at any offset. Otherwise a row is one conversation, cut to the window.
    """

    ids: np.ndarray  # int32
    mask: np.ndarray  # bool
    starts: np.ndarray  # int64 [rows + 1]
    stream: bool

    @classmethod
    def from_rows(cls, rows: list[tuple[list[int], list[bool]]]) -> TokenData:
        """Conversations, each as (ids, mask)."""
        ids = np.array([t for row, _ in rows for t in row], dtype=np.int32)
        mask = np.array([m for _, row in rows for m in row], dtype=bool)
        starts = np.cumsum([0, *(len(row) for row, _ in rows)], dtype=np.int64)
        return cls(ids, mask, starts, False)

    @classmethod
    def from_stream(cls, ids: np.ndarray | list[int]) -> TokenData:
        """One stream of text, all of whose tokens count."""
        return cls(np.asarray(ids, dtype=np.int32), np.ones(len(ids), bool), np.array([0, len(ids)]), True)

    @classmethod
    def load(cls, path: Path) -> TokenData:
        """Read an .npz file. Raises ValueError in one line if it is damaged or holds other arrays."""
        try:
            with np.load(path) as file:
                data = cls(file["ids"], file["mask"], file["starts"], bool(file["stream"]))
        except Exception as error:  # zipfile raises many kinds for a damaged archive
            raise refusal(path, f"no tokenised data ({error}).", "Delete it, and it is made again.") from error
        kinds = [(array.dtype.kind, array.ndim) for array in (data.ids, data.mask, data.starts)]
        if kinds != [("i", 1), ("b", 1), ("i", 1)] or len(data.ids) != len(data.mask) or len(data.starts) < 2:
            raise refusal(path, "its arrays are not those of tokenised data.")
        if data.starts[0] != 0 or data.starts[-1] != len(data.ids) or (np.diff(data.starts) < 0).any():
            raise refusal(path, "its rows do not begin and end where its ids do.")
        return data

    def save(self, path: Path) -> None:
        """Write an .npz file."""
        with written_whole(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, **vars(self))

    @property
    def rows(self) -> int:
        return len(self.starts) - 1

    def place(self, k: int, length: int) -> slice:
        """Where the first `length` tokens of row k lie in ids and mask; of a stream, the k-th window of `length`."""
        low, high = (k * length, len(self.ids)) if self.stream else map(int, self.starts[k : k + 2])
        return slice(low, min(high, low + length))

    def sample(self, seed: int, index: int, length: int) -> slice:
        """Where number `index` of an endless series lies in ids and mask: random windows, or every row once per epoch."""
        if self.stream:
            start = int(np.random.default_rng((seed, index)).integers(0, max(1, len(self.ids) - length + 1)))
            return slice(start, min(len(self.ids), start + length))
        epoch, place = divmod(index, self.rows)
        return self.place(int(_permutation(seed, epoch, self.rows)[place]), length)

    def split(self, share: float) -> tuple[TokenData, TokenData]:
        """The first rows (of a stream: tokens) for training, and the last `share` of them held out."""
        first = 1 - share
        starts = np.array([0, int(len(self.ids) * first), len(self.ids)]) if self.stream else self.starts
        row = min(len(starts) - 2, max(1, round((len(starts) - 1) * first)))
        cut = int(starts[row])
        train = TokenData(self.ids[:cut], self.mask[:cut], starts[: row + 1], self.stream)
        held_out = TokenData(self.ids[cut:], self.mask[cut:], starts[row:] - cut, self.stream)
        if not train.mask.any() or not held_out.mask.any():
            raise ValueError(f"{self.rows} rows are too few to hold some out; give more --data or a --held-out.")
        return train, held_out


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, rows: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(rows)


class Batch(NamedTuple):
    """One micro-batch of rows that are padded at the end to the longest one."""

    tokens: Tensor  # int64 [B, T]
    mask: Tensor  # bool [B, T]
    numbers: Sequence[int] = ()  # of every row in the series of the run
    places: Sequence[slice] = ()  # of every row in the data

    @property
    def lengths(self) -> list[int]:
        """Of every row, without the padding."""
        return [place.stop - place.start for place in self.places]


def padded(rows: Sequence[Tensor], length: int) -> Tensor:
    """Rows [T or less, ...] as one tensor [B, T, ...], with zeros behind them. length: T."""
    return torch.stack([F.pad(row, (0, 0) * (row.dim() - 1) + (0, length - len(row))) for row in rows])


def step_batches(data: TokenData, step: int, world: World, args: argparse.Namespace) -> tuple[list[Batch], float]:
    """This process's micro-batches of a step, and how many tokens count in the whole step (all processes, at least 1).

    The step's rows depend on (seed, step) and on their total number alone, however they are dealt out. Every process gets
    about as many tokens as the others. A micro-batch has at most --batch rows, of like length.
    """
    total = args.batch * args.accumulate * world.size
    rows = [(k, data.sample(args.seed, k, args.length)) for k in range(step * total, (step + 1) * total)]
    count = float(sum(data.mask[place][1:].sum() for _, place in rows))
    rows.sort(key=lambda row: (row[1].start - row[1].stop, row[0]))  # the longest first
    dealt: list[list[tuple[int, slice]]] = [[] for _ in range(world.size)]
    for row in rows:  # to the process that has the fewest tokens so far
        min(dealt, key=lambda its: sum(place.stop - place.start for _, place in its)).append(row)
    batches = []
    own = dealt[world.rank]
    while own:
        longest = max(2, own[0][1].stop - own[0][1].start)
        taken = [row for row in own[: args.batch] if row[1].stop - row[1].start >= LEAST_FULL * longest] or own[:1]
        own = own[len(taken) :]
        numbers, places = zip(*taken, strict=True)
        parts = ([torch.from_numpy(part[place]) for place in places] for part in (data.ids, data.mask))
        tokens, mask = (padded(rows_of, longest).to(world.device) for rows_of in parts)
        batches.append(Batch(tokens.long(), mask, numbers, places))
    return batches, max(1.0, count)


def read_records(source: str, held_out: bool = False) -> tuple[list[list[dict]], list[str], list[str]]:
    """Read a data file or directory, `stdlib` (the demo's training files, or those held out), or `docstrings` of these.

    Returns:
        (conversations as role/content messages, texts, reasons for the rows that were left out).

    Raises:
        ValueError: one line, if there is nothing to read or the file is not JSON as its name says.
    """
    path = Path(source)
    if source == "docstrings":
        return docstring_chats(held_out), [], []
    if source == "stdlib":
        files = stdlib_files()[held_out]
    elif path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".py", ".md") and p.is_file())
    else:
        files = [path] if path.is_file() else []
    if not files:
        raise ValueError(f"{source}: no such file or folder of .txt, .py or .md files, nor `stdlib` or `docstrings`.")
    if path.suffix not in (".json", ".jsonl") or not path.is_file():
        return [], [read_source(file) for file in files], []
    text = read_text(path)
    array = text.lstrip().startswith("[")
    records = parse_json(text, path, len(text)) if array else [value for _, value in json_lines(text, path)]
    conversations: list[list[dict]] = []
    texts: list[str] = []
    left_out: list[str] = []
    for number, record in enumerate(records, 1):
        try:
            if isinstance(record, dict) and isinstance(record.get("text"), str):
                texts.append(record["text"])
            else:
                conversations.append(read_messages(record))
        except ValueError as error:
            left_out.append(f"row {number}: {error}")
    return conversations, texts, left_out


def written_by_models(source: str) -> int:
    """How many conversations of a data file scripts.make_chats wrote: these name the temperature of their answers."""
    path = Path(source)
    if path.suffix != ".jsonl" or not path.is_file():
        return 0
    return sum(isinstance(record, dict) and "temperature" in record for _, record in json_lines(read_text(path), path))


def question_of(record: dict) -> str:
    """The first question of a line that scripts.make_chats wrote, or how its text begins."""
    return record.get("begins") or next(m["content"] for m in record["messages"] if m["role"] == "user")


def read_messages(record: dict) -> list[dict]:
    """Messages [system,] user, assistant, ..., assistant of a ShareGPT or OpenAI record; ValueError if it has none.

    Answers before the first question and questions after the last answer are dropped.
    """
    turns = record.get("messages", record.get("conversations")) if isinstance(record, dict) else None
    if not isinstance(turns, list):
        raise ValueError("neither `messages`, `conversations` nor `text`")
    messages = []
    for turn in turns:
        turn = turn if isinstance(turn, dict) else {}
        name = turn.get("role", turn.get("from"))
        content = turn.get("content", turn.get("value"))
        if isinstance(content, list):
            texts = [p.get("text", "") for p in content if isinstance(p, dict)]
            content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
        if not isinstance(name, str) or name not in ROLES or not isinstance(content, str):
            raise ValueError(f"a turn of role {name!r:.40} (known: {', '.join(ROLES)}) or without text")
        messages.append({"role": ROLES[name], "content": content})
    roles = "".join(message["role"][0] for message in messages)  # s, u and a
    talk = re.fullmatch("(s?)a*((?:ua)+)u*", roles)
    if talk is None:
        raise ValueError("roles do not alternate between user and assistant")
    return messages[: talk.end(1)] + messages[talk.start(2) : talk.end(2)]


def chat_row(tokenizer: Tokenizer, messages: list[dict]) -> tuple[list[int], list[bool]]:
    """(ids, mask) of a conversation: an answer counts from behind the generation prompt to its end-of-turn token.

    The template decides where that is: the prompt of every answer, and the conversation up to it, are rendered too.
    Raises ValueError if no token counts.
    """
    ids = tokenizer.encode_chat(messages, add_generation_prompt=False)
    mask = [False] * len(ids)
    for k in (k for k, message in enumerate(messages) if message["role"] == "assistant"):
        prompt = tokenizer.encode_chat(messages[:k], add_generation_prompt=True)
        so_far = tokenizer.encode_chat(messages[: k + 1], add_generation_prompt=False)
        start, end = (len(commonprefix((part, ids))) for part in (prompt, so_far))
        end = next((i + 1 for i in range(start, end) if ids[i] in tokenizer.eos_ids), end)
        mask[start:end] = [True] * (end - start)
    if not any(mask):
        raise ValueError("no token of an answer was found")
    return ids, mask


def tokenise(tokenizer: Tokenizer, conversations: list, texts: list[str]) -> tuple[TokenData, list[str]]:
    """Conversations as rows, or else texts as one stream of BOS + text + EOS; and reasons for rows left out."""
    if not conversations:
        bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        eos = tokenizer.eos_ids[:1]
        ids = [i for text in texts for i in (*bos, *tokenizer.encode(text, add_bos=False), *eos)]
        return TokenData.from_stream(ids), []

    rows: list[tuple[list[int], list[bool]]] = []
    left_out: list[str] = []
    for messages in conversations:
        try:
            rows.append(chat_row(tokenizer, messages))
        except ValueError as error:
            left_out.append(str(error))
    rows += [(ids, [True] * len(ids)) for ids in map(tokenizer.encode, texts)]
    return TokenData.from_rows(rows), left_out


def load_data(
    args: argparse.Namespace, target: Transformer, tokenizer: Tokenizer | None
) -> tuple[TokenData, TokenData]:
    """(training, held-out) data of a run.

    Held out is what --held-out names, for stdlib the demo model's held-out modules, or else the last 5 % of --data.
    Raises ValueError in one line for data that cannot be used.
    """
    source = Path(args.data)
    cache = source if source.suffix == ".npz" else Path(args.work) / f"data-{fingerprint(args)}.npz"
    if not cache.exists():
        _read_data(args.data, "--data", tokenizer).save(cache)
    data = TokenData.load(cache)
    if len(data.ids) == 0 or not 0 <= data.ids.min() <= data.ids.max() < target.config.vocab_size:
        raise ValueError(f"--data {args.data}: no tokens, or ids outside the target's vocabulary.")
    if args.held_out is None and args.data != "stdlib":
        return data.split(0.05)
    return data, _read_data(args.held_out or args.data, "--held-out", tokenizer)


def fingerprint(args: argparse.Namespace, data: bool = True) -> str:
    """A hash of everything that may decide the tokenised data: options, and the files with their times. Without `data` it
    is one of the model alone."""
    checkpoint = local_path(args.checkpoint).resolve()
    key = [checkpoint, *((args.data, args.chat_template) if data else ())]
    source = Path(args.data)
    files = [source, *sorted(source.rglob("*"))] if data else []
    files += sorted(checkpoint.glob("*")) if checkpoint.is_dir() else [checkpoint]
    for file in (file for file in files if file.is_file()):
        key += [file, file.stat().st_size, file.stat().st_mtime_ns]
    return hashlib.sha256(repr(key).encode()).hexdigest()[:16]


def _read_data(source: str, option: str, tokenizer: Tokenizer | None) -> TokenData:
    """The tokenised data that `option` names."""
    if source.endswith(".npz"):
        return TokenData.load(Path(source))
    if tokenizer is None:
        raise UsageError(f"the checkpoint has no tokenizer; give {option} as a tokenised .npz.")
    conversations, texts, left_out = read_records(source, option == "--held-out")
    data, reasons = tokenise(tokenizer, conversations, texts)
    left_out += reasons
    if left_out:
        print(f"{option}: left out {len(left_out)} rows, e.g. {left_out[0]}", file=sys.stderr)
    if not data.mask.any():
        why = left_out[0] if left_out else "it is empty"
        raise ValueError(f"{option} {source}: no text that counts ({why}).")
    return data
