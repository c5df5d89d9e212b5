"""Tiny random block heads in the layouts in which they are published, and what they compute, written out.

Nothing here uses the head's own code: names, shapes and formulas are those of the published heads.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import V, geometry, randomise, tiny_model
from torch import Tensor

H, HEADS, KV, HD, INNER, LAYERS = 32, 4, 2, 12, 40, 6


def target(seed: int = 0, **changes):
    """A target of six layers in float64."""
    return tiny_model(seed=seed, layers=LAYERS, **changes)


def base_config(n: int, slots: int, **more) -> dict:
    """The keys that all layouts share."""
    return {
        "model_type": "qwen3", "hidden_size": H, "intermediate_size": INNER, "num_hidden_layers": n,
        "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HD, "rms_norm_eps": 1e-5,
        "rope_theta": 700.0, "attention_bias": False, "vocab_size": V, "num_target_layers": LAYERS, "dtype": "float64",
        "max_position_embeddings": 512, "hidden_act": "silu", "layer_types": ["full_attention"] * n,
        "sliding_window": None, "tie_word_embeddings": False, "transformers_version": "4.57.3", "use_cache": True, **more,
    } | ({} if slots == 0 else {"block_size": slots})  # fmt: skip


def sliding(n: int, window: int, which: tuple[int, ...]) -> dict:
    kinds = ["sliding_attention" if i in which else "full_attention" for i in range(n)]
    return {"layer_types": kinds, "sliding_window": window, "use_sliding_window": True}


def layouts() -> dict[str, dict]:
    """A config.json of every kind of head, under the name of the test."""
    ids = {"mask_token_id": V - 1, "target_layer_ids": [0, 2, 4]}
    z1 = {"architectures": ["DFlashDraftModel"]}
    z2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 9, "block_size": 5}
    scales = {"output_multiplier": 0.7, "final_logit_softcapping": 2.0, "input_embedding_scale": 1.5}
    spark = {"architectures": ["Qwen3DSparkModel"], **ids, "num_anchors": 4}
    sp = {k: v for k, v in base_config(2, 0).items() if k != "num_target_layers"}
    named = {"architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark", "draft_vocab_size": 40}
    named |= {"mask_token_id": 3, "block_size": 4, "transformer_layer_config": sp}
    named |= {"markov_rank": 6, "markov_head_type": "vanilla"}
    return {
        "dflash": base_config(2, 6, **z1, dflash_config=ids),
        "dflash, one layer": base_config(1, 4, **z1, dflash_config={"mask_token_id": 7}),
        "dflash, five layers": base_config(5, 16, **z1, dflash_config=ids | {"target_layer_ids": [1, 3]}),
        "dflash, windows": base_config(3, 6, **z1, dflash_config=ids, **(sliding(3, 4, (0, 2)))),
        "dflash, order": base_config(2, 6, **z1, dflash_config=ids | {"target_layer_ids": [3, -1, 1]}),
        "jetspec": base_config(2, 6, **z1, dflash_config=ids | {"causal_head": True}),
        "jetspec, windows": base_config(2, 6, **z1, dflash_config=ids | {"causal": True}, **(sliding(2, 3, (1,)))),
        "dflash2": base_config(2, 0, architectures=["DFlash2DraftModel"], dflash_config=ids | z2 | scales),
        "dflash2, windows": base_config(
            3, 0, architectures=["DFlash2DraftModel"], is_causal=False, dflash_config=ids | z2,
            **(sliding(3, 4, (0, 1, 2))),
        ),
        "dflash2, sliding is causal": base_config(
            4, 0, architectures=["DFlash2DraftModel"], dflash_config=ids | z2 | {"conv_kernel_size": 3},
            **(sliding(4, 4, (0, 3))),
        ),
        "dspark, plain": base_config(2, 5, **spark, markov_rank=0, enable_confidence_head=False),
        "dspark, vanilla": base_config(2, 5, **spark, markov_rank=6, markov_head_type="vanilla",
                                       enable_confidence_head=True, confidence_head_with_markov=True),
        "dspark, gated": base_config(3, 4, **spark, markov_rank=6, markov_head_type="gated", enable_confidence_head=True,
                                     confidence_head_with_markov=False),
        "dspark, rnn": base_config(2, 5, **spark, markov_rank=6, markov_head_type="rnn", enable_confidence_head=False),
        "speculators": named | {"sample_from_anchor": True, "aux_hidden_state_layer_ids": [1, 3, 5]},
        "speculators, anchor unused": named | {"sample_from_anchor": False, "aux_hidden_state_layer_ids": [2, 4]},
    }  # fmt: skip


def setting(config: dict, key: str, default=None):
    """A setting of a published config: those of dflash_config come first."""
    nested = config.get("dflash_config") or {}
    return nested.get(key, config.get(key, default))


def layer_config(config: dict) -> dict:
    return config.get("transformer_layer_config", config)


def tap_ids(config: dict) -> list[int]:
    """The target's layers whose outputs are read, -1: the embeddings."""
    if "aux_hidden_state_layer_ids" in config:
        return [i - 1 for i in config["aux_hidden_state_layer_ids"]]
    n = config["num_hidden_layers"]
    return setting(config, "target_layer_ids") or ([LAYERS // 2] if n == 1 else [
        round(1 + i * (LAYERS - 4) / (n - 1)) for i in range(n)
    ])  # fmt: skip


