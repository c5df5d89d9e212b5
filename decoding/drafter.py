"""The contract of a drafter, and the drafter that drafts nothing.

A drafter proposes a draft tree and is told what the target chose. It cannot change a token: the target verifies every
node, so a bad draft only costs speed. Everything a drafter does inside a step has fixed shapes and never waits for the
host. Shape letters: B batch, N nodes, D depth, S slots, V vocabulary, F feature size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from decoding.params import SamplingMode
from decoding.sampling import SamplingState
from kernels.growing import Draft
from model import Transformer
from tree import DynamicTree, TreeTables


class StepParts(NamedTuple):
    """The functions of a step that something faster replaces (`engine.fused`). None stands for the function itself."""

    layers: Callable | None = None  # model.Transformer.run_layers
    draft_layer: Callable | None = None  # eagle_draft.EagleHead.layer_forward
    draft_tree: Callable | None = None  # TreeDrafter.draft; it returns None for what it does not draft


UNCOMPILED = StepParts()


class DraftInput(NamedTuple):
    """What a drafter may look at in one step: the engine's static buffers and the noise of this step."""

    tokens: Tensor  # [B, S] committed ids; tokens[n] is the root
    n: Tensor  # [B] tokens in the target's cache, which is the root's position
    root: Tensor  # [B]
    features: Tensor  # [B, D + 1, F] of positions n - count .. n - 1
    count: Tensor  # [B] valid rows of features
    noise: Tensor | None  # [B, D + 1, V] the target's noise; None for greedy decoding, and where trees are pruned
    hashes: Tensor  # [V] the hashes of the token ids, from which noise is made
    sampling: SamplingState
    mode: SamplingMode
    seen: Tensor  # [B, V] bool, tokens of the prompt and the output
    counts: Tensor  # [B, V] how often each token was generated so far, the root included
    parts: StepParts = UNCOMPILED
    bias: Tensor | None = None  # [B, 1, V] what the requests add to the logits, None if no row asks for it
    kv: tuple[Tensor, ...] = ()  # the target's caches
    segments: Tensor | None = None  # as of Nodes
    produced: Tensor | None = None  # [B] tokens emitted so far


