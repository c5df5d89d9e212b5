"""Replicas: a request's tokens do not depend on who decodes it, nor on how many replicas have died meanwhile."""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from serving_kit import httpx, running

from decoding.params import SamplingParams
from engine.request import Inbox, Request
from engine.results import Chunk, GenerationResult
from engine.streams import Stream
from generate import load
from loading.options import DEMO
from serving import replica
from serving.replica import Made, Replica
from serving.replicas import BLOCK, OtherTokens, Passage, Peer, Queue, Replicas, block_keys
from support.errors import INTERNAL, BadFileError, UsageError
from support.files import read_json_lines

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="replicas need Ray (requirements-dev.txt)")
ROOT = Path(__file__).resolve().parent.parent
HEAD = str(DEMO / "eagle1")
OPTIONS = {"checkpoint": str(DEMO), "eagle": HEAD, "ctx": 1024, "slots": 4, "device": "cpu", "threads": 1}
GRAMMAR = 'start: /[a-f ]{20,60}/ "\\n"'


# ---- without Ray: who gets a request, and what is handed on ----------------------------------------------------------


def test_a_request_goes_to_who_has_seen_most_of_it_and_else_to_who_has_least_to_do():
    """All conversations on one replica, because they share a system prompt; a turn that is read again elsewhere."""
    peers = [Peer(i, slots=4) for i in range(3)]
    for peer in peers:
        peer.up = True

    def given(ids: list[int], adapter: int = 0) -> Peer:
        queue = Queue(peers)
        queue.put("it", block_keys(ids, adapter))
        return queue.next()[1]

    chat = list(range(10 * BLOCK))
    peers[2].remember(block_keys(chat))
    peers[2].running = dict.fromkeys(range(3))
    assert given(chat + [7] * 2 * BLOCK) is peers[2], "the next turn of a chat"
    assert given(chat[: 3 * BLOCK] + [9] * 7 * BLOCK) is peers[0], "only the system prompt is alike"
    assert given([5]) is peers[0], "shorter than a block"
    assert given(chat, adapter=1) is peers[0], "another adapter makes other keys and values"
    peers[0].remember(block_keys(chat))
    assert given(chat) is peers[0], "of two that have seen the same, the one with less to do"
    peers[0].up = False
    assert given(chat) is peers[2]


def test_where_all_are_busy_texts_wait_for_who_knows_them_and_no_text_waits_for_ever():
    """A crowd that is read again and again, because each takes the next slot; a text that is passed over for ever."""
    peers = [Peer(0, slots=1), Peer(1, slots=1)]
    texts = [[number] * 4 * BLOCK for number in (0, 1)]
    for peer, text in zip(peers, texts, strict=True):
        peer.up = True
        peer.remember(block_keys(text))
    queue = Queue(peers)
    for number in range(12):
        queue.put(number, block_keys(texts[number % 2]))
    assert queue.next() == (0, peers[0])
    peers[0].running[0] = None
    peers[1].running[1] = None
    assert queue.next() is None, "all are busy"
    peers[0].running.clear()
    assert [queue.next() for _ in range(4)] == [(n, peers[0]) for n in (2, 4, 1, 6)]
    peers[0].clear()
    peers[1].running.clear()
    assert queue.next() == (3, peers[1])
    assert queue.take(lambda number: number > 9) == [10, 11] and queue.take(lambda number: True) == [5, 7, 8, 9]


def passage(known: str = "") -> Passage:
    made = Passage(Request([1], SamplingParams(), (), None, Inbox(1), index=2))
    for letter in known:
        made.take(Made(1, Chunk(0, [ord(letter)], letter, (ord(letter),)), None))
    return made


@pytest.mark.parametrize("seed", range(40))
def test_what_was_handed_on_before_is_compared_and_skipped_however_the_steps_fall(seed):
    """Doubled or lost tokens where the second replica's steps are longer, shorter, or hold text back."""
    rng = random.Random(seed)
    text = "".join(rng.choice("abcdef") for _ in range(rng.randrange(1, 40)))
    made = passage()
    for turn in range(3):
        ends = sorted({*(rng.randrange(len(text) + 1) for _ in range(6)), len(text)})
        shown = sorted(min(end, rng.randrange(len(text) + 1)) for end in ends[:-1]) + [len(text)]
        parts = list(zip(pairwise([0, *ends]), pairwise([0, *shown]), strict=True))
        for (start, end), (first, last) in parts if turn == 2 else parts[: rng.randrange(len(parts) + 1)]:
            ids = [ord(letter) for letter in text[start:end]]
            made.take(Made(1, Chunk(0, ids, text[first:last], tuple(ids)), None))
        made.begin_again(1.0)
    inbox = made.request.inbox
    chunks = [inbox.take() for _ in range(len(inbox.chunks))]
    assert "".join(chunk.text for chunk in chunks) == text and {chunk.row for chunk in chunks} == {2}
    ids = [token for chunk in chunks for token in chunk.token_ids]
    assert ids == [ord(letter) for letter in text] == [entry for chunk in chunks for entry in chunk.logprobs]


