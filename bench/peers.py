"""Other engines as arms of a benchmark: transformers and llama.cpp. They promise nothing about their tokens."""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import importlib.util
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.arms import NO_STOP, OTHER_ENGINE, Arm, Sample
from engine import Engine
from memory_plan import float_bytes
from model import Transformer
from options import LoadOptions
from sampling import SamplingParams
from support.errors import NotEnoughMemory, UsageError
from support.machine import default_device, free_memory, shapes_only, size_text, synchronize
from weights.checkpoint import Checkpoint
from weights.hf import config_to_hf, hf_views, unpacked

# What --baseline takes, and what each is imported and installed as.
LIBRARIES = {"hf": ("transformers", "transformers"), "llama.cpp": ("llama_cpp", "llama-cpp-python")}


def need_library(baseline: str) -> None:
    """Raise UsageError if the library of a baseline is not installed."""
    module, package = LIBRARIES[baseline]
    if importlib.util.find_spec(module) is None:
        raise UsageError(f"--baseline {baseline} needs {package}: pip install {package}")


def check_peers(baselines: Sequence[str], gguf: bool, device: str | None) -> None:
    """Raise UsageError for a --baseline that cannot run, before a model is loaded.

    gguf: whether the model is a GGUF file.
    """
    for baseline in baselines:
        need_library(baseline)
    if "llama.cpp" not in baselines:
        return
    if not gguf:
        raise UsageError("--baseline llama.cpp reads GGUF files only; add --checkpoint FILE.gguf.")
    if (device or default_device()) != "cpu":
        raise UsageError("--baseline llama.cpp is measured on CPUs only; add --device cpu.")


def is_gguf(checkpoint: str) -> bool:
    """Whether a --checkpoint names a GGUF file. All other formats are folders."""
    return Path(checkpoint).is_file()


def peers_of(args: argparse.Namespace, base: Engine, ctx: int) -> list[Arm]:
    """The arms that --baseline asks for. Raises UserError for a model that they cannot run."""
    arms: list[Arm] = []
    if "hf" in args.baseline:
        model = floats_of(base, None if args.shape else args.checkpoint)
        twin, copied = hf_model(model), bool(base.model.quant)
        arms += [HFArm(kind, twin, base.tokenizer, copied) for kind in ("hf", "hf-static")]
    if "llama.cpp" in args.baseline:
        arms.append(LlamaCppArm(args.checkpoint, ctx))
    return arms


# ---- transformers -----------------------------------------------------------------------------------------


class HFArm:
    """`transformers` generate.

    kind: hf (dynamic cache) or hf-static. model: a `hf_model`, whose weights the arms share. copied:
    whether they are the copy in bfloat16 that `floats_of` makes, which the name then says.
    """

    label = OTHER_ENGINE

    def __init__(self, kind: str, model: Any, tokenizer, copied: bool = False):
        self.name, self.kind, self.tokenizer = f"{kind} bf16" if copied else kind, kind, tokenizer
        self.model = copy.copy(model)  # generate keeps a static cache in it
        self.options = {"transformers": importlib.metadata.version("transformers")}
        if copied:
            self.options["weights"] = "a copy of the file's in bfloat16, not rounded any further"

    @torch.inference_mode()
    def run(self, prompt: list[int], params: SamplingParams) -> Sample:
        """One request with a new cache."""
        clock = _Clock()
        stops = [i for i in params.stop_ids if i not in NO_STOP]
        ids = torch.tensor([prompt], device=self.model.device)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": params.max_new_tokens}
        options |= {"eos_token_id": stops or None, "pad_token_id": stops[0] if stops else 0}
        options["do_sample"] = params.temperature > 0
        if params.temperature:
            options |= {name: vars(params)[name] for name in ("temperature", "top_k", "top_p")}
        if self.kind != "hf":
            options |= {"cache_implementation": "static", "disable_compile": True}
        torch.manual_seed(params.seed)
        synchronize(self.model.device)
        started = time.perf_counter()
        self.model.generate(ids, streamer=clock, **options)
        _, *times = clock.times  # the prompt comes first
        new = clock.ids[len(prompt) :]
        text = self.tokenizer.decode(new, continuation=True) if self.tokenizer else ""
        return Sample(new, times[0] - started, times[-1] - times[0], text=text)


