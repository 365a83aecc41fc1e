#include "trainer/training.h"

#include <chrono>
#include <cmath>

#include <fmt/core.h>

#include "core/error.h"
#include "model/flops.h"

namespace gdn::trainer {

Training::Training(Session& session, const config::Train& train, const Tokens& tokens)
    : session_(session), train_(train), tokens_(tokens) {
  const config::Run& run = session.run_settings();
  model_flops_ = model::model_flops_per_token(session.model(), run.seq, run.train_mtp).training() *
                 static_cast<double>(run.global_batch * run.seq) / static_cast<double>(session.ranks().size());
  session.parameters().initialise(train.seed);
}

StepRecord Training::step(const Observer& observer) {
  const auto start = std::chrono::steady_clock::now();
  StepRecord r;
  r.step = done_ + 1;
  r.steps = train_.steps;
  r.warm_up = done_ == first_;
  r.learning_rate = train_.learning_rate(r.step);
  r.model_flops = model_flops_;
  const auto index = static_cast<std::uint64_t>(done_);
  r.result = session_.run(step_batches(tokens_, session_.run_settings(), index, session_.ranks().place().dp), index, train_.seed, observer);
  if (!std::isfinite(r.result.loss)) stop_not_finite(r, "loss", r.result.loss);
  UpdateSettings u{r.learning_rate, train_.beta1, train_.beta2, train_.eps, train_.weight_decay, train_.clip_grad, r.step};
  r.gradient_norm = session_.parameters().update(u);
  if (!std::isfinite(r.gradient_norm)) stop_not_finite(r, "gradient norm", r.gradient_norm);
  session_.device().synchronise();
  r.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  ++done_;
  last_loss_ = r.result.loss;
  return r;
}

void Training::stop_not_finite(const StepRecord& r, const char* what, double value) const {
  throw Error(ErrorCode::Numeric,
              fmt::format("step {}: the {} is {}; {}", r.step, what, value,
                          done_ == 0 ? std::string("no step was finished")
                                     : fmt::format("the last finite loss was {:.4f} at step {}, and the weights are those after it", last_loss_, done_)),
              done_ == 0 ? "weights or data are the cause, not training: check the checkpoint, or the initialisation"
                         : fmt::format("a smaller train.lr (now {:.3g}), a longer train.warmup_steps, or gradient clipping (train.clip_grad)", r.learning_rate));
}

} // namespace gdn::trainer
