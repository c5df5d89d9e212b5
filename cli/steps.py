"""Watching a request: the tree of every step, what became of its nodes, and where the time of a step goes.

`StepRecorder` watches, and a `StepView` is what a page or a terminal draws: `write_page` writes the page of `--html`, one
file that holds its styles, its script and its data and loads nothing, and `tree_text.py` draws at the terminal.
`Gauge` times the phases of a step.
"""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from decoding.step import PHASES, Observer, StepOutput
from engine.engine import Engine
from engine.results import Chunk, GenerationResult
from support.files import write_text
from support.machine import describe_device


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


@dataclass(frozen=True)
class Node:
    """A token in the picture of a step."""

    text: str
    parent: int  # its number among the nodes of the picture; -1 for the root
    depth: int
    kind: str  # "root", "accepted", "rejected", or "own": the target's own token, which was not drafted
    score: float | None = None  # None for the root, for the target's own token, and where no model scored


@dataclass(frozen=True)
class StepView:
    """A step as it is drawn. `drawings.js` has it as JSON. Without a draft, the nodes are the root and the own token."""

    nodes: list[Node]
    kept: list[str]  # the text that each token of the step added; "" for a part of a character
    own: bool  # whether the last of these tokens is the target's own; a stop rule may have cut it off
    ms: float  # drafting, the forward and acceptance, without the time that watching takes

    @property
    def accepted(self) -> int:
        """How many drafted tokens the step added to the text."""
        return len(self.kept) - self.own


