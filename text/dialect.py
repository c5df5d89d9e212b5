"""What families of models write beside their answers: thoughts and tool calls, and where a template wants thoughts back.

Every family has marks of its own. The rows of the tables here are chosen by what a model's chat template writes and by
the tokens that the model has, never by a name. The facts are those of the models' own templates and cards.
"""

import functools
import json
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Thoughts:
    """How a family marks what a model thinks before it answers.

    gap: what stands between the end of a thought and the answer. around: marks that may stand around such an answer.
    """

    begin: str
    end: str
    gap: str = "\n\n"
    around: tuple[str, str] = ("", "")


class Tags(NamedTuple):
    """Arguments that stand between tags: `key` KEY `then` VALUE `end`. The name goes up to `named`, or to the first tag.

    line: what stands before and behind a value.
    """

    key: str
    then: str
    end: str
    named: str = ""
    line: str = ""


class Quotes(NamedTuple):
    """Arguments in braces whose keys are bare words, and whose texts stand between marks of their own."""

    mark: str


class PythonCode(NamedTuple):
    """Calls that are written as in Python."""


@dataclass(frozen=True)
class Calls:
    """How a family writes tool calls.

    begin, end: the marks around one call. section: those around all calls of an answer, where there are such.
    written: a whole call as the model writes it, with NAME and ARGUMENTS for these.
    body: how the arguments are written. None: JSON, behind a name or in an object with the name.
    bare: an answer that begins with such an object is a call without marks.
    """

    begin: str
    end: str
    written: str
    section: tuple[str, str] = ("", "")
    body: Tags | Quotes | PythonCode | None = None
    bare: bool = False


OBJECT = '{"name": "NAME", "arguments": ARGUMENTS}'
HERMES = Calls("<tool_call>", "</tool_call>", f"<tool_call>\n{OBJECT}\n</tool_call>")
FENCES = (
    Calls("```tool_code", "```", "```tool_code\nNAME(ARGUMENTS)\n```", body=PythonCode()),
    Calls("```json", "```", f"```json\n{OBJECT}\n```"),
)
LLAMA = Calls("<|python_tag|>", "", OBJECT.replace("arguments", "parameters"), bare=True)
# gpt-oss has a message for each call, which is read together with its other messages.
GPT_OSS = Calls("", "", "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS")


def _section(first: str, last: str, begin: str, end: str, inner: str, body: Tags | None = None) -> Calls:
    """Calls in a section between `first` and `last`. inner: what stands between the marks of one call."""
    return Calls(begin, end, f"{first}{begin}{inner}{end}{last}", (first.strip(), last.strip()), body)


def _braces(begin: str, end: str, quote: str) -> Calls:
    return Calls(f"{begin}call:", end, f"{begin}call:NAMEARGUMENTS{end}", body=Quotes(quote))


