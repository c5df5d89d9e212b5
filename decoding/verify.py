"""Which drafted tokens a step accepts: by following the model's own choices, or by the paper's multi-round rule.

Both are pure functions of tensors with fixed shapes. They take their randomness as arguments and never read a value
back to the host. Shape letters: B batch, N nodes, D depth, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize

import kernels
from kernels.records import Accepted
from tree import TreeTables


@kernels.operation(
    "accept", "commit", kernels.commit.accept, kernels.commit.accept_shapes,
    cpu=lambda *args: torch.ops.eaglet_cpu.accept.default(*(t.contiguous() for t in args[:-1]), args[-1]),
)  # fmt: skip
def accept(
    tokens: Tensor, parent: Tensor, depth: Tensor, ancestors: Tensor, valid: Tensor, choice: Tensor, D: int
) -> Accepted:
    """Follow the target's own choices from the root, as long as they are in the tree.

    ok[i] = valid[i] and tokens[i] == choice[parent[i]] and ok[parent[i]]. The deepest ok node wins, the lowest of equals.
    tokens, parent, depth and choice are [B, N], valid is [B, N] bool, ancestors is [B, N, N] bool, and D >= depth.
    Siblings may repeat a token only if the choice depends on a node's token path alone, as position-keyed noise does;
    otherwise the search for the deepest copy would bias the output.
    """
    N = tokens.shape[1]
    node = torch.arange(N, device=tokens.device)
    match = (valid & (tokens == choice.gather(1, parent))) | (node == 0)
    ok = (match[:, None] | ~ancestors).all(-1)
    last = depth.where(ok, -1).argmax(1, keepdim=True)  # argmax returns the first of equals
    length = depth.gather(1, last)
    on_path = ancestors.gather(1, last[..., None].expand(-1, 1, N))
    level = torch.arange(D + 1, device=tokens.device)
    path = ((depth[:, None] == level[:, None]) & on_path).mul(node).sum(-1).where(level <= length, last)
    emitted = choice.gather(1, path)
    return Accepted(path, length.squeeze(1) + 1, choice.gather(1, last).squeeze(1), emitted)


def multi_round(
    tokens: Tensor, tables: TreeTables, p: Tensor, q: Tensor, u: Tensor, noise: Tensor, replacement: bool
) -> Accepted:
    """Algorithm 1 of the EAGLE paper on static trees. On a chain it is the rule of Leviathan et al. and Chen et al.

    The children of a node were drawn from the draft's distribution q. They are tried in the order of drawing: a child is
    accepted with probability min(1, p / q'), and on rejection p becomes norm(max(0, p - q')). With replacement q' is q.
    Without it, q' is q with the earlier siblings zeroed and renormalised, as EAGLE-1 drafts. The bonus is drawn from the
    p that is left. Children with q' = 0 (drawn after the last possible token) or valid False are skipped.

    Args:
        tokens: int64 [B, N].
        p: [B, N, V], the target's processed probabilities after each node.
        q: [B, run_rows, V], the draft's by run row, processed in the same way.
        u: [B, N], one uniform number in [0, 1) per node.
        noise: [B, V], Gumbel noise for the bonus. The draws of children, u and noise must be independent.
        replacement: whether siblings were drawn with replacement.
    """
    path, count, distribution = multi_round_walk(tokens, tables, p, q, u, replacement)
    bonus = (distribution.log() + noise).argmax(-1)
    drafted = tokens.gather(1, path).roll(-1, 1)
    level = torch.arange(tables.D + 1, device=tokens.device)
    return Accepted(path, count, bonus, drafted.where(level < count[:, None] - 1, bonus[:, None]))


def multi_round_walk(
    tokens: Tensor, tables: TreeTables, p: Tensor, q: Tensor, u: Tensor, replacement: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The accepted path [B, D + 1], the count [B], and the distribution [B, V] that the bonus is drawn from."""
    b = torch.arange(len(p), device=p.device)
    node = torch.zeros_like(tokens[:, 0])
    distribution = p[:, 0]
    walking = torch.ones_like(node, dtype=torch.bool)
    path = [node]
    for width in tables.branching:
        children = tables.children[b, node]
        left = q[b, tables.source_row[b, children[:, 0]]]
        here = node
        moved = torch.zeros_like(walking)
        for child in children[:, :width].unbind(1):
            x = tokens[b, child]
            px, qx = distribution[b, x], left[b, x]
            tried = walking & ~moved & (child > 0) & tables.valid[b, child] & (qx > 0)
            taken = tried & ((px >= qx) | (u[b, child] * qx < px))
            residual = (distribution - left).clamp(min=0)
            # An empty residual means p = q', which is never rejected. If it occurs it is rounding, and p stays.
            replace = (tried & ~taken & (residual > 0).any(-1))[:, None]
            distribution = torch.where(replace, normalize(residual, p=1, dim=-1, eps=1e-30), distribution)
            if not replacement:
                left = normalize(left.scatter(1, x[:, None], 0), p=1, dim=-1, eps=1e-30)
            here = torch.where(taken, child, here)
            moved = moved | taken
        node, walking = here, moved
        distribution = torch.where(moved[:, None], p[b, node], distribution)
        path.append(node)
    return torch.stack(path, 1), tables.depth[b, node] + 1, distribution
