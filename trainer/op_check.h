#pragma once
#include <map>
#include <string>
#include <vector>

#include "report/document.h"
#include "trainer/decorated_device.h"

namespace gdn::trainer {

// How far the results of one op (or one of its backward steps) are from the same op in double on the
// same operands: the worst tensor of all its runs.
struct OpError {
  std::string op;              // "gdn.moe: rule.backward"
  model::OpKind kind = {};
  std::string tensor;          // "d:q", "d:gdn.in_proj"
  double error = 0;            // L2 of the difference / L2 of the result in double
  double reference = 0;        // the same of the CPU reference in the run's own dtype, or of a sound bf16 rule
  double allowed = 0;
  int runs = 0;
  bool ok() const { return error <= allowed; } // false for NaN
};

// Runs every op on the device given, and after each the CPU reference in double on copies of the operands
// that the device was given. Allowed is twice the error of the CPU reference in the op's own dtype, at
// least one rounding of it, at most `limit`. Integers must be equal. Knows nothing of what the device is.
//
// A chunked rule rounds more often than token by token arithmetic does, so it is judged otherwise. FP32 and GDN2: by
// `limit`. BF16: by twice the larger of 6.7e-3, the worst of a correct kernel on inputs drawn at random, and of the error
// that a sound bf16 kernel has on the very operands of the call (reference/rule_rounded.h). The second matters where the
// result itself is a small difference of large products: d:o comes from a norm of o, so d:o . o is about 0; where the
// state is little more than the last k v^T, d:q = S d:o, d:g and d:beta nearly vanish and what is rounded does not. Never by more than 0.2: a result that is
// missing is off by 1.
class OpCheck final : public DecoratedDevice {
public:
  using DecoratedDevice::DecoratedDevice;
  void run(const OpCall& call) override;

  // Worst first within each kind, kinds in the order of their enum.
  std::vector<OpError> results() const;

  // Relative L2 error that no op may exceed. BF16: twice what a correct delta rule has in the worst case
  // of ordinary inputs (6.7e-3, dk of beta ~ U(0, 2) without decay); FP32: 1e-5.
  static double limit(DType storage);

private:
  std::map<const model::OpList*, model::OpList> wide_;
  std::map<std::string, OpError> worst_; // by op
};

void add_to(report::Document& document, const std::vector<OpError>& results);

} // namespace gdn::trainer
