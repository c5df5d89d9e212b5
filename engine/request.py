"""One prompt on an engine: what the host knows of its row, how it takes what prefill and steps give, and the inbox of its
chunks."""

import threading
from collections import deque
from collections.abc import Callable, Sequence

from decoding.params import SamplingMode, SamplingParams
from decoding.sampling import Logprobs
from engine.grammar import Constraint
from engine.prompt_cache import Saved, kept_ids
from engine.results import Chunk, GenerationResult, on_host
from text.tokenizer import Tokenizer


class Inbox:
    """The chunks of one stream that nobody has read yet. The thread that decodes fills it."""

    def __init__(self, requests: int):
        """requests: how many will end."""
        self.chunks: deque[Chunk] = deque()
        self.left = requests
        self.error: Exception | None = None
        self.listener: Callable[[], None] = lambda: None  # told of all news, in the thread that decodes
        self._news = threading.Condition()

    @property
    def ready(self) -> bool:
        """Whether there is something to read: a chunk, an error, or the end."""
        return bool(self.chunks) or self.error is not None or not self.left

    def put(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self._tell()

    def end(self, error: Exception | None = None) -> None:
        """One request gets nothing more. An error is raised for the reader behind the chunks that came before it."""
        self.left -= 1
        self.error = self.error or error
        self._tell()

    def _tell(self) -> None:
        with self._news:
            self._news.notify_all()
        self.listener()

    def wait(self) -> None:
        """Wait until there is something to read."""
        with self._news:
            self._news.wait_for(lambda: self.ready)

    def take(self) -> Chunk | None:
        """The next chunk, or None at the end. Raises the error of a request that failed. Call it when it is `ready`."""
        if self.chunks:
            return self.chunks.popleft()
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return None


class Request:
    """The host's state of one sequence, from its prompt to its last chunk. It stops at stop ids, stop strings and the
    length limit, and decodes the text."""

    def __init__(
        self, prompt: list[int], params: SamplingParams, stop_ids: Sequence[int], tokenizer: Tokenizer | None,
        inbox: Inbox, constraint: Constraint | None = None, index: int = 0, adapter: int = 0, chain: int = 0,
    ):  # fmt: skip
        """inbox: takes the chunks. index: of this prompt among those of its stream. adapter: see `weights.lora`. chain:
        as of GenerationResult."""
        self.prompt = prompt
        self.params = params
        self.mode: SamplingMode = params.mode
        self.stop_ids = frozenset(stop_ids)
        self.decoder = None if tokenizer is None else tokenizer.stream(continuation=True, shown=params.shown_ids)
        self.result = GenerationResult(len(prompt), params.temperature, params.seed, chain=chain)
        self.constraint = constraint
        self.inbox = inbox
        self.index = index
        self.adapter = adapter
        self.scores: list[Logprobs] | None = [] if params.prompt_logprobs is not None else None  # of the prompt's parts
        self.restored: Saved | None = None  # the kept text that its row got
        self.row = -1  # the row of the engine that it has
        self.length = 0  # tokens in the target's cache
        self.drafted = 0  # draft rows that are made of true features
        self.text = ""
        self.shown = 0  # characters of the text that were handed out
        self.stopping = False  # whether it shall end soon, behind what runs now; any thread may say so
        self.began = 0.0  # when it got its row
        self.finished = False  # whether a stop rule has ended the text
        self.ended = False  # whether it gets nothing more

    def begin(self, first: int, logprobs: Logprobs | None) -> None:
        """Take the first token, which the prompt's forward gave, and what that forward says of the prompt."""
        self.length = len(self.prompt)
        self.drafted = len(self.prompt) - 1
        if self.scores is not None:
            parts = [on_host(part, None, self.params.prompt_logprobs) for part in self.scores]
            self.result.prompt_logprobs = [None, *(entry for part in parts for entry in part)]
        if not self.params.max_new_tokens:
            self._finish("length")
            return
        self._hand_out(self._push([first], logprobs and logprobs.row(0), step=False))

    def take(self, ring: list[int], nodes: int, speculative: bool, logprobs: Logprobs | None) -> int | None:
        """Take this row's part of a step, as the ring holds it. Returns where the logits were not finite, if anywhere.

        nodes: drafted ones. speculative: whether it was the drafter's step, and no plain one in its place.
        """
        count, done, emitted, finite = ring[0], ring[1], ring[2::2], ring[3::2]
        usable = [*finite, 0].index(0)  # an unusable token is an error, unless a stop comes before it
        position = self.length + usable
        if speculative:
            self.drafted = self.length
        self.length += count
        chunk = self._push(emitted[: min(usable, count)], logprobs)
        if speculative and chunk.token_ids:
            self.result.nodes_per_step.append(nodes)
        elif chunk.token_ids:
            self.result.plain_steps.append(self.result.steps - 1)
        if self.finished or usable > 0:
            self._hand_out(chunk)
        if not self.finished and usable < count:
            return position
        if done and not self.finished:
            raise RuntimeError(f"sequence {self.index} stopped on the device alone; please report this.")
        return None

    def _hand_out(self, chunk: Chunk) -> None:
        if not self.finished and self.constraint is not None:
            self.constraint.take(chunk.token_ids)
        self.inbox.put(chunk)

    def _push(self, ids: Sequence[int], logprobs: Logprobs | None = None, step: bool = True) -> Chunk:
        """Take the ids of a step and, if the request asked for them, their Logprobs [P]. Returns what counts."""
        taken: list[int] = []
        for token in ids:
            if self.finished:
                break
            taken.append(token)
            self._take_token(token, self.result.new_tokens + len(taken))
        chances = on_host(logprobs, len(taken), self.params.logprobs)
        self.result.token_ids += taken
        self.result.logprobs += chances
        if step and taken:
            self.result.tokens_per_step.append(taken)
        if self.finished and self.decoder is not None and self.result.stop_reason != "stop":
            self.text += self.decoder.flush()
            self._cut_at_stop_string()
        return Chunk(self.index, taken, self._show(), chances)

    def _take_token(self, token: int, produced: int) -> None:
        if token in self.stop_ids:
            self._finish("eos")
            return
        if self.decoder is not None:
            self.text += self.decoder.push([token])
            if self._cut_at_stop_string():
                return
        if produced >= self.params.max_new_tokens:
            self._finish("length")

    def _cut_at_stop_string(self) -> bool:
        places = [at for at in (self.text.find(s, self.shown) for s in self.params.stop) if at >= 0]
        if places:
            self.text = self.text[: min(places)]
            self._finish("stop")
        return bool(places)

    def _finish(self, reason: str) -> None:
        self.finished = True
        self.result.stop_reason = reason

    def _show(self) -> str:
        """The new text, without an end that could still become a stop string."""
        begun = (stop[:size] for stop in self.params.stop for size in range(1, len(stop)))
        hold = 0 if self.finished else max((len(part) for part in begun if self.text.endswith(part)), default=0)
        end = max(self.shown, len(self.text) - hold)
        new = self.text[self.shown : end]
        self.shown = end
        self.result.text = self.text
        return new

    def end(self, error: Exception | None = None) -> None:
        """It gets nothing more: its text has ended, nobody reads it, or an error ends it."""
        self.ended = True
        if not self.finished:
            self.result.stop_reason = "interrupted"
        self.inbox.end(error)

    def cached(self) -> tuple[list[int], int]:
        """What the caches hold now for others: the text of this row as `kept_ids`, and the number of its valid draft
        rows. A prompt with log-probabilities is none, because nobody goes on from it."""
        if self.scores is not None:
            return [], 0
        text = kept_ids(self.prompt + self.result.token_ids, self.adapter)
        return text[: self.length], max(0, min(self.drafted, len(text) - 1))
