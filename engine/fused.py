"""The parts of a step that something faster replaces: a block that torch.compile made, or on a CPU one C++ call for all
layers or for a whole draft, because calling small operators takes longer there than they do.

What the C++ kernels make of weights (`stack`, `static_draft`) are tensors that only these kernels can read. They keep the
weights alive.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor, nn

import kernels
from decoding import sampling
from decoding.drafter import Draft, DraftInput, StepParts
from drafters.trees import TreeDrafter
from eagle_draft import EagleDrafter, EagleHead
from kernels import records
from layers.attention import GatedAttention, GrowingAttention, LateNormAttention, ShapedAttention, WideNormAttention
from layers.blocks import NormedBlock, ScaledBlock
from layers.gemma4 import SharingAttention
from layers.recurrent import DeltaNet
from model import MLP, Attention, Block, Transformer
from weights.lora import LoraLinear
from weights.quantized import QuantLinear, TiedEmbedding

# The kinds of attention, and what of them the C++ kernels do not have.
IN_ONE_CALL: dict[type[nn.Module], str] = {
    Attention: "",
    ShapedAttention: "",
    DeltaNet: "a recurrent layer",
    GatedAttention: "a gate behind attention",
    WideNormAttention: "norms over all heads",
    LateNormAttention: "norms behind the rotation",
    GrowingAttention: "queries that grow with their position",
    SharingAttention: "normed values",
}


def compiled_blocks(backend: str | Callable = "inductor") -> StepParts:
    """One block for all layers, made by torch.compile in some seconds. The whole step in one piece would take minutes,
    and on a CPU it is slower than no compilation."""
    # every width of every engine is a variant of the same function
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    block = torch.compile(_run_block, fullgraph=True, dynamic=False, backend=backend)
    return StepParts(partial(Transformer.run_layers, block=block))


def _run_block(layer: Block, x: Tensor, nodes: records.Nodes, kv: Tensor | records.Memory) -> Tensor:
    return layer(x, nodes, kv)


def fused_parts() -> StepParts:
    """The parts of a step in which the C++ kernels run layers in one call, if they have all that the layers need."""
    stacked, drafted_with = cache(stack), cache(static_draft)

    def block(layer: Block, x: Tensor, nodes: records.Nodes, kv: Tensor | records.Memory) -> Tensor:
        found = stacked((layer,))
        if found is None or kv.dtype not in kernels.CPU_DTYPES:
            return layer(x, nodes, kv)
        return _run(x, None, found, nodes, kv[None])[0]

    def layers(
        model: Transformer, x: Tensor, nodes: records.Nodes, kv: Sequence[Tensor], taps: tuple[int, ...],
        memory: records.Memory | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        found = stacked(tuple(model.layers), model.norm.weight)
        if found is None or kv[0].dtype not in kernels.CPU_DTYPES:
            return model.run_layers(x, nodes, kv, taps, memory, block)
        normed, tapped = _run(x, None, found, nodes, kv[0], taps)
        return normed, tapped if taps else None

    def draft_layer(head: EagleHead, residual: Tensor, joined: Tensor, nodes: records.Nodes, kv: Tensor) -> Tensor:
        found = stacked((head.layer,), input_norm=False)
        if found is None:
            return head.layer_forward(residual, joined, nodes, kv)
        residual, x = head.layer_inputs(residual, joined)
        return _run(x, residual, found, nodes, kv[None])[0]

    def draft_tree(drafter: TreeDrafter, inputs: DraftInput) -> Draft | None:
        found, mode = drafted_with(drafter), inputs.mode
        problem = "a head of this kind is not pruned" if found is None and drafter.p_min else ""
        able = kernels.use_cpu("draft_tree", inputs.features, problem=problem)
        if found is None or mode.penalties or mode.filters or not able:
            return None
        state = inputs.tokens, inputs.n, inputs.root, inputs.features.contiguous(), inputs.count
        bias = inputs.features.new_empty(len(inputs.n), 0)
        if inputs.bias is not None:
            bias = inputs.bias[:, 0] if drafter.draft_ids is None else inputs.bias[:, 0, drafter.draft_ids]
        settings = inputs.sampling.seed, inputs.sampling.temperature, bias.contiguous()
        text = records.DraftText(*state, *settings, inputs.produced)
        p_min = drafter.p_min if drafter.prunes(mode) else 0.0
        noisy = drafter.shared_noise and mode.sample
        how = noisy, drafter.cache, kernels.round_activations(), p_min, drafter.p_more, drafter.p_forward
        more = drafter.ngram_nodes, drafter.window, drafter.ring > 0
        return Draft(*torch.ops.eaglet_cpu.draft_tree.default(found, text, *how, *more))

    return StepParts(layers, draft_layer, draft_tree=draft_tree)


def _run(
    x: Tensor, residual: Tensor | None, stacked: Tensor, nodes: records.Nodes, kv: Tensor, taps: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    """x float32 [B, T, in] -> [B, T, H] after all layers and the norm, and the inputs of the layers `taps` side by side.

    Where the first norm is lacking, x is normed already, and `residual` is what the attention adds to.
    kv [L, 2, B, Hkv, S, hd] has the keys and values of each layer side by side.
    """
    visible, windowed = (seen.expand(len(x), -1, -1) for seen in (nodes.visible, nodes.visible_window))
    shared = [t.contiguous() for t in records.flat(nodes._replace(visible=visible, visible_window=windowed))]
    residual = None if residual is None else residual.contiguous()
    run = torch.ops.eaglet_cpu.layers.default
    how = kernels.round_activations(), taps, nodes.window, nodes.ring
    return run(x.contiguous(), residual, stacked, shared, kv, *how)


def stack(layers: tuple[nn.Module, ...], norm: Tensor | None = None, input_norm: bool = True) -> Tensor | None:
    """Layers for `_run`, or None if the C++ kernels do not have all of them.

    norm: of the last layer's output, with the eps of the others. input_norm: whether a layer norms its input itself.
    """
    weights = tuple(layer_weights(layer, input_norm) for layer in layers)
    if None in weights:
        return None
    attentions, norm_of_first = [layer.attention for layer in layers], layers[0].post_norm or layers[0].attention_norm
    windows, angles = [a.window for a in attentions], [a.first_angle for a in attentions]
    cap = attentions[0].cap if isinstance(attentions[0], ShapedAttention) else 0.0
    numbers = layers[0].mlp.gate, norm_of_first.eps, attentions[0].scale, cap
    return torch.ops.eaglet_cpu.stack_layers.default(records.flat(weights), norm, windows, angles, *numbers)


def layer_problem(layer: nn.Module) -> str:
    """What of a layer the C++ kernels do not have, so that they cannot run it in one call, or ""."""
    attention, mlp = layer.attention, layer.mlp
    if problem := IN_ONE_CALL.get(type(attention), "attention of another kind"):
        return problem
    lacking = {
        "experts": not isinstance(mlp, MLP),
        f"heads of {attention.head_dim}": attention.head_dim % 16,
        "a multiplied residual": isinstance(layer, ScaledBlock),
        "attention sinks": isinstance(attention, ShapedAttention) and attention.sinks is not None,
    }
    if found := [what for what, lacks in lacking.items() if lacks]:
        return found[0]
    linears = attention.qkv, attention.o, mlp.gate_up, mlp.down
    if any(isinstance(linear, LoraLinear) for linear in linears):
        return "an adapter beside the weights"
    halves = mlp.gate_up.packed.n % (2 * kernels.CPU_TILE) if isinstance(mlp.gate_up, QuantLinear) else 0
    # of gate and up a tile would hold rows of both
    return "the form of a weight" if halves or None in map(linear_weights, linears) else ""


def layers_in_parts(layers: Sequence[nn.Module]) -> dict[str, list[int]]:
    """The numbers of the layers that the C++ kernels do not run in one call, by what they lack (`layer_problem`)."""
    found: dict[str, list[int]] = {}
    for i, layer in enumerate(layers):
        if problem := layer_problem(layer):
            found.setdefault(problem, []).append(i)
    return found


def layer_weights(layer: nn.Module, input_norm: bool) -> records.LayerWeights | None:
    """The weights of a layer, or None if the C++ kernels do not have all of it."""
    if layer_problem(layer):
        return None
    attention, mlp = layer.attention, layer.mlp
    linears = [linear_weights(linear) for linear in (attention.qkv, attention.o, mlp.gate_up, mlp.down)]
    first = layer.input_norm if input_norm else None
    behind = (layer.attention_norm, layer.mlp_norm) if isinstance(layer, NormedBlock) else (None, None)
    norms = first, behind[0], layer.post_norm, behind[1], attention.q_norm, attention.k_norm
    return records.LayerWeights(*(norm and norm.weight for norm in norms), *linears)


def linear_weights(linear: nn.Module) -> records.LinearWeights | None:
    """A linear layer, or None if the C++ kernels do not have it."""
    packed = linear.packed if isinstance(linear, QuantLinear) else None
    if packed is None or packed.layout != "tiles" or packed.perm is not None or packed.n % kernels.CPU_TILE:
        return None
    return records.LinearWeights(packed.weight, packed.scales, packed.mins, linear.bias)


def head_weights(head: EagleHead) -> records.HeadWeights | None:
    """The weights of a head, or None if the C++ kernels do not have such a head."""
    config, layer, target = head.config, head.layer, head.target
    if not config.in_cpp or config.layer.hidden_size % 8:
        return None
    scaled = target.config.logits_multiplier != 1 or target.config.logits_cap
    if scaled and not config.has_lm_head:
        return None
    embedding = head.embed_tokens or target.embed_tokens
    table = linear_weights(embedding.head[0] if isinstance(embedding, TiedEmbedding) else embedding)
    if isinstance(embedding, nn.Embedding) and embedding.weight.dtype == torch.float32:
        table = records.LinearWeights(embedding.weight, None, None, None)
    lm_head = head.lm_head or target.lm_head
    weights = layer_weights(layer, False), linear_weights(head.fc), lm_head and linear_weights(lm_head), table
    if None in weights:
        return None
    norms = (layer.input_norm, layer.hidden_norm) if config.version == 3 else (None, None)
    ids = torch.arange(target.config.vocab_size) if head.draft_ids is None else head.draft_ids
    rotary = records.Rotary(head.rotary.cos, head.rotary.sin)
    norms = (norm and norm.weight for norm in (*norms, head.norm))
    fc_norms = head.fc_norms and torch.stack([norm.weight for norm in head.fc_norms])
    return records.HeadWeights(*weights, *norms, fc_norms, rotary, head.draft_ids, sampling.hash_ids(ids))


def static_draft(drafter: TreeDrafter) -> Tensor | None:
    """What `eaglet_cpu.draft_tree` drafts with, or None if it does not draft with such a head or such a tree."""
    if type(drafter) is not EagleDrafter or drafter.dynamic or drafter.multi_round:
        return None
    head, tables = drafter.head, drafter.tree
    weights = head_weights(head)
    if weights is None:
        return None
    children = max(tables.max_children, 1)
    nodes = records.TreeNodes(tables.source_row * children + tables.rank, tables.parent, tables.depth, tables.valid)
    tree, levels = ([t.contiguous() for t in records.flat(found)] for found in (nodes, tables.levels))
    layer, config = head.layer, head.config
    flags = config.norm_before_residual, config.norm_output, drafter.scoring == "noisy"
    numbers = children, layer.post_norm.eps, layer.attention.scale, *flags
    return torch.ops.eaglet_cpu.tree_draft.default(records.flat(weights), tree, levels, *numbers)
