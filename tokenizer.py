"""Text to token ids and back: `tokenizer.json`, sentencepiece `tokenizer.model`, streaming, chat templates.

What a user writes never becomes a control token. Decoding is one UTF-8 decoder over the tokens' bytes, so
streaming equals one-shot. A model's chat template is untrusted: it runs sandboxed in a limited child process.
"""

import codecs
import contextlib
import datetime
import json
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

TEMPLATE_CHARACTERS = 64 * 1024
RENDER_SECONDS, RENDER_CPU_SECONDS, RENDER_MEMORY = 10, 2, 512 * 2**20  # memory: bytes of address space
VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
    "detailed, and polite answers to the user's questions."
)
LLAMA2_SYSTEM = (  # the 508 characters of the EAGLE evaluation, one double space included
    "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, while being "
    "safe.  Your answers should not include any harmful, unethical, racist, sexist, toxic, dangerous, or "
    "illegal content. Please ensure that your responses are socially unbiased and positive in nature.\n\nIf "
    "a question does not make any sense, or is not factually coherent, explain why instead of answering "
    "something not correct. If you don't know the answer to a question, please don't share false information."
)
NAMED_TOKEN = re.compile("[a-z]+_token")  # keys such as bos_token
BUILTIN_SYSTEM = {"vicuna": VICUNA_SYSTEM, "llama-2-chat": LLAMA2_SYSTEM, "mixtral": ""}
PAPER_SUFFIX = {
    "vicuna": "",
    "llama-2-chat": " ",
    "mixtral": "",
}  # encode_chat(suffix=...) for paper benchmarks


def builtin_prompt(name: str, messages: list[dict], add_generation_prompt: bool = True) -> str:
    """Prompt of `vicuna`, `llama-2-chat` or `mixtral`, byte-equal to FastChat 0.2.31 as EAGLE used it.

    A leading system message replaces BUILTIN_SYSTEM[name] ("" for none); an empty turn is its bare tag.
    ValueError unless the roles are [system,] user, assistant, ..., user."""
    roles, turns = [m["role"] for m in messages], [m["content"] for m in messages]
    system = turns.pop(0) if roles[:1] == ["system"] else BUILTIN_SYSTEM[name]
    expected = (["user", "assistant"] * len(turns))[: len(turns)]
    if not turns or roles[-len(turns) :] != expected or (add_generation_prompt and len(turns) % 2 == 0):
        raise ValueError(f"{name} takes roles [system,] user, assistant, ..., user; got {', '.join(roles)}")
    if name == "vicuna":
        tags, ends, prompt = ("USER:", "ASSISTANT:"), (" ", "</s>"), system + " "
    else:
        tags, ends = ("[INST]", "[/INST]"), (" ", "</s>" if name == "mixtral" else " </s><s>")
        prompt = f"[INST] <<SYS>>\n{system}\n<</SYS>>\n\n" if system else "[INST] "
    for i, text in enumerate(turns + [""] * add_generation_prompt):
        opened = i == 0 and name != "vicuna"  # the first [INST] is already there
        prompt += f"{'' if opened else tags[i % 2] + ' '}{text}{ends[i % 2]}" if text else tags[i % 2]
    return prompt


