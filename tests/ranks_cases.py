"""What one process of tests/test_ranks.py does: decode with its part of tiny models, and compare with the whole ones.

    python ranks_cases.py FOLDER

FOLDER holds checkpoints and cases.json, which test_ranks.py wrote: lists of cases by the number SIZE of processes. One
process imports what all need and becomes 2 and 4 of them. Every process RANK runs every case of its SIZE and writes a
JSON line for each to the file SIZE-RANK in FOLDER. All processes do the same, so their parts of the models meet in every
sum. The whole model of a case runs in one of the processes alone.
"""

import json
import multiprocessing
import sys
from dataclasses import replace
from pathlib import Path

import torch

from decoding.params import SamplingParams
from engine.engine import Engine, EngineConfig
from engine.ranks import Ranks
from kernels import KernelBackend
from loading.drafting import build_drafter, build_head, read_drafter, resolve
from loading.options import LoadOptions
from model import Transformer
from weights.checkpoint import Checkpoint
from weights.quantized import QuantSpec
from weights.shards import Shard

PROMPTS = [[1, 5, 9, 22, 7, 3] * 3, [8, 2, 61], [30, 31, 30, 31, 30]]


def decode(model: Transformer, checkpoint: Checkpoint, options: LoadOptions, params: SamplingParams) -> tuple:
    """The texts of one request, and its tau."""
    files, head = read_drafter(options, checkpoint.config, None), None
    if files.head:
        head = build_head(files.head, model, options)
    drafter = build_drafter(model, options, KernelBackend("reference", "cpu"), head, files.model)
    engine = Engine(model, None, drafter, EngineConfig(batch_size=options.slots, ctx=options.ctx))
    results = engine.generate_batch(PROMPTS[: options.slots], params).run()
    return [result.token_ids for result in results], results[0].tau


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = Ranks(rank, size, "cpu", f"file://{folder}/{size}")
    lines = []
    for number, case in enumerate(json.loads((folder / "cases.json").read_text())[str(size)]):
        paths = {
            key: str(folder / case[key]) for key in ("checkpoint", "eagle", "draft_checkpoint", "medusa") if key in case
        }
        temperature = case.get("temperature", 0.0)
        ours = ("temperature", "split", "rounded")
        options = {key: value for key, value in case.items() if key not in ours} | paths
        checkpoint = Checkpoint.open(paths["checkpoint"])
        if case.get("rounded"):
            checkpoint = replace(checkpoint, spec=QuantSpec(case["rounded"], group_size=32))
        options = LoadOptions(**options, ctx=120, dtype="float64", device="cpu", kernels="reference")
        options = resolve(options, checkpoint)
        with torch.inference_mode(False):  # as in `load`
            part = checkpoint.sharded(Shard(rank, size, case.get("split", False))).load("cpu", torch.float64)
            whole = checkpoint.load("cpu", torch.float64) if number % size == rank else None
        params = SamplingParams(temperature=temperature, max_new_tokens=8, stop_ids=(95,), seed=3)
        for model in (whole, part) if whole else (part,):
            texts, cache = decode(model, checkpoint, options, params), model.new_cache(1, 8)[0].numel()
            lines.append(json.dumps({"case": case, "whole": model is whole, "texts": texts, "cache": cache}))
    (folder / f"{size}-{rank}").write_text("\n".join(lines))
    ranks.leave()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with torch.inference_mode():
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=main, args=(r, size, folder)) for size in (2, 4) for r in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    raise SystemExit(any(process.exitcode for process in processes))
