"""Questions behind long texts, for `scripts.bench --behind`: what stands before is of a given length and kind.

A chat of the model's own answers is what a head was trained for. A question about a document is answered in words of the
document, and a function of a long module is written again in the words of the module.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from pydoc_data import topics

from bench.suites import Prompts, Question
from decoding.params import SamplingParams
from engine.engine import Engine
from support.errors import UsageError
from support.texts import read_source, stdlib_files

ANSWER = 256  # tokens of an answer of the chat at most
SLACK = 512  # tokens by which a prompt may be longer than was asked for
ASKED = 4  # questions behind each text, unless --limit says otherwise
DEFINED = re.compile(r"^ *def (\w+)\(", re.MULTILINE)
# What is asked about a part of a text, behind the text.
ABOUT = {
    "document": "{text}\n\nWhat does the text say about `{name}`? Explain it, and quote the most important sentences.",
    "code": "```python\n{text}\n```\n\nWrite the function `{name}` again, with a docstring.",
}
Part = tuple[str, str]  # the name of a part of a text, and the part


def questions_behind(
    lengths: Sequence[int], engine: Engine, prompts: Prompts, asked: Sequence[Question], others: Sequence[Question]
) -> list[Question]:
    """The first turns of `asked` behind chats of at least so many tokens, and as many questions about documents and code
    of these lengths. The suite of each says what stands before it.

    engine: its answers to the questions `others`, each one alone, are the chats. Raises UsageError for a model without a
    chat template, and where all answers together are too short.
    """
    if not prompts.chat:
        raise UsageError("--behind needs a model with a chat template, and --questions FILE.")
    chat: list[tuple[str, str]] = []
    left = iter(others)
    found: list[Question] = []
    for length in lengths:
        while len(_after(chat, "", prompts)) < length:
            question = next(left, None)
            if question is None:
                raise UsageError(f"--behind {length}: all other answers are shorter; give more questions.")
            stream = engine.generate(prompts.first(question), SamplingParams(max_new_tokens=ANSWER))
            chat.append((question.turns[0], stream.run()[0].text.strip() or "I do not know."))
        for question in asked:
            found.append(Question(f"chat {length:,}", question.id, (tuple(_after(chat, question.turns[0], prompts)),)))
        for kind, parts in (("document", iter(sorted(topics.topics.items()))), ("code", _functions())):
            found += _about(kind, parts, length, prompts, len(asked))
    return found


def _after(chat: Sequence[tuple[str, str]], asked: str, prompts: Prompts) -> list[int]:
    """The prompt of a question behind a chat."""
    return prompts.ids([*(turn for turn, _ in chat), asked], [answer for _, answer in chat])


def _functions() -> Iterator[Part]:
    """The functions of some modules of the standard library, each with what stands up to the next one."""
    for source in map(read_source, stdlib_files()[1]):
        starts = [match.start() for match in DEFINED.finditer(source)]
        for start, end in itertools.pairwise([*starts, len(source)]):
            yield DEFINED.match(source, start)[1], source[start:end]


def _about(kind: str, parts: Iterator[Part], length: int, prompts: Prompts, count: int) -> list[Question]:
    """So many questions about parts of one text, which has at least so many tokens."""
    taken, tokens = [], 0
    while tokens < length:
        name, part = next(parts, ("", ""))
        if not name:
            raise UsageError(f"--behind {length}: all of the {kind} has only {tokens} tokens.")
        size = len(prompts.tokenizer.encode(part))
        taken.append((name, part[: len(part) * (length - tokens) // size + 1]))
        tokens += size
    text = "".join(part for _, part in taken)
    names = list(dict.fromkeys(name for name, _ in taken if not name.startswith("__")))
    count = min(count, len(names))
    names = [names[i * len(names) // count] for i in range(count)]
    asked = [ABOUT[kind].format(text=text, name=name) for name in names]
    turns = [(tuple(prompts.ids([turn], [])),) for turn in asked]
    return [Question(f"{kind} {length:,}", name, turn) for name, turn in zip(names, turns, strict=True)]
