"""The assistant that Google publishes beside Gemma 4: a small model without keys and values of its own.

It reads those of the target, of the last layer with a window and the last one without. Beside an embedding it gets the
target's hidden state of the token before, or from the second token on its own output. So a whole tree is drafted from the
root's position, and a node knows of the nodes above it only what their outputs carry.
"""

import torch
from torch import Tensor, nn

from decoding.drafter import DraftInput, take_rows
from drafters.heads import DraftHead, HeadDrafter
from drafters.trees import FedRows
from kernels.records import Nodes
from layers.build import build_transformer
from model import Transformer
from support.machine import zeros
from weights.assistant import AssistantConfig


class AssistantHead(DraftHead):
    """The assistant, bound to a target, whose embedding it shares."""

    draft_ids = None  # it drafts any token

    def __init__(self, config: AssistantConfig, target: Transformer, _draft_vocab: Tensor | None = None):
        super().__init__()
        self.config = config
        c, H = config.layer, config.target_hidden_size
        self.model = build_transformer(c)
        self.model.embed_tokens = None
        self.model.kv_places = dict(enumerate(config.places))
        self.rotary = self.model.rotary
        self.before = nn.Linear(2 * H, c.hidden_size, bias=False)  # of an embedding beside a hidden state
        self.behind = nn.Linear(c.hidden_size, H, bias=False)
        self.centroids = nn.Linear(c.hidden_size, config.clusters, bias=False) if config.clusters else None
        self.register_buffer("cluster", torch.empty(c.vocab_size, dtype=torch.int64) if config.clusters else None)
        object.__setattr__(self, "target", target)  # it does not own it

    @property
    def vocab_size(self) -> int:
        """Number of tokens that it can draft at one place."""
        vocab, clusters = self.config.layer.vocab_size, self.config.clusters
        return vocab // clusters * self.config.active if clusters else vocab

    @property
    def lm_head(self) -> nn.Module:
        return self.model.lm_head

    def new_cache(self, batch_size: int, slots: int) -> tuple[Tensor]:
        """A cache [2, B, 1, S, 0] that holds nothing."""
        return (zeros((2, batch_size, 1, slots, 0), self.target.dtype, self.target.device),)

    def forward(self, tokens: Tensor, features: Tensor, nodes: Nodes, kv_cache: tuple[Tensor, ...]) -> Tensor:
        """tokens [B, T] beside features [B, T, H] of the target, or as `behind` gives them -> what `narrow_logits`
        [B, T, size]. kv_cache: the target's."""
        x = self.before(torch.cat((self.target.embed(tokens), features), -1))
        return self.model.run_layers(x, nodes, kv_cache, ())[0]

    def narrow_logits(self, output: Tensor) -> Tensor:
        """output [..., size] -> logits [..., V]. Where tokens have clusters, only those of the best ones are drafted: the
        others were not trained."""
        logits = self.lm_head(output)
        if self.centroids is None:
            return logits
        scores = self.centroids(output)
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        chosen.scatter_(-1, scores.topk(self.config.active, -1).indices, True)
        return logits.masked_fill(~chosen[..., self.cluster], float("-inf"))


class AssistantDrafter(HeadDrafter):
    """Drafts trees with an `AssistantHead`."""

    places_levels = False

    def prefill(self, row: int, tokens: Tensor, features: Tensor, start: Tensor, keep: Tensor) -> None:
        """The target's keys and values are all it needs of a prompt."""

    def _extend(self, inputs: DraftInput) -> Tensor:
        return self._read(inputs, inputs.root[:, None], take_rows(inputs.features, (inputs.count - 1)[:, None]))

    def _level(self, inputs: DraftInput, depth: int, fed: FedRows) -> Tensor:
        return self._read(inputs, fed.tokens, self.head.behind(take_rows(fed.features, fed.source)))

    def _read(self, inputs: DraftInput, tokens: Tensor, features: Tensor) -> Tensor:
        """`AssistantHead.forward` at the root's position. The rows see the text before the root, and no node."""
        positions = inputs.n[:, None].expand(tokens.shape)
        cos, sin = self.head.rotary(positions)
        last = torch.ones(*tokens.shape, 1, dtype=torch.bool, device=tokens.device)  # the row before the root's
        nodes = Nodes(cos, sin, positions, positions, inputs.n - 1, last, last, inputs.segments, self.target_slots)
        return self.head(tokens, features, nodes, inputs.kv)
