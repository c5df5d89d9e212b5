"""TODO."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# The default texts are the standard library's sources: these modules measure, the rest calibrates. The demo model was
# trained with the same split (scripts.train_demo; a test compares the lists).
HELD_OUT = "argparse.py csv.py heapq.py json queue.py statistics.py textwrap.py zipfile.py".split()


LEFT_OUT = "encodings pydoc_data site-packages test tests idle_test __pycache__ _bundled".split()


def stdlib_texts(held_out: bool) -> Iterator[str]:
    """Sources of the running interpreter's standard library, in a fixed shuffled order."""
    root, paths = Path(sysconfig.get_paths()["stdlib"]), []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        skip = any(p in LEFT_OUT or p.startswith(("config-", "_sysconfigdata")) for p in parts)
        if not skip and (parts[0] in HELD_OUT) == held_out:
            paths.append(path)
    random.Random(0).shuffle(paths)
    for path in paths:
        yield path.read_text(encoding="utf-8", errors="ignore").replace("\r\n", "\n")


def read_texts(path: str | Path) -> list[str]:
    """A text file, or the texts of a .jsonl file: strings, or objects with "text", "messages" or "conversations"."""
    path, texts = Path(path), []
    try:
        content = path.read_text(encoding="utf-8")
        for line in content.splitlines() if path.suffix == ".jsonl" else ():
            value = json.loads(line) if line.strip() else ""
            if isinstance(value, dict):
                turns = (
                    value.get("messages") or value.get("conversations") or [{"content": value.get("text")}]
                )
                value = "\n\n".join(turn.get("content") or turn.get("value") for turn in turns)
            texts.append(value + "")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}).") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not UTF-8 text, or not JSON lines with text ({error}).") from error
    return texts if path.suffix == ".jsonl" else [content]


def token_windows(texts: Iterable[str], tokenizer: Any, vocab_size: int, count: int, length: int) -> Tensor:
    """Up to `count` windows [W, length] spread evenly over the texts; without a tokenizer uniformly random ids."""
    if tokenizer is None:
        return torch.randint(vocab_size, (count, length), generator=torch.Generator().manual_seed(length))
    ids: list[int] = []
    for text in texts:
        ids += tokenizer.encode(text)
        if len(ids) >= 8 * count * length:  # more is only slower to encode
            break
    count = min(count, len(ids) // length)
    if not count:
        raise ValueError(f"the text has {len(ids)} tokens, at least {length} are needed; pass a longer one.")
    starts = [i * (len(ids) - length) // max(1, count - 1) for i in range(count)]
    return torch.tensor([ids[at : at + length] for at in starts])
