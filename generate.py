"""Load a model (and a draft head) and decode: the Python API `load` and the command line that uses it.

    python generate.py                                              # the demo model continues a built-in prompt
    python generate.py --checkpoint DIR --eagle HEAD --compile -p "Why is the sky blue?"
    python generate.py --checkpoint DIR --chat

    from generate import load
    engine = load("demo", eagle="demo/eagle1")
    for chunk in engine.generate(prompt_ids, SamplingParams(max_new_tokens=100)): ...

The text goes to stdout, the report to stderr. Exit codes: 2 usage, 3 bad file, 4 memory, 5 internal, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from engine import COMPILE_MODES, Engine
from load import DEMO, DRAFTERS, VERIFY, load
from model import DTYPES
from report.gauge import Gauge
from report.lines import Report, result_json
from report.prove import _prove
from report.viewer import StepRecorder
from sampling import SamplingParams
from support.cache import clear, entries, root
from support.errors import INTERNAL, INTERRUPTED, MEMORY, USAGE, BadFileError, UsageError
from support.machine import size_text

DEMO_PROMPT = '''def read_file(filename):
    """Return the contents of a file."""
    with open(filename) as f:
'''


def cache_command(what: str) -> int:
    """--cache show | clear: the compiled artefacts, never anything else."""
    found = entries() if what == "show" else clear()
    for entry in found:
        print(f"{entry.key}  {entry.files:,} files  {size_text(entry.bytes)}")
    total = f"{len(found)} entries, {size_text(sum(entry.bytes for entry in found))}"
    print(f"{root()}: {total}{' deleted' if what == 'clear' else ''}")
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="generate.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--checkpoint", default=str(DEMO), metavar="DIR", help="model directory (default: the embedded demo)")
    add("-p", "--prompt", help="text to continue")
    add("--prompt-ids", metavar="5,17,9", help="token ids to continue; needs no tokenizer")
    add("--prompt-file", metavar="FILE", help="continue the text of a file")
    add("--chat", action="store_true", help="interactive chat; keeps history and the cache between turns")
    add("--system", help="system message of the chat")
    add(
        "--template",
        metavar="NAME",
        help="chat template: vicuna, llama-2-chat, mixtral, or one the model names",
    )
    add("--max-new-tokens", type=int, default=200)
    add("--temperature", type=float, default=0.0)
    add("--top-k", type=int, default=0)
    add("--top-p", type=float, default=1.0)
    add("--min-p", type=float, default=0.0)
    add("--repetition-penalty", type=float, default=1.0)
    add("--presence-penalty", type=float, default=0.0)
    add("--frequency-penalty", type=float, default=0.0)
    add("--seed", type=int, default=0)
    add("--stop", action="append", default=[], metavar="TEXT", help="stop string (repeatable)")
    add("--stop-ids", default="", metavar="2,13", help="stop ids instead of the model's own")
    add("--batch-size", type=int, default=1, help="continue the prompt B times, with seeds seed .. seed+B-1")
    add("--ctx", type=int, help="context to allocate (default: the model's, at most 8192)")
    add("--device", choices=("cuda", "cpu"))
    add("--dtype", choices=tuple(DTYPES), help="default: the checkpoint's; float32 on a CPU")
    add("--compile", action="store_true", help="compile the step (and on a GPU capture it as one CUDA graph)")
    add(
        "--compile-mode",
        default="graph",
        choices=tuple(COMPILE_MODES),
        help="graph: one block for all layers compiled, the step captured whole on a GPU; max-autotune: the same with "
        "measured tilings; capture: captured, not compiled; regions: compiled, not captured; for comparison the whole "
        "step in one piece: inductor, reduce-overhead",
    )
    add("--gauge", action="store_true", help="time the phases of a step: draft, verify, accept, host")
    add("--cache", choices=("show", "clear"), help="list or delete what --compile has kept, and leave")
    add("--kernels", default="auto", choices=("auto", "triton", "reference"))
    add("--kv", default="model", choices=("model", "int8"), help="int8: halve (fp32: quarter) the KV cache")
    spec = parser.add_argument_group("speculative decoding")
    add = spec.add_argument
    add("--eagle", metavar="HEAD", help="EAGLE-1/2/3 head: folder, .safetensors, .bin or .pth")
    add(
        "--eagle-config",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="for a head without config.json",
    )
    add(
        "--drafter",
        default="",
        choices=DRAFTERS,
        help="default: what --eagle, --draft-checkpoint or --medusa names; n-grams need no file",
    )
    add("--draft-checkpoint", metavar="DIR", help="draft with a small LLM of the same vocabulary")
    add("--medusa", metavar="FILE", help="Medusa heads: medusa_lm_head.pt, .safetensors, or their folder")
    add(
        "--ngram-nodes",
        type=int,
        default=0,
        metavar="K",
        help="add K nodes found by n-gram lookup to the tree",
    )
    add(
        "--tree",
        default="paper25",
        help="auto (tuned by scripts.tune_tree) | paper25 | chain:K | dynamic:N,DEPTH,TOPK | FILE.json | "
        "medusa:vicuna_7b_stage2 | medusa:mc_sim_7b_63",
    )
    add(
        "--draft-vocab",
        type=int,
        default=0,
        metavar="K",
        help="EAGLE-1/2: draft only the K most frequent tokens",
    )
    add(
        "--draft-vocab-text",
        metavar="FILE",
        help="rank tokens by how often this text has them, not by the tokenizer alone",
    )
    add("--draft-noise", choices=("on", "off"), default="on", help="off: draft without the target's noise")
    add("--verify", default="match", choices=VERIFY)
    add(
        "--eagle-always",
        action="store_true",
        help="go on drafting where plain decoding would be faster (default: the request falls back and probes)",
    )
    add(
        "--prove",
        action="store_true",
        help="replay without the head and compare; exit 1 on a real difference",
    )
    add("--show-tree", action="store_true", help="colour accepted tokens by depth")
    add("--html", metavar="FILE", help="write a page that shows every step's tree")
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="one JSON object on stdout instead of text")
    out.add_argument("-q", "--quiet", action="store_true", help="no report")
    out.add_argument("--debug", action="store_true", help="full tracebacks")
    return parser


def parse_ids(text: str, flag: str) -> tuple[int, ...]:
    """Comma-separated ids; UserError otherwise."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UsageError(f"{flag} {text!r:.60}: expected comma-separated integers, like 5,17,9.") from None


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = build_parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that lacks a character shows '?', and goes on
            stream.reconfigure(errors="replace")
    try:
        return _main(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except (ValueError, ArithmeticError, torch.OutOfMemoryError, RuntimeError, OSError) as error:
        if args.debug:
            raise
        known = {ValueError: USAGE, ArithmeticError: INTERNAL, torch.OutOfMemoryError: MEMORY}
        code = getattr(error, "code", None) or known.get(type(error), INTERNAL)
        hint = "" if code != INTERNAL or isinstance(error, ArithmeticError) else " (--debug shows where)"
        print(f"error  {' '.join(str(error).split())}{hint}", file=sys.stderr)
        return code


def _main(args: argparse.Namespace) -> int:
    if args.cache:
        return cache_command(args.cache)
    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        seed=args.seed,
        max_new_tokens=args.max_new_tokens,
        stop_ids=parse_ids(args.stop_ids, "--stop-ids"),
        stop=tuple(args.stop),
    )
    if args.prove and args.verify != "match":
        raise UsageError("--prove compares tokens; --verify multi-round promises only the distribution.")
    if args.prove and not (args.eagle or args.drafter or args.draft_checkpoint or args.medusa):
        raise UsageError("--prove replays without the drafter; it needs one, like --eagle HEAD.")
    given = [name for name in ("prompt", "prompt_ids", "prompt_file") if getattr(args, name) is not None]
    if len(given) > 1 or (args.chat and given):
        raise UsageError("give one of --prompt, --prompt-ids, --prompt-file, --chat.")
    once = {"--gauge": args.gauge, "--prove": args.prove, "--show-tree": args.show_tree, "--html": args.html}
    once |= {"--json": args.json, "--batch-size": args.batch_size > 1}
    if args.chat and (wrong := [flag for flag, given in once.items() if given]):
        raise UsageError(f"{wrong[0]} is for one request; it does not go with --chat.")
    if not args.chat and (args.template or args.system):
        raise UsageError("--template and --system shape a chat; add --chat.")
    if args.batch_size > 1 and (args.show_tree or args.html):
        raise UsageError("--show-tree and --html show one sequence; use --batch-size 1.")
    request = read_request(args)
    if any("=" not in item for item in args.eagle_config):
        raise UsageError("--eagle-config takes KEY=VALUE, like rope_theta=500000.")
    report = Report(args.quiet or args.json)
    started = time.perf_counter()
    engine = load(
        args.checkpoint,
        progress=report.progress,
        report=report.line,
        eagle=args.eagle,
        eagle_config=tuple(args.eagle_config),
        tree=args.tree,
        draft_vocab=args.draft_vocab,
        draft_vocab_text=args.draft_vocab_text,
        drafter=args.drafter,
        draft_checkpoint=args.draft_checkpoint,
        medusa=args.medusa,
        ngram_nodes=args.ngram_nodes,
        draft_noise=args.draft_noise == "on",
        verify=args.verify,
        batch_size=args.batch_size,
        ctx=args.ctx,
        device=args.device,
        dtype=args.dtype,
        compile=args.compile,
        compile_mode=args.compile_mode,
        eagle_always=args.eagle_always or args.prove or args.show_tree or bool(args.html) or args.gauge,
        kernels=args.kernels,
        kv=args.kv,
    )
    if args.template and engine.tokenizer:
        engine.tokenizer.use_template(args.template)
    report.head(engine, time.perf_counter() - started)
    if args.chat:
        return chat(engine, params, args, report)
    prompts = [prompt_ids(engine, request)] * args.batch_size
    return run_once(engine, prompts, params, args, report)


