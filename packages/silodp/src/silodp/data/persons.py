"""Who the persons of a run are: only of the same persons can the ε of several runs be added up."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from silodp.data.tables.columns import text_of
from silodp.data.tables.schema import Schema
from silodp.text import join_names, shorten


@dataclass(frozen=True)
class PersonKey:
    """How records are assigned to persons in a run; public.

    Only where two runs have the same key, the ε of one person in both can be added up.

    Attributes:
        column: The column of the silo's table that identifies persons, as it is called there; of a simulation also its
            other names in single silos; "" where the data set numbers persons.
        identity_digest: SHA-256 (hex) of the identity profile by which the column is read; "" without a profile.
        list_digest: SHA-256 (hex) of the public list of persons, in any order; of the name of the data set and U where
            the data set numbers persons; "" with an identity profile.
    """

    column: str
    identity_digest: str
    list_digest: str

    @classmethod
    def of(cls, schema: Schema | None, source: str, users: int | None, silo: str | None = None) -> PersonKey:
        """Return the key of a run.

        Args:
            schema: How the silos' tables are read; None where the data set numbers persons.
            source: The name of the data set.
            users: U.
            silo: Whose table it is; None: all silos together, as in a simulation.
        """
        if schema is None:
            return cls("", "", _digest([source, users]))
        # Sorted and without repeats: the order of a list numbers persons, and does not change who they are.
        profile, listed = schema.read_identity(), schema.read_users()
        keys = None if listed is None else sorted({text_of(key) for key in listed})
        return cls(
            _name_column(schema, silo),
            "" if profile is None else profile.digest,
            "" if keys is None else _digest(keys),
        )

    @property
    def digest(self) -> str:
        """The first 64 bits of the SHA-256 over all fields, as 16 hexadecimal digits."""
        return _digest(asdict(self))[:16]

    def describe_changes(self, earlier: PersonKey) -> str:
        """Return a phrase about how this key differs from that of an earlier run."""
        changes = {
            "column": f"the column {shorten(self.column)} in place of {shorten(earlier.column)}",
            "identity_digest": "another identity profile",
            "list_digest": "another list of persons",
        }
        return join_names(
            told for field, told in changes.items() if getattr(earlier, field) != getattr(self, field)
        )


def _name_column(schema: Schema, silo: str | None) -> str:
    """Return the name of the column of persons in a silo's table; of all silos also where it has another name."""
    if silo is not None:
        return schema.name_columns(silo)[schema.user]
    # No silo is called "", so this is the name in every table about which nothing else is said.
    common = schema.name_columns("")[schema.user]
    found = {one: schema.name_columns(one)[schema.user] for one in {*schema.silos, *schema.readers}}
    others = [f"{one}: {name}" for one, name in sorted(found.items()) if name != common]
    return f"{common} ({', '.join(others)})" if others else common


def _digest(content: object) -> str:
    """Return the SHA-256 (hex) of JSON with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
