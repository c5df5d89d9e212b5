"""Text to token ids and back: `tokenizer.json`, sentencepiece `tokenizer.model`, streaming, chat templates.

What a user writes never becomes a control token. Decoding is one UTF-8 decoder over the bytes of the tokens, so streamed
text equals the text decoded in one piece.
"""

import codecs
import contextlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from support.errors import advised
from support.reader import check, is_a, one_line_errors, parse_json
from text.dialect import Dialect, any_of, dialect_of
from text.template import TEMPLATE_CHARACTERS, TemplateWorker

VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
    "detailed, and polite answers to the user's questions."
)
# The 508 characters of the EAGLE evaluation, one double space included.
LLAMA2_SYSTEM = (
    "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, while being "
    "safe.  Your answers should not include any harmful, unethical, racist, sexist, toxic, dangerous, or "
    "illegal content. Please ensure that your responses are socially unbiased and positive in nature.\n\nIf "
    "a question does not make any sense, or is not factually coherent, explain why instead of answering "
    "something not correct. If you don't know the answer to a question, please don't share false information."
)
NAMED_TOKEN = re.compile("[a-z]+_token")  # keys such as bos_token
STRIPS = "lstrip", "rstrip"  # whether a token swallows the white space before it, and behind it
TOKEN = (str, {"content": str} | dict.fromkeys(("special?", *(f"{key}?" for key in STRIPS)), (bool, None)))
# What is read of tokenizer_config.json and special_tokens_map.json. Keys of NAMED_TOKEN hold a TOKEN or null.
CONFIG = dict.fromkeys(("add_bos_token?", "add_eos_token?", "legacy?"), (bool, None))
CONFIG |= {"added_tokens_decoder?": ({"*": TOKEN[1]}, None), "additional_special_tokens?": ([TOKEN], None)}
CONFIG |= {"extra_special_tokens?": ([TOKEN], {"*": TOKEN}, None)}
CONFIG |= {"chat_template?": (str, [{"name": str, "template": str}], None)}
VOCABULARY = {"model": {"vocab": ({"*": int}, list)}, "added_tokens?": ([TOKEN[1] | {"id": int}], None)}
# The byte that each character of byte-level BPE stands for. Printable Latin-1 characters stand for themselves, and the
# other bytes are written as characters 256, 257, ..., so that they stand for none.
SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
HIDDEN = [byte for byte in range(256) if byte not in SHOWN]
ALPHABET = {256 + i: byte for i, byte in enumerate(HIDDEN)} | dict.fromkeys(HIDDEN, "\ue000")
Reader = Callable[[str], Any]  # the contents of a file by its name, None if there is no such file
TOOL_KEYS = {"tool_calls", "tool_call_id", "name", "tools"}  # what a message may have beside its role and content
MESSAGE = {"role": str, "content": str, "thought?": str, "*": ()} | {f"{key}?": object for key in TOOL_KEYS}
TOOL_USE = "tool_use"  # the template that some models have for conversations with tools
BUILTIN_SYSTEM = {"vicuna": VICUNA_SYSTEM, "llama-2-chat": LLAMA2_SYSTEM, "mixtral": ""}
# What paper benchmarks pass to encode_chat as `suffix`.
PAPER_SUFFIX = {"vicuna": "", "llama-2-chat": " ", "mixtral": ""}


def builtin_prompt(name: str, messages: list[dict], add_generation_prompt: bool = True) -> str:
    """Prompt of `vicuna`, `llama-2-chat` or `mixtral`, byte for byte that of FastChat 0.2.31 as EAGLE used it.

    A leading system message replaces BUILTIN_SYSTEM[name]. An empty system message means none. An empty turn is its bare
    tag. ValueError unless the roles are [system,] user, assistant, ..., user.
    """
    roles = [m["role"] for m in messages]
    turns = [m["content"] for m in messages]
    system = turns.pop(0) if roles[:1] == ["system"] else BUILTIN_SYSTEM[name]
    expected = (["user", "assistant"] * len(turns))[: len(turns)]
    if not turns or roles[-len(turns) :] != expected or (add_generation_prompt and len(turns) % 2 == 0):
        raise ValueError(f"{name} takes roles [system,] user, assistant, ..., user, not: {', '.join(roles)}")
    ends = (" ", " </s><s>" if name == "llama-2-chat" else "</s>")
    if name == "vicuna":
        tags = ("USER:", "ASSISTANT:")
        prompt = system + " "
    else:
        tags = ("[INST]", "[/INST]")
        prompt = f"[INST] <<SYS>>\n{system}\n<</SYS>>\n\n" if system else "[INST] "
    for i, text in enumerate(turns + [""] * add_generation_prompt):
        opened = i == 0 and name != "vicuna"  # the first [INST] is already there
        prompt += f"{'' if opened else tags[i % 2] + ' '}{text}{ends[i % 2]}" if text else tags[i % 2]
    return prompt