class _Clock:
    """A streamer for transformers: keeps the ids and the time when they arrived on the host."""

    def __init__(self):
        self.ids: list[int] = []
        self.times: list[float] = []

    def put(self, ids: Tensor) -> None:
        self.ids += ids.flatten().tolist()
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def floats_of(base: Engine, source: str | None) -> Transformer:
    """The model that transformers can run: the engine's own weights, or a copy in bfloat16.

    It is a copy for a quantized GGUF file, and where --quant rounded the weights of the files while they were read.
    source: the model's file or folder; None for random weights. Raises UsageError for other quantized weights, and
    NotEnoughMemory if the copy does not fit.
    """
    model = base.model
    if not model.quant:
        return unpacked(model)
    if source is None or not (is_gguf(source) or base.options.quant):
        what = "--baseline hf needs weights that are not quantized, a GGUF file, or a folder of floats with --quant;"
        raise UsageError(f"{what} this model has quantized weights only.")
    size, free = float_bytes(model.config, LoadOptions(device="cpu", dtype="bfloat16")), free_memory(model.device)
    if size > free:
        what = f"--baseline hf needs a copy in bfloat16, which takes {size_text(size)}; {size_text(free)} are free."
        raise NotEnoughMemory(f"{what} Leave it out.")
    checkpoint = Checkpoint.open(source)
    return checkpoint.load(model.device, torch.bfloat16, max_positions=1, floats=True)


def hf_model(model: Transformer):
    """A transformers model on weights of ours: its parameters are views of them.

    Where ours lie column by column they are copies, laid out as transformers would load them. Raises UsageError for
    quantized weights and without transformers.
    """
    need_library("hf")
    if model.quant:
        raise UsageError("transformers needs unquantized weights; this checkpoint is quantized.")
    from transformers import AutoConfig, AutoModelForCausalLM

    values = config_to_hf(model.config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with shapes_only():
        twin = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    fused = any(name.endswith("experts.gate_up_proj") for name in twin.state_dict())
    views = {n: v.contiguous() for n, v in hf_views(model, fused).items()}
    if model.config.tie_word_embeddings:
        views["lm_head.weight"] = views["model.embed_tokens.weight"]
    twin.load_state_dict({name: view.detach() for name, view in views.items()}, assign=True)
    twin.model.rotary_emb = type(twin.model.rotary_emb)(config).to(model.device)
    return twin.eval().requires_grad_(False)


# ---- llama.cpp --------------------------------------------------------------------------------------------


class LlamaCppArm:
    """llama.cpp on a GGUF file, through llama-cpp-python, with as many threads as torch. It does not draft."""

    name, label = "llama.cpp", OTHER_ENGINE

    def __init__(self, file: str, ctx: int):
        import llama_cpp

        threads = torch.get_num_threads()
        options = {"n_threads": threads, "n_threads_batch": threads, "n_gpu_layers": 0}
        self.llama = llama_cpp.Llama(file, n_ctx=ctx, logits_all=False, verbose=False, **options)
        built = llama_cpp.llama_print_system_info().decode().strip(" |")
        self.options = {"llama-cpp-python": llama_cpp.__version__, "threads": threads, "built with": built}

    def run(self, prompt: list[int], params: SamplingParams) -> Sample:
        """One request from an empty cache."""
        self.llama.reset()  # otherwise it reuses the prefix that the prompt shares with the last request
        self.llama.set_seed(params.seed % (2**32 - 1))  # the last number of 32 bits means a random seed
        ids: list[int] = []
        times: list[float] = []
        started = time.perf_counter()
        stream = self.llama.generate(
            prompt, temp=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=0.0, repeat_penalty=1.0
        )
        for token in itertools.islice(stream, params.max_new_tokens):
            times.append(time.perf_counter())
            ids.append(token)
            if token in params.stop_ids:
                break
        stream.close()
        return Sample(ids, times[0] - started, times[-1] - times[0])
