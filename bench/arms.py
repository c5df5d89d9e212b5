"""The arms of a benchmark: what decodes a prompt, what it promises, and how it is built from options.

All engines of ours share one copy of the weights. The first arm is plain decoding, and every other one is compared with
it. An arm promises the same tokens as plain decoding, the same distribution, or nothing (another engine, `bench.peers`).
"""

import argparse
import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from bench.random_models import random_head
from decoding.params import SamplingParams
from drafters.medusa import MEDUSA_FILES
from engine.engine import Engine, EngineConfig
from engine.ranks import RankedEngine
from engine.results import GenerationResult
from families.config import ModelConfig
from loading import drafting
from loading.options import LoadOptions, read_option
from support.errors import UsageError
from support.machine import synchronize
from weights.block_heads import BlockConfig, read_head
from weights.checkpoint import Checkpoint
from weights.files import local_path, read_entries
from weights.heads import MTP

SAME_TOKENS, SAME_DISTRIBUTION, OTHER_ENGINE = "same tokens", "same distribution", "other engine"
NO_STOP = (2**31 - 1,)  # no token has this id, so decoding goes on to the length limit
# Options of the command that all arms share, and those that name files (looked up in the checkpoint's folder too).
SHARED = (
    "checkpoint", "lora", "compile", "compile_mode", "kernels", "device", "dtype", "quant", "threads", "ctx", "tp",
)  # fmt: skip
PATHS = ("eagle", "draft_checkpoint", "medusa")
DYNAMIC = "dynamic:16,4,4"  # the default dynamic tree on a CPU, where no row is free
MTP_CHAINS = ("chain:1", "chain:2", "chain:3", "chain:4")  # what other programs draft with the layer that models bring
DYNAMIC_GPU = "dynamic:32,6,8"
Spec = tuple[str, dict[str, str]]  # the name of an arm, and its options as text
RULES = {"": {}, "top-k drafts": {"draft_noise": "off"}, "multi-round": {"verify": "multi-round"}}
SUITES = {  # what every head is measured with: its trees, and the ways to draft and verify
    "paper": (("paper25", "chain:5", DYNAMIC), {rule: RULES[rule] for rule in ("", "multi-round")}),
    "acceptance": (("chain:5", "paper25", "dynamic:26,5,8", "dynamic:60,7,10"), RULES),
}


# ---- what runs --------------------------------------------------------------------------------------------


# When each token of each request came that ran together with others, in seconds after the start.
Arrivals = list[list[float]]
# Decodes prompts together, from empty caches.
Together = Callable[[Sequence[list[int]], SamplingParams], Arrivals]


class Sample(NamedTuple):
    """What one run gave. ids and steps are as the engine returned them; `counted` truncates at the first stop."""

    token_ids: list[int]
    ttft_seconds: float
    decode_seconds: float
    tokens_per_step: list[int] | None = None  # ids per target forward after the prompt's; None: unknown
    text: str = ""


def timed_request(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, reuse: bool = False
) -> tuple[list[GenerationResult], Arrivals]:
    """Decode prompts together, from empty caches unless those of the request before may be reused."""
    if not reuse:
        engine.forget()
    synchronize(engine.model.device)
    stream = engine.generate_batch(prompts, params)
    arrivals: Arrivals = [[] for _ in prompts]
    started = time.perf_counter()
    for chunk in stream:
        arrivals[chunk.row] += [time.perf_counter() - started] * len(chunk.token_ids)
    return stream.results, arrivals


@dataclass
class Arm:
    """What a benchmark runs: an Engine of ours, or one of `bench.peers`, which has none. `options`: how it was built."""

    name: str
    label: str
    options: dict[str, Any]
    engine: Engine | None = None
    reuse: bool = False  # whether a run may go on from the text of the run before

    def run(self, prompt: list[int], params: SamplingParams) -> Sample:
        """One request, which reuses nothing of the requests before unless the arm may."""
        raise NotImplementedError

    def together(self, clients: int, tokens: int) -> Together | None:
        """What decodes so many prompts together, with a slot for each; None if it cannot. tokens: that each needs."""
        return None


