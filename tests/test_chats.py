"""scripts.make_chats: what a model writes by itself, what is left out, and going on after an interruption."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tiny import one_line

from engine.results import GenerationResult
from loading.options import DEMO
from scripts import make_chats as chats
from support.files import append_json_lines, read_json_lines
from text.tokenizer import load_tokenizer
from training.data import read_records


class ScriptedEngine:
    """Answers every prompt with the next of `texts`, and keeps the requests."""

    batch_size, ctx = 2, 200

    def __init__(self, texts):
        self.texts = list(texts)
        self.requests = []

    def generate_batch(self, prompts, params):
        params = (
            params if isinstance(params, list) else [replace(params, seed=params.seed + b) for b in range(len(prompts))]
        )
        self.requests += zip(prompts, params, strict=True)
        results = []
        for own in params:
            text = self.texts.pop(0)
            reason = "length" if text.endswith("...") else "stop"
            ids = [ord(c) for c in text]
            results.append(GenerationResult(1, own.temperature, own.seed, text, ids, reason))
        return SimpleNamespace(run=lambda: results)


@pytest.fixture
def tokenizer():
    tokenizer = load_tokenizer(DEMO)
    tokenizer.use_template("vicuna")
    return tokenizer


def arguments(**given):
    return SimpleNamespace(**dict(count=6, turns=1, question_tokens=9, answer_tokens=50, seed=100, apart=None) | given)


def talks(questions):
    return {n: [{"role": "user", "content": text}] for n, text in enumerate(questions)}


def test_a_user_turn_is_read_off_the_template(tokenizer):
    """The ids that open a user's turn, the stop ids and the stop strings are those of the template. Without an opening it
    is refused."""
    opening, stop_ids, stop = chats.user_turn(tokenizer)
    assert tokenizer.decode(opening).endswith("USER:") and "apple" not in tokenizer.decode(opening)
    assert stop == ("ASSISTANT:",) and set(stop_ids) == set(tokenizer.eos_ids)
    bare = SimpleNamespace(encode_chat=lambda messages: [ord(letter) for letter in messages[0]["content"]] + [2])
    with pytest.raises(ValueError, match="writes nothing before a question"):
        chats.user_turn(bare)


def test_bad_questions_are_left_out_and_the_rest_is_asked_once(tokenizer, tmp_path, monkeypatch):
    """Empty, cut, repeated and looping questions are left out, openings stay, and a rerun asks nothing again."""
    file = tmp_path / "q.jsonl"
    monkeypatch.setattr(chats, "OPENINGS", ["Say", "Tell me"])
    engine = ScriptedEngine(["why?", "", "cut...", " why?", "why?", " la la la la la la la la la la"])
    tried = ["why?", None, None, "Tell me why?", None, None]
    assert chats.write_questions(engine, tokenizer, file, 6, arguments()) == chats.tried_in(file) == tried
    opening = chats.user_turn(tokenizer)[0]
    said = [tokenizer.decode(prompt[len(opening) :]).strip() for prompt, _ in engine.requests]
    assert said == ["", "Say", "", "Tell me", "", "Say"]
    assert [params.seed for _, params in engine.requests] == [*range(100, 106)]
    assert all(params.temperature == 1 and params.max_new_tokens == 9 for _, params in engine.requests)
    again = ScriptedEngine(["more?", " why?"])
    assert chats.write_questions(again, tokenizer, file, 8, arguments()) == [*tried, "more?", None]
    assert [params.seed for _, params in again.requests] == [106, 107]
    assert chats.write_questions(ScriptedEngine([]), tokenizer, file, 4, arguments())[:8] == [*tried, "more?", None]


def test_an_answer_depends_on_its_number_alone(tokenizer, tmp_path):
    """Answers that are all greedy, or greedy for all questions that begin alike, or others in another group; one under
    the question of another, or kept although it repeats itself."""
    questions = [f"question {i}?" for i in range(5)]
    texts = ["one", "no no no no no no no no no no", "three", "four", "five"]
    for name, cuts in (("whole", (0, 5)), ("parts", (0, 1, 4, 5))):
        engine, file = ScriptedEngine(texts), tmp_path / f"{name}.jsonl"
        for first, end in itertools.pairwise(cuts):
            part = {n: talk for n, talk in talks(questions).items() if first <= n < end}
            chats.write_answers(engine, tokenizer, part, file, arguments())
        assert [params.temperature for _, params in engine.requests] == [0.0, 0.0, 1.0, 1.0, 0.0]
        assert [params.seed for _, params in engine.requests] == [100, 101, 102, 103, 104]
        assert [prompt for prompt, _ in engine.requests] == [*map(tokenizer.encode_chat, talks(questions).values())]
        records = read_json_lines(file)
        pairs = [tuple(message["content"] for message in record["messages"]) for record in records]
        assert pairs == [pair for pair in zip(questions, texts, strict=True) if pair[1][:2] != "no"]
        assert [record["temperature"] for record in records] == [0.0, 1.0, 1.0, 0.0]
    conversations, others, left_out = read_records(str(file))
    assert len(conversations) == 4 and not others and not left_out


def test_a_model_without_a_template_writes_texts(tmp_path):
    """A base model that is refused, or asked like a chat model; texts that are written again, or lose their beginning."""
    tokenizer = load_tokenizer(DEMO)
    assert not tokenizer.chat_template_source
    file, out = tmp_path / "q.jsonl", tmp_path / "texts.jsonl"
    begins = chats.write_questions(ScriptedEngine(["def a(...", "x = 1"]), tokenizer, file, 2, arguments())
    assert begins == ["def a(...", "x = 1"], "a beginning need not end"
    engine = ScriptedEngine(["b): pass", " + 2"])
    chats.write_answers(engine, tokenizer, dict(enumerate(begins)), out, arguments())
    assert engine.requests[1][0] == chats.before_text(tokenizer) + tokenizer.encode("x = 1", add_bos=False)
    assert read_records(str(out))[1] == ["def a(...b): pass", "x = 1 + 2"]
    assert chats.asked_in(out) == set(begins)


def test_the_questions_of_a_file_are_answered_turn_by_turn(tokenizer, tmp_path):
    """Answers of others that stay, or that the model reads; a turn behind one that repeats itself or has no room; the
    question of a system message."""
    source, out = tmp_path / "talks.jsonl", tmp_path / "out.jsonl"
    turns = [("system", "be brief"), ("user", "why?"), ("assistant", "OLD"), ("user", "how?"), ("assistant", "OLD")]
    long = [("user", "so?"), ("assistant", "OLD"), ("user", "word " * 200), ("assistant", "OLD")]
    write = ({"messages": [{"role": role, "content": text} for role, text in part]} for part in (turns, long, turns))
    append_json_lines(source, *write, {"text": "no conversation"})
    asked = chats.questions_in(str(source), tokenizer, arguments())
    assert list(asked) == ["why?", "so?"] and list(chats.questions_in(str(source), tokenizer, arguments(count=1))) == [
        "why?"
    ]
    engine = ScriptedEngine(["first", "only", "second"])
    chats.write_answers(engine, tokenizer, dict(enumerate(asked.values())), out, arguments())
    said = [[(m["role"], m["content"]) for m in record["messages"]] for record in read_json_lines(out)]
    new = [*turns[:2], ("assistant", "first"), turns[3], ("assistant", "second")]
    assert said == [new, [("user", "so?"), ("assistant", "only")]]
    prompt = tokenizer.encode_chat([{"role": role, "content": text} for role, text in new[:-1]])
    assert engine.requests[2][0] == prompt
    stuck, bad = ScriptedEngine(["no no no no no no no no no no", ""]), tmp_path / "bad.jsonl"
    chats.write_answers(stuck, tokenizer, dict(enumerate(asked.values())), bad, arguments())
    assert not read_json_lines(bad)
    source.write_text('{"text": "a b c d e f g h i j k l"}')
    one_line(lambda: chats.questions_in(str(source), tokenizer, arguments()), "it has no conversation")
    begins = chats.questions_in(str(source), load_tokenizer(DEMO), arguments(question_tokens=3))
    assert len(begins) == 1 and "a b c d e f".startswith(next(iter(begins)))


def test_a_conversation_goes_on_with_questions_of_the_model(tokenizer, tmp_path):
    """A follow-up that is asked without the conversation, or goes on behind a bad question or answer."""
    out = tmp_path / "out.jsonl"
    engine = ScriptedEngine(["one", "two", "why so?", "endless...", "because", "no no no no no no no no no no"])
    given = arguments(turns=3)
    chats.write_answers(engine, tokenizer, talks(["first?", "other?"]), out, given)
    said = [[message["content"] for message in record["messages"]] for record in read_json_lines(out)]
    assert said == [["first?", "one", "why so?", "because"], ["other?", "two"]]
    opened = tokenizer.decode(engine.requests[2][0])
    assert opened.endswith("USER:") and "first?" in opened and "one" in opened
    assert [params.temperature for _, params in engine.requests] == [0.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    assert [params.max_new_tokens for _, params in engine.requests] == [50, 50, 9, 9, 50, 9]


def test_nothing_is_asked_that_another_file_asks(tokenizer, tmp_path):
    """Held-out questions among those for training."""
    other = tmp_path / "held.jsonl"
    append_json_lines(other, {"messages": [{"role": "user", "content": "why?"}]}, {"begins": "how?", "text": "how? so"})
    engine = ScriptedEngine(["why?", "", "how?", " so?"])
    tried = chats.write_questions(engine, tokenizer, tmp_path / "q.jsonl", 4, arguments(apart=other))
    assert tried[:3] == [None, None, None] and tried[3].endswith("so?")


def test_groups_grow_while_the_time_allows_it(monkeypatch):
    """A batch that waits for its longest text again and again, a group that takes the rest of the hours or minutes on a
    slow machine, and one that begins after the time."""
    clock = [0.0]
    monkeypatch.setattr(chats.time, "monotonic", lambda: clock[0])

    def sizes(seconds_each, count, until):
        clock[0], found = 0.0, []
        for numbers in chats.groups(count, 2, 3, until):
            assert numbers.start == 3 + sum(found)
            found.append(len(numbers))
            clock[0] += seconds_each * len(numbers)
        return found

    assert sizes(0.1, 130, math.inf) == [2, 4, 8, 16, 32, 32, 32, 1]
    assert sizes(10.0, 23, math.inf) == [2, 4, 6, 6, 2]
    assert sizes(100.0, 9, math.inf) == [2, 2, 2]
    assert sizes(1.0, 10**6, 60.0) == [2, 4, 8, 10, 8, 6, 4, 4, 2, 2, 2, 2, 2, 2, 2, 2]
    assert not sizes(1.0, 10, -1.0)


def test_a_run_goes_on_where_it_was_interrupted(tokenizer, tmp_path, monkeypatch, capsys):
    """Questions that are written twice or never answered, answers that are written twice, or others than without the
    interruption: between questions and answers, within either of them, and behind the end."""
    texts = ["a?", "b?", "", "c?", "d?", "e?"]
    monkeypatch.setattr(chats, "options_from", lambda *args: {})
    monkeypatch.setattr(chats, "OPENINGS", [""])

    def run(name, calls):
        """A run that is interrupted at one of its calls of the engine."""
        left = iter(range(calls))

        def generate(prompts, params):
            if next(left, None) is None:
                raise KeyboardInterrupt
            if isinstance(params, list):
                new = [f"answer {own.seed}" for own in params]
            else:
                new = texts[params.seed - 100 :][: len(prompts)]
            return ScriptedEngine(new).generate_batch(prompts, params)

        engine = SimpleNamespace(tokenizer=tokenizer, batch_size=2, ctx=200, generate_batch=generate)
        monkeypatch.setattr(chats, "load", lambda **options: engine)
        chats.run(arguments(count=6, questions=None, hours=math.inf, out=tmp_path / f"{name}.jsonl"))

    append_json_lines(tmp_path / "whole.jsonl", {"messages": [{"role": "user", "content": "of another run?"}]})
    run("whole", 99)
    assert "6 conversations in" in (said := capsys.readouterr().err) and "1 of 6 questions gave none" in said
    whole = read_json_lines(tmp_path / "whole.jsonl")[1:]
    assert [record["messages"][1]["content"] for record in whole] == [f"answer {n}" for n in (100, 101, 103, 104, 105)]
    for calls in range(4):
        with pytest.raises(KeyboardInterrupt):
            run(f"cut {calls}", calls)
        run(f"cut {calls}", 99)
        run(f"cut {calls}", 0)
        assert read_json_lines(tmp_path / f"cut {calls}.jsonl") == whole
