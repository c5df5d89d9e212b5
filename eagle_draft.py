"""The EAGLE head (generations 1, 2 and 3) and its cache. `drafters/trees.py` drafts trees with it.

A head drafts several tokens ahead with one small layer, which reads the feature of token i and the embedding of token
i + 1. EAGLE-1's output estimates the target's next feature. EAGLE-2 has the same weights and another tree. EAGLE-3 reads
three residual states of the target, has its own norms and LM head, and its output need not resemble a feature. One class
serves all of them: `EagleConfig.version` is 1 for EAGLE-1 and -2, and 3 for EAGLE-3.

Row i of the draft cache holds (feature i, token i + 1) at position i; with a window the cache is a ring. Rows below n
are made from the target's true features only. The rows of a tree come after them and are overwritten in the next step.
"""

import math
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import kernels
from decoding.drafter import DraftInput, StepParts, take_rows
from drafters.heads import DraftHead, HeadDrafter
from drafters.trees import FedRows
from layers.build import build_attention
from model import MLP, Block, Nodes, RMSNorm, Transformer, weight_bytes
from support.machine import zeros
from tree import DynamicTree, TreeTables
from weights.heads import EagleConfig


class EagleLayer(nn.Module):
    """The head's decoder layer.

    EAGLE-1's layer has no input norm. In EAGLE-3 the attention reads norm(embedding) and norm(feature) side by side.
    """

    def __init__(self, config: EagleConfig):
        super().__init__()
        geometry = config.layer
        wide = config.version == 3
        self.attention = build_attention(geometry, in_size=geometry.hidden_size * (2 if wide else 1))
        self.post_norm = RMSNorm(geometry.hidden_size, geometry.rms_norm_eps)
        self.mlp = MLP(geometry.hidden_size, geometry.intermediate_size)
        if wide:
            self.input_norm = RMSNorm(geometry.hidden_size, geometry.rms_norm_eps)
            self.hidden_norm = RMSNorm(geometry.hidden_size, geometry.rms_norm_eps)


