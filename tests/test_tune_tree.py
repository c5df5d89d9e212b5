"""scripts.tune_tree: the optimum by brute force, statistics that recount, and nothing written that did not win."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from tiny import eagle_engine, tiny_head, tiny_model

import generate
import load
import options
import tree as trees
import tree_building
import tree_choice
import verify as verify_module
from bench import tree_costs, tree_search, tree_tuning
from bench.tree_costs import Costs
from eagle_draft import EagleDrafter, UnshiftedDrafter
from sampling import SamplingParams
from scripts import tune_tree
from step import Observer
from support import errors
from support.errors import UserError
from support.files import write_json
from tree import DynamicTree, StaticTree
from weights.checkpoint import Checkpoint
from weights.heads import read_eagle, save_eagle
from weights.hf import save_hf
from weights.quantized import QuantSpec

PROMPTS = [[1, 5, 9, 22, 7, 3], [4, 4, 8, 2, 60], [9, 30, 31, 32], [7, 7, 7, 50, 51]]


# ---- the dynamic program ----------------------------------------------------------------------------------


@cache
def shapes(nodes: int) -> list[tuple]:
    """All ordered trees of exactly that many nodes, as nested tuples of children."""
    return [()] if nodes == 1 else list(forests(nodes - 1))


def forests(nodes: int):
    if nodes == 0:
        yield ()
    for first in range(1, nodes + 1):
        for tree, rest in itertools.product(shapes(first), list(forests(nodes - first))):
            yield (tree, *rest)


def paths(shape: tuple, above: tuple = ()):
    for rank, child in enumerate(shape):
        yield (*above, rank)
        yield from paths(child, (*above, rank))


ALL = [StaticTree(tuple(paths(shape))) for n in range(2, 9) for shape in shapes(n)]


def test_the_enumeration_is_complete():
    """A brute force that misses trees would call anything optimal: Catalan numbers count ordered trees."""
    assert [len(shapes(n)) for n in range(1, 9)] == [1, 1, 2, 5, 14, 42, 132, 429]
    assert len(set(ALL)) == len(ALL)


def line(a: float, b: float, last: int = 40) -> dict[int, float]:
    return {x: a + b * x for x in range(last + 1)}


STAIRS = {n: 1.0 + 0.5 * (n > 3) + 0.9 * (n > 5) for n in range(1, 9)}
BUMPY = {1: 1.0, 2: 1.4, 3: 1.1, 4: 1.9, 5: 1.3, 6: 2.5, 7: 1.5, 8: 1.6}  # tile sizes that do not fit
CURVES = {
    "free rows": Costs(line(1, 0), line(0.05, 0), line(0.05, 0)),
    "free everything": Costs(line(1, 0), line(0, 0), line(0, 0)),
    "linear": Costs(line(1, 0.1), line(0.1, 0.02), line(0.1, 0.01)),
    "dear rows": Costs(line(0.2, 0.5), line(0.1, 0.02), line(0.02, 0.01)),
    "dear drafts": Costs(line(1, 0.02), line(0.1, 0), line(0.6, 0.05)),
    "levels by width": Costs(line(1, 0.02), line(0.1, 0), line(0, 0.2)),
    "stairs": Costs(STAIRS, line(0.1, 0.01), line(0.1, 0.02)),
    "bumpy": Costs(BUMPY, line(0.05, 0.02), line(0.05, 0.01)),
    "bumpy extension": Costs(line(1, 0.05), {d: 0.1 + 0.3 * (d % 2) for d in range(9)}, line(0.05, 0.01)),
}
ACCEPTANCE = {
    "sharp": [[0.8, 0.05, 0.02, 0.01]] * 7,
    "flat": [[0.3, 0.25, 0.2, 0.15]] * 7,
    "usual": [[0.65 * 0.93**d, 0.14, 0.07, 0.04, 0.02] for d in range(7)],
    "better deep down": [[0.2, 0.2, 0.1], [0.9, 0.05, 0.01], [0.95, 0.01, 0.0], [0.5, 0.2, 0.1]],
    "ranks out of order": [[0.1, 0.5, 0.2], [0.05, 0.6, 0.1], [0.3, 0.0, 0.4]],
    "nothing": [[0.0, 0.0]] * 3,
}


@pytest.mark.parametrize("acceptance", ACCEPTANCE)
@pytest.mark.parametrize("curve", CURVES)
def test_no_tree_of_up_to_8_nodes_beats_the_solution(curve, acceptance):
    """A program that misses shapes, counts a level twice, or assumes that costs rise and acceptance falls."""
    costs, p = CURVES[curve], torch.tensor(ACCEPTANCE[acceptance], dtype=torch.float64)
    D, K = p.shape
    tree, rate = tree_search.best_static(p, costs, 8, max_rows=7)
    usable = [t for t in ALL if t.D <= D and t.max_children <= K]
    best = max(tree_search.expected_tokens(t, p) / costs.step(t) for t in usable)
    assert tree.N <= 8 and tree.D <= D and tree.max_children <= K
    assert rate == pytest.approx(tree_search.expected_tokens(tree, p) / costs.step(tree), rel=1e-12)
    assert rate == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("acceptance", ["sharp", "flat", "usual"])
def test_levels_whose_time_jumps_with_their_width(acceptance):
    """Levels priced by their mean width alone: a tree with one level just over the edge would look cheap."""
    costs = Costs(line(0.5, 0.02), line(0.1, 0), {w: 0.1 + 1.0 * (w > 2) for w in range(9)})
    p = torch.tensor(ACCEPTANCE[acceptance], dtype=torch.float64)
    _, rate = tree_search.best_static(p, costs, 8, max_rows=7)
    usable = [t for t in ALL if t.max_children <= p.shape[1]]
    assert rate == pytest.approx(max(tree_search.expected_tokens(t, p) / costs.step(t) for t in usable), rel=1e-9)


@pytest.mark.parametrize("curve", ["linear", "dear drafts", "levels by width"])
def test_the_program_ranks_right_by_itself_where_levels_are_linear(curve, monkeypatch):
    """Levels priced wrongly in the program, hidden because the best 64 are scored again; larger trees would show it."""
    p = torch.tensor(ACCEPTANCE["usual"], dtype=torch.float64)
    best = tree_search.best_static(p, CURVES[curve], 8, max_rows=7)[1]
    monkeypatch.setattr(tree_search, "CANDIDATES", 1)
    assert tree_search.best_static(p, CURVES[curve], 8, max_rows=7)[1] == pytest.approx(best, rel=1e-9)


def test_random_curves_against_brute_force():
    """An optimum that the hand-made curves hit by luck."""
    rng = random.Random(0)
    for _ in range(25):
        a, b = rng.uniform(0, 0.3), rng.uniform(0, 0.1)
        verify = {n: rng.uniform(0.5, 2.0) for n in range(1, 9)}
        costs = Costs(verify, {d: rng.uniform(0, 0.4) for d in range(9)}, line(a, b))
        rows = [[rng.random() for _ in range(4)] for _ in range(7)]
        p = torch.tensor([[0.98 * x / sum(row) for x in row] for row in rows], dtype=torch.float64)
        _, rate = tree_search.best_static(p, costs, 8, max_rows=7)
        usable = [t for t in ALL if t.max_children <= 4]
        best = max(tree_search.expected_tokens(t, p) / costs.step(t) for t in usable)
        assert rate == pytest.approx(best, rel=1e-9)


def test_every_entry_of_the_program_is_a_tree_of_that_size_and_value():
    """A table whose numbers are right but whose traceback builds another tree."""
    p = torch.tensor(ACCEPTANCE["usual"], dtype=torch.float64)
    for D in (1, 2, 4):
        program = tree_search._Program(p, D, 14, 6)
        for n, m in itertools.product(range(2, 15), range(7)):
            value = float(program.best[n, m])
            if value == -float("inf"):
                continue
            tree = program.tree(n, m)
            assert (tree.N, sum(map(len, tree.levels))) == (n, m) and tree.D <= D
            assert tree_search.expected_tokens(tree, p) == pytest.approx(value, rel=1e-12)


def test_larger_trees_are_no_worse_and_known_trees_lie_in_the_space():
    """A node budget that is silently cut: with free rows the optimum at 26 nodes is at least paper25."""
    p = torch.tensor(ACCEPTANCE["usual"], dtype=torch.float64)[:5]
    costs = Costs(line(1, 0), line(0.01, 0), line(0.01, 0))
    rates = [tree_search.best_static(p, costs, n)[1] for n in (8, 16, 26)]
    assert rates == sorted(rates)
    assert rates[-1] >= tree_search.expected_tokens(trees.PAPER25, p) / costs.step(trees.PAPER25)


def test_costs_add_up_over_the_parts_of_a_step():
    """A step priced without its root row's extension, or with a level too many."""
    costs = Costs({1: 10.0, 9: 18.0}, {2: 1.0, 4: 2.0}, {1: 0.1, 3: 0.3}, {4: (5.0, 0.5)})
    tree = tree_costs.chains(2, 3)  # N 7, D 3, two levels of two rows
    assert costs.step(tree) == pytest.approx(16.0 + 1.5 + 2 * 0.2)
    assert costs.step(DynamicTree(9, 3, 4)) == pytest.approx(18.0 + 2.0 + 5.0 + 2 * 0.5)
    assert costs.step(trees.chain(1)) == pytest.approx(11.0 + 1.0)
    assert tree_costs.interpolate({2: 1.0, 4: 3.0}, 6) == 5.0 and tree_costs.interpolate({2: 3.0, 4: 1.0}, 6) == 1.0


