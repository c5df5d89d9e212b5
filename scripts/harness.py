"""Tasks of lm-evaluation-harness with the model in this process: the harness's own command line, with one more model.

    python -m scripts.harness --model eaglet --model_args checkpoint=DIR,eagle=HEAD --tasks gsm8k,hellaswag

`--model_args` takes the arguments of `load`, and `--help` explains the others. It needs lm_eval (pip install lm-eval). A
server can be asked, too: docs/server.md has that command.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from decoding.params import SamplingParams
from engine.load import load
from engine.results import GenerationResult
from support.errors import UsageError, run_command

ANSWER_TOKENS = 256  # where a task does not say how long an answer may be
AT_ONCE = 64  # prompts that are queued together, whose log-probabilities are held until they are added up


def model_class() -> type:
    """A model as the harness wants it, whose name there is "eaglet". Raises UsageError where lm_eval is not installed."""
    try:
        from lm_eval import utils
        from lm_eval.api.model import TemplateLM
        from lm_eval.api.registry import register_model
    except ImportError as error:
        raise UsageError("tasks need the package lm_eval: pip install lm-eval") from error

    @register_model("eaglet")
    class EagletLM(TemplateLM):
        """An engine. The harness calls these methods, and its documentation explains them."""

        def __init__(self, checkpoint: str = "demo", **options: Any):
            """options: those of `load`."""
            super().__init__()
            self.engine = load(checkpoint, **{"slots": 8} | options)
            self.text = self.engine.tokenizer
            if self.text is None:
                raise UsageError(f"{checkpoint} has no tokenizer, and tasks are texts.")
            self.begin = self.text.encode("")  # what stands before every text

        @classmethod
        def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: object = None) -> TemplateLM:
            return cls(**arg_dict)  # `load` chooses the device, and an engine has slots where others have batches

        @classmethod
        def create_from_arg_string(cls, arg_string: str, additional_config: object = None) -> TemplateLM:
            return cls(**utils.simple_parse_args_string(arg_string))

        @property
        def eot_token_id(self) -> int:
            return self.engine.stop_ids(SamplingParams())[0]

        @property
        def prefix_token_id(self) -> int:
            return self.eot_token_id if self.text.bos_id is None else self.text.bos_id

        @property
        def tokenizer_name(self) -> str:
            return str(self.engine.options.checkpoint)

        def chat_template(self, chat_template: bool | str = False) -> str | None:
            return self.text.chat_template if chat_template else None

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return self.text.render_chat(chat_history, add_generation_prompt)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            goes_on = add_special_tokens is False
            ids = self.text.encode(string, add_bos=False, continuation=goes_on, control=True)
            return ids if goes_on or ids[: len(self.begin)] == self.begin else self.begin + ids

        def _loglikelihood_tokens(self, requests: Sequence[tuple], **_: Any) -> list[tuple[float, bool]]:
            settings = SamplingParams(max_new_tokens=0, prompt_logprobs=1)
            texts = [(before + after)[-self.engine.ctx :] for _, before, after in requests]
            results = self._results(texts, [settings] * len(texts))
            return [likelihood(result, text, len(after))
                    for result, text, (_, _, after) in zip(results, texts, requests, strict=True)]  # fmt: skip

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            sums = []
            for (string,) in (request.args for request in requests):
                ids = self.tok_encode(string, add_special_tokens=False)
                windows = utils.get_rolling_token_windows(ids, self.prefix_token_id, self.engine.ctx - 1, 1)
                parts = [(None, *utils.make_disjoint_window(window)) for window in windows]
                sums.append(sum(logprob for logprob, _ in self._loglikelihood_tokens(parts)))
            return sums

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            texts, settings = [], []
            for context, told in (request.args for request in requests):
                most = min(told.get("max_gen_toks", told.get("max_tokens", ANSWER_TOKENS)), self.engine.ctx - 1)
                stops = [told["until"]] if isinstance(told.get("until"), str) else told.get("until", [])
                given = {name: told[name] for name in ("temperature", "top_p", "top_k", "min_p") if name in told}
                given = given if told.get("do_sample", True) else {}
                settings.append(SamplingParams(max_new_tokens=most, stop=tuple(filter(None, stops)), **given))
                texts.append(self.tok_encode(context)[-(self.engine.ctx - most) :])
            return [result.text for result in self._results(texts, settings)]

        def _results(self, texts: list[list[int]], settings: list[SamplingParams]) -> Iterator[GenerationResult]:
            for at in range(0, len(texts), AT_ONCE):
                yield from self.engine.generate_batch(texts[at : at + AT_ONCE], settings[at : at + AT_ONCE]).run()

    return EagletLM


def likelihood(result: GenerationResult, text: Sequence[int], count: int) -> tuple[float, bool]:
    """The log-probability of the last tokens of a text, and whether greedy decoding gives them."""
    entries = result.prompt_logprobs[-count:]
    greedy = all(entry.top[0][0] == token for entry, token in zip(entries, text[-count:], strict=True))
    return sum(entry.logprob for entry in entries), greedy


def run() -> int:
    """The command line of the harness."""
    model_class()
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(run))
