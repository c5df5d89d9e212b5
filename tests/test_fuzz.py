"""Damaged input of every format: it reads as before, or it is refused in one short line.

`EAGLET_FUZZ=10000 pytest tests/test_fuzz.py` tries that many cases instead of a few hundred. Every case has a seed of its
own, which a failure names.
"""

import functools
import hashlib
import http.client
import json
import os
import random
import shutil
import socket
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from block_kit import layouts, random_tensors, target, write_layout
from conftest import BASE, build_hf
from safetensors.torch import load_file, save_file
from serving_kit import Running, instruct_folder, running
from test_checkpoint import TARGET, eagle3, speculators, write_head, write_meta
from test_gemma4 import with_assistant
from test_gguf import metadata_of, tensors_of, write
from test_lora import adapter
from test_mtp import add_mtp
from test_quantize import UNTIED, published, saved, tiny, tiny_head
from test_small_floats import small
from test_tokenizer import json_dir, source_text, spm_dir  # noqa: F401
from tiny import one_line

from bench.records import read_lines
from bench.suites import read_suite
from decoding.params import with_suggestions
from drafters.medusa import MedusaHeads, load_medusa, save_medusa
from engine.grammar import Grammars
from engine.grammar_text import checked_grammar, json_grammar
from engine.load import load
from families.config import ModelConfig
from kernels.tuned import LinearConfig, read_tuned, write_tuned
from loading.drafting import build_head
from loading.options import DEMO
from quantize import quantize_head
from serving.fields import ApiError, parse_object
from support import cache
from support.texts import read_texts
from text.tokenizer import load_tokenizer
from training.data import TokenData, read_records
from training.loop import Recipe, Run, World, optimizers
from tree import parse_tree
from weights import files, gguf_writer
from weights.block_heads import read_head
from weights.checkpoint import Checkpoint
from weights.files import SUMS, check_sha256
from weights.head_reader import read_eagle
from weights.heads import save_quantized
from weights.hf import save_hf
from weights.lora import read_adapter
from weights.quantized import QuantSpec
from weights.rounding import quantize_

CASES = int(os.environ.get("EAGLET_FUZZ", 500))
# What takes the place of values in JSON, as text.
VALUES = """null true false 0 1 -1 2 31 64 255 2147483648 1e308 1e999 NaN -1.5 "" "x" "false" [] [null] [[]] {} {"a":1}
    [1,"a"] 0.5 "qwen2" "qwen3" "mixtral" "yarn" {"rope_type":"yarn"} {"factor":"a"} 1e-40 3 65""".split()
VALUES += ["9" * 4300, '"' + "y" * 40_000 + '"', "[" * 50 + "]" * 50, "[" * 5000 + "]" * 5000]


class Format(NamedTuple):
    """Files that are damaged, and what reads them."""

    files: tuple[str, ...]
    make: Callable[[Path], Any]  # writes the files into a folder
    read: Callable[[Path], Any]  # what was read, to be compared
    share: int = 1  # of the cases


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


def with_mtp(folder: Path) -> None:
    """A model with recurrent layers, and a layer for multi-token prediction."""
    build_hf("qwen3_5").save_pretrained(folder)
    add_mtp(folder)


def mtp_logits(folder: Path) -> Any:
    model = Checkpoint.open(folder).with_mtp.load()
    text = torch.arange(3, 27)[None]
    return model.forward_train(text)[0].argmax(-1).tolist(), model.mtp.fc(torch.ones(2 * 64)).argmax()


@functools.cache
def geometry_of(family: str) -> ModelConfig:
    return ModelConfig.from_hf(build_hf(family).config.to_dict())


def added(folder: Path) -> list[Any]:
    pairs = sum(read_adapter(folder, geometry_of("llama")).parts.values(), [])
    return [(pair.a.read(), pair.b.read(), pair.scale, pair.first) for pair in pairs]


def medusa(folder: Path) -> None:
    save_medusa(MedusaHeads(tiny(UNTIED), 2).state_dict(), folder)


def block(folder: Path) -> None:
    config = layouts()["dflash2"]
    write_layout(folder, config, random_tensors(config))


def gguf_head(folder: Path) -> None:
    head = read_head(tiny_head(folder / "plain", UNTIED, 3), UNTIED)
    gguf_writer.write_head(folder / "h.gguf", head, folder)
    shutil.rmtree(folder / "plain")


