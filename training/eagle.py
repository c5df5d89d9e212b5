"""TODO."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn

from eagle_draft import EagleHead
from model import Transformer
from support.files import write_json
from tokenizer import load_tokenizer
from training.data import TokenData, World, load_data, step_batches
from training.eagle_head import (
    Evaluation,
    TrainHead,
    build_head,
    can_export,
    draft_vocabulary,
    exported,
    feature_noise,
    head_config,
    head_loss,
    init_head,
)
from training.optim import Muon, save_state, update
from weights.checkpoint import load_model
from weights.heads import EagleConfig, read_eagle, save_eagle

# --------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Recipe:
    """Optimiser settings. `clip`: by value for EAGLE-1, by norm for EAGLE-3, as their authors."""

    optimizer: str
    lr: float  # of AdamW, and of Muon if that trains the matrices
    side_lr: float  # of AdamW for norms, biases and the LM head where Muon trains the rest
    warmup: int
    cooldown: float  # share of the steps over which the rate falls linearly to zero
    weight_decay: float
    clip: float = 0.5


def recipe_for(args: argparse.Namespace) -> Recipe:
    """The named recipe with the options' overrides. `paper`: eagle.md 7.2, 7.3; `small`: tuned for small targets."""
    if args.recipe == "paper":
        first = args.version == 1
        base = Recipe(
            "adamw", 3e-5 if first else 5e-5, 0.0, 2000 if first else 12000, 1.0, 0.01 if first else 0.0
        )
    else:
        base = Recipe("muon", 0.02, 2e-3, 20, 0.6, 0.01)
    names = ("optimizer", "lr", "warmup", "cooldown", "weight_decay", "clip")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if given.get("optimizer") == "adamw" and "lr" not in given and base.optimizer == "muon":
        given["lr"] = 1e-3
    return replace(base, **given)


def make_optimizers(head: TrainHead, recipe: Recipe) -> list[torch.optim.Optimizer]:
    named = list(head.named_parameters())
    betas, decay = (0.9, 0.95), recipe.weight_decay
    if recipe.optimizer == "adamw":
        return [torch.optim.AdamW([p for _, p in named], recipe.lr, betas, weight_decay=decay, foreach=False)]
    hidden = [p for n, p in named if p.dim() == 2 and "lm_head" not in n]
    rest = [p for n, p in named if p.dim() != 2 or "lm_head" in n]
    side = torch.optim.AdamW(rest, recipe.side_lr, betas, weight_decay=0.0, foreach=False)
    return [Muon(hidden, lr=recipe.lr, weight_decay=decay), side]


def rate_factor(step: int, steps: int, recipe: Recipe) -> float:
    """Factor on the peak rate: linear warm-up, flat, then linear to zero over the last `cooldown` of the steps."""
    cool = (steps - step) / (recipe.cooldown * steps) if recipe.cooldown > 0 else 1.0
    return min(1.0, (step + 1) / max(1, recipe.warmup)) * min(1.0, cool)


def train_step(
    head: TrainHead,
    optims: list,
    data: TokenData,
    step: int,
    recipe: Recipe,
    world: World,
    args: argparse.Namespace,
) -> tuple[float, list[float], int]:
    """One optimiser step over --accumulate micro-batches on every process. Returns (loss, accuracy, tokens)."""
    batches, count = step_batches(data, step, world, args)
    value, hits, tokens = torch.zeros(1, device=world.device), 0.0, 0
    for batch in batches:
        noise = None
        if args.version == 1 and args.noise > 0:
            noise = feature_noise(batch, head.feature_size, args.noise, args.seed)
        with torch.autocast(world.device.type, torch.bfloat16) if args.autocast == "on" else nullcontext():
            loss, accuracy = head_loss(head, batch, count, noise, args)
        loss.backward()
        value, hits, tokens = (
            value + loss.detach().float(),
            hits + accuracy.detach().float(),
            tokens + batch.tokens.numel(),
        )
    parameters = [p for p in head.parameters() if p.requires_grad]
    world.sum_([*(p.grad for p in parameters), value, hits])
    if args.version == 1:
        nn.utils.clip_grad_value_(parameters, recipe.clip, foreach=False)
    else:
        nn.utils.clip_grad_norm_(parameters, recipe.clip, foreach=False)
    update(optims, rate_factor(step, args.steps, recipe))
    return float(value), hits.tolist(), tokens * world.size


