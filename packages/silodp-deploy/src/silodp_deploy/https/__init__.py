"""Courier over HTTPS: silos connect to one port of the server, ask for requests, and send answers back.

Both ends carry signed bytes and know nothing of their content. All state that matters is in the stores of the
parties: a request is offered to its silo until the silo answers or the time for it is over, and a silo that is
asked again gives the answer that it has stored. `HttpsServer` is the `Transport` of the server of a run, `HttpsClient`
the loop of a silo.

A silo proves at the beginning of a connection that it has its long-term key: it signs a random challenge of the
server, and gets a token for its further calls. Only the validity of certificates depends on clocks.
"""

from silodp.errors import SilodpError
from silodp.text import name_extra

try:
    from silodp_deploy.https._client import HttpsClient
    from silodp_deploy.https._connections import listen_at
    from silodp_deploy.https._outgoing import explain_failure, make_client
    from silodp_deploy.https._proxy import Proxy, find_proxy
    from silodp_deploy.https._server import HttpsServer
except ImportError as error:
    raise SilodpError(
        f"the HTTPS courier needs '{error.name}', which is not installed: {name_extra('deploy')}.",
        code="deploy.not_installed",
    ) from None

__all__ = ["HttpsClient", "HttpsServer", "Proxy", "explain_failure", "find_proxy", "listen_at", "make_client"]
