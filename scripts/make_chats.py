"""Conversations for training a draft head, written by the model itself: its own questions, then its answers.

    python -m scripts.make_chats --checkpoint DIR --out chats.jsonl --count 4000
    python -m scripts.make_chats --checkpoint DIR --out chats.jsonl --questions sharegpt.json
    python -m scripts.train_eagle --checkpoint DIR --data chats.jsonl --out head

An instruct model that is given only the opening of a user turn continues it with a question, as it has seen many. So no
data set is needed, and the text is what the model itself is likely to read and write. Half of the questions begin with
words that are given, such as "Write a Python function that", so that all kinds of tasks occur. Half of the answers are
the most likely ones and half are sampled at T = 1. With --turns the model goes on as the user, and asks again. What is
empty, repeats itself, or (a question) does not end is left out. A model without a chat template writes texts: their
beginnings at T = 1, and how they go on in place of answers. With --questions it writes no questions, and answers those of
a file turn by turn, or goes on from how its texts begin.
After an interruption the same command goes on where it was.
"""

import argparse
import contextlib
import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from os.path import commonprefix  # it takes lists, too
from pathlib import Path

from decoding.params import SamplingParams
from engine.engine import Engine
from engine.load import load
from loading.options import add_options, options_from
from support.errors import UsageError, above_zero, at_least, command_parser, run_parsed
from support.files import append_json_lines, read_json_lines
from support.progress import Progress
from text.tokenizer import Tokenizer
from training.data import question_of, read_records

LOADED = ("checkpoint", "slots", "ctx", "device", "dtype", "kernels", "compile")
# What every second question begins with. Without them a small model asks the same few kinds of questions.
_OPENINGS = """
Write a Python function that|Write a program in C++ which|What does this code print?|Fix the bug in this function:
Write a SQL query that|Explain the difference between|Implement an algorithm to|Write an HTML page with
Complete the following Python function:|How does a computer|Write unit tests for|What is the time complexity of
Solve this problem step by step:|A train leaves|A shop sells|If x +|What is the probability that|How many|Calculate the
There are three friends:|Which of these statements is true?|Is the following argument valid?|What is the next number in
Imagine that you are|Pretend to be a famous|You are a doctor.|Act as a teacher and|Answer as if you were
Write a short story about|Write a poem about|Write an email to|Write a blog post about|Draft a letter that
Describe a scene in which|Edit the following paragraph:|Rewrite this sentence in a formal style:|Write a headline for
Summarize the following text:|Extract the names and dates from this text:|Translate the following sentence:
List the main points of this article:|Classify these reviews as positive or negative:|Return the following data as JSON:
Explain the theory of|What causes|How do plants|Why do chemical reactions|What is the function of|Describe the process of
What happened in the year|Who was|Compare the economies of|What were the consequences of|Discuss the role of art in
What are the ethical implications of|How did the invention of|Give me five ideas for|Plan a trip to|Suggest a recipe with
How can I improve my|What should I consider when|I feel|Compare the advantages and disadvantages of|Tell me about
"""
OPENINGS = _OPENINGS.strip().replace("\n", "|").split("|")
# A line that was written earlier: a conversation, or a text and how it begins.
LINE = {"messages?": [{"role": str, "content": str}], "begins?": str}
GROUP_SECONDS = 60  # an interruption loses at most about so much, because a group is written at its end
MOST_SIZES = 16  # a group has at most so many times the rows of the batch
NGRAM = 4
LEAST_DISTINCT = 0.5  # of the 4-grams of a text that is kept


def user_turn(tokenizer: Tokenizer, talk: Sequence[dict] = ()) -> tuple[list[int], tuple[int, ...], tuple[str, ...]]:
    """The ids that open a user's turn behind a conversation, and what ends one: stop ids and stop strings.

    All of it is read off the chat template by rendering two different questions. Raises ValueError for a template whose
    user turns have no beginning, or no end that can be recognised.
    """
    rendered = [tokenizer.encode_chat([*talk, {"role": "user", "content": text}]) for text in ("apple", "river bank")]
    opening = commonprefix(rendered)
    if not opening:
        raise ValueError("the chat template writes nothing before a question; train on --data of your own instead.")
    behind = commonprefix([ids[::-1] for ids in rendered])[::-1]
    if behind and behind[0] in tokenizer.special_ids:
        return opening, (behind[0], *tokenizer.eos_ids), ()
    words = tokenizer.decode(behind).split()
    if not words:
        raise ValueError("the chat template marks no end of a user's turn; train on --data of your own instead.")
    return opening, tuple(tokenizer.eos_ids), (words[0],)


def before_text(tokenizer: Tokenizer) -> list[int]:
    """The token that stands before a text: BOS, or else the one that ends the text before, or a line."""
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return bos or [*tokenizer.eos_ids][:1] or tokenizer.encode("\n", add_bos=False)[:1]


def repeats_itself(ids: list[int]) -> bool:
    """Whether less than half of the 4-grams of a text are distinct."""
    grams = [tuple(ids[i : i + NGRAM]) for i in range(len(ids) - NGRAM + 1)]
    return len(set(grams)) < LEAST_DISTINCT * len(grams)


