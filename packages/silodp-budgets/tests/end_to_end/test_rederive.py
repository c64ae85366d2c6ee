"""What a guarantee says besides ε is told again from config.toml and the run's directory, and compared."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from silodp.accounting.guarantee import HELD_OUT, NOT_COVERED, OTHER_CODE, format_epsilon
from silodp.accounting.views import ADVERSARIES
from silodp.assumption import Assumption
from silodp.cli.main import main
from silodp.errors import SilodpError
from silodp.methods import UldpAvg
from silodp.report import rederive
from silodp.report.audit import AuditResult
from silodp.report.run_record import read_run
from silodp.runtime.checkpoint import COMPLETED_ROUNDS_KEY
from silodp.runtime.run_files import RUN_SPEC
from silodp.runtime.train import train
from silodp.training.sgd.local import LocalTraining
from silodp.wire.messages import Message
from silodp.wire.store import DirectoryStore
from silodp.wire.transport import SIGNED_BYTES, DeliveryFailure, InProcess
from support.commands import CONFIG, Silodp, assert_sentence
from support.configs import DDP, PERSONAL, TABLES, USERS, tables
from support.oracles import logistic_task, small_federation
from support.refusals import refused as refused_with
from support.rewriting import rebind

KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "persons": (CONFIG + USERS, ("delta=0.06",)),  # above 1/U
    "sampled": (CONFIG, ("method.user_sampling=0.5",)),
    "claims": (DDP, ("method.trajectory=paper",)),
    "own code": (CONFIG, ("task.metrics=['own.py:largest']",)),
    "masked": (DDP, ("aggregator=masked", "aggregation.min_silos=3", "data.silos=4")),
    "records": (PERSONAL, ()),
    "seeded coins": (PERSONAL, ("rounds=4", "method.client_sampling=0.5")),
    # Noise and draws of silos are the system's: who joined is known from the server's memory alone.
    "coins": (PERSONAL.replace("seed = 1\n", "", 1), ("rounds=4", "method.client_sampling=0.5")),
}
Ran = Callable[[str], Path]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Finished runs by their kind, each run once."""
    folder, done = tmp_path_factory.mktemp("runs"), dict[str, Path]()

    def finished(kind: str) -> Path:
        if kind not in done:
            text, sets = KINDS[kind]
            (folder / f"{kind}.toml").write_text(text)
            (folder / "own.py").write_text(
                "def largest(outputs, targets):\n    return float(outputs.max())\n"
            )
            done[kind] = folder / kind
            overrides = [part for one in sets for part in ("--set", one)]
            with pytest.raises(SystemExit) as left:
                main(["run", str(folder / f"{kind}.toml"), "--out", str(done[kind]), *overrides])
            assert left.value.code == 0
        return done[kind]

    return finished


@pytest.fixture
def copy(runs: Ran, tmp_path: Path) -> Ran:
    def copied(kind: str) -> Path:
        return Path(shutil.copytree(runs(kind), tmp_path / "run"))

    return copied


