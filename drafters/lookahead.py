"""Lookahead decoding: the target guesses n-grams for itself, in rows that ride along in its forwards.

Source: Fu et al., Break the Sequential Dependency of LLM Inference Using Lookahead Decoding (2024).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.drafter import Draft, Drafter, DraftInput, PlainDrafter
from drafters.ngram import CANDIDATES, graft
from model import Transformer

SIZE = 5  # tokens of an n-gram; all of them but the first are levels of the window
WINDOW = 7  # columns of the window, each of which makes an n-gram in every step
GUESSES = 7  # n-grams that a step may check


class LookaheadDrafter(Drafter):
    """Jacobi iteration on a window makes n-grams, and a tree of those that begin with the root is checked.

    Level l of column i guesses the token 1 + i + l behind the root. The rows of the window are invalid nodes, which no
    other node sees and no step accepts. A row sees the root, level 0 up to its column, and the lower levels of its own
    column. The tokens chosen after the last level complete an n-gram in each column, and are the last level of the next
    window, where all other levels move down. With sampling, a row chooses with the noise of its own position.
    """

    def __init__(self, model: Transformer, batch_size: int, slots: int):
        N, D = self.shape()
        super().__init__(N, D, model.config.hidden_size)
        self.root = PlainDrafter(model)
        self.guesses = GUESSES * (SIZE - 1)
        with torch.device(model.device):
            # The slot of a root has the n-grams [WINDOW, SIZE] of its step, or -1 where there was none.
            self.caches = (torch.full((batch_size, 1, slots, WINDOW * SIZE), -1, dtype=torch.int32),)
            level, column = torch.arange(SIZE - 1).repeat_interleave(WINDOW), torch.arange(WINDOW).repeat(SIZE - 1)
            self.depth = 1 + level + column
            history = (level == 0) & (column <= column[:, None])
            own = (column == column[:, None]) & (level <= level[:, None])
            self.sees = F.pad(history | own, (1 + self.guesses, 0))
            self.sees[:, 0] = True

    @staticmethod
    def shape() -> tuple[int, int]:
        """N and D: the root, the guesses and the window; and how far the window looks ahead."""
        return 1 + (SIZE - 1) * (WINDOW + GUESSES), WINDOW + SIZE - 2

    def prefill(self, row: int, tokens: Tensor, features: Tensor, start: Tensor, keep: Tensor) -> None:
        held = self.caches[0][row, 0]
        held.index_fill_(0, (start + torch.arange(features.shape[1], device=start.device)).clamp(max=len(held) - 1), -1)

    def draft(self, inputs: DraftInput) -> Draft:
        n, tokens, rows = inputs.n[:, None], inputs.tokens, len(self.depth)
        made = self.caches[0].flatten(1).unflatten(1, (-1, WINDOW, SIZE))  # [B, S, WINDOW, SIZE]
        last = made.gather(1, (n - inputs.count[:, None])[..., None, None].expand(-1, -1, WINDOW, SIZE))[:, 0, :, 1:]
        # A new window starts with tokens from all over the text.
        first = tokens.gather(1, torch.arange(rows, device=n.device) * 37 % n).unflatten(1, (SIZE - 1, WINDOW))
        window = torch.where(last.mT < 0, first, last.mT.long()).flatten(1)
        behind = (torch.arange(made.shape[1], device=n.device) < n)[..., None]
        begins = (made[..., 0] == inputs.root[:, None, None]) & behind
        place = torch.arange(1, 1 + begins[0].numel(), device=n.device)
        rank, at = (begins.flatten(1) * place).topk(CANDIDATES)  # the latest come first
        paths = made.flatten(1, 2).gather(1, at[..., None].expand(-1, -1, SIZE))[..., 1:].long()
        tree = graft(self.root.draft(inputs), paths, rank > 0, self.guesses, self.D)
        return Draft(
            tokens=torch.cat((tree.tokens, window), 1),
            parent=F.pad(tree.parent, (0, rows)),
            depth=torch.cat((tree.depth, self.depth.expand(len(n), -1)), 1),
            ancestors=torch.cat((F.pad(tree.ancestors, (0, rows)), self.sees.expand(len(n), -1, -1)), 1),
            valid=F.pad(tree.valid, (0, rows)),
            scores=F.pad(tree.scores, (0, rows)),
        )

    def observe(self, draft: Draft, choice: Tensor, n: Tensor) -> None:
        window = draft.tokens[:, -len(self.depth) :].unflatten(1, (SIZE - 1, WINDOW))
        grams = torch.cat((window, choice[:, None, -WINDOW:]), 1).mT.flatten(1).int()
        # The slots behind the root may hold n-grams of another text.
        rows = F.pad(grams[:, None], (0, 0, 0, self.D), value=-1)[:, None]
        where = (n[:, None] + torch.arange(self.D + 1, device=n.device))[:, None, :, None].expand_as(rows)
        self.caches[0].scatter_(2, where, rows)
