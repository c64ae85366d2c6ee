import datetime
import logging
import re
from decimal import Decimal
from uuid import UUID

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from silodp.data import Federation
from silodp.data.public import ASSUMES_INDEX_FROM_TABLES
from silodp.data.tables.kinds.numeric import NumericColumn
from silodp.data.tables.reader import Schema, normalize_key, read_inputs
from silodp.data.tables.schema import ASSUMES_CLIPPING, ASSUMES_SPLIT
from silodp.errors import SilodpError
from support.refusals import refused
from support.tables import read, schema, write

BERLIN = "patient,age,sex,ill\n17,50,f,yes\n4,20,m,no\n17,80,f,yes\n"
PARIS = "ill,sex,patient,age,extra\nno,f,17,35,x\nyes,m,person-9,65,y\n"


def test_features_labels_and_links(tmp_path):
    built = read(tmp_path, berlin=BERLIN, paris=PARIS)
    assert built.features == ("age", "sex=f", "sex=m", "sex=x")
    np.testing.assert_array_equal(
        built.silos[0].x, np.array([[0, 1, 0, 0], [-1, 0, 1, 0], [1, 1, 0, 0]], dtype=np.float32)
    )
    np.testing.assert_array_equal(built.silos[0].y, [1, 0, 1])
    np.testing.assert_array_equal(built.silos[1].y, [0, 1])
    assert built.user_keys == ("4", "17", "person-9")
    np.testing.assert_array_equal(built.counts(), [[1, 2, 0], [0, 1, 1]])
    assert built.classes == 2
    assert built.test is None
    assert built.assumptions == (ASSUMES_INDEX_FROM_TABLES,)


@pytest.mark.parametrize("cell", ["50.0 bpm", "50 %", "< 50", "+50a", ".5 mg", "50;1", "50?"])
def test_a_number_with_other_characters_is_not_proposed_as_a_missing_value(tmp_path, cell):
    table = BERLIN.replace(",50,", f",{cell},")
    with refused("data.value") as caught:
        read(tmp_path, berlin=table)
    assert caught.value.field == "age"
    assert "missing =" not in str(caught.value)
    path = tmp_path / "berlin.csv"
    with refused("data.value") as caught:  # nor for predictions
        read_inputs(path, Schema.from_inputs(schema().describe_inputs()))
    assert "missing =" not in str(caught.value)


@pytest.mark.parametrize("column", ["patient", "age", "sex", "ill"])
def test_a_missing_column_is_named_by_its_setting(tmp_path, column):
    settings = {
        "patient": "data.schema.user",
        "age": "data.schema.numeric.age",
        "sex": "data.schema.categorical.sex",
        "ill": "data.schema.label",
    }
    with refused("data.column") as caught:
        read(tmp_path, berlin=BERLIN.replace(column, "other"))
    assert caught.value.field == settings[column]


def test_csv_and_parquet_say_the_same(tmp_path):
    paths = write(tmp_path, berlin=BERLIN, paris=PARIS)
    frame = pd.read_csv(paths["berlin"])  # keys are integers here, text in the CSV
    frame.to_parquet(tmp_path / "berlin.parquet")
    from_csv = Federation.from_tables(paths, schema())
    mixed = Federation.from_tables([tmp_path / "berlin.parquet", paths["paris"]], schema())
    assert mixed.digest() == from_csv.digest()


def test_float_parsed_keys_are_the_same_person(tmp_path):
    pd.DataFrame(
        {"patient": [17.0, 4.0], "age": [30, 40], "sex": ["f", "m"], "ill": ["no", "no"]}
    ).to_parquet(tmp_path / "rome.parquet")
    paths = [*write(tmp_path, berlin=BERLIN).values(), tmp_path / "rome.parquet"]
    built = Federation.from_tables(paths, schema())
    assert built.user_keys == ("4", "17")
    np.testing.assert_array_equal(built.counts(), [[1, 2], [1, 1]])


@pytest.mark.parametrize(
    ("value", "key"),
    [(17, "17"), ("17", "17"), (" 17 ", "17"), (17.0, "17"), ("17.00", "17"), ("007", "007"), ("1.5", "1.5")],
)
def test_normalize_key(value, key):
    assert normalize_key(value) == key


def test_public_users_by_list_or_file(tmp_path):
    listed = read(tmp_path, berlin=BERLIN, options={"users": [4, 17, 99]})
    assert listed.users == 3
    assert listed.user_keys == ("4", "17", "99")
    assert listed.assumptions == ()
    assert listed.counts().tolist() == [[1, 2, 0]]
    (tmp_path / "ids.txt").write_text("4\n17\n99\n")
    assert read(tmp_path, berlin=BERLIN, options={"users": tmp_path / "ids.txt"}).digest() == listed.digest()


def test_split_column(tmp_path):
    text = "patient,age,sex,ill,part\n1,50,f,yes,train\n2,20,m,no,test\n1,80,f,yes,Test\n3,80,f,no,train\n"
    built = read(tmp_path, berlin=text, options={"split": "part"})
    assert len(built.silos[0]) == 2
    assert built.users == 2  # those with training records
    np.testing.assert_array_equal(built.test.user, [-1, 0])
    assert ASSUMES_SPLIT in built.assumptions
    apart = text.replace("1,80,f,yes,Test", "2,80,f,yes,test")  # whether there are such persons is private
    assert read(tmp_path, berlin=apart, options={"split": "part"}).assumptions == built.assumptions


def test_a_silo_may_hold_test_rows_only(tmp_path):
    train = "patient,age,sex,ill,part\n1,50,f,yes,train\n"
    held = "patient,age,sex,ill,part\n1,50,f,yes,test\n"
    built = read(tmp_path, berlin=train, paris=held, options={"split": "part"})
    assert [len(silo) for silo in built.silos] == [1, 0]


def test_clipping_is_counted_in_the_log_only(tmp_path, caplog):
    text = BERLIN.replace("80", "81").replace("20", "-3")
    with caplog.at_level(logging.WARNING, logger="silodp"):
        built = read(tmp_path, berlin=text, options={"out_of_range": "clip"})
    assert "2 values clipped" in caplog.text
    np.testing.assert_array_equal(built.silos[0].x[:, 0], [0, -1, 1])
    assert ASSUMES_CLIPPING in built.assumptions


