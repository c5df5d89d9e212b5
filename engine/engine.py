"""The engine: requests that are decoded together, from prompt ids to streams of tokens.

It reads prompts (reusing the prefixes that its caches still hold), launches steps ahead of the host, applies the stop
rules, and falls back to plain decoding while drafting does not pay. It works on token ids and only passes text through.
`engine/batch.py` says which request runs when.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from decoding.drafter import Drafter, PlainDrafter
from decoding.params import MAX_STOP_IDS, SamplingParams, SettingError, per_row
from engine.batch import Batch
from engine.grammar import Grammars
from engine.prefill import Prompt, prompts_ids
from engine.prompt_cache import PromptCache
from engine.request import Inbox, Request
from engine.results import GenerationResult, SequenceOutput
from engine.stepping import EngineConfig, Stepper
from engine.streams import AsyncStream, Driver, Stream
from model import Transformer
from text.tokenizer import Tokenizer

Result = TypeVar("Result")


class Engine(Stepper):
    """Decodes with a target, a drafter and static buffers, as many requests at once as it has rows. `load` builds it."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None = None,
        drafter: Drafter | None = None,
        config: EngineConfig | None = None,
    ):
        """Allocate everything that requests need. Raises ValueError in one line for values that are out of range."""
        config = config or EngineConfig()
        super().__init__(model, drafter or PlainDrafter(model), config)
        self.tokenizer = tokenizer
        self.options, self.plan, self.head = config.options, config.plan, config.head
        self.generation = config.generation
        self.grammars = Grammars(tokenizer, model.config.vocab_size)
        self.batch = Batch(self)
        self.driver = Driver(self.batch)

    @property
    def prompt_cache(self) -> PromptCache:
        """Keeps the texts that no row holds any more."""
        return self.batch.prompt_cache

    def keep_prompts(self, cache: PromptCache) -> None:
        """Keep the caches of earlier prompts in this prompt cache from now on. Call it between requests."""
        self.batch.prompt_cache = cache

    def forget(self) -> None:
        """Forget what the caches hold of requests that have ended, so that the next ones reuse nothing."""
        with self.driver.alone():
            self.batch.forget()

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters among which a request chooses. Empty where the model has one or none."""
        return self.batch.choice.names if self.batch.choice else ()

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
        return self.model.config.eos_token_ids

    def twin(self, width: int) -> Engine:
        """An engine on the same model that decodes plainly, in forwards of `width` rows, with buffers of its own."""
        return self.sibling(PlainDrafter(self.model, width), replace(self.config, head=None))

    def sibling(self, drafter: Drafter | None, config: EngineConfig) -> Engine:
        """Another engine on the same model, in the same processes."""
        return Engine(self.model, self.tokenizer, drafter, config)

    def together(self, deed: Callable[..., Result], *arguments: object) -> Result:
        """deed(self, *arguments), in all processes where the model is split among several. deed: of a module or class."""
        return deed(self, *arguments)

    @torch.inference_mode()
    def warm_up(self, params: SamplingParams | None = None) -> float:
        """Compile, capture and time the steps for these settings now. Otherwise the first such request does it.

        Waits for the engine, as a request does. Returns the seconds that the work took.
        """
        with self.driver.alone():
            started = time.perf_counter()
            mode = (params or SamplingParams()).mode
            self.batch.drain()
            self.first_runs(mode, self.view(1))
            return time.perf_counter() - started

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
        self._check_request(prompts, params)
        number = self.adapter_number(adapter)
        chain = self.drafter.D if self.drafter.N == self.drafter.D + 1 and not self.drafter.p_min else 0
        inbox, requests = Inbox(len(prompts)), []
        for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            result, stop_ids = GenerationResult(len(prompt), own.temperature, own.seed, chain=chain), self.stop_ids(own)
            output = SequenceOutput(result, own, set(stop_ids), self.tokenizer)
            constraint = self.grammars.constraint(own.grammar, stop_ids, own.thought)
            requests.append(Request(prompt, own, output, constraint, inbox, index, number))
        return requests

    def _check_request(self, prompts: list[list[int]], rows: list[SamplingParams]) -> None:
        if not prompts:
            raise ValueError("no prompts; give at least one.")
        V = self.model.config.vocab_size
        for prompt, params in zip(prompts, rows, strict=True):
            if len(self.stop_ids(params)) > MAX_STOP_IDS:
                raise ValueError(f"{len(self.stop_ids(params))} stop ids; allowed: at most {MAX_STOP_IDS}.")
            for token in (token for token, _ in params.logit_bias if token >= V):
                why = f"logit_bias has the id {token}; allowed: 0 to {V - 1}, the vocabulary. Remove it."
                raise SettingError("logit_bias", why)
            if params.stop and self.tokenizer is None:
                raise ValueError("stop strings need a tokenizer, and this checkpoint has none; use stop ids.")
            if not prompt:
                raise ValueError("the prompt is empty; give at least one token (or text).")
            for t in prompt:
                if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < V:
                    raise ValueError(f"prompt id {t!r} is outside the vocabulary; allowed: 0 to {V - 1}.")
            need = len(prompt) + params.max_new_tokens
            if need > self.ctx:
                longest = self.model.config.max_positions
                hint = f"Try --ctx {need}." if need <= longest else f"The model's limit is {longest:,}."
                raise ValueError(
                    f"prompt is {len(prompt):,} tokens; with --max-new-tokens {params.max_new_tokens:,} it needs "
                    f"{need:,} of the {self.ctx:,} allocated. {hint}"
                )

    @torch.inference_mode()
    def margin(self, text: Sequence[int], prompt: int, params: SamplingParams, a: int, b: int) -> tuple[float, float]:
        """The margin between tokens a and b after `text`, whose first `prompt` ids are the prompt.

        Returns the difference of their sampling keys z + T g, and the same in units of the last place of the larger logit
        in the model's dtype. It tells a rounding tie from a bug.
        """
        with self.driver.alone(), self.backend.active():
            row = self.batch.free_row()
            self.write_sampling(row, params, self.stop_ids(params), prompt)
            logits, noise = self.prefill.logits(row, list(text), params.mode)
            logits = self.prefill.penalised(row, logits, text, prompt, params.mode)
            temperature = self.state.sampling.row(row).temperature
            keys = logits[0, 0] if noise is None else (logits + temperature * noise)[0, 0]
        distance = abs(float(keys[a] - keys[b]))
        largest = float(logits[0, 0, [a, b]].abs().max())
        ulp = torch.finfo(self.model.dtype).eps * 2.0 ** math.floor(math.log2(max(largest, 1e-9)))
        return distance, distance / ulp
