"""One HTML page with everything in it: settings, tables, charts. Refers to nothing outside of itself. Pure."""

from collections.abc import Sequence
from html import escape
from typing import Final

from services.plots.chart import Chart
from services.plots.svg import draw
from services.plots.table import Table

_STYLE: Final = """
body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:1340px;padding:0 1rem;color:#1b1b1b;background:#fff}
table{border-collapse:collapse;font-size:13px;margin:1rem 0}
td,th{padding:.3rem .6rem;border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}
td:first-child,th:first-child{text-align:left}
.wide{overflow-x:auto}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(460px,1fr));gap:1.5rem}
svg{width:100%;height:auto;font-size:12px}
svg text{fill:#333}svg .title{font-size:15px;font-weight:600}
svg .grid{stroke:#e4e4e4}svg polyline{fill:none;stroke-width:1.8}
pre{background:#f4f4f4;padding:.6rem;overflow-x:auto}
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
    meanings = dict(table.meanings)
    head = "".join(
        f'<th title="{escape(meanings.get(name, ""), quote=True)}">{escape(name)}</th>' for name in table.head
    )
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    title = f"<h2>{escape(table.title)}</h2>" if table.title else ""
    return f'{title}<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
