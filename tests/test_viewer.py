"""cli/: the gauge splits a step and changes no token, and the page and the terminal show the steps as they were."""

import io
import json
import math
import re
from pathlib import Path

import pytest
from tiny import PROMPT, TREES, PieceTokenizer, Terminal, V, eagle_engine, fake_clock, one_line, tiny_head, tiny_model

import generate
import kernels
from cli.steps import Gauge, Node, Step, StepRecorder, StepView, page_data, write_page
from cli.tree_text import TreeWriter, clipped, columns, shown, tree_lines, wants_colour
from decoding import sampling
from decoding import step as step_module
from decoding.params import SamplingParams
from decoding.step import PHASES, Observer, unmarked
from drafters.ngram import WithNGrams
from engine.engine import Engine, EngineConfig
from engine.load import load
from loading.options import DEMO, LoadOptions


def engine_of(tree: str = "paper25") -> Engine:
    model = tiny_model()
    return Engine(model) if tree == "root" else eagle_engine(tiny_head(model), TREES[tree])


class Collector(Observer):
    def __init__(self):
        self.outputs = []

    def step(self, output, results):
        self.outputs.append(output)


@pytest.mark.parametrize("tree", ["root", "paper25", "dynamic"])
def test_parts_sum_to_the_step_and_tokens_stay(tree, monkeypatch):
    """The phases and the host's part sum to the step, other observers are still called, and the tokens are those
    without a gauge."""
    plain, gauged = engine_of(tree), engine_of(tree)
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
    assert list(parts) == [*PHASES, "host", "step"] and all(ms > 0 for ms in parts.values())
    assert parts["step"] == pytest.approx(result.decode_seconds * 1e3 / result.steps)
    assert sum(parts.values()) == pytest.approx(2 * parts["step"])
    assert parts["host"] < 0.05 * parts["step"], "phases cover the step"
    assert gauge.line(result).startswith(f"step {parts['step']:.2f} ms = draft {parts['draft']:.2f} + verify ")
    assert gauge.line(result).endswith("; no graph: kernels are launched one by one")
    gauged.remove_observer(gauge)
    real, marked = gauged._step, []
    gauged._step = lambda *args, mark=None, **named: marked.append(mark) or real(*args, **named)
    with clock:
        gauged.generate(PROMPT, params).run()
    assert gauge.split(result) == parts and set(marked) == {unmarked}, "a gauge that is taken off counts no more"


SLOW = {  # part of a step -> the phase that its time belongs to
    "noise": ("draft", sampling, "gumbel_noise"),
    "draft": ("draft", "drafter", "draft"),
    "forward": ("verify", "model", "forward"),
    "logits": ("verify", "model", "logits"),
    "choice": ("accept", sampling, "choose_and_check"),
    "walk": ("accept", step_module, "accept"),
    "commit": ("accept", kernels, "commit_kv"),
    "reading": ("host", "runner", "read"),
    "launching": ("host", "runner", "launch"),
}


@pytest.mark.parametrize("part", SLOW)
def test_a_slow_phase_is_found(part, monkeypatch):
    """20 ms more in one part of a step appear in the phase that this part belongs to, and in no other."""
    engine = engine_of()
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


def test_the_gauge_is_a_line_of_the_report(capsys):
    """--gauge adds a line to the report; a step compiled in one piece is refused."""
    command = ["--device", "cpu", "--eagle", str(DEMO / "eagle1"), "--tree", "chain:2", "--max-new-tokens", "8"]
    assert generate.main([*command, "--gauge"]) == 0
    assert "gauge    step " in capsys.readouterr().err
    whole = Engine(tiny_model(), config=EngineConfig(compile=True, compile_mode="reduce-overhead"))
    one_line(lambda: Gauge(whole), "leave out --compile-mode")
    assert not whole.observers


def followed(engine: Engine, temperature: float = 0.0, tokens: int = 6) -> StepRecorder:
    """What watched a request from its beginning to its end."""
    engine.options = engine.options or LoadOptions()  # which the page names
    stream = engine.generate(PROMPT, SamplingParams(temperature, seed=2, max_new_tokens=tokens))
    recorder = StepRecorder(engine, stream.result)
    for _ in recorder.follow(stream):
        pass
    return recorder


def data_of(page: Path) -> dict:
    """The data of a written page, read as a browser reads it."""
    scripts = re.findall(r'<script id="data" type="application/json">(.*?)</script', page.read_text(), re.S)
    assert len(scripts) == 1
    return json.loads(scripts[0])