class EngineArm(Arm):
    """An Engine of ours."""

    def run(self, prompt: list[int], params: SamplingParams) -> Sample:
        (result,), (times,) = timed_request(self.engine, [prompt], params, self.reuse)
        if result.cached_tokens and not self.reuse:
            raise RuntimeError("a run reused cached tokens of another run; please report this.")
        steps = [len(ids) for ids in result.tokens_per_step]
        return Sample(result.token_ids, times[0], times[-1] - times[0], steps, result.text)

    def together(self, clients: int, tokens: int) -> Together:
        # plain steps replace drafted ones where these do not pay, as for a user
        engine = build_engine(self.engine, {"eagle_always": False} | self.options | {"slots": clients}, tokens)
        return lambda prompts, params: timed_request(engine, prompts, params)[1]


# ---- from options to arms ---------------------------------------------------------------------------------


def parse_arm(text: str) -> Spec:
    """NAME=KEY=VALUE;KEY=VALUE as (name, options). `plain=` is plain decoding."""
    name, separator, rest = text.partition("=")
    pairs = [item.partition("=") for item in rest.split(";") if item.strip()]
    if not name.strip() or not separator or any(not value for _, _, value in pairs):
        raise UsageError(f"--arm {text!r:.80}: expected NAME=KEY=VALUE;KEY=VALUE, like e3=eagle=eagle3;tree=chain:5.")
    return name.strip(), {key.strip(): value.strip() for key, _, value in pairs}


def arm_options(name: str, given: dict[str, str], directory: Path | None) -> tuple[str, dict[str, Any]]:
    """Label and typed LoadOptions of an arm's text options. Raises UsageError for what an arm cannot set."""
    common = (*SHARED, "slots", "activations")
    known = [f.name for f in fields(LoadOptions) if f.name not in common]
    options: dict[str, Any] = {}
    for key, text in ((k.replace("-", "_"), text) for k, text in given.items()):
        if key not in known:
            why = "is the same for all arms" if key in common else "is unknown"
            raise UsageError(f"--arm {name}: option {key} {why}; allowed: {', '.join(known)}.")
        if key in PATHS and directory and not Path(text).exists() and (directory / text).exists():
            text = str(directory / text)
        options[key] = read_option(key, text, f"--arm {name}: ")
    return SAME_TOKENS if options.get("verify", "match") == "match" else SAME_DISTRIBUTION, options


def default_arms(directory: Path, config: ModelConfig, cuda: bool) -> list[Spec]:
    """Plain decoding, n-grams, and every drafter that lies in a folder of the checkpoint; heads with two trees.

    Beside a GGUF file none is looked for, because its folder often holds files of other models.
    """
    heads: list[Spec] = [("plain", {})]
    others: list[Spec] = [("n-gram", {"drafter": "ngram", "tree": "chain:15" if cuda else "chain:7"})]
    for folder in sorted(local_path(directory).glob("*/")):
        name = folder.name
        if medusa := [folder / file for file in MEDUSA_FILES if (folder / file).is_file()]:
            count = len({tensor.split(".")[0] for tensor in read_entries(medusa[:1])})
            others.append((name, {"medusa": name, "tree": "paper25" if count >= 5 else f"chain:{count}"}))
            continue
        try:
            head = read_head(folder, config).config
        except ValueError:
            with contextlib.suppress(ValueError):
                Checkpoint.open(folder)
                others.append((f"{name} LLM", {"draft_checkpoint": name, "tree": "chain:4"}))
            continue
        if isinstance(head, BlockConfig):
            trees = {"tree": drafting.block_tree(head), "chain": f"chain:{head.depth}"}
        elif cuda:
            trees = {"paper25": "paper25", "dynamic": DYNAMIC_GPU}
        else:
            trees = {"paper25": "paper25", "dynamic": DYNAMIC, "chain": "chain:3"}
        heads += [(f"{name} {kind}", {"eagle": name, "tree": tree}) for kind, tree in trees.items()]
    return heads + others


def suite_arms(suite: str, heads: Sequence[str], found: Sequence[Spec]) -> list[Spec]:
    """Plain decoding, then the arms of a suite of `SUITES` for these heads.

    found: the arms of what lies in the checkpoint's folders. Their heads are taken if none are given, and the suite
    `paper` has their other drafters, too. Multi-round verification needs a static tree.
    """
    trees, rules = SUITES[suite]
    heads = heads or list(dict.fromkeys(given["eagle"] for _, given in found if "eagle" in given))
    arms: list[Spec] = [("plain", {})]
    for head, tree, (rule, more) in itertools.product(heads, trees, rules.items()):
        if "verify" not in more or not tree.startswith("dynamic"):
            arms.append((f"{Path(head).name} {tree} {rule}".strip(), {"eagle": head, "tree": tree, **more}))
    if suite == "paper":
        arms += [(name, given) for name, given in found if given and "eagle" not in given]
        arms.append(("lookahead", {"drafter": "lookahead"}))
    return arms


