"""Tensors that travel together, each group as one named object in Python and in C++.

The named tuples below are the only declaration. An operator takes a group as a list of tensors (`flat`), and
`header` writes the C++ structs that give this list the same names.

Shape letters: B batch, N nodes, D depth, P = D + 1 rows of a path, S slots, V vocabulary, F feature size, H hidden size,
T rows of a forward, R rows that these may see, W rows of a draft level.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, get_type_hints

import torch
from torch import Tensor


class Rotary(NamedTuple):
    """The rotary tables of a model. Their last row serves all later positions."""

    cos: Tensor  # [positions, hd / 2] float32
    sin: Tensor  # [positions, hd / 2] float32


class Nodes(NamedTuple):
    """What all layers of one forward share. `Transformer.nodes` builds it once per forward."""

    cos: Tensor  # [B, T, hd / 2] float32, of several rotations side by side
    sin: Tensor  # [B, T, hd / 2] float32
    positions: Tensor  # [B, T] int64
    slots: Tensor  # [B, T] int64: the cache slots that the rows' keys and values are written to
    start: Tensor  # [B] int64: the first slot of the region, the cache rows after the visible history
    visible: Tensor  # [B, T, R] bool: whether row t may see region row r
    visible_window: Tensor  # the same within the sliding window (without a window the same tensor)
    # [B, 2] int64, where sequences share one cache: the first place of each, and the number of places behind it, the last
    # of which takes every write past the end
    segments: Tensor | None = None
    longest: int = 0  # slots of a sequence at most; 0: those of the cache
    chain: bool = False  # whether row t stands at position start + t and sees the rows 0 to t: a part of a text
    # [B, T, 3] int64, where layers have memories and the rows are a tree: see `kernels.depth_first`
    walk: Tensor | None = None
    token_inputs: Tensor | None = None  # [B, T, L size], where layers have embeddings of their own: see `TokenInputs`
    window: int = 0  # what layers see of the history at most: its last positions up to the row's own; 0: no limit
    ring: bool = False  # whether position p lies in slot p mod (S - 1), so that the cache has the last positions alone


class Memory(NamedTuple):
    """What a recurrent layer keeps of B sequences, or with an axis of L behind B, what all of them keep.

    The text of a sequence ends with its path: the rows that were accepted last. `memory` lacks those, so that they can be
    taken back. `kernels.delta` explains rows.
    """

    memory: Tensor  # [B, Hv, dk, dv] float32 or wider
    path: Tensor  # [B, K - 1 + P, R] the K - 1 rows before the path, then the path
    fresh: Tensor  # [B, N, R] the rows of the tree, or behind a part of a text its last K - 1 rows
    pending: Tensor  # [B] int64: rows of the path
    frozen: Tensor  # [B] bool: sequences that have finished, whose memory stays as it is
    keep: Tensor  # [B] int64: rows of a part of a text that count, 0 of a tree

    def layers(self) -> Iterator[Memory]:
        """What each layer keeps, as views."""
        for layer in zip(*(t.unbind(1) for t in self[:3]), strict=True):
            yield Memory(*layer, *self[3:])


class Accepted(NamedTuple):
    """What a step emits: the accepted drafted tokens and then the bonus, the target's own next token."""

    path: Tensor  # [B, D + 1] node ids from the root, padded with the last accepted node
    count: Tensor  # [B] emitted tokens, 1 to D + 1
    bonus: Tensor  # [B] the next root
    emitted: Tensor  # [B, D + 1] accepted tokens, then the bonus, which also pads


class StepBuffers(NamedTuple):
    """The buffers of a `step.DecodeState` that a commit reads or writes. Integers are int64."""

    tokens: Tensor  # [B, S] committed ids
    n: Tensor  # [B] tokens in the cache
    root: Tensor  # [B]
    count: Tensor  # [B] valid rows of features
    produced: Tensor  # [B] tokens emitted so far
    limit: Tensor  # [B] tokens to emit at most; only read
    done: Tensor  # [B] bool
    stop_ids: Tensor  # [B, MAX_STOP_IDS], padded with -1; only read
    ring: Tensor  # [RING, B, 2 + 2 P] what the host reads of the last steps
    features: Tensor  # [B, P, F] of the accepted nodes
    history: Tensor  # [B, HISTORY + 1, F] features by position, or [B, 0, F]: not wanted
    step: Tensor  # [1] number of steps of this request
    segments: Tensor  # [B, 2] as of Nodes; only read


