#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "trainer/decode/forward_pass.h"
#include "trainer/decode/state_pool.h"

namespace gdn::trainer {

// Tokens that a request appends.
struct NewTokens {
  std::int64_t slot = 0;
  std::vector<std::int64_t> ids = {};
};

// Inference with a model's weights: prompts and single tokens of any mix of requests in one pass. Prompts
// go through the chunked rule, single tokens through the recurrence; a prompt may come in pieces. Where the device
// records passes, one of single tokens is recorded the first time that many requests have one, and replayed from then on.
class Decoder {
public:
  // Model, run, device and parameters must outlive it. See ForwardPass for what it refuses.
  Decoder(const config::Model& model, const config::Run& run, Device& device, Parameters& parameters, std::int64_t slots, std::int64_t capacity);

  StatePool& pool() { return pool_; }
  // Whether passes of single tokens are replayed; where the device records, they are unless this says no.
  bool replays() const { return replays_; }
  void replay(bool wanted) { replays_ = wanted && device_.records(); }

  // Logits of every new token, [tokens, vocabulary], request after request. Throws Error{Config}: a slot
  // that is not there or named twice, ids outside the vocabulary, a request longer than the capacity,
  // no token at all (single requests may have none).
  std::vector<float> append(std::span<const NewTokens> requests);

  // As append, keeping the states after every new token: rewind(slot, n) then forgets all but the first n of
  // that request's tokens in this pass (a draft that was not accepted).
  std::vector<float> append_draft(std::span<const NewTokens> requests);
  void rewind(std::int64_t slot, std::int64_t accepted);

private:
  struct Draft { // the last append_draft
    std::vector<NewTokens> requests;
    std::vector<std::int64_t> offsets;   // of their tokens
    std::vector<std::int64_t> positions; // before it
    std::vector<SequenceStates> layers;  // token_conv and token_recurrent of each
    DeviceMemory memory;
  };
  struct Step { // a recorded pass of one token each
    std::unique_ptr<Recording> recording = {};
    View logits = {};
  };
  std::vector<float> pass(std::span<const NewTokens> requests, Draft* draft);
  View replayed(const MicroBatch& batch, const ForwardPass::StatesOf& states_of);
  void check(std::span<const NewTokens> requests) const;
  void reserve(Draft& draft, std::int64_t tokens);

  const config::Model& model_;
  Device& device_;
  ForwardPass forward_, recorded_; // recorded passes work in memory of their own
  StatePool pool_;
  bool replays_ = false;
  std::map<std::int64_t, Step> steps_ = {}; // by the number of requests
  std::optional<Draft> draft_ = {};
};

} // namespace gdn::trainer
