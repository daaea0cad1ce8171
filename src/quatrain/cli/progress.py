"""What `quatrain train` shows: the facts before step 1, then one progress line, or plain lines in a file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from quatrain.cli import show
from quatrain.cli.console import block, duration, megabytes, stdout
from quatrain.train.reporter import EvalRecord, Reporter, StepRecord
from quatrain.train.watch import peak_bytes

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from quatrain.train.run import Preparation

PLAIN_LINES = 50  # a run that is not watched in a terminal prints about this many step lines,
QUIET_SECONDS = 60.0  # and one whenever it was silent for this long


class TerminalReporter(Reporter):
    """Prints to standard output. In a terminal the steps are one line that moves; elsewhere they are plain lines."""

    def __init__(self) -> None:
        self.console = stdout()
        self.bar: Bar | None = None
        self.device = "cpu"
        self.began = self.printed = 0.0
        self.first_step = 0
        self.total = 0

    def notice(self, text: str) -> None:
        self._print("note", text, "yellow")

    def warning(self, text: str) -> None:
        self._print("warning", text, "bold red")

    def phase(self, text: str) -> None:
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], description=f"{text} …")
        else:
            self.console.print(f"{text} …", style="dim")

    def prepared(self, preparation: Preparation) -> None:
        from quatrain.cli.forecast import TRAIN_FLOPS, table

        self.device = preparation.layout.device
        show.preparation(self.console, preparation)
        again = preparation.settings.run.resume  # a resumed run knows its speed after its first step
        table(self.console, preparation, None if again else TRAIN_FLOPS)

    def started(self, step: int, total_steps: int) -> None:
        self.began = self.printed = time.monotonic()
        self.first_step, self.total = step, total_steps
        if not self.console.is_terminal:
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
        )
        self.bar = Progress(*columns, console=self.console, expand=True, refresh_per_second=4)
        self.bar.start()
        self.bar.add_task("", total=total_steps, completed=step)

    def step(self, record: StepRecord) -> None:
        loss = f"loss {record.loss:.4f}" if not record.skipped else "skipped"
        speed = f"{record.tokens_per_s:,.0f} tok/s"
        tail = (
            f"{loss}  lr {record.lr:.1e}  {speed}  {megabytes(peak_bytes(self.device))}  ETA {self._eta(record.step)}"
        )
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=record.step, description=tail)
        elif self._line_is_due(record.step):
            self.printed = time.monotonic()
            self.console.print(f"step {record.step}/{self.total}  epoch {record.epoch:.2f}  {tail}", soft_wrap=True)

    def _line_is_due(self, step: int) -> bool:
        first_or_last = step in (self.first_step + 1, self.total)
        silent = time.monotonic() - self.printed
        return first_or_last or step % max(1, self.total // PLAIN_LINES) == 0 or silent >= QUIET_SECONDS

    def evaluation(self, record: EvalRecord) -> None:
        text = f"step {record.step}: loss {record.eval_loss:.4f}, perplexity {record.eval_perplexity:.3f}"
        self._print("eval", text + (", the best so far" if record.best else ""), "cyan")

    def saved(self, path: Path, what: str) -> None:
        if what == "checkpoint":
            self._print("saved", str(path), "dim")

    def stopped(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _eta(self, step: int) -> str:
        done = step - self.first_step
        return duration((time.monotonic() - self.began) / done * (self.total - step))

    def _print(self, label: str, text: str, style: str) -> None:
        block(self.console, label, [text], style)
