"""Texts to train on, to calibrate with and to measure on: the standard library's sources, and files of the user."""

import ast
import os
import random
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.files import read_text
from support.reader import check, json_lines, refusal

# Modules of the standard library that the demo model and its heads never saw: texts to measure on.
HELD_OUT = "argparse.py csv.py heapq.py json queue.py statistics.py textwrap.py zipfile.py".split()
LEFT_OUT = "encodings pydoc_data site-packages test tests idle_test __pycache__ _bundled".split()


def stdlib_files() -> tuple[list[Path], list[Path]]:
    """(training files, held-out files) of the running interpreter's standard library, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    training: list[Path] = []
    held_out: list[Path] = []
    for folder, inner, files in os.walk(root):
        inner[:] = filter(_is_read, inner)  # site-packages may hold far more files than the library itself
        for path in (Path(folder, name) for name in files if name.endswith(".py") and _is_read(name)):
            (held_out if path.relative_to(root).parts[0] in HELD_OUT else training).append(path)
    return sorted(training), sorted(held_out)


def _is_read(name: str) -> bool:
    """Whether a file or folder of the standard library holds sources that people wrote."""
    return name not in LEFT_OUT and not name.startswith(("config-", "_sysconfigdata"))


def read_source(path: Path) -> str:
    """The text of a source file with Unix line ends. Bytes that are not UTF-8 are left out."""
    return path.read_text(encoding="utf-8", errors="ignore").replace("\r\n", "\n")


def stdlib_texts(held_out: bool) -> Iterator[str]:
    """The sources of the training files or of the held-out ones, in a fixed shuffled order."""
    paths = stdlib_files()[held_out]
    random.Random(0).shuffle(paths)
    return map(read_source, paths)


def docstring_chats(held_out: bool = False) -> list[list[dict[str, str]]]:
    """Questions about the functions of the standard library, answered by their docstrings, in a fixed shuffled order.

    These are conversations that people wrote, so a head can be trained on text that its model did not write. They come
    from the training files of the demo model, or from those that are held out.
    """
    answers: dict[str, str] = {}
    for path in stdlib_files()[held_out]:
        try:
            module = ast.parse(read_source(path))
        except SyntaxError:  # some files are there to be refused
            continue
        for scope in (module, *(node for node in module.body if isinstance(node, ast.ClassDef))):
            for node in scope.body:
                if isinstance(node, ast.FunctionDef) and len(text := ast.get_docstring(node) or "") >= 80:
                    name = f"{scope.name}.{node.name}" if isinstance(scope, ast.ClassDef) else node.name
                    answers.setdefault(f"What does `{name}` do in Python's module `{path.stem}`?", text)
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in answers.items()]
    random.Random(0).shuffle(chats)
    return chats


def read_texts(path: str | Path) -> list[str]:
    """The text of a file, or all texts of a .jsonl file.

    A line of a .jsonl file is a string, or an object with "text", "messages" or "conversations". Raises a one-line
    ValueError for anything else.
    """
    path = Path(path)
    content = read_text(path)
    if path.suffix != ".jsonl":
        return [content]
    return [_text_of(value, where) for where, value in json_lines(content, path)]


def read_chats(path: str | Path) -> list[list[dict[str, str]]]:
    """The conversations of a .jsonl file, one a line under "messages"; [] for a file of anything else.

    Raises a one-line ValueError where only some of the lines are conversations.
    """
    path = Path(path)
    if path.suffix != ".jsonl":
        return []
    rows = list(json_lines(read_text(path), path))
    for where, row in rows:
        _text_of(row, where)  # refuses what is not text
    chats = [row["messages"] for _, row in rows if isinstance(row, dict) and row.get("messages")]
    if chats and len(chats) < len(rows):
        raise refusal(path, f"{len(rows) - len(chats)} lines are no conversations with messages; leave them out.")
    return chats


def _text_of(value: Any, where: str) -> str:
    """The text of a line: a string, or an object with one. The turns of a conversation are joined."""
    if isinstance(value, str):
        return value
    turn = {"content?": (str, None), "value?": (str, None)}
    shape = {"messages?": ([turn], None), "conversations?": ([turn], None), "text?": (str, None)}
    turns = check(value, shape, where, "the line").get("messages") or value.get("conversations")
    texts = [turn.get("content") or turn.get("value") for turn in turns or [{"content": value.get("text")}]]
    if None in texts:
        raise refusal(where, "no text: neither a string nor an object with text, messages or conversations.")
    return "\n\n".join(texts)


def token_windows(texts: Iterable[str | list[int]], tokenizer: Any, vocab_size: int, count: int, length: int) -> Tensor:
    """Up to `count` windows of token ids, int64 [W, length], spread evenly over the texts. A text may be ids already.

    Without a tokenizer (None) the ids are uniformly random. Raises ValueError for texts shorter than one window.
    """
    if tokenizer is None:
        return torch.randint(vocab_size, (count, length), generator=torch.Generator().manual_seed(length))
    ids: list[int] = []
    for text in texts:
        ids += tokenizer.encode(text) if isinstance(text, str) else text
        if len(ids) >= 8 * count * length:  # more text would only take longer to encode
            break
    count = min(count, len(ids) // length)
    if not count:
        raise ValueError(f"the text has {len(ids)} tokens, at least {length} are needed; pass a longer one.")
    starts = [i * (len(ids) - length) // max(1, count - 1) for i in range(count)]
    return torch.tensor([ids[at : at + length] for at in starts])
