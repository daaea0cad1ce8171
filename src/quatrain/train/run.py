"""One training run from options to adapter: check everything that can be checked, then read weights, then train.

`prepare_run` reads no weight: options, run folder, model configuration, tokenizer, data, steps, memory. `train` does
the rest. Both raise QuatrainError kinds and report through a `Reporter`; neither prints.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quatrain.checkpoint.atomic import recover, write_file
from quatrain.checkpoint.resume import PROGRESS, Checkpoint, check_same_parameters, newest_complete
from quatrain.config import InstructConfig
from quatrain.errors import CheckpointError, ConfigError, ModelError, QuatrainError
from quatrain.memory.process import peak_resident_bytes
from quatrain.optim.schedule import Schedule, warmup_steps_of
from quatrain.train.batching import Batching
from quatrain.train.continuing import Start, digests, other_template, start_from
from quatrain.train.interrupt import StopRequest
from quatrain.train.live_report import LiveReport
from quatrain.train.loop import Ending, Progress, TrainingLoop
from quatrain.train.preflight import (
    ADAPTER,
    CHECKPOINTS,
    RUN_FILE,
    check_disk,
    check_run_folder,
    claimed,
    remove_run,
)
from quatrain.train.record import identity_of, run_record
from quatrain.train.reporter import Reporter, Reporters
from quatrain.train.settings import Settings, settings_for_resume
from quatrain.train.trackers import Tracking, require_trackers
from quatrain.train.watch import SamplePrompt, Watch, sample_prompts, sample_tokens

if TYPE_CHECKING:
    from quatrain.checkpoint.source import ModelSource
    from quatrain.data.pipeline import Prepared
    from quatrain.data.rows import Rows
    from quatrain.engine.layout import Layout
    from quatrain.memory.plan import MemoryPlan
    from quatrain.train.pipeline import InstructPipeline


# What resuming needs of a checkpoint's record, and of the progress in it.
_RECORDED = {"progress", "given", "options", "data_sha256", "model_sha256", "threads", "versions"}
_PROGRESS = Progress.__dataclass_fields__.keys()


@dataclass(frozen=True)
class Preparation:
    """All that is known about a run before the first weight is read."""

    settings: Settings
    source: ModelSource
    prepared: Prepared
    batching: Batching
    config: InstructConfig  # the engine's, with the capacity that the data needs
    layout: Layout
    schedule: Schedule
    notes: list[str]  # what will not happen, or not as one might expect
    evaluations: int
    prompts: list[SamplePrompt]  # to be answered at each evaluation
    start: Start | None = None  # the adapter that the run goes on from

    @property
    def plan(self) -> MemoryPlan:
        return self.layout.plan

    @property
    def total_steps(self) -> int:
        return self.batching.length.total_steps

    @property
    def kept_checkpoints(self) -> int:
        """Of `keep_checkpoints`, those that the run will have."""
        options = self.settings.train
        return min(options.keep_checkpoints, self.batching.length.occurrences(options.save_every))

    def modules(self) -> dict[str, tuple[int, int]]:
        """(modules, trainable parameters) by the last name of the linears that get an adapter."""
        from quatrain.model.adapters import match_targets

        found: dict[str, tuple[int, int]] = {}
        spec, rank = self.source.spec, self.config.lora_rank
        for _, linear in match_targets(spec, self.config.lora_targets):
            modules, parameters = found.get(linear, (0, 0))
            found[linear] = modules + 1, parameters + rank * sum(spec.linear_shape(linear))
        return found


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `adapter` is None when it was interrupted before it had one."""

    ending: Ending
    folder: Path
    adapter: Path | None
    steps: int
    total_steps: int
    best_loss: float | None
    best_step: int | None
    skipped: int
    seconds: float
    peak_bytes: int


