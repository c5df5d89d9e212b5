"""One decoding step: draft, forward, accept, commit.

It works on static buffers. On a GPU its shapes are fixed and it never waits for the host, so it can be captured as one
CUDA graph. (The pruned trees of CPUs differ from step to step.) Plain decoding is the same step with a one-node tree. The
emitted tokens are a function of the prompt and the seed; the drafter only decides how many of them one forward yields.

Shape letters: B batch, N nodes, D depth, S slots, V vocabulary, F feature size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kernels
from decoding import sampling
from decoding.drafter import UNCOMPILED, Draft, Drafter, DraftInput, StepParts
from decoding.params import MAX_STOP_IDS, SamplingMode
from decoding.sampling import Logprobs, SamplingState
from decoding.verify import accept, multi_round
from kernels.memory import commit_memory
from kernels.records import Accepted, Memory, StepBuffers
from model import Transformer

PHASES = ("draft", "verify", "accept")  # accept is choosing, walking and committing
Mark = Callable[[str], None]  # told where a step is: at its "start", and at the end of each of PHASES
HISTORY = 128  # features kept for a drafter that catches up: more than Pacer.PLAIN and the longest run of a step
# the buffers of a DecodeState whose first axis is the batch
PER_ROW = """tokens n root count features history done produced limit stop_ids seen counts allowed segments""".split()
RING = 8  # steps whose output the device keeps, which is more than may run ahead of the host


class DecodeState:
    """Every buffer that a step reads or writes, allocated once.

    A row has S = ctx + N + 1 slots at most. Its last one takes every write past the end, so it never holds anything. The
    slots of all rows are places of one cache, the pool: those of row b are `spans[b]`, (the first place, how many).
    """

    def __init__(
        self, model: Transformer, drafter: Drafter, batch_size: int, ctx: int, history: bool = False,
        kv_dtype: torch.dtype | None = None, pool: int | None = None,
    ):  # fmt: skip
        """history: keep the features of the last HISTORY tokens, for a drafter that plain steps may replace.
        pool: tokens that the cache has room for, of all rows together (default: ctx for each)."""
        B = batch_size
        D = drafter.D
        V = model.config.vocab_size
        F = drafter.feature_size
        self.slots = ctx + drafter.N + 1
        self.places = pool_places(B, ctx, drafter.N, pool)
        self.scarce = self.places < B * self.slots  # whether not all rows can have a whole context at once
        self.kv = model.new_cache(1, self.places + self.scarce, kv_dtype)
        with torch.device(model.device):
            self.segments = torch.zeros(B, 2, dtype=torch.int64)  # `spans`, as `Nodes` has them
            self.tokens = torch.zeros(B, self.slots, dtype=torch.int64)
            self.n = torch.ones(B, dtype=torch.int64)  # tokens in the cache, which is the root's position; n >= count
            self.root = torch.zeros(B, dtype=torch.int64)
            self.count = torch.ones(B, dtype=torch.int64)  # valid rows of features
            self.features = torch.zeros(B, D + 1, F, dtype=model.dtype)
            # the feature of position p lies in row p mod HISTORY; one more row takes what nobody reads
            self.history = torch.zeros(B, HISTORY + 1 if history else 0, F, dtype=model.dtype)
            self.done = torch.ones(B, dtype=torch.bool)
            self.produced = torch.zeros(B, dtype=torch.int64)
            self.limit = torch.zeros(B, dtype=torch.int64)
            self.stop_ids = torch.full((B, MAX_STOP_IDS), -1)
            self.seen = torch.zeros(B, V, dtype=torch.bool)
            self.counts = torch.zeros(B, V, dtype=torch.int32)
            self.ring = torch.zeros(RING, B, 2 + 2 * (D + 1), dtype=torch.int64)  # what the host reads
            self.step = torch.zeros(1, dtype=torch.int64)  # number of steps of this request
            self.hashes = sampling.hash_ids(torch.arange(V))
            # bits of the tokens that a grammar allows after each node (`sampling.restrict`)
            self.allowed = torch.full((B, drafter.N, -(-V // 32)), -1, dtype=torch.int32)
        memory = model.new_memory(B, drafter.N, D)
        self.memory = memory and memory._replace(frozen=self.done)  # of recurrent layers
        self.window = model.config.delta.kernel - 1 if memory else 0
        self.sampling = SamplingState(B, model.device)
        self.lay_out()

    @property
    def nowhere(self) -> tuple[int, int]:
        """The span of a row that has none: one place behind all others, which nobody reads."""
        return self.places, 1

    def lay_out(self) -> None:
        """Give as many rows as possible a whole context, and the others none. The cache then holds no text."""
        first = range(0, self.places - self.slots + 1, self.slots)
        self.spans = [(at, self.slots) for at in first] + [self.nowhere] * (len(self.segments) - len(first))
        self.n.fill_(1)
        self.count.fill_(1)
        self.write_spans()

    def write_spans(self) -> None:
        """Let the steps from now on use the present `spans`."""
        self.segments.copy_(torch.tensor([(first, size - 1) for first, size in self.spans]))

    def first(self, rows: int) -> DecodeState:
        """The buffers of the first rows alone, as views."""
        view = copy.copy(self)
        view.ring = self.ring.narrow(1, 0, rows)
        view.sampling = self.sampling.part(0, rows)
        vars(view).update({name: vars(self)[name].narrow(0, 0, rows) for name in PER_ROW})
        view.memory = self.memory and Memory(*(t.narrow(0, 0, rows) for t in self.memory))
        return view

    def swap(self, a: int, b: int) -> None:
        """Exchange what two rows hold. Of the cache they exchange their places, which copies nothing. No host sync."""
        both, swapped = [a, b], [b, a]
        remembered = (self.memory.memory, self.memory.path, self.memory.pending) if self.memory else ()
        for buffer in (*(vars(self)[name] for name in PER_ROW), *vars(self.sampling).values(), *remembered):
            buffer[both] = buffer[swapped]
        self.spans[a], self.spans[b] = self.spans[b], self.spans[a]

    def buffers(self) -> list[Tensor]:
        """Every tensor of the state."""
        held = *vars(self).values(), *self.kv, *vars(self.sampling).values(), *(self.memory or ())
        return list({id(t): t for t in held if isinstance(t, Tensor)}.values())


def pool_places(rows: int, ctx: int, nodes: int, tokens: int | None) -> int:
    """Places of a pool for so many tokens, or for a whole context in each row. A row needs some more than its tokens, for
    a tree of so many nodes and for one trash row. ValueError if not even one context has room, or more than all rows."""
    tokens = rows * ctx if tokens is None else tokens
    if not ctx <= tokens <= rows * ctx:
        raise ValueError(f"pool is {tokens} tokens; allowed: {ctx} (one context) to {rows * ctx} (one for each slot).")
    return tokens + rows * (nodes + 1)


class StepOutput(NamedTuple):
    """The tokens that a step emitted, as tensors on the device."""

    emitted: Tensor  # [B, D + 1] ids
    count: Tensor  # [B] how many of them; 0 for a sequence that had finished
    finite: Tensor  # [B, D + 1] bool: the logits behind each emitted token were usable
    path: Tensor  # [B, D + 1] accepted nodes, root first
    draft: Draft
    logprobs: Logprobs | None = None  # of the emitted tokens, if the mode asks for them


def draft_input(
    state: DecodeState, mode: SamplingMode, noise: Tensor | None = None, parts: StepParts = UNCOMPILED
) -> DraftInput:
    """What a drafter sees of the state. noise [B, D + 1, V] is the target's, None for greedy decoding."""
    buffers = (state.tokens, state.n, state.root, state.features, state.count, noise, state.hashes)
    bias = None
    if mode.bias:  # of the tokens after the root
        nothing = torch.zeros_like(state.seen, dtype=torch.float32).unsqueeze(1)
        bias = sampling.add_bias(nothing, state.n.unsqueeze(1) + 1, state.sampling)
    more = state.kv, state.segments, state.produced
    return DraftInput(*buffers, state.sampling, mode, state.seen, state.counts, parts, bias, *more)