def test_a_replica_that_answers_otherwise_is_an_error_and_not_a_wrong_text():
    """Machines of two kinds, whose tokens are joined to a text that no model would write."""
    made = passage("abc")
    made.begin_again(1.0)
    made.take(Made(1, Chunk(0, [ord("a")], "a"), None))
    for end, last in ((None, "x"), (GenerationResult(1, 0.0, 0), "b")):  # another token, and an end that comes early
        with pytest.raises(OtherTokens, match="not equal"):
            made.take(Made(1, Chunk(0, [ord(last)], "b"), end))


def test_ray_is_neither_imported_nor_needed_without_replicas(monkeypatch):
    """A server that needs half a second longer to start, or another package, for what it does not use."""
    code = "import sys, scripts.serve, serving.replicas, serving.batch; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r'pip install "ray'):
        Replicas(OPTIONS, 2)


def test_an_engine_that_does_not_move_ends_its_process(monkeypatch):
    """A GPU that hangs, while the process around it answers; an engine without requests that counts as hanging."""
    stream = SimpleNamespace(start=lambda listener: None, stop=lambda: None)
    stuck = SimpleNamespace(batch=SimpleNamespace(parts=7), generate=lambda *asked: stream, figures=lambda: {"": {}})

    async def live(requests: int) -> None:
        made = Replica({}, None, deadline=0.2)
        made._engine, made._loop = stuck, asyncio.get_running_loop()
        for number in range(requests):
            await made.begin(number, [1], SamplingParams(), "")
        for _ in range(8):
            await made.news([])

    monkeypatch.setattr(replica, "HEARTBEAT", 0.05)
    monkeypatch.setattr(os, "_exit", sys.exit)
    asyncio.run(live(0))
    with pytest.raises(SystemExit) as end:
        asyncio.run(live(1))
    assert end.value.code == INTERNAL


def test_the_page_has_the_tables_of_the_record():
    """Figures of another run, or of none."""
    page = (ROOT / "docs" / "replicas.md").read_text(encoding="utf-8")
    records = read_json_lines(ROOT / "results" / "scale.jsonl")
    rows = [re.split(r" *\| *", line)[1:-1] for line in page.splitlines() if re.match(r"\| +\d", line)]
    simulated = [one for one in records if one["type"] == "replicas" and one["replicas"] in (1, 64)]
    for (count, *cells, first, slow, cached), one in zip(rows, simulated, strict=True):
        assert count == str(one["replicas"])
        how, rate = "by prefix" if one["by_prefix"] else "by load", f"{one['tokens_per_second']:,.0f}"
        assert cells[:3] == [f"{one['chats']:,}", how, rate] and cached == f"{one['cached_share']:.0%}"
        assert (first, slow) == (f"{one['first_token_ms']:,.0f} ms", f"{one['first_token_p95_ms']:,.0f} ms")
    for one in (one for one in records if one["type"] == "front"):
        assert re.search(rf"\b{one['ms']:.1f} ms( of a core)? \({1e3 / one['ms']:.0f} each second\)", page)


# ---- with Ray --------------------------------------------------------------------------------------------------------


@needs_ray  # the first one, because a process has one Ray
def test_what_keeps_a_replica_from_starting_is_said_in_one_line(tmp_path):
    """A server that waits for ever for replicas that cannot be, or that hides why."""
    with pytest.raises(BadFileError):
        Replicas(OPTIONS | {"checkpoint": str(tmp_path)}, 1)
    with pytest.raises(ValueError, match="'bogus' is not one of"):  # which only the replica finds
        Replicas(OPTIONS | {"tree": "bogus"}, 1)
    with pytest.raises(UsageError, match="--ray-address"):
        Replicas(OPTIONS, 1, address="127.0.0.1:1")


