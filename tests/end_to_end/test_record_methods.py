"""Records as the unit, through the commands: rpdp and its baselines, ddp, what they cost and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from silodp.accounting.accountant import compute_epsilon
from silodp.accounting.charges import count_events
from silodp.accounting.events import Gaussian, PoissonSampled
from silodp.config.resolve import load_config
from silodp.methods import METHODS
from silodp.report.guarantee_text import CLAIMED, format_group, format_requested_and_charged
from silodp.report.plots import SamplingCurve, plot_epsilon_by_sampling
from silodp_budgets.rpdp.method import Rpdp
from silodp_experiments.method_specs import parse_methods
from support.commands import Silodp, assert_sentence
from support.configs import DDP, PERSONAL

TWO_STAGES = (
    "epsilon --method rpdp --noise-multiplier 6 --rounds 15 --local-steps 50 --record-sampling 0.05 "
    "--delta 1e-4"
)
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def personal(config: Path) -> Path:
    path = config.with_name("personal.toml")
    path.write_text(PERSONAL)
    return path


@pytest.fixture
def steps(config: Path) -> Path:
    path = config.with_name("steps.toml")
    path.write_text(DDP)
    return path


@pytest.mark.parametrize(
    ("client_sampling", "accountant", "expected"),
    [
        (1, "rdp", 0.795),
        (1, "pld", 0.710),
        (0.8, "rdp", 0.721),
        (0.8, "pld", 0.637),
        (0.3, "rdp", 0.480),
        (0.3, "pld", 0.406),
    ],
)
def test_epsilon_of_two_stages_by_the_specification(
    silodp: Silodp, client_sampling: float, accountant: str, expected: float
) -> None:
    asked = ("--client-sampling", client_sampling, "--accountant", accountant, "--json")
    found = silodp(*TWO_STAGES.split(), *asked).json
    assert found["epsilon"] == pytest.approx(expected, abs=1e-3)
    assert found["unit"] == "record"
    assert found["claims"] == []
    assert [person["records"] for person in found["persons"]] == [2, 4, 8, 16]
    promised = [found["epsilon"], *(person["epsilon"] for person in found["persons"])]
    assert promised == sorted(promised)


@pytest.mark.parametrize("adversary", ["released", "server", "silo"])
def test_two_stages_cost_the_same_whoever_looks(silodp: Silodp, adversary: str) -> None:
    asked = ("--client-sampling", 0.3, "--accountant", "rdp", "--adversary", adversary, "--json")
    assert silodp(*TWO_STAGES.split(), *asked).json["epsilon"] == pytest.approx(0.480, abs=1e-3)


@pytest.mark.parametrize(
    ("steps", "sigma", "clients", "rdp", "pld"),
    [  # DDP, Table 1, as `silodp table averaged-models` mends it; σ of one client
        (1, 0.690, 1, 4.25, 3.67),
        (1, 0.690, 10, 0.440, 0.311),
        (10, 0.902, 1, 4.25, 3.53),
        pytest.param(10, 0.902, 2, 2.12, 1.75, marks=pytest.mark.slow),
        pytest.param(10, 0.902, 5, 0.924, 0.788, marks=pytest.mark.slow),
        pytest.param(10, 0.902, 10, 0.545, 0.476, marks=pytest.mark.slow),
        pytest.param(50, 1.179, 10, 0.824, 0.744, marks=pytest.mark.slow),
    ],
)
def test_the_ddp_papers_table_is_claimed_where_several_steps_of_several_clients_are_run(
    silodp: Silodp, steps: int, sigma: float, clients: int, rdp: float, pld: float
) -> None:
    question = f"epsilon --method ddp --noise-multiplier {sigma} --clients {clients} --rounds 1 --local-steps {steps}"
    for accountant, expected in (("rdp", rdp), ("pld", pld)):
        asked = f"{question} --record-sampling 0.1 --trajectory paper --accountant {accountant} --json"
        found = silodp(*asked.split()).json
        local = silodp(*asked.replace("paper", "local").split()).json
        assert found["epsilon"] == local["epsilon"]  # the guarantee is the sound one
        assert local["claims"] == []
        if 1 in (steps, clients):  # what is claimed is proven there
            assert found["claims"] == []
            assert found["epsilon"] == pytest.approx(expected, abs=0.02)
            continue
        (claim,) = found["claims"]
        assert claim["epsilon"] == pytest.approx(expected, abs=0.02)
        assert "not proven" in claim["why"]
        assert found["epsilon"] > 1.5 * claim["epsilon"]


def test_a_claim_is_labelled_in_words_and_stands_last(silodp: Silodp) -> None:
    asked = (
        "epsilon --method ddp --noise-multiplier 0.902 --clients 10 --rounds 1 --local-steps 10 "
        "--record-sampling 0.1 --trajectory paper"
    )
    lines = silodp(*asked.split()).out.splitlines()
    assert lines[0].startswith("ε = 3.4")
    assert lines[-1].startswith(f"  [{CLAIMED}: no guarantee] ε = 0.47")
    assert sum("0.47" in line for line in lines) == 1


def test_decoupled_costs_little_more_than_is_claimed(silodp: Silodp) -> None:
    question = (
        "epsilon --method ddp --noise-multiplier 0.902 --clients 10 --rounds 1 --local-steps 10 "
        "--record-sampling 0.1 --accountant rdp --json"
    )
    default = silodp(*question.split()).json["epsilon"]
    assert default == pytest.approx(0.632, abs=0.002)
    wide = silodp(*question.split(), "--trajectory-ratio", 20).json["epsilon"]
    assert 0.545 < wide < 0.55 < default
    shares = silodp(*question.split(), "--adversary", "server").json["epsilon"]
    assert shares > 5 * default  # the plain server sees every client's share
    hidden = silodp(*question.split(), "--adversary", "server", "--aggregator", "masked").json["epsilon"]
    assert hidden == pytest.approx(default, rel=0.01)


def test_a_rate_that_the_method_finds_by_budgets_is_asked_for(silodp: Silodp) -> None:
    question = "epsilon --noise-multiplier 5 --rounds 10 --method rpdp --local-steps 5 --json"
    assert_sentence(silodp(*question.split()), code="argument.missing")


def test_the_table_of_averaged_models_tells_claimed_from_proven(silodp: Silodp) -> None:
    rows = silodp("table", "averaged-models", "--json").json["rows"]
    assert len(rows) == 3 * 4 * 3 * 3
    for row in rows:
        claimed = row["trajectory"] == "paper" and row["steps"] > 1 and row["parties"] > 1
        assert row["status"] == ("claimed" if claimed else "proven")
    (cell,) = [
        row["epsilon"]
        for row in rows
        if (row["steps"], row["parties"], row["trajectory"], row["conversion"]) == (50, 10, "paper", "rdp")
    ]
    assert cell == pytest.approx(0.824, abs=0.02)
    assert len(re.findall(r"\d claimed", silodp("table", "averaged-models").out)) == 2 * 3 * 3


def test_a_plan_says_which_budget_gets_which_sampling(silodp: Silodp, personal: Path) -> None:
    changes = ["--set", "budgets.levels=[0.2, 1, 5]"]
    found = silodp("plan", personal, *changes, "--json").json
    budgets = found["budgets"]
    assert [(level["budget"], level["share"]) for level in budgets["levels"]] == [
        (0.2, 0.7),
        (1, 0.2),
        (5, 0.1),
    ]
    assert (budgets["unreachable"], budgets["units"]) == (0, 1000)
    for level in budgets["levels"]:
        steps = [(PoissonSampled(level["q"], Gaussian(5.0)), 2 * 4)]
        spent = compute_epsilon(steps, 1e-4, "rdp")
        assert 0 < level["epsilon"] < spent <= level["budget"]  # told by pld, calibrated by rdp
        assert spent > 0.97 * level["budget"] or level["q"] == 1
    assert budgets["levels"][0]["q"] < 1
    text = silodp("plan", personal, *changes).out
    assert re.search(r" 1 by +20 %: q = 0\.\d+, .*ε = ", text)
    assert "0 of 1,000" not in text


@pytest.mark.slow
def test_budgets_out_of_reach_are_counted(silodp: Silodp, personal: Path) -> None:
    tiny = ["--set", "budgets.levels=[0.01, 1, 5]", "--set", "method.noise_multiplier=1.0"]
    assert silodp("plan", personal, *tiny, "--json").json["budgets"]["unreachable"] == 700
    assert "700 of 1,000 (70 %)" in silodp("plan", personal, *tiny).out
    done = silodp("run", personal, *tiny, "--out", "out", "--json")
    assert done.status == 0, done.err
    assert any("take no part" in warning for warning in done.json["warnings"])
    groups = done.json["guarantees"]["released"]["groups"]
    assert groups[0]["q"] == 0
    assert f"{groups[0]['units']} of 455 records" in done.err


@pytest.mark.slow
def test_records_that_have_retired_are_remarked_on(silodp: Silodp, personal: Path) -> None:
    done = silodp("run", personal, "--set", "method.rounds=1", "--out", "out", "--json")
    assert done.status == 0, done.err
    (warning,) = (text for text in done.json["warnings"] if "retired" in text)
    assert re.search(r"\b1 round\b.*\b2\b", warning)
    whole = silodp("run", personal, "--out", "whole", "--json").json["warnings"]
    assert not any("retired" in text for text in whole)
    method = load_config(personal).method
    assert isinstance(method, Rpdp)
    for one in (method, replace(method, calibration="scf")):  # the published curve, too, is for T rounds
        assert one.budgets.retires_after == 2


def test_a_run_warns_where_persons_have_several_of_the_protected_records(silodp: Silodp, steps: Path) -> None:
    def warns(*changes: str, out: str) -> bool:
        done = silodp("run", steps, *changes, "--out", out, "--json")
        assert done.status == 0, done.err
        return any("ε is for one record" in text for text in done.json["warnings"])

    assert not warns(out="alone")
    assert warns("--set", 'data={source="embedded", silos=3, users=40}', out="several")


def test_a_run_warns_of_scaling_by_private_rows(silodp: Silodp, data: Path, config: Path) -> None:
    for normalize, count in (("private", 1), ("public", 0)):
        source = f'data={{source="heart_disease", users=50, normalize="{normalize}", root="{data}"}}'
        done = silodp("run", config, "--set", source, "--set", "rounds=1", "--out", normalize, "--json")
        assert done.status == 0, done.err
        assert sum("no ε covers the scaling" in text for text in done.json["warnings"]) == count


def test_whoever_resumes_with_other_rounds_hears_what_budgets_were_laid_out_over(
    silodp: Silodp, personal: Path
) -> None:
    assert silodp("run", personal, "--out", "out").status == 0
    more = ("run", personal, "--set", "rounds=3", "--out", "out", "--resume")
    assert_sentence(
        silodp(*more),
        "2 rounds",
        "method.rounds = 2",
        code="checkpoint.setup",
    )
    assert silodp(*more, "--set", "method.rounds=2").status == 0


@pytest.mark.parametrize("spent", [0.1113, 0.1114])
def test_what_was_kept_never_looks_exceeded(spent: float) -> None:
    group = {"budget": 0.1114, "units": 3, "planned": spent, "realized": None}
    assert format_group(group) == "0.112 → 0.112 (3)"
    assert format_requested_and_charged([group]) == "0.112\u00a0→\u00a00.112"
    assert format_group({**group, "from": 0.05}) == "0.05–0.112 → 0.112 (3)"
    assert format_group({**group, "least": 0.05}) == "0.05–0.112 → 0.112 (3)"


def test_a_largest_budget_out_of_reach_is_refused(silodp: Silodp, personal: Path) -> None:
    tiny = ["--set", "method.largest_budget=0.01", "--set", "method.noise_multiplier=1.0"]
    assert_sentence(silodp("run", personal, *tiny, "--out", "out"), "largest")
    assert not Path("out").exists()


@pytest.mark.slow
def test_a_plan_finds_the_noise_for_steps_and_clients(silodp: Silodp, steps: Path) -> None:
    found = silodp("plan", steps, "--target-epsilon", 2, "--json").json["target"]
    assert found["of"] is None
    for name in ("noise_multiplier", "record_sampling"):
        met = silodp("plan", steps, "--set", f"method.{name}={found[name]!r}", "--json").json
        spent = met["adversaries"]["released"]["epsilon"]
        assert 1.99 < spent <= 2
    more = silodp("plan", steps, "--target-epsilon", 2, "--set", "data.silos=12", "--json").json["target"]
    assert more["noise_multiplier"] < 0.6 * found["noise_multiplier"]


@pytest.mark.slow
def test_a_target_for_own_sampling_is_that_of_a_record_in_every_step(silodp: Silodp, personal: Path) -> None:
    target = 8  # more than the largest budget, which the run itself therefore never costs
    changes = ("--set", "method.noise_multiplier=1.5")
    found = silodp("plan", personal, *changes, "--target-epsilon", target, "--json").json["target"]
    assert "q = 1" in found["of"]
    assert compute_epsilon([(Gaussian(found["noise_multiplier"]), 8)], 1e-4) == pytest.approx(
        target, rel=1e-3
    )
    assert found["record_sampling"] < 1
    met = compute_epsilon([(PoissonSampled(found["record_sampling"], Gaussian(1.5)), 8)], 1e-4)
    assert met == pytest.approx(target, rel=1e-3)
    assert met <= target


@pytest.mark.slow
def test_a_plan_draws_epsilon_plot_epsilon_by_sampling(
    silodp: Silodp, personal: Path, steps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("silodp.planning.epsilon_by_sampling._POINTS", 5)  # of each of 15 curves
    assert silodp("plan", personal, "--plot", "pictures/q.svg", "--json").json["plot"] == "pictures/q.svg"
    text = Path("pictures/q.svg").read_text()
    for sigma in ("1.25", "2.5", "5", "10", "20"):
        assert f"σ = {sigma}<" in text
    for budget in ("0.5", "1", "5"):
        assert f">{budget}<" in text
    assert ">ε after 2 rounds (pld)<" in text  # that of the plan's text; the method finds its q by rdp
    least = silodp("plan", personal, "--set", "accountant=rdp", "--plot", "r.svg")
    assert least.status == 0, least.err
    assert ">ε after 2 rounds (rdp)<" in Path("r.svg").read_text()
    assert "picture: q.png" in silodp("plan", steps, "--plot", "q.png").out
    assert Path("q.png").read_bytes().startswith(b"\x89PNG")
    assert_sentence(silodp("plan", steps, "--plot", "q.txt"), "end in .svg")
    silent = ["--set", "method={name='default'}"]
    assert_sentence(silodp("plan", steps, *silent, "--plot", "q.svg"), "default")


@pytest.mark.slow
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_the_picture_and_the_text_tell_the_same_epsilon(
    silodp: Silodp, personal: Path, monkeypatch: pytest.MonkeyPatch, accountant: str
) -> None:
    drawn: list[SamplingCurve] = []

    def kept(curves: list[SamplingCurve], *rest: Any) -> Any:
        drawn.extend(curves)
        return plot_epsilon_by_sampling(curves, *rest)

    monkeypatch.setattr("silodp.report.plots.plot_epsilon_by_sampling", kept)
    monkeypatch.setattr("silodp.planning.epsilon_by_sampling._POINTS", 5)
    assert silodp("plan", personal, "--set", f"accountant={accountant}", "--plot", "q.svg").status == 0
    (curve,) = (curve for curve in drawn if curve.label == "σ = 5")
    assert curve.sampling[-1] == 1
    always = compute_epsilon([(Gaussian(5.0), 8)], 1e-4, accountant)  # type: ignore[arg-type]
    assert curve.epsilon[-1] == pytest.approx(always, rel=2e-3)


@pytest.mark.parametrize("rounds", [1, 2, 7, 10**6])
@pytest.mark.parametrize(("one", "two"), [(0, 0), (0, 1), (3, 3), (3, 4), (6, 7), (5, 10**7)])
def test_equal_rounds_are_charged_together(rounds: int, one: int, two: int) -> None:
    asked: list[int] = []

    def event_in(round_: int) -> Gaussian:
        asked.append(round_)
        return Gaussian(1.0 if round_ < one else 2.0 if round_ < two else 4.0)

    parts = {1.0: min(one, rounds), 2.0: min(two, rounds) - min(one, rounds), 4.0: rounds - min(two, rounds)}
    assert count_events(event_in, range(rounds)) == [(Gaussian(sigma), n) for sigma, n in parts.items() if n]
    assert len(asked) < 100


@pytest.mark.parametrize("name", ["rpdp", "rpdp-filter"])
def test_who_retires_is_charged_no_more(silodp: Silodp, personal: Path, name: str) -> None:
    sooner = ["--set", "method.rounds=2"] if name == "rpdp" else []
    changes = [f"method.name={name}", "method.largest_budget=1.0", *sooner[1:]]
    sets = [part for change in changes for part in ("--set", change)]
    spent = [
        silodp("plan", personal, *sets, "--set", f"rounds={rounds}", "--json").json["adversaries"]["released"]
        for rounds in (2, 500, 500_000)
    ]
    assert spent[0]["epsilon"] <= spent[1]["epsilon"] == spent[2]["epsilon"] <= 1.0


@pytest.mark.parametrize("by", ["sampling", "clip"])
def test_a_plan_for_persons_budgets(silodp: Silodp, config: Path, by: str) -> None:
    mean = "\nmean_sampling = 0.3" if by == "sampling" else ""
    config.write_text(
        config.read_text()
        + f'[method.personal]\nby = "{by}"\nlargest_budget = 1.0{mean}\n'
        + '[budgets]\ndistribution = "three-levels"\nof = "users"\n'
    )
    found = silodp("plan", config, "--json").json
    levels = found["budgets"]["levels"]
    assert [level["budget"] for level in levels] == [0.1, 1, 5]
    name = "q" if by == "sampling" else "clip"
    assert 0 < levels[0][name] < levels[1][name] == levels[2][name] <= 1
    assert found["budgets"]["adversary"] == "server"
    assert found["budgets"]["units"] == 20
    assert 0.8 < found["adversaries"]["server"]["epsilon"] <= 1
    assert silodp("run", config, "--out", "out", "--json").status == 0
    page = Path("out/report.html").read_text()
    assert 'id="budgets"' in page
    assert 'id="persons"' not in page  # the guarantee is about persons


def test_a_personal_run_says_who_was_charged_what(silodp: Silodp, personal: Path) -> None:
    done = silodp("run", personal, "--out", "out", "--json")
    assert done.status == 0, done.err
    released = done.json["guarantees"]["released"]
    assert [group["budget"] for group in released["groups"]] == [0.5, 1, 5]
    assert all(group["planned"] <= group["budget"] for group in released["groups"])
    assert released["epsilon"] <= 5
    page = Path("out/report.html").read_text()
    assert all(f'id="{part}"' in page for part in ("budgets", "persons"))
    assert 'id="claims"' not in page
    assert "checked against the ledger (2 rounds)" in page
    assert any(re.search(r"\b0\.5 → 0\.4\d+", line) for line in done.json["beyond"])


def test_a_paper_trajectory_promises_the_sound_epsilon(silodp: Silodp, steps: Path) -> None:
    done = silodp("run", steps, "--set", "method.trajectory=paper", "--out", "out", "--json")
    assert done.status == 0, done.err
    released = done.json["guarantees"]["released"]
    (claim,) = released["claims"]
    plan = silodp("plan", steps, "--set", "method.trajectory=local", "--json").json
    assert plan["claims"] == []
    paper = silodp("plan", steps, "--set", "method.trajectory=paper", "--json").json
    assert paper["adversaries"] == plan["adversaries"]
    assert paper["claims"][0] == {"adversary": "released", **claim}
    assert (
        silodp("plan", steps, "--set", "method.trajectory=paper").out.count(f"[{CLAIMED}: no guarantee]")
        == 2  # not for the server, which sees shares
    )
    assert released["epsilon"] == pytest.approx(plan["adversaries"]["released"]["epsilon"], rel=1e-9)
    assert claim["epsilon"] < released["epsilon"]
    assert CLAIMED in Path("out/report.html").read_text()
    summary = json.loads(Path("out/guarantee.json").read_text())
    summary["guarantees"][0]["epsilon"] = claim["epsilon"]
    Path("out/guarantee.json").write_text(json.dumps(summary))
    assert_sentence(silodp("report", "out"), "contradicted by the run's ledger")


@pytest.mark.slow
def test_a_comparison_shows_asked_and_spent(silodp: Silodp, personal: Path) -> None:
    methods = "rpdp,rpdp:ledger=realized,rpdp-minimum:budget=0.5,rpdp-dropout:threshold=1,uldp-avg"
    done = silodp("compare", personal, "--methods", methods, "--seeds", 1, "--out", "cmp", "--json")
    assert done.status == 0, done.err
    found = {method["label"]: method for method in done.json["methods"]}
    assert [group["budget"] for group in found["rpdp"]["groups"]] == [0.5, 1, 5]
    assert found["uldp-avg"]["groups"] == found["default"]["groups"] == []
    table = Path("cmp/compare.md").read_text()
    head, _, *rows = table.splitlines()
    assert "ε requested → charged" in head
    assert all(row.count("|") == head.count("|") for row in rows[:7])
    assert re.search(r"\| rpdp \|.* 0\.5 → 0\.\d+, 1 → ", table)
    assert re.search(r"rpdp-dropout:threshold=1 .*single records", table)
    page = Path("cmp/compare.html").read_text()
    assert page.count("protects single records") == 4


@pytest.mark.parametrize(
    ("method", "override", "code"),
    [
        ("rpdp", "method.delta=1e-3", "argument.conflict"),
        ("rpdp", "method.record_sampling=0.1", "config.unknown_field"),
        ("rpdp", "method.expected_batch_size=1000", "data.too_few_records"),
        ("ddp", "method.local_steps=[1, 0, 2]", "argument.value"),
        ("ddp", "method.clip=[1.0, 2.0, 1.0, 1.0]", "argument.shape"),
        ("ddp", "method.clip=[]", "argument.shape"),
    ],
)
def test_a_mistake_leaves_nothing_behind(
    silodp: Silodp, personal: Path, steps: Path, method: str, override: str, code: str
) -> None:
    path = personal if method == "rpdp" else steps
    assert_sentence(silodp("run", path, "--set", override, "--out", "out", "--json"), code=code)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    "override",
    [
        "method.most_batch=100000000000000",
        "aggregation.units=1073741824",
        "method.noise_multiplier=1e6",
    ],
)
def test_public_constants_that_do_not_fit_are_refused_before_any_record_is_read(
    silodp: Silodp, steps: Path, override: str
) -> None:
    nowhere = "data={source='mnist', silos=3, root='/nowhere', allocation='own'}"
    changes = (part for change in (nowhere, "aggregator=masked", override) for part in ("--set", change))
    assert_sentence(silodp("run", steps, *changes, "--out", "out", "--json"), code="argument.grid")
    assert not Path("out").exists()


def test_settings_of_single_clients_are_compared_with_other_methods(steps: Path) -> None:
    specs = parse_methods(
        load_config(steps, ["method.clip=[1.0, 0.5, 1.0]"]), "ddp,ddp:local_steps=1,default"
    )
    assert [spec.method.name for spec in specs] == ["ddp", "ddp", "default"]


@pytest.mark.slow
def test_settings_of_single_clients_in_toml(silodp: Silodp, steps: Path) -> None:
    own = ["--set", "method.noise_multiplier=[2.0, 3.0, 4.0]", "--set", "method.clip=[1, 0.5, 1]"]
    found = silodp("plan", steps, *own, "--target-epsilon", 1, "--json").json
    assert found["noise_multiplier"] == 4.0
    largest = found["target"]["noise_multiplier"]
    scaled = f"method.noise_multiplier=[{largest / 2!r}, {0.75 * largest!r}, {largest!r}]"
    met = silodp("plan", steps, *own[2:], "--set", scaled, "--json").json["adversaries"]["released"][
        "epsilon"
    ]
    assert 0.99 < met <= 1.0


@pytest.mark.slow
def test_persons_costs_are_told_by_the_settings_of_single_clients(silodp: Silodp, steps: Path) -> None:
    own = ["--set", "method.noise_multiplier=[2.0, 3.0, 4.0]", "--set", "method.clip=[1, 0.5, 1]"]
    done = silodp("run", steps, *own, "--out", "out", "--json")
    assert done.status == 0, done.err
    persons: list[Any] = done.json["guarantees"]["released"]["persons"]
    values = [value for _, value in persons]
    assert done.json["guarantees"]["released"]["epsilon"] < values[0] < values[1] < values[2] < values[3]
    steps_differ = silodp(
        "run", steps, *own, "--set", "method.local_steps=[1, 2, 3]", "--out", "more", "--json"
    )
    persons = steps_differ.json["guarantees"]["released"]["persons"]
    assert [value for _, value in persons] == [
        None
    ] * 4  # no one bound for records in several such silos is proven


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["heart_disease_personal", "fashion_mnist_steps", "acs_income_steps", "mnist_personal"]
)
def test_examples_can_be_planned(silodp: Silodp, name: str) -> None:
    found = silodp("plan", EXAMPLES / f"{name}.toml", "--json")
    assert found.status == 0, found.err
    assert found.json["adversaries"]["released"]["private"]
    if "steps" in name:
        assert found.json["budget"]["fits"]
        assert found.json["adversaries"]["released"]["epsilon"] > 0.99
    else:
        assert found.json["budgets"]["unreachable"] == 0
        assert all(level["epsilon"] <= level["budget"] for level in found.json["budgets"]["levels"])


def test_every_method_is_asked_for_by_its_own_name() -> None:
    assert {"rpdp", "rpdp-minimum", "rpdp-dropout", "rpdp-filter", "ddp"} < METHODS.keys()
