"""The server under load and with bad clients: what each of them gets, and that the next request is right."""

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from serving_kit import Running, httpx, instruct_engine, running, script, text_of, until

from decoding.params import SamplingParams
from engine.prompt_cache import PromptCache
from kernels import PackedWeight
from loading.options import DEMO
from scripts import serve
from serving import scheduler
from serving.requests import Ask
from serving.scheduler import Job, ServeSettings
from serving.server import is_loopback, prompt_folder
from support.machine import resident_memory

ROOT = Path(__file__).resolve().parent.parent
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return instruct_engine(tmp_path_factory, eagle=str(DEMO / "eagle3"), tree="chain:2")


@pytest.fixture(scope="module")
def small(engine):
    """A server with small limits."""
    with running(engine, max_queue=1, max_body=4096, max_tokens=64) as server:
        yield server


def right(engine, server: Running, **headers: str) -> None:
    """Check that a request is answered as the engine alone answers it."""
    asked = {"prompt": "def f(x):\n", "max_tokens": 8}
    answer = httpx.post(server.address + PATH, json=asked, headers=headers)
    text = text_of(engine, "def f(x):\n", max_new_tokens=8)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == text


def refused(answer, status: int, code: str) -> dict:
    """The error object of an answer, which must have this status and code."""
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), answer.text
    assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]
    return error


# ------------------------------------------------------------------ load


def test_96_requests_of_16_clients_of_which_a_third_are_cut_off(engine):
    """Every client that stays gets the text of its own request, no job stays in memory, and memory does not grow."""
    prompts = [f"def f{i}(x):\n" for i in range(8)]
    params = [dict(temperature=i % 3 / 2, seed=i) for i in range(8)]
    texts = [text_of(engine, prompts[i], max_new_tokens=6, **params[i]) for i in range(8)]
    engine.keep_prompts(PromptCache(1))

    def ask(i: int) -> str:
        body = {"prompt": prompts[i % 8], "max_tokens": 6} | params[i % 8]
        if i % 3 == 0:  # leaves as soon as it has sent its request, or after the first piece
            with httpx.stream("POST", server.address + PATH, json=body | {"stream": True}) as answer:
                if i % 2:
                    next(answer.iter_bytes())
            return ""
        answers = [server.ask(PATH, **body)] if i % 2 else server.stream(PATH, **body)
        return "".join(answer["choices"][0]["text"] for answer in answers)

    def left() -> int:
        gc.collect()
        return sum(type(item) is Job for item in gc.get_objects())

    with running(engine, max_queue=16) as server, ThreadPoolExecutor(16) as clients:
        answers = list(clients.map(ask, range(40)))
        before = resident_memory()
        answers += clients.map(ask, range(40, 96))
        server.idle()
        assert before is None or resident_memory() - before < 24 << 20
        until(lambda: left() == 0)
        status = server.api.metrics.requests
        assert status[PATH, 200] == 96 and engine.prompt_cache.held_bytes <= 1 << 20
        assert [text for i, text in enumerate(answers) if i % 3] == [texts[i % 8] for i in range(96) if i % 3]
        right(engine, server)
    engine.keep_prompts(PromptCache())


def test_more_requests_than_may_wait_get_429(engine, small, monkeypatch):
    """A request beyond --max-queue gets 429 with Retry-After, and those before it are answered."""
    go = threading.Event()
    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as clients:
        script(patch, engine, "a b", gate=lambda: go.wait(20))
        ask = lambda: httpx.post(small.address + PATH, json={"prompt": "x"}, timeout=30)  # noqa: E731
        first = clients.submit(ask)
        until(lambda: small.api.scheduler.running == 1)
        second = clients.submit(ask)
        until(lambda: small.api.scheduler.waiting == 1)
        answer = ask()
        error = refused(answer, 429, "queue_full")
        assert error["type"] == "rate_limit_error" and 1 <= int(answer.headers["retry-after"]) <= 60
        go.set()
        assert first.result().status_code == second.result().status_code == 200
    small.idle()
    right(engine, small)


def test_a_request_ends_at_the_limits_of_the_server(engine, small, monkeypatch):
    """--max-tokens and --max-seconds end an answer with the finish reason "length"."""
    answer = small.ask(PATH, prompt="x", max_tokens=500)
    assert answer["usage"]["completion_tokens"] == 64 and answer["choices"][0]["finish_reason"] == "length"
    with running(engine, max_seconds=0) as server:
        answer = server.ask(PATH, prompt="x", max_tokens=500)
        assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] < 5


# ------------------------------------------------------------------ bad requests


