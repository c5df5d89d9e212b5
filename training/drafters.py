"""Training any kind of drafter for a target: from the data to a published drafter with its CARD.json.

`DrafterTraining` names what a kind of drafter provides: EAGLE heads, draft LLMs and Medusa heads are its subclasses.
`train` is the course of every run.
"""

from __future__ import annotations

import argparse
import functools
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from drafters.base import Drafter
from model import Transformer
from model_config import DTYPES
from support.errors import UserError
from support.files import write_json
from support.machine import describe_device
from tokenizer import Tokenizer, load_tokenizer
from training.data import Batch, TokenData, step_batches
from training.evaluation import Evaluation
from training.loop import Run, World
from training.optim import Recipe, optimizers, update
from training.sources import load_data
from weights.checkpoint import load_model
from weights.quantized import QuantLinear

# Options that decide the weights of every kind of drafter. A state is not resumed with other values.
SETTINGS = "checkpoint data held_out steps batch accumulate length seed regenerate".split()
CARD_OPTIONS = "steps length seed tree eval_prompts eval_tokens".split()
LABELS = {"chain_tau": "chain tau", "tau_greedy": "tau", "tau_t1": "tau at T = 1"}


class WorseHead(UserError):
    """The new drafter drafts worse than the one that it would replace."""

    code = 1


class DrafterTraining(ABC):
    """One kind of drafter in training. The trained module is float32, on the target's device."""

    title: str  # of the module, for messages
    options: tuple[str, ...]  # besides SETTINGS, those that decide the weights
    recipe: Recipe
    clip_by_value = False  # clip gradients by value instead of by norm
    drafts = True  # False: no engine can draft with it, so only its numbers are written
    note = ""  # printed when the drafter was written

    def __init__(self, args: argparse.Namespace, target: Transformer):
        """Raises ValueError in one line for options that do not fit together or do not fit the target."""
        self.args = args
        self.target = target

    def settings(self) -> dict[str, Any]:
        """All options that decide the weights."""
        return {name: vars(self.args)[name] for name in (*SETTINGS, *self.options)}

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
    def read(self, directory: Path) -> nn.Module:
        """Read what `write` wrote, to draft with. Raises ValueError if there is something else."""

    @abstractmethod
    def drafter(self, module: nn.Module, evaluation: Evaluation) -> Drafter:
        """A fresh drafter for `evaluation`. Raises ValueError if its tree does not fit."""

    @abstractmethod
    def card(self) -> dict[str, Any]:
        """What CARD.json says about this kind of drafter alone."""

    def numbers(self, module: nn.Module, evaluation: Evaluation) -> dict[str, Any]:
        """Held-out numbers besides those of the engine."""
        return {}


def train(kind: type[DrafterTraining], args: argparse.Namespace) -> dict[str, Any]:
    """Train a drafter, measure what is written, and publish it to args.out.

    Returns:
        What CARD.json holds, and the loss curve. After --pause-at only the step and the loss curve.

    Raises:
        ValueError: one line, for input that cannot be used.
        WorseHead: the drafter at args.out is better. It stays.
    """
    world = World.start(args.device)
    try:
        return _train(kind, args, world)
    finally:
        world.stop()


def _train(kind: type[DrafterTraining], args: argparse.Namespace, world: World) -> dict[str, Any]:
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    target, tokenizer = open_target(args, world.device)
    training = kind(args, target)
    old = existing(training, Path(args.out)) if world.chief and training.drafts and not args.force else None
    with world.chief_first():  # it leaves tokenised data for the others
        data, held_out = load_data(args, target, tokenizer)
    module = training.build(data)
    evaluation = None
    if world.chief:
        stops = target.config.eos_token_ids if tokenizer is None else tuple(tokenizer.eos_ids)
        evaluation = Evaluation(target, stops, held_out, args)
        for drafting in (module, old) if training.drafts else ():
            if drafting is not None:
                training.drafter(drafting, evaluation)  # refuses what does not fit before time is spent
    world.say(
        f"{training.title} of {_size(module) / 1e6:.2f} M parameters; "
        f"{int(data.mask.sum()):,} training tokens, {int(held_out.mask.sum()):,} held out"
    )
    optims = optimizers(module, training.recipe)

    def after_step(done: int) -> None:
        if evaluation is not None and args.eval_every and done % args.eval_every == 0:
            numbers = measure(training, module, evaluation, greedy_only=True)
            world.say(f"\nstep {done}: {summary(numbers)}")

    identity = {f"--{name.replace('_', '-')}": value for name, value in training.settings().items()}
    identity["processes"] = world.size
    run = Run(module, optims, identity, work / "train_state.pt", world)
    step = functools.partial(train_step, training, module, optims, data, world)
    run.fit(step, args.steps, args.save_every, args.pause_at, after_step)
    if run.paused:
        return {"step": len(run.curve), "loss_curve": run.curve}
    card: dict[str, Any] = {}
    if evaluation is not None:
        card = describe(training, module, data, held_out, world) | training.card()
        card |= {"minutes": round(run.seconds / 60, 1), "last_loss": float(np.mean(run.curve[-50:]))}
        card |= measure(training, module, evaluation)
        world.say(f"{summary(card)} (tree {args.tree})")
        publish(training, module, card, old, evaluation, world)
    world.barrier()
    return card | {"loss_curve": run.curve}


