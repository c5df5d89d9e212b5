"""Prompts and prefill: known tokens run through the target and the drafter, and set up the row that goes on from them."""

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from functools import partial
from numbers import Integral
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from decoding import sampling, snapshots
from decoding.drafter import Drafter
from decoding.params import SamplingMode
from decoding.sampling import Logprobs
from decoding.step import HISTORY, DecodeState
from kernels.memory import clear, commit_text, part_of_text
from model import Transformer, chain_ancestors
from support.errors import advised
from text.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int] | np.ndarray | Tensor
ALLOWED = "allowed: text, a list of token ids, or a one-dimensional numpy array or torch tensor of integers"
CHUNKS = (32, 64, 128, 256)  # fixed widths, so that a prompt of any length runs shapes that were seen before
SCORED = 64  # rows of logits that are held at a time
WIDE_CHUNKS = (512, 1024, 2048)  # fewer launches, where memory has room and no other row waits for a step


def chunk_width(left: int, widest: int) -> int:
    """The width of the next chunk of a prompt of which `left` tokens are still to be read.

    At most an eighth of a wide chunk is padding. widest: the widest chunk that may be chosen."""
    widths = [w for w in CHUNKS + WIDE_CHUNKS if w <= widest]
    fits = next((w for w in widths if w >= left), None)
    if fits and (fits <= CHUNKS[-1] or left >= fits - fits // 8):
        return fits
    return max(w for w in widths if w <= left)


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


class Prefill:
    """Works on the buffers of a DecodeState, one row at a time. Needs the kernel backend of its engine to be active."""

    def __init__(
        self, model: Transformer, drafter: Drafter, state: DecodeState, layers: Callable | None, compiled: bool,
        widest: int = CHUNKS[-1],
    ):  # fmt: skip
        """layers: a faster `Transformer.run_layers`, if any. compiled: whether chunks are compiled as a whole. widest:
        the widest chunk."""
        self.model = model
        self.drafter = drafter
        self.state = state
        self.widest = widest
        self.any_width = model.device.type == "cpu" and not compiled  # else new shapes take time
        self.turns: Collection[int] = ()  # ids that begin or end a turn, where a snapshot is worth most
        rows = len(state.spans)
        self.snapshots: list[list[snapshots.Snapshot]] = [[] for _ in range(rows)]  # of each row's text, in their order
        self.most = snapshots.most_snapshots(rows, sum(part.nbytes for part in snapshots.remembered(state, drafter, 0)))
        self.forward: Callable = partial(run_chunk, layers=layers)
        if compiled:
            self.forward = torch.compile(run_chunk, fullgraph=True, dynamic=False)

    def read(
        self, row: int, prompt: list[int], mode: SamplingMode, start: int = 0, allowed: Tensor | None = None,
        alone: Callable[[], bool] = lambda: True, scores: list[Logprobs] | None = None,
    ) -> Generator[None, None, tuple[int, Logprobs | None]]:  # fmt: skip
        """Run prompt[start:] and set up the row. Comes back between two chunks of the prompt, so that others can go on.

        allowed: the tokens that may come first, int32 [W] as in `sampling.restrict`; None: all. alone: whether no other
        row waits for a step, so that the next chunk may be a wide one. scores: takes the Logprobs [n] of the tokens of
        the prompt from start + 1 on, part by part.

        Returns the first token, and its Logprobs [1, 1] if the mode has them. Raises ArithmeticError if the logits after
        the prompt cannot be used.
        """
        state = self.state
        P = len(prompt)
        places = snapshots.resting_places(prompt, start, self.turns, self.snapshots[row]) if self.most else []
        raw_logits, noise = yield from self._logits(row, prompt, mode, start, alone, scores, places)
        logits = self.penalised(row, raw_logits, prompt, P, mode)
        if allowed is not None:
            logits = sampling.restrict(logits, allowed.to(logits.device).view(1, 1, -1))
        choice = sampling.choose(logits, noise, state.sampling.part(row), mode)
        logprobs = sampling.logprobs_of(raw_logits, choice) if mode.logprobs else None
        first = choice[0, 0]
        state.tokens[row, :P] = torch.tensor(prompt, device=first.device)
        state.tokens[row, P] = first
        state.n[row] = P
        state.root[row] = first
        state.count[row] = 1
        state.produced[row] = 1
        state.done[row] = False
        state.seen[row, first] = True
        state.counts[row, first] = 1
        return int(first), logprobs

    def logits(self, row: int, text: list[int], mode: SamplingMode) -> tuple[Tensor, Tensor | None]:
        """Fill the caches with a text; logits [1, 1, V] after its last token, and the noise of that position."""
        parts = self._logits(row, text, mode, 0)
        while True:
            try:
                next(parts)
            except StopIteration as end:
                return end.value

    def _logits(
        self, row: int, text: list[int], mode: SamplingMode, start: int, alone: Callable[[], bool] = lambda: True,
        scores: list[Logprobs] | None = None, places: Sequence[int] = (),
    ) -> Generator[None, None, tuple[Tensor, Tensor | None]]:  # fmt: skip
        """`logits` of text[start:], chunk by chunk. The last token's feature becomes the pending one. places: where a
        snapshot is taken."""
        state = self.state
        P = len(text)
        device = self.model.device
        ids = torch.tensor([*text, 0], dtype=torch.int64)
        if state.memory is not None and start == 0:
            clear(state.memory, row)
        kept = self.drafter.kept if self.drafter.ring else P
        while start < P:
            ends = [place for place in (*places, P) if place > start]
            left = ends[0] - start
            width = chunk_width(left, self.widest if alone() else CHUNKS[-1])
            take = min(width, left)
            if self.any_width:
                width = min(width, -(-take // 16) * 16)
            known = torch.zeros(1, width + 1, dtype=torch.int64)  # a drafter reads the next token, too
            known[0, : take + 1] = ids[start : start + take + 1]
            known = known.to(device)
            where, keep = (torch.tensor([n], device=device) for n in (start, take))
            told = any(start + take > end - kept for end in ends)  # whether the drafter keeps any of it
            hidden_states, features = self.forward(self.model, self.drafter, state, row, known, where, keep, told)
            if scores is not None:
                self._score(scores, hidden_states, known[:, 1 : 1 + min(take, P - 1 - start)], start)
            start += take
            if start in places:
                self.add_snapshot(row, start, start, start)
            if start < P:
                yield
        state.features[row, 0] = features[0, take - 1]
        if state.history.shape[1]:  # for a drafter that catches up with plain steps
            state.history[row, (P - 1) % HISTORY] = features[0, take - 1]
        logits = self.model.logits(hidden_states[:, take - 1 : take])
        if not bool(sampling.finite(logits).all()):
            raise not_finite(self.model, state, P - 1)
        if not mode.sample:
            return logits, None
        before = torch.tensor([P - 1], device=device)
        return logits, sampling.noise_ahead(state.sampling.seed[row : row + 1], before, 1, state.hashes)

    def add_snapshot(self, row: int, at: int, end: int, drafted: int) -> None:
        """Take one of a row as it is now, unless there is one near. Where there are too many, the oldest go, but not the
        first one of a text."""
        if not self.most or end - max((snapshot.end for snapshot in self.snapshots[row]), default=0) < snapshots.APART:
            return
        parts = snapshots.remembered(self.state, self.drafter, row)
        copies = tuple(part.to("cpu", copy=True).contiguous() for part in parts)  # waits for the device
        first, *rest = [*self.snapshots[row], snapshots.Snapshot(at, end, drafted, copies)]
        self.snapshots[row] = [first, *rest[max(0, len(rest) + 1 - self.most) :]]

    def _score(self, scores: list[Logprobs], hidden_states: Tensor, nexts: Tensor, start: int) -> None:
        """Add the Logprobs of the tokens nexts [1, n], which follow those from position `start` on."""
        for at in range(0, nexts.shape[1], SCORED):
            part = nexts[:, at : at + SCORED]
            logits = self.model.logits(hidden_states[:, at : at + part.shape[1]])
            if not bool(sampling.finite(logits).all()):
                raise not_finite(self.model, self.state, start + at)
            scores.append(sampling.logprobs_of(logits, part).row(0))

    def penalised(self, row: int, logits: Tensor, text: Sequence[int], prompt: int, mode: SamplingMode) -> Tensor:
        """The logits [1, 1, V] with biases and with the penalties for `text`, of which the first `prompt` ids were not
        generated.

        The row's counters are set to what they are after that text.
        """
        state, device = self.state, self.model.device
        if mode.bias:
            position = torch.full((1, 1), len(text), device=device)
            logits = sampling.add_bias(logits, position, state.sampling.part(row))
        if not mode.penalties:
            return logits
        state.seen[row] = False
        state.counts[row] = 0
        state.seen[row, torch.tensor(text, device=device)] = True
        generated = torch.tensor(text[prompt:], dtype=torch.int64, device=device)
        state.counts[row].scatter_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))
        empty = torch.zeros(1, 1, 1, dtype=torch.int64, device=device)
        seen, counts = state.seen[row : row + 1], state.counts[row : row + 1]
        return sampling.apply_penalties(logits, seen, counts, empty, empty.bool(), state.sampling.part(row))

    def catch_up(self, row: int, start: int, end: int) -> None:
        """Give the drafter the tokens start .. end - 1, which were decoded plainly. No host sync."""
        state = self.state
        width = CHUNKS[0]
        level = torch.arange(width + 1, device=self.model.device)
        for at in range(start, end, width):
            tokens = state.tokens[row].index_select(0, (at + level).clamp(max=state.slots - 1))
            features = state.history[row].index_select(0, (at + level[:-1]) % HISTORY)
            where, keep = (torch.full_like(level[:1], n) for n in (at, min(width, end - at)))
            self.drafter.prefill(row, tokens[None], features[None], where, keep)


def run_chunk(
    model: Transformer, drafter: Drafter, state: DecodeState, row: int, known: Tensor, start: Tensor, keep: Tensor,
    told: bool, layers: Callable | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A chunk of known tokens [1, T + 1] from position start [1] -> hidden_states [1, T, H], features [1, T, F].

    The last token only tells the drafter what follows the others. keep [1]: how many of these are no padding. told:
    whether the drafter learns of them.
    """
    tokens = known[:, :-1]
    T = tokens.shape[1]
    depth = torch.arange(T, device=tokens.device)[None]
    seen = chain_ancestors(1, T, tokens.device), state.slots, state.segments.narrow(0, row, 1)
    nodes = model.nodes(start, depth, *seen, chain=True)
    memory = state.memory and part_of_text(state.memory, row, keep)
    hidden_states, taps = model(tokens, nodes, state.kv, drafter.taps, layers, memory)
    if memory is not None:
        commit_text(memory, state.window)
    features = hidden_states if taps is None else taps
    if told:
        drafter.prefill(row, known, features, start, keep)
    return hidden_states, features


def not_finite(model: Transformer, state: DecodeState, position: int) -> ArithmeticError:
    """The error for logits that are not finite at a position."""
    hint = "Are the weights damaged?"
    if model.dtype == torch.float16:
        hint = "fp16 overflow? Try --dtype bfloat16 or float32."
    elif state.kv[0].dtype == torch.float16:
        hint = "Keys or values above 65,504? Try --kv model."
    return advised(ArithmeticError(f"logits became non-finite at token {position}."), hint)
