"""Roles of the clients of a keeper: tokens, files of tokens, processes of other users; and checksums of values.

Not for: each request with each role, replayed proofs, and wrong bytes in a slot (`crates/keeper/src`).
"""

from __future__ import annotations

import contextlib
import errno
import grp
import json
import os
import re
import stat
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import Error, InvalidArgument, Keeper, Store
from llm_datadist.commands.main import main
from llm_datadist.integrations.store_settings import StoreSettings
from llm_datadist.native import KeeperObserver

from .stores import LIMIT, VALUE, got, key, line, opened, process, value

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

TOKENS = {role: f"secret-{role}-0123456789" for role in ("read", "write", "admin")}
USER, FLOODING = 12345, 12346
KERNEL = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
GROUP = next(group for group in grp.getgrall() if group.gr_gid)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another user")

AS_USER = """
import ctypes, hashlib, hmac, json, os, socket as sockets, sys
from llm_datadist import Error, Store
socket, user, group, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
os.setgroups([group] if group else [])
os.setresgid(user, user, user)
os.setresuid(user, user, user)
def opened(**options):
    return Store(socket, namespace="a model", **{"timeout": 60.0, "keeper_user": 0, **options})
def outcome(call):
    try:
        return call()
    except Error as error:
        return f"{error.code} {error.errno}: {error}"
def show(**options):
    print(json.dumps(outcome(lambda: opened(**options).exists([]))), flush=True)
"""


def secret(path: Path, text: str, mode: int = 0o600, user: int = -1) -> Path:
    path.write_text(text, encoding="utf-8")
    os.chown(path, user, -1)
    path.chmod(mode)
    return path


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users may enter, unlike ``tmp_path``."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def tokens(folder: Path) -> Path:
    return secret(folder / "tokens", "# of this test\n" + "".join(f"{role} {text}\n" for role, text in TOKENS.items()))


@pytest.fixture
def keeper(folder: Path, tokens: Path) -> Iterator[Path]:
    """The socket of a keeper with tokens."""
    with Keeper(memory="4MiB", socket=folder / "keeper", tokens=tokens):
        yield folder / "keeper"


