"""Grammars and JSON schemas as clients write them, and what of them can be enforced."""

import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.schemas import doubtful, followable
from support.errors import UsageError
from support.reader import parse_json
from text.dialect import json_rule

LONGEST = 1 << 20  # characters of a grammar or schema
CHECK_SECONDS = 20  # for a child process that reads a grammar; it also has limits of its own
WRONG = "the grammar has an error"
UNREADABLE = "the JSON schema is not supported"
CHILD = Path(__file__).with_name("grammar_child.py")


class GrammarError(UsageError):
    """A grammar that is wrong, or that is too much for llguidance, in one line."""


class ReadGrammar(str):
    """A grammar that a child process has read."""

    unenforced: tuple[str, ...] = ()  # keywords of its JSON schemas that it does not enforce
    is_json = False  # whether what it describes is JSON, so that its numbers have to end


def json_grammar(schema: Mapping[str, Any] | bool | str | None = None, strict: bool = False) -> ReadGrammar:
    """The grammar of JSON texts that follow a JSON schema, for `SamplingParams.grammar`. None: of any JSON object.

    The texts are compact, their objects are closed unless the schema says otherwise (`engine.schemas`), and their numbers
    end, so that a model cannot go on for ever. `unenforced` of the result names the keywords that it does not enforce.

    strict: such keywords are an error. Raises GrammarError for a schema that is no JSON schema, or that llguidance cannot
    read within its limits.
    """
    if isinstance(schema, str):
        try:
            schema = parse_json(schema, "the JSON schema", advice=False)
        except ValueError as error:
            raise GrammarError(str(error)) from None
    asked = {"type": "object"} if schema is None else schema
    if not isinstance(asked, dict | bool):
        raise GrammarError("the JSON schema must be an object or a boolean.")
    return schemas_grammar([asked], lambda schemas: f"start: {json_rule(schemas[0])}", strict)


def schemas_grammar(schemas: Sequence[Any], write: Callable[[list[Any]], str], strict: bool = False) -> ReadGrammar:
    """A grammar whose texts hold JSON that follows schemas. Otherwise as `json_grammar`.

    write: makes the grammar, in Lark's syntax, from the schemas as llguidance takes them.
    """
    try:
        tried = {json.dumps(one): one for schema in schemas for one in doubtful(schema)}
        refused = _ask("schemas", json.dumps(list(tried.values())), UNREADABLE)["refused"] if tried else []
        parts = [followable(schema, refused) for schema in schemas]
        text = write([part for part, _ in parts])
    except RecursionError:
        raise GrammarError("the JSON schema is nested too deeply.") from None
    grammar = _checked("ready", text, UNREADABLE)
    grammar.is_json = True
    unenforced = set(grammar.unenforced).union(*(names for _, names in parts))
    if '"oneOf"' in text:  # whether only one part of it can hold is a question to the schema as it was written
        written = write([followable(schema, refused, closed=False)[0] for schema in schemas])
        unenforced |= {"oneOf"} & {*_checked("ready", written, UNREADABLE).unenforced}
    grammar.unenforced = tuple(sorted(unenforced))
    if strict and grammar.unenforced:
        names = ", ".join(grammar.unenforced)
        raise GrammarError(f"the JSON schema has {names}, which cannot be enforced as strict demands.")
    return grammar


def checked_grammar(text: str) -> ReadGrammar:
    """A grammar in Lark syntax, from one in that syntax or in GBNF, the syntax of llama.cpp.

    Raises GrammarError for a grammar with an error or that llguidance cannot read within its limits.
    """
    return _checked("any", text, WRONG)


def ready_grammar(text: str) -> ReadGrammar:
    """The same for a grammar that is in Lark syntax already. Where `text` comes from here, it was read before."""
    return text if isinstance(text, ReadGrammar) else _checked("ready", text, WRONG)


def _checked(kind: str, text: str, words: str) -> ReadGrammar:
    """The grammar as a matcher takes it. words: what an error begins with."""
    answer = _ask(kind, text, words)
    grammar = ReadGrammar(answer["grammar"])
    names: set[str] = set()
    for said in answer["warnings"]:
        if said.startswith("Unimplemented keys"):
            names.update(re.findall(r'"([^"]+)"', said))
        elif said.startswith("oneOf"):
            names.add("oneOf")
    grammar.unenforced = tuple(names)
    return grammar


@functools.lru_cache(64)
def _ask(kind: str, text: str, words: str) -> dict[str, Any]:
    """What a child process says of a text (`grammar_child.answer`), because llguidance may end its process."""
    if len(text) > LONGEST:
        raise GrammarError(f"{words}: it has {len(text):,} characters; allowed: {LONGEST:,}.")
    child = [sys.executable, "-P", str(CHILD)]
    request = json.dumps({"kind": kind, "text": text})
    try:
        done = subprocess.run(child, input=request, capture_output=True, text=True, timeout=CHECK_SECONDS)
        answer = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):  # it was ended, or it ended itself
        raise GrammarError(f"{words}: it is too large, or nested too deeply, to be read.") from None
    if "error" in answer:
        why = re.sub(r"^at \d+\(\d+\): failed to compile JSON schema: ([^\n]*).*", r"\1", answer["error"], flags=re.S)
        raise GrammarError(f"{words}: {in_one_line(why)}")
    return answer


def in_one_line(said: str) -> str:
    """What llguidance says, in one line."""
    return " ".join(said.split())[:300]
