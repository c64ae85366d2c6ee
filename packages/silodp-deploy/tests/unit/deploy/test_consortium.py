"""The public folder, the ledgers of a silo over all its runs, and what is refused before anything runs."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.events import Gaussian, NonPrivate, PoissonSampled
from silodp.accounting.filters import DEFAULT_BOUNDS, Filter
from silodp.accounting.ledger import Budget, Ledger, SiloHeader, reopen_ledger
from silodp.accounting.views import ADVERSARIES
from silodp.aggregators.run_spec import RunSpec
from silodp.config.resolve import load_config
from silodp.data import SiloData
from silodp.data.identity import IdentityProfile
from silodp.errors import SilodpError
from silodp.runtime.run_directory import hold_lock
from silodp.runtime.silo import make_ledger
from silodp.wire.files import PRIVATE_FILE, append_durably
from silodp.wire.store import DirectoryStore
from silodp_deploy.acceptance import describe_agreement, write_policy
from silodp_deploy.consortium import Consortium, check_party_name, take_copy
from silodp_deploy.history import find_plan
from silodp_deploy.lifetime import (
    LifetimeLedger,
    compute_lifetime_cost,
    count_plan,
    encode_plan,
    find_shortfall,
    read_ledgers,
)
from silodp_deploy.policy import Policy
from silodp_deploy.public_files import compute_digest, format_digest
from silodp_deploy.records import load_records, save_records
from silodp_deploy.server import _lead_to_run, _make_mailbox, serve
from silodp_deploy.setup import draft_public, list_user_list_warnings, make_keys
from silodp_deploy.silo import check_policy, open_silo
from silodp_deploy.sockets import SocketOptions
from silodp_deploy.status import StatusFile, read_status
from support.commands import CONFIG
from support.consortium import make_parties
from support.deployed import TABLES
from support.refusals import refused

PSEUDONYMS = 'identity = "profile.toml"'


def charge(ledger: Ledger, round_: int, sigma: float) -> None:
    ledger.charge(round_, 0, {name: Gaussian(sigma) for name in ("released", "server", "silo")})


def test_a_public_folder_leads_to_the_run_that_it_states(public: Path) -> None:
    consortium = Consortium.load(public)
    assert consortium.spec.digest == consortium.stated_spec.digest
    assert consortium.spec == consortium.stated_spec
    with refused("deploy.not_sealed"):
        _ = consortium.sealed


def test_every_byte_of_a_public_folder_counts_for_its_digest(public: Path) -> None:
    digests = {compute_digest(public)}
    for path in sorted(public.iterdir()):
        text = path.read_text()
        path.write_text(text + " ")
        digests.add(compute_digest(public))
        path.write_text(text)
    (public / "more.py").touch()
    digests.add(compute_digest(public))
    (public / "more.py").rename(public / "less.py")
    digests.add(compute_digest(public))
    assert len(digests) == 3 + 3
    assert format_digest("0123456789abcdef" * 4) == "0123 4567 89ab cdef 0123 4567 89ab cdef"


@pytest.mark.parametrize(
    ("file", "old", "new", "code"),
    [
        ("run_spec.json", '"min_silos": 2', '"min_silos": 1', "deploy.public"),
        ("run_spec.json", '"rounds": ', '"rounds": 1', "deploy.public"),
        ("run_spec.json", '"size": 31', '"size": 32', "deploy.spec"),
        ("config.toml", "clip = 0.1", "clip = 0.2", "deploy.spec"),
        ("data.json", '"users": 20', '"users": 21', "deploy.public"),
        ("run_spec.json", '"digest"', '"nothing"', "deploy.spec"),
        ("run_spec.json", '"format": 1', '"format": true', "deploy.public"),
        ("data.json", '"silo-1"', "true", "deploy.public"),
        ("data.json", '"classes": 2', '"classes": true', "deploy.public"),
        ("data.json", '"silos"', '"siloz"', "deploy.public"),
        ("data.json", "{", "", "deploy.public"),
        ("data.json", '"mean radius"', '"age"', "deploy.public"),
        ("data.json", '"classes": 2', '"classes": 3', "deploy.public"),
        ("data.json", '"silo-1"', '"../silo-1"', "deploy.name"),
        ("config.toml", "[data]", '[task]\nmodel = "/elsewhere/net.py:Net"\n[data]', "deploy.public"),
        ("config.toml", 'name = "uldp-avg"', 'name = "net.py:Net"', "report.foreign_code"),
    ],
)
def test_a_folder_that_was_changed_is_refused(public: Path, file: str, old: str, new: str, code: str) -> None:
    text = (public / file).read_text()
    assert old in text
    (public / file).write_text(text.replace(old, new))
    with refused(code):
        _ = Consortium.load(public).stated_spec


@pytest.mark.parametrize(
    "changes",
    [
        {"format": True},
        {"format": 2},
        {"port": 0},
        {"port": 70_000},
        {"port": True},
        {"port": "8443"},
        {"host": ["a"]},
        {"host": "a b"},
        {"for_tests": 1},
        {"server": "00" * 31},
        {"tls": {}},
        {"more": 1},
    ],
    ids=str,
)
def test_a_roster_with_a_wrong_field_is_refused_in_one_line(
    changes: dict[str, object], tmp_path: Path
) -> None:
    public = make_parties(tmp_path, CONFIG) / "public"
    path = public / "roster.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with refused("deploy.public") as caught:
        Consortium.load(public)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ('accountant = "few.py:FewOrders"', "report.foreign_code"),
        ('task.model = "own_models:Net"', "deploy.public"),
        ('task = { model = "net.py:Net", loss = "more/net.py:loss" }', "argument.conflict"),
        ('task = { model = "net.py:Net", loss = "net.py:loss" }', None),
    ],
)
def test_a_folder_that_every_party_would_refuse_is_not_drafted(
    line: str, code: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code of other fields, of a module that is installed here alone, and two files that would be one."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "few.py").write_text(
        "from silodp.accounting.rdp import RdpAccountant\n"
        "class FewOrders(RdpAccountant):\n"
        "    def __init__(self):\n"
        "        super().__init__('few-orders', (2.0, 4.0, 8.0, 16.0))\n"
    )
    net = (
        "import torch\n"
        "def Net(features): return torch.nn.Linear(features, 1)\n"
        "def loss(outputs, targets): return (outputs.flatten() - targets) ** 2\n"
    )
    (tmp_path / "more").mkdir()
    for name, text in (("net.py", net), ("own_models.py", net), ("more/net.py", net + "# another one\n")):
        (tmp_path / name).write_text(text)
    (tmp_path / "one.toml").write_text(f"{line}\n{CONFIG}")
    config = load_config(tmp_path / "one.toml")
    draft = partial(draft_public, config, tmp_path / "public", config.read_public_data())
    if code is None:
        draft()
        return
    with refused(code):
        draft()
    assert not (tmp_path / "public").exists()


def test_what_was_digested_is_what_is_read(public: Path, tmp_path: Path) -> None:
    """Compiled Python is never digested, so it must never be executed; later changes change nothing."""
    (public / "__pycache__").mkdir()
    (public / "__pycache__" / "net.cpython-311.pyc").write_bytes(b"evil")
    (public / ".net.py").touch()
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    before = Consortium.load(public)
    copy = take_copy(public, home)
    assert copy.digest == before.digest
    assert {path.name for path in copy.folder.rglob("*")} == {"config.toml", "data.json", "run_spec.json"}
    (public / "config.toml").write_text(
        (public / "config.toml").read_text().replace("clip = 0.1", "clip = 0.2")
    )
    assert copy.spec.digest == before.spec.digest
    (copy.folder / "config.toml").write_text("broken")  # a copy that was changed is made again
    (public / "config.toml").write_text(
        (public / "config.toml").read_text().replace("clip = 0.2", "clip = 0.1")
    )
    assert take_copy(public, home).spec.digest == before.spec.digest


WRONG_RECORDS: dict[str, dict[str, np.ndarray]] = {
    "a person beyond U": {"user": np.array([0, 20])},
    "a person below 0": {"user": np.array([-1, 0])},
    "a class beyond the last": {"y": np.array([0, 2])},
    "a class below 0": {"y": np.array([-1, 0])},
    "labels that are numbers": dict.fromkeys(("y", "test_y"), np.ones(2, np.float32)),
    "survival times": dict.fromkeys(("y", "test_y"), np.ones((2, 2), np.float32)),
    "another number of columns": dict.fromkeys(("x", "test_x"), np.zeros((2, 29), np.float32)),
    "a held-out class beyond the last": {"test_y": np.array([0, 2])},
}


@pytest.mark.parametrize("what", [None, *WRONG_RECORDS])
def test_records_are_of_the_kind_that_was_agreed_on(what: str | None, public: Path, tmp_path: Path) -> None:
    """Weights and noise are sized for the public facts; what a silo reads by itself it compares with them."""
    consortium, path = Consortium.load(public), tmp_path / "records.npz"
    assert (consortium.data.users, consortium.data.classes) == (20, 2)
    x, y, user = np.zeros((2, *consortium.data.record_shape), np.float32), np.array([0, 1]), np.array([0, 19])
    arrays = {"x": x, "y": y, "user": user, "test_x": x, "test_y": y, "test_user": user}
    np.savez(path, **arrays | WRONG_RECORDS.get(what or "", {}))
    if what is None:
        assert len(load_records(path, "silo-1", consortium)) == 2
        return
    with refused("deploy.data"):
        load_records(path, "silo-1", consortium)


def test_records_that_cannot_be_trained_on_are_named(public: Path, tmp_path: Path) -> None:
    x = np.full((1, 30), np.nan, np.float32)
    np.savez(tmp_path / "records.npz", x=x, y=np.array([0]), user=np.array([0]))
    with pytest.raises(SilodpError, match=r"records\.npz: .* is not finite"):
        load_records(tmp_path / "records.npz", "silo-1", Consortium.load(public))


@pytest.mark.parametrize("name", ["", "server", "../a", "a/b", ".hidden", "-x", "x" * 101, "a\nb"])
def test_names_that_are_no_names_of_files_are_refused(name: str, tmp_path: Path) -> None:
    with refused("deploy.name"):
        check_party_name(name)
    if name != "server":
        with refused("deploy.name"):
            make_keys(tmp_path / "home", name)


def test_keys_are_the_owners_alone(tmp_path: Path) -> None:
    request = make_keys(tmp_path / "home", "north")
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700
    for secret in ("identity.key", "tls.key"):
        assert (tmp_path / "home" / secret).stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "home" / secret).read_text()[:60] not in request.read_text()
    assert json.loads(request.read_text()).keys() == {"name", "identity", "certificate_request"}


# --- ε over all runs of a silo ------------------------------------------------------------------------------------


def test_runs_of_one_silo_are_composed(tmp_path: Path) -> None:
    first = Ledger(tmp_path / "1.jsonl", 1e-5, "pld", run="1")
    second = Ledger(tmp_path / "2.jsonl", 1e-6, "rdp", Budget(3.0, 1e-6), run="2")
    for round_ in range(3):
        charge(first, round_, 5.0)
        charge(second, round_, 4.0)
    limits = {"released": 2.6, "silo": 1.0}
    lifetime = LifetimeLedger(1e-5, limits, {"1": first, "2": second})
    expected = compute_epsilon(Counter({Gaussian(5.0): 3, Gaussian(4.0): 3}).items(), 1e-5, "pld")
    assert lifetime.epsilon("released") == pytest.approx(expected, rel=1e-9)
    assert lifetime.epsilon("released", {Gaussian(1.0): 1}) > expected
    # Their ledgers say nothing of ciphertexts, and noise on numbers had none.
    assert lifetime.epsilon("server") == lifetime.epsilon("released")
    events = {name: Gaussian(5.0) for name in ("released", "server", "silo")}
    assert "'silo'" in (lifetime.find_exceeded(events) or "")
    assert LifetimeLedger(1e-5, {"server": 1.0}, {}).find_exceeded(events) is None
    assert (
        LifetimeLedger(1e-5, {"server": 99.0}, {}).find_exceeded({"server": NonPrivate("none")}) is not None
    )
    first.close()
    second.close()
    with reopen_ledger(tmp_path / "1.jsonl") as one, reopen_ledger(tmp_path / "2.jsonl") as two:
        again = LifetimeLedger(1e-5, limits, {"1": one, "2": two})
        assert again.epsilon("released") == pytest.approx(expected, rel=1e-9)
        assert (two.delta, two.accountant.name, two.budget) == (1e-6, "rdp", Budget(3.0, 1e-6))


def test_the_limit_that_accept_writes_is_what_the_whole_run_costs(public: Path) -> None:
    spec = Consortium.load(public).spec
    needed = compute_lifetime_cost(spec, spec.names[0], 1e-5)
    expected = compute_epsilon([(spec.costliest_events()["released"], 2)], 1e-5, "pld")
    assert needed["released"] == pytest.approx(expected, rel=1e-9)


def test_by_filter_bounds_a_later_run_costs_more_than_in_a_fixed_list() -> None:
    """A list may be composed by the accountant; a run that is chosen later must fit a filter."""
    first = Ledger(None, 1e-5, "pld", run="1")
    for round_ in range(3):
        charge(first, round_, 5.0)
    plan = {"released": first.counts("released")}
    limits = {"released": 3.0}
    by_list = LifetimeLedger(1e-5, limits, {"1": first})
    by_filter = LifetimeLedger(1e-5, limits, {"1": first}, DEFAULT_BOUNDS, plan)
    alone = by_filter.compute_limit("released")
    assert alone == Filter(1e-5, plan=plan["released"]).epsilon(plan["released"])
    assert by_list.compute_limit("released") < alone < 3.0
    events = {"released": PoissonSampled(0.2, Gaussian(1.6))}
    more = Filter(1e-5, plan=plan["released"]).epsilon(plan["released"] + Counter(events.values()))
    between = {"released": (by_list.epsilon("released", {events["released"]: 1}) + more) / 2}
    by_list.limits = by_filter.limits = between
    assert by_list.find_exceeded(events) is None
    assert "a limit of" in (by_filter.find_exceeded(events) or "")
    # What is shown is ε of the list, under both rules.
    assert by_filter.checked == by_list.checked
    by_filter.limits = {"released": more}
    assert by_filter.find_exceeded(events) is None
    assert by_filter.find_exceeded({"released": NonPrivate("counts")}) is not None


def test_ciphertexts_of_all_runs_must_fit_their_part_of_delta_at_the_limit() -> None:
    ledger = Ledger(None, 1e-5, "pld", run="1", disclosure={"server": 1e-9})
    charge(ledger, 0, 5.0)
    for limit, fits in ((3.0, True), (6.0, False)):  # (1 + e^6)·1e-9 is more than a hundredth of δ
        lifetime = LifetimeLedger(1e-5, {"server": limit}, {"1": ledger}, ("gaussian",))
        exceeded = lifetime.find_exceeded({"server": Gaussian(5.0)})
        assert (exceeded is None) == fits
        # What `accept` and `check` compare says the same, and what to do.
        assert (lifetime.compute_limit("server", limit=limit) is not None) == fits
        assert fits or "lower it to 4.595" in exceeded


def test_accept_fixes_a_filter_whose_plan_is_the_run(public: Path, tmp_path: Path) -> None:
    consortium = Consortium.load(public)
    name = consortium.spec.names[0]
    plan = count_plan(consortium.spec, name)
    needed = compute_lifetime_cost(consortium.spec, name, 1e-5, filter_bounds=DEFAULT_BOUNDS)
    assert needed["released"] == pytest.approx(
        compute_epsilon(plan["released"].items(), 0.99 * 1e-5 / 2, "pld"), rel=1e-9
    )
    assert encode_plan(plan) != encode_plan(count_plan(replace(consortium.spec, rounds=1), name))
    # Other settings of the run are no other plan.
    assert encode_plan(plan) == encode_plan(count_plan(replace(consortium.spec, isolate_units=True), name))
    # With another plan, the run needs the limit of the other bounds.
    other = compute_lifetime_cost(
        consortium.spec,
        name,
        1e-5,
        filter_bounds=DEFAULT_BOUNDS,
        plan={adversary: {Gaussian(9.0): 1} for adversary in plan},
    )
    assert other["released"] > needed["released"]


def test_a_damaged_ledger_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    path.write_text("")
    with refused("ledger.damaged"):
        reopen_ledger(path)


def test_a_policy_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    policy = Policy(
        accepted=["a" * 64],
        data="t.csv",
        lifetime_epsilon={"released": 3.5},
        filter_bounds=[],
        columns=['"ä" = 1'],
    )
    path = tmp_path / "policy.toml"
    path.write_text(policy.to_toml())
    assert Policy.load(path) == policy
    path.write_text(policy.to_toml().replace("min_silos", "min_silo"))
    with pytest.raises(SilodpError) as caught:
        Policy.load(path)
    assert caught.value.code.startswith("config.")
    assert str(path) in str(caught.value)
    for wrong in ('["order-1"]', '["plan", "plan"]', '["pld"]'):
        path.write_text(policy.to_toml().replace("filter_bounds = []", f"filter_bounds = {wrong}"))
        with refused("argument.value") as caught:
            Policy.load(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("where", "code", "later"),
    [
        ("ledger", "policy.charged", "policy.not_allowed"),
        ("audit log", "ledger.missing", "ledger.missing"),
    ],
)
def test_a_policy_is_written_anew_before_the_first_charge_and_never_after(
    where: str, code: str, later: str, tmp_path: Path
) -> None:
    """Its limits are what persons were promised, once anything was released."""
    parties = make_parties(tmp_path, CONFIG)
    consortium, home = Consortium.load(parties / "public"), parties / "silos" / "silo-1"
    path = home / "policy.toml"
    ours = Policy.load(path)
    earlier = {"accepted": ["0" * 64], "columns": ["age"], "lifetime_epsilon": {"server": 0.5}}
    path.write_text(ours.model_copy(update=earlier).to_toml())
    write = partial(write_policy, home, consortium, "records.npz", allow_seed=True)
    with refused("policy.not_allowed") as caught:
        write()
    with hold_lock(home / "lock", home), refused("run.in_use"):
        write(replace=True)
    assert write(replace=True, lifetime_epsilon=9.0).lifetime_epsilon == dict.fromkeys(
        ours.lifetime_epsilon, 9.0
    )
    assert write(replace=True) == Policy.load(path) == ours
    with open_silo(home, consortium):
        pass

    run = "a" * 32
    match where:
        case "ledger":
            (home / "ledgers").mkdir(mode=0o700, exist_ok=True)
            header = SiloHeader(consortium.stated_spec.method.unit)
            with Ledger(home / "ledgers" / f"{run}.jsonl", 1e-5, "pld", run=run, silo=header) as ledger:
                charge(ledger, 0, 5.0)
        case "audit log":
            line = {
                "run": run,
                "charges": 1,
                "kind": "update",
                "round": 0,
                "bytes": 1,
                "sha256": "",
                "time": "",
                "head": "",
            }
            append_durably(home / "audit.jsonl", json.dumps(line).encode())
    before = path.read_bytes()
    with refused(code):
        write(replace=True)
    assert path.read_bytes() == before
    path.write_text(ours.model_copy(update=earlier).to_toml())
    with refused(later) as caught:
        write()
    assert "--replace" not in str(caught.value)


def test_whether_a_run_fits_is_said_while_it_is_in_progress(tmp_path: Path) -> None:
    """All rounds of the newest run of the folder's specification count, and not its charges besides."""
    parties = make_parties(tmp_path, CONFIG)
    consortium, home = Consortium.load(parties / "public"), parties / "silos" / "silo-1"
    spec, policy = consortium.stated_spec, Policy.load(home / "policy.toml")
    (home / "ledgers").mkdir(mode=0o700)
    store = DirectoryStore(home / "store")
    header = SiloHeader(spec.method.unit, None, encode_plan(count_plan(spec, "silo-1")))

    def begin(run: str, day: str, rounds: int) -> None:
        """Charge some rounds of a run."""
        store.put(f"{run}/spec", spec.digest.encode())
        store.put(f"{run}/begun", day.encode())
        path = home / "ledgers" / f"{run}.jsonl"
        with make_ledger(replace(spec, run=run), path, None, header) as ledger:
            ledger.is_first = run == "a" * 32
            for round_ in range(rounds):
                ledger.charge(round_, 0, spec.silo_events("silo-1", round_, 0))

    begin("a" * 32, "2026-01-01", spec.rounds)
    assert find_shortfall(home, spec, "silo-1", policy) == {}
    # A second one: the first is over, and counts.
    begin("b" * 32, "2026-01-02", 1)
    short = find_shortfall(home, spec, "silo-1", policy)
    (home / "ledgers" / f"{'b' * 32}.jsonl").unlink()
    begin("b" * 32, "2026-01-02", spec.rounds)
    assert short == find_shortfall(home, spec, "silo-1", policy) != {}