class EagleHead(DraftHead):
    """A draft head bound to a target, whose embedding (and for EAGLE-1/2 LM head) it shares unless it has its own."""

    def __init__(self, config: EagleConfig, target: Transformer, draft_vocab: Tensor | None = None):
        """draft_vocab int64 [Vd]: absolute target ids of a trimmed vocabulary for EAGLE-1/2 (FR-Spec), sorted."""
        super().__init__()
        self.config = config
        geometry, size, taps = config.layer, config.target_hidden_size, len(config.taps)
        H, eps = geometry.hidden_size, geometry.rms_norm_eps
        width = 2 * H if config.version == 1 else taps * size
        self.fc = nn.Linear(width, H, bias=config.fc_bias)
        self.layer = EagleLayer(config)
        self.norm = RMSNorm(H, eps) if config.version == 3 else None
        self.fc_norms = nn.ModuleList(RMSNorm(size, eps) for _ in range(taps)) if config.fc_norm else None
        self.input_norm = RMSNorm(width, eps) if config.norm_before_fc else None
        self.embed_tokens = nn.Embedding(target.config.vocab_size, H) if config.has_embed else None
        self.lm_head = nn.Linear(H, geometry.vocab_size, bias=False) if config.has_lm_head else None
        if draft_vocab is None and geometry.vocab_size != target.config.vocab_size:
            # not torch.arange: of a head that only has shapes it would import sympy, for a quarter of a second
            draft_vocab = torch.tensor(range(geometry.vocab_size))
        self.bind(target, draft_vocab)

    def new_cache(self, batch_size: int, slots: int) -> tuple[Tensor]:
        """A zeroed draft cache [2, B, Hkv, S, hd]."""
        c, weight = self.config.layer, self.layer.post_norm.weight
        shape = (2, batch_size, c.num_key_value_heads, slots, c.head_dim)
        return (zeros(shape, weight.dtype, weight.device),)

    def embed(self, tokens: Tensor) -> Tensor:
        return (self.embed_tokens or self.target.embed_tokens)(tokens)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [..., feature_size] -> what the layer reads [..., H]. EAGLE-1/2 leaves them unchanged."""
        if self.config.version == 1:
            return features
        if self.fc_norms is not None:
            parts = features.chunk(len(self.fc_norms), -1)
            features = torch.cat([norm(p) for norm, p in zip(self.fc_norms, parts, strict=True)], -1)
        if self.input_norm is not None:
            features = self.input_norm(features)
        return self.fc(features)

    def joined(self, tokens: Tensor, feature: Tensor, source: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(residual, embeddings beside features [B, T, 2H]) for tokens [B, T] and the rows `source` [B, T] of feature.

        EAGLE-3 norms both. EAGLE-1's layer makes its own residual, so what stands in its place here is not read. The
        kernels have no gradients, so training calls `joined_train`.
        """
        embed = self.embed_tokens or self.target.embed_tokens
        if isinstance(embed, nn.Embedding):
            return join_rows(embed.weight, tokens, feature, source, *self._how_joined())
        return join_rows.outside(embed(tokens), None, feature, source, *self._how_joined())  # a quantized one

    def _how_joined(self) -> tuple[Tensor | None, Tensor | None, float, bool]:
        """What `join_rows` takes of the norms."""
        both = self.norms_of_inputs()
        norms = (both[0].weight, both[1].weight, both[0].eps) if both else (None, None, 0.0)
        return *norms, self.config.norm_before_residual

    def norms_of_inputs(self) -> tuple[RMSNorm, RMSNorm] | None:
        """The norms of embeddings and features, if there are any."""
        return (self.layer.input_norm, self.layer.hidden_norm) if self.config.version == 3 else None

    def joined_train(self, tokens: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """`joined` with gradients."""
        return join_rows.reference(self.embed(tokens), None, feature, None, *self._how_joined())

    def layer_inputs(self, residual: Tensor, joined: Tensor) -> tuple[Tensor, Tensor]:
        """(residual, attention input) of the layer."""
        if self.config.version == 3:
            return residual, joined
        x = self.fc(joined)
        return x, x

    def layer_forward(self, residual: Tensor, joined: Tensor, nodes: Nodes, kv: Tensor) -> Tensor:
        residual, x = self.layer_inputs(residual, joined)
        x = self.layer.attention(x, nodes, kv, residual)
        return self.layer.mlp(self.layer.post_norm(x), x)

    def forward(self, fed: FedRows, kv: Tensor, layer: Callable | None = None) -> Tensor:
        """Tokens paired with features (fused, or the head's own output) -> output [B, T, H].

        kv [2, B, Hkv, S, hd] is written at the slots of the nodes. The output is what `predict` and the next level read.
        layer is a compiled `EagleHead.layer_forward`, or None for the method itself.
        """
        joined = self.joined(fed.tokens, fed.features, fed.source)
        out = (layer or type(self).layer_forward)(self, *joined, fed.nodes, kv)
        return self.norm(out) if self.config.norm_output else out

    def absorb(self, tokens: Tensor, features: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv: Tensor) -> None:
        """Write the keys and values of tokens [B, T], each beside the target's features [B, T, F], into slots [B, T] of
        kv. Nothing else of a known token is needed."""
        _, x = self.layer_inputs(*self.joined(tokens, self.fuse(features)))
        self.layer.attention.write(x, cos, sin, slots, kv)

    def predict(self, output: Tensor) -> Tensor:
        """output [..., H] -> draft logits [..., Vd], float32 (float64 stays)."""
        logits = self.narrow_logits(output)
        return logits if logits.dtype == torch.float64 else logits.float()

    def normed(self, output: Tensor) -> Tensor:
        return output if self.config.version == 1 or self.config.norm_output else self.norm(output)

    def forward_train(self, tokens: Tensor, feature: Tensor, shift: int = 0, memory: list | None = None) -> Tensor:
        """Whole sequences with gradients: tokens [B, T] paired with feature [B, T, H] -> output [B, T, H].

        `memory` collects the keys and values of every step of EAGLE-3's training-time test. Step s attends step 0
        causally, within the layer's window, and only its own row of steps 1 to s. Rotary positions are row + s.
        """
        residual, x = self.layer_inputs(*self.joined_train(tokens, feature))
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None] + shift
        cos, sin = self.rotary(positions)
        if memory is None:
            attended = self.layer.attention.forward_train(x, cos, sin)
        else:
            attended = self._attend_own_rows(x, cos, sin, memory)
        x = residual + attended
        out = self.layer.mlp(self.layer.post_norm(x), x)
        return self.norm(out) if self.config.norm_output else out

    def _attend_own_rows(self, x: Tensor, cos: Tensor, sin: Tensor, memory: list) -> Tensor:
        attention = self.layer.attention
        q, k, v = attention.project(x, cos, sin)
        group = attention.heads // attention.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        memory.append((k, v))
        T, scale = x.shape[1], attention.scale
        seen = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        if attention.window:  # a row of step s stands s positions after that of step 0
            seen = seen.triu(len(memory) - attention.window)
        scores = [(q @ memory[0][0].mT * scale).masked_fill(~seen, -math.inf)]
        scores += [(q * own).sum(-1, keepdim=True) * scale for own, _ in memory[1:]]
        weights = torch.cat(scores, -1).softmax(-1)
        out = weights[..., :T] @ memory[0][1]
        for s, (_, own) in enumerate(memory[1:]):
            out = out + weights[..., T + s : T + s + 1] * own
        return attention.o(out.transpose(1, 2).flatten(2))


