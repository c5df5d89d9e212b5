"""How far replicas go: a simulation with measured times of steps and prompts, and the front's own time for a request.

    python -m scripts.scale                              # both, as tables
    python -m scripts.scale --json results/scale.jsonl   # and as records

In the simulation people chat: they read an answer for a while, and then ask again. `serving.replicas.Queue` hands out
their requests, as in the server. A replica does what `engine/batch.py` does: a part of a prompt, then a step of all its
rows. A step of R rows counts as a measured step of R nodes, plus what their contexts add. Nothing is counted for the
network, nor for copying earlier keys and values back.

For the front, replicas answer at once with text that nobody has decoded, and the processor time of the front is counted.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from decoding.params import SamplingParams
from engine.prefill import CHUNKS
from engine.results import Chunk, GenerationResult
from loading.options import DEMO
from serving.app import Api
from serving.replica import GATHER, NOTHING, Facts, Made, Replica
from serving.replicas import BLOCK, Peer, Queue, Replicas, block_keys
from serving.scheduler import ServeSettings
from serving.server import Server, bind
from support.errors import command_parser, run_command
from support.files import append_json_lines, read_json_lines
from support.machine import describe_device

RESULTS = Path(__file__).resolve().parent.parent / "results"
STEPS, PROMPTS = RESULTS / "h200_l3_8b_int4_steps.jsonl", RESULTS / "h200_prompts.jsonl"
COUNTS = (1, 2, 4, 8, 16, 32, 64)  # of replicas
CROWDS = (48, 96)  # chats that go on at once, for each replica
SLOTS, HELD = 8, 250_000  # of each replica: sequences at once, tokens of earlier texts that it keeps
SYSTEM, ASKED, ANSWERED, TURNS, READING = 400, 80, 250, 5, 20.0  # means: three numbers of tokens, turns, seconds
WARM, UNTIL = 60.0, 180.0  # seconds between which is counted
NEAR, FAR = 128, 2048  # contexts of the measured steps


class Turn:
    """A message of a chat, and the answer to it."""

    def __init__(self, ids: list[int], left: int, noise: random.Random):
        """ids: the chat so far. left: turns after this one."""
        self.noise = noise
        self.left = left
        self.ids = ids + [noise.getrandbits(30) for _ in range(1 + int(noise.expovariate(1 / ASKED)))]
        self.keys = block_keys(self.ids)
        self.answer = self.to_write = 1 + int(noise.expovariate(1 / ANSWERED))
        self.to_read = len(self.ids)
        self.came = 0.0

    def next(self) -> Turn:
        """The next turn of the chat, or the first one of another chat."""
        if not self.left:
            return Turn(list(range(SYSTEM)), int(self.noise.expovariate(1 / TURNS)), self.noise)
        answer = [self.noise.getrandbits(30) for _ in range(self.answer)]
        return Turn(self.ids + answer, self.left - 1, self.noise)


class Times:
    """The seconds of parts, from the records of `scripts.bench --steps` and of prompts."""

    def __init__(self, steps: Sequence[dict[str, Any]], prompts: Sequence[dict[str, Any]]):
        plain = [one for one in steps if one["type"] == "step" and one["arm"].startswith("plain")]
        near = sorted((one["nodes"], one["ms"] / 1e3) for one in plain if one["context"] == NEAR)
        self.rows = [next(seconds for nodes, seconds in near if nodes >= rows) for rows in range(1, SLOTS + 1)]
        far = next(one["ms"] / 1e3 for one in plain if one["context"] == FAR and one["nodes"] == 1)
        self.context = (far - self.rows[0]) / (FAR - NEAR)
        (a, first), (b, second) = sorted((p["tokens"], p["ms"] / 1e3) for p in prompts if p.get("widest") == 2048)
        self.token = (second - first) / (b - a)
        self.begin = first - a * self.token


def simulate(count: int, crowd: int, times: Times, by_prefix: bool, seed: int = 0) -> dict[str, Any]:
    """How `count` replicas serve count * crowd chats. by_prefix: whether the front looks at prefixes."""
    noise = random.Random(seed)
    peers = [Peer(number, slots=SLOTS) for number in range(count)]
    reading: list[deque[Turn]] = [deque() for _ in peers]
    writing: list[list[Turn]] = [[] for _ in peers]
    parts: list[tuple[Turn | None, int] | None] = [None] * count  # that run: whose prompt, and how much of it
    queue = Queue(peers)
    for peer in peers:
        peer.up = True
    events: list[tuple[float, int, Any]] = []
    order = iter(range(10**12))  # of events at one time
    tokens, firsts, cached, prompts = 0, list[float](), 0, 0

    def at(seconds: float, what: Any) -> None:
        heapq.heappush(events, (seconds, next(order), what))

    def begin(i: int, now: float) -> None:
        turn = reading[i][0] if reading[i] else None
        most = min(turn.to_read, CHUNKS[-1] if writing[i] else turn.to_read) if turn else 0
        seconds = times.begin + times.token * most if turn else 0.0
        if writing[i]:
            seconds += times.rows[len(writing[i]) - 1] + times.context * sum(len(t.ids) for t in writing[i])
        parts[i] = (turn, most) if turn or writing[i] else None
        if parts[i]:
            at(now + seconds, i)

    for _ in range(count * crowd):
        at(noise.uniform(0, READING), Turn(list(range(SYSTEM)), int(noise.expovariate(1 / TURNS)), noise))
    while (event := heapq.heappop(events))[0] < UNTIL:
        now, _, what = event
        if isinstance(what, Turn):
            what.came = now
            queue.put(what, what.keys if by_prefix else [])
        else:
            (turn, read), rows = parts[what], writing[what]
            tokens += len(rows) * (now > WARM)
            for row in rows:
                row.to_write -= 1
            if turn:
                turn.to_read -= read
                if turn.to_read <= 0:
                    reading[what].popleft()
                    firsts += [now - turn.came] if now > WARM else []
                    rows.append(turn)
            for row in [row for row in rows if row.to_write <= 0]:
                rows.remove(row)
                del peers[what].running[id(row)]
                at(now + noise.expovariate(1 / READING), row.next())
            begin(what, now)
        while given := queue.next():
            turn, peer = given
            known = min(BLOCK * peer.common(turn.keys), len(turn.ids) - 1)
            cached, prompts = (cached + known, prompts + len(turn.ids)) if now > WARM else (0, 0)
            turn.to_read -= known
            peer.running[id(turn)] = turn
            peer.remember(turn.keys)
            while len(peer.seen) > HELD // BLOCK:
                peer.seen.popitem(last=False)
            reading[peer.number].append(turn)
            if parts[peer.number] is None:
                begin(peer.number, now)
    firsts.sort()
    return {
        "type": "replicas", "replicas": count, "by_prefix": by_prefix, "chats": count * crowd,
        "tokens_per_second": tokens / (UNTIL - WARM), "first_token_ms": 1e3 * statistics.median(firsts),
        "first_token_p95_ms": 1e3 * firsts[len(firsts) * 95 // 100], "cached_share": cached / prompts,
    }  # fmt: skip


class Instant(Replica):
    """Answers at once, in one piece or in as many as a decoder of DECODES tokens per second would send."""

    async def load(self) -> Facts:
        self._loop = asyncio.get_running_loop()
        self._engine = SimpleNamespace(batch=SimpleNamespace(parts=0), figures=lambda: {"": {}}, close=lambda: None)
        return Facts(8192, ASKERS, (), {}, "", [])

    async def begin(self, number: int, prompt: list[int], params: SamplingParams, adapter: str) -> None:
        """seed 0: the answer comes in one piece."""
        count, size = params.max_new_tokens, int(DECODES * GATHER) if params.seed else params.max_new_tokens
        result = GenerationResult(len(prompt), 0.0, 0, "x" * count, [65] * count, "length")
        for start in range(0, count, size):
            ids = result.token_ids[start : start + size]
            self._put(Made(number, Chunk(0, ids, "x" * len(ids)), None))
            await asyncio.sleep(GATHER if params.seed else 0)
        self._put(Made(number, NOTHING, result))


ASKERS, REQUESTS, DECODES = 16, 320, 300  # clients at once, requests, tokens per second
ASK = """
import concurrent.futures, http.client, json, sys
port, askers, number, body = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
def ask(_):
    line = http.client.HTTPConnection("127.0.0.1", port)
    for _ in range(number // askers):
        line.request("POST", "/v1/completions", body)
        answer = line.getresponse()
        assert answer.read() and answer.status == 200
with concurrent.futures.ThreadPoolExecutor(askers) as pool:
    list(pool.map(ask, range(askers)))
"""


def front_times() -> Iterator[dict[str, Any]]:
    """The processor time of the front for a request of ANSWERED tokens, whole and as a stream."""
    engine, settings = Replicas({"checkpoint": str(DEMO)}, 1, kind=Instant), ServeSettings(max_queue=ASKERS)
    sock = bind("127.0.0.1", 0, settings)
    api = Api(engine, settings, lambda line: None)
    server = Server(api.app(), api.scheduler, settings, lambda line: None)
    thread = threading.Thread(target=server.serve_on, args=(sock,))
    thread.start()
    try:
        for stream in (False, True):
            asked = {"prompt": "def f(x):\n" * 100, "max_tokens": ANSWERED, "seed": int(stream), "stream": stream}
            words = [sys.executable, "-c", ASK, str(sock.getsockname()[1]), str(ASKERS), str(REQUESTS)]
            began, spent = time.monotonic(), time.process_time()
            subprocess.run([*words, json.dumps(asked)], check=True)
            spent, seconds = time.process_time() - spent, time.monotonic() - began
            events = ANSWERED / (DECODES * GATHER) if stream else 1
            yield {
                "type": "front", "stream": stream, "events": events, "ms": 1e3 * spent / REQUESTS,
                "requests_per_second": REQUESTS / seconds, "device": describe_device(torch.device("cpu")),
            }  # fmt: skip
    finally:
        server.should_exit = True
        thread.join()
        engine.close()


def scale_table(records: Sequence[dict[str, Any]]) -> str:
    """The records of this script as tables of a page."""
    lines = [
        "| replicas | chats | handed out | tok/s | of one replica | first token | 95 % of them | tokens from caches |"
    ]
    lines.append("|---:|---:|---|---:|---:|---:|---:|---:|")
    simulated = [one for one in records if one["type"] == "replicas"]
    for one in simulated:
        crowd = one["chats"] // one["replicas"]
        alone = next(o for o in simulated if o["replicas"] == 1 and o["chats"] == crowd)["tokens_per_second"]
        how = "by prefix" if one["by_prefix"] else "by load"
        rates = f"{one['tokens_per_second']:,.0f} | {one['tokens_per_second'] / alone:.1f}x"
        waits = f"{one['first_token_ms']:,.0f} ms | {one['first_token_p95_ms']:,.0f} ms"
        lines.append(
            f"| {one['replicas']} | {one['chats']:,} | {how} | {rates} | {waits} | {one['cached_share']:.0%} |"
        )
    lines += ["", "| an answer of 250 tokens | processor time of the front | requests per second of one core |"]
    lines.append("|---|---:|---:|")
    for one in (one for one in records if one["type"] == "front"):
        what = f"as a stream of {one['events']:.0f} events" if one["stream"] else "whole"
        lines.append(f"| {what} | {one['ms']:.1f} ms | {1e3 / one['ms']:.0f} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = command_parser("scripts.scale", __doc__)
    parser.add_argument("--json", metavar="FILE", help="write the records, too")
    args = parser.parse_args(argv)
    return run_command(lambda: run(args.json), args.debug)


def run(file: str | None) -> None:
    """Simulate, measure, and print both."""
    times = Times(read_json_lines(STEPS), read_json_lines(PROMPTS))
    cases = [(count, crowd, by) for crowd in CROWDS for by in (True, False) for count in COUNTS if by or count > 1]
    records = [simulate(count, crowd, times, by) for count, crowd, by in cases]
    records += front_times()
    if file:
        Path(file).unlink(missing_ok=True)
        append_json_lines(Path(file), *records)
    print(scale_table(records))


if __name__ == "__main__":
    raise SystemExit(main())
