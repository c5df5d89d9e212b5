"""Sampling parameters, processed logits, position-keyed Gumbel noise, token choice (DESIGN section 4).

The token after a node is `argmax over survivors of z + T g`: z the penalised logits, g noise that depends on
(seed, absolute position, token id) alone. This samples softmax(z / T) of the survivors exactly (Gumbel-max),
and the text is a function of prompt and seed, whoever drafts. What changes between requests is data in a
`SamplingState`; only `SamplingMode` selects code. Nothing waits for a GPU. Views are method calls instead of
`x[...]`, so that fake CUDA tensors can prove that on a machine without one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch

MASK = 0xFFFFFFFF
# Multipliers of a 32-bit finalizer, the second minus 2^32. As both are below 2^31 in magnitude and factors
# below 2^32, products fit a signed 64-bit integer; `& MASK` is the residue mod 2^32 of a negative product
# too.
MIX_A, MIX_B = 0x7FEB352D, 0x846CA68B - 2**32
FP32_MAX, FP32_TINY = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
BOUNDS = (
    ("temperature", Real, 0, FP32_MAX, "a finite number >= 0; use 0 for greedy decoding"),
    ("top_k", int, 0, 2**63 - 1, "an integer >= 0; use 0 to switch it off"),
    ("top_p", Real, math.ulp(0.0), 1, "a number > 0 and <= 1; use 1 to switch it off"),
    ("min_p", Real, 0, math.nextafter(1, 0), "a number >= 0 and < 1; use 0 to switch it off"),
    ("repetition_penalty", Real, FP32_TINY, FP32_MAX, "a finite number > 0; use 1 to switch it off"),
    ("presence_penalty", Real, -2, 2, "a number from -2 to 2; use 0 to switch it off"),
    ("frequency_penalty", Real, -2, 2, "a number from -2 to 2; use 0 to switch it off"),
    ("seed", int, -(2**63), 2**64 - 1, "a 64-bit integer; choose a smaller seed"),
    ("max_new_tokens", int, 1, 2**63 - 1, "an integer >= 1; ask for at least one token"),
)


@dataclass(frozen=True)
class SamplingMode:
    """Static switches: which code a compiled step contains."""

    sample: bool = False
    filters: bool = False
    penalties: bool = False


@dataclass(frozen=True)
class SamplingParams:
    """One request's settings, checked on creation (one-line ValueError). Default: greedy, all else off.

    `stop_ids` and `stop` end the text. Batch row b draws with seed + b.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    max_new_tokens: int = 128
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, kind, low, high, allowed in BOUNDS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
                raise ValueError(f"{name} is {value!r:.80}; allowed: {allowed}")
        for name in ("stop_ids", "stop"):
            if not isinstance(getattr(self, name), (list, tuple)):
                raise ValueError(f"{name} is {getattr(self, name)!r:.80}; allowed: a tuple; wrap it in one")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for token in self.stop_ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
                raise ValueError(f"stop_ids has {token!r:.80}; allowed: token ids >= 0; correct or remove it")
        if len(self.stop) > 16:
            raise ValueError(f"stop has {len(self.stop)} strings; allowed: at most 16; remove some")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text.encode("utf-8", "surrogatepass")) <= 1024:
                raise ValueError(f"stop has {text!r:.40}; allowed: 1 to 1024 bytes of text each; shorten it")

    @property
    def mode(self) -> SamplingMode:
        """Which code this request needs (greedy needs no filters: the greatest logit survives them all)."""
        filters = self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
        penalties = tuple(getattr(self, name) for name in PENALTIES) != (1, 0, 0)
        return SamplingMode(self.temperature > 0, filters, penalties)