# ---- statistics -------------------------------------------------------------------------------------------


def scripted_output(tree, rng: random.Random) -> tuple[SimpleNamespace, dict]:
    """A step's output on a tree (of trees.StaticTree or a trees.DraftTree) where the target follows random children, as
    `accept` finds it; and the target's choice per node."""
    if isinstance(tree, StaticTree):
        t = trees.tree_tables([tree])
        tokens = torch.tensor([[7, *(10 + r for r in tree.rank[1:])]])
        parent, depth, ancestors, valid, scores, D = t.parent, t.depth, t.ancestors, t.valid, None, tree.D
    else:
        tokens, parent, depth, ancestors, valid, scores = tree
        D = int(depth.max())
    choice = [0] * tokens.shape[1]
    children: dict[int, list[int]] = {}
    for token, above, live in list(zip(tokens[0].tolist(), parent[0].tolist(), valid[0].tolist(), strict=True))[1:]:
        children.setdefault(above, []).extend([token] * live)
    for node, below in children.items():
        if below and rng.random() < 0.85:
            choice[node] = rng.choice(below)
    accepted = verify_module.accept(tokens, parent, depth, ancestors, valid, torch.tensor([choice]), D)
    draft = SimpleNamespace(tokens=tokens, parent=parent, depth=depth, valid=valid, scores=scores)
    return SimpleNamespace(count=accepted.count, path=accepted.path, draft=draft), choice


