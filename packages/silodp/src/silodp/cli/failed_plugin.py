"""Which plug-in raised an exception; no command that succeeds imports this module."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import FrameType

from silodp.accounting import Accountant, Composition
from silodp.aggregators import Aggregator
from silodp.data import Dataset
from silodp.methods import Method, ServerOptimizer
from silodp.text import is_own, is_own_module, name_class


def find_failed_plugin(error: BaseException) -> str | None:
    """Return "the method halve.py:Halve", whose own code raised an exception or called what raised it; None: no such.

    The traceback tells, so that nothing has to stand around the calls of plug-ins.
    """
    kinds: dict[str, tuple[type, ...]] = {
        "method": (Method,),
        "server optimizer": (ServerOptimizer,),
        "accountant": (Accountant, Composition),
        "data set": (Dataset,),
        "aggregator": (Aggregator,),
    }
    found = None
    before: FrameType | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # The code that runs counts, not the class alone: a plug-in inherits most of what it does.
        if not is_own_module(str(frame.f_globals.get("__name__"))):
            owner = frame.f_locals.get("self")
            kind = next((kind for kind, bases in kinds.items() if isinstance(owner, bases)), None)
            # The two sides of an aggregator are of no common class; a loader is a function.
            if kind is None and hasattr(owner, "total" if hasattr(owner, "set_up") else "group_secret"):
                kind = "aggregator"
            if kind is not None and not is_own(type(owner)):
                found = f"the {kind} {name_class(type(owner))}"
            elif before is not None and before.f_code is Dataset.load.__code__:
                found = f"the data set {Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}"
        before = frame
    return found
