"""How GPUs of several ranks exchange: which way is chosen, and what the one over shared memory computes.

No GPU is needed: threads are the ranks, and ordinary memory stands for the memory that GPUs share.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from test_ranks import config_of
from torch import Tensor

from drafting import tree_shape
from model import Transformer
from options import LoadOptions
from ranks import link_ranks_
from runtime.links import NCCL, ONE_SHOT, SharedMemory, share_memory
from weights import shards
from weights.shards import Exchange, Shard, connect_, exchanged


class Meeting:
    """The shared memory of ranks that are threads. `memory_of(shared)` is what torch's `rendezvous` returns."""

    def __init__(self, ranks: int, size: int):
        self.buffers = [torch.zeros(size, dtype=torch.uint8) for _ in range(ranks)]
        self.gate = threading.Barrier(ranks, timeout=20)
        self.waits = [0] * ranks

    def memory_of(self, shared: Tensor, group: object = None) -> SimpleNamespace:
        rank = next(i for i, buffer in enumerate(self.buffers) if buffer.data_ptr() == shared.data_ptr())

        def barrier() -> None:
            self.waits[rank] += 1
            self.gate.wait()

        def get_buffer(rank: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
            return self.buffers[rank][: shape.numel() * dtype.itemsize].view(dtype).view(shape)

        return SimpleNamespace(rank=rank, barrier=barrier, get_buffer=get_buffer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_one_shot_exchanges_have_the_bits_of_an_ordered_sum(ranks, dtype, monkeypatch):
    """Sums that each rank adds in an order of its own or rounds at every addition; a part that is overwritten before all
    have read it; a rank that does not wait."""
    meeting = Meeting(ranks, 4 * 5 * 8)
    monkeypatch.setattr("torch.distributed._symmetric_memory.rendezvous", meeting.memory_of)
    draw = torch.Generator().manual_seed(ranks)
    rounds = [torch.randn(ranks, 5, 8, generator=draw).to(dtype) for _ in range(20)]

    def run(rank: int) -> list[tuple[Tensor, Tensor]]:
        shared = meeting.buffers[rank]
        return [(shards.rank_sum(x[rank], ranks, shared), shards.rank_concat(x[rank], ranks, shared)) for x in rounds]

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(run, range(ranks)))
    for parts, *results in zip(rounds, *found, strict=True):
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        for added, joined in results:
            assert torch.equal(added.view(torch.uint8), total.to(dtype).view(torch.uint8))
            assert torch.equal(joined, torch.cat(parts.unbind(), -1))
    assert meeting.waits == [2 * 2 * 20] * ranks


def test_what_does_not_fit_into_shared_memory_is_gathered(monkeypatch):
    """A prompt that is wider than a step, written past the end of the shared memory."""
    seen = []
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=SimpleNamespace(group_name="all")))
    gather = SimpleNamespace(
        all_gather_into_tensor=lambda x, ranks, name: seen.append(name) or x.repeat(ranks), wait_tensor=lambda x: x
    )
    monkeypatch.setattr(shards.torch, "ops", SimpleNamespace(_c10d_functional=gather))
    x = torch.ones(4, 8)
    for shared in (None, torch.empty(x.nbytes - 1, dtype=torch.uint8)):
        with shards._gathered(x, 3, shared) as parts:
            assert len(parts) == 3 and all(torch.equal(part, x) for part in parts)
    assert seen == ["all"] * 2


class Offer:
    """A stand-in for what torch offers. problems: what goes wrong in reaching, allocating and meeting."""

    def __init__(self, reach: str = "", allocate: str = "", meet: str = ""):
        self.problems = {"reach": reach, "allocate": allocate, "meet": meet}
        self.tried: list[str] = []

    def unreachable(self, ranks: int) -> str:
        self.tried.append("reach")
        return self.problems["reach"]

    def attempt(self, what: str) -> None:
        self.tried.append(what)
        if self.problems[what]:
            raise RuntimeError(self.problems[what])

    def allocate(self, size: int) -> Tensor:
        self.attempt("allocate")
        return torch.empty(size, dtype=torch.uint8)

    def meet(self, memory: Tensor) -> None:
        self.attempt("meet")


@pytest.mark.parametrize("stage", ["", "reach", "allocate", "meet"])
def test_all_ranks_share_memory_or_none_does(stage):
    """A rank that waits for one which has no shared memory, or exchanges in another way than the rest."""
    offers = [Offer(), Offer(**{stage: "no way"} if stage else {})]
    gate, said = threading.Barrier(2, timeout=20), [{}, {}]

    def choose(rank: int) -> tuple[Tensor | None, str]:
        def say(problem: str) -> list[str]:
            turn = len(said[rank])
            said[rank][turn] = problem
            gate.wait()
            return [words[turn] for words in said]

        return share_memory(2, 64, say, offers[rank])

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(choose, range(2)))
    assert [memory is None for memory, _ in found] == [bool(stage)] * 2
    assert all(("no way" in why) == bool(stage) for _, why in found)
    tried = ["reach", "allocate", "meet"]
    assert offers[0].tried == offers[1].tried == (tried[: tried.index(stage) + 1] if stage else tried)


def test_only_gpus_that_reach_each_other_are_reachable(monkeypatch):
    """Two cards without peer-to-peer access, whose first exchange would fail or hang."""
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: {one, other} != {1, 2})
    assert SharedMemory().unreachable(2) == ""
    assert SharedMemory().unreachable(3) == "GPU 1 cannot read the memory of GPU 2"


@pytest.mark.parametrize("problem", ["", "GPU 0 cannot read the memory of GPU 1"])
def test_the_chosen_way_is_said(problem, monkeypatch):
    """Exchanges of a part that do not use the memory which was shared for them."""
    config = config_of()
    with torch.device("meta"):
        part = Transformer(Shard(0, 2).local(config))
    connect_(part, Shard(0, 2))
    checkpoint = SimpleNamespace(whole=config, shard=Shard(0, 2))
    options = LoadOptions("x", device="cuda", dtype="float16", tree="chain:3", drafter="ngram")
    ranks = SimpleNamespace(size=2, gather=lambda value: [value, value])
    told = link_ranks_(part, checkpoint, options, ranks, Offer(reach=problem))
    memories = [module.shared for module in part.modules() if isinstance(module, Exchange)]
    assert len(memories) == 5 == told.count
    sizes = [64 * 2] * 4 + [48 * 2]
    assert exchanged(config, Shard(0, 2), 1, 2) == sizes
    assert told.by == (NCCL if problem else ONE_SHOT)
    assert str(told).startswith("5 exchanges per token by") and problem in str(told)
    rows = max(64, tree_shape(options)[0])
    for memory in memories:
        assert memory is None if problem else max(rows * 128, rows * 96) <= memory.nbytes < rows * 128 + 256
