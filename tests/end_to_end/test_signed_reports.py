"""Signed reports: whatever is changed, added or left out after a signature, the signature no longer verifies.

Without these checks somebody could have a report signed, and put another model, another ε or fewer statements in its
place.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from silodp.assumption import Assumption
from silodp.cli.run import run_config
from silodp.config.resolve import resolve
from silodp.config.schema import parse_config
from silodp.crypto.keys import Identity
from silodp.report.facts import RESPONSIBILITY, collect_facts
from silodp.report.statements import list_statements
from silodp.wire.messages import Message
from silodp.wire.transport import _sign_bytes, sign, verify
from silodp_audit.report.forms import TEMPLATES, compose_form
from silodp_audit.report.signature import _MARKER, Signature, list_signed_files, verify_report
from silodp_deploy.silo import save_identity
from support.attacked import make_attack, write_attack
from support.commands import CONFIG, UNDRAWN, Silodp, assert_sentence
from support.refusals import refused

OTHERS = (
    *("cohort.json", "statistics.json", "table_one.csv", "statistics.html"),
    *("regression.json", "regression.html"),
)
"""Files of other commands."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with secret noise, all of whose signed files are there."""
    directory = tmp_path_factory.mktemp("signed") / "run"
    settings = tomllib.loads(CONFIG)
    del settings["seed"]
    with pytest.MonkeyPatch.context() as patch:
        # As in every test that is not about pictures: a page that was drawn would differ from theirs.
        patch.setattr("silodp.report.page.render_svg", lambda figure, name: UNDRAWN)
        run_config(resolve(parse_config(settings)), directory)
    return directory


