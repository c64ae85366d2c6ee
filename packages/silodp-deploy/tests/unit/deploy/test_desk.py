"""The desk of a silo: who may see it, and that accepting there is accepting by the command."""

from __future__ import annotations

import html
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

import silodp_deploy
from silodp.accounting.guarantee import format_epsilon
from silodp.data.tables.draft import inspect_table
from silodp_deploy.acceptance import Acceptance, accept_at_silo
from silodp_deploy.check import check_table
from silodp_deploy.consortium import Consortium
from silodp_deploy.desk._pages import MAX_ROWS, PAGES, Desk
from silodp_deploy.desk._server import MAX_FORM_BYTES, DeskServer
from silodp_deploy.policy import Policy
from support.commands import Silodp, assert_sentence
from support.consortium import COMMAND, start_consortium
from support.deployed import PLAIN
from support.desk import EVIL, Asked, Browser, ask_silo, is_accepted, read_files, serving_desk, write_answers
from support.https import wait_until

NAMES = [name for name, _ in PAGES]


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return ask_silo(tmp_path)


@pytest.fixture
def server(asked: Asked) -> Iterator[DeskServer]:
    with serving_desk(asked.home, asked.public) as server:
        yield server


def test_accepting_at_the_desk_writes_what_the_command_writes(
    asked: Asked, server: DeskServer, silodp: Silodp
) -> None:
    before = read_files(asked.home)
    browser = Browser(server)
    answer = browser.post(asked.form(epsilon="30,5", persons="12"))
    assert (answer.status, answer.headers["Location"]) == (303, f"{server.base}decision")
    page = browser.get("decision").text
    assert asked.code in page
    assert "30 persons were read" in page
    written = asked.home / "policy.toml"
    assert set(read_files(asked.home)) - set(before) == {written}
    at_desk = written.read_text()
    assert written.stat().st_mode & 0o777 == 0o600
    written.unlink()
    options = ("--data", asked.home / "table.csv", "--lifetime-epsilon", 30.5, "--min-persons", 12)
    assert silodp("deploy", "accept", asked.public, asked.home, "--code", asked.code, *options).status == 0
    assert written.read_text() == at_desk
    assert not asked.mark.exists()  # no code of the folder was executed


def test_the_desk_accepts_by_the_function_of_the_command(
    asked: Asked, server: DeskServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    for place in ("silodp_deploy.desk._pages", "silodp_deploy.acceptance"):
        monkeypatch.setattr(
            f"{place}.accept_at_silo", lambda *a, **k: called.append(a) or accept_at_silo(*a, **k)
        )
    Browser(server).post(asked.form())
    assert len(called) == 1
    assert is_accepted(asked)


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"code": "0123 4567 89ab cdef 0123 4567 89ab cdef"}, "deploy.digest", "code"),
        ({"code": " "}, "argument.missing", "code"),
        ({"choice": ""}, "argument.missing", "choice"),
        ({"read": ""}, "argument.missing", "read"),
        ({"table": "../../etc/passwd"}, "argument.missing", "table"),
        ({"table": "identity.key"}, "argument.missing", "table"),
        ({"epsilon": "much"}, "argument.value", "epsilon"),
        ({"epsilon": "-1"}, "argument.value", "epsilon"),
        ({"epsilon": "nan"}, "argument.value", "epsilon"),
        ({"persons": "1.5"}, "argument.value", "persons"),
        ({"persons": "31"}, "policy.few_persons", "persons"),
    ],
)
def test_a_wrong_field_is_named_and_nothing_is_written(
    changes: dict[str, str], code: str, field: str, asked: Asked, server: DeskServer
) -> None:
    before = read_files(asked.home)
    browser = Browser(server)
    answer = browser.post(asked.form(**changes))
    assert answer.status == 422
    assert f"(code {code})" in answer.text
    assert 'role="alert"' in answer.text
    (wrong,) = re.findall(r"<(?:input|select)[^>]*aria-invalid[^>]*>", answer.text)
    assert f'id="{field}"' in wrong
    assert re.search(rf'aria-describedby="[^"]*{field}-error"', wrong)
    assert f'id="{field}-error"' in answer.text
    assert read_files(asked.home) == before


