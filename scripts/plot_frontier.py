#!/usr/bin/env python3
"""Draws pictures of time or speed against memory as SVG.

    frontier_bench --format json | scripts/plot_frontier.py > frontier.svg
                                     strategies and optimal schedules, from standard input
    scripts/plot_frontier.py --budgets
                                     rewrites docs/pictures/budgets.svg, the speed within
                                     memory budgets, from BUDGETS
    scripts/plot_frontier.py --budgets --check
                                     changes nothing; exits with status 1 if that picture
                                     differs from BUDGETS

To add a budget, add its run to "points" of BUDGETS, in any order, and run scripts/figures.py,
which draws the picture and writes the table.
"""
import json
import math
import pathlib
import sys
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUDGETS = ROOT / "docs/results/budgets-h200/budgets.json"
PICTURE = ROOT / "docs/pictures/budgets.svg"

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 30, 60, 60
# Keeps text legible on the lines of the grid.
HALO = ' paint-order="stroke" stroke="#fff" stroke-width="3"'
OURS, OTHER, THIRD = "#b5482f", "#2b6ca3", "#3c8d53"


def head(title, below):
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="24" font-size="16">{title}</text>',
        f'<text x="{LEFT}" y="42" fill="#666">{below}</text>',
    ]


def column(x, label):
    """A vertical line of the grid, and its label."""
    return [f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#e4e4e4"/>',
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{label}</text>']


def line(y, label):
    """A horizontal line of the grid, and its label."""
    return [f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>',
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>']


def axis_name(text):
    return (f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 16}" text-anchor="middle">'
            f"{text}</text>")


def polyline(points, more='stroke-width="1.5"'):
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{OURS}" {more}/>'


def dot(x, y, radius, colour):
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"/>'


def draw_frontier(data):
    """The time of a step against its peak, from the output of frontier_bench."""
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

    out = head("Time of a step against its true "
               f'peak: {data["model"]}, {data["batch"]} samples',
               f'LibTorch {data["libtorch"]}, '
               f'{data["device"].upper()}; both measured, relative to none')
    for part in range(0, 6):
        out += column(x_of(most * part / 5), f"{part * 20}%")
    tick = 0.8
    while tick <= high:
        if tick >= low:
            out += line(y_of(tick), f"{tick:.1f}×")
        tick += 0.1
    out.append(axis_name("peak of a step, share of none's"))
    best = sorted((r for r in rows if r["name"].startswith("optimal")),
                  key=lambda r: r["peak_bytes"])
    out.append(polyline((x_of(r["peak_bytes"]), y_of(r["time_ratio"])) for r in best))
    taken = []  # areas covered by labels
    for row in rows:
        x, y = x_of(row["peak_bytes"]), y_of(row["time_ratio"])
        if row["name"].startswith("optimal"):
            out.append(dot(x, y, 3, OURS))
            continue
        out.append(dot(x, y, 5, OTHER))
        width = 7 * len(row["name"])
        left = x - width - 8 if x + width > WIDTH - 20 else x + 8
        spots = [y + 4, y - 12, y + 20, y - 28, y + 36, y - 44]
        clear = [at for at in spots if all(abs(at - t) > 13 or left > r or left + width < l
                                           for l, r, t in taken)]
        at = (clear or spots)[0]
        taken.append((left, left + width, at))
        out.append(f'<text x="{left:.1f}" y="{at:.1f}">{row["name"]}</text>')
    out.append(f'<text x="{LEFT + 8}" y="{HEIGHT - BOTTOM - 10}" fill="{OURS}">'
               "optimal schedules</text>")
    return "\n".join([*out, "</svg>"]) + "\n"


class Labels:
    """Places labels beside points, where they cover little that was placed before."""

    LINE = 14

    def __init__(self):
        self.taken = []  # left, top, right, bottom, and what it costs to cover a pixel of it

    def avoid(self, x, y, radius, cost=4.0):
        self.taken.append((x - radius, y - radius, x + radius, y + radius, cost))

    def avoid_line(self, points):
        for (x1, y1), (x2, y2) in zip(points, points[1:]):
            count = max(1, round(math.hypot(x2 - x1, y2 - y1) / 4))
            for i in range(count + 1):
                self.avoid(x1 + (x2 - x1) * i / count, y1 + (y2 - y1) * i / count, 2, 0.25)

    def cost(self, box, far):
        """The area of the box that is taken or outside of the axes, and more if it is far."""
        left, top, right, bottom = box

        def common(l, t, r, b):
            return max(0, min(right, r) - max(left, l)) * max(0, min(bottom, b) - max(top, t))

        area = (right - left) * (bottom - top)
        return (area - common(LEFT, TOP, WIDTH - 4, HEIGHT - BOTTOM) + far * area / 8
                + sum(cost * common(*other) for *other, cost in self.taken))

    def place(self, x, y, lines, spots, colour):
        """The text elements of a label, in the first of the spots that costs the least.

        A spot is where the label is as seen from the point: (-1, 0) is to the left of it, and
        (0, 3) further below than (0, 1), with a line to the point.
        """
        width = max(len(text) for text in lines) * 6.7  # an upper estimate
        height = len(lines) * self.LINE
        found = []
        for across, down in spots:
            left = x + across * (5 if down else 9) - width * (1 - across) / 2
            top = y + down * (9 if across else 7) - height * (1 - max(-1, min(down, 1))) / 2
            box = left, top, left + width, top + height
            found.append((self.cost(box, down > 1), box, across, down > 1))
        _, (left, top, right, bottom), across, far = min(found, key=lambda one: one[0])
        self.taken.append((left, top, right, bottom, 4.0))
        at, anchor = {-1: (right, "end"), 0: ((left + right) / 2, "middle"),
                      1: (left, "start")}[across]
        leader = [f'<path d="M{x:.1f} {y:.1f}L{at:.1f} {top + 3:.1f}" stroke="{colour}"/>']
        return leader * far + [
            f'<text x="{at:.1f}" y="{top + self.LINE * (i + 1) - 3:.1f}" '
            f'text-anchor="{anchor}" fill="{colour}"{HALO}>{escape(text)}</text>'
            for i, text in enumerate(lines)]


RIGHT_OF, LEFT_OF, ABOVE, BELOW = (1, 0), (-1, 0), (0, -1), (0, 1)
UP_LEFT, UP_RIGHT, DOWN_LEFT, DOWN_RIGHT = (-1, -1), (1, -1), (-1, 1), (1, 1)
FAR_BELOW = [(0, 3), (-1, 3), (1, 3)]


def budget_text(point):
    return "no budget" if point["memory_gib"] is None else f"{point['memory_gib']:g} GiB"


def share_text(point, points):
    """The speed relative to that without a budget."""
    free = next(one for one in points if one["memory_gib"] is None)
    return f"{point['tokens_per_s'] / free['tokens_per_s']:.0%}".replace("%", " %")


def budgets():
    """The measured points, the least memory first."""
    data = json.loads(BUDGETS.read_text())
    data["points"].sort(key=lambda point: point["memory_gib"] or math.inf)
    return data


def draw_budgets(data):
    """Tokens per second against the peak, within budgets and of peers."""
    points, peers = data["points"], data["peers"]
    memory = [one["peak_gib"] for one in points + peers]
    low, high = math.log2(min(memory) / 1.2), math.log2(max(memory) * 1.35)
    step = 10_000
    top = step * math.ceil(max(one["tokens_per_s"] for one in points + peers) / step)

    def x_of(gib):
        return LEFT + (math.log2(gib) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y_of(rate):
        return HEIGHT - BOTTOM - rate / top * (HEIGHT - TOP - BOTTOM)

    def place_of(one):
        return x_of(one["peak_gib"]), y_of(one["tokens_per_s"])

    title = f'{data["training"]}: speed against the memory of the device'
    out = head(title, f'{data["device"]}, {data["tokens_per_sample"]:,} tokens, AdamW, bf16; '
               f'Reprise with {data["samples_per_update"]} sequences per update, the others '
               f'with {data["peer_samples_per_update"]}')
    out.insert(1, f"<title>{title}</title>")
    for power in range(math.ceil(low), math.floor(high) + 1):
        out += column(x_of(2**power), f"{2**power:g} GiB")
    for rate in range(0, top + 1, step):
        out += line(y_of(rate), f"{rate:,}")
    out.append(f'<text x="{LEFT - 8}" y="{TOP - 14}" text-anchor="end" fill="#666">tokens/s</text>')
    out.append(axis_name("measured peak (logarithmic)"))

    labels = Labels()
    places = [place_of(point) for point in points]
    labels.avoid_line(places)
    for one in points + peers:
        labels.avoid(*place_of(one), 6)
    within = [place for place, point in zip(places, points) if point["memory_gib"]]
    out.append(polyline(within, 'stroke-opacity="0.4"'))
    out.append(polyline([*within[-1:], *(place for place, point in zip(places, points)
                                         if not point["memory_gib"])],
                        'stroke-opacity="0.4" stroke-dasharray="4 4"'))
    systems = list(dict.fromkeys(peer["system"] for peer in peers))
    colours = dict(zip(systems, (OTHER, THIRD)))
    for point, (x, y) in zip(points, places):
        if point["memory_gib"]:
            end = x_of(point["memory_gib"])
            out.append(f'<path d="M{x:.1f} {y:.1f}H{end:.1f}m0 -6v12" fill="none" '
                       f'stroke="{OURS}" stroke-width="1.5"/>')
            labels.avoid(end, y, 6)
        out.append(dot(x, y, 4, OURS))
    for point, (x, y) in zip(points, places):
        spots = [DOWN_RIGHT, BELOW, UP_LEFT, ABOVE, UP_RIGHT, DOWN_LEFT]
        if not point["memory_gib"]:
            spots = [ABOVE, UP_LEFT, RIGHT_OF, *spots]
        out += labels.place(x, y, [budget_text(point), share_text(point, points)], spots, OURS)
    for peer in peers:
        x, y = place_of(peer)
        out.append(dot(x, y, 5, colours[peer["system"]]))
        out += labels.place(x, y, [peer["name"]],
                            [RIGHT_OF, LEFT_OF, BELOW, ABOVE, DOWN_RIGHT, DOWN_LEFT, UP_LEFT,
                             UP_RIGHT, *FAR_BELOW], colours[peer["system"]])
    legend = [(OURS, "Reprise within a budget (bar); % of the speed without one"),
              *((colours[system], system) for system in systems)]
    for i, (colour, text) in enumerate(legend):
        y = HEIGHT - BOTTOM - 9 - 17 * (len(legend) - 1 - i)
        out.append(dot(WIDTH - RIGHT - 380, y - 4, 4, colour))
        out.append(f'<text x="{WIDTH - RIGHT - 370}" y="{y}"{HALO}>{escape(text)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def write():
    PICTURE.write_text(draw_budgets(budgets()))


def problems():
    if not PICTURE.is_file() or PICTURE.read_text() != draw_budgets(budgets()):
        yield (f"{PICTURE.relative_to(ROOT)} differs from {BUDGETS.relative_to(ROOT)}; run "
               "scripts/figures.py")


def main():
    if "--budgets" not in sys.argv[1:]:
        sys.stdout.write(draw_frontier(json.load(sys.stdin)))
        return 0
    if "--check" not in sys.argv[1:]:
        write()
    wrong = list(problems())
    for text in wrong:
        print(f"frontier: {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