def load_tokenizer(source: str | Path | Mapping[str, Any], vocab_size: int | None = None) -> "Tokenizer | None":
    """Tokenizer of a model directory, or None without tokenizer files, where prompts are ids.

    `tokenizer.json` is preferred to sentencepiece's `tokenizer.model`, which in Meta's layout lies beside `params.json`
    or one folder up. The stop ids are those of `generation_config.json`, those of `config.json`, and the tokenizer's own
    EOS: each of these files leaves out ends in some models.

    Args:
        source: the directory, or the contents of its files by name (`weights.gguf` makes such files); a tokenizer.json
            may be the object that its text stands for.
        vocab_size: rows of the model's embedding. Ids must be below it, except for special tokens that nothing uses, such
            as a stray <pad>.

    Raises:
        ValueError: in one line, for any bad file.
    """
    read = source.get if isinstance(source, Mapping) else partial(_read_beside, Path(source))
    names = ["tokenizer.json", "tokenizer.model"] + ["../tokenizer.model"] * (read("params.json") is not None)
    name, data = next(((name, data) for name in names if (data := read(name)) is not None), (None, b""))
    if name is None:
        return None
    where = f"the {name} in the GGUF file" if isinstance(source, Mapping) else Path(source).absolute() / name
    with one_line_errors(f"cannot use {where}", "Download the tokenizer files again, or pass --prompt-ids."):
        config = _named_tokens(read, "special_tokens_map.json") | _named_tokens(read, "tokenizer_config.json")
        named = {k: _content(v) for k, v in config.items() if NAMED_TOKEN.fullmatch(k) and v}
        tokens = _added_tokens(read, config, named)
        if name == "tokenizer.json":
            files = _load_json(data, tokens, named)
        else:
            files = _load_sentencepiece(data, tokens, named, legacy=config.get("legacy") is True)
        stop = _listed_stops(read, files, vocab_size)
        return Tokenizer(files, config, stop, vocab_size, *_chat_templates(read, config))


def _read_beside(directory: Path, name: str) -> bytes | None:
    """A file in a directory, or with "../" beside it. None if there is no such file."""
    path = directory.absolute().parent / name[3:] if name.startswith("../") else directory / name
    return path.read_bytes() if path.is_file() else None


def _added_tokens(read: Reader, config: dict, named: dict[str, str]) -> dict[str, dict]:
    """The tokens that files beside the vocabulary declare, by id: each one's id, and if it is special, where known."""
    tokens = {content: {"id": i} for content, i in _json(read, "added_tokens.json", {"*": int}).items()}
    for i, token in (config.get("added_tokens_decoder") or {}).items():
        if not re.fullmatch("[0-9]{1,9}", i):
            raise ValueError(f"added_tokens_decoder has {i!r:.40}, expected an id")
        tokens[token["content"]] = {"id": int(i), "special": False} | {k: v for k, v in token.items() if k != "content"}
    special = list(named.values())
    for key in ("additional_special_tokens", "extra_special_tokens"):
        group = config.get(key) or []
        special += map(_content, group.values() if isinstance(group, dict) else group)
    for content in special:
        tokens.setdefault(content, {})["special"] = True
    return dict(sorted(tokens.items(), key=lambda item: item[1].get("id", 2**32)))


