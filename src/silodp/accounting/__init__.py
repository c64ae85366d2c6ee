"""Privacy accounting: events, what they cost (ε at a δ), guarantees, and the ledger of a run.

An accountant of a user's own derives from `Accountant`:

    class FewOrders(Accountant):
        name = "few-orders"
        def supports(self, event): ...
        def compose(self, charges): ...

It can be given to `silodp.train(accountant=FewOrders())`, or named in a config as accountant = "my_file.py:FewOrders".
"""

from silodp.accounting.accountant import (
    ACCOUNTANTS,
    Accountant,
    Composition,
    EventCount,
    WorstOfUnits,
    choose_accountant,
    compute_delta,
    compute_epsilon,
    find_accountant,
)
from silodp.accounting.steps import Steps, flatten_event, flatten_per_unit

__all__ = [
    "ACCOUNTANTS",
    "Accountant",
    "Composition",
    "EventCount",
    "Steps",
    "WorstOfUnits",
    "choose_accountant",
    "compute_delta",
    "compute_epsilon",
    "find_accountant",
    "flatten_event",
    "flatten_per_unit",
]
