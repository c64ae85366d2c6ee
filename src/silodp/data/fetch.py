"""Download the benchmark data from where it is published, and check what is there.

Nothing is trusted that does not have the pinned SHA-256; nothing is left behind that does not have it.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import tempfile
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from silodp.data.benchmarks import LOADERS, data_root
from silodp.errors import SilodpError

TIMEOUT = 60.0  # seconds without a byte


@dataclass(frozen=True)
class Dataset:
    """A published data set: where its files are, under which license, and what they must hash to.

    Attributes:
        rows: records after loading, training and test together.
        files: file name → SHA-256 (hex).
        urls: file name → the addresses to try in turn; empty where the origin asks for a login or for
        processing. manual: what to do where `urls` is empty. alternative: a file that may stand in for all
        `files`, as the origin gives it out.
    """

    name: str
    rows: int
    license: str
    origin: str
    files: Mapping[str, str]
    urls: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    manual: str | None = None
    alternative: str | None = None


def _at(folders: tuple[str, ...], files: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {file: tuple(folder + file for folder in folders) for file in files}


_HEART = {
    "processed.cleveland.data": "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
    "processed.hungarian.data": "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796",
    "processed.switzerland.data": "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314",
    "processed.va.data": "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f",
}
_TCGA = {
    "brca.csv": "07cb53423f7d579d33cfdbf2cba57b2aee75318b85866c68ce39a75b1f1ba020",
    "centers.csv": "d610df2dae0203ea229c9579747ed3eb8d28e137c5378f55acc6fe6b4632bb1d",
    "train_test_split.csv": "1249c6543a4060ff0fdaf8510fc37017755836db6c9fc5e6af96057c36510990",
}
_MNIST = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
_FASHION = {
    "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
}
_FLAMBY = "https://raw.githubusercontent.com/owkin/FLamby/main/flamby/datasets/fed_tcga_brca/"

DATASETS: dict[str, Dataset] = {
    dataset.name: dataset
    for dataset in (
        Dataset(
            "heart_disease",
            740,
            "CC BY 4.0",
            "UCI Machine Learning Repository, id 45",
            _HEART,
            _at(("https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/",), _HEART),
        ),
        Dataset(
            "tcga_brca",
            1088,
            "TCGA open-access clinical data; re-identification is forbidden",
            "FLamby, fed_tcga_brca",
            _TCGA,
            {
                "brca.csv": (_FLAMBY + "brca.csv",),
                "centers.csv": (_FLAMBY + "centers.csv",),
                "train_test_split.csv": (_FLAMBY + "dataset_creation_scripts/train_test_split.csv",),
            },
        ),
        Dataset(
            "creditcard",
            29_744,
            "DbCL 1.0",
            "Kaggle, mlg-ulb/creditcardfraud",
            {
                "creditcard_subset.parquet": (
                    "0e89911862ebf0efae054656a2b2b1d972fee42d8506b1665bc608f720b8ef0c"
                ),
            },
            manual="Kaggle asks for a login: download creditcard.csv from "
            "https://www.kaggle.com/datasets/mlg-ulb/creditcardfraud and put it there",
            alternative="creditcard.csv",
        ),
        Dataset(
            "mnist",
            70_000,
            "CC BY-SA 3.0, as usually stated",
            "LeCun, Cortes and Burges",
            _MNIST,
            _at(
                (
                    "https://ossci-datasets.s3.amazonaws.com/mnist/",
                    "https://storage.googleapis.com/cvdf-datasets/mnist/",
                ),
                _MNIST,
            ),
        ),
        Dataset(
            "fashion_mnist",
            70_000,
            "MIT",
            "Zalando Research",
            _FASHION,
            _at(
                (
                    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
                    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
                ),
                _FASHION,
            ),
        ),
        Dataset(
            "acs_income",
            1_402_639,
            "US Census PUMS, public use",
            "folktables, ACSIncome 2018",
            {
                "acs_income_2018_50.parquet": (
                    "707a8c33ac7c38b5286de4f7ca4bf6160a2157b101a1b4961117ddeeccc986f0"
                ),
                "state_counts.csv": "b438f9ee467053fe48aaf8efc97e249c51fbd0ea983fd5a6e4d02ea77fe29a0a",
            },
            manual="the table is recoded from the Census: download ACSIncome 2018 (1-Year, person) with "
            "folktables, keep AGEP, COW, SCHL, OCCP, POBP, RELP, WKHP and SEX, recode MAR to MAR2 "
            "(1 married, 2 else) and RAC1P to RAC1P5 (1 white, 2 Black, 3 Asian, 4 native, 5 other), add "
            "PINCP_gt_50k (bool) and ST (FIPS), and write them there as acs_income_2018_50.parquet, with "
            "state_counts.csv holding columns state and fips",
        ),
        Dataset(
            "embedded", 569, "BSD 3-clause (scikit-learn)", "Wisconsin breast cancer, in scikit-learn", {}
        ),
    )
}


@dataclass(frozen=True)
class FileCheck:
    """One file: `state` is "ok", "missing" or "differs" (another SHA-256 than the pinned one)."""

    path: Path
    state: str


@dataclass(frozen=True)
class Check:
    """What `check` found. `rows` counts the records of a load (None where files are missing)."""

    name: str
    files: tuple[FileCheck, ...]
    rows: int | None
    expected_rows: int

    @property
    def ok(self) -> bool:
        """All files there and byte-identical, and the row count as published."""
        return self.rows == self.expected_rows and all(file.state == "ok" for file in self.files)


def _dataset(name: str) -> Dataset:
    if name not in DATASETS:
        raise SilodpError(
            f"data set {name!r} is not known; choose one of {', '.join(DATASETS)}",
            code="argument.value",
            field="name",
        )
    return DATASETS[name]


def fetch(
    name: str, destination: str | Path, origins: Mapping[str, tuple[str, ...]] | None = None
) -> list[Path]:
    """Download a data set into `destination`/`name`/; files already there and right are kept.

    Args:
        name: of a data set in `DATASETS`.
        destination: the folder of all data sets (what SILODP_DATA names); made when missing.
        origins: file name → addresses, instead of the published ones (a mirror of yours).

    Returns:
        The paths of the files, all with the pinned SHA-256 (or of the alternative, if it is there).

    Raises:
        SilodpError: an unknown name, an origin that asks for manual steps (the sentence says which), no
            connection, or other bytes than the pinned ones (no part of such a file stays behind).
    """
    dataset = _dataset(name)
    folder = Path(destination).expanduser() / name
    urls = dataset.urls if origins is None else origins
    if dataset.alternative and (folder / dataset.alternative).is_file():
        return [folder / dataset.alternative]
    paths = []
    for file, digest in dataset.files.items():
        path = folder / file
        if not (path.is_file() and _sha256(path) == digest):
            if not urls.get(file):
                raise SilodpError(
                    f"{name} cannot be fetched into {folder}: {dataset.manual}", code="data.fetch"
                )
            _download(urls[file], path, digest)
        paths.append(path)
    return paths


def _download(urls: tuple[str, ...], path: Path, digest: str) -> None:
    """The first of `urls` that yields the right bytes, written to `path` in one rename."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SilodpError(
            f"{path.parent} cannot be made ({error}); name another destination", code="data.fetch"
        ) from error
    failures = []
    for url in urls:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        part = Path(name)
        try:
            hasher = hashlib.sha256()
            with (
                os.fdopen(descriptor, "wb") as target,
                urllib.request.urlopen(url, timeout=TIMEOUT) as source,
            ):
                while block := source.read(1 << 20):
                    hasher.update(block)
                    target.write(block)
            if hasher.hexdigest() == digest:
                part.chmod(0o644)  # mkstemp's 0600 would hide a shared folder's data from others
                part.replace(path)
                return
            failures.append(f"{url} has SHA-256 {hasher.hexdigest()[:12]}…, not {digest[:12]}…")
        except (OSError, http.client.HTTPException) as error:
            failures.append(f"{urlsplit(url).netloc or url} does not answer ({error})")
        finally:
            part.unlink(missing_ok=True)
    raise SilodpError(
        f"{path.name} could not be fetched: {'; '.join(failures)}; check the connection and try again, or "
        "copy "
        f"the published file to {path}",
        code="data.fetch",
    )


