"""What the public facts of a federation may be where they are read from a file."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, FiniteFloat

from silodp.data.public import LabelKind

_Count = Annotated[int, Field(ge=1, le=2**53)]
_Size = Annotated[int, Field(ge=0, le=2**53)]


class _StoredInput(BaseModel, strict=True, extra="forbid"):
    """The facts of `Input.to_dict`."""

    name: str
    shape: list[_Size]
    categories: _Count | list[_Count] | None


class StoredFacts(BaseModel, strict=True, extra="forbid"):
    """The facts of `PublicData.to_dict`; strict, so that true is no number."""

    name: str
    silos: Annotated[list[str], Field(min_length=1)]
    users: _Count | None
    record_shape: list[_Size]
    labels: LabelKind
    classes: _Count | None = None
    features: list[str] = []
    assumptions: list[dict[str, str | bool]] = []
    user_budgets: list[FiniteFloat] | None = None
    record_budgets: bool = False
    record_counts: list[_Size] | None = None
    silo_budgets: list[list[Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)]]] | None = None
    index_digest: str = ""
    identity_digest: str = ""
    inputs: list[_StoredInput] = []
    label_typical: list[FiniteFloat | list[FiniteFloat]] | None = None
    targets: _Count | None = None
    label_shape: list[_Size] = []
