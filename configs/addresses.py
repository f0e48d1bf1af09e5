"""Where a server is: what a user may write, and whether only this machine can reach it."""

from ipaddress import ip_address
from urllib.parse import urlsplit

from configs.secret_names import USER_IN_ADDRESS


def is_loopback(host: str) -> bool:
    """127.0.0.1 and the like, ::1, or localhost."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def url_problem(url: str) -> str | None:
    """What is wrong with the address of a server, to follow its key; None if it will do."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"={url}: is no address: {error}; it must be http://HOST:PORT/PATH"
    if USER_IN_ADDRESS.search(url):  # not repeated: it may hold a password
        return ": has a user or a password in it; leave them out"
    if parts.scheme not in ("http", "https") or not host:
        return f"={url}: must be http://HOST:PORT/PATH or https://..."
    return None
