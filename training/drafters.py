"""TODO."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor

from engine import Engine
from model import Transformer
from tokenizer import load_tokenizer
from training.data import Batch, TokenData, World, load_data, step_batches
from training.eagle import Progress, WorseHead
from training.eagle_head import Evaluation
from training.optim import Muon, learning_rate, save_state, update
from tree import DynamicTree, named_tree, tree_tables
from weights.checkpoint import load_model

TOKENIZER_FILES = (
    "tokenizer.model tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json \
generation_config.json chat_template.jinja".split()
)


SETTINGS = "checkpoint data held_out steps batch accumulate length seed regenerate loss lr".split()


# ------------------------------------------------------------------ shared with scripts.train_medusa


class DrafterEvaluation(Evaluation):
    """Held-out tau of any drafter, measured by the real engine on the prompts that heads are measured on."""

    def __init__(
        self, target: Transformer, stop_ids: tuple[int, ...], held: TokenData, args: argparse.Namespace
    ):
        self.target, self.stop_ids, self.held, self.args = target, stop_ids, held, args
        self.prompts = self._prompts()
        self.ctx = min(target.rotary.length, max(map(len, self.prompts)) + args.eval_tokens)
        self.tree = named_tree(args.tree)

    def tables(self):
        if isinstance(self.tree, DynamicTree):
            return self.tree
        return tree_tables([self.tree] * len(self.prompts), self.target.device)

    def tau(self, drafter, temperature: float = 0.0) -> dict:
        """tau and accepted_by_depth of the engine with `drafter` over the held-out prompts."""
        engine = Engine(self.target, drafter=drafter, batch_size=len(self.prompts), ctx=self.ctx)
        results = engine.generate_batch(self.prompts, self._params(temperature)).run()
        emitted = [len(ids) for r in results for ids in r.tokens_per_step]
        depths = [sum(e > d for e in emitted) / max(1, len(emitted)) for d in range(1, drafter.D + 1)]
        return {"tau": sum(emitted) / max(1, len(emitted)), "accepted_by_depth": depths}

    def measure(self, drafter: Callable) -> dict:
        """Greedy and at T = 1; `drafter()` makes a fresh one."""
        greedy, sampled = (self.tau(drafter(), t) for t in (0.0, 1.0))
        return {f"{k}_greedy": v for k, v in greedy.items()} | {f"{k}_t1": v for k, v in sampled.items()}


def make_optimizers(module: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for hidden matrices, AdamW for the rest (embeddings, Medusa's own LM heads `{i}.1.weight`, norms, biases)."""
    named = list(module.named_parameters())
    wide = [p.dim() != 2 or "embed" in n or n.endswith(".1.weight") for n, p in named]
    hidden, rest = ([p for (_, p), w in zip(named, wide, strict=True) if w == side] for side in (False, True))
    adam = torch.optim.AdamW(rest, lr=2e-3 * rate, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)
    return [Muon(hidden, lr=0.02 * rate), adam]


def fit(
    args: argparse.Namespace,
    module: nn.Module,
    loss_of: Callable[[Batch, float], tuple[Tensor, Tensor]],
    data: TokenData,
    settings: dict,
    say: Callable[..., None],
) -> tuple[list[float], float] | None:
    """Train `module` in place; loss_of(batch, count) -> (loss, accuracies), sums / count. Returns (loss curve, seconds),
    or None after --pause-at. State is kept in --work/train_state.pt; ValueError if it belongs to another run."""
    state_path, first, seconds, curve = Path(args.work) / "train_state.pt", 0, 0.0, []
    optims, world = make_optimizers(module, args.lr), World(0, 1, next(module.parameters()).device)
    if state_path.exists():
        state = torch.load(state_path, weights_only=True, map_location=world.device)
        if wrong := [k for k, v in settings.items() if state["settings"].get(k) != v]:
            raise ValueError(
                f"{state_path} is from a run with another --{wrong[0].replace('_', '-')} "
                f"({state['settings'].get(wrong[0])!r}); delete it, match it, or give another --work."
            )
        module.load_state_dict(state["module"])
        for optim, saved in zip(optims, state["optims"], strict=True):
            optim.load_state_dict(saved)
        first, seconds, curve = state["step"], state["seconds"], state["curve"]
        say(f"resumed at step {first}")
    run = Progress(args.steps, first, seconds, say)
    for step in range(first, args.steps):
        batches, count = step_batches(data, step, world, args)
        total, hits, tokens = 0.0, 0.0, 0
        for batch in batches:
            loss, accuracy = loss_of(batch, max(1.0, count))
            loss.backward()
            total, hits = total + float(loss.detach()), hits + accuracy.detach()
            tokens += batch.tokens.numel()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=False)
        update(optims, learning_rate(step, args.steps))
        curve.append(total)
        run.report(step, total, hits.tolist(), tokens)
        done = step + 1
        if done % args.save_every == 0 or done in (args.steps, args.pause_at):
            save_state(state_path, module=module.state_dict(), optims=[o.state_dict() for o in optims], step=done,
                       settings=settings, seconds=run.seconds(), curve=curve)  # fmt: skip
        if done == args.pause_at:
            say(f"\npaused at step {done}; the same command without --pause-at goes on")
            return None
    say("")
    return curve, run.seconds()


