#include "model/dims.h"

#include <algorithm>
#include <cmath>

#include <fmt/core.h>

#include "core/error.h"
#include "core/units.h"

namespace gdn::model {

namespace {

// Documents of a packed row. Zig-zag context parallelism gives every rank an equal part of each document;
// cut contiguously, the rank that reads most keys is the busiest.
void pack(const config::Run& run, Dims& d) {
  std::int64_t total = 0, chunks = 0, documents = 0;
  double pairs = 0;
  std::vector<double> by_rank(static_cast<size_t>(d.cp), 0);
  const bool contiguous = d.cp > 1 && run.settings.cp_partition == "contiguous";
  const std::int64_t share = run.seq / d.cp;
  for (const config::Documents& doc : run.documents)
    for (std::int64_t i = 0; i < doc.count; ++i) {
      for (std::int64_t at = 0; contiguous && at < doc.length;) { // the part of each rank
        const std::int64_t rank = std::min((total + at) / share, d.cp - 1);
        const std::int64_t end = rank == d.cp - 1 ? doc.length : std::min(doc.length, (rank + 1) * share - total);
        by_rank[static_cast<size_t>(rank)] += 0.5 * static_cast<double>(end * end - at * at);
        at = end;
      }
      total += doc.length;
      chunks += ceil_div(doc.length, 64);
      ++documents;
      pairs += 0.5 * static_cast<double>(doc.length) * static_cast<double>(doc.length);
    }
  if (total != run.seq)
    throw Error(ErrorCode::Config, fmt::format("document_lengths add up to {} tokens, seq_length is {}", total, run.seq),
                "a packed row is filled by its documents, padding is one of them");
  if (documents > run.max_documents.value_or(documents))
    throw Error(ErrorCode::Config, fmt::format("document_lengths lists {} documents, max_documents is {}", documents, *run.max_documents));
  if (contiguous) pairs = *std::max_element(by_rank.begin(), by_rank.end()) * static_cast<double>(d.cp);
  d.attention_keys = static_cast<std::int64_t>(std::ceil(2 * pairs / static_cast<double>(run.seq)));
  d.chunks = chunks;
}

} // namespace

std::int64_t most_sequences(const config::Run& run) {
  if (!run.settings.packed && run.documents.empty()) return run.micro_batch;
  const std::int64_t tokens = checked_mul(run.seq, run.micro_batch);
  std::int64_t listed = 0;
  for (const config::Documents& d : run.documents) listed += d.count;
  const std::int64_t usual = listed > 0 ? listed : std::max<std::int64_t>(ceil_div(tokens, 64), 64);
  return std::min(run.max_documents.value_or(usual), tokens);
}

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
  d.attention_keys = run.seq;
  d.chunks = d.batch * ceil_div(d.seq, 64);
  if (run.max_documents && !run.settings.packed && run.documents.empty())
    throw Error(ErrorCode::Config, fmt::format("max_documents = {}: the micro-batches are not packed", *run.max_documents),
                "it bounds the documents of a packed micro-batch: set packed = true or document_lengths, or leave it out");
  d.sequences = most_sequences(run);
  if (!run.documents.empty()) pack(run, d);
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
    } else if (run.moe_worst_case) { // every token of every rank on as many of these experts as it can choose
      d.routed_rows = d.tokens_sp * std::min(model.moe.top_k, model.moe.experts / p.ep) * p.ep * p.etp;
    } else { // balanced T' = T k etp, times the planned imbalance
      d.routed_rows = static_cast<std::int64_t>(
          std::ceil(static_cast<double>(d.tokens_sp * model.moe.top_k * p.etp) * run.moe_imbalance));
    }
  }
  d.dtype = run.dtype;
  return d;
}

} // namespace gdn::model
