#pragma once

#include <string>

namespace reprise::detail {

/// Path of a browser that can run headless: `named`, or the first one found in PATH.
/// Throws c10::Error if there is none. Tested by tests/report/report_test.cpp.
std::string find_browser(const std::string& named);

/// The document at `url` as HTML after its scripts have run, in a browser with a
/// temporary profile. Throws c10::Error if the browser fails or does not end within three
/// minutes, and reprise::Error if it cannot be started.
std::string dump_document(const std::string& browser, const std::string& url);

}  // namespace reprise::detail
