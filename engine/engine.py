"""The engine: requests that are decoded together, from prompt ids to streams of tokens.

It reads prompts (reusing the prefixes that its caches still hold), launches steps ahead of the host, applies the stop
rules, and falls back to plain decoding while drafting does not pay. It works on token ids and only passes text through.
`engine/batch.py` says which request runs when.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from decoding.drafter import Drafter, PlainDrafter
from decoding.params import SamplingParams
from engine.batch import Batch
from engine.grammar import Grammars
from engine.intake import Intake, Result
from engine.prompt_cache import PromptCache
from engine.stepping import EngineConfig, Stepper
from engine.streams import Driver
from model import Transformer
from text.tokenizer import Tokenizer


class Engine(Stepper, Intake):
    """Decodes with a target, a drafter and static buffers, as many requests at once as it has rows. `load` builds it."""

    batches: type[Batch] = Batch

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
        self.tokenizer, self.model_config = tokenizer, model.config
        self.prefill.turns = tokenizer.special_ids if tokenizer else ()
        self.chain = self.drafter.D if self.drafter.N == self.drafter.D + 1 and not self.drafter.p_min else 0
        self.options, self.plan, self.head = config.options, config.plan, config.head
        self.generation = config.generation
        self.grammars = Grammars(tokenizer, model.config.vocab_size)
        self.batch = self.batches(self)
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

    def twin(self, width: int) -> Engine:
        """An engine on the same model that decodes plainly, in forwards of `width` rows, with buffers of its own."""
        return self.sibling(PlainDrafter(self.model, width), replace(self.config, head=None))

    def sibling(self, drafter: Drafter | None, config: EngineConfig) -> Engine:
        """Another engine on the same model, in the same processes."""
        return Engine(self.model, self.tokenizer, drafter, config)

    def together(self, deed: Callable[..., Result], *arguments: object) -> Result:
        return deed(self, *arguments)

    def figures(self) -> dict[str, dict[str, float]]:
        cache, tokens = self.prompt_cache, sum(request.length for request in self.batch.rows if request)
        held = {"slots": self.batch_size, "slots_tokens": tokens, "slots_tokens_max": self.pool_tokens}
        held |= {"prompt_cache_entries": len(cache.entries), "prompt_cache_hits_total": cache.hits}
        return {"": held | {"prompt_cache_bytes": cache.held_bytes, "prompt_cache_disk_bytes": cache.disk_bytes}}

    def close(self) -> None:
        self.prompt_cache.close()

    @torch.inference_mode()
    def warm_up(self, params: SamplingParams | None = None, requests: int = 1) -> float:
        """Compile, capture and time the steps for these settings now. Otherwise the first such request does it.

        requests: as many at a time, where steps are captured, and fewer. Waits for the engine, as a request does. Returns
        the seconds that the work took.
        """
        with self.driver.alone():
            started = time.perf_counter()
            mode = (params or SamplingParams()).mode
            self.batch.drain()
            for rows in range(1, 1 + (requests if self.runner.capturing else 1)):
                self.first_runs(mode, self.view(rows))
            return time.perf_counter() - started

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
            temperature = self.state.sampling.part(row).temperature
            keys = logits[0, 0] if noise is None else (logits + temperature * noise)[0, 0]
        distance = abs(float(keys[a] - keys[b]))
        largest = float(logits[0, 0, [a, b]].abs().max())
        ulp = torch.finfo(self.model.dtype).eps * 2.0 ** math.floor(math.log2(max(largest, 1e-9)))
        return distance, distance / ulp
