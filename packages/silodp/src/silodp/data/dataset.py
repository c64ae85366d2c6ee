"""Data sets as plug-ins: how one is loaded, what is public about it, and where its files are published."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from silodp.assumption import DECLARERS, Assumption
from silodp.data.inputs import Input
from silodp.data.public import LabelKind, PublicData
from silodp.data.tables.schema import Schema
from silodp.errors import SilodpError

if TYPE_CHECKING:
    from silodp.data.federation import Federation


@dataclass(frozen=True)
class Origin:
    """Where the files of a data set are published, under which license, and what they must hash to.

    Attributes:
        rows: records after loading, training and test together.
        license: the license, in the words of the publisher.
        publisher: who publishes the data.
        files: file name → SHA-256 (hex).
        urls: file name → the addresses to try in turn; empty where the publisher asks for a login or for processing.
        manual: the steps to take where `urls` is empty.
        alternative: a file that may stand in for all `files`, as the publisher gives it out.
    """

    rows: int
    license: str
    publisher: str
    files: Mapping[str, str] = field(default_factory=dict)
    urls: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    manual: str | None = None
    alternative: str | None = None


def urls_in(files: Iterable[str], *folders: str) -> dict[str, tuple[str, ...]]:
    """Return file name → its addresses, where every folder holds all files under their names."""
    return {file: tuple(folder + file for folder in folders) for file in files}


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A data set that a configuration can name.

    A configuration names a registered data set (`[data] source = "mnist"`) or one in a file
    (`source = "my_data.py:DIABETES"`). Every other field of [data] is an argument of `loader`, checked against its
    signature. All attributes are public and stated without reading a record.

    Attributes:
        name: the name by which a configuration names the data set.
        loader: keyword arguments → Federation. Three arguments have a meaning: `users` (U), `silos` (S), and
            `allocation`, where "own" makes every record a user.
        record_shape: shape of one record's features; () for several named arrays.
        inputs: the arrays of a record, where they are not one array of real numbers.
        labels: "classes", "real", "survival" or "multilabel".
        classes: number of classes; None for the other kinds of label.
        targets: number of labels of a record, where it has several yes/no labels or numbers.
        label_shape: the places of a record that have a class each (see `PublicData`).
        features: names of the features, or () where they have none.
        silos: names of the silos where they are fixed; () where the loader has an argument `silos`.
        users: U where it is fixed; None where it follows from the arguments, or is known only after loading.
        model, loss, metrics: defaults of the task, by name; None takes those of the kind of label.
        private_scaling: for a loader with `normalize="private"`: the sentence that states which constants are then
            estimated from private rows.
        schema: how features are scaled by public constants; None where they are not. Of a loader with `normalize` it is
            for normalize="public" alone.
        origin: where the files are published; None where `silodp data` has nothing to fetch or to check.

    Raises:
        SilodpError: no name, no loader, or no way to know the number of silos.
    """

    name: str
    loader: Callable[..., Federation]
    record_shape: tuple[int, ...] = ()
    labels: LabelKind = "classes"
    classes: int | None = None
    features: tuple[str, ...] = ()
    silos: tuple[str, ...] = ()
    users: int | None = None
    model: str | None = None
    loss: str | None = None
    metrics: tuple[str, ...] | None = None
    private_scaling: str = ""
    schema: Schema | None = None
    origin: Origin | None = None
    inputs: tuple[Input, ...] = ()
    targets: int | None = None
    label_shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not callable(self.loader):
            raise SilodpError(
                f"data set {self.name!r}: loader is a {type(self.loader).__name__}; give a function that returns a "
                "Federation",
                code="argument.type",
                field="loader",
            )

    @property
    def scaling_assumptions(self) -> tuple[Assumption, ...]:
        """What `private_scaling` states, for the guarantee; () without it."""
        stated = self.private_scaling
        return (Assumption("private-scaling", stated, DECLARERS),) if stated else ()

    def load(self, arguments: Mapping[str, Any]) -> Federation:
        """Read the data.

        Args:
            arguments: the arguments of the loader.

        Raises:
            SilodpError: the loader returned something else than a Federation, or refused the arguments or the files.
        """
        from silodp.data.federation import Federation  # a plan reads no data, and does not need it

        federation = self.loader(**arguments)
        if not isinstance(federation, Federation):
            raise SilodpError(
                f"the loader of data set {self.name!r} returned a {type(federation).__name__}; return a Federation",
                code="argument.type",
                field="data.source",
            )
        self._check_declared(arguments, federation)
        return federation

    def _check_declared(self, arguments: Mapping[str, Any], federation: Federation) -> None:
        """Refuse loaded data that differ from what is declared: a plan, and with it ε, believes the declaration."""
        declared, loaded = self.public(arguments), federation.public()
        # U is also known only after loading; what silos are called changes nothing.
        facts: dict[str, tuple[Any, Any]] = {
            "number of silos": (len(declared.silos), len(loaded.silos)),
            "users": (loaded.users if declared.users is None else declared.users, loaded.users),
        }
        for name in ("record_shape", "inputs", "labels", "classes", "targets", "label_shape"):
            facts[name] = getattr(declared, name), getattr(loaded, name)
        for name, (stated, found) in facts.items():
            if stated != found:
                raise SilodpError(
                    f"the data set {self.name!r} declares {name} = {stated!r}, and its loader returned {found!r}: "
                    "correct the declaration or the loader.",
                    code="data.federation",
                    field="data.source",
                )

    def public(self, arguments: Mapping[str, Any], users: int | None = None) -> PublicData:
        """Return the public facts of the data that `load(arguments)` would read; no private file is opened.

        Args:
            arguments: the arguments of the loader, already checked against its signature.
            users: U, where the caller knows it; None takes the declared one.

        Returns:
            The facts; `users` is None where only the data tell, `index_digest` is "" as it needs the list of users.

        Raises:
            SilodpError: the number of silos is not declared, or a public list cannot be read.
        """
        # Scaling by private rows is stated with every guarantee: no ε covers these constants.
        private = self.argument(arguments, "normalize") == "private"
        return PublicData(
            name=self.name,
            silos=self.silo_names(arguments),
            users=self.declared_users(arguments) if users is None else users,
            record_shape=self.record_shape,
            labels=self.labels,
            classes=self.classes,
            features=self.features,
            assumptions=self.scaling_assumptions if private else (),
            record_budgets=self.has_record_budgets(arguments),
            inputs=self.inputs,
            targets=self.targets,
            label_shape=self.label_shape,
        )

    def find_schema(self, arguments: Mapping[str, Any]) -> Schema | None:
        """Return the schema by which the features of `load(arguments)` are read; None where no public one says it."""
        # A schema of public constants would contradict values that private rows have scaled.
        return self.schema if self.argument(arguments, "normalize") in (None, "public") else None

    def check_files(self, arguments: Mapping[str, Any]) -> None:
        """Refuse what is missing on the disk, before libraries are imported that take seconds: here nothing."""

    def silo_names(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the silos, in order."""
        number = self.argument(arguments, "silos")
        if self.silos and number in (None, len(self.silos)):
            return self.silos
        if number is None:
            raise SilodpError(
                f"data set {self.name!r} does not declare its silos; list their names in Dataset.silos, or give the "
                "loader an argument silos with a default",
                code="argument.missing",
                field="data.silos",
            )
        return tuple(f"silo-{s + 1}" for s in range(number))

    def declared_users(self, arguments: Mapping[str, Any]) -> int | None:
        """Return U where the arguments or the data set declare it; None where it is counted in the data."""
        if self.argument(arguments, "allocation") == "own":
            return None  # as many as there are records
        users = self.argument(arguments, "users")
        return self.users if users is None else int(users)

    def has_record_budgets(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether every training record comes with a budget ε."""
        return False

    @property
    def is_published(self) -> bool:
        """Whether anyone can get the records, so that counts of records are no secret."""
        return self.origin is not None

    def argument(self, arguments: Mapping[str, Any], name: str) -> Any:
        """Return an argument of the loader, else its default, else None."""
        # The signature is the only place of a default, so that configuration and Python cannot differ.
        parameter = inspect.signature(self.loader).parameters.get(name)
        default = None if parameter is None or parameter.default is parameter.empty else parameter.default
        return arguments.get(name, default)
