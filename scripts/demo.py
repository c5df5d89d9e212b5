"""What `make demo` runs: the embedded model continues held-out Python, plainly and with its draft heads.

    python -m scripts.demo

Prints the text once, then for every head the tokens per target forward and whether the tokens were the same.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from generate import DEMO_PROMPT
from load import load
from options import DEMO
from sampling import SamplingParams

NEW_TOKENS = 160


def run(title: str, engine, prompt: list[int], params: SamplingParams, plain) -> object:
    engine.generate(prompt, SamplingParams(max_new_tokens=8)).run()  # first-use costs stay out of the figure
    started = time.perf_counter()
    result = engine.generate(prompt, params).run()[0]
    seconds = time.perf_counter() - started
    same = "" if plain is None else f"   same tokens as plain: {'yes' if result.token_ids == plain.token_ids else 'NO'}"
    print(
        f"{title:<38} {result.new_tokens:4d} tokens  {result.steps:4d} target forwards  tau {result.tau:4.2f}  "
        f"{result.tokens_per_second:7.1f} tok/s  ({seconds:.2f} s with prompt){same}"
    )
    return result


def main() -> int:
    engine = load(DEMO)
    prompt = engine.tokenizer.encode(DEMO_PROMPT)
    greedy = SamplingParams(max_new_tokens=NEW_TOKENS)
    text = engine.generate(prompt, greedy).run()[0].text
    print(f"{DEMO_PROMPT}{text}\n")
    sampled = SamplingParams(temperature=1.0, seed=7, max_new_tokens=NEW_TOKENS)
    different = False
    for name, params in (("greedy", greedy), ("T = 1, seed 7", sampled)):
        plain = run(f"{name}: plain", engine, prompt, params, None)
        for head in ("eagle1", "eagle3"):
            if not (Path(DEMO) / head).is_dir():
                continue
            for tree in ("chain:3", "paper25", "dynamic:32,6,6"):
                fast = load(DEMO, eagle=str(Path(DEMO) / head), tree=tree, eagle_always=True)
                result = run(f"{name}: {head}, {tree}", fast, prompt, params, plain)
                different |= result.token_ids != plain.token_ids
        print()
    print("try: python generate.py --eagle demo/eagle3 --show-tree")
    if different:
        print(
            "note  in float32 a forward of 26 rows rounds differently from 26 forwards of one row; a fork is a near-tie"
        )
        print("      (python generate.py --eagle demo/eagle3 --prove shows its margin)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
