"""One HTML page with everything in it: settings, tables, charts. Refers to nothing outside of itself. Pure."""

from collections.abc import Sequence
from html import escape
from typing import Final

from services.plots.chart import Chart
from services.plots.svg import draw
from services.plots.table import Table

_STYLE: Final = """
:root{color-scheme:light dark;--ink:#1b1b1b;--soft:#555;--line:#ddd;--grid:#e4e4e4;--paper:#fff;--box:#f4f4f4}
@media(prefers-color-scheme:dark){:root{--ink:#e6e6e6;--soft:#aaa;--line:#3a3a3a;--grid:#333;--paper:#161616;--box:#222}}
body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:1340px;padding:0 1rem}
body{color:var(--ink);background:var(--paper)}
h1{margin-bottom:.5rem}
table{border-collapse:collapse;font-size:13px;margin:1rem 0}
td,th{padding:.3rem .5rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th{vertical-align:bottom}
th small{display:block;font-weight:400;color:var(--soft)}
td:first-child,th:first-child{text-align:left}
.wide{overflow-x:auto}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(460px,100%),1fr));gap:1.5rem}
figure{margin:0}
svg{width:100%;height:auto;font-size:12px}
svg text{fill:var(--ink)}svg .soft{fill:var(--soft)}svg .title{font-size:15px;font-weight:600}
svg .grid{stroke:var(--grid)}svg polyline{fill:none;stroke-width:1.8;stroke-linejoin:round}
pre{background:var(--box);padding:.6rem;white-space:pre-wrap;overflow-wrap:anywhere}
"""


def page(title: str, command: str, facts: Sequence[str], tables: Sequence[Table], charts: Sequence[Chart]) -> str:
    """command: what made it. facts: a line each, about what was run."""
    meanings = "".join(
        f"<li><b>{escape(name)}</b>: {escape(meaning)}</li>" for table in tables for name, meaning in table.meanings
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            f"<pre>{escape(command)}</pre>",
            "<ul>" + "".join(f"<li>{escape(fact)}</li>" for fact in facts) + "</ul>",
            *(_table(table) for table in tables),
            '<div class="charts">' + "".join(f"<figure>{draw(chart)}</figure>" for chart in charts) + "</div>",
            f"<details><summary>What the columns mean</summary><ul>{meanings}</ul></details>",
            "</body></html>\n",
        ]
    )


def _table(table: Table) -> str:
    head = "".join(
        f'<th title="{escape(one.meaning, quote=True)}">{escape(one.title)}<small>{escape(one.unit)}</small></th>'
        for one in table.head
    )
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    title = f"<h2>{escape(table.title)}</h2>" if table.title else ""
    notes = "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in table.notes) + "</ul>" if table.notes else ""
    return f'{title}<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{notes}'
