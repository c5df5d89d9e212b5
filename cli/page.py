"""The page that `--html` writes: the text, the tree of every step, and tokens and time per step as charts.

The page is one file. It holds its styles, its script and its data, and it loads nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cli.steps import StepRecorder
from engine import Engine
from runtime.results import GenerationResult
from support.files import write_text
from support.machine import describe_device

HERE = Path(__file__).parent
PARTS = ("drawings.css", "drawings.js")  # what other pages that show steps can use, too


def write_page(
    file: str | Path, engine: Engine, recorder: StepRecorder, prompt_ids: Sequence[int], result: GenerationResult
) -> None:
    """Write the page of a request that the recorder has followed."""
    data = page_data(engine, recorder, prompt_ids, result)
    page = with_drawings((HERE / "page.html").read_text(encoding="utf-8"))
    # The data comes last, because a text may hold a mark. Without "<" no text can end the script that holds it.
    write_text(file, page.replace("%data%", json.dumps(data).replace("<", "\\u003c")))


def with_drawings(text: str) -> str:
    """A part of a page with the styles and functions of the drawings where it names their files."""
    for name in PARTS:
        text = text.replace(f"%{name}%", (HERE / name).read_text(encoding="utf-8"))
    return text


def page_data(
    engine: Engine, recorder: StepRecorder, prompt_ids: Sequence[int], result: GenerationResult
) -> dict[str, Any]:
    """What the page shows, as an object for JSON."""
    tokenizer = engine.tokenizer
    text = ",".join(map(str, prompt_ids)) if tokenizer is None else tokenizer.decode(prompt_ids, skip_special=False)
    return {
        "facts": facts(engine, result),
        "prompt": text,
        "scores": recorder.meaning(result.temperature),
        "first": recorder.first,
        "tau": result.tau,
        "steps": [view.to_dict() for view in recorder.views],
    }


def facts(engine: Engine, result: GenerationResult) -> list[tuple[str, str]]:
    """The names of the model and of what drafts, the shape of the tree, and the settings of the request."""
    options, drafter = engine.options, engine.drafter
    about: list[tuple[str, str]] = []
    if options is not None:
        quant = f"{engine.model.quant}, " if engine.model.quant else ""
        about.append(("model", f"{_name(options.checkpoint)} ({quant}{options.dtype})"))
        version = f" (EAGLE-{engine.head.config.version})" if engine.head else ""
        files = [file for file in (options.eagle, options.draft_checkpoint, options.medusa) if file]
        about += [("draft model" if options.draft_checkpoint else "head", _name(file) + version) for file in files]
        if options.drafter_kind and not files:
            about.append(("drafter", options.drafter_kind))
    tau = ""
    if drafter.D:
        name = f"{', '.join(options.trees)}: " if options is not None and engine.head else ""
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