SETTINGS = (
    "checkpoint",
    "data",
    "held_out",
    "version",
    "steps",
    "batch",
    "accumulate",
    "length",
    "recipe",
    "optimizer",
)


SETTINGS += (
    "lr",
    "warmup",
    "cooldown",
    "weight_decay",
    "clip",
    "noise",
    "feature_weight",
    "token_weight",
    "ttt_steps",
)


SETTINGS += (
    "draft_vocab",
    "inputs",
    "intermediate_size",
    "heads",
    "taps",
    "norm_before_residual",
    "rope_theta",
    "regenerate",
    "seed",
    "autocast",
)


def train(args: argparse.Namespace) -> dict:
    """Train, measure, export. Returns what CARD.json holds; raises ValueError with one line for unusable input."""
    world = World.start(args.device)
    try:
        return _train(args, world)
    finally:
        world.stop()


def _train(args: argparse.Namespace, world: World) -> dict:
    chief, work, out = world.rank == 0, Path(args.work), Path(args.out)
    say: Callable[..., None] = (
        (lambda *a, **k: print(*a, file=sys.stderr, flush=True, **k)) if chief else _silent
    )
    work.mkdir(parents=True, exist_ok=True)
    dtype = {"auto": None if world.device.type == "cuda" else torch.float32}.get(args.dtype, args.dtype)
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    target = load_model(args.checkpoint, world.device, dtype)
    if args.autocast == "auto":
        args.autocast = "on" if world.device.type == "cuda" or target.dtype != torch.float32 else "off"
    tokenizer = load_tokenizer(args.checkpoint, target.config.vocab_size)
    if tokenizer is not None and args.chat_template:
        tokenizer.use_template(args.chat_template)
    if args.length > target.rotary.length:
        raise ValueError(f"--length {args.length}: the target has {target.rotary.length} positions.")
    config, recipe = head_config(target.config, args), recipe_for(args)
    rival = _existing_head(out, target) if chief and can_export(args) and not args.force else None
    if chief:
        data, held = load_data(args, target, tokenizer)
    world.barrier()
    if not chief:
        data, held = load_data(args, target, tokenizer)
    draft_ids = draft_vocabulary(data, config.layer.vocab_size, target.config.vocab_size)
    head = TrainHead(config, target, draft_ids, args.inputs)
    init_head(head, args.seed)
    head.to(world.device)
    head.rotary.build(world.device, target.rotary.length)
    optims = make_optimizers(head, recipe)
    size = sum(p.numel() for p in head.parameters())
    say(
        f"EAGLE-{args.version} head of {size / 1e6:.2f} M parameters, {args.inputs}; "
        f"{int(data.mask.sum()):,} training tokens, {int(held.mask.sum()):,} held out"
    )
    evaluation = None
    if chief:
        stops = tuple(tokenizer.eos_ids) if tokenizer is not None else target.config.eos_token_ids
        evaluation = Evaluation(target, stops, held, args)
    settings = {name: getattr(args, name) for name in SETTINGS} | {"processes": world.size}
    state_path, first, seconds, curve = work / "train_state.pt", 0, 0.0, []
    if state_path.exists():
        state = torch.load(state_path, weights_only=True, map_location=world.device)
        if wrong := [k for k, v in settings.items() if state["settings"].get(k) != v]:
            raise ValueError(
                f"{state_path} is from a run with another --{wrong[0].replace('_', '-')} "
                f"({state['settings'].get(wrong[0])!r}); delete it, match it, or give another --work."
            )
        head.load_state_dict(state["head"])
        for optim, saved in zip(optims, state["optims"], strict=True):
            optim.load_state_dict(saved)
        first, seconds, curve = state["step"], state["seconds"], state["curve"]
        say(f"resumed at step {first}")
    if args.compile:
        compile_(head)
    run = Progress(args.steps, first, seconds, say)
    for step in range(first, args.steps):
        loss, accuracy, tokens = train_step(head, optims, data, step, recipe, world, args)
        curve.append(loss)
        run.report(step, loss, accuracy, tokens)
        done, last = step + 1, step + 1 == args.steps
        pause = done == args.pause_at
        if chief and (done % args.save_every == 0 or last or pause):
            optim_states = [o.state_dict() for o in optims]
            save_state(state_path, head=head.state_dict(), optims=optim_states, step=done, settings=settings,
                       seconds=run.seconds(), curve=curve)  # fmt: skip
        if pause:
            say(f"\npaused at step {done}; the same command without --pause-at goes on")
            return {"step": done, "loss_curve": curve}
        if chief and args.eval_every and done % args.eval_every == 0 and not last:
            run.pause()
            say(f"\nstep {done}: {_summary(measure(head, evaluation, greedy_only=True))}")
            run.resume()
        world.barrier()
    say("")
    card: dict = {}
    if chief:
        card = _card(args, config, recipe, target, data, held, size, run.seconds(), curve, world)
        card |= measure(head, evaluation)
        say(_summary(card))
        publish(head, card, rival, evaluation, args)
    world.barrier()
    return card | {"loss_curve": curve}


