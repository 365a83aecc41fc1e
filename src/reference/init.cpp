#include "reference/init.h"

#include <algorithm>
#include <cmath>

#include "reference/detail.h"

namespace gdn::reference {
namespace {

// w(i, j) = value(element number in the whole parameter).
template <class F> void fill(const Values& w, int64 first, F value) {
  for (int64 i = 0; i < w.rows; ++i)
    for (int64 j = 0; j < w.cols; ++j)
      w.set(i, j, value(static_cast<std::uint64_t>(first + i * w.cols + j)));
}

} // namespace

void fill_constant(Values w, double value) {
  fill(w, 0, [&](std::uint64_t) { return value; });
}

void fill_normal(Values w, double stddev, const RandomStream& stream, int64 first) {
  fill(w, first, [&](std::uint64_t e) { return stddev * stream.normal(e); });
}

void fill_uniform(Values w, double lo, double hi, const RandomStream& stream, int64 first) {
  fill(w, first, [&](std::uint64_t e) { return lo + (hi - lo) * stream.uniform(e); });
}

void init_a_log(Values a_log, double lo, double hi, const RandomStream& stream, int64 first) {
  if (!(lo >= 0 && lo <= hi && hi > 0))
    throw Error(ErrorCode::Config,
                "A_init_range is " + std::to_string(lo) + " to " + std::to_string(hi) +
                    "; 0 <= low <= high and high > 0 are needed",
                "Megatron-LM's default is 1 to 16");
  fill(a_log, first,
       [&](std::uint64_t e) { return std::log(lo + (hi - lo) * stream.uniform_open(e)); });
}

void init_conv(Values w, std::optional<double> conv_init, const RandomStream& stream, int64 first) {
  const double bound = conv_init.value_or(1 / std::sqrt(static_cast<double>(w.cols)));
  fill_uniform(w, -bound, bound, stream, first);
}

void init_dt_bias_gdn2(Values dt_bias, const RandomStream& stream, int64 first) {
  const double lo = std::log(1e-3), hi = std::log(0.1);
  fill(dt_bias, first, [&](std::uint64_t e) {
    const double dt = std::max(std::exp(lo + (hi - lo) * stream.uniform(e)), 1e-4);
    return dt + std::log(-std::expm1(-dt)); // inverse softplus
  });
}

} // namespace gdn::reference
