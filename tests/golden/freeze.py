"""Compute what the golden files hold, from public entry points only: commands, configurations, stored files, the wire.

Usage: python tests/golden/freeze.py --write [PART ...]     PART: runs, epsilon, plans, errors
       python tests/golden/freeze.py --show PART CASE       everything that the digests of a case are computed from

Stored are digests and a few numbers. Everything is computed twice; what differs between both, because it comes from
secret keys, is not compared: the places of those are stored once for all cases that have the same ones.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import math
import platform
import re
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cases
import numpy as np
import tomli_w
from safetensors.numpy import load

HERE = Path(__file__).parent
RANDOM = "~"
TRANSPORT = "InProcess"
"""The class that carries signed bytes in one process; the one name from inside the package."""


# --- the commands ---


def _entry_point() -> Callable[[list[str]], None]:
    """What the program `silodp` runs, as pyproject.toml says."""
    project = tomllib.loads((HERE.parents[1] / "packages/silodp/pyproject.toml").read_text())
    module, name = project["project"]["scripts"]["silodp"].split(":")
    return getattr(importlib.import_module(module), name)


def silodp(*arguments: object) -> tuple[int, str]:
    """Exit status and standard output of a command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            _entry_point()([str(argument) for argument in arguments])
            status = 0
        except SystemExit as left:
            status = int(left.code or 0)
    return status, out.getvalue()


def answer(*arguments: object) -> Any:
    """The object that a command prints with --json; an error is an answer, too."""
    status, out = silodp(*arguments, "--json")
    if status:
        return {"status": status, "error": code_of(out)}
    return numbers_in(json.loads(out))


def code_of(out: str) -> str:
    error = json.loads(out)["error"]
    return f"{error['code']} @ {error['field']}"


# --- what is kept of an answer ---

PROSE = frozenset(
    ("assumptions", "not_covered", "in_words", "beyond", "warnings", "remarks", "why", "reason", "note")
)
NAMELESS = frozenset(
    (
        "settings",
        "run",
        "starts",
        "finished",
        "out",
        "report",
        "hash",
        "previous",
        "seconds",
        "plot",
        "message",
    )
)


def numbers_in(value: Any) -> Any:
    """A JSON value without prose, reprs, paths, times and random ids; of a sentence only that there is one."""
    if isinstance(value, Mapping):
        kept = {key: numbers_in(inner) for key, inner in value.items() if key not in PROSE | NAMELESS}
        return kept | {f"has {key}": bool(value[key]) for key in PROSE & value.keys() if key == "reason"}
    if isinstance(value, list):
        return [numbers_in(inner) for inner in value]
    if isinstance(value, str):
        return "(text)" if " " in value else value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def sha(data: bytes, digits: int = 12) -> str:
    return hashlib.sha256(data).hexdigest()[:digits]


def about(array: np.ndarray) -> dict[str, Any]:
    """What is compared of numbers: with a tolerance everywhere, and bit by bit where the platform is the same."""
    flat = array.astype(np.float64).ravel()
    return {
        "shape": list(array.shape),
        "norm": float(np.linalg.norm(flat)),
        "projection": float(flat @ np.cos(np.arange(len(flat)))),
        "first": [float(x) for x in flat[:4]],
        "bits": sha(np.ascontiguousarray(array).tobytes()),
    }


# --- the wire ---


@contextlib.contextmanager
def wire() -> Iterator[list[tuple[str, str, bytes]]]:
    """Record what a transport carries inside: direction, silo, bytes. This function alone knows what it is called."""
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "silodp"]
    found = next((vars(module)[TRANSPORT] for module in modules if TRANSPORT in vars(module)), None)
    if found is None:
        raise LookupError(
            f"no class {TRANSPORT} in silodp: say in {__file__} what carries messages in one process."
        )
    seen: list[tuple[str, str, bytes]] = []
    ask = found.ask

    def recorded(self: Any, requests: Mapping[str, bytes], *more: Any, **named: Any) -> Any:
        seen.extend((">", name, request) for name, request in requests.items())
        answers, failures = ask(self, requests, *more, **named)
        seen.extend(("<", name, given) for name, given in answers.items())
        seen.extend(("!", name, b"") for name in failures)
        return answers, failures

    found.ask = recorded
    try:
        yield seen
    finally:
        found.ask = ask


