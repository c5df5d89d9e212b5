"""Small endpoints that decode nothing: llama.cpp's for token ids, prompts and facts, and OpenAI's for embeddings."""

import base64
from collections.abc import Callable
from typing import Any

import torch

from decoding.drafter import PlainDrafter
from decoding.params import SamplingParams
from decoding.step import DecodeState
from engine.engine import Engine
from engine.intake import Intake
from engine.prefill import run_chunk
from serving.fields import ApiError, Fields, text_prompts, wrong
from serving.messages import count_tokens
from serving.prompts import adapter_named, prompts_of, why_too_long
from serving.requests import Ask, chat_ask
from serving.scheduler import ServeSettings
from support.reader import is_a
from text.tokenizer import Tokenizer

MAX_INPUTS = 256  # texts that one request may have embedded
CHUNK = 256  # tokens of one forward


def tokenize(engine: Intake, settings: ServeSettings, body: dict[str, Any]) -> dict[str, Any]:
    """POST /tokenize: the ids of a text, in the form of llama.cpp (`content`) or of vLLM (`prompt`, or `messages`).

    In llama.cpp's form the text of control tokens stays text.
    """
    fields, tokenizer = Fields(body), _tokenizer(engine)
    fields.refuse("parse_special", (False,), "the text of control tokens stays text.")
    name = "prompt" if fields.given("prompt") else "content"
    if fields.given("messages"):
        (ids,) = prompts_of(engine, chat_ask(body))
    else:
        text = fields.required(name, str)
        if reason := why_too_long(len(text), engine.ctx):
            raise wrong(name, reason)
        begins = ("add_special_tokens", True) if name == "prompt" else ("add_special", False)
        ids = tokenizer.encode(text, add_bos=fields.get(begins[0], bool, begins[1]), control=name == "prompt")
    if not fields.get("with_pieces", bool, False):
        return {"tokens": ids, "count": len(ids), "max_model_len": engine.ctx}
    return {"tokens": [{"id": i, "piece": _piece(tokenizer.pieces.get(i, b""))} for i in ids]}


def detokenize(engine: Intake, settings: ServeSettings, body: dict[str, Any]) -> dict[str, Any]:
    """POST /detokenize: the text of ids, with the text of control tokens, as llama.cpp and as vLLM call it."""
    ids = Fields(body).required("tokens", list)
    if not all(is_a(i, int) for i in ids):
        raise wrong("tokens", "must be a list of token ids")
    text = _tokenizer(engine).decode(ids, skip_special=False, continuation=True)
    return {"content": text, "prompt": text}


def apply_template(engine: Intake, settings: ServeSettings, body: dict[str, Any]) -> dict[str, Any]:
    """POST /apply-template: the prompt that a request to /v1/chat/completions would have, as text."""
    (ids,) = prompts_of(engine, chat_ask(body))
    return {"prompt": _tokenizer(engine).decode(ids, skip_special=False)}


def embeddings(engine: Intake, settings: ServeSettings, body: dict[str, Any]) -> dict[str, Any]:
    """POST /v1/embeddings: one vector of length 1 for each text, the mean of the last hidden states of its tokens."""
    fields = Fields(body)
    coded = fields.choice("encoding_format", ("float", "base64"), "float")
    fields.refuse("dimensions", (engine.model_config.hidden_size,), "the vectors have the model's own size.")
    inputs = text_prompts(body.get("input"), "input")
    if len(inputs) > MAX_INPUTS:
        raise wrong("input", f"has {len(inputs)} texts; allowed: at most {MAX_INPUTS}")
    prompts = prompts_of(engine, Ask({}, prompts=inputs, source="input"))
    name = adapter_named(engine, fields.get("model", str, ""))
    V = engine.model_config.vocab_size
    for i, ids in enumerate(prompts):
        if not 1 <= len(ids) <= engine.ctx or not all(0 <= token < V for token in ids):
            allowed = f"allowed: 1 to {engine.ctx:,}, each with an id below {V:,}"
            raise wrong("input", f"number {i} has {len(ids):,} tokens; {allowed}")
    data = []
    for i, ids in enumerate(prompts):
        vector = engine.together(_embed, ids, engine.adapter_number(name))
        value = base64.b64encode(vector.numpy().tobytes()).decode() if coded == "base64" else vector.tolist()
        data.append({"object": "embedding", "index": i, "embedding": value})
    tokens = sum(map(len, prompts))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": name or settings.model, "usage": usage}


@torch.inference_mode()
def _embed(engine: Engine, ids: list[int], adapter: int) -> torch.Tensor:
    """The mean of the final hidden states of these ids, scaled to length 1: fp32 [H] on the host. It has a cache of its
    own, so that the caches of chats stay valid."""
    model, choice = engine.model, engine.batch.choice
    with engine.driver.alone(), engine.backend.active():
        if choice is not None:
            choice.set([adapter])
        drafter = PlainDrafter(model)
        state = DecodeState(model, drafter, 1, -(-len(ids) // CHUNK) * CHUNK)
        total = torch.zeros(model.config.hidden_size, device=model.device)
        for start in range(0, len(ids), CHUNK):
            part = ids[start : start + CHUNK]
            known = torch.tensor([part + [0] * (CHUNK + 1 - len(part))], device=model.device)
            at, keep = (torch.tensor([n], device=model.device) for n in (start, len(part)))
            hidden, _ = run_chunk(model, drafter, state, 0, known, at, keep, False)
            total += hidden[0, : len(part)].float().sum(0)
        return torch.nn.functional.normalize(total, dim=0).cpu()


def properties(engine: Intake, settings: ServeSettings) -> dict[str, Any]:
    """GET /props: what llama.cpp's clients ask of a server."""
    tokenizer = engine.tokenizer
    return {
        "default_generation_settings": {"n_ctx": engine.ctx, "params": settings.defaults},
        "total_slots": engine.batch_size,
        "model_path": settings.model,
        "chat_template": tokenizer.chat_template if tokenizer else "",
        "modalities": {"vision": False, "audio": False},
        "build_info": f"eaglet {settings.version}",
    }


def tokenizer_facts(engine: Intake, settings: ServeSettings) -> dict[str, Any]:
    """GET /tokenizer_info: what vLLM's clients, such as lm-evaluation-harness, ask of a tokenizer."""
    tokenizer = _tokenizer(engine)
    ids = {"bos_token": tokenizer.bos_id, "eos_token": next(iter(engine.stop_ids(SamplingParams())), None)}
    names = {name: None if i is None else tokenizer.pieces[i].decode(errors="replace") for name, i in ids.items()}
    return {"tokenizer_class": "eaglet", "chat_template": tokenizer.chat_template or None} | names


def _tokenizer(engine: Intake) -> Tokenizer:
    if engine.tokenizer is None:
        raise ApiError(400, "this model has no tokenizer", None, "invalid_value")
    return engine.tokenizer


def _piece(data: bytes) -> str | list[int]:
    """A token's text, or its bytes where they are only a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


Deed = Callable[[Intake, ServeSettings, dict[str, Any]], dict[str, Any]]
SMALL: dict[str, Deed] = {
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/apply-template": apply_template,
    "/v1/embeddings": embeddings,
    "/v1/messages/count_tokens": count_tokens,
}
Facts = Callable[[Intake, ServeSettings], dict[str, Any]]
FACTS: dict[str, Facts] = {
    "/props": properties,
    "/tokenizer_info": tokenizer_facts,
    "/version": lambda engine, settings: {"version": settings.version},
}
