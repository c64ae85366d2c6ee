"""`silodp deploy`: set up a consortium whose parties are separate programs, and look at it while it runs."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer import Argument, Option

from silodp.cli._console import Config, Json, Set, format_command, log, show
from silodp.errors import SilodpError, require
from silodp.text import pluralize

deploy_app = typer.Typer(
    help="Set up a consortium whose server and silos are separate programs on separate machines.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

LOCAL_HOST = "127.0.0.1"

# Whether they can be read is seen when they are: the message then says whose they are.
Public = Annotated[Path, Argument(metavar="PUBLIC", help="The consortium's public folder.", readable=False)]
Folder = Annotated[
    Path, Argument(metavar="FOLDER", help="The party's own folder, with its keys.", readable=False)
]
Url = Annotated[str | None, Option(help="Address of the server. Default: that of the roster.")]


@deploy_app.command()
def init(
    config: Config,
    out: Annotated[Path, Option(metavar="DIR", help="Folder to write.")] = Path("consortium"),
    set_: Set = None,
    users: Annotated[int | None, Option(help="Number of persons U, where no public list states it.")] = None,
    local: Annotated[
        bool,
        Option("--local", help="For tests: make all parties, with their keys and data, on this machine."),
    ] = False,
    host: Annotated[
        str, Option(help="Name or address of the server, as silos reach it, with --local.")
    ] = LOCAL_HOST,
    port: Annotated[int, Option(help="Port of the server, with --local. 0: a free one.")] = 0,
    after: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="An earlier consortium: its parties keep their folders and keys, and their requests are copied.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the public folder of a consortium from a configuration. No data file is opened without --local."""
    from silodp.config.resolve import load_config

    # Test keys are new each time: an earlier consortium has nothing to hand on to them.
    if local and after is not None:
        raise SilodpError(
            f"after = '{after}' is for parties with keys of their own, and --local makes all keys: give one of both.",
            code="argument.conflict",
            field="after",
        )

    resolved = load_config(config, set_ or ())
    if local:
        resolved.dataset.check_files(resolved.arguments)
    from silodp_deploy.setup import (
        REQUESTS,
        copy_requests,
        draft_public,
        find_free_port,
        list_user_list_warnings,
        make_local,
    )

    # A local consortium is for tests, where a seed makes runs comparable. Elsewhere it gives the noise away.
    if resolved.config.seed is not None and not local:
        log(
            "warning: the configuration has a seed, so whoever knows it can remove the noise, and silos refuse the run "
            "unless their policy has allow_seed = true: take the seed out."
        )
    for warning in list_user_list_warnings(resolved):
        log(f"warning: {warning}")
    if local:
        chosen = port or find_free_port()
        made = make_local(resolved, resolved.load_federation(), out, chosen, host)
        result = {"folder": str(out), "digest": made.digest, "port": chosen, "for_tests": True}
        lines = [
            f"Wrote {out}: public/, server/ and silos/ with test keys and the records of every silo.",
            "Everything is on this machine, so this consortium protects nobody. Start it:",
            f"  {format_command('deploy', 'up', out)}",
        ]
        if host != LOCAL_HOST:
            lines.append(
                f"or in containers, where silos reach the server as '{host}' (docs/deployment_admin.md)."
            )
    else:
        data = resolved.read_public_data(users)
        asked = ["server", *data.silos]
        if after is not None:
            asked = copy_requests(after, out, data.silos)
        spec = draft_public(resolved, out / "public", data)
        result = {"folder": str(out / "public"), "silos": list(spec.names), "run": spec.digest, "keys": asked}
        lines = [
            f"Wrote {out / 'public'}. Read its files, then send the folder to the server and to every silo."
        ]
        if after is not None:
            lines.append("Parties of the earlier consortium keep their keys and their folders.")
        if asked:
            (out / REQUESTS).mkdir(exist_ok=True)
            lines.append("These parties run this command, and send you the request file that it writes:")
            lines += [f"  {format_command('deploy', 'keys', name)}" for name in asked]
            lines.append(f"Put the requests into {out / REQUESTS}.")
        lines.append(f"Then run: {format_command('deploy', 'seal', out)} --host NAME")
    show(result, as_json, lines)