SIGNED = 8 + 64
"""Bytes of marker and signature before a message."""


def message_of(direction: str, data: bytes) -> dict[str, Any]:
    """What is frozen of a message; decoded here, so that the encoding on the wire is frozen with it."""
    if not data:
        return {"what": direction}
    length = int.from_bytes(data[SIGNED : SIGNED + 8], "little")
    entries = json.loads(data[SIGNED + 8 : SIGNED + 8 + length])
    header = json.loads(entries.pop("__metadata__")["message"])
    arrays = load(data[SIGNED:])
    layout = [f"{name}:{entry['dtype']}{entry['shape']}" for name, entry in sorted(entries.items())]
    if len(layout) > 12:
        layout = [*layout[:6], f"and {len(layout) - 6} more ({sha(json.dumps(layout).encode())})"]
    floats = {name: a for name, a in sorted(arrays.items()) if a.dtype.kind == "f"}
    whole = {name: a for name, a in sorted(arrays.items()) if a.dtype.kind != "f"}
    found = {
        "what": f"{data[:8].decode()} {direction} {header['kind']} {header['round']}.{header['attempt']} "
        + " ".join([*sorted(header["fields"]), *layout]).replace(", ", ","),
        "size": len(data),
        "fields": header["fields"],
        "norms": {name: float(np.linalg.norm(a.astype(np.float64))) for name, a in floats.items()},
        "bits": sha(b"".join(a.tobytes() for a in floats.values())) if floats else None,
        "whole": {name: sha(a.tobytes(), 8) for name, a in whole.items()},
    }
    if len(whole) > 12:
        found["whole"] = sha(json.dumps(found["whole"]).encode())
    return {key: value for key, value in found.items() if value not in (None, {}, [])}


def messages_of(seen: list[tuple[str, str, bytes]]) -> list[dict[str, Any]]:
    """Messages in order; those of several silos that differ in their content only are one entry, with a list each."""
    groups: list[tuple[str, list[str], list[dict[str, Any]]]] = []
    for direction, name, data in seen:
        message = message_of(direction, data)
        if groups and groups[-1][0] == message["what"]:
            groups[-1][1].append(name)
            groups[-1][2].append(message)
        else:
            groups.append((message["what"], [name], [message]))
    return [{"what": what, "silos": ",".join(names), **_merged(of)} for what, names, of in groups]


def _merged(messages: list[dict[str, Any]]) -> dict[str, Any]:
    keys = [key for key in messages[0] if key != "what"]
    found = {}
    for key in keys:
        values = [message.get(key) for message in messages]
        found[key] = values[0] if all(value == values[0] for value in values) else values
    return found


# --- runs ---


ABOUT = ("kind", "round", "release", "request")
"""What a line says of a charge beside its events."""


def ledger_of(path: Path) -> dict[str, Any]:
    """A ledger's first line, and its charges; neighbors with the same events are one entry."""
    head, *lines = (json.loads(line) for line in path.read_text().splitlines())
    charges: list[dict[str, Any]] = []
    for line in lines:
        if "events" not in line:  # starts, completed rounds, answers, digests of files
            continue
        at = [line["round"], line["release"]]
        events = numbers_in({key: value for key, value in line.items() if key not in ABOUT})
        if charges and charges[-1]["line"] == events:
            charges[-1]["at"].append(at)
        else:
            charges.append({"line": events, "at": [at]})
    return {"head": numbers_in(head), "charges": charges}


def books_of(directory: Path, charges: Any) -> list[Any]:
    """The ledgers of the silos, with the server's charges; neighbors that are equal are one entry, with places."""
    found: list[dict[str, Any]] = []
    for place, path in enumerate(sorted(directory.glob("checkpoint/silo_ledgers/*.jsonl"))):
        book = ledger_of(path)
        if book["charges"] == charges:
            book["charges"] = "as the server's"
        if found and found[-1]["book"] == book:
            found[-1]["silos"].append(place)
        else:
            found.append({"book": book, "silos": [place]})
    return found


