"""What a command or a part of the package may import: heavy libraries only where they are used."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import reduce
from pathlib import Path

import pytest

import silodp as package
from silodp.cli.main import COMMANDS
from support.commands import Silodp

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
    (names,) = _imported_in_steps(code)
    return names


def _imported_in_steps(*steps: str) -> list[set[str]]:
    """As `_imported` after each of several pieces of code, which one interpreter runs one after the other.

    An interpreter starts in half a second, or in two with torch: what must lack the most comes first.
    """
    report = "import sys; print('imported:', *sys.modules, file=sys.stderr)"
    code = "".join(f"{step}\n{report}\n" for step in steps)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = [line.split()[1:] for line in done.stderr.splitlines() if line.startswith("imported:")]
    assert len(lines) == len(steps)
    return [{*line} | {name.partition(".")[0] for name in line} for line in lines]


def _run_commands(*commands: list[str], expected: int = 0) -> str:
    """Return code that runs commands with this status: that something is not imported says so of each."""
    return f"""
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


def _count_own(imported: set[str]) -> int:
    """Return how many modules of silodp, and of what stands beside it, are imported."""
    return sum(name.partition(".")[0].startswith("silodp") for name in imported)


def test_help_and_what_is_refused_import_nothing_heavy(tmp_path):
    """A refusal takes half a second; torch alone takes two."""
    path, nowhere = tmp_path / "config.toml", str(tmp_path / "nowhere")
    path.write_text(CONFIG)
    good, wrong = str(path), [str(path), "--set", "rounds=-1"]
    out, part = str(tmp_path / "out.csv"), str(tmp_path / "part.safetensors")
    question = "epsilon --method uldp-avg --rounds 2 --noise-multiplier"
    refused_at_sight = [
        ["--bogus"],
        ["run", "missing.toml"],
        ["run", *wrong],
        ["run", good],  # there are no tables
        ["run", good, "--target-epsilon", "-1"],
        ["run", good, "--workers", "0"],
        ["run", str(tmp_path), "--resume", "--bogus"],
        ["plan", *wrong],
        ["plan", good, "--target-epsilon", "-1"],
        ["plan", good, "--plot", "picture.bmp"],
        ["compare", *wrong, "--methods", "uldp-avg"],
        ["compare", good, "--methods", "uldp-avg", "--seeds", "0"],
        ["statistics", good],
        ["statistics", good, "--epsilon", "1"],
        ["attack", *wrong],
        ["attack", nowhere],
        ["attack", good, "--adversary", "nobody"],
        ["fine-tune", nowhere, "--out", part],
        ["predict", nowhere, good, "--out", out],
        ["predict", nowhere, nowhere, "--out", out],
        ["cohort", "show", nowhere],
        ["data", "fetch", "bogus"],
        ["deploy", "init", *wrong, "--out", str(tmp_path / "out")],
        [*question.split(), "-5"],
        ["epsilon", "--framework", "bogus"],
        ["epsilon", "--framework", "flower", "rounds=10"],
    ]
    without_a_place = [
        ["report", nowhere],
        ["recalibrate", nowhere, "--out", part],
        ["server", nowhere, nowhere],
        ["silo", nowhere, nowhere],
        ["audit-log", nowhere],
        ["deploy", "status", nowhere],
        ["deploy", "check", nowhere, nowhere],
        ["deploy", "accept", nowhere, nowhere],
        ["deploy", "seal", nowhere, "--host", "x"],
        ["deploy", "init", good, "--out", str(tmp_path / "out")],  # nothing states U
    ]
    helped, each_helped, refused, deployed = _imported_in_steps(
        _run_commands(["--help"]),
        _run_commands(*([name, "--help"] for name in ("run", *COMMANDS))),
        _run_commands(*refused_at_sight, expected=2),
        _run_commands(*without_a_place, expected=2),
    )
    assert not helped & (HEAVY | {"numpy", "pydantic"})
    assert each_helped & HEAVY - {"safetensors"} == set()
    assert refused & HEAVY - {"safetensors"} == set()
    assert not deployed & {"torch", "pandas", "scipy", "dp_accounting"}


def test_epsilon_imports_what_it_uses():
    """Half of silodp was imported for one number once: registries, and packages, import what is asked for."""
    question = "epsilon --method uldp-avg --rounds 2 --noise-multiplier 5"
    hidden = f"{question} --weighting records --aggregator"
    one, several = _imported_in_steps(
        _run_commands(question.split()),
        _run_commands(*([*hidden.split(), name] for name in ("masked", "lattice"))),
    )
    assert _count_own(one) <= 56
    assert not one & {
        "dp_accounting",
        "scipy.stats",
        "torch",
        "pandas",
    }  # Gaussian releases have a closed form
    assert "dp_accounting" in several
    assert not several & {"torch", "pandas", "matplotlib", "sklearn", "pyarrow", "jinja2"}


@pytest.mark.slow
def test_a_plan_imports_torch_only_to_count_a_model_of_the_users_own(tmp_path):
    path, own = tmp_path / "config.toml", tmp_path / "own.py"
    path.write_text(CONFIG)
    own.write_text("from torch import nn\n\ndef made():\n    return nn.Linear(2, 1)\n")
    plan = ["plan", str(path), "--set", "accountant=rdp"]
    pictures = ["--set", "method.user_sampling=0.5", "--plot", str(tmp_path / "q.svg")]
    planned, drawn, counted = _imported_in_steps(
        _run_commands(*([*plan, "--set", f"task.model={model}"] for model in ("logistic", "mlp"))),
        _run_commands([*plan, *pictures]),
        _run_commands([*plan, "--set", f"task.model={own}:made"]),
    )
    assert not planned & {"torch", "pandas", "matplotlib", "sklearn", "jinja2"}
    assert "matplotlib" in drawn
    assert not drawn & {"torch", "pandas", "sklearn", "jinja2"}
    assert "torch" in counted


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
    assert {name.split(".")[1] for name in names} <= {*package.__all__, "__version__"}
    for name in names:
        assert reduce(getattr, name.split(".")[1:], package) is not None


def test_no_import_leaves_a_file_in_the_temporary_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import silodp_private.lattice"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_report_of_a_finished_run_imports_no_torch(silodp: Silodp, tmp_path):
    directory = tmp_path / "run"
    demo = Path(package.__file__).with_name("cli") / "demo.toml"
    assert silodp("run", demo, "--set", "rounds=1", "--out", directory).status == 0
    imported = _imported(_run_commands(["report", str(directory)]))
    assert not imported & {"torch", "pandas", "sklearn", "pyarrow"}
    assert not imported & {"silodp.config.resolve", "silodp.data.catalog", "silodp.training.metrics"}
    assert _count_own(imported) <= 120
