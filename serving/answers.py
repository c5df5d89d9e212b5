"""What the choices of a request give: text, tool calls and log-probabilities as they come, and figures at the end.

Every family of models writes tool calls in a format of its own, which its chat template shows.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.results import Chunk, GenerationResult, TokenLogprob, acceptance
from serving.requests import Ask
from text.tokenizer import Tokenizer


class ToolCall(NamedTuple):
    """A call that the model asks for. The arguments are JSON text, as in OpenAI's API."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolFormat:
    """How a family writes calls: between two marks, or from a mark to the end of the answer."""

    begin: str
    end: str = ""
    bare: bool = False  # an answer that begins with "{" is a call, too
    shown_by: tuple[str, ...] = ()  # a chat template that writes one of these texts uses this format


HERMES = ToolFormat("<tool_call>", "</tool_call>", shown_by=("<tool_call>",))
MISTRAL = ToolFormat("[TOOL_CALLS]", shown_by=("[TOOL_CALLS]",))
LLAMA = ToolFormat("<|python_tag|>", bare=True, shown_by=("python_tag", '"parameters"'))
FORMATS = (HERMES, MISTRAL, LLAMA)
FORCED = ToolFormat("")  # the whole answer is a call


def tool_format(tokenizer: Tokenizer) -> ToolFormat:
    """The format that the model's chat template uses. Hermes' is the most common one, so it is the default."""
    return next((form for form in FORMATS if any(map(tokenizer.template_writes, form.shown_by))), HERMES)


class ToolCallParser:
    """Splits an answer into text and tool calls while it arrives.

    Text before a call is handed out at once, apart from an end that may begin a mark. A call is handed out when it is
    complete. What looks like a call and is none, or names no tool of the request, is text.
    """

    def __init__(self, form: ToolFormat, names: set[str], tokenizer: Tokenizer | None = None):
        """names: of the tools that may be called. tokenizer: what `read` needs."""
        self.form = form
        self.names = names
        self.tokenizer = tokenizer
        special = tokenizer.special_ids if tokenizer else ()
        # the id of the mark that begins a call, if it is a special token, which the engine's text leaves out
        begins = form.begin.encode()
        self.mark = next((i for i in special if begins and tokenizer.pieces.get(i) == begins), None)
        self.waiting = ""  # text that may belong to a call
        self.inside = False
        self.begun = False  # whether the answer has anything but white space

    def read(self, chunk: Chunk) -> tuple[str, list[ToolCall]]:
        """Take what a step emitted, with the mark where its token stands."""
        if self.mark not in chunk.token_ids:
            return self.push(chunk.text)
        after = chunk.token_ids[chunk.token_ids.index(self.mark) + 1 :]
        at = max(0, len(chunk.text) - len(self.tokenizer.decode(after, continuation=True)))
        return self.push(chunk.text[:at] + self.form.begin + chunk.text[at:])

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Take more of the answer. Returns the text and the calls that are certain now."""
        self.waiting += text
        shown, calls = "", []
        while True:
            if not self.inside:
                shown += self._text()
            at = self.waiting.find(self.form.end) if self.inside and self.form.end else -1
            if at < 0:
                return shown, calls
            written, self.waiting = self.waiting[:at], self.waiting[at + len(self.form.end) :]
            complete = self._calls(written[len(self.form.begin) :])
            shown += "" if complete else written + self.form.end
            calls += complete
            self.inside = False

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest, at the end of the answer."""
        written, self.waiting = self.waiting, ""
        calls = self._calls(written.removeprefix(self.form.begin)) if self.inside else []
        return ("" if calls else written), calls

    def _text(self) -> str:
        """Take the text before the next call out of what waits. It sets `inside` if a call begins."""
        begin = self.form.begin
        if self.form.bare and not self.begun:
            rest = self.waiting.lstrip()
            if rest.startswith("{"):
                self.inside = True
                return ""
            if not rest:
                return ""
        at = self.waiting.find(begin)
        self.inside = at >= 0
        if at < 0:
            sizes = range(min(len(begin) - 1, len(self.waiting)), 0, -1)
            held = next((size for size in sizes if self.waiting.endswith(begin[:size])), 0)
            at = len(self.waiting) - held
        shown, self.waiting = self.waiting[:at], self.waiting[at:]
        self.begun |= bool(shown.strip())
        return shown

    def _calls(self, written: str) -> list[ToolCall]:
        """The calls that a text between the marks holds; [] if any part of it is something else."""
        calls = [self._call(value) for value in _objects(written, self.form.begin)]
        return [call for call in calls if call] if all(calls) else []

    def _call(self, value: Any) -> ToolCall | None:
        if not isinstance(value, dict) or value.get("name") not in self.names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                return None
        if not isinstance(arguments, dict):
            return None
        # Mistral's templates want exactly nine characters; longer ones would serve the others no better.
        return ToolCall(secrets.token_hex(5)[:9], value["name"], json.dumps(arguments, ensure_ascii=False))


def _objects(text: str, mark: str) -> list[Any]:
    """The JSON values in a text: one, a list, several with ";" or a mark between them, or NAME[ARGS]{...}."""
    decoder = json.JSONDecoder()
    values: list[Any] = []
    at = 0
    while at < len(text):
        gap = re.compile(rf"(?:\s|;|,|{re.escape(mark)})*").match(text, at)
        at = gap.end() if gap else at
        named = re.compile(r"([\w.-]+)(?:\[CALL_ID\][\w-]*)?\[ARGS\]").match(text, at)
        try:
            value, end = decoder.raw_decode(text, named.end() if named else at)
        except (ValueError, RecursionError):
            return [] if text[at:].strip() else values
        at = end
        if named:
            value = {"name": named[1], "arguments": value}
        values += value if isinstance(value, list) else [value]
    return values


