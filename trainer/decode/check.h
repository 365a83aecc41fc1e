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
  double off = 0;      // largest |difference| / largest |logit|
  double allowed = 0;
  bool ok() const { return off <= allowed; } // false for NaN
};

inline constexpr double kDecodeTolerance = 1e-5;           // fp32
inline constexpr std::int64_t kDecodeLengths[] = {1, 63, 64, 65, 129}; // around the rule's chunk of 64

// The run that the session of check_decode needs: one micro-batch of all lengths, packed, in fp32.
config::Run decode_check_run(config::Run run);

// The full forward of the training program against prefill and decode, with the session's weights:
// every length alone under every kind of split, and all together as packed requests. The session must
// have been made with decode_check_run and be using a setting.
std::vector<DecodeCase> check_decode(Session& session);

} // namespace gdn::trainer
