"""Records to conversations. Each row's schema is read off its own fields; a row that fits none, or two, is refused.

instruction  instruction, response [, system]
alpaca       instruction, output [, input] [, system]; a non-empty input follows the instruction after a blank line
messages     messages: [{role, content [, tool_calls] [, weight]}] [, tools]       (OpenAI)
sharegpt     conversations: [{from, value}] [, system] [, tools]; role/content are read too
prompt       prompt, completion [, system], or the fields named by prompt_field and response_field
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from quatrain.config import DataOptions
from quatrain.data.outcome import Record, RowError
from quatrain.data.read import loads
from quatrain.data.tokenizer import replace_surrogates

_ROLES = {name: name for name in ("system", "user", "assistant", "tool")} | {"human": "user", "gpt": "assistant"}
_KINDS = {dict: "an object", list: "a list", bool: "true/false", int: "a number", float: "a number", bytes: "bytes"}
_JSON_KINDS = (dict, list, bool, int, float)
_EXTRA_KEYS = ("name", "tool_call_id", "reasoning_content")
_MESSAGE_KEYS = {"role", "from", "content", "value", "tool_calls", "weight", *_EXTRA_KEYS}
_SCHEMAS: dict[str, tuple[str, ...]] = {
    "instruction": ("instruction", "response"),
    "alpaca": ("instruction", "output"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt": ("prompt", "completion"),
}
_OPTIONAL = {
    "instruction": ("input", "system"),
    "alpaca": ("input", "system"),
    "messages": ("system", "tools"),
    "sharegpt": ("system", "tools"),
    "prompt": ("system",),
}


@dataclass(frozen=True)
class Message:
    """One turn. `learn` is False where the data says so (OpenAI's `weight: 0`)."""

    role: str
    content: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, str] = field(default_factory=dict)  # name, tool_call_id, reasoning_content
    learn: bool = True

    def as_dict(self) -> dict[str, Any]:
        """As templates see it. `tool_calls` is there only if there are any: templates ask for the key."""
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        return {"role": self.role, "content": self.content, **self.extra, **calls}


@dataclass(frozen=True)
class Conversation:
    """A row as turns. `is_chat` rows need a chat template; the others can do with a plain prompt format."""

    messages: list[Message]
    schema: str
    is_chat: bool
    source: str
    tools: list[dict[str, Any]] | None = None
    ignored: frozenset[str] = frozenset()  # fields that were not read


def to_conversation(record: Record, options: DataOptions) -> Conversation:
    """What a record says, as turns. Raises RowError with the field and the reason if it cannot be used."""
    values = record.values
    schema, wanted = _detect(values, options)
    if schema in ("messages", "sharegpt"):
        return _chat(record, schema, wanted[0], options)
    prompt, answer = (_text(values, name, options) for name in wanted)
    if "input" in _OPTIONAL[schema] and values.get("input") is not None:
        prompt = "\n\n".join(part for part in (prompt, _text(values, "input", options)) if part)
    if not prompt.strip():
        raise RowError(f"{wanted[0]} is empty")
    turns = [*_system(values, options), Message("user", prompt), Message("assistant", answer)]
    read = {*wanted, *_OPTIONAL[schema], options.system_field}
    return Conversation(turns, schema, False, record.source, ignored=frozenset(values.keys() - read))