def columns(rows: list[Any]) -> Any:
    """Rows of equal kind as one entry for each column: the value where all are equal, else a list of them."""
    if rows and all(row == rows[0] for row in rows):
        return rows[0]
    if not all(isinstance(row, dict) for row in rows):
        return rows
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: columns([row.get(key, "(no entry)") for row in rows]) for key in keys}


def rows_of(directory: Path) -> Any:
    """The rows of metrics.jsonl, as columns."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return {"rows": len(lines), **columns([numbers_in(json.loads(line)) for line in lines])}


def guarantee_of(directory: Path) -> dict[str, Any]:
    """guarantee.json; what is said against each adversary as columns."""
    found = numbers_in(json.loads((directory / "guarantee.json").read_text()))
    return {**found, "guarantees": columns(found["guarantees"])}


def model_of(directory: Path) -> dict[str, Any]:
    """Names and numbers of the final model."""
    tensors = load((directory / "model.safetensors").read_bytes())
    return {name: about(tensor) for name, tensor in sorted(tensors.items())}


def kept_of(directory: Path) -> dict[str, Any]:
    """What a run left in its directory."""
    ledger = ledger_of(directory / "checkpoint" / "ledger.jsonl")
    return {
        "guarantee": guarantee_of(directory),
        "metrics": rows_of(directory),
        "ledger": ledger,
        "silo ledgers": books_of(directory, ledger["charges"]),
        "model": model_of(directory),
    }


@contextlib.contextmanager
def workplace(config: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """A folder with the clinics' tables and, where one is given, config.toml."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, clinic in enumerate(cases.CLINICS):
            (folder / f"{clinic}.csv").write_text("\n".join(cases.rows_of(number)) + "\n")
        if config is not None:
            (folder / "config.toml").write_text(tomli_w.dumps(config))
        yield folder


SUMMARY = frozenset(("stopped", "loss", "epsilon", "private", "releasable", "attacks", "persons_by_silos"))
"""What is kept of the summary that a run prints; its guarantees and metrics are those in the directory."""


def played(name: str) -> dict[str, Any]:
    """A run, from its configuration to what it leaves."""
    importlib.import_module("silodp").train  # noqa: B018  loads what carries messages
    with workplace(cases.CONFIGS[name]) as folder, wire() as seen:
        status, out = silodp("run", folder / "config.toml", "--out", folder / "out", "--json")
        if status:
            return {"error": code_of(out)}
        summary = {key: numbers_in(value) for key, value in json.loads(out).items() if key in SUMMARY}
        return {"summary": summary, **kept_of(folder / "out"), "wire": messages_of(seen)}


# --- the other commands ---


def planned(name: str) -> Any:
    config, more = cases.PLANS[name]
    with workplace(config) as folder:
        return answer("plan", folder / "config.toml", *more)


def mistaken(name: str) -> str:
    """Status, code and field of a mistake."""
    command, config, more = cases.MISTAKES[name]
    with workplace(config) as folder, contextlib.chdir(folder):
        arguments = [command] if config is None else [command, "config.toml"]
        if config is not None and command != "plan":
            arguments += ["--out", "out"]
        status, out = silodp(*arguments, *more, "--json")
        return f"{status} {code_of(out)}" if status else "no error"


# --- comparing ---


def platform_here() -> dict[str, str]:
    """Where equal bits may be expected."""
    cpuinfo = Path("/proc/cpuinfo")
    found = dict(re.findall(r"^([\w ]+?)\s*: (.+)$", cpuinfo.read_text(), re.M)) if cpuinfo.exists() else {}
    vectors = [flag for flag in found.get("flags", "").split() if flag.startswith(("avx", "fma", "amx"))]
    # "AMD EPYC" is the name of several generations, whose caches decide how kernels split their sums.
    kind = [found.get(name, "") for name in ("cpu family", "model", "stepping", "cache size")]
    packages = ("torch", "numpy", "scipy", "dp-accounting", "scikit-learn", "randomgen")
    return {
        "cpu": " ".join([found.get("model name", platform.processor()), *kind]),
        "vectors": sha(" ".join(sorted(vectors)).encode()),
        **{package: version(package) for package in packages},
    }


