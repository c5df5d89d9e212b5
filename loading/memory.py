"""The memory plan: the bytes that an engine will hold, computed before anything is loaded."""

from dataclasses import asdict, dataclass

import torch

import kernels
from decoding.params import MAX_BIAS, MAX_STOP_IDS
from decoding.snapshots import most_snapshots
from decoding.step import HISTORY, RING, pool_places
from drafters import lookahead
from drafters.trees import ring_slots
from families.config import DTYPES, ModelConfig
from layers.recurrent import new_memory
from loading.drafting import DraftFiles, rounds_head, tree_shape
from loading.options import LoadOptions
from model import Transformer
from support.errors import NotEnoughMemory
from support.machine import size_text
from weights.block_heads import BlockConfig, context_rows
from weights.checkpoint import Checkpoint
from weights.files import local_path
from weights.hf import build_model
from weights.quantized import held_bytes
from weights.shards import Shard

LIVE_ROWS = 6  # fp32 rows per node that are alive at once while a captured step runs
BIAS_BYTES = 20 * (MAX_BIAS + MAX_STOP_IDS)  # of each sequence (`SamplingState`)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that the engine will hold, computed before anything is loaded."""

    weights: int
    head: int
    kv: int
    buffers: int
    lora: int = 0  # adapters that are not merged
    graphs: int = 0  # an estimate of what a captured step keeps for its intermediate results
    recurrent: int = 0  # what recurrent layers remember of each row
    snapshots: int = 0  # of rows, on the host: counted on a CPU alone
    prompts: int = 0  # an estimate of what is alive while a wide chunk of a prompt is read

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def __str__(self) -> str:
        parts = [f"{name} {size_text(count)}" for name, count in asdict(self).items() if count]
        return f"{size_text(self.total)}: " + "  ".join(parts)


def model_bytes(checkpoint: Checkpoint, options: LoadOptions) -> int:
    """Bytes that a model's weights take after loading and packing."""
    dtype = DTYPES[options.dtype]
    if checkpoint.quantization:
        return held_bytes(checkpoint.kept, dtype, options.device, options.kernels)
    return float_bytes(checkpoint.config, options, checkpoint.empty(), checkpoint.shard)


