"""How a token is chosen: processed logits plus Gumbel noise that depends on the position.

The token after a node is `argmax over survivors of z + T g`. Here z are the penalised logits, T is the temperature, and g
is Gumbel noise that depends on (seed, absolute position, token id) alone. By the Gumbel-max trick this samples
softmax(z / T) of the survivors exactly. The text is therefore a function of prompt and seed, whichever drafter runs.

What changes between requests is data in a `SamplingState`. Only a `SamplingMode` selects code. Nothing here waits for a
GPU. Views are method calls instead of `x[...]`, so that fake CUDA tensors can prove this on a machine without a GPU.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import kernels
from decoding.params import FP32_TINY, MAX_BIAS, MAX_LOGPROBS, MAX_STOP_IDS, SamplingMode, SamplingParams, per_row

MASK = 0xFFFFFFFF
LEAST = torch.finfo(torch.float32).min
# Multipliers of a 32-bit finalizer. MIX_B is written minus 2^32, which brings both below 2^31 in magnitude. Their factors
# are below 2^32, so every product fits a signed 64-bit integer. `& MASK` gives the residue mod 2^32 of negative products
# as well.
MIX_A = 0x7FEB352D
MIX_B = 0x846CA68B - 2**32


class SamplingState:
    """The settings of every batch row as device buffers that all graphs share.

    `seed` is int64 [B], `top_k` int64 [B,1,1], the other numbers are fp32 [B,1,1], which broadcasts over nodes and
    vocabulary. `bias` fp32 [B,K] belongs to the tokens `bias_ids` and to positions before `bias_until`, both int64 [B,K].
    """

    def __init__(self, batch_size: int, device: torch.device | str = "cpu") -> None:
        B = batch_size
        with torch.device(device):
            self.temperature = torch.zeros(B, 1, 1)
            self.top_p = torch.zeros(B, 1, 1)
            self.min_p = torch.zeros(B, 1, 1)
            self.repetition_penalty = torch.zeros(B, 1, 1)
            self.presence_penalty = torch.zeros(B, 1, 1)
            self.frequency_penalty = torch.zeros(B, 1, 1)
            self.top_k = torch.zeros(B, 1, 1, dtype=torch.int64)
            self.seed = torch.zeros(B, dtype=torch.int64)
            self.bias_ids = torch.zeros(B, MAX_BIAS + MAX_STOP_IDS, dtype=torch.int64)
            self.bias_until = torch.zeros_like(self.bias_ids)
            self.bias = torch.zeros_like(self.bias_ids, dtype=torch.float32)
        self.set(SamplingParams())

    def set(self, params: SamplingParams | Sequence[SamplingParams]) -> None:
        """Copy the settings of all rows into the buffers, from one SamplingParams or one per row (`per_row`)."""
        for b, row in enumerate(per_row(params, self.seed.shape[0])):
            self.set_row(b, row)

    @staticmethod
    def _value(params: SamplingParams, name: str) -> float:
        """The value of the buffer `name` for these settings."""
        value = vars(params)[name]
        if name == "seed":
            return (value + 2**63) % 2**64 - 2**63
        if name != "top_k":
            value = float(value)  # torch takes no integer beyond 64 bits, and no fraction
        if params.temperature == 0:  # a greedy row beside others that sample: neither noise nor filters
            return {"top_k": 0, "top_p": 1.0, "min_p": 0.0}.get(name, value)
        # In fp32 a tiny temperature must not become 0, because logits are divided by it. A huge one must not let T g
        # overflow, and at 1e30 the choice is uniform already.
        return min(max(value, FP32_TINY), 1e30) if name == "temperature" else value

    def set_row(self, b: int, params: SamplingParams, stop_ids: Sequence[int] = (), start: int = 0) -> None:
        """Copy the settings of row b into the buffers. stop_ids: those that params.min_new_tokens is about. start: the
        position of the first new token."""
        for name, buffer in vars(self).items():
            if not name.startswith("bias"):
                buffer.select(0, b).fill_(self._value(params, name))
        bias = [(token, value, 2**62) for token, value in params.logit_bias]
        if params.min_new_tokens:
            bias += [(token, -math.inf, start + params.min_new_tokens) for token in stop_ids]
        buffers = self.bias_ids, self.bias, self.bias_until
        for buffer in buffers:
            buffer.select(0, b).fill_(0)
        for buffer, column in zip(buffers, zip(*bias, strict=True), strict=False):  # no columns without biases
            buffer[b, : len(bias)] = torch.tensor(column, dtype=buffer.dtype)

    def part(self, begin: int, rows: int = 1) -> "SamplingState":
        """The settings of some rows, as views of these buffers."""
        view = copy.copy(self)
        vars(view).update({name: buffer.narrow(0, begin, rows) for name, buffer in vars(self).items()})
        return view


# ---- noise -------------------------------------------------------------------------------------------------


def _mix(x: Tensor, key: Tensor | int = 0) -> Tensor:
    """Hash x (32-bit values in int64) in place, with a bijection that `key` selects."""
    x.bitwise_xor_(x >> 16).mul_(MIX_A).bitwise_and_(MASK)
    x.bitwise_xor_(x >> 15).bitwise_xor_(key).mul_(MIX_B).bitwise_and_(MASK)
    return x.bitwise_xor_(x >> 16)


def _mix_int(x: int) -> int:
    """`_mix` of a Python integer, with key 0."""
    x = (x ^ x >> 16) * MIX_A & MASK
    x = (x ^ x >> 15) * MIX_B & MASK
    return x ^ x >> 16


def hash_ids(token_ids: Tensor) -> Tensor:
    """The part of the noise that depends on the token ids only. Steps share it by passing it with `hashed=True`."""
    return _mix(token_ids & MASK)


def noise_bits(seed: Tensor, positions: Tensor, token_ids: Tensor, hashed: bool = False) -> Tensor:
    """32 random bits per (seed, position, token id), int64 [B,P,K] in [0, 2^32). Arguments as in `gumbel_noise`.

    This is a counter-based hash in int64 alone, with the same bits on every device, compiled or not. For a given low half
    of the seed the two key words are a bijection of (high half, position). Only one finalizer runs per element.
    """
    first, second = _keys(seed, positions) if seed.is_cuda else _keys_on_host(seed, positions).unbind(0)
    hashes = token_ids if hashed else hash_ids(token_ids)
    return _mix(hashes ^ first.unsqueeze(-1), second.unsqueeze(-1))


def _keys(seed: Tensor, positions: Tensor, mix: Callable = _mix) -> tuple[Tensor, Tensor]:
    """The two key words [B,P] of seed [B] at positions [B,P]. With `mix=_mix_int` all of them are Python integers."""
    seed = seed.unsqueeze(1) if isinstance(seed, Tensor) else seed
    low = mix((seed & MASK) ^ 0x9E3779B9)
    high = mix(((seed >> 32) & MASK) ^ low)
    first = mix(mix((positions + low) & MASK) ^ high)
    second = mix(((first + high) & MASK) ^ low)
    return first, second


@kernels.define_operator("noise_keys", lambda seed, positions: seed.new_empty(2, seed.shape[0], positions.shape[1]))
def _keys_on_host(seed: Tensor, positions: Tensor) -> Tensor:
    """`_keys` [2,B,P] on a CPU, where sixty tensor operations on a few numbers would cost more than the noise itself."""
    rows = zip(seed.tolist(), positions.expand(seed.shape[0], -1).tolist(), strict=True)
    keys = [[_keys(s, p, _mix_int) for p in row] for s, row in rows]
    return torch.tensor(keys, dtype=torch.int64).permute(2, 0, 1).contiguous()


def gumbel_noise(seed: Tensor, positions: Tensor, token_ids: Tensor, hashed: bool = False) -> Tensor:
    """Standard Gumbel noise, fp32 [B,P,K], a pure function of (seed, position mod 2^32, token id mod 2^32).

    seed int64 [B]; positions int64 [B,P]; token_ids int64 [K], [B,1,K] or [B,P,K], ids of the target's vocabulary;
    hashed: the ids went through `hash_ids` before.

    The bits are equal everywhere, the floats only on the same device and build. All values are finite, from -2.82 to
    22.88. A small v becomes large noise, which decides the choice, so small v keep all their bits. At the other end fp32
    would round v up to 1, which the clamp prevents.
    """
    bits = noise_bits(seed, positions, token_ids, hashed)
    v = bits.float().add_(0.5).mul_(2.0**-32).clamp_max_(1 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()


@kernels.operation(
    "noise_ahead", "noise", kernels.choice.noise, kernels.choice.noise_shape,
    cpu=lambda *args: torch.ops.eaglet_cpu.noise.default(*args),
)  # fmt: skip
def noise_ahead(seed: Tensor, n: Tensor, rows: int, hashes: Tensor) -> Tensor:
    """`gumbel_noise` of the positions n + 1 to n + rows, [B,rows,V]. seed and n [B]; hashes [V] from `hash_ids`.

    Kernels make floats that may differ from those of `gumbel_noise` in the last bits.
    """
    return gumbel_noise(seed, n[:, None] + 1 + torch.arange(rows, device=n.device), hashes, hashed=True)


def uniform_noise(seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Uniform noise in [0, 1), fp32 [B,P,K], keyed like `gumbel_noise`. It has 24 of the 32 bits, so it is never 1."""
    return (noise_bits(seed, positions, ids) >> 8).float() * 2.0**-24


