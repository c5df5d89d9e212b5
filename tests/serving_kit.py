"""A running server for tests: in a thread, on a free port, with the demo model or with answers that a test writes."""

import contextlib
import http.client
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

for package in ("starlette", "uvicorn"):
    pytest.importorskip(package, reason="the server needs starlette and uvicorn (requirements-dev.txt)")
httpx = pytest.importorskip("httpx", reason="the client needs httpx (requirements-dev.txt)")

from decoding.params import SamplingParams  # noqa: E402
from engine.engine import Engine  # noqa: E402
from engine.request import Inbox, Request  # noqa: E402
from engine.results import Chunk, TokenLogprob  # noqa: E402
from engine.streams import Stream  # noqa: E402
from generate import load  # noqa: E402
from loading.options import DEMO  # noqa: E402
from serving.app import Api  # noqa: E402
from serving.scheduler import ServeSettings  # noqa: E402
from serving.server import Server, bind  # noqa: E402

ASK = [{"role": "user", "content": "def f(x):"}]
# A template in the manner of Qwen's: it writes the tools, the calls, and what the tools gave.
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}Write <tool_call> to call one."
    "{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}<assistant>"
)


def instruct_folder(folder: Path) -> Path:
    """The demo model with a chat template."""
    for name in ("config.json", "model.safetensors", "tokenizer.model"):
        shutil.copy(DEMO / name, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "add_bos_token": True}))
    return folder


def instruct_engine(tmp_path_factory: pytest.TempPathFactory, **options: Any) -> Engine:
    """An engine of that model."""
    return load(instruct_folder(tmp_path_factory.mktemp("instruct")), device="cpu", threads=1, **options)


def text_of(engine: Engine, prompt: str | list[int], **params: Any) -> str:
    """The text with which the engine alone goes on from a prompt."""
    return engine.generate(prompt, SamplingParams(**params)).run()[0].text


def until(condition, seconds: float = 20) -> None:
    """Wait for what another thread is about to do."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"nothing happened in {seconds} s"
        time.sleep(0.005)


class Running:
    """A server in a thread."""

    def __init__(self, engine: Engine, port: int = 0, **settings: Any):
        self.settings = ServeSettings(**{"model": "demo", **settings})
        self.lines: list[str] = []
        self.api = Api(engine, self.settings, self.lines.append)
        self.socket = bind("127.0.0.1", port, self.settings)
        self.address = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.server = Server(self.api.app(), self.api.scheduler, self.settings, self.lines.append)
        self.code: int | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        until(lambda: self.server.started)

    def _run(self) -> None:
        self.code = self.server.serve_on(self.socket)

    def idle(self) -> None:
        """Wait until no request is under way."""
        until(lambda: not self.api.scheduler.jobs)

    def get(self, path: str, **headers: str) -> httpx.Response:
        """GET a path."""
        return httpx.get(self.address + path, headers=headers)

    def ask(self, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
        """POST a request. Returns the answer, which must have this status."""
        answer = httpx.post(self.address + path, json=body, timeout=60)
        assert answer.status_code == status, answer.text
        return answer.json()

    def refuses(self, path: str, param: str | None, **body: Any) -> dict[str, Any]:
        """Check that a request is refused in one line because of this field. Returns the error."""
        error = self.ask(path, 400, **body)["error"]
        assert error["param"] == param and "\n" not in error["message"], error
        return error

    def stream(self, path: str, **body: Any) -> Iterator[dict[str, Any]]:
        """POST a request for a stream. Yields its objects as they come."""
        with httpx.stream("POST", self.address + path, json=body | {"stream": True}, timeout=60) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    def leave(self, path: str, body: dict[str, Any]) -> http.client.HTTPConnection:
        """Send a request and read nothing. To close the connection is to leave, at a moment that the test chooses."""
        connection = http.client.HTTPConnection(*self.socket.getsockname()[:2])
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def cut(self) -> None:
        """Break off all connections, as a process that is killed does."""
        for connection in list(self.server.server_state.connections):
            connection.loop.call_soon_threadsafe(connection.transport.abort)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def running(engine: Engine, **settings: Any) -> Iterator[Running]:
    """A server that is stopped at the end of the block."""
    server = Running(engine, **settings)
    try:
        yield server
    finally:
        server.stop()


class ScriptedStream(Stream):
    """A Stream that drives itself: a thread of its own gives the tokens of a text one by one, and counts them.

    gate: is called before every token after the first one, so that a test can hold the answer there.
    turn: whose holder decodes; the others wait for it, as requests wait for a row.
    """

    def __init__(
        self, engine: Engine, prompt: list[int], params: SamplingParams, text: str, turn: threading.Lock,
        logprob: Callable[[int], TokenLogprob] | None = None, gate: Callable[[], object] | None = None,
    ):  # fmt: skip
        super().__init__(engine.requests([prompt], [params]), self)
        self.ids = engine.tokenizer.encode(text, add_bos=False)
        self.decoder = engine.tokenizer.stream(continuation=True, shown=params.shown_ids)
        (self.request,) = self._requests
        self.logprob, self.gate, self.turn = logprob, gate, turn
        self.given = 0

    def submit(self, request: Request) -> None:
        threading.Thread(target=self._decode, args=(request,), daemon=True).start()

    def pump(self) -> None:
        pass

    def serve(self, inbox: Inbox) -> None:
        inbox.wait()

    def _decode(self, request: Request) -> None:
        end: Exception | None = None
        while not self.turn.acquire(timeout=0.01):
            if request.stopping:
                break
        else:
            request.began = time.perf_counter()
            try:
                self._say(request)
            except Exception as error:
                end = error
            self.turn.release()
        request.end(end)

    def _say(self, request: Request) -> None:
        for token in self.ids:
            if self.gate is not None and self.given:
                self.gate()
            if request.stopping:
                return
            self.given += 1
            self.result.token_ids.append(token)
            logprobs = [self.logprob(token)] if self.logprob is not None else ()
            request.inbox.put(Chunk(0, [token], self.decoder.push([token]), logprobs))
        self.result.stop_reason, request.finished = "eos", True


def script(monkeypatch, engine: Engine, text: str, **more: Any) -> list[ScriptedStream]:
    """Let the engine answer every request with a text. Returns the streams that it makes from now on."""
    made: list[ScriptedStream] = []
    turn = threading.Lock()

    def generate(prompt, params, adapter=""):
        made.append(ScriptedStream(engine, prompt, params, text, turn, **more))
        return made[-1]

    monkeypatch.setattr(engine, "generate", generate)
    return made
