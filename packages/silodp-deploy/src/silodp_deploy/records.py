"""The records of one silo: read from a table or a file of arrays, and compared with what the consortium agreed on."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from silodp.aggregators.run_spec import RunSpec
from silodp.config.resolve import ResolvedRun
from silodp.data.identity.linkage import find_few_persons, list_key_warnings
from silodp.data.inputs import find_fault, list_arrays
from silodp.data.public import PublicData, find_label_shape
from silodp.data.silo_data import SiloData, find_wrong_class
from silodp.data.tables.reader import read_person_index, read_tables
from silodp.data.tables.schema import Schema
from silodp.errors import SilodpError
from silodp.runtime.data_warnings import list_loss_warnings
from silodp.text import shorten
from silodp.training.losses import DEFAULT_LOSSES
from silodp.wire.files import PRIVATE_FILE, write_durably
from silodp_deploy.consortium import Consortium

_log = logging.getLogger(__name__)


def load_records(path: Path, name: str, consortium: Consortium, index: Path | None = None) -> SiloData:
    """Read the records of one silo.

    Args:
        path: A table, read by the schema of the configuration, or a .npz file. The file has the arrays x, y, user,
            budget and identifiers of a `SiloData`, and test_x, test_y and test_user of its held-out records. Several
            named inputs are the arrays x.NAME and test_x.NAME.
        name: Name of the silo.
        consortium: The public folder.
        index: Path of the file by which a trust center numbers the persons; needed where the run has an identity
            profile and weights by records.

    Raises:
        SilodpError: The file cannot be read, does not fit the public description of the data, or the method refuses the
            number or the budgets of the records.
    """
    public = consortium.data
    for file in filter(None, (path, index)):
        try:
            file.exists()
        except OSError as error:  # a name that no file can have; whether there is one, the reader says
            raise SilodpError(
                f"{shorten(str(file))} cannot be opened ({error.strerror}): correct the path in policy.toml.",
                code="data.no_file",
            ) from None
    if path.suffix == ".npz":
        data = _read_arrays(path, name, public)
    else:
        schema = check_index(consortium.resolved, consortium.stated_spec)
        tables = read_tables({name: path}, schema, _read_index(index, schema, consortium.stated_spec))
        (data,) = tables.silos
        keys = data.identifiers or tables.user_keys  # by number, with a trust center too
        users, counts = np.unique(data.user, return_counts=True)
        rows = {keys[user]: int(number) for user, number in zip(users, counts, strict=True)}
        for warning in list_key_warnings({str(path): rows}):
            _log.warning("%s", warning)
    if len(data) == 0:
        _log.warning("%s has no training record: this silo spends ε and adds nothing but noise", path)
    for warning in find_few_persons([data]) if consortium.stated_spec.method.unit == "user" else ():
        _log.warning("%s", warning)
    # By its name: a task is built by code that the silo may not have agreed to yet.
    loss = consortium.resolved.config.task.loss or DEFAULT_LOSSES.get(public.labels)
    for warning in list_loss_warnings([data], loss):
        _log.warning("%s", warning)
    _check_kind(path, data, public)
    _check_method(data, public, consortium.stated_spec)
    return data


def _read_arrays(path: Path, name: str, public: PublicData) -> SiloData:
    """Read the .npz file of a silo (see `load_records`)."""
    try:
        # A pickle in the file could run code.
        with np.load(path, allow_pickle=False) as arrays:
            # A single label is of the kind that it looks like.
            kind = None if public.targets is None else public.labels
            test, names = None, arrays.get("identifiers")
            if "test_y" in arrays:
                x = _load_x(arrays, "test_x")
                test = SiloData(name, x, arrays["test_y"], arrays["test_user"], labels=kind)
            known = None if names is None else tuple(names.tolist())
            x, budget = _load_x(arrays, "x"), arrays.get("budget")
            return SiloData(name, x, arrays["y"], arrays["user"], budget, test, known, kind)
    except SilodpError as error:
        raise SilodpError(f"{path}: {error}", code=error.code, field=error.field) from None
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise SilodpError(
            f"{path} cannot be read ({type(error).__name__}): give a .npz file with the arrays x, y and user.",
            code="data.files",
        ) from None


def _check_kind(path: Path, data: SiloData, public: PublicData) -> None:
    """Refuse records that are not of the kind that the consortium agreed on."""
    for one in (data, data.held_out):
        if (fault := find_fault(one.x, public.record_shape, public.inputs)) is not None:
            raise _refuse(f"the records in {path} are not what the consortium agreed on, {fault}")
        if not _has_label(one, public):
            raise _refuse(
                f"the labels in {path} are not of the kind '{public.labels}' with {public.classes or 'no'} classes, "
                "which the consortium agreed on"
            )
    # A number beyond U would be a person whom no weight and no noise was calibrated for.
    users = public.users or 0
    if len(data) and not 0 <= data.user.min() <= data.user.max() < users:
        raise SilodpError(
            f"{path} has a user number outside 0 to {users - 1}: use the index that the consortium agreed on.",
            code="deploy.data",
        )


def _refuse(problem: str) -> SilodpError:
    return SilodpError(f"{problem}: prepare them as the description of the data says.", code="deploy.data")


def _check_method(data: SiloData, public: PublicData, spec: RunSpec) -> None:
    """Let a method that protects records check how many the silo has, and the privacy budgets of these records.

    In one process the method sees the records of all silos before the first round. Here the public facts lack them, and
    each silo sees its own: the others are taken as empty.

    Raises:
        SilodpError: The method refuses them.
    """
    if spec.method.unit != "record":
        return
    # Silos with no records of their own cannot fail a check: what is refused here is due to this silo's records.
    none = np.empty(0)
    budgets = None
    if data.budget is not None:
        budgets = tuple(data.budget if name == data.name else none for name in public.silos)
    counts = tuple(len(data) if name == data.name else 0 for name in public.silos)
    own = replace(public, record_budgets=budgets is not None, record_counts=counts, silo_budgets=budgets)
    spec.method.check(own, spec.rounds, spec.delta)


def _has_label(data: SiloData, public: PublicData) -> bool:
    """Return whether labels are of the kind that the consortium agreed on."""
    if data.y.shape[1:] != find_label_shape(public.labels, public.targets, public.label_shape):
        return False
    if public.targets is not None:
        return data.labels == public.labels
    is_class = data.y.dtype == np.int64 and find_wrong_class(data.y, public.classes or 0) is None
    return public.labels != "classes" or is_class


def check_index(resolved: ResolvedRun, spec: RunSpec) -> Schema:
    """Refuse a run of tables in which silos would not agree on who is the same person.

    Returns:
        The schema of the tables.

    Raises:
        SilodpError: The schema does not say who is the same person, or the run needs a public list of users (code
            deploy.no_index).
    """
    schema = resolved.table_schema
    if schema is None or (schema.users is None and schema.identity is None):
        raise _refuse_numbering(
            "the configuration has no schema that says who is the same person: set data.schema.users to a public list "
            "of users, or data.schema.identity to an identity profile.",
        )
    if schema.users is None and spec.data.user_budgets is not None:
        raise _refuse_numbering(
            "with an identity profile there is no public list of persons, and personal budgets are public by such a "
            "list: set data.schema.users to a public list of users, or use one budget.",
        )
    return schema


def _read_index(path: Path | None, schema: Schema, spec: RunSpec) -> dict[str, int] | None:
    """Return the trust center's numbers of persons where the run needs them; None where it does not."""
    profile = schema.read_identity()
    if profile is None or not spec.needs_common_index:
        return None
    if path is None:
        raise _refuse_numbering(
            "weights that depend on records need one numbering of persons for all silos, and the run has an identity "
            "profile, so there is no public list: get a file with the columns id and position from a trust center, and "
            "name it: silodp deploy accept --index FILE.",
            "index",
        )
    return read_person_index(path, profile)


