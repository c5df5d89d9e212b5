"""Measuring arms in turn: warm-up, interleaved runs, what counts of their tokens, and the cost of a step.

benchmarks/README.md is the contract that the numbers keep, and it says what every field of a run line means.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bench.arms import NO_STOP, Arm, EngineArm, Sample, shown
from bench.environment import memory_of
from bench.suites import Prompts, Question
from engine import Engine
from report.prove import is_rounding_tie
from sampling import SamplingParams
from step import draft_input
from support.machine import peak_memory, resident_memory, synchronize

Line = dict[str, Any]  # a run line of the JSON


def counted(ids: list[int], steps: list[int] | None, stop_ids: Iterable[int]) -> tuple[list[int], list[int] | None]:
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
    """A short hash of token ids."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]


def first_fork(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first difference; None when equal. A proper prefix forks at its end."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return None if at == len(a) == len(b) else at


@dataclass
class Settings:
    """What one measurement is made of. Every field ends up in the JSON."""

    temperatures: tuple[float, ...] = (0.0,)
    max_new_tokens: int = 64
    reps: int = 2
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    ignore_eos: bool = False
    warmup_runs: int = 4
    max_seconds: float = 0.0  # past it no repetition starts, nor a question of the first one; 0: no limit
    tie_margin: float | None = None  # distance of sampling keys under which a fork is a near-tie
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

    def is_tie(self, margin: float, ulps: float) -> bool:
        """Whether a fork is rounding: by the rule of `--prove`, unless a `tie_margin` is set."""
        return is_rounding_tie(margin, ulps) if self.tie_margin is None else margin < self.tie_margin


def agree(rates: Sequence[float]) -> bool:
    """Whether the last two rates are within 1 % of each other."""
    return len(rates) > 1 and abs(rates[-1] / rates[-2] - 1) <= 0.01


@dataclass
class Bench:
    """Runs arms over questions, interleaved, and hands every run to `emit` as a dictionary of plain values."""

    arms: list[Arm]
    questions: list[Question]
    prompts: Prompts
    settings: Settings
    stop_ids: tuple[int, ...]
    ctx: int
    emit: Callable[[Line], None] = lambda line: None
    progress: Callable[[float, str], None] = lambda share, text: None
    environment: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)  # turns that did not fit the context
    margins: dict[tuple, tuple[float, float]] = field(default_factory=dict)  # of forks that were judged
    cut: str = ""  # where `max_seconds` ended the first repetition

    def warm_up(self) -> list[dict[str, Any]]:
        """Run every arm at every temperature on the first prompt until two runs agree within 1 %.

        That is at most `warmup_runs` times, and once only when a third of `max_seconds` is gone.
        """
        s, notes, began = self.settings, [], time.perf_counter()
        prompts = [self.prompts.first(question) for question in self.questions]
        for i, (arm, T) in enumerate((a, t) for a in self.arms for t in s.temperatures):
            total = len(self.arms) * len(s.temperatures)
            self.progress(0.0, f"warm-up {arm.name}, T = {T:g}  ({i + 1} of {total})")
            params = s.params(T, 0, self.stop_ids)
            arm.run(max(prompts, key=len), replace(params, max_new_tokens=min(4, s.max_new_tokens)))
            rates: list[float] = []
            while len(rates) < s.warmup_runs and not agree(rates):
                sample = arm.run(prompts[0], params)
                rates.append(len(sample.token_ids) / (sample.ttft_seconds + sample.decode_seconds))
                if s.max_seconds and time.perf_counter() - began > s.max_seconds / 3:
                    break
            note = {"arm": arm.name, "temperature": T, "tokens_per_second": rates}
            notes.append(note | {"agreed": agree(rates)})
        return notes

    def measure(self) -> Iterator[Line]:
        """Every run as a line, repetitions outermost. The order of the arms rotates from prompt to prompt.

        Past `max_seconds` the first repetition ends with the question at hand, and `cut` says after how many.
        """
        s, started = self.settings, time.perf_counter()
        total = s.reps * len(s.temperatures) * sum(len(q.turns) for q in self.questions)
        done = 0
        for rep in range(s.reps):
            spent = time.perf_counter() - started
            if rep and s.max_seconds and (self.cut or spent + spent / rep > s.max_seconds):
                break
            for number, question in enumerate(self.questions):
                late = s.max_seconds and time.perf_counter() - started > s.max_seconds
                if late and rep == 0 and number:
                    self.cut = f"--max-seconds {s.max_seconds:g}: {number} of {len(self.questions)} questions"
                    break
                for T in s.temperatures:
                    what = f"{question.suite} {question.id}, T = {T:g}, repetition {rep + 1} of {s.reps}"
                    answers: list[str] = []
                    for _ in question.turns:
                        self._show(what, done, total, time.perf_counter() - started)
                        done += 1
                        lines = self._turn(question, answers, T, rep, done)
                        if not lines:
                            break
                        yield from lines

    def _show(self, what: str, done: int, total: int, spent: float) -> None:
        """Report the progress, with the seconds that are left."""
        if done:
            left = spent / done * (total - done)
            if self.settings.max_seconds:
                left = min(left, max(0.0, self.settings.max_seconds - spent))
            what += f", {left:.0f} s left"
        self.progress(done / total, what)

    def _turn(self, question: Question, answers: list[str], T: float, rep: int, rotate: int) -> list[Line]:
        """The lines of one prompt through all arms; none if the prompt does not fit.

        `answers` are plain decoding's to the turns before, and its answer to this one is appended.
        """
        s, turn = self.settings, len(answers) + 1
        prompt = self.prompts.ids(question.turns[:turn], answers)
        if len(prompt) + s.max_new_tokens > self.ctx:
            note = f"{question.suite} {question.id} turn {turn}: {len(prompt)} tokens + {s.max_new_tokens}"
            if note not in self.skipped:
                self.skipped.append(note)
            return []
        params = s.params(T, rep, self.stop_ids)
        order = [(i + rotate) % len(self.arms) for i in range(len(self.arms))]
        runs = {i: run_with_peak(self.arms[i], prompt, params) for i in order}
        plain = counted(runs[0][0].token_ids, None, params.stop_ids)[0]
        asked = {
            "type": "run",
            "suite": question.suite,
            "question": question.id,
            "turn": turn,
            "prompt_sha256": digest(prompt),
            "prompt_tokens": len(prompt),
        }
        lines = []
        for place, (i, (sample, peak)) in enumerate(runs.items()):
            line = asked | self._line(i, sample, params, prompt, plain)
            line |= {
                "rep": rep,
                "order": place,
                "working_bytes": peak,
                "resident_bytes": resident_memory(),
                "random_weights": s.random_weights,
                "environment": self.environment,
            }
            self.emit(line)
            lines.append(line)
        answers.append(runs[0][0].text)
        return lines

    def _line(self, i: int, sample: Sample, params: SamplingParams, prompt: list[int], plain: list[int]) -> Line:
        """What a run line says of arm i's run; `plain` are the ids of plain decoding."""
        arm = self.arms[i]
        ids, steps = counted(sample.token_ids, sample.tokens_per_step, params.stop_ids)
        same, fork, margin, ulps = self._judge(prompt, plain, ids, params)
        return {
            "arm": arm.name,
            "label": arm.label,
            "depth": arm.engine.drafter.D if isinstance(arm, EngineArm) else None,
            "baseline": i == 0,
            "temperature": params.temperature,
            "seed": params.seed,
            "new_tokens": len(ids),
            "ids_sha256": digest(ids),
            "stopped": bool(ids) and ids[-1] in params.stop_ids,
            "ttft_seconds": sample.ttft_seconds,
            "decode_seconds": sample.decode_seconds,
            "tokens_per_step": steps,
            "cached_tokens": sample.cached_tokens,
            "same": same if i else None,
            "fork": fork,
            "margin": margin,
            "margin_ulps": ulps,
        }

    def _judge(
        self, prompt: list[int], plain: list[int], ids: list[int], params: SamplingParams
    ) -> tuple[str, int | None, float | None, float | None]:
        """(`same`, `tie` or `differs`; where the ids fork; margin and ulps there, None if one text is a prefix)."""
        fork = first_fork(plain, ids)
        if fork is None:
            return "same", None, None, None
        baseline = self.arms[0]
        if fork >= min(len(plain), len(ids)) or not isinstance(baseline, EngineArm):
            return "differs", fork, None, None
        key = (digest(prompt), fork, plain[fork], ids[fork], params.seed, params.temperature)
        if key not in self.margins:
            text = [*prompt, *plain[:fork]]
            self.margins[key] = baseline.engine.margin(0, text, len(prompt), params, plain[fork], ids[fork])
        margin, ulps = self.margins[key]
        return "tie" if self.settings.is_tie(margin, ulps) else "differs", fork, margin, ulps


