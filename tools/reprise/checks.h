#pragma once

#include <reprise/train/fields.h>

/// Checks of flag values when the command line is parsed, before any work is
/// done. Tested by tests/tools/wrong_inputs_test.py.
namespace reprise::command {

/// Accepts files, not directories, that can be opened for reading.
FieldCheck readable_file();

/// Accepts results files, and directories of studies that contain one.
FieldCheck readable_results();

/// Accepts safetensors files, the index of a checkpoint in several files, and
/// directories that contain one of them.
FieldCheck readable_weights();

/// A directory with the adapter of a model.
FieldCheck readable_adapter();

/// Accepts names of datasets and readable files.
FieldCheck data_source();

/// Accepts paths at which a file can be created or replaced. Leaves no file
/// behind.
FieldCheck writable_file();

/// Accepts also directories, for adapters.
FieldCheck writable_export();

/// Accepts directories that are writable or can be created.
FieldCheck writable_directory();

/// Accepts texts that are not empty.
FieldCheck not_empty();

}  // namespace reprise::command
