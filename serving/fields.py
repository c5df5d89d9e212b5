"""The JSON of a request, read strictly: what is wrong with it is an error that names the field.

Also the fields that constrain the text, under the names of OpenAI, llama.cpp and vLLM, and the fields that are refused.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from decoding.params import SettingError
from engine.grammar_text import checked_grammar, json_grammar
from support.errors import one_line
from support.reader import NAMES, is_a, parse_json

KINDS = NAMES | {str: "a string", bool: "a boolean"}  # what OpenAI's API calls values
NEVER = -100  # the least bias of a logit
# fields of SamplingParams -> their names in the API
RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "stop_ids": "stop_token_ids"}
INVALID, FORBIDDEN, BUSY, SERVER = "invalid_request_error", "permission_error", "rate_limit_error", "server_error"


@dataclass(eq=False)
class ApiError(Exception):
    """An answer in the form of OpenAI's API that says in one line what is wrong, or why it cannot be done now."""

    status: int  # of HTTP
    message: str
    param: str | None = None  # the field of the request that is wrong
    code: str | None = None
    kind: str = INVALID  # the error's `type`
    retry_after: int | None = None  # seconds after which the client may try again
    close: bool = False  # end the connection after this answer

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the answer."""
        retry = {"Retry-After": str(self.retry_after)} if self.retry_after is not None else {}
        return retry | ({"Connection": "close"} if self.close else {})

    def body(self) -> dict[str, Any]:
        """The error object."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"type": "error", "error": error}  # the first field is Anthropic's


def wrong(param: str, why: str) -> ApiError:
    """The error for a field with a value that is not allowed."""
    return ApiError(400, f"{param} {why}", param, "invalid_value")


def no_replica(why: str) -> ApiError:
    """The error while nothing can decode, which passes by itself."""
    return ApiError(503, why, None, "no_replica", SERVER, 5)


def unsupported(param: str, why: str) -> ApiError:
    """The error for a field that the API knows and this server does not."""
    return ApiError(400, f"{param} is not supported: {why}", param, "unsupported_parameter")


@contextlib.contextmanager
def blamed(field: str | None) -> Iterator[None]:
    """A ValueError becomes the error for the setting that it names, or else for this field of the request."""
    try:
        yield
    except SettingError as error:
        name = RENAMED.get(error.setting, error.setting)
        why = one_line(error, notes=False).replace(error.setting, name)
        raise ApiError(400, why, name, "invalid_value") from None
    except ValueError as error:
        why = one_line(error, notes=False)
        raise ApiError(400, f"{field} cannot be used: {why}" if field else why, field, "invalid_value") from None


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object of a request body. Raises ApiError for anything else, and for texts that no answer could repeat."""
    try:
        value = parse_json(data, "the body", advice=False)
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, not {KINDS[type(value)]}", code="invalid_json")
    for name, part in value.items():
        try:
            json.dumps([name, part], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            known = name.encode("ascii", "backslashreplace").decode()
            raise wrong(known, "cannot be used: it has half of a surrogate pair, which is no character") from None
    return value


class Fields:
    """One object of a request. A field that is null counts as left out, as in OpenAI's API."""

    def __init__(self, values: object, where: str = ""):
        """where: what leads to this object from the body, such as "messages[2].". It begins every name in an error."""
        if not isinstance(values, dict):
            raise wrong(where.rstrip(".") or "body", f"must be an object, not {KINDS[type(values)]}")
        self.values: dict[str, Any] = values
        self.where = where

    def name(self, field: str) -> str:
        """The field as an error calls it."""
        return self.where + field

    def given(self, field: str) -> bool:
        """Whether the field is there."""
        return self.values.get(field) is not None

    def get(self, field: str, kind: type, default: Any = None) -> Any:
        """The value of a field that must have a certain type: str, bool, int, float, list or dict."""
        value = self.values.get(field)
        if value is None:
            return default
        if kind is int and isinstance(value, float) and value.is_integer():  # as some languages write integers
            value = int(value)
        if not is_a(value, kind):
            raise wrong(self.name(field), f"must be {KINDS[kind]}, not {KINDS[type(value)]}")
        return value

    def required(self, field: str, kind: type) -> Any:
        """The value of a field that must be there. kind `object`: any."""
        if not self.given(field):
            raise ApiError(400, f"{self.name(field)} is missing", self.name(field), "missing_required_parameter")
        return self.get(field, kind)

    def integer(self, field: str, low: int, high: int, default: int) -> int:
        """An integer between two limits."""
        value = self.get(field, int, default)
        if not low <= value <= high:
            raise wrong(self.name(field), f"is {value!r:.40}; allowed: {low} to {high}")
        return value

    def choice(self, field: str, allowed: Iterable[str], default: str | None = None) -> str:
        """One of the texts that are allowed, or the default. Without a default the field must be there."""
        value = self.required(field, str) if default is None else self.get(field, str, default)
        if value not in (*allowed, default):
            raise wrong(self.name(field), f"is {value!r:.40}; allowed: {', '.join(allowed)}")
        return value

    def inner(self, field: str) -> Fields:
        """The object in a field; an empty one if the field is left out."""
        return Fields(self.get(field, dict, {}), self.name(f"{field}."))

    def items(self, field: str) -> list[Fields]:
        """The objects of an array; none if the field is left out."""
        return [Fields(value, f"{self.name(field)}[{i}].") for i, value in enumerate(self.get(field, list, []))]

    def some(self, field: str) -> list[Fields]:
        """The same where there must be at least one."""
        if not self.required(field, list):
            raise wrong(self.name(field), "is empty")
        return self.items(field)

    def refuse(self, field: str, allowed: tuple, why: str) -> None:
        """Refuse a field that is known but not supported, unless its value asks for nothing."""
        value = self.values.get(field)
        if value is not None and value not in allowed:
            raise unsupported(self.name(field), why)


