"""Mutation score of the privacy core: how many small faults in it the fast tests notice.

python -m pip install coverage                       in an environment of its own
python benchmarks/mutants.py --json new.json         this tree
python benchmarks/mutants.py --tree ../old --json old.json --compare new.json

A mutant is one change in a function: `<` becomes `<=`, `+` becomes `-`, a check is dropped. It is tried with tests that
run its line, the quickest first, at most 20 of them or 40 s, until one fails. The sample are the mutants with the
smallest hashes of (file, line of text, operator, occurrence): trees have the mutants of unchanged lines in common.

No file is changed: each mutant is put into the functions of a fork of one process, which has collected the tests. So
constants of modules and classes have no mutants, and what a test starts as a process of its own sees none. A test that
hangs has noticed the mutant, and is counted apart.

Measured on 2026-11-29 before and after the split into packages (commits 64f6eeab and d4860c0b; --measure 90), in the
127 mutants that both runs reached, of the 271 that their samples of 300 have in common:

                killed  timed out  survived  not covered   score
    before          76          2        35           14   61.4%
    after           77          0        38           12   60.6%

Which tests are used depends on how fast they are. The 4 mutants that were noticed only before are killed after, too,
by the test that killed them before (3 were noticed only after; the reverse was not tried). Of each test one case is
used, and none that needs 1.5 s of CPU, so a survivor need not be a gap of the whole set. Tests were added since for 6.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import hashlib
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import hypothesis
import pytest

FILES = [
    "accounting/*.py",
    "mechanisms/*.py",
    "runtime/gate.py",
    "aggregators/masked.py",
    "aggregators/_key_agreement.py",
    "crypto/secure_aggregation.py",
]
TESTS = [
    "unit/accounting",
    "unit/mechanisms",
    "unit/aggregators",
    "unit/crypto/test_secure_aggregation.py",
    "attacks/test_gate.py",
    "attacks/test_sessions.py",
    "attacks/test_wire_attacks.py",
]
LONGEST, MOST_TESTS, MOST_SECONDS = 1.5, 20, 40.0

COMPARISONS = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.In: ast.NotIn, ast.Is: ast.IsNot}
COMPARISONS |= {new: old for old, new in COMPARISONS.items()}
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
ARITHMETIC |= {ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult}
NAMES = {"min": "max", "minimum": "maximum", "floor": "ceil"}
NAMES |= {new: old for old, new in NAMES.items()}
SENTENCES = {"SilodpError", "pluralize", "join_names", "warn", "warning", "info", "debug"}


@dataclass
class Mutant:
    """One change of one node, found in the tree of the file by `path`."""

    digest: str
    file: str
    line: int
    operator: str
    text: str
    path: list[tuple[str, int | None]]
    lines: tuple[range, range]
    """Lines of the node, and of its statement without what is below it."""
    outcome: str = "not tried"
    tests: list[str] = field(default_factory=list)
    killer: str = ""


def change(node: ast.AST) -> tuple[str, ast.AST] | None:
    """Return the name of an operator, and what it makes of a node."""
    match node:
        case ast.Compare(ops=[op]):
            return "comparison", ast.Compare(node.left, [COMPARISONS[type(op)]()], node.comparators)
        case ast.BinOp(op=op) if type(op) in ARITHMETIC:
            return "arithmetic", ast.BinOp(node.left, ARITHMETIC[type(op)](), node.right)
        case ast.AugAssign(op=op) if type(op) in ARITHMETIC:
            return "arithmetic", ast.AugAssign(node.target, ARITHMETIC[type(op)](), node.value)
        case ast.BoolOp(op=op):
            return "and/or", ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), node.values)
        case ast.UnaryOp(op=ast.Not()):
            return "not", node.operand
        case ast.Constant(value=bool(value)):
            return "constant", ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            return "constant", ast.Constant(value + 1)
        case ast.Name(id=name) if name in NAMES:
            return "min/max", ast.Name(NAMES[name], node.ctx)
        case ast.Attribute(attr=name) if name in NAMES:
            return "min/max", ast.Attribute(node.value, NAMES[name], node.ctx)
        case ast.Raise():
            return "raise", ast.Pass()
        case ast.Expr(value=ast.Call()):
            return "call", ast.Pass()
    return None


def is_left_out(node: ast.AST, name: str) -> bool:
    """Whether a node changes no result: annotations, decorators, sentences for people."""
    match node:
        case ast.FunctionDef(name="__repr__" | "__str__") | ast.JoinedStr() | ast.keyword(arg="strict"):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)) if called in SENTENCES:
            return True
        case ast.Expr(value=ast.Call() as call):
            return is_left_out(call, "")
    return name in ("annotation", "returns", "decorator_list")


def find_mutants(file: str, source: str) -> Iterator[Mutant]:
    """Yield all mutants of the functions of a file."""
    text, seen = source.splitlines(), Counter[tuple[str, str]]()

    def walk(node: Any, path: list[tuple[str, int | None]], statement: Any, within: bool) -> Iterator[Mutant]:
        statement = node if isinstance(node, ast.stmt) else statement
        if within and (changed := change(node)):
            key = (text[node.lineno - 1].strip(), changed[0])
            seen[key] += 1
            digest = hashlib.sha256(repr((file, *key, seen[key])).encode()).hexdigest()[:10]
            body = getattr(statement, "body", None)
            last = body[0].lineno - 1 if body else statement.end_lineno
            whole = range(statement.lineno, max(last, statement.lineno) + 1)
            own = range(node.lineno, node.end_lineno + 1)
            yield Mutant(digest, file, node.lineno, changed[0], key[0], path, (own, whole))
        for name, value in () if isinstance(node, ast.Raise) else ast.iter_fields(node):
            below = within or (isinstance(node, ast.FunctionDef | ast.Lambda) and name == "body")
            for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(child, ast.AST) and not is_left_out(child, name):
                    yield from walk(child, [*path, (name, index)], statement, below)

    yield from walk(ast.parse(source), [], None, False)


def compile_mutant(mutant: Mutant, file: Path) -> CodeType:
    """Return the code of the module with the mutant in it."""
    tree: Any = ast.parse(file.read_text())
    parent, node = None, tree
    for name, index in mutant.path:
        parent, node = node, getattr(node, name) if index is None else getattr(node, name)[index]
    name, index = mutant.path[-1]
    changed = change(node)
    assert changed
    new = ast.copy_location(changed[1], node)
    if index is None:
        setattr(parent, name, new)
    else:
        getattr(parent, name)[index] = new
    return compile(ast.fix_missing_locations(tree), str(file), "exec")


def list_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code and all codes in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from list_codes(constant)


def fork(act: Callable[[], int], seconds: float, log: Path) -> int | None:
    """Return what a function returns in a fork; None where it took too long."""
    if not (child := os.fork()):
        status = 3
        try:
            os.setpgid(0, 0)
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1,) * 2)
            resource.setrlimit(resource.RLIMIT_DATA, (8 << 30,) * 2)
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            status = act()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    end = time.monotonic() + 60 + 8 * seconds  # beside other work on the machine
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # and what it has started
    status = os.waitstatus_to_exitcode(ended[1] if ended[0] else os.waitpid(child, 0)[1])
    return None if status in (-signal.SIGKILL, -signal.SIGXCPU) else status


def choose_tests(mutant: Mutant, lines: dict[str, list[str]], seconds: dict[str, float]) -> list[str]:
    """Return the tests that run the line, the quickest first, one of each function before a second of any."""
    own, whole = (
        {test for number in numbers for test in lines.get(str(number), ())} & seconds.keys()
        for numbers in mutant.lines
    )
    turns, order = Counter[str](), []
    for test in sorted(own or whole, key=lambda test: (seconds[test], test)):
        turns[test.split("[")[0]] += 1
        order.append((turns[test.split("[")[0]], seconds[test], test))
    chosen: list[str] = []
    total = 0.0
    for _, cost, test in sorted(order):
        if len(chosen) < MOST_TESTS and (not chosen or total + cost <= MOST_SECONDS):
            chosen.append(test)
            total += cost
    return chosen


def give_up(*signal: Any) -> None:
    """End a test that takes too long to be tried with mutants."""
    raise TimeoutError


class Trial:
    """Tries a sample of mutants of a tree, in place of pytest's loop over the tests."""

    def __init__(
        self, core: Path, work: Path, files: list[str], mutants: list[Mutant], end: float, most: float
    ) -> None:
        self.core, self.work, self.files, self.mutants, self.end = core, work, files, mutants, end
        self.most = most
        self.failed: set[str] = set()
        self.functions = defaultdict[tuple[str, str, int], list[FunctionType]](list)
        self.items: dict[str, pytest.Item] = {}

    def pytest_sessionstart(self) -> None:
        """Let hypothesis try the same examples each time, and not search for small ones."""
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile(
            "mutants", derandomize=True, database=None, deadline=None, phases=phases
        )
        hypothesis.settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember a failure, or a test that was left out."""
        if report.failed or report.skipped:
            self.failed.add(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try the mutants."""
        self.items = {item.nodeid: item for item in session.items}
        for file in self.files:  # some are imported only when they are needed
            importlib.import_module(
                "silodp." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            )
        for thing in gc.get_objects():
            if type(thing) is FunctionType:
                code = thing.__code__
                self.functions[code.co_filename, code.co_qualname, code.co_firstlineno].append(thing)
            elif type(thing) is functools._lru_cache_wrapper:
                thing.cache_clear()
        gc.freeze()
        if not (self.work / "lines.json").exists():
            fork(self.measure, 36000, self.work / "measure.log")
        stored = json.loads((self.work / "lines.json").read_text())
        print(
            f"{len(stored['seconds'])} tests pass; {len(stored['failed'])} fail or are left out", flush=True
        )
        for mutant in self.mutants:
            mutant.tests = choose_tests(mutant, stored["lines"].get(mutant.file, {}), stored["seconds"])
            mutant.outcome = "not tried" if mutant.tests else "not covered"
        left = [mutant for mutant in self.mutants if mutant.tests]
        while left:
            for number, mutant in enumerate(left, 1):
                if time.monotonic() > self.end:
                    break
                self.try_out(mutant, stored["seconds"])
                print(f"{number}/{len(left)}", mutant.outcome, describe(mutant), mutant.killer, flush=True)
            killers = {mutant.killer for mutant in left} - {""}
            alone = {test for test in killers if fork(lambda: self.run([test]), 120, self.work / "log") != 0}  # noqa: B023
            print("fail without a mutant, too; what they killed is tried anew:", alone, flush=True)
            left = [mutant for mutant in left if mutant.killer in alone]
            for mutant in left:
                mutant.tests = [test for test in mutant.tests if test not in alone]
        return True

    def measure(self) -> int:
        """Write which tests run which lines, and the seconds of each test that passes."""
        import coverage  # type: ignore[import-not-found]  # needed here only

        measured = coverage.Coverage(
            data_file=None, include=[str(self.core / name) for name in self.files], config_file=False
        )
        first = {test.split("[")[0]: test for test in reversed(self.items)}  # one case of each test
        turns = Counter[str]()
        order: list[tuple[int, int, str]] = []
        for test in self.items:
            if test in first.values():
                turns[file := test.split("::")[0]] += 1
                order.append((turns[file], len(order), test))
        tests = [test for _, _, test in sorted(order)]  # of each file in turn
        signal.signal(signal.SIGPROF, give_up)
        seconds: dict[str, float] = {}
        measured.start()
        for test, after in zip(tests, [*tests[1:], None], strict=True):
            if sum(seconds.values()) > self.most:
                break
            measured.switch_context(test)
            start = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, LONGEST)
            try:
                self.run([test], after)
            except Exception:  # given up between two phases of the test
                self.failed.add(test)
                self.items[test].session._setupstate.teardown_exact(None)
            signal.setitimer(signal.ITIMER_PROF, 0)
            seconds[test] = time.process_time() - start
        measured.stop()
        data = measured.get_data()
        lines = {
            os.path.relpath(name, self.core): data.contexts_by_lineno(name) for name in data.measured_files()
        }
        seconds = {test: used for test, used in seconds.items() if test not in self.failed}
        out = {"lines": lines, "seconds": seconds, "failed": sorted(self.failed)}
        return not (self.work / "lines.json").write_text(json.dumps(out))

    def run(self, tests: list[str], last: str | None = None) -> int:
        """Run tests until one fails; return whether one failed."""
        for test, after in zip(tests, [*tests[1:], last], strict=True):
            item, following = self.items[test], self.items.get(after or "")
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if test in self.failed:
                (self.work / "killer").write_text(test)
                return 1
        return 0

    def try_out(self, mutant: Mutant, seconds: dict[str, float]) -> None:
        """Put a mutant into the functions of a fork, run its tests there, and note the outcome."""

        def act() -> int:
            found = False
            for code in list_codes(compile_mutant(mutant, self.core / mutant.file)):
                for function in self.functions[code.co_filename, code.co_qualname, code.co_firstlineno]:
                    found |= code != function.__code__
                    function.__code__ = code
            if not found:
                raise LookupError(mutant)
            return self.run(mutant.tests)

        (self.work / "killer").write_text("")
        status = fork(act, 20 + 4 * sum(seconds[test] for test in mutant.tests), self.work / "log")
        mutant.outcome = {None: "timed out", 0: "survived", 1: "killed"}.get(status, "error")
        mutant.killer = (self.work / "killer").read_text()


