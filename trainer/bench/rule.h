#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/units.h"

namespace gdn::trainer::bench {

inline constexpr int kRuleDim = 128; // of keys and values

// One shape of the gated delta rule: packed sequences under heads of keys and values.
struct RuleCase {
  std::string name; // "1 x 32768", "32 documents"
  int key_heads = 0, value_heads = 0;
  std::vector<std::int64_t> lengths;

  std::int64_t tokens() const;
  double millions() const; // of 2^20 token-heads
};

// The published shapes; the documents are ragged (log-normal lengths from a fixed seed, equal in sum to the
// whole sequence beside them).
std::vector<RuleCase> rule_cases();
// The same with sequences `divisor` times shorter: for the CPU.
std::vector<RuleCase> shortened(std::vector<RuleCase> cases, std::int64_t divisor);

struct RuleTime {
  RuleCase shape;
  Seconds forward = 0, backward = 0;             // medians
  Seconds forward_floor = 0, backward_floor = 0; // 0: none is known
};

// bf16 rows of unit variance, decays and betas from bf16 logits; included: gates, L2 norm, reductions over the
// value heads of a key head, gradients of the gates' parameters. On the GPU: CUDA-graph replays. On the CPU:
// the reference in fp32, without gates. `done` is told each row.
using RuleProgress = std::function<void(const RuleTime&)>;
std::vector<RuleTime> time_rule_on_cpu(const std::vector<RuleCase>& cases, int repeats, const RuleProgress& done);
std::vector<RuleTime> time_rule_on_cuda(const std::vector<RuleCase>& cases, int replays, const RuleProgress& done);

// Bytes that the kernels of kernels/gdn/NOTES.md move a token-head, each tensor once a kernel, over the rate
// of a device copy.
Seconds rule_floor(const RuleCase& shape, bool backward, BytesPerSecond bandwidth);

} // namespace gdn::trainer::bench
