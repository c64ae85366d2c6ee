"""`silodp compare`: several methods on the same data, each with several seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from silodp.cli._console import (
    Cluster,
    Config,
    GpusPerWorker,
    Interrupted,
    Json,
    Set,
    WorkerCount,
    log,
    make_workers,
    out_option,
    redirect_prints,
    show,
)


def compare(
    config: Config,
    methods: Annotated[
        str,
        typer.Option(
            help="Methods to compare, with settings after colons, for example "
            "uldp-avg,uldp-avg:weighting=records,uldp-group:k=8.",
            show_envvar=False,
        ),
    ],
    seeds: Annotated[int, typer.Option(help="Runs of each method.")] = 5,
    set_: Set = None,
    out: Annotated[Path | None, out_option("runs/NAME-compare, by the name of the configuration")] = None,
    workers: WorkerCount = None,
    cluster: Cluster = None,
    gpus_per_worker: GpusPerWorker = None,
    as_json: Json = False,
) -> None:
    """Train several methods and compare them. Results and ε on the same data, mean ± sd over seeds."""
    # Imported here, as everywhere in the command line: `silodp --help` must not wait for numpy.
    from silodp.config.resolve import load_config
    from silodp.settings import Whole

    resolved = load_config(config, set_ or ())
    Whole(what="runs per method").check("seeds", seeds)
    resolved.dataset.check_files(resolved.arguments)
    from silodp_experiments.method_specs import parse_methods

    specs = parse_methods(resolved, methods)
    from silodp_experiments.compare import compare_methods
    from silodp_experiments.compare_page import format_table

    directory = out or Path("runs") / f"{resolved.config.name}-compare"
    found = make_workers(workers, cluster, gpus_per_worker)
    try:
        with redirect_prints():
            result = compare_methods(resolved, specs, seeds, directory, log, found)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; the same command continues after the last finished run") from None
    show(result, as_json, [format_table(result), f"Report: {directory / 'compare.html'}"])
