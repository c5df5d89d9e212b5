"""A chat in the terminal: what the user types, the answers of the model, and the commands that begin with a slash."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from cli.report import Report, Request
from cli.steps import StepRecorder
from cli.tree_text import coloured, wants_colour
from decoding.params import SamplingParams, with_suggestions
from engine.engine import Engine
from engine.results import Chunk, GenerationResult
from engine.streams import Stream
from support import cache
from support.errors import BadFileError, UsageError
from support.files import INDEX_LIMIT, read_json, write_json, writing_errors
from support.progress import say
from text.splitter import THOUGHT, Piece, Splitter
from text.template import answer_room, newest_turns
from text.tokenizer import Tokenizer


def chat(conversation: Conversation) -> int:
    """Answer what the user types until the input ends."""
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    read = terminal_reader() if at_terminal else lambda: next(sys.stdin.buffer).decode()
    if at_terminal:
        conversation.report.line("\n/help lists the commands, Ctrl-D leaves.")
    while True:
        try:
            text = read().strip()
            if text in ("/exit", "/quit"):
                return 0
            if text:
                conversation.take(text)
        except (EOFError, StopIteration):  # the end of a terminal, or of a pipe
            return 0
        except UnicodeDecodeError as error:
            say(f"error  not UTF-8: {error}")
        except ValueError as error:
            say(f"error  {error}")
        except KeyboardInterrupt:
            if not at_terminal:
                raise
            say("(Ctrl-D leaves)")


def terminal_reader() -> Callable[[], str]:
    """What reads a message at a terminal: with arrow keys, the history of all chats, and a paste as one message."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings

    file, history = cache.folder() / "chat_history", None
    with contextlib.suppress(OSError):  # without a file the history is that of this chat alone
        file.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)):
            file.chmod(0o600)  # only this user can read it
        history = FileHistory(str(file))
    keys = KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    session: PromptSession[str] = PromptSession(key_bindings=keys, history=history)
    return lambda: session.prompt("\n> ")