def open_target(args: argparse.Namespace, device: torch.device) -> tuple[Transformer, Tokenizer | None]:
    """The target and its tokenizer. On a CPU the target is float32 unless --dtype says otherwise."""
    dtype = DTYPES.get(args.dtype) or (None if device.type == "cuda" else torch.float32)
    target = load_model(args.checkpoint, device, dtype)
    tokenizer = load_tokenizer(args.checkpoint, target.config.vocab_size)
    if tokenizer is not None and args.chat_template:
        tokenizer.use_template(args.chat_template)
    if args.length > target.rotary.length:
        raise ValueError(f"--length {args.length}: the target has {target.rotary.length} positions.")
    return target, tokenizer


def existing(training: DrafterTraining, out: Path) -> nn.Module | None:
    """The drafter at --out, to be compared with the new one. ValueError if something else is there."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    try:
        return training.read(out)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"--out {out} holds something that cannot be compared with the new drafter ({error}); "
            "give another --out, or --force to replace it."
        ) from None


def train_step(
    training: DrafterTraining,
    module: nn.Module,
    optims: list[torch.optim.Optimizer],
    data: TokenData,
    world: World,
    step: int,
) -> tuple[float, list[float], int]:
    """One update from --accumulate micro-batches on every process. Returns (loss, accuracies, tokens)."""
    args = training.args
    recipe = training.recipe
    batches, count = step_batches(data, step, world, args)
    value = torch.zeros(1, device=world.device)
    hits: Tensor | float = 0.0
    tokens = 0
    for batch in batches:
        loss, accuracy = training.loss(module, batch, count)
        loss.backward()
        value = value + loss.detach().float()
        hits = hits + accuracy.detach().float()
        tokens += batch.tokens.numel()
    parameters = list(module.parameters())
    world.sum_([*(p.grad for p in parameters), value, hits])
    if training.clip_by_value:
        nn.utils.clip_grad_value_(parameters, recipe.clip, foreach=False)
    else:
        nn.utils.clip_grad_norm_(parameters, recipe.clip, foreach=False)
    update(optims, recipe.factor(step, args.steps))
    return float(value), hits.tolist(), tokens * world.size


def measure(
    training: DrafterTraining, module: nn.Module, evaluation: Evaluation, greedy_only: bool = False
) -> dict[str, Any]:
    """Held-out numbers of the drafter as it would be published; it is written to --work/export for that."""
    numbers = training.numbers(module, evaluation)
    if training.drafts:
        export = Path(training.args.work) / "export"
        training.write(module, export)
        written = training.read(export)
        numbers |= evaluation.measure(lambda: training.drafter(written, evaluation), greedy_only)
    return numbers


def summary(numbers: dict[str, Any]) -> str:
    """The most important held-out numbers on one line."""
    parts = [f"accuracy {first:.3f}" for first in numbers.get("held_out_accuracy", [])[:1]]
    parts += [f"{label} {numbers[name]:.2f}" for name, label in LABELS.items() if name in numbers]
    return "held-out " + ", ".join(parts)


def publish(
    training: DrafterTraining,
    module: nn.Module,
    card: dict[str, Any],
    old: nn.Module | None,
    evaluation: Evaluation,
    world: World,
) -> None:
    """Write the drafter and its CARD.json to --out, unless the `old` one there is better."""
    out = Path(training.args.out)
    if not training.drafts:
        place = Path(training.args.work) / "CARD.json"
        write_json(place, card)
        world.say(f"no engine drafts with such a {training.title}: nothing was exported; numbers in {place}")
        return
    if old is not None:
        refuse_if_worse(evaluation.tau(training.drafter(old, evaluation)), card, training.args)
    training.write(module, out)
    write_json(out / "CARD.json", card)
    world.say(f"wrote {out}")
    if training.note:
        world.say(f"note: {training.note}")


def refuse_if_worse(old: dict[str, Any], new: dict[str, Any], args: argparse.Namespace) -> None:
    """Raise WorseHead if the drafter at --out has the better held-out tau."""
    if old["tau"] > new["tau_greedy"]:
        raise WorseHead(
            f"what is at {args.out} is better (held-out tau {old['tau']:.3f}, the new one {new['tau_greedy']:.3f}); "
            "kept it. The new one stays in --work: run the same command with --force to replace what is at --out."
        )


def describe(
    training: DrafterTraining, module: nn.Module, data: TokenData, held_out: TokenData, world: World
) -> dict[str, Any]:
    """What CARD.json of any trained drafter says about the run."""
    args = training.args
    c = training.target.config
    return {
        "target": {"layers": c.num_hidden_layers, "hidden_size": c.hidden_size, "vocab_size": c.vocab_size},
        "parameters": _size(module),
        "data": args.data if args.data == "stdlib" else Path(args.data).name,
        "regenerated": args.regenerate,
        "training_tokens": int(data.mask.sum()),
        "held_out_tokens": int(held_out.mask.sum()),
        "rows_per_step": args.batch * args.accumulate * world.size,
        "processes": world.size,
        "device": describe_device(world.device),
        "torch": torch.__version__,
        **{name: vars(args)[name] for name in CARD_OPTIONS},
    }


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def output_weight(target: Transformer) -> Tensor:
    """The LM head's rows [V, H] in float32, also of a tied or quantized one."""
    head = target.lm_head if target.lm_head is not None else target.embed_tokens
    return head.dequantize(torch.float32) if isinstance(head, QuantLinear) else head.weight.float()
