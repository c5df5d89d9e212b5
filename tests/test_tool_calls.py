"""serving/tool_calls.py: calls in the formats of the model families, whole and in pieces."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest

from engine.grammar import Grammars
from engine.results import Chunk, GenerationResult
from loading.options import DEMO
from serving.answers import HERMES, LLAMA, MISTRAL, Answer, Event, ToolCallParser, as_text, tool_format
from serving.requests import NO_PARAMETERS, Ask, call_grammar
from text.tokenizer import load_tokenizer

CALL = '{"name": "add", "arguments": {"a": 1, "b": "x</y"}}'
ADD = ("add", {"a": 1, "b": "x</y"})


def parse(form, text: str, size: int = 0) -> tuple[str, list]:
    """The text and calls of an answer that arrives in pieces of a size, 0: at once."""
    parser = ToolCallParser(form, {"add", "sub"})
    pieces = [text[i : i + size] for i in range(0, len(text), size)] if size else [text]
    shown, calls = "", []
    for more, complete in [*map(parser.push, pieces), parser.finish()]:
        shown += more
        calls += complete
    return shown, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("size", [0, 1, 7])
@pytest.mark.parametrize(
    "form, text, expected",
    [
        (HERMES, f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>", ("Let me see.\n", [ADD])),
        (HERMES, f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", ("\n", [ADD, ADD])),
        (HERMES, "a < b, <tool and <tool_ca", ("a < b, <tool and <tool_ca", [])),
        (HERMES, "<tool_call>{broken</tool_call> on", ("<tool_call>{broken</tool_call> on", [])),
        (HERMES, f"<tool_call>{CALL}", ("", [ADD])),
        (HERMES, f"<tool_call>{CALL.replace('add', 'rm')}</tool_call>", None),
        (MISTRAL, f"[TOOL_CALLS][{CALL}, {CALL}]", ("", [ADD, ADD])),
        (MISTRAL, 'Yes. [TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]sub[CALL_ID]x1[ARGS]{}', None),
        (MISTRAL, "[1, 2] [TOOL", ("[1, 2] [TOOL", [])),
        (LLAMA, '{"name": "add", "parameters": {"a": 2}}', ("", [("add", {"a": 2})])),
        (LLAMA, f'<|python_tag|>{CALL}; {{"name": "sub", "parameters": {{}}}}', ("", [ADD, ("sub", {})])),
        (LLAMA, '{"name": "John", "age": 3}', ('{"name": "John", "age": 3}', [])),
        (LLAMA, 'As JSON: {"name": "add", "parameters": {}}', ('As JSON: {"name": "add", "parameters": {}}', [])),
        (LLAMA, '{"name": "add", "arguments": "{\\"a\\": 5}"}', ("", [("add", {"a": 5})])),
        (LLAMA, '{"name": "add", "parameters": [1]}', ('{"name": "add", "parameters": [1]}', [])),
    ],
)
def test_calls_are_found_however_the_answer_is_cut(form, text, expected, size):
    """Text and calls of every format come out the same for pieces of any size; what is no valid call of a known tool is
    text."""
    if expected is None:
        named = text.startswith("Yes")
        expected = ("Yes. ", [("add", {"a": 1}), ("sub", {})]) if named else (text, [])
    assert parse(form, text, size) == expected


def test_text_before_a_call_is_shown_at_once():
    """Text is handed out at once, except an end that may begin a mark."""
    parser = ToolCallParser(HERMES, {"add"})
    assert [parser.push(piece)[0] for piece in ("Hello", " you", " <tool", "box")] == ["Hello", " you", " ", "<toolbox"]
    parser = ToolCallParser(LLAMA, {"add"})
    assert [parser.push(piece)[0] for piece in (" ", "Hi", ' {"a"')] == ["", " Hi", ' {"a"']


def test_a_forced_call_ends_with_its_closing_brace():
    """A grammar that lets a call end before it is whole JSON, which no client can read."""
    pytest.importorskip("llguidance")
    tokenizer = load_tokenizer(DEMO)
    grammar = call_grammar([{"name": "now", "parameters": NO_PARAMETERS}])
    constraint = Grammars(tokenizer, tokenizer.vocab_size).constraint(grammar, tuple(tokenizer.eos_ids))
    for text, whole in (('{"name":"now","arguments":{', False), ("}", False), ("}", True)):
        constraint.take(tokenizer.encode(text, continuation=True))
        assert constraint.matcher.is_accepting() == whole, text


def test_the_format_is_the_one_of_the_template():
    """The format is the one whose mark the template holds, and Hermes' without a mark."""
    written = lambda text: SimpleNamespace(template_writes=text.__contains__)  # noqa: E731
    texts = ("x <tool_call> y", "[TOOL_CALLS]", "<|python_tag|>", '{"name": n, "parameters": p}', "nothing")
    assert [tool_format(written(text)) for text in texts] == [HERMES, MISTRAL, LLAMA, LLAMA, HERMES]


