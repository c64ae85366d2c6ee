import gzip

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from silodp.data.catalog import DATASETS
from silodp.errors import SilodpError
from silodp_experiments import benchmarks
from silodp_experiments.benchmarks import data_root
from silodp_experiments.benchmarks.health import HEART_COLUMNS, TCGA_REGIONS
from silodp_experiments.benchmarks.images import read_idx
from support.refusals import refused

LOADERS = {name: dataset.loader for name, dataset in DATASETS.items() if dataset.is_published}


def sizes(federation):
    return [len(silo) for silo in federation.silos]


PACKAGED = ("embedded", "digit_masks", "digit_volumes", "docstrings")
"""Data sets that scikit-learn or Python ships."""


def test_embedded_needs_no_files_and_estimates_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("SILODP_DATA", str(tmp_path))
    built = LOADERS["embedded"]()
    assert sum(sizes(built)) == 455
    assert len(built.test) == 114
    assert built.users == 100
    assert built.assumptions == ()
    assert built.silos[0].x.dtype == np.float32
    positives = sum(int(silo.y.sum()) for silo in built.silos)
    assert positives + int(built.test.y.sum()) == 212  # malignant
    assert int(built.test.y.sum()) == 42
    pooled = np.concatenate([silo.x for silo in built.silos])
    assert np.abs(pooled).max() <= 1
    at_the_ends = np.mean(np.abs(pooled) == 1, axis=0)
    assert at_the_ends.max() < 0.06  # the declared ranges hold nearly all values
    assert pooled.std(axis=0).min() > 0.1  # and are not so wide that nothing is left
    assert built.digest() == LOADERS["embedded"]().digest() != LOADERS["embedded"](seed=1).digest()


def test_heart_disease_is_flambys(data):
    built = benchmarks.heart_disease(data)
    assert [silo.name for silo in built.silos] == ["cleveland", "hungarian", "switzerland", "va"]
    assert sizes(built) == [199, 172, 30, 85]
    assert len(built.test) == 104 + 89 + 16 + 45
    assert [int(silo.y.sum()) for silo in built.silos] == [91, 65, 30, 66]
    assert built.silos[0].x.shape == (199, 13)
    assert len(built.assumptions) == 1
    for silo in built.silos:
        varying = silo.x.std(axis=0) > 0
        np.testing.assert_allclose(silo.x.mean(axis=0), 0, atol=1e-5)
        np.testing.assert_allclose(silo.x[:, varying].std(axis=0, ddof=1), 1, atol=1e-5)
    cholesterol = built.features.index("chol")
    assert (built.silos[2].x[:, cholesterol] == 0).all()


def test_heart_disease_public_constants_show_the_same_rows(data):
    built = benchmarks.heart_disease(data, normalize="public")
    assert built.assumptions == ()
    for i, column in enumerate(HEART_COLUMNS.values()):
        scaled = np.concatenate([silo.x[:, i] for silo in (*built.silos, built.test)])
        low, high = column.scale(np.array(column.range))
        assert low <= scaled.min() <= scaled.max() <= high
        # Written down from textbooks, so not exact, but what is typical of these patients.
        assert column.typical is None or (abs(scaled.mean()) < 1 and 0.5 < scaled.std() < 2)
    ages = [silo.x[:, 0].astype(float).mean() * 10 + 55 for silo in built.silos]
    np.testing.assert_allclose(ages, [54.1759, 47.5, 57.0667, 59.6706], atol=1e-4)
    private = benchmarks.heart_disease(data)
    np.testing.assert_array_equal(private.counts(), built.counts())


def test_public_constants_of_heart_disease_train_a_better_model(data):
    """Scaling by each hospital's private statistics removes the differences between the hospitals."""

    def train(normalize):
        built = benchmarks.heart_disease(data, normalize=normalize)
        x, y = (np.concatenate([getattr(silo, part) for silo in built.silos]) for part in ("x", "y"))
        model = LogisticRegression().fit(x, y)
        return roc_auc_score(built.test.y, model.predict_proba(built.test.x)[:, 1])

    assert train("public") > 0.87 > 0.81 > train("private")


def test_tcga_brca(data):
    built = benchmarks.tcga_brca(data)
    assert [silo.name for silo in built.silos] == list(TCGA_REGIONS)
    assert sizes(built) == [248, 156, 164, 129, 129, 40]
    assert len(built.test) == 222
    assert [int(silo.y[:, 0].sum()) for silo in built.silos] == [45, 35, 14, 16, 7, 2]
    assert built.silos[0].x.shape == (248, 39)
    assert built.classes is None
    assert built.assumptions == ()
    assert not (built.counts() == 1).any()  # Cox needs two
    times = np.concatenate([silo.y[:, 1] for silo in (*built.silos, built.test)])
    assert times.max() == 8605
    public = benchmarks.tcga_brca(data, normalize="public")
    assert np.abs(public.silos[0].x).max() <= 1