def random_tensors(config: dict, seed: int = 3) -> dict[str, Tensor]:
    """The published tensors of a head with this config.json, in float64."""
    layer, n = layer_config(config), layer_config(config)["num_hidden_layers"]
    shapes = {"fc.weight": (H, len(tap_ids(config)) * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for i in range(n):
        rows = {"self_attn.q_proj": (HEADS * HD, H), "self_attn.k_proj": (KV * HD, H), "self_attn.v_proj": (KV * HD, H)}
        rows |= {"self_attn.o_proj": (H, HEADS * HD), "self_attn.q_norm": (HD,), "self_attn.k_norm": (HD,)}
        rows |= {"mlp.gate_proj": (INNER, H), "mlp.up_proj": (INNER, H), "mlp.down_proj": (H, INNER)}
        rows |= {"input_layernorm": (H,), "post_attention_layernorm": (H,)}
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in rows.items()}
        if taps := setting(config, "conv_kernel_size"):
            for name in ("attention_conv", "mlp_conv"):
                shapes[f"layers.{i}.{name}.base_kernel"] = (2, taps, H)
                rows = 2 * taps * H // setting(config, "conv_group_size")
                shapes[f"layers.{i}.{name}.kernel_projection.weight"] = (rows, H)
    drafted = config.get("draft_vocab_size", V)
    if r := setting(config, "selector_rank"):
        shapes |= {f"candidate_selector.{x}_codebook": (V, r) for x in ("predecessor", "successor")}
        shapes["candidate_selector.hidden_projection.weight"] = (r, H)
    if r := config.get("markov_rank"):
        shapes |= {"markov_head.markov_w1.weight": (V, r), "markov_head.markov_w2.weight": (drafted, r)}
        kind = config["markov_head_type"]
        if kind == "gated":
            shapes |= {"markov_head.gate_proj.weight": (r, H + r), "markov_head.gate_proj.bias": (r,)}
        if kind == "rnn":
            shapes |= {"markov_head.joint_proj.weight": (3 * r, 2 * r + H), "markov_head.joint_proj.bias": (3 * r,)}
    if config.get("enable_confidence_head"):
        more = config["markov_rank"] * config["confidence_head_with_markov"]
        shapes |= {"confidence_head.proj.weight": (1, H + more), "confidence_head.proj.bias": (1,)}
    if layer is not config:
        shapes["lm_head.weight"] = (drafted, H)
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        near_one = name.endswith("norm.weight") or name.endswith("base_kernel")
        out[name] = near_one + noise * (0.2 if near_one else 0.3)
        if name.startswith(("markov_head.markov_w", "candidate_selector")):
            out[name] = noise
    return out


def draft_ids(config: dict) -> list[int]:
    """The target's ids that a head drafts."""
    count = config.get("draft_vocab_size", V)
    return sorted((i * 37 + 11) % V for i in range(count)) if count < V else list(range(V))


def write_layout(folder: Path, config: dict, tensors: dict[str, Tensor], how: str = "one file") -> Path:
    """Write config.json and the tensors as one file, as shards, or as a pickle."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: t.contiguous() for name, t in tensors.items()}
    if "draft_vocab_size" in config:
        ids = torch.tensor(draft_ids(config))
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True)
    if how == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    elif how == "shards":
        hub = pytest.importorskip("huggingface_hub")
        hub.save_torch_state_dict(tensors, folder, max_shard_size=sum(t.nbytes for t in tensors.values()) // 2)
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


# ---- the formulas, written out ----------------------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / math.sqrt(float((x * x).mean()) + eps) * weight


def turn(x: Tensor, position: int, theta: float) -> Tensor:
    """RoPE of one head: dimension i is paired with i + half."""
    inverse = 1.0 / torch.tensor(theta) ** (torch.arange(0, len(x), 2).float() / len(x))  # in float32, as everywhere
    c, s = (position * inverse).cos(), (position * inverse).sin()
    a, b = x.chunk(2)
    return torch.cat((a * c - b * s, b * c + a * s))


def slot_zero(config: dict) -> bool:
    return config.get("sample_from_anchor", config["architectures"][0] == "Qwen3DSparkModel")


def block_outputs(config: dict, t: dict[str, Tensor], features: Tensor, anchor: int, model) -> tuple[Tensor, Tensor]:
    """(out [depth, H], z [depth, Vd]) of the slots that draft, after the features [T, taps, H] of T tokens.

    features are in the order in which the file names the layers.
    """
    c = layer_config(config)
    n, eps, theta = c["num_hidden_layers"], c["rms_norm_eps"], c["rope_theta"]
    slots = setting(config, "block_size", 16)
    start = len(features)
    group = HEADS // KV
    context = [norm(t["fc.weight"] @ f.flatten(), t["hidden_norm.weight"], eps) for f in features]
    scale = setting(config, "input_embedding_scale", 1.0)
    tokens = [anchor] + [setting(config, "mask_token_id")] * (slots - 1)
    x = [model.embed_tokens.weight[token] * scale for token in tokens]
    causal = config.get("is_causal", setting(config, "causal_head", setting(config, "causal")))
    for i in range(n):
        at = f"layers.{i}."

        def heads(name, row, position, kind, at=at):
            out = (t[f"{at}self_attn.{name}_proj.weight"] @ row).view(-1, HD)
            if kind:
                out = torch.stack([
                    turn(norm(h, t[f"{at}self_attn.{name}_norm.weight"], eps), position, theta) for h in out
                ])  # fmt: skip
            return out

        window = c["sliding_window"] if c["layer_types"][i] == "sliding_attention" else None
        before = causal
        if causal is None:
            before = window is not None and config["architectures"][0] != "Qwen3DSparkModel"
        keys = [heads("k", row, p, True) for p, row in enumerate(context)]
        values = [heads("v", row, p, False) for p, row in enumerate(context)]

        def attention(rows, at=at, keys=keys, values=values, before=before, window=window, heads=heads):
            k = keys + [heads("k", row, start + j, True) for j, row in enumerate(rows)]
            v = values + [heads("v", row, start + j, False) for j, row in enumerate(rows)]
            out = []
            for own, row in enumerate(rows, start):
                near = [p for p in range(start + slots) if window is None or abs(own - p) < window]
                seen = [p for p in near if p <= own or not before]
                q, mixed = heads("q", row, own, True), []
                for h in range(HEADS):
                    scores = torch.stack([q[h] @ k[p][h // group] for p in seen]) / math.sqrt(HD)
                    mixed.append(scores.softmax(0) @ torch.stack([v[p][h // group] for p in seen]))
                out.append(t[f"{at}self_attn.o_proj.weight"] @ torch.cat(mixed))
            return out

        def feed(rows, at=at):
            gate, up, down = (t[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            return [down @ (gate @ row / (1 + (-gate @ row).exp()) * (up @ row)) for row in rows]

        for sublayer, name, conv in (
            (attention, "input_layernorm", "attention_conv"), (feed, "post_attention_layernorm", "mlp_conv"),
        ):  # fmt: skip
            z = [norm(row, t[f"{at}{name}.weight"], eps) for row in x]
            if (taps := setting(config, "conv_kernel_size")) is None:
                x = [row + y for row, y in zip(x, sublayer(z), strict=True)]
                continue
            g = setting(config, "conv_group_size")
            base = t[f"{at}{conv}.base_kernel"]
            deltas = [(t[f"{at}{conv}.kernel_projection.weight"] @ row).view(2, taps, H // g) for row in z]

            def convolve(rows, side, taps=taps, g=g, base=base, deltas=deltas):
                kernels = [base[side] + delta[side].repeat_interleave(g, -1) for delta in deltas]
                return [
                    sum(kernels[r][tap] * rows[r - tap] for tap in range(min(taps, r + 1))) for r in range(len(rows))
                ]

            x = [row + y for row, y in zip(x, convolve(sublayer(convolve(z, 0)), 1), strict=True)]
    out = torch.stack([norm(row, t["norm.weight"], eps) for row in x])
    out = out if slot_zero(config) else out[1:]
    z = out @ t.get("lm_head.weight", model.lm_head.weight).T
    z = z * setting(config, "output_multiplier", 1.0)
    if cap := setting(config, "final_logit_softcapping"):
        z = cap * torch.tanh(z / cap)
    return out, z


def corrected(config: dict, t: dict[str, Tensor], out: Tensor, z: Tensor, path: list[int]) -> Tensor:
    """The logits [Vd] of the slot after a path of the target's tokens, of which the first is the anchor, over all V."""
    d = len(path) - 1
    if r := setting(config, "selector_rank"):
        a = t["candidate_selector.predecessor_codebook"][path[-1]]
        h = t["candidate_selector.hidden_projection.weight"] @ out[d]
        return z[d] + t["candidate_selector.successor_codebook"] @ (a * h)
    r = config.get("markov_rank")
    if not r:
        return z[d]
    w1, w2 = t["markov_head.markov_w1.weight"], t["markov_head.markov_w2.weight"]
    e = w1[path[-1]]
    if config["markov_head_type"] == "vanilla":
        return z[d] + w2 @ e
    if config["markov_head_type"] == "gated":
        joined = torch.cat((out[d], e))
        gate = t["markov_head.gate_proj.weight"] @ joined + t["markov_head.gate_proj.bias"]
        return z[d] + w2 @ (e / (1 + (-gate).exp()))
    s = torch.zeros(r, dtype=z.dtype)
    for i, token in enumerate(path):
        joined = torch.cat((s, w1[token], out[i]))
        g, c, o = (t["markov_head.joint_proj.weight"] @ joined + t["markov_head.joint_proj.bias"]).chunk(3)
        bias = w2 @ torch.tanh(o)
        g = 1 / (1 + (-g).exp())
        s = g * s + (1 - g) * torch.tanh(c)
    return z[d] + bias


def tiny_block(model, **changes):
    """A block head with random weights, made without a file. `changes`: fields of BlockConfig and of its geometry."""
    from drafters.block import BlockHead
    from weights.block_heads import BlockConfig

    flags = {k: changes.pop(k) for k in list(changes) if k in BlockConfig.__dataclass_fields__}
    layers, ids = changes.pop("layers", 2), changes.pop("draft_ids", None)
    seed = changes.pop("seed", 4)
    c = model.config
    layer = geometry(layers, c.vocab_size, hidden_size=c.hidden_size, qk_norm=True, **changes)
    defaults = dict(taps=(0, 1), slots=6, mask_id=c.vocab_size - 1, target_vocab_size=c.vocab_size)
    config = BlockConfig(layer, c.hidden_size, **(defaults | flags))
    head = BlockHead(config, model, ids).to(model.dtype)
    randomise(head, seed)
    head.rotary.build("cpu", model.rotary.length)
    head.finish()
    return head