@deploy_app.command()
def keys(
    name: Annotated[str, Argument(help="Name of the party, as in the public folder: a silo, or server.")],
    out: Annotated[
        Path | None, Option(metavar="FOLDER", help="The party's own folder. Default: NAME.")
    ] = None,
    again: Annotated[
        bool,
        Option(
            "--again", help="Replace keys that were lost, or that others know; the folder's ledgers stay."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Make the keys of one party, once for all runs, at that party. Only the request file may leave the folder."""
    from silodp_deploy.setup import make_keys

    request = make_keys(out or Path(name), name, again=again)
    lines = [f"Wrote {request}: send this file, and no other file of the folder, to the coordinator."]
    show({"request": str(request)}, as_json, lines)


@deploy_app.command("end")
def end(folder: Folder, as_json: Json = False) -> None:
    """End all runs of a silo whose store is lost or an old copy. Their charges stay; a new run can begin."""
    from silodp_deploy import LEDGERS
    from silodp_deploy.history import end_runs

    if not (folder / LEDGERS).exists():
        raise SilodpError(
            f"{folder} is not the folder of a silo that took part in a run: it has no {LEDGERS}.",
            code="cli.file",
            field="folder",
        )
    ended = end_runs(folder)
    lines = [
        f"Ended {pluralize(len(ended), 'run')}: nothing more is answered in them, and what they were charged stays "
        "counted. The server begins a new run."
    ]
    show({"ended": ended}, as_json, lines)


@deploy_app.command()
def seal(
    folder: Annotated[Path, Argument(metavar="DIR", help="Folder with public/ and requests/.")],
    host: Annotated[
        str | None,
        Option(
            help="Name or address of the server, as silos reach it. Default with --again: as it was sealed."
        ),
    ] = None,
    port: Annotated[
        int | None, Option(help="Port of the server. Default: 8443; with --again: as it was sealed.")
    ] = None,
    again: Annotated[
        bool,
        Option(
            "--again",
            help="Seal a sealed folder anew, under the same authority. With the same keys and address this renews the "
            "certificates alone, and nobody accepts again.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Sign the requests of all parties, at the coordinator, and write roster and certificates to public/."""
    from silodp_deploy.certificates import read_certificates
    from silodp_deploy.consortium import Consortium
    from silodp_deploy.setup import PUBLIC, seal_public

    before = Consortium.load(folder / PUBLIC)
    made = seal_public(folder, host, port, again=again)
    ends = {
        name: one.not_valid_after_utc for name, one in read_certificates(made.folder, made.sealed).items()
    }
    is_renewal = before.digest == made.digest
    lines = [
        f"Sealed {folder / 'public'}. Send the folder to all parties again, and compare this code by telephone:",
        f"  {made.code}",
        "The server then runs: silodp deploy accept PUBLIC FOLDER",
        "and every silo:       silodp deploy accept PUBLIC FOLDER --data FILE",
    ]
    if is_renewal:
        lines = [
            f"Renewed the certificates in {folder / 'public'}. The code is the same as before:",
            f"  {made.code}",
            "Send ca.pem and certificates/ to all parties, who put them in place of those in their public folder. A "
            "run in progress goes on, and nobody accepts again.",
        ]
    lines.append(
        f"The certificates are valid until {min(ends.values()):%Y-%m-%d}; before that day run this command with "
        "--again, also while a run is in progress."
    )
    valid = {name: f"{end:%Y-%m-%d}" for name, end in ends.items()}
    result = {"digest": made.digest, "code": made.code, "valid_until": valid, "renewed": is_renewal}
    show(result, as_json, lines)


@deploy_app.command()
def accept(
    public: Public,
    folder: Folder,
    data: Annotated[
        str | None, Option(metavar="FILE", help="The silo's table, here or in FOLDER. The server has none.")
    ] = None,
    index: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="The file by which a trust center numbers the silo's persons, for weights that depend on records.",
        ),
    ] = None,
    code: Annotated[
        str | None, Option(help="The code that the coordinator read to you. Default: you are asked for it.")
    ] = None,
    lifetime_epsilon: Annotated[
        float | None,
        Option(
            help="Most ε that all runs of this silo may spend against each adversary. Default: what this run needs."
        ),
    ] = None,
    allow_counts: Annotated[
        bool,
        Option(
            "--allow-counts",
            help="Let the server and other silos of this run and later ones see each person's record counts.",
        ),
    ] = False,
    min_persons: Annotated[
        int | None,
        Option(
            min=0,
            help="Fewest persons in the silo's table with which it takes part in any run. Default: any number.",
        ),
    ] = None,
    replace: Annotated[
        bool,
        Option(
            "--replace",
            help="Write the policy anew, in place of one for another public folder. Only while nothing was charged.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what is agreed, at a silo or the server, and accept it when the code is the one that was read out.

    A silo's policy is written then, and at the server the list of what it may run.
    """
    from silodp_deploy.consortium import take_copy

    # What is shown, accepted and later executed is this copy, whoever may write to PUBLIC meanwhile.
    consortium = take_copy(public, folder)
    # After what is refused without torch, whose import takes seconds.
    from silodp.wire.transport import SERVER
    from silodp_deploy import acceptance
    from silodp_deploy.certificates import ExpiryWatch, describe_early_end
    from silodp_deploy.lifetime import describe_shortfall
    from silodp_deploy.policy import ACCEPTED, Policy, accept_digest
    from silodp_deploy.silo import find_name, load_identity

    def warn_of_certificates(party: str, run_days: int) -> list[str]:
        days = ExpiryWatch(consortium, party).count_days()
        if told := describe_early_end(days, run_days):
            log(f"warning: {told}")
        return sorted(name for name, left in days.items() if left < run_days)

    is_server = load_identity(folder, "").public == consortium.sealed.server
    _check_options(
        is_server,
        data=data,
        index=index,
        lifetime_epsilon=lifetime_epsilon,
        allow_counts=allow_counts,
        min_persons=min_persons,
        replace=replace,
    )
    # Whose key is in the folder: a silo sees what is read of its own table.
    name = None if is_server else find_name(folder, consortium)
    agreed = acceptance.describe_agreement(consortium, name)
    if not as_json:
        for line in format_agreement(agreed):
            log(line)
    given = _ask_code() if code is None else code
    result: dict[str, Any] = {"digest": consortium.digest, "policy": None, "agreement": agreed}
    if name is None:
        acceptance.check_code(given, consortium.code)
        accept_digest(folder, consortium.digest)
        result["early_certificates"] = warn_of_certificates(
            SERVER, Policy.model_fields["max_run_days"].default
        )
        start = format_command("server", public, folder)
        show(result, as_json, [f"Accepted. Wrote {folder / ACCEPTED}. Start the server: {start}"])
        return
    done = acceptance.accept_at_silo(
        folder,
        consortium,
        given,
        str(data),
        lifetime_epsilon,
        index=index,
        allow_counts=allow_counts,
        min_persons=min_persons,
        replace=replace,
    )
    policy, short = done.policy, done.shortfall
    if short:
        log(f"warning: {describe_shortfall(short, policy.lifetime_epsilon)}")
    lines = [
        f"Read {pluralize(done.records, 'training record')} of {pluralize(done.persons, 'person')} "
        "(private to this silo).",
        f"Accepted. Wrote {folder / 'policy.toml'}. Start the silo: {format_command('silo', public, folder)}",
    ]
    if not policy.filter_bounds:
        lines.append(
            "The limits of the policy hold for runs that were fixed before the first model was seen."
        )
    result["early_certificates"] = warn_of_certificates(name, policy.max_run_days)
    show(result | {"policy": policy.model_dump(), "exceeded_limits": sorted(short)}, as_json, lines)


def _check_options(is_server: bool, **options: object) -> None:
    """Refuse options of a silo at the server, which has no records, and a silo without its table."""
    given = [name for name, value in options.items() if value is not None and value is not False]
    if is_server and given:
        raise SilodpError(
            f"{given[0]} is given, and the folder is the server's, which has no records: leave the option out, or name "
            "the silo's folder.",
            code="argument.conflict",
            field=given[0],
        )
    require(
        is_server or "data" in given,
        "a silo accepts with its table, which is read to see whether it fits: add --data FILE.",
        code="argument.missing",
        field="data",
    )


def format_agreement(agreed: dict[str, Any]) -> list[str]:
    """Return the lines of agreement.txt: what an operator reads before they accept.

    Others wrote the names and texts in it. Each is escaped before it is inserted, so that none adds a line of its own.
    """
    from silodp.accounting.guarantee import describe_reservations, describe_unit, format_epsilon
    from silodp.report.formatting import make_environment

    # A terminal shows the text: it needs no escapes of HTML, and must not get sequences that steer it.
    environment = make_environment(Path(__file__).parent).overlay(
        autoescape=False, finalize=lambda value: _escape_controls(str(value))
    )
    budget = agreed["budget"]
    whole = None if budget is None else agreed["epsilon"][budget["adversary"]]
    text = environment.get_template("agreement.txt").render(
        agreed,
        assumptions=[one["text"] for one in agreed["assumptions"]],
        # The server keeps this budget, and a silo its own limits.
        ends_early=whole is not None and whole > budget["epsilon"],
        pluralize=pluralize,
        describe_unit=describe_unit,
        describe_reservations=describe_reservations,
        format_epsilon=format_epsilon,
    )
    return text.removesuffix("\n").split("\n")


def _escape_controls(text: str) -> str:
    """Return the text with characters that steer a terminal made visible: others wrote it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@deploy_app.command()
def check(
    public: Public,
    folder: Folder,
    url: Url = None,
    data: Annotated[
        Path | None,
        Option(metavar="FILE", help="The silo's table: whether it fits is seen here, also before the seal."),
    ] = None,
    index: Annotated[
        Path | None,
        Option(metavar="FILE", help="The trust center's file, with --data, where the run needs it."),
    ] = None,
    silo: Annotated[
        str | None,
        Option(help="Name of the silo, with --data. Default before the seal: the name of FOLDER."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check table, address, TLS, clock, versions and policy before the code is compared; status 1 if one is wrong."""
    from silodp_deploy.consortium import Consortium

    consortium = Consortium.load(public)
    from silodp_deploy.check import check_party  # torch, after what is refused without it

    found = []
    for one in check_party(folder, consortium, url, data, index, silo):
        found.append(one)
        # One after the other, as they are found: a server that cannot be reached is noticed after some seconds.
        if not as_json:
            line = f"{'ok  ' if one.is_good else 'FAIL'}  {one.name:<12}  {_escape_controls(one.told)}"
            show({}, as_json, [line])
    if as_json:
        show({"checks": [asdict(one) for one in found]}, as_json, [])
    if not all(one.is_good for one in found):
        raise typer.Exit(1)


@deploy_app.command()
def up(
    folder: Annotated[Path, Argument(metavar="DIR", help="Written by: silodp deploy init --local.")],
    as_json: Json = False,
) -> None:
    """For tests: start server and silos of a local consortium as separate processes, and wait for the end."""
    from silodp_deploy.consortium import Consortium

    # As an installed command: -P keeps modules of the current folder from being imported.
    command = [sys.executable, "-P", "-m", "silodp.cli.main"]
    public = str(folder / "public")
    # On this machine also where it was made for another name of the server.
    url = f"https://{LOCAL_HOST}:{Consortium.load(folder / 'public').sealed.port}"
    # Silos run until they are stopped, so they end with this block: also when the server fails or Ctrl-C is pressed.
    with ExitStack() as ending:
        for home in sorted((folder / "silos").iterdir()):
            log_file = ending.enter_context((home / "log.txt").open("ab"))
            silo = subprocess.Popen([*command, "silo", public, str(home), "--url", url], stderr=log_file)
            ending.callback(_stop, silo)
        server = [*command, "server", public, str(folder / "server")]
        output = subprocess.DEVNULL if as_json else None  # one object on standard output
        status = subprocess.run(server, check=False, stdout=output).returncode
    require(
        status == 0,
        f"the server stopped with an error (above); the silos' logs are {folder / 'silos'}/*/log.txt.",
        code="deploy.silo_failed",
    )
    show({"run": str(folder / "server" / "run")}, as_json, [f"The run is in {folder / 'server' / 'run'}."])


def _ask_code() -> str:
    """Ask for the code that the coordinator reads out."""
    try:
        return str(typer.prompt("Code as read out by the coordinator", err=True))
    except click.Abort:
        if sys.stdin.isatty():
            raise
        raise SilodpError(
            "the code was not typed, and there is no terminal to ask for it: give --code CODE, or start the container "
            "with -it.",
            code="argument.value",
            field="--code",
        ) from None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, and kill it if it does not, for example while it computes."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@deploy_app.command()
def status(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="The folder of the server or of a silo.")],
    is_check: Annotated[
        bool,
        Option(
            "--check",
            help="Exit with status 1 where somebody has to see to a problem: for a health check, a timer, or cron.",
        ),
    ] = False,
    stuck_after: Annotated[
        float, Option(metavar="SECONDS", help="A round that takes longer is a problem.", min=1.0)
    ] = 3600.0,
    is_metrics: Annotated[
        bool,
        Option("--metrics", help="Print the metrics in the text format of Prometheus, for a node exporter."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show at the server or a silo who is connected, how far the run is, ε so far, and the last problem."""
    from silodp.accounting.guarantee import format_epsilon
    from silodp_deploy.monitoring import describe_party, find_problems, format_metrics, read_state
    from silodp_deploy.status import load_status

    found = load_status(folder)
    state = read_state(found, time.time() - found["written"])
    problems = find_problems(state, stuck_after)
    spent = [f"{name} {format_epsilon(e)}" for name, e in found["epsilon"].items()]
    lines = [f"round {found['round']} of {found['rounds']}, ε so far: {'; '.join(spent) or '0'}"]
    lines += [f"  {name}: {describe_party(state, name)}" for name in state.seconds_since_seen]
    if found.get("version"):
        lines.append(f"silodp {found['version']}")
    if state.stopped is not None:
        lines.append(f"the run is over, stopped by the {state.stopped}")
    if is_metrics:
        lines = format_metrics(state, folder.resolve().name).splitlines()
    else:
        lines += [f"{told} [{name}]" for name, told in problems.items()]
    show(found | {"problems": problems}, as_json, lines)
    if is_check and problems:
        raise typer.Exit(1)