def test_real_and_survival_labels(tmp_path):
    text = "patient,age,sex,dead,days\n1,50,f,1,10.5\n2,20,m,0,300\n"
    real = {"kind": "real", "label": "days", "classes": None}
    built = read(tmp_path, berlin=text, options=real)
    assert built.classes is None
    np.testing.assert_array_equal(built.silos[0].y, np.float32([10.5, 300]))
    survival = {"kind": "survival", "label": None, "classes": None, "event": "dead", "time": "days"}
    built = read(tmp_path, berlin=text, options=survival)
    np.testing.assert_array_equal(built.silos[0].y, np.float32([[1, 10.5], [0, 300]]))
    with pytest.raises(SilodpError, match="column 'dead' is '2' in data row 1, which is no event"):
        read(tmp_path, berlin=text.replace("f,1,", "f,2,"), options=survival)
    with pytest.raises(SilodpError, match="column 'days' is '-1' in data row 2, which is a negative time"):
        read(tmp_path, berlin=text.replace("300", "-1"), options=survival)


def test_numeric_classes_match_across_formats(tmp_path):
    pd.DataFrame({"patient": [1, 2], "age": [30, 40], "sex": ["f", "m"], "ill": [1.0, 0.0]}).to_parquet(
        tmp_path / "rome.parquet"
    )
    built = Federation.from_tables([tmp_path / "rome.parquet"], schema(classes=[0, 1]))
    np.testing.assert_array_equal(built.silos[0].y, [1, 0])


def test_byte_order_mark_and_quotes(tmp_path):
    path = tmp_path / "berlin.csv"
    path.write_text('﻿patient,age,sex,ill\n"a, b",50,"f",yes\n', encoding="utf-8")
    assert Federation.from_tables([path], schema()).user_keys == ("a, b",)


@pytest.mark.parametrize(
    ("old", "new", "options", "sentence"),
    [
        ("patient,", "person,", {}, "column 'patient' is missing; .*has person, age, sex, ill"),
        ("patient,", "age,", {"user": "ill", "label": "sex", "classes": ["f", "m"], "categorical": {}},
         "column 'age' appears twice"),
        ("\n4,", "\n,", {}, "column 'patient' is '' in data row 2, which names no user"),
        ("\n4,", "\nNaN,", {}, "column 'patient' is 'NaN' in data row 2, which names no user"),
        (BERLIN[20:], "", {}, "the table has no rows"),
        (BERLIN, "", {}, "the file is empty; export"),
        (BERLIN, "\n \n", {}, "the file is empty; export"),
        (BERLIN, BERLIN.replace(",", ";"), {}, "separated by .;.; set separator"),
        (BERLIN, BERLIN.replace(",", ";").replace("50", "5,0"), {}, "separated by .;.; set separator"),
        (BERLIN, BERLIN.replace(",", "\t"), {}, r"separated by '\\t'; set separator"),
        ("50", "", {}, "column 'age' is '' in data row 1, which is no finite number"),
        ("50", "nan", {}, "column 'age' is 'nan' in data row 1, which is no finite number"),
        ("80", "-inf", {}, "column 'age' is '-inf' in data row 3, which is no finite number"),
        ("80", "1e999", {}, "data row 3, which is no finite number"),
        ("80", "old", {}, "column 'age' is 'old' in data row 3, which is no finite number"),
        ("80", "inf", {"out_of_range": "clip"}, "column 'age' is 'inf' in data row 3, which is no finite"),
        ("yes", "yes", {"kind": "real", "classes": None}, "column 'ill' is 'yes' .*, which is no .* list its classes"),
        ("m,no", "m,maybe", {}, "column 'ill' is 'maybe' in data row 2, which is none of no, yes; correct"),
        ("m,no", "d,no", {}, "column 'sex' is 'd' in data row 2, which is none of f, m, x; add it to"),
        ("m,no", "m,", {}, "column 'ill' is '' in data row 2, which stands for no value; leave out rows"),
        ("m,no", ",no", {}, "column 'sex' is '' in data row 2, which stands for no value; declare"),
        (",ill", ",illness", {"label": "ilness"}, "column 'ilness' is missing; did you mean 'illness'"),
        ("m,no", "m", {}, "the header has 4 cells and data row 2 has 3; correct"),
        ("m,no", "m,no,more", {}, "the header has 4 cells and data row 2 has 5; correct .* quotes"),
        ("m,no\n", "m,no\n\n  \n17\n", {}, "data row 3 has 1; correct"),
        ("80", "81", {}, r"column 'age' is '81' in data row 3, which is outside .* 20\.\.80; widen"),
        ("\n4,", "\n5,", {"users": ["4", "17"]}, "column 'patient' is '5' in data row 2, which has no number"),
        ("yes", "yes", {"split": "ill"}, "column 'ill' is declared twice"),
        ("yes", "yes", {"split": "part"}, "column 'part' is missing"),
    ],
)  # fmt: skip
def test_bad_tables_are_one_sentence(tmp_path, old, new, options, sentence):
    with pytest.raises(SilodpError, match=sentence) as caught:
        read(tmp_path, berlin=BERLIN.replace(old, new), options=options)
    if "declared twice" not in sentence:
        assert "berlin.csv" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "; " in str(caught.value)


@pytest.mark.parametrize("decimal", [".", ","])
def test_a_text_that_may_stand_for_no_value_is_named_as_such(tmp_path, decimal):
    """missing = "indicator" alone would not help, and the point of `k.A.` is no decimal mark."""
    options = {
        "reader": {"decimal": decimal},
        "numeric": {"age": {"range": (20, 80), "missing": "indicator"}},
    }
    with pytest.raises(SilodpError) as caught:
        read(tmp_path, berlin=BERLIN.replace("80", "k.A."), options=options)
    assert 'stands for no value, set missing = ["k.A."] in [data.schema.reader]' in str(caught.value)
    assert "--missing k.A.)" in str(caught.value)
    options["reader"]["missing"] = ["k.A."]
    read(tmp_path, berlin=BERLIN.replace("80", "k.A."), options=options)