def stream(seed: Tensor, which: int) -> Tensor:
    """Seeds [B] of another, independent noise stream. Multi-round verification needs three more than `seed`."""
    return _mix((seed & MASK) ^ (0x51ED2701 * which & MASK)) | (seed & ~MASK)


# ---- processed logits --------------------------------------------------------------------------------------


def add_bias(logits: Tensor, positions: Tensor, state: SamplingState) -> Tensor:
    """Logits [B,N,V], in fp32 at least, with the biases that each row's request asks for.

    positions int64 [B,N]: where the token that is chosen after each node will stand.
    """
    until, ids = state.bias_until.unsqueeze(1), state.bias_ids.unsqueeze(1)
    bias = torch.where(positions.unsqueeze(-1) < until, state.bias.unsqueeze(1), 0.0)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return z.scatter_add(-1, ids.expand_as(bias), bias.to(z.dtype))


def apply_penalties(
    logits: Tensor, seen: Tensor, counts: Tensor, path_tokens: Tensor, path_valid: Tensor, state: SamplingState
) -> Tensor:
    """Logits [B,N,V] after repetition, presence and frequency penalties. Every node has its own history.

    seen bool or int [B,V]: the token occurs in the prompt or the output. counts int [B,V]: how often it was generated.
    path_tokens int64 [B,N,P], path_valid bool [B,N,P]: the generated tokens from the root to the node, which `seen` and
    `counts` do not hold yet.

    The repetition penalty r is that of transformers: negative logits times r, others divided by r, once per token of
    prompt and output. The presence penalty (once per token) and the frequency penalty (per occurrence) are those of
    OpenAI's API: they are subtracted for generated tokens only.
    """

    def penalise(z: Tensor, seen: Tensor, counts: Tensor) -> Tensor:
        repeated = torch.where(z < 0, z * state.repetition_penalty, z / state.repetition_penalty)
        minus = state.presence_penalty * (counts > 0) + state.frequency_penalty * counts
        return torch.where(seen, repeated, z) - minus

    B, N, V = logits.shape
    tokens = path_tokens.clamp(0, V - 1)
    seen = (seen != 0).unsqueeze(1).expand(B, N, V)
    counts = counts.unsqueeze(1).expand(B, N, V)
    # Every path entry, valid or not, recomputes its token from the raw logit. Duplicates therefore write equal values.
    on_path = ((tokens.unsqueeze(-1) == tokens.unsqueeze(-2)) & path_valid.unsqueeze(-2)).sum(-1)
    path_seen = seen.gather(-1, tokens) | (on_path > 0)
    path_counts = counts.gather(-1, tokens) + on_path
    values = penalise(logits.gather(-1, tokens), path_seen, path_counts)
    return penalise(logits, seen, counts).scatter(-1, tokens, values)


