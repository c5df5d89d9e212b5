"""Models of which most layers are recurrent, and their layer for multi-token prediction (MTP)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

import kernels
from families.config import DeltaConfig, ModelConfig
from kernels.records import Memory, Nodes
from model import Block, RMSNorm, Transformer, linear, weight_bytes
from support.machine import zeros


class DeltaNet(nn.Module):
    """A recurrent layer in place of attention: a short convolution, and the gated delta rule (`kernels.delta`)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.sizes = sizes = config.delta
        H, heads = config.hidden_size, sizes.value_heads
        self.qkvz = nn.Linear(H, sizes.channels + sizes.values, bias=False)  # z is the gate of the output
        self.ba = nn.Linear(H, 2 * heads, bias=False)  # how strongly a token writes, and how much the memory fades
        self.conv = nn.Parameter(torch.empty(sizes.channels, 1, sizes.kernel))
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(heads)), nn.Parameter(torch.zeros(heads))
        self.norm = RMSNorm(sizes.value_dim, config.rms_norm_eps)
        self.out = nn.Linear(sizes.values, H, bias=False)

    def forward(self, x: Tensor, nodes: Nodes, layer: Memory, residual: Tensor | None = None) -> Tensor:
        """x [B, T, H] -> [B, T, H], with the residual added. layer: what this layer keeps; `fresh` gets the rows."""
        rows, z = self.projected(x)
        read = self.read(rows, z, layer, None if nodes.chain else nodes.walk)
        fresh = kernels.next_window(layer, rows, self.sizes.kernel - 1) if nodes.chain else rows
        layer.fresh[:, : fresh.shape[1]] = fresh
        return linear(self.out, read, residual)

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, H] -> rows [B, T, R] as `kernels.delta_rule` takes them, and gates [B, T, Hv dv] of the output."""
        qkv, z = self.qkvz(x).split((self.sizes.channels, self.sizes.values), -1)
        return torch.cat((qkv, self.ba(x)), -1), z

    def read(self, rows: Tensor, z: Tensor, layer: Memory, walk: Tensor | None) -> Tensor:
        """What the rows read of the memory, normed and gated, [B, T, Hv dv]."""
        read = kernels.delta_rule(rows, self.conv, self.A_log, self.dt_bias, layer, walk)
        return kernels.gated_norm(read, z, self.norm.weight, self.norm.eps)

    def forward_train(self, x: Tensor, _cos: Tensor, _sin: Tensor) -> Tensor:
        """The same layer over a whole sequence x [B, T, H], from an empty memory. No gradients flow through it."""
        layer = next(iter(new_memory(self.sizes, 1, len(x), 0, 0, x.dtype, x.device).layers()))
        layer.keep.fill_(x.shape[1])
        rows, z = self.projected(x)
        quick = x.device.type == "cpu" and x.dtype == torch.float32 and not kernels.cpu_problem()
        with kernels.KernelBackend("cpu" if quick else "auto", x.device.type).active():
            read = self.read(rows, z, layer, None)
        return self.out(read)


class MtpLayer(nn.Module):
    """The layer for multi-token prediction that a checkpoint brings. `eagle_draft.MtpHead` drafts with it."""

    def __init__(self, config: ModelConfig, layer: Block):
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.embed_norm, self.feature_norm = RMSNorm(H, eps), RMSNorm(H, eps)
        self.fc = nn.Linear(2 * H, H, bias=False)  # of an embedding beside a feature
        self.layer = layer
        self.norm = RMSNorm(H, eps)


class RecurrentTransformer(Transformer):
    """A Transformer with recurrent layers among the others. Its MTP layer is no part of a forward."""

    def __init__(self, config: ModelConfig, block: Callable[..., Block]):
        super().__init__(config, block)
        self.mtp = MtpLayer(config, block(config.plain_layer, 0)) if config.mtp else None

    def new_memory(self, batch_size: int, nodes: int = 1, depth: int = 0) -> Memory | None:
        """The empty memory of all recurrent layers."""
        layers = len(self.config.recurrent)
        if not layers:
            return None
        return new_memory(self.config.delta, layers, batch_size, nodes, depth, self.dtype, self.device)

    def nodes(self, n: Tensor, depth: Tensor, ancestors: Tensor, *how: Any, chain: bool = False, **more: Any) -> Nodes:
        nodes = super().nodes(n, depth, ancestors, *how, chain=chain, **more)
        return nodes if chain or not self.config.recurrent else nodes._replace(walk=kernels.depth_first(ancestors))

    def kept(self, kv_cache: Sequence[Tensor], memory: Memory | None) -> list[Tensor | Memory]:
        memories, attention = memory.layers() if memory else iter(()), iter(super().kept(kv_cache, memory))
        return [next(attention if i in self.kv_places else memories) for i in range(len(self.layers))]

    def weight_bytes(self, nodes: int = 1) -> float:
        return super().weight_bytes(nodes) - (0.0 if self.mtp is None else weight_bytes(self.mtp, nodes))


def new_memory(
    sizes: DeltaConfig, layers: int, batch_size: int, nodes: int, depth: int, dtype: torch.dtype, device: torch.device,
) -> Memory:  # fmt: skip
    """The empty memory of so many recurrent layers."""
    wide, K = torch.promote_types(dtype, torch.float32), sizes.kernel
    row = sizes.channels + 2 * sizes.value_heads
    state = zeros((batch_size, layers, sizes.value_heads, sizes.key_dim, sizes.value_dim), wide, device)
    path, fresh = (zeros((batch_size, layers, n, row), dtype, device) for n in (K + depth, max(nodes, K - 1)))
    counts = [torch.zeros(batch_size, dtype=d, device=device) for d in (torch.int64, torch.bool, torch.int64)]
    return Memory(state, path, fresh, *counts)
