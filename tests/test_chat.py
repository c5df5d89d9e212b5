"""The chat: what a user types at a terminal, what the commands do, and what the caches keep from turn to turn."""

import io
import json
import os
import re
import select
import signal
import sys
import time
from pathlib import Path

import pytest
from test_generate import instruct_model

from cli.chat import ACTIONS, Conversation, ctrl_c_ends
from cli.report import Report
from decoding.params import SamplingParams
from generate import load, main
from loading.options import DEMO

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def instruct(tmp_path_factory) -> Path:
    return instruct_model(tmp_path_factory.mktemp("instruct"))


@pytest.fixture(scope="module")
def engine(instruct):
    return load(instruct, ctx=512)


def conversation(engine, system: str | None = None, **given) -> Conversation:
    return Conversation(engine, {"stop_ids": (4095,), **given}, system, Report(quiet=True), drop_oldest=False)


def test_a_turn_finds_the_whole_exchange_before_it_in_the_cache(engine, capsys):
    """All ids of the exchange but the last are cached, also where encoding the reply again would give other ids."""
    talk = conversation(engine, temperature=2.0, max_new_tokens=40)
    for text in ("def f(x):", "and a class", "and a test"):
        known = len(talk.ids)
        talk.answer(text)
        cached = talk.last[1].cached_tokens
        assert cached == max(0, known - 1), "all but the last token, which was never run"
    tokenizer = engine.tokenizer
    again = tokenizer.encode_chat([*talk.messages, {"role": "user", "content": "x"}])
    assert again[: len(talk.ids)] != talk.ids, "this seed does not show the difference"
    replies = "".join(m["content"] for m in talk.messages[1::2])
    assert "".join(replies.split()) in "".join(capsys.readouterr().out.split())


def test_a_stopped_answer_is_kept_and_stays_in_the_cache(engine, monkeypatch, capsys):
    """An answer that Ctrl-C stops is kept as a message, and the next turn finds it cached and has the tokens of a fresh
    engine."""
    talk = conversation(engine)
    pushed = iter(range(100))
    show = sys.stdout.write

    def press(text: str) -> int:
        if next(pushed, 0) == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return show(text)

    monkeypatch.setattr(sys.stdout, "write", press)
    before = signal.getsignal(signal.SIGINT)
    talk.answer("def f(x):")
    monkeypatch.undo()
    stopped = talk.last[1]
    assert stopped.stop_reason == "interrupted" and 5 < stopped.new_tokens < 40
    assert talk.messages[-1] == {"role": "assistant", "content": stopped.text.strip()}
    assert signal.getsignal(signal.SIGINT) is before
    known = talk.ids
    talk.given["max_new_tokens"] = 30
    talk.answer("go on")
    request, result = talk.last
    assert result.cached_tokens == len(known) - 1 and request.prompt_ids[: len(known)] == known
    engine.forget()
    fresh = engine.generate(request.prompt_ids, request.params).run()[0]
    assert result.token_ids == fresh.token_ids


def test_a_second_ctrl_c_does_not_wait(engine):
    """A second Ctrl-C interrupts at once."""
    stream = engine.generate([1, 5, 9], SamplingParams(max_new_tokens=400, stop_ids=(4095,)))
    with ctrl_c_ends(stream) as chunks:
        next(chunks)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        raise AssertionError("not interrupted")
    assert stream.result.stop_reason == "interrupted"


def test_the_context_limits_an_answer_and_nothing_else_does(engine, capsys):
    """An answer may fill the context; the next message is refused, and after /reset --max-new-tokens holds."""
    talk = conversation(engine)
    talk.answer("def f(x):")
    request, result = talk.last
    assert result.stop_reason == "length" and len(request.prompt_ids) + result.new_tokens == 512
    messages = list(talk.messages)
    with pytest.raises(ValueError, match="the context holds 512. /reset starts over"):
        talk.answer("more")
    assert talk.messages == messages
    talk.take("/reset")
    talk.given["max_new_tokens"] = 9
    talk.answer("more")
    assert talk.last[1].new_tokens == 9


