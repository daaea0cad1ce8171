"""Ollama's Modelfile: a Go template that renders what a chat template renders, and the texts that end an answer.

The Go template is put together from what the chat template writes around the texts of a few made-up conversations.
That holds for every template which writes the same around a turn wherever it stands. Whether it does is found out by
rendering both, Go as well, over conversations with and without a system text; a template for which they differ is
refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

from quatrain.data.align import Sentinels
from quatrain.data.outcome import RowError
from quatrain.data.records import Message
from quatrain.data.render import ChatRenderer
from quatrain.errors import DataError

Turn = tuple[str, str]  # role, content
_TEXTS = ("Be brief.", "What is 2 + 2?\nAnd 3?", "4 and {5}", "  spaces  ", 'Say "x"')
_ROLES = ("user", "assistant", "user", "assistant", "user")
_IF = re.compile(r"\{\{ (.*?) \}\}", re.DOTALL)


def modelfile(model_file: str, renderer: ChatRenderer, *, bos_added: bool) -> tuple[str, list[str]]:
    """(the text of a Modelfile, notices). `bos_added`: llama.cpp puts BOS before the prompt, so the template must not.

    Raises DataError for a chat template that has no such form, saying what to fill in by hand.
    """
    template, takes_system = go_template(renderer, bos_added=bos_added)
    stops = "".join(f"PARAMETER stop {_quoted(stop)}\n" for stop in renderer.traits.end_tokens)
    notices = [] if takes_system else ["the chat template takes no system text, so Ollama's SYSTEM has no effect"]
    return f'FROM ./{model_file}\nTEMPLATE """{template}"""\n{stops}', notices


def go_template(renderer: ChatRenderer, *, bos_added: bool) -> tuple[str, bool]:
    """(Go template over .Messages, whether it takes a system text). Raises DataError as `modelfile`."""
    takes_system = _jinja(renderer, [("system", _TEXTS[0]), ("user", _TEXTS[1])]) is not None
    bos = renderer.tokenizer.bos_token if bos_added else None
    template = _assembled(renderer, takes_system, bos or "")
    for conversation in _conversations(takes_system):
        want, got = _jinja(renderer, conversation), (bos or "") + render_go(template, conversation)
        if want is None or want != got:
            raise _no_form(f"for {len(conversation)} turns it renders {want!r}, the Go template {got!r}")
    return template, takes_system


def render_go(template: str, messages: Sequence[Turn]) -> str:
    """Renders the Go templates that `go_template` makes: text, one range over .Messages, if and else if inside it."""
    head, _, rest = template.partition(_RANGE)
    body, _, tail = rest.partition("{{ end }}{{ end }}")
    parts = _IF.split(body)  # text, action, text, action, ...
    result = _plain(head)
    for index, (role, content) in enumerate(messages):
        active = True
        for at, part in enumerate(parts):
            if at % 2 == 0:
                result += part if active else ""
            elif part == ".Content":
                result += content if active else ""
            elif part.startswith('"'):
                result += _unquoted(part) if active else ""
            elif part == "if eq $i 0":
                inner_before, active = active, active and index == 0
            elif part == "end":
                active = inner_before
            else:  # if eq .Role "x", else if eq .Role "x"
                active = inner_before = f'eq .Role "{role}"' in part
    return result + _plain(tail)


_RANGE = "{{ range $i, $_ := .Messages }}"


def _assembled(renderer: ChatRenderer, takes_system: bool, bos: str) -> str:
    """The template from what stands before, between and behind the texts of a conversation."""
    first, answer, between, prompt = _around(renderer, _ROLES[:3])
    first = _without(first, bos)
    headers = [first, between]
    if takes_system:
        before, behind, _ = _around(renderer, ("system", "user"))
        headers.append(behind)
    header = _common_end(headers)  # of every user turn
    lead, closing = first.removesuffix(header), between.removesuffix(header)
    user = "{{ if eq $i 0 }}" + _go(lead) + "{{ end }}" if lead else ""
    turns = [("user", user + _go(header) + "{{ .Content }}")]
    turns.append(("assistant", _go(answer) + "{{ .Content }}" + _go(closing)))
    if takes_system:
        own = _go(_without(before, bos)) + "{{ .Content }}" + _go(behind.removesuffix(header))
        turns.insert(0, ("system", own))
    branches = "{{ else ".join(f'if eq .Role "{role}" }}}}{body}' for role, body in turns)
    return _RANGE + "{{ " + branches + "{{ end }}{{ end }}" + _go(prompt)


def _common_end(texts: list[str]) -> str:
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*map(reversed, texts), strict=False))
    return "".join(letters[0] for letters in same)[::-1]


def _around(renderer: ChatRenderer, roles: Sequence[str]) -> list[str]:
    """What the template writes before each text and behind the last, where an answer is asked for."""
    sentinels = Sentinels(avoid=renderer.template.text)
    turns = [(role, sentinels.add("")) for role in roles]
    text = _jinja(renderer, turns)
    pieces = sentinels.split(text)[0] if text is not None else []
    if len(pieces) != len(roles) + 1:
        raise _no_form(f"it does not write every text of {', '.join(roles)} once")
    return pieces


def _jinja(renderer: ChatRenderer, turns: Sequence[Turn]) -> str | None:
    """What training renders as a prompt, or None if the template refuses."""
    try:
        return renderer.prompt_text([Message(role, content) for role, content in turns])
    except RowError:
        return None


def _conversations(takes_system: bool) -> list[list[Turn]]:
    chats = [list(zip(_ROLES[:n], _TEXTS[5 - n :], strict=True)) for n in (1, 3, 5)]
    return [*chats, *([("system", _TEXTS[0]), *chat] for chat in chats if takes_system)]


def _without(text: str, bos: str) -> str:
    if not text.startswith(bos):
        raise _no_form(f"it does not begin with {bos}, which llama.cpp puts there")
    return text[len(bos) :]


def _go(text: str) -> str:
    """Text as a Go template writes it."""
    if '"""' in text:
        raise _no_form('it writes """, which ends a text in a Modelfile')
    return text.replace("{{", '{{ "{{" }}')


def _plain(text: str) -> str:
    return "".join(_unquoted(part) if at % 2 else part for at, part in enumerate(_IF.split(text)))


def _unquoted(part: str) -> str:
    return part[1:-1]


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _no_form(reason: str) -> DataError:
    return DataError(
        f"the chat template cannot be written as an Ollama template: {reason}",
        hint="use --format gguf and write the Modelfile yourself: FROM ./the-file, a TEMPLATE that renders the chat "
        "template's text for .System and .Prompt, and PARAMETER stop for its end tokens",
    )
