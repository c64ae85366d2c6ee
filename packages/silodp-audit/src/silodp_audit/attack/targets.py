"""What a configuration or the directory of a finished run promises, as the target of an attack."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silodp.accounting.charges import ChargeCounts
from silodp.accounting.ledger import reopen_ledger
from silodp.config.resolve import ResolvedRun, load_config
from silodp.config.run_settings import RunSettings, load_settings
from silodp.errors import SilodpError
from silodp.parsing import parse_json, refuse_malformed
from silodp.report.run_record import RunRecord, read_guarantees, read_run
from silodp.runtime.run_files import ATTACK, CONFIG, LEDGER, RUN_SPEC
from silodp.wire.files import write_durably

if TYPE_CHECKING:  # three seconds with torch, which a refusal need not wait for
    from silodp_audit.attack.audit_run import Promise, Target


def find_config_target(resolved: ResolvedRun) -> Target:
    """Return the target of a configuration; no private file is opened.

    The promise is what the ledger of the canary run charges.
    """
    spec, _ = resolved.build_public_spec()
    from silodp_audit.attack.audit_run import Target

    return Target(
        resolved.method,
        resolved.silos,
        resolved.config.rounds,
        _find_settings(resolved),
        _find_evaluation(resolved),
        spec=spec.digest,
        untested=_list_evaluation(resolved),
    )


def find_directory_target(directory: Path, overrides: Any = ()) -> Target:
    """Return the target of a finished run: what its guarantee states, and what its ledger charged.

    Args:
        directory: The directory of the run; it is only read.
        overrides: Settings of the configuration that are not to be changed here; any is refused.

    Raises:
        SilodpError: a file is missing or damaged, or guarantee and ledger contradict each other.
    """
    if overrides:
        raise SilodpError(
            f"--set with {directory}: a finished run is attacked as it was; name a configuration to attack another.",
            code="argument.conflict",
            field="--set",
        )
    settings, path = load_settings(directory / CONFIG), directory / RUN_SPEC
    with refuse_malformed(f"{path} is damaged: restore it from a copy.", code="report.damaged"):
        stored = parse_json(path.read_bytes())
        digest, names = str(stored["digest"]), tuple(map(str, stored["data"]["silos"]))
    _, guarantees = read_guarantees(directory)
    rounds = guarantees["released"].rounds
    from silodp_audit.attack.audit_run import Promise, Target

    target = Target(
        settings.method,
        names,
        rounds,
        {**_find_settings(settings), "budget": None},  # the run ended where its budget did
        _find_evaluation(settings),
        claimed_rounds=rounds,
        spec=digest,
        untested=_list_evaluation(settings),
    )
    if not (directory / LEDGER).exists():
        promises = {
            adversary: Promise((), stated.epsilon, stated.reason or "", stated.accountant)
            for adversary, stated in guarantees.items()
        }
        only = "what was charged round by round: there is no ledger, and ε and δ of guarantee.json alone are the claim."
        return replace(target, promises=promises, untested=(*target.untested, only))
    # It compares guarantee and ledger, and refuses a guarantee that promises more than was charged for.
    record: RunRecord = read_run(directory, with_sections=False)
    with reopen_ledger(directory / LEDGER, lambda name: settings.accountant or name) as ledger:
        charges = ledger.to_counts()
    return replace(
        target, promises=_find_promises(charges), untested=(*target.untested, *_list_unchecked(record))
    )


def _list_unchecked(record: RunRecord) -> tuple[str, ...]:
    unchecked = () if record.audit is None else record.audit.unchecked
    return tuple(f"{what}." for what in unchecked)


def _find_promises(charges: ChargeCounts) -> dict[Any, Promise]:
    """Return what a ledger charged for rounds of training, by adversary."""
    from silodp_audit.attack.audit_run import Promise

    found = {}
    for adversary, events in charges.charged.items():
        further = charges.list_further(adversary)
        kept = {event: count - further[event] for event, count in events.items() if count > further[event]}
        of_rounds_alone = replace(charges, charged={adversary: kept}, reported={})
        cost = (of_rounds_alone if further else charges).compute_cost(adversary)
        found[adversary] = Promise(
            tuple(kept.items()), cost.epsilon, cost.reason or "", charges.accountant.name
        )
    return found


def _find_settings(settings: RunSettings) -> dict[str, Any]:
    """Return the arguments of the canary run: those of the run, without what reads data or fixes randomness."""
    given = settings.settings()
    left_out = ("rounds", "seed", "silo_limits", "evaluation")
    return {name: value for name, value in given.items() if name not in left_out}


def _find_evaluation(settings: RunSettings) -> Any:
    return settings.evaluation if settings.evaluation and settings.evaluation.is_charged else None


def _list_evaluation(settings: RunSettings) -> tuple[str, ...]:
    if _find_evaluation(settings) is None:
        return ()
    return (
        "rounds and evaluations together: one evaluation was attacked by itself, with cells of its own and without "
        "subgroups, and ε here is that of the rounds.",
    )


def load_target(path: Path, overrides: Any = ()) -> Target:
    """Return the target of a configuration file or of a run's directory."""
    if path.is_dir():
        return find_directory_target(path, overrides)
    return find_config_target(load_config(path, overrides or ()))


def write_attack(directory: Path, result: dict[str, Any]) -> Path:
    """Write attack.json, and return its path."""
    path = directory / ATTACK
    text = json.dumps(result, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    write_durably(path, text.encode())
    return path
