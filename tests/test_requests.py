"""What clients send, found in public reports: each condition is built anew, and its whole kind is tried."""

import gzip
import json
import socket
import zlib
from functools import partial

import pytest
from serving_kit import ASK, httpx, instruct_engine, running

import kernels
from decoding.params import SamplingParams
from engine.prompt_cache import PromptCache
from text.template import in_turns

pytest.importorskip("llguidance", reason="grammars need llguidance")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TEXT = "def main():\n    return"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return instruct_engine(tmp_path_factory, drafter="ngram", ctx=1024, slots=2)


@pytest.fixture(scope="module")
def server(engine):
    with running(engine, version="9.8", cors_origins=("http://app.example",), max_body=4000) as server:
        yield server


@pytest.fixture
def post(server):
    return server.ask


def streamed(server, **body) -> tuple[list[dict], str]:
    """The choices of a streamed chat, and the arguments of its calls, all joined."""
    choices = [event["choices"][0] for event in server.stream(CHAT, messages=ASK, **body)]
    calls = [part["function"] for choice in choices for part in choice["delta"].get("tool_calls", [])]
    return choices, "".join(part.get("arguments", "") for part in calls)


# ------------------------------------------------------------------ tools


NOTHING = [{"name": "now"}, {"name": "now", "parameters": {"type": "object", "properties": {}}}]


@pytest.mark.parametrize("function", NOTHING, ids=["none", "empty"])
def test_a_tool_without_parameters_gets_an_empty_object(post, server, function):
    """Arguments of any keys until the limit, a half call in the content, and "" in place of "{}" in a stream."""
    asked = {"tools": [{"type": "function", "function": function}], "tool_choice": "required", "max_tokens": 60}
    choice = post(CHAT, messages=ASK, **asked)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and call["function"]["arguments"] == "{}"
    assert streamed(server, **asked)[1] == "{}"
    flat = {"type": "function", **function}
    assert post(RESPONSES, input="x", tools=[flat], tool_choice="required")["output"][0]["arguments"] == "{}"
    bare = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
    content = post(MESSAGES, messages=ASK, max_tokens=60, tools=[bare], tool_choice={"type": "any"})["content"]
    assert content[-1]["input"] == {}


def test_a_call_that_the_limit_cuts_is_a_partial_call(post, server):
    """Half a call that comes back as text, whole or in a stream."""
    schema = {"type": "object", "properties": {"text": {"type": "string", "minLength": 300}}, "required": ["text"]}
    tools = [{"type": "function", "function": {"name": "say", "parameters": schema}}]
    asked = {"tools": tools, "tool_choice": "required", "max_tokens": 40}
    choice = post(CHAT, messages=ASK, **asked)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length" and not choice["message"]["content"]
    assert call["function"]["name"] == "say" and call["function"]["arguments"].startswith('{"text":"')
    choices, arguments = streamed(server, **asked)
    assert arguments == call["function"]["arguments"]
    assert choices[-1]["finish_reason"] == "length" and not any(one["delta"].get("content") for one in choices)


# ------------------------------------------------------------------ log-probabilities of a prompt


def test_log_probabilities_of_a_prompt_are_those_of_decoding(engine):
    """Another value than that with which the same token was decoded, also behind several chunks and beside another
    request; a first token that has one; a text that is reused, and so has fewer; caches of others that are lost."""
    engine.keep_prompts(PromptCache(64))
    prompt = engine.tokenizer.encode(TEXT * 60)
    (decoded,) = engine.generate(prompt, SamplingParams(max_new_tokens=20, logprobs=3)).run()
    text = prompt + decoded.token_ids
    chat = engine.tokenizer.encode("class A:\n" * 30)
    for new in (0, 4):
        engine.generate(chat, SamplingParams(max_new_tokens=2)).run()
        asked = [SamplingParams(max_new_tokens=new, prompt_logprobs=3), SamplingParams(max_new_tokens=9)]
        scored, beside = engine.generate_batch([text, chat[:50]], asked).run()
        found = scored.prompt_logprobs[len(prompt) :]
        assert [one.logprob for one in found] == pytest.approx([one.logprob for one in decoded.logprobs], abs=1e-4)
        assert scored.prompt_logprobs[0] is None and (kernels.cpu_problem() or found == decoded.logprobs)
        assert len(scored.prompt_logprobs) == len(text) and not scored.cached_tokens
        assert (scored.new_tokens, scored.stop_reason) == (new, "length") and not beside.prompt_logprobs
        assert beside.token_ids == engine.generate(chat[:50], asked[1]).run()[0].token_ids
        assert json.loads(json.dumps(scored.to_dict()))["prompt_logprobs"][1]["logprob"] < 0
        for _ in range(3):
            engine.generate(text, asked[0]).run()
        assert engine.generate(chat + [5], SamplingParams(max_new_tokens=1)).run()[0].cached_tokens >= len(chat) - 1


