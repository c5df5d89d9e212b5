"""serving/tool_calls.py: calls in the formats of the model families, whole and in pieces."""

from __future__ import annotations

import json

import pytest

from serving.tool_calls import HERMES, LLAMA, MISTRAL, ToolCallParser, tool_format

CALL = '{"name": "add", "arguments": {"a": 1, "b": "x</y"}}'
ADD = ("add", {"a": 1, "b": "x</y"})


def parse(form, text: str, size: int = 0) -> tuple[str, list]:
    """The text and calls of an answer that arrives in pieces of a size, 0: at once."""
    parser = ToolCallParser(form, {"add", "sub"})
    pieces = [text[i : i + size] for i in range(0, len(text), size)] if size else [text]
    shown, calls = "", []
    for more, found in [*map(parser.push, pieces), parser.finish()]:
        shown += more
        calls += found
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
    """A call that is lost or shown as text because a mark came in two pieces, and text that is taken for a call."""
    if expected is None:
        named = text.startswith("Yes")
        expected = ("Yes. ", [("add", {"a": 1}), ("sub", {})]) if named else (text, [])
    assert parse(form, text, size) == expected


def test_text_before_a_call_is_shown_at_once():
    """A stream that shows nothing until the end because a tool might be called."""
    parser = ToolCallParser(HERMES, {"add"})
    assert [parser.push(piece)[0] for piece in ("Hello", " you", " <tool", "box")] == ["Hello", " you", " ", "<toolbox"]
    parser = ToolCallParser(LLAMA, {"add"})
    assert [parser.push(piece)[0] for piece in (" ", "Hi", ' {"a"')] == ["", " Hi", ' {"a"']


def test_the_format_is_the_one_of_the_template():
    """A Llama whose calls are read as Qwen's."""

    class Written:
        def __init__(self, template: str):
            self.template = template

        def template_writes(self, text: str) -> bool:
            return text in self.template

    texts = ("x <tool_call> y", "[TOOL_CALLS]", "<|python_tag|>", '{"name": n, "parameters": p}', "nothing")
    assert [tool_format(Written(text)) for text in texts] == [HERMES, MISTRAL, LLAMA, LLAMA, HERMES]