def load_tokenizer(directory: str | Path, vocab_size: int | None = None) -> "Tokenizer | None":
    """Tokenizer of a model directory, or None without tokenizer files (prompts are ids then).

    Prefers `tokenizer.json` to sentencepiece `tokenizer.model` (Meta: beside `params.json` or a folder up). Ids
    must be below `vocab_size` (rows of the model's embedding), but for special tokens that nothing uses, such as
    a stray <pad>. Stop ids are those of `generation_config.json`, else of `config.json`, else the tokenizer's own
    EOS. Any bad file is a one-line ValueError."""
    directory = Path(directory)
    paths = [directory / "tokenizer.json", directory / "tokenizer.model"]
    if (directory / "params.json").is_file():
        paths.append(directory.absolute().parent / "tokenizer.model")
    path = next((p for p in paths if p.is_file()), None)
    if path is None:
        return None
    with _one_line_errors(f"cannot use {path}", "Download the tokenizer files again, or pass --prompt-ids."):
        config = _named_tokens(directory / "special_tokens_map.json")
        config |= _named_tokens(directory / "tokenizer_config.json")
        tokens = {content: {"id": i} for content, i in _json(directory / "added_tokens.json").items()}
        for i, token in (config.get("added_tokens_decoder") or {}).items():
            tokens[token["content"]] = {"id": int(i), "special": token.get("special", False)}
        named = {k: _content(v) for k, v in config.items() if NAMED_TOKEN.fullmatch(k) and v}
        extra = [config.get(f"{kind}_special_tokens") or [] for kind in ("additional", "extra")]
        extra = [t for group in extra for t in (group.values() if isinstance(group, dict) else group)]
        for content in [*named.values(), *map(_content, extra)]:
            tokens.setdefault(content, {})["special"] = True
        files = (_load_json if path.name == "tokenizer.json" else _load_sentencepiece)(path, tokens, config)
        tokenizer = Tokenizer(files, config, named, _listed_stops(directory, files, vocab_size), vocab_size)
        if (directory / "chat_template.jinja").is_file():
            with open(directory / "chat_template.jinja", encoding="utf-8") as file:
                tokenizer.chat_templates = {"default": file.read(TEMPLATE_CHARACTERS + 1)}
            tokenizer.chat_template_source = "chat_template.jinja"
        elif found := config.get("chat_template"):
            found = [{"name": "default", "template": found}] if isinstance(found, str) else found
            tokenizer.chat_templates = {str(t["name"]): str(t["template"]) for t in found}
            if "default" in tokenizer.chat_templates:
                tokenizer.chat_template_source = "tokenizer_config.json"
    return tokenizer


def _listed_stops(directory: Path, files: "_Files", vocab_size: int | None) -> list:
    """Stop ids of generation_config.json, or else of config.json, [] if neither lists any. An added token that the model
    has no row for never comes: it is left out."""
    for name in ("generation_config.json", "config.json"):
        stop = _json(directory / name).get("eos_token_id")
        stop = stop if isinstance(stop, list) else [] if stop is None else [stop]
        if vocab_size is not None:
            stop = [i for i in stop if i not in files.pieces or i < vocab_size]
        if stop:
            return stop
    return []


@dataclass
class _Files:
    """What both formats come down to. `encode(text, first)` parses no special tokens; `first`: the text starts
    the sequence, where a dummy space belongs. `around`: the ids that the file puts before and after a text."""

    encode: Callable[[str, bool], list[int]]
    vocab: dict[str, int]
    pieces: dict[int, bytes]
    special: dict[str, int]
    leading_space: bool
    around: tuple[list[int], list[int]] | None = None
    named: dict[str, str] = field(default_factory=dict)


