"""`silodp desk`: pages on a silo's own machine for people who decide and do not program.

This folder and its line in pyproject.toml can be deleted: the other commands stay as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from silodp.cli._console import log
from silodp_deploy.cli.deploy import Folder


def desk(
    folder: Folder,
    public: Annotated[
        Path | None,
        Option(metavar="DIR", help="The consortium's public folder, for the pages about what it asks."),
    ] = None,
    data: Annotated[
        Path | None,
        Option(metavar="FILE", help="The silo's table. Default: that of policy.toml, or those in FOLDER."),
    ] = None,
    index: Annotated[
        Path | None,
        Option(metavar="FILE", help="The file by which a trust center numbers the silo's persons."),
    ] = None,
    port: Annotated[
        int | None, Option(help="Port of the pages on this machine. Default: a free one.", min=0, max=65535)
    ] = None,
) -> None:
    """Show a silo's table, what is asked of it, status and ledger as pages on this machine, and accept or refuse there.

    The pages are answered at 127.0.0.1 alone, to the one browser that opens the link. Stop with Ctrl-C.
    """
    from silodp_deploy.desk._pages import Desk
    from silodp_deploy.desk._server import DeskServer

    with DeskServer(Desk(folder, public, data, index), port or 0) as server:
        log("Open this link in a browser on this machine; it works once:")
        log(f"  {server.link}")
        log("Ctrl-C ends the desk.")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            log("The desk has ended.")
