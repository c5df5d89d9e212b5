"""The training loop that all commands share: processes, progress, saved states, Ctrl-C, optimizers, and their options.

A run of so many steps is deterministic: every step depends on the saved state and on its own number alone. A run that
was interrupted and resumed therefore ends in the same weights as one that was not. A run of so many hours depends on the
speed of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
import time
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.errors import BadFileError, UsageError, at_least, command_parser, run_command
from support.files import written_whole
from support.machine import default_device
from support.progress import Progress, say


class World(NamedTuple):
    """This process among those of torchrun, or alone without torchrun."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    @contextlib.contextmanager
    def start(cls, device: str) -> Iterator[World]:
        """Join the other processes. `device` is auto, cpu or cuda (torchrun gives each process its own GPU).

        Raises UsageError for cuda where there is none.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        device = default_device() if device == "auto" else device
        if device == "cuda" and not torch.cuda.is_available():
            raise UsageError("--device cuda, but this torch sees no CUDA device. Use --device cpu.")
        if size == 1:
            yield cls(0, 1, torch.device(device))
            return
        if device == "cuda":
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", timeout=timedelta(hours=6))
        try:
            yield cls(dist.get_rank(), size, torch.device(device))
        finally:
            dist.destroy_process_group()

    @property
    def chief(self) -> bool:
        """Whether this process is the one that prints, measures and writes."""
        return self.rank == 0

    def say(self, text: str) -> None:
        """Print a line to stderr, once for all processes."""
        if self.chief:
            say(text)

    def sum_(self, tensors: list[Tensor]) -> None:
        """Add the tensors up over all processes, in place."""
        for tensor in tensors if self.size > 1 else ():
            dist.all_reduce(tensor)

    def mean(self, value: float) -> float:
        """The mean of a number over all processes, the same on each of them. Waits for them."""
        if self.size == 1:
            return value
        total = torch.tensor([value], device=self.device)
        self.sum_([total])
        return total.item() / self.size

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


@dataclass
class Run:
    """One run of a command: what is trained, how far it has come, and the file that keeps both."""

    module: nn.Module
    optims: list[torch.optim.Optimizer]
    identity: dict[str, Any]  # by name, what makes this run this one
    path: Path  # of the state
    world: World
    steps: int  # how long the run is
    hours: float | None = None  # how long it is instead, if given
    curve: list[float] = field(default_factory=list)  # the loss of every step so far
    seconds: float = 0.0  # that the steps took, and what counts beside them

    @property
    def share(self) -> float:
        """Which share of the run is done, by steps or by time. The same on all processes."""
        return self.seconds / (3600 * self.hours) if self.hours else len(self.curve) / self.steps

    def fit(
        self, train_step: Callable[[int], tuple[float, list[float], int]], save_every: int,
        after_step: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        """Train to the end of the run, going on from the saved state if there is one.

        Args:
            train_step: called with the number of the step, makes the update and returns (loss, accuracies, tokens).
            save_every: steps between saved states. The state is also saved at the end and after Ctrl-C.
            after_step: called with the number of finished steps, except after the last one.

        Raises:
            BadFileError: one line, for a damaged state or the state of another run.
            KeyboardInterrupt: after Ctrl-C, once the current step is finished and saved.
        """
        if self.path.exists():
            self.resume()
            self.world.say(f"resumed at step {len(self.curve)}")
        # One of several processes must not leave alone at the end of a step: the others would wait for it.
        defer = deferred_interrupt() if self.world.size == 1 else contextlib.nullcontext(lambda: False)
        recent: deque[tuple[float, ...]] = deque(maxlen=20)
        with defer as interrupted, contextlib.closing(Progress(quiet=not self.world.chief)) as bar:
            self.seconds = self.world.mean(self.seconds)
            while not self.curve or self.share < 1:
                step = len(self.curve)
                started = time.perf_counter()
                loss, accuracies, tokens = train_step(step)
                spent = self.world.mean(time.perf_counter() - started)
                self.seconds += spent
                self.curve.append(loss)
                recent.append((spent, tokens, loss, *accuracies))
                done = step + 1
                over = self.share >= 1
                if done % 10 == 0 or over:
                    text = averages(f"{done}" if self.hours else f"{done}/{self.steps}", recent)
                    bar(min(1.0, self.share), text)
                    if done % 100 == 0:
                        self.world.say(text)
                stop = interrupted()
                if self.world.chief and (stop or done % save_every == 0 or over):
                    self.save()
                if stop:
                    interrupt = KeyboardInterrupt()
                    interrupt.add_note(f"(after step {done}; {self.path})")
                    raise interrupt
                if after_step is not None and not over:
                    after_step(done)
                self.world.barrier()

    def save(self) -> None:
        """Write all that the rest of the run depends on. An interruption leaves the older state in its place."""
        state = {"run": self.identity, "step": len(self.curve), "curve": self.curve, "seconds": self.seconds}
        state |= {"module": self.module.state_dict(), "optims": [o.state_dict() for o in self.optims]}
        with written_whole(self.path) as temporary, open(temporary, "wb") as file:
            try:
                torch.save(state, file)
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):  # such as a full disk, which torch does not name
                    raise error.__context__ from None
                raise

    def resume(self) -> None:
        """Go on from the saved state.

        Raises BadFileError in one line for a damaged file, and for the state of another run, naming what differs.
        """
        advice = "Delete it or give another --work."
        try:
            with zipfile.ZipFile(self.path) as archive:
                if archive.testzip():  # torch itself does not compare the checksums
                    raise ValueError("a checksum differs")
            state = torch.load(self.path, weights_only=True, map_location=self.world.device)
            saved_identity = {name: state["run"].get(name) for name in self.identity}
            if saved_identity == self.identity:
                self.module.load_state_dict(state["module"])
                for optim, saved in zip(self.optims, state["optims"], strict=True):
                    optim.load_state_dict(saved)
                self.curve = state["curve"]
                self.seconds = state["seconds"]
        except Exception as error:  # a damaged or foreign file may raise anything
            what = "damaged, or not a training state of this command"
            raise BadFileError(f"{self.path}: {what}. {advice}") from error
        for name in (name for name, value in self.identity.items() if saved_identity[name] != value):
            what = f"from another run ({name} {saved_identity[name]!r:.60}, here {self.identity[name]!r:.60})"
            raise BadFileError(f"{self.path} is {what}. With the same options it goes on. {advice}")


def averages(done: str, recent: Iterable[tuple[float, ...]]) -> str:
    """The last steps on average, after the steps `done`. `recent` holds (seconds, tokens, loss, accuracies) of each."""
    seconds, tokens, loss, *accuracies = map(fmean, zip(*recent, strict=True))
    text = f"step {done}  loss {loss:.3f}  "
    if accuracies:
        ends = accuracies[:: max(1, len(accuracies) - 1)]  # those of the first and the last draft step
        text += f"top-1 {' to '.join(f'{accuracy:.3f}' for accuracy in ends)}  "
    return text + f"{tokens / seconds:.0f} tok/s"


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C wait for the end of a step, where the state is whole. A second Ctrl-C interrupts at once.

    Yields a function that says whether Ctrl-C was pressed.
    """
    pressed: list[int] = []

    def press(number: int, frame: Any) -> None:
        pressed.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