class Tokenizer:
    """Encode, decode and chat for one model; made by `load_tokenizer`. Ids are Python ints on the host.

    Attributes: vocab_size (largest id + 1), bos_id (or None), eos_ids (stop ids), special_ids, chat_templates (by
    name), chat_template_source ("tokenizer_config.json", "chat_template.jinja", "built-in NAME" or None)."""

    def __init__(
        self, files: _Files, config: dict, named: dict[str, str], stop: list, vocab_size: int | None
    ):
        self._files, self._named = files, files.named | named
        self.vocab_size = max(files.pieces, default=-1) + 1
        self.special_ids = frozenset(files.special.values())
        names = ("bos_token", "eos_token", "unk_token")
        self.bos_id, eos_id, self._unk_id = (files.vocab.get(self._named.get(name, "")) for name in names)
        # As in transformers, the post-processor of tokenizer.json decides; other files have flags. Without flag a
        # sentencepiece model gets BOS, as in Meta's code and transformers 4 (transformers 5 adds none).
        bos, eos = ([] if i is None else [i] for i in (self.bos_id, eos_id))
        add_bos, add_eos = config.get("add_bos_token"), config.get("add_eos_token")
        flagged = (bos if add_bos is None or add_bos else [], eos if add_eos else [])
        self._prefix, self._suffix = flagged if files.around is None else files.around
        self.eos_ids = tuple(stop or eos)

        limit = self.vocab_size if vocab_size is None else vocab_size
        used = [*self.eos_ids, *self._prefix, *self._suffix, *bos]
        outside = [i for i in used if type(i) is not int or not 0 <= i < limit]
        outside += [i for i in files.pieces if not 0 <= i < limit and i not in self.special_ids]
        if outside:
            raise ValueError(
                f"token id {outside[0]!r} is outside the model's vocabulary of {limit} (files of another model?)."
            )
        self._control = {content: i for content, i in files.special.items() if 0 <= i < limit}
        self._control_pattern = _any_of(self._control)
        # User text may not yield these; a one-character special (pad_token "!") is an ordinary character too.
        self._forbidden = {i: c for c, i in files.special.items() if len(c) > 1 and i != self._unk_id}
        self.chat_templates: dict[str, str] = {}
        self.chat_template_source: str | None = None
        self._template = "default"

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Ids of a user's text; `</s>` in it stays text. `add_bos`: with what `transformers` puts around a text,
        which is BOS if the model has one (and EOS for the rare model that asks for it)."""
        ids = self._text_ids(text, first=True)
        return [*self._prefix, *ids, *self._suffix] if add_bos else ids

    def decode(self, ids: Iterable[int], skip_special: bool = True, continuation: bool = False) -> str:
        """Text of ids, without the space sentencepiece puts before a text unless it is a `continuation` of other
        text. Invalid UTF-8 gives U+FFFD, unknown ids nothing; spaces are not "cleaned up" (that loses text)."""
        stream = self.stream(skip_special, continuation)
        return stream.push(ids) + stream.flush()

    def stream(self, skip_special: bool = True, continuation: bool = False) -> "StreamDecoder":
        """Incremental `decode` with the same arguments."""
        return StreamDecoder(self._files, self.special_ids if skip_special else frozenset(), continuation)

    def use_template(self, name: str) -> None:
        """Choose a built-in template or a named one of this model; ValueError lists what there is."""
        known = [*self.chat_templates, *BUILTIN_SYSTEM]
        if name not in known:
            raise ValueError(f"no chat template {name!r}; choose one of: {', '.join(known)}")
        self.chat_template_source = f"{'built-in' if name in BUILTIN_SYSTEM else 'named'} {name}"
        self._template = name

    def render_chat(self, messages: list, add_generation_prompt: bool = True) -> str:
        """Prompt text of `messages`, dicts of `role` and `content`; failures are one-line ValueErrors."""
        _check_messages(messages)
        return self._render([messages], add_generation_prompt)[0]

    def encode_chat(self, messages: list, add_generation_prompt: bool = True, suffix: str = "") -> list[int]:
        """Ids of `render_chat(messages) + suffix`. Control tokens written by the template are parsed; in message
        contents they stay text. A model's template writes BOS itself, a built-in one gets it as in `encode`.

        Random sentinels, which keep the outer whitespace (so `trim` works), stand for the contents. This tells
        template from contents and must reproduce the real prompt. If not, the template edits contents: the real
        prompt is parsed whole, provided that no content holds the text of a control token and that the control
        tokens are those of the sentinel prompt; else ValueError."""
        _check_messages(messages)
        mark, bodies = f"\ue000{secrets.token_hex(12)}x", [m["content"].strip() for m in messages]
        hidden = [
            m | {"content": m["content"].replace(body, f"{mark}{i}\ue001") if body else m["content"]}
            for i, (m, body) in enumerate(zip(messages, bodies, strict=True))
        ]
        real, opaque = self._render([messages, hidden], add_generation_prompt)
        pieces = re.split(f"{mark}([0-9]+)\ue001", opaque)
        pieces[1::2] = [bodies[int(i)] for i in pieces[1::2]]  # contents; template text is at the even places
        if "".join(pieces) != real:
            find = self._control_pattern.findall
            expected = [token for text in pieces[::2] for token in find(text)]
            if any(map(find, bodies)) or find(real) != expected:
                raise ValueError(
                    f"the chat template ({self.chat_template_source}) edits messages that hold the text of control "
                    "tokens. Remove that text, or pass --prompt."
                )
            pieces = [real]
        ids, run = [], ""
        for i, piece in enumerate(pieces):
            for j, text in enumerate([piece] if i % 2 else self._control_pattern.split(piece)):
                if j % 2:  # a control token ends a run of text
                    ids += [*self._text_ids(run, first=not ids), self._control[text]]
                run = "" if j % 2 else run + text
        ids += self._text_ids(run + suffix, first=not ids)
        return self._prefix + ids if self._template in BUILTIN_SYSTEM else ids

    def _text_ids(self, text: str, first: bool) -> list[int]:
        with _one_line_errors("cannot encode this text", "Pass valid Unicode, or --prompt-ids."):
            text.encode()  # refuses lone surrogates
            ids = self._files.encode(text, first) if text else []
        if self._forbidden.keys().isdisjoint(ids):
            return ids
        # A vocabulary may spell a control token with ordinary merges: write it character by character instead.
        vocab, spelled = self._files.vocab, []
        for i in ids:
            for char in self._forbidden.get(i, ""):
                names = [char] if char in vocab else [f"<0x{byte:02X}>" for byte in char.encode()]
                spelled += [vocab.get(name, self._unk_id) for name in names]
            spelled += [] if i in self._forbidden else [i]
        return [i for i in spelled if i is not None]

    def _render(self, variants: list[list[dict]], add_generation_prompt: bool) -> list[str]:
        name, builtins = self._template, ", ".join(BUILTIN_SYSTEM)
        if name in BUILTIN_SYSTEM:
            return [builtin_prompt(name, messages, add_generation_prompt) for messages in variants]
        if name not in self.chat_templates:
            raise ValueError(f"this model has no chat template. Use --prompt or a built-in one: {builtins}.")
        roles = ", ".join(m["role"] for m in variants[0])
        where = f"chat template ({self.chat_template_source}) failed for roles [{roles}]"
        with _one_line_errors(where, f"Send the roles it expects, or use a built-in template: {builtins}."):
            variables = self._named | {"add_generation_prompt": add_generation_prompt}
            return _render_in_child(self.chat_templates[name], variants, variables)


class StreamDecoder:
    """Text of ids as they arrive; all pushes and `flush` together equal `Tokenizer.decode` of all ids. Bytes of
    an unfinished character wait for the next push, which costs time for its own ids only."""

    def __init__(self, files: _Files, skipped: frozenset[int], continuation: bool):
        self._pieces, self._skipped = files.pieces, skipped
        self._strip_space = files.leading_space and not continuation
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text that became certain with these ids (may be "")."""
        data = b"".join(self._pieces.get(i, b"") for i in ids if i not in self._skipped)
        if self._strip_space and data:
            data, self._strip_space = data.removeprefix(b" "), False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """The rest at the end: "", or U+FFFD for an unfinished character."""
        return self._utf8.decode(b"", final=True)


