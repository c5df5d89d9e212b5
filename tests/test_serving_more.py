"""The server's endpoints beside chats and completions, who may use it, and what happens when the context is full."""

import base64
import threading
from functools import partial

import pytest
import torch
from serving_kit import ASK, httpx, instruct_engine, running, script, text_of

from scripts import serve

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return instruct_engine(tmp_path_factory, drafter="ngram", ctx=512)


def test_ids_texts_and_facts(engine, server):
    """Ids that are not the engine's own, a control token that a user's text can write, a text that does not come back."""
    text = "def f(x): \u00e4</s>"
    ids = engine.tokenizer.encode(text, add_bos=False)
    tokenize = partial(server.ask, "/tokenize")
    assert tokenize(content=text) == {"tokens": ids, "count": len(ids), "max_model_len": 512}
    assert tokenize(content=text, add_special=True)["tokens"] == engine.tokenizer.encode(text)
    pieces = tokenize(content=text, with_pieces=True)["tokens"]
    assert [token["id"] for token in pieces] == ids and not set(ids) & engine.tokenizer.special_ids
    back = server.ask("/detokenize", tokens=ids)
    assert back["content"].strip() == text and back["prompt"]
    assert tokenize(prompt="x</s>", add_special_tokens=False)["tokens"][-1] == engine.tokenizer.eos_ids[0]
    assert tokenize(messages=ASK)["tokens"] == engine.tokenizer.encode_chat(ASK)
    facts = server.get("/tokenizer_info").json()
    assert (facts["bos_token"], facts["eos_token"]) == ("<s>", "</s>") and "<tool_call>" in facts["chat_template"]
    server.refuses("/tokenize", "parse_special", content=text, parse_special=True)
    server.refuses("/tokenize", "content", content="x" * 20_000)
    server.refuses("/tokenize", "content")
    server.refuses("/detokenize", "tokens", tokens=["a"])
    # a prompt other than that of /v1/chat/completions, and a context that clients cannot learn
    assert server.ask("/apply-template", messages=ASK)["prompt"].endswith("<user>def f(x):<assistant>")
    facts = server.get("/props").json()
    assert facts["default_generation_settings"]["n_ctx"] == 512 and "<tool_call>" in facts["chat_template"]
    assert facts["total_slots"] == 1
    server.refuses("/apply-template", "messages", messages=[])


def test_a_last_message_of_the_assistant_is_continued(engine, server):
    """An answer that begins anew behind what the client wrote for the model, or that repeats it."""
    begun = [*ASK, {"role": "assistant", "content": "    return x"}]
    ids = engine.tokenizer.encode_chat(ASK) + engine.tokenizer.encode("    return x", continuation=True)
    answer = server.ask(CHAT, messages=begun, max_tokens=8, continue_final_message=True)
    assert answer["choices"][0]["message"]["content"] == text_of(engine, ids, max_new_tokens=8)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    for name, value in (("continue_final_message", False), ("add_generation_prompt", True)):
        server.refuses(CHAT, name, messages=begun, **{name: value})


def test_embeddings_are_the_mean_of_the_last_hidden_states(engine, server):
    """A vector that depends on the batch or on padding, whose length is not 1, or that spoils a chat's caches."""
    texts = ["def main():\n", "import os\n" * 150]
    before = server.ask("/v1/completions", prompt=texts[0])["choices"]
    embed = partial(server.ask, "/v1/embeddings")
    body = embed(input=texts)
    vectors = [torch.tensor(entry["embedding"]) for entry in body["data"]]
    assert [entry["index"] for entry in body["data"]] == [0, 1] and body["usage"]["prompt_tokens"] > 256
    for text, vector in zip(texts, vectors, strict=True):
        ids = engine.tokenizer.encode(text)
        with torch.inference_mode():
            hidden = engine.model.forward_train(torch.tensor([ids]))[0][0].float().mean(0)
        assert abs(float(vector.norm()) - 1) < 1e-5
        assert float(torch.nn.functional.cosine_similarity(vector, hidden, dim=0)) > 0.999
    coded = embed(input=texts[0], encoding_format="base64")["data"][0]["embedding"]
    alone = torch.frombuffer(bytearray(base64.b64decode(coded)), dtype=torch.float32)
    assert torch.equal(alone, vectors[0])
    assert server.ask("/v1/completions", prompt=texts[0])["choices"] == before
    for wrong in ([], [[99999]], [""] * 257):
        server.refuses("/v1/embeddings", "input", input=wrong)
    server.refuses("/v1/embeddings", "dimensions", input="x", dimensions=3)
    server.refuses("/v1/embeddings", "encoding_format", input="x", encoding_format="text")


@pytest.fixture
def claude(server):
    anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed (pip install anthropic)")
    with anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0) as client:
        yield client


TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}},
        "required": ["a"], "additionalProperties": False}}  # fmt: skip
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def test_messages_give_the_engines_own_answer(engine, claude):
    """Anthropic's client: another text than the engine's, in a stream or whole, a wrong reason to stop, a wrong count."""
    system = {"role": "system", "content": "Be brief."}
    prompt = engine.tokenizer.encode_chat([system, *ASK])
    text = text_of(engine, prompt, max_new_tokens=12)
    asked = dict(model="demo", max_tokens=12, messages=ASK, system="Be brief.")
    whole = claude.messages.create(**asked)
    assert whole.content[0].text == text and whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 12
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens == len(prompt)
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == text
        final = stream.get_final_message()
    assert final.content[0].text == text and final.stop_reason == "max_tokens" and final.usage.output_tokens == 12
    stop = text[4:7]
    ended = claude.messages.create(**asked, stop_sequences=["never", stop])
    assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", stop)
    counted = claude.messages.count_tokens(model="demo", messages=ASK, system=[{"type": "text", "text": "Be brief."}])
    assert counted.input_tokens == len(prompt)


