"""text/dialect.py and text/splitter.py: what every family writes, cut at every place, and calls that a grammar forces."""

import json
import os
import re
from pathlib import Path

import llguidance
import pytest

from engine.grammar_text import checked_grammar
from loading.options import DEMO
from serving.fields import quoted
from text.dialect import CALLS, HARMONY, HERMES, THINK, Tags, as_text, dialect_of, with_calls
from text.splitter import ARGUMENTS, CALL, TEXT, THOUGHT, Splitter
from text.template import TemplateWorker
from text.tokenizer import Tokenizer, load_tokenizer

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "more": {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "boolean"}}}},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city"],
}
TOOLS = {"weather": WEATHER, "now": {"type": "object", "properties": {}}}
HARMONY_MARKS = "<|channel|> <|message|> tools tool_calls"
CITY = 'Paris <b> "x"\nline é</p'
GIVEN = {"city": CITY, "days": 3, "more": {"a": [True, False]}}
JSON = json.dumps(GIVEN, ensure_ascii=False)
OBJECT = f'{{"name": "weather", "arguments": {JSON}}}'
NOW = '{"name": "now", "arguments": {}}'
XML = (
    f"<function=weather>\n<parameter=city>\n{CITY}\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    '<parameter=more>\n{"a": [true, false]}\n</parameter>\n</function>'
)
# family: what tells it, in the template; an answer with a thought, a text and two calls; where its prompt has begun it
FAMILIES = {
    "gpt-oss": (
        "<|channel|> <|message|> tools tool_calls message.thinking",
        f"<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see."
        f"<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON}<|call|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}",
    ),
    "qwen3": (
        "<think> <tool_call> tools",
        f"<think>\nI think.\n</think>\n\nLet me see.\n<tool_call>\n{OBJECT}\n</tool_call>\n<tool_call>\n{NOW}\n"
        "</tool_call>",
    ),
    "qwen3-coder": (
        "tools <tool_call> <function= <parameter=",
        f"Let me see.\n<tool_call>\n{XML}\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "qwen3.5": (
        "tools <think> <tool_call> <function= <parameter=",
        f"I think.\n</think>\n\nLet me see.\n\n<tool_call>\n{XML}\n</tool_call>\n<tool_call>\n<function=now>\n"
        "</function>\n</tool_call>",
        THOUGHT,
    ),
    "qwen3-coder, the mark forgotten": (
        "tools <tool_call> <function= <parameter=",
        f"Let me see.\n{XML}\n</tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "deepseek r1": (
        "tools <think> <｜tool▁sep｜> ```json",
        "<think>\nI think.\n</think>\n\nLet me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
        f"<｜tool▁sep｜>weather\n```json\n{JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek v3.1": (
        "tools <think> <｜tool▁sep｜>",
        "I think.</think>Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        f"{JSON}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        THOUGHT,
    ),
    "hermes": (
        "tools <tool_call>",
        f'Let me see.\n<tool_call>{{"arguments": {JSON}, "name": "weather"}}</tool_call>\n<tool_call>{NOW}</tool_call>\n',
    ),
    "mistral, first": ("tools [TOOL_CALLS]", f"Let me see.[TOOL_CALLS][{OBJECT}, {NOW}]"),
    "mistral, now": (
        "tools [TOOL_CALLS] [ARGS] [THINK]",
        f"[THINK]I think.[/THINK]Let me see.[TOOL_CALLS]weather[ARGS]{JSON}[TOOL_CALLS]now[CALL_ID]x1[ARGS]{{}}",
    ),
    "llama": (
        'tools <|python_tag|> "parameters"',
        f'Let me see.<|python_tag|>{{"name": "weather", "parameters": {JSON}}}; {{"name": "now", "parameters": {{}}}}',
    ),
    "llama, no mark": (
        'tools "parameters"',
        f'{{"name": "weather", "parameters": {JSON}}};{{"type": "function", "name": "now", "parameters": null}}',
    ),
    "glm": (
        "tools <think> <tool_call> <arg_key>",
        f"<think>I think.</think>\nLet me see.\n<tool_call>weather\n<arg_key>city</arg_key>\n"
        f"<arg_value>{CITY}</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>more</arg_key>\n"
        '<arg_value>{"a": [true, false]}</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>',
    ),
    "glm 4.7": (
        "tools <think> <tool_call> <arg_key>",
        f"I think.</think>Let me see.<tool_call>weather<arg_key>city</arg_key><arg_value>{CITY}</arg_value><arg_key>days"
        '</arg_key><arg_value>3</arg_value><arg_key>more</arg_key><arg_value>{"a": [true, false]}</arg_value></tool_call>'
        "<tool_call>now</tool_call>",
        THOUGHT,
    ),
    "granite 3": (
        "tools <|tool_call|> <think> <response>",
        f"<think>I think.</think>\n<response>Let me see.</response><|tool_call|>[{OBJECT}, {NOW}]",
    ),
    "granite 3.2": (
        "tools <|tool_call|> Here is my thought process:",
        f"Here is my thought process:\nI think.\nHere is my response:\nLet me see.<|tool_call|>[{OBJECT}, {NOW}]",
    ),
    "phi-4": ("tools <|tool_call|>", f"Let me see.<|tool_call|>[{OBJECT}, {NOW}]<|/tool_call|>"),
    "phi-4, in words": ("tools <|tool_call|>", f"Let me see. functools[{OBJECT}, {NOW}]"),
    "seed-oss": (
        "tools <seed:think> <seed:tool_call>",
        "<seed:think>I think.</seed:think>\nLet me see.\n<seed:tool_call>\n<function=weather>\n<parameter=city>"
        f"{CITY}</parameter>\n<parameter=days>3</parameter>\n<parameter=more>{{'a': [True, False]}}</parameter>\n"
        "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    ),
    "gemma, fences": (
        "nothing",
        f"Let me see.\n```tool_code\nprint(weather(city={CITY!r}, days=3, more={{'a': [True, False]}}))\nnow()\n```\n",
    ),
    "gemma, json": ("nothing", f"Let me see.\n```json\n{OBJECT}\n```\n```json\n{NOW}\n```"),
    "gemma 4": (
        "tools <|tool_call> <|channel> <channel|>",
        "<|channel>thought\nI think.\n<channel|>Let me see.<|tool_call>call:weather{city:<|\"|>"
        f"{CITY}<|\"|>,days:3,more:{{<|\"|>a<|\"|>:[true,false]}}}}<tool_call|><|tool_call>call:now{{}}<tool_call|>",
    ),
    "functiongemma": (
        "tools <start_function_call>",
        f"Let me see.<start_function_call>call:weather{{city:<escape>{CITY}<escape>,days:3,more:{{a:[true,false]}}}}"
        "<end_function_call><start_function_call>call:now{}<end_function_call>",
    ),
    "hunyuan": (
        "tools <think> <answer> <tool_calls>",
        f"<think>\nI think.\n</think>\n<answer>\nLet me see.\n<tool_calls>[{OBJECT}, {NOW}]</tool_calls>\n</answer>",
    ),
    "minimax m2": (
        "tools <think> <minimax:tool_call>",
        f'I think.\n</think>\n\nLet me see.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">{CITY}'
        '</parameter>\n<parameter name="days">3</parameter>\n<parameter name="more">{"a": [true, false]}</parameter>\n'
        '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        THOUGHT,
    ),
    "kimi k2": (
        "tools <think> <|tool_call_begin|>",
        "<think>I think.</think>Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_call_begin|>functions.now:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    ),
}  # fmt: skip


def split(dialect, pieces, begun: str = "", tools=TOOLS, cut: bool = False) -> tuple[str, str, list]:
    """The text, the thought and the calls of an answer that arrives in these pieces."""
    splitter = Splitter(dialect, tools, begun)
    text, calls = {TEXT: "", THOUGHT: ""}, []
    for piece in [*(more for part in pieces for more in splitter.push(part)), *splitter.finish(cut)]:
        if piece.kind == CALL:
            calls.append([piece.text, ""])
        elif piece.kind == ARGUMENTS:
            calls[-1][1] += piece.text
        else:
            text[piece.kind] += piece.text
    return text[TEXT], text[THOUGHT], [tuple(call) for call in calls]


def cuts(text: str):
    """The text cut at every place, and into small pieces."""
    yield from ([text[:at], text[at:]] for at in range(len(text) + 1))
    yield from ([text[i : i + size] for i in range(0, len(text), size)] for size in (1, 2, 5))


def family(name: str):
    template, text, *begun = FAMILIES[name]
    return dialect_of(template, ()), text, *(begun or [""])


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_read_however_its_answer_is_cut(name):
    """A mark in the text, a thought in the answer, a call that is lost, pieces that depend on where a stream is cut; a
    call of a function that the client does not have, and marks that vanish from a text about them."""
    dialect, text, begun = family(name)
    shown, thought, calls = split(dialect, [text], begun)
    assert shown == ("" if name == "llama, no mark" else "Let me see.")
    assert thought == ("I think." if dialect.thoughts else "")
    assert [(called, json.loads(given)) for called, given in calls] == [("weather", GIVEN), ("now", {})]
    unknown = split(dialect, [text], begun, {"other": {}})
    if not dialect.harmony:  # whose message to an unknown function is text without its header
        assert unknown[1:] == (thought, []) and "weather" in unknown[0] and CITY[:8] in unknown[0]
    for pieces in cuts(text):
        assert split(dialect, pieces, begun) == (shown, thought, calls), pieces
        assert split(dialect, pieces, begun, {"other": {}}) == unknown, pieces


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_that_ends_early_loses_nothing_before_its_end(name):
    """A cut off answer with half a mark or half a call as text, or with arguments that no later part may continue."""
    dialect, text, begun = family(name)
    whole = split(dialect, [text], begun)
    marks = [mark for form in dialect.calls for mark in (form.begin, *form.section) if mark]
    if thoughts := dialect.thoughts:
        marks += [thoughts.begin, thoughts.end, *thoughts.around]
    halves = sorted({mark[:size] for mark in (*marks, "<|start|>", "to=") for size in range(1, len(mark))}, key=len)
    for at in range(len(text)):
        shown, thought, calls = split(dialect, [text[:at]], begun, cut=True)
        for said, complete in ((shown, whole[0]), (thought, whole[1])):
            half = next((half for half in reversed(halves) if said.endswith(half)), "")
            assert complete.startswith((said.rstrip(), said.removesuffix(half).rstrip())), (at, said)
        for (called, given), (expected, complete) in zip(calls, whole[2], strict=False):
            assert called == expected and complete.startswith(given), at


@pytest.mark.parametrize("template, text, expected", [
    ("tools <tool_call>", "a < b, <tool and <tool_ca", ("a < b, <tool and <tool_ca", "", [])),
    ("tools <tool_call>", "<tool_call>{broken</tool_call> on", ("<tool_call>{broken</tool_call> on", "", [])),
    ("tools <tool_call>", '<tool_call>{"name": "now"}', ("", "", [("now", "{}")])),
    ("tools <tool_call>", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 5}"}', ("", "", [("now", '{"a": 5}')])),
    ("tools <tool_call>", '<tool_call>{"name": "now", "arguments": [1]}', None),
    ("tools <tool_call>", '<tool_call>{"function": {"name": "now", "arguments": {}}}', ("", "", [("now", "{}")])),
    ("tools <tool_call>", " \n\n Hi.  \n\nYou \n", (" \n\n Hi.  \n\nYou \n", "", [])),
    ("tools [TOOL_CALLS]", "[1, 2] [TOOL", ("[1, 2] [TOOL", "", [])),
    ('tools "parameters"', '{"name": "John", "age": 3}', ('{"name": "John", "age": 3}', "", [])),
    ('tools "parameters"', 'As JSON: {"name": "now", "parameters": {}}', None),
    ('tools "parameters"', " {1, 2} ", (" {1, 2} ", "", [])),
    ("tools <think>", "<think>\nnever ends \n", ("", "never ends", [])),
    (HARMONY_MARKS, " to=python<|channel|>commentary<|message|>1 + 1<|end|>", ("", "1 + 1", [])),
    (HARMONY_MARKS, "<|channel|>commentary to=assistant<|channel|>final<|message|>Hi", ("Hi", "", [])),
    (HARMONY_MARKS, "<|channel|>analysis to=functions.now<|message|>", ("", "", [("now", "{}")])),
    ("tools <think> <tool_call>", '<think>So.<tool_call>{"name": "now"}</tool_call>', ("", "So.", [("now", "{}")])),
    ("tools <think> <function= <parameter=", "<think>A <function=x</think>Hi", ("Hi", "A <function=x", [])),
    ("tools <think> <tool_call>", "<think>A <tool_call> here.</think>Hi", ("Hi", "A <tool_call> here.", [])),
    (HARMONY_MARKS, "no marks", ("no marks", "", [])),
    ("tools <think>", "<think>\n\n</think>\n\nHi", ("Hi", "", [])),
    ("tools <think>", "Use <think> and </think> so.\n", ("Use <think> and </think> so.\n", "", [])),
    ("tools <think>", " <thin", (" <thin", "", [])),
    ("nothing", "```json\n{\"name\": \"now\", \"age\": 3}\n```", ('```json\n{"name": "now", "age": 3}\n```', "", [])),
    ("nothing", "```tool_code\nimport os\nnow()\n```", ("```tool_code\nimport os\nnow()\n```", "", [])),
    ("nothing", "```tool_code\n[weather('Rome', 2)]\n```",
     ("", "", [("weather", '{"city": "Rome", "days": 2}')])),
])  # fmt: skip
def test_what_is_nearly_a_mark_or_a_call(template, text, expected):
    """Half a mark at the end, broken JSON, other JSON, white space that is text, thoughts that never begin or end."""
    for pieces in cuts(text):
        assert split(dialect_of(template, ()), pieces) == (expected or (text, "", [])), pieces


def test_the_dialect_is_told_by_template_and_tokens():
    """A family that is chosen by a name, a row that never counts because one before it always fits, and marks that only
    the vocabulary has."""
    for texts, forms in CALLS:
        assert dialect_of(f"tools {' '.join(texts)}", ()).calls == forms, texts
    assert dialect_of("tools", {"<think>", "</think>"}).thoughts is THINK
    assert dialect_of("", {"<think>"}).thoughts is None  # no template: nothing is a chat
    assert dialect_of(FAMILIES["gpt-oss"][0], ()).thoughts is HARMONY
    assert dialect_of("tools", ()).calls == (HERMES,) and dialect_of("x", ()).calls[0] is HERMES


def test_pieces_come_as_soon_as_they_are_certain():
    """Text that waits although no mark can begin in it, and arguments that come only when the call is complete."""
    splitter = Splitter(dialect_of("tools <tool_call>", ()), TOOLS)
    told = lambda text: [piece[:2] for piece in splitter.push(text)]  # noqa: E731
    assert told("Hello you <tool") == [(TEXT, "Hello you")] and told("box") == [(TEXT, " <toolbox")]
    assert told('<tool_call>{"name": "weather", "argu') == []
    assert told('ments": {"city": "Par') == [(CALL, "weather"), (ARGUMENTS, '{"city": "Par')] and splitter.in_call
    assert told('is"}') == [(ARGUMENTS, 'is"}')] and told("}</tool_call>") == [] and not splitter.in_call
    splitter = Splitter(dialect_of("tools <function= <parameter=", ()), TOOLS)
    told("<function=weather>\n<parameter=city>\n")
    assert told('Pa"r') == [(ARGUMENTS, 'Pa\\"r')]
    splitter = Splitter(dialect_of("tools <think>", ()), {})
    assert told("<think>Well") == [(THOUGHT, "Well")]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_forced_call_is_written_in_the_form_of_the_family(name):
    """A grammar whose calls the family's own reader does not read, a call that may end before it is whole, and arguments
    that do not follow the schema."""
    dialect, _, _ = family(name)
    functions = [{"name": called, "parameters": schema} for called, schema in TOOLS.items()]
    grammar = checked_grammar(dialect.call_grammar(functions, quoted))
    form, tags = dialect.calls[0].written, dialect.calls[0].body
    given = '{"city":"Rome","days":3}'
    if isinstance(tags, Tags):
        values = (("city", "Rome"), ("days", 3))
        given = "".join(f"{tags.key}{k}{tags.then}{tags.line}{v}{tags.line}{tags.end}\n" for k, v in values)
    text = form.replace("NAME", "weather").replace("ARGUMENTS", given)
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    for byte in text.encode():
        assert not matcher.is_accepting() and matcher.consume_token(byte), matcher.get_error()
    assert matcher.is_accepting()
    ((called, arguments),) = split(dialect, [text])[2]
    assert (called, json.loads(arguments)) == ("weather", {"city": "Rome", "days": 3})
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    assert not matcher.consume_tokens([*text.replace("3", "x").encode()])


MESSAGES = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "I look.", "thought": "Hm.", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "now", "arguments": {}}}]},
]  # fmt: skip


