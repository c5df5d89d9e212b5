"""Finding the draft tree that is fastest on this machine, and proving it end to end (scripts.tune_tree).

The candidates come from bench/tree_search.py. They are raced against each other, then the fastest of them against the
known trees and plain decoding on prompts that had no part in the choice. What is written is what won.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.arms import DYNAMIC, DYNAMIC_GPU, SAME_TOKENS, EngineArm
from bench.environment import environment, fingerprint
from bench.records import bootstrap
from bench.report import number, table
from bench.suites import held_out_prompts, prompts_of, read_suite
from bench.tree_costs import Costs, measure_costs, tree_engine
from bench.tree_search import Acceptance, Tree, best_static, collect, finalists, mean_rate, read_statistics
from engine import Engine
from load import load
from options import options_from
from sampling import SamplingParams
from support.errors import BadFileError, UsageError
from support.progress import Progress
from tree import PAPER25, DynamicTree, parse_tree

# options of `load` that a tree is tuned for
TUNED_FOR = """checkpoint eagle eagle_config draft_vocab draft_vocab_text device dtype quant threads compile kernels
    ctx""".split()
Say = Callable[[str], None]
Prompts = Sequence[list[int]]
Requests = Sequence[SamplingParams]
Engines = Mapping[str, Engine]


def tune(args: argparse.Namespace, say: Say, progress: Progress) -> dict[str, Any]:
    """Everything that scripts.tune_tree does except writing the file; returns the file's content. Raises UserError."""
    base = load(**options_from(args, *TUNED_FOR))
    device, head = base.model.device, base.head
    held = find_prompts(args, base, base.ctx - args.max_new_tokens)
    temperatures = list(dict.fromkeys(args.temperature))
    requests = [SamplingParams(temperature=t, seed=args.seed, max_new_tokens=args.max_new_tokens) for t in temperatures]
    tuning, checking = held[0::2], held[1::2]
    costs, parts = _measure(args, base, tuning, requests, say)
    say("solving")
    default = parse_tree(DYNAMIC_GPU if device.type == "cuda" else DYNAMIC)
    known = {"paper25": PAPER25, describe(default): default}
    chosen = {n: t for n, t in finalists(parts, costs, args.max_nodes).items() if t not in known.values()}
    if not chosen:  # a known tree is the solution and runs as its own candidate
        chosen = {"static": best_static(parts[0].probability(), costs[0], args.max_nodes)[0]}
    trees = chosen | known
    engines = {name: tree_engine(base, head, tree) for name, tree in trees.items()}
    tuned, heat = next(iter(chosen)), None
    if len(chosen) > 1:
        heat = compare(race({name: engines[name] for name in chosen}, tuning, requests, 1, progress), list(chosen))
        tuned = max(chosen, key=lambda name: heat["rows"][name]["tokens_per_second"])
    last = {name: engines[name] for name in (tuned, *known)} | {"plain": tree_engine(base, head, None)}
    runs = race(last, checking, requests, args.reps, progress)
    final = compare(runs, list(last))
    by_temperature = {f"{t:g}": compare([r for r in runs if r["temperature"] == t], list(last)) for t in temperatures}
    winner, verdict = decide(final, tuned, list(known))
    pays = final["rows"][winner]["tokens_per_second"] >= final["rows"]["plain"]["tokens_per_second"]
    candidates = {name: about(tree) for name, tree in trees.items()}
    for name, tree in trees.items():
        candidates[name]["predicted_tokens_per_second"] = mean_rate(tree, parts, costs)
    return about(trees[winner]) | {
        "command": " ".join(["python -m scripts.tune_tree", *args.argv]), "device_type": device.type,
        "environment": environment(device), "model": Path(args.checkpoint).resolve().name,
        "weights_sha256": fingerprint(base.model), "head": Path(args.eagle).name,
        "quantization": base.model.quant or "none", "dtype": base.options.dtype, "compile": args.compile,
        "winner": winner if pays else "plain decoding", "verdict": verdict,
        "heat": heat, "final": final, "final_by_temperature": by_temperature,
        "temperatures": temperatures, "candidates": candidates,
        "prompts": {"statistics": len(tuning), "verification": len(checking), "new_tokens": args.max_new_tokens},
        "costs": [asdict(c) for c in costs], "statistics": [asdict(a) for a in parts],
    }  # fmt: skip


