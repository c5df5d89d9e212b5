"""From a gradient to an updated weight: optimizers, their recipe and schedule, and the initial weights of a model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Parts of the names of matrices that map from or to the vocabulary. AdamW trains these. `.1.weight` is the LM head of
# one of Medusa's heads.
VOCABULARY = ("embed", "lm_head", ".1.weight")


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

    def factor(self, step: int, steps: int) -> float:
        """The factor on the peak rates: linear warm-up, flat, then linear to zero."""
        cool = (steps - step) / (self.cooldown * steps) if self.cooldown > 0 else 1.0
        return min(1.0, (step + 1) / max(1, self.warmup)) * min(1.0, cool)


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


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """Roughly the nearest semi-orthogonal matrix: quintic Newton-Schulz iteration on the normalised input."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def optimizers(module: nn.Module, recipe: Recipe, half: bool = False) -> list[torch.optim.Optimizer]:
    """The optimizers of all parameters of `module`, at their peak rates. `half` is Muon's."""

    def adamw(parameters: list[nn.Parameter], lr: float, decay: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr, (0.9, 0.95), weight_decay=decay, foreach=False)

    if recipe.optimizer == "adamw":
        return [adamw(list(module.parameters()), recipe.lr, recipe.weight_decay)]
    named = dict(module.named_parameters())
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
