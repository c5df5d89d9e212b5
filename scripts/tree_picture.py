"""A picture of one decoded step: the tree that was drafted, what the target accepted, and its own token after it.

    python -m scripts.tree_picture                                     # the demo's EAGLE head, docs/tree.svg
    python -m scripts.tree_picture --eagle HEAD --tree dynamic:16,4,4 --prompt "import os" --step 3 --out tree.svg
    python -m scripts.tree_picture --checkpoint FILE.gguf --eagle HEAD --prompt "Why is the sky blue?"

The step comes from a real request, and the SVG says which step it is. Without `--step` it is the one of the first 24
that accepted most.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path

from cli.steps import Step, StepRecorder
from generate import DEMO_PROMPT
from load import load
from options import add_options, add_sampling, options_from, sampling_from
from support.errors import UsageError, command_parser, run_command
from support.files import write_text

COLUMN = 148  # width of a depth of the tree
ROW = 25
BOX = 108  # width of a token's box
ACCEPTED = "#1a7f37"
REJECTED = "#9198a1"
BONUS = "#bc4c00"
ROOT = "#1f2328"
FAINT = "#d0d7de"  # lines to rejected nodes
LEGEND = {
    ROOT: "last committed token",
    ACCEPTED: "drafted and accepted",
    REJECTED: "drafted, rejected",
    BONUS: "the target's own token",
}
Place = tuple[int, float]  # column and row


def leaf_rows(step: Step) -> dict[int, float]:
    """The row of each live node. Leaves lie one under the other in depth-first order, parents in the middle of their
    children."""
    children: dict[int, list[int]] = {}
    for i in range(1, len(step.tokens)):
        if step.valid[i]:
            children.setdefault(step.parent[i], []).append(i)
    rows: dict[int, float] = {}
    leaves = itertools.count()

    def place(i: int) -> float:
        below = [place(c) for c in children.get(i, ())]
        rows[i] = (below[0] + below[-1]) / 2 if below else next(leaves)
        return rows[i]

    place(0)
    return rows


def draw(step: Step, text: Callable[[int], str], caption: str) -> str:
    """The SVG. `text` turns a token id into a string. The last of the emitted tokens is the target's own."""
    rows = leaf_rows(step)
    places = {i: (step.depth[i], row) for i, row in rows.items()}
    end = places[step.path[-1]]
    bonus = (end[0] + 1, _free_row(end, places.values()))
    height = int((max(rows.values()) + 1) * ROW + 66)
    width = (max(column for column, _ in places.values()) + 2) * COLUMN + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="ui-monospace, monospace" '
        f'font-size="12"><rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="14" y="20" fill="{ROOT}" font-family="sans-serif">{escape(caption)}</text>',
    ]
    for i in sorted(rows.keys() - {0}, key=lambda i: (i in step.path, i)):
        parts.append(_line(places[step.parent[i]], places[i], ACCEPTED if i in step.path else FAINT))
    parts.append(_line(end, bonus, BONUS))
    for i, place in places.items():
        colour = ROOT if i == 0 else ACCEPTED if i in step.path else REJECTED
        parts.append(_box(place, text(step.tokens[i]), colour))
    parts.append(_box(bonus, text(step.emitted[-1]), BONUS))
    for k, (colour, words) in enumerate(LEGEND.items()):
        where = f'x="{14 + k * 210}" y="{height - 10}"'
        parts.append(f'<text {where} fill="{colour}" font-family="sans-serif">■ {words}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(place: Place, token: str, colour: str) -> str:
    """A box with the text of a token. Only rejected ones are thin."""
    x, y = 14 + place[0] * COLUMN, 36 + place[1] * ROW
    label = repr(token)[1:-1] or " "
    label = (label if len(label) <= 13 else label[:12] + "…").replace(" ", "·")
    stroke, weight = (1, "normal") if colour == REJECTED else (2, "bold")
    return (
        f'<g><rect x="{x}" y="{y}" width="{BOX}" height="{ROW - 5}" rx="4" fill="#ffffff" stroke="{colour}" '
        f'stroke-width="{stroke}"/><text x="{x + BOX / 2}" y="{y + 14}" text-anchor="middle" fill="{colour}" '
        f'font-weight="{weight}">{escape(label)}</text></g>'
    )


def _line(start: Place, end: Place, colour: str) -> str:
    """A curve from the right side of one box to the left side of another."""
    x, x2 = 14 + start[0] * COLUMN + BOX, 14 + end[0] * COLUMN
    y, y2 = (36 + row * ROW + ROW / 2 - 2.5 for row in (start[1], end[1]))
    curve = f"M{x} {y:g} C{x + 20} {y:g} {x2 - 20} {y2:g} {x2} {y2:g}"
    return f'<path d="{curve}" fill="none" stroke="{colour}" stroke-width="{1 if colour == FAINT else 2}"/>'


def _free_row(end: Place, places: Iterable[Place]) -> float:
    """A row in the next column for the target's token. It lies beside its node, or between the rejected children."""
    taken = [row for column, row in places if column == end[0] + 1]
    tries = [end[1], *(end[1] + sign * k for k in range(1, 40) for sign in (1, -1))]
    return next(row for row in tries if row >= 0 and all(abs(row - other) >= 0.95 for other in taken))


def run(args: argparse.Namespace) -> None:
    """Decode the prompt, choose a step and write its picture."""
    heads = [str(p) for p in (Path(args.checkpoint) / "eagle3", Path(args.checkpoint) / "eagle1") if p.is_dir()]
    args.eagle = args.eagle or next(iter(heads), None)
    if not args.eagle:
        raise UsageError(f"no eagle3 or eagle1 in {args.checkpoint}; give --eagle HEAD.")
    engine = load(**options_from(args, "checkpoint", "eagle", "tree"))
    recorder = StepRecorder(engine)
    tokenizer = engine.tokenizer
    message = [{"role": "user", "content": args.prompt}]
    prompt = tokenizer.encode_chat(message) if tokenizer.chat_template_source else args.prompt
    engine.generate(prompt, sampling_from(args)).run()
    steps = recorder.steps
    if args.step is not None and not 1 <= args.step <= len(steps):
        raise UsageError(f"--step {args.step}; this request took {len(steps)} steps.")
    number = args.step or 1 + max(range(min(24, len(steps))), key=lambda i: len(steps[i].path))
    step = steps[number - 1]
    names = f"{Path(args.checkpoint).name} with {Path(args.eagle).name}, {engine.options.tree}"
    caption = (
        f"one step of {names}: {sum(step.valid)} nodes in one forward, {len(step.emitted)} tokens "
        f"(step {number} of a request, T = {args.temperature:g})"
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(args.out, draw(step, recorder.text, caption))
    print(f"wrote {args.out}")


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = command_parser("scripts.tree_picture", __doc__)
    add_options(parser, "checkpoint", "eagle", "tree")
    add_sampling(parser, "temperature", "max_new_tokens", max_new_tokens=96)
    parser.add_argument("--prompt", default=DEMO_PROMPT, help="text to continue, or a chat model's message")
    parser.add_argument("--step", type=int, help="which step, from 1")
    parser.add_argument("--out", type=Path, default=Path("docs/tree.svg"))
    args = parser.parse_args(argv)
    return run_command(lambda: run(args), args.debug)


if __name__ == "__main__":
    raise SystemExit(main())
