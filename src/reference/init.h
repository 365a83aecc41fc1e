#pragma once
#include <optional>

#include "reference/random.h"
#include "reference/view.h"

// Initialisation of parameters. `first` is the element number of the view's first element inside
// the whole parameter, so shards draw what the whole would.
namespace gdn::reference {

void fill_constant(Values w, double value);
void fill_normal(Values w, double stddev, const RandomStream& stream, int64 first = 0);
void fill_uniform(Values w, double lo, double hi, const RandomStream& stream, int64 first = 0);

// A_log = log A, A ~ U(lo, hi), drawn in double and rounded once to the storage type. A is never 0,
// also for lo = 0: log A is finite. Throws Error{Config} unless 0 <= lo <= hi and hi > 0.
void init_a_log(Values a_log, double lo, double hi, const RandomStream& stream, int64 first = 0);

// Depthwise conv weight [channels, taps]: U(-conv_init, conv_init); unset: PyTorch's default for a
// depthwise Conv1d, U(-1/sqrt(taps), 1/sqrt(taps)).
void init_conv(Values w, std::optional<double> conv_init, const RandomStream& stream,
               int64 first = 0);

// dt_bias of GDN is 1 (fill_constant). GDN2: step size log-uniform in [1e-3, 0.1], at least 1e-4,
// stored as inverse softplus.
void init_dt_bias_gdn2(Values dt_bias, const RandomStream& stream, int64 first = 0);

} // namespace gdn::reference
