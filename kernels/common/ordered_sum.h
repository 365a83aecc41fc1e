#pragma once
#include <cstdint>

#include "core/dtype.h"
#include "kernels/common/launch.h"

namespace gdn::kernels {

// What is summed: `ranks` stretches of `elements` each, one behind the other; that of rank `own_rank`, if any, lies at `own`.
struct OrderedParts {
  const void* data = nullptr;
  int ranks = 1;
  std::int64_t elements = 0;
  int own_rank = -1;
  const void* own = nullptr;
};

// Element by element the sum (or maximum) of the parts in the order of their ranks into `out`, which may be one of the
// parts; bf16 adds in fp32 and is rounded once. BF16, FP32, FP64, Int32 and Int64; Error{Usage} for other types.
void reduce_in_order(const OrderedParts& parts, DType dtype, bool maximum, void* out, const LaunchContext& context);

} // namespace gdn::kernels
