"""Chat templates of models: rendered by jinja2's sandbox in a child process, with limits.

A template comes with a model's files, so it is untrusted. The sandbox alone stops neither nested loops nor strings of a
gigabyte. The child is started at the first use and kept, because starting Python takes longer than all else.
"""

import bisect
import contextlib
import datetime
import functools
import json
import math
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable

TEMPLATE_CHARACTERS = 64 * 1024
START_SECONDS = 60
RENDER_SECONDS = 10
RENDER_CPU_SECONDS = 2
RENDER_MEMORY = 512 * 2**20  # bytes of address space


def answer_room(ctx: int, most: int | None) -> int:
    """Tokens that an answer should find free: what it may have at most, or a quarter of the context, if that is less."""
    return min(ctx // 4, most or ctx)


def newest_turns(messages: list[dict], fits: Callable[[list[dict]], bool]) -> list[dict]:
    """The messages without as many of the oldest turns as it takes to fit.

    A turn begins with a message of the user. The system messages at the beginning and the newest turn always stay.
    fits: whether a list of messages is short enough. It is asked only a few times: whatever is left of a list that fits
        must fit, too.
    """
    system = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    starts = [i for i, message in enumerate(messages) if message["role"] == "user" and i > system]
    if not starts or fits(messages):
        return messages
    at = bisect.bisect_left(starts[:-1], True, key=lambda start: fits(messages[:system] + messages[start:]))
    return messages[:system] + messages[starts[at] :]


def in_turns(messages: list[dict], with_system: bool) -> list[dict]:
    """The same chat for a template that wants the user and the assistant in turn.

    What the same one says twice is one message. System messages are the user's, but for those at the beginning, which
    stay with `with_system`. Where a turn is missing there is one of white space.
    """
    made: list[dict] = []
    for message in messages:
        before = made[-1] if made else {"role": ""}
        if message["role"] == "system" and not (with_system and before["role"] in ("", "system")):
            message = message | {"role": "user"}
        role = message["role"]
        if role == before["role"] != "tool" and "tool_calls" not in before.keys() | message.keys():
            made[-1] = before | message | {"content": f"{before['content']}\n\n{message['content']}"}
            continue
        if (role, before["role"]) in (("user", "tool"), ("assistant", ""), ("assistant", "system")):
            made.append({"role": "user" if role == "assistant" else "assistant", "content": " "})
        made.append(message)
    return made


class TemplateWorker:
    """Renders one model's templates in a child process. It may be used from several threads, which wait for each other.

    Every request has limits on time, CPU, memory and output. Where Python has no `resource` module, only time and output
    are limited. A child that ran over a limit is ended, and the next request gets a new one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen | None = None
        self._ready = False  # whether the child has answered

    def begin(self) -> None:
        """Start the child, without waiting for it, where a request is going to come."""
        with self._lock:
            self._start()

    def render(self, template: str, variants: list[list[dict]], variables: dict) -> list[str]:
        """One prompt per list of messages. Raises ValueError for a template that fails or runs over a limit."""
        if len(template) > TEMPLATE_CHARACTERS:
            raise ValueError(f"the template is longer than {TEMPLATE_CHARACTERS} characters")
        request = {"template": template, "variants": variants, "variables": variables}
        with self._lock:
            reply = self._ask(json.dumps(request).encode())
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply["prompts"]

    def _ask(self, request: bytes) -> dict:
        """The reply to a request of one line."""
        self._start()
        try:
            if not self._ready:
                _exchange(self._child, b"", START_SECONDS)  # it answers when it is ready
                self._ready = True
            return json.loads(_exchange(self._child, request, RENDER_SECONDS))
        except BaseException as error:  # after Ctrl-C the child's answer would be taken for that to the next request
            _end(self._child)
            self._child, self._ready = None, False
            if not isinstance(error, ValueError):
                raise
            limits = f"{RENDER_CPU_SECONDS} s of CPU, {RENDER_SECONDS} s, {RENDER_MEMORY >> 20} MB"
            raise ValueError(f"the template ran over a limit ({limits})") from None

    def _start(self) -> None:
        """Start the child, unless there is one."""
        if self._child is not None:
            return
        pipe = subprocess.PIPE
        # in a session of its own, so that Ctrl-C does not reach it
        self._child = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
        )
        weakref.finalize(self, _end, self._child)


def _exchange(child: subprocess.Popen, line: bytes, seconds: float) -> bytes:
    """Send a line and read one; b"" if the child has ended or takes too long, which ends it."""
    timer = threading.Timer(seconds, child.kill)
    timer.start()
    try:
        child.stdin.write(line + b"\n")
        child.stdin.flush()
        return child.stdout.readline()
    except OSError:
        return b""
    finally:
        timer.cancel()


def _end(child: subprocess.Popen) -> None:
    child.kill()
    with contextlib.suppress(OSError), child:  # which closes the pipes and waits
        pass


def _limit() -> None:
    """Allow this process RENDER_CPU_SECONDS more, and RENDER_MEMORY in all."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        most = math.ceil(time.process_time()) + RENDER_CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (RENDER_MEMORY, RENDER_MEMORY))


def _sandbox():
    """Hugging Face's contract for templates in jinja2's immutable sandbox."""
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """The tag that marks the assistant's text for training. Here its body is simply rendered."""

        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message):
        raise ValueError(message)

    def tojson(value, ensure_ascii=False, **options):
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals |= {"raise_exception": raise_exception, "strftime_now": datetime.datetime.now().strftime}
    return sandbox


def _render(compiled, request: dict, limit: int) -> list[str]:
    """The prompts, in the child process. limit: characters of each."""
    template = compiled(request["template"])
    prompts = []
    for messages in request["variants"]:
        prompts.append("")
        for chunk in template.generate({"tools": None, "documents": None, **request["variables"]}, messages=messages):
            prompts[-1] += chunk
            if len(prompts[-1]) > limit:
                raise ValueError("the prompt is far longer than the messages")
    return prompts


def serve() -> None:
    """The child process: read a request a line, write a reply a line, until the parent goes away."""
    compiled = functools.lru_cache(8)(_sandbox().from_string)
    for line in iter(sys.stdin.readline, ""):
        _limit()
        try:
            answer = {"prompts": _render(compiled, json.loads(line), 2**20 + 8 * len(line))} if line.strip() else {}
        except Exception as failure:  # A template may raise anything, and the parent reports it.
            kind = "" if isinstance(failure, ValueError) else f"{type(failure).__name__} "
            answer = {"error": f"{kind}{failure}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
