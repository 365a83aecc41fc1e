#pragma once
#include <CLI/CLI.hpp>

#include "core/error.h"

namespace gdn::cli {

// A command line that CLI11 refused, as one of our errors: the option or command, what is allowed, the
// nearest spelling, where help is.
Error usage_error(const CLI::ParseError& error, const CLI::App& program);

} // namespace gdn::cli
