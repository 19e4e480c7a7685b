"""Host and Origin checks: web pages and names that were made to resolve to the server are refused."""

from __future__ import annotations

import pytest

from tandem.frontend.http.origin_checks import CallerNotAllowed, check_host_and_origin, hosts_allowed
from tandem.protocol.config import RouterConfig
from tests.support.fake_backend import Client, FakeBackend

COMPLETIONS = "/v1/completions"
OWN = frozenset({"localhost"})


@pytest.mark.parametrize(
    ("host", "allowed", "expected"),
    [
        ("127.0.0.1", (), OWN),
        ("localhost", (), OWN),
        ("::1", (), OWN),
        ("127.0.0.7", (), OWN),
        ("127.0.0.1", ("Box.Example:80", "[fd00::1]:8000"), OWN | {"box.example", "fd00::1"}),
        ("127.0.0.1", ("*",), None),
        ("0.0.0.0", (), None),
        ("::", (), None),
        ("10.0.0.7", (), None),
        ("no such host", (), None),
        ("0.0.0.0", ("box.example",), OWN | {"box.example"}),
    ],
)
def test_hosts_are_checked_on_loopback(host: str, allowed: tuple[str, ...], expected: frozenset[str] | None) -> None:
    assert hosts_allowed(RouterConfig(host=host, allowed_hosts=allowed)) == expected


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LOCALHOST:8000", "localhost.", "localhost.:1", "127.0.0.1", "127.0.0.1:8000", "127.0.0.1.", ""),
        *("127.0.0.2:8000", "127.255.255.254", "[::1]", "[::1]:8000", "::1", "0:0:0:0:0:0:0:1", "0.0.0.0:8000"),
        "[::]:1",
    ],
)
def test_a_server_answers_to_its_names_with_any_port(host: str) -> None:
    headers = {b"host": host.encode()} if host else {}
    check_host_and_origin(headers, "POST", COMPLETIONS, OWN, ())
    with pytest.raises(CallerNotAllowed):  # a page of another origin is not, whatever the server is called
        check_host_and_origin(headers | {b"origin": b"http://page.example"}, "POST", COMPLETIONS, OWN, ())


@pytest.mark.parametrize(
    "host",
    [
        *("page.example", "page.example:8000", "localhost.page.example", "127.0.0.1.nip.io", "[::2]", "@localhost"),
        *("[::1.page.example", "localhost@page.example", "localhost page.example", "2130706433", "127.0.0.1.1", "\xff"),
        *("128.0.0.1", "10.0.0.7:8000", "169.254.169.254", "127.0.0.1,page.example", "127.0.0.1@page.example", "["),
        ".",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_other_names_are_refused_with_the_remedy(host: str, method: str) -> None:
    headers = {b"host": host.encode("latin-1"), b"origin": f"http://{host}".encode("latin-1")}
    check_host_and_origin({b"host": headers[b"host"]}, "GET", "/health", OWN, ())
    with pytest.raises(CallerNotAllowed, match="--allowed-hosts"):
        check_host_and_origin(headers, method, COMPLETIONS, OWN, ("*",))


@pytest.mark.parametrize(
    ("origin", "origins", "is_allowed"),
    [
        ("http://localhost:8000", (), True),  # its own pages, such as /docs
        ("http://localhost:8001", (), False),
        ("http://page.example", (), False),
        ("http://127.0.0.2:8000", (), False),  # another server on this machine
        ("null", (), False),  # a sandboxed frame, a file
        ("null", ("null",), True),
        ("http://page.example", ("http://page.example",), True),
        ("http://page.example", ("http://other.example",), False),
        ("http://page.example", ("*",), True),
        ("", (), False),
    ],
)
def test_a_page_needs_an_allowed_origin_for_changes(origin: str, origins: tuple[str, ...], is_allowed: bool) -> None:
    headers = {b"host": b"localhost:8000", b"origin": origin.encode()}
    for method in ("GET", "HEAD", "OPTIONS"):  # the browser does not show the page the response
        check_host_and_origin(headers, method, COMPLETIONS, OWN, origins)
    for method in ("POST", "DELETE", "PUT", "PATCH"):
        if is_allowed:
            check_host_and_origin(headers, method, COMPLETIONS, OWN, origins)
        else:
            with pytest.raises(CallerNotAllowed, match="--cors-allow-origins"):
                check_host_and_origin(headers, method, COMPLETIONS, OWN, origins)


async def test_what_a_page_can_send_without_preflight_reaches_no_worker(backend: FakeBackend, client: Client) -> None:
    body = b'{"prompt": "a"}'
    json_type = {"content-type": "application/json"}
    attempts: list[tuple[dict[str, str], int]] = [
        ({}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-type": ""}, 415),
        (json_type | {"origin": "http://page.example"}, 403),
        (json_type | {"origin": "http://page.example", "host": "0.0.0.0:8000"}, 403),
        (json_type | {"origin": "null"}, 403),
        (json_type | {"origin": "http://rebound.example:8000", "host": "rebound.example:8000"}, 403),
    ]
    for path in (COMPLETIONS, "/v1/route/explain", "/v1/cache/pin", "/tokenize"):
        for headers, status in attempts:
            response = await client.post(path, content=body, headers=headers)
            assert (path, headers, response.status_code) == (path, headers, status)
            assert "access-control-allow-origin" not in response.headers
            if status == 415:
                assert "-H 'Content-Type: application/json'" in response.json()["error"]["message"]
    preflight = {"origin": "http://page.example", "access-control-request-method": "POST"}
    refused = await client.options(COMPLETIONS, headers=preflight)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == (
        "Pages of 'http://page.example' may not call this server; start it with --cors-allow-origins to allow them."
    )
    assert "access-control-allow-origin" not in refused.headers
    assert backend.requests == []
    assert (await client.post(COMPLETIONS, content=body, headers=json_type)).status_code == 200
    own = json_type | {"origin": "http://localhost"}
    assert (await client.post(COMPLETIONS, content=body, headers=own)).status_code == 200
    assert len(backend.requests) == 2
