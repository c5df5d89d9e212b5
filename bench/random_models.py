"""Models and EAGLE heads of known shapes with random weights.

The time of a step depends on shapes and on the context alone. On random weights it is that of a trained model of the same
shape. What a random head gets accepted means nothing. The weights are made on the device in their final format, so a
model of any size needs no file and little more memory than it keeps.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.engine import Engine, EngineConfig
from engine.load import open_backend, use_threads
from engine.prefill import CHUNKS, WIDE_CHUNKS
from families.config import DTYPES, DeltaConfig, ModelConfig, RopeConfig
from loading.drafting import DraftHead, kinds_of
from loading.options import LoadOptions
from model import Transformer
from support.errors import UsageError
from support.machine import shapes_only
from weights.block_heads import BlockConfig
from weights.heads import EagleConfig, default_taps, layers_like
from weights.hf import build_model
from weights.quantized import QuantLinear, QuantSpec, apply_spec_, largest_groups, pack_, set_tensor


def _llama(hidden: int, inner: int, layers: int, heads: int, kv: int, vocab=32000, theta=1e4, **more) -> ModelConfig:
    family = "mixtral" if "num_local_experts" in more else "llama"
    base = dict(max_position_embeddings=4096, dtype="bfloat16", rms_norm_eps=1e-5, rope=RopeConfig(theta=theta))
    return ModelConfig(family, hidden, inner, layers, heads, kv, 64 if hidden < 2048 else 128, vocab, **(base | more))


def _qwen(hidden: int, inner: int, layers: int, heads: int, value_heads: int) -> ModelConfig:
    """A Qwen3.5 with its MTP layer."""
    more = dict(dtype="bfloat16", rope=RopeConfig(theta=1e7, partial=0.25), qk_norm=True, output_gate=True, mtp=True)
    recurrent, delta = tuple(i for i in range(layers) if i % 4 < 3), DeltaConfig(16, value_heads, 128, 128, 4)
    sizes = hidden, inner, layers, heads, 4, 256, 248320, 32768
    return ModelConfig("qwen3_5_text", *sizes, norm_offset=1.0, recurrent=recurrent, delta=delta, **more)


SHAPES: dict[str, ModelConfig] = {
    "tiny": _llama(64, 96, 2, 4, 2, 256, max_position_embeddings=512),
    "tiny-moe": _llama(64, 96, 2, 4, 2, 256, max_position_embeddings=512, num_local_experts=4, num_experts_per_tok=2),
    "llama-100m": _llama(768, 2048, 12, 12, 12, tie_word_embeddings=True),
    "llama-2-7b": _llama(4096, 11008, 32, 32, 32),
    "llama-2-13b": _llama(5120, 13824, 40, 40, 40),
    "llama-2-70b": _llama(8192, 28672, 80, 64, 8),
    "llama-3-8b": _llama(4096, 14336, 32, 32, 8, 128256, theta=5e5, max_position_embeddings=8192),
    "mixtral-8x7b": _llama(4096, 14336, 32, 32, 8, theta=1e6, num_local_experts=8, num_experts_per_tok=2),
    "qwen3.5-9b": _qwen(4096, 12288, 32, 16, 32),
    "qwen3.5-27b": _qwen(5120, 17408, 64, 24, 48),
}


def head_config(target: ModelConfig, version: int) -> EagleConfig:
    """The geometry of a published EAGLE head (generation 1 or 3) for `target`."""
    # Published heads read layers 2, L // 2 and L - 3. They draft 32,000 of LLaMA-3's 128,256 tokens, and all tokens
    # of a target with a vocabulary of 32,000, which then needs no table of draft ids.
    vocab = target.vocab_size if version == 1 else min(target.vocab_size, 32000)
    layer = layers_like(target, "llama", 1, vocab, target.max_position_embeddings)
    if version == 1:
        return EagleConfig(1, layer, target.hidden_size, fc_bias=True)
    return EagleConfig(3, layer, target.hidden_size, default_taps(target.num_hidden_layers), has_lm_head=True)


def _random(owner: nn.Module, name: str, like: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Random values for the tensor `name` of `owner`. Weights have variance 1 / inputs, so that activations keep their
    size through any number of layers. Codes and scales together have that variance, too."""
    if name == "qweight":
        low, high = (0, 256) if like.dtype == torch.uint8 else (-128, 128)
        return torch.randint(low, high, like.shape, dtype=like.dtype, device=device)
    if not like.is_floating_point():
        raise RuntimeError(f"no random values are known for {type(owner).__name__}.{name}; add them here.")
    if isinstance(owner, QuantLinear) and name == "scales":
        variance = 22.0 if owner.bits == 4 else 5461.0  # of uniform codes
        scale = (variance * owner.in_features) ** -0.5
        return ((torch.rand(like.shape, device=device) + 0.5) * scale).to(like.dtype)
    if like.dim() > 1:
        return torch.empty(like.shape, dtype=dtype, device=device).normal_(0, like.shape[-1] ** -0.5)
    return torch.full(like.shape, 0.0 if name == "bias" else 1.0, dtype=dtype, device=device)


