#include "core/dtype.h"

#include <array>
#include <utility>

#include <fmt/core.h>

#include "core/error.h"

namespace gdn {

namespace {
struct Row {
  DType dtype;
  std::string_view name;
  Bytes size;
};
constexpr std::array<Row, 8> kRows{{{DType::BF16, "bf16", 2},
                                    {DType::FP16, "fp16", 2},
                                    {DType::FP32, "fp32", 4},
                                    {DType::FP64, "fp64", 8},
                                    {DType::FP8, "fp8", 1},
                                    {DType::Int64, "int64", 8},
                                    {DType::Int32, "int32", 4},
                                    {DType::Bool, "bool", 1}}};
} // namespace

Bytes size_of(DType dtype) { return kRows[static_cast<size_t>(dtype)].size; }

std::string_view name_of(DType dtype) { return kRows[static_cast<size_t>(dtype)].name; }

DType parse_dtype(std::string_view text) {
  std::string known;
  for (const Row& r : kRows) {
    if (r.name == text) return r.dtype;
    known += (known.empty() ? "" : ", ") + std::string(r.name);
  }
  throw Error(ErrorCode::Config, fmt::format("unknown dtype '{}'; known: {}", text, known));
}

} // namespace gdn