def test_the_commands_do_what_help_says(engine, tmp_path, capsys):
    """Every command does its work, wrong ones raise a ValueError and change nothing, and /help lists them all."""
    talk = conversation(engine, max_new_tokens=5)
    wrong = ["/stats", "/tree", "/save", f"/save {tmp_path}/x", "/load", "/load no/such", "/seed x", "/temp -1", "/foo"]
    for text in wrong:
        with pytest.raises(ValueError):
            talk.take(text)
    talk.take("/system be brief")
    assert talk.messages == [{"role": "system", "content": "be brief"}]
    talk.take("def f(x):")
    talk.take("/seed 7")
    talk.take("/temp 0.5")
    talk.take("/etc/passwd is a file")
    assert len(talk.messages) == 5 and (talk.last[0].params.seed, talk.last[0].params.temperature) == (7, 0.5)
    file = tmp_path / "talk.json"
    talk.take(f"/save {file}")
    kept = talk.messages
    talk.take("/reset")
    assert talk.messages == kept[:1]
    talk.take(f"/load {file}")
    assert talk.messages == kept and talk.system == "be brief"
    talk.take("more")
    for bad in ([], [{"role": "user", "content": "x"}], [{"role": "a"}], "x", None):
        file.write_text(json.dumps({"messages": bad}))
        with pytest.raises(ValueError):
            talk.take(f"/load {file}")
    assert len(talk.messages) == 7
    talk.take("/stats")
    err = capsys.readouterr().err
    assert "generate     5 tok" in err and "seed 7  T 0.5" in err
    talk.take("/system")
    assert talk.messages == []
    with pytest.raises(ValueError, match="--eagle HEAD"):
        talk.take("/tree")
    talk.take("/help")
    assert set(re.findall(r"^/[a-z]+", capsys.readouterr().err, re.M)) == {*ACTIONS, "/exit"}


def test_undo_and_regenerate(engine, capsys):
    """A message that stays behind, an answer that is the same again, and a failure that loses the answer before it."""
    talk = conversation(engine, temperature=2.0, max_new_tokens=12)
    for command in ("/undo", "/regenerate"):
        with pytest.raises(ValueError, match="no message yet"):
            talk.take(command)
    talk.take("def f(x):")
    first = list(talk.messages)
    talk.take("and a class")
    second = list(talk.messages)
    talk.take("/regenerate")
    assert talk.messages[:3] == second[:3] and talk.messages[3] != second[3] and talk.given["seed"] == 1
    talk.take("/undo")
    assert talk.messages == first
    talk.take("and a class")
    again = list(talk.messages)
    talk.engine = None
    with pytest.raises(AttributeError):
        talk.take("/regenerate")
    assert talk.messages == again and talk.given["seed"] == 1
    capsys.readouterr()


