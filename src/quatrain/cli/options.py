"""Flags and YAML keys, both made from the option sets in `quatrain.config`: one home for names, types and defaults.

Every flag and every YAML scalar arrives as text and is converted by the option's declared type, so `1e-4`, `"1e-4"` and
`.0001` are one number and `yes` is a truth value only where one is wanted. Precedence: flag, then file, then default.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer
import yaml

from quatrain.cli.complete import completer
from quatrain.config import EXCLUSIVE, Options
from quatrain.errors import ConfigError

ALIASES = {"learning_rate": "--lr"}
_SHORT = {alias.lstrip("-"): name for name, alias in ALIASES.items()}
_NAMED_IN_FILES = {"model", "adapter", "data", "system"}
CONFIG_HELP = "YAML file of options; a flag beats the file, the file beats the default"


class Group(typing.NamedTuple):
    """Options that one command takes: a set, or some fields of it, under a heading of `--help`."""

    title: str
    options: type[Options]
    names: tuple[str, ...] | None = None

    def fields(self) -> dict[str, Any]:
        """The pydantic fields by name."""
        fields = self.options.model_fields
        return {name: fields[name] for name in (self.names or fields)}


def with_options(*groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for every option of `groups`, and `--config`.

    The command's first parameter receives the options that were set, by name; its other parameters stay typer's.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = typing.get_type_hints(command, include_extras=True)
        own = list(inspect.signature(command).parameters.values())[1:]
        parameters = [parameter.replace(annotation=hints[parameter.name]) for parameter in own]
        parameters.append(_parameter("config", str | None, typer.Option("--config", metavar="FILE", help=CONFIG_HELP)))
        flags = {name: (group, field) for group in groups for name, field in group.fields().items()}
        for name, (group, field) in flags.items():
            parameters += _flags(name, field, group.title)

        @functools.wraps(command)
        def run(**values: Any) -> None:
            config = values.pop("config")
            given = read_yaml(Path(config)) if config else {}
            for name, (_, field) in flags.items():
                value = values.pop(name)
                if field.annotation is bool and values.pop(_OFF + name):
                    value = False
                if value is not None and value != []:
                    for other in _excluded_by(name):
                        given.pop(other, None)
                    given[name] = _split(value, field.annotation)
            command(given, **_from_file(values, given, config))

        keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        run.groups = groups  # type: ignore[attr-defined]
        run.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _from_file(values: dict[str, Any], given: dict[str, Any], config: str | None) -> dict[str, Any]:
    """The command's own parameters; what names a model or data may stand in the file instead (taken out of `given`).
    Data files that are arguments replace those of the file."""
    for name in _NAMED_IN_FILES & values.keys() & given.keys():
        found = given.pop(name)
        if values[name] or (name == "data" and values.get("files")):
            continue
        texts = found if isinstance(found, list) and name == "data" else [found]
        if not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"{config}: {name}: want text, got {found!r}")
        values[name] = texts if name == "data" else found
    return values


def _excluded_by(name: str) -> list[str]:
    """Options of a file that a flag for this one replaces: they say the same thing in another way."""
    return [other for pair in EXCLUSIVE if name in pair for other in pair if other != name]


def flag_of(name: str) -> str:
    """`--learning-rate` for learning_rate."""
    return "--" + name.replace("_", "-")


def metavar_of(annotation: Any) -> str:
    """What a flag wants, in one word: INTEGER, NUMBER, TEXT, or the choices `nf4|none`."""
    members = [part for part in _members(annotation) if part is not type(None)]
    words = []
    for member in members:
        if typing.get_origin(member) is typing.Literal:
            words += [str(choice) for choice in typing.get_args(member)]
        elif typing.get_origin(member) in (list, tuple):
            words.append("TEXT" if len(members) == 1 and _repeatable(member) else "A,B")
        else:
            words.append({int: "INTEGER", float: "NUMBER", str: "TEXT", bool: ""}[member])
    return "|".join(words)


def default_text(field: Any) -> str:
    """The default as shown in help and docs; empty where there is none worth showing."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ([], ""):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _flags(name: str, field: Any, title: str) -> list[inspect.Parameter]:
    """The flag of an option; a truth value also has the other form, hidden where it is the default."""
    help_text, flag = _help(field), flag_of(name)
    if field.annotation is bool:
        off = "--no-" + flag.removeprefix("--")
        is_on = bool(field.default)
        return [
            _parameter(name, bool | None, typer.Option(flag, help=help_text, hidden=is_on, rich_help_panel=title)),
            _parameter(
                _OFF + name,
                bool | None,
                typer.Option(off, help=f"not: {help_text}", hidden=not is_on, rich_help_panel=title),
            ),
        ]
    names = [flag, ALIASES[name]] if name in ALIASES else [flag]
    kind: Any = list[str] | None if _repeatable(field.annotation) else str | None
    metavar = metavar_of(field.annotation).replace("INTEGER", "N").replace("NUMBER", "X")
    metavar = "WORD" if metavar.islower() else metavar.replace("TEXT|A,B", "TEXT")
    option = typer.Option(
        *names, help=help_text, metavar=metavar, rich_help_panel=title, autocompletion=completer(name, field.annotation)
    )
    return [_parameter(name, kind, option)]


