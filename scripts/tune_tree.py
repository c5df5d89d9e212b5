"""Finds the draft tree and the window of the head that decode fastest on this machine, for `--tree auto` and later runs.

    python -m scripts.tune_tree --checkpoint DIR --eagle HEAD          # then: python generate.py ... --tree auto
    python -m scripts.tune_tree --checkpoint DIR --eagle HEAD --questions FILE.jsonl        # the window, too
    python -m scripts.tune_tree --questions FILE.jsonl --trees chain:2 chain:4 dynamic:16,4,4

With questions for a model that chats and has room for `--behind` tokens, six windows (`--draft-window`) are measured
first, behind a chat of its answers. The best one is kept for this head, and all later runs take it by themselves.

About ten trees, the default one and plain decoding are measured in turn, as scripts.bench does it. The tree with the best
median speedup is written if it beats the default and plain decoding. Its file is kept in the cache folder, by model,
head, device and options.
"""

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

from bench import behind
from bench.arms import NO_STOP, SAME_TOKENS, EngineArm, build_engine
from bench.measure import Bench
from bench.records import Row, Settings, environment, summarise
from bench.report import result_table
from bench.suites import Prompts, Question, add_questions, ask
from decoding.params import SamplingParams
from engine.engine import Engine
from engine.load import load
from loading.drafting import own_window, read_drafter, tuned_path
from loading.options import LoadOptions, add_options, options_from
from support import cache
from support.errors import UsageError, at_least, command_parser, run_parsed
from support.files import write_json
from support.progress import Progress
from tree import DynamicTree, parse_tree
from weights.assistant import AssistantConfig

# options of `load` that a tree is tuned for
TUNED_FOR = """checkpoint eagle eagle_config draft_vocab draft_vocab_text device dtype quant threads compile kernels
    ctx""".split()
CPU_TREES = "chain:1 chain:2 chain:3 chain:5 dynamic:6,2,3 dynamic:8,3,4 dynamic:12,4,4 dynamic:16,4,4 paper25".split()
GPU_TREES = """chain:3 chain:5 paper25 dynamic:16,5,8 dynamic:16,7,8 dynamic:24,6,8 dynamic:32,6,8 dynamic:32,7,8
    dynamic:48,7,8 dynamic:60,7,10""".split()
WINDOWS = (64, 128, 256, 512, 1024, "full")
DEFAULT = "the default"  # what is drafted where --tree is not given; on a CPU it is pruned
PLAIN = "plain decoding"


def windows_by_speed(args: argparse.Namespace, base: Engine) -> dict[str, float]:
    """The speed of each window over that of plain decoding, behind a chat. Empty for a model that does not chat.

    Raises UsageError where there are too few questions for a chat of that length.
    """
    given = argparse.Namespace(**vars(args) | {"limit": 0})
    questions, prompts, ctx = ask(given, base, 96, base.ctx)
    if not prompts.chat:
        return {}
    count = args.limit or behind.ASKED
    found = behind.questions_behind([args.behind], base, prompts, questions[:count], questions[count:])
    asked = [question for question in found if question.suite.startswith("chat")], prompts, ctx
    return raced(args, base, asked, {str(window): {"draft_window": window} for window in WINDOWS}, True)[1]


def raced(
    args: argparse.Namespace, base: Engine, asked: tuple[list[Question], Prompts, int], options: dict[str, Any],
    reuse: bool = False,
) -> tuple[list[Row], dict[str, float]]:  # fmt: skip
    """Race plain decoding and arms with these options, and print the rows. Returns them, and the speedup of each arm, a
    mean over the temperatures. One that is slower everywhere may have none at all.

    asked: as `ask` returns it. reuse: whether a run goes on from the text of the run before.
    """
    questions, prompts, ctx = asked
    every = {PLAIN: {"eagle": None}} | options
    arms = [EngineArm(name, SAME_TOKENS, how, build_engine(base, how, ctx), reuse) for name, how in every.items()]
    temperatures = tuple(dict.fromkeys(args.temperature))
    settings = Settings(temperatures, args.max_new_tokens, args.reps, args.seed, warmup_runs=1)
    stops = base.stop_ids(SamplingParams()) or NO_STOP
    progress = Progress(args.quiet)
    bench = Bench(arms, questions, prompts, settings, stops, ctx, progress)
    bench.warm_up()
    rows = summarise(list(bench.measure()), settings)
    progress.close()
    print(result_table(rows))
    last = [(row["arm"], row["speedup"] or {"median": 0.0}) for row in rows if row["suite"] == rows[-1]["suite"]]
    return rows, {name: fmean(gain["median"] for arm, gain in last if arm == name) for name in options}


