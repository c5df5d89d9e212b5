"""How far replicas go: a simulation with measured times of steps and prompts.

    python -m scripts.scale                  # a table
    python -m scripts.scale --json FILE      # and its records

In the simulation people chat: they read an answer for a while, and then ask again. `serving.replicas.Queue` hands out
their requests, as in the server. A replica does what `engine/batch.py` does: a part of a prompt, then a step of all its
rows. A step of R rows counts as a measured step of R nodes, plus what their contexts add. Nothing is counted for the
network, nor for copying earlier keys and values back.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report import lines_table
from engine.prefill import CHUNKS
from serving.replicas import BLOCK, Peer, Queue, block_keys
from support.errors import command_parser, run_command
from support.files import append_json_lines, read_json_lines

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


def simulate(count: int, crowd: int, times: Times, by_prefix: bool) -> dict[str, Any]:
    """How `count` replicas serve count * crowd chats. by_prefix: whether the front looks at prefixes."""
    noise = random.Random(0)
    peers = [Peer(number, slots=SLOTS) for number in range(count)]
    reading: list[deque[Turn]] = [deque() for _ in peers]
    writing: list[list[Turn]] = [[] for _ in peers]
    parts: list[tuple[Turn | None, int] | None] = [None] * count  # that run: whose prompt, and how much of it
    queue = Queue(peers)
    for peer in peers:
        peer.up = True
    events: list[tuple[float, int, Any]] = []
    order = itertools.count()  # of events at one time
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
            if now > WARM:
                cached += known
                prompts += len(turn.ids)
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


def scale_table(records: Sequence[dict[str, Any]]) -> str:
    """The simulated records as a table of a page."""
    simulated = [one for one in records if one["type"] == "replicas"]
    alone = {one["chats"]: one["tokens_per_second"] for one in simulated if one["replicas"] == 1}
    lines = []
    for one in simulated:
        of_one = one["tokens_per_second"] / alone[one["chats"] // one["replicas"]]
        lines.append(one | {"how": "by prefix" if one["by_prefix"] else "by load", "of_one": of_one})
    columns = {
        "replicas": "{replicas}", "chats": "{chats:,}", "handed out": "{how}", "tok/s": "{tokens_per_second:,.0f}",
        "of one replica": "{of_one:.1f}x", "first token": "{first_token_ms:,.0f} ms",
        "95 % of them": "{first_token_p95_ms:,.0f} ms", "tokens from caches": "{cached_share:.0%}",
    }  # fmt: skip
    return lines_table(columns, lines)


def run(file: str | None) -> None:
    """Simulate, and print the table."""
    times = Times(read_json_lines(STEPS), read_json_lines(PROMPTS))
    cases = [(count, crowd, by) for crowd in CROWDS for by in (True, False) for count in COUNTS if by or count > 1]
    records = [simulate(count, crowd, times, by) for count, crowd, by in cases]
    if file:
        Path(file).unlink(missing_ok=True)
        append_json_lines(Path(file), *records)
    print(scale_table(records))


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = command_parser("scripts.scale", __doc__)
    parser.add_argument("--json", metavar="FILE", help="write the records, too")
    args = parser.parse_args(argv)
    return run_command(lambda: run(args.json), args.debug)


if __name__ == "__main__":
    raise SystemExit(main())
