"""A configuration may say that a silo's table calls a column by another name, so a policy compares the table's names.

Whoever writes the configuration writes the names in it, too. Compared by them, a run with `patient = "visit"` had the
persons of the earlier runs (each visit was one), and `ill = "hiv"` the label that the policy allows.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from silodp.accounting.events import Gaussian
from silodp.accounting.views import ADVERSARIES
from silodp.config.resolve import load_config
from silodp.data.persons import PersonKey
from silodp.data.tables.schema import Schema
from silodp.runtime.silo import make_ledger
from silodp_deploy.acceptance import describe_agreement, write_policy
from silodp_deploy.cli.deploy import format_agreement
from silodp_deploy.consortium import Consortium
from silodp_deploy.policy import Policy
from silodp_deploy.setup import draft_public, make_keys, seal_public
from silodp_deploy.silo import check_policy, open_silo
from support.deployed import TABLES
from support.refusals import refused

PARTIES = ("server", "north", "south")
FIRST = """categorical = { ward = ["a", "b"], sex = ["f", "m"] }
users = ["p1", "p2", "v1", "v2", "v3"]
split = "part"
"""
NORTH = "[data.schema.silos.north]\n"


def agree(folder: Path, mapping: str = "", schema: str = FIRST) -> Consortium:
    """Return a sealed consortium of the same parties, whose configuration has these further settings."""
    text = TABLES.format(user="patient", index=f"{schema}\n{mapping}", more="")
    (folder / "config.toml").write_text(text)
    resolved = load_config(folder / "config.toml")
    home = folder / f"consortium{len(list(folder.glob('consortium*')))}"
    draft_public(resolved, home / "public", resolved.read_public_data())
    (home / "requests").symlink_to(folder / "requests")
    return seal_public(home, "127.0.0.1", 1)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return the folder of the silo north, whose policy was written for a first run that was charged."""
    (tmp_path / "requests").mkdir()
    for name in PARTIES:
        request = make_keys(tmp_path / name, name)
        request.rename(tmp_path / "requests" / request.name)
    (tmp_path / "north.csv").write_text(
        "patient,visit,age,pay,sex,ward,ill,hiv,part\np1,v1,30,1,f,a,no,yes,train\n"
    )
    first = agree(tmp_path)
    write_policy(tmp_path / "north", first, str(tmp_path / "north.csv"), 50.0)
    with open_silo(tmp_path / "north", first) as service:
        run, events = "0" * 32, dict.fromkeys(ADVERSARIES, Gaussian(50.0))
        path = tmp_path / "north" / "ledgers" / f"{run}.jsonl"
        with make_ledger(replace(first.spec, run=run), path, header=service._header) as ledger:
            ledger.is_first = True
            ledger.charge(0, 0, events, "0" * 64)
    return tmp_path / "north"


@pytest.mark.parametrize(
    ("mapping", "code", "field"),
    [
        ('columns = { patient = "visit", ill = "hiv" }', "policy.not_allowed", "labels"),
        ('columns = { patient = "visit" }', "policy.persons", "persons"),
        ('columns = { ill = "hiv" }', "policy.not_allowed", "labels"),
        ('columns = { age = "pay" }', "policy.not_allowed", "columns"),
        ('columns = { sex = "hiv" }', "policy.not_allowed", "columns"),
        ('columns = { part = "hiv" }', "policy.not_allowed", "columns"),
        ('values = { sex = { x = "m" } }', "policy.not_allowed", "columns"),
        # Columns that the policy allows, in other places.
        ('columns = { age = "ill", ill = "age" }', "policy.not_allowed", "columns"),
        ('columns = { patient = "ward", ward = "patient" }', "policy.not_allowed", "columns"),
    ],
)  # fmt: skip
def test_a_run_that_renames_columns_of_a_silo_is_refused(
    mapping: str, code: str, field: str, home: Path
) -> None:
    other, policy = agree(home.parent, NORTH + mapping), home / "policy.toml"
    before = policy.read_text()
    with refused(code) as caught:
        write_policy(home, other, str(home.parent / "north.csv"))
    assert (caught.value.field, policy.read_text()) == (field, before)
    # The same where the digest is in the policy already, so that only the silo can see it.
    known = Policy.load(policy)
    policy.write_text(known.model_copy(update={"accepted": [*known.accepted, other.digest]}).to_toml())
    with refused(code) as caught, open_silo(home, other):
        pass
    assert caught.value.field == field


