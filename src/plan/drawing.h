#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

/// Plots made of text, for terminals of 100 columns. Every character drawn is
/// one column wide, whatever its length in UTF-8. Tested by
/// tests/plan/plan_text_test.cpp.
namespace reprise::detail {

constexpr int kColumns = 96;

/// Formats a time with three significant digits: "4.52 ms", "214 ms", "12.3 s".
std::string format_ms(double ms);

/// Formats the change from `base` to `value`: "+1.9 %", "-12.0 %"; "-" if
/// `base` is 0.
std::string format_change(double value, double base);

/// Returns the number of columns that `text` takes.
int columns_of(std::string_view text);

/// Truncates `text` to at most `columns` and marks the truncation with "…".
std::string shorten(std::string_view text, int columns);

/// Wraps `words` into lines of kColumns. The first line begins at column
/// `start`; the others are indented by `indent` spaces.
std::string flow(const std::vector<std::string>& words, int start, int indent);

/// A grid of character cells that is read line by line.
class Canvas {
 public:
  Canvas(int columns, int rows);

  /// Draws one UTF-8 character. Positions outside of the canvas are ignored.
  void set(int column, int row, std::string_view character);
  /// Returns whether nothing has been drawn at this position.
  bool blank(int column, int row) const;
  int columns() const { return columns_; }
  int rows() const { return rows_; }

  /// Returns a row without trailing spaces.
  std::string line(int row) const;

 private:
  const std::string& at(int column, int row) const;
  int columns_;
  int rows_;
  std::vector<std::string> cells_;
};

struct StackPart {
  std::string name;
  int64_t bytes = 0;
};

/// Draws one row per part with its bytes, its share, and a bar that begins
/// at the end of the previous bar. `limit` is drawn as a vertical line through all
/// rows; 0 for none.
std::string draw_stack(const std::vector<StackPart>& parts, int64_t limit);

struct PlotPoint {
  double x = 0;
  double y = 0;
  std::string mark;
};

/// Points on two linear axes. Later points are drawn over earlier ones.
struct ScatterPlot {
  std::vector<PlotPoint> points;
  double x_line = 0;  ///< position of a vertical line; 0 for none
  int columns = 60;
  int rows = 14;

  /// Draws the plot. `x_label` and `y_label` format the numbers at the axes.
  std::string draw(std::string (*x_label)(double),
                   std::string (*y_label)(double)) const;
};

}  // namespace reprise::detail
