"""Workers of a simulation: processes on one machine or several, in which Ray computes what silos ask for.

Silos, ledgers, stores and noise shares of blocks stay in the process of the run. A worker keeps nothing: what it
computes is a function of the records, the specification and the release, so another one computes the same again.
A cluster is one trust domain: its workers read the records of all silos.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import ModuleType
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor

from silodp.aggregators.run_spec import RunSpec
from silodp.data.federation import Federation
from silodp.errors import SilodpError
from silodp.mechanisms.clipping import Update
from silodp.runtime.executor import Executor, Pool
from silodp.runtime.local_work import Block, LocalRecords, Release, Run
from silodp.settings import Range, Settings, Whole
from silodp.text import describe_exception, first_line, name_extra
from silodp.training.gradients import build_plain_gradient
from silodp.training.made_up import make_up_records
from silodp.training.sgd.isolation import isolate
from silodp.training.task import LruCache, Task

T = TypeVar("T")

_AHEAD = 2
"""Blocks of a silo that are asked for beyond the one that is waited for, for each worker."""
_RETRIES = 3
"""How often a block is computed again because its worker ended."""
_RELEASES = 8
"""Releases that a worker keeps: of the silos whose blocks it computes in turn."""
_ROUNDING = 1e-3
"""How far the workers of a cluster, whose processors may differ, may be from the process of the run, relative to the
largest number; on one machine they compute the same bits."""
_PATIENCE = 120
"""Seconds until a worker on a machine that was lost must have been started on another one."""


@dataclass(frozen=True)
class Workers(Settings, Executor):
    """How many processes compute for the silos of a simulation, and where.

    The number of workers changes no bit of the model: each of them computes with one thread.

    Attributes:
        count: The number of workers.
        cluster: The address of a running Ray cluster, "HOST:PORT" or "auto"; None starts Ray on this machine, for this
            run alone.
        gpus: The part of a GPU that every worker gets, for models on a GPU.
    """

    count: Annotated[int, Whole()]
    cluster: str | None = None
    gpus: Annotated[float, Range(least=0)] = 0.0

    @contextmanager
    def open(self, federation: Federation, task: Task, spec: RunSpec) -> Iterator[OpenWorkers]:
        """Start the workers; they end with the context.

        Raises:
            SilodpError: Ray is not installed, or cannot be started or reached.
        """
        with self.connect() as ray:
            yield OpenWorkers(ray, self, federation, task, spec)

    @contextmanager
    def open_pool(self) -> Iterator[Pool]:
        """Yield what calls a function for many items, each on one worker.

        Raises:
            SilodpError: As `open`.
        """
        with self.connect() as ray:
            call = ray.remote(num_cpus=1, num_gpus=self.gpus, max_retries=_RETRIES)(_call_alone)

            def compute(
                function: Callable[..., T], shared: Sequence[Any], items: Iterable[Any]
            ) -> Iterator[T]:
                common, waiting, asked = [ray.put(one) for one in shared], iter(items), list[Any]()
                while True:
                    # No more at once than there are workers: what they return is kept until somebody wants it.
                    more = islice(waiting, self.count - len(asked))
                    asked += [call.remote(function, item, *common) for item in more]
                    if not asked:
                        return
                    (done, *_), asked = ray.wait(asked)
                    yield ray.get(done)

            yield compute

    @contextmanager
    def connect(self) -> Iterator[Any]:
        """Yield the module, connected to a cluster; its errors become those of silodp."""
        ray = _import_ray()
        with ExitStack() as stack:
            self._start(ray)
            stack.callback(ray.shutdown)
            for module in _find_modules_of_files():
                ray.cloudpickle.register_pickle_by_value(module)
                stack.callback(ray.cloudpickle.unregister_pickle_by_value, module)
            try:
                yield ray
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.RayError as error:
                raise SilodpError(
                    f"workers of the run ended, and a part of a silo could not be computed in {_RETRIES + 1} attempts "
                    f"({first_line(error)}): give the machines more memory or take fewer workers, and resume the run.",
                    code="workers.lost",
                ) from error

    def _start(self, ray: Any) -> None:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self.cluster is None:
            options |= {"num_cpus": self.count, "include_dashboard": False}
        try:
            if self.cluster not in (None, "auto"):
                # Ray itself would wait for minutes.
                socket.create_connection(_split_address(self.cluster), timeout=10).close()
            ray.init(address=self.cluster or "local", **options)
        except Exception as error:
            where, field = ("this machine", "workers") if self.cluster is None else (self.cluster, "cluster")
            raise SilodpError(
                f"Ray does not start at {where} ({describe_exception(error)}): see `ray status`, or leave {field} out.",
                code="workers.unreachable",
                field=field,
            ) from error


class OpenWorkers:
    """Workers that have started; each of them can compute for every silo.

    Args:
        ray: The module.
        settings: How many there are.
        federation: The tables of the silos.
        task: Model, loss and metrics.
        spec: The specification of the run.
    """

    def __init__(
        self, ray: Any, settings: Workers, federation: Federation, task: Task, spec: RunSpec
    ) -> None:
        self._ray, self._lock = ray, threading.Lock()
        self.count = settings.count
        made = ray.remote(_Worker).options(
            num_cpus=1, num_gpus=settings.gpus, max_restarts=-1, max_task_retries=_RETRIES
        )
        # A worker asks for what it does not have: after a start it has nothing.
        shared = ray.put((task, spec, compute_sample(task, spec), settings.cluster is None))
        self._records = {silo.name: (shared, ray.put(silo)) for silo in federation.silos}
        self._sizes = {silo.name: 1 + len(silo) for silo in federation.silos}
        workers = [made.remote() for _ in range(settings.count)]
        for problem in ray.get([worker.start.remote([shared]) for worker in workers]):
            if problem is not None:
                raise problem
        self._waiting = dict.fromkeys(workers, 0.0)  # records that each has to work through

    @property
    def at_once(self) -> int:
        """How many silos are asked at the same time."""
        # While the workers compute, a silo waits: so there are enough silos at once that no worker does.
        return 2 * self.count

    def make_run(self, silo: str) -> Run:
        """Return what computes blocks for a silo; several threads may call it."""

        def run(
            release: Release, blocks: Sequence[Block | None], function: Callable[[Update], T]
        ) -> Iterator[T]:
            work, asked = self._ray.put((release, function)), deque[_Asked]()
            for block in blocks:
                asked.append(
                    _Asked(silo, [*self._records[silo], work], block, self._sizes[silo] / len(blocks))
                )
                self._ask(asked[-1])
                if len(asked) > _AHEAD * self.count:
                    yield self._receive(asked.popleft())
            while asked:
                yield self._receive(asked.popleft())

        return run

    def _ask(self, what: _Asked) -> None:
        """Ask the worker that has least to do."""
        with self._lock:
            worker = min(self._waiting, key=self._waiting.__getitem__)
            self._waiting[worker] += what.records
        what.asked.append(worker)
        what.result = worker.compute.remote(what.silo, what.references, what.block)

    def _receive(self, what: _Asked) -> Any:
        """Wait for what was asked."""
        # Other errors of Ray go through all that stands between to `Workers.open`: the silo has not refused anything.
        unavailable = self._ray.exceptions.ActorUnavailableError
        try:
            while True:
                try:
                    result = self._ray.get(what.result)
                    break
                except unavailable:  # its machine was lost, and Ray has not started it on another one yet
                    if len(what.asked) > _PATIENCE:
                        raise
                    time.sleep(1)
                    self._ask(what)
        finally:
            with self._lock:
                for worker in what.asked:
                    self._waiting[worker] -= what.records
        if isinstance(result, SilodpError):
            raise result
        return result


@dataclass
class _Asked:
    """A block that was asked for.

    Attributes:
        silo: The name of the silo.
        references: See `_Worker.compute`.
        block: The block.
        records: About how many records it has.
        asked: The workers that were asked.
        result: A reference to what the last of them returns.
    """

    silo: str
    references: Sequence[Any]
    block: Block | None
    records: float
    asked: list[Any] = field(default_factory=list)
    result: Any = None


def _call_alone(function: Callable[..., T], item: Any, *shared: Any) -> T:
    """Return function(*shared, item), computed with one thread."""
    _compute_alone()
    return function(*shared, item)


def _compute_alone() -> None:
    # With more threads, sums could be rounded in another order on a machine with other cores.
    torch.set_num_threads(1)
    # The arrays are in memory that all workers of a machine share: nobody writes to them.
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")


def compute_sample(task: Task, spec: RunSpec) -> Tensor:
    """Return the outputs of the model and the gradient of its loss on made-up records, one after the other.

    A model that goes through a set, or uses a hash, an id or global state, gives others in other processes.
    """
    x, y = task.tensors(*make_up_records(spec.data))
    params = task.unflatten(task.initial(0))
    everyone = torch.ones(len(y), dtype=task.dtype, device=task.device)
    with isolate(task, 0, 0), torch.no_grad():
        outputs = task.copy_untouched().forward(params, x)
    with isolate(task, 0, 0):
        gradient = build_plain_gradient(task.copy_untouched())(params, x, y, everyone)
    return torch.cat([part.flatten() for part in (outputs, *gradient)]).cpu()


def find_difference(sample: Tensor, expected: Tensor, is_exact: bool) -> SilodpError | None:
    """Return the error about a worker whose `compute_sample` is not that of the process of the run."""
    largest = float((sample - expected).abs().max()) if sample.shape == expected.shape else math.inf
    if largest <= (0.0 if is_exact else _ROUNDING * float(expected.abs().max())):
        return None
    return SilodpError(
        f"a worker computes other outputs or gradients of made-up records than the process of the run (by up to "
        f"{largest:.2g}): let model and loss go through no set and use no hash, id or global state, which differ "
        "between processes, or leave workers out.",
        code="workers.differ",
        field="task",
    )


class _Worker:
    """A process that computes; it keeps the records and the traces of the model's steps, and no state of the run."""

    def __init__(self) -> None:
        _compute_alone()
        self._shared: tuple[Task, RunSpec] | None = None
        self._problem: SilodpError | None = None
        self._records: dict[str, LocalRecords] = {}
        self._work = LruCache(_RELEASES)

    def start(self, references: Sequence[Any]) -> SilodpError | None:
        """Compare a sample with that of the process of the run, once; return what is wrong with this worker.

        Args:
            references: To task, specification, the sample, and whether it must be the same bit by bit.
        """
        if self._shared is None:
            task, spec, expected, is_exact = _import_ray().get(references[0])
            self._shared = task, spec
            self._problem = find_difference(compute_sample(task, spec), expected, is_exact)
        return self._problem

    def compute(self, silo: str, references: Sequence[Any], block: Block | None) -> Any:
        """Return what a function returns for the update of a block; a list of what an iterator yields.

        Args:
            silo: The name of the silo.
            references: As `start`; to the silo's table, and to the release and the function.
            block: The block.
        """
        # Also here: a worker that takes the place of a lost one begins with this call.
        problem = self.start(references)
        if problem is not None or self._shared is None:
            return problem
        (table, work), get = references[1:], _import_ray().get
        if silo not in self._records:
            self._records[silo] = LocalRecords(get(table), *self._shared)
        release, function = self._work.get(work, partial(get, work))
        try:
            result = function(self._records[silo].compute(release, block))
            return list(result) if isinstance(result, Iterator) else result
        except SilodpError as error:  # the silo refuses; all other errors end the run
            return error


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else it reports that it is used
    try:
        import ray
    except ImportError:
        raise SilodpError(
            f"workers need Ray, which is not installed: {name_extra('ray', __name__)}.",
            code="workers.not_installed",
            field="workers",
        ) from None
    return ray


def _split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _find_modules_of_files() -> list[ModuleType]:
    """Return the modules of files that a configuration names: workers cannot import them, so they are sent whole."""
    return [
        module
        for name, module in sys.modules.items()
        if name != "__main__"
        and getattr(module, "__spec__", "") is None
        and str(getattr(module, "__file__", "")).endswith(".py")
    ]