def groups(count: int, size: int, first: int, until: float) -> Iterator[range]:
    """The numbers from `first` up to `count` in groups, with a progress bar. None begins after the time `until`.

    At the end of a group most rows of the batch have nothing to do. So groups grow from `size` to MOST_SIZES times that,
    while one takes less than GROUP_SECONDS and than a quarter of the time that is left.
    """
    sizes, started = 1, time.monotonic()
    with contextlib.closing(Progress()) as progress:
        while first < count and (begun := time.monotonic()) <= until:
            progress(max(first / count, (begun - started) / (until - started)), f"conversation {first:,}")
            end = min(first + sizes * size, count)
            yield range(first, end)
            now, first = time.monotonic(), end
            fitting = sizes * min(GROUP_SECONDS, (until - now) / 4) / max(now - begun, 0.001)
            sizes = max(1, min(int(fitting), 2 * sizes, MOST_SIZES))


def asked_in(path: Path | None) -> set[str]:
    """The questions, or beginnings of texts, of a file that this command wrote."""
    records = read_json_lines(path, LINE) if path else []
    return {question_of(record) for record in records}


def tried_in(path: Path) -> list[str | None]:
    """The questions of a file that `write_questions` wrote; None for a bad one."""
    return [record["question"] for record in read_json_lines(path, {"question": (str, None)})]


