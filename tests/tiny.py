"""Tiny random targets, heads, drafters and a tokenizer, shared by the tests of decoding."""

from __future__ import annotations

import codecs
import importlib.util
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tree as trees
from decoding.drafter import Draft, Drafter, DraftInput
from drafters.trees import DraftRule
from eagle_draft import EagleDrafter, EagleHead
from engine.engine import Engine, EngineConfig
from families.config import ModelConfig, RopeConfig
from kernels import INTERPRETED, cpu
from kernels.formats import Blocks
from layers.build import build_transformer
from model import Transformer
from support.texts import read_source, stdlib_files
from weights.checkpoint import Checkpoint
from weights.gguf_types import BY_NAME
from weights.heads import EagleConfig
from weights.quantized import QuantLinear

V, CTX = 97, 160
needs_kernels = pytest.mark.skipif(bool(cpu.problem()), reason="the CPU kernels do not run here")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by tests/test_interpreter.py or _steps.py")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
# Five children at the root, uneven below: a small tree of the Medusa lists' kind.
MEDUSA = trees.counted_tree("-:5 0:3 1:2 2:1 3:1 00:2 01:1 10:1 000:1")
TREES = {
    "paper25": trees.PAPER25,
    "chain4": trees.chain(4),
    "medusa": MEDUSA,
    "dynamic": trees.DynamicTree(16, 4, 4),
    "root": trees.StaticTree(()),
}
PROMPT = [1, 5, 9, 22, 7, 3] * 3
DRAFT_VOCAB = torch.tensor(sorted({(i * 37 + 11) % V for i in range(60)}))  # 60 of 97 ids, unevenly spaced


def skip_without_kernels(mode: str = "cpu") -> None:
    """Skip a test of the CPU kernels where they do not run. Other modes run everywhere."""
    if mode == "cpu" and cpu.problem():
        pytest.skip(f"the CPU kernels do not run here: {cpu.problem()}")


def one_line(call, *words: str, kind: type[Exception] = ValueError) -> str:
    """Runs `call`, which must raise an error of this kind whose one short line holds all words. Returns the line."""
    with pytest.raises(kind) as error:
        call()
    text = str(error.value)
    assert "\n" not in text and len(text) < 500
    assert all(word in text for word in words), text
    return text


def geometry(layers: int = 2, vocab: int = V, **changes) -> ModelConfig:
    shape = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    return ModelConfig(
        "llama", num_hidden_layers=layers, vocab_size=vocab, max_position_embeddings=CTX, **(shape | changes)
    )


def randomise(module: nn.Module, seed: int, std: float = 0.25) -> None:
    """Random weights. Norms and biases are random too, so that none is inert."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(noise * std if parameter.dim() > 1 else 1 + 0.1 * noise)
    module.requires_grad_(False).eval()


def tiny_model(dtype: torch.dtype = torch.float64, seed: int = 0, **changes) -> Transformer:
    model = build_transformer(geometry(**changes)).to(dtype)
    randomise(model, seed)
    model.rotary.build("cpu", CTX)
    return model


def tiny_head(
    target: Transformer, version: int = 1, vocab: Tensor | None = None, seed: int = 1, cls=EagleHead, **changes
) -> EagleHead:
    """`vocab`: absolute target ids that the head can draft. `changes`: fields of EagleConfig, or of the layer's
    geometry."""
    flags = {k: changes.pop(k) for k in list(changes) if k in EagleConfig.__dataclass_fields__}
    drafted = target.config.vocab_size if vocab is None or version == 1 else len(vocab)
    layer = geometry(1, drafted, rope=RopeConfig(theta=500.0), **changes)
    defaults = dict(taps=(0, 1, 2) if version == 3 else (), fc_bias=version == 1, has_lm_head=version == 3)
    config = EagleConfig(version, layer, target.config.hidden_size, **(defaults | flags))
    head = cls(config, target, draft_vocab=vocab).to(target.dtype)
    randomise(head, seed)
    head.rotary.build("cpu", CTX)
    head.finish()
    return head


def heads(target: Transformer) -> dict[str, EagleHead]:
    """The four kinds that drafting must tell apart."""
    return {
        "eagle1": tiny_head(target),
        "eagle1-trimmed": tiny_head(target, vocab=DRAFT_VOCAB),
        "eagle3": tiny_head(target, 3, DRAFT_VOCAB),
        "eagle3-full": tiny_head(target, 3),
    }


def tables(tree, batch_size: int = 1):
    """The tables of one tree for every sequence, or of a list with one tree for each. Dynamic trees stay as they are."""
    if isinstance(tree, trees.DynamicTree):
        return tree
    return trees.tree_tables(tree if isinstance(tree, list) else [tree] * batch_size)


def eagle_drafter(head: EagleHead, tree, batch_size: int = 1, **options) -> EagleDrafter:
    """`tree`: as in `tables`."""
    built = tables(tree, batch_size)
    return EagleDrafter(head, built, batch_size, CTX + built.N + 1, DraftRule(**options))


def eagle_engine(
    head: EagleHead, tree, batch_size: int = 1, tokenizer=None, compile=False, lag=None, **options
) -> Engine:
    drafter = eagle_drafter(head, tree, batch_size, **options)
    return Engine(head.target, tokenizer, drafter, EngineConfig(batch_size=batch_size, compile=compile, lag=lag))


def watch(drafter: Drafter, method: str, see) -> None:
    """Have see(inputs, output) called after every call of a drafter's method."""
    real = getattr(drafter, method)

    def watched(inputs: DraftInput):
        out = real(inputs)
        see(inputs, out)
        return out

    setattr(drafter, method, watched)


