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
BLOCK = 2  # groups of questions that are written before they are answered
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


def groups(count: int, size: int, title: str, first: int, until: float) -> Iterator[range]:
    """The numbers from `first` up to `count` in groups of `size`, with a progress bar. None after the time `until`."""
    with contextlib.closing(Progress()) as progress:
        for start in range(first, count, size):
            if time.monotonic() > until:
                break
            progress(start / count, f"{title} {start} of {count}")
            yield range(start, min(start + size, count))


def asked_in(path: Path | None) -> set[str]:
    """The questions, or beginnings of texts, of a file that this command wrote."""
    records = read_json_lines(path, LINE) if path else []
    return {question_of(record) for record in records}


def write_questions(engine: Engine, tokenizer: Tokenizer, path: Path, args: argparse.Namespace) -> list[str]:
    """Questions that the model asks, sampled at T = 1: those that `path` has already, and new ones up to args.count, or
    up to the time args.until. Without a chat template they are the beginnings of texts.

    Questions 1, 3, 5, ... begin with the OPENINGS in turn. Every question that was tried is one line of the file; a bad
    one is null there. A question is bad if it is empty, did not end by itself, repeats itself, or was asked before, also
    in the file args.apart.
    """
    chats = bool(tokenizer.chat_template_source)
    opening, stop_ids, stop = user_turn(tokenizer) if chats else (before_text(tokenizer), tuple(tokenizer.eos_ids), ())
    params = SamplingParams(1.0, max_new_tokens=args.question_tokens, stop_ids=stop_ids, stop=stop)
    tried = [record["question"] for record in read_json_lines(path, {"question": (str, None)})]
    seen = set(tried) | asked_in(args.apart)
    for numbers in groups(args.count, engine.batch_size, "questions", len(tried), args.until):
        request = replace(params, seed=args.seed + numbers.start)
        begun = [OPENINGS[n // 2 % len(OPENINGS)] if n % 2 and chats else "" for n in numbers]
        prompts = [opening + tokenizer.encode(words, add_bos=False) for words in begun]
        for words, result in zip(begun, engine.generate_batch(prompts, request).run(), strict=True):
            text = (words + result.text).strip()
            endless = chats and result.stop_reason == "length"
            bad = text == words or endless or repeats_itself(result.token_ids) or text in seen
            seen.add(text)
            tried.append(None if bad else text)
        append_json_lines(path, *({"question": text} for text in tried[numbers.start :]))
    return [question for question in tried if question is not None]


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
    engine: Engine, tokenizer: Tokenizer, talks: list[list[dict]], params: SamplingParams, args: argparse.Namespace
) -> list[str]:
    """What the user asks next in each conversation, written by the model at T = 1; "" where it is bad or has no room."""
    turns = [user_turn(tokenizer, talk) for talk in talks]
    fits = [i for i, (ids, *_) in enumerate(turns) if len(ids) + args.question_tokens <= engine.ctx]
    texts = [""] * len(talks)
    if fits:
        _, stop_ids, stop = turns[0]
        params = replace(params, temperature=1.0, max_new_tokens=args.question_tokens, stop_ids=stop_ids, stop=stop)
        for i, new in zip(fits, engine.generate_batch([turns[i][0] for i in fits], params).run(), strict=True):
            bad = new.stop_reason == "length" or repeats_itself(new.token_ids)
            texts[i] = "" if bad else new.text.strip()
    return texts


def answered(
    engine: Engine, tokenizer: Tokenizer, asked: list[list[dict]], params: SamplingParams, args: argparse.Namespace
) -> list[list[dict]]:
    """Conversations with the model's own answers behind their questions, turn by turn. If there are fewer questions than
    args.turns, the model asks more. One ends before an answer that is empty, repeats itself or has no room."""
    talks = [[message for message in messages if message["role"] == "system"] for messages in asked]
    questions = [[message for message in messages if message["role"] == "user"] for messages in asked]
    going = list(range(len(asked)))
    while going:
        # A turn is two messages, and a system message is none.
        silent = [i for i in going if not questions[i] and len(talks[i]) // 2 < args.turns]
        more = asked_next(engine, tokenizer, [talks[i] for i in silent], params, args)
        for i, text in zip(silent, more, strict=True):
            questions[i] += [{"role": "user", "content": text}] if text else []
        prompts = {i: tokenizer.encode_chat([*talks[i], questions[i][0]]) for i in going if questions[i]}
        prompts = {i: ids for i, ids in prompts.items() if len(ids) + params.max_new_tokens <= engine.ctx}
        results = engine.generate_batch([*prompts.values()], params).run() if prompts else []
        going = []
        for i, result in zip(prompts, results, strict=True):
            answer = result.text.strip()
            if answer and not repeats_itself(result.token_ids):
                talks[i] += [questions[i].pop(0), {"role": "assistant", "content": answer}]
                going.append(i)
    return talks


def write_answers(
    engine: Engine, tokenizer: Tokenizer, talks: dict[str, list[dict]], path: Path, args: argparse.Namespace
) -> int:
    """Append a conversation to `path` for every one that it does not have yet, up to the time args.until. Returns how
    many there are then. talks: conversations by their first question. Without a chat template: how texts begin.

    The groups of questions are answered in turn by the model's most likely answer and by one sampled at T = 1. An answer
    that is empty or repeats itself is left out.
    """
    questions, done = list(talks), asked_in(path)
    size = engine.batch_size
    reached = max((i // size + 1 for i, question in enumerate(questions) if question in done), default=0) * size
    for numbers in groups(len(questions), size, "answers", reached, args.until):
        asked = [questions[i] for i in numbers]
        temperature = float(numbers.start // size % 2)
        params = SamplingParams(temperature, max_new_tokens=args.answer_tokens, seed=args.seed + numbers.start)
        if tokenizer.chat_template_source:
            whole = answered(engine, tokenizer, [talks[question] for question in asked], params, args)
            records = [{"messages": talk} for talk in whole if any(message["role"] == "assistant" for message in talk)]
        else:
            prompts = [before_text(tokenizer) + tokenizer.encode(text, add_bos=False) for text in asked]
            pairs = zip(asked, engine.generate_batch(prompts, params).run(), strict=True)
            good = ((text, new.text) for text, new in pairs if new.text.strip() and not repeats_itself(new.token_ids))
            records = [{"begins": begin, "text": begin + text} for begin, text in good]
        append_json_lines(path, *(record | {"temperature": temperature} for record in records))
        done.update(map(question_of, records))
    return len(done)


def run(args: argparse.Namespace) -> None:
    """Write the questions, then the answers."""
    engine = load(**options_from(args, *LOADED))
    if engine.tokenizer is None:
        raise UsageError(f"--checkpoint {args.checkpoint}: it has no tokenizer, so it cannot write text.")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.until = time.monotonic() + 3600 * args.hours
    if args.questions:
        count = write_answers(
            engine, engine.tokenizer, questions_in(args.questions, engine.tokenizer, args), args.out, args
        )
        print(f"{count:,} conversations in {args.out}", file=sys.stderr)
        return
    file, size = args.out.with_suffix(".questions.jsonl"), engine.batch_size
    block = BLOCK * size if args.hours < math.inf else args.count
    begun = min(args.count, len(read_json_lines(file)) // block * block)
    for end in range(max(begun, block), args.count + block, block):
        part = argparse.Namespace(**vars(args) | {"count": min(end, args.count)})
        questions = write_questions(engine, engine.tokenizer, file, part)
        whole = len(questions) if end >= args.count else len(questions) // size * size
        asked = {text: [{"role": "user", "content": text}] for text in questions[:whole]}
        count = write_answers(engine, engine.tokenizer, asked, args.out, part)
        if time.monotonic() > args.until:
            break
    tried = len(read_json_lines(file))
    out = f"{tried - count:,} of {tried:,} questions gave none that is whole, new, free of repetition and in time"
    print(f"{count:,} conversations in {args.out}; {out}", file=sys.stderr)


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
