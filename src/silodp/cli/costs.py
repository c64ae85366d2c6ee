"""`silodp plan` and `silodp epsilon`: what a run costs, before anything is run."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Annotated, Any

import typer

from silodp.cli._options import Config, Json, Set, show
from silodp.errors import counted

Users = Annotated[
    int | None,
    typer.Option(help="U, how many persons there are; needed to plan room for sums, not for ε."),
]


def plan(
    config: Config,
    target_epsilon: Annotated[
        float | None,
        typer.Option(
            help="Find the noise multiplier σ, the rounds T and the sampling probability q that each meet this ε."
        ),
    ] = None,
    users: Users = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw ε against q for several σ (svg, pdf or png)."),
    ] = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Compute what a run will cost. ε against every adversary, and the bytes; no data are read."""
    from silodp.config.budgets import budget_unit
    from silodp.config.public_spec import build_public_spec
    from silodp.config.schema import load_config
    from silodp.planning.epsilon import remarks_on_delta
    from silodp.planning.plan import format_text
    from silodp.planning.plan import plan_run as plan_

    settings = load_config(config, set_ or ())
    spec, assumed = build_public_spec(settings, users)
    result = plan_(
        spec,
        accountant=settings.build_accountant(),
        target=target_epsilon,
        own=settings.preferences(),
        picture=plot,
    )
    lines = format_text(result)
    if plot is not None:
        lines.append(f"picture: {plot}")
    if assumed and settings.method().unit != "record":
        lines.append(
            f"  (U is counted in the data, which were not read: {spec.population.users:,} stands in; see --users)"
        )
    if settings.preferences() is None and budget_unit(settings.method()) is not None:
        lines.append(
            "  (budgets are in the tables, which were not read: ε is that of the largest that is allowed)"
        )
    private = any(found["private"] for found in result["adversaries"].values())
    remarks = remarks_on_delta(settings.delta, None if assumed else spec.population.users) if private else ()
    lines += [f"  ({remark})" for remark in remarks]
    picture = None if plot is None else str(plot)
    about = {"users_assumed": assumed, "remarks": list(remarks), "plot": picture}
    show({"name": settings.name, **result, **about}, as_json, lines)


def epsilon(
    method: Annotated[
        str,
        typer.Option(
            help="uldp-avg, uldp-sgd, uldp-group, uldp-naive, rpdp, rpdp-minimum, rpdp-dropout, rpdp-filter, ddp or "
            "default.",
            show_envvar=False,
        ),
    ],
    rounds: Annotated[int, typer.Option(help="T, rounds of training.", show_envvar=False)],
    noise_multiplier: Annotated[
        float | None, typer.Option(help="σ: standard deviation of the noise over the sensitivity.")
    ] = None,
    delta: Annotated[float, typer.Option(help="δ.")] = 1e-5,
    user_sampling: Annotated[float | None, typer.Option(help="q, per person and round.")] = None,
    group_size: Annotated[int | None, typer.Option(help="k, for uldp-group.")] = None,
    record_sampling: Annotated[
        float | None, typer.Option(help="q (γ), per record and step, for uldp-group, rpdp and ddp.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--local-steps", "--steps", help="DP-SGD steps per round, for uldp-group, rpdp and its like, ddp."
        ),
    ] = None,
    client_sampling: Annotated[
        float | None, typer.Option(help="λ, per silo and round, for rpdp (else 1).")
    ] = None,
    largest_budget: Annotated[
        float | None,
        typer.Option(help="The largest ε that any record may ask for, for rpdp-filter: it ends there."),
    ] = None,
    trajectory: Annotated[
        str | None,
        typer.Option(help="decoupled, local or paper, for ddp: which noise the local models move with."),
    ] = None,
    trajectory_ratio: Annotated[
        float | None,
        typer.Option(help="R, for decoupled: noise of the local models over that of the sum."),
    ] = None,
    accountant: Annotated[
        str | None, typer.Option(help="pld or rdp; else the tightest that knows the noise.")
    ] = None,
    adversary: Annotated[str, typer.Option(help="released, server or silo.")] = "released",
    silos: Annotated[
        int | None,
        typer.Option(
            "--silos",
            "--clients",
            help="S, how many silos there are; needed for --adversary silo, and for ddp.",
        ),
    ] = None,
    aggregator: Annotated[
        str, typer.Option(help="Who sees what: plain, masked, lattice or paillier.")
    ] = "plain",
    aggregation: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A setting of the aggregator, e.g. min_silos=3."),
    ] = None,
    users: Annotated[int | None, typer.Option(help="U, how many persons there are (else 1,000).")] = None,
    dimension: Annotated[
        int | None,
        typer.Option(
            help="d, parameters of the model (else a million: with integer noise ε grows a little with d)."
        ),
    ] = None,
    weighting: Annotated[str | None, typer.Option(help="uniform or records.")] = None,
    colluding: Annotated[
        int,
        typer.Option(
            help="For --adversary silo: how many silos, the adversary included, put together the models they saw and "
            "the noise they drew; 1: each on its own."
        ),
    ] = 1,
    knows_sample: Annotated[
        bool, typer.Option("--knows-sample", help="The adversary knows who was sampled.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compute ε of a method, without a configuration. Against one adversary at a time."""
    from silodp.accounting.guarantee import describe_any_dropouts, format_rounded_up
    from silodp.cli.progress import WHO
    from silodp.config.toml_values import apply_override
    from silodp.planning.epsilon import LARGE_MODEL, format_records
    from silodp.planning.epsilon import compute_epsilon as epsilon_
    from silodp.report.guarantee_text import CLAIMED

    given = {
        "noise_multiplier": noise_multiplier,
        "user_sampling": user_sampling,
        "group_size": group_size,
        "record_sampling": record_sampling,
        "local_steps": steps,
        "client_sampling": client_sampling,
        "largest_budget": largest_budget,
        "trajectory": trajectory,
        "trajectory_ratio": trajectory_ratio,
        "weighting": weighting,
    }
    if method == "default":  # it has no noise to set; whatever is asked, there is no privacy
        given["noise_multiplier"] = None
    result = epsilon_(
        method,
        {name: value for name, value in given.items() if value is not None},
        rounds=rounds,
        delta=delta,
        accountant=accountant,
        adversary=adversary,
        silos=silos,
        aggregator=aggregator,
        aggregation=reduce(apply_override, aggregation or (), dict[str, Any]()),
        users=users,
        dimension=LARGE_MODEL if dimension is None else dimension,
        colluding=colluding,
        knows_sample=knows_sample,
    )
    after = f"after {counted(rounds, 'round')}, against {WHO[adversary]}"  # type: ignore[index]
    line = f"ε = {format_rounded_up(result['epsilon'])} at δ = {delta:g}, {after}"
    if result["any_dropouts"] is not None:
        line += f", if every silo answers; {describe_any_dropouts(result['any_dropouts'])}"
    promised = [line, *format_records(result), *(f"  assuming that {text}" for text in result["assumptions"])]
    promised += [
        f"  [{CLAIMED}: no guarantee] ε = {format_rounded_up(c['epsilon'])}: {c['why']}"
        for c in result["claims"]
    ]
    show(result, as_json, promised if result["private"] else [f"no guarantee: {result['reason']}"])