def _refuse_numbering(problem: str, field: str = "data.schema.users") -> SilodpError:
    return SilodpError(problem, code="deploy.no_index", field=field)


def save_records(path: Path, data: SiloData) -> None:
    """Write the records of a silo as a .npz file that its owner alone may read."""
    arrays: dict[str, Any] = {**_store_x(data.x, "x"), "y": data.y, "user": data.user}
    if data.budget is not None:
        arrays["budget"] = data.budget
    if data.test is not None:
        arrays |= {**_store_x(data.test.x, "test_x"), "test_y": data.test.y, "test_user": data.test.user}
    if data.identifiers is not None:
        arrays["identifiers"] = np.array(data.identifiers)
    content = io.BytesIO()
    np.savez(content, **arrays)
    write_durably(path, content.getvalue(), PRIVATE_FILE)


def _store_x(x: Any, prefix: str) -> dict[str, Any]:
    """Return the arrays of a .npz file that hold the inputs of records."""
    return {f"{prefix}.{name}" if name else prefix: array for name, array in list_arrays(x).items()}


def _load_x(arrays: Mapping[str, Any], prefix: str) -> Any:
    """Return the inputs that `_store_x` stored."""
    named = {
        name.removeprefix(f"{prefix}."): arrays[name] for name in arrays if name.startswith(f"{prefix}.")
    }
    # One array is stored under the bare prefix, several named ones as prefix.NAME (`_store_x`).
    return named or arrays[prefix]
