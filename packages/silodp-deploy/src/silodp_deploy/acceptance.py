"""What an operator accepts: the agreement as it is shown to them, and the policy that is written when they accept."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from silodp.accounting.filters import DEFAULT_BOUNDS, Filter
from silodp.accounting.views import Adversary
from silodp.aggregators.run_spec import RunSpec
from silodp.data.silo_data import SiloData
from silodp.data.tables.schema import Schema
from silodp.errors import SilodpError
from silodp.methods.base import supports
from silodp.runtime.guarantees import DerivedGuarantee, derive_guarantees, plan_charges
from silodp.runtime.run_directory import hold_lock
from silodp.wire.files import PRIVATE_FILE, write_durably
from silodp_deploy import LOCK, POLICY
from silodp_deploy.consortium import Consortium
from silodp_deploy.history import list_charged
from silodp_deploy.lifetime import compute_lifetime_cost, find_shortfall, read_ledgers
from silodp_deploy.policy import Policy
from silodp_deploy.public_files import format_digest
from silodp_deploy.records import load_records
from silodp_deploy.silo import check_participation, find_name


def plan_epsilon(
    spec: RunSpec, derived: Mapping[Adversary, DerivedGuarantee] | None = None
) -> dict[Adversary, float | None]:
    """Return ε of the whole run by adversary, as it is agreed; None where there is no guarantee.

    Where rounds may go on without some silos, nobody knows yet who will be away: it is ε for any dropouts.

    Args:
        spec: Specification of the run.
        derived: Its guarantees after all rounds, where they are known.
    """
    found = derive_guarantees(spec, plan_charges(spec, spec.accountant)) if derived is None else derived
    all_answer = spec.min_silos == len(spec.names)
    return {a: one.cost.epsilon if all_answer else one.any_dropouts for a, one in found.items()}


def describe_agreement(consortium: Consortium, silo: str | None = None) -> dict[str, Any]:
    """Return what an operator accepts, JSON-ready: method, unit, ε of the whole run, columns, model, parties.

    Args:
        consortium: The sealed public folder.
        silo: Name of the silo, whose table's names are given as "table", and by whose column persons are told apart;
            None at the server.
    """
    spec, roster = consortium.stated_spec, consortium.sealed
    derived = derive_guarantees(spec, plan_charges(spec, spec.accountant))
    stated = [one.assumptions for one in derived.values()]
    all_answer = spec.min_silos == len(spec.names)
    schema = consortium.resolved.table_schema
    persons = consortium.identify_persons(silo)
    profile = None if schema is None else schema.read_identity()
    # A method with one bounded row per silo computes no person; sums of counts do.
    computes_persons = supports(type(spec.method), "can_isolate_units") or spec.charged
    return {
        "name": consortium.resolved.config.name,
        "method": spec.method.name,
        "settings": describe_settings(spec.method),
        # All that the report will ask to be signed: here the operator agrees.
        "assumptions": [asdict(one) for one in dict.fromkeys(chain.from_iterable(stated))],
        "unit": spec.method.unit,
        "aggregator": spec.aggregator.name,
        "aggregation": describe_settings(spec.aggregator),
        "rounds": spec.rounds,
        "delta": spec.delta,
        "epsilon": plan_epsilon(spec, derived),
        # With fewer answers it would be larger.
        "sample_known": derived["server"].sample_known if all_answer else None,
        "budget": None if spec.budget is None else asdict(spec.budget),
        "isolate_units": spec.isolate_units if computes_persons else None,
        "series": {
            one.name: {
                "kind": one.kind,
                "times": one.count(spec.rounds),
                "consent": one.describe_consent(spec),
            }
            for one in spec.series
            if one.asks_silos
        },
        "columns": list(spec.data.features),
        "labels": consortium.list_columns("")["labels"],
        "silo": silo,
        "table": None if silo is None else consortium.list_columns(silo),
        "references": {
            field: reference.removeprefix(f"{consortium.folder.resolve()}/")
            for field, reference in consortium.references.items()
        },
        "files": {name: asdict(file) for name, file in consortium.other_files.items()},
        "mappings": {} if schema is None else {name: asdict(one) for name, one in schema.silos.items()},
        "roles": {} if schema is None else describe_roles(schema),
        "users": spec.data.users,
        "persons": {
            **asdict(persons),
            "digest": persons.digest,
            "profile": None if profile is None else {"study": profile.study, "code": profile.agreement_code},
        },
        "model": {"size": spec.model.size, "architecture": spec.model.architecture, "loss": spec.model.loss},
        # The first 64 bits of a key: enough for people to compare, as the digest covers the whole keys.
        "server": {"address": roster.address, "key": format_digest(roster.server.hex(), 16)},
        "silos": {name: format_digest(key.hex(), 16) for name, key in roster.silos.items()},
        "visibility": [asdict(one) for one in spec.aggregator.visibility],
        "secret": spec.is_secret,
        "for_tests": roster.for_tests,
        "digest": consortium.digest,
        "code": consortium.code,
    }


def describe_roles(schema: Schema) -> dict[str, str]:
    """Return what a run takes from each column that is no feature, by its name in the configuration, as a phrase."""
    roles = {
        "who a person is": (schema.user,),
        "what is predicted": (*schema.label_columns, schema.event, schema.time),
        "which records are held out": (schema.split,),
        "how much ε a record may be charged": (schema.budget,),
    }
    return {column: told for told, columns in roles.items() for column in columns if column is not None}


def describe_settings(part: Any) -> dict[str, str]:
    """Return the settings of a method, an aggregator or a part of one, by name, as text.

    Settings that are None are left out, and those that an agreement states elsewhere (name, unit, needs_counts).
    """
    found = {}
    for field in fields(part):
        value = getattr(part, field.name)
        if value is None or not field.compare or field.name in ("name", "unit", "needs_counts"):
            continue
        if is_dataclass(value):
            text = ", ".join(f"{name} {inner}" for name, inner in describe_settings(value).items())
        elif isinstance(value, bool):
            text = "yes" if value else "no"
        else:
            text = f"{value:g}" if isinstance(value, float) else str(value)
        found[field.name.replace("_", " ")] = text
    return found


@dataclass(frozen=True)
class Acceptance:
    """What was written when a silo's operator accepted.

    Attributes:
        policy: The silo's policy.
        records: Number of training records in the silo's table.
        persons: Number of persons whose records they are.
        shortfall: ε that all runs need after this one, by adversary whose limit it exceeds (`find_shortfall`).
    """

    policy: Policy
    records: int
    persons: int
    shortfall: dict[Adversary, float]


def accept_at_silo(
    folder: Path,
    consortium: Consortium,
    code: str,
    data: str,
    lifetime_epsilon: float | None = None,
    *,
    index: str | None = None,
    allow_counts: bool = False,
    min_persons: int | None = None,
    replace: bool = False,
) -> Acceptance:
    """Accept a public folder at a silo: compare the code, read the table, and write the policy.

    Args:
        folder: Folder of the silo.
        consortium: The public folder.
        code: The code that the coordinator read out, as somebody typed it.
        data: Path of the silo's table, relative to the current folder or to the silo's.
        lifetime_epsilon: As in `write_policy`, like the arguments that follow.
        index: Path of the trust center's file, relative as `data`; None where the run needs none.
        allow_counts: Whether the run may ask for the number of records of each person in clear.
        min_persons: The smallest number of persons with which the silo takes part; None: as before, or any.
        replace: Whether a policy that is there is written anew.

    Raises:
        SilodpError: The code is another one (code deploy.digest), the table does not fit, or as `write_policy`; then
            nothing was written.
    """
    check_code(code, consortium.code)
    name = find_name(folder, consortium)
    table = find_file(folder, "data", data)
    numbers = "" if index is None else find_file(folder, "index", index)
    # What is wrong with the table is seen here, and not when the other silos wait.
    records = load_records(Path(table), name, consortium, Path(numbers) if numbers else None)
    policy = write_policy(
        folder,
        consortium,
        table,
        lifetime_epsilon,
        index=numbers,
        allow_counts=allow_counts,
        min_persons=min_persons,
        records=records,
        replace=replace,
    )
    short = find_shortfall(folder, consortium.stated_spec, name, policy)
    return Acceptance(policy, len(records), len(set(records.user.tolist())), short)


def check_code(given: str, code: str) -> None:
    """Refuse a code that is not the one of the public folder.

    Raises:
        SilodpError: It is another one (code deploy.digest).
    """
    # How people group and capitalize what they hear makes no difference.
    if "".join(filter(str.isalnum, given.lower())) == code.replace(" ", ""):
        return
    if re.fullmatch(r"\s*[a-z]{4}(-[a-z]{4}){7}\s*", given.lower()):
        raise _refuse_code(
            "this is the agreement code of an identity profile (letters and hyphens): type the code of the "
            "consortium, eight groups of digits and the letters a to f."
        )
    raise _refuse_code(
        "the code is not that of this public folder, and nothing was accepted: type it again; if it still differs, "
        "the coordinator has another folder, so get the folder again."
    )


def _refuse_code(problem: str) -> SilodpError:
    return SilodpError(problem, code="deploy.digest", field="code")


def find_file(folder: Path, field: str, name: str) -> str:
    """Return the absolute path of a file that an operator named, here or in the silo's folder.

    Raises:
        SilodpError: There is no such file (code data.no_file).
    """
    found = next((path for path in (Path(name), folder / name) if path.is_file()), None)
    if found is None:
        raise SilodpError(
            f"there is no file {name}, neither here nor in {folder}: give the path of the silo's {field} file.",
            code="data.no_file",
            field=field,
        )
    return str(found.resolve())


def write_policy(
    folder: Path,
    consortium: Consortium,
    data: str,
    lifetime_epsilon: float | None = None,
    *,
    index: str = "",
    allow_counts: bool = False,
    allow_seed: bool = False,
    min_persons: int | None = None,
    records: SiloData | None = None,
    replace: bool = False,
    dry_run: bool = False,
) -> Policy:
    """Write the policy of a silo, or add the digest to the one that is there.

    Args:
        folder: Folder of the silo.
        consortium: The public folder, whose digest the operator has compared.
        data: Path of the file with the silo's records.
        lifetime_epsilon: For a new policy, the largest ε against each adversary that all runs together may spend, at
            the run's δ; None: as much as this run needs.
        index: Path of the file by which a trust center numbers the silo's persons, where the run needs one.
        allow_counts: Whether the run may ask for the number of records of each person in clear.
        allow_seed: For tests: whether the run may have a seed.
        min_persons: The smallest number of persons with which the silo takes part; None: as before, or any.
        records: The silo's records, which must be of so many persons; None: they are counted when the silo starts.
        replace: Whether a policy that is there is written anew, for this run alone. Only before the first charge:
            from then on its limits are what persons were promised.
        dry_run: Whether the policy is only returned, and nothing is written.

    Returns:
        The policy that was written, or would be.

    Raises:
        SilodpError: The roster does not list the silo's key, the policy does not allow the run, the records are of
            too few persons (code policy.few_persons), a person is somebody else in it than in earlier runs of the
            folder (code policy.persons), or with `replace` something was charged (code policy.charged), or a process
            serves the folder (code run.in_use).
    """
    name = find_name(folder, consortium)
    path = folder / POLICY
    if replace:
        _refuse_charged(folder)
    if path.exists() and not replace:
        if lifetime_epsilon is not None:
            raise SilodpError(
                f"{path} has limits already, which hold for all runs together: change lifetime_epsilon there, and "
                "leave the option out.",
                code="argument.conflict",
                field="lifetime_epsilon",
            )
        policy = Policy.load(path)
        # The earlier digests stay: a run that was begun under one of them can go on.
        digests = [*policy.accepted, *({consortium.digest} - set(policy.accepted))]
        changes: dict[str, Any] = {"accepted": digests, "data": data, "index": index}
        if min_persons is not None:
            changes["min_persons"] = min_persons
        policy = policy.model_copy(update=changes | {"allow_counts": policy.allow_counts or allow_counts})
    else:
        spec, read = consortium.stated_spec, consortium.list_columns(name)
        listed = compute_lifetime_cost(spec, name, spec.delta)
        needed = compute_lifetime_cost(spec, name, spec.delta, filter_bounds=DEFAULT_BOUNDS)
        # A filter is fixed before the first release. Where ciphertexts leave it no room, the limit that holds for runs
        # fixed beforehand is better than none.
        has_filter = needed.keys() == listed.keys() and not _has_charges(folder)
        disclosure = spec.aggregator.disclosure(spec) if has_filter else {}

        def choose_limit(adversary: Adversary, epsilon: float) -> float:
            if lifetime_epsilon is None:
                return _round_up(epsilon)
            # The larger the limit, the less room for what ciphertexts disclose (docs/privacy.md, section 12).
            room = Filter(spec.delta).largest_limit(disclosure.get(adversary, 0.0))
            return min(lifetime_epsilon, max(_round_up(epsilon), round(room - 1e-4, 4)))

        policy = Policy(
            accepted=[consortium.digest],
            data=data,
            index=index,
            delta=spec.delta,
            lifetime_epsilon={
                adversary: choose_limit(adversary, e)
                for adversary, e in (needed if has_filter else listed).items()
            },
            filter_bounds=list(DEFAULT_BOUNDS) if has_filter else [],
            methods=[spec.method.name],
            aggregators=[spec.aggregator.name],
            evaluation=spec.kinds,
            columns=read["columns"],
            labels=read["labels"],
            budget=read["budget"],
            queries=read["queries"],
            allow_counts=allow_counts,
            require_isolated_units=spec.isolate_units,
            min_silos=spec.min_silos,
            min_persons=min_persons or 0,
            allow_seed=allow_seed,
        )
    # Before anything is written: a policy that refuses its own run would only be noticed when the silo starts.
    if records is not None:
        policy.check_persons(records)
    try:
        check_participation(folder, consortium, policy)
    except SilodpError as error:
        if error.code != "policy.not_allowed" or not path.exists() or _has_charges(folder):
            raise
        raise SilodpError(
            f"{str(error).removesuffix('.')}; nothing was charged in {folder} yet, so accept with --replace to write "
            "the policy anew for this run.",
            code=error.code,
            field=error.field,
        ) from None
    if dry_run:
        return policy
    # The silo's process has read the policy: it would go on by the one that is replaced.
    with hold_lock(folder / LOCK, folder) if replace else nullcontext():
        if replace:
            _refuse_charged(folder)
        write_durably(path, policy.to_toml().encode(), PRIVATE_FILE)
    return policy


def _refuse_charged(folder: Path) -> None:
    if _has_charges(folder):
        raise SilodpError(
            f"a run was charged in {folder}, so the limits in its {POLICY} are what persons were promised, and stay: "
            "leave --replace out, and change in the file what you answer for.",
            code="policy.charged",
            field="replace",
        )


def _has_charges(folder: Path) -> bool:
    """Return whether a silo was charged in any run; raise where its ledgers are not all there."""
    return bool(list_charged(read_ledgers(folder)))


def _round_up(epsilon: float) -> float:
    """Return ε with four digits after the point, not below the value."""
    # The summand leaves room for last digits, which may differ when the same charges are added up in a run.
    return math.ceil(epsilon * 10_000 + 1e-6) / 10_000
