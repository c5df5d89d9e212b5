"""The cells of the paper's tables: which there are, measuring the missing ones, and reading them back.

A cell is one drafter against plain decoding on the same prompts, both run in turn. It is one line of a JSON-lines file
and holds every run, the machine and the command. Its id is a hash of everything that its numbers depend on. A cell that
the file already has is not measured again, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from bench import arms
from bench.environment import environment, fingerprint
from bench.measure import Bench, Line, Settings, digest
from bench.peers import HFArm, floats_of, hf_model
from bench.records import intact, sealed
from bench.suites import ask
from cli.prove import find_fork
from engine import Engine
from load import load
from memory_plan import plan_memory
from model_config import ModelConfig
from options import options_from
from runtime.results import GenerationResult
from sampling import SamplingParams
from support.errors import one_line
from support.files import append_json_lines, read_json_lines
from support.machine import free_memory
from weights.heads import read_card, read_eagle

Cell = dict[str, Any]
Results = list[GenerationResult]
Group = list[list[int]]  # the prompts of a batch
TEMPERATURES = (0.0, 1.0)
SHARED = ("device", "dtype", "compile", "kernels")  # options that all engines of a run have
LENGTHS = range(2, 11)  # draft lengths of the draft LLM, as the paper searched them
SHIFTED = "feature+shifted-token"  # what an EAGLE head sees (Figure 8 has heads that see less)
CARD = ("inputs", "regenerated", "data", "loss", "parameters", "steps")  # what a cell keeps of CARD.json
WEIGHTS = (".safetensors", ".bin", ".pt")
# What says which place on the page a cell fills.
SLOT = ("method", "drafter", "tree", "verify", "suite", "T", "quant", "batch", "ablation")
# What a cell keeps of every run.
KEPT = (
    *("question", "turn", "rep", "seed", "prompt_sha256", "prompt_tokens", "new_tokens", "ids_sha256"),
    *("ttft_seconds", "decode_seconds", "tokens_per_step", "same", "fork", "margin"),
)


# ---- which cells there are


@dataclass
class Candidate:
    """A drafter that the tables have cells of."""

    method: str
    name: str
    options: dict[str, Any]  # LoadOptions that choose it
    trees: tuple[str, ...] = ()  # the trees it drafts, for methods other than EAGLE
    card: dict[str, Any] = field(default_factory=dict)  # what CARD.json beside its weights says of its making
    ablation: bool = False  # whether it is there for Table 6 and Figure 8 alone

    def cell(self, tree: str, suite: str, T: float, quant: str = "", batch: int = 1, verify: str = "match") -> Cell:
        """The spec of a cell. quant '' stands for the checkpoint's own precision."""
        drafting = {"tree": tree, "verify": verify if verify != "match" else ""}
        options = self.options | {name: value for name, value in drafting.items() if value}
        return {
            "method": self.method, "drafter": self.name, "card": self.card, "ablation": self.ablation, "tree": tree,
            "verify": verify, "suite": suite, "T": T, "quant": quant, "batch": batch, "options": options,
        }  # fmt: skip


def candidates(args: argparse.Namespace, config: ModelConfig) -> tuple[list[Candidate], dict[str, str]]:
    """The drafters given or found in the checkpoint's folders, and for each kind that is missing the reason."""
    there = list(arms.find_drafters(Path(args.checkpoint), config))
    paths = {kind: [folder for found, folder in there if found == kind] for kind in arms.PATHS}
    paths["draft_checkpoint"] = paths["draft_checkpoint"][:1]
    paths |= {kind: [Path(p) for p in vars(args)[kind]] for kind in arms.PATHS if vars(args)[kind]}
    ablation = [Path(p) for p in args.ablation]
    others = {p.resolve() for p in ablation}
    found = []
    for path in [p for p in paths["eagle"] if p.resolve() not in others] + ablation:
        head = _with_card(f"eagle{read_eagle(path, config).config.version}", "eagle", path)
        sees_less = head.card.get("inputs", SHIFTED) != SHIFTED
        found.append(replace(head, ablation=path in ablation or sees_less))
    found += [_with_card("medusa", "medusa", path, arms.medusa_tree(path)) for path in paths["medusa"]]
    chains = [f"chain:{n}" for n in LENGTHS]
    found += [_with_card("draft", "draft_checkpoint", path, *chains) for path in paths["draft_checkpoint"]]
    missing = {
        "eagle1": "no EAGLE-1 head given (--eagle HEAD)",
        "medusa": "no Medusa heads given (--medusa)",
        "draft": "no draft LLM given (--draft-checkpoint)",
    }
    return found, {k: v for k, v in missing.items() if not any(d.method == k for d in found)}


