"""Paired benchmark of decoding arms on the same weights, in one process: numbers that can be checked.

    python -m scripts.bench                                             # the demo model, every drafter found beside it
    python -m scripts.bench --checkpoint DIR --suite mt_bench.jsonl --template vicuna --temperature 0 1 --json out.jsonl
    python -m scripts.bench --arm "wide=eagle=eagle3;tree=dynamic:60,7,10" --arm "deep=eagle=eagle3;tree=chain:7"
    python -m scripts.bench --baseline hf --csv out.csv --plot out.png
    python -m scripts.bench --shape llama-3-8b --quant int4 --synthetic-tau 3.5
    python -m scripts.bench --rows pp512,tg128,tg128@d1024
    python -m scripts.bench --compare A.jsonl B.jsonl

An arm is NAME=OPTIONS: `key=value` pairs of `generate.LoadOptions` separated by `;`. The first arm is plain decoding, and
every ratio refers to it. Arms run interleaved, each run from empty caches; token ids are counted up to the first stop.
An arm that promises the `same tokens` and breaks the promise gets no speedup (exit code 1); arms with the `same
distribution` or of an `other engine` get a ratio with that label. benchmarks/README.md says what every field means.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import checkpoint
import kernels
import quantize
from checkpoint import EagleConfig
from drafters import check_vocabulary
from eagle_draft import EagleHead, Request
from engine import Engine, decode_step, settle_step
from generate import (
    DEMO,
    DTYPES,
    USAGE,
    LoadOptions,
    UserError,
    build_drafter,
    build_head,
    describe_device,
    draft_vocabulary,
    drafter_kind,
    find_tuned_tree,
    load,
    measure_copy_bandwidth,
    size,
)
from model import ModelConfig, RopeConfig, Transformer
from regions import Regions
from sampling import SamplingParams
from tokenizer import BUILTIN_SYSTEM, LLAMA2_SYSTEM, PAPER_SUFFIX, load_tokenizer

SAME_TOKENS, SAME_DISTRIBUTION, OTHER_ENGINE = "same tokens", "same distribution", "other engine"
LABELS = (SAME_TOKENS, SAME_DISTRIBUTION, OTHER_ENGINE)
TIE = 1e-4  # logit margin under which a float32 fork is rounding (DESIGN section 4)
NO_STOP = (2**31 - 1,)  # no token has this id: decoding goes on to the length limit
COMMON = (
    "checkpoint",
    "device",
    "dtype",
    "ctx",
    "batch_size",
    "kernels",
    "compile",
    "compile_mode",
)  # for all
PATHS = (
    "eagle",
    "draft_checkpoint",
    "medusa",
)  # arm options that name files, looked up in the checkpoint too
RESAMPLES = 2000
DYNAMIC = "dynamic:16,4,4"  # the default dynamic tree on a CPU, where rows are not free
DYNAMIC_GPU = "dynamic:32,6,8"


# ---- what is decoded --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """One item of a suite. Turns are user messages (or text to continue), or token ids where there is no tokenizer."""

    suite: str
    id: str
    turns: tuple[Any, ...]


def read_suite(path: str | Path, limit: int = 0) -> list[Question]:
    """A question file in MT-bench layout: JSON lines with "turns" (and "question_id"). UserError names the line."""
    path, questions = Path(path), []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--suite {path}: {error}", USAGE) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            turns = item["turns"]
            if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
                raise ValueError('"turns" must be a list of non-empty strings')
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"--suite {path}, line {number}: not a question in MT-bench layout ({error}).", USAGE
            ) from None
        name = path.parent.name if path.stem == "question" else path.stem
        questions.append(Question(name, str(item.get("question_id", number)), tuple(turns)))
        if limit and len(questions) == limit:
            break
    if not questions:
        raise UserError(f"--suite {path}: no questions in it.", USAGE)
    return questions


def builtin_suite(limit: int = 0, characters: int = 500) -> list[Question]:
    """Text to continue from standard library modules that the demo model was not trained on: the same few for all."""
    from scripts.train_demo import read_text, stdlib_files

    questions = []
    for path in stdlib_files()[1]:
        lines = read_text(path).splitlines(keepends=True)
        if len(lines) < 60:
            continue
        at = len(lines) * 2 // 5
        while at < len(lines) - 30 and not lines[at].lstrip().startswith(("def ", "class ")):
            at += 1
        text = "".join(lines[max(0, at - 12) : at + 2])[-characters:]
        parent = "" if path.parent.name.startswith("python") else f"{path.parent.name}/"
        questions.append(Question("stdlib", f"{parent}{path.name}", (text,)))
    return questions[: limit or 6]


def random_suite(vocab_size: int, count: int, length: int) -> list[Question]:
    """Prompts of random ids, for shapes without weights worth the name and models without tokenizer."""
    rng = random.Random(0)
    ids = [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]
    return [Question("random", str(i), (tuple(row),)) for i, row in enumerate(ids)]


@dataclass(frozen=True)
class Prompts:
    """Turns to prompt ids: `chat` renders the model's template with the history, else turns are continued as text."""

    tokenizer: Any
    chat: bool
    suffix: str = ""
    system: str | None = None

    def ids(self, turns: Sequence[Any], answers: Sequence[str]) -> list[int]:
        """turns: the user's messages so far; answers: the model's own, one fewer."""
        if not isinstance(turns[0], str):
            return list(turns[0])
        if not self.chat:
            text = "".join(t + a + "\n\n" for t, a in zip(turns, answers, strict=False)) + turns[-1]
            return self.tokenizer.encode(text)
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for i, turn in enumerate(turns):
            messages.append({"role": "user", "content": turn})
            if i < len(answers):
                messages.append({"role": "assistant", "content": answers[i].strip()})
        return self.tokenizer.encode_chat(messages, suffix=self.suffix)

    def longest(self, question: Question, max_new_tokens: int) -> int:
        """An upper estimate of the context the last turn needs."""
        answers = [" x" for _ in question.turns[:-1]]
        tokens = len(self.ids(question.turns, answers))
        return tokens + len(question.turns) * (max_new_tokens + 16)


# ---- arms -------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    """What one run gave. ids and steps are as the engine returned them; `counted` truncates at the first stop."""

    token_ids: list[int]
    ttft_seconds: float
    decode_seconds: float
    tokens_per_step: list[int] | None = None  # ids per target forward after the prompt's; None: unknown
    cached_tokens: int = 0
    text: str = ""


class Arm(Protocol):
    """Something that decodes a prompt. Engines and `transformers` look the same to the benchmark."""

    name: str
    label: str
    options: dict[str, Any]

    def run(self, prompt: list[int], params: SamplingParams) -> Sample: ...


@dataclass
class EngineArm:
    name: str
    label: str
    options: dict[str, Any]
    engine: Engine

    def run(self, prompt: list[int], params: SamplingParams) -> Sample:
        """One request from empty caches: a one-token request that shares no prefix with it goes before."""
        engine, device = self.engine, self.engine.model.device
        other = (prompt[0] + 1) % engine.model.config.vocab_size
        engine.generate([other], replace(params, max_new_tokens=1)).run()
        synchronize(device)
        stream, times = engine.generate(prompt, params), []
        started = time.perf_counter()
        for _ in stream:
            times.append(time.perf_counter())
        result = stream.result
        if result.cached_tokens:
            raise RuntimeError(f"arm {self.name} reused {result.cached_tokens} cached tokens of another run.")
        steps = [len(ids) for ids in result.tokens_per_step]
        return Sample(result.token_ids, times[0] - started, times[-1] - times[0], steps, 0, result.text)


class HFArm:
    """`transformers` generate on the very same weight tensors. kind: hf (dynamic cache), hf-static, hf-compiled."""

    label = OTHER_ENGINE

    def __init__(self, kind: str, model: Transformer, tokenizer):
        self.name, self.kind, self.tokenizer = kind, kind, tokenizer
        self.model = hf_model(model)
        self.options = {"transformers": importlib.metadata.version("transformers")}
        if kind == "hf-compiled":
            self.model.forward = torch.compile(self.model.forward, dynamic=False)

    @torch.inference_mode()
    def run(self, prompt: list[int], params: SamplingParams) -> Sample:
        model, clock = self.model, _Clock()
        stops = [i for i in params.stop_ids if i not in NO_STOP]
        options: dict[str, Any] = {"do_sample": False}
        if params.temperature:
            options = {"do_sample": True, "temperature": params.temperature, "top_k": params.top_k}
            options["top_p"] = params.top_p
        if self.kind != "hf":
            options |= {"cache_implementation": "static", "disable_compile": True}
        ids = torch.tensor([prompt], device=model.device)
        torch.manual_seed(params.seed)
        synchronize(model.device)
        started = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=params.max_new_tokens,
            eos_token_id=stops or None,
            pad_token_id=stops[0] if stops else 0,
            streamer=clock,
            **options,
        )
        text = self.tokenizer.decode(clock.ids, continuation=True) if self.tokenizer else ""
        return Sample(clock.ids, clock.times[0] - started, clock.times[-1] - clock.times[0], None, 0, text)


class _Clock:
    """A streamer of transformers: ids and the time each arrived on the host. The first `put` is the prompt."""

    def __init__(self):
        self.ids, self.times, self.started = [], [], False

    def put(self, ids: Tensor) -> None:
        if self.started:
            self.ids += ids.flatten().tolist()
            self.times.append(time.perf_counter())
        self.started = True

    def end(self) -> None:
        pass


