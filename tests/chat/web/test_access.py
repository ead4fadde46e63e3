"""Who is let in, by headers alone."""

from __future__ import annotations

import pytest
from edge_llm_chat.web.access import Access, Headers, Refused

OURS = ["http://127.0.0.1:8081", "http://localhost:8081"]


def headers(**values: str | list[str]) -> Headers:
    known = {name.replace("_", "-"): value if isinstance(value, list) else [value] for name, value in values.items()}
    return lambda name: known.get(name, [])


@pytest.mark.parametrize("host", ["127.0.0.1:8081", "localhost:8081", "LOCALHOST:8081"])
def test_our_own_names_are_answered(host: str) -> None:
    Access(OURS).check_host(headers(Host=host))


@pytest.mark.parametrize(
    "hosts",
    [
        [],
        ["evil.example:8081"],
        ["127.0.0.1"],
        ["127.0.0.1:8082"],
        ["localhost.evil.example:8081"],
        ["localhost:8081"] * 2,
    ],
)
def test_other_names_are_not(hosts: list[str]) -> None:
    with pytest.raises(Refused) as refused:
        Access(OURS).check_host(headers(Host=hosts))
    assert refused.value.status == 421


@pytest.mark.parametrize(
    "origin",
    [
        "http://127.0.0.1:8082",
        "https://127.0.0.1:8081",
        "http://localhost:8081",  # ours as well, but not the page that asks for this host
        "http://127.0.0.1:8081.evil.example",
        "http://127.0.0.1",
        "null",
        "",
        ["http://127.0.0.1:8081", "http://127.0.0.1:8081"],
    ],
)
@pytest.mark.parametrize("required", [True, False])
def test_an_origin_must_be_exactly_ours(origin: str | list[str], required: bool) -> None:
    access = Access(OURS)
    with pytest.raises(Refused):
        access.check_origin(headers(Host="127.0.0.1:8081", Origin=origin), required=required)


def test_a_missing_origin_is_refused_where_browsers_always_tell_it() -> None:
    access, asked = Access(OURS), headers(Host="localhost:8081")
    access.check_origin(asked, required=False)
    access.check_origin(headers(Host="localhost:8081", Origin="http://localhost:8081"), required=True)
    with pytest.raises(Refused):
        access.check_origin(asked, required=True)


def test_a_link_opens_once_and_a_newer_one_ends_an_older() -> None:
    access = Access(OURS)
    assert access.enter("") is None
    old = access.new_link().partition("#")[2]
    link = access.new_link()
    assert link.startswith(f"http://127.0.0.1:8081{access.base}#")
    key = link.partition("#")[2]
    assert access.enter(old) is None
    assert access.enter("é" + key) is None
    assert access.waits
    cookie = access.enter(key)
    assert cookie is not None
    assert cookie != key
    assert not access.waits
    assert access.enter(key) is None


def test_a_cookie_counts_only_for_what_the_user_or_our_page_asks() -> None:
    access = Access(OURS)
    cookie = access.enter(access.new_link().partition("#")[2])
    assert access.knows(headers(), cookie)
    assert access.knows(headers(Sec_Fetch_Site="none"), cookie)
    assert access.knows(headers(Sec_Fetch_Site="same-origin"), cookie)
    for site in ("same-site", "cross-site", "?"):  # same-site: a page of another port of this machine
        assert not access.knows(headers(Sec_Fetch_Site=site), cookie)
    for other in (None, "", "x", f"{cookie}x", "é"):
        assert not access.knows(headers(), other)


def test_two_chats_have_nothing_in_common() -> None:
    one, two = Access(OURS), Access(OURS)
    assert one.base != two.base
    assert not two.knows(headers(), one.enter(one.new_link().partition("#")[2]))


def test_an_encrypted_address_has_an_encrypted_cookie_and_origin() -> None:
    access = Access(["https://chat.example.org"])
    assert access.secure
    access.check_host(headers(Host="chat.example.org"))
    access.check_origin(headers(Host="chat.example.org", Origin="https://chat.example.org"), required=True)
    with pytest.raises(Refused):
        access.check_origin(headers(Host="chat.example.org", Origin="http://chat.example.org"), required=True)
