"""What `generate.py` does once its arguments are read: it loads the model, and decodes one request or chats."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from cli import prove
from cli.chat import Answered, Conversation, chat
from cli.prompt import Prompt
from cli.report import Report, Request, result_json
from cli.steps import Gauge, StepRecorder, write_page
from cli.tree_text import TreeWriter
from decoding.params import with_suggestions
from engine.engine import Engine
from engine.grammar_text import json_grammar
from engine.results import Chunk
from engine.streams import Stream
from loading.options import options_from, settings_given
from support.errors import INTERRUPTED, BadFileError, UsageError
from support.files import read_json
from support.machine import default_device
from text.template import TemplateWorker
from text.tokenizer import BUILTIN_SYSTEM

NEW_TOKENS = 200  # of a continuation, which may never end by itself


def run_request(args: argparse.Namespace, prompt: Prompt) -> int:
    """Load the model, then chat or decode the prompt. Returns the exit code."""
    report = Report(args.quiet or args.json)
    options = options_from(args)
    worker = TemplateWorker()
    if args.chat or prompt.message:
        worker.begin()  # while the model is loaded
    if options["slots"] is None:  # all answers together
        options["slots"] = args.batch_size
    # what compares or shows speculative steps needs all of them
    options["eagle_always"] |= bool(args.prove or args.show_tree or args.html or args.gauge)
    if (args.device or default_device()) == "cpu":
        report.measure(torch.device("cpu"))
    engine = report.load(options, args.template)
    if args.prove and not engine.options.drafter_kind:
        raise UsageError("--prove replays without the drafter; it needs one, like --eagle HEAD.")
    tokenizer = engine.tokenizer
    if tokenizer is not None:
        tokenizer.worker = worker
    elif prompt.ids is None:
        files = "tokenizer files (tokenizer.json or tokenizer.model)"
        raise BadFileError(f"{engine.options.checkpoint} has no {files}. Without them, pass --prompt-ids.")
    if (args.chat or args.system) and not tokenizer.chat_template_source:
        what = f"{'--chat' if args.chat else '--system'} needs a chat template, and this model has none"
        raise UsageError(f"{what}; choose --template {', '.join(BUILTIN_SYSTEM)}.")
    if args.chat:
        return chat(Conversation(engine, settings_given(args), args.system, report, args.when_full == "drop-oldest"))
    return decode(engine, make_request(engine, prompt, args, report), prompt, args, report)


def make_request(engine: Engine, prompt: Prompt, args: argparse.Namespace, report: Report) -> Request:
    """The prompt's ids and the settings. A text is a message where the model has a chat template, and else continued."""
    given = settings_given(args)
    if args.json_schema:
        given["grammar"] = grammar = json_grammar(read_json(Path(args.json_schema)))
        if grammar.unenforced:
            report.line(f"note    the JSON schema has {', '.join(grammar.unenforced)}, which cannot be enforced")
    if len(prompt.text) > 16 * engine.ctx:  # no tokenizer makes so few tokens of so long a text
        raise UsageError(f"the prompt has {len(prompt.text):,} characters, far more than ctx {engine.ctx:,} holds.")
    ids, most, note = prompt.ids, NEW_TOKENS, ""
    tokenizer = engine.tokenizer
    template = tokenizer.chat_template_source if prompt.message else None
    if template:
        given["shown_ids"] = tokenizer.shown_ids()
        messages = [{"role": "system", "content": args.system}] if args.system else []
        ids = tokenizer.encode_chat([*messages, {"role": "user", "content": prompt.text.strip()}])
        most, note = max(1, engine.ctx - len(ids)), "as a message to the model (--raw continues it as text)"
    elif ids is None:
        ids = tokenizer.encode(prompt.text)
        note = "continued as plain text" if tokenizer.chat_template_source else ""
    return Request(ids, *with_suggestions(engine.generation, {"max_new_tokens": most, **given}), template, note)


def decode(engine: Engine, request: Request, prompt: Prompt, args: argparse.Namespace, report: Report) -> int:
    """Decode one batch, show it, and do what else was asked for with it."""
    params = request.params
    prompts = [request.prompt_ids] * args.batch_size
    gauge = Gauge(engine) if args.gauge else None
    stream = engine.generate_batch(prompts, params)
    recorder = StepRecorder(engine, stream.result) if args.show_tree or args.html else None
    interrupted = False
    try:
        if args.show_tree:
            show_trees(stream, recorder, args.json)
        else:
            chunks = recorder.follow(stream) if recorder else stream
            show_text(engine, chunks, request, prompt, args)
    except KeyboardInterrupt:
        interrupted = True
        stream.close()
    results = stream.results
    longest = max(results, key=lambda result: result.steps)
    if args.json:
        values = result_json(engine, results, request)
        print(json.dumps(values | ({"gauge_ms": gauge.split(longest)} if gauge else {})))
    elif not args.show_tree:  # which has printed the text
        if args.batch_size > 1 and engine.tokenizer is not None:
            for b, result in enumerate(results):
                texts = told(engine, request, [result.text])
                print(f"\n--- seed {params.seed + b} ---\n{''.join(texts)}", end="")
        print(flush=True)
    report.tail(engine, results, request)
    if gauge:
        report.line(f"gauge    {gauge.line(longest)}")
    if args.html:
        write_page(args.html, recorder, request.prompt_ids)
        report.line(f"html     {args.html}")
    if interrupted:
        return INTERRUPTED
    if not args.prove:
        return 0
    proof = prove.prove(engine, prompts, params, results)
    print(prove.verdict(proof, engine.options.dtype), file=sys.stderr)
    return 0 if prove.holds(proof) else 1


def show_text(
    engine: Engine, chunks: Iterable[Chunk], request: Request, prompt: Prompt, args: argparse.Namespace
) -> None:
    """Run a request, and print what it makes as it comes. Texts of several rows are printed later, one after another."""
    show = not args.json and engine.tokenizer is not None
    if show and prompt.echo and request.template is None:
        print(prompt.text, end="")
    if show and args.batch_size == 1:
        for text in told(engine, request, (chunk.text for chunk in chunks)):
            print(text, end="", flush=True)
        return
    for chunk in chunks:
        if not args.json and engine.tokenizer is None:
            print(*chunk.token_ids, sep=",", end=",", flush=True)


def told(engine: Engine, request: Request, texts: Iterable[str]) -> Iterable[str]:
    """What is shown of an answer: all of a continuation, and the answer to a message without the thought before it."""
    return Answered(engine.tokenizer, request.prompt_ids).read(texts) if request.template else texts


def show_trees(stream: Stream, recorder: StepRecorder, json: bool) -> None:
    """Run a request, and draw the tree of every step as it comes; then the text. With --json this goes to stderr."""
    writer = TreeWriter(sys.stderr if json else sys.stdout)
    try:
        writer.begin(recorder)
        for _ in recorder.follow(stream):
            if len(recorder.views) > writer.steps:
                writer.step(recorder.views[-1], recorder.first)
    finally:
        if recorder.first:  # after Ctrl-C, too
            writer.end(recorder)
