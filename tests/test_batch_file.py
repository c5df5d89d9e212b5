"""Files of requests: `generate.py --input FILE --output FILE`."""

import json
from dataclasses import replace

import pytest
from serving_kit import text_of

import generate
from engine import load as loading
from engine.engine import Engine
from engine.load import fit_pool, fit_slots, load
from loading.drafting import DraftFiles
from loading.memory import plan_memory
from loading.options import DEMO, LoadOptions
from weights.checkpoint import Checkpoint

PATH = "/v1/completions"
FLAGS = ["--checkpoint", str(DEMO), "--ctx", "256", "-q"]


@pytest.fixture(scope="module")
def alone() -> Engine:
    return load(DEMO, ctx=256)


def line(number: int, body: dict, **more) -> dict:
    return {"custom_id": f"r{number}", "method": "POST", "url": PATH, "body": body} | more


def written(path, lines) -> list[str]:
    """The arguments that answer these lines."""
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return ["--input", str(path), "--output", str(path.with_suffix(".out"))]


def answers(path) -> list[dict]:
    return [json.loads(one) for one in path.with_suffix(".out").read_text().splitlines()]


def expected(alone: Engine, body: dict) -> str:
    return text_of(alone, body["prompt"], temperature=body["temperature"], max_new_tokens=body["max_tokens"])


def test_every_request_of_a_file_is_answered_as_alone_and_in_order(tmp_path, alone, capsys):
    """Answers in the order in which they end, texts that depend on the others, and a wrong request that ends the run."""
    bodies = [{"prompt": f"x{i} = ", "max_tokens": 3 + 29 * i % 40, "temperature": float(i % 2)} for i in range(11)]
    lines = [line(i, body) for i, body in enumerate(bodies)]
    lines.insert(4, line(99, {"prompt": "x", "max_tokens": -2}))
    path = tmp_path / "in.jsonl"
    assert generate.main([*FLAGS, "--slots", "3", "--eagle", str(DEMO / "eagle1"), *written(path, lines)]) == 0
    found = answers(path)
    assert [one["custom_id"] for one in found] == [one["custom_id"] for one in lines]
    wrong = found.pop(4)["response"]
    assert wrong["status_code"] == 400 and wrong["body"]["error"]["param"] == "max_tokens"
    for one, body in zip(found, bodies, strict=True):
        assert one["response"]["status_code"] == 200 and one["error"] is None
        assert one["response"]["body"]["choices"][0]["text"] == expected(alone, body)
    assert capsys.readouterr().err == ""


def test_a_run_that_was_interrupted_goes_on_behind_its_last_answer(tmp_path, capsys):
    """Answers that are made again or twice, a half-written last line, and answers to another file."""
    path = tmp_path / "in.jsonl"
    lines = [line(i, {"prompt": f"x{i} = ", "max_tokens": 4}) for i in range(5)]
    arguments = [*FLAGS, *written(path, lines)]
    assert generate.main(arguments) == 0
    output = path.with_suffix(".out")
    first = output.read_text()
    kept = first.splitlines(keepends=True)
    output.write_text("".join(kept[:2]) + kept[2][:30])
    assert generate.main(arguments) == 0
    assert output.read_text().startswith("".join(kept[:2]))
    before, after = ([one["response"]["body"]["choices"] for one in map(json.loads, text.splitlines())]
                     for text in (first, output.read_text()))  # fmt: skip
    assert before == after and len(after) == 5
    arguments[-4:] = written(path, lines[1:])
    assert generate.main(arguments) == 2
    assert "holds answers to other requests" in capsys.readouterr().err


@pytest.mark.parametrize("content, said", [
    ("", "it is empty"),
    ("{", "line 1"),
    (json.dumps({"custom_id": "a", "method": "POST", "url": PATH}), "no 'body'"),
    (json.dumps(line(1, {}, url="/v1/nothing")), "line 1: POST /v1/nothing; allowed: POST to /v1/chat/completions"),
    (json.dumps(line(1, {})) + "\n\n" + json.dumps(line(1, {})), "line 3: the custom_id 'r1' came before"),
])  # fmt: skip
def test_a_file_that_is_no_file_of_requests_is_one_line(tmp_path, capsys, content, said):
    """A traceback, or half of a file answered, for a line that is no request."""
    path = tmp_path / "in.jsonl"
    path.write_text(content)
    assert generate.main([*FLAGS, "--input", str(path), "--output", str(tmp_path / "out")]) == 3
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments, said", [
    (["--input", "x"], "give both"),
    (["--input", "x", "--output", "y", "-p", "z"], "give one of"),
    (["--input", "x", "--output", "y", "--json"], "--json is for one request"),
    (["--input", "x", "--output", "y", "--system", "z"], "--system is part of a request"),
])  # fmt: skip
def test_what_does_not_go_with_a_file_is_refused(capsys, arguments, said):
    """An option that is ignored without a word."""
    assert generate.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_slots_and_pool_are_as_large_as_memory_holds(monkeypatch):
    """A server that does not start because eight contexts do not fit, or that has one slot where eight fit; a pool
    that is larger than memory, or smaller than one context."""
    checkpoint = Checkpoint.open(DEMO)
    options = LoadOptions(ctx=512, device="cpu", dtype="float32", slots=0)

    def total(slots: int, pool: int | None) -> int:
        return plan_memory(checkpoint, DraftFiles(), replace(options, slots=slots, pool=pool)).total

    cases = [
        (total(8, None), 8, 4096),
        (total(8, 3000), 8, 512 + 2488 * 9 // 10),  # of what is left a tenth stays free
        (total(8, 1024), 8, 972),
        (total(8, 1024) - 1, 4, None),
        (total(4, 512), 4, 512),
        (total(4, 512) - 1, 2, None),
        (total(1, 512) - 1, 1, 512),
    ]
    for free, slots, pool in cases:
        monkeypatch.setattr(loading, "free_memory", lambda device, free=free: free)
        assert fit_slots(checkpoint, DraftFiles(), options, None) == slots
        sized = replace(options, slots=slots)
        found = fit_pool(checkpoint, DraftFiles(), sized, None)
        assert 512 <= found <= 512 * slots and (pool is None or found == pool)
        assert total(slots, found) <= free or found == 512
    monkeypatch.undo()
    engine = load(DEMO, ctx=128, slots=0)
    assert (engine.batch_size, engine.pool_tokens, engine.options.pool) == (8, 1024, 1024)
