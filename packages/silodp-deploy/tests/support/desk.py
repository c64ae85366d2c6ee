"""A silo that is asked to take part, its desk, and a browser in front of it."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from silodp.config.resolve import load_config
from silodp_deploy.consortium import Consortium
from silodp_deploy.desk._pages import Desk
from silodp_deploy.desk._server import DeskServer
from silodp_deploy.setup import draft_public, make_keys, seal_public
from silodp_deploy.status import STATUS, StatusFile
from support.deployed import TABLES

EVIL = "<script>alert(1)</script>"
"""Name of a column, of a value and of a file."""
_MODEL = """
from pathlib import Path
from torch import nn
Path({mark!r}).write_text("executed")
class Net(nn.Linear):
    def __init__(self):
        super().__init__(1, 2)
"""


@dataclass(frozen=True)
class Asked:
    """A silo whose operator has decided nothing yet.

    Attributes:
        public: The sealed public folder.
        home: Folder of the silo, with its table.
        mark: A file that the code of the public folder writes when it is executed; it is not there.
        code: The code of the public folder.
    """

    public: Path
    home: Path
    mark: Path
    code: str

    def form(self, **changes: str) -> dict[str, str]:
        """Return the fields of a form that accepts."""
        return {"code": self.code, "table": "table.csv", "read": "yes", "choice": "accept"} | changes


def ask_silo(folder: Path) -> Asked:
    """Set up a consortium with a model file, whose silo south has a column with a name that is markup."""
    mark = folder / "executed"
    mapping = f'silos = {{ south = {{ columns = {{ age = "{EVIL}" }} }} }}'
    keys = ", ".join(f'"p{number}"' for number in range(40))
    text = TABLES.format(user="patient", index=f"users = [{keys}]\n{mapping}", more="")
    (folder / "net.py").write_text(_MODEL.format(mark=str(mark)))
    (folder / "two.toml").write_text(text + '[task]\nmodel = "net.py:Net"\n')
    loaded = load_config(folder / "two.toml")
    draft_public(loaded, folder / "c" / "public", loaded.read_public_data())
    (folder / "c" / "requests").mkdir()
    for name in ("server", "north", "south"):
        shutil.copy(make_keys(folder / name, name), folder / "c" / "requests")
    made = seal_public(folder / "c", "127.0.0.1", 8443)
    rows = [f"p{number},{30 + number},{('no', 'yes')[number % 2]},{EVIL}" for number in range(30)]
    (folder / "south" / "table.csv").write_text("\n".join([f"patient,{EVIL},ill,note", *rows, ""]))
    mark.unlink()
    return Asked(folder / "c" / "public", folder / "south", mark, made.code)


@contextmanager
def serving_desk(home: Path, public: Path | None = None, data: Path | None = None) -> Iterator[DeskServer]:
    """Serve the desk of a silo in a thread."""
    with DeskServer(Desk(home, public, data)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@dataclass(frozen=True)
class Reply:
    """A response."""

    status: int
    headers: Mapping[str, str]
    text: str


class Browser:
    """What a browser sends to a desk; a test changes one header, as an attacker does.

    Args:
        server: The desk.
        is_in: Whether the browser opens the link first.
    """

    def __init__(self, server: DeskServer, is_in: bool = True) -> None:
        self.server, self.cookie = server, ""
        if is_in:
            link = urlsplit(server.link)
            found = self.ask("GET", f"{link.path}?{link.query}").headers["Set-Cookie"]
            self.cookie = found.partition(";")[0]

    def ask(
        self, method: str, path: str, body: str | None = None, headers: Mapping[str, str | None] | None = None
    ) -> Reply:
        """Send a request; a header that is None is left out."""
        host = f"127.0.0.1:{self.server.server_port}"
        sent = {"Host": host, "Cookie": self.cookie or None}
        if method == "POST":
            kind = "application/x-www-form-urlencoded"
            sent |= {"Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin", "Content-Type": kind}
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=60)
        sent |= {"Content-Length": None if body is None else str(len(body.encode()))}
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in (sent | dict(headers or {})).items():
            if value is not None:
                connection.putheader(name, value)
        connection.endheaders(None if body is None else body.encode())
        reply = connection.getresponse()
        found = Reply(reply.status, dict(reply.getheaders()), reply.read().decode())
        connection.close()
        return found

    def get(self, page: str = "", headers: Mapping[str, str | None] | None = None) -> Reply:
        return self.ask("GET", self.server.base + page, None, headers)

    def post(
        self, form: Mapping[str, str], page: str = "decision", headers: Mapping[str, str | None] | None = None
    ) -> Reply:
        """Send a form with the secret field that the page has, unless the form has another one."""
        found = re.search(r'name="form_key" value="([^"]+)"', self.get("decision").text)
        fields = ({"form_key": found[1]} if found else {"form_key": self.server.form_key}) | dict(form)
        return self.ask("POST", self.server.base + page, urlencode(fields), headers)


def read_files(folder: Path) -> dict[Path, bytes]:
    """Return the content of all files below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def is_accepted(asked: Asked) -> bool:
    path = asked.home / "policy.toml"
    return path.exists() and Consortium.load(asked.public).digest in path.read_text()


def write_answers(home: Path, count: int) -> list[dict[str, Any]]:
    """Write status and audit log of a silo whose answers charged nothing; return the entries of the log."""
    entries = [
        {
            "time": f"2026-11-30T10:00:{number % 60:02}+00:00",
            "run": f"{number // 50:032x}",
            "kind": EVIL if number == 7 else "hello",
            "round": number,
            "bytes": 100 * number,
            "sha256": f"{number:064x}",
            "head": "0" * 64,
            "charges": 0,
        }
        for number in range(count)
    ]
    (home / "audit.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    status = StatusFile(home / STATUS, lambda: {"server": 3.0}, 20)
    status.write(
        round=4, epsilon={"released": 1.25, "server": None}, error=f"{EVIL} is away [deploy.address]"
    )
    return entries