def test_who_refuses_leaves_nothing(asked: Asked, server: DeskServer) -> None:
    before = read_files(asked.home)
    browser = Browser(server)
    answer = browser.post({"choice": "refuse"})
    assert answer.status == 303
    page = browser.get(answer.headers["Location"].removeprefix(server.base))
    assert "You do not take part" in page.text
    assert read_files(asked.home) == before


def test_a_run_that_the_policy_refuses_cannot_be_accepted(asked: Asked, server: DeskServer) -> None:
    policy = Policy(
        accepted=[], data="table.csv", lifetime_epsilon={"server": 9.0}, filter_bounds=[], min_silos=9
    )
    (asked.home / "policy.toml").write_text(policy.to_toml())
    before = read_files(asked.home)
    browser = Browser(server)
    page = browser.get("decision").text
    assert "<button" not in page
    assert "(code policy.not_allowed)" in page
    rows = re.findall(r'<tr role="row">.*?</tr>', browser.get().text, re.DOTALL)
    states = {field: "✗ not met" in row for row in rows for field in re.findall(r"\((\w+)\)</th>", row)}
    assert (states["min_silos"], states["methods"], states["columns"]) == (True, False, False)
    assert next(iter(states)) == "min_silos"  # what is not met comes first
    # Nor by a form that no page offers.
    answer = browser.post(asked.form())
    assert (answer.status, "(code policy.not_allowed)" in answer.text) == (422, True)
    assert read_files(asked.home) == before


def test_a_public_folder_that_changes_after_it_was_read_is_not_accepted(
    asked: Asked, server: DeskServer
) -> None:
    browser = Browser(server)
    (asked.public / "net.py").write_text((asked.public / "net.py").read_text() + "# more\n")
    for code in (asked.code, Consortium.load(asked.public).code):
        answer = browser.post(asked.form(code=code))
        assert (answer.status, "(code deploy.digest)" in answer.text) == (422, True)
    assert not is_accepted(asked)


def test_two_tabs_and_a_form_sent_twice_accept_once(
    asked: Asked, server: DeskServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []

    def accept_slowly(*arguments: Any, **options: Any) -> Acceptance:
        called.append(arguments)
        time.sleep(0.5)  # the others arrive meanwhile
        return accept_at_silo(*arguments, **options)

    monkeypatch.setattr("silodp_deploy.desk._pages.accept_at_silo", accept_slowly)
    browser = Browser(server)
    forms = [asked.form(epsilon="30"), asked.form(epsilon="40"), asked.form(epsilon="30")]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(browser.post, forms))
    written = (asked.home / "policy.toml").read_text()
    answers.append(browser.post({"choice": "refuse"}))
    assert [answer.status for answer in answers] == [303] * 4
    assert len(called) == 1
    assert (asked.home / "policy.toml").read_text() == written
    assert "Accepted" in browser.get("decision").text
    assert Policy.load(asked.home / "policy.toml").accepted == [Consortium.load(asked.public).digest]


def test_the_code_is_shown_in_full_only_once_it_was_compared(asked: Asked, server: DeskServer) -> None:
    """Else who accepts could copy it from the page, and a folder that was exchanged would be accepted."""
    browser = Browser(server)
    groups = asked.code.split()
    shown = "".join(browser.get(name).text for name in NAMES)
    assert " ".join(groups[:2]) in shown
    assert not any(" ".join(groups[i : i + 2]) in shown for i in range(1, 7))
    assert Consortium.load(asked.public).digest[:20] not in shown
    browser.post(asked.form())
    assert asked.code in browser.get().text


@pytest.mark.parametrize("name", [*NAMES, "table?file=table.csv"])
def test_a_page_shows_names_as_text_and_changes_nothing(name: str, asked: Asked, server: DeskServer) -> None:
    write_answers(asked.home, 9)
    browser = Browser(server)
    before = read_files(asked.home)
    page = browser.get(name)
    assert page.status == 200
    assert EVIL not in page.text
    assert "<script" not in page.text
    assert read_files(asked.home) == before
    assert not asked.mark.exists()


