"""Heads that draft a whole block of tokens in one forward (DFlash, DFlash2, DSpark, JetSpec), and how they draft trees.

A block is a row for the last committed token, the anchor, and rows for masks behind it. Slot j stands at the position of
the anchor plus j. All that the rows know of the text comes through attention: the keys and values of a committed token
are made from the target's features of that token, for all layers at once, and are kept. The rows of a block are not.

Each slot gives logits for its depth. A head either draws them as they are, so that a tree consists of the likeliest
combinations, or it corrects them by the token before: with a Markov head (DSpark) or a selector (DFlash2).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

import kernels
from decoding import sampling
from decoding.drafter import Draft, DraftInput, take_rows
from drafters.heads import DraftHead, HeadDrafter
from drafters.trees import DEFAULT_RULE, DraftRule, FedRows, independent_tree
from families.config import ModelConfig
from kernels.growing import ancestors_from_parents, best_prefixes
from kernels.records import Rotary
from layers.build import build_attention, build_block, build_mlp
from model import Block, Nodes, RMSNorm, Transformer, linear
from support.machine import zeros
from tree import DynamicTree, Trees
from weights.block_heads import BlockConfig
from weights.quantized import row_parts


class SlotConvolution(nn.Module):
    """The convolutions over the slots before and after a sublayer (`kernels.convolve`). Its input makes both kernels."""

    def __init__(self, size: int, taps: int, group: int):
        super().__init__()
        self.base = nn.Parameter(torch.empty(2, taps, size))
        self.projection = nn.Linear(size, 2 * taps * (size // group), bias=False)

    def around(self, sublayer: Callable[[Tensor], Tensor], z: Tensor, x: Tensor) -> Tensor:
        """x + the convolved output of a sublayer on the convolved z [B, T, H]."""
        delta = linear(self.projection, z)
        return kernels.convolve(sublayer(kernels.convolve(z, delta, self.base, 0, None)), delta, self.base, 1, x)


class ConvolvedBlock(Block):
    """A decoder layer with convolutions around both sublayers."""

    def __init__(self, geometry: ModelConfig, layer: int, config: BlockConfig):
        super().__init__(geometry, build_attention(geometry, layer), build_mlp(geometry, layer))
        sizes = geometry.hidden_size, config.conv_taps, config.conv_group
        self.attention_conv, self.mlp_conv = SlotConvolution(*sizes), SlotConvolution(*sizes)

    def forward(self, x: Tensor, nodes: Nodes, kv: Tensor) -> Tensor:
        x = self.attention_conv.around(lambda z: self.attention(z, nodes, kv), self.input_norm(x), x)
        return self.mlp_conv.around(self.mlp, self.post_norm(x), x)


class BlockHead(DraftHead):
    """A block head bound to a target, whose embedding it shares, and whose LM head unless it has its own."""

    run_layers, kept = Transformer.run_layers, Transformer.kept

    def __init__(self, config: BlockConfig, target: Transformer, draft_vocab: Tensor | None = None):
        """draft_vocab int64 [Vd]: absolute target ids that it drafts, sorted; None: all."""
        super().__init__()
        self.config = config
        geometry = config.layer
        H, n = geometry.hidden_size, geometry.num_hidden_layers
        self.fc = nn.Linear(len(config.taps) * config.target_hidden_size, H, bias=False)
        self.hidden_norm, self.norm = (RMSNorm(H, geometry.rms_norm_eps) for _ in range(2))
        layer = partial(ConvolvedBlock, config=config) if config.conv_taps else build_block
        self.layers = nn.ModuleList(layer(geometry, i) for i in range(n))
        self.kv_places = {i: (0, i) for i in range(n)}  # as of a Transformer
        self.lm_head = nn.Linear(H, geometry.vocab_size, bias=False) if config.has_lm_head else None
        if config.markov:
            self.predecessor = nn.Embedding(config.target_vocab_size, config.rank)
            self.successor = nn.Embedding(geometry.vocab_size, config.rank)
        r = config.rank
        mixes = {"gated": (H + r, r, True), "rnn": (2 * r + H, 3 * r, True), "selector": (H, r, False)}
        self.mix = nn.Linear(*mixes[config.markov]) if config.markov in mixes else None
        self.bind(target, draft_vocab)
        self.context: nn.Module | None = None  # the keys and values of all layers, see `finish`
        self.register_buffer("context_norms", torch.empty(n, 0), persistent=False)

    def new_cache(self, batch_size: int, slots: int) -> tuple[Tensor]:
        """A zeroed cache of the text [n, 2, B, Hkv, S, hd]."""
        c, weight = self.config.layer, self.norm.weight
        shape = (c.num_hidden_layers, 2, batch_size, c.num_key_value_heads, slots, c.head_dim)
        return (zeros(shape, weight.dtype, weight.device),)

    def finish(self) -> None:
        """Also the rows of the successors for a trimmed vocabulary, and the one product that gives the keys and values of
        all layers."""
        super().finish()
        c = self.config
        if self.draft_ids is not None and c.markov and not c.has_lm_head:
            self.successor = nn.Embedding.from_pretrained(self.successor.weight[self.draft_ids])
        first = c.layer.num_attention_heads * c.layer.head_dim
        self.context = row_parts([layer.attention.qkv for layer in self.layers], first)
        self.context_norms = torch.stack([layer.attention.k_norm.weight.detach() for layer in self.layers])

    def absorb(self, _tokens: Tensor, features: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, cache: Tensor) -> None:
        """Write the keys and values of committed tokens, whose features [B, T, F] these are, into the cache."""
        c = self.config.layer
        normed = self.hidden_norm(linear(self.fc, features))
        kv = linear(self.context, normed).unflatten(-1, (len(self.layers), 2, c.num_key_value_heads, c.head_dim))
        kernels.write_context(kv, self.context_norms, c.rms_norm_eps, cos, sin, cache, slots)

    def forward(self, tokens: Tensor, nodes: Nodes, cache: Tensor, layers: Callable | None = None) -> Tensor:
        """The anchor and masks [B, slots] -> what the LM head reads of the slots that draft, [B, depth, H].

        layers: runs all layers instead of `run_layers`, as `Transformer.forward` takes it.
        """
        x = self.target.embed_tokens(tokens).to(self.norm.weight.dtype)
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        own = Transformer.run_layers if self.config.conv_taps or layers is None else layers
        normed, _ = own(self, x, nodes, (cache,), ())
        return normed if self.config.slot0 else normed[:, 1:]

    @torch.no_grad()
    def draft_along(self, tokens: Tensor, features: Tensor, every: int) -> None:
        """Draft blocks after known tokens [B, T] with these features [B, T, F], from every so many positions on, and
        correct them by these tokens, so that all linears see what they see in decoding. For GPTQ, before `finish`."""
        c, (B, T) = self.config.layer, tokens.shape
        slots = self.config.slots
        (cache,) = self.new_cache(B, T + slots)
        rotary = Rotary(self.rotary.cos, self.rotary.sin)
        norms = torch.stack([layer.attention.k_norm.weight for layer in self.layers])
        normed = self.hidden_norm(linear(self.fc, features))
        first = c.num_attention_heads * c.head_dim
        kv = torch.stack([layer.attention.qkv(normed)[..., first:] for layer in self.layers], 2)
        kv = kv.unflatten(-1, (2, c.num_key_value_heads, c.head_dim)).to(cache.dtype)
        start, level = torch.zeros_like(tokens[:, 0]), torch.arange(T, device=tokens.device)[None]
        _, places, cos, sin = kernels.place_rows(start, level, rotary, T + slots)[:4]
        kernels.write_context(kv, norms, c.rms_norm_eps, cos, sin, cache, places)
        masks = [mask.expand(B, -1, -1) for mask in slot_masks(self.config, tokens.device)]
        for anchor in range(every, T - self.config.depth, every):
            where = kernels.place_rows(start + anchor, level[:, :slots], rotary, T + slots)
            nodes = Nodes(where[2], where[3], where[0], where[1], start + anchor, *masks)
            block = torch.full((B, slots), self.config.mask_id, device=tokens.device)
            block[:, 0] = tokens[:, anchor]
            hidden, state = self(block, nodes, cache), None
            if self.lm_head is not None:
                self.narrow_logits(hidden)
            mixed = self.mixed(hidden)
            for d in range(self.config.depth if self.config.markov else 0):
                _, state = self.factors(tokens[:, anchor + d, None], mixed[:, d], state)

    def narrow_logits(self, output: Tensor) -> Tensor:
        """What slots give [B, depth, H] -> their own logits [B, depth, Vd], in the dtype that the LM head computes in."""
        return self.scaled(super().narrow_logits(output))

    def scaled(self, logits: Tensor) -> Tensor:
        """What the LM head computes -> logits, multiplied and capped."""
        scale, cap = self.config.logits_scale, self.config.logits_cap
        if scale != 1 or cap:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
        return cap * torch.tanh(logits / cap) if cap else logits

    def top(self, output: Tensor, count: int) -> kernels.TopK | None:
        changed = self.config.logits_scale != 1 or self.config.logits_cap
        return None if changed else super().top(output, count)

    def mixed(self, hidden: Tensor) -> Tensor:
        """What `factors` reads of the slots [B, depth, H], all at once."""
        return linear(self.mix, hidden) if self.config.markov == "selector" else hidden

    def factors(self, tokens: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What corrects the logits of a slot after each of the target's tokens [B, W] before it.

        hidden [B, H]: of the slot, for a selector what it makes of that (`mixed`). state [B, W, r]: of a recurrent head,
        None at the first slot.

        Returns the factors [B, W, r] whose products with the successors are added to the logits, and the next state.
        """
        e = self.predecessor(tokens)
        kind = self.config.markov
        if kind == "vanilla":
            return e, None
        if kind == "selector":
            return e * hidden[:, None], None
        h = hidden[:, None].expand(-1, e.shape[1], -1)
        if kind == "gated":
            return torch.sigmoid(linear(self.mix, torch.cat((h, e), -1))) * e, None
        state = torch.zeros_like(e) if state is None else state
        gate, candidate, out = linear(self.mix, torch.cat((state, e, h), -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * state + (1 - gate) * torch.tanh(candidate)


def slot_masks(config: BlockConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which slots a slot sees, bool [1, slots, slots]: where attention is full, and where it has a window."""
    place = torch.arange(config.slots, device=device)
    near = (place[:, None] - place).abs() < (max(config.layer.windows) or config.slots)
    before, everything = place[:, None] >= place, torch.ones_like(near)
    masks = (before if config.causal else everything), (before if config.causal_window else everything) & near
    return masks[0][None], masks[1][None]


class Slots(NamedTuple):
    """What the forward of a block gives."""

    mixed: Tensor  # [B, D, H or r] what corrections read
    logits: Tensor | None  # [B, D, Vd]; None where nothing but the best of them are wanted
    ids: Tensor | None  # [B, D, K] the shortlists of a head that corrects them: places in the draft vocabulary
    scores: Tensor | None  # [B, D, K] and their log-probabilities before that


class Rows(NamedTuple):
    """Rows of a tree of one depth, from which the next depth grows."""

    slots: Slots
    depth: int  # which slot gives their children
    tokens: Tensor  # [B, W]
    factor: Tensor | None  # [B, W, r], see `BlockHead.factors`; None where tables alone make them
    state: Tensor | None  # [B, W, r] of their children


class BlockDrafter(HeadDrafter):
    """Drafts chains, static and dynamic trees with one forward of a block.

    A dynamic tree has the likeliest prefixes. If tokens correct the logits after them, these are searched level by level
    like those of EAGLE; otherwise they are found at once, whatever TOPK is, among the TOPK best tokens of each depth.
    """

    prunes_dynamic = True
    places_levels = False
    priced_nodes = 12  # no forward ends a tree early, so a pruned one is still large, and many nodes cost more than few

    def __init__(self, head: BlockHead, tree: Trees, batch_size: int, slots: int, rule: DraftRule = DEFAULT_RULE):
        """As HeadDrafter. ValueError also if the tree is deeper than a block."""
        config = head.config
        if tree.D > config.depth:
            hint = f"use --tree chain:{config.depth}, or another tree of that depth"
            raise ValueError(f"the tree is {tree.D} deep, but this head drafts {config.depth} tokens at once; {hint}.")
        if not isinstance(tree, DynamicTree) and not rule.multi_round and 0 < tree.D == tree.N - 1 and tree.valid.all():
            tree = DynamicTree(tree.N, tree.D - 1, 1)  # a chain, for which this is the shortest way
        super().__init__(head, tree, batch_size, slots, rule._replace(ngram_nodes=0), config.slots)
        if rule.shared_noise and config.markov:
            self.scoring = "noisy"
        device = self.cache.device
        self.masks = torch.full((1, config.slots - 1), config.mask_id, device=device)
        self.block_depth = torch.arange(config.slots, device=device)[None]
        self.visible, self.visible_window = slot_masks(config, device)

    def bytes_per_step(self) -> float:
        """Everything is read once."""
        return self.head.bytes_read()

    def draft(self, inputs: DraftInput) -> Draft:
        if inputs.mode.sample and inputs.noise is None:  # trees are pruned
            ahead = sampling.noise_ahead(inputs.sampling.seed, inputs.n, self.D + 1, inputs.hashes)
            inputs = inputs._replace(noise=ahead)
        slots = self._slots(inputs)
        if self.dynamic and self._searches_in_cpp(inputs, slots):
            return self._searched(inputs, slots)
        if self.head.config.markov or self._whole_logits(inputs):
            rows = self._rows(slots, 0, inputs.root[:, None], None)
            draft = self._dynamic(inputs, rows) if self.dynamic else self._static(inputs, rows)
        elif self.dynamic:  # the candidates at a depth are the same after every parent
            draft = best_prefixes(self._target_ids(slots.ids), slots.scores, inputs.root, self.N)
        else:
            draft = independent_tree(self.tree, inputs.root, self._target_ids(slots.ids), slots.scores)
        return self._pruned(draft) if self.prunes(inputs.mode) else draft

    def _whole_logits(self, inputs: DraftInput) -> bool:
        """Whether the children of a row are drawn from all of its logits, which then depend on more than the slot."""
        return bool(inputs.mode.penalties or self.multi_round)

    def _hidden(self, inputs: DraftInput) -> Tensor:
        """Absorb what was committed, and run a block: what the LM head reads of its slots [B, slots, H]."""
        features = inputs.features
        if kernels.use_cpu("draft_tree", features):  # reading values is free, so only rows that count are fed
            features = features.narrow(1, 0, min(int(inputs.count.max()), features.shape[1]))
        fed = features.shape[1]
        where = self._place(inputs, self.block_depth, fed)
        _, slots, cos, sin = (column.narrow(1, 0, fed) for column in where[:4])
        self.head.absorb(where[4], features, cos, sin, slots, self.cache)
        positions, slots, cos, sin = (column.narrow(1, fed, self.block_depth.shape[1]) for column in where[:4])
        B = inputs.n.shape[0]
        seen = (mask.expand(B, -1, -1) for mask in (self.visible, self.visible_window))
        nodes = Nodes(cos, sin, positions, slots, inputs.n, *seen, window=self.window, ring=self.ring > 0)
        tokens = torch.cat((inputs.root[:, None], self.masks.expand(B, -1)), 1)
        return self.head(tokens, nodes, self.cache, inputs.parts.layers)

    def _slots(self, inputs: DraftInput) -> Slots:
        """Run a block, and make the shortlists."""
        hidden = self._hidden(inputs).narrow(1, 0, max(self.D, 1))  # of the slots that are used
        config, whole = self.head.config, self._whole_logits(inputs)
        if whole and not config.markov:
            return Slots(hidden, self.head.narrow_logits(hidden), None, None)
        count = self.tree.topk if self.dynamic else max(self.tree.max_children, 1)
        if config.markov:
            count = min(max(config.shortlist, count), self.head.vocab_size)
        mixed = self.head.mixed(hidden)
        noise = inputs.noise if self.shared_noise and not self.multi_round else None
        best = None if whole or noise is not None else self.head.top(hidden, count)
        if best is not None:
            return Slots(mixed, None, best.ids, best.scores)
        logits = self.head.narrow_logits(hidden)
        ahead = None if noise is None else noise.narrow(1, 0, hidden.shape[1])
        noisy = bool(config.markov) or self.scoring == "noisy"
        best = sampling.draft_topk(logits, ahead, self.draft_ids, inputs.sampling, inputs.mode, count, noisy)
        return Slots(mixed, logits, *best)

    def _rows(self, slots: Slots, depth: int, tokens: Tensor, state: Tensor | None) -> Rows:
        """Rows of the target's tokens [B, W] at a depth. state: theirs, of a recurrent head."""
        if self.head.config.markov not in ("gated", "rnn"):
            return Rows(slots, depth, tokens, None, None)
        return Rows(slots, depth, tokens, *self.head.factors(tokens, slots.mixed[:, depth], state))

    def _level(self, inputs: DraftInput, depth: int, fed: FedRows) -> Rows:
        above = fed.features
        state = None if above.state is None else take_rows(above.state, fed.source)
        return self._rows(above.slots, depth, fed.tokens, state)

    def predict(self, output: Rows) -> Tensor:
        """All logits [B, W, Vd] after rows, corrected on the shortlist."""
        slots, depth = output.slots, output.depth
        z = slots.logits[:, depth, None].expand(-1, output.tokens.shape[1], -1)
        if not self.head.config.markov:
            return z
        ids, factor = slots.ids[:, depth], output.factor
        if factor is None:
            factor, _ = self.head.factors(output.tokens, slots.mixed[:, depth], None)
        bias = factor @ self.head.successor(ids).mT
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        return z.scatter_add(-1, ids[:, None].expand_as(bias), bias.to(z.dtype))

    def _children(self, inputs: DraftInput, output: Rows, depth: int, paths: Tensor, width: int, first_row: int = 0):
        slots = output.slots
        if self._whole_logits(inputs):
            return super()._children(inputs, output, depth, paths, width, first_row)
        softness = None
        if self._softened(inputs):  # as in sampling.draft_keys
            temperature = inputs.sampling.temperature
            softness = temperature.clamp_min(0.5).where(temperature > 0, 1.0)
        known = output.factor, None, None, None
        if output.factor is None:
            known = None, output.tokens, *self._tables(slots)
        parents = kernels.Parents(self.head.successor.weight, *known)
        return *kernels.follow(slots.scores, slots.ids, parents, softness, depth, width), None

    def _softened(self, inputs: DraftInput) -> bool:
        """Whether scores are those of logits that the temperature has divided."""
        return self.shared_noise and inputs.mode.sample

    def _tables(self, slots: Slots) -> tuple[Tensor, Tensor | None]:
        """What makes the factors of a token where tables alone do."""
        return self.head.predecessor.weight, slots.mixed if self.head.config.markov == "selector" else None

    def _searches_in_cpp(self, inputs: DraftInput, slots: Slots) -> bool:
        known = slots.scores is not None and self.head.config.markov not in ("gated", "rnn")
        return known and not self._whole_logits(inputs) and kernels.use_cpu("draft_tree", slots.scores, slots.mixed)

    def _searched(self, inputs: DraftInput, slots: Slots) -> Draft:
        """The best prefixes at once, without a limit to the rows of a depth. Pruning ends the search early."""
        tables = (None, None, None)
        if self.head.config.markov:
            tables = self.head.successor.weight, *self._tables(slots)
        candidates = slots.scores.contiguous(), slots.ids.contiguous(), self.draft_ids
        tree, p_min = self.tree, self.p_min if self.prunes(inputs.mode) else 0.0
        softened = bool(self.head.config.markov) and self._softened(inputs)
        how = inputs.root, inputs.sampling.temperature, *tables, softened, tree.N, tree.topk, p_min
        return Draft(*torch.ops.eaglet_cpu.slot_tree.default(*candidates, *how))

    def _pruned(self, draft: Draft) -> Draft:
        """The nodes that are accepted with a probability of p_min at least. It waits for the host, so it is for CPUs.

        No node is likelier than its parent, so what is left is a tree.
        """
        keep = draft.valid & (draft.scores >= math.log(self.p_min))
        keep[:, 0] = True
        order = (~keep).sort(dim=1, stable=True).indices
        place = order.argsort(1)
        order = order[:, : int(keep.sum(1).max())]
        valid = keep.gather(1, order)
        parent = place.gather(1, draft.parent.gather(1, order)).where(valid, 0)
        ancestors, depth = ancestors_from_parents(parent, self.D, valid)
        tokens, scores = (column.gather(1, order) for column in (draft.tokens, draft.scores))
        return Draft(tokens, parent, depth, ancestors, valid, scores)
