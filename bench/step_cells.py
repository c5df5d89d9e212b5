"""The cells that step times are measured for, and the engines that run them.

A cell is a target, a draft head, a tree and a context. `quick_cells` are those of `make gpu`, `full_cells` those that
`make gpu-full` adds. `Builder` makes a cell's engine with random weights and keeps what the next cell can use.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.random_models import SHAPES, random_head, random_model
from bench.timing import on_gpu
from drafting import build_drafter
from eagle_draft import EagleHead
from engine import Engine, EngineConfig
from load import open_backend
from model import Transformer
from options import LoadOptions
from sampling import SamplingParams
from tree import DynamicTree, parse_tree
from weights.quantized import pack_

SLACK = 128  # cache rows beyond the context: the tree's, and those of a short request

# Trees by number of nodes (root included). The chain and the widest tree are the published EAGLE-3 settings.
TREES = {
    1: "", 4: "chain:3", 8: "chain:7", 16: "dynamic:16,7,8", 24: "dynamic:24,7,8", 26: "paper25",
    32: "dynamic:32,7,8", 60: "dynamic:60,7,10",
}  # fmt: skip

# How a cell's requests choose tokens, '' being greedy.
SAMPLING = {"": {}, "T=1": {"temperature": 1.0}, "T=1 top-p 0.9": {"temperature": 1.0, "top_p": 0.9}}

PUBLISHED_TAU = {  # (shape, tree) -> tokens per step on MT-bench at T = 0, and who measured it
    ("llama-3-8b", "chain:7"): (3.91, "SpecBundle, LLaMA-3.1-8B + EAGLE-3"),
    ("llama-3-8b", "dynamic:60,7,10"): (6.13, "EAGLE-3 paper, LLaMA-3.1-8B"),
    ("llama-2-7b", "paper25"): (3.62, "EAGLE paper, LLaMA-2-7B"),
}


@dataclass(frozen=True)
class Cell:
    """One measurement: which step is timed."""

    shape: str  # of the target, a name in SHAPES
    quant: str  # '' = 16 bit
    head: int  # generation of the EAGLE head, 0 = plain decoding
    head_quant: str
    tree: str
    nodes: int  # of the tree, root included
    context: int  # cached tokens
    ctx: int  # cache rows
    sampling: str = ""  # a name in SAMPLING
    overlap: bool = False  # whether kernels are launched early

    def params(self, new_tokens: int) -> SamplingParams:
        """Of a request that decodes `new_tokens` tokens."""
        return SamplingParams(max_new_tokens=new_tokens, **SAMPLING[self.sampling])

    @property
    def key(self) -> str:
        head = f"eagle{self.head}-{self.head_quant or 'half'} {self.tree}" if self.head else "plain"
        name = f"{self.shape} {self.quant or 'half'} | {head} | {self.nodes} nodes | context {self.context}"
        return " | ".join([name, *[self.sampling] * bool(self.sampling), *["overlap"] * self.overlap])


def grid(shape: str, quant: str, head: int, nodes: Iterable[int], contexts: Sequence[int]) -> list[Cell]:
    """Cells of one target, tree by tree. A quantized target has a head of the same format, a 16-bit one an int8 head.

    All of them have cache rows for the longest of the contexts, so that they can share an engine.
    """
    cells = []
    for count in nodes:
        drafted = (head, quant or "int8", TREES[count]) if count > 1 else (0, "", "")
        cells += [Cell(shape, quant, *drafted, count, context, max(contexts) + SLACK) for context in contexts]
    return cells


def quick_cells() -> list[Cell]:
    """What `make gpu` measures, most important first."""
    pairs = [(nodes, quant) for widths in ((1, 60), (24, 16)) for quant in ("", "int4") for nodes in widths]
    cells = [cell for nodes, quant in pairs for cell in grid("llama-3-8b", quant, 3, [nodes], (128, 2048))]
    # A sampled step beside a greedy one, on the engine that is there already.
    wide = next(i for i, cell in enumerate(cells) if cell.quant == "int4" and cell.nodes == 60)
    sampled = [replace(cells[wide], sampling=name) for name in SAMPLING if name]
    early = [replace(cell, overlap=True) for cell in cells if cell.quant == "int4" and cell.context == 128]
    return [*cells[: wide + 1], *sampled, *cells[wide + 1 :], *early]


def full_cells() -> list[Cell]:
    """What `make gpu-full` adds."""
    both = (128, 2048)
    cells = grid("llama-3-8b", "", 3, [8], both) + grid("llama-3-8b", "int8", 3, [1, 60, 24, 8], both)
    # what a head that is not quantized costs
    cells += [replace(cell, head_quant="") for cell in grid("llama-3-8b", "", 3, [60], both)]
    for quant in ("int4", "", "int8"):
        cells += grid("llama-2-7b", quant, 1, [1, 26, 24, 16], both)
    cells += grid("llama-3-8b", "int4", 3, [8, 32], both) + grid("llama-3-8b", "", 3, [32], both)
    for quant in ("", "int4", "int8"):
        cells += grid("llama-3-8b", quant, 3, [1, 24, 60], (8192,))
    cells += grid("llama-2-70b", "int4", 1, [1, 24, 60], both) + grid("mixtral-8x7b", "int4", 1, [1, 8, 24, 60], both)
    for quant in ("int4", "int8", ""):
        cells += grid("llama-2-13b", quant, 1, [1, 24, 60], both)
    return cells


def tiny_cells() -> list[Cell]:
    """Every kind of cell on shapes for a CPU."""
    cells = grid("tiny", "", 3, [1, 16], (16, 48)) + grid("tiny", "int4", 1, [1, 4], (16,))
    sampled = [replace(cells[-1], sampling=name) for name in SAMPLING if name]
    return cells + sampled + grid("tiny-moe", "int8", 1, [1, 4], (16,))


def draft_rows(tree: str) -> list[int]:
    """Rows of every draft forward of a step. The first feeds the accepted tokens again (D + 1 rows), then each level has
    one."""
    if not tree:
        return []
    parsed = parse_tree(tree)
    dynamic = isinstance(parsed, DynamicTree)
    return [parsed.D + 1, *([parsed.topk] * parsed.depth if dynamic else map(len, parsed.levels))]


def engine_options(mode: str) -> dict[str, Any]:
    """Options of Engine, and of LoadOptions, for a way to run a step.

    engine: as `generate.py --compile`; graph: uncompiled kernels in one CUDA graph; eager: neither. Random weights get
    nothing accepted, so falling back to plain steps is switched off.
    """
    compile_mode = "capture" if mode == "graph" else "graph"
    return {"compile": mode != "eager", "compile_mode": compile_mode, "eagle_always": True}


class Builder:
    """Makes engines for cells. It keeps the last model, head and engine, because neighbouring cells share them."""

    KINDS = ("model", "head", "engine")  # each is built on those before it

    def __init__(self, device: torch.device):
        self.device = device
        self.backend = open_backend(LoadOptions(device=device.type), lambda note: None)
        self.kept: dict[str, tuple[Any, Any]] = {}

    def dtype(self, cell: Cell) -> torch.dtype:
        if self.device.type == "cpu":
            return torch.float32
        return torch.float16 if cell.quant else torch.bfloat16  # our quantized kernels are fastest in fp16

    def engine(self, cell: Cell, mode: str) -> Engine:
        """The cell's engine for one way to run: engine, graph or eager."""
        config = replace(SHAPES[cell.shape], max_position_embeddings=max(16384, cell.ctx))
        target = (config, cell.quant, self.device, self.dtype(cell))
        head, drafting = None, {}
        backend = replace(self.backend, overlap=cell.overlap)
        with torch.no_grad(), backend.active():
            model = self._keep("model", target, lambda: random_model(*target))
            if cell.head:
                drafted = (model, cell.head, cell.head_quant)
                head = self._keep("head", (target, *drafted[1:]), lambda: _packed_head(*drafted))
                drafting = {"eagle": "random", "tree": cell.tree}
            options = LoadOptions(
                cell.shape, ctx=cell.ctx, dtype=str(model.dtype).removeprefix("torch."), device=self.device.type,
                **drafting, **engine_options(mode),
            )  # fmt: skip

            def build() -> Engine:
                drafter = build_drafter(model, options, backend, head)
                return Engine(model, None, drafter, EngineConfig.of(options, backend, head))

            return self._keep("engine", (replace(cell, context=0, sampling=""), mode), build)

    def _keep(self, kind: str, key: Any, make: Callable[[], Any]) -> Any:
        if kind not in self.kept or self.kept[kind][0] != key:
            for stale in self.KINDS[self.KINDS.index(kind) :]:  # before the new one needs the memory
                self.kept.pop(stale, None)
            free(self.device)
            self.kept[kind] = (key, make())
        return self.kept[kind][1]

    def drop(self) -> None:
        """Forget everything, after a failure."""
        self.kept.clear()
        free(self.device)


def _packed_head(model: Transformer, version: int, quant: str) -> EagleHead:
    head = random_head(model, version, quant)
    pack_(head, model.dtype)
    return head


def free(device: torch.device) -> None:
    """Give the memory of what is no longer used back to the device."""
    gc.collect()
    if on_gpu(device):
        torch.cuda.empty_cache()