def many(silo: str, persons: int = 400) -> str:
    rows = [f"{person},50,f,{'yes' if person % 2 else 'no'}" for person in range(persons)]
    return "\n".join(["patient,age,sex,ill", *rows, *rows[: persons // 2], ""])


def test_a_share_of_persons_is_for_testing_in_every_silo(tmp_path):
    """All records of a person, in all silos, are on the same side, whichever silo reads its table, and alone."""
    options = {"test_share": 0.25}
    built = read(tmp_path, berlin=many("berlin"), paris=many("paris"), options=options)
    alone = read(tmp_path, paris=many("paris"), options=options)
    train = [set(np.array(built.user_keys)[silo.user]) for silo in built.silos]
    assert train[0] == train[1] == set(alone.user_keys)
    assert 60 < 400 - len(train[0]) < 140
    for silo in built.silos:
        assert silo.test is not None
        assert len(silo) + len(silo.test) == 600
        assert len(np.unique(silo.test.user)) == 400 - len(train[0])
        assert np.bincount(silo.test.user).max() == 2  # records of a person have one number
    assert len(built.test) == sum(len(silo.test) for silo in built.silos)
    assert ASSUMES_SPLIT not in built.assumptions
    assert read(tmp_path, berlin=many("berlin"), options={"test_share": 0.0}).silos[0].test.x.shape[0] == 0


def test_held_out_records_of_a_split_column_stay_in_their_silo(tmp_path):
    text = BERLIN.replace("ill\n", "ill,part\n").replace("yes\n", "yes,test\n").replace("no\n", "no,train\n")
    paris = "patient,age,sex,ill,part\n4,20,m,no,train\n"
    built = read(tmp_path, berlin=text, paris=paris, options={"split": "part"})
    assert [len(silo.test) for silo in built.silos] == [2, 0]
    assert built.silos[0].test.user.tolist() == [0, 0]  # patient 17, who has no number among training users
    assert built.test.user.tolist() == [-1, -1]


@pytest.mark.parametrize("options", [{"test_share": 0.2, "split": "part"}, {"test_share": 1.5}])
def test_a_share_that_cannot_be_is_refused(options):
    with pytest.raises(SilodpError) as caught:
        schema(**options)
    assert caught.value.field == "data.schema.test_share"


def test_bad_split_value(tmp_path):
    text = "patient,age,sex,ill,part\n1,50,f,yes,train\n2,20,m,no,valid\n"
    with pytest.raises(SilodpError, match="column 'part' is 'valid' in data row 2, which is no split"):
        read(tmp_path, berlin=text, options={"split": "part"})
    with pytest.raises(SilodpError, match="no table has a training row"):
        read(
            tmp_path, berlin=text.replace("train", "test").replace("valid", "test"), options={"split": "part"}
        )


def test_bad_paths(tmp_path):
    berlin = write(tmp_path, berlin=BERLIN)["berlin"]
    (tmp_path / "sub").mkdir()
    twin = write(tmp_path / "sub", berlin=BERLIN)["berlin"]
    excel = tmp_path / "berlin.ods"
    excel.touch()
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"no parquet")
    latin = tmp_path / "latin.csv"
    latin.write_bytes(BERLIN.replace("yes", "ja é").encode("latin-1"))
    for files, sentence in [
        ([tmp_path / "nowhere.csv"], r"nowhere\.csv: no such file; check the path"),
        ([tmp_path / "sub"], "sub: a folder, not a table; give the silo's file"),
        ([excel], "unknown extension '.ods'; give a file that ends in .csv"),
        ([broken], r"broken\.parquet: not readable as parquet"),
        ([latin], r"latin\.csv: not text in the encoding utf-8"),
        ([berlin, twin], "would both be silo 'berlin'; name the silos in a mapping"),
        ([], "files is empty"),
        (str(berlin), "give silo name → path"),
        (berlin, "give silo name → path"),
        (3, "files is 3; give silo name → path"),
        (pd.DataFrame({"id": ["P1\n"]}), "files is a DataFrame; give silo name → path"),  # no row in an error
        ({"berlin": pd.DataFrame({"id": ["P1"]})}, "files names a DataFrame; give every table's path"),
        ([3], "files names 3; give every table's path"),
        ({"berlin": None}, "files names None; give every table's path"),
        (
            {"berlin": berlin, "bonn": tmp_path / "sub" / ".." / berlin.name},
            "'berlin' and 'bonn' are the same file",
        ),
    ]:
        with pytest.raises(SilodpError, match=sentence) as caught:
            Federation.from_tables(files, schema())
        assert "\n" not in str(caught.value)


def test_a_schema_is_asked_for(tmp_path):
    with refused("argument.type"):
        Federation.from_tables(write(tmp_path, berlin=BERLIN), None)


def test_rounded_keys_are_refused(tmp_path):
    for key in ("1.2E+15", "1,2E+15"):
        with pytest.raises(SilodpError, match=rf"{re.escape(repr(key))} in data row 2, which is a rounded"):
            read(tmp_path, berlin=BERLIN.replace("\n4,", f'\n"{key}",'))
    path = tmp_path / "rome.parquet"
    for keys in (
        [1.0, 2.0**53],
        [1.0, 1e18],
        np.float32([1, 2**24]),
        pd.array([1, 2.0**53], dtype="Float64"),
        pd.array([1, 2**24], dtype="Float32"),
        pd.Categorical(np.float32([1, 2**24])),
    ):
        frame = pd.DataFrame({"patient": keys, "age": 30, "sex": "f", "ill": "no"})
        frame.to_parquet(path)
        with pytest.raises(SilodpError, match="data row 2, which is a rounded number; export"):
            Federation.from_tables([path], schema())
    pd.DataFrame({"patient": [2**53, 2**53 + 1], "age": 30, "sex": "f", "ill": "no"}).to_parquet(path)
    assert Federation.from_tables([path], schema()).users == 2


TYPED_KEYS = {
    "bool": [True, False],
    "days": [datetime.date(2026, 5, 3), datetime.date(2026, 5, 7)],
    "times of a day": [datetime.time(3, 5), datetime.time(7, 5)],
    "times": pd.to_datetime(["2026-05-03", "2026-05-07"]),
    "durations": pd.to_timedelta([3, 7], unit="h"),
    "infinite": [float("inf"), 1.0],
    "float": [12.1, 7.0],
    "decimal": [Decimal("12.10"), Decimal("7.00")],
}


@pytest.mark.parametrize("keys", TYPED_KEYS.values(), ids=TYPED_KEYS)
def test_keys_of_other_types_than_text_and_whole_numbers_are_refused(tmp_path, keys):
    """As text they were persons of their own: a spreadsheet program had made days of 3-5 and 03-5, which then met."""
    rest = {"age": 30, "sex": "f", "ill": "no"}
    pd.DataFrame({"patient": keys, **rest}).to_parquet(tmp_path / "rome.parquet")
    with refused("data.value") as caught:
        Federation.from_tables([tmp_path / "rome.parquet"], schema())
    assert caught.value.field == "patient"
    with refused("data.users"):
        read(tmp_path, berlin=BERLIN, options={"users": [4, 17, keys[0]]})


def test_keys_that_a_spreadsheet_program_has_changed_are_refused(tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    for changed in (datetime.date(2026, 5, 3), datetime.time(3, 5), datetime.timedelta(hours=30), True, 0.05):
        book = openpyxl.Workbook()
        for row in (["patient", "age", "sex", "ill"], ["3-40", 30, "f", "no"], [changed, 30, "f", "no"]):
            book.active.append(row)
        book.save(tmp_path / "rome.xlsx")
        with refused("data.value") as caught:
            Federation.from_tables([tmp_path / "rome.xlsx"], schema())
        assert "data row 2" in str(caught.value)


def test_keys_that_are_whole_or_uuids_are_read_from_their_types(tmp_path):
    number = UUID(int=7)
    uuids = pa.array([number.bytes], pa.binary(16)).cast(pa.uuid())
    for keys, expected in (
        (pa.array([2**64 - 1], pa.uint64()), str(2**64 - 1)),
        (pa.array([Decimal(10**37 + 1)], pa.decimal128(38, 0)), str(10**37 + 1)),
        (pa.array([17.0], pa.float64()), "17"),
        (uuids, str(number)),
    ):
        pq.write_table(
            pa.table({"patient": keys, "age": [30], "sex": ["f"], "ill": ["no"]}), tmp_path / "a.parquet"
        )
        assert Federation.from_tables([tmp_path / "a.parquet"], schema()).user_keys == (expected,)


def test_numbers_with_decimals_beside_keys_with_letters_are_named(tmp_path, caplog):
    """SQLite writes 1230.0 for 123E1 and for 1230E0 in a column that is not of the type TEXT."""
    for other, count in (("4b", 1), ("4", 0)):
        caplog.clear()
        table = BERLIN.replace("\n4,", f"\n{other},").replace("17,", "17.0,")
        with caplog.at_level(logging.WARNING):
            assert "17" in read(tmp_path, berlin=table).user_keys
        assert sum("numbers with decimals" in record.message for record in caplog.records) == count


def test_missing_parquet_keys_and_features(tmp_path):
    path = tmp_path / "rome.parquet"
    rows = {"patient": [17, None], "age": [30.0, 40.0], "sex": ["f", "m"], "ill": ["no", "no"]}
    pd.DataFrame(rows).to_parquet(path)
    with pytest.raises(SilodpError, match=r"rome\.parquet: column 'patient' is '' in data row 2"):
        Federation.from_tables([path], schema())
    pd.DataFrame({**rows, "patient": [1, 2], "age": [30.0, np.nan]}).to_parquet(path)
    with pytest.raises(SilodpError, match="column 'age' is '' in data row 2, which is no finite number"):
        Federation.from_tables([path], schema())


@pytest.mark.parametrize("number", [dict, lambda **fields: NumericColumn(**fields)])
def test_typical_values_scale_what_is_in_the_range(tmp_path, number):
    age = number(range=(20, 60), typical=(40, 8))
    built = read(tmp_path, berlin=BERLIN, options={"numeric": {"age": age}, "out_of_range": "clip"})
    np.testing.assert_array_equal(built.silos[0].x[:, 0], np.array([1.25, -2.5, 2.5], dtype=np.float32))
    with pytest.raises(SilodpError, match=r"outside the declared range 20\.\.60"):
        read(tmp_path, berlin=BERLIN, options={"numeric": {"age": age}})


@pytest.mark.parametrize(
    ("users", "sentence"),
    [
        ([], "the list of users is empty"),
        ([1, "1.0"], "user key '1' is empty, stands for no user, or is listed twice"),
        ([""], "is empty, stands for no user, or is listed twice"),
        ("nowhere.txt", r"nowhere\.txt: the list of users is not readable"),
    ],
)
def test_bad_user_lists(tmp_path, users, sentence):
    with pytest.raises(SilodpError, match=sentence):
        read(tmp_path, berlin=BERLIN, options={"users": users})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kind": "ranking"}, "kind is 'ranking'; choose"),
        ({"out_of_range": "drop"}, "out_of_range = 'drop': set one of"),
        ({"classes": None}, "has no classes; .* kind = 'real'"),
        ({"kind": "real"}, "kind is 'real' and classes is"),
        ({"label": None}, "kind 'classes' takes label"),
        ({"kind": "survival"}, "kind 'survival' takes event and time"),
        ({"classes": ["yes"]}, "list at least two values"),
        ({"classes": [1, "1.0"]}, "all different"),
        ({"categorical": {"sex": "fm"}}, "column 'sex' are 'fm'; list"),
        ({"numeric": {"age": (80, 20)}}, "column 'age' has range"),
        ({"numeric": {"age": (0, float("inf"))}}, "column 'age' has range"),
        ({"numeric": {"age": 5}}, "column 'age' has range 5; give"),
        ({"numeric": {"age": "05"}}, "column 'age' has range '05'; give"),
        ({"numeric": {"age": ("0", "5")}}, "column 'age' has range"),
        ({"numeric": {"age": {"typical": (50, 10)}}}, "column 'age' has range None; give"),
        ({"numeric": {"age": {"range": (0, 110), "tipical": (50, 10)}}}, "'tipical': did you mean 'typical'"),
        ({"numeric": {"age": {"range": (0, 110), "typical": (50, 0)}}}, "spread > 0"),
        ({"numeric": {"age": {"range": (0, 110), "typical": (50,)}}}, r"has typical \(50,\); give"),
        ({"numeric": {"age": {"range": (0, 110), "typical": (50, float("nan"))}}}, "give finite"),
        (
            {"numeric": {"age": {"range": (0, 110), "typical": (500, 10)}}},
            r"center 500, outside its range 0\.\.110",
        ),
        ({"numeric": {"age": {"range": (0, 110), "typical": (50, 1e-5)}}}, "in the same units"),
        ({"numeric": ["age"]}, r"numeric is \['age'\]; give a mapping from columns to \(low, high\)"),
        ({"categorical": ["sex"]}, "categorical is .* to their categories"),
        ({"categorical": {"sex": 2}}, "column 'sex' are 2; list"),
        ({"classes": 2}, "classes are 2; list at least two"),
        ({"user": 7}, "7 names no column"),
        ({"numeric": {}, "categorical": {}}, "no features"),
        ({"numeric": {"patient": (0, 1)}}, "column 'patient' is declared twice"),
    ],
)
def test_bad_schemas(changes, sentence):
    with pytest.raises(SilodpError, match=sentence):
        schema(**changes)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "data.no_records"),
        (b"patient,age,sex,ill\n", "data.no_records"),
        (b"patient,age,age,sex,ill\n1,2,3,f,no\n", "data.column"),
        (b"patient,age,sex\n1,30,f\n", "data.column"),  # no label
        (BERLIN.encode("utf-16"), "data.encoding"),
        (BERLIN.encode("utf-16-le"), "data.encoding"),  # without a mark of the byte order
        ("patient,age,sex,ill\nMüller,30,f,no\n".encode("latin-1"), "data.encoding"),
        (b"patient,age,sex,ill\n\xed\xa0\x80,30,f,no\n", "data.encoding"),  # half of a surrogate pair
        (b"PK\x03\x04\x00\x00", "data.unreadable"),  # a spreadsheet
        (b"patient;age;sex;ill\n1;30,5;f;no\n", "data.unreadable"),
        (b"patient,age,sex,ill\n1,30,5,f,no\n", "data.unreadable"),
        (b'patient,age,sex,ill\n"1,30,f,no\n', "data.unreadable"),
        (b'patient,age,sex,ill\n1,"30,5",f,no\n', "data.value"),
        (b"patient,age,sex,ill\n1,inf,f,no\n", "data.value"),
        (b"patient,age,sex,ill\n1,,f,no\n", "data.value"),
        (b"patient,age,sex,ill\n1," + b"9" * 400 + b",f,no\n", "data.value"),
        (b"patient,age,sex,ill\n1,2020-01-01,f,no\n", "data.value"),
        (b"patient,age,sex,ill\n,30,f,no\n", "data.value"),
        (b"patient,age,sex,ill\nNaN,30,f,no\n", "data.value"),
    ],
)
def test_a_bad_table_is_refused_with_a_code(tmp_path, content, code):
    path = tmp_path / "odd.csv"
    path.write_bytes(content)
    with pytest.raises(SilodpError) as caught:
        Federation.from_tables([path], schema())
    assert caught.value.code == code
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(path))


