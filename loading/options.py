"""The options of `load`. Each is declared once, for the command lines, the benchmark and the Python API.

Importing this file imports no torch, so that `generate.py --help` answers at once. The functions that need torch import
it themselves. For the same reason some choices are listed here and in their rooms, and a test compares the two.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from decoding.params import SUGGESTED, SamplingParams
from support.errors import UsageError, at_least

if TYPE_CHECKING:
    from families.config import ModelConfig
    from weights.checkpoint import Checkpoint

DEMO = Path(__file__).resolve().parent.parent / "demo"
DRAFTERS = ("eagle", "ngram", "lookahead", "draft", "medusa")
FULL = ("refuse", "drop-oldest")  # what happens to a chat that does not fit into the context
VERIFY = ("match", "multi-round", "multi-round-replacement")
DTYPES = ("float32", "bfloat16", "float16", "float64")
KV_CACHES = ("auto", "model", "float16", "bfloat16", "int8")
QUANTS = ("int8", "int4")
KERNELS = ("auto", "triton", "cpu", "reference")
HEAD_QUANTS = ("auto", "none")
ACTIVATIONS = ("int8", "float")
TREES = "paper25, chain:K, dynamic:N,DEPTH,TOPK, FILE.json, medusa:vicuna_7b_stage2, medusa:mc_sim_7b_63"
NGRAM_NODES = 16  # the deepest tree that is allowed
LEAST_WINDOW = 16  # of a draft head
NO_HEAD = "none"  # what --eagle says where no head shall draft
# What `--compile` does. torch.compile rounds in its own way, so on a GPU only "graph" promises plain decoding's tokens.
COMPILE_MODES = ("graph", "blocks", "reduce-overhead")


def option(help: str, default: Any = None, choices: Iterable[str] = (), **more: str | int) -> Any:
    """A field of LoadOptions.

    more: `metavar`; `least`, the smallest number that is allowed, which makes the option a number; `most`.
    """
    about = {"help": help, "choices": tuple(choices), "metavar": "N" if "least" in more else None}
    return field(default=default, metadata=about | {"least": None, "most": None} | more)


@dataclass(frozen=True)
class LoadOptions:
    """What `load` builds. Everything about one request is in SamplingParams instead.

    None stands for a default that depends on the model and the machine; `loading.drafting.resolve` decides it. A Path is
    for callers of `load`, which makes a text of it.
    """

    checkpoint: str | Path = option(
        "model folder, .gguf file, or org/name in the Hugging Face cache (default: the demo)", str(DEMO), metavar="DIR"
    )
    _: KW_ONLY
    sha256: str | None = option(
        "first compare the files with SHA256SUMS (stored), or the weights file with a digest", metavar="stored|HEX"
    )
    slots: int | None = option(
        "sequences decoded together; 0: 8, or what memory holds (default: 1; for a server or --input: 0)", least=0
    )
    ctx: int | None = option("context to allocate (default: the model's, at most 8192)", least=2)
    pool: int | None = option(
        "tokens of all slots together that the KV cache has room for; a request whose prompt and answer do not fit waits "
        "(default: --ctx for each slot, or less where memory holds no more)", metavar="TOKENS", least=2,
    )  # fmt: skip
    device: str | None = option("default: the GPU if there is one", choices=("cuda", "cpu"))
    dtype: str | None = option("default: the checkpoint's; float32 on a CPU", choices=DTYPES)
    quant: str | None = option("round float weights at load, as quantize.py does without options", choices=QUANTS)
    lora: str | Path | tuple[str, ...] | None = option(
        "LoRA adapter of the model in PEFT's layout, a folder; a draft head of the model goes on drafting. A server "
        "takes several, each DIR or NAME=DIR, and a request's model names one of them or the base", metavar="DIR",
    )  # fmt: skip
    threads: int | None = option(  # far more would end the process where OpenMP starts them
        "CPU threads (default: OMP_NUM_THREADS, or else one for each physical core)", least=1, most=4096
    )
    tp: int | None = option(
        "tensor parallel: split the model among N processes, each with a GPU (or a share of the CPU) of its own "
        "(default: as many as torchrun started, or 1)", least=1,
    )  # fmt: skip
    compile: bool = option(
        "on a GPU capture the step as one CUDA graph; on a CPU compile one block for all layers (the C++ kernels are "
        "compiled already)", False,
    )  # fmt: skip
    compile_mode: str = option(
        "graph: as above; torch.compile is there for comparison, and may give other tokens, since it rounds in its own "
        "way; blocks: one block for all layers; reduce-overhead: the whole step", "graph", COMPILE_MODES,
    )  # fmt: skip
    activations: str = option(
        "float: the CPU kernels do not round the activations of int4 and int8 layers; slower", "int8", ACTIVATIONS
    )
    kernels: str = option(
        "implementation of the operations (default: auto, which is triton on a GPU and cpu on a CPU); cpu: C++ kernels, "
        "which round the activations of int4 and int8 layers to int8", "auto", KERNELS,
    )  # fmt: skip
    check: bool = option("on a GPU compare the kernels with their references, as a model's first use does", False)
    kv: str = option(
        "dtype of the KV cache. model is that of the activations, float32 on a CPU; float16, bfloat16 (CPU kernels only) "
        "and int8: smaller; auto: for checkpoints of at most 16 bits with the CPU kernels bfloat16, or float16 where the "
        "processor does not multiply bfloat16 or --activations is float; else model", "auto", KV_CACHES,
    )  # fmt: skip
    eagle: str | Path | None = option(
        "draft head (EAGLE-1/2/3, DFlash, DFlash2, DSpark, JetSpec, Gemma 4's assistant): folder, .safetensors, .bin, "
        ".pth, .gguf, or org/name in the Hugging Face cache; mtp: the model's own MTP layer (default if there is one); "
        "none: no head",
        metavar="HEAD",
    )  # fmt: skip
    head_quant: str = option(
        "auto: round the float linears of a quantized model's draft head to int8; none: leave them", "auto", HEAD_QUANTS,
    )  # fmt: skip
    eagle_config: tuple[str, ...] = option("value for a head without config.json (repeatable)", (), metavar="KEY=VALUE")
    drafter: str = option(
        "default: what --eagle, --draft-checkpoint or --medusa selects; ngram and lookahead need no file", "", DRAFTERS
    )
    draft_checkpoint: str | Path | None = option("draft with a small LLM of the same vocabulary", metavar="DIR")
    medusa: str | Path | None = option("Medusa heads: medusa_lm_head.pt, .safetensors, or their folder", metavar="FILE")
    ngram_nodes: int | None = option(
        "add up to K n-gram nodes to the tree; with a pruned tree, they replace the tree when the text repeats itself "
        f"(default: {NGRAM_NODES} where --prune has its default, else 0)", metavar="K", least=0,
    )  # fmt: skip
    # from Python also a tuple: one static tree for each sequence of the batch
    tree: str | tuple[str, ...] | None = option(
        f"auto (tuned by scripts.tune_tree), {TREES} (default: paper25; on a GPU a dynamic tree)"
    )
    prune: int | None = option(
        "skip nodes of a head's tree whose acceptance probability is below PERCENT; needs the C++ CPU kernels "
        "(default: from the measured cost of a node without --tree, else 0)", metavar="PERCENT", least=0, most=99,
    )  # fmt: skip
    draft_window: str | int = option(
        "a draft head attends to the last N tokens, and keeps no others; auto: what the head was trained or measured "
        "with, else an eighth of the positions that it states; full: the whole text", "auto", metavar="N|auto|full",
    )  # fmt: skip
    draft_vocab: int = option("EAGLE-1/2: draft only the K most frequent tokens", 0, metavar="K", least=0)
    draft_vocab_text: str | Path | None = option("rank tokens by this text, not by the tokenizer alone", metavar="FILE")
    draft_noise: bool = option("off: draft without the target's noise (default: on)", True, ("on", "off"))
    verify: str = option("which drafted tokens are accepted (default: match)", "match", VERIFY)
    eagle_always: bool = option(
        "keep drafting where plain decoding is faster (default: fall back to plain steps, and try again later)", False
    )

    @property
    def drafter_kind(self) -> str:
        """The drafter that the options ask for: one of DRAFTERS, or "" for plain decoding. UsageError if they differ."""
        flags = {"eagle": "--eagle HEAD", "draft": "--draft-checkpoint DIR", "medusa": "--medusa FILE"}
        head = None if self.eagle == NO_HEAD else self.eagle
        files = {"eagle": head, "draft": self.draft_checkpoint, "medusa": self.medusa}
        given = [kind for kind, file in files.items() if file]
        kind = self.drafter or (given[0] if given else "")
        for extra in (k for k in given if k != kind):
            raise UsageError(f"{flags[extra]} does not go with the drafter {kind}; give one of them.")
        if kind in flags and not given:
            raise UsageError(f"--drafter {kind} needs {flags[kind]}.")
        if kind not in ("eagle", "draft", "") and self.verify != "match":
            raise UsageError(f"--verify {self.verify} needs a draft distribution; {kind} has none.")
        if self.ngram_nodes and kind in ("", "ngram", "lookahead"):
            raise UsageError("--ngram-nodes adds to another drafter's tree; n-grams alone: --drafter ngram.")
        return kind

    @property
    def place(self) -> str:
        """The kind of device: "cuda" or "cpu"."""
        from support.machine import default_device

        return self.device or default_device()

    @property
    def kernel_mode(self) -> str:
        """`kernels`, where auto means cpu if the C++ kernels can run: they know float32 alone.

        They are compiled already, so `compile` alone does not ask for others. A `compile_mode` of its own does.
        """
        import kernels

        on_cpu = self.place == "cpu" and self.dtype in (None, "float32")
        on_cpu = on_cpu and not (self.compile and self.compile_mode != "graph")
        return "cpu" if self.kernels == "auto" and on_cpu and not kernels.cpu_problem() else self.kernels

    @property
    def on_triton(self) -> bool:
        """Whether linear layers run on the Triton kernels."""
        import kernels

        on_gpu = self.kernels == "auto" and self.place == "cuda"
        return (self.kernels == "triton" or on_gpu) and kernels.triton is not None and self.dtype != "float64"

    @property
    def cache_allows_drafts(self) -> bool:
        """Whether drafts leave the text as it is with this KV cache. int8 keys are rounded alike in a step over many
        tokens by the CPU kernels alone."""
        return self.kv != "int8" or self.kernel_mode == "cpu"

    @property
    def can_prune(self) -> bool:
        """Whether nodes of the tree can be left out while it is drafted."""
        from weights.heads import MTP

        head = self.drafter_kind == "eagle" and self.eagle != MTP
        return head and self.verify == "match" and self.kernel_mode == "cpu"

    @property
    def trees(self) -> tuple[str, ...]:
        """The names of the trees: one, or one for each sequence of the batch."""
        return ("paper25",) if self.tree is None else (self.tree,) if isinstance(self.tree, str) else tuple(self.tree)

    @property
    def window(self) -> int:
        """The tokens that a draft head attends to, once that is decided; 0: the whole text."""
        return int(self.draft_window) if str(self.draft_window).isdecimal() else 0

    @property
    def adapters(self) -> tuple[str, ...]:
        """The LoRA adapters, each as DIR or NAME=DIR."""
        return (self.lora,) if isinstance(self.lora, str) else self.lora or ()

    def validate(self) -> None:
        """Raise UsageError for an option that is wrong or would be ignored, without reading any file."""
        import torch

        for f in fields(self):
            _check_value(f, vars(self)[f.name])
        if not self.trees:
            raise UsageError("--tree is (); allowed: the name of a tree, or a tuple of one name per sequence.")
        kind = self.drafter_kind
        window = str(self.draft_window)
        if window not in ("auto", "full") and not (window.isdecimal() and LEAST_WINDOW <= int(window)):
            raise UsageError(f"--draft-window is {window!r:.40}; allowed: auto, full, {LEAST_WINDOW} or more.")
        about_heads = {
            "--draft-window": window != "auto" and kind != "eagle",
            "--eagle-config": self.eagle_config and kind != "eagle",
            "--draft-vocab": self.draft_vocab and kind != "eagle",
            "--verify": self.verify != "match" and not kind,
            "--draft-noise off": not self.draft_noise and not kind,
        }
        for words in (words for words, ignored in about_heads.items() if ignored):
            raise UsageError(f"{words} is about a draft head, and none was given (--eagle HEAD).")
        if kind and not self.cache_allows_drafts:
            why = "--kv int8 rounds the cache of a step over many tokens differently, so drafts could change the text"
            raise UsageError(f"{why}. Leave out --kv int8, or the drafter ({kind}).")
        if self.kv in ("float16", "bfloat16") and self.kernel_mode != "cpu":
            raise UsageError(
                f"--kv {self.kv} is about the CPU kernels, and others run here; allowed: auto, model, int8."
            )
        if any("=" not in item for item in self.eagle_config):
            raise UsageError("--eagle-config takes KEY=VALUE, like rope_theta=500000.")
        if self.prune and not self.can_prune:
            raise UsageError("--prune needs --eagle, --verify match and the C++ kernels of CPUs; leave it out.")
        if self.draft_vocab_text and not self.draft_vocab:
            raise UsageError("--draft-vocab-text needs --draft-vocab K, the number of tokens to keep.")
        if self.compile_mode != "graph" and not self.compile:
            raise UsageError("--compile-mode says how to compile, and nothing is compiled; add --compile.")
        if self.kernels == "cpu" and self.compile and self.compile_mode != "graph":
            raise UsageError("--kernels cpu runs C++ kernels, which are not compiled; leave --compile-mode out.")
        if self.activations != "int8" and self.kernel_mode != "cpu":
            raise UsageError("--activations float is about the CPU kernels, and others run here. Leave it out.")
        if self.lora and self.tp:
            raise UsageError("--tp splits no LoRA adapter yet; leave out --tp, or merge the adapter with PEFT.")
        if self.threads and self.place != "cpu":
            raise UsageError("--threads is about a CPU, and this runs on a GPU; leave it out, or add --device cpu.")
        if self.check and not (self.on_triton and self.place == "cuda"):
            raise UsageError("--check is about the kernels of a GPU, and none of them run here; leave it out.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("--device cuda, but this torch sees no CUDA device. Use --device cpu.")

    def with_defaults(self, config: ModelConfig) -> LoadOptions:
        """The options with device, dtype, ctx, kernels and whether anything is compiled decided for a model."""
        device = self.place
        # half precision is slow on CPUs without native support for it
        dtype = self.dtype or ("float32" if device == "cpu" else config.dtype)
        # a context longer than the original one changes every frequency of LongRoPE
        longest = config.rope.original_max_positions if config.rope.kind == "longrope" else 8192
        ctx = self.ctx or min(config.max_positions, longest)
        mode = self.kernel_mode
        slots = 1 if self.slots is None else self.slots
        compiles = self.compile and mode != "cpu"
        kv = self.kv
        if kv == "auto":
            kv = self._smallest_cache(config) if mode == "cpu" and not self.dtype else "model"
        return replace(self, device=device, dtype=dtype, ctx=ctx, kernels=mode, compile=compiles, slots=slots, kv=kv)

    def _smallest_cache(self, config: ModelConfig) -> str:
        """The dtype of the cache that costs the CPU kernels the least time and is no narrower than the checkpoint's."""
        import kernels

        dims = [head_dim for _, head_dim in config.kv_layers]
        if config.dtype not in ("bfloat16", "float16") or any(head_dim % 16 for head_dim in dims):
            return "model"
        quick = self.activations == "int8" and all(kernels.multiplies_bfloat16(head_dim) for head_dim in dims)
        return "bfloat16" if quick else "float16"

    def open_checkpoint(self, draft: bool = False) -> Checkpoint:
        """The checkpoint, or the draft LLM's, with what the options say about reading its weights."""
        from weights.checkpoint import Checkpoint

        place = self.draft_checkpoint if draft else self.checkpoint
        layout = "tiles" if self.kernel_mode == "cpu" else "panels" if self.on_triton else ""
        checkpoint = Checkpoint.open(place, layout)
        checkpoint = checkpoint.rounded(self.quant) if self.quant and not draft else checkpoint
        return checkpoint.adapted(*self.adapters) if self.adapters and not draft else checkpoint


