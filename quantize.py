"""Quantize a model to int8 or int4, and report the loss of quality.

    python quantize.py                                       # demo/ -> demo-int4/
    python quantize.py --checkpoint DIR --mode int4 --algorithm gptq

The weights are rounded to nearest or by GPTQ, one layer in memory at a time. An EAGLE head can be quantized along with
its target, or alone. GPTQ of a head needs the whole model in memory, because the head drafts for it.
`weights.quantized` describes the stored tensors.
"""

from support.interrupts import leave_at_once

if __name__ == "__main__":  # before the imports below, which take seconds
    leave_at_once()

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from decoding.params import SamplingParams
from engine.load import load
from families.config import ModelConfig
from loading.drafting import DraftHead, block_tree, kinds_of
from model import Transformer
from support.errors import Parser, UsageError, at_least, bad_files, is_out_of_memory, one_line, run_command
from support.files import clean_up, directory_written_whole, write_json
from support.machine import default_device, shapes_only, size_text
from support.progress import Progress, say
from support.texts import read_chats, read_texts, stdlib_texts, token_windows
from text.tokenizer import Tokenizer, load_tokenizer
from weights.assistant import check_written
from weights.block_heads import BlockConfig, read_head
from weights.checkpoint import Checkpoint
from weights.files import Entry, local_path
from weights.heads import EagleConfig, HeadFile, read_card, save_quantized
from weights.hf import build_model
from weights.quantized import ALGORITHMS, GROUPS, HEADS, MODES, QuantSpec, apply_spec_, largest_groups, set_tensor
from weights.quantizer import Windows, quantize_checkpoint
from weights.rounding import quantize_
from weights.shards import Shard

T = TypeVar("T")
HeadConfig: TypeAlias = EagleConfig | BlockConfig
WINDOW = 512  # tokens of a sequence
CALIBRATION_WINDOWS = 128
EVALUATION_WINDOWS = 16
BATCH = 4  # sequences of a calibration that run together
DRAFT_STEPS = 3  # that a head is calibrated for: its own outputs are inputs from the second on
BLOCK_STRIDE = 24  # tokens of a calibration text between two blocks
LM_HEAD_STRIDE = 8  # every so many rows of a calibration reach a head's LM head
TAU_PROMPTS = 12  # prompts on which a head's tau is measured


def quantize_head(
    path: str | Path, target: ModelConfig, spec: QuantSpec, running: Transformer | None = None,
    windows: Tensor | None = None,
) -> tuple[HeadConfig, dict[str, Tensor], dict[str, Any]]:  # fmt: skip
    """Round the head at `path`: by GPTQ along texts, int64 [W, T], where its target is running, otherwise to nearest.

    Returns (its config, the tensors, its part of the receipt). Raises ValueError if the head does not fit the target, and
    UsageError if the group size does not fit the head or the head is quantized already.
    """
    file = read_head(path, target)
    check_written(file.config)
    if any(name.endswith(".qweight") for name in file.tensors):
        raise UsageError(f"{path} is quantized already. Give the head from which it was made.")
    head = _without_values(file, running or target)
    for name, tensor in (file.floats() if running else file.tensors).items():
        set_tensor(head, name, tensor.to(running.device) if running else tensor)
    errors = _gptq_head(head, spec, running, windows) if running else quantize_(head, spec)
    tensors = {name: tensor.cpu() for name, tensor in head.state_dict().items()}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float32 and not name.endswith(".scales"):
            tensors[name] = tensor.half()
    sizes = [sum(tensor.nbytes for tensor in group.values()) for group in (file.tensors, tensors)]
    receipt = {"algorithm": spec.algorithm, "bytes_before": sizes[0], "bytes_after": sizes[1]}
    return file.config, tensors, receipt | {"worst": max(errors.values()), "kind": file.config.kind}


def _without_values(file: HeadFile, target: Transformer | ModelConfig) -> DraftHead:
    """The head of a file, bound to its target, whose tensors only have shapes."""
    with shapes_only():
        model = build_model(target) if isinstance(target, ModelConfig) else target
        return kinds_of(file.config)[0](file.config, model, file.tensors.get("draft_ids")).requires_grad_(False)


def _grouped(args: argparse.Namespace, spec: QuantSpec, module: nn.Module, what: str) -> QuantSpec:
    """The same with --group-size, or without it with the largest groups that fit the module, of which a line tells."""
    if args.group_size:
        return replace(spec, group_size=args.group_size)
    fitting = largest_groups(spec, module)
    if fitting != spec:
        reason = f"{spec.group_size} columns do not divide the inputs of all its matrices"
        say(f"note    {what}: int4 in groups of {fitting.group_size}, since {reason}")
    return fitting