def hf_model(model: Transformer):
    """A transformers model whose parameters are views of ours, or copies laid out as it would load them where ours lie
    column by column; UserError where that cannot be (quantized weights)."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise UserError("--baseline hf needs transformers: pip install transformers", USAGE) from error
    if getattr(model, "quant", None):
        raise UserError("--baseline hf needs unquantized weights; this checkpoint is quantized.", USAGE)
    values = checkpoint.config_to_hf(model.config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    fused = any(name.endswith("experts.gate_up_proj") for name in twin.state_dict())
    views = {n: v.contiguous() for n, v in checkpoint.hf_views(model, fused).items()}
    if model.config.tie_word_embeddings:
        views["lm_head.weight"] = views["model.embed_tokens.weight"]
    twin.load_state_dict({name: view.detach() for name, view in views.items()}, assign=True)
    twin.model.rotary_emb = type(twin.model.rotary_emb)(config).to(model.device)
    return twin.eval().requires_grad_(False)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def parse_arm(text: str) -> tuple[str, dict[str, str]]:
    """NAME=KEY=VALUE;KEY=VALUE -> (name, options); "plain=" is plain decoding."""
    name, separator, rest = text.partition("=")
    pairs = [item.partition("=") for item in rest.split(";") if item.strip()]
    if not name.strip() or not separator or any(not value for _, _, value in pairs):
        raise UserError(
            f"--arm {text!r:.80}: expected NAME=KEY=VALUE;KEY=VALUE, like e3=eagle=eagle3;tree=chain:5.",
            USAGE,
        )
    return name.strip(), {key.strip(): value.strip() for key, _, value in pairs}


def arm_options(name: str, given: dict[str, str], directory: Path | None) -> tuple[str, dict[str, Any]]:
    """Label and typed LoadOptions of an arm's text options; UserError for what an arm cannot set."""
    kinds = {f.name: f.default for f in fields(LoadOptions) if f.name not in COMMON}
    options: dict[str, Any] = {}
    given = dict(given)
    label = given.pop("label", "").replace("-", " ")
    for key, value in given.items():
        key = key.replace("-", "_")
        if key not in kinds:
            why = "is the same for all arms" if key in COMMON else "is unknown"
            raise UserError(f"--arm {name}: option {key} {why}; allowed: {', '.join(kinds)}, label.", USAGE)
        default = kinds[key]
        if isinstance(default, bool):
            if value not in ("on", "off"):
                raise UserError(f"--arm {name}: {key}={value!r:.40}; allowed: on, off.", USAGE)
            options[key] = value == "on"
        elif isinstance(default, int):
            if not value.isdecimal():
                raise UserError(f"--arm {name}: {key}={value!r:.40}; allowed: an integer.", USAGE)
            options[key] = int(value)
        elif isinstance(default, tuple):
            options[key] = tuple(value.split(","))
        else:
            options[key] = value
        if key in PATHS and directory and not Path(value).exists() and (directory / value).exists():
            options[key] = str(directory / value)
    promised = SAME_DISTRIBUTION if options.get("verify", "match") != "match" else SAME_TOKENS
    if label and label not in LABELS:
        raise UserError(f"--arm {name}: label {label!r:.40}; allowed: {', '.join(LABELS)}.", USAGE)
    return LABELS[max(LABELS.index(label or promised), LABELS.index(promised))], options


def default_arms(directory: Path, config: ModelConfig, cuda: bool) -> list[tuple[str, dict[str, str]]]:
    """Plain decoding, n-grams, and every drafter that lies in a folder of the checkpoint; heads with two trees."""
    arms: list[tuple[str, dict[str, str]]] = [("plain", {})]
    others = [("n-gram", {"drafter": "ngram", "tree": "chain:15" if cuda else "chain:7"})]
    for folder in sorted(p for p in directory.iterdir() if p.is_dir()):
        if medusa := [folder / name for name in checkpoint.MEDUSA_FILES if (folder / name).is_file()]:
            heads = len({name.split(".")[0] for name in checkpoint.read_entries(medusa[:1])})
            tree = "paper25" if heads >= 5 else f"chain:{heads}"
            others.append((folder.name, {"medusa": folder.name, "tree": tree}))
        elif _is(checkpoint.read_eagle, folder, config):
            dynamic = DYNAMIC_GPU if cuda else DYNAMIC
            arms.append((f"{folder.name} paper25", {"eagle": folder.name, "tree": "paper25"}))
            arms.append((f"{folder.name} dynamic", {"eagle": folder.name, "tree": dynamic}))
        elif _is(checkpoint.load_config, folder):
            others.append((f"{folder.name} LLM", {"draft_checkpoint": folder.name, "tree": "chain:4"}))
    return arms + others


def _is(reader: Callable, *arguments: Any) -> bool:
    try:
        reader(*arguments)
    except ValueError:
        return False
    return True


def build_engine(base: Engine, options: dict[str, Any], ctx: int) -> Engine:
    """An Engine for the arm's options on the weights, tokenizer and backend of `base`: nothing is loaded twice."""
    opts = replace(base.options, ctx=ctx, **options)
    model, config, head = base.model, base.model.config, None
    kind = drafter_kind(opts)
    if opts.tree == "auto" and kind != "eagle":
        find_tuned_tree(opts, config, None, model.device)  # says that only EAGLE heads have tuned trees
    if kind == "eagle":
        version = opts.eagle.removeprefix("random:")
        if version != opts.eagle:
            head = random_head(model, int(version), getattr(model, "quant", None))
        else:
            pairs = dict(item.split("=", 1) for item in opts.eagle_config)
            file = checkpoint.read_eagle(opts.eagle, config, pairs)
            if opts.tree == "auto":
                opts = replace(opts, tree=find_tuned_tree(opts, config, file, model.device))
            head = build_head(file, model, draft_vocabulary(opts, config, base.tokenizer))
    if kind == "draft":
        small = checkpoint.load_config(opts.draft_checkpoint)
        theirs = load_tokenizer(opts.draft_checkpoint, small.vocab_size)
        check_vocabulary(config, small, (base.tokenizer, theirs))
    with base.backend.active():  # as in generate.load: packed for one backend, before anything is traced
        if head:
            quantize.pack_(head, model.dtype)
        drafter = build_drafter(model, head, opts) if kind else None
    always = options.get("eagle_always", True)  # tau is measured, unless an arm is about falling back
    how = {"compile_mode": opts.compile_mode, "eagle_always": always}
    how["kv_dtype"] = torch.int8 if opts.kv == "int8" else base.kv_dtype
    engine = Engine(model, base.tokenizer, drafter, opts.batch_size, ctx, opts.compile, base.backend, **how)
    engine.options, engine.head = opts, head
    return engine


# ---- random weights of real shapes ------------------------------------------------------------------------


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
    model = checkpoint.build_model(config)
    model.to(dtype=DTYPES[dtype])
    generator = torch.Generator(target).manual_seed(0)
    spec = quantize.QuantSpec(quant) if quant else None
    for block in model.layers:
        block.to_empty(device=target)
        _fill(block, generator)
        if spec:
            quantize.quantize_(block, spec)
    for part in (model.embed_tokens, model.norm, model.lm_head):
        if part is not None:
            part.to_empty(device=target)
            _fill(part, generator)
    model.rotary.build(target, config.max_positions)
    backend = kernels.KernelBackend(options.get("kernels", "auto"), target.type)
    if spec:
        model.quant = quant
    with backend.active():
        quantize.pack_(model, DTYPES[dtype])
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
        quantize.quantize_(head, quantize.QuantSpec(quant))
    head.rotary.build(model.device, model.rotary.length)
    head.trim()
    return head


# ---- environment ------------------------------------------------------------------------------------------

GPU_FIELDS = (
    "name,driver_version,power.limit,power.default_limit,clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu,"
    "utilization.gpu,memory.used,persistence_mode"
)


def parse_smi(line: str, processes: str, own: int) -> dict[str, Any]:
    """One CSV line of nvidia-smi and its list of compute processes -> a dictionary; numbers where they are numbers."""

    def value(text: str) -> Any:
        try:
            return float(text)
        except ValueError:
            return text

    gpu = dict(zip(GPU_FIELDS.split(","), (value(v.strip()) for v in line.split(",")), strict=False))
    pids = [p.split(",")[0].strip() for p in processes.splitlines() if p.strip()]
    return gpu | {"other_processes": sum(p != str(own) for p in pids)}