def _listed_stops(read: Reader, files: "_Files", vocab_size: int | None) -> list:
    """Stop ids of generation_config.json and of config.json, of a model that also sees those of its text model, too.

    An added token that the model has no row for can never be sampled, so it is left out.
    """
    config, found = _json(read, "config.json"), []
    for part in (_json(read, "generation_config.json"), config, config.get("text_config")):
        stop = part.get("eos_token_id") if isinstance(part, dict) else None
        found += stop if isinstance(stop, list) else [] if stop is None else [stop]
    return [i for i in found if vocab_size is None or i not in files.pieces or i < vocab_size]


def _chat_templates(read: Reader, config: dict) -> tuple[dict[str, str], str | None]:
    """The model's chat templates by name, and the file that the default one comes from."""
    files = {"default": "chat_template.jinja", TOOL_USE: f"additional_chat_templates/{TOOL_USE}.jinja"}
    found = {name: data.decode()[: TEMPLATE_CHARACTERS + 1] for name, file in files.items() if (data := read(file))}
    source, listed = "tokenizer_config.json", config.get("chat_template")
    if not listed:
        shape = {"chat_template?": CONFIG["chat_template?"]}
        source = "chat_template.json"
        listed = _json(read, source, shape).get("chat_template") or []
    templates = {"default": listed} if isinstance(listed, str) else {t["name"]: t["template"] for t in listed}
    if "default" in found:
        return found, files["default"]
    return templates | found, source if "default" in templates else None


@dataclass
class _Files:
    """What a `tokenizer.json` and a `tokenizer.model` have in common.

    encode(text, first) parses no special tokens. `first` says that the text starts the sequence, where a dummy space
    belongs. `pieces` are the bytes of each id. `special` has the ids of special tokens. `named` are the texts of tokens
    such as bos_token. `leading_space` says that the vocabulary puts a dummy space before a text. `around` are the ids
    that the file puts before and after a text, or None if flags in tokenizer_config.json decide. `strips` are the tokens
    that swallow the white space before them, and those that swallow it behind them.
    """

    encode: Callable[[str, bool], list[int]]
    vocab: dict[str, int]
    pieces: dict[int, bytes]
    special: dict[str, int]
    named: dict[str, str]
    leading_space: bool
    around: tuple[list[int], list[int]] | None
    strips: tuple[set[int], set[int]]


