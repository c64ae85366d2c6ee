"""Aggregators that are not part of the package: they train, die, resume and are reported on like the others."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plugins.trimmed import Trimmed, TrimmedServer
from silodp.accounting.events import Gaussian
from silodp.aggregators import Aggregator, Plain
from silodp.aggregators.registry import AGGREGATORS, AggregatorRecord
from silodp.methods import FederationSize, UldpAvg
from silodp.report.page import write_report
from silodp.report.run_record import read_run
from silodp.runtime.callback import Result
from silodp.runtime.train import train
from silodp.training.sgd.local import LocalTraining
from support.commands import Silodp, assert_sentence
from support.oracles import logistic_task, small_federation
from support.places import PLUGINS
from support.refusals import refused
from support.specs import make_spec

METHOD = UldpAvg(5.0, 0.5, LocalTraining(learning_rate=0.1))
BY_RECORDS = replace(METHOD, weighting="records")


@dataclass(frozen=True)
class Mine(Plain):
    name = "mine"


def run(out: Path | None, aggregator: Any = Trimmed(trim=1), **more: Any) -> Result:  # noqa: B008
    return train(
        small_federation(), logistic_task(), METHOD, rounds=3, aggregator=aggregator, seed=0, out=out, **more
    )


def die(out: Path) -> None:
    """Run until the second round was charged and its shares are there, and die before they are combined."""
    combine, calls = TrimmedServer.combine, []

    def dying(self: TrimmedServer, shares: torch.Tensor) -> torch.Tensor:
        calls.append(shares)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGKILL)
        return combine(self, shares)

    TrimmedServer.combine = dying  # type: ignore[method-assign]
    run(out)


def test_three_lines_are_an_aggregator_that_trains_and_is_reported_on(tmp_path: Path) -> None:
    done = run(tmp_path / "mine", Mine())
    assert torch.equal(done.params, run(None, "plain").params)
    kept = read_run(tmp_path / "mine")
    assert kept.audit is not None
    assert kept.audit.rounds == 3
    assert kept.aggregator == AggregatorRecord.from_aggregator(Mine())
    write_report(tmp_path / "mine")
    page = (tmp_path / "mine" / "report.html").read_text()
    assert "With the aggregator <code>mine</code>" in page
    assert "not part of silodp" in page
    for row in Plain().visibility:
        assert f'<th scope="row">{row.party}</th>' in page


def test_its_settings_tell_runs_apart(tmp_path: Path) -> None:
    run(tmp_path / "a", Trimmed(trim=1))
    with refused("checkpoint.setup"):
        run(tmp_path / "a", Trimmed(trim=0), resume=True)


def test_a_killed_run_is_resumed_to_the_same_model_and_charged_once(tmp_path: Path) -> None:
    torch.set_num_threads(1)  # of several threads only this one goes on in the fork
    pid = os.fork()
    if pid == 0:
        try:
            die(tmp_path / "run")
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert (tmp_path / "run" / "checkpoint" / "ledger.jsonl").read_text().count('"kind":"charge"') == 2
    done, whole = run(tmp_path / "run", resume=True), run(None)
    assert torch.equal(done.params, whole.params)
    assert not torch.equal(done.params, run(None, "plain").params)
    assert done.guarantees == whole.guarantees
    assert read_run(tmp_path / "run").audit.rounds == 3  # type: ignore[union-attr]


def test_trimming_is_charged_as_if_every_share_were_seen() -> None:
    names = ("a", "b", "c", "d")
    for method, adversary, multiplier in (
        (METHOD, "released", 5.0),  # four shares move by C/4 each: together as the sum does
        (METHOD, "server", 5.0),
    ):
        spec = make_spec("", names, method, FederationSize(4, 12), 5)
        assert replace(spec, aggregator=Trimmed()).round_events()[adversary] == Gaussian(multiplier)
    # By records a person may lie in one silo, whose share carries half of the noise of the sum.
    view = Trimmed().views(BY_RECORDS, 4)["released"]
    spec = make_spec("", names, BY_RECORDS, FederationSize(4, 12), 5)
    assert Trimmed().event(spec, view) == Gaussian(2.5)
    assert Plain().event(spec, Plain().views(BY_RECORDS, 4)["released"]) == Gaussian(5.0)


def test_nothing_is_promised_against_a_silo_where_plain_promises_nothing() -> None:
    spec = make_spec("", ("a", "b", "c"), BY_RECORDS, FederationSize(3, 12), 5)
    for name, event in spec.round_events().items():
        assert type(replace(spec, aggregator=Trimmed()).round_events()[name]) is type(event)


def test_trimming_needs_shares_that_are_left() -> None:
    with refused("argument.value") as caught:
        run(None, Trimmed(trim=2))
    assert caught.value.field == "trim"


def test_what_a_plugin_states_is_read_back_or_refused() -> None:
    record = AggregatorRecord.from_aggregator(Trimmed(trim=2))
    entry = json.loads(json.dumps(record.to_dict()))
    assert AggregatorRecord.from_dict(entry) == record
    assert entry["trim"] == 2
    for share in (0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="states"):
            AggregatorRecord.from_dict({**entry, "class": {**entry["class"], "delta_share": share}})


@pytest.mark.parametrize("name", AGGREGATORS)
def test_a_registered_aggregator_is_stored_by_its_name_and_settings(name: str) -> None:
    made = AGGREGATORS[name]()
    assert made.name == name
    assert AggregatorRecord.from_aggregator(made).to_dict() == {"name": name, **made.settings}


def test_an_unknown_name_is_refused() -> None:
    with refused("argument.value"):
        train(small_federation(), logistic_task(), METHOD, rounds=1, aggregator="plane")


def test_what_has_no_default_must_be_written() -> None:
    assert Aggregator.__abstractmethods__ == {"script", "server", "silo"}


# --- by a reference in a configuration ---


@pytest.fixture
def trimmed(silodp: Silodp, config: Path) -> Path:
    """A run of two rounds whose aggregator is a class in a file next to the configuration."""
    source = PLUGINS / "trimmed.py"
    (config.parent / "trimmed.py").write_text(source.read_text())
    text = (
        config.read_text()
        .replace("silos = 2", "silos = 3")
        .replace("seed = 1", "seed = 1\naggregator = 'trimmed.py:Trimmed'")
    )
    config.write_text(text + "[aggregation]\ntrim = 1\n")
    done = silodp("run", config, "--out", "a")
    assert done.status == 0, done.err
    return Path("a")


def test_a_configuration_may_name_a_class_in_a_file(trimmed: Path, silodp: Silodp, config: Path) -> None:
    kept = json.loads((trimmed / "guarantee.json").read_text())["aggregator"]
    assert (kept["name"], kept["trim"]) == ("trimmed", 1)
    planned = silodp("plan", config, "--json").json
    assert planned["aggregation"]["shares that count in a coordinate"] == 1


def test_a_run_by_a_reference_is_resumed(trimmed: Path, silodp: Silodp, config: Path) -> None:
    more = silodp("run", config, "--set", "rounds=3", "--out", trimmed, "--resume")
    assert more.status == 0, more.err
    assert read_run(trimmed).audit.rounds == 3  # type: ignore[union-attr]


def test_a_report_needs_no_code_of_a_plugin(trimmed: Path, silodp: Silodp, config: Path) -> None:
    (config.parent / "trimmed.py").unlink()
    done = silodp("report", trimmed)
    assert done.status == 0, done.err
    page = (trimmed / "report.html").read_text()
    assert "With the aggregator <code>trimmed</code>" in page
    assert "not part of silodp" in page


def test_a_report_finds_what_a_plugins_entry_says_otherwise(trimmed: Path, silodp: Silodp) -> None:
    path = trimmed / "guarantee.json"
    said = json.loads(path.read_text())
    said["aggregator"]["name"] = "plain"
    path.write_text(json.dumps(said))
    assert_sentence(silodp("report", trimmed), code="report.contradicted")
