#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "trainer/comm/communicator.h"

namespace gdn::trainer {

// parts: `ranks` stretches of `elements` each. Element by element the sum or maximum over the ranks, in
// their order, into `out`, which may be one of the parts. bf16 adds in fp32 and is rounded once.
// Throws Error{Internal} for a type that is never reduced.
void reduce_in_order(const std::byte* parts, int ranks, std::int64_t elements, DType dtype, Reduction reduction, std::byte* out);

} // namespace gdn::trainer