@torch.no_grad()
def _gptq_head(head: DraftHead, spec: QuantSpec, model: Transformer, windows: Tensor) -> dict[str, float]:
    """Round a head in place while it drafts along the calibration text. Returns the relative errors by name."""
    half = model.dtype != torch.float32
    head.rotary.build(model.device, model.rotary.length)
    rows = []
    for tokens in windows.to(model.device).split(BATCH):
        hidden_states, taps = model.forward_train(tokens, head.config.taps)
        rows.append((tokens, hidden_states if taps is None else taps))

    def draft(tokens: Tensor, features: Tensor) -> None:
        if head.config.unshifted:  # row i is paired with tokens[i + 1]
            tokens = tokens.roll(1, 1)
        feature, memory = head.fuse(features[:, :-1]), []
        for step in range(DRAFT_STEPS):
            feature = head.forward_train(F.pad(tokens[:, 1 + step :], (0, step)), feature, step, memory)
            if head.lm_head is not None:  # the largest matrix, with few inputs: some of the rows are enough
                head.predict(feature[:, ::LM_HEAD_STRIDE])

    along = partial(head.draft_along, every=BLOCK_STRIDE) if isinstance(head.config, BlockConfig) else draft

    def feed() -> None:
        for tokens, features in rows:
            with torch.autocast(model.device.type, torch.bfloat16, enabled=half):
                along(tokens, features.float())

    return quantize_(head, spec, feed)


def measure_tau(directory: Path, head: str | Path, prompts: list[list[int]], device: str) -> float:
    """Mean number of tokens per greedy step of a model directory with an EAGLE head and the same tree everywhere."""
    config = read_head(head, Checkpoint.open(directory).config).config
    tree = block_tree(config) if isinstance(config, BlockConfig) else "paper25"
    engine = load(directory, eagle=str(head), tree=tree, eagle_always=True, device=device)
    steps: list[int] = []
    for ids in prompts:
        params = SamplingParams(max_new_tokens=min(128, engine.ctx - len(ids)))
        steps += map(len, engine.generate(ids, params).run()[0].tokens_per_step)
    return sum(steps) / max(1, len(steps))


def if_it_fits(work: Callable[[], T], notes: list[str], otherwise: str) -> T | None:
    """What `work` returns. Where memory runs out it is None, and the notes say what this means.

    A model is quantized because it is large, so it need not fit in memory.
    """
    try:
        return work()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        notes.append(f"{otherwise}, the model does not fit in memory: {one_line(error)}")
        return None


def show(receipt: dict[str, Any]) -> str:
    """The receipt for people."""
    r, spec = receipt, receipt["spec"]
    lines = [
        f"quality     {_quality(r)}   over {r['evaluation']['tokens']:,} tokens",
        f"on a CPU    activations are rounded to int8, too: {_quality(r['rounded_activations'])}",
        f"size        {_sizes(r)}   LM head {spec['lm_head']}",
        "worst       " + "   ".join(f"{w['name']} {w['relative_error']:.2%}" for w in r["worst_layers"]),
    ]
    if "head" in r:
        tau = ["not measured" if t is None else f"{t:.2f}" for t in (r["tau_before"], r["tau_after"])]
        lines.append(f"{_head_name(r['head'])}  {_sizes(r['head'])}   tau {tau[0]} -> {tau[1]}")
        lines += [f"note        {note}" for note in r["notes"]]
    memory = f"   peak memory {size_text(r['peak_memory_bytes'])}" if r["peak_memory_bytes"] else ""
    return "\n".join([*lines, f"took        {r['seconds']:.0f} s{memory}"])


def _head_name(receipt: dict[str, Any]) -> str:
    """What a head is called at the begin of a line. The generations of EAGLE are all called so."""
    return f"{receipt['kind'].partition('-')[0]} head".ljust(10)


def _quality(r: dict[str, Any]) -> str:
    change = r["perplexity_after"] / r["perplexity_before"] - 1
    perplexity = f"perplexity {r['perplexity_before']:.3f} -> {r['perplexity_after']:.3f} ({change:+.2%})"
    return f"{perplexity}   mean KL {r['mean_kl']:.4f} nats   same top token {r['top1_agreement']:.2%}"