def test_the_oldest_turns_are_dropped_where_the_user_wants_that(engine, capsys):
    """A chat that can only be started over, and one that forgets its system message or says nothing, or
    that says so of a message that is refused."""
    talk = conversation(engine, "Be brief.", max_new_tokens=8)
    talk.drop_oldest = True
    for _ in range(8):
        talk.take("word " * 60)
    said = capsys.readouterr().err
    assert "the 2 oldest messages were dropped" in said and talk.messages[0]["content"] == "Be brief."
    assert [m["role"] for m in talk.messages[1:]] == ["user", "assistant"] * (len(talk.messages) // 2)
    assert len(talk.messages) < 17
    before = list(talk.messages)
    with pytest.raises(ValueError, match="the message alone has .* Shorten it"):
        talk.take("word " * 600)
    assert "dropped" not in capsys.readouterr().err and talk.messages == before


def test_tree_shows_the_last_answer_in_colours(instruct, capsys, monkeypatch):
    """/tree prints the last answer's text, and no observer stays on the engine."""
    monkeypatch.setattr("cli.chat.wants_colour", lambda stream: True)
    talk = conversation(load(instruct, ctx=256, eagle=str(DEMO / "eagle1")), max_new_tokens=30)
    talk.answer("def f(x):")
    capsys.readouterr()
    talk.take("/tree")
    shown = re.sub(r"\033\[\d+m", "", capsys.readouterr().out).lstrip()
    assert shown.startswith(talk.messages[-1]["content"]) and "depth 2" in shown and talk.engine.observers == []


class Terminal:
    """A program at a pseudo-terminal, with what it has written so far."""

    def __init__(self, command: list[str]):
        environment = os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process, self.fd = pytest.importorskip("pty").fork()
        if not self.process:
            os.chdir(ROOT)
            os.execve(command[0], command, environment)
        self.seen = ""

    def type(self, text: str) -> None:
        data = text.encode()
        while data:
            self._read(0)
            data = data[os.write(self.fd, data[:1000]) :]

    def wait(self, pattern: str, seconds: float = 60) -> str:
        """Wait for a pattern in what was written since the last one that was found. Returns all up to its end."""
        end = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen)):
            assert time.monotonic() < end, f"no {pattern} in {self.seen[:600]!r} ... {self.seen[-600:]!r}"
            self._read(0.2)
        text, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return text

    def end(self, seconds: float) -> int:
        """Wait for the end of the program, or kill it after this time. Returns its exit status."""
        end = time.monotonic() + seconds
        while not (found := os.waitpid(self.process, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.kill(self.process, signal.SIGKILL)
            time.sleep(0.02)
        os.close(self.fd)
        return found[1]

    def _read(self, seconds: float) -> None:
        while select.select([self.fd], [], [], seconds)[0]:
            try:
                self.seen += os.read(self.fd, 65536).decode(errors="replace")
            except OSError:  # the program has ended
                return
            seconds = 0


LEFT, UP, CTRL_C, CTRL_D = "\033[D", "\033[A", "\x03", "\x04"
PROMPT = r"\x1b\[\?2004h[^>]*>"  # the terminal is told to mark pastes
ANSWER = r"\x1b\[\?2004l(\x1b\[[?\d;]*[a-zA-Z]|\s)*[^\s\x1b]"
STATUS = r"\[([\d,]+) tokens.* tok/s   ([\d,]+) of ([\d,]+) prompt tokens cached   (.*)\]"


def test_a_chat_at_a_terminal(instruct, tmp_path, monkeypatch):
    """Arrow keys edit, a paste is one message, Ctrl-C stops an answer alone, Ctrl-D leaves with 0, and the cache is
    used."""
    flags = ["--checkpoint", str(instruct), "--chat", "--stop-ids", "4095", "--device", "cpu"]
    flags += ["--kernels", "reference"]  # a cache folder of its own has no compiled kernels
    monkeypatch.setenv("EAGLET_CACHE", str(tmp_path / "cache"))
    terminal = Terminal([sys.executable, "generate.py", *flags])

    def ask(keys: str) -> list[int]:
        """Type a message, let the answer begin, stop it, and return the counts of the status line."""
        terminal.wait(PROMPT)
        terminal.type(keys)
        time.sleep(0.3)
        terminal.type("\r")
        terminal.wait(ANSWER)
        terminal.type(CTRL_C)
        status = re.search(STATUS, terminal.wait(STATUS))
        assert status[4] == "stopped"
        return [int(number.replace(",", "")) for number in status.groups()[:3]]

    patience = 0
    try:
        written, cached, prompt = ask("def ():" + LEFT * 3 + "foo")
        assert cached == 0
        known = prompt + written
        written, cached, prompt = ask(UP)
        assert cached == known - 1
        pasted = "begin\n" + (" " * 99 + "\n") * 100 + "end"
        assert len(pasted) > 10_000
        ask(f"\033[200~{pasted}\033[201~")
        terminal.wait(PROMPT)
        terminal.type(CTRL_C)
        terminal.wait("Ctrl-D leaves")
        terminal.wait(PROMPT)
        terminal.type(f"/save {tmp_path / 'talk.json'}\r")
        terminal.wait("6 messages written")
        terminal.wait(PROMPT)
        terminal.type(CTRL_D)
        patience = 20
    finally:
        status = terminal.end(patience)
    assert status == 0
    said = [m["content"] for m in json.loads((tmp_path / "talk.json").read_text())["messages"]]
    assert said[:4:2] == ["def foo():", "def foo():"] and said[4] == pasted and said[1]
    history = tmp_path / "cache" / "chat_history"
    assert "+def foo():" in history.read_text() and history.stat().st_mode & 0o777 == 0o600


def test_a_chat_reads_the_lines_of_a_pipe(capsys, monkeypatch):
    """Where there is no terminal, a line is a turn that finds the one before it cached, a line that is not UTF-8 or too
    long is one error that spoils no other line, and /exit ends the chat."""
    lines = [b"def f(x):", b"\xff", b"x = 1 " * 200, b"", b"and a class", b"/exit", b"never read"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n".join(lines)), encoding="utf-8"))
    assert main(["--chat", "--template", "vicuna", "--max-new-tokens", "8", "--ctx", "256"]) == 0
    err = capsys.readouterr().err
    first, second = (int(cached) for cached in re.findall(r"(\d+) of \d+ prompt tokens cached", err))
    assert second >= first + 6 and second > 20
    errors = [line for line in err.splitlines() if line.startswith("error  ")]
    assert len(errors) == 2 and "not UTF-8" in errors[0] and "256" in errors[1] and "/reset" in errors[1]
