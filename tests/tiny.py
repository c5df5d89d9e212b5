"""Tiny random targets, heads, drafters and a tokenizer, shared by the tests of decoding."""

from __future__ import annotations

import codecs
import importlib.util

import pytest
import torch
from torch import Tensor, nn

import tree as trees
from drafters.base import Draft
from eagle_draft import EagleDrafter, EagleHead
from engine import Engine
from model import Transformer
from model_config import ModelConfig, RopeConfig
from weights.heads import EagleConfig

V, CTX = 97, 160
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
# Five children at the root, uneven below: a small tree of the Medusa lists' kind.
MEDUSA = trees.StaticTree(
    tuple(tuple(map(int, word)) for word in "0 1 2 3 4 00 01 02 10 11 20 30 000 001 010 100 0000".split())
)
TREES = {
    "paper25": trees.PAPER25,
    "chain4": trees.chain(4),
    "medusa": MEDUSA,
    "dynamic": trees.DynamicTree(16, 4, 4),
    "root": trees.root_only(),
}
PROMPT = [1, 5, 9, 22, 7, 3] * 3
DRAFT_VOCAB = torch.tensor(sorted({(i * 37 + 11) % V for i in range(60)}))  # 60 of 97 ids, unevenly spaced


def geometry(layers: int = 2, vocab: int = V, **changes) -> ModelConfig:
    shape = dict(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8
    )
    return ModelConfig(
        "llama", num_hidden_layers=layers, vocab_size=vocab, max_position_embeddings=CTX, **(shape | changes)
    )


def randomise(module: nn.Module, seed: int, std: float = 0.25) -> None:
    """Random weights; norms and biases too, so that none is inert."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(noise * std if parameter.dim() > 1 else 1 + 0.1 * noise)
    module.requires_grad_(False).eval()


def tiny_model(dtype: torch.dtype = torch.float64, seed: int = 0, **changes) -> Transformer:
    model = Transformer(geometry(**changes)).to(dtype)
    randomise(model, seed)
    model.rotary.build("cpu", CTX)
    return model


def tiny_head(
    target: Transformer,
    version: int = 1,
    vocab: Tensor | None = None,
    seed: int = 1,
    cls=EagleHead,
    **changes,
) -> EagleHead:
    """`vocab`: absolute target ids the head can draft. `changes`: fields of EagleConfig, or of the layer's geometry."""
    flags = {k: changes.pop(k) for k in list(changes) if k in EagleConfig.__dataclass_fields__}
    drafted = target.config.vocab_size if vocab is None or version == 1 else len(vocab)
    layer = geometry(1, drafted, rope=RopeConfig(theta=500.0), **changes)
    defaults = dict(taps=(0, 1, 2) if version == 3 else (), fc_bias=version == 1, has_lm_head=version == 3)
    config = EagleConfig(version, layer, target.config.hidden_size, **(defaults | flags))
    head = cls(config, target, draft_vocab=vocab).to(target.dtype)
    randomise(head, seed)
    head.rotary.build("cpu", CTX)
    head.trim()
    return head


def heads(target: Transformer) -> dict[str, EagleHead]:
    """The four kinds that drafting must tell apart."""
    return {
        "eagle1": tiny_head(target),
        "eagle1-trimmed": tiny_head(target, vocab=DRAFT_VOCAB),
        "eagle3": tiny_head(target, 3, DRAFT_VOCAB),
        "eagle3-full": tiny_head(target, 3),
    }


def tables(tree, batch_size: int = 1):
    """`tree`: one tree (for every sequence) or a list, one per sequence; dynamic trees stay as they are."""
    if isinstance(tree, trees.DynamicTree):
        return tree
    return trees.tree_tables(tree if isinstance(tree, list) else [tree] * batch_size)


def eagle_engine(
    head: EagleHead, tree, batch_size: int = 1, tokenizer=None, compile=False, **options
) -> Engine:
    built = tables(tree, batch_size)
    drafter = EagleDrafter(head, built, batch_size, CTX + built.N + 1, **options)
    return Engine(head.target, tokenizer, drafter, batch_size, compile=compile)


class ScriptedDrafter:
    """Drafts the known continuation. `truth[b][p]` is the token at position p; node i at depth d gets
    `truth[n + d] + shift + rank`: shift 0 makes rank 0 right (an oracle), shift 1 everything wrong (hostile)."""

    multi_round, taps, feature_size = "", (), 32

    def __init__(self, tree, truth: list[list[int]], shift: int = 0, vocab: int = V):
        self.tree, self.shift, self.vocab = tables(tree, len(truth)), shift, vocab
        self.N, self.D = self.tree.N, self.tree.D
        self.truth = torch.tensor([row + [0] * (CTX + 40 - len(row)) for row in truth])

    def prefill(self, row, tokens, features, start) -> None:
        pass

    def shape(self, request):
        t = self.tree
        return t.parent, t.depth, t.ancestors, t.valid, t.rank

    def draft(self, request) -> Draft:
        parent, depth, ancestors, valid, rank = self.shape(request)
        right = self.truth.gather(1, (request.n[:, None] + depth).clamp(max=self.truth.shape[1] - 1))
        tokens = (right + self.shift + rank) % self.vocab
        tokens[:, 0] = request.root
        return Draft(tokens, parent, depth, ancestors, valid, torch.zeros(tokens.shape))


class PieceTokenizer:
    """Token id -> bytes; decodes incrementally, so characters may span tokens."""

    def __init__(self, pieces: list[bytes], eos_ids: tuple[int, ...] = ()):
        self.pieces, self.eos_ids = pieces, eos_ids

    def stream(self, continuation: bool = False):
        return PieceStream(self.pieces)

    def decode(self, ids) -> str:
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", "replace")


class PieceStream:
    def __init__(self, pieces: list[bytes]):
        self.pieces, self.decoder = pieces, codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids) -> str:
        return "".join(self.decoder.decode(self.pieces[i]) for i in ids)

    def flush(self) -> str:
        return self.decoder.decode(b"", True)
