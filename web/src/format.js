// Number formatting: three significant digits and a unit.

const MINUS = "\u2212";
const NO_BREAK = "\u00a0";

/** Three significant digits: 1.23, 12.3, 123, 1234. */
function figures3(x) {
  const size = Math.abs(x);
  const text = size.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
  return (x < 0 && Number(text) !== 0 ? MINUS : "") + text;
}

/** Same format as format_bytes() in the library: 94760128 → 90.4 MiB. */
function bytesText(bytes) {
  if (Math.abs(bytes) < 1024) return `${Math.round(bytes)}${NO_BREAK}B`;
  let value = bytes / 1024;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  // 999.5 would print as 1000; use the next unit.
  while (Math.abs(value) >= 999.5 && unit + 1 < units.length) {
    value /= 1024;
    ++unit;
  }
  return figures3(value) + NO_BREAK + units[unit];
}

/** A fraction in percent: 0.071 → 7.1 %, 0.71 → 71 %; 0.996 is not rounded to 100 %: 99.6 %. */
function percentText(fraction) {
  const size = Math.abs(100 * fraction);
  const text = size.toFixed(size < 9.95 || (size >= 99 && size < 100) ? 1 : 0);
  return `${fraction < 0 && Number(text) !== 0 ? MINUS : ""}${text}${NO_BREAK}%`;
}

/** A change in percent, with its sign. */
function changeText(fraction) {
  const text = percentText(fraction);
  return fraction > 0 && !text.startsWith("0.0") ? `+${text}` : text;
}

/** A reduction as a negative change: 0.93 → −93 %. */
function fallText(fraction) {
  return changeText(-fraction);
}

/** A change as an amount and one of two words; "unchanged" if it rounds to zero. */
function inWords(fraction, above, below) {
  const amount = percentText(Math.abs(fraction));
  if (amount.startsWith("0.0")) return "unchanged";
  return `${amount} ${fraction > 0 ? above : below}`;
}

/** A reduction: 0.39 → 39 % lower. */
const lowerText = (fraction) => inWords(fraction, "lower", "higher");

/** An increase: 0.25 → 25 % more. */
const moreText = (fraction) => inWords(fraction, "more", "less");

function secondsText(seconds) {
  return seconds < 0.9995
    ? `${figures3(1000 * seconds)}${NO_BREAK}ms`
    : `${figures3(seconds)}${NO_BREAK}s`;
}

function millisecondsText(ms) {
  return secondsText(ms / 1000);
}

function ratioText(ratio) {
  return `×${NO_BREAK}${figures3(ratio)}`;
}

function shareText(ratio) {
  return ratio.toFixed(3);
}

const FORMATS = {
  bytes: bytesText,
  percent: percentText,
  change: changeText,
  fall: fallText,
  lower: lowerText,
  more: moreText,
  seconds: secondsText,
  ms: millisecondsText,
  ratio: ratioText,
  share: shareText,
  number: figures3,
  count: (n) => String(n),
};

/** Parses a size such as 8GiB, 8000MB or 2g. Null if it is invalid. */
function parseBytes(text) {
  const found = /^\s*([0-9.eE+]+)\s*([kmgt]?)(i?b?)\s*$/i.exec(String(text));
  if (!found) return null;
  const base = found[3].toLowerCase() === "b" && found[2] ? 1000 : 1024;
  const power = " kmgt".indexOf(found[2].toLowerCase() || " ");
  return Math.round(Number(found[1]) * base ** power);
}

/** Compares texts by the numbers in them: every:2 before every:10. */
function compareNatural(a, b) {
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

function slug(...words) {
  return words
    .join("-")
    .toLowerCase()
    .replace(/[^a-z0-9]+/g, "-")
    .replace(/^-|-$/g, "");
}

/** Formats a time of the records (UTC, ISO 8601): 16 Nov 2026, 23:05 UTC. */
function dateText(iso) {
  const date = new Date(iso);
  if (!iso || Number.isNaN(date.getTime())) return null;
  const month = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(" ")[date.getUTCMonth()];
  const two = (n) => String(n).padStart(2, "0");
  return `${date.getUTCDate()}${NO_BREAK}${month}${NO_BREAK}${date.getUTCFullYear()}, ` +
    `${two(date.getUTCHours())}:${two(date.getUTCMinutes())}${NO_BREAK}UTC`;
}

/** Formats rows ({name: value}) as CSV (RFC 4180), with one column per name. */
function csvText(rows) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  const cell = (value) => {
    const text = value == null ? "" : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
  };
  return [names, ...rows.map((row) => names.map((name) => row[name]))]
    .map((cells) => `${cells.map(cell).join(",")}\r\n`).join("");
}
