"""One HTML page with everything in it: settings, table, charts. Refers to nothing outside of itself. Pure."""

from collections.abc import Sequence
from html import escape
from typing import Final

from services.simulate.charts import Chart
from services.simulate.summary import Summary
from services.simulate.svg import draw
from services.simulate.tables import COLUMNS, balance_line, of_seconds

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


def page(title: str, command: str, facts: Sequence[str], summaries: Sequence[Summary], charts: Sequence[Chart]) -> str:
    """command: what made it. facts: a line each, about load and fleet."""
    head = "".join(
        f'<th title="{escape(c.meaning, quote=True)}">{escape(c.title)}<small>{escape(c.unit)}</small></th>'
        for c in COLUMNS
    )
    rows = "".join("<tr>" + "".join(f"<td>{escape(c.cell(s))}</td>" for c in COLUMNS) + "</tr>" for s in summaries)
    meanings = "".join(f"<li><b>{escape(c.heading)}</b>: {escape(c.meaning)}</li>" for c in COLUMNS)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            f"<pre>{escape(command)}</pre>",
            "<ul>" + "".join(f"<li>{escape(fact)}</li>" for fact in facts) + "</ul>",
            f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>',
            _tenants(summaries),
            '<div class="charts">' + "".join(f"<figure>{draw(chart)}</figure>" for chart in charts) + "</div>",
            f"<details><summary>What the columns mean</summary><ul>{meanings}</ul></details>",
            "</body></html>\n",
        ]
    )


def _tenants(summaries: Sequence[Summary]) -> str:
    if all(len(summary.tenants) < 2 for summary in summaries):
        return ""
    rows = "".join(
        f"<tr><td>{escape(s.name)}</td><td>{escape(t.name)}</td><td>{t.weight:g}</td>"
        f"<td>{t.served:,} of {t.requests:,}</td><td>{of_seconds(t.ttft)}</td><td>{t.service:,}</td></tr>"
        for s in summaries
        for t in s.tenants
    )
    head = (
        "<tr><th>run</th><th>tenant</th><th>weight</th><th>served</th><th>TTFT<small>s</small></th>"
        "<th>service<small>tokens by cost</small></th></tr>"
    )
    lines = "".join(f"<li>{escape(s.name)}: {escape(balance_line(s.balance))}</li>" for s in summaries)
    return f"<h2>Tenants</h2><table><thead>{head}</thead><tbody>{rows}</tbody></table><ul>{lines}</ul>"
