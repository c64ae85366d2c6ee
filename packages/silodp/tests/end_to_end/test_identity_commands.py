"""An identity profile from the command that writes it to the run that is bound to it."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from silodp.accounting.guarantee import LOCAL_INDEX, ON_THE_LIST, PUBLIC_INDEX
from silodp.data.identity import load_profile
from silodp.data.public import ASSUMES_INDEX_BY_PROFILE
from support.commands import Silodp, assert_sentence

NEW = "identity new --study heart-2026 --width 10 --layout ###-###-#### --check mod11 --population 50 --json"
# Ten numbers with a right check digit (mod 11); fictitious.
IDS = [
    f"{n:09}{(-sum((10 - i) * int(d) for i, d in enumerate(f'{n:09}'))) % 11}"
    for n in range(10_000_000, 10_000_400)
]
IDS = [number for number in IDS if len(number) == 10][:20]
CONFIG = """
name = "two"
rounds = 2
seed = 1
[data]
source = "tables"
files = ["north.csv", "south.csv"]
[data.schema]
user = "patient"
label = "ill"
classes = ["no", "yes"]
split = "part"
numeric = { age = [0, 110] }
identity = "identity.toml"
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.1
[method.local]
learning_rate = 0.01
"""


def spell(number: str, way: int) -> str:
    """The same number in one of four ways."""
    ways = (number, f"{number[:3]}-{number[3:6]}-{number[6:]}", number.lstrip("0"), f"{number}\u200b")
    return ways[way % 4]


def write_table(path: Path, numbers: list[str], first_way: int = 0) -> None:
    rows = []
    for row, number in enumerate(numbers):
        ill, part = "yes" if row % 2 else "no", "test" if row % 7 == 6 else "train"
        rows.append(f"{spell(number, first_way + row + row // 10)},{20 + row},{ill},{part}")
    path.write_text("\n".join(["patient,age,ill,part", *rows, ""]), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silodp: Silodp) -> Path:
    monkeypatch.chdir(tmp_path)
    assert silodp(*NEW.split()).status == 0
    write_table(tmp_path / "north.csv", IDS * 2)
    write_table(tmp_path / "south.csv", IDS[:10] * 3, first_way=1)
    (tmp_path / "two.toml").write_text(CONFIG)
    return tmp_path


def shows_identifier(text: str) -> bool:
    return any(spell(number, way) in text for number in IDS for way in range(3))


def test_new_writes_a_profile_once(folder: Path, silodp: Silodp) -> None:
    profile = load_profile(folder / "identity.toml")
    assert profile.placeholders == ("0000000000", "9999999999")
    before = (folder / "identity.toml").read_bytes()
    again = silodp(*NEW.split())
    assert_sentence(again, code="identity.exists")
    assert (folder / "identity.toml").read_bytes() == before
    other = silodp(*NEW.split(), "--out", "other.toml").json
    assert other["agreement_code"] == profile.agreement_code
    assert other["digest"] == profile.digest
    words = silodp(*NEW.replace("--json", "--out third.toml").split())
    assert profile.agreement_code in words.out


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ("--kind name --width 3", "kind"),
        ("", "width"),
        ("--width 10000000", "width"),
        ("--width 4 --layout #.###", "layouts"),
        ("--width 4 --layout ##.##@", "layouts"),
        ("--width 4 --missing own", "missing"),
        ("--width 4 --check mod10", "check"),
        ("--kind pseudonym --check luhn", "check"),
        ("--country SE --number passport", "number"),
        ("--country SE", "number"),
        ("--country SE --number personnummer --width 12", "width"),
        ("--country NO --number fodselsnummer --reference-year 2026", "reference_year"),
        ("--width 4 --weights 4,3,x --modulus 11", "weights"),
        ("--width 4 --weights 4,3 --modulus 11 --remainders 0_987654321", "weights"),
        ("--width 4 --weights 4,3,2 --modulus 11 --remainders 0_98", "remainders"),
        ("--width 4 --layout ##-## --layout ##/##", "layouts"),
    ],
)
def test_new_refuses_settings_and_writes_nothing(
    options: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silodp: Silodp
) -> None:
    monkeypatch.chdir(tmp_path)
    found = silodp("identity", "new", "--study", "s", "--population", 5, *options.split(), "--json")
    assert_sentence(found, code="identity.profile")
    assert found.json["error"]["field"] == field
    assert not list(tmp_path.iterdir())


def test_check_counts_persons_and_shows_no_identifier(folder: Path, silodp: Silodp) -> None:
    question = ("identity", "check", "identity.toml", "north.csv", "--column", "patient")
    for options in ((), ("--json",)):
        found = silodp(*question, *options)
        assert found.status == 0, found.err
        assert not shows_identifier(found.out + found.err)
    assert found.json["ok"] is True
    assert (found.json["rows"], found.json["persons"], found.json["population"]) == (40, 20, 50)
    assert found.json["rows_per_person"] == {"least": 2, "median": 2.0, "most": 2}
    assert [each["kind"] for each in found.json["suspicions"]] == ["spellings"]
    assert shows_identifier(silodp(*question, "--show-identifiers").out)
    south = silodp("identity", "check", "identity.toml", "south.csv", "--column", "patient", "--json").json
    assert south["agreement_code"] == found.json["agreement_code"]
    assert {path.name for path in folder.iterdir()} == {"identity.toml", "north.csv", "south.csv", "two.toml"}


def test_check_fails_where_a_run_would(folder: Path, silodp: Silodp) -> None:
    text = (folder / "north.csv").read_text(encoding="utf-8")
    bad = [
        "123456789.0",
        "1.23E+08",
        f"{IDS[0][:-1]}{(int(IDS[0][-1]) + 1) % 10}",
        "",
        "0000000000",
        "123456789²",
    ]
    (folder / "north.csv").write_text(
        text + "".join(f"{cell},3,no,train\n" for cell in bad * 3), encoding="utf-8"
    )
    question = ("identity", "check", "identity.toml", "north.csv", "--column", "patient")
    found = silodp(*question, "--json")
    assert found.status == 1
    assert found.json["ok"] is False
    assert found.json["refused"] == {
        "number": 6, "check_digit": 3, "missing": 3, "placeholder": 3, "character": 3,
    }  # fmt: skip
    assert [each["row"] for each in found.json["first_refused_rows"]] == list(range(41, 51))
    for answer in (found, silodp(*question), silodp("run", "two.toml"), silodp("run", "two.toml", "--json")):
        assert answer.status != 0
        assert not any(cell and cell in answer.out + answer.err for cell in bad[:3])
        assert not shows_identifier(answer.out + answer.err)
    assert_sentence(silodp("run", "two.toml"), "data row 41 ", code="identity.cell")
    assert not (folder / "runs").exists()


def test_check_reads_other_forms_of_text_and_lists_with_gaps(folder: Path, silodp: Silodp) -> None:
    rows = (folder / "north.csv").read_text(encoding="utf-8").replace(",", ";").replace("age", "Größe")
    (folder / "german.csv").write_text(rows, encoding="utf-16")
    question = ("identity", "check", "identity.toml", "german.csv", "--column", "patient", "--json")
    assert_sentence(silodp(*question), code="data.encoding")
    assert_sentence(silodp(*question, "--encoding", "utf-16"), code="data.unreadable")
    assert silodp(*question, "--encoding", "utf-16", "--separator", ";").json["persons"] == 20
    # A list of one column: an empty line within it is a row without an identifier, at its end it is none.
    (folder / "list.csv").write_text(f"patient\n{IDS[0]}\n\n{IDS[1]}\n\n\n")
    found = silodp("identity", "check", "identity.toml", "list.csv", "--column", "patient", "--json")
    assert (found.json["rows"], found.json["persons"], found.json["refused"]) == (3, 2, {"missing": 1})
    assert found.json["first_refused_rows"] == [{"row": 2, "reason": "missing"}]
    (folder / "coded.csv").write_text(f"patient\n{IDS[0]}\n999\n?\n")
    question = ("identity", "check", "identity.toml", "coded.csv", "--column", "patient", "--json")
    found = silodp(*question, "--missing", "999", "--missing", "?")
    assert found.json["refused"] == {"missing": 2}


def test_check_refuses_what_it_cannot_read(folder: Path, silodp: Silodp) -> None:
    pd.DataFrame({"patient": [1234567890.0]}).to_parquet(folder / "float.parquet")
    for arguments, code in (
        (("identity.toml", "float.parquet", "--column", "patient"), "identity.column"),
        (("identity.toml", "north.csv", "--column", "name"), "data.column"),
        (("identity.toml", "none.csv", "--column", "patient"), "data.no_file"),
        (("none.toml", "north.csv", "--column", "patient"), "identity.file"),
        (("two.toml", "north.csv", "--column", "patient"), "identity.profile"),
    ):
        assert_sentence(silodp("identity", "check", *arguments), code=code)


def test_a_run_is_bound_to_the_profile(folder: Path, silodp: Silodp) -> None:
    planned = silodp("plan", "two.toml", "--json")
    assert planned.status == 0, planned.err
    done = silodp("run", "two.toml", "--json")
    assert done.status == 0, done.err
    assert done.json["persons_by_silos"] == {"0": 30, "1": 10, "2": 10}
    assert not shows_identifier(done.out + done.err)
    profile = load_profile(folder / "identity.toml")
    run = folder / "runs" / "two"
    spec = json.loads((run / "run_spec.json").read_text())
    assert spec["data"]["identity_digest"] == profile.digest
    assert spec["data"]["users"] == 50
    assert silodp("report", run).status == 0
    for path in run.rglob("*"):  # checkpoints and stores too
        assert not path.is_file() or not shows_identifier(path.read_bytes().decode("latin-1")), path
    # With another profile it is another run, even though every key is read in the same way.
    text = (folder / "identity.toml").read_text()
    (folder / "identity.toml").write_text(text.replace("heart-2026", "heart-2027"))
    resumed = silodp("run", run, "--resume")
    assert_sentence(resumed, code="checkpoint.setup")


def test_sampling_needs_no_list_and_shows_no_identifier_and_weights_by_records_need_one(
    folder: Path, silodp: Silodp
) -> None:
    """Coins are tossed by identifiers, which stay in the silos: nobody need learn whose they are."""
    for setting, local in (("method.user_sampling=0.5", True), ("method.weighting=records", False)):
        run = folder / "runs" / setting
        done = silodp("run", "two.toml", "--set", setting, "--out", run, "--json")
        assert done.status == 0, done.err
        released = json.loads((run / "guarantee.json").read_text())["guarantees"][0]
        assert released["epsilon"] is not None
        assumed = [one["id"] for one in released["assumptions"]]
        assert (LOCAL_INDEX.id in assumed) is local
        assert (PUBLIC_INDEX.id in assumed) is not local
        assert (ASSUMES_INDEX_BY_PROFILE.id in assumed) is not local
        assert (ON_THE_LIST in released["not_covered"]) is not local
        assert silodp("report", run).status == 0
        for path in run.rglob("*"):
            assert not path.is_file() or not shows_identifier(path.read_bytes().decode("latin-1")), path


def test_a_run_needs_the_file_and_the_population(folder: Path, silodp: Silodp) -> None:
    text = (folder / "identity.toml").read_text()
    (folder / "identity.toml").write_text(text.replace("population = 50", "population = 19"))
    assert_sentence(silodp("run", "two.toml"), code="identity.population")
    found = silodp("identity", "check", "identity.toml", "north.csv", "--column", "patient", "--json")
    assert (found.status, found.json["fits_population"]) == (1, False)
    (folder / "identity.toml").unlink()
    for command in ("plan", "run"):
        assert_sentence(silodp(command, "two.toml"), code="identity.file")
    assert_sentence(silodp("run", "two.toml", "--set", "data.schema.identity=3"), code="config.value")


def test_the_profile_is_found_beside_the_configuration(
    folder: Path, silodp: Silodp, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    planned = silodp("plan", folder / "two.toml", "--json")
    assert planned.status == 0, planned.err
    (folder / "identity.toml").unlink()
    assert_sentence(silodp("plan", folder / "two.toml"), str(folder / "identity.toml"), code="identity.file")


def test_a_national_number_is_read_by_its_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silodp: Silodp
) -> None:
    """Two silos write a person with and without the century; a third writes somebody 100 years older."""
    monkeypatch.chdir(tmp_path)
    new = "identity new --study s --population 9 --country SE --number personnummer --reference-year 2026 --json"
    assert silodp(*new.split()).status == 0
    profile = load_profile("identity.toml")
    assert (profile.kind, profile.country, profile.reference_year, profile.placeholders) == (
        "national", "SE", 2026, (),
    )  # fmt: skip
    cells = {"north": "19811228-9874", "south": "811228-9874", "west": "811228+9874"}
    for name, cell in cells.items():
        (tmp_path / f"{name}.csv").write_text(
            f"patient,age,ill,part\n{cell},30,no,train\n{cell},40,yes,test\n"
        )
        found = silodp("identity", "check", "identity.toml", f"{name}.csv", "--column", "patient", "--json")
        assert (found.status, found.json["persons"], found.json["suspicions"]) == (0, 1, [])
        assert cell[-4:] not in found.out
    (tmp_path / "three.toml").write_text(
        CONFIG.replace('"two"', '"three"').replace('"south.csv"', '"south.csv", "west.csv"')
    )
    done = silodp("run", "three.toml", "--json")
    assert done.status == 0, done.err
    assert done.json["persons_by_silos"] == {"0": 7, "1": 1, "2": 1}
    (tmp_path / "south.csv").write_text(
        "patient,age,ill,part\n8112289874,30,no,train\n811228-9875,30,no,train\n"
    )
    found = silodp("identity", "check", "identity.toml", "south.csv", "--column", "patient", "--json")
    assert (found.status, found.json["refused"]) == (1, {"century": 1, "check_digit": 1})
    assert_sentence(silodp("run", "three.toml"), "data row 1 ", code="identity.cell")


def test_a_rule_of_ones_own_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silodp: Silodp
) -> None:
    monkeypatch.chdir(tmp_path)
    own = "--width 7 --kind code --weights 7,6,5,4,3,2 --modulus 11 --remainders _0987654321"
    new = f"identity new --study s --population 9 {own} --letters _ABCDEFGHJKLMNPQRSTUVWXYZ"
    assert silodp(*new.split()).status == 0
    profile = load_profile("identity.toml")
    assert profile.weights == (7, 6, 5, 4, 3, 2)
    assert [isinstance(found, str) for found in profile.parse_column(["abc1235", "ABC1236", "ZZZ0016"])] == [
        True, False, True,
    ]  # fmt: skip
