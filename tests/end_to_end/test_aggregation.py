"""The switch of aggregators: settings in, the same ε in plan, question and run, and who saw what in the report."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from silodp.accounting import accountant as accounting
from silodp.accounting.accountant import choose_accountant
from silodp.aggregators import Aggregator, Masked, Plain
from silodp.aggregators.registry import AGGREGATORS, AggregatorRecord
from silodp.assumption import Assumption
from silodp.config.resolve import ResolvedRun, load_config, resolve
from silodp.config.schema import parse_config
from silodp.data.catalog import DATASETS
from silodp.data.public import ASSUMED_USERS
from silodp.errors import SilodpError
from silodp.planning.epsilon import compute_epsilon_for
from silodp.planning.plan import plan_run
from silodp.report.formatting import format_bytes
from silodp.runtime.prepare import prepare_run
from silodp.runtime.train import run, train
from silodp_experiments.compare import compare_methods
from silodp_experiments.method_specs import parse_methods
from silodp_private._private_sampling import SAMPLE_HIDDEN
from silodp_private.select import Select
from support.commands import Silodp, assert_sentence
from support.refusals import refused
from support.rewriting import rebind

ROOT = Path(__file__).parents[2]
METHOD = {"name": "uldp-avg", "noise_multiplier": 5.0, "clip": 0.1, "local": {"learning_rate": 0.01}}


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AGGREGATORS._core, "half", "support.specs:Half")


def made(**changes: Any) -> ResolvedRun:
    data = {"source": "embedded", "users": 20, "silos": 3}
    values = {"name": "made", "rounds": 2, "seed": 1, "data": data, "method": METHOD, **changes}
    return resolve(parse_config(values))


def planned(config: ResolvedRun, **more: Any) -> dict[str, Any]:
    return plan_run(config.build_public_spec()[0], accountant=config.accountant, **more)


# --- settings -----------------------------------------------------------------------------------------------


def test_the_table_holds_the_aggregators_fields(config: Path, tmp_path: Path) -> None:
    overrides = ["aggregator=masked", "aggregation.min_silos=3", "aggregation.units=4096"]
    found = load_config(config, overrides)
    assert found.aggregator == found.settings()["aggregator"] == Masked(min_silos=3, units=4096)
    assert load_config(config).aggregator == Plain()
    copy = tmp_path / "copy.toml"
    copy.write_text(found.config.to_toml())
    assert load_config(copy).config == found.config.model_copy(update={"name": "small"})


def test_a_table_left_over_is_refused_with_what_to_write_instead(config: Path) -> None:
    config.write_text(config.read_text() + "[aggregation]\nunits = 4096\nmin_silos = 2\n")
    with pytest.raises(SilodpError, match=r"take it out of .*by --set 'aggregation={}'"):
        load_config(config, ["aggregator=plain"])
    assert load_config(config, ["aggregator=plain", "aggregation={}"]).aggregator == Plain()


@pytest.mark.skipif("lattice" not in AGGREGATORS, reason="not registered")
def test_settings_that_both_aggregators_have_stay(config: Path) -> None:
    config.write_text(config.read_text() + "[aggregation]\ncount_cap = 7\nattempts = 9\n")
    assert load_config(config, ["aggregator=lattice"]).aggregator == AGGREGATORS["lattice"](
        count_cap=7, attempts=9
    )
    told = r"aggregation.attempts is a setting of lattice.* by --set 'aggregation={count_cap = 7}'"
    with pytest.raises(SilodpError, match=told):
        load_config(config, ["aggregator=paillier"])
    changed = load_config(config, ["aggregator=paillier", "aggregation={count_cap = 7}"])
    assert changed.aggregator == AGGREGATORS["paillier"](count_cap=7)


EXAMPLE = ROOT / "examples" / "heart_disease_private_weighting.toml"


@pytest.mark.skipif("lattice" not in AGGREGATORS, reason="not registered")
def test_the_example_changes_its_cipher_by_one_setting() -> None:
    found = load_config(EXAMPLE)
    assert found.aggregator == AGGREGATORS["lattice"](count_cap=100)
    assert load_config(EXAMPLE, ["aggregator=paillier"]).aggregator == AGGREGATORS["paillier"](count_cap=100)
    same = load_config(ROOT / "examples" / "heart_disease.toml")
    assert found.method == same.method
    assert (found.config.data, found.config.rounds) == (same.config.data, same.config.rounds)
    costs = planned(found)["adversaries"]
    assert all(costs[adversary]["private"] for adversary in ("released", "server", "silo"))


# --- the accountant and ε -----------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregator", ["plain", "masked"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"user_sampling": 0.5}, {"weighting": "records"}, {"noise_multiplier": 0.0}],
    ids=lambda changes: str(next(iter(changes), "as is")),
)
def test_a_plan_costs_what_the_run_costs(aggregator: str, changes: dict[str, Any]) -> None:
    config = made(aggregator=aggregator, method={**METHOD, **changes})
    federation = config.load_federation()
    result = train(federation, config.build_task(federation), config.method, **config.settings())
    found = planned(config)
    assert found["accountant"] == result.guarantees["released"].accountant
    for adversary, guarantee in result.guarantees.items():
        assert found["adversaries"][adversary]["epsilon"] == close(guarantee.epsilon)
        asked = compute_epsilon_for(
            "uldp-avg",
            {key: value for key, value in config.config.method.items() if key not in ("name", "local")},
            rounds=2,
            adversary=adversary,
            silos=3,
            aggregator=aggregator,
            users=20,
            dimension=31,
        )
        assert asked["epsilon"] == close(guarantee.epsilon)
        if guarantee.private:
            common = set(guarantee.assumptions)  # a data set may add its own
            assert {Assumption(**one) for one in asked["assumptions"]} == common - set(federation.assumptions)


def close(value: float | None) -> Any:
    return None if value is None else pytest.approx(value, rel=1e-12)


def test_the_accountant_is_chosen_by_the_noise(silodp: Silodp, config: Path) -> None:
    for aggregator, accountant in (("plain", "pld"), ("masked", "rdp")):
        out = Path(aggregator)
        done = silodp("run", config, "--set", f"aggregator={aggregator}", "--out", out, "--json")
        assert done.status == 0, done.err
        assert done.json["aggregator"] == aggregator
        assert {guarantee["accountant"] for guarantee in done.json["guarantees"].values()} == {accountant}
        assert "accountant" not in (out / "config.toml").read_text()
        assert load_config(out / "config.toml").config.aggregator == aggregator
        resumed = silodp("run", out / "config.toml", "--out", out, "--resume", "--set", "rounds=3")
        assert resumed.status == 0, resumed.err
        assert "checked against the ledger (3 rounds)" in (out / "report.html").read_text()
        found = silodp("plan", config, "--set", f"aggregator={aggregator}", "--json").json
        assert found["accountant"] == accountant
    wrong = ("--set", "aggregator=masked", "--set", "accountant=pld")
    assert_sentence(silodp("plan", config, *wrong), "choose 'rdp'")


def test_epsilon_of_integer_noise_is_that_of_gaussian_noise_and_a_little_more(silodp: Silodp) -> None:
    asked = ("epsilon", "--method", "uldp-avg", "--noise-multiplier", 5, "--rounds", 100, "--json")
    gaussian = silodp(*asked, "--accountant", "rdp").json["epsilon"]
    found = silodp(*asked, "--aggregator", "masked").json
    small = silodp(*asked, "--aggregator", "masked", "--dimension", 1, "--users", 10).json
    assert found["accountant"] == small["accountant"] == "rdp"
    # What it costs more is that the law of Skellam noise is known at whole orders only.
    assert gaussian < small["epsilon"] < found["epsilon"] < 1.01 * gaussian
    coarse = silodp(*asked, "--aggregator", "masked", "--aggregation", "units=4096", "--silos", 3).json
    assert coarse["epsilon"] > found["epsilon"]
    fewer = ("--aggregator", "masked", "--silos", 5, "--aggregation", "min_silos=3")
    assert silodp(*asked, *fewer).json["epsilon"] < gaussian  # all five answer, with noise for three
    assert_sentence(silodp(*asked, *fewer[:-1], "min_silos=2"), "min_silos = 2 of 5")
    assert_sentence(silodp(*asked, *fewer[:-1], "min_silo=3"), "did you mean 'min_silos'?")
    assert_sentence(silodp(*asked, "--dimension", 0), "dimension = 0")
    assert_sentence(silodp(*asked, "--users", 0), "users = 0")


def test_noise_is_accounted_at_its_part_of_delta(half: None, silodp: Silodp, config: Path) -> None:
    spent = accounting.compute_epsilon([(Plain().event(*_view(made())), 2)], 0.5e-5)
    found = planned(made(aggregator="half"), target=1.0)
    assert found["adversaries"]["released"]["epsilon"] == pytest.approx(spent)
    target = found["target"]["noise_multiplier"]
    method = replace(made().method, noise_multiplier=target)  # type: ignore[type-var]
    event = replace(_view(made())[0], aggregator=Plain(), method=method).round_events()["released"]
    assert 0.999 < accounting.compute_epsilon([(event, 2)], 0.5e-5) <= 1.0
    asked = compute_epsilon_for("uldp-avg", {"noise_multiplier": 5.0}, rounds=2, aggregator="half")
    assert (asked["epsilon"], asked["delta"]) == (pytest.approx(spent), 1e-5)
    budget = ("--set", "aggregator=half", "--set", "budget.epsilon=9")
    done = silodp("run", config, *budget, "--out", "a", "--json")
    assert done.status == 0, done.err
    assert done.json["epsilon"] == pytest.approx(spent)
    page = Path("a/report.html").read_text()
    assert "checked against the ledger (2 rounds)" in page
    assert "ε ≤ 9.0 at δ = 0.00001 against" in page
    told = Path("a/guarantee.json")
    told.write_text(told.read_text().replace('"delta": 1e-05', '"delta": 5e-06'))
    assert_sentence(silodp("report", "a"), "delta = 5e-06, and by its ledger and settings it is 1e-05")


def _view(config: ResolvedRun) -> tuple[Any, Any]:
    spec = replace(config.build_public_spec()[0], aggregator=Plain())
    return spec, Plain().views(spec.method, 3)["released"]


def test_no_promise_needs_no_accountant_of_integers() -> None:
    config = made(aggregator="masked", method={**METHOD, "noise_multiplier": 0.0})
    found = planned(config)
    assert found["accountant"] == choose_accountant([]).name == "pld"
    assert not found["adversaries"]["released"]["private"]


# --- plans --------------------------------------------------------------------------------------------------


def test_a_plan_says_what_travels_and_refuses_what_a_run_would(silodp: Silodp, config: Path) -> None:
    masked = ("plan", config, "--set", "aggregator=masked", "--set", "data.silos=5")
    text = silodp(*masked, "--target-epsilon", 2).out
    assert "accountant rdp, for all records of one person:" in text
    assert "aggregator masked, 5 silos, U = 20, d = 31:\n" in text
    assert "  bytes up, per silo and round: 124\n" in text  # 31 words of 32 bits
    assert "  sums modulo: 2^32\n" in text
    found = silodp(*masked, "--json").json
    assert found["aggregation"] == Masked().describe(
        load_config(config, ["aggregator=masked", "data.users=20", "data.silos=5"]).build_public_spec()[0]
    )
    assert_sentence(silodp(*masked, "--set", "aggregation.min_silos=2"), "min_silos = 2 of 5")
    assert "  bytes up, per silo and round: 248\n" in silodp("plan", config).out


def test_a_target_under_integer_noise_is_met(silodp: Silodp, config: Path) -> None:
    found = silodp("plan", config, "--set", "aggregator=masked", "--target-epsilon", 1, "--json").json[
        "target"
    ]
    masked = ("--set", "aggregator=masked", "--json")
    for field_ in ("noise_multiplier", "user_sampling"):
        kept = silodp("plan", config, *masked, "--set", f"method.{field_}={found[field_]}").json
        assert 0.99 < kept["adversaries"]["released"]["epsilon"] <= 1


def test_a_plan_remarks_on_a_large_delta_as_a_run_does(silodp: Silodp, config: Path) -> None:
    assert silodp("plan", config, "--json").json["remarks"] == []
    told = silodp("plan", config, "--users", 20, "--set", "delta=0.1", "--json").json["remarks"]
    assert len(told) == 1
    assert "not below 1/U = 0.05" in told[0]
    assert told[0] in silodp("plan", config, "--users", 20, "--set", "delta=0.1").out
    silent = silodp("plan", config, "--set", "delta=0.1", "--set", "method={name='default'}", "--json").json
    assert silent["remarks"] == []


def test_a_plan_without_the_list_of_persons_says_so(silodp: Silodp, config: Path) -> None:
    columns = "user='u', label='y', classes=[0, 1], numeric={x=[0, 1], z=[0, 1]}"
    tables = f"data={{source='tables', files={{a='a.csv', b='b.csv'}}, schema={{{columns}"
    unknown = ("plan", config, "--set", tables + "}}")
    found = silodp(*unknown, "--json").json
    assert (found["users"], found["users_assumed"], found["dimension"]) == (ASSUMED_USERS, True, 3)
    assert "see --users" in silodp(*unknown).out
    told = silodp(*unknown, "--users", 7, "--json").json
    assert (told["users"], told["users_assumed"]) == (7, False)
    Path("ids.txt").write_text("p\nq\n\nr\n")
    listed = ("plan", config, "--set", tables + ", users='ids.txt'}}", "--json")
    assert silodp(*listed).json["users"] == 3
    Path("ids.txt").unlink()
    assert_sentence(silodp(*listed), "ids.txt")
    given = ("plan", config, "--set", tables + ", users=['p', 'q']}}", "--json")
    assert silodp(*given).json["users"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("source", [name for name, found in DATASETS.items() if found.is_published])
def test_the_outline_has_the_shape_of_the_data(source: str) -> None:
    more = {"max_per_state": 3} if source == "acs_income" else {}
    config = made(data={"source": source, **more})
    try:
        federation = config.load_federation()
    except SilodpError as error:
        pytest.skip(str(error))
    spec, assumed = config.build_public_spec()
    told, real = spec.data, federation.public()
    assert (told.record_shape, told.labels, told.classes) == (real.record_shape, real.labels, real.classes)
    assert len(told.silos) == len(real.silos)
    assert assumed == (source in ("acs_income", "docstrings"))  # persons are counted in the data
    assert assumed or told.users == federation.users
    assert config.build_task(told).size == config.build_task(federation).size
    declared, loaded = config.read_public_data(federation.users), federation.public()
    features = declared.features or loaded.features  # tcga_brca's are in its file
    assert replace(declared, features=features, index_digest=loaded.index_digest) == loaded


# --- comparisons --------------------------------------------------------------------------------------------

GROUP = "uldp-group:k=2:record_sampling=0.1:local_steps=1:expected_batch_size=4:local_learning_rate=0.1"


def test_a_comparison_says_which_accountant_was_used(tmp_path: Path) -> None:
    config = made(aggregator="masked", rounds=1)
    result = compare_methods(config, parse_methods(config, f"uldp-avg,{GROUP}"), 1, tmp_path)
    used = {method["label"]: method["accountant"] for method in result["methods"]}
    assert (used["uldp-avg"], used[GROUP]) == ("rdp", "pld")  # groups draw their Gaussian noise themselves
    assert result["accountant"] == "pld and rdp"
    page = (tmp_path / "compare.html").read_text()
    assert "aggregator masked, accountant pld and rdp." in page
    assert "<small>ε by rdp</small>" in page
    assert "ε by rdp is looser than ε by pld" in result["note"]
    alone = compare_methods(config, parse_methods(config, "uldp-avg"), 1, tmp_path)
    assert alone["accountant"] == "rdp"
    assert "looser" not in alone["note"]
    assert "<small>ε by" not in (tmp_path / "compare.html").read_text()


def test_a_comparison_knows_its_runs_by_what_decides_them(tmp_path: Path) -> None:
    said: list[str] = []

    def again(**changes: Any) -> bool:
        config = made(rounds=1, **changes)
        said.clear()
        compare_methods(config, parse_methods(config, "uldp-avg"), 1, tmp_path, said.append)
        return "(finished before)" in next(line for line in said if "uldp-avg" in line)

    assert not again()
    assert again(accountant="pld")  # which is what was chosen
    assert not again(accountant="rdp")
    assert not again(aggregator="masked")
    assert again(aggregator="masked", accountant="rdp")
    assert not again(aggregator="masked", aggregation={"units": 4096})


def test_a_budget_that_masking_cannot_promise_leaves_a_reference(tmp_path: Path) -> None:
    budget = {"epsilon": 0.9, "adversary": "server"}  # less than two rounds
    config = made(aggregator="masked", budget=budget)
    result = compare_methods(
        config, parse_methods(config, "uldp-avg,uldp-avg:weighting=records"), 1, tmp_path
    )
    ends = {method["label"]: method["stopped"] for method in result["methods"]}
    assert ends["uldp-avg"] == "budget"
    assert ends["uldp-avg:weighting=records"] == ends["default"] == "rounds"


@pytest.mark.skipif("lattice" not in AGGREGATORS, reason="not registered")
def test_training_without_privacy_is_added_up_in_clear(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    used = {}

    def stop(spec: Any, parties: Any, **settings: Any) -> Any:
        used[spec.method.name] = spec.aggregator
        in_clear = prepare_run(parties.federation, parties.task, spec.method, rounds=1, seed=0)
        return run(in_clear, parties, **settings)

    monkeypatch.setattr("silodp_experiments.compare.run", stop)
    config = made(aggregator="lattice", method={**METHOD, "weighting": "records"}, rounds=1)
    compare_methods(config, parse_methods(config, "uldp-avg"), 1, tmp_path)
    assert used["default"] == Plain()
    assert used["uldp-avg"] == config.aggregator


# --- sampling that nobody knows -----------------------------------------------------------------------------

SAMPLED = {**METHOD, "weighting": "records", "user_sampling": 0.3}
HIDDEN = pytest.mark.parametrize(
    ("name", "more"),
    [
        ("lattice", {"attempts": 20}),
        ("paillier", {"key_bits": 512, "insecure_for_tests": True, "count_cap": 20}),
    ],
    ids=["lattice", "paillier"],
)


def sampled_config(name: str, **aggregation: Any) -> dict[str, Any]:
    return {"aggregator": name, "aggregation": aggregation, "method": SAMPLED}


@HIDDEN
def test_hidden_samples_are_planned_asked_for_and_run_alike(
    name: str, more: dict[str, Any], silodp: Silodp, config: Path
) -> None:
    """One key in a config; the server's ε is then that of the released models."""
    settings = [f"{key} = {json.dumps(value)}" for key, value in {**more, "hidden_sample": 10}.items()]
    changes = [
        f"aggregator={name}",
        "aggregation={" + ", ".join(settings) + "}",
        "method.weighting=records",
        "method.user_sampling=0.3",
    ]
    sets = [word for change in changes for word in ("--set", change)]
    done = silodp("plan", config, *sets, "--json")
    assert done.status == 0, done.err
    told = json.loads(done.out)
    assert told["aggregation"]["sampling"] == "3 of 10 cells for every person; nobody knows who is sampled"
    costs = {adversary: cost["epsilon"] for adversary, cost in told["adversaries"].items()}
    known = planned(made(**sampled_config(name, **more)))["adversaries"]["server"]["epsilon"]
    assert costs["server"] == costs["released"] < known / 2
    done = silodp("run", config, *sets, "--out", "a")
    assert done.status == 0, done.err
    said = {g["adversary"]: g for g in json.loads(Path("a/guarantee.json").read_text())["guarantees"]}
    assert said["server"]["epsilon"] == said["released"]["epsilon"] > 0
    assert asdict(SAMPLE_HIDDEN) in said["server"]["assumptions"]
    page = Path("a/report.html").read_text()
    assert "only the noisy weighted sum; which silos answered" in page
    assert "whom it sampled" not in page


