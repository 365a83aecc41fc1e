#pragma once
#include <string>

#include <doctest/doctest.h>

#include "core/error.h"

namespace gdn::test {

// The message and hint of the Error{Config} that `f` must throw.
template <typename F> std::string message_of(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    CHECK(e.code() == ErrorCode::Config);
    return std::string(e.what()) + (e.hint().empty() ? "" : " | " + e.hint());
  }
  return "no error";
}

inline bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

} // namespace gdn::test