# ------------------------------------------------------------------ fields that constrain, and those that are refused

# Fields that would change the text or the answer and that this server does not have -> the values that ask for nothing,
# and what to do instead. docs/server.md lists the fields that are only hints, which are ignored.
NOT_HERE: dict[str, tuple[tuple[Any, ...], str]] = {
    # OpenAI
    "web_search_options": ((), "this server searches nothing."),
    # llama.cpp
    "dynatemp_range": ((0,), "use temperature."),
    "typical_p": ((1,), "use top_p or min_p."),
    "typ_p": ((1,), "use top_p or min_p."),
    "top_n_sigma": ((-1, 0), "use top_p or min_p."),
    "repeat_last_n": ((-1,), "penalties count the whole text."),
    "dry_multiplier": ((0,), "use the other penalties."),
    "xtc_probability": ((0,), "leave it out."),
    "mirostat": ((0,), "use temperature and top_p."),
    "min_keep": ((0,), "leave it out."),
    "n_probs": ((0,), "use logprobs."),
    "post_sampling_probs": ((False,), "log-probabilities are those of the model itself."),
    "n_indent": ((0,), "use grammar."),
    "n_cmpl": ((1,), "use n."),
    "t_max_predict_ms": ((0,), "use max_tokens."),
    "samplers": ((), "the order is fixed: penalties, temperature, top_k, top_p, min_p."),
    "lora": (([],), "a server with adapters has them as models."),
    "grammar_lazy": ((False,), "a grammar holds from the first token."),
    "parse_tool_calls": ((True,), "leave out the tools instead."),
    "grammar_triggers": (([],), "a grammar holds from the first token."),
    "preserved_tokens": (([],), "the text has no control tokens."),
    "chat_format": ((), "the chat template decides how calls are read."),
    "thinking_forced_open": ((False,), "end the messages with one of the assistant to begin the answer."),
    "adaptive_target": ((-1,), "use top_p or min_p."),
    # vLLM
    "use_beam_search": ((False,), "use n."),
    "length_penalty": ((1,), "it belongs to beam search."),
    "include_stop_str_in_output": ((False,), "a stop string is never part of the text."),
    "skip_special_tokens": ((True,), "the text has no control tokens."),
    "truncate_prompt_tokens": ((), "shorten the prompt."),
    "allowed_token_ids": ((), "use guided_choice or grammar."),
    "bad_words": (([],), "use guided_regex or grammar."),
    "logits_processors": (([],), "leave it out."),
    "documents": (([],), "write them into a message."),
    "chat_template": ((), "the server decides which template is used."),
    "structural_tag": ((), "use grammar."),
    "guided_whitespace_pattern": ((), "JSON has no white space between its parts."),
    "return_tokens_as_token_ids": ((False,), "leave it out."),
}


