#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

/// Figures as characters, for a terminal of 100 columns. Each character drawn is
/// one column wide, whatever it takes in UTF-8.
namespace reprise::detail {

constexpr int kColumns = 96;

/// "4.52 ms", "214 ms", "12.3 s": three figures.
std::string format_ms(double ms);

/// "+1.9 %", "-12.0 %": of `value` over `base`; "-" where base is 0.
std::string format_change(double value, double base);

/// Columns that `text` takes.
int columns_of(std::string_view text);

/// `text` in at most `columns`, with … in the place of what is cut off.
std::string shorten(std::string_view text, int columns);

/// `words` one after another in lines of kColumns, each line but the first
/// behind `indent` blanks; the first begins at column `start`.
std::string flow(const std::vector<std::string>& words, int start, int indent);

/// Rows of cells; text can be read out of it line by line.
class Canvas {
 public:
  Canvas(int columns, int rows);

  /// Draws one character (as UTF-8); outside the canvas nothing.
  void set(int column, int row, std::string_view character);
  bool blank(int column, int row) const;
  int columns() const { return columns_; }
  int rows() const { return rows_; }

  /// Without blanks at the end.
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

/// A row for each part with its bytes and its share, and a bar that begins where
/// the one before ends; `limit` (0: none) as a line through all rows.
std::string draw_stack(const std::vector<StackPart>& parts, int64_t limit);

struct PlotPoint {
  double x = 0;
  double y = 0;
  std::string mark;
};

/// Points over two linear axes. Later points stand over earlier ones.
struct ScatterPlot {
  std::vector<PlotPoint> points;
  double x_line = 0;  ///< a vertical line; 0: none
  int columns = 60;
  int rows = 14;

  /// `x_label` and `y_label` write a figure at an axis.
  std::string draw(std::string (*x_label)(double),
                   std::string (*y_label)(double)) const;
};

}  // namespace reprise::detail
