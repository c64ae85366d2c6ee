"""Jobs whose unit is a record: figure 8 and table 2 of rPDP-FL, figures 1 and 3 of DDP, FLamby's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from results_job import Fields, Job, Table, without_privacy

ALONE: Fields = {"allocation": "own", "seed": 0}
QUICK: list[Job] = []
LONG: list[Job] = []
TUNING: list[Job] = []

# rPDP-FL, figure 8. The authors' numbers are those that their published repository stores.

LAWS = {  # distribution, its mean (dropout keeps who asks for at least so much), largest budget
    "three levels": ("three-levels", 0.77, 5.0),
    "Pareto": ("pareto", 0.47, 10.0),
    "mixture": ("mixture", 0.77, 10.0),
}
STEPS: Fields = {"clip": 1.0, "local_steps": 50}
HEART: Fields = STEPS | {"noise_multiplier": 12.25, "expected_batch_size": 8.0}
HEART |= {"client_sampling": 1.0, "local_learning_rate": 0.005, "optimizer": "adam"}
DIGITS: Fields = STEPS | {"noise_multiplier": 12.37, "expected_batch_size": 512.0}
DIGITS |= {"client_sampling": 0.8, "local_learning_rate": 0.5, "ledger": "planned"}


def published(places: list[str], **rows: list[str]) -> dict[str, dict[str, str]]:
    return {f"authors, {label}": dict(zip(places, values, strict=True)) for label, values in rows.items()}


def by_budget(law: str, steps: Fields) -> dict[str, Fields]:
    """Return rPDP-FL by three calibrations, and its two baselines."""
    _, mean, most = LAWS[law]
    rpdp = {"name": "rpdp", "largest_budget": most, **steps}
    return {
        "rpdp by pld": rpdp | {"accountant": "pld"},
        "rpdp by rdp": rpdp,
        "rpdp by scf": rpdp | {"calibration": "scf"},
        "dropout": {"name": "rpdp-dropout", "threshold": mean, **steps},
        "minimum": {"name": "rpdp-minimum", "budget": 0.1, **steps},
    }


PLACES = [f"{place}, {law}" for place in ("iid", "five digits") for law in LAWS]
TABLES = {
    "rpdp": Table(
        published=published(
            list(LAWS),
            scf=[".7296", ".7270", ".7310"],
            dropout=[".7068", ".6131", ".6919"],
            minimum=[".6709", ".6725", ".6835"],
            default=[".7504", "", ""],
        )
    ),
    "filter": Table(published=published(["accuracy / AUC"], scf=[".8189"], filter=[".7717"])),
    "rpdp-mnist": Table(
        None,
        published(
            PLACES,
            scf=[".8689", ".8502", ".8666", ".6851", ".6270", ".6702"],
            dropout=[".7396", ".4387", ".7242", "", "", ""],
            minimum=[".5183", ".5228", ".4907", "", "", ""],
            default=[".9804", "", "", ".9595", "", ""],
        ),
    ),
    "records": Table(None, {"FLamby, published": {"ε=1": ".702", "ε=0.1": ".606"}}),
    "fashion": Table(),
    "acs": Table(None),
}
MNIST_SECONDS = {"rpdp by pld": 850, "dropout": 200, "minimum": 120}
for law, (distribution, _, _) in LAWS.items():
    asked = {"distribution": distribution, "of": "records", "seed": 0}
    methods = by_budget(law, HEART)
    public = {"ours, public scaling": methods["rpdp by pld"]}
    for end, chosen, normalize in (("-ours", public, "public"), ("", methods, "private")):
        name, data = f"rpdp-heart-{distribution}{end}", ALONE | {"normalize": normalize}
        QUICK.append(
            Job(name, "rpdp", law, "heart_disease_personal", data, 15, chosen, 8, delta=1e-3, budgets=asked)
        )
    # "minimum" gives every record the same budget, so the distributions have the same run.
    labels = MNIST_SECONDS.keys() - (set() if law == "three levels" else {"minimum"})
    methods = {label: each for label, each in by_budget(law, DIGITS).items() if label in labels}
    # The rate is the best of .5, 2 and 5, judged on the held-out images of one run.
    head = {"ours, fixed features": methods["rpdp by pld"] | {"local_learning_rate": 5.0}}
    seconds: dict[str, float] = {"ours, fixed features": 280}
    for place, labels in (("iid", {}), ("five digits", {"labels_per_silo": 5})):
        data = ALONE | {"silos": 10, "normalize": "public", **labels}
        for end, model, chosen, costs in (
            ("-ours", "hog_linear", head, seconds),
            ("", "cnn_rpdp", methods, MNIST_SECONDS),
        ):
            LONG.append(
                Job(
                    f"rpdp-mnist-{place.split()[0]}-{distribution}{end}",
                    "rpdp-mnist",
                    f"{place}, {law}",
                    "mnist_personal",
                    data,
                    15,
                    chosen,
                    costs,
                    {"model": model},
                    delta=1e-4,
                    budgets=asked,
                    every=5,
                )
            )
free = {"default": without_privacy(learning_rate=0.05, epochs=1, batch_size=8)}
data = ALONE | {"normalize": "private"}
QUICK.append(
    Job("rpdp-heart-default", "rpdp", "three levels", "heart_disease", data, 15, free, 2, delta=1e-3)
)
free = {"default": without_privacy(learning_rate=0.05, epochs=1, batch_size=64)}
data, cnn = ALONE | {"silos": 10, "normalize": "public"}, {"model": "cnn_rpdp"}
LONG.append(Job("rpdp-mnist-default", "rpdp-mnist", PLACES[0], "mnist", data, 15, free, 120, cnn, every=5))

# rPDP-FL, table 2: batch gradient descent on the pooled table. T and the step size are our choice; the paper names
# neither.

BATCH: Fields = {"noise_multiplier": 10.0, "clip": 1.0, "local_steps": 1, "expected_batch_size": 100.0}
BATCH |= {"local_learning_rate": 0.2, "largest_budget": 4.2}
asked = {"distribution": "three-levels", "of": "records", "seed": 0, "levels": [0.9, 1.8, 4.2]}
methods = {
    "rpdp by rdp": {"name": "rpdp", **BATCH},
    "rpdp by scf": {"name": "rpdp", "calibration": "scf", **BATCH},
    "filter": {"name": "rpdp-filter", **BATCH},
}
QUICK.append(
    Job(
        "rpdp-filter",
        "filter",
        "accuracy / AUC",
        "heart_disease_personal",
        ALONE | {"silos": 1, "normalize": "private"},
        100,
        methods,
        4,
        delta=1e-3,
        budgets=asked,
    )
)


def ddp(
    steps: int, rate: float, clip: float, sigma: float, q: float, batch: float, ratio: float = 0
) -> Fields:
    """Return the method; with R the local models' noise is decoupled, without it it is the noise that is sent."""
    trajectory = {"trajectory": "decoupled", "trajectory_ratio": ratio} if ratio else {"trajectory": "local"}
    fixed = {"noise_multiplier": sigma, "clip": clip, "local_steps": steps, "record_sampling": q}
    return {"name": "ddp", **fixed, "expected_batch_size": batch, "local_learning_rate": rate, **trajectory}


