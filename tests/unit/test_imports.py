"""What a command or a part of the package may import: heavy libraries only where they are used."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import reduce
from pathlib import Path

import silodp

ROOT = Path(__file__).parents[2]
HEAVY = {
    "torch",
    "pandas",
    "matplotlib",
    "sklearn",
    "pyarrow",
    "jinja2",
    "safetensors",
    "dp_accounting",
    "scipy",
}
ABOVE_A_SILO = {"silodp.report", "silodp.config", "silodp.planning", "silodp.cli"}
CONFIG = """
name = "two-tables"
rounds = 2
[data]
source = "tables"
files = ["a.csv", "b.csv"]
[data.schema]
user = "id"
label = "sick"
kind = "classes"
classes = [0, 1]
numeric = {age = [0, 100], weight = [0, 200]}
[method]
name = "uldp-avg"
noise_multiplier = 5.0
clip = 0.1
[method.local]
learning_rate = 0.1
"""


def _imported(code: str) -> set[str]:
    """Return the modules that a fresh interpreter has after this code, packages of other projects by their root."""
    report = "import sys; print(' '.join(sys.modules), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True
    )
    names = set(done.stderr.splitlines()[-1].split())
    return names | {name.partition(".")[0] for name in names}


def _after_commands(*commands: list[str], expected: int = 0) -> set[str]:
    """What one process has imported after commands with this status: that it lacks something says so of each."""
    return _imported(
        f"""
import sys
from pathlib import Path
from silodp.cli.main import main
for arguments in {list(commands)!r}:
    sys.argv = ["silodp", *arguments]
    try:
        status = main()
    except SystemExit as stop:
        status = stop.code
    assert (status or 0) == {expected}, (arguments, status)
"""
    )


def _count_own(imported: set[str]) -> int:
    """Return how many modules of silodp, and of what stands beside it, are imported."""
    return sum(name.partition(".")[0].startswith("silodp") for name in imported)


def test_help_imports_nothing_heavy():
    assert not _after_commands(["--help"]) & (HEAVY | {"numpy", "pydantic"})


def test_what_is_refused_at_sight_imports_nothing_heavy(tmp_path):
    """A refusal takes half a second; torch alone takes two."""
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    wrong = [str(path), "--set", "rounds=-1"]
    refused = [
        ["--bogus"],
        ["run", "missing.toml"],
        ["run", *wrong],
        ["run", str(tmp_path), "--resume", "--bogus"],
        ["plan", *wrong],
        ["compare", *wrong, "--methods", "uldp-avg"],
        ["deploy", "init", *wrong, "--out", str(tmp_path / "out")],
    ]
    assert not _after_commands(*refused, expected=2) & HEAVY - {"safetensors"}


def test_epsilon_is_computed_without_torch_pandas_or_matplotlib():
    question = "epsilon --method uldp-avg --rounds 2 --noise-multiplier 5 --weighting records --aggregator"
    imported = _after_commands(*([*question.split(), name] for name in ("masked", "lattice")))
    assert "dp_accounting" in imported
    assert not imported & {"torch", "pandas", "matplotlib", "sklearn", "pyarrow", "jinja2"}


def test_a_plan_imports_torch_only_to_count_a_model_of_the_users_own(tmp_path):
    path, own = tmp_path / "config.toml", tmp_path / "own.py"
    path.write_text(CONFIG)
    plans = [["plan", str(path), "--set", f"task.model={model}"] for model in ("logistic", "mlp")]
    assert not _after_commands(*plans) & {"torch", "pandas", "matplotlib", "sklearn", "jinja2"}
    pictures = ["plan", str(path), "--set", "method.user_sampling=0.5", "--plot", str(tmp_path / "q.svg")]
    assert not _after_commands(pictures) & {"torch", "pandas", "sklearn", "jinja2"}
    own.write_text("from torch import nn\n\ndef made():\n    return nn.Linear(2, 1)\n")
    assert "torch" in _after_commands(["plan", str(path), "--set", f"task.model={own}:made"])


def test_a_silo_imports_neither_report_nor_configuration():
    imported = _imported("import silodp.runtime.silo")
    assert "torch" in imported
    assert not imported & (ABOVE_A_SILO | {"pandas", "matplotlib", "sklearn", "jinja2", "pydantic", "typer"})


def test_the_package_has_all_that_it_exports():
    code = "import silodp, silodp.training as t, silodp.data as d, silodp.training.sgd as s\n"
    check = (
        "for m in (silodp, t, d, s):\n    for name in m.__all__: getattr(m, name)\nassert silodp.__version__"
    )
    _imported(code + check)


def test_what_code_of_the_documentation_names_is_there_after_import_silodp():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    blocks = [
        block for page in pages for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    code = "\n".join(line for block in blocks for line in block.splitlines() if "import" not in line)
    names = set(re.findall(r"\bsilodp(?:\.\w+)+", code))
    assert "silodp.training.cross_entropy" in names
    # What is only there because something else has imported it is not in the list of exports.
    assert {name.split(".")[1] for name in names} <= {*silodp.__all__, "__version__"}
    for name in names:
        assert reduce(getattr, name.split(".")[1:], silodp) is not None


def test_no_import_leaves_a_file_in_the_temporary_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import silodp.aggregators.lattice"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_epsilon_imports_what_it_uses():
    """Half of silodp was imported for one number once: registries, and packages, import what is asked for."""
    question = "epsilon --method uldp-avg --rounds 10 --noise-multiplier 5"
    assert _count_own(_after_commands(question.split(" "))) <= 55


def test_a_report_of_a_finished_run_imports_no_torch(tmp_path):
    directory = tmp_path / "run"
    demo = Path(silodp.__file__).with_name("cli") / "demo.toml"
    command = [sys.executable, "-m", "silodp", "run", demo, "--set", "rounds=1", "--out", directory]
    subprocess.run(command, check=True, capture_output=True)
    imported = _after_commands(["report", str(directory)])
    assert not imported & {"torch", "pandas", "sklearn", "pyarrow"}
    assert not imported & {"silodp.config.resolve", "silodp.data.catalog", "silodp.training.metrics"}
    assert _count_own(imported) <= 87


def test_deployments_refuse_what_is_not_there_without_torch(tmp_path):
    nowhere = str(tmp_path / "nowhere")
    refused = [
        ["report", nowhere],
        ["predict", nowhere, "table.csv"],
        ["server", nowhere, nowhere],
        ["silo", nowhere, nowhere],
        ["audit-log", nowhere],
        ["deploy", "status", nowhere],
        ["deploy", "check", nowhere, nowhere],
    ]
    assert "torch" not in _after_commands(*refused, expected=2)
