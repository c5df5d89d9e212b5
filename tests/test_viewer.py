"""report/gauge.py and report/viewer.py: the gauge splits a step and changes no token; the page explains its numbers."""

from __future__ import annotations

import json
import math

import pytest
from tiny import PROMPT, TREES, eagle_engine, fake_clock, tiny_head, tiny_model

import generate
import kernels
import sampling
import step as step_module
from drafters.ngram import WithNGrams
from engine import Engine
from options import DEMO
from report.gauge import Gauge
from report.viewer import StepRecorder
from sampling import SamplingParams
from step import PHASES, Observer
from support import errors


def engines(tree: str) -> tuple[Engine, Engine]:
    made = []
    for _ in range(2):
        model = tiny_model()
        made.append(Engine(model) if tree == "root" else eagle_engine(tiny_head(model), TREES[tree]))
    return made[0], made[1]


class Collector(Observer):
    def __init__(self):
        self.outputs = []

    def step(self, output):
        self.outputs.append(output)


@pytest.mark.parametrize("tree", ["root", "paper25", "dynamic"])
def test_parts_sum_to_the_step_and_tokens_stay(tree, monkeypatch):
    """Catches a phase that is counted twice or not at all, and an instrumented step that decodes something else."""
    plain, gauged = engines(tree)
    clock = fake_clock(monkeypatch)
    params = SamplingParams(temperature=1.0, seed=3, max_new_tokens=30)
    before, after = Collector(), Collector()
    gauged.add_observer(before)
    gauge = Gauge(gauged)
    gauged.add_observer(after)
    with clock:
        result = gauged.generate(PROMPT, params).run()[0]
    assert result.token_ids == plain.generate(PROMPT, params).run()[0].token_ids
    for collector in (before, after):
        assert len(collector.outputs) == result.steps, "the other observers are still called"
    parts = gauge.split(result)
    assert list(parts) == [*PHASES, "host", "step"]
    assert parts["step"] == pytest.approx(result.decode_seconds * 1e3 / result.steps)
    assert sum(parts[name] for name in (*PHASES, "host")) == pytest.approx(parts["step"])
    assert all(parts[name] > 0 for name in (*PHASES, "host"))
    assert parts["host"] < 0.05 * parts["step"], "phases cover the step"
    assert gauge.line(result).startswith(f"step {parts['step']:.2f} ms = draft {parts['draft']:.2f} + verify ")
    assert gauge.line(result).endswith("; no graph: kernels are launched one by one")


def test_a_gauge_that_is_taken_off_counts_no_more(monkeypatch):
    """Catches marks that go on costing time in every step, and steps that are added to a measurement that has ended."""
    engine, _ = engines("paper25")
    clock = fake_clock(monkeypatch)
    params = SamplingParams(max_new_tokens=12)
    gauge, real = Gauge(engine), engine._step
    with clock:
        first = gauge.split(engine.generate(PROMPT, params).run()[0])
    engine.remove_observer(gauge)
    marked = []
    engine._step = lambda *args, mark=None, **named: marked.append(mark) or real(*args, **named)
    with clock:
        result = engine.generate(PROMPT, params).run()[0]
    assert gauge.split(result) == pytest.approx(first | {"host": first["host"]})
    assert set(marked) == {None}


SLOW = {  # part of a step -> the phase that its time belongs to
    "noise": ("draft", sampling, "gumbel_noise"),
    "draft": ("draft", "drafter", "draft"),
    "forward": ("verify", "model", "forward"),
    "logits": ("verify", "model", "logits"),
    "choice": ("accept", sampling, "choose"),
    "walk": ("accept", step_module, "accept"),
    "commit": ("accept", kernels, "commit_kv"),
    "reading": ("host", "runner", "read"),
    "launching": ("host", "runner", "launch"),
}


@pytest.mark.parametrize("part", SLOW)
def test_a_slow_phase_is_found(part, monkeypatch):
    """Catches times that go to the wrong phase. The gauge would send people to tune the wrong kernel."""
    engine, _ = engines("paper25")
    clock = fake_clock(monkeypatch)
    phase, owner, name = SLOW[part]
    owner = getattr(engine, owner) if isinstance(owner, str) else owner
    function = getattr(owner, name)

    def slow(*arguments, **named):
        rows = arguments[0].shape[1] if part == "logits" else engine.drafter.N
        clock.now += 0.02 if rows == engine.drafter.N else 0  # the draft head asks for logits of fewer rows
        return function(*arguments, **named)

    monkeypatch.setattr(owner, name, slow)
    gauge = Gauge(engine)
    with clock:
        params = SamplingParams(temperature=1.0, max_new_tokens=12)
        parts = gauge.split(engine.generate(PROMPT, params).run()[0])
    others = max(parts[p] for p in (*PHASES, "host") if p != phase)
    assert 20 <= parts[phase] < 25 and others < 5


