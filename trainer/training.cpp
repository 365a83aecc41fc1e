#include "trainer/training.h"

#include <chrono>
#include <cmath>

#include <fmt/format.h>

#include "core/error.h"
#include "model/flops.h"

namespace gdn::trainer {

Training::Training(Session& session, const config::Train& train, const Tokens& tokens)
    : session_(session), train_(train), tokens_(tokens) {
  const config::Run& run = session.run_settings();
  model_flops_ = model::model_flops_per_token(session.model(), run.seq, run.train_mtp).training() *
                 static_cast<double>(run.global_batch * run.seq);
  session.parameters().initialise(train.seed);
}

StepRecord Training::step(const Observer& observer) {
  const auto start = std::chrono::steady_clock::now();
  StepRecord r;
  r.step = done_ + 1;
  r.steps = train_.steps;
  r.warm_up = done_ == 0;
  r.learning_rate = train_.learning_rate(r.step);
  r.model_flops = model_flops_;
  const auto index = static_cast<std::uint64_t>(done_);
  r.result = session_.run(step_batches(tokens_, session_.run_settings(), index), index, train_.seed, observer);
  if (!std::isfinite(r.result.loss))
    throw Error(ErrorCode::Numeric, fmt::format("step {}: the loss is {}", r.step, r.result.loss), "a smaller learning rate, or a longer warm-up");
  UpdateSettings u{r.learning_rate, train_.beta1, train_.beta2, train_.eps, train_.weight_decay, train_.clip_grad, r.step};
  r.gradient_norm = session_.parameters().update(u);
  if (!std::isfinite(r.gradient_norm))
    throw Error(ErrorCode::Numeric, fmt::format("step {}: the gradient norm is {}; the weights are those of the step before", r.step, r.gradient_norm));
  session_.device().synchronise();
  r.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  ++done_;
  return r;
}

} // namespace gdn::trainer
