"""The page at `/`, and the steps that a stream brings it: those of `--html`, recorded only for requests that ask."""

import base64
import hashlib
import json
import re
import threading
from functools import partial
from pathlib import Path

import pytest
from serving_kit import ASK, instruct_engine, until

from cli.steps import StepRecorder, page_data
from decoding.params import SamplingParams
from loading.options import DEMO

CHAT = "/v1/chat/completions"
STEPS = {"eaglet": {"steps": True}}
VENDOR = Path(__file__).resolve().parent.parent / "serving" / "vendor"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    # always drafts: otherwise the steps depend on how fast this machine is at the moment
    return instruct_engine(tmp_path_factory, eagle=str(DEMO / "eagle3"), eagle_always=True)


@pytest.fixture
def stream(server):
    """stream(**body) yields the objects of a streamed chat."""
    return partial(server.stream, CHAT, messages=ASK)


def joined(chunks: list[dict]) -> str:
    """The text of a streamed chat."""
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def html_data(engine, prompt: list[int], params: SamplingParams) -> dict:
    """What `--html` shows of a request, as JSON gives it."""
    until(lambda: not engine.driver._pumping)  # else the thread of an earlier request runs ahead of the recorder
    stream = engine.generate(prompt, params)
    recorder = StepRecorder(engine, stream.result)
    try:
        for _ in recorder.follow(stream):
            pass
    finally:
        engine.remove_observer(recorder)
    return json.loads(json.dumps(page_data(recorder, prompt)))


def without_times(steps: list[dict]) -> list[dict]:
    return [{name: value for name, value in step.items() if name != "ms"} for step in steps]


def test_the_page_loads_nothing_and_names_its_own_script(engine, server, monkeypatch):
    """The policy allows the page's own script and style by their hashes and its own server. The page names no other
    address, and neither its scripts nor their library make markup of a text. It learns whether the model chats."""
    answer = server.get("/")
    policy, page = answer.headers["content-security-policy"], answer.text
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert rules["connect-src"] == "'self'" and "unsafe" not in policy and "*" not in policy
    for name, rule, number in (("style", "style-src", 1), ("script", "script-src", 2)):
        inside = re.findall(f"<{name}>(.*?)</{name}>", page, re.S)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inside]
        assert rules[rule].split() == [f"'sha256-{digest}'" for digest in digests] and len(inside) == number
        assert not re.search(r"%[a-z.-]+\.(js|css)%", "".join(inside))
    library = (VENDOR / "markdown-it.min.js").read_text(encoding="utf-8")
    assert "MIT" in library[:100] and "Permission" in (VENDOR / "LICENSE").read_text() and page.count(library) == 1
    words = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "DOMParser",
             "createContextualFragment", "setHTML", "document.cookie")  # fmt: skip
    assert not [word for word in words if word in page], "what makes markup of a text, and cookies"
    own = page.replace(library, "")
    assert "html: false" in own and ".render(" not in own
    urls = set(re.findall(r"https?://[^\"')\s]+", own))
    assert urls == {"http://www.w3.org/2000/svg"}, "the name of SVG is no address that is loaded"
    markup = page.split("<script>")[0]
    assert not re.search(r"\b(src|href|style|on\w+)=", markup), "nothing is loaded or run from markup"
    assert server.get("/v1/models").json()["data"][0]["chat_template"] is True
    monkeypatch.setattr(engine.tokenizer, "chat_template_source", "")
    assert server.get("/v1/models").json()["data"][0]["chat_template"] is False


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_steps_of_a_stream_are_those_of_html(engine, stream, temperature):
    """Other steps, first text or scores than those of `--html`, and another text than without steps."""
    params = SamplingParams(temperature, seed=5, max_new_tokens=80)
    expected = html_data(engine, engine.tokenizer.encode_chat(ASK), params)
    asked = dict(temperature=temperature, seed=5, max_tokens=80)
    chunks = list(stream(**asked, **STEPS))
    steps = [step for chunk in chunks for step in chunk.get("steps", ())]
    assert without_times(steps) == without_times(expected["steps"]) and len(steps) > 5
    assert any(step["kept"][1:] for step in steps) and all(step["ms"] > 0 for step in steps)
    (first,) = [chunk for chunk in chunks if "first" in chunk]
    assert first["first"] == expected["first"] and first["scores"] == expected["scores"]
    assert first["first"] + "".join(token for step in steps for token in step["kept"]) == joined(chunks)
    assert joined(list(stream(**asked))) == joined(chunks)


