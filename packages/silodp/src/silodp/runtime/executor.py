"""Executors: where a simulation computes what silos ask for, in this process or in others (Ray: `--workers`).

An executor of other processes is a part of an extension package, found by its entry point in the group
"silodp.executors". Silos, ledgers and stores stay in the process of the run, whatever the executor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from silodp._lazy import Registry

if TYPE_CHECKING:
    from silodp.aggregators.run_spec import RunSpec
    from silodp.data.federation import Federation
    from silodp.runtime.local_work import Run
    from silodp.training.task import Task

Pool = Callable[[Callable[..., Any], Sequence[Any], Iterable[Any]], Iterator[Any]]
"""`pool(function, shared, items)` yields function(*shared, item) for every item, in the order in which results come."""


class OpenExecutor(Protocol):
    """An executor that has started, for one run."""

    @property
    def at_once(self) -> int:
        """How many silos are asked at the same time."""

    def make_run(self, silo: str) -> Run:
        """Return what computes blocks of a silo; several threads may call it."""


class Executor(ABC):
    """Computes what the silos of a simulation ask for; no bit of a model depends on where."""

    @abstractmethod
    def open(self, federation: Federation, task: Task, spec: RunSpec) -> AbstractContextManager[OpenExecutor]:
        """Start what computes for the silos of a run; it ends with the context.

        Raises:
            SilodpError: It cannot be started.
        """

    @abstractmethod
    def open_pool(self) -> AbstractContextManager[Pool]:
        """Start what calls a function for many items; it ends with the context.

        Raises:
            SilodpError: As `open`.
        """


class _ThisProcess(Executor):
    """Computes in the process of the run, one thing after the other."""

    @contextmanager
    def open(self, federation: Federation, task: Task, spec: RunSpec) -> Iterator[OpenExecutor]:
        """Yield what computes for one silo at a time."""
        yield _OpenHere(federation, task, spec)

    @contextmanager
    def open_pool(self) -> Iterator[Pool]:
        """Yield what computes one item when it is asked for."""
        yield lambda function, shared, items: (function(*shared, item) for item in items)


@dataclass(frozen=True)
class _OpenHere:
    federation: Federation
    task: Task
    spec: RunSpec
    at_once: int = 1

    def make_run(self, silo: str) -> Run:
        # Here, as it imports torch, which a command line must not wait for.
        from silodp.runtime.local_work import LocalRecords

        data = next(one for one in self.federation.silos if one.name == silo)
        return LocalRecords(data, self.task, self.spec).run


THIS_PROCESS: Executor = _ThisProcess()
"""Computes in the process of the run, one thing after the other."""

EXECUTORS: Registry[Callable[..., Executor]] = Registry("executors", {})
"""The executors of other processes, by name."""


def make_executor(count: int | None, **settings: Any) -> Executor:
    """Return the executor of so many worker processes; None: of this process.

    Args:
        count: The number of processes.
        settings: Further settings of the executor, where they are given.

    Raises:
        SilodpError: `extension.missing`, or a setting is outside its range.
    """
    if count is None:
        return THIS_PROCESS
    given = {name: value for name, value in settings.items() if value is not None}
    return EXECUTORS.load_required("ray", "integrations")(count, **given)
