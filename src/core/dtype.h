#pragma once
#include <string>
#include <string_view>

#include "core/units.h"

namespace gdn {

enum class DType { BF16, FP16, FP32, FP64, FP8, Int64, Int32, Bool };

Bytes size_of(DType dtype);            // bytes of one element
std::string_view name_of(DType dtype); // "bf16", "fp32", "int64", ...
// Throws Error{Config} naming the text and the known names.
DType parse_dtype(std::string_view text);

} // namespace gdn