@dataclass(frozen=True, kw_only=True)
class LoadArguments(LoadOptions):
    """The arguments of `load`, for type checkers and editors."""

    progress: Callable[[int, int, str], None] | None = None
    report: Callable[[str], None] | None = None


Given = ParamSpec("Given")
Made = TypeVar("Made")


def _takes(declared: Callable[Given, Any]) -> Callable[[Callable[..., Made]], Callable[Given, Made]]:
    return lambda function: function


takes_options = _takes(LoadArguments)  # a decorator: type checkers then know the arguments of a function like `load`


def check_names(options: Iterable[str]) -> None:
    """Raise TypeError for an argument of `load` that is no option, with the nearest option."""
    known = [f.name for f in fields(LoadOptions) if f.name != "checkpoint"]
    for name in (name for name in options if name not in known):
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(known)}."
        raise TypeError(f"load has no option {name!r:.60}; {hint}")


def flag(name: str) -> str:
    """The option of the command line for a field, like --draft-vocab for draft_vocab."""
    return "--" + name.replace("_", "-")


# Of each type that LoadOptions declares: what is allowed, in words.
_TYPES = {
    "None": ((type(None),), "None"),
    "bool": ((bool,), "True or False"),
    "int": ((int,), "an integer"),
    "str": ((str,), "a text"),
    "Path": ((os.PathLike,), "a path"),
    "tuple[str, ...]": ((tuple,), "a tuple of texts"),
}


