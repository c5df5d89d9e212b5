"""The race of draft trees behind scripts.tune_tree: all candidates decode the same prompts, and the fastest one wins."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.arms import SAME_TOKENS, EngineArm
from bench.environment import environment
from bench.records import bootstrap
from bench.report import number, table
from bench.suites import held_out_prompts, prompts_of, read_suite
from drafting import build_drafter, with_tree
from engine import Engine, EngineConfig
from load import load
from options import LoadOptions, options_from
from sampling import SamplingParams
from support.errors import BadFileError, UsageError
from support.progress import Progress
from tree import DynamicTree, parse_tree

# options of `load` that a tree is tuned for
TUNED_FOR = """checkpoint eagle eagle_config draft_vocab draft_vocab_text device dtype quant threads compile kernels
    ctx""".split()
CPU_TREES = "chain:1 chain:2 chain:3 chain:5 dynamic:6,2,3 dynamic:8,3,4 dynamic:12,4,4 dynamic:16,4,4 paper25".split()
GPU_TREES = """chain:3 chain:5 paper25 dynamic:16,5,8 dynamic:16,7,8 dynamic:24,6,8 dynamic:32,6,8 dynamic:32,7,8
    dynamic:48,7,8 dynamic:60,7,10""".split()
DEFAULT = "the default"  # what is drafted where --tree is not given; on a CPU it is pruned
PLAIN = "plain decoding"


def tune(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Race the trees. Returns what scripts.tune_tree prints and writes. Raises UserError for arguments that are wrong."""
    base = load(**options_from(args, *TUNED_FOR))
    prompts = find_prompts(args, base)
    params = [
        SamplingParams(temperature=t, seed=args.seed, max_new_tokens=args.max_new_tokens)
        for t in dict.fromkeys(args.temperature)
    ]
    names = args.trees or (GPU_TREES if base.model.device.type == "cuda" else CPU_TREES)
    engines = {PLAIN: base.sibling(None, replace(base.config, head=None)), DEFAULT: tree_engine(base, None)}
    engines |= {name: tree_engine(base, name) for name in dict.fromkeys(names)}
    rows, differ = race(engines, prompts, params, args.reps, progress)
    winner, verdict = decide(rows)
    tree = parse_tree(max(names, key=lambda name: rows[name]["tokens_per_second"]))
    shape = [tree.N, tree.depth, tree.topk] if isinstance(tree, DynamicTree) else [list(path) for path in tree.paths]
    return {
        "dynamic" if isinstance(tree, DynamicTree) else "paths": shape,
        "winner": winner, "verdict": verdict, "rows": rows, "left_out": differ, "prompts": len(prompts),
        "model": Path(args.checkpoint).resolve().name, "head": Path(args.eagle).name,
        "quantization": base.model.quant or "none", "dtype": base.options.dtype, "compile": args.compile,
        "environment": environment(base.model.device),
    }  # fmt: skip


def find_prompts(args: argparse.Namespace, base: Engine) -> list[list[int]]:
    """Different prompts that fit the context: first turns of questions, or parts of a text.

    The default text is held-out modules of the standard library. Raises UserError where there are none.
    """
    if base.tokenizer is None:
        raise BadFileError(f"{args.checkpoint} has no tokenizer files; the prompts need one.")
    if args.questions:
        how = prompts_of(args, base.tokenizer)
        prompts = [how.first(question) for question in read_suite(args.questions, args.prompts)]
    else:
        try:
            text = Path(args.text).read_text(encoding="utf-8") if args.text else None
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--text {args.text}: {error}") from error
        prompts = held_out_prompts(base.tokenizer, args.prompts, args.prompt_tokens, text)
    limit = base.ctx - args.max_new_tokens
    unique = [list(ids) for ids in dict.fromkeys(map(tuple, prompts)) if len(ids) <= limit]
    if not unique:
        raise UsageError(f"no prompt has at most {limit} tokens; give a larger --ctx.")
    return unique


def tree_engine(base: Engine, tree: str | None) -> Engine:
    """An engine with the head of `base` that drafts this tree in every step. None: the default tree."""
    asked: LoadOptions = replace(base.options, tree=tree, prune=None, ngram_nodes=None, eagle_always=True)
    options = with_tree(asked, base.model.quant, base.head.config)
    drafter = build_drafter(base.model, options, base.backend, base.head)
    return base.sibling(drafter, EngineConfig.of(options, base.backend, base.head))


