"""A picture of one decoded step: the tree that was drafted, what the target accepted, and its own token after it.

    python -m scripts.tree_picture                                     # the demo's EAGLE head, docs/tree.svg
    python -m scripts.tree_picture --eagle HEAD --tree dynamic:16,4,4 --prompt "import os" --step 3 --out tree.svg

The step comes from a real request, and the SVG says which step it is. Without `--step` it is the one of the first 24
that accepted most.
"""

from __future__ import annotations

import argparse
import os
import sys
from html import escape
from pathlib import Path

from generate import DEMO_PROMPT
from load import load
from options import DEMO
from report.viewer import Step, StepRecorder
from sampling import SamplingParams

COLUMN = 148  # width of a depth of the tree
ROW = 25
BOX = 108  # width of a token's box
ACCEPTED = "#1a7f37"
REJECTED = "#9198a1"
BONUS = "#bc4c00"
ROOT = "#1f2328"


def leaf_rows(step: Step) -> dict[int, float]:
    """The row of each live node. Leaves lie one under the other in depth-first order, parents in the middle of their
    children."""
    children: dict[int, list[int]] = {}
    for i in range(1, len(step.tokens)):
        if step.valid[i]:
            children.setdefault(step.parent[i], []).append(i)
    rows: dict[int, float] = {}
    used = 0

    def place(i: int) -> float:
        nonlocal used
        below = [place(c) for c in children.get(i, ())]
        if not below:
            used += 1
        rows[i] = (below[0] + below[-1]) / 2 if below else used - 1
        return rows[i]

    place(0)
    return rows


def draw(step: Step, text, caption: str) -> str:
    """The SVG. `text` turns a token id into a string. The last of the emitted tokens is the target's own."""
    rows = leaf_rows(step)
    height = int((max(rows.values()) + 1) * ROW + 66)
    width = (max(step.depth[i] for i in rows) + 2) * COLUMN + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="ui-monospace, monospace" '
        f'font-size="12"><rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="14" y="20" fill="{ROOT}" font-family="sans-serif">{escape(caption)}</text>',
    ]

    def at(column: int, row: float) -> tuple[float, float]:
        return 14 + column * COLUMN, 36 + row * ROW

    def box(column: int, row: float, label: str, colour: str, strong: bool, opacity: float = 1.0) -> None:
        x, y = at(column, row)
        label = (label if len(label) <= 13 else label[:12] + "…").replace(" ", "·")
        parts.append(
            f'<g opacity="{opacity:.2f}"><rect x="{x}" y="{y}" width="{BOX}" height="{ROW - 5}" rx="4" fill="#ffffff" '
            f'stroke="{colour}" stroke-width="{2 if strong else 1}"/><text x="{x + BOX / 2}" y="{y + 14}" '
            f'text-anchor="middle" fill="{colour}"{" font-weight=" + chr(34) + "bold" + chr(34) if strong else ""}>'
            f"{escape(label)}</text></g>"
        )

    def line(start: tuple[int, float], end: tuple[int, float], colour: str, strong: bool) -> None:
        x, y = at(*start)
        x2, y2 = at(*end)
        x += BOX
        y += ROW / 2 - 2.5
        y2 += ROW / 2 - 2.5
        parts.append(
            f'<path d="M{x} {y:g} C{x + 20} {y:g} {x2 - 20} {y2:g} {x2} {y2:g}" fill="none" stroke="{colour}" '
            f'stroke-width="{2 if strong else 1}"/>'
        )

    for i in sorted(rows, key=lambda i: i in step.path):
        taken = i in step.path
        if i:
            here = (step.depth[i], rows[i])
            above = (step.depth[step.parent[i]], rows[step.parent[i]])
            line(above, here, ACCEPTED if taken else "#d0d7de", taken)
    last = step.path[-1]
    end = (step.depth[last], rows[last])
    line(end, (end[0] + 1, _free_row(step, rows, end)), BONUS, True)
    for i, row in rows.items():
        colour = ROOT if i == 0 else ACCEPTED if i in step.path else REJECTED
        strong = i in step.path
        box(step.depth[i], row, repr(text(step.tokens[i]))[1:-1] or " ", colour, strong)
    box(end[0] + 1, _free_row(step, rows, end), repr(text(step.emitted[-1]))[1:-1], BONUS, True)
    legend = [(ROOT, "last committed token"), (ACCEPTED, "drafted and accepted"), (REJECTED, "drafted, rejected"),
              (BONUS, "the target's own token")]  # fmt: skip
    for k, (colour, words) in enumerate(legend):
        parts.append(
            f'<text x="{14 + k * 210}" y="{height - 10}" fill="{colour}" font-family="sans-serif">■ {words}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _free_row(step: Step, rows: dict[int, float], end: tuple[int, float]) -> float:
    """A row in the next column for the target's token. It lies beside its node, or between the rejected children."""
    taken = sorted(row for i, row in rows.items() if step.depth[i] == end[0] + 1)
    tries = [end[1], *(end[1] + sign * k for k in range(1, 40) for sign in (1, -1))]
    return next(row for row in tries if row >= 0 and all(abs(row - other) >= 0.95 for other in taken))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default=str(DEMO))
    parser.add_argument("--eagle", help="default: the checkpoint's eagle3 or eagle1")
    parser.add_argument("--tree", default="paper25")
    parser.add_argument("--prompt", default=DEMO_PROMPT)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--step", type=int, help="which step, from 1")
    parser.add_argument("--out", default="docs/tree.svg")
    args = parser.parse_args(argv)
    heads = [p for p in (Path(args.checkpoint) / "eagle3", Path(args.checkpoint) / "eagle1") if p.is_dir()]
    if not args.eagle and not heads:
        print(f"error  no eagle3 or eagle1 in {args.checkpoint}; give --eagle HEAD.", file=sys.stderr)
        return 2
    head = args.eagle or str(heads[0])
    engine = load(args.checkpoint, eagle=head, tree=args.tree)
    recorder = StepRecorder(engine)
    params = SamplingParams(temperature=args.temperature, max_new_tokens=96)
    engine.generate(engine.tokenizer.encode(args.prompt), params).run()
    steps = recorder.steps
    if args.step is not None and not 1 <= args.step <= len(steps):
        print(f"error  --step {args.step}; this request took {len(steps)} steps.", file=sys.stderr)
        return 2
    chosen = args.step - 1 if args.step else max(range(min(24, len(steps))), key=lambda i: len(steps[i].path))
    step = steps[chosen]
    caption = (
        f"one step of {Path(args.checkpoint).name} with {Path(head).name}, {args.tree}: {sum(step.valid)} nodes in "
    )
    caption += f"one forward, {len(step.emitted)} tokens (step {chosen + 1} of a request, T = {args.temperature:g})"
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_suffix(".part")
    part.write_text(draw(step, recorder.text, caption), encoding="utf-8")
    os.replace(part, out)
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
