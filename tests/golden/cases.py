"""What the golden files hold: runs, questions to the commands, and mistakes, all as plain settings.

Settings are those of configuration files and of the command line, which users have written down and which therefore
outlive every change of module or class.
"""

from __future__ import annotations

from typing import Any

Plain = dict[str, Any]

CLINICS = ("north", "south", "east", "west")
USERS = 9


def rows_of(clinic: int) -> list[str]:
    """The CSV lines of one clinic, from whole numbers, so that no generator of random numbers matters."""
    lines = ["person,split,age,pressure,ward,ill,epsilon"]
    for i in range(24 + 4 * clinic):
        mixed = (i * 7919 + clinic * 104729 + 17) * 2654435761 % 2**32
        person = mixed % USERS if i % 3 else (i + clinic) % 4
        age, pressure = 20 + mixed // 7 % 70, 90 + mixed // 11 % 90
        ward = ("surgery", "medicine")[mixed // 13 % 2]
        ill = int(2 * age + pressure + mixed // 17 % 40 > 260)
        epsilon = (0.5, 2.0, 6.0)[mixed // 19 % 3]
        split = "test" if i % 6 == 5 else "train"
        lines.append(f"p{person},{split},{age},{pressure},{ward},{ill},{epsilon}")
    return lines


TABLES: Plain = {
    "source": "tables",
    "files": {name: f"{name}.csv" for name in CLINICS[:3]},
    "schema": {
        "user": "person",
        "label": "ill",
        "classes": [0, 1],
        "split": "split",
        "numeric": {"age": [0, 110], "pressure": [50, 250]},
        "categorical": {"ward": ["surgery", "medicine"]},
        "users": [f"p{u}" for u in range(USERS)],
    },
}
OWN_BUDGETS: Plain = {**TABLES, "schema": {**TABLES["schema"], "budget": "epsilon"}}
EMBEDDED: Plain = {"source": "embedded", "users": 12, "silos": 3}
OF_RECORDS: Plain = {"distribution": "three-levels", "of": "records", "seed": 1}
OF_USERS: Plain = {**OF_RECORDS, "of": "users"}

LOCAL: Plain = {"learning_rate": 0.3, "epochs": 2, "batch_size": 4}
AVG: Plain = {
    "name": "uldp-avg",
    "noise_multiplier": 2.0,
    "clip": 0.5,
    "server_learning_rate": 3.0,
    "local": LOCAL,
}
GROUP: Plain = {
    "name": "uldp-group",
    "noise_multiplier": 3.0,
    "clip": 0.5,
    "group_size": 2,
    "record_sampling": 0.4,
    "local_steps": 3,
    "expected_batch_size": 5.0,
    "local_learning_rate": 0.5,
}
NAIVE: Plain = {"name": "uldp-naive", "noise_multiplier": 2.0, "clip": 0.5, "local": LOCAL}
RPDP: Plain = {
    "name": "rpdp",
    "noise_multiplier": 6.0,
    "clip": 0.5,
    "local_steps": 3,
    "expected_batch_size": 5.0,
    "local_learning_rate": 0.5,
    "largest_budget": 5.0,
}
DDP: Plain = {
    "name": "ddp",
    "noise_multiplier": 1.5,
    "clip": 0.5,
    "local_steps": 3,
    "record_sampling": 0.3,
    "expected_batch_size": 5.0,
    "local_learning_rate": 0.5,
}
LATTICE: Plain = {"count_cap": 3, "attempts": 20}
PAILLIER: Plain = {"count_cap": 3, "key_bits": 512, "insecure_for_tests": True}


def without(fields: Plain, *names: str) -> Plain:
    return {name: value for name, value in fields.items() if name not in names}


def run(method: Plain, aggregator: str = "plain", **more: Any) -> Plain:
    """A configuration of two rounds over the tables of three clinics."""
    base: Plain = {
        "name": "golden",
        "rounds": 2,
        "seed": 1,
        "delta": 1e-4,
        "data": TABLES,
        "task": {"metrics": []},
    }
    secret = aggregator in ("lattice", "paillier")
    if secret and "aggregation" not in more:
        more["aggregation"] = LATTICE if aggregator == "lattice" else PAILLIER
    return base | {"method": method, "aggregator": aggregator} | more


PERSONAL_SAMPLING: Plain = {"by": "sampling", "largest_budget": 5.0, "mean_sampling": 0.5}
PERSONAL_CLIP: Plain = {"by": "clip", "largest_budget": 5.0}


def _runs() -> dict[str, Plain]:
    sampled: Plain = {**AVG, "user_sampling": 0.5}
    weighted: Plain = {**AVG, "weighting": "records"}
    both: Plain = {**weighted, "user_sampling": 0.5}
    sgd: Plain = {**without(AVG, "local"), "name": "uldp-sgd"}
    local = {**LOCAL, "momentum": 0.5, "weight_decay": 0.01}
    many = {**RPDP, "client_sampling": 0.6, "ledger": "realized", "optimizer": "adam"}
    minimum = {**without(RPDP, "largest_budget"), "name": "rpdp-minimum", "budget": 0.5}
    dropout = {**without(RPDP, "largest_budget"), "name": "rpdp-dropout", "threshold": 2.0}
    filtered = {**RPDP, "name": "rpdp-filter", "noise_multiplier": 3.0}
    each = {
        **DDP,
        "noise_multiplier": [1.0, 1.5, 2.0],
        "clip": [0.5, 0.4, 0.3],
        "local_steps": [1, 2, 3],
        "local_learning_rate": [0.5, 0.3, 0.2],
        "local_momentum": 0.5,
    }
    scf = {
        **RPDP,
        "calibration": "scf",
        "noise_multiplier": 12.25,
        "local_steps": 50,
        "local_learning_rate": 0.01,
    }
    found = {
        "uldp-avg sampled plain": run(sampled),
        "uldp-avg sampled masked": run(sampled, "masked"),
        "uldp-avg records sampled lattice": run(both, "lattice"),
        "uldp-sgd plain": run(sgd),
        "uldp-sgd masked": run(sgd, "masked"),
        "uldp-naive plain": run(NAIVE),
        "uldp-group plain": run(GROUP),
        "default plain": run({"name": "default", "local": local}),
        "rpdp plain": run(RPDP, data=OWN_BUDGETS),
        "rpdp clients realized adam plain": run(many, budgets=OF_RECORDS),
        "rpdp clients realized adam masked": run(many, "masked", budgets=OF_RECORDS),
        "rpdp-minimum plain": run(minimum, data=OWN_BUDGETS),
        "rpdp-dropout plain": run(dropout, data=OWN_BUDGETS),
        "rpdp-filter plain": run(filtered, data=OWN_BUDGETS),
        "rpdp fitted curve": run(scf, rounds=15, evaluate_every=5, delta=1e-3, budgets=OF_RECORDS),
        "ddp decoupled plain": run({**DDP, "trajectory": "decoupled"}),
        "ddp decoupled masked": run({**DDP, "trajectory": "decoupled"}, "masked"),
        "ddp local plain": run({**DDP, "trajectory": "local"}),
        "ddp paper plain": run({**DDP, "trajectory": "paper"}),
        "ddp clients differ plain": run(each),
        "uldp-avg embedded": run(AVG, data=EMBEDDED, task={}, evaluate_every=2, rounds=3),
        "uldp-avg stops at its budget": run(AVG, rounds=6, budget={"epsilon": 5.5}),
    }
    for aggregator in ("plain", "masked"):
        found[f"uldp-avg uniform {aggregator}"] = run({**AVG, "server_momentum": 0.5}, aggregator)
        clipped = {**AVG, "personal": PERSONAL_CLIP}
        found[f"uldp-avg personal clip {aggregator}"] = run(clipped, aggregator, budgets=OF_USERS)
    for aggregator in ("plain", "masked", "lattice", "paillier"):
        found[f"uldp-avg records {aggregator}"] = run(weighted, aggregator)
    for aggregator, settings in (("lattice", LATTICE), ("paillier", PAILLIER)):
        hidden = {**settings, "hidden_sample": 2}
        found[f"uldp-avg hidden sample {aggregator}"] = run(both, aggregator, aggregation=hidden)
    clipped = {**weighted, "personal": PERSONAL_CLIP}
    found["uldp-avg personal clip lattice"] = run(clipped, "lattice", budgets=OF_USERS)
    by_sampling = {**AVG, "personal": PERSONAL_SAMPLING}
    found["uldp-avg personal sampling plain"] = run(by_sampling, budgets=OF_USERS)
    return found


CONFIGS = _runs()
"""Name → configuration of runs and plans. Most have no metrics, as pictures of them take the time of a run."""

RUNS = (
    "uldp-avg uniform plain",
    "uldp-avg sampled masked",
    "uldp-avg hidden sample lattice",
    "uldp-avg hidden sample paillier",
    "uldp-avg personal clip lattice",
    "uldp-sgd plain",
    "uldp-group plain",
    "uldp-naive plain",
    "default plain",
    "rpdp clients realized adam masked",
    "rpdp-filter plain",
    "ddp paper plain",
)
"""The runs that are computed again: methods, aggregators and units."""

SLOW = frozenset(
    (
        *(name for name in CONFIGS if "paillier" in name),
        "rpdp fitted curve",
        "ddp decoupled plain, for epsilon 3",
        "ddp clients differ plain",
        "uldp-avg personal sampling plain",
        "uldp-avg personal clip masked",
        "uldp-sgd masked",
        "rpdp clients realized adam plain",
    )
)
"""What takes seconds; only `pytest -m slow` computes it."""


def is_slow(name: str) -> bool:
    """Whether only `pytest -m slow` computes a case."""
    many_steps = "--method ddp" in name and "--local-steps" in name and "--rounds 2 " not in name
    return many_steps or name in SLOW


def _questions() -> dict[str, list[str]]:
    """Name → arguments of `silodp epsilon`."""
    found: dict[str, list[str]] = {}

    def ask(method: str, **fields: Any) -> None:
        arguments = ["--method", method]
        for name, value in fields.items():
            arguments += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        found[" ".join(arguments)] = arguments

    for sigma in (0.5, 1.0, 5.0, 20.0):
        for rounds in (1, 100):
            for delta in (1e-3, 1e-6):
                ask("uldp-avg", noise_multiplier=sigma, rounds=rounds, delta=delta)
    for q in (0.01, 0.1, 0.7):
        for accountant in ("pld", "rdp"):
            ask("uldp-avg", noise_multiplier=5.0, rounds=100, user_sampling=q, accountant=accountant)
    for adversary in ("released", "server", "silo"):
        for aggregator in ("plain", "masked", "lattice", "paillier"):
            for weighting in ("uniform", "records"):
                at: Plain = {"adversary": adversary, "aggregator": aggregator, "silos": 5, "dimension": 100}
                if aggregator == "masked" or weighting == "records":
                    ask("uldp-avg", noise_multiplier=5.0, rounds=50, weighting=weighting, **at)
                ask("uldp-avg", noise_multiplier=5.0, rounds=50, weighting=weighting, user_sampling=0.2, **at)
        at = {"adversary": adversary, "silos": 4}
        ask("uldp-sgd", noise_multiplier=3.0, rounds=20, **at)
        ask("uldp-naive", noise_multiplier=5.0, rounds=20, **at)
        ask(
            "uldp-group",
            noise_multiplier=5.0,
            rounds=3,
            group_size=8,
            record_sampling=0.05,
            local_steps=10,
            **at,
        )
        ask("rpdp", noise_multiplier=12.25, rounds=15, record_sampling=0.2, local_steps=50, **at)
        ask(
            "rpdp",
            noise_multiplier=6.0,
            rounds=5,
            record_sampling=0.2,
            local_steps=5,
            client_sampling=0.5,
            **at,
        )
        ask("rpdp-minimum", noise_multiplier=6.0, rounds=5, record_sampling=0.1, local_steps=5, **at)
        ask("rpdp-dropout", noise_multiplier=6.0, rounds=5, record_sampling=0.1, local_steps=5, **at)
        ask("rpdp-filter", noise_multiplier=6.0, rounds=5, local_steps=5, largest_budget=3.0, **at)
        ask("default", rounds=5, **at)
        for trajectory in ("decoupled", "local", "paper"):
            more: Plain = {"record_sampling": 0.1, "local_steps": 10, "trajectory": trajectory, **at}
            ask("ddp", noise_multiplier=0.9, rounds=20, **more)
            ask("ddp", noise_multiplier=0.9, rounds=2, aggregator="masked", dimension=1000, **more)
    ask("ddp", noise_multiplier=0.9, clients=10, rounds=20, local_steps=10, record_sampling=0.1)
    ask("ddp", noise_multiplier=0.447, clients=50, rounds=10, local_steps=20, record_sampling=0.05)
    ask(
        "ddp",
        noise_multiplier=0.9,
        clients=10,
        rounds=5,
        local_steps=10,
        record_sampling=0.1,
        trajectory_ratio=4.0,
    )
    for colluding in (1, 2, 3):
        ask("uldp-avg", noise_multiplier=5.0, rounds=10, adversary="silo", silos=5, colluding=colluding)
    ask("uldp-avg", noise_multiplier=5.0, rounds=10, user_sampling=0.1, knows_sample=True)
    ask(
        "uldp-avg",
        noise_multiplier=5.0,
        rounds=10,
        aggregator="masked",
        aggregation="min_silos=3",
        silos=5,
        dimension=50,
    )
    ask(
        "uldp-avg",
        noise_multiplier=5.0,
        rounds=10,
        aggregator="masked",
        aggregation="units=16",
        silos=5,
        dimension=50,
    )
    return found


QUESTIONS = _questions()


def _plans() -> dict[str, tuple[Plain, list[str]]]:
    """Name → configuration and further arguments of `silodp plan`."""
    found: dict[str, tuple[Plain, list[str]]] = {}
    for name in (
        "uldp-avg uniform plain",
        "uldp-avg sampled masked",
        "uldp-avg records sampled lattice",
        "uldp-avg records paillier",
        "uldp-avg hidden sample lattice",
        "uldp-avg personal sampling plain",
        "uldp-avg personal clip masked",
        "uldp-naive plain",
        "uldp-group plain",
        "uldp-sgd masked",
        "default plain",
        "rpdp plain",
        "rpdp clients realized adam plain",
        "rpdp fitted curve",
        "rpdp-minimum plain",
        "rpdp-dropout plain",
        "rpdp-filter plain",
        "ddp decoupled masked",
        "ddp paper plain",
        "ddp clients differ plain",
        "uldp-avg stops at its budget",
        "uldp-avg embedded",
    ):
        found[name] = (CONFIGS[name], [])
    for name in (
        "uldp-avg sampled plain",
        "uldp-avg uniform masked",
        "uldp-group plain",
        "uldp-avg personal clip plain",
        "rpdp clients realized adam plain",
        "ddp decoupled plain",
    ):
        found[f"{name}, for epsilon 3"] = (CONFIGS[name], ["--target-epsilon", "3"])
    return found


PLANS = _plans()


def _mistakes() -> dict[str, tuple[str, Plain | None, list[str]]]:
    """Name → command, configuration (None: the command takes none), further arguments."""
    plain, masked, lattice = (CONFIGS[f"uldp-avg records {name}"] for name in ("plain", "masked", "lattice"))
    paillier, group, naive = (
        CONFIGS["uldp-avg records paillier"],
        CONFIGS["uldp-group plain"],
        CONFIGS["uldp-naive plain"],
    )
    rpdp, ddp, filtered = CONFIGS["rpdp plain"], CONFIGS["ddp local plain"], CONFIGS["rpdp-filter plain"]
    personal = CONFIGS["uldp-avg personal sampling plain"]
    embedded = CONFIGS["uldp-avg embedded"]
    set_: list[tuple[str, Plain, str]] = [
        ("plan", plain, "rounds=-1"),
        ("plan", plain, "rounds=2.5"),
        ("plan", plain, "rounds='many'"),
        ("plan", plain, "seed=-3"),
        ("plan", plain, "delta=0"),
        ("plan", plain, "delta=1.0"),
        ("plan", plain, "accountant='exact'"),
        ("plan", plain, "evaluate_every=0"),
        ("plan", plain, "name='a/b'"),
        ("plan", plain, "round=3"),
        ("plan", plain, "task.modle='mlp'"),
        ("plan", plain, "task.model='nothing'"),
        ("plan", plain, "task.loss='nothing'"),
        ("run", plain, "task.loss='cox'"),
        ("plan", plain, "task.metrics=['nothing']"),
        ("run", plain, "task.metrics=['concordance']"),
        ("plan", plain, "task.model='no_such_file.py:make'"),
        ("plan", plain, "task.model='torch:zeros'"),
        ("plan", plain, "method.name='uldp'"),
        ("plan", plain, "method.clips=1.0"),
        ("plan", plain, "method.clip=0"),
        ("plan", plain, "method.clip=nan"),
        ("plan", plain, "method.clip='small'"),
        ("plan", plain, "method.noise_multiplier=-1"),
        ("plan", plain, "method.noise_multiplier=1e300"),
        ("plan", plain, "method.weighting='rows'"),
        ("plan", plain, "method.user_sampling=0"),
        ("plan", plain, "method.user_sampling=1.5"),
        ("plan", plain, "method.server_momentum=1.0"),
        ("plan", plain, "method.server_learning_rate=0"),
        ("plan", plain, "method.local.epochs=0"),
        ("plan", plain, "method.local.batch_size=0"),
        ("plan", plain, "method.local.learning_rate=-1"),
        ("plan", plain, "method.local=3"),
        ("plan", plain, "method.personal={by='clip',largest_budget=2}"),
        ("plan", plain, "aggregator='open'"),
        ("plan", plain, "aggregation={min_silos=2}"),
        ("plan", plain, "budget={epsilon=-1}"),
        ("plan", plain, "budget={epsilon=1,delta=0.5}"),
        ("plan", plain, "budget={epsilon=1,adversary='me'}"),
        ("run", plain, "budget={epsilon=1,adversary='server'}"),
        ("plan", plain, "budget={epsilon=1e-9}"),
        ("run", plain, "silo_limits={server=0}"),
        ("run", CONFIGS["uldp-avg uniform plain"], "silo_limits={server=0.01}"),
        ("plan", plain, "silo_limits={me=3}"),
        ("plan", plain, "budgets={distribution='pareto'}"),
        ("run", rpdp, "budgets={distribution='pareto'}"),
        ("run", rpdp, "data.schema.label='risk'"),
        ("plan", rpdp, "method.record_sampling=0.5"),
        ("plan", rpdp, "method.largest_budget=0"),
        ("plan", rpdp, "method.local_steps=0"),
        ("plan", rpdp, "method.client_sampling=2"),
        ("plan", rpdp, "method.optimizer='lbfgs'"),
        ("plan", rpdp, "method.calibration='scf'"),
        ("run", filtered, "task.loss='cox'"),
        ("plan", personal, "method.personal.by='luck'"),
        ("plan", personal, "method.personal.mean_sampling=2"),
        ("plan", personal, "budgets.of='silos'"),
        ("plan", personal, "budgets.shares=[0.5,0.5]"),
        ("plan", personal, "budgets.seed=-1"),
        ("plan", group, "method.group_size=0"),
        ("plan", group, "method.record_sampling=1.5"),
        ("plan", group, "aggregator='lattice'"),
        ("plan", naive, "method.user_sampling=0.5"),
        ("plan", ddp, "method.trajectory='free'"),
        ("plan", ddp, "method.local_steps=[1,2,3]"),
        ("plan", ddp, "method.noise_multiplier=[1.0,2.0]"),
        ("plan", ddp, "method.local_momentum=1"),
        ("plan", masked, "aggregation={min_silos=9}"),
        ("plan", masked, "aggregation={min_silos=1}"),
        ("plan", masked, "aggregation={units=3000}"),
        ("plan", masked, "accountant='pld'"),
        ("plan", masked, "data.files={north='north.csv'}"),
        ("plan", lattice, "method.weighting='uniform'"),
        ("plan", lattice, "aggregation={count_cap=0}"),
        ("plan", lattice, "aggregation={attempts=0}"),
        ("plan", lattice, "aggregation={key_bits=2048}"),
        ("plan", paillier, "aggregation={key_bits=1024}"),
        ("plan", paillier, "aggregation={key_bits=512}"),
        ("plan", embedded, "data.source='nowhere'"),
        ("plan", embedded, "data.users=0"),
        ("plan", embedded, "data.silos=0"),
        ("run", embedded, "data.allocation='fair'"),
        ("run", embedded, "data.source='heart_disease'"),
        ("run", plain, "data.files={north='north.csv',south='north.csv'}"),
        ("run", plain, "data.files={north='north.csv',south='nothing.csv'}"),
        ("run", plain, "data.files=[]"),
        ("run", plain, "data.schema.user='name'"),
        ("run", plain, "data.schema.label='age'"),
        ("run", plain, "data.schema.numeric={age=[0,30]}"),
        ("run", plain, "data.schema.numeric={age=[30,0]}"),
        ("run", plain, "data.schema.numeric={ward=[0,1]}"),
        ("run", plain, "data.schema.categorical={ward=['surgery']}"),
        ("run", plain, "data.schema.classes=[0]"),
        ("run", plain, "data.schema.users=['p0','p1']"),
        ("run", plain, "data.schema.users=['p0','p0']"),
        ("run", plain, "data.schema.kind='picture'"),
        ("run", plain, "data.schema.split='ward'"),
        ("run", rpdp, "data.schema.budget='pressures'"),
        ("plan", plain, "rounds"),
        ("plan", plain, "method.clip.more=1"),
    ]
    found: dict[str, tuple[str, Plain | None, list[str]]] = {
        f"{command} {config['method']['name']} {config['aggregator']} {change}": (
            command,
            config,
            ["--set", change],
        )
        for command, config, change in set_
    }
    sigma = " --noise-multiplier 5"
    avg = "epsilon --method uldp-avg --rounds 3"
    asked: dict[str, str] = {
        "no method": "epsilon --rounds 3",
        "unknown option": f"{avg} --sigma 3",
        "unknown method": f"epsilon --method dp --rounds 3{sigma}",
        "no noise": avg,
        "no rounds": f"epsilon --method uldp-avg --rounds 0{sigma}",
        "no such delta": f"{avg} --delta 2{sigma}",
        "no silos": f"{avg} --adversary silo{sigma}",
        "no clients": f"epsilon --method ddp --rounds 3 --local-steps 2 --record-sampling 0.1{sigma}",
        "no such adversary": f"{avg} --adversary me{sigma}",
        "no such accountant": f"{avg} --accountant me{sigma}",
        "group of nobody": f"epsilon --method uldp-group --rounds 3 --group-size 0{sigma}",
        "other methods' setting": f"{avg} --group-size 8{sigma}",
        "no such command": "train",
        "no such data set": "data check nothing",
        "no such run": "report no_such_directory",
        "no such configuration": "plan no_such_file.toml",
        "resume nothing": "run no_such_directory --resume",
    }
    found |= {name: (line.split()[0], None, line.split()[1:]) for name, line in asked.items()}
    found["out of reach"] = ("plan", CONFIGS["uldp-avg uniform plain"], ["--target-epsilon", "1e-12"])
    found["compare nothing"] = ("compare", plain, ["--methods", ","])
    found["compare twice"] = ("compare", plain, ["--methods", "uldp-avg,uldp-avg"])
    found["compare unknown"] = ("compare", plain, ["--methods", "uldp-avg:colour=red"])
    found["resume a new directory"] = ("run", plain, ["--resume"])
    return found


MISTAKES = _mistakes()