def as_text(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with their tools, calls and results as plain text in Hermes' format, for a template without a place
    for them. The tools stand at the beginning of the first message, because not every template has system messages."""
    written: list[dict[str, Any]] = []
    for message in messages:
        role, text = message["role"], message["content"]
        for call in message.get("tool_calls", ()):
            text += f"{HERMES.begin}{json.dumps(call['function'], ensure_ascii=False)}{HERMES.end}"
        if role == "tool":
            role, text = "user", f"<tool_response>{text}</tool_response>"
            if written and written[-1]["role"] == "user":  # the results of several calls
                written[-1]["content"] += f"\n{text}"
                continue
        written.append({"role": role, "content": text})
    if tools:
        functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        form = f'{HERMES.begin}{{"name": NAME, "arguments": {{...}}}}{HERMES.end}'
        about = f"You can call these functions:\n{functions}\nTo call one, write {form} and wait for its result."
        written[0]["content"] = f"{about}\n\n{written[0]['content']}"
    return written


@dataclass
class Event:
    """What the engine says of one choice: steps, and the result when it has ended."""

    index: int
    chunks: list[Chunk]
    result: GenerationResult | None = None
    seen: dict[str, Any] = field(default_factory=dict)  # of the steps, where the request asks for it

    def add(self, later: Event) -> None:
        """Add what came later of the same choice."""
        self.chunks += later.chunks
        self.result = later.result
        if later.seen:
            self.seen |= later.seen | {"steps": self.seen.get("steps", []) + later.seen["steps"]}


TokenInfo = tuple[int, TokenLogprob]  # a token of the answer, and how likely it and others were


class Part(NamedTuple):
    """What an event made certain of a choice."""

    index: int
    text: str
    calls: Sequence[ToolCall]
    tokens: Sequence[TokenInfo]
    finish: str  # "stop", "length" or "tool_calls" in the last part, else ""
    seen: Mapping[str, Any]


class Answer:
    """One choice while it is decoded, and afterwards."""

    def __init__(self, index: int, ask: Ask, tokenizer: Tokenizer | None, stop_ids: Sequence[int]):
        """stop_ids: those that end the text, which have no place among the tokens with log-probabilities."""
        self.index = index
        self.text = ""
        self.calls: list[ToolCall] = []
        self.tokens: list[TokenInfo] = []
        self.finish = ""
        self.result: GenerationResult | None = None
        self._stop_ids = frozenset(stop_ids)
        self._ask = ask
        self._parser = None
        if ask.tools and tokenizer:
            names = {tool["function"]["name"] for tool in ask.tools}
            self._parser = ToolCallParser(FORCED if ask.forced else tool_format(tokenizer), names, tokenizer)

    def take(self, event: Event) -> Part:
        """Add what the engine said of this choice."""
        text, calls = "", list[ToolCall]()
        tokens: list[TokenInfo] = []
        for chunk in event.chunks:
            more, complete = self._parser.read(chunk) if self._parser else (chunk.text, [])
            text += more
            calls += complete
            if self._ask.logprobs is not None:
                pairs = zip(chunk.token_ids, chunk.logprobs, strict=True)
                tokens += [(token, chances) for token, chances in pairs if token not in self._stop_ids]
        if event.result is not None and self._parser:
            more, complete = self._parser.finish()
            text += more
            calls += complete
        if self._ask.one_call:
            calls = calls[: 1 - len(self.calls)]
        self.text += text
        self.calls += calls
        self.tokens += tokens
        if event.result is not None:
            self.result = event.result
            cut = event.result.stop_reason in ("length", "interrupted")
            self.finish = "tool_calls" if self.calls else "length" if cut else "stop"
        return Part(self.index, text, calls, tokens, self.finish, event.seen)


def usage_counts(results: Sequence[GenerationResult], choices: int = 1) -> tuple[int, int, int]:
    """(prompt tokens, those of them that were cached, new tokens). A prompt counts once for all of its choices."""
    prompts = results[::choices]
    cached = sum(result.cached_tokens for result in prompts)
    return sum(r.prompt_tokens for r in prompts), cached, sum(r.new_tokens for r in results)


def timings(results: Sequence[GenerationResult], queue_seconds: float) -> dict[str, Any]:
    """The figures of a request, with the names of llama.cpp's server where it has the same ones."""
    prompt_seconds = sum(r.prefill_seconds for r in results)
    seconds = sum(r.decode_seconds for r in results)
    cached = sum(r.cached_tokens for r in results)
    run = sum(r.prompt_tokens for r in results) - cached
    new = sum(r.new_tokens for r in results)
    decoded = new - len(results)  # the first token comes from the prompt's forward
    return {
        "queue_ms": round(1000 * queue_seconds, 3),
        "cache_n": cached,
        "prompt_n": run,
        "prompt_ms": round(1000 * prompt_seconds, 3),
        "prompt_per_second": round(run / prompt_seconds, 3) if prompt_seconds else 0.0,
        "predicted_n": new,
        "predicted_ms": round(1000 * seconds, 3),
        "predicted_per_second": round(decoded / seconds, 3) if seconds else 0.0,
        "steps": sum(r.steps for r in results),
        "tau": round(acceptance([count for r in results for count in r.drafted])[0], 4),
        "seed": results[0].seed if results else 0,
    }
