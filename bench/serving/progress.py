"""What a person sees while loads run."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Shown:
    """A bar over all runs."""

    def __init__(self, runs: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        )
        self._bar = self._progress.add_task("", total=runs, completed=-1)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.advance(self._bar)
        self._progress.stop()

    def run(self, system: str, load: str) -> None:
        """One begins, so the one before is done."""
        self._progress.update(self._bar, description=f"{load}: {system}", advance=1)

    def failure(self, why: str) -> None:
        """One could not be run."""
        self._progress.console.print(why, style="yellow", highlight=False, markup=False)
