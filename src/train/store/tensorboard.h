#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace reprise {

/// Writes scalars in TensorBoard's event format (records with masked CRC-32C,
/// each an Event protocol buffer) into a new file of `directory`, which is made
/// if missing. Written through at each call, so that a killed run loses nothing.
/// Throws c10::Error where the file cannot be written.
class EventWriter {
 public:
  explicit EventWriter(const std::string& directory);
  ~EventWriter();
  EventWriter(const EventWriter&) = delete;
  EventWriter& operator=(const EventWriter&) = delete;

  /// `tag` such as "train/loss".
  void scalar(const std::string& tag, double value, int64_t step);

  const std::string& path() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace reprise