STEPS = 100


def recount(tree: StaticTree, records: list[list[int]]) -> tuple[dict, dict]:
    """(trials, hits) by (depth, rank), from nothing but the tree's paths and the accepted rank paths."""
    known, trials, hits = set(tree.paths), {}, {}
    for ranks in records:
        for d in range(len(ranks) + 1):
            for r in range(64):
                if (*ranks[:d], r) in known:
                    trials[d, r] = trials.get((d, r), 0) + 1
            if d < len(ranks):
                hits[d, ranks[d]] = hits.get((d, ranks[d]), 0) + 1
    return trials, hits


def as_counts(table: list[list[int]]) -> dict:
    return {(d, r): n for d, row in enumerate(table) for r, n in enumerate(row) if n}


@pytest.mark.parametrize("name", ["paper25", "wide"])
def test_rank_statistics_equal_a_recount(name):
    """Trials counted for children that were not drafted, misses of the last node forgotten, depths off by one."""
    tree = trees.PAPER25 if name == "paper25" else tree_search.wide_tree(4, 5, 120)
    observer, rng, records = tree_search.RankStatistics(tree), random.Random(3), []
    index = {(): 0} | {path: i for i, path in enumerate(tree.paths, 1)}
    for _ in range(STEPS):
        output, choice = scripted_output(tree, rng)
        observer.step(output)
        ranks: list[int] = []
        while (token := choice[index[tuple(ranks)]]) >= 10:
            ranks.append(token - 10)
        records.append(ranks)
    trials, hits = recount(tree, records)
    assert as_counts(observer.trials) == trials and as_counts(observer.hits) == hits
    assert observer.steps == STEPS == trials[0, 0]
    observer.step(SimpleNamespace(count=torch.tensor([0]), path=output.path, draft=output.draft))
    assert observer.steps == STEPS, "a finished sequence's step was counted"