class StepRecorder(Observer):
    """Collects the steps of the first sequence of one stream.

    It reads every step's tensors on the host, which costs speed. It never changes what is decoded.
    """

    def __init__(self, engine: Engine, result: GenerationResult):
        """result: of the sequence whose steps are wanted."""
        self.engine = engine
        self.result = result
        self.steps: list[Step] = []
        self.first = ""  # the text of the first token, which the prompt's forward gives
        self.views: list[StepView] = []
        self._decoder = None if engine.tokenizer is None else engine.tokenizer.stream(continuation=True)
        self._seconds = 0.0  # that the steps so far have taken
        self._begun = False  # whether the first token is known
        engine.add_observer(self)
        self.scoring = engine.drafter.scoring

    def step(self, output: StepOutput, results: Sequence[GenerationResult | None]) -> None:
        row = next((b for b, result in enumerate(results) if result is self.result), None)
        if row is None:
            return
        count = int(output.count[row])
        draft = output.draft
        columns = (draft.tokens, draft.parent, draft.depth, draft.valid, draft.scores.clamp(max=0).exp())
        chosen = (output.path[row, :count], output.emitted[row, :count])
        self.steps.append(Step(*(column[row].tolist() for column in columns), *(ids.tolist() for ids in chosen)))

    def follow(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Pass the chunks of a stream on. Before a step's chunk is passed on, its view is appended to `views`."""
        for chunk in chunks:
            if chunk.row == 0:
                self.push(chunk)
            yield chunk

    def push(self, chunk: Chunk) -> None:
        """Take a chunk of the sequence, before the next step runs. The time of a step comes from the result, so neither
        the recorder's work nor the reader's is in it."""
        decoder, ids = self._decoder, chunk.token_ids
        kept = [self.text(token) if decoder is None else decoder.push([token]) for token in ids]
        if not self._begun:
            self._begun, self.first = True, "".join(kept)
            return
        step = self.steps[len(self.views)]
        own = len(ids) == len(step.emitted)
        ms = (self.result.decode_seconds - self._seconds) * 1e3
        self.views.append(StepView(self.nodes(step, own), kept, own, ms))
        self._seconds = self.result.decode_seconds

    def nodes(self, step: Step, own: bool) -> list[Node]:
        """The drafted nodes that count, and where `own` says so the target's own token below the last accepted one."""
        live = [i for i, valid in enumerate(step.valid) if valid]
        place = {i: k for k, i in enumerate(live)}
        nodes = [Node(self.text(step.tokens[0]), -1, 0, "root")]
        for i in live[1:]:
            kind = "accepted" if i in step.path else "rejected"
            score = None if self.scoring == "none" else step.score[i]
            nodes.append(Node(self.text(step.tokens[i]), place[step.parent[i]], step.depth[i], kind, score))
        if own:
            last = step.path[-1]
            nodes.append(Node(self.text(step.emitted[-1]), place[last], step.depth[last] + 1, "own"))
        return nodes

    def meaning(self) -> str:
        """What the numbers beside the nodes are.

        A dynamic tree ranks its nodes by scores with the shared noise. These say how sure the draft is of this very text,
        which is not the chance that the draft's own distribution gives.
        """
        if self.scoring == "none":
            return "No model scored the nodes, so there are no numbers beside them."
        if self.scoring == "noisy" and self.result.temperature > 0:
            text = "a score with the shared noise g, not a probability: the product along the path of "
            text += "softmax((z + T g) / max(T, 0.5))"
        else:
            text = "the draft's probability of the path from the root, at temperature 1"
        return f"Beside a node: {text}" + (" (1.00 at an n-gram's node)." if self.engine.drafter.grafted else ".")

    def text(self, token: int) -> str:
        """A token as text, or its id without a tokenizer."""
        if self.engine.tokenizer is None:
            return f"{token} "
        return self.engine.tokenizer.decode([token], skip_special=False, continuation=True)


class Gauge(Observer):
    """Times the phases of an engine's steps, with CUDA events on a GPU and with the clock on a CPU.

    A captured graph records the events at every replay. Without a gauge a step holds no trace of it.
    """

    marks = True

    def __init__(self, engine: Engine):
        self.cuda = engine.model.device.type == "cuda"
        self.milliseconds = dict.fromkeys(PHASES, 0.0)
        self.times: dict[str, float | torch.cuda.Event] = {}
        self.runner = engine.runner
        engine.add_observer(self)

    def mark(self, phase: str) -> None:
        if not self.cuda:
            self.times[phase] = time.perf_counter()
            return
        if phase not in self.times:  # an external event can be asked for its time after a replay too
            self.times[phase] = torch.cuda.Event(enable_timing=True, external=True)
        self.times[phase].record()

    def step(self, output: StepOutput, results: Sequence[GenerationResult | None]) -> None:
        before = self.times["start"]
        for phase in PHASES:
            now = self.times[phase]
            self.milliseconds[phase] += before.elapsed_time(now) if self.cuda else (now - before) * 1e3
            before = now

    def split(self, result: GenerationResult) -> dict[str, float]:
        """Milliseconds per step: every phase, the host (reading the output, launching), and the whole step."""
        steps = max(result.steps, 1)
        parts = {phase: ms / steps for phase, ms in self.milliseconds.items()}
        whole = result.decode_seconds * 1e3 / steps
        return parts | {"host": whole - sum(parts.values()), "step": whole}

    def line(self, result: GenerationResult) -> str:
        """`step 9.8 ms = draft 3.1 + verify 5.9 + accept 0.6 + host 0.2; 1 graph launch per step`."""
        parts = self.split(result)
        whole = parts.pop("step")
        text = f"step {whole:.2f} ms = " + " + ".join(f"{name} {ms:.2f}" for name, ms in parts.items())
        return f"{text}; {self.launches()}"

    def launches(self) -> str:
        """How many CUDA graphs a step launched: 1 when all of it was captured."""
        if not self.runner.replays:
            return "no graph: kernels are launched one by one"
        each = self.runner.replays / self.runner.issued
        return f"{each:g} graph launch{'' if each == 1 else 'es'} per step"


HERE = Path(__file__).parent
PARTS = ("drawings.css", "drawings.js")  # what other pages that show steps can use, too


def write_page(file: str | Path, recorder: StepRecorder, prompt_ids: Sequence[int]) -> None:
    """Write the page of a request that the recorder has followed."""
    data = page_data(recorder, prompt_ids)
    page = with_drawings((HERE / "page.html").read_text(encoding="utf-8"))
    # The data comes last, because a text may hold a mark. Without "<" no text can end the script that holds it.
    write_text(file, page.replace("%data%", json.dumps(data).replace("<", "\\u003c")))


def with_drawings(text: str) -> str:
    """A part of a page with the styles and functions of the drawings where it names their files."""
    for name in PARTS:
        text = text.replace(f"%{name}%", (HERE / name).read_text(encoding="utf-8"))
    return text


def page_data(recorder: StepRecorder, prompt_ids: Sequence[int]) -> dict[str, Any]:
    """What the page shows, as an object for JSON."""
    tokenizer, result = recorder.engine.tokenizer, recorder.result
    text = ",".join(map(str, prompt_ids)) if tokenizer is None else tokenizer.decode(prompt_ids, skip_special=False)
    return {
        "facts": facts(recorder.engine, result),
        "prompt": text,
        "scores": recorder.meaning(),
        "first": recorder.first,
        "tau": result.tau,
        "steps": [asdict(view) for view in recorder.views],
    }


def facts(engine: Engine, result: GenerationResult) -> list[tuple[str, str]]:
    """The names of the model and of what drafts, the shape of the tree, and the settings of the request."""
    options, drafter = engine.options, engine.drafter
    quant = f"{engine.model.quant}, " if engine.model.quant else ""
    about = [("model", f"{_name(options.checkpoint)} ({quant}{options.dtype})")]
    if file := options.eagle or options.draft_checkpoint or options.medusa:
        kind = f" ({engine.head.config.kind})" if engine.head else ""
        about.append(("draft model" if options.draft_checkpoint else "head", _name(file) + kind))
    elif options.drafter_kind:
        about.append(("drafter", options.drafter_kind))
    tau = ""
    if drafter.D:
        name = f"{', '.join(options.trees)}: " if engine.head else ""
        pruned = f", pruned at {drafter.p_min:.0%}" if drafter.p_min else ""
        about.append(("tree", f"{name}{drafter.N} nodes, depth {drafter.D}{pruned}"))
        tau = f", tau {result.tau:.2f}"
    return [
        *about,
        ("device", describe_device(engine.model.device)),
        ("sampling", f"seed {result.seed}, temperature {result.temperature:g}"),
        ("prompt", f"{result.prompt_tokens} tokens"),
        ("generated", f"{result.new_tokens} tokens in {result.steps} steps{tau} ({result.stop_reason})"),
    ]


def _name(file: str) -> str:
    """The last part of a path. A path itself would tell where the files lie."""
    return Path(file).name or file
