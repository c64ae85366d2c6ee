"""A coordinator, or whoever sends the public folder in their name, puts code into it that nobody was shown.

The folder is files from outside, and operators look at the screen of `silodp deploy accept`, not at every field of
config.toml. Without the refusals tried here a party would run code before its operator has compared the digest (an
accountant), or code that the screen does not list (`model = "os:system"`, a file in a subfolder), with the rights of
the machine that holds the records and keys. Nor may a folder make a party read what lies outside it, or more than its
memory holds.
"""

from __future__ import annotations

import importlib.util
import os
import py_compile
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
import tomli_w
import torch
from pydantic import BaseModel

from silodp.accounting.ledger import Budget
from silodp.aggregators.registry import AGGREGATORS
from silodp.config.build import get_fields
from silodp.config.callbacks import make_callbacks
from silodp.config.resolve import resolve
from silodp.config.schema import RunConfig, parse_config
from silodp.config.toml_values import TomlTable, apply_override, read_toml
from silodp.data.catalog import DATASETS
from silodp.errors import SilodpError
from silodp.methods import METHODS
from silodp.plugins import refuse_plugins
from silodp.training.losses import LOSSES
from silodp.training.models import MODELS
from silodp_analytics.evaluation.series import Evaluation
from silodp_analytics.statistics.config import StatisticsRequest
from silodp_budgets.config import BudgetDistribution
from silodp_deploy import public_files
from silodp_deploy.acceptance import describe_agreement
from silodp_deploy.cli.deploy import format_agreement
from silodp_deploy.consortium import _CODE_MODULES, Consortium, take_copy
from silodp_deploy.public_files import compute_digest
from silodp_deploy.server import serve
from silodp_deploy.silo import open_silo
from support.commands import CONFIG, Silodp, assert_sentence
from support.consortium import make_parties
from support.deployed import TABLES
from support.refusals import refused

EVIL = """
import os
from pathlib import Path
with open(os.environ["WHO_EXECUTED"], "a") as log:
    print(Path(__file__).resolve(), file=log)
import torch
def Evil(features, **others):
    return torch.nn.Linear(features, 1)
"""
FORMS = ("evil.py:Evil", "below/evil.py:Evil", "python:{outside}/evil.py:Evil", "evil_module:Evil")
"""References to code in the folder, in a folder in it, outside it, and to a module of the party's machine."""