def _detect(values: dict[str, Any], options: DataOptions) -> tuple[str, tuple[str, ...]]:
    """The schema of a row and the fields it needs. Raises RowError for none and for two."""
    if options.prompt_field is not None and options.response_field is not None:
        wanted = (options.prompt_field, options.response_field)
        for name in wanted:
            if name not in values:
                raise RowError(f"no field {name!r}", _no_field(name, values))
        return "prompt", wanted
    only: str = options.row_schema
    schemas = _SCHEMAS if only == "auto" else {only: _SCHEMAS[only]}
    present = {name for name, value in values.items() if value is not None}
    fitting = [schema for schema, wanted in schemas.items() if present.issuperset(wanted)]
    if len(fitting) == 1:
        return fitting[0], schemas[fitting[0]]
    if fitting:
        both = " and ".join("/".join(schemas[schema]) for schema in fitting)
        raise RowError("ambiguous row", f"the row fits {both}; leave one out, or set row_schema")
    nulls = [name for wanted in schemas.values() if values.keys() >= set(wanted) for name in wanted]
    for name in nulls:
        if values[name] is None:
            raise RowError(f"{name} is null")
    partly = [wanted for wanted in schemas.values() if wanted[0] in present]
    if partly:
        missing = " or ".join(wanted[1] for wanted in partly)
        raise RowError(f"no field {missing}", f"has {partly[0][0]!r} but no field {missing}; it has {_names(values)}")
    known = "; ".join(f"{schema}: {', '.join(wanted)}" for schema, wanted in schemas.items())
    if not values:
        raise RowError("no fields", f"the row has no fields, want those of a known schema ({known})")
    raise RowError(
        "unknown fields",
        f"the fields {_names(values)} fit no known schema ({known})",
        hint="name the fields with prompt_field and response_field",
    )


def _names(values: Iterable[str]) -> str:
    return ", ".join(values) or "none"


def _no_field(name: str, values: dict[str, Any]) -> str:
    near = difflib.get_close_matches(name, values, n=1)
    return f"no field {name!r}; it has {_names(values)}" + (f"; did you mean {near[0]!r}?" if near else "")


def _text(values: dict[str, Any], name: str, options: DataOptions) -> str:
    """A field's text, as written but for lone surrogates, which no encoding holds."""
    value = values[name]
    if isinstance(value, str):
        return replace_surrogates(value)
    if name in options.json_fields:
        try:
            return replace_surrogates(json.dumps(value, ensure_ascii=False))
        except TypeError as error:
            raise RowError(f"{name} has no JSON form", f"{name}: {error}") from error
    if value is None:
        raise RowError(f"{name} is null")
    advice = f"; use --json-fields {name} to serialise it" if type(value) in _JSON_KINDS else ""
    raise RowError(f"{name} is {_describe(value)}, expected text{advice}")


def _system(values: dict[str, Any], options: DataOptions) -> list[Message]:
    """The system turn of a row: its own, else the option's, else none."""
    name = options.system_field or "system"
    if options.system_field is not None and name not in values:
        raise RowError(f"no field {name!r}", _no_field(name, values))
    own = _text(values, name, options) if values.get(name) is not None else ""
    text = own or options.system
    return [Message("system", text)] if text else []


# Chats


def _chat(record: Record, schema: str, name: str, options: DataOptions) -> Conversation:
    turns = _parsed(record.values[name], name)
    if not isinstance(turns, list) or not turns:
        raise RowError(f"{name} is not a list of turns", f"{name}: want a list of turns, got {_describe(turns)}")
    messages = [to_message(turn, f"{name}[{i}]") for i, turn in enumerate(turns)]
    if not any(message.role == "assistant" for message in messages):
        raise RowError("no assistant turn")
    if messages[0].role != "system":
        messages = _system(record.values, options) + messages
    tools = _tools(record.values.get("tools"))
    keys = {key for turn in turns for key in turn} - _MESSAGE_KEYS
    unread = record.values.keys() - {name, *_OPTIONAL[schema], options.system_field}
    ignored = frozenset(unread | {f"{name}[].{key}" for key in keys})
    return Conversation(messages, schema, True, record.source, tools, ignored)


def _describe(value: Any) -> str:
    if value is None or value == []:
        return "null" if value is None else "an empty list"
    return "text" if isinstance(value, str) else _KINDS.get(type(value), f"of type {type(value).__name__}")


def _parsed(value: Any, where: str) -> Any:
    """A value that may be given as JSON text, as columns of tables do."""
    if not isinstance(value, str):
        return value
    try:
        return loads(value)
    except ValueError as error:
        reason = re.sub(r"\[\d+\]", "[]", where) + " is not JSON"  # counts are kept by it, whatever the turn
        raise RowError(reason, f"{where}: text that is not JSON: {error}") from error