def test_rank_statistics_of_a_real_engine():
    """An observer that reads another layout than the engine's: counts must give the tokens the engine emitted."""
    head = tiny_head(tiny_model())
    tree = tree_search.wide_tree(4, 6, 100)
    engine, emitted = eagle_engine(head, tree), []
    statistics = tree_search.RankStatistics(tree)

    class Both(Observer):
        def step(self, output):
            statistics.step(output)
            emitted.append(int(output.count[0]))

    engine.add_observer(Both())
    engine.generate(PROMPTS[0], SamplingParams(temperature=1.0, max_new_tokens=60)).run()
    assert statistics.steps == len(emitted)
    assert sum(map(sum, statistics.hits)) == sum(emitted) - len(emitted)
    assert statistics.trials[0] == [len(emitted)] * 6


def test_dynamic_statistics_equal_the_smaller_trees_own_steps():
    """tau of a smaller tree read off a larger one: ties, a depth limit, or parents cut away from their children."""
    rng, K, depth = random.Random(5), 3, 3
    generator = torch.Generator().manual_seed(0)
    sizes, depths = [4, 6, 9, 13], [1, 2, 3]
    observer = tree_search.DynamicStatistics(DynamicTree(31, depth, K), sizes, depths)
    expected = dict.fromkeys(observer.shapes, 0)
    for _ in range(40):
        # coarse scores, so that ties happen; tokens differ among siblings
        levels = [-torch.randint(0, 4, (1, K, K), generator=generator).float() for _ in range(depth + 1)]
        pools = [tree_building.first_level(torch.arange(K)[None], levels[0][:, 0])]
        for scores in levels[1:]:
            pools.append(tree_building.expand(pools[-1], torch.arange(K).expand(1, K, K), scores))
        root = torch.tensor([9])
        big = tree_building.select(pools[-1], root, 31, depth + 1)
        output, choice = scripted_output(big, rng)
        observer.step(output)
        route, seen = {}, big.ancestors[0].tolist()
        for node in range(31):  # the target's token after a path of tokens
            path = [i for i in range(1, 31) if seen[node][i]]
            route[tuple(big.tokens[0, path].tolist())] = choice[node]
        for N, d in observer.shapes:
            small = tree_building.select(pools[d], root, N, d + 1)
            seen = small.ancestors[0].tolist()
            paths = [[i for i in range(1, N) if seen[node][i]] for node in range(N)]
            own = [route[tuple(small.tokens[0, path].tolist())] for path in paths]
            accepted = verify_module.accept(*small[:5], torch.tensor([own]), d + 1)
            expected[N, d] += int(accepted.count)
    assert observer.tokens == expected and observer.steps == 40
    entries = observer.table()
    assert all(DynamicTree(*e["dynamic"]).topk == K and 1 <= e["tau"] <= depth + 2 for e in entries)
    assert [4, 1, K] in [e["dynamic"] for e in entries]


@pytest.mark.parametrize("depth, ranks, nodes", [(4, 8, 256), (8, 8, 256), (16, 8, 256), (5, 3, 20)])
def test_the_wide_tree_fits_and_sees_every_rank_at_every_depth(depth, ranks, nodes):
    """An instrumented tree that is too large to run, or blind at some depth."""
    tree = tree_search.wide_tree(depth, ranks, nodes)
    assert tree.N <= nodes and tree.D == depth and tree.branching == (ranks,) * depth
    assert set(tree.paths) >= {(*[0] * d, r) for d in range(depth) for r in range(ranks)}
    with pytest.raises(ValueError, match="lower --max-depth"):
        tree_search.wide_tree(depth, ranks, depth * ranks)


def acceptance(temperature: float = 0.0, factor: int = 1) -> tree_search.Acceptance:
    trials = [[100 * factor] * 3, [50 * factor] * 3, [0, 0, 0]]
    hits = [[60 * factor, 20, 5], [25, 10, 2], [0, 0, 0]]
    taus = [{"dynamic": [8, 2, 2], "tau": 2.1}, {"dynamic": [12, 3, 2], "tau": 2.5}]
    return tree_search.Acceptance(temperature, trials, hits, taus)