class Answered:
    """What an answer to a message says: its `text`, without the space that a template may leave before it, and the
    `thought` that came first, which is not shown."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]):
        """prompt: the ids that are answered."""
        self.text = self.thought = ""
        self._splitter = Splitter(tokenizer.dialect, {}, THOUGHT if tokenizer.thinks_after(prompt) else "")

    def read(self, texts: Iterable[str]) -> Iterator[str]:
        """Take the answer as it comes. Yields what is to be shown."""
        for text in texts:
            yield self._sort(self._splitter.push(text))
        yield self._sort(self._splitter.finish())
        if self.thought and not self.text:
            say("(it ended while thinking, without an answer)")

    def _sort(self, pieces: Iterable[Piece]) -> str:
        before = self.text
        for piece in pieces:
            if piece.kind == THOUGHT:
                if not self.thought:
                    say("(thinking)")
                self.thought += piece.text
            else:
                self.text += piece.text if self.text else piece.text.lstrip()
        return self.text[len(before) :]


@contextlib.contextmanager
def ctrl_c_ends(stream: Stream) -> Iterator[Iterator[Chunk]]:
    """The stream's chunks, which Ctrl-C ends between two steps, so that the caches stay valid.

    A second Ctrl-C does not wait for the end of a step.
    """
    pressed: list[int] = []

    def press(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    def chunks() -> Iterator[Chunk]:
        for chunk in stream:
            yield chunk
            if pressed:
                return

    before = signal.signal(signal.SIGINT, press)
    try:
        yield chunks()
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, before)
        stream.close()


class Conversation:
    """The messages so far, the ids that the engine has of them, and the settings of the next answer.

    given: the sampling settings that the user chose. drop_oldest: when the context is full, the oldest turns are dropped
    instead of the message refused.
    """

    def __init__(self, engine: Engine, given: dict[str, Any], system: str | None, report: Report, drop_oldest: bool):
        self.drop_oldest = drop_oldest
        self.engine = engine
        self.given = dict(given)
        self.report = report
        self.last: tuple[Request, GenerationResult] | None = None
        self.last_thought = ""
        self.start_over(system)

    def take(self, text: str) -> None:
        """Do a command or answer a message. Raises ValueError, in one line, for what cannot be done."""
        name, _, argument = text.partition(" ")
        if not re.fullmatch("/[a-z]+", name):
            self.answer(text)
        elif name in ACTIONS:
            ACTIONS[name](self, argument.strip())
        else:
            raise UsageError(f"there is no command {name}; /help lists them.")

    def answer(self, text: str) -> None:
        """Let the model answer a message, and keep both."""
        messages = [*self.messages, {"role": "user", "content": text}]
        tokenizer, ctx = self.engine.tokenizer, self.engine.ctx
        prompt = tokenizer.continue_chat(messages, self.ids) if self.ids else tokenizer.encode_chat(messages)
        longest = ctx - answer_room(ctx, self.given.get("max_new_tokens"))
        if self.drop_oldest and len(prompt) > longest:
            messages = newest_turns(messages, lambda some: len(tokenizer.encode_chat(some)) <= longest)
            prompt = tokenizer.encode_chat(messages)
        room = ctx - len(prompt)
        if room < 1:
            what = "message alone has" if self.drop_oldest else "conversation would have"
            way = "Shorten it" if self.drop_oldest else "/reset starts over"
            problem = f"the {what} {len(prompt):,} tokens, and the context holds {ctx:,}"
            raise UsageError(f"{problem}. {way}, and a larger --ctx holds more.")
        if dropped := len(self.messages) + 1 - len(messages):
            say(f"note  the context is full, so the {dropped} oldest messages were dropped")
        most = min(room, self.given.get("max_new_tokens", room))
        own = {"max_new_tokens": most, "shown_ids": tokenizer.shown_ids()}
        params, suggested = with_suggestions(self.engine.generation, self.given | own)
        stream = self.engine.generate(prompt, params)
        answered = Answered(tokenizer, prompt)
        with ctrl_c_ends(stream) as chunks:
            for text in answered.read(chunk.text for chunk in chunks):
                print(text, end="", flush=True)
        print(flush=True)
        result = stream.result
        self.last, self.last_thought = (Request(prompt, params, suggested), result), answered.thought
        reply = answered.text.strip()
        if reply:
            thought = {"thought": answered.thought} if answered.thought else {}
            self.messages = [*messages, {"role": "assistant", "content": reply} | thought]
            written = result.token_ids[:-1] if result.stop_reason == "eos" else result.token_ids
            # A stop string was cut off the text, but not off the ids. Templates leave earlier thoughts out.
            self.ids = [] if result.stop_reason == "stop" or thought else prompt + written
        self.report.line(self._status(result, room))

    def _status(self, result: GenerationResult, room: int) -> str:
        """One line about an answer."""
        facts = [f"{result.new_tokens:,} tokens", f"{result.tokens_per_second:.1f} tok/s"]
        facts += [f"tau {result.tau:.2f}"] if self.engine.drafter.D > 0 else []
        facts.append(f"{result.cached_tokens:,} of {result.prompt_tokens:,} prompt tokens cached")
        if result.stop_reason == "interrupted":
            facts.append("stopped")
        elif result.stop_reason == "length":
            facts.append("the context is full (/reset)" if result.new_tokens == room else "--max-new-tokens reached")
        return f"[{'   '.join(facts)}]"

    def start_over(self, system: str | None) -> None:
        """Forget all messages. The next one comes after this system message, if there is one."""
        self.system = system
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self.ids: list[int] = []  # of all messages, the replies as the model wrote them; [] if they are not known

    def _take_back(self) -> str:
        """Forget the last message of the user and its answer. Returns the message's text."""
        asked = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            raise UsageError("there is no message yet.")
        text = self.messages[asked[-1]]["content"]
        self.messages, self.ids = self.messages[: asked[-1]], []
        return text

    def undo(self, argument: str) -> None:
        """Forget the last message and its answer."""
        say(f"forgot {self._take_back()!r:.60}")

    def regenerate(self, argument: str) -> None:
        """Answer the last message again, with the next seed. An answer that fails leaves the one before."""
        before = self.messages, self.ids, self.given
        text = self._take_back()
        kept = self.messages
        self.given = self.given | {"seed": self.given.get("seed", 0) + 1}
        try:
            self.answer(text)
        finally:
            if self.messages is kept:
                self.messages, self.ids, self.given = before

    def save(self, file: str) -> None:
        """Write the messages to a file."""
        if not file or not self.messages:
            raise UsageError("/save FILE writes the conversation to a file, once there is one.")
        path = Path(file).expanduser()
        with writing_errors(path):
            write_json(path, {"messages": self.messages})
        say(f"{len(self.messages)} messages written to {file}")

    def load(self, file: str) -> None:
        """Take the messages of a file that `save` wrote. Nothing changes if it cannot be used."""
        if not file:
            raise UsageError("/load FILE reads a conversation that /save FILE wrote.")
        messages = read_json(Path(file).expanduser(), INDEX_LIMIT).get("messages")
        self.engine.tokenizer.render_chat(messages, add_generation_prompt=False)  # refuses what is no conversation
        if messages[-1]["role"] == "user":
            raise BadFileError(f"{file}: its last message has no answer.")
        self.start_over(messages[0]["content"] if messages[0]["role"] == "system" else None)
        self.messages = messages
        say(f"{len(messages)} messages read from {file}")

    def stats(self, argument: str) -> None:
        """The full report of the last answer."""
        request, result = self._last()
        report = Report(quiet=False)
        report.bandwidth = self.report.bandwidth
        report.tail(self.engine, [result], request)

    def tree(self, argument: str) -> None:
        """Decode the last answer again, now recording its steps, and print it in colours."""
        request, result = self._last()
        if self.engine.drafter.D == 0:
            raise UsageError("/tree shows what was drafted, and nothing drafts here; start with --eagle HEAD.")
        params = replace(request.params, max_new_tokens=result.new_tokens)
        stream = self.engine.generate(request.prompt_ids, params)
        recorder = StepRecorder(self.engine, stream.result)
        try:
            with ctrl_c_ends(stream) as chunks:
                for _ in recorder.follow(chunks):
                    pass
        finally:
            self.engine.remove_observer(recorder)
        print(coloured(recorder) if wants_colour(sys.stdout) else stream.result.text, flush=True)

    def thought(self, argument: str) -> None:
        """What the model thought before the last answer."""
        print(self.last_thought or "(no thought)", flush=True)

    def _last(self) -> tuple[Request, GenerationResult]:
        if self.last is None:
            raise UsageError("there is no answer yet.")
        return self.last

    def set(self, name: str, kind: Callable[[str], float], text: str) -> None:
        """Change a setting of the next answers."""
        try:
            given = self.given | {name: kind(text)}
        except ValueError:
            raise UsageError(f"{name} {text!r:.40} is no number.") from None
        SamplingParams(**given)  # refuses what is out of range
        self.given = given
        say(f"{name} {given[name]:g}")


