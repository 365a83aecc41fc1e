#pragma once
#include <string>

#include "model/builder.h"

namespace gdn::model {

// act = silu(gate) * up over fc1 = gate | up, [R, 2 f] -> [R, f]. Backward reads fc1.
TensorId swiglu(Builder& b, std::string name, TensorId fc1, std::string out);

// out = y * sigmoid(x . w), one score a row. Backward reads x, y and the score.
TensorId shared_gate(Builder& b, std::string name, TensorId x, TensorId y, ParamRef weight, std::string out);

} // namespace gdn::model