def _help(field: Any) -> str:
    notes, default, values = [], default_text(field), metavar_of(field.annotation)
    if values.islower():
        notes.append("one of " + values.replace("|", ", "))
    if default and field.annotation is not bool:
        notes.append(f"default: {default}")
    return str(field.description) + (f" ({'; '.join(notes)})" if notes else "")


_OFF = "no_"


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=typing.Annotated[kind, option]
    )


def _members(annotation: Any) -> Sequence[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _repeatable(annotation: Any) -> bool:
    return typing.get_origin(annotation) is list


def _split(value: Any, annotation: Any) -> Any:
    """`q_proj,v_proj` becomes a list where the option takes one; a regular expression with a comma stays one text."""
    takes_list = any(typing.get_origin(member) in (list, tuple) for member in _members(annotation))
    if not (isinstance(value, str) and takes_list and "," in value):
        return value
    parts = [part.strip() for part in value.split(",")]
    plain = all(part.replace(".", "").replace("_", "").isalnum() for part in parts)
    return parts if plain else value


class _TextLoader(yaml.SafeLoader):
    """YAML whose plain scalars stay text, except null; a key that is given twice is an error."""


def _text_or_null(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str | None:
    plain = node.style is None
    return None if plain and node.value in ("", "~", "null", "Null", "NULL") else str(node.value)


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    pairs = [(loader.construct_object(key), loader.construct_object(value, deep=True)) for key, value in node.value]
    seen: dict[Any, Any] = {}
    for (key, value), (key_node, _) in zip(pairs, node.value, strict=True):
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
        seen[key] = value
    return seen


_TextLoader.yaml_implicit_resolvers = {}
_TextLoader.add_constructor("tag:yaml.org,2002:str", _text_or_null)
_TextLoader.add_constructor("tag:yaml.org,2002:map", _mapping)


def read_yaml(path: Path) -> dict[str, Any]:
    """The options in a YAML file, as text for the declared types to convert. Raises ConfigError with file and line."""
    path = path.expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"config: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config: {path} is not UTF-8 text: {error}") from error
    try:
        content = yaml.load(text, Loader=_TextLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: {error.problem or error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {error}") from None
    if content is None or content == "":
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{path}: want `option: value` lines, got {type(content).__name__}")
    given: dict[str, Any] = {}
    for key, value in content.items():
        name = _SHORT.get(key, key.replace("-", "_"))
        if name in given:
            raise ConfigError(f"{path}: {name} is given twice, the second time as {key}")
        given[name] = value
    return given
