"""The report of a run: the guarantee in plain words first, then pictures; one file, no network.

Everything is rebuilt from the files of the run directory alone, so `silodp report DIR` gives the same text.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray

from silodp.app import plots
from silodp.errors import SilodpError
from silodp.privacy.guarantee import ADVERSARIES, Adversary, Guarantee

Row = dict[str, Any]

MOST_ROWS = 26  # of the table of rounds; metrics.jsonl has them all
_NEARLY_SURE = 0.999  # a guess this good against a person: ε excludes little

_WHO_THEY_ARE: dict[Adversary, tuple[str, str]] = {
    "released": ("Whoever sees the models", "every global model of every round, the last one included"),
    "server": ("The server", "all that reaches the party that coordinates the run"),
    "silo": ("Another silo", "the models, and what that silo itself put in; for records in the other silos"),
}


@dataclass(frozen=True)
class Picture:
    """A figure on a page: its SVG element, and what stands under it."""

    svg: Markup
    caption: str


@dataclass(frozen=True)
class RunRecord:
    """What a finished run left in its directory."""

    rows: tuple[Row, ...]
    summary: dict[str, Any]
    guarantees: dict[Adversary, Guarantee]
    config: str | None
    model_digest: str | None
    allocation: plots.Allocation | None


def write_report(
    directory: str | Path, allocation: NDArray[np.int64] | None = None, silo_names: Sequence[str] = ()
) -> Path:
    """Write DIR/report.html and DIR/plots/*.svg from the files in DIR; the path of the report.

    Args:
        directory: of a finished run.
        allocation: records of every person in every silo, (S, U), private. It is kept, ranked and without
            ids, in DIR/plots/allocation.json; without it a picture is drawn only if that file is there.
        silo_names: S names, for `allocation`.

    Raises:
        SilodpError: a file is missing or damaged.
    """
    directory = Path(directory)
    if allocation is not None:
        _keep_allocation(directory, plots.Allocation.of(np.asarray(allocation), silo_names))
    run = read_run(directory)
    pictures = _Pictures(directory)
    released = run.guarantees["released"]
    utility = [
        pictures.add(f"utility-{i}-{_slug(name)}", figure, _utility_caption(run.rows, name))
        for i, (name, figure) in enumerate(plots.utility(run.rows).items())
    ]
    figure = plots.epsilon(run.rows)
    page = render(
        "report.html",
        run=run,
        released=released,
        private=[g for g in run.guarantees.values() if g.private],
        seeded=any(g.private and not g.releasable for g in run.guarantees.values()),
        adversaries=[(*_WHO_THEY_ARE[a], run.guarantees[a]) for a in ADVERSARIES],
        assumptions=_assumptions(run.guarantees),
        ends=_ends(run.rows),
        utility=utility,
        epsilon=figure and pictures.add("epsilon", figure, _epsilon_caption(run)),
        allocation=run.allocation
        and pictures.add("allocation", plots.allocation(run.allocation), _allocation_caption(run.allocation)),
        table=_table(run.rows),
        refused=_refused(run.rows),
        seconds=sum(plots.number(row.get("seconds")) or 0.0 for row in run.rows),
    )
    pictures.finish()
    path = directory / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def read_run(directory: Path) -> RunRecord:
    """The files of a finished run.

    Raises:
        SilodpError: one that is needed is missing or damaged.
    """
    if not directory.is_dir():
        raise SilodpError(
            f"run directory {directory} does not exist: name the directory that `silodp run` wrote."
        )
    rows = _read_rows(directory / "metrics.jsonl")
    summary = _read_json(directory / "guarantee.json")
    try:
        found = [Guarantee.from_dict(fields) for fields in summary["guarantees"]]
        guarantees = {guarantee.adversary: guarantee for guarantee in found}
        ordered = {adversary: guarantees[adversary] for adversary in ADVERSARIES}
    except (KeyError, TypeError, AttributeError):
        raise SilodpError(
            f"{directory / 'guarantee.json'} does not hold a guarantee for each adversary: "
            "restore it, or run again."
        ) from None
    config, model = directory / "config.toml", directory / "model.safetensors"
    kept = directory / "plots" / "allocation.json"
    return RunRecord(
        rows=rows,
        summary=summary,
        guarantees=ordered,
        config=config.read_text(encoding="utf-8", errors="replace") if config.exists() else None,
        model_digest=hashlib.sha256(model.read_bytes()).hexdigest() if model.exists() else None,
        allocation=_read_allocation(kept) if kept.exists() else None,
    )


def render(template: str, **values: Any) -> str:
    """A page from a template beside this module; every value is escaped unless it is our own SVG."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"epsilon": epsilon_text, "measure": measure_text, "duration": duration_text}
    environment.filters |= {"odds": odds_text, "guess": guess_text, "times": times_text, "vague": _is_vague}
    environment.filters["delta"] = delta_text
    return environment.get_template(template).render(**values)


def epsilon_text(epsilon: float | None) -> str:
    """ε rounded up, never down: three figures, at least two decimals below 100; "none" for no guarantee."""
    value = plots.number(epsilon)
    if value is None:
        return "none"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(value))) if value < 1 else 2 if value < 100 else 0
    step = 10.0**-digits
    rounded = math.ceil(value / step - 1e-9) * step
    return f"{rounded:,.{digits}f}"


def times_text(epsilon: float) -> str:
    """e^ε in words, rounded up."""
    if epsilon > math.log(1e6):
        return "more than a million"
    factor = math.exp(epsilon)
    return f"{math.ceil(factor * 100) / 100:.2f}" if factor < 10 else f"{math.ceil(factor):,}"


def guess_text(epsilon: float, delta: float = 0.0) -> str:
    """How often one who starts from 50:50 is right at most, in percent, rounded up: (e^ε + δ)/(1 + e^ε)."""
    wrong = (1 - delta) / (1 + math.exp(min(epsilon, 700.0)))
    percent = 100 * (1 - wrong)
    if percent > 99.99:
        return "nearly 100 %"
    digits = 1 if percent < 99 else 2
    return f"{math.ceil(percent * 10**digits) / 10**digits:.{digits}f} %"


def delta_text(delta: float) -> str:
    """δ with all its zeros as long as they can be counted."""
    return f"{delta:.9f}".rstrip("0") if delta >= 1e-6 else f"{delta:g}"


def odds_text(delta: float) -> str:
    """δ as "1 in N", N rounded down."""
    return f"1 in {math.floor(1 / delta + 1e-6):,}"


def measure_text(value: float | None) -> str:
    """A loss or a metric, four figures."""
    return "–" if value is None else f"{value:.4g}"


def duration_text(seconds: float) -> str:
    """Seconds as one would say them."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class _Pictures:
    """Saves figures under DIR/plots and gives their inline twins; an earlier report's do not stay behind."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / "plots"
        self._folder.mkdir(exist_ok=True)
        self._names: set[str] = set()

    def add(self, name: str, figure: Any, caption: str) -> Picture:
        document = plots.svg(figure, name)
        (self._folder / f"{name}.svg").write_text(document, encoding="utf-8")
        self._names.add(name)
        return Picture(Markup(plots.inline(document, caption)), caption)

    def finish(self) -> None:
        for path in self._folder.glob("*.svg"):
            if path.stem not in self._names and path.stem.startswith(("utility", "epsilon", "allocation")):
                path.unlink()


def _is_vague(epsilon: float) -> bool:
    """Whether this ε lets a 50:50 guess become nearly certain."""
    return epsilon > math.log(_NEARLY_SURE / (1 - _NEARLY_SURE))


def _assumptions(
    guarantees: Mapping[Adversary, Guarantee],
) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Those of every guarantee, then the others by adversary."""
    private = [g for g in guarantees.values() if g.private]
    shared = (
        [text for text in private[0].assumptions if all(text in g.assumptions for g in private)]
        if private
        else []
    )
    own = [(_WHO_THEY_ARE[g.adversary][0], [a for a in g.assumptions if a not in shared]) for g in private]
    return shared, [(who, texts) for who, texts in own if texts]


def _ends(rows: Sequence[Row]) -> list[tuple[str, float | None, float, int]]:
    """Of each quantity: name, value of the untrained model, last value and its round."""
    ends = []
    for name in plots.quantities(rows):
        seen = [(row["round"], value) for row in rows if (value := plots.measured(row, name)) is not None]
        untrained = seen[0][1] if seen[0][0] == 0 else None
        ends.append((name, untrained, seen[-1][1], seen[-1][0]))
    return ends


def _utility_caption(rows: Sequence[Row], name: str) -> str:
    _, untrained, last, round_ = next(end for end in _ends(rows) if end[0] == name)
    start = (
        f"; untrained (hollow mark, dotted level): {measure_text(untrained)}" if untrained is not None else ""
    )
    return f"{name} on held-out records: {measure_text(last)} after round {round_}{start}."


def _epsilon_caption(run: RunRecord) -> str:
    parts = [
        f"towards {plots.WHO[a]} {epsilon_text(g.epsilon)}"
        if g.private
        else f"towards {plots.WHO[a]} no guarantee"
        for a, g in run.guarantees.items()
    ]
    return f"ε spent by the end of the run: {', '.join(parts)}."


def _allocation_caption(records: plots.Allocation) -> str:
    drawn = records.persons - records.without_records
    several = f"{records.in_several_silos:,} of {drawn:,} persons with records have them in several silos"
    empty = f"; {records.without_records:,} without any" if records.without_records else ""
    binned = ""
    if drawn > len(records.persons_per_bar):
        binned = (
            f" Drawn in {len(records.persons_per_bar)} steps of about {max(records.persons_per_bar)} persons "
            "of neighboring rank, each step their average."
        )
    return f"{several}{empty}. The most records of one person: {records.most_records:,}.{binned}"


def _table(rows: Sequence[Row]) -> list[Row]:
    """First, last and evenly spread rows between."""
    if len(rows) <= MOST_ROWS:
        return list(rows)
    return [rows[i] for i in np.linspace(0, len(rows) - 1, MOST_ROWS).round().astype(int)]


def _refused(rows: Sequence[Row]) -> dict[str, int]:
    """Updates left out because they were not finite, by silo, over the whole run."""
    total: dict[str, int] = {}
    for row in rows:
        for name, count in (row.get("refused") or {}).items():
            total[name] = total.get(name, 0) + int(count)
    return total


def _keep_allocation(directory: Path, records: plots.Allocation) -> None:
    if not directory.is_dir():
        raise SilodpError(
            f"run directory {directory} does not exist: name the directory that `silodp run` wrote."
        )
    (directory / "plots").mkdir(exist_ok=True)
    text = json.dumps(asdict(records), ensure_ascii=False)
    (directory / "plots" / "allocation.json").write_text(text + "\n", encoding="utf-8")


def _read_allocation(path: Path) -> plots.Allocation:
    fields = _read_json(path)
    try:
        lists = {
            "silos": tuple(str(name) for name in fields["silos"]),
            "bars": tuple(tuple(float(value) for value in row) for row in fields["bars"]),
            "persons_per_bar": tuple(int(value) for value in fields["persons_per_bar"]),
        }
        records = plots.Allocation(**{**fields, **lists})
        if len(records.bars) != len(records.silos) or any(
            len(row) != len(records.persons_per_bar) for row in records.bars
        ):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise SilodpError(
            f"{path} is damaged: delete it and the report is written without that picture."
        ) from None
    return records


def _read_rows(path: Path) -> tuple[Row, ...]:
    rows = []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        try:
            row = json.loads(line)
            row["round"] = int(row["round"])
        except (ValueError, TypeError, KeyError):
            raise SilodpError(
                f"{path}: line {number} is not a round's record; resume the run, or restore the file."
            ) from None
        rows.append(row)
    if not rows:
        raise SilodpError(f"{path} is empty: there is no round to report on; run again.")
    return tuple(rows)


def _read_json(path: Path) -> dict[str, Any]:
    text = _read(path)
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise SilodpError(f"{path} is damaged (it is not a JSON object): restore it, or run again.")
    return fields


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SilodpError(
            f"{path} is missing: the run has not ended, or this is no run directory; resume the run or name "
            "another directory."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SilodpError(f"{path} cannot be read ({error}): restore it, or run again.") from None


def _slug(name: str) -> str:
    """Fit for a file name."""
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name.lower())[:40]


__all__ = ["Picture", "RunRecord", "read_run", "render", "write_report"]