def _check_value(f: Field, value: Any) -> None:
    """Raise UsageError for a value of a field of LoadOptions that is not of its declared type, or out of range."""
    kinds, choices = f.type.split(" | "), f.metadata["choices"]
    least, most = f.metadata["least"], f.metadata["most"]
    allowed = " or ".join(_TYPES[kind][1] for kind in kinds if kind != "None")
    fits = any(isinstance(value, _TYPES[kind][0]) for kind in kinds)
    fits &= not isinstance(value, bool) or "bool" in kinds  # a bool is an int, too
    fits &= not isinstance(value, tuple) or all(isinstance(text, str) for text in value)
    if least is not None:
        allowed = f"{least} or more" if most is None else f"{least} to {most}"
        fits = fits and (value is None or least <= value <= (most or value))
    elif choices and "bool" not in kinds:
        allowed = ", ".join(choices)
        fits = fits and value in (f.default, *choices)
    if not fits:
        raise UsageError(f"{flag(f.name)} is {value!r:.40}; allowed: {allowed}.")


def _declared(names: Iterable[str]) -> list[Field]:
    """The fields of LoadOptions with these names, all if there are none."""
    return [f for f in fields(LoadOptions) if not names or f.name in names]


def add_options(parser: argparse.ArgumentParser, *names: str, **defaults: Any) -> None:
    """Add the arguments of these options (default: all) to a command line. `options_from` reads them."""
    model, drafting = map(parser.add_argument_group, ("model", "speculative decoding"))
    known = [f.name for f in fields(LoadOptions)]
    for f in _declared(names):
        about, default = f.metadata, defaults.get(f.name, f.default)
        says = "default" in about["help"] or isinstance(default, bool | tuple) or default in (None, "")
        words = {"help": about["help"] if says else f"{about['help']} (default: {default})", "default": default}
        if f.default is False:
            words |= {"action": "store_true"}
        else:
            words |= {"choices": about["choices"] or None, "metavar": about["metavar"]}
        if f.default is True:
            words |= {"default": "on" if default else "off"}
        elif isinstance(default, tuple):
            words |= {"action": "append", "default": list(default)}
        elif about["least"] is not None:
            words |= {"type": at_least(about["least"])}
        group = model if known.index(f.name) < known.index("eagle") else drafting  # the first one of drafting
        group.add_argument(flag(f.name), **words)


