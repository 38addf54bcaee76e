"""A report's page as an HTML parser and an XML parser read it."""

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

from kvexport.report.page import render_html
from kvexport.report.sections import Section

VOID = {"meta"}


class Page(HTMLParser):
    """An HTML parser that checks that tags are balanced and collects the contents of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(("".join(self.open[-1:]), data))

    def text(self) -> str:
        return "".join(data for _, data in self.texts)


def page(*sections: Section) -> str:
    return render_html("Report", "of a run", sections)


def drawings(html: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r'<svg class="drawing".*?</svg>', html, re.DOTALL)]
