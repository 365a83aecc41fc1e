#pragma once
#include <functional>

#include "core/units.h"

struct CUstream_st;

namespace gdn::trainer::bench {

// Median time of a replay of the CUDA graph that `launch` puts on a stream, after three to warm up.
Seconds graph_time(const std::function<void(CUstream_st*)>& launch, int replays);

} // namespace gdn::trainer::bench
