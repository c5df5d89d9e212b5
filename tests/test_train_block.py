"""Training of published block heads: blocks and losses against plain formulas (test_train_drafters.py trains some)."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from block_kit import block_outputs, corrected, layouts, random_tensors, tap_ids, write_layout
from test_block_heads import MODEL, features_of
from tiny import V
from torch.nn.functional import cross_entropy

from training.blocks import TrainBlockHead, draw_anchors, loss_blocks
from training.data import Batch
from training.losses import TargetRows
from weights.block_heads import read_head

LAYOUTS = layouts()
NAMES = [name for name in LAYOUTS if "speculators" not in name]  # the trainer shares the target's LM head
TEXT = 12


def read_into_training(tmp_path, name):
    """(config, published tensors, head in training) of a layout."""
    config = LAYOUTS[name]
    tensors = random_tensors(config)
    file = read_head(write_layout(tmp_path / "head", config, tensors), MODEL.config)
    head = TrainBlockHead(file.config, MODEL, False).double()
    head.load_state_dict(file.tensors)
    head.rotary.build("cpu", 200)
    return config, tensors, head


def inputs_of(config: dict):
    """Tokens [1, T], features of them in the file's order, and in the order of the target's layers [1, T, F]."""
    tokens = torch.from_numpy(np.random.default_rng(5).integers(0, V, (1, TEXT)))
    features, taps = features_of(config, TEXT), tap_ids(config)
    return tokens, features, features[:, sorted(range(len(taps)), key=lambda i: taps[i])].flatten(1)[None]


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_training_are_those_of_the_formulas(tmp_path, name):
    """A block that sees its anchor's feature, or text behind it, another block, or slots through the wrong mask."""
    config, tensors, head = read_into_training(tmp_path, name)
    tokens, features, ordered = inputs_of(config)
    anchors = [1, 5, 9]
    got = head.forward_blocks(tokens, ordered, torch.tensor([anchors]))
    for i, anchor in enumerate(anchors):
        want, _ = block_outputs(config, tensors, features[:anchor], int(tokens[0, anchor]), MODEL)
        torch.testing.assert_close(got[0, i], want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ("dflash", "jetspec", "dspark, vanilla", "dspark, gated", "dspark, rnn", "dflash2"))
def test_losses_are_those_of_the_papers(tmp_path, name):
    """A label, a distribution or a predecessor one place off; half of a distance; slots behind the end of an answer;
    a confidence that is taught to the draft, or a shortlist without the right token."""
    config, tensors, head = read_into_training(tmp_path, name)
    kind = name.partition(",")[0]
    if kind == "dspark":
        head.confidence = torch.nn.Linear(32 + 6, 1).double()
    tokens, features, ordered = inputs_of(config)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, :3] = mask[0, 10:] = False
    states = torch.randn(1, TEXT, 32, generator=torch.Generator().manual_seed(1)).double()
    args = SimpleNamespace(kind=kind, anchor_share=1.0, gamma=4.0, noise_share=0.0)
    generator = torch.Generator().manual_seed(2)
    loss, _ = loss_blocks(head, Batch(tokens, mask), TargetRows(states, ordered), args, 6.0, generator)
    p, total = MODEL.logits(states[0]).softmax(-1).double(), 0.0
    depth, ids = head.config.depth, tokens[0].tolist()
    for a in range(3, 9):  # the token behind the anchor counts, too
        out, z = block_outputs(config, tensors, features[:a], ids[a], MODEL)
        for d in range(1, min(depth, 9 - a) + 1):
            label = torch.tensor(ids[a + d])
            full = corrected(config, tensors, out, z, ids[a : a + d])
            logits, q = (z[d - 1] if kind == "dflash2" else full), p[a + d - 1]
            part = cross_entropy(logits, q if kind == "jetspec" else label)
            if kind in ("dspark", "dflash2"):
                distance = (logits.softmax(-1) - q).abs().sum()
                part = 0.1 * part + 0.9 * distance
            if kind == "dspark":
                e = tensors["markov_head.markov_w1.weight"][ids[a + d - 1]]
                chance = torch.sigmoid(head.confidence(torch.cat((out[d - 1], e))))[0]
                accepted = 1 - distance / 2
                part = part - accepted * chance.log() - (1 - accepted) * (1 - chance).log()
            if kind == "dflash2":
                best = logits.topk(9).indices.tolist()
                best[-1] = best[-1] if ids[a + d] in best else ids[a + d]
                part = part + cross_entropy(full[best], torch.tensor(best.index(ids[a + d])))
            total = total + math.exp(-(d - 1) / 4) * part
    weights = sum(math.exp(-d / 4) for d in range(depth))
    torch.testing.assert_close(loss.double(), (total / (6.0 * weights)).detach(), rtol=1e-5, atol=0, check_dtype=False)


def test_anchors_are_drawn_anew_and_only_where_they_count():
    """A row that is drawn although it does not count, twice, or by the row beside it; always the same ones."""
    keep = torch.rand(3, 40, generator=torch.Generator().manual_seed(0)) < 0.5
    keep[2] = False
    drawn = []
    for seed in (1, 1, 2):
        anchors, counted = draw_anchors(keep, 0.25, torch.Generator().manual_seed(seed))
        for row, chosen, which in zip(keep, anchors, counted, strict=True):
            ids = chosen[which].tolist()
            assert row[ids].all() and ids == sorted(set(ids)) and len(ids) == math.ceil(int(row.sum()) / 4)
        drawn.append(anchors.tolist())
    assert drawn[0] == drawn[1] != drawn[2]