def test_names_of_columns_are_shown(server: DeskServer) -> None:
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in Browser(server).get().text


@pytest.mark.parametrize("name", NAMES)
def test_who_did_not_open_the_link_sees_nothing(name: str, server: DeskServer) -> None:
    stranger = Browser(server, is_in=False)
    for cookie in (
        None,
        "silodp_desk=",
        "silodp_desk=x",
        f"silodp_desk={server.key}",
        f"other={server.session}",
    ):
        reply = stranger.get(name, {"Cookie": cookie})
        assert reply.status == 403
        assert server.base not in reply.text
    # With the cookie, and without the path that a program at another port cannot know.
    Browser(server)
    known = {"Cookie": f"silodp_desk={server.session}"}
    assert stranger.ask("GET", f"/{name}", None, known).status == 403
    assert stranger.get(name, known).status == 200


def test_the_link_lets_one_browser_in(server: DeskServer) -> None:
    path = server.link.partition(str(server.server_port))[2]
    stranger = Browser(server, is_in=False)
    assert stranger.ask("GET", path[:-1] + "_").status == 403
    assert stranger.ask("GET", path).status == 200
    again = stranger.ask("GET", path)
    assert (again.status, "Set-Cookie" in again.headers) == (403, False)


def test_the_cookie_is_for_the_desk_alone(server: DeskServer) -> None:
    path = server.link.partition(str(server.server_port))[2]
    name, *settings = Browser(server, is_in=False).ask("GET", path).headers["Set-Cookie"].split("; ")
    assert set(settings) == {f"Path={server.base}", "HttpOnly", "SameSite=Strict"}
    assert len(name.partition("=")[2]) >= 43  # 256 bits


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", None])
def test_a_name_that_was_made_to_point_here_is_refused(host: str | None, server: DeskServer) -> None:
    """DNS rebinding: a page of another site reads the desk as if it were its own."""
    browser = Browser(server)
    sent = {"Host": host and host.format(port=server.server_port)}
    assert browser.get("", sent).status == 403
    assert browser.get("", {"Host": f"localhost:{server.server_port}"}).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1", "Sec-Fetch-Site": None},
        {"Sec-Fetch-Site": "cross-site"},
        {"Origin": None, "Sec-Fetch-Site": "same-site"},
        {"Origin": None, "Sec-Fetch-Site": "none"},
        {"Origin": None, "Sec-Fetch-Site": None},
    ],
)
def test_a_form_of_another_site_does_nothing(
    headers: dict[str, str | None], asked: Asked, server: DeskServer
) -> None:
    assert Browser(server).post(asked.form(), headers=headers).status == 403
    assert not is_accepted(asked)


def test_a_form_needs_the_secret_field_of_the_page(asked: Asked, server: DeskServer) -> None:
    browser = Browser(server)
    for key in ("", "x", server.session, server.key):
        assert browser.post(asked.form(form_key=key)).status == 403
    assert not is_accepted(asked)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Length": str(MAX_FORM_BYTES + 1)}, 413),
        ({"Content-Length": "9" * 5000}, 413),
        ({"Content-Length": None}, 411),
        ({"Content-Length": "-1"}, 411),
        ({"Transfer-Encoding": "chunked"}, 411),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": None}, 415),
    ],
)
def test_a_form_that_no_browser_sends_is_refused_unread(
    headers: dict[str, str | None], status: int, asked: Asked, server: DeskServer
) -> None:
    assert Browser(server).post(asked.form(), headers=headers).status == status
    assert not is_accepted(asked)


def test_a_form_of_many_fields_is_refused(server: DeskServer) -> None:
    browser = Browser(server)
    many = urlencode([("form_key", server.form_key), *((f"f{n}", "") for n in range(100))])
    assert browser.ask("POST", f"{server.base}decision", many).status == 400
    assert browser.get("table?" + many).status == 400


@pytest.mark.parametrize(
    "path",
    ["../table", "..%2f..%2fetc/passwd", "base.html", "policy.toml", "%2e%2e/", "table/", "open", "x" * 5000],
)
def test_no_path_leads_to_a_file(path: str, server: DeskServer) -> None:
    reply = Browser(server).get(path)
    assert reply.status in (403, 404) or "The desk is open" in reply.text
    assert "root:" not in reply.text