def build_engine(base: Engine, options: dict[str, Any], ctx: int) -> Engine:
    """An Engine for an arm's options on the weights, tokenizer and backend of `base`, so nothing is loaded twice.

    A head that `base` has is used as it is. Where the options name no tree, it is the one that `generate.py` takes by
    itself.
    """
    # tau is measured, so speculation goes on where it does not pay, unless an arm is about falling back
    own = dict.fromkeys(("pool", "tree", "prune", "ngram_nodes")) | {"ctx": ctx, "eagle_always": True}
    own["draft_window"] = "auto"
    opts, model = replace(base.options, **own | options), base.model
    files = drafting.DraftFiles()
    if base.head is not None and opts.eagle == base.options.eagle:
        head = base.head
    elif opts.drafter_kind == "eagle" and opts.eagle.startswith("random:"):
        head = random_head(model, opts.eagle.removeprefix("random:"), model.quant)
    else:
        files = drafting.read_drafter(opts, model.config, base.tokenizer)
        head = drafting.build_head(files.head, model, opts, base.tokenizer) if files.head else None
    if opts.tree == "auto":
        opts = drafting.resolve(opts, opts.open_checkpoint(), files.head)
    shape = head.config if head else None
    opts = drafting.with_tree(drafting.with_window(opts, shape), model.quant, shape)
    drafter = drafting.build_drafter(model, opts, base.backend, head, files.model)
    return base.sibling(drafter, EngineConfig.of(opts, base.backend, head))


def arms_of(args: argparse.Namespace, base: Engine, ctx: int) -> list[Arm]:
    """Plain decoding, then the arms that were asked for or found.

    `args` holds --checkpoint, --shape, --arm, --suite, --eagle and --only. Raises UsageError for names that are unknown
    or repeated.
    """
    directory = None if args.shape else Path(args.checkpoint)
    cuda = base.model.device.type == "cuda"
    dynamic = DYNAMIC_GPU if cuda else DYNAMIC
    specs: list[Spec] = [("plain", {})]
    with_default = args.only or args.suite or not (args.arm or args.eagle)
    if with_default and args.shape:
        specs += [("eagle1 paper25", {"eagle": "random:1"}), ("eagle3 dynamic", {"eagle": "random:3", "tree": dynamic})]
    elif with_default:
        specs = default_arms(directory, base.model.config, cuda)
        if base.model.config.mtp:
            trees = *MTP_CHAINS, "paper25", dynamic
            specs[1:1] = [(f"mtp {tree}", {"eagle": MTP, "tree": tree}) for tree in trees]
        if args.suite:
            specs = suite_arms(args.suite, args.eagle, specs)
    if args.only:
        wanted = {name.strip() for name in args.only.split(",")}
        if unknown := wanted - {name for name, _ in specs}:
            raise UsageError(f"--only {', '.join(unknown)}: arms are {', '.join(n for n, _ in specs)}.")
        specs = [spec for spec in specs if spec[0] in wanted | {"plain"}]
    specs += map(parse_arm, args.arm)
    if not args.suite:
        specs += [(Path(head).name, {"eagle": head}) for head in args.eagle]
    names = [name for name, _ in specs]
    if len(set(names)) < len(names):
        raise UsageError(f"arm names must differ, and the first is always plain; got {', '.join(names)}.")
    arms: list[Arm] = []
    for name, given in specs:
        label, options = arm_options(name, given, directory)
        if base.options.eagle:  # the model's own head, which loads by itself
            options = {"eagle": None} | options
        if cuda and base.compiled:  # torch.compile rounds in its own way at each width
            label = SAME_DISTRIBUTION
        if isinstance(base, RankedEngine) and not options.get("eagle_always", True):
            raise UsageError(f"--arm {name}: with --tp an arm drafts in every step; leave eagle_always out.")
        arms.append(EngineArm(name, label, options, base.together(build_engine, options, ctx)))
    return arms


def shown(options: dict[str, Any]) -> dict[str, Any]:
    """Options as the JSON keeps them: file names without the folders of this machine."""
    return {k: Path(v).name if v and k in PATHS or str(v).endswith(".json") else v for k, v in options.items()}
