"""engine/prompt_cache.py: texts that alternate on one engine, in memory and on disk."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch
from tiny import CTX, TREES, V, eagle_engine, tables, tiny_head, tiny_model

from decoding.params import SamplingParams
from drafters.ngram import NGramDrafter
from engine.engine import Engine, EngineConfig
from engine.prompt_cache import PromptCache, cache_rows

MODEL = tiny_model()
HEAD = tiny_head(MODEL, 3)
CHATS = [[(i * k + k) % V for i in range(60)] for k in (5, 7, 11)]
PARAMS = SamplingParams(temperature=0.7, seed=3, max_new_tokens=12)


def engine(kind: str, cache: PromptCache | None = None) -> Engine:
    if kind == "eagle":
        made = eagle_engine(HEAD, TREES["chain4"])
    elif kind == "draft":
        from drafters.draft_model import DraftModelDrafter

        tree = tables(TREES["chain4"])
        small = tiny_model(seed=5, layers=1)
        made = Engine(MODEL, drafter=DraftModelDrafter(MODEL, small, tree, 1, CTX + tree.N + 1))
    else:
        made = Engine(MODEL, drafter=NGramDrafter(MODEL, 5, 4) if kind == "ngram" else None)
    made.keep_prompts(cache or PromptCache())
    return made


def ended_process() -> int:
    """The number of a process that is no more."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def turn(on: Engine, text: list[int]) -> tuple[list[int], int]:
    """Ask for an answer. Returns the ids of the whole text and how many of them were not run again."""
    result = on.generate(text, PARAMS).run()[0]
    return text + result.token_ids, result.cached_tokens


@pytest.mark.parametrize("kind", ["plain", "eagle", "ngram", "draft"])
def test_two_chats_that_take_turns_run_only_what_is_new(kind):
    """A chat that runs its whole text again at every turn because another one came between, or that goes on with rows
    of the other one: other tokens than alone."""
    shared = engine(kind, PromptCache(8))
    texts = CHATS[:2]
    for round_number in range(3):
        for i, text in enumerate(texts):
            expected, kept = turn(engine(kind), text)[0], len(text) - 6
            texts[i], cached = turn(shared, text)
            assert texts[i] == expected
            assert cached >= kept - 2 if round_number else cached == 0
        texts = [text + [round_number + 1] * 5 for text in texts]
    assert shared.prompt_cache.hits == 4 and len(shared.prompt_cache.entries) == 2


def test_a_restored_row_is_bitwise_what_was_saved():
    """A copy that loses a layer, the values, or the draft rows: drafts that are rejected although the text is known."""
    shared = engine("eagle", PromptCache(8))
    first, _ = turn(shared, CHATS[0])
    length, drafted = len(shared.batch.texts[0].ids), shared.batch.texts[0].drafted
    before = [rows.clone() for rows in cache_rows(shared.state, shared.drafter, 0, length, drafted)]
    turn(shared, CHATS[1])
    shared.generate([*first, 1], SamplingParams(max_new_tokens=1)).run()
    after = cache_rows(shared.state, shared.drafter, 0, length, drafted)
    kept = drafted - 1  # the last rows are made again, because the next token is part of them
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[..., :kept, :], new[..., :kept, :])


def test_the_oldest_texts_go_to_disk_and_come_back(tmp_path):
    """Memory that grows with every chat, a file that is never read again, files that stay after the end, and types that
    safetensors makes for every size and nobody frees."""
    folder, types = tmp_path / "prompts", ctypes.Array.__subclasses__()
    shared = engine("eagle", PromptCache(0, 64, folder))
    texts = [turn(shared, chat)[0] for chat in CHATS]
    cache = shared.prompt_cache
    assert cache.held_bytes == 0 < cache.disk_bytes and len(list(folder.iterdir())) == 2
    assert (folder.stat().st_mode & 0o77, next(folder.iterdir()).stat().st_mode & 0o77) == (0, 0)
    for text in texts:
        again, cached = turn(shared, [*text, 4])
        assert cached >= len(text) - 3 and again == turn(engine("eagle"), [*text, 4])[0]
    cache.close()
    assert not folder.exists() and len(ctypes.Array.__subclasses__()) <= len(types)


def test_texts_of_an_earlier_run_are_found_and_bad_files_are_not_used(tmp_path):
    """A restart that forgets what it was asked to keep, or that trusts a cut file or one of another model."""
    cache = PromptCache(8, 64, tmp_path, keep=True)
    shared = engine("eagle", cache)
    texts = [turn(shared, chat)[0] for chat in CHATS]
    cache.close()
    files = sorted(tmp_path.glob("*.rows"))
    assert len(files) == 2
    (tmp_path / "00000009.rows").write_bytes(files[0].read_bytes()[:100])
    half = [tmp_path / f"00000007.rows.{pid}.part" for pid in (ended_process(), os.getppid())]
    for part in half:
        part.touch()
    fresh = engine("eagle", PromptCache(8, 64, tmp_path, keep=True))
    assert [part.exists() for part in half] == [False, True]  # one process ended while it wrote, the other one lives
    again, cached = turn(fresh, [*texts[0], 4])
    assert cached > 60 and again == turn(engine("eagle"), [*texts[0], 4])[0]
    other = engine("plain", PromptCache(8, 64, tmp_path, keep=True))
    again, cached = turn(other, [*texts[1], 4])
    assert cached == 0 and again == turn(engine("plain"), [*texts[1], 4])[0]