def test_creditcard(data):
    built = benchmarks.creditcard(data, users=1000)
    assert sum(sizes(built)) == 25_282
    assert len(built.silos) == 5
    assert sum(int(silo.y.sum()) for silo in built.silos) == 418
    assert (len(built.test), int(built.test.y.sum())) == (4_462, 74)
    pooled = np.concatenate([silo.x for silo in built.silos])
    assert pooled.shape == (25_282, 30)
    np.testing.assert_allclose(pooled.astype(float).mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(pooled.astype(float).std(axis=0), 1, atol=1e-4)
    assert len(built.assumptions) == 1
    public = benchmarks.creditcard(data, silos=20, normalize="public")
    assert len(public.silos) == 20
    assert public.assumptions == ()
    assert max(np.abs(silo.x).max() for silo in public.silos) <= 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_images(data, name):
    built = LOADERS[name](data, labels_per_user=2, normalize="public")
    assert sum(sizes(built)) == 60_000
    assert built.test.x.shape == (10_000, 1, 28, 28)
    assert built.classes == 10
    assert built.assumptions == ()
    assert (built.test.x.min(), built.test.x.max()) == pytest.approx((-1, 1))
    user, label = (np.concatenate([getattr(silo, part) for silo in built.silos]) for part in ("user", "y"))
    assert max(len(np.unique(label[user == u])) for u in range(built.users)) <= 2


@pytest.mark.slow
def test_mnist_normalization(data):
    built = benchmarks.mnist(data)
    pixels = np.concatenate([silo.x.reshape(len(silo), -1) for silo in built.silos])
    assert pixels.mean(dtype=float) == pytest.approx(0, abs=2e-3)
    assert pixels.std(dtype=float) == pytest.approx(1, abs=2e-3)
    assert len(built.assumptions) == 1


def test_acs_income_sample(data):
    built = benchmarks.acs_income(data, max_per_state=100)
    assert len(built.silos) == 50
    assert "CA" not in {silo.name for silo in built.silos}
    assert "PR" in {silo.name for silo in built.silos}
    assert sizes(built) == [80] * 50
    assert len(built.test) == 1000
    assert built.users == 4000
    assert (built.counts().sum(axis=0) == 1).all()
    x = built.silos[0].x
    assert x.shape == (80, 47)
    np.testing.assert_array_equal(x[:, 5:].sum(axis=1), 5)
    assert np.abs(x).max() <= 1
    typical = benchmarks.acs_income(data, max_per_state=100, normalize="public").silos[0].x
    np.testing.assert_array_equal(typical[:, [1, 2, 3, *range(5, 47)]], x[:, [1, 2, 3, *range(5, 47)]])
    np.testing.assert_allclose(typical[:, 0] * 15 + 45, (x[:, 0] + 1) / 2 * 99, atol=1e-4)
    np.testing.assert_allclose(typical[:, 4] * 10 + 40, (x[:, 4] + 1) / 2 * 98 + 1, atol=1e-4)


@pytest.mark.slow
def test_acs_income_whole(data):
    built = benchmarks.acs_income(data)
    assert sum(sizes(built)) + len(built.test) == 1_402_639
    states = pd.read_csv(data / "acs_income" / "state_counts.csv").set_index("state")["rows"]
    for silo in built.silos:
        assert len(silo) == pytest.approx(0.8 * states[silo.name], abs=1)


@pytest.mark.parametrize("name", [name for name in LOADERS if name not in ("acs_income", *PACKAGED)])
def test_wrong_options_are_refused(data, name):
    for field, value in (("normalize", "zscore"), ("allocation", "pareto")):
        with refused("argument.value") as caught:
            LOADERS[name](data, **{field: value})
        assert caught.value.field == field


@pytest.mark.parametrize("name", [name for name in LOADERS if name not in PACKAGED])
def test_missing_files_say_how_to_get_them(tmp_path, name):
    with pytest.raises(SilodpError, match=f"is missing; get it with `silodp data fetch {name}`"):
        LOADERS[name](tmp_path)


def test_the_folder_of_one_data_set_is_told_from_that_of_all(monkeypatch, tmp_path):
    folder = tmp_path / "tcga_brca"
    folder.mkdir()
    (folder / "centers.csv").touch()
    monkeypatch.setenv("SILODP_DATA", str(folder))
    (tmp_path / "mnist").mkdir()
    for root, field in ((None, "SILODP_DATA"), (folder, "root"), (tmp_path / "mnist", "root")):
        with refused("data.no_dataset") as caught:
            LOADERS["tcga_brca"](root)
        assert caught.value.field == field
        assert str(caught.value).endswith(f"name {tmp_path}")
    loose = tmp_path / "loose" / "data"
    loose.mkdir(parents=True)
    (loose / "centers.csv").touch()
    with refused("data.no_dataset") as caught:
        LOADERS["tcga_brca"](loose)


def test_data_root(monkeypatch, tmp_path):
    (tmp_path / "shared" / "data").mkdir(parents=True)
    (tmp_path / "checkout" / "deep").mkdir(parents=True)
    monkeypatch.delenv("SILODP_DATA", raising=False)
    monkeypatch.chdir(tmp_path / "checkout" / "deep")
    assert data_root() == tmp_path / "shared" / "data"
    monkeypatch.setenv("SILODP_DATA", str(tmp_path))
    assert data_root() == tmp_path
    assert data_root(tmp_path / "checkout") == tmp_path / "checkout"
    with pytest.raises(SilodpError, match=r"root is .*nowhere"):
        data_root(tmp_path / "nowhere")
    monkeypatch.setenv("SILODP_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(SilodpError, match=r"SILODP_DATA is .*nowhere.*silodp data fetch"):
        data_root()


def test_creditcard_from_the_full_table(tmp_path):
    folder = tmp_path / "creditcard"
    folder.mkdir()
    rows = 40_000
    table = pd.DataFrame({f"c{i}": np.arange(rows) % (i + 2) for i in range(30)})
    table["Class"] = (np.arange(rows) < 492).astype(int)
    table.to_csv(folder / "creditcard.csv", index=False)
    built = benchmarks.creditcard(tmp_path)
    assert (sum(sizes(built)), len(built.test)) == (25_282, 4_462)
    assert sum(int(silo.y.sum()) for silo in built.silos) == 418


@pytest.mark.parametrize(
    "content",
    [
        b"not gzip",
        gzip.compress(b"", mtime=0),
        gzip.compress(b"\0\0\x0d\1\0\0\0\1\0", mtime=0),
        gzip.compress(b"\0\0\x08\1\0\0\0\5ab", mtime=0),
        gzip.compress(b"\0\0\x08\1\0\0\0\5abcde", mtime=0)[:-9],
    ],
)
def test_broken_idx_files(tmp_path, content):
    path = tmp_path / "broken.gz"
    path.write_bytes(content)
    with pytest.raises(SilodpError, match=r"broken\.gz is not a whole idx file"):
        read_idx(path)


def test_idx(tmp_path):
    path = tmp_path / "whole.gz"
    path.write_bytes(gzip.compress(b"\0\0\x08\2\0\0\0\2\0\0\0\3abcdef", mtime=0))
    np.testing.assert_array_equal(read_idx(path), [[97, 98, 99], [100, 101, 102]])


@pytest.mark.slow
def test_pooled_and_tuning_splits_of_images_do_not_overlap(data):
    pooled = benchmarks.fashion_mnist(data, silos=10, allocation="own", split="pooled")
    tuning = benchmarks.fashion_mnist(data, silos=10, allocation="own", split="tuning")
    assert (pooled.users, len(pooled.test)) == (56_000, 14_000)
    assert (tuning.users, len(tuning.test)) == (39_200, 16_800)
    assert sizes(tuning) == [3_920] * 10
    first = {row.tobytes() for row in pooled.test.x[:500]}
    assert not any(row.tobytes() in first for row in tuning.test.x), "tuning never sees the final test data"
    with refused("argument.value"):
        benchmarks.fashion_mnist(data, split="half")


def test_every_record_of_heart_disease_may_be_a_person(data):
    built = benchmarks.heart_disease(data, allocation="own")
    assert built.users == 486
    assert (built.counts().sum(axis=0) == 1).all()


def test_heart_disease_may_be_pooled(data):
    pooled, apart = benchmarks.heart_disease(data, silos=1, allocation="own"), benchmarks.heart_disease(data)
    assert sizes(pooled) == [486]
    np.testing.assert_array_equal(pooled.silos[0].x, np.concatenate([silo.x for silo in apart.silos]))
    with refused("argument.value"):
        benchmarks.heart_disease(data, silos=3)


@pytest.mark.parametrize("name", ["digit_masks", "digit_volumes"])
def test_masks_are_drawn_from_the_seed_and_need_no_files(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    built = LOADERS[name](users=30, silos=3, seed=4)
    assert built.digest() == LOADERS[name](users=30, silos=3, seed=4).digest() != LOADERS[name]().digest()
    x, y = (np.concatenate([getattr(silo, field) for silo in built.silos]) for field in "xy")
    assert (len(x), len(built.test)) == (1438, 359)
    # The bar is bright, the digit brighter than what is behind it, and both are in every image.
    of_class = [x[:, 0][y == number].mean() for number in range(3)]
    assert of_class[0] < -0.5 < 0 < of_class[1]
    assert of_class[2] == pytest.approx(0.6, abs=0.05)
    assert all((y == number).reshape(len(y), -1).any(1).mean() > 0.99 for number in (1, 2))
    for wrong in ({"allocation": "pareto"}, {"seed": -1}):
        with refused("argument.value"):
            LOADERS[name](**wrong)
