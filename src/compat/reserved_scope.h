#pragma once

namespace reprise::compat {

/// Marks a piece of work on this thread that must not fail half-way, and whose
/// memory was set aside just before. Failures that are injected (memory/failure.h)
/// pass it over: neither counted nor made. That is an assumption, not a proof: a
/// real allocator may refuse even here, such as a scalar of eight bytes.
class ReservedScope {
 public:
  ReservedScope();
  ~ReservedScope();
  ReservedScope(const ReservedScope&) = delete;
  ReservedScope& operator=(const ReservedScope&) = delete;

  static bool active();  ///< on this thread
};

}  // namespace reprise::compat
