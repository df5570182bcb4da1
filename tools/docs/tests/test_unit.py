"""The unit for systemd: the page shows the file."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_page_shows_the_unit() -> None:
    unit = (ROOT / "examples" / "systemd" / "llm-datadist-keeper@.service").read_text(encoding="utf-8")
    assert f"```ini\n{unit}```\n" in (ROOT / "docs" / "how-to" / "store-operate.md").read_text(encoding="utf-8")