def unmarked(phase: str) -> None:
    """The `Mark` of a step that nobody times."""


class Observer:
    """Watches the steps of an engine (`Engine.add_observer`). A subclass overrides what it needs."""

    marks: bool = False  # whether `mark` wants to be called

    def mark(self, phase: str) -> None:
        """Called inside a step, as a `Mark`."""

    def step(self, output: StepOutput, results: Sequence[Any]) -> None:
        """Called after the host has read a step, with the tensors of that step.

        results: of the requests that had the rows, None for a row without one. The step is not part of them yet.
        """


def marker(observers: Sequence[Observer]) -> Mark:
    """Tells those of the observers that want to know it where a step is."""
    marking = [observer for observer in observers if observer.marks]

    def mark(phase: str) -> None:
        for observer in marking:
            observer.mark(phase)

    return mark if marking else unmarked


def decode_step(
    model: Transformer, drafter: Drafter, state: DecodeState, mode: SamplingMode, mark: Mark = unmarked,
    parts: StepParts = UNCOMPILED,
) -> StepOutput:  # fmt: skip
    """One step for all sequences: fixed shapes, in place on `state`, no host sync. parts: faster functions to use."""
    return verify_phase(model, draft_phase(drafter, state, mode, mark, parts), drafter, state, mode, mark, parts)