def test_a_policy_that_is_written_after_charges_claims_no_filter(tmp_path: Path) -> None:
    """A filter is fixed before the first release: by then models may have been seen."""
    parties = make_parties(tmp_path, CONFIG)
    home, consortium = parties / "silos" / "silo-1", Consortium.load(parties / "public")
    path = home / "policy.toml"
    assert Policy.load(path).filter_bounds == list(DEFAULT_BOUNDS)
    path.unlink()
    make_charged(home, consortium.spec)
    assert write_policy(home, consortium, "records.npz", allow_seed=True).filter_bounds == []


OTHER_PLAN = {adversary: {Gaussian(9.0): 2} for adversary in ADVERSARIES}


def make_charged(home: Path, spec: RunSpec, run: str = "a" * 32) -> None:
    """The ledger of another run, which was charged first."""
    path = home / "ledgers" / f"{run}.jsonl"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    header = SiloHeader(spec.method.unit, None, encode_plan(OTHER_PLAN))
    with make_ledger(replace(spec, run=run), path, None, header) as ledger:
        ledger.is_first = True
        charge(ledger, 0, 50.0)


def test_the_first_charge_fixes_the_plan(tmp_path: Path) -> None:
    parties = make_parties(tmp_path, CONFIG)
    home, consortium = parties / "silos" / "silo-1", Consortium.load(parties / "public")
    assert find_shortfall(home, consortium.spec, "silo-1", Policy.load(home / "policy.toml")) == {}
    assert find_plan(read_ledgers(home)) is None
    # Another run than the plan needs more than the limit, which is the plan's.
    make_charged(home, consortium.spec)
    assert find_plan(read_ledgers(home)) == OTHER_PLAN
    make_charged(home, consortium.spec, "b" * 32)
    nothing = {adversary: {} for adversary in ADVERSARIES}
    assert find_plan(read_ledgers(home)) == nothing, "two folders that were put together have no plan"
    assert "released" in find_shortfall(home, consortium.spec, "silo-1", Policy.load(home / "policy.toml"))


