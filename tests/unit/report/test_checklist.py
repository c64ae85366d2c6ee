"""Checklists of reports: every assumption has an id, and only answers to the very statements of a report count."""

from __future__ import annotations

from pathlib import Path

import pytest

from silodp.accounting.guarantee import (
    LOCAL_INDEX,
    OTHER_CODE,
    PUBLIC_VALUES,
    TECHNICAL,
    Guarantee,
    list_assumptions,
)
from silodp.accounting.views import ADVERSARIES, Adversary, View
from silodp.aggregators import attempts, lattice, paillier
from silodp.aggregators._private_sampling import ASSUMPTION
from silodp.data.public import ASSUMES_INDEX_BY_PROFILE, ASSUMES_INDEX_FROM_TABLES
from silodp.data.tables.schema import ASSUMES_CLIPPING, ASSUMES_SPLIT
from silodp.methods import Ddp, UldpAvg
from silodp.methods.rpdp.method import Rpdp
from silodp.methods.rpdp.renyi_filter import RpdpFilter
from silodp.methods.uldp_baselines import UldpGroup
from silodp.methods.user_budgets import UserBudgets
from silodp.report import facts
from silodp.report.checklist import (
    MAX_BYTES,
    read_checklist,
    write_checklist,
)
from silodp.report.statements import Statement, _look_up, list_statements
from silodp.runtime.guarantees import delta_warning
from silodp.training.sgd import LocalTraining
from support.refusals import refused

RUN = "0123456789abcdef"


def guarantees(*more: str) -> dict[Adversary, Guarantee]:
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
            assumptions=(*list_assumptions(View(adversary, 4)), *more),
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
    texts = {text for one in guarantees().values() for text in one.assumptions}
    assert {one.text for one in statements} == {text for text in texts if not text.startswith(TECHNICAL)}


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
    texts = (
        "a text of a plug-in",
        "how many records each silo has is public",
        "how many records each silo has: 3",
    )
    found = {one.text: one.id for one in list_statements(facts.list_assumptions(guarantees(*texts)))}
    assert found["a text of a plug-in"].startswith("declared-")
    assert len(set(found.values())) == len(found)
    # The same text has the same id, whatever stands beside it.
    (alone,) = (
        one for one in list_statements(facts.list_assumptions(guarantees(texts[0]))) if one.text == texts[0]
    )
    assert alone.id == found[texts[0]]


def test_every_assumption_of_silodp_has_an_id() -> None:
    local = LocalTraining(learning_rate=0.1)
    by_clip = UserBudgets(by="clip", rounds=3, largest_budget=2.0)
    steps = {"noise_multiplier": 1.0, "clip": 1.0, "local_steps": 2, "expected_batch_size": 8.0}
    rpdp = {**steps, "delta": 1e-5, "local_learning_rate": 0.5, "largest_budget": 3.0}
    methods = (
        UldpAvg(noise_multiplier=1.0, clip=1.0, local=local, personal=by_clip),
        UldpGroup(5.0, 0.1, 8, 0.05, 10, 6.0, 0.001),
        Ddp(**steps, record_sampling=0.4, local_learning_rate=0.5),
        RpdpFilter(**rpdp),
        Rpdp(**rpdp, rounds=3, client_sampling=0.5),
    )
    texts = {
        *(text for one in guarantees().values() for text in one.assumptions),
        *list_assumptions(View("silo", 4), public_index=False, samples_users=True),
        *list_assumptions(View("server", 4), samples_users=True, separate=True),
        *(LOCAL_INDEX, OTHER_CODE, PUBLIC_VALUES, ASSUMES_CLIPPING, ASSUMES_SPLIT, ASSUMPTION),
        *(ASSUMES_INDEX_BY_PROFILE, ASSUMES_INDEX_FROM_TABLES),
        *(*attempts.MASKING_ASSUMPTIONS, *lattice.ASSUMPTIONS, *paillier.ASSUMPTIONS),
        *delta_warning(0.1, 100),
        *(text for method in methods for text in method.assumptions),
    }
    unknown = [text for text in texts if not text.startswith(TECHNICAL) and _look_up(text)[0] == "declared"]
    assert unknown == []
