"""Your own tables and your own model: three hospitals whose patients overlap predict readmission.

Run it with `python examples/own_tables.py`. Every patient in it is made up.
"""

from __future__ import annotations

import csv
import random
import tempfile
from pathlib import Path

from torch import nn

import silodp
from silodp.training import accuracy, binary_cross_entropy, roc_auc

HOSPITALS = {"riverside": 500, "st_anne": 350, "university": 250}  # admissions
PATIENTS = [f"P{number:04}" for number in range(300)]


def write_made_up_tables(folder: Path) -> dict[str, Path]:
    """One CSV per hospital; sicker patients are admitted more often, and to more than one hospital."""
    coins = random.Random(0)  # made-up data may be seeded; noise must not be
    traits = {
        patient: {
            "age": coins.randint(20, 90),
            "pressure": coins.randint(95, 180),
            "smoker": coins.choice(["never", "former", "current"]),
        }
        for patient in PATIENTS
    }
    files = {}
    for hospital, admissions in HOSPITALS.items():
        files[hospital] = folder / f"{hospital}.csv"
        with files[hospital].open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["patient", "age", "pressure", "smoker", "days", "readmitted"])
            for _ in range(admissions):
                patient = PATIENTS[
                    int(len(PATIENTS) * coins.random() ** 1.5)
                ]  # few patients, many admissions
                trait, days = traits[patient], coins.randint(1, 20)
                risk = (
                    trait["age"] / 30
                    + trait["pressure"] / 60
                    + days / 7
                    + 1.5 * (trait["smoker"] == "current")
                )
                readmitted = "yes" if risk + coins.gauss(0, 0.7) > 6.3 else "no"
                table.writerow([patient, trait["age"], trait["pressure"], trait["smoker"], days, readmitted])
    return files


def network(features: int) -> nn.Module:
    """Any module will do whose output for one record depends on that record alone (so: no BatchNorm)."""
    return nn.Sequential(nn.Linear(features, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))


def main() -> None:
    """Read, train, say what is promised."""
    # The schema is public: ranges and categories are what you declare, never what the rows happen to hold.
    schema = silodp.Schema(
        user="patient",
        label="readmitted",
        classes=["no", "yes"],
        numeric={
            "age": {"range": (0, 110), "typical": (55, 20)},
            "pressure": {"range": (60, 220), "typical": (130, 20)},
            "days": {"range": (0, 60), "typical": (7, 5)},
        },
        categorical={"smoker": ["never", "former", "current"]},
        test_share=0.2,  # a fifth of the patients, the same ones in every hospital
        users=PATIENTS,
        out_of_range="clip",
    )
    with tempfile.TemporaryDirectory() as folder:
        federation = silodp.Federation.from_tables(
            write_made_up_tables(Path(folder)), schema, name="hospitals"
        )

    task = silodp.Task(
        network(len(schema.features)), binary_cross_entropy(), {"accuracy": accuracy, "roc_auc": roc_auc}
    )
    method = silodp.methods.UldpAvg(
        noise_multiplier=4.0,
        step=1.0,
        local=silodp.LocalTraining(learning_rate=0.1, epochs=2),
    )
    result = silodp.train(
        federation,
        task,
        method,
        rounds=60,
        budget=silodp.Budget(epsilon=6.0, delta=1e-5),  # stop before whoever sees the models could learn more
    )

    first, last = result.metrics[0], result.metrics[-1]
    print(f"{federation.users} patients in {len(federation.silos)} hospitals, {last['round']} rounds")
    for name, value in last["metrics"].items():
        print(f"{name}: {first['metrics'][name]:.3f} untrained, {value:.3f} trained")
    print(f"stopped by: {result.stopped}")
    print(*result.guarantees.values(), sep="\n")


if __name__ == "__main__":
    main()
