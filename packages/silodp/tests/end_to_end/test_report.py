"""The report of a run, from files that look like a run's."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markupsafe import escape

import silodp
from silodp.accounting.guarantee import NOT_COVERED, Guarantee, list_assumptions
from silodp.accounting.trade_off import TradeOff
from silodp.accounting.views import ADVERSARIES, View
from silodp.assumption import as_assumptions
from silodp.errors import SilodpError
from silodp.report.formatting import (
    as_clause,
    format_accuracy,
    format_odds,
    format_rate,
    without_folders,
)
from silodp.report.page import write_report
from silodp.report.run_record import Allocation, keep_allocation
from support.rewriting import summarize_run

ROUNDS = 60
CONFIG = """\
name = "heart"
rounds = 60
delta = 1e-5

[data]
source = "heart_disease"
users = 50

[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 1.0
user_sampling = 0.5
note = "</pre><script>alert(1)</script>"
"""


def guarantee(adversary: Any, epsilon: float | None, **changes: Any) -> Guarantee:
    made = Guarantee(
        adversary=adversary,
        unit="user",
        epsilon=epsilon,
        delta=1e-5,
        rounds=ROUNDS,
        accountant="pld",
        method="uldp-avg",
        private=epsilon is not None,
        releasable=epsilon is not None,
        reason=None if epsilon is not None else "counts disclosed: weights in clear",
        assumptions=() if epsilon is None else list_assumptions(View(adversary, 4)),
        not_covered=NOT_COVERED,
    )
    return replace(made, **changes)


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """As `silodp run` leaves it: 60 rounds of uldp-avg, an ε per adversary, evaluated every second round."""
    directory = tmp_path / "run"
    directory.mkdir()
    generator = np.random.default_rng(3)
    rows = []
    for round_ in range(ROUNDS + 1):
        row: dict[str, Any] = {"round": round_, "seconds": 0.21, "refused": {}}
        if round_ % 2 == 0:
            fall = math.exp(-round_ / 18)
            row["loss"] = 0.42 + 0.3 * fall + 0.008 * generator.standard_normal()
            accuracy = 0.8 - 0.32 * fall + 0.01 * generator.standard_normal()
            row["metrics"] = {"accuracy": accuracy, "roc_auc": math.nan if round_ == 4 else accuracy + 0.06}
        scale = math.sqrt(round_ / ROUNDS)
        row["epsilon"] = {"released": 3.3961 * scale, "server": 5.02 * scale, "silo": 6.41 * scale}
        rows.append(row)
    rows[7]["refused"] = {"hungarian": 2}
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "config.toml").write_text(CONFIG)
    (directory / "model.safetensors").write_bytes(b"parameters")
    write_guarantees(
        directory, [guarantee(a, e) for a, e in zip(ADVERSARIES, (3.3961, 5.02, 6.41), strict=True)]
    )
    return directory


def broken(**changes: Any) -> str:
    made = [guarantee(adversary, 2.0) for adversary in ADVERSARIES]
    stated = [one.to_dict() | changes for one in made]
    return json.dumps(summarize_run(method="m", settings="M()", rounds=ROUNDS, guarantees=stated))


def write_guarantees(directory: Path, guarantees: list[Guarantee]) -> None:
    fields = summarize_run(
        method="uldp-avg",
        settings="UldpAvg(noise_multiplier=5.0, clip=1.0)",
        rounds=ROUNDS,
        private=guarantees[0].private,
        guarantees=[one.to_dict() for one in guarantees],
    )
    (directory / "guarantee.json").write_text(json.dumps(fields))


def counts(users: int = 50, silos: int = 4, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    totals = generator.zipf(1.6, users).clip(max=60)
    shares = generator.dirichlet([0.3] * silos, users)
    return np.stack([generator.multinomial(n, p) for n, p in zip(totals, shares, strict=True)], axis=1)


class Page(HTMLParser):
    """Checks that tags close in order, and collects ids and what refers to something."""

    VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "action", "data", "srcset"):
                self.references.append(value or "")
            self.references += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def report(directory: Path, records: Any = None, silo_names: Sequence[str] = ()) -> str:
    if records is not None:
        keep_allocation(directory, Allocation.from_counts(np.asarray(records), silo_names))
    path = write_report(directory)
    assert path == directory / "report.html"
    return path.read_text()


@pytest.mark.pictures
def test_the_guarantee_comes_before_any_picture(run_directory: Path) -> None:
    text = report(run_directory, counts(), ["cleveland", "hungarian", "switzerland", "va"])
    first = text.index("<svg")
    for words in (
        "ε&nbsp;=&nbsp;3.397",
        "A person: all their records",
        "even odds",
        "This run was a simulation in one process.",
        "1 in 100,000",
        'href="#to-sign"',
    ):
        assert text.index(words) < first
    assert "6.41" in text
    assert "5.02" in text
    assert "No guarantee" not in text
    assert "Not for release" not in text
    assert "hungarian" in text
    assert text.count("<svg") == 5  # loss, two metrics, ε, records per person


def test_the_page_is_well_formed_and_refers_to_nothing_outside(run_directory: Path) -> None:
    text = report(run_directory, counts())
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    assert all(reference.startswith("#") for reference in page.references)
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert "script" not in page.tags
    assert "@import" not in text
    assert "http" not in text
    assert len(text.encode()) < 1_500_000


def test_what_is_missing_for_an_adversary_is_said(run_directory: Path) -> None:
    write_guarantees(
        run_directory, [guarantee("released", 3.3961), guarantee("server", None), guarantee("silo", None)]
    )
    text = report(run_directory)
    assert text.count("no guarantee</span><small>counts disclosed: weights in clear") == 2
    assert "Nothing here is private" not in text


def test_a_run_without_privacy_says_so_first(run_directory: Path) -> None:
    reason = "the method 'default' adds no noise"
    write_guarantees(run_directory, [guarantee(a, None, unit=None, reason=reason) for a in ADVERSARIES])
    text = report(run_directory)
    assert text.index("Nothing here is private.") < text.index("<svg")
    assert "the method &#39;default&#39; adds no noise" in text
    assert "is protected" not in text


def test_a_seeded_run_is_not_for_release(run_directory: Path) -> None:
    write_guarantees(run_directory, [guarantee(a, 2.0, releasable=False) for a in ADVERSARIES])
    text = report(run_directory)
    assert text.index("Not for release.") < text.index("protected by")
    assert "With secret noise, which this run does not have, each" in text
    assert "is protected by" not in text


def test_the_directory_alone_gives_the_same_text(run_directory: Path) -> None:
    first = report(run_directory, counts(), ["a", "b", "c", "d"])
    assert report(run_directory) == first


def test_the_private_picture_goes_with_its_file(run_directory: Path) -> None:
    assert "private counts" in report(run_directory, counts())
    assert (run_directory / "plots" / "allocation.svg").exists()
    (run_directory / "plots" / "allocation.json").unlink()
    assert "private counts" not in report(run_directory)
    assert not (run_directory / "plots" / "allocation.svg").exists()


@pytest.mark.pictures
def test_many_persons_and_silos_stay_small(run_directory: Path) -> None:
    many = counts(users=20_000, silos=50)
    text = report(run_directory, many)
    assert "400 steps of about 50 persons" in text
    assert f"The most records of one person: {many.sum(axis=0).max()}" in text
    assert "44 other silos" in text
    assert len(text.encode()) < 1_500_000
    assert (run_directory / "plots" / "allocation.json").stat().st_size < 300_000


def test_the_kept_counts_are_right(run_directory: Path) -> None:
    small = np.array([[3, 0, 0, 1], [2, 0, 1, 1]])
    report(run_directory, small, ["a", "b"])
    kept = json.loads((run_directory / "plots" / "allocation.json").read_text())
    assert kept["bars"] == [[3, 1, 0], [2, 1, 1]]
    assert (kept["persons"], kept["without_records"], kept["in_several_silos"]) == (4, 1, 2)


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "$\\frac{", "_hidden", "病院", 'a"b&c', "x" * 300]
)
def test_names_cannot_break_the_page(run_directory: Path, name: str) -> None:
    rows = [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()]
    rows[3]["refused"] = {name: 1}
    for row in rows:
        if "metrics" in row:
            row["metrics"] = {name: row["metrics"]["accuracy"]}
    (run_directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = report(run_directory, counts(), [name, "b", "c", "d"])
    page = Page(text)
    assert "script" not in page.tags
    assert len(page.ids) == len(set(page.ids))


def test_the_configuration_is_shown_escaped(run_directory: Path) -> None:
    text = report(run_directory)
    assert "&lt;script&gt;alert(1)" in text
    assert "noise_multiplier = 5.0" in text


def test_refused_updates_are_counted(run_directory: Path) -> None:
    assert "2 from hungarian" in report(run_directory)


def test_held_out_records_are_spoken_of_only_where_there_are_some(run_directory: Path) -> None:
    held_out = "records held out for testing"
    assert held_out in report(run_directory)
    rows = [{"round": r, "loss": None, "metrics": {}, "epsilon": {}} for r in range(3)]
    (run_directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = report(run_directory)
    assert held_out not in text
    assert "further runs on the same people" in text


def test_a_diverged_run_is_no_result(run_directory: Path) -> None:
    assert "This is no result" not in report(run_directory)
    with (run_directory / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"round": 61, "loss": 8.0, "metrics": {"accuracy": 0.5, "roc_auc": 0.5}}) + "\n"
        )
    text = report(run_directory)
    assert "This is no result:</strong> the loss is 8 after round 61" in text


def test_where_it_comes_from(run_directory: Path) -> None:
    os.utime(run_directory / "guarantee.json", (0, 1_750_000_000))
    path = run_directory / "guarantee.json"
    stated = json.loads(path.read_text())
    path.write_text(json.dumps({**stated, "finished": "2024-02-29T15:06:07+00:00"}))
    text = report(run_directory)
    assert "2024-02-29 15:06 UTC" in text
    assert "2025-06-15" not in text
    assert f"silodp {silodp.__version__}, torch {version('torch')}" in text
    assert hashlib.sha256(b"parameters").hexdigest() in text
    assert "none was set" in text
    (run_directory / "config.toml").write_text(f"# Written by silodp 0\n{CONFIG}\n[budget]\nepsilon = 4.0\n")
    text = report(run_directory)
    assert "ε ≤ 4.0 at δ = 0.00001 against whoever sees the models;\nspent: 3.397" in text
    assert "the first line of config.toml" in text


def test_every_assumption_stands_once_under_whom_it_is_made_against(run_directory: Path) -> None:
    """As under secure aggregation: some for all, some for server and silos, the rest for one."""
    both = ("the keys were checked", "no key was sold")
    made = [
        guarantee(
            a,
            2.0,
            assumptions=as_assumptions(
                ("ids are shared", f"of {a} alone", *(both if a != "released" else ()))
            ),
        )
        for a in ADVERSARIES
    ]
    write_guarantees(run_directory, made)
    text = report(run_directory)
    start = text.index("Assumptions that somebody must sign")
    listed = text[start : text.index("</section>", start)]
    rows = re.findall(r"<tr><td>(.*?)</td><td[^>]*>(.*?)</td>", listed)
    assert sorted(rows) == sorted(
        [
            ("ids are shared", "against every adversary"),
            *((one, "against the server and another silo") for one in both),
            ("of released alone", "against whoever sees the models"),
            ("of server alone", "against the server"),
            ("of silo alone", "against another silo"),
        ]
    )


def test_where_all_assumptions_are_shared_each_is_listed_once(run_directory: Path) -> None:
    made = [guarantee("released", 2.0), guarantee("server", None), guarantee("silo", None)]
    write_guarantees(run_directory, made)
    text = report(run_directory)
    assert "also:" not in text
    for assumption in made[0].assumptions:
        assert text.count(str(escape(as_clause(assumption.text)))) == 1


def test_an_assumption_ends_the_sentence_that_it_stands_in() -> None:
    assert as_clause("Some persons are in both. Others not.") == "some persons are in both. Others not"
    assert as_clause("SGD is run") == "SGD is run"
    assert as_clause("δ = 1 is accepted") == "δ = 1 is accepted"
    assert as_clause("") == ""


@pytest.mark.pictures
def test_a_run_from_python_without_evaluation_has_a_report(run_directory: Path) -> None:
    (run_directory / "config.toml").unlink()
    epsilon = dict.fromkeys(ADVERSARIES, None)
    rows = [{"round": r, "loss": None, "metrics": {}, "epsilon": epsilon} for r in range(3)]
    (run_directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = report(run_directory)
    assert "started from Python" in text
    assert "Nothing was measured" in text
    assert "<svg" not in text


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("metrics.jsonl", None, "is missing"),
        ("guarantee.json", None, "is missing"),
        ("metrics.jsonl", '{"round": 0}\n{"rou', "line 2"),
        ("metrics.jsonl", "[1]\n", "line 1"),
        ("metrics.jsonl", "", "is empty"),
        ("guarantee.json", "{", "damaged"),
        ("guarantee.json", "[]", "damaged"),
        ("guarantee.json", '{"guarantees": [{}]}', "does not hold a guarantee"),
        ("guarantee.json", broken(epsilon=math.nan), "does not hold a guarantee"),
        ("guarantee.json", broken(epsilon=-1.0), "does not hold a guarantee"),
        ("guarantee.json", broken(epsilon="1"), "does not hold a guarantee"),
        ("guarantee.json", broken(private=False), "does not hold a guarantee"),
        ("guarantee.json", broken(delta=0), "does not hold a guarantee"),
        *(
            (
                "guarantee.json",
                json.dumps({**json.loads(broken()), "finished": time}),
                "does not hold a guarantee",
            )
            for time in (
                "yesterday",
                "2024-02-29",
                "2024-02-30T00:00:00+00:00",
                "2024-02-29T00:00:00+02:00",
                None,
                5,
            )
        ),
        ("plots/allocation.json", '{"silos": ["a"], "bars": [], "persons_per_bar": []}', "damaged"),
    ],
)
def test_damage_is_one_sentence(run_directory: Path, name: str, content: str | None, says: str) -> None:
    path = run_directory / name
    path.parent.mkdir(exist_ok=True)
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(SilodpError, match=says) as error:
        write_report(run_directory)
    assert path.name in str(error.value)
    assert "\n" not in str(error.value)


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(SilodpError, match="does not exist"):
        report(tmp_path / "none", counts())


def test_odds_of_a_guess() -> None:
    assert format_accuracy(TradeOff.of_pair(0.0, 0.0).accuracy) == "50.0 %"
    assert format_accuracy(TradeOff.of_pair(math.log(3), 0.0).accuracy) == "75.0 %"
    # the largest total variation at (ε, δ)
    assert format_accuracy(TradeOff.of_pair(math.log(3), 0.1).accuracy) == "77.5 %"
    assert format_accuracy(TradeOff.of_pair(1000.0, 0.0).accuracy) == "nearly 100 %"
    assert [format_rate(rate) for rate in (0.0, 0.000123, 0.0141, 0.07602, 0.0999, 0.3722)] == [
        "0.0 %",
        "0.0123 %",
        "1.41 %",
        "7.61 %",
        "9.99 %",
        "37.3 %",
    ]
    assert format_accuracy(0.67264) == "67.3 %"
    assert format_odds(1e-5) == "1 in 100,000"
    assert format_odds(3e-5) == "1 in 33,333"
    assert format_odds(0.25) == "25.0 %"
    assert format_odds(0.0) == "0"


def test_a_verdict_on_the_model_comes_first_and_assumptions_after_results(run_directory: Path) -> None:
    text = report(run_directory)
    places = [
        'id="verdict"',
        "This run was a simulation in one process.",
        "protected by",
        "and nothing else of it",
        "Not protected: ",
        '<th scope="row">The server',
        "What the guarantee means",
        "Results on held-out records",
        "Assumptions that somebody must sign",
        "silos and server follow the protocol",
        "the server does not collude with a silo",
        "Technical assumptions",
        "attacks the low bits of the noise",
        "Not covered by any ε above",
    ]
    assert [text.index(place) for place in places] == sorted(text.index(place) for place in places)


def test_without_a_ledger_no_more_is_said_than_epsilon_and_delta_allow(run_directory: Path) -> None:
    text = report(run_directory)
    assert "96.8 %" in text  # of ε = 3.3961
    assert "The ledger of this run is missing." in text
    assert "follows from ε and δ alone" in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('north = "/home/ann lee/my data/north.csv"', 'north = "…/north.csv"'),
        (r'south = "C:\\Users\\ann\\south.csv"', 'south = "…/south.csv"'),
        ("model = '~/own/net.py:build'", "model = '…/net.py:build'"),
        (
            "config.toml cannot be read: /data/x/config.toml: line 3",
            "config.toml cannot be read: …/config.toml: line 3",
        ),
        ('files = ["a/b.csv"] # 1/2, and/or', 'files = ["a/b.csv"] # 1/2, and/or'),
        ("see https://example.org/a/b", "see https://example.org/a/b"),
    ],
)
def test_a_path_is_shortened_to_its_last_part(text: str, shown: str) -> None:
    assert without_folders(text) == shown


def test_no_users_folder_is_on_the_page(run_directory: Path) -> None:
    folder = run_directory.resolve()
    tables = f'[data.files]\nnorth = "{folder}/north.csv"\nsouth = "{folder}/south.csv"\n'
    (run_directory / "config.toml").write_text(CONFIG + tables)
    text = report(run_directory)
    assert str(folder) not in text
    assert "…/north.csv" in text
    # Neither where the method is code of the user.
    own = CONFIG.replace('name = "uldp-avg"', f'name = "{folder}/mine.py:Mine"')
    (run_directory / "config.toml").write_text(own)
    text = report(run_directory)
    assert str(folder) not in text
    assert "…/mine.py:Mine, noise_multiplier = 5.0" in text
