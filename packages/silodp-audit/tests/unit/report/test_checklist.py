"""Checklists of reports: every assumption has an id, and only answers to the very statements of a report count."""

from __future__ import annotations

from pathlib import Path

import pytest

from silodp.accounting.guarantee import Guarantee, list_assumptions
from silodp.accounting.views import ADVERSARIES, Adversary, View
from silodp.assumption import Assumption, as_assumptions
from silodp.report import facts
from silodp.report.statements import Statement, list_statements
from silodp_audit.report.checklist import (
    MAX_BYTES,
    read_checklist,
    write_checklist,
)
from support.refusals import refused

RUN = "0123456789abcdef"


def guarantees(*more: Assumption | str) -> dict[Adversary, Guarantee]:
    return {
        adversary: Guarantee(
            adversary=adversary,
            unit="user",
            epsilon=2.0,
            delta=1e-5,
            rounds=3,
            accountant="pld",
            method="uldp-avg",
            private=True,
            releasable=True,
            assumptions=(*list_assumptions(View(adversary, 4)), *as_assumptions(more)),
        )
        for adversary in ADVERSARIES
    }


@pytest.fixture
def statements() -> tuple[Statement, ...]:
    return list_statements(facts.list_assumptions(guarantees()))


@pytest.fixture
def filled(tmp_path: Path, statements: tuple[Statement, ...]) -> str:
    path = tmp_path / "list.toml"
    write_checklist(path, statements, RUN)
    text = path.read_text()
    for name, answer in {"confirmed": "no", "by": "A. Person", "role": "officer"}.items():
        text = text.replace(f'\n{name} = ""', f'\n{name} = "{answer}"')
    return text.replace('\ndate = ""', "\ndate = 2026-11-26")


def read(text: str, statements: tuple[Statement, ...]) -> None:
    read_checklist(text.encode(), "list.toml", statements, RUN)


def test_answers_are_read_back(filled: str, statements: tuple[Statement, ...]) -> None:
    answers = read_checklist(filled.encode(), "list.toml", statements, RUN)
    assert list(answers) == [one.id for one in statements]
    assert {(one.confirmed, one.by, one.date, one.evidence) for one in answers.values()} == {
        ("no", "A. Person", "2026-11-26", "")
    }


def test_technical_assumptions_are_no_statements(statements: tuple[Statement, ...]) -> None:
    assumed = {one for guarantee in guarantees().values() for one in guarantee.assumptions}
    assert {one.id for one in statements} == {one.id for one in assumed if not one.technical}
    assert {one.id for one in statements} < {one.id for one in assumed}


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        (RUN, "another", "report.contradicted"),
        ("collude", "work", "report.contradicted"),  # a statement in easier words
        ("[statements.no-collusion]", "[statements.other]", "report.contradicted"),
        (
            "[statements.no-collusion]",
            '[statements.more]\ntext = "x"\n[statements.no-collusion]',
            "report.contradicted",
        ),
        ('confirmed = "no"', 'confirmed = ""', "report.unsigned"),
        ('by = "A. Person"', 'by = ""', "report.unsigned"),
        ('role = "officer"', "", "report.unsigned"),
        ("date = 2026-11-26", "", "report.unsigned"),
        ('confirmed = "no"', 'confirmed = "perhaps"', "report.checklist"),
        ('confirmed = "no"', "confirmed = true", "report.checklist"),
        ("date = 2026-11-26", 'date = "26.11.2026"', "report.checklist"),
        ("date = 2026-11-26", "date = 2026-11-26T08:00:00Z", "report.checklist"),
        ('by = "A. Person"', r'by = "A\u001b[2J"', "report.checklist"),
        ('by = "A. Person"', 'by = "A"\nmore = 1', "report.checklist"),
        ("format = 1", "format = 2", "report.checklist"),
        ("format = 1", "format = 1\nformat = 1", "report.checklist"),
        ("[statements.same", "[[statements", "report.checklist"),
        ("format = 1", f"a = {'[' * 200}{']' * 200}\nformat = 1", "report.checklist"),
        ("format = 1", f"# {'x' * MAX_BYTES}\nformat = 1", "report.checklist"),
    ],
)
def test_what_is_no_answer_to_this_report_is_refused(
    filled: str, statements: tuple[Statement, ...], old: str, new: str, code: str
) -> None:
    read(filled, statements)
    place = filled.rindex(old)
    with refused(code):
        read(filled[:place] + new + filled[place + len(old) :], statements)


def test_what_is_no_text_is_refused(statements: tuple[Statement, ...]) -> None:
    for content in (b"\xff", b"", b"format = 1", b"statements = 3\nformat = 1\nrun = 1"):
        with refused("report.checklist"):
            read_checklist(content, "list.toml", statements, RUN)


def test_a_file_that_people_filled_is_never_replaced(
    tmp_path: Path, statements: tuple[Statement, ...]
) -> None:
    path = tmp_path / "list.toml"
    path.write_text("answers")
    with refused("report.exists"):
        write_checklist(path, statements, RUN)
    assert path.read_text() == "answers"
    with refused("report.checklist"):
        write_checklist(tmp_path / "none.toml", (), RUN)


def test_texts_of_elsewhere_get_ids_by_their_content() -> None:
    taken = Assumption("no-collusion", "an id that is taken", "somebody else")
    more = ("a text of a plug-in", "another text", taken)
    listed = list_statements(facts.list_assumptions(guarantees(*more)))
    found = {one.text: one.id for one in listed}
    assert found["a text of a plug-in"].startswith("declared-")
    assert len(set(found.values())) == len(found) == len(listed)
    # The same text has the same id, whatever stands beside it.
    (alone,) = (
        one for one in list_statements(facts.list_assumptions(guarantees(more[0]))) if one.text == more[0]
    )
    assert alone.id == found["a text of a plug-in"]
