"""What one request asks for: the settings of sampling, their limits, and those that a model suggests.

Nothing here needs torch, so that a command line can explain and check the settings before it imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from numbers import Real
from typing import Any, NamedTuple

from support.errors import advised

FP32_MAX = (2 - 2.0**-23) * 2.0**127
FP32_TINY = 2.0**-126
MAX_LOGPROBS = 20  # likeliest tokens that a request may ask for at each position
MAX_STOP_IDS = 32
MAX_BIAS = 1024  # tokens whose logits a request may change
# Name, type, least and greatest value of each number in SamplingParams, and what to tell the user about them.
BOUNDS = (
    ("temperature", Real, 0, FP32_MAX, "a finite number >= 0. Use 0 for greedy decoding."),
    ("top_k", int, 0, 2**63 - 1, "an integer >= 0. Use 0 to switch it off."),
    ("top_p", Real, math.ulp(0.0), 1, "a number > 0 and <= 1. Use 1 to switch it off."),
    ("min_p", Real, 0, math.nextafter(1, 0), "a number >= 0 and < 1. Use 0 to switch it off."),
    ("repetition_penalty", Real, FP32_TINY, FP32_MAX, "a finite number > 0. Use 1 to switch it off."),
    ("presence_penalty", Real, -2, 2, "a number from -2 to 2. Use 0 to switch it off."),
    ("frequency_penalty", Real, -2, 2, "a number from -2 to 2. Use 0 to switch it off."),
    ("seed", int, -(2**63), 2**64 - 1, "a 64-bit integer. Choose a smaller seed."),
    ("max_new_tokens", int, 0, 2**63 - 1, "an integer >= 0. With 0 the prompt is read, and that is all."),
    ("logprobs", int, 0, MAX_LOGPROBS, f"None, or an integer from 0 to {MAX_LOGPROBS}."),
    ("prompt_logprobs", int, 0, MAX_LOGPROBS, f"None, or an integer from 0 to {MAX_LOGPROBS}."),
    ("min_new_tokens", int, 0, 2**31, "an integer >= 0. Use 0 to switch it off."),
)


class SettingError(ValueError):
    """A value that a setting may not have, in one line. It begins with the `setting`, a field of SamplingParams."""

    def __init__(self, setting: str, problem: str):
        super().__init__(f"{setting} {problem}")
        self.setting = setting


@dataclass(frozen=True)
class SamplingMode:
    """Static switches that say which code a compiled step contains."""

    sample: bool = False
    filters: bool = False
    penalties: bool = False
    logprobs: bool = False
    grammar: bool = False
    bias: bool = False

    @classmethod
    def covering(cls, modes: Iterable[SamplingMode]) -> SamplingMode:
        """The mode whose code serves all of these."""
        kinds = set(modes)
        return kinds.pop() if len(kinds) == 1 else cls(*map(any, zip(*map(astuple, kinds), strict=True)))


class Thought(NamedTuple):
    """A thought that comes before the text, and to which the grammar of the text does not apply.

    begin: the ids of the mark that the model may begin it with, () where the prompt has begun it. end: the text of the
    mark that ends it. gap: the ids that must follow that mark where a grammar comes next. most: how many tokens the
    thought may have, None for any number. close: the ids that end a thought which has as many, its mark included.
    """

    begin: tuple[int, ...]
    end: str
    gap: tuple[int, ...]
    close: tuple[int, ...]
    most: int | None = None


@dataclass(frozen=True)
class SamplingParams:
    """One request's settings. The default is greedy decoding with all filters and penalties off.

    `stop_ids` and `stop` end the text. Batch row b draws with seed + b. A bad value is a one-line ValueError.

    logprobs: None, or how many of the likeliest tokens are reported at each position, beside the token that was chosen.
        Such a request waits for the host at every step.
    prompt_logprobs: the same for the tokens of the prompt, all of which are read again. The caches do not keep the text.
    grammar: what the text must follow: a grammar in the Lark syntax of llguidance, or what
        `engine.grammar_text.json_grammar` makes of a JSON schema. Such a request waits for the host at every step, too.
    logit_bias: what is added to the logits of some tokens before anything else, from -100 (never) to 100 (always). Given
        as {id: number}, kept as pairs.
    min_new_tokens: before so many tokens, no stop id is chosen. A stop string still ends the text.
    thought: what the model may think first, where that has a limit or a grammar follows it. Such a request waits for the
        host at every step.
    shown_ids: special tokens that are a part of the text. The others are left out.
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
    logprobs: int | None = None
    grammar: str = ""
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    min_new_tokens: int = 0
    thought: Thought | None = None
    shown_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        values = vars(self)
        for name, kind, low, high, allowed in BOUNDS:
            value = values[name]
            if value is None and name in ("logprobs", "prompt_logprobs"):
                continue
            if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
                raise SettingError(name, f"is {value!r:.80}; allowed: {allowed}")
        for name in ("stop_ids", "stop"):
            if not isinstance(values[name], (list, tuple)):
                raise SettingError(name, f"is {values[name]!r:.80}; allowed: a tuple. Wrap the value in one.")
            object.__setattr__(self, name, tuple(values[name]))
        if not isinstance(self.grammar, str):
            what = f"is {self.grammar!r:.80}; allowed: a text. Use json_grammar for a JSON schema."
            raise SettingError("grammar", what)
        if self.grammar and self.min_new_tokens:
            why = "does not go with a grammar, whose text ends where it is complete. Leave one out."
            raise SettingError("min_new_tokens", why)
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        for token in self.stop_ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
                raise SettingError("stop_ids", f"has {token!r:.80}; allowed: ids >= 0. Correct or remove it.")
        if len(self.stop) > 16:
            raise SettingError("stop", f"has {len(self.stop)} strings; allowed: at most 16. Remove some.")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text.encode("utf-8", "surrogatepass")) <= 1024:
                raise SettingError("stop", f"has {text!r:.40}; allowed: 1 to 1024 bytes of text each. Shorten it.")

    @property
    def mode(self) -> SamplingMode:
        """Which code this request needs. Greedy decoding needs no filters, as the greatest logit survives them all."""
        filters = self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)
        bias = bool(self.logit_bias or self.min_new_tokens)
        host = self.logprobs is not None, bool(self.grammar or self.thought)
        return SamplingMode(self.temperature > 0, filters, penalties, *host, bias)