def test_a_decimal_comma_is_named(tmp_path):
    with pytest.raises(SilodpError, match="decimal comma"):
        read(tmp_path, odd='patient,age,sex,ill\n1,"30,5",f,no\n')


@pytest.mark.parametrize("date", ["2020-01-31", "31.1.2020", "1/31/2020", "2020-01-31T10:00:00"])
def test_a_date_in_a_column_of_numbers_is_named(tmp_path, date):
    with pytest.raises(SilodpError, match="is a date"):
        read(tmp_path, odd=f"patient,age,sex,ill\n1,{date},f,no\n")


def test_true_and_false_beside_other_classes_are_named(tmp_path):
    own = schema(classes=[0, 1])
    path = tmp_path / "odd.csv"
    path.write_text("patient,age,sex,ill\n1,30,f,True\n")
    with pytest.raises(SilodpError, match=r"set classes = \[false, true\]"):
        Federation.from_tables([path], own)


@pytest.mark.parametrize("key", [b"x", [1], {"a": 1}])
def test_a_cell_that_is_no_text_or_number_is_refused(tmp_path, key):
    pd.DataFrame({"patient": [key], "age": [30], "sex": ["f"], "ill": ["no"]}).to_parquet(
        tmp_path / "odd.parquet"
    )
    with pytest.raises(SilodpError) as caught:
        Federation.from_tables([tmp_path / "odd.parquet"], schema())
    assert caught.value.code == "data.value"


