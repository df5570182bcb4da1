"""The stub of the native API: the examples type-check, and misuse is an error of the type checker.

Not for: `examples/transformer`, or whether the stub is that of the module (mypy and `mypy.stubtest` in `make lint`).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MISUSE = """
from llm_datadist.native import Engine, GrantClosed, KvLayout, Message

engine = Engine(pool="1MiB")
Engine("1MiB")  # E
Engine(listen=5)  # E
kv = engine.allocate("kv", blocks=4, tensors=1, shape=(4,), dtype="int8")
engine.allocate("kv", blocks="4")  # E
engine.allocate(name="kv", blocks=4)  # E
engine.allocate("kv", blocks=4, pool="gpu")  # E
KvLayout(32)  # E
peer = engine.link("127.0.0.1:1").result()
reveal = peer.name + "x"
engine.link("127.0.0.1:1").name  # E
kv["a"]  # E
kv[1.0]  # E
for rows in kv:  # E
    pass
remote = peer["kv"][[1]]
transfer = engine.pull(kv[[1]], remote, timeout=2.0, grant=b"", last=False, verify="full")
engine.pull(kv, remote)  # E
engine.pull(kv[[1]], remote, grnt=b"")  # E
engine.pull(kv[[1]], remote, verify="most")  # E
engine.pull([(kv[[1]], remote)], grant=[None])
engine.pull([kv[[1]], remote])  # E
engine.push(remote, kv[[1]], grant=b"")  # E
transfer.result(timeout=1)
transfer.bytes = 5  # E
kv[[1]].part(heads=range(1))  # E
grant = engine.lend(kv[[1]], ttl=1.0)
engine.lend(kv[[1]], 1.0)  # E
for event in engine.events():
    if isinstance(event, Message):
        event.data.decode()
        event.payload  # E
    elif isinstance(event, GrantClosed):
        print(event.grant.token, event.reason == "done")

import llm_datadist

llm_datadist.Engine(listen=5)  # E
llm_datadist.LLMDataDist(llm_datadist.LLMRole.MIX, "1")  # E
llm_datadist.no_such_name  # E

from llm_datadist.data_type import dtype_to_np_dtype, np_dtype_to_dtype, valid_np_dtypes

print(dtype_to_np_dtype[llm_datadist.DataType.DT_INT8], np_dtype_to_dtype.keys(), valid_np_dtypes[0])
"""


def mypy(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--config-file=", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)  # noqa: S603
    return done.returncode, done.stdout + done.stderr


def test_examples_are_typed() -> None:
    programs = [*ROOT.glob("examples/*.py"), *ROOT.glob("examples/asyncio_server/*.py")]
    assert len(programs) >= 8
    code, output = mypy(*(str(path) for path in programs if path.name != "transformers_torch.py"))
    assert code == 0, output


def test_misuse_is_an_error(tmp_path: Path) -> None:
    program = tmp_path / "misuse.py"
    program.write_text(MISUSE)
    _, output = mypy(str(program))
    found = {int(number) for number in re.findall(r"misuse\.py:(\d+): error", output)}
    expected = {number for number, line in enumerate(MISUSE.splitlines(), 1) if line.endswith("# E")}
    assert found == expected, output