def _load_json(path: Path, tokens: dict[str, dict], config: dict) -> _Files:
    import tokenizers

    rust = tokenizers.Tokenizer.from_file(str(path))
    rust.no_truncation()
    rust.no_padding()
    known = {t.content: t.special for t in rust.get_added_tokens_decoder().values()}
    for content, token in sorted(tokens.items(), key=lambda item: item[1].get("id", 2**32)):
        special = bool(token.get("special"))
        if known.get(content) is None or special > known[content]:
            added = tokenizers.AddedToken(content, special=special, normalized=False)
            (rust.add_special_tokens if special else rust.add_tokens)([added])
    added, vocab = rust.get_added_tokens_decoder(), rust.get_vocab()
    decoder = rust.decoder.__getstate__().decode() if rust.decoder else ""
    alphabet = _byte_alphabet() if '"ByteLevel"' in decoder else {}
    if not alphabet and "▁" not in decoder:
        raise ValueError("its decoder is neither byte-level nor sentencepiece-like.")
    leading_space = '"Strip"' in decoder or ('"Metaspace"' in decoder and '"never"' not in decoder)
    pieces = {i: _sentencepiece_bytes(token) for token, i in vocab.items()}
    if alphabet:
        for token, i in vocab.items():  # added tokens and stray characters stand for themselves
            plain = i in added or not alphabet.keys() >= set(token)
            pieces[i] = token.encode() if plain else bytes(alphabet[char] for char in token)
    # A random added token. Text behind it does not start the sequence, so it gets no dummy space; encoding it
    # alone shows what the post-processor puts around a text.
    anchor = f"\ue000{secrets.token_hex(12)}\ue001"
    rust.add_tokens([tokenizers.AddedToken(anchor, normalized=False, special=False)])
    rust.encode_special_tokens = True  # means: special tokens found in text are not parsed
    ids = rust.encode(anchor).ids
    place = ids.index(rust.token_to_id(anchor))

    def encode(text: str, first: bool) -> list[int]:
        ids = rust.encode(text if first else anchor + text, add_special_tokens=False).ids
        return ids if first else ids[1:]

    special = {t.content: i for i, t in added.items() if t.special}
    return _Files(encode, vocab, pieces, special, leading_space, (ids[:place], ids[place + 1 :]))