def gguf_block(folder: Path) -> None:
    block(folder / "plain")
    gguf_writer.write_head(folder / "h.gguf", read_head(folder / "plain", target().config), folder)
    shutil.rmtree(folder / "plain")


def rounded_head(folder: Path) -> None:
    config, tensors, _ = quantize_head(tiny_head(folder / "plain", UNTIED, 3), UNTIED, QuantSpec("int4", 32))
    save_quantized(config, tensors, QuantSpec("int4", 32), folder)
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
    found, note = read_tuned("gpu", folder / "t.bin")
    if note:
        raise ValueError(note)
    return found


def gguf(folder: Path) -> None:
    save_hf(tiny(UNTIED), folder / "source")
    source = Checkpoint.open(folder / "source")
    tokens = ["ab", *(chr(33 + i) if i < 90 else f"t{i}" for i in range(source.config.vocab_size - 1))]
    extra = {"model": "gpt2", "pre": "llama-bpe", "tokens": tokens, "merges": ["a b"], "eos_token_id": 150}
    extra |= {"token_type": [1] * 150 + [3] * (len(tokens) - 150)}
    extra = {f"tokenizer.ggml.{key}": value for key, value in extra.items()}
    write(folder / "m.gguf", "llama", metadata_of(source.config), tensors_of(source), "Q4_1", extra)


def read_gguf(folder: Path) -> Any:
    checkpoint = Checkpoint.open(folder / "m.gguf")
    tokenizer = load_tokenizer(checkpoint.tokenizer_source, checkpoint.config.vocab_size)
    assert checkpoint.kept and checkpoint.notes is not None
    return logits(folder / "m.gguf"), tokenizer and tokenizer.encode("ab c")


def in_m(make: Callable[..., Any], kind: str, **options: Any) -> Format:
    """A model in a published format, which a function writes into the folder m."""
    return Format(("m/config.json", f"m/{M}"), lambda f: make(f / "m", kind, **options), lambda f: logits(f / "m"))


def generation(folder: Path) -> None:
    save_hf(tiny(UNTIED), folder)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_k": 3}))


def suggested(folder: Path) -> Any:
    save = Checkpoint.open(folder)
    return save.config.eos_token_ids, with_suggestions(save.generation, {})


def state_of(folder: Path) -> Run:
    """A short run of training, which may be saved and resumed."""
    module = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.constant_(module.weight, 0.5)
    optims = optimizers(module, Recipe("adamw"))
    return Run(
        module, optims, {"--seed": 0}, folder / "s.pt", World(0, 1, torch.device("cpu")), 4, None, [2.5, 1.5], 3.0
    )


def resumed(folder: Path) -> Any:
    run = state_of(folder)
    torch.nn.init.zeros_(run.module.weight)
    run.curve = []
    run.resume()
    return run.curve, run.seconds, run.module.weight.tolist(), run.optims[0].state_dict()