def test_few_trials_lean_on_the_level_above():
    """A depth that was never reached would have probability 0 / 0, or 1 after a single lucky trial."""
    p = acceptance().probability()
    assert p[0].tolist() == [0.6, 0.2, 0.05]
    assert p[1, 0] == pytest.approx((25 + tree_search.SHRINK * 0.6) / (50 + tree_search.SHRINK))
    assert torch.allclose(p[2], p[1])
    both = tree_search.pooled([acceptance(), acceptance(1.0, 2)])
    assert both.trials[0] == [300] * 3 and both.hits[0] == [180, 40, 10] and both.tau(DynamicTree(8, 2, 2)) == 2.1


def test_the_best_dynamic_tree_is_the_best_of_the_grid():
    """tau without time, or one temperature forgotten: the rate is for equally many tokens at each."""
    parts = [acceptance(), acceptance(1.0)]
    parts[1].dynamic = [{"dynamic": [8, 2, 2], "tau": 2.0}, {"dynamic": [12, 3, 2], "tau": 3.5}]
    cheap = Costs(line(1, 0.01), line(0, 0), line(0, 0), {2: (0.0, 0.0)})
    dear = Costs(line(1, 0.9), line(0, 0), line(0, 0), {2: (0.0, 0.0)})
    assert tree_search.best_dynamic(parts, [cheap, cheap], 32)[0] == DynamicTree(12, 3, 2)
    assert tree_search.best_dynamic(parts, [dear, dear], 32)[0] == DynamicTree(8, 2, 2)
    tree, rate = tree_search.best_dynamic(parts, [cheap, cheap], 8)
    assert tree.N == 8 and rate == pytest.approx(2 / (1.08 / 2.1 + 1.08 / 2.0))
    names = tree_search.finalists(parts, [cheap, cheap], 8)
    assert len(set(names.values())) == len(names) and "dynamic" in names


def test_statistics_survive_the_file_and_bad_files_are_named(tmp_path):
    """Statistics of another layout accepted in silence, or a traceback for a wrong file."""
    file = tmp_path / "stats.json"
    parts = [acceptance(), acceptance(1.0, 2)]
    file.write_text(json.dumps({"paths": [[0]], "statistics": [vars(a) for a in parts]}))
    assert tree_search.read_statistics(file) == parts
    broken = [
        "no json",
        "[]",
        "{}",
        '{"statistics": []}',
        json.dumps({"statistics": [vars(acceptance()) | {"hits": [[1]]}]}),
        json.dumps({"statistics": [vars(acceptance()) | {"hits": [[101, 0, 0], [0] * 3, [0] * 3]}]}),
        json.dumps({"statistics": [vars(acceptance()) | {"dynamic": [{"dynamic": [8, 2, 2], "tau": 99}]}]}),
    ]
    for text in broken:
        file.write_text(text)
        with pytest.raises(UserError, match="--stats .*run without --stats") as error:
            tree_search.read_statistics(file)
        assert error.value.code == errors.BAD_FILE
    with pytest.raises(UserError):
        tree_search.read_statistics(tmp_path / "missing.json")


# ---- end to end -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny target and two heads on disk."""
    directory = tmp_path_factory.mktemp("tune")
    model = tiny_model(torch.float32)
    save_hf(model, directory)
    for seed in (1, 2):
        head = tiny_head(model, seed=seed)
        save_eagle(head.config, head.state_dict(), directory / f"eagle{seed}")
    return directory


def fake_runs(rates: dict[str, float], prompts: int = 3, forks: int = 0) -> list[dict]:
    """Runs of 21 tokens at the given rates; on the first `forks` prompts plain decoding took another path."""
    runs = []
    for name, p, T in itertools.product(rates, range(prompts), (0.0, 1.0)):
        ids = list(range(21)) if not (name == "plain" and p < forks) else [5] * 21
        runs.append({"tree": name, "prompt": p, "temperature": T, "rep": 0, "token_ids": ids})
        runs[-1] |= {"tokens_per_step": [2] * 10, "decode_seconds": 20 / rates[name]}
    return runs