def test_a_sheet_of_the_same_file_is_another_table(home: Path) -> None:
    sheet = '[data.schema.readers]\nnorth = { sheet = "visits" }'
    with refused("policy.not_allowed") as caught:
        write_policy(home, agree(home.parent, sheet), str(home.parent / "north.csv"))
    assert caught.value.field == "columns"


def test_a_text_that_counts_as_missing_and_so_as_a_category_is_compared(home: Path) -> None:
    schema = FIRST.replace('["f", "m"]', '{ categories = ["f", "m"], missing = "m" }')
    missing = '[data.schema.readers]\nnorth = { missing = ["x"] }'
    for settings, is_allowed in ((FIRST, True), (schema, False)):
        other = agree(home.parent, missing, settings)
        allowed = Policy.load(home / "policy.toml").model_copy(update={"accepted": [other.digest]})
        assert ("sex=x" in other.list_columns("north")["columns"]) != is_allowed
        if is_allowed:
            check_policy(allowed, other, "north")
            continue
        with refused("policy.not_allowed") as caught:
            check_policy(allowed, other, "north")
        assert caught.value.field == "columns"


def test_a_column_of_budgets_is_the_one_that_was_allowed(home: Path) -> None:
    """Another column would say how much ε each record may be charged."""
    policy = Policy.load(home / "policy.toml")
    assert policy.budget == []
    columns = {"columns": [], "labels": [], "budget": ["age"], "queries": []}
    spec = Consortium.load(home.parent / "consortium0" / "public").stated_spec
    policy.check(policy.accepted[0], spec, columns)
    with refused("policy.not_allowed") as caught:
        policy.model_copy(update={"budget": ["eps"]}).check(policy.accepted[0], spec, columns)
    assert caught.value.field == "budget"


def test_a_query_is_one_that_the_operator_has_read(home: Path) -> None:
    """By the names alone, `SELECT hiv AS ill` would have the columns that the policy allows."""
    query = "SELECT patient, age, sex, ward, hiv AS ill, part FROM visits"
    other, policy = agree(home.parent, f'{NORTH}query = "{query}"'), home / "policy.toml"
    assert {**other.list_columns("north"), "queries": []} == agree(home.parent).list_columns("north")
    with refused("policy.not_allowed") as caught:
        write_policy(home, other, "north.sqlite")
    assert caught.value.field == "queries"
    known = Policy.load(policy).model_copy(update={"accepted": [other.digest]})
    for queries, is_allowed in (([], False), ([query + " "], False), ([query], True)):
        asked = known.model_copy(update={"queries": queries})
        if is_allowed:
            check_policy(asked, other, "north")
            check_policy(asked, other, "south")
            continue
        with refused("policy.not_allowed") as caught:
            check_policy(asked, other, "north")
        assert caught.value.field == "queries"


def test_who_accepts_reads_the_query_and_it_alone_is_allowed(tmp_path: Path, home: Path) -> None:
    query = "SELECT patient, age, sex, ward,\n hiv AS ill, part\nFROM visits \u001b[8m WHERE 1"
    other = agree(tmp_path, f"{NORTH}query = {json.dumps(query + ' ; ')}")
    assert other.list_columns("north")["queries"] == [query]
    for silo in ("north", "south", None):
        lines = format_agreement(describe_agreement(other, silo))
        start = lines.index("    SELECT patient, age, sex, ward,")
        assert lines[start + 1 : start + 3] == ["     hiv AS ill, part", "    FROM visits \\x1b[8m WHERE 1"]
    name = tmp_path / "new"
    (home.parent / "north").rename(name)
    (name / "policy.toml").unlink()
    shutil.rmtree(name / "ledgers")
    assert write_policy(name, other, "north.sqlite").queries == [query]
    assert Policy.load(name / "policy.toml").queries == [query]