RUN = {"type": "run", "suite": "s", "temperature": 0.0, "arm": "a", "question": "q", "turn": 1, "rep": 0}
RUN |= {"prompt_sha256": "1", "ids_sha256": "2"}
ROW = {"suite": "s", "temperature": 0.0, "arm": "a", "tokens_per_second": 3.0, "tau": 1.5, "speedup": {"median": 1.0}}
SUMMARY = {"type": "summary", "environment": {"x": {"y": 1}}, "settings": {}, "model": {}, "rows": [ROW]}
SUMMARY |= {"arms": [{"arm": "a", "options": {}}]}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
TEXTS, QUESTION = lines(CHAT, {"text": "b"}), lines({"turns": ["a", "b"], "question_id": 1})
NESTED = eagle3("layers.0."), speculators()
ENTRY = b"payload" * 9, {"ids": [1, 2]}
STREAM = TokenData.from_stream([1, 2, 3])
TUNED = {"8x8 w4": LinearConfig(64, 1, 4, 3)}
M = "model.safetensors"
FORMATS = {
    "hf": Format(("config.json", M), lambda f: save_hf(tiny(UNTIED), f), logits, 4),
    "shards": Format(("model.safetensors.index.json", "model-0.safetensors"), sharded, logits),
    "pickle": Format(("pytorch_model.bin",), pickled, logits),
    "meta": Format(("m/params.json", "m/consolidated.00.pth"), meta, lambda f: logits(f / "m")),
    "gptq": in_m(published, "gptq", symmetric=False, group_size=32),
    "awq": in_m(published, "awq", symmetric=False, group_size=32),
    "compressed-tensors": in_m(published, "ct", symmetric=False),
    "int8": in_m(published, "int8", bits=8, group=-1),
    "fp8": in_m(small, "ct-blocks"),
    "nf4": in_m(small, "nf4-double"),
    "nvfp4": in_m(small, "nvfp4"),
    "stored": Format(("config.json", M), stored, logits),
    "head": Format(("config.json", M), lambda f: tiny_head(f, UNTIED, 3), drafts, 2),
    "speculators head": Format(
        ("config.json", M), lambda f: write_head(f, *NESTED, M), lambda f: read_eagle(f, TARGET), 8
    ),
    "recurrent": Format(("config.json", M), with_mtp, mtp_logits),
    "gemma4": Format(("config.json", M), lambda f: build_hf("gemma4").save_pretrained(f), logits),
    "assistant": Format(
        ("config.json", M),
        lambda f: with_assistant("gemma4", True)[1].float().save_pretrained(f),
        lambda f: read_head(f, geometry_of("gemma4")),
    ),
    "block head": Format(("config.json", M), block, lambda f: read_head(f, target().config)),
    "gguf head": Format(("h.gguf",), gguf_head, lambda f: read_head(f / "h.gguf", UNTIED), 4),
    "gguf block head": Format(("h.gguf",), gguf_block, lambda f: read_head(f / "h.gguf", target().config), 4),
    "medusa": Format(("medusa_lm_head.safetensors",), medusa, lambda f: load_medusa(f, tiny(UNTIED)).state_dict()),
    "adapter": Format(
        ("adapter_config.json", f"adapter_{M}"), lambda f: adapter(f, "llama", ["q_proj", "up_proj"]), added
    ),
    "rounded head": Format(("config.json", M), rounded_head, drafts),
    "generation": Format(("generation_config.json",), generation, suggested),
    "tree": Format(("t.json",), one_file("t.json", {"paths": [[0], [1], [0, 0]]}), lambda f: parse_tree(f"{f}/t.json")),
    "gguf": Format(("m.gguf",), gguf, read_gguf, 8),
    "entry": Format(("e.bin",), lambda f: cache.store(f / "e.bin", *ENTRY), lambda f: cache.read(f / "e.bin")),
    "tuned": Format(("t.bin",), lambda f: write_tuned("gpu", TUNED, f / "t.bin"), tuned),
    "questions": Format(("q.jsonl",), one_file("q.jsonl", QUESTION), lambda f: read_suite(f / "q.jsonl")),
    "texts": Format(("t.jsonl",), one_file("t.jsonl", TEXTS + '"a"\n'), lambda f: read_texts(f / "t.jsonl")),
    "training": Format(("t.jsonl",), one_file("t.jsonl", TEXTS), lambda f: read_records(f"{f}/t.jsonl")[:2]),
    "tokenised": Format(("d.npz",), lambda f: STREAM.save(f / "d.npz"), lambda f: str(TokenData.load(f / "d.npz"))),
    "training state": Format(("s.pt",), lambda f: state_of(f).save(), resumed),
    "bench": Format(("b.jsonl",), one_file("b.jsonl", lines(RUN, SUMMARY)), lambda f: read_lines(f / "b.jsonl")),
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
    if name.endswith(".gguf") and rng.random() < 0.8:
        end = data.rindex(b".weight") + 40
        at, extreme = rng.randrange(end), rng.choice([0, 1, 31, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 32, 2**64 - 1])
        if rng.random() < 0.5:
            return flipped(data, rng, end)
        return data[:at] + extreme.to_bytes(8, "little") + data[at + 8 :]
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
            with warnings.catch_warnings(record=True) as warned:  # they would stand before the line
                warnings.simplefilter("always")
                found = form.read(folder)
        except (ValueError, ApiError) as error:
            text = str(error).replace(str(folder), "")
            assert "\n" not in text and 10 < len(text) < 300, f"{what}: {len(text)} characters: {text[:400]}"
            found = None
        except BaseException as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {str(error)[:200]}") from error
        else:
            same = repr(found) == repr(wanted)
            assert same or file.suffix not in (".pth", ".bin", ".npz", ".pt"), f"{what}: differs in spite of checksums"
            if not same and (file.parent / SUMS).is_file():
                with pytest.raises(ValueError, match="sha256"):
                    check_sha256(file.parent, "stored")
        assert not warned, f"{what}: {warned[0].message}"
        kind = "refused" if found is None else "same" if same else "different"
        seen[kind] += 1
        file.write_bytes(good)
    return seen


@pytest.mark.parametrize("name", FORMATS)
@torch.no_grad()
def test_damaged_files_read_as_before_or_are_refused(name, tmp_path):
    """A damaged file gives the tensors of the whole one, or an error of one short line.

    Catches: a traceback, a refusal that fills the screen, or a damaged file that is used although a checksum could
    tell.
    """
    form = FORMATS[name]
    form.make(tmp_path)
    if form.read in (logits, drafts) or (tmp_path / "m").is_dir():
        write_sums(tmp_path / "m" if (tmp_path / "m").is_dir() else tmp_path)
    seen = try_cases(form, tmp_path, form.share * CASES // 25, name)
    assert seen["refused"] > 0, seen


@pytest.mark.parametrize("kind", ["json_dir", "spm_dir"])
def test_damaged_tokenizers_read_as_before_or_are_refused(kind, request, tmp_path):
    """A damaged tokenizer gives the ids of the whole one, or an error of one short line.

    Catches: another text for the same ids, or a Rust panic on the screen.
    """
    folder = tmp_path / "t"
    shutil.copytree(request.getfixturevalue(kind), folder)
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "tokenizer.model")
    found = [name for name in names if (folder / name).is_file()]

    def read(folder: Path) -> Any:
        tokenizer = load_tokenizer(folder)
        ids = tokenizer.encode("Hello, world é 1")
        return ids, tokenizer.decode(ids), tokenizer.eos_ids

    assert try_cases(Format(tuple(found), lambda f: None, read), folder, CASES // 2, kind)["refused"] > 20


# ---- requests, schemas and grammars --------------------------------------------------------------------------------

SCHEMA = {
    "type": "object", "required": ["a", "b"], "additionalProperties": False, "$defs": {"n": {"type": "integer"}},
    "properties": {
        "a": {"type": "string", "maxLength": 5, "pattern": "^[a-z]+$"},
        "b": {"type": "array", "items": {"$ref": "#/$defs/n"}},
        "c": {"anyOf": [{"const": 1}, {"enum": ["x", None]}]}, "d": {"type": "number", "minimum": 0},
    },
}  # fmt: skip
OPEN_FORMAT = {"name": "x", "strict": False, "schema": {
    "$ref": "#/$defs/a", "$defs": {"a": {"properties": {"x": {"type": "integer", "minimum": 3}}, "required": ["x"]}},
    "allOf": [{"properties": {"y": {"type": "array", "prefixItems": [True, {"type": "number"}], "uniqueItems": True}}}],
    "anyOf": [{"type": "object", "propertyNames": {"enum": ["x", "z"]}}, {"patternProperties": {"^(?=k)": {}}}],
}}  # fmt: skip
GRAMMAR = """start: "a" | word ("," word)* tail?
word: /[a-z]{2,5}/
tail: NUMBER "!" | start
%import common.NUMBER
"""
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}}
SETTINGS = {
    "model": "demo", "temperature": 0.7, "top_p": 0.9, "seed": 1, "presence_penalty": 0.1, "frequency_penalty": 0.1,
    "stream": False, "metadata": {"a": "b"}, "user": "u", "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1,
}  # fmt: skip
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TALK = [
    {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "1", "content": "2"},
]  # fmt: skip
CLAUDE = [
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": "b"}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "2"}]},
]
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
BODIES = {
    "/v1/chat/completions": [
        {**SETTINGS, "messages": TALK, "max_tokens": 2, "stop": ["x"], "n": 1, "tools": [TOOL], "tool_choice": "auto"},
        {**SETTINGS, "messages": TALK[:2], "max_completion_tokens": 2, "logprobs": True, "top_logprobs": 2},
        {**SETTINGS, "messages": TALK[:2], "max_tokens": 2, "response_format": FORMAT, "prompt_logprobs": 2},
        {"messages": TALK[:2], "max_tokens": 2, "response_format": {"type": "json_schema", "json_schema": OPEN_FORMAT}},
    ],
    "/v1/completions": [{**SETTINGS, "prompt": "a", "max_tokens": 2, "stop": "x", "logprobs": 1, "echo": True}],
    "/v1/responses": [
        {"model": "demo", "input": "a", "max_output_tokens": 16, "instructions": "i", "temperature": 0.1, "tools": []},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "max_output_tokens": 16},
        {"input": "a", "max_output_tokens": 2, "truncation": "auto", "tools": [{"type": "function", **TOOL["function"]}],
         "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}},
    ],
    "/v1/messages": [
        {"model": "m", "messages": CLAUDE, "max_tokens": 2, "system": [{"type": "text", "text": "s"}], "top_k": 3,
         "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"}, "stop_sequences": ["x"]},
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": True, "temperature": 0.5},
    ],
    "/v1/messages/count_tokens": [{"messages": CLAUDE, "system": "s", "tools": [{"name": "f", "input_schema": SCHEMA}]}],
    "/v1/embeddings": [{"model": "m", "input": ["a", "b"], "encoding_format": "base64"}, {"input": [[1, 2], [3]]}],
    "/v1/tokenize/": [{"prompt": "a </s> b", "add_special_tokens": False}, {"messages": TALK, "tools": [TOOL]}],
    "/tokenize": [{"content": "a b", "add_special": True, "with_pieces": True, "parse_special": False}],
    "/detokenize": [{"tokens": [1, 2, 300]}],
    "/apply-template": [{"messages": TALK, "tools": [TOOL], "chat_template_kwargs": {"a": True}}],
}  # fmt: skip
OTHERS = [  # fields of other servers
    {"max_tokens": 0, "prompt_logprobs": 3, "seed": -1, "top_p": 0},
    {"tools": [TOOL["function"]], "tool_choice": {"type": "auto"}},
    {"grammar": 'root ::= "a" | "b"'}, {"json_schema": SCHEMA}, {"guided_regex": "[a-z]+"}, {"guided_choice": ["a", "b"]},
    {"structured_outputs": {"json": SCHEMA}}, {"stop_token_ids": [3], "ignore_eos": True}, {"n_predict": -1},
    {"echo": True, "logprobs": None},
    {"logit_bias": {"5": 3.5, "300": -100}, "min_tokens": 2}, {"logit_bias": [[5, False]]},
    {"stream": True, "stream_options": {"include_usage": True}, "eaglet": {"steps": True}},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}}},
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of the demo model with a chat template."""
    pytest.importorskip("uvicorn")
    folder = instruct_folder(tmp_path_factory.mktemp("instruct"))
    with running(load(folder, ctx=512, device="cpu", threads=1), max_seconds=20) as server:
        yield server


def answer_of(server: Running, sent: bytes, seconds: float) -> tuple[int, bytes]:
    """(status, body) of the answer to a request as it is sent; status 0 where none comes in time, or ever."""
    with socket.create_connection(server.socket.getsockname()[:2], timeout=60) as link:
        link.sendall(sent)
        link.settimeout(seconds)
        with http.client.HTTPResponse(link) as answer:
            try:
                answer.begin()
                return answer.status, answer.read()
            except (OSError, http.client.HTTPException):
                return 0, b""


def altered_headers(head: bytes, rng: random.Random) -> bytes:
    """A request's head in which one line is damaged, doubled, left out or another."""
    lines = head.split(b"\r\n")
    at = rng.randrange(len(lines) - 2)
    names = b"Host Origin Content-Type Content-Length Authorization Connection Transfer-Encoding Expect".split()
    values = [b"", b"[", b"http://[", b"a:b:c", b"chunked", b"-1", b"9" * 30, b"\xff\xfe", b"x" * 9000, b"Bearer \xc3"]
    kind = rng.randrange(5)
    if kind == 0:
        lines[at] = flipped(lines[at] or b"x", rng, max(1, len(lines[at])))
    elif kind == 1:
        lines.insert(at + 1, lines[at])
    elif kind == 2:
        del lines[at]
    elif kind == 3:
        lines.insert(at + 1, rng.choice(names) + b": " + rng.choice(values))
    else:
        lines[at] = lines[at].partition(b":")[0] + b": " + rng.choice(values)
    return b"\r\n".join(lines)