def test_a_real_label_beyond_float32_is_refused(tmp_path):
    options = {"label": "cost", "kind": "real", "classes": None}
    with pytest.raises(SilodpError) as caught:
        read(tmp_path, odd="patient,age,sex,cost\n1,30,f,1e39\n", options=options)
    assert caught.value.code == "data.value"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"classes": None}, "kind = 'real'"),  # a label that is a number
        ({"label": None, "classes": None, "event": "dead", "time": "days"}, "kind = 'survival'"),
    ],
)
def test_a_label_without_its_kind_is_told_which(changes, kind):
    with pytest.raises(SilodpError) as caught:
        schema(**changes)
    assert caught.value.code == "data.kind"
    assert kind in str(caught.value)


def test_a_label_that_is_no_class_is_told_of_kind(tmp_path):
    with pytest.raises(SilodpError, match="kind = 'real'"):
        read(tmp_path, odd="patient,age,sex,ill\n1,30,f,12.5\n")


def test_long_lists_are_cut_short(tmp_path):
    options = {"categorical": {"sex": [str(i) for i in range(100_000)]}}
    with pytest.raises(SilodpError) as caught:
        read(tmp_path, berlin=BERLIN, options=options)
    assert len(str(caught.value)) < 500


def test_many_categories_take_no_square_of_memory(tmp_path):
    categories = [str(i) for i in range(200_000)]  # their identity matrix is 160 GB
    built = read(
        tmp_path, odd="patient,age,sex,ill\n1,30,199999,no\n", options={"categorical": {"sex": categories}}
    )
    assert built.silos[0].x.shape == (1, 200_001)
    assert np.flatnonzero(built.silos[0].x[0, 1:]).tolist() == [199_999]