def _sizes(receipt: dict[str, Any]) -> str:
    return f"{size_text(receipt['bytes_before'])} -> {size_text(receipt['bytes_after'])}"


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    demo = str(Path(__file__).parent / "demo")
    add("--checkpoint", default=demo, metavar="DIR", help="or org/name in the Hugging Face cache (default: the demo)")
    add("--mode", choices=MODES, default="int4")
    add("--out", metavar="DIR", help="default: CHECKPOINT-MODE")
    add("--force", action="store_true", help="replace an earlier result at --out")
    add(
        "--group-size",
        type=int,
        choices=GROUPS,
        help="columns that share an int4 scale (default: the largest that fits)",
    )
    add("--algorithm", choices=ALGORITHMS, default="rtn", help="gptq: slower, better; needs calibration text")
    add("--act-order", action="store_true", help="GPTQ: columns by activation energy")
    chats = "text or .jsonl for GPTQ; a chat model needs chats of scripts.make_chats (default: Python's library)"
    add("--calibration", metavar="FILE", help=chats)
    add("--tp", type=at_least(1), metavar="N", help="refuse what generate.py --tp N could not split")
    add("--lm-head", choices=HEADS, default="int8")
    add("--eagle", metavar="HEAD", help="quantize this EAGLE head too (to OUT/eagle) and compare tau")
    add("--eagle-mode", choices=MODES, help="of the head (default: --mode); int8 keeps more of tau")
    add("--head-only", action="store_true", help="write only the head, to --out; --checkpoint may be a .gguf file then")
    add("--refuse-kl", type=float, metavar="NATS", help="write nothing if the mean KL is higher")
    add("--eval-text", metavar="FILE", help="text of the receipt; default: held-out standard library modules")
    add("--device", choices=("cpu", "cuda"), default=default_device())
    add("--debug", action="store_true", help="full tracebacks")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code (2 usage, 3 bad file or refused, 4 memory, 5 internal, 130 Ctrl-C)."""
    args = build_parser().parse_args(argv)
    interrupted = "interrupted; the same command goes on from the layers already finished"

    def body() -> None:
        with bad_files():  # what is refused on the way is a bad file, unless it is an option
            print(run(args))

    return run_command(body, args.debug, interrupted)


def run(args: argparse.Namespace) -> str:
    """Do what the arguments ask for. Returns the receipt for people."""
    spec = QuantSpec(args.mode, max(GROUPS), args.algorithm, args.act_order, args.lm_head)
    head_spec = replace(spec, mode=args.eagle_mode or spec.mode)
    if args.head_only:
        return _head_alone(args, head_spec)
    given, directory = Path(args.checkpoint), local_path(args.checkpoint)
    place = given.parent if given.exists() else Path()  # beside the original, and not in the hub's cache
    out = Path(args.out) if args.out else place / f"{given.resolve().name}-{args.mode}"
    _check(args, directory, out)
    config = Checkpoint.open(directory).config
    spec = _grouped(args, spec, build_model(config), "the model")
    if args.eagle:
        head_spec = _grouped(args, head_spec, _without_values(read_head(args.eagle, config), config), "the head")
    if args.tp:
        check_split(config, spec, args.tp)
    windows = _texts(args, directory, config)
    nearest = replace(head_spec, algorithm="rtn", act_order=False)
    # Also where GPTQ rounds the head afterwards: a head that does not fit is refused before the work.
    head = quantize_head(args.eagle, config, nearest) if args.eagle else None

    def finish(unfinished: Path) -> dict[str, Any]:
        if head is None:
            return {}
        rounded, used, notes = head, nearest, []
        if head_spec.algorithm == "gptq":
            gptq = partial(_gptq_head_of, args, unfinished, config, head_spec, windows.calibration)
            if made := if_it_fits(gptq, notes, "the head was rounded to nearest"):
                rounded, used = made, head_spec
        head_config, tensors, receipt = rounded
        save_quantized(head_config, tensors, used, unfinished / "eagle")
        texts = windows.evaluation[:TAU_PROMPTS]
        prompts = [row[: min(64, texts.shape[1] // 2)].tolist() for row in texts]
        additions: dict[str, Any] = {"head": receipt}
        pairs = {"tau_before": (directory, args.eagle), "tau_after": (unfinished, unfinished / "eagle")}
        for key, (model, its_head) in pairs.items():
            tau = partial(measure_tau, model, its_head, prompts, args.device)
            additions[key] = if_it_fits(tau, notes, f"{key} was not measured")
        return additions | {"notes": notes}

    progress = Progress()

    def watch(done: int, total: int, what: str) -> None:
        progress.of(done, total, f"quantizing {done} of {total}  {what}")

    receipt = quantize_checkpoint(directory, out, spec, windows, args.device, watch, args.refuse_kl, finish)
    return show(receipt) + (f"\nranks       generate.py --tp {args.tp} can split it" if args.tp else "")


def check_split(config: ModelConfig, spec: QuantSpec, ranks: int) -> None:
    """Raise UsageError, naming the tensor, if `ranks` processes cannot share the model that `spec` makes of this one."""
    shard = Shard(0, ranks)
    shard.check(config)
    slots = apply_spec_(build_model(config), spec).state_dict()
    shard.entries({name: Entry(tuple(t.shape), t.dtype, "", t.detach) for name, t in slots.items()}, config, "--out")


def _head_alone(args: argparse.Namespace, spec: QuantSpec) -> str:
    """--head-only: write the rounded head, with the CARD.json of the original."""
    out = Path(args.out or "")
    if not args.eagle or not args.out:
        raise UsageError("--head-only needs --eagle HEAD and --out DIR.")
    _check_calibration(args)
    clean_up(out)
    if out.exists():
        raise UsageError(f"--out {out} exists; choose another name.")
    checkpoint = Checkpoint.open(local_path(args.checkpoint))
    target = checkpoint.config
    spec = _grouped(args, spec, _without_values(read_head(args.eagle, target), target), "the head")
    if spec.algorithm == "gptq":
        windows = _calibration(args, load_tokenizer(checkpoint.tokenizer_source, target.vocab_size), target)
        config, tensors, receipt = _gptq_head_of(args, args.checkpoint, target, spec, windows)
    else:
        config, tensors, receipt = quantize_head(args.eagle, target, spec)
    with directory_written_whole(out) as unfinished:
        save_quantized(config, tensors, spec, unfinished)
        if card := read_card(args.eagle):
            write_json(unfinished / "CARD.json", card | {"rounded": {"mode": spec.mode, **receipt}})
    worst = f"largest relative error of a matrix {receipt['worst']:.2%}"
    return f"{_head_name(receipt)}  {_sizes(receipt)}   {worst}   {out}"


def _gptq_head_of(
    args: argparse.Namespace, checkpoint: str | Path, target: ModelConfig, spec: QuantSpec, windows: Tensor
) -> tuple[HeadConfig, dict[str, Tensor], dict[str, Any]]:
    """`quantize_head` by GPTQ, with the model at `checkpoint` in memory."""
    engine = load(checkpoint, device=args.device)
    with engine.backend.active():
        return quantize_head(args.eagle, target, spec, engine.model, windows)


def _check(args: argparse.Namespace, directory: Path, out: Path) -> None:
    """Raise UsageError for options that cannot work, or ValueError for no model, before anything is read."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda, but this torch sees no CUDA device. Use --device cpu.")
    if not directory.is_dir():
        hint = " Make one of a .gguf file with python -m scripts.convert FILE.gguf DIR." if directory.is_file() else ""
        raise ValueError(f"--checkpoint {directory} is not a directory.{hint}")
    clean_up(out)
    if out.exists() and not (out / "receipt.json").is_file():
        raise UsageError(f"--out {out} exists and is not an earlier result; choose another name.")
    if out.exists() and not args.force:
        raise UsageError(f"--out {out} holds an earlier result; choose another name, or --force to replace it.")
    _check_calibration(args)
    if args.refuse_kl is not None and not args.refuse_kl > 0:
        raise UsageError(f"--refuse-kl is {args.refuse_kl}; it must be above 0 nats.")


