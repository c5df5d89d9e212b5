"""Measuring arms in turn: warm-up, interleaved runs, what counts of their tokens, and the cost of a step.

results/README.md is the contract that the numbers keep, and it says what every field of a line means.
"""

import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench.arms import Arm, Sample, shown
from bench.records import RESAMPLES, Line, Row, Settings, gpu_state, remarks, summarise
from bench.suites import Prompts, Question
from cli.prove import find_fork, is_bitwise, is_rounding_tie
from decoding.params import SamplingParams
from engine.engine import Engine
from support.machine import peak_memory, resident_memory
from support.progress import say
from weights.heads import read_card

CARD = ("inputs", "regenerated", "data", "loss", "parameters", "steps")  # what is kept of a head's CARD.json
KEPT = {"step": "steps", "clients": "clients", "failed": "failed"}  # where the summary has lines of these types
UNJUDGED: Line = dict.fromkeys(("same", "fork", "margin", "margin_ulps"))  # of the baseline, which is not compared


def counted(ids: list[int], steps: list[int] | None, stop_ids: Iterable[int]) -> tuple[list[int], list[int] | None]:
    """ids up to and including the first stop id, and the steps cut to match (the first id comes from the prompt)."""
    stops = set(stop_ids)
    end = next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids))
    if steps is None:
        return ids[:end], None
    begins = itertools.accumulate(steps, initial=1)  # where in the output each step begins
    return ids[:end], [min(count, end - at) for count, at in zip(steps, begins, strict=False) if at < end]