def test_what_is_no_request_gets_the_error_object(engine, small):
    """Bodies that are no JSON object or too large, unknown paths and methods: the error object, and a count."""
    post = lambda data, **more: httpx.post(small.address + PATH, content=data, **more)  # noqa: E731
    deep = b'{"prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}"
    for data in (b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": NaN}', deep, b'{"prompt": ' + b"1" * 4000 + b"}"):
        assert httpx.codes.BAD_REQUEST == post(data).status_code, data[:20]
    refused(post(b"{"), 400, "invalid_json")
    refused(post(b"x" * 5000), 413, "request_too_large")
    refused(post(b"x" * 60_000), 413, "request_too_large")
    refused(httpx.post(small.address + PATH, content=iter([b"x" * 3000] * 3)), 413, "request_too_large")
    said = refused(small.get("/v1/nothing"), 404, "unknown_url")["message"]
    assert "/v1/chat/completions" in said and "/tokenize" in said
    assert "allowed: POST" in refused(small.get(PATH), 405, "method_not_allowed")["message"]
    right(engine, small)
    assert small.api.metrics.requests[PATH, 413] == 3


def test_every_path_but_the_page_and_health_needs_the_key(engine):
    """Every path but / and /health is a 401 without the exact key, and an answer with it."""
    wrong = {}, {"authorization": "Bearer se cre"}, {"authorization": "Basic se cret"}, {"x-api-key": "c"}
    with running(engine, api_keys=("other", "se cret")) as server:
        for path in ("/v1/models", "/metrics", "/v1/nothing", PATH, "//v1/models", "/models", "/health/../metrics"):
            for headers in wrong:
                refused(server.get(path, **headers), 401, "invalid_api_key")
        assert all(server.get(path).status_code == 200 for path in ("/", "/health", "/v1/health/"))
        for headers in ({"host": "any.name", "authorization": "bearer se cret"}, {"x-api-key": "other"}):
            assert server.get("/v1/models", **headers).status_code == 200
        right(engine, server, authorization="Bearer se cret")


def test_pages_of_other_sites_cannot_use_a_local_server(engine, small):
    """A foreign Origin or Host is a 403 without a key; only loopback names count as local."""
    get = partial(small.get, "/v1/models")
    for origin in ("https://evil.example", "null", "http://["):
        refused(get(origin=origin), 403, "wrong_origin")
    for host, status in (("evil.example:8000", 403), ("[", 400), ("[::1", 400)):
        refused(get(host=host), status, "wrong_host")
    assert get(origin=small.address).status_code == get(host="localhost").status_code == 200
    names = ("localhost", "127.0.0.1", "127.1.2.3", "::1", "0.0.0.0", "192.168.1.5", "::", "example.org")
    assert [is_loopback(name) for name in names] == [True] * 4 + [False] * 4


# ------------------------------------------------------------------ slow clients, the end


def test_a_client_that_reads_nothing_is_given_up(engine, monkeypatch):
    """A stream whose client takes nothing ends after --send-seconds and is counted, and the next answer is right."""
    with monkeypatch.context() as patch, running(engine, send_seconds=0.2) as server:
        steps = threading.Semaphore(0)
        made = script(patch, engine, "x " * 300, gate=steps.acquire)
        patch.setattr("serving.completions.Message.encode", lambda message: b"data: " + b"x" * 2_000_000 + b"\n\n")
        body = json.dumps({"prompt": "x", "stream": True})
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(server.socket.getsockname())
            head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(f"{head}{body}".encode())
            until(lambda: steps.release() or server.api.metrics.counts["slow_clients_total"])
            for _ in range(5):
                steps.release()
            server.idle()
            assert made[0].given < 300
        patch.undo()
        right(engine, server)


def test_the_engine_does_not_wait_for_a_reader(engine, monkeypatch):
    """All tokens are decoded before anybody reads, and they come as one part."""

    async def decode() -> tuple[int, int]:
        job, ended = Job(engine, ServeSettings(), Ask({}), SamplingParams(), made), asyncio.Event()
        job.start(ended.set)
        await ended.wait()
        return made[0].given, len([part async for part in job.parts()])

    made = script(monkeypatch, engine, "a b c d e f")
    engine.generate([1], SamplingParams())
    assert asyncio.run(decode()) == (len(made[0].ids), 1)


