"""The token in a file: the option, the variable, the precedence of sources, and that the token is never shown.

Not for: which files are refused (`token_file.rs` of the core's tests), or what a token protects
(`test_link_security.py`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Callable

import pytest

from conftest import options
from llm_datadist import LLMConfig, LLMException, LLMStatusCode
from memory import STARTS, run_fresh
from peers import LINK_FAILED, OK, Ends, Peer
from peers import options as linked_options

if TYPE_CHECKING:
    from pathlib import Path

TOKEN, OTHER = "the token of this test", "another token, as long"


def secret(path: Path, token: str = TOKEN, mode: int = 0o600) -> str:
    path.write_text(token + "\n", encoding="utf-8")
    path.chmod(mode)
    return str(path)


def test_the_property_is_a_path(tmp_path: Path) -> None:
    config = LLMConfig()
    assert config.link_token_file is None
    assert "llm.LinkTokenFile" not in config.generate_options()
    config.link_token_file = "/somewhere"  # noqa: S105  (a path)
    assert config.generate_options()["llm.LinkTokenFile"] == "/somewhere", "opened by init, not here"
    for wrong, kind in (
        ("", LLMException),
        ("/a\0b", LLMException),
        (TOKEN, LLMException),
        (5, TypeError),
        (tmp_path, TypeError),
        (b"x", TypeError),
    ):
        with pytest.raises(kind):
            config.link_token_file = wrong  # type: ignore[assignment]
    assert config.link_token_file == "/somewhere"  # noqa: S105


def test_a_token_from_a_file_is_the_same_token(tmp_path: Path) -> None:
    path, wrong = secret(tmp_path / "token"), secret(tmp_path / "wrong", OTHER)
    with Ends() as ends:
        local = ends.local(linked_options(llm__LinkTokenFile=path))
        text = ends.peer(linked_options(llm__LinkToken=TOKEN))
        file = ends.adopt(Peer(environment={"LLM_DATADIST_TOKEN_FILE": path})).open(cluster=3)
        other = ends.adopt(Peer(environment={"LLM_DATADIST_TOKEN_FILE": wrong})).open(cluster=4)
        # The option has precedence over both variables.
        both = {"LLM_DATADIST_TOKEN_FILE": wrong, "LLM_DATADIST_TOKEN": OTHER}
        option = ends.adopt(Peer(environment=both)).open(linked_options(llm__LinkTokenFile=path), cluster=5)
        variable = ends.adopt(Peer(environment={"LLM_DATADIST_TOKEN": TOKEN})).open(cluster=6)
        peers = [text, file, other, option, variable]
        assert local.link_clusters([peer.at for peer in peers])[1] == [OK, OK, LINK_FAILED, OK, OK]


def test_the_file_is_read_once_by_init(tmp_path: Path, start: Callable[..., Any]) -> None:
    path = tmp_path / "token"
    settings = options(llm__LinkTokenFile=secret(path))
    start(settings)
    path.unlink()
    assert settings["llm.LinkTokenFile"] == str(path)


FILE, VARIABLE = "LLM_DATADIST_TOKEN_FILE", "LLM_DATADIST_TOKEN"


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        ({"LinkToken": TOKEN, "LinkTokenFile": "good"}, {}, "llm.LinkToken and llm.LinkTokenFile are both given"),
        ({}, {VARIABLE: ""}, "LLM_DATADIST_TOKEN is set, but empty"),
        ({}, {FILE: ""}, "LLM_DATADIST_TOKEN_FILE is set, but empty"),
        ({}, {FILE: "good", VARIABLE: TOKEN}, "LLM_DATADIST_TOKEN_FILE and LLM_DATADIST_TOKEN are both set"),
        ({}, {FILE: "good"}, "started"),
        ({}, {FILE: "open"}, "has mode 0644; only its owner may read it: use chmod 600"),
        ({}, {FILE: "none"}, "cannot be opened"),
        ({}, {FILE: "", VARIABLE: TOKEN}, "started"),
        ({}, {FILE: "good", VARIABLE: ""}, "started"),
        # The variables are ignored if an option gives the token.
        ({"LinkToken": TOKEN}, {FILE: "none"}, "started"),
        ({"LinkToken": TOKEN}, {FILE: "none", VARIABLE: "short"}, "started"),
        ({"LinkTokenFile": "good"}, {VARIABLE: "short"}, "started"),
        ({"LinkTokenFile": "good"}, {FILE: "none"}, "started"),
        ({"LinkTokenFile": "open"}, {VARIABLE: TOKEN}, "has mode 0644"),
        ({}, {FILE: TOKEN}, "(22 characters, not shown) is not an absolute path"),
        ({"LinkTokenFile": ""}, {VARIABLE: TOKEN}, "is not an absolute path"),
    ],
)
def test_which_source_counts(tmp_path: Path, given: dict[str, str], environment: dict[str, str], expected: str) -> None:
    paths = {
        "good": secret(tmp_path / "good"),
        "open": secret(tmp_path / "open", mode=0o644),
        "none": str(tmp_path / "none"),
    }
    code = f"{STARTS}start(**{ {key: paths.get(text, text) for key, text in given.items()} })"
    out = run_fresh(code, **{key: paths.get(text, text) for key, text in environment.items()})
    last = out.splitlines()[-1]
    assert expected in last, out
    assert last == "started" or last.startswith("LLM_PARAM_INVALID ")
    assert TOKEN not in out


def test_no_message_and_no_attribute_shows_the_token(
    tmp_path: Path, start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="LLM_DATADIST")
    texts: list[str] = []
    for number, (token, mode) in enumerate([("tooshort", 0o600), (TOKEN, 0o644), (TOKEN * 1000, 0o600)]):
        path = secret(tmp_path / str(number), token, mode)
        with pytest.raises(LLMException) as caught:
            start(options(llm__LinkTokenFile=path))
        assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
        assert path in str(caught.value)
        texts += [repr(caught.value), str(vars(caught.value))]
    for given in ({"llm__LinkToken": TOKEN}, {"llm__LinkTokenFile": secret(tmp_path / "good")}):
        dist = start(options(**given))
        texts += [repr(vars(dist)), repr(dist._engine_options)]
        dist.finalize()
    texts += [record.getMessage() for record in caplog.records]
    assert not [text for text in texts if TOKEN in text or "tooshort" in text]
