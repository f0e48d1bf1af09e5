import pytest

from configs.base.addresses import is_loopback, url_problem


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "LocalHost"])
def test_loopback_addresses_are_recognized(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "node1", "localhost.example", "127.0.0.1.example", ""])
def test_other_addresses_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/get_reward", "https://rewards.example", "http://[::1]:1/x"])
def test_urls_of_servers_are_accepted(url: str) -> None:
    assert url_problem(url) is None


@pytest.mark.parametrize(
    ("url", "start"),
    [
        ("127.0.0.1:8000", "=127.0.0.1:8000: must be http://HOST:PORT/PATH or https://..."),
        ("ftp://x/y", "=ftp://x/y: must be"),
        ("http://", "=http://: must be"),
        ("http://x:port/", "=http://x:port/: invalid address: Port could not be cast"),
        ("http://me:secret@x/y", ": contains a user name or a password; remove them"),
    ],
)
def test_other_urls_are_refused_without_showing_a_password(url: str, start: str) -> None:
    problem = url_problem(url) or ""
    assert problem.startswith(start) and "secret" not in problem
