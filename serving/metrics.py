"""The figures of a server, in the form of Prometheus."""

from collections import Counter
from collections.abc import Collection, Sequence

from engine.results import GenerationResult
from serving.scheduler import Scheduler

ABOUT = {
    "requests_total": "counter: requests answered, by path and status",
    "cancelled_total": "counter: requests whose client went away before the end",
    "slow_clients_total": "counter: streams given up because their client took nothing for too long",
    "prompt_tokens_total": "counter: tokens of prompts",
    "cached_tokens_total": "counter: those of them that the caches held",
    "generated_tokens_total": "counter: tokens generated",
    "steps_total": "counter: forwards of the model while decoding",
    "draft_steps_total": "counter: those of them that checked a draft",
    "draft_step_tokens_total": "counter: tokens that these gave; divided by draft_steps_total this is tau",
    "prefill_seconds_total": "counter: time spent reading prompts",
    "decode_seconds_total": "counter: time spent decoding",
    "requests_running": "gauge: requests that have a slot",
    "requests_waiting": "gauge: requests that wait for one",
    "slots": "gauge: requests that can be decoded together",
    "slots_tokens": "gauge: tokens of prompts and answers under way that their caches hold",
    "slots_tokens_max": "gauge: tokens that the caches have room for",
    "tokens_per_second": "gauge: tokens that the requests under way get in a second, all together",
    "prompt_cache_entries": "gauge: texts whose caches are kept",
    "prompt_cache_bytes": "gauge: bytes that they take in memory",
    "prompt_cache_disk_bytes": "gauge: bytes that they take on disk",
    "prompt_cache_hits_total": "counter: requests that went on from one of them",
    "replica_up": "gauge: whether a replica is ready",
    "replica_deaths_total": "counter: how often it has died",
    "replica_requests_total": "counter: requests that it got",
    "replica_prefix_hits_total": "counter: those of them that it got because it had seen the beginning of their prompt",
    "queue_seconds": "histogram: time that a request waited",
    "time_to_first_token_seconds": "histogram: time from a request to its first token",
    "time_between_tokens_seconds": "histogram: mean time between two tokens of an answer",
}
BUCKETS = "0.001 0.0025 0.005 0.01 0.025 0.05 0.1 0.25 0.5 1 2.5 5 10 30 60 +Inf".split()  # seconds


class Histogram:
    """How many times were at most as long as each of BUCKETS."""

    def __init__(self) -> None:
        self.counts = [0] * len(BUCKETS)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count a time."""
        self.counts = [count + (seconds <= float(limit)) for count, limit in zip(self.counts, BUCKETS, strict=True)]
        self.total += seconds

    def lines(self, name: str) -> list[str]:
        """The figures in Prometheus' text format."""
        buckets = [f'{name}_bucket{{le="{limit}"}} {count}' for limit, count in zip(BUCKETS, self.counts, strict=True)]
        return [*buckets, f"{name}_sum {self.total}", f"{name}_count {self.counts[-1]}"]


class Metrics:
    """What was counted since the start. Only the event loop's thread changes it."""

    def __init__(self, paths: Collection[str]):
        """paths: of the endpoints."""
        self.paths = paths
        self.requests: Counter[tuple[str, int]] = Counter()
        self.counts: Counter[str] = Counter()
        self.times = {name: Histogram() for name, about in ABOUT.items() if about.startswith("histogram")}

    def answered(self, path: str, status: int) -> None:
        """Count an answer. Paths that do not exist share one name, because clients could invent any number."""
        self.requests[path if path in self.paths else "other", status] += 1

    def decoded(self, results: Sequence[GenerationResult], queue_seconds: float) -> None:
        """Count what a request made."""
        if results:
            self.times["queue_seconds"].add(queue_seconds)
            self.times["time_to_first_token_seconds"].add(queue_seconds + results[0].prefill_seconds)
        for result in results:
            if result.new_tokens > 1:
                self.times["time_between_tokens_seconds"].add(result.decode_seconds / (result.new_tokens - 1))
            for name in ("prompt_tokens", "cached_tokens", "steps", "prefill_seconds", "decode_seconds"):
                self.counts[f"{name}_total"] += getattr(result, name)
            self.counts["generated_tokens_total"] += result.new_tokens
            self.counts["draft_steps_total"] += len(result.drafted)
            self.counts["draft_step_tokens_total"] += sum(result.drafted)

    def text(self, scheduler: Scheduler) -> str:
        """All figures in Prometheus' text format."""
        now = dict(self.counts) | {"requests_running": scheduler.running, "requests_waiting": scheduler.waiting}
        series = {"": now | {"tokens_per_second": scheduler.tokens_per_second}}
        for (path, status), number in sorted(self.requests.items()):
            series[f'{{path="{path}",status="{status}"}}'] = {"requests_total": number}
        for labels, figures in scheduler.engine.figures().items():
            series[labels] = series.get(labels, {}) | figures
        lines: list[str] = []
        for name, about in ABOUT.items():
            told = [f"eaglet_{name}{labels} {figures[name]}" for labels, figures in series.items() if name in figures]
            if name in self.times:
                told = self.times[name].lines(f"eaglet_{name}")
            elif not told and not name.startswith(("replica_", "requests_")):
                told = [f"eaglet_{name} 0"]
            if told:
                kind, _, words = about.partition(": ")
                lines += [f"# HELP eaglet_{name} {words}", f"# TYPE eaglet_{name} {kind}", *told]
        return "\n".join(lines) + "\n"