class Drafter:
    """What the step, the engine and the reports need of a drafter. A new drafter is a subclass with `draft`."""

    multi_round: str = ""  # "without" or "with" replacement for multi-round verification, "" for `verify.accept`
    p_min: float = 0.0  # nodes that are accepted with a lower probability may be left out of a tree, see TreeDrafter
    by_price: bool = False  # whether p_min follows the price of a node, which depends on the number of rows
    priced_nodes: int = 4  # a node costs what so many cost together, divided by them; `engine.stepping.MANY` for more
    scoring: str = "none"  # what Draft.scores are: "none", "probability", or "noisy" (with the shared noise)
    # Its KV caches [..., B, Hkv, S, hd], all that a step changes of it. What they hold of a token depends on the text up
    # to there alone.
    caches: tuple[Tensor, ...] = ()
    cached_models: tuple[nn.Module, ...] = ()  # those whose keys and values the caches hold
    tree: DynamicTree | TreeTables | None = None  # what it drafts, if that is one tree for each row, or one for all
    grafted: bool = False  # whether n-gram nodes were added to another drafter's tree
    window: int = 0  # the positions before a row that it sees; 0: the whole text
    # Slots of a row of its caches, where position p lies in slot p mod `ring`, so they hold the last `kept` positions
    # of a text alone. 0: slot p holds position p.
    ring: int = 0
    kept: int = 0

    def __init__(self, N: int, D: int, feature_size: int, taps: tuple[int, ...] = ()):
        """N: nodes of the tree, root included. D: greatest depth below the root. feature_size: width of the target's
        features per token. taps: layers of the target whose input it wants, () for the post-norm hidden state."""
        self.N = N
        self.D = D
        self.feature_size = feature_size
        self.taps = taps

    def prefill(self, row: int, tokens: Tensor, features: Tensor, start: Tensor, keep: Tensor) -> None:
        """Learn known tokens of one sequence: ids [1, T + 1] from position start [1], features [1, T, F] of the first
        T of them. keep [1]: how many of these T are no padding. No host sync."""

    def rows_held(self, drafted: int) -> int:
        """How many slots of its caches hold a text of which `drafted` rows were made."""
        return min(drafted, self.ring) if self.ring else drafted

    def rows_of_part(self, drafted: int, length: int) -> int:
        """`drafted` where the first `length` tokens of a text are kept. A ring has its last rows, whatever is kept."""
        return drafted if self.ring else min(drafted, length)

    def resume(self, length: int, drafted: int, start: int) -> int:
        """From where a text of `length` tokens has to be run, so that the caches have all that drafting sees behind it.

        The caches hold rows of a text that has its first `start` tokens in common with this one, and of which `drafted`
        rows were made. The result is at most `start`.
        """
        if not self.D or not self.ring:
            return min(start, drafted) if self.D else start
        needed = max(0, length - self.window)  # the first row that drafting sees
        if drafted - self.kept > needed:
            return min(start, needed)
        return min(start, max(needed, drafted))

    def draft(self, inputs: DraftInput) -> Draft:
        """Propose one tree per sequence. No host sync."""
        raise NotImplementedError

    def observe(self, draft: Draft, choice: Tensor, n: Tensor) -> None:
        """Learn the target's token after every row [B, N] of a step, also of invalid ones. n [B]: the root's position. No
        host sync."""

    def prunes(self, mode: SamplingMode) -> bool:
        """Whether it drafts only what pays, so that plain steps need not replace its steps."""
        return False

    def price(self, share: float, first: float, more: float) -> None:
        """Learn what checking one more node takes, as a share of the time of a plain step behind the present text: of the
        first `priced_nodes` ones, of these behind no text, and of those that are more."""

    def first(self, rows: int) -> Drafter:
        """This drafter for the first rows of the batch. What it keeps for each row is shared as views.

        A drafter that keeps more for each row than caches and trees extends this and `swap`.
        """
        view = copy.copy(self)
        view.caches = tuple(cache.narrow(-4, 0, rows) for cache in self.caches)
        if isinstance(self.tree, TreeTables):
            view.tree = self.tree.first(rows)
        return view

    def swap(self, a: int, b: int, length: int) -> None:
        """Exchange what is kept for two rows. Rows of its caches from `length` on are not valid. No host sync."""
        for cache in self.caches:
            swap_rows(cache, a, b, self.rows_held(length))

    def bytes_per_step(self) -> float:
        """Weight bytes that one draft reads."""
        return 0.0


def swap_rows(cache: Tensor, a: int, b: int, length: int) -> None:
    """Exchange the first `length` slots of two rows of a cache [..., B, Hkv, S, hd]."""
    first, second = (cache.select(-4, row).narrow(-2, 0, min(length, cache.shape[-2])) for row in (a, b))
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)


def take_rows(values: Tensor, index: Tensor) -> Tensor:
    """The rows index [B, W] of values [B, R, H]."""
    return values.gather(1, index[..., None].expand(-1, -1, values.shape[-1]))


class PlainDrafter(Drafter):
    """Drafts nothing: the tree is the root alone, padded to `width` rows that never match.

    `--prove` uses the padding to keep the width of the forward. A PlainDrafter that stands in for another drafter
    (`features_of`) collects the features that the other one will want.
    """

    def __init__(self, model: Transformer, width: int = 1, features_of: Drafter | None = None):
        feature_size = features_of.feature_size if features_of else model.config.hidden_size
        super().__init__(width, 0, feature_size, features_of.taps if features_of else ())
        with torch.device(model.device):
            self.zeros = torch.zeros(1, width, dtype=torch.int64)
            self.scores = torch.zeros(1, width)
            self.valid = torch.arange(width)[None] == 0
            self.ancestors = torch.eye(width, dtype=torch.bool)[None]

    def draft(self, inputs: DraftInput) -> Draft:
        B = inputs.root.shape[0]
        zeros = self.zeros.expand(B, -1)
        tokens = inputs.root[:, None].expand(-1, self.N).clone()  # the step overwrites it, and observers look later
        ancestors = self.ancestors.expand(B, -1, -1)
        return Draft(tokens, zeros, zeros, ancestors, self.valid.expand(B, -1), self.scores.expand(B, -1))