@contextlib.contextmanager
def serving(socket: Path, tokens: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    serve = (sys.executable, "-m", "llm_datadist", "serve", "--socket", str(socket), "--memory", "4MiB", "--json")
    shared = ("--tokens", str(tokens), "--group", GROUP.gr_name)
    with process(*serve, *shared, *options) as started:
        assert json.loads(line(started))["ready"]
        yield started


@contextlib.contextmanager
def as_user(socket: Path, code: str, user: int = USER, group: int = GROUP.gr_gid) -> Iterator[subprocess.Popen[str]]:
    arguments = (str(socket), str(user), str(group), json.dumps(TOKENS))
    with process(sys.executable, "-c", AS_USER + code, *arguments) as started:
        yield started


def refused(call: Any) -> str:
    with pytest.raises(Error) as caught:
        call()
    assert caught.value.code == "not_enabled"
    assert caught.value.argument == "token"
    return str(caught.value)


def test_role_decides_which_calls_a_token_allows(keeper: Path, folder: Path) -> None:
    with opened(keeper) as own, opened(keeper, token=TOKENS["read"]) as reader:
        assert own.put([key(1)], [value(1)]) == [True], "a process of the user of the keeper needs no token"
        assert got(reader, 1) == value(1)
        assert reader.lease([key(1)], ttl=1) == [True]
        text = "the token has the role read, and this call needs the role "
        assert refused(lambda: reader.put([key(2)], [value(2)])) == text + "write"
        assert refused(lambda: reader.drop([key(1)])).startswith(text + "admin")
        assert refused(reader.clear).startswith(text + "admin")
        with opened(keeper, token_file=secret(folder / "writer", TOKENS["write"] + "\n")) as writer:
            assert writer.put([key(2)], [value(2)]) == [True]
            refused(writer.clear)
        with opened(keeper, token=TOKENS["admin"]) as admin:
            assert admin.drop([key(2)]) == 1
        stats = reader.stats()
        assert (stats["attached"], stats["keeper"]["forbidden"]) == (1, 0)
    with KeeperObserver(keeper, token=TOKENS["read"]) as observer:
        for call in (observer.namespaces, observer.values, observer.changes):
            refused(call)
        assert observer.stats()["values"] == 1


def test_wrong_tokens_are_refused_and_never_shown(keeper: Path, folder: Path) -> None:
    for token in ("secret-nobody-0123456789", TOKENS["read"] + "0", TOKENS["read"].upper()):
        with pytest.raises(InvalidArgument, match="the token is none of those of the keeper") as caught:
            opened(keeper, token=token)
        assert token not in f"{caught.value} {caught.value!r} {caught.value.facts}"
    for wrong, text in (
        ({"token": "secret-short"}, r"token=\(12 characters, not shown\)"),
        ({"token": TOKENS["read"], "token_file": "/nowhere"}, "token and token_file are both given"),
        ({"token_file": folder / "nowhere"}, "nowhere.* cannot be opened"),
        (
            {"token_file": TOKENS["read"]},
            r"token_file=\(22 characters, not shown\) cannot be opened; only a path that begins with / or ./ is shown",
        ),
        (
            {"token_file": secret(folder / "role", f"read {TOKENS['read']}")},
            "must have the token alone, without its role",
        ),
        ({"token_file": secret(folder / "open", TOKENS["read"], 0o640)}, "has mode 0640"),
        ({"keeper_user": -1}, "keeper_user=-1"),
        ({"keeper_user": USER}, f"keeper_user={USER} is another user, whose keeper needs a token"),
    ):
        for client in (lambda: opened(keeper, **wrong), lambda: KeeperObserver(keeper, **wrong)):  # noqa: B023
            with pytest.raises(InvalidArgument, match=text) as caught:
                client()
            assert "secret-" not in str(caught.value)
    for unfit in ({"token": b"secret-read-0123456789"}, {"token_file": 1}, {"keeper_user": "root"}, {"checksums": 1}):
        with pytest.raises(TypeError) as mistyped:
            opened(keeper, **unfit)
        assert "secret-" not in str(mistyped.value)
    with opened(keeper, token=TOKENS["read"]) as store:
        assert "secret" not in f"{store!r} {store} {store.stats()}"


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("read secret-read-0123456789", 0o644, "has mode 0644"),
        ("", 0o600, "has no token"),
        ("read secret-read-\0-0123456789", 0o600, "has a control character on line 1"),
        ("read secret-short", 0o600, r"line 1: token=\(12 characters, not shown\)"),
        ("root secret-root-0123456789", 0o600, "has no role on line 1"),
        ("# secret\n" * 10_000, 0o600, "is longer than 65536 bytes"),
    ],
    ids=["mode", "empty", "nul", "short", "role", "huge"],
)
def test_wrong_file_of_tokens_is_refused(
    folder: Path, text: str, mode: int, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    file = secret(folder / "tokens", text, mode)
    with pytest.raises(InvalidArgument, match=why) as caught:
        Keeper(memory="4MiB", socket=folder / "keeper", tokens=file)
    assert caught.value.argument == "tokens"
    assert "secret" not in str(caught.value)
    assert main(["serve", "--memory", "4MiB", "--socket", str(folder / "keeper"), "--tokens", str(file)]) == 2
    printed = capfd.readouterr()
    assert str(file) in printed.err
    assert "secret" not in printed.err + printed.out
    assert not (folder / "keeper").exists()


def test_group_needs_tokens_and_a_name(folder: Path, tokens: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidArgument, match="group must not be given without tokens"):
        Keeper(memory="4MiB", socket=folder / "keeper", group=GROUP.gr_gid)
    with pytest.raises(InvalidArgument, match="group=4294967295"):
        Keeper(memory="4MiB", socket=folder / "keeper", tokens=tokens, group=2**32 - 1)
    serve = ["serve", "--memory", "4MiB", "--socket", str(folder / "keeper"), "--tokens", str(tokens)]
    with pytest.raises(SystemExit):
        main([*serve, "--group", "no-such-group"])
    assert "'no-such-group' is no group of this system" in capfd.readouterr().err
    with pytest.raises(Error, match="the keeper has no tokens"), Keeper(memory="4MiB", socket=folder / "keeper"):
        opened(folder / "keeper", token=TOKENS["read"])


def test_commands_take_a_token(keeper: Path, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def run(action: str, role: str, *more: str) -> int:
        file = secret(folder / role, TOKENS[role])
        return main(["store", action, "--socket", str(keeper), "--token-file", str(file), *more])

    with opened(keeper, checksums=True) as store:
        assert store.put([key(1)], [value(1)]) == [True]
        assert run("stats", "read", "--keeper-user", str(os.geteuid())) == 0
        assert run("ls", "write") == 1
        assert run("ls", "admin", "--json", "-") == 0
        assert run("drop", "admin", "--namespace", "a model", "--all") == 0
        assert store.exists([key(1)]) == [False]
    with pytest.raises(SystemExit):
        run("stats", "read", "--keeper-user", "no-such-user")
    assert run("stats", "read", "--keeper-user", "4294967294") == 1
    printed = capfd.readouterr()
    assert '"checksums": true' in printed.out
    assert "the token has the role write, and this call needs the role admin" in printed.err
    assert "'no-such-user' is neither a user" in printed.err
    assert "a process of another user listens at the socket" in printed.err
    assert "secret-" not in printed.out + printed.err


def test_settings_of_adapters_have_the_path_of_the_token(keeper: Path, folder: Path) -> None:
    file = secret(folder / "reader", TOKENS["read"])
    given = {"socket": str(keeper), "revision": "1", "token_file": str(file), "keeper_user": os.geteuid()}
    settings = StoreSettings.parse("a test", {**given, "checksums": True})
    with Store(settings.socket, namespace="n", **settings.store_options) as store:
        refused(lambda: store.put([key(1)], [value(1)]))
    with KeeperObserver(settings.socket, **settings.access) as observer:
        assert observer.stats()["clients"] == 0
    assert StoreSettings.parse("a test", {"socket": "s", "revision": "1"}).store_options == {
        "checksums": False,
        "token_file": None,
        "keeper_user": None,
    }
    assert settings.revision == "1 checksums", "its namespace is not that of values without checksums"
    assert StoreSettings.parse("a test", given).revision == "1"
    with pytest.raises(ValueError, match=r"allowed: .*token_file"):
        StoreSettings.parse("a test", {**given, "token": TOKENS["read"]})


def test_checksums_are_terms_of_a_namespace(folder: Path) -> None:
    socket = folder / "keeper"
    with Keeper(memory="4MiB", socket=socket), opened(socket, checksums=True) as store:
        numbers = range(40)
        assert all(store.put([key(n) for n in numbers], [value(n) for n in numbers]))
        buffers = [bytearray(VALUE) for _ in numbers]
        assert all(store.get([key(n) for n in numbers], buffers))
        assert [bytes(buffer) for buffer in buffers] == [value(n) for n in numbers]
        with pytest.raises(InvalidArgument, match="checksums=False must be True"):
            opened(socket)
        with opened(socket, namespace="another model") as other:
            assert other.put([key(1)], [value(1)]) == [True]
        stats = store.stats()
        assert (stats["hits"], stats["misses_corrupt"], stats["keeper"]["corrupt"]) == (40, 0, 0)


@pytest.mark.root
@needs_root
def test_processes_of_another_user_need_group_token_and_trust(folder: Path, tokens: Path) -> None:
    socket = folder / "keeper"
    reader = secret(folder / "reader", TOKENS["read"], user=USER)
    code = f"""
show(keeper_user=None)
show()
show(token="secret-nobody-0123456789")
show(token_file={str(tokens)!r})
key, value = bytes(28), bytes(65536)
reader = opened(token_file={str(reader)!r})
into = bytearray(65536)
print(json.dumps([reader.get([key], [into]), into == b"v" * 65536]), flush=True)
print(json.dumps(outcome(lambda: reader.put([b"k" * 28], [value]))), flush=True)
print(json.dumps(opened(token=tokens["write"]).put([b"k" * 28], [value])), flush=True)
print(json.dumps(outcome(opened(token=tokens["admin"]).clear)), flush=True)
"""
    with serving(socket, tokens) as served:
        mode = socket.stat()
        assert (stat.S_IMODE(mode.st_mode), mode.st_gid) == (0o660, GROUP.gr_gid)
        assert stat.S_IMODE(socket.with_suffix(".lock").stat().st_mode) == 0o600
        with opened(socket) as own:
            assert own.put([bytes(28)], [b"v" * VALUE]) == [True]
            with as_user(socket, code) as child:
                shown = [json.loads(line(child)) for _ in range(8)]
            assert "a process of another user listens at the socket" in shown[0]
            assert "keeper_user=0 is another user, whose keeper needs a token" in shown[1]
            assert "the token is none of those of the keeper" in shown[2]
            assert "cannot be opened" in shown[3]
            assert shown[4] == [[True], True]
            assert shown[5].startswith("not_enabled None: the token has the role read")
            assert shown[6:] == [[True], 2]
            assert own.stats()["attached"] == 1
        with as_user(socket, "show(token=tokens['read'])", group=0) as child:
            assert json.loads(line(child)).startswith("failed 13: ")
        with serving(socket, tokens, "--take-over"):
            mode = socket.stat()
            assert (stat.S_IMODE(mode.st_mode), mode.st_gid) == (0o660, GROUP.gr_gid)
            assert served.wait(LIMIT) == 0
            with as_user(socket, "show(token=tokens['read'])") as child:
                assert line(child) == "[]\n"


# The messages of version 3, as bytes: a greeting, a proof, an attach request, and a request to look without memory.
RAW = """
NONCE = bytes(range(32))
def connected():
    connection = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
    connection.settimeout(60)
    connection.connect(socket)
    return connection
def greeted(connection):
    connection.send(bytes([13, 3]) + NONCE)
    challenge = connection.recv(100)
    assert (challenge[0], len(challenge)) == (11, 33), challenge
    return challenge[1:]
def prove(connection, token, nonce):
    proof = hmac.digest(token.encode(), b"client of a keeper" + bytes(1) + NONCE + nonce, hashlib.sha256)
    connection.send(bytes([14]) + proof)
    return connection.recv(100)[:2]
ATTACH, OBSERVE = bytes([0, 3, 1]) + b"n" + bytes([64, 0]), bytes([7, 3, 0])
"""


@pytest.mark.root
@needs_root
def test_idle_connections_of_one_user_keep_no_other_user_out(folder: Path, tokens: Path) -> None:
    socket = folder / "keeper"
    honest = (
        RAW
        + """
connection = connected()
nonce = greeted(connection)
print("greeted", flush=True)
sys.stdin.readline()
role = prove(connection, tokens["write"], nonce)
connection.send(OBSERVE)
print(json.dumps([list(role), connection.recv(100)[0]]), flush=True)
"""
    )
    idle = (
        RAW
        + """
connections = [connected() for _ in range(16)]
# The keeper has accepted all of them, because it accepts them in their order.
greeted(connections[-1])
print("idle", flush=True)
sys.stdin.readline()
"""
    )
    with serving(socket, tokens), as_user(socket, honest) as child:
        assert line(child) == "greeted\n"
        with as_user(socket, idle, FLOODING) as flooding:
            assert line(flooding) == "idle\n"
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
            assert json.loads(line(child)) == [[12, 1], 0], "the role write, and then attached"


@pytest.mark.root
@needs_root
@pytest.mark.skipif(KERNEL < (6, 16), reason="older kernels cannot refuse descriptors before they are received")
def test_descriptors_are_refused_before_the_proof(folder: Path, tokens: Path) -> None:
    socket = folder / "keeper"
    code = (
        RAW
        + """
def sent():
    # The descriptor does not fit: the keeper refuses it, if it arrives.
    with open(os.devnull) as file:
        try:
            return sockets.send_fds(connection, [ATTACH], [file.fileno()]) > 0
        except OSError as error:
            return error.errno
connection = connected()
nonce = greeted(connection)
before = sent()
prove(connection, tokens["read"], nonce)
print(json.dumps([before, sent()]), flush=True)
"""
    )
    with serving(socket, tokens), as_user(socket, code) as child:
        assert json.loads(line(child)) == [errno.EPERM, True]
