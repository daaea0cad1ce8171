"""Ollama's Modelfile: a Go template that renders what a chat template renders, and the texts that end an answer.

The Go template is put together from what the chat template writes around the texts of a few made-up conversations.
That holds for every template which writes the same around a turn wherever it stands. Whether it does is found out by
rendering both, Go as well, over conversations with and without a system text; a template for which they differ is
refused. What a Go template has no means for and a user may never meet (texts that are stripped, reasoning that is
dropped, tools, today's date) is told.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from quatrain.data.align import Sentinels
from quatrain.data.outcome import RowError
from quatrain.data.records import Message
from quatrain.data.render import ChatRenderer
from quatrain.errors import DataError

Turn = tuple[str, str]  # role, content
_TEXTS = ("Be brief.", "What is 2 + 2?\nAnd 3?", "4 and {5}", "four", 'Say "x"')
_SPACED = " \n spaces \n"
_ROLES = ("user", "assistant", "user", "assistant", "user")
_IF = re.compile(r"\{\{ (.*?) \}\}", re.DOTALL)
# What `quatrain chat` does unless told otherwise; Ollama's own defaults sample, and punish what was said before.
_AS_CHAT = "PARAMETER temperature 0\nPARAMETER repeat_penalty 1\n"


@dataclass(frozen=True)
class GoTemplate:
    """A Go template over .Messages. `text` renders a prompt as training has it, once the texts of the roles in
    `stripped` have no white space around them; `notices` are what it cannot do."""

    text: str
    takes_system: bool
    stripped: tuple[str, ...] = ()
    notices: list[str] = field(default_factory=list)


def modelfile(
    model_file: str, renderer: ChatRenderer, *, bos_added: bool, system: str | None = None
) -> tuple[str, list[str]]:
    """(the text of a Modelfile, notices). `bos_added`: llama.cpp puts BOS before the prompt, so the template must not.
    `system` is the system text of prompts that have none.

    Raises DataError for a chat template that has no such form, saying what to fill in by hand.
    """
    template = go_template(renderer, bos_added=bos_added, system_needed=bool(system))
    lines = [f"FROM ./{model_file}", f'TEMPLATE """{template.text}"""']
    if system:
        lines.append(f'SYSTEM """{_verbatim(system, "the system text")}"""')
    lines += [f'PARAMETER stop "{stop}"' for stop in renderer.traits.end_tokens]
    return "\n".join(lines) + "\n" + _AS_CHAT, template.notices


def go_template(renderer: ChatRenderer, *, bos_added: bool, system_needed: bool = False) -> GoTemplate:
    """The chat template as Ollama can have it, without a place for a system text if need be. Raises DataError as
    `modelfile`."""
    bos = (renderer.tokenizer.bos_token or "") if bos_added else ""
    no_system = "the chat template takes no system text"
    error = None
    if _jinja(renderer, [("system", _TEXTS[0]), ("user", _TEXTS[1])]) is not None:
        try:
            return _checked(renderer, bos, takes_system=True)
        except DataError as caught:
            error = caught
        no_system = "the chat template moves its system text about, which the TEMPLATE does not"
    try:
        if error is None or not system_needed:
            template = _checked(renderer, bos, takes_system=False)
            return replace(template, notices=[f"{no_system}, so Ollama's SYSTEM has no effect", *template.notices])
    except DataError as caught:
        error = error or caught
    assert error is not None
    raise error


def _checked(renderer: ChatRenderer, bos: str, *, takes_system: bool) -> GoTemplate:
    text = _assembled(renderer, takes_system, bos)
    stripped = tuple(role for role in (*_ROLES[:2], "system")[: 2 + takes_system] if _strips(renderer, role))
    for conversation in _conversations(takes_system):
        want, got = _jinja(renderer, conversation), bos + render_go(text, _shown(conversation, stripped))
        if want is None or want != got:
            raise _no_form(f"for {len(conversation)} turns it renders {want!r}, the Go template {got!r}")
    return GoTemplate(text, takes_system, stripped, _notices(renderer, bos, text, stripped))


def _notices(renderer: ChatRenderer, bos: str, text: str, stripped: Sequence[str]) -> list[str]:
    """What the chat template does and the Go template does not."""
    found = []
    if stripped:
        found.append(
            f"the chat template strips white space around texts ({', '.join(stripped)}), which Ollama's TEMPLATE "
            "cannot: a text that begins or ends with some makes other tokens there"
        )
    thoughts = [("user", "a"), ("assistant", "<think>\nhm\n</think>\n\nb"), ("user", "c")]
    if "</think>" in renderer.template.text and _jinja(renderer, thoughts) != bos + render_go(text, thoughts):
        found.append(
            "the chat template takes <think> out of earlier answers, which Ollama's TEMPLATE cannot: send earlier "
            "answers without it"
        )
    if _shows_tools(renderer):
        found.append("the chat template can show tools; the Modelfile's TEMPLATE has none, so Ollama offers no tools")
    if renderer.date is None and _on(renderer, "2001-02-03") != _on(renderer, "2004-05-06"):
        found.append("the chat template writes today's date; the Modelfile keeps that of this export")
    return found


def _strips(renderer: ChatRenderer, role: str) -> bool:
    """Whether the template takes away white space around texts of a role."""
    turns = [("system", "s")] if role == "system" else []
    turns += [("user", "u"), ("assistant", "a"), ("user", "u")]
    spaced = [(each, _SPACED if each == role else text) for each, text in turns]
    return _jinja(renderer, spaced) == _jinja(renderer, _shown(spaced, [role]))


def _shown(turns: Sequence[Turn], stripped: Sequence[str]) -> list[Turn]:
    return [(role, text.strip() if role in stripped else text) for role, text in turns]


def _shows_tools(renderer: ChatRenderer) -> bool:
    tool = {"type": "function", "function": {"name": "probe_tool", "description": "d", "parameters": {}}}
    try:
        return "probe_tool" in renderer.render([Message("user", "x")], [tool], add_generation_prompt=True).text
    except RowError:
        return False


def _on(renderer: ChatRenderer, date: str) -> str:
    other = ChatRenderer(renderer.tokenizer, renderer.template, date=date)
    return other.prompt_text([Message("user", "x")])


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
    chats.append([(role, _SPACED) for role in _ROLES[:3]])
    with_system = [[("system", text), *chat] for chat in chats for text in (_TEXTS[0], _SPACED)]
    return [*chats, *(with_system if takes_system else [])]


def _without(text: str, bos: str) -> str:
    if not text.startswith(bos):
        raise _no_form(f"it does not begin with {bos}, which llama.cpp puts there")
    return text[len(bos) :]


def _go(text: str) -> str:
    """Text as a Go template writes it."""
    return _verbatim(text, "it").replace("{{", '{{ "{{" }}')


def _verbatim(text: str, what: str) -> str:
    if '"""' in text:
        raise _no_form(f'{what} writes """, which ends a text in a Modelfile')
    return text


def _plain(text: str) -> str:
    return "".join(_unquoted(part) if at % 2 else part for at, part in enumerate(_IF.split(text)))


def _unquoted(part: str) -> str:
    return part[1:-1]


def _no_form(reason: str) -> DataError:
    return DataError(
        f"the chat template cannot be written as an Ollama template: {reason}",
        hint="use --format gguf and write the Modelfile yourself: FROM ./the-file, a TEMPLATE that renders the chat "
        "template's text for .System and .Prompt, and PARAMETER stop for its end tokens",
    )
