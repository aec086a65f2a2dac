"""One HTML page with everything in it: settings, table, charts. Refers to nothing outside of itself. Pure."""

from collections.abc import Sequence
from html import escape
from typing import Final

from services.simulate.charts import Chart
from services.simulate.summary import Summary
from services.simulate.svg import draw
from services.simulate.tables import COLUMNS, number

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


def page(title: str, command: str, facts: Sequence[str], summaries: Sequence[Summary], charts: Sequence[Chart]) -> str:
    """command: what made it. facts: a line each, about load and fleet."""
    head = "".join(f'<th title="{escape(c.meaning, quote=True)}">{escape(c.title)}</th>' for c in COLUMNS)
    rows = "".join("<tr>" + "".join(f"<td>{escape(c.cell(s))}</td>" for c in COLUMNS) + "</tr>" for s in summaries)
    meanings = "".join(f"<li><b>{escape(c.title)}</b>: {escape(c.meaning)}</li>" for c in COLUMNS)
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
        f"<tr><td>{escape(s.name)}</td><td>{escape(t.name)}</td><td>{t.served:,} of {t.requests:,}</td>"
        f"<td>{number(t.ttft.p50)} / {number(t.ttft.p99)}</td><td>{t.service:,}</td></tr>"
        for s in summaries
        for t in s.tenants
    )
    head = "<tr><th>run</th><th>tenant</th><th>served</th><th>TTFT ms P50 / P99</th><th>service</th></tr>"
    return f"<h2>Tenants</h2><table><thead>{head}</thead><tbody>{rows}</tbody></table>"
