"""What the operator of a party lets it do: a silo's policy.toml, and accepted.txt of the server.

Without either, a party executes nothing of a public folder.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from silodp.accounting.filters import Filter
from silodp.accounting.views import Adversary
from silodp.aggregators.run_spec import RunSpec
from silodp.config.build import convert_validation_error
from silodp.config.toml_values import read_toml
from silodp.data.silo_data import SiloData
from silodp.errors import SilodpError
from silodp.text import shorten
from silodp.wire.files import PRIVATE_FILE, write_durably
from silodp_deploy.agreement import JOIN_BYTES

_HEADER = (
    "# What this silo takes part in, whatever the server asks. Written by 'silodp deploy accept'.\n"
    "# lifetime_epsilon bounds what all runs tell together. By filter_bounds it holds even if one chooses a later\n"
    "# run after seeing an earlier one's models; without any, only if the runs were fixed beforehand. Fix what you\n"
    "# owe these persons before the first run; to lower a limit later is always safe.\n"
)
ACCEPTED = "accepted.txt"
"""In the server's folder: the digest (hex) of every public folder that its operator has accepted, one a line."""
_GIB = 1 << 30
_Epsilon = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Policy(BaseModel):
    """What a silo takes part in.

    Attributes:
        accepted: Digests (64 hexadecimal digits) of the public folders that the operator has accepted.
        data: The file with this silo's records, relative to the policy. It never leaves the silo.
        index: The file by which a trust center numbers the silo's persons, relative to the policy; "" where the run
            needs none. It never leaves the silo.
        delta: δ of the lifetime limits, in (0, 1).
        persons: Digests (16 hexadecimal digits) of other columns, identity profiles or lists that name the same persons
            as the folder's first run. The operator answers for that.
        lifetime_epsilon: The largest ε that all runs of this silo together may spend, by adversary.
        filter_bounds: Those of the filter by which these limits hold even if later runs are chosen after seeing models
            ("plan", "gaussian", "order-A"); an empty list: the limits hold for runs that were fixed beforehand.
        methods: Names of the methods that are allowed; an empty list allows all.
        aggregators: Names of the aggregators that are allowed; an empty list allows all.
        evaluation: Kinds of evaluation on this silo's held-out records that are allowed ("none", "local", "sums",
            "sums by silo"); an empty list allows all.
        columns: What features may be made of, by the names and texts of this silo's table: "NAME", "NAME is missing",
            "NAME=TEXT"; also the column of the split. An empty list allows those of the accepted configuration.
        labels: Columns of this silo's table that a model may learn to predict, which are the label, or event and time;
            an empty list allows those of the accepted configuration.
        budget: The column of this silo's table that may say how much ε a record may be charged; an empty list allows
            that of the accepted configuration.
        queries: Texts of the queries that may make this silo's table of a database; an empty list allows none. A query
            gives columns their names, so by the others of these lists alone one could read any column of the database.
        allow_counts: Whether a method may ask for the number of records of each person in clear.
        require_isolated_units: Whether every person (or record) must be computed alone, so that ε holds for models that
        a
            server chooses for an attack.
        min_silos: The smallest number of silos in a sum that this silo takes part in.
        min_persons: The smallest number of persons with training records in this silo's table with which it takes part
            in a run.
        most_runs: The largest number of runs that may be charged over the life of the silo's folder. A run that is
            resumed is the same run.
        allow_seed: For tests: whether the noise may follow from a seed that everyone knows.
        max_message_bytes: Bytes of the longest message that a run may have.
        max_run_bytes: The largest number of bytes that the store may hold of one run.
        max_disk_bytes: The largest number of bytes of the store, the ledgers and the audit log of all runs together.
        max_sessions: The largest number of set-up sessions in one run; the server may begin another each time it
            resumes the run.
        max_answers: The largest number of answers in one run. Repeated answers count: each is a line of the audit log.
        max_run_days: Days after the first request of a run from which on no request of the run is answered.
    """

    # Strict and closed: a misspelled limit must not be taken for one that is not set.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    accepted: list[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]]
    data: str
    index: str = ""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    lifetime_epsilon: dict[Adversary, _Epsilon]
    filter_bounds: list[str]
    persons: list[Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]] = []
    methods: list[str] = []
    aggregators: list[str] = []
    evaluation: list[str] = []
    columns: list[str] = []
    labels: list[str] = []
    budget: list[str] = []
    queries: list[str] = []
    allow_counts: bool = False
    require_isolated_units: bool = False
    min_silos: Annotated[int, Field(ge=1)] = 2
    min_persons: Annotated[int, Field(ge=0)] = 0
    most_runs: Annotated[int, Field(ge=1, le=50)] = 20
    allow_seed: bool = False
    max_message_bytes: Annotated[int, Field(ge=1)] = 2 * _GIB
    max_run_bytes: Annotated[int, Field(ge=1)] = 10 * _GIB
    max_disk_bytes: Annotated[int, Field(ge=1)] = 100 * _GIB
    max_sessions: Annotated[int, Field(ge=1)] = 100
    max_answers: Annotated[int, Field(ge=1)] = 1_000_000
    max_run_days: Annotated[int, Field(ge=1)] = 365

    def check(self, digest: str, spec: RunSpec, columns: Mapping[str, Collection[str]]) -> None:
        """Refuse a run that the operator has not allowed.

        Raises:
            SilodpError: The first one of `find_refusals`, with the same arguments.
        """
        for refusal in self.find_refusals(digest, spec, columns):
            raise refusal

    def find_refusals(
        self, digest: str, spec: RunSpec, columns: Mapping[str, Collection[str]]
    ) -> Iterator[SilodpError]:
        """Yield why the policy does not allow a run, one error for each field that is at fault (codes policy.*).

        Args:
            digest: Digest of the public folder, as `Consortium.digest`.
            spec: Specification of the run.
            columns: What the run reads of this silo's table (`Consortium.list_columns`).
        """
        # First: of a folder that nobody has compared, not even its settings are worth a sentence.
        if digest not in self.accepted:
            yield SilodpError(
                f"the public folder has the digest {digest[:16]}, which the policy has not accepted: compare it with "
                "the coordinator by telephone, and run 'silodp deploy accept'.",
                code="policy.digest",
                field="accepted",
            )
        for field, verb, used, listed in (
            ("methods", "uses", [spec.method.name], self.methods),
            ("aggregators", "uses", [spec.aggregator.name], self.aggregators),
            ("evaluation", "uses", spec.kinds, self.evaluation),
            ("columns", "trains on", columns["columns"], self.columns),
            ("labels", "learns to predict", columns["labels"], self.labels),
            ("budget", "takes budgets of records from", columns["budget"], self.budget),
        ):
            # An empty list allows whatever the accepted folder names, and so leaves nothing over.
            if extra := sorted(set(used) - set(listed or used)):
                names = ", ".join(f"'{name}'" for name in extra)
                yield _refuse(
                    field, f"the run {verb} {names}, which the policy does not list in {field}: add it there"
                )
        if unknown := sorted(set(columns["queries"]) - set(self.queries)):
            yield _refuse(
                "queries",
                f"the run reads its table by the query {shorten(unknown[0])}, which the policy does not list in "
                "queries: read it as 'silodp deploy accept' shows it, and add its text there",
            )
        # An aggregator that weights privately computes on encrypted counts.
        if spec.shows_counts and not self.allow_counts:
            yield _refuse(
                "allow_counts",
                f"the method '{spec.method.name}' under '{spec.aggregator.name}' asks for the number of records of "
                "every person in clear: set allow_counts = true in policy.toml to allow it (silodp deploy accept "
                "--allow-counts)",
            )
        if self.require_isolated_units and not spec.isolate_units:
            yield _refuse(
                "require_isolated_units",
                "the run does not compute every person alone (isolate_units = true), and the policy requires it, so "
                "that its ε holds for models that a server chooses for an attack: set require_isolated_units = false "
                "to trust the server there",
            )
        if spec.min_silos < self.min_silos:
            yield _refuse(
                "min_silos",
                f"sums of {spec.min_silos} silos may be seen in the run, and the policy asks for {self.min_silos}: "
                "lower min_silos",
            )
        if (longest := find_max_bytes(spec)) > self.max_message_bytes:
            yield _refuse(
                "max_message_bytes",
                f"messages of the run have up to {longest:,} bytes, and the policy allows "
                f"{self.max_message_bytes:,}: raise max_message_bytes",
            )
        if not (spec.is_secret or self.allow_seed):
            yield _refuse(
                "allow_seed",
                "the run has a seed, so whoever knows it can remove the noise: take the seed out of config.toml "
                "(allow_seed = true is for tests with made-up records)",
            )

    def check_persons(self, records: SiloData) -> None:
        """Refuse a table of too few persons. The error has neither number: a log may be shown to others.

        Raises:
            SilodpError: There are fewer than `min_persons` (code policy.few_persons).
        """
        if len(np.unique(records.user)) < self.min_persons:
            raise SilodpError(
                "this silo's table has fewer persons than its policy asks for (min_persons), so nothing was sent: do "
                "not take part, or come back with the records of more persons.",
                code="policy.few_persons",
                field="min_persons",
            )

    @classmethod
    def load(cls, path: Path) -> Policy:
        """Read policy.toml.

        Raises:
            SilodpError: The file is missing, or a field is unknown or wrong.
        """
        table = read_toml(path)
        if unknown := sorted(table.keys() - cls.model_fields.keys()):
            raise SilodpError(
                f"{path}: unknown field {shorten(unknown[0])}; known fields are {', '.join(cls.model_fields)}.",
                code="config.unknown_field",
                field=unknown[0],
            )
        try:
            policy = cls.model_validate(table)
            if policy.filter_bounds:
                Filter(policy.delta, tuple(policy.filter_bounds))
            return policy
        except SilodpError as error:
            raise SilodpError(f"{path}: {error}", code=error.code, field=error.field) from None
        except ValidationError as error:
            # One wording for settings of runs and of policies: a name, its value, and what it may be.
            wrong = convert_validation_error(error, cls)
            raise SilodpError(f"{path}: {wrong}", code=wrong.code, field=wrong.field) from None

    def to_toml(self) -> str:
        """Return the content of policy.toml."""
        return _HEADER + tomli_w.dumps(self.model_dump())


