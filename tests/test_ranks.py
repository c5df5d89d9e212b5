"""Tensor parallelism: parts of a model in several processes decode what the whole model decodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import randomise, tiny_head

from model import Transformer
from model_config import ModelConfig
from weights.heads import save_eagle
from weights.hf import config_to_hf, save_hf, write_directory
from weights.medusa import save_medusa
from weights.quantized import QuantSpec
from weights.rounding import quantize_
from weights.stored import spec_to_json

ROOT = Path(__file__).resolve().parent.parent
V = 96
SHAPE = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=32,
    vocab_size=V, max_position_embeddings=160,
)  # fmt: skip
FAMILIES = {
    "llama": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "qk_norm": True},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}
DRAFTERS = [
    {},
    {"eagle": "eagle1"},
    {"eagle": "eagle1", "draft_vocab": 40, "tree": "chain:3"},
    {"eagle": "eagle3", "tree": "dynamic:12,3,3"},
    {"draft_checkpoint": "draft", "tree": "chain:3"},
    {"medusa": "medusa", "tree": "chain:2"},
    {"drafter": "ngram", "tree": "chain:4"},
    {"drafter": "lookahead"},
]


def config_of(**changes) -> ModelConfig:
    return ModelConfig(**{"model_type": "llama", **SHAPE, **changes})


def model_of(seed: int = 0, **changes) -> Transformer:
    model = Transformer(config_of(**changes))
    randomise(model, seed, 0.15)
    model.rotary.build("cpu")
    return model


def cases() -> list[dict]:
    """Every family plainly; LLaMA with every drafter, sampled as a batch; quantized models with a head."""
    found = [{"checkpoint": name, "temperature": T} for name in FAMILIES for T in (0.0, 1.0)]
    found += [{"checkpoint": "llama", "temperature": 1.0, "batch_size": 3, **drafter} for drafter in DRAFTERS]
    found += [{"checkpoint": name, **DRAFTERS[3]} for name in ("int4", "int8", "mixtral-int4")]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Checkpoints of every kind, heads, and the list of cases."""
    path = tmp_path_factory.mktemp("ranks")
    models = {name: model_of(**changes) for name, changes in FAMILIES.items()}
    for name, model in models.items():
        save_hf(model, path / name)
    save_hf(model_of(7, num_hidden_layers=1), path / "draft")
    for name, family, mode in (
        ("int4", "llama", "int4"),
        ("int8", "qwen3", "int8"),
        ("mixtral-int4", "mixtral", "int4"),
    ):
        spec = QuantSpec(mode, group_size=32)
        model = model_of(**FAMILIES[family])
        quantize_(model, spec)
        config = config_to_hf(replace(model.config, dtype="float16")) | {"eaglet_quant": spec_to_json(spec)}
        write_directory(path / name, model.state_dict(), config)
    for version in (1, 3):
        trimmed = torch.arange(0, V, 2) if version == 3 else None
        head = tiny_head(models["llama"], version, trimmed, hidden_size=64, head_dim=16)
        save_eagle(replace(head.config, target_vocab_size=V), head.state_dict(), path / f"eagle{version}")
    shapes = {"weight": (64, 64), "bias": (64,)}
    tensors = {
        f"{i}.0.linear.{kind}": torch.full(shape, 0.01 * (i + 1)) for i in (0, 1) for kind, shape in shapes.items()
    }
    save_medusa(tensors, path / "medusa")
    (path / "cases.json").write_text(json.dumps(cases()))
    return path


@pytest.mark.parametrize("size", [2, 4])
def test_parts_decode_what_the_whole_model_decodes(folder, size):
    """A head, group, expert or row of the vocabulary in the wrong part; a bias added twice; a sum that is left out."""
    processes = []
    for rank in range(size):
        words = [sys.executable, ROOT / "tests/ranks_cases.py", str(rank), str(size), f"file://{folder}/{size}", folder]
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
        processes.append(
            subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        )
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * size, outputs[0][1][-2000:]
    for out, _ in outputs:
        lines = [json.loads(line) for line in out.splitlines()]
        assert [line["case"] for line in lines] == cases()
        for line in lines:
            whole, part = line["texts"]
            assert whole == part, line["case"]  # the texts, and tau: the drafts are the same, too
            assert line["cache"][1] * size == line["cache"][0]
