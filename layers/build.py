"""The parts of a model, chosen by its facts (`families.config.ModelConfig`). No other place chooses."""

import torch.nn as nn

from families.config import ModelConfig
from layers.attention import GatedAttention, GrowingAttention, LateNormAttention, ShapedAttention, WideNormAttention
from layers.blocks import NormedBlock, ScaledBlock
from layers.experts import BiasedExperts, SharedExperts, SigmoidExperts
from layers.gemma4 import Beside, Gemma4Block, Gemma4Transformer, SharingAttention
from layers.recurrent import DeltaNet, RecurrentTransformer
from model import MLP, Attention, Block, Experts, Transformer


def build_transformer(config: ModelConfig) -> Transformer:
    """A model with its weights undefined. Raises ValueError for facts that no model has together."""
    if config.recurrent or config.mtp:
        return RecurrentTransformer(config, build_block)
    return (Gemma4Transformer if config.value_norm else Transformer)(config, build_block)


def build_block(config: ModelConfig, layer: int = 0) -> Block:
    """One layer of a model."""
    attention = DeltaNet(config) if layer in config.recurrent else build_attention(config, layer)
    parts = attention, build_mlp(config, layer)
    if config.layer_scale:
        return Gemma4Block(config, *parts, layer)
    if config.norms != "before":
        return NormedBlock(config, *parts)
    return (Block if config.residual_multiplier == 1 else ScaledBlock)(config, *parts)


def build_attention(config: ModelConfig, layer: int = 0, in_size: int | None = None) -> Attention:
    """The attention of one layer. in_size: as of `Attention`."""
    kinds: dict[type[Attention], object] = {
        ShapedAttention: config.attention_cap or config.sinks,
        GatedAttention: config.output_gate,
        WideNormAttention: config.wide_qk_norm,
        LateNormAttention: config.late_qk_norm,
        GrowingAttention: config.rope.query_growth,
        SharingAttention: config.value_norm,
    }
    found = [kind for kind, wanted in kinds.items() if wanted]
    if found[1:]:
        names = " and ".join(kind.__name__ for kind in found)
        raise ValueError(f"config.json: attention that is both {names} is not supported.")
    return (found or [Attention])[0](config, layer, in_size)


def build_mlp(config: ModelConfig, layer: int) -> nn.Module:
    """The MLP or the experts of one layer."""
    if config.num_local_experts and layer >= config.dense_layers:
        if config.mlp_beside:
            return Beside(config)
        if config.sigmoid_router:
            return SigmoidExperts(config)
        if config.expert_bias:
            return BiasedExperts(config)
        return (SharedExperts if config.shared_intermediate_size else Experts)(config)
    wide = config.wide_shared and config.source(layer) != layer
    size = config.dense_size if config.dense_layers else config.intermediate_size * (1 + wide)
    return MLP(config.hidden_size, size, config.mlp_bias, config.activation)
