"""`tools/build/aarch64.sh prepare`: what it takes over from apt of this machine, and that it stops at an error.

Not for: what runs in the root (`make test-aarch64`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "aarch64.sh"
# The script finds these in place of the programs of this machine. The packages are two empty files.
APT_GET = """#!/bin/sh
case $* in
indextargets*) echo 'http://mirror.invalid/debian Debian Debian' ;;
update*) "$APT_CONFIG_PROGRAM" dump > "$SEEN" ;;
install*) cd "$CARGO_TARGET_DIR/aarch64/apt/archives" && touch base-files_1.deb bash_1.deb ;;
esac
"""
DPKG_DEB = """#!/bin/sh
case $2 in *"$BROKEN"*) echo "dpkg-deb: $2 is broken" >&2; exit 2 ;; esac
mkdir -p "$3/usr/bin" "$3/usr/share/ca-certificates/mozilla"; : > "$3/usr/share/ca-certificates/mozilla/a.crt"
"""
HOOKS = """
APT::Update::Post-Invoke { "touch /hook"; };
DPkg::Pre-Install-Pkgs { "touch /hook"; };
Acquire::http::Proxy "http://proxy.invalid:3128";
"""


def prepare(folder: Path, broken: str, command: str = "prepare") -> subprocess.CompletedProcess[str]:
    """Run the script with its target folder in `folder`, where the unpacking of one package fails."""
    programs = folder / "bin"
    programs.mkdir()
    for name, text in {"apt-get": APT_GET, "dpkg-deb": DPKG_DEB, "unshare": "#!/bin/sh\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (folder / "hooks").write_text(HOOKS)
    own = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "APT_CONFIG": str(folder / "hooks"),
        "APT_CONFIG_PROGRAM": shutil.which("apt-config") or "false",
        "BROKEN": broken,
        "CARGO_TARGET_DIR": str(folder / "target"),
        "SEEN": str(folder / "seen"),
    }
    arguments = [SCRIPT, command, *(["true"] if command == "run" else [])]
    return subprocess.run(arguments, env={**os.environ, **own}, capture_output=True, text=True, timeout=60, check=False)


pytestmark = pytest.mark.skipif(
    os.uname().machine != "x86_64"
    or shutil.which("apt-config") is None
    or not Path("/usr/share/keyrings/debian-archive-keyring.gpg").exists(),
    reason="needs x86-64 and the apt of Debian",
)


def test_no_hook_of_the_machine_is_run(tmp_path: Path) -> None:
    done = prepare(tmp_path, broken="nothing")
    assert done.returncode == 0, done.stderr
    seen = (tmp_path / "seen").read_text()
    assert 'Acquire::http::Proxy "http://proxy.invalid:3128";' in seen
    assert [line for line in seen.splitlines() if "touch" in line or "Invoke" in line or "Pre-Install" in line] == []


@pytest.mark.parametrize("command", ["prepare", "run"])
@pytest.mark.parametrize("broken", ["base-files", "bash"])
def test_a_package_that_cannot_be_unpacked_leaves_no_root(tmp_path: Path, broken: str, command: str) -> None:
    done = prepare(tmp_path, broken, command)
    assert done.returncode == 1
    assert f"{broken}_1.deb cannot be unpacked" in done.stderr
    assert not (tmp_path / "target" / "aarch64" / "stamp").exists()


def test_a_root_is_made_once(tmp_path: Path) -> None:
    assert prepare(tmp_path, broken="nothing").returncode == 0
    (tmp_path / "seen").unlink()
    shutil.rmtree(tmp_path / "bin")
    assert prepare(tmp_path, broken="nothing").returncode == 0
    assert not (tmp_path / "seen").exists(), "apt was run again"