def test_the_template_gets_tools_and_no_control_tokens(tmp_path):
    """Tools and earlier calls are in the prompt; the text of a control token in them is an error, as are tools without
    a place."""
    for name in ("config.json", "tokenizer.model"):
        shutil.copy(DEMO / name, tmp_path)
    template = "{{ tools | tojson }}{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = load_tokenizer(tmp_path)
    ask, call = {"role": "user", "content": "x</s>"}, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    ids = tokenizer.encode_chat([ask], tools=[{"name": "add"}])
    assert tokenizer.decode(ids) == '[{"name": "add"}]user:x</s>' and not set(ids) & tokenizer.special_ids
    assert "{'id': '1'}" in tokenizer.decode(tokenizer.encode_chat([ask, call]))
    for tools in ([{"name": "a</s>"}], [{"a</s>": 1}], [{"name": "a", "parameters": {"enum": ["b", "</s>"]}}]):
        with pytest.raises(ValueError, match="text of a control token"):
            tokenizer.encode_chat([ask], tools=tools)
    with pytest.raises(ValueError, match="text of a control token"):
        tokenizer.encode_chat([ask, call | {"tool_calls": [{"id": "</s>"}]}])
    tokenizer.use_template("vicuna")
    with pytest.raises(ValueError, match="takes no tools"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}], tools=[{"name": "add"}])


def test_a_mark_that_is_a_special_token_is_seen():
    """A call is found although its mark is a special token, which the engine's text leaves out."""

    class Marked:
        special_ids = frozenset({0, 1})
        pieces = {0: b"</s>", 1: b"[TOOL_CALLS]", 2: b"Yes. ", 3: b'[{"name": "add", ', 4: b'"arguments": {}}]'}

        def template_writes(self, text: str) -> bool:
            return text == "[TOOL_CALLS]"

        def decode(self, ids, continuation: bool = False) -> str:
            return b"".join(self.pieces[i] for i in ids if i not in self.special_ids).decode()

    tokenizer = Marked()
    answer = Answer(0, Ask({}, tools=[{"function": {"name": "add"}}]), tokenizer, [0])
    for ids in ([2, 1, 3], [4, 0]):
        answer.take(Event(0, [Chunk(0, ids, tokenizer.decode(ids))]))
    answer.take(Event(0, [], GenerationResult(1, 0.0, 0, stop_reason="eos")))
    assert (answer.text, [call.name for call in answer.calls], answer.finish) == ("Yes. ", ["add"], "tool_calls")


def test_tools_calls_and_results_as_text():
    """A result that no call stands before, two results in two messages of the user, a description that is not there."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    written = as_text(messages, [{"type": "function", "function": {"name": "add", "parameters": {}}}])
    assert [message["role"] for message in written] == ["user", "assistant", "user"]
    assert written[0]["content"].endswith("\n\n1 + 1?") and '{"name": "add"' in written[0]["content"]
    assert parse(HERMES, written[1]["content"]) == ("", [("add", {"a": 1})] * 2)
    assert written[2]["content"] == "<tool_response>2</tool_response>\n<tool_response>3</tool_response>"
    assert as_text(messages[:1], []) == messages[:1]
