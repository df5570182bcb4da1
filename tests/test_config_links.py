"""Options about links: the environment, the secrecy of the token, and addresses of peers.

Not for: properties of a config (`test_config.py`), or links that come about (`test_links.py`).
"""

from __future__ import annotations

import copy
import json
import logging
import pickle
from typing import Any, Callable

import pytest

from conftest import options
from llm_datadist import LLMClusterInfo, LLMConfig, LLMException, LLMRole
from memory import STARTS, TE, raising, run_fresh

TOKEN = "correct horse battery staple"  # noqa: S105  (the one under test)


def test_the_token_is_a_text_that_does_not_show() -> None:
    config = LLMConfig()
    config.link_token = TOKEN
    made = config.generate_options()
    assert made["llm.LinkToken"] == TOKEN
    assert isinstance(made["llm.LinkToken"], str)
    assert json.loads(json.dumps(made)) == made
    again = pickle.loads(pickle.dumps(made))  # noqa: S301  (our own bytes)
    assert again == made
    for value in (made, list(made.values()), config, copy.deepcopy(made), again):
        assert TOKEN not in f"{value} {value!r}"


def test_the_token_is_in_no_log_no_error_and_no_attribute(
    start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="LLM_DATADIST")
    config = LLMConfig()
    config.link_token = TOKEN
    given = {**options(llm__listenIpInfo="127.0.0.1:0"), **config.generate_options()}
    dist = start(given)
    dist.switch_role(LLMRole.DECODER, dict(given))
    dist.finalize()
    short = "tooshort"
    texts = []
    wrong = [("llm.LinkToken", bad) for bad in (short, short + "\ud800" * 16, [short])]
    for key, bad in [("llm.LinkStreams", "x"), *wrong]:
        with pytest.raises((LLMException, ValueError, TypeError)) as caught:
            start({**given, key: bad})
        texts += [repr(caught.value), str(vars(caught.value)), str(caught.value.__cause__)]
    texts += [record.getMessage() for record in caplog.records]
    texts += [repr(vars(dist)), repr(dist._engine_options)]
    assert any("switch_role" in text for text in texts), "nothing was logged"
    assert not [text for text in texts if TOKEN in text or short in text]


@pytest.mark.parametrize(
    ("variable", "bad", "option", "good"),
    [
        ("LLM_DATADIST_TOKEN", "short", "LinkToken", TOKEN),
        ("LLM_DATADIST_ACCEPT_REMOTE", "x", "LinkAcceptRemote", "0"),
        ("LLM_DATADIST_TRANSPORT", "x", "LinkTransport", "tcp"),
        ("LLM_DATADIST_RANK_HOSTS", "x", "RankHosts", "{}"),
        ("LLM_DATADIST_RANK_PORT", "x", "RankPort", "5000"),
        ("HCCL_CONNECT_TIMEOUT", "x", "LinkTotalTime", "5"),
    ],
)
def test_init_reads_the_environment_where_an_option_is_absent(variable: str, bad: str, option: str, good: str) -> None:
    code = STARTS + "import os\n"
    for value in (bad, good, ""):
        code += f"os.environ[{variable!r}] = {value!r}\nstart()\n"
    code += f"os.environ[{variable!r}] = {bad!r}\nstart({option}={good!r})\n"
    out = [line for line in run_fresh(code).splitlines() if not line.startswith("[ERROR]")]
    refused, taken, empty, outranked = out
    assert refused.startswith("LLM_PARAM_INVALID")
    assert (taken, outranked) == ("started", "started")
    # An empty variable counts as unset, except that of a token, which somebody may have forgotten to fill in.
    forgotten = "LLM_PARAM_INVALID LLM_DATADIST_TOKEN is set, but empty"
    assert empty.startswith(forgotten if variable == "LLM_DATADIST_TOKEN" else "started")


@pytest.mark.parametrize(
    ("given", "kept", "shown"),
    [
        ("::1", "::1", "[::1]"),
        ("2001:DB8:0:0:0:0:0:A", "2001:db8::a", "[2001:db8::a]"),
        ("::ffff:1.2.3.4", "::ffff:1.2.3.4", "[::ffff:1.2.3.4]"),
        ("1.2.3.4", 67305985, "1.2.3.4"),
        (5, 5, "5.0.0.0"),
        (2**40, 2**40, "1099511627776"),
    ],
)
def test_addresses_are_integers_or_ipv6_texts(given: Any, kept: Any, shown: str) -> None:
    info = LLMClusterInfo()
    info.remote_cluster_id = 7
    info.append_remote_ip_info(given, 5)
    info.append_local_ip_info(given, 0)
    assert info.remote_ip_info_list == [(kept, 5)]
    assert info.local_ip_info_list == [(kept, 0)]
    assert repr(info) == f"LLMClusterInfo(remote_cluster_id=7, remote=[{shown}:5], local=[{shown}:0])"


def test_a_text_with_colons_that_is_no_address() -> None:
    info = LLMClusterInfo()
    for text in (":", ":::", "::1::", "12345::", "fe80::1%lo", "[::1]", "::1\0", "::\ud800"):
        with pytest.raises(RuntimeError, match="ip="):
            info.append_remote_ip_info(text, 1)
    with raising(TE):
        info.append_remote_ip_info(None, -1)  # the address is checked first
    assert info.remote_ip_info_list == []
