"""Thoughts and growing calls as clients see them: every endpoint, whole and streamed, budgets, grammars, history."""

import json
import threading
from functools import partial

import pytest
from serving_kit import ASK, TEMPLATE, instruct_engine, instruct_folder, running, script, text_of

from cli.chat import Conversation
from cli.report import Report
from decoding.params import SamplingParams
from generate import load

openai = pytest.importorskip("openai", reason="the client needs openai (requirements-dev.txt)")
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {
    "a": {"type": "integer", "maximum": 99}}, "required": ["a"], "additionalProperties": False}}}]  # fmt: skip
THOUGHT = "I think\nhard."
CALLS = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n' * 2
SAID = f"<think>\n{THOUGHT}\n</think>\n\nHello.\n"
# A template in the manner of Qwen's: it opens the thought, or closes it, and shows that of an earlier answer.
EARLIER = "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
OPENS = TEMPLATE.replace("{{ m.content }}", EARLIER)
OPENS += (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)
MAYBE = TEMPLATE + "{# <think> #}"  # such as Qwen3's, which leaves it to the model
HARMONY = "{# <|channel|> <|message|> tools #}" + TEMPLATE.removesuffix("<assistant>") + "<|start|>assistant"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return instruct_engine(tmp_path_factory, drafter="ngram")


def without_thought(engine, begun: str = "", **params) -> str:
    """The text of an engine that is told not to think, and that goes on from what is begun."""
    ids = engine.tokenizer.encode("<user>def f(x):<assistant><think>\n\n</think>\n\n", add_bos=False)
    return text_of(engine, ids + engine.tokenizer.encode(begun, continuation=True), **params)


@pytest.fixture
def template(engine, monkeypatch):
    return partial(monkeypatch.setitem, engine.tokenizer.chat_templates, "default")


def chat(client, **more):
    return client.chat.completions.create(model="demo", messages=more.pop("messages", ASK), extra_body=more)


def streamed(client, **more) -> dict[str, str]:
    """The parts of a streamed message, each joined."""
    parts: dict[str, str] = {}
    for chunk in client.chat.completions.create(model="demo", messages=ASK, stream=True, extra_body=more):
        for name, text in chunk.choices[0].delta.model_dump(exclude_none=True).items():
            if isinstance(text, str):
                parts[name] = parts.get(name, "") + text
    return parts


@pytest.mark.parametrize("kind, said", [(MAYBE, SAID), (OPENS, SAID.removeprefix("<think>"))])
def test_a_thought_stands_apart_from_the_answer(engine, client, template, monkeypatch, kind, said):
    """A thought in the content, or another one in a stream, white space of the marks, a wrong count, and a thought that a
    client wants in the text."""
    template(kind)
    script(monkeypatch, engine, said)
    answer = chat(client)
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content, message.reasoning) == ("Hello.\n", THOUGHT, THOUGHT)
    counted = answer.usage.completion_tokens_details.reasoning_tokens
    assert counted == len(engine.tokenizer.encode(THOUGHT, continuation=True)) < answer.usage.completion_tokens
    expected = {"role": "assistant", "content": "Hello.\n", "reasoning_content": THOUGHT, "reasoning": THOUGHT}
    assert streamed(client) == expected
    assert streamed(client, reasoning_format="deepseek") == expected
    raw = chat(client, reasoning_format="none").choices[0].message
    assert raw.content == SAID and not hasattr(raw, "reasoning_content")
    assert streamed(client, reasoning_format="none") == {"role": "assistant", "content": SAID}
    with pytest.raises(openai.BadRequestError, match="reasoning_format is 'x'; allowed: auto"):
        chat(client, reasoning_format="x")


