"""How fast decoding is beside processes that keep every core busy: by default, with one thread, and on an idle machine.

    python -m tests.busy [--rounds 7] [--only demo demo-eagle3 smollm2 smollm2-eagle3]

Every round times each engine three times, one after another: by default on the idle machine, then beside the busy
processes by default and with `--threads 1`. What counts is the median over rounds of the ratios within a round. The
machine has to be idle otherwise.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys

from bench.suites import find_model
from decoding.params import SamplingParams
from engine.load import load
from loading.options import DEMO

HEADS = {"demo-eagle3": "demo/eagle3", "smollm2-eagle3": "heads/smollm2-eagle3"}
KINDS = ("demo", "demo-eagle3", "smollm2", "smollm2-eagle3")
TOKENS = {"demo": 400, "smollm2": 160}


def child(kind: str, threads: int) -> None:
    """Load one engine and print the tokens per second of a request for every line on stdin. 0 threads: the default."""
    model = kind.partition("-")[0]
    checkpoint = DEMO if model == "demo" else find_model()
    engine = load(checkpoint, eagle=HEADS.get(kind), ctx=1024, device="cpu", threads=threads or None)
    text = "def main():\n    parser = argparse" if model == "demo" else "Once upon a time there was a river that"
    params = SamplingParams(max_new_tokens=TOKENS[model], stop_ids=(2**31 - 1,))
    for _ in sys.stdin:
        (result,) = engine.generate(engine.tokenizer.encode(text), params).run()
        print(json.dumps((result.new_tokens - 1) / result.decode_seconds), flush=True)


class Child:
    """A process with one engine. It sleeps until it is asked."""

    def __init__(self, kind: str, threads: int):
        words = [sys.executable, "-m", "tests.busy", "--child", kind, "--threads", str(threads)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(words, **pipes)
        self.speed()  # loads and warms up

    def speed(self) -> float:
        """Tokens per second of one request."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def spin() -> None:
    """Keep a core busy until the process is ended."""
    while True:
        sum(range(100_000))


def measure(kind: str, rounds: int, cores: int) -> str:
    """One line with the speeds of an engine and their ratios."""
    default, one = Child(kind, 0), Child(kind, 1)
    idle, busy, single = [], [], []
    for number in range(rounds):
        idle.append(default.speed())
        burners = [multiprocessing.Process(target=spin, daemon=True) for _ in range(cores)]
        for burner in burners:
            burner.start()
        for engine in (default, one):
            engine.speed()  # what the machine is like has to be noticed first
        pair = [(default, busy), (one, single)]
        for engine, speeds in pair if number % 2 else reversed(pair):
            speeds.append(engine.speed())
        for burner in burners:
            burner.kill()
            burner.join()
    for engine in (default, one):
        engine.process.stdin.close()
        engine.process.wait()
    of_one = statistics.median(a / b for a, b in zip(busy, single, strict=True))
    of_idle = statistics.median(a / b for a, b in zip(busy, idle, strict=True))
    speeds = "  ".join(f"{statistics.median(x):7.0f}" for x in (idle, busy, single))
    return f"{kind:15} {speeds}  of one thread {of_one:.2f}  of idle {of_idle:.2f}"


def main() -> None:
    """Print one line per engine: tokens per second idle, busy, busy with one thread, and the two ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--busy", type=int, default=multiprocessing.cpu_count(), help="processes that keep a core busy")
    parser.add_argument("--only", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--child", choices=KINDS)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.threads)
        return
    print(f"tokens/s: idle, beside {args.busy} busy processes, there with --threads 1")
    for kind in args.only:
        print(measure(kind, args.rounds, args.busy), flush=True)


if __name__ == "__main__":
    main()
