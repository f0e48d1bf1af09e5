"""Server addresses: validation of URLs, and detection of loopback hosts."""

from ipaddress import ip_address
from urllib.parse import urlsplit

from configs.base.secrets import USER_IN_ADDRESS

LONGEST_PAUSE = 60.0
"""Seconds between two requests to a server that fails, at most, and for which another one is preferred."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host: 127.0.0.0/8, ::1 or localhost."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def url_problem(url: str) -> str | None:
    """Error text for an invalid server address, to append to its key; None if the address is valid."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"={url}: invalid address: {error}; must be http://HOST:PORT/PATH"
    if USER_IN_ADDRESS.search(url):
        # The message does not repeat the URL, which may contain a password.
        return ": contains a user name or a password; remove them"
    if parts.scheme not in ("http", "https") or not host:
        return f"={url}: must be http://HOST:PORT/PATH or https://..."
    return None