def test_a_list_of_users_that_is_none_is_refused(tmp_path):
    for users in (3, tmp_path / "absent.txt"):
        with pytest.raises(SilodpError) as caught:
            read(tmp_path, berlin=BERLIN, options={"users": users})
        assert caught.value.code == "data.users"


def test_a_path_that_no_file_can_have_is_refused():
    with pytest.raises(SilodpError) as caught:
        Federation.from_tables(["a\0.csv"], schema())
    assert caught.value.code == "data.files"


def read_frame_of(folder, **columns):
    path = folder / "rome.parquet"
    cells = {"patient": ["1", "2"], "age": [30, 40], "sex": ["f", "m"], "ill": ["no", "yes"], **columns}
    pd.DataFrame(cells).to_parquet(path)
    return Federation.from_tables(
        [path], schema(numeric={"age": {"range": (0, 110), "missing": "indicator"}})
    )


@pytest.mark.parametrize("cells", [[True, False], ["True", "1"], ["yes", "no"], ["A", "B"]])
def test_no_category_is_proposed_as_a_missing_value(tmp_path, cells):
    """Whoever followed the advice trained on a column without a value."""
    with refused("data.value") as caught:
        read_frame_of(tmp_path, age=cells)
    assert "missing =" not in str(caught.value)
    assert "categorical" in str(caught.value)


def test_one_text_among_numbers_is_proposed_as_a_missing_value(tmp_path):
    with refused("data.value"):
        read_frame_of(tmp_path, age=["30", "k.A."])


def test_a_column_without_a_value_warns(tmp_path, caplog):
    for cells, is_warned in (([None, None], True), ([None, 3.0], False)):
        caplog.clear()
        read_frame_of(tmp_path, age=cells)
        assert ("no value in any row" in caplog.text) == is_warned


@pytest.mark.parametrize(("cell", "is_code"), [("-9", True), ("999", True), ("120", False)])
def test_a_number_outside_its_range_may_stand_for_no_value(tmp_path, cell, is_code):
    """Clipped, it would be a number that nobody has."""
    columns = {"age": {"range": (20, 110), "missing": "indicator"}}
    with refused("data.value") as caught:
        read(tmp_path, berlin=BERLIN.replace(",50,", f",{cell},"), options={"numeric": columns})
    setting, option = f'missing_in = {{ "age" = ["{cell}"] }}', f"--missing-in age={cell};"
    assert (setting in str(caught.value)) == is_code
    for missing in ("indicator", None):
        columns["age"]["missing"] = missing
        inputs = schema(numeric=columns).describe_inputs()
        with refused("data.value") as caught:
            read_inputs(tmp_path / "berlin.csv", Schema.from_inputs(inputs))
        assert (option in str(caught.value)) == (missing is not None)


FERRITIN = "patient,hb,ferritin,ill\n1,13,999,yes\n2,999,40,no\n3,999.0,-9,yes\n4,12,,no\n"
AMOUNTS = {name: {"range": (0, 1000), "missing": "indicator"} for name in ("hb", "ferritin")}


@pytest.mark.parametrize("where", ["reader", "readers"])
def test_a_code_stands_for_no_value_in_one_column_alone(tmp_path, where):
    """999 is a code in a column of haemoglobin, and a value in one of ferritin."""
    reader = {"missing": ["-9"], "missing_in": {"hb": ["999"]}}
    options = {"numeric": AMOUNTS, "categorical": {}, where: reader if where == "reader" else {"a": reader}}
    x = read(tmp_path, a=FERRITIN, options=options).silos[0].x
    np.testing.assert_array_equal(x[:, 1], [0, 1, 1, 0])
    np.testing.assert_array_equal(x[:, 3], [0, 0, 1, 1])
    assert x[0, 2] == np.float32(0.998)


def test_a_code_of_one_column_is_found_in_every_kind_of_column(tmp_path):
    """Texts, categories, days and keys are read by other code than numbers."""
    text = "patient,ward,day,hb,ill\n1,X,01.02.2020,13,yes\n2,B,X,X,no\n"
    settings = {
        "numeric": {
            "hb": {"range": (0, 20), "missing": "indicator"},
            "day": {"range": (0, 99), "date": "%d.%m.%Y", "since": "2020-01-01", "missing": "indicator"},
        },
        "categorical": {"ward": {"categories": ["A", "B"], "missing": "A"}},
    }
    reader = {"missing_in": {name: ["X"] for name in ("ward", "day", "hb")}}
    x = read(tmp_path, a=text, options={**settings, "reader": reader}).silos[0].x
    np.testing.assert_array_equal(x[:, [1, 3, 4]], [[0, 0, 1], [1, 1, 0]])
    for column in reader["missing_in"]:
        named = {"missing_in": {name: ["X"] for name in reader["missing_in"] if name != column}}
        with refused("data.value") as caught:
            read(tmp_path, a=text, options={**settings, "reader": named})
        assert caught.value.field == column


@pytest.mark.parametrize("reader", [{"missing": ["999"]}, {"missing_in": {"patient": ["999"]}}])
def test_a_code_stands_for_no_person_where_it_is_declared(tmp_path, reader):
    text = BERLIN.replace("\n4,", "\n999,")
    read(tmp_path, a=text)
    with refused("data.value") as caught:
        read(tmp_path, a=text, options={"reader": reader})
    assert caught.value.field == "patient"


@pytest.mark.parametrize("missing_in", [{"age": "999"}, {"age": [999]}, ["999"], {"hight": ["999"]}])
def test_codes_of_columns_that_cannot_be_are_refused(missing_in):
    with refused("data.schema") as caught:
        schema(reader={"missing_in": missing_in})
    assert "missing_in" in str(caught.value)


