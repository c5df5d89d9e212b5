"""What EAGLE-1 and EAGLE-3 heads learn from: the target's features, and losses, summed over chunks of rows.

The target's features may be kept on disk, so that only the first epoch runs the target. A logit for every token of the
vocabulary, and for every row of a batch, takes far more memory than all weights of a head. So the loss of a chunk of rows
and its gradients are computed together, and the logits of one chunk exist at a time. Products gain from many rows, and
what is computed from logit to logit gains from few rows, which stay in the caches of a CPU. So a chunk has blocks.
"""

import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from drafters.heads import DraftHead
from eagle_draft import EagleHead
from support.machine import size_text
from training.data import Batch, TokenData, padded

DECAY = 0.8  # of the weight of a loss, from one step on the head's own outputs to the next
CHUNK = 1 << 24  # logits of a chunk at most, which one product computes
BLOCK = 1 << 19  # of these, whose losses a CPU computes together: so many stay in the caches of a core


class TargetRows(NamedTuple):
    """What the target computed for a batch of tokens [B, T]."""

    hidden_states: Tensor  # [B, T, H], what its LM head reads
    features: Tensor  # [B, T, F], what the draft head reads
    best: Tensor | None = None  # int64 [B, T], its most likely next tokens; None: not computed


@torch.no_grad()
def target_rows(head: DraftHead, tokens: Tensor) -> TargetRows:
    """What the head's target computes for tokens [B, T]."""
    hidden_states, taps = head.target.forward_train(tokens, head.config.taps)
    return TargetRows(hidden_states, (hidden_states if taps is None else taps).to(head.fc.weight.dtype))


def _file_tensor(path: Path, count: int, dtype: torch.dtype) -> Tensor:
    """A tensor that lives in a file. What the file lacks are zeros."""
    with open(path, "ab") as file:  # torch itself would overwrite the first byte of a file that has to grow
        file.truncate(max(path.stat().st_size, count * dtype.itemsize))
    return torch.from_file(str(path), True, count, dtype=dtype)


def feature_bytes(tokens: float, hidden_size: int, taps_size: int) -> float:
    """What `KeptFeatures` of so many tokens take on the disk."""
    return tokens * (2 * (hidden_size + taps_size) + 12)


class KeptFeatures:
    """Hidden states and features in bfloat16, and the most likely next tokens, for every token of the training data.

    The place of a text is filled when a batch needs it for the first time. Files of an earlier run are used further, as
    far as its checksum says that it is what was written, for the same tokens. So data may grow at its end.
    """

    def __init__(self, path: Path, data: TokenData, hidden_size: int, taps_size: int):
        """`taps_size` is the width of features that are not the hidden states themselves, or 0 where they are.

        Raises ValueError if the data is one stream, whose windows never come again, or if the disk has no room.
        """
        if data.stream:
            raise ValueError("--keep-features needs conversations: windows of plain text are never the same again.")
        tokens, width = len(data.ids), hidden_size + taps_size
        held = path.stat().st_size / (2 * width) if path.exists() else 0  # tokens; they had room when they were added
        needed = feature_bytes(tokens - held, hidden_size, taps_size)
        free = shutil.disk_usage(path.parent).free
        if needed > free:
            where = f"{size_text(needed)} in {path.parent}, where {size_text(free)} are free"
            raise ValueError(f"--keep-features needs {where}; train without it, or with less --data.")
        self.hidden_size = hidden_size
        self.tokens = data.ids
        self.values = _file_tensor(path, tokens * width, torch.bfloat16).view(tokens, width)
        self.best = _file_tensor(path.with_suffix(".ids"), tokens, torch.int32)
        # A row's checksum lies where its first token does. A new file is all zeros: nothing is filled yet.
        self.sums = _file_tensor(path.with_suffix(".sums"), tokens, torch.int64)
        self.filled: set[int] = set()  # first tokens of the rows that were filled or compared by this process

    def _checksum(self, place: slice) -> int:
        """Of a filled row; never zero."""
        first = zlib.crc32(self.tokens[place].tobytes())
        first = zlib.crc32(self.values[place].view(torch.uint8).numpy(), first)
        return 1 << 32 | zlib.crc32(self.best[place].view(torch.uint8).numpy(), first)

    def _has(self, place: slice) -> bool:
        """Whether a row is filled."""
        if place.start not in self.filled and self.sums[place.start] == self._checksum(place):
            self.filled.add(place.start)
        return place.start in self.filled

    @torch.no_grad()
    def of(self, batch: Batch, head: DraftHead) -> TargetRows:
        """What the target computes for a batch [B, T], on its device: features in float32, and zeros for the padding. The
        target of the head runs if a row is not filled yet."""
        if not all(map(self._has, batch.places)):
            rows = target_rows(head, batch.tokens)
            for hidden_states, features, place, length in zip(*rows[:2], batch.places, batch.lengths, strict=True):
                self.values[place, : self.hidden_size] = hidden_states[:length]
                if self.values.shape[1] > self.hidden_size:
                    self.values[place, self.hidden_size :] = features[:length]
                self.best[place] = head.target.logits(hidden_states[:length]).argmax(-1).int()
                self.sums[place.start] = self._checksum(place)
                self.filled.add(place.start)
        parts = ([kept[place] for place in batch.places] for kept in (self.values, self.best))
        values, best = (padded(rows, batch.tokens.shape[1]).to(batch.tokens.device) for rows in parts)
        hidden_states, taps = values.float().tensor_split([self.hidden_size], -1)
        features = taps if taps.shape[-1] else hidden_states
        return TargetRows(hidden_states.to(head.target.dtype), features, best.long())