def test_completions_and_several_choices_have_steps(engine, server):
    """Each choice of /v1/completions has the steps of its own seed."""
    expected = [html_data(engine, engine.tokenizer.encode("def f(x):"), SamplingParams(1.0, seed=s, max_new_tokens=12))
                for s in (3, 4)]  # fmt: skip
    asked = dict(prompt="def f(x):", n=2, seed=3, temperature=1.0, max_tokens=12)
    steps: list[list[dict]] = [[], []]
    for chunk in server.stream("/v1/completions", **asked, **STEPS):
        steps[chunk["choices"][0]["index"]] += chunk.get("steps", [])
    assert [without_times(own) for own in steps] == [without_times(data["steps"]) for data in expected]


def test_only_a_request_that_asks_is_watched(engine, server, stream, monkeypatch):
    """Only a request with `eaglet.steps` adds an observer, which is gone afterwards."""
    added: list[object] = []
    real = engine.add_observer
    monkeypatch.setattr(engine, "add_observer", lambda observer: added.append(observer) or real(observer))
    for more in ({}, {"eaglet": {}}, {"eaglet": {"steps": False}}, {"eaglet": None}):
        assert not [chunk for chunk in stream(max_tokens=6, **more) if {"steps", "first", "scores"} & set(chunk)]
    assert not added
    list(stream(max_tokens=6, **STEPS))
    server.idle()
    assert len(added) == 1 and not engine.observers


@pytest.mark.parametrize("how", ["left", "failed"])
def test_nobody_watches_after_a_request_that_did_not_end(engine, server, stream, monkeypatch, how):
    """The observer is gone after a client has left or a recorder has failed, and the next answer has no steps."""
    begun, go = threading.Event(), threading.Event()
    real = StepRecorder.nodes

    def nodes(recorder, step, own):
        begun.set()
        assert go.wait(20)
        if how == "failed":
            raise RuntimeError("no picture")
        return real(recorder, step, own)

    with monkeypatch.context() as patch:
        patch.setattr(StepRecorder, "nodes", nodes)
        chunks = stream(max_tokens=400, **STEPS)
        next(chunks)
        assert begun.wait(20) and len(engine.observers) == 1
        if how == "left":
            chunks.close()
            until(lambda: any(job.cancelled for job in server.api.scheduler.jobs))
        go.set()
        if how == "failed":
            assert list(chunks)[-1]["error"]["message"] == "decoding failed: RuntimeError: no picture"
        server.idle()
    assert not engine.observers
    assert list(stream(max_tokens=4))[-1]["timings"]["predicted_n"] == 4


def test_a_request_for_steps_that_cannot_be_is_one_line(engine, server, monkeypatch):
    """Steps without a stream, of a wrong type, on /v1/responses, or of an engine that cannot be watched, ignored."""
    error = server.refuses(CHAT, "eaglet.steps", messages=ASK, **STEPS)
    assert error["message"] == "eaglet.steps needs stream to be true"
    server.refuses(CHAT, "eaglet.steps", messages=ASK, stream=True, eaglet={"steps": 1})
    server.refuses(CHAT, "eaglet", messages=ASK, stream=True, eaglet=True)
    error = server.refuses("/v1/responses", "eaglet.steps", input="x", stream=True, **STEPS)
    assert error["code"] == "unsupported_parameter"

    def add_observer(observer):
        raise ValueError("a step compiled in one piece has no phases to time.")

    monkeypatch.setattr(engine, "add_observer", add_observer)
    error = server.refuses(CHAT, "eaglet.steps", messages=ASK, stream=True, **STEPS)
    assert error["code"] == "unsupported_parameter" and "compiled in one piece" in error["message"]
