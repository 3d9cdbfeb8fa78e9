"""What a comparison found: a table, JSON, and a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from bench.serving.comparison import Results, System
from bench.serving.figures import median_of

Row = dict[str, Any]
Share = Callable[[Row, float | None], dict[str, Any] | None]


def rows_of(systems: Sequence[System], results: Results, share: Share = lambda row, bits: None) -> list[Row]:
    """One for each system and load; `share` says of a row what it uses of the machine, given the bits of a weight."""
    by_name = {system.name: system for system in systems}
    rows: list[Row] = [
        {
            "system": name,
            "weights": by_name[name].weights,
            "load": load,
            "rss_mb": by_name[name].peak.megabytes,
            "ttft_ms_p50": figures["ttft_ms"]["p50"],
            **figures,
        }
        for (name, load), runs in sorted(results.items(), key=lambda item: item[0][1])
        if runs
        for figures in (median_of(runs),)
    ]
    for row in rows:
        row["of_limit"] = share(row, by_name[row["system"]].weight_bits)
    return rows


def table_of(rows: Sequence[Row], absent: Mapping[str, str] | None = None) -> Table:
    """For people. `absent`: who could not be measured, and why."""
    table = Table(
        title="medians of all rounds; milliseconds as p50 / p99; of the limit: bandwidth at c1, arithmetic at c32",
        caption=Text("\n".join(f"without {name}: {why}" for name, why in (absent or {}).items())),
        caption_justify="left",
    )
    for heading in (
        "load",
        "system",
        "weights",
        "tokens/s",
        "of limit",
        "TTFT",
        "ITL",
        "TPOT",
        "end to end",
        "good/s",
        "cached",
        "MB",
    ):
        table.add_column(heading, justify="left" if heading in ("load", "system", "weights") else "right")
    for row in rows:
        latencies = (
            f"{row[key]['p50']:.0f} / {row[key]['p99']:.0f}"
            for key in ("ttft_ms", "itl_ms", "tpot_ms", "end_to_end_ms")
        )
        table.add_row(
            row["load"], row["system"], row["weights"], f"{row['output_tokens_per_s']:,.0f}",
            f"{row['of_limit']['share']:.0%}" if row["of_limit"] else "", *latencies,
            f"{row['goodput_per_s']:.2f}", f"{row['cached_tokens']:,.0f}", str(row["rss_mb"]),
        )  # fmt: skip
    return table


def ratios_of(rows: Sequence[Row], ours: str, loads: Sequence[str]) -> dict[str, float | None]:
    """Our output (for `prefill1024`: prompts a second) over the best peer's, by load; None where nobody else ran it."""

    def rate(row: Row) -> float:
        return float(row["requests"] / row["seconds"] if row["load"] == "prefill1024" else row["output_tokens_per_s"])

    ratios: dict[str, float | None] = {}
    for load in loads:
        mine = [rate(row) for row in rows if row["load"] == load and row["system"].startswith(ours)]
        theirs = [rate(row) for row in rows if row["load"] == load and not row["system"].startswith(ours)]
        ratios[load] = round(max(mine) / max(theirs), 2) if mine and theirs else None
    return ratios


def ttft_ratios_of(rows: Sequence[Row], ours: str) -> dict[str, float | None]:
    """Our time to the first token over the quickest peer's, by load; at most 1 is no worse."""
    ratios: dict[str, float | None] = {}
    for load in dict.fromkeys(row["load"] for row in rows):
        mine = [row["ttft_ms_p50"] for row in rows if row["load"] == load and row["system"].startswith(ours)]
        theirs = [row["ttft_ms_p50"] for row in rows if row["load"] == load and not row["system"].startswith(ours)]
        ratios[load] = round(min(mine) / min(theirs), 2) if mine and theirs else None
    return ratios


def picture_of(rows: Sequence[Row]) -> str:
    """Output tokens/s as bars, an SVG."""
    widest = max(row["output_tokens_per_s"] for row in rows)
    lines, y = [], 10
    for number, row in enumerate(rows):
        if number == 0 or rows[number - 1]["load"] != row["load"]:
            y += 22
            lines.append(f'<text x="10" y="{y}" font-weight="bold">{row["load"]}</text>')
        y += 20
        width = max(1, round(420 * row["output_tokens_per_s"] / widest))
        colour = "#1f77b4" if row["system"].startswith("Tailrace") else "#aaaaaa"
        lines.append(
            f'<text x="20" y="{y}">{row["system"]}, {row["weights"]}</text>'
            f'<rect x="260" y="{y - 12}" width="{width}" height="14" fill="{colour}"/>'
            f'<text x="{266 + width}" y="{y}">{row["output_tokens_per_s"]:,.0f} tokens/s</text>'
        )
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="820" height="{y + 20}" font-family="sans-serif" '
        'font-size="13">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )
