"""Drafters other than EAGLE: n-gram lookup, lookahead decoding, a draft LLM, Medusa heads (eagle.md 10); and the EAGLE
head of the paper's ablation whose tokens are not shifted.

All of them propose a tree of fixed size on the device and go through the same verification, so none can change a token:
they differ in how many tokens a step gets accepted. N-gram nodes can also be grafted onto another drafter's tree.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import sampling
import tree as trees
from checkpoint import read_medusa
from eagle_draft import Draft, EagleDrafter, EagleHead, Request, TreeDrafter
from model import ModelConfig, Transformer, chain_ancestors, make_nodes, weight_bytes

CANDIDATES, LONGEST = 32, 3  # earlier matches looked at, and tokens of the longest suffix that is looked for


def medusa_tree(children: str) -> trees.StaticTree:
    """A tree from `path:number of children` words, `-` being the root: how eagle.md 10.2 lists the published trees."""
    paths = []
    for word in children.split():
        parent, _, count = word.partition(":")
        above = () if parent == "-" else tuple(map(int, parent))
        paths += [(*above, rank) for rank in range(int(count))]
    return trees.StaticTree(tuple(paths))


# Two of Medusa's published trees of 63 nodes; both go by these names after `--tree`.
MEDUSA_TREES = {
    "medusa:vicuna_7b_stage2": "-:10 0:10 1:5 2:2 3:2 4:1 5:1 6:1 7:1 00:9 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 "
    "000:4 001:1 002:1 010:1",
    "medusa:mc_sim_7b_63": "-:10 0:10 1:7 2:3 3:2 4:1 5:1 6:1 7:1 8:1 9:1 00:10 01:3 02:2 03:1 04:1 05:1 06:1 07:1 10:2 "
    "20:1 000:2",
}


def named_tree(spec: str) -> trees.StaticTree | trees.DynamicTree:
    """`trees.parse_tree`, with Medusa's published trees by name too."""
    return medusa_tree(MEDUSA_TREES[spec]) if spec in MEDUSA_TREES else trees.parse_tree(spec)


def root_draft(root: Tensor) -> Draft:
    """The tree of one node per sequence: root [B]."""
    zero = torch.zeros_like(root)[:, None]
    return Draft(root[:, None], zero, zero, (zero == 0)[..., None], zero == 0, zero.float())


def graft(base: Draft, paths: Tensor, valid: Tensor, K: int, D: int) -> Draft:
    """`base` and K more nodes that spell the paths [B, C, L] (valid [B, C]; the first come first), common beginnings
    merged among the paths and with the base; what is not needed becomes invalid padding. No tree deeper than D;
    K <= C L. Fixed shapes, no host sync. The new nodes' score is 0: lookup has no probabilities."""
    (B, C, L), N = paths.shape, base.tokens.shape[1]
    level, path = torch.arange(L, device=paths.device), torch.arange(C, device=paths.device)
    # route[b, i]: the tokens from below the root to node i of the base
    there = base.ancestors[:, :, None] & (base.depth[:, None, None] == level[:, None] + 1)
    route = (there * base.tokens[:, None, None]).sum(-1)
    held = (paths[:, :, None] == route[:, None]).int().cumprod(-1) > 0
    held &= (base.valid[..., None] & (base.depth[..., None] == level + 1))[:, None]
    in_base, base_node = held.any(2), held.int().argmax(2)
    # first[b, c, l]: the lowest path that begins with the same l + 1 tokens; that one gets the node
    alike = ((paths[:, :, None] == paths[:, None]).int().cumprod(-1) > 0) & valid[:, None, :, None]
    first = alike.int().argmax(2)
    fresh = (valid[..., None] & ~in_base & (first == path[:, None])).flatten(1)
    chosen = (
        (~fresh).int().sort(dim=1, stable=True).indices[:, :K]
    )  # along each path: parents before children
    kept = fresh.gather(1, chosen)
    own = (N - 1 + fresh.int().cumsum(1)).gather(1, (first * L + level).flatten(1)).view(B, C, L)
    node = torch.where(in_base, base_node, own)
    above = F.pad(node[..., :-1], (1, 0)).flatten(1).gather(1, chosen)
    tokens = torch.where(kept, paths.flatten(1).gather(1, chosen), base.tokens[:, :1])
    parent, live = torch.cat((base.parent, above * kept), 1), torch.cat((base.valid, kept), 1)
    ancestors, depth = trees.ancestors_from_parents(parent, D, live)
    return Draft(
        torch.cat((base.tokens, tokens), 1), parent, depth, ancestors, live, F.pad(base.scores, (0, K))
    )


