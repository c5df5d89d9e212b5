"""What the choices of a request give: text, thoughts, tool calls and log-probabilities as they come."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from cli.steps import StepRecorder
from engine.results import Chunk, TokenLogprob
from engine.streams import Stream
from serving.requests import Ask
from text.splitter import ARGUMENTS, CALL, TEXT, THOUGHT, Piece, Splitter
from text.tokenizer import Tokenizer


@dataclass
class ToolCall:
    """A call that the model asks for, or a part of one. The arguments are JSON text, as in OpenAI's API."""

    id: str
    name: str
    arguments: str = ""


# A token, and how likely it and others were. Of the first token of a prompt that is not known.
TokenInfo = tuple[int, TokenLogprob | None]


class Part(NamedTuple):
    """What became certain of a choice. Each call comes as a part with its name, and then its arguments as they
    grow, in parts without a name; the numbers count the calls of the choice."""

    index: int
    text: str
    thought: str
    calls: Sequence[tuple[int, ToolCall]]
    tokens: Sequence[TokenInfo]
    finish: str  # "stop", "length" or "tool_calls" in the last part, else ""
    seen: Mapping[str, Any]  # of the steps, where the request asks for it


class Answer:
    """One choice while it is decoded, and afterwards."""

    def __init__(self, index: int, ask: Ask, tokenizer: Tokenizer | None, stream: Stream, stop_ids: Sequence[int]):
        """stop_ids: those that end the text, which have no place among the tokens with log-probabilities."""
        self.index = index
        self.stream = stream
        self.result = stream.result
        self.recorder: StepRecorder | None = None  # where the request asks for its steps
        self.text = ""
        self.thought = ""
        self.tokens: list[TokenInfo] = []
        self.finish = ""
        self._taken = 0  # chunks
        self._stop_ids = frozenset(stop_ids)
        self._ask = ask
        self._calls: list[ToolCall] = []
        self._splitter: Splitter | None = None
        self._around = False  # whether the text has the marks of a thought that has begun in it and not ended
        dialect = tokenizer.dialect if tokenizer and ask.messages else None
        if dialect and (ask.tools or dialect.thoughts):
            schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in ask.tools}
            self._splitter = Splitter(dialect, schemas, ask.begun)
            self._marks = dialect.thoughts

    @property
    def calls(self) -> list[ToolCall]:
        """The calls so far, or the first one where the request wants only one."""
        return self._calls[:1] if self._ask.one_call else self._calls

    def take(self, chunks: Sequence[Chunk], ended: bool) -> Part:
        """Add what the engine said of this choice since the last call. ended: there is no more of it."""
        cut = ended and self.result.stop_reason in ("length", "interrupted")
        written = "".join(chunk.text for chunk in chunks)
        pieces = self._splitter.push(written) if self._splitter else [Piece(TEXT, written)]
        # There are no pairs, unless the request asks for log-probabilities.
        pairs = (pair for chunk in chunks for pair in zip(chunk.token_ids, chunk.logprobs, strict=False))
        tokens = [(token, chances) for token, chances in pairs if token not in self._stop_ids]
        if ended and self._splitter:
            pieces += self._splitter.finish(cut)
        text, thought, calls = self._sort(pieces)
        if ended and self._around:
            text += f"\n{self._marks.end}"
        self.text += text
        self.thought += thought
        self.tokens += tokens
        if ended:
            whole = bool(self.calls) and not (cut and self._splitter.in_call)
            self.finish = "tool_calls" if whole else "length" if cut else "stop"
        seen = self._seen(len(chunks)) if self.recorder and chunks else {}
        return Part(self.index, text, thought, calls, tokens, self.finish, seen)

    def _seen(self, chunks: int) -> dict[str, Any]:
        """The steps behind the next chunks, for those who draw the trees. The first chunk comes from the prompt."""
        recorder, before = self.recorder, self._taken
        self._taken += chunks
        views = recorder.views[max(before - 1, 0) : self._taken - 1]
        first = {} if before else {"first": recorder.first, "scores": recorder.meaning()}
        return first | {"steps": [asdict(view) for view in views]}

    def _sort(self, pieces: Sequence[Piece]) -> tuple[str, str, list[tuple[int, ToolCall]]]:
        """What the pieces add to the text, the thought and the calls."""
        text, thought, parts = "", "", list[tuple[int, ToolCall]]()
        for piece in pieces:
            if piece.kind == THOUGHT and self._ask.raw_thoughts:
                text += piece.text if self._around else f"{self._marks.begin}\n{piece.text}"
                self._around = True
            elif piece.kind == THOUGHT:
                thought += piece.text
            elif piece.kind == CALL:
                # Mistral's templates want exactly nine characters; longer ones would serve the others no better.
                part = ToolCall(piece.id or secrets.token_hex(5)[:9], piece.text)
                self._calls.append(replace(part))
                parts.append((len(self._calls) - 1, part))
            elif piece.kind == ARGUMENTS:
                self._calls[-1].arguments += piece.text
                parts.append((len(self._calls) - 1, ToolCall(self._calls[-1].id, "", piece.text)))
            elif piece.kind == TEXT:
                text += f"\n{self._marks.end}\n\n{piece.text}" if self._around else piece.text
                self._around = False
        return text, thought, [part for part in parts if part[0] == 0 or not self._ask.one_call]