# Parts of the names of matrices that map from or to the vocabulary. AdamW trains these. `.1.weight` is the LM head of
# one of Medusa's heads.
VOCABULARY = ("embed", "lm_head", ".1.weight", "predecessor", "successor")


@dataclass(frozen=True)
class Recipe:
    """Optimizer settings of a run.

    `muon` trains hidden matrices with Muon and everything else with AdamW at `side_lr` and without weight decay.
    `adamw` trains everything with AdamW at `lr`.
    """

    optimizer: str = "muon"
    lr: float = 0.02
    side_lr: float = 2e-3
    warmup: int = 50  # steps
    cooldown: float = 0.45  # share of the steps over which the rate falls linearly to zero
    weight_decay: float = 0.01
    clip: float = 0.5  # of the gradients, for drafters

    def factor(self, step: int, share: float) -> float:
        """The factor on the peak rates: linear warm-up, flat, then linear to zero. share: of the run that is done."""
        cool = (1 - share) / self.cooldown if self.cooldown > 0 else 1.0
        return min(1.0, (step + 1) / max(1, self.warmup)) * min(1.0, cool)


def recipe_with(args: argparse.Namespace, base: Recipe) -> Recipe:
    """A recipe with the options' overrides. Raises UsageError for options that do not go together."""
    given = {name: vars(args)[name] for name in asdict(base) if vars(args).get(name) is not None}
    if base.optimizer == "adamw" and "side_lr" in given:
        raise UsageError("--side-lr does not go with --recipe paper, which trains everything at --lr.")
    return replace(base, **given)


