"""Medusa: heads that predict several tokens ahead at once from one hidden state, their file, and how they draft."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from decoding import sampling
from decoding.drafter import Draft, Drafter, DraftInput, take_rows
from drafters.trees import independent_tree
from model import Transformer, weight_bytes
from support.machine import give_memory, shapes_only
from tree import DynamicTree, TreeTables, check_width
from weights.files import check_entries, check_finite, read_entries, write_safetensors


class ResBlock(nn.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, size: int):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """Medusa's heads under their published names: `{i}.0.linear.weight`, `{i}.0.linear.bias`, `{i}.1.weight`.

    Head i predicts the token i + 2 positions further on. The last name is the head's own LM head. Without it
    (own_lm_head = False) all heads share the target's.
    """

    def __init__(self, target: Transformer, count: int, own_lm_head: bool = False):
        H, V = target.config.hidden_size, target.config.vocab_size
        last = [nn.Linear(H, V, bias=False) for _ in range(count)] if own_lm_head else []
        super().__init__(nn.Sequential(ResBlock(H), *last[i : i + 1]) for i in range(count))
        self.own_lm_head = own_lm_head
        object.__setattr__(self, "target", target)  # shared, not owned: stays out of the state dict

    def forward(self, hidden_states: Tensor, count: int | None = None) -> Tensor:
        """Post-norm hidden states [..., H] -> logits [..., heads, V] of the first `count` heads, float32."""
        out = torch.stack([self[i](hidden_states) for i in range(count or len(self))], -2)
        if not self.own_lm_head:
            return self.target.logits(out)
        return out if out.dtype == torch.float64 else out.float()


MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
MEDUSA_TENSOR = re.compile(r"([0-9]|[1-9][0-9])\.(0\.linear\.weight|0\.linear\.bias|1\.weight)")


def load_medusa(path: str | Path, target: Transformer) -> MedusaHeads:
    """Medusa heads in the target's dtype and on its device, of a file called as in MEDUSA_FILES or of a folder with one.

    Raises ValueError in one line for anything but the tensors of `MedusaHeads`. Heads of several blocks are not
    supported.
    """
    path = Path(path)
    if path.is_dir():
        files = [path / name for name in MEDUSA_FILES if (path / name).is_file()]
        if len(files) != 1:
            raise ValueError(f"{path}: expected one of {', '.join(MEDUSA_FILES)}, found {len(files)}.")
        path = files[0]
    if not path.is_file():
        raise ValueError(f"{path}: no such file; expected {' or '.join(MEDUSA_FILES)}.")
    entries = read_entries([path])
    if not entries or any(MEDUSA_TENSOR.fullmatch(name) is None for name in entries):
        known = "'0.0.linear.weight', ..., '0.1.weight'"
        raise ValueError(f"{path}: not Medusa heads of one block each ({known}).")
    count = 1 + max(int(name.split(".")[0]) for name in entries)
    with shapes_only():
        heads = MedusaHeads(target, count, any(name.endswith(".1.weight") for name in entries))
    check_entries({name: tuple(t.shape) for name, t in heads.state_dict().items()}, entries, str(path))
    give_memory(heads.eval().requires_grad_(False).to(target.dtype), target.device)
    tensors = {name: entry.read() for name, entry in entries.items()}
    for name, tensor in tensors.items():
        check_finite(tensor, name, str(path))
    heads.load_state_dict(tensors)
    return heads


def save_medusa(tensors: Mapping[str, Tensor], directory: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write `medusa_lm_head.safetensors` with the published names, in `dtype`."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    cast = {name: tensor.detach().to(dtype) for name, tensor in tensors.items()}
    write_safetensors(directory / MEDUSA_FILES[0], cast)


class MedusaDrafter(Drafter):
    """Head d - 1 drafts all tokens at depth d at once from the last committed hidden state.

    The token of rank r at a depth is that head's r-th best, whatever the parent is. With shared noise the ranks use the
    target's noise of that position.
    """

    def __init__(self, heads: MedusaHeads, tree: TreeTables, shared_noise: bool = True):
        if isinstance(tree, DynamicTree):
            raise ValueError("Medusa heads draft static trees, like --tree medusa:vicuna_7b_stage2.")
        if tree.D > len(heads):
            hint = f"use --tree chain:{len(heads)} or another tree of that depth"
            raise ValueError(f"the tree is {tree.D} deep, but there are {len(heads)} Medusa heads; {hint}.")
        check_width(tree, heads.target.config.vocab_size)
        super().__init__(tree.N, tree.D, heads.target.config.hidden_size)
        self.heads = heads
        self.tree = tree
        self.shared_noise = shared_noise
        self.scoring = "noisy" if shared_noise else "probability"

    def bytes_per_step(self) -> float:
        """The heads that are used, and the target's LM head if they share it."""
        used = sum(weight_bytes(self.heads[i]) for i in range(self.D))
        return used if self.heads.own_lm_head else used + self.heads.target.lm_head_bytes()

    def draft(self, inputs: DraftInput) -> Draft:
        t, K = self.tree, max(self.tree.max_children, 1)
        last = take_rows(inputs.features, (inputs.count - 1)[:, None])
        logits = self.heads(last[:, 0], t.D)  # [B, D, V]
        if inputs.bias is not None:
            logits = logits + inputs.bias
        if inputs.mode.penalties:  # of the text so far, because a node's parent is not known here
            none = torch.zeros_like(t.depth[:, :1, None]).expand(-1, t.D, -1)
            logits = sampling.apply_penalties(logits, inputs.seen, inputs.counts, none, none > 0, inputs.sampling)
        noise = inputs.noise[:, : t.D] if inputs.noise is not None and self.shared_noise else None
        best, scores = sampling.draft_topk(logits, noise, None, inputs.sampling, inputs.mode, K)
        return independent_tree(t, inputs.root, best, scores)