def test_rates_count_all_tokens_over_all_times_where_tokens_agree():
    """A speed over different texts: forked prompts are left out for every tree, and most of them forking is a bug."""
    runs = fake_runs({"a": 10.0, "plain": 5.0})
    for T in (0.0, 1.0):  # a second repetition, slow once: the median of two is their mean
        runs.append(runs[0] | {"rep": 1, "temperature": T, "decode_seconds": 4.0})
    outcome = tree_tuning.compare(runs, ["a", "plain"])
    assert outcome["rows"]["a"]["tokens_per_second"] == pytest.approx(120 / (4 * 2 + 2 * 3))
    assert outcome["rows"]["a"]["tau"] == 2 and outcome["compared"] == 6
    outcome = tree_tuning.compare(fake_runs({"a": 10.0, "plain": 5.0}, forks=1), ["a", "plain"])
    assert outcome["different_tokens"] == 2 and len(outcome["rows"]["a"]["per_prompt"]) == 4
    with pytest.raises(ValueError, match="this is a bug"):
        tree_tuning.compare(fake_runs({"a": 10.0, "plain": 5.0}, forks=2), ["a", "plain"])


def run_main(checkpoint, monkeypatch, tmp_path, *flags: str) -> int:
    monkeypatch.setattr(tree_tuning, "find_prompts", lambda args, base, limit: [list(p) for p in PROMPTS])
    monkeypatch.setenv("EAGLET_CACHE", str(tmp_path / "cache"))
    common = "--device cpu --ctx 128 --max-new-tokens 12 --rounds 1 --reps 1 --max-nodes 8 --max-depth 4 -q".split()
    return tune_tree.main(["--checkpoint", str(checkpoint), *common, *flags])


def fake_pipeline(monkeypatch, tuned_rate: float, plain: float = 60.0) -> list[str]:
    """Replace everything that takes time; the tuned tree (the first of every race) runs at tuned_rate."""
    costs = Costs(line(1, 0.05), line(0.1, 0), line(0.1, 0.01), {2: (0.2, 0.1)})
    monkeypatch.setattr(tree_tuning, "measure_costs", lambda *a: costs)
    monkeypatch.setattr(tree_tuning, "collect", lambda base, head, p, params, *a: acceptance(params.temperature))
    order: list[str] = []

    def race(engines, prompts, requests, reps, progress):
        order[:] = list(engines)
        rates = dict.fromkeys(engines, 100.0) | {"plain": plain, "paper25": 90.0}
        return fake_runs(rates | {order[0]: tuned_rate} if "plain" in engines else rates)

    monkeypatch.setattr(tree_tuning, "race", race)
    return order


def test_a_losing_winner_is_not_written(checkpoint, monkeypatch, tmp_path, capsys):
    """The model of costs believed over the clock: a tree slower than a known one must never become the default."""
    out = tmp_path / "tree.json"
    order = fake_pipeline(monkeypatch, 80.0)
    assert run_main(checkpoint, monkeypatch, tmp_path, "--out", str(out)) == 0
    assert order[1:] == ["paper25", "dynamic:16,4,4", "plain"]
    assert trees.parse_tree(str(out)) == DynamicTree(16, 4, 4)
    written = json.loads(out.read_text())
    assert written["winner"] == "dynamic:16,4,4" and "the tuned tree lost: 0.800 x" in written["verdict"]
    assert "the tuned tree lost" in capsys.readouterr().out


def test_a_tree_that_is_slower_than_plain_decoding_is_no_winner(checkpoint, monkeypatch, tmp_path, capsys):
    """A tree at half the speed of plain decoding that --tree auto finds from then on, called the winner."""
    fake_pipeline(monkeypatch, 120.0, plain=240.0)
    assert run_main(checkpoint, monkeypatch, tmp_path) == 1
    assert not (tmp_path / "cache" / "trees").exists()
    page = capsys.readouterr().out
    assert "plain decoding won" in page and "0.50x of its speed" in page and "nothing was written" in page
    assert run_main(checkpoint, monkeypatch, tmp_path, "--out", str(tmp_path / "tree.json")) == 1
    assert json.loads((tmp_path / "tree.json").read_text())["winner"] == "plain decoding"


