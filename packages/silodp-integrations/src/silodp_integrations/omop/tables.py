"""The tables of the Common Data Model that a query reads, with their columns: those that 5.3 and 5.4 have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

OPERATORS = {"<": 4171756, "<=": 4171754, ">=": 4171755, ">": 4172704}
"""operator_concept_id of values beyond a limit of detection."""
EXACT = (0, 4172703)
"""operator_concept_id of a value that is the value: no matching concept (or none), and "="."""
GENDERS = {8507: "male", 8532: "female"}
FIRST_OPEN_DAY = "2099-01-01"
"""From here on an end means that something still goes on: 2099-12-31 and 9999-12-31 are written for it."""


@dataclass(frozen=True)
class Events:
    """A table with one row for each event of a person.

    Attributes:
        name: Its name.
        key: The column of its key.
        day: The column of the day of the event, or of its first day.
        time: The column of the time of the event.
        concept: The column of the concept; None where there is only one kind of event.
        end: The column of the last day; None for events of one day.
        has_values: Whether an event has a number with a unit, and a coded answer.
        has_operators: Whether such a number may be a limit of detection.
    """

    name: str
    key: str
    day: str
    time: str
    concept: str | None
    end: str | None = None
    has_values: bool = False
    has_operators: bool = False

    def list_columns(self) -> list[str]:
        """Return the columns that queries read."""
        found = [self.key, "person_id", self.day, self.time, self.concept, self.end]
        found += ["value_as_number", "value_as_concept_id", "unit_concept_id"] if self.has_values else []
        found += ["operator_concept_id"] if self.has_operators else []
        return list(dict.fromkeys(column for column in found if column is not None))


EVENTS: Mapping[str, Events] = {
    "visit": Events(
        "visit_occurrence", "visit_occurrence_id", "visit_start_date", "visit_start_datetime", "visit_concept_id",
        "visit_end_date",
    ),
    "condition": Events(
        "condition_occurrence", "condition_occurrence_id", "condition_start_date", "condition_start_datetime",
        "condition_concept_id", "condition_end_date",
    ),
    "drug": Events(
        "drug_exposure", "drug_exposure_id", "drug_exposure_start_date", "drug_exposure_start_datetime",
        "drug_concept_id", "drug_exposure_end_date",
    ),
    "procedure": Events(
        "procedure_occurrence", "procedure_occurrence_id", "procedure_date", "procedure_datetime",
        "procedure_concept_id",
    ),
    "measurement": Events(
        "measurement", "measurement_id", "measurement_date", "measurement_datetime", "measurement_concept_id",
        has_values=True, has_operators=True,
    ),
    "observation": Events(
        "observation", "observation_id", "observation_date", "observation_datetime", "observation_concept_id",
        has_values=True,
    ),
    "death": Events("death", "person_id", "death_date", "death_datetime", None),
}  # fmt: skip
"""The tables of events by the name that a definition has for them."""
TRAITS = {
    "gender": "gender_concept_id",
    "race": "race_concept_id",
    "ethnicity": "ethnicity_concept_id",
}
"""The columns of concepts in the table `person`, by the name that a definition has for them."""
PERSON_COLUMNS = ("person_id", "year_of_birth", "month_of_birth", "day_of_birth", *TRAITS.values())
PERIOD_COLUMNS = ("person_id", "observation_period_start_date", "observation_period_end_date")
ANCESTOR_COLUMNS = ("ancestor_concept_id", "descendant_concept_id")
