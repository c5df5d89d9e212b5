"""Splits what a model writes into text, thoughts and tool calls while it arrives.

The reading is one generator, which waits where it needs more text. So what comes out does not depend on where the text
was cut, and every piece comes as soon as it is certain. What looks like a call and is none stays text.
"""

import json
import re
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

from text.calls import NoCall, literal, parsed, python_calls
from text.dialect import Calls, Dialect, PythonCode, Quotes, Tags, any_of, begun_at_end, is_text

TEXT, THOUGHT, CALL, ARGUMENTS = "text", "thought", "call", "arguments"
QUOTED = "quoted"  # text that becomes a part of a JSON text among the arguments
DROP, KEEP, LEAVE = range(3)  # what becomes of a mark: nothing, a part of the piece, or the beginning of what follows
SPACE = " \t\r\n"
ENDS = ("\\\\", '\\"', '"')  # what may follow in a JSON text: an escaped character, or the end
Reading = Generator[None, None, Any]


class Piece(NamedTuple):
    """A part of an answer. kind: TEXT, THOUGHT, CALL or ARGUMENTS. text: of a CALL, the name of the function; the
    ARGUMENTS behind it are JSON text. id: of a CALL, where the model writes one."""

    kind: str
    text: str
    id: str = ""


class Splitter:
    """Takes an answer in pieces of any size. `in_call`: whether a call has begun and not ended.

    White space beside a mark belongs to nothing. Elsewhere every character comes out again.
    """

    def __init__(self, dialect: Dialect, tools: Mapping[str, dict[str, Any]], begun: str = ""):
        """tools: the JSON schemas of their arguments by name. begun: THOUGHT or TEXT where the prompt has the marks that
        begin it."""
        self.in_call = False
        self._dialect = dialect
        self._tools = tools
        self._begun = begun
        self._waiting = ""  # text that was not read yet
        self._ended = self._cut = False
        self._silent = ""  # what was read and belongs to no piece yet
        self._space = ""  # white space that is text only if more text follows
        self._fresh = False  # whether white space is left out, because it follows a mark
        self._empty = False  # whether the call that has begun has no arguments yet
        self._pieces: list[Piece] = []
        self._reading = self._harmony() if dialect.harmony else self._answer()

    def push(self, text: str) -> list[Piece]:
        """Take more of the answer. Returns what is certain now."""
        self._waiting += text
        next(self._reading, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self, cut: bool = False) -> list[Piece]:
        """The rest, at the end of the answer. cut: it ended at a limit, so that a call that is just beginning is left
        out."""
        self._ended, self._cut = True, cut
        rest = self.push("")
        if self.in_call and self._empty and not cut:
            rest.append(Piece(ARGUMENTS, "{}"))
        return [*rest, Piece(TEXT, self._space)] if self._space else rest

    # -------------------------------------------------------------- an answer

    def _answer(self) -> Reading:
        thoughts, end = self._dialect.thoughts, ""
        opened = self._begun == THOUGHT
        forms = self._dialect.calls if self._tools else ()
        begins = {mark: form for form in forms for mark in (form.begin, form.section[0]) if mark}
        if thoughts and not self._begun:
            opened = yield from self._accept(thoughts.begin)
            if not opened:
                self._restore()
        if thoughts and opened:
            self._mark()
            marked = [mark for mark in begins if "`" not in mark]
            while (mark := (yield from self._until(THOUGHT, thoughts.end, *marked))) not in (thoughts.end, ""):
                if (yield from self._try(self._calls(begins[mark], mark), THOUGHT)):
                    break  # a call ends a thought, too
            self._mark()
            if thoughts.around[0] and (yield from self._accept(thoughts.around[0])):
                end = thoughts.around[1]
            self._mark()
        if any(form.bare for form in forms):
            if (yield from self._next()) == "{":
                yield from self._try(self._calls(forms[0]))
            self._restore()
        while mark := (yield from self._until(TEXT, *begins, *filter(None, [end]))):
            if mark == end:
                self._mark()
            else:
                yield from self._try(self._calls(begins[mark], mark))

    def _harmony(self) -> Reading:
        """The messages of gpt-oss: a header with the channel, and with the function that is called, then the body."""
        kind = self._begun
        while True:
            if not kind:
                if not (yield from self._until(TEXT, "<|start|>", "<|channel|>", " to=")):
                    return
                if not (yield from self._until(None, "<|message|>")):
                    return self._restore()
                header = self._silent
                name, channel = re.search(r"to=functions\.([\w.-]+)", header), header.rpartition("<|channel|>")[2]
                self._mark()
                # what is for another function than the client's is no answer either
                aside = "to=" in header.replace("to=assistant", "") and not channel.startswith("final")
                kind = THOUGHT if channel.startswith("analysis") or aside else TEXT
                if name and name[1] in self._tools:
                    self._commit(name[1])
                    kind = ARGUMENTS
            if not (yield from self._until(kind, "<|end|>", "<|call|>", "<|return|>")):
                return
            self._mark()
            kind = ""

    def _try(self, calls: Reading, kind: str = TEXT) -> Reading:
        """Read calls, or what looks like calls and is text of a kind. Returns whether a call began."""
        try:
            yield from calls
        except NoCall:
            if not self.in_call:
                self._restore(kind)
                return False
            if not self._ended:
                self._mark()
        return True

    def _calls(self, form: Calls, mark: str = "") -> Reading:
        """The calls behind a mark."""
        forms = {Tags: self._tagged, Quotes: self._in_braces, PythonCode: self._code}
        read = forms.get(type(form.body), self._named)
        if mark and mark == form.section[0]:
            yield from self._expect(form.begin)
        while True:
            yield from read(form.body, form.end)
            for end in dict.fromkeys(["```" if "```" in form.written else "", form.end]):
                yield from self._accept(end)
            self._mark()
            if not (yield from self._accept(form.begin)):
                break
        yield from self._accept(form.section[1])
        self._mark()

    # -------------------------------------------------------------- forms of calls

    def _named(self, _: None, end: str) -> Reading:
        """JSON behind a name, or one or several objects with names."""
        listed = yield from self._accept("[")
        if listed or (yield from self._next()) == "{":
            while True:
                yield from self._object()
                self._mark()
                if (yield from self._next(SPACE + ",;")) != "{":
                    break
            yield from self._accept("]" if listed else "")
            return
        header, mark = yield from self._name("{", *filter(None, [end]), then=LEAVE)
        name = re.match(r"(?:function<｜tool▁sep｜>|functions\.)?([\w.-]+)", header)
        own = re.match(r"functions\.[\w.-]+:\d+", header)
        self._commit(name[1] if name else "", own[0] if own else "")
        if mark == "{":
            yield from self._json(ARGUMENTS)

    def _object(self) -> Reading:
        """One call: an object with a name and arguments, or with such an object under "function"."""
        yield from self._expect("{")
        depth, name, given = 1, None, None
        while depth:
            key = yield from self._json()
            yield from self._expect(":")
            inside = (yield from self._next()) == "{"
            if key == "function" and inside:
                yield from self._expect("{")
                depth += 1
                continue
            if key in ("arguments", "parameters") and inside and isinstance(name, str):
                self._commit(name)
                yield from self._json(ARGUMENTS)
            elif key in ("arguments", "parameters"):
                given = yield from self._json()
            elif key in ("name", "id", "type", "function"):
                value = yield from self._json()
                name = value if key in ("name", "function") else name
            else:
                raise NoCall
            while depth and (yield from self._accept("}")):
                depth -= 1
            if depth:
                yield from self._expect(",")
        if self.in_call:
            return
        if isinstance(given, str):
            given = parsed(given)
        if not isinstance(name, str) or not isinstance(given or {}, dict):
            raise NoCall
        self._commit(name)
        self._emit(ARGUMENTS, json.dumps(given or {}, ensure_ascii=False))

    def _tagged(self, tags: Tags, end: str) -> Reading:
        """A name, then values between tags, which become JSON."""
        name, mark = yield from self._name(*([tags.named] if tags.named else [tags.key, end]))
        properties = self._commit(name).get("properties") or {}
        self._emit(ARGUMENTS, "{")
        before = ""
        while True:
            if mark not in (tags.key, end):
                _, mark = yield from self._read(tags.key, end)
            if mark != tags.key:
                break
            first, *others = tags.then.split("\n")
            key, _ = yield from self._read(first)
            for tag in others:
                yield from self._read(tag)
            self._emit(ARGUMENTS, f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            if is_text(properties.get(key)):
                self._emit(ARGUMENTS, '"')
                yield from self._accept("\n", space="")
                mark = yield from self._must(QUOTED, f"\n{tags.end}", tags.end)
                self._emit(ARGUMENTS, '"')
            else:
                value, mark = yield from self._read(tags.end)
                self._emit(ARGUMENTS, literal(value))
        self._emit(ARGUMENTS, "}")

    def _in_braces(self, quotes: Quotes, _: str) -> Reading:
        """A name, then braces with bare keys, and with texts between marks of their own, which become JSON."""
        name, mark = yield from self._name("{")
        self._commit(name)
        self._emit(ARGUMENTS, "{")
        depth = 1
        while depth:
            bare, mark = yield from self._read(quotes.mark, *'"{}[]:,')
            if bare.strip():
                self._emit(ARGUMENTS, json.dumps(bare.strip(), ensure_ascii=False) if mark == ":" else literal(bare))
            if mark == quotes.mark:
                self._emit(ARGUMENTS, '"')
                yield from self._must(QUOTED, quotes.mark)
                self._emit(ARGUMENTS, '"')
            else:
                self._emit(ARGUMENTS, f"{mark} " if mark in (":", ",") else mark)
            if mark == '"':
                yield from self._rest_of_text(ARGUMENTS)
            depth += (mark in ("{", "[")) - (mark in ("}", "]"))

    def _code(self, _: PythonCode, end: str) -> Reading:
        """Calls that are written as in Python."""
        code, _ = yield from self._read(end, then=LEAVE)
        for name, arguments in python_calls(code, self._tools):
            self._commit(name)
            self._emit(ARGUMENTS, json.dumps(arguments, ensure_ascii=False))
            self._mark()

    # -------------------------------------------------------------- JSON, and parts of the text

    def _json(self, kind: str | None = None) -> Reading:
        """One JSON value. A value of no kind is returned."""
        at, depth = len(self._silent), 0
        first = yield from self._next()
        if first not in ('"', "{", "["):
            text, _ = yield from self._read(*SPACE, ",", "}", "]", then=LEAVE)
            return parsed(text)
        while True:
            mark = yield from self._must(kind, *'"{}[]', then=KEEP)
            if mark == '"':
                yield from self._rest_of_text(kind)
            depth += (mark in ("{", "[")) - (mark in ("}", "]"))
            if not depth:
                return None if kind else parsed(self._silent[at:])

    def _rest_of_text(self, kind: str | None) -> Reading:
        """A JSON text behind its first quotation mark."""
        while (yield from self._must(kind, *ENDS, then=KEEP)) != '"':
            pass

    def _must(self, kind: str | None, *marks: str, then: int = DROP) -> Reading:
        """The same as `_until` for a part of a call, where one of the marks must come."""
        if not (mark := (yield from self._until(kind, *marks, then=then))):
            raise NoCall
        return mark

    def _read(self, *marks: str, then: int = DROP) -> Reading:
        """The text up to the first of the marks, and that mark."""
        at = len(self._silent)
        mark = yield from self._must(None, *marks, then=then)
        return self._silent[at : len(self._silent) - (0 if then == LEAVE else len(mark))], mark

    def _name(self, *marks: str, then: int = DROP) -> Reading:
        """The name of a function up to the first of the marks, and that mark. A name holds no space and no end of a
        thought, so that what a text says about marks is soon a text again."""
        yield from self._next()
        no_name = [" ", self._dialect.thoughts.end] if self._dialect.thoughts else [" "]
        name, mark = yield from self._read(*marks, *no_name, then=LEAVE)
        if mark in no_name:
            raise NoCall
        self._take(0 if then == LEAVE else len(mark), None)
        return name.strip(), mark

    def _until(self, kind: str | None, *marks: str, then: int = DROP) -> Reading:
        """Hand out the text up to the first of the marks. Returns the mark, "" at the end of the answer.

        Half a mark at an end that a limit made is left out, except in text, which may end like that.
        """
        pattern = any_of(marks)
        while True:
            whole = self._ended and (kind == TEXT or not self._cut)
            held = 0 if whole else begun_at_end(self._waiting, marks)
            found = pattern.search(self._waiting)
            if found and found.start() <= len(self._waiting) - held:
                self._take(found.start(), kind)
                if then != LEAVE:
                    self._take(len(found[0]), kind if then == KEEP else None)
                return found[0]
            self._take(len(self._waiting) - held, kind)
            if self._ended:
                self._waiting = ""
                return ""
            yield

    def _next(self, space: str = SPACE) -> Reading:
        """The next character behind white space, or whatever else is skipped. It stays. "" at the end of the answer."""
        while True:
            self._take(len(self._waiting) - len(self._waiting.lstrip(space)), None)
            if self._waiting or self._ended:
                return self._waiting[:1]
            yield

    def _accept(self, mark: str, space: str = SPACE) -> Reading:
        """Take a mark if it comes next, behind white space, or the half of it that a limit left. Returns whether the mark
        came."""
        yield from self._next(space)
        while len(self._waiting) < len(mark) and mark.startswith(self._waiting) and not self._ended:
            yield
        there = self._waiting.startswith(mark)
        if there or (self._cut and mark.startswith(self._waiting)):
            self._take(len(mark), None)
        return there

    def _expect(self, mark: str) -> Reading:
        if not (yield from self._accept(mark)):
            raise NoCall

    # -------------------------------------------------------------- what comes out

    def _take(self, size: int, kind: str | None) -> None:
        """Move characters from what waits to a piece of a kind."""
        text, self._waiting = self._waiting[:size], self._waiting[size:]
        if kind is None:
            self._silent += text
        else:
            self._emit(kind, text)

    def _emit(self, kind: str, text: str) -> None:
        if kind in (TEXT, THOUGHT):
            text = self._space + (text.lstrip(SPACE) if self._fresh else text)
            kept = text.rstrip(SPACE)
            text, self._space = kept, text[len(kept) :]
            self._fresh &= not text
        elif kind == QUOTED:
            kind, text = ARGUMENTS, json.dumps(text, ensure_ascii=False)[1:-1]
        self._empty &= kind != ARGUMENTS or not text
        last = self._pieces[-1] if self._pieces else None
        if last and last.kind == kind and kind != CALL:
            self._pieces[-1] = last._replace(text=last.text + text)
        elif text:
            self._pieces.append(Piece(kind, text))

    def _commit(self, name: str, own: str = "") -> dict[str, Any]:
        """A call begins. Returns the schema of its arguments."""
        if name not in self._tools:
            raise NoCall
        self._mark()
        self._pieces.append(Piece(CALL, name, own))
        self.in_call = self._empty = True
        return self._tools[name]

    def _mark(self) -> None:
        """A mark was read, so what was silent is over, and a call, too."""
        if self.in_call and self._empty:
            self._emit(ARGUMENTS, "{}")
        self.in_call, self._fresh = False, True
        self._silent = self._space = ""

    def _restore(self, kind: str = TEXT) -> None:
        """What was silent is text of a kind. Where the answer was cut off, it may have become a call."""
        text, self._silent = self._silent, ""
        if not (self._ended and self._cut):
            self._emit(kind, text)