def find_prompts(args: argparse.Namespace, base: Engine, limit: int) -> list[list[int]]:
    """Different prompts of at most `limit` tokens: the first turns of questions, or parts of a text.

    The default text is held-out modules of the standard library.
    """
    if base.tokenizer is None:
        raise BadFileError(f"{args.checkpoint} has no tokenizer files; the prompts need one.")
    if args.questions:
        how = prompts_of(args, base.tokenizer)
        found = [how.first(q) for q in read_suite(args.questions, args.prompts)]
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


def _measure(
    args: argparse.Namespace, base: Engine, prompts: Prompts, requests: Requests, say: Say
) -> tuple[list[Costs], list[Acceptance]]:
    """Costs and acceptance at every temperature. Acceptance may come from --stats."""
    parts = read_statistics(args.stats) if args.stats else []
    if args.stats and [a.temperature for a in parts] != [p.temperature for p in requests]:
        have = " ".join(f"{a.temperature:g}" for a in parts)
        raise UsageError(f"--stats {args.stats} was taken at --temperature {have}; ask for the same.")
    costs = []
    limits = args.max_nodes, args.max_depth
    for params in requests:
        say(f"timing the parts of a step, T = {params.temperature:g}")
        costs.append(measure_costs(base, base.head, prompts[0], params, *limits, args.rounds))
        if not args.stats:
            say(f"acceptance on {len(prompts)} prompts, T = {params.temperature:g}")
            parts.append(collect(base, base.head, prompts, params, *limits))
    return costs, parts


def race(engines: Engines, prompts: Prompts, requests: Requests, reps: int, progress: Progress) -> list[dict[str, Any]]:
    """Every engine on every (prompt, request), `reps` times, interleaved: the order rotates from run to run.

    Returns one dictionary per run. A repetition that is not counted goes first, on the longest prompt.
    """
    arms = [EngineArm(name, SAME_TOKENS, {}, engine) for name, engine in engines.items()]
    for arm, params in itertools.product(arms, requests):
        arm.run(max(prompts, key=len), replace(params, max_new_tokens=min(16, params.max_new_tokens)))
    runs = []
    turns = list(itertools.product(range(reps), requests, enumerate(prompts)))
    for turn, (rep, params, (index, prompt)) in enumerate(turns, 1):
        progress(turn / len(turns), f"race of {', '.join(engines)}")
        for k in range(len(arms)):
            arm = arms[(k + turn) % len(arms)]
            sample = arm.run(prompt, params)
            measured = {name: vars(sample)[name] for name in ("token_ids", "tokens_per_step", "decode_seconds")}
            runs.append({"tree": arm.name, "prompt": index, "temperature": params.temperature, "rep": rep} | measured)
    progress.close()
    return runs


