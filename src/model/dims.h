#pragma once
#include <cstdint>

#include "config/model.h"
#include "config/run.h"

namespace gdn::model {

// Row and head counts of one rank, shared by every op list (megatron-core's conventions).
struct Dims {
  std::int64_t tp, cp, ep, etp;
  bool sp;
  std::int64_t tokens;      // N = s*b/cp: rows of head-shaped tensors
  std::int64_t tokens_sp;   // N_sp: rows of hidden-shaped tensors, N/tp with sequence parallelism
  std::int64_t rule_tokens; // s*b: rows after the exchange to [s, heads/cp]
  std::int64_t seq, batch;
  std::int64_t attention_keys; // twice the mean number of keys a query reads: seq; of packed documents sum(L^2)/sum(L)
  std::int64_t chunks;         // of 64 tokens, every document starting a new one
  std::int64_t sequences;      // of a micro-batch at most: most_sequences
  std::int64_t hidden, padded_vocab, local_vocab;
  std::int64_t routed_rows; // T': rows entering the experts' FC1 on this rank (planned value)
  DType dtype;

  // Throws Error{Config} where document_lengths do not fill seq_length or are more than max_documents, and where
  // max_documents is given for a run that is not packed.
  static Dims of(const config::Model& model, const config::Run& run);
};

// Sequences that a micro-batch of `run` may consist of, and that scratch has room for: micro_batch_size, or of a packed run
// max_documents; where that is not given as many as document_lengths lists, else one for every 64 tokens, 64 at least. No
// more than there are tokens.
std::int64_t most_sequences(const config::Run& run);

} // namespace gdn::model