@pytest.mark.parametrize("isolate_units", [True, False])
def test_a_silo_whose_first_run_computes_persons_alone_refuses_others(
    isolate_units: bool, tmp_path: Path
) -> None:
    """Else the coordinator's next public folder could leave it out, and let its server choose models."""
    parties = make_parties(tmp_path, CONFIG if isolate_units else f"isolate_units = false\n{CONFIG}")
    consortium = Consortium.load(parties / "public")
    spec, columns = consortium.spec, consortium.list_columns("silo-1")
    policy = Policy.load(parties / "silos" / "silo-1" / "policy.toml")
    policy.check(policy.accepted[0], spec, columns)
    with refused("policy.not_allowed") if isolate_units else nullcontext():
        policy.check(policy.accepted[0], replace(spec, isolate_units=not isolate_units), columns)


SURVIVAL = """
kind = "survival"
event = "died"
time = "days"
"""


@pytest.mark.parametrize(
    ("label", "labels"),
    [(None, ["ill"]), (SURVIVAL, ["died", "days"])],
)
def test_a_silo_limits_the_columns_that_a_model_learns_to_predict(
    label: str | None, labels: list[str], tmp_path: Path
) -> None:
    """Else the next public folder could predict another column of the table, such as a diagnosis."""
    text = TABLES.format(user="patient", index='users = ["a", "b"]', more="")
    if label is not None:
        text = text.replace('label = "ill"\nclasses = ["no", "yes"]\n', label)
    head, cells = ("patient,age,died,days", ("0,9", "1,8")) if label else ("patient,age,ill", ("no", "yes"))
    for name in ("north", "south"):
        (tmp_path / f"{name}.csv").write_text(f"{head}\na,30,{cells[0]}\nb,50,{cells[1]}\n")
    parties = make_parties(tmp_path, text)
    consortium = Consortium.load(parties / "public")
    assert describe_agreement(consortium)["labels"] == labels
    home = parties / "silos" / "north"
    policy = Policy.load(home / "policy.toml")
    assert policy.labels == labels
    check_policy(policy, consortium, "north")
    for other in labels:
        limited = policy.model_copy(update={"labels": ["age", *(one for one in labels if one != other)]})
        with refused("policy.not_allowed") as caught:
            check_policy(limited, consortium, "north")
        assert caught.value.field == "labels"
        (home / "policy.toml").write_text(limited.to_toml())
        with refused("policy.not_allowed"), open_silo(home, consortium):
            pass
        with refused("policy.not_allowed"):
            write_policy(home, consortium, "records.npz")
    earlier = policy.model_dump(exclude={"labels"})
    (home / "policy.toml").write_text(tomli_w.dumps(earlier))
    check_policy(Policy.load(home / "policy.toml"), consortium, "north")