def test_the_page_says_what_the_numbers_are(tmp_path):
    """Each drafter's scores are described as what they are, and those of the root's children sum to at most 1."""
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
        recorder = followed(engine, temperature)
        write_page(page, recorder, PROMPT)
        assert words in data_of(page)["scores"]
        below = [step.score[i] for step in recorder.steps for i, p in enumerate(step.parent) if i and p == 0]
        per_root = sum(below) / len(recorder.steps)
        assert 0 < per_root <= 1 + 1e-6, "the root's children share at most 1"
    engine = Engine(head.target, drafter=WithNGrams(eagle_engine(head, TREES["chain4"]).drafter, 4))
    assert "n-gram" in StepRecorder(engine, recorder.result).meaning()
    assert "No model scored" in StepRecorder(Engine(head.target), recorder.result).meaning()


@pytest.mark.parametrize("multi_round", [False, True])
def test_probabilities_on_the_page_are_the_draft_s_own(multi_round):
    """The scores are the products of the draft's probabilities along the path, without the shared noise of a static tree,
    and the viewer changes no token."""
    how, taken = {"multi_round": "without"} if multi_round else {}, []
    plain, engine = (eagle_engine(tiny_head(tiny_model()), TREES["chain4"], **how) for _ in range(2))
    unseen = plain.generate(PROMPT, SamplingParams(1.0, seed=2, max_new_tokens=12)).run()[0]
    drafter, draft, predict = engine.drafter, engine.drafter.draft, engine.drafter.predict
    if multi_round:
        drafter.draft = lambda inputs: taken.extend((found := draft(inputs)).q[0, :4]) or found
    else:
        drafter.predict = lambda output: taken.append((found := predict(output)).softmax(-1)[0, 0]) or found
    recorder = followed(engine, 1.0, 12)
    assert recorder.result.tokens_per_step == unseen.tokens_per_step
    for at, step in enumerate(recorder.steps):
        own = [float(p[token]) for p, token in zip(taken[4 * at :], step.tokens[1:], strict=False)]
        assert step.score[1:] == pytest.approx([math.prod(own[: i + 1]) for i in range(4)], rel=1e-5)


HOSTILE = "</script><img src=x onerror=alert(1)><!--\u2028%data%\033[2J"


def test_no_token_adds_to_the_page_or_steers_the_terminal(tmp_path):
    """A hostile token is data on the page, and on the terminal it is escaped."""
    engine, page = engine_of(), tmp_path / "steps.html"
    engine.tokenizer = PieceTokenizer([HOSTILE.encode()] * V)
    recorder = followed(engine)
    write_page(page, recorder, PROMPT)
    data = data_of(page)
    assert data["prompt"] == HOSTILE * len(PROMPT) and data["first"] == HOSTILE
    assert all(node["text"] == HOSTILE for step in data["steps"] for node in step["nodes"])
    assert "<img" not in page.read_text() and page.read_text().count("</script>") == 2
    out = io.StringIO()
    TreeWriter(out).step(recorder.views[0], recorder.first)
    assert "\033" not in out.getvalue() and "\u2028" not in out.getvalue()


def test_the_page_names_what_ran_and_not_where_it_lies():
    """The page names model, head, tree and seed, and no folder."""
    engine = load(DEMO, eagle=str(DEMO / "eagle3"), tree="chain:3", ctx=256)
    data = page_data(followed(engine), PROMPT)
    facts = dict(data["facts"])
    assert facts["model"] == "demo (float32)" and facts["head"] == "eagle3 (EAGLE-3)"
    assert facts["tree"] == "chain:3: 4 nodes, depth 3" and "seed 2" in facts["sampling"]
    assert str(DEMO.parent) not in json.dumps(data)


@pytest.mark.parametrize("name", ["paper25", "dynamic", "ngrams", "root"])
def test_a_step_s_picture_is_its_tree_and_the_model_s_own_token(name):
    """Every valid node is drawn below its parent with its kind, and the target's own token where it was kept. A step
    without a draft has these two alone, and its line says so."""
    engine = engine_of("chain4" if name == "ngrams" else name)
    if name == "ngrams":
        engine = Engine(engine.model, drafter=WithNGrams(engine.drafter, 6))
    recorder = followed(engine, tokens=30)
    result = recorder.result
    assert len(recorder.views) == result.steps == len(recorder.steps)
    for step, view, ids in zip(recorder.steps, recorder.views, result.tokens_per_step, strict=True):
        assert view.kept == [f"{token} " for token in ids]
        drafted = [node for node in view.nodes if node.kind != "own"]
        assert len(drafted) == sum(step.valid)

        def path(i: int, step: Step = step) -> list[int]:
            return ([] if i == 0 else path(step.parent[i])) + [step.tokens[i]]

        def drawn(i: int, view: StepView = view) -> list[int]:
            return ([] if i == 0 else drawn(view.nodes[i].parent)) + [int(view.nodes[i].text)]

        live = [i for i, valid in enumerate(step.valid) if valid]
        assert [drawn(k) for k in range(len(live))] == [path(i) for i in live]
        assert [k for k, node in enumerate(drafted) if node.kind != "rejected"] == [live.index(i) for i in step.path]
        own = [k for k, node in enumerate(view.nodes) if node.kind == "own"]
        assert bool(own) == view.own == (len(ids) == len(step.emitted))
        for k in own:
            assert drawn(k) == [step.tokens[0], *step.emitted] and view.accepted == len(ids) - 1
    TreeWriter(out := io.StringIO()).step(recorder.views[0], "")
    assert ("1 token (no draft, the model's own)" in out.getvalue()) == (name == "root")
    assert recorder.views[0].nodes[0].text == recorder.first, "not the token that the step itself wrote there"


