"""Everything that is looked at while rows are made: each conversation with its row, once."""

from __future__ import annotations

from quatrain.config import DataOptions
from quatrain.data.duplicates import Fingerprints, within
from quatrain.data.findings import in_order
from quatrain.data.records import Conversation
from quatrain.data.render import ChatRenderer
from quatrain.data.report import DataReport
from quatrain.data.row import Row
from quatrain.data.texts import TextChecks


class Inspection:
    """Of the rows of one set."""

    def __init__(self, renderer: ChatRenderer, options: DataOptions) -> None:
        self._texts = TextChecks(renderer, options)
        self._prints = Fingerprints(renderer.tokenizer)

    def add(self, conversation: Conversation, row: Row) -> None:
        """Look at one row."""
        self._texts.add(conversation, row)
        self._prints.add(row)

    def conclude(self, report: DataReport) -> None:
        """Write down what was found."""
        report.token_counts = self._texts.token_counts
        report.findings = in_order([*self._texts.findings(), *within(self._prints)])
