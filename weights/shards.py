"""The part of a model that one of several processes holds (tensor parallelism).

Attention is split by heads, the MLP and every expert by intermediate columns, and the LM head by vocabulary. The output
projections `o` and `down` are then split by their inputs, so that each rank has one summand of their result. Norms and
routers are in every rank, and so is the embedding, for looking up its rows costs memory only. Where that memory is
missing the embedding is split by vocabulary, too, and its rows are one more exchange. Any format is split the same way:
by the names of its tensors and the axes that their kind gives to outputs and inputs.

The processes (ranks) exchange sums and concatenations, each in the order of the ranks. A fixed order makes the bits of a
row independent of the number of rows and the same in every rank. Each exchange is one operator, so that a trace of a step
shows and counts it. `shared` is memory of this GPU that the other GPUs can read (`engine.links`). What fits into it is
written there and read by everyone at once, in the order in which NCCL's or gloo's result is added, so both give the same
bits.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import kernels
from families.config import ModelConfig
from model import Transformer
from support.errors import UsageError
from weights.files import Entries, Entry, Spans

# The modules that are split by outputs and by inputs, under Hugging Face's names and under ours.
BY_OUTPUTS = set("q_proj k_proj v_proj gate_proj up_proj w1 w3 gate_up_proj qkv_proj qkv gate_up lm_head".split())
BY_INPUTS = set("o_proj down_proj w2 o down".split())
FIRST = set("weight weight_packed weight_scale weight_zero_point".split())  # outputs are the axis before the last
GROUP_NUMBERS = ("g_idx", "weight_g_idx")  # of the columns
PUBLISHED = set("qzeros g_idx weight_packed weight_shape".split())  # leaves that GPTQ, AWQ and compressed-tensors have


class Shard(NamedTuple):
    """Which part of a model: that of `rank` among `ranks` processes."""

    rank: int
    ranks: int
    embedding: bool = False  # whether the embedding is split, too

    def check(self, config: ModelConfig) -> None:
        """Raise UsageError, with the numbers of processes that would do, for a model that cannot be split this way."""
        if config.wide_qk_norm:
            raise UsageError(f"--tp {self.ranks}: {config.model_type} norms all heads at once, so it cannot be split.")
        if config.recurrent or config.value_norm:
            raise UsageError(f"--tp {self.ranks}: {config.model_type} cannot be split: its layers differ too much.")
        if config.expert_bias or config.shared_intermediate_size:
            raise UsageError(f"--tp {self.ranks}: experts with biases, and shared ones, cannot be split.")
        sizes = {
            "attention heads": config.num_attention_heads,
            "key and value heads": config.num_key_value_heads,
            "columns of the MLP": config.intermediate_size,
            "tokens of the vocabulary": config.vocab_size,
        }
        for what, size in sizes.items():
            if size % self.ranks:
                fits = [str(n) for n in range(2, 9) if not any(size % n for size in sizes.values())]
                advice = f"This model can be split among {' or '.join(fits)}." if fits else "It cannot be split."
                raise UsageError(f"--tp {self.ranks}: {size} {what} cannot be divided among {self.ranks}. {advice}")

    def local(self, config: ModelConfig) -> ModelConfig:
        """The geometry of this part. The vocabulary stays whole, because every rank sees all logits."""
        self.check(config)
        sizes = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
        return replace(config, **{name: vars(config)[name] // self.ranks for name in sizes})

    def entries(self, entries: Entries, config: ModelConfig, where: str) -> dict[str, Entry]:
        """This part's tensors of a checkpoint whose whole geometry is `config`. Nothing else is read.

        Reading raises UsageError where a quantization's groups or their order do not let a tensor be split.
        """
        rows = {name.rpartition(".")[0] for name in entries if name.endswith(".qweight")}
        published = any(name.rpartition(".")[2] in PUBLISHED for name in entries)

        def of(name: str, entry: Entry) -> Entry:
            base, _, leaf = name.rpartition(".")
            stored = base in rows and not published  # our own format
            lead = 1 if stored and config.num_local_experts and ".mlp." in name else 0
            if base.endswith(".experts"):  # one tensor for all experts
                base, leaf, lead = name, "weight", 1
            cut = self._cut(name, base, leaf, entry.shape, lead, stored, config, where)
            if cut is None:
                return entry
            if not isinstance(cut, Spans):
                return entry._replace(read=lambda: cut(entry.read()), part=None)
            read = partial(entry.part, cut) if entry.part else lambda: cut(entry.read())
            own = partial(self._own_groups, name, read, where) if leaf in GROUP_NUMBERS else read
            return entry._replace(shape=cut.shape(entry.shape), read=own, part=None)

        return {name: of(name, entry) for name, entry in entries.items()}

    def matrix(self, name: str, shape: tuple[int, int], group: int, config: ModelConfig, where: str) -> Spans | None:
        """This part's rows or columns of a matrix [out, in] that Hugging Face calls `name`. None: all of it.

        group: columns that share a scale. Raises UsageError where a group would be split.
        """
        groups = shape[0], shape[1] // group
        cut = self._cut(name, name.removesuffix(".weight"), "weight", groups, 0, False, config, where)
        if cut is None or cut.axis == 0:
            return cut
        return Spans(1, tuple((first * group, end * group) for first, end in cut.pieces))

    def _cut(
        self, name: str, base: str, leaf: str, shape: tuple[int, ...], lead: int, stored: bool, config: ModelConfig,
        where: str,
    ) -> Spans | Callable[[Tensor], Tensor] | None:  # fmt: skip
        """Which part of a tensor this is, or a function for one of the same shape; None where every rank has all of it.

        lead: axes before outputs and inputs. stored: whether the tensor has our layout, where scales lie as [in/G, out].
        """
        module = base.rpartition(".")[2]
        by_inputs = module in BY_INPUTS
        # a tied LM head that is stored is only compared with the embedding
        whole = name == "lm_head.weight" and config.tie_word_embeddings or module == "embed_tokens"
        if (whole and not self.embedding) or not (whole or by_inputs or module in BY_OUTPUTS):
            return None
        if leaf == "bias" and by_inputs:  # it is added once, in the first rank
            return None if self.rank == 0 else torch.zeros_like
        if leaf == "weight_shape":
            axis = 1 if by_inputs else 0
            return lambda t: t.clone().index_copy_(0, torch.tensor([axis]), t[axis : axis + 1] // self.ranks)
        axes: tuple[int | None, int | None] = (-1, -2)  # of outputs and of inputs
        if leaf in GROUP_NUMBERS:
            axes = None, -1
        elif leaf == "bias" or (stored and len(shape) - lead == 1):  # int8 has one scale for each output
            axes = -1, None
        elif leaf in FIRST or (stored and leaf == "qweight"):
            axes = -2, -1
        axis = axes[by_inputs]
        if axis is None or (by_inputs and shape[axis] == 1):  # a scale or zero of whole rows
            return None
        return self._slice(name, shape, len(shape) + axis, "" if by_inputs else module, config, where)

    def _slice(
        self, name: str, shape: tuple[int, ...], axis: int, module: str, config: ModelConfig, where: str
    ) -> Spans:
        """The part along one axis. Fused modules are split inside each of the matrices that they consist of."""
        heads = config.num_attention_heads, *[config.num_key_value_heads] * 2
        fused = {"qkv": heads, "qkv_proj": heads, "gate_up": (1, 1), "gate_up_proj": (1, 1)}
        shares = fused.get(module, (1,))
        size = shape[axis]
        lengths = [size * share // sum(shares) for share in shares]
        if any(length % self.ranks for length in lengths):
            problem = f"{size} rows, words or groups along its axis {axis}, which {self.ranks} processes cannot share"
            advice = "Use another --tp, or quantize with a smaller --group-size."
            raise UsageError(f"{where}: {name} has {problem}. {advice}")
        pieces, start = [], 0
        for length in lengths:
            own = length // self.ranks
            pieces.append((start + self.rank * own, start + (self.rank + 1) * own))
            start += length
        return Spans(axis, tuple(pieces))

    def _own_groups(self, name: str, read: Callable[[], Tensor], where: str) -> Tensor:
        """GPTQ's group numbers of this part of the inputs, which `read` gives, counted from zero."""
        index = read()
        if (index < 0).all():
            return index
        if not torch.equal(index, index.sort().values):
            raise UsageError(f"{where}: {name}: act-order mixes columns of all ranks; --tp needs one without it.")
        return index - index.min()