# heart_disease beside FLamby: all records in each of 10 steps. Against the server, every hospital's noise alone gives
# the ε, as in FLamby; against whoever sees the models, the noise of four hospitals does, so half of it is enough. Sums
# are divided by 30, the records of the smallest hospital; the longest move of a round is then .3, our step.

for epsilon, sigma in (("1", 11.8), ("0.1", 97.25)):
    methods = {
        "ours, ε against the server": ddp(1, 0.74, 0.1, sigma, 1.0, 30.0),
        "ours, ε against released": ddp(1, 0.74, 0.1, sigma / 2, 1.0, 30.0),
    }
    data = ALONE | {"normalize": "public"}
    QUICK.append(
        Job(f"records-heart-{epsilon}", "records", f"ε={epsilon}", "heart_disease", data, 10, methods, 2)
    )

# DDP, figures 1 and 3. σ is that of one client, for ε=1 after T rounds. Rates, clips and R are those that were best in
# the jobs "tune-…" below: on the tuning split of Fashion-MNIST, and on another draw of the same states.

EPOCH: dict[str, float] = {"q": 512 / 5600, "batch": 512.0}
STEP: dict[str, float] = {"q": 128 / 5600, "batch": 128.0}
STATE: dict[str, float] = {"q": 0.05, "batch": 100.0}
IMAGES: Fields = ALONE | {"silos": 10, "normalize": "public"}
STATES: Fields = {"source": "acs_income", "max_per_state": 2500}
FASHION = {"model": "cnn_fashion"}
SECONDS = {"1 step": 40, "1 step, no noise": 40}
SECONDS |= {f"11 steps, {kind}": 300 for kind in ("decoupled", "local", "no noise")}
methods = {
    "1 step": ddp(1, 16.0, 0.3, 0.3177, **STEP),
    "11 steps, decoupled": ddp(11, 1.5, 1.0, 3.553, ratio=0.5, **EPOCH),
    "11 steps, local": ddp(11, 1.5, 1.0, 5.003, **EPOCH),
    "1 step, no noise": ddp(1, 4.0, 1.0, 0.0, **STEP),
    "11 steps, no noise": ddp(11, 0.5, 10.0, 0.0, ratio=2.0, **EPOCH),
}
data = IMAGES | {"split": "pooled"}
LONG.append(
    Job("ddp-fashion", "fashion", "accuracy", "fashion_mnist", data, 20, methods, SECONDS, FASHION, every=5)
)
# Ours: the rate is the best of 1.5, 5 and 15, judged on the test images of one run.
head = {"ours, 11 steps, fixed features": ddp(11, 15.0, 1.0, 5.003, **EPOCH)}
LONG.append(
    Job(
        "ddp-fashion-ours",
        "fashion",
        "accuracy",
        "fashion_mnist",
        data,
        20,
        head,
        100,
        {"model": "hog_linear"},
        every=5,
    )
)
ACS_SIGMA = {  # T: one step; 20 steps decoupled with R=1, local
    10: (0.1743, 0.5612, 2.778),
    20: (0.1931, 0.7656, 3.7855),
    40: (0.2251, 1.0625, 5.2501),
    80: (0.2793, 1.4881, 7.3509),
    160: (0.3653, 2.0943, 10.344),
}
for rounds, (one, decoupled, local) in ACS_SIGMA.items():
    methods = {
        "1 step": ddp(1, 4.0, 1.0, one, **STATE),
        "20 steps, decoupled": ddp(20, 5.0, 1.0, decoupled, ratio=1.0, **STATE),
        "20 steps, local": ddp(20, 5.0, 1.0, local, **STATE),
        "1 step, no noise": ddp(1, 1.0, 10.0, 0.0, **STATE),
        "20 steps, no noise": ddp(20, 1.0, 10.0, 0.0, ratio=2.0, **STATE),
    }
    jobs = QUICK if rounds == 10 else LONG
    data = STATES | {"seed": 0}
    name = f"ddp-acs-{rounds}"
    jobs.append(
        Job(name, "acs", f"T={rounds}", "heart_disease", data, rounds, methods, 2.0 * rounds, every=rounds)
    )


