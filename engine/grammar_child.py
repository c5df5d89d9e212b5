"""The child process in which llguidance reads a grammar for the first time.

llguidance recurses over what it reads without a bound, so a long chain of definitions ends its process. This file imports
nothing of the project, because it is started by its path: it reads a request from stdin and writes an answer to stdout.
"""

import contextlib
import json
import sys
from typing import Any

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


def answer(kind: str, text: str) -> dict[str, Any]:
    """{"grammar": as a matcher takes it, "warnings": of llguidance}, or {"error": what is wrong}.

    kind: "any" syntax of a grammar, "ready" for Lark's, or "schemas". A list of schemas gets {"refused": those that
    llguidance does not take}.
    """
    from llguidance import LLMatcher, LLTokenizer
    from llguidance.gbnf_to_lark import any_to_lark

    if kind == "schemas":
        schemas = json.loads(text)
        return {"refused": [one for one in schemas if LLMatcher.validate_grammar(f"start: %json {json.dumps(one)}")]}
    try:
        text = any_to_lark(text) if kind == "any" else text
    except Exception as error:  # the converter's errors have no common class
        return {"error": str(error)}
    wrong, said = LLMatcher.validate_grammar_with_warnings(text)
    if wrong:
        return {"error": said[0]}
    matcher = LLMatcher(LLTokenizer("byte"), text, log_level=0)
    matcher.compute_bitmask()
    return {"error": matcher.get_error()} if matcher.is_error() else {"grammar": text, "warnings": said}


if __name__ == "__main__":
    limit()
    print(json.dumps(answer(**json.load(sys.stdin))))