def draft_phase(
    drafter: Drafter, state: DecodeState, mode: SamplingMode, mark: Mark, parts: StepParts
) -> tuple[Draft, Tensor | None]:
    """The first half of a step: the drafted tree, and the target's noise [B, D + 1, V], None for greedy decoding.

    A pruned tree is rarely D deep. Its noise is made afterwards, only for the depth that it has.
    """
    mark("start")

    def noise(rows: int) -> Tensor:
        return sampling.noise_ahead(state.sampling.seed, state.n, rows, state.hashes)

    pruned = mode.sample and drafter.prunes(mode)
    ahead = noise(drafter.D + 1) if mode.sample and not pruned else None
    draft = drafter.draft(draft_input(state, mode, ahead, parts))
    if pruned:
        ahead = noise(int(draft.depth.max()) + 1)
    mark("draft")
    return draft, ahead


def verify_phase(
    model: Transformer, drafted: tuple[Draft, Tensor | None], drafter: Drafter, state: DecodeState, mode: SamplingMode,
    mark: Mark, parts: StepParts,
) -> StepOutput:  # fmt: skip
    """The second half: run the target on the tree, accept and commit."""
    draft, noise = drafted
    nodes = model.nodes(state.n, draft.depth, draft.ancestors, state.slots, state.segments)
    hidden_states, taps = model(draft.tokens, nodes, state.kv, drafter.taps, parts.layers, state.memory)
    logits = model.logits(hidden_states)
    mark("verify")
    features = hidden_states if taps is None else taps
    out = accept_and_commit(drafter, draft, logits, features, noise, state, mode)
    mark("accept")
    return out


def accept_and_commit(
    drafter: Drafter, draft: Draft, logits: Tensor, features: Tensor, noise: Tensor | None, state: DecodeState,
    mode: SamplingMode,
) -> StepOutput:  # fmt: skip
    """Decide which nodes are accepted and write them into the state.

    logits [B, N, V] and features [B, N, F] belong to the nodes of the tree. noise [B, D + 1, V] is the target's.
    """
    raw_logits = logits
    if mode.grammar:
        logits = sampling.restrict(logits, state.allowed.narrow(1, 0, logits.shape[1]))
    if mode.bias:
        logits = sampling.add_bias(logits, state.n.unsqueeze(1) + draft.depth + 1, state.sampling)
    if mode.penalties:
        below_root = draft.ancestors.clone()
        below_root[:, :, 0] = False
        paths = draft.tokens[:, None].expand_as(below_root)
        logits = sampling.apply_penalties(logits, state.seen, state.counts, paths, below_root, state.sampling)
    if drafter.multi_round:
        accepted, usable = _accept_multi_round(drafter, draft, logits, state, mode), sampling.finite(raw_logits)
    else:
        choice, usable = sampling.choose_and_check(logits, noise, state.sampling, mode, draft.depth)
        if mode.grammar or mode.penalties or mode.bias:  # they make -inf of logits that are usable
            usable = sampling.finite(raw_logits)
        drafter.observe(draft, choice, state.n)
        accepted = accept(draft.tokens, draft.parent, draft.depth, draft.ancestors, draft.valid, choice, drafter.D)
    output = _commit(draft, accepted, features, usable, state, mode)
    if not mode.logprobs:
        return output
    after = raw_logits.gather(1, accepted.path[..., None].expand(-1, -1, logits.shape[-1]))
    return output._replace(logprobs=sampling.logprobs_of(after, accepted.emitted))