@pytest.fixture(scope="module")
def parties(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of a consortium that all have accepted, of a data set of silodp or of tables."""
    folder = tmp_path_factory.mktemp("agreed")
    if getattr(request, "param", "data set") != "tables":
        return make_parties(folder, CONFIG)
    for name in ("north", "south"):
        (folder / f"{name}.csv").write_text("patient,age,ill\np1,30,no\np2,50,yes\n")
    (folder / "persons.txt").write_text("p1\np2\np3\n")
    return make_parties(folder, TABLES.format(user="patient", index='users = "persons.txt"', more=""))


@pytest.fixture
def public(parties: Path, tmp_path: Path) -> Path:
    """A copy of the folder that all have accepted, to be changed."""
    return Path(shutil.copytree(parties / "public", tmp_path / "public"))


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[Path]]:
    """Returns the files with evil code that were run since the last call."""
    log, outside = tmp_path / "executed.txt", tmp_path / "outside"
    outside.mkdir()
    for name in ("evil.py", "evil_module.py"):
        (outside / name).write_text(EVIL)
    monkeypatch.setenv("WHO_EXECUTED", str(log))
    monkeypatch.syspath_prepend(outside)

    def take() -> set[Path]:
        found = set(map(Path, log.read_text().split())) if log.exists() else set()
        log.unlink(missing_ok=True)
        return found

    return take


# --- every field that can name code ---------------------------------------------------------------------------------

Path_ = tuple[str, ...]


def makers_of(section: str) -> list[Any]:
    """The classes and functions whose arguments a free table of the configuration holds."""
    tables: Mapping[str, list[Any]] = {
        "aggregation": list(AGGREGATORS.values()),
        "budget": [Budget],
        "budgets": [BudgetDistribution],
        "data": [dataset.loader for dataset in DATASETS.values()],
        "evaluation": [Evaluation],
        "loss_options": list(LOSSES.values()),
        "method": list(METHODS.values()),
        "statistics": [StatisticsRequest],
        "uldp-avg": [METHODS["uldp-avg"]],
        "options": list(MODELS.values()),
    }
    return tables[section]  # a new free table of the configuration has to be added


def text_fields(hint: Any, path: Path_) -> Iterator[tuple[Path_, bool]]:
    """Yield each place in a declaration where a text may stand: its path, and whether it is one of a list there."""
    if hint == TomlTable:
        yield (*path, "evil"), False
        for maker in makers_of(path[-1]):
            yield from declared_fields(maker, path)
    elif hint == tuple[TomlTable, ...]:
        yield (*path, "*", "name"), False
    elif hint is str or hint is Any or hint is Path:
        yield path, False
    elif isinstance(hint, type) and issubclass(hint, BaseModel):
        for name, field in hint.model_fields.items():
            yield from text_fields(field.annotation, (*path, field.alias or name))
    elif isinstance(hint, type) and is_dataclass(hint):
        if len(path) > 6:
            return  # a table in itself without an end
        if hasattr(hint, "registry"):
            yield (*path, "name"), False
            for key, one in hint.registry().items():
                needed = [f"{name}=1" for name, p in get_fields(one).items() if p.default is p.empty]
                yield from declared_fields(one, (*path, f'name="{key}"', *needed))
        yield from declared_fields(hint, path)
    else:
        origin, inner = get_origin(hint), [one for one in get_args(hint) if one not in (NoneType, Ellipsis)]
        if isinstance(origin, type) and issubclass(origin, Mapping):
            yield (*path, "<name>"), False
            # [methods.NAME] is a table as [method], by the name of the method.
            yield from text_fields(inner[1], (*path, "uldp-avg" if inner[1] == TomlTable else "any"))
        elif (isinstance(origin, type) and issubclass(origin, list | tuple | set)) or "Sequence" in str(
            origin
        ):
            yield from ((found, True) for found, _ in text_fields(inner[0], path))
        else:  # a union, or an annotated type; a literal has no types in it
            for one in inner:
                if not isinstance(one, str | int | float):
                    yield from text_fields(one, path)


def declared_fields(maker: Any, path: Path_) -> Iterator[tuple[Path_, bool]]:
    hints = get_type_hints(maker, localns={"nn": torch.nn, "Tensor": torch.Tensor})
    found = {name: hints.get(name, Any) for name in get_fields(maker)}
    if path[-1] in ("method", "data"):  # what selects the maker is no argument of it
        found["source" if path[-1] == "data" else "name"] = str
    for name, hint in found.items():
        yield from text_fields(hint, (*path, name))


FIELDS = sorted(set(text_fields(RunConfig, ())))

both_sources = pytest.mark.parametrize("parties", ["data set", "tables"], indirect=True, scope="module")


def put(values: dict[str, Any], path: Path_, value: Any) -> Any:
    """Return nested tables with one value set.

    Args:
        values: the tables.
        path: names of the tables and the value; "<name>" stands for a table that is called as the value, and "a=1" for
            a value beside it, and "*" for the only table of a list.
        value: to be set.
    """
    if not path:
        return value
    name, *rest = path
    if "=" in name:
        return put(apply_override(values, name), tuple(rest), value)
    if name == "*":
        return [put({}, tuple(rest), value)]
    if name == "<name>":
        return {**values, str(value): {"clip": 1.0}}
    below = values.get(name)
    return {**values, name: put(below if isinstance(below, dict) else {}, tuple(rest), value)}


def write_evil(public: Path, path: Path_, is_list: bool, reference: str) -> dict[str, Any]:
    """Put a reference to evil code into a field of config.toml, and the code into the folder; return the settings."""
    for place in (public, public / "below"):
        place.mkdir(exist_ok=True)
        (place / "evil.py").write_text(EVIL)
    values = put(read_toml(public / "config.toml"), path, [reference] if is_list else reference)
    (public / "config.toml").write_text(tomli_w.dumps(values))
    return values


def use_freely(values: Mapping[str, Any], public: Path) -> None:
    """Read settings, and make all that follows from them, as a program does that trusts them."""
    with suppress(SilodpError):
        run = resolve(parse_config(values, public))
        data = run.read_public_data
        for make in (
            run.settings,
            lambda: run.build_task(data()),
            lambda: make_callbacks(run.config.callbacks),
        ):
            with suppress(SilodpError):
                make()


def find_code_fields(public: Path, executed: Callable[[], set[Path]]) -> set[str]:
    found = set()
    for number, (path, is_list) in enumerate(FIELDS):
        copy = Path(shutil.copytree(public, public.with_name(f"free-{number}")))
        use_freely(write_evil(copy, path, is_list, "evil.py:Evil"), copy)
        if executed():
            found.add(".".join(path))
    return found


@both_sources
def test_the_walk_over_the_declarations_finds_the_fields_that_name_code(
    public: Path, executed: Callable[[], set[Path]]
) -> None:
    """That evil code is run where nothing refuses it: otherwise the next test would show nothing."""
    found = find_code_fields(public, executed)
    assert found == {
        "accountant",
        "aggregator",
        "callbacks.*.name",
        "data.source",
        "method.name",
        "method.participation.name",
        "method.server_optimizer.name",
        'method.server_optimizer.name="tail-average".last=1.optimizer.name',
        "methods.<name>",
        "methods.uldp-avg.participation.name",
        "methods.uldp-avg.server_optimizer.name",
        'methods.uldp-avg.server_optimizer.name="tail-average".last=1.optimizer.name',
        "task.loss",
        "task.metrics",
        "task.model",
    }


@both_sources
@pytest.mark.parametrize(("path", "is_list"), FIELDS, ids=[".".join(path) for path, _ in FIELDS])
def test_no_field_runs_code_before_it_is_accepted_or_code_that_is_not_shown(
    path: Path_, is_list: bool, public: Path, tmp_path: Path, executed: Callable[[], set[Path]]
) -> None:
    for number, form in enumerate(FORMS):
        folder = Path(shutil.copytree(public, tmp_path / f"public-{number}"))
        reference = form.format(outside=tmp_path / "outside")
        write_evil(folder, path, is_list, reference)
        try:
            consortium = take_copy(folder, tmp_path)
            agreed = describe_agreement(consortium)
        except SilodpError:
            assert executed() == set()
            continue
        shown = format_agreement(agreed)
        assert executed() == set()
        with suppress(SilodpError):  # accepted: whatever is run now was shown
            _ = consortium.task
        run = executed()
        assert bool(run) == (path[0] == "task" and path[1] in ("model", "loss", "metrics"))
        for file in run:
            name = file.relative_to(consortium.folder.resolve()).as_posix()
            assert list(agreed["references"].values()) == [reference]
            assert any(reference in line for line in shown)
            assert agreed["files"][name]["digest"] == sha256(EVIL.encode()).hexdigest()
            assert any(agreed["files"][name]["digest"] in line for line in shown)


ENTRY_POINTS = {
    "accountant": "accountants",
    "aggregator": "aggregators",
    "data.source": "datasets",
    "method.name": "methods",
    "method.participation.name": "participations",
    "method.server_optimizer.name": "server_optimizers",
}
"""The fields that take a name that an installed distribution adds, and the kind of part that they name."""


def install_evil(outside: Path) -> None:
    """Lay a distribution on the path that adds a part of every kind, and claims names of silodp's own."""
    about = outside / "evil-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    names = ("evil-part", "uldp-avg", "uldp_avg", "plain", "tables", "pld", "sgd")
    groups = [
        [f"[silodp.{kind}]", *(f"{name} = evil_module:Evil" for name in names)]
        for kind in ENTRY_POINTS.values()
    ]
    (about / "entry_points.txt").write_text("\n".join(line for group in groups for line in group))


@pytest.mark.parametrize("field", ENTRY_POINTS)
def test_a_name_that_another_distribution_adds_is_a_reference_to_code(
    field: str, public: Path, tmp_path: Path, executed: Callable[[], set[Path]]
) -> None:
    """The name says nothing of where its code comes from: it runs where references run, and nowhere else."""
    install_evil(tmp_path / "outside")
    values = put(read_toml(public / "config.toml"), tuple(field.split(".")), "evil-part")
    use_freely(values, public)
    assert [path.name for path in executed()] == ["evil_module.py"]
    sys.modules.pop("evil_module")
    with refuse_plugins(), refused("report.foreign_code"):  # as a report reads a configuration
        _ = resolve(parse_config(values, public)).accountant
    (public / "config.toml").write_text(tomli_w.dumps(values))
    with refused("report.foreign_code"):
        Consortium.load(public)
    assert executed() == set()


def test_no_distribution_takes_a_name_of_silodps_own(
    public: Path, tmp_path: Path, executed: Callable[[], set[Path]]
) -> None:
    install_evil(tmp_path / "outside")
    values = read_toml(public / "config.toml")
    for name in ("uldp-avg", "uldp_avg"):
        use_freely(put(values, ("method", "name"), name), public)
    use_freely({**values, "aggregator": "plain", "accountant": "pld"}, public)
    assert executed() == set()


@pytest.mark.parametrize(
    "reference",
    [
        "os:system",
        "subprocess:run",
        "torch:load",
        "torch.hub:load",
        "torch.nn:Linear.__init__",
        "torch.nn:_reduction",
        "torch.nn.functional:F",
        "silodp_deploy.cli.deploy:up",
        "silodp.plugins:execute_code",
        "../evil.py:Evil",
        "below/../../outside/evil.py:Evil",
        ".hidden.py:Evil",
        "__pycache__/evil.py:Evil",
        "below/.git/evil.py:Evil",
        "nowhere.py:Evil",
        "python:evil.py:Evil",
    ],
)
def test_code_that_the_digest_does_not_cover_is_refused(
    reference: str, public: Path, executed: Callable[[], set[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files whose names begin with a dot are no part of the digest; a module may do harm by its options alone."""
    write_evil(public, ("task", "model"), False, reference)
    for name in (".hidden.py", "__pycache__/evil.py", "below/.git/evil.py", "../evil.py"):
        (public / name).parent.mkdir(exist_ok=True)
        (public / name).write_text(EVIL)
    monkeypatch.chdir(public.parent)
    with refused("deploy.public") as caught:
        Consortium.load(public)
    assert caught.value.field == "task.model"
    assert executed() == set()


def test_code_that_is_not_on_the_list_is_not_run_after_acceptance(
    public: Path, executed: Callable[[], set[Path]]
) -> None:
    """The list is what opens the door, so a field that it forgets is refused, and not run unseen."""
    write_evil(public, ("task", "model"), False, "evil.py:Evil")
    consortium = Consortium.load(public)
    vars(consortium)["references"] = {}
    with refused("report.foreign_code"):
        _ = consortium.task
    assert executed() == set()
    values = put(read_toml(public / "config.toml"), ("accountant",), "evil.py:Evil")
    vars(consortium)["resolved"] = resolve(parse_config(values, public))
    with refused("report.foreign_code"):
        _ = consortium.stated_spec
    assert executed() == set()


def test_modules_that_may_be_named_have_nothing_that_reads_files_or_starts_programs() -> None:
    """Their functions get options of the configuration; all that can be called there makes networks or sums."""
    homes = (
        "torch.nn",
        "silodp.training",
        "silodp.errors",
        "silodp.settings",
        "silodp.text",
        "typing",
        "collections.abc",
        "dataclasses",
    )
    for name in _CODE_MODULES:
        for key, one in vars(import_module(name)).items():
            # An annotation such as `Positive` makes a number where it is called, and nothing else.
            if callable(one) and not key.startswith("_") and get_origin(one) is not Annotated:
                home = one.__module__
                assert home in ("itertools", "reprlib") or home.startswith(homes), (
                    f"{name}:{key} is of {home}"
                )


def test_a_loss_of_torch_is_taken_and_shown(public: Path) -> None:
    values = put(read_toml(public / "config.toml"), ("task", "loss"), "torch.nn:BCEWithLogitsLoss")
    (public / "config.toml").write_text(tomli_w.dumps(values))
    consortium = Consortium.load(public)
    lines = format_agreement(describe_agreement(consortium))
    assert any("task.loss = torch.nn:BCEWithLogitsLoss" in line for line in lines)
    assert consortium.task.loss.name.startswith("BCEWithLogitsLoss")


def test_a_compiled_file_beside_the_source_is_not_run(
    public: Path, executed: Callable[[], set[Path]]
) -> None:
    """Python takes it for the source if time and length are those of the source, and no digest covers it."""
    harmless = f"import torch\n#{'x' * 999}"[: len(EVIL) - 70].ljust(len(EVIL) - 70, "#")
    harmless += "\ndef Evil(features):\n    return torch.nn.Linear(features, 1)\n"
    source = public / "net.py"
    source.write_text(EVIL)
    cache = Path(importlib.util.cache_from_source(str(source)))
    py_compile.compile(str(source), str(cache))
    status = source.stat()
    source.write_text(harmless.ljust(len(EVIL), "\n"))
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert source.stat().st_size == status.st_size
    values = put(read_toml(public / "config.toml"), ("task", "model"), "net.py:Evil")
    (public / "config.toml").write_text(tomli_w.dumps(values))
    assert Consortium.load(public).task is not None
    assert executed() == set()


# --- the server accepts, too ----------------------------------------------------------------------------------------


@pytest.mark.timeout(60)  # without the refusal it waits for its silos
def test_the_server_runs_no_code_that_its_operator_has_not_accepted(
    parties: Path, public: Path, tmp_path: Path, executed: Callable[[], set[Path]]
) -> None:
    """A public folder that was changed after the server was set up, or one that was never accepted."""
    home = Path(shutil.copytree(parties / "server", tmp_path / "server"))
    write_evil(public, ("task", "model"), False, "evil.py:Evil")
    with refused("policy.digest"):
        serve(home, take_copy(public, home))
    (home / "accepted.txt").unlink()
    with refused("policy.digest"):
        serve(home, take_copy(parties / "public", home))
    assert executed() == set()
    assert not (home / "run").exists()


def test_a_silo_runs_no_code_that_its_operator_has_not_accepted(
    parties: Path, public: Path, executed: Callable[[], set[Path]]
) -> None:
    write_evil(public, ("task", "model"), False, "evil.py:Evil")
    for home in sorted((parties / "silos").iterdir()):
        with refused("policy.digest"), open_silo(home, Consortium.load(public)):
            pass
    assert executed() == set()


def test_the_servers_operator_sees_the_same_and_accepts_by_the_code(
    silodp: Silodp, parties: Path, public: Path, tmp_path: Path, executed: Callable[[], set[Path]]
) -> None:
    home = Path(shutil.copytree(parties / "server", tmp_path / "server"))
    write_evil(public, ("task", "model"), False, "below/evil.py:Evil")
    accept = ("deploy", "accept", public, home)
    code = Consortium.load(public).code
    assert_sentence(silodp(*accept, "--code", code, "--data", "t.csv", "--json"), code="argument.conflict")
    silo = sorted((parties / "silos").iterdir())[0]
    assert_sentence(silodp(*accept[:3], silo, "--code", code, "--json"), code="argument.missing")
    assert_sentence(silodp(*accept, "--code", "0000", "--json"), code="deploy.digest")
    before = (home / "accepted.txt").read_text()
    shown = silodp(*accept, "--code", code)
    assert shown.status == 0, shown.err
    assert "task.model = below/evil.py:Evil" in shown.err
    assert shown.err.count(sha256(EVIL.encode()).hexdigest()) == 2  # evil.py and below/evil.py
    assert (home / "accepted.txt").read_text() == f"{before}{compute_digest(public)}\n"
    assert executed() == set()


# --- links, special files, size -------------------------------------------------------------------------------------


def add_link(public: Path, secret: Path) -> None:
    (public / "net.py").symlink_to(secret)


def add_folder_link(public: Path, secret: Path) -> None:
    (public / "more").symlink_to(secret.parent)


def add_dead_link(public: Path, _: Path) -> None:
    (public / "more").symlink_to("nowhere")


def add_link_of_facts(public: Path, _: Path) -> None:
    (public / "data.json").rename(public.parent / "data.json")
    (public / "data.json").symlink_to(public.parent / "data.json")


def add_pipe(public: Path, _: Path) -> None:
    os.mkfifo(public / "net.py")


def add_socket(public: Path, _: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        os.chdir(public)  # the path of a socket is short
        one.bind("s")


def add_depth(public: Path, _: Path) -> None:
    place = public.joinpath(*"abcdefghi")
    place.mkdir(parents=True)
    (place / "net.py").touch()


def add_folder_in_place_of_a_file(public: Path, _: Path) -> None:
    (public / "data.json").unlink()
    (public / "data.json").mkdir()


@pytest.mark.timeout(30)  # without the refusal a pipe is never read to its end
@pytest.mark.parametrize(
    "change",
    [
        add_link,
        add_folder_link,
        add_dead_link,
        add_link_of_facts,
        add_pipe,
        add_socket,
        add_depth,
        add_folder_in_place_of_a_file,
    ],
)
def test_what_no_public_folder_holds_is_refused(
    change: Callable[[Path, Path], None], public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "private" / "identity.key"
    secret.parent.mkdir()
    secret.write_text("secret")
    monkeypatch.chdir(tmp_path)
    change(public, secret)
    home = tmp_path / "home"
    home.mkdir()
    with refused("deploy.public"):
        take_copy(public, home)
    assert not any("secret" in path.read_text() for path in home.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("limit", "beyond"),
    [("_MAX_FILES", 8), ("_MAX_FILE_BYTES", 5000), ("_MAX_BYTES", 20_000), ("_MAX_FACTS_BYTES", 100)],
)
def test_the_size_of_a_public_folder_is_bounded(
    limit: str, beyond: int, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(10):
        (public / f"{number}.bin").write_bytes(bytes(4000))
    Consortium.load(public)
    monkeypatch.setattr(public_files, limit, beyond)
    if limit == "_MAX_FILE_BYTES":
        Consortium.load(public)
        (public / "long.bin").write_bytes(bytes(5001))
    with refused("deploy.public"):
        Consortium.load(public)


def test_a_file_is_not_read_beyond_its_limit(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file of a terabyte costs its sender nothing; one that grows while it is read has no digest."""
    with (public / "sparse.bin").open("wb") as file:
        file.truncate(1 << 40)
    with refused("deploy.public"):
        Consortium.load(public)
    with (public / "sparse.bin").open("wb") as file:
        file.truncate(100)
    size = os.fstat

    def shrunk(descriptor: int) -> Any:
        found = size(descriptor)
        return SimpleNamespace(st_mode=found.st_mode, st_size=min(found.st_size, 99))

    monkeypatch.setattr(public_files.os, "fstat", shrunk)
    with refused("deploy.public"):
        public_files.read_regular(public / "sparse.bin", public / "sparse.bin", 1000)


def test_a_digest_is_of_files_in_the_order_of_the_parts_of_their_names(tmp_path: Path) -> None:
    """Digests that were accepted stay so."""
    for name in ("a/b.py", "a-b.py", "Z.txt", "a/b/c.txt", ".x/y", "__pycache__/z.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert list(public_files.list_files(tmp_path)) == ["Z.txt", "a/b/c.txt", "a/b.py", "a-b.py"]
    assert compute_digest(tmp_path) == "dcf6341e5fc8d90a7ed25293cf9c5d5ef7ad0354e8d357f41c913e0ebda0f4b2"


def test_callbacks_of_a_public_folder_are_refused(public: Path) -> None:
    """They would send what a run shows of the records of one party to wherever somebody else has named."""
    values = put(read_toml(public / "config.toml"), ("callbacks",), [{"name": "tensorboard"}])
    (public / "config.toml").write_text(tomli_w.dumps(values))
    with refused("deploy.public") as caught:
        Consortium.load(public)
    assert caught.value.field == "callbacks"