def test_sigterm_in_the_middle_of_a_stream():
    """The stream under way ends completely, new requests get 503, and the exit code is 0."""
    command = [sys.executable, "-m", "scripts.serve", "--port", "0", "--device", "cpu", "--max-queue", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        address = next(line.split()[1] for line in process.stderr if line.startswith("serving")).removesuffix("/v1")
        body = {"prompt": "def main():\n", "max_tokens": 600, "stream": True}
        with httpx.stream("POST", address + PATH, json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            next(line for line in process.stderr if line.startswith("ending: 1 requests"))
            refused(httpx.post(address + PATH, json={"prompt": "x"}), 503, "shutting_down")
            assert httpx.get(f"{address}/health").status_code == 503
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason": "length"' in rest[-2]
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_gpu_that_failed_ends_the_server(engine, monkeypatch):
    """A failed accelerator is a 503 for the request, and the server ends with exit code 5."""

    def fail() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        script(patch, engine, "a b", gate=fail)
        server = Running(engine)
        refused(httpx.post(server.address + PATH, json={"prompt": "x"}), 503, "device_lost")
        server.thread.join(20)
    assert server.code == 5


def test_a_stream_without_news_sends_a_comment(engine, monkeypatch):
    """A stream that waits sends the comment ": waiting", and its answer afterwards."""
    monkeypatch.setattr(scheduler, "PING_SECONDS", 0.02)
    go = threading.Event()
    script(monkeypatch, engine, "a b", gate=lambda: go.wait(20))
    with running(engine) as server:
        with httpx.stream("POST", server.address + PATH, json={"prompt": "x", "stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(line for line in lines if line.startswith(":")) == ": waiting"
            go.set()
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""]


# ------------------------------------------------------------------ the command


def test_the_command_says_what_is_wrong_in_one_line(capsys, monkeypatch):
    """A port that is taken, a wrong option and a missing package are one line and exit code 2."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for said, *arguments in (("cannot listen on", "--port", port), ("temperature is -1.0", "--temperature", "-1")):
            assert serve.main(arguments) == 2
            error = capsys.readouterr().err
            assert said in error and error.count("\n") == 1
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert serve.main([]) == 2 and "pip install starlette uvicorn" in capsys.readouterr().err


def test_a_server_that_others_reach_has_a_key(monkeypatch):
    """A host that is not loopback gets a random key unless one is given; defaults of sampling reach the settings."""
    monkeypatch.delenv(serve.KEY_VARIABLE, raising=False)
    settings = lambda *words: serve.settings_of(serve.build_parser().parse_args(list(words)))  # noqa: E731
    assert settings().api_keys == () and settings().model == "demo"
    made = settings("--host", "0.0.0.0")
    assert len(made.api_keys[0]) >= 32 and made.api_keys != settings("--host", "0.0.0.0").api_keys
    monkeypatch.setenv(serve.KEY_VARIABLE, "k")
    assert settings("--host", "0.0.0.0").api_keys == ("k",) == settings().api_keys
    assert settings("--api-key", "x", "--temperature", "0.5").defaults == {"temperature": 0.5}


def test_the_servers_defaults_stand_behind_the_clients_settings(engine, monkeypatch):
    """The client's settings come first, then the server's defaults, then the model's suggestions."""
    monkeypatch.setattr(engine, "generation", {"do_sample": True, "temperature": 0.5, "top_p": 0.5})
    with running(engine, defaults={"temperature": 0.75}) as server:
        for given, expected in (({}, (0.75, 0.5)), ({"temperature": 0, "top_p": 0.9}, (0, 0.9))):
            answer = server.ask("/v1/responses", input="x", max_output_tokens=1, **given)
            assert (answer["temperature"], answer["top_p"]) == expected


def test_the_folder_of_prompts_is_that_of_the_model(engine, tmp_path, monkeypatch):
    """A kept folder that does not depend on the weights alone; folders of ended processes that stay."""
    monkeypatch.setenv("EAGLET_CACHE", str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for name in (f"process-{ended.pid}", f"process-{os.getppid()}", "abc"):
        (tmp_path / "prompts" / name).mkdir(parents=True)
    own = prompt_folder(engine, keep=False)
    assert own.name == f"process-{os.getpid()}"
    assert {path.name for path in own.parent.iterdir()} == {f"process-{os.getppid()}", "abc"}
    kept = prompt_folder(engine, keep=True)
    assert kept == prompt_folder(engine, keep=True)
    values = [value for module in engine.model.modules() for value in vars(module).values()]
    stored = [*engine.model.state_dict().values(), *(v.weight for v in values if isinstance(v, PackedWeight))]
    for weight in (stored[0], stored[-1], max(stored, key=torch.Tensor.numel)):
        bits = weight.view(-1).view(torch.uint8)  # one bit anywhere is another model
        bits[-1] ^= 1
        assert prompt_folder(engine, keep=True) != kept
        bits[-1] ^= 1
    assert prompt_folder(engine, keep=True) == kept
