#pragma once

#include <string>

namespace reprise::detail {

/// The command of a browser that can run without a screen: `named`, or the
/// first that is found. Throws c10::Error if there is none.
std::string find_browser(const std::string& named);

/// The document at `url` as HTML after its scripts have run, in a browser with
/// a profile of its own. Throws c10::Error if it fails or takes minutes.
std::string dump_document(const std::string& browser, const std::string& url);

}  // namespace reprise::detail
