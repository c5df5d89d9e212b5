"""The time of a whole step, whatever is accepted: by arm, number of nodes, batch and context (`scripts.bench --steps`).

The context stays fixed: before every timed step, outside the timed part, the sequences are set back to it. On a GPU a
step is one replay of a CUDA graph between CUDA events. On a CPU it is a call by the host's clock. Afterwards a profiler
runs a few more steps and says which kernels the time went to.
"""

import argparse
import random
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from bench.arms import Arm, Arrivals, build_engine
from bench.measure import step_bytes
from bench.records import Line
from decoding.params import SamplingParams
from engine.engine import Engine
from engine.runner import capture_graph
from support.machine import seconds, synchronize

QUIET = 0.05  # seconds in which the threads of the engine before fall asleep
CLIENT_ROUNDS = 5
SLACK = 8  # free tokens behind the context
ROUNDS = 15
PROFILED = 5  # steps under the profiler
LONGEST = 24  # of the kernels that a line names


def numbers(text: str) -> list[int]:
    """An argparse type: a list such as 1,8,60."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) < 1 << 20 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r:.40}: expected numbers like 1,8,60")
    return [int(part) for part in parts]


def captured(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """`call` as a CUDA graph: the same work without the host's part. On a CPU it is `call` itself.

    Raises RuntimeError for a call that cannot be captured.
    """
    return capture_graph(call, warm_up=2)[0].replay if device.type == "cuda" else call


class Ready:
    """An engine whose step can be timed: a call that does not wait for the device, behind whatever `Engine.pin` says."""

    def __init__(self, engine: Engine, context: int):
        engine.fill()
        engine.pin(context)
        self.engine, self.device = engine, engine.model.device
        self.step = captured(partial(engine.step, SamplingParams().mode), self.device)

    def time(self, context: int) -> float:
        """Milliseconds of one step behind `context` tokens."""
        synchronize(self.device)
        with self.engine.backend.active():
            self.engine.pin(context)
            return 1e3 * seconds(self.step, self.device)

    def kernel_times(self, context: int) -> dict[str, float]:
        """Microseconds per step by the kernel's name, or the operator's on a CPU, the longest first.

        What sets the sequences back counts, too. Empty where the profiler sees nothing, as where a driver forbids it.
        """
        cuda = self.device.type == "cuda"
        kinds = [torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU]
        with self.engine.backend.active(), torch.profiler.profile(activities=kinds) as profile:
            for _ in range(PROFILED):
                self.engine.pin(context)
                self.step()
            synchronize(self.device)
        times = {e.key: e.self_device_time_total if cuda else e.self_cpu_time_total for e in profile.key_averages()}
        longest = sorted(times.items(), key=lambda item: -item[1])[:LONGEST]
        return {name[:80]: round(time_ / PROFILED, 2) for name, time_ in longest if time_ > 0}


@torch.inference_mode()
def step_lines(
    arms: Sequence[Arm], contexts: Sequence[int], widths: Sequence[int], batches: Sequence[int], ctx: int,
    bandwidth: float,
) -> Iterator[Line]:  # fmt: skip
    """A line per engine, batch and context as soon as it is timed, and after it one with the time of every kernel.

    Each engine is built when its turn comes, and timed in turn with plain decoding, the first arm, to which its ratio
    refers. The medians of ROUNDS count. An engine that fails gives a line that says so, and the others follow.

    ctx: allocated tokens. bandwidth: of a copy, in bytes per second.
    """
    ours = [arm for arm in arms if arm.engine]
    wide = [(f"plain, {width} nodes", ours[0], width) for width in widths]
    for batch in batches:
        plain: Ready | None = None
        for name, arm, width in [(arm.name, arm, 0) for arm in ours] + wide:
            place = {"arm": name, "batch": batch}
            try:
                engine = plain.engine.twin(width) if plain and width else arm.engine
                if engine.batch_size != batch:
                    engine = build_engine(engine, arm.options | {"slots": batch}, ctx)
                with engine.backend.active():
                    ready = Ready(engine, contexts[0])
                plain = plain or ready
                for context in contexts:
                    yield {"type": "step"} | _timed(ready, plain, place | {"context": context}, bandwidth)
                    kernels = ready.kernel_times(context)
                    yield {"type": "kernels", **place, "context": context, "microseconds": kernels}
            except Exception as error:  # of any library: what the other arms can tell must not be lost
                if plain is None:
                    raise
                traceback.print_exc()
                yield {"type": "failed", **place, "error": f"{type(error).__name__}: {error}"[:500]}


def decoding_rate(arrivals: Arrivals) -> float:
    """Tokens per second from the moment on when all requests had a first token, until the first one was complete."""
    ready, end = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
    late = sum(ready < t <= end for times in arrivals for t in times)
    return late / (end - ready) if end > ready else 0.0


def client_lines(
    arms: Sequence[Arm], clients: Sequence[int], lengths: Sequence[int], text: list[int], params: SamplingParams
) -> Iterator[Line]:
    """A line per arm, number of clients and length of their prompts: their tokens per second, and when their text begins.

    All begin at once. The cases are timed in random order, CLIENT_ROUNDS times, and medians count. The ratio is to the
    first arm with the first number of clients, behind prompts of the same length. Arms that cannot decode together are
    left out.

    lengths: tokens of each client's prompt. text: ids of which every client gets a part of its own.
    """
    longest = max(lengths) + params.max_new_tokens
    runs = {(arm.name, count): run for arm in arms for count in clients if (run := arm.together(count, longest))}
    cases = [(*pair, length) for length in lengths for pair in runs]
    rounds: dict[tuple[str, int, int], list[Arrivals]] = {case: [] for case in cases}
    for number in range(CLIENT_ROUNDS + 1):
        for name, count, length in random.sample(cases, len(cases)):
            whole = text * (1 + length * count // len(text))
            time.sleep(QUIET)
            arrivals = runs[name, count]([whole[length * i : length * (i + 1)] for i in range(count)], params)
            if number:  # the first one warms up
                rounds[name, count, length].append(arrivals)
    bases: dict[int, float] = {}
    for (name, count, length), taken in rounds.items():
        rates = sorted(map(decoding_rate, taken))
        rate = statistics.median(rates)
        firsts = [[times[0] for times in arrivals] for arrivals in taken]
        middle, last = (round(1e3 * statistics.median(map(of, firsts)), 1) for of in (statistics.median, max))
        whole = statistics.median(sum(map(len, arrivals)) / max(map(max, arrivals)) for arrivals in taken)
        yield {"type": "clients", "arm": name, "clients": count, "prompt_tokens": length} | {
            "new_tokens": params.max_new_tokens, "rounds": len(rates), "first_token_ms": middle,
            "last_first_token_ms": last, "tokens_per_second": round(rate, 1), "low": round(rates[0], 1),
            "high": round(rates[-1], 1), "of_one": round(rate / bases.setdefault(length, rate), 3),
            "with_prompts": round(whole, 1),
        }  # fmt: skip


def _timed(ready: Ready, plain: Ready, place: Line, bandwidth: float) -> Line:
    """Time an engine in turn with plain decoding."""
    pair = [ready] if ready is plain else [ready, plain]
    rounds = [[one.time(place["context"]) for one in pair] for _ in range(ROUNDS + 1)][1:]  # the first one warms up
    ordered, base = sorted(times[0] for times in rounds), statistics.median(times[-1] for times in rounds)
    engine, median = ready.engine, statistics.median(ordered)
    size = step_bytes(engine, place["context"])
    return place | {
        "nodes": engine.drafter.N, "depth": engine.drafter.D, "ms": round(median, 5),
        "p10": round(ordered[len(ordered) // 10], 5), "p90": round(ordered[-1 - len(ordered) // 10], 5),
        "rounds": len(ordered), "bytes": round(size), "share_of_copy": round(size / (median / 1e3) / bandwidth, 4),
        "of_plain": round(median / base, 4), "captured": engine.model.device.type == "cuda",
    }  # fmt: skip