XML = Tags("<parameter=", ">", "</parameter>", named=">")
XML_CALL = "<function=", "</function>", "NAME>\nARGUMENTS"
QWEN_CODER = _section("<tool_call>\n", "\n</tool_call>", *XML_CALL, XML._replace(line="\n"))
INVOKE = Tags('<parameter name="', '">', "</parameter>", named='">')
INVOKE_CALL = '<invoke name="', "</invoke>", 'NAME">\nARGUMENTS'
GLM_TAGS = Tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>")
DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_R1 = _section(*DEEPSEEK, "function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```")
KIMI = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"
GRANITE = Calls("<|tool_call|>", "<|/tool_call|>", f"<|tool_call|>[{OBJECT}]")
PHI = Calls("functools", "", f"functools[{OBJECT}]")
# Rows: the texts that a template or a vocabulary must have, and the forms of calls. The first row that fits counts.
CALLS: tuple[tuple[tuple[str, ...], tuple[Calls, ...]], ...] = (
    (("<|channel|>", "<|message|>"), (GPT_OSS,)),
    (("<|tool_call>",), (_braces("<|tool_call>", "<tool_call|>", '<|"|>'),)),  # Gemma 4
    # FunctionGemma
    (("<start_function_call>",), (_braces("<start_function_call>", "<end_function_call>", "<escape>"),)),
    (("<seed:tool_call>",), (_section("<seed:tool_call>\n", "\n</seed:tool_call>", *XML_CALL, XML),)),  # Seed-OSS
    (("<function=", "<parameter="), (QWEN_CODER,)),  # and Qwen3.5
    # GLM
    (("<arg_key>",), (Calls(HERMES.begin, HERMES.end, "<tool_call>NAME\nARGUMENTS</tool_call>", body=GLM_TAGS),)),
    # MiniMax
    (("<minimax:tool_call>",), (_section("<minimax:tool_call>\n", "\n</minimax:tool_call>", *INVOKE_CALL, INVOKE),)),
    (("<｜tool▁sep｜>", "```json"), (DEEPSEEK_R1,)),
    (("<｜tool▁sep｜>",), (_section(*DEEPSEEK, "NAME<｜tool▁sep｜>ARGUMENTS"),)),  # DeepSeek V3
    # Kimi K2
    (("<|tool_call_begin|>",), (_section(*KIMI, "functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS"),)),
    (("[TOOL_CALLS]", "[ARGS]"), (Calls("[TOOL_CALLS]", "", "[TOOL_CALLS]NAME[ARGS]ARGUMENTS"),)),  # Mistral since 2025
    (("[TOOL_CALLS]",), (Calls("[TOOL_CALLS]", "", f"[TOOL_CALLS][{OBJECT}]"),)),  # Mistral before
    (("<tool_call>",), (HERMES,)),  # Qwen 2.5 and 3, EXAONE 4, SmolLM3, Granite 4, Hermes
    (("<|tool_call|>",), (GRANITE, PHI)),  # Granite 3, Phi-4-mini
    # Hunyuan
    (("<tool_calls>",), (Calls("<tool_calls>", "</tool_calls>", f"<tool_calls>[{OBJECT}]</tool_calls>"),)),
    (("python_tag",), (LLAMA,)),
    (('"parameters"',), (LLAMA,)),
)
THINK = Thoughts("<think>", "</think>")
HARMONY = Thoughts("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant<|channel|>final<|message|>")
THOUGHTS: tuple[tuple[tuple[str, ...], Thoughts], ...] = (
    (("<|channel|>", "<|message|>"), HARMONY),  # gpt-oss
    (("<|channel>", "<channel|>"), Thoughts("<|channel>thought", "<channel|>", "")),  # Gemma 4
    (("<seed:think>",), Thoughts("<seed:think>", "</seed:think>")),  # Seed-OSS
    (("[THINK]",), Thoughts("[THINK]", "[/THINK]", "")),  # Magistral, Ministral 3
    (("Here is my thought process:",), Thoughts("Here is my thought process:", "Here is my response:")),  # Granite 3.2
    (("<think>", "<response>"), Thoughts("<think>", "</think>", "", ("<response>", "</response>"))),  # Granite 3.3
    (("<think>", "<answer>"), Thoughts("<think>", "</think>", "\n", ("<answer>", "</answer>"))),  # Hunyuan
    (("<think>",), THINK),
    (("</think>",), THINK),
)
# How a template reads the thought of an earlier answer: a text of the template, and the key of the message.
PLACES = (
    ("reasoning_content", "reasoning_content"),
    ("'type'] == 'thinking'", "blocks"),  # parts of the content, one of which is the thought
    ("message.thinking", "thinking"),
)