def test_responses_have_a_reasoning_item(engine, client, template, monkeypatch):
    """A thought in the text, events that OpenAI's client cannot put together, calls that come in one piece, and an item
    that is lost when it comes back."""
    template(MAYBE)
    script(monkeypatch, engine, f"<think>\n{THOUGHT}\n</think>\n\nHello.\n{CALLS}")
    flat = [TOOLS[0]["function"] | {"type": "function"}]
    whole = client.responses.create(model="demo", input="x", tools=flat)
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item.type for item in whole.output] == kinds and whole.output[0].content[0].text == THOUGHT
    assert whole.output_text == "Hello." and whole.usage.output_tokens_details.reasoning_tokens > 0
    with client.responses.stream(model="demo", input="x", tools=flat) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == kinds
    assert [getattr(item, "arguments", "") for item in final.output[2:]] == ['{"a": 1}'] * 2
    told = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert told == THOUGHT == final.output[0].content[0].text and final.output_text == "Hello."
    done = [event.output_index for event in events if event.type == "response.output_item.done"]
    assert sorted(done) == [0, 1, 2, 3]
    template(OPENS)
    seen = []
    encode = engine.tokenizer.encode_chat
    monkeypatch.setattr(engine.tokenizer, "encode_chat", lambda m, **more: seen.append(m) or encode(m, **more))
    items = [*ASK, *(item.model_dump(exclude_none=True) for item in whole.output[:3]), {
        "type": "function_call_output", "call_id": whole.output[2].call_id, "output": "2"}]  # fmt: skip
    client.responses.create(model="demo", input=items)
    assert [message.get("thought") for message in seen[0]] == [None, THOUGHT, None]


def test_a_thought_behind_a_text_is_an_item_of_its_own(engine, client, template, monkeypatch):
    """A stream of /v1/responses that ends with an error, because gpt-oss thinks again after it has said something."""
    template(HARMONY)
    said = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>analysis<|message|>"
    begun, shown = len(engine.tokenizer.encode(said, add_bos=False)), threading.Event()
    made = script(monkeypatch, engine, f"{said}Hm.<|end|>", gate=lambda: made[0].given < begun or shown.wait(20))
    with client.responses.stream(model="demo", input="x") as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                shown.set()
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "reasoning"]
    assert (final.output_text, final.output[1].content[0].text) == ("I look.", "Hm.")


def test_anthropics_blocks_in_both_directions(engine, server, template, monkeypatch):
    """A thinking block that Anthropic's client does not read, one that is lost when it comes back, and `thinking` that
    changes nothing."""
    anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed (pip install anthropic)")
    template(OPENS)
    asked = dict(model="demo", max_tokens=60, messages=ASK)
    tool = TOOLS[0]["function"]
    tools = [{"name": tool["name"], "input_schema": tool["parameters"]}]
    with anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0) as claude:
        made = script(monkeypatch, engine, f"{THOUGHT}\n</think>\n\nHello.\n{CALLS}")
        whole = claude.messages.create(**asked, tools=tools)
        with claude.messages.stream(**asked, tools=tools) as stream:
            final = stream.get_final_message()
        for answer in (whole, final):
            assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
            assert (answer.content[0].thinking, answer.content[1].text) == (THOUGHT, "Hello.")
            assert answer.content[3].input == {"a": 1} and answer.stop_reason == "tool_use"
        turns = [*ASK, {"role": "assistant", "content": [block.model_dump() for block in whole.content[:2]]}, *ASK]
        claude.messages.create(**asked | {"messages": turns})
        plain = [*ASK, {"role": "assistant", "content": "Hello."}, *ASK]
        claude.messages.create(**asked | {"messages": plain})
        first, second = (made[i].result.prompt_tokens for i in (2, 3))
        assert first - second >= len(engine.tokenizer.encode(THOUGHT, continuation=True))
        script(monkeypatch, engine, "Hello.")
        off = claude.messages.create(**asked, thinking={"type": "disabled"})
        assert [block.type for block in off.content] == ["text"]
        with pytest.raises(anthropic.BadRequestError, match="thinking.budget_tokens is 0"):
            claude.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 0})


def test_a_budget_closes_the_thought(engine, client, template):
    """A budget that is ignored, one token too many or too few, a thought that is closed twice, other tokens before the
    end than without a budget, and an answer that a client has begun and that goes on inside a thought."""
    template(OPENS)
    encode = partial(engine.tokenizer.encode, continuation=True)
    prompt = engine.tokenizer.encode_chat(ASK)
    free = engine.generate(prompt, SamplingParams(max_new_tokens=9)).run()[0].token_ids
    for name in ("reasoning_budget", "thinking_budget", "thinking_token_budget"):
        message = chat(client, max_tokens=40, **{name: 9}).choices[0].message
        assert message.reasoning_content == engine.tokenizer.decode(free, continuation=True).strip()
    closed = [*prompt, *free, *encode("\n</think>\n\n")]
    left = 40 - 9 - len(encode("\n</think>\n\n"))
    after = text_of(engine, closed, max_new_tokens=left)
    assert message.content == after.lstrip() and after.strip()
    for off in ({"reasoning_budget": 0}, {"enable_thinking": False}, {"reasoning_effort": "none"},
                {"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning": {"effort": "none"}}):  # fmt: skip
        message = chat(client, max_tokens=8, **off).choices[0].message
        assert message.content == without_thought(engine, max_new_tokens=8), off
        assert not hasattr(message, "reasoning_content"), off
    begun = [*ASK, {"role": "assistant", "content": "It is"}]
    message = chat(client, messages=begun, max_tokens=8).choices[0].message
    assert message.content == without_thought(engine, "It is", max_new_tokens=8)


