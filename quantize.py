"""int8 and int4 weights: the stored format, quantized modules, RTN and GPTQ, published formats, receipts.

    python quantize.py                                       # demo/ -> demo-int4/, and what it cost in quality
    python quantize.py --checkpoint DIR --mode int4 --algorithm gptq

Stored plainly, whatever the GPU. int4: `qweight` uint8 [out, in/2] (byte j: column 2j low, 2j+1 high), `scales` fp16
[in/G, out], optional `zeros` uint8 [in/G, out] (absent: 8), optional `perm` int32 [in] (stored column j multiplies
input perm[j]); weight = (q - zero) * scale. int8: `qweight` int8 [out, in], `scales` fp32 [out]. Mixtral's experts
add a leading axis. Kernels get their own packing after loading. It does not know generation, trees or drafters.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_draft import EagleHead
from load import load
from model import ModelConfig
from support.errors import UsageError
from support.files import write_json
from support.texts import read_texts, stdlib_texts, token_windows
from tokenizer import load_tokenizer
from weights.checkpoint import load_config
from weights.files import write_safetensors
from weights.heads import read_eagle
from weights.hf import build_model
from weights.layerwise import CALIBRATION_WINDOWS, EVALUATION_WINDOWS, WINDOW, quantize_checkpoint
from weights.quantized import ALGORITHMS, GROUPS, HEADS, MODES, VERSION, QuantSpec, adopt_, set_tensor
from weights.rounding import quantize_


def quantize_head(path: str | Path, target: ModelConfig, spec: QuantSpec):
    """The EAGLE head at `path` rounded (RTN): (config.json, tensors, its part of the receipt)."""

    file, spec = read_eagle(path, target), replace(spec, algorithm="rtn", act_order=False)
    with torch.device("meta"):
        head = EagleHead(file.config, build_model(target), file.tensors.get("draft_ids"))
    for name, tensor in file.tensors.items():
        set_tensor(head, name, tensor)
    errors = quantize_(head, spec)
    wide = {n for n, t in head.state_dict().items() if t.dtype == torch.float32 and not n.endswith(".scales")}
    tensors = {n: t.half() if n in wide else t for n, t in head.state_dict().items()}
    config = {"eaglet_quant": {"version": VERSION, **asdict(spec)}, "eaglet_head": asdict(file.config)}
    sizes = [sum(t.numel() * t.element_size() for t in group.values()) for group in (file.tensors, tensors)]
    return config, tensors, {"bytes_before": sizes[0], "bytes_after": sizes[1], "worst": max(errors.values())}


def measure_tau(
    directory: Path, head: str, tensors: dict[str, Tensor] | None, prompts: list[list[int]], device: str
) -> float:
    """Mean tokens per greedy step of a model directory with an EAGLE head, or with `tensors` in that head."""
    from sampling import SamplingParams

    engine = load(directory, eagle=head, eagle_always=True, device=device)
    if tensors is not None:
        adopt_(engine.head, tensors, engine.model.device, engine.model.dtype)
    steps: list[int] = []
    for ids in prompts:
        params = SamplingParams(max_new_tokens=min(128, engine.ctx - len(ids)))
        steps += map(len, engine.generate(ids, params).run()[0].tokens_per_step)
    return sum(steps) / max(1, len(steps))


def out_of_memory(error: Exception) -> bool:
    """Whether an exception says that memory ran out, before (generate's plan) or while it was allocated."""
    planned = isinstance(error, ValueError) and getattr(error, "code", None) == 4  # generate.UserError
    on_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return planned or on_cpu or isinstance(error, torch.OutOfMemoryError | MemoryError)


def show(receipt: dict[str, Any]) -> str:
    """The receipt for people."""
    r, spec = receipt, receipt["spec"]
    change = r["perplexity_after"] / r["perplexity_before"] - 1
    lines = [
        f"quality     perplexity {r['perplexity_before']:.3f} -> {r['perplexity_after']:.3f} ({change:+.2%})   mean KL "
        f"{r['mean_kl']:.4f} nats   same top token {r['top1_agreement']:.2%}   over {r['evaluation']['tokens']:,} tokens",
        f"size        {r['bytes_before'] / 1e6:.1f} MB -> {r['bytes_after'] / 1e6:.1f} MB   LM head {spec['lm_head']}",
        "worst       " + "   ".join(f"{w['name']} {w['relative_error']:.2%}" for w in r["worst_layers"]),
    ]
    if "head" in r:
        tau = ["not measured" if t is None else f"{t:.2f}" for t in (r["tau_before"], r["tau_after"])]
        lines.append(
            f"EAGLE head  {r['head']['bytes_before'] / 1e6:.1f} MB -> {r['head']['bytes_after'] / 1e6:.1f} MB   "
            f"tau {tau[0]} -> {tau[1]}"
        )
        lines += [f"note        {note}" for note in r["notes"]]
    memory = f"   peak memory {r['peak_memory_bytes'] / 1e9:.2f} GB" if r["peak_memory_bytes"] else ""
    return "\n".join([*lines, f"took        {r['seconds']:.0f} s{memory}"])


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--checkpoint",
        default=str(Path(__file__).parent / "demo"),
        metavar="DIR",
        help="default: the demo model",
    )
    add("--mode", choices=MODES, default="int4")
    add("--out", metavar="DIR", help="default: CHECKPOINT-MODE")
    add("--group-size", type=int, choices=GROUPS, default=128, help="columns that share an int4 scale")
    add("--algorithm", choices=ALGORITHMS, default="rtn", help="gptq: slower, better; needs calibration text")
    add("--act-order", action="store_true", help="GPTQ: columns by activation energy")
    add("--calibration", metavar="FILE", help="text or .jsonl for GPTQ; default: Python's standard library")
    add("--lm-head", choices=HEADS, default="int8")
    add("--eagle", metavar="HEAD", help="quantize this EAGLE head too (to OUT/eagle) and compare tau")
    add(
        "--eagle-mode", choices=("int8", "int4"), help="of the head (default: --mode); int8 keeps more of tau"
    )
    add("--refuse-kl", type=float, metavar="NATS", help="write nothing if the mean KL is higher")
    add("--eval-text", metavar="FILE", help="text of the receipt; default: held-out standard library modules")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--debug", action="store_true", help="full tracebacks")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (2 usage, 3 bad file or refused, 4 memory, 5 internal)."""
    args = build_parser().parse_args(argv)
    kinds = {UsageError: 2, ValueError: 3}
    try:
        print(show(_main(args)))
        return 0
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the layers already finished", file=sys.stderr)
        return 130
    except Exception as error:
        if args.debug:
            raise
        code = next((code for kind, code in kinds.items() if isinstance(error, kind)), 5)
        code = 4 if out_of_memory(error) else code
        name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        line_start = "\r\033[K" if sys.stderr.isatty() else ""
        text = " ".join(" ".join([str(error), *getattr(error, "__notes__", [])]).split())
        print(f"{line_start}error  {name}{text}", file=sys.stderr)
        return code