@HIDDEN
def test_a_rate_that_cells_cannot_give_is_one_sentence(
    name: str, more: dict[str, Any], silodp: Silodp, config: Path
) -> None:
    settings = "aggregation={hidden_sample = 10}"
    for rate, said in (("0.25", "set hidden_sample = 4"), ("1.0", "has user_sampling = 1")):
        for command in ("plan", "run"):
            done = silodp(
                command, config, "--set", f"aggregator={name}", "--set", settings,
                "--set", "method.weighting=records", "--set", f"method.user_sampling={rate}",
            )  # fmt: skip
            assert_sentence(done, said)
    with refused("argument.conflict", "config.unknown_field"):
        load_config(config, ["aggregator=masked", settings])


# --- reports ------------------------------------------------------------------------------------------------


def test_a_report_says_who_saw_what_and_what_travelled(silodp: Silodp, config: Path) -> None:
    done = silodp("run", config, "--set", "aggregator=masked", "--out", "a")
    assert done.status == 0, done.err
    page = Path("a/report.html").read_text()
    assert "<h2>Who saw what</h2>" in page
    assert "With the aggregator <code>masked</code>" in page
    for sight in Masked().visibility:
        assert f'<th scope="row">{sight.party}</th>' in page
    # Every person takes part in every round with the same weight, and nothing speaks of samples and weights.
    section = page.partition('id="visibility"')[2].partition("</section>")[0]
    assert "single persons&#39; record counts" in section
    assert "weights" not in section
    assert "sampled" not in section
    assert "the server follows the protocol" not in page
    rows = [json.loads(line) for line in Path("a/metrics.jsonl").read_text().splitlines()]
    for row in rows[1:]:
        assert format_bytes(row["bytes"]["up"]) in page
        assert format_bytes(row["bytes"]["down"]) in page
    assert "to the silos</th>" in page
    Path("a/metrics.jsonl").write_text(
        "".join(json.dumps({k: v for k, v in row.items() if k != "bytes"}) + "\n" for row in rows)
    )
    assert silodp("report", rebind(Path("a"))).status == 0
    assert "to the silos</th>" not in Path("a/report.html").read_text()