class MtpHead(EagleHead):
    """The target's own layer for multi-token prediction, applied to its own outputs to draft further ahead.

    That is EAGLE-1 with norms: of the embedding and of the feature, before the layer and behind it. The feature is the
    target's hidden state behind its final norm, and then this head's own output behind its norm.
    """

    def __init__(self, config: EagleConfig, target: Transformer, draft_vocab: Tensor | None = None):
        nn.Module.__init__(self)
        self.config = config
        self.embed_tokens = self.lm_head = None
        self.bind(target, draft_vocab)

    @property
    def layer(self) -> Block:
        """The target's module, which is no part of this one."""
        return self.target.mtp.layer

    @property
    def norm(self) -> RMSNorm:
        return self.target.mtp.norm

    def bytes_read(self) -> float:
        return super().bytes_read() + weight_bytes(self.target.mtp)

    def norms_of_inputs(self) -> tuple[RMSNorm, RMSNorm]:
        return self.target.mtp.embed_norm, self.target.mtp.feature_norm

    def layer_inputs(self, _residual: Tensor, joined: Tensor) -> tuple[Tensor, Tensor]:
        x = self.target.mtp.fc(joined)
        return x, self.layer.input_norm(x)

    def layer_forward(self, _residual: Tensor, joined: Tensor, nodes: Nodes, kv: Tensor) -> Tensor:
        return self.layer(self.target.mtp.fc(joined), nodes, kv)

    def forward_train(self, tokens: Tensor, feature: Tensor, shift: int = 0, memory: list | None = None) -> Tensor:
        x = self.target.mtp.fc(self.joined_train(tokens, feature)[1])
        cos, sin = self.rotary(torch.arange(tokens.shape[1], device=tokens.device)[None] + shift)
        return self.norm(self.layer.forward_train(x, cos, sin))


def _join_cpu(table, tokens, feature, source, *norms) -> tuple[Tensor, Tensor]:
    embedding = table if tokens is None else F.embedding(tokens, table)
    source = None if source is None else source.contiguous()
    return torch.ops.eaglet_cpu.join_rows.default(embedding.contiguous(), feature.contiguous(), source, *norms)


@kernels.operation(
    "join_rows", "draft_tree", kernels.draft.join_rows, kernels.draft.join_shapes, cpu=_join_cpu,
    cpu_problem=lambda table, tokens, feature, *rest: None if feature.shape[-1] % 8 else "", at=(2,), copies=True,
)  # fmt: skip
def join_rows(
    table: Tensor, tokens: Tensor | None, feature: Tensor, source: Tensor | None, table_norm: Tensor | None,
    feature_norm: Tensor | None, eps: float, keep_normed: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`kernels.draft.join_rows`. Without tokens, which only plain code and C++ can do, table is the embeddings."""
    embedding = table if tokens is None else F.embedding(tokens, table)
    feature = feature if source is None else take_rows(feature, source)
    if table_norm is None:
        return feature[:, :0], torch.cat((embedding, feature), -1)
    normed = kernels.rms_norm(feature, feature_norm, eps)
    joined = torch.cat((kernels.rms_norm(embedding, table_norm, eps), normed), -1)
    return normed if keep_normed else feature, joined


class EagleDrafter(HeadDrafter):
    """Drafts trees with an EAGLE head."""

    def top(self, output: Tensor, count: int) -> kernels.TopK | None:
        return self.head.top(output, count)

    def fuse(self, features: Tensor) -> Tensor:
        return self.head.fuse(features)

    def _forward(self, fed: FedRows, cache: Tensor, parts: StepParts) -> Tensor:
        return self.head(fed, cache, parts.draft_layer)


class UnshiftedDrafter(EagleDrafter):
    """EAGLE with every feature paired with its own token, the unshifted input of the paper's Figure 8.

    A row then cannot know which token was drawn after its feature, so all siblings have the same children. It drafts
    static trees only and exists for that comparison alone.
    """

    def __init__(self, head: EagleHead, tree: TreeTables, *how, **more):
        if isinstance(tree, DynamicTree):
            raise ValueError("heads with unshifted tokens draft static trees, like --tree paper25 or chain:K.")
        super().__init__(head, tree, *how, **more)
        self.above: Tensor | None = None  # the tokens of the level above

    def prefill(self, row: int, tokens: Tensor, features: Tensor, start: Tensor, keep: Tensor) -> None:
        super().prefill(row, F.pad(tokens[:, :-1], (1, 0)), features, start, keep)

    def _extend(self, inputs: DraftInput) -> Tensor:
        self.above = inputs.root[:, None]
        return super()._extend(inputs._replace(tokens=F.pad(inputs.tokens[:, :-1], (1, 0))))

    def _level(self, inputs: DraftInput, depth: int, fed: FedRows) -> Tensor:
        shown = self.above.gather(1, fed.source)
        self.above = fed.tokens
        return super()._level(inputs, depth, fed._replace(tokens=shown))
