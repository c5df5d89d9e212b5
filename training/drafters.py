"""Training any kind of drafter for a target: from the data to a published drafter with its CARD.json.

`DrafterTraining` names what a kind of drafter provides: draft heads, draft LLMs and Medusa heads are its subclasses.
`train` is the course of every run.
"""

import argparse
import contextlib
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import kernels
from decoding.drafter import Drafter
from decoding.params import SamplingParams
from engine.engine import Engine, EngineConfig
from engine.results import acceptance
from families.config import DTYPES
from loading.drafting import build_drafter, build_head, read_drafter
from loading.options import LoadOptions
from model import Transformer
from support.errors import UsageError, UserError, above_zero, at_least, bad_files
from support.files import clean_up, directory_written_whole, write_json
from support.machine import describe_device
from text.tokenizer import Tokenizer, load_tokenizer
from training.data import Batch, TokenData, fingerprint, load_data, step_batches, written_by_models
from training.loop import Recipe, Run, World, optimizers, run, run_parser, update
from training.losses import KeptFeatures, TargetRows, target_rows
from weights.quantized import pack_

# Options that do not decide the weights. A state is not resumed with other values of the others.
FREE = """out work hours eval_every eval_prompts eval_tokens prompt_length tree save_every device dtype threads debug
    force autocast max_positions average""".split()
CARD_OPTIONS = "steps length seed tree eval_prompts eval_tokens".split()
LABELS = {"tau_greedy": "tau", "tau_t1": "tau at T = 1"}
TEMPERATURES = {"greedy": 0.0, "t1": 1.0}  # that tau is measured at


class WorseHead(UserError):
    """The new drafter drafts worse than the one that it would replace."""

    code = 1


class DrafterTraining(ABC):
    """One kind of drafter in training. The trained module is float32, on the target's device."""

    option: str  # of `load`, which names what `write` wrote
    title: str  # of the module, for messages
    format: str  # of what `write` writes, for CARD.json
    recipe: Recipe
    autocast = False  # train in bfloat16 where torch.autocast allows it
    clip_by_value = False  # clip gradients by value instead of by norm
    note = ""  # printed when the drafter was written

    def __init__(self, args: argparse.Namespace, target: Transformer):
        """Raises ValueError in one line for options that do not fit together or do not fit the target."""
        self.args = args
        self.target = target

    @abstractmethod
    def build(self, data: TokenData) -> nn.Module:
        """The untrained module."""

    @abstractmethod
    def loss(self, module: nn.Module, batch: Batch, count: float) -> tuple[Tensor, Tensor]:
        """(loss, agreement with the target's argmax [n]) of a micro-batch, both sums over tokens divided by `count`."""

    @abstractmethod
    def write(self, module: nn.Module, directory: Path) -> None:
        """Write the module as it is published, in bfloat16."""

    @abstractmethod
    def card(self) -> dict[str, Any]:
        """What else CARD.json says about this kind of drafter."""

    def identity(self) -> dict[str, Any]:
        """What decides the weights besides the options, by name."""
        return {}

    def drafter(self, directory: Path, slots: int = 1, ctx: int = 1) -> Drafter:
        """What drafts with what `write` wrote. Raises ValueError for anything else, or a --tree that does not fit."""
        how = {"tree": self.args.tree, "prune": 0, "ngram_nodes": 0, "head_quant": "none", "slots": slots, "ctx": ctx}
        options = LoadOptions(self.args.checkpoint, **how, **{self.option: str(directory.absolute())})
        files = read_drafter(options, self.target.config, None)
        head = build_head(files.head, self.target) if files.head else None
        return build_drafter(self.target, options, kernels.active_backend(), head, files.model)


class HeadTraining(DrafterTraining):
    """A draft head in training. It learns from the target's features, which --keep-features stores."""

    option = "eagle"
    kept: KeptFeatures | None = None

    def ready(self, head: nn.Module, data: TokenData) -> nn.Module:
        """The head on the target's device, and a store for the features that it reads."""
        if self.args.keep_features:
            size, taps = self.target.config.hidden_size, self.config.taps
            name = "-".join(map(str, ("features", fingerprint(self.args, data=False), *taps)))
            self.kept = KeptFeatures(Path(self.args.work) / f"{name}.bin", data, size, size * len(taps))
        head.to(self.target.device)
        head.rotary.build(self.target.device, self.target.rotary.length)
        return head

    def rows(self, head: nn.Module, batch: Batch) -> TargetRows:
        """What the target computes for a batch, or computed in an earlier epoch."""
        return self.kept.of(batch, head) if self.kept else target_rows(head, batch.tokens)


