"""Checks the links of the built site and of Markdown pages outside it: links.py SITE PAGE.md ...

Every link within the site must lead to a file of the site, and its anchor to an element of that page. The links of the
Markdown pages, which readers follow in the repository, are checked in the same way. External links are listed and not
followed. Ends with 1 if a link is broken, or if no link was found at all.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

HEADING = re.compile(r"^#+ +(.+?)(?: +#+)?$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
MARKDOWN_LINK = re.compile(r"(?<!`)\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)")


class Page(HTMLParser):
    """The anchors and the links of one HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[tuple[int, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collects `id`, `name`, `href` and `src`."""
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")
            elif name in {"href", "src"} and value is not None:
                self.links.append((self.getpos()[0], value))


def slugs(text: str) -> set[str]:
    """The anchors of a Markdown page as GitHub renders it: those of its headings, and explicit ones."""
    text = FENCE.sub("", text)
    found = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    seen: Counter[str] = Counter()
    for heading in HEADING.findall(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


class Links:
    """The links that were checked so far: the broken ones, and the external ones."""

    def __init__(self) -> None:
        self.count = 0
        self.broken: list[str] = []
        self.external: dict[str, str] = {}
        self._anchors: dict[Path, set[str] | None] = {}

    def check(self, where: str, link: str, page: Path, root: Path) -> None:
        """Checks one link of `page`; paths that begin with a slash start at `root`."""
        target = urlsplit(link)
        if target.scheme or target.netloc:
            if target.scheme not in {"data", "javascript"}:
                self.external.setdefault(link, where)
            return
        self.count += 1
        path = unquote(target.path)
        file = root / path.lstrip("/") if path.startswith("/") else (page.parent / path if path else page)
        if file.is_dir() and page.suffix == ".html":
            file /= "index.html"
        if not file.exists():
            self.broken.append(f"{where}: no such file: {link}")
        elif target.fragment:
            anchors = self.anchors(file)
            if anchors is not None and unquote(target.fragment) not in anchors:
                self.broken.append(f"{where}: no such anchor: {link}")

    def anchors(self, file: Path) -> set[str] | None:
        """The anchors of a page; `None` for a file that is not a page."""
        file = file.resolve()
        if file not in self._anchors:
            if file.suffix == ".html":
                self._anchors[file] = Page(file.read_text(encoding="utf-8")).anchors
            elif file.suffix == ".md":
                self._anchors[file] = slugs(file.read_text(encoding="utf-8"))
            else:
                self._anchors[file] = None
        return self._anchors[file]


def main() -> int:
    """Checks all pages and prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    parser.add_argument("pages", nargs="*", type=Path)
    arguments = parser.parse_args()
    links, html = Links(), sorted(arguments.site.rglob("*.html"))
    for page in html:
        for line, link in Page(page.read_text(encoding="utf-8")).links:
            links.check(f"{page}:{line}", link, page, arguments.site)
    for page in arguments.pages:
        text = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), page.read_text(encoding="utf-8"))
        for found in MARKDOWN_LINK.finditer(text):
            links.check(f"{page}:{text.count(chr(10), 0, found.start()) + 1}", found[1], page, Path())
    print(f"{links.count} internal links on {len(html)} pages of the site and {len(arguments.pages)} others, checked")
    print(f"{len(links.external)} external links, not checked:")
    for link, source in sorted(links.external.items()):
        print(f"  {link} ({source})")
    for problem in links.broken:
        print("BROKEN", problem, file=sys.stderr)
    return 1 if links.broken or not html or not links.count else 0


if __name__ == "__main__":
    sys.exit(main())
