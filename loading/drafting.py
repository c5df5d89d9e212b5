"""From options to a drafter: which tree is drafted, a head with its vocabulary and rounding, and the other drafters."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import kernels
from decoding.drafter import Drafter
from drafters.assistant import AssistantDrafter, AssistantHead
from drafters.block import BlockDrafter, BlockHead
from drafters.draft_model import DraftModelDrafter, check_vocabulary
from drafters.heads import DraftHead, HeadDrafter
from drafters.lookahead import LookaheadDrafter
from drafters.medusa import MedusaDrafter, load_medusa
from drafters.ngram import NGramDrafter, WithNGrams
from drafters.trees import DraftRule
from eagle_draft import EagleDrafter, EagleHead, MtpHead, UnshiftedDrafter
from families.config import ModelConfig
from loading.options import LEAST_WINDOW, NGRAM_NODES, NO_HEAD, LoadOptions, flag
from model import Transformer
from support import cache
from support.errors import UsageError, bad_files
from support.files import read_text
from support.machine import describe_device, shapes_only
from support.reader import is_a, refusal
from text.tokenizer import Tokenizer, load_tokenizer
from tree import DynamicTree, TreeTables, check_width, parse_tree, tree_tables
from weights.assistant import AssistantConfig
from weights.block_heads import BlockConfig, BlockFile, read_head
from weights.checkpoint import Checkpoint
from weights.files import local_path
from weights.heads import MTP, EagleConfig, EagleFile, read_card
from weights.quantized import QuantSpec, adopt_, pack_, replace_module
from weights.rounding import quantize_

PRUNE = 10  # percent, until the price of a node was measured
BY_PRICE = -1  # `prune` where it is not given: the engine measures the price of a node


def resolve(asked: LoadOptions, checkpoint: Checkpoint, head: EagleFile | BlockFile | None = None) -> LoadOptions:
    """The options with everything decided: device, dtype, ctx, and the tree and its pruning where none is named.

    Raises UsageError where the model's context is exceeded or no tree was tuned.
    """
    options = asked.with_defaults(checkpoint.config)
    longest = checkpoint.config.max_positions
    if options.ctx > longest:
        raise UsageError(f"--ctx is {options.ctx:,}; this model's limit is {longest:,}.")
    if asked.tree == "auto":
        options = replace(options, tree=find_tuned_tree(asked, checkpoint, head))
    looked_up = head and options.draft_window == "auto"
    tuned = cache.fetch(tuned_path(asked, checkpoint, head, "window")) if looked_up else None
    options = with_window(options, head.config if head else None, tuned and tuned.about["window"])
    return with_tree(options, checkpoint.quantization, head.config if head else None)


def tree_shape(options: LoadOptions) -> tuple[int, int]:
    """(N, D) of what the drafter proposes; (1, 0) for plain decoding."""
    tree = parse_tree(options.trees[0])  # a misspelt name is an error even where nothing is drafted
    if not options.drafter_kind:
        return 1, 0
    if options.drafter_kind == "lookahead":
        return LookaheadDrafter.shape()
    return WithNGrams.shape(tree.N, tree.D, options.ngram_nodes or 0)


def build_trees(options: LoadOptions, device: torch.device) -> DynamicTree | TreeTables:
    """The dynamic tree, or the tables of one static tree per sequence."""
    trees = [parse_tree(name) for name in options.trees]
    if len(trees) > 1 and len(trees) != options.slots:
        raise ValueError(f"{len(trees)} trees for {options.slots} slots; give one tree, or one per slot.")
    if not any(isinstance(tree, DynamicTree) for tree in trees):
        return tree_tables(trees * options.slots if len(trees) == 1 else trees, device)
    if len(set(trees)) > 1:
        raise ValueError("trees of a batch must all be static, or all the same dynamic tree.")
    return trees[0]


def tuned_path(options: LoadOptions, checkpoint: Checkpoint, head: EagleFile | BlockFile, kind: str = "json") -> Path:
    """Where the tree tuned for this device, model, head, quantization, dtype and compilation lies, if there is one. With
    kind "window", where the window lies.

    `python -m scripts.tune_tree` writes them; `--tree auto` and `--draft-window auto` read them.
    """
    options = options.with_defaults(checkpoint.config)
    quantization = [checkpoint.raw.get(key) for key in ("eaglet_quant", "quantization_config")]
    quantization += [str(checkpoint.spec)] if checkpoint.spec else []
    vocabulary = (options.draft_vocab, options.draft_vocab_text)
    how = (options.dtype, options.compile and options.compile_mode, options.kv, options.head_quant)
    described = (checkpoint.config, head.config, json.dumps(quantization, sort_keys=True), vocabulary, how)
    digest = hashlib.sha256(repr(described).encode())
    for name, tensor in sorted(head.tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.flatten()[:64].tolist()}".encode())
    machine = re.sub(r"[^A-Za-z0-9]+", "-", describe_device(torch.device(options.device))).strip("-")
    return cache.folder() / "trees" / f"{machine}-{digest.hexdigest()[:16]}.{kind}"


def default_tree(options: LoadOptions, quantization: str | None, head: EagleConfig | BlockConfig | None) -> str:
    """The default tree. On a GPU it has 16 nodes, or 24 where the weights have 16 bits and take longer to read.

    On an H100 a forward of LLaMA-3-8B in int4 took 1.14 times as long with 16 nodes as with one, and 1.39 times with 24
    (docs/results.md). `scripts.tune_tree` measures the best one for a card.
    quantization: of the target, as `Checkpoint.quantization` names it.
    """
    on_gpu, nodes = options.device == "cuda", 16 if quantization else 24
    if isinstance(head, BlockConfig):
        if options.verify != "match":
            return f"chain:{head.depth}"
        return block_tree(head, nodes) if on_gpu else block_tree(head)
    if head is not None and head.mtp and not on_gpu:
        return "chain:2"  # a level of drafting reads the LM head of the whole vocabulary
    if head is None or head.unshifted or not on_gpu or options.verify != "match":
        return "paper25"
    return f"dynamic:{nodes},{7 if head.version == 3 else 5},8"


def block_tree(config: BlockConfig, nodes: int = 26) -> str:
    """The dynamic tree that a block head drafts by default."""
    return f"dynamic:{nodes},{min(config.depth, 8) - 1},8"


def with_tree(options: LoadOptions, quantization: str | None, head: EagleConfig | BlockConfig | None) -> LoadOptions:
    """The options with the tree, its pruning and its n-gram nodes decided. quantization, head: as in `default_tree`.

    A tree that the user named is drafted as it is.
    """
    tree, prune, ngram_nodes, block = options.tree, options.prune, options.ngram_nodes, isinstance(head, BlockConfig)
    if block and prune and ngram_nodes:
        raise UsageError("--prune and --ngram-nodes do not go together for a head that drafts blocks; leave one out.")
    # the CPU kernels do not draft with these heads, which plain steps replace while they do not pay
    other = isinstance(head, AssistantConfig) or isinstance(head, EagleConfig) and not head.in_cpp
    by_default = tree is None and options.can_prune and not (other or block and ngram_nodes)
    if ngram_nodes is None:
        ngram_nodes = NGRAM_NODES if by_default and prune is None and not block else 0
    if prune is None:
        prune = BY_PRICE if by_default else 0
    tree = default_tree(options, quantization, head) if tree is None else tree
    return replace(options, tree=tree, prune=prune, ngram_nodes=ngram_nodes)


def own_window(head: EagleConfig | BlockConfig) -> int:
    """The window that all layers of a head were trained with, which always holds. 0: they see the whole text."""
    return max(head.layer.windows) if all(head.layer.windows) else 0


def with_window(options: LoadOptions, head: EagleConfig | BlockConfig | None, measured: object = None) -> LoadOptions:
    """The options with the window of the head decided: a number of tokens, or "full". measured: on this machine.

    What lies far back in a head's own cache disturbs it (docs/how_it_works.md). A window that all of its layers were
    trained with holds anyway. Where nothing was measured it is an eighth of the positions that the head states, but
    layers that were trained with the target have none. Raises ValueError for a CARD.json with a wrong one, and UsageError
    for a head without one.
    """
    asked = options.draft_window
    if isinstance(head, AssistantConfig) and asked not in ("auto", "full"):
        raise UsageError("--draft-window: an assistant reads the model's keys, and keeps none; leave it out.")
    if head is None or isinstance(head, AssistantConfig):
        return replace(options, draft_window="full")
    own = own_window(head)
    if asked == "auto":
        measured = measured or read_card(options.eagle).get("window")
        if measured not in (None, "full") and not (is_a(measured, int) and measured >= LEAST_WINDOW):
            problem = f"window is {measured!r:.40}; allowed: full, or {LEAST_WINDOW} or more."
            raise refusal(f"{options.eagle} (CARD.json, or what scripts.tune_tree wrote)", problem)
        with_target = isinstance(head, EagleConfig) and head.mtp
        default = "full" if with_target else max(64, head.layer.max_position_embeddings // 8)
        asked = "full" if own else measured or default
    wanted = 0 if asked == "full" else int(asked)
    window = min(own, wanted) or max(own, wanted)
    return replace(options, draft_window=str(window) if 0 < window < options.ctx else "full")


def find_tuned_tree(options: LoadOptions, checkpoint: Checkpoint, head: EagleFile | BlockFile | None) -> str:
    """The file that `--tree auto` stands for. Raises UsageError with the command that makes it."""
    if head is None:
        raise UsageError("--tree auto looks up the tree tuned for a draft head; it needs --eagle HEAD.")
    path = tuned_path(options, checkpoint, head)
    if path.exists():
        return str(path)
    command = f"python -m scripts.tune_tree --checkpoint {options.checkpoint} --eagle {options.eagle}"
    for name in ("draft_vocab", "draft_vocab_text", "dtype", "quant", "threads"):
        command += f" {flag(name)} {vars(options)[name]}" if vars(options)[name] else ""
    command += " --compile" if options.compile else ""
    where = f"this model, head and device ({describe_device(torch.device(options.place))})"
    raise UsageError(f"--tree auto: no tree was tuned for {where}. Leave it out, or run: {command}")


class DraftFiles(NamedTuple):
    """The files that the options name for drafting, as far as they are read before memory is planned."""

    head: EagleFile | BlockFile | None = None
    model: Checkpoint | None = None  # a draft LLM's
    notes: tuple[str, ...] = ()  # what had to be assumed of them


def own_head(options: LoadOptions, checkpoint: Checkpoint) -> tuple[LoadOptions, Checkpoint]:
    """The options and the checkpoint with its own MTP layer, where it has one and no other drafter is asked for.

    Raises UsageError where one is asked for that is not there.
    """
    if options.eagle == NO_HEAD:
        return replace(options, eagle=None), checkpoint
    asked = options.eagle == MTP
    free = not options.drafter_kind and options.verify == "match" and options.cache_allows_drafts
    if not asked and not (free and checkpoint.has_mtp):
        return options, checkpoint
    if not checkpoint.has_mtp:
        raise UsageError(f"--eagle {MTP}: {checkpoint.directory} has no MTP layer; leave it out, or name a head.")
    return replace(options, eagle=MTP), checkpoint.with_mtp


def read_drafter(options: LoadOptions, config: ModelConfig, tokenizer: Tokenizer | None) -> DraftFiles:
    """Open what the options name for drafting. config, tokenizer: the target's.

    Raises ValueError for a head that does not fit the target, and for a draft LLM with another vocabulary.
    """
    head = draft = None
    notes: list[str] = []
    if options.eagle:
        overrides = dict(item.split("=", 1) for item in options.eagle_config)
        head = read_head(options.eagle, config, overrides)
        notes += head.notes
    if options.draft_checkpoint:
        draft = options.open_checkpoint(draft=True)
        if draft.config.recurrent or len(draft.config.kv_layers) > 1:
            why = "recurrent layers, or heads of two sizes,"
            raise UsageError(f"--draft-checkpoint: a model with {why} cannot draft yet; take another one.")
        theirs = load_tokenizer(draft.tokenizer_source, draft.config.vocab_size)
        if assumed := check_vocabulary(config, draft.config, (tokenizer, theirs)):
            notes.append(assumed)
    return DraftFiles(head, draft, tuple(notes))


def draft_vocabulary(options: LoadOptions, config: ModelConfig, tokenizer: Tokenizer | None) -> Tensor | None:
    """Sorted ids of the K tokens that a trimmed head may draft (FR-Spec), or None without --draft-vocab.

    Tokens are ranked by how often a text has them. Tokens that the text does not hold, and all tokens without a text,
    follow in an order that the tokenizer alone gives: stop ids (a draft must be able to end), single characters (at most
    K / 4 here), longer pieces by merge rank (which follows frequency), then the characters left over, control tokens and
    fallback bytes. By id alone a sentencepiece model would lose `,` and `(`, because it numbers its characters last.
    Without a tokenizer the stop ids come first and then the first ids.
    """
    K, V = options.draft_vocab, config.vocab_size
    if not K:
        return None
    if not 1 <= K <= V:
        raise ValueError(f"--draft-vocab is {K}; allowed: 1 to {V}.")
    if tokenizer is None:
        if options.draft_vocab_text is not None:
            raise ValueError("--draft-vocab-text needs a tokenizer, and this checkpoint has none.")
        return torch.tensor(list(dict.fromkeys((*config.eos_token_ids, *range(V))))[:K]).sort().values
    order = _vocabulary_order(tokenizer, K, V)
    counts = torch.zeros(V, dtype=torch.int64)
    if options.draft_vocab_text is not None:
        ids = tokenizer.encode(read_text(options.draft_vocab_text))
        counts = torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=V)
        counts[list(tokenizer.eos_ids)] = counts.max() + 1
    return order[counts[order].sort(descending=True, stable=True).indices[:K]].sort().values


def _vocabulary_order(tokenizer: Tokenizer, K: int, V: int) -> Tensor:
    """All ids in the order in which `draft_vocabulary` prefers them without a text."""
    texts = [tokenizer.decode([i], skip_special=False, continuation=True) for i in range(V)]
    # A fallback byte spells what a character spells too, or half of one (U+FFFD). The character is the one to draft.
    used = {text: i for i, text in enumerate(texts)}
    seen = [t.isprintable() and t != "\ufffd" or t in "\n\t" for t in texts]
    singles = [i for i, t in enumerate(texts) if len(t) == 1 and seen[i] and used[t] == i]
    merged = [i for i, t in enumerate(texts) if len(t) > 1 and i not in tokenizer.special_ids]
    order = [*tokenizer.eos_ids, *singles[: K // 4], *merged, *singles, *range(V)]
    return torch.tensor(list(dict.fromkeys(order)))


def kinds_of(config: EagleConfig | BlockConfig) -> tuple[type[DraftHead], type[HeadDrafter]]:
    """The module of a head, and the drafter that drafts with it."""
    if isinstance(config, BlockConfig):
        return BlockHead, BlockDrafter
    if isinstance(config, AssistantConfig):
        return AssistantHead, AssistantDrafter
    return MtpHead if config.mtp else EagleHead, UnshiftedDrafter if config.unshifted else EagleDrafter


def build_head(
    file: EagleFile | BlockFile, model: Transformer, options: LoadOptions | None = None,
    tokenizer: Tokenizer | None = None,
) -> DraftHead:  # fmt: skip
    """A head on the model's device and in its dtype, its tensors loaded strictly.

    options, tokenizer: of a head whose draft vocabulary may be trimmed (`draft_vocabulary`). Raises ValueError where that
    is asked of a head with an LM head of its own, and where tensors are missing or too many.
    """
    ids = draft_vocabulary(options, model.config, tokenizer) if options else None
    if ids is not None and file.config.has_lm_head:
        raise ValueError("--draft-vocab trims heads without LM head (EAGLE-1/2); this one has its own. Leave it out.")
    ids = file.tensors.get("draft_ids") if ids is None else ids
    with shapes_only():
        head = kinds_of(file.config)[0](file.config, model, ids).eval().requires_grad_(False)
    tensors = file.tensors if ids is None else file.tensors | {"draft_ids": ids}
    # a quantized head stores codes and scales where a plain one stores a weight
    beside = ".scales", ".zeros", ".perm"
    stored = {name.replace(".qweight", ".weight") for name in tensors if not name.endswith(beside)}
    if wrong := stored ^ head.state_dict().keys():
        raise ValueError(f"the head's tensors do not match its config: {', '.join(sorted(wrong)[:3])}.")
    adopt_(head, tensors, model.device, model.dtype)
    head.rotary.build(model.device, model.rotary.length)
    head.finish()
    return head


def rounds_head(options: LoadOptions, quantization: str | None) -> bool:
    """Whether float linears of a draft head are rounded to int8: those of a quantized model, where our kernels run."""
    ours = options.kernels == "cpu" or options.device == "cuda" and options.kernels in ("auto", "triton")
    return ours and bool(quantization) and options.head_quant == "auto"


def round_head_(head: DraftHead) -> None:
    """Round the float linears of a head to int8, if on a CPU the C++ kernels can multiply with all of them.

    A drafter cannot change a token, so its rounding costs nothing but, rarely, a draft. (In int4 it costs 4 % of tau, see
    docs/results.md.) Of a head that is quantized already it is the LM head, where that is a copy of the target's rows or
    was left in half precision.
    """
    linears = {name: child for name, child in head.named_modules() if isinstance(child, nn.Linear)}
    weights = [linear.weight for linear in linears.values()]
    if all(weight.is_cuda or kernels.cpu_fits(*weight.shape, 0) for weight in weights):
        for name, linear in linears.items():
            holder = nn.ModuleDict({"linear": linear})
            quantize_(holder, QuantSpec("int8"))
            replace_module(head, name, holder["linear"])


def build_drafter(
    model: Transformer, options: LoadOptions, backend: kernels.KernelBackend,
    head: DraftHead | None = None, draft: Checkpoint | None = None,
) -> Drafter | None:  # fmt: skip
    """The drafter that the options ask for, or None. Its weights are packed for the backend.

    head is for a drafter that has one, draft is a draft LLM's checkpoint; Medusa heads are read here. A batch may have
    one static tree per sequence. The tree of an n-gram drafter is as large and deep as --tree says.
    """
    if not options.drafter_kind:
        return None
    if head is not None and rounds_head(options, model.quant):
        round_head_(head)
    with backend.active():
        drafter = _new_drafter(model, options, head, draft)
    return WithNGrams(drafter, options.ngram_nodes) if options.ngram_nodes and not options.prune else drafter


def _new_drafter(model: Transformer, options: LoadOptions, head: DraftHead | None, draft: Checkpoint | None) -> Drafter:
    kind = options.drafter_kind
    tree = build_trees(options, model.device)
    rounds = {"match": "", "multi-round": "without", "multi-round-replacement": "with"}[options.verify]
    rule = DraftRule(options.draft_noise, rounds)
    length = options.ctx + tree_shape(options)[0] + 1
    if kind == "ngram":
        return NGramDrafter(model, tree.N, tree.D)
    if kind == "lookahead":
        return LookaheadDrafter(model, options.slots, length)
    if kind == "medusa":
        with bad_files():
            heads = load_medusa(local_path(options.medusa), model)
        return MedusaDrafter(heads, tree, options.draft_noise)
    if kind == "draft":
        with bad_files():
            small = draft.load(model.device, model.dtype, None, options.ctx)
            small.rotary.build(model.device, options.ctx)  # it may have been trained to fewer positions
        pack_(small, small.dtype)
        check_width(tree, small.config.vocab_size)
        return DraftModelDrafter(model, small, tree, options.slots, length, rule)
    pack_(head, model.dtype)
    by_price = options.prune == BY_PRICE
    p_min = (PRUNE if by_price else options.prune or 0) / 100
    nodes = options.ngram_nodes if p_min else 0
    rule = rule._replace(p_min=p_min, by_price=by_price, ngram_nodes=nodes, window=options.window)
    return kinds_of(head.config)[1](head, tree, options.slots, length, rule)