def test_the_guarantee_names_the_aggregator_of_a_run_from_python(silodp: Silodp, config: Path) -> None:
    assert silodp("run", config, "--out", "a").status == 0
    Path("a/config.toml").unlink()
    Path("a/checkpoint/ledger.jsonl").unlink()  # it would contradict another aggregator's name
    Path("a/model.json").unlink()  # it names the digest of the guarantee
    said = json.loads(Path("a/guarantee.json").read_text())

    def page(aggregator: Any) -> str:
        Path("a/guarantee.json").write_text(json.dumps(said | {"aggregator": aggregator}))
        assert silodp("report", "a").status == 0
        return Path("a/report.html").read_text()

    assert "<code>masked</code>" in page({"name": "masked", "min_silos": 2})
    for wrong in (None, [], {"name": "of a later version"}, {"name": "masked", "size": 2}):
        Path("a/guarantee.json").write_text(json.dumps(said | {"aggregator": wrong}))
        assert_sentence(silodp("report", "a"), code="report.damaged")


@pytest.mark.parametrize("aggregator", [maker() for maker in AGGREGATORS.values()], ids=list(AGGREGATORS))
def test_who_saw_what_leaves_out_what_a_run_does_not_have(aggregator: Aggregator) -> None:
    record = AggregatorRecord.from_aggregator(aggregator)
    assert record.list_visibility(weighted=True, sampled=True) == aggregator.visibility
    for weighted, sampled in ((False, True), (True, False), (False, False)):
        rows = record.list_visibility(weighted, sampled)
        texts = [f"{row.sees}; {row.not_seen}" for row in rows]
        assert any("weights" in text for text in texts) <= weighted
        assert any("sampled" in text for text in texts) == sampled
        assert all(row.sees and row.not_seen for row in rows)
        own = replace(record, registered=False)  # what the author of a plug-in states is shown as it is
        assert own.list_visibility(weighted, sampled) == aggregator.visibility