@pytest.mark.parametrize("path", ["//[", "http://[/", "*", "/?" + "&".join("x" * 99)])
def test_no_path_of_a_stranger_is_an_error(
    path: str, server: DeskServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected error writes a file with its traceback, and a stranger could fill the disk with them."""
    monkeypatch.setattr("silodp_deploy.desk._server.describe_failure", pytest.fail)
    assert Browser(server, is_in=False).ask("GET", path).status == 403


def test_no_other_module_needs_the_desk() -> None:
    """Its folder and its line in pyproject.toml can be deleted."""
    home = Path(silodp_deploy.__file__).parent
    others = [path for path in home.rglob("*.py") if "desk" not in path.relative_to(home).parts]
    assert len(others) > 20
    assert [path for path in others if "silodp_deploy.desk" in path.read_text()] == []


@pytest.mark.parametrize("method", ["HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT"])
def test_other_methods_are_refused(method: str, server: DeskServer) -> None:
    assert Browser(server).ask(method, server.base).status == 501


def test_every_response_forbids_scripts_frames_and_copies(server: DeskServer) -> None:
    browser, stranger = Browser(server), Browser(server, is_in=False)
    replies = [browser.get(), browser.get("nothing"), stranger.get(), browser.ask("PUT", server.base)]
    replies.append(browser.post({"choice": ""}))
    for reply in replies:
        rules = dict(rule.split(" ", 1) for rule in reply.headers["Content-Security-Policy"].split("; "))
        assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
        assert rules["form-action"] == "'self'"
        assert "script-src" not in rules
        assert reply.headers["Cache-Control"] == "no-store"
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        assert reply.headers["Referrer-Policy"] == "same-origin"
        assert "Python" not in reply.headers["Server"]


def test_the_desk_listens_at_this_machine_alone(server: DeskServer) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"


def test_a_folder_that_is_no_silos_is_named(asked: Asked, silodp: Silodp) -> None:
    told = silodp("desk", asked.home.parent / "server", "--public", asked.public)
    assert_sentence(told, code="deploy.key")


def test_without_a_public_folder_another_folder_is_named(asked: Asked, silodp: Silodp) -> None:
    """Else the ledger of a mistyped folder would say that nothing has left this silo."""
    assert_sentence(silodp("desk", asked.home.parent / "soutn"), code="deploy.key")
    server = asked.home.parent / "server"
    assert silodp("deploy", "accept", asked.public, server, "--code", asked.code).status == 0
    assert_sentence(silodp("desk", server), code="deploy.key")


def test_a_desk_without_a_public_folder_asks_nothing(asked: Asked) -> None:
    with serving_desk(asked.home) as server:
        browser = Browser(server)
        for name in ("", "decision"):
            page = browser.get(name)
            assert (page.status, "No public folder was given" in page.text) == (200, True)
        assert browser.post(asked.form()).status == 303
    assert not is_accepted(asked)
    assert Desk(asked.home).list_tables() == {"table.csv": asked.home / "table.csv"}


def read_rows(text: str) -> list[list[str]]:
    """Return the cells of all tables of a page, row by row."""
    rows = re.findall(r'<tr role="row">(.*?)</tr>', text, re.DOTALL)
    return [[html.unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in rows]


def test_a_table_is_shown_as_it_is_inspected_and_checked(asked: Asked, server: DeskServer) -> None:
    table = asked.home / "table.csv"
    table.write_text(table.read_text().replace("p1,31,", "p1,NA,", 1))
    page = Browser(server).get("table?file=table.csv")
    rows = {row[0]: row[1:] for row in read_rows(page.text)}
    count, facts = inspect_table(table, user="patient")
    assert "30 rows and 4 columns" in page.text
    assert count == 30
    assert {one.name: [str(one.missing), str(one.different), one.told] for one in facts}.items() <= {
        name: row[1:4] for name, row in rows.items()
    }.items()
    assert rows[EVIL] == [
        "numbers",
        "1",
        "29",
        next(one.told for one in facts if one.name == EVIL),
        "input of the model",
    ]
    assert [rows[name][-1] for name in ("patient", "ill", "note")] == [
        "who a person is",
        "what is predicted",
        "not read",
    ]
    # By the configuration a missing cell is refused, as `deploy check --data` does.
    (finding,) = check_table(asked.home, Consortium.load(asked.public), table)
    assert (finding.is_good, "[data.value]" in finding.told) == (False, True)
    assert html.escape(finding.told, quote=False) in page.text.replace("&#39;", "'").replace("&#34;", '"')


@pytest.mark.parametrize(
    "file", ["../../../etc/passwd", "/etc/passwd", "identity.key", "../north/identity.key", "no.csv"]
)
def test_no_other_file_is_read_as_a_table(file: str, server: DeskServer) -> None:
    page = Browser(server).get(f"table?{urlencode({'file': file})}")
    assert (page.status, "(code argument.value)" in page.text) == (422, True)
    assert "What it holds" not in page.text


def test_a_link_to_a_file_elsewhere_is_no_table_of_the_folder(asked: Asked, tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a\n1\n")
    (asked.home / "linked.csv").symlink_to(tmp_path / "other.csv")
    assert list(Desk(asked.home).list_tables()) == ["table.csv"]
    assert list(Desk(asked.home, data=tmp_path / "other.csv").list_tables()) == [
        str(tmp_path / "other.csv"),
        "table.csv",
    ]


def test_a_table_that_cannot_be_read_is_told_so(asked: Asked, server: DeskServer) -> None:
    (asked.home / "broken.xlsx").write_text("no workbook")
    page = Browser(server).get("table?file=broken.xlsx")
    assert (page.status, "(code data.unreadable)" in page.text) == (422, True)
    assert 'aria-invalid="true"' in page.text


def test_status_is_that_of_the_command(asked: Asked, server: DeskServer, silodp: Silodp) -> None:
    browser = Browser(server)
    assert "was not started yet" in browser.get("status").text
    write_answers(asked.home, 1)
    page = browser.get("status")
    told = silodp("deploy", "status", asked.home, "--json").json
    assert f"{told['round']} of {told['rounds']} rounds answered" in page.text
    assert "is running" in page.text
    assert html.escape(told["error"]) in page.text
    assert read_rows(page.text)[1:] == [
        ["server", "last seen 3 s ago"],
        ["against", "ε"],
        ["whoever sees the models", "1.25"],
        ["the server", "no guarantee"],
    ]
    (asked.home / "status.json").write_text('{"round": 1}')
    assert "(code checkpoint.damaged)" in browser.get("status").text


def test_the_ledger_shows_every_answer_once_the_newest_first(asked: Asked, server: DeskServer) -> None:
    entries = write_answers(asked.home, 2 * MAX_ROWS + 7)
    browser = Browser(server)
    shown = [
        row for n in (1, 2, 3) for row in read_rows(browser.get(f"ledger?page={n}").text) if len(row) == 7
    ]
    listed = [row for row in shown if row[0] != "time"]
    assert [row[-1] for row in listed] == [entry["sha256"][:16] for entry in entries[::-1]]
    assert [row[3] for row in listed] == [str(entry["round"] + 1) for entry in entries[::-1]]
    for number in ("0", "-1", "99", "x", "9" * 30):
        assert browser.get(f"ledger?page={number}").status == 200


@pytest.mark.slow
def test_the_ledger_shows_what_the_command_says_was_spent(tmp_path: Path, silodp: Silodp) -> None:
    with start_consortium(tmp_path, PLAIN) as parties:
        parties.start_all()
        assert parties.wait_for_server() == 0
        home = parties.home("silo-1")
        spent = silodp("audit-log", home, "--json").json["spent"]
        with serving_desk(home) as server:
            rows = {row[0]: row[1:] for row in read_rows(Browser(server).get("ledger").text)}
    assert 0 < spent["epsilon"]["server"] <= spent["limits"]["server"]
    assert rows["the server"][:2] == [
        format_epsilon(spent["epsilon"]["server"]),
        f"at most {format_epsilon(spent['limits']['server'])}",
    ]


def test_the_command_serves_until_it_is_interrupted(asked: Asked) -> None:
    command = (*COMMAND, "desk", str(asked.home), "--public", str(asked.public))
    # A shell starts what runs in its background deaf to Ctrl-C, and so would be the desk.
    hear = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=hear) as process:
        assert process.stderr is not None
        try:
            process.stderr.readline()
            with urlopen(process.stderr.readline().strip(), timeout=60) as reply:
                assert b"The desk is open" in reply.read()
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_connections_without_a_request_take_no_place(server: DeskServer) -> None:
    """Another user may keep any number open, and send a byte now and then."""
    browser, address = Browser(server), ("127.0.0.1", server.server_port)
    before = threading.active_count()
    with ExitStack() as ending:
        for _ in range(200):
            stranger = ending.enter_context(socket.create_connection(address))
            stranger.sendall(b"GET / HT")
        assert browser.get("status").status == 200
        # Before those that send nothing are closed.
        wait_until(lambda: threading.active_count() <= before + 70, 5)


def test_a_stranger_is_refused_while_a_page_is_made(
    asked: Asked, server: DeskServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else threads of strangers would gather while a long table is read."""
    browser, is_shown, is_read = Browser(server), threading.Event(), threading.Event()
    show = server.desk.show

    def show_slowly(*arguments: Any) -> Any:
        is_read.set()
        is_shown.wait(20)
        return show(*arguments)

    monkeypatch.setattr(server.desk, "show", show_slowly)
    with ThreadPoolExecutor(1) as pool:
        page = pool.submit(browser.get, "status")
        try:
            assert is_read.wait(60)
            assert Browser(server, is_in=False).get().status == 403
            assert not page.done()
        finally:
            is_shown.set()
        assert page.result().status == 200


def test_characters_that_hide_or_reorder_others_are_shown(asked: Asked, server: DeskServer) -> None:
    """As `deploy accept` shows them: a name that reads otherwise than it is could be taken for a known one."""
    evil = "a\u202eb\u200bc"
    server.desk._agreed["table"]["columns"].append(evil)
    table = asked.home / "table.csv"
    table.write_text(table.read_text().replace("note", evil, 1))
    browser = Browser(server)
    for name in ("", "table?file=table.csv"):
        page = browser.get(name)
        assert page.status == 200
        assert r"a\u202eb\u200bc" in page.text
        assert all(c.isprintable() or c == "\n" for c in page.text)


@pytest.mark.parametrize("name", ["my  table.csv", "my\xa0table.csv", " my table.csv"])
def test_a_table_with_any_name_can_be_chosen(name: str, asked: Asked, server: DeskServer) -> None:
    (asked.home / "table.csv").rename(asked.home / name)
    browser = Browser(server)
    for page in ("table", "decision"):
        # A browser sends the value as it is; of a text it would take out spaces.
        (value,) = re.findall(r'<option value="([^"]*)"', browser.get(page).text)
        assert html.unescape(value) == name
    assert browser.post(asked.form(table=name)).status == 303
    assert is_accepted(asked)


def test_a_file_whose_name_is_no_utf8_hides_no_page(asked: Asked, server: DeskServer) -> None:
    (asked.home / os.fsdecode(b"\xff.csv")).touch()
    browser = Browser(server)
    assert [browser.get(name).status for name in ("table", "decision")] == [200, 200]


def test_an_adversary_without_guarantee_is_named(asked: Asked, server: DeskServer) -> None:
    browser = Browser(server)
    assert "No guarantee" not in browser.get().text
    server.desk._agreed["epsilon"] |= {"server": None}
    assert "<h2>No guarantee</h2><p>The run promises nothing against the server.</p>" in browser.get().text


def test_an_evaluation_is_shown_as_the_command_shows_it(server: DeskServer) -> None:
    told = {"kind": "sums", "times": 3, "consent": "3 noisy sums of counts of held-out records"}
    server.desk._agreed["series"]["evaluation"] = told
    assert f"<dd>{told['consent']}</dd>" in Browser(server).get().text