def test_a_winning_tree_is_written_and_found_by_auto(checkpoint, monkeypatch, tmp_path, capsys):
    """A file that --tree does not read, or that --tree auto looks for elsewhere or takes for another head's."""
    head = str(checkpoint / "eagle1")
    flags = ["--checkpoint", str(checkpoint), "--prompt-ids", "1,5,9", "--max-new-tokens", "4", "--ctx", "64"]
    flags += ["--device", "cpu"]
    monkeypatch.setenv("EAGLET_CACHE", str(tmp_path / "cache"))
    assert generate.main([*flags, "--eagle", head, "--tree", "auto"]) == errors.USAGE
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "python -m scripts.tune_tree --checkpoint" in error and head in error
    fake_pipeline(monkeypatch, 120.0)
    assert run_main(checkpoint, monkeypatch, tmp_path) == 0
    assert "(--tree auto)" in capsys.readouterr().out
    (file,) = (tmp_path / "cache" / "trees").iterdir()
    written = json.loads(file.read_text())
    tree = trees.parse_tree(str(file))
    assert "the tuned tree won" in written["verdict"] and tree_tuning.tree_json(tree).items() <= written.items()
    assert tree not in (trees.PAPER25, DynamicTree(16, 4, 4))
    wanted = "environment model head quantization dtype command costs statistics final candidates".split()
    assert set(wanted) <= set(written) and tree_search.read_statistics(file)
    engine = load.load(checkpoint, eagle=head, tree="auto", ctx=64, device="cpu")
    assert (engine.drafter.N, engine.drafter.D) == (tree.N, tree.D)
    assert generate.main([*flags, "--eagle", head, "--tree", "auto", "-q"]) == 0
    other = str(checkpoint / "eagle2")
    assert generate.main([*flags, "--eagle", other, "--tree", "auto"]) == errors.USAGE
    assert generate.main([*flags, "--tree", "auto"]) == errors.USAGE
    assert "needs --eagle" in capsys.readouterr().err


def test_the_key_tells_apart_what_changes_the_best_tree(checkpoint, monkeypatch, tmp_path):
    """One cached tree for two devices, models, heads, quantizations or ways to run."""
    monkeypatch.setenv("EAGLET_CACHE", str(tmp_path))
    opened = Checkpoint.open(checkpoint)
    one, two = (read_eagle(checkpoint / f"eagle{i}", opened.config) for i in (1, 2))
    opts = options.LoadOptions(str(checkpoint), device="cpu")
    path = tree_choice.tuned_tree_path(opts, opened, one)
    assert path == tree_choice.tuned_tree_path(opts, opened, one)
    quantized = tmp_path / "int4"
    quantized.mkdir()
    raw = json.loads((checkpoint / "config.json").read_text()) | {"eaglet_quant": {"mode": "int4"}}
    (quantized / "config.json").write_text(json.dumps(raw))
    others = [
        tree_choice.tuned_tree_path(opts, opened, two),
        tree_choice.tuned_tree_path(opts, Checkpoint.open(quantized), one),
        tree_choice.tuned_tree_path(opts, replace(opened, spec=QuantSpec("int4")), one),
        tree_choice.tuned_tree_path(opts, replace(opened, config=replace(opened.config, rms_norm_eps=1e-3)), one),
        *(
            tree_choice.tuned_tree_path(replace(opts, **more), opened, one)
            for more in ({"dtype": "bfloat16"}, {"compile": True}, {"draft_vocab": 9}, {"kv": "int8"})
        ),
    ]
    monkeypatch.setattr("tree_choice.describe_device", lambda device: "NVIDIA GeForce RTX 3090")
    others.append(tree_choice.tuned_tree_path(opts, opened, one))
    assert "NVIDIA-GeForce-RTX-3090" in others[-1].name
    assert len({path, *others}) == 10


@pytest.mark.parametrize("tree", [trees.PAPER25, trees.chain(3), DynamicTree(16, 4, 4)], ids=tree_tuning.describe)
def test_a_written_tree_reads_back(tree, tmp_path):
    """Keys around the tree that confuse the parser, or ranks that come back as something else."""
    write_json(tmp_path / "t.json", tree_tuning.tree_json(tree) | {"statistics": [], "dtype": "float32"})
    assert trees.parse_tree(str(tmp_path / "t.json")) == tree and len(list(tmp_path.iterdir())) == 1