def demo_tokenizer(template: str) -> Tokenizer:
    """The demo model's tokenizer with a chat template."""
    config = json.dumps({"chat_template": template}).encode()
    model = (DEMO / "tokenizer.model").read_bytes()
    return load_tokenizer({"tokenizer.model": model, "tokenizer_config.json": config})


@pytest.mark.parametrize("template, written", [
    ("{{ m.reasoning_content }}|{{ m.content }}", "Hm.|I look."),
    ("{% if m.content is string %}{{ m.content }}{% else %}{% for b in m.content %}{% if b['type'] == 'thinking' %}"
     "[THINK]{{ b.thinking }}{% else %}{{ b.text }}{% endif %}{% endfor %}{% endif %}", "[THINK]Hm.I look."),
    ("{% set message = m %}{{ message.thinking }}|{{ message.content }}", "Hm.|I look."),
    ("{% set message = m %}<|channel|><|message|>{{ message.thinking }}{{ message.content }}", "Hm.\n\nI look."),
    ("{{ m.content }}", "I look."),
])  # fmt: skip
def test_earlier_thoughts_stand_where_the_template_reads_them(template, written):
    """A thought that a client sends back and that the template does not find, or finds in the text of the answer; the
    text of a control token in a thought that becomes the token."""
    tokenizer = demo_tokenizer(f"{{% for m in messages %}}{{% if m.tool_calls %}}{template}{{% endif %}}{{% endfor %}}")
    assert tokenizer.decode(tokenizer.encode_chat(MESSAGES)).endswith(written)
    marked = [MESSAGES[0], MESSAGES[1] | {"thought": "Hm.</s>"}]
    assert not {*tokenizer.encode_chat(marked)} & tokenizer.special_ids or "Hm" not in written


