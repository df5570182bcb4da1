"""Derives options from those given to ``LLMDataDist.init`` and from the environment.

The engine checks the values (``_core.DataDist``).
"""

from __future__ import annotations

import os

from llm_datadist import _core
from llm_datadist.option_table import ENVIRONMENT, KNOWN_KEYS, OWN_KEYS, TOKEN_VARIABLES, is_known
from llm_datadist.original.logged_calls import shown
from llm_datadist.original.spelling import LISTED, refusal, report_unknown, resembles
from llm_datadist.original.status import LLMException, raise_if_false, raise_if_true

__all__ = [
    "BACKEND",
    "CACHE_MANAGER",
    "LISTEN",
    "LISTEN_TOO",
    "LOCAL_RESOURCES",
    "check_graph_memory",
    "check_names",
    "listen_address",
    "resolve",
]

CACHE_MANAGER = "llm.EnableCacheManager"
REMOTE_ACCESS = "llm.EnableRemoteCacheAccessible"
LISTEN = "llm.listenIpInfo"
LISTEN_TOO = "llm.ListenIpInfo"
LOCAL_RESOURCES = "llm.LocalCommRes"
BACKEND = "llm.TransferBackend"


def resolve(options: dict[str, str], role: str) -> dict[str, str]:
    """Return a copy of ``options`` with the options derived from them."""
    resolved = {**options, "llm.Role": role}
    for option, variable in ENVIRONMENT.items():
        if os.environ.get(variable):
            resolved.setdefault(option, os.environ[variable])
    if not resolved.keys() & TOKEN_VARIABLES.keys():
        resolved.update(_token_of_the_environment())
    if LISTEN_TOO in resolved:
        resolved.setdefault(LISTEN, resolved[LISTEN_TOO])
    if LOCAL_RESOURCES in resolved:
        resolved.setdefault(CACHE_MANAGER, "1")
        resolved.setdefault(REMOTE_ACCESS, "1")
    cache_manager = resolved.get(CACHE_MANAGER) == "1"
    if LOCAL_RESOURCES in resolved:
        raise_if_false(cache_manager, "llm.LocalCommRes needs {}=1", CACHE_MANAGER)
    if BACKEND in resolved:
        raise_if_false(cache_manager, "llm.TransferBackend needs {}=1", CACHE_MANAGER)
        resolved.setdefault(REMOTE_ACCESS, "1")
        raise_if_false(resolved[REMOTE_ACCESS] != "0", "llm.TransferBackend needs {}=1", REMOTE_ACCESS)
        raise_if_false(LISTEN in resolved, "{} needs {}{}", BACKEND, LISTEN, _unknown_backend(resolved[BACKEND]))
    if cache_manager and LISTEN in resolved:
        resolved["llm.ListenIp"], resolved["llm.ListenPort"] = listen_address(resolved[LISTEN])
    return resolved


def check_names(options: dict[str, str]) -> None:
    """Log one line at ERROR for each unknown key, or refuse it.

    Raises:
        LLMException: ``LLM_PARAM_INVALID``: a key resembles an option which the original does not have.
    """
    unknown = [key for key in options if isinstance(key, str) and not is_known(key)]
    for key in unknown:
        if resembles(key, KNOWN_KEYS, OWN_KEYS):
            raise_if_true(True, "there is no option {}", refusal(key, KNOWN_KEYS, LISTED))
    report_unknown("option", unknown, KNOWN_KEYS, LISTED)


def _unknown_backend(backend: object) -> str:
    """Return the end of an error text that says why ``backend`` is no transfer backend, or an empty text."""
    if not isinstance(backend, str):  # the engine says so
        return ""
    try:
        _core.check_option("transfer_backend", backend)
    except LLMException as error:
        return f"; besides, {error}"
    return ""


def _token_of_the_environment() -> dict[str, str]:
    """Return the token option that ``LLM_DATADIST_TOKEN_FILE`` or ``LLM_DATADIST_TOKEN`` gives, if one is set."""
    given = {option: os.environ[name] for option, name in TOKEN_VARIABLES.items() if os.environ.get(name)}
    for name in TOKEN_VARIABLES.values():
        # An empty variable means that the deployment forgot to fill in the secret; the engine must not run without it.
        empty = not given and name in os.environ
        raise_if_true(empty, "{} is set, but empty; unset it, or give it a value", name)
    raise_if_true(len(given) > 1, "{} and {} are both set; unset one of them", *TOKEN_VARIABLES.values())
    return given


def check_graph_memory(size: object) -> None:
    """Check ``ge.flowGraphMemMaxSize``: one entry of decimal digits. It has an effect in KvCacheManager mode only."""
    _core.check_isinstance("ge.flowGraphMemMaxSize", size, str)
    if isinstance(size, str):
        text = shown(size)
        raise_if_false("," not in size, "ge.flowGraphMemMaxSize={} has several entries; one is allowed", text)
        digits = size.isascii() and size.isdigit()
        raise_if_false(digits, "ge.flowGraphMemMaxSize={} is not a decimal number of bytes", text)


def listen_address(info: str) -> tuple[str, str]:
    """Return the address and the port of ``ip:port`` or ``[ipv6]:port``, both as text."""
    _core.check_isinstance(LISTEN, info, str, allow_none=False)
    ip, colon, port = info.rpartition(":")
    plain = bool(ip) and not set(ip) & set(":[]")
    bracketed = ip.startswith("[") and ip.endswith("]") and ip != "[]"
    form = "{}={} is not of the form ip:port or [ipv6]:port, such as 127.0.0.1:26000 or [::1]:26000"
    raise_if_false(colon and (plain or bracketed), form, LISTEN, shown(info))
    if not (port.isascii() and port.isdigit()):
        raise ValueError(f"{LISTEN}={shown(info)}: the port is not a decimal number")
    _core.check_uint16("listen port", int(port))
    return ip, port
