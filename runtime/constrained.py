"""Steps of requests with a grammar: between drafting and verification the host says what each node may be followed by.

The drafter does not know the grammar. Its tokens come down to the host, which writes the tokens that the grammar forces
into the tree, and sends up one bit per node and token. The choice of the target is then made among the allowed tokens, so
the text is the same with every drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from drafters.base import Draft, Drafter, StepParts
from model import Transformer
from runtime.grammar import Constraint, draft_forced
from runtime.runner import Runner
from sampling import SamplingMode
from step import DecodeState, StepOutput, draft_phase, verify_phase

Mark = Callable[[str], None] | None


class ConstrainedSteps:
    """Runs a step in two halves, each of which is a graph of its own where steps are captured."""

    def __init__(self, model: Transformer, state: DecodeState, runner: Runner, parts: StepParts):
        self.model = model
        self.state = state
        self.runner = runner
        self.parts = parts

    def capture(self, drafter: Drafter, mode: SamplingMode, mark: Mark = None) -> None:
        """Capture both halves, while all sequences are finished. mark: as in `step.decode_step`."""
        draft_key, verify_key = self._keys(drafter, mode)
        self.runner.capture(draft_key, partial(self._draft, drafter, mode, mark))
        if draft_key in self.runner.graphs:
            draft, noise = self.runner.graphs[draft_key][1]
            self.runner.capture(verify_key, partial(self._verify, drafter, mode, draft, noise, mark))

    def launch(
        self, drafter: Drafter, mode: SamplingMode, constraints: Sequence[Constraint | None] = (), mark: Mark = None
    ) -> StepOutput:
        """Run one step. Waits for the drafted tokens.

        constraints: one for each of the first rows; None, and rows beyond them: everything is allowed.
        mark: as in `step.decode_step`. The host's work counts as a part of verification.
        """
        draft_key, verify_key = self._keys(drafter, mode)
        draft, noise = self.runner.run(draft_key, partial(self._draft, drafter, mode, mark))
        self._constrain(draft, constraints, drafter.multi_round)
        return self.runner.launch(verify_key, partial(self._verify, drafter, mode, draft, noise, mark))

    def _keys(self, drafter: Drafter, mode: SamplingMode) -> tuple[tuple, tuple]:
        return (drafter.N, drafter.D, mode, "draft"), (drafter.N, drafter.D, mode, "verify")

    def _draft(self, drafter: Drafter, mode: SamplingMode, mark: Mark) -> tuple[Draft, Tensor | None]:
        if mark is not None:
            mark("start")
        drafted = draft_phase(drafter, self.state, mode, self.parts)
        if mark is not None:
            mark("draft")
        return drafted

    def _verify(
        self, drafter: Drafter, mode: SamplingMode, draft: Draft, noise: Tensor | None, mark: Mark
    ) -> StepOutput:
        return verify_phase(self.model, drafter, self.state, mode, draft, noise, mark, self.parts)

    def _constrain(self, draft: Draft, constraints: Sequence[Constraint | None], multi_round: str) -> None:
        """Write state.allowed, and forced tokens into draft.tokens. Multi-round drafts stay as they were drawn."""
        N = draft.tokens.shape[1]
        allowed = torch.full((len(self.state.done), N, self.state.allowed.shape[-1]), -1, dtype=torch.int32)
        tokens, parent, valid = (column.tolist() for column in (draft.tokens, draft.parent, draft.valid))
        changed = False
        for b, constraint in enumerate(constraints):
            if constraint is None:
                continue
            if N > 1 and not multi_round:
                changed |= draft_forced(constraint.forced(), tokens[b], parent[b], valid[b])
            constraint.over_tree(tokens[b], parent[b], valid[b], allowed[b])
        if changed:
            draft.tokens.copy_(torch.tensor(tokens))
        self.state.allowed[:, :N].copy_(allowed)
