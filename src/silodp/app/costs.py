"""`silodp plan` and `silodp epsilon`: what a run costs, before anything is run."""

from __future__ import annotations

from typing import Annotated

import typer

from silodp.app.options import Config, Json, Set, show


def plan(
    config: Config,
    target_epsilon: Annotated[
        float | None, typer.Option(help="Find the σ, T and q that meet this ε.")
    ] = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """ε of every adversary before anything is run; touches no data."""
    from silodp.app.config import load_config
    from silodp.app.plan import in_lines
    from silodp.app.plan import plan as plan_

    settings = load_config(config, set_ or ())
    budget = settings.budget()
    result = plan_(
        settings.method(),
        silos=settings.silos,
        rounds=settings.rounds,
        delta=settings.delta,
        accountant=settings.accountant,
        aggregator=settings.aggregator,
        budget=None if budget is None else (budget.epsilon, budget.adversary),
        target=target_epsilon,
    )
    show({"name": settings.name, **result}, as_json, in_lines(result))


def epsilon(
    method: Annotated[
        str, typer.Option(help="default, uldp-naive, uldp-group, uldp-sgd or uldp-avg.", show_envvar=False)
    ],
    rounds: Annotated[int, typer.Option(help="T, rounds of training.", show_envvar=False)],
    noise_multiplier: Annotated[float | None, typer.Option(help="σ, in units of the sensitivity.")] = None,
    delta: Annotated[float, typer.Option(help="δ.")] = 1e-5,
    user_sampling: Annotated[float | None, typer.Option(help="q, per person and round.")] = None,
    group_size: Annotated[int | None, typer.Option(help="k, for uldp-group.")] = None,
    record_sampling: Annotated[float | None, typer.Option(help="γ, for uldp-group.")] = None,
    steps: Annotated[int | None, typer.Option(help="DP-SGD steps per round, for uldp-group.")] = None,
    accountant: Annotated[str, typer.Option(help="pld or rdp.")] = "pld",
    adversary: Annotated[str, typer.Option(help="released, server or silo.")] = "released",
    silos: Annotated[
        int | None, typer.Option(help="S, how many silos there are; needed for --adversary silo.")
    ] = None,
    aggregator: Annotated[str, typer.Option(help="Who sees what: plain.")] = "plain",
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
    """ε of a method against one adversary."""
    from silodp.app.plan import epsilon as epsilon_
    from silodp.app.progress import rounded_up

    given = {
        "noise_multiplier": noise_multiplier,
        "user_sampling": user_sampling,
        "group_size": group_size,
        "record_sampling": record_sampling,
        "local_steps": steps,
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
        colluding=colluding,
        knows_sample=knows_sample,
    )
    line = f"ε = {rounded_up(result['epsilon'])} at δ = {delta:g}, after {rounds} rounds, against {adversary}"
    promised = [line, *(f"  assuming that {assumption}" for assumption in result["assumptions"])]
    show(result, as_json, promised if result["private"] else [f"no guarantee: {result['reason']}"])
