"""`silodp plan` and `silodp epsilon`: ε of a run before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import click
import typer
import typer.core
from click.core import ParameterSource

from silodp._lazy import Registry, make_missing_error
from silodp.cli._console import (
    Config,
    Json,
    Names,
    Set,
    Users,
    log,
    show,
)
from silodp.errors import lookup
from silodp.text import pluralize

FRAMEWORKS: Registry[Any] = Registry("frameworks", {})
"""The frameworks whose settings an extension package checks, by the name in the option --framework."""


def plan(
    config: Config,
    target_epsilon: Annotated[
        float | None,
        typer.Option(
            help="Compute the noise multiplier σ, the rounds T and the sampling probability q that each meet this ε."
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
    """Compute ε and traffic of a run in advance. No data are read."""
    # Imported here, as everywhere in the command line: `silodp --help` must not wait for numpy.
    from silodp.config.resolve import load_config

    _check_options(target_epsilon, plot)
    resolved = load_config(config, set_ or ())
    from silodp.planning.epsilon import list_delta_remarks
    from silodp.planning.plan import format_plan, plan_run, remark_on_users, warn_of_noise

    spec, assumed = resolved.build_public_spec(users)
    metrics = resolved.config.task.metrics or resolved.dataset.metrics or ()
    names = [name.rpartition(":")[2].replace("-", "_") for name in metrics]
    for unmeasured in filter(None, (one.describe_unmeasured(names, spec.data) for one in spec.series)):
        log(f"warning: {unmeasured}")
    users_known = None if assumed else spec.population.users
    remarks = [one.text for one in list_delta_remarks(resolved.config.delta, users_known)]
    result = plan_run(
        spec,
        accountant=resolved.accountant,
        target=target_epsilon,
        distribution=resolved.budget_distribution,
        picture=plot,
    )
    lines = format_plan(result, spec.series)
    if plot is not None:
        lines.append(f"picture: {plot}")
    if assumed and resolved.method.unit != "record":
        lines.append(remark_on_users(spec.population.users))
    if resolved.budget_distribution is None and resolved.method.budgets.unit is not None:
        lines.append(
            "  (privacy budgets are in the tables, which were not read: ε is for the largest budget that is allowed)"
        )
    if not any(found["private"] for found in result["adversaries"].values()):
        remarks = []  # without any guarantee, there is no δ to speak of
    remarks += filter(None, [resolved.describe_loop(users)])
    lines += [f"  ({remark})" for remark in remarks]
    if not assumed and (warning := warn_of_noise(spec)) is not None:
        log(f"warning: {warning}")
    picture = None if plot is None else str(plot)
    about = {"users_assumed": assumed, "remarks": remarks, "plot": picture}
    show({"name": resolved.config.name, **result, **about}, as_json, lines)


def _list_given() -> list[click.Parameter]:
    """Return the options and arguments that stand on the command line."""
    context = click.get_current_context()
    return [
        option
        for option in context.command.params
        if context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
    ]


def _check_options(target: float | None, plot: Path | None) -> None:
    """Refuse a wrong target and a wrong picture before anything heavy is imported."""
    from silodp.report.formatting import check_picture_path
    from silodp.settings import Epsilon, check_value

    if target is not None:
        check_value("target", target, Epsilon)
    if plot is not None:
        check_picture_path(plot)


class EpsilonCommand(typer.core.TyperCommand):
    """`silodp epsilon`, with an option for every field of a method that has a `settings.Help`.

    A method is imported when its options are asked for: those of the others only for help, and to tell an option that
    the method does not have from one that nothing has.
    """

    _method: str | None = None  # None: all methods

    @property
    def params(self) -> list[click.Parameter]:
        """All options, those of methods after --rounds."""
        if self._method not in self._lists:
            place = 1 + [option.name for option in self._declared].index("rounds")
            fields = _make_field_options(self._method)
            self._lists[self._method] = [*self._declared[:place], *fields, *self._declared[place:]]
        return self._lists[self._method]  # one object: click keeps its help option there for a moment

    @params.setter
    def params(self, declared: list[click.Parameter]) -> None:
        self._declared = declared
        self._lists: dict[str | None, list[click.Parameter]] = {}

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Read the arguments, first with the options of the method that they name."""
        from silodp.methods import METHODS

        # Before click has parsed anything, since which options exist depends on the method; "--method=x" is two words.
        words = [word for arg in args for word in arg.split("=", 1)]
        named = words[words.index("--method") + 1 :][:1] if "--method" in words else []
        self._method = named[0] if named and named[0] in METHODS else None
        # click takes words out of the list, so it gets a copy for the second try.
        try:
            return super().parse_args(context, list(args))
        except click.NoSuchOption:
            self._method = None
            return super().parse_args(context, args)
        finally:
            self._method = None


_FIELDS = "silodp.fields"
"""Key of the context's memory: field of the method → value of its option."""
_ALSO = {"local_steps": ("--steps",)}
"""Field → further names of its option."""


def _make_field_options(method: str | None) -> list[click.Option]:
    from silodp.methods import METHODS
    from silodp.settings import Help, Range, Whole, find_mark, read_hints

    found: dict[str, click.Option] = {}
    for maker in METHODS.values() if method is None else [METHODS[method]]:
        for name, hint in read_hints(maker).items():
            described = find_mark(hint, Help)
            if described is not None and name not in found:
                choices = _list_choices(hint)
                # The range itself is checked by the method, with a sentence and a code; click checks the type alone.
                kind = int if find_mark(hint, Whole) else float if find_mark(hint, Range) else Names(choices)
                names = [name, f"--{name.replace('_', '-')}", *_ALSO.get(name, ())]
                found[name] = click.Option(
                    names, type=kind, help=described.text, expose_value=False, callback=_keep_field
                )
    return list(found.values())


