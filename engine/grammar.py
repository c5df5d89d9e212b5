"""What a text may say: grammars and JSON schemas, token by token, through the package llguidance.

A `Constraint` follows one sequence on the host. For every node of a draft tree it tells which tokens may follow there.

The drafter does not know the grammar. Between drafting and verification its tokens come down to the host, which writes
the tokens that the grammar forces into the tree, and sends up one bit per node and token. The target then chooses among
the allowed tokens, so the text is the same with every drafter.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from decoding.drafter import Draft
from decoding.params import Thought
from engine.grammar_text import GrammarError, in_one_line, ready_grammar
from text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

DIGITS = 16  # one behind the other, in a number of JSON


class Grammars:
    """Makes constraints for the vocabulary of a model. Its tables take a second, so they are made once for each set of
    stop ids."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int):
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._tables: dict[tuple[int, ...], Any] = {}

    @functools.cached_property
    def _numbers(self) -> _Numbers:
        return _Numbers(self.tokenizer, self.vocab_size)

    def constraint(self, grammar: str, stop_ids: Sequence[int], thought: Thought | None = None) -> Constraint | None:
        """What constrains a text at its beginning: a grammar, a thought that comes first, both, or nothing (None).

        Raises GrammarError for a grammar with an error, and ValueError where the model has no tokenizer or no stop id.
        """
        matcher, numbers = self._matcher(grammar, stop_ids) if grammar else (None, None)
        if thought is not None:
            return AfterThought(thought, self, matcher, stop_ids, numbers)
        return Constraint(self, matcher, stop_ids, numbers) if grammar else None

    def _matcher(self, grammar: str, stop_ids: Sequence[int]) -> tuple[llguidance.LLMatcher, _Numbers | None]:
        if self.tokenizer is None:
            raise ValueError("a grammar needs a tokenizer, and this checkpoint has none.")
        if not stop_ids:
            raise ValueError("a grammar ends its text with a stop id, and this model names none; pass stop_ids.")
        import llguidance

        key = tuple(sorted(set(stop_ids)))
        if key not in self._tables:
            wrapper = llguidance.TokenizerWrapper(_Words(self.tokenizer, self.vocab_size, key))
            self._tables[key] = llguidance.LLTokenizer(wrapper, n_vocab=self.vocab_size, eos_token=list(key))
        grammar = ready_grammar(grammar)
        matcher = llguidance.LLMatcher(self._tables[key], grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"the grammar has an error: {in_one_line(matcher.get_error())}")
        return matcher, self._numbers if grammar.is_json else None


class _Words:
    """A tokenizer as llguidance wants to see it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: tuple[int, ...]):
        pieces = tokenizer.pieces
        self.tokens = [pieces.get(i, b"") for i in range(vocab_size)]
        self.special_token_ids = sorted({*tokenizer.special_ids, *stop_ids})
        self.eos_token_id = stop_ids[0]
        self.bos_token_id = None
        self.tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self.tokenizer.encode(text, continuation=True)


class _Numbers:
    """Makes numbers of JSON end: where DIGITS digits stand together, no other one follows if the number may end there."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        pieces = [tokenizer.pieces.get(i, b"") for i in range(-(-vocab_size // 32) * 32)]
        self.leading = np.array([len(p) - len(p.lstrip(b"0123456789")) for p in pieces], np.int32)
        self.trailing = np.array([len(p) - len(p.rstrip(b"0123456789")) for p in pieces], np.int32)
        self.length = np.array([len(p) for p in pieces], np.int32)
        self.quotes = _bits(np.array([p.startswith(b'"') for p in pieces]))
        self.most = int(self.leading.max())

    def behind(self, token: int, digits: int) -> int:
        """How many digits stand at the end of a text that had so many, after this token."""
        whole = self.trailing[token] == self.length[token]
        return int(self.trailing[token]) + (digits if whole else 0)

    def shortened(self, allowed: Tensor, digits: int) -> Tensor:
        """Of the tokens that a schema allows, int32 [W], those that may follow so many digits."""
        room = DIGITS - digits
        if room >= self.most or bool((allowed & self.quotes).any()):  # where a quote may stand, a text is written
            return allowed
        fewer = allowed & _bits(self.leading <= max(room, 0))
        return fewer if bool(fewer.any()) else allowed


