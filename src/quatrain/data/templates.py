"""Chat templates: the built-in ones by name, and which one a run uses.

A template is Jinja text over `messages`, `tools`, `add_generation_prompt` and the special tokens, as Hugging Face
tokenizers carry it. It comes with data and models from strangers, so it runs in a sandbox.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quatrain.data.tokenizer import Tokenizer
from quatrain.errors import DataError

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True)
class BuiltIn:
    """`text` is the template; `tokens` must be in the vocabulary. A `plain` format has no end token but EOS, and gets
    the BOS that the tokenizer puts before plain text."""

    text: str
    tokens: tuple[str, ...] = ()
    plain: bool = False


_CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}{{ '\\n' }}{{ message.content }}<|im_end|>{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif -%}
"""
_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages -%}
<|start_header_id|>{{ message.role }}<|end_header_id|>{{ '\\n\\n' }}{{ message.content }}<|eot_id|>
{%- endfor -%}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{{ '\\n\\n' }}{% endif -%}
"""
_MISTRAL = """\
{{- bos_token }}
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{%- set ns.system = message.content + '\\n\\n' -%}
{%- elif message.role == 'user' -%}[INST] {{ ns.system }}{{ message.content }} [/INST]{%- set ns.system = '' -%}
{%- elif message.role == 'assistant' %} {{ message.content }}{{ eos_token }}
{%- else -%}{{ raise_exception('the mistral template takes system, user and assistant turns') }}
{%- endif -%}
{%- endfor -%}
"""
_ALPACA = """\
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{ message.content }}{{ '\\n\\n' }}
{%- elif message.role == 'user' -%}### Instruction:{{ '\\n' }}{{ message.content }}{{ '\\n\\n' }}
{%- elif message.role == 'assistant' -%}### Response:{{ '\\n' }}{{ message.content }}{{ eos_token }}
{%- if not loop.last %}{{ '\\n\\n' }}{% endif -%}
{%- else -%}{{ raise_exception('the alpaca template takes system, user and assistant turns') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}### Response:{{ '\\n' }}{% endif -%}
"""
_PLAIN = """\
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{ message.content }}{{ '\\n\\n' }}
{%- elif message.role == 'user' -%}{{ message.content }}{{ '\\n' }}
{%- elif message.role == 'assistant' -%}{{ message.content }}{{ eos_token }}
{%- if not loop.last %}{{ '\\n' }}{% endif -%}
{%- else -%}{{ raise_exception('the plain template takes system, user and assistant turns') }}
{%- endif -%}
{%- endfor -%}
"""

# In front of a template: what makes one message of a system text and the user message behind it. The line end at its
# end is there for the template's own first line to begin at the begin of a line.
_FOLD = """\
{%- if messages and messages[0].role == 'system' -%}
{%- if messages | length < 2 or messages[1].role != 'user' -%}
{{- raise_exception('to fold a system text, a user message must follow it') -}}
{%- endif -%}
{%- set folded = messages[0].content + '\\n\\n' + messages[1].content -%}
{%- set messages = [{'role': 'user', 'content': folded}] + messages[2:] -%}
{%- endif %}
"""
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
BUILT_INS = {
    "chatml": BuiltIn(_CHATML, _CHATML_TOKENS),
    "llama3": BuiltIn(_LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "mistral": BuiltIn(_MISTRAL),
    "alpaca": BuiltIn(_ALPACA, plain=True),
    "plain": BuiltIn(_PLAIN, plain=True),
}


@dataclass(frozen=True)
class ChosenTemplate:
    """The template of a run: its text, where it came from, and whether chat rows may use it."""

    text: str
    name: str
    takes_chats: bool = True

    @property
    def folds(self) -> bool:
        """Whether it puts a system text in front of the first user message."""
        return self.text.startswith(_FOLD)


def choose_template(tokenizer: Tokenizer, wanted: str | None = None, system_policy: str = "template") -> ChosenTemplate:
    """`wanted` (a built-in's name or a Jinja file), else the tokenizer's own, else ChatML if its tokens are there,
    else the plain format, which is for instruction rows only. With `system_policy` "fold" the template's text begins
    with what puts a system text in front of the first user message, a blank line between: so whoever renders with it,
    here or elsewhere, folds.

    Raises DataError for an unknown name, an unreadable file, or a built-in whose tokens the tokenizer lacks.
    """
    chosen = _chosen(tokenizer, wanted)
    if system_policy != "fold" or chosen.folds:
        return chosen
    name = f"{chosen.name}, with system texts folded into the first user message"
    return replace(chosen, text=_FOLD + chosen.text, name=name)


def _chosen(tokenizer: Tokenizer, wanted: str | None) -> ChosenTemplate:
    if wanted is not None:
        built_in = BUILT_INS.get(wanted)
        return _from_file(wanted) if built_in is None else ChosenTemplate(_text_of(wanted, tokenizer), wanted)
    if tokenizer.chat_template is not None:
        return ChosenTemplate(tokenizer.chat_template, "the model's own")
    if all(tokenizer.token_id(token) is not None for token in _CHATML_TOKENS):
        return ChosenTemplate(_text_of("chatml", tokenizer), "chatml (the model has none, but has its tokens)")
    return ChosenTemplate(_text_of("plain", tokenizer), "plain (the model has none)", takes_chats=False)


def no_template_error() -> DataError:
    """For chat rows and a model without a template."""
    return DataError(
        "the data holds chats, but the model has no chat template",
        hint=f"set chat_template to a Jinja file or one of: {', '.join(BUILT_INS)}",
    )


def _text_of(name: str, tokenizer: Tokenizer) -> str:
    built_in = BUILT_INS[name]
    missing = [token for token in built_in.tokens if tokenizer.token_id(token) is None]
    if "eos_token" in built_in.text and tokenizer.eos_token is None:
        missing.append("an EOS token")
    if missing:
        usable = [other for other, entry in BUILT_INS.items() if all(map(tokenizer.token_id, entry.tokens))]
        raise DataError(
            f"chat template {name!r} needs {', '.join(missing)}, which the tokenizer lacks",
            hint=f"templates that need no tokens of their own: {', '.join(usable)}",
        )
    begin = "{{ bos_token }}" if built_in.plain and tokenizer.add_bos else ""
    return begin + built_in.text


def _from_file(wanted: str) -> ChosenTemplate:
    path = Path(wanted).expanduser()
    if not path.is_file():
        raise DataError(
            f"chat template {wanted!r} is neither a built-in nor a file",
            hint=f"built-in: {', '.join(BUILT_INS)}",
        )
    try:
        return ChosenTemplate(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}") from error


# Jinja


@lru_cache(maxsize=16)
def compile_template(text: str, date: str | None) -> Template:
    """A template in a sandbox, with the helpers that Hugging Face templates count on. `date` (YYYY-MM-DD) is what
    `strftime_now` tells; None: today. Raises DataError with the line of a syntax error."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=False, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _clock(date)
    try:
        return environment.from_string(_without_generation_tags(text))
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"chat template, line {error.lineno}: {error.message}") from error


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **more: Any) -> str:
    """JSON as prompts want it: characters as they are, and no HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _clock(date: str | None) -> Callable[[str], str]:
    def now(form: str) -> str:
        moment = datetime.datetime.now() if date is None else datetime.datetime.fromisoformat(date)
        return moment.strftime(form)

    return now


def _without_generation_tags(text: str) -> str:
    """`{% generation %}` marks as plain blocks: spans are found without them, and Jinja does not know the tag."""
    opened = re.sub(r"(\{%-?\s*)generation(\s*-?%\})", r"\1if true\2", text)
    return re.sub(r"(\{%-?\s*)endgeneration(\s*-?%\})", r"\1endif\2", opened)