def _check_calibration(args: argparse.Namespace) -> None:
    if args.calibration and args.algorithm != "gptq":
        raise UsageError("--calibration is text for GPTQ; add --algorithm gptq.")


def _texts(args: argparse.Namespace, directory: Path, config: ModelConfig) -> Windows:
    """Token windows to calibrate GPTQ with and to measure on."""
    tokenizer = load_tokenizer(directory, config.vocab_size)
    length = window_length(config)
    texts = read_texts(args.eval_text) if args.eval_text else stdlib_texts(held_out=True)
    evaluation = token_windows(texts, tokenizer, config.vocab_size, EVALUATION_WINDOWS, length + 1)
    calibration = _calibration(args, tokenizer, config) if args.algorithm == "gptq" else evaluation[:0, :-1]
    return Windows(calibration, evaluation)


def _calibration(args: argparse.Namespace, tokenizer: Tokenizer | None, config: ModelConfig) -> Tensor:
    """What GPTQ sees, int64 [W, T]: texts, or the conversations of a chat model as its template writes them."""
    file, chats = args.calibration, tokenizer is not None and bool(tokenizer.chat_template_source)
    texts: Iterable[str | list[int]]
    if file is None:
        advice = "; this is a chat model, and needs chats: --calibration FILE.jsonl (scripts.make_chats writes one)"
        say(f"note    GPTQ calibrates on Python's standard library{advice if chats else ''}")
        texts = stdlib_texts(held_out=False)
    elif chats and (conversations := read_chats(file)):
        texts = (tokenizer.encode_chat(messages, add_generation_prompt=False) for messages in conversations)
    else:
        texts = read_texts(file)
    return token_windows(texts, tokenizer, config.vocab_size, CALIBRATION_WINDOWS, window_length(config))


def window_length(config: ModelConfig) -> int:
    """Tokens of a sequence that the model can read with one more token behind it."""
    return min(WINDOW, config.max_positions - 1)


if __name__ == "__main__":
    sys.exit(main())