@pytest.fixture
def run(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(original, "run")
    return Path("run")


def fill(path: Path, confirmed: str = "yes") -> None:
    answers = {"confirmed": confirmed, "by": "A. Person", "role": "officer", "date": "2026-11-26"}
    text = path.read_text()
    for name, answer in answers.items():
        text = text.replace(f'\n{name} = ""', f'\n{name} = "{answer}"')
    path.write_text(text)


def write_others(silodp: Silodp, run: Path) -> None:
    """Write the files of other commands, and a report of them all; only of cohort.json the report reads the content."""
    for name in OTHERS:
        (run / name).write_text('{"a": 1}')
    counted = {
        **{"format": 1, "run": json.loads((run / "guarantee.json").read_bytes())["run"], "place": 1},
        **{"delta": 1e-5, "limits": {"released": 9.0}, "epsilon": {"released": 1.5}, "unknown": 0},
    }
    (run / "cohort.json").write_text(json.dumps(counted))
    write_attack(run, make_attack(run))
    assert silodp("report", run).status == 0


def sign_run(silodp: Silodp, run: Path, *more: str) -> None:
    if not Path("key").exists():
        assert silodp("report-key", "key").status == 0
    if not Path("list.toml").exists():
        assert silodp("report", run, "--checklist", "list.toml").status == 0
        fill(Path("list.toml"))
    done = silodp(
        *("report", run, "--sign", "key", "--name", "Ann Bee", "--role", "officer"),
        *("--checklist", "list.toml", *more),
    )
    assert done.status == 0, done.err


def public() -> bytes:
    return bytes.fromhex(Path("key.pub").read_text().split()[1])


def test_a_signed_report_verifies_and_says_who_signed_what(run: Path, silodp: Silodp) -> None:
    write_others(silodp, run)
    sign_run(silodp, run)
    done = silodp("report", run, "--verify", "key.pub", "--json").json
    (one,) = done["signatures"].values()
    assert (one["name"], one["role"], one["denied"]) == ("Ann Bee", "officer", [])
    assert done["not_checked"] == []
    (signature,) = verify_report(run, public())[0].values()
    assert set(signature.files) == {*list_signed_files(), "signatures/ann-bee.checklist.toml"}
    statements = list_statements(collect_facts(run).assumptions)
    assert [one.text for one in signature.statements] == [one.text for one in statements]
    assert Path("key").stat().st_mode & 0o077 == 0


def test_a_run_that_was_copied_without_file_times_can_be_signed(run: Path, silodp: Silodp) -> None:
    """Its page states the time in guarantee.json, and not that of the file."""
    finished = json.loads((run / "guarantee.json").read_text())["finished"]
    assert finished[:16].replace("T", " ") in (run / "report.html").read_text()
    for path in run.rglob("*"):
        os.utime(path, (0, 1_000_000_000))
    sign_run(silodp, run)
    verify_report(run, public())


def test_one_byte_changed_anywhere_is_found(run: Path, silodp: Silodp) -> None:
    write_others(silodp, run)
    sign_run(silodp, run)
    (signature,) = verify_report(run, public())[0].values()
    for name in signature.files:
        path = run / name
        content = path.read_bytes()
        for place in {0, 1, len(content) // 2, len(content) - 2, len(content) - 1}:
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            with refused("report.contradicted") as caught:
                verify_report(run, public())
            assert name in str(caught.value)
        for changed in (b"", content[:-1], content + b"\n"):
            path.write_bytes(changed)
            with refused("report.contradicted"):
                verify_report(run, public())
        path.unlink()
        with refused("report.contradicted"):
            verify_report(run, public())
        path.write_bytes(content)
    verify_report(run, public())


@pytest.mark.slow
def test_every_byte_of_a_signature_counts(run: Path, silodp: Silodp) -> None:
    sign_run(silodp, run)
    path = run / "signatures" / "ann-bee.json"
    content = path.read_bytes()
    # Every byte in turn, and what JSON reads as the same value.
    changed = [content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :] for i in range(len(content))]
    same = [content + b"\n", b" " + content, content.replace(b'"name"', b'"n\\u0061me"', 1)]
    fields = json.loads(content)
    same += [json.dumps(fields).encode(), json.dumps(fields | {"more": 1}, sort_keys=True).encode()]
    same.append(content.replace(b'"format":1', b'"format":1,"format":1'))
    for other in [*changed, *same]:
        path.write_bytes(other)
        with refused("report.signature"):
            verify_report(run, public())


def test_a_file_that_is_added_after_signing_is_found(run: Path, silodp: Silodp) -> None:
    sign_run(silodp, run)
    for name in OTHERS:
        (run / name).write_text("{}")
        with refused("report.contradicted") as caught:
            verify_report(run, public())
        assert name in str(caught.value)
        (run / name).unlink()
    verify_report(run, public())


def resign(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Sign other content with the same key, as somebody can who writes a program for it."""
    fields = json.loads(path.read_bytes())
    del fields["signature"]
    change(fields)
    encoded = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    identity = Identity("", bytes.fromhex(Path("key").read_text().split()[1]))
    fields["signature"] = identity.sign(_MARKER + encoded).hex()
    path.write_bytes(json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields["statements"].pop(),
        lambda fields: fields["statements"][0].update(text="something easier"),
        lambda fields: fields["files"].pop("guarantee.json"),
        lambda fields: fields["files"].update({"../outside": "0" * 64}),
        lambda fields: fields["files"].update({"config.toml": hashlib.sha256(b"x").hexdigest()}),
    ],
)
def test_less_than_the_whole_report_cannot_be_signed(
    run: Path, silodp: Silodp, change: Callable[[dict[str, Any]], None]
) -> None:
    sign_run(silodp, run)
    resign(run / "signatures" / "ann-bee.json", lambda fields: None)
    verify_report(run, public())
    resign(run / "signatures" / "ann-bee.json", change)
    with refused("report.contradicted"):
        verify_report(run, public())


def test_no_signature_passes_for_a_message_or_the_reverse(run: Path, silodp: Silodp) -> None:
    sign_run(silodp, run)
    path = run / "signatures" / "ann-bee.json"
    fields = json.loads(path.read_bytes())
    proof = bytes.fromhex(fields.pop("signature"))
    body = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    for signed in (body, _MARKER + body):
        with refused("message.signature"):
            verify(b"silodp 2" + proof + signed, public(), "the server", "north")
    # A message over the very bytes of a report, by the same key.
    identity = Identity("north", bytes.fromhex(Path("key").read_text().split()[1]))
    forged = _sign_bytes(body, identity, "north", "")[8:72]
    for other in (
        forged,
        identity.sign(body),
        sign(Message("update", "run", 0), identity, "north")[8:72],
    ):
        path.write_bytes(
            json.dumps(
                fields | {"signature": other.hex()}, sort_keys=True, separators=(",", ":"), ensure_ascii=False
            ).encode()
        )
        with refused("report.signature"):
            verify_report(run, public())


def test_keys_of_parties_and_others_are_refused(run: Path, silodp: Silodp) -> None:
    sign_run(silodp, run)
    Path("silo").mkdir()
    save_identity(Path("silo"), Identity.fresh("north"))
    Path("open").write_bytes(Path("key").read_bytes())
    Path("open").chmod(0o644)
    Path("damaged").write_text(Path("key").read_text()[:-3])
    for key in ("silo/identity.key", "key.pub", "open", "damaged", "nowhere", "run/model.safetensors"):
        more = ("--name", "A", "--role", "B", "--checklist", "list.toml")
        assert_sentence(silodp("report", run, "--sign", key, *more), code="report.key")
    for key in ("key", "silo/identity.key", "nowhere"):
        assert_sentence(silodp("report", run, "--verify", key), code="report.key")
    assert_sentence(silodp("report-key", "key"), code="report.exists")
    assert silodp("report-key", "other").status == 0
    assert_sentence(silodp("report", run, "--verify", "other.pub"), code="report.signature")


def test_nothing_is_signed_with_a_statement_open(run: Path, silodp: Silodp) -> None:
    assert silodp("report-key", "key").status == 0
    sign = ("report", run, "--sign", "key", "--name", "Ann", "--role", "officer")
    first = list_statements(collect_facts(run).assumptions)[0].id
    assert_sentence(silodp(*sign), first, code="report.unsigned")
    assert silodp("report", run, "--checklist", "list.toml").status == 0
    assert_sentence(silodp("report", run, "--checklist", "list.toml"), code="report.exists")
    assert_sentence(silodp(*sign, "--checklist", "list.toml"), first, code="report.unsigned")
    fill(Path("list.toml"))
    Path("list.toml").write_text(
        Path("list.toml").read_text().replace('confirmed = "yes"', 'confirmed = ""', 1)
    )
    assert_sentence(silodp(*sign, "--checklist", "list.toml"), first, code="report.unsigned")
    assert not (run / "signatures").exists()
    assert_sentence(silodp(*sign[:4]), code="argument.missing")


def test_an_answer_of_no_is_signed_and_shown(run: Path, silodp: Silodp) -> None:
    assert silodp("report", run, "--checklist", "list.toml").status == 0
    fill(Path("list.toml"), "no")
    sign_run(silodp, run)
    (one,) = silodp("report", run, "--verify", "key.pub", "--json").json["signatures"].values()
    assert one["denied"] == [one.id for one in list_statements(collect_facts(run).assumptions)]


def test_a_report_again_after_a_signature(run: Path, silodp: Silodp) -> None:
    """What an administrator does on a Monday morning must not end a signature unseen."""
    sign_run(silodp, run)
    assert silodp("report", run).status == 0  # the same text
    verify_report(run, public())
    with (run / "config.toml").open("a") as file:
        file.write('[card]\npurpose = "beds"\n')
    assert_sentence(silodp("report", run), code="report.signed")
    verify_report(run, public())
    assert silodp("report", run, "--again").status == 0
    with refused("report.contradicted"):
        verify_report(run, public())
    again = (
        "report",
        run,
        "--sign",
        "key",
        "--name",
        "Ann Bee",
        "--role",
        "officer",
        "--checklist",
        "list.toml",
    )
    assert_sentence(silodp(*again), code="report.exists")
    sign_run(silodp, run, "--again")
    verify_report(run, public())


@pytest.mark.parametrize("name", ["report.html", "MODEL_CARD.md"])
def test_a_page_that_silodp_would_not_write_is_not_signed(run: Path, silodp: Silodp, name: str) -> None:
    (run / name).write_text((run / name).read_text().replace("ε", "e", 1))
    assert silodp("report-key", "key").status == 0
    assert silodp("report", run, "--checklist", "list.toml").status == 0
    fill(Path("list.toml"))
    sign = ("--sign", "key", "--name", "A", "--role", "B", "--checklist", "list.toml")
    assert_sentence(silodp("report", run, *sign), name, code="report.contradicted")


def test_the_ledger_is_asked_where_it_is_there(run: Path, silodp: Silodp) -> None:
    """Somebody signs with an older program, or after deleting the ledger, and puts it back."""
    ledger = run / "checkpoint" / "ledger.jsonl"
    ledger.rename("ledger.jsonl")
    (run / "model.json").unlink()  # it has the digest of the guarantee
    (run / "MODEL_CARD.md").unlink()
    stated = json.loads((run / "guarantee.json").read_text())
    for one in stated["guarantees"]:
        one["epsilon"] = one["epsilon"] / 2
    (run / "guarantee.json").write_text(json.dumps(stated))
    assert silodp("report", run).status == 0
    sign_run(silodp, run)
    assert silodp("report", run, "--verify", "key.pub", "--json").json["not_checked"]
    Path("ledger.jsonl").rename(ledger)
    with refused("report.contradicted"):
        verify_report(run, public())


def test_a_shared_copy_without_checkpoint_and_metrics_verifies(run: Path, silodp: Silodp) -> None:
    sign_run(silodp, run)
    shutil.rmtree(run / "checkpoint")
    (run / "metrics.jsonl").unlink()
    done = silodp("report", run, "--verify", "key.pub", "--json")
    assert done.status == 0
    assert len(done.json["not_checked"]) == 1


def test_the_manifest_has_the_digests(run: Path, silodp: Silodp) -> None:
    out = silodp("report", run, "--manifest").out
    lines = dict(reversed(line.split("  ")) for line in out.splitlines())
    assert lines == {
        name: hashlib.sha256((run / name).read_bytes()).hexdigest()
        for name in list_signed_files()
        if (run / name).exists()
    }
    assert_sentence(silodp("report", run, "--manifest", "--verify", "key.pub"), code="argument.conflict")


def test_signed_bytes_are_those_of_the_content() -> None:
    one = Signature("run", "Änne", "role", "time", "00", {"b": "1", "a": "2"}, (), "1")
    assert one.to_bytes().startswith(_MARKER + b'{"files":{"a":"2","b":"1"},"format":1,')
    assert "Änne".encode() in one.to_bytes()


# --- forms ---


FORBIDDEN = re.compile(r"\b(anonymous|anonymized|safe|verified)\b", re.IGNORECASE)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_form_has_the_facts_and_makes_no_judgement(run: Path, silodp: Silodp, name: str) -> None:
    done = silodp("report", run, "--template", name, "--json").json
    text = Path(done["template"]).read_text()
    assert FORBIDDEN.search(text) is None
    assert done["open"] == text.count("TO DO") > 0
    for one in json.loads((run / "guarantee.json").read_text())["guarantees"]:
        assert all(sentence in text for sentence in one["not_covered"])
    assert_sentence(silodp("report", run, "--template", name), code="report.exists")
    if name == "registry":
        entry = yaml.safe_load(text)["deployment"]
        assert entry["privacy_loss"]["privacy_parameters"]["delta"] == 1e-5
        assert list(entry) == [
            *("basic", "dp_variant", "privacy_loss", "deployment_model", "accounting", "implementation"),
            "administrative",
        ]


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_fact_of_a_form_comes_from_a_file(run: Path, name: str) -> None:
    """Each value is replaced in its file, and the form has the new one."""
    facts = collect_facts(run)
    shutil.rmtree(run / "checkpoint")  # without the ledger, guarantee.json may state anything
    (run / "model.json").unlink()
    stated = json.loads((run / "guarantee.json").read_text())
    for one in stated["guarantees"]:
        one.update(epsilon=7.125, delta=3e-6, accountant="new-accountant", rounds=4321, method="new-method")
        premise = Assumption("new", "new premise", "whoever knows")
        technical = Assumption("arithmetic", "new premise of arithmetic", technical=True)
        one.update(not_covered=["new gap"], assumptions=[asdict(premise), asdict(technical)])
    stated.update(method="new-method", settings="NewSettings(1)", run="newrun", aggregator={"name": "masked"})
    (run / "guarantee.json").write_text(json.dumps(stated))
    card = {field: f"new {field}" for field in (*RESPONSIBILITY, "data", "intended_use")}
    with (run / "config.toml").open("a") as file:
        file.write("[card]\n" + "".join(f'{key} = "{value}"\n' for key, value in card.items()))
    spec = json.loads((run / "run_spec.json").read_text())
    spec["data"].update(users=98765, silos=["new-silo"])
    (run / "run_spec.json").write_text(json.dumps(spec))
    write_attack(run, make_attack(run, spec=spec["digest"], canaries=4321))
    text = compose_form(run, collect_facts(run), name)
    attack = hashlib.sha256((run / "attack.json").read_bytes()).hexdigest()
    expected = {
        "dpia": [
            "NewSettings(1)",
            "newrun",
            "masked",
            "98,765",
            "new-silo",
            attack,
            "new premise of arithmetic",
            "4,321 rounds",
            "new-accountant",
            "new data",
            *(card[field] for field in RESPONSIBILITY),
        ],
        "hipaa": [
            "NewSettings(1)",
            "newrun",
            "masked",
            attack,
            "new premise of arithmetic",
            "new recipients",
        ],
        "nist": ["NewSettings(1)", "newrun", "masked", attack, "new premise of arithmetic", "new data"],
        "w3c": ["NewSettings(1)", "newrun", "masked", attack, "new premise of arithmetic", "new premise"],
        "registry": [
            "NewSettings(1)",
            "masked",
            "1 silo",
            "new purpose",
            "new controllers",
            "new intended_use",
            "7.125",
            "3.0e-06",
            hashlib.sha256((run / "guarantee.json").read_bytes()).hexdigest(),
        ],
    }[name]
    for value in [*expected, "ε = 7.125", "new gap", "Not checked"]:
        assert value in text, value
    for old in (facts.run.id, f"{facts.released.epsilon:.3f}", facts.assumptions[0].text):
        assert old not in text


@pytest.mark.parametrize("value", ['a"\nb: c', "- x\n# y", "{% raw %} {{ 1 }}", "'|'<b>"])
def test_no_text_of_a_card_breaks_a_form(run: Path, value: str) -> None:
    with (run / "config.toml").open("a") as file:
        file.write(f"[card]\npurpose = {json.dumps(value)}\n")
    assert (
        yaml.safe_load(compose_form(run, collect_facts(run), "registry"))["deployment"]["basic"][
            "description"
        ]
        == value
    )
    assert " ".join(value.split()) in compose_form(run, collect_facts(run), "dpia")


def test_a_signed_run_that_is_resumed_says_so(run: Path, silodp: Silodp) -> None:
    sign_run(silodp, run)
    done = silodp("run", run, "--resume", "--set", "rounds=3", "--json")
    assert any("ann-bee.json" in warning for warning in done.json["warnings"])
    with refused("report.contradicted"):
        verify_report(run, public())
