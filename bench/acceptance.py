"""Acceptance of draft heads on held-out text, by tree, temperature and rule, and the tables that show it."""

from __future__ import annotations

import argparse
import datetime
import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.arms import build_engine
from bench.suites import Prompts, find_questions, held_out_prompts
from bench.tables import number, table
from load import load
from options import options_from
from runtime.results import GenerationResult, acceptance, n_alpha
from sampling import SamplingParams
from support.errors import UsageError
from support.files import read_json, write_json
from support.machine import describe_device, versions

TREES = ("chain:5", "paper25", "dynamic:26,5,8", "dynamic:60,7,10")
SHARED_NOISE, MULTI_ROUND, TOP_K = "shared noise", "multi-round", "top-k drafts"
RULES = {SHARED_NOISE: {}, TOP_K: {"draft_noise": False}, MULTI_ROUND: {"verify": "multi-round"}}
# What the columns of the table are called.
TITLES = {SHARED_NOISE: "shared noise (default)", MULTI_ROUND: "multi-round (paper)", TOP_K: "top-k drafts (EAGLE-2/3)"}
# What the report keeps of the CARD.json of a head that was trained on other inputs.
CARD = "inputs regenerated steps training_tokens chain_tau n_alpha held_out_accuracy device".split()


def summarise(results: Sequence[GenerationResult], plain: Sequence[GenerationResult], depth: int = 5) -> dict[str, Any]:
    """tau, accepted_by_depth and counts over all steps, and how many texts are the same as plain decoding's.

    n_alpha leaves out the last step of every text and goes to depth 5, but not beyond the tree's `depth`.
    """
    steps = [len(ids) for r in results for ids in r.tokens_per_step]
    whole = [len(ids) for r in results for ids in r.tokens_per_step[:-1]]
    tau, by_depth = acceptance(steps)
    return {
        "tau": tau,
        "accepted_by_depth": by_depth,
        "n_alpha": n_alpha(whole, min(depth, 5)),
        "tokens": sum(steps) + len(results),
        "steps": len(steps),
        "same": sum(r.token_ids == p.token_ids for r, p in zip(results, plain, strict=True)),
        "prompts": len(results),
    }


def prompts_of(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Prompt ids: the first turns of --questions in the model's chat template, or windows of held-out text.

    Raises UsageError for questions to a model without a chat template.
    """
    if args.questions:
        if not tokenizer.chat_template_source:
            raise UsageError("--questions needs a model with a chat template; use --text FILE.")
        chat = Prompts(tokenizer, chat=True)
        return [chat.first(question) for question in find_questions(args.questions, args.prompts, tokenizer, 0, 0)]
    text = Path(args.text).read_text(encoding="utf-8") if args.text else None
    return held_out_prompts(tokenizer, args.prompts, args.prompt_tokens, text)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Decode the same prompts with every head, tree, temperature and rule; the report as JSON values."""
    heads = args.eagle or [str(p) for p in sorted(Path(args.checkpoint).glob("eagle*")) if p.is_dir()]
    base = load(**options_from(args, "checkpoint", "dtype", "ctx"))
    prompts = prompts_of(args, base.tokenizer)
    request = SamplingParams(seed=1, max_new_tokens=args.max_new_tokens)
    params = {T: replace(request, temperature=T) for T in args.temperature}
    plain = {T: [base.generate(p, params[T]).run()[0] for p in prompts] for T in params}
    rows = []
    for T, head, tree, rule in itertools.product(params, heads, args.trees, RULES):
        greedy = T == 0 and rule != SHARED_NOISE  # without noise the rules are the same
        if greedy or rule == MULTI_ROUND and tree.startswith("dyn"):
            continue
        engine = build_engine(base, {"eagle": head, "tree": tree, **RULES[rule]}, args.ctx)
        results = [engine.generate(p, params[T]).run()[0] for p in prompts]
        row = {"head": Path(head).name, "tree": tree, "temperature": T, "rule": rule}
        rows.append(row | summarise(results, plain[T], engine.drafter.D))
        print(f"{row}  tau {rows[-1]['tau']:.2f}", file=sys.stderr)
    return {
        "date": datetime.date.today().isoformat(),
        "device": describe_device(base.model.device),
        "versions": versions(),
        "checkpoint": Path(args.checkpoint).resolve().name,
        "dtype": base.model.quant or base.options.dtype,
        "texts": " and ".join(Path(file).parent.name for file in args.questions) or "held-out",
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)) / len(prompts),
        "new_tokens": args.max_new_tokens,
        "rows": rows,
    }


def add_ablation(path: Path, cards: Sequence[Path]) -> None:
    """Put what matters of the CARD.json files of scripts.train_eagle into the report.

    Raises ValueError for heads that were trained for different numbers of steps.
    """
    rows = [{name: card[name] for name in CARD} for card in map(read_json, cards)]
    if len({row["steps"] for row in rows}) > 1:
        raise ValueError("heads trained for different numbers of steps; an ablation changes one thing.")
    write_json(path, read_json(path) | {"ablation": rows})


def tables(report: dict[str, Any]) -> str:
    """Markdown: tau by rule, n-alpha of the chains, and the ablation if the report holds one."""
    cells = {(r["head"], r["temperature"], r["tree"], r["rule"]): r for r in report["rows"]}
    order = {tree: number for number, tree in enumerate(TREES)}
    taus, alphas = [], []
    for head, T, tree in sorted({key[:3] for key in cells}, key=lambda k: (*k[:2], order.get(k[2], len(TREES)))):
        found = [cells.get((head, T, tree, rule)) for rule in TITLES]
        ours = found[0]
        same = f"{ours['same']}/{ours['prompts']}" if ours else "-"
        taus.append([head, f"{T:g}", tree, *(number(r and r["tau"]) for r in found), same])
        if tree == "chain:5" and ours:
            alphas.append([f"{head}, T = {T:g}", *(map(number, (ours["n_alpha"] + [None] * 5)[:5]))])
    parts = [
        f"tau of {report.get('checkpoint', 'demo')}, {report['dtype']}, on {report['prompts']} "
        f"{report.get('texts', 'held-out')} prompts x {report['new_tokens']} tokens, {report['device']}, "
        f"torch {report['versions']['torch']}, {report['date']}:",
        table(["head", "T", "tree", *TITLES.values(), "same tokens"], taus),
    ]
    if alphas:
        parts.append(table(["chain of 5, shared noise", *(f"{k}-alpha" for k in range(5))], alphas))
    if ablation := report.get("ablation"):
        steps = f"EAGLE-1 heads of {ablation[0]['steps']} steps each, on greedy texts"
        head = ["head sees", "tau, chain of 5", "0-alpha", "1-alpha", "2-alpha", "top-1 agreement"]
        rows = []
        for row in ablation:
            name = row["inputs"] + (", trained on the target's own text" if row["regenerated"] else "")
            figures = row["chain_tau"], *row["n_alpha"][:3], row["held_out_accuracy"][0]
            rows.append([name, *map(number, figures)])
        parts += [f"The paper's input ablation: {steps}:", table(head, rows)]
    return "\n\n".join(parts)
