"""How close one model is to another on the same tokens: perplexities, KL divergence, agreement."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass
class Tally:
    """Sums over positions for one model (before) and another (after), in nats."""

    positions: int = 0
    before: float = 0.0
    after: float = 0.0
    divergence: float = 0.0
    agreed: int = 0

    def add(self, before: Tensor, after: Tensor, targets: Tensor) -> None:
        """Add logits [M, V] of both models with targets int64 [M]."""
        # Vocabularies are wide, so float64 copies are made for 128 rows at a time.
        for p, q, ids in zip(before.split(128), after.split(128), targets.split(128), strict=True):
            p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
            self.positions += ids.numel()
            self.before += float(F.nll_loss(p, ids, reduction="sum"))
            self.after += float(F.nll_loss(q, ids, reduction="sum"))
            self.divergence += float((p.exp() * (p - q)).sum())
            self.agreed += int((p.argmax(-1) == q.argmax(-1)).sum())

    def report(self) -> dict[str, float]:
        """Perplexities, mean KL(before || after), and the share of positions with the same most likely token."""
        return {
            "perplexity_before": math.exp(min(self.before / self.positions, 700)),
            "perplexity_after": math.exp(min(self.after / self.positions, 700)),
            "mean_kl": self.divergence / self.positions,
            "top1_agreement": self.agreed / self.positions,
        }
