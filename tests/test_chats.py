"""scripts.make_chats: what a model writes by itself, what is left out, and going on after an interruption."""

import itertools
import math
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
        self.requests.append((prompts, params))
        results = []
        for _ in prompts:
            text = self.texts.pop(0)
            reason = "length" if text.endswith("...") else "stop"
            ids = [ord(c) for c in text]
            results.append(GenerationResult(1, params.temperature, params.seed, text, ids, reason))
        return SimpleNamespace(run=lambda: results)


@pytest.fixture
def tokenizer():
    tokenizer = load_tokenizer(DEMO)
    tokenizer.use_template("vicuna")
    return tokenizer


def arguments(**given):
    return SimpleNamespace(
        **dict(count=6, turns=1, question_tokens=9, answer_tokens=50, seed=100, until=math.inf, apart=None) | given
    )


def talks(questions):
    return {text: [{"role": "user", "content": text}] for text in questions}


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
    assert chats.write_questions(engine, tokenizer, file, arguments()) == ["why?", "Tell me why?"]
    assert [record["question"] for record in read_json_lines(file)] == ["why?", None, None, "Tell me why?", None, None]
    opening = chats.user_turn(tokenizer)[0]
    said = [tokenizer.decode(prompt[len(opening) :]).strip() for prompts, _ in engine.requests for prompt in prompts]
    assert said == ["", "Say", "", "Tell me", "", "Say"]
    assert [params.seed for _, params in engine.requests] == [100, 102, 104]
    assert all(params.temperature == 1 and params.max_new_tokens == 9 for _, params in engine.requests)
    again = ScriptedEngine(["more?", " why?"])
    assert chats.write_questions(again, tokenizer, file, arguments(count=8)) == ["why?", "Tell me why?", "more?"]
    assert [params.seed for _, params in again.requests] == [106]


def test_answers_are_greedy_and_sampled_in_turn_and_go_on_where_they_stopped(tokenizer, tmp_path):
    """Groups of answers are greedy and sampled in turn, each under its question, and a rerun answers the rest."""
    file, questions = tmp_path / "chats.jsonl", [f"question {i}?" for i in range(5)]
    engine = ScriptedEngine(["one", "no no no no no no no no no no", "three", "four", "five"])
    assert chats.write_answers(engine, tokenizer, talks(questions[:4]), file, arguments()) == 3
    assert [params.temperature for _, params in engine.requests] == [0.0, 1.0]
    assert chats.write_answers(engine, tokenizer, talks(questions), file, arguments()) == 4
    assert engine.requests[2][0] == [tokenizer.encode_chat([{"role": "user", "content": questions[4]}])]
    records = read_json_lines(file)
    pairs = [tuple(message["content"] for message in record["messages"]) for record in records]
    assert pairs == [(questions[0], "one"), (questions[2], "three"), (questions[3], "four"), (questions[4], "five")]
    assert [record["temperature"] for record in records] == [0.0, 1.0, 1.0, 0.0]
    conversations, texts, left_out = read_records(str(file))
    assert len(conversations) == 4 and not texts and not left_out


def test_a_model_without_a_template_writes_texts(tmp_path):
    """A base model that is refused, or asked like a chat model; texts that are written again, or lose their beginning."""
    tokenizer = load_tokenizer(DEMO)
    assert not tokenizer.chat_template_source
    file, out = tmp_path / "q.jsonl", tmp_path / "texts.jsonl"
    begins = chats.write_questions(ScriptedEngine(["def a(...", "x = 1"]), tokenizer, file, arguments(count=2))
    assert begins == ["def a(...", "x = 1"], "a beginning need not end"
    engine = ScriptedEngine(["b): pass", " + 2"])
    assert chats.write_answers(engine, tokenizer, talks(begins), out, arguments()) == 2
    assert engine.requests[0][0][1] == chats.before_text(tokenizer) + tokenizer.encode("x = 1", add_bos=False)
    assert read_records(str(out))[1] == ["def a(...b): pass", "x = 1 + 2"]
    assert chats.write_answers(ScriptedEngine([]), tokenizer, talks(begins), out, arguments()) == 2


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
    assert chats.write_answers(engine, tokenizer, asked, out, arguments()) == 2
    said = [[(m["role"], m["content"]) for m in record["messages"]] for record in read_json_lines(out)]
    new = [*turns[:2], ("assistant", "first"), turns[3], ("assistant", "second")]
    assert said == [new, [("user", "so?"), ("assistant", "only")]]
    prompt = tokenizer.encode_chat([{"role": role, "content": text} for role, text in new[:-1]])
    assert engine.requests[1][0] == [prompt]
    assert chats.write_answers(ScriptedEngine([]), tokenizer, asked, out, arguments()) == 2
    stuck = ScriptedEngine(["no no no no no no no no no no", ""])
    assert chats.write_answers(stuck, tokenizer, asked, tmp_path / "bad.jsonl", arguments()) == 0
    source.write_text('{"text": "a b c d e f g h i j k l"}')
    one_line(lambda: chats.questions_in(str(source), tokenizer, arguments()), "it has no conversation")
    begins = chats.questions_in(str(source), load_tokenizer(DEMO), arguments(question_tokens=3))
    assert len(begins) == 1 and "a b c d e f".startswith(next(iter(begins)))


