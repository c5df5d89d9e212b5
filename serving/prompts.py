"""The prompts of requests: what a chat template makes of messages and tools, how an answer begins, what is too long."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from decoding.params import Thought
from engine.grammar_text import ReadGrammar, schemas_grammar
from engine.intake import Intake
from serving.fields import ApiError, blamed, quoted, wrong
from serving.requests import Ask
from text.dialect import as_text, with_calls
from text.splitter import TEXT, THOUGHT
from text.template import answer_room, in_turns, newest_turns
from text.tokenizer import TOOL_KEYS, Tokenizer

CHARACTERS = 16  # for each token of the context; no tokenizer makes so few tokens of a longer text


def adapter_named(engine: Intake, model: str) -> str:
    """The adapter that a client means with this name of a model, "" for any other name, which is the base model."""
    return model if model in engine.adapters else ""


def drop_oldest(engine: Intake, ask: Ask) -> None:
    """Leave out the oldest turns of a chat until there is room for an answer."""
    room = answer_room(engine.ctx, ask.given.get("max_new_tokens"))
    kept = newest_turns(ask.messages, lambda part: _fits(engine, replace(ask, messages=part), room))
    ask.dropped = len(ask.messages) - len(kept)
    ask.messages = kept


def _fits(engine: Intake, ask: Ask, room: int) -> bool:
    try:
        return len(prompts_of(engine, ask)[0]) + room <= engine.ctx
    except ApiError as error:
        if error.code != "context_length_exceeded":
            raise
        return False


def prompts_of(engine: Intake, ask: Ask) -> list[Sequence[int]]:
    """The ids of every prompt."""
    tokenizer = engine.tokenizer
    texts = [m[key] for m in ask.messages for key in ("content", "thought") if key in m]
    texts += [text for text in ask.prompts if isinstance(text, str)]
    if tokenizer is None and texts:
        raise wrong(ask.source, "is text, and this model has no tokenizer; send token ids to /v1/completions")
    longest = max(map(len, texts), default=0)
    if why := why_too_long(longest, engine.ctx):
        raise too_long(ask, f"{ask.source} {why}")
    with blamed(ask.source):
        if not ask.messages:
            return [tokenizer.encode(p) if isinstance(p, str) else p for p in ask.prompts]
        if not tokenizer.chat_template_source:
            raise wrong(ask.source, "needs a chat template, and this model has none")
        with blamed("chat_template_kwargs"):
            tokenizer.check_variables(ask.variables)
        messages, tools = _told(tokenizer, ask)
        with blamed("tools"):
            tokenizer.check_tools([], tools)
        begun = messages[-1]["content"] if ask.goes_on else ""
        ids = _chat_ids(tokenizer, messages[: -1 if begun else None], tools or None, ask.variables)
        return [_begin(tokenizer, ask, ids, begun)]


def _chat_ids(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: list | None, variables: dict[str, Any]
) -> list[int]:
    """The ids of a chat. Where the template refuses the order of its messages, or leaves out a system message, those are
    put into an order that every template takes. Raises ValueError, with the first reason, where that does not help."""
    refused: ValueError | None = None
    forms = [messages, in_turns(messages, True), in_turns(messages, False)]
    for form in (form for i, form in enumerate(forms) if form not in forms[:i]):
        try:
            ids = tokenizer.encode_chat(form, tools=tools, variables=variables)
        except ValueError as error:
            refused = refused or error
            continue
        # A tokenizer may change texts, so they are compared as it gives them back.
        late = [tokenizer.encode(m["content"], continuation=True) for m in form[1:] if m["role"] == "system"]
        text = tokenizer.decode(ids, skip_special=False) if late else ""
        if all(tokenizer.decode(part, continuation=True).strip() in text for part in late):
            return ids
        refused = refused or ValueError("the chat template leaves out a system message.")
    raise refused


def _told(tokenizer: Tokenizer, ask: Ask) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages and the tools as the chat template takes them."""
    messages, tools = ask.messages, ask.tools
    if "tools" not in tokenizer.chat_template and (tools or any(message.keys() & TOOL_KEYS for message in messages)):
        return as_text(messages, tools), []
    if "tool_calls" not in tokenizer.chat_template:
        messages = [with_calls(message, tokenizer.dialect.calls[0]) for message in messages]
    if tools and "message['tools']" in tokenizer.chat_template:  # of a system message, as Phi-4-mini reads them
        system = messages[0] if messages[0]["role"] == "system" else {"role": "system", "content": ""}
        described = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        messages = [system | {"tools": described}, *messages[messages[0] is system :]]
    return messages, tools