def add_replicas(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of replicas, which `serving.replicas.load_engine` reads."""
    add = parser.add_argument_group("replicas").add_argument
    add("--replicas", type=at_least(1), metavar="N",
        help="N engines that share the requests, as actors of Ray, each with its GPU or share of the CPU")  # fmt: skip
    add("--ray-address", metavar="ADDRESS", help="a Ray that runs, as HOST:PORT or auto (default: one of our own)")


def options_from(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """These options (default: all) of parsed arguments, as keyword arguments of LoadOptions and `load`."""
    given = {}
    for f in _declared(names):
        value = vars(args)[f.name]
        if f.default is True:
            value = value == "on"
        given[f.name] = tuple(value) if isinstance(value, list) else value
    return given


def read_option(name: str, text: str, whose: str = "") -> Any:
    """The value of an option from text, as an arm of the benchmark gives it. Raises UsageError with what is allowed.

    whose: how the message begins.
    """
    (f,) = _declared([name])
    if isinstance(f.default, bool):
        if text not in ("on", "off"):
            raise UsageError(f"{whose}{name}={text!r:.40}; allowed: on, off.")
        return text == "on"
    if f.metadata["least"] is not None:
        if not text.isdecimal():
            raise UsageError(f"{whose}{name}={text!r:.40}; allowed: an integer.")
        return int(text)
    return tuple(text.split(",")) if isinstance(f.default, tuple) else text


SETTINGS = {  # field of SamplingParams -> what --help says
    "temperature": "0 always takes the likeliest token, 1 samples from the model's own distribution",
    "top_k": "sample from the K likeliest tokens; 0: off",
    "top_p": "sample from the likeliest tokens that hold this share of the probability; 1: off",
    "min_p": "sample from tokens with at least this fraction of the highest probability; 0: off",
    "repetition_penalty": "above 1: tokens of the prompt and of the text become less likely; 1: off",
    "presence_penalty": "subtracted from the logit of every token that the text has already; 0: off",
    "frequency_penalty": "subtracted once for each time the token occurs in the text; 0: off",
    "seed": "the same seed gives the same text",
    "max_new_tokens": "the most tokens to generate",
    "stop_ids": "stop ids instead of the model's own",
    "stop": "stop string (repeatable)",
    "logit_bias": "added to the logit of this token id, from -100 (never) to 100 (always) (repeatable)",
    "min_new_tokens": "so many tokens come before a stop id ends the text",
    "grammar": "the text follows this grammar, in the Lark syntax of llguidance",
    "logprobs": "with --json: the log-probability of every token, and of the N likeliest ones",
    "prompt_logprobs": "with --json: the same for the prompt",
}


def parse_ids(text: str) -> tuple[int, ...]:
    """Comma-separated ids of a command line."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.60}: expected comma-separated integers, like 5,17,9.") from None