def gpu_state(device: torch.device) -> dict[str, Any] | None:
    """Power cap, clocks, temperature, driver of the CUDA device; None on a CPU or without nvidia-smi."""
    if device.type != "cuda":
        return None
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    which = ["-i", uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"] if uuid else []
    answers = []
    for query in (f"--query-gpu={GPU_FIELDS}", "--query-compute-apps=pid"):
        done = _output(["nvidia-smi", *which, query, "--format=csv,noheader,nounits"])
        if done is None:
            return {"name": torch.cuda.get_device_name(device), "error": "nvidia-smi gave no answer"}
        answers.append(done)
    return parse_smi(answers[0].splitlines()[0], answers[1], os.getpid())


def _output(command: list[str], cwd: Path | None = None) -> str | None:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else None


def environment(device: torch.device) -> dict[str, Any]:
    """Everything about the machine that moves the numbers."""
    here = Path(__file__).resolve().parent
    known = {}
    for name in ("torch", "triton", "transformers", "numpy"):
        try:
            known[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            known[name] = None
    commit = _output(["git", "rev-parse", "--short=12", "HEAD"], here)
    dirty = commit and _output(["git", "status", "--porcelain", "--untracked-files=no"], here)
    load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "device": describe_device(device),
        "gpu": gpu_state(device),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": load_average,
        "platform": platform.platform(),
        "versions": {"python": platform.python_version(), **known, "cuda": torch.version.cuda},
        "git": {"commit": commit, "dirty": bool(dirty)},
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def fingerprint(model: Transformer) -> str:
    """A short hash of the weights: names, shapes and a sample of every tensor's values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().flatten()
        some = flat[:: max(1, flat.numel() // 64)][:64].cpu()
        digest.update(f"{name}{tuple(tensor.shape)}{some.double().tolist()}".encode())
    return digest.hexdigest()[:16]


def memory_of(engine: Engine) -> int:
    """Bytes of every tensor the arm needs (weights, head, caches, buffers), each storage counted once."""
    seen: dict[int, int] = {}
    done: dict[int, Any] = {}  # keeps what it names alive: ids of freed objects come back

    def visit(value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            if value.device.type != "meta":
                storage = value.untyped_storage()
                seen[storage.data_ptr()] = storage.nbytes()
            return
        if id(value) in done or depth > 4:
            return
        done[id(value)] = value
        if isinstance(value, nn.Module):
            for tensor in [*value.parameters(), *value.buffers()]:
                visit(tensor, depth)
            for child in value.modules():
                for inner in vars(child).values():
                    if not isinstance(inner, dict | nn.Module):
                        visit(inner, depth + 1)
        elif isinstance(value, list | tuple):
            for inner in value:
                visit(inner, depth + 1)
        elif isinstance(value, dict):
            visit(list(value.values()), depth + 1)
        elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
            visit(list(vars(value).values()), depth + 1)

    visit([engine.model, engine.drafter, engine.state], 0)
    return sum(seen.values())


def resident_bytes() -> int | None:
    """Memory of this process now; None where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return quantize.peak_memory()
    return pages * os.sysconf("SC_PAGE_SIZE")


# ---- running ----------------------------------------------------------------------------------------------


def counted(
    ids: list[int], steps: list[int] | None, stop_ids: Iterable[int]
) -> tuple[list[int], list[int] | None]:
    """ids up to and including the first stop id, and the steps cut to match (the first id comes from the prompt)."""
    stops = set(stop_ids)
    end = next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids))
    if steps is None:
        return ids[:end], None
    left, kept = end - 1, []
    for count in steps:
        if left <= 0:
            break
        kept.append(min(count, left))
        left -= kept[-1]
    return ids[:end], kept


def digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]


