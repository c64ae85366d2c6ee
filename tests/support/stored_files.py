"""Every file that a party of a deployment or a run stores, in one folder, and what reads each."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

from silodp.accounting.cohort import Cohort, create_cohort
from silodp.accounting.events import Gaussian
from silodp.accounting.ledger import Ledger
from silodp.bundle import load
from silodp.cli.run import run_config
from silodp.config.resolve import load_config, resolve
from silodp.config.schema import parse_config
from silodp.crypto.keys import Identity
from silodp.data.identity import IdentityProfile
from silodp.report.facts import collect_facts
from silodp.report.model_card import write_card
from silodp.report.page import write_report
from silodp.report.run_record import read_run
from silodp.report.statements import list_statements
from silodp.runtime.checkpoint import load_checkpoint
from silodp.runtime.cohort import read_counted_run
from silodp.wire.files import append_durably, write_durably
from silodp_audit.report.checklist import write_checklist
from silodp_audit.report.signature import read_answers, sign_report, verify_report
from silodp_deploy.acceptance import describe_agreement
from silodp_deploy.certificates import read_certificates
from silodp_deploy.cli.deploy import format_agreement
from silodp_deploy.cli.deploy import status as show_status
from silodp_deploy.cli.parties import format_spent
from silodp_deploy.consortium import Consortium
from silodp_deploy.https import find_proxy
from silodp_deploy.lifetime import read_spent
from silodp_deploy.limits import read_audit
from silodp_deploy.policy import check_accepted
from silodp_deploy.records import load_records
from silodp_deploy.setup import draft_public, seal_public
from silodp_deploy.silo import open_silo
from silodp_deploy.status import StatusFile
from support.attacked import make_attack, write_attack
from support.commands import CONFIG
from support.consortium import agree_on_tables
from support.deployed import TABLES

RUN_ID = "a" * 32
SIGNER = Identity.fresh("Ann Bee")
PROFILE = IdentityProfile(
    study="two", kind="digits", population=8, width=4, layouts=("##-##",), placeholders=("0009",)
)


class World:
    """Folders of all parties, those of a finished run, and how each file is read.

    Attributes:
        files: By the path of a file, what reads it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parties, self.run = folder / "parties", folder / "run"
        self.public, self.silo = self.parties / "public", self.parties / "silos" / "north"
        self._write_parties()
        self._write_run()
        fingerprint = json.loads((self.run / "run_spec.json").read_text())["digest"]
        # Without its ledger and model.json nothing has digests of the files: each is parsed whatever it holds.
        bare = shutil.copytree(
            self.run, folder / "bare", ignore=shutil.ignore_patterns("checkpoint", "model*")
        )
        public = [
            *(
                self.public / name
                for name in ("config.toml", "data.json", "run_spec.json", "roster.json", "users.txt")
            ),
            *(self.public / name for name in ("ca.pem", "certificates/north.pem")),
        ]
        report = [
            *(
                self.run / name
                for name in ("guarantee.json", "metrics.jsonl", "run_spec.json", "config.toml")
            ),
            *(
                self.run / name
                for name in ("attack.json", "cohort.json", "plots/allocation.json", "model.json")
            ),
            *(self.run / name for name in ("checkpoint/ledger.jsonl", "signatures/ann-bee.json")),
        ]
        silo = [
            *(
                self.silo / name
                for name in ("policy.toml", "silo.toml", "audit.jsonl", f"ledgers/{RUN_ID}.jsonl")
            ),
            self.silo / "identity.key",
            *sorted((self.silo / "store").iterdir()),
        ]
        self.files: dict[Path, Callable[[], object]] = {
            **dict.fromkeys(public, self.read_public),
            folder / "profiled" / "identity.toml": lambda: Consortium.load(folder / "profiled").stated_spec,
            self.parties / "requests" / "north.request.json": lambda: seal_public(
                self.parties, None, again=True
            ),
            **dict.fromkeys(silo, self.read_silo),
            self.silo / "status.json": self.read_status,
            self.parties / "server" / "accepted.txt": self.read_accepted,
            **dict.fromkeys(report, self.read_report),
            **{
                bare / name: lambda: read_run(bare)
                for name in ("guarantee.json", "metrics.jsonl", "config.toml", "run_spec.json", "attack.json")
            },
            folder / "list.toml": lambda: read_answers(folder / "list.toml", collect_facts(self.run)),
            **{self.run / name: lambda: load(self.run) for name in ("model.safetensors", "MODEL_CARD.md")},
            self.run / "checkpoint" / "state.safetensors": lambda: load_checkpoint(
                self.run / "checkpoint" / "state.safetensors", fingerprint
            ),
            folder / "people": self.read_cohort,
            folder / "secret" / "guarantee.json": lambda: read_counted_run(folder / "secret"),
            folder / "secret" / "run_spec.json": lambda: read_counted_run(folder / "secret"),
        }

    def _write_parties(self) -> None:
        (self.folder / "users.txt").write_text("".join(f"{i:04}\n" for i in range(8)))
        (self.folder / "profile.toml").write_text(PROFILE.to_toml())
        for name in ("north", "south"):
            rows = [f"{i:04},{30 + i},{'yes' if i % 2 else 'no'}" for i in range(8)]
            (self.folder / f"{name}.csv").write_text("\n".join(["patient,age,ill", *rows]) + "\n")
        for index, name in (('users = "users.txt"', "two"), ('identity = "profile.toml"', "profiled")):
            (self.folder / f"{name}.toml").write_text(TABLES.format(user="patient", index=index, more=""))
        tables = {name: self.folder / f"{name}.csv" for name in ("north", "south")}
        agree_on_tables(self.folder / "two.toml", self.parties, tables)
        profiled = load_config(self.folder / "profiled.toml")
        draft_public(profiled, self.folder / "profiled", profiled.read_public_data())
        (self.silo / "silo.toml").write_text('[network]\nproxy = "http://proxy.example:3128"\n')
        consortium = Consortium.load(self.public)
        with open_silo(self.silo, consortium) as service:
            header = service._header
        events = {name: Gaussian(500.0) for name in ("released", "server", "silo")}
        path = self.silo / "ledgers" / f"{RUN_ID}.jsonl"
        with Ledger(path, 1e-5, "pld", run=RUN_ID, silo=header) as ledger:
            ledger.is_first = True
            ledger.charge(0, 0, events, "0" * 64)
            head = ledger.head
        line = (
            f'{{"time": "2026-01-01", "run": "{RUN_ID}", "about": "training", "kind": "update", "round": 0, '
            '"attempt": "", "bytes": 5, "sha256": "00", "charges": 1, '
            f'"head": "{head}"}}'
        )
        for _ in range(3):
            append_durably(self.silo / "audit.jsonl", line.encode(), 0o600)
        StatusFile(self.silo / "status.json", lambda: {"server": 1.0}, 4, lambda: {"north": 3}).write(
            round=1, epsilon={"released": 0.5, "server": None}, error="away"
        )

    def _write_run(self) -> None:
        settings = tomllib.loads(CONFIG)
        run_config(resolve(parse_config(settings)), self.run)
        del settings["seed"]
        run_config(resolve(parse_config(settings)), self.folder / "secret")
        create_cohort(self.folder / "people", {"released": 9.0}, 1e-5)
        cohort = Cohort(self.folder / "people")
        cohort.add(*read_counted_run(self.folder / "secret"), False)
        cohort.note_unknown("an earlier one", 1.0)
        run = collect_facts(self.run).run.id
        counted = (
            f'{{"format": 1, "cohort": "{"0" * 64}", "run": "{run}", "place": 1, "delta": 1e-05, '
            '"limits": {"released": 9.0}, "epsilon": {"released": 1.5}, "unknown": 0}'
        )
        write_durably(self.run / "cohort.json", counted.encode())
        write_attack(self.run, make_attack(self.run))
        write_report(self.run)
        write_card(self.run)
        facts = collect_facts(self.run)
        write_checklist(self.folder / "list.toml", list_statements(facts.assumptions), run)
        text = (self.folder / "list.toml").read_text()
        for name, answer in {"confirmed": "yes", "by": "A", "role": "b", "date": "2026-11-26"}.items():
            text = text.replace(f'\n{name} = ""', f'\n{name} = "{answer}"')
        (self.folder / "list.toml").write_text(text)
        sign_report(self.run, facts, SIGNER, "officer", self.folder / "list.toml")

    def read_public(self) -> None:
        consortium = Consortium.load(self.public)
        read_certificates(self.public, consortium.sealed)
        format_agreement(describe_agreement(consortium))
        load_records(self.folder / "north.csv", "north", consortium)

    def read_silo(self) -> None:
        consortium = Consortium.load(self.public)
        find_proxy(self.silo, consortium.sealed.url)
        entries, _ = read_audit(self.silo / "audit.jsonl")
        format_spent(read_spent(self.silo, entries))
        with open_silo(self.silo, consortium):
            pass

    def read_status(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            show_status(self.silo, False, True)
            show_status(self.silo, False, False)

    def read_accepted(self) -> None:
        check_accepted(self.parties / "server", Consortium.load(self.public).digest)

    def read_report(self) -> None:
        read_run(self.run)
        collect_facts(self.run)
        verify_report(self.run, SIGNER.public)

    def read_cohort(self) -> None:
        cohort = Cohort(self.folder / "people")
        cohort.epsilon("released")