def _bias(text: str) -> tuple[int, float]:
    """A token and its bias, from ID=X on a command line."""
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.60}: expected a token id and a number, like 13=-100.") from None


# How a command line reads the settings that are not one number each.
_READ: dict[str, dict[str, Any]] = {
    "grammar": {"metavar": "TEXT"},
    "stop": {"metavar": "TEXT", "action": "append"},
    "stop_ids": {"metavar": "2,13", "type": parse_ids},
    "logit_bias": {"metavar": "ID=X", "action": "append", "type": _bias},
}


def add_sampling(parser: argparse.ArgumentParser, *names: str, of_model: bool = False, **defaults: Any) -> None:
    """Add the arguments of SamplingParams (default: all) to a command line. `sampling_from` reads them.

    of_model: leave out of the parsed arguments what the user did not give, because the model may suggest it.
    """
    group = parser.add_argument_group("sampling")
    for f in (f for f in fields(SamplingParams) if f.name in (names or SETTINGS)):
        default, text, words = defaults.get(f.name, f.default), SETTINGS[f.name], _READ.get(f.name)
        if words is None:
            whose = "the model's, or else " if of_model and f.name in SUGGESTED else ""
            text = f"{text} (default: {whose}{default})"
            kind = int if f.default is None else type(f.default)
            words = {"type": kind, "metavar": "N" if kind is int else "X"}
        default = list(default) if isinstance(default, tuple) else default
        group.add_argument(flag(f.name), help=text, **words, default=argparse.SUPPRESS if of_model else default)


def settings_given(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams that parsed arguments hold."""
    return {f.name: vars(args)[f.name] for f in fields(SamplingParams) if f.name in vars(args)}


def sampling_from(args: argparse.Namespace) -> SamplingParams:
    """The SamplingParams of parsed arguments."""
    return SamplingParams(**settings_given(args))
