#!/usr/bin/env python3
"""Draws the output of `frontier_bench --format json` as an SVG.

usage: frontier_bench --format json | scripts/plot_frontier.py > frontier.svg
"""
import json
import sys

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 30, 60, 60

data = json.load(sys.stdin)
rows = data["rows"]
for row in rows:
    row["name"] = row["recompute"].strip()
most = max(row["peak_bytes"] for row in rows)
low = min(0.95, min(row["time_ratio"] for row in rows))
high = max(row["time_ratio"] for row in rows) * 1.04


def x_of(peak):
    return LEFT + peak / most * (WIDTH - LEFT - RIGHT)


def y_of(ratio):
    return HEIGHT - BOTTOM - (ratio - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


out = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
    'font-family="sans-serif" font-size="12" fill="#222">',
    f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
    f'<text x="{LEFT}" y="24" font-size="16">Time of a step against its true '
    f'peak: {data["model"]}, {data["batch"]} samples</text>',
    f'<text x="{LEFT}" y="42" fill="#666">LibTorch {data["libtorch"]}, '
    f'{data["device"].upper()}; both measured, relative to none</text>',
]
for part in range(0, 6):
    x = x_of(most * part / 5)
    out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#e4e4e4"/>')
    out.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{part * 20}%</text>')
tick = 0.8
while tick <= high:
    if tick >= low:
        y = y_of(tick)
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:.1f}×</text>')
    tick += 0.1
out.append(
    f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 16}" text-anchor="middle">'
    "peak of a step, share of none's</text>"
)
best = sorted((r for r in rows if r["name"].startswith("optimal")), key=lambda r: r["peak_bytes"])
path = " ".join(f'{x_of(r["peak_bytes"]):.1f},{y_of(r["time_ratio"]):.1f}' for r in best)
out.append(f'<polyline points="{path}" fill="none" stroke="#b5482f" stroke-width="1.5"/>')
taken = []  # areas covered by labels
for row in rows:
    x, y = x_of(row["peak_bytes"]), y_of(row["time_ratio"])
    if row["name"].startswith("optimal"):
        out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#b5482f"/>')
    else:
        out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#2b6ca3"/>')
        width = 7 * len(row["name"])
        left = x - width - 8 if x + width > WIDTH - 20 else x + 8
        spots = [y + 4, y - 12, y + 20, y - 28, y + 36, y - 44]
        clear = lambda at: all(abs(at - t) > 13 or left > r or left + width < l for l, r, t in taken)
        at = next((spot for spot in spots if clear(spot)), spots[0])
        taken.append((left, left + width, at))
        out.append(f'<text x="{left:.1f}" y="{at:.1f}">{row["name"]}</text>')
out.append(f'<text x="{LEFT + 8}" y="{HEIGHT - BOTTOM - 10}" fill="#b5482f">optimal schedules</text>')
out.append("</svg>")
print("\n".join(out))