def to_message(turn: Any, where: str = "message") -> Message:
    """A turn as data files spell it. Raises RowError with the reason if it cannot be used."""
    if not isinstance(turn, dict):
        raise RowError("a turn is not an object", f"{where}: want an object, got {_describe(turn)}")
    spoken = turn.get("role", turn.get("from"))
    role = _ROLES.get(spoken) if isinstance(spoken, str) else None
    if role is None:
        raise RowError("unknown role", f"{where}: role {spoken!r} is not known; accepted: {', '.join(_ROLES)}")
    calls = _tool_calls(turn.get("tool_calls"), where)
    if calls and role != "assistant":
        raise RowError("tool_calls outside an assistant turn", f"{where}: a {role} turn has tool_calls")
    content = _content(turn.get("content", turn.get("value")), where, may_be_null=bool(calls))
    extra = {key: turn[key] for key in _EXTRA_KEYS if turn.get(key) is not None}
    for key, value in extra.items():
        if not isinstance(value, str):
            raise RowError(f"{key} is not text", f"{where}.{key}: want text, got {_describe(value)}")
    weight = turn.get("weight")
    if weight not in (None, 0, 1):
        raise RowError("weight is not 0 or 1", f"{where}.weight: want 0 or 1, got {weight!r}")
    texts = {key: replace_surrogates(value) for key, value in extra.items()}
    return Message(role, content, calls, texts, learn=weight != 0)


def _content(value: Any, where: str, *, may_be_null: bool) -> str:
    """A turn's text. Parts of kind text are joined in order; other parts (images, audio) are refused by name."""
    if isinstance(value, str):
        return replace_surrogates(value)
    if value is None:
        if may_be_null:
            return ""
        raise RowError("content is null or missing", f"{where}: content is null or missing")
    if not isinstance(value, list):
        raise RowError("content is not text", f"{where}: content is {_describe(value)}, expected text")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            kind = kind if isinstance(kind, str) else _describe(part)
            raise RowError(f"content part of type {kind!r}", f"{where}: a content part of type {kind!r} cannot be used")
    return replace_surrogates("".join(part["text"] for part in value))


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls in the one spelling that templates expect: arguments as an object."""
    if value is None or value == "" or value == []:
        return []
    value = _parsed(value, f"{where}.tool_calls")
    if not isinstance(value, list):
        raise RowError("tool_calls is not a list", f"{where}.tool_calls: want a list, got {_describe(value)}")
    return [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(value)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("tool call without a function name", f"{where}: want {{function: {{name, arguments}}}}")
    arguments = _parsed(function.get("arguments") or {}, f"{where}.arguments")
    if not isinstance(arguments, dict):
        raise RowError("tool call arguments are not an object", f"{where}.arguments: got {_describe(arguments)}")
    clean = _clean({"name": function["name"], "arguments": arguments})
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**identity, "type": "function", "function": clean}


def _tools(value: Any) -> list[dict[str, Any]] | None:
    tools = _parsed(value or None, "tools")
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise RowError("tools is not a list", f"tools: want a list of objects, got {_describe(tools)}")
    tools = [_parsed(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    if not all(isinstance(tool, dict) for tool in tools):
        raise RowError("a tool is not an object", "tools: want a list of objects")
    return [_clean(tool) for tool in tools]


def _clean(value: dict[str, Any]) -> dict[str, Any]:
    """`value` without lone surrogates, in keys and texts."""
    try:
        return dict(json.loads(replace_surrogates(json.dumps(value, ensure_ascii=False))))
    except TypeError as error:  # a table may hold dates and the like
        raise RowError("a tool has no JSON form", f"a tool or its arguments: {error}") from error


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """`value` (of JSON kinds) with `change` applied to every text in it but the keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: map_texts(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [map_texts(inner, change) for inner in value]
    return value