def race(args: argparse.Namespace, base: Engine, window: int | str) -> dict[str, Any]:
    """Race the trees with a window of the head, and print how fast each one is. Returns the content of the file.

    Raises UsageError for a tree or a question that does not fit.
    """
    names = list(dict.fromkeys(args.trees or (GPU_TREES if base.model.device.type == "cuda" else CPU_TREES)))
    options = {DEFAULT: {"draft_window": window}} | {name: {"draft_window": window, "tree": name} for name in names}
    rows, gains = raced(args, base, ask(args, base, 96, args.ctx), options)
    gains[PLAIN] = 1.0
    tree = parse_tree(max(names, key=gains.get))
    shape = [tree.N, tree.depth, tree.topk] if isinstance(tree, DynamicTree) else [list(path) for path in tree.paths]
    return {
        "dynamic" if isinstance(tree, DynamicTree) else "paths": shape,
        "winner": max(gains, key=gains.get), "speedups": gains, "rows": rows,
        "model": Path(args.checkpoint).resolve().name, "head": Path(args.eagle).name,
        "quantization": base.model.quant or "none", "dtype": base.options.dtype, "compile": args.compile,
        "environment": environment(base.model.device),
    }  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Race, write the tree and say which one won. Returns 1 where no tree is worth writing."""
    if args.eagle is None:  # the checkpoint's first head
        heads = sorted(Path(args.checkpoint).glob("eagle*/"))
        if not heads:
            raise UsageError(f"no eagle* folder in {args.checkpoint}; give --eagle HEAD.")
        args.eagle = str(heads[0])
    options = LoadOptions(**options_from(args, *TUNED_FOR))
    checkpoint = options.open_checkpoint()
    head = read_drafter(options, checkpoint.config, None).head
    room = args.behind + behind.SLACK + args.max_new_tokens
    fits = room <= checkpoint.config.max_positions and not isinstance(head.config, AssistantConfig)
    fits = fits and not own_window(head.config)  # which it keeps
    wanted = args.behind and args.questions and fits
    base = load(**options_from(args, *TUNED_FOR) | ({"ctx": max(args.ctx, room)} if wanted else {}))
    windows = windows_by_speed(args, base) if wanted else {}
    window = max(WINDOWS, key=lambda window: windows[str(window)]) if windows else "auto"
    if windows:
        place = tuned_path(options, checkpoint, head, "window")
        cache.store(place, b"", {"window": window, "speedups": windows, "behind": args.behind})
        print(f"\nthe best window is {window}; --draft-window auto takes it from now on ({place})\n")
    content = race(args, base, window)
    gains, winner = content["speedups"], content["winner"]
    speeds = f"{gains[winner]:.2f}; {DEFAULT}: {gains[DEFAULT]:.2f}"
    print(f"\n{winner} is fastest. Speed over that of plain decoding: {speeds}")
    won = winner not in (PLAIN, DEFAULT)
    if not won and not args.out:
        print("nothing was written, because leaving --tree out is at least as fast.")
        return 1
    path = Path(args.out or tuned_path(options, checkpoint, head))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)
    print(f"written to {path}" + ("" if args.out else "   (--tree auto)"))
    return 0 if won else 1


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = command_parser("scripts.tune_tree", __doc__)
    add = parser.add_argument
    add_options(parser, *TUNED_FOR, ctx=512)
    add_questions(parser, "--prompts", 8)
    add("--behind", type=at_least(0), default=4000, metavar="N", help="tokens of the chat for windows (0: only trees)")
    add("--trees", nargs="+", metavar="TREE", help="race these trees instead of the ten that are built in")
    add("--out", metavar="FILE", help="write here, whatever won, instead of where --tree auto looks")
    add("--max-new-tokens", type=at_least(2), default=64)
    add("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    add("--seed", type=int, default=1)
    add("--reps", type=at_least(1), default=3)
    add("-q", "--quiet", action="store_true", help="no progress on stderr")
    return run_parsed(parser, run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