def told(directory: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((directory / "guarantee.json").read_text())["guarantees"]
    return found


def tell(directory: Path, guarantees: list[dict[str, Any]], **summary: Any) -> None:
    path = directory / "guarantee.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"guarantees": guarantees} | summary))
    rebind(directory)


def audit(directory: Path) -> AuditResult:
    found = read_run(directory).audit
    assert found is not None
    return found


def refused(directory: Path, says: str) -> None:
    with pytest.raises(SilodpError) as error:
        read_run(directory)
    assert "is contradicted by the run's " in str(error.value) or re.search(
        "not the (configuration|specification)", str(error.value)
    )
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_of_an_untouched_run_is_borne_out(runs: Ran, kind: str) -> None:
    assert audit(runs(kind)).unchecked == ()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if "coins" in kind else ()) for kind in KINDS]
)
def test_no_assumption_can_be_left_out(copy: Ran, kind: str) -> None:
    directory = copy(kind)
    whole = told(directory)
    for place, said in enumerate(whole):
        assert len(said["assumptions"]) > 4
        for one in said["assumptions"]:
            rest = [other for other in said["assumptions"] if other != one]
            # Neither with another text, nor where nobody has to answer for it.
            technical = one | {"technical": not one["technical"], "known_by": "x" * one["technical"]}
            for instead in ([], [one | {"text": "nobody looks"}], [technical]):
                changed = said | {"assumptions": [*rest, *instead]}
                tell(directory, [*whole[:place], changed, *whole[place + 1 :]])
                nothing = f"against '{ADVERSARIES[place]}' it says nothing of what it assumes: {one['id']} "
                refused(directory, nothing)
    moon = asdict(Assumption.from_text("the moon is full"))
    tell(directory, [said | {"assumptions": [*said["assumptions"], moon]} for said in whole])
    audit(directory)  # more may be assumed
    if kind == "persons":
        assert "delta-large" in [one["id"] for one in whole[0]["assumptions"]]
    assert all((asdict(OTHER_CODE) in said["assumptions"]) == (kind == "own code") for said in whole)


@pytest.mark.parametrize("text", NOT_COVERED)
def test_nothing_that_is_not_covered_can_be_left_out(copy: Ran, text: str) -> None:
    directory = copy("persons")
    whole = told(directory)
    for said in whole:
        said["not_covered"].remove(text)
    tell(directory, whole)
    refused(directory, f"nothing of what is not covered: {text}")
    if text == HELD_OUT:
        rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        nothing = [row | {"loss": None, "metrics": {}} for row in rows]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in nothing))
        audit(rebind(directory))


@pytest.mark.parametrize("kind", ["persons", "records", pytest.param("coins", marks=pytest.mark.slow)])
def test_what_a_budget_was_charged_cannot_be_changed(copy: Ran, kind: str) -> None:
    directory = copy(kind)
    whole = json.dumps(told(directory))

    def changed(place: int, entry: int, **fields: Any) -> None:
        again = json.loads(whole)
        again[place]["groups"][entry] |= fields
        tell(directory, again)

    for place, said in enumerate(json.loads(whole)):
        for entry, group in enumerate(said["groups"][:3]):
            for key in ("planned", "realized", "budget", "q" if kind != "persons" else "clip"):
                if key == "realized" and group[key] == 0:
                    continue  # by the system's coins no silo joined: nothing less can be stated
                changed(place, entry, **{key: group[key] * 0.999})
                refused(directory, f"against '{ADVERSARIES[place]}' it says {key} = ")
            changed(place, entry, units=group["units"] + 1)
            refused(directory, f"units = {group['units'] + 1} of the budget")
        again = json.loads(whole)
        del again[place]["groups"][-1]
        tell(directory, again)
        refused(directory, f"it says {len(said['groups']) - 1} budgets, and there are {len(said['groups'])}")
    tell(directory, [said | {"groups": []} for said in json.loads(whole)])
    refused(directory, "it says 0 budgets, and there are")


def test_what_holds_under_weaker_assumptions_cannot_be_changed(copy: Ran) -> None:
    """What the server gets if it learns the samples, and what persons get who are not recognized everywhere."""
    directory = copy("sampled")
    whole = told(directory)
    assert [said["sample_known"] is None for said in whole] == [True, False, True]
    assert whole[1]["sample_known"] > whole[1]["epsilon"]
    known = whole[1]["sample_known"]
    for other in (known * 0.99, whole[1]["epsilon"], None):
        tell(directory, [whole[0], whole[1] | {"sample_known": other}, whole[2]])
        refused(directory, "against 'server' it says sample_known = ")
    tell(directory, [whole[0] | {"sample_known": known}, *whole[1:]])
    refused(directory, "against 'released' it says sample_known = ")
    for place, said in enumerate(whole):
        rows = said["linkage"]
        assert len(rows) == 3
        first = rows[0]
        changes = [
            [],
            rows[1:],
            [first | {"epsilon": first["epsilon"] * 0.99}, *rows[1:]],
            [first | {"case": "nobody"}, *rows[1:]],
            [first | {"estimate": not first["estimate"]}, *rows[1:]],
        ]
        for changed in changes:
            tell(directory, [*whole[:place], said | {"linkage": changed}, *whole[place + 1 :]])
            refused(directory, f"against '{ADVERSARIES[place]}' it says linkage = ")
    tell(directory, whole)
    assert audit(directory).unchecked == ()


