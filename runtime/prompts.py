"""What a prompt may be: text, a sequence of token ids, a numpy array or a torch tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import TypeAlias

import numpy as np
from torch import Tensor

from tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int] | np.ndarray | Tensor
ALLOWED = "allowed: text, a list of token ids, or a one-dimensional numpy array or torch tensor of integers"


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """The token ids of a prompt.

    Text becomes ids as a text to continue. What an instruct model should answer goes through the tokenizer's
    `encode_chat` first.

    Raises:
        TypeError: in one line, for anything else than a prompt.
        ValueError: in one line, for text where the checkpoint has no tokenizer.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("the prompt is text, and this checkpoint has no tokenizer; give token ids.")
        return tokenizer.encode(prompt)
    if isinstance(prompt, Tensor | np.ndarray):
        if prompt.ndim != 1 or "int" not in str(prompt.dtype):
            kind = f"{type(prompt).__name__} of shape {tuple(prompt.shape)} and type {prompt.dtype}"
            raise TypeError(f"the prompt is a {kind}; {ALLOWED}.")
        return prompt.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        raise TypeError(f"the prompt is a {type(prompt).__name__}; {ALLOWED}.")
    for item in prompt:
        if not isinstance(item, Integral):
            raise TypeError(f"the prompt has an item {item!r:.40} ({type(item).__name__}); {ALLOWED}.")
    return [item if isinstance(item, bool) else int(item) for item in prompt]


def prompts_ids(prompts: Iterable[Prompt], tokenizer: Tokenizer | None) -> list[list[int]]:
    """The token ids of several prompts. Raises TypeError also for a text, which is one prompt and not several."""
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
        kind = type(prompts).__name__
        raise TypeError(f"the prompts are a {kind}; allowed: a list of prompts. Use generate for one prompt.")
    return [prompt_ids(prompt, tokenizer) for prompt in prompts]
