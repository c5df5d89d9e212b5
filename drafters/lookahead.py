"""Lookahead decoding: the target guesses n-grams for itself, in rows that ride along in its forwards."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.drafter import Draft, Drafter, DraftInput, PlainDrafter
from drafters.ngram import graft
from model import Transformer
from tree import MAX_DEPTH, MAX_NODES


class LookaheadDrafter(Drafter):
    """Jacobi iteration on a window makes n-grams, a pool keeps them, and a tree verifies them.

    The window holds size - 1 levels of `window` tokens. Level l of column i is a guess at the token 1 + i + l behind the
    root. The rows of the window are invalid nodes of the forward, which no other node sees and no step accepts. A row
    sees the root, level 0 up to its column, and the lower levels of its own column. The tokens chosen after the last
    level complete one n-gram per column and become the last level, and all other levels move down (`observe`). The pool
    keeps the `guesses` latest n-grams for each first token and drops the least recently found one. For sampling, every
    window row chooses with the noise of its own position. N-grams of the prompt are not pooled (WithNGrams finds them).
    """

    always_on = "lookahead's window moves only with its own steps"

    @staticmethod
    def shape(size: int = 5, window: int = 7, guesses: int = 7) -> tuple[int, int]:
        """N and D. The nodes are the root, the guesses and the window; the tree is as deep as the window looks ahead."""
        return 1 + (size - 1) * (window + guesses), window + size - 2

    def __init__(self, model: Transformer, batch_size: int, size: int = 5, window: int = 7, guesses: int = 7):
        levels = size - 1
        N, D = self.shape(size, window, guesses)
        if min(levels, window, guesses) < 1 or D > MAX_DEPTH or N > MAX_NODES:
            limits = f"window + size <= {MAX_DEPTH + 2}, 1 + (size - 1) (window + guesses) <= {MAX_NODES}"
            found = f"size {size}, window {window}, guesses {guesses}"
            raise ValueError(f"lookahead: {found}; needs size >= 2, others >= 1, {limits}.")
        super().__init__(N, D, model.config.hidden_size)
        self.tree_nodes = guesses * levels
        self.root = PlainDrafter(model)
        with torch.device(model.device):
            self.window = torch.zeros(batch_size, levels, window, dtype=torch.int64)
            self.pool = torch.full((batch_size, model.config.vocab_size, guesses, levels), -1, dtype=torch.int32)
            level = torch.arange(levels).repeat_interleave(window)
            column = torch.arange(window).repeat(levels)
            self.depth = 1 + level + column
            history = (level == 0) & (column <= column[:, None])
            own = (column == column[:, None]) & (level <= level[:, None])
            self.sees = F.pad(history | own, (1 + self.tree_nodes, 0))
            self.sees[:, 0] = True

    def buffers(self) -> list[Tensor]:
        return [self.window, self.pool]

    def prefill(self, row: int, tokens: Tensor, features: Tensor, start: Tensor) -> None:
        """A new request: forget everything. The tokens are ignored, because a reused prefix is never prefilled."""
        self.window[row].fill_(-1)
        self.pool[row].fill_(-1)

    def first(self, rows: int) -> LookaheadDrafter:
        view = super().first(rows)
        view.window, view.pool = self.window[:rows], self.pool[:rows]
        return view

    def swap(self, a: int, b: int, length: int) -> None:
        for kept in self.buffers():
            kept[[a, b]] = kept[[b, a]]

    def draft(self, inputs: DraftInput) -> Draft:
        B = inputs.n.shape[0]
        rows = self.depth.shape[0]
        batch = torch.arange(B, device=inputs.n.device)
        cell = torch.arange(rows, device=inputs.n.device)
        # a new window starts with tokens from all over the prompt
        start = inputs.tokens.gather(1, cell * 37 % inputs.n[:, None]).view_as(self.window)
        self.window.copy_(torch.where(self.window < 0, start, self.window))
        guesses = self.pool[batch, inputs.root].long()
        tree = graft(self.root.draft(inputs), guesses, guesses[..., 0] >= 0, self.tree_nodes, self.D)
        return Draft(
            tokens=torch.cat((tree.tokens, self.window.flatten(1)), 1),
            parent=F.pad(tree.parent, (0, rows)),
            depth=torch.cat((tree.depth, self.depth.expand(B, -1)), 1),
            ancestors=torch.cat((F.pad(tree.ancestors, (0, rows)), self.sees.expand(B, -1, -1)), 1),
            valid=F.pad(tree.valid, (0, rows)),
            scores=F.pad(tree.scores, (0, rows)),
        )

    def observe(self, choice: Tensor) -> None:
        window = self.window.shape[2]
        guesses = self.pool.shape[2]
        # [B, levels, window]: the continuation of every column
        grams = torch.cat((self.window[:, 1:], choice[:, None, -window:]), 1)
        batch = torch.arange(choice.shape[0], device=choice.device)
        place = torch.arange(guesses, device=choice.device)
        for i in range(window):
            key = self.window[:, 0, i]
            gram = grams[:, :, i].int()
            known = self.pool[batch, key]
            same = (known == gram[:, None]).all(-1)
            # the n-gram moves to the front; its old place is given up, or else the oldest n-gram's
            gone = torch.where(same.any(-1), same.int().argmax(-1), guesses - 1)
            source = torch.where(place <= gone[:, None], place - 1, place).clamp(min=0)
            moved = known.gather(1, source[..., None].expand_as(known))
            self.pool.index_put_((batch, key), torch.cat((gram[:, None], moved[:, 1:]), 1))
        self.window.copy_(grams)