def test_which_silos_joined_is_read_where_the_server_keeps_it(copy: Ran) -> None:
    directory = copy("coins")
    assert rederive.JOINED not in audit(directory).unchecked
    for path in (directory / "checkpoint" / "server").glob("*clients"):
        path.unlink()
    assert audit(directory).unchecked == (rederive.JOINED,)


def test_which_silos_joined_follows_from_a_seed(copy: Ran) -> None:
    directory = copy("seeded coins")
    for path in (directory / "checkpoint" / "server").iterdir():
        path.unlink()
    assert audit(directory).unchecked == ()


def test_a_ledger_older_than_the_servers_store_is_refused(copy: Ran) -> None:
    directory = copy("records")
    store = DirectoryStore(directory / "checkpoint" / "server")
    mark = Message.decode(store.get(COMPLETED_ROUNDS_KEY) or b"")
    store.put(COMPLETED_ROUNDS_KEY, replace(mark, round=mark.round + 2).encode())
    with pytest.raises(
        SilodpError, match=r"are of different rounds: its ledger has .*, and by the store of the server"
    ):
        read_run(directory)


def test_a_claim_stays_the_claim_it_is(copy: Ran) -> None:
    directory = copy("claims")
    whole = told(directory)
    (claim,) = whole[0]["claims"]
    for claims in (
        [],
        [claim | {"epsilon": claim["epsilon"] / 2}],
        [claim | {"why": "proven"}],
        [claim, claim],
    ):
        tell(directory, [whole[0] | {"claims": claims}, *whole[1:]])
        refused(directory, "against 'released' it says claims = ")
    tell(directory, [whole[0], whole[1] | {"claims": [claim]}, whole[2]])
    refused(directory, "against 'server' it says claims = ")


def test_why_nothing_is_promised_cannot_be_changed(silodp: Silodp, config: Path) -> None:
    assert silodp("run", config, "--set", "method.noise_multiplier=0", "--out", "out").status == 0
    whole = told(Path("out"))
    assert audit(Path("out")).unchecked == ()
    tell(Path("out"), [whole[0] | {"reason": "the moon is full"}, *whole[1:]])
    refused(
        Path("out"), "there is no guarantee because the moon is full, and the ledger says: noise_multiplier"
    )


def test_rounds_at_the_head_are_those_of_the_ledger(copy: Ran) -> None:
    directory = copy("claims")
    tell(directory, told(directory), rounds=1)
    refused(directory, "it says rounds = 1, and the ledger says 2")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("clip = 1.0", "clip = 0.5", "by it method = Ddp("),
        ("delta = 1e-05", "delta = 1e-06", "by it delta = 1e-06, and by the ledger 1e-05"),
        ("seed = 1", "", "by it seed = none, and by the ledger set"),
        ('accountant = "rdp"', 'accountant = "pld"', "by it accountant = pld, and by the ledger rdp"),
        ("min_silos = 3", "min_silos = 4", "by it aggregator = Masked(min_silos=4"),
        ('aggregator = "masked"', 'aggregator = "plain"', "cannot be read"),
    ],
)
def test_a_configuration_of_another_run_is_refused(copy: Ran, old: str, new: str, says: str) -> None:
    directory = copy("masked")
    path = directory / "config.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    rebind(directory)
    if says == "cannot be read":
        (unchecked,) = audit(directory).unchecked
        assert "config.toml cannot be read: aggregation.min_silos" in unchecked
        return
    refused(directory, says)


