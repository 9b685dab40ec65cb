#pragma once

#include <cstdio>
#include <string>

/// Output of commands that train. Losing it must not end a training: a terminal that was
/// closed, a log on a full disk, a pipe whose reader has ended. Tested by
/// tests/tools/lost_output_test.sh.
namespace reprise::command {

/// Opens those of standard input, output and error that are closed, so that no file of a
/// run gets their number. What is written to an output that was closed is an error for
/// standard output, and lost for standard error.
void open_standard_streams();

/// Makes writing to a pipe without a reader, or beyond the limit on the size of files, an
/// error instead of a signal that ends the process.
void ignore_output_signals();

/// Writes a text to standard error or a log. If it cannot be written, it is lost.
void print_text(const std::string& text, std::FILE* out = stderr);

}  // namespace reprise::command