LOOSE = frozenset(("loss", "projection", "model"))
"""Numbers that training makes: they differ a little between versions of torch and kinds of CPUs."""
NUMBERS = ("epsilon", "loss", "projection", "model")
"""The keys of numbers that are stored; of all others only digests are."""
MOST = 3
"""How many numbers are stored of a case."""


def condensed(part: str, case: Any) -> Any:
    """What is stored of a case: digests and a few numbers; what is no object is stored as it is.

    The first digest of a section is of everything in it, the second of everything but the values of floats.
    """
    if not isinstance(case, dict):
        return case
    sections = case if part == "runs" else {"all": case}
    numbers = dict(numbers_of(case))
    spread = max(1, math.ceil(len(numbers) / MOST))
    digests = {name: f"{digest(value)} {digest(without_floats(value))}" for name, value in sections.items()}
    return {"digests": digests, **dict(list(numbers.items())[::spread])}


def digest(value: Any) -> str:
    return sha(json.dumps(value, sort_keys=True).encode(), 6)


def without_floats(value: Any, key: str = "") -> Any:
    """A value with floats, and the digests and pages that are made from them, replaced by their kind."""
    if isinstance(value, dict):
        return {key: without_floats(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_floats(inner, key) for inner in value]
    if key == "bits" or isinstance(value, float):
        return "float"
    return value


def numbers_of(value: Any, path: str = "", key: str = "") -> Iterator[tuple[str, float]]:
    """The floats under the keys that are stored, by their paths; those of a list have its place in the path."""
    if isinstance(value, dict | list):
        entries = sorted(value.items()) if isinstance(value, dict) else enumerate(value)
        for name, inner in entries:
            inside = key if isinstance(name, int) or key in NUMBERS else name
            yield from numbers_of(inner, f"{path}/{name}" if path else str(name), inside)
    elif isinstance(value, float) and key in NUMBERS:
        yield path, float(f"{value:.12g}")


def differences(golden: Any, now: Any, same_platform: bool) -> Iterator[str]:
    """Where two condensed cases differ."""
    if not isinstance(golden, dict) or not isinstance(now, dict):
        if golden != now:
            yield f"{now!r}, golden {golden!r}"
        return
    digests = golden["digests"]
    numbers = {name: value for name, value in golden.items() if isinstance(value, float)}
    for name in sorted(digests.keys() ^ now["digests"].keys()):
        yield f"{name} {'is missing' if name in digests else 'is new'}"
    for name in sorted(digests.keys() & now["digests"].keys()):
        pairs = list(zip(digests[name].split(), now["digests"][name].split(), strict=True))
        if pairs[1][0] != pairs[1][1]:
            yield f"{name}: not only the values of floats differ"
        elif same_platform and pairs[0][0] != pairs[0][1]:
            yield f"{name}: values of floats differ"
    for name, number in numbers.items():
        other = now.get(name)
        if other is None or not _are_close(number, other, name):
            yield f"{name}: {other!r}, golden {number!r}"


def _are_close(golden: float, now: float, path: str) -> bool:
    if LOOSE & set(path.split("/")):
        return math.isclose(golden, now, rel_tol=1e-4, abs_tol=1e-4)
    tolerance = 1e-7 if "levels" in path.split("/") else 1e-9  # a fitted curve's levels are roots of a search
    return math.isclose(golden, now, rel_tol=tolerance, abs_tol=1e-15)


def without_random(one: Any, other: Any) -> Any:
    """What two computations agree on, and "~" for the rest."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        found = {key: without_random(one[key], other[key]) for key in one}
        return RANDOM if found and set(map(str, found.values())) == {RANDOM} else found
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        both = [without_random(*pair) for pair in zip(one, other, strict=True)]
        return RANDOM if both and set(map(str, both)) == {RANDOM} else both
    return one if type(one) is type(other) and one == other else RANDOM


def random_in(value: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Where a value is not compared. Entries of a list have the path of the list; messages, that of their kind."""
    if value == RANDOM:
        yield "/".join(path)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from random_in(inner, (*path, key))
    elif isinstance(value, list):
        for inner in value:
            yield from random_in(inner, (*path, *_kind(inner)))


def masked(value: Any, random: frozenset[str], path: tuple[str, ...] = ()) -> Any:
    """A value, with "~" at the places that are not compared."""
    if "/".join(path) in random:
        return RANDOM
    if isinstance(value, dict):
        return {key: masked(inner, random, (*path, key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [masked(inner, random, (*path, *_kind(inner))) for inner in value]
    return value


def _kind(value: Any) -> tuple[str, ...]:
    """Direction and kind of a message on the wire."""
    what = value.get("what") if isinstance(value, dict) else None
    return (" ".join(what.split()[2:4]),) if what else ()


# --- the parts ---

PARTS: dict[str, tuple[tuple[str, ...], Callable[[str], Any]]] = {
    "runs": (cases.RUNS, played),
    "epsilon": (tuple(cases.QUESTIONS), lambda name: answer("epsilon", *cases.QUESTIONS[name])),
    "plans": (tuple(cases.PLANS), planned),
    "errors": (tuple(cases.MISTAKES), mistaken),
}


def check(part: str, name: str, bits: bool = True) -> None:
    """Recompute a case and compare it with its golden file.

    Raises:
        AssertionError: something has changed; it says so where only the last bits of numbers have.
    """
    golden = goldens(part)
    case = golden["cases"][name]
    random = frozenset(golden["random"][case["random"]]) if "random" in case else frozenset()
    now = condensed(part, masked(json.loads(json.dumps(PARTS[part][1](name))), random))
    same = bits and golden["platform"] == platform_here()
    found = list(differences(case, now, same))
    if not found:
        return
    close = same and not list(differences(case, now, same_platform=False))
    noise = [
        "the stored numbers agree within the tolerance, only bits differ (SILODP_GOLDEN=close passes over that)"
    ]
    hint = f"For every value: python tests/golden/freeze.py --show {part} {name!r}; compare with an earlier commit's."
    raise AssertionError("\n".join([*(noise if close else ()), *found[:40], hint]))


def goldens(part: str) -> dict[str, Any]:
    return json.loads((HERE / f"{part}.json").read_text(encoding="utf-8"))


def frozen(part: str, name: str, sets: list[list[str]]) -> Any:
    """What is stored of a case, computed twice; the places that differ are put into `sets`, once for equal sets."""
    compute = PARTS[part][1]
    both = without_random(*(json.loads(json.dumps(compute(name))) for _ in range(2)))
    random = sorted(set(random_in(both)))
    found = condensed(part, masked(both, frozenset(random)))
    if random:
        if random not in sets:
            sets.append(random)
        found = {"random": sets.index(random), **found}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="the golden files of these parts, or of all")
    what.add_argument(
        "--show", nargs=2, metavar=("PART", "CASE"), help="everything that a case is computed from"
    )
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="cases whose names hold it; the others are kept"
    )
    parser.add_argument("parts", nargs="*")
    options = parser.parse_args()
    if options.show:
        part, name = options.show
        print(written(json.loads(json.dumps(PARTS[part][1](name)))))
    for part in (options.parts or PARTS) if options.write else ():
        names, before = PARTS[part][0], goldens(part) if options.only else {"random": [], "cases": {}}
        found, sets = before["cases"], before["random"]
        for name in (name for name in names if options.only in name):
            found[name] = frozen(part, name, sets)
            print(part, name, found[name], flush=True)
        text = written({"platform": platform_here(), "random": sets, "cases": found})
        (HERE / f"{part}.json").write_text(text + "\n", encoding="utf-8")


def written(value: Any, depth: int = 0, wide: int = 150) -> str:
    """JSON with short values on one line, so that a change is a short diff."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(line) + depth <= wide:
        return line
    pad = " " * (depth + 1)
    if isinstance(value, dict):
        inner = [f"{json.dumps(k, ensure_ascii=False)}: {written(v, depth + 1)}" for k, v in value.items()]
    else:
        inner = [written(v, depth + 1) for v in value]
    ends = "{}" if isinstance(value, dict) else "[]"
    return ends[0] + "\n" + ",\n".join(pad + text for text in inner) + "\n" + " " * depth + ends[1]


if __name__ == "__main__":
    main()
