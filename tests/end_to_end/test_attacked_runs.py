"""What a report says of an attack: from attack.json alone, which must be of this run and must not hide a failure.

The files are made up, so that every verdict can be shown without a faulty program.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from silodp.cli.run import run_config
from silodp.config.resolve import load_config
from silodp.errors import SilodpError
from silodp.report.formatting import format_lower_limit
from silodp.report.run_record import read_guarantees, read_run
from silodp_audit.report.attacks import (
    CANNOT_SHOW,
    EVALUATION,
    LEAKS,
    OTHER_NOISE,
    describe_for_card,
    parse_attack,
)
from support.attacked import make_attack, make_noise, make_view, write_attack
from support.commands import CONFIG, Silodp, assert_sentence

TOO_MUCH = ("verified", "anonymous", "safe")
"""Words that no attack can bear out."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds whose noise is secret, in a directory that no test changes."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "small.toml").write_text(CONFIG.replace("seed = 1\n", ""))
    run_config(load_config(folder / "small.toml"), folder / "run")
    return folder / "run"


@pytest.fixture
def directory(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def promise(directory: Path, adversary: Any) -> float:
    epsilon = read_guarantees(directory)[1][adversary].epsilon
    assert epsilon is not None
    return epsilon


def show(silodp: Silodp, directory: Path) -> tuple[str, str, str]:
    """Return what `silodp report` prints, the section of the page, and the card."""
    outcome = silodp("report", directory)
    assert outcome.status == 0, outcome
    page = (directory / "report.html").read_text()
    found = re.search(r'<section id="attacked".*?</section>', page, re.DOTALL)
    assert found is not None
    return outcome.out, found[0], (directory / "MODEL_CARD.md").read_text()


def get_code(directory: Path) -> str:
    with pytest.raises(SilodpError) as error:
        read_run(directory)
    assert "\n" not in str(error.value)
    return error.value.code


@pytest.mark.pictures
def test_an_attack_that_found_nothing(silodp: Silodp, directory: Path) -> None:
    write_attack(directory, make_attack(directory))
    before = {path: path.read_bytes() for path in directory.glob("checkpoint/**/*") if path.is_file()}
    printed, section, card = show(silodp, directory)
    # Released and server see the same numbers, and so does the made-up silo, whose promise is smaller.
    assert section.count("<figure") == 2
    assert {"attack.svg", "noise.svg"} <= {path.name for path in (directory / "plots").iterdir()}
    assert "1,500 made-up persons" in section
    # The upper limit is above the promise, and the page says why that contradicts nothing.
    for text in (
        "66.4 %",
        "1,500 pairs",
        "over 22 %",
        "only a lower limit above the promise",
    ):
        assert text in section
    assert re.search(r"<small>6\d\.\d to \d\d\.\d</small>", section)
    assert "right guesses" not in section.lower()
    for text in (section, card, printed):
        assert "evaluation" not in text
    for text in (section, card):
        assert "a linear model on made-up records, and not the model of the run" in text
    for sentence in CANNOT_SHOW:
        assert sentence in section
    assert "a silo that drops out" in section.lower()
    assert 'role="alert"' not in section
    assert LEAKS not in printed
    assert "**Attacked**" in card
    epsilon = promise(directory, "released")
    assert f"ε ≥ {format_lower_limit(0.86 * epsilon)}" in card
    for text in (section, card, printed):
        assert not [word for word in TOO_MUCH if re.search(rf"\b{word}\b", text, re.IGNORECASE)]
    assert before == {path: path.read_bytes() for path in before}


@pytest.mark.parametrize(("tests", "how"), [([], "was not attacked"), (["noise"], "was attacked by itself")])
def test_the_card_names_the_epsilon_that_was_attacked(directory: Path, tests: list[str], how: str) -> None:
    """An evaluation by sums makes the ε of the run larger than that of the rounds, which alone are attacked."""
    made = make_attack(directory, model="config")
    named = [{**made["noise"][0], "test": f"{EVALUATION}{test}"} for test in tests]
    record = parse_attack({**made, "noise": [*made["noise"], *named]})
    card = describe_for_card(record, record.rounds, evaluated=True)
    assert f"that of the rounds of training, without the evaluation, which {how}" in card
    assert "Nothing contradicts that ε" in card
    assert "with the model of the run on made-up records" in card
    assert "evaluation" not in describe_for_card(record, record.rounds, evaluated=False)


def test_adversaries_that_see_the_same_share_a_row(silodp: Silodp, directory: Path) -> None:
    write_attack(directory, make_attack(directory))
    _, section, _ = show(silodp, directory)
    assert promise(directory, "released") == promise(directory, "server") > promise(directory, "silo")
    assert section.count('data-label="Verdict"') == 2


@pytest.mark.parametrize("verdict", ["violation", "noise"])
def test_a_fault_comes_first_everywhere(silodp: Silodp, directory: Path, verdict: str) -> None:
    record = make_attack(directory, noise=make_noise(0.5))
    if verdict == "violation":
        views = [make_view("server", promise(directory, "server"), leak=2.0)]
        record = make_attack(directory, adversaries=views, noise=make_noise(0.5))
    assert record["verdict"] == verdict
    write_attack(directory, record)
    printed, section, card = show(silodp, directory)
    alarm = LEAKS if verdict == "violation" else OTHER_NOISE
    assert printed.startswith(alarm)
    assert alarm in section
    page = (directory / "report.html").read_text()
    assert page.index(alarm) < page.index('id="guarantee"')
    assert card.index(alarm) < card.index("## ")
    assert "Not for release" in card
    assert "All that this card says is public" not in card
    assert "Nothing contradicts" not in section or verdict == "noise"
    assert json.loads(silodp("report", directory, "--json").out)["attack"] == verdict


def test_what_nobody_attacked_is_said_in_one_line(silodp: Silodp, directory: Path) -> None:
    printed, section, card = show(silodp, directory)
    assert f"silodp attack {directory}" in printed
    assert "silodp attack DIR" in section
    assert section.count("<p>") == 1
    assert "**Attacked**: unknown" in card
    assert json.loads(silodp("report", directory, "--json").out)["attack"] is None


def test_views_without_a_promise_or_without_a_look_pass_for_nothing_tested(
    silodp: Silodp, directory: Path
) -> None:
    epsilon = promise(directory, "silo")
    unseen = {
        **make_view("silo", epsilon),
        "measured": None,
        "verdict": "not seen",
        "reason": "of a plug-in, <b>nothing</b> is known",
    }
    write_attack(directory, make_attack(directory, adversaries=[unseen], noise=[]))
    _, section, card = show(silodp, directory)
    assert "nothing was measured: of a plug-in, &lt;b&gt;nothing&lt;/b&gt; is known" in section
    assert "<figure" not in section
    assert "ε ≥" not in card
    assert "nothing contradicts" not in card


def test_a_run_without_guarantee_is_attacked_too(silodp: Silodp, tmp_path: Path) -> None:
    (tmp_path / "open.toml").write_text(CONFIG.replace("noise_multiplier = 5.0", "noise_multiplier = 0.0"))
    run_config(load_config(tmp_path / "open.toml"), tmp_path / "run")
    write_attack(tmp_path / "run", make_attack(tmp_path / "run", noise=[]))
    _, section, _ = show(silodp, tmp_path / "run")
    assert "nothing is promised: counts disclosed" in section
    assert "no guarantee" in section


def test_an_attack_on_fewer_rounds_says_so(silodp: Silodp, directory: Path) -> None:
    views = [make_view("released", promise(directory, "released") / 2)]
    write_attack(directory, make_attack(directory, rounds=1, adversaries=views))
    _, section, _ = show(silodp, directory)
    assert "1 of 2 rounds" in section
    write_attack(directory, make_attack(directory, rounds=9, claimed_rounds=9))
    _, section, card = show(silodp, directory)
    assert "attack it again" in section
    assert "attack it again" in card


def test_pictures_of_an_attack_that_was_deleted_go(silodp: Silodp, directory: Path) -> None:
    write_attack(directory, make_attack(directory))
    show(silodp, directory)
    assert (directory / "plots" / "attack.svg").exists()
    (directory / "attack.json").unlink()
    show(silodp, directory)
    assert not (directory / "plots" / "attack.svg").exists()


def test_another_run_is_refused(silodp: Silodp, directory: Path) -> None:
    write_attack(directory, make_attack(directory, spec="0" * 64))
    assert_sentence(silodp("report", directory), code="report.contradicted")
    # Without the digest of this run, any attack could be shown beside its ε.
    write_attack(directory, make_attack(directory))
    (directory / "run_spec.json").unlink()
    shutil.rmtree(directory / "checkpoint")
    assert get_code(directory) == "report.contradicted"


def test_a_weaker_promise_than_that_of_the_run_is_refused(directory: Path) -> None:
    epsilon = promise(directory, "released")
    write_attack(directory, make_attack(directory, adversaries=[make_view("released", 1.01 * epsilon)]))
    assert get_code(directory) == "report.contradicted"
    write_attack(directory, make_attack(directory, adversaries=[make_view("released", None)]))
    assert get_code(directory) == "report.contradicted"
    write_attack(directory, make_attack(directory, adversaries=[make_view("released", 0.99 * epsilon)]))
    assert read_run(directory).sections["attack"].measurements is not None


def test_another_format_is_refused_by_its_name(directory: Path) -> None:
    write_attack(directory, {**make_attack(directory), "format": 2})
    assert get_code(directory) == "report.attack_format"
    for wrong in (True, "1", None, 1.0):
        write_attack(directory, {**make_attack(directory), "format": wrong})
        assert get_code(directory) == "report.damaged"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", "{", "[" * 100_000, "\ufeff{}", "1"], ids=lambda text: text[:4]
)
def test_what_is_no_attack_is_refused(directory: Path, text: str) -> None:
    (directory / "attack.json").write_text(text)
    assert get_code(directory) == "report.damaged"


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("verdict",), "consistent."),
        (("level",), 0.5),
        (("level",), 0),
        (("delta",), 1.0),
        (("rounds",), 0),
        (("canaries",), 1 << 63),
        (("adversaries",), []),
        (("adversaries", 1, "adversary"), "released"),
        (("adversaries", 0, "adversary"), "everybody"),
        (("adversaries", 0, "verdict"), "no guarantee"),
        (("adversaries", 0, "verdict"), "not seen"),
        (("adversaries", 0, "measured"), None),
        (("adversaries", 0, "claim"), None),
        (("adversaries", 0, "claim", "epsilon"), -1),
        (("adversaries", 0, "claim", "epsilon"), float("inf")),
        (("adversaries", 0, "claim", "auc"), 1.01),
        (("adversaries", 0, "measured", "auc"), float("nan")),
        (("adversaries", 0, "measured", "wins"), 1501),
        (("adversaries", 0, "measured", "wins"), -1),
        (("adversaries", 0, "measured", "auc_lower"), 0.99),
        (("adversaries", 0, "measured", "p"), "small"),
        (("adversaries", 0, "measured", "roc", "fpr", 3), 0.9),
        (("adversaries", 0, "measured", "roc", "tpr"), [0.1, 0.2]),
        (("adversaries", 0, "measured", "roc", "claimed_tpr"), [0.5] * 61),
        (("noise", 0, "value"), float("inf")),
        (("noise", 0, "passed"), None),
        (("untested",), "nothing"),
    ],
    ids=lambda part: str(part)[:60],
)
def test_a_value_that_cannot_be_is_refused(directory: Path, place: tuple[Any, ...], value: Any) -> None:
    record = make_attack(directory)
    inner: Any = record
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    write_attack(directory, record)
    assert get_code(directory) == "report.damaged"


def test_a_verdict_that_hides_that_of_a_part_is_refused(directory: Path) -> None:
    leaking = [make_view("released", promise(directory, "released"), leak=2.0)]
    for parts in ({"adversaries": leaking}, {"noise": make_noise(0.5)}):
        write_attack(directory, {**make_attack(directory, **parts), "verdict": "consistent"})
        assert get_code(directory) == "report.damaged"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0"), (2.2399, "2.23"), (0.01239, "0.0123"), (12.99, "12.9"), (2.23, "2.23")],
)
def test_a_lower_limit_is_rounded_down(value: float | None, text: str) -> None:
    assert format_lower_limit(value) == text