def test_damaged_requests_get_an_answer(server):
    """A request with a damaged body or head that gets 500, or no answer at all, or a traceback in the server's lines."""
    statuses: Counter[int] = Counter()
    for case in range(CASES // 5):
        rng = random.Random(f"http {case}")
        path = rng.choice(list(BODIES))
        asked = rng.choice(BODIES[path])
        more = rng.choice(OTHERS) if path.endswith("completions") and rng.random() < 0.3 else {}
        body = json.dumps(asked | more).encode()
        in_head = rng.random() < 0.3
        if not in_head:
            body = altered_json(body, rng) if rng.random() < 0.9 else flipped(body, rng, len(body))
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
        head = f"{head}Content-Length: {len(body)}\r\n\r\n".encode()
        # Where the head is damaged, the server may have to wait for more of the body.
        sent = (altered_headers(head, rng) if in_head else head) + body
        status, rest = answer_of(server, sent, 1 if in_head else 60)
        statuses[status] += 1
        assert status < 500 or status in (501, 503), f"http {case}: {status} {rest[:300]!r} to {sent[:900]!r}"
        assert status or in_head, f"http {case}: no answer to {body[:600]!r}"
    assert statuses[200] and statuses[400], statuses
    assert not [line for line in server.lines if "Traceback" in line]


@pytest.mark.parametrize("kind", ["schema", "grammar"])
def test_damaged_grammars_are_followed_or_refused(kind):
    """A damaged schema or grammar that raises anything but one line, or that allows nothing after it was accepted."""
    pytest.importorskip("llguidance")
    tokenizer = load_tokenizer(DEMO)
    makers = Grammars(tokenizer, 4096)
    refused = 0
    for case in range(CASES // 20):
        rng = random.Random(f"{kind} {case}")
        try:
            if kind == "schema":
                schema = rng.choice([SCHEMA, OPEN_FORMAT["schema"]])
                grammar = json_grammar(altered_json(json.dumps(schema).encode(), rng).decode())
            else:
                at, other, size = (rng.randrange(len(GRAMMAR)) for _ in range(3))
                piece = rng.choice(["", GRAMMAR[other : other + size % 9], rng.choice('|*+?(){}[]/"\\%:.~\n\0é')])
                grammar = checked_grammar(GRAMMAR[:at] + piece + GRAMMAR[at + rng.choice([0, 1, size % 5]) :])
            constraint = makers.constraint(grammar, tokenizer.eos_ids)
            for _ in range(12):
                words = [word & 0xFFFFFFFF for word in constraint.allowed().tolist()]
                tokens = [32 * i + bit for i, word in enumerate(words) if word for bit in range(32) if word >> bit & 1]
                assert tokens, f"{kind} {case}: nothing may follow"
                token = rng.choice(tokens)
                constraint.take([token])
                if token in tokenizer.eos_ids:
                    break
        except ValueError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 400, f"{kind} {case}: {error}"
        except Exception as error:
            raise AssertionError(f"{kind} {case}: {type(error).__name__}: {str(error)[:300]}") from error
    assert refused


# ---- what once got through -----------------------------------------------------------------------------------------


def refused(form: str, folder: Path, *words: str) -> None:
    """Reading must fail with one short line that holds the words."""
    with pytest.raises((ValueError, ApiError)) as error:
        FORMATS[form].read(folder)
    text = str(error.value).replace(str(folder), "")
    assert "\n" not in text and len(text) < 300 and all(word in text for word in words), text


def made(form: str, folder: Path) -> Path:
    FORMATS[form].make(folder)
    return folder


def edited(file: Path, change: Callable[[dict], Any]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def change_head(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (file,) = folder.rglob(M)
        tensors = load_file(file)
        tensors[name] = change(tensors[name])
        save_file({k: t.contiguous() for k, t in tensors.items() if t is not None}, file)

    return edit


def describe(*keys: str, value: Any) -> Callable[[Path], None]:
    def change(raw: dict) -> None:
        for key in ("eaglet_head", *keys[:-1]):
            raw = raw[key]
        raw[keys[-1]] = value

    return lambda folder: edited(folder / "config.json", change)


Q = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(("form", "damage", "word"), [
    ("rounded head", change_head("fc.qweight", lambda t: t[0, 0]), "fc.qweight"),
    ("rounded head", change_head("fc.qweight", lambda t: t.flatten()), "fc.qweight"),
    ("rounded head", change_head("fc.scales", lambda t: None), "fc.scales"),
    ("rounded head", change_head("fc.scales", lambda t: t[:1]), "fc.scales"),
    ("rounded head", change_head("fc.scales", lambda t: t.long()), "fc.scales"),
    ("rounded head", change_head("fc.scales", lambda t: t * float("nan")), "fc.scales"),
    ("rounded head", change_head("norm.weight", lambda t: t * float("nan")), "norm.weight"),
    ("rounded head", describe("layer", "rope", "theta", value="x"), "theta"),
    ("rounded head", describe("layer", "rope", "kind", value=1e308), "kind"),
    ("rounded head", describe("layer", "rope", "kind", value="x"), "rope_type"),
    ("rounded head", describe("layer", "intermediate_size", value=-1), "intermediate_size"),
    ("rounded head", describe("layer", "window_rope", value={}), "window_rope"),
    ("rounded head", describe("layer", "extra", value=1), "extra"),
    ("rounded head", describe("taps", value=[2, 1]), "taps"),
    ("rounded head", describe("version", value=2), "version 2"),
    ("gptq", change_head(Q + "qweight", lambda t: t.to(torch.uint8)), "qweight"),
    ("gptq", change_head(Q + "qweight", lambda t: t.flatten()), "qweight"),
    ("gptq", change_head(Q + "qzeros", lambda t: t.flatten()), "qzeros"),
    ("gptq", change_head(Q + "qzeros", lambda t: t.float()), "qzeros"),
    ("gptq", change_head(Q + "scales", lambda t: t.int()), "scales"),
    ("gptq", change_head(Q + "g_idx", lambda t: t.float()), "g_idx"),
    ("awq", change_head(Q + "qweight", lambda t: t.to(torch.int16)), "qweight"),
    ("awq", change_head(Q + "qzeros", lambda t: t.float()), "qzeros"),
    ("compressed-tensors", change_head(Q + "weight_packed", lambda t: t.to(torch.uint8)), "weight_packed"),
    ("compressed-tensors", change_head(Q + "weight_shape", lambda t: t.float()), "weight_shape"),
    ("compressed-tensors", change_head(Q + "weight_zero_point", lambda t: t.float()), "weight_zero_point"),
    ("compressed-tensors", change_head(Q + "weight_zero_point", lambda t: t + 90), "weight_zero_point"),
])  # fmt: skip
def test_codes_are_checked_like_floats(form, damage, word, tmp_path):
    """IndexError, KeyError and TypeError; a head that drafts nonsense, or a model that writes wrong text, as its codes
    were cast to another dtype."""
    damage(made(form, tmp_path))
    refused(form, tmp_path, word)


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [("gptq", "quant_method", value) for value in (["gptq"], {"a": 1}, 3)]
    + [(kind, "group_size", value) for kind in ("gptq", "awq") for value in (31, -32, 64, "32", 0, True, -1)]
    + [("compressed-tensors", "config_groups", value) for value in (3, [1], {"a": 1}, {"a": {"weights": []}})]
    + [("compressed-tensors", "config_groups", {"a": {"weights": {"num_bits": 4, "group_size": 31}}})],
)
def test_quantization_configs_agree_with_the_tensors(kind, key, value, tmp_path):
    """TypeError, or a group size that the config says and nobody reads."""
    edited(made(kind, tmp_path) / "m" / "config.json", lambda raw: raw["quantization_config"].update({key: value}))
    refused(kind, tmp_path, "weight_scale" if "31" in str(value) and key == "config_groups" else "config")


ROTATIONS, PART = {"full_attention": {}, "sliding_attention": 3}, {"partial_rotary_factor": 0.25}


@pytest.mark.parametrize(("family", "change", "words"), [
    ("llama", {"head_dim": 2**31}, "head_dim is 2147483648; allowed"), ("qwen3_5", {"head_dim": None}, "q_proj.weight"),
    ("mixtral", {"num_local_experts": 2**31}, "num_local_experts = 2147483648"),
    ("gemma4", {"rope_parameters": ROTATIONS}, "sliding_attention is 3"),
    ("gemma4", {"head_dim": 4, "rope_parameters": ROTATIONS | {"sliding_attention": PART}}, "rotates 1 of a head's 4"),
])  # fmt: skip
def test_a_wrong_size_or_setting_is_refused_at_once(tiny_checkpoint, tmp_path, family, change, words):
    """Minutes and gigabytes before a refusal, and tracebacks: of a tensor that was cut into heads, and of a rotation."""
    shutil.copytree(tiny_checkpoint(family), tmp_path / "m")
    edited(tmp_path / "m" / "config.json", lambda raw: raw.update(change))
    one_line(lambda: logits(tmp_path / "m"), words)


DEEP = "[" * 100_000 + "]" * 100_000
FILES = {"tree": "t.json", "questions": "q.jsonl", "texts": "t.jsonl", "training": "t.jsonl"}
FILES |= {"bench": "b.jsonl", "body": "b.json", "generation": "generation_config.json"}


@pytest.mark.parametrize("form", FILES)
@pytest.mark.parametrize("text", [DEEP, '{"a": 1, "a": 2}', "9" * 4300, "[" * 102 + "]" * 102, '{"a": 1e999}'])
def test_every_reader_is_strict(form, text, tmp_path):
    """RecursionError, a second value for a key that nobody sees, or a message that does not say which file is wrong."""
    name = FILES[form]
    (made(form, tmp_path) / name).write_text(text + "\n")
    refused(form, tmp_path, "the body" if form == "body" else name, "not valid JSON" if "1" in text else "")


@pytest.mark.parametrize(
    "change", [{"rows": 3}, {"rows": [{}]}, {"arms": [3]}, {"arms": [{"arm": "a"}]}, {"model": None}]
)
def test_records_of_another_structure_are_refused(change, tmp_path):
    """KeyError and TypeError when a record is read again."""
    (tmp_path / "b.jsonl").write_text(lines(RUN, SUMMARY | change))
    refused("bench", tmp_path, "b.jsonl", "the summary")
    (tmp_path / "b.jsonl").write_text(lines(RUN | {"turn": []}, SUMMARY))
    refused("bench", tmp_path, "b.jsonl", "a run.turn")


def test_flags_of_a_tokenizer_are_true_or_false(json_dir, tmp_path):  # noqa: F811
    """`"add_eos_token": "false"` that counts as true."""
    shutil.copytree(json_dir, tmp_path / "t")
    for key in ("add_eos_token", "add_bos_token", "legacy"):
        edited(tmp_path / "t" / "tokenizer_config.json", lambda raw, key=key: raw.update({key: "false"}))
        one_line(lambda: load_tokenizer(tmp_path / "t"), f"{key} is 'false', expected true or false")
        edited(tmp_path / "t" / "tokenizer_config.json", lambda raw, key=key: raw.pop(key))
    edited(tmp_path / "t" / "tokenizer.json", lambda raw: raw["model"].update(vocab={}, merges=[]))
    one_line(lambda: load_tokenizer(tmp_path / "t"), "vocabulary is empty")


def test_refusals_are_short(tmp_path):
    """A refusal of 30 to 100 kB on one line."""
    long = "y" * 50_000
    changes = [{"architectures": [long]}, {"hidden_act": long}, {"rope_scaling": {"rope_type": long}}]
    changes += [{long: 1, "a": 1}]
    changes += [{"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "layer_types": [long]}]
    good = (made("hf", tmp_path) / "config.json").read_text()
    for change in changes:
        text = json.dumps(json.loads(good) | change).replace('"a": 1', f'"{long}": 2')
        (tmp_path / "config.json").write_text(text)
        refused("hf", tmp_path, "config.json")


def test_checksums_tell_what_no_reader_can(tmp_path):
    """A flipped bit of a weight: the file reads well, and the model writes another text."""
    file = made("hf", tmp_path) / M
    write_sums(tmp_path)
    check_sha256(tmp_path, "stored")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    check_sha256(tmp_path, digest.upper())
    load(tmp_path, sha256="stored")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    logits(tmp_path)
    for wanted in ("stored", digest):
        one_line(lambda wanted=wanted: check_sha256(tmp_path, wanted), f"{M}: its sha256 is")
    one_line(lambda: load(tmp_path, sha256=digest), "its sha256 is")
    one_line(lambda: check_sha256(tmp_path, "abc"), "neither `stored` nor")
    (tmp_path / SUMS).write_text(f"{digest}  config.json\n")
    one_line(lambda: check_sha256(tmp_path, "stored"), "model.safetensors is not in it")
    (tmp_path / SUMS).write_text(f"{digest}  ../x\n")
    one_line(lambda: check_sha256(tmp_path, "stored"), "line 1")


@pytest.mark.parametrize("form", ["pickle", "meta"])
def test_checksums_inside_pickles_are_compared(form, tmp_path):
    """A damaged .bin or .pth file whose model writes another text."""
    file = made(form, tmp_path) / FORMATS[form].files[-1]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    refused(form, tmp_path, "checksum", "Damaged")
