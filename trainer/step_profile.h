#pragma once
#include <map>
#include <string>

#include "config/profile.h"
#include "trainer/session.h"

namespace gdn::trainer {

// Times and kept bytes by layer kind and op, measured while steps run: the fastest of them, so that what
// disturbs one step does not count. All figures are per micro-batch and layer.
class StepProfile {
public:
  explicit StepProfile(Session& session) : session_(session) {}

  Observer observer();   // for one step
  void step_done(bool discard);    // takes the step's figures in, unless it is to be left out

  // layers.KIND.{retained_bytes, forward_seconds, backward_seconds, replay_seconds} as gdnplan predicts
  // them, and ops.KIND.OP.{forward, backward, replay}_seconds.
  void add_rows(config::ProfileSet& set) const;

private:
  std::string kind_of(int unit) const; // "gdn+moe", "embedding", "head"
  int instances(const std::string& kind) const;

  Session& session_;
  std::map<std::string, Seconds> now_, best_;  // by key of a row, one step; the fastest step
  std::map<std::string, Bytes> retained_;      // by kind
  Bytes before_ = 0;                           // activations at the entry of a unit's forward
};

} // namespace gdn::trainer
