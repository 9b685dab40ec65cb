#pragma once

#include <reprise/train/fields.h>

/// Checks of values while the command line is read, before any work begins.
namespace reprise::command {

/// A file, not a directory, that can be opened for reading.
FieldCheck readable_file();

/// A study's directory with results, or a results file.
FieldCheck readable_results();

/// The name of a dataset, or a readable file.
FieldCheck data_source();

/// A file that can be created or replaced. Leaves no file behind.
FieldCheck writable_file();

/// A directory that is writable or can be created.
FieldCheck writable_directory();

/// A text that is not empty.
FieldCheck not_empty();

}  // namespace reprise::command