def test_a_mapping_of_another_silo_changes_nothing_here(home: Path) -> None:
    mapping = '[data.schema.silos.south]\ncolumns = { patient = "visit", ill = "hiv", age = "pay" }'
    other = agree(home.parent, mapping)
    write_policy(home, other, str(home.parent / "north.csv"))
    assert other.digest in Policy.load(home / "policy.toml").accepted
    assert other.identify_persons("north") == agree(home.parent).identify_persons("north")
    assert other.identify_persons("south") != other.identify_persons("north")


def test_a_table_whose_names_a_policy_has_may_be_read_by_other_names(home: Path) -> None:
    """The names of a configuration may change, as long as the table's columns stay the same."""
    text = (home.parent / "config.toml").read_text()
    for ours, common in (("patient", "person"), ("age", "years"), ("ill", "disease"), ("part", "split_of")):
        text = text.replace(f"{ours} =", f"{common} =").replace(f'"{ours}"', f'"{common}"')
    mapping = 'columns = { person = "patient", years = "age", disease = "ill", split_of = "part" }'
    (home.parent / "config.toml").write_text(text.replace("[method]", f"{NORTH}{mapping}\n[method]", 1))
    resolved = load_config(home.parent / "config.toml")
    folder = home.parent / "renamed"
    draft_public(resolved, folder / "public", resolved.read_public_data())
    (folder / "requests").symlink_to(home.parent / "requests")
    other = seal_public(folder, "127.0.0.1", 1)
    assert other.list_columns("") != other.list_columns("north") == agree(home.parent).list_columns("north")
    write_policy(home, other, str(home.parent / "north.csv"))


def test_who_accepts_reads_what_is_taken_from_their_table(tmp_path: Path, home: Path) -> None:
    mapping = 'columns = { patient = "visit", ill = "hiv" }\nvalues = { sex = { w = "f" } }'
    other = agree(tmp_path, NORTH + mapping)
    agreed = describe_agreement(other, "north")
    assert agreed["persons"]["column"] == "visit"
    assert agreed["persons"]["digest"] == other.identify_persons("north").digest
    assert agreed["table"] == other.list_columns("north")
    assert agreed["table"]["labels"] == ["hiv"]
    assert {"sex=w", "sex=m"} <= set(agreed["table"]["columns"])
    assert (agreed["labels"], describe_agreement(other)["table"]) == (["ill"], None)
    lines = "\n".join(format_agreement(agreed))
    for column, theirs in (("patient", "visit"), ("ill", "hiv")):
        assert f"in this silo the column '{theirs}' is '{column}'" in lines
        assert f"in silo north the column '{theirs}'" in "\n".join(
            format_agreement(describe_agreement(other))
        )


def test_a_simulation_whose_silos_name_persons_otherwise_has_other_persons() -> None:
    """Its cohort adds up ε of one person, by this key."""
    schema = Schema(user="patient", label="ill", classes=["no", "yes"], numeric={"age": (0, 9)}, users=["p"])
    one = PersonKey.of(schema, "tables", 1)
    mapped = replace(schema, silos={"south": {"columns": {"patient": "visit"}}})
    other = replace(schema, silos={"south": {"columns": {"patient": "stay"}}})
    sheet = replace(schema, readers={"south": {"sheet": "visits"}})
    keys = [one, *(PersonKey.of(changed, "tables", 1) for changed in (mapped, other, sheet))]
    assert len({key.digest for key in keys}) == 4
    assert PersonKey.of(replace(schema, silos={"south": {"columns": {"age": "x"}}}), "tables", 1) == one