def _list_choices(hint: Any) -> tuple[str, ...]:
    """Return the values of the `Literal` in an annotation."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(choice for member in get_args(hint) for choice in _list_choices(member))


def _keep_field(context: click.Context, option: click.Parameter, value: Any) -> Any:
    if value is not None:
        context.meta.setdefault(_FIELDS, {})[option.name] = value
    return value


def epsilon(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE|KEY=VALUE]...", help="Settings of --framework: its files, and single values."
        ),
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(
            click_type=Names("silodp.cli.plan:FRAMEWORKS"),
            help="Check settings of another framework, and say what holds for a client, a record and a person. Only "
            "--delta and --json can then be given.",
            show_envvar=False,
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            click_type=Names("silodp.methods:METHODS"),
            help="Method of training. [required without --framework]",
            show_envvar=False,
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds of training, T. [required with --method]", show_envvar=False)
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set any field of the method, also of one in a file, for example clip=0.5 or step=0.1; "
            "repeatable.",
        ),
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="δ. Default: 1e-05, or that of the settings of --framework.")
    ] = None,
    accountant: Annotated[
        str | None,
        typer.Option(
            click_type=Names("silodp.accounting.accountant:ACCOUNTANTS"),
            help="Accountant of ε, by name or FILE.py:NAME. Default: the one with the smaller ε for this noise.",
        ),
    ] = None,
    adversary: Annotated[
        str,
        typer.Option(click_type=Names("silodp.accounting.views:ADVERSARIES"), help="Against whom ε holds."),
    ] = "released",
    silos: Annotated[
        int | None,
        typer.Option(
            "--silos", "--clients", help="Number of silos S; needed for --adversary silo, and for ddp."
        ),
    ] = None,
    aggregator: Annotated[
        str,
        typer.Option(
            click_type=Names("silodp.aggregators.registry:AGGREGATORS"),
            help="How the silos' sums are added up.",
        ),
    ] = "plain",
    aggregation: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="Set a value of the aggregator, for example min_silos=3; repeatable."
        ),
    ] = None,
    users: Annotated[int | None, typer.Option(help="Number of persons U. Default: 1,000.")] = None,
    dimension: Annotated[
        int | None,
        typer.Option(
            help="Number of parameters d. Default: a million; with integer noise ε grows slightly with d."
        ),
    ] = None,
    colluding: Annotated[
        int,
        typer.Option(
            help="For --adversary silo: number of silos, the adversary included, that share the models they saw and "
            "the noise they drew."
        ),
    ] = 1,
    knows_sample: Annotated[
        bool,
        typer.Option("--knows-sample", help="The adversary knows which persons or records were sampled."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Compute ε of a method against one adversary, or of settings of another framework. No data are read."""
    if framework is not None:
        _refuse_other_options()
        _check_framework(framework, settings or (), delta, as_json)
        return
    if settings:
        raise click.UsageError(f"'{settings[0]}' is read with --framework only.")
    if method is None or rounds is None:
        missing = "method" if method is None else "rounds"
        command = click.get_current_context().command
        raise click.MissingParameter(
            param=next(p for p in command.params if p.name == missing),
            param_hint="'--method' or '--framework'" if method is None else None,
        )
    delta = 1e-5 if delta is None else delta
    from silodp.accounting.guarantee import describe_any_dropouts, format_epsilon
    from silodp.config.toml_values import apply_override
    from silodp.methods import METHODS
    from silodp.planning.epsilon import LARGE_MODEL, compute_epsilon_for, format_linkage, format_records
    from silodp.report.guarantee_text import ADVERSARY_LABELS, format_claim

    given = dict(click.get_current_context().meta.get(_FIELDS, {}))
    # Of a method without noise there is no guarantee, whatever the option says.
    if getattr(METHODS.get(method), "unit", "") is None:
        given.pop("noise_multiplier", None)
    result = compute_epsilon_for(
        method,
        reduce(apply_override, set_ or (), given),
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
    after = f"after {pluralize(rounds, 'round')}, against {ADVERSARY_LABELS[adversary]}"  # type: ignore[index]
    line = f"ε = {format_epsilon(result['epsilon'])} at δ = {delta:g}, {after}"
    if result["any_dropouts"] is not None:
        line += f", if every silo answers; {describe_any_dropouts(result['any_dropouts'])}"
    assumptions = [f"  assuming that {one['text']}" for one in result["assumptions"]]
    lines = [line, *format_records(result), *format_linkage(result), *assumptions]
    lines += [f"  {format_claim(claim['epsilon'], claim['why'])}" for claim in result["claims"]]
    show(result, as_json, lines if result["private"] else [f"no guarantee: {result['reason']}"])


epsilon_app = typer.Typer()
epsilon_app.command("epsilon", cls=EpsilonCommand)(epsilon)


def _refuse_other_options() -> None:
    """Refuse options of --method beside --framework: `--rounds 10`, if ignored, would be charged as one round."""
    for option in _list_given():
        if option.name not in ("settings", "framework", "delta", "as_json"):
            raise click.UsageError(
                f"{option.opts[0]} has no meaning beside --framework: write settings as KEY=VALUE, for example "
                "rounds=10."
            )


def _check_framework(name: str, given: Sequence[str], delta: float | None, as_json: bool) -> None:
    if not FRAMEWORKS:
        raise make_missing_error("audit")
    finding = lookup(name, FRAMEWORKS, "framework")().check_given(given, delta)
    show(finding.to_dict(), as_json, finding.format_lines())