class Tokenizer:
    """Encode, decode and chat for one model. `load_tokenizer` makes it. Ids are Python ints on the host.

    Attributes: pieces (the bytes that each id stands for), vocab_size (largest id + 1), bos_id (or None), eos_ids (stop
    ids), special_ids, chat_templates (by name), chat_template_source ("tokenizer_config.json", "chat_template.jinja",
    "built-in NAME", "named NAME" or None), worker (renders chat templates; one that began earlier may take its place).
    """

    def __init__(self, files: _Files, config: dict, stop: list, rows: int | None, templates: dict, source: str | None):
        """rows: of the model's embedding, None if unknown. templates, source: what `chat_templates` and so on become."""
        self._files = files
        self.pieces = files.pieces
        self.vocab_size = max(files.pieces, default=-1) + 1
        self.special_ids = frozenset(files.special.values())
        names = ("bos_token", "eos_token", "unk_token")
        self.bos_id, eos_id, self._unk_id = (files.vocab.get(files.named.get(name, "")) for name in names)
        # As in transformers, the post-processor of tokenizer.json decides. Other files have flags. Without a flag a
        # sentencepiece model gets BOS, as in Meta's code and in transformers 4 (transformers 5 adds none).
        bos, eos = ([] if i is None else [i] for i in (self.bos_id, eos_id))
        add_bos = config.get("add_bos_token")
        flagged = (bos if add_bos is None or add_bos else [], eos if config.get("add_eos_token") else [])
        self._prefix, self._suffix = flagged if files.around is None else files.around
        self.eos_ids = tuple(dict.fromkeys((*stop, *eos)))

        limit = self.vocab_size if rows is None else rows
        used = [*self.eos_ids, *self._prefix, *self._suffix, *bos]
        outside = [i for i in used if not is_a(i, int) or not 0 <= i < limit]
        outside += [i for i in files.pieces if not 0 <= i < limit and i not in self.special_ids]
        if outside:
            raise ValueError(
                f"token id {outside[0]!r:.60} is outside the model's vocabulary of {limit} (files of another model?)."
            )
        self._control = {content: i for content, i in files.special.items() if 0 <= i < limit}
        self._control_pattern = any_of(tuple(self._control))
        # A user's text may not yield these ids. A special token of one character (pad_token "!") is left out, because it
        # is an ordinary character too.
        self._forbidden = {i: c for c, i in files.special.items() if len(c) > 1 and i != self._unk_id}
        self.chat_templates: dict[str, str] = templates
        self.chat_template_source = source
        self._template = "default"
        self.worker = TemplateWorker()

    def encode(self, text: str, add_bos: bool = True, continuation: bool = False, control: bool = False) -> list[int]:
        """Ids of a user's text. `</s>` in the text stays text, unless control tokens count in it (`control`).

        add_bos: with what `transformers` puts around a text, which is BOS if the model has one, and EOS for the rare
        model that asks for it. continuation: the text goes on from another one, so nothing is put around it, not even
        the space of sentencepiece. ValueError for text that is not valid Unicode.
        """
        ids = self._piece_ids([text], continuation) if control else self._text_ids(text, first=not continuation)
        return [*self._prefix, *ids, *self._suffix] if add_bos and not continuation else ids

    def decode(self, ids: Iterable[int], skip_special: bool = True, continuation: bool = False) -> str:
        """Text of ids. Invalid UTF-8 gives U+FFFD, and unknown ids give nothing.

        The space that sentencepiece puts before a text is removed, unless this is the `continuation` of another text.
        Other spaces are not "cleaned up", because that loses text.
        """
        stream = self.stream(skip_special, continuation)
        return stream.push(ids) + stream.flush()

    def stream(
        self, skip_special: bool = True, continuation: bool = False, shown: Iterable[int] = ()
    ) -> "StreamDecoder":
        """Incremental `decode` with the same arguments. shown: special tokens that are not skipped."""
        return StreamDecoder(self._files, self.special_ids - {*shown} if skip_special else frozenset(), continuation)

    def use_template(self, name: str) -> None:
        """Choose a built-in template or a named one of this model. ValueError for another name lists the known ones."""
        known = [*self.chat_templates, *BUILTIN_SYSTEM]
        if name not in known:
            raise ValueError(f"there is no chat template {name!r}. Choose one of: {', '.join(known)}")
        self.chat_template_source = f"{'built-in' if name in BUILTIN_SYSTEM else 'named'} {name}"
        self._template = name

    def render_chat(self, messages: list, add_generation_prompt: bool = True) -> str:
        """Prompt text of `messages`, which are dicts of `role` and `content`. Failures are one-line ValueErrors."""
        _check_messages(messages)
        last = messages[-1]["content"].strip() if messages else ""
        return self._with_texts([messages], {"add_generation_prompt": add_generation_prompt}, last)[0]

    def encode_chat(
        self, messages: list, add_generation_prompt: bool = True, suffix: str = "", tools: list[dict] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:  # fmt: skip
        """Ids of `render_chat(messages) + suffix`.

        Control tokens that the template writes are parsed. In message contents they stay text. A model's template writes
        BOS itself, and a built-in template gets BOS as in `encode`. Failures are one-line ValueErrors.

        Args:
            tools: descriptions of functions that the model may call, which the template writes. A message may then also
                have `tool_calls`, `tool_call_id` and `name`. The text of control tokens is refused in all of these. An
                answer may have the `thought` that came before it, which stands where the template wants it, or nowhere.
            variables: further ones for the template, as `check_variables` allows them.
        """
        _check_messages(messages)
        self.check_tools([{k: m[k] for k in m.keys() & TOOL_KEYS} for m in messages], tools)
        self.check_variables(variables or {})
        given = {**(variables or {}), "tools": tools, "add_generation_prompt": add_generation_prompt}
        pieces, _ = self._template_and_contents(messages, given)
        ids = self._piece_ids([*pieces[:-1], pieces[-1] + suffix])
        return self._prefix + ids if self._template in BUILTIN_SYSTEM else ids

    def continue_chat(self, messages: list, known: list[int]) -> list[int]:
        """Ids of a chat whose last two messages are a reply and what the user said to it.

        known: the prompt that the reply answered, and the ids that the model wrote, without the stop id. The result
        begins with them, so what a cache holds of them stays valid. The reply's text might be encoded to other ids.
        Where the template now writes the earlier messages differently, the result is that of `encode_chat`.
        """
        reply = len(messages) - 2
        prompt, _ = self._template_and_contents(messages[:reply], {"add_generation_prompt": True})
        pieces, numbers = self._template_and_contents(messages, {"add_generation_prompt": True})
        if numbers.count(reply) == 1:
            at = 2 * numbers.index(reply) + 1
            if "".join(pieces[:at]).rstrip() == "".join(prompt).rstrip():  # a space may belong to the reply
                return known + self._piece_ids(pieces[at + 1 :], goes_on=True)
        return self.encode_chat(messages)

    def _piece_ids(self, pieces: list[str], goes_on: bool = False) -> list[int]:
        """Ids of the template's text (even places) and of contents. goes_on: other ids stand before them."""
        parts = [part for i, piece in enumerate(pieces) for part in ([piece] if i % 2 else self.parts(piece))]
        before, behind = self._files.strips
        ids: list[int] = []
        run = ""  # text since the last control token
        for part in [*parts, None]:  # None: the end
            if isinstance(part, str):
                run += part
                continue
            run = run.rstrip() if part in before else run  # a control token may swallow the white space beside it
            run = run.lstrip() if ids and ids[-1] in behind else run
            ids += self._text_ids(run, first=not ids and not goes_on)
            ids += [] if part is None else [part]
            run = ""
        return ids

    def parts(self, text: str) -> list[str | int]:
        """A text in which control tokens count: these as ids, and the text between them."""
        split = self._control_pattern.split(text)
        return [self._control[part] if i % 2 else part for i, part in enumerate(split) if part]

    @property
    def dialect(self) -> Dialect:
        """What the model writes beside its answers, as its template and its tokens tell."""
        return dialect_of(self.chat_template, self._files.vocab)

    def shown_ids(self, tools: bool = False) -> tuple[int, ...]:
        """The special tokens that are marks of thoughts, or of calls with `tools`, and so belong to an answer's text."""
        marks = {part for text in self.dialect.marks(tools) for part in self.parts(text)}
        return tuple(sorted(part for part in marks if isinstance(part, int)))

    def thinks_after(self, ids: list[int]) -> bool:
        """Whether a prompt ends with the mark that begins a thought."""
        thoughts = self.dialect.thoughts
        end = self.decode(ids[-16:], skip_special=False, continuation=True)  # no mark has so many tokens
        return bool(thoughts) and end.rstrip().endswith(thoughts.begin)

    @property
    def chat_template(self) -> str:
        """The source of the template in use, with that for tools behind it; "" for a built-in one or none."""
        names = [self._template, TOOL_USE] if self._template == "default" else [self._template]
        return "\n".join(self.chat_templates[name] for name in names if name in self.chat_templates)

    def check_variables(self, variables: Mapping[str, Any]) -> None:
        """Refuse variables of a template that it would be given in any case, and control tokens in them."""
        given = {"messages", "add_generation_prompt", "raise_exception", "strftime_now", *self._files.named}
        if taken := given & {*variables}:
            raise ValueError(f"{min(taken)!r} is set by the server and cannot be chosen.")
        self._refuse_control(dict(variables), "a variable")

    def check_tools(self, messages: list[dict], tools: list[dict] | None) -> None:
        """Refuse tools that no template would write, and control tokens where the template writes them unmarked."""
        if tools and "tools" not in self.chat_template:
            raise ValueError("this model's chat template takes no tools. Leave them out, or use another model.")
        self._refuse_control([messages, tools], "a tool, or a message's tool call,")

    def _refuse_control(self, values: object, what: str) -> None:
        """Refuse the text of a control token in what a template writes unmarked. what: names the values in the error."""
        written = json.dumps(values, ensure_ascii=False)
        for control in self._forbidden.values():
            if json.dumps(control, ensure_ascii=False)[1:-1] in written:
                raise ValueError(f"{what} holds the text of a control token: {control!r:.60}. Remove it.")

    def _template_and_contents(self, messages: list[dict], given: dict[str, Any]) -> tuple[list[str], list[int]]:
        """The rendered prompt in pieces: the template's text at even places, message contents at odd ones.

        Also the numbers of the messages whose contents stand at the odd places, [] if the template edits contents.

        A second rendering has random sentinels instead of the contents, which tells the two apart. A sentinel keeps the
        white space around its content, so that `trim` in a template works. With the contents put back, the pieces must
        reproduce the real prompt. If they do not, then the template edits contents, and the whole prompt counts as the
        template's text. That is safe only if no content holds the text of a control token, and if the prompt has the
        same control tokens as the rendering with sentinels. Otherwise it is a ValueError.
        """
        mark = f"\ue000{secrets.token_hex(12)}x"
        places = [(i, key) for i, m in enumerate(messages) for key in ("content", "thought") if key in m]
        bodies = [messages[i][key].strip() for i, key in places]
        hidden = [dict(m) for m in messages]
        for number, ((i, key), body) in enumerate(zip(places, bodies, strict=True)):
            if body:
                hidden[i][key] = hidden[i][key].replace(body, f"{mark}{number}\ue001")
        last = f"{mark}{len(bodies) - 1}\ue001" if bodies and bodies[-1] else ""
        real, opaque = self._with_texts([messages, hidden], given, last)
        pieces = re.split(f"{mark}([0-9]+)\ue001", opaque)
        numbers = [int(i) for i in pieces[1::2]]
        pieces[1::2] = [bodies[i] for i in numbers]
        if "".join(pieces) == real:
            return pieces, [places[number][0] if places[number][1] == "content" else -1 for number in numbers]
        find = self._control_pattern.findall
        expected = [token for text in pieces[::2] for token in find(text)]
        if any(map(find, bodies)) or find(real) != expected:
            where = f"the chat template ({self.chat_template_source})"
            what = ValueError(f"{where} edits messages that hold the text of control tokens.")
            raise advised(what, "Remove that text, or pass --prompt.")
        return [real], []

    def _with_texts(self, variants: list[list[dict]], given: dict[str, Any], shown: str) -> list[str]:
        """`_render`. A template that refuses a text as content, or drops the last one, gets a list of parts.

        shown: what the last variant of the prompt then holds.
        """
        try:
            texts, error = self._render(variants, given), None
        except ValueError as caught:
            texts, error = [], caught
        if error is None and shown in texts[-1]:
            return texts
        parts = [
            [m | {"content": [{"type": "text", "text": m["content"]}]} if "content" in m else m for m in messages]
            for messages in variants
        ]
        with contextlib.suppress(ValueError):
            typed = self._render(parts, given)
            if shown in typed[-1] and "'type': 'text'" not in typed[-1]:  # and it does not write the list itself
                return typed
        if error is not None:
            raise error
        return texts

    def _text_ids(self, text: str, first: bool) -> list[int]:
        """Ids of text that holds no control tokens. `first`: the text starts the sequence."""
        with one_line_errors("cannot encode this text", "Pass valid Unicode, or --prompt-ids."):
            text.encode()  # refuses lone surrogates
            ids = self._files.encode(text, first) if text else []
        if self._forbidden.keys().isdisjoint(ids):
            return ids
        # A vocabulary may spell a control token with ordinary merges. Such a token is written character by character.
        vocab = self._files.vocab
        spelled = []
        for i in ids:
            if i not in self._forbidden:
                spelled.append(i)
            for char in self._forbidden.get(i, ""):
                names = [char] if char in vocab else [f"<0x{byte:02X}>" for byte in char.encode()]
                spelled += [vocab.get(name, self._unk_id) for name in names]
        return [i for i in spelled if i is not None]

    def _render(self, variants: list[list[dict]], given: dict[str, Any]) -> list[str]:
        """One prompt per list of messages, all of which have the same roles. given: variables of the template, of which
        a built-in one knows add_generation_prompt alone."""
        name = self._template
        builtins = ", ".join(BUILTIN_SYSTEM)
        if name in BUILTIN_SYSTEM:
            return [builtin_prompt(name, messages, given["add_generation_prompt"]) for messages in variants]
        if name not in self.chat_templates:
            why = "this model has no chat template."
            raise advised(ValueError(why), f"Use --prompt or a built-in one: {builtins}.")
        if name == "default" and given.get("tools") and TOOL_USE in self.chat_templates:
            name = TOOL_USE
        roles = ", ".join(m["role"] for m in variants[0])
        where = f"chat template ({self.chat_template_source}) failed for roles [{roles:.60}]"
        with one_line_errors(where, f"Send the roles it expects, or use a built-in template: {builtins}."):
            place = self.dialect.placed
            variants = [[place(message) for message in messages] for messages in variants]
            return self.worker.render(self.chat_templates[name], variants, self._files.named | given)


class StreamDecoder:
    """Text of ids as they arrive. All pushes and `flush` together equal `Tokenizer.decode` of all ids.

    The bytes of an unfinished character wait for the next push. A push takes time for its own ids only.
    """

    def __init__(self, files: _Files, skipped: frozenset[int], continuation: bool):
        self._pieces = files.pieces
        self._skipped = skipped
        self._strip_space = files.leading_space and not continuation
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text that became certain with these ids (may be "")."""
        data = b"".join(self._pieces.get(i, b"") for i in ids if i not in self._skipped)
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """The rest at the end: "", or U+FFFD for an unfinished character."""
        return self._utf8.decode(b"", final=True)


def _from_parts(value: dict[str, Any]) -> Any:
    """A tokenizers.Tokenizer of a tokenizer.json that is not text. With a BPE of many words, its text takes longer."""
    import tokenizers

    model = value["model"]
    rest = value | {"added_tokens": [], "model": model | {"vocab": {}, "merges": []}}
    rust = tokenizers.Tokenizer.from_str(json.dumps(rest))
    flags = {key: flag for key, flag in model.items() if key not in ("type", "vocab", "merges")}
    rust.model = tokenizers.models.BPE(model["vocab"], model["merges"], **flags)
    for token in value["added_tokens"]:
        _add_token(rust, token["content"], token["special"])
    return rust


def _add_token(rust: Any, content: str, special: bool, **strips: bool) -> None:
    """Add a token to a tokenizers.Tokenizer. Its text is not normalised before it is looked for."""
    import tokenizers

    added = tokenizers.AddedToken(content, special=special, normalized=False, **strips)
    (rust.add_special_tokens if special else rust.add_tokens)([added])


def _load_json(data: bytes | dict[str, Any], tokens: dict[str, dict], named: dict[str, str]) -> _Files:
    """Reads a tokenizer.json. `tokens` and `named` come from the files beside it."""
    import tokenizers

    if isinstance(data, dict):
        rust = _from_parts(data)
    elif not check(parse_json(data, "tokenizer.json"), VOCABULARY, "tokenizer.json", "the file")["model"]["vocab"]:
        raise ValueError("its vocabulary is empty")
    else:
        rust = tokenizers.Tokenizer.from_buffer(data)
    rust.no_truncation()
    rust.no_padding()
    known = {t.content: t.special for t in rust.get_added_tokens_decoder().values()}
    for content, token in tokens.items():
        special = bool(token.get("special"))
        if known.get(content) is None or special > known[content]:
            _add_token(rust, content, special, **{key: bool(token.get(key)) for key in STRIPS})
    added = rust.get_added_tokens_decoder()
    vocab = rust.get_vocab()
    decoder = rust.decoder.__getstate__().decode() if rust.decoder else ""
    alphabet = '"ByteLevel"' in decoder
    if not alphabet and "▁" not in decoder:
        raise ValueError("its decoder is neither byte-level nor sentencepiece-like.")
    leading_space = '"Strip"' in decoder or ('"Metaspace"' in decoder and '"never"' not in decoder)
    spell = _spelled_bytes if alphabet else _sentencepiece_bytes
    pieces = {i: spell(token) for token, i in vocab.items()}
    if alphabet:  # added tokens stand for themselves
        pieces |= {i: token.content.encode() for i, token in added.items()}
    # The anchor is a random added token. Text behind it does not start the sequence, so it gets no dummy space. Encoding
    # the anchor alone shows what the post-processor puts around a text.
    anchor = f"\ue000{secrets.token_hex(12)}\ue001"
    rust.add_tokens([tokenizers.AddedToken(anchor, normalized=False, special=False)])
    rust.encode_special_tokens = True  # In spite of its name, this leaves special tokens in a text unparsed.
    ids = rust.encode(anchor).ids
    place = ids.index(rust.token_to_id(anchor))

    def encode(text: str, first: bool) -> list[int]:
        ids = rust.encode(text if first else anchor + text, add_special_tokens=False).ids
        return ids if first else ids[1:]

    special = {t.content: i for i, t in added.items() if t.special}
    strips = ({i for i, token in added.items() if token.lstrip}, {i for i, token in added.items() if token.rstrip})
    return _Files(encode, vocab, pieces, special, named, leading_space, (ids[:place], ids[place + 1 :]), strips)


def _load_sentencepiece(data: bytes, tokens: dict[str, dict], named: dict[str, str], legacy: bool) -> _Files:
    """Reads a sentencepiece model. `legacy`: every run of text between added tokens gets the dummy space."""
    import sentencepiece

    if re.match(rb"[A-Za-z0-9+/]+=* \d+\n", data):
        raise ValueError("a tiktoken file (Llama 3). Put the tokenizer.json of the same model beside it.")
    model = sentencepiece.SentencePieceProcessor(model_proto=data)
    # The same model without the dummy space: protobuf merges an appended normalizer_spec (field 3) with
    # {add_dummy_prefix: false}.
    inner = sentencepiece.SentencePieceProcessor(model_proto=data + b"\x1a\x02\x18\x00")
    vocab = {model.id_to_piece(i): i for i in range(model.get_piece_size())}
    if not vocab:
        raise ValueError("its vocabulary is empty")
    pieces = {i: _sentencepiece_bytes(token) for token, i in vocab.items()}
    special = {token: i for token, i in vocab.items() if model.is_control(i) or model.is_unknown(i)}
    ordinary = {}
    for content, token in tokens.items():
        i = vocab[content] = token.get("id", vocab.get(content, max(pieces) + 1))
        pieces[i] = content.encode()
        (special if token.get("special") else ordinary)[content] = i
    pattern = any_of(tuple(ordinary))

    def encode(text: str, first: bool) -> list[int]:
        ids = []
        for j, part in enumerate(pattern.split(text)):
            processor = model if legacy or (first and j == 0) else inner
            ids += [ordinary[part]] if j % 2 else processor.encode(part)
        return ids

    own = {"bos_token": model.bos_id(), "eos_token": model.eos_id(), "unk_token": model.unk_id()}
    named = {name: model.id_to_piece(i) for name, i in own.items() if i >= 0} | named
    space = model.encode("a") != inner.encode("a")
    strips = tuple({vocab[name] for name, token in tokens.items() if token.get(key)} for key in STRIPS)
    return _Files(encode, vocab, pieces, special, named, space, None, strips)


def _spelled_bytes(token: str) -> bytes:
    """The bytes that a token of byte-level BPE stands for. One with characters outside of ALPHABET stands for itself."""
    try:
        return token.translate(ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    """The bytes of a sentencepiece token. `▁` is a space, and `<0xE6>` (byte fallback) is one byte."""
    byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()


def _content(token: str | dict) -> str:
    """The text of a token, which config files write as text or as an object."""
    return token if isinstance(token, str) else token["content"]


def _named_tokens(read: Reader, name: str) -> dict:
    """A JSON file of the shape CONFIG, whose `*_token` values are texts or objects that hold one."""
    value = _json(read, name)
    named = {key: (*TOKEN, None) for key in value if NAMED_TOKEN.fullmatch(key)}
    return check(value, CONFIG | named, name, "the file")


def _json(read: Reader, name: str, shape: dict[str, Any] | None = None) -> dict:
    """The JSON object in a file, of a shape of `support.reader.check`; {} if there is no such file."""
    data = read(name)
    return {} if data is None else check(parse_json(data, name), shape or {}, name, "the file")


def _check_messages(messages: list[dict]) -> None:
    if not check(messages, [MESSAGE], "the chat", "messages"):
        raise ValueError("messages must be a non-empty list of {role, content}")
    for i, m in enumerate(messages):
        # A role that is not a plain word could hold control tokens.
        if not re.fullmatch("[A-Za-z_-]{1,32}", m["role"]):
            raise ValueError(f"message {i} has role {m['role'][:40]!r}, expected a plain word such as user")
