"""TODO."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import kernels
import sampling
from drafters.base import Draft, Drafter, DraftInput
from model import Transformer
from runtime.runner import RING
from sampling import SamplingMode, SamplingState
from verify import accept
from verify import multi_round as verify_multi_round

MAX_STOP_IDS = 32


HISTORY = 128  # features kept for a drafter that catches up: more than Pacer.PLAIN + the longest run


class DecodeState:
    """Every buffer a step reads or writes, allocated once. S = ctx + N + 1: the last slot takes writes past the end."""

    def __init__(
        self, model: Transformer, drafter: Drafter, batch_size: int, ctx: int, history=False, kv_dtype=None
    ):
        B, D, V, device = batch_size, drafter.D, model.config.vocab_size, model.device
        self.ctx, self.slots = ctx, ctx + drafter.N + 1
        self.kv = model.new_cache(B, self.slots, kv_dtype)
        with torch.device(device):
            self.tokens = torch.zeros(B, self.slots, dtype=torch.int64)
            self.n = torch.ones(B, dtype=torch.int64)  # cached tokens = the root's position; >= count
            self.root = torch.zeros(B, dtype=torch.int64)
            self.count = torch.ones(B, dtype=torch.int64)  # valid rows of features
            self.features = torch.zeros(B, D + 1, drafter.feature_size, dtype=model.dtype)
            # of position p in row p mod HISTORY (and a trash row), if plain steps may replace speculative ones
            self.history = (
                torch.zeros(B, HISTORY + 1, drafter.feature_size, dtype=model.dtype) if history else None
            )
            self.done = torch.ones(B, dtype=torch.bool)
            self.produced = torch.zeros(B, dtype=torch.int64)
            self.limit = torch.zeros(B, dtype=torch.int64)
            self.stop_ids = torch.full((MAX_STOP_IDS,), -1)
            self.seen = torch.zeros(B, V, dtype=torch.bool)
            self.counts = torch.zeros(B, V, dtype=torch.int32)
            self.ring = torch.zeros(RING, B, 2 + 2 * (D + 1), dtype=torch.int64)  # what the host reads
            self.step = torch.zeros(1, dtype=torch.int64)  # steps of this request
            self.hashes = sampling.hash_ids(torch.arange(V))
        self.sampling = SamplingState(B, device)

    def nbytes(self) -> int:
        tensors = [t for t in vars(self).values() if isinstance(t, Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)


PHASES = ("draft", "verify", "accept")  # accept: choice, walk and commit


class StepOutput(NamedTuple):
    emitted: Tensor  # [B, D + 1] ids
    count: Tensor  # [B] how many of them; 0 for a sequence that had finished
    finite: Tensor  # [B, D + 1] bool: the logits behind each emitted token were usable
    path: Tensor  # [B, D + 1] accepted nodes, root first
    draft: Draft


def decode_step(
    model: Transformer,
    drafter: Drafter,
    state: DecodeState,
    mode: SamplingMode,
    mark: Callable[[str], None] | None = None,
    settle: Callable | None = None,
) -> StepOutput:
    """One step for all sequences: fixed shapes, in-place on `state`, no host sync (DESIGN section 3).

    mark(phase), if given, is called at the end of each of PHASES (a gauge). settle: a compiled `settle_step`.
    """
    S, D, n = state.slots, drafter.D, state.n
    level = torch.arange(D + 1, device=n.device)
    noise = None
    if mode.sample:
        where = n[:, None] + 1 + level
        noise = sampling.gumbel_noise(state.sampling.seed, where, state.hashes, hashed=True)
    buffers = (state.tokens, n, state.root, state.features, state.count, noise)
    request = DraftInput(*buffers, state.sampling, mode, state.seen, state.counts)
    draft = drafter.draft(request)
    if mark is not None:
        mark("draft")
    nodes = model.nodes(n, draft.depth, draft.ancestors, S)
    hidden_states, taps = model(draft.tokens, nodes, state.kv, drafter.taps)
    logits = model.logits(hidden_states)
    if mark is not None:
        mark("verify")
    out = (settle or accept_and_commit)(
        drafter, draft, logits, hidden_states if taps is None else taps, noise, state, mode
    )
    if mark is not None:
        mark("accept")
    return out


def accept_and_commit(
    drafter: Drafter, draft: Draft, logits: Tensor, features: Tensor, noise: Tensor | None,
    state: DecodeState, mode: SamplingMode,
) -> StepOutput:  # fmt: skip
    """Accept and commit: logits [B, N, V] and features [B, N, F] of the tree's nodes -> what the step emits."""
    S, V, D, n = state.slots, logits.shape[-1], drafter.D, state.n
    level = torch.arange(D + 1, device=n.device)
    usable = sampling.finite(logits)
    if mode.penalties:
        below_root = draft.ancestors.clone()
        below_root[:, :, 0] = False
        paths = draft.tokens[:, None].expand_as(below_root)
        logits = sampling.apply_penalties(logits, state.seen, state.counts, paths, below_root, state.sampling)
    if drafter.multi_round:
        accepted = _verify_multi_round(drafter, draft, logits, state, mode)
    else:
        if noise is not None and draft.tokens.shape[1] > 1:
            noise = noise.gather(1, draft.depth[..., None].expand(-1, -1, V))
        choice = sampling.choose(logits, noise, state.sampling, mode)
        if hasattr(drafter, "observe"):
            drafter.observe(choice)
        accepted = accept(draft.tokens, draft.parent, draft.depth, draft.ancestors, draft.valid, choice, D)
    live = ~state.done
    count = accepted.count * live
    new = level < count[:, None]
    if D > 0:
        source = (n[:, None] + accepted.path).clamp(max=S - 1)
        kernels.commit_kv(state.kv, source, torch.where(new, n[:, None] + level, S - 1))
    state.tokens.scatter_(1, torch.where(new, n[:, None] + 1 + level, S - 1), accepted.emitted)
    kept = features.gather(1, accepted.path[..., None].expand(-1, -1, features.shape[-1]))
    state.features.copy_(torch.where(live[:, None, None], kept, state.features))
    if state.history is not None:
        where = torch.where(new, (n[:, None] + level) % HISTORY, HISTORY)
        state.history.scatter_(1, where[..., None].expand_as(kept), kept)
    state.root.copy_(torch.where(live, accepted.bonus, state.root))
    state.n.add_(count)  # before count: wherever an interrupt falls, n >= count
    state.count.copy_(torch.where(live, count, state.count))
    state.produced.add_(count)
    if mode.penalties:
        state.counts.scatter_add_(1, accepted.emitted, new.int())
        state.seen.copy_(state.seen | (state.counts > 0))
    stopped = ((accepted.emitted[..., None] == state.stop_ids).any(-1) & new).any(-1)
    state.done.copy_(state.done | stopped | (state.produced >= state.limit))
    finite = usable.gather(1, accepted.path) | ~new
    tokens = torch.stack((accepted.emitted, finite.long()), -1).flatten(1)
    row = torch.cat((count[:, None], state.done[:, None].long(), tokens), 1)
    state.ring.narrow(2, 0, row.shape[1]).index_copy_(0, state.step % RING, row[None])
    state.step.add_(1)
    return StepOutput(accepted.emitted, count, finite, accepted.path, draft)


def _verify_multi_round(drafter, draft: Draft, logits: Tensor, state: DecodeState, mode: SamplingMode):
    """The paper's Algorithm 1. Three noise streams that share nothing: draft (1), acceptance (2), bonus (3)."""
    n, seed = state.n, state.sampling.seed
    p = sampling.probabilities(logits, state.sampling, mode)
    node = torch.arange(draft.tokens.shape[1], device=n.device)
    u = sampling.uniform_noise(sampling.stream(seed, 2), n[:, None], node)[:, 0]
    ids = torch.arange(p.shape[-1], device=n.device)
    noise = sampling.gumbel_noise(sampling.stream(seed, 3), n[:, None], ids)[:, 0]
    return verify_multi_round(draft.tokens, drafter.tree, p, draft.q, u, noise, drafter.multi_round == "with")
