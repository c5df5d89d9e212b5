"""What the answers of all endpoints share, and those of /v1/chat/completions and /v1/completions."""

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from engine.results import GenerationResult, TokenLogprob, acceptance
from serving.answers import Part, TokenInfo, ToolCall
from serving.fields import ApiError
from serving.scheduler import Job


class Message(NamedTuple):
    """One event of a stream: its data, and the name that only some APIs give to events."""

    data: dict[str, Any] | str
    name: str = ""

    def encode(self) -> bytes:
        """The event as it goes over the line (SSE)."""
        text = self.data if isinstance(self.data, str) else json.dumps(self.data, ensure_ascii=False)
        named = f"event: {self.name}\n" if self.name else ""
        return f"{named}data: {text}\n\n".encode("utf-8", "replace")


DONE = Message("[DONE]")


class Writer:
    """Turns what became certain of a request's choices into the objects of one API, which a subclass knows."""

    prefix = ""  # of the answer's id

    def __init__(self, job: Job):
        self.job = job
        self.answer = job.answers[0]  # the only one, where an API has no choices
        self.ask = job.ask
        self.id = new_id(self.prefix)
        self.created = int(time.time())

    def start(self) -> Iterator[Message]:
        """What a stream begins with."""
        yield from ()

    def part(self, part: Part) -> Iterator[Message]:
        """What a stream says when something became certain."""
        raise NotImplementedError

    def end(self) -> Iterator[Message]:
        """What a stream ends with."""
        raise NotImplementedError

    def whole(self) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        raise NotImplementedError

    def error(self, error: ApiError) -> Message:
        """What a stream says when it cannot go on."""
        return Message(error.body())

    def timings(self, results: Sequence[GenerationResult] | None = None) -> dict[str, Any]:
        """The figures of choices, with the names of llama.cpp's server where it has the same ones. Default: of those that
        have ended."""
        results = self.job.results if results is None else results
        prompt_seconds = sum(r.prefill_seconds for r in results)
        seconds = sum(r.decode_seconds for r in results)
        cached = sum(r.cached_tokens for r in results)
        run = sum(r.prompt_tokens for r in results) - cached
        new = sum(r.new_tokens for r in results)
        decoded = new - len(results)  # the first token comes from the prompt's forward
        more = {"dropped_messages": self.ask.dropped, "ignored": self.job.ignored}
        return {
            "queue_ms": round(1000 * self.job.queue_seconds, 3),
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
        } | {name: value for name, value in more.items() if value}

    def usage(self) -> tuple[int, int, int]:
        """Tokens of the prompts, those of them that were cached, and new tokens. Choices of one prompt share it."""
        results = [answer.result for answer in self.job.answers]
        prompts = results[:: self.ask.n]
        cached = sum(r.cached_tokens for r in prompts)
        return sum(r.prompt_tokens for r in prompts), cached, sum(r.new_tokens for r in results)

    def thought_tokens(self) -> int:
        """How many tokens the text of the thoughts takes."""
        thoughts = [answer.thought for answer in self.job.answers if answer.thought]
        return sum(len(self.job.tokenizer.encode(text, continuation=True)) for text in thoughts)

    def piece(self, token: int) -> tuple[str, bytes]:
        """The text and the bytes of a token. Half a character has a text of U+FFFD."""
        if self.job.tokenizer is None:
            return str(token), str(token).encode()
        data = self.job.tokenizer.pieces.get(token, b"")
        return data.decode("utf-8", "replace"), data

    def logprobs(self, tokens: Sequence[TokenInfo]) -> list[dict[str, Any]]:
        """Tokens with their alternatives, as /v1/chat/completions and /v1/responses write them."""
        return [
            self._token(token, chances.logprob) | {"top_logprobs": [self._token(t, p) for t, p in chances.top]}
            for token, chances in tokens
        ]

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self.piece(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(data)}


class ChunkWriter(Writer):
    """What both endpoints share: chunks with choices, then the usage if it is asked for, then [DONE]."""

    whole_object = chunk_object = ""

    def of_prompt(self, index: int) -> dict[str, Any]:
        """vLLM's log-probabilities of a prompt, if they are asked for. index: of one of the answers to it."""
        if self.ask.prompt_logprobs is None:
            return {}
        entries = self._prompt_tokens(index)
        return {"prompt_logprobs": [chances and self._ranked(token, chances) for token, chances in entries]}

    def _prompt_tokens(self, index: int) -> list[TokenInfo]:
        """The tokens of the prompt of a choice, with log-probabilities where those are asked for."""
        ids = self.ask.prompt_ids[index // self.ask.n]
        return list(zip(ids, self.job.answers[index].result.prompt_logprobs, strict=True))

    def _ranked(self, token: int, chances: TokenLogprob) -> dict[str, dict[str, Any]]:
        """A token and the likeliest ones, by their ids. Ranks are known of these only."""
        top = chances.top[: self.ask.prompt_logprobs]
        ranks = {other: rank for rank, (other, _) in enumerate(chances.top, 1)}
        return {
            str(each): {"logprob": finite(logprob), "rank": ranks.get(each), "decoded_token": self.piece(each)[0]}
            for each, logprob in {token: chances.logprob, **dict(top)}.items()
        }

    def choice(self, index: int) -> dict[str, Any]:
        """A whole choice."""
        raise NotImplementedError

    def chunk(self, *choices: dict[str, Any], **more: Any) -> Message:
        """A chunk with these choices. more: further fields."""
        no_usage = {"usage": None} if self.ask.include_usage else {}
        return Message(self._head(self.chunk_object) | {"choices": choices} | no_usage | more)

    def last_chunk(self, choice: dict[str, Any]) -> Message:
        """The chunk that ends a choice; that of the last choice has the timings."""
        last = choice["index"] + 1 == len(self.job.answers)
        return self.chunk(choice, **({"timings": self.timings()} if last else {}))

    def end(self) -> Iterator[Message]:
        if self.ask.include_usage:
            yield self.chunk(usage=self._usage(), timings=self.timings())
        yield DONE

    def whole(self) -> dict[str, Any]:
        choices = [self.choice(answer.index) for answer in self.job.answers]
        end = {"choices": choices, "usage": self._usage(), "timings": self.timings()}
        return self._head(self.whole_object) | end

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.job.model}

    def _usage(self) -> dict[str, Any]:
        prompt, cached, new = self.usage()
        counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        counts |= {"prompt_tokens_details": {"cached_tokens": cached}}
        return counts | {"completion_tokens_details": {"reasoning_tokens": self.thought_tokens()}}


