"""See a request think: accepted tokens coloured by depth, and a page with the tree of every step."""

from __future__ import annotations

import html
import json
import os
from dataclasses import dataclass
from pathlib import Path

from engine import Engine
from runtime.results import GenerationResult
from step import Observer, StepOutput
from support.files import write_text

PAGE = Path(__file__).with_name("page.html")  # the page of steps, with %MARKS% for what a request fills in
# Terminal colours by depth. Depth 0 is the target's own token, deeper ones are accepted draft tokens.
COLOURS = (0, 32, 36, 34, 35, 33, 31)


@dataclass(frozen=True)
class Step:
    """One step of one sequence: the drafted tree and what became of it."""

    tokens: list[int]
    parent: list[int]
    depth: list[int]
    valid: list[bool]
    score: list[float]  # of the path to the node, 0 to 1; `StepRecorder.meaning` says what it is
    path: list[int]  # accepted nodes, root first
    emitted: list[int]  # accepted tokens, then the bonus


class StepRecorder(Observer):
    """Collects the steps of the first row of one request.

    It reads every step's tensors on the host, which costs speed. It never changes what is decoded.
    """

    def __init__(self, engine: Engine):
        self.tokenizer = engine.tokenizer
        self.steps: list[Step] = []
        self.scoring = engine.drafter.scoring
        self.grafted = engine.drafter.grafted
        engine.add_observer(self)

    def step(self, output: StepOutput) -> None:
        count = int(output.count[0])
        if count == 0:
            return
        draft = output.draft
        columns = (draft.tokens, draft.parent, draft.depth, draft.valid, draft.scores.clamp(max=0).exp())
        chosen = (output.path[0, :count], output.emitted[0, :count])
        self.steps.append(Step(*(column[0].tolist() for column in columns), *(ids.tolist() for ids in chosen)))

    def meaning(self, temperature: float) -> str:
        """What the numbers beside the nodes are.

        A dynamic tree ranks its nodes by scores with the shared noise. These say how sure the draft is of this very text,
        which is not the chance that the draft's own distribution gives.
        """
        if self.scoring == "none":
            return "The numbers mean nothing here: no model scored these nodes."
        if self.scoring == "noisy" and temperature > 0:
            text = "a score with the shared noise g, not a probability: the product along the path of "
            text += "softmax((z + T g) / max(T, 0.5))"
        else:
            text = "the draft's probability of the path from the root, at temperature 1"
        return f"Beside a node: {text}" + (" (1.00 at an n-gram's node)." if self.grafted else ".")

    def text(self, token: int) -> str:
        """A token as text, or its id without a tokenizer."""
        if self.tokenizer is None:
            return f"{token} "
        return self.tokenizer.decode([token], skip_special=False, continuation=True)

    def coloured(self, result: GenerationResult) -> str:
        """The result's text with every token in the colour of its depth; plain under NO_COLOR."""
        if os.environ.get("NO_COLOR") is not None:
            return result.text
        pieces = [(result.token_ids[0], 0)] if result.token_ids else []
        for ids, step in zip(result.tokens_per_step, self.steps, strict=False):
            # the last emitted token is the target's own, which a step that was cut short has lost
            pieces += [(t, i + 1 if i + 1 < len(step.emitted) else 0) for i, t in enumerate(ids)]
        legend = "  ".join(f"\033[{COLOURS[min(d, 6)]}mdepth {d}\033[0m" for d in range(1, 7))
        decoder = None if self.tokenizer is None else self.tokenizer.stream(continuation=True)
        out = []
        for token, depth in pieces:
            text = self.text(token) if decoder is None else decoder.push([token])
            out.append(f"\033[{COLOURS[min(depth, 6)]}m{text}\033[0m")
        return "".join(out) + f"\n\n{legend}  (uncoloured: the target's own tokens)"

    def write_html(self, file: str | Path, result: GenerationResult) -> None:
        """Write a self-contained page: the text coloured by depth, and the tree of every step."""
        steps = []
        for ids, step in zip(result.tokens_per_step, self.steps, strict=False):
            nodes = enumerate(zip(step.tokens, step.parent, step.depth, step.score, strict=True))
            drawn = [[self.text(t), p, d, round(q, 4), i in step.path] for i, (t, p, d, q) in nodes if step.valid[i]]
            bonus = self.text(step.emitted[-1]) if len(ids) == len(step.emitted) else None
            steps.append({"nodes": drawn, "kept": [self.text(t) for t in ids], "bonus": bonus})
        first = self.text(result.token_ids[0]) if result.token_ids else ""
        facts = f"{result.new_tokens} tokens, {result.steps} steps, tau {result.tau:.2f}, seed {result.seed}, "
        facts += f"temperature {result.temperature:g}"
        data = json.dumps({"first": first, "steps": steps}).replace("<", "\\u003c")
        page = PAGE.read_text(encoding="utf-8").replace("%FACTS%", html.escape(facts))
        page = page.replace("%SCORES%", html.escape(self.meaning(result.temperature)))
        page = page.replace("%DATA%", data)  # last: the text may hold the other marks
        write_text(file, page)