def lookup(tokens: Tensor, n: Tensor, D: int, count: int, longest: int = LONGEST) -> tuple[Tensor, Tensor]:
    """Continuations [B, count, D] of earlier matches of the text's last tokens, and which of them exist [B, count].

    tokens [B, S], of which [0, n] are known (n [B]: the root). A match of the last 3 tokens comes before one of 2,
    before one of 1 (`longest`); of equals the most recent. A continuation that reaches the end of the text goes on
    periodically, as if the text repeated itself from the match on. Source: prompt lookup (eagle.md 10.4), LLMA."""
    end = torch.arange(tokens.shape[1], device=tokens.device)
    same, length = end < n[:, None], torch.zeros_like(tokens)
    for back in range(longest):
        wanted = tokens.gather(1, (n[:, None] - back).clamp(min=0))
        same = same & (tokens.roll(back, 1) == wanted) & (end >= back)
        length = length + same
    rank, at = torch.where(length > 0, length * tokens.shape[1] + end, -1).topk(count)
    period = (n[:, None] - at).clamp(min=1)[..., None]
    ahead = (at[..., None] + 1 + torch.arange(D, device=n.device) % period).clamp(max=tokens.shape[1] - 1)
    return tokens.gather(1, ahead.flatten(1)).view(*at.shape, D), rank >= 0