def test_echo_with_log_probabilities(post, server, engine):
    """lm-evaluation-harness's request: a column that does not start with the prompt's first token, a continuation whose
    sum is another one than the engine's, another answer in a stream, a new token where none is asked for, and two parts
    of characters under the name U+FFFD, of which the likelier one is lost from top_logprobs."""
    ids = engine.tokenizer.encode(TEXT)
    asked = {"prompt": [ids, ids[:4]], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
    whole = post(COMPLETIONS, **asked)
    (result,) = engine.generate(ids, SamplingParams(max_new_tokens=1, prompt_logprobs=1, logprobs=1)).run()
    columns = whole["choices"][0]["logprobs"]
    assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None and len(columns["tokens"]) == len(ids) + 1
    expected = [entry.logprob for entry in result.prompt_logprobs[1:] + result.logprobs]
    assert columns["token_logprobs"][1:] == pytest.approx(expected)
    for entry, top, logprob in zip(result.prompt_logprobs[1:], columns["top_logprobs"][1:], expected, strict=False):
        assert max(top.values()) == pytest.approx(entry.top[0][1]) and logprob in top.values()
    assert whole["choices"][0]["text"].startswith(TEXT) and len(whole["choices"][1]["logprobs"]["tokens"]) == 5
    tokens, text = [], ""
    for event in server.stream(COMPLETIONS, **asked | {"prompt": ids}):
        choice = event["choices"][0]
        tokens += choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
        text += choice["text"]
    assert tokens == columns["token_logprobs"] and text == whole["choices"][0]["text"]
    nothing = post(COMPLETIONS, **asked | {"max_tokens": 0, "prompt": TEXT})
    assert nothing["choices"][0]["text"] == TEXT and nothing["usage"]["completion_tokens"] == 0
    assert nothing["choices"][0]["logprobs"]["token_logprobs"] == columns["token_logprobs"][:-1]
    assert post(COMPLETIONS, prompt=TEXT, max_tokens=0)["choices"][0] == {
        "index": 0, "text": "", "logprobs": None, "finish_reason": "length"}  # fmt: skip
    (event,) = server.stream(COMPLETIONS, prompt=TEXT, max_tokens=0)
    assert event["choices"][0]["finish_reason"] == "length"
    full = post(COMPLETIONS, prompt=[[5] * 1024], max_tokens=0, echo=True, logprobs=0)
    assert len(full["choices"][0]["logprobs"]["tokens"]) == 1024
    post(COMPLETIONS, 400, prompt=[[5] * 1024], max_tokens=1)
    tokens = post(COMPLETIONS, prompt="日本", max_tokens=0, echo=True, logprobs=20)["choices"][0]["logprobs"]
    assert any(name.startswith("bytes:\\x") for name in tokens["tokens"]), tokens["tokens"]
    assert all(len(top) in (20, 21) for top in tokens["top_logprobs"][1:])


def test_prompt_logprobs_as_vllm_has_them(post, engine):
    """A list without an entry for the first token, without the token itself, or in another place than vLLM's."""
    ids = engine.tokenizer.encode(TEXT)
    listed = post(COMPLETIONS, prompt=ids, max_tokens=1, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    assert listed[0] is None and len(listed) == len(ids)
    for token, entry in zip(ids[1:], listed[1:], strict=True):
        assert str(token) in entry and {"logprob", "rank", "decoded_token"} == set(entry[str(token)])
        assert sorted(rank for each in entry.values() if (rank := each["rank"])) == [1, 2]
    chat = post(CHAT, messages=ASK, max_tokens=1, prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == len(engine.tokenizer.encode_chat(ASK))


def test_tasks_of_lm_evaluation_harness(server, engine):
    """Its own client and its own encoding: a sum over other tokens than the continuation, a greedy one that is not, a
    text in windows that are refused, and one that goes on behind a stop string."""
    models = pytest.importorskip("lm_eval.models.openai_completions", reason="pip install lm-eval[api]")
    from lm_eval.api.instance import Instance

    model = models.LocalCompletionsAPI(base_url=server.address + COMPLETIONS, model="any", max_length=128)
    asked = partial(Instance, doc={}, idx=0)
    before, after = model._encode_pair("def main():\n", "    return")
    assert before + after == engine.tokenizer.encode("def main():\n    return", add_bos=False)
    (result,) = engine.generate(before + after, SamplingParams(max_new_tokens=0, prompt_logprobs=1)).run()
    (greedy,) = engine.generate(before, SamplingParams(max_new_tokens=3)).run()
    pairs = [(None, before, rest) for rest in (after, greedy.token_ids, [7, 7])]
    (likelihood, _), *follows = model._loglikelihood_tokens(pairs)
    assert likelihood == pytest.approx(sum(entry.logprob for entry in result.prompt_logprobs[len(before) :]), abs=1e-4)
    assert [is_greedy for _, is_greedy in follows] == [True, False]
    (rolling,) = model.loglikelihood_rolling([asked("loglikelihood_rolling", arguments=("def f(x): " * 60,))])
    assert rolling < 0
    given = {"until": ["\n"], "max_gen_toks": 30, "do_sample": False}
    (text,) = model.generate_until([asked("generate_until", arguments=("def main():\n    return x", given))])
    assert "\n" not in text


# ------------------------------------------------------------------ paths, methods and bodies


def test_paths_and_methods(server):
    """A base URL without /v1, with a slash at its end, or with /v1 twice; a path that opens what needs a key."""
    get = server.get
    for path in ("/models", "/v1/models/", "//v1//models", "/v1/v1/models", "/models/demo", "/v1/models/demo/"):
        assert get(path).json()["object"] in ("list", "model"), path
    for path in ("/health", "/v1/health", "/health/", "/version", "/v1/version", "/v1/metrics", "/v1/props", "/v1/"):
        assert get(path).status_code == (404 if path == "/v1/" else 200), path
    assert get("/version").json() == {"version": "9.8"}
    for path in ("/completions", "/v1/completions/", "/v1/v1/completions"):
        assert server.ask(path, prompt="x", max_tokens=1)["object"] == "text_completion", path
    server.ask("/chat/completions", messages=ASK, max_tokens=1)
    server.ask("/responses", input="x", max_output_tokens=1)
    server.ask("/embeddings", input="x")
    metrics = get("/metrics").text
    assert 'path="/v1/completions"' in metrics and 'path="/completions' not in metrics
    assert get("/chat").status_code == get("/v1/chat/completion").status_code == 404
    # a HEAD or OPTIONS that is an error, a preflight of a browser's client that forbids its own headers
    head = httpx.head(f"{server.address}/v1/models")
    assert (head.status_code, head.content) == (200, b"") and httpx.head(server.address).status_code == 200
    told = httpx.options(server.address + CHAT)
    assert (told.status_code, told.headers["allow"]) == (204, "POST")
    site = {"origin": "http://app.example", "access-control-request-headers": "authorization,x-stainless-os"}
    asked = httpx.options(server.address + CHAT, headers=site | {"access-control-request-private-network": "true"})
    assert asked.status_code == 204 and asked.headers["access-control-allow-private-network"] == "true"
    assert asked.headers["access-control-allow-headers"] == site["access-control-request-headers"]
    assert httpx.options(server.address + CHAT, headers=site | {"origin": "http://other"}).status_code == 403


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


def test_bodies(server):
    """A body that is packed and read as text; one that unpacks to more than the limit, and fills memory; a damaged one,
    one that goes on behind its end, and a coding that no decoder is there for."""
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()

    def send(data: bytes, coding: str):
        return httpx.post(server.address + COMPLETIONS, content=data, headers={"content-encoding": coding})

    packers = {"gzip": gzip.compress, "GZIP": gzip.compress, "x-gzip": gzip.compress, "deflate": zlib.compress}
    for coding, pack in {**packers, "identity": bytes}.items():
        assert send(pack(body), coding).status_code == 200, coding
    assert send(raw_deflate(body), "deflate").status_code == 200
    assert send(gzip.compress(b" " * 10**8), "gzip").json()["error"]["code"] == "request_too_large"
    assert send(raw_deflate(b" " * 10**7), "deflate").status_code == 413
    for data in (gzip.compress(body)[:-6], body, gzip.compress(body) + b"x", b""):
        answer = send(data, "gzip")
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_encoding"
    for coding in ("br", "zstd", "gzip, gzip"):
        answer = send(body, coding)
        assert answer.status_code == 415 and coding in answer.json()["error"]["message"]
    # a client that sends its body only when it is told to, and a body in chunks
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    with socket.create_connection(server.socket.getsockname()[:2], timeout=30) as link:
        link.sendall(f"{head}Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        assert link.recv(1000).startswith(b"HTTP/1.1 100")
        link.sendall(body)
        assert link.makefile("rb").read().startswith(b"HTTP/1.1 200")
    parts = (body[i : i + 9] for i in range(0, len(body), 9))
    assert httpx.post(server.address + COMPLETIONS, content=parts).status_code == 200


# ------------------------------------------------------------------ what other servers take


def test_numbers_as_clients_write_them(post, engine):
    """-1 for no limit and for any seed, 0 for the likeliest token, integers with a point: errors, or another meaning."""
    prompt = engine.tokenizer.encode(TEXT)
    (free,) = engine.generate(prompt, SamplingParams(max_new_tokens=40)).run()
    ask = partial(post, COMPLETIONS, prompt=TEXT)
    for name in ("max_tokens", "n_predict"):
        answer = ask(prompt=[5] * 1000, **{name: -1})
        assert answer["usage"]["completion_tokens"] == engine.ctx - 1000
    assert ask(max_tokens=40.0)["choices"][0]["text"] == free.text
    assert ask(max_tokens=40, temperature=1.5, top_p=0, seed=3)["choices"][0]["text"] == free.text
    drawn = {ask(max_tokens=20, temperature=1.5, seed=-1)["choices"][0]["text"] for _ in range(4)}
    assert len(drawn) > 1
    assert ask(400, max_tokens=1.5)["error"]["param"] == "max_tokens"


F = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
TOOL = {"type": "function", "function": F}
CALLED = [{"role": "user", "content": "x"}, {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}]
CUSTOM = {"type": "custom", "name": "patch", "format": {"type": "text"}}
SPACE = {"type": "namespace", "name": "mcp", "tools": [{"type": "function", **F}]}
UNSEEN = "(an image, which this model cannot see)"
REFUSAL = {"type": "refusal", "refusal": "no"}
CLAUDE = {"type": "web_search_20250305", "name": "web_search"}


def result_of(content: object) -> dict:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": content}]}


# what a client sends -> the path, the body, and the body that it must be the same as
SAME = {
    "a tool without a type": (CHAT, {"messages": ASK, "tools": [{"function": F}]}, {"messages": ASK, "tools": [TOOL]}),
    "a flat tool": (CHAT, {"messages": ASK, "tools": [{"type": "function", **F}]}, {"messages": ASK, "tools": [TOOL]}),
    "a nested tool": (RESPONSES, {"input": "x", "tools": [TOOL]}, {"input": "x", "tools": [{"type": "function", **F}]}),
    "tool_choice as an object": (CHAT, {"messages": ASK, "tools": [TOOL], "tool_choice": {"type": "none"}},
                                 {"messages": ASK, "tools": [TOOL], "tool_choice": "none"}),
    "tools of OpenAI's server": (RESPONSES, {"input": "x", "tools": [{"type": "web_search"}, CUSTOM]}, {"input": "x"}),
    "a tool of Anthropic's server": (MESSAGES, {"messages": ASK, "tools": [CLAUDE]}, {"messages": ASK}),
    "a result in parts": (RESPONSES, {"input": [*CALLED, {"type": "function_call_output", "call_id": "c", "output":
                          [{"type": "input_text", "text": "2"}]}]},
                          {"input": [*CALLED, {"type": "function_call_output", "call_id": "c", "output": "2"}]}),
    "an image of a tool": (RESPONSES, {"input": [*CALLED, {"type": "function_call_output", "call_id": "c", "output":
                           [{"type": "input_image", "image_url": "x"}]}]},
                           {"input": [*CALLED, {"type": "function_call_output", "call_id": "c", "output": UNSEEN}]}),
    "an image of a tool of Claude's": (MESSAGES, {"messages": [*ASK, result_of([{"type": "image", "source": {}}])]},
                                       {"messages": [*ASK, result_of(UNSEEN)]}),
    "an image of a tool in a chat": (CHAT, {"messages": [*ASK, {"role": "tool", "content": [{"type": "image_url"}]}]},
                                     {"messages": [*ASK, {"role": "tool", "content": UNSEEN}]}),
    "a call of a custom tool": (RESPONSES, {"input": [{"type": "web_search_call"}, CALLED[0], {"type": "custom_tool_call",
                                "name": "patch", "input": "x"}, {"type": "custom_tool_call_output", "output": "2"}]},
                                {"input": [CALLED[0], {"type": "function_call", "name": "patch", "arguments":
                                 '{"input": "x"}'}, {"type": "function_call_output", "output": "2"}]}),
    "a namespace": (RESPONSES, {"input": [CALLED[0], CALLED[1] | {"namespace": "mcp"}], "tools": [SPACE]},
                    {"input": [CALLED[0], CALLED[1] | {"name": "mcp__add"}],
                     "tools": [{"type": "function", **F, "name": "mcp__add"}]}),
    "a format of nothing": (RESPONSES, {"input": "x", "text": {}}, {"input": "x"}),
    "stream_options alone": (CHAT, {"messages": ASK, "stream_options": {"include_usage": True}}, {"messages": ASK}),
    "a refusal": (CHAT, {"messages": [*ASK, {"role": "assistant", "content": [REFUSAL]}, *ASK]},
                  {"messages": [*ASK, {"role": "assistant", "content": "no"}, *ASK]}),
    "the role function": (CHAT, {"messages": [*ASK, {"role": "function", "name": "add", "content": "2"}]},
                          {"messages": [*ASK, {"role": "tool", "name": "add", "content": "2"}]}),
    "an answer of null": (CHAT, {"messages": [*ASK, {"role": "assistant", "content": None}, *ASK]},
                          {"messages": [*ASK, {"role": "assistant", "content": ""}, *ASK]}),
}  # fmt: skip


def said(answer: dict) -> object:
    """The part of an answer that depends on nothing but the prompt and the settings."""
    usage = answer["usage"]
    tokens = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0) if "input_tokens" in usage else None
    return [usage.get("prompt_tokens", tokens), answer.get("choices"), answer.get("content")]


@pytest.mark.parametrize("name", SAME)
def test_requests_in_other_words(post, server, name):
    """A spelling that a client uses and that is refused, or that means something else here."""
    path, sent, same = SAME[name]
    limit = {"max_output_tokens" if path == RESPONSES else "max_tokens": 4}
    assert said(post(path, **sent, **limit)) == said(post(path, **same, **limit))
    if "server" in name:
        asked = httpx.post(server.address + path, json=sent | limit)
        kinds = [f"tools of type {tool['type']!r}" for tool in sent["tools"]]
        assert asked.headers["x-ignored"] == ", ".join(kinds)


def test_what_is_not_enforced_is_told(post, server):
    """A keyword that is dropped silently: it stands in a header, in the figures, and in the server's line."""
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 3}
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    asked = {"messages": ASK, "max_tokens": 20, **form}
    whole = httpx.post(server.address + CHAT, json=asked)
    assert whole.headers["x-ignored"] == "JSON schema: uniqueItems" and whole.json()["timings"]["ignored"]
    stream = httpx.post(server.address + CHAT, json=asked | {"stream": True})
    assert stream.headers["x-ignored"] == "JSON schema: uniqueItems"
    server.idle()
    assert "ignored: JSON schema: uniqueItems" in server.lines[-1]
    seen = {"role": "tool", "content": [{"type": "image_url"}] * 2}
    told = httpx.post(server.address + CHAT, json={"messages": [*ASK, seen], "max_tokens": 1}).headers["x-ignored"]
    assert told == "images that tools returned"
    assert "x-ignored" not in httpx.post(server.address + CHAT, json={"messages": ASK, "max_tokens": 1}).headers
    called = post(CHAT, messages=ASK, tools=[{"function": {"name": "f", "parameters": {"type": "object", "properties":
                  {"a": schema}, "required": ["a"]}}}], tool_choice="required", max_tokens=60)  # fmt: skip
    assert called["timings"]["ignored"] == ["JSON schema: uniqueItems"]
    anything = {"type": "json_schema", "json_schema": {"name": "x", "schema": True}}
    content = post(CHAT, messages=ASK, max_tokens=4, response_format=anything)["choices"][0]["message"]["content"]
    assert content[0] in '"[{-0123456789tfn'


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') if not loop.first or NOSYSTEM }}"
    "[S]{{ m.content }}{% else %}{{ raise_exception('must alternate') if (m.role == 'user') != (turns.n % 2 == 0) }}"
    "{% set turns.n = turns.n + 1 %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
ORDERS = ("U", "SU", "UU", "SUU", "AU", "SAU", "UASU", "US", "SSU", "UAAU", "UAUUAU")


@pytest.mark.parametrize("system", [True, False], ids=["system", "no system"])
def test_templates_that_want_turns_get_them(engine, server, post, monkeypatch, system):
    """Two messages of the user, an answer first, or a late system message with a template of Mistral's, Gemma's or
    Qwen3.5's: a 400 for every client that lets its user send twice. No text may be lost."""
    source = "{% set turns = namespace(n=0) %}" + STRICT.replace("NOSYSTEM", "false" if system else "true")
    monkeypatch.setitem(engine.tokenizer.chat_templates, "default", source)
    roles = {"U": "user", "A": "assistant", "S": "system"}
    for order in ORDERS:
        messages = [{"role": roles[who], "content": f"text {i}"} for i, who in enumerate(order)]
        prompt = post("/apply-template", messages=messages)["prompt"]
        assert all(message["content"] in prompt for message in messages), order
        if order in ("U", "UAU"):
            assert prompt.endswith("".join(f"[{m['role']}]{m['content']}" for m in messages))
    silent = "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.content }}{% endif %}{% endfor %}"
    monkeypatch.setitem(engine.tokenizer.chat_templates, "default", silent)
    late = [*ASK, {"role": "assistant", "content": "a"}, {"role": "system", "content": "be brief"}, *ASK]
    assert "be brief\n\ndef f(x):" in post("/apply-template", messages=late)["prompt"]
    monkeypatch.setitem(engine.tokenizer.chat_templates, "default", "{{ raise_exception('never') }}")
    assert "never" in post("/apply-template", 400, messages=ASK)["error"]["message"]
    # Mistral's templates count calls and results as no turn, so that the user comes twice.
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    messages = [*ASK, call, {"role": "tool", "content": "2"}, *ASK]
    assert [m["role"] for m in in_turns(messages, True)] == ["user", "assistant", "tool", "assistant", "user"]
    several = [*ASK, call, {"role": "tool", "content": "2"}, {"role": "tool", "content": "3"}, call]
    assert in_turns(several, False) == several
