"""Rounding weights to codes and scales: to nearest (RTN), and with error feedback from calibration data (GPTQ).

`fill_rounded` rounds a float checkpoint to nearest while it is loaded. `Tally` says what rounding cost.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from model import Experts, Transformer
from weights.files import Destination, Entries
from weights.hf import checked_sources, read_parameter, without_copy
from weights.quantized import QuantLinear, QuantSpec, Stored, apply_spec_, pack_nibbles, quantizable, set_tensor, untie_
from weights.stored import fill_parameters

# Clip ratios that are tried for each group. The first one clips nothing, and 7/8 uses the code -8 for the peak.
CLIPS = [1 - i / 40 for i in range(17)]
RTN_CHUNK = 1 << 24  # weights that are rounded together
GPTQ_BLOCK = 128  # columns that are updated together
GPTQ_DAMPING = 0.01  # share of the mean diagonal that is added to the diagonal


def _round(groups: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Codes (still as floats) of groups [..., G] under scales [...]. A zero scale gives zero codes."""
    safe = torch.where(scales == 0, 1, scales).float()
    return (groups / safe[..., None]).round_().clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def fit_scales(groups: Tensor, bits: int, importance: Tensor | None = None) -> Tensor:
    """The scale of each group [..., G] that gives the least squared error over CLIPS, judged after rounding the scale.

    `importance` weighs the squared errors and is broadcast to the groups (GPTQ: the mean squared activation).
    Returns [...], fp16 for int4 and fp32 for int8. An int4 scale may be negative, which puts the spare level -8 on the
    side where the group needs it. Raises ValueError for weights that are not finite or too large.
    """
    shape, groups = groups.shape[:-1], groups.reshape(-1, groups.shape[-1])
    weights = None if importance is None else importance.expand(*shape, -1).reshape(groups.shape)
    rows = max(1, (1 << 20) // groups.shape[-1])  # so few that a chunk stays in the processor's cache
    out = []
    for at in range(0, groups.shape[0], rows):
        chunk = groups[at : at + rows].float()
        peak = chunk.abs().amax(-1) / (2 ** (bits - 1) - 1)
        best, least = None, None
        for ratio in CLIPS:
            for sign in (1, -1) if bits == 4 else (1,):
                scales = (peak * (ratio * sign)).to(torch.float16 if bits == 4 else torch.float32)
                error = (_round(chunk, scales, bits) * scales.float()[:, None] - chunk).square_()
                error = (error if weights is None else error * weights[at : at + rows]).sum(-1)
                best = scales if best is None else torch.where(error < least, scales, best)
                least = error if least is None else torch.minimum(error, least)
        out.append(best)
    scales = torch.cat(out).view(shape)
    if not scales.isfinite().all():
        raise ValueError("a weight is NaN, infinite or too large for fp16 scales (past 458752).")
    return scales


def stored_tensors(codes: Tensor, scales: Tensor, bits: int) -> dict[str, Tensor]:
    """Codes [..., N, K] around zero and scales [..., N, K/G] in the stored layout."""
    if bits == 8:
        return {"qweight": codes.to(torch.int8).contiguous(), "scales": scales[..., 0].contiguous()}
    return {"qweight": pack_nibbles((codes + 8).to(torch.uint8)), "scales": scales.mT.contiguous()}


def quantize_rtn(weight: Tensor, bits: int, group_size: int) -> dict[str, Tensor]:
    """Round weight [..., N, K] to the nearest levels under the scales of `fit_scales`. Returns the stored tensors.

    Some rows at a time, because their codes are floats before they are packed.
    """
    parts = []
    for rows in weight.split(max(1, RTN_CHUNK * weight.shape[-2] // weight.numel()), -2):
        grouped = rows.unflatten(-1, (-1, group_size if bits == 4 else rows.shape[-1]))
        scales = fit_scales(grouped, bits)
        parts.append(stored_tensors(_round(grouped.float(), scales, bits).flatten(-2), scales, bits))
    axis = {"qweight": -2, "scales": -1}  # of the rows
    return {leaf: torch.cat([part[leaf] for part in parts], axis[leaf]) for leaf in parts[0]}


def quantize_gptq(
    weight: Tensor, hessian: Tensor, bits: int, group_size: int, act_order: bool = False
) -> dict[str, Tensor]:
    """GPTQ (arXiv 2210.17323). The error of rounding a column is compensated by the columns that follow.

    `weight` is [N, K]. `hessian` [K, K] fp32 is the sum of x x^T over the linear's inputs, at any scale. If it is all
    zero (an expert that no token chose) the result equals RTN. Returns the stored tensors. Raises ValueError for
    calibration activations that are degenerate or not finite.
    """
    (N, K), group = weight.shape, group_size if bits == 4 else weight.shape[1]
    energy, factor, order = _inverse_factor(hessian, act_order)
    scales = torch.empty(N, K // group, device=weight.device)
    fixed = act_order or bits == 8
    if fixed:  # the columns of a group are not met one after the other, so its scale is fitted to the original weights
        scales = fit_scales(weight.unflatten(-1, (-1, group)), bits, energy.view(-1, group)).float()
    columns = weight.float().T[order].contiguous()  # [K, N]: rows are input columns, in update order
    codes, group_of = torch.empty_like(columns), (order // group).tolist()
    for start in range(0, K, GPTQ_BLOCK):
        stop = min(start + GPTQ_BLOCK, K)
        errors = torch.empty(stop - start, N, device=weight.device)
        for k in range(start, stop):
            if not fixed and k % group == 0:
                fitted = fit_scales(columns[k : k + group].T, bits, energy[k : k + group])
                scales[:, k // group] = fitted.float()
            scale = scales[:, group_of[k]]
            codes[k] = _round(columns[k, :, None], scale, bits)[:, 0]
            errors[k - start] = (columns[k] - codes[k] * scale) / factor[k, k]
            columns[k:stop] -= factor[k, k:stop, None] * errors[k - start]
        columns[stop:] -= factor[start:stop, stop:].T @ errors
    scales = scales.to(torch.float16 if bits == 4 else torch.float32)
    return stored_tensors(codes[order.argsort()].T, scales, bits)


def _inverse_factor(hessian: Tensor, act_order: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The damped diagonal, the upper Cholesky factor of the inverse in update order, and the update order."""
    eye = torch.eye(hessian.shape[0], device=hessian.device)
    hessian = eye if hessian.diagonal().sum() == 0 else hessian
    energy = hessian.diagonal()
    order = torch.arange(energy.numel(), device=energy.device)
    if act_order:
        order = energy.argsort(descending=True, stable=True)
    for attempt in range(6):  # a nearly singular matrix is damped harder
        damped = hessian + eye * (energy.mean() * GPTQ_DAMPING * 4**attempt)
        lower, failed = torch.linalg.cholesky_ex(damped[order][:, order])
        upper, failed_too = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed and not failed_too and upper.isfinite().all():
            return damped.diagonal(), upper, order
    raise ValueError("GPTQ: calibration activations are degenerate or not finite; use another --calibration.")


def relative_error(weight: Tensor, restored: Tensor) -> float:
    """||restored - weight|| / ||weight|| in fp32."""
    return float((restored.float() - weight.float()).norm() / weight.float().norm().clamp(min=1e-30))


def round_weight(
    child: nn.Module, name: str, weight: Tensor, bits: int, spec: QuantSpec, feed: Callable[[], None] | None,
    stop: bool = False,
) -> Stored:  # fmt: skip
    """The stored tensors of the weight `name` of `child`: to nearest, or by GPTQ while `feed` runs calibration data.

    stop: each forward may end at `child`, with `Reached`.
    """
    if spec.algorithm == "rtn" or feed is None:
        return quantize_rtn(weight, bits, spec.group_size)
    hessians = _hessians(child, name.endswith(".down"), weight, feed, stop)
    options = (bits, spec.group_size, spec.act_order)
    parts = [quantize_gptq(w, h, *options) for w, h in zip(weight.view(-1, *weight.shape[-2:]), hessians, strict=True)]
    return {leaf: torch.stack([p[leaf] for p in parts]) for leaf in parts[0]} if weight.dim() == 3 else parts[0]


class Reached(Exception):
    """A forward has come to the matrix whose inputs are wanted: what lies behind it need not run."""


def _hessians(
    child: nn.Module, down: bool, weight: Tensor, feed: Callable[[], None], stop: bool = False
) -> list[Tensor]:
    """Sum of x x^T over the calibration inputs of a linear, or of each expert's `gate_up` or `down`.

    stop: end each forward there with `Reached`, which `feed` catches.
    """
    K, experts = weight.shape[-1], weight.shape[0] if weight.dim() == 3 else 1
    sums = [torch.zeros(K, K, device=weight.device) for _ in range(experts)]

    def add(_, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        x = inputs[0].reshape(-1, inputs[0].shape[-1]).float()
        routed = named.get("routed", x).reshape(x.shape).float()  # what a router reads
        index = child.route(routed)[1] if isinstance(child, Experts) else None
        for e, total in enumerate(sums):
            rows = x if index is None else x[(index == e).any(-1)]
            if index is not None and down:
                rows = child.hidden(rows, e)
            total.addmm_(rows.T, rows)
        if stop:
            raise Reached

    handle = child.register_forward_pre_hook(add, with_kwargs=True)
    try:
        feed()
    finally:
        handle.remove()
    return sums


@torch.no_grad()
def quantize_(module: nn.Module, spec: QuantSpec, feed: Callable[[], None] | None = None) -> dict[str, float]:
    """Round every linear of a module in memory, in place. Returns the relative weight errors by name.

    feed: runs the module, in float32, over calibration data for GPTQ. Each linear sees what its rounded predecessors
    produce. Without it all are rounded to nearest.
    """
    errors, rounded = {}, {}
    tied = isinstance(module, Transformer) and module.lm_head is None
    for child, weights, bits in quantizable(module, spec):
        for full, weight in weights.items():
            rounded[full] = round_weight(child, full, weight, bits, spec, feed)
            restored = QuantLinear(rounded[full]).dequantize()
            errors[full] = relative_error(weight, restored)
            if feed:
                weight.copy_(restored)
    if apply_spec_(module, spec) and tied and module.lm_head is not None:
        rounded["lm_head"] = quantize_rtn(module.embed_tokens.weight, module.lm_head.bits, spec.group_size)
    for full, stored in rounded.items():
        for leaf, tensor in stored.items():
            set_tensor(module.get_submodule(full), leaf, tensor)
    return errors


def half_of(dtype: torch.dtype | str | None) -> torch.dtype:
    """What the floats of a quantized model are stored in, if the embedding that it is made from has this dtype."""
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.float16


def fill_rounded(model: Transformer, entries: Entries, spec: QuantSpec, where: str, to: Destination) -> None:
    """Make a meta model a quantized one and fill it from float entries under Hugging Face names, rounded to nearest.

    Of the float matrices only one is in memory at a time. The result is what quantize.py stores and `fill_stored` reads,
    so embedding, norms and biases are rounded to half precision first. Raises ValueError in one line for tensors that
    do not match, and for values that are not finite.
    """
    entries = without_copy(model, entries, where)
    sources = checked_sources(model, entries, where)
    embedding = sources["embed_tokens.weight"]
    half = half_of(entries[embedding[0]].dtype)
    if model.lm_head is None and spec.lm_head != "fp16":  # the rounded copy of a tied head
        untie_(model)
        sources["lm_head.weight"] = embedding
    bits = {full: bits for _, weights, bits in quantizable(model, spec) for full in weights}
    halves = {name: entry._replace(read=lambda entry=entry: entry.read().to(half)) for name, entry in entries.items()}

    def packed(ours: str, names: list[str], slot: Tensor) -> Stored | None:
        if (name := ours.removesuffix(".weight")) not in bits:
            return None
        weight = read_parameter(entries, names, slot.shape, where, to.device)
        return quantize_rtn(weight, bits[name], spec.group_size)

    fill_parameters(model, sources, halves, packed, where, to)


@dataclass
class Tally:
    """Sums over positions for one model (before) and another (after), in nats."""

    positions: int = 0
    before: float = 0.0
    after: float = 0.0
    divergence: float = 0.0
    agreed: int = 0

    def add(self, before: Tensor, after: Tensor, targets: Tensor) -> None:
        """Add logits [M, V] of both models with targets int64 [M]."""
        # Vocabularies are wide, so copies are made for 128 rows at a time, and only the sums are of float64.
        for p, q, ids in zip(before.split(128), after.split(128), targets.split(128), strict=True):
            p, q = p.float().log_softmax(-1), q.float().log_softmax(-1)
            self.positions += ids.numel()
            self.before += float(F.nll_loss(p, ids, reduction="sum"))
            self.after += float(F.nll_loss(q, ids, reduction="sum"))
            self.divergence += float((p.exp() * (p - q)).sum(dtype=torch.float64))
            self.agreed += int((p.argmax(-1) == q.argmax(-1)).sum())

    def report(self) -> dict[str, float]:
        """Perplexities, mean KL(before || after), and the share of positions with the same most likely token."""
        return {
            "perplexity_before": math.exp(min(self.before / self.positions, 700)),
            "perplexity_after": math.exp(min(self.after / self.positions, 700)),
            "mean_kl": self.divergence / self.positions,
            "top1_agreement": self.agreed / self.positions,
        }