def _begin(tokenizer: Tokenizer, ask: Ask, ids: list[int], begun: str) -> list[int]:
    """A prompt with the beginning of its answer: what the client wrote of it, and the marks of a thought. It notes in the
    request what the answer begins in."""
    dialect, written = tokenizer.dialect, tokenizer.encode(begun, continuation=True) if begun else []
    thoughts, marks = dialect.thoughts, ""
    if thoughts is None:
        return ids + written
    opened = tokenizer.thinks_after(ids)
    answers_now = ask.think is False or (bool(begun) and thoughts.end not in begun)
    if opened and answers_now:
        marks, opened = f"\n{thoughts.end}{thoughts.gap}", False
    elif dialect.harmony and answers_now and not ask.forced:
        marks = thoughts.gap.removeprefix("<|start|>assistant")
    elif dialect.harmony and not answers_now and (ask.forced or "grammar" in ask.given):
        marks, opened = thoughts.begin, True
    thinks = (opened or thoughts.begin in begun) and thoughts.end not in begun
    ask.begun = THOUGHT if thinks else TEXT if marks or begun else ""
    return ids + tokenizer.encode(marks, continuation=True, control=True) + written


def settings_of(tokenizer: Tokenizer, ask: Ask) -> dict[str, Any]:
    """What a chat's answer needs besides the settings that the client gave: the marks that the text shows, the grammar of
    a call that must come, and what the model may think before a grammar or within a limit."""
    dialect = tokenizer.dialect
    found: dict[str, Any] = {"shown_ids": tokenizer.shown_ids(bool(ask.tools))}
    if ask.forced:
        with blamed("tools"):
            found["grammar"] = _calls(tokenizer, ask)
    thoughts, constrained = dialect.thoughts, ask.forced or "grammar" in ask.given
    may = ask.begun == THOUGHT or (not ask.begun and ask.think is not False)
    if thoughts and may and (constrained or ask.budget is not None):
        gap = "<|start|>assistant" if dialect.harmony and ask.forced else thoughts.gap + thoughts.around[0]
        begin = "" if ask.begun else thoughts.begin
        marks = (begin, gap, f"\n{thoughts.end}{gap}")
        ids = [tuple(tokenizer.encode(text, continuation=True, control=True)) for text in marks]
        found["thought"] = Thought(ids[0], thoughts.end, ids[1], ids[2], ask.budget)
    return found


def _calls(tokenizer: Tokenizer, ask: Ask) -> ReadGrammar:
    """The grammar of a call of one of the tools."""
    functions = [tool["function"] for tool in ask.tools]

    def write(schemas: Sequence[Any]) -> str:
        told = [function | {"parameters": schema} for function, schema in zip(functions, schemas, strict=True)]
        return tokenizer.dialect.call_grammar(told, partial(_literal, tokenizer))

    return schemas_grammar([function["parameters"] for function in functions], write, ask.strict)


def _literal(tokenizer: Tokenizer, text: str) -> str:
    """A text in Lark's syntax, in which special tokens are tokens."""
    return " ".join(quoted(part) if isinstance(part, str) else f"<[{part}]>" for part in tokenizer.parts(text)) or '""'


def why_too_long(characters: int, ctx: int) -> str:
    """Why a text of so many characters is not even encoded; "" if it may fit."""
    if characters <= CHARACTERS * ctx:
        return ""
    return f"has a text of {characters:,} characters, far more than the context of {ctx:,} tokens holds"


def too_long(ask: Ask, message: str) -> ApiError:
    """The error for a prompt that does not fit into the context."""
    return ApiError(400, message, ask.source, "context_length_exceeded")
