import hashlib
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from silodp.data import Dataset, Origin
from silodp.data.catalog import DATASETS
from silodp.errors import SilodpError
from silodp_experiments import fetch as fetching
from silodp_experiments.fetch import check, fetch, list_datasets
from support.refusals import refused

CONTENT = b"1,2,3\n" * 1000
ORIGINS = {name: dataset.origin for name, dataset in DATASETS.items() if dataset.origin is not None}


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def origin(tmp_path, monkeypatch):
    """A data set of one file, served on this machine; yields (address, served folder)."""
    served = tmp_path / "served"
    served.mkdir()
    (served / "table.csv").write_bytes(CONTENT)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(served)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/table.csv"
    digest = hashlib.sha256(CONTENT).hexdigest()
    origin = Origin(1000, "none", "here", {"table.csv": digest}, {"table.csv": (address,)})
    dataset = Dataset(name="toy", loader=lambda root: None, silos=("a",), origin=origin)
    monkeypatch.setitem(globals(), "TOY", dataset)
    monkeypatch.setitem(DATASETS._core, "toy", f"{__name__}:TOY")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield address, served
    server.shutdown()
    server.server_close()


def test_fetch_writes_and_keeps(origin, tmp_path):
    _, served = origin
    (path,) = fetch("toy", tmp_path / "data")
    assert path == tmp_path / "data" / "toy" / "table.csv"
    assert path.read_bytes() == CONTENT
    (served / "table.csv").unlink()
    assert fetch("toy", tmp_path / "data") == [path]  # no second download


def test_fetch_takes_the_next_address(origin, tmp_path):
    address, _ = origin
    (path,) = fetch("toy", tmp_path, {"table.csv": (address + ".gone", address)})
    assert path.read_bytes() == CONTENT


def test_fetch_from_a_file_address(origin, tmp_path):
    _, served = origin
    (path,) = fetch("toy", tmp_path, {"table.csv": ((served / "table.csv").as_uri(),)})
    assert path.read_bytes() == CONTENT


def test_other_bytes_are_refused_and_nothing_stays(origin, tmp_path):
    _, served = origin
    (served / "table.csv").write_bytes(CONTENT[:-1])
    with pytest.raises(SilodpError, match=r"table\.csv could not be fetched: .* has another SHA-256"):
        fetch("toy", tmp_path / "data")
    assert list((tmp_path / "data" / "toy").iterdir()) == []


def test_a_damaged_file_is_replaced(origin, tmp_path):
    damaged = tmp_path / "toy" / "table.csv"
    damaged.parent.mkdir()
    damaged.write_bytes(b"half")
    fetch("toy", tmp_path)
    assert damaged.read_bytes() == CONTENT


def test_offline_is_one_sentence(origin, tmp_path):
    with pytest.raises(SilodpError, match="does not answer") as caught:
        fetch("toy", tmp_path, {"table.csv": ("http://127.0.0.1:9/table.csv",)})
    assert "\n" not in str(caught.value)
    assert "check the connection" in str(caught.value)
    assert list((tmp_path / "toy").iterdir()) == []


def test_unwritable_destination(tmp_path, origin):
    (tmp_path / "toy").write_text("a file where the folder should be")
    with pytest.raises(SilodpError, match="name another destination"):
        fetch("toy", tmp_path)


@pytest.mark.parametrize(("name", "what"), [("creditcard", "Kaggle"), ("acs_income", "folktables")])
def test_manual_origins_say_what_to_do(tmp_path, name, what):
    with pytest.raises(SilodpError, match=f"{name} cannot be fetched into .*{what}"):
        fetch(name, tmp_path)


def test_the_manual_alternative_counts_as_fetched(tmp_path):
    table = tmp_path / "creditcard" / "creditcard.csv"
    table.parent.mkdir()
    table.touch()
    assert fetch("creditcard", tmp_path) == [table]
    assert {listing.name: listing.present for listing in list_datasets(tmp_path)}["creditcard"]


@pytest.mark.parametrize("call", [fetch, check])
def test_unknown_names(tmp_path, call):
    with refused("argument.value"):
        call("titanic", tmp_path)


@pytest.mark.parametrize("call", [fetch, check])
def test_tables_are_not_published(tmp_path, call):
    with refused("argument.value"):
        call("tables", tmp_path)


def test_every_loader_is_described_and_fetchable_or_explained():
    assert {name for name, dataset in DATASETS.items() if dataset.origin is None} == {"tables"}
    for origin in ORIGINS.values():
        assert origin.manual or set(origin.urls) == set(origin.files)


def test_pinned_hashes_are_those_of_the_shared_data(data):
    lines = (data / "SHA256SUMS").read_text().splitlines()
    published = {line.split()[1].removeprefix("./"): line.split()[0] for line in lines}
    for name, origin in ORIGINS.items():
        for file, digest in origin.files.items():
            assert published[f"{name}/{file}"] == digest


@pytest.mark.parametrize("name", ["heart_disease", "tcga_brca", "creditcard", "embedded"])
def test_check_of_the_shared_data(data, name):
    assert check(name, data).ok


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "acs_income"])
def test_check_of_the_large_shared_data(data, name):
    assert check(name, data).ok


def test_check_tells_missing_from_different(data, tmp_path):
    folder = tmp_path / "heart_disease"
    folder.mkdir()
    for file in ORIGINS["heart_disease"].files:
        (folder / file).write_bytes((data / "heart_disease" / file).read_bytes())
    assert check("heart_disease", tmp_path).ok
    with (folder / "processed.va.data").open("a") as file:
        file.write("60,1,4,130,250,0,0,120,0,1,?,?,?,1\n")
    found = check("heart_disease", tmp_path)
    assert [file.state for file in found.files] == ["ok", "ok", "ok", "differs"]
    assert (found.rows, found.ok) == (741, False)
    (folder / "processed.va.data").unlink()
    found = check("heart_disease", tmp_path)
    assert found.files[3].state == "missing"
    assert (found.rows, found.ok) == (None, False)


def test_list_without_any_data(monkeypatch, tmp_path):
    monkeypatch.setenv("SILODP_DATA", str(tmp_path / "nowhere"))
    listed = {listing.name: listing for listing in list_datasets()}
    assert sorted(name for name, listing in listed.items() if listing.present) == [
        "digit_masks",
        "digit_volumes",
        "docstrings",
        "embedded",
    ]
    assert listed["mnist"].rows == 70_000
    assert fetching.TIMEOUT > 0
