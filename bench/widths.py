"""How long a whole forward takes by its number of nodes, LM head included, and beside it llama.cpp's batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.measure import timed_in_turn
from bench.peers import need_library
from bench.report import number, table
from bench.timing import spread
from engine import Engine
from model import chain_ancestors
from support.machine import describe_device, versions


def forward(engine: Engine, nodes: int, context: int) -> Callable[[], None]:
    """A forward of a chain of `nodes` behind `context` cached tokens, as the engine's steps run it."""
    model = engine.model
    device = model.device
    cache = model.new_cache(1, context + nodes + 1)
    tokens = torch.randint(model.config.vocab_size, (1, nodes), generator=torch.Generator().manual_seed(0)).to(device)
    where, depth = torch.tensor([context], device=device), torch.arange(nodes, device=device)[None]

    @torch.inference_mode()
    def run() -> None:
        with engine.backend.active():
            shared = model.nodes(where, depth, chain_ancestors(1, nodes, device), cache.shape[4])
            model.logits(model(tokens, shared, cache, (), engine.parts.layers)[0])

    return run


def llama_batches(file: str, widths: Sequence[int], context: int) -> dict[int, Callable[[], None]]:
    """llama.cpp's evaluation of as many tokens behind the same context, with the logits of all of them."""
    need_library("llama.cpp")
    import llama_cpp

    threads = torch.get_num_threads()
    options = {"n_threads": threads, "n_threads_batch": threads, "n_gpu_layers": 0, "logits_all": True}
    llama = llama_cpp.Llama(file, n_ctx=context + max(widths) + 8, verbose=False, **options)
    known = list(range(100, 100 + context))
    llama.eval(known)

    def run(nodes: int) -> None:
        llama.n_tokens = context  # what lies behind is dropped
        llama.eval(list(range(1000, 1000 + nodes)))

    return {nodes: lambda nodes=nodes: run(nodes) for nodes in widths}


def measure(
    engine: Engine, widths: Sequence[int], context: int, repeats: int, gguf: str | None = None
) -> dict[str, Any]:
    """Milliseconds by width, all calls in turn. gguf: the file that llama.cpp reads."""
    calls: dict[tuple[str, int], Callable[[], None]] = {("ours", n): forward(engine, n, context) for n in widths}
    if gguf is not None:
        calls |= {("llama.cpp", n): call for n, call in llama_batches(gguf, widths, context).items()}
    seconds = timed_in_turn(calls, repeats, engine.model.device)
    rows = [
        {"engine": key[0], "nodes": key[1], "ms": spread([s * 1e3 for s in found])} for key, found in seconds.items()
    ]
    return {
        "context": context,
        "device": describe_device(engine.model.device),
        "versions": versions(),
        "weights": engine.model.quant or str(engine.model.dtype).removeprefix("torch."),
        "kernels": engine.backend.report(),
        "rows": rows,
    }


def show(report: dict[str, Any]) -> str:
    """The table for people."""
    ms = {(row["engine"], row["nodes"]): row["ms"]["median"] for row in report["rows"]}
    widths = [row["nodes"] for row in report["rows"] if row["engine"] == "ours"]
    one, peer = ms["ours", widths[0]], ("llama.cpp", widths[0]) in ms
    body = []
    for n in widths:
        cells = [str(n), number(ms["ours", n]), number(ms["ours", n] / one)]
        if peer:
            cells += [number(ms["llama.cpp", n]), number(ms["ours", n] / ms["llama.cpp", n])]
        body.append(cells)
    head = ["nodes", "ms", f"of {widths[0]} node"] + ["llama.cpp ms", "ours / llama.cpp"] * peer
    return f"{report['weights']}   {report['device']}\n{table(head, body)}"
