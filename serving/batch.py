"""`generate.py --input FILE --output FILE`: answers to a file of requests, one JSON object a line, as OpenAI's batch API
has them."""

import argparse
import asyncio
import json
import math
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cli.report import Report
from engine.intake import Intake
from engine.ranks import RankLost
from loading.options import settings_given
from serving.app import ENDPOINTS
from serving.completions import new_id
from serving.fields import ApiError
from serving.replicas import load_engine
from serving.scheduler import Scheduler, ServeSettings, engine_error
from support.errors import UsageError
from support.files import append_json_lines, read_json_lines, read_text
from support.progress import Progress
from support.reader import check, json_lines, refusal

AHEAD = 2  # requests under way for each slot, so that none waits for its next one
LINE = {"custom_id": str, "method": str, "url": str, "body": {}}
Line = dict[str, Any]


def read_requests(path: Path) -> list[Line]:
    """The lines of a file of requests. Raises BadFileError for one that is no request, or whose id came before."""
    requests: dict[str, Line] = {}
    for where, value in json_lines(read_text(path), path):
        request = check(value, LINE, where)
        if request["method"] != "POST" or request["url"] not in ENDPOINTS:
            allowed = f"POST to {', '.join(ENDPOINTS)}"
            raise refusal(where, f"{request['method']:.20} {request['url']:.80}; allowed: {allowed}.")
        if request["custom_id"] in requests:
            raise refusal(where, f"the custom_id {request['custom_id']!r:.80} came before.")
        requests[request["custom_id"]] = request
    if not requests:
        raise refusal(path, "it is empty; give one request a line.")
    return list(requests.values())


def read_answers(path: Path, requests: Sequence[Line]) -> list[Line]:
    """The answers that an interrupted run has left. Raises UsageError where they are not those of the first requests."""
    answers = read_json_lines(path, {"custom_id": str})
    if [one["custom_id"] for one in answers] != [one["custom_id"] for one in requests[: len(answers)]]:
        raise UsageError(f"{path} holds answers to other requests; name another --output, or delete it.")
    return answers


def run_file(args: argparse.Namespace) -> int:
    """What `generate.py --input FILE --output FILE` does. Returns the exit code."""
    requests, output = read_requests(Path(args.input)), Path(args.output)
    answered = len(read_answers(output, requests))
    report = Report(args.quiet)
    if answered:
        report.line(f"note    {output} has {answered:,} of {len(requests):,} answers already")
    if answered == len(requests):
        return 0
    args.slots = args.slots or 0
    engine = load_engine(args, report)
    name = Path(args.checkpoint).resolve().name
    limits = {"max_queue": AHEAD * engine.batch_size, "max_seconds": math.inf}
    settings = ServeSettings(name, **limits, defaults={"seed": 0} | settings_given(args))
    try:
        run = _Run(engine, settings)
        report.line(asyncio.run(run.answer_all(requests[answered:], output, Progress(args.quiet))))
    finally:
        engine.close()
    return 0


class _Run:
    """Appends the answers to requests to a file, in their order.

    As many requests run together as the engine has slots. A request that is wrong gets its error as an answer. Whatever
    was answered before an interruption stays in the file.
    """

    def __init__(self, engine: Intake, settings: ServeSettings):
        self.scheduler = Scheduler(engine, settings)
        self.room = asyncio.Semaphore(AHEAD * engine.batch_size)
        self.tokens = self.wrong = 0
        self.began = time.monotonic()

    async def answer_all(self, requests: Sequence[Line], output: Path, progress: Progress) -> str:
        """Answer the requests. Returns a line about what was done. Raises what keeps the engine from going on."""
        waiting = deque(asyncio.create_task(self._answer(request)) for request in requests)
        total = len(waiting)
        try:
            while waiting:
                answers = [await waiting.popleft()]
                while waiting and waiting[0].done():  # a write waits for the disk, so they share one
                    answers.append(waiting.popleft().result())
                append_json_lines(output, *answers)
                done = total - len(waiting)
                progress(done / total, f"{done} of {total}, {self._speed()[1]:.0f} tok/s")
        finally:
            progress.close()
            for job in self.scheduler.jobs:
                job.cancel()
        refused = f"   {self.wrong:,} refused, and their lines say why" if self.wrong else ""
        seconds, rate = self._speed()
        return f"{total:,} requests   {self.tokens:,} tok   {seconds:.1f} s   {rate:.1f} tok/s{refused}"

    def _speed(self) -> tuple[float, float]:
        """Seconds since the start, and the tokens of each."""
        seconds = max(time.monotonic() - self.began, 1e-9)
        return seconds, self.tokens / seconds

    async def _answer(self, request: Line) -> Line:
        parse, writer_class = ENDPOINTS[request["url"]]
        try:
            async with self.room:
                job = await self.scheduler.admit(parse, json.dumps(request["body"]).encode())
                writer = writer_class(job)
                await job.complete()
            status, answer = 200, writer.whole()
            self.tokens += sum(result.new_tokens for result in job.results)
        except (torch.AcceleratorError, RankLost):  # no other request can be answered either
            raise
        except (ApiError, ArithmeticError, ValueError) as failure:
            error = engine_error(failure)
            status, answer = error.status, error.body()
            self.wrong += 1
        name = new_id("batch_req_")
        response = {"status_code": status, "request_id": name, "body": answer}
        return {"id": name, "custom_id": request["custom_id"], "response": response, "error": None}
