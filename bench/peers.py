"""Other engines as arms of a benchmark: transformers, llama.cpp, ik_llama.cpp, and torch by itself. They promise
nothing about their tokens."""

import argparse
import copy
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.arms import NO_STOP, OTHER_ENGINE, Arm, Arrivals, Sample, Together
from bench.native_peers import ENGINES as NATIVE
from decoding.params import SamplingParams
from engine.engine import Engine
from loading.memory import float_bytes
from loading.options import LoadOptions
from model import Transformer, apply_rope
from support.errors import NotEnoughMemory, UsageError
from support.machine import default_device, free_memory, shapes_only, size_text, synchronize
from support.progress import say
from weights.block_heads import BlockConfig, read_head
from weights.checkpoint import Checkpoint
from weights.gguf_writer import write_head
from weights.hf import config_to_hf, hf_views, unpacked
from weights.quantized import QuantLinear

# What --baseline takes, and what each is imported and installed as.
LIBRARIES = {
    "hf": ("transformers", "transformers"), "torch": ("torch", "torch"),
    "llama.cpp": ("xllamacpp", "xllamacpp"), "ik_llama.cpp": ("ik_llama_cpp", "ik-llama-cpp-python"),
}  # fmt: skip


def check_peers(args: argparse.Namespace) -> None:
    """Raise UsageError for a --baseline that cannot run, before a model is loaded."""
    for name in args.baseline:
        module, package = LIBRARIES[name]
        if importlib.util.find_spec(module) is None:
            raise UsageError(f"--baseline {name} needs {package}: pip install {package}")
        if name in ("ik_llama.cpp", "torch") and any(args.temperature):
            raise UsageError(f"--baseline {name} decodes greedily; add --temperature 0.")
        if name in NATIVE and (args.shape or not Path(args.checkpoint).is_file()):
            raise UsageError(f"--baseline {name} reads GGUF files only; add --checkpoint FILE.gguf.")
        if name in NATIVE and (args.device or default_device()) != "cpu":
            raise UsageError(f"--baseline {name} is measured on CPUs only; add --device cpu.")


def real_stops(params: SamplingParams) -> list[int]:
    """The stop ids that a token can have."""
    return [i for i in params.stop_ids if i not in NO_STOP]


def peers_of(args: argparse.Namespace, base: Engine, ctx: int, ours: Sequence[Arm]) -> list[Arm]:
    """The arms that --baseline asks for beside ours. llama.cpp also runs with the heads that these have.

    Raises UserError for a model that they cannot run.
    """
    arms: list[Arm] = []
    if "hf" in args.baseline:
        twin = hf_model(floats_of(base, None if args.shape else args.checkpoint))
        arms += [HFArm(kind, twin, base.tokenizer, bool(base.model.quant)) for kind in ("hf", "hf-static")]
    arms += [NativeArm(name, args.checkpoint, ctx) for name in NATIVE if name in args.baseline]
    if "llama.cpp" in args.baseline:
        heads = dict.fromkeys(str(arm.engine.options.eagle) for arm in ours if arm.engine.options.eagle)
        arms += filter(None, (drafting(head, args.checkpoint, base, ctx) for head in heads))
    if "torch" in args.baseline:
        arms.append(TorchArm(base.model, ctx, base.model.quant == "int4"))
    return arms


# ---- transformers -----------------------------------------------------------------------------------------


class HFArm(Arm):
    """`transformers` generate.

    kind: hf (dynamic cache) or hf-static. model: a `hf_model`, whose weights the arms share. copied:
    whether they are the copy in bfloat16 that `floats_of` makes, which the name then says.
    """

    def __init__(self, kind: str, model: Any, tokenizer, copied: bool = False):
        about = {"transformers": importlib.metadata.version("transformers")}
        super().__init__(f"{kind} bf16" if copied else kind, OTHER_ENGINE, about)
        self.kind, self.tokenizer = kind, tokenizer
        self.model = copy.copy(model)  # generate keeps a static cache in it
        if copied:
            self.options["weights"] = "a copy of the file's in bfloat16, not rounded any further"

    @torch.inference_mode()
    def run(self, prompt: list[int], params: SamplingParams) -> Sample:
        """One request with a new cache."""
        clock = _Clock()
        stops = real_stops(params)
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
    if source is None or not (Path(source).is_file() or base.options.quant):
        what = "--baseline hf needs weights that are not quantized, a GGUF file, or a folder of floats with --quant;"
        raise UsageError(f"{what} this model has quantized weights only.")
    size, free = float_bytes(model.config, LoadOptions(device="cpu", dtype="bfloat16")), free_memory(model.device)
    if size > free:
        what = f"--baseline hf needs a copy in bfloat16, which takes {size_text(size)}; {size_text(free)} are free."
        raise NotEnoughMemory(f"{what} Leave it out.")
    return Checkpoint.open(source).load(model.device, torch.bfloat16, max_positions=1, floats=True)