class LinearWeights(NamedTuple):
    """A linear layer for the C++ kernels (`kernels.cpu`). Floats have no scales."""

    codes: Tensor
    scales: Tensor | None
    mins: Tensor | None
    bias: Tensor | None


class LayerWeights(NamedTuple):
    """A decoder layer for the C++ kernels. Norms are float32."""

    input_norm: Tensor | None
    attention_norm: Tensor | None
    post_norm: Tensor | None
    mlp_norm: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: LinearWeights
    o: LinearWeights
    gate_up: LinearWeights
    down: LinearWeights


class HeadWeights(NamedTuple):
    """An EAGLE head for the C++ kernels."""

    layer: LayerWeights
    fc: LinearWeights
    lm_head: LinearWeights
    embedding: LinearWeights  # packed, or codes alone: a float32 table [V, H]
    token_norm: Tensor | None  # [H], of embeddings
    feature_norm: Tensor | None  # [H]
    output_norm: Tensor | None  # [H]
    fc_norms: Tensor | None  # [taps, target's H], of what `fc` reads
    rotary: Rotary
    draft_ids: Tensor | None  # [Vd] the target's ids of a trimmed draft vocabulary
    hashes: Tensor  # [Vd] of these ids, for the noise


class TreeNodes(NamedTuple):
    """The nodes of static trees for the C++ kernels."""

    candidate: Tensor  # [B, N] where a node's token is found among those that all run rows propose
    parent: Tensor  # [B, N]
    depth: Tensor  # [B, N]
    valid: Tensor  # [B, N] bool


class Level(NamedTuple):
    """One draft forward of a batch of static trees. Padding rows have valid False and see only themselves."""

    depth: int  # of all its nodes
    node: Tensor  # [B, W] tree node of each row (0 in padding)
    valid: Tensor  # [B, W] bool
    source: Tensor  # [B, W] its parent's place among the rows of the level above; it takes the parent's feature
    place: Tensor  # [B, W] its token's place among all candidates of the level above, max_children for each row
    visible: Tensor  # [B, W, R] bool over this and all earlier levels' rows (the root's run row is history)


class DraftText(NamedTuple):
    """What a draft starts from: the fields of these names of a `DraftInput` and of its sampling state."""

    tokens: Tensor  # [B, S]
    n: Tensor  # [B]
    root: Tensor  # [B]
    features: Tensor  # [B, P, F]
    count: Tensor  # [B]
    seed: Tensor  # [B]
    temperature: Tensor  # [B] float32
    bias: Tensor  # [B, K] float32, added to the logits of the K tokens that are drafted, or [B, 0]
    produced: Tensor  # [B]


RECORDS = (
    Rotary, Nodes, Memory, Accepted, StepBuffers, LinearWeights, LayerWeights, HeadWeights, TreeNodes, Level, DraftText,
)  # fmt: skip


def flat(record: tuple) -> list[Tensor]:
    """The tensors of a record, and of the records in it, in the order of its C++ struct. None is an empty tensor, and
    numbers are left out."""
    tensors: list[Tensor] = []
    for value in record:
        if isinstance(value, int):
            continue
        tensors += flat(value) if isinstance(value, tuple) else [torch.empty(0) if value is None else value]
    return tensors


def header() -> str:
    """The C++ header that declares every record as a struct of references into a list of tensors."""
    sizes: dict[type, int] = {}
    structs = [_struct(record, sizes) for record in RECORDS]
    head = "// Written by kernels/records.py.\n#pragma once\n#include <torch/csrc/stable/tensor.h>\n"
    return f"{head}namespace eaglet::tensors {{\nusing torch::stable::Tensor;\n{''.join(structs)}}}\n"


def _struct(record: type, sizes: dict[type, int]) -> str:
    """The struct of a record. sizes: the number of tensors of the records before it; its own is added."""
    members, values, at = [], [], 0
    for name, kind in get_type_hints(record).items():
        if kind in (int, bool):
            continue
        inner = sizes.get(kind)
        members.append(f"  const {'Tensor&' if inner is None else kind.__name__} {name};\n")
        values.append(f"{name}({f't[{at}]' if inner is None else f't + {at}'})")
        at += inner or 1
    sizes[record] = at
    name = record.__name__
    constructor = f"  explicit {name}(const Tensor* t) : {', '.join(values)} {{}}\n"
    return f"struct {name} {{\n  static constexpr size_t TENSORS = {at};\n{''.join(members)}{constructor}}};\n"
