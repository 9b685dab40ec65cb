// Placement of point labels, so that no label covers a point or another label.

const LABEL_HEIGHT = 14;
const CHARACTER = 6.6;
const POINT = 6;

/** Candidate positions next to a point, best first: {align, dx, dy}. */
const PLACES = [
  { align: "left", dx: 9, dy: 0 },
  { align: "right", dx: -9, dy: 0 },
  { align: "center", dx: 0, dy: -14 },
  { align: "center", dx: 0, dy: 15 },
  { align: "left", dx: 7, dy: -12 },
  { align: "left", dx: 7, dy: 13 },
  { align: "right", dx: -7, dy: -12 },
  { align: "right", dx: -7, dy: 13 },
];

/** Positions further away, for points that must have a label. */
const FAR_PLACES = [
  { align: "right", dx: -4, dy: -28 },
  { align: "right", dx: -4, dy: 28 },
  { align: "left", dx: 4, dy: -28 },
  { align: "left", dx: 4, dy: 28 },
];

/** A position outside the ring around a point that must have a label. */
const beside = (point, place) => (point.must ? { ...place, dx: 1.5 * place.dx, dy: 1.25 * place.dy } : place);

function labelBox({ x, y, label }, { align, dx, dy }) {
  const width = CHARACTER * label.length;
  const left = x + dx - (align === "right" ? width : align === "center" ? width / 2 : 0);
  const top = y + dy - LABEL_HEIGHT / 2;
  return { left, right: left + width, top, bottom: top + LABEL_HEIGHT };
}

const overlap = (a, b) =>
  a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;

/** Whether the line from `a` to `b` ({x, y}) intersects a box. */
function crosses(box, [a, b]) {
  const steps = Math.ceil(Math.hypot(b.x - a.x, b.y - a.y) / 4);
  for (let i = 0; i <= steps; ++i) {
    const x = a.x + (b.x - a.x) * i / (steps || 1);
    const y = a.y + (b.y - a.y) * i / (steps || 1);
    if (x > box.left && x < box.right && y > box.top && y < box.bottom) return true;
  }
  return false;
}

/** Places labels for `points` ({x, y, label, must} in pixels, the most important first) such
 *  that they cover no line, box, point or other label. A point without a free position has
 *  no label, unless `must` is set: its label may cover lines. */
function placeLabels(points, { width, height, lines, boxes }) {
  const taken = [...points.map(({ x, y }) =>
    ({ left: x - POINT, right: x + POINT, top: y - POINT, bottom: y + POINT })), ...boxes];
  return points.flatMap((point, i) => {
    const inside = (box) => box.left >= 0 && box.right <= width && box.top >= 0 && box.bottom <= height;
    const free = (box) => inside(box) && !taken.some((other, j) => j !== i && overlap(box, other));
    const clear = (box) => free(box) && !lines.some((line) => crosses(box, line));
    const near = PLACES.map((place) => beside(point, place));
    const find = (places, fits) => places.find((place) => fits(labelBox(point, place)));
    const place = find(near, clear) ||
      (point.must && (find(near, free) || find(FAR_PLACES, free) || find(near, inside) || near[0]));
    if (!place) return [];
    taken.push(labelBox(point, place));
    return [{ ...point, ...place }];
  });
}
