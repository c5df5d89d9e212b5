"""See a request think: accepted tokens coloured by depth, and a page with the tree of every step."""

from __future__ import annotations

import html
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from engine import Engine
from runtime.results import GenerationResult
from step import Observer, StepOutput
from support.files import write_text

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
        tokens, parent, depth, valid, scores = (
            tensor[0].tolist() for tensor in (draft.tokens, draft.parent, draft.depth, draft.valid, draft.scores)
        )
        score = [math.exp(min(s, 0.0)) for s in scores]
        path = output.path[0, :count].tolist()
        self.steps.append(Step(tokens, parent, depth, valid, score, path, output.emitted[0, :count].tolist()))

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
        steps = [
            {
                "nodes": [
                    [self.text(t), p, d, round(q, 4), i in step.path]
                    for i, (t, p, d, v, q) in enumerate(
                        zip(step.tokens, step.parent, step.depth, step.valid, step.score, strict=True)
                    )
                    if v
                ],
                "kept": [self.text(t) for t in ids],
                "bonus": self.text(step.emitted[-1]) if len(ids) == len(step.emitted) else None,
            }
            for ids, step in zip(result.tokens_per_step, self.steps, strict=False)
        ]
        first = self.text(result.token_ids[0]) if result.token_ids else ""
        facts = f"{result.new_tokens} tokens, {result.steps} steps, tau {result.tau:.2f}, seed {result.seed}, "
        facts += f"temperature {result.temperature:g}"
        data = json.dumps({"first": first, "steps": steps}).replace("<", "\\u003c")
        page = PAGE.replace("%FACTS%", html.escape(facts))
        page = page.replace("%SCORES%", html.escape(self.meaning(result.temperature)))
        page = page.replace("%DATA%", data)  # last: the text may hold the other marks
        write_text(file, page)


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>eaglet: what was drafted and accepted</title>
<style>
:root { --c0:#333; --c1:#1b7f3b; --c2:#0b7285; --c3:#1c5fc4; --c4:#8a2be2; --c5:#b26a00; --c6:#c02626; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.3rem; margin: 0 } .facts { color: #666; margin: .2rem 0 1rem }
#text { white-space: pre-wrap; font: 14px/1.5 ui-monospace, monospace; background: #f6f6f4; padding: 1rem;
  border-radius: 6px; max-height: 20rem; overflow: auto }
#text span { cursor: pointer; border-radius: 3px } #text span.on { background: #ffe9a8 }
nav { margin: 1rem 0 .5rem; display: flex; gap: .6rem; align-items: center }
button { font: inherit; padding: .15rem .7rem } input { flex: 1 }
svg { width: 100%; background: #fff; border: 1px solid #ddd; border-radius: 6px }
svg text { font: 12px ui-monospace, monospace; white-space: pre }
.legend b { font-weight: 600; margin-right: .8rem }
</style>
<h1>What was drafted, what was accepted</h1><p class="facts">%FACTS%</p>
<p class="legend"></p><div id="text"></div>
<nav><button id="prev">&larr;</button><input id="at" type="range" min="0" value="0"><button id="next">&rarr;</button>
<span id="where"></span></nav><div id="tree"></div><p class="facts">%SCORES%</p>
<script>
const data = %DATA%, colour = d => `var(--c${Math.min(d, 6)})`, steps = data.steps;
const shown = s => s.replace(/\\n/g, "\\u23ce").replace(/ /g, "\\u00b7") || "\\u2205";
const text = document.getElementById("text"), at = document.getElementById("at");
document.querySelector(".legend").innerHTML = [1, 2, 3, 4, 5, 6].map(d =>
  `<b style="color:${colour(d)}">depth ${d}${d == 6 ? "+" : ""}</b>`).join("") + "dark: the target's own token";
function piece(s, depth, step) {
  const e = document.createElement("span"); e.textContent = s; e.style.color = colour(depth);
  if (step !== null) { e.dataset.step = step; e.onclick = () => go(step); } text.append(e);
}
piece(data.first, 0, null);
steps.forEach((s, i) => s.kept.forEach((t, j) =>
  piece(t, s.bonus !== null && j == s.kept.length - 1 ? 0 : j + 1, i)));
at.max = Math.max(0, steps.length - 1);
function go(i) {
  if (!steps.length) return;
  i = Math.max(0, Math.min(steps.length - 1, i)); at.value = i;
  const s = steps[i], column = 150, row = 24, kids = s.nodes.map(() => []);
  s.nodes.forEach((n, k) => { if (k) kids[n[1]].push(k); });
  const y = []; let next = 0;
  const place = k => { kids[k].forEach(place);
    y[k] = kids[k].length ? (y[kids[k][0]] + y[kids[k].at(-1)]) / 2 : next++; };
  place(0);
  const X = k => 20 + s.nodes[k][2] * column, Y = k => 24 + y[k] * row;
  let out = "";
  s.nodes.forEach((n, k) => { if (k) out += `<path fill="none" stroke="${n[4] ? colour(n[2]) : "#ccc"}" ` +
    `stroke-width="${n[4] ? 2.5 : 1}" d="M${X(n[1]) + 102} ${Y(n[1])} C${X(n[1]) + 126} ${Y(n[1])} ` +
    `${X(k) - 28} ${Y(k)} ${X(k) - 6} ${Y(k)}"/>`; });
  const escape = t => t.replace(/[&<>]/g, c => ({"&": "&amp;", "<": "&lt;", ">": "&gt;"}[c]));
  s.nodes.forEach((n, k) => { const label = shown(n[0]).slice(0, 9);
    out += `<text x="${X(k)}" y="${Y(k) + 4}" fill="${n[4] ? colour(n[2]) : "#999"}" ` +
      `font-weight="${n[4] ? 700 : 400}">${escape(label)}<title>${escape(n[0])}</title></text>`;
    if (k) out += `<text x="${X(k) + 72}" y="${Y(k) + 4}" fill="#aaa" style="font-size:10px">` +
      `${n[3] >= .005 ? n[3].toFixed(2) : "&lt;.01"}</text>`; });
  const deepest = Math.max(...s.nodes.map(n => n[2]));
  document.getElementById("tree").innerHTML =
    `<svg viewBox="0 0 ${(deepest + 1) * column + 20} ${Math.max(1, next) * row + 24}">${out}</svg>`;
  const bonus = s.bonus === null ? "cut short by a stop rule" : `then the target's own ${shown(s.bonus)}`;
  document.getElementById("where").textContent = `step ${i + 1} of ${steps.length}: ` +
    `${s.kept.length - (s.bonus === null ? 0 : 1)} accepted, ${bonus}`;
  text.querySelectorAll("span").forEach(e => e.classList.toggle("on", e.dataset.step == i));
}
at.oninput = () => go(+at.value);
document.getElementById("prev").onclick = () => go(+at.value - 1);
document.getElementById("next").onclick = () => go(+at.value + 1);
document.onkeydown = e => { if (e.key == "ArrowLeft") go(+at.value - 1); if (e.key == "ArrowRight") go(+at.value + 1); };
go(0);
</script></html>
"""