def init_weights(model: nn.Module, generator: torch.Generator) -> None:
    """Normal(0, 0.02) embeddings, fan-in scaled matrices, zeroed residual outputs (each block starts as identity)."""
    for name, p in model.named_parameters():
        if name.endswith(("attention.o.weight", "mlp.down.weight")):
            nn.init.zeros_(p)
        elif p.dim() >= 2:
            nn.init.normal_(p, std=0.02 if "embed" in name else 1 / math.sqrt(p.shape[-1]), generator=generator)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised by Newton-Schulz steps; for hidden matrices. Source: K. Jordan, 2024."""

    def __init__(self, params: list[nn.Parameter], lr: float, weight_decay: float, half: bool = False):
        """half: the Newton-Schulz steps compute in bfloat16, as their author does; they need few digits."""
        super().__init__(params, {"lr": lr, "momentum": 0.95, "weight_decay": weight_decay})
        self.half = half

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(buffer, group["momentum"])
                update = orthogonalise(update.bfloat16() if self.half else update).to(p.dtype)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonalise(matrix: Tensor) -> Tensor:
    """Roughly the nearest semi-orthogonal matrix: quintic Newton-Schulz iteration on the normalised input."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def optimizers(module: nn.Module, recipe: Recipe, half: bool = False) -> list[torch.optim.Optimizer]:
    """The optimizers of all parameters of `module` that are not frozen, at their peak rates. `half` is Muon's."""

    def adamw(parameters: list[nn.Parameter], lr: float, decay: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr, (0.9, 0.95), weight_decay=decay, fused=True)

    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if recipe.optimizer == "adamw":
        return [adamw(list(named.values()), recipe.lr, recipe.weight_decay)]
    hidden = [name for name, p in named.items() if p.dim() == 2 and not any(part in name for part in VOCABULARY)]
    rest = [p for name, p in named.items() if name not in hidden]
    muon = Muon([named[name] for name in hidden], recipe.lr, recipe.weight_decay, half)
    return [muon, adamw(rest, recipe.side_lr, 0.0)]


def update(optims: Iterable[torch.optim.Optimizer], factor: float) -> None:
    """One step of every optimizer at `factor` of its peak rates. The gradients are dropped."""
    for optim in optims:
        for group in optim.param_groups:
            group.setdefault("peak", group["lr"])
            group["lr"] = group["peak"] * factor
        optim.step()
        optim.zero_grad(set_to_none=True)


# ---- the command line -------------------------------------------------------------------------------------


def run_parser(name: str, doc: str, steps: int) -> argparse.ArgumentParser:
    """The options of every training command. `steps` is the default of --steps."""
    p = command_parser(name, doc)
    p.add_argument("--steps", type=at_least(1), default=steps)
    p.add_argument("--seed", type=at_least(0), default=0)
    p.add_argument("--threads", type=at_least(0), default=0, help="CPU threads (0 = torch's default)")
    return p


def run(args: argparse.Namespace, train: Callable[[argparse.Namespace], object]) -> int:
    """Call `train(args)`. Returns the exit code: 1 a better drafter stays, 2 usage, 3 bad file, 130 Ctrl-C."""

    def body() -> None:
        train(args)

    if args.threads:
        torch.set_num_threads(args.threads)
    code = run_command(body, args.debug, "interrupted; the same command goes on from the last saved state")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # A thread of gloo may still hold a tensor, and a tensor that is freed while Python shuts down aborts the process
        # (pytorch issue 190489). So one of several processes leaves without shutting Python down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
