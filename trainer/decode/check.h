#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "trainer/session.h"

namespace gdn::trainer {

// One way of cutting requests into passes, and how far its logits are from those of the full forward.
struct DecodeCase {
  std::string lengths; // "129", "1 + 63 + 64 + 65 + 129"
  std::string split;   // "prefill 64, decode 65"
  double off = 0;
  double allowed = 0;
  bool ok() const { return off <= allowed; } // false for NaN
};

// In fp32: the largest difference to the full forward of the same session, over the largest logit. In bf16, where every
// way rounds elsewhere: L2 of the difference to the full forward in fp32 on the CPU with the same weights, over the L2 of
// that; at most twice what the CPU's own full forward in bf16 is off on all requests together.
inline constexpr double kDecodeTolerance = 1e-5; // fp32
inline constexpr std::int64_t kDecodeLengths[] = {1, 63, 64, 65, 129}; // around the rule's chunk of 64

// The run that the session of check_decode needs: one micro-batch of all lengths, packed.
config::Run decode_check_run(config::Run run, DType dtype = DType::FP32);

// The full forward of the training program against prefill and decode, with the session's weights:
// every length alone under every kind of split, and all together as packed requests; in bf16 the full forward on the
// session's device as well; where the device replays recorded passes, their bits against launches one by one. The session
// must have been made with decode_check_run and be using a setting.
std::vector<DecodeCase> check_decode(Session& session);

} // namespace gdn::trainer