def _refuse(field: str, problem: str) -> SilodpError:
    return SilodpError(f"{problem}, or do not take part.", code="policy.not_allowed", field=field)


def accept_digest(folder: Path, digest: str) -> None:
    """Write into the server's folder that its operator has accepted a public folder.

    Args:
        folder: Folder of the server.
        digest: Digest of the public folder.
    """
    known = _read_accepted(folder)
    if digest not in known:
        write_durably(
            folder / ACCEPTED, "".join(f"{one}\n" for one in [*known, digest]).encode(), PRIVATE_FILE
        )


def check_accepted(folder: Path, digest: str) -> None:
    """Refuse a public folder that the server's operator has not accepted.

    Raises:
        SilodpError: The folder of the server does not list the digest (code policy.digest).
    """
    if digest not in _read_accepted(folder):
        raise SilodpError(
            f"the public folder has the digest {digest[:16]}, which {folder / ACCEPTED} does not list, so none of its "
            "code was run: compare it with the coordinator, and run 'silodp deploy accept PUBLIC "
            f"{shlex.quote(str(folder))}'.",
            code="policy.digest",
            field="accepted",
        )


def _read_accepted(folder: Path) -> list[str]:
    path = folder / ACCEPTED
    return path.read_text(errors="replace").split() if path.exists() else []


def find_max_bytes(spec: RunSpec, *names: str) -> int:
    """Return the bytes of the longest message that silos of a run send or receive, without its signature.

    Args:
        spec: Specification of the run; its additional series are included.
        names: Names of the silos; none: all silos of the run.
    """
    every = [spec, *spec.derived.values()]
    longest = [one.aggregator.script(one, name).max_bytes for one in every for name in names or spec.names]
    return max(JOIN_BYTES, *longest)
