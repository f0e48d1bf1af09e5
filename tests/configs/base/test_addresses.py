import pytest

from configs.base.addresses import is_loopback, url_problem


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "LocalHost"])
def test_this_machine_alone(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "node1", "localhost.example", "127.0.0.1.example", ""])
def test_others_too(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/get_reward", "https://rewards.example", "http://[::1]:1/x"])
def test_addresses_of_servers(url: str) -> None:
    assert url_problem(url) is None


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("127.0.0.1:8000", "=127.0.0.1:8000: must be http://HOST:PORT/PATH or https://..."),
        ("ftp://x/y", "=ftp://x/y: must be"),
        ("http://", "=http://: must be"),
        ("http://x:port/", "=http://x:port/: invalid address: Port could not be cast"),
        ("http://me:secret@x/y", ": contains a user name or a password; remove them"),
    ],
)
def test_what_is_none(url: str, told: str) -> None:
    problem = url_problem(url) or ""
    assert problem.startswith(told) and "secret" not in problem