CRP = {"range": (0, 500), "typical": (0, 1), "below": {"<0.5": 0.25, "<=0.1": 0.1}, "above": {"> 300": 300}}


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet"])
def test_limits_of_detection_count_as_declared(tmp_path, ending):
    cells = ["<0.5", "< 0.50", " <0.5", "≤ 0.1", "<=.1", ">300", "0.5", "7"]
    if ending == "tsv":
        cells = [cell.replace(".", ",") for cell in cells]
    frame = pd.DataFrame({"patient": range(8), "crp": cells, "ill": "no"})
    path = tmp_path / f"a.{ending}"
    frame.to_parquet(path) if ending == "parquet" else frame.to_csv(
        path, index=False, sep="\t" if ending == "tsv" else ","
    )
    reader = {"decimal": ","} if ending == "tsv" else {}
    found = schema(numeric={"crp": CRP}, categorical={}, reader=reader)
    x = Federation.from_tables({"a": path}, found).silos[0].x
    np.testing.assert_array_equal(x[:, 0], np.float32([0.25, 0.25, 0.25, 0.1, 0.1, 300, 0.5, 7]))
    # A model is stored with them, and predicts with them.
    stored = Schema.from_inputs(found.describe_inputs())
    np.testing.assert_array_equal(read_inputs(path, stored)[0].take(np.arange(8)), x[:, 0])


@pytest.mark.parametrize(
    ("cell", "setting"),
    [("<0.4", 'below = { "<0.4"'), ("≤0.5", 'below = { "≤0.5"'), (">20.0", 'above = { ">20"')],
)
def test_other_limits_are_refused_with_the_setting(tmp_path, cell, setting):
    text = f"patient,crp,ill\n1,<0.5,no\n2,{cell},yes\n"
    with refused("data.value") as caught:
        read(tmp_path, a=text, options={"numeric": {"crp": CRP}, "categorical": {}})
    assert setting in str(caught.value)
    assert repr(cell) in str(caught.value)


def test_a_limit_that_stands_for_no_value_is_missing(tmp_path):
    column = {**CRP, "missing": 77.0}
    for listed, expected in (([], 0.25), (["<0.5"], 77)):
        options = {"numeric": {"crp": column}, "categorical": {}, "reader": {"missing": listed}}
        x = read(tmp_path, a="patient,crp,ill\n1,<0.5,no\n2,3,yes\n", options=options).silos[0].x
        assert x[0, 0] == np.float32(expected)


@pytest.mark.parametrize(
    "change",
    [
        {"below": {}},
        {"below": [("<0.5", 0.25)]},
        {"below": {"0.5": 0.25}},
        {"below": {">0.5": 0.25}},
        {"above": {"<0.5": 0.25}},
        {"below": {"<0,5": 0.25}},
        {"below": {"<0.5": 0.25, "< 0.50": 0.3}},
        {"below": {"<0.5": 5}},
        {"above": {">300": 3}},
        {"below": {"<0.5": -1}},
        {"below": {"<0.5": True}},
        {"below": {"<0.5": float("nan")}},
        {"below": {"<0.5": "0.25"}},
        {"date": "%Y-%m-%d", "since": "2020-01-01"},
    ],
)
def test_limits_that_cannot_be_are_refused(change):
    with refused("data.schema"):
        schema(numeric={"crp": {**CRP, **change}})


MAPPED = "Fallnr,Alter,Geschlecht,krank,age\n17,50,w,ja,x\n4,20,M,nein,y\n17,80,w,1,z\n"
NORD = {
    "columns": {"patient": "Fallnr", "age": "Alter", "sex": " Geschlecht", "ill": "krank"},
    "values": {"sex": {"w": "f", "M": "m"}, "ill": {"ja": "yes", "1": "yes", "nein": "no"}},
}


def test_a_silo_may_name_columns_and_values_in_its_own_way(tmp_path):
    plain = read(tmp_path, berlin=BERLIN, paris=PARIS)
    mapped = read(tmp_path, berlin=MAPPED, paris=PARIS, options={"silos": {"berlin": NORD}})
    assert mapped.digest() == plain.digest()
    assert mapped.public().assumptions == plain.public().assumptions
    assert mapped.schema.describe_inputs() == plain.schema.describe_inputs()  # the model keeps none of it
    assert mapped.schema.list_silo_settings() == ("silos",)


def test_a_mapping_reaches_dates_true_and_false_events_and_splits(tmp_path):
    (tmp_path / "a.csv").write_text("k,Tag,E,T,teil,ok\n1,03.02.2020,tot,5,A,j\n2,04.02.2020,lebt,7,B,n\n")
    day = {"range": (0, 99), "date": "%d.%m.%Y", "since": "2020-02-01"}
    built = Federation.from_tables(
        {"a": tmp_path / "a.csv"},
        Schema(
            user="k",
            kind="survival",
            event="dead",
            time="T",
            split="part",
            numeric={"day": day},
            categorical={"fine": [False, True]},
            silos={
                "a": {
                    "columns": {"day": "Tag", "dead": "E", "part": "teil", "fine": "ok"},
                    "values": {
                        "dead": {"tot": 1, "lebt": 0},
                        "part": {"A": "train", "B": "test"},
                        "fine": {"j": True, "n": False},
                    },
                }
            },
        ),
    )
    assert built.silos[0].y.tolist() == [[1, 5]]
    np.testing.assert_allclose(built.silos[0].x, [[2 / 49.5 - 1, 0, 1]])
    assert built.test.y.tolist() == [[0, 7]]


def test_a_fault_names_the_column_as_the_table_does(tmp_path):
    with refused("data.value") as caught:
        read(tmp_path, berlin=MAPPED.replace("w", "d", 1), options={"silos": {"berlin": NORD}})
    assert "'Geschlecht'" in str(caught.value).replace("' Gesch", "'Gesch")
    assert caught.value.field == "sex"
    with refused("data.column") as caught:
        read(tmp_path, berlin=BERLIN, options={"silos": {"berlin": NORD}})
    assert caught.value.field == "data.schema.user"