def digest(ids: Sequence[int]) -> str:
    """A short hash of token ids."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]


def agree(rates: Sequence[float]) -> bool:
    """Whether the last two rates are within 1 % of each other."""
    return len(rates) > 1 and abs(rates[-1] / rates[-2] - 1) <= 0.01


@dataclass
class Bench:
    """Runs arms over questions, interleaved, and says of every run what happened as a dictionary of plain values."""

    arms: list[Arm]
    questions: list[Question]
    prompts: Prompts
    settings: Settings
    stop_ids: tuple[int, ...]
    ctx: int
    progress: Callable[[float, str], None] = lambda share, text: None
    environment: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)  # turns that did not fit the context
    cut: str = ""  # where `max_seconds` ended the first repetition

    def warm_up(self) -> list[dict[str, Any]]:
        """Run every arm at every temperature on the first prompt until two runs agree within 1 %.

        That is at most `warmup_runs` times, and once only when a third of `max_seconds` is gone.
        """
        s, notes, began = self.settings, [], time.perf_counter()
        prompts = [self.prompts.first(question) for question in self.questions]
        for arm, T in itertools.product(self.arms, s.temperatures):
            self.progress(0.0, f"warm-up {arm.name}, T = {T:g}")
            params = s.params(T, 0, self.stop_ids)
            arm.run(max(prompts, key=len), replace(params, max_new_tokens=min(4, s.max_new_tokens)))
            rates: list[float] = []
            while len(rates) < s.warmup_runs and not agree(rates):
                sample = arm.run(prompts[0], params)
                rates.append(len(sample.token_ids) / (sample.ttft_seconds + sample.decode_seconds))
                if s.max_seconds and time.perf_counter() - began > s.max_seconds / 3:
                    break
            notes.append({"arm": arm.name, "temperature": T, "tokens_per_second": rates, "agreed": agree(rates)})
        return notes

    def measure(self) -> Iterator[Line]:
        """Every run as a line, repetitions outermost. The order of the arms rotates from prompt to prompt.

        Past `max_seconds` the first repetition ends with the question at hand, and `cut` says after how many.
        """
        s, started, done = self.settings, time.perf_counter(), 0
        limit = s.max_seconds or math.inf
        total = s.reps * len(s.temperatures) * sum(len(q.turns) for q in self.questions)
        for rep, (number, question) in itertools.product(range(s.reps), enumerate(self.questions)):
            spent = time.perf_counter() - started
            if rep and not number and spent + spent / rep > limit:
                return
            if number and not rep and spent > limit:
                self.cut = f"--max-seconds {limit:g}: {number} of {len(self.questions)} questions"
                return
            for T in s.temperatures:
                answers: list[str] = []
                for _ in question.turns:
                    what = f"{question.suite} {question.id}, T = {T:g}, repetition {rep + 1} of {s.reps}"
                    self.progress(done / total, what)
                    done += 1
                    yield from self._turn(question, answers, T, rep, done)

    def _turn(self, question: Question, answers: list[str], T: float, rep: int, rotate: int) -> Iterator[Line]:
        """The lines of one prompt through all arms; none if the prompt does not fit.

        `answers` are plain decoding's to the turns before, and its answer to this one is appended.
        """
        s, turn = self.settings, len(answers) + 1
        prompt = self.prompts.ids(question.turns[:turn], answers)
        if len(prompt) + s.max_new_tokens > self.ctx:
            need = f"{len(prompt)} tokens + {s.max_new_tokens}"
            self.skipped.append(f"{question.suite} {question.id} turn {turn}: {need}")
            return
        params = s.params(T, rep, self.stop_ids)
        order = [(i + rotate) % len(self.arms) for i in range(len(self.arms))]
        runs = {i: run_with_peak(self.arms[i], prompt, params) for i in order}
        plain = counted(runs[0][0].token_ids, None, params.stop_ids)[0]
        answers.append(runs[0][0].text)
        for place, (i, (sample, peak)) in enumerate(runs.items()):
            arm = self.arms[i]
            ids, steps = counted(sample.token_ids, sample.tokens_per_step, params.stop_ids)
            yield {
                "type": "run", "suite": question.suite, "question": question.id, "turn": turn,
                "prompt_sha256": digest(prompt), "prompt_tokens": len(prompt),
                "arm": arm.name, "label": arm.label, "baseline": i == 0,
                "depth": arm.engine.drafter.D if arm.engine else None,
                "temperature": T, "seed": params.seed, "rep": rep, "order": place,
                "new_tokens": len(ids), "ids_sha256": digest(ids),
                "stopped": bool(ids) and ids[-1] in params.stop_ids,
                "ttft_seconds": sample.ttft_seconds, "decode_seconds": sample.decode_seconds, "tokens_per_step": steps,
                **(self._judge(arm, prompt, plain, ids, params) if i else UNJUDGED),
                "working_bytes": peak, "resident_bytes": resident_memory(),
                "random_weights": s.random_weights, "environment": self.environment,
            }  # fmt: skip

    def _judge(self, arm: Arm, prompt: list[int], plain: list[int], ids: list[int], params: SamplingParams) -> Line:
        """How the ids compare with those of plain decoding. There is no margin if one text is a prefix of the other."""
        if ids == plain:
            return UNJUDGED | {"same": "same"}
        _, index, margin, ulps = find_fork(self.arms[0].engine, 0, prompt, params, plain, ids)
        if math.isinf(margin):
            return UNJUDGED | {"same": "differs", "fork": index}
        excused = is_rounding_tie(margin, ulps) and not (arm.engine and is_bitwise(arm.engine))
        same = "tie" if excused else "differs"
        return {"same": same, "fork": index, "margin": margin, "margin_ulps": ulps}


def run_with_peak(arm: Arm, prompt: list[int], params: SamplingParams) -> tuple[Sample, int | None]:
    """A run, and on a GPU the peak of its memory above what was allocated before."""
    device = arm.engine and arm.engine.model.device
    if device is None or device.type != "cuda":
        return arm.run(prompt, params), None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    sample = arm.run(prompt, params)
    return sample, peak_memory(device) - before


def step_bytes(engine: Engine, context: int) -> float:
    """Bytes that a step has to read: weights, keys and values at `context`, and what the draft reads."""
    model, drafter, B = engine.model, engine.drafter, engine.batch_size
    return model.weight_bytes(B * drafter.N) + B * model.kv_bytes(context) + drafter.bytes_per_step()


def arm_facts(arms: list[Arm]) -> list[dict[str, Any]]:
    """Options and tree size of every arm."""
    facts = []
    for arm in arms:
        fact: dict[str, Any] = {"arm": arm.name, "label": arm.label, "options": shown(arm.options)}
        head = str(arm.options.get("eagle", ""))
        if Path(head).is_dir() and (card := read_card(head)):
            fact["card"] = {name: card[name] for name in CARD if name in card}
        if engine := arm.engine:
            fact |= {"nodes": engine.drafter.N, "depth": engine.drafter.D, "compiled": engine.config.compile}
        facts.append(fact)
    return facts


def add_bandwidth_share(rows: Sequence[Row], arms: Sequence[Arm], bandwidth: float) -> None:
    """Set every row's `bandwidth_share`: the bytes of a step over its time and the bandwidth of a copy."""
    engines = {arm.name: arm.engine for arm in arms}
    for row in rows:
        engine = engines[row["arm"]]
        context = int(row["prompt_tokens"] + row["new_tokens"] / row["runs"] / 2)
        known = engine and row["step_ms"]
        row["bandwidth_share"] = step_bytes(engine, context) / row["step_ms"] * 1e3 / bandwidth if known else None


