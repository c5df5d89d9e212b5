"""A GGUF file's tokenizer, rewritten as the files that a Hugging Face directory has.

A byte-level BPE becomes a `tokenizer.json`, sentencepiece pieces become a `tokenizer.model`. The regular expressions and
the stop tokens are those of llama.cpp, which is the reference for the ids. Those of "gpt-4o" and "tekken" are the models'
own, in which marks such as accents belong to their letters: llama.cpp's stand-ins cut there.
"""

import json
import re
import struct
from collections.abc import Mapping
from typing import Any

from support.reader import is_a

KEY = "tokenizer.ggml."
TOKEN_LISTS = [KEY + name for name in ("tokens", "token_type", "scores", "merges")]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token types, the same numbers as sentencepiece's
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
ENDINGS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}%s|{SPACES}"
LLAMA3, QWEN2, SEED = WORDS % ("{1,3}", "]+[\\r\\n]*"), WORDS % ("", "]+[\\r\\n]*"), WORDS % ("", "\\r\\n]+")
QWEN35 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"\s\p{L}\p{N}]", r"\s\p{L}\p{M}\p{N}]")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
OTHER = r"[^\r\n\p{L}\p{N}]?"
CASED = rf"{OTHER}{UPPER}*{LOWER}+%s|{OTHER}{UPPER}+{LOWER}*%s|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
TEKKEN, GPT4O = CASED % ("", "", ""), CASED % (f"{ENDINGS}?", f"{ENDINGS}?", "{1,3}")
# Regular expressions that split a text, one after the other, by the names of pre-tokenizers.
SPLITS: dict[str, list[str]] = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    **dict.fromkeys("gpt-2 phi-2 mpt olmo exaone4 a.x-4.0 mellum trillion granite-docling".split(), [GPT2]),
    **dict.fromkeys("smollm starcoder refact command-r codeshell exaone minerva-7b".split(), [r"\p{N}", GPT2]),
    **dict.fromkeys("llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0".split(), [LLAMA3]),
    **dict.fromkeys("smaug-bpe dbrx chatglm-bpe glm4".split(), [LLAMA3]),
    **dict.fromkeys("qwen2 deepseek-r1-qwen stablelm2 megrez kormo".split(), [QWEN2]),
    "qwen35": [QWEN35],
    "gpt-4o": [GPT4O],
    "seed-coder": [SEED],
    "tekken": [TEKKEN],
}
# These begin a text with BOS unless the file says otherwise.
BEGINS = frozenset("llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0 tekken".split())
WHOLE_WORDS = BEGINS | {"glm4"}  # these take a word that is a token as it is, without merges
ENDS = """<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] <|end_of_text|>
    <｜end▁of▁sentence｜> <|return|> <|call|> <turn|> <|tool_response>""".split()
# What looks like a mark of a chat, such as <|user|>, <turn|> or <start_of_turn>.
MARK = re.compile(r'<(?=[^<>]*\|)(?=[^<>]*[\w"])[^\s<>]+>|<｜[^\s<>]+｜>|<(?:start|end)_of_turn>')


def stop_ids(metadata: Mapping[str, Any], types: list[int] | None = None) -> list[int]:
    """The ids that end a text: those that the file names, and the control tokens that are known to end one.

    types: `token_types`, where they are known already.
    """
    texts = token_texts(metadata)
    named = [metadata.get(f"{KEY}{name}_token_id") for name in ("eos", "eot", "eom")]
    types = token_types(metadata) if types is None else types
    ids = {texts[i]: i for i, kind in enumerate(types[: len(texts)]) if kind == CONTROL}
    if ids.keys() >= {"<|return|>", "<|call|>"}:
        ids.pop("<|end|>", None)  # which ends a part of an answer there
    ends = [*named, *(ids.get(text) for text in (*ENDS, "<eos>"))]
    return list(dict.fromkeys(i for i in ends if is_a(i, int) and 0 <= i < max(1, len(texts))))


def token_texts(metadata: Mapping[str, Any]) -> list[str]:
    """The texts of all tokens in the order of their ids, [] if the file holds no tokenizer."""
    return metadata.get(f"{KEY}tokens") or []