def test_an_aggregators_settings_are_those_that_the_rounds_cost(copy: Ran) -> None:
    """The ledger names the aggregator alone; both files say the same of its settings, and it is not what was run."""
    directory = copy("masked")
    path = directory / "config.toml"
    path.write_text(path.read_text().replace("min_silos = 3", "min_silos = 3\nunits = 8192"))
    tell(directory, told(directory), aggregator={"name": "masked", "min_silos": 3, "units": 8192})
    refused(directory, "not the specification of this run: its aggregator differs")


def test_without_a_configuration_it_is_said_what_is_not_checked(silodp: Silodp, copy: Ran) -> None:
    directory = copy("records")
    (directory / "config.toml").unlink()
    whole = told(directory)
    whole[0]["assumptions"].pop()
    whole[0]["groups"][0]["planned"] = 0.001
    tell(directory, whole)
    done = silodp("report", directory)
    left = "assumptions, claims, and charges of units with privacy budgets (there is no config.toml)"
    shown = done.out.splitlines()
    assert shown[:2] == ["The guarantees and the metrics agree with the ledger.", f"Not checked: {left}."]
    written = [f"Report: {directory / 'report.html'}", f"Model card: {directory / 'MODEL_CARD.md'}"]
    assert shown[-2:] == written
    assert [line.partition(":")[0] for line in shown[2:6]] == [
        "Against whoever sees the models",
        "Against the server",
        "Against another silo",
        "The model predicts better than a constant",
    ]
    assert silodp("report", directory, "--json").json["not_checked"] == [left]
    assert (directory / "report.html").read_text().count(f"ot checked: {left}") == 2
    (directory / "checkpoint" / "ledger.jsonl").unlink()
    gone = silodp("report", directory).out.splitlines()
    assert [gone[0], *gone[-2:]] == ["Not checked: the guarantee: the ledger is missing.", *written]


def test_a_run_from_python_says_what_is_not_checked(tmp_path: Path) -> None:
    method = UldpAvg(5.0, 0.5, LocalTraining(learning_rate=0.1))
    train(small_federation(users=12), logistic_task(), method, rounds=1, seed=0, out=tmp_path / "run")
    (unchecked,) = audit(tmp_path / "run").unchecked
    assert unchecked.endswith("(there is no config.toml)")


def test_the_specification_is_the_one_that_was_run(copy: Ran) -> None:
    """Parties compare its digest, and the checkpoint keeps it: nobody changes U afterwards, so that δ looks small."""
    directory = copy("masked")
    path = directory / RUN_SPEC
    stored = json.loads(path.read_text())
    for change in ({"digest": "0" * 64}, {"seed": None}, {"data": stored["data"] | {"users": 7}}):
        path.write_text(json.dumps(stored | change))
        refused(rebind(directory), "is not the specification of this run")
    for damage in (stored["data"], stored | {"format": True}, stored | {"format": 2}):
        path.write_text(json.dumps(damage))
        with refused_with("report.damaged"):
            read_run(rebind(directory))
    path.unlink()
    with refused_with("report.missing"):
        read_run(rebind(directory))


def test_a_specification_made_again_for_other_data_is_not_the_checkpoints(copy: Ran) -> None:
    directory = copy("masked")
    path = directory / RUN_SPEC
    stored = json.loads(path.read_text())
    del stored["data"]["index_digest"]
    stored["digest"] = digest_again(stored | {"data": {**stored["data"], "index_digest": ""}})
    path.write_text(json.dumps(stored | {"data": {**stored["data"], "index_digest": ""}}))
    refused(rebind(directory), "its digest")


