"""The data set "tables": the silos' own tables, read by a schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from silodp.data.dataset import Dataset
from silodp.data.federation import Federation
from silodp.data.public import ASSUMES_INDEX_FROM_TABLES, PublicData
from silodp.data.tables.schema import Schema
from silodp.errors import SilodpError


class TableDataset(Dataset):
    """CSV or Parquet tables, one per silo: all public facts follow from the schema and the list of files."""

    def public(self, arguments: Mapping[str, Any], users: int | None = None) -> PublicData:
        """Return the facts that the schema declares; only the public list of users or the profile is read."""
        schema: Schema = arguments["schema"]
        schema.check_readers(self.silo_names(arguments))
        profile, inputs = schema.read_identity(), schema.list_inputs()
        # A list of persons that is counted in the tables shows everyone that they are in one of them.
        is_declared = profile is not None or schema.users is not None
        of_index = () if is_declared else (ASSUMES_INDEX_FROM_TABLES,)
        return replace(
            super().public(arguments, users),
            name=str(self.argument(arguments, "name")),
            record_shape=() if inputs else (len(schema.features),),
            labels=schema.kind,
            classes=None if schema.classes is None else len(schema.classes),
            features=schema.features,
            assumptions=(*of_index, *schema.assumptions),
            identity_digest="" if profile is None else profile.digest,
            inputs=inputs,
            label_typical=schema.label_typical,
            targets=schema.targets,
        )

    def find_schema(self, arguments: Mapping[str, Any]) -> Schema | None:
        """Return the declared schema."""
        schema: Schema = arguments["schema"]
        return schema

    def check_files(self, arguments: Mapping[str, Any]) -> None:
        """Refuse a table that is not there."""
        files = arguments["files"]
        for path in files.values() if isinstance(files, Mapping) else files:
            if isinstance(path, str) and not Path(path).exists():
                raise SilodpError(
                    f"{path}: no such file; check the path of the table",
                    code="data.no_file",
                    field="data.files",
                )

    def silo_names(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the files' silos; those of a list are the files' stems."""
        files = arguments["files"]
        return tuple(files) if isinstance(files, Mapping) else tuple(Path(file).stem for file in files)

    def declared_users(self, arguments: Mapping[str, Any]) -> int | None:
        """Return the population of the identity profile, or the length of the public list of users; else None."""
        schema: Schema = arguments["schema"]
        profile = schema.read_identity()
        if profile is not None:
            return profile.population
        listed = schema.read_users()
        return None if listed is None else len(listed)

    def has_record_budgets(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether the schema names a column of budgets."""
        return arguments["schema"].budget is not None


TABLES = TableDataset(name="tables", loader=Federation.from_tables)
