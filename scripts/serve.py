"""Serve a model with OpenAI's API, so that any client of it can use eaglet.

    python -m scripts.serve                                                 # the demo model on http://127.0.0.1:8000/v1
    python -m scripts.serve --checkpoint DIR --eagle HEAD --compile
    EAGLET_API_KEY=secret python -m scripts.serve --checkpoint DIR --host 0.0.0.0 --port 8080

http://127.0.0.1:8000/ is a chat in the browser. docs/server.md describes all endpoints, every limit and every error.
Requests are decoded together, as many as there are slots (--slots), and no answer depends on the others. SIGTERM and
Ctrl-C let the requests under way end.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from generate import VERSION
from loading.options import FULL, add_options, add_replicas, add_sampling, sampling_from, settings_given
from support.errors import UsageError, at_least, command_parser, run_parsed

if TYPE_CHECKING:
    from serving.scheduler import ServeSettings

KEY_VARIABLE = "EAGLET_API_KEY"
# Sampling settings that a client sets for each request, but for which a server may have defaults.
DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command_parser("scripts.serve", __doc__)
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine alone)")
    add("--port", type=at_least(0), default=8000, metavar="N", help="port (default: 8000); 0: any free one")
    add("--api-key", metavar="KEY", action="append",
        help=f"the key that clients must send; may be repeated (default: ${KEY_VARIABLE}, or else none)")  # fmt: skip
    add("--cors-origin", metavar="ORIGIN", action="append", default=[],
        help="a site whose pages may use this server, such as https://example.org; *: all; may be repeated")  # fmt: skip
    add("--allowed-host", metavar="NAME", action="append", default=[],
        help="a further name of this server where no key is set, such as a container's; may be repeated")  # fmt: skip
    add("--model-name", metavar="NAME",
        help="what the API calls the model (default: the name of its folder, file or only adapter)")  # fmt: skip
    add("--template", metavar="NAME", help="chat template: vicuna, llama-2-chat, mixtral, or one of the model's")
    add("-q", "--quiet", action="store_true", help="no line for each request")
    add = parser.add_argument_group("limits").add_argument
    add("--max-queue", type=at_least(0), default=8, metavar="N", help="requests that wait; more get 429 (default: 8)")
    add("--max-body-mb", type=at_least(1), default=2, metavar="N", help="size of a request in MB (default: 2)")
    add("--max-tokens", type=at_least(1), metavar="N", help="tokens of one answer (default: what the context holds)")
    add("--when-full", choices=FULL, default=FULL[0],
        help="what happens to a chat that does not fit into the context (default: refuse)")  # fmt: skip
    add("--max-seconds", type=at_least(1), default=600, metavar="N", help="decoding time of a request (default: 600)")
    add("--send-seconds", type=at_least(1), default=30, metavar="N",
        help="a client that takes nothing for so long is given up (default: 30)")  # fmt: skip
    add = parser.add_argument_group("prompt cache").add_argument
    add("--prompt-cache-mb", type=at_least(0), default=512, metavar="N",
        help="memory for the caches of earlier prompts; 0: none (default: 512)")  # fmt: skip
    add("--prompt-cache-disk-mb", type=at_least(0), default=2048, metavar="N",
        help="room on disk for those that memory does not hold; 0: none (default: 2048)")  # fmt: skip
    add("--keep-prompt-cache", action="store_true", help="leave them on disk at the end, for the next start")
    add_replicas(parser)
    add_sampling(parser, *DEFAULTS, of_model=True)
    add_options(parser, slots=0, lora=())
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_parsed(build_parser(), run, argv)


def run(args: argparse.Namespace) -> int:
    """Load the model and serve it until a signal comes."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"the server needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    sampling_from(args)  # refuses settings that are out of range

    from cli.report import Report
    from serving.app import Api
    from serving.replicas import load_engine
    from serving.server import PromptCacheLimits, Server, bind

    settings = settings_of(args)
    report = Report(quiet=False)
    sock = bind(args.host, args.port, settings)  # a port that is taken is an error before the model loads
    limits = PromptCacheLimits(args.prompt_cache_mb, args.prompt_cache_disk_mb, args.keep_prompt_cache)
    engine = load_engine(args, report, limits)
    if settings.model in engine.adapters:
        raise UsageError(f"an adapter, too, is called {settings.model!r:.80}; --model-name names the base model.")
    api = Api(engine, settings, (lambda line: None) if args.quiet else report.line)
    if settings.api_keys and not (args.api_key or os.environ.get(KEY_VARIABLE)):
        report.line(f"key     {settings.api_keys[0]}   (made for this run; --api-key or ${KEY_VARIABLE} sets one)")
    sock.listen()  # whoever reads the next line may connect at once
    host, port = sock.getsockname()[:2]
    report.line(f"serving http://{f'[{host}]' if ':' in host else host}:{port}/v1   model {settings.model}")
    try:
        return Server(api.app(), api.scheduler, settings, report.line).serve_on(sock)
    finally:
        engine.close()


def settings_of(args: argparse.Namespace) -> ServeSettings:
    """The server's settings. A server that other machines reach has a key in any case."""
    from serving.scheduler import MB, ServeSettings
    from serving.server import is_loopback
    from weights.lora import split_name

    named = split_name(args.lora[0]) if len(args.lora) == 1 else ("", args.checkpoint)
    keys = args.api_key or [key for key in [os.environ.get(KEY_VARIABLE)] if key]
    same = ("max_queue", "max_tokens", "max_seconds", "send_seconds")  # limits, whose options have the settings' names
    return ServeSettings(
        model=args.model_name or named[0] or Path(named[1]).resolve().name,
        api_keys=tuple(keys or ([] if is_loopback(args.host) else [secrets.token_urlsafe(24)])),
        cors_origins=tuple(args.cors_origin),
        allowed_hosts=tuple(args.allowed_host),
        max_body=args.max_body_mb * MB,
        drop_oldest=args.when_full == "drop-oldest",
        **{name: vars(args)[name] for name in same},
        defaults=settings_given(args),
        version=VERSION,
    )


if __name__ == "__main__":
    raise SystemExit(main())
