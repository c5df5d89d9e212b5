"""Held-out measurements of a drafter by the real engine: tau, and how often drafts of each depth are accepted."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import cached_property
from typing import Any

from drafters.base import Drafter
from engine import Engine
from model import Transformer
from sampling import SamplingParams
from training.data import TokenData
from tree import DynamicTree, TreeTables, parse_tree, tree_tables


class Evaluation:
    """The held-out prompts of a run, and the engine that measures drafters on them."""

    def __init__(self, target: Transformer, stop_ids: tuple[int, ...], held_out: TokenData, args: argparse.Namespace):
        """Raises ValueError in one line if the held-out data or --tree cannot be used."""
        self.target = target
        self.held_out = held_out
        self.args = args
        self.prompts = self._prompts()
        longest = max(map(len, self.prompts))
        self.ctx = min(target.rotary.length, longest + args.eval_tokens)
        if self.ctx < longest + 2:
            raise ValueError("held-out prompts leave no room for new tokens; use a smaller --prompt-length.")
        self.params = SamplingParams(max_new_tokens=self.ctx - longest, stop_ids=stop_ids, seed=args.seed)
        self.tree = parse_tree(args.tree)

    def _prompts(self) -> list[list[int]]:
        """Evenly spaced windows of held-out text, or held-out conversations up to their first answer."""
        data = self.held_out
        count = self.args.eval_prompts
        length = self.args.prompt_length
        if data.stream:
            starts = [k * max(0, len(data.ids) - length) // count for k in range(count)]
            return [data.ids[start : start + length].tolist() for start in starts]
        room = self.target.rotary.length
        rows = (data.row(k, room - 2) for k in range(data.rows))
        prompts = [ids[: mask.argmax()].tolist() for ids, mask in rows if 0 < mask.argmax() <= room // 2]
        if not prompts:
            raise ValueError("no held-out conversation has a prompt that fits; give --held-out.")
        return prompts[:count]

    @property
    def slots(self) -> int:
        """Cache slots per sequence that a drafter needs."""
        return self.ctx + self.tree.N + 1

    def tables(self) -> DynamicTree | TreeTables:
        """--tree as drafters take it."""
        if isinstance(self.tree, DynamicTree):
            return self.tree
        return tree_tables([self.tree] * len(self.prompts), self.target.device)

    @cached_property
    def texts(self) -> list[list[int]]:
        """Every prompt with the target's own greedy text behind it."""
        results = self._generate(None, 0.0)
        return [prompt + r.token_ids for prompt, r in zip(self.prompts, results, strict=True)]

    def _generate(self, drafter: Drafter | None, temperature: float) -> list:
        engine = Engine(self.target, drafter=drafter, batch_size=len(self.prompts), ctx=self.ctx)
        return engine.generate_batch(self.prompts, replace(self.params, temperature=temperature)).run()

    def tau(self, drafter: Drafter, temperature: float = 0.0) -> dict[str, Any]:
        """tau and accepted_by_depth of the engine with `drafter` over the held-out prompts."""
        results = self._generate(drafter, temperature)
        emitted = [len(ids) for result in results for ids in result.tokens_per_step]
        steps = max(1, len(emitted))
        depths = [sum(count > d for count in emitted) / steps for d in range(1, drafter.D + 1)]
        return {"tau": sum(emitted) / steps, "accepted_by_depth": depths}
