#pragma once
#include <cstddef>
#include <string_view>

#include "core/units.h"

namespace gdn::kernels {

// Device memory, for cudaFree. Throws Error{DoesNotFit} naming `what`, the bytes and what is free.
std::byte* allocate(Bytes bytes, std::string_view what);

} // namespace gdn::kernels