def _silent(*args, **kwargs) -> None:
    pass


def compile_(head: TrainHead) -> None:
    """Compile the two forwards (the target's and the head's) in place."""
    target = head.target
    target.forward_train = torch.compile(target.forward_train)
    head.forward_train = torch.compile(head.forward_train)


class Progress:
    """The progress line: averaged loss and accuracy, tokens per second, minutes left."""

    def __init__(self, steps: int, first: int, seconds: float, say: Callable[..., None]):
        self.steps, self.first, self.before, self.say = steps, first, seconds, say
        self.started, self.tokens, self.loss, self.accuracy = time.perf_counter(), 0, None, None

    def seconds(self) -> float:
        """Training time so far, evaluations and earlier runs' shares handled."""
        return self.before + time.perf_counter() - self.started

    def pause(self) -> None:
        self.paused = time.perf_counter()

    def resume(self) -> None:
        self.started += time.perf_counter() - self.paused

    def report(self, step: int, loss: float, accuracy: list[float], tokens: int) -> None:
        keep = 0.0 if self.loss is None else 0.95
        self.loss = keep * (self.loss or 0.0) + (1 - keep) * loss
        self.accuracy = keep * (self.accuracy or 0.0) + (1 - keep) * accuracy[0]
        self.tokens += tokens
        if step % 10 == 9 or step == self.steps - 1:
            spent = time.perf_counter() - self.started
            left = spent / (step + 1 - self.first) * (self.steps - step - 1)
            deepest = f" (last step {accuracy[-1]:.3f})" if len(accuracy) > 1 else ""
            self.say(
                f"\rstep {step + 1}/{self.steps}  loss {self.loss:.3f}  top-1 {self.accuracy:.3f}{deepest}  "
                f"{self.tokens / spent:.0f} tok/s  {left / 60:.1f} min left   ",
                end="\n" if step % 100 == 99 else "",
            )


def measure(head: TrainHead, evaluation: Evaluation, greedy_only: bool = False) -> dict:
    """Held-out numbers of the head as it would be written (bf16 weights)."""
    tensors, inputs = exported(head), head.inputs
    rounded = TrainHead(head.config, head.target, None, inputs)
    rounded.load_state_dict(tensors)
    rounded.to(head.fc.weight.device).requires_grad_(False)
    rounded.rotary.build(head.fc.weight.device, head.target.rotary.length)
    out: dict = {"held_out_accuracy": evaluation.accuracy(rounded)}
    chain = evaluation.chain(rounded)
    out |= {"chain_tau": chain["tau"], "n_alpha": chain["n_alpha"]}
    if can_export(evaluation.args):
        drafter = build_head(head.config, tensors, head.target)
        for name, temperature in [("greedy", 0.0)] + [("t1", 1.0)] * (not greedy_only):
            out |= {f"{k}_{name}": v for k, v in evaluation.tau(drafter, temperature).items()}
    return out


