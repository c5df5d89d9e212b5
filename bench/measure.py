"""TODO."""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bench.arms import NO_STOP, Arm, EngineArm, Sample, shown, synchronize
from bench.environment import memory_of, resident_bytes
from bench.suites import Prompts, Question
from drafters.base import DraftInput
from engine import Engine
from runtime.compiled import CompiledStep
from sampling import SamplingParams
from step import accept_and_commit, decode_step

TIE = 1e-4  # logit margin under which a float32 fork is rounding (DESIGN section 4)


def counted(
    ids: list[int], steps: list[int] | None, stop_ids: Iterable[int]
) -> tuple[list[int], list[int] | None]:
    """ids up to and including the first stop id, and the steps cut to match (the first id comes from the prompt)."""
    stops = set(stop_ids)
    end = next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids))
    if steps is None:
        return ids[:end], None
    left, kept = end - 1, []
    for count in steps:
        if left <= 0:
            break
        kept.append(min(count, left))
        left -= kept[-1]
    return ids[:end], kept


def digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]


def first_fork(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first difference; None when equal. A proper prefix forks at its end."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return None if at == len(a) == len(b) else at


@dataclass
class Settings:
    """What one measurement is made of; everything here ends up in the JSON."""

    temperatures: tuple[float, ...] = (0.0,)
    max_new_tokens: int = 64
    reps: int = 2
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    ignore_eos: bool = False
    warmup_runs: int = 4
    max_seconds: float = (
        0.0  # no repetition (of the first: no question) starts that would end later; 0: no limit
    )
    tie_margin: float = TIE
    allow_diff: bool = False
    synthetic_tau: float = 0.0
    random_weights: bool = False

    def params(self, temperature: float, rep: int, stop_ids: tuple[int, ...]) -> SamplingParams:
        """Repetition r draws with seed + r, so that sampling sees several texts; greedy repeats the same one."""
        return SamplingParams(
            temperature=temperature,
            top_k=self.top_k if temperature else 0,
            top_p=self.top_p if temperature else 1.0,
            seed=self.seed + rep,
            max_new_tokens=self.max_new_tokens,
            stop_ids=NO_STOP if self.ignore_eos else stop_ids,
        )


@dataclass
class Bench:
    """Runs arms over questions, interleaved, and hands every run to `emit` as a dictionary of plain values."""

    arms: list[Arm]
    questions: list[Question]
    prompts: Prompts
    settings: Settings
    stop_ids: tuple[int, ...]
    ctx: int
    emit: Callable[[dict[str, Any]], None] = lambda line: None
    progress: Callable[[float, str], None] = lambda share, text: None
    environment: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    margins: dict[tuple, float] = field(default_factory=dict)
    cut: str = ""

    def warm_up(self) -> list[dict[str, Any]]:
        """Per arm and temperature: the first prompt until two runs agree within 1 %, at most `warmup_runs` times, and
        once only when a third of `max_seconds` is gone."""
        s, notes, began = self.settings, [], time.perf_counter()
        first, longest = self._extremes()
        for i, (arm, T) in enumerate((a, t) for a in self.arms for t in s.temperatures):
            self.progress(
                0.0, f"warm-up {arm.name}, T = {T:g}  ({i + 1} of {len(self.arms) * len(s.temperatures)})"
            )
            params = s.params(T, 0, self.stop_ids)
            arm.run(longest, replace(params, max_new_tokens=min(4, s.max_new_tokens)))
            rates: list[float] = []
            while len(rates) < s.warmup_runs:
                sample = arm.run(first, params)
                seconds = sample.ttft_seconds + sample.decode_seconds
                rates.append(len(sample.token_ids) / seconds)
                if len(rates) > 1 and abs(rates[-1] / rates[-2] - 1) <= 0.01:
                    break
                if s.max_seconds and time.perf_counter() - began > s.max_seconds / 3:
                    break
            agreed = len(rates) > 1 and abs(rates[-1] / rates[-2] - 1) <= 0.01
            notes.append({"arm": arm.name, "temperature": T, "tokens_per_second": rates, "agreed": agreed})
        return notes

    def _extremes(self) -> tuple[list[int], list[int]]:
        prompts = [self.prompts.ids(q.turns[:1], []) for q in self.questions]
        return prompts[0], max(prompts, key=len)

    def measure(self) -> Iterator[dict[str, Any]]:
        """Every run as a line, repetitions outermost; the order of the arms rotates from prompt to prompt. Past
        `max_seconds` the first repetition ends with the question at hand, and `cut` says after how many."""
        s, started = self.settings, time.perf_counter()
        total = s.reps * len(s.temperatures) * sum(len(q.turns) for q in self.questions)
        done = 0
        for rep in range(s.reps):
            spent = time.perf_counter() - started
            if rep and s.max_seconds and (self.cut or spent + spent / rep > s.max_seconds):
                break
            for number, question in enumerate(self.questions):
                if rep == 0 and number and s.max_seconds and time.perf_counter() - started > s.max_seconds:
                    self.cut = f"--max-seconds {s.max_seconds:g}: {number} of {len(self.questions)} questions"
                    break
                for T in s.temperatures:
                    answers: list[str] = []
                    for turn in range(len(question.turns)):
                        left = ""
                        if done:
                            seconds = (time.perf_counter() - started) / done * (total - done)
                            if s.max_seconds:
                                seconds = min(
                                    seconds, max(0.0, s.max_seconds - time.perf_counter() + started)
                                )
                            left = f", {seconds:.0f} s left"
                        what = f"{question.suite} {question.id}, T = {T:g}, repetition {rep + 1} of {s.reps}"
                        self.progress(done / total, what + left)
                        done += 1
                        lines = self._turn(question, turn, answers, T, rep, done)
                        if lines is None:
                            break
                        answers.append(lines.pop())
                        yield from lines

    def _turn(self, question: Question, turn: int, answers: list[str], T: float, rep: int, rotate: int):
        """One prompt through all arms: their lines and, last, the baseline's text (the history of the next turn)."""
        s = self.settings
        prompt = self.prompts.ids(question.turns[: turn + 1], answers)
        if len(prompt) + s.max_new_tokens > self.ctx:
            note = (
                f"{question.suite} {question.id} turn {turn + 1}: {len(prompt)} tokens + {s.max_new_tokens}"
            )
            if note not in self.skipped:
                self.skipped.append(note)
            return None
        params = s.params(T, rep, self.stop_ids)
        order = [(i + rotate) % len(self.arms) for i in range(len(self.arms))]
        samples: dict[int, Sample] = {}
        peaks: dict[int, int | None] = {}
        for i in order:
            device = self._device(i)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
            samples[i] = self.arms[i].run(prompt, params)
            cuda = device.type == "cuda"
            peaks[i] = torch.cuda.max_memory_allocated(device) - before if cuda else None
        base = counted(samples[0].token_ids, None, params.stop_ids)[0]
        lines: list[Any] = []
        for place, i in enumerate(order):
            arm, sample = self.arms[i], samples[i]
            ids, steps = counted(sample.token_ids, sample.tokens_per_step, params.stop_ids)
            fork = None if i == 0 else first_fork(base, ids)
            margin = None if fork is None else self._margin(prompt, base, ids, fork, params)
            same = (
                None if i == 0 else "same" if fork is None else "tie" if margin < s.tie_margin else "differs"
            )
            lines.append(
                {
                    "type": "run",
                    "suite": question.suite,
                    "question": question.id,
                    "turn": turn + 1,
                    "prompt_sha256": digest(prompt),
                    "prompt_tokens": len(prompt),
                    "arm": arm.name,
                    "label": arm.label,
                    "depth": arm.engine.drafter.D if isinstance(arm, EngineArm) else None,
                    "baseline": i == 0,
                    "temperature": T,
                    "seed": params.seed,
                    "rep": rep,
                    "order": place,
                    "new_tokens": len(ids),
                    "ids_sha256": digest(ids),
                    "stopped": bool(ids) and ids[-1] in params.stop_ids,
                    "ttft_seconds": sample.ttft_seconds,
                    "decode_seconds": sample.decode_seconds,
                    "tokens_per_step": steps,
                    "cached_tokens": sample.cached_tokens,
                    "same": same,
                    "fork": fork,
                    "margin": None if margin is None or math.isinf(margin) else margin,
                    "working_bytes": peaks[i],
                    "resident_bytes": resident_bytes(),
                    "random_weights": s.random_weights,
                    "environment": self.environment,
                }
            )
            self.emit(lines[-1])
        return [*lines, samples[0].text]

    def _device(self, i: int) -> torch.device:
        arm = self.arms[i]
        return arm.engine.model.device if isinstance(arm, EngineArm) else torch.device("cpu")

    def _margin(self, prompt, base: list[int], ids: list[int], fork: int, params: SamplingParams) -> float:
        """Distance of the two tokens' sampling keys at the fork; infinite when one text is a prefix of the other."""
        plain = self.arms[0]
        if fork >= min(len(base), len(ids)) or not isinstance(plain, EngineArm):
            return math.inf
        key = (digest(prompt), fork, base[fork], ids[fork], params.seed, params.temperature)
        if key not in self.margins:
            text = [*prompt, *base[:fork]]
            self.margins[key], _ = plain.engine.margin(0, text, len(prompt), params, base[fork], ids[fork])
        return self.margins[key]


def draft_share(engine: Engine, repeats: int = 9) -> tuple[float, float | None]:
    """(median seconds of `drafter.draft` alone, its share of a whole step timed in turn with it).

    Runs on the state that the last request left; that request has finished, so the steps change nothing. Of a compiled
    engine only the draft is timed, its parts compiled too, and the share is None: the table divides by the measured step.
    """
    drafter, state, device = engine.drafter, engine.state, engine.model.device
    if drafter.D == 0:
        return 0.0, 0.0
    mode = SamplingParams().mode
    names = {"state": state.sampling, "mode": mode, "noise": None}
    request = DraftInput(
        *(names[name] if name in names else getattr(state, name) for name in DraftInput._fields)
    )
    run = (
        CompiledStep(engine.model, drafter, decode_step, accept_and_commit).call
        if engine.compiled
        else lambda f, *a: f(*a)
    )
    calls = [lambda: run(drafter.draft, request)]
    if not engine.compiled:
        calls.append(lambda: decode_step(engine.model, drafter, state, mode))
    parts: list[list[float]] = [[] for _ in calls]
    with torch.inference_mode(), engine.backend.active():
        for i in range(repeats + 2):
            for samples, call in zip(parts, calls, strict=True):
                synchronize(device)
                started = time.perf_counter()
                call()
                synchronize(device)
                if i > 1:
                    samples.append(time.perf_counter() - started)
    alone = statistics.median(parts[0])
    if engine.compiled:
        return alone, None
    return alone, min(1.0, statistics.median(d / s for d, s in zip(*parts, strict=True)))


def step_bytes(engine: Engine, context: int) -> float:
    """Bytes a step has to read: weights, keys and values at `context`, and what the draft reads."""
    model, drafter = engine.model, engine.drafter
    drafted = drafter.bytes_per_step(model) if hasattr(drafter, "bytes_per_step") else 0.0
    return model.weight_bytes(drafter.N) + model.kv_bytes(context) + drafted


def arm_facts(arms: list[Arm]) -> list[dict[str, Any]]:
    """Per arm: options, tree size, draft time, memory, bytes per step. Run it after the warm-up."""
    facts = []
    for arm in arms:
        fact: dict[str, Any] = {"arm": arm.name, "label": arm.label, "options": shown(arm.options)}
        if isinstance(arm, EngineArm):
            engine = arm.engine
            alone, share = draft_share(engine)
            fact |= {
                "nodes": engine.drafter.N,
                "depth": engine.drafter.D,
                "compiled": engine.compiled,
                "draft_seconds": alone,
                "draft_share": share,
                "memory_bytes": memory_of(engine),
            }
        facts.append(fact)
    return facts
