"""TODO."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model import Transformer


def init_weights(model: Transformer, generator: torch.Generator) -> None:
    """Normal(0, 0.02) embeddings, fan-in scaled matrices, zeroed residual outputs (each block starts as identity)."""
    for name, p in model.named_parameters():
        if p.dim() < 2:
            continue
        if name.endswith(("attention.o.weight", "mlp.down.weight")):
            torch.nn.init.zeros_(p)
        else:
            std = 0.02 if "embed" in name else 1 / math.sqrt(p.shape[-1])
            torch.nn.init.normal_(p, std=std, generator=generator)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised by Newton-Schulz steps; for hidden matrices. Source: K. Jordan, 2024."""

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.01):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                buffer = state.setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(p.grad.lerp(buffer, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrix, roughly: quintic Newton-Schulz iteration on the spectral-normalised input."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def optimizers(model: Transformer) -> list[torch.optim.Optimizer]:
    hidden = [
        p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n and "lm_head" not in n
    ]
    rest = [p for n, p in model.named_parameters() if p.dim() < 2 or "embed" in n or "lm_head" in n]
    adam = torch.optim.AdamW(rest, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)
    return [Muon(hidden, lr=0.02), adam]


def learning_rate(step: int, steps: int) -> float:
    """Factor on the peak rate: short warm-up, flat, then linear to zero over the last 45 %."""
    warm, cool = min(1.0, (step + 1) / 50), min(1.0, (steps - step) / (0.45 * steps))
    return warm * cool


def update(optims: Iterable[torch.optim.Optimizer], factor: float) -> None:
    """One step of every optimizer at `factor` of its peak rates; the gradients are used up."""
    for optim in optims:
        for group in optim.param_groups:
            group.setdefault("peak", group["lr"])
            group["lr"] = group["peak"] * factor
        optim.step()
        optim.zero_grad(set_to_none=True)


def save_state(path: Path, **state) -> None:
    """Save through a temporary name, so that an interruption never leaves half a state."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


def read_state(path: Path, run: dict[str, Any]) -> dict[str, Any]:
    """The state of this very run; ValueError in one line for a damaged file or another run's, naming what differs."""
    advice = "Delete it or give another --work."
    try:
        state = torch.load(path, weights_only=True)
        found = state["run"]
        different = next((key for key, value in run.items() if found[key] != value), None)
    except Exception as error:  # whatever a damaged or foreign file raises
        raise ValueError(f"{path}: not a training state of this script. {advice}") from error
    if different is not None:
        values = f"{different} {found[different]!r:.60}, here {run[different]!r:.60}"
        raise ValueError(
            f"{path} is from another run ({values}). Match it, delete it or give another --work."
        )
    return state


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C waits for the end of a step, where the state is whole: the yielded function says whether it was pressed.
    Pressed again it interrupts at once."""
    pressed: list[int] = []

    def press(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