def first_fork(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first difference; None when equal. A proper prefix forks at its end."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return None if at == len(a) == len(b) else at


@dataclass
class Settings:
    """What one measurement is made of; everything here ends up in the JSON."""

    temperatures: tuple[float, ...] = (0.0,)
    max_new_tokens: int = 64
    reps: int = 2
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    ignore_eos: bool = False
    warmup_runs: int = 4
    max_seconds: float = (
        0.0  # no repetition (of the first: no question) starts that would end later; 0: no limit
    )
    tie_margin: float = TIE
    allow_diff: bool = False
    synthetic_tau: float = 0.0
    random_weights: bool = False

    def params(self, temperature: float, rep: int, stop_ids: tuple[int, ...]) -> SamplingParams:
        """Repetition r draws with seed + r, so that sampling sees several texts; greedy repeats the same one."""
        return SamplingParams(
            temperature=temperature,
            top_k=self.top_k if temperature else 0,
            top_p=self.top_p if temperature else 1.0,
            seed=self.seed + rep,
            max_new_tokens=self.max_new_tokens,
            stop_ids=NO_STOP if self.ignore_eos else stop_ids,
        )


@dataclass
class Bench:
    """Runs arms over questions, interleaved, and hands every run to `emit` as a dictionary of plain values."""

    arms: list[Arm]
    questions: list[Question]
    prompts: Prompts
    settings: Settings
    stop_ids: tuple[int, ...]
    ctx: int
    emit: Callable[[dict[str, Any]], None] = lambda line: None
    progress: Callable[[float, str], None] = lambda share, text: None
    environment: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    margins: dict[tuple, float] = field(default_factory=dict)
    cut: str = ""

    def warm_up(self) -> list[dict[str, Any]]:
        """Per arm and temperature: the first prompt until two runs agree within 1 %, at most `warmup_runs` times, and
        once only when a third of `max_seconds` is gone."""
        s, notes, began = self.settings, [], time.perf_counter()
        first, longest = self._extremes()
        for i, (arm, T) in enumerate((a, t) for a in self.arms for t in s.temperatures):
            self.progress(
                0.0, f"warm-up {arm.name}, T = {T:g}  ({i + 1} of {len(self.arms) * len(s.temperatures)})"
            )
            params = s.params(T, 0, self.stop_ids)
            arm.run(longest, replace(params, max_new_tokens=min(4, s.max_new_tokens)))
            rates: list[float] = []
            while len(rates) < s.warmup_runs:
                sample = arm.run(first, params)
                seconds = sample.ttft_seconds + sample.decode_seconds
                rates.append(len(sample.token_ids) / seconds)
                if len(rates) > 1 and abs(rates[-1] / rates[-2] - 1) <= 0.01:
                    break
                if s.max_seconds and time.perf_counter() - began > s.max_seconds / 3:
                    break
            agreed = len(rates) > 1 and abs(rates[-1] / rates[-2] - 1) <= 0.01
            notes.append({"arm": arm.name, "temperature": T, "tokens_per_second": rates, "agreed": agreed})
        return notes

    def _extremes(self) -> tuple[list[int], list[int]]:
        prompts = [self.prompts.ids(q.turns[:1], []) for q in self.questions]
        return prompts[0], max(prompts, key=len)

    def measure(self) -> Iterator[dict[str, Any]]:
        """Every run as a line, repetitions outermost; the order of the arms rotates from prompt to prompt. Past
        `max_seconds` the first repetition ends with the question at hand, and `cut` says after how many."""
        s, started = self.settings, time.perf_counter()
        total = s.reps * len(s.temperatures) * sum(len(q.turns) for q in self.questions)
        done = 0
        for rep in range(s.reps):
            spent = time.perf_counter() - started
            if rep and s.max_seconds and (self.cut or spent + spent / rep > s.max_seconds):
                break
            for number, question in enumerate(self.questions):
                if rep == 0 and number and s.max_seconds and time.perf_counter() - started > s.max_seconds:
                    self.cut = f"--max-seconds {s.max_seconds:g}: {number} of {len(self.questions)} questions"
                    break
                for T in s.temperatures:
                    answers: list[str] = []
                    for turn in range(len(question.turns)):
                        left = ""
                        if done:
                            seconds = (time.perf_counter() - started) / done * (total - done)
                            if s.max_seconds:
                                seconds = min(
                                    seconds, max(0.0, s.max_seconds - time.perf_counter() + started)
                                )
                            left = f", {seconds:.0f} s left"
                        what = f"{question.suite} {question.id}, T = {T:g}, repetition {rep + 1} of {s.reps}"
                        self.progress(done / total, what + left)
                        done += 1
                        lines = self._turn(question, turn, answers, T, rep, done)
                        if lines is None:
                            break
                        answers.append(lines.pop())
                        yield from lines

    def _turn(self, question: Question, turn: int, answers: list[str], T: float, rep: int, rotate: int):
        """One prompt through all arms: their lines and, last, the baseline's text (the history of the next turn)."""
        s = self.settings
        prompt = self.prompts.ids(question.turns[: turn + 1], answers)
        if len(prompt) + s.max_new_tokens > self.ctx:
            note = (
                f"{question.suite} {question.id} turn {turn + 1}: {len(prompt)} tokens + {s.max_new_tokens}"
            )
            if note not in self.skipped:
                self.skipped.append(note)
            return None
        params = s.params(T, rep, self.stop_ids)
        order = [(i + rotate) % len(self.arms) for i in range(len(self.arms))]
        samples: dict[int, Sample] = {}
        peaks: dict[int, int | None] = {}
        for i in order:
            device = self._device(i)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
            samples[i] = self.arms[i].run(prompt, params)
            cuda = device.type == "cuda"
            peaks[i] = torch.cuda.max_memory_allocated(device) - before if cuda else None
        base = counted(samples[0].token_ids, None, params.stop_ids)[0]
        lines: list[Any] = []
        for place, i in enumerate(order):
            arm, sample = self.arms[i], samples[i]
            ids, steps = counted(sample.token_ids, sample.tokens_per_step, params.stop_ids)
            fork = None if i == 0 else first_fork(base, ids)
            margin = None if fork is None else self._margin(prompt, base, ids, fork, params)
            same = (
                None if i == 0 else "same" if fork is None else "tie" if margin < s.tie_margin else "differs"
            )
            lines.append(
                {
                    "type": "run",
                    "suite": question.suite,
                    "question": question.id,
                    "turn": turn + 1,
                    "prompt_sha256": digest(prompt),
                    "prompt_tokens": len(prompt),
                    "arm": arm.name,
                    "label": arm.label,
                    "depth": arm.engine.drafter.D if isinstance(arm, EngineArm) else None,
                    "baseline": i == 0,
                    "temperature": T,
                    "seed": params.seed,
                    "rep": rep,
                    "order": place,
                    "new_tokens": len(ids),
                    "ids_sha256": digest(ids),
                    "stopped": bool(ids) and ids[-1] in params.stop_ids,
                    "ttft_seconds": sample.ttft_seconds,
                    "decode_seconds": sample.decode_seconds,
                    "tokens_per_step": steps,
                    "cached_tokens": sample.cached_tokens,
                    "same": same,
                    "fork": fork,
                    "margin": None if margin is None or math.isinf(margin) else margin,
                    "working_bytes": peaks[i],
                    "resident_bytes": resident_bytes(),
                    "random_weights": s.random_weights,
                    "environment": self.environment,
                }
            )
            self.emit(lines[-1])
        return [*lines, samples[0].text]

    def _device(self, i: int) -> torch.device:
        arm = self.arms[i]
        return arm.engine.model.device if isinstance(arm, EngineArm) else torch.device("cpu")

    def _margin(self, prompt, base: list[int], ids: list[int], fork: int, params: SamplingParams) -> float:
        """Distance of the two tokens' sampling keys at the fork; infinite when one text is a prefix of the other."""
        plain = self.arms[0]
        if fork >= min(len(base), len(ids)) or not isinstance(plain, EngineArm):
            return math.inf
        key = (digest(prompt), fork, base[fork], ids[fork], params.seed, params.temperature)
        if key not in self.margins:
            text = [*prompt, *base[:fork]]
            self.margins[key], _ = plain.engine.margin(0, text, len(prompt), params, base[fork], ids[fork])
        return self.margins[key]


def draft_share(engine: Engine, repeats: int = 9) -> tuple[float, float | None]:
    """(median seconds of `drafter.draft` alone, its share of a whole step timed in turn with it).

    Runs on the state that the last request left; that request has finished, so the steps change nothing. Of a compiled
    engine only the draft is timed, its parts compiled too, and the share is None: the table divides by the measured step.
    """
    drafter, state, device = engine.drafter, engine.state, engine.model.device
    if drafter.D == 0:
        return 0.0, 0.0
    mode = SamplingParams().mode
    names = {"state": state.sampling, "mode": mode, "noise": None}
    request = Request(*(names[name] if name in names else getattr(state, name) for name in Request._fields))
    run = (
        Regions(engine.model, drafter, decode_step, settle_step).call
        if engine.compiled
        else lambda f, *a: f(*a)
    )
    calls = [lambda: run(drafter.draft, request)]
    if not engine.compiled:
        calls.append(lambda: decode_step(engine.model, drafter, state, mode))
    parts: list[list[float]] = [[] for _ in calls]
    with torch.inference_mode(), engine.backend.active():
        for i in range(repeats + 2):
            for samples, call in zip(parts, calls, strict=True):
                synchronize(device)
                started = time.perf_counter()
                call()
                synchronize(device)
                if i > 1:
                    samples.append(time.perf_counter() - started)
    alone = statistics.median(parts[0])
    if engine.compiled:
        return alone, None
    return alone, min(1.0, statistics.median(d / s for d, s in zip(*parts, strict=True)))


def step_bytes(engine: Engine, context: int) -> float:
    """Bytes a step has to read: weights, keys and values at `context`, and what the draft reads."""
    model, drafter = engine.model, engine.drafter
    drafted = drafter.bytes_per_step(model) if hasattr(drafter, "bytes_per_step") else 0.0
    return model.weight_bytes(drafter.N) + model.kv_bytes(context) + drafted


def arm_facts(arms: list[Arm]) -> list[dict[str, Any]]:
    """Per arm: options, tree size, draft time, memory, bytes per step. Run it after the warm-up."""
    facts = []
    for arm in arms:
        fact: dict[str, Any] = {"arm": arm.name, "label": arm.label, "options": shown(arm.options)}
        if isinstance(arm, EngineArm):
            engine = arm.engine
            alone, share = draft_share(engine)
            fact |= {
                "nodes": engine.drafter.N,
                "depth": engine.drafter.D,
                "compiled": engine.compiled,
                "draft_seconds": alone,
                "draft_share": share,
                "memory_bytes": memory_of(engine),
            }
        facts.append(fact)
    return facts


def shown(options: dict[str, Any]) -> dict[str, Any]:
    """Options as the JSON keeps them: file names without the folders of this machine."""
    return {k: Path(v).name if k in PATHS or str(v).endswith(".json") else v for k, v in options.items()}


# ---- numbers ----------------------------------------------------------------------------------------------


def rate(line: dict[str, Any]) -> float | None:
    """Decode tokens/s of a run: ids after the first over the time after the first; None if there was only one."""
    seconds = line["decode_seconds"]
    return (line["new_tokens"] - 1) / seconds if line["new_tokens"] > 1 and seconds > 0 else None


def total_rate(lines: Sequence[dict[str, Any]], whole: bool = False) -> float | None:
    """Total tokens / total time: of decoding, or (whole) of the requests with their prompts."""
    if whole:
        tokens = sum(r["new_tokens"] for r in lines)
        seconds = sum(r["ttft_seconds"] + r["decode_seconds"] for r in lines)
    else:
        tokens = sum(r["new_tokens"] - 1 for r in lines)
        seconds = sum(r["decode_seconds"] for r in lines)
    return tokens / seconds if tokens and seconds else None


def bootstrap(ratios: Sequence[float], seed: int = 0, resamples: int = RESAMPLES) -> tuple[float, float]:
    """95 % interval of the median: the 2.5 and 97.5 percentiles of medians of `random.Random(seed).choices`."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(resamples))
    return medians[int(0.025 * resamples)], medians[math.ceil(0.975 * resamples) - 1]


def acceptance(steps: Sequence[int]) -> tuple[float, list[float]]:
    """tau and, for d = 1, 2, ..., the share of steps that emitted more than d tokens; tau = 1 + their sum."""
    if not steps:
        return 0.0, []
    return sum(steps) / len(steps), [sum(n > d for n in steps) / len(steps) for d in range(1, max(steps))]


def tau_by_position(lines: Sequence[dict[str, Any]], width: int = 16) -> list[float | None]:
    """Mean tokens per step of the steps that begin at output positions [k width, (k+1) width)."""
    buckets: dict[int, list[int]] = {}
    for line in lines:
        at = 1
        for count in line["tokens_per_step"] or ():
            buckets.setdefault(at // width, []).append(count)
            at += count
    return [
        statistics.mean(buckets[k]) if k in buckets else None for k in range(max(buckets, default=-1) + 1)
    ]


def summarise(
    runs: Sequence[dict[str, Any]], settings: Settings, resamples: int = RESAMPLES
) -> list[dict[str, Any]]:
    """One row per (suite, temperature, arm), from the run lines alone; suite "all" when there are several."""
    suites = list(dict.fromkeys(r["suite"] for r in runs))
    arms = list(dict.fromkeys(r["arm"] for r in sorted(runs, key=lambda r: not r["baseline"])))
    rows = []
    for suite in [*suites, *(["all"] if len(suites) > 1 else [])]:
        of_suite = [r for r in runs if suite in ("all", r["suite"])]
        for T in dict.fromkeys(r["temperature"] for r in of_suite):
            here = [r for r in of_suite if r["temperature"] == T]
            base = {_pair(r): r for r in here if r["baseline"]}
            for arm in arms:
                if lines := [r for r in here if r["arm"] == arm]:
                    rows.append(_row(lines, base, suite, T, settings, resamples))
    return rows


def _pair(line: dict[str, Any]) -> tuple:
    return line["suite"], line["question"], line["turn"], line["rep"], line["temperature"]


def _row(lines, base: dict[tuple, dict], suite: str, T: float, s: Settings, resamples: int) -> dict[str, Any]:
    label, baseline = lines[0]["label"], lines[0]["baseline"]
    known = all(r["tokens_per_step"] is not None for r in lines)
    steps = [n for r in lines for n in r["tokens_per_step"]] if known else []
    tau, by_depth = acceptance(steps)
    seconds = sum(r["decode_seconds"] for r in lines)
    forwards = len(steps) if known else sum(r["new_tokens"] - 1 for r in lines)
    reps = sorted({r["rep"] for r in lines})
    per_rep = [v for v in (total_rate([r for r in lines if r["rep"] == rep]) for rep in reps) if v]
    plain = list(base.values())
    plain_steps = sum(len(r["tokens_per_step"]) for r in plain)
    plain_step = sum(r["decode_seconds"] for r in plain) / plain_steps if plain_steps else None
    step = seconds / forwards if forwards else None
    row: dict[str, Any] = {
        "suite": suite,
        "temperature": T,
        "arm": lines[0]["arm"],
        "label": label,
        "baseline": baseline,
        "prompts": len({_pair(r)[:3] for r in lines}),
        "runs": len(lines),
        "prompt_tokens": statistics.mean(r["prompt_tokens"] for r in lines),
        "new_tokens": sum(r["new_tokens"] for r in lines),
        "tokens_per_second": total_rate(lines),
        "tokens_per_second_sd": statistics.stdev(per_rep) if len(per_rep) > 1 else None,
        "request_tokens_per_second": total_rate(lines, whole=True),
        "ttft_ms": 1e3 * statistics.median(r["ttft_seconds"] for r in lines),
        "steps": forwards if known else None,
        "tau": tau if known else None,
        "accepted_by_depth": by_depth if known else None,
        "tau_by_position": tau_by_position(lines) if known else None,
        "step_ms": 1e3 * step if step else None,
        "break_even_tau": step / plain_step if step and plain_step and known else None,
        "same": None
        if baseline
        else {k: sum(r["same"] == k for r in lines) for k in ("same", "tie", "differs")},
        "speedup": None,
        "blocked": None,
        "synthetic": None,
    }
    if s.synthetic_tau and step and plain_step and known:
        given = 1.0 if baseline else s.synthetic_tau
        row["synthetic"] = {
            "given_tau": given,
            "tokens_per_second": given / step,
            "speedup": given / step * plain_step,
        }
    if baseline:
        return row
    pairs = [(r, base[_pair(r)]) for r in lines if _pair(r) in base]
    ratios: dict[tuple, list[float]] = {}
    for ours, theirs in pairs:
        a, b = rate(ours), rate(theirs)
        if a and b:
            ratios.setdefault(_pair(ours)[:3], []).append(a / b)
    per_prompt = [statistics.median(values) for values in ratios.values()]
    if lines[0]["random_weights"] and lines[0].get("depth") != 0 and label != OTHER_ENGINE:
        row["blocked"] = "random weights: acceptance means nothing"
    elif label == SAME_TOKENS and row["same"]["differs"] and not s.allow_diff:
        row["blocked"] = f"DIFFERS {row['same']['differs']}/{len(lines)}"
    elif lines[0].get("depth") and tau == 1:
        cost = f"{1 / row['break_even_tau']:.2f}x" if row["break_even_tau"] else "unknown"
        row["blocked"] = (
            f"ACCEPTED NOTHING: the drafter is broken or lost here; plain decoding's speed times {cost}"
        )
    elif not per_prompt:
        row["blocked"] = "no run decoded more than one token"
    else:
        mine, theirs = [p[0] for p in pairs], [p[1] for p in pairs]
        low, high = bootstrap(per_prompt, s.seed, resamples)
        row["speedup"] = {
            "median": statistics.median(per_prompt),
            "low": low,
            "high": high,
            "per_prompt": per_prompt,
            "total": total_rate(mine) / total_rate(theirs),
            "request": total_rate(mine, True) / total_rate(theirs, True),
            "ttft": statistics.median(m["ttft_seconds"] / t["ttft_seconds"] for m, t in pairs),
        }
    return row


def remarks(
    rows: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]], facts: Sequence[dict]
) -> list[str]:
    """What a reader should not overlook: broken promises, drafters that accept nothing or cost time, unsteady steps."""
    depth = {f["arm"]: f.get("depth", 0) for f in facts}
    notes, slow = [], []
    for row in rows:
        where = f"{row['arm']} on {row['suite']}, T = {row['temperature']:g}"
        if row["label"] == SAME_TOKENS and row["same"] and row["same"]["differs"]:
            notes.append(
                f"{where}: {row['same']['differs']} of {row['runs']} runs DIFFER from plain decoding"
            )
        if row["same"] and row["same"]["tie"]:
            notes.append(f"{where}: {row['same']['tie']} of {row['runs']} runs fork at a near-tie (rounding)")
        if runs and runs[0]["random_weights"]:
            continue
        if depth.get(row["arm"]) and row["steps"] and not row["accepted_by_depth"]:
            notes.append(f"{where}: accepted nothing (tau 1.00): a broken drafter, or one of another model")
        elif depth.get(row["arm"]) and row["break_even_tau"] and row["tau"] < row["break_even_tau"]:
            slow.append(f"{where} (tau {row['tau']:.2f} < {row['break_even_tau']:.2f})")
    if slow:
        notes.append(f"tau below break-even, speculation costs time: {'; '.join(slow)}")
    seen: dict[tuple, list] = {}
    for r in runs:
        key = (r["arm"], r["prompt_sha256"], r["temperature"], r["seed"])
        if seen.setdefault(key, r["tokens_per_step"]) != r["tokens_per_step"]:
            notes.append(
                f"{r['arm']}: a repeated request took other steps (is state carried between requests?)"
            )
            break
    return list(dict.fromkeys(notes))


# ---- output -----------------------------------------------------------------------------------------------


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table whose columns line up in a terminal: text to the left, numbers to the right."""
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    left = [all(not r[i][:1].isdigit() for r in rows) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            c.ljust(w) if is_left else c.rjust(w) for c, w, is_left in zip(cells, widths, left, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    rule = (
        "-" * (w + 2) if is_left else "-" * (w + 1) + ":" for w, is_left in zip(widths, left, strict=True)
    )
    return "\n".join([line(head), f"|{'|'.join(rule)}|", *map(line, rows)])


def result_table(rows: Sequence[dict[str, Any]]) -> str:
    """The table of arms: speed, speedup with its interval, tau, TTFT, and whether the tokens were the same."""
    synthetic = any(row["synthetic"] for row in rows)
    head = [
        "suite",
        "T",
        "arm",
        "prompts",
        "tok/s",
        "speedup",
        "95 % CI",
        "total",
        "tau",
        "by depth",
        "TTFT ms",
    ]
    head += (["given tau", "tok/s at it"] if synthetic else []) + ["tokens as plain", "label"]
    body = []
    for row in rows:
        gain, same = row["speedup"], row["same"]
        deviation = f" ± {row['tokens_per_second_sd']:.1f}" if row["tokens_per_second_sd"] is not None else ""
        depth = " ".join(f"{share:.2f}".lstrip("0") for share in row["accepted_by_depth"] or ())
        differs = bool(gain and same["differs"] and row["label"] == SAME_TOKENS)
        cells = [row["suite"], f"{row['temperature']:g}", row["arm"], str(row["prompts"])]
        cells.append(_number(row["tokens_per_second"], 1) + deviation)
        if gain:
            cells += [
                f"{gain['median']:.2f}x",
                f"{gain['low']:.2f} .. {gain['high']:.2f}",
                f"{gain['total']:.2f}x",
            ]
        else:
            cells += ["" if row["baseline"] else row["blocked"].split(":")[0], "", ""]
        tau = row["tau"]
        cells += [_number(tau), depth, f"{row['ttft_ms']:.1f}"]
        if synthetic:
            given = row["synthetic"]
            cells += [f"{given['given_tau']:g}", f"{given['tokens_per_second']:.1f}"] if given else ["-", "-"]
        tokens = ""
        if same:
            tokens = f"{same['same']} / {row['runs']}" + (f", {same['tie']} near-tie" if same["tie"] else "")
        cells += [tokens, "baseline" if row["baseline"] else row["label"] + (", DIFFERS" if differs else "")]
        body.append(cells)
    return table(head, body)


def cost_table(rows: Sequence[dict[str, Any]], facts: Sequence[dict[str, Any]], bandwidth: float) -> str:
    """Where a step's time goes: draft, the rest (verify, accept, commit, host), break-even, bandwidth, memory."""
    known = {f["arm"]: f for f in facts}
    body = []
    for row in rows:
        fact = known.get(row["arm"], {})
        if row["step_ms"] is None or row["steps"] is None or "nodes" not in fact:
            continue
        part = fact["draft_share"]
        if part is None:
            part = min(1.0, 1e3 * fact["draft_seconds"] / row["step_ms"])
        draft = part * row["step_ms"]
        share = row.get("bandwidth_share")
        body.append(
            [
                row["suite"],
                f"{row['temperature']:g}",
                row["arm"],
                str(fact["nodes"]),
                f"{row['step_ms']:.2f}",
                f"{draft:.2f}" if draft else "-",
                f"{row['step_ms'] - draft:.2f}",
                f"{part:.0%}" if draft else "-",
                "-" if row["baseline"] else _number(row["break_even_tau"]),
                _number(row["tau"]),
                "-" if share is None else f"{share:.0%}",
                size(fact["memory_bytes"]),
            ]
        )
    head = [
        "suite",
        "T",
        "arm",
        "nodes",
        "step ms",
        "draft ms",
        "rest ms",
        "draft share",
        "break-even tau",
        "tau",
    ]
    head += [f"of {bandwidth / 1e9:.0f} GB/s copy" if bandwidth else "of copy", "memory"]
    return table(head, body) if body else ""


def write_csv(path: str | Path, rows: Sequence[dict[str, Any]]) -> None:
    """The summary rows as CSV, nested values flattened."""
    flat = []
    for row in rows:
        nested = ("speedup", "same", "synthetic")
        out = {k: v for k, v in row.items() if k not in (*nested, "tau_by_position", "accepted_by_depth")}
        for name in nested:
            out |= {f"{name}_{k}": v for k, v in (row[name] or {}).items() if not isinstance(v, list)}
        out["accepted_by_depth"] = " ".join(f"{v:.6f}" for v in row["accepted_by_depth"] or ())
        flat.append(out)
    names = list(dict.fromkeys(name for row in flat for name in row))
    part = Path(f"{path}.part")
    with open(part, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(flat)
    os.replace(part, path)


def pyplot() -> Any:
    """matplotlib's pyplot, drawing into files; UserError without it."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise UserError("--plot needs matplotlib: pip install matplotlib", USAGE) from error
    return plt


def check_outputs(args: argparse.Namespace) -> None:
    """UserError for results that could not be written, before anything is measured."""
    for flag in ("json", "csv", "plot"):
        path = getattr(args, flag)
        if path and path != "-" and not Path(path).resolve().parent.is_dir():
            raise UserError(f"--{flag} {path}: there is no folder {Path(path).parent}; make it first.", USAGE)
    if args.plot:
        pyplot()


def write_plot(path: str | Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Speed by suite, acceptance by depth and tau by position, as one picture. Needs matplotlib."""
    plt = pyplot()
    rows = [r for r in rows if r["suite"] != "all"]
    groups = list(dict.fromkeys((r["suite"], r["temperature"]) for r in rows))
    arms = list(dict.fromkeys(r["arm"] for r in rows))
    colours = [c for i, c in enumerate(plt.get_cmap("tab10").colors) if i != 7]  # grey is plain decoding's
    colour = {arm: "0.6" if i == 0 else colours[(i - 1) % 9] for i, arm in enumerate(arms)}
    figure, (speed, depth, position) = plt.subplots(1, 3, figsize=(17, 5.8), constrained_layout=True)
    thick = 0.84 / len(arms)
    for row in rows:
        arm, group = row["arm"], (row["suite"], row["temperature"])
        at = groups.index(group) + (arms.index(arm) - (len(arms) - 1) / 2) * thick
        style = ("-", "--", ":", "-.")[groups.index(group) % 4]
        if top := row["tokens_per_second"]:
            blocked = row["blocked"] is not None
            fill = {"color": "white", "hatch": "//"} if blocked else {"color": colour[arm]}
            error = row["tokens_per_second_sd"] or 0
            speed.bar(at, top, thick, yerr=error, edgecolor=colour[arm], **fill)
            why = row["blocked"].split(":")[0] if blocked else ""
            mark = f"{row['speedup']['median']:.2f}x" if row["speedup"] else why
            speed.text(at, top + error, f" {mark}", ha="center", va="bottom", rotation=90, size=8)
        if row["accepted_by_depth"]:
            shares = row["accepted_by_depth"]
            depth.plot(range(1, len(shares) + 1), shares, style, marker="o", ms=4, color=colour[arm])
        if row["tau_by_position"]:
            points = [(16 * k + 8, v) for k, v in enumerate(row["tau_by_position"]) if v is not None]
            position.plot(*zip(*points, strict=True), style, marker="o", ms=3, color=colour[arm])
    speed.set_xticks(range(len(groups)), [f"{suite}\nT = {T:g}" for suite, T in groups])
    speed.set(ylabel="decode tokens/s", title="speed by suite (ratio to plain: median over prompts)")
    speed.set_ylim(0, 1.18 * max((r["tokens_per_second"] or 0) for r in rows) or 1)
    depth.set(xlabel="depth d", ylabel="share of steps that accepted d tokens", title="acceptance by depth")
    depth.set_ylim(0, 1)
    depth.xaxis.get_major_locator().set_params(integer=True)
    position.set(
        xlabel="position in the output (tokens)", ylabel="tau", title="tokens per forward by position"
    )
    lines = [plt.Line2D([], [], color="0.3", ls=("-", "--", ":", "-.")[i % 4]) for i in range(len(groups))]
    depth.legend(lines, [f"{suite}, T = {T:g}" for suite, T in groups], fontsize=8)
    patches = [plt.Rectangle((0, 0), 1, 1, color=colour[arm]) for arm in arms]
    labels = {r["arm"]: r["label"] for r in rows}
    names = [arm if labels[arm] == SAME_TOKENS else f"{arm} ({labels[arm]})" for arm in arms]
    figure.legend(patches, names, loc="outside lower center", ncols=min(len(arms), 8), fontsize=9)
    figure.suptitle(title, fontsize=9)
    part = Path(f"{path}.part")
    figure.savefig(part, format="png", dpi=110)
    plt.close(figure)
    os.replace(part, path)


class Lines:
    """A JSON-lines file that is complete line by line and takes its name when closed; "-" or None: no file."""

    def __init__(self, path: str | None):
        self.path = path if path and path != "-" else None
        self.file = open(f"{self.path}.part", "w", encoding="utf-8") if self.path else None

    def write(self, line: dict[str, Any]) -> None:
        if self.file:
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()

    def close(self) -> None:
        if self.file:
            self.file.close()
            os.replace(f"{self.path}.part", self.path)
            self.file = None


class Progress:
    """A line on stderr with the time left: live on a terminal, else every 20 seconds."""

    def __init__(self, quiet: bool):
        self.quiet, self.live, self.last = quiet, sys.stderr.isatty(), time.perf_counter()

    def __call__(self, share: float, text: str) -> None:
        if self.quiet:
            return
        if self.live:
            print(f"\r\033[K{share:4.0%}  {text}", end="", file=sys.stderr, flush=True)
        elif time.perf_counter() - self.last > 20:
            self.last = time.perf_counter()
            print(f"{share:4.0%}  {text}", file=sys.stderr, flush=True)

    def done(self) -> None:
        if self.live and not self.quiet:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


# ---- compare ----------------------------------------------------------------------------------------------


def read_lines(path: str | Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(run lines, summary line) of a file written by --json; UserError if it is not one."""
    try:
        lines = [
            json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()
        ]
        runs = [line for line in lines if line["type"] == "run"]
        summary = next(line for line in reversed(lines) if line["type"] == "summary")
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise UserError(f"{path}: not a file of scripts.bench --json ({error!r:.80}).", USAGE) from error
    return runs, summary


def differences(a: Any, b: Any, name: str = "") -> list[str]:
    """Leaves in which two nested dictionaries differ, as `name: a -> b`."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = dict.fromkeys([*a, *b])
        return [d for k in keys for d in differences(a.get(k), b.get(k), f"{name}.{k}" if name else k)]
    return [] if a == b else [f"{name}: {a} -> {b}"]


def compare(a: str | Path, b: str | Path) -> str:
    """Two result files side by side: what differs in the machines, the rates, and whether the work was the same."""
    (runs_a, sum_a), (runs_b, sum_b) = read_lines(a), read_lines(b)
    ignored = (
        "time_utc",
        "load_average",
        "gpu.temperature.gpu",
        "gpu.utilization.gpu",
        "gpu.clocks.sm",
        "gpu.memory.used",
    )
    changed = [
        d for d in differences(sum_a["environment"], sum_b["environment"]) if d.split(":")[0] not in ignored
    ]
    changed += differences(sum_a["settings"], sum_b["settings"], "settings")
    changed += differences(sum_a["model"], sum_b["model"], "model")
    arms = [{fact["arm"]: fact["options"] for fact in summary.get("arms", [])} for summary in (sum_a, sum_b)]
    for name in arms[0].keys() & arms[1].keys():
        changed += differences(arms[0][name], arms[1][name], f"arm {name}")
    rows_b = {(r["suite"], r["temperature"], r["arm"]): r for r in sum_b["rows"]}
    body, missing = [], []
    for row in sum_a["rows"]:
        key = row["suite"], row["temperature"], row["arm"]
        other = rows_b.pop(key, None)
        if other is None:
            missing.append(f"{key} only in {a}")
            continue
        same_work = _work(runs_a, key) == _work(runs_b, key)
        ids_a, ids_b = _ids(runs_a, key), _ids(runs_b, key)
        shared = ids_a.keys() & ids_b.keys()
        equal = sum(ids_a[k] == ids_b[k] for k in shared)
        gains = [_number(r["speedup"]["median"]) + "x" if r["speedup"] else "-" for r in (row, other)]
        speeds = row["tokens_per_second"], other["tokens_per_second"]
        ratio = f"{speeds[1] / speeds[0]:.3f}x" if same_work and all(speeds) else "other prompts"
        ratio += " (other tokens)" if same_work and equal < len(shared) else ""
        body.append(
            [
                row["suite"],
                f"{row['temperature']:g}",
                row["arm"],
                _number(speeds[0], 1),
                _number(speeds[1], 1),
                ratio,
            ]
            + [*gains, _number(row["tau"]), _number(other["tau"]), f"{equal} / {len(shared)}"]
        )
    missing += [f"{key} only in {b}" for key in rows_b]
    head = [
        "suite",
        "T",
        "arm",
        "A tok/s",
        "B tok/s",
        "B / A",
        "A speedup",
        "B speedup",
        "A tau",
        "B tau",
        "same tokens",
    ]
    parts = [table(head, body)] if body else ["nothing in common"]
    parts += (
        ["differs   " + "\n          ".join(changed)]
        if changed
        else ["same environment, settings, model and arms"]
    )
    parts += ["missing   " + "\n          ".join(missing)] if missing else []
    return "\n\n".join(parts)


def _work(runs, key: tuple) -> set[tuple]:
    return {
        (r["prompt_sha256"], r["temperature"])
        for r in runs
        if r["arm"] == key[2] and r["temperature"] == key[1] and key[0] in ("all", r["suite"])
    }


def _ids(runs, key: tuple) -> dict[tuple, str]:
    return {
        (*_pair(r), r["prompt_sha256"]): r["ids_sha256"]
        for r in runs
        if r["arm"] == key[2] and r["temperature"] == key[1] and key[0] in ("all", r["suite"])
    }


# ---- llama-bench rows -------------------------------------------------------------------------------------


def parse_row(text: str) -> tuple[str, int, int]:
    """pp512, tg128, tg128@d4096 -> (kind, tokens, depth)."""
    test, _, depth = text.replace(" ", "").partition("@d")
    kind, count = test[:2], test[2:]
    if (
        kind not in ("pp", "tg")
        or not count.isdecimal()
        or int(count) < 1
        or (depth and not depth.isdecimal())
    ):
        raise UserError(f"--rows {text!r:.40}: expected pp512, tg128 or tg128@d4096.", USAGE)
    return kind, int(count), int(depth or 0)


def row_context(text: str) -> int:
    kind, count, depth = parse_row(text)
    return depth + count + (1 if kind == "pp" else 2)


def bench_row(arm: EngineArm, text: str, ids: list[int], reps: int, bandwidth: float) -> dict[str, Any]:
    """One row in llama-bench's terms, tokens/s mean and standard deviation: pp = prompt processing of N tokens after a
    depth of cached ones (its share of the whole prompt's time), tg = N tokens generated one after another."""
    kind, count, depth = parse_row(text)
    rates, steps = [], []
    for _ in range(reps + 1):
        if kind == "tg":
            prompt = ids[: max(1, depth)]
            sample = arm.run(prompt, SamplingParams(max_new_tokens=count + 1, stop_ids=NO_STOP))
            rates.append(count / sample.decode_seconds)
            steps.append(sample.decode_seconds / len(sample.tokens_per_step or [0]))
        else:
            params = SamplingParams(max_new_tokens=1, stop_ids=NO_STOP)
            seconds = arm.run(ids[: depth + count], params).ttft_seconds
            seconds -= arm.run(ids[:depth], params).ttft_seconds if depth else 0.0
            rates.append(count / max(seconds, 1e-9))
    rates, steps = rates[1:], steps[1:]  # the first one warms up
    share = None
    if kind == "tg" and bandwidth:
        share = step_bytes(arm.engine, depth + count // 2) / statistics.median(steps) / bandwidth
    name = f"{kind}{count}" + (f" @ d{depth}" if depth else "")
    return {
        "type": "row",
        "arm": arm.name,
        "test": name,
        "tokens_per_second": statistics.mean(rates),
        "sd": statistics.stdev(rates) if len(rates) > 1 else 0.0,
        "all": rates,
        "bandwidth_share": share,
    }


# ---- command line -----------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--checkpoint", default=str(DEMO), metavar="DIR", help="model directory (default: the embedded demo)")
    add(
        "--arm",
        action="append",
        default=[],
        metavar="NAME=OPTIONS",
        help="an arm beside plain decoding (repeatable)",
    )
    add("--only", default="", metavar="A,B", help="of the default arms only these (plain is always in)")
    add(
        "--suite",
        action="append",
        default=[],
        metavar="FILE",
        help="questions in MT-bench layout (repeatable)",
    )
    add("--questions", type=int, default=0, metavar="N", help="the first N questions of every suite")
    add(
        "--format", default="auto", choices=("auto", "chat", "text"), help="auto: chat if there is a template"
    )
    add(
        "--template",
        metavar="NAME",
        help="vicuna, llama-2-chat, mixtral (as the paper used them), or the model's own",
    )
    add(
        "--system", metavar="TEXT", help='system message; "paper": the 508 characters of the EAGLE evaluation'
    )
    add("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    add("--top-k", type=int, default=0)
    add("--top-p", type=float, default=1.0)
    add("--seed", type=int, default=0)
    add("--max-new-tokens", type=int, default=64)
    add("--ignore-eos", action="store_true", help="decode to the length limit")
    add("--reps", type=int, default=3)
    add(
        "--max-seconds",
        type=float,
        default=80,
        help="no repetition starts that would end later, nor a question of the first one (0: no limit)",
    )
    add(
        "--warmup-runs",
        type=int,
        default=3,
        help="most warm-up runs per arm; ends when two agree within 1 %%",
    )
    add(
        "--baseline",
        choices=("hf",),
        help="add transformers generate (dynamic and static cache) on the same weights",
    )
    add("--hf-compile", action="store_true", help="with --baseline hf: also with a compiled forward")
    add("--compile", action="store_true", help="compile the step of every arm")
    add("--kernels", default="auto", choices=("auto", "triton", "reference"))
    add("--device", choices=("cuda", "cpu"))
    add("--dtype", choices=tuple(DTYPES))
    add("--ctx", type=int, help="context to allocate (default: what the suites need)")
    add("--tie-margin", type=float, help=f"logit margin of a near-tie (default: {TIE:g} in float32, else 0)")
    add("--allow-diff", action="store_true", help="print ratios of arms that differ, labelled")
    synthetic = parser.add_argument_group("engine alone")
    synthetic.add_argument(
        "--synthetic-tau", type=float, default=0.0, metavar="X", help="also: X / measured step time"
    )
    synthetic.add_argument(
        "--shape", choices=tuple(SHAPES), help="random weights of this shape; needs --synthetic-tau"
    )
    synthetic.add_argument("--quant", choices=("int8", "int4"), help="with --shape: quantized weights")
    synthetic.add_argument(
        "--rows", default="", metavar="pp512,tg128@d4096", help="llama-bench style rows of plain decoding"
    )
    out = parser.add_argument_group("output")
    out.add_argument(
        "--json", metavar="FILE", help="JSON lines: every run, then the summary; -: the summary on stdout"
    )
    out.add_argument("--csv", metavar="FILE", help="the summary's rows")
    out.add_argument(
        "--plot", metavar="PNG", help="speed, acceptance by depth, tau by position (needs matplotlib)"
    )
    out.add_argument("--compare", nargs=2, metavar=("A", "B"), help="compare two --json files and exit")
    out.add_argument("-q", "--quiet", action="store_true", help="no progress line")
    out.add_argument("--debug", action="store_true", help="full tracebacks")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Exit codes as generate.py; 1: an arm that promises the same tokens gave others."""
    args = build_parser().parse_args(argv)
    try:
        if args.compare:
            print(compare(*args.compare))
            return 0
        return run(args)
    except (ValueError, ArithmeticError, OSError, torch.OutOfMemoryError) as error:
        if args.debug:
            raise
        print(f"error  {' '.join(str(error).split())}", file=sys.stderr)
        return getattr(error, "code", USAGE)


def settings_of(args: argparse.Namespace, dtype: str) -> Settings:
    """Settings from the flags; UserError for values that make no sense."""
    checks = {
        "--reps": args.reps,
        "--max-new-tokens": args.max_new_tokens - 1,
        "--warmup-runs": args.warmup_runs,
    }
    for name, value in checks.items():
        if value < 1:
            raise UserError(f"{name} is too small; allowed: {'2' if 'new' in name else '1'} or more.", USAGE)
    if args.shape and not args.synthetic_tau:
        raise UserError(
            "--shape has random weights; add --synthetic-tau X (tokens per step to assume).", USAGE
        )
    if args.synthetic_tau and args.synthetic_tau < 1:
        raise UserError("--synthetic-tau counts the target's own token; allowed: 1 or more.", USAGE)
    tie = TIE if dtype in ("float32", "float64") else 0.0
    return Settings(
        temperatures=tuple(dict.fromkeys(args.temperature)),
        max_new_tokens=args.max_new_tokens,
        reps=args.reps,
        seed=args.seed,
        top_k=args.top_k,
        top_p=args.top_p,
        ignore_eos=args.ignore_eos,
        warmup_runs=args.warmup_runs,
        max_seconds=args.max_seconds,
        tie_margin=tie if args.tie_margin is None else args.tie_margin,
        allow_diff=args.allow_diff,
        synthetic_tau=args.synthetic_tau,
        random_weights=bool(args.shape),
    )


def prompts_of(args: argparse.Namespace, tokenizer) -> Prompts:
    """How turns become prompts for this model; a built-in template brings the paper's suffix."""
    if tokenizer is None:
        return Prompts(None, False)
    if args.template:
        tokenizer.use_template(args.template)
    has_template = bool(tokenizer.chat_template_source)
    if args.format == "chat" and not has_template:
        raise UserError(
            f"this model has no chat template; choose --template {', '.join(BUILTIN_SYSTEM)}.", USAGE
        )
    chat = bool(args.suite) and args.format != "text" and has_template
    system = LLAMA2_SYSTEM if args.system == "paper" else args.system
    return Prompts(tokenizer, chat, PAPER_SUFFIX.get(args.template or "", ""), system)


def arms_of(args: argparse.Namespace, base: Engine, ctx: int) -> list[Arm]:
    """Plain decoding, then the arms asked for or found, then transformers."""
    directory = None if args.shape else Path(args.checkpoint)
    if args.shape:
        big = DYNAMIC_GPU if base.model.device.type == "cuda" else DYNAMIC
        specs = [
            ("plain", {}),
            ("eagle1 paper25", {"eagle": "random:1"}),
            ("eagle3 dynamic", {"eagle": "random:3", "tree": big}),
        ]
    else:
        specs = default_arms(directory, base.model.config, base.model.device.type == "cuda")
    if args.arm:
        specs = [("plain", {}), *(parse_arm(text) for text in args.arm)]
    if args.only:
        wanted = {name.strip() for name in args.only.split(",")}
        if unknown := wanted - {name for name, _ in specs}:
            raise UserError(f"--only {', '.join(unknown)}: arms are {', '.join(n for n, _ in specs)}.", USAGE)
        specs = [spec for spec in specs if spec[0] in wanted | {"plain"}]
    names = [name for name, _ in specs]
    if len(set(names)) < len(names) or "plain" in names[1:]:
        raise UserError(
            f"arm names must differ, and the first is always plain; got {', '.join(names)}.", USAGE
        )
    arms: list[Arm] = []
    for name, given in specs:
        label, options = arm_options(name, given, directory)
        arms.append(EngineArm(name, label, options, build_engine(base, options, ctx)))
    if args.baseline:
        kinds = ["hf", "hf-static"] + (["hf-compiled"] if args.hf_compile else [])
        arms += [HFArm(kind, base.model, base.tokenizer) for kind in kinds]
    return arms


def run(args: argparse.Namespace) -> int:
    """Measure what the flags ask for; prints the report."""
    check_outputs(args)
    common = {"device": args.device, "dtype": args.dtype}
    if args.shape:
        base = random_engine(
            args.shape, **common, quant=args.quant, compile=args.compile, kernels=args.kernels
        )
    else:
        ctx = {"ctx": args.ctx} if args.ctx else {}
        base = load(args.checkpoint, **common, compile=args.compile, kernels=args.kernels, **ctx)
    settings, prompts = settings_of(args, base.options.dtype), prompts_of(args, base.tokenizer)
    limit = args.ctx or min(base.model.rotary.length, base.model.config.max_positions)
    if args.shape or base.tokenizer is None:
        questions = random_suite(base.model.config.vocab_size, args.questions or 3, min(128, limit // 4))
    elif args.suite:
        questions = [q for path in args.suite for q in read_suite(path, args.questions)]
    else:
        questions = builtin_suite(args.questions)
    rows = [text.strip() for text in args.rows.split(",") if text.strip()]
    need = max(
        [prompts.longest(q, settings.max_new_tokens) for q in questions] + [row_context(r) for r in rows]
    )
    ctx = args.ctx or min(limit, (need + 63) // 64 * 64)
    questions = [q for q in questions if len(prompts.ids(q.turns[:1], [])) + settings.max_new_tokens <= ctx]
    if not questions:
        raise UserError(
            f"no question fits {ctx} tokens with --max-new-tokens {settings.max_new_tokens}.", USAGE
        )
    if rows and max(map(row_context, rows)) > ctx:
        raise UserError(
            f"--rows {args.rows} needs {max(map(row_context, rows))} of {ctx} tokens of context.", USAGE
        )
    return _measure(args, base, arms_of(args, base, ctx), questions, prompts, settings, rows, ctx)


def _measure(
    args, base: Engine, arms, questions, prompts: Prompts, settings: Settings, rows, ctx: int
) -> int:
    device, stops = base.model.device, tuple(base.stop_ids(SamplingParams()))
    before, bandwidth = environment(device), measure_copy_bandwidth(device)
    progress, lines = Progress(args.quiet), Lines(args.json)
    model = {
        "checkpoint": args.shape or Path(args.checkpoint).resolve().name,
        "weights_sha256": fingerprint(base.model),
        "dtype": base.options.dtype,
        "quant": getattr(base.model, "quant", None) or "none",
        "ctx": ctx,
        "template": base.tokenizer.chat_template_source if base.tokenizer and prompts.chat else None,
    }
    bench = Bench(arms, questions, prompts, settings, stops or NO_STOP, ctx, lines.write, progress, before)
    runs: list[dict[str, Any]] = []
    extra: list[dict[str, Any]] = []
    warm: list[dict[str, Any]] = []
    facts: list[dict[str, Any]] = []
    interrupted = False
    started = time.perf_counter()
    try:
        if not rows or args.arm or args.suite:
            warm = bench.warm_up()
            facts = arm_facts(arms)
            for line in bench.measure():
                runs.append(line)
        if rows:
            text = [t for q in questions for t in prompts.ids(q.turns[:1], [])]
            ids = (text * (1 + max(map(row_context, rows)) // len(text)))[: max(map(row_context, rows))]
            for row in rows:
                progress(0.0, row)
                extra.append(bench_row(arms[0], row, ids, settings.reps, bandwidth))
                lines.write(extra[-1])
    except KeyboardInterrupt:
        interrupted = True
    progress.done()
    summary_rows = summarise(runs, settings) if any(r["baseline"] for r in runs) else []
    for row in summary_rows:
        arm = next(a for a in arms if a.name == row["arm"])
        row["bandwidth_share"] = None
        if isinstance(arm, EngineArm) and row["step_ms"]:
            context = row["prompt_tokens"] + row["new_tokens"] / row["runs"] / 2
            row["bandwidth_share"] = step_bytes(arm.engine, int(context)) / row["step_ms"] * 1e3 / bandwidth
    after = gpu_state(device)
    notes = remarks(summary_rows, runs, facts) + [
        f"skipped (too long for ctx {ctx}): {s}" for s in bench.skipped
    ]
    notes += [bench.cut] if bench.cut else []
    unsteady = [f"{w['arm']} (T = {w['temperature']:g})" for w in warm if not w["agreed"]]
    if unsteady:
        who = ", ".join(unsteady) if len(unsteady) < len(warm) else "every arm (a busy machine?)"
        notes.append(f"no two warm-up runs in a row within 1 %: {who}")
    if interrupted:
        notes.append("interrupted: the numbers are of the runs that were done")
    summary = {
        "type": "summary",
        "model": model,
        "settings": vars(settings) | {"temperatures": list(settings.temperatures)},
        "environment": before,
        "gpu_after": after,
        "copy_bandwidth": bandwidth,
        "bootstrap": {"seed": settings.seed, "resamples": RESAMPLES},
        "warm_up": warm,
        "arms": facts,
        "rows": summary_rows,
        "llama_bench": extra,
        "notes": notes,
        "interrupted": interrupted,
        "seconds": time.perf_counter() - started,
    }
    lines.write(summary)
    lines.close()
    report(summary)
    if args.csv:
        write_csv(args.csv, summary_rows)
    if args.plot and summary_rows:
        write_plot(args.plot, summary_rows, f"{model['checkpoint']} {model['dtype']} on {before['device']}")
    if args.json == "-":
        print(json.dumps(summary))
    if interrupted:
        return 130
    broken = any(r["label"] == SAME_TOKENS and r["same"] and r["same"]["differs"] for r in summary_rows)
    return 1 if broken and not settings.allow_diff else 0


def report(summary: dict[str, Any]) -> None:
    """The markdown page on stdout."""
    e, m, s, rows = summary["environment"], summary["model"], summary["settings"], summary["rows"]
    versions = "  ".join(f"{k} {v}" for k, v in e["versions"].items() if v)
    git = f"{e['git']['commit'] or 'no git'}{' (modified)' if e['git']['dirty'] else ''}"
    print(f"{m['checkpoint']}  {m['dtype']}  {m['quant']}  ctx {m['ctx']}   {git}   {versions}")
    busy = f"   load {e['load_average']:.1f} of {e['cpus']} cores" if e["load_average"] is not None else ""
    print(f"{e['device']}{busy}   copy {summary['copy_bandwidth'] / 1e9:.1f} GB/s")
    if gpu := e["gpu"]:
        now = summary["gpu_after"] or {}
        get = gpu.get
        print(
            f"power cap {get('power.limit', '?')} W   clocks {get('clocks.sm', '?')} of "
            f"{get('clocks.max.sm', '?')} MHz   {get('temperature.gpu', '?')} -> {now.get('temperature.gpu', '?')} C   "
            f"driver {get('driver_version', '?')}   other GPU processes {get('other_processes', '?')}   "
            f"utilization before {get('utilization.gpu', '?')} %"
        )
    if rows:
        done = max(r["runs"] // r["prompts"] for r in rows)
        print(
            f"paired and interleaved; empty caches in every run; ids counted up to the first stop; {done} of {s['reps']} "
            f"repetitions; at most {s['max_new_tokens']} new tokens; seed {s['seed']}; decode and TTFT apart\n"
        )
        print(result_table(rows))
        print(
            "\nspeedup: median of the per-prompt ratios of decode tokens/s; total: ratio of total tokens / total time."
        )
        if any(r["synthetic"] for r in rows):
            print(
                f"tok/s at it: given tau {s['synthetic_tau']:g} / measured step time; no acceptance was measured for it."
            )
        if cost := cost_table(rows, summary["arms"], summary["copy_bandwidth"]):
            print(f"\n{cost}")
    if summary["llama_bench"]:
        body = [
            [
                r["arm"],
                r["test"],
                f"{r['tokens_per_second']:.2f} ± {r['sd']:.2f}",
                "-" if r["bandwidth_share"] is None else f"{r['bandwidth_share']:.0%}",
            ]
            for r in summary["llama_bench"]
        ]
        print("\n" + table(["arm", "test", "t/s", "of copy bandwidth"], body))
    for note in summary["notes"]:
        print(f"note  {note}")
    print(f"\n{summary['seconds']:.0f} s")


if __name__ == "__main__":
    raise SystemExit(main())
