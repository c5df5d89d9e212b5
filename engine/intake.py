"""Where requests come in: what an Engine and Replicas of one (`serving.replicas`) have in common.

It turns prompts and settings into requests, and refuses what is wrong with them. Who decodes them is the driver's matter.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from decoding.params import MAX_STOP_IDS, SamplingParams, SettingError, per_row
from decoding.step import Observer
from engine.grammar import Grammars
from engine.prefill import Prompt, prompts_ids
from engine.request import Inbox, Request
from engine.streams import AsyncStream, Driver, Stream
from families.config import ModelConfig
from text.tokenizer import Tokenizer

Result = TypeVar("Result")


class Intake:
    """Takes requests. A subclass sets the fields, and says what its driver drives."""

    tokenizer: Tokenizer | None
    model_config: ModelConfig
    generation: Mapping[str, Any]  # the checkpoint's generation_config.json
    grammars: Grammars
    driver: Driver
    ctx: int  # tokens of a prompt and its answer
    batch_size: int  # sequences that are decoded together
    adapters: tuple[str, ...] = ()  # among which a request chooses; empty where the model has one or none
    chain = 0  # depth of the chain that is drafted, 0 for another tree or none

    @property
    def problem(self) -> str:
        """Why no request can be decoded now, in words; "" if it can."""
        return ""

    def figures(self) -> dict[str, dict[str, float]]:
        """What is held now: labels as Prometheus writes them -> name -> value."""
        raise NotImplementedError

    def together(self, deed: Callable[..., Result], *arguments: object) -> Result:
        """deed(engine, *arguments), in all processes of the model. deed: a function of a module or class."""
        raise NotImplementedError

    def add_observer(self, observer: Observer) -> None:
        """Let `observer` watch all further steps. Raises ValueError where that is not possible."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what outlives the process. Call it last."""

    def adapter_number(self, name: str) -> int:
        """The number by which rows choose an adapter (see `weights.lora`), 0 for "". ValueError for any other name."""
        if name not in ("", *self.adapters):
            raise ValueError(f"adapter is {name!r:.80}; allowed: {', '.join(self.adapters) or 'none'}.")
        return self.adapters.index(name) + 1 if name else 0

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """The request's stop ids, or else the tokenizer's, or else the config's."""
        if params.stop_ids:
            return params.stop_ids
        if self.tokenizer is not None and self.tokenizer.eos_ids:
            return tuple(self.tokenizer.eos_ids)
        return self.model_config.eos_token_ids

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, adapter: str = "") -> Stream:
        """Decode one prompt. Returns a Stream of Chunks whose `result` is complete when the stream ends.

        The prompt is text to continue, a list of token ids, or a one-dimensional numpy array or torch tensor of ids. Any
        number of threads may use one engine. Their requests run together (see Stream).

        adapter: one of `adapters`; "": none of several.

        Raises, in one line and before any kernel runs:
            TypeError: for a prompt of another type.
            ValueError: for ids outside the vocabulary, and for a prompt that does not fit.
        """
        return self.generate_batch([prompt], params, adapter)

    def agenerate(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncStream:
        """The same for asyncio: `async for chunk in engine.agenerate(prompt)`. The event loop stays free meanwhile.

        A task that is cancelled closes its stream (see AsyncStream).
        """
        return AsyncStream(self.generate(prompt, params))

    def generate_batch(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str = "",
    ) -> Stream:
        """Decode any number of prompts together, as many at a time as there are rows. Otherwise as `generate`.

        params: for all prompts, where prompt b draws with seed + b, or one per prompt. The text of a prompt does not
            depend on the settings of the others.
        """
        prompts = prompts_ids(prompts, self.tokenizer)
        return Stream(self.requests(prompts, per_row(params or SamplingParams(), len(prompts)), adapter), self.driver)

    def requests(self, prompts: list[list[int]], params: Sequence[SamplingParams], adapter: str = "") -> list[Request]:
        """Requests with these settings, which are not queued yet and share an inbox."""
        if not prompts:
            raise ValueError("no prompts; give at least one.")
        number = self.adapter_number(adapter)
        inbox, requests = Inbox(len(prompts)), []
        for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            stop_ids = self.stop_ids(own)
            self._check_request(prompt, own, stop_ids)
            constraint = self.grammars.constraint(own.grammar, stop_ids, own.thought)
            request = Request(prompt, own, stop_ids, self.tokenizer, inbox, constraint, index, number, self.chain)
            requests.append(request)
        return requests

    def _check_request(self, prompt: list[int], params: SamplingParams, stop_ids: tuple[int, ...]) -> None:
        V = self.model_config.vocab_size
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"{len(stop_ids)} stop ids; allowed: at most {MAX_STOP_IDS}.")
        for token in (token for token, _ in params.logit_bias if token >= V):
            raise SettingError("logit_bias", f"has the id {token}; allowed: 0 to {V - 1}, the vocabulary. Remove it.")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this checkpoint has none; use stop ids.")
        if not prompt:
            raise ValueError("the prompt is empty; give at least one token (or text).")
        for t in prompt:
            if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < V:
                raise ValueError(f"prompt id {t!r} is outside the vocabulary; allowed: 0 to {V - 1}.")
        need = len(prompt) + params.max_new_tokens
        if need > self.ctx:
            longest = self.model_config.max_positions
            hint = f"Try --ctx {need}." if need <= longest else f"The model's limit is {longest:,}."
            asked = f"prompt is {len(prompt):,} tokens; with --max-new-tokens {params.max_new_tokens:,} it needs"
            raise ValueError(f"{asked} {need:,} of the {self.ctx:,} allocated. {hint}")
