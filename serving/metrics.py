"""Counters of a server, as text that Prometheus reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from runtime.prompt_cache import PromptCache
from runtime.results import GenerationResult
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
    "requests_running": "gauge: requests that decode now, 0 or 1",
    "requests_waiting": "gauge: requests that wait",
    "prompt_cache_entries": "gauge: texts whose caches are kept",
    "prompt_cache_bytes": "gauge: bytes that they take in memory",
    "prompt_cache_disk_bytes": "gauge: bytes that they take on disk",
    "prompt_cache_hits_total": "counter: requests that went on from one of them",
}
PATHS = ("/", "/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/responses")


class Metrics:
    """What was counted since the start. Only the event loop's thread changes it."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.counts: Counter[str] = Counter()

    def answered(self, path: str, status: int) -> None:
        """Count an answer. Paths that do not exist share one name, because clients could invent any number."""
        self.requests[path if path in PATHS else "other", status] += 1

    def decoded(self, results: Iterable[GenerationResult]) -> None:
        """Count what a request made."""
        for result in results:
            self.counts["prompt_tokens_total"] += result.prompt_tokens
            self.counts["cached_tokens_total"] += result.cached_tokens
            self.counts["generated_tokens_total"] += result.new_tokens
            self.counts["steps_total"] += result.steps
            self.counts["draft_steps_total"] += len(result.drafted)
            self.counts["draft_step_tokens_total"] += sum(result.drafted)
            self.counts["prefill_seconds_total"] += result.prefill_seconds
            self.counts["decode_seconds_total"] += result.decode_seconds

    def text(self, scheduler: Scheduler, cache: PromptCache) -> str:
        """All figures in Prometheus' text format."""
        now = dict(self.counts) | {"requests_running": scheduler.running, "requests_waiting": scheduler.waiting}
        now |= {"prompt_cache_entries": len(cache.entries), "prompt_cache_hits_total": cache.hits}
        now |= {"prompt_cache_bytes": cache.held_bytes, "prompt_cache_disk_bytes": cache.disk_bytes}
        lines: list[str] = []
        for name, about in ABOUT.items():
            kind, _, words = about.partition(": ")
            lines += [f"# HELP eaglet_{name} {words}", f"# TYPE eaglet_{name} {kind}"]
            if name == "requests_total":
                counts = sorted(self.requests.items())
                lines += [f'eaglet_{name}{{path="{path}",status="{status}"}} {n}' for (path, status), n in counts]
            else:
                lines.append(f"eaglet_{name} {now.get(name, 0)}")
        return "\n".join(lines) + "\n"