class Evaluation:
    """The held-out prompts of a run, and the engine that measures drafters on them."""

    def __init__(self, target: Transformer, stop_ids: tuple[int, ...], held_out: TokenData, args: argparse.Namespace):
        """Raises ValueError in one line if the held-out data cannot be used."""
        self.target, self.held_out, self.args = target, held_out, args
        self.prompts = self._prompts()
        longest = max(map(len, self.prompts))
        self.ctx = min(target.rotary.length, longest + args.eval_tokens)
        if self.ctx < longest + 2:
            raise ValueError("held-out prompts leave no room for new tokens; use a smaller --prompt-length.")
        self.params = SamplingParams(max_new_tokens=self.ctx - longest, stop_ids=stop_ids, seed=args.seed)

    def _prompts(self) -> list[list[int]]:
        """Evenly spaced windows of held-out text, or held-out conversations up to their first answer."""
        data, count, length = self.held_out, self.args.eval_prompts, self.args.prompt_length
        if data.stream:
            starts = [k * max(0, len(data.ids) - length) // count for k in range(count)]
            return [data.ids[start : start + length].tolist() for start in starts]
        room = self.target.rotary.length
        rows = (data.place(k, room - 2) for k in range(data.rows))
        begins = ((row.start, int(data.mask[row].argmax())) for row in rows)  # of the first answers
        prompts = [data.ids[start : start + size].tolist() for start, size in begins if 0 < size <= room // 2]
        if not prompts:
            raise ValueError("no held-out conversation has a prompt that fits; give --held-out.")
        return prompts[:count]

    def tau(self, training: DrafterTraining, directory: Path, temperature: float = 0.0) -> dict[str, Any]:
        """tau and accepted_by_depth of the engine with the drafter in a directory over the held-out prompts."""
        config = EngineConfig(len(self.prompts), self.ctx, backend=kernels.active_backend())
        engine = Engine(self.target, None, training.drafter(directory, len(self.prompts), self.ctx), config)
        results = engine.generate_batch(self.prompts, replace(self.params, temperature=temperature)).run()
        tau, by_depth = acceptance([len(ids) for result in results for ids in result.tokens_per_step])
        return {"tau": tau, "accepted_by_depth": by_depth}


def train(kind: type[DrafterTraining], args: argparse.Namespace) -> dict[str, Any]:
    """Train a drafter, measure what is written, and publish it to args.out.

    Returns:
        What CARD.json holds, and the loss curve.

    Raises:
        ValueError: one line, for input that cannot be used.
        WorseHead: the drafter at args.out is better. It stays.
    """
    begun, work = time.perf_counter(), Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(World.start(args.device))
        target, tokenizer, backend = open_target(args, world.device)
        stack.enter_context(backend.active())
        training = kind(args, target)
        out, export = Path(args.out), work / "export"
        old = world.chief and not args.force and exists(training, out)
        if not world.chief:
            world.barrier()  # the first process leaves tokenised data for the others
        with bad_files():
            data, held_out = load_data(args, target, tokenizer)
        if world.chief:
            world.barrier()
        module = training.build(data)
        evaluation = None
        if world.chief:
            stops = target.config.eos_token_ids if tokenizer is None else tuple(tokenizer.eos_ids)
            evaluation = Evaluation(target, stops, held_out, args)
            training.write(module, export)
            training.drafter(export)  # refuses what does not fit before time is spent
        card = describe(training, module, data, held_out, world)
        tokens = f"{card['training_tokens']:,} training tokens, {card['held_out_tokens']:,} held out"
        world.say(f"{training.title} of {card['parameters'] / 1e6:.2f} M parameters; {tokens}")

        def after_step(done: int) -> None:
            if evaluation is not None and args.eval_every and done % args.eval_every == 0:
                world.say(f"step {done}: {summary(measure(training, module, evaluation, export, {'greedy': 0.0}))}")

        identity = {f"--{name.replace('_', '-')}": value for name, value in vars(args).items() if name not in FREE}
        identity |= {"autocast": training.autocast, "processes": world.size} | training.identity()
        optims = optimizers(module, training.recipe, training.autocast)
        before = time.perf_counter() - begun if args.hours else 0.0  # --hours has room for reading the data, too
        course = Run(module, optims, identity, work / "train_state.pt", world, args.steps, args.hours, seconds=before)
        course.fit(functools.partial(train_step, training, course, data), args.save_every, after_step)
        if evaluation is not None:
            card |= {"steps": len(course.curve), "minutes": round(course.seconds / 60, 1)}
            card |= {"last_loss": float(np.mean(course.curve[-50:]))}
            card |= measure(training, module, evaluation, export)
            world.say(f"{summary(card)} (tree {args.tree})")
            old_tau = evaluation.tau(training, out)["tau"] if old else 0.0
            publish(training, module, card, old_tau, world)
        world.barrier()
        return card | {"loss_curve": course.curve}


def run_training(kind: type[DrafterTraining], args: argparse.Namespace) -> int:
    """Train a drafter as a command does. Returns the exit code."""
    return run(args, functools.partial(train, kind))


def open_target(
    args: argparse.Namespace, device: torch.device
) -> tuple[Transformer, Tokenizer | None, kernels.KernelBackend]:
    """The target, its tokenizer, and the kernels that run it."""
    options = LoadOptions(args.checkpoint, device=device.type, dtype=None if args.dtype == "auto" else args.dtype)
    with bad_files():
        checkpoint = options.open_checkpoint()
        options = options.with_defaults(checkpoint.config)
        backend = kernels.KernelBackend(options.kernels if checkpoint.quantization else "auto", device.type)
        target = checkpoint.load(device, DTYPES[options.dtype])
        tokenizer = load_tokenizer(checkpoint.tokenizer_source, target.config.vocab_size)
    with backend.active():
        pack_(target, target.dtype)
    if tokenizer is not None and args.chat_template:
        tokenizer.use_template(args.chat_template)
    if args.length > target.rotary.length:
        raise ValueError(f"--length {args.length}: the target has {target.rotary.length} positions.")
    return target, tokenizer, backend


def exists(training: DrafterTraining, out: Path) -> bool:
    """Whether a drafter lies at --out, to be compared with the new one. ValueError if something else is there."""
    clean_up(out)
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    try:
        training.drafter(out)
    except (ValueError, RuntimeError) as error:
        held = f"--out {out} holds something that cannot be compared with the new drafter ({error})"
        raise ValueError(f"{held}; give another --out, or --force to replace it.") from None
    return True


def train_step(training: DrafterTraining, course: Run, data: TokenData, step: int) -> tuple[float, list[float], int]:
    """One update from --accumulate micro-batches on every process. Returns (loss, accuracies, tokens)."""
    args, recipe, module, world = training.args, training.recipe, course.module, course.world
    batches, count = step_batches(data, step, world, args)
    value = torch.zeros(1, device=world.device)
    hits: Tensor | float = 0.0
    with torch.autocast(world.device.type, enabled=False):  # casts of weights live until this ends: one for all batches
        for batch in batches:
            loss, accuracy = training.loss(module, batch, count)
            loss.backward()
            value = value + loss.detach().float()
            hits = hits + accuracy.detach().float()
    parameters = [p for p in module.parameters() if p.requires_grad]
    world.sum_([*(p.grad for p in parameters), value, hits])
    clip = nn.utils.clip_grad_value_ if training.clip_by_value else nn.utils.clip_grad_norm_
    clip(parameters, recipe.clip, foreach=False)
    update(course.optims, recipe.factor(step, course.share))
    return float(value), hits.tolist(), sum(batch.tokens.numel() for batch in batches) * world.size


def measure(
    training: DrafterTraining, module: nn.Module, evaluation: Evaluation, export: Path,
    temperatures: dict[str, float] = TEMPERATURES,
) -> dict[str, Any]:  # fmt: skip
    """Held-out numbers of the drafter as it would be published; it is written to the folder `export` for that."""
    training.write(module, export)
    numbers: dict[str, Any] = {}
    for label, temperature in temperatures.items():
        measured = evaluation.tau(training, export, temperature)
        numbers |= {f"{name}_{label}": value for name, value in measured.items()}
    return numbers


def summary(numbers: dict[str, Any]) -> str:
    """The most important held-out numbers on one line."""
    shown = {label: numbers[name] for name, label in LABELS.items() if name in numbers}
    return "held-out " + ", ".join(f"{label} {value:.3f}" for label, value in shown.items())


def publish(training: DrafterTraining, module: nn.Module, card: dict[str, Any], old_tau: float, world: World) -> None:
    """Write the drafter and its CARD.json to --out. Raises WorseHead if the one there has a better tau, `old_tau`."""
    out = Path(training.args.out)
    if old_tau > card["tau_greedy"]:
        taus = f"held-out tau {old_tau:.3f}, the new one {card['tau_greedy']:.3f}"
        advice = "The new one stays in --work: run the same command with --force to replace what is at --out."
        raise WorseHead(f"what is at {out} is better ({taus}); kept it. {advice}")
    with directory_written_whole(out, keep=True) as unfinished:
        training.write(module, unfinished)
        write_json(unfinished / "CARD.json", card)
    world.say(f"wrote {out}" + (f"\nnote: {training.note}" if training.note else ""))


def describe(
    training: DrafterTraining, module: nn.Module, data: TokenData, held_out: TokenData, world: World
) -> dict[str, Any]:
    """What CARD.json says about the drafter and its training, without what is measured at the end."""
    args, c = training.args, training.target.config
    return {
        "target": {"layers": c.num_hidden_layers, "hidden_size": c.hidden_size, "vocab_size": c.vocab_size},
        "parameters": sum(p.numel() for p in module.parameters()),
        "data": Path(args.data).name,
        "regenerated": written_by_models(args.data),
        "training_tokens": int(data.mask.sum()),
        "held_out_tokens": int(held_out.mask.sum()),
        "rows_per_step": args.batch * args.accumulate * world.size,
        "processes": world.size,
        "device": describe_device(world.device),
        "torch": torch.__version__,
        **{name: vars(args)[name] for name in CARD_OPTIONS},
        "format": training.format,
        **training.card(),
    }


# ---- the command line -------------------------------------------------------------------------------------


def drafter_parser(name: str, doc: str, steps: int, length: int, eval_every: int) -> argparse.ArgumentParser:
    """The options of every command that trains a drafter. The numbers are defaults."""
    p = run_parser(name, doc, steps)
    add = p.add_argument
    add("--checkpoint", required=True, help="the target: anything that generate.py takes")
    add("--data", required=True, help="JSON/JSONL, text file, directory, `stdlib`, `docstrings`, or tokenised .npz")
    add("--held-out", help="the same kinds (default: 5 %% of --data; of stdlib, the modules held out)")
    add("--out", required=True, help="folder to write")
    add("--work", help="tokenised data and training state (default: in runs/, by the names of command and --out)")
    add("--hours", type=above_zero, metavar="H", help="train for so long, with reading the data, whatever --steps is")
    add("--batch", type=at_least(1), default=8, help="most sequences of a micro-batch, per process")
    add("--accumulate", type=at_least(1), default=1, help="full micro-batches per optimizer step")
    add("--length", type=at_least(8), default=length, help="tokens of a training window")
    add("--chat-template", help="a built-in template, or a named one of the model")
    add("--eval-every", type=at_least(0), default=eval_every, help="steps between measurements (0: at the end only)")
    add("--eval-prompts", type=at_least(1), default=8)
    add("--eval-tokens", type=at_least(2), default=96, help="new tokens per prompt")
    add("--prompt-length", type=at_least(2), default=64, help="tokens of a plain-text prompt")
    add("--tree", default="paper25", help="of the measurements")
    add("--save-every", type=at_least(1), default=100)
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="of the target")
    add("--force", action="store_true", help="replace what is at --out, better or not")
    return p


def head_parser(name: str, doc: str) -> argparse.ArgumentParser:
    """The options of the commands that train a draft head."""
    p = drafter_parser(name, doc, steps=1500, length=512, eval_every=250)
    keep = "keep the target's features: only the first epoch runs it"
    p.add_argument("--keep-features", action="store_true", help=keep)
    add = p.add_argument_group("optimizer").add_argument
    add("--lr", type=float, help="of the matrices of the layer, and of everything with --recipe paper")
    add("--side-lr", type=float, help="of the LM head and the norms, which AdamW trains")
    add("--cooldown", type=float, help="share of the steps over which the rate falls to zero")
    return p


def tap_list(text: str) -> tuple[int, ...]:
    """The layers of --taps."""
    return tuple(int(part) for part in text.split(","))


def check_taps(taps: Sequence[int], last: int) -> None:
    """Raise UsageError unless these layers are distinct, ascending and from 0 to `last`."""
    if list(taps) != sorted(set(taps)) or not set(taps) <= set(range(last + 1)):
        raise UsageError(f"--taps {','.join(map(str, taps))}: must be distinct, ascending, 0 to {last}.")


def check_shares(args: argparse.Namespace, *names: str, positive: Sequence[str]) -> None:
    """Raise UsageError for a share that is not from 0 to 1. positive: those that may not be 0."""
    for name in names:
        share = vars(args)[name]
        if not 0 <= share <= 1 or (name in positive and share == 0):
            rule = "allowed: 0 to 1, and " + " and ".join(f"--{x.replace('_', '-')}" for x in positive) + " above 0"
            raise UsageError(f"--{name.replace('_', '-')} is {share}; {rule}.")


def parsed(p: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The options of a command that trains a drafter, --work among them."""
    args = p.parse_args(argv)
    args.work = args.work or f"runs/{p.prog.rpartition('.')[2]}/{Path(args.out).name}"
    return args
