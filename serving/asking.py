"""What a request asks for, read from its JSON: one function for each endpoint. Nothing here touches the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from runtime.grammar import checked_grammar, json_grammar
from sampling_params import MAX_LOGPROBS
from serving.errors import unsupported, wrong
from serving.fields import Fields
from serving.messages import chat_messages, chat_tools, input_messages
from serving.settings import MAX_CHOICES
from support.errors import UsageError, one_line

COMPLETION_TOKENS = 16  # what OpenAI's API gives where max_tokens is left out
# Fields of SamplingParams that a client may set under the same name -> their type.
SETTINGS = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "seed": int,
}


@dataclass
class Ask:
    """A request, read and checked as far as that needs no model."""

    given: dict[str, Any]  # fields of SamplingParams that the client set
    messages: list[dict[str, Any]] = field(default_factory=list)  # of a chat
    prompts: list[str | list[int]] = field(default_factory=list)  # of a completion
    tools: list[dict[str, Any]] = field(default_factory=list)
    one_call: bool = False  # return the first tool call only
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    steps: bool = False  # stream every step with its tree, too
    logprobs: int | None = None  # alternatives for every token; None: no log-probabilities
    source: str = "messages"  # the field that holds the prompt
    raw: dict[str, Any] = field(default_factory=dict)  # the request itself, for what an answer repeats


Parse = Callable[[dict[str, Any]], Ask]


def chat_ask(body: dict[str, Any]) -> Ask:
    """Read a request to /v1/chat/completions."""
    fields = Fields(body)
    ask = _common(fields, ("max_completion_tokens", "max_tokens"))
    ask.messages = chat_messages(fields.required("messages", list))
    if fields.get("logprobs", bool, False):
        ask.logprobs = fields.integer("top_logprobs", 0, MAX_LOGPROBS, 0)
    elif fields.given("top_logprobs"):
        raise wrong("top_logprobs", "needs logprobs to be true")
    _read_format(ask, fields, "response_format")
    fields.refuse("functions", ([],), "use tools.")
    fields.refuse("function_call", ("none", "auto"), "use tool_choice.")
    fields.refuse("modalities", (["text"],), "this server has text only.")
    fields.refuse("audio", (), "this server has text only.")
    _read_tools(ask, fields, chat_tools)
    return ask


def completion_ask(body: dict[str, Any]) -> Ask:
    """Read a request to /v1/completions."""
    fields = Fields(body)
    ask = _common(fields, ("max_tokens",))
    ask.given.setdefault("max_new_tokens", COMPLETION_TOKENS)
    ask.source = "prompt"
    ask.prompts = _prompts(body.get("prompt"))
    if ask.n * len(ask.prompts) > MAX_CHOICES:
        raise wrong("n", f"and prompt ask for {ask.n * len(ask.prompts)} answers; allowed: at most {MAX_CHOICES}")
    if fields.given("logprobs"):
        ask.logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    fields.refuse("echo", (False,), "the answer holds new text only.")
    fields.refuse("suffix", ("",), "this server only continues text.")
    fields.refuse("best_of", (1, ask.n), "use n.")
    _read_format(ask, fields, "response_format")
    return ask


def response_ask(body: dict[str, Any]) -> Ask:
    """Read a request to /v1/responses."""
    fields = Fields(body)
    ask = _common(fields, ("max_output_tokens",))
    ask.n = 1
    if ask.steps:
        raise unsupported("eaglet.steps", "use /v1/chat/completions or /v1/completions.")
    ask.source = "input"
    ask.messages = input_messages(fields.get("instructions", str), body.get("input"))
    text = Fields(fields.get("text", dict, {}), "text.")
    _read_format(ask, text, "format")
    for name in ("previous_response_id", "conversation"):
        fields.refuse(name, (), "this server keeps no conversations. Send the whole input.")
    fields.refuse("prompt", (), "this server stores no prompts.")
    fields.refuse("background", (False,), "the answer comes with this request.")
    fields.refuse("truncation", ("disabled",), "shorten the input.")
    if "message.output_text.logprobs" in fields.get("include", list, []) or fields.given("top_logprobs"):
        ask.logprobs = fields.integer("top_logprobs", 0, MAX_LOGPROBS, 0)
    _read_tools(ask, fields, lambda tools: chat_tools(tools, flat=True))
    return ask


def _common(fields: Fields, limits: tuple[str, ...]) -> Ask:
    """What all endpoints share. limits: the names of the token limit, the first one that is given counts."""
    fields.get("model", str)
    given = {name: value for name, kind in SETTINGS.items() if (value := fields.get(name, kind)) is not None}
    for name in limits:
        if fields.given(name):
            given["max_new_tokens"] = fields.integer(name, 1, 2**31)
            break
    if fields.given("stop"):
        stop = fields.values["stop"]
        stop = [stop] if isinstance(stop, str) else fields.get("stop", list)
        given["stop"] = tuple(text for text in stop if text != "")
    if fields.given("grammar"):
        given["grammar"] = _grammar("grammar", checked_grammar, fields.get("grammar", str))
    fields.refuse("logit_bias", ({},), "leave it out.")
    options = Fields(fields.get("stream_options", dict, {}), "stream_options.")
    return Ask(
        given,
        n=fields.integer("n", 1, MAX_CHOICES, 1) or 1,
        stream=fields.get("stream", bool, False),
        include_usage=options.get("include_usage", bool, False),
        raw=fields.values,
        steps=_steps(fields),
    )


def _steps(fields: Fields) -> bool:
    """Whether a stream shall have its steps, which is a field of this server only."""
    steps = Fields(fields.get("eaglet", dict, {}), "eaglet.").get("steps", bool, False)
    if steps and not fields.get("stream", bool, False):
        raise wrong("eaglet.steps", "needs stream to be true")
    return steps


def _read_format(ask: Ask, fields: Fields, name: str) -> None:
    """The output format: text, any JSON object, or JSON that follows a schema."""
    if not fields.given(name):
        return
    where = Fields(fields.get(name, dict), fields.name(f"{name}."))
    kind = where.required("type", str)
    if kind == "text":
        return
    if kind not in ("json_object", "json_schema"):
        raise wrong(where.name("type"), f"is {kind!r:.40}; allowed: text, json_object, json_schema")
    if "grammar" in ask.given:
        raise wrong("grammar", f"does not go with {fields.name(name)}")
    schema = None
    if kind == "json_schema":  # the endpoint for responses has its fields one level higher
        inner = Fields(where.required(kind, dict), where.name(f"{kind}.")) if where.given(kind) else where
        schema = inner.required("schema", dict)
    ask.given["grammar"] = _grammar(fields.name(name), json_grammar, schema)


def _grammar(name: str, make: Callable[[Any], str], value: Any) -> str:
    """A grammar that is made of a field's value."""
    try:
        return make(value)
    except UsageError as error:
        raise unsupported(name, one_line(error)) from None
    except ValueError as error:
        raise wrong(name, f"cannot be used: {one_line(error)}") from None


def _prompts(value: Any) -> list[str | list[int]]:
    """The prompts of a completion: a text, token ids, or a list of one of these."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, int) for item in value):
            return [value]
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) and all(isinstance(i, int) for i in item) for item in value):
            return value
    raise wrong("prompt", "must be a text, a list of token ids, or a list of texts or of such lists, and not empty")


def _read_tools(ask: Ask, fields: Fields, read: Callable[[list], list[dict[str, Any]]]) -> None:
    """The tools, unless tool_choice switches them off."""
    tools = read(fields.get("tools", list, []))
    choice = fields.values.get("tool_choice") or ("auto" if tools else "none")
    if choice not in ("none", "auto"):
        raise unsupported("tool_choice", "it must be none or auto.")
    ask.one_call = not fields.get("parallel_tool_calls", bool, True)
    if choice == "auto":
        ask.tools = tools