def test_flag_adds_line_and_field(capsys):
    """Catches --gauge that is accepted and shows nothing, and a step compiled in one piece that is said to have
    phases."""
    head = str(DEMO / "eagle1")
    command = ["--device", "cpu", "--eagle", head, "--tree", "chain:2", "--max-new-tokens", "8", "--gauge"]
    assert generate.main(command) == 0
    assert "gauge    step " in capsys.readouterr().err
    assert generate.main([*command, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["gauge_ms"]) == {*PHASES, "host", "step"}
    assert generate.main([*command, "--chat"]) == errors.USAGE
    whole = Engine(tiny_model(), compile=True, compile_mode="reduce-overhead")
    with pytest.raises(ValueError, match="--compile-mode regions"):
        Gauge(whole)
    assert not whole.observers


def test_the_page_says_what_the_numbers_are(tmp_path):
    """Catches scores with the shared noise that are called probabilities. At T > 0 they are far from the draft's own
    probabilities."""
    head, page = tiny_head(tiny_model()), tmp_path / "steps.html"
    cases = [
        (0.0, dict(), "probability of the path"),
        (1.0, dict(), "probability of the path"),
        (1.0, dict(tree="dynamic"), "score with the shared noise g, not a probability"),
        (1.0, dict(shared_noise=False), "probability of the path"),
        (1.0, dict(multi_round="without"), "probability of the path"),
    ]
    for temperature, options, words in cases:
        engine = eagle_engine(head, TREES[options.pop("tree", "paper25")], **options)
        recorder = StepRecorder(engine)
        params = SamplingParams(temperature, seed=2, max_new_tokens=6)
        recorder.write_html(page, engine.generate(PROMPT, params).run()[0])
        text = page.read_text()
        assert words in text and "%SCORES%" not in text
        below = [step.score[i] for step in recorder.steps for i, p in enumerate(step.parent) if i and p == 0]
        per_root = sum(below) / len(recorder.steps)
        assert 0 < per_root <= 1 + 1e-6, "the root's children share at most 1"
    engine = Engine(head.target, drafter=WithNGrams(eagle_engine(head, TREES["chain4"]).drafter, 4))
    assert "n-gram" in StepRecorder(engine).meaning(0.0)
    assert "mean nothing" in StepRecorder(Engine(head.target)).meaning(0.0)


def test_probabilities_on_the_page_are_the_draft_s_own():
    """Catches multi-round drafts that are shown with scores of shared noise, which they do not use."""
    head, taken = tiny_head(tiny_model()), []
    engine = eagle_engine(head, TREES["chain4"], multi_round="without")
    real, recorder = engine.drafter.draft, StepRecorder(engine)
    engine.drafter.draft = lambda inputs: taken.append(real(inputs)) or taken[-1]
    engine.generate(PROMPT, SamplingParams(1.0, seed=2, max_new_tokens=6)).run()
    for step, draft in zip(recorder.steps, taken, strict=True):
        own = [float(draft.q[0, i, step.tokens[i + 1]]) for i in range(4)]
        assert step.score[1:] == pytest.approx([math.prod(own[: i + 1]) for i in range(4)], rel=1e-6)


def test_a_static_tree_s_probabilities_are_without_the_noise_and_change_nothing(monkeypatch):
    """Catches the target's noise in what is called a probability, and a viewer that changes what is drafted."""
    head, probabilities = tiny_head(tiny_model()), []
    plain, engine = (eagle_engine(head, TREES["chain4"]) for _ in range(2))
    params = SamplingParams(1.0, seed=2, max_new_tokens=12)
    unseen = plain.generate(PROMPT, params).run()[0]
    recorder = StepRecorder(engine)
    predict = engine.drafter.predict

    def spy(output):
        probabilities.append(predict(output).softmax(-1)[0, 0])
        return predict(output)

    monkeypatch.setattr(engine.drafter, "predict", spy)
    assert engine.generate(PROMPT, params).run()[0].tokens_per_step == unseen.tokens_per_step
    for at, step in enumerate(recorder.steps):
        own = [float(p[token]) for p, token in zip(probabilities[4 * at :], step.tokens[1:], strict=False)]
        assert step.score[1:] == pytest.approx([math.prod(own[: i + 1]) for i in range(4)], rel=1e-5)