def _bits(chosen: np.ndarray) -> Tensor:
    """One bit for each of a multiple of 32 tokens, int32 [W]."""
    return torch.from_numpy(np.packbits(chosen, bitorder="little").view(np.int32))


class Constraint:
    """The state of a grammar after the tokens that a sequence has emitted. All of it is on the host."""

    def __init__(self, made_by: Grammars, matcher: Any, stop_ids: Sequence[int], numbers: _Numbers | None):
        """matcher: llguidance's."""
        self.matcher = matcher
        self.tokenizer = made_by.tokenizer
        self.words = -(-made_by.vocab_size // 32)
        self.stop_ids = frozenset(stop_ids)
        self.numbers = numbers
        self._digits = 0  # at the end of the text
        self._now: _Now | None = None  # where the text is, if a thought comes first

    def take(self, token_ids: Sequence[int]) -> None:
        """Go on behind emitted tokens. A stop id ends the text, so what comes behind it does not count.

        Raises GrammarError where the grammar needs more room or time than llguidance allows.
        """
        for token in token_ids:
            if token in self.stop_ids:
                return
            self._take(token)

    def _take(self, token: int) -> None:
        if not self.matcher.consume_token(token):
            self._refuse()
        self._count(token)

    def _count(self, token: int) -> None:
        if self.numbers is not None:
            self._digits = self.numbers.behind(token, self._digits)

    def allowed(self) -> Tensor:
        """Which tokens may come next, int32 [W]: bit i mod 32 of word i div 32 belongs to token i."""
        bits = torch.zeros(self.words, dtype=torch.int32)
        self.matcher.unsafe_compute_mask_ptr(bits.data_ptr(), bits.nbytes)
        if self.matcher.is_error():
            self._refuse()
        return bits if self.numbers is None else self.numbers.shortened(bits, self._digits)

    def _refuse(self) -> NoReturn:
        raise GrammarError(f"the grammar cannot be followed further: {in_one_line(self.matcher.get_error())}")

    def forced(self) -> list[int]:
        """The tokens of the text that must come next, because the grammar leaves no choice.

        The model may still spell that text with other tokens, so these are drafts.
        """
        return self.tokenizer.encode(self.matcher.compute_ff_bytes().decode("utf-8", "ignore"), continuation=True)

    def over_tree(
        self, tokens: Sequence[int], parent: Sequence[int], valid: Sequence[bool], out: Tensor, node: int = 0
    ) -> None:
        """Write what may follow each node of a tree, from `node` down, into out, int32 [N, W].

        tokens, parent and valid describe the N nodes; node 0 is the last emitted token, and parents come before their
        children. What may follow a node that the grammar does not allow stays, because no accepted path leads there.
        """
        out[node] = self.allowed()
        before = self._digits, self._now
        children = (i for i in range(node + 1, len(tokens)) if parent[i] == node and valid[i])
        for child in children:
            taken = None if tokens[child] in self.stop_ids else self._enter(tokens[child])
            if taken is not None:
                self.over_tree(tokens, parent, valid, out, child)
                if taken:
                    self.matcher.rollback(taken)
            self._digits, self._now = before

    def _enter(self, token: int) -> int | None:
        """Go on behind a drafted token. Returns how many tokens the matcher took, None if the token may not come next."""
        if not self.matcher.try_consume_tokens([token]):
            return None
        self._count(token)
        return 1


class _Now(NamedTuple):
    """Where a text is: ids of the first mark that may come next, whether it thinks, ids that must come next, how many
    tokens the thought has so far, and the end of what it says."""

    begin: tuple[int, ...]
    thinks: bool
    forced: tuple[int, ...]
    count: int
    written: bytes


class AfterThought(Constraint):
    """A constraint that begins behind a thought, which it may have to close. Its matcher is None where anything may
    follow."""

    def __init__(self, thought: Thought, *common: Any):
        super().__init__(*common)
        self.thought = thought
        self._end = thought.end.encode()
        self._open = torch.full((self.words,), -1, dtype=torch.int32)
        if self.matcher is not None:  # the text that must come is not there yet
            self._open &= ~self._chosen(self.stop_ids)
        self._now = _Now(thought.begin, not thought.begin, (), 0, b"")

    def _take(self, token: int) -> None:
        if self._step(token) and self.matcher is not None:
            super()._take(token)

    def allowed(self) -> Tensor:
        now = self._now
        if now.forced:
            return self._chosen([now.forced[0]])
        bits = self._open if now.thinks or self.matcher is None else super().allowed()
        if now.begin and self.matcher is not None:
            first = self._chosen([now.begin[0]])
            bits = bits | first if now.begin == self.thought.begin else first
        return bits

    def forced(self) -> list[int]:
        now = self._now
        if now.forced or now.thinks or now.begin or self.matcher is None:
            return list(now.forced)
        return super().forced()

    def _enter(self, token: int) -> int | None:
        forced = self._now.forced
        if forced and token != forced[0]:
            return None
        return super()._enter(token) if self._step(token) and self.matcher is not None else 0

    def _step(self, token: int) -> bool:
        """Go on behind a token. Returns whether it belongs to the text behind the thought."""
        now, thought = self._now, self.thought
        if now.forced:
            self._now = now._replace(forced=now.forced[1:])
        elif now.begin and token == now.begin[0]:
            self._now = now._replace(begin=now.begin[1:], thinks=len(now.begin) == 1)
        elif now.thinks:
            written = now.written + self.tokenizer.pieces.get(token, b"")
            count = now.count + 1
            if self._end in written:
                self._now = _Now((), False, thought.gap if self.matcher is not None else (), count, b"")
            else:
                full = thought.most is not None and count >= thought.most
                self._now = _Now((), not full, thought.close if full else (), count, written[-len(self._end) :])
        else:
            self._now = now._replace(begin=())
            return True
        return False

    def _chosen(self, ids: Collection[int]) -> Tensor:
        """The bits of some tokens, int32 [W]."""
        chosen = np.zeros(32 * self.words, bool)
        chosen[list(ids)] = True
        return _bits(chosen)


def draft_forced(forced: Sequence[int], tokens: list[int], parent: Sequence[int], valid: Sequence[bool]) -> bool:
    """Write forced tokens into a drafted tree, from the root down, where the tree does not have them. In place.

    Of the children of a node, the last one with the longest branch below it gives way. Returns whether any token changed.
    """
    height = [0] * len(tokens)
    children: dict[int, list[int]] = {}
    for node in range(len(tokens) - 1, 0, -1):
        if valid[node]:
            height[parent[node]] = max(height[parent[node]], height[node] + 1)
            children.setdefault(parent[node], []).append(node)  # the last child comes first
    here, changed = 0, False
    for token in forced:
        below = children.get(here)
        if not below:
            break
        same = next((child for child in below if tokens[child] == token), None)
        here = max(below, key=height.__getitem__) if same is None else same
        changed |= tokens[here] != token
        tokens[here] = token
    return changed


def constrain(draft: Draft, out: Tensor, constraints: Sequence[Constraint | None], multi_round: str) -> None:
    """Write what is allowed into out [B, N, W], and forced tokens into draft.tokens. Multi-round drafts stay as drawn.

    constraints: one for each of the first rows; None, and rows beyond them: everything is allowed. Waits for the draft.
    """
    N = draft.tokens.shape[1]
    allowed = torch.full((len(out), N, out.shape[-1]), -1, dtype=torch.int32)
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
    out[:, :N].copy_(allowed)