def float_bytes(
    config: ModelConfig, options: LoadOptions, model: Transformer | None = None, shard: Shard | None = None
) -> int:
    """Bytes of the weights of a model that is not quantized. model: the part of it that `shard` names, without memory."""
    dtype, tied = DTYPES[options.dtype], config.tie_word_embeddings
    stored = dict((model or build_model(config)).to(DTYPES[config.dtype]).state_dict())
    if tied and shard and not shard.embedding:
        tied = False
        rows = stored["embed_tokens.weight"][: config.vocab_size // shard.ranks]
        if options.device == "cpu" and dtype == torch.float32:  # the LM head's part gets a layout of its own
            stored["lm_head.weight"] = rows
    return held_bytes(stored, dtype, options.device, options.kernels, tied)


def plan_memory(checkpoint: Checkpoint, files: DraftFiles, options: LoadOptions) -> MemoryPlan:
    """What `load` will allocate for files that were opened. What the ranks of an engine share is among its buffers."""
    config, head, draft = checkpoint.config, files.head, files.model
    options = options.with_defaults(config)
    dtype = DTYPES[options.dtype]
    element = dtype.itemsize
    B, ctx = options.slots, options.ctx
    N, D = tree_shape(options)
    length = ctx + N + 1  # of a row at most

    def cache_bytes(geometry: ModelConfig, places: int, kv: str = "model") -> int:
        value, scale = {"float16": 2, "bfloat16": 2, "int8": 1}.get(kv, element), kernels.KV_SCALE * (kv == "int8")
        kinds = geometry.kv_layers.items()
        return sum(2 * places * len(layers) * heads * (dim * value + scale) for (heads, dim), layers in kinds)

    kv = cache_bytes(config, pool_places(B, ctx, N, options.pool), options.kv)
    rotary = 4 * ctx * sum(head_dim for _, head_dim in config.ropes)
    buffers = B * (length * 8 + BIAS_BYTES) + (B * 5 + 8) * config.vocab_size + rotary + RING * B * 2 * (D + 2) * 8
    recurrent = snapshot = 0
    if config.delta is not None:
        memory = new_memory(config.delta, len(config.recurrent), B, N, D, dtype, torch.device("meta"))
        recurrent = sum(t.nbytes for t in memory)
        snapshot = (memory.memory.nbytes + memory.path.nbytes) // B
    drafter = 0
    if head is not None:
        window = options.window
        rows = min(length + 128, ring_slots(window, 128)) if window else length + 128
        kv += cache_bytes(head.config.layer, B * rows)
        snapshot += cache_bytes(head.config.layer, rows) if window else 0
        rounded = rounds_head(options, checkpoint.quantization)
        drafter = held_bytes(head.tensors, dtype, options.device, options.kernels, rounded=rounded)
        # a trimmed vocabulary copies rows of the target's LM head and holds their ids, which a head's own file has
        own = 0 if head.config.has_lm_head else len(head.tensors.get("draft_ids", ()))
        row = config.hidden_size + 4 if rounded else config.hidden_size * element
        drafter += options.draft_vocab * (row + 8) or own * row
        if isinstance(head.config, BlockConfig):  # the product that makes the keys and values of all layers
            drafter += held_bytes(context_rows(head), dtype, options.device, options.kernels, rounded=rounded)
        kept = D + 1 + (0 if options.eagle_always else HISTORY + 1)
        buffers += B * kept * max(1, len(head.config.taps)) * config.hidden_size * element
        buffers += 4 * ctx * head.config.layer.head_dim
    if options.drafter_kind == "lookahead":
        buffers += B * length * 4 * lookahead.WINDOW * lookahead.SIZE
    if draft is not None:
        kv += cache_bytes(draft.config, B * (length + 128))
        drafter = model_bytes(draft, options)
    if options.medusa:
        path = local_path(options.medusa)
        drafter = sum(file.stat().st_size for file in ([path] if path.is_file() else path.glob("*")))
    captured = options.compile and options.device == "cuda" and options.compile_mode != "reduce-overhead"
    widest = max(config.hidden_size, config.intermediate_size, config.vocab_size)
    graphs = LIVE_ROWS * 4 * B * N * widest if captured else 0
    lora = 0 if checkpoint.merges(dtype) else sum(adapter.bytes(element) for adapter in checkpoint.adapters)
    snapshots = B * snapshot * most_snapshots(B, snapshot) if options.device == "cpu" else 0
    return MemoryPlan(model_bytes(checkpoint, options), drafter, kv, buffers, lora, graphs, recurrent, snapshots)


def chunk_bytes(config: ModelConfig, tokens: int) -> int:
    """An estimate of what is alive on a GPU while one forward reads so many tokens of a prompt."""
    inner = config.intermediate_size * max(1, config.num_experts_per_tok)
    return 8 * tokens * (inner + 2 * config.hidden_size)


def check_memory(plan: MemoryPlan, free: int, options: LoadOptions) -> None:
    """Raise NotEnoughMemory with the smallest change that would fit, before anything is allocated."""
    if plan.total <= free:
        return
    tokens = options.pool or options.ctx * options.slots
    fits = int(tokens - (plan.total - free) * tokens / plan.kv) if plan.kv else 0
    hint = "Use a quantized model (--quant int4, quantize.py) or a larger device."
    rounds = options.kv != "int8" and (options.kernels == "cpu" or not options.drafter_kind)
    if rounds and plan.total - free < 0.4 * plan.kv:
        hint = "Try --kv int8."
    elif fits - 64 >= options.ctx:
        hint = f"Try --pool {fits - 64}."
    elif fits >= 256:
        hint = f"Try --ctx {fits // 64 * 64}."
    elif options.slots > 1:
        per_sequence = (plan.buffers + plan.graphs) / options.slots
        most = int((free - plan.weights - plan.head - plan.kv) / per_sequence)
        hint = f"Try --slots {most}." if most > 0 else hint
    raise NotEnoughMemory(f"not enough memory: plan {size_text(plan.total)}, free {size_text(free)}. {hint}")
