"""Recording the steps of a request that asks for them, for pages that draw its trees."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cli.steps import StepRecorder
from engine import Engine
from runtime.results import Chunk, GenerationResult, Stream
from serving.errors import unsupported
from support.errors import one_line

Seen = dict[str, Any]  # what a stream says of its steps; {} unless the request asks for it


@contextlib.contextmanager
def watched(engine: Engine, stream: Stream, wanted: bool) -> Iterator[Iterable[tuple[Chunk, Seen]]]:
    """The chunks of a stream, each with what was seen of its step.

    Only where this is `wanted` does somebody watch, because the engine then waits for the host at every step. Nobody
    watches any more when the block ends, however it ends.
    """
    if not wanted:
        yield ((chunk, {}) for chunk in stream)
        return
    try:
        recorder = StepRecorder(engine)
    except ValueError as error:
        raise unsupported("eaglet.steps", one_line(error)) from None
    try:
        yield _followed(recorder, stream, stream.result)
    finally:
        engine.remove_observer(recorder)


def _followed(recorder: StepRecorder, stream: Stream, result: GenerationResult) -> Iterator[tuple[Chunk, Seen]]:
    for chunk in recorder.follow(stream, result):
        if recorder.views:
            yield chunk, {"steps": [recorder.views[-1].to_dict()]}
        else:
            yield chunk, {"first": recorder.first, "scores": recorder.meaning(result.temperature), "steps": []}


def joined(seen: Sequence[Seen]) -> Seen:
    """What was seen of several chunks in a row, as one."""
    whole: Seen = {}
    for part in seen:
        whole |= part
    return whole | {"steps": [step for part in seen for step in part["steps"]]} if whole else {}
