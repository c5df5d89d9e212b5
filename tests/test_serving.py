"""The server as OpenAI's own client sees it: every endpoint, streams, tools, errors, and clients that leave."""

import json
import re
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import pytest
from serving_kit import ASK, instruct_engine, script, text_of, until
from tiny import rules

from decoding.params import SamplingParams
from engine.prompt_cache import PromptCache
from serving.fields import NOT_HERE, Fields
from support.errors import UsageError, advised

openai = pytest.importorskip("openai", reason="the client needs openai (requirements-dev.txt)")
pydantic = pytest.importorskip("pydantic")  # which that client needs
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    made = instruct_engine(tmp_path_factory, drafter="ngram", eagle_always=True)
    made.keep_prompts(PromptCache(64))
    return made


def expected(engine, messages=ASK, **params) -> str:
    """The text that the engine itself gives."""
    return text_of(engine, engine.tokenizer.encode_chat(messages), **params)


@pytest.fixture
def ask(server):
    return server.ask


@pytest.fixture
def refused(server):
    """refused(path, **body) is the error object of a request."""
    return lambda path, **body: server.ask(path, 400, **body)["error"]


def joined(chunks) -> str:
    """The text of a streamed chat."""
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


# ------------------------------------------------------------------ endpoints


def test_a_chat_gives_the_engines_own_answer(engine, client):
    """With every sampling setting given, the text, finish reason, usage and timings are those of the engine."""
    given = dict(temperature=0.8, top_p=0.9, seed=7, presence_penalty=0.5, frequency_penalty=0.25)
    extra = dict(top_k=40, min_p=0.01, repetition_penalty=1.1)
    text = expected(engine, max_new_tokens=24, **given, **extra)
    asked = dict(model="any", messages=ASK, max_completion_tokens=24)
    answer = client.chat.completions.create(**asked, extra_body=extra, **given)
    assert answer.choices[0].message.content == text and answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.role == "assistant" and answer.model == "demo"
    usage = answer.usage
    assert usage.completion_tokens == 24 and usage.prompt_tokens == len(engine.tokenizer.encode_chat(ASK))
    assert usage.total_tokens == usage.prompt_tokens + 24 and usage.prompt_tokens_details.cached_tokens > 0
    figures = answer.timings
    assert figures["seed"] == 7 and figures["tau"] >= 1 and figures["predicted_n"] == 24
    assert figures["predicted_per_second"] > 0 and figures["cache_n"] == usage.prompt_tokens_details.cached_tokens


def test_a_stream_is_the_same_answer_in_pieces(engine, client):
    """The deltas join to the whole text; the role comes first, the finish reason last, usage only where it is wanted."""
    text = expected(engine, max_new_tokens=24)
    asked = dict(model="demo", messages=ASK, stream=True)
    chunks = list(client.chat.completions.create(**asked, max_tokens=24, stream_options={"include_usage": True}))
    assert joined(chunks) == text
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 24 and chunks[-1].timings["steps"] > 0
    assert len({c.id for c in chunks}) == 1 and all(c.usage is None for c in chunks[:-1])
    plain = list(client.chat.completions.create(**asked, max_tokens=4))
    assert all(c.choices and c.usage is None for c in plain) and plain[-1].timings["predicted_n"] == 4


def test_completions_continue_texts_and_ids(engine, client):
    """A text, ids, or a list of either gets the engine's continuation, also in a stream, each at its index."""
    prompts = ["def main():\n", "class A:\n"]
    texts = [text_of(engine, prompt, max_new_tokens=16) for prompt in prompts]
    answer = client.completions.create(model="demo", prompt=prompts)
    assert [choice.text for choice in answer.choices] == texts and answer.usage.completion_tokens == 32
    ids = engine.tokenizer.encode(prompts[1])
    assert client.completions.create(model="demo", prompt=ids).choices[0].text == texts[1]
    assert client.completions.create(model="demo", prompt=[ids, ids]).choices[1].text == texts[1]
    pieces = ["", ""]
    for chunk in client.completions.create(model="demo", prompt=prompts, stream=True):
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    assert pieces == texts


def test_n_choices_have_seeds_of_their_own_and_share_the_prompt(engine, client):
    """Choice i has the text of seed + i, whole and streamed, and the prompt's tokens count once. Without a seed each
    request gets another one, and `timings.seed` repeats its answer."""
    given = dict(temperature=1.5, max_new_tokens=12)
    texts = [expected(engine, seed=seed, **given) for seed in (5, 6, 7)]
    asked = dict(model="demo", messages=ASK, n=3, seed=5, temperature=1.5, max_tokens=12)
    answer = client.chat.completions.create(**asked)
    assert [choice.message.content for choice in answer.choices] == texts and len(set(texts)) == 3
    assert answer.usage.prompt_tokens == len(engine.tokenizer.encode_chat(ASK)) and answer.timings["seed"] == 5
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(stream=True, **asked):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts
    first, second = (client.chat.completions.create(**asked | {"seed": None}) for _ in range(2))
    assert first.timings["seed"] != second.timings["seed"]
    again = client.chat.completions.create(**asked | {"seed": first.timings["seed"]})
    assert [choice.message.content for choice in again.choices] == [one.message.content for one in first.choices]


