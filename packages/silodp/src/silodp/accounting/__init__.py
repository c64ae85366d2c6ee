"""Privacy accounting: events, what they cost (ε at a δ), guarantees, and the ledger of a run.

An accountant of a user's own derives from `Accountant`:

    class FewOrders(Accountant):
        name = "few-orders"
        def supports(self, event): ...
        def compose(self, charges): ...

It can be given to `silodp.train(accountant=FewOrders())`, or named in a config as accountant = "my_file.py:FewOrders".
"""

from silodp.accounting import events
from silodp.accounting.accountant import (
    Accountant,
    Composition,
    EventCount,
    WorstOfUnits,
    compute_delta,
    compute_epsilon,
)
from silodp.accounting.steps import flatten_per_unit
from silodp.accounting.views import View

__all__ = [
    "Accountant",
    "Composition",
    "EventCount",
    "View",
    "WorstOfUnits",
    "compute_delta",
    "compute_epsilon",
    "events",
    "flatten_per_unit",
]
