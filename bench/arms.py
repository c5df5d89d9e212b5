"""TODO."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bench.random_models import random_head
from drafters.draft_model import check_vocabulary
from engine import Engine
from load import LoadOptions, build_drafter, build_head, draft_vocabulary, drafter_kind, find_tuned_tree
from model import ModelConfig, Transformer
from sampling import SamplingParams
from support.errors import UsageError
from tokenizer import load_tokenizer
from weights.checkpoint import load_config
from weights.files import read_entries
from weights.heads import read_eagle
from weights.hf import config_to_hf, hf_views
from weights.medusa import MEDUSA_FILES
from weights.quantized import pack_

SAME_TOKENS, SAME_DISTRIBUTION, OTHER_ENGINE = "same tokens", "same distribution", "other engine"


LABELS = (SAME_TOKENS, SAME_DISTRIBUTION, OTHER_ENGINE)


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


DYNAMIC = "dynamic:16,4,4"  # the default dynamic tree on a CPU, where rows are not free


DYNAMIC_GPU = "dynamic:32,6,8"


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
        raise UsageError("--baseline hf needs transformers: pip install transformers") from error
    if getattr(model, "quant", None):
        raise UsageError("--baseline hf needs unquantized weights; this checkpoint is quantized.")
    values = config_to_hf(model.config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    fused = any(name.endswith("experts.gate_up_proj") for name in twin.state_dict())
    views = {n: v.contiguous() for n, v in hf_views(model, fused).items()}
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
        raise UsageError(
            f"--arm {text!r:.80}: expected NAME=KEY=VALUE;KEY=VALUE, like e3=eagle=eagle3;tree=chain:5.",
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
            raise UsageError(f"--arm {name}: option {key} {why}; allowed: {', '.join(kinds)}, label.")
        default = kinds[key]
        if isinstance(default, bool):
            if value not in ("on", "off"):
                raise UsageError(f"--arm {name}: {key}={value!r:.40}; allowed: on, off.")
            options[key] = value == "on"
        elif isinstance(default, int):
            if not value.isdecimal():
                raise UsageError(f"--arm {name}: {key}={value!r:.40}; allowed: an integer.")
            options[key] = int(value)
        elif isinstance(default, tuple):
            options[key] = tuple(value.split(","))
        else:
            options[key] = value
        if key in PATHS and directory and not Path(value).exists() and (directory / value).exists():
            options[key] = str(directory / value)
    promised = SAME_DISTRIBUTION if options.get("verify", "match") != "match" else SAME_TOKENS
    if label and label not in LABELS:
        raise UsageError(f"--arm {name}: label {label!r:.40}; allowed: {', '.join(LABELS)}.")
    return LABELS[max(LABELS.index(label or promised), LABELS.index(promised))], options


def default_arms(directory: Path, config: ModelConfig, cuda: bool) -> list[tuple[str, dict[str, str]]]:
    """Plain decoding, n-grams, and every drafter that lies in a folder of the checkpoint; heads with two trees."""
    arms: list[tuple[str, dict[str, str]]] = [("plain", {})]
    others = [("n-gram", {"drafter": "ngram", "tree": "chain:15" if cuda else "chain:7"})]
    for folder in sorted(p for p in directory.iterdir() if p.is_dir()):
        if medusa := [folder / name for name in MEDUSA_FILES if (folder / name).is_file()]:
            heads = len({name.split(".")[0] for name in read_entries(medusa[:1])})
            tree = "paper25" if heads >= 5 else f"chain:{heads}"
            others.append((folder.name, {"medusa": folder.name, "tree": tree}))
        elif _is(read_eagle, folder, config):
            dynamic = DYNAMIC_GPU if cuda else DYNAMIC
            arms.append((f"{folder.name} paper25", {"eagle": folder.name, "tree": "paper25"}))
            arms.append((f"{folder.name} dynamic", {"eagle": folder.name, "tree": dynamic}))
        elif _is(load_config, folder):
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
            file = read_eagle(opts.eagle, config, pairs)
            if opts.tree == "auto":
                opts = replace(opts, tree=find_tuned_tree(opts, config, file, model.device))
            head = build_head(file, model, draft_vocabulary(opts, config, base.tokenizer))
    if kind == "draft":
        small = load_config(opts.draft_checkpoint)
        theirs = load_tokenizer(opts.draft_checkpoint, small.vocab_size)
        check_vocabulary(config, small, (base.tokenizer, theirs))
    with base.backend.active():  # as in generate.load: packed for one backend, before anything is traced
        if head:
            pack_(head, model.dtype)
        drafter = build_drafter(model, head, opts) if kind else None
    always = options.get("eagle_always", True)  # tau is measured, unless an arm is about falling back
    how = {"compile_mode": opts.compile_mode, "eagle_always": always}
    how["kv_dtype"] = torch.int8 if opts.kv == "int8" else base.kv_dtype
    engine = Engine(model, base.tokenizer, drafter, opts.batch_size, ctx, opts.compile, base.backend, **how)
    engine.options, engine.head = opts, head
    return engine


def shown(options: dict[str, Any]) -> dict[str, Any]:
    """Options as the JSON keeps them: file names without the folders of this machine."""
    return {k: Path(v).name if k in PATHS or str(v).endswith(".json") else v for k, v in options.items()}
