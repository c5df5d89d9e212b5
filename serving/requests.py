"""What a request asks for, read from its JSON: one function for each endpoint. Nothing here touches the engine."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from decoding.params import MAX_LOGPROBS
from serving.fields import NOT_HERE, Fields, read_bias, read_constraint, text_prompts, unsupported, wrong
from support.reader import parse_json

MAX_CHOICES = 16  # answers that one request may ask for
COMPLETION_TOKENS = 16  # what OpenAI's API gives where max_tokens is left out
# Fields of SamplingParams that a client may set under the same name -> their type.
FLOATS = "temperature top_p min_p repeat_penalty repetition_penalty presence_penalty frequency_penalty".split()
SETTINGS = dict.fromkeys(FLOATS, float) | dict.fromkeys(("top_k", "seed", "min_tokens"), int)
SAME = {"repeat_penalty": "repetition_penalty", "min_tokens": "min_new_tokens"}  # names of others for settings
NO_LIMIT = -1  # how llama.cpp's and LM Studio's clients ask for an answer of any length
MOST_TOKENS = 2**31
# What some clients write -> the value that they mean. vLLM switches top_k off so, top_p 0 is the likeliest token alone.
MEANT = {("top_k", -1): 0, ("top_p", 0): 1e-9, ("seed", -1): None}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
ROLES |= {"function": "tool"}  # before there were tools
TOOL_NAME = 64  # characters
CHOICES = ("none", "auto", "required")  # of tools
NO_PARAMETERS = {"type": "object", "properties": {}}
TEXT_PARTS = ("text", "input_text", "output_text")
IMAGES = ("image", "image_url", "input_image")
# How hard a model shall think, in OpenAI's API and in chat templates, "": it shall not.
EFFORTS = {"none": "", "minimal": "low", "low": "low", "medium": "medium"}
EFFORTS |= dict.fromkeys(("high", "xhigh", "max"), "high")
BUDGETS = ("reasoning_budget", "thinking_budget", "thinking_token_budget")  # of llama.cpp, Qwen and vLLM
FORMATS = ("auto", "deepseek", "none")  # of thoughts, in llama.cpp's server
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # fields of a message that may hold its thought


@dataclass
class Ask:
    """A request, read and checked as far as that needs no model."""

    given: dict[str, Any]  # fields of SamplingParams that the client set
    messages: list[dict[str, Any]] = field(default_factory=list)  # of a chat, as chat templates take them
    prompts: list[str | list[int]] = field(default_factory=list)  # of a completion
    tools: list[dict[str, Any]] = field(default_factory=list)  # as chat templates take them
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)  # name of a tool -> namespace, name in it
    one_call: bool = False  # return the first tool call only
    forced: bool = False  # the answer must be a call
    ignored: list[str] = field(default_factory=list)  # what the request asks for in vain
    strict: bool = False  # whose arguments must follow every keyword of the tool's schema
    think: bool | None = None  # whether the model shall think first, None: as its chat template has it
    budget: int | None = None  # tokens of a thought
    raw_thoughts: bool = False  # thoughts stay in the text
    begun: str = ""  # the kind of text that the prompt has begun, as `text.splitter` has it
    model: str = ""  # the name that the client gave
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    steps: bool = False  # stream every step with its tree, too
    stop_token_ids: tuple[int, ...] = ()  # ids that end the text, beside the model's own
    ignore_eos: bool = False  # the model's own stop ids do not end the text
    echo: bool = False  # the answer begins with the prompt
    prompt_logprobs: int | None = None  # alternatives for every token of the prompt; None: no log-probabilities
    prompt_ids: list[Sequence[int]] = field(default_factory=list)  # of every prompt, where they are needed again
    variables: dict[str, Any] = field(default_factory=dict)  # for the chat template
    drop_oldest: bool = False  # leave out the oldest turns of a chat that does not fit
    dropped: int = 0  # messages that were left out
    source: str = "messages"  # the field that holds the prompt
    raw: dict[str, Any] = field(default_factory=dict)  # the request itself, for what an answer repeats

    @property
    def goes_on(self) -> bool:
        """Whether the answer goes on from a last message of the assistant."""
        last = self.messages[-1] if self.messages else {}
        return last.get("role") == "assistant" and bool(last["content"]) and "tool_calls" not in last


Parse = Callable[[dict[str, Any]], Ask]


def chat_ask(body: dict[str, Any]) -> Ask:
    """Read a request to /v1/chat/completions."""
    fields = Fields(body)
    ask = common(fields, "max_completion_tokens", "max_tokens")
    ask.messages = [_message(message, ask) for message in fields.some("messages")]
    if fields.get("logprobs", bool, False):
        ask.given["logprobs"] = fields.integer("top_logprobs", 0, MAX_LOGPROBS, 0)
    elif fields.given("top_logprobs"):
        raise wrong("top_logprobs", "needs logprobs to be true")
    fields.refuse("functions", ([],), "use tools.")
    fields.refuse("function_call", ("none", "auto"), "use tool_choice.")
    fields.refuse("modalities", (["text"],), "this server has text only.")
    fields.refuse("audio", (), "this server has text only.")
    fields.refuse("echo", (False,), "the answer has new text only.")
    fields.refuse("add_special_tokens", (False,), "the chat template writes them.")
    goes_on = ask.goes_on
    fields.refuse("add_generation_prompt", (not goes_on,), "an answer begins, or the assistant's last message goes on.")
    fields.refuse("continue_final_message", (goes_on,), "a last message of the assistant goes on, and no other one.")
    _read_thinking(ask, fields)
    _read_tools(ask, fields)
    return ask


def completion_ask(body: dict[str, Any]) -> Ask:
    """Read a request to /v1/completions."""
    fields = Fields(body)
    ask = common(fields, "max_tokens", least=0)
    ask.given.setdefault("max_new_tokens", COMPLETION_TOKENS)
    ask.source = "prompt"
    ask.prompts = text_prompts(body.get("prompt"), "prompt")
    if ask.n * len(ask.prompts) > MAX_CHOICES:
        raise wrong("n", f"and prompt ask for {ask.n * len(ask.prompts)} answers; allowed: at most {MAX_CHOICES}")
    if fields.given("logprobs"):
        ask.given["logprobs"] = fields.integer("logprobs", 0, MAX_LOGPROBS, 0)
    ask.echo = fields.get("echo", bool, False)
    if ask.echo and "logprobs" in ask.given:
        ask.given["prompt_logprobs"] = max(ask.given["logprobs"], ask.prompt_logprobs or 0)
    fields.refuse("add_special_tokens", (True,), "send token ids to decide about them.")
    fields.refuse("suffix", ("",), "this server only continues text.")
    fields.refuse("best_of", (1, ask.n), "use n.")
    return ask


def response_ask(body: dict[str, Any]) -> Ask:
    """Read a request to /v1/responses."""
    fields = Fields(body)
    ask = common(fields, "max_output_tokens", holder="text")
    ask.source = "input"
    ask.messages = _input_messages(ask, fields)
    for name in ("previous_response_id", "conversation"):
        fields.refuse(name, (), "this server keeps no conversations. Send the whole input.")
    fields.refuse("prompt", (), "this server stores no prompts.")
    fields.refuse("background", (False,), "the answer comes with this request.")
    ask.drop_oldest = fields.choice("truncation", ("auto", "disabled"), "disabled") == "auto"
    if "message.output_text.logprobs" in fields.get("include", list, []) or fields.given("top_logprobs"):
        ask.given["logprobs"] = fields.integer("top_logprobs", 0, MAX_LOGPROBS, 0)
    _read_thinking(ask, fields)
    _read_tools(ask, fields, flat=True)
    return ask


def common(fields: Fields, *limits: str, holder: str = "", least: int = 1) -> Ask:
    """What all endpoints share.

    Args:
        limits: the names of the token limit, the first one that is given counts.
        least: the lowest limit.
        holder: the object with the output format. An endpoint that has one gives one answer and no steps.
    """
    given: dict[str, Any] = {}
    ask = Ask(given, model=fields.get("model", str, ""), raw=fields.values)
    for name, kind in SETTINGS.items():
        value = fields.get(name, kind)
        if (meant := MEANT.get((name, value), value)) is not None:
            given[SAME.get(name, name)] = meant
    limit = next((n for n in (*limits, "n_predict") if fields.given(n)), None)
    if limit is not None:
        value = fields.get(limit, int)
        if value != NO_LIMIT and not least <= value <= MOST_TOKENS:
            raise wrong(fields.name(limit), f"is {value!r:.40}; allowed: {least} to {MOST_TOKENS}, or -1 for no limit")
        given["max_new_tokens"] = MOST_TOKENS if value == NO_LIMIT else value
    if fields.given("stop"):
        stop = fields.values["stop"]
        stop = [stop] if isinstance(stop, str) else fields.get("stop", list)
        given["stop"] = tuple(text for text in stop if text != "")
    if fields.given("logit_bias"):
        given["logit_bias"] = read_bias(fields)
    if (grammar := read_constraint(fields, holder)) is not None:
        given["grammar"] = grammar
    for name, (allowed, why) in NOT_HERE.items():
        fields.refuse(name, allowed, why)
    ask.ignore_eos = fields.get("ignore_eos", bool, False)
    if ask.ignore_eos and grammar is not None:
        raise wrong("ignore_eos", "does not go with a grammar or schema, whose text ends where it is complete")
    ask.stream = fields.get("stream", bool, False)
    if fields.given("prompt_logprobs"):
        if holder or ask.stream:
            raise unsupported("prompt_logprobs", "use /v1/completions or /v1/chat/completions without stream.")
        ask.prompt_logprobs = given["prompt_logprobs"] = fields.integer("prompt_logprobs", 0, MAX_LOGPROBS, 0)
    ask.steps = fields.inner("eaglet").get("steps", bool, False)  # a field of this server only
    if ask.steps and not ask.stream:
        raise wrong("eaglet.steps", "needs stream to be true")
    if ask.steps and holder:
        raise unsupported("eaglet.steps", "use /v1/chat/completions or /v1/completions.")
    ask.n = 1 if holder else fields.integer("n", 1, MAX_CHOICES, 1)
    ask.include_usage = fields.inner("stream_options").get("include_usage", bool, False)
    ask.stop_token_ids = tuple(fields.get("stop_token_ids", list, []))
    return ask


def _read_thinking(ask: Ask, fields: Fields) -> None:
    """Whether the model thinks first, how hard and how long, and where its thoughts go."""
    variables = fields.get("chat_template_kwargs", dict, {})
    own = fields.inner("reasoning")
    effort = fields.choice("reasoning_effort", EFFORTS, "") or own.choice("effort", EFFORTS, "")
    ask.raw_thoughts = fields.choice("reasoning_format", FORMATS, "auto") == "none"
    budgets = [fields.integer(name, -1, 2**31, -1) for name in BUDGETS] + [own.integer("max_tokens", -1, 2**31, -1)]
    think = fields.get("enable_thinking", bool, own.get("enabled", bool))
    if effort == "none" or (think is None and effort not in ("", "minimal")):
        think = effort != "none"
    set_thinking(ask, variables, think, max(budgets))
    if EFFORTS.get(effort):
        ask.variables.setdefault("reasoning_effort", EFFORTS[effort])


def set_thinking(ask: Ask, variables: dict[str, Any], think: bool | None, budget: int) -> None:
    """Give a request the variables of its chat template that say whether and how long the model thinks.

    variables: those that the client gave, which count first. budget: tokens of a thought, below 0: any number.
    """
    ask.budget = budget if budget >= 0 else None
    think = False if budget == 0 else think
    if budget >= 0:
        variables = {"thinking_budget": budget} | variables
    if think is not None:
        variables = {"enable_thinking": think, "thinking": think} | variables
    ask.variables = variables
    ask.think = False if False in (variables.get("enable_thinking"), variables.get("thinking")) else think


# ------------------------------------------------------------------ messages and tools, as chat templates take them


def _message(fields: Fields, ask: Ask) -> dict[str, Any]:
    """A message: its role, its content, and what belongs to tools."""
    role = fields.choice("role", ROLES)
    message: dict[str, Any] = {"role": ROLES[role], "content": read_text(fields, "content", ask, ROLES[role] == "tool")}
    fields.refuse("function_call", (), "use tool_calls.")
    if message["role"] == "tool":
        message |= {name: fields.get(name, str) for name in ("tool_call_id", "name") if fields.given(name)}
    elif role == "assistant":
        if thought := next((text for name in THOUGHTS if (text := fields.get(name, str))), ""):
            message["thought"] = thought
        if calls := fields.items("tool_calls"):
            message["tool_calls"] = [_call(call.inner("function"), call.get("id", str, "")) for call in calls]
    elif not fields.given("content"):
        raise wrong(fields.name("content"), "is missing")
    return message


def read_text(fields: Fields, name: str, ask: Ask, of_tool: bool = False) -> str:
    """What a field holds: a text, or a list of parts that all are text.

    of_tool: a tool returned it. In place of an image, which the client could not take back, the model is told of it.
    """
    value = fields.values.get(name)
    if isinstance(value, str):
        return value
    texts = []
    for part in fields.items(name):
        kind = part.required("type", str)
        if of_tool and kind in IMAGES:
            ask.ignored.append("images that tools returned")
            texts.append("(an image, which this model cannot see)")
            continue
        if kind not in (*TEXT_PARTS, "refusal"):
            raise unsupported(part.name("type"), f"{kind!r:.40}; this model reads text only.")
        texts.append(part.required("refusal" if kind == "refusal" else "text", str))
    return "".join(texts)


def _call(function: Fields, call_id: str) -> dict[str, Any]:
    """A tool call that the model made earlier. Its arguments are the object that a JSON text holds, or else the text."""
    value = arguments = function.values.get("arguments")
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            arguments = parse_json(value, "the arguments")
    called = {"name": _whole_name(function)}
    called["arguments"] = arguments if isinstance(arguments, dict) else value or {}
    return {"id": call_id, "type": "function", "function": called}


def _whole_name(function: Fields) -> str:
    """The name that the model knows. To it, a function of a namespace is called NAMESPACE__NAME."""
    name, namespace = function.required("name", str), function.get("namespace", str)
    return f"{namespace}__{name}" if namespace else name


def _input_messages(ask: Ask, fields: Fields) -> list[dict[str, Any]]:
    """The messages that the instructions and the input of /v1/responses stand for."""
    instructions, given = fields.get("instructions", str), fields.values.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise wrong("input", "must be a text or a list of items, and not empty")
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    thought = ""  # of the next message of the assistant
    for i, values in enumerate(items):
        item = Fields(values, f"input[{i}].")
        kind = item.get("type", str, "message")
        if kind == "custom_tool_call":  # a call whose arguments are one text
            kind = "function_call"
            item = Fields(item.values | {"arguments": {"input": item.get("input", str, "")}}, item.where)
        if kind == "message":
            messages.append(_message(item, ask))
        elif kind == "reasoning":
            thought += "".join(part.get("text", str, "") for part in item.items("content"))
            continue
        elif kind == "function_call":
            call = _call(item, item.get("call_id", str, ""))
            if messages and messages[-1]["role"] == "assistant":  # its text, or an earlier call of the same answer
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind in ("function_call_output", "custom_tool_call_output"):
            item.required("output", object)
            output = {"role": "tool", "content": read_text(item, "output", ask, of_tool=True)}
            messages.append(output | {"tool_call_id": item.get("call_id", str, "")})
        elif kind == "web_search_call":  # whose results are in the message that follows
            ask.ignored.append(f"input of type {kind!r}")
            continue
        else:
            raise unsupported(item.name("type"), f"{kind!r:.40}; allowed: messages and function calls.")
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["thought"] = thought
            thought = ""
    if not messages:
        raise wrong("input", "has no messages")
    return messages


# ------------------------------------------------------------------ the tools of a request


def _read_tools(ask: Ask, fields: Fields, flat: bool = False) -> None:
    """The tools that tool_choice leaves.

    flat: as /v1/responses has them, where a function's fields stand in the tool itself, and in tool_choice.
    """
    ask.one_call = not fields.get("parallel_tool_calls", bool, True)
    tools = functions_of(ask, fields, "function", "parameters", ignores=flat)
    choice = fields.values.get("tool_choice") or "auto"
    if isinstance(choice, dict) and choice.get("type") in CHOICES:
        choice = choice["type"]
    if choice in CHOICES:
        return choose_tools(ask, tools, choice)
    named = fields.inner("tool_choice")
    if (kind := named.required("type", str)) not in ("function", "allowed_tools"):
        raise unsupported(named.name("type"), f"{kind!r:.40}; allowed: function, allowed_tools.")
    holder = named if flat else named.inner(kind)
    if kind == "function":
        return choose_tools(ask, tools, "required", _whole_name(holder), holder.name("name"))
    mode = holder.choice("mode", ("auto", "required"))
    holder.required("tools", list)
    names = {_whole_name(tool if flat else tool.inner("function")) for tool in holder.items("tools")}
    if unknown := names - {tool["function"]["name"] for tool in tools}:
        raise wrong("tool_choice", f"allows {min(unknown)!r:.80}, which is none of the tools")
    return choose_tools(ask, [tool for tool in tools if tool["function"]["name"] in names], mode)


def choose_tools(ask: Ask, tools: list[dict[str, Any]], choice: str, name: str | None = None, where: str = "") -> None:
    """Give a request the tools that a choice (none, auto, required) leaves; with required the answer must be a call.

    name, where: of the only tool left, and the field that names it.
    """
    if choice != "required":
        ask.tools = tools if choice == "auto" else []
        return
    if name is not None:
        tools = [tool for tool in tools if tool["function"]["name"] == name][:1]
        if not tools:
            raise wrong(where, f"is {name!r:.80}, which is none of the tools")
    if not tools:
        raise wrong("tool_choice", "is required, and there are no tools")
    if "grammar" in ask.given or ask.ignore_eos:
        raise wrong("tool_choice", "asks for a call, which does not go with another format or ignore_eos")
    ask.tools, ask.forced = tools, True


def functions_of(ask: Ask, fields: Fields, kind: str, parameters: str, ignores: bool) -> list[dict[str, Any]]:
    """The functions among the tools of a request, as chat templates take them.

    Args:
        kind: the type of a tool that is a function.
        parameters: the field with the schema of its arguments.
        ignores: other tools, which the client's usual server would run itself, are left out. Otherwise they are refused.
    """
    tools = []
    for tool in fields.items("tools"):
        own = tool.get("type", str, kind)
        if own == "namespace" and ignores:
            namespace = tool.required("name", str)
            for described in functions_of(ask, tool, kind, parameters, ignores):
                function = described["function"]
                whole = f"{namespace}__{function['name']}"
                ask.namespaces[whole] = namespace, function["name"]
                tools.append(described | {"function": function | {"name": whole}})
            continue
        if own != kind:
            if not ignores:
                raise unsupported(tool.name("type"), f"{own!r:.40}; tools must be functions.")
            ask.ignored.append(f"tools of type {own!r:.40}")
            continue
        function = tool.inner("function") if tool.given("function") else tool
        ask.strict |= function.get("strict", bool, False)
        name = function.required("name", str)
        if not 1 <= len(name) <= TOOL_NAME:
            raise wrong(function.name("name"), f"has {len(name)} characters; allowed: 1 to {TOOL_NAME}")
        described = {"name": name, "description": function.get("description", str, "")}
        described["parameters"] = function.get(parameters, dict, NO_PARAMETERS)
        tools.append({"type": "function", "function": described})
    return tools
