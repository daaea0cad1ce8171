"""Opening what the user points at with `--model`: a base model, an adapter folder, or the folder of a run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quatrain.config import DataOptions, InstructConfig, build
from quatrain.errors import ConfigError
from quatrain.train.preflight import ADAPTER_CONFIG, RUN_FILE, find_adapter, is_run

if TYPE_CHECKING:
    from quatrain.checkpoint.source import ModelSource
    from quatrain.data.render import ChatRenderer
    from quatrain.data.tokenizer import Tokenizer
    from quatrain.train.pipeline import InstructPipeline

# Data options of a training run that also say how text becomes a prompt later on.
_PROMPT_OPTIONS = (
    "row_schema", "prompt_field", "response_field", "system_field", "system", "json_fields", "chat_template",
    "system_policy", "template_date", "train_on_eos", "last_turn_only", "allow_special",
)  # fmt: skip
_ENGINE_OPTIONS = ("quantize", "double_quant", "compute_dtype", "max_seq_len", "cache", "cache_dir")


@dataclass(frozen=True)
class InUse:
    """A base model, the adapter to put on it if there is one, and the options it was trained with."""

    source: ModelSource
    adapter: Path | None
    engine: dict[str, Any]
    data: dict[str, Any]

    def tokenizer(self) -> Tokenizer:
        """The adapter's own tokenizer where it carries one (with the template it was trained on), else the model's."""
        from quatrain.data.tokenizer import Tokenizer

        own = Tokenizer.from_folder(self.adapter) if self.adapter is not None else None
        tokenizer = own or self.source.tokenizer()
        if tokenizer is None:
            raise ConfigError(f"{self.source.name} has no tokenizer: text needs one")
        return tokenizer

    def text_tools(self) -> tuple[Tokenizer | None, ChatRenderer | None]:
        """The tokenizer with the template of training, and what renders with it; None where the model has none."""
        from quatrain.data.render import ChatRenderer
        from quatrain.data.templates import choose_template

        try:
            tokenizer = self.tokenizer()
        except ConfigError:
            return None, None
        template = choose_template(
            tokenizer, self.data.get("chat_template"), self.data.get("system_policy", "template")
        )
        date, special = self.data.get("template_date"), bool(self.data.get("allow_special"))
        renderer = ChatRenderer(tokenizer, template, date=date, allow_special=special)
        return renderer.tokenizer, renderer

    def data_options(self, given: dict[str, Any]) -> DataOptions:
        """The run's way to make prompts, with options given now on top."""
        return build(DataOptions, {**self.data, **given})

    def load(self, given: dict[str, Any]) -> tuple[InstructPipeline, list[str]]:
        """The pipeline with the adapter in place, and notices to show. `given` are engine options that were set now."""
        from quatrain.train.pipeline import InstructPipeline

        pipeline = InstructPipeline.from_source(self.source, build(InstructConfig, {**self.engine, **given}))
        notices = pipeline.load_adapter(self.adapter) if self.adapter is not None else []
        return pipeline, [*pipeline.notices, *notices]


def open_for_use(model: str, adapter: str | None) -> InUse:
    """Find out what `model` is and open its base. Reads no weight of the base.

    Raises ConfigError when it is missing, ModelError or CheckpointError when it cannot be used.
    """
    from quatrain.checkpoint.open import open_source

    folder = find_adapter(Path(adapter).expanduser()) if adapter else None
    if adapter and folder is None:
        raise ConfigError(
            f"adapter: {adapter} holds no {ADAPTER_CONFIG}", hint="give an adapter folder or a run folder"
        )
    if folder is None and model:
        folder = find_adapter(Path(model).expanduser())
        if folder is not None:
            model = ""
    elif folder is None:
        raise ConfigError("nothing given for model", hint="give --model: a model, an adapter folder or a run folder")
    if folder is None:
        return InUse(open_source(model), None, {}, {})
    return _with_adapter(folder, model)


def _with_adapter(folder: Path, base: str) -> InUse:
    from quatrain.checkpoint.open import open_source
    from quatrain.checkpoint.peft import read_adapter

    saved = read_adapter(folder)
    if not base and not saved.base_name:
        raise ConfigError(f"{folder} does not say which model it belongs to", hint="give --model BASE --adapter FOLDER")
    run = folder.parent / RUN_FILE
    options = json.loads(run.read_text())["options"] if is_run(folder.parent) else {}
    engine = {name: options[name] for name in _ENGINE_OPTIONS if name in options}
    data = {name: options[name] for name in _PROMPT_OPTIONS if options.get(name) is not None}
    # The adapter carries the template it was trained with; the file that it came from need not be there any more.
    if (folder / "tokenizer.json").is_file():
        data.pop("chat_template", None)
    return InUse(open_source(base or saved.base_name), folder, {**engine, **saved.options()}, data)