class Log(list):
    """The lines about replicas."""

    def processes(self) -> dict[int, int]:
        """Replica -> the process that it has, or had, last."""
        ready = (re.match(r"replica (\d+) is ready: process (\d+)", line) for line in self)
        return {int(found[1]): int(found[2]) for found in ready if found}

    def count(self, words: str) -> int:
        return sum(words in line for line in self)

    def wait(self, words: str, times: int, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while self.count(words) < times:
            assert time.monotonic() < end, f"not {times} times {words!r} in {seconds} s: {list(self)}"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def log() -> Log:
    return Log()


@pytest.fixture(scope="module")
def replicas(log):
    pytest.importorskip("ray", reason="replicas need Ray (requirements-dev.txt)")
    made = Replicas(OPTIONS, 2, say=log.append, deadline=4.0)
    log.wait("is ready", 2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone():
    return load(**OPTIONS)


@pytest.fixture(scope="module")
def whole(alone) -> list[GenerationResult]:
    """What one engine makes of REQUESTS."""
    return [alone.generate(*request).run()[0] for request in REQUESTS]


PARAMS = [SamplingParams((0.0, 0.9)[i % 2], seed=i, max_new_tokens=60 + 37 * i % 150) for i in range(24)]
REQUESTS = [(f"def f{i}({'x, ' * (7 * i % 40)}y):\n", params) for i, params in enumerate(PARAMS)]


def outcome(result: GenerationResult) -> tuple:
    return result.token_ids, result.text, result.stop_reason, result.logprobs, result.prompt_logprobs


def all_started(replicas: Replicas, requests: list[tuple]) -> list[Stream]:
    """The streams of these requests, which wait and run together."""
    streams = [replicas.generate(*request) for request in requests]
    for stream in streams:
        stream.start()
    return streams


@pytest.mark.parametrize("settings", [
    {"temperature": 0.8, "seed": 3, "top_k": 40},
    {"stop": ["\n    "], "logprobs": 3, "prompt_logprobs": 2},
    {"grammar": GRAMMAR, "temperature": 1.0},
    {"max_new_tokens": 0, "prompt_logprobs": 1},
    {"logit_bias": [(13, -100)], "repetition_penalty": 1.2},
])  # fmt: skip
def test_a_replica_gives_what_an_engine_gives(replicas, alone, settings):
    """A setting, a log-probability or the end of a text that is lost on the way to another process."""
    params = SamplingParams(**{"max_new_tokens": 80, **settings})
    mine, theirs = (engine.generate("def main():\n", params).run()[0] for engine in (alone, replicas))
    assert outcome(mine) == outcome(theirs)
    assert (mine.prompt_tokens, mine.new_tokens) == (theirs.prompt_tokens, theirs.new_tokens)


def test_what_is_wrong_with_a_request_is_said_before_it_is_sent(replicas):
    """An error that only the replica finds, after the answer has begun."""
    for prompt, grammar in (([10**6], ""), ("x" * 9000, ""), ("x", "start: (")):
        with pytest.raises(ValueError):
            replicas.generate(prompt, SamplingParams(grammar=grammar))
    with pytest.raises(ValueError, match="watched"):
        replicas.add_observer(None)


def test_replicas_that_die_or_hang_cost_time_and_no_text(replicas, whole, log):
    """Texts that end early, are doubled, or go on with another seed when a process is killed; a process that lives and
    answers nothing, with whose requests the clients wait for ever."""
    first, done = log.processes(), threading.Event()

    def harm() -> None:
        try:
            for number, how in enumerate((signal.SIGKILL, signal.SIGSTOP)):
                time.sleep(0.25)  # some requests have begun
                os.kill(first[number], how)
                log.wait("is lost", number + 1)
                log.wait("is ready", number + 3)
        finally:
            done.set()

    harming = threading.Thread(target=harm)
    harming.start()
    while not done.is_set():
        for stream, expected in zip(all_started(replicas, REQUESTS), whole, strict=True):
            chunks = list(stream)
            assert outcome(stream.result) == outcome(expected)
            assert "".join(chunk.text for chunk in chunks) == expected.text
            assert [token for chunk in chunks for token in chunk.token_ids] == expected.token_ids
    harming.join()
    assert log.count("is lost") == 2 and log.count("has not answered") == 1
    assert not {*first.values()} & {*log.processes().values()}


def test_a_stream_that_is_left_gives_its_slot_back(replicas):
    """Slots that stay taken by clients that have gone."""
    long = SamplingParams(max_new_tokens=900, stop_ids=(1,))
    for _ in range(3):
        streams = all_started(replicas, [("x = ", long)] * 12)
        next(streams[0])
        for stream in streams:
            stream.close()
        assert {stream.result.stop_reason for stream in streams} == {"interrupted"}
    assert not any(peer.running for peer in replicas.peers)
    assert replicas.generate("x = ", SamplingParams(max_new_tokens=5)).run()[0].new_tokens == 5


def test_the_server_has_all_its_endpoints_over_replicas(replicas, alone):
    """An endpoint that reaches into an engine which is in another process."""
    asked = {"prompt": "def f(x):\n", "max_tokens": 8, "n": 2, "seed": 5, "temperature": 0.7, "logprobs": 2}
    steps = {"prompt": "x", "max_tokens": 8, "stream": True, "eaglet": {"steps": True}}
    found = []
    for engine in (replicas, alone):
        with running(engine) as server:
            answers = [server.ask("/v1/completions", **asked), server.ask("/tokenize", content="def f")]
            answers.append(server.ask("/v1/embeddings", input=["def f", "class A"]))
            answers += [server.get(path).json() for path in ("/health", "/tokenizer_info")]
            figures = server.get("/metrics").text
            status = httpx.post(server.address + "/v1/completions", json=steps).status_code
        assert status == (400 if engine is replicas else 200)
        own = ("id", "created", "timings", "usage")  # the caches hold other texts
        found.append([{key: value for key, value in answer.items() if key not in own} for answer in answers])
        assert ('eaglet_replica_up{replica="1"} 1' in figures) == (engine is replicas)
    assert found[0] == found[1]


def test_without_a_replica_new_requests_are_told_to_come_back(replicas, log):
    """Requests that wait for minutes where a load balancer would have sent them elsewhere."""
    with running(replicas) as server:
        while any(peer.up for peer in replicas.peers):  # one may be back before the end of the other is noticed
            for process in log.processes().values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.1)
        asked = httpx.post(server.address + "/v1/completions", json={"prompt": "x"})
        for answer in (asked, server.get("/health")):
            assert answer.status_code == 503 and int(answer.headers["Retry-After"]) > 0
        log.wait("is ready", log.count("is lost") + 1)
        assert server.get("/health").status_code == 200


def started(command: list[str]) -> tuple[subprocess.Popen, Log, threading.Thread]:
    """A command that runs, its lines, and who reads them."""
    ran, log = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True), Log()
    reader = threading.Thread(target=lambda: log.extend(iter(ran.stderr.readline, "")))
    reader.start()
    return ran, log, reader