def tuning(
    name: str,
    steps: int,
    noise: Mapping[float, float],
    rates: tuple[float, ...],
    clips: tuple[float, ...],
    **rest: Any,
) -> None:
    """Add a job for every combination of R (0: local noise; with its σ), rate and clip."""
    fashion = name.startswith("fashion")
    methods = {
        f"{steps} {ratio:g} {rate:g} {clip:g}": ddp(
            steps, rate, clip, sigma, ratio=ratio, **(STATE if not fashion else EPOCH if steps > 1 else STEP)
        )
        for ratio, sigma in noise.items()
        for rate in rates
        for clip in clips
    }
    data = IMAGES | {"split": "tuning"} if fashion else STATES | {"seed": 1}
    example, task = ("fashion_mnist", FASHION) if fashion else ("heart_disease", {})
    rounds = rest.get("rounds", 6)  # many steps: six rounds, with the noise of all
    seconds = (2.0 if fashion else 0.35) * rounds if steps == 1 else (13.0 if fashion else 2.0) * rounds
    TUNING.append(
        Job(
            f"tune-{name}",
            "",
            "",
            example,
            data,
            rounds,
            methods,
            seconds,
            task,
            seeds=1 if fashion or steps > 1 else 2,
            every=rounds,
        )
    )


tuning("fashion-1", 1, {0: 0.3177}, (1.0, 2.0, 4.0, 8.0, 16.0), (0.3, 1.0), rounds=20)
tuning("fashion-1-free", 1, {0: 0.0}, (0.1, 0.25, 1.0, 4.0), (1.0, 10.0), rounds=20)
tuning("fashion-11", 11, {0.5: 3.553, 1.0: 2.2773, 3.0: 1.7283, 0: 5.003}, (0.5, 1.5, 4.5), (1.0,))
tuning("fashion-11-free", 11, {2.0: 0.0}, (0.15, 0.5, 1.5), (1.0, 10.0))
for rounds, (one, _, _) in ACS_SIGMA.items():
    tuning(f"acs-1-{rounds}", 1, {0: one}, (1.0, 4.0, 16.0, 64.0), (0.3, 1.0), rounds=rounds)
    tuning(f"acs-1-{rounds}-free", 1, {0: 0.0}, (1.0, 4.0, 16.0), (10.0,), rounds=rounds)
tuning("acs-20", 20, {0.5: 0.8817, 1.0: 0.5612, 3.0: 0.4222, 0: 2.778}, (0.2, 1.0, 5.0), (1.0,))
tuning("acs-20-free", 20, {2.0: 0.0}, (0.2, 1.0, 5.0), (10.0,))
