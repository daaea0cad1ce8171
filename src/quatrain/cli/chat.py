"""`quatrain chat`: talk to a model or to what a run has made of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quatrain.cli.complete import models, runs
from quatrain.cli.options import Group, with_options
from quatrain.config import GenerateConfig, InstructConfig, build
from quatrain.errors import DataError

if TYPE_CHECKING:
    from quatrain.data.tokenizer import Tokenizer
    from quatrain.train.pipeline import InstructPipeline

NAME = "chat"
HELP = """Talk to a model, an adapter or a run.

With a prompt: print one answer and leave. Without: a conversation; /clear forgets it, /exit or Ctrl-D leaves.

Example: quatrain chat --model runs/first "Turn on the kitchen light"
"""

ENGINE = ("quantize", "double_quant", "compute_dtype", "device", "memory_budget", "cache", "cache_dir")
MODEL_HELP = (
    "a run, an adapter, an export (folder, GGUF file or Modelfile), a model folder, a hub id, or the alias smollm2-135m"
)
ADAPTER_HELP = "an adapter folder for --model to be its base"


@with_options(Group("Sampling", GenerateConfig), Group("Engine", InstructConfig, ENGINE))
def command(
    given: dict[str, Any],
    prompt: Annotated[str | None, typer.Argument(help="One message to answer.", show_default=False)] = None,
    model: Annotated[str, typer.Option("--model", autocompletion=models, help=MODEL_HELP, show_default=False)] = "",
    adapter: Annotated[str | None, typer.Option("--adapter", autocompletion=runs, help=ADAPTER_HELP)] = None,
    system: Annotated[str | None, typer.Option("--system", help="system text; default: the run's")] = None,
) -> None:
    from quatrain.cli.use import open_for_use

    asked = {name: value for name, value in given.items() if name not in ENGINE}
    build(GenerateConfig, asked)  # a bad option is told before anything is opened
    it = open_for_use(model, adapter)
    sampling = build(GenerateConfig, {**it.sampling, **asked})
    tokenizer = it.tokenizer()
    conversation = Conversation(
        prompt_maker(tokenizer, it.data), system if system is not None else it.data.get("system")
    )
    if prompt is None:
        _note("loading the model …")
    pipeline, notices = it.load({name: value for name, value in given.items() if name in ENGINE})
    for line in notices:
        _note(line)
    talker = Talker(pipeline, tokenizer, conversation, sampling, _write, _note)
    if prompt is not None:
        talker.answer(prompt)
        return
    _talk(talker)


def prompt_maker(tokenizer: Tokenizer, options: dict[str, Any]) -> Callable[[list[dict[str, str]]], list[int]]:
    """Messages to prompt ids, by the template that a run with these data options trains on: the same ids as there."""
    from quatrain.data.records import to_message
    from quatrain.data.render import ChatRenderer
    from quatrain.data.templates import choose_template

    template = choose_template(tokenizer, options.get("chat_template"), options.get("system_policy", "template"))
    renderer = ChatRenderer(
        tokenizer, template, date=options.get("template_date"), allow_special=bool(options.get("allow_special"))
    )
    return lambda messages: list(
        renderer.render([to_message(m) for m in messages], None, add_generation_prompt=True).ids
    )


@dataclass
class Conversation:
    """The turns so far, and the prompt they make."""

    make_prompt: Callable[[list[dict[str, str]]], list[int]]
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def prompt_ids(self, limit: int) -> tuple[list[int], int]:
        """Ids of the prompt for the next answer, at most `limit` of them, and how many messages were dropped for it.

        The oldest question goes first, with its answer; the system text and the last question stay. Raises DataError
        when those two alone are too long.
        """
        head = [{"role": "system", "content": self.system}] if self.system else []
        dropped = 0
        while True:
            ids = self.make_prompt([*head, *self.turns])
            if len(ids) <= limit:
                return ids, dropped
            if len(self.turns) == 1:
                raise DataError(
                    f"the message makes a prompt of {len(ids)} tokens, and the model's context leaves room for {limit}",
                    hint="ask something shorter",
                )
            del self.turns[:2]
            dropped += 2


class Talker:
    """Answers messages: writes text as it is made, keeps the conversation."""

    def __init__(
        self,
        pipeline: InstructPipeline,
        tokenizer: Tokenizer,
        conversation: Conversation,
        sampling: GenerateConfig,
        write: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        self.pipeline, self.tokenizer, self.conversation, self.sampling = pipeline, tokenizer, conversation, sampling
        self.write, self.note = write, note
        self.context: int = pipeline.spec.max_position_embeddings

    def answer(self, message: str) -> str:
        """Answer one message, text by text; returns the whole answer. On DataError the message is forgotten."""
        turns = self.conversation.turns
        turns.append({"role": "user", "content": message})
        try:
            # An answer needs room: a quarter of the context at most is kept free for it.
            ids, dropped = self.conversation.prompt_ids(
                self.context - min(self.sampling.max_new_tokens, self.context // 4)
            )
        except DataError:
            turns.pop()
            raise
        if dropped:
            self.note(
                f"the conversation is longer than the model's context: its {dropped} oldest messages were dropped"
            )
        try:
            text, made = self._stream(ids)
        except BaseException:
            turns.pop()
            raise
        turns.append({"role": "assistant", "content": text})
        if len(ids) + made >= self.context:
            self.note(f"stopped: the model's context of {self.context} tokens is full")
        elif made >= self.sampling.max_new_tokens:
            self.note(f"stopped after {made} tokens; --max-new-tokens allows more")
        return text

    def _stream(self, ids: list[int]) -> tuple[str, int]:
        from quatrain.data.stream import StopTexts

        decoder, stops = self.tokenizer.stream_decoder(), StopTexts(self.sampling.stop)
        shown, made = "", 0

        def show(text: str) -> None:
            nonlocal shown
            shown += text
            self.write(text)

        for token in self.pipeline.stream(ids, self.sampling):
            made += 1
            show(stops.push(decoder.push(token)))
            if stops.stopped:
                break
        if not stops.stopped:
            show(stops.push(decoder.finish()))
            show(stops.finish())
        self.write("\n")
        return shown, made


def _talk(talker: Talker) -> None:
    if sys.stdin.isatty():
        import readline  # noqa: F401 - gives input() a history and line editing

        _note("/clear forgets the conversation, /exit leaves, Ctrl-C cuts an answer short")
    while True:
        try:
            message = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if message in ("/exit", "/quit"):
            return
        if message == "/clear":
            talker.conversation.turns.clear()
            continue
        if not message:
            continue
        try:
            talker.answer(message)
        except DataError as error:
            _note(f"{error}; {error.hint}" if error.hint else str(error))
        except KeyboardInterrupt:
            _write("\n")
            _note("cut short; the message was forgotten")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _note(text: str) -> None:
    print(f"[{text}]", file=sys.stderr, flush=True)