def test_messages_with_tools(engine, claude, monkeypatch):
    """Calls that are lost between blocks, results that the template never sees, and a forced call that is none."""
    pytest.importorskip("llguidance")
    asked = dict(model="demo", max_tokens=60, messages=ASK, tools=[TOOL])
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
        (block,) = claude.messages.create(**asked, tool_choice=choice).content
        assert block.type == "tool_use" and list(block.input) == ["a"]
    blocks = [{"type": "text", "text": "Well."}, {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "42"}]}
    turns = [*ASK, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    with monkeypatch.context() as patch:
        made = script(patch, engine, f"Let me see.\n{CALL}\n{CALL}")
        whole = claude.messages.create(**asked | {"messages": turns})
        with claude.messages.stream(**asked | {"messages": turns}) as stream:
            final = stream.get_final_message()
        assert made[0].result.prompt_tokens == made[1].result.prompt_tokens > 60
    for answer in (whole, final):
        assert [block.type for block in answer.content] == ["text", "tool_use", "tool_use"]
        assert answer.content[1].input == {"a": 1} and answer.stop_reason == "tool_use"
    assert whole.content[0].text == final.content[0].text
    begun, named = CALL[: CALL.index("1")], threading.Event()
    tokens = len(engine.tokenizer.encode(begun, add_bos=False))
    with monkeypatch.context() as patch:
        made = script(patch, engine, f"{CALL} Done.", gate=lambda: made[0].given < tokens or named.wait(20))
        with claude.messages.stream(**asked) as stream:
            for event in stream:
                if event.type == "content_block_start":
                    named.set()
            final = stream.get_final_message()
    assert (final.content[0].input, final.content[1].text) == ({"a": 1}, "Done.")


def test_bad_messages_are_errors_of_anthropics_form(claude, server):
    """An error that Anthropic's client cannot read, or that names no field."""
    import anthropic

    image = [{"type": "image", "source": {}}]
    for more, param in (
        ({"messages": [{"role": "user", "content": image}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"thinking": {"type": "x"}}, "thinking.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x " * 1000}]}, "messages"),
    ):
        with pytest.raises(anthropic.BadRequestError) as caught:
            claude.post("/v1/messages", body={"max_tokens": 4, "messages": ASK} | more, cast_to=object)
        body = caught.value.body
        assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
        assert body["error"]["param"] == param, body
    assert claude.models.list().data[0].id == "demo"


def test_listed_sites_and_names_may_use_the_server(engine):
    """A listed site whose page gets no answer, a container's name that is refused, a page that needs no key."""
    site = "https://app.example"
    with running(engine, cors_origins=(site,), allowed_hosts=("box",)) as server:
        get = partial(server.get, "/v1/models")
        answer = get(origin=site, host="box:8000")
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == site
        assert get(origin="https://other.example").status_code == get(host="other:8000").status_code == 403
        assert "access-control-allow-origin" not in get().headers
    with running(engine, api_keys=("a", "b"), cors_origins=("*",)) as server:
        assert server.get("/v1/models", origin=site).status_code == 401
        assert httpx.options(f"{server.address}/v1/models", headers={"origin": site}).status_code == 204
    args = serve.build_parser().parse_args("--api-key a --api-key b --cors-origin * --allowed-host box".split())
    made = serve.settings_of(args)
    assert made.api_keys == ("a", "b") and made.cors_origins == ("*",) and made.allowed_hosts == ("box",)


def test_the_oldest_turns_are_dropped_when_the_context_is_full(engine, server):
    """A dead end, a chat that loses its system message or its last question, and turns that vanish without a word."""
    long = {"role": "user", "content": "word " * 60}
    reply = {"role": "assistant", "content": "yes " * 60}
    system = {"role": "system", "content": "Be brief."}
    turns = [system, *[long, reply] * 6, *ASK]
    server.refuses(CHAT, "messages", messages=turns, max_tokens=8)
    with running(engine, drop_oldest=True) as dropping:
        answer = dropping.ask(CHAT, messages=turns, max_tokens=8)
        dropped = answer["timings"]["dropped_messages"]
        kept = [system, *turns[1 + dropped :]]
        assert dropped % 2 == 0 and dropped > 0 and len(kept) > 2
        ids = engine.tokenizer.encode_chat(kept)
        assert answer["usage"]["prompt_tokens"] == len(ids) <= 512 - 8
        assert len(engine.tokenizer.encode_chat([system, *turns[dropped - 1 :]])) > 512 - 8, "more would have fitted"
        assert answer["choices"][0]["message"]["content"] == text_of(engine, ids, max_new_tokens=8)
        assert "dropped_messages" not in dropping.ask(CHAT, messages=ASK, max_tokens=8)["timings"]
        dropping.refuses(CHAT, "messages", messages=[{"role": "user", "content": "x " * 600}])
    asked = dict(input=turns[1:], max_output_tokens=8)
    answer = server.ask("/v1/responses", **asked, truncation="auto")
    assert answer["timings"]["dropped_messages"] == dropped and answer["truncation"] == "auto"
    server.refuses("/v1/responses", "input", **asked)
    server.refuses("/v1/responses", "truncation", input="x", truncation="some")