def prepare_run(settings: Settings, reporter: Reporter, *, absent_gpu: bool = False) -> Preparation:
    """Open the model, tokenize the data, count the steps, plan the memory. Raises before any weight is read. With
    `absent_gpu` the run is only looked at (see `layout_of`).

    Raises ModelError, DataError, ConfigError or PlanError, each saying what was wanted and found.
    """
    from quatrain.checkpoint.open import open_source
    from quatrain.data.disk import configured_folder
    from quatrain.data.pipeline import prepare

    source, start = open_source(settings.run.model), None
    if settings.run.adapter is not None and not settings.run.resume:
        settings, start = start_from(settings, source)
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise ModelError(
            f"{settings.run.model} has no tokenizer, so data files cannot be read with it",
            hint="add tokenizer.json to the folder, or train from token ids in Python",
        )
    reporter.phase("reading data")
    engine = settings.engine
    prepared = prepare(
        settings.run.data,
        settings.data,
        tokenizer,
        max_seq_len=engine.max_seq_len,
        seed=engine.seed,
        vocab_rows=source.spec.vocab_size,
        cache=configured_folder(engine),
    )
    for line in prepared.notices:
        reporter.notice(line)
    batching = Batching(prepared.train, settings.train, engine.seed, engine.micro_batch_tokens, prepared.shares)
    config = _engine_config(settings, batching, prepared.validation)
    evaluations = count_evaluations(settings, batching, prepared)
    notes = _check_schedule(settings, batching, prepared, evaluations)
    if start is not None:
        notes = [*start.notices, *other_template(start, prepared.tokenizer), *notes]
    length = batching.length
    warmup = warmup_steps_of(length.total_steps, steps=settings.train.warmup_steps, ratio=settings.train.warmup_ratio)
    train = settings.train
    schedule = Schedule(train.schedule, config.learning_rate, length.total_steps, warmup, train.lr_floor)
    prompts = sample_prompts(prepared.validation, prepared.tokenizer, train.samples)
    layout = layout_of(source, config, length.most_micro_batches, sample_tokens(prompts), absent_gpu=absent_gpu)
    return Preparation(
        settings, source, prepared, batching, config, layout, schedule, notes, evaluations, prompts, start
    )


def layout_of(
    source: ModelSource,
    config: InstructConfig,
    micro_batches: int = 1,
    sample_tokens: int = 0,
    *,
    absent_gpu: bool = False,
) -> Layout:
    """The engine's layout and memory plan for a model that is not read yet; `choose_layout` says what the numbers are.
    `absent_gpu`: it is only looked at, so that a GPU need not be there. Raises PlanError when it cannot fit."""
    import quatrain.train.pipeline  # noqa: F401 - what loading needs is imported now, as part of the plan's baseline
    from quatrain.engine.setup import choose_layout, plan_layout

    choose = plan_layout if absent_gpu else choose_layout
    return choose(source.spec, config, source.stored_nf4_nested, micro_batches, sample_tokens)


def train(given: dict[str, Any], reporter: Reporter, stop: StopRequest | None = None) -> Outcome:
    """Run `quatrain train` with options by name, as text or typed. Returns when finished, stopped early or interrupted;
    a checkpoint exists in every case. With `resume` the options are the checkpoint's; see `settings_for_resume`.
    """
    settings = Settings.resolve(given)
    settings.require(*(("out",) if settings.run.resume else ("model", "data", "out")))
    folder = check_run_folder(settings.run)
    checkpoint = None
    if settings.run.resume:
        settings, checkpoint = _settings_of_checkpoint(settings, folder, reporter)
    require_trackers(settings.train.track)
    settings = _with_fixed_date(settings)
    _set_threads(settings.run.threads)
    preparation = prepare_run(settings, reporter)
    identity = identity_of(preparation)
    settings = preparation.settings
    progress = Progress()
    if checkpoint is not None:
        progress = Progress(**checkpoint.progress["progress"])
        identity["started_from"] = checkpoint.progress.get("started_from")  # absent in those of earlier versions
        _check_identity(checkpoint, identity, settings, reporter)
        if progress.step > preparation.total_steps:
            raise ConfigError(
                f"{checkpoint.path.name}: {progress.step} steps are done, and with these options the run has "
                f"{preparation.total_steps}",
                hint="ask for that many or more, or begin a shorter run in another --out",
            )
    check_disk(folder, sum(count for _, count in preparation.modules().values()), preparation.kept_checkpoints)
    reporter.prepared(preparation)
    if _already_finished(preparation, progress, folder):
        reporter.notice(f"this run is finished: all of its {preparation.total_steps} steps are done")
        return _outcome("finished", folder, folder / ADAPTER, preparation, progress, 0.0)

    pipeline = _load_pipeline(preparation, checkpoint, reporter)
    with stop or StopRequest() as request, claimed(folder):
        began = time.perf_counter()
        started = _started(folder) if settings.run.resume else None
        if settings.run.overwrite:
            remove_run(folder)
        recover(folder / ADAPTER)
        record = run_record(preparation, identity, started)
        _write_record(folder, {**record, "result": {"ending": "running"}})
        tracking = Tracking(settings.train.track, folder, identity["options"], reporter.warning)
        page = LiveReport(folder, reporter.warning)
        tokenizer = preparation.prepared.tokenizer
        watch = Watch(pipeline, preparation.prompts, tokenizer, preparation.total_steps, reporter.warning)
        loop = TrainingLoop(
            pipeline,
            preparation.batching,
            preparation.prepared.validation,
            preparation.schedule,
            folder,
            progress=progress,
            identity=identity,
            reporter=Reporters(reporter, page, tracking),
            stop=request,
            watch=watch,
        )
        ending: str = "failed"
        try:
            pipeline.watch_graphs(reporter.notice)
            if preparation.layout.static:
                pipeline.prepare_steps(preparation.batching.epoch(0).shapes())
            ended = loop.run()
            if ended != "interrupted":
                _require_finite(progress)
            adapter = _final_adapter(pipeline, folder, progress, ended, reporter)
            outcome = _outcome(ended, folder, adapter, preparation, progress, time.perf_counter() - began)
            if ended != "interrupted":
                _require_changed(pipeline, identity["started_from"])
            ending = ended
        finally:
            result = {"ending": ending, **asdict(progress), "peak_memory_bytes": peak_resident_bytes()}
            result["seconds"] = round(time.perf_counter() - began, 3)
            result["cuda_graph"] = pipeline.graph_report()
            _write_record(folder, {**record, "result": result})
            tracking.close(ending)
            page.update()
    return outcome