def token_types(metadata: Mapping[str, Any]) -> list[int]:
    """The types of all tokens. Marks of a chat count as control tokens, whatever type the file gives them: those that end
    an answer, those that the file calls user-defined, and those that its chat template writes."""
    texts, template = token_texts(metadata), metadata.get("tokenizer.chat_template")
    types = list(metadata.get(f"{KEY}token_type") or [NORMAL] * len(texts))
    written = template if isinstance(template, str) else ""
    # Where `</s>` is no control token, it is HTML.
    ends = {*ENDS} - {"</s>"} | ({"<eos>"} if metadata.get(f"{KEY}model") == "gemma4" else set())

    for i, (text, kind) in enumerate(zip(texts, types, strict=False)):
        if isinstance(text, str) and text.startswith(("<", "_", "[")) and kind in (NORMAL, USER_DEFINED):
            if text in ends or (MARK.fullmatch(text) and (kind == USER_DEFINED or text in written)):
                types[i] = CONTROL
    return types


def tokenizer_files(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    """File name -> contents, for `tokenizer.load_tokenizer`. {} if the file holds no tokenizer.

    A tokenizer.json is the object that its text stands for.

    Raises ValueError in one line for a kind of tokenizer, or a pre-tokenizer, that is not known.
    """
    tokens, model = token_texts(metadata), metadata.get(f"{KEY}model")
    if not tokens:
        return {}
    types = token_types(metadata)
    if len(types) != len(tokens) or not all(isinstance(text, str) for text in tokens):
        raise ValueError(f"{where}: tokenizer.ggml.tokens and token_type do not belong together. Damaged file?")
    config: dict[str, Any] = {}
    for name in ("bos", "eos", "unknown", "padding"):
        i = metadata.get(f"{KEY}{name}_token_id")
        if i is not None and not (is_a(i, int) and 0 <= i < len(tokens)):
            raise ValueError(f"{where}: {KEY}{name}_token_id = {i!r:.40}, but there are {len(tokens)} tokens.")
        if i is not None and types[i] != NORMAL:
            config[{"unknown": "unk_token", "padding": "pad_token"}.get(name, f"{name}_token")] = tokens[i]
    templates = {"default": metadata.get("tokenizer.chat_template")}
    for name in metadata.get("tokenizer.chat_templates") or []:
        templates[name] = metadata.get(f"tokenizer.chat_template.{name}")
    config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items() if text]
    if model == "llama" and re.search("phi[ -]?3", str(metadata.get("general.name")).lower()):  # no file says it
        plain = {"<unk>", "<s>", "<|endoftext|>"}
        config["added_tokens_decoder"] = {
            str(i): {"content": text, "special": True, "rstrip": True}
            for i, (text, kind) in enumerate(zip(tokens, types, strict=True))
            if kind == CONTROL and text not in plain
        }
    flags = {f"add_{end}_token": metadata.get(f"{KEY}add_{end}_token") for end in ("bos", "eos")}
    if model == "gemma4":
        vocabulary = _bpe(tokens, types, metadata.get(f"{KEY}merges") or [], None, [config.get("bos_token"), None])
        files: dict[str, Any] = {"tokenizer.json": vocabulary}
    elif model == "gpt2":
        pre = metadata.get(f"{KEY}pre", "default")
        if pre not in SPLITS:
            problem = f"pre-tokenizer {pre!r:.60} is not known; known are those of common models, such as llama-bpe"
            raise ValueError(f"{where}: {problem}. Use the model's Hugging Face folder, or --prompt-ids.")
        begins = pre in BEGINS if flags["add_bos_token"] is None else flags["add_bos_token"]
        ends = flags["add_eos_token"]
        around = [config.get("bos_token") if begins else None, config.get("eos_token") if ends else None]
        files = {"tokenizer.json": _bpe(tokens, types, metadata.get(f"{KEY}merges") or [], pre, around)}
    elif model == "llama":
        config |= {key: flag for key, flag in flags.items() if flag is not None}
        files = {"tokenizer.model": _sentencepiece(metadata, tokens, types, where)}
    else:
        raise ValueError(
            f"{where}: tokenizer {model!r:.60} is not supported; gpt2 and gemma4 (BPE), llama (sentencepiece) are."
        )
    files["tokenizer_config.json"] = json.dumps(config).encode()
    files["generation_config.json"] = json.dumps({"eos_token_id": stop_ids(metadata, types)}).encode()
    return files