def _summary(numbers: dict) -> str:
    parts = [f"accuracy {numbers['held_out_accuracy'][0]:.3f}"] if numbers["held_out_accuracy"] else []
    parts += [f"chain tau {numbers['chain_tau']:.2f}"]
    parts += [
        f"{label} {numbers[k]:.2f}"
        for k, label in (("tau_greedy", "tau"), ("tau_t1", "tau at T = 1"))
        if k in numbers
    ]
    return "held-out " + ", ".join(parts)


def _existing_head(out: Path, target: Transformer) -> EagleHead | None:
    """The head at --out, to be compared with the new one; ValueError if there is something else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    try:
        found = read_eagle(out, target.config)
        return build_head(found.config, found.tensors, target)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"--out {out} holds something that cannot be compared with the new head ({error}); "
            "give another --out, or --force to replace it."
        ) from None


class WorseHead(ValueError):
    """The new head drafts worse than the one it would replace."""


def publish(
    head: TrainHead, card: dict, rival: EagleHead | None, evaluation: Evaluation, args: argparse.Namespace
) -> None:
    """Write the head and its CARD.json to --out, unless a better one is there."""
    out = Path(args.out)
    if not can_export(args):
        write_json(Path(args.work) / "CARD.json", card)
        print(
            f"an ablation of EAGLE-3: no head exported; numbers in {Path(args.work) / 'CARD.json'}",
            file=sys.stderr,
        )
        return
    if rival is not None:
        old, new = evaluation.tau(rival)["tau"], card["tau_greedy"]
        if old > new:
            raise WorseHead(
                f"the head at {out} is better (held-out tau {old:.3f}, the new one {new:.3f}); kept it. "
                "The new one stays in --work: run the same command with --force to replace it."
            )
    save_eagle(head.config, exported(head), out)
    write_json(out / "CARD.json", card)
    print(f"wrote {out}", file=sys.stderr)
    if "tensor names" in card["format"]:  # not every engine reads it
        print(f"note: {card['format']}", file=sys.stderr)


def _card(args, config: EagleConfig, recipe: Recipe, target: Transformer, data: TokenData, held: TokenData,
          size: int, seconds: float, curve: list[float], world: World) -> dict:  # fmt: skip
    c = target.config
    rows = args.batch * args.accumulate * world.size
    return {
        "format": config.layout(c.num_hidden_layers),
        "norm_before_residual": args.norm_before_residual == "on" if args.version == 3 else None,
        "inputs": args.inputs,
        "target": {"layers": c.num_hidden_layers, "hidden_size": c.hidden_size, "vocab_size": c.vocab_size},
        "parameters": size,
        "data": args.data if args.data == "stdlib" else Path(args.data).name,
        "regenerated": args.regenerate,
        "training_tokens": int(data.mask.sum()),
        "held_out_tokens": int(held.mask.sum()),
        "steps": args.steps,
        "rows_per_step": rows,
        "length": args.length,
        "ttt_steps": args.ttt_steps if args.version == 3 else None,
        "draft_vocab": args.draft_vocab or c.vocab_size,
        "recipe": asdict(recipe),
        "loss_weights": [args.feature_weight, args.token_weight] if args.version == 1 else None,
        "noise": args.noise if args.version == 1 else None,
        "seed": args.seed,
        "minutes": round(seconds / 60, 1),
        "processes": world.size,
        "device": torch.cuda.get_device_name()
        if world.device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "last_loss": float(np.mean(curve[-50:])) if curve else None,
        "tree": args.tree,
        "eval_prompts": args.eval_prompts,
        "eval_tokens": args.eval_tokens,
    }