class ExchangeFailed(RuntimeError):
    """Values could not be exchanged, most likely because another rank has ended."""


@contextlib.contextmanager
def exchanging() -> Iterator[None]:
    """Turn what torch raises for an exchange that fails into ExchangeFailed. Memory that runs out keeps its own error."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ExchangeFailed(str(error)) from error


def _gathered(x: Tensor, ranks: int) -> tuple[Tensor, ...]:
    # the operator below dist.all_gather_into_tensor, which newer versions of torch call by another name
    group = dist.group.WORLD.group_name
    with exchanging():
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(x.reshape(-1), ranks, group)
        gathered = torch.ops._c10d_functional.wait_tensor(gathered)
    return gathered.view(ranks, *x.shape).unbind()


@kernels.define_operator("rank_sum", lambda x, ranks: x.new_empty(x.shape))
def rank_sum(x: Tensor, ranks: int) -> Tensor:
    """The sum of every rank's x, in the order of the ranks, added in float32 or wider and rounded once."""
    parts = _gathered(x, ranks)
    if ranks == 2:
        return parts[0] + parts[1]  # torch adds as below, in one kernel
    total = parts[0].to(torch.promote_types(x.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(x.dtype)


@kernels.define_operator("rank_concat", lambda x, ranks: x.new_empty(*x.shape[:-1], ranks * x.shape[-1]))
def rank_concat(x: Tensor, ranks: int) -> Tensor:
    """Every rank's x [..., N] side by side in the order of the ranks, [..., ranks N]."""
    return torch.cat(_gathered(x, ranks), -1)


class RankSum(nn.Module):
    """A layer of which every rank computes one summand. The residual is added to the sum."""

    def __init__(self, inner: nn.Module, ranks: int):
        super().__init__()
        self.inner = inner
        self.ranks = ranks

    def forward(self, x: Tensor, residual: Tensor | None = None, gated: int = 0) -> Tensor:
        return kernels.epilogue(rank_sum(self.inner(x), self.ranks), None, residual, gated)


class RankConcat(nn.Module):
    """An LM head of which every rank has a part of the rows. All ranks get all logits."""

    def __init__(self, inner: nn.Module, shard: Shard):
        super().__init__()
        self.inner = inner
        self.shard = shard

    def forward(self, x: Tensor) -> Tensor:
        return rank_concat(self.inner(x), self.shard.ranks)

    def logits(self, x: Tensor) -> Tensor:
        """`forward` in float32 or wider."""
        out = self(x)
        return out.to(torch.promote_types(out.dtype, torch.float32))


class RankEmbedding(nn.Module):
    """An embedding of which every rank has a part of the rows. All ranks get the rows of all tokens."""

    def __init__(self, inner: nn.Embedding, shard: Shard):
        super().__init__()
        self.inner: nn.Module = inner
        self.count = inner.num_embeddings
        self.shard = shard

    def forward(self, tokens: Tensor) -> Tensor:
        return common_rows(tokens, self.count, self.inner, self.shard)


def common_rows(ids: Tensor, count: int, own_rows: Callable[[Tensor], Tensor], shard: Shard) -> Tensor:
    """The rows ids [...] of a matrix of which every rank has `count` rows, [..., H]. Their bits are unchanged.

    own_rows gives rows of this part by their number in it. The other ranks add -0.0, which changes no number: 0.0 would
    turn -0.0 into 0.0.
    """
    places = ids - shard.rank * count
    foreign = (places < 0) | (places >= count)
    rows = own_rows(places.clamp(0, count - 1)).masked_fill(foreign[..., None], -0.0)
    return rank_sum(rows, shard.ranks)


def connect_(model: Transformer, shard: Shard) -> None:
    """Let the layers of a loaded part exchange what they need: two sums per layer, the logits, a split embedding's rows.

    A tied LM head is rows of the embedding, in the same memory.
    """
    for block in model.layers:
        block.attention.o = RankSum(block.attention.o, shard.ranks)
        if model.config.num_local_experts:
            block.mlp = RankSum(block.mlp, shard.ranks)
        else:
            block.mlp.down = RankSum(block.mlp.down, shard.ranks)
    if model.lm_head is None:
        rows = model.embed_tokens.weight
        if not shard.embedding:
            rows = nn.Parameter(rows.chunk(shard.ranks)[shard.rank], requires_grad=False)
        model.lm_head = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
        model.lm_head.weight = rows
    model.lm_head = RankConcat(model.lm_head, shard)
    if shard.embedding:
        model.embed_tokens = RankEmbedding(model.embed_tokens, shard)


def narrow_(model: Transformer, shard: Shard, own_head: bool) -> None:
    """Give a meta model the LM head of this part, and the embedding if it is split. own_head: whether one is stored."""
    H, rows = model.config.hidden_size, model.config.vocab_size // shard.ranks
    if own_head:
        model.lm_head = nn.Linear(H, rows, bias=False, device="meta").requires_grad_(False)
    if shard.embedding:
        model.embed_tokens = nn.Embedding(rows, H, device="meta").requires_grad_(False)