def write_questions(
    engine: Engine, tokenizer: Tokenizer, path: Path, count: int, args: argparse.Namespace
) -> list[str | None]:
    """Questions that the model asks, sampled at T = 1: those that `path` has already, and new ones up to `count`. A bad
    one is None. Without a chat template they are the beginnings of texts.

    Questions 1, 3, 5, ... begin with the OPENINGS in turn. Every question is one line of the file. It is bad if it is
    empty, did not end by itself, repeats itself, or was asked before, also in the file args.apart.
    """
    chats = bool(tokenizer.chat_template_source)
    opening, stop_ids, stop = user_turn(tokenizer) if chats else (before_text(tokenizer), tuple(tokenizer.eos_ids), ())
    tried = tried_in(path)
    if len(tried) >= count:
        return tried
    numbers = range(len(tried), count)
    seen = set(tried) | asked_in(args.apart)
    seed = args.seed + numbers.start  # the engine adds the number of the prompt
    params = SamplingParams(1.0, max_new_tokens=args.question_tokens, seed=seed, stop_ids=stop_ids, stop=stop)
    begun = [OPENINGS[n // 2 % len(OPENINGS)] if n % 2 and chats else "" for n in numbers]
    prompts = [opening + tokenizer.encode(words, add_bos=False) for words in begun]
    for words, result in zip(begun, engine.generate_batch(prompts, params).run(), strict=True):
        text = (words + result.text).strip()
        endless = chats and result.stop_reason == "length"
        bad = text == words or endless or repeats_itself(result.token_ids) or text in seen
        seen.add(text)
        tried.append(None if bad else text)
    append_json_lines(path, *({"question": text} for text in tried[numbers.start :]))
    return tried


def questions_in(source: str, tokenizer: Tokenizer, args: argparse.Namespace) -> dict[str, list[dict]]:
    """The first args.count conversations of a file for training, by their first questions. For a model without a chat
    template: how its texts begin (args.question_tokens), without messages. Raises UsageError if there is none."""
    conversations, texts, left_out = read_records(source)
    if tokenizer.chat_template_source:
        asked = {question_of({"messages": talk}): talk for talk in conversations}
    else:
        begins = (tokenizer.encode(text, add_bos=False)[: args.question_tokens] for text in texts)
        asked = {tokenizer.decode(ids): [] for ids in begins}
    if not asked:
        kind = "conversation" if tokenizer.chat_template_source else "text for a model without a chat template"
        raise UsageError(f"--questions {source}: it has no {kind}{f' ({left_out[0]})' if left_out else ''}.")
    return dict(itertools.islice(asked.items(), args.count))


def asked_next(
    engine: Engine, tokenizer: Tokenizer, talks: dict[int, list[dict]], params: list[SamplingParams], question_tokens: int
) -> dict[int, str]:  # fmt: skip
    """What the user asks next in these conversations, written by the model at T = 1, where it is good and has room.
    talks: by their place in `params`."""
    turns = {i: user_turn(tokenizer, talk) for i, talk in talks.items()}
    turns = {i: turn for i, turn in turns.items() if len(turn[0]) + question_tokens <= engine.ctx}
    own = [
        replace(params[i], temperature=1.0, max_new_tokens=question_tokens, stop_ids=stop_ids, stop=stop)
        for i, (_, stop_ids, stop) in turns.items()
    ]
    results = engine.generate_batch([ids for ids, *_ in turns.values()], own).run() if turns else []
    good = {
        i: new.text.strip()
        for i, new in zip(turns, results, strict=True)
        if new.stop_reason != "length" and not repeats_itself(new.token_ids)
    }
    return {i: text for i, text in good.items() if text}


def answered(
    engine: Engine, tokenizer: Tokenizer, asked: list[list[dict]], params: list[SamplingParams], args: argparse.Namespace
) -> list[list[dict]]:  # fmt: skip
    """Conversations with the model's own answers behind their questions, turn by turn. If there are fewer questions than
    args.turns, the model asks more. One ends before an answer that is empty, repeats itself or has no room."""
    talks = [[message for message in messages if message["role"] == "system"] for messages in asked]
    questions = [[message for message in messages if message["role"] == "user"] for messages in asked]
    going = list(range(len(asked)))
    while going:
        # A turn is two messages, and a system message is none.
        silent = {i: talks[i] for i in going if not questions[i] and len(talks[i]) // 2 < args.turns}
        for i, text in asked_next(engine, tokenizer, silent, params, args.question_tokens).items():
            questions[i].append({"role": "user", "content": text})
        prompts = {i: tokenizer.encode_chat([*talks[i], questions[i][0]]) for i in going if questions[i]}
        prompts = {i: ids for i, ids in prompts.items() if len(ids) + args.answer_tokens <= engine.ctx}
        own = [params[i] for i in prompts]
        results = engine.generate_batch([*prompts.values()], own).run() if prompts else []
        going = []
        for i, result in zip(prompts, results, strict=True):
            answer = result.text.strip()
            if answer and not repeats_itself(result.token_ids):
                talks[i] += [questions[i].pop(0), {"role": "assistant", "content": answer}]
                going.append(i)
    return talks


def write_answers(
    engine: Engine, tokenizer: Tokenizer, asked: dict[int, list[dict] | str], path: Path, args: argparse.Namespace
) -> None:
    """Append these conversations with their answers to `path`, or without a chat template, these beginnings of texts and
    how they go on. asked: by number.

    The number says whether an answer is the model's most likely one or is sampled at T = 1, so that it does not depend on
    the group. An answer that is empty or repeats itself is left out.
    """
    # Pairs of numbers, because every second question begins with words that are given.
    params = [SamplingParams(float(n // 2 % 2), max_new_tokens=args.answer_tokens, seed=args.seed + n) for n in asked]
    if tokenizer.chat_template_source:
        whole = answered(engine, tokenizer, [*asked.values()], params, args)
        records = [{"messages": talk} for talk in whole]
        good = [any(message["role"] == "assistant" for message in talk) for talk in whole]
    else:
        prompts = [before_text(tokenizer) + tokenizer.encode(text, add_bos=False) for text in asked.values()]
        results = engine.generate_batch(prompts, params).run()
        records = [
            {"begins": begin, "text": begin + new.text} for begin, new in zip(asked.values(), results, strict=True)
        ]
        good = [bool(new.text.strip()) and not repeats_itself(new.token_ids) for new in results]
    lines = zip(good, records, params, strict=True)
    append_json_lines(path, *(record | {"temperature": own.temperature} for keep, record, own in lines if keep))


def run(args: argparse.Namespace) -> None:
    """Write the questions, then the answers, in groups."""
    engine = load(**options_from(args, *LOADED))
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise UsageError(f"--checkpoint {args.checkpoint}: it has no tokenizer, so it cannot write text.")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    file, until = args.out.with_suffix(".questions.jsonl"), time.monotonic() + 3600 * args.hours
    given = questions_in(args.questions, tokenizer, args) if args.questions else {}
    tried, done = list(given) or tried_in(file), asked_in(args.out)
    first = max((i + 1 for i, question in enumerate(tried) if question in done), default=0)
    reached = first
    for numbers in groups(len(given) or args.count, engine.batch_size, first, until):
        if not given:
            tried = write_questions(engine, tokenizer, file, numbers.stop, args)
        asked = {i: tried[i] for i in numbers if tried[i] is not None}
        if tokenizer.chat_template_source:
            asked = {i: given.get(text) or [{"role": "user", "content": text}] for i, text in asked.items()}
        if asked:
            write_answers(engine, tokenizer, asked, args.out, args)
        reached = numbers.stop
    done = asked_in(args.out)
    bad = sum(question not in done for question in tried[:reached])
    none = f"{bad:,} of {reached:,} questions gave none that is whole, new and free of repetition"
    print(f"{len(done):,} conversations in {args.out}; {none}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = command_parser("scripts.make_chats", __doc__)
    add_options(parser, *LOADED, slots=32, ctx=1024)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="JSON lines to write; the questions are kept beside it")
    add("--count", type=at_least(1), default=4000, help="questions to try (default: 4000)")
    add("--hours", type=above_zero, default=math.inf, metavar="H", help="stop after so long")
    add("--questions", metavar="FILE", help="answer those of its conversations (as --data of scripts.train_eagle)")
    add("--apart", type=Path, metavar="FILE", help="ask no question of this file, which the same command wrote")
    add(
        "--turns", type=at_least(1), default=1, help="questions of a conversation, if its answers are good (default: 1)"
    )
    add("--question-tokens", type=at_least(8), default=128, help="most tokens of a question (default: 128)")
    add("--answer-tokens", type=at_least(8), default=256, help="most tokens of an answer (default: 256)")
    add("--seed", type=at_least(0), default=0)
    return run_parsed(parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())