def compare(runs: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Tokens per second and tau of every tree over the prompts where all have the same tokens, and how many had not.

    A prompt's time is the median of its repetitions. The rate is all tokens over all times. Raises ValueError if more
    than half of the prompts differ (that is a bug, no rounding) or none was continued by more than one token.
    """
    cells: dict[tuple, dict[str, list[dict]]] = {}
    for run in (run for run in runs if run["tree"] in names):
        arms = cells.setdefault((run["prompt"], run["temperature"]), {name: [] for name in names})
        arms[run["tree"]].append(run)
    texts = [{tuple(run["token_ids"]) for runs in arms.values() for run in runs} for arms in cells.values()]
    differ = sum(len(found) > 1 for found in texts)
    kept = [arms for arms, found in zip(cells.values(), texts, strict=True) if len(found) == 1 and len(*found) > 1]
    if differ * 2 > len(cells):
        raise ValueError(f"the trees gave different tokens on {differ} of {len(cells)} prompts: this is a bug.")
    if not kept:
        raise ValueError("no prompt was continued by more than one token; choose other prompts.")
    rows: dict[str, dict[str, Any]] = {}
    tokens = [len(arms[names[0]][0]["token_ids"]) - 1 for arms in kept]
    for name in names:
        seconds = [statistics.median(r["decode_seconds"] for r in arms[name]) for arms in kept]
        rows[name] = {
            "tokens_per_second": sum(tokens) / sum(seconds),
            "tau": statistics.fmean(n for arms in kept for n in arms[name][0]["tokens_per_step"]),
            "per_prompt": [t / s for t, s in zip(tokens, seconds, strict=True)],
        }
    return {"rows": rows, "compared": len(kept), "different_tokens": differ}


def decide(outcome: dict[str, Any], tuned: str, known: Sequence[str]) -> tuple[str, str]:
    """(the best tree, a sentence that says why): the tuned one if it is at least as fast as every known one."""
    rows = outcome["rows"]
    rates = {name: row["tokens_per_second"] for name, row in rows.items()}
    best = max(known, key=rates.get)
    pairs = zip(rows[tuned]["per_prompt"], rows[best]["per_prompt"], strict=True)
    low, high = bootstrap([a / b for a, b in pairs])
    ratio = f"{rates[tuned] / rates[best]:.3f} x {best} (95 % interval of the paired median {low:.3f} to {high:.3f})"
    winner, verdict = (tuned, f"won: {ratio}") if rates[tuned] >= rates[best] else (best, f"lost: {ratio}")
    verdict = f"the tuned tree {verdict}"
    if rates["plain"] > rates[winner]:
        of_plain = f"{winner} has {rates[winner] / rates['plain']:.2f}x of its speed"
        verdict = f"plain decoding won, and this head does not pay here: {of_plain}; {verdict}"
    return winner, verdict


def tree_json(tree: Tree) -> dict[str, Any]:
    """What `parse_tree` reads."""
    if isinstance(tree, DynamicTree):
        return {"dynamic": [tree.N, tree.depth, tree.topk]}
    return {"paths": [list(path) for path in tree.paths]}


def describe(tree: Tree) -> str:
    """A tree in a few words."""
    if isinstance(tree, DynamicTree):
        return f"dynamic:{tree.N},{tree.depth},{tree.topk}"
    if tree == PAPER25:
        return "paper25"
    rows = ",".join(str(len(rows)) for rows in tree.levels)
    return f"static N {tree.N} D {tree.D}" + (f" levels {rows}" if rows else "")


def about(tree: Tree) -> dict[str, Any]:
    """A tree in a file: what `parse_tree` reads, and what people read."""
    return tree_json(tree) | {"tree": describe(tree)}


def report(content: dict[str, Any]) -> str:
    """The markdown page on stdout."""
    final, by_temperature = content["final"], content["final_by_temperature"]
    plain = final["rows"]["plain"]["tokens_per_second"]
    body = []
    for name, row in final["rows"].items():
        facts = content["candidates"].get(name, {"tree": "plain decoding"})
        guess, rate = facts.get("predicted_tokens_per_second"), row["tokens_per_second"]
        cells = [name, facts["tree"], number(row["tau"]), number(guess, 1), number(rate, 1), f"{rate / plain:.2f}x"]
        body.append(cells + [number(o["rows"][name]["tokens_per_second"], 1) for o in by_temperature.values()])
    head = ["tree", "is", "tau", "predicted", "tok/s", "of plain", *(f"T = {T}" for T in by_temperature)]
    what = f"{content['model']}  {content['head']}  {content['dtype']}  quantization {content['quantization']}   "
    what += content["environment"]["device"] + "   compiled" * content["compile"]
    forked = f"left out: {final['different_tokens']} runs where tokens forked (fp32 near-ties)"
    lines = [what, "", table(head, body), "", content["verdict"], *([forked] if final["different_tokens"] else [])]
    return "\n".join(lines)