def fill_random_(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give every tensor of `module` that is on the meta device random values on `device`, in place."""
    for owner in module.modules():
        for name, slot in [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]:
            if slot.is_meta and slot.numel():
                set_tensor(owner, name, _random(owner, name, slot, device, dtype))


def random_model(config: ModelConfig, quant: str | None, device: torch.device, dtype: torch.dtype) -> Transformer:
    """A target of `config`'s shapes, packed for the kernel backend that is active."""
    torch.manual_seed(0)
    model = build_model(config)
    if quant:
        apply_spec_(model, largest_groups(QuantSpec(quant), model))
        model.quant = quant
    for part in (*model.layers, model):  # so that the unpacked codes of one layer at a time take memory
        fill_random_(part, device, dtype)
        pack_(part, dtype)
    model.rotary.build(device, config.max_positions)
    return model


# The block heads that are published for models of 8 billion parameters, at most five layers each.
BLOCKS = {
    "dflash": {"slots": 16},
    "dspark": {"slots": 7, "slot0": True, "markov": "vanilla", "rank": 256},
    "dflash2": {"slots": 16, "markov": "selector", "rank": 256, "conv_taps": 2, "conv_group": 16},
}


def block_config(target: ModelConfig, kind: str, layers: int = 5) -> BlockConfig:
    """The geometry of a published block head of a kind in BLOCKS for `target`."""
    L, vocab = target.num_hidden_layers, target.vocab_size
    layer = layers_like(target, "qwen3", layers, vocab, target.max_position_embeddings, qk_norm=True)
    taps = tuple(sorted({round(2 + i * (L - 4) / 4) for i in range(5)}))
    return BlockConfig(layer, target.hidden_size, taps, mask_id=vocab - 1, target_vocab_size=vocab, **BLOCKS[kind])


def random_head(model: Transformer, kind: str, quant: str | None = None) -> DraftHead:
    """A head for `model`, on its device and in its dtype, not packed yet. kind: "1" or "3" (the generation of an EAGLE
    head), or one of BLOCKS."""
    if kind not in ("1", "3", *BLOCKS):
        raise UsageError(f"eagle=random:{kind}: allowed behind the colon are 1, 3, {', '.join(BLOCKS)}.")
    torch.manual_seed(0 if kind in BLOCKS else int(kind))
    config = block_config(model.config, kind) if kind in BLOCKS else head_config(model.config, int(kind))
    with shapes_only():
        head = kinds_of(config)[0](config, model).eval().requires_grad_(False)
    if quant:
        apply_spec_(head, largest_groups(QuantSpec(quant), head))
    if head.draft_ids is not None:
        drafted = head.vocab_size
        head.draft_ids = torch.arange(drafted, device=model.device) * model.config.vocab_size // drafted
    fill_random_(head, model.device, model.dtype)
    head.rotary.build(model.device, model.rotary.length)
    head.finish()
    return head


def random_engine(name: str, **options: Any) -> Engine:
    """An engine that decodes plainly with a random model of the shape `name`. options: fields of LoadOptions."""
    config = SHAPES[name]
    options["ctx"] = options.get("ctx") or 64
    opts = LoadOptions(checkpoint=name, **options).with_defaults(config)
    use_threads(opts)
    target = torch.device(opts.device)
    backend = open_backend(opts, lambda note: None)
    with backend.active():
        model = random_model(config, opts.quant, target, DTYPES[opts.dtype])
    widest = WIDE_CHUNKS[-1] if target.type == "cuda" else CHUNKS[-1]
    return Engine(model, config=replace(EngineConfig.of(opts, backend), chunk=widest))