class SamplingState:
    """The values as device buffers that all graphs share: fp32 [1], `top_k` int64 [1], `seed` int64 [B]."""

    def __init__(self, batch_size: int, device: torch.device | str = "cpu") -> None:
        for name in ("temperature", "top_p", "min_p", *PENALTIES):
            setattr(self, name, torch.zeros(1, dtype=torch.float32, device=device))
        self.top_k = torch.zeros(1, dtype=torch.int64, device=device)
        self.seed = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.set(SamplingParams())

    def set(self, params: SamplingParams, seeds: Sequence[int] | None = None) -> None:
        """Copies `params` in. `seeds`: one per batch row (mod 2^64), by default `params.seed + row`."""
        rows = self.seed.shape[0]
        seeds = [params.seed + row for row in range(rows)] if seeds is None else list(seeds)
        if len(seeds) != rows:
            raise ValueError(f"seeds has {len(seeds)} entries; allowed: {rows}; pass one per batch row")
        for row, seed in enumerate(seeds):
            self.seed.select(0, row).fill_((seed + 2**63) % 2**64 - 2**63)
        self.top_k.fill_(params.top_k)
        # In fp32 a tiny temperature must not become 0 (0 / 0), nor T g overflow where the choice is uniform
        # anyway.
        self.temperature.fill_(
            min(max(params.temperature, FP32_TINY), 1e30) if params.temperature > 0 else 0.0
        )
        for name in ("top_p", "min_p", *PENALTIES):
            getattr(self, name).fill_(getattr(params, name))


def _mix(x: torch.Tensor, key: torch.Tensor | int = 0) -> torch.Tensor:
    """Overwrites x, 32-bit values in int64, by their image under a bijection that `key` selects."""
    x.bitwise_xor_(x >> 16).mul_(MIX_A).bitwise_and_(MASK)
    x.bitwise_xor_(x >> 15).bitwise_xor_(key).mul_(MIX_B).bitwise_and_(MASK)
    return x.bitwise_xor_(x >> 16)


def hash_ids(token_ids: torch.Tensor) -> torch.Tensor:
    """The part of the noise that token ids alone decide, for steps to share: pass it with `hashed=True`."""
    return _mix(token_ids & MASK)


def noise_bits(
    seed: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, hashed: bool = False
) -> torch.Tensor:
    """32 random bits per (seed, position, token id): int64 [B,P,K] in [0, 2^32). Arguments as `gumbel_noise`.

    A counter-based hash in int64 alone: the same bits on every device, compiled or not. For a given low half
    of the seed the two key words are a bijection of (high half, position). Per element only one finalizer
    runs.
    """
    first, second = _keys(seed, positions) if seed.is_cuda else _keys_on_host(seed, positions).unbind(0)
    hashes = token_ids if hashed else hash_ids(token_ids)
    return _mix(hashes ^ first.unsqueeze(-1), second.unsqueeze(-1))


def _keys(seed: torch.Tensor, positions: torch.Tensor, mix=_mix) -> tuple[torch.Tensor, torch.Tensor]:
    """The two key words of seed [B] at positions [B,P]; `mix` may be of integers, seed and positions then too."""
    seed = seed.unsqueeze(1) if isinstance(seed, torch.Tensor) else seed
    low = mix(seed & MASK ^ 0x9E3779B9)
    high = mix(seed >> 32 & MASK ^ low)
    first = mix(mix(positions + low & MASK) ^ high)
    return first, mix(first + high & MASK ^ low)


def _mix_int(x: int) -> int:
    x = (x ^ x >> 16) * MIX_A & MASK
    x = (x ^ x >> 15) * MIX_B & MASK
    return x ^ x >> 16