def _load_sentencepiece(path: Path, tokens: dict[str, dict], config: dict) -> _Files:
    import sentencepiece

    data = path.read_bytes()
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\n", data):
        raise ValueError("a tiktoken file (Llama 3); put the tokenizer.json of the same model beside it.")
    model = sentencepiece.SentencePieceProcessor(model_proto=data)
    # Without dummy space: protobuf merges an appended normalizer_spec (field 3) {add_dummy_prefix: false}.
    inner = sentencepiece.SentencePieceProcessor(model_proto=data + b"\x1a\x02\x18\x00")
    vocab = {model.id_to_piece(i): i for i in range(model.get_piece_size())}
    pieces = {i: _sentencepiece_bytes(token) for token, i in vocab.items()}
    special = {token: i for token, i in vocab.items() if model.is_control(i) or model.is_unknown(i)}
    ordinary = {}
    for content, token in sorted(tokens.items(), key=lambda item: item[1].get("id", 2**32)):
        i = vocab[content] = token.get("id", vocab.get(content, max(pieces) + 1))
        pieces[i] = content.encode()
        (special if token.get("special") else ordinary)[content] = i
    pattern, legacy = _any_of(ordinary), config.get("legacy") is True

    def encode(text: str, first: bool) -> list[int]:
        ids = []
        for j, part in enumerate(pattern.split(text)):  # legacy: each run of text gets the dummy space
            processor = model if legacy or (first and j == 0) else inner
            ids += [ordinary[part]] if j % 2 else processor.encode(part)
        return ids

    named = {"bos_token": model.bos_id(), "eos_token": model.eos_id(), "unk_token": model.unk_id()}
    named = {name: model.id_to_piece(i) for name, i in named.items() if i >= 0}
    return _Files(encode, vocab, pieces, special, model.encode("a") != inner.encode("a"), None, named)