def check(name: str, root: str | Path | None = None) -> Check:
    """Hash the files of a data set under `root` (see `benchmarks.data_root`) and count the rows it loads.

    Raises:
        SilodpError: an unknown name, no folder of data sets, or files that do not load.
    """
    dataset = _dataset(name)
    files = []
    if dataset.files:
        folder = data_root(root) / name
        for file, digest in dataset.files.items():
            path = folder / file
            state = "missing" if not path.is_file() else "ok" if _sha256(path) == digest else "differs"
            files.append(FileCheck(path, state))
        substitute = folder / dataset.alternative if dataset.alternative else None
        if substitute is not None and substitute.is_file() and files[0].state == "missing":
            files = [FileCheck(substitute, "differs")]  # other rows than the pinned file's, so never "ok"
    rows = None
    if not any(file.state == "missing" for file in files):
        federation = LOADERS[name]() if name == "embedded" else LOADERS[name](root=root)
        held = 0 if federation.test is None else len(federation.test)
        rows = sum(len(silo) for silo in federation.silos) + held
    return Check(name, tuple(files), rows, dataset.rows)


@dataclass(frozen=True)
class Listing:
    """One line of `list_datasets`."""

    name: str
    rows: int
    license: str
    origin: str
    present: bool


def list_datasets(root: str | Path | None = None) -> list[Listing]:
    """Every data set, and whether its files are under `root` (False for all where there is no such
    folder)."""
    try:
        folder: Path | None = data_root(root)
    except SilodpError:
        folder = None
    listings = []
    for dataset in DATASETS.values():
        present = not dataset.files
        if folder is not None and not present:
            here = folder / dataset.name
            present = all((here / file).is_file() for file in dataset.files)
            if dataset.alternative:
                present = present or (here / dataset.alternative).is_file()
        listings.append(Listing(dataset.name, dataset.rows, dataset.license, dataset.origin, present))
    return listings


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