class WithNGrams:
    """Another drafter's tree with up to K n-gram nodes grafted on (`--ngram-nodes K`)."""

    multi_round = ""

    def __init__(self, drafter, K: int):
        if drafter.multi_round:
            raise ValueError(
                "--ngram-nodes needs --verify match: n-grams are not drawn from the draft's distribution."
            )
        if not 1 <= K <= trees.MAX_NODES - drafter.N:
            raise ValueError(f"--ngram-nodes is {K}; allowed: 1 to {trees.MAX_NODES - drafter.N} here.")
        self.drafter, self.K = drafter, K
        self.taps, self.feature_size = drafter.taps, drafter.feature_size
        self.always_on = getattr(drafter, "always_on", "")
        self.N, self.D = self.shape(drafter.N, drafter.D, K)

    @staticmethod
    def shape(N: int, D: int, K: int) -> tuple[int, int]:
        """N and D of a tree of N and D with K n-gram nodes: one run of K tokens must fit."""
        return N + K, max(D, min(K, trees.MAX_DEPTH))

    def bytes_per_step(self, model: Transformer) -> float:
        return self.drafter.bytes_per_step(model)

    def prefill(self, row: int, tokens: Tensor, features: Tensor, start: Tensor) -> None:
        self.drafter.prefill(row, tokens, features, start)

    def draft(self, request: Request) -> Draft:
        count = min(max(CANDIDATES, -(-self.K // self.D)), request.tokens.shape[1])
        found = lookup(request.tokens, request.n, self.D, count)
        return graft(self.drafter.draft(request), *found, self.K, self.D)

    def observe(self, choice: Tensor) -> None:
        if hasattr(self.drafter, "observe"):
            self.drafter.observe(choice[:, : self.drafter.N])


class CachelessDrafter:
    """What drafters without a cache of the text share. This one drafts nothing: n-grams alone are grafted onto it."""

    N, D, taps, multi_round = 1, 0, (), ""

    def __init__(self, model: Transformer):
        self.feature_size = model.config.hidden_size

    def bytes_per_step(self, model: Transformer) -> float:
        """Weight bytes one draft reads."""
        return 0.0

    def prefill(self, row: int, tokens: Tensor, features: Tensor, start: Tensor) -> None:
        pass

    def draft(self, request: Request) -> Draft:
        return root_draft(request.root)


class NGramDrafter(WithNGrams):
    """Prompt lookup / LLMA: the text's own repetitions as a tree of N nodes, root included, and depth D. No model."""

    def __init__(self, model: Transformer, N: int, D: int):
        if not (2 <= N <= trees.MAX_NODES and 1 <= D <= trees.MAX_DEPTH):
            raise ValueError(
                f"n-gram tree: N is {N} and D is {D}; allowed: 2 to {trees.MAX_NODES}, 1 to {trees.MAX_DEPTH}."
            )
        super().__init__(CachelessDrafter(model), N - 1)
        self.D = D


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
        if min(size - 1, W, G) < 1 or self.D > trees.MAX_DEPTH or self.N > trees.MAX_NODES:
            raise ValueError(
                f"lookahead: size {size}, window {W}, guesses {G}; needs size >= 2, others >= 1, window + size <= "
                f"{trees.MAX_DEPTH + 2}, 1 + (size - 1) (window + guesses) <= {trees.MAX_NODES}."
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

    def draft(self, request: Request) -> Draft:
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


class DraftModelDrafter(TreeDrafter):
    """A small LLM of the same vocabulary drafts: chains, static or dynamic trees, both verification rules.

    Row i of its cache holds token i. Rows up to the root stay; a step re-feeds the tokens accepted last (always D + 1
    rows, what the tree left behind there is overwritten), the tree's rows follow them and never survive."""

    taps = ()

    def __init__(
        self,
        target: Transformer,
        model: Transformer,
        tree: trees.DynamicTree | trees.TreeTables,
        batch_size: int,
        slots: int,
        shared_noise: bool = True,
        multi_round: str = "",
    ):
        super().__init__(tree, shared_noise, multi_round)
        check_vocabulary(target.config, model.config)
        if any(0 < window <= tree.D for window in model.config.windows):
            raise ValueError(
                f"the draft model attends {max(model.config.windows)} tokens, less than the tree is deep."
            )
        self.model, self.feature_size = model, target.config.hidden_size
        self.slots = slots + 1 + self.scratch
        self.cache = model.new_cache(batch_size, self.slots)

    def bytes_per_step(self, model: Transformer) -> float:
        """Weight bytes one draft reads: the whole draft model once per forward."""
        widths = (
            [self.tree.topk] * self.tree.depth
            if self.dynamic
            else [x.node.shape[1] for x in self.tree.levels]
        )
        return sum(self.model.weight_bytes(width) for width in (self.D + 1, *widths))

    def prefill(self, row: int, tokens: Tensor, features: Tensor, start: Tensor) -> None:
        self._chain(tokens[:, :-1], start, self.cache[:, :, row : row + 1])

    def _chain(self, tokens: Tensor, start: Tensor, cache: Tensor) -> Tensor:
        (B, T), device = tokens.shape, tokens.device
        depth = torch.arange(T, device=device).expand(B, T)
        nodes = self.model.nodes(start, depth, chain_ancestors(B, T, device), self.slots)
        return self.model(tokens, nodes, cache)[0]

    def _extend(self, request: Request) -> Tensor:
        start = request.n - request.count + 1
        row = torch.arange(request.features.shape[1], device=start.device)
        where = (start[:, None] + row).clamp(max=request.tokens.shape[1] - 1)
        output = self._chain(request.tokens.gather(1, where), start, self.cache)
        last = (request.count - 1)[:, None, None].expand(-1, 1, output.shape[-1])
        return output.gather(1, last)

    def _level(self, request: Request, depth: int, first: int, tokens, feature, visible) -> Tensor:
        start = request.n + 1
        positions = (request.n + depth)[:, None].expand(tokens.shape)
        nodes = make_nodes(self.model.rotary, start, positions, start + first, visible, self.slots)
        return self.model(tokens, nodes, self.cache)[0]

    def predict(self, output: Tensor) -> Tensor:
        return self.model.logits(output)


def check_vocabulary(target: ModelConfig, model: ModelConfig, tokenizers: tuple = (None, None)) -> None:
    """ValueError unless both models number the same pieces: vocabulary sizes, and tokenizers where both exist."""
    sizes = target.vocab_size, model.vocab_size
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the draft model has {sizes[1]:,} tokens, the target {sizes[0]:,}; use a draft model of the same family."
        )
    if None not in tokenizers:
        ours, theirs = (t._files.pieces for t in tokenizers)
        if differ := [i for i in sorted(ours.keys() | theirs.keys()) if ours.get(i) != theirs.get(i)]:
            i = differ[0]
            raise ValueError(
                f"the draft model's token {i} is {theirs.get(i)!r:.40}, the target's {ours.get(i)!r:.40} "
                f"({len(differ):,} differ); use a draft model of the same family."
            )


class ResBlock(nn.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, size: int):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """Medusa's heads under their published names: `{i}.0.linear.weight/bias` and `{i}.1.weight`, head i's own LM head.
    Without the latter (`own_lm_head` False) all heads share the target's. Head i guesses the token i + 2 further on."""

    def __init__(self, target: Transformer, count: int, own_lm_head: bool = False):
        H, V = target.config.hidden_size, target.config.vocab_size
        last = [nn.Linear(H, V, bias=False) for _ in range(count)] if own_lm_head else []
        super().__init__(nn.Sequential(ResBlock(H), *last[i : i + 1]) for i in range(count))
        self.own_lm_head = own_lm_head
        object.__setattr__(self, "target", target)  # shared, not owned: stays out of the state dict

    def forward(self, hidden_states: Tensor, count: int | None = None) -> Tensor:
        """Post-norm hidden states [..., H] -> logits [..., heads, V] of the first `count` heads, float32."""
        out = torch.stack([self[i](hidden_states) for i in range(count or len(self))], -2)
        if not self.own_lm_head:
            return self.target.logits(out)
        return out if out.dtype == torch.float64 else out.float()


def load_medusa(path: str | Path, target: Transformer) -> MedusaHeads:
    """Medusa heads of a file or folder (`checkpoint.read_medusa`) in the target's dtype and on its device."""
    tensors = read_medusa(path, target.config)
    count, own = len({name.split(".")[0] for name in tensors}), "0.1.weight" in tensors
    with torch.device("meta"):
        heads = MedusaHeads(target, count, own).eval().requires_grad_(False)
    heads = heads.to(target.dtype).to_empty(device=target.device)
    heads.load_state_dict(tensors)
    return heads


class MedusaDrafter(CachelessDrafter):
    """Medusa: head d - 1 drafts all tokens at depth d at once from the last committed hidden state; the token of rank r
    there is its r-th best whatever the parent is. With shared noise the ranks see the target's noise of that position."""

    def __init__(self, heads: MedusaHeads, tree: trees.TreeTables, shared_noise: bool = True):
        if isinstance(tree, trees.DynamicTree):
            raise ValueError("Medusa heads draft static trees, like --tree medusa:vicuna_7b_stage2.")
        if tree.D > len(heads):
            raise ValueError(f"the tree is {tree.D} deep, but there are {len(heads)} Medusa heads; use --tree chain:"
                             f"{len(heads)} or another tree of that depth.")  # fmt: skip
        super().__init__(heads.target)
        self.heads, self.tree, self.shared_noise, self.N, self.D = heads, tree, shared_noise, tree.N, tree.D

    def bytes_per_step(self, model: Transformer) -> float:
        """Weight bytes one draft reads: the heads used, and the target's LM head if they share it."""
        used = sum(weight_bytes(self.heads[i]) for i in range(self.D))
        shared = (
            weight_bytes(model.lm_head) if model.lm_head is not None else model.embed_tokens.weight.nbytes
        )
        return used + (0.0 if self.heads.own_lm_head else shared)

    def draft(self, request: Request) -> Draft:
        t, K = self.tree, max(self.tree.max_children, 1)
        last = (request.count - 1)[:, None, None].expand(-1, 1, self.feature_size)
        logits = self.heads(request.features.gather(1, last)[:, 0], t.D)  # [B, D, V]
        if request.mode.penalties:  # of the text so far: a cartesian tree has no path to follow
            none = torch.zeros_like(t.depth[:, :1, None]).expand(-1, t.D, -1)
            logits = sampling.apply_penalties(
                logits, request.seen, request.counts, none, none > 0, request.state
            )
        noise = request.noise[:, : t.D] if request.noise is not None and self.shared_noise else None
        keys, scores = sampling.draft_keys(logits, noise, request.state, request.mode)
        best = keys.topk(K, -1).indices
        pick = ((t.depth - 1).clamp(min=0) * K + t.rank)[:, 1:]
        tokens = torch.cat((request.root[:, None], best.flatten(1).gather(1, pick)), 1)
        gained = F.pad(scores.gather(-1, best).flatten(1).gather(1, pick), (1, 0))
        totals = torch.where(t.ancestors, gained[:, None], 0.0).sum(-1)
        return Draft(tokens, t.parent, t.depth, t.ancestors, t.valid, totals)


class UnshiftedDrafter(EagleDrafter):
    """EAGLE with features paired with their own tokens (the paper's Figure 8): a row cannot know which token was drawn
    after its feature, so the children of all its siblings are the same. Static trees only; for that comparison alone."""

    def __init__(self, head: EagleHead, tree: trees.TreeTables, *how, **more):
        if isinstance(tree, trees.DynamicTree):
            raise ValueError(
                "heads with unshifted tokens draft static trees, like --tree paper25 or chain:K."
            )
        super().__init__(head, tree, *how, **more)

    def prefill(self, row: int, tokens: Tensor, features: Tensor, start: Tensor) -> None:
        super().prefill(row, F.pad(tokens[:, :-1], (1, 0)), features, start)

    def _extend(self, request: Request) -> Tensor:
        self.rows = request.root[:, None]  # the tokens that the tree's rows stand for
        return super()._extend(request._replace(tokens=F.pad(request.tokens[:, :-1], (1, 0))))

    def _level(self, request: Request, depth: int, first: int, tokens, feature, visible) -> Tensor:
        above = self.rows.gather(1, self.tree.levels[depth - 1].source)
        self.rows = torch.cat((self.rows, tokens), 1)
        return super()._level(request, depth, first, above, feature, visible)


def eagle_drafter(head: EagleHead, *how, **more) -> EagleDrafter:
    """The drafter that fits the head; arguments as EagleDrafter's."""
    return (UnshiftedDrafter if head.config.unshifted else EagleDrafter)(head, *how, **more)