@pytest.mark.parametrize(
    ("mapping", "field"),
    [
        (3, "silos"),
        ({"column": {}}, "silos"),
        ({"columns": 3}, "silos"),
        ({"values": {"sex": "f"}}, "silos"),
        ({"columns": {"Age": "Alter"}}, "silos.berlin"),
        ({"columns": {"age": ""}}, "silos.berlin.columns"),
        ({"columns": {"age": 3}}, "silos.berlin.columns"),
        ({"columns": {"age": "sex"}}, "silos.berlin.columns"),
        ({"values": {"age": {"alt": "80"}}}, "silos.berlin.values.age"),
        ({"values": {"patient": {"17": "4"}}}, "silos.berlin.values.patient"),
        ({"values": {"sex": {"w": "female"}}}, "silos.berlin.values.sex"),
        ({"values": {"sex": {"w": None}}}, "silos.berlin.values.sex"),
        ({"values": {"sex": {"w": "f", "w ": "m"}}}, "silos.berlin.values.sex"),
        ({"query": " ; "}, "silos.berlin.query"),
        ({"query": 3}, "silos.berlin.query"),
        ({"query": "SELECT '\0'"}, "silos.berlin.query"),
    ],
)
def test_a_mapping_that_does_not_fit_the_schema_is_refused(mapping, field):
    with refused("data.schema") as caught:
        schema(silos={"berlin": mapping})
    assert caught.value.field == f"data.schema.{field}"


def test_a_query_stays_as_it_is_written_but_for_its_end():
    mapping = {"columns": {"age": "Alter"}, "query": "\n SELECT 1 ;\n"}
    assert schema(silos={"berlin": mapping}).silos["berlin"].query == "SELECT 1"
    assert schema(silos={"berlin": {}}).silos["berlin"].query is None


def test_a_mapping_of_no_silo_is_refused(tmp_path):
    with refused("data.schema") as caught:
        read(tmp_path, berlin=BERLIN, options={"silos": {"Berlin": {"columns": {"age": "age"}}}})
    assert caught.value.field == "silos.Berlin"


def test_all_faults_of_a_table_are_told_at_once(tmp_path):
    """Before, each run told one, and an export of twenty columns took twenty runs to correct."""
    rows = ",30,q,maybe\n#REF!,90,f,yes\n4,old,m,YES\n4,-5,m,no\n4,20,m,no\n"
    with refused("data.value") as caught:
        read(tmp_path, berlin=f"patient,age,sex,ill\n{rows}")
    text = str(caught.value)
    assert caught.value.field == "patient"
    assert "7 faults: (1) " in text
    assert "(8)" not in text
    # Two kinds of user keys, of numbers and of labels, and one category: of each kind the first row and how many more.
    for column, row in (
        ("patient", 1),
        ("patient", 2),
        ("age", 3),
        ("age", 2),
        ("sex", 1),
        ("ill", 3),
        ("ill", 1),
    ):
        assert re.search(rf"column '{column}' is '\S*' in data row {row}\b", text), (column, row)
    assert "in data row 2 (wrong in 1 other row, too)" in text  # 90 and -5
    with refused("data.value") as caught:
        read_inputs(tmp_path / "berlin.csv", Schema.from_inputs(schema().describe_inputs()))
    assert "3 faults: (1) " in str(caught.value)


def test_a_table_of_very_many_faults_tells_the_first_twenty(tmp_path):
    names = [f"c{number:02}" for number in range(25)]
    options = {"numeric": dict.fromkeys(names, (0, 1)), "categorical": {}}
    head = ",".join(["patient", "ill", *names])
    with refused("data.value") as caught:
        read(tmp_path, berlin=f"{head}\n1,yes{',7' * 25}\n2,no{',1' * 25}\n", options=options)
    assert caught.value.field == "c00"
    assert "25 faults: (1) " in str(caught.value)
    assert "(20) column 'c19'" in str(caught.value)
    assert "(21)" not in str(caught.value)
    assert str(caught.value).endswith("; and 5 more")


def test_all_missing_columns_are_told_at_once(tmp_path):
    with refused("data.column") as caught:
        read(tmp_path, berlin="patient,Sex,sick,weight\n1,f,no,80\n")
    assert caught.value.field == "data.schema.label"
    assert all(f"column {name!r} is missing" in str(caught.value) for name in ("age", "sex", "ill"))


def test_faults_of_labels_and_budgets_are_told_with_those_of_features(tmp_path):
    with refused("data.value") as caught:
        read(
            tmp_path,
            berlin="patient,age,sex,ill,eps\n1,90,f,1e39,-1\n2,50,f,-5,1\n",
            options={"kind": "real", "classes": None, "budget": "eps"},
        )
    assert "3 faults" in str(caught.value)
    assert "too large for float32" in str(caught.value)
    assert "not above 0" in str(caught.value)


def test_a_mapping_of_truth_is_written_as_in_toml(tmp_path):
    pd.DataFrame({"patient": [1, 2], "age": [50, 60], "sex": ["f", "m"], "ill": [True, False]}).to_parquet(
        tmp_path / "a.parquet"
    )
    for yes, no in (("true", "false"), ("True", "False")):
        values = {"ill": {yes: "yes", no: "no"}}
        built = Federation.from_tables({"a": tmp_path / "a.parquet"}, schema(silos={"a": {"values": values}}))
        np.testing.assert_array_equal(built.silos[0].y, [1, 0])


def test_an_open_end_is_proposed_as_a_missing_value(tmp_path):
    day = {"range": (0, 99), "date": "%d.%m.%Y", "since": "2020-01-01", "missing": "indicator"}
    for cell, is_open in (("31.12.9999", True), ("31.12.2021", False)):
        text = f"patient,day,ill\n1,02.01.2020,yes\n2,{cell},no\n"
        with refused("data.value") as caught:
            read(tmp_path, a=text, options={"numeric": {"day": day}, "categorical": {}})
        assert (f'missing_in = {{ "day" = ["{cell}"] }}' in str(caught.value)) == is_open
