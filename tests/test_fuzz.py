"""Damaged input of every format: it reads as before, or it is refused in one short line.

`EAGLET_FUZZ=10000 pytest tests/test_fuzz.py` tries that many cases instead of a few hundred. Every case has a seed of its
own, which a failure names.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import BASE
from safetensors.torch import load_file, save_file
from test_checkpoint import write_meta
from test_quantize import UNTIED, published, saved, tiny, tiny_head
from test_tokenizer import json_dir, source_text, spm_dir  # noqa: F401

from bench.compare import compare
from bench.suites import read_suite
from bench.tree_search import read_statistics
from kernels.tuned import read_tuned
from load import build_head
from quantize import quantize_head
from sampling_params import with_suggestions
from serving.errors import ApiError
from serving.fields import parse_object
from support.texts import read_texts
from tokenizer import load_tokenizer
from training.data import TokenData, read_records
from tree import parse_tree
from weights import files
from weights.checkpoint import Checkpoint
from weights.checksums import SUMS, check_sha256
from weights.heads import read_eagle, save_quantized_eagle
from weights.hf import save_hf
from weights.quantized import QuantSpec
from weights.rounding import quantize_

CASES = int(os.environ.get("EAGLET_FUZZ", 500))
# What takes the place of values in JSON, as text.
VALUES = """null true false 0 1 -1 2 31 64 255 2147483648 1e308 1e999 NaN -1.5 "" "x" "false" [] [null] [[]] {} {"a":1}
    [1,"a"] 0.5""".split()
VALUES += ["9" * 4300, '"' + "y" * 40_000 + '"', "[" * 50 + "]" * 50, "[" * 5000 + "]" * 5000]


class Format(NamedTuple):
    """Files that are damaged, and what reads them."""

    files: tuple[str, ...]
    make: Callable[[Path], Any]  # writes the files into a folder
    read: Callable[[Path], Any]  # what was read, to be compared


def logits(folder: Path) -> list[int]:
    """The likeliest tokens of a model at each place of a text."""
    model = Checkpoint.open(folder).load()
    return model.logits(model.forward_train(torch.arange(3, 27)[None])[0]).argmax(-1).tolist()


def sharded(folder: Path) -> None:
    save_hf(tiny(UNTIED), folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    index = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(index.values()):
        save_file({name: tensors[name] for name in names if index[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def pickled(folder: Path) -> None:
    save_hf(tiny(UNTIED), folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def meta(folder: Path) -> None:
    base = {k: v for k, v in BASE.items() if not k.endswith("_token_id") and k != "initializer_range"}
    save_hf(tiny(type(UNTIED)("llama", head_dim=16, **base)), folder / "hf")
    write_meta(load_file(folder / "hf" / "model.safetensors"), folder / "m", 1, 0)
    shutil.rmtree(folder / "hf")


def stored(folder: Path) -> None:
    model, spec = tiny(UNTIED), QuantSpec("int4", 32)
    quantize_(model, spec)
    saved(folder, UNTIED)
    files.write_safetensors(folder / "model.safetensors", model.state_dict())
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"eaglet_quant": {"version": 1, **vars(spec)}}))


def rounded_head(folder: Path) -> None:
    config, tensors, _ = quantize_head(tiny_head(folder / "plain", UNTIED, 3), UNTIED, QuantSpec("int4", 32))
    save_quantized_eagle(config, tensors, QuantSpec("int4", 32), folder)
    shutil.rmtree(folder / "plain")


def drafts(folder: Path) -> list[int]:
    """The likeliest drafts of a head."""
    model = tiny(UNTIED)
    head = build_head(read_eagle(folder, UNTIED), model)
    features = torch.randn(1, 24, head.feature_size, generator=torch.Generator().manual_seed(1))
    return head.predict(head.forward_train(torch.arange(24)[None], head.fuse(features))).argmax(-1).tolist()


def one_file(name: str, text: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text if isinstance(text, str) else json.dumps(text)) and None


def lines(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def tuned(folder: Path) -> Any:
    found, note = read_tuned("gpu", folder / "t.json")
    if note:
        raise ValueError(note)
    return found


def published_of(kind: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        published(folder / "m", kind, symmetric=False, **{"group_size": 32} if kind != "ct" else {})

    return make


def suggested(folder: Path) -> Any:
    save = Checkpoint.open(folder)
    return save.config.eos_token_ids, with_suggestions(save.generation, {})


RUN = {"type": "run", "suite": "s", "temperature": 0.0, "arm": "a", "question": "q", "turn": 1, "rep": 0}
RUN |= {"prompt_sha256": "1", "ids_sha256": "2"}
ROW = {"suite": "s", "temperature": 0.0, "arm": "a", "tokens_per_second": 3.0, "tau": 1.5, "speedup": {"median": 1.0}}
SUMMARY = {"type": "summary", "environment": {"x": {"y": 1}}, "settings": {}, "model": {}, "rows": [ROW]}
SUMMARY |= {"arms": [{"arm": "a", "options": {}}]}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
COUNTS = {"temperature": 0.0, "trials": [[3, 2], [1, 1]], "hits": [[2, 1], [1, 0]]}
COUNTS |= {"dynamic": [{"dynamic": [8, 3, 4], "tau": 1.5}]}
M = "model.safetensors"
FORMATS = {
    "hf": Format(("config.json", M), lambda f: save_hf(tiny(UNTIED), f), logits),
    "shards": Format(("model.safetensors.index.json", "model-0.safetensors"), sharded, logits),
    "pickle": Format(("pytorch_model.bin",), pickled, logits),
    "meta": Format(("m/params.json", "m/consolidated.00.pth"), meta, lambda f: logits(f / "m")),
    "gptq": Format(("m/config.json", "m/" + M), published_of("gptq"), lambda f: logits(f / "m")),
    "awq": Format(("m/config.json", "m/" + M), published_of("awq"), lambda f: logits(f / "m")),
    "compressed-tensors": Format(("m/config.json", "m/" + M), published_of("ct"), lambda f: logits(f / "m")),
    "stored": Format(("config.json", M), stored, logits),
    "head": Format(("config.json", M), lambda f: tiny_head(f, UNTIED, 3), drafts),
    "rounded head": Format(("config.json", M), rounded_head, drafts),
    "generation": Format(
        ("generation_config.json",),
        lambda f: (save_hf(tiny(UNTIED), f), one_file("generation_config.json", {"do_sample": True, "top_k": 3})(f)),
        suggested,
    ),
    "tree": Format(("t.json",), one_file("t.json", {"paths": [[0], [1], [0, 0]]}), lambda f: parse_tree(f"{f}/t.json")),
    "tuned": Format(
        ("t.json",), one_file("t.json", {"version": 1, "gpus": {"gpu": {"8x8 w4": [64, 1, 4, 3, "float32"]}}}), tuned
    ),
    "questions": Format(
        ("q.jsonl",),
        one_file("q.jsonl", lines({"turns": ["a", "b"], "question_id": 1})),
        lambda f: read_suite(f / "q.jsonl"),
    ),
    "texts": Format(
        ("t.jsonl",), one_file("t.jsonl", lines(CHAT, "a", {"text": "b"})), lambda f: read_texts(f / "t.jsonl")
    ),
    "training": Format(
        ("t.jsonl",), one_file("t.jsonl", lines(CHAT, {"text": "b"})), lambda f: read_records(f"{f}/t.jsonl")[:2]
    ),
    "tokenised": Format(
        ("d.npz",),
        lambda f: TokenData.from_stream([1, 2, 3]).save(f / "d.npz"),
        lambda f: str(TokenData.load(f / "d.npz")),
    ),
    "bench": Format(
        ("b.jsonl",), one_file("b.jsonl", lines(RUN, SUMMARY)), lambda f: compare(f / "b.jsonl", f / "b.jsonl")
    ),
    "statistics": Format(
        ("s.json",), one_file("s.json", {"statistics": [COUNTS]}), lambda f: read_statistics(f / "s.json")
    ),
    "body": Format(("b.json",), one_file("b.json", CHAT), lambda f: parse_object((f / "b.json").read_bytes())),
}


def damaged(data: bytes, name: str, rng: random.Random) -> bytes:
    """One of the ways in which a file goes wrong."""
    if name.endswith((".json", ".jsonl")) and rng.random() < 0.8:
        return altered_json(data, rng)
    if name.endswith(".safetensors") and rng.random() < 0.7:
        end = 8 + int.from_bytes(data[:8], "little")
        if rng.random() < 0.5:
            text = altered_json(data[8:end], rng)
            return len(text).to_bytes(8, "little") + text + data[end:]
        return flipped(data, rng, end)
    return data[: rng.randrange(len(data))] if rng.random() < 0.3 else flipped(data, rng, len(data))


def flipped(data: bytes, rng: random.Random, end: int) -> bytes:
    at = rng.randrange(8) if rng.random() < 0.2 else rng.randrange(end)
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def altered_json(data: bytes, rng: random.Random) -> bytes:
    """JSON text, or the first of several lines, in which one value or one key is another."""
    first, newline, rest = data.partition(b"\n")
    try:
        value = json.loads(first)
    except ValueError:  # one value over several lines
        value, newline, rest = json.loads(data), b"", b""
    places: list[tuple[Any, Any]] = []

    def walk(box: Any) -> None:
        for key in list(box) if isinstance(box, dict) else range(len(box) if isinstance(box, list) else 0):
            places.append((box, key))
            walk(box[key])

    walk(value)
    box, key = rng.choice(places)
    kind = rng.random()
    if kind < 0.1:
        del box[key]
    elif kind < 0.2 and isinstance(box, dict):
        box[f"{key}@copy"] = "@value"
    else:
        box[key] = "@value"
    text = json.dumps(value).replace('"@value"', rng.choice(VALUES)).replace("@copy", "")
    return text.encode() + newline + rest


def write_sums(folder: Path) -> None:
    digests = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir()) if f.is_file()}
    text = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    (folder / SUMS).write_text(text)


def try_cases(form: Format, folder: Path, count: int, seed: str) -> dict[str, int]:
    """Damage files `count` times. Returns how often they read as before, were refused, or read differently."""
    wanted = form.read(folder)
    seen = {"same": 0, "refused": 0, "different": 0}
    for case in range(count):
        rng = random.Random(f"{seed} {case}")
        file = folder / rng.choice(form.files)
        good = file.read_bytes()
        bad = damaged(good, file.name, rng)
        file.write_bytes(bad)
        what = f"{seed} {case}: {file.name}"
        try:
            found = form.read(folder)
        except (ValueError, ApiError) as error:
            text = str(error).replace(str(folder), "")
            assert "\n" not in text and 10 < len(text) < 300, f"{what}: {len(text)} characters: {text[:400]}"
            found = None
        except BaseException as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {str(error)[:200]}") from error
        else:
            same = repr(found) == repr(wanted)
            assert same or file.suffix not in (".pth", ".bin", ".npz"), (
                f"{what}: reads differently in spite of checksums"
            )
            if not same and (file.parent / SUMS).is_file():
                with pytest.raises(ValueError, match="sha256"):
                    check_sha256(file.parent, "stored")
        kind = "refused" if found is None else "same" if same else "different"
        seen[kind] += 1
        file.write_bytes(good)
    return seen


@pytest.mark.parametrize("name", FORMATS)
@torch.no_grad()
def test_damaged_files_read_as_before_or_are_refused(name, tmp_path):
    """A traceback, a refusal that fills the screen, or a damaged file that is used although a checksum could tell."""
    form = FORMATS[name]
    form.make(tmp_path)
    if form.read in (logits, drafts) or (tmp_path / "m").is_dir():
        write_sums(tmp_path / "m" if (tmp_path / "m").is_dir() else tmp_path)
    seen = try_cases(form, tmp_path, CASES // len(FORMATS), name)
    assert seen["refused"] > 0, seen


@pytest.mark.parametrize("kind", ["json_dir", "spm_dir"])
def test_damaged_tokenizers_read_as_before_or_are_refused(kind, request, tmp_path):
    """The same for a tokenizer: another text for the same ids, or a Rust panic on the screen."""
    folder = tmp_path / "t"
    shutil.copytree(request.getfixturevalue(kind), folder)
    found = [
        name for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model") if (folder / name).is_file()
    ]

    def read(folder: Path) -> Any:
        tokenizer = load_tokenizer(folder)
        ids = tokenizer.encode("Hello, world é 1")
        return ids, tokenizer.decode(ids), tokenizer.eos_ids

    assert try_cases(Format(tuple(found), lambda f: None, read), folder, CASES // 20, kind)["refused"] > 0