def test_a_conversation_goes_on_with_questions_of_the_model(tokenizer, tmp_path):
    """A follow-up that is asked without the conversation, or goes on behind a bad question or answer."""
    out = tmp_path / "out.jsonl"
    engine = ScriptedEngine(["one", "two", "why so?", "endless...", "because", "no no no no no no no no no no"])
    given = arguments(turns=3)
    assert chats.write_answers(engine, tokenizer, talks(["first?", "other?"]), out, given) == 2
    said = [[message["content"] for message in record["messages"]] for record in read_json_lines(out)]
    assert said == [["first?", "one", "why so?", "because"], ["other?", "two"]]
    opened = tokenizer.decode(engine.requests[1][0][0])
    assert opened.endswith("USER:") and "first?" in opened and "one" in opened
    assert [params.temperature for _, params in engine.requests] == [0.0, 1.0, 0.0, 1.0]
    assert engine.requests[1][1].max_new_tokens == given.question_tokens


def test_nothing_is_asked_that_another_file_asks_or_after_the_time(tokenizer, tmp_path):
    """Held-out questions among those for training, and a run that goes on when its time is over."""
    other = tmp_path / "held.jsonl"
    append_json_lines(other, {"messages": [{"role": "user", "content": "why?"}]}, {"begins": "how?", "text": "how? so"})
    engine = ScriptedEngine(["why?", "", "how?", " so?"])
    given = arguments(count=4, apart=other)
    assert chats.write_questions(engine, tokenizer, tmp_path / "q.jsonl", given)[0].endswith("so?")
    late = arguments(until=0.0)
    assert not chats.write_questions(ScriptedEngine([]), tokenizer, tmp_path / "late.jsonl", late)
    assert chats.write_answers(ScriptedEngine([]), tokenizer, talks(["why?"]), tmp_path / "late.jsonl", late) == 0


def test_blocks_of_a_run_by_time_write_what_one_block_writes(tokenizer, tmp_path, monkeypatch):
    """Questions of a group that was cut by the end of a block, and are never answered; other questions than without a
    time. A run that was interrupted between questions and answers gives the answers."""
    monkeypatch.setattr(chats, "BLOCK", 1)
    texts = ["a?", "b?", "", "c?", "d?", "e?"]
    for name, hours in (("whole", math.inf), ("timed", 9.0)):
        asked, answers = iter(texts), itertools.count()
        engine = ScriptedEngine([])
        engine.tokenizer = tokenizer

        def generate(prompts, params, asked=asked, answers=answers):
            new = [next(asked) if params.max_new_tokens == 9 else f"answer {next(answers)}" for _ in prompts]
            return ScriptedEngine(new).generate_batch(prompts, params)

        engine.generate_batch = generate
        monkeypatch.setattr(chats, "load", lambda engine=engine, **options: engine)
        monkeypatch.setattr(chats, "options_from", lambda *args: {})
        monkeypatch.setattr(chats, "OPENINGS", [""])
        chats.run(arguments(questions=None, hours=hours, out=tmp_path / f"{name}.jsonl"))
    whole, timed = (read_json_lines(tmp_path / f"{name}.jsonl") for name in ("whole", "timed"))
    assert timed == whole and len(whole) == 5