@torch.library.custom_op("eaglet::noise_keys", mutates_args=(), device_types="cpu")
def _keys_on_host(seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`_keys` [2,B,P] for the CPU, which may look at values: sixty calls on a few numbers cost more than the noise."""
    rows = zip(seed.tolist(), positions.expand(seed.shape[0], -1).tolist(), strict=True)
    keys = [[_keys(s, p, _mix_int) for p in row] for s, row in rows]
    return torch.tensor(keys, dtype=torch.int64).permute(2, 0, 1).contiguous()


@_keys_on_host.register_fake
def _(seed, positions):
    return seed.new_empty(2, seed.shape[0], positions.shape[1])


def gumbel_noise(
    seed: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, hashed: bool = False
) -> torch.Tensor:
    """Standard Gumbel noise, fp32 [B,P,K]: a pure function of (seed, position mod 2^32, token id mod 2^32).

    seed [B], positions [B,P], token_ids (the target's) [K], [B,1,K] or [B,P,K]: int64; hashed: they went
    through `hash_ids` before. The bits below are equal everywhere, the floats per device and build. Always
    finite, from -2.82 to 22.88: small v, whose large noise decides, keeps all its bits; at the other end fp32
    would round v up to 1.
    """
    bits = noise_bits(seed, positions, token_ids, hashed)
    v = bits.float().add_(0.5).mul_(2.0**-32).clamp_max_(1 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()


def apply_penalties(
    logits: torch.Tensor,
    seen: torch.Tensor,
    counts: torch.Tensor,
    path_tokens: torch.Tensor,
    path_valid: torch.Tensor,
    state: SamplingState,
) -> torch.Tensor:
    """Logits [B,N,V] after repetition, presence and frequency penalties; every node has its own history.

    seen [B,V] bool or int: occurs in prompt or output. counts [B,V] int: times generated. path_tokens [B,N,P]
    int64, path_valid [B,N,P] bool: generated tokens, root to node, that seen and counts do not hold yet.
    Repetition as in transformers (negative logits times r, others divided by r, once per token, prompt
    included); presence and frequency as in OpenAI's API (generated tokens only: presence once, frequency per
    occurrence, subtracted).
    """

    def penalise(z: torch.Tensor, seen: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        repeated = torch.where(z < 0, z * state.repetition_penalty, z / state.repetition_penalty)
        minus = state.presence_penalty * (counts > 0) + state.frequency_penalty * counts
        return torch.where(seen, repeated, z) - minus

    B, N, V = logits.shape
    tokens = path_tokens.clamp(0, V - 1)
    seen, counts = (seen != 0).unsqueeze(1).expand(B, N, V), counts.unsqueeze(1).expand(B, N, V)
    # Every path entry, valid or not, rewrites its token from the raw logit: duplicates write equal values.
    on_path = ((tokens.unsqueeze(-1) == tokens.unsqueeze(-2)) & path_valid.unsqueeze(-2)).sum(-1)
    seen_there, counts_there = seen.gather(-1, tokens) | (on_path > 0), counts.gather(-1, tokens) + on_path
    values = penalise(logits.gather(-1, tokens), seen_there, counts_there)
    return penalise(logits, seen, counts).scatter(-1, tokens, values)


def _weight(z: torch.Tensor, top: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Unnormalised probabilities in steps of 2^-30, int64: their sums do not depend on order or batch."""
    return (z - top).div_(temperature).exp_().mul_(2.0**30).long()


def _mass_target(total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The least integer mass >= top_p * total (at least 1); more than there is when top_p is off."""
    return torch.where(top_p < 1, (top_p.double() * total).ceil().long().clamp_min(1), total + 1)


def _heaviest(image: torch.Tensor, weight: torch.Tensor | None, target: torch.Tensor) -> torch.Tensor:
    """Greatest int32 t [...,1] for which the weights (None: ones) of {image >= t} sum to `target` or more.

    A radix search, 4 bits per pass: compiled, its 15 sums share one read of the row. -2^31 if there is no
    such t.
    """

    def enough(t: torch.Tensor) -> torch.Tensor:
        if weight is None:
            return (image >= t).sum(-1, keepdim=True, dtype=torch.int32) >= target
        return torch.where(image >= t, weight, 0).sum(-1, keepdim=True) >= target

    t = torch.where(enough(torch.zeros_like(image.narrow(-1, 0, 1))), 0, -(2**31)).int()
    for shift in (27, 23, 19, 15, 11, 7, 3, 0):
        digits = range(1, 16 if shift else 8)
        t = t + (sum(enough(t + (digit << shift)).int() for digit in digits) << shift)
    return t


def _cutoff_search(
    z: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """`_cutoff` with fixed shapes and no host reads, for the GPU."""
    bits = z.view(torch.int32)
    image = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # ordered like the floats
    by_count = _heaviest(image, None, torch.where(top_k > 0, top_k, z.shape[-1] + 1))
    weight = torch.where(image >= by_count, _weight(z, z.amax(-1, keepdim=True), temperature), 0)
    by_mass = _heaviest(image, weight, _mass_target(weight.sum(-1, keepdim=True), top_p))
    t = torch.maximum(by_count, by_mass).clamp_min(-0x7F800000)  # the image of -FP32_MAX
    return torch.where(t < 0, t ^ 0x7FFFFFFF, t).view(torch.float32)


def _largest(rows: torch.Tensor, width: int) -> torch.Tensor:
    """The `width` largest of each row, descending: they lie in the `width` groups of 8 with the largest maxima."""
    R, V = rows.shape
    if width * 8 < V and V % 8 == 0:
        groups = rows.view(R, 8, V // 8)
        best = groups.amax(1).topk(width, sorted=False).indices
        rows = groups.gather(2, best.unsqueeze(1).expand(R, 8, width)).view(R, 8 * width)
    return rows.topk(width).values if width < V else rows.sort(-1, descending=True).values


@torch.library.custom_op("eaglet::cutoff", mutates_args=(), device_types="cpu")
def _cutoff(
    z: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """The least logit [...,1] that top-k, then top-p keep; for the CPU, which may look at values.

    The answer is nearly always among the largest few logits; only rows where it is not look at more.
    """
    V, rows = z.shape[-1], z.reshape(-1, z.shape[-1])
    k, use_p = min(int(top_k) or V, V), float(top_p) < 1
    cut = torch.full_like(rows[:, :1], -FP32_MAX)
    todo = torch.arange(len(cut) if use_p or k < V else 0)
    for width in sorted({min(64, V), min(512, V), V}):
        if len(todo) == 0 or width < k < V:
            continue
        part = rows if len(todo) == len(cut) else rows[todo]
        values = _largest(part, width)
        least = values[:, k - 1 : k] if k < V else torch.full_like(values[:, :1], -FP32_MAX)
        inside = torch.ones_like(todo, dtype=torch.bool)
        if use_p:
            weight = _weight(values, values[:, :1], temperature).masked_fill_(values < least, 0)
            total = weight.sum(-1, keepdim=True)
            if width < V and bool((values[:, -1:] >= least).any()):  # top-k may keep more than these
                everything = _weight(part, values[:, :1], temperature)
                everything = everything if k == V else everything.masked_fill_(part < least, 0)
                total = everything.sum(-1, keepdim=True)
            kept = (weight.cumsum(-1) - weight < _mass_target(total, top_p)).sum(-1, keepdim=True)
            least = torch.maximum(least, values.gather(-1, (kept - 1).clamp_min(0)))
            inside = kept[:, 0] < width
        cut[todo] = least.clamp_min(-FP32_MAX)
        todo = todo[~inside]
    return cut.view(*z.shape[:-1], 1)


@_cutoff.register_fake
def _(z, temperature, top_k, top_p):
    return z.new_empty((*z.shape[:-1], 1))


def survivors(logits: torch.Tensor, state: SamplingState) -> torch.Tensor:
    """Which tokens [...,V] temperature, top-k, top-p (of what top-k left) and min-p keep, as transformers.

    They are all logits >= one threshold, so ties share their fate: top-k keeps every tie of the k-th largest,
    top-p every tie of the token that reaches the mass. The greatest logit always survives, -inf never; top_k
    0, top_p 1, min_p 0 remove nothing. Rows with NaN: see `finite`. Masses are integer sums: a row's result
    is its own.
    """
    z = logits.float().contiguous()
    top = z.amax(-1, keepdim=True)
    find = _cutoff_search if z.is_cuda else _cutoff
    cut = find(z, state.temperature, state.top_k, state.top_p)
    cut = torch.maximum(cut, top + state.temperature * state.min_p.log())
    return z >= torch.minimum(cut, top)


def finite(logits: torch.Tensor) -> torch.Tensor:
    """Bool [...]: the row has no NaN, no +inf and not only -inf. Where False, `choose` means nothing."""
    return logits.amax(-1).isfinite()


def _argmax(x: torch.Tensor) -> torch.Tensor:
    """Index of the last axis' maximum, ties to the lowest id, as torch.max documents; in blocks on a CPU."""
    V = x.shape[-1]
    if x.is_cuda or V % 64:
        return x.argmax(-1)
    blocks = x.unflatten(-1, (V // 64, 64))
    block = blocks.amax(-1).argmax(-1, keepdim=True)
    inside = blocks.gather(-2, block.unsqueeze(-1).expand(*block.shape, 64)).argmax(-1)
    return (block * 64 + inside).squeeze(-1)


def choose(
    logits: torch.Tensor, noise: torch.Tensor | None, state: SamplingState, mode: SamplingMode
) -> torch.Tensor:
    """The target's token after each node, int64 [B,N]: argmax of z + T g over survivors, ties to lowest id.

    logits [B,N,V]: penalised, before temperature. noise [B,N,V] for the position after each node; greedy if
    it is None or mode.sample is False.
    """
    if noise is None or not mode.sample:
        return _argmax(logits)
    keys = logits + state.temperature * noise
    return _argmax(torch.where(survivors(logits, state), keys, -math.inf) if mode.filters else keys)


def draft_keys(
    draft_logits: torch.Tensor, noise: torch.Tensor | None, state: SamplingState, mode: SamplingMode
) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys, scores), each [B,W,K]: a node's children are its largest keys; dynamic trees add up scores.

    With noise, looked up by target ids: keys z + T g, scores log_softmax((z + T g) / max(T, 0.5)) over
    survivors; removed tokens follow by raw log-probability. Without noise or sampling, or with one survivor:
    z and log_softmax(z), as greedy. NaN logits become -inf in both.
    """
    z = torch.where(draft_logits.isnan(), -math.inf, draft_logits)
    raw = z.log_softmax(-1)
    keys, scores = z, raw
    if noise is not None and mode.sample:
        keys = z + state.temperature * noise
        softer = state.temperature.clamp_min(0.5)
        if mode.filters:
            alive = survivors(z, state)
            scores = torch.where(alive, keys / softer, -math.inf).log_softmax(-1)
            # raw <= log(1/2) for removed tokens, as a likelier one survived: strictly below every survivor
            keys, scores = (
                torch.where(alive, x, torch.where(alive, x, math.inf).amin(-1, keepdim=True) + raw)
                for x in (keys, scores)
            )
            alone = alive.sum(-1, keepdim=True) == 1
            keys, scores = torch.where(alone, z, keys), torch.where(alone, raw, scores)
        else:
            scores = (keys / softer).log_softmax(-1)
    dead = draft_logits.isnan() | scores.isnan()
    return keys.masked_fill(dead, -math.inf), scores.masked_fill(dead, -math.inf)


def probabilities(logits: torch.Tensor, state: SamplingState, mode: SamplingMode) -> torch.Tensor:
    """The distribution [...,V] that `choose` samples: softmax(z / T) of the survivors; greedy: the argmax."""
    if not mode.sample:
        return torch.zeros_like(logits).scatter_(-1, _argmax(logits)[..., None], 1.0)
    if mode.filters:
        logits = torch.where(survivors(logits, state), logits, -math.inf)
    return (logits / state.temperature).softmax(-1)


def stream(seed: torch.Tensor, which: int) -> torch.Tensor:
    """Seeds [B] of another, independent noise stream (multi-round verification needs three more)."""
    return _mix((seed & MASK) ^ (0x51ED2701 * which & MASK)) | (seed & ~MASK)


def uniform_noise(seed: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Uniforms in [0, 1), fp32 [B,P,K], keyed like `gumbel_noise`: 24 of the 32 bits, so 1 is not reached."""
    return (noise_bits(seed, positions, ids) >> 8).float() * 2.0**-24
