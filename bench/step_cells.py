"""TODO."""

from __future__ import annotations

import gc
import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import kernels
from bench.random_models import SHAPES
from eagle_draft import EagleHead
from engine import Engine
from load import LoadOptions, build_drafter
from model import ModelConfig, Transformer
from weights.heads import EagleConfig
from weights.hf import build_model
from weights.quantized import QuantLinear, QuantSpec, apply_spec_, pack_, set_tensor
from kernels.tuned import read_tuned

TINY = {"tiny": SHAPES["tiny"]} | {
    "tiny-moe": replace(SHAPES["tiny"], model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
}


SLACK = 128  # cache rows beyond the context: the tree's, and those of a short request


# Trees by number of nodes (root included). The chain and the widest tree are the published EAGLE-3 settings.
TREES = {
    1: "", 4: "chain:3", 8: "chain:7", 16: "dynamic:16,7,8", 24: "dynamic:24,7,8", 26: "paper25",
    32: "dynamic:32,7,8", 60: "dynamic:60,7,10",
}  # fmt: skip


PUBLISHED_TAU = {  # (shape, tree) -> tokens per step on MT-bench at T = 0, and who measured it
    ("llama-3-8b", "chain:7"): (3.91, "SpecBundle, LLaMA-3.1-8B + EAGLE-3"),
    ("llama-3-8b", "dynamic:60,7,10"): (6.13, "EAGLE-3 paper, LLaMA-3.1-8B"),
    ("llama-2-7b", "paper25"): (3.62, "EAGLE paper, LLaMA-2-7B"),
}


QUICK_START = 25.0  # seconds of a cold first request, up to which every cell can afford to be compiled


@dataclass(frozen=True)
class Cell:
    """One measurement. quant '' = 16 bit; head 0 = plain decoding, else the EAGLE generation; ctx: cache rows."""

    shape: str
    quant: str
    head: int
    head_quant: str
    tree: str
    nodes: int
    context: int
    ctx: int

    @property
    def key(self) -> str:
        head = f"eagle{self.head}-{self.head_quant or 'half'} {self.tree}" if self.head else "plain"
        return f"{self.shape} {self.quant or 'half'} | {head} | {self.nodes} nodes | context {self.context}"

    @property
    def engine_key(self) -> tuple:
        """Cells that agree in this share one engine: nothing is compiled or captured twice."""
        return self.shape, self.quant, self.head, self.head_quant, self.tree, self.ctx


def grid(
    shape: str, quant: str, head: int, nodes: Iterable[int], contexts: Iterable[int], ctx: int = 2048
) -> list:
    """Cells of one target, tree by tree. Quantized targets have a head of the same format, 16-bit ones an int8 head."""
    cells = []
    for count in nodes:
        drafted = (head, quant or "int8", TREES[count]) if count > 1 else (0, "", "")
        for context in contexts:
            cells.append(Cell(shape, quant, *drafted, count, context, max(ctx, context) + SLACK))
    return cells


def quick_cells() -> list[Cell]:
    """What `make gpu` measures, most important first."""
    pairs = [(nodes, quant) for widths in ((1, 60), (24, 16)) for quant in ("", "int4") for nodes in widths]
    return [cell for nodes, quant in pairs for cell in grid("llama-3-8b", quant, 3, [nodes], (128, 2048))]


def full_cells() -> list[Cell]:
    """What `make gpu-full` adds."""
    both = (128, 2048)
    cells = grid("llama-3-8b", "", 3, [8], both) + grid("llama-3-8b", "int8", 3, [1, 60, 24, 8], both)
    cells += [
        replace(c, head_quant="") for c in grid("llama-3-8b", "", 3, [60], both)
    ]  # what a plain head costs
    for quant in ("int4", "", "int8"):
        cells += grid("llama-2-7b", quant, 1, [1, 26, 24, 16], both)
    cells += grid("llama-3-8b", "int4", 3, [8, 32], both) + grid("llama-3-8b", "", 3, [32], both)
    for quant in ("", "int4", "int8"):
        cells += grid("llama-3-8b", quant, 3, [1, 24, 60], (8192,), 8192)
    cells += grid("llama-2-70b", "int4", 1, [1, 24, 60], both)
    cells += grid("mixtral-8x7b", "int4", 1, [1, 8, 24, 60], both)
    for quant in ("int4", "int8", ""):
        cells += grid("llama-2-13b", quant, 1, [1, 24, 60], both)
    return cells


def tiny_cells() -> list[Cell]:
    """Every kind of cell on shapes for a CPU."""
    cells = grid("tiny", "", 3, [1, 16], (16, 48), 48) + grid("tiny", "int4", 1, [1, 4], (16,), 16)
    return cells + grid("tiny-moe", "int8", 1, [1, 4], (16,), 16)


def _group(config: ModelConfig) -> int:
    inner = math.gcd(config.hidden_size, config.intermediate_size)
    return next(g for g in (128, 64, 32) if inner % g == 0)


def fill_random_(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give a meta module random weights on `device`, in place: codes and scales as codes and scales. Outputs keep the
    size of their inputs (weights of variance 1 / inputs), so activations stay finite through any number of layers."""
    codes = {}
    for name, owner in module.named_modules():
        if isinstance(owner, QuantLinear):
            spread = (
                22.0 if owner.bits == 4 else 5461.0
            ) * owner.in_features  # variance of uniform codes x inputs
            codes |= {f"{name}.{leaf}".lstrip("."): spread**-0.5 for leaf in ("qweight", "scales")}
    for name, slot in [*module.named_parameters(), *module.named_buffers()]:
        if slot.device.type != "meta" or slot.numel() == 0:
            continue
        if name.endswith(".qweight"):
            low, high = (0, 256) if slot.dtype == torch.uint8 else (-128, 128)
            tensor = torch.randint(low, high, slot.shape, dtype=slot.dtype, device=device)
        elif name in codes:
            tensor = ((torch.rand(slot.shape, device=device) + 0.5) * codes[name]).to(slot.dtype)
        elif not slot.is_floating_point():
            continue
        elif slot.dim() > 1:
            wide = 1.0 if "embed_tokens" in name else slot.shape[-1] ** -0.5
            tensor = torch.empty(slot.shape, dtype=dtype, device=device).normal_(0, wide)
        else:
            tensor = torch.full(slot.shape, 0.0 if name.endswith("bias") else 1.0, dtype=dtype, device=device)
        set_tensor(module, name, tensor)


def random_model(config: ModelConfig, quant: str, device: torch.device, dtype: torch.dtype) -> Transformer:
    """A target of `config`'s shapes. Quantized weights are packed module by module; call it with the kernel backend
    active. Peak memory: the model and one layer's unpacked codes."""
    torch.manual_seed(0)
    model = build_model(config)
    if quant:
        apply_spec_(model, QuantSpec(quant, group_size=_group(config)))
        model.quant = quant
    for part in (*model.layers, model.embed_tokens, model.norm, model.lm_head):
        if part is not None:
            holder = nn.ModuleDict({"embed_tokens" if part is model.embed_tokens else "part": part})
            fill_random_(holder, device, dtype)
            pack_(holder, dtype)
    model.rotary.build(device, config.max_positions)
    return _filled(model).eval().requires_grad_(False)


def _filled(module: nn.Module) -> nn.Module:
    empty = [name for name, t in [*module.named_parameters(), *module.named_buffers()] if t.is_meta]
    if empty:
        raise RuntimeError(
            f"no random weights were made for {', '.join(empty[:3])}; teach fill_random_ about them."
        )
    return module


def random_head(model: Transformer, version: int, quant: str) -> EagleHead:
    """An EAGLE head of the target's own geometry (EAGLE-3: a draft vocabulary of at most 32,000 ids, taps low, middle,
    high), packed. Call it with the kernel backend active."""
    c, device = model.config, model.device
    torch.manual_seed(version)
    vocab = min(c.vocab_size - 1, 32000) if version == 3 else c.vocab_size
    layer = replace(
        c, model_type="llama", num_hidden_layers=1, vocab_size=vocab, windows=(), num_local_experts=0,
        num_experts_per_tok=0,
    )  # fmt: skip
    L = c.num_hidden_layers
    taps = (2, L // 2, L - 3) if L > 5 else tuple(range(min(L, 2) + 1))[:3]
    config = EagleConfig(
        version,
        layer,
        c.hidden_size,
        taps if version == 3 else (),
        fc_bias=version == 1,
        has_lm_head=version == 3,
    )
    with torch.device("meta"):
        head = EagleHead(config, model).eval().requires_grad_(False)
    if head.draft_ids is not None:
        head.draft_ids = torch.arange(vocab, device=device) * c.vocab_size // vocab
    if quant:
        apply_spec_(head, QuantSpec(quant, group_size=_group(c)))
    fill_random_(head, device, model.dtype)
    pack_(head, model.dtype)
    head.rotary.build(device, model.rotary.length)
    head.trim()
    return _filled(head)


class Builder:
    """Engines for cells; keeps the last model, head and engine, because neighbouring cells share them."""

    def __init__(self, device: torch.device, shapes: dict[str, ModelConfig]):
        self.device, self.shapes = device, shapes
        tuned = read_tuned(torch.cuda.get_device_name(device))[0] if on_gpu(device) else {}
        self.backend = kernels.KernelBackend("auto", device.type, tuned)
        self.kept: dict[str, tuple[Any, Any]] = {}

    def _keep(self, kind: str, key: Any, make: Callable[[], Any], above: tuple[str, ...]) -> Any:
        if kind not in self.kept or self.kept[kind][0] != key:
            for stale in (kind, *above):  # what was built on it goes too, before the new one needs the memory
                self.kept.pop(stale, None)
            free(self.device)
            self.kept[kind] = (key, make())
        return self.kept[kind][1]

    def dtype(self, cell: Cell) -> torch.dtype:
        if self.device.type == "cpu":
            return torch.float32
        return torch.float16 if cell.quant else torch.bfloat16  # our quantized kernels are fastest in fp16

    def engine(self, cell: Cell, mode: str) -> Engine:
        """The cell's engine. Its `options` and `head` are set as generate.load does."""
        dtype, device = self.dtype(cell), self.device
        config = replace(self.shapes[cell.shape], max_position_embeddings=max(16384, cell.ctx))
        with torch.no_grad(), self.backend.active():
            made = (config, cell.quant, device, dtype)
            model = self._keep("model", made, lambda: random_model(*made), ("head", "engine"))
            head = None
            if cell.head:
                drafted = (cell.head, cell.head_quant)
                head = self._keep("head", (made, drafted), lambda: random_head(model, *drafted), ("engine",))

            def make() -> Engine:
                extra = {"eagle": "random", "tree": cell.tree} if head else {}
                name = str(dtype).removeprefix("torch.")
                how = engine_options(mode)
                extra |= {key: how[key] for key in how if hasattr(LoadOptions(), key)}
                opts = LoadOptions(checkpoint=cell.shape, ctx=cell.ctx, dtype=name, **extra)
                drafter = build_drafter(model, head, opts) if head else None
                engine = Engine(model, None, drafter, 1, cell.ctx, backend=self.backend, **how)
                engine.options, engine.head = opts, head
                return engine

            return self._keep("engine", (cell.engine_key, mode), make, ())

    def drop(self) -> None:
        """Forget everything, after a failure."""
        self.kept.clear()
        free(self.device)


def on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def free(device: torch.device) -> None:
    gc.collect()
    if on_gpu(device):
        torch.cuda.empty_cache()


def engine_options(mode: str) -> dict[str, Any]:
    """Options of Engine for a way to run, as far as this Engine has them. engine: as `generate.py --compile`; graph:
    uncompiled kernels in a CUDA graph. Random weights accept nothing, so falling back to plain steps is switched off."""
    wanted: dict[str, Any] = {"compile": mode == "engine", "eagle_always": True}
    known = inspect.signature(Engine.__init__).parameters
    if mode == "graph":
        wanted |= {"compile": True, "compile_mode": "capture"}
    return {name: value for name, value in wanted.items() if name in known}