# ---- a whole session ---------------------------------------------------------------------------------------


def run_session(
    bench: Bench, steps: Iterable[Line], compare: bool, model: Line, bandwidth: float,
    emit: Callable[[Line], None],
) -> Line:  # fmt: skip
    """Measure the arms in turn (if `compare`), and `steps`.

    Returns the last line of the JSON, with everything that the report prints. Every run goes to `emit` at once. Ctrl-C
    ends it early. `model` says what is measured. `bandwidth` is that of a copy, in bytes per second.
    """
    started = time.perf_counter()
    settings = bench.settings
    runs: list[Line] = []
    done: Line = {"warm_up": [], "arms": [], "steps": [], "clients": [], "failed": [], "interrupted": False}
    try:
        if compare:
            done["warm_up"] = bench.warm_up()
            done["arms"] = arm_facts(bench.arms)
            for line in bench.measure():
                runs.append(line)
                emit(line)
        for line in steps:  # measured as they are taken
            emit(line)
            if line["type"] == "step":
                say("step of {arm}, batch {batch}, context {context}: {ms:.3f} ms".format_map(line))
            if kind := KEPT.get(line["type"]):
                done[kind].append(line)
    except KeyboardInterrupt:
        done["interrupted"] = True
    rows = summarise(runs, settings) if any(r["baseline"] for r in runs) else []
    add_bandwidth_share(rows, bench.arms, bandwidth)
    return {
        "type": "summary",
        "model": model,
        "settings": vars(settings),
        "environment": bench.environment,
        "gpu_after": gpu_state(bench.arms[0].engine.model.device),
        "copy_bandwidth": bandwidth,
        "bootstrap": {"seed": settings.seed, "resamples": RESAMPLES},
        **done,
        "rows": rows,
        "notes": remarks(rows, runs, done["arms"]) + _notes(bench, done),
        "seconds": time.perf_counter() - started,
    }


def _notes(bench: Bench, done: Line) -> list[str]:
    """Whose weights differ, and what was left out, cut short or unsteady."""
    kept = {fact["arm"]: fact["options"].get("weights") for fact in done["arms"]}
    notes = [f"{arm}: its weights are {what}" for arm, what in kept.items() if what]
    notes += [f"skipped (too long for ctx {bench.ctx}): {skipped}" for skipped in dict.fromkeys(bench.skipped)]
    notes += [f"{failed['arm']} failed: {failed['error']}" for failed in done["failed"]]
    notes += [bench.cut] if bench.cut else []
    unsteady = [f"{w['arm']} (T = {w['temperature']:g})" for w in done["warm_up"] if not w["agreed"]]
    if unsteady:
        notes.append(f"no two warm-up runs in a row within 1 %: {', '.join(unsteady)}")
    if done["interrupted"]:
        notes.append("interrupted: the numbers are of the runs that were done")
    return notes