def test_a_stop_string_ends_the_text_and_is_not_part_of_it(engine, client):
    """The text ends before the first stop string, whole and streamed, with the finish reason "stop"."""
    text = expected(engine, max_new_tokens=40)
    stop = text[12:16]
    cut = text[: text.index(stop)]
    asked = dict(model="demo", messages=ASK, max_tokens=40, stop=[stop, "never there"])
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].message.content == cut and answer.choices[0].finish_reason == "stop"
    assert joined(client.chat.completions.create(stream=True, **asked)) == cut
    assert client.completions.create(model="demo", prompt="x", stop=".", max_tokens=3).choices[0].text is not None


def test_responses_whole_and_streamed(engine, client):
    """/v1/responses gives the engine's text and usage; its events come in OpenAI's order with numbers 0, 1, 2, ..."""
    messages = [{"role": "system", "content": "Be brief."}, *ASK]
    text = expected(engine, messages, max_new_tokens=20)
    asked = dict(model="demo", instructions="Be brief.", max_output_tokens=20)
    whole = client.responses.create(input="def f(x):", **asked)
    assert whole.output_text == text and whole.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens" and whole.usage.output_tokens == 20
    parts = [{"type": "input_text", "text": "def f(x):"}]
    events = list(client.responses.create(input=[{"role": "user", "content": parts}], stream=True, **asked))
    names = [event.type.removeprefix("response.") for event in events]
    assert names[:5] == ["created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == text
    assert events[-4].text == text and events[-1].response.output_text == text
    assert events[-1].response.usage.input_tokens == whole.usage.input_tokens


def test_models_health_and_metrics(server, client):
    """The model is listed, another one is a 404, /health says ok, and /metrics counts requests and tokens under
    declared names, and times in buckets that add up."""
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "eaglet"
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-5'"):
        client.models.retrieve("gpt-5")
    client.completions.create(model="demo", prompt="x", max_tokens=2)
    server.idle()
    assert server.get("/health").json() == {"status": "ok"}
    text = server.get("/metrics").text
    figures = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line[0] != "#"}
    assert figures['eaglet_requests_total{path="/v1/completions",status="200"}'] >= 1
    assert figures["eaglet_generated_tokens_total"] >= 2 and figures["eaglet_requests_running"] == 0
    named = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    figures_named = {re.sub("_seconds_(bucket|sum|count)$", "_seconds", name.split("{")[0]) for name in figures}
    assert figures_named == named
    for name in ("queue_seconds", "time_to_first_token_seconds", "time_between_tokens_seconds"):
        times = server.api.metrics.times[name]
        assert times.counts[-1] > 0 and times.counts == sorted(times.counts)
        assert figures[f'eaglet_{name}_bucket{{le="+Inf"}}'] == figures[f"eaglet_{name}_count"] == times.counts[-1]


