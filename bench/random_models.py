"""TODO."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import kernels
from eagle_draft import EagleHead
from engine import Engine
from load import LoadOptions
from model import DTYPES, ModelConfig, RopeConfig, Transformer
from weights.heads import EagleConfig
from weights.hf import build_model
from weights.quantized import QuantSpec, pack_
from weights.rounding import quantize_


def _llama(
    hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int = 32000, **more
) -> ModelConfig:
    family = "mixtral" if "num_local_experts" in more else "llama"
    base = dict(max_position_embeddings=4096, dtype="bfloat16", rms_norm_eps=1e-5)
    return ModelConfig(
        family, hidden, inner, layers, heads, kv, 64 if hidden < 2048 else 128, vocab, **(base | more)
    )


SHAPES: dict[str, ModelConfig] = {
    "tiny": _llama(64, 96, 2, 4, 2, 256, max_position_embeddings=512),
    "llama-100m": _llama(768, 2048, 12, 12, 12, tie_word_embeddings=True),
    "llama-2-7b": _llama(4096, 11008, 32, 32, 32),
    "llama-2-13b": _llama(5120, 13824, 40, 40, 40),
    "llama-2-70b": _llama(8192, 28672, 80, 64, 8),
    "llama-3-8b": _llama(
        4096, 14336, 32, 32, 8, 128256, max_position_embeddings=8192, rope=RopeConfig(theta=5e5)
    ),
    "mixtral-8x7b": _llama(
        4096, 14336, 32, 32, 8, num_local_experts=8, num_experts_per_tok=2, rope=RopeConfig(theta=1e6)
    ),
}


def _fill(module: nn.Module, generator: torch.Generator) -> None:
    for p in module.parameters():
        if p.dim() > 1:
            p.data.normal_(0, 1 / math.sqrt(p.shape[-1]), generator=generator)
        else:
            p.data.fill_(1)


def random_engine(
    name: str, device: str | None, dtype: str | None, quant: str | None, **options: Any
) -> Engine:
    """A model of a known shape with random weights, rounded block by block when `quant` is int8 or int4."""
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    config = SHAPES[name]
    dtype = dtype or ("float32" if target.type == "cpu" else config.dtype)
    model = build_model(config)
    model.to(dtype=DTYPES[dtype])
    generator = torch.Generator(target).manual_seed(0)
    spec = QuantSpec(quant) if quant else None
    for block in model.layers:
        block.to_empty(device=target)
        _fill(block, generator)
        if spec:
            quantize_(block, spec)
    for part in (model.embed_tokens, model.norm, model.lm_head):
        if part is not None:
            part.to_empty(device=target)
            _fill(part, generator)
    model.rotary.build(target, config.max_positions)
    backend = kernels.KernelBackend(options.get("kernels", "auto"), target.type)
    if spec:
        model.quant = quant
    with backend.active():
        pack_(model, DTYPES[dtype])
    engine = Engine(model, None, None, 1, 64, backend=backend)
    engine.options = LoadOptions(checkpoint=name, device=target.type, dtype=dtype, **options)
    return engine


def random_head(model: Transformer, version: int, quant: str | None = None) -> EagleHead:
    """An EAGLE head of the target's own geometry with random weights (EAGLE-3: at most 32,000 draft ids)."""
    c = model.config
    vocab = min(c.vocab_size, 32000) if version == 3 else c.vocab_size
    layer = replace(c, num_hidden_layers=1, vocab_size=vocab, windows=(), num_local_experts=0, qk_norm=False)
    taps = (2, c.num_hidden_layers // 2, c.num_hidden_layers - 3) if c.num_hidden_layers > 5 else (0, 1, 2)
    config = EagleConfig(
        version, layer, c.hidden_size, taps if version == 3 else (), version == 1, has_lm_head=version == 3
    )
    head = EagleHead(config, model).to(device=model.device, dtype=model.dtype).eval().requires_grad_(False)
    _fill(head, torch.Generator(model.device).manual_seed(version))
    if quant:
        quantize_(head, QuantSpec(quant))
    head.rotary.build(model.device, model.rotary.length)
    head.trim()
    return head