def _bpe(
    tokens: list[str], types: list[int], merges: list[str], pre: str | None, around: list[str | None]
) -> dict[str, Any]:
    """A tokenizer.json of a byte-level BPE, or of one over characters that writes unknown ones as bytes (Gemma 4).

    pre: how texts are split; None: over characters. around: the tokens before and after every text, or None.
    """
    added = [
        {"id": i, "content": text, "special": kind != USER_DEFINED, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    if pre is None:
        to, back = ({"type": "Replace", "pattern": {"String": a}, "content": b} for a, b in (" \u2581", "\u2581 "))
        decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
        parts = {"normalizer": to, "decoder": {"type": "Sequence", "decoders": decoders}}
        flags = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    else:
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        splits = [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
            for regex in SPLITS[pre]
        ]
        sequence = {"type": "Sequence", "pretokenizers": [*splits, byte_level]}
        parts, flags = {"pre_tokenizer": sequence, "decoder": byte_level}, {"ignore_merges": pre in WHOLE_WORDS}
    vocabulary = {text: i for i, text in enumerate(tokens)}
    text_itself = [{"Sequence": {"id": "A", "type_id": 0}}]
    before, after = ([{"SpecialToken": {"id": t, "type_id": 0}}] if t else [] for t in around)
    special = {t: {"id": t, "ids": [vocabulary[t]], "tokens": [t]} for t in around if t}
    single = [*before, *text_itself, *after]
    pair = [*single, *before, {"Sequence": {"id": "B", "type_id": 1}}, *after]
    template = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    model = {
        "type": "BPE",
        "vocab": vocabulary,
        # A space separates the two parts. The first part may begin with one.
        "merges": [(merge[: (at := merge.index(" ", 1))], merge[at + 1 :]) for merge in merges],
        **flags,
    }
    return {
        "version": "1.0",
        "added_tokens": added,
        "post_processor": template if special else None,
        "model": model,
        **parts,
    }


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int], where: str) -> bytes:
    """A sentencepiece model: the protobuf messages that hold pieces, scores and the normalizer's flags."""
    scores = metadata.get(f"{KEY}scores") or []
    if len(scores) != len(tokens):
        raise ValueError(f"{where}: tokenizer.ggml.scores has {len(scores)} values for {len(tokens)} tokens.")
    # sentencepiece has one unknown piece. Some files call their padding unknown, too, or the unknown piece a control.
    unknown = metadata.get(f"{KEY}unknown_token_id", types.index(UNKNOWN) if UNKNOWN in types else None)
    types = [UNKNOWN if i == unknown else UNUSED if kind == UNKNOWN else kind for i, kind in enumerate(types)]
    # llama.cpp writes the spaces of these pieces as they are, sentencepiece as in its normalized texts.
    tokens = [t.replace(" ", "\u2581") if kind == USER_DEFINED else t for t, kind in zip(tokens, types, strict=True)]
    pieces = [
        _field(1, _field(1, text.encode()) + _field(2, float(score)) + _field(3, kind))
        for text, score, kind in zip(tokens, scores, types, strict=True)
    ]
    trainer = _field(3, 2)  # the model is a BPE
    trainer += _field(35, int(BYTE in types))  # whether bytes spell unknown characters
    for number, name in ((45, "unknown"), (46, "bos"), (47, "eos")):
        i = metadata.get(f"{KEY}{name}_token_id")
        if i is not None:
            trainer += _field(number, tokens[i].encode())
    charsmap = bytes(v & 255 for v in metadata.get(f"{KEY}precompiled_charsmap") or [])
    normalizer = _field(2, charsmap) if charsmap else _field(1, b"identity")
    normalizer += _field(3, int(metadata.get(f"{KEY}add_space_prefix", True)))
    normalizer += _field(4, int(metadata.get(f"{KEY}remove_extra_whitespaces", False)))
    return b"".join(pieces) + _field(2, trainer) + _field(3, normalizer)


def _field(number: int, value: int | float | bytes) -> bytes:
    """One protobuf field: an integer as varint, a float in four bytes, bytes with their length."""
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])
