"""Connections of a silo to its server, through a proxy or not, and what keeps it from its server."""

from __future__ import annotations

import base64
import http.client
import re
import ssl
from collections.abc import Iterator
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import NameOID

from silodp.errors import SilodpError
from silodp.text import shorten
from silodp_deploy.https._proxy import Proxy

CONNECT_SECONDS = 10.0
"""Time to make a connection by TCP, and again for the handshake of TLS."""
_REUSE_SECONDS = 2.0
"""An idle connection that is older is not used again: a firewall may have forgotten it."""
_ENDED = (ssl.SSLEOFError, ssl.SSLZeroReturnError)


def make_client(url: str, tls: ssl.SSLContext, proxy: Proxy | None, timeout: float) -> httpx.Client:
    """Return an HTTP client for a server.

    Args:
        url: Address of the server.
        tls: TLS settings from `certificates.make_context`. They hold through a proxy, too: it forwards TLS.
        proxy: The proxy; None: connect directly.
        timeout: Seconds of silence after which a call fails; a connection is made in at most ten.

    Raises:
        SilodpError: The address is none (code argument.value).
    """
    try:
        return httpx.Client(
            base_url=url,
            verify=tls,
            proxy=None if proxy is None else httpx.Proxy(proxy.url, auth=proxy.login),
            timeout=httpx.Timeout(timeout, connect=CONNECT_SECONDS),
            limits=httpx.Limits(keepalive_expiry=_REUSE_SECONDS),
            trust_env=False,  # of the variables, only those of proxies count: `find_proxy` reads them
            headers={"Accept-Encoding": "identity"},  # a compressed reply could be of any length
            cookies=CookieJar(
                DefaultCookiePolicy(allowed_domains=())
            ),  # nothing of the server's choice is kept
        )
    except httpx.InvalidURL as error:
        raise SilodpError(
            f"url = {shorten(url)}: {error}; write an IPv6 address in brackets.",
            code="argument.value",
            field="url",
        ) from None


def explain_failure(error: Exception, url: str, tls: ssl.SSLContext, proxy: Proxy | None) -> SilodpError:
    """Return what keeps a silo from its server, and what its operator can do.

    Where TLS failed, this connects once more to read the certificate that is shown, and sends nothing else.

    Args:
        error: The failure of a call.
        url: Address of the server.
        tls: TLS settings of the silo.
        proxy: The proxy through which it called; None: it called directly.

    Returns:
        An error with one of the codes deploy.proxy (the proxy), deploy.proxy_login (its user and password),
        deploy.intercepted (another one's certificate), deploy.certificate (TLS), deploy.address (all others).
    """
    causes = list(_list_causes(error))
    reason = str(error) or type(error).__name__
    way = "" if proxy is None else f" through the proxy at {proxy.url}"
    if proxy is not None and isinstance(error, httpx.ProxyError):
        return _explain_refusal(str(error), url, proxy)
    # A connection that merely ended during the handshake shows nobody's certificate.
    if any(isinstance(one, ssl.SSLError) and not isinstance(one, _ENDED) for one in causes):
        issuer = find_foreign_issuer(url, tls, proxy)
        if issuer is not None:
            return SilodpError(
                f"the certificate that is shown for {url}{way} was issued by {shorten(issuer)} and not by this "
                "consortium, so nothing was sent; ask for an exemption of this host from the inspection of TLS (by a "
                "proxy or an antivirus program), or check address and public folder if another server answers.",
                code="deploy.intercepted",
            )
    if any(isinstance(one, ssl.SSLCertVerificationError) for one in causes):
        return SilodpError(
            f"the server at {url} cannot be reached{way} ({reason}); check that the server has this consortium's "
            "public folder, the name in its address is the one that was sealed, and the clock here is right.",
            code="deploy.certificate",
        )
    # What is reached first is the proxy. Where a connection ended it was reached, and the one behind it broke.
    has_ended = any(isinstance(one, (ConnectionResetError, *_ENDED)) for one in causes)
    if proxy is not None and isinstance(error, httpx.ConnectError | httpx.ConnectTimeout) and not has_ended:
        behind = ", or the server behind it," if isinstance(error, httpx.ConnectTimeout) else ""
        return SilodpError(
            f"the proxy at {proxy.url}{behind} cannot be reached ({reason}); check the address in {proxy.source}, and "
            "that this machine may connect to it.",
            code="deploy.proxy",
        )
    return SilodpError(
        f"the server at {url} cannot be reached{way} ({reason}); check that it is running and that firewalls and names "
        "let it be reached from here.",
        code="deploy.address",
    )


def _list_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _explain_refusal(reply: str, url: str, proxy: Proxy) -> SilodpError:
    """Return the error for a proxy that answers CONNECT with another status than 200."""
    found = re.match(r"\d{3}", reply)
    status = int(found[0]) if found else 0
    host = httpx.URL(url).netloc.decode()
    if status == 407 and proxy.login is None:
        return SilodpError(
            f"the proxy at {proxy.url} asks for user and password (407): write them into a file that proxy_login in "
            "silo.toml names, and start the silo again; only Basic authentication is supported.",
            code="deploy.proxy_login",
        )
    if status == 407:
        return SilodpError(
            f"the proxy at {proxy.url} does not accept user and password from {proxy.login_source} (407): correct "
            "them, and start the silo again; only Basic authentication is supported.",
            code="deploy.proxy_login",
        )
    if status >= 500:
        return SilodpError(
            f"the proxy at {proxy.url} cannot connect to {host} ({status}); check that the server is running, and "
            "ask who runs the proxy whether it can reach this address.",
            code="deploy.proxy",
        )
    return SilodpError(
        f"the proxy at {proxy.url} does not allow connections to {host} ({status}); ask who runs it to allow CONNECT "
        "to this host and port.",
        code="deploy.proxy",
    )


def find_foreign_issuer(url: str, tls: ssl.SSLContext, proxy: Proxy | None) -> str | None:
    """Return who issued the certificate that is shown at an address, where it was not the consortium's authority.

    Args:
        url: Address of the server.
        tls: TLS settings of the silo, with the certificate of the authority.
        proxy: The proxy; None: connect directly.

    Returns:
        Name of the issuer as the certificate states it, which anyone may have invented; None where the authority issued
        the certificate, or none is shown.
    """
    # Only to look: without the silo's certificate and without a byte of the run. An interceptor may know TLS 1.2 only.
    look = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    look.check_hostname, look.verify_mode = False, ssl.CERT_NONE
    server, via = httpx.URL(url), None if proxy is None else httpx.URL(proxy.url)
    host, port = server.host, server.port or 443
    first = (host, port) if via is None else (via.host, via.port)
    connection = http.client.HTTPSConnection(*first, timeout=CONNECT_SECONDS, context=look)
    if proxy is not None:
        login = base64.b64encode(":".join(proxy.login).encode()).decode() if proxy.login else None
        connection.set_tunnel(host, port, {"Proxy-Authorization": f"Basic {login}"} if login else {})
    try:
        connection.connect()
        shown = x509.load_der_x509_certificate(connection.sock.getpeercert(True) or b"")
    except (OSError, http.client.HTTPException, ValueError, TypeError):
        return None
    finally:
        connection.close()
    for authority in tls.get_ca_certs(binary_form=True):
        try:
            shown.verify_directly_issued_by(x509.load_der_x509_certificate(authority))
        except (ValueError, TypeError, InvalidSignature):
            continue
        return None
    names = shown.issuer.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else shown.issuer.rfc4514_string()