class ChatWriter(ChunkWriter):
    """/v1/chat/completions."""

    prefix = "chatcmpl-"
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def start(self) -> Iterator[Message]:
        for answer in self.job.answers:
            yield self.chunk(self._delta(answer.index, {"role": "assistant", "content": ""}))

    def whole(self) -> dict[str, Any]:
        return super().whole() | self.of_prompt(0)

    def part(self, part: Part) -> Iterator[Message]:
        if part.text or part.thought or part.tokens or part.seen:
            delta = ({"content": part.text} if part.text or not part.thought else {}) | _thought(part.thought)
            yield self.chunk(self._delta(part.index, delta) | self._logprobs(part.tokens), **part.seen)
        for number, call in part.calls:
            told = _call(call) if call.name else {"function": {"arguments": call.arguments}}
            yield self.chunk(self._delta(part.index, {"tool_calls": [{"index": number} | told]}))
        if part.finish:
            yield self.last_chunk(self._delta(part.index, {}, part.finish))

    def choice(self, index: int) -> dict[str, Any]:
        answer = self.job.answers[index]
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        message |= _thought(answer.thought)
        if answer.calls:
            message["content"] = answer.text or None
            message["tool_calls"] = [_call(call) for call in answer.calls]
        chosen = {"index": index, "message": message, "logprobs": None, "finish_reason": answer.finish}
        return chosen | self._logprobs(answer.tokens)

    def _delta(self, index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}

    def _logprobs(self, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        if self.job.params.logprobs is None:
            return {}
        return {"logprobs": {"content": self.logprobs(tokens), "refusal": None}}


def _thought(text: str) -> dict[str, str]:
    """A thought under the two names that clients read."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class CompletionWriter(ChunkWriter):
    """/v1/completions."""

    prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(self, job: Job):
        super().__init__(job)
        self._offsets = [0] * len(job.answers)  # where the next token's text begins
        self._echoed: set[int] = set()  # choices whose prompt a stream has sent

    def _prompt(self, index: int) -> tuple[str, list[TokenInfo]]:
        """What a choice begins with: the text of the prompt, and its tokens with log-probabilities, if asked for."""
        if not self.ask.echo:
            return "", []
        prompt = self.ask.prompts[index // self.ask.n]
        if not isinstance(prompt, str):
            prompt = self.job.tokenizer.decode(prompt) if self.job.tokenizer else "".join(map(str, prompt))
        return prompt, self._prompt_tokens(index) if self.job.params.logprobs is not None else []

    def part(self, part: Part) -> Iterator[Message]:
        if self.ask.echo and part.index not in self._echoed:
            self._echoed.add(part.index)
            yield self.chunk(self._choice(part.index, *self._prompt(part.index)))
        if part.text or part.tokens or part.seen:
            yield self.chunk(self._choice(part.index, part.text, part.tokens), **part.seen)
        if part.finish:
            yield self.last_chunk(self._choice(part.index, "", [], part.finish))

    def choice(self, index: int) -> dict[str, Any]:
        answer, (prompt, tokens) = self.job.answers[index], self._prompt(index)
        chosen = self._choice(index, prompt + answer.text, [*tokens, *answer.tokens], answer.finish)
        return chosen | self.of_prompt(index)

    def _choice(self, index: int, text: str, tokens: Sequence[TokenInfo], finish: str | None = None) -> dict[str, Any]:
        logprobs = None if self.job.params.logprobs is None else self._columns(index, tokens)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _columns(self, index: int, tokens: Sequence[TokenInfo]) -> dict[str, list]:
        """Log-probabilities as this endpoint writes them: one list for each kind of figure. The first token has none.

        A token that is part of a character has its bytes for a name. Of tokens with the same name the likeliest counts.
        """
        columns: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, chances in tokens:
            likeliest = [(token, chances.logprob), *reversed(chances.top)] if chances else []
            top = {self._name(each): finite(logprob) for each, logprob in likeliest}
            columns["tokens"].append(self._name(token))
            columns["token_logprobs"].append(chances and finite(chances.logprob))
            columns["top_logprobs"].append(top or None)
            columns["text_offset"].append(self._offsets[index])
            self._offsets[index] += len(self.piece(token)[0])
        return columns

    def _name(self, token: int) -> str:
        text, data = self.piece(token)
        return text if text.encode() == data else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def new_id(prefix: str) -> str:
    """A name that nothing else has."""
    return f"{prefix}{secrets.token_hex(12)}"


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold: that of an impossible token is minus infinity."""
    return max(logprob, -9999.0)
