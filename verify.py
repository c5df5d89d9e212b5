"""TODO."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from tree import TreeTables


class Accepted(NamedTuple):
    """What a step emits: count = accepted drafted tokens + the bonus token."""

    path: Tensor  # [B, D+1] node ids from the root, padded with the last accepted node
    count: Tensor  # [B] in 1..D+1
    bonus: Tensor  # [B] the next root
    emitted: Tensor  # [B, D+1] accepted tokens, then the bonus, which also pads


def accept(
    tokens: Tensor, parent: Tensor, depth: Tensor, ancestors: Tensor, valid: Tensor, choice: Tensor, D: int
) -> Accepted:
    """Choice-and-walk: follow the target's own choices for as long as the tree holds them.

    ok[i] = valid[i] and tokens[i] == choice[parent[i]] and ok[parent[i]]; the deepest ok node wins, of equals
    the lowest. tokens, parent, depth, choice [B, N], valid [B, N] bool, ancestors [B, N, N] bool, D >= depth.
    If siblings may repeat a token, choice must depend on a node's token path alone (position-keyed noise
    does), or the search for the deepest copy would bias the output."""
    N = tokens.shape[1]
    node = torch.arange(N, device=tokens.device)
    match = (valid & (tokens == choice.gather(1, parent))) | (node == 0)
    ok = (match[:, None] | ~ancestors).all(-1)
    last = depth.where(ok, -1).argmax(1, keepdim=True)  # argmax gives the first of equals
    length = depth.gather(1, last)
    on_path = ancestors.gather(1, last[..., None].expand(-1, 1, N))
    level = torch.arange(D + 1, device=tokens.device)
    path = ((depth[:, None] == level[:, None]) & on_path).mul(node).sum(-1).where(level <= length, last)
    emitted = choice.gather(1, path)
    return Accepted(path, length.squeeze(1) + 1, choice.gather(1, last).squeeze(1), emitted)


def multi_round(
    tokens: Tensor, tables: TreeTables, p: Tensor, q: Tensor, u: Tensor, noise: Tensor, replacement: bool
) -> Accepted:
    """Algorithm 1 of the EAGLE paper on static trees; on a chain the rule of Leviathan et al. and Chen et al.

    A node's children, drawn from the draft distribution q, are tried in drawn order: accepted with
    probability min(1, p/q'); on rejection p becomes norm(max(0, p - q')). q' is q itself with replacement;
    without, q with the earlier siblings zeroed, renormalised (as EAGLE-1 drafts). The bonus comes from the p left.

    tokens [B, N]; p [B, N, V] processed target probabilities after each node; q [B, run_rows, V] the draft's,
    by run row, processed the same way; u [B, N] uniforms in [0, 1), one per node; noise [B, V] Gumbel, for
    the bonus. Draws of children, u and noise must be independent. Children with q' = 0 (drawn after the last
    possible token) or valid False are skipped."""
    path, count, law = _multi_round_walk(tokens, tables, p, q, u, replacement)
    bonus = (law.log() + noise).argmax(-1)
    drafted = tokens.gather(1, path).roll(-1, 1)
    level = torch.arange(tables.D + 1, device=tokens.device)
    return Accepted(path, count, bonus, drafted.where(level < count[:, None] - 1, bonus[:, None]))


def _multi_round_walk(
    tokens: Tensor, tables: TreeTables, p: Tensor, q: Tensor, u: Tensor, replacement: bool
) -> tuple[Tensor, Tensor, Tensor]:
    # The accepted path [B, D+1], count [B] and the distribution [B, V] that the bonus is drawn from.
    B, N, V = p.shape
    if tokens.shape != (B, N) or tables.N != N or q.shape != (B, tables.run_rows, V):
        want = f"p [B, {tables.N}, V] and q [B, {tables.run_rows}, V]"
        raise ValueError(f"multi-round: the tree needs {want}, got {tuple(p.shape)} and {tuple(q.shape)}")
    b, node = torch.arange(B, device=p.device), torch.zeros_like(tokens[:, 0])
    law, walking, path = p[:, 0], torch.ones_like(node, dtype=torch.bool), [node]
    for width in tables.branching:
        children = tables.children[b, node]
        left = q[b, tables.source_row[b, children[:, 0]]]
        here, moved = node, torch.zeros_like(walking)
        for child in children[:, :width].unbind(1):
            x = tokens[b, child]
            px, qx = law[b, x], left[b, x]
            tried = walking & ~moved & (child > 0) & tables.valid[b, child] & (qx > 0)
            taken = tried & ((px >= qx) | (u[b, child] * qx < px))
            # No residual at all can only be rounding (then p = q', which is never rejected): keep p.
            residual = (law - left).clamp(min=0)
            replace = (tried & ~taken & (residual > 0).any(-1))[:, None]
            law = torch.where(replace, normalize(residual, p=1, dim=-1, eps=1e-30), law)
            if not replacement:
                left = normalize(left.scatter(1, x[:, None], 0), p=1, dim=-1, eps=1e-30)
            here, moved = torch.where(taken, child, here), moved | taken
        node, walking = here, moved
        law = torch.where(moved[:, None], p[b, node], law)
        path.append(node)
    return torch.stack(path, 1), tables.depth[b, node] + 1, law