# The commands as /help shows them: what they do, in words, and the functions that do it.
COMMANDS: dict[str, tuple[str, Callable[[Conversation, str], None]]] = {
    "/help": ("this list", lambda talk, _: say(HELP)),
    "/reset": ("start over", lambda talk, _: talk.start_over(talk.system)),
    "/undo": ("forget the last message and its answer", Conversation.undo),
    "/regenerate": ("answer the last message again, with the next seed", Conversation.regenerate),
    "/system [TEXT]": ("start over with this system message; without a text, with none", Conversation.start_over),
    "/save FILE": ("write the conversation as JSON", Conversation.save),
    "/load FILE": ("go on with a conversation that was saved", Conversation.load),
    "/stats": ("the full report of the last answer", Conversation.stats),
    "/thought": ("what the model thought before the last answer", Conversation.thought),
    "/tree": ("decode the last answer again and colour it by depth in the draft trees", Conversation.tree),
    "/seed N": ("seed of the next answers", lambda talk, text: talk.set("seed", int, text)),
    "/temp X": ("temperature of the next answers; 0 always takes the likeliest token",
                lambda talk, text: talk.set("temperature", float, text)),
}  # fmt: skip
ACTIONS = {shown.split()[0]: action for shown, (_, action) in COMMANDS.items()}
HELP = "".join(f"{shown:15} {words}\n" for shown, (words, _) in COMMANDS.items())
HELP += """/exit           leave, as Ctrl-D does
Ctrl-C stops an answer and keeps what is there of it; pressed twice, it waits for nothing.
Alt-Enter begins a new line of a message."""
