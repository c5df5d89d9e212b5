"""Acceptance of draft heads on held-out text: tau by tree, temperature and noise; n-alpha on a chain.

    python -m scripts.acceptance                         # the demo heads on held-out standard-library code
    python -m scripts.acceptance --checkpoint DIR --eagle HEAD --text FILE --json out.json
    python -m scripts.acceptance --ablation runs/a/CARD.json runs/b/CARD.json      # add heads trained on other inputs
    python -m scripts.acceptance --readme docs/results.md      # write the table between the page's markers

Every arm decodes the same prompts. `same` counts prompts whose tokens equal plain decoding's (not promised by
multi-round). tau counts tokens per target forward, the target's own included; k-alpha is the chance that the draft at
depth k+1 of a chain is accepted once all shallower ones were (eagle.md 6.2), over all steps of all prompts but the last
of each: the length limit or a stop may have cut that one, which is no rejection.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from pathlib import Path

from generate import DEMO, describe_device, load, versions
from results import GenerationResult, n_alpha
from sampling import SamplingParams

TREES = ("chain:5", "paper25", "dynamic:26,5,8", "dynamic:60,7,10")
RULES = {"shared noise": {}, "top-k drafts": {"draft_noise": False}, "multi-round": {"verify": "multi-round"}}


def held_out_prompts(tokenizer, count: int, length: int, text: str | None = None) -> list[list[int]]:
    """`count` windows of `length` tokens, spread evenly over the held-out modules (or over `text`)."""
    if text is None:
        from scripts.train_demo import read_text, stdlib_files

        text = "\n".join(read_text(path) for path in stdlib_files()[1])
    ids = tokenizer.encode(text, add_bos=False)
    start = tokenizer.encode("")
    stride = (len(ids) - length) // count
    if stride < 1:
        raise ValueError(f"the text has {len(ids)} tokens; {count} prompts of {length} need more.")
    return [start + ids[i * stride : i * stride + length] for i in range(count)]


def summarise(results: list[GenerationResult], plain: list[GenerationResult], depth: int = 5) -> dict:
    """One row of the report: tau, accepted_by_depth and counts over all steps; n_alpha without every text's last step, at
    most 5 and not beyond the tree's `depth`."""
    steps = [len(ids) for r in results for ids in r.tokens_per_step]
    deeper = [sum(s > d for s in steps) for d in range(1, max(steps) + 1)]
    whole = [len(ids) for r in results for ids in r.tokens_per_step[:-1]]
    return {
        "tau": sum(steps) / len(steps),
        "accepted_by_depth": [n / len(steps) for n in deeper if n],
        "n_alpha": n_alpha(whole, min(depth, 5)),
        "tokens": sum(steps) + len(results),
        "steps": len(steps),
        "same": sum(r.token_ids == p.token_ids for r, p in zip(results, plain, strict=True)),
        "prompts": len(results),
    }


def measure(args: argparse.Namespace) -> dict:
    heads = args.eagle or [str(p) for p in sorted(Path(args.checkpoint).glob("eagle*")) if p.is_dir()]
    base = load(args.checkpoint, dtype=args.dtype, ctx=args.ctx)
    text = Path(args.text).read_text(encoding="utf-8") if args.text else None
    prompts = held_out_prompts(base.tokenizer, args.prompts, args.prompt_tokens, text)
    rows = []
    for temperature in args.temperature:
        params = SamplingParams(temperature=temperature, seed=1, max_new_tokens=args.new_tokens)
        plain = [base.generate(p, params).run()[0] for p in prompts]
        for head in heads:
            for tree in args.trees:
                for rule, options in RULES.items():
                    if (temperature == 0 and rule != "shared noise") or (
                        rule == "multi-round" and "dyn" in tree
                    ):
                        continue
                    fixed = {"dtype": args.dtype, "ctx": args.ctx, "eagle_always": True}  # tau, not speed
                    engine = load(args.checkpoint, eagle=head, tree=tree, **fixed, **options)
                    results = [engine.generate(p, params).run()[0] for p in prompts]
                    row = {"head": Path(head).name, "tree": tree, "temperature": temperature, "rule": rule}
                    rows.append(row | summarise(results, plain, engine.drafter.D))
                    print(f"{row}  tau {rows[-1]['tau']:.2f}", file=sys.stderr)
    return {
        "command": "python -m scripts.acceptance " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
        "device": describe_device(base.model.device),
        "versions": versions(),
        "dtype": base.options.dtype,
        "prompts": len(prompts),
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "rows": rows,
    }