@needs_ray
def test_a_signal_lets_replicas_finish_what_runs(alone):
    """An answer that is cut off by a new version of the server; processes of Ray that stay."""
    words = f"-m scripts.serve --replicas 1 --port 0 --device cpu --ctx 1024 --slots 4 --eagle {HEAD}".split()
    ran, log, reader = started([sys.executable, *words])
    log.wait("serving", 1)
    address = next(line for line in log if line.startswith("serving")).split()[1]
    prompt, params = "def f(x):\n", SamplingParams(max_new_tokens=900, stop_ids=(1,))
    asked = {"prompt": prompt, "max_tokens": 900, "ignore_eos": True, "stream": True}
    text = ""
    with httpx.stream("POST", address + "/completions", json=asked, timeout=60) as answer:
        for line in answer.iter_lines():
            if not text:
                ran.send_signal(signal.SIGTERM)
                log.wait("ending: 1 requests under way", 1)
                refused = httpx.post(address + "/completions", json={"prompt": "x"})
                assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
            if line.startswith("data: {"):
                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
    assert text == alone.generate(prompt, params).run()[0].text
    assert ran.wait(60) == 0
    reader.join()
    assert not Path(f"/proc/{log.processes()[0]}").exists()


@needs_ray
def test_a_file_of_requests_survives_its_replicas(tmp_path, whole):
    """Answers that are lost, doubled or out of order when a replica dies, and when the command itself is killed."""
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions",
         "body": {"prompt": prompt, "max_tokens": params.max_new_tokens, "temperature": params.temperature, "seed": i}}
        for i, (prompt, params) in enumerate(REQUESTS)
    ]  # fmt: skip
    asked, answered = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text("".join(json.dumps(one) + "\n" for one in lines))
    command = [sys.executable, "generate.py", "--input", str(asked), "--output", str(answered)]
    command += ["--eagle", HEAD, "--ctx", "1024", "--slots", "1", "--device", "cpu", "--replicas"]
    for how, count in (("command", "1"), ("replica", "2")):
        ran, log, reader = started([*command, count])
        log.wait("is ready", 1)
        so_far = answered.read_text().count("\n") if answered.exists() else 0
        while not answered.exists() or answered.read_text().count("\n") < so_far + 3:
            time.sleep(0.01)
        if how == "command":
            ran.kill()
        else:
            os.kill(next(iter(log.processes().values())), signal.SIGKILL)
        assert ran.wait(60) == (-signal.SIGKILL if how == "command" else 0), list(log)
        reader.join()
    found = [json.loads(line) for line in answered.read_text().splitlines()]
    assert [one["custom_id"] for one in found] == [one["custom_id"] for one in lines]
    texts = [one["response"]["body"]["choices"][0]["text"] for one in found]
    assert texts == [result.text for result in whole]