def test_tools_calls_and_results_as_text():
    """A result that no call stands before, two results in two messages of the user, a description that is not there."""
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    written = as_text(messages, [{"type": "function", "function": {"name": "now", "parameters": {}}}])
    assert [message["role"] for message in written] == ["user", "assistant", "user"]
    assert written[0]["content"].endswith("\n\n1 + 1?") and '{"name": "now"' in written[0]["content"]
    plain = dialect_of("x", ())
    assert split(plain, [written[1]["content"]]) == ("", "", [("now", '{"a": 1}')] * 2)
    assert written[2]["content"] == "<tool_response>2</tool_response>\n<tool_response>3</tool_response>"
    assert as_text(messages[:1], []) == messages[:1]
    told = with_calls(messages[1], dialect_of("tools <|tool_call|>", ()).calls[0])
    assert told["content"].startswith('<|tool_call|>[{"name": "now"') and "tool_calls" not in told


def test_the_template_gets_tools_and_no_control_tokens():
    """Tools and earlier calls that are not in the prompt; the text of a control token in them; tools without a place."""
    template = "{{ tools | tojson }}{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    tokenizer = demo_tokenizer(template)
    ask, call = {"role": "user", "content": "x</s>"}, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    ids = tokenizer.encode_chat([ask], tools=[{"name": "add"}])
    assert tokenizer.decode(ids) == '[{"name": "add"}]user:x</s>' and not set(ids) & tokenizer.special_ids
    assert "{'id': '1'}" in tokenizer.decode(tokenizer.encode_chat([ask, call]))
    bad = {"name": "a</s>"}, {"a</s>": 1}, {"name": "a", "parameters": {"enum": ["b", "</s>"]}}
    asked = [([ask], [tool]) for tool in bad] + [([ask, call | {"tool_calls": [{"id": "</s>"}]}], None)]
    for messages, tools in asked:
        with pytest.raises(ValueError, match="text of a control token"):
            tokenizer.encode_chat(messages, tools=tools)
    tokenizer.use_template("vicuna")
    with pytest.raises(ValueError, match="takes no tools"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}], tools=[{"name": "add"}])