def test_logprobs_are_those_of_the_chunks(engine, client, monkeypatch):
    """Each endpoint writes the chunks' log-probabilities in its own form, -inf as -9999, whole and streamed."""

    def logprob(token):
        return SimpleNamespace(logprob=-0.5, top=[(token, -0.5), (5, float("-inf"))])

    made = script(monkeypatch, engine, "def f", logprob=logprob)
    answer = client.chat.completions.create(model="demo", messages=ASK, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content == "def f"
    assert content[0].logprob == -0.5 and bytes(content[0].bytes).decode() == content[0].token
    assert [top.logprob for top in content[0].top_logprobs] == [-0.5, -9999.0]
    stream = client.chat.completions.create(model="demo", messages=ASK, logprobs=True, stream=True)
    entries = [entry for c in stream if (logprobs := c.choices[0].logprobs) for entry in logprobs.content]
    assert "".join(entry.token for entry in entries) == "def f"
    columns = client.completions.create(model="demo", prompt="x", logprobs=2).choices[0].logprobs
    assert "".join(columns.tokens) == "def f" and columns.text_offset[0] == 0 and set(columns.token_logprobs) == {-0.5}
    asked = dict(model="demo", input="x", top_logprobs=1, include=["message.output_text.logprobs"])
    response = client.responses.create(**asked)
    assert response.output[0].content[0].logprobs[0].logprob == -0.5
    client.completions.create(model="demo", prompt="x")
    assert [stream.request.params.logprobs for stream in made] == [2, 0, 2, 1, None]


# ------------------------------------------------------------------ tools


def streamed_calls(chunks) -> list[tuple[str, str]]:
    """The calls of a stream, put together as clients do it: by their numbers, and arguments that grow."""
    calls: dict[int, list[str]] = {}
    for part in (part for chunk in chunks for part in chunk.delta.tool_calls or []):
        call = calls.setdefault(part.index, ["", ""])
        call[0] += part.function.name or ""
        call[1] += part.function.arguments or ""
    return [tuple(call) for call in calls.values()]


def test_tools_reach_the_template_and_calls_come_back(engine, client, monkeypatch):
    """The prompt holds the tools unless tool_choice is none; a call becomes `tool_calls`, whole and streamed."""
    made = script(monkeypatch, engine, f"I add.{CALL}")
    asked = dict(model="demo", messages=ASK, tools=TOOLS)
    answer = client.chat.completions.create(**asked).choices[0]
    call = answer.message.tool_calls[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content == "I add."
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    chunks = [c.choices[0] for c in client.chat.completions.create(stream=True, **asked)]
    assert "".join(c.delta.content or "" for c in chunks) == "I add."
    assert streamed_calls(chunks) == [("add", '{"a": 1}')] and chunks[-1].finish_reason == "tool_calls"
    again = client.chat.completions.create(tool_choice="none", **asked).choices[0]
    assert again.message.content == f"I add.{CALL}" and not again.message.tool_calls
    tools = [made[i].result.prompt_tokens for i in range(3)]
    assert tools[0] == tools[1] > tools[2]


def test_calls_and_results_of_earlier_turns_reach_the_template(engine, client):
    """Earlier calls, with arguments as objects, and their results are in the prompt of both chat endpoints."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "2"}
    messages = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=12)
    prompt = '<user>def f(x):<assistant><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool>2'
    ids = engine.tokenizer.encode(f"{prompt}<assistant>", add_bos=False)
    text = text_of(engine, ids, max_new_tokens=12)
    assert answer.usage.prompt_tokens == len(ids) and answer.choices[0].message.content == text
    item = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
    items = [*ASK, item, {"type": "function_call_output", "call_id": "c1", "output": "2"}]
    assert client.responses.create(model="demo", input=items, max_output_tokens=12).output_text == text


ADDER = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}},
         "required": ["a"], "additionalProperties": False}}  # fmt: skip
ADDERS = [{"type": "function", "function": ADDER}, *TOOLS]


def test_a_call_that_must_come_follows_the_tools_schema(client):
    """tool_choice that only asks the model, arguments that follow no schema, and a call that is streamed as text."""
    pytest.importorskip("llguidance")
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        asked = dict(model="demo", messages=ASK, tools=ADDERS[:1], tool_choice=choice, temperature=1, seed=4)
        whole = client.chat.completions.create(**asked).choices[0]
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
        assert whole.message.content is None and not any(chunk.delta.content for chunk in chunks)
        assert whole.finish_reason == chunks[-1].finish_reason == "tool_calls"
        ((name, written),) = streamed_calls(chunks)
        arguments = json.loads(written)
        assert name == "add" and list(arguments) == ["a"] and arguments["a"] <= 99
        assert [call.function.arguments for call in whole.message.tool_calls] == [written]
    flat = {"type": "function", "name": "add"}
    asked = dict(model="demo", input="x", tools=[ADDER | {"type": "function"}], tool_choice=flat)
    response = client.responses.create(**asked, extra_body={"seed": 1})
    assert [item.type for item in response.output] == ["function_call"]
    # a client finds a function of a namespace by both names, not by the joined one that the model writes
    asked["tools"] = [{"type": "namespace", "name": "mcp", "tools": asked["tools"]}]
    asked["tool_choice"] = flat | {"namespace": "mcp"}
    *_, last = client.responses.create(**asked, stream=True)
    for response in (client.responses.create(**asked), last.response):
        assert [(item.name, item.namespace) for item in response.output] == [("add", "mcp")]


def test_a_stream_with_calls_has_the_text_of_the_whole_answer(engine, client, monkeypatch):
    """Text between or after calls that only one of the two has, white space that one of them drops, a call that is no
    item of a response, and a second call where parallel ones are not wanted."""
    script(monkeypatch, engine, f" Let me see.\n{CALL}\nAnd {CALL} then.")
    asked = dict(model="demo", messages=ASK, tools=TOOLS)
    whole = client.chat.completions.create(**asked).choices[0].message.content
    assert joined(client.chat.completions.create(**asked, stream=True)) == whole
    asked = dict(model="demo", input="x", tools=[{"type": "function", **TOOLS[0]["function"]}])
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    last = events[-1].response
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert whole.output_text == last.output_text == deltas and "then." in deltas
    assert (whole.status, events[-1].type) == ("completed", "response.completed")
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [(event.output_index, event.arguments) for event in done] == [(1, '{"a": 1}'), (2, '{"a": 1}')]
    one = client.responses.create(**asked, parallel_tool_calls=False)
    assert [item.type for item in one.output] == ["message", "function_call"]
    assert [item.type for item in whole.output] == [item.type for item in last.output]
    assert [e.output_index for e in events if e.type == "response.output_item.added"] == [0, 1, 2]


def test_a_template_without_a_place_for_tools_gets_them_as_text(engine, client, monkeypatch):
    """Tools that a template drops without a word, so that the model never hears of them."""
    monkeypatch.setattr(engine.tokenizer, "_template", "vicuna")
    monkeypatch.setattr(engine.tokenizer, "chat_template_source", "built-in vicuna")
    made = script(monkeypatch, engine, CALL)
    answer = client.chat.completions.create(model="demo", messages=ASK, tools=ADDERS)
    assert answer.choices[0].message.tool_calls[0].function.name == "add" and made


# ------------------------------------------------------------------ errors


IMAGE = {"role": "user", "content": [{"type": "image_url"}]}
NAMED = {"type": "function", "function": {"name": "sub"}}
SET = {"type": "array", "uniqueItems": True}
LISTS = {"anyOf": [SET, {"oneOf": [{"type": "object"}, {"type": "object"}]}]}
STRICT_SCHEMA = {"type": "json_schema", "json_schema": {"strict": True, "schema": LISTS}}
STRICT_TOOL = {"function": {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"a": SET}}}}
NO_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}
BAD = [
    ({"messages": []}, "messages", "is empty"),
    ({"messages": None}, "messages", "is missing"),
    ({"messages": "hi"}, "messages", "an array, not a string"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'robot'; allowed: system"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
    ({"messages": [IMAGE]}, "messages[0].content[0].type", "text only"),
    ({"messages": [{"role": "user", "content": "x " * 3000}]}, "messages", "the context holds 2,048"),
    ({"messages": [{"role": "user", "content": "x" * 40000}]}, "messages", "40,000 characters"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "cannot be used"),
    ({"metadata": {"a": "\ud800"}}, "metadata", "cannot be used"),
    ({"a\udfff": 1}, "a\\udfff", "cannot be used"),
    ({"temperature": -1}, "temperature", "allowed: a finite number >= 0"),
    ({"temperature": True}, "temperature", "a number, not a boolean"),
    ({"temperature": 10**400}, None, "401 digits"),
    ({"top_p": -0.1}, "top_p", "top_p is -0.1"),
    ({"max_tokens": 0}, "max_tokens", "allowed: 1 to"),
    ({"max_tokens": 10**50}, "max_tokens", "allowed: 1 to"),
    ({"seed": 2**70}, "seed", "64-bit"),
    ({"n": 17}, "n", "allowed: 1 to 16"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": 5}, "stop", "an array, not an integer"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs to be true"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "allowed: text, json_object"),
    ({"response_format": {"type": "json_schema"}}, "response_format.schema", "is missing"),
    ({"response_format": STRICT_SCHEMA}, "response_format", "has oneOf, uniqueItems, which cannot be enforced"),
    ({"tools": [STRICT_TOOL], "tool_choice": "required"}, "tools", "has uniqueItems, which cannot be enforced"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "without stream"),
    ({"response_format": NO_SCHEMA}, "response_format", "the JSON schema is not supported"),
    ({"grammar": "root ::= ["}, "grammar", "the grammar has an error"),
    ({"grammar": "start: ["}, "grammar", "the grammar has an error"),
    ({"grammar": "start: /a/", "response_format": {"type": "json_object"}}, "grammar", "not go with response_format"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "must be an object"),
    ({"tools": TOOLS, "tool_choice": NAMED}, "tool_choice.function.name", "none of the tools"),
    ({"tools": TOOLS, "tool_choice": "required", "grammar": "start: /a/"}, "tool_choice", "does not go with"),
    ({"tools": [{"type": "function", "function": {"name": "a</s>"}}]}, "tools", "control token"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "must be functions"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "(5, 101)"),
    ({"logit_bias": {"5": True}}, "logit_bias", "(5, True)"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "the vocabulary"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024"),
    ({"logit_bias": [[5, 1], [5, 2]]}, "logit_bias", "twice"),
    ({"logit_bias": [5]}, "logit_bias", "token ids"),
    ({"logit_bias": [[1.5, 1]]}, "logit_bias", "(1.5, 1)"),
    ({"min_tokens": -1}, "min_tokens", "min_tokens is -1"),
    ({"min_tokens": 5, "guided_choice": ["a"]}, "min_tokens", "a grammar"),
    ({"functions": [{"name": "f"}]}, "functions", "use tools"),
]


@pytest.mark.parametrize("body, param, said", BAD)
def test_a_bad_request_names_the_field_and_does_not_touch_the_engine(server, client, body, param, said):
    """Each wrong field is a 400 of one line that names the field and says why, and no job is queued."""
    with pytest.raises(openai.BadRequestError) as caught:
        # the client itself would refuse to encode half of a surrogate pair
        client.post("/chat/completions", content=json.dumps({"messages": ASK} | body).encode(), cast_to=object)
    error = caught.value.body
    assert error["type"] == "invalid_request_error" and error["param"] == param and said in error["message"]
    assert "\n" not in error["message"] and server.api.scheduler.jobs == set()


def test_a_grammar_that_is_too_much_is_a_400(client, refused, monkeypatch):
    """A grammar that would end the process, and one that is too much while decoding; the server goes on."""
    llguidance = pytest.importorskip("llguidance")
    too_deep = refused("/chat/completions", messages=ASK, grammar=rules(3000))
    assert "too large, or nested too deeply" in too_deep["message"]
    small = partial(llguidance.LLMatcher, limits=llguidance.LLParserLimits(max_items_in_row=20))
    with monkeypatch.context() as patch:
        patch.setattr(llguidance, "LLMatcher", small)
        error = refused("/completions", prompt="x", grammar="start:" + " x" * 5 + '\nx: "a"* "a"* "a"*')
        assert "cannot be followed further" in error["message"]
    assert client.completions.create(model="demo", prompt="x", max_tokens=2).usage.completion_tokens == 2


class Person(pydantic.BaseModel):
    """What the client below asks for."""

    name: Annotated[str, pydantic.Field(max_length=6)]
    age: Annotated[int, pydantic.Field(ge=0, le=150)]


def test_an_answer_follows_a_schema_on_every_endpoint(client, ask, refused):
    """With a schema the text parses as it on all chat endpoints and in a stream; a grammar holds for its own request
    alone, and a second constraint is refused and not dropped."""
    pytest.importorskip("llguidance")
    parsed = client.chat.completions.parse(model="demo", messages=ASK, response_format=Person, seed=3, temperature=1)
    assert isinstance(parsed.choices[0].message.parsed, Person)
    answer = client.responses.parse(model="demo", input=ASK[0]["content"], text_format=Person, extra_body={"seed": 3})
    assert isinstance(answer.output_parsed, Person)
    schema = Person.model_json_schema()
    asked = dict(messages=ASK, max_tokens=60, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert Person.model_validate_json(ask("/messages", **asked)["content"][0]["text"])
    error = refused("/messages", **asked, grammar="start: /a/")
    assert "grammar does not go with output_config.format" in error["message"]
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    asked = dict(model="demo", messages=ASK, response_format=form, seed=3, temperature=1)
    text = joined(client.chat.completions.create(**asked, stream=True))
    assert Person.model_validate_json(text) == parsed.choices[0].message.parsed
    asked = dict(model="demo", prompt="x", max_tokens=40)
    free = client.completions.create(**asked).choices[0].text
    for grammar, pattern in (("start: /[a-c]{4,9}/", "[a-c]{4,9}"), ('root ::= "yes" | "no"', "yes|no")):
        answer = client.completions.create(**asked, extra_body={"grammar": grammar})
        assert re.fullmatch(pattern, answer.choices[0].text)
    assert client.completions.create(**asked).choices[0].text == free


CONSTRAINTS = {
    "json_schema": Person.model_json_schema(),
    "guided_json": json.dumps(Person.model_json_schema()),
    "guided_json_object": True,
    "guided_regex": r"a\d{2}/b",
    "guided_choice": ["yes", "no", 'with "quotes" and \\'],
    "guided_grammar": 'root ::= "yes"',
    "structured_outputs": {"choice": ["yes", "no"]},
    "response_format": {"type": "json_object", "schema": Person.model_json_schema()},
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_every_field_that_constrains_does(ask, refused, name):
    """A constraint under llama.cpp's or vLLM's name that is ignored: the text would be any text."""
    pytest.importorskip("llguidance")
    asked = {"messages": ASK, "max_tokens": 60, "seed": 1, name: CONSTRAINTS[name]}
    choice = ask("/chat/completions", **asked)["choices"][0]
    text, cut = choice["message"]["content"], choice["finish_reason"] == "length"
    if "choice" in str(asked) or name == "guided_grammar":
        assert text in ("yes", "no", 'with "quotes" and \\')
    elif name == "guided_regex":
        assert re.fullmatch(r"a\d{2}/b", text)
    elif name == "guided_json_object":
        assert text.startswith("{") and (cut or isinstance(json.loads(text), dict))
    else:
        assert text.startswith('{"name":"') and (cut or Person.model_validate_json(text))
    said = refused("/chat/completions", **asked, grammar="start: /a/")["message"]
    assert "does not go with" in said and "grammar" in said


# Every field of OpenAI's chat request and of llama.cpp's that is neither refused nor ignored by its name.
CHAT_FIELDS = {
    **dict.fromkeys(("temperature", "repetition_penalty"), 10**30),  # an integer beyond 64 bits is a number, too
    **dict.fromkeys(("top_p", "min_p", "presence_penalty", "frequency_penalty", "repeat_penalty"), 0.5),
    **dict.fromkeys(("max_completion_tokens", "max_tokens", "n_predict", "n", "top_k", "seed", "top_logprobs"), 2),
    **dict.fromkeys(("logprobs", "parallel_tool_calls", "ignore_eos"), True),
    "stop": ["a"],
    "chat_template_kwargs": {"a": "b"},
    "grammar": "start: /a/",
    "json_schema": {"type": "integer"},
    "logit_bias": {"5": 1},
    "response_format": {"type": "json_object"},
    "stream_options": {"include_usage": True, "include_obfuscation": False},
    "tool_choice": "none",
    "tools": TOOLS,
    "reasoning": {"effort": "low"},
    "reasoning_effort": "low",
    "reasoning_format": "none",
    "enable_thinking": False,
    **dict.fromkeys(("reasoning_budget", "thinking_budget", "thinking_token_budget"), 5),
}
OTHERS = {"audio": {"voice": "a", "format": "wav"}, "functions": [{"name": "f"}], "function_call": {"name": "f"},
          "modalities": ["audio"], "best_of": 3, "suffix": "x"}  # fmt: skip


def test_every_field_of_a_chat_is_honoured_refused_or_a_hint(ask, refused):
    """A field that no line of docs/server.md names, one that changes the text and is ignored, one that is an error
    although the page says that it works, and a hint, a null or an unknown field that changes the text or is an error."""
    pytest.importorskip("llguidance")
    page = (Path(__file__).resolve().parent.parent / "docs" / "server.md").read_text(encoding="utf-8")
    rows = {kind: re.search(rf"^\| {kind} \|.*$", page, re.M)[0] for kind in ("refused", "ignored")}
    not_here, ignored = ([*re.findall("`([a-z_.]+)`", row)] for row in rows.values())
    assert {*NOT_HERE, *OTHERS} == {*not_here} and len(ignored) > 25
    chat = partial(ask, "/chat/completions", messages=ASK)
    for name in {*not_here} - {"suffix", "best_of"}:  # which are of /v1/completions
        error = refused("/chat/completions", messages=ASK, max_tokens=2, **{name: OTHERS.get(name, 0.123)})
        assert "is not supported" in error["message"]
        assert error["param"] == name and error["code"] == "unsupported_parameter"
        for nothing in NOT_HERE.get(name, ((),))[0]:
            Fields({name: nothing}).refuse(name, NOT_HERE[name][0], "")
    nothing = dict.fromkeys(ignored, 0.123) | dict.fromkeys(("stop", "logit_bias", "n"))
    nothing |= {"new_in_2030": {"a": []}, "response_format": {"type": "text"}}
    assert chat(max_tokens=2, **nothing)["choices"] == chat(max_tokens=2)["choices"]
    for name, value in CHAT_FIELDS.items():
        assert f"`{name}`" in page, f"docs/server.md does not name {name}"
        given = {"max_tokens": 2, "logprobs": name == "top_logprobs", name: value}
        assert chat(**given)["choices"][0]["finish_reason"], name


def test_allowed_tools_are_the_ones_that_the_model_sees(client, refused):
    """A tool_choice that is refused or ignored, so that a tool is called that the client forbade."""
    pytest.importorskip("llguidance")
    prompts = []
    for choice in ("auto", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function",
                   "function": {"name": "add"}}]}}):  # fmt: skip
        tools = ADDERS[:1] if choice == "auto" else [ADDERS[0], {"type": "function", "function": {"name": "other"}}]
        asked = dict(model="demo", messages=ASK, tools=tools, tool_choice=choice, max_tokens=2)
        prompts.append(client.chat.completions.create(**asked).usage.prompt_tokens)
    assert prompts[0] == prompts[1]
    choice["allowed_tools"]["mode"] = "required"
    answer = client.chat.completions.create(**asked | {"max_tokens": 60})
    assert answer.choices[0].message.tool_calls[0].function.name == "add"
    flat = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}
    tools = [ADDER | {"type": "function"}, {"type": "function", "name": "other"}]
    response = client.responses.create(model="demo", input="x", tools=tools, tool_choice=flat)
    assert [item.type for item in response.output] == ["function_call"] and response.output[0].name == "add"
    for change, param in (({"mode": "none"}, "tool_choice.mode"), ({"tools": [{"name": "sub"}]}, "tool_choice")):
        assert refused("/responses", input="x", tools=tools, tool_choice=flat | change)["param"] == param


def test_fields_of_other_servers_that_are_honoured(client, ask, refused, engine, monkeypatch):
    """llama.cpp's and vLLM's names for settings, ids that stop, a text past its stop ids, and the echo of the prompt."""
    ask = partial(ask, "/completions", prompt="def main():\n")
    text = lambda **more: ask(**more)["choices"][0]["text"]  # noqa: E731
    free = engine.generate("def main():\n", SamplingParams(max_new_tokens=16)).run()[0]
    assert text(n_predict=5) == engine.tokenizer.decode(free.token_ids[:5], continuation=True)
    assert text(repeat_penalty=1.4) == text(repetition_penalty=1.4) != free.text
    assert text(top_k=-1, temperature=1, seed=2) == text(temperature=1, seed=2)
    assert text(echo=True) == "def main():\n" + free.text
    ids = engine.tokenizer.encode("def main():\n")
    assert text(echo=True, prompt=ids) == engine.tokenizer.decode(ids) + free.text
    chunks = client.completions.create(model="demo", prompt="def main():\n", stream=True, echo=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "def main():\n" + free.text
    stop = free.token_ids[3]
    ended = ask(stop_token_ids=[stop])
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["usage"]["completion_tokens"] == free.token_ids.index(stop) + 1
    monkeypatch.setattr(engine.tokenizer, "eos_ids", [stop])
    assert ask()["choices"][0]["finish_reason"] == "stop"
    assert text(ignore_eos=True) == free.text
    longer = ask(min_tokens=9)
    assert longer["usage"]["completion_tokens"] >= 9 and longer["choices"][0]["text"] != text()
    assert refused("/completions", prompt="x", ignore_eos=True, guided_choice=["a"])["param"] == "ignore_eos"


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
def test_a_bias_is_honoured_by_all_endpoints(ask, engine, path):
    """A bias that one endpoint or one of its two forms ignores, or that changes the model's log-probabilities."""
    (token,) = engine.tokenizer.encode("x", continuation=True)
    source = {"completions": {"prompt": "a ="}, "responses": {"input": "a ="}}.get(path, {"messages": ASK})
    body = source | {"max_output_tokens" if path == "responses" else "max_tokens": 4}
    for bias in ({str(token): 100}, [[token, 100], [token + 1, False]]):
        assert "xxxx" in json.dumps(ask(f"/{path}", **body, logit_bias=bias))
    if path == "completions":
        answers = (ask("/completions", **body, logprobs=2, **more) for more in ({}, {"logit_bias": bias}))
        plain, biased = (answer["choices"][0]["logprobs"] for answer in answers)
        assert plain["top_logprobs"][0].items() <= biased["top_logprobs"][0].items()
        assert biased["token_logprobs"][0] < plain["token_logprobs"][0]


def test_variables_reach_the_chat_template(engine, ask, refused, monkeypatch):
    """chat_template_kwargs that are ignored, or that replace what the server itself gives a template."""
    source = engine.tokenizer.chat_template + "{{ 'some more words here' if thinking else '' }}"
    monkeypatch.setitem(engine.tokenizer.chat_templates, "default", source)
    asked = dict(path="/chat/completions", messages=ASK, max_tokens=1)
    off, on = (ask(**asked, chat_template_kwargs={"thinking": on})["usage"]["prompt_tokens"] for on in (False, True))
    assert on > off
    for effort, tokens in {"max": on, "low": on, "minimal": off, "none": off}.items():
        assert ask(**asked, reasoning_effort=effort)["usage"]["prompt_tokens"] == tokens
    assert ask(**asked, reasoning_effort="none", enable_thinking=True)["usage"]["prompt_tokens"] == off
    for variables in ({"messages": []}, {"a": "x</s>"}):
        assert refused(**asked, chat_template_kwargs=variables)["param"] == "chat_template_kwargs"


def test_bad_requests_of_the_other_endpoints(server):
    """/v1/completions and /v1/responses refuse wrong fields by name, too. And a model that is told that its tool gave
    nothing, because the client's field has a wrong name."""
    for prompt in (None, [], [[1, True]], [99999]):
        server.refuses("/v1/completions", "prompt", prompt=prompt)
    server.refuses("/v1/completions", "suffix", prompt="x", suffix="y")
    output = {"type": "function_call_output", "content": "2"}
    for given, field in (({"type": "image"}, "type"), ({"role": "x"}, "role"), (output, "output")):
        server.refuses("/v1/responses", f"input[0].{field}", input=[given])
    for given in (None, []):
        server.refuses("/v1/responses", "input", input=given)
    server.refuses("/v1/responses", "previous_response_id", input="x", previous_response_id="r")
    assert server.lines[-1].startswith("/v1/responses   400   previous_response_id")


def test_no_answer_has_advice_about_flags_or_files(client, engine, monkeypatch):
    """What the user of a command may do, a client cannot: no message names a flag, a file or a download."""
    chat = json.dumps({"messages": ASK}).encode()
    said = []

    def ask(data: bytes) -> None:
        with pytest.raises(openai.APIStatusError) as caught:
            client.post("/chat/completions", content=data, cast_to=object)
        said.append(caught.value.body["message"])

    for data in (b"{", b"[" * 200 + b"]" * 200, json.dumps({"messages": ASK, "n": 99}).encode()):
        ask(data)
    with monkeypatch.context() as patch:
        patch.setattr("serving.fields.checked_grammar", partial(missing, "pip install llguidance"))
        ask(json.dumps({"messages": ASK, "grammar": "x"}).encode())
        script(patch, engine, "some more text", gate=partial(missing, "--dtype bfloat16"))
        ask(chat)
        patch.setattr(engine, "generation", {"do_sample": True, "top_p": 7})
        ask(chat)
        patch.setattr(engine.tokenizer, "encode_chat", partial(missing, "--prompt-ids"))
        ask(chat)
        patch.setattr(engine.tokenizer, "chat_template_source", "")
        ask(chat)
    assert len(said) == 8
    for words in ("--", "pip ", "Download", "right file", "the command line"):
        assert not [message for message in said if words in message], words


def missing(advice: str, *_rest: object, **_more: object) -> None:
    """Fail with advice for the user of a command."""
    raise advised(UsageError("it is not there."), advice)


def test_an_engine_that_fails_is_an_error_and_the_next_request_is_right(engine, client, monkeypatch):
    """A failed step is a 500, or an error event inside a stream, and the next answer is right."""

    def fail() -> None:
        raise ArithmeticError("logits became non-finite at token 3.")

    asked = dict(model="demo", messages=ASK, max_tokens=8)
    with monkeypatch.context() as patch:
        script(patch, engine, "some more text", gate=fail)
        with pytest.raises(openai.InternalServerError, match="non-finite"):
            client.chat.completions.create(**asked)
        with pytest.raises(openai.APIError, match="non-finite"):
            list(client.chat.completions.create(stream=True, **asked))
    assert client.chat.completions.create(**asked).choices[0].message.content == expected(engine, max_new_tokens=8)


# ------------------------------------------------------------------ leaving, waiting


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_cancelled_within_two_steps(engine, server, client, monkeypatch, stream):
    """After a client has left, at most two more tokens are decoded, the stream is closed, the next answer is right. The
    line about it says how long the prompt was."""
    steps, begun = threading.Semaphore(4), threading.Event()
    counts = server.api.metrics.counts
    cancelled = counts["cancelled_total"]

    def gate() -> None:
        begun.set()
        steps.acquire()

    with monkeypatch.context() as patch:
        made = script(patch, engine, "a b c d e f g h i j k l m n o p", gate=gate)
        answer = server.leave("/v1/chat/completions", {"messages": ASK, "stream": stream})
        assert begun.wait(20)
        answer.close()
        until(lambda: counts["cancelled_total"] > cancelled)
        before = made[0].given
        for _ in range(20):
            steps.release()
        server.idle()
    assert made[0].given <= before + 2 < len(made[0].ids) and made[0].request.ended
    prompt = next(line for line in reversed(server.lines) if line.endswith("cancelled")).partition("prompt ")[2]
    assert int(prompt.split()[0]) == len(made[0].request.prompt)
    asked = dict(model="demo", messages=ASK, max_tokens=8)
    assert client.chat.completions.create(**asked).choices[0].message.content == expected(engine, max_new_tokens=8)


def test_a_waiting_request_that_is_given_up_leaves_the_running_one_alone(engine, server, client, monkeypatch):
    """A waiting request whose client leaves gives up its place undecoded, and the running answer is complete."""
    go = threading.Event()
    made = script(monkeypatch, engine, "a b c d", gate=lambda: go.wait(20))
    stream = client.chat.completions.create(model="demo", messages=ASK, stream=True)
    first = next(iter(stream)).id
    waiting = server.leave("/v1/chat/completions", {"messages": ASK})
    until(lambda: server.api.scheduler.waiting == 1)
    waiting.close()
    until(lambda: len(server.api.scheduler.jobs) == 1)
    go.set()
    rest = list(stream)
    assert {c.id for c in rest} == {first} and rest[-1].choices[0].finish_reason == "stop"
    assert [s.given for s in made] == [len(made[0].ids), 0]
