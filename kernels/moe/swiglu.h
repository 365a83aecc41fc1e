#pragma once
#include "kernels/common/matrix.h"

// act = silu(gate) * up * weight of the row; fc1 = gate | up, [rows, 2 f] -> [rows, f]. weight [rows, 1] may be
// absent: 1. A row's gradient of the weight is made in the same pass.
namespace gdn::kernels {

void swiglu_forward(const Matrix& fc1, const Matrix& weight, const Matrix& act, const LaunchContext& context);
void swiglu_backward(const Matrix& fc1, const Matrix& weight, const Matrix& d_act, const Gradient& d_fc1, const Gradient& d_weight,
                     const LaunchContext& context);

} // namespace gdn::kernels
