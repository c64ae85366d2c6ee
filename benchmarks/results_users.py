"""Jobs whose unit is a person: figures 4 to 9 of ULDP-FL, and our best settings at the same ε beside them."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

from results_job import Fields, Job, Table, clipped, stepped, without_privacy

TABLES = {
    "heart": Table(),
    "tcga": Table(),
    "tcga-single": Table(),
    "creditcard": Table(
        10,
        {
            "authors' code, sgd": {"U=100": ".873 / .153"},
            "authors' code, avg": {"U=100": ".896 → .918 / .830"},
            "authors' code, avg records": {"U=100": ".916 → .922 / .849"},
            "authors' code, default": {"U=100": ".950 / .869"},
        },
    ),
    "creditcard-long": Table(20),
    "sgd": Table(10),
    "weighting": Table(),
    "sampling": Table(),
    "mnist": Table(),
    "mnist-printed": Table(20),
}
QUICK: list[Job] = []
LONG: list[Job] = []
PRINTED: list[Job] = []

# σ of our rows: T=10 rounds with everyone in each, δ=1e-5. From 3.85 on 5·√(10/T), whose total noise is that of the
# paper's σ=5 over T=20, 50 and 100 rounds, so ε is the same.
SIGMA = {"1": 11.8, "3": 4.398, "3.85": 3.5356, "6.58": 2.2361, "10.0": 1.5812}


def ours(step: float, weighting: str, *epsilons: str, rounds: int = 10) -> dict[str, Fields]:
    """Return our methods; σ of other rounds is that of the same ε, rounded up such that ε is not larger."""
    grown = {epsilon: round(1e4 * SIGMA[epsilon] * (rounds / 10) ** 0.5, 6) for epsilon in epsilons}
    return {
        f"ours, ε={epsilon}": stepped(step, math.ceil(grown[epsilon]) / 1e4, weighting)
        for epsilon in epsilons
    }


def untuned(*epsilons: str) -> dict[str, Fields]:
    """Return our method where nobody said how far it moves, with σ of the same ε for 40 rounds."""
    sigma = {epsilon: math.ceil(round(1e4 * 2 * SIGMA[epsilon], 6)) / 1e4 for epsilon in epsilons}
    return {
        f"ours, default, ε={epsilon}": {"name": "uldp-sgd", "noise_multiplier": each, "weighting": "records"}
        for epsilon, each in sigma.items()
    }


def per_person(rate: float, **local: Any) -> dict[str, Fields]:
    """Return the paper's three methods that clip per person; `local` is their training."""
    return {
        "sgd": clipped("uldp-sgd", rate, weighting="uniform"),
        "avg": clipped("uldp-avg", rate, weighting="uniform", local=local),
        "avg records": clipped("uldp-avg", rate, weighting="records", local=local),
    }


def whole_silos(**local: Any) -> dict[str, Fields]:
    """Return the two methods that train on whole silos, whoever is in them."""
    return {"naive": clipped("uldp-naive", 1, local=local), "default": without_privacy(**local)}


def group(size: int, q: float, steps: int, batch: float, rate: float) -> Fields:
    fixed = {"record_sampling": q, "local_steps": steps, "expected_batch_size": batch}
    return clipped("uldp-group", 1, group_size=size, **fixed, local_learning_rate=rate)


def by_hazard(years: int) -> Fields:
    """Return the task with the loss that learns from single records; times of tcga_brca are days."""
    return {"loss": "exponential_survival", "loss_options": {"typical_time": 365.0 * years}}


# Figures 6 and 7. GROUP-max leaves out no record: four times the most that one hospital has of one person, read off the
# data. Naive and default do not depend on the allocation: once is enough.

