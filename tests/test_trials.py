"""Random requests beside plain decoding: kinds of models, drafters, caches and settings, all of them by chance.

EAGLET_TRIALS=N makes at least N requests in place of a few, and EAGLET_SEED=K others.
"""

import functools
import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import FAMILIES, build_hf
from tiny import needs_kernels, tiny_head

from decoding.params import SamplingParams
from engine.load import load
from weights.checkpoint import Checkpoint
from weights.heads import save_eagle

TRIALS, SEED = int(os.environ.get("EAGLET_TRIALS", 96)), int(os.environ.get("EAGLET_SEED", 0))
REQUESTS = 24  # of a pair of engines
QUANTS, KV_CACHES = (None, "int8", "int4"), ("auto", "model", "float16", "bfloat16", "int8")
TREES = ("paper25", "chain:1", "chain:6", "dynamic:16,4,4", "dynamic:40,6,8", None)
WINDOWS = ("auto", "full", 16, 17, 64, 256)
ODD_SIZES = ("gemma4", "qwen2_moe", "qwen3_5_moe", "qwen3_next")  # of some layers, which no group of int4 fits
NO_DRAFTER = ("gemma4", "qwen3_5", "qwen3_next")
CONTEXTS = (96, 256, 256, 1024, 8192)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """folders(family) is a random checkpoint of 8,192 positions, with random heads in it."""

    @functools.cache
    def make(family: str) -> Path:
        root = tmp_path_factory.mktemp(family)
        experts = {"moe_intermediate_size": 64} if "moe_intermediate_size" in FAMILIES[family][1] else {}  # for int4
        build_hf(family, max_position_embeddings=8192, **experts).save_pretrained(root)
        target = Checkpoint.open(root).load("cpu", torch.float32)
        vocab = target.config.vocab_size
        some = torch.tensor(sorted(random.Random(family).sample(range(vocab), 60)))
        for name, version, drafted in (("eagle1", 1, None), ("eagle3", 3, None), ("eagle3-trimmed", 3, some)):
            head = tiny_head(target, version, drafted, hidden_size=target.config.hidden_size)
            layer = replace(head.config.layer, max_position_embeddings=8192)
            config = replace(head.config, layer=layer, target_vocab_size=vocab)
            save_eagle(config, head.state_dict(), root / name)
        return root

    return make


def options(rng: random.Random, family: str, folders) -> dict[str, dict]:
    """Options of `load` for plain decoding of one request at a time, and for an engine with a drafter."""
    folder = folders(family)
    both = {"checkpoint": folder, "device": "cpu", "kernels": "cpu", "dtype": "float32", "ctx": rng.choice(CONTEXTS)}
    both |= {"quant": rng.choice(QUANTS[:2] if family in ODD_SIZES else QUANTS), "kv": rng.choice(KV_CACHES)}
    kind = rng.choice(("eagle1", "eagle3", "eagle3-trimmed", "ngram", "lookahead", "draft", "none"))
    slots = rng.choice((1, 1, 2, 4))
    drafting = {"slots": slots}
    if slots > 1 and rng.random() < 0.4:
        drafting["pool"] = rng.randrange(both["ctx"], both["ctx"] * slots + 1)
    if kind != "none":
        drafting["eagle_always"] = rng.random() < 0.8
    if kind.startswith("eagle"):
        drafting |= {"eagle": folder / kind, "tree": rng.choice(TREES), "draft_window": rng.choice(WINDOWS)}
        drafting["draft_noise"] = rng.random() < 0.8
        if drafting["tree"] == "paper25":
            drafting["prune"] = rng.choice((None, 0, 3, 20))
        if rng.random() < 0.3:
            drafting["ngram_nodes"] = rng.randrange(1, 9)
    elif kind == "draft":
        own = "llama" if family.startswith(NO_DRAFTER) else family  # drafts what the model itself says
        drafting |= {"draft_checkpoint": folders(rng.choice(("llama", own))), "tree": rng.choice(TREES[:5])}
    elif kind != "none":
        drafting["drafter"] = kind
    return {"plain": both | {"eagle": "none"}, "drafting": both | {"eagle": "none"} | drafting}


def request(rng: random.Random, stems: list[list[int]], ctx: int) -> tuple[list[int], SamplingParams]:
    """A prompt that begins as others do, and settings."""
    count = rng.randrange(1, 33)
    room = ctx - count - 1
    length = room if rng.random() < 0.03 else int(room ** rng.random())  # most are short
    stem = rng.choice(stems)[:length]
    prompt = [*stem, *(rng.randrange(3, 128) for _ in range(rng.randrange(4)))][-room:]
    more = {}
    for name, values in (
        ("top_k", (1, 5, 40)), ("top_p", (0.3, 0.9)), ("min_p", (0.02, 0.2)), ("repetition_penalty", (0.8, 1.3)),
        ("presence_penalty", (-1.0, 0.7)), ("frequency_penalty", (0.4,)), ("min_new_tokens", (3, 20)),
        ("logit_bias", ({7: 4.0, 9: -100.0}, {2: 3.0})), ("stop_ids", ((5, 6, 7), (2, 11))),
    ):  # fmt: skip
        if rng.random() < 0.15:
            more[name] = rng.choice(values)
    temperature = rng.choice((0.0, 0.0, 0.3, 1.0, 1.0, 1.7))
    return prompt, SamplingParams(temperature, seed=rng.randrange(5), max_new_tokens=count, **more)


def trial(rng: random.Random, plain, drafting) -> Counter:
    """Eight requests at once, again and again, some of which are given up. Counts what was compared."""
    stems = [[rng.randrange(3, 128) for _ in range(plain.ctx)] for _ in range(2)]
    stems.append([rng.randrange(3, 128) for _ in range(rng.randrange(2, 30))] * plain.ctx)  # for n-grams
    counts = Counter(pairs=1)
    for _ in range(REQUESTS // 8):
        asked = [request(rng, stems, plain.ctx) for _ in range(8)]
        streams = [drafting.generate(prompt, params) for prompt, params in asked]
        if rng.random() < 0.3:
            given_up = rng.randrange(8)
            next(iter(streams[given_up]))
            streams[given_up].close()
            del streams[given_up], asked[given_up]
        for (prompt, params), stream in zip(asked, streams, strict=True):
            found, right = stream.run()[0], plain.generate(prompt, params).run()[0]
            assert (found.token_ids, found.stop_reason) == (right.token_ids, right.stop_reason), (len(prompt), params)
            accepted = sum(len(ids) - 1 for ids in found.tokens_per_step)
            counts.update(requests=1, tokens=len(right.token_ids), accepted=accepted)
    return counts


@needs_kernels
def test_random_requests_have_the_tokens_of_plain_decoding(folders, capsys):
    """A token that depends on the drafter, its window, other requests, kept prompts or the room in the cache; options
    that are refused."""
    rng, counts = random.Random(SEED), Counter()
    while counts["requests"] < TRIALS:
        family = rng.choice(("llama", *FAMILIES))
        given = options(rng, family, folders)
        plain, drafting = load(**given["plain"]), load(**given["drafting"])
        try:
            counts.update(trial(rng, plain, drafting))
        except Exception as error:
            raise AssertionError(f"pair {counts['pairs']} of seed {SEED}: {family} {given['drafting']}") from error
        finally:
            drafting.close()
            plain.close()
        if TRIALS > 1000:
            with capsys.disabled():
                print(f"\r{dict(counts)}", end="", flush=True)
    assert counts["accepted"] > counts["tokens"] / 50, "hardly a draft was accepted, so nothing was tried"