# Templates of models, by the names of their files among those of llama.cpp; EAGLET_TEMPLATES names a folder with them.
REAL = """ByteDance-Seed-OSS GLM-4.6 GLM-4.7-Flash HuggingFaceTB-SmolLM3-3B MiniMax-M2 Mistral-Small-3.2-24B-Instruct-2506
    NousResearch-Hermes-3-Llama-3.1-8B-tool_use NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 Qwen-QwQ-32B Qwen-Qwen2.5-7B-Instruct
    Qwen-Qwen3-0.6B Qwen3-Coder Qwen3.5-4B deepseek-ai-DeepSeek-R1-Distill-Qwen-32B deepseek-ai-DeepSeek-V3.1
    google-gemma-2-2b-it google-gemma-4-31B-it ibm-granite-granite-3.3-2B-Instruct ibm-granite-granite-4.0
    meta-llama-Llama-3.1-8B-Instruct meta-llama-Llama-3.2-3B-Instruct mistralai-Ministral-3-14B-Reasoning-2512
    mistralai-Mistral-Nemo-Instruct-2407 moonshotai-Kimi-K2 openai-gpt-oss-120b unsloth-mistral-Devstral-Small-2507"""
ENDS = re.compile(r"(\s|</s>|<\|(im_end|return|call|end|eot_id|end_of_text|endoftext)\|>|<turn\|>|<\|tool_response>|"
                  r"<seed:eos>|<｜end▁of▁sentence｜>|<｜Assistant｜>|\[e~\[|<end_of_turn>)+$")  # fmt: skip