def _with_card(method: str, option: str, path: Path, *trees: str) -> Candidate:
    card = read_card(path)
    name = path.name if path.is_dir() else path.stem
    return Candidate(method, name, {option: str(path)}, trees, {k: card[k] for k in CARD if k in card})


def plan(
    found: list[Candidate],
    suites: Sequence[str],
    dtype: str,
    dynamic: str,
    batches: Sequence[int],
    has_int4: bool = True,
) -> list[Cell]:
    """The specs of all cells that this checkpoint can have.

    suites: names, with the one in MT-bench's part first. dtype: of the checkpoint, or how it is quantized. dynamic: the
    dynamic tree. batches: the batch sizes of Table 7. has_int4: whether there are int4 weights beside those of `dtype`.
    """
    main = suites[0]
    heads = [d for d in found if d.method.startswith("eagle")]
    usual = [d for d in heads if d.method == "eagle1" and not d.ablation]
    first = (usual or heads or [None])[0]
    cells = [c for head in heads for c in _head_cells(head, suites, dynamic, head is first)]
    others = [d for d in found if d not in heads]
    others.append(Candidate("ngram", "n-gram", {"drafter": "ngram"}, ("chain:7",)))
    others.append(Candidate("lookahead", "lookahead", {"drafter": "lookahead"}, ("",)))
    cells += [d.cell(tree, main, T) for d in others for T in TEMPERATURES for tree in d.trees]
    if first:
        cells += [first.cell("chain:3", main, 0.0, quant) for quant in ("", "int4")]
        cells.append(first.cell("paper25", main, 0.0, "int4"))
        cells += [first.cell("paper25", main, 0.0, batch=batch) for batch in batches if batch > 1]
        cells.append(first.cell("chain:5", main, 0.0, batch=max(batches)))
    cells.append(Candidate("hf", "transformers", {}).cell("", main, 0.0))
    return [cell | {"quant": cell["quant"] or dtype} for cell in cells if has_int4 or not cell["quant"]]


def _head_cells(head: Candidate, suites: Sequence[str], dynamic: str, multi_round: bool) -> Iterator[Cell]:
    """The cells of an EAGLE head. An ablation head runs on the main suite alone."""
    for suite in suites[:1] if head.ablation else suites:
        for T in TEMPERATURES:
            for tree in ("paper25", "chain:5"):
                yield head.cell(tree, suite, T)
                if T and multi_round:
                    yield head.cell(tree, suite, T, verify="multi-round")
            if suite == suites[0] and not head.ablation:
                yield head.cell(dynamic, suite, T)


# ---- what identifies a cell


def file_digest(path: str | Path) -> str:
    """A short hash of a drafter's weight files: their sizes, first and last megabytes."""
    path, digest = Path(path), hashlib.sha256()
    weights = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.suffix in WEIGHTS)
    for file in weights:
        size = file.stat().st_size
        with open(file, "rb") as stream:
            digest.update(f"{size}".encode() + stream.read(1 << 20))
            stream.seek(max(0, size - (1 << 20)))
            digest.update(stream.read())
    return digest.hexdigest()[:16]


