#pragma once

#include <reprise/train/fields.h>

/// Checks of values while the command line is read, before any work begins.
namespace reprise::command {

/// A file that can be opened for reading, not a directory.
FieldCheck readable_file();

/// A study's directory with results, or a file of results.
FieldCheck readable_results();

/// A dataset's name, or a file that can be read.
FieldCheck data_source();

/// A file that could be created or replaced now. Nothing is left behind.
FieldCheck writable_file();

/// A directory that files could be created in, or that could be made, now.
FieldCheck writable_directory();

/// A text that is not empty.
FieldCheck not_empty();

}  // namespace reprise::command