PROFILE = 'identity = "profile.toml"'


@pytest.mark.parametrize(
    ("index", "more", "code"),
    [
        (PROFILE, "", None),
        ("", "", "deploy.no_index"),
        (PROFILE, "user_sampling = 0.5", None),
        (PROFILE, 'weighting = "records"', None),
        ('users = ["a", "b", "c"]', "user_sampling = 0.5", None),
    ],
)
def test_silos_agree_on_who_is_who_or_need_not(
    index: str, more: str, code: str | None, tmp_path: Path
) -> None:
    profile = IdentityProfile(study="s", kind="code", width=3, population=9)
    (tmp_path / "profile.toml").write_text(profile.to_toml())
    (tmp_path / "two.toml").write_text(TABLES.format(user="patient", index=index, more=more))
    config = load_config(tmp_path / "two.toml")
    draft = partial(
        draft_public, config, tmp_path / "public", config.read_public_data(9 if not index else None)
    )
    if code is None:
        assert draft().names == ("north", "south")
        assert (
            Consortium.load(tmp_path / "public").stated_spec.digest
            == Consortium.load(tmp_path / "public").spec.digest
        )
        return
    with refused(code):
        draft()
    assert not (tmp_path / "public").exists()


@pytest.mark.parametrize(
    ("index", "more", "with_numbers"),
    [
        ('users = ["p7", "p9", "P07", "q"]', "", False),
        (PSEUDONYMS, "", False),
        (PSEUDONYMS, 'weighting = "records"', True),
    ],
)
def test_a_silo_is_warned_of_two_spellings_in_its_table(
    index: str, more: str, with_numbers: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profile = IdentityProfile(study="s", kind="pseudonym", population=9)
    (tmp_path / "profile.toml").write_text(profile.to_toml())
    (tmp_path / "two.toml").write_text(TABLES.format(user="patient", index=index, more=more))
    config = load_config(tmp_path / "two.toml")
    assert len(list_user_list_warnings(config)) == (index != PSEUDONYMS)
    draft_public(config, tmp_path / "public", config.read_public_data())
    consortium = Consortium.load(tmp_path / "public")
    (tmp_path / "index.csv").write_text("id,position\np9,8\nP07,2\np7,5\n")
    for keys, is_warned in ((("p7", "P07", "p9"), True), (("p7", "p9"), False)):
        rows = [f"{key},30,no" for key in keys]
        (tmp_path / "north.csv").write_text("\n".join(["patient,age,ill", *rows]))
        caplog.clear()
        load_records(
            tmp_path / "north.csv", "north", consortium, tmp_path / "index.csv" if with_numbers else None
        )
        assert ("2 person keys" in caplog.text) == is_warned
        assert not any(key in caplog.text for key in keys)


def test_a_silo_without_a_training_record_is_warned(
    public: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = load_config(tmp_path / "one.toml").load_federation().silos[0]
    empty = SiloData(whole.name, whole.x[:0], whole.y[:0], whole.user[:0])
    for data in (whole, empty):
        caplog.clear()
        save_records(tmp_path / "records.npz", data)
        load_records(tmp_path / "records.npz", whole.name, Consortium.load(public))
        assert ("no training record" in caplog.text) == (data is empty)


def test_the_status_has_two_writers(tmp_path: Path) -> None:
    """A silo connects while a round ends: without a lock one of the threads finds its temporary file gone."""
    status = StatusFile(tmp_path / "status.json", lambda: {"north": 1.0, "south": None}, 5)
    failed: list[Exception] = []

    def write(number: int) -> None:
        try:
            for round_ in range(200):
                status.write(round=round_, error=f"{number}")
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    found = json.loads((tmp_path / "status.json").read_text())
    assert (found["rounds"], found["seconds_since_seen"]) == (5, {"north": 1.0, "south": None})


def test_the_status_says_who_is_seen_while_a_round_waits(tmp_path: Path) -> None:
    """Otherwise all silos seem to be gone when the round waits for one of them."""
    seen = {"north": 1.0, "south": 1.0}
    status = StatusFile(tmp_path / "status.json", lambda: dict(seen), 5)
    status.write(round=3)
    with status.keep_fresh(seconds=0.02):
        seen["south"] = 70.0
        deadline = time.monotonic() + 10
        while (found := json.loads((tmp_path / "status.json").read_text()))["seconds_since_seen"] != seen:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert found["round"] == 3


def test_the_status_says_that_its_process_has_ended(tmp_path: Path) -> None:
    """Otherwise it is taken for the state of the next process, while that one starts."""

    def end(error: BaseException) -> None:
        status = StatusFile(tmp_path / "status.json", lambda: {"north": 1.0}, 5)
        with status.record_end():
            status.write(round=3)
            assert read_status(tmp_path / "status.json")["running"]
            raise error

    with pytest.raises(SystemExit):  # stopped by a signal
        end(SystemExit())
    assert (found := read_status(tmp_path / "status.json"))["running"] is False
    assert (found["round"], found["error"]) == (3, None)
    with refused("deploy.address"):
        end(SilodpError("away", code="deploy.address"))
    assert read_status(tmp_path / "status.json")["error"] == "away [deploy.address]"


def test_a_server_that_starts_shows_its_own_run_before_anything_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status of the run before would be shown until the model is built and the silos are listened to."""
    parties = make_parties(tmp_path, CONFIG)
    consortium, home = Consortium.load(parties / "public"), parties / "server"
    before = {"written": 1.0, "round": 9, "rounds": 9, "epsilon": {"server": 3.0}, "digest": "0" * 64}
    (home / "status.json").write_text(json.dumps({**before, "answers": {"silo-1": 7}}))
    seen = {}

    def fail(*arguments: object) -> None:
        seen.update(read_status(home / "status.json"))
        raise SilodpError("taken", code="deploy.address")

    monkeypatch.setattr("silodp_deploy.server._make_mailbox", fail)
    with refused("deploy.address"):
        serve(home, consortium)
    assert (seen["round"], seen["epsilon"], seen["digest"]) == (0, {}, consortium.digest)
    assert (seen["running"], seen["answers"]) == (True, {"silo-1": 7})
    found = read_status(home / "status.json")
    assert (found["running"], found["error"], found["answers"]) == (
        False,
        "taken [deploy.address]",
        {"silo-1": 7},
    )


def test_a_server_at_a_socket_keeps_what_one_on_https_has_counted(tmp_path: Path) -> None:
    """Otherwise the next one on HTTPS would not notice a silo that was restored from a backup."""
    parties = make_parties(tmp_path, CONFIG)
    consortium, home = Consortium.load(parties / "public"), parties / "server"
    (home / "status.json").write_text('{"answers": {"silo-1": 7}}')
    known = read_status(home / "status.json")["answers"]
    with _make_mailbox(home, consortium, SocketOptions(tmp_path / "server.sock"), 1.0, known) as mailbox:
        StatusFile(home / "status.json", mailbox.seconds_since_seen, 5, mailbox.answers).write()
    assert read_status(home / "status.json")["answers"] == {"silo-1": 7}


def test_an_appended_line_is_its_own(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    append_durably(path, b"1", PRIVATE_FILE)
    path.write_bytes(path.read_bytes() + b"cut o")  # by a crash
    append_durably(path, b"2", PRIVATE_FILE)
    append_durably(path, b"3", PRIVATE_FILE)
    assert path.read_bytes() == b"1\ncut o\n2\n3\n"
    assert path.stat().st_mode & 0o777 == 0o600


def test_run_leads_to_the_newest_run(tmp_path: Path) -> None:
    for name in ("first", "first", "next"):  # a server that is started again finds the link
        _lead_to_run(tmp_path, tmp_path / "runs" / name)
        assert (tmp_path / "run").resolve() == tmp_path / "runs" / name
    assert list((tmp_path / "run").iterdir()) == []
