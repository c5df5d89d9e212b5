"""What a model writes between the marks of a tool call: JSON, values without quotes, or code."""

import ast
import contextlib
import json
from collections.abc import Mapping
from typing import Any


class NoCall(Exception):
    """What was read is no call of a tool that may be called."""


def parsed(text: str) -> Any:
    """The value of a JSON text. Raises NoCall for anything else."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise NoCall from None


def literal(text: str) -> str:
    """JSON of a value that a model wrote without quotes: JSON, or a literal of Python, or else a text."""
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return json.dumps(read(text.strip()), ensure_ascii=False)
    return json.dumps(text.strip(), ensure_ascii=False)


def python_calls(code: str, tools: Mapping[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """The names and arguments of the calls in code that consists of calls, also within print() or a list. Raises
    NoCall for other code."""
    calls = []
    try:
        tree = ast.parse(code.strip())
        found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for node in sorted(found, key=lambda node: (node.lineno, node.col_offset)):
            name = ast.unparse(node.func)
            name = name if name in tools else name.rpartition(".")[2]
            if name in tools:
                places = zip(tools[name].get("properties") or (), node.args, strict=False)
                given = {key: ast.literal_eval(value) for key, value in places}
                calls.append((name, given | {k.arg: ast.literal_eval(k.value) for k in node.keywords}))
            elif name != "print":
                raise NoCall
        json.dumps(calls)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise NoCall from None
    if not calls or any(not isinstance(node, ast.Expr | ast.Assign) for node in tree.body):
        raise NoCall
    return calls