def table(report: dict) -> str:
    """Markdown: one line per head, tree, temperature; tau by rule; n-alpha of the chains below."""
    cells = {(r["head"], r["tree"], r["temperature"], r["rule"]): r for r in report["rows"]}
    keys = sorted(
        {k[:3] for k in cells}, key=lambda k: (k[0], k[2], TREES.index(k[1]) if k[1] in TREES else 9)
    )
    lines = [
        f"tau on {report['prompts']} held-out prompts x {report['new_tokens']} tokens, {report['dtype']}, "
        f"{report['device']}, torch {report['versions']['torch']}, {report['date']}:",
        "",
        "| head | T | tree | shared noise (default) | multi-round (paper) | top-k drafts (EAGLE-2/3) | same tokens |",
        "|---|---:|---|---:|---:|---:|---|",
    ]
    for head, tree, temperature in keys:
        found = [
            cells.get((head, tree, temperature, rule))
            for rule in ("shared noise", "multi-round", "top-k drafts")
        ]
        taus = " | ".join(f"{r['tau']:.2f}" if r else "-" for r in found)
        same = f"{found[0]['same']}/{found[0]['prompts']}" if found[0] else "-"
        lines.append(f"| {head} | {temperature:g} | {tree} | {taus} | {same} |")
    lines += [
        "",
        "| chain of 5, shared noise | 0-alpha | 1-alpha | 2-alpha | 3-alpha | 4-alpha |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for head, tree, temperature in keys:
        row = cells.get((head, tree, temperature, "shared noise"))
        if tree == "chain:5" and row:
            alphas = [f"{a:.2f}" for a in row["n_alpha"]] + ["-"] * (5 - len(row["n_alpha"]))
            lines.append(f"| {head}, T = {temperature:g} | " + " | ".join(alphas[:5]) + " |")
    if report.get("ablation"):
        first = report["ablation"][0]
        lines += [
            "",
            f"The paper's input ablation: EAGLE-1 heads of {first['steps']} steps each, on greedy texts:",
            "",
            "| head sees | tau, chain of 5 | 0-alpha | 1-alpha | 2-alpha | top-1 agreement |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        for row in report["ablation"]:
            alphas = " | ".join(f"{a:.2f}" for a in row["n_alpha"][:3])
            name = row["inputs"] + (", trained on the target's own text" if row["regenerated"] else "")
            lines.append(
                f"| {name} | {row['chain_tau']:.2f} | {alphas} | {row['held_out_accuracy'][0]:.2f} |"
            )
    return "\n".join(lines)


def add_ablation(path: Path, cards: list[str]) -> None:
    """Put what matters of the CARD.json files of scripts.train_eagle into the report."""
    report = json.loads(path.read_text())
    names = (
        "inputs",
        "regenerated",
        "steps",
        "training_tokens",
        "chain_tau",
        "n_alpha",
        "held_out_accuracy",
        "device",
    )
    rows = [{name: json.loads(Path(card).read_text())[name] for name in names} for card in cards]
    if len({row["steps"] for row in rows}) > 1:
        raise ValueError(
            "the heads were trained for different numbers of steps; an ablation changes one thing."
        )
    write(path, report | {"ablation": rows})


def write(path: Path, report: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(temporary, path)


def replace_block(path: Path, name: str, text: str) -> None:
    """Put text between `<!-- NAME -->` and `<!-- /NAME -->`; ValueError if the markers are missing."""
    old = path.read_text(encoding="utf-8")
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    if begin not in old or end not in old:
        raise ValueError(f"{path}: markers {begin.strip()} and {end} are missing.")
    head, rest = old.split(begin, 1)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(f"{head}{begin}{text}\n{end}{rest.split(end, 1)[1]}", encoding="utf-8")
    os.replace(temporary, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", default=str(DEMO))
    parser.add_argument("--eagle", action="append", help="head (repeatable; default: CHECKPOINT/eagle*)")
    parser.add_argument("--text", help="held-out text (default: the demo's held-out modules)")
    parser.add_argument("--trees", nargs="+", default=list(TREES))
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--json", default="benchmarks/results/demo_acceptance.json")
    parser.add_argument("--ablation", nargs="+", help="only add these CARD.json files to the JSON")
    parser.add_argument("--readme", help="only rewrite this file's table from the JSON")
    args = parser.parse_args()
    path = Path(args.json)
    if args.readme:
        replace_block(Path(args.readme), "acceptance", table(json.loads(path.read_text())))
        return
    if args.ablation:
        add_ablation(path, args.ablation)
        return
    report = measure(args)
    write(path, report)
    print(table(report))


if __name__ == "__main__":
    main()