def race(
    engines: dict[str, Engine], prompts: Sequence[list[int]], params: Sequence[SamplingParams], reps: int,
    progress: Progress,
) -> tuple[dict[str, dict[str, Any]], int]:  # fmt: skip
    """Every engine on every prompt and setting, `reps` times, interleaved; the order rotates.

    Returns a row per engine (tokens per second over all prompts, tau, and the rate of each prompt), and the number of
    prompts that are left out because their tokens differ (near-ties in float32). A prompt's time is the median of its
    repetitions. Raises ValueError if tokens differ on more than half of the prompts: that is a bug, no rounding.
    """
    arms = [EngineArm(name, SAME_TOKENS, {}, engine) for name, engine in engines.items()]
    for arm in arms:
        for settings in params:
            arm.run(max(prompts, key=len), replace(settings, max_new_tokens=min(16, settings.max_new_tokens)))
    cells = [(prompt, settings) for settings in params for prompt in prompts]
    rates: dict[str, list[float]] = {name: [] for name in engines}
    seconds, steps = dict.fromkeys(engines, 0.0), dict.fromkeys(engines, 0)
    tokens = left_out = 0
    for number_of, (prompt, settings) in enumerate(cells):
        progress(number_of / len(cells), f"race of {len(arms)} trees")
        samples = {arm.name: [] for arm in arms}
        for rep in range(reps):
            for k in range(len(arms)):
                arm = arms[(k + rep + number_of) % len(arms)]
                samples[arm.name].append(arm.run(prompt, settings))
        texts = {tuple(sample.token_ids) for runs in samples.values() for sample in runs}
        if len(texts) > 1 or len(*texts) < 2:
            left_out += len(texts) > 1
            continue
        count = len(*texts) - 1
        tokens += count
        for name, runs in samples.items():
            took = statistics.median(run.decode_seconds for run in runs)
            rates[name].append(count / took)
            seconds[name] += took
            steps[name] += len(runs[0].tokens_per_step or ())
    progress.close()
    if 2 * left_out > len(cells):
        raise ValueError(f"the trees gave different tokens on {left_out} of {len(cells)} prompts: this is a bug.")
    if not tokens:
        raise ValueError("no prompt was continued by more than one token; choose other prompts.")
    rows = {
        name: {"tokens_per_second": tokens / seconds[name], "tau": tokens / steps[name], "per_prompt": rates[name]}
        for name in engines
    }
    return rows, left_out


def decide(rows: dict[str, dict[str, Any]]) -> tuple[str, str]:
    """(the fastest row, a sentence that compares it with the default tree and with plain decoding)."""
    winner = max(rows, key=lambda name: rows[name]["tokens_per_second"])
    if winner == PLAIN:
        return winner, "plain decoding is fastest: drafting with this head does not pay here."
    against = []
    for other in (name for name in (DEFAULT, PLAIN) if name != winner):
        ratio = rows[winner]["tokens_per_second"] / rows[other]["tokens_per_second"]
        pairs = zip(rows[winner]["per_prompt"], rows[other]["per_prompt"], strict=True)
        low, high = bootstrap([mine / theirs for mine, theirs in pairs])
        against.append(f"{ratio:.2f} times as fast as {other} (95 % interval over prompts {low:.2f} to {high:.2f})")
    return winner, f"{winner} is fastest: {', and '.join(against)}."


def report(content: dict[str, Any]) -> str:
    """The table of the race, the fastest row first, and the verdict."""
    rows = sorted(content["rows"].items(), key=lambda item: -item[1]["tokens_per_second"])
    plain = content["rows"][PLAIN]["tokens_per_second"]
    body = [
        [name, number(row["tau"]), number(row["tokens_per_second"], 1), f"{row['tokens_per_second'] / plain:.2f}x"]
        for name, row in rows
    ]
    what = f"{content['model']}  {content['head']}  {content['dtype']}  quantization {content['quantization']}   "
    what += content["environment"]["device"] + "   compiled" * content["compile"]
    lines = [what, "", table(["tree", "tau", "tok/s", "of plain"], body), "", content["verdict"]]
    if content["left_out"]:
        lines.append(f"{content['left_out']} prompts are left out, because nearly tied tokens swapped there.")
    return "\n".join(lines)
