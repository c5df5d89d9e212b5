"""viewer.py: the gauge splits a step without changing what is decoded; the page says what its numbers are."""

from __future__ import annotations

import json
import math
import time

import pytest
from tiny import PROMPT, TREES, eagle_engine, tiny_head, tiny_model

import generate
import load
from drafters.ngram import WithNGrams
from engine import Engine
from report.gauge import Gauge
from report.viewer import StepRecorder
from sampling import SamplingParams
from step import PHASES
from support import errors


def engines(tree: str) -> tuple[Engine, Engine]:
    made = []
    for _ in range(2):
        model = tiny_model()
        made.append(Engine(model) if tree == "root" else eagle_engine(tiny_head(model), TREES[tree]))
    return made[0], made[1]


@pytest.mark.parametrize("tree", ["root", "paper25", "dynamic"])
def test_parts_sum_to_the_step_and_tokens_stay(tree):
    """A phase counted twice or not at all, and an instrumented step that decodes something else."""
    plain, gauged = engines(tree)
    params = SamplingParams(temperature=1.0, seed=3, max_new_tokens=30)
    seen = []
    gauged.observer = seen.append
    gauge = Gauge(gauged)
    result = gauged.generate(PROMPT, params).run()[0]
    assert result.token_ids == plain.generate(PROMPT, params).run()[0].token_ids
    assert len(seen) == result.steps, "the observer that was there is still called"
    parts = gauge.split(result)
    assert list(parts) == [*PHASES, "host", "step"]
    assert parts["step"] == pytest.approx(result.decode_seconds * 1e3 / result.steps)
    assert sum(parts[name] for name in (*PHASES, "host")) == pytest.approx(parts["step"])
    assert all(parts[name] > 0 for name in (*PHASES, "host"))
    assert parts["host"] < 0.5 * parts["step"], "phases cover the step"
    assert gauge.line(result).startswith(
        f"step {parts['step']:.2f} ms = draft {parts['draft']:.2f} + verify "
    )
    assert gauge.line(result).endswith("; no graph: kernels are launched one by one")


@pytest.mark.parametrize("phase", PHASES)
def test_a_slow_phase_is_found(phase, monkeypatch):
    """Times that go to the wrong phase: the gauge would send people to tune the wrong kernel."""
    engine, _ = engines("paper25")
    owner, name = {
        "draft": (engine.drafter, "draft"),
        "verify": (engine.model, "logits"),
        "accept": (generate.trees, "accept"),
    }[phase]
    function = getattr(owner, name)

    def slow(*arguments):
        time.sleep(0.02 if phase != "verify" or arguments[0].shape[1] == engine.drafter.N else 0)
        return function(*arguments)

    monkeypatch.setattr(owner, name, slow)
    gauge = Gauge(engine)
    parts = gauge.split(engine.generate(PROMPT, SamplingParams(max_new_tokens=12)).run()[0])
    others = max(parts[p] for p in (*PHASES, "host") if p != phase)
    assert parts[phase] >= 20 and parts[phase] > others


def test_flag_adds_line_and_field(capsys):
    """--gauge that is accepted and shows nothing; a step compiled in one piece that is said to have phases."""
    head = str(load.DEMO / "eagle1")
    command = ["--device", "cpu", "--eagle", head, "--tree", "chain:2", "--max-new-tokens", "8", "--gauge"]
    assert generate.main(command) == 0
    assert "gauge    step " in capsys.readouterr().err
    assert generate.main([*command, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["gauge_ms"]) == {*PHASES, "host", "step"}
    assert generate.main([*command, "--chat"]) == errors.USAGE
    whole = Engine(tiny_model(), compile=True, compile_mode="reduce-overhead")
    with pytest.raises(ValueError, match="--compile-mode regions"):
        Gauge(whole)


def test_the_page_says_what_the_numbers_are(tmp_path):
    """Scores with the shared noise shown as probabilities: at T > 0 they are far from the draft's own law."""
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
        recorder = engine.observer = StepRecorder(engine)
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
    """Multi-round drafts shown with the scores of shared noise that they do not use."""
    head, taken = tiny_head(tiny_model()), []
    engine = eagle_engine(head, TREES["chain4"], multi_round="without")
    real, recorder = engine.drafter.draft, StepRecorder(engine)
    engine.observer = recorder
    engine.drafter.draft = lambda request: taken.append(real(request)) or taken[-1]
    engine.generate(PROMPT, SamplingParams(1.0, seed=2, max_new_tokens=6)).run()
    for step, draft in zip(recorder.steps, taken, strict=True):
        own = [float(draft.q[0, i, step.tokens[i + 1]]) for i in range(4)]
        assert step.score[1:] == pytest.approx([math.prod(own[: i + 1]) for i in range(4)], rel=1e-6)


def test_a_static_tree_s_probabilities_are_without_the_noise_and_change_nothing(monkeypatch):
    """The noise of the target left in what is called a probability; a viewer that changes what is drafted."""
    head, laws = tiny_head(tiny_model()), []
    plain, engine = (eagle_engine(head, TREES["chain4"]) for _ in range(2))
    params = SamplingParams(1.0, seed=2, max_new_tokens=12)
    unseen = plain.generate(PROMPT, params).run()[0]
    engine.observer = recorder = StepRecorder(engine)
    predict = engine.drafter.predict

    def spy(output):
        laws.append(predict(output).softmax(-1)[0, 0])
        return predict(output)

    monkeypatch.setattr(engine.drafter, "predict", spy)
    assert engine.generate(PROMPT, params).run()[0].tokens_per_step == unseen.tokens_per_step
    for at, step in enumerate(recorder.steps):
        own = [float(law[token]) for law, token in zip(laws[4 * at :], step.tokens[1:], strict=False)]
        assert step.score[1:] == pytest.approx([math.prod(own[: i + 1]) for i in range(4)], rel=1e-5)