def cell_id(spec: Cell, identity: dict[str, Any]) -> str:
    """The same for the same weights, drafter weights, prompts and settings; another when any of them changed."""
    options = {k: v for k, v in spec["options"].items() if k not in arms.PATHS}
    files = {k: file_digest(v) for k, v in spec["options"].items() if k in arms.PATHS}
    kept = {k: spec[k] for k in SLOT}
    text = json.dumps([kept, options, files, identity], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def latest(lines: Sequence[Cell], weights: str) -> list[Cell]:
    """Of the cells of these weights the last one for each place on the page.

    A retrained head replaces its cells. A failed attempt does not replace a measured cell of the same drafter and
    settings. A line whose checksum differs does not count, so its cell is measured again.
    """
    slots: dict[tuple, Cell] = {}
    for line in lines:
        if line["type"] in ("cell", "not_run") and line["weights_sha256"] == weights and intact(line):
            slot = tuple(line[k] for k in SLOT)
            if line["type"] == "cell" or slots.get(slot, {}).get("id") != line["id"]:
                slots.pop(slot, None)  # the newest line of a slot goes to the end
                slots[slot] = line
    return list(slots.values())


# ---- measuring


def measure(args: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Measure every planned cell that --cells lacks, and append a line for each. A line is complete when written."""
    job = Measurement(args)
    known = {c["id"] for c in latest(read_json_lines(args.cells), job.weights) if c["type"] == "cell"}
    started = time.perf_counter()
    if not args.plan:
        append_json_lines(args.cells, job.header)
    for number, spec in enumerate(job.specs):
        key = job.id_of(spec)
        what = "{drafter} {tree} {verify}, {suite}, T = {T:g}, {quant}, batch {batch}".format_map(spec)
        if args.plan or key in known:
            say(f"{'have' if key in known else 'to do'}  {what}")
            continue
        if args.max_seconds and time.perf_counter() - started > args.max_seconds:
            left = len(job.specs) - number
            say(f"stopped after {args.max_seconds:g} s with {left} cells unvisited; run it again to go on")
            return
        say(f"{number + 1}/{len(job.specs)}  {what}")
        line = job.run(spec, key)
        append_json_lines(args.cells, sealed(line))
        if line["type"] == "cell":
            known.add(key)
        else:
            say(f"      not run: {line['reason']}")


class Measurement:
    """What all cells of one run share: the checkpoint, the questions, the settings and the machine."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.base = base = load(args.checkpoint, **options_from(args, *SHARED))
        dtype, shape = base.model.quant or base.options.dtype, base.model.config
        self.settings = Settings(max_new_tokens=args.max_new_tokens, reps=args.reps, seed=args.seed)
        questions, self.prompts, self.ctx = ask(args, base, 32)
        names = sorted(dict.fromkeys(q.suite for q in questions), key=lambda name: name != "mt_bench")
        self.suites = {name: [q for q in questions if q.suite == name] for name in names}  # the main one first
        found, missing = candidates(args, shape)
        heads = [d.options for d in found if d.method.startswith("eagle")]
        most = [largest_batch(base, heads[0], self.ctx, args.largest_batch)] if args.largest_batch and heads else []
        has_int4 = bool(args.int4) or not base.model.quant
        self.specs = plan(found, list(self.suites), dtype, args.dynamic, sorted({*args.batches, *most}), has_int4)
        self.environment = environment(base.model.device)
        self.weights = fingerprint(base.model)
        self.identity = {
            "model": self.weights, "device": self.environment["device"], "dtype": dtype, "compile": args.compile,
            "tokens": args.max_new_tokens, "reps": args.reps, "seed": args.seed,
        }  # fmt: skip
        rounded = "rounded to int4 in memory (RTN, groups of 128, LM head int8)"
        self.header = {
            "type": "model", "checkpoint": Path(args.checkpoint).resolve().name, "dtype": dtype,
            "weights_sha256": self.weights, "layers": shape.num_hidden_layers, "hidden_size": shape.hidden_size,
            "experts": shape.num_local_experts, "missing": missing,
            "suites": {name: len(questions) for name, questions in self.suites.items()},
            "int4": "a quantized checkpoint" if args.int4 else rounded,
        }  # fmt: skip

    @cached_property
    def int4(self) -> Engine:
        """The plain engine with int4 weights: those of --int4 DIR, or the checkpoint's, rounded in memory."""
        shared = options_from(self.args, *SHARED)
        return load(self.args.int4, **shared) if self.args.int4 else load(self.args.checkpoint, **shared, quant="int4")

    def id_of(self, spec: Cell) -> str:
        """The id of the cell with these weights, prompts and settings."""
        turns = [turn for q in self.suites[spec["suite"]] for turn in q.turns]
        asked = digest([t for turn in turns for t in self.prompts.ids((turn,), [])])
        return cell_id(spec, self.identity | {"prompts": asked})

    def run(self, spec: Cell, key: str) -> Cell:
        """Measure one cell and return its line. Where that fails, the line says why."""
        line = {"id": key} | {k: self.header[k] for k in ("checkpoint", "weights_sha256")}
        line |= spec | {"options": arms.shown(spec["options"])}
        started = time.perf_counter()
        run = measure_single if spec["batch"] == 1 else measure_batch
        try:
            runs = run(self.int4 if spec["quant"] == "int4" else self.base, spec, self)
        except (ValueError, torch.OutOfMemoryError) as error:
            return {"type": "not_run"} | line | {"reason": one_line(error)[:200]}
        for name, baseline in (("runs", False), ("plain", True)):
            line[name] = [{k: r.get(k) for k in KEPT} for r in runs if r["baseline"] == baseline]
        line |= {"label": next(r["label"] for r in runs if not r["baseline"]), "settings": asdict(self.settings)}
        line |= {"seconds": time.perf_counter() - started, "command": self.args.command}
        return {"type": "cell"} | line | {"environment": self.environment}


def measure_single(base: Engine, spec: Cell, job: Measurement) -> list[Line]:
    """Plain decoding and the drafter in turn over the questions, as run lines of `bench.measure`."""
    plain = arms.EngineArm("plain", arms.SAME_TOKENS, {}, arms.build_engine(base, {}, job.ctx))
    arm: arms.Arm
    if spec["method"] == "hf":
        arm = HFArm("hf", hf_model(floats_of(base, job.args.checkpoint)), base.tokenizer, bool(base.model.quant))
    else:
        promise = arms.SAME_TOKENS if spec["verify"] == "match" else arms.SAME_DISTRIBUTION
        arm = arms.EngineArm("arm", promise, {}, arms.build_engine(base, spec["options"], job.ctx))
    questions = job.suites[spec["suite"]]
    settings = replace(job.settings, temperatures=(spec["T"],))
    stops = tuple(base.stop_ids(SamplingParams())) or arms.NO_STOP
    for each in (plain, arm):  # warms up
        each.run(job.prompts.first(questions[0]), settings.params(spec["T"], 0, stops))
    return list(Bench([plain, arm], questions, job.prompts, settings, stops, job.ctx).measure())


def measure_batch(base: Engine, spec: Cell, job: Measurement) -> list[Line]:
    """The same for batches. A run line has the tokens of all rows of a batch."""
    B, lines = spec["batch"], []
    engines = [arms.build_engine(base, options | {"batch_size": B}, job.ctx) for options in ({}, spec["options"])]
    first = [job.prompts.first(q) for q in job.suites[spec["suite"]]]
    groups = [[first[(g + i) % len(first)] for i in range(B)] for g in range(0, len(first), B)]
    for rep in range(-1, job.settings.reps):  # repetition -1 warms up
        params = job.settings.params(spec["T"], max(rep, 0), arms.NO_STOP)
        for number, group in enumerate(groups if rep >= 0 else groups[:1]):
            order = [(number + rep + i) % 2 for i in range(2)]
            runs = {i: arms.timed_request(engines[i], group, params) for i in order}
            if rep < 0:
                continue
            same = _agreement(engines[0], group, params, job.settings, runs[0][0], runs[1][0])
            for i, (results, ttft_seconds, decode_seconds) in runs.items():
                steps = [len(ids) for r in results for ids in r.tokens_per_step]
                lines.append({
                    "question": f"batch {number}", "turn": 1, "rep": rep, "seed": params.seed,
                    "label": arms.SAME_TOKENS, "baseline": i == 0, "same": same if i else None,
                    "prompt_sha256": digest([t for prompt in group for t in prompt]),
                    "prompt_tokens": sum(map(len, group)) / B, "new_tokens": 1 + sum(steps),
                    "ids_sha256": digest([t for r in results for t in r.token_ids]),
                    "ttft_seconds": ttft_seconds, "decode_seconds": decode_seconds, "tokens_per_step": steps,
                })  # fmt: skip
    return lines


def _agreement(
    plain: Engine, group: Group, params: SamplingParams, settings: Settings, expected: Results, found: Results
) -> str:
    """Whether all rows have the tokens of plain decoding: same, tie (forks are rounding) or differs."""
    pairs = enumerate(zip(expected, found, strict=True))
    forks = [find_fork(plain, row, group[row], params, a.token_ids, b.token_ids) for row, (a, b) in pairs]
    ties = [settings.is_tie(fork.margin, fork.ulps) for fork in forks if fork]
    return "same" if not ties else "tie" if all(ties) else "differs"


def largest_batch(base: Engine, options: dict[str, Any], ctx: int, cap: int) -> int:
    """The most sequences, 1 to `cap`, whose caches and buffers fit the free memory. options: those of an EAGLE head.

    Both arms count, because they are timed in turn. A fifth of the memory is left for activations.
    """
    config, plain = base.model.config, replace(base.options, ctx=ctx)
    drafting = replace(plain, tree="paper25", **options)
    both = [(plain, None), (drafting, read_eagle(drafting.eagle, config))]
    free = free_memory(base.model.device) * 4 // 5

    def fits(batch: int) -> bool:
        plans = [plan_memory(config, replace(options, batch_size=batch), head) for options, head in both]
        return sum(p.head + p.kv + p.buffers for p in plans) <= free

    return max(1, bisect_left(range(1, cap + 1), True, key=lambda batch: not fits(batch)))