def _main(args: argparse.Namespace) -> dict[str, Any]:

    spec = QuantSpec(args.mode, args.group_size, args.algorithm, args.act_order, args.lm_head)
    directory = Path(args.checkpoint)
    out = Path(args.out) if args.out else directory.with_name(f"{directory.resolve().name}-{args.mode}")
    if not directory.is_dir():
        raise UsageError(f"--checkpoint {directory} is not a directory.")
    if out.exists() and not (out / "receipt.json").is_file():
        raise UsageError(f"--out {out} exists and is not an earlier result; choose another name.")
    if args.calibration and spec.algorithm != "gptq":
        raise UsageError("--calibration is text for GPTQ; add --algorithm gptq.")
    if args.refuse_kl is not None and not args.refuse_kl > 0:
        raise UsageError(f"--refuse-kl is {args.refuse_kl}; it must be above 0 nats.")
    config = load_config(directory)
    tokenizer, length = load_tokenizer(directory, config.vocab_size), min(WINDOW, config.max_positions - 1)
    texts = read_texts(args.eval_text) if args.eval_text else stdlib_texts(held_out=True)
    evaluation = token_windows(texts, tokenizer, config.vocab_size, EVALUATION_WINDOWS, length + 1)
    calibration = evaluation[:0, :-1]
    if spec.algorithm == "gptq":
        texts = read_texts(args.calibration) if args.calibration else stdlib_texts(held_out=False)
        calibration = token_windows(texts, tokenizer, config.vocab_size, CALIBRATION_WINDOWS, length)

    def progress(done: int, total: int, what: str) -> None:
        if sys.stderr.isatty():
            end = "" if done < total else "\r\033[K"
            print(f"\rquantizing  {done}/{total}  {what:<12}", end=end, file=sys.stderr, flush=True)

    head_spec = replace(spec, mode=args.eagle_mode or spec.mode)
    head = quantize_head(args.eagle, config, head_spec) if args.eagle else None

    def finish(unfinished: Path) -> dict[str, Any]:
        if head is None:
            return {}
        (target := unfinished / "eagle").mkdir()
        write_json(target / "config.json", head[0])
        write_safetensors(target / "model.safetensors", head[1])
        prompts = [row[: min(64, length // 2)].tolist() for row in evaluation[:12]]
        found: dict[str, Any] = {"head": head[2], "tau_before": None, "tau_after": None, "notes": []}
        for key, model, tensors in (("tau_before", directory, None), ("tau_after", unfinished, head[1])):
            try:  # a model is quantized because it is too large: that must not cost the result
                found[key] = measure_tau(model, args.eagle, tensors, prompts, args.device)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                why = " ".join(str(error).split()) or type(error).__name__
                found["notes"].append(f"{key} was not measured, the model does not fit in memory: {why}")
        return found

    return quantize_checkpoint(
        directory, out, spec, calibration, evaluation, args.device, progress, args.refuse_kl, finish
    )


if __name__ == "__main__":
    sys.exit(main())
