"""The trees of a request as text, with box-drawing characters, and the text coloured by depth.

self ┬─* .assert ┬─* Equal ──* ( ──+ first
     │           └── True .12
     └── . .03
"""

import os
import shutil
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple, TextIO

from cli.steps import Node, StepRecorder, StepView

# Terminal colours by depth. Depth 0 is the target's own token, deeper ones are accepted draft tokens.
COLOURS = ("1", "32", "36", "34", "35", "33", "31")
DIM = "2"
MARKS = {"accepted": "* ", "own": "+ ", "rejected": " "}
SHOWN = {" ": "·", "\n": "⏎", "\t": "⇥"}
ASCII = str.maketrans("┬├└│─·⏎⇥…", "+|`|-_$>~")
LABEL = 16  # columns of a token
OTHERS = 8  # rejected nodes that are drawn of a step, the likeliest first


class Span(NamedTuple):
    """A piece of a line, and the codes of its colour."""

    text: str
    codes: str = ""


Line = list[Span]


class TreeWriter:
    """Writes the tree of each step to a stream while a request runs, and in the end the text in colours."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.colour = wants_colour(stream)
        self.ascii = "┬".encode(stream.encoding or "utf-8", "replace") == b"?"
        self.steps = 0
        self.line = ""  # the last piece of the text so far

    def begin(self, recorder: StepRecorder) -> None:
        """Say what the marks and numbers are."""
        self._write([Span("* drafted and accepted   + the model's own token   others: drafted and rejected")])
        if recorder.scoring != "none":
            self._write([Span(recorder.meaning(), DIM)])

    def step(self, view: StepView, before: str) -> None:
        """Draw a step. `before` is the text before the first step."""
        width = shutil.get_terminal_size().columns
        self.line = self.line or shown(before)
        self.steps += 1
        drafted = any(node.kind in ("accepted", "rejected") for node in view.nodes)
        how = f"{view.accepted} drafted + " if drafted else "no draft, "
        how = f"{how}the model's own" if view.own else f"{view.accepted} drafted, and the text ends here"
        many = "s" if len(view.kept) > 1 else ""
        self._write([])
        self._write([Span(f"step {self.steps}: {len(view.kept)} token{many} ({how}), {view.ms:.1f} ms", DIM)], width)
        lines, hidden = tree_lines(view.nodes)
        for line in lines:
            self._write([Span("  "), *line], width)
        if hidden:
            self._write([Span(f"  … {hidden} more node{'s' if hidden > 1 else ''}", DIM)])
        new = [Span(shown(text), COLOURS[_depth(view, i)]) for i, text in enumerate(view.kept) if text]
        room = width - 8 - sum(columns(span.text) for span in new)
        while columns(self.line) > max(room, 0):
            self.line = self.line[1:]
        self._write([Span("  text: "), Span(self.line, DIM), *new], width)
        self.line += "".join(span.text for span in new)

    def end(self, recorder: StepRecorder) -> None:
        """The whole text: in colours, or as it is."""
        self._write([])
        print(coloured(recorder) if self.colour else recorder.result.text, file=self.stream, flush=True)

    def _write(self, line: Line, width: int | None = None) -> None:
        spans = clipped(line, width) if width else line
        text = "".join(f"\033[{s.codes}m{s.text}\033[0m" if self.colour and s.codes else s.text for s in spans)
        print(text.translate(ASCII) if self.ascii else text, file=self.stream, flush=True)


def wants_colour(stream: TextIO) -> bool:
    """Whether a stream takes colours: a terminal does, unless NO_COLOR is set or the terminal is a dumb one."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def coloured(recorder: StepRecorder) -> str:
    """The text with every token in the colour of its depth, and what the colours say."""
    spans = [Span(recorder.first)]
    for view in recorder.views:
        spans += [Span(text, COLOURS[_depth(view, i)]) for i, text in enumerate(view.kept)]
    legend = "  ".join(f"\033[{COLOURS[depth]}mdepth {depth}\033[0m" for depth in range(1, 7))
    text = "".join(f"\033[{s.codes}m{s.text}\033[0m" if s.codes else s.text for s in spans)
    return f"{text}\n\n{legend}  (bold: the model's own tokens)"


def tree_lines(nodes: Sequence[Node], others: int = OTHERS) -> tuple[list[Line], int]:
    """A tree as lines, and how many nodes were left out.

    The first child of a node stands on the node's own line, so there is one line for each leaf. The accepted path and the
    target's own token come first. Of the rejected nodes, the `others` with the highest scores are drawn.
    """
    rejected = [i for i, node in enumerate(nodes) if node.kind == "rejected"]
    rejected.sort(key=lambda i: (-(nodes[i].score or 0), nodes[i].depth, i))
    drawn = {i for i, node in enumerate(nodes) if node.kind != "rejected"}
    for i in rejected[:others]:
        while i not in drawn:  # with its parents, which may have the same score
            drawn.add(i)
            i = nodes[i].parent
    children: dict[int, list[int]] = {}
    for i in sorted(drawn - {0}, key=lambda i: (nodes[i].kind == "rejected", -(nodes[i].score or 0), i)):
        children.setdefault(nodes[i].parent, []).append(i)
    return _lines_below(0, nodes, children), len(nodes) - len(drawn)


def _lines_below(i: int, nodes: Sequence[Node], children: dict[int, list[int]]) -> list[Line]:
    label = _label(nodes[i])
    below = children.get(i, [])
    if not below:
        return [label]
    space = " " * (sum(columns(span.text) for span in label) + 1)
    lines = []
    for k, child in enumerate(below):
        node = nodes[child]
        only, first, last = len(below) == 1, k == 0, k == len(below) - 1
        corner = "─" if only else "┬" if first else "└" if last else "├"
        edge = Span(f"{corner}─{'─' if node.kind == 'rejected' else ''}{MARKS[node.kind]}", _codes(node))
        start = [*label, Span(" ")] if first else [Span(space)]
        indent = Span(space + ("    " if last else "│   "))
        head, *rest = _lines_below(child, nodes, children)
        lines.append([*start, edge, *head])
        lines += [[indent, *line] for line in rest]
    return lines


def _label(node: Node) -> Line:
    """A token, and the score of a drafted one."""
    text = clipped([Span(shown(node.text))], LABEL)
    label = [Span(span.text, _codes(node)) for span in text]
    if node.score is not None:
        label.append(Span(f" {node.score:.2f}".replace(" 0.", " ."), DIM))
    return label


def _codes(node: Node) -> str:
    if node.kind == "rejected":
        return DIM
    return f"1;{COLOURS[min(node.depth, 6)]}" if node.kind == "accepted" else "1"


def _depth(view: StepView, i: int) -> int:
    """Which of COLOURS the i-th token of a step has."""
    return 0 if view.own and i == len(view.kept) - 1 else min(i + 1, 6)


def shown(text: str) -> str:
    """A text on one line, with nothing in it that a terminal would obey."""
    return "".join(SHOWN.get(c) or (c if c.isprintable() else ascii(c)[1:-1]) for c in text) or "∅"


def columns(text: str) -> int:
    """How many columns of a terminal a text takes."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def clipped(line: Line, width: int) -> Line:
    """A line that is cut to a number of columns, with … where something was cut off."""
    if sum(columns(span.text) for span in line) <= width:
        return line
    out, left = [], width - 1
    for text, codes in line:
        kept = text
        while columns(kept) > left:
            kept = kept[:-1]
        out.append(Span(kept, codes))
        left -= columns(kept)
        if kept != text:
            break
    return [*out, Span("…")]
