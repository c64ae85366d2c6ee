"""Carries the messages of a deployment as files; docs/couriers.md says how. It runs at the server and at every silo.

python folder_courier.py server SOCKET OUT IN    the folders hold one folder for each silo
python folder_courier.py silo SOCKET OUT IN      the folders of this silo alone
    --once                                       end when what lies in IN is answered, as in job.sh

What is in OUT has to be carried into IN at the other end. IN and OUT may be one folder that both ends share.
"""

import hashlib
import sys
import time
from pathlib import Path

from silodp_deploy import Reply, ask_silo, give_reply, take_request


def put(folder: Path, exchange: str, data: bytes, kind: str) -> None:
    """Write a file whose name states its exchange and its content, so that others see it whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{exchange}-{hashlib.sha256(data).hexdigest()[:16]}.{kind}"
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    partial.rename(path)


def read(path: Path) -> tuple[str, bytes] | None:
    """Return exchange and content of a file; None while it is not whole, since somebody is still copying it."""
    exchange, _, digest = path.stem.partition("-")
    data = path.read_bytes()
    return (exchange, data) if hashlib.sha256(data).hexdigest()[:16] == digest else None


def carry_for_server(socket: str, outgoing: Path, incoming: Path) -> None:
    """Put a request into the folder of its silo, and give back the answers that have come."""
    request = take_request(socket, wait=0.1)
    if request is not None:
        (incoming / request.silo).mkdir(parents=True, exist_ok=True)
        put(outgoing / request.silo, request.exchange, request.body, "request")
    for path in [*incoming.glob("*/*.answer"), *incoming.glob("*/*.refused")]:
        found = read(path)
        if found is not None:
            exchange, data = found
            give_reply(
                socket, exchange, Reply(data) if path.suffix == ".answer" else Reply(b"", data.decode())
            )
            for old in [path, *outgoing.glob(f"*/{exchange}-*.request")]:
                old.unlink()


def carry_for_silo(socket: str, outgoing: Path, incoming: Path) -> None:
    """Have the silo answer the requests that have come."""
    for path in incoming.glob("*.request"):
        found = read(path)
        if found is not None:
            exchange, data = found
            reply = ask_silo(socket, data)
            put(
                outgoing,
                exchange,
                *((reply.refused.encode(), "refused") if reply.refused else (reply.body, "answer")),
            )
            path.unlink(missing_ok=True)  # where the folder is shared, the server's end may have deleted it
    time.sleep(0.05)


if len(sys.argv) < 5 or sys.argv[1] not in ("server", "silo"):
    sys.exit("Usage: folder_courier.py server|silo SOCKET OUT IN [--once]")
for folder in sys.argv[3:5]:
    Path(folder).mkdir(parents=True, exist_ok=True)
carry = {"server": carry_for_server, "silo": carry_for_silo}[sys.argv[1]]
is_once = sys.argv[5:] == ["--once"]
while True:
    try:
        carry(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    except OSError as error:  # the party has not started, or stops: it will come back
        print(error, file=sys.stderr)
        if is_once:
            sys.exit(1)  # what is not answered lies there for the next job
        time.sleep(1)
    if is_once:
        break
