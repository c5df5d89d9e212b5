"""What `make demo` and `make chat` run: a real model where it can be had, and otherwise the embedded one.

    python -m scripts.demo [--chat]

A model decodes plainly and with each of its draft heads. The demo prints the text once, then for every head the tokens
per target forward and whether the tokens were the same.
"""

import argparse
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import generate
from bench.arms import build_engine
from bench.suites import find_model
from decoding.params import SamplingParams
from engine.engine import Engine
from engine.load import load
from engine.results import GenerationResult
from loading.options import DEMO
from support.errors import UsageError, command_parser, run_parsed
from support.machine import size_text

HEADS = DEMO.parent / "heads"  # those of the real model
QUESTION = "What is the capital of France, and what is it known for?"
NEW_TOKENS = 160
# the real model: a GGUF file inside a Python wheel
NAME, LICENCE = "SmolLM2-135M-Instruct", "Apache-2.0"


def run(
    title: str, engine: Engine, prompt: list[int], params: SamplingParams, plain: GenerationResult | None = None
) -> GenerationResult:
    """Decode the prompt and print how it went, beside the result of plain decoding.

    The text is printed, too, where plain decoding is greedy.
    """
    show = plain is None and params.temperature == 0
    engine.generate(prompt, SamplingParams(max_new_tokens=8)).run()  # first-use costs stay out of the figure
    stream = engine.generate(prompt, params)
    for chunk in stream:
        print(chunk.text if show else "", end="", flush=True)
    result = stream.result
    line = f"{title:<44} {result.new_tokens:4d} tokens  {result.steps:4d} target forwards  tau {result.tau:4.2f}  "
    line += f"{result.tokens_per_second:7.1f} tok/s"
    if plain:
        # in float32 a forward of 26 rows rounds differently from 26 forwards of one row
        fork = "NO (a near-tie? generate.py --prove shows the margin)"
        line += f"   same tokens as plain: {'yes' if result.token_ids == plain.token_ids else fork}"
    print(f"\n\n{line}" if show else line)
    return result


def compare(base: Engine, prompt: list[int], heads: Iterable[tuple[Path, str | None]]) -> None:
    """Decode plainly and with every (head, tree): greedily and, to compare the sampled tokens as well, at T = 1.

    Where the tree is None, it is the one that `generate.py` takes by itself.
    """
    engines = {}
    for head, tree in heads:
        engine = build_engine(base, {"eagle": str(head), "tree": tree}, base.ctx)
        pruned = " pruned" if engine.drafter.p_min else ""
        engines[f"{head.name}, {engine.options.tree}{pruned}"] = engine
    greedy = SamplingParams(max_new_tokens=NEW_TOKENS)
    settings = [("greedy", greedy), ("T = 1, seed 7", replace(greedy, temperature=1.0, seed=7))]
    for name, params in settings if engines else settings[:1]:
        plain = run(f"{name}: plain", base, prompt, params)
        for title, engine in engines.items():
            run(f"{name}: {title}", engine, prompt, params, plain)
        print()


def embedded() -> None:
    """The embedded model continues held-out Python."""
    base = load(DEMO)
    print(generate.DEMO_PROMPT, end="")
    trees = ("chain:3", "paper25", "dynamic:32,6,6")
    heads = itertools.product((DEMO / "eagle1", DEMO / "eagle3"), trees)
    compare(base, base.tokenizer.encode(generate.DEMO_PROMPT), heads)
    print("try: python generate.py --eagle demo/eagle3 --show-tree")


def real(file: Path, heads: Sequence[Path]) -> None:
    """The real model answers a question."""
    base = load(file, ctx=1024)
    print(f"> {QUESTION}\n")
    prompt = base.tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
    compare(base, prompt, [(head, None) for head in heads])
    print("try: make chat\n")


def demo(args: argparse.Namespace) -> int:
    """Do what the arguments ask for."""
    missing = f"{NAME} is not installed (make demo fetches it)"
    file = find_model()
    if file is None and args.chat:
        raise UsageError(f"{missing}. To chat with a model of your own: python generate.py --chat --checkpoint DIR.")
    if file is None:
        print(f"note    {missing}. The embedded model takes its place.\n")
        embedded()
        return 0
    print(f"{NAME}  {size_text(file.stat().st_size)}  {LICENCE}  {file}\n", flush=True)
    heads = [head for head in (HEADS / "smollm2-eagle1", HEADS / "smollm2-eagle3") if head.is_dir()]
    if args.chat:  # with the newest head
        command = ["--chat", "--checkpoint", str(file), *(["--eagle", str(heads[-1])] if heads else [])]
        print("python generate.py", *command, "\nAsk something. /help lists the commands, /exit leaves.\n", flush=True)
        return generate.main(command)
    real(file, heads)
    if not heads:
        print("note    no draft head of this model makes it faster here. The embedded model shows drafting:\n")
        embedded()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    parser = command_parser("scripts.demo", __doc__)
    parser.add_argument("--chat", action="store_true", help="chat with the real model")
    return run_parsed(parser, demo, argv)


if __name__ == "__main__":
    raise SystemExit(main())