def open_target(
    args: argparse.Namespace,
) -> tuple[Transformer, TokenData, TokenData, DrafterEvaluation, Callable]:
    """(target, training data, held-out data, evaluation, say) of a run; its --work directory is made."""

    def say(*parts, **how) -> None:
        print(*parts, file=sys.stderr, flush=True, **how)

    Path(args.work).mkdir(parents=True, exist_ok=True)
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    target = load_model(args.checkpoint, device, torch.float32 if device == "cpu" else None)
    tokenizer = load_tokenizer(args.checkpoint, target.config.vocab_size)
    if tokenizer is not None and args.chat_template:
        tokenizer.use_template(args.chat_template)
    if args.length > target.rotary.length:
        raise ValueError(f"--length {args.length}: the target has {target.rotary.length} positions.")
    data, held = load_data(args, target, tokenizer)
    stops = tuple(tokenizer.eos_ids) if tokenizer is not None else target.config.eos_token_ids
    return target, data, held, DrafterEvaluation(target, stops, held, args), say


def output_weight(target: Transformer) -> Tensor:
    """The LM head's rows [V, H] in float32, also of a tied or quantized one."""
    head = target.lm_head if target.lm_head is not None else target.embed_tokens
    return head.dequantize(torch.float32) if hasattr(head, "dequantize") else head.weight.float()


def refuse_if_worse(old: dict | None, new: dict, args: argparse.Namespace) -> None:
    """WorseHead if what lies at --out has the better held-out tau."""
    if old is not None and old["tau"] > new["tau_greedy"]:
        raise WorseHead(
            f"what is at {args.out} is better (held-out tau {old['tau']:.3f}, the new one {new['tau_greedy']:.3f}); kept "
            "it. Run the same command with --force to replace it."
        )


def describe(
    args: argparse.Namespace, target: Transformer, module: nn.Module, data: TokenData, held: TokenData
) -> dict:
    """What CARD.json of any trained drafter says."""
    c = target.config
    return {
        "target": {"layers": c.num_hidden_layers, "hidden_size": c.hidden_size, "vocab_size": c.vocab_size},
        "parameters": sum(p.numel() for p in module.parameters()),
        "data": args.data if args.data == "stdlib" else Path(args.data).name,
        "regenerated": args.regenerate,
        "training_tokens": int(data.mask.sum()),
        "held_out_tokens": int(held.mask.sum()),
        "steps": args.steps,
        "rows_per_step": args.batch * args.accumulate,
        "length": args.length,
        "loss": args.loss,
        "lr": args.lr,
        "seed": args.seed,
        "device": f"{target.device.type}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "tree": args.tree,
        "eval_prompts": args.eval_prompts,
        "eval_tokens": args.eval_tokens,
    }


def common_parser(doc: str) -> argparse.ArgumentParser:
    """The options that training any of these drafters has; those of data as in scripts.train_eagle."""
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    add("--checkpoint", required=True, help="the target")
    add("--data", required=True, help="JSON/JSONL, text file, directory, `stdlib`, or tokenised .npz")
    add("--held-out", help="the same kinds (default: the last 5 %% of --data)")
    add("--out", required=True, help="folder to write")
    add("--work", help="tokenised data and training state (default: runs/NAME of --out)")
    add("--steps", type=int, default=600)
    add("--batch", type=int, default=8, help="sequences of a micro-batch")
    add("--accumulate", type=int, default=1, help="micro-batches per optimiser step")
    add("--length", type=int, default=256, help="tokens of a training window")
    add("--lr", type=float, default=1.0, help="factor on the learning rates")
    add("--loss", choices=("kl", "ce"), default="kl", help="learn the target's law, or the text")
    add("--regenerate", type=int, default=0, metavar="N", help="train on N texts by the target itself")
    add("--regenerate-tokens", type=int, default=256)
    add("--regenerate-temperature", type=float, default=1.0)
    add("--prompt-length", type=int, default=64, help="tokens of a plain-text prompt")
    add("--chat-template")
    add("--eval-prompts", type=int, default=8)
    add("--eval-tokens", type=int, default=96, help="new tokens per prompt")
    add("--tree", default="paper25", help="of the measurements")
    add("--save-every", type=int, default=100)
    add("--pause-at", type=int, help="stop after this step; the same command goes on from there")
    add("--seed", type=int, default=0)
    add("--device", default="auto", help="auto, cpu, cuda")
    add("--threads", type=int, default=0, help="CPU threads (0 = torch's default)")
    add("--force", action="store_true", help="replace what is at --out, better or not")
    add("--debug", action="store_true", help="tracebacks")
    return p


def checked(p: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Parsed options; a usage error for numbers out of range."""
    args = p.parse_args(argv)
    for name, value in vars(args).items():
        least = {"regenerate": 0, "threads": 0, "seed": -(2**31), "length": 8, "eval_tokens": 2}.get(name, 1)
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            p.error(f"--{name.replace('_', '-')} is {value}; allowed: at least {least}")
    args.work = args.work or f"runs/{Path(args.out).name}"
    if args.threads:
        torch.set_num_threads(args.threads)
    return args


def run(train: Callable, args: argparse.Namespace) -> int:
    """`train(args)`; one line and an exit code for what the user can mend."""
    try:
        train(args)
    except ValueError as error:
        if args.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, WorseHead) else 2
    return 0
