"""The resolved options of a run, and the rule that decides between a checkpoint's options and those given on resume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quatrain.config import EXCLUSIVE, DataOptions, InstructConfig, RunOptions, TrainOptions, build_all
from quatrain.errors import ConfigError

OPTION_SETS = (RunOptions, TrainOptions, InstructConfig, DataOptions)

# Options that may differ on resume without a word: they say where things are and what is kept, not what is computed.
# The model and the data themselves are compared by content.
FREE_ON_RESUME = frozenset(
    {"model", "data", "validation", "out", "resume", "override", "overwrite", "memory_budget", "checkpoint"}
    | {"cuda_graph"}
    | {"samples", "track", "save_every", "keep_checkpoints", "cache", "cache_dir"}
)


@dataclass(frozen=True)
class Settings:
    """All options of a run. `given` are the ones that were set by flag or file, as they were given."""

    run: RunOptions
    train: TrainOptions
    engine: InstructConfig
    data: DataOptions
    given: dict[str, Any]

    @classmethod
    def resolve(cls, given: dict[str, Any], *, where: str = "options") -> Settings:
        """Check every option and fill in defaults. Raises one ConfigError with all problems."""
        built = build_all(OPTION_SETS, given, where=where)
        return cls(built[RunOptions], built[TrainOptions], built[InstructConfig], built[DataOptions], dict(given))

    def require(self, *names: str) -> Settings:
        """These settings, after a check that none of the run options `names` is empty (else ConfigError)."""
        missing = [name for name in names if not getattr(self.run, name)]
        if missing:
            flags = " and ".join("--" + name for name in missing)
            raise ConfigError(f"nothing given for {', '.join(missing)}", hint=f"give {flags}")
        return self

    def resolved(self) -> dict[str, Any]:
        """Every option by name, as JSON values."""
        merged: dict[str, Any] = {}
        for options in (self.run, self.train, self.engine, self.data):
            merged |= options.model_dump(mode="json")
        return merged

    def non_default(self) -> dict[str, Any]:
        """The options whose value is not the default's, in the order of their definition."""
        defaults = {
            name: field.get_default(call_default_factory=True)
            for options in OPTION_SETS
            for name, field in options.model_fields.items()
        }
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}
        return {name: value for name, value in self.resolved().items() if value != plain[name]}


def settings_for_resume(given: dict[str, Any], saved: dict[str, Any]) -> tuple[Settings, list[str]]:
    """The options of a resumed run, and one line for each that the user should know about.

    `saved` is a checkpoint's record: `given` as at its start, and `options` resolved then. The checkpoint wins: an
    option given now that differs is refused by name, unless `override` is given: then it applies from the first resumed
    step on. Options in `FREE_ON_RESUME` may always differ.
    """
    base = {name: value for name, value in saved["given"].items() if name not in ("resume", "overwrite", "override")}
    for first, second in EXCLUSIVE:
        if given.get(first) is not None:
            base.pop(second, None)
        if given.get(second) is not None:
            base.pop(first, None)
    settings = Settings.resolve({**base, **given}, where="options on resume")
    changed = {
        name: (saved["options"].get(name), value)
        for name, value in settings.resolved().items()
        if name not in FREE_ON_RESUME and value != saved["options"].get(name)
    }
    listed = [f"{name}: {_say(before)} in the checkpoint, {_say(now)} now" for name, (before, now) in changed.items()]
    if "adapter" in changed:
        raise ConfigError(
            f"resume with another --adapter: {listed[list(changed).index('adapter')]}, and a run starts once",
            hint="leave it out to go on as before, or begin a new run with it in another --out",
        )
    if changed and not settings.run.override:
        raise ConfigError(
            "resume with other options than the checkpoint's: " + "; ".join(listed),
            hint="leave them out to go on as before, or add --override to apply them from the next step on",
        )
    notes = [f"overridden from the next step on: {line}" for line in listed]
    if not changed:
        notes.append("all options come from the checkpoint")
    return settings, notes


def _say(value: Any) -> str:
    return "not set" if value is None else str(value)