def text_prompts(value: Any, name: str) -> list[str | list[int]]:
    """The prompts in a field of this name: a text, token ids, or a list of one of these."""
    several = isinstance(value, list) and value and isinstance(value[0], str | list)
    prompts = value if several else [value]
    texts = all(isinstance(prompt, str) for prompt in prompts)
    if not texts and not all(isinstance(p, list) and p and all(isinstance(i, int) for i in p) for p in prompts):
        raise wrong(name, "must be a text, a list of token ids, or a list of texts or of such lists, and not empty")
    return prompts


def read_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    """The field logit_bias, as pairs of a token and what is added to its logit: an object, as in OpenAI's API, or a list
    of pairs, as in llama.cpp's server, where false stands for never."""
    value = fields.values["logit_bias"]
    pairs = value.items() if isinstance(value, dict) else fields.get("logit_bias", list)
    try:
        named = [(int(token) if isinstance(token, str) else token, bias) for token, bias in pairs]
    except (TypeError, ValueError):
        raise wrong(fields.name("logit_bias"), 'must give token ids numbers, like {"50256": -100}') from None
    return tuple((token, NEVER if bias is False else bias) for token, bias in named)


def read_constraint(fields: Fields, holder: str = "") -> str | None:
    """The grammar that a request asks for, None: none. Raises ApiError where several fields ask for one.

    holder: the object with the field "format", where an endpoint has the output format there.
    """
    guided = fields.inner("structured_outputs")
    guided.refuse("structural_tag", (), "use grammar.")
    guided.refuse("whitespace_pattern", (), "JSON has no white space between its parts.")
    places = [(fields.inner(holder), "format", _response_format)] if holder else []
    places += [(fields, name, read) for name, read in _READERS.items()]
    places += [(guided, name.removeprefix("guided_"), read) for name, read in _READERS.items() if "guided_" in name]
    grammars: dict[str, str] = {}
    for where, name, read in places:
        with blamed(where.name(name)):
            if where.given(name) and (grammar := read(where, name)) is not None:
                grammars[where.name(name)] = grammar
    if len(grammars) > 1:
        first, second = list(grammars)[:2]
        raise wrong(second, f"does not go with {first}")
    return next(iter(grammars.values()), None)


def _response_format(fields: Fields, name: str) -> str | None:
    """The output format: text, any JSON object, or JSON that follows a schema."""
    form = fields.inner(name)
    kind = form.choice("type", ("text", "json_object", "json_schema"))
    if kind == "text":
        return None
    if kind == "json_object":  # llama.cpp's server takes a schema here, too
        return json_grammar(form.get("schema", dict))
    # the endpoint for responses has its fields one level higher
    held = form.inner(kind) if form.given(kind) else form
    schema = held.values.get("schema")
    schema = schema if schema is True else held.required("schema", dict)
    return json_grammar(schema, strict=held.get("strict", bool, False))


def _grammar(fields: Fields, name: str) -> str:
    return checked_grammar(fields.get(name, str))


def _schema(fields: Fields, name: str) -> str:
    value = fields.values[name]
    return json_grammar(value if isinstance(value, str | bool) else fields.get(name, dict))


def _regex(fields: Fields, name: str) -> str:
    pattern = fields.get(name, str).replace("\n", "\\n")
    # a slash ends a pattern in Lark's syntax, unless a backslash stands before it
    escaped = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], pattern)
    return checked_grammar(f"start: /{escaped}/")


def _choice(fields: Fields, name: str) -> str:
    texts = fields.get(name, list)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise wrong(fields.name(name), "must be a list of texts, none of them empty")
    return checked_grammar(f"start: {' | '.join(map(quoted, texts))}")


# A field guided_NAME is also the field NAME of structured_outputs.
_READERS: dict[str, Callable[[Fields, str], str | None]] = {
    "response_format": _response_format,
    "grammar": _grammar,
    "json_schema": _schema,
    "guided_json": _schema,
    "guided_json_object": lambda fields, name: json_grammar() if fields.get(name, bool) else None,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
}


def quoted(text: str) -> str:
    """A text as a literal of Lark's syntax."""
    return json.dumps(text, ensure_ascii=False)
