#pragma once
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "fixture.h"

// What crosses the layers in one step, copied out of the engine while it runs.
namespace gdn::trainer::fixture {

using Values = std::vector<float>; // row by row

inline Values copy(const View& v) {
  Values out;
  for (std::int64_t r = 0; r < v.rows; ++r)
    for (std::int64_t c = 0; c < v.cols; ++c) {
      const std::byte* at = v.data + (r * v.stride + c) * size_of(v.dtype);
      float x = 0;
      if (v.dtype == DType::FP32) {
        std::memcpy(&x, at, 4);
      } else {
        std::uint16_t half = 0;
        std::memcpy(&half, at, 2);
        const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
        std::memcpy(&x, &bits, 4);
      }
      out.push_back(x);
    }
  return out;
}

struct Captured {
  StepResult result;
  std::vector<Values> hidden;             // leaving the embedding, layer 0, layer 1, ...: [tokens * hidden]
  std::map<int, Values> hidden_gradient;  // by unit: of what enters it
  Values logits;                          // of the main head, where a tensor holds them
  std::map<std::string, Values> gradient; // by parameter
};

// Runs one step of one micro-batch without recompute. `look` sees every call after it has run.
inline Captured capture(Session& s, const Batch& batch, const std::function<void(const OpCall&)>& look = {}) {
  Captured out;
  s.use({});
  Observer observer;
  observer.ran = [&](size_t index, const OpCall& call, Seconds) {
    if (look) look(call);
    const int unit = s.program().runs()[index].unit;
    for (const OpCall::Operand& o : call.operands()) {
      if (call.step() >= 0) { // the last writer completes it
        if (o.access.gradient && o.access.mode != program::AccessMode::Read && o.access.tensor == call.list().input)
          out.hidden_gradient[unit] = copy(call.view_of(o));
      } else if (!o.access.gradient && o.access.mode == program::AccessMode::Write) {
        if (o.access.tensor == call.list().output) out.hidden.push_back(copy(call.view_of(o)));
        if (call.op().name == "lm_head" && o.access.tensor == call.op().outputs[0]) out.logits = copy(call.view_of(o));
      }
    }
  };
  out.result = s.run({batch}, 0, 0, observer);
  for (const ParameterSlot& p : s.parameters().slots()) out.gradient[p.name()] = s.parameters().gradient(p.name());
  return out;
}

// |a - b| / |b| over all elements; 0 where both are 0.
inline double relative(const Values& a, const Values& b) {
  if (a.size() != b.size()) return HUGE_VAL;
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return difference == 0 ? 0 : std::sqrt(difference / norm);
}

} // namespace gdn::trainer::fixture