def _weight(z: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    """Unnormalised probabilities in steps of 2^-30, int64. Sums of integers do not depend on order or batch."""
    return (z - top).div_(temperature).exp_().mul_(2.0**30).long()


def _heaviest(weight: Tensor, total: Tensor, top_p: Tensor) -> Tensor:
    """How many of the first weights [...,V], which descend, have the share top_p of the total mass: all if top_p is off.

    The mass is the least integer >= top_p * total, and at least 1.
    """
    target = torch.where(top_p < 1, (top_p.double() * total).ceil().long().clamp_min(1), total + 1)
    return (weight.cumsum(-1) - weight < target).sum(-1, keepdim=True)


def _cutoff_search(z: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The least logit [B,N,1] that top-k and then top-p keep, with fixed shapes and without host reads, for the GPU."""
    V = z.shape[-1]
    values = z.sort(-1, descending=True).values
    last = torch.where(top_k > 0, top_k.clamp(max=V), V) - 1
    by_count = values.gather(-1, last.expand(*z.shape[:-1], 1))
    weight = _weight(values, values.narrow(-1, 0, 1), temperature).masked_fill(values < by_count, 0)
    kept = _heaviest(weight, weight.sum(-1, keepdim=True), top_p)
    return torch.maximum(by_count, values.gather(-1, (kept - 1).clamp_min(0))).clamp_min(LEAST)


def _largest(rows: Tensor, width: int) -> Tensor:
    """The `width` largest values of each row, descending.

    They lie in the `width` groups of 8 with the largest maxima, so a long row is searched by groups first.
    """
    R, V = rows.shape
    if width * 8 < V and V % 8 == 0:
        groups = rows.view(R, 8, V // 8)
        best = groups.amax(1).topk(width, sorted=False).indices
        rows = groups.gather(2, best.unsqueeze(1).expand(R, 8, width)).view(R, 8 * width)
    return rows.topk(width).values if width < V else rows.sort(-1, descending=True).values


@kernels.define_operator("cutoff", lambda z, *settings: z.new_empty((*z.shape[:-1], 1)))
def _cutoff(z: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`_cutoff_search` for the CPU, where reading values is free. z is [B,N,V], the settings are [B,1,1]."""
    settings = zip(z, temperature, top_k, top_p, strict=True)
    return torch.stack([_cutoff_of_sequence(*values) for values in settings])


def _cutoff_of_sequence(rows: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The cutoffs [N,1] of the rows [N,V] of one sequence, whose settings are [1,1].

    The answer is nearly always among a row's 64 largest logits. Only rows where it is not look at 512, then at all.
    """
    V = rows.shape[-1]
    k = min(int(top_k) or V, V)
    use_p = float(top_p) < 1
    cut = torch.full_like(rows[:, :1], LEAST)
    pending = torch.arange(len(cut) if use_p or k < V else 0)
    for width in sorted({min(64, V), min(512, V), V}):
        if len(pending) == 0 or width < k < V:
            continue
        part = rows if len(pending) == len(cut) else rows[pending]
        values = _largest(part, width)
        least = values[:, k - 1 : k] if k < V else torch.full_like(values[:, :1], LEAST)
        found = torch.ones_like(pending, dtype=torch.bool)
        if use_p:
            weight = _weight(values, values[:, :1], temperature).masked_fill_(values < least, 0)
            total = weight.sum(-1, keepdim=True)
            # Logits outside `values` count as well where top-k keeps them: all if it is off, else ties of the k-th.
            if width < V and bool((values[:, -1:] >= least).any()):
                everything = _weight(part, values[:, :1], temperature)
                everything = everything if k == V else everything.masked_fill_(part < least, 0)
                total = everything.sum(-1, keepdim=True)
            kept = _heaviest(weight, total, top_p)
            least = torch.maximum(least, values.gather(-1, (kept - 1).clamp_min(0)))
            found = kept[:, 0] < width
        cut[pending] = least.clamp_min(LEAST)
        pending = pending[~found]
    return cut


def survivors(logits: Tensor, state: SamplingState) -> Tensor:
    """Which tokens temperature, top-k, top-p (of what top-k left) and min-p keep, bool [B,N,V], as in transformers.

    The survivors are all logits >= one threshold, so ties share their fate. Top-k keeps every tie of the k-th largest
    logit, and top-p every tie of the token that reaches the mass. The greatest logit always survives, -inf never does.
    top_k 0, top_p 1 and min_p 0 remove nothing. Masses are integer sums, so a row's result does not depend on the other
    rows. A row with NaN has no meaningful result (see `finite`).
    """
    z = logits.float().contiguous()
    top = z.amax(-1, keepdim=True)
    find = _cutoff_search if z.is_cuda else _cutoff
    temperature = state.temperature.clamp_min(FP32_TINY)  # 0 in a greedy row, where nothing is filtered
    cut = find(z, temperature, state.top_k, state.top_p)
    cut = torch.maximum(cut, top + temperature * state.min_p.log())
    return z >= torch.minimum(cut, top)


def restrict(logits: Tensor, allowed: Tensor) -> Tensor:
    """Logits [B,N,V], with -inf where `allowed` is 0: bit i % 32 of its int32 [B,N,i // 32] is token i."""
    bits = allowed.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=allowed.device)
    return torch.where((bits & 1).flatten(-2).narrow(-1, 0, logits.shape[-1]).bool(), logits, -math.inf)


def finite(logits: Tensor) -> Tensor:
    """Bool [...]: the row has no NaN, no +inf and not only -inf. Where this is False, `choose` means nothing."""
    return logits.amax(-1).isfinite()


# ---- choice ------------------------------------------------------------------------------------------------


def _argmax(x: Tensor) -> Tensor:
    """Index of the last axis' maximum. Ties go to the lowest id, as torch.max documents. A CPU goes by blocks of 64."""
    V = x.shape[-1]
    if x.is_cuda or V % 64:
        return x.argmax(-1)
    blocks = x.unflatten(-1, (V // 64, 64))
    block = blocks.amax(-1).argmax(-1, keepdim=True)
    inside = blocks.gather(-2, block.unsqueeze(-1).expand(*block.shape, 64)).argmax(-1)
    return (block * 64 + inside).squeeze(-1)


def choose(
    logits: Tensor, noise: Tensor | None, state: SamplingState, mode: SamplingMode, depth: Tensor | None = None
) -> Tensor:
    """The target's token after each node, int64 [B,N]: argmax of z + T g over the survivors, ties to the lowest id.

    logits [B,N,V] are penalised and not yet divided by the temperature. noise [B,P,V] has a row for every node, or with
    depth [B,N] a row for every depth. Without noise, or if mode.sample is False, the choice is greedy.
    """
    return choose_and_check(logits, noise, state, mode, depth)[0]


def choose_and_check(
    logits: Tensor, noise: Tensor | None, state: SamplingState, mode: SamplingMode, depth: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(`choose`, `finite`) of the same logits. Kernels do both in one call."""
    return _choose(logits, noise if mode.sample else None, depth, _settings(state), mode.filters)


def _settings(state: SamplingState) -> kernels.Settings:
    return kernels.Settings(state.temperature, state.top_k, state.top_p, state.min_p)


def _choose_cpu(logits, noise, depth, settings, _filters) -> tuple[Tensor, Tensor]:
    noise, depth = (None if t is None else t.contiguous() for t in (noise, depth))
    return torch.ops.eaglet_cpu.choose.default(logits.contiguous(), noise, depth, settings.temperature)


@kernels.operation(
    "choose", "choose", kernels.choice.choose, kernels.choice.choose_shapes, cpu=_choose_cpu,
    cpu_problem=lambda logits, noise, depth, settings, filters: None if filters else "",
)  # fmt: skip
def _choose(
    logits: Tensor, noise: Tensor | None, depth: Tensor | None, settings: kernels.Settings, filters: bool
) -> tuple[Tensor, Tensor]:
    """(`choose`, `finite`)."""
    if noise is None:
        return _argmax(logits), finite(logits)
    if depth is not None and depth.shape[1] > 1:
        noise = noise.gather(1, depth[..., None].expand(-1, -1, logits.shape[-1]))
    keys = logits + settings.temperature * noise
    keys = torch.where(survivors(logits, settings), keys, -math.inf) if filters else keys
    return _argmax(keys), finite(logits)


def draft_keys(
    draft_logits: Tensor, noise: Tensor | None, state: SamplingState, mode: SamplingMode, noisy_scores: bool = True
) -> tuple[Tensor, Tensor]:
    """(keys, scores), each [B,W,K]. The children of a node are its largest keys, and dynamic trees add up the scores.

    With noise, which is looked up by the target's token ids, the keys are the perturbed logits z + T g. The scores are
    log_softmax((z + T g) / max(T, 0.5)) over the survivors. Removed tokens follow behind, ordered by raw log-probability.
    Without noise, without sampling, or with a single survivor, keys and scores are those of greedy decoding, z and
    log_softmax(z). The scores are also log_softmax(z) without noisy_scores. NaN logits become -inf in both.
    """
    draft_logits = draft_logits.to(torch.promote_types(draft_logits.dtype, torch.float32))
    z = torch.where(draft_logits.isnan(), -math.inf, draft_logits)
    raw = z.log_softmax(-1)
    keys, scores = z, raw
    if noise is not None and mode.sample:
        keys = z + state.temperature * noise
        if noisy_scores:
            # a greedy row beside others that sample keeps the scores of greedy decoding
            softened = keys / state.temperature.clamp_min(0.5).where(state.temperature > 0, 1.0)
            scores = softened if mode.filters else softened.log_softmax(-1)
        if mode.filters:
            alive = survivors(z, state)
            alone = alive.sum(-1, keepdim=True) == 1
            keys = torch.where(alone, z, _behind(keys, alive, raw))
            if noisy_scores:
                scores = torch.where(alive, scores, -math.inf).log_softmax(-1)
                scores = torch.where(alone, raw, _behind(scores, alive, raw))
    dead = draft_logits.isnan() | scores.isnan()
    return keys.masked_fill(dead, -math.inf), scores.masked_fill(dead, -math.inf)


def draft_topk(
    draft_logits: Tensor, noise: Tensor | None, ids: Tensor | None, state: SamplingState, mode: SamplingMode, count: int,
    noisy_scores: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The `count` largest keys of each row (`draft_keys`): their places, int64, and scores, each [B,W,count].

    noise [B,1 or W,V of the target], None without sampling; ids [K] of the target that the draft vocabulary stands for,
    None for all.
    """
    filters = mode.filters and noise is not None  # without noise the best tokens survive every filter
    if not draft_logits.is_cuda:  # only Triton reads 16-bit logits
        draft_logits = draft_logits.to(torch.promote_types(draft_logits.dtype, torch.float32))
    return _draft_topk(draft_logits, noise, ids, _settings(state), filters, noisy_scores, count)


def _draft_topk_cpu(logits, noise, ids, settings, _filters, noisy_scores, count) -> tuple[Tensor, Tensor]:
    rows = logits.contiguous(), None if noise is None else noise.contiguous()
    return torch.ops.eaglet_cpu.draft_topk.default(*rows, ids, settings.temperature, noisy_scores, count)


@kernels.operation(
    "draft_topk", "draft_topk", kernels.topk.draft_topk, kernels.topk.draft_topk_shapes, cpu=_draft_topk_cpu,
    cpu_problem=lambda logits, noise, ids, settings, filters, *rest: None if filters else "",
)  # fmt: skip
def _draft_topk(
    draft_logits: Tensor, noise: Tensor | None, ids: Tensor | None, settings: kernels.Settings, filters: bool,
    noisy_scores: bool, count: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    noise = noise if noise is None or ids is None else noise[..., ids]
    mode = SamplingMode(sample=noise is not None, filters=filters)
    keys, scores = draft_keys(draft_logits, noise, settings, mode, noisy_scores)
    best = keys.topk(count, -1).indices
    return best, scores.gather(-1, best)


def _behind(x: Tensor, alive: Tensor, raw: Tensor) -> Tensor:
    """x of the survivors. Every other token ends up strictly below them, in the order of its raw log-probability.

    raw is at most log(1/2) for a removed token, because a likelier one survived.
    """
    return torch.where(alive, x, torch.where(alive, x, math.inf).amin(-1, keepdim=True) + raw)


def probabilities(logits: Tensor, state: SamplingState, mode: SamplingMode) -> Tensor:
    """The distribution [B,N,V] that `choose` samples: softmax(z / T) of the survivors, or if greedy the argmax."""
    greedy = torch.zeros_like(logits).scatter_(-1, _argmax(logits)[..., None], 1.0)
    if not mode.sample:
        return greedy
    if mode.filters:
        logits = torch.where(survivors(logits, state), logits, -math.inf)
    return torch.where(state.temperature > 0, (logits / state.temperature).softmax(-1), greedy)


class Logprobs(NamedTuple):
    """Log-probabilities in the model's own distribution, before temperature, filters, penalties and biases."""

    chosen: Tensor  # [B,P] of the tokens that were emitted
    top: Tensor  # [B,P,K] of the K likeliest tokens, descending
    top_ids: Tensor  # [B,P,K]

    def row(self, b: int) -> "Logprobs":
        """The log-probabilities of sequence b, without the batch axis."""
        return Logprobs(*(column[b] for column in self))


def logprobs_of(logits: Tensor, tokens: Tensor) -> Logprobs:
    """The log-probabilities of tokens [B,P] after the logits [B,P,V], and the MAX_LOGPROBS likeliest tokens."""
    logprobs = logits.float().log_softmax(-1)
    top, ids = logprobs.topk(min(MAX_LOGPROBS, logits.shape[-1]))
    return Logprobs(logprobs.gather(-1, tokens[..., None]).squeeze(-1), top, ids)