def test_grammars_and_forced_calls_come_behind_the_thought(engine, client, template):
    """A schema that forbids to think, JSON that is taken for a thought because the prompt has begun one, and a call that
    must come and does not."""
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    for kind, end in ((OPENS, "<think>\n"), (HARMONY, "<|start|>assistant")):
        template(kind)
        budget = {"reasoning_budget": 6, "max_tokens": 120}
        message = chat(client, response_format=form, **budget).choices[0].message
        assert list(json.loads(message.content)) == ["n"] and message.reasoning_content, kind
        forced = chat(client, tools=TOOLS, tool_choice="required", **budget).choices[0]
        assert forced.finish_reason == "tool_calls" and not forced.message.content and forced.message.reasoning_content
        assert json.loads(forced.message.tool_calls[0].function.arguments)["a"] <= 99
        now = chat(client, tools=TOOLS, tool_choice="required", max_tokens=120, enable_thinking=False).choices[0]
        assert now.finish_reason == "tool_calls" and not hasattr(now.message, "reasoning_content")
        assert engine.tokenizer.decode(engine.tokenizer.encode_chat(ASK), skip_special=False).endswith(end)
    template(MAYBE)  # which lets the model begin with a thought, or with the answer
    for more in ({"reasoning_budget": 6}, {"enable_thinking": False}):
        message = chat(client, response_format=form, max_tokens=60, **more).choices[0].message
        assert list(json.loads(message.content)) == ["n"]


def test_marks_that_are_special_tokens_are_seen(tmp_path, monkeypatch):
    """Channels that run together because the engine leaves special tokens out of the text, and a call that must come with
    marks that a grammar spells with other tokens."""
    folder = instruct_folder(tmp_path)
    marks = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": HARMONY}
    settings["added_tokens_decoder"] = {str(3 + i): {"content": mark, "special": True} for i, mark in enumerate(marks)}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    engine = load(folder, device="cpu", threads=1)
    tokenizer = engine.tokenizer
    assert {*tokenizer.shown_ids()} == {3, 4, 5, 6} <= tokenizer.special_ids
    said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello."
    with running(engine) as server, openai.OpenAI(base_url=f"{server.address}/v1", api_key="none") as client:
        forced = chat(client, tools=TOOLS, tool_choice="required", reasoning_budget=6, max_tokens=120).choices[0]
        assert forced.finish_reason == "tool_calls" and not forced.message.content and forced.message.reasoning_content
        assert json.loads(forced.message.tool_calls[0].function.arguments)["a"] <= 99
        made = script(monkeypatch, engine, "x")
        encode = tokenizer.encode
        ids = encode(said, continuation=True, control=True)
        assert ids[0] == 3 and ids.count(4) == 2
        monkeypatch.setattr(tokenizer, "encode", lambda text, **how: ids if text == "x" else encode(text, **how))
        message = chat(client).choices[0].message
        assert made and (message.content, message.reasoning_content) == ("Hello.", "Hm.")


def test_the_terminal_folds_thoughts_away(engine, template, monkeypatch, capsys):
    """A thought that is printed as the answer, one that cannot be looked at, and one that stays in the next prompt
    although the template leaves it out. An empty answer without a word why, where all tokens went into the thought."""
    template(MAYBE)
    made = script(monkeypatch, engine, SAID)
    conversation = Conversation(engine, {}, None, Report(quiet=True), False)
    conversation.take("Hi")
    output = capsys.readouterr()
    assert output.out == "Hello.\n\n" and "(thinking)" in output.err
    conversation.take("/thought")
    assert capsys.readouterr().out == f"{THOUGHT}\n"
    assert conversation.messages[-1] == {"role": "assistant", "content": "Hello.", "thought": THOUGHT}
    conversation.take("Again")
    assert engine.tokenizer.decode(made[1].request.prompt) == "<user>Hi<assistant>Hello.<user>Again<assistant>"
    script(monkeypatch, engine, SAID.partition("</think>")[0])
    conversation.take("Hm")
    assert "without an answer" in capsys.readouterr().err
