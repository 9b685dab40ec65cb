#!/usr/bin/env python3
"""Draws the output of `tradeoff_bench --format json` as an SVG.

usage: tradeoff_bench --format json | scripts/plot_tradeoff.py > tradeoff.svg
"""
import json
import math
import sys

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 30, 60, 60
FAMILIES = {
    "revolve": ("#b5482f", "revolve:S, recomputing inside recomputation"),
    "every": ("#2b6ca3", "every:K, sqrt: each stage is recomputed at most once"),
    "checkpoints": ("#3c8d53", "checkpoints:K, the last segment dropped too"),
}


def family(name):
    kind = name.split(":")[0]
    return "every" if kind in ("none", "sqrt", "all") else kind


data = json.load(sys.stdin)
rows = data["rows"]
most = max(row["kept_peak_bytes"] for row in rows)
top = max(row["time_ratio"] for row in rows) * 1.06


def x_of(row):
    """The memory kept relative to `none`, on a logarithmic axis from 2 % to 100 %."""
    share = row["kept_peak_bytes"] / most
    return LEFT + (math.log10(share) + math.log10(50)) / math.log10(50) * (
        WIDTH - LEFT - RIGHT)


def y_of(ratio):
    return HEIGHT - BOTTOM - (ratio - 0.9) / (top - 0.9) * (
        HEIGHT - TOP - BOTTOM)


out = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
    f'font-family="sans-serif" font-size="12" fill="#222">',
    f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
    f'<text x="{LEFT}" y="24" font-size="16">Time of a step against kept '
    f'activations: {data["stages"]} equal stages</text>',
    f'<text x="{LEFT}" y="42" fill="#666">LibTorch {data["libtorch"]}, '
    f'{data["device"].upper()}; both measured, relative to none</text>',
]
for share in (0.02, 0.05, 0.1, 0.2, 0.5, 1):
    x = x_of({"kept_peak_bytes": share * most})
    out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" '
               f'y2="{HEIGHT - BOTTOM}" stroke="#e4e4e4"/>')
    out.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" '
               f'text-anchor="middle">{share:.0%}</text>')
tick = 1.0
while tick <= top:
    y = y_of(tick)
    out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" '
               f'y2="{y:.1f}" stroke="#e4e4e4"/>')
    out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">'
               f'{tick:.1f}×</text>')
    tick += 0.2
out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 20}" '
           f'text-anchor="middle">peak of kept activations, share of none '
           f'(logarithmic)</text>')
for position, (kind, (colour, label)) in enumerate(FAMILIES.items()):
    points = sorted((row for row in rows if family(row["recompute"]) == kind),
                    key=x_of)
    line = " ".join(f"{x_of(r):.1f},{y_of(r['time_ratio']):.1f}"
                    for r in points if r["recompute"] not in ("all",))
    out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" '
               f'stroke-opacity="0.4"/>')
    for row in points:
        x, y = x_of(row), y_of(row["time_ratio"])
        out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" '
                   f'fill="{colour}"/>')
        # Below the point for one family and above it for the others, so that labels do not
        # overlap; to the left if there is space.
        below = kind == "every"
        edge = x > WIDTH - RIGHT - 40
        left = edge or (kind == "checkpoints" and row is points[0])
        out.append(f'<text x="{x - 7 if left else x + 6:.1f}" '
                   f'y="{y + 17 if below else y - 7:.1f}" fill="{colour}" '
                   f'text-anchor="{"end" if left else "start"}">'
                   f'{row["recompute"]}</text>')
    y = TOP + 14 + 18 * position
    out.append(f'<circle cx="{WIDTH - 300}" cy="{y - 4}" r="4" '
               f'fill="{colour}"/>')
    out.append(f'<text x="{WIDTH - 290}" y="{y}">{label}</text>')
out.append("</svg>")
print("\n".join(out))