def test_the_time_of_a_step_is_without_its_readers(monkeypatch):
    """The milliseconds of the steps sum to the decode time, however long the reader takes."""
    engine = engine_of()
    clock = fake_clock(monkeypatch)
    stream = engine.generate(PROMPT, SamplingParams(max_new_tokens=12))
    recorder = StepRecorder(engine, stream.result)
    with clock:
        for _ in recorder.follow(stream):
            clock.now += 100
    assert sum(view.ms for view in recorder.views) == pytest.approx(stream.result.decode_seconds * 1e3)
    assert all(0 < view.ms < 1000 for view in recorder.views)


def test_a_reader_may_come_late():
    """Chunks that are read when all steps have run, as where another thread decodes, taken for those of other steps."""
    engine = engine_of()
    stream = engine.generate(PROMPT, SamplingParams(max_new_tokens=12))
    recorder = StepRecorder(engine, stream.result)
    read = list(recorder.follow(list(stream)))
    assert [recorder.first] == [f"{token} " for token in read[0].token_ids]
    assert [view.kept for view in recorder.views] == [[f"{token} " for token in chunk.token_ids] for chunk in read[1:]]


def test_trees_are_drawn_while_the_request_runs(monkeypatch):
    """Each step is drawn before the next one runs, and no line is wider than the terminal."""
    monkeypatch.setenv("COLUMNS", "50")
    engine = engine_of()
    stream, out = engine.generate(PROMPT, SamplingParams(max_new_tokens=20)), io.StringIO()
    recorder, writer = StepRecorder(engine, stream.result), TreeWriter(out)
    for done, _ in enumerate(recorder.follow(stream)):
        if done:
            writer.step(recorder.views[-1], recorder.first)
        assert out.getvalue().count("\nstep ") == done
    assert max(map(columns, out.getvalue().splitlines())) <= 50


NODES = [
    Node("a", -1, 0, "root"),
    Node("b", 0, 1, "rejected", 0.3),
    Node(" c", 0, 1, "accepted", 0.2),
    Node("d", 1, 2, "rejected", 0.25),
    Node("e", 2, 2, "rejected", 0.1),
    Node("f", 0, 1, "rejected", 0.01),
    Node("\n", 2, 2, "own"),
]


def test_a_tree_as_text():
    """The accepted path comes first, each child stands behind its own parent, hidden nodes are counted, and long lines
    are cut."""
    lines, hidden = tree_lines(NODES, others=3)
    assert ["".join(span.text for span in line) for line in lines] == [
        "a ┬─* ·c .20 ┬─+ ⏎",
        "  │          └── e .10",
        "  └── b .30 ─── d .25",
    ]
    assert hidden == 1
    assert tree_lines(NODES, others=1)[1] == 3 and tree_lines(NODES)[1] == 0
    assert "".join(span.text for span in clipped(lines[0], 9)) == "a ┬─* ·c…"
    assert shown("\033[31m\x9b") == "\\x1b[31m\\x9b" and columns("日本e\u0301") == 5


def test_colours_are_for_terminals_that_want_them(monkeypatch):
    """Only a terminal without NO_COLOR and TERM=dumb gets colours, the text is the same, and ASCII terminals get
    ASCII."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    view = StepView(NODES, [" c", "\n"], own=True, ms=1.5)
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        TreeWriter(stream).step(view, "a")
    assert wants_colour(terminal) and "\033[1;32m" in terminal.getvalue()
    assert re.sub(r"\033\[[\d;]+m", "", terminal.getvalue()) == file.getvalue()
    assert "─* ·c" in file.getvalue() and "step 1: 2 tokens (1 drafted + the model's own), 1.5 ms" in file.getvalue()
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert not wants_colour(terminal)
    narrow = Terminal()
    narrow.encoding = "ascii"
    TreeWriter(narrow).step(view, "a")
    assert narrow.getvalue().isascii() and "+-* _c" in re.sub(r"\033\[[\d;]+m", "", narrow.getvalue())