GROUP_MAX = {(50, "zipf"): 124, (50, "uniform"): 32, (200, "zipf"): 60, (200, "uniform"): 20}
HEART_LOCAL = {"learning_rate": 0.001, "epochs": 50, "batch_size": 4}
TCGA_LOCAL = {"learning_rate": 0.001, "epochs": 50, "batch_size": 8}
HEART_SECONDS = {"sgd": 3, "avg": 12, "avg records": 12, "group k=2": 15, "group k=8": 20, "group max": 20}
for (users, allocation), largest in GROUP_MAX.items():
    place, end = f"U={users} {allocation}", f"{users}-{allocation}"
    where: Fields = {"users": users, "allocation": allocation, "seed": 0}
    heart, tcga = per_person(10, **HEART_LOCAL), per_person(10, **TCGA_LOCAL)
    for label, size in (("k=2", 2), ("k=8", 8), ("max", largest)):
        heart[f"group {label}"] = group(size, 0.05, 50, 6.0, 0.05)
    private, public = where | {"normalize": "private"}, where | {"normalize": "public"}
    far = ours(1.0, "records", "6.58", "3", "1")
    named = far if users == 50 else ours(3.0, "records", "6.58", "3", "1", rounds=20)
    exponential = {label.replace("ours", "ours, exponential"): each for label, each in named.items()}
    longer = 10 if users == 50 else 20
    # With much noise a smaller step.
    best = far | ours(0.3, "records", "1") if users == 50 else far
    default = untuned("6.58", "3", "1")
    QUICK += [
        Job(f"heart-{end}-ours", "heart", place, "heart_disease", public, 10, best, 2),
        Job(f"tcga-{end}-ours", "tcga", place, "tcga_brca", public, 10, far, 2),
        Job(f"heart-{end}-default", "heart", place, "heart_disease", public, 40, default, 2),
        Job(f"tcga-{end}-default", "tcga", place, "tcga_brca", public, 40, default, 2),
        Job(
            f"tcga-{end}-exponential",
            "tcga",
            place,
            "tcga_brca",
            public,
            longer,
            exponential,
            2,
            by_hazard(10),
        ),
        Job(f"heart-{end}", "heart", place, "heart_disease", private, 50, heart, HEART_SECONDS),
        Job(f"tcga-{end}", "tcga", place, "tcga_brca", where | {"normalize": "none"}, 50, tcga, 15),
    ]
    if (users, allocation) == (50, "zipf"):
        both, slow = whole_silos(**HEART_LOCAL), whole_silos(**TCGA_LOCAL)
        QUICK += [
            Job("heart-whole", "heart", place, "heart_disease", private, 50, both, 20),
            Job("tcga-whole", "tcga", place, "tcga_brca", where | {"normalize": "none"}, 50, slow, 40),
        ]

# Survival as tables have it: one record of a person.

ALONE_THERE, ONE = {"allocation": "own", "normalize": "public"}, "866 persons, one record each"
for number, (label, rounds, named, task) in enumerate(
    [
        ("Cox, step 1", 10, ours(1.0, "records", "6.58"), {}),
        ("exponential, step 1", 10, ours(1.0, "records", "6.58"), by_hazard(10)),
        ("exponential, step 10", 20, ours(10.0, "records", "6.58", "1", rounds=20), by_hazard(10)),
        ("exponential, step 10, τ = 3 years", 20, ours(10.0, "records", "6.58", rounds=20), by_hazard(3)),
        ("exponential, step 10, τ = 30 years", 20, ours(10.0, "records", "6.58", rounds=20), by_hazard(30)),
        (
            "default",
            50,
            {"default": without_privacy(learning_rate=0.1, epochs=5, batch_size=64)},
            by_hazard(10),
        ),
    ]
):
    rows = {each.replace("ours", f"ours, {label}"): method for each, method in named.items()}
    name = f"tcga-single-{number}"
    QUICK.append(Job(name, "tcga-single", ONE, "tcga_brca", ALONE_THERE, rounds, rows, 5, task))

# Figures 4, 8 and 9, creditcard.

CARDS: Fields = {"allocation": "zipf", "seed": 0}
MEASURES = ["roc_auc", "average_precision"]
MLP, LINEAR = {"model": "mlp", "metrics": MEASURES}, {"model": "logistic", "metrics": MEASURES}
CARD_LOCAL = {"learning_rate": 0.01, "epochs": 30, "batch_size": 64}
CARD_SECONDS = {"sgd": 1.2, "avg": 12, "avg records": 12, "group k=8": 8, "naive": 22, "default": 22}
for users in (100, 1000):
    place, people = f"U={users}", CARDS | {"users": users, "silos": 5}
    private, public = people | {"normalize": "private"}, people | {"normalize": "public"}
    if users == 100:
        # With much noise a smaller step, which is the default.
        best = ours(3.0, "records", "10.0", "3.85") | ours(1.0, "primary_silo", "1")
    else:
        best = ours(10.0, "records", "10.0", "3.85", "1")
    QUICK.append(
        Job(f"creditcard-{users}-ours", "creditcard", place, "creditcard", public, 10, best, 5, LINEAR)
    )
    default = untuned("10.0", "3.85", "1")
    name = f"creditcard-{users}-default"
    QUICK.append(Job(name, "creditcard", place, "creditcard", public, 40, default, 20, LINEAR))
    scaled = {"ours, private scaling": stepped(3.0, SIGMA["3.85"])}
    name = f"creditcard-{users}-ours-scaling"
    QUICK.append(Job(name, "creditcard", place, "creditcard", private, 10, scaled, 5, LINEAR))
    methods = per_person(10, **CARD_LOCAL)
    # 8 records of each of 100 persons are small silos: the rate of a record is larger.
    methods["group k=8"] = group(8, 0.2, 100, 32.0, 0.5) if users == 100 else group(8, 0.04, 100, 64.0, 0.5)
    if users == 100:
        methods |= whole_silos(**CARD_LOCAL | {"epochs": 50})
    for rounds, table, every in ((20, "creditcard", 1), (100, "creditcard-long", 10)):
        seconds = {label: rounds * each for label, each in CARD_SECONDS.items()}
        name = f"creditcard-{users}-{rounds}"
        LONG.append(
            Job(name, table, place, "creditcard", private, rounds, methods, seconds, MLP, every=every)
        )