def _engine_config(settings: Settings, batching: Batching, validation: Rows) -> InstructConfig:
    """The engine's options with the capacity that the real data needs: its largest micro-batch or longest row."""
    longest = max(int(rows.lengths.max(initial=0)) for rows in (batching.rows, validation))
    asked = settings.engine.micro_batch_tokens
    if asked is not None and longest > asked:
        raise ConfigError(f"micro_batch_tokens is {asked}, and the longest row has {longest} tokens")
    if settings.engine.clip == "layer" and batching.length.most_micro_batches > 1:
        raise ConfigError(
            "clip=layer updates inside the backward pass, so a step must be one micro-batch; "
            f"here one has {batching.length.most_micro_batches}",
            hint="use --clip global, or --accumulation 1 without --micro-batch-tokens",
        )
    # The user's max_seq_len bounds the rows; that no row comes near it must not cost memory.
    capacity = max(batching.length.largest_micro_batch, longest)
    return settings.engine.model_copy(update={"micro_batch_tokens": capacity})


def count_evaluations(settings: Settings, batching: Batching, prepared: Prepared) -> int:
    """How often a run that is neither resumed nor stopped early evaluates."""
    return batching.length.occurrences(settings.train.eval_every) if prepared.validation else 0


def _check_schedule(settings: Settings, batching: Batching, prepared: Prepared, evaluations: int) -> list[str]:
    """What will not happen in this run, or not as one might expect; refuses early stopping that could never stop."""
    options, total = settings.train, batching.length.total_steps
    notes = []
    if prepared.validation:
        if isinstance(options.eval_every, int) and options.eval_every > total:
            notes.append(
                f"eval_every is {options.eval_every} and the run has {total} steps: one evaluation, at the end"
            )
    else:
        notes.append("no evaluation will happen in this run: there are no validation rows (see --val-split)")
    if options.patience is not None and evaluations <= options.patience:
        raise ConfigError(
            f"patience {options.patience} can never stop this run: it has {evaluations} evaluations in {total} steps",
            hint="give validation rows (--val-split 0.05) and a smaller --eval-every, or leave out --patience",
        )
    if isinstance(options.save_every, int) and options.save_every > total:
        notes.append(f"save_every is {options.save_every} and the run has {total} steps: one checkpoint, at the end")
    if options.batch_tokens is not None and batching.length.most_micro_batches > 1:
        notes.append(
            f"a step of up to {options.batch_tokens} tokens is computed in up to {batching.length.most_micro_batches} "
            f"micro-batches of at most {settings.engine.micro_batch_tokens} tokens; the result is the same"
        )
    return notes


def _settings_of_checkpoint(settings: Settings, folder: Path, reporter: Reporter) -> tuple[Settings, Checkpoint]:
    checkpoint, passed_over = newest_complete(folder / CHECKPOINTS)
    for line in passed_over:
        reporter.warning(line)
    if checkpoint is None:
        raise CheckpointError(
            f"{folder} has no complete checkpoint to resume from", hint="--overwrite starts the run from its beginning"
        )
    if not checkpoint.progress.keys() >= _RECORDED or not checkpoint.progress["progress"].keys() <= _PROGRESS:
        raise CheckpointError(
            f"{checkpoint.path / PROGRESS} is not the record of a run as this version of Quatrain writes it",
            hint="resume with the version that began the run (run.json says which)",
        )
    merged, notes = settings_for_resume(settings.given, checkpoint.progress)
    reporter.notice(f"resuming from {checkpoint.path.name}")
    for line in notes:
        reporter.notice(line)
    return merged, checkpoint


def _with_fixed_date(settings: Settings) -> Settings:
    """Templates may print the date; a run keeps the one it started with."""
    if settings.data.template_date is not None:
        return settings
    today = date.today().isoformat()
    data = settings.data.model_copy(update={"template_date": today})
    return replace(settings, data=data, given={**settings.given, "template_date": today})


def _set_threads(threads: int | None) -> None:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)


