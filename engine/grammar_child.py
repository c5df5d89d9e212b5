"""The child process in which llguidance reads a grammar for the first time.

llguidance recurses over what it reads without a bound, so a long chain of definitions ends its process. This file imports
nothing of the project, because it is started by its path: it reads a request from stdin and writes an answer to stdout.
"""

import contextlib
import json
import sys

STACK = 1 << 20  # bytes; the threads of the parent have more, so what passes here passes there
MEMORY = 2 << 30  # bytes of address space
CPU_SECONDS = 5


def limit() -> None:
    """Set this process's limits, where Python has the module for that."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        limits = (resource.RLIMIT_STACK, STACK), (resource.RLIMIT_CPU, CPU_SECONDS), (resource.RLIMIT_AS, MEMORY)
        for kind, most in (*limits, (resource.RLIMIT_CORE, 0)):
            resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def answer(kind: str, text: str) -> dict[str, str]:
    """{"grammar": as a matcher takes it}, or {"error": what is wrong}. kind: "schema", "any" syntax, or "ready"."""
    from llguidance import LLMatcher, LLTokenizer
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        if kind == "schema":
            text = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
        elif kind == "any":
            text = any_to_lark(text)
    except Exception as error:  # the converters' errors have no common class
        return {"error": str(error)}
    problem = LLMatcher.validate_grammar(text)
    if not problem:
        matcher = LLMatcher(LLTokenizer("byte"), text, log_level=0)
        matcher.compute_bitmask()
        problem = matcher.get_error() if matcher.is_error() else ""
    return {"error": problem} if problem else {"grammar": text}


if __name__ == "__main__":
    limit()
    print(json.dumps(answer(**json.load(sys.stdin))))