class ScriptedDrafter(Drafter):
    """Drafts the known continuation. `truth[b][p]` is the token at position p.

    Node i at depth d gets `truth[n + d] + shift + rank`. With shift 0 rank 0 is right (an oracle), with shift 1
    everything is wrong (hostile).

    It has nothing but `draft`, and what rows need that change places.
    """

    def __init__(self, tree, truth: list[list[int]], shift: int = 0, vocab: int = V):
        self.tree = tables(tree, len(truth))
        super().__init__(self.tree.N, self.tree.D, feature_size=32)
        self.shift, self.vocab = shift, vocab
        self.truth = torch.tensor([row + [0] * (CTX + 40 - len(row)) for row in truth])

    def first(self, rows: int):
        view = super().first(rows)
        view.truth = self.truth[:rows]
        return view

    def swap(self, a: int, b: int, length: int) -> None:
        self.truth[[a, b]] = self.truth[[b, a]]

    def shape(self, inputs: DraftInput):
        t = self.tree
        return t.parent, t.depth, t.ancestors, t.valid, t.rank

    def draft(self, inputs: DraftInput) -> Draft:
        parent, depth, ancestors, valid, rank = self.shape(inputs)
        right = self.truth.gather(1, (inputs.n[:, None] + depth).clamp(max=self.truth.shape[1] - 1))
        tokens = (right + self.shift + rank) % self.vocab
        tokens[:, 0] = inputs.root
        return Draft(tokens, parent, depth, ancestors, valid, torch.zeros(tokens.shape))


class Clock(TorchDispatchMode):
    """Stands in for the module `time`, so that a test of times finds the same ones on every machine, also a busy one.

    Within `with clock:` every operator of torch takes a microsecond. A test adds to `now` what else shall take time.
    """

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.now += 1e-6
        return function(*args, **(kwargs or {}))

    def perf_counter(self) -> float:
        return self.now


def fake_clock(monkeypatch) -> Clock:
    """A clock that the engine and the gauge look at."""
    clock = Clock()
    for module in ("engine.engine", "engine.stepping", "engine.batch", "cli.steps"):
        monkeypatch.setattr(f"{module}.time", clock)
    return clock


class PieceTokenizer:
    """Maps token ids to bytes. It decodes incrementally, so characters may span tokens."""

    def __init__(self, pieces: list[bytes], eos_ids: tuple[int, ...] = ()):
        self.pieces, self.eos_ids, self.special_ids = pieces, eos_ids, frozenset(eos_ids)

    def stream(self, continuation: bool = False, shown=()):
        return PieceStream(self.pieces)

    def decode(self, ids, skip_special: bool = True, continuation: bool = False) -> str:
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", "replace")


class PieceStream:
    def __init__(self, pieces: list[bytes]):
        self.pieces, self.decoder = pieces, codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids) -> str:
        return "".join(self.decoder.decode(self.pieces[i]) for i in ids)

    def flush(self) -> str:
        return self.decoder.decode(b"", True)