def _check_identity(checkpoint: Checkpoint, now: dict[str, Any], settings: Settings, reporter: Reporter) -> None:
    saved = checkpoint.progress
    if saved["model_sha256"] != now["model_sha256"]:
        raise CheckpointError(
            f"{settings.run.model} is not the model of this run: its content hash differs from {checkpoint.path.name}'s"
        )
    if saved["data_sha256"] != now["data_sha256"]:
        text = (
            f"the training or validation rows are not those of {checkpoint.path.name} (files or data options changed)"
        )
        if not settings.run.override:
            raise CheckpointError(text, hint="restore the data, or add --override to go on with the new rows")
        reporter.warning(text + "; going on with the new ones")
    for name in ("threads", "versions"):
        if saved[name] != now[name]:
            reporter.notice(
                f"{name} differ from the checkpoint's ({_short(saved[name], now[name])} then, "
                f"{_short(now[name], saved[name])} now): the result may differ in the last bits"
            )


def _short(value: Any, other: Any) -> str:
    if isinstance(value, dict) and isinstance(other, dict):
        return ", ".join(f"{name} {text}" for name, text in value.items() if other.get(name) != text)
    return str(value)


def _load_pipeline(preparation: Preparation, checkpoint: Checkpoint | None, reporter: Reporter) -> InstructPipeline:
    from quatrain.train.pipeline import InstructPipeline

    reporter.phase("loading the model")
    pipeline = InstructPipeline(preparation.source, preparation.config, preparation.layout)
    for line in pipeline.notices:
        reporter.notice(line)
    pipeline.tokenizer = preparation.prepared.tokenizer  # with the chat template that was really used
    if preparation.start is not None:
        pipeline.load_adapter(preparation.start.saved.folder)
        reporter.notice(f"going on from the adapter in {preparation.start.saved.folder}")
    if checkpoint is not None:
        tensors = checkpoint.tensors()
        check_same_parameters(tensors, pipeline.state(), checkpoint.path)
        pipeline.load_state(tensors)
    return pipeline


def _already_finished(preparation: Preparation, progress: Progress, folder: Path) -> bool:
    evaluated = progress.evaluated_step == progress.step or not preparation.prepared.validation
    return progress.step >= preparation.total_steps and evaluated and (folder / ADAPTER).is_dir()


def _final_adapter(
    pipeline: InstructPipeline, folder: Path, progress: Progress, ending: str, reporter: Reporter
) -> Path | None:
    """The best adapter is already in place; without an evaluation, or if it went missing, the last one is saved."""
    adapter = folder / ADAPTER
    if progress.best_step is not None and adapter.is_dir():
        return adapter
    if progress.best_step is not None:
        reporter.warning(f"the best adapter (step {progress.best_step}) is no longer in {adapter}")
    if ending == "interrupted":
        return None
    if progress.best_step is not None:
        reporter.warning("the last one takes its place")
    pipeline.save_adapter(adapter)
    reporter.saved(adapter, "adapter")
    return adapter


def _require_changed(pipeline: InstructPipeline, started_from: dict[str, Any] | None = None) -> None:
    """Every targeted adapter must have learned: its B is no longer the one it started with, which is zero but for an
    adapter that was gone on from."""
    masters = {name.removeprefix("master."): t for name, t in pipeline.state().items() if name.startswith("master.")}
    then = started_from["lora_B"] if started_from else {}
    unchanged = [module for module, digest in digests(masters).items() if digest == then.get(module)]
    if unchanged:
        raise QuatrainError(
            f"{len(unchanged)} adapters did not change at all, first {unchanged[0]}: this run is not a success",
            hint="check the learning rate and the skipped steps in metrics.jsonl",
        )


def _require_finite(progress: Progress) -> None:
    """A run whose evaluations were all infinite or not a number has made nothing of use."""
    if progress.evaluated_step and progress.best_step is None:
        raise QuatrainError(
            "no evaluation gave a finite loss: this run is not a success, and its adapter is of no use",
            hint="check the learning rate, and the steps in metrics.jsonl",
        )


def _outcome(
    ending: Ending, folder: Path, adapter: Path | None, preparation: Preparation, progress: Progress, seconds: float
) -> Outcome:
    return Outcome(
        ending,
        folder,
        adapter,
        progress.step,
        preparation.total_steps,
        progress.best_loss,
        progress.best_step,
        progress.skipped,
        seconds,
        peak_resident_bytes(),
    )


def _started(folder: Path) -> str | None:
    """When the run that is resumed began, as far as it says."""
    try:
        return str(json.loads((folder / RUN_FILE).read_text())["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_record(folder: Path, record: dict[str, Any]) -> None:
    try:
        write_file(folder / RUN_FILE, (json.dumps(record, indent=1) + "\n").encode())
    except OSError as error:
        raise CheckpointError(f"cannot write {folder / RUN_FILE}: {error.strerror}") from error
