"""Opening what the user points at with `--model`: a base model, an adapter folder, or the folder of a run."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quatrain.config import DataOptions, InstructConfig, build
from quatrain.errors import ConfigError, ModelError
from quatrain.train.preflight import ADAPTER_CONFIG, EXPORT_FILE, RUN_FILE, find_adapter, is_run, read_record

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
    """A model, the adapter to put on it if there is one, and the options it was trained with. `sampling` and `notices`
    come from a Modelfile."""

    source: ModelSource
    adapter: Path | None
    engine: dict[str, Any]
    data: dict[str, Any]
    sampling: dict[str, Any] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    def tokenizer(self) -> Tokenizer:
        """The adapter's own tokenizer where it carries one (with the template it was trained on), else the model's."""
        from quatrain.data.tokenizer import Tokenizer

        own = Tokenizer.from_folder(self.adapter) if self.adapter is not None else None
        tokenizer = own or self.source.tokenizer()
        if tokenizer is None:
            raise ConfigError(f"{self.source.name} has no tokenizer: text needs one")
        rows = self.source.spec.vocab_size
        if tokenizer.vocab_size > rows:
            places = ((token, tokenizer.token_id(token)) for token in tokenizer.added_tokens)
            beyond = [token for token, index in places if index is not None and index >= rows]
            raise ModelError(
                f"{self.adapter or self.source.name}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, the "
                f"model {rows} embedding rows; without a row: {', '.join(beyond[:5])}",
                hint="an adapter with added tokens must hold their rows: save it with modules_to_save=[embed_tokens, "
                "lm_head]",
            )
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
        return pipeline, [*self.notices, *pipeline.notices, *notices]


def open_for_use(model: str, adapter: str | None) -> InUse:
    """Find out what `model` is and open its base. Reads no weight of the base.

    Raises ConfigError when it is missing, ModelError or CheckpointError when it cannot be used.
    """
    from quatrain.checkpoint.open import is_gguf

    folder = find_adapter(Path(adapter).expanduser()) if adapter else None
    if adapter and folder is None:
        gguf = "; an adapter as GGUF is for llama.cpp" if is_gguf(Path(adapter).expanduser()) else ""
        raise ConfigError(
            f"adapter: {adapter} holds no {ADAPTER_CONFIG}{gguf}", hint="give an adapter folder or a run folder"
        )
    if folder is None and model:
        folder = find_adapter(Path(model).expanduser())
        if folder is not None:
            model = ""
    elif folder is None:
        raise ConfigError("nothing given for model", hint="give --model: a model, an adapter folder or a run folder")
    if folder is None:
        return _without_adapter(model)
    return _with_adapter(folder, model)


def _without_adapter(model: str) -> InUse:
    """A base model, or an export with what it says about prompts. An export is used as it is stored: quantised to NF4
    again, it would no longer be what was compared with the adapter."""
    from quatrain.checkpoint.open import open_source
    from quatrain.data.modelfile_reader import MODELFILE, read_modelfile

    path = Path(model).expanduser()
    folder = path if path.is_dir() else path.parent
    record = read_record(folder) if path.exists() else None
    engine, data = ({"quantize": "none"}, dict(record.get("prompt", {}))) if record is not None else ({}, {})
    notices = []
    if record is None and path.exists() and (folder / EXPORT_FILE).exists():
        notices.append(
            f"{folder / EXPORT_FILE} is not what an export says about itself: this is taken for a base model"
        )
    if path.name != MODELFILE and not (path.is_dir() and (path / MODELFILE).is_file()):
        return InUse(open_source(model), None, engine, data, notices=notices)
    file = read_modelfile(folder / MODELFILE)
    if file.system is not None:
        data["system"] = file.system
    notices += [f"the Modelfile's PARAMETER {line} has no counterpart here" for line in file.others]
    it = InUse(open_source(str(file.model)), None, engine, data, file.sampling)
    return replace(it, notices=notices + _other_template(it, file.template))


def _other_template(it: InUse, template: str | None) -> list[str]:
    """A notice where a Modelfile's TEMPLATE is not what the model's chat template becomes: prompts are made by the
    chat template, here."""
    from quatrain.data.modelfile import go_template
    from quatrain.errors import DataError

    tokenizer, renderer = it.text_tools()
    if template is None or tokenizer is None or renderer is None:
        return []
    bos = tokenizer.bos_token
    for bos_added in (False, True)[: 1 + (bos is not None)]:
        try:
            if go_template(renderer, bos_added=bos_added).text == template:
                return []
        except DataError:
            continue
    return ["the Modelfile's TEMPLATE is not the model's own chat template, which is the one that is used here"]


def _with_adapter(folder: Path, base: str) -> InUse:
    from quatrain.checkpoint.open import open_source
    from quatrain.checkpoint.peft import read_adapter
    from quatrain.checkpoint.trained_rows import TrainedRows

    saved = read_adapter(folder)
    if not base and not saved.base_name:
        raise ConfigError(f"{folder} does not say which model it belongs to", hint="give --model BASE --adapter FOLDER")
    run = folder.parent / RUN_FILE
    options = json.loads(run.read_text()).get("options", {}) if is_run(folder.parent) else {}
    engine = {name: options[name] for name in _ENGINE_OPTIONS if name in options}
    data = {name: options[name] for name in _PROMPT_OPTIONS if options.get(name) is not None}
    # The adapter carries the template it was trained with; the file that it came from need not be there any more.
    if (folder / "tokenizer.json").is_file():
        data.pop("chat_template", None)
    try:
        source, notices = open_source(base or saved.base_name), []
    except ModelError as error:
        if base:
            raise
        hint = f"say where its base is now: --model BASE --adapter {shlex.quote(str(folder))}"
        raise ModelError(f"{folder} was trained on {saved.base_name}, which cannot be opened", hint=hint) from error
    if run.exists() and not options:
        notices.append(
            f"{run} holds no options of a training: those that are not in the adapter (how the base was quantised, a "
            "system text) are the defaults"
        )
    if saved.brings:
        source = TrainedRows(source, saved)
        notices.append(source.notes[-1])
    return InUse(source, folder, {**engine, **saved.options()}, data, notices=notices)
