"""Checks wheels and the source distribution; `make wheel`, `make test-wheel` and `make sdist` run it.

- `wheel.py check TAG WHEEL...` checks the contents, metadata, licence texts and platform tag of each wheel.
- `wheel.py check-hixl WHEEL` checks the contents and metadata of the wheel of the module `hixl`.
- `wheel.py pythons WHEEL HIXL` installs both, HIXL as an extra, for each Python from 3.9 to 3.14 that is found, and
  uses them there.
- `wheel.py smoke` uses the package that is installed in this Python, where numpy is not installed.
- `wheel.py smoke-hixl` uses the module `hixl` that is installed in this Python.
- `wheel.py smoke-numpy` uses the package where numpy is installed.
- `wheel.py sdist ARCHIVE` builds a wheel from a source distribution in an empty folder, and checks it.
"""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FILE = "llm_datadist/THIRD-PARTY-LICENSES"
MINORS = range(9, 15)
PUBLIC_NAMES = 26
LIMIT_S = 600
# Settings for a quick build. The wheel of the source distribution is checked for its contents and never run.
UNOPTIMISED = {
    "CARGO_PROFILE_RELEASE_CODEGEN_UNITS": "16",
    "CARGO_PROFILE_RELEASE_DEBUG": "false",
    "CARGO_PROFILE_RELEASE_LTO": "off",
    "CARGO_PROFILE_RELEASE_OPT_LEVEL": "0",
}


class CheckError(Exception):
    """A wheel or an archive does not meet a requirement."""


def require(held: object, path: object, text: str) -> None:
    """Raise `CheckError` with the path and the text unless `held` is true."""
    if not held:
        raise CheckError(f"{path}: {text}")


def contents(path: Path) -> int:
    """Check the contents and the metadata of a wheel. Return the number of crates whose licence texts it has."""
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        text = wheel.read(FILE).decode() if FILE in names else ""
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
        tags = email.message_from_bytes(wheel.read(f"{info}/WHEEL")).get_all("Tag", [])
        scripts = wheel.read(f"{info}/entry_points.txt").decode() if f"{info}/entry_points.txt" in names else ""
    crates = re.findall(r"^[\w-]+ \d+\.\d+\.\d+[^ ]* \(", text, re.MULTILINE)
    complete = len(crates) >= 20 and "Permission is hereby granted" in text
    require(complete, path, f"{FILE} is missing or incomplete: {text[:300]}")
    for name in (f"{info}/licenses/LICENSE", "llm_datadist/_core.abi3.so", "llm_datadist/_core.pyi"):
        require(name in names, path, f"{name} is missing")
    for package in ("llm_datadist", "llm_datadist_v1"):
        require(f"{package}/py.typed" in names, path, f"{package}/py.typed is missing")
    strangers = [name for name in names if not name.startswith(("llm_datadist/", "llm_datadist_v1/", f"{info}/"))]
    require(not strangers, path, f"has files outside its packages: {strangers}")
    for field in ("Name", "Version", "Summary", "Keywords", "License-Expression", "License-File", "Requires-Python"):
        require(metadata[field], path, f"the metadata has no {field}")
    require(len(metadata.get_payload()) > 1000, path, "the metadata has no description")
    require(len(metadata.get_all("Classifier", [])) > 10, path, "the metadata lacks classifiers")
    require("llm-datadist=llm_datadist.commands.main:main" in scripts.replace(" ", ""), path, "no console script")
    require(tags and all(tag.startswith("cp39-abi3-") for tag in tags), path, f"the tags are {tags}")
    return len(crates)


def contents_of_hixl(path: Path) -> int:
    """Check the contents and the metadata of the wheel of `hixl`, which needs the wheel of the same version."""
    require(path.is_file(), path, "no such wheel")
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
    sources = Path(__file__).resolve().parents[1] / "packages" / "hixl" / "src"
    files = {str(file.relative_to(sources)) for kind in ("*.py", "py.typed") for file in sources.rglob(kind)}
    has = {name for name in names if not name.startswith(f"{info}/")}
    require(has == files, path, f"has the files {sorted(has)} instead of {sorted(files)}")
    require(any(name.endswith("/LICENSE") for name in names), path, "has no licence")
    version = re.search(r'^version = "(.*)"', (sources.parents[2] / "Cargo.toml").read_text(), re.MULTILINE)
    require(version and metadata["Version"] == version[1], path, f"is of version {metadata['Version']}")
    needs = metadata.get_all("Requires-Dist", [])
    require(needs == [f"llm-datadist=={metadata['Version']}"], path, f"needs {needs}")
    require(metadata["Requires-Python"] and metadata["Summary"], path, "the metadata lacks a field")
    print(f"{path}: complete")
    return 0


