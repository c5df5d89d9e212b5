"""From what a request asks for to streams of the engine: templates, token ids, settings. It runs off the event loop."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine import Engine
from runtime.results import Stream
from sampling import SamplingParams
from sampling_params import with_suggestions
from serving.answers import Answer
from serving.asking import Ask, Parse
from serving.errors import ApiError, too_long, wrong
from serving.fields import parse_object
from serving.settings import ServeSettings
from support.errors import one_line

CHARACTERS = 16  # for each token of the context; no tokenizer makes so few tokens of a longer text
RENAMED = {"max_new_tokens": "max_tokens"}  # fields of SamplingParams -> their names in the API


@dataclass
class Prepared:
    """A request that can run: its streams have not started, and its answers are empty."""

    ask: Ask
    params: SamplingParams
    streams: list[Stream]
    answers: list[Answer]


def prepare(engine: Engine, settings: ServeSettings, parse: Parse, body: bytes) -> Prepared:
    """Read a request and make its streams. Raises ApiError for anything that is wrong with it."""
    ask = parse(parse_object(body))
    prompts = _prompts(engine, ask)
    given = {"seed": secrets.randbits(32)} | settings.defaults | ask.given
    streams: list[Stream] = []
    for ids in prompts:
        room = engine.ctx - len(ids)
        if room < 1:
            held = f"the context holds {engine.ctx:,}"
            raise too_long(ask.source, f"the prompt has {len(ids):,} tokens, and {held}, with at least one new token")
        most = min(room, given.get("max_new_tokens", room), settings.max_tokens or room)
        params = _params(engine, ask, given | {"max_new_tokens": most})
        for i in range(ask.n):
            seed = (params.seed + i) % 2**63 if i else params.seed
            try:
                streams.append(engine.generate(ids, replace(params, seed=seed)))
            except ValueError as error:
                raise wrong(ask.source, f"cannot be used: {one_line(error)}") from None
    names = {tool["function"]["name"] for tool in ask.tools}
    stop_ids = engine.stop_ids(params)
    answers = [Answer(i, engine.tokenizer, stop_ids, names, ask.one_call) for i in range(len(streams))]
    return Prepared(ask, params, streams, answers)


def _params(engine: Engine, ask: Ask, given: dict) -> SamplingParams:
    """The settings: the client's, or else the server's, or else those that the model suggests."""
    if ask.logprobs is not None:
        given = given | {"logprobs": ask.logprobs}
    try:
        return with_suggestions(engine.generation, given)[0]
    except ValueError as error:
        name = str(error).split(" ", 1)[0]
        param = RENAMED.get(name, name if name in given else None)
        raise ApiError(400, one_line(error), param, "invalid_value") from None


def _prompts(engine: Engine, ask: Ask) -> list[Sequence[int]]:
    """The ids of every prompt."""
    tokenizer = engine.tokenizer
    if tokenizer is None and (ask.messages or any(isinstance(prompt, str) for prompt in ask.prompts)):
        raise wrong(ask.source, "is text, and this model has no tokenizer; send token ids to /v1/completions")
    texts = [m["content"] for m in ask.messages] + [text for text in ask.prompts if isinstance(text, str)]
    for length in (len(text) for text in texts):
        if length > CHARACTERS * engine.ctx:
            why = f"far more than the context of {engine.ctx:,} tokens holds"
            raise too_long(ask.source, f"{ask.source} has a text of {length:,} characters, {why}")
    try:
        if not ask.messages:
            return [tokenizer.encode(p) if isinstance(p, str) and tokenizer else p for p in ask.prompts]
        if not tokenizer.chat_template_source:
            raise wrong(ask.source, "needs a chat template, and this model has none; start the server with --template")
        return [tokenizer.encode_chat(ask.messages, tools=ask.tools or None)]
    except ValueError as error:
        raise wrong(ask.source, f"cannot be used: {one_line(error)}") from None
