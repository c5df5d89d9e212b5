"""TODO."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.base import CachelessDrafter, Draft, DraftInput, root_draft
from drafters.ngram import graft
from model import Transformer
from tree import MAX_DEPTH, MAX_NODES


class LookaheadDrafter(CachelessDrafter):
    """Lookahead decoding: Jacobi iteration on a window makes n-grams, a pool keeps them, a tree verifies them.

    The window holds size - 1 levels of `window` tokens: level l of column i is a guess at the token 1 + i + l behind
    the root. Its rows ride along in the target's forward as invalid nodes: nothing sees them, they are never accepted.
    A row sees the root, level 0 up to its column and its own column's lower levels; the tokens chosen after the last
    level complete one n-gram per column and become the last level, the others move down (`observe`). The pool holds per
    first token the `guesses` latest n-grams, least recently found out first. At T > 0 windows choose with the noise
    of their own positions. Source: eagle.md 10.3; the pool takes no n-grams from the prompt (WithNGrams does that)."""

    always_on = "lookahead's window moves only with its own steps"

    @staticmethod
    def shape(size: int = 5, window: int = 7, guesses: int = 7) -> tuple[int, int]:
        """N and D: the root, the guesses, the window; as deep as the window looks ahead."""
        return 1 + (size - 1) * (window + guesses), window + size - 2

    def __init__(self, model: Transformer, batch_size: int, size: int = 5, window: int = 7, guesses: int = 7):
        L, W, G = size - 1, window, guesses
        self.tree_nodes, (self.N, self.D) = G * L, self.shape(size, W, G)
        if min(size - 1, W, G) < 1 or self.D > MAX_DEPTH or self.N > MAX_NODES:
            raise ValueError(
                f"lookahead: size {size}, window {W}, guesses {G}; needs size >= 2, others >= 1, window + size <= "
                f"{MAX_DEPTH + 2}, 1 + (size - 1) (window + guesses) <= {MAX_NODES}."
            )
        super().__init__(model)
        with torch.device(model.device):
            self.window = torch.zeros(batch_size, L, W, dtype=torch.int64)
            self.pool = torch.full((batch_size, model.config.vocab_size, G, L), -1, dtype=torch.int32)
            level, column = torch.arange(L).repeat_interleave(W), torch.arange(W).repeat(L)
            self.depth = 1 + level + column
            history = (level == 0) & (column <= column[:, None])
            own = (column == column[:, None]) & (level <= level[:, None])
            self.sees = F.pad(history | own, (1 + self.tree_nodes, 0))
            self.sees[:, 0] = True

    def prefill(self, row: int, tokens: Tensor, features: Tensor, start: Tensor) -> None:
        """A new request: nothing is known. (The caches' prefix may be reused, so this may not look at the chunk.)"""
        self.window[row].fill_(-1)
        self.pool[row].fill_(-1)

    def draft(self, request: DraftInput) -> Draft:
        B, rows = request.n.shape[0], self.depth.shape[0]
        batch, cell = (torch.arange(size, device=request.n.device) for size in (B, rows))
        start = request.tokens.gather(1, cell * 37 % request.n[:, None]).view_as(
            self.window
        )  # any tokens of the prompt
        self.window.copy_(torch.where(self.window < 0, start, self.window))
        guesses = self.pool[batch, request.root].long()
        t = graft(root_draft(request.root), guesses, guesses[..., 0] >= 0, self.tree_nodes, self.D)
        ancestors = torch.cat((F.pad(t.ancestors, (0, rows)), self.sees.expand(B, -1, -1)), 1)
        depth = torch.cat((t.depth, self.depth.expand(B, -1)), 1)
        parent, valid, scores = (F.pad(x, (0, rows)) for x in (t.parent, t.valid, t.scores))
        return Draft(
            torch.cat((t.tokens, self.window.flatten(1)), 1), parent, depth, ancestors, valid, scores
        )

    def observe(self, choice: Tensor) -> None:
        """choice [B, N]: the target's token after every row, the window's included."""
        W, G = self.window.shape[2], self.pool.shape[2]
        grams = torch.cat((self.window[:, 1:], choice[:, None, -W:]), 1)  # [B, L, W]: column i's continuation
        batch, place = (
            torch.arange(choice.shape[0], device=choice.device),
            torch.arange(G, device=choice.device),
        )
        for i in range(W):
            key, gram = self.window[:, 0, i], grams[:, :, i].int()
            known = self.pool[batch, key]
            same = (known == gram[:, None]).all(-1)
            gone = torch.where(same.any(-1), same.int().argmax(-1), G - 1)  # itself if known, else the oldest
            source = torch.where(place <= gone[:, None], place - 1, place).clamp(min=0)
            moved = known.gather(1, source[..., None].expand_as(known))
            self.pool.index_put_((batch, key), torch.cat((gram[:, None], moved[:, 1:]), 1))
        self.window.copy_(grams)
