"""The commands that set up a deployment: what they refuse, what they show, and what a log is."""

from __future__ import annotations

import io
import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from silodp.accounting.guarantee import SECRET_SAMPLE, format_epsilon
from silodp.assumption import Assumption
from silodp.config.resolve import load_config
from silodp.runtime.guarantees import derive_guarantees, plan_charges
from silodp.runtime.run_directory import hold_lock
from silodp_deploy import certificates, setup
from silodp_deploy.acceptance import describe_agreement
from silodp_deploy.cli.deploy import format_agreement
from silodp_deploy.cli.parties import FILTERED_RUNS, FIXED_RUNS, format_spent
from silodp_deploy.consortium import Consortium
from silodp_deploy.https._protocol import ADVICE
from silodp_deploy.policy import Policy
from silodp_deploy.records import load_records, save_records
from silodp_deploy.server import serve
from silodp_deploy.status import StatusFile
from support.commands import CONFIG, Silodp, assert_sentence
from support.consortium import make_parties
from support.deployed import TABLES

NAMES = ("server", "silo-1", "silo-2")


@pytest.fixture
def drafted(silodp: Silodp, tmp_path: Path) -> Path:
    """A public folder and the requests of all parties."""
    (tmp_path / "one.toml").write_text(CONFIG.replace("seed = 1\n", ""))
    folder = tmp_path / "c"
    made = silodp("deploy", "init", tmp_path / "one.toml", "--out", folder)
    assert made.status == 0, made.err
    assert "warning" not in made.err
    for name in NAMES:
        done = silodp("deploy", "keys", name, "--out", tmp_path / name, "--json")
        shutil.copy(done.json["request"], folder / "requests")
    return folder


@pytest.fixture
def _own_logging() -> Iterator[None]:
    """What a server or a silo changes in this process is changed back."""
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    yield
    logging.captureWarnings(False)
    root.setLevel(before[0])
    root.handlers[:] = before[1]