class Terminal(io.StringIO):
    """Stands for a terminal that something is written to."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def nvfp4_blocks(n: int, k: int, seed: int) -> Blocks:
    """Random codes below scales of 8 bits, among them the least and the largest ones, with another scale for each row."""
    g = torch.Generator().manual_seed(seed)
    small = torch.randint(0, 0x7F, (n, k // 16), dtype=torch.uint8, generator=g)
    return Blocks(
        torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=g), torch.rand(n, 1, generator=g), None, small
    )


def random_blocks(kind: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Random blocks of a GGUF type [rows, bytes of a row] uint8. Their fp16 scales are small, and of both signs."""
    _, block, size, form, _ = BY_NAME[kind]
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    if kind == "MXFP4":  # a scale is the exponent of a power of two
        raw[..., 0] = random.integers(115, 124, raw.shape[:2])
        return raw.reshape(rows, -1)
    first = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}.get(kind, 0)
    for at in (first, first + 2)[: 1 + form.minima]:
        scales = random.normal(0, 0.01, raw.shape[:2]).astype(np.float16)
        raw[..., at : at + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def node_paths(draft: Draft, b: int, twins: bool = False) -> dict[int, tuple[int, ...]]:
    """The token path of every valid node but the root; checks parents, depths, what nodes see, and that paths differ."""
    tokens, parent, valid = draft.tokens[b].tolist(), draft.parent[b].tolist(), draft.valid[b].tolist()
    paths, seen = {0: ()}, {0: {0}}
    for i in range(1, len(tokens)):
        if not valid[i]:
            assert draft.ancestors[b, i].nonzero().flatten().tolist() == [i] and int(draft.depth[b, i]) == 0
            continue
        assert parent[i] < i and valid[parent[i]]
        paths[i], seen[i] = (*paths[parent[i]], tokens[i]), seen[parent[i]] | {i}
        assert int(draft.depth[b, i]) == len(paths[i])
        assert set(draft.ancestors[b, i].nonzero().flatten().tolist()) == seen[i]
    assert twins or len(set(paths.values())) == len(paths) == sum(valid)
    return {i: path for i, path in paths.items() if i}


def held(*modules: nn.Module) -> int:
    """Bytes of everything that modules keep alive, each memory once: parameters, buffers and packings."""
    found = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    for child in (child for module in modules for child in module.modules()):
        if isinstance(child, QuantLinear) and child.packed is not None:
            found += [t for t in vars(child.packed).values() if isinstance(t, torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}.values())


def held_out_prompts(tokenizer, count: int, length: int) -> list[list[int]]:
    """`count` windows of `length` tokens, spread evenly over the modules that the demo model was not trained on."""
    ids = tokenizer.encode("\n".join(read_source(path) for path in stdlib_files()[1]), add_bos=False)
    stride = (len(ids) - length) // count
    return [tokenizer.encode("") + ids[i * stride : i * stride + length] for i in range(count)]


def definitions(count: int) -> dict:
    """A schema of objects that each hold the next one."""
    names = [f"d{i}" for i in range(count)]
    defs = {a: {"type": "object", "properties": {"a": {"$ref": f"#/$defs/{b}"}}, "required": ["a"]}
            for a, b in zip(names, names[1:], strict=False)}  # fmt: skip
    return {"$ref": "#/$defs/d0", "$defs": defs | {names[-1]: {"type": "object"}}}


def rules(count: int) -> str:
    """A grammar of rules that each name the next one."""
    return "start: r0\n" + "".join(f'r{i}: "A" r{i + 1}\n' for i in range(count)) + f'r{count}: "B"\n'


def questions_file(folder: Path, count: int) -> str:
    """Questions for a chat, in MT-bench layout."""
    file = folder / "question.jsonl"
    file.write_text("".join(json.dumps({"turns": [f"What is {n} times {n}, and why?"]}) + "\n" for n in range(count)))
    return str(file)


def load_config(directory: str | Path) -> ModelConfig:
    """The geometry of the model in a directory of any format."""
    return Checkpoint.open(directory).config


def load_model(
    directory: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Transformer:
    """The model in a directory of any format. The arguments are those of `Checkpoint.load`."""
    return Checkpoint.open(directory).load(device, dtype)