# ---- losses -----------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """The outputs of one step of a head in a chunk, and what the target computed for the same rows."""

    output: Tensor  # [M, H] of the head
    logits: Tensor  # [M, Vd] of the head
    truth: Tensor  # [M, H], the target's hidden states
    distribution: Tensor  # [M, Vd], the target's p over the draft vocabulary
    which: Tensor  # int64 [M], their numbers among the rows of the target
    noise: Tensor | None = None  # [M, Vd], Gumbel noise, which a row of the target has in all steps
    drawn: Tensor | None = None  # int64 [M], the tokens that the target draws with it


def loss_eagle(
    head: EagleHead, batch: Batch, target: TargetRows, steps: int, count: float, loss: Callable[[Rows], Tensor],
    noise: Tensor | None = None, row_share: float = 1.0, generator: torch.Generator | None = None,
    draws: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loss of a head that runs on the target's features and then, in more than one step, on its own outputs.

    EAGLE-1 has one step (EAGLE, section 3.2). With more, it runs on its own outputs as it does when it drafts (HASS,
    section 3.2), with the attention of EAGLE-3's training-time test (EAGLE-3, section 3.2).

    Args:
        batch: its tokens are those that the head is shown. Row i of step s sees (feature i or the output of step s - 1,
            token i + 1 + s), and is compared with what the target computed at position i + 1 + s. It counts where the
            mask holds for that token and, for EAGLE-3, the target's most likely token is in the draft vocabulary.
        target: what the target computed for the same rows.
        count: what the sums are divided by, so that parts of a batch add up to the whole: the rows of step 0.
        loss: of the rows of a chunk, summed.
        noise: [B, T, H], added to the features that the head sees, or None.
        row_share: of the rows, which are drawn at random, whose logits are computed. They stand for all rows.
        generator: of the random numbers for `row_share`.
        draws: as for `in_chunks`.

    Returns:
        The loss, and by step [steps] the share of rows that agree with the target's most likely token. A token outside
        the draft vocabulary is a miss. One host sync per chunk and step.
    """
    keep = batch.mask[:, 1:].bool()
    if row_share < 1:
        drawn = torch.rand(int(keep.sum()), generator=generator, device=keep.device) < row_share
        keep, count = keep.masked_scatter(keep, drawn), count * row_share
    features = target.features if noise is None else target.features + noise
    first = head.config.version == 1
    memory = None if first and steps == 1 else []
    outputs = [*_on_own_outputs(head, batch.tokens, head.fuse(features[:, :-1]), keep, steps, memory)]
    best = None if target.best is None else target.best[:, 1:][keep]
    truth, block = target.hidden_states[:, 1:][keep], None if keep.is_cuda else BLOCK
    total, hits = in_chunks(head, head.narrow_logits, outputs, truth, best, loss, first, DECAY, draws, block)
    return total / count, hits / count


def loss_eagle1(rows: Rows, weights: tuple[float, float] = (1.0, 0.1)) -> Tensor:
    """EAGLE-1's objective: smooth L1 to the true feature plus 0.1 times the soft cross-entropy (EAGLE, section 3.2)."""
    wide = rows.distribution.dtype
    regression = F.smooth_l1_loss(rows.output.to(wide), rows.truth.to(wide), reduction="none").mean(-1).sum()
    return weights[0] * regression + weights[1] * soft_loss(rows)


def soft_loss(rows: Rows) -> Tensor:
    """The cross-entropy of a head with the target's distribution, EAGLE-3's objective. It has the gradients of the
    KL divergence."""
    return F.cross_entropy(rows.logits, rows.distribution, reduction="sum")


def overlap(rows: Rows) -> Tensor:
    """Of each row sum(min(p, q)), how often a token that the head draws is accepted. Its gradients reach the head."""
    return torch.minimum(rows.logits.softmax(-1), rows.distribution).sum(-1)


def with_noise(loss: Tensor, rows: Rows, share: float) -> Tensor:
    """A loss of these rows, of whose weight `noise_loss` has taken a share."""
    return loss * (1 - share) + noise_loss(rows) * share if share else loss


def noise_loss(rows: Rows) -> Tensor:
    """How well a head guesses the token that the target draws, if it sees the target's random numbers.

    With Gumbel noise g the target draws argmax(log p + g), and the draft is argmax(logits + g). The loss is the
    cross-entropy of softmax(logits + g) for the drawn token, summed over the rows. A head that knows less than the target
    has a flatter distribution. It drafts best with less noise than the target draws with, and this loss teaches it that.
    """
    return F.cross_entropy(rows.logits + rows.noise, rows.drawn, reduction="sum")


@torch.no_grad()
def gumbel_draws(distribution: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Gumbel noise [M, Vd], and the tokens [M] that are drawn with it from distributions [M, Vd]."""
    # torch's own exponential noise takes seven times as long
    waits = torch.empty_like(distribution).uniform_(1e-12, 1, generator=generator).log_().neg_().clamp_(min=1e-9)
    drawn = (distribution / waits).argmax(-1)
    return waits.log_().neg_(), drawn


def _on_own_outputs(
    head: EagleHead, tokens: Tensor, feature: Tensor, keep: Tensor, steps: int, memory: list | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Run a head on `feature` [B, T - 1, H], and then on its own outputs, with the tokens [B, T] of the text.

    `keep` [B, T - 1] says which tokens count. Yields of every step the outputs of the rows whose token counts, and the
    number of that token among all that count. The last rows run out of known tokens.
    """
    where = keep.flatten().cumsum(0).view_as(keep) - 1
    for s in range(steps):
        feature = head.forward_train(F.pad(tokens, (0, s))[:, 1 + s :], feature, s, memory)
        counted = keep[:, s:]
        yield feature[:, : counted.shape[1]][counted], where[:, s:][counted]


@torch.no_grad()
def draft_targets(head: DraftHead, hidden_states: Tensor, best: Tensor | None) -> tuple[Tensor, Tensor]:
    """What a head in training shall draft after hidden_states [M, H] of the target: the target's logits of the draft
    vocabulary [M, Vd], in any dtype, and the place of its most likely token there [M], -1 for a token outside.

    `best` [M] is the most likely token where it is known already. `head.target_head` are the rows of the target's LM head
    that the draft vocabulary has, or None.
    """
    if best is None or head.target_head is None:
        logits = head.target.logits(hidden_states)
        best = logits.argmax(-1) if best is None else best
        logits = logits if head.draft_ids is None else logits[:, head.draft_ids]
    else:  # only the rows of the draft vocabulary are needed
        logits = head.target.scaled(F.linear(hidden_states.to(head.target.dtype), head.target_head))
    if head.draft_ids is not None:
        places = torch.full((head.target.config.vocab_size,), -1, device=best.device)
        places[head.draft_ids] = torch.arange(head.vocab_size, device=best.device)
        best = places[best]
    return logits, best


def in_chunks(
    head: DraftHead, predict: Callable[[Tensor], Tensor], outputs: list[tuple[Tensor, Tensor]], truth: Tensor,
    best: Tensor | None, loss: Callable[[Rows], Tensor], outside: bool, decay: float,
    draws: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None, block: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The sum of decay^s * loss(rows of step s), and by step the number of rows that agree with the target.

    Args:
        predict: the head's logits [M, Vd] of outputs [M, H], in any dtype.
        outputs: of every step the head's outputs [M_s, H], and the numbers [M_s] of their rows in `truth`, ascending.
        truth: [M, H], the target's hidden states.
        best: int64 [M], the target's most likely tokens, if they are known.
        outside: whether rows count whose most likely token is outside the draft vocabulary.
        draws: `gumbel_draws`, for a loss that needs them.
        block: logits whose losses are computed together; None: those of a chunk.
    """
    size, part = (max(1, count // head.vocab_size) for count in (CHUNK, block or CHUNK))
    ends = rows_of_chunks([which for _, which in outputs], len(truth), size)
    hits = truth.new_zeros(len(outputs), dtype=torch.float64)
    weights = [p for p in head.parameters() if p.requires_grad]

    def judge(chunk: int, parts: list[Tensor]) -> Tensor:
        rows = slice(chunk * size, (chunk + 1) * size)
        targets, wanted = draft_targets(head, truth[rows], None if best is None else best[rows])
        wide = torch.promote_types(targets.dtype, torch.float32)
        judged, numbers = [], []
        for output, (_, which), end in zip(parts, outputs, ends, strict=True):
            which = which[end[chunk] : end[chunk + 1]] - rows.start
            counted = slice(None) if outside else wanted[which] >= 0
            judged.append(output[counted])
            numbers.append(which[counted])
        logits = predict(torch.cat(judged)).split([len(output) for output in judged])
        places = rows_of_chunks(numbers, len(wanted), part)

        def judge_block(block: int, pieces: list[Tensor]) -> Tensor:
            first = block * part
            distribution = targets[first : first + part].to(wide).softmax(-1)
            noise = draws(distribution) if draws else ()
            total = distribution.new_zeros(())
            for s, (number, place) in enumerate(zip(numbers, places, strict=True)):
                own, output = pieces[s].to(wide), pieces[len(numbers) + s]
                which = number[place[block] : place[block + 1]]
                p, *drawn = (picked(values, which - first) for values in (distribution, *noise))
                at = which + rows.start
                total = total + decay**s * loss(Rows(output, own, truth[at], p, at, *drawn))
                agreed = own.gather(1, wanted[which, None].clamp(min=0))[:, 0] == own.amax(1)  # quicker than argmax
                hits[s] += (agreed & (wanted[which] >= 0)).sum()
            return total

        return _Chunks.apply(judge_block, places * 2, *logits, *judged, *weights)

    return _Chunks.apply(judge, ends, *(output for output, _ in outputs), *weights), hits


def rows_of_chunks(numbers: list[Tensor], count: int, size: int) -> list[list[int]]:
    """Where chunks of `size` out of `count` rows begin and end in ascending numbers of rows. Without a row there is one
    empty chunk."""
    edges = torch.arange(0, max(1, count) + size, size, device=numbers[0].device)
    return [torch.searchsorted(which, edges).tolist() for which in numbers]


def picked(values: Tensor, which: Tensor) -> Tensor:
    """Rows `which` of values, ascending, without a copy where these are all of them."""
    return values if len(which) == len(values) else values[which]


class _Chunks(torch.autograd.Function):
    """The sum of judge(chunk, its rows of every output) over all chunks. Its gradients are computed on the way."""

    @staticmethod
    def forward(ctx, judge: Callable, ends: list[list[int]], *tensors: Tensor) -> Tensor:
        outputs, weights = tensors[: len(ends)], tensors[len(ends) :]
        gradients: list[Tensor | None] = [torch.zeros_like(t) for t in outputs] + [None] * len(weights)
        total: Tensor | float = 0.0
        for chunk in range(len(ends[0]) - 1):
            places = [slice(end[chunk], end[chunk + 1]) for end in ends]
            parts = [out[place].detach().requires_grad_() for out, place in zip(outputs, places, strict=True)]
            with torch.enable_grad():
                value = judge(chunk, parts)
            total = total + value.detach()
            for i, gradient in enumerate(torch.autograd.grad(value, [*parts, *weights], allow_unused=True)):
                if gradient is None:  # this has no part in the loss
                    continue
                if i < len(parts):
                    gradients[i][places[i]] = gradient
                else:
                    gradients[i] = gradient if gradients[i] is None else gradients[i].add_(gradient)
        ctx.gradients = gradients
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # multiplied in place: new memory would take longer than that
        return None, None, *(None if g is None else g.mul_(upstream) for g in gradients)
