"""A chat in the terminal."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from engine import Engine
from report.lines import Report
from sampling_params import with_suggestions
from support.errors import BadFileError


def chat(engine: Engine, given: dict[str, Any], args: argparse.Namespace, report: Report) -> int:
    """Read user turns from the terminal. /reset forgets, /exit or end of file leaves, Ctrl-C stops a reply."""
    if engine.tokenizer is None:
        raise BadFileError(f"{args.checkpoint} has no tokenizer files; --chat needs one.")
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(opening)
    while True:
        try:
            text = input("\n> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        except UnicodeDecodeError as error:
            print(f"error  not UTF-8: {error}", file=sys.stderr, flush=True)
            continue
        if text == "/exit":
            return 0
        if text == "/reset":
            messages = list(opening)
        if text in ("", "/reset"):
            continue
        messages.append({"role": "user", "content": text})
        try:
            prompt = engine.tokenizer.encode_chat(messages)
            most = max(1, engine.ctx - len(prompt))
            params, suggested = with_suggestions(engine.generation, {"max_new_tokens": most, **given})
            stream = engine.generate(prompt, params)
        except ValueError as error:  # the conversation has outgrown the context, or the template refuses it
            messages.pop()
            print(f"error  {error} (/reset starts over)", file=sys.stderr, flush=True)
            continue
        started = False
        try:
            for chunk in stream:
                piece = chunk.text if started else chunk.text.lstrip()
                started = started or bool(piece)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            stream.close()
        print(flush=True)
        messages.append({"role": "assistant", "content": stream.result.text.strip()})
        report.tail(engine, stream.results, params, suggested)