def test_a_seed_is_warned_of_when_the_folder_is_drafted(silodp: Silodp, tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(CONFIG)
    made = silodp("deploy", "init", tmp_path / "one.toml", "--out", tmp_path / "c", "--json")
    assert made.status == 0
    assert made.err.startswith("warning: ")
    assert "seed" in made.err


def test_spellings_in_the_list_of_users_are_warned_of(silodp: Silodp, tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(TABLES.format(user="patient", index='users = ["p7", "P07"]', more=""))
    made = silodp("deploy", "init", tmp_path / "two.toml", "--out", tmp_path / "c", "--json")
    assert made.status == 0
    assert made.err.startswith("warning: 2 person keys (in data.schema.users) would be 1 ")


def test_a_draft_that_fails_leaves_nothing(
    silodp: Silodp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one.toml").write_text(CONFIG.replace("seed = 1\n", ""))

    def fail(path: Path, *_: object) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device", str(path))

    command = ("deploy", "init", tmp_path / "one.toml", "--out", tmp_path / "c")
    with monkeypatch.context() as patch:
        patch.setattr(setup, "write_durably", fail)
        assert_sentence(silodp(*command), code="run.disk_full")
    assert not list((tmp_path / "c").iterdir())
    assert silodp(*command).status == 0


def test_a_sealed_folder_is_sealed_again_only_if_asked_and_under_the_same_authority(
    silodp: Silodp, drafted: Path
) -> None:
    seal = ("deploy", "seal", drafted, "--host", "server.example", "--json")
    assert "[argument.value]" in silodp(*seal[:-1], "--port", 0).err
    assert silodp(*seal).status == 0
    before = Consortium.load(drafted / "public")
    authority = (drafted / "public" / "ca.pem").read_bytes()
    assert_sentence(silodp(*seal), code="deploy.sealed")
    assert Consortium.load(drafted / "public").digest == before.digest
    renewed = silodp("deploy", "seal", drafted, "--again", "--json")
    assert (renewed.json["digest"], renewed.json["renewed"]) == (before.digest, True)
    again = silodp(*seal, "--again", "--port", 8444)
    assert again.json["digest"] != before.digest
    assert not again.json["renewed"]
    assert (drafted / "public" / "ca.pem").read_bytes() == authority
    (drafted / "coordinator" / "authority.key").unlink()
    assert_sentence(silodp(*seal, "--again"), code="deploy.certificate")
    assert (drafted / "public" / "ca.pem").read_bytes() == authority


def test_who_accepts_is_warned_of_a_certificate_that_may_end_before_the_run(
    silodp: Silodp, drafted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may last 365 days, or `max_run_days` of the policy."""
    for days, early in ((366, []), (364, list(NAMES))):
        monkeypatch.setattr(certificates, "VALID_DAYS", days)
        sealed = silodp("deploy", "seal", drafted, "--host", "server.example", "--json", "--again")
        code = ("--code", sealed.json["code"], "--json")
        accepted = silodp("deploy", "accept", drafted / "public", tmp_path / "server", *code)
        assert accepted.json["early_certificates"] == sorted(early)
        assert accepted.err.count("certificates may end before the run does") == bool(early)
        shutil.rmtree(tmp_path / "server" / "agreed")


def test_a_table_is_checked_before_there_are_keys_or_a_seal(silodp: Silodp, tmp_path: Path) -> None:
    """Else a missing cell is first seen by `accept`, when all parties have made keys and telephoned."""
    config = TABLES.format(user="patient", index='users = ["p1", "p2"]', more="")
    for name, text in (
        ("first", config),
        (
            "second",
            config.replace("age = [", "age = { range = [").replace(
                "100.0] }", '100.0], missing = "indicator" } }'
            ),
        ),
    ):
        (tmp_path / f"{name}.toml").write_text(text)
        made = silodp("deploy", "init", tmp_path / f"{name}.toml", "--out", tmp_path / name)
        assert made.status == 0, made.err
    table = tmp_path / "table.csv"
    table.write_text("patient,age,ill\np1,30,yes\np2,,no\n")
    home = tmp_path / "north"
    check = ("deploy", "check", tmp_path / "first" / "public", home)
    assert_sentence(silodp(*check), code="deploy.not_sealed")
    found = silodp(*check, "--data", table, "--json")
    assert found.status == 1
    assert [(one["name"], one["is_good"]) for one in found.json["checks"]] == [
        ("run", True),
        ("table", False),
    ]
    assert "[data.value]" in found.json["checks"][1]["told"]
    second = ("deploy", "check", tmp_path / "second" / "public", home, "--data", table, "--json")
    assert silodp(*second).status == silodp(*second, "--silo", "south").status == 0
    found = silodp(*second, "--silo", "east")
    assert (found.status, "[argument.value]" in found.json["checks"][1]["told"]) == (1, True)
    assert not home.exists()


def test_new_keys_take_the_place_of_old_ones_in_the_folder_with_the_ledgers(
    silodp: Silodp, tmp_path: Path
) -> None:
    """A party's folder is for life: in another one the ledgers begin at zero, and nobody counts what was spent."""
    home = tmp_path / "silo-1"
    keys = ("deploy", "keys", "silo-1", "--out", home, "--json")
    assert_sentence(silodp(*keys, "--again"), code="deploy.key")  # a mistyped folder is not made
    assert not home.exists()
    request = Path(silodp(*keys).json["request"])
    (home / "ledgers").mkdir()
    (home / "ledgers" / "one.jsonl").write_text("what was spent\n")
    refused = silodp(*keys)
    assert_sentence(refused, code="deploy.key")
    assert "another folder" not in refused.err
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    with hold_lock(home / "lock", home):  # the silo is running
        assert_sentence(silodp(*keys, "--again"), code="run.in_use")
    assert silodp(*keys, "--again").status == 0
    changed = {path for path, content in before.items() if path.read_bytes() != content}
    assert changed == {request, home / "identity.key", home / "tls.key"}


def test_no_advice_about_an_old_copy_leads_to_a_new_run() -> None:
    """Its ledgers lack what was spent since the copy was made: ε of the new run would be shown too small."""
    for code, advice in ADVICE.items():
        assert "new run" not in advice, code
    assert "Backup" in ADVICE["deploy.rollback_detected"]


def test_a_code_that_nobody_can_type_is_asked_for_by_name(
    silodp: Silodp, drafted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert silodp("deploy", "seal", drafted, "--host", "localhost").status == 0
    monkeypatch.setattr("sys.stdin", io.StringIO(""))  # as without -it in a container
    told = silodp("deploy", "accept", drafted / "public", tmp_path / "server")
    assert told.status == 2
    assert "give --code CODE" in told.err.splitlines()[-1]
    assert "[argument.value]" in told.err


def test_a_public_folder_that_was_copied_into_another_is_named(
    silodp: Silodp, drafted: Path, tmp_path: Path
) -> None:
    assert silodp("deploy", "seal", drafted, "--host", "localhost").status == 0
    shutil.copytree(drafted / "public", drafted / "public" / "public")
    told = silodp("deploy", "accept", drafted / "public", tmp_path / "server", "--code", "0")
    assert_sentence(told, code="deploy.public")


def test_a_table_of_too_few_persons_is_refused_before_a_policy_is_written(
    silodp: Silodp, drafted: Path, tmp_path: Path
) -> None:
    assert silodp("deploy", "seal", drafted, "--host", "server.example").status == 0
    table, home = tmp_path / "records.npz", tmp_path / "silo-1"
    silo = load_config(tmp_path / "one.toml").load_federation().silos[0]
    save_records(table, silo)
    persons = len(set(silo.user.tolist()))
    code = ("--code", Consortium.load(drafted / "public").code)
    accept = ("deploy", "accept", drafted / "public", home, "--data", table, *code, "--json")
    told = silodp(*accept, "--min-persons", persons + 1)
    assert_sentence(told, code="policy.few_persons")
    assert not any(map(str.isdigit, told.err))  # neither the count nor the limit
    assert not (home / "policy.toml").exists()
    assert silodp(*accept, "--min-persons", -1).status == 2
    assert_sentence(
        silodp("deploy", "accept", drafted / "public", tmp_path / "server", *code, "--min-persons", 3),
        code="argument.conflict",
    )
    assert silodp(*accept, "--min-persons", persons).json["policy"]["min_persons"] == persons
    # Accepted again, it stays; a check of another table applies it.
    assert silodp(*accept).json["policy"]["min_persons"] == persons
    few, others = tmp_path / "few.npz", silo.user != silo.user[0]
    save_records(few, replace(silo, x=silo.x[others], y=silo.y[others], user=silo.user[others]))
    check = ("deploy", "check", drafted / "public", home, "--json", "--data")
    for path, is_good in ((table, True), (few, False)):
        checks = {one["name"]: one for one in silodp(*check, path).json["checks"]}
        assert checks["table"]["is_good"] is is_good
        assert ("policy.few_persons" in checks["table"]["told"]) is not is_good


def test_what_is_accepted_is_shown_in_words(silodp: Silodp, drafted: Path, tmp_path: Path) -> None:
    assert silodp("deploy", "seal", drafted, "--host", "server.example").status == 0
    table = tmp_path / "records.npz"
    save_records(table, load_config(tmp_path / "one.toml").load_federation().silos[0])
    accept = ("deploy", "accept", drafted / "public", tmp_path / "silo-1", "--data", table)
    code = Consortium.load(drafted / "public").code
    profile = "abcd-efgh-jkmn-pqrs-abcd-efgh-jkmn-pqrs"
    assert_sentence(silodp(*accept, "--json", "--code", profile), code="deploy.digest")
    shown = silodp(*accept, "--code", code)
    assert shown.status == 0, shown.err
    for part in ("method      uldp-avg\n", "noise multiplier: 5\n", "local: learning rate 0.01, epochs "):
        assert part in shown.err
    assert "None" not in shown.err
    assert "UldpAvg(" not in shown.err


def test_who_accepts_reads_all_that_the_report_will_ask_to_be_signed(tmp_path: Path) -> None:
    config = CONFIG.replace("seed = 1\n", 'aggregator = "masked"\n').replace(
        "clip =", "user_sampling = 0.5\nclip ="
    )
    consortium = Consortium.load(make_parties(tmp_path, config) / "public")
    spec = consortium.stated_spec
    derived = derive_guarantees(spec, plan_charges(spec, spec.accountant))
    agreed = describe_agreement(consortium)
    shown = {Assumption(**one) for one in agreed["assumptions"]}
    assert {assumed for one in derived.values() for assumed in one.assumptions} == shown
    assert SECRET_SAMPLE in shown
    # And what ε is where that fails.
    known = derived["server"].sample_known
    assert known is not None
    (line,) = [line for line in format_agreement(agreed) if line.startswith("  ε ")]
    assert f"({format_epsilon(known)} if it learns who was sampled)" in line


def test_a_silo_reads_its_table_by_the_mapping_that_all_have_accepted(tmp_path: Path) -> None:
    mapping = 'silos = { south = { columns = { age = "Al\\u001bter" }, values = { ill = { ja = "yes" } } } }'
    config = TABLES.format(user="patient", index=f'users = ["p1", "p2"]\n{mapping}', more="")
    tables = {"north": "patient,age,ill\np1,30,yes", "south": "patient,Al\x1bter,ill\np1,30,ja"}
    for silo, text in tables.items():
        (tmp_path / f"{silo}.csv").write_text(text)
    consortium = Consortium.load(make_parties(tmp_path, config) / "public")
    lines = format_agreement(describe_agreement(consortium))
    assert "  in silo south the column 'Al\\x1bter' is 'age'" in lines
    assert "  in silo south in 'ill' 'ja' is 'yes'" in lines
    for silo in tables:
        data = load_records(tmp_path / f"{silo}.csv", silo, consortium)
        assert (data.x.tolist(), data.y.tolist()) == ([[np.float32(-0.4)]], [1])


@pytest.mark.parametrize(("epsilon", "is_told"), [(0.8, True), (50.0, False)])
def test_a_budget_that_ends_the_run_early_is_shown_and_who_keeps_it(
    epsilon: float, is_told: bool, silodp: Silodp, tmp_path: Path
) -> None:
    (tmp_path / "one.toml").write_text(CONFIG)
    init = ("deploy", "init", tmp_path / "one.toml", "--local", "--out", tmp_path / "c")
    assert silodp(*init, "--set", f"budget.epsilon={epsilon}").status == 0
    consortium = Consortium.load(tmp_path / "c" / "public")
    lines = "\n".join(format_agreement(describe_agreement(consortium)))
    assert (
        "ends the run before ε against released exceeds 0.8; this silo does not check" in lines
    ) == is_told


def test_only_a_silo_has_an_audit_log(silodp: Silodp, tmp_path: Path) -> None:
    for folder in ("server", "nowhere"):
        assert_sentence(silodp("audit-log", tmp_path / folder, "--json"), code="cli.file")
    (tmp_path / "policy.toml").touch()
    assert silodp("audit-log", tmp_path, "--json").json == {"entries": [], "spent": None}


def test_what_all_runs_have_spent_is_told_with_what_it_assumes() -> None:
    """With one run and no limit, too: the next run may be chosen after its models were seen."""
    for limit in (None, 2.0):
        for rule, told in (([], FIXED_RUNS), (["gaussian"], FILTERED_RUNS)):
            spent = {
                "runs": 1,
                "unit": "user",
                "delta": 1e-5,
                "epsilon": {"server": 1.0},
                "limits": {"server": limit},
                "filter_bounds": rule,
            }
            assert told in format_spent(spent)[-1]
    policy = Policy(accepted=[], data="t.csv", lifetime_epsilon={"server": 1.0}, filter_bounds=[])
    assert "only if the runs were fixed beforehand" in policy.to_toml()


WRITTEN = {"written": 1.5, "round": 1, "rounds": 2, "epsilon": {"server": 0.5, "released": None}, "error": None,
           "seconds_since_seen": {"silo-1": None}, "answers": {"silo-1": 3}}  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "5", "[" * 10_000, "\xff",
        *(json.dumps({**WRITTEN, name: value}) for name in WRITTEN for value in ([], {"a": []}, "x", True, 10**400)
          if (name, value) != ("error", "x")),
        *(json.dumps({**WRITTEN, "transfers": {"silo-1": value}}) for value in (7, {"done": 1, "size": "x"})),
        *(json.dumps({**WRITTEN, name: {"silo-1": value}})
          for name in ("answers", "epsilon", "epsilon_limit", "certificate_days", "seconds_since_seen")
          for value in ("7", [7], float("inf"), float("nan"))),
    ],
)  # fmt: skip
def test_a_damaged_status_is_refused_with_a_code(content: str, silodp: Silodp, tmp_path: Path) -> None:
    (tmp_path / "status.json").write_bytes(content.encode("latin-1"))
    for options in ((), ("--json",)):
        found = silodp("deploy", "status", tmp_path, *options)
        assert found.status == 2, found.err
        assert "[checkpoint.damaged]" in found.err


def test_a_sound_status_is_shown(silodp: Silodp, tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(json.dumps(WRITTEN))
    metrics = silodp("deploy", "status", tmp_path, "--metrics").out.splitlines()
    assert f'silodp_epsilon{{folder="{tmp_path.name}",adversary="server"}} 0.5000' in metrics
    shown = silodp("deploy", "status", tmp_path, "--json").json
    assert list(shown.pop("problems")) == ["SilodpDown"]
    assert shown == WRITTEN
    assert "not connected yet" in silodp("deploy", "status", tmp_path).out


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("odd")])
def test_the_status_shows_an_error_of_any_kind(
    error: Exception, silodp: Silodp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("silodp_deploy.server.run", fail)
    parties = make_parties(tmp_path, CONFIG)
    with pytest.raises(type(error)):
        serve(parties / "server", Consortium.load(parties / "public"), listen=("127.0.0.1", 0))
    shown = silodp("deploy", "status", parties / "server", "--json").json
    assert str(error) in shown["error"]


@pytest.mark.usefixtures("_own_logging")
def test_a_second_server_changes_nothing_and_its_failure_is_a_line_of_json(
    silodp: Silodp, tmp_path: Path
) -> None:
    (tmp_path / "one.toml").write_text(CONFIG)
    assert silodp("deploy", "init", tmp_path / "one.toml", "--local", "--out", tmp_path / "c").status == 0
    home = tmp_path / "c" / "server"
    (home / "status.json").write_text("{}")
    with hold_lock(home / "lock", home):
        found = silodp("server", tmp_path / "c" / "public", home, "--listen", "127.0.0.1:0", "--json")
    assert found.status == 2
    assert found.json["error"]["code"] == "run.in_use"
    (line,) = map(json.loads, found.err.splitlines())
    assert (line["level"], line["code"]) == ("error", "run.in_use")
    assert str(home) in line["message"]
    assert datetime.fromisoformat(line["time"]).utcoffset() == timedelta(0)
    assert (home / "status.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("age", "error", "running", "status"),
    [(1, None, True, 0), (1, "away", True, 1), (100, None, True, 1), (1, None, False, 1)],
)
def test_a_health_check_fails_where_no_process_runs_or_it_has_a_problem(
    age: float, error: str | None, running: bool, status: int, silodp: Silodp, tmp_path: Path
) -> None:
    path = tmp_path / "status.json"
    file = StatusFile(path, lambda: {"server": 2.0}, 7, lambda: {"north": 5})
    file.write(round=3, epsilon={"released": 1.5}, error=error, running=running)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"written": content["written"] - age}))
    assert silodp("deploy", "status", tmp_path).status == 0
    found = silodp("deploy", "status", tmp_path, "--check", "--json")
    assert found.status == status
    assert (found.json["round"], found.json["answers"]) == (3, {"north": 5})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_up_runs_a_local_consortium_to_its_end(silodp: Silodp, tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(CONFIG)
    assert silodp("deploy", "init", tmp_path / "one.toml", "--local", "--out", tmp_path / "c").status == 0
    done = silodp("deploy", "up", tmp_path / "c", "--json")
    assert done.status == 0, done.err
    assert (Path(done.json["run"]) / "guarantee.json").exists()
    for home in (tmp_path / "c" / "server", *(tmp_path / "c" / "silos").iterdir()):
        state = silodp("deploy", "status", home, "--check", "--json")
        assert (state.status, state.json["problems"]) == (0, {}), home  # a run that is over needs nobody
        assert state.json["stopped"]
        assert min(state.json["certificate_days"].values()) > 800
        for adversary, epsilon in state.json["epsilon"].items():
            limit = state.json["epsilon_limit"].get(adversary)
            assert limit is None or epsilon <= limit * (1 + 1e-9)
        assert state.json["epsilon_limit"]["released"] > 0
    for name in NAMES[1:]:
        lines = (tmp_path / "c" / "silos" / name / "log.txt").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert "the run is over" in records[-1]["message"]
        assert {datetime.fromisoformat(record["time"]).utcoffset() for record in records} == {timedelta(0)}
    rounds = [line for line in done.err.splitlines() if "is done" in line]
    assert [json.loads(line)["round"] for line in rounds] == [0, 1, 2]
