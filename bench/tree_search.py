"""TODO."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.arms import DYNAMIC, DYNAMIC_GPU, EngineArm
from bench.environment import environment, fingerprint
from bench.measure import first_fork
from bench.suites import held_out_prompts, prompts_of, read_suite
from bench.summary import bootstrap
from bench.tables import table
from bench.tree_costs import SHRINK, TOPKS, WIDTHS, Costs, interpolate, measure_costs, tree_engine
from eagle_draft import EagleHead
from engine import Engine
from load import LoadOptions, load
from sampling import SamplingParams
from step import StepOutput
from support.errors import BadFileError, UsageError
from tree import MAX_DEPTH, MAX_NODES, PAPER25, DynamicTree, StaticTree, parse_tree

CANDIDATES = 64  # solutions of the dynamic program that are scored again with every level's own width


def wide_tree(depth: int, ranks: int, nodes: int) -> StaticTree:
    """The instrumented tree: every inner node has `ranks` children, and as many of the likeliest paths go on as `nodes`
    rows allow (a path's price is the product of its ranks, counted from 1). ValueError if not even one chain fits."""
    best: StaticTree | None = None
    for price in range(1, ranks + 1):
        paths, inner = [], [()]
        for _ in range(depth):
            level = [(*path, r) for path in inner for r in range(ranks)]
            paths += level
            inner = [path for path in level if math.prod(r + 1 for r in path) <= price]
        if len(paths) >= min(nodes, MAX_NODES):
            break
        best = StaticTree(tuple(paths))
    if best is None:
        raise ValueError(f"depth {depth} x {ranks} ranks needs more than {nodes} nodes; lower --max-depth.")
    return best


class RankStatistics:
    """An engine observer: for every accepted node, how often each of its child ranks was there to take (`trials`) and
    was taken (`hits`), [depth][rank]; depth 0 is the root's children. Batch row 0 only."""

    def __init__(self, tree: StaticTree):
        self.tree, self.steps = tree, 0
        self.children = [0] * tree.N
        for parent in tree.parent[1:]:
            self.children[parent] += 1
        self.trials = [[0] * tree.max_children for _ in range(tree.D)]
        self.hits = [[0] * tree.max_children for _ in range(tree.D)]

    def __call__(self, output: StepOutput) -> None:
        count = int(output.count[0])
        if not count:
            return
        self.steps += 1
        path = output.path[0, :count].tolist()
        for depth, node in enumerate(path):
            for rank in range(self.children[node]):
                self.trials[depth][rank] += 1
            if depth + 1 < count:
                self.hits[depth][self.tree.rank[path[depth + 1]]] += 1


class DynamicStatistics:
    """An engine observer on one large dynamic tree: tokens per step of every smaller one with the same topk.

    A tree of N' nodes and depth' is the best N'-1 of the nodes not deeper than depth' + 1 (ties to the lower node), and
    the target's walk through it is the part of the recorded walk that lies inside. Steps of the smaller tree begin
    elsewhere, so this is an estimate of its tau, at the same places in the text."""

    def __init__(self, tree: DynamicTree, sizes: Sequence[int], depths: Sequence[int]):
        self.shapes = [(N, d) for d in depths for N in sizes if d <= tree.depth and N <= tree.N]
        self.topk, self.steps, self.tokens = tree.topk, 0, dict.fromkeys(self.shapes, 0)

    def __call__(self, output: StepOutput) -> None:
        count = int(output.count[0])
        if not count:
            return
        self.steps += 1
        draft = output.draft
        path = output.path[0, 1:count].tolist()
        depth, scores, valid = (t[0].tolist() for t in (draft.depth, draft.scores, draft.valid))
        order = sorted((i for i in range(1, len(depth)) if valid[i]), key=lambda i: (-scores[i], i))
        place: dict[int, dict[int, int]] = {}
        for N, d in self.shapes:
            if d not in place:
                place[d] = {node: i for i, node in enumerate(n for n in order if depth[n] <= d + 1)}
            self.tokens[N, d] += 1 + sum(place[d].get(node, N) < N - 1 for node in path)

    def table(self) -> list[dict[str, Any]]:
        """One entry per dynamic tree that topk's pool can fill: {"dynamic": [N, depth, topk], "tau": ...}."""
        fits = [s for s in self.shapes if s[0] - 1 <= self.topk + s[1] * self.topk**2]
        return [
            {"dynamic": [N, d, self.topk], "tau": self.tokens[N, d] / max(self.steps, 1)} for N, d in fits
        ]


@dataclass
class Acceptance:
    """What one temperature's runs counted."""

    temperature: float
    trials: list[list[int]]
    hits: list[list[int]]
    dynamic: list[dict[str, Any]]

    def probability(self) -> Tensor:
        """[D, K] float64: the chance that the target takes child r of an accepted node at depth d. Where trials are
        few it leans on the same rank one level above."""
        rows: list[Tensor] = []
        for tried, hit in zip(self.trials, self.hits, strict=True):
            t, h = torch.tensor(tried, dtype=torch.float64), torch.tensor(hit, dtype=torch.float64)
            rows.append((h + SHRINK * rows[-1]) / (t + SHRINK) if rows else h / t.clamp(min=1))
        return torch.stack(rows)

    def tau(self, tree: StaticTree | DynamicTree) -> float:
        """Expected tokens per step; 0 for a dynamic tree that was not looked at."""
        if isinstance(tree, StaticTree):
            return expected_tokens(tree, self.probability())
        shape = [tree.N, tree.depth, tree.topk]
        return next((e["tau"] for e in self.dynamic if e["dynamic"] == shape), 0.0)


def pooled(parts: Sequence[Acceptance]) -> Acceptance:
    """All temperatures as one: their counts added up (dynamic trees: mean tau)."""

    def add(tables: Sequence[list[list[int]]]) -> list[list[int]]:
        return [[sum(cell) for cell in zip(*row, strict=True)] for row in zip(*tables, strict=True)]

    taus = [
        {"dynamic": e["dynamic"], "tau": statistics.mean(p.tau(DynamicTree(*e["dynamic"])) for p in parts)}
        for e in parts[0].dynamic
    ]
    return Acceptance(-1.0, add([p.trials for p in parts]), add([p.hits for p in parts]), taus)


def read_statistics(path: str | Path) -> list[Acceptance]:
    """The "statistics" of a file that this program wrote; UserError (3) for anything else."""
    try:
        items = json.loads(Path(path).read_text(encoding="utf-8"))["statistics"]
        found = []
        for item in items:
            trials, hits = item["trials"], item["hits"]
            shape = {(len(trials), len(row)) for row in [*trials, *hits]}
            pairs = [(t, h) for a, b in zip(trials, hits, strict=True) for t, h in zip(a, b, strict=True)]
            if len(shape) != 1 or not all(type(t) is type(h) is int and 0 <= h <= t for t, h in pairs):
                raise ValueError("trials and hits must be tables of counts of one shape, hits <= trials")
            for entry in item["dynamic"]:
                DynamicTree(*entry["dynamic"])
                if not 1 <= float(entry["tau"]) <= MAX_DEPTH + 1:
                    raise ValueError(f"tau {entry['tau']!r:.20} of a dynamic tree is impossible")
            found.append(Acceptance(float(item["temperature"]), trials, hits, item["dynamic"]))
        if not found or len({(len(a.trials), len(a.trials[0])) for a in found}) != 1:
            raise ValueError("it must hold at least one temperature, all with tables of one shape")
        return found
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        why = f"no statistics of this program ({type(error).__name__}: {error})"
        raise BadFileError(f"--stats {path}: {why}; run without --stats to measure them.") from None


def collect(
    base: Engine,
    head: EagleHead,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    ctx: int,
    max_nodes: int,
    max_depth: int,
    topks: Sequence[int] = TOPKS,
) -> Acceptance:
    """Acceptance at params' temperature on the prompts: one run with the wide static tree, one per topk."""
    most = min(8 * max(max_nodes, max_depth + 1), MAX_NODES)
    static = RankStatistics(wide_tree(max_depth, 8, most))
    sizes, depths = [N for N in WIDTHS if 4 <= N <= max_nodes], range(1, max_depth)
    observers: list[tuple[Any, Any]] = [(static.tree, static)]
    for K in topks:
        pool = DynamicTree(2, max_depth - 1, K).pool
        tree = DynamicTree(min(pool + 1, 2 * max_nodes, MAX_NODES), max_depth - 1, K)
        observers.append((tree, DynamicStatistics(tree, sizes, list(depths))))
    for tree, observer in observers:
        engine = tree_engine(base, head, tree, ctx)
        engine.observer = observer
        for prompt in prompts:
            engine.generate(prompt, params).run()
    dynamic = [entry for _, o in observers[1:] for entry in o.table()]
    return Acceptance(params.temperature, static.trials, static.hits, dynamic)


def expected_tokens(tree: StaticTree, probability: Tensor) -> float:
    """1 + the sum over nodes of the product of probability[depth][rank] along the path; 0 beyond the table."""
    D, K = probability.shape
    p, value = probability.tolist(), [1.0] * tree.N
    for i in range(1, tree.N):
        d, r = tree.depth[i] - 1, tree.rank[i]
        value[i] = value[tree.parent[i]] * (p[d][r] if d < D and r < K else 0.0)
    return sum(value)


def _max_plus(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """out[n, m] = max over (i, j) of a[i, j] + b[n - i, m - j], and the flat index of the best (i, j). All [N+1, M+1]."""
    rows, columns = a.shape
    windows = F.pad(b, (columns - 1, 0), value=-math.inf).unfold(1, columns, 1)  # [n - i, m, columns - 1 - j]
    best, at = torch.full_like(a, -math.inf), torch.zeros(a.shape, dtype=torch.int64)
    for i, usable in enumerate(a.isfinite().any(1).tolist()):
        if usable:  # one i at a time stays in the processor's cache
            value, j = (windows[: rows - i] + a[i].flip(0)).max(-1)
            at[i:] = torch.where(value > best[i:], (i + 1) * columns - 1 - j, at[i:])
            best[i:] = torch.maximum(best[i:], value)
    return best, at


class _Program:
    """The best subtrees under one depth limit. best[d][n, m]: the greatest expected number of accepted nodes, itself
    included, of a subtree that hangs at depth d below an accepted path, with n nodes of which m are drafted from (have
    children); `rest[d][r]` the same for the children of ranks r, r+1, ... of a node at depth d, with the argmax."""

    def __init__(self, probability: Tensor, D: int, nodes: int, rows: int):
        self.columns, K = rows + 1, probability.shape[1]
        nothing = torch.full((nodes + 1, rows + 1), -math.inf, dtype=torch.float64)
        nothing[0, 0] = 0.0
        leaf = torch.full_like(nothing, -math.inf)
        leaf[1, 0] = 1.0
        self.rest: list[list[tuple[Tensor, Tensor | None]]] = [[] for _ in range(D)]
        best = leaf
        for d in reversed(range(D)):
            chain: list[tuple[Tensor, Tensor | None]] = [(nothing, None)]
            for r in reversed(range(K)):
                taken = torch.where(best.isinf(), best, probability[d, r] * best)
                value, at = _max_plus(taken, chain[0][0])
                value[0, 0] = 0.0  # no child of rank r: the list of children ends
                chain.insert(0, (value, at))
            self.rest[d] = chain
            best = leaf.clone()
            below = chain[0][0][1:-1, :-1] if d else chain[0][0][1:-1]  # the root's row is the extension's
            best[2:, 1 if d else 0 :] = 1.0 + below
        self.best = best  # of the root

    def tree(self, n: int, m: int) -> StaticTree:
        """The tree behind best[n, m] of the root."""
        paths: list[tuple[int, ...]] = []
        todo = [((), 0, 0, n - 1, m)] if n > 1 else []
        while todo:
            above, d, r, n, m = todo.pop()
            i, j = divmod(int(self.rest[d][r][1][n, m]), self.columns)
            paths.append((*above, r))
            if n - i:
                todo.append((above, d, r + 1, n - i, m - j))
            if i > 1:
                todo.append(((*above, r), d + 1, 0, i - 1, j - 1))
        return StaticTree(tuple(paths))


def best_static(
    probability: Tensor,
    costs: Costs,
    max_nodes: int,
    max_depth: int | None = None,
    max_rows: int | None = None,
) -> tuple[StaticTree, float]:
    """The static tree with the most expected tokens per second, and that rate.

    probability [D, K]: the chance of child rank r of an accepted node at depth d, independent of the rest of the path.
    For every depth limit, node count and number of drafted rows the program finds the tree with the most expected tokens;
    the rate of each then needs no further assumption about `verify` and `extend`. Level times enter by the mean width;
    the best CANDIDATES are scored again with every level's own width. Exact where level time is linear in the width,
    among trees that draft from at most max_rows nodes below the root (default: half of max_nodes, 24 at most)."""
    rows = min(max_nodes // 2, 24) if max_rows is None else max_rows
    found: list[tuple[float, int, int, int]] = []
    programs: dict[int, _Program] = {}
    for D in range(1, min(max_depth or probability.shape[0], probability.shape[0], max_nodes - 1) + 1):
        programs[D] = _Program(probability, D, max_nodes, rows)
        extend, tau = interpolate(costs.extend, D), programs[D].best.tolist()
        levels = [(D - 1) * interpolate(costs.level, m / (D - 1)) if D > 1 else 0.0 for m in range(rows + 1)]
        for n in range(2, max_nodes + 1):
            fixed = extend + interpolate(costs.verify, n)
            found += [(tau[n][m] / (fixed + levels[m]), D, n, m) for m in range(rows + 1) if tau[n][m] > 0]
    found.sort(reverse=True)
    solutions = {programs[D].tree(n, m) for _, D, n, m in found[:CANDIDATES]}
    rated = [(expected_tokens(t, probability) / costs.step(t), -t.N, t.paths, t) for t in solutions]
    rate, _, _, tree = max(rated)
    return tree, rate


def best_dynamic(
    parts: Sequence[Acceptance], costs: Sequence[Costs], max_nodes: int
) -> tuple[DynamicTree, float] | None:
    """The dynamic tree of the grid with the most tokens per second over all temperatures (harmonic mean), and that."""
    shapes = [DynamicTree(*e["dynamic"]) for e in parts[0].dynamic]
    usable = [t for t in shapes if t.N <= max_nodes and all(t.topk in c.dynamic for c in costs)]
    rated = [(mean_rate(t, parts, costs), -t.N, -t.depth, t.topk, t) for t in usable]
    return (max(rated)[-1], max(rated)[0]) if rated else None


def mean_rate(tree: StaticTree | DynamicTree, parts: Sequence[Acceptance], costs: Sequence[Costs]) -> float:
    """Tokens per second that the model predicts for equally many tokens at every temperature."""
    taus = [a.tau(tree) for a in parts]
    if not all(taus):
        return 0.0
    return len(parts) / sum(c.step(tree) / tau for c, tau in zip(costs, taus, strict=True))


def finalists(
    parts: Sequence[Acceptance], costs: Sequence[Costs], max_nodes: int
) -> dict[str, StaticTree | DynamicTree]:
    """The best static tree per temperature and for all of them, and the best dynamic tree; without repetitions."""
    everything = [(f"static T={a.temperature:g}", a, c) for a, c in zip(parts, costs, strict=True)]
    if len(parts) > 1:

        def mean(name: str) -> dict:
            keys = getattr(costs[0], name)
            return {k: statistics.mean(getattr(c, name)[k] for c in costs) for k in keys}

        middle = Costs(mean("verify"), mean("extend"), mean("level"))
        everything.append(("static all T", pooled(parts), middle))
    chosen: dict[str, StaticTree | DynamicTree] = {}
    for name, a, c in everything:
        tree, _ = best_static(a.probability(), c, max_nodes)
        if tree not in chosen.values():
            chosen[name] = tree
    if dynamic := best_dynamic(parts, costs, max_nodes):
        chosen["dynamic"] = dynamic[0]
    return chosen


def race(
    engines: Mapping[str, Engine],
    prompts: Sequence[list[int]],
    requests: Sequence[SamplingParams],
    reps: int,
    progress: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Every engine on every (prompt, request), `reps` times, interleaved: the order rotates from run to run. One
    dictionary per run. A repetition that is not counted goes first, on the longest prompt."""
    arms = [EngineArm(name, "same tokens", {}, engine) for name, engine in engines.items()]
    for arm in arms:
        for params in requests:
            arm.run(max(prompts, key=len), replace(params, max_new_tokens=min(16, params.max_new_tokens)))
    runs, turn, total = [], 0, reps * len(requests) * len(prompts)
    for rep in range(reps):
        for params in requests:
            for index, prompt in enumerate(prompts):
                progress(f"run {turn + 1} of {total}")
                turn += 1
                for k in range(len(arms)):
                    arm = arms[(k + turn) % len(arms)]
                    sample = arm.run(prompt, params)
                    runs.append(
                        {
                            "tree": arm.name,
                            "prompt": index,
                            "temperature": params.temperature,
                            "rep": rep,
                            "token_ids": sample.token_ids,
                            "tokens_per_step": sample.tokens_per_step,
                            "decode_seconds": sample.decode_seconds,
                        }
                    )
    return runs


def compare(runs: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Tokens per second and tau of every tree over the prompts where all have the same tokens, and how many were not.

    A prompt's time is the median of its repetitions; the rate is all tokens over all times. ValueError if more than half
    of the prompts differ (that is a bug, no rounding) or none decoded more than one token."""
    cells: dict[tuple, dict[str, list[dict]]] = {}
    for run in runs:
        cells.setdefault((run["prompt"], run["temperature"]), {}).setdefault(run["tree"], []).append(run)
    same = {}
    for key, arms in cells.items():
        ids = arms[names[0]][0]["token_ids"]
        if all(first_fork(ids, r["token_ids"]) is None for name in names for r in arms[name]):
            same[key] = arms
    differ = len(cells) - len(same)
    if differ * 2 > len(cells):
        raise ValueError(
            f"the trees gave different tokens on {differ} of {len(cells)} prompts: this is a bug."
        )
    kept = {key: arms for key, arms in same.items() if len(arms[names[0]][0]["token_ids"]) > 1}
    if not kept:
        raise ValueError("no prompt was continued by more than one token; choose other prompts.")
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        seconds = [statistics.median(r["decode_seconds"] for r in arms[name]) for arms in kept.values()]
        tokens = [len(arms[name][0]["token_ids"]) - 1 for arms in kept.values()]
        steps = [n for arms in kept.values() for n in arms[name][0]["tokens_per_step"]]
        rows[name] = {
            "tokens_per_second": sum(tokens) / sum(seconds),
            "tau": sum(steps) / len(steps),
            "per_prompt": [t / s for t, s in zip(tokens, seconds, strict=True)],
        }
    return {"rows": rows, "compared": len(kept), "different_tokens": differ}


def decide(outcome: dict[str, Any], tuned: str, known: Sequence[str]) -> tuple[str, str]:
    """(the tree to write, a sentence that says why): the tuned one if it is at least as fast as every known one."""
    rows = outcome["rows"]
    rates = {name: rows[name]["tokens_per_second"] for name in (tuned, *known)}
    best = max(known, key=rates.get)
    pairs = zip(rows[tuned]["per_prompt"], rows[best]["per_prompt"], strict=True)
    low, high = bootstrap([a / b for a, b in pairs])
    ratio = f"{rates[tuned] / rates[best]:.3f} x {best} (95 % interval of the paired median {low:.3f} to {high:.3f})"
    if rates[tuned] >= rates[best]:
        return tuned, f"the tuned tree won: {ratio}"
    return best, f"the tuned tree lost: {ratio}; written is {best}"


def tree_json(tree: StaticTree | DynamicTree) -> dict[str, Any]:
    """What `parse_tree` reads."""
    if isinstance(tree, DynamicTree):
        return {"dynamic": [tree.N, tree.depth, tree.topk]}
    return {"paths": [list(path) for path in tree.paths]}


def describe(tree: StaticTree | DynamicTree) -> str:
    """A tree in a few words."""
    if isinstance(tree, DynamicTree):
        return f"dynamic:{tree.N},{tree.depth},{tree.topk}"
    if tree == PAPER25:
        return "paper25"
    rows = ",".join(str(len(rows)) for rows in tree.levels)
    return f"static N {tree.N} D {tree.D}" + (f" levels {rows}" if rows else "")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Through a temporary file, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def find_prompts(args: argparse.Namespace, base: Engine, limit: int) -> list[list[int]]:
    """Different prompts that fit, from the suite (first turns), the text, or held-out modules of the standard library."""
    if base.tokenizer is None:
        raise BadFileError(f"{args.checkpoint} has no tokenizer files; the prompts need one.")
    if args.suite:
        how = prompts_of(args, base.tokenizer)
        found = [how.ids(q.turns[:1], []) for q in read_suite(args.suite, args.prompts)]
    else:
        try:
            text = Path(args.text).read_text(encoding="utf-8") if args.text else None
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--text {args.text}: {error}") from error
        found = held_out_prompts(base.tokenizer, args.prompts, args.prompt_tokens, text)
    unique = [list(ids) for ids in dict.fromkeys(map(tuple, found)) if len(ids) <= limit]
    if len(unique) < 2:
        raise UsageError(f"{len(unique)} different prompts of at most {limit} tokens; 2 are needed.")
    return unique


def tune(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything of the module's docstring but the writing; the content of the file. Raises UserError."""
    opts = LoadOptions(
        args.checkpoint,
        args.eagle,
        tuple(args.eagle_config),
        draft_vocab=args.draft_vocab,
        draft_vocab_text=args.draft_vocab_text,
        **{k: getattr(args, k) for k in ("device", "dtype", "compile", "kernels", "ctx")},
    )
    given = {k: v for k, v in vars(opts).items() if k != "checkpoint"}
    base = load(args.checkpoint, **given)
    head, ctx, device = base.head, base.ctx, base.model.device
    held = find_prompts(args, base, ctx - args.new_tokens)
    tuning, checking = held[0::2], held[1::2]
    requests = [
        SamplingParams(temperature=t, seed=args.seed, max_new_tokens=args.new_tokens)
        for t in dict.fromkeys(args.temperature)
    ]
    max_depth = min(args.max_depth, MAX_DEPTH)
    parts = read_statistics(args.stats) if args.stats else None
    if parts is not None and [a.temperature for a in parts] != [p.temperature for p in requests]:
        have = " ".join(f"{a.temperature:g}" for a in parts)
        raise UsageError(f"--stats {args.stats} was taken at --temperature {have}; ask for the same.")
    costs = []
    for params in requests:
        say(f"timing the parts of a step, T = {params.temperature:g}")
        costs.append(
            measure_costs(base, head, tuning[0], params, ctx, args.max_nodes, max_depth, args.rounds)
        )
    if parts is None:
        parts = []
        for params in requests:
            say(f"acceptance on {len(tuning)} prompts, T = {params.temperature:g}")
            parts.append(collect(base, head, tuning, params, ctx, args.max_nodes, max_depth))
    say("solving")
    known = {"paper25": PAPER25}
    default = parse_tree(DYNAMIC_GPU if device.type == "cuda" else DYNAMIC)
    known[describe(default)] = default
    chosen = {n: t for n, t in finalists(parts, costs, args.max_nodes).items() if t not in known.values()}
    if not chosen:  # a known tree is the solution: it runs as its own candidate
        chosen = {"static": best_static(parts[0].probability(), costs[0], args.max_nodes)[0]}
    predicted = {name: mean_rate(tree, parts, costs) for name, tree in (chosen | known).items()}
    engines = {name: tree_engine(base, head, tree, ctx) for name, tree in (chosen | known).items()}
    first = None
    if len(chosen) > 1:
        heat = race({n: engines[n] for n in chosen}, tuning, requests, 1, lambda text: say(f"heat: {text}"))
        first = compare(heat, list(chosen))
        tuned = max(chosen, key=lambda name: first["rows"][name]["tokens_per_second"])
    else:
        tuned = next(iter(chosen))
    last = {n: engines[n] for n in (tuned, *known)} | {"plain": tree_engine(base, head, None, ctx)}
    runs = race(last, checking, requests, args.reps, lambda text: say(f"final: {text}"))
    outcome = compare(runs, list(last))
    winner, verdict = decide(outcome, tuned, list(known))
    by_temperature = {}
    for p in requests:
        these = [r for r in runs if r["temperature"] == p.temperature]
        by_temperature[f"{p.temperature:g}"] = compare(these, list(last))
    if outcome["rows"]["plain"]["tokens_per_second"] > outcome["rows"][winner]["tokens_per_second"]:
        verdict += "; plain decoding is faster still: this head does not pay here"
    everything = chosen | known
    return tree_json(everything[winner]) | {
        "tree": describe(everything[winner]),
        "winner": winner,
        "verdict": verdict,
        "command": "python -m scripts.tune_tree " + " ".join(args.argv),
        "device_type": device.type,
        "environment": environment(device),
        "model": Path(args.checkpoint).resolve().name,
        "weights_sha256": fingerprint(base.model),
        "head": Path(args.eagle).name,
        "quantization": getattr(base.model, "quant", None) or "none",
        "dtype": base.options.dtype,
        "compile": args.compile,
        "temperatures": [p.temperature for p in requests],
        "prompts": {"statistics": len(tuning), "verification": len(checking), "new_tokens": args.new_tokens},
        "candidates": {
            name: tree_json(tree)
            | {"tree": describe(tree), "predicted_tokens_per_second": predicted.get(name)}
            for name, tree in everything.items()
        },
        "heat": first,
        "final": outcome,
        "final_by_temperature": by_temperature,
        "costs": [c.to_dict() for c in costs],
        "statistics": [vars(a) for a in parts],
    }


def report(content: dict[str, Any]) -> str:
    """The markdown page on stdout."""
    lines = [
        f"{content['model']}  {content['head']}  {content['dtype']}  quantization {content['quantization']}   "
        f"{content['environment']['device']}{'   compiled' if content['compile'] else ''}",
        "",
    ]
    plain = content["final"]["rows"]["plain"]["tokens_per_second"]
    body = []
    for name, row in content["final"]["rows"].items():
        by_t = content["final_by_temperature"].values()
        cells = [f"{o['rows'][name]['tokens_per_second']:.1f}" for o in by_t]
        facts = content["candidates"].get(name, {})
        what, guess = facts.get("tree", "plain decoding"), facts.get("predicted_tokens_per_second")
        rate = row["tokens_per_second"]
        body.append([name, what, f"{row['tau']:.2f}", f"{rate:.1f}", f"{rate / plain:.2f}x", *cells])
        body[-1].insert(3, f"{guess:.1f}" if guess else "-")
    head = [
        "tree",
        "is",
        "tau",
        "predicted",
        "tok/s",
        "of plain",
        *(f"T = {t:g}" for t in content["temperatures"]),
    ]
    outcome = content["final"]
    lines += [table(head, body), "", content["verdict"]]
    if outcome["different_tokens"]:
        lines.append(f"left out: {outcome['different_tokens']} runs where tokens forked (fp32 near-ties)")
    return "\n".join(lines)