# The authors' code has a lower sgd row than ours, because it clips another gradient.
people = CARDS | {"users": 100, "silos": 5, "normalize": "private"}
both = {
    "sgd, as in the paper": clipped("uldp-sgd", 10, weighting="uniform"),
    "sgd, as in the published code": clipped(
        "../benchmarks/published_sgd.py:PublishedSgd", 10, weighting="uniform"
    ),
}
QUICK.append(Job("sgd-published", "sgd", "U=100", "creditcard", people, 20, both, 10, MLP, seeds=20))

for silos in (5, 20, 50):
    people = CARDS | {"users": 100, "silos": silos}
    private, public = people | {"normalize": "private"}, people | {"normalize": "public"}
    weights = {f"ours, {w}": stepped(3.0, 5.0, w) for w in ("uniform", "present", "records", "primary_silo")}
    two = {label: each for label, each in per_person(10, **CARD_LOCAL).items() if label != "sgd"}
    place = f"S={silos}"
    QUICK.append(
        Job(f"weighting-{silos}-ours", "weighting", place, "creditcard", public, 10, weights, 5, LINEAR)
    )
    LONG.append(Job(f"weighting-{silos}", "weighting", place, "creditcard", private, 10, two, 200, MLP))

RATES = (0.1, 0.3, 0.5, 0.7, 1.0)
people = CARDS | {"users": 1000, "silos": 5}
private, public = people | {"normalize": "private"}, people | {"normalize": "public"}
linear = {f"q={q}": stepped(3.0, 5.0, user_sampling=q) for q in RATES}
network = {
    f"q={q}": clipped("uldp-avg", 10, 1.0, weighting="uniform", user_sampling=q, local=CARD_LOCAL)
    for q in RATES
}
QUICK.append(Job("sampling-ours", "sampling", "ours", "creditcard", public, 15, linear, 6, LINEAR))
LONG.append(Job("sampling", "sampling", "paper's network", "creditcard", private, 15, network, 150, MLP))

# Figure 5, MNIST, with 5 local epochs and 20 rounds in place of 50 and 200.

DIGITS: dict[str, Fields] = {"iid": {}, "two digits": {"labels_per_user": 2}}
DIGIT_SECONDS = {"sgd": 123, "avg": 603, "avg records": 619, "group k=8": 28, "naive": 493, "default": 494}
for place, labels in DIGITS.items():
    people = {"users": 100, "silos": 5, "allocation": "zipf", "seed": 0, **labels}
    images, public = people | {"normalize": "private"}, people | {"normalize": "public"}
    local = {"learning_rate": 0.01, "epochs": 5, "batch_size": 64}
    methods = per_person(100, **local) | whole_silos(**local)
    methods["group k=8"] = group(8, 0.2, 25, 32.0, 0.5)
    name, cnn, head = f"mnist-{place.split()[0]}", {"model": "cnn_mnist"}, {"model": "hog_linear"}
    best = ours(1.0, "records", "10.0", "3.85", "1")
    QUICK.append(Job(f"{name}-ours", "mnist", place, "mnist", public, 10, best, 40, head, every=5))
    LONG.append(Job(name, "mnist", place, "mnist", images, 20, methods, DIGIT_SECONDS, cnn, every=5))

# The same as printed, with 50 and 200, and with 10,000 persons, too. "sgd" takes one step a round, whatever the epochs.
# Of 10,000 persons two rounds of "avg" were measured, 11.4 s with one epoch and 18.9 s with two: `silodp run
# examples/mnist.toml --set data.users=10000 --set rounds=2 --set method.weighting=uniform --set method.local.epochs=1`.

AS_PRINTED = {label: 10 * each * (1 if label == "sgd" else 10) for label, each in DIGIT_SECONDS.items()}
MANY = AS_PRINTED | {"sgd": 2_300, "avg": 77_000, "avg records": 77_000}
for users, (place, labels) in product((100, 10_000), DIGITS.items()):
    people = {"users": users, "silos": 5, "allocation": "zipf", "seed": 0, "normalize": "private", **labels}
    local = {"learning_rate": 0.01, "epochs": 50, "batch_size": 64}
    methods = per_person(100, **local) | whole_silos(**local) | {"group k=8": group(8, 0.2, 250, 32.0, 0.5)}
    name, column = f"printed-{users}-{place.split()[0]}", f"{users:,} persons, {place}"
    PRINTED.append(
        Job(
            name,
            "mnist-printed",
            column,
            "mnist",
            people,
            200,
            methods,
            AS_PRINTED if users == 100 else MANY,
            {"model": "cnn_mnist"},
            every=10,
        )
    )