def run_with_peak(arm: Arm, prompt: list[int], params: SamplingParams) -> tuple[Sample, int | None]:
    """A run, and on a GPU the peak of its memory above what was allocated before."""
    if not isinstance(arm, EngineArm) or arm.engine.model.device.type != "cuda":
        return arm.run(prompt, params), None
    device = arm.engine.model.device
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    sample = arm.run(prompt, params)
    return sample, peak_memory(device) - before


# ---- the cost of a step -----------------------------------------------------------------------------------


def timed_in_turn(calls: Mapping[Any, Callable[[], Any]], rounds: int, device: torch.device) -> dict[Any, list[float]]:
    """Seconds of every call, `rounds` times in turn, after two rounds that warm up."""
    times: dict[Any, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 2):
        for name, call in calls.items():
            synchronize(device)
            started = time.perf_counter()
            call()
            synchronize(device)
            if i > 1:
                times[name].append(time.perf_counter() - started)
    return times


@torch.inference_mode()
def draft_share(engine: Engine, rounds: int = 9) -> tuple[float, float | None]:
    """(median seconds of `drafter.draft` alone, its share of a whole step timed in turn with it).

    Runs on the state that the last request left. That request has finished, so the steps change nothing. Of a compiled
    engine only the draft is timed, with its parts compiled too, and the share is None.
    """
    drafter = engine.drafter
    if drafter.D == 0:
        return 0.0, 0.0
    mode = SamplingParams().mode
    inputs = draft_input(engine.state, mode, parts=engine.parts)
    calls: dict[str, Callable[[], Any]] = {"draft": lambda: drafter.draft(inputs)}
    if not engine.compiled:
        calls["step"] = lambda: engine.step(mode)
    with engine.backend.active():
        times = timed_in_turn(calls, rounds, engine.model.device)
    alone = statistics.median(times["draft"])
    if engine.compiled:
        return alone, None
    pairs = zip(times["draft"], times["step"], strict=True)
    return alone, min(1.0, statistics.median(draft / step for draft, step in pairs))


def step_bytes(engine: Engine, context: int) -> float:
    """Bytes that a step has to read: weights, keys and values at `context`, and what the draft reads."""
    model, drafter = engine.model, engine.drafter
    return model.weight_bytes(drafter.N) + model.kv_bytes(context) + drafter.bytes_per_step(model)


def arm_facts(arms: list[Arm]) -> list[dict[str, Any]]:
    """Options, tree size, draft time and memory of every arm. Call it after the warm-up."""
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