def describe(mutant: Mutant) -> str:
    """Return what a mutant is, for the reader of a list."""
    return f"{mutant.digest} {mutant.file}:{mutant.line} {mutant.operator}: {mutant.text}"


def print_table(mutants: list[Mutant]) -> None:
    """Print the outcomes by folder."""
    outcomes = ("killed", "timed out", "survived", "not covered", "error", "not tried")
    print(f"{'':24}{'mutants':>9}" + "".join(f"{name:>13}" for name in outcomes) + "    score")
    folders = sorted({mutant.file.split("/")[0] for mutant in mutants})
    for folder in [*folders, "all"]:
        counts = Counter(mutant.outcome for mutant in mutants if folder in (mutant.file.split("/")[0], "all"))
        score = (counts["killed"] + counts["timed out"]) / max(counts.total() - counts["not tried"], 1)
        print(
            f"{folder:24}{counts.total():9}"
            + "".join(f"{counts[name]:13}" for name in outcomes)
            + f"{score:9.1%}"
        )


def main() -> None:
    """Try a sample of mutants of a tree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tree", type=Path, default=Path(__file__).parents[1], help="a checkout (default: this one)"
    )
    parser.add_argument("--sample", type=int, default=300, help="number of mutants (default: 300)")
    parser.add_argument("--work", type=Path, help="a folder that keeps which tests run which lines")
    parser.add_argument(
        "--measure", type=float, default=600, help="CPU seconds of tests that are used (default: 600)"
    )
    parser.add_argument("--minutes", type=float, default=600, help="no mutant is tried later (default: 600)")
    parser.add_argument("--only", nargs="*", help="digests of the mutants to try, in place of the sample")
    parser.add_argument(
        "--compare", type=Path, help="the --json of another tree: the mutants of both are counted, too"
    )
    parser.add_argument("--json", type=Path, help="a file for all outcomes")
    options = parser.parse_args()
    tree, work = options.tree.resolve(), (options.work or Path(tempfile.mkdtemp())).resolve()
    work.mkdir(exist_ok=True)
    compared, out = (path and path.resolve() for path in (options.compare, options.json))
    os.chdir(tree)
    core = next(path for path in (tree / "packages/silodp/src/silodp", tree / "src/silodp") if path.exists())
    files = sorted(str(path.relative_to(core)) for pattern in FILES for path in core.glob(pattern))
    mutants = [each for file in files for each in find_mutants(file, (core / file).read_text())]
    mutants.sort(key=lambda each: each.digest)
    chosen = (
        [each for each in mutants if each.digest in options.only]
        if options.only
        else mutants[: options.sample]
    )
    print(f"{len(chosen)} of {len(mutants)} mutants", flush=True)
    roots = [*sorted(tree.glob("packages/*/tests")), tree / "tests"]
    tests = [str(root / name) for root in roots for name in TESTS if (root / name).exists()]
    plain = [
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-s",
        "--tb=native",
        "--timeout=60",
        f"--basetemp={work}/tests",
    ]
    pytest.main(
        [*tests, *plain],
        plugins=[Trial(core, work, files, chosen, time.monotonic() + 60 * options.minutes, options.measure)],
    )
    if out:
        out.write_text(json.dumps([asdict(each) | {"path": None, "lines": None} for each in chosen]))
    print_table(chosen)
    if compared:
        common = {each["digest"] for each in json.loads(compared.read_text())}
        print("mutants of both trees:")
        print_table([each for each in chosen if each.digest in common])
    for outcome in ("not covered", "survived"):
        for each in chosen:
            if each.outcome == outcome:
                print(outcome, describe(each))


if __name__ == "__main__":
    main()