def audit(path: Path, tag: str) -> str:
    """Check that a wheel may have the manylinux tag `tag`. Return the result as text."""
    require(f"{tag}_" in path.name, path, f"is not named {tag}")
    tool = Path(sys.executable).parent / "auditwheel"
    if not tool.is_file():
        return "NOT AUDITED by auditwheel (it needs Python 3.10)"
    done = subprocess.run([tool, "show", path], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    require(done.returncode == 0, path, f"auditwheel: {done.stdout}{done.stderr}")
    found = re.search(r'platform\s+tag:\s+"([^"]+)"', done.stdout)
    require(found, path, f"auditwheel names no platform tag: {done.stdout}")
    assert found is not None
    # auditwheel must allow our tag or an older one.
    allowed = re.fullmatch(r"manylinux_(\d+)_(\d+)_\w+", found[1])
    ours = re.fullmatch(r"manylinux_(\d+)_(\d+)", tag)
    assert ours is not None
    fits = allowed is not None and tuple(map(int, allowed.groups())) <= tuple(map(int, ours.groups()))
    require(fits, path, f"auditwheel allows only {found[1]}")
    return f"auditwheel: {found[1]}"


def interpreter(minor: int) -> str | None:
    """Return a CPython 3.`minor` from the PATH, pyenv or uv."""
    name = f"python3.{minor}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR", Path.home() / ".local/share/uv/python"))
    candidates = [*pyenv.glob(f"versions/3.{minor}.*/bin/{name}"), *uv.glob(f"cpython-3.{minor}*/bin/{name}")]
    for candidate in [shutil.which(name), *sorted(map(str, candidates))]:
        if candidate is None:
            continue
        test = f"import sys, ensurepip, venv; sys.exit(sys.version_info[:2] != (3, {minor}))"
        if subprocess.run([candidate, "-c", test], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


def pythons(path: Path, hixl: Path) -> int:
    """Install both wheels, the second as an extra, for each Python that is found, and run the smoke tests in it."""
    for wheel in (path, hixl):
        require(wheel.is_file(), wheel, "no such wheel")
    absent, used = [], []
    for minor in MINORS:
        python = interpreter(minor)
        if python is None:
            absent.append(f"3.{minor}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            own = Path(folder) / "venv" / "bin" / "python"
            quiet = ["--quiet", "--disable-pip-version-check"]
            only_here = ["--no-index", "--find-links", hixl.resolve().parent]
            for command in (
                [python, "-m", "venv", own.parent.parent],
                [own, "-m", "pip", "install", *quiet, path.resolve()],
                [own, "-m", "pip", "install", *quiet, *only_here, f"{path.resolve()}[hixl]"],
                [own, "-I", Path(__file__).resolve(), "smoke"],
                [own, "-I", Path(__file__).resolve(), "smoke-hixl"],
                [own, "-m", "pip", "install", *quiet, "--only-binary=:all:", f"{path.resolve()}[replay]"],
                [own, "-I", Path(__file__).resolve(), "smoke-numpy"],
            ):
                subprocess.run(command, cwd=folder, check=True, timeout=LIMIT_S)
        used.append(f"3.{minor}")
    print(f"{path.name}: runs on Python {', '.join(used)}")
    if absent:
        print(f"NOT CHECKED: Python {', '.join(absent)} (not found)")
    return 0 if used else 1


def installed() -> Path:
    """Import the installed package and check its names. Return its file."""
    import llm_datadist  # noqa: PLC0415  (the other commands run without these)
    import llm_datadist_v1  # noqa: PLC0415

    package = Path(llm_datadist.__file__)
    require("site-packages" in package.parts, package, "is not an installed package")
    require(len(llm_datadist.__all__) == PUBLIC_NAMES, package, f"has the names {llm_datadist.__all__}")
    require(all(hasattr(llm_datadist, name) for name in llm_datadist.__all__), package, "lacks a public name")
    require(llm_datadist_v1.LLMDataDist, package, "has no llm_datadist_v1")
    return package


def smoke() -> int:
    """Move a few bytes with the native API where numpy is not installed."""
    from llm_datadist import Engine  # noqa: PLC0415

    package = installed()
    with Engine(pool="1MiB") as engine:
        cache = engine.allocate("kv", blocks=8, tensors=2, shape=(64,), dtype="float32", contiguous=True)
        # The buffer protocol is in the stable ABI since Python 3.11 only (`crates/py/src/raw/exporter.rs`).
        view = memoryview(cache.buffer)
        view[512:768] = bytes(range(256))  # block 2 of the first tensor
        engine.copy(cache[[5]], cache[[2]]).result()
        require(bytes(view[1280:1536]) == bytes(range(256)), package, "copied other bytes")
        try:
            cache.tensors[0].numpy()
        except ImportError as error:
            require("pip install llm-datadist[numpy]" in str(error), package, f"does not ask for numpy: {error}")
        else:
            require(False, package, "is installed beside numpy")
    print(f"Python {sys.version.split()[0]}, without numpy: works")
    return 0


def smoke_hixl() -> int:
    """Read a few bytes by address with the module `hixl`, from one engine to another."""
    import ctypes  # noqa: PLC0415  (the other commands run without these)
    import socket  # noqa: PLC0415

    import hixl  # noqa: PLC0415

    package = Path(hixl.__file__)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    memory = [ctypes.create_string_buffer(text, 64) for text in (b"there", b"")]
    engines = [hixl.Hixl(), hixl.Hixl()]
    for engine, own, name in zip(engines, memory, (address, "127.0.0.1:0")):
        require(engine.initialize(name) == hixl.SUCCESS, package, f"does not initialize {name}")
        status, _ = engine.register_mem(hixl.MemDesc(ctypes.addressof(own), 64), hixl.MEM_HOST)
        require(status == hixl.SUCCESS, package, f"registers nothing: {status}")
    status = engines[1].connect(address)
    require(status == hixl.SUCCESS, package, f"does not connect: {status}")
    operation = hixl.TransferOpDesc(*(ctypes.addressof(own) for own in reversed(memory)), 64)
    status = engines[1].transfer_sync(address, hixl.READ, [operation])
    require(status == hixl.SUCCESS and memory[1].value == b"there", package, f"reads nothing: {status}")
    for engine in reversed(engines):
        engine.finalize()
    print(f"Python {sys.version.split()[0]}, the module hixl: works")
    return 0


def smoke_numpy() -> int:
    """Move a few bytes with the original's API and numpy, and replay a short trace through two processes."""
    import numpy as np  # noqa: PLC0415  (the other commands run without these)

    import llm_datadist  # noqa: PLC0415

    package = installed()
    config = llm_datadist.LLMConfig()
    config.enable_cache_manager = True
    config.mem_pool_cfg = '{"memory_size": 67108864}'
    engine = llm_datadist.LLMDataDist(llm_datadist.LLMRole.DECODER, 1)
    engine.init(config.generate_options())
    manager = engine.cache_manager
    cache = manager.allocate_blocks_cache(llm_datadist.CacheDesc(2, [8, 64], llm_datadist.DataType.DT_FLOAT))
    tensors = [view.numpy() for view in manager.tensor_views(cache)]
    tensors[1][2] = np.arange(64)
    manager.copy_blocks(cache, {2: [5]})
    require(np.array_equal(tensors[1][5], np.arange(64)), package, "copied other bytes")
    engine.finalize()

    program = Path(sys.executable).parent / "llm-datadist"
    done = subprocess.run(
        [program, "replay", "--requests", "50", "--quiet"], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    require(done.returncode == 0, program, done.stdout + done.stderr)
    print(f"Python {sys.version.split()[0]}, numpy {np.__version__}: works")
    return 0


SMOKE = {"smoke": smoke, "smoke-hixl": smoke_hixl, "smoke-numpy": smoke_numpy}


def sdist(path: Path) -> int:
    """Build a wheel from a source distribution alone, and check what the wheel contains."""
    require(path.is_file(), path, "no such source distribution")
    # Nothing may come from the checkout, so neither its target folder nor its working directory is used.
    own = {name: value for name, value in os.environ.items() if name not in ("CARGO_TARGET_DIR", "PYTHONPATH")}
    own.update(UNOPTIMISED)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--verbose", "--wheel-dir", folder, path.resolve()], cwd=folder, env=own, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        contents(wheel)
        print(f"{path}: builds {wheel.name}")
    return 0


ONE_FILE = {"check-hixl": contents_of_hixl, "sdist": sdist}


def main(arguments: list[str]) -> int:
    """Run the command that the arguments name."""
    command, given = (arguments or [""])[0], arguments[1:]
    try:
        if command == "check" and len(given) > 1:
            for path in map(Path, given[1:]):
                print(f"{path}: the licence texts of {contents(path)} crates; {audit(path, given[0])}")
            return 0
        if command == "pythons" and len(given) == 2:
            return pythons(*map(Path, given))
        if command in SMOKE and not given:
            return SMOKE[command]()
        if command in ONE_FILE and len(given) == 1:
            return ONE_FILE[command](Path(given[0]))
    except CheckError as error:
        print(error, file=sys.stderr)
        return 1
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
