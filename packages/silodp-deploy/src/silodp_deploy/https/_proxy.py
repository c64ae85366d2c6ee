"""The HTTP proxy of a silo's network: where it is set, and with which user and password."""

from __future__ import annotations

import ipaddress
import os
import re
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from silodp.config.build import make_unknown_error
from silodp.config.toml_values import read_toml
from silodp.errors import SilodpError
from silodp.wire.files import is_private
from silodp_deploy import SETTINGS

_VARIABLE = "HTTPS_PROXY"
_FIELDS = ("proxy", "proxy_login")
_MAX_LOGIN = 1024
_LOGIN = re.compile(r"(?P<user>[^:\x00-\x1f\x7f]+):(?P<password>[^\x00-\x1f\x7f]+)\r?\n?")


@dataclass(frozen=True)
class Proxy:
    """A proxy that forwards TLS unread (CONNECT, RFC 9110, section 9.3.6): it sees host, port, times and sizes.

    Attributes:
        url: "http://HOST:PORT", without user and password.
        source: Where it is set: a file, or a variable of the environment.
        login: User and password; None where the proxy asks for none.
        login_source: Where user and password are set; "" where they are not.
    """

    url: str
    source: str
    login: tuple[str, str] | None = field(default=None, repr=False)
    login_source: str = ""


def find_proxy(folder: Path, url: str) -> Proxy | None:
    """Return the proxy through which a silo reaches its server; None where it connects directly.

    The silo's own file comes first. Without it, HTTPS_PROXY and NO_PROXY of the environment hold, also in small
    letters; an address of this machine itself needs no proxy then.

    Args:
        folder: Folder of the silo, which may hold silo.toml.
        url: Address of the server.

    Raises:
        SilodpError: The setting is no address of a proxy (code deploy.proxy), silo.toml has another field (codes
            config.*), or the file with user and password cannot be used (code deploy.proxy_login).
    """
    path = folder / SETTINGS
    network = _read_network(path) if path.exists() else {}
    stated, source = network.get("proxy"), str(path)
    if stated is None:
        stated, source = _find_variable(url), _VARIABLE
    if not stated:
        return None
    proxy = _parse(stated, source)
    if proxy.login and source != _VARIABLE:
        # This file is copied and shown more easily than one that holds nothing else.
        raise _refuse(
            source, "leave user and password out of proxy, and name a file with them in proxy_login"
        )
    if name := network.get("proxy_login"):
        return Proxy(proxy.url, source, _read_login(folder / name), str(folder / name))
    return proxy


def _read_network(path: Path) -> dict[str, str]:
    """Return the table [network] of silo.toml, the only one."""
    table = read_toml(path)
    if unknown := sorted(table.keys() - {"network"}):
        raise make_unknown_error(unknown[0], ["network"], str(path))
    network = table.get("network", {})
    if not isinstance(network, dict) or not all(isinstance(value, str) for value in network.values()):
        raise SilodpError(
            f"{path}: write a table [network], with texts in quotes below it.",
            code="config.value",
            field="network",
        )
    if unknown := sorted(network.keys() - set(_FIELDS)):
        raise make_unknown_error(unknown[0], _FIELDS, str(path), "network")
    return network


def _find_variable(url: str) -> str | None:
    """Return what the environment says about the proxy for an address."""
    found = urllib.request.getproxies_environment().get("https")
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL:
        return None  # `make_client` refuses it
    if found is None or _is_local(address.host):
        return None
    # NO_PROXY may list a host with a port.
    host = address.host if ":" in address.host else f"{address.host}:{address.port or 443}"
    return None if urllib.request.proxy_bypass(host) else found


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _parse(text: str, source: str) -> Proxy:
    """Return the proxy that an address names; no error repeats it, since it may have a password."""
    try:
        address = httpx.URL(text if "://" in text else f"http://{text}")
        is_plain = address.path in ("", "/") and not address.query and not address.fragment
    except httpx.InvalidURL:
        is_plain = False
    if not is_plain or address.scheme != "http" or not address.host or address.port is None:
        raise _refuse(source, "give the proxy as http://HOST:PORT; others, such as SOCKS, are not supported")
    login = (address.username, address.password) if address.userinfo else None
    url = str(httpx.URL(scheme="http", host=address.host, port=address.port))
    return Proxy(url, source, login, source if login else "")


def _refuse(source: str, remedy: str) -> SilodpError:
    return SilodpError(
        f"the proxy in {source} cannot be used: {remedy}.",
        code="deploy.proxy",
        field=_VARIABLE if source == _VARIABLE else "network.proxy",
    )


def _read_login(path: Path) -> tuple[str, str]:
    """Return user and password from a file that nobody else may read."""
    remedy = "write USER:PASSWORD into it, as its only line, for this user alone (chmod 600)"
    try:
        with path.open("rb") as file:
            is_safe = is_private(
                os.fstat(file.fileno())
            )  # the file that is read, whoever replaces it meanwhile
            found = _LOGIN.fullmatch(file.read(_MAX_LOGIN).decode(errors="replace")) if is_safe else None
    except OSError as error:
        raise _refuse_login(path, f"cannot be read ({error.strerror})", remedy) from None
    if not is_safe:
        raise _refuse_login(path, "can be read by others, or belongs to another user", remedy)
    if found is None:
        raise _refuse_login(path, "does not hold user and password", remedy)
    return found["user"], found["password"]


def _refuse_login(path: Path, problem: str, remedy: str) -> SilodpError:
    return SilodpError(
        f"the file {path} for the proxy {problem}: {remedy}.",
        code="deploy.proxy_login",
        field="network.proxy_login",
    )