def digest_again(stored: dict[str, Any]) -> str:
    """What somebody computes who changes a specification and knows how its digest is made."""
    names = ("data", "model", "method", "aggregator", "min_silos", "delta", "accountant", "seed")
    text = json.dumps({name: stored[name] for name in names}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def test_of_budgets_in_a_column_each_is_checked_and_not_their_number(silodp: Silodp, tmp_path: Path) -> None:
    assert silodp("run", tables(tmp_path, ("0.5", "1", "2")), "--out", tmp_path / "out").status == 0
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").unlink()  # a report reads no tables
    directory = tmp_path / "out"
    assert audit(directory).unchecked == ()
    whole = told(directory)
    for key in ("planned", "realized", "q"):
        again = json.loads(json.dumps(whole))
        again[1]["groups"][1][key] *= 0.99
        tell(directory, again)
        refused(directory, f"against 'server' it says {key} = ")
    tell(directory, [said | {"groups": []} for said in whole])
    refused(directory, "it says 0 budgets, and there are 3")


def test_persons_whose_list_is_elsewhere_are_counted_in_what_silos_were_given(
    silodp: Silodp, config: Path
) -> None:
    for name in ("north", "south"):
        Path(f"{name}.csv").write_text("person,sick,age\nu1,no,30\nu2,yes,60\nu3,no,50\n")
    Path("ids.txt").write_text("u1\nu2\nu3\n")
    config.write_text(TABLES.replace('user = "person"', 'user = "person"\nusers = "ids.txt"'))
    assert silodp("run", config, "--out", "out", "--set", "delta=0.4").status == 0
    Path("ids.txt").unlink()
    assert audit(Path("out")).unchecked == ()
    whole = told(Path("out"))
    rest = [one for one in whole[0]["assumptions"] if one["id"] != "delta-large"]
    assert len(rest) == len(whole[0]["assumptions"]) - 1
    tell(Path("out"), [whole[0] | {"assumptions": rest}, *whole[1:]])
    refused(Path("out"), "nothing of what it assumes: delta-large (δ = 0.4 is accepted")


def test_a_wrong_word_is_one_sentence_at_the_command(silodp: Silodp, copy: Ran) -> None:
    directory = copy("claims")
    whole = told(directory)
    whole[2]["assumptions"].pop(0)
    tell(directory, whole)
    assert_sentence(silodp("report", directory), "contradicted by the run's ledger and config.toml", "'silo'")


def test_what_holds_with_any_dropouts_cannot_be_changed(
    silodp: Silodp, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One silo of five drops out of round 2."""
    ask = InProcess.ask

    def loses(self: InProcess, requests: Any, timeout: float | None = None) -> Any:
        asked = {name: Message.decode(data[SIGNED_BYTES:]) for name, data in requests.items()}
        lost = [name for name, m in asked.items() if m.kind == "update" and m.round == 1][4:]
        answers, failures = ask(self, {name: m for name, m in requests.items() if name not in lost})
        return answers, {**failures, **{name: DeliveryFailure("offline", "a test") for name in lost}}

    monkeypatch.setattr(InProcess, "ask", loses)
    secure = ("--set", "aggregator=masked", "--set", "data.silos=5", "--set", "aggregation.min_silos=3")
    done = silodp("run", config, "--out", "out", "--set", "rounds=3", *secure)
    assert done.status == 0
    directory = Path("out")
    cap = format_epsilon(told(directory)[0]["any_dropouts"])
    assert f"at most {cap} if silos drop out depending on the models" in done.out
    assert silodp("report", directory).status == 0
    assert "if silos drop out depending on the models" in (directory / "report.html").read_text()
    assert audit(directory).unchecked == ()
    whole = told(directory)
    assert whole[0]["any_dropouts"] > whole[0]["epsilon"]
    tell(directory, [whole[0] | {"any_dropouts": whole[0]["epsilon"]}, *whole[1:]])
    refused(directory, "against 'released' it says any_dropouts = ")
