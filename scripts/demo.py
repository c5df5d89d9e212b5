"""What `make demo` runs: the embedded model continues held-out Python, plainly and with its draft heads.

    python -m scripts.demo

Prints the text once, then for every head the tokens per target forward and whether the tokens were the same.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

from engine import Engine
from generate import DEMO_PROMPT
from load import load
from options import DEMO
from runtime.results import GenerationResult
from sampling import SamplingParams

NEW_TOKENS = 160


def run(title: str, engine: Engine, params: SamplingParams, plain: GenerationResult | None = None) -> GenerationResult:
    """Decode the prompt and print how it went, beside the result of plain decoding."""
    prompt = engine.tokenizer.encode(DEMO_PROMPT)
    engine.generate(prompt, SamplingParams(max_new_tokens=8)).run()  # first-use costs stay out of the figure
    result = engine.generate(prompt, params).run()[0]
    same = ""
    if plain:
        # in float32 a forward of 26 rows rounds differently from 26 forwards of one row
        fork = "NO (a near-tie? python generate.py --eagle demo/eagle3 --prove shows the margin)"
        same = f"   same tokens as plain: {'yes' if result.token_ids == plain.token_ids else fork}"
    print(
        f"{title:<38} {result.new_tokens:4d} tokens  {result.steps:4d} target forwards  tau {result.tau:4.2f}  "
        f"{result.tokens_per_second:7.1f} tok/s{same}"
    )
    return result


def main() -> int:
    """Run the demo."""
    base = load(DEMO)
    every = itertools.product(("eagle1", "eagle3"), ("chain:3", "paper25", "dynamic:32,6,6"))
    engines = {f"{h}, {tree}": load(DEMO, eagle=str(DEMO / h), tree=tree, eagle_always=True) for h, tree in every}
    greedy = SamplingParams(max_new_tokens=NEW_TOKENS)
    print(f"{DEMO_PROMPT}{base.generate(base.tokenizer.encode(DEMO_PROMPT), greedy).run()[0].text}\n")
    for name, params in (("greedy", greedy), ("T = 1, seed 7", replace(greedy, temperature=1.0, seed=7))):
        plain = run(f"{name}: plain", base, params)
        for title, engine in engines.items():
            run(f"{name}: {title}", engine, params, plain)
        print()
    print("try: python generate.py --eagle demo/eagle3 --show-tree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
