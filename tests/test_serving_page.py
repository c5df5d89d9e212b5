"""The page at `/`, and the steps that a stream has for it."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import pytest

pytest.importorskip("starlette", reason="the server needs starlette (requirements-dev.txt)")
pytest.importorskip("uvicorn", reason="the server needs uvicorn (requirements-dev.txt)")
httpx = pytest.importorskip("httpx")

from serving_kit import instruct_folder, running, until  # noqa: E402

from generate import load  # noqa: E402
from options import DEMO  # noqa: E402
from report.viewer import StepRecorder  # noqa: E402
from sampling import SamplingParams  # noqa: E402
from serving.page import HERE  # noqa: E402

ASK = [{"role": "user", "content": "def f(x):"}]
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = instruct_folder(tmp_path_factory.mktemp("instruct"))
    return load(folder, eagle=str(DEMO / "eagle3"), tree="paper25", device="cpu", threads=1, eagle_always=True)


@pytest.fixture(scope="module")
def server(engine):
    with running(engine) as server:
        yield server


def chunks(server, **asked) -> list[dict]:
    """The chunks of a streamed answer."""
    body = {"messages": ASK, "max_tokens": 40, "stream": True, "temperature": 0, "seed": 3} | asked
    lines = httpx.post(server.address + PATH, json=body, timeout=30).raise_for_status().text.split("\n\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_the_page_runs_its_own_script_and_reaches_nobody_else(server):
    """A page that a browser refuses to run, that loads something from elsewhere, or that runs what a model wrote."""
    answer = httpx.get(server.address + "/")
    policy = answer.headers["content-security-policy"]
    assert answer.status_code == 200 and "default-src 'none'" in policy and "unsafe" not in policy
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        known = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{known}'" in policy
    outside = [url for url in re.findall(r"https?://[^\s\"'<]*", answer.text) if "www.w3.org/2000/svg" not in url]
    assert not outside and not re.search(r"%[\w.]+%|\bon\w+=|style=", answer.text)
    for file in HERE.glob("page.*"):
        assert not re.search("innerHTML|outerHTML|insertAdjacent|document.write|eval", file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("temperature", (0, 1))
def test_the_steps_of_a_stream_are_those_of_the_html_page(server, engine, temperature):
    """A page with other trees, tokens or depths than `--html` has for the same request."""
    found = chunks(server, eaglet={"steps": True}, temperature=temperature)
    steps = [step for chunk in found for step in chunk.get("steps", ())]
    server.idle()
    recorder = StepRecorder(engine)
    try:
        params = SamplingParams(temperature=temperature, seed=3, max_new_tokens=40)
        stream = engine.generate(engine.tokenizer.encode_chat(ASK), params)
        list(recorder.follow(stream, stream.result))
    finally:
        engine.remove_observer(recorder)
    views = [view.to_dict() for view in recorder.views]
    assert len(steps) > 4 and [s | {"ms": 0} for s in steps] == [v | {"ms": 0} for v in views]
    first = next(chunk["first"] for chunk in found if "first" in chunk)
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in found if chunk["choices"])
    assert first + "".join(t for step in steps for t in step["kept"]) == text == stream.result.text


def test_only_who_asks_for_steps_makes_the_engine_wait(server, engine, monkeypatch):
    """An observer that stays after its request or comes without being asked for: then no step runs ahead any more."""
    seen = []
    real = engine._observe
    monkeypatch.setattr(engine, "_observe", lambda output: seen.append(len(engine.observers)) or real(output))
    assert not any("steps" in chunk for chunk in chunks(server)) and set(seen) == {0}
    seen.clear()
    body = {"messages": ASK, "stream": True, "eaglet": {"steps": True}}
    with httpx.stream("POST", server.address + PATH, json=body, timeout=30) as answer:
        next(line for line in answer.iter_lines() if '"steps":[{' in line.replace(" ", ""))
        assert set(seen) == {1}
    until(lambda: not engine.observers)
    server.idle()
    for bad in ({"eaglet": 5}, {"eaglet": {"steps": "yes"}}, {"eaglet": {"steps": True}, "stream": False}):
        answer = httpx.post(server.address + PATH, json={"messages": ASK, "stream": True, "max_tokens": 4} | bad)
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("eaglet")
