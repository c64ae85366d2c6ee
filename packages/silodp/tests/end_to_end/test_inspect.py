"""A draft of a configuration is refused until its empty constants are filled in; none of them comes from rows."""

import json
import re
import stat
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from silodp.data import Description
from silodp.data.tables.draft import draft_config
from silodp.data.tables.sources.delimited import DelimitedText
from support.commands import Silodp, assert_sentence

ROWS = [
    f"P{n % 30};{41 + n % 37};1,{60 + n % 31};{1 + n % 28:02}.03.2019;{'AB'[n % 2]};note {n};"
    + ("ja" if n % 3 else "nein")
    for n in range(120)
]
TABLE = "\n".join(["Fall;Alter;Größe;Aufnahme;Station;Notiz;krank", *ROWS, ""])


@pytest.fixture
def drafted(silodp: Silodp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("nord.csv").write_text(TABLE, encoding="cp1252")
    done = silodp(
        *("data", "inspect", "nord.csv", "--user", "Fall", "--label", "krank", "--out", "config.toml"),
        *("--separator", ";", "--decimal", ",", "--encoding", "cp1252"),
    )
    assert done.status == 0, done.err
    return tmp_path / "config.toml"


def test_what_was_read_off_rows_stands_in_comments_only(drafted: Path) -> None:
    text = drafted.read_text(encoding="utf-8")
    assert stat.S_IMODE(drafted.stat().st_mode) == 0o600
    assert "41 to 77" in text
    assert "note 7" not in text  # texts that are no categories are not shown at all
    schema = tomllib.loads(text)["data"]["schema"]
    assert schema["classes"] == []
    assert schema["numeric"]["Alter"] == schema["numeric"]["Größe"] == {"range": [], "typical": []}
    assert schema["numeric"]["Aufnahme"] == {"range": [], "date": "%d.%m.%Y", "since": ""}
    assert schema["categorical"] == {"Station": []}


def test_a_draft_is_refused_until_every_constant_is_declared(silodp: Silodp, drafted: Path) -> None:
    declared = [
        ("classes = []", 'classes = ["nein", "ja"]'),
        ('"Alter" = { range = [], typical = [] }', '"Alter" = { range = [18, 110], typical = [55, 15] }'),
        ('"Größe" = { range = [], typical = [] }', '"Größe" = { range = [1, 2.5] }'),
        ('range = [], date = "%d.%m.%Y", since = ""', 'range = [0, 731], date = "%d.%m.%Y", since = "2018-01-01"'),
        ('"Station" = []', '"Station" = ["A", "B", "C"]'),
    ]  # fmt: skip
    text = drafted.read_text(encoding="utf-8")
    for empty, filled in declared:
        drafted.write_text(text, encoding="utf-8")
        assert_sentence(silodp("plan", "config.toml"))
        assert empty in text
        text = text.replace(empty, filled)
    while "ROWS:" in text:  # the comments too
        drafted.write_text(text, encoding="utf-8")
        assert_sentence(silodp("plan", "config.toml"), code="config.draft")
        text = re.sub("#.*ROWS:.*", "", text, count=1)
    drafted.write_text(text, encoding="utf-8")
    planned = silodp("plan", "config.toml")
    assert planned.status == 0, planned.err
    assert silodp("run", "config.toml", "--out", "run", "--set", "rounds=1").status == 0


def test_the_advice_to_clip_stands_where_it_can_be_followed(silodp: Silodp, drafted: Path) -> None:
    """It stood in the table of numeric columns once, where the setting is a column."""
    text = drafted.read_text(encoding="utf-8")
    advice = '# out_of_range = "clip"'
    followed = tomllib.loads(text.replace(advice, advice.removeprefix("# ")))["data"]["schema"]
    assert followed["out_of_range"] == "clip"
    assert "out_of_range" not in tomllib.loads(text)["data"]["schema"]
    below = text.replace("[data.schema.numeric]", '[data.schema.numeric]\nout_of_range = "clip"')
    filled = below.replace("classes = []", 'classes = ["nein", "ja"]')
    drafted.write_text(re.sub("#.*ROWS.*", "", filled), encoding="utf-8")
    refused = silodp("plan", "config.toml", "--json")
    assert_sentence(refused, code="data.schema")
    assert refused.json["error"]["field"] == "data.schema.numeric.out_of_range"


def test_a_draft_does_not_replace_a_file(silodp: Silodp, drafted: Path) -> None:
    again = silodp(
        "data", "inspect", "nord.csv", "--user", "Fall", "--label", "krank", "--out", "config.toml"
    )
    assert_sentence(again, "config.toml")


def test_a_wrong_column_and_a_wrong_encoding_are_named(silodp: Silodp, drafted: Path) -> None:
    options = ("--separator", ";", "--encoding", "cp1252", "--json")
    failed = silodp("data", "inspect", "nord.csv", "--user", "fall", "--label", "krank", *options)
    assert json.loads(failed.out)["error"]["code"] == "data.column"
    failed = silodp("data", "inspect", "nord.csv", "--user", "Fall", "--label", "krank", "--json")
    assert json.loads(failed.out)["error"]["code"] == "data.encoding"


def test_headers_and_cells_cannot_write_settings(silodp: Silodp, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text(
        'id,ill,"x\nrounds = 99","y"\n'
        + "".join(f'{n},{n % 2},"text {n}","a\n[evil]{n % 2}"\n' for n in range(40))
    )
    done = silodp("data", "inspect", "a.csv", "--user", "id", "--label", "ill")
    assert done.status == 0, done.err
    drafted = tomllib.loads(done.out)
    assert drafted["rounds"] == 40
    assert set(drafted) == {"rounds", "delta", "data", "method"}
    assert re.search(r"# FILL IN. ROWS: \[\"a\\n\[evil\]0", done.out)


def test_names_that_a_file_has_for_its_codes_stand_in_comments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.csv"
    rows = [f"{n % 30},{n % 4 + 1},{n % 11},{n % 3:02},{n % 2}\n" for n in range(120)]
    path.write_text("id,school,pain,ward,ill\n" + "".join(rows))
    school = {"1": "none", "2": "some\nrounds = 99", "3": "more", "4": "much", "5": "most"}
    described = {
        "id": Description(labels={str(n): "somebody" for n in range(30)}),
        "school": Description("level", school, ["9 (refused)"]),
        "pain": Description(labels={"0": "none", "10": "worst"}),  # a scale, of which the ends have names
        "ward": Description(labels={"00": "a", "01": "b", "02": "c"}),
        "ill": Description(labels={"0": "no", "1": "yes"}),
    }
    plain = draft_config(path, "id", "ill")
    monkeypatch.setattr(DelimitedText, "describe_columns", lambda self: described)
    text = draft_config(path, "id", "ill")
    found, without = (tomllib.loads(one)["data"]["schema"] for one in (text, plain))
    assert list(found["numeric"]) == ["pain"]
    assert list(found["categorical"]) == ["school", "ward"]
    assert found.keys() == without.keys()
    assert '["00", "01", "02"]. THE FILE: "00" is "a"' in text
    assert '"level", "1" is "none"' in text
    assert 'no value: ["9 (refused)"]' in text
    # To agree on the names is to take the marks of comments away.
    lines = text[text.index("# [data.schema.silos.") :].partition("\n\n")[0].replace("# ", "")
    values = tomllib.loads(lines)["data"]["schema"]["silos"]["a"]["values"]
    assert values == {"school": school, "ward": described["ward"].labels, "ill": {"0": "no", "1": "yes"}}


def test_a_draft_is_toml_with_any_name_and_lists_every_column(tmp_path: Path) -> None:
    path = tmp_path / "\N{GRINNING FACE}\x7f.csv"
    path.write_text("id,x,x,w,ill\n" + "".join(f"{n},{n},{n},a\x7f{n % 2},{n % 2}\n" for n in range(40)))
    text = draft_config(path, "id", "ill")
    assert tomllib.loads(text)["data"]["files"] == {"\N{GRINNING FACE}\x7f": str(path)}
    assert '"x": several columns' in text


def write_doubtful(folder: Path, ending: str = "csv") -> Path:
    """A column of each kind that may be read in several ways."""
    days = pd.to_datetime([f"2020-{1 + n % 12:02}-{1 + n % 28:02} {n % 24:02}:30" for n in range(60)])
    days = days.where(np.arange(60) > 0, days[0].normalize())  # one of them at midnight
    frame = pd.DataFrame(
        {
            "id": [f"P{n}" for n in range(60)],
            "chol": ["?" if n % 9 == 0 else str(120 + n) for n in range(60)],
            "fbs": ["01?"[n % 3] for n in range(60)],
            "crp": ["k.A." if n % 9 == 0 else f"{n},5" for n in range(60)],
            "cost": [f"{1 + n}.{100 + n},50" for n in range(60)],
            "icd": [f"I{10 + n}.1" for n in range(60)],
            "note": [f"came by bus {n}" for n in range(60)],
            "zero": "0",
            "empty": "",
            "stay": days,
            "ill": ["no", "yes"] * 30,
        }
    )
    path = folder / f"nord.{ending}"
    frame.to_csv(path, index=False) if ending == "csv" else frame.to_excel(path, index=False)
    return path


def test_columns_that_are_no_categories_are_described(tmp_path: Path, silodp: Silodp) -> None:
    path = write_doubtful(tmp_path)
    question = ("data", "inspect", path, "--user", "id", "--label", "ill")
    done = silodp(*question)
    lines = {name: line for line in done.out.splitlines() for name in re.findall('"([a-z]+)"', line)[:1]}
    found = {name: line.partition(": ")[2] for name, line in lines.items() if line.startswith("# ROWS")}
    assert found.keys() == {"chol", "crp", "cost", "icd", "note", "zero", "empty"}
    for names, hint in (
        (["chol"], '--missing "?"'),
        (["crp", "cost"], "--decimal"),
        (["icd"], "codes = true"),
    ):
        assert [one for one, text in found.items() if hint in text] == names
    assert (found["zero"], found["empty"]) == (
        '"zero": one value only',
        '"empty": no value, 60 of 60 missing',
    )
    assert '"fbs" = []  # FILL IN. ROWS: ["0", "1", "?"]\n' in done.out
    drafted = tomllib.loads(silodp(*question, "--missing", "?").out)["data"]["schema"]
    assert drafted["reader"] == {"missing": ["?"]}
    assert drafted["numeric"].keys() == {"chol", "stay"}
    assert drafted["numeric"]["stay"]["date"] == "%Y-%m-%d %H:%M:%S"
    assert (
        '"fbs" = []  # FILL IN. ROWS: ["0", "1"], 20 of 60 missing' in silodp(*question, "--missing", "?").out
    )


def test_cells_that_are_dates_with_a_time_are_dates(tmp_path: Path) -> None:
    pytest.importorskip("openpyxl")
    drafted = draft_config(write_doubtful(tmp_path, "xlsx"), "id", "ill")
    assert tomllib.loads(drafted)["data"]["schema"]["numeric"]["stay"]["date"] == "%Y-%m-%d"
    assert "ROWS: 2020-01-01 to 2020-12-" in drafted


def test_running_numbers_and_marks_of_missing_values_are_doubted(tmp_path: Path) -> None:
    rows = [f"p{n % 5},{n + 1000},{-9 if n % 7 == 3 else n % 4 + 0.5},{n % 4 - 2},{n % 2}" for n in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["id,case,score,change,ill", *rows, ""]))
    lines = draft_config(tmp_path / "t.csv", "id", "ill").splitlines()
    case, score, change = (
        next(line for line in lines if line.startswith(f'"{name}"')) for name in ("case", "score", "change")
    )
    assert case.endswith("another whole number: delete this line if it numbers rows or cases")
    assert score.endswith("if -9 stands for no value, add --missing-in score=-9")
    assert change.endswith("median -0.5")


@pytest.mark.parametrize(
    ("codes", "named"),
    [
        ([-1, -9, 999], [-9, -1, 999]),
        ([-9, -8, -7], [-9, -8, -7]),
        ([9999, 888], [888, 9999]),
        ([-2, -1], []),
        ([-9, -3.5], []),
        ([99], []),
        ([250], []),
    ],
)
def test_codes_of_missing_values_are_named_where_no_number_is_near(tmp_path, codes, named) -> None:
    """Sodium in mmol/l is 120 to 160: 99 may be one, and 888 is none."""
    values = [*(120 + n % 40 for n in range(60)), *codes, *codes]
    rows = [f"p{n},{value},{n % 2}" for n, value in enumerate(values)]
    (tmp_path / "t.csv").write_text("\n".join(["id,sodium,ill", *rows, ""]))
    line = next(
        x for x in draft_config(tmp_path / "t.csv", "id", "ill").splitlines() if x.startswith('"sodium"')
    )
    options = " ".join(f"--missing-in sodium={code}" for code in named)
    assert line.endswith(f"stand for no value, add {options}") if named else "--missing" not in line


def test_codes_are_drafted_as_categories_and_limits_as_limits(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "id": [f"p{n // 3}" for n in range(300)],
            "ward_id": [n % 9 for n in range(300)],
            "gender_concept_id": [(8507, 8532, 0)[n % 3] for n in range(300)],
            "site_code": [f"{n % 11:02}" for n in range(300)],
            "mcc": [5000 + n % 40 for n in range(300)],
            "triage": [1 + n % 5 for n in range(300)],
            "pain": [n % 11 for n in range(300)],
            "loss": [-0.5 - n % 12 for n in range(300)],
            "humid": [0.5 + n % 3 for n in range(300)],
            "CRP": ["<0.5" if n % 4 == 0 else ">300" if n % 50 == 1 else f"{n / 4}" for n in range(300)],
            "lipid": ["<3" if n % 4 == 0 else "?" if n % 4 == 1 else f"{n}" for n in range(300)],
            "left": ["31.12.9999" if n % 9 == 0 else f"{1 + n % 28:02}.03.2021" for n in range(300)],
            "ill": ["no", "yes"] * 150,
        }
    )
    frame.to_csv(tmp_path / "a.csv", index=False)
    text = draft_config(tmp_path / "a.csv", "id", "ill")
    found = tomllib.loads(text)["data"]["schema"]
    assert found["categorical"] == {"ward_id": [], "gender_concept_id": [], "site_code": [], "triage": []}
    assert found["numeric"].keys() == {"pain", "loss", "humid", "CRP", "left"}
    assert found["numeric"]["CRP"] == {"range": [], "typical": [], "above": {}, "below": {}}
    lines = {name: line for line in text.splitlines() for name in re.findall('"([A-Za-z_]+)"', line)[:1]}
    assert 'ROWS: ["0", "8507", "8532"]' in lines["gender_concept_id"]
    assert 'ROWS: ["00", "01", "02"' in lines["site_code"]
    assert 'limits of detection "<0.5" and ">300"' in lines["CRP"]
    assert lines["left"].endswith("add --missing-in left=31.12.9999")
    assert "40 different whole numbers" in lines["mcc"]
    assert "codes = true" in lines["mcc"]
    assert '--missing "?"' in lines["lipid"]


def test_codes_of_one_column_are_taken_out_of_it(tmp_path: Path, silodp: Silodp) -> None:
    rows = [f"p{n},{999 if n % 9 == 0 else 100 + n},{999 if n % 9 == 1 else n},{n % 2}" for n in range(60)]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["id,sodium,ferritin,ill", *rows, ""]))
    question = ("data", "inspect", path, "--user", "id", "--label", "ill")
    done = silodp(*question, "--missing-in", "sodium=999")
    assert '"sodium" = { range = [], typical = [] }  # FILL IN. ROWS: 101 to 159' in done.out
    assert "0 to 999" in done.out
    assert tomllib.loads(done.out)["data"]["schema"]["reader"] == {"missing_in": {"sodium": ["999"]}}
    assert_sentence(silodp(*question, "--missing-in", "sodum=999"), code="data.column")
    assert_sentence(silodp(*question, "--missing-in", "999"), code="argument.value")