def _accept_multi_round(
    drafter: Drafter, draft: Draft, logits: Tensor, state: DecodeState, mode: SamplingMode
) -> Accepted:
    """The paper's Algorithm 1. Drafting (1), acceptance (2) and the bonus (3) have noise streams of their own."""
    n = state.n
    seed = state.sampling.seed
    p = sampling.probabilities(logits, state.sampling, mode)
    node = torch.arange(draft.tokens.shape[1], device=n.device)
    u = sampling.uniform_noise(sampling.stream(seed, 2), n[:, None], node)[:, 0]
    ids = torch.arange(p.shape[-1], device=n.device)
    noise = sampling.gumbel_noise(sampling.stream(seed, 3), n[:, None], ids)[:, 0]
    return multi_round(draft.tokens, drafter.tree, p, draft.q, u, noise, drafter.multi_round == "with")


def _commit(
    draft: Draft, accepted: Accepted, features: Tensor, usable: Tensor, state: DecodeState, mode: SamplingMode
) -> StepOutput:
    """Move the accepted path's cache rows, append its tokens, apply stop ids and the limit, and fill a ring row."""
    buffers = StepBuffers(*(getattr(state, name) for name in StepBuffers._fields))
    count, finite, source, target = _write(accepted, usable, features.contiguous(), buffers)
    if accepted.path.shape[1] > 1:
        for kv in state.kv:
            kernels.commit_kv(kv, source, target)
    if state.memory is not None:
        commit_memory(state.memory, accepted.path, count, state.window)
    if mode.penalties:
        new = torch.arange(target.shape[1], device=count.device) < count[:, None]
        state.counts.scatter_add_(1, accepted.emitted, new.int())
        state.seen.copy_(state.seen | (state.counts > 0))
    return StepOutput(accepted.emitted, count, finite, accepted.path, draft)


@kernels.operation(
    "commit", "commit", kernels.commit.commit, kernels.commit.commit_shapes, mutates=("buffers",), at=(2,),
    cpu=lambda *args: torch.ops.eaglet_cpu.commit.default(*args),
)  # fmt: skip
def _write(
    accepted: Accepted, usable: Tensor, features: Tensor, buffers: StepBuffers
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Write everything but the KV cache. Returns the new tokens' count [B], whether their logits were usable, and the
    places in the cache that their rows move from and to, each [B, P].

    usable bool [B, N] and features [B, N, F] belong to the nodes of the tree.
    """
    path, emitted = accepted.path, accepted.emitted
    tokens, n, done = buffers.tokens, buffers.n, buffers.done
    trash = tokens.shape[1] - 1
    level = torch.arange(path.shape[1], device=n.device)
    live = ~done
    count = accepted.count * live
    new = level < count[:, None]
    first, behind = buffers.segments.split(1, 1)
    source = first + (n[:, None] + path).minimum(behind)
    target = torch.where(new, first + n[:, None] + level, source)
    tokens.scatter_(1, torch.where(new, n[:, None] + 1 + level, trash), emitted)
    rows = features.gather(1, path[..., None].expand(-1, -1, features.shape[-1]))
    buffers.features.copy_(torch.where(live[:, None, None], rows, buffers.features))
    if buffers.history.shape[1]:
        row = torch.where(new, (n[:, None] + level) % HISTORY, HISTORY)
        buffers.history.scatter_(1, row[..., None].expand_as(rows), rows)
    buffers.root.copy_(torch.where(live, accepted.bonus, buffers.root))
    n.add_(count)  # before the count, so that n >= count wherever an interrupt falls
    buffers.count.copy_(torch.where(live, count, buffers.count))
    buffers.produced.add_(count)
    stopped = ((emitted[..., None] == buffers.stop_ids[:, None]).any(-1) & new).any(-1)
    done.copy_(done | stopped | (buffers.produced >= buffers.limit))
    finite = usable.gather(1, path) | ~new
    pairs = torch.stack((emitted, finite.long()), -1).flatten(1)
    row = torch.cat((count[:, None], done[:, None].long(), pairs), 1)
    buffers.ring.narrow(2, 0, row.shape[1]).index_copy_(0, buffers.step % RING, row[None])
    buffers.step.add_(1)
    return count, finite, source, target