def test_the_limits_hold(tmp_path):
    """A cache of 1 MB that takes 2, and a copy of a text that a longer copy holds already."""
    cache = PromptCache(1, 1, tmp_path)
    cache.limit, cache.disk_limit = 250_000, 120_000
    shared = engine("eagle", cache)
    for k in range(1, 12):
        turn(shared, [(i * k + k) % V for i in range(60)])
        assert cache.held_bytes <= 250_000 and cache.disk_bytes <= 120_000
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 130_000
    assert 2 <= len(cache.entries) < 10
    growing = engine("plain", PromptCache(8))
    text = CHATS[0]
    for _ in range(3):
        text = turn(growing, text)[0]
        turn(growing, CHATS[1])
    assert [entry.ids[:60] for entry in growing.prompt_cache.entries] == [CHATS[0], CHATS[1]]


def test_a_batch_restores_every_row():
    """Rows of a batch that get each other's text."""
    alone = Engine(MODEL).generate([*CHATS[0], 1, 2], PARAMS).run()[0].token_ids
    shared = Engine(MODEL, config=EngineConfig(batch_size=2))
    shared.keep_prompts(PromptCache(8))
    shared.generate_batch([CHATS[1], CHATS[0]], PARAMS).run()
    shared.generate_batch([CHATS[2], CHATS[2][::-1]], PARAMS).run()
    results = shared.generate_batch([[*CHATS[0], 1, 2], [*CHATS[1], 1, 2]], PARAMS).run()
    assert results[0].token_ids == alone and all(result.cached_tokens >= 58 for result in results)


def test_two_processes_of_one_model_never_get_each_others_rows(tmp_path):
    """Two caches that keep their files in one folder at the same time: every text is that of an engine alone, and no
    file replaces another one."""
    caches = [PromptCache(0, 64, tmp_path, keep=True) for _ in range(2)]
    both = [engine("eagle", cache) for cache in caches]
    for chat in CHATS:  # each writes the texts in another order
        turn(both[0], chat)
        turn(both[1], CHATS[2 - CHATS.index(chat)])
    assert len(list(tmp_path.glob("*.rows"))) == 4
    for chat in CHATS:
        expected = turn(engine("eagle"), [*chat, 9])[0]
        assert [turn(one, [*chat, 9])[0] for one in both] == [expected, expected]
    late = engine("eagle", PromptCache(0, 64, tmp_path, keep=True))
    listed = [saved.ids for saved in late.prompt_cache.entries]
    for file in tmp_path.glob("*.rows"):  # another process took them
        file.unlink()
    assert listed
    for ids in listed:
        assert turn(late, ids[:60])[0] == turn(engine("eagle"), ids[:60])[0]


@pytest.mark.parametrize("damage", ["one bit", "cut", "other ids", "empty"])
def test_a_damaged_file_is_dropped_and_its_text_is_run_again(tmp_path, damage):
    """Rows of a file that are not those that were written: the file goes, and the text is that of an engine alone."""
    first = engine("plain", PromptCache(0, 64, tmp_path, keep=True))
    turn(first, CHATS[0])
    turn(first, CHATS[1])
    (file,) = tmp_path.glob("*.rows")
    whole = bytearray(file.read_bytes())
    if damage == "one bit":
        whole[-1000] ^= 64
    elif damage == "other ids":
        whole = whole.replace(b"[0, ", b"[1, ", 1) if b"[0, " in whole else whole.replace(b"5, 10", b"5, 11", 1)
    file.write_bytes({"cut": bytes(whole[:-10]), "empty": b""}.get(damage, bytes(whole)))
    for fresh in (first, engine("plain", PromptCache(0, 64, tmp_path, keep=True))):
        again, cached = turn(fresh, [*CHATS[0], 4])
        assert cached == 0 and again == turn(engine("plain"), [*CHATS[0], 4])[0]
    assert not file.exists()


def test_what_a_failed_request_went_on_from_is_dropped():
    """Rows that are not finite fail one request; the next one with the same text runs it again."""
    shared = engine("plain", PromptCache(8))
    turn(shared, CHATS[0])
    turn(shared, CHATS[1])
    (saved,) = shared.prompt_cache.entries
    saved.rows = [torch.full_like(part, float("nan")) for part in saved.rows]
    with pytest.raises(ArithmeticError):
        turn(shared, [*CHATS[0], 4])
    assert turn(shared, [*CHATS[0], 4])[0] == turn(engine("plain"), [*CHATS[0], 4])[0]
