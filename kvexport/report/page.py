"""A report as one HTML page that loads nothing and runs no script."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from kvexport.report.drawings import as_table, can_draw, figure
from kvexport.report.sections import KeyValues, Plot, Section, Table, escape, numeric_columns

# The dark colours are for screens alone: paper is white. A table that is wider than the window scrolls; a shadow marks
# each side on which columns are hidden.
STYLE = """:root{color-scheme:light dark;--bg:#ffffff;--fg:#1b1f24;--mute:#57606a;--rule:#c3cad2;--grid:#e4e8ec;
--stripe:#f5f7f9;--row:#0d2b4d0b;--edge:#57606a70;--bad:#9a3a00;--bad-bg:#fdeadd}
@media screen and (prefers-color-scheme:dark){:root{--bg:#15181d;--fg:#e6e9ec;--mute:#a3acb6;--rule:#465059;
--grid:#2a3037;--stripe:#1b1f25;--row:#cfe3ff0c;--edge:#a3acb670;
--bad:#ff9d66;--bad-bg:#3d2314}}
html{-webkit-text-size-adjust:100%;print-color-adjust:exact;-webkit-print-color-adjust:exact}.note:empty{display:none}
body{margin:0 auto;padding:1.5rem 1rem 3rem;max-width:80rem;box-sizing:border-box;background:var(--bg);color:var(--fg);
font:1rem/1.5 system-ui,"DejaVu Sans",sans-serif;overflow-wrap:anywhere}
h1{font-size:1.6rem;line-height:1.25;margin:0}h2{font-size:1.1rem;line-height:1.3;margin:0 0 .5rem}
dd,dl,figure{margin:0}
header{border-bottom:2px solid var(--rule);padding-bottom:.75rem}.note,dt{color:var(--mute)}
.note{margin:.3rem 0 0;font-size:.875rem}
section,.figures{margin:2rem 0 0}.text p{max-width:48rem;margin:0 0 .75rem}
.scroll{overflow-x:auto;background:linear-gradient(to right,var(--bg) 1rem,transparent) 0 0/3rem 100% no-repeat local,
linear-gradient(to left,var(--bg) 1rem,transparent) 100% 0/3rem 100% no-repeat local,
linear-gradient(to right,var(--edge),transparent) 0 0/1rem 100% no-repeat,
linear-gradient(to left,var(--edge),transparent) 100% 0/1rem 100% no-repeat}
table,dl{font-size:.9375rem;font-variant-numeric:tabular-nums}table{border-collapse:collapse;overflow-wrap:break-word}
th,td{padding:.3rem .75rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--rule);max-width:28rem}
th{vertical-align:bottom;border-bottom:2px solid var(--mute)}tbody tr:nth-child(even){background:var(--row)}
.num{text-align:right}
td.num{white-space:nowrap}
.bad{font-weight:600;color:var(--bad);background:var(--bad-bg)}
dl{display:grid;grid-template-columns:fit-content(45%) 1fr;gap:.2rem 1rem}
.figures{display:grid;gap:2rem 2.5rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,28rem),1fr))}
figure{min-width:0;max-width:44rem}
.drawing{display:block;width:100%;height:auto;min-width:336px;max-width:720px;background:#fff}
@media(min-width:600px){body{padding:2rem 2rem 4rem}}
@media screen and (max-width:600px){table,dl{font-size:.8125rem}th,td{padding:.25rem .4rem;max-width:16rem}}
@media print{body{max-width:none;padding:0;font-size:10pt}figure,tr{break-inside:avoid}h2{break-after:avoid}
.scroll{overflow:visible;background:none}table{font-size:8pt}.drawing{min-width:0!important}}"""


def render_html(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """Return a report as one HTML page.

    Equal input gives an equal page. All text is escaped, and the page refers to nothing outside itself.
    """
    body = ""
    # Consecutive drawings share a grid, side by side if the window is wide.
    for drawn, group in groupby(sections, key=lambda section: isinstance(section, Plot)):
        parts = "".join(f"{_section(section)}\n" for section in group)
        body += f'<div class="figures">\n{parts}</div>\n' if drawn else parts
    return f"""<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>{escape(title)}</title>
<style>{STYLE}</style></head>
<body><header><h1>{escape(title)}</h1><p class="note">{escape(subtitle)}</p></header>
<main>
{body}</main></body></html>
"""


def _section(section: Section) -> str:
    if isinstance(section, Plot):
        return figure(section) if can_draw() else _section(as_table(section))
    if isinstance(section, Table):
        return f"<section>\n{_table(section)}\n</section>"
    if isinstance(section, KeyValues):
        pairs = "\n".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in section.mapping.items())
        return f"<section>\n<h2>{escape(section.title)}</h2>\n<dl>\n{pairs}\n</dl>\n</section>"
    paragraphs = "\n".join(f"<p>{escape(text)}</p>" for text in section.text.split("\n\n") if text.strip())
    return f'<section class="text">\n{paragraphs}\n</section>'


def _table(table: Table) -> str:
    sides = ["num " if numeric else "" for numeric in numeric_columns(table)]
    head = "".join(
        f'<th scope="col" class="{side}">{escape(name)}</th>' for side, name in zip(sides, table.columns, strict=True)
    )
    rows = []
    for r, row in enumerate(table.rows):
        cells = ""
        for c, value in enumerate(row):
            bad = (r, c) in table.bad
            # The mark says without colour what the colour says. It stands before the number so that digits stay
            # aligned.
            mark = '<span role="img" aria-label="bad">✗</span> ' if bad else ""
            cells += f'<td class="{sides[c]}{"bad" if bad else ""}">{mark}{escape(value)}</td>'
        rows.append(f"<tr>{cells}</tr>")
    body = "\n".join(rows) or f'<tr><td colspan="{len(sides) or 1}">no rows</td></tr>'
    grid = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
    title, note = escape(table.title), escape(table.note)
    return f'<h2>{title}</h2>\n<div class="scroll" tabindex="0">\n{grid}\n</div>\n<p class="note">{note}</p>'