def test_a_run_with_select_is_described_by_what_it_adds_up() -> None:
    server = Select().visibility[0]
    assert "that of their primary silo" in server.sees
    assert "weight" not in f"{server.sees} {server.not_seen}"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "–"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (123_456, "123 kB"),
        (999_700, "1 MB"),
        (7_938_080, "7.94 MB"),
        (20_000_000_000, "20 GB"),
        (3 * 10**12, "3 TB"),
    ],
)
def test_bytes(size: int | None, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize("setting", ["silo_limits.server=0.01", "method.weighting=records"])
def test_limits_that_no_round_can_keep_are_refused_before_the_first_and_planned(
    silodp: Silodp, config: Path, setting: str
) -> None:
    sets = ("--set", "silo_limits.server=9", "--set", setting)
    outcome = silodp("run", config, "--out", "out", *sets)
    assert_sentence(outcome, code="budget.out_of_reach")
    assert not Path("out").exists()
    plan = silodp("plan", config, *sets, "--json").json
    assert [(one["adversary"], one["rounds"], one["fits"]) for one in plan["silo_limits"]] == [
        ("server", 0, False)
    ]
    assert "(server): enough for 0 rounds" in silodp("plan", config, *sets).out


def test_a_plan_says_how_many_rounds_the_limits_of_silos_allow(silodp: Silodp, config: Path) -> None:
    """As many as a run makes under them."""
    sets = ("--set", "silo_limits.server=1.2", "--set", "rounds=4")
    (limit,) = silodp("plan", config, *sets, "--json").json["silo_limits"]
    assert 0 < limit["rounds"] < 4
    assert not limit["fits"]
    silodp("run", config, "--out", "out", *sets)
    ledgers = Path("out/checkpoint/silo_ledgers").iterdir()
    assert max(path.read_text().count('"kind":"charge"') for path in ledgers) == limit["rounds"]


def test_silos_stop_at_limits_of_their_own_and_the_run_goes_on_with_others(
    silodp: Silodp, config: Path
) -> None:
    first = silodp(
        "run", config, "--out", "out", "--set", "silo_limits.server=1.2", "--set", "rounds=4", "--json"
    )
    assert first.status == 2
    assert json.loads(first.out)["error"]["code"] == "gate.budget"
    ledgers = sorted(Path("out/checkpoint/silo_ledgers").iterdir())
    rounds = [path.read_text().count('"kind":"charge"') for path in ledgers]
    assert max(rounds) < 4
    again = silodp("run", "out", "--resume", "--set", "silo_limits.server=9", "--json")
    assert again.status == 0, again.err
    assert json.loads(again.out)["rounds"] == 4
    for junk in ("silo_limits.server=-1", "silo_limits.nobody=1", "silo_limits.server=inf", "silo_limits=3"):
        assert silodp("plan", config, "--set", junk).status == 2
