"""The engine: one request at a time, from prompt ids to a stream of tokens.

It prefills the prompt (reusing the prefix that its caches still hold), launches steps ahead of the host, applies the stop
rules, and falls back to plain decoding while drafting does not pay. It works on token ids and only passes text through.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from drafters.base import Drafter, PlainDrafter
from model import Transformer
from runtime.grammar import Grammars
from runtime.lease import Lease, LeaseQueue, Left
from runtime.prefill import Prompt, prompts_ids
from runtime.prompt_cache import PromptCache
from runtime.request import Request
from runtime.results import AsyncStream, Chunk, GenerationResult, SequenceOutput, Stream, mark_interrupted
from runtime.stepping import EngineConfig, Stepper
from sampling import SamplingParams
from sampling_params import per_row
from step import MAX_STOP_IDS
from tokenizer import Tokenizer

Result = TypeVar("Result")


class Engine(Stepper):
    """Decodes one batch at a time with a target, a drafter and static buffers. `load.load` builds it."""

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
        self._forget_caches()
        self.prompt_cache = PromptCache()  # keeps texts that the caches no longer hold; this one keeps none
        self.queue = LeaseQueue()  # requests run one after another

    def keep_prompts(self, cache: PromptCache) -> None:
        """Keep the caches of earlier prompts in this prompt cache from now on. Call it between requests."""
        self.prompt_cache = cache

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
        params = params or SamplingParams()
        with Lease(self.queue):
            started = time.perf_counter()
            self._write_settings([params])
            self._first_runs(params.mode)
            return time.perf_counter() - started

    def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Decode one prompt. Returns a Stream of Chunks whose `result` is complete when the stream ends.

        The prompt is text to continue, a list of token ids, or a one-dimensional numpy array or torch tensor of ids. Any
        number of threads may use one engine. Their requests run one after another (see Stream).

        Raises, in one line and before any kernel runs:
            TypeError: for a prompt of another type.
            ValueError: for ids outside the vocabulary, and for a prompt that does not fit.
        """
        return self.generate_batch([prompt], params)

    def agenerate(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncStream:
        """The same for asyncio: `async for chunk in engine.agenerate(prompt)`. The event loop stays free meanwhile.

        A task that is cancelled closes its stream (see AsyncStream).
        """
        return AsyncStream(self.generate(prompt, params), self.queue.worker())

    def generate_batch(
        self, prompts: Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Stream:
        """Decode up to batch_size prompts of any lengths together. Otherwise as `generate`.

        params: for all prompts, where prompt b draws with seed + b, or one per prompt. The text of a prompt does not
            depend on the settings of the others.
        """
        prompts = prompts_ids(prompts, self.tokenizer)
        params = per_row(params or SamplingParams(), len(prompts))
        self._check_request(prompts, params)
        chain = self.drafter.D if self.drafter.N == self.drafter.D + 1 and not self.drafter.p_min else 0
        outputs = [
            SequenceOutput(
                GenerationResult(len(prompt), row.temperature, row.seed, chain=chain),
                row, set(self.stop_ids(row)), self.tokenizer,
            )
            for prompt, row in zip(prompts, params, strict=True)
        ]  # fmt: skip
        lease = Lease(self.queue)
        constraints = [self.grammars.constraint(p.grammar, self.stop_ids(p)) if p.grammar else None for p in params]
        request = Request(self, prompts, params, outputs, constraints)
        return Stream(self._run(request, lease), request.results, lease)

    def _check_request(self, prompts: list[list[int]], rows: list[SamplingParams]) -> None:
        if not 1 <= len(prompts) <= self.batch_size:
            raise ValueError(f"{len(prompts)} prompts, but the engine holds 1 to {self.batch_size}; use --batch-size.")
        V = self.model.config.vocab_size
        for prompt, params in zip(prompts, rows, strict=True):
            if len(self.stop_ids(params)) > MAX_STOP_IDS:
                raise ValueError(f"{len(self.stop_ids(params))} stop ids; allowed: at most {MAX_STOP_IDS}.")
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
    def _run(self, request: Request, lease: Lease) -> Generator[Chunk]:
        try:
            if not lease.wait():
                return
            rows = (self._cached, self._drafted, request.prompts)
            reuse = self.prompt_cache.exchange(self.state, self.drafter, *rows)
            self._forget_caches()  # nothing is valid until the request has ended well
            self._write_settings(request.params)
            self._first_runs(request.mode)
            for b, prompt in enumerate(request.prompts):
                yield request.prefill(b, prompt, *reuse[b], lease.go_on)
                lease.check()
            self.runner.begin()
            while not request.finished:
                for chunk in request.advance():
                    yield chunk
                    lease.check()
            self._keep_caches(request)
        except Left:
            return
        except Exception:
            self.prompt_cache.distrust()
            raise
        except GeneratorExit:  # the reader left between two chunks, and what it was given is in the caches
            lease.end(partial(self._keep_caches, request))
            raise
        finally:
            lease.end()
            mark_interrupted(request.results)

    def _keep_caches(self, request: Request) -> None:
        for b in range(len(request.prompts)):
            self._cached[b], self._drafted[b] = request.cached(b)

    def _forget_caches(self) -> None:
        # for each row the ids whose target rows are valid, and the number of valid draft rows
        self._cached: list[list[int]] = [[] for _ in range(self.batch_size)]
        self._drafted = [0] * self.batch_size

    def _write_settings(self, params: Sequence[SamplingParams]) -> None:
        """Write a request's settings into the static buffers. Every sequence counts as finished until its prefill."""
        state = self.state
        state.done.fill_(True)
        state.sampling.set([*params, *[SamplingParams()] * (self.batch_size - len(params))])
        state.stop_ids.fill_(-1)
        for b, row in enumerate(params):
            stop_ids = self.stop_ids(row)
            state.stop_ids[b, : len(stop_ids)] = torch.tensor(stop_ids, dtype=torch.int64)
            state.limit[b] = row.max_new_tokens
        state.seen.zero_()
        state.counts.zero_()

    @torch.inference_mode()
    def margin(
        self, row: int, text: Sequence[int], prompt: int, params: SamplingParams, a: int, b: int
    ) -> tuple[float, float]:
        """The margin between tokens a and b after `text`, whose first `prompt` ids are the prompt.

        Returns the difference of their sampling keys z + T g, and the same in units of the last place of the larger logit
        in the model's dtype. It tells a rounding tie from a bug.
        """
        with Lease(self.queue), self.backend.active():
            self._forget_caches()
            self.state.sampling.set(params)
            logits, noise = self.prefill.logits(row, list(text), params.mode)
            logits = self.prefill.penalised(row, logits, text, prompt, params.mode)
            temperature = self.state.sampling.row(row).temperature
            keys = logits[0, 0] if noise is None else (logits + temperature * noise)[0, 0]
        distance = abs(float(keys[a] - keys[b]))
        largest = float(logits[0, 0, [a, b]].abs().max())
        ulp = torch.finfo(self.model.dtype).eps * 2.0 ** math.floor(math.log2(max(largest, 1e-9)))
        return distance, distance / ulp
