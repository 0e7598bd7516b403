"""How a job is run: nothing here changes a byte of what is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from streamloader.conversion.engines.engine import EngineChoice, check_url
from streamloader.conversion.engines.local import Worker, starting
from streamloader.conversion.progress import Listener
from streamloader.conversion.recipe import OnError, Recipe
from streamloader.conversion.sources.objects import pack
from streamloader.errors import UsageError
from streamloader.format.threads import cpu_count


@dataclass(frozen=True)
class Means:
    """`workers` None is a process for each core, on a cluster as many as it has places for; `spare` begin already."""

    workers: int | None
    on_error: OnError
    listener: Listener
    engine: EngineChoice
    spare: list[Worker] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 0:
            raise UsageError(f"workers={self.workers}", "give the number of processes; 0 works in this one")

    @contextmanager
    def starting(self, *urls: str) -> Iterator[Means]:
        """Begin to start the processes of this machine that will be needed, while something else is done here."""
        with starting(self.processes(*urls) if self.engine.name == "local" else 0) as spare:
            yield replace(self, spare=spare)

    def processes(self, *urls: str) -> int:
        """Return the number of processes; 0 works in this one, as it must where a store lives in its memory."""
        if self.engine.name == "local" and any(url.startswith("memory:") for url in urls):
            return 0
        if self.workers is None:
            return 0 if self.engine.address else cpu_count()
        return self.workers

    def apart(self, *urls: str) -> bool:
        """Return whether tasks are done in other processes."""
        return self.engine.name != "local" or self.processes(*urls) > 0

    def check(self, recipe: Recipe, *urls: str) -> None:
        """Raise `UsageError` for what other processes cannot reach or load."""
        for url in urls:
            check_url(self.engine, url)
        if recipe.mapper is not None and self.apart(*urls):
            pack(recipe.mapper.function, f"function {recipe.mapper.name}")