@dataclass(frozen=True)
class Dialect:
    """What a model writes: thoughts (None: none that are marked) and forms of tool calls. place: where its chat template
    looks for the thought of an earlier answer, "" for nowhere."""

    thoughts: Thoughts | None
    calls: tuple[Calls, ...]
    place: str = ""

    @property
    def harmony(self) -> bool:
        """Whether answers consist of messages in channels, calls among them."""
        return self.thoughts is HARMONY

    def marks(self, tools: bool) -> list[str]:
        """The texts that may be special tokens and yet belong to the text. tools: those of calls, too."""
        thoughts = self.thoughts
        found = [thoughts.begin, thoughts.end, thoughts.gap, *thoughts.around] if thoughts else []
        if self.harmony:
            found += ["<|constrain|>", "<|call|>", "<|return|>"]
        for form in self.calls if tools else ():
            found += [form.written, form.begin, form.end, *form.section, *(form.body or ())]
        return found

    def placed(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message as the template reads it, whose `thought` is where the template looks for it."""
        rest = {key: value for key, value in message.items() if key != "thought"}
        thought, content = message.get("thought", ""), message["content"]
        if not thought or not self.place:
            return rest
        if self.place == "blocks":
            told = [{"type": "text", "text": content}] if content else []
            return rest | {"content": [{"type": "thinking", "thinking": thought}, *told]}
        if self.harmony and content and "tool_calls" in message:  # which takes one of them
            return rest | {"content": f"{thought}\n\n{content}"}
        return rest | {self.place: thought}

    def call_grammar(self, functions: Sequence[dict[str, Any]], literal: Callable[[str], str]) -> str:
        """The grammar of one call of one of these functions, as the family writes it, whose arguments follow its schema.

        literal: a text in Lark's syntax, in which special tokens are tokens.
        """
        form = self.calls[0]
        before, after = form.written.split("ARGUMENTS")
        rules = [f"start: {' | '.join(f'call{i}' for i in range(len(functions)))}"]
        for i, function in enumerate(functions):
            ends = literal(before.replace("NAME", function["name"])), literal(after)
            rules.append(f"call{i}: {ends[0]} arguments{i} {ends[1]}")
            if isinstance(form.body, Tags):
                rules += _tagged(f"arguments{i}", form.body, function["parameters"], literal)
            else:
                rules.append(f"arguments{i}: {json_rule(function['parameters'])}")
        return "\n".join(rules)


def json_rule(schema: Any) -> str:
    """JSON that follows a schema, as a part of a grammar in Lark's syntax. It has no white space between its parts, with
    which a model could go on for ever."""
    schema = schema if isinstance(schema, dict) else {} if schema else {"enum": []}
    return f"%json {json.dumps(schema | {'x-guidance': {'whitespace_flexible': False, 'lenient': True}})}"


def _tagged(rule: str, tags: Tags, schema: dict[str, Any], literal: Callable[[str], str]) -> list[str]:
    """The rules of arguments between tags: those that are required, and the others where the model wants them."""
    rules, order = [], []
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for j, (key, value) in enumerate(schema.get("properties", {}).items()):
        value = value if isinstance(value, dict) else {}
        name, end = f"{rule}_{j}", f"{tags.line}{tags.end}\n"
        written = literal(end)
        begin = literal(f"{tags.key}{key}{tags.then}{tags.line}")
        rules.append(f"{name}: {begin} {name}_value")
        if not is_text(value):
            rules.append(f"{name}_value: {name}_json {written}\n{name}_json: {json_rule(value | shared)}")
        elif "enum" in value:
            rules.append(f"{name}_value: ({' | '.join(map(literal, value['enum']))}) {written}")
        elif "<[" in written:  # a pattern has no special tokens, so it ends before one
            rules.append(f"{name}_value: /(?s:.*)/ {written}")
        else:
            pattern = re.escape(end).replace("/", "\\/").replace("\n", "n")
            rules.append(f"{name}_value[lazy]: /(?s:.*){pattern}/")
        order.append(name if key in schema.get("required", ()) else f"{name}?")
    return [f"{rule}: {' '.join(order) or literal('')}", *rules]


@functools.lru_cache(64)
def any_of(words: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern of one group that matches any of the words, longest first. Without words it never matches."""
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def is_text(schema: Any) -> bool:
    """Whether a value that follows a JSON schema is a text, so that it stands without quotes."""
    schema = schema if isinstance(schema, dict) else {}
    kinds = schema.get("type")
    kinds = [kind for kind in kinds if kind != "null"] if isinstance(kinds, list) else [kinds]
    return kinds == ["string"] or (kinds == [None] and all(isinstance(v, str) for v in schema.get("enum", [None])))


def dialect_of(template: str, vocabulary: Container[str]) -> Dialect:
    """What a model writes whose chat template is this and which has these tokens."""

    def knows(texts: Sequence[str]) -> bool:
        return all(text in template or text in vocabulary for text in texts)

    thoughts = next((row for texts, row in THOUGHTS if knows(texts)), None) if template else None
    calls = next((forms for texts, forms in CALLS if knows(texts)), (HERMES,))
    if "tools" not in template:  # they are described in a message, in the form of Hermes
        calls = (HERMES, *(form for form in calls if form is not HERMES), *FENCES)
    return Dialect(thoughts, calls, next((key for text, key in PLACES if text in template), ""))


def with_calls(message: dict[str, Any], form: Calls) -> dict[str, Any]:
    """A message whose calls are a part of its text, for a template without a place for them."""
    text = message["content"]
    for call in message.get("tool_calls", ()):
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        text += form.written.replace("NAME", call["function"]["name"]).replace("ARGUMENTS", arguments)
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": text}


def as_text(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with their tools, calls and results as plain text in Hermes' format, for a template without a place
    for them. The tools stand at the beginning of the first message, because not every template has system messages."""
    written: list[dict[str, Any]] = []
    for message in messages:
        role, text = message["role"], with_calls(message, HERMES)["content"]
        if role == "tool":
            role, text = "user", f"<tool_response>{text}</tool_response>"
            if written and written[-1]["role"] == "user":  # the results of several calls
                written[-1]["content"] += f"\n{text}"
                continue
        written.append({"role": role, "content": text})
    if tools:
        functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        form = HERMES.written.replace('"NAME"', "NAME").replace("ARGUMENTS", "{...}")
        about = f"You can call these functions:\n{functions}\nTo call one, write {form} and wait for its result."
        written[0]["content"] = f"{about}\n\n{written[0]['content']}"
    return written


def begun_at_end(text: str, marks: tuple[str, ...]) -> int:
    """How many characters at the end of a text may begin one of the marks."""
    sizes = range(min(len(text), max(map(len, marks), default=1) - 1), 0, -1)
    return next((size for size in sizes if any(mark.startswith(text[-size:]) for mark in marks)), 0)
