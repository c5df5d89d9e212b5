"""Which tree is drafted, and how large: the tree that is named, the one that was tuned, or the default of the device."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import torch

from drafters.lookahead import LookaheadDrafter
from drafters.ngram import WithNGrams
from options import NGRAM_NODES, LoadOptions, flag
from support import cache
from support.errors import UsageError
from support.machine import describe_device
from tree import DynamicTree, TreeTables, parse_tree, tree_tables
from weights.checkpoint import Checkpoint
from weights.heads import EagleConfig, EagleFile

# Multiply-adds in fp16 with fp32 sums per byte of memory, by compute capability: data sheets of A100, RTX 3090, RTX 4090,
# H100 (without wgmma, which our kernels do not use) and RTX 5090.
PRODUCTS = {(8, 0): 77, (8, 6): 38, (8, 9): 82, (9, 0): 92, (12, 0): 58}
SLOWEST = 38
PRUNE = 10  # percent, until the price of a node was measured
BY_PRICE = -1  # `prune` where it is not given: the engine measures the price of a node


def resolve(asked: LoadOptions, checkpoint: Checkpoint, head: EagleFile | None = None) -> LoadOptions:
    """The options with everything decided: device, dtype, ctx, and the tree and its pruning where none is named.

    Raises UsageError where the model's context is exceeded or no tree was tuned.
    """
    options = asked.with_defaults(checkpoint.config)
    longest = checkpoint.config.max_positions
    if options.ctx > longest:
        raise UsageError(f"--ctx is {options.ctx:,}; this model's limit is {longest:,}.")
    if asked.tree == "auto":
        options = replace(options, tree=find_tuned_tree(asked, checkpoint, head))
    return with_tree(options, checkpoint.quantization, head.config if head else None)


def tree_shape(options: LoadOptions) -> tuple[int, int]:
    """(N, D) of what the drafter proposes; (1, 0) for plain decoding."""
    kind = options.drafter_kind
    tree = parse_tree(options.trees[0])  # a misspelt name is an error even where nothing is drafted
    if not kind:
        return 1, 0
    shape = LookaheadDrafter.shape() if kind == "lookahead" else (tree.N, tree.D)
    return WithNGrams.shape(*shape, options.ngram_nodes) if options.ngram_nodes else shape


def build_trees(options: LoadOptions, device: torch.device) -> DynamicTree | TreeTables:
    """The dynamic tree, or the tables of one static tree per sequence."""
    trees = [parse_tree(name) for name in options.trees]
    if len(trees) not in (1, options.batch_size):
        raise ValueError(f"{len(trees)} trees for a batch of {options.batch_size}; give one tree, or one per sequence.")
    if not any(isinstance(tree, DynamicTree) for tree in trees):
        return tree_tables(trees * options.batch_size if len(trees) == 1 else trees, device)
    if len(set(trees)) > 1:
        raise ValueError("trees of a batch must all be static, or all the same dynamic tree.")
    return trees[0]


def tuned_tree_path(options: LoadOptions, checkpoint: Checkpoint, head: EagleFile) -> Path:
    """Where the tree tuned for this device, model, head, quantization, dtype and compilation lies, if there is one.

    `python -m scripts.tune_tree` writes it and `--tree auto` reads it.
    """
    options = options.with_defaults(checkpoint.config)
    quantization = [checkpoint.raw.get(key) for key in ("eaglet_quant", "quantization_config")]
    quantization += [str(checkpoint.spec)] if checkpoint.spec else []
    vocabulary = (options.draft_vocab, options.draft_vocab_text)
    how = (options.dtype, options.compile and options.compile_mode, options.kv)
    described = (checkpoint.config, head.config, json.dumps(quantization, sort_keys=True), vocabulary, how)
    digest = hashlib.sha256(repr(described).encode())
    for name, tensor in sorted(head.tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.flatten()[:64].tolist()}".encode())
    machine = re.sub(r"[^A-Za-z0-9]+", "-", describe_device(torch.device(options.device))).strip("-")
    return cache.folder() / "trees" / f"{machine}-{digest.hexdigest()[:16]}.json"


def default_tree(options: LoadOptions, quantization: str | None, head: EagleConfig | None) -> str:
    """The default tree: on a GPU, the largest of three trees that is verified in about the time of one token.

    Reading a weight takes the time of PRODUCTS[GPU] products per byte. Rows that need more of them are not free.
    quantization: of the target, as `Checkpoint.quantization` names it.
    """
    matches = options.batch_size == 1 and options.verify == "match"
    if head is None or head.unshifted or options.device != "cuda" or not matches:
        return "paper25"
    weight_bytes = {"int4": 0.5, "int8": 1.0}.get((quantization or "float")[:4], 2.0)
    rows = weight_bytes * PRODUCTS.get(torch.cuda.get_device_capability(), SLOWEST)
    if weight_bytes < 1 and "GeForce" in torch.cuda.get_device_name():
        rows *= 2  # int4 adds in fp16 there, which is twice as fast
    nodes, topk = (60, 10) if rows >= 60 else (32 if rows >= 32 else 16, 8)
    return f"dynamic:{nodes},{7 if head.version == 3 else 5},{topk}"


def with_tree(options: LoadOptions, quantization: str | None, head: EagleConfig | None) -> LoadOptions:
    """The options with the tree, its pruning and its n-gram nodes decided. quantization, head: as in `default_tree`.

    A tree that the user named is drafted as it is.
    """
    tree, prune, ngram_nodes = options.tree, options.prune, options.ngram_nodes
    by_default = prune is None and tree is None and options.can_prune
    if ngram_nodes is None:
        ngram_nodes = NGRAM_NODES if by_default else 0
    if prune is None:
        prune = BY_PRICE if by_default else 0
    tree = default_tree(options, quantization, head) if tree is None else tree
    return replace(options, tree=tree, prune=prune, ngram_nodes=ngram_nodes)


def find_tuned_tree(options: LoadOptions, checkpoint: Checkpoint, head: EagleFile | None) -> str:
    """The file that `--tree auto` stands for. Raises UsageError with the command that makes it."""
    if head is None:
        raise UsageError("--tree auto looks up the tree tuned for a draft head; it needs --eagle HEAD.")
    path = tuned_tree_path(options, checkpoint, head)
    if path.exists():
        return str(path)
    command = f"python -m scripts.tune_tree --checkpoint {options.checkpoint} --eagle {options.eagle}"
    for name in ("draft_vocab", "draft_vocab_text", "dtype", "quant", "threads"):
        command += f" {flag(name)} {vars(options)[name]}" if vars(options)[name] else ""
    command += " --compile" if options.compile else ""
    device = options.with_defaults(checkpoint.config).device
    where = f"this model, head and device ({describe_device(torch.device(device))})"
    raise UsageError(f"--tree auto: no tree was tuned for {where}. Run: {command}")