def _byte_alphabet() -> dict[str, int]:
    """Character to byte of byte-level BPE: printable Latin-1 stands for itself, the rest is 256, 257, ..."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def _sentencepiece_bytes(token: str) -> bytes:
    """`▁` is a space; `<0xE6>` (byte fallback) is one byte."""
    byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()


def _any_of(words: Iterable[str]) -> re.Pattern:
    """One group that matches any of the words, longest first; never matches without words."""
    return re.compile(f"({'|'.join(map(re.escape, sorted(words, key=len, reverse=True))) or '(?!)'})")


def _content(token: str | dict) -> str:
    return token if isinstance(token, str) else token["content"]


def _named_tokens(path: Path) -> dict:
    """A JSON file whose `*_token` values are texts, or objects that hold one; ValueError names any other."""
    value = _json(path)
    for key, token in value.items():
        text = token.get("content") if isinstance(token, dict) else token
        if NAMED_TOKEN.fullmatch(key) and token is not None and not isinstance(text, str):
            raise ValueError(
                f"{path.name}: {key} = {token!r:.80}, expected a text, an object with content, or null"
            )
    return value


def _json(path: Path) -> dict:
    value = {}
    if path.is_file():
        with _one_line_errors(f"{path.name} is not valid JSON", ""):
            value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} must hold a JSON object, not {type(value).__name__}.")
    return value


@contextlib.contextmanager
def _one_line_errors(what: str, fix: str) -> Iterator[None]:
    """Any failure, a Rust panic (a BaseException) included, becomes a ValueError of one line."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        detail = " ".join(str(error).split())[:400].rstrip(".") or type(error).__name__
        raise ValueError(f"{what}: {detail}. {fix}") from error


def _check_messages(messages: list[dict]) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a non-empty list of {role, content}")
    for i, m in enumerate(messages):
        if not isinstance(m, dict) or {k: type(v) for k, v in m.items()} != {"role": str, "content": str}:
            raise ValueError(f"message {i} must have exactly the keys role and content, both text")
        if not re.fullmatch("[A-Za-z_-]{1,32}", m["role"]):  # anything else could hold control tokens
            raise ValueError(f"message {i} has role {m['role'][:40]!r}; it must be a plain word such as user")


def _render_in_child(template: str, variants: list[list[dict]], variables: dict) -> list[str]:
    """One prompt per list of messages. The sandbox alone stops neither nested loops nor strings of a gigabyte: a
    child process with limits on CPU, memory and output does (without `resource`: wall clock and output)."""
    if len(template) > TEMPLATE_CHARACTERS:
        raise ValueError(f"the template is longer than {TEMPLATE_CHARACTERS} characters")
    limit = 2**20 + 8 * sum(len(m["content"]) for m in variants[0])  # characters of a prompt
    request = {"template": template, "variants": variants, "variables": variables, "limit": limit}
    command, data = [sys.executable, "-P", __file__], json.dumps(request).encode()
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=RENDER_SECONDS)
        reply = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        limits = f"{RENDER_CPU_SECONDS} s of CPU, {RENDER_SECONDS} s, {RENDER_MEMORY >> 20} MB"
        raise ValueError(f"the template ran over a limit ({limits})") from None
    if "error" in reply:
        raise ValueError(reply["error"])
    return reply["prompts"]


def _render_here(request: dict) -> list[str]:
    """The child's side: Hugging Face's contract for templates in jinja2's immutable sandbox."""
    import jinja2.ext
    import jinja2.sandbox

    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        for name, limit in (("CORE", 0), ("CPU", RENDER_CPU_SECONDS), ("AS", RENDER_MEMORY)):
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # marks the assistant's text for training; here its body is simply rendered

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message):
        raise ValueError(message)

    def tojson(value, ensure_ascii=False, **options):
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals |= {"raise_exception": raise_exception, "strftime_now": datetime.datetime.now().strftime}
    template, prompts, limit = sandbox.from_string(request["template"]), [], request["limit"]
    for messages in request["variants"]:
        prompts.append("")
        for chunk in template.generate(messages=messages, tools=None, documents=None, **request["variables"]):
            prompts[-1] += chunk
            if len(prompts[-1]) > limit:
                raise ValueError("the prompt is far longer than the messages")
    return prompts


if __name__ == "__main__":
    try:
        answer = {"prompts": _render_here(json.load(sys.stdin))}
    except Exception as failure:  # whatever a template raises is reported with its own message
        name = type(failure).__name__
        answer = {"error": str(failure) if name == "ValueError" else f"{name} {failure}"}
    print(json.dumps(answer))