def test_a_real_run_uses_other_prompts_for_the_verification(checkpoint, monkeypatch, tmp_path, capsys):
    """Trees judged on the prompts that chose them; and the whole program, with real clocks, on a tiny model."""
    seen: dict[str, list] = {"collect": [], "race": []}
    collect, race = tree_search.collect, tree_tuning.race

    def spy_collect(base, head, prompts, *rest):
        seen["collect"] += prompts
        return collect(base, head, prompts, *rest, topks=(2,))

    def spy_race(engines, prompts, *rest):
        seen["race"].append((list(engines), prompts))
        return race(engines, prompts, *rest)

    real_costs = tree_costs.measure_costs
    monkeypatch.setattr(tree_tuning, "measure_costs", lambda *a: real_costs(*a, topks=(2,)))
    monkeypatch.setattr(tree_tuning, "collect", spy_collect)
    monkeypatch.setattr(tree_tuning, "race", spy_race)
    out = tmp_path / "tree.json"
    assert run_main(checkpoint, monkeypatch, tmp_path, "--out", str(out)) in (0, 1)  # a random head need not pay
    final, checked = seen["race"][-1]
    assert "plain" in final and "paper25" in final
    assert all(prompt not in seen["collect"] for prompt in checked)
    for engines, prompts in seen["race"][:-1]:
        assert "plain" not in engines and all(prompt not in checked for prompt in prompts)
    written = json.loads(out.read_text())
    for costs in written["costs"]:
        assert all(v > 0 for name in ("verify", "extend", "level") for v in costs[name].values())
    assert trees.parse_tree(str(out)) and "plain" in capsys.readouterr().out
    steps = sum(a["trials"][0][0] for a in written["statistics"])
    assert steps > 0 and [a["temperature"] for a in written["statistics"]] == [0.0, 1.0]
    # the same again from its own statistics: nothing is collected, and temperatures must match
    seen["collect"].clear()
    fake_race = fake_pipeline(monkeypatch, 120.0)
    monkeypatch.setattr(tree_tuning, "collect", spy_collect)
    assert run_main(checkpoint, monkeypatch, tmp_path, "--out", str(out), "--stats", str(out)) == 0
    assert not seen["collect"] and fake_race
    flags = ["--out", str(out), "--stats", str(out), "--temperature", "0.7"]
    assert run_main(checkpoint, monkeypatch, tmp_path, *flags) == errors.USAGE
    assert "ask for the same" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--max-nodes", "3"], "--max-nodes is 3; allowed: 8 to 128"),
        (["--reps", "0"], "--reps is 0"),
        (["--eagle", "nowhere"], "nowhere"),
    ],
)
def test_bad_flags_are_one_line(flags, message, checkpoint, capsys):
    """A traceback, or minutes of timing before a usage error."""
    assert tune_tree.main(["--checkpoint", str(checkpoint), "--device", "cpu", *flags]) in (2, 3)
    error = capsys.readouterr().err
    assert error.startswith("error  ") and error.count("\n") == 1 and message in error


def test_costs_are_measured_without_changing_the_engine(monkeypatch):
    """Timing on a live request would eat its tokens; a part timed as a difference must not come out negative."""
    head = tiny_head(tiny_model(torch.float32))
    base = eagle_engine(head, trees.chain(2))
    before = base.generate(PROMPTS[0], SamplingParams(max_new_tokens=9)).run()[0].token_ids
    costs = tree_costs.measure_costs(base, head, PROMPTS[0], SamplingParams(temperature=1.0), 8, 5, 1, (2,))
    assert set(costs.extend) == {1, 2, 4, 5} and 8 in costs.verify and set(costs.dynamic) == {2}
    assert min(*costs.level.values(), *costs.verify.values(), *costs.dynamic[2]) > 0
    assert base.generate(PROMPTS[0], SamplingParams(max_new_tokens=9)).run()[0].token_ids == before


def test_the_drafter_that_is_timed_is_the_heads_own():
    """A head of the paper's Figure 8 tuned with a drafter that pairs its features with other tokens."""
    model = tiny_model(torch.float32)
    base = eagle_engine(tiny_head(model), trees.chain(2))
    unshifted = tiny_head(model, unshifted=True)
    assert type(tree_costs.tree_engine(base, unshifted, trees.PAPER25).drafter) is UnshiftedDrafter
    assert type(tree_costs.tree_engine(base, tiny_head(model), trees.PAPER25).drafter) is EagleDrafter
    with pytest.raises(ValueError, match="static trees"):
        tree_costs.measure_costs(base, unshifted, PROMPTS[0], SamplingParams(), 8, 5, 1, (2,))
