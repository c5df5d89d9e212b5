"""What a rank of tensor parallelism reads of a model's files: its own part of the bytes, whatever the format is."""

import math
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_checkpoint import write_meta
from test_gguf import metadata_of, tensors_of, write
from test_quantize import published
from test_ranks import config_of, model_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from layers.build import build_transformer
from model import Transformer
from weights.checkpoint import Checkpoint
from weights.gguf import GGUFFile
from weights.hf import save_hf
from weights.quantized import QuantLinear
from weights.shards import Shard

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
FORMATS = "safetensors bin meta gguf-F16 gguf-Q4_0 gguf-Q4_1 gguf-Q5_0 gptq awq ct int8".split()


@pytest.fixture
def folder(tmp_path, tiny_checkpoint):
    """folder(kind) is a small LLaMA in one of FORMATS."""

    def make(kind: str) -> Path:
        path = tmp_path / kind
        if kind == "meta":
            write_meta(load_file(tiny_checkpoint("llama") / "model.safetensors"), path, 2, 1)
        elif kind.startswith("gguf"):
            save_hf(model_of(), tmp_path / "whole")
            source = Checkpoint.open(tmp_path / "whole")
            data = metadata_of(source.config), tensors_of(source)
            path = write(tmp_path / "m.gguf", "llama", *data, kind.partition("-")[2])
        elif kind in ("gptq", "awq", "ct", "int8"):
            how = {"group": -1, "bits": 8} if kind == "int8" else {"group": 32}
            published(path, kind, config_of(dtype="float16"), **how)
        else:
            save_hf(model_of(), path)
        if kind == "bin":
            torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
            (path / "model.safetensors").unlink()
        return path

    return make


class Reads(TorchDispatchMode):
    """Counts the bytes of mapped files that operators read. A view reads nothing, and a view that is read twice counts
    once. GGUF's bytes are counted where they leave the map (`rows`)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        self.seen: dict[object, int] = {}
        self.mapped: dict[tuple[int, int], bool] = {}  # by the place and size of a memory
        usual = GGUFFile._rows

        def rows(file, *arguments):
            found = usual(file, *arguments)
            self.seen[len(self.seen)] = found.nbytes
            return found

        monkeypatch.setattr(GGUFFile, "_rows", rows)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        memories = {t.untyped_storage().data_ptr() for t in tree_leaves(out) if isinstance(t, torch.Tensor)}
        for tensor in (t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)):
            storage = tensor.untyped_storage()
            if tensor.device.type == "cpu" and tensor.numel() and storage.data_ptr() not in memories:
                place = storage.data_ptr(), storage.nbytes()
                if place not in self.mapped:
                    self.mapped[place] = mapped(tensor.data_ptr())
                if self.mapped[place]:
                    self.seen[tensor.data_ptr(), tensor.nbytes] = tensor.nbytes
        return out


def mapped(address: int) -> bool:
    """Whether an address of this process lies in a file of weights."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith((".safetensors", ".bin", ".pth")):
            first, end = (int(number, 16) for number in line.split()[0].split("-"))
            if first <= address < end:
                return True
    return False


def tensors(part: Transformer) -> dict[str, torch.Tensor]:
    """All tensors of a part, with quantized weights as floats."""
    packed = ("qweight", "scales", "zeros", "mins")
    found = {name: t for name, t in part.state_dict().items() if not name.endswith(packed)}
    linears = {name: child for name, child in part.named_modules() if isinstance(child, QuantLinear)}
    return found | {f"{name}.weight": child.dequantize() for name, child in linears.items()}


@pytest.mark.parametrize("kind", FORMATS)
def test_a_rank_reads_its_part_of_a_file(folder, kind, monkeypatch, tmp_path):
    """A rank reads little more than its share of the bytes, and its tensors are those parts of the whole ones."""
    path = folder(kind)
    whole = Checkpoint.open(path).load()
    count = {}
    for shard in (None, Shard(1, 2), Shard(1, 2, True)):
        checkpoint = Checkpoint.open(path)
        checkpoint = checkpoint.sharded(shard) if shard else checkpoint
        with Reads(monkeypatch) as reads:
            checkpoint.load()
        count[shard] = sum(reads.seen.values())
    embedding = math.prod(whole.embed_tokens.weight.shape) * whole.embed_tokens.weight.itemsize
    for shard, size in count.items():
        table = embedding / 2 if shard and shard.embedding else embedding
        want = (count[None] - embedding) / (2 if shard else 1) + table
        if not kind.startswith("gguf-Q"):
            assert size == pytest.approx(want, rel=0.05)  # norms, and the group numbers of GPTQ
    if kind.startswith("gguf-Q"):
        assert count[Shard(1, 2, True)] <= count[None] * 0.51
    same = build_transformer(whole.config)
    for name, tensor in tensors(Checkpoint.open(path).load(dtype=torch.float32)).items():
        same.get_parameter(name).data = tensor
    save_hf(same, tmp_path / "floats")
    for shard in (Shard(0, 2, True), Shard(1, 2, True)):
        expected = tensors(Checkpoint.open(tmp_path / "floats").sharded(shard).load())
        found = tensors(Checkpoint.open(path).sharded(shard).load(dtype=torch.float32))
        assert found.keys() == expected.keys() and len(found) > 10
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)


def test_ranks_share_the_checking_of_a_pickle(folder, monkeypatch):
    """Every record is compared with its checksum by exactly one rank, and a damaged one is refused."""
    path, read = folder("bin"), []
    usual = zipfile.ZipExtFile.read

    def counting(file, size=-1):
        read.append(len(found := usual(file, size)))
        return found

    monkeypatch.setattr(zipfile.ZipExtFile, "read", counting)
    sizes = []
    for rank in range(2):
        read.clear()
        assert Checkpoint.open(path).sharded(Shard(rank, 2)).entries
        sizes.append(sum(read))
    file = path / "pytorch_model.bin"
    with zipfile.ZipFile(file) as archive:
        assert sum(sizes) == sum(record.file_size for record in archive.infolist())
        largest = max(archive.infolist(), key=lambda record: record.file_size)
    assert max(sizes) < 0.7 * sum(sizes)
    data = bytearray(file.read_bytes())
    data[largest.header_offset + 1000] ^= 1
    file.write_bytes(data)
    problems = []
    for rank in range(2):
        try:
            assert Checkpoint.open(path).sharded(Shard(rank, 2)).entries
        except ValueError as error:
            problems.append(str(error))
    assert len(problems) == 1 and "checksum" in problems[0]