def read_request(args: argparse.Namespace) -> str | list[int]:
    """The text or ids to continue that the flags name, or the built-in text."""
    if args.prompt_ids is not None:
        return list(parse_ids(args.prompt_ids, "--prompt-ids"))
    if args.prompt_file is None:
        return DEMO_PROMPT if args.prompt is None else args.prompt
    try:
        return Path(args.prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompt-file {args.prompt_file}: {error}") from error


def prompt_ids(engine: Engine, text: str | list[int]) -> list[int]:
    """Ids of a request's prompt."""
    if isinstance(text, list):
        return text
    if engine.tokenizer is None:
        raise BadFileError(
            f"{engine.options.checkpoint} has no tokenizer files (tokenizer.json or tokenizer.model). Pass --prompt-ids.",
        )
    if len(text) > 16 * engine.ctx:  # tokenise no more than could ever fit
        raise UsageError(f"the prompt has {len(text):,} characters, far more than ctx {engine.ctx:,} holds.")
    return engine.tokenizer.encode(text)


def run_once(engine, prompts, params, args, report: Report) -> int:
    recorder = None
    if args.show_tree or args.html:
        recorder = StepRecorder(engine)
        engine.observer = recorder
    gauge = None
    if args.gauge:
        gauge = Gauge(engine)
    stream = engine.generate_batch(prompts, params)
    show = not args.json and engine.tokenizer is not None and not args.show_tree
    if show and args.prompt_ids is None:
        print(args.prompt if args.prompt is not None else "" if args.prompt_file else DEMO_PROMPT, end="")
    interrupted = False
    try:
        for chunk in stream:
            if show and args.batch_size == 1:
                print(chunk.text, end="", flush=True)
            elif not args.json and engine.tokenizer is None:
                print(*chunk.token_ids, sep=",", end=",", flush=True)
    except KeyboardInterrupt:
        interrupted = True
        stream.close()
    results = stream.results
    if args.json:
        slowest = max(results, key=lambda r: r.steps)
        measured = {"gauge_ms": gauge.split(slowest)} if gauge else {}
        print(json.dumps(result_json(engine, results) | measured))
    elif show and args.batch_size > 1:
        for b, result in enumerate(results):
            print(f"\n--- seed {params.seed + b} ---\n{result.text}", end="")
    if args.show_tree and recorder and not args.json:
        print(recorder.coloured(results[0]), end="")
    if not args.json:
        print(flush=True)
    report.tail(engine, results, params)
    if gauge:
        report.line(f"gauge    {gauge.line(max(results, key=lambda r: r.steps))}")
    if args.html and recorder:
        recorder.write_html(args.html, results[0])
        report.line(f"html     {args.html}")
    if interrupted:
        return INTERRUPTED
    return _prove(engine, prompts, params, results, report, args) if args.prove else 0


def chat(engine, params, args, report: Report) -> int:
    """Read user turns from the terminal; /reset forgets, /exit or end of file leaves, Ctrl-C stops a reply."""
    if engine.tokenizer is None:
        raise BadFileError(f"{args.checkpoint} has no tokenizer files; --chat needs one.")
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(opening)
    while True:
        try:
            text = input("\n> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        except UnicodeDecodeError as error:
            print(f"error  not UTF-8: {error}", file=sys.stderr, flush=True)
            continue
        if not text:
            continue
        if text == "/exit":
            return 0
        if text == "/reset":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": text})
        try:
            stream, first = engine.generate(engine.tokenizer.encode_chat(messages), params), True
        except ValueError as error:  # the conversation has outgrown the context, or the template refuses it
            messages.pop()
            print(f"error  {error} (/reset starts over)", file=sys.stderr, flush=True)
            continue
        try:
            for chunk in stream:
                piece = chunk.text.lstrip() if first else chunk.text
                first = first and not piece
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            stream.close()
        print(flush=True)
        messages.append({"role": "assistant", "content": stream.result.text.strip()})
        report.tail(engine, stream.results, params)


if __name__ == "__main__":
    raise SystemExit(main())
