"""Break one claim of docs/review.md by one changed line, and see its test fail.

    python benchmarks/broken_claims.py                 lists the claims
    python benchmarks/broken_claims.py second-release  breaks one
    python benchmarks/broken_claims.py all

The packages, tests and settings are copied to a temporary folder, where the test is run as it is, the line changed, and
the test run again. Nothing of the checkout is touched. The exit status is 1 where a test failed before the change or
passed after it. A test of a mutant by chance is benchmarks/mutants.py.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CORE = "packages/silodp/src/silodp"
COPIED = ("packages", "tests", "examples", "conftest.py", "pyproject.toml", "docs", "benchmarks")


class Change(NamedTuple):
    """One changed line: where, what it is, what it becomes, and the test that must fail."""

    file: str
    line: str
    becomes: str
    test: str


CLAIMS = {
    "noise": Change(
        f"{CORE}/mechanisms/noise.py",
        "stream.standard_normal(size) * std",
        "stream.standard_normal(size) * std * 0.97",
        "test_noise.py::test_gaussian_noise_has_the_std_asked_for",
    ),
    "long-rows": Change(
        f"{CORE}/mechanisms/clipping.py",
        "return (self.factors != 0) & (self.compute_clipped_norms() <= self.clip)",
        "return self.factors != 0",
        "test_defenses.py::test_rows_of_a_plug_in_that_are_longer_than_the_clip_count_as_zero",
    ),
    "sensitivity": Change(
        f"{CORE}/mechanisms/clipping.py",
        "std = noise_multiplier * self.sensitivity",
        "std = noise_multiplier",
        "test_clipping.py::test_released_noise_is_multiplier_times_sensitivity",
    ),
    "weights": Change(
        f"{CORE}/methods/roles.py",
        "(totals > 1 + 1e-9).any()",
        "(totals > 1.2).any()",
        "test_defenses.py::test_weights_of_a_plug_in_that_add_to_more_than_one_are_refused",
    ),
    "colluding": Change(
        f"{CORE}/accounting/views.py",
        'self.colluding if self.adversary == "silo" else 0',
        "0",
        "test_views.py::test_colluding_silos_subtract_their_noise",
    ),
    "known-sample": Change(
        f"{CORE}/methods/participation.py",
        "sampled = events.RevealedSample if view.knows_sample else events.PoissonSampled",
        "sampled = events.PoissonSampled",
        "test_views.py::test_sampling_amplifies_only_for_those_who_do_not_know_the_sample",
    ),
    "empty-batch": Change(
        f"{CORE}/methods/dp_sgd.py",
        ".add_noise(self.noise_multiplier, noise)",
        ".add_noise(self.noise_multiplier * min(1, len(batch)), noise)",
        "test_personalized.py::test_a_step_that_draws_nobody_adds_its_noise_too",
    ),
    "coins": Change(
        f"{CORE}/crypto/sampling.py",
        "key = derive_key(self._secret, purpose, self._run, number)",
        "key = derive_key(self._secret, purpose, self._run, 0)",
        "test_sampling.py::test_the_rate_is_kept_and_rounds_are_independent",
    ),
    "both-directions": Change(
        f"{CORE}/accounting/pld.py",
        "for direction in (0, -1))",
        "for direction in (0, 0))",
        "test_accounting.py::test_a_mixed_run_is_composed_in_both_directions",
    ),
    "kinds": Change(
        f"{CORE}/accounting/accountant.py",
        "return max(kind.epsilon(delta) for kind in self.kinds)",
        "return min(kind.epsilon(delta) for kind in self.kinds)",
        "test_composites.py::test_each_kind_pays_its_own_and_the_dearest_counts",
    ),
    "none-for-ever": Change(
        f"{CORE}/accounting/charges.py",
        "if reason is not None:",
        "if False:",
        "test_ledger.py::test_no_guarantee_once_is_none_for_ever",
    ),
    "charged-once": Change(
        f"{CORE}/accounting/ledger.py",
        "elif known.events != charge.events:",
        "elif False:",
        "test_ledger.py::test_charging_is_idempotent_by_round_and_release",
    ),
    "on-disk": Change(
        f"{CORE}/accounting/_append_log.py",
        "            os.fsync(self._file)\n        except",
        "        except",
        "test_ledger.py::test_a_charge_is_on_disk_when_it_returns",
    ),
    "chain": Change(
        f"{CORE}/accounting/_append_log.py",
        "sound = line == _line(fields, previous) and previous == self.head",
        "sound = line == _line(fields, previous)",
        "test_ledger.py::test_lines_cannot_be_taken_out_moved_or_doubled",
    ),
    "second-release": Change(
        f"{CORE}/aggregators/run_spec.py",
        "return {adversary: remove_amplification(event) for adversary, event in cost.items()}",
        "return cost",
        "test_masked.py::test_a_second_release_of_one_sample_is_charged_without_amplification",
    ),
    "charge-first": Change(
        f"{CORE}/runtime/silo.py",
        "        self.gate.charge(request)\n        answer = self._handlers[request.kind](request)\n",
        "        answer = self._handlers[request.kind](request)\n        self.gate.charge(request)\n",
        "test_gate.py::test_a_charge_is_on_disk_before_the_update_is_computed",
    ),
    "other-noise": Change(
        f"{CORE}/runtime/silo.py",
        '"round", request.round, release, request.digest()))',
        '"round", request.round, release))',
        "test_gate.py::test_a_restored_silo_draws_other_noise_for_another_model",
    ),
    "own-limit": Change(
        f"{CORE}/runtime/gate.py",
        "if exceeded is not None:",
        "if False:",
        "test_gate.py::test_a_silo_stops_at_its_own_limit_whatever_the_server_asks",
    ),
}


def find_test(tree: Path, place: str) -> str:
    """Return the test "file.py::function" with the path of its file in a tree, as pytest takes it there."""
    name, _, function = place.partition("::")
    file = next(path for root in ("packages/*/tests", "tests") for path in tree.glob(f"{root}/**/{name}"))
    return f"{file.relative_to(tree).as_posix()}::{function}"


def run_test(tree: Path, place: str) -> tuple[int, str]:
    """Return the exit status of pytest, and what it found, with the packages of a tree."""
    sources = os.pathsep.join(map(str, sorted(tree.glob("packages/*/src"))))
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", find_test(tree, place)]
    settings = os.environ | {"PYTHONPATH": sources}
    done = subprocess.run(command, cwd=tree, env=settings, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()]
    return done.returncode, lines[-1].strip("= ")


def break_claim(name: str) -> bool:
    """Print what a claim's test says with and without its line; return whether it noticed."""
    change = CLAIMS[name]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for entry in COPIED:
            source, target = ROOT / entry, tree / entry
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "build"))
            else:
                shutil.copy(source, target)
        before, passed = run_test(tree, change.test)
        text = (tree / change.file).read_text()
        if text.count(change.line) != 1:
            raise SystemExit(
                f"{name}: {change.file} has its line {text.count(change.line)} times: correct CLAIMS."
            )
        (tree / change.file).write_text(text.replace(change.line, change.becomes))
        after, failed = run_test(tree, change.test)
    print(f"{name}: {change.file}\n- {change.line}\n+ {change.becomes}\n  {find_test(ROOT, change.test)}")
    print(f"  as it is: {passed}\n  changed:  {failed}", flush=True)
    noticed = before == 0 and after == 1  # 1: tests failed; other numbers are errors of pytest
    print("  the test notices it" if noticed else "  THE TEST DOES NOT NOTICE IT", flush=True)
    return noticed


def main() -> int:
    """Break the claims that are named; return 1 where a test did not notice."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help="a name of the list, or all")
    given = parser.parse_args().claims
    if not given:
        print("\n".join(f"{name:16} {find_test(ROOT, change.test)}" for name, change in CLAIMS.items()))
        return 0
    names = list(CLAIMS) if "all" in given else given
    if unknown := set(names) - CLAIMS.keys():
        parser.error(f"no claim is named {sorted(unknown)[0]}")
    return 0 if all([break_claim(name) for name in names]) else 1


if __name__ == "__main__":
    sys.exit(main())