def _bias_pairs(bias: Mapping[int, float] | Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """The pairs of a `logit_bias`. Raises SettingError for anything that is not allowed."""
    what = "is {!r:.80}; allowed: {{id: a number from -100 to 100}}. Correct or remove it."
    try:
        pairs = [(token, value) for token, value in (bias.items() if isinstance(bias, Mapping) else bias)]
    except (TypeError, ValueError):
        raise SettingError("logit_bias", what.format(bias)) from None
    if len(pairs) > MAX_BIAS:
        raise SettingError("logit_bias", f"has {len(pairs)} tokens; allowed: at most {MAX_BIAS}. Remove some.")
    for token, value in pairs:
        known = isinstance(token, int) and isinstance(value, Real) and not {bool} & {type(token), type(value)}
        if not (known and 0 <= token < 2**31 and -100 <= value <= 100):
            raise SettingError("logit_bias", what.format((token, value)))
    if len(dict(pairs)) < len(pairs):
        raise SettingError("logit_bias", "names a token twice; allowed: once each. Remove one of them.")
    return tuple((int(token), float(value)) for token, value in pairs)


def per_row(params: SamplingParams | Sequence[SamplingParams], rows: int) -> list[SamplingParams]:
    """The settings of each row of a batch.

    From one SamplingParams, row b gets the seed `params.seed + b` mod 2^64. A sequence is taken as it is, one per row.
    Raises ValueError for a sequence of another length.
    """
    if isinstance(params, SamplingParams):
        shifts = (b - 2**64 * (params.seed + b >= 2**64) for b in range(rows))
        return [replace(params, seed=params.seed + shift) for shift in shifts]
    if len(params) != rows:
        raise ValueError(f"{len(params)} SamplingParams for {rows} rows; pass one for all rows, or one per row.")
    return list(params)


# The settings that a generation_config.json may hold under the same names. They do nothing in greedy decoding, except for
# the first and the last.
SUGGESTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def with_suggestions(suggestions: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[SamplingParams, list[str]]:
    """The settings of a request: those that the user gave, and for the others what the model suggests.

    As in transformers, sampling needs do_sample = true, and then the temperature is 1 if the file names none.

    Args:
        suggestions: what the model's generation_config.json holds.
        given: fields of SamplingParams.

    Returns the settings, and the names of those that the model decided. Raises ValueError in one line for a setting that
    is not allowed, and says so if it comes from the file.
    """
    params = SamplingParams(**given)
    found = {name: suggestions[name] for name in SUGGESTED if suggestions.get(name) is not None}
    found["temperature"] = found.get("temperature", 1.0) if suggestions.get("do_sample") is True else 0.0
    if given.get("temperature", found["temperature"]) == 0:
        found = {name: found[name] for name in ("temperature", "repetition_penalty") if name in found}
    found = {name: value for name, value in found.items() if name not in given and value != getattr(params, name)}
    try:
        return SamplingParams(**{**given, **found}), list(found)
    except ValueError as error:
        problem = ValueError(f"generation_config.json: {error}")
        raise advised(problem, "Correct the file, or set it on the command line.") from error