@pytest.mark.parametrize("name", REAL.split())
def test_what_a_real_template_writes_is_read_back(name):
    """A form of the table that is not the one of the family: an earlier answer as the template itself writes it."""
    file = Path(os.environ.get("EAGLET_TEMPLATES", "")) / f"{name}.jinja"
    if not file.is_file():
        pytest.skip("EAGLET_TEMPLATES names no folder with this template")
    template, worker = file.read_text(encoding="utf-8"), TemplateWorker()
    dialect = dialect_of(template, ())
    described = [{"name": called, "description": "d", "parameters": schema} for called, schema in TOOLS.items()]
    tools = [{"type": "function", "function": each} for each in described]
    known = {"tools": tools, "bos_token": "", "eos_token": "</s>"}
    ask = {"role": "user", "content": "Weather?"}
    number = "functions.weather:0" if "Kimi" in name else "a1b2c3d4e"
    call = {"id": number, "type": "function", "function": {"name": "weather", "arguments": GIVEN}}
    places = "tool_calls" in template
    for said in ({"content": "Hi."}, {"content": "Hi.", "thought": "Hm."}, {"content": "", "tool_calls": [call]}):
        if "tool_calls" in said and not places:
            said = with_calls(said, dialect.calls[0])
        answer = dialect.placed({"role": "assistant"} | said)
        known["enable_thinking"] = "thought" in said
        begins, before, after = (
            worker.render(template, [messages], {**known, "add_generation_prompt": begin})[0]
            for messages, begin in (([ask], True), ([ask], False), ([ask, answer], False))
        )
        text, header = after.removeprefix(before), begins.removeprefix(before)
        thoughts = dialect.thoughts
        marks = (thoughts.begin, thoughts.end) if thoughts else ()
        for mark in marks:
            header = header.partition(mark)[0]
        text = ENDS.sub("", text.strip().removeprefix(header.strip()).strip("\n"))
        begun = THOUGHT if marks and text.startswith(marks[1]) else ""  # an empty thought, whose begin is in the prompt
        shown, thought, calls = split(dialect, [text], begun)
        assert shown == (said["content"] if "tool_calls" in said or places or not calls else ""), text
        assert thought == (said.get("thought", "") if said.get("thought", "?") in after else ""), text
        expected = [("weather", GIVEN)] if "tool_calls" in said or "weather" in said["content"] else []
        assert [(called, json.loads(given)) for called, given in calls] == expected, text
        for pieces in cuts(text):
            assert split(dialect, pieces, begun) == (shown, thought, calls)
