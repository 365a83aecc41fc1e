#pragma once
#include <cstdint>
#include <vector>

#include "config/model.h"
#include "config/run.h"
#include "trainer/decode/states.h"
#include "trainer/device.h"

namespace gdn::trainer {

// The states of every layer for `slots` requests, in one allocation. Layer after layer, each dense and
// aligned (states.h has the shapes):
//   GDN and GDN2   conv [slots * channels, taps], recurrent [slots * value_heads * key_dim, value_dim]
//   attention      keys [slots * capacity, kv_heads * head_dim], values likewise
// A request keeps its slot for life; passes name slots, so the pool never moves.
class StatePool {
public:
  // `capacity`: tokens of one request. Throws Error{DoesNotFit}.
  StatePool(const config::Model& model, const config::Run& run, Device& device, std::int64_t slots, std::int64_t capacity);

  std::int64_t slots() const { return static_cast<std::int64_t>(lengths_.size()); }
  std::int64_t capacity() const { return capacity_; }
  Bytes bytes() const { return memory_.bytes(); }
  Bytes slot_bytes() const { return memory_.bytes() / slots(); }

  std::int64_t length(std::int64_t slot) const { return lengths_.at(static_cast<size_t>(slot)); } // tokens seen
  void set_length(std::int64_t slot, std::int64_t tokens) { lengths_.at(static_cast<size_t>(slot)) = tokens; }
  // A new request: no token seen, states zero.
  void reset(std::int64_t slot);

  // The pools of a decoder layer; slots and positions are the caller's.
  const SequenceStates& layer(std::int64_t layer) const { return layers_.at(static_cast<size_t>(layer)); }

private:
  Device& device_;
  std::int64_t capacity_;
  std::vector<std::int64_t> lengths_;
  std::vector<SequenceStates> layers_;
  DeviceMemory memory_;
};

} // namespace gdn::trainer
