#pragma once
#include <functional>
#include <vector>

#include "trainer/data.h"
#include "trainer/setup.h"
#include "trainer/telemetry.h"

namespace gdn::trainer {

// Steps of a training run: data, forward and backward, clipping, update.
class Training {
public:
  // `session` must be using the setting to run; its weights are initialised here from the seed.
  Training(Session& session, const config::Train& train, const Tokens& tokens);

  // One step. Throws Error{Numeric} when loss or gradient norm is not finite, with the last loss that
  // was; the weights are then those of the step before.
  StepRecord step(const Observer& observer = {});
  std::int64_t done() const { return done_; } // steps so far
  // Goes on after `steps` steps, whose weights and moments the session holds already.
  void resume(std::int64_t steps) { done_ = first_ = steps; }
  bool finished() const { return done_ >= train_.steps; }

private:
  Session& session_;
  const config::Train& train_;
  const Tokens& tokens_;
  Flops model_flops_ = 0; // of a step, a rank
  std::int64_t done_ = 0, first_ = 0; // steps; those done before this process
  double last_loss_ = 0;  // of step done_

  [[noreturn]] void stop_not_finite(const StepRecord& record, const char* what, double value) const;
};

} // namespace gdn::trainer
