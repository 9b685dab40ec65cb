#include "plan/drawing.h"

#include <reprise/base/bytes.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace reprise::detail {
namespace {

constexpr int kStackColumns = 48;
constexpr int kLabelColumns = 10;

bool begins_character(char c) {
  return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
}

/// The range of one axis.
struct Range {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();

  void take(double value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
  void widen() {
    if (low > high) low = high = 0;
    if (low == high) high = low + std::max(std::abs(low) * 0.1, 1e-9);
  }
  int place(double value, int cells) const {
    return static_cast<int>(
        std::lround((value - low) / (high - low) * (cells - 1)));
  }
  double middle() const { return (low + high) / 2; }
};

}  // namespace

std::string format_ms(double ms) {
  if (ms >= 9999.5) return fmt::format("{:.1f} s", ms / 1000);
  return fmt::format("{:.{}f} ms", ms, ms < 9.995 ? 2 : ms < 99.95 ? 1 : 0);
}

std::string format_change(double value, double base) {
  if (base == 0) return "-";
  return fmt::format("{:+.1f} %", 100 * (value / base - 1));
}

int columns_of(std::string_view text) {
  return static_cast<int>(
      std::count_if(text.begin(), text.end(), begins_character));
}

std::string shorten(std::string_view text, int columns) {
  if (columns_of(text) <= columns) return std::string(text);
  size_t end = 0;
  for (int left = columns - 1; end < text.size(); ++end) {
    if (begins_character(text[end]) && left-- == 0) break;
  }
  return std::string(text.substr(0, end)) + "…";
}

std::string flow(const std::vector<std::string>& words, int start, int indent) {
  std::string text;
  int column = start;
  for (const std::string& word : words) {
    const bool first = text.empty();
    if (!first && column + 1 + columns_of(word) > kColumns) {
      text += fmt::format("\n{:{}}", "", indent);
      column = indent;
    } else if (!first) {
      text += " ";
      ++column;
    }
    text += word;
    column += columns_of(word);
  }
  return text;
}

Canvas::Canvas(int columns, int rows)
    : columns_(columns),
      rows_(rows),
      cells_(static_cast<size_t>(columns) * static_cast<size_t>(rows), " ") {}

void Canvas::set(int column, int row, std::string_view character) {
  if (column < 0 || column >= columns_ || row < 0 || row >= rows_) return;
  cells_[static_cast<size_t>(row * columns_ + column)] = character;
}

bool Canvas::blank(int column, int row) const {
  return at(column, row) == " ";
}

std::string Canvas::line(int row) const {
  std::string text;
  for (int column = 0; column < columns_; ++column) text += at(column, row);
  text.erase(text.find_last_not_of(' ') + 1);
  return text;
}

const std::string& Canvas::at(int column, int row) const {
  return cells_.at(static_cast<size_t>(row * columns_ + column));
}

std::string draw_stack(const std::vector<StackPart>& parts, int64_t limit) {
  int64_t total = 0;
  for (const StackPart& part : parts) total += part.bytes;
  const auto whole = static_cast<double>(std::max<int64_t>(total, 1));
  const double scale = std::max(whole, static_cast<double>(limit));
  const auto place = [&](int64_t bytes) {
    return static_cast<int>(
        std::lround(static_cast<double>(bytes) / scale * kStackColumns));
  };
  // One more column for a limit at the right end.
  Canvas canvas(kStackColumns + 1, static_cast<int>(parts.size()));
  std::string text;
  int64_t below = 0;
  for (int row = 0; row < canvas.rows(); ++row) {
    const StackPart& part = parts[static_cast<size_t>(row)];
    const int from = place(below);
    const int to = place(below += part.bytes);
    for (int column = from; column < to; ++column) canvas.set(column, row, "█");
    if (from == to && part.bytes > 0) canvas.set(from, row, "▏");
    const int line = place(limit);
    if (limit > 0 && canvas.blank(line, row)) canvas.set(line, row, "│");
    text += fmt::format(
        "  {:<20}{:>10}{:>7.1f} %  {}", part.name, format_bytes(part.bytes),
        100 * static_cast<double>(part.bytes) / whole, canvas.line(row));
    text.erase(text.find_last_not_of(' ') + 1);
    text += "\n";
  }
  if (limit > 0) {
    text += fmt::format("  {:<20}{:>10}{:>{}}\n", "budget", format_bytes(limit),
                        "┴", 12 + place(limit));
  }
  return text;
}

std::string ScatterPlot::draw(std::string (*x_label)(double),
                              std::string (*y_label)(double)) const {
  Range x;
  Range y;
  for (const PlotPoint& point : points) {
    x.take(point.x);
    y.take(point.y);
  }
  if (x_line > 0) x.take(x_line);
  x.widen();
  y.widen();
  Canvas canvas(columns, rows);
  if (x_line > 0) {
    const int column = x.place(x_line, columns);
    for (int row = 0; row < rows; ++row) canvas.set(column, row, "│");
  }
  for (const PlotPoint& point : points) {
    canvas.set(x.place(point.x, columns), rows - 1 - y.place(point.y, rows),
               point.mark);
  }
  std::string text;
  for (int row = 0; row < rows; ++row) {
    const std::string label = row == 0          ? y_label(y.high)
                              : row == rows / 2 ? y_label(y.middle())
                              : row == rows - 1 ? y_label(y.low)
                                                : "";
    text += fmt::format("  {:>{}} {}{}\n", label, kLabelColumns,
                        label.empty() ? "│" : "┤", canvas.line(row));
  }
  text += fmt::format("  {:{}} └", "", kLabelColumns);
  for (int column = 0; column < columns; ++column) text += "─";
  const int half = columns / 2;
  text += fmt::format("\n  {:{}}  {:<{}}{:<{}}{:>{}}\n", "", kLabelColumns,
                      x_label(x.low), half - 4, x_label(x.middle()), half - 6,
                      x_label(x.high), 10);
  return text;
}

}  // namespace reprise::detail