def hf_model(model: Transformer):
    """A transformers model on weights of ours: its parameters are views of them.

    Where ours lie column by column they are copies, laid out as transformers would load them.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    values = config_to_hf(model.config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with shapes_only():
        twin = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    views = {n: v.contiguous() for n, v in hf_views(model, twin.state_dict()).items()}
    if model.config.tie_word_embeddings:
        views["lm_head.weight"] = views["model.embed_tokens.weight"]
    twin.load_state_dict({name: view.detach() for name, view in views.items()}, assign=True)
    twin.model.rotary_emb = type(twin.model.rotary_emb)(config).to(model.device)
    return twin.eval().requires_grad_(False)


# ---- llama.cpp and ik_llama.cpp ---------------------------------------------------------------------------


class NativeArm(Arm):
    """llama.cpp or ik_llama.cpp in a process of its own (`bench.native_peers`), with as many threads as torch.

    llama.cpp may draft with a head. It tells no ids, so all of them are -1.
    """

    def __init__(self, name: str, file: str, ctx: int, clients: int = 1, head: Sequence[str] = ()):
        """head: what its drafter is called there, its GGUF file, and how many tokens it drafts at once."""
        threads = torch.get_num_threads()
        super().__init__(name, OTHER_ENGINE, {"threads": threads})
        self.library, self.file, self.head = name, file, head
        command = [sys.executable, "-m", "bench.native_peers", name, file, *map(str, (ctx, threads, clients)), *head]
        self.errors = tempfile.TemporaryFile("w+", errors="replace")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors, "text": True}
        folder = Path(__file__).parents[1]
        self.process = subprocess.Popen(command, cwd=folder, **pipes)  # it ends when its stdin does
        self.options |= self._read()

    def _read(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            self.errors.seek(0)
            last = " ".join(self.errors.readlines()[-1:]).strip()[:300]
            raise UsageError(f"--baseline {self.name} ended with code {code}: {last}")
        return json.loads(line)

    def _ask(self, prompts: Sequence[list[int]], params: SamplingParams) -> tuple[list[list[int]], Arrivals]:
        """The ids of each prompt, and when they arrived. Nothing of an earlier request is reused."""
        sampling = {name: vars(params)[name] for name in ("temperature", "top_k", "top_p", "seed")}
        request = {"prompts": prompts, "tokens": params.max_new_tokens, "sampling": sampling}
        print(json.dumps(request | {"stops": real_stops(params)}), file=self.process.stdin, flush=True)
        answer = self._read()
        return answer["ids"], answer["arrivals"]

    def run(self, prompt: list[int], params: SamplingParams) -> Sample:
        """One request from an empty cache."""
        (ids,), (times,) = self._ask([prompt], params)
        return Sample(ids, times[0], times[-1] - times[0])

    def together(self, clients: int, tokens: int) -> Together | None:
        """In a process with a slot for each."""
        if clients > 1 and self.name == "ik_llama.cpp":
            return None
        arm = NativeArm(self.library, self.file, tokens * clients, clients, self.head)
        return lambda prompts, params: arm._ask(prompts, params)[1]


def drafting(head: str, checkpoint: str, base: Engine, ctx: int) -> Arm | None:
    """llama.cpp with the same head: with its blocks, or of EAGLE-3 with chains of one token, which are its fastest on a
    CPU. None, and a note, where its files cannot tell the head."""
    file, folder = read_head(head, base.model.config), tempfile.TemporaryDirectory()
    path, block = Path(folder.name) / "head.gguf", isinstance(file.config, BlockConfig)
    try:
        if note := write_head(path, file, Path(checkpoint)):
            say(f"note    {note}")
    except UsageError as error:
        say(f"note    llama.cpp without {Path(head).name}: {error}")
        return None
    kind = ("DSPARK" if file.config.slot0 else "DFLASH") if block else "EAGLE3"
    arm = NativeArm("llama.cpp", checkpoint, ctx, 1, (kind, str(path), str(file.config.depth if block else 1)))
    arm.name, arm.folder = f"llama.cpp {Path(head).name}", folder  # which is deleted with the arm
    return arm


# ---- torch by itself --------------------------------------------------------------------------------------


def int4_linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """A linear on torch's own int4 kernel: groups with a scale and an offset, rounded to the nearest code.

    weight [out, in]; `in` is a multiple of 32, on a GPU of 128.
    """
    n, k = weight.shape
    group = next(size for size in (128, 64, 32) if k % size == 0)
    groups = weight.float().view(n, -1, group)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-6)
    codes = ((groups - low) / scale).round().clamp(0, 15).to(torch.int32).view(n, k)
    # the kernel computes (code - 8) * scale + offset
    scales = torch.cat((scale, low + 8 * scale), -1).transpose(0, 1).to(weight.dtype).contiguous()
    if weight.is_cuda:
        packed = torch.ops.aten._convert_weight_to_int4pack((codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8), 8)
        return partial(torch.ops.aten._weight_int4pack_mm, mat2=packed, qGroupSize=group, qScaleAndZeros=scales)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return partial(torch.ops.aten._weight_int4pack_mm_for_cpu, mat2=packed, qGroupSize=group, qScaleAndZeros=scales)


class TorchArm(Arm):
    """Greedy decoding by torch alone: a static cache, attention over all of it, and a compiled step in a CUDA graph.

    It is what gpt-fast showed to be fast on a GPU, written anew, and runs plain LLaMA models. int4: its weights are
    rounded again for torch's int4 kernel, from the floats that ours stand for. Otherwise they are ours.
    """

    def __init__(self, model: Transformer, ctx: int, int4: bool):
        """Raises UsageError for a model that is no plain LLaMA."""
        c = self.config = model.config
        if c.model_type != "llama" or c.qkv_bias or c.o_bias or c.mlp_bias or model.lm_head is None:
            raise UsageError("--baseline torch runs LLaMA models without biases and tied embeddings; leave it out.")
        compiled = model.device.type == "cuda"
        about = {"torch": torch.__version__, "int4": int4, "compiled": compiled}
        super().__init__(f"torch{' compiled' * compiled}{' int4' * int4}", OTHER_ENGINE, about)
        self.model, self.dtype = model, torch.bfloat16 if int4 and compiled else model.dtype
        static: list[Tensor] = [model.embed_tokens.weight, model.rotary.cos, model.rotary.sin]

        def linear(owner: nn.Module) -> Callable[[Tensor], Tensor]:
            weight = owner.dequantize(self.dtype) if isinstance(owner, QuantLinear) else owner.weight
            made = int4_linear(weight) if int4 else partial(F.linear, weight=weight.to(self.dtype))
            static.extend(value for value in made.keywords.values() if isinstance(value, Tensor))
            return made

        self.layers = [
            [linear(part) for part in (b.attention.qkv, b.attention.o, b.mlp.gate_up, b.mlp.down)]
            + [norm.weight.to(self.dtype) for norm in (b.input_norm, b.post_norm)]
            for b in model.layers
        ]
        self.norm, self.head = model.norm.weight.to(self.dtype), linear(model.lm_head)
        with torch.device(model.device):
            size = (len(self.layers), 2, 1, c.num_key_value_heads, ctx, c.head_dim)
            self.kv, self.slots = torch.zeros(size, dtype=self.dtype), torch.arange(ctx)
        static += [self.kv, self.slots, self.norm, *(norm for layer in self.layers for norm in layer[4:])]
        if compiled:  # otherwise a graph copies every weight in each step, and cannot write the cache
            for tensor in static:
                torch._dynamo.mark_static_address(tensor)
        options = {"mode": "reduce-overhead", "fullgraph": True, "dynamic": False}
        self.step = torch.compile(self.forward, **options) if compiled else self.forward

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """ids and positions int64 [T] -> the most likely next id [1]. Writes the cache at `positions`."""
        c, T = self.config, len(ids)
        x = self.model.embed_tokens.weight[ids].to(self.dtype)
        cos, sin = (table[None, positions] for table in (self.model.rotary.cos, self.model.rotary.sin))
        seen = self.slots <= positions[:, None]
        sizes = [c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads]
        for (qkv, o, gate_up, down, before, after), kv in zip(self.layers, self.kv, strict=True):
            y = F.rms_norm(x, before.shape, before, c.rms_norm_eps)
            q, k, v = qkv(y).view(1, T, -1, c.head_dim).split(sizes, 2)
            kv[0].index_copy_(2, positions, apply_rope(k, cos, sin).transpose(1, 2))
            kv[1].index_copy_(2, positions, v.transpose(1, 2))
            q = apply_rope(q, cos, sin).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, kv[0], kv[1], attn_mask=seen, enable_gqa=sizes[0] != sizes[1])
            x = x + o(y.transpose(1, 2).reshape(T, -1))
            gate, up = gate_up(F.rms_norm(x, after.shape, after, c.rms_norm_eps)).chunk(2, -1)
            x = x + down(F.silu(gate) * up)
        return self.head(F.rms_norm(x[-1:], self.norm.shape, self.norm, c.rms_norm_eps)).argmax(-1)

    @torch.inference_mode()
    def run(self, prompt: list[int], params: SamplingParams) -> Sample:
        """One request from an empty cache. The host waits for a token only where one may stop the text."""
        device, stops = self.model.device, real_stops(params)
        synchronize(device)
        started = time.perf_counter()
        ids = [self.forward(torch.tensor(prompt, device=device), self.slots[: len(prompt)])]
        synchronize(device)
        first = time.perf_counter()
        for at in range(len(prompt), len(prompt) + params.max_new_tokens - 1):
            if stops and int(ids[-1]) in stops:
                break
            ids.append(self.step(ids[-1], self.slots[at : at + 1]).clone())  # a replay overwrites its output
        found = torch.cat(ids).tolist()
        return Sample(found, first - started, time.perf_counter() - first)
