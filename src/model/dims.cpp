#include "model/dims.h"

#include <cmath>

#include "core/units.h"

namespace gdn::model {

Dims Dims::of(const config::Model& model, const config::Run& run) {
  const config::Parallel& p = run.parallel;
  Dims d{};
  d.tp = p.tp;
  d.cp = p.cp;
  d.ep = p.ep;
  d.etp = p.etp;
  d.sp = p.sequence_parallel && p.tp > 1;
  d.seq = run.seq;
  d.batch = run.micro_batch;
  d.rule_tokens = checked_mul(run.seq, run.micro_batch);
  d.tokens = d.rule_tokens / p.cp;
  d.tokens_sp = d.sp ? d.tokens / p.tp : d.tokens;
  d.hidden = model.hidden;
  // megatron-core pads the vocabulary to make_vocab_size_divisible_by (128) x TP.
  const std::int64_t divisor = run.vocab_divisor.value_or(128) * p.tp;
  d.padded_vocab = divisor > 0 ? round_up(model.vocab, divisor) : model.vocab;
  d.local_vocab = d.padded_vocab / p.tp;
  if (model.moe.experts > 0) {
    if (run.moe_capacity_factor) { // padded: exact at capacity * E_local * etp * ep
      const double per_expert = std::ceil(static_cast<double>(d.tokens_sp * model.moe.top_k) /
                                          static_cast<double>(model.moe.experts) * *run.moe_capacity_factor);
      d.routed_rows = static_cast<std::int64_t>(per_expert) * (model.moe.experts / p.ep) * p.etp * p.ep;
    } else { // balanced T' = T k etp, times the planned imbalance
      d.routed_rows = static_cast<std::int64_t>(
          std::ceil(static_cast<double>(d.tokens_sp * model.moe.top_k * p.etp) * run.moe_imbalance));
    }
  }
  d.dtype = run.dtype;
  return d;
}

} // namespace gdn::model
